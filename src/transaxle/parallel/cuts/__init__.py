"""Parameters and modules cut, and what crosses ranks."""
