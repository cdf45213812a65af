"""Opening what torch saved: every type, every view, and the states of training programs."""

from __future__ import annotations

import argparse
import json
import pathlib
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transaxle as tx
from tests.formats.refusals import refuses
from tests.formats.torch_file.made import FILE, octets
from transaxle.errors import TransaxleError
from transaxle.formats.catalog import ITEM_BITS
from transaxle.formats.detect import open_container
from transaxle.formats.pickled.allowed import DTYPES
from transaxle.formats.pickled.descriptors import CODES, DType

legacy_or_zip = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
UNSAVED = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
"""Types that torch 2.13 has and cannot save; it loads them all the same."""


def save(what: Any, path: Path, *, legacy: bool = False) -> None:
    torch.save(what, path, _use_new_zipfile_serialization=not legacy)


def raw(tensor: torch.Tensor) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = tensor.detach().clone(memory_format=torch.contiguous_format)
    return bytes(dense.untyped_storage())[: dense.numel() * dense.element_size()]


def assert_holds(folder: Path, tensors: Mapping[str, torch.Tensor]) -> tx.Checkpoint:
    found = tx.open(folder / FILE)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        pack = 2 if found[name].dtype == "F4" else 1
        assert found[name].shape == ((*tensor.shape[:-1], tensor.shape[-1] * pack) if tensor.dim() else ())
        assert found[name].tobytes() == raw(tensor), name
    return found


def torch_dtypes() -> dict[str, torch.dtype]:
    kinds = (getattr(torch, name) for name in dir(torch))
    return {str(kind).removeprefix("torch."): kind for kind in kinds if isinstance(kind, torch.dtype)}


def of(kind: torch.dtype, count: int = 6) -> torch.Tensor:
    """A tensor of any type, with bytes that all differ."""
    size = torch.empty(0, dtype=kind).element_size()
    octets = torch.arange(count * size, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == torch.bool:
            return octets % 2 == 0
        made = torch.empty(0, dtype=kind)
        return made.set_(octets.untyped_storage(), 0, (count,), (1,))


def test_every_type_is_known() -> None:
    names = set(torch_dtypes())
    assert names <= set(DTYPES)
    assert {DType(name).code for name in names} <= ITEM_BITS.keys()
    for name, kind in torch_dtypes().items():
        if name not in QUANTIZED:
            assert ITEM_BITS[DType(name).code] == 8 * kind.itemsize // (2 if name == "float4_e2m1fn_x2" else 1)
    assert CODES.keys() <= names


@pytest.mark.oracle
@legacy_or_zip
@pytest.mark.parametrize("name", [name for name in torch_dtypes() if name not in (*QUANTIZED, *UNSAVED)])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_type(tmp_path: Path, name: str, legacy: bool) -> None:
    flat = of(torch_dtypes()[name])
    tensors = {"flat": flat, "matrix": flat.as_strided((2, 3), (3, 1))}
    save(tensors, tmp_path / FILE, legacy=legacy)
    found = tx.open(tmp_path / FILE)
    assert {found[key].dtype for key in tensors} == {CODES.get(name, name.upper())}
    for key, tensor in tensors.items():
        assert found[key].tobytes() == bytes(tensor.untyped_storage())
        assert found[key].nbytes == tensor.numel() * tensor.element_size()
    assert found["matrix"].shape == ((2, 6) if name == "float4_e2m1fn_x2" else (2, 3))


@legacy_or_zip
def test_views(tmp_path: Path, legacy: bool) -> None:
    base = torch.arange(120.0).reshape(4, 5, 6)
    views = {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(1, 2, 0),
        "row": base[1],
        "column": base[:, 2, 3],
        "steps": base[::2, 1:4:2, ::3],
        "diagonal": base[0, :5, :5].diagonal(),
        "expanded": base[:1, :1, :1].expand(3, 2, 6),
        "element": base[1, 2, 3],
        "nothing": base[:, 5:],
        "windows": base.flatten().unfold(0, 10, 7),
        "narrow": base.view(20, 6).narrow(1, 2, 3).t(),
    }
    save(views, tmp_path / FILE, legacy=legacy)
    found = assert_holds(tmp_path, views)
    box = (slice(1, 3), slice(None), slice(2, 4))
    assert found["transposed"].read(box).tolist() == views["transposed"][box].tolist()
    container = open_container(str(tmp_path / FILE))
    strides = {name: entry.extents[0].strides for name, entry in container.entries.items()}
    assert strides["whole"] is strides["row"] is strides["element"] is strides["nothing"] is None
    assert strides["transposed"] == (1, 6, 30)
    assert container.files == {FILE: (tmp_path / FILE).stat().st_size}


@legacy_or_zip
def test_what_is_shared(tmp_path: Path, legacy: bool) -> None:
    """Tied tensors are told from views that only share their storage."""
    weight = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "embed.weight": weight,
        "head.weight": weight,
        "row": weight[0],
        "turned": weight.t(),
        "parameter": torch.nn.Parameter(weight),
        "copy": weight.clone(),
        "nothing": torch.zeros(0),
        "nothing.again": torch.zeros(0),
    }
    save(tensors, tmp_path / FILE, legacy=legacy)
    found = assert_holds(tmp_path, tensors)
    assert found.metadata == {"ties": {"head.weight": "embed.weight", "parameter": "embed.weight"}}
    places = {name: entry.extents[0].offset for name, entry in found.container.entries.items()}
    assert places["row"] == places["turned"] == places["embed.weight"] != places["copy"]


