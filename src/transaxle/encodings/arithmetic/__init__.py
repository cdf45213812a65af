"""The arithmetic of number formats: computes values from codes and scales, and codes and scales from values."""
