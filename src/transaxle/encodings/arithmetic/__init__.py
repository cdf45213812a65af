"""The arithmetic of number formats: from codes and scales to values, and back."""
