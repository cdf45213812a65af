"""Sorts the files of a DeepSpeed checkpoint by rank, and finds the step folder (such as `global_step100`) to open.

A missing rank, or two files that claim the same rank, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from transaxle.errors import Faults, refuse
from transaxle.formats.deepspeed import keys
from transaxle.formats.registry import HERE, RANK_FILES, Folder, newest_step

_ZERO, _MODEL, _LAYER, _EXPERT, _NUMBERED = map(re.compile, RANK_FILES)
_MODEL_STATES = "_model_states"
_HINT = "Copy the missing files; where each machine wrote to its own disk, gather the files in one folder first."

_Rank = TypeVar("_Rank", int, tuple[int, int])
ModelRank = int
"""Number of a model-parallel rank: pipeline stage * tensor-parallel degree + tensor-parallel rank."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of a DeepSpeed step folder, sorted by rank."""

    model: Mapping[ModelRank, Mapping[int, str]]
    """Model-parallel rank -> data-parallel rank -> name of the model file; without ZeRO-3 the only data-parallel rank
    is 0."""
    optimizer: Mapping[ModelRank, Mapping[int, str]]
    """Model-parallel rank -> data-parallel rank -> name of the optimizer file; empty if the run does not use ZeRO."""
    layers: Mapping[int, Mapping[int, str]]
    """Pipeline layer -> tensor-parallel rank -> name of the file with the layer's weights."""
    experts: Mapping[ModelRank, Mapping[tuple[int, int], str]]
    """Model-parallel rank -> (MoE layer, expert) -> name of the expert's file; the layer is -1 if the file contains the
    weights of this expert in all layers."""
    numbered: tuple[str, ...]
    """Names of the optimizer files of expert-parallel ranks in a run without ZeRO; the optimizer state in these files
    has no parameter names."""
    zero3: bool
    """Whether each data-parallel rank has a separate model file, as under ZeRO-3."""

    @property
    def all(self) -> tuple[str, ...]:
        """Names of all files of the step folder that belong to a rank."""
        grids = (*self.model.values(), *self.optimizer.values(), *self.layers.values())
        names = [name for ranks in grids for name in ranks.values()]
        return (*names, *(name for of_rank in self.experts.values() for name in of_rank.values()), *self.numbered)


def is_rank_file(name: str) -> bool:
    """Return whether a file name follows the pattern of DeepSpeed's rank files."""
    return any(pattern.fullmatch(name) for pattern in (_ZERO, _MODEL, _LAYER, _EXPERT, _NUMBERED))


def sort_files(names: Iterable[str], folder: str) -> RankFiles:
    """Sort the files of a step folder by rank.

    Args:
        names: names of all files in the folder.
        folder: name of the folder, for error messages.

    Raises:
        Refused: with the code INCOMPLETE if files of ranks are missing; with the code CORRUPT if several files claim
            the same rank.
    """
    model: dict[int, dict[int, str]] = {}
    optimizer: dict[int, dict[int, str]] = {}
    layers: dict[int, dict[int, str]] = {}
    experts: dict[int, dict[tuple[int, int], str]] = {}
    numbered: list[str] = []
    zero3 = False
    faults = Faults()
    for name in sorted(names):
        if match := _EXPERT.fullmatch(name):
            experts_of_rank = experts.setdefault(int(match[3]), {})
            _claim(experts_of_rank, (int(match[1] or -1), int(match[2])), name, faults)
        elif _NUMBERED.fullmatch(name):
            numbered.append(name)
        elif match := _ZERO.fullmatch(name):
            grid = model if match[3] == _MODEL_STATES else optimizer
            zero3 |= grid is model
            _claim(grid.setdefault(int(match[2]), {}), int(match[1]), name, faults)
        elif match := _MODEL.fullmatch(name):
            _claim(model.setdefault(int(match[1]), {}), 0, name, faults)
        elif match := _LAYER.fullmatch(name):
            _claim(layers.setdefault(int(match[1]), {}), int(match[2] or 0), name, faults)
    if not model and not optimizer:
        raise refuse("INCOMPLETE", f"the folder has no file *{keys.MODEL_END}", file=folder, hint=_HINT)
    _check_complete(model, optimizer, zero3, faults)
    if faults:
        raise faults.error()
    return RankFiles(model, optimizer, layers, experts, tuple(numbered), zero3)


