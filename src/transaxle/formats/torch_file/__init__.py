"""Files that `torch.save` writes: read without torch and without unpickling, and written so that torch loads them."""
