"""DeepSpeed checkpoints whose files contradict each other, or themselves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.corpus.case import Case, Make
from tests.formats.deepspeed.made import TAG, save
from transaxle.formats.deepspeed import keys

SHAPES = {"up": (6, 4), "norm": (8,)}
MODEL = f"mp_rank_00{keys.MODEL_END}"
OPTIM = f"zero_pp_rank_{{}}_mp_rank_00{keys.OPTIM_END}"
Change = Callable[[dict[str, Any]], object]


def run(folder: Path, ranks: int = 2) -> Path:
    """Save a ZeRO-1 run whose data-parallel ranks hold equal parts of one flat buffer; return the step's folder."""
    shards = {name: [torch.rand(shape)] for name, shape in SHAPES.items()}
    save(folder, shards, None)
    step = folder / TAG
    whole = torch.load(step / OPTIM.format(0), weights_only=False)
    for rank in range(ranks):
        held = _part(whole, rank, ranks)
        held[keys.STATE][keys.PARTITION_COUNT] = [ranks]
        torch.save(held, step / OPTIM.format(rank))
    _edit(step / MODEL, lambda held: held.update({keys.DP_WORLD: ranks}))
    return step


def _part(value: Any, rank: int, ranks: int) -> Any:
    """Return a copy in which every flat buffer is this rank's part of it."""
    if isinstance(value, torch.Tensor) and value.dim():
        return value.chunk(ranks)[rank].clone()
    if isinstance(value, dict):
        return {key: _part(item, rank, ranks) for key, item in value.items()}
    return [_part(item, rank, ranks) for item in value] if isinstance(value, list) else value


def _edit(file: Path, change: Change) -> None:
    held = torch.load(file, weights_only=False)
    change(held)
    torch.save(held, file)


def state(change: Change, *ranks: int) -> Make:
    """Change the optimizer files of some ranks."""

    def make(folder: Path) -> None:
        step = run(folder)
        for rank in ranks or (0, 1):
            _edit(step / OPTIM.format(rank), lambda held: change(held[keys.STATE]))

    return make


def model(change: Change) -> Make:
    return lambda folder: _edit(run(folder) / MODEL, change)


def shapes(**changed: tuple[int, ...]) -> Make:
    return model(
        lambda held: held[keys.PARAM_SHAPES][0].update({name: torch.Size(shape) for name, shape in changed.items()})
    )


def latest(text: str) -> Make:
    def make(folder: Path) -> None:
        run(folder)
        shutil.copytree(folder, folder.parent / "outside")
        (folder / keys.LATEST).write_text(text, "utf-8")
        (folder / "logs").mkdir()

    return make


def without(*files: str) -> Make:
    def make(folder: Path) -> None:
        step = run(folder)
        for file in files:
            (step / file).unlink()

    return make


def universal(change: Change, state: str = keys.FP32) -> Make:
    """Save a universal checkpoint of two parameters as DeepSpeed does, one state of the first changed."""

    def make(folder: Path) -> None:
        step = folder / "global_step3_universal"
        for name, shape in SHAPES.items():
            (step / keys.ZERO_FOLDER / name).mkdir(parents=True)
            for key in (keys.FP32, "exp_avg", "exp_avg_sq"):
                held = {keys.PARAM: torch.rand(shape), keys.CAT_DIM: 0}
                if name == "up" and key == state:
                    change(held)
                torch.save(held, step / keys.ZERO_FOLDER / name / f"{key}{keys.STATE_END}")
            torch.save(torch.tensor(3.0), step / keys.ZERO_FOLDER / name / f"{keys.STEP}{keys.STATE_END}")
        source = run(folder / "run")
        whole = torch.load(source / OPTIM.format(0), weights_only=False)[keys.STATE]
        torch.save(whole[keys.BASE_STATE], step / keys.ZERO_FOLDER / keys.OPTIMIZER_FILE)
        shutil.copy(source / MODEL, step / MODEL)
        shutil.rmtree(folder / "run")
        (folder / keys.LATEST_UNIVERSAL).write_text(step.name, "utf-8")

    return make


def gone(*parts: str) -> Make:
    def make(folder: Path) -> None:
        universal(lambda _: None)(folder)
        for part in parts:
            (folder / "global_step3_universal" / keys.ZERO_FOLDER / part).unlink()

    return make


