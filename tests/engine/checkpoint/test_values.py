"""From a checkpoint to values: arrays, torch tensors, slices, selections, streams, and pickles."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils.dlpack import from_dlpack

import transaxle as tx
from tests import checkpoints
from tests.engine import demand_refusal
from transaxle.engine.checkpoint.stored_tensor import check_elements, split_index
from transaxle.formats.catalog import ITEM_BITS

TYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
)  # fmt: skip


def _values(dtype: torch.dtype, shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    bits = torch.arange(1, 13, dtype=torch.int64).remainder(2 if dtype == torch.bool else 100)
    if dtype.itemsize == 1 and dtype not in (torch.int8, torch.uint8, torch.bool):
        return bits.to(torch.uint8).view(dtype).reshape(shape)
    return bits.to(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_becomes_a_torch_tensor_and_an_array(tmp_path: Path, dtype: torch.dtype) -> None:
    held = {"w": _values(dtype), "scalar": _values(dtype)[0, 0].clone(), "none": _values(dtype)[:0].clone()}
    save_file(held, tmp_path / "model.safetensors")
    with tx.open(tmp_path) as checkpoint:
        found = checkpoint.state_dict()
        assert list(found) == list(checkpoint)
        for name, tensor in held.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            raw = found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
            assert torch.equal(*raw)
            array = checkpoint[name].numpy()
            assert array.tobytes() == bytes(raw[1].tolist())
            assert np.asarray(checkpoint[name]).dtype == array.dtype
            assert array.shape == tuple(tensor.shape)
            for made in (torch.as_tensor, torch.tensor, torch.asarray, from_dlpack):
                taken = made(checkpoint[name])
                assert (taken.dtype, taken.shape) == (dtype, tensor.shape)
                assert taken.reshape(-1).view(torch.uint8).equal(raw[1])
        found["w"].view(torch.uint8).zero_()  # it is writable memory of its own
        assert torch.equal(checkpoint["w"].torch().view(torch.uint8), held["w"].view(torch.uint8))


def test_numpy_takes_a_stored_tensor_by_dlpack(tmp_path: Path) -> None:
    held = _values(torch.float32)
    save_file({"w": held}, tmp_path / "model.safetensors")
    with tx.open(tmp_path) as checkpoint:
        assert np.array_equal(np.from_dlpack(checkpoint["w"]), held.numpy())


def test_an_array_is_right_or_refused(tmp_path: Path) -> None:
    save_file({"w": _values(torch.bfloat16)}, tmp_path / "model.safetensors")
    with tx.open(tmp_path) as checkpoint:
        tensor = checkpoint["w"]
        np.testing.assert_array_equal(np.asarray(tensor, np.float32), _values(torch.float32).numpy())
        np.testing.assert_array_equal(np.asarray(tensor).astype(np.float32), _values(torch.float32).numpy())
        with pytest.raises(ValueError, match="they cannot be had without a copy"):
            np.asarray(tensor, copy=False)
    packed = {"F4", "F6_E2M3", "F6_E3M2", "COMPLEX32", "I4", "NF4", "FP4"}
    refused = packed | {code for code in ITEM_BITS if re.match("QU?INT|BITS|U?INT", code)}
    for code in ITEM_BITS:
        if code in refused:
            with pytest.raises(tx.TransaxleError, match=f"numpy has no type for elements of {code}"):
                check_elements("w", code)
        else:
            check_elements("w", code)


def test_packed_types_are_as_torch_counts_them(tmp_path: Path) -> None:
    codes = torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2)
    save_file({"w": codes}, tmp_path / "model.safetensors")
    with tx.open(tmp_path) as checkpoint:
        found = checkpoint["w"].torch()
        assert (found.dtype, found.shape) == (codes.dtype, codes.shape)
        assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
        reads: tuple[Callable[[], Any], ...] = (
            checkpoint["w"].numpy,
            lambda: np.asarray(checkpoint["w"]),
            lambda: checkpoint["w"][0],
        )
        for read in reads:
            with pytest.raises(tx.TransaxleError, match=r"read\(\) and tobytes\(\)"):
                read()


PARTS = st.one_of(
    st.integers(-6, 6),
    st.builds(slice, *[st.none() | st.integers(-7, 7)] * 2, st.none() | st.integers(-3, 3).filter(bool)),
    st.just(Ellipsis),
    st.none(),
)


@given(st.lists(PARTS, max_size=5).map(tuple), st.sampled_from([(), (5,), (2, 5), (3, 1, 4), (0, 3)]))
def test_slices_are_numpys(index: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    try:
        want = whole[index]
    except IndexError:
        with pytest.raises(IndexError):
            split_index(index, shape)
        return
    found = split_index(index, shape)
    part = whole[found.box]
    got = part[found.selection]
    assert got.shape == want.shape
    assert np.array_equal(got, want)
    assert part.size <= max(want.size, 1) * 3 ** len(shape)  # no more than what steps skip


def test_a_slice_reads_its_box(tmp_path: Path) -> None:
    whole = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    array = whole.numpy()
    with tx.open(tmp_path) as checkpoint:
        tensor = checkpoint["w"]
        np.testing.assert_array_equal(tensor[0:2, ..., -1], array[0:2, ..., -1])
        np.testing.assert_array_equal(tensor[1], array[1])
        np.testing.assert_array_equal(tensor[::-2, None, 3], array[::-2, None, 3])
        assert tensor[2, 3, 4] == 59
        for wrong in ([0, 1], True, np.array([True, False, True]), "w", 1.5):
            with pytest.raises(TypeError, match="slices, numbers"):
                tensor[wrong]  # type: ignore[index]  # what is tried
        with pytest.raises(TypeError, match="gives an array, for more") as long:
            tensor[np.ones(60, bool).reshape(3, 4, 5)]
        assert len(str(long.value).splitlines()) == 1
        with pytest.raises(IndexError, match="out of bounds"):
            tensor[3]
        with pytest.raises(IndexError, match="too many indices"):
            tensor[0, 0, 0, 0]
        assert [row.tolist() for row in tensor] == array.tolist()  # type: ignore[attr-defined]  # by its numbers


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoints.tiny(tmp_path / "source")


def test_selections_by_pattern(source: Path) -> None:
    with tx.open(source) as checkpoint:
        found = checkpoint.select("*.q_proj.weight")
        assert list(found) == [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]
        assert found.state_dict().keys() == set(found)
        assert checkpoint.select(skip="*.experts.*").keys() | checkpoint.select("*.experts.*").keys() == set(checkpoint)
        assert checkpoints.GATE not in found
        with pytest.raises(KeyError):
            found[checkpoints.GATE]
        with pytest.raises(tx.TransaxleError, match="no tensor has a name like 'q_proj'"):
            checkpoint.select("q_proj")
        for some in (checkpoint, found, checkpoint.as_dialect("torchtitan")):
            with pytest.raises(KeyError, match=r"no tensor is named '\*\.0\.\*': for those that match it, \.select\("):
                some["*.0.*"]
            with pytest.raises(KeyError, match=r"^no tensor is named 'q_proj'$"):
                some["q_proj"]
            with pytest.raises(TypeError, match=r"takes the name of a tensor, a str; got slice\('a', 'b', None\)"):
                some["a":"b"]  # type: ignore[index]
            assert some.get("*.0.*") is None
            assert "*.0.*" not in some
        assert repr(found).startswith("<2 tensors of <checkpoint ")
        assert len(found.select("*.0.*")) == 1


def test_the_nearest_name_is_told(source: Path) -> None:
    with tx.open(source) as checkpoint:
        for some in (checkpoint, checkpoint.select("*norm*")):
            with pytest.raises(
                KeyError, match=r"'model\.norm\.weigth'\. Did you mean 'model\.norm\.weight'\?$"
            ) as error:
                some["model.norm.weigth"]
            assert error.value.args == ("model.norm.weigth",)
            again = pickle.loads(pickle.dumps(error.value))  # noqa: S301
            assert again.args == (str(error.value),)


@pytest.mark.parametrize("memory", [1, "256MB"])
def test_a_stream_goes_through_the_files_in_order(source: Path, memory: int | str) -> None:
    whole = {name: values for file in source.glob("*.safetensors") for name, values in load_file(file).items()}
    with tx.open(source) as checkpoint:
        view = checkpoint.as_dialect("torchtitan")
        for each in (checkpoint, view):
            found = dict(each.stream(memory=memory))
            places = [min((t.file, t.source) for t in each[name].transfers()) for name in found if each[name].origins]
            assert places == sorted(places)
            assert found.keys() == set(each)
            assert all(torch.equal(found[name], each[name].torch()) for name in found)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in checkpoint.stream(memory=memory))
        first = next(iter(checkpoint.stream("numpy")))  # a stream that nobody ends keeps no thread
        assert first[1].shape == checkpoint[first[0]].shape
        with pytest.raises(ValueError, match="kind must be 'torch' or 'numpy'"):
            checkpoint.stream("jax")  # type: ignore[arg-type]  # what is tried


def _views(source: Path) -> dict[str, Callable[[], tx.Checkpoint]]:
    return {
        "relative": lambda: tx.open(os.path.relpath(source)),
        "dialect": lambda: tx.open(source, config=source / "config.json").as_dialect("torchtitan"),
        "by hand": lambda: tx.open(source).cast("fp32").as_dialect("torchtitan"),
    }


@pytest.mark.parametrize("which", ["relative", "dialect", "by hand"])
def test_checkpoints_and_tensors_pickle(source: Path, which: str) -> None:
    checkpoint = _views(source)[which]()
    again, tensor = pickle.loads(pickle.dumps((checkpoint, next(iter(checkpoint.values())))))  # noqa: S301 - our own
    with checkpoint, again:
        assert list(again) == list(checkpoint)
        assert again.dialect == checkpoint.dialect
        for name, each in checkpoint.items():
            assert (again[name].dtype, again[name].tobytes()) == (each.dtype, each.tobytes())
        assert tensor.tobytes() == checkpoint[tensor.name].tobytes()
        chosen = pickle.loads(pickle.dumps(checkpoint.select("*norm*")))  # noqa: S301 - our own
        assert list(chosen) == list(checkpoint.select("*norm*"))


def test_files_that_changed_meanwhile_are_refused(source: Path, tmp_path: Path) -> None:
    rules = tmp_path / "my.rules"
    rules.write_text("family own\n  axes d\n  w : d\ndialect mine\n  w = w[d]\n", "utf-8")
    with tx.open(source) as checkpoint, tx.open(source, rules=rules) as ruled:
        pickled, with_rules = pickle.dumps(checkpoint), pickle.dumps(ruled)
    rules.write_text("family own\n  axes d\n  v : d\ndialect mine\n  v = v[d]\n", "utf-8")
    with pytest.raises(tx.TransaxleError, match=r"changed since the checkpoint was pickled: .*my\.rules"):
        pickle.loads(with_rules)  # noqa: S301 - our own
    file = next(source.glob("*.safetensors"))
    stored = load_file(file)
    save_file({name: values + 1 for name, values in stored.items()}, file)
    with demand_refusal("CORRUPT", r"changed since the checkpoint was pickled: model"):
        pickle.loads(pickled)  # noqa: S301 - our own
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(checkpoint)