@legacy_or_zip
def test_small_and_empty(tmp_path: Path, legacy: bool) -> None:
    tensors = {
        "0-d": torch.tensor(1.5), "empty": torch.zeros(0, 3, dtype=torch.int16), "é.weight": torch.ones(2),
        "true": torch.tensor(True), "": torch.ones(1),
    }  # fmt: skip
    save(tensors, tmp_path / FILE, legacy=legacy)
    assert_holds(tmp_path, tensors)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return module, optimizer


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings that torch saves, with the names that we give to parameters without names."""
    saved = optimizer.state_dict()["param_groups"]
    return [{**group, "params": [f"#{number}" for number in group["params"]]} for group in saved]


@legacy_or_zip
def test_a_training_checkpoint(tmp_path: Path, legacy: bool) -> None:
    module, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    what = {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "epoch": 3,
        "best": 0.25,
        "done": False,
        "loss": np.float32(1.5),
        "count": np.int64(-7),
        "rng": torch.get_rng_state(),
        "name": "run-7",
        "args": argparse.Namespace(lr=0.1),
        "config": {"hidden": 3, "act": "gelu", "path": pathlib.PurePosixPath("a")},
        "history": [1.0, 2.0],
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
        "nothing": None,
        "complex": 1j,
        "members": {1, 2},
        "array": np.arange(3),
    }
    save(what, tmp_path / FILE, legacy=legacy)
    found = tx.open(tmp_path / FILE)
    state = optimizer.state_dict()["state"]
    assert list(found)[:4] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {name for name in found if name.startswith("optim/")} == {
        f"optim/#{number}/{key}" for number in range(4) for key in ("step", "exp_avg", "exp_avg_sq")
    }
    for number, moments in state.items():
        for key, tensor in moments.items():
            assert found[f"optim/#{number}/{key}"].tobytes() == raw(tensor)
    numbers: dict[str, tuple[str, float]] = {"epoch": ("I64", 3), "best": ("F64", 0.25), "done": ("BOOL", False)}
    numbers |= {"loss": ("F32", 1.5), "count": ("I64", -7)}
    for name, (dtype, value) in numbers.items():
        assert (found[name].dtype, found[name].shape, found[name].read().item()) == (dtype, (), value)
    assert found["rng"].dtype == "U8"
    left = found.metadata["left_behind"]
    assert found.metadata["root"] == "model"
    assert left["config"] == left["lr_scheduler"] == "settings"
    assert found.metadata["param_groups"] == groups_of(optimizer)
    assert left["args"] == "argparse.Namespace"
    assert {"name", "history", "device", "dtype", "size", "nothing", "complex", "members", "array"} <= left.keys()


@legacy_or_zip
def test_an_optimizer_by_itself(tmp_path: Path, legacy: bool) -> None:
    """What transformers' Trainer calls optimizer.pt."""
    _, optimizer = trained()
    place = tmp_path / "optimizer.pt"
    save(optimizer.state_dict(), place, legacy=legacy)
    found = tx.open(place)
    assert list(found)[:3] == ["optim/#0/step", "optim/#0/exp_avg", "optim/#0/exp_avg_sq"]
    assert found["optim/#0/step"].dtype == "F32"
    assert found.metadata == {"param_groups": groups_of(optimizer)}


