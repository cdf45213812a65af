"""What all ranks of a load have alike: one checkpoint, also where it is replaced meanwhile, and the arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from tests.live.ranks import run
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.errors import TransaxleError
from transaxle.formats.registry import MANIFEST
from transaxle.live import load_plan
from transaxle.live.load import load
from transaxle.live.load_plan import refuse_different
from transaxle.live.model.destination import LocalSink
from transaxle.live.save import save
from transaxle.live.transport.world import World


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
def test_all_ranks_open_one_checkpoint(tmp_path: Path, replaced: bool) -> None:
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


@pytest.mark.parametrize("how", ["untouched", "written to", "replaced"])
def test_files_that_are_written_to_while_they_are_read(tmp_path: Path, how: str) -> None:
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


def test_all_ranks_read_one_commit(tmp_path: Path) -> None:
    save(_state(0), tmp_path / "run", to="safetensors")
    (tmp_path / "run" / MANIFEST).unlink()
    for said in run(2, _moved, str(tmp_path / "run")):
        assert "ranks 0 and 1 opened different checkpoints" in said
        assert "hf://owner/name/run" in said


def _differ(rank: int, world: int, folder: str) -> str:
    """Each rank of its own machine, with a copy of its own under one path: as far apart as two saves are."""
    checkpoint = open_checkpoint(Path(folder, str(rank)))
    mine = replace(checkpoint.container, path="run")
    try:
        refuse_different(Checkpoint(mine, checkpoint.settings, None, None), World())
    except TransaxleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("other", [1, 2])
def test_copies_on_several_machines_are_compared(tmp_path: Path, other: int) -> None:
    for rank, value in ((0, 1), (1, other)):
        save(_state(value), tmp_path / str(rank), to="safetensors")
    for said in run(2, _differ, str(tmp_path)):
        assert ("ranks 0 and 1 opened different checkpoints" in said) == (other == 2)


def _each_its_own(rank: int, world: int, folder: str) -> tuple[str, float]:
    state = _state(0)
    try:
        load(state, f"{folder}/{rank}")
    except TransaxleError as error:
        return str(error), float(state["part.0.weight"].sum())
    return "", float(state["part.0.weight"].sum())


@pytest.mark.parametrize("other", [1, 2])
def test_several_paths_have_equal_copies(tmp_path: Path, other: int) -> None:
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


ASKED: dict[str, tuple[Any, Any]] = {
    "broadcast_replicated": (True, False),
    "strict": (False, True),
    "dtype": (None, "fp32"),
    "dialect": (None, "identity"),
}


@pytest.mark.parametrize("argument", ASKED)
def test_all_ranks_ask_for_the_same(tmp_path: Path, argument: str) -> None:
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
            case "opened with a config":
                load(state, open_checkpoint(source, config=config))
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
    "opened with a config": "config: rank 1 reads",
    "opened another": "ranks 0 and 1 opened different checkpoints",
    "optimizer": "optimizer: rank 1 gave True, but rank 0 gave False",
    "type": "rank 1 failed: TypeError",
    "equal": "",
}


@pytest.mark.parametrize("how", WAYS)
def test_all_ranks_read_in_one_way(tmp_path: Path, how: str) -> None:
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
