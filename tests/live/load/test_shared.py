"""Tensors that share memory: what a source has for each of them is what they hold, or the load is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import run
from tests.live.refusals import refused
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.errors import TransaxleError
from transaxle.formats.registry import MANIFEST
from transaxle.live import load_plan
from transaxle.live.load import load
from transaxle.live.load_plan import refuse_different
from transaxle.live.model.destination import LocalSink
from transaxle.live.save import save
from transaxle.live.transport.world import World

A, B = "a", "b"
Tensors = dict[str, torch.Tensor]


class Pair(nn.Module):
    """Two weights, which may be one."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4, 3))
        self.b = self.a if how == "object" else nn.Parameter(self.a.data if how == "memory" else torch.zeros(4, 3))


def _values(*, equal: bool) -> dict[str, torch.Tensor]:
    values = torch.arange(12.0).reshape(4, 3)
    other = values.clone()
    other[2, 1] += 0 if equal else 1e-3
    return {A: values, B: other}


@pytest.mark.parametrize("how", ["object", "memory"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_names_of_one_tensor_take_equal_values_only(tmp_path: Path, how: str, device: str) -> None:
    if (how, device) == ("memory", "meta"):
        device = "cpu"  # on the meta device there is no memory to be shared
    for equal in (True, False):
        place = tmp_path / f"{equal}"
        tx.save(_values(equal=equal), place, to="safetensors")
        with torch.device(device):
            model = Pair(how)
        if equal:
            tx.load(model, place)
            assert all(torch.equal(held, model.a) for held in _values(equal=True).values())
            assert torch.equal(model.a, model.b)
            continue
        with refused("UNEQUAL_COPIES", "one tensor for it and a\n", tensors=[B]):
            tx.load(model, place)
        assert model.a.is_meta or not model.a.any()


def test_copies_in_two_dtypes_are_refused(tmp_path: Path) -> None:
    values = _values(equal=True)
    tx.save({A: values[A], B: values[B].bfloat16()}, tmp_path / "out", to="safetensors")
    with pytest.raises(tx.TransaxleError, match="one is F32 in the source, the other BF16"):
        tx.load(Pair("object"), tmp_path / "out", dtype="fp32")


def _sharded(rank: int, world: int, place: str) -> bool:
    mesh = init_device_mesh("cpu", (world,))
    held = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])
    tx.load({A: held, B: held}, place)
    return bool(held.full_tensor().eq(torch.arange(15.0).reshape(5, 3)).all())


def test_copies_for_one_sharded_tensor_are_compared_on_all_ranks(tmp_path: Path) -> None:
    values = torch.arange(15.0).reshape(5, 3)
    tx.save({A: values, B: values.clone()}, tmp_path / "same", to="safetensors")
    assert run(2, _sharded, str(tmp_path / "same")) == [True, True]
    tx.save({A: values, B: values + (torch.arange(5) == 4)[:, None]}, tmp_path / "other", to="safetensors")
    with refused("UNEQUAL_COPIES", tensors=[B]):
        run(2, _sharded, str(tmp_path / "other"))


VIEWS: dict[str, tuple[Callable[[torch.Tensor], Tensors], bool]] = {
    "the whole and a part": (lambda memory: {A: memory, B: memory[4:9]}, True),
    "transposed": (lambda memory: {A: memory.view(4, 8), B: memory.view(4, 8).t()}, True),
    "folded": (lambda memory: {A: memory.as_strided((5, 3), (2, 1))}, True),
    "columns": (lambda memory: {A: memory.view(4, 8)[:, :3], B: memory.view(4, 8)[:, 3:]}, False),
    "gaps": (lambda memory: {A: memory.as_strided((2, 2), (3, 2)), B: memory[20:]}, False),
}


def _loaded(source: Tensors, target: Tensors, folder: Path) -> None:
    tx.save(source, folder, to="safetensors", overwrite=True)
    tx.load(target, folder)


def _resharded(source: Tensors, target: Tensors, _: Path) -> None:
    tx.reshard(source, target)


def _refitted_in_place(source: Tensors, target: Tensors, _: Path) -> None:
    with tx.Refit(source, target, in_place=True) as refit:
        refit.push()


@pytest.mark.parametrize("copy", [_loaded, _resharded, _refitted_in_place])
@pytest.mark.parametrize("name", VIEWS)
def test_overlapping_views_take_only_consistent_values(
    name: str, copy: Callable[[Tensors, Tensors, Path], None], tmp_path: Path
) -> None:
    views, cross = VIEWS[name]
    consistent = {key: view.clone() for key, view in views(torch.arange(1.0, 33.0)).items()}
    unlike = {key: torch.arange(1.0, 1 + view.numel()).view(view.shape) ** 1.5 for key, view in consistent.items()}
    memory = torch.zeros(32)
    filled = views(memory)
    if cross:
        with refused("UNEQUAL_COPIES"):
            copy(unlike, filled, tmp_path / "out")
        assert copy is not _refitted_in_place or not memory.any()  # a refit leaves its target as it was
    else:
        copy(unlike, filled, tmp_path / "out")
        assert all(torch.equal(filled[key], values) for key, values in unlike.items())
    copy(consistent, filled, tmp_path / "out")
    assert all(torch.equal(filled[key], values) for key, values in consistent.items())


def test_conjugates_and_negatives_are_saved_and_filled_as_values(tmp_path: Path) -> None:
    """torch puts both off: the memory has other values, and its bytes may not be looked at."""
    plain = torch.arange(6.0) * (1 + 2j)
    held = {A: plain.conj(), B: torch._neg_view(torch.arange(3.0))}
    kept = {"tensor": plain.conj()}
    tx.save(held, tmp_path / "out", to="safetensors", extra={"kept": kept}, verify=True)
    filled = {A: torch.zeros(6, dtype=torch.complex64).conj(), B: torch._neg_view(torch.zeros(3))}
    report = tx.load(filled, tmp_path / "out", extra={"kept": None})
    assert filled[A].tolist() == plain.conj().tolist() == report.extra["kept"]["tensor"].tolist()
    assert filled[B].tolist() == [0, -1, -2]


class Tied(nn.Module):
    """An embedding and a head, which may be one."""

    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        if tie:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("unlike", ["", "state", "settings"])
def test_a_tied_weight_takes_one_state_and_one_group(tmp_path: Path, unlike: str) -> None:
    """The weights are equal; what an optimizer knows of them need not be."""
    source = Tied(tie=False)
    source.head.weight.data.copy_(source.embed.weight)
    groups = [{"params": [each]} for each in source.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9)
    for scale, each in enumerate(source.parameters(), 1):
        each.grad = torch.full_like(each, float(scale if unlike == "state" else 1))
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.5 if unlike == "settings" else 0.0
    tx.save(source, tmp_path / "untied", to="dcp", optimizer=optimizer)
    target = Tied(tie=True)
    follower = torch.optim.SGD(target.parameters(), lr=0.1, momentum=0.9)
    if not unlike:
        report = tx.load(target, tmp_path / "untied", optimizer=follower)
        assert report.unexpected == ()
        assert follower.state[target.embed.weight]["momentum_buffer"].eq(1).all()
        return
    before = target.embed.weight.detach().clone()
    with pytest.raises(tx.TransaxleError) as found:
        tx.load(target, tmp_path / "untied", optimizer=follower)
    told = [(each.code, each.where.tensor) for each in found.value.refusals]
    state, settings = ("UNEQUAL_COPIES", "optim/head.weight/momentum_buffer"), ("UNSUPPORTED", "head.weight")
    assert told == [state if unlike == "state" else settings]
    assert torch.equal(target.embed.weight, before)
    assert not follower.state


# What all ranks of a load have alike: one checkpoint, also where it is replaced meanwhile, and the arguments.


def _state(value: float) -> dict[str, torch.Tensor]:
    return {f"part.{i}.weight": torch.full((8, 3), value) for i in range(4)}


def _go(rank: int, world: int, target: str, replaced: bool) -> str:
    save(_state(1), target, to="safetensors")
    opened = open_checkpoint

    def late(path: Any, **said: Any) -> Checkpoint:
        """Rank 0 opens the old one; then it is replaced, and the others open the new one."""
        found = opened(path, **said) if rank == 0 else None
        dist.barrier()
        if replaced:
            save(_state(2), target, to="safetensors", overwrite=True)
        return opened(path, **said) if found is None else found

    setattr(load_plan, "open_checkpoint", late)  # noqa: B010
    state = _state(0)
    try:
        load(state, target)
    except TransaxleError as error:
        assert all(not tensor.any() for tensor in state.values())
        return str(error)
    finally:
        setattr(load_plan, "open_checkpoint", opened)  # noqa: B010
    assert all(bool((tensor == 1).all()) for tensor in state.values())
    return ""


@pytest.mark.parametrize("replaced", [False, True])
def test_a_checkpoint_replaced_while_ranks_open_it_is_refused(tmp_path: Path, replaced: bool) -> None:
    for said in run(2, _go, str(tmp_path / "run"), replaced):
        assert ("replaced" in said) == replaced
        assert said.startswith("CORRUPT") == replaced


def _rewritten(rank: int, world: int, target: str, how: str) -> str:
    """One rank has read, and another program writes other values to the files, or puts other files in their place."""
    save(_state(1), target, to="safetensors")
    save(_state(2), f"{target}-2", to="safetensors")
    other = Path(f"{target}-2", "model.safetensors").read_bytes()
    filled = LocalSink.mark_filled

    def late(rooms: LocalSink, key: int, start: int, stop: int) -> None:
        filled(rooms, key, start, stop)
        if rank == 1 and key == 0 and how == "written to":
            with Path(target, "model.safetensors").open("r+b") as file:
                file.write(other)
        elif rank == 1 and key == 0 and how == "replaced":
            Path(target).rename(f"{target}-old")
            Path(f"{target}-2").rename(target)

    state = _state(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSink, "mark_filled", late)
        try:
            load(state, target, broadcast_replicated=False)
        except TransaxleError as error:
            return str(error)
    assert all(bool((tensor == 1).all()) for tensor in state.values())
    return ""


@pytest.mark.parametrize("how", ["written to", "replaced"])
def test_files_changed_while_they_are_read_are_refused(tmp_path: Path, how: str) -> None:
    """They could be loaded half old, half new; a folder that is replaced is read to its end."""
    for said in run(2, _rewritten, str(tmp_path / "run"), how):
        assert ("was changed while" in said) == (how == "written to")
        assert said.startswith("CORRUPT") == (how == "written to")


def _moved(rank: int, world: int, folder: str) -> str:
    """Each rank has opened a branch of a hub, which moved in between, to files of the same sizes."""
    checkpoint = open_checkpoint(Path(folder))
    mine = replace(checkpoint.container, path=f"hf://owner/name@{str(rank) * 40}/run")
    try:
        refuse_different(Checkpoint(mine, checkpoint.settings, None, None), World())
    except TransaxleError as error:
        return str(error)
    return ""


def test_a_hub_branch_that_moved_while_ranks_open_it_is_refused(tmp_path: Path) -> None:
    save(_state(0), tmp_path / "run", to="safetensors")
    (tmp_path / "run" / MANIFEST).unlink()
    for said in run(2, _moved, str(tmp_path / "run")):
        assert "ranks 0 and 1 opened different checkpoints" in said
        assert "hf://owner/name/run" in said


def _each_its_own(rank: int, world: int, folder: str) -> tuple[str, float]:
    state = _state(0)
    said = ""
    try:
        load(state, f"{folder}/{rank}")
    except TransaxleError as error:
        said = str(error)
    return said, float(state["part.0.weight"].sum())


