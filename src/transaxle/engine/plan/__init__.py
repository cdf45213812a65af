"""Planning a conversion, completely, before any byte is moved."""
