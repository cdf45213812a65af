"""Rank files that do not belong together, or contradict themselves, are refused by name before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.formats.ranks import made
from tests.formats.refusals import refuses
from transaxle.errors import Code

WHOLE = torch.arange(40.0).view(10, 4)
BIAS = torch.tensor([0.5, 1.5, 2.5])
GROUP = {"lr": 0.1, "params": [0]}
State = dict[str, Any]


def state(rank: int, world: int = 2, whole: torch.Tensor = WHOLE, **more: Any) -> State:
    """A rank's part of a tensor, and a buffer."""
    return {"w": made.dtensor(whole, made.mesh(rank, {"fsdp": world}), ["S0"]), "b": BIAS, **more}


def good(folder: Path, world: int = 2, **more: Any) -> Path:
    made.write_all(folder / "step", [state(rank, world, **more) for rank in range(world)])
    return folder / "step"


def file(rank: int, world: int = 2, stem: str = "model") -> str:
    return f"{stem}_world_size_{world}_rank_{rank}.pt"


def test_what_is_good(tmp_path: Path) -> None:
    """The same files are read as long as nothing is wrong with them."""
    with tx.open(good(tmp_path)) as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), WHOLE)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_rank(tmp_path: Path, missing: int) -> None:
    (good(tmp_path, 3) / file(missing, 3)).unlink()
    with refuses("INCOMPLETE", f"the files of rank {missing} are missing", hint="Copy the missing files"):
        tx.open(tmp_path / "step")


def test_many_missing_ranks(tmp_path: Path) -> None:
    (good(tmp_path, 1) / file(0, 1)).rename(tmp_path / "step" / file(0, 20))
    with refuses("INCOMPLETE", "rank 1, 2, 3, 4, 5, 6 and 13 more are missing"):
        tx.open(tmp_path / "step")


def test_two_runs_of_other_sizes(tmp_path: Path) -> None:
    good(tmp_path, 2)
    good(tmp_path, 3)
    with refuses("CORRUPT", "2 ranks and of 3 ranks", hint="one save"):
        tx.open(tmp_path / "step")


def test_more_ranks_than_the_name_says(tmp_path: Path) -> None:
    shutil.copy(good(tmp_path) / file(1), tmp_path / "step" / file(2))
    with refuses("CORRUPT", "3 files are of a job of 2 ranks"):
        tx.open(tmp_path / "step")


def test_a_rank_named_twice(tmp_path: Path) -> None:
    shutil.copy(good(tmp_path) / file(1), tmp_path / "step" / "model_world_size_2_rank_01.pt")
    with refuses("CORRUPT", "are both of rank 1"):
        tx.open(tmp_path / "step")


@pytest.mark.parametrize(("saved_by", "name"), [(2, 1), (0, 1), (0, 2)])
def test_a_file_under_the_name_of_another_rank(tmp_path: Path, saved_by: int, name: int) -> None:
    folder = good(tmp_path, 3)
    shutil.copy(folder / file(saved_by, 3), folder / file(name, 3))
    with refuses("CORRUPT", f"rank {saved_by} saved it", file=file(name, 3), tensor="w", hint="under its own name"):
        tx.open(folder)


