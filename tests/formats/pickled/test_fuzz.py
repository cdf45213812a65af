"""Arbitrary bytes, and real pickles with bytes changed: a value or one of our errors, nothing else."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.pickled.assemble import FILE, program, read
from tests.formats.pickled.test_interpreter import plain
from transaxle.errors import TransaxleError
from transaxle.formats.flattened_state import flatten
from transaxle.formats.pickled.interpreter import OPCODES, Bounds
from transaxle.formats.training_state import arrange

CODES = {"CORRUPT", "UNSAFE_PICKLE", "UNSUPPORTED", "NAME_COLLISION"}
BOUNDS = Bounds(memory=10_000_000)
NAMES = [
    "ccollections\nOrderedDict\n", "cargparse\nNamespace\n", "ctorch._utils\n_rebuild_tensor_v2\n", "ctorch\nSize\n",
    "cnumpy.core.multiarray\nscalar\n", "c__builtin__\ngetattr\n", "c_codecs\nencode\n", "cos\nsystem\n",
    "ctorch\nfloat32\n", "ctorch._tensor\n_rebuild_from_type_v2\n", "ctorch._utils\n_rebuild_parameter\n",
]  # fmt: skip


def survives(data: bytes) -> None:
    refused: TransaxleError | None = None
    try:
        arrange(flatten(read(data, bounds=BOUNDS).value, FILE), file=FILE)
    except TransaxleError as error:
        refused = error
    if refused is not None:
        assert {refusal.code for refusal in refused.refusals} <= CODES
        assert refused.where.file == FILE


@given(st.binary())
def test_bytes(data: bytes) -> None:
    survives(data)


steps = st.sampled_from(sorted(OPCODES)) | st.sampled_from(NAMES).map(str.encode)
arguments = st.sampled_from([b"", b"\0", b"\1", b"\0\0\0\0", b"\2\0\0\0ab", b"1\n", b"\1a"])


@given(
    st.lists(st.tuples(steps, arguments).map(b"".join) | plain.map(lambda what: pickle.dumps(what)[2:-1]), max_size=30)
)
@settings(max_examples=500)
def test_programs(parts: list[bytes]) -> None:
    survives(program(*parts))


class _Pickler(pickle.Pickler):
    """Leaves the storages out, as torch does."""

    def persistent_id(self, obj: Any) -> str | None:
        return "key" if isinstance(obj, torch.storage.TypedStorage) else None


def _saved() -> list[bytes]:
    tensor = torch.arange(6.0).reshape(2, 3)
    what = {"w": tensor, "t": tensor.t(), "p": torch.nn.Parameter(tensor), "n": {"a": 1, "b": [1.5, None]}}
    made = []
    for protocol in (1, 2, 4, 5):
        file = io.BytesIO()
        _Pickler(file, protocol).dump(what)
        made.append(file.getvalue())
    return made


@given(st.data(), st.sampled_from(_saved()))
@settings(max_examples=500)
def test_changed_pickles(choice: st.DataObject, data: bytes) -> None:
    changed = bytearray(data)
    for _ in range(choice.draw(st.integers(1, 5))):
        at = choice.draw(st.integers(0, len(changed) - 1))
        kind = choice.draw(st.sampled_from(["set", "cut", "insert"]))
        if kind == "set":
            changed[at] = choice.draw(st.integers(0, 255))
        elif kind == "cut":
            del changed[at : at + choice.draw(st.integers(1, 20))]
            changed = changed or bytearray(b".")
        else:
            changed[at:at] = choice.draw(st.binary(max_size=8))
    survives(bytes(changed))
