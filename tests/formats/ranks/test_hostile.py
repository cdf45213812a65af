"""Rank files whose pickles lie: huge meshes, strides that overflow, shard orders, recursion, views of a few bytes.

Each is refused with a message, in seconds and with little memory.
"""

from __future__ import annotations

import tempfile
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import transaxle as tx
from tests.formats.drafts import damage
from tests.formats.ranks import made
from transaxle.errors import TransaxleError

WHOLE = torch.arange(40.0).view(10, 4)
HUGE = 2**62
MOST_SECONDS, MOST_BYTES = 20.0, 200_000_000
CODES = {"CORRUPT", "UNSUPPORTED", "INCOMPLETE", "SHAPE_MISMATCH", "UNSAFE_PICKLE", "OVERLAP", "DTYPE_MIXED"}


def weight(form: str = "2.13", placements: tuple[str, ...] = ("S0",), **changed: Any) -> Any:
    """The only tensor of the only rank, on a mesh with these attributes."""
    return made.dtensor(WHOLE, made.mesh(0, {"fsdp": 1}, form=form, **changed), placements, WHOLE, form=form)


def on(sizes: tuple[Any, ...], strides: tuple[Any, ...], form: str = "2.12", **changed: Any) -> Any:
    """The tensor, replicated on a mesh with this layout."""
    return weight("2.12", ("R",) * len(sizes), **{"_layout": made.layout(sizes, strides, form), **changed})


def spec(**changed: Any) -> Any:
    """The tensor, on two ranks of which one is there, with these attributes of its specification."""
    return made.dtensor(WHOLE, made.mesh(0, {"fsdp": 1}), ["S0"], WHOLE, **changed)


def strided(factor: Any, count: int = 1, dim: Any = 0) -> Any:
    axes = {f"d{number}": 1 for number in range(count)}
    cut = made.PLACEMENTS[False, "_StridedShard"](dim=dim, split_factor=factor)
    return made.dtensor(WHOLE, made.mesh(0, axes), ["R"] * count, WHOLE, placements=(cut,) * count)


def cut(**attributes: Any) -> Any:
    return spec(placements=(made.PLACEMENTS[False, "Shard"](**attributes),))


def meta(*fields: Any) -> Any:
    return spec(tensor_meta=made.TensorMeta(*fields))


def order(*entries: Any) -> Any:
    return spec(shard_order=tuple(made.ShardOrderEntry(*entry) for entry in entries))


def many_meshes() -> dict[str, Any]:
    """A hundred meshes of a hundred thousand ranks each, which share one list."""
    ranks = torch.arange(100_000, dtype=torch.int32)
    pattern = made.layout((100_000,), (1,))
    return {f"w{number}": on((100_000,), (1,), _rank_map=ranks, _layout=pattern) for number in range(100)}


def many_boxes() -> dict[str, Any]:
    return {f"w{number}": strided(16384) for number in range(100)}


