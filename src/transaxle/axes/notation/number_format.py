"""Forms: as what numbers a tensor is stored, and the words by which a dialect's line asks for it.

A layout may depend on the number format: gpt-oss stores bf16 experts transposed, its MXFP4 codes not. So a line may
hold `when mxfp4`, and another line of the same name `when not mxfp4`. The word holds where the tensor at hand is
stored, or is about to be written, in that encoding; the algebra knows no more of encodings than these words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

PLAIN = ""
"""The encoding of a tensor whose elements are its values."""
WORDS = ("float8", "float8_block", "mxfp8", "mxfp4", "nvfp4")
"""Encodings by the names that conditions of lines know: reserved, no axis, tensor or formula may be called so."""


class Form(NamedTuple):
    """As what numbers a tensor is stored."""

    dtype: str
    """Safetensors code of its elements, or of its codes."""
    encoding: str = PLAIN
    """One of `WORDS`, or `PLAIN`."""


Recode = Callable[[str, Form], Form]
"""Target name, form of a source -> form in which it is written."""


def same(_: str, form: Form) -> Form:
    """Write everything as it is stored: layout changes no number."""
    return form


def words(encoding: str) -> dict[str, bool]:
    """Return what each word means for a tensor of this encoding."""
    return {word: word == encoding for word in WORDS}
