"""The name of this format, in a module of its own: what knows the name need not know the format."""

from __future__ import annotations

FORMAT = "safetensors"
