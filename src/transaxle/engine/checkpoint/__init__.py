"""Opening a checkpoint: recognising its family and dialect, and reading its tensors."""
