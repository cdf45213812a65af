"""The files of a checkpoint's folder, by rank: every one that must be there is, and no two claim the same rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from transaxle.errors import refuse
from transaxle.formats.builtin_formats import RANK_FILES
from transaxle.formats.catalog.problem_list import Faults
from transaxle.formats.deepspeed import keys

_ZERO, _MODEL, _LAYER, _EXPERT, _NUMBERED = map(re.compile, RANK_FILES)
_MODEL_STATES = "_model_states"
_HINT = "A checkpoint of a run whose ranks write to their own disks must be gathered into one folder first."

_Rank = TypeVar("_Rank", int, tuple[int, int])
ModelRank = int
"""Number of a rank that holds a part of the model: pipeline stage times tensor-parallel degree plus rank."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one folder."""

    model: Mapping[ModelRank, Mapping[int, str]]
    """Model rank -> data-parallel rank -> model file. Below ZeRO-3 there is one, under 0."""
    optimizer: Mapping[ModelRank, Mapping[int, str]]
    """Model rank -> data-parallel rank -> optimizer file; empty without ZeRO."""
    layers: Mapping[int, Mapping[int, str]]
    """Layer of a pipeline -> tensor-parallel rank -> file."""
    experts: Mapping[ModelRank, Mapping[tuple[int, int], str]]
    """Tensor-parallel rank -> (mixture, expert) -> file; the mixture is -1 in files that hold all of them."""
    numbered: tuple[str, ...]
    """Optimizer files of expert-parallel ranks without ZeRO: they name no parameter."""
    zero3: bool
    """The model files are cut over the data-parallel ranks."""

    @property
    def all(self) -> tuple[str, ...]:
        """All of them."""
        grids = (*self.model.values(), *self.optimizer.values(), *self.layers.values())
        names = [name for ranks in grids for name in ranks.values()]
        return (*names, *(name for mine in self.experts.values() for name in mine.values()), *self.numbered)


def is_rank_file(name: str) -> bool:
    """Tell whether a name is that of a rank's file."""
    return any(pattern.fullmatch(name) for pattern in (_ZERO, _MODEL, _LAYER, _EXPERT, _NUMBERED))


def sort_files(names: Iterable[str], folder: str) -> RankFiles:
    """Sort the files of a folder by rank.

    Args:
        names: all files in it.
        folder: its name, for errors.

    Raises:
        Refused: INCOMPLETE naming every missing rank; CORRUPT naming files that claim the same rank.
    """
    model: dict[int, dict[int, str]] = {}
    optimizer: dict[int, dict[int, str]] = {}
    layers: dict[int, dict[int, str]] = {}
    experts: dict[int, dict[tuple[int, int], str]] = {}
    numbered: list[str] = []
    zero3 = False
    faults = Faults()
    for name in sorted(names):
        if found := _EXPERT.fullmatch(name):
            held = experts.setdefault(int(found[3]), {})
            _claim(held, (int(found[1] or -1), int(found[2])), name, faults)
        elif _NUMBERED.fullmatch(name):
            numbered.append(name)
        elif found := _ZERO.fullmatch(name):
            grid = model if found[3] == _MODEL_STATES else optimizer
            zero3 |= grid is model
            _claim(grid.setdefault(int(found[2]), {}), int(found[1]), name, faults)
        elif found := _MODEL.fullmatch(name):
            _claim(model.setdefault(int(found[1]), {}), 0, name, faults)
        elif found := _LAYER.fullmatch(name):
            _claim(layers.setdefault(int(found[1]), {}), int(found[2] or 0), name, faults)
    if not model and not optimizer:
        raise refuse("INCOMPLETE", f"no file *{keys.MODEL_END} is there", file=folder, hint=_HINT)
    _complete(model, optimizer, zero3, faults)
    if faults:
        raise faults.error()
    return RankFiles(model, optimizer, layers, experts, tuple(numbered), zero3)


def _claim(held: dict[_Rank, str], rank: _Rank, name: str, faults: Faults) -> None:
    taken = held.setdefault(rank, name)
    if taken != name:
        faults.add(
            "CORRUPT", f"{taken} is of the same rank", name, hint="Remove the one that is not of this checkpoint."
        )


def _complete(
    model: Mapping[int, Mapping[int, str]], optimizer: Mapping[int, Mapping[int, str]], zero3: bool, faults: Faults
) -> None:
    """Check that the ranks are without gaps, and the same in both grids."""
    ranks = range(max(*model, *optimizer, 0) + 1)
    parts = range(max((rank for grid in (*optimizer.values(), *model.values()) for rank in grid), default=0) + 1)
    if len(ranks) * len(parts) > 1 << 20:
        faults.add("INCOMPLETE", f"the names speak of {len(ranks)} x {len(parts)} ranks", None, hint=_HINT)
        return
    for rank in ranks:
        for part in parts if zero3 else (0,):
            if part not in model.get(rank, {}):
                name = f"zero_pp_rank_{part}_mp_rank_{rank:02d}" if zero3 else f"mp_rank_{rank:02d}"
                faults.add("INCOMPLETE", "the file of this rank is missing", f"{name}{keys.MODEL_END}", hint=_HINT)
        for part in parts if optimizer else ():
            if part not in optimizer.get(rank, {}):
                name = f"*zero_pp_rank_{part}_mp_rank_{rank:02d}{keys.OPTIM_END}"
                faults.add("INCOMPLETE", "the file of this rank is missing", name, hint=_HINT)
