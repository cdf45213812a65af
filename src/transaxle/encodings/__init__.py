"""Number formats that store a tensor in several buffers (codes and scales): definitions, names on disk, arithmetic."""
