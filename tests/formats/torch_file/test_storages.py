"""What a pickle says of storages and views, and what is really there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transaxle as tx
from tests.formats.torch_file.made import FILE, opened, saved, storage, view
from transaxle.errors import Code, TransaxleError
from transaxle.formats.pickled.descriptors import DType, Global, Object, OrderedMap, Persistent, StorageType
from transaxle.formats.torch_file.saved import REPEATED

FLOATS = StorageType(DType("float32"))
TERABYTE = 1 << 40


def rebuilt(function: str, *args: Any) -> Object:
    return Object(Global("torch._utils", function), args)


LIES: dict[str, tuple[Any, Code, str]] = {
    "a storage that is larger than its record": (view(storage(count=5)), "CORRUPT", "record data/0 has 16 bytes"),
    "a storage that is smaller than its record": (view(storage(count=3), shape=(3,)), "CORRUPT", "data/0 has 16 bytes"),
    "doubles under the name of floats": (view(storage(dtype="float64", count=4)), "CORRUPT", "data/0 has 16 bytes"),
    "a storage that is not there": ([view(), view(storage("1"))], "CORRUPT", "record data/1, which is missing"),
    "a storage that nothing refers to": ("text", "CORRUPT", "no tensor uses the record data/0"),
    "a storage of two types": ([view(), view(storage(dtype="int32"))], "CORRUPT", "4 elements of int32"),
    "a storage of two sizes": ([view(), view(storage(count=2), shape=(2,))], "CORRUPT", "2 elements of float32"),
    "a storage of a terabyte": (view(storage(count=TERABYTE)), "CORRUPT", "record data/0 has 16 bytes"),
    "a negative storage": (view(storage(count=-4)), "CORRUPT", "impossible number"),
    "a storage beyond 64 bits": (view(storage(count=2**63)), "CORRUPT", "impossible number"),
    "a storage of a true size": (view(Persistent(("storage", FLOATS, "0", "cpu", True))), "CORRUPT", "impossible"),
    "a storage with a path for a name": (view(storage("../0")), "CORRUPT", "not the name of a storage"),
    "a storage without a name": (view(storage("")), "CORRUPT", "not the name of a storage"),
    "a storage that is a number": (view(Persistent(("storage", FLOATS, 0, "cpu", 4))), "CORRUPT", "malformed"),
    "a storage of no type": (view(Persistent(("storage", "float", "0", "cpu", 4))), "CORRUPT", "malformed"),
    "a storage of a class": (
        view(Persistent(("storage", Global("torch", "Tensor"), "0", "cpu", 4))), "CORRUPT", "malformed"),
    "a storage on no device": (view(storage(device=7)), "CORRUPT", "malformed"),
    "a storage of an old file": (
        view(Persistent(("storage", FLOATS, "0", "cpu", 4, None))), "CORRUPT", "not a storage"),
    "a short id": (view(Persistent(("storage",))), "CORRUPT", "not a storage"),
    "an id that is a text": (view(Persistent("0")), "CORRUPT", "not a storage"),
    "an id of something else": (view(Persistent(("tensor", FLOATS, "0", "cpu", 4))), "CORRUPT", "not a storage"),
    "a module": (
        Persistent(("module", Global("torch", "Tensor"), "x.py", "code")), "UNSUPPORTED", "source code of a module"),
    "a view that is too long": (view(shape=(5,)), "CORRUPT", "ends at byte 20 of storage '0', which has 16"),
    "a view that begins too late": (view(offset=1), "CORRUPT", "ends at byte 20"),
    "a view that begins a terabyte late": (view(offset=TERABYTE, shape=(1,)), "CORRUPT", "ends at byte"),
    "a view with long strides": (view(shape=(2, 2), strides=(4, 1)), "CORRUPT", "ends at byte 24"),
    "a view that overflows": (view(shape=(2**40, 2**40), strides=(0, 0)), "CORRUPT", "overflows"),
    "an empty view that overflows": (view(shape=(0, 2**62, 2**62), strides=(1, 1, 1)), "CORRUPT", "overflows"),
    "strides that overflow": (view(shape=(2, 2), strides=(2**62, 1)), "CORRUPT", "ends at byte"),
    "a terabyte from four bytes": (view(shape=(TERABYTE // 4,), strides=(0,)), "CORRUPT", "with strides of zero"),
    "a terabyte from sixteen bytes": (view(shape=(TERABYTE // 16, 4), strides=(0, 1)), "CORRUPT", "strides of zero"),
    "a terabyte in many views": (
        [view(shape=(REPEATED // 8,), strides=(0,)) for _ in range(10)], "CORRUPT", "with strides of zero"),
    "floats as doubles": (view(shape=(2,), dtype=DType("float64")), "CORRUPT", "views elements of float32 as float64"),
    "floats as words": (view(shape=(8,), dtype=DType("uint16")), "CORRUPT", "views elements of float32 as uint16"),
    "floats as bytes": (view(shape=(16,), dtype=DType("uint8")), "CORRUPT", "views elements of float32 as uint8"),
    "no storage": ([view(), view(5)], "UNSUPPORTED", "inside another pickle"),
    "a pickled storage": (
        [view(), view(Object(Global("torch.storage", "_load_from_bytes"), (b"",)))], "UNSUPPORTED", "pickle"),
    "a conjugated view": (view(flags=("conj",)), "UNSUPPORTED", "conj"),
    "a negated view": (view(flags=("neg",)), "UNSUPPORTED", "neg"),
    "a sparse tensor": (rebuilt("_rebuild_sparse_tensor", view()), "UNSUPPORTED", "sparse"),
    "a quantized tensor": (rebuilt("_rebuild_qtensor", view()), "UNSUPPORTED", "quantized"),
    "a nested tensor": (rebuilt("_rebuild_nested_tensor", view()), "UNSUPPORTED", "nested"),
    "a meta tensor": (rebuilt("_rebuild_meta_tensor_no_storage", view()), "UNSUPPORTED", "meta"),
    "a parameter without values": (
        [view(), Object(Global("torch.nn.parameter", "UninitializedParameter"))], "UNSUPPORTED", "without values"),
    "a subclass": (
        Object(Global("torch._tensor", "_rebuild_from_type_v2"),
               (Global("torch._utils", "_rebuild_tensor_v2"), Global("torch.distributed.tensor", "DTensor"),
                (storage(), 0, (4,), (1,), False, OrderedMap()), {})),
        "UNSUPPORTED",
        "one rank's part",
    ),
    "a tensor under a key that is no text": ({b"bytes": view()}, "UNSUPPORTED", "not text"),
    "a tensor under a key of two": ({(1, 2): view()}, "UNSUPPORTED", "not text"),
    "packs without dims": (
        [view(), view(storage("0", "float32"), shape=(), strides=(), dtype=None),
         view(storage("1", None, 1), shape=(), strides=(), dtype=DType("float4_e2m1fn_x2"))],
        "UNSUPPORTED",
        "a scalar of",
    ),
    "packs that do not lie along a row": (
        [view(), view(storage("1", None, 4), shape=(2, 2), strides=(1, 2), dtype=DType("float4_e2m1fn_x2"))],
        "UNSUPPORTED",
        "packed values are not along the last dim",
    ),
}  # fmt: skip
EXTRA = {"packs without dims": {"1": b"x"}, "packs that do not lie along a row": {"1": b"abcd"}}


@pytest.mark.parametrize("case", LIES)
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    said, code, message = LIES[case]
    value = said if isinstance(said, dict) else {"layers.0.weight": said}
    with pytest.raises(TransaxleError) as caught:
        opened(tmp_path, saved(value, {"0": bytes(16), **EXTRA.get(case, {})}))
    assert (caught.value.code, caught.value.where.file) == (code, FILE)
    assert message in str(caught.value)
    assert caught.value.where.tensor or "record" in str(caught.value)


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(TransaxleError) as caught:
        opened(tmp_path, saved({"a": view(shape=(5,)), "b": view(), "c": view(flags=("conj",))}))
    assert [(one.code, one.where.tensor) for one in caught.value.refusals] == [("CORRUPT", "a"), ("UNSUPPORTED", "c")]


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(TransaxleError, match="neither tensors") as caught:
        opened(tmp_path, saved("text", {}))
    assert caught.value.code == "UNSUPPORTED"


def test_views_that_are_odd_and_honest(tmp_path: Path) -> None:
    data = np.arange(4, dtype="<f4")
    value = {
        "expanded": view(shape=(3, 4), strides=(0, 1)),
        "windows": view(shape=(3, 2), strides=(1, 1)),
        "empty, far away": view(offset=TERABYTE, shape=(0, 3), strides=(3, 1)),
        "one element": view(offset=3, shape=(1, 1), strides=(99, 77)),
        "bytes": view(storage("1", None, 4), shape=(4,)),
        "words of bytes": view(storage("1", None, 4), shape=(2,), dtype=DType("uint16")),
        "bytes again": view(storage("1", "uint8", 4), shape=(4,)),
        "nothing of one type": view(storage("2", "float32", 0), shape=(0,)),
        "nothing of another": view(storage("2", "int64", 0), shape=(0,)),
    }
    (tmp_path / FILE).write_bytes(saved(value, {"0": data.tobytes(), "1": b"abcd", "2": b""}))
    found = tx.open(tmp_path / FILE)
    assert found["expanded"].read().tolist() == [[0, 1, 2, 3]] * 3
    assert found["windows"].read().tolist() == [[0, 1], [1, 2], [2, 3]]
    assert found["windows"].read((slice(1, 3), slice(1, 2))).tolist() == [[2], [3]]
    assert found["empty, far away"].shape == (0, 3)
    assert found["one element"].read().tolist() == [[3]]
    assert found["words of bytes"].tobytes() == found["bytes"].tobytes() == b"abcd"
    assert [found[name].dtype for name in ("nothing of one type", "nothing of another")] == ["F32", "I64"]


def tensors_of_other_kinds() -> dict[str, tuple[torch.Tensor, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": (torch.eye(3).to_sparse(), "sparse"),
            "csr": (torch.eye(3).to_sparse_csr(), "sparse"),
            "quantized": (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
            "by channel": (
                torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint8),
                "quantized",
            ),
            "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
            "meta": (torch.ones(3, device="meta"), "meta"),
            "conjugated": (torch.ones(3, dtype=torch.complex64).conj(), "conj"),
            "negated": (torch.ones(3, dtype=torch.complex64).conj().imag, "neg"),
            "without values": (torch.nn.UninitializedParameter(), "without values"),
        }


@pytest.mark.parametrize("kind", tensors_of_other_kinds())
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_tensors_that_are_no_plain_views(tmp_path: Path, kind: str, legacy: bool) -> None:
    """As torch writes them: each is refused by its name, none is left out in silence."""
    tensor, said = tensors_of_other_kinds()[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"a": torch.ones(1), "w": tensor}, tmp_path / FILE, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(TransaxleError, match=said) as caught:
        opened(tmp_path, (tmp_path / FILE).read_bytes())
    assert (caught.value.code, caught.value.where.tensor) == ("UNSUPPORTED", "w")
