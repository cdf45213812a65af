"""What a container's metadata says of TransformerEngine's tensors.

Their buffers are named by a convention like any other's, and that is all a converted checkpoint has. The pickles say
more: which tiles scales are for, where these are none of the usual ones. Readers of pickles keep it in the metadata.
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


class _Said(msgspec.Struct):
    """What is said of one tensor."""

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
    said = msgspec.convert(metadata.get(NOTE, {}), dict[str, _Said])
    return {name: (_convention(each), _encoding(each)) for name, each in said.items()}


def _convention(said: _Said) -> str:
    return TE_HALVED if said.scale_max == CONVENTIONS[TE_HALVED].scale_max else TE


def _encoding(said: _Said) -> Encoding:
    usual = ENCODINGS[said.encoding]
    return replace(usual, code=said.codes, scale=said.scale, tile=said.tile, scale_max=said.scale_max)
