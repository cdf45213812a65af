"""Views of stored tensors: decoded, encoded or cast, and with scales in row-major order."""
