"""Lines bound to a model: axes sized, pieces laid out, one line set against another."""