SECOND: dict[str, tuple[Callable[[], State], Code, str]] = {
    "a tensor of another shape": (lambda: state(1, whole=WHOLE[:, :2]), "SHAPE_MISMATCH", "[10, 4] in"),
    "a tensor of another dtype": (lambda: state(1, whole=WHOLE.bfloat16()), "DTYPE_MIXED", "it is BF16"),
    "a mesh of more ranks": (lambda: {**state(1), **_weight(made.mesh(1, {"fsdp": 3}), ["S0"])},
        "INCOMPLETE", "there are 2 files"),
    "a mesh of two dims": (lambda: {**state(1), **_weight(made.mesh(1, {"a": 2, "b": 1}), ["S1", "R"])},
        "OVERLAP", "both contain"),
    "placements along another dim": (lambda: {**state(1), **_weight(made.mesh(1, {"fsdp": 2}), ["S1"])},
        "OVERLAP", "both contain"),
    "replicated here and cut there": (lambda: {**state(1), **_weight(made.mesh(1, {"fsdp": 2}), ["R"])},
        "OVERLAP", "both contain"),
    "a plain tensor here and a part there": (lambda: {**state(1), "w": WHOLE}, "CORRUPT", "it is whole in"),
    "no tensor": (lambda: {"b": BIAS}, "INCOMPLETE", "where it is missing"),
    "no buffer": (lambda: {"w": state(1)["w"]}, "INCOMPLETE", "where it is missing"),
    "one buffer more": (lambda: state(1, c=BIAS), "INCOMPLETE", "where it is missing"),
    "a local tensor that is too short": (
        lambda: {**state(1), **_weight(made.mesh(1, {"fsdp": 2}), ["S0"], WHOLE[:4])}, "CORRUPT", "[4, 4]"),
    "a local tensor of other dims": (
        lambda: {**state(1), **_weight(made.mesh(1, {"fsdp": 2}), ["S0"], WHOLE[:5, 0])}, "CORRUPT", "its file has"),
    "an optimizer's state": (lambda: {"state": {}, "param_groups": [GROUP]}, "INCOMPLETE", "where it is missing"),
    "nothing": (dict, "INCOMPLETE", "where it is missing"),
}  # fmt: skip


def _weight(mesh: Any, placements: list[str], local: torch.Tensor | None = None) -> State:
    return {"w": made.dtensor(WHOLE, mesh, placements, local)}


@pytest.mark.parametrize("case", SECOND)
def test_the_second_rank_contradicts_the_first(tmp_path: Path, case: str) -> None:
    second, code, message = SECOND[case]
    made.write_all(tmp_path / "step", [state(0), second()])
    with refuses(code, message):
        tx.open(tmp_path / "step")


def test_meshes_of_more_ranks_than_files(tmp_path: Path) -> None:
    """The names say two ranks, and the meshes four."""
    made.write_all(tmp_path / "step", [state(rank, 4) for rank in range(2)])
    with refuses("INCOMPLETE", "shares it with rank 2, 3, but there are 2 files", tensor="w"):
        tx.open(tmp_path / "step")


def test_meshes_of_fewer_ranks_than_files(tmp_path: Path) -> None:
    made.write_all(tmp_path / "step", [state(rank % 2, 2) for rank in range(4)])
    with refuses("CORRUPT", "rank 0 saved it, but the file has the name of rank 2", tensor="w"):
        tx.open(tmp_path / "step")


def test_a_buffer_that_differs_between_ranks(tmp_path: Path) -> None:
    """It is compared before anything is written."""
    made.write_all(tmp_path / "step", [state(0), {**state(1), "b": BIAS + 1}])
    with refuses("UNEQUAL_COPIES", "ranks 0 and 1 have the same tensor", tensor="b"):
        tx.convert(tmp_path / "step", tmp_path / "out", to="safetensors", sync=False)
    assert not (tmp_path / "out").exists()


def test_a_part_that_differs_between_replicas(tmp_path: Path) -> None:
    axes = {"ddp": 2, "fsdp": 2}
    states = [{"w": made.dtensor(WHOLE + (rank == 3), made.mesh(rank, axes), ["R", "S0"])} for rank in range(4)]
    made.write_all(tmp_path / "step", states)
    with refuses("UNEQUAL_COPIES", "ranks 1 and 3 have the same part", tensor="w"):
        tx.convert(tmp_path / "step", tmp_path / "out", to="safetensors", sync=False)


