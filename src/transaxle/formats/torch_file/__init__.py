"""Reads and writes the files of `torch.save` and `torch.load`, without torch and without unpickling."""