def _claim(files_by_rank: dict[_Rank, str], rank: _Rank, name: str, faults: Faults) -> None:
    other_file = files_by_rank.setdefault(rank, name)
    if other_file != name:
        faults.add(
            "CORRUPT",
            f"{other_file} belongs to the same rank",
            name,
            hint="Remove the file that belongs to another checkpoint.",
        )


def _check_complete(
    model: Mapping[int, Mapping[int, str]], optimizer: Mapping[int, Mapping[int, str]], zero3: bool, faults: Faults
) -> None:
    """Check that model files and optimizer files exist for the same ranks, and that no rank number is skipped."""
    ranks = range(max(*model, *optimizer, 0) + 1)
    dp_ranks = range(max((rank for grid in (*optimizer.values(), *model.values()) for rank in grid), default=0) + 1)
    if len(ranks) * len(dp_ranks) > 1 << 20:
        faults.add(
            "INCOMPLETE",
            f"the file names claim {len(ranks)} x {len(dp_ranks)} ranks; at most {1 << 20} are read",
            None,
            hint=_HINT,
        )
        return
    for rank in ranks:
        for dp_rank in dp_ranks if zero3 else (0,):
            if dp_rank not in model.get(rank, {}):
                name = f"zero_pp_rank_{dp_rank}_mp_rank_{rank:02d}" if zero3 else f"mp_rank_{rank:02d}"
                faults.add("INCOMPLETE", "the file of this rank is missing", f"{name}{keys.MODEL_END}", hint=_HINT)
        for dp_rank in dp_ranks if optimizer else ():
            if dp_rank not in optimizer.get(rank, {}):
                name = f"*zero_pp_rank_{dp_rank}_mp_rank_{rank:02d}{keys.OPTIM_END}"
                faults.add("INCOMPLETE", "the file of this rank is missing", name, hint=_HINT)


_STEP = "global_step"
_STEP_FOLDER = re.compile(rf"{_STEP}\d+")


def of_run(folder: Folder) -> tuple[str, ...]:
    """Return the step folder that the file `latest` names. Without that file, return all `global_step` folders; if
    there are none, return the given folder itself.
    """
    newest = newest_step(folder, keys.LATEST)
    if newest is not None and not _is_universal(folder, newest):
        return (newest,)
    if keys.ZERO_FOLDER not in folder.folders and any(map(is_rank_file, folder.names)):
        return (HERE,)
    steps = (name for name in folder.folders if _STEP_FOLDER.fullmatch(name))
    return tuple(name for name in steps if not _is_universal(folder, name))


def universal(folder: Folder) -> tuple[str, ...]:
    """Return the folder named in the file `latest_universal`; without this file, all universal folders, or the folder
    itself.
    """
    newest = newest_step(folder, keys.LATEST_UNIVERSAL)
    if newest is not None:
        return (newest,)
    if keys.ZERO_FOLDER in folder.folders and _is_universal(folder, HERE):
        return (HERE,)
    return tuple(name for name in folder.folders if name.startswith(_STEP) and _is_universal(folder, name))


def _is_universal(folder: Folder, name: str) -> bool:
    """Return whether a folder is a universal checkpoint."""
    inside = f"{folder.inside}" if name == HERE else f"{folder.inside}{name}/"
    zero = keys.ZERO_FOLDER
    subfolders = folder.folders if name == HERE else folder.storage.listing(inside.rstrip("/")).folders
    return zero in subfolders and keys.OPTIMIZER_FILE in folder.storage.listing(f"{inside}{zero}").everything()
