"""The text notation for model families: patterns of tensor names, expressions for layouts, families, and dialects."""
