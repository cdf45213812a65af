"""An open checkpoint: its family, dialect and axes recognised, its tensors readable."""
