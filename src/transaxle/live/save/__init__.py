"""From memory into files."""
