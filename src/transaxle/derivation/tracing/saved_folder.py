"""The tensors of a folder of safetensors files, read by the peer's own library and not by ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Tensor = TypeVar("Tensor")


def loaded(folder: Path, load_file: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of all files in a folder by name.

    Args:
        folder: where they are.
        load_file: the reader of one file: that of `safetensors.numpy` or `safetensors.torch`.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors
