"""TransformerEngine tensors as a container's metadata describes them.

A convention names their buffers like any other's, and a converted checkpoint has no more than that. The pickles say
more: the tiles that scales cover, where these are unusual. Readers of pickles keep it in the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import msgspec

from transaxle.encodings.conventions.convention import CONVENTIONS, TE, TE_HALVED
from transaxle.encodings.encoding import ENCODINGS, Encoding

NOTE = "transformer_engine"
"""Key of the metadata."""


class _TensorNote(msgspec.Struct):
    """The metadata's note of one tensor."""

    encoding: Literal["float8", "float8_block", "mxfp8", "nvfp4"]
    codes: str
    scale: str
    tile: tuple[int, int]
    scale_max: int


def described(metadata: Mapping[str, object]) -> Mapping[str, tuple[str, Encoding]]:
    """Return the convention and the encoding of each tensor that the metadata lists, by name.

    Raises:
        ValueError: for metadata that no reader of ours has made.
    """
    notes = msgspec.convert(metadata.get(NOTE, {}), dict[str, _TensorNote])
    return {name: (_convention(note), _encoding(note)) for name, note in notes.items()}


def _convention(note: _TensorNote) -> str:
    return TE_HALVED if note.scale_max == CONVENTIONS[TE_HALVED].scale_max else TE


def _encoding(note: _TensorNote) -> Encoding:
    usual = ENCODINGS[note.encoding]
    return replace(usual, code=note.codes, scale=note.scale, tile=note.tile, scale_max=note.scale_max)
