"""Opening a checkpoint: recognising its model family and the dialect of its tensor names, and reading its tensors."""
