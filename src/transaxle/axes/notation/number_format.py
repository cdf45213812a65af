"""Number formats: the dtype and encoding of a stored tensor, and the words by which a dialect's line asks for them.

A layout may depend on the number format: gpt-oss stores bf16 experts transposed, but not its MXFP4 codes. So a line may
end in `when mxfp4`, and another line of the same name in `when not mxfp4`. The word is true where the tensor at hand is
stored, or is about to be written, in that encoding; these words are all that the algebra knows of encodings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from transaxle.axes.inheritance.statement import ENCODINGS

PLAIN = ""
"""The encoding of a tensor whose elements are its values."""
WORDS = ENCODINGS
"""Names of the encodings in conditions. They are reserved: no axis, tensor or formula may have one of them."""


class NumberFormat(NamedTuple):
    """The dtype of a stored tensor's elements, and its encoding."""

    dtype: str
    """Safetensors code of its elements, or of its codes."""
    encoding: str = PLAIN
    """One of `WORDS`, or `PLAIN`."""


Recode = Callable[[str, NumberFormat], NumberFormat]
"""(target name, format of the source) -> format in which it is written."""


def same(_: str, form: NumberFormat) -> NumberFormat:
    """Keep every tensor's format: a change of layout changes no number."""
    return form


def words(encoding: str) -> dict[str, bool]:
    """Return the truth of each encoding's word for a tensor of this encoding."""
    return {word: word == encoding for word in WORDS}