@pytest.mark.parametrize("other", [1, 2])
def test_ranks_may_open_equal_copies_under_different_paths(tmp_path: Path, other: int) -> None:
    for rank, value in ((0, 1), (1, other)):
        save(_state(value), tmp_path / str(rank), to="safetensors")
    for said, total in run(2, _each_its_own, str(tmp_path)):
        if other == 1:
            assert (said, total) == ("", 24.0)
        else:
            assert said.startswith("AMBIGUOUS")
            assert f"{tmp_path / '0'} and {tmp_path / '1'}" in said
            assert total == 0


def _asked(rank: int, world: int, source: str, argument: str, values: tuple[Any, Any]) -> str:
    state = _state(0)
    with pytest.raises(TransaxleError) as found:
        load(state, source, **{argument: values[rank]})
    assert all(not tensor.any() for tensor in state.values())
    return str(found.value)


ASKED: dict[str, tuple[Any, Any]] = {"broadcast_replicated": (True, False), "dtype": (None, "fp32")}


@pytest.mark.parametrize("argument", ASKED)
def test_ranks_with_different_arguments_are_refused(tmp_path: Path, argument: str) -> None:
    """With `broadcast_replicated` on one of them, ranks would wait for each other in different collectives."""
    save(_state(1), tmp_path / "out", to="safetensors")
    for said in run(2, _asked, str(tmp_path / "out"), argument, ASKED[argument]):
        assert said.startswith("AMBIGUOUS")
        assert f"{argument}: rank 1 gave {ASKED[argument][1]!r}" in said


def _seen(rank: int, world: int, folder: str, how: str) -> str:
    """Ranks that read one checkpoint in two ways; the one that gives a wrong type raises its own error."""
    source, config = Path(folder, "out"), {"vocab_size": 4 + rank}
    state = _state(0)
    try:
        match how:
            case "config":
                load(state, source, config=config)
            case "rules":
                load(state, source, rules=Path(folder, f"{rank}.rules"))
            case "opened another":
                load(state, open_checkpoint(Path(folder, str(rank))))
            case "optimizer":
                load(state, source, optimizer=torch.optim.SGD([torch.zeros(1)]) if rank else None)
            case "type":
                wrong: Any = {"family": 3} if rank else {}
                load(state, source, **wrong)
            case _:
                opened = open_checkpoint(source, config={"a": 1})
                load(state, opened if rank else source, config=None if rank else {"a": 1})
    except (TransaxleError, TypeError) as error:
        assert all(not tensor.any() for tensor in state.values())
        return str(error)
    return ""


TABLE = "family own\n  axes d\n  {name} : d\ndialect mine\n  {name} = {name}[d]\n"
"""A table of the user's own."""
WAYS = {
    "config": "config: rank 1 reads the checkpoint with another value than rank 0",
    "rules": "rules: rank 1 reads the checkpoint with another value than rank 0",
    "opened another": "ranks 0 and 1 opened different checkpoints",
    "optimizer": "optimizer: rank 1 gave True, but rank 0 gave False",
    "type": "rank 1 failed: TypeError",
    "equal": "",
}


@pytest.mark.parametrize("how", WAYS)
def test_ranks_that_read_a_checkpoint_differently_are_refused(tmp_path: Path, how: str) -> None:
    """Tables and configs decide which values go where, so two of them would fill a model from two readings."""
    save(_state(1), tmp_path / "out", to="safetensors")
    for rank in (0, 1):
        save(_state(1 + rank), tmp_path / str(rank), to="safetensors")
        (tmp_path / f"{rank}.rules").write_text(TABLE.format(name="vw"[rank]))
    first, second = run(2, _seen, str(tmp_path), how)
    assert WAYS[how] in " ".join(first.split())
    assert first == second or how == "type"
    assert first.startswith("AMBIGUOUS") == (how not in ("type", "equal"))
    assert ("family must be a str" in second) == (how == "type")
