"""From files into memory."""
