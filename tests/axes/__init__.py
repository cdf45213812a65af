"""The algebra of layouts, compared with torch and with plain walks over indices."""
