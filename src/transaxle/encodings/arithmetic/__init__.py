"""The arithmetic of number formats: codes and scales in, values out, and back."""
