"""What a conversion will do, decided before a byte moves."""
