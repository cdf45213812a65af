"""What ranks tell each other arrives as it was; and bytes of a stranger run nothing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import transaxle as tx
from transaxle.axes.geometry.chunk import Replicated, Shard, StridedShard
from transaxle.encodings.encoding import FLOAT8, Encoded, Role
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.catalog.catalog import Checksum
from transaxle.formats.catalog.checksums import Tally
from transaxle.live.load import shared_source  # noqa: F401 - puts its records on the list
from transaxle.live.model import published_codes  # noqa: F401
from transaxle.live.transport import wire
from transaxle.live.transport.shared_memory import Address
from transaxle.torch_tensors.placement import Placement

_KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary())
_VALUES = st.recursive(
    _KEYS | st.floats(allow_nan=False),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(_KEYS, inner), st.sets(_KEYS),
        st.frozensets(_KEYS),
    ),
    max_leaves=30,
)  # fmt: skip


@given(_VALUES)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    heard = wire.decode(wire.encode(value))
    assert heard == value
    assert repr(heard) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple)
    assert type(heard) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        Placement((2, 2), (0, 1, 2, 3), ((0, Shard()), (1, StridedShard(2))), (((0, 3),), ((1, 2),))),
        Placement((1,), (4,), ((None, Replicated()),), apart=True, spare=True, padded=True),
        Address(7, 3, "/memfd:x (deleted)"),
        {Checksum("a", 0, 9, 1 << 31, "a record"): Tally([(0, 9, 5)], read=9, share=1 << 200)},
        Encoded("w", FLOAT8, (4, 4), {Role.CODES: "w", Role.SCALE: "w_scale"}, "te"),
        [torch.bfloat16, torch.float8_e4m3fn],
        {(1, 2): frozenset({((0, 1),)})},
    ],
    ids=lambda value: type(value).__name__,
)
def test_records_arrive_as_they_were(value: Any) -> None:
    heard = wire.decode(wire.encode(value))
    assert heard == value
    assert type(heard) is type(value)


def test_errors_arrive_with_all_that_they_say() -> None:
    refusals = [Refusal("IO", "no", Where("f", "t"), "wait"), Refusal("CORRUPT", "bad", detail=lambda: None)]
    error = gathered(refusals)
    heard = wire.decode(wire.encode((error, [])))[0]
    assert type(heard) is tx.errors.StorageError
    assert heard.refusals == error.refusals
    assert str(heard) == str(error)


@pytest.mark.parametrize("array", [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 2), np.int64)])
def test_arrays_arrive_as_they_were(array: np.ndarray) -> None:
    heard = wire.decode(wire.encode(array))
    assert (heard.dtype, heard.shape) == (array.dtype, array.shape)
    assert np.array_equal(heard, array)
    heard[...] = 1  # it is the reader's own
    assert wire.decode(wire.encode(np.float32(1.5))) == np.float32(1.5)


def test_what_cannot_be_told_is_said_to_the_one_who_tells() -> None:
    for value in (object(), Path("x"), torch.zeros(1), np.array([object()]), {"a": [lambda: None]}):
        with pytest.raises(TypeError, match="ranks tell each other plain data"):
            wire.encode(value)
    assert wire.decode(wire.encode({"a": Path("x")}, str)) == {"a": "x"}
    with pytest.raises(TypeError, match="is no record"):
        wire.tellable(os.stat_result)


class _Canary:
    """An object whose pickle makes a folder where it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def _hostile(folder: Path) -> list[bytes]:
    """Bytes that a stranger might send: pickles, classes that are not on the list, records of other fields, depth."""
    pack = msgspec.msgpack.encode
    kind = wire._Kind
    deep: Any = 0
    for _ in range(500):
        deep = [0, deep]
    return [
        pickle.dumps(_Canary(folder)),
        pickle.dumps(_Canary(folder), 0),
        pack([kind.RECORD, "posix.mkdir", str(folder)]),
        pack([kind.RECORD, "os.mkdir", str(folder)]),
        pack([kind.RECORD, "transaxle.live.transport.shared_memory.Region", 5]),
        pack([kind.RECORD, "transaxle.live.transport.shared_memory.Address", 1]),
        pack([kind.DTYPE, "load"]),
        pack([kind.ARRAY, "O", 1, bytes(8)]),
        pack([kind.ARRAY, "<f4", 1 << 40, bytes(4)]),
        pack([kind.ERROR, "no refusal"]),
        pack([kind.ERROR]),
        pack([kind.DICT, 1]),
        pack([kind.SET, [kind.LIST]]),
        pack([99]),
        pack([]),
        pack({"a": 1}),
        pack(deep) + b"x",
        b"",
        b"\xc7",
    ]


def test_bytes_of_a_stranger_run_nothing(tmp_path: Path) -> None:
    """Pickles of a canary, and everything else that `encode` does not write, are refused."""
    canary = tmp_path / "canary"
    for octets in _hostile(canary):
        with pytest.raises(tx.TransaxleError) as found:
            wire.decode(octets)
        assert found.value.code == "CORRUPT", octets
    assert not canary.exists()
    pickle.loads(pickle.dumps(_Canary(canary)))  # noqa: S301 - the canary sings where it is unpickled
    assert canary.exists()
    assert wire.decode(wire.encode(refuse("IO", "x"))).code == "IO"
