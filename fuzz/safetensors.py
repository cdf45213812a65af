"""Fuzzing the reader of safetensors with atheris: `python fuzz/safetensors.py CORPUS [-runs=200000]`.

`python fuzz/safetensors.py --seeds CORPUS` writes a few files to begin with. Whatever an input says, its tensors tile
the file, or it is refused; any other exception is a finding.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A script's own folder comes first: there this file is `safetensors`, which some library may want to import.
sys.path.append(sys.path.pop(0))

from held import Held
from target import run

from transaxle.errors import Refused
from transaxle.formats.catalog import Spec
from transaxle.formats.safetensors import draft, open_safetensors

_FILE = "fuzz.safetensors"
_CODES = {"CORRUPT", "NAME_COLLISION", "OVERLAP", "UNSUPPORTED"}


def one(data: bytes) -> None:
    """Read one input."""
    try:
        container = open_safetensors(Held(_FILE, data), _FILE, _FILE)
    except Refused as refused:
        if not {refusal.code for refusal in refused.refusals} <= _CODES:
            raise
        return
    at = 8 + int.from_bytes(data[:8], "little")
    for entry in container.entries.values():
        (extent,) = entry.extents
        assert extent.offset == at, entry
        at += entry.nbytes
    assert at == len(data), "bytes that belong to no tensor"


def seeds(folder: Path) -> None:
    """Write seed files that are valid."""
    folder.mkdir(parents=True, exist_ok=True)
    lists = [
        [Spec("a", "F32", (2, 3))],
        [Spec("a", "F4", (2, 4)), Spec("é", "BF16", ()), Spec("c", "I64", (0,)), Spec("d", "F6_E2M3", (4,))],
        [],
    ]
    for number, specs in enumerate(lists):
        plan = draft(specs, metadata={"format": "pt"})
        ((_, size),) = plan.files.items()
        data = bytearray(size)
        for fragment in plan.fragments:
            data[fragment.offset : fragment.offset + len(fragment.data)] = fragment.data
        one(bytes(data))
        folder.joinpath(f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    run(one, seeds)
