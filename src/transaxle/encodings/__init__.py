"""Number formats with more than one buffer: what they are, what they are called on disk, and their arithmetic."""
