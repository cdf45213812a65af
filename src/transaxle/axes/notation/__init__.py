"""The notation: names, expressions, families, and the tables that contain them."""