CASES = {
    "latest names a missing folder": Case(
        latest("global_step9"), "INCOMPLETE", "'global_step9', whose folder is missing"
    ),
    "latest leads out": Case(latest("../outside"), "PATH_ESCAPE", "not a folder of the checkpoint"),
    "latest leads out to a step": Case(latest(f"../outside/{TAG}"), "PATH_ESCAPE", "not a folder of the checkpoint"),
    "latest is absolute": Case(latest("/etc"), "PATH_ESCAPE", "'/etc'"),
    "latest leads out and in": Case(latest(f"../source/{TAG}"), "PATH_ESCAPE", "not a folder of the checkpoint"),
    "latest is empty": Case(latest(""), "CORRUPT", "not a folder of the checkpoint"),
    "latest is binary": Case(latest("\0\1"), "PATH_ESCAPE", "not a folder of the checkpoint"),
    "partition counts conflict": Case(
        state(lambda held: held.update(partition_count=[1]), 1), "CORRUPT", "partition_count is [1], but [2]"
    ),
    "partition counts of nothing": Case(state(lambda held: held.update(partition_count=[0])), "CORRUPT", "over 0"),
    "more partitions than ranks": Case(state(lambda held: held.update(partition_count=[4])), "CORRUPT", "over 4 ranks"),
    "partition counts of more groups": Case(
        state(lambda held: held.update(partition_count=[2, 2])), "CORRUPT", "2 numbers for 1 groups"
    ),
    "partition counts of no groups": Case(state(lambda held: held.update(partition_count=[])), "CORRUPT", "0 numbers"),
    "a partition count in words": Case(state(lambda held: held.update(partition_count=["2"])), "CORRUPT", "count"),
    "shapes a little shorter than the data": Case(shapes(up=(5, 4)), "CORRUPT", "its parameters need 28 elements"),
    "shapes a little longer than the data": Case(shapes(up=(7, 4)), "CORRUPT", "its parameters need 36 elements"),
    "shapes much shorter than the data": Case(shapes(up=(1,), norm=(1,)), "CORRUPT", "need 2 elements"),
    "shapes much longer than the data": Case(shapes(up=(600, 400)), "CORRUPT", "its parameters need"),
    "shapes that overflow": Case(shapes(up=(2**40, 2**40)), "CORRUPT", ""),
    "negative shapes": Case(
        model(lambda held: held.update(param_shapes=[{"up": (-6, -4), "norm": (8,)}])), "CORRUPT", ""
    ),
    "shapes of truth": Case(
        model(lambda held: held.update(param_shapes=[{"up": (24, True), "norm": (8,)}])), "CORRUPT", ""
    ),
    "paddings that are larger than the buffers": Case(
        state(lambda held: held.update(group_paddings=[10**9])), "CORRUPT", "its parameters need"
    ),
    "a padding that is not there": Case(state(lambda held: held.update(group_paddings=[4]), 1), "CORRUPT", "group 0"),
    "a missing rank in the middle": Case(without(OPTIM.format(0)), "INCOMPLETE", "the file of this rank is missing"),
    "a missing last rank": Case(without(OPTIM.format(1)), "INCOMPLETE", "zero_pp_rank_1"),
    "a missing model file": Case(without(MODEL), "INCOMPLETE", "the file of this rank is missing"),
    "no optimizer files": Case(without(OPTIM.format(0), OPTIM.format(1)), "INCOMPLETE", "the run used ZeRO"),
    "a rank of another stage": Case(state(lambda held: held.update(zero_stage=2), 1), "CORRUPT", "stages: [1, 2]"),
    "a stage that is not known": Case(state(lambda held: held.update(zero_stage=4)), "CORRUPT", "4"),
    "a moment that is shorter": Case(
        state(lambda held: held[keys.BASE_STATE][keys.STATES][0].update(exp_avg=torch.zeros(5)), 1),
        "CORRUPT",
        "the buffer has only 5",
    ),
    "a moment on one rank only": Case(
        state(lambda held: held[keys.BASE_STATE][keys.STATES][0].pop("exp_avg"), 1), "INCOMPLETE", "exp_avg"
    ),
    "a moment of another type": Case(
        state(lambda h: h[keys.BASE_STATE][keys.STATES][0].update(exp_avg=torch.zeros(16, dtype=torch.int32)), 1),
        "DTYPE_MIXED",
        "exp_avg",
    ),
    "masters that are a matrix": Case(
        state(lambda held: held.update(single_partition_of_fp32_groups=[torch.zeros(4, 4)])), "CORRUPT", "flat buffer"
    ),
    "steps that conflict": Case(
        state(lambda held: held[keys.BASE_STATE][keys.STATES][0].update(step=torch.tensor(9.0)), 1),
        "UNEQUAL_COPIES",
        "step",
        late=True,
        unverified=True,
    ),
    "cat_dim out of range": Case(universal(lambda h: h.update(cat_dim=2)), "SHAPE_MISMATCH", "cat_dim is 2"),
    "a negative cat_dim": Case(universal(lambda held: held.update(cat_dim=-1)), "CORRUPT", "cat_dim"),
    "a cat_dim in words": Case(universal(lambda held: held.update(cat_dim="0")), "CORRUPT", "cat_dim"),
    "sub-parameters that do not divide": Case(
        universal(lambda held: held.update(param_n_sub_params=4)), "SHAPE_MISMATCH", "param_n_sub_params is 4"
    ),
    "no sub-parameters": Case(
        universal(lambda held: held.update(param_n_sub_params=0)), "SHAPE_MISMATCH", "param_n_sub_params is 0"
    ),
    "a universal shape that is shorter": Case(
        universal(lambda held: held.update(param=torch.rand(5, 4))), "INCOMPLETE", "[5, 4]"
    ),
    "a universal moment of another shape": Case(
        universal(lambda held: held.update(param=torch.rand(7, 4)), "exp_avg"), "INCOMPLETE", "[7, 4]"
    ),
    "a universal moment that is transposed": Case(
        universal(lambda held: held.update(param=torch.rand(4, 6)), "exp_avg"), "SHAPE_MISMATCH", "[4, 6]"
    ),
    "no fp32.pt": Case(gone("up/fp32.pt"), "INCOMPLETE", "its file fp32.pt is missing"),
    "no moment": Case(gone("up/exp_avg.pt"), "INCOMPLETE", "its file exp_avg.pt is missing"),
    "no optimizer_state.pt": Case(gone(keys.OPTIMIZER_FILE), "INCOMPLETE", ""),
}
