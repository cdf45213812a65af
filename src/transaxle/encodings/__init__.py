"""Number formats with several buffers: their definitions, their names on disk, and their arithmetic."""