def nested(depth: int, width: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = (value,) * width
    return value


def itself() -> Any:
    mesh = made.mesh(0, {"fsdp": 1}, form="2.10")
    mesh._root_mesh = mesh
    return made.dtensor(WHOLE, mesh, ["S0"], WHOLE, form="2.10", placements=(mesh,))


def spec_of_itself() -> Any:
    tensor = weight()
    tensor.state[1]["_spec"].mesh._layout = tensor.state[1]["_spec"]
    return tensor


def inside_itself() -> Any:
    tensor = weight()
    tensor.state[1]["_local_tensor"] = tensor
    return tensor


def view(shape: tuple[int, ...], strides: tuple[int, ...], count: int = 4, dtype: torch.dtype = torch.int32) -> Any:
    return torch.as_strided(torch.arange(count).to(dtype), shape, strides)


HOSTILE: dict[str, Callable[[], Any]] = {
    "a mesh of 2**62 ranks": lambda: on((HUGE,), (1,)),
    "a mesh of 2**62 times 2**62 ranks": lambda: on((HUGE, HUGE), (1, 1)),
    "a mesh dim of no ranks after a huge one": lambda: on((HUGE, 0), (1, 1)),
    "a mesh of no ranks": lambda: on((0,), (1,)),
    "a mesh of a million ranks, and one in the list": lambda: on((1 << 20,), (0,)),
    "a mesh with one rank twice": lambda: on((2,), (0,)),
    "strides that overflow": lambda: on((1, 1), (HUGE * 4, HUGE * 4)),
    "strides beyond the list": lambda: on((2,), (HUGE,)),
    "negative strides": lambda: on((2,), (-1,)),
    "negative sizes": lambda: on((-2,), (1,)),
    "sizes without strides": lambda: on((1, 1), (1,)),
    "sizes that are texts": lambda: on(("1",), ("1",)),
    "sizes that are Booleans": lambda: on((True,), (True,)),
    "a mesh of a thousand dims": lambda: on((1,) * 1000, (1,) * 1000),
    "a mesh of a thousand dims as a tensor": lambda: weight("2.8", ("R",) * 64, mesh=torch.zeros((1,) * 64).int()),
    "a layout nested deep": lambda: on((nested(50, 1),), (nested(50, 1),)),
    "a layout nested wide": lambda: on((nested(4, 30),), (nested(4, 30),)),
    "no layout": lambda: weight(_layout=None),
    "a layout that is a number": lambda: weight(_layout=5),
    "axes that are no layouts": lambda: weight(_layout=made.MeshLayout(axes=(1,))),
    "axes that are a number": lambda: weight(_layout=made.MeshLayout(axes=5)),
    "no list of ranks": lambda: weight(_rank_map=None),
    "a list of ranks that are floats": lambda: weight(_rank_map=torch.zeros(1)),
    "a list of ranks that are bytes": lambda: weight(_rank_map=torch.zeros(1, dtype=torch.uint8)),
    "an empty list of ranks": lambda: weight(_rank_map=torch.zeros(0).int()),
    "a list of negative ranks": lambda: weight(_rank_map=torch.tensor([-1]).int()),
    "a list of ranks that is a giant view": lambda: weight(_rank_map=view((2**40,), (0,))),
    "a mesh that is a giant view": lambda: weight("2.8", mesh=view((2**40,), (0,))),
    "a mesh that is a giant view of two dims": lambda: weight("2.8", ("R", "R"), mesh=view((2**30, 2**30), (0, 0))),
    "a mesh that is a number": lambda: weight("2.8", mesh=5),
    "a mesh of floats": lambda: weight("2.8", mesh=torch.zeros(1)),
    "a mesh spread over four million elements": lambda: weight("2.8", mesh=view((2,), (3_999_999,), 4_000_000)),
    "a coordinate of a thousand": lambda: weight(_coordinate_on_dim=[1000]),
    "a coordinate of two dims": lambda: weight(_coordinate_on_dim=[0, 0]),
    "a coordinate below zero": lambda: weight(_coordinate_on_dim=[-1]),
    "another rank": lambda: weight(_rank=7),
    "a huge rank": lambda: weight(_rank=HUGE * HUGE),
    "no mesh": lambda: spec(mesh=None),
    "a mesh that is a tensor": lambda: spec(mesh=torch.zeros(1).int()),
    "no placements": lambda: spec(placements=()),
    "placements that are a number": lambda: spec(placements=3),
    "placements that are texts": lambda: spec(placements=("S0",)),
    "two placements for one mesh dim": lambda: spec(placements=(made.placement("S0"), made.placement("S0"))),
    "a mesh for a placement": lambda: spec(placements=(made.mesh(0, {"fsdp": 1}),)),
    "a cut of dim 2": lambda: cut(dim=2),
    "a cut of dim -3": lambda: cut(dim=-3),
    "a cut of a huge dim": lambda: cut(dim=HUGE * HUGE),
    "a cut of dim True": lambda: cut(dim=True),
    "a cut of no dim": cut,
    "a cut of a dim that is a list": lambda: cut(dim=[0]),
    "a billion boxes": lambda: strided(10**9),
    "a factor of zero": lambda: strided(0),
    "a factor below zero": lambda: strided(-4),
    "a factor that is a text": lambda: strided("2"),
    "boxes of boxes of boxes": lambda: strided(1000, 8),
    "a shape of 2**62 rows": lambda: meta(torch.Size([HUGE, 4]), (4, 1), torch.float32),
    "a shape of a thousand dims": lambda: meta((1,) * 1000, (1,) * 1000, torch.float32),
    "a shape of negative rows": lambda: meta((-10, 4), (4, 1), torch.float32),
    "a shape that is a number": lambda: meta(10, 1, torch.float32),
    "a shape of huge numbers": lambda: meta((HUGE**3, 0), (1, 1), torch.float32),
    "no dtype": lambda: meta((10, 4), (4, 1), None),
    "another dtype": lambda: meta((10, 4), (4, 1), torch.int8),
    "no shape": lambda: spec(tensor_meta=None),
    "a shard order of another dim": lambda: order((1, (0,))),
    "a shard order of another mesh dim": lambda: order((0, (5,))),
    "a shard order with a mesh dim twice": lambda: order((0, (0,)), (0, (0,))),
    "a shard order of a million mesh dims": lambda: order((0, (0,) * 1_000_000)),
    "a shard order of many entries": lambda: order(*[(0, (0,))] * 100_000),
    "a shard order of numbers": lambda: spec(shard_order=(1, 2)),
    "a shard order of texts": lambda: order((0, "0")),
    "a shard order with a dim that is a list": lambda: order(([0], (0,))),
    "a mesh that is its own root and placement": itself,
    "a layout that is its own specification": spec_of_itself,
    "a tensor that is its own part": inside_itself,
    "no local tensor": lambda: made.DTensor(state=(None, {"_spec": weight().state[1]["_spec"]})),
    "no state": lambda: made.DTensor(state=None),
    "a state that is a number": lambda: made.DTensor(state=5),
    "a local tensor of repeated elements": lambda: made.dtensor(
        WHOLE, made.mesh(0, {"fsdp": 1}), ["S0"], view((10, 4), (0, 0), dtype=torch.float32)),
    "a ShardedTensor without state": lambda: made.ShardedTensor(state=()),
    "a ShardedTensor of numbers": lambda: made.ShardedTensor(state=(1, 2, 3, 4, 5)),
    "a ShardedTensor at 2**62": lambda: made.sharded(WHOLE, 0, 1, shard_offsets=[HUGE, HUGE]),
    "a ShardedTensor of 2**62 rows": lambda: made.sharded(WHOLE, 0, 1, shard_sizes=[HUGE, 4]),
    "a ShardedTensor at texts": lambda: made.sharded(WHOLE, 0, 1, shard_offsets=["0", "0"]),
    "a ShardedTensor at a number": lambda: made.sharded(WHOLE, 0, 1, shard_offsets=5),
    "a ShardedTensor of a thousand dims": lambda: made.sharded(WHOLE, 0, 1, shard_offsets=[0] * 1000),
}  # fmt: skip
MANY = {"a hundred meshes of a hundred thousand ranks": many_meshes, "a hundred tensors of many boxes": many_boxes}


def refuse_soon(folder: Path, state: dict[str, Any]) -> TransaxleError:
    """Open a folder that is refused, within limits of time and memory."""
    made.write_all(folder, [state])
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(TransaxleError) as caught:
            tx.open(folder)
        assert time.process_time() - begin < MOST_SECONDS
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert {refusal.code for refusal in caught.value.refusals} <= CODES
    return caught.value


def test_the_tensor_that_each_case_changes(tmp_path: Path) -> None:
    """It is read, and so are layouts and views that are only odd."""
    fine = {
        "plain": weight(), "old": weight("2.8"), "layout": on((1,), (1,)), "nested": on(((1, 1),), ((1, 1),)),
        "strided": strided(2), "order": order((0, (0,))), "sharded": made.sharded(WHOLE, 0, 1), "dim": cut(dim=-2),
    }  # fmt: skip
    made.write_all(tmp_path / "step", [fine])
    with tx.open(tmp_path / "step") as checkpoint:
        assert set(checkpoint) == set(fine)
        assert all(torch.equal(checkpoint[name].torch(), WHOLE) for name in fine)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_lie_is_refused(tmp_path: Path, case: str) -> None:
    error = refuse_soon(tmp_path / "step", {"w": HOSTILE[case](), "b": torch.zeros(3)})
    assert error.where.file == "model_world_size_1_rank_0.pt", str(error)
    assert len(str(error)) < 5_000


@pytest.mark.oracle
@pytest.mark.parametrize("case", MANY)
def test_many_small_lies_are_refused(tmp_path: Path, case: str) -> None:
    """What is fine once is limited for all tensors of a file together."""
    refuse_soon(tmp_path / "step", MANY[case]())


@settings(max_examples=40)
@given(data=st.data())
def test_damaged_pickles(data: st.DataObject) -> None:
    """A file whose pickle is changed is read or refused, in whatever archive; nothing else comes out."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = Path(folder, "step")
        axes = {"fsdp": 2, "tp": 2}
        made.write_all(step, [{"w": made.dtensor(WHOLE, made.mesh(rank, axes), ["S0", "S1"])} for rank in range(4)])
        path = step / "model_world_size_4_rank_2.pt"
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        member = next(name for name in records if name.endswith("/data.pkl"))
        records[member] = data.draw(damage(records[member]))
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, content in records.items():
                archive.writestr(name, content)
        with suppress(TransaxleError), tx.open(step) as checkpoint:
            assert all(len(checkpoint[name].shape) <= 64 for name in checkpoint)