def test_an_optimizer_that_names_its_parameters(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.named_parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save({"state_dict": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / FILE)
    found = tx.open(tmp_path / FILE)
    assert list(found) == ["weight", "bias", "optim/weight/momentum_buffer", "optim/bias/momentum_buffer"]
    (group,) = found.metadata["param_groups"]
    assert (group["params"], group["lr"], group["momentum"]) == (["weight", "bias"], 0.1, 0.9)


@legacy_or_zip
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (torch.arange(3), ["tensor"]),
        ([torch.ones(1), {"a": torch.ones(2)}], ["0", "1.a"]),
        ((torch.ones(1), torch.ones(2)), ["0", "1"]),
        ({"a": {"b": [torch.ones(1), torch.ones(2)]}, 7: torch.ones(1)}, ["a.b.0", "a.b.1", "7"]),
        (OrderedDict(module={"a.weight": torch.ones(1)}), ["a.weight"]),
        ({"only": 5}, ["only"]),
    ],
    ids=["tensor", "list", "tuple", "nested", "root", "number"],
)
def test_shapes_of_states(tmp_path: Path, what: Any, expected: list[str], legacy: bool) -> None:
    save(what, tmp_path / FILE, legacy=legacy)
    assert list(tx.open(tmp_path / FILE)) == expected


class _Marked(torch.Tensor):
    """A subclass of one's own: unknown here."""


@legacy_or_zip
def test_attributes_and_subclasses(tmp_path: Path, legacy: bool) -> None:
    tensor = torch.arange(3.0)
    setattr(tensor, "note", "kept by torch")  # noqa: B010 - torch does not know the attribute
    parameter = torch.nn.Parameter(torch.arange(2.0))
    setattr(parameter, "is_norm", True)  # noqa: B010
    buffer = torch.nn.Buffer(torch.ones(2))
    save({"a": tensor, "b": parameter, "c": buffer}, tmp_path / FILE, legacy=legacy)
    assert_holds(tmp_path, {"a": tensor, "b": parameter, "c": buffer})
    save({"a": torch.ones(2).as_subclass(_Marked)}, tmp_path / FILE, legacy=legacy)
    with refuses("UNSAFE_PICKLE", "_Marked"):
        tx.open(tmp_path / FILE)


def test_a_whole_module_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / FILE)
    with refuses("UNSAFE_PICKLE", "torch.nn.modules.linear.Linear") as caught:
        tx.open(tmp_path / FILE)
    assert not any(one.code != "UNSAFE_PICKLE" for one in caught.value.refusals)


def test_a_script_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / FILE))
    with pytest.raises(TransaxleError, match=r"TorchScript|compressed") as caught:
        tx.open(tmp_path / FILE)
    assert caught.value.code == "UNSUPPORTED"


def test_names_of_lightning_count_last(tmp_path: Path) -> None:
    save({"a": torch.ones(1)}, tmp_path / "weights.ckpt")
    assert list(tx.open(tmp_path / "weights.ckpt")) == list(tx.open(tmp_path)) == ["a"]
    save({"b": torch.ones(1)}, tmp_path / "weights.pt")
    assert list(tx.open(tmp_path)) == ["b"]
    (tmp_path / "other.ckpt").write_bytes(b"no torch file")
    with pytest.raises(TransaxleError, match="not a torch file"):
        tx.open(tmp_path / "other.ckpt")


INDEX = "pytorch_model.bin.index.json"
A, B = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


def sharded(folder: Path, weight_map: Mapping[str, str] | None = None) -> None:
    save({"a": torch.arange(3.0), "b": torch.ones(2)}, folder / A)
    save({"c": torch.arange(4)}, folder / B, legacy=True)
    said = {"a": A, "b": A, "c": B} if weight_map is None else weight_map
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 52}, "weight_map": said}))


def test_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_args.bin").write_bytes(b"x")
    container = open_container(str(tmp_path))
    assert container.format == "torch"
    assert list(container.entries) == ["a", "b", "c"]
    assert container.files.keys() == {A, B, INDEX}
    assert container.carried == ("config.json",)
    assert container.ignored == ("training_args.bin",)
    assert octets(container, "c") == torch.arange(4).numpy().tobytes()


def test_shards_without_their_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    with refuses("AMBIGUOUS", "its index"):
        open_container(str(tmp_path))
    (tmp_path / B).unlink()
    with refuses("INCOMPLETE", "shard 1 of 2"):
        open_container(str(tmp_path))
    assert list(open_container(str(tmp_path / A)).entries) == ["a", "b"]


def test_numbers_of_several_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    save({"c": torch.arange(4), "step": 7, "note": "x"}, tmp_path / B)
    save({"a": torch.ones(1), "b": torch.ones(1), "epoch": 3}, tmp_path / A)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": A, "b": A, "epoch": A, "c": B, "step": B}}))
    found = tx.open(tmp_path)
    assert (found["epoch"].read().item(), found["step"].read().item()) == (3, 7)
    assert found.metadata == {"training_state": ["epoch", "step"], "left_behind": {"note": "str"}}
