"""The form before 1.6: what torch writes when asked, and what lies about itself."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.formats.torch_file.made import FILE, octets, opened, view
from transaxle.errors import Code, TransaxleError
from transaxle.formats.pickled.descriptors import DType, Persistent, StorageType, TensorRef
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.torch_file.saved import MAGIC

PROTOCOL = 1001
SYSTEM = {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
BYTES = bytes(range(16))


def storage(key: str = "7", count: int = 4, part: Any = None, dtype: str = "float32") -> Persistent:
    return Persistent(("storage", StorageType(DType(dtype)), key, "cpu", count, part))


def weight(**more: Any) -> dict[str, TensorRef]:
    return {"w": view(storage(**more))}


def stored(*parts: tuple[int, bytes]) -> bytes:
    return b"".join(struct.pack("<q", count) + data for count, data in parts)


def legacy(
    value: Any = None,
    keys: Any = ("7",),
    data: bytes | None = None,
    *,
    magic: Any = MAGIC,
    protocol: Any = PROTOCOL,
    system: Any = None,
) -> bytes:
    listed = list(keys) if isinstance(keys, tuple) else keys
    head = [magic, protocol, SYSTEM if system is None else system, weight() if value is None else value, listed]
    return b"".join(map(write_pickle, head)) + (stored((4, BYTES)) if data is None else data)


def test_a_good_one(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(legacy())
    assert torch.load(tmp_path / FILE, weights_only=True)["w"].numpy().tobytes() == BYTES
    container = opened(tmp_path, legacy())
    assert octets(container, "w") == BYTES
    assert container.checksums == ()


def test_views_of_storages(tmp_path: Path) -> None:
    """torch up to 0.3 saved a part of a storage as a storage of its own; torch still reads such files."""
    value = {
        "whole": view(storage()),
        "first": view(storage(part=("8", 0, 2)), shape=(2,)),
        "last": view(storage(part=("9", 1, 3)), offset=1, shape=(2,)),
        "again": view(storage(part=("9", 1, 3)), shape=(2,), strides=(2,)),
        "none": view(storage(part=("10", 4, 0)), shape=(0,)),
    }
    data = legacy(value)
    (tmp_path / FILE).write_bytes(data)
    held = torch.load(tmp_path / FILE, weights_only=True)
    with tx.open(tmp_path / FILE) as checkpoint:
        found = {name: tensor.tobytes() for name, tensor in checkpoint.items()}
    assert found == {name: tensor.contiguous().numpy().tobytes() for name, tensor in held.items()}
    assert found["last"] == BYTES[8:16]


LIES: dict[str, tuple[bytes, Code, str]] = {
    "no storages are listed": (legacy(keys=(), data=b""), "CORRUPT", "which the file does not hold"),
    "a storage that no tensor refers to": (
        legacy(keys=("7", "8"), data=stored((4, BYTES), (4, BYTES))), "CORRUPT", "'8', which no tensor uses"),
    "another storage": (legacy(keys=("8",)), "CORRUPT", "which no tensor uses"),
    "a storage twice": (legacy(keys=("7", "7"), data=stored((4, BYTES), (4, BYTES))), "CORRUPT", "twice"),
    "keys that are numbers": (legacy(keys=(7,)), "CORRUPT", "list of storages"),
    "no list of keys": (legacy(keys={"7": 1}), "CORRUPT", "list of storages"),
    "more elements": (legacy(data=stored((5, BYTES + bytes(4)))), "CORRUPT", "5 elements; the pickle says 4"),
    "fewer elements": (legacy(data=stored((3, BYTES[:12]))), "CORRUPT", "3 elements; the pickle says 4"),
    "less than none": (legacy(data=stored((-4, BYTES))), "CORRUPT", "-4 elements"),
    "a cut storage": (legacy(data=stored((4, BYTES[:-1]))), "CORRUPT", "truncated"),
    "no storage": (legacy(data=b""), "CORRUPT", "outside"),
    "half a size": (legacy(data=b"\4\0\0"), "CORRUPT", "outside"),
    "something at the end": (legacy(data=stored((4, BYTES)) + b"x"), "CORRUPT", "1 bytes of the file belong to"),
    "a storage of a terabyte": (
        legacy(weight(count=1 << 38), data=stored((1 << 38, BYTES))), "CORRUPT", "truncated"),
    "no magic number": (legacy(magic=5), "UNSUPPORTED", "not one that torch wrote"),
    "a magic text": (legacy(magic="torch"), "UNSUPPORTED", "not one that torch wrote"),
    "another protocol": (legacy(protocol=1002), "CORRUPT", "protocol version"),
    "a protocol that is true": (legacy(protocol=[True]), "CORRUPT", "protocol version"),
    "no system": (legacy(system=[]), "CORRUPT", "system"),
    "a system without its order": (legacy(system={"x": 1}), "CORRUPT", "system"),
    "big-endian": (legacy(system={"little_endian": False}), "UNSUPPORTED", "big-endian"),
    "a view beyond its storage": (legacy(weight(part=("8", 1, 4))), "CORRUPT", "lies outside the storage '7'"),
    "a view before its storage": (legacy(weight(part=("8", -1, 4))), "CORRUPT", "lies outside the storage '7'"),
    "a view of less than nothing": (legacy(weight(part=("8", 2, -1))), "CORRUPT", "lies outside the storage '7'"),
    "a view of a true size": (legacy(weight(part=("8", 0, True))), "CORRUPT", "lies outside the storage '7'"),
    "a tensor beyond its view": (legacy(weight(part=("8", 1, 3))), "CORRUPT", "ends at byte 16 of storage '8'"),
    "a view without a key": (legacy(weight(part=(8, 0, 4))), "CORRUPT", "view of storage '7' is malformed"),
    "a view of two numbers": (legacy(weight(part=("8", 0))), "CORRUPT", "view of storage '7' is malformed"),
    "a view with a path for a name": (legacy(weight(part=("../8", 0, 4))), "CORRUPT", "not the name of a view"),
    "a view that is its storage": (legacy(weight(part=("7", 0, 4))), "CORRUPT", "is both a storage and a view"),
    "a view that is two": (
        legacy([view(storage(part=("8", 0, 2)), shape=(2,)), view(storage(part=("8", 2, 2)), shape=(2,))]),
        "CORRUPT", "two different parts of storages"),
    "a storage of a new file": (
        legacy({"w": view(Persistent(("storage", StorageType(None), "7", "cpu", 4)))}), "CORRUPT", "not a storage"),
    "a view that is too long": (legacy({"w": view(storage(), shape=(5,))}), "CORRUPT", "ends at byte 20"),
    "a pickle of something else": (pickle.dumps([1, 2, 3]), "UNSUPPORTED", "not one that torch wrote"),
    "a pickle that is cut": (legacy()[:100], "CORRUPT", "pickle"),
    "a global": (
        b"".join(map(write_pickle, [MAGIC, PROTOCOL, SYSTEM])) + b"cos\nsystem\n(S'x'\ntR.",
        "UNSAFE_PICKLE",
        "os.system",
    ),
    "a global instead of the keys": (
        b"".join(map(write_pickle, [MAGIC, PROTOCOL, SYSTEM, {}])) + b"cos\nsystem\n.", "UNSAFE_PICKLE", "os.system"),
    "a global instead of the magic number": (b"\x80\x02cos\nsystem\n.", "UNSAFE_PICKLE", "os.system"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "code", "said"), LIES.values(), ids=LIES.keys())
def test_what_is_refused(tmp_path: Path, data: bytes, code: Code, said: str) -> None:
    with pytest.raises(TransaxleError) as caught:
        opened(tmp_path, data)
    assert (caught.value.code, caught.value.where.file) == (code, FILE)
    assert said in str(caught.value)


def test_every_cut(tmp_path: Path) -> None:
    data = legacy()
    for size in range(len(data)):
        with pytest.raises(TransaxleError) as caught:
            opened(tmp_path, data[:size])
        assert caught.value.code == "CORRUPT"


@pytest.mark.parametrize("size", [900_000, 1_048_000, 3_000_000, 9_000_000])
def test_pickles_of_any_length(tmp_path: Path, size: int) -> None:
    """The head is read in growing parts; wherever the first one ends, nothing is lost."""
    what = {"w": torch.arange(5.0), "note": "x" * size, "v": torch.arange(3)}
    torch.save(what, tmp_path / FILE, _use_new_zipfile_serialization=False)
    container = opened(tmp_path, (tmp_path / FILE).read_bytes())
    assert octets(container, "w") == torch.arange(5.0).numpy().tobytes()
    assert container.metadata == {"left_behind": {"note": "str"}}


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_protocol(tmp_path: Path, protocol: int) -> None:
    what = {"w": torch.arange(5.0), "u": torch.arange(4, dtype=torch.uint8)}
    torch.save(what, tmp_path / FILE, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    container = opened(tmp_path, (tmp_path / FILE).read_bytes())
    assert octets(container, "w") == what["w"].numpy().tobytes()
    torch.save(what, tmp_path / FILE, pickle_protocol=protocol)
    assert octets(opened(tmp_path, (tmp_path / FILE).read_bytes()), "u") == bytes(range(4))


def test_numbers_as_text(tmp_path: Path) -> None:
    """Protocol 1 has no steps for large integers and for truth."""
    what = {"u": torch.arange(4, dtype=torch.uint8), "seed": 1 << 70, "done": True}
    torch.save(what, tmp_path / FILE, pickle_protocol=1)
    assert octets(opened(tmp_path, (tmp_path / FILE).read_bytes()), "u") == bytes(range(4))
