"""torch files with bytes changed: a catalog whose bytes can all be read, or one of our errors, and nothing else."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import transaxle as tx
from tests.formats.torch_file.made import FILE, records, saved, storage, view
from tests.formats.torch_file.test_legacy import legacy
from transaxle.errors import TransaxleError

CODES = {"CORRUPT", "UNSAFE_PICKLE", "UNSUPPORTED", "PATH_ESCAPE", "NAME_COLLISION"}


def survives(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, FILE)
        place.write_bytes(data)
        refused: TransaxleError | None = None
        try:
            with tx.open(place) as found:
                for tensor in found.values():
                    assert len(tensor.tobytes()) == tensor.nbytes
        except TransaxleError as error:
            refused = error
        assert refused is None or {one.code for one in refused.refusals} <= CODES
        assert [entry.name for entry in Path(folder).iterdir()] == [FILE]


def samples() -> list[bytes]:
    tensor = torch.arange(12.0).reshape(3, 4)
    what = {"model": {"w": tensor, "t": tensor.t(), "e": torch.zeros(0)}, "epoch": 3, "name": "x"}
    made = []
    for new in (True, False):
        file = io.BytesIO()
        torch.save(what, file, _use_new_zipfile_serialization=new)
        made.append(file.getvalue())
    return [*made, saved({"w": view(), "v": view(storage("1", None, 4))}, {"0": bytes(16), "1": b"abcd"}), legacy()]


numbers = st.sampled_from([0, 1, 4, 8, 16, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1])


@given(st.data(), st.sampled_from(samples()))
@settings(max_examples=600)
def test_changed_files(choice: st.DataObject, data: bytes) -> None:
    changed = bytearray(data)
    for _ in range(choice.draw(st.integers(1, 4))):
        at = choice.draw(st.integers(0, max(len(changed) - 1, 0)))
        kind = choice.draw(st.sampled_from(["bit", "byte", "number", "cut", "insert", "copy"]))
        if kind == "bit" and changed:
            changed[at] ^= 1 << choice.draw(st.integers(0, 7))
        elif kind == "byte" and changed:
            changed[at] = choice.draw(st.integers(0, 255))
        elif kind == "number":
            size = choice.draw(st.sampled_from([2, 4, 8]))
            changed[at : at + size] = choice.draw(numbers).to_bytes(8, "little")[:size]
        elif kind == "cut":
            del changed[at : at + choice.draw(st.integers(1, 64))]
        elif kind == "insert":
            changed[at:at] = choice.draw(st.binary(max_size=16))
        else:
            start = choice.draw(st.integers(0, max(len(changed) - 1, 0)))
            changed[at:at] = changed[start : start + 40]
    survives(bytes(changed))


@given(st.binary())
@settings(max_examples=100)
def test_bytes(data: bytes) -> None:
    survives(b"PK\3\4" + data)
    survives(b"\x80\2" + data)


sizes = st.integers(0, 6) | st.sampled_from([-1, 2**40, 2**63, True, None, "4"])


@given(
    offset=sizes,
    shape=st.lists(sizes, max_size=3).map(tuple),
    strides=st.lists(sizes, max_size=3).map(tuple),
    count=sizes,
    held=st.integers(0, 40),
    kind=st.sampled_from([None, "float32", "int8", "complex128"]),
)
@settings(max_examples=400)
def test_views_of_every_kind(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], count: int, held: int, kind: str | None
) -> None:
    what = view(storage("0", kind, count), offset, shape, strides)
    survives(saved({"w": what, "v": view(storage("0", kind, count), 0, (1,), (1,))}, {"0": bytes(held)}))
    assert records({"w": what})
