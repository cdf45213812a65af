"""The text of a derived table."""
