"""Views that show stored tensors decoded, encoded or cast, or show their quantization scales in row-major order."""
