"""Fuzzing the pickle interpreter with atheris: `python fuzz/pickled.py CORPUS [-runs=200000]`.

`python fuzz/pickled.py --seeds CORPUS` writes a few pickles to begin with. Whatever an input says, it becomes plain
data or is refused; any other exception, and any effect on the process, is a finding.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from target import run

from transaxle.errors import Refused
from transaxle.formats.flattened_state import flatten
from transaxle.formats.pickled.descriptors import DType, Persistent, StorageType, TensorRef
from transaxle.formats.pickled.interpreter import Bounds, read_pickle
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.training_state import arrange

_BOUNDS = Bounds(memory=20_000_000)
_CODES = {"CORRUPT", "UNSAFE_PICKLE", "UNSUPPORTED", "NAME_COLLISION"}
_FILE = "fuzz"


def one(data: bytes) -> None:
    """Read one input."""
    try:
        value = read_pickle(data, file=_FILE, bounds=_BOUNDS).value
        arrange(flatten(value, _FILE), file=_FILE)
    except Refused as refused:
        if not {refusal.code for refusal in refused.refusals} <= _CODES:
            raise


def seeds(folder: Path) -> None:
    """Write seed pickles of every protocol."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"a": [1, 2.5, -(2**70), None, True, "é", b"\xff"], "b": (1,), "c": {1, 2}, "d": 1j, "e": {"f": {}}}
    view = TensorRef(Persistent(("storage", StorageType(None), "0", "cpu", 8)), DType("uint16"), 1, (2, 2), (2, 1))
    built = [pickle.dumps(values, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    built += [write_pickle({"w": view}), b"(I1\nios\nsystem\n.", b"(cargparse\nNamespace\nI1\no}b."]
    for number, data in enumerate(built):
        folder.joinpath(f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    run(one, seeds)