def optimizer(rank: int, step: float = 2.0, lr: float = 0.1) -> State:
    """A rank's part of AdamW's state."""
    moment = made.dtensor(WHOLE / 8, made.mesh(rank, {"fsdp": 2}), ["S0"])
    return {
        "state": {"w": {"step": torch.tensor(step), "exp_avg": moment}},
        "param_groups": [{"lr": lr, "betas": (0.9, 0.95), "params": ["w"]}],
    }


OTHER_STEPS: dict[str, tuple[str, list[State], str]] = {
    "a step number": ("optim", [optimizer(0), optimizer(1, step=3.0)], "optim/w/step"),
    "a learning rate": ("optim", [optimizer(0), optimizer(1, lr=0.2)], "parameter groups differ"),
    "a schedule": ("extra_state", [{"lr_scheduler": {"last_epoch": step, "kind": "x"}} for step in (2, 3)],
        "lr_scheduler.last_epoch is 3, but 2"),
    "a counter": ("extra_state", [{"global_step": step, "note": "x"} for step in (2, 3)], "global_step is 3, but 2"),
}  # fmt: skip


@pytest.mark.parametrize("with_optimizer", [None, True])
@pytest.mark.parametrize("case", OTHER_STEPS)
def test_ranks_of_two_steps(tmp_path: Path, case: str, with_optimizer: bool | None) -> None:
    """The optimizer and the schedule tell that the model's parts are of two steps, whether or not they are read."""
    stem, states, message = OTHER_STEPS[case]
    folder = good(tmp_path)
    made.write_all(folder, states, stem)
    with refuses_any("CORRUPT", "UNEQUAL_COPIES", message=message):
        tx.convert(folder, tmp_path / "out", to="dcp", optimizer=with_optimizer, sync=False)
    assert not (tmp_path / "out").exists()


def refuses_any(*codes: str, message: str) -> Any:
    return pytest.raises(tx.TransaxleError, match=f"(?s)({'|'.join(codes)}).*{message}")


def test_random_states_may_differ(tmp_path: Path) -> None:
    """What depends on the rank is left behind, and listed."""
    folder = good(tmp_path)
    made.write_all(folder, [{"rng": {"cpu": torch.tensor([rank])}, "epoch": 3} for rank in range(2)], "extra_state")
    with tx.open(folder) as checkpoint:
        assert checkpoint.metadata["left_behind"] == {"rng": "different from rank to rank"}


def test_fsdp1_tensors_that_contradict_themselves(tmp_path: Path) -> None:
    """Each ShardedTensor says which box it is, of which rank, and of how many."""

    def folder(second: Any) -> Path:
        made.write_all(tmp_path / "step", [{"w": made.sharded(WHOLE, 0, 2)}, {"w": second}])
        return tmp_path / "step"

    with tx.open(folder(made.sharded(WHOLE, 1, 2))) as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), WHOLE)
    for second, code, message in [
        (made.sharded(WHOLE, 0, 2), "CORRUPT", "rank 0 saved it, but the file has the name of rank 1"),
        (made.sharded(WHOLE, 1, 3), "CORRUPT", "a job of 3 ranks saved it, and there are 2 files"),
        (made.sharded(WHOLE, 1, 2, shard_offsets=[4, 0]), "OVERLAP", "both contain"),
        (made.sharded(WHOLE, 1, 2, shard_offsets=[6, 0]), "CORRUPT", "does not lie inside"),
        (made.sharded(WHOLE, 1, 2, shard_offsets=[-5, 0]), "CORRUPT", "its shard is described"),
        (made.sharded(WHOLE, 1, 2, shard_sizes=4), "CORRUPT", "its shard is described"),
        (made.sharded(WHOLE, 1, 2, shard_sizes=[4, 4]), "CORRUPT", "its shard is described"),
        (made.sharded(WHOLE, 1, 2, local=WHOLE[:4]), "CORRUPT", "the rank's part is [4, 4]"),
        (made.sharded(WHOLE, 1, 2, local=WHOLE[5:].double()), "CORRUPT", "the rank's part is F64"),
        (made.sharded(WHOLE[:6], 1, 2), "SHAPE_MISMATCH", "[10, 4] in"),
    ]:
        with refuses(code, message, tensor="w"):
            tx.open(folder(second))


