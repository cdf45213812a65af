"""The command that writes pages to look at in a browser."""
