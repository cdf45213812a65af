"""Opening a checkpoint: recognising its model family and its dialect of tensor names, and reading its tensors."""