@pytest.mark.parametrize("template", ["model_rank.pt", "{}_{}.pt", "sub/rank{}.pt", "{rank}{}"])
def test_templates_that_have_no_place_for_the_rank(tmp_path: Path, template: str) -> None:
    with pytest.raises(tx.TransaxleError, match=r"needs one \{\}"):
        tx.open(good(tmp_path), ranks=template)


def test_a_template_that_fits_no_file(tmp_path: Path) -> None:
    with pytest.raises(tx.TransaxleError, match="no ranks checkpoint here"):
        tx.open(good(tmp_path), ranks="part{}.pt")


def test_a_template_with_another_format(tmp_path: Path) -> None:
    with pytest.raises(tx.TransaxleError, match="Omit --format"):
        tx.open(good(tmp_path), ranks="model{}.pt", format="dcp")


@pytest.mark.parametrize("template", ["part{}.bin", "part{rank}.bin"])
def test_names_that_the_user_says(tmp_path: Path, template: str) -> None:
    (tmp_path / "step").mkdir()
    for rank in range(2):
        made.write(tmp_path / "step" / f"part{rank}.bin", state(rank))
    with tx.open(tmp_path / "step", ranks=template) as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), WHOLE)
    (tmp_path / "step" / "part0.bin").unlink()
    with refuses("INCOMPLETE", "rank 0"):
        tx.open(tmp_path / "step", ranks=template)


@pytest.mark.parametrize("with_others", [True, False])
def test_a_file_alone(tmp_path: Path, with_others: bool) -> None:
    """One rank's file is a part: the message leads to the folder, or to the files that are missing."""
    folder = good(tmp_path)
    if with_others:
        with refuses("INCOMPLETE", "the file of one of 2 ranks", hint="Give the folder with the files of all ranks"):
            tx.open(folder / file(1))
    else:
        (folder / file(0)).unlink()
        with refuses("INCOMPLETE", "rank 0 are missing", hint="Copy the missing files"):
            tx.open(folder / file(1))


@pytest.mark.parametrize("part", [state(1)["w"], made.sharded(WHOLE, 1, 2)], ids=["DTensor", "ShardedTensor"])
def test_a_file_alone_of_another_name(tmp_path: Path, part: Any) -> None:
    made.write(tmp_path / "model_rank1.pt", {"w": part})
    with refuses("UNSUPPORTED", "only one rank's part", hint="say how they are named: --ranks"):
        tx.open(tmp_path / "model_rank1.pt")


def test_a_job_of_one_rank(tmp_path: Path) -> None:
    """Its only file has everything."""
    with tx.open(good(tmp_path, 1) / file(0, 1)) as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), WHOLE)


def test_the_optimizer_of_fsdp1(tmp_path: Path) -> None:
    """Its numbered parts of flat parameters have no names: the weights convert without them, and with them nothing."""
    folder = tmp_path / "step"
    made.write_all(folder, [{"w": made.sharded(WHOLE, rank, 2)} for rank in range(2)])
    for sizes in [(20, 20), (24, 16)]:
        moments = [
            {0: {"step": torch.tensor(2.0), "exp_avg": torch.full((size,), rank)}} for rank, size in enumerate(sizes)
        ]
        made.write_all(folder, [{"state": state, "param_groups": [GROUP]} for state in moments], "optim")
        with refuses("UNSUPPORTED", "FSDP1's optimizer numbers flat parameters", hint="--no-optimizer"):
            tx.convert(folder, tmp_path / "out", to="dcp", sync=False)
    tx.convert(folder, tmp_path / "out", to="dcp", optimizer=False, sync=False)
    with tx.open(tmp_path / "out") as converted:
        assert torch.equal(converted["w"].torch(), WHOLE)
