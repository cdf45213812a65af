"""Groups the rank files in a folder by their names, into files of the model, of the optimizer, and of other training
state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from transaxle.errors import refuse

_VERL = "model_world_size_{world}_rank_{rank}.pt"
"""Template for the names of the model's files that verl and related programs save."""
_SHOWN = 6
GATHER = "Copy the missing files; where each machine wrote to its own disk, gather the files in one folder first."
ALL_FILES = "Give the folder with the files of all ranks."
ONE_SAVE = "Give a folder with the files of one save."
_TEMPLATE = "Say how the files are named: --ranks 'model_rank{}.pt' (ranks=), with {} for the rank."
_MODEL = "model"
_OPTIMIZERS, _OTHERS = ("optimizer", "optim"), ("extra_state", "extra")


class RankSets(NamedTuple):
    """The sets of rank files in a folder. Each set has one file per rank, and is represented by the name of one of its
    files; the name is empty if the folder has no such set.
    """

    model: str
    optimizer: str
    extra: str
    """Files with other training state: schedules and random states."""


def check_template(template: str) -> None:
    """Refuse a template that does not have exactly one place for the rank.

    Raises:
        UsageError: with the code AMBIGUOUS if the template has no place for the rank, or several.
    """
    if template.count("{}") + template.count("{rank}") != 1 or "/" in template:
        message = f"the template {template!r} of file names needs one {{}}, for the rank, and no folder"
        raise refuse("AMBIGUOUS", message, hint=_TEMPLATE)


def rank_sets(names: Sequence[str], template: str | None) -> RankSets:
    """Return the sets of rank files among the names of a folder's files.

    Args:
        names: names of files.
        template: the user's template for the names of the model's files; None means verl's names. The names of the
            optimizer's files are the same, with `optim` or `optimizer` instead of `model`.
    """

    def first(*words: str) -> str:
        for word in words:
            pattern = _pattern(template, word)
            if matches := [name for name in names if pattern.fullmatch(name)]:
                return min(matches)
        return ""

    if template is not None and _MODEL not in template:
        return RankSets(first(_MODEL), "", "")
    return RankSets(first(_MODEL), first(*_OPTIMIZERS), first(*_OTHERS))


def names_like(member: str, template: str | None) -> re.Pattern[str]:
    """Return a pattern that matches the names of all ranks' files of a set. Its group `rank` is the rank; a group
    `world` is the number of ranks, if the names contain it.

    Args:
        member: name of one of the files of the set.
        template: the user's template for the names of the model's files; see `rank_sets`.

    Raises:
        Refused: with the code UNSUPPORTED if no set has files with this name.
    """
    for word in (_MODEL, *_OPTIMIZERS, *_OTHERS):
        pattern = _pattern(template, word)
        if pattern.fullmatch(member):
            return pattern
    raise refuse("UNSUPPORTED", "its name does not say which rank wrote it", file=member, hint=_TEMPLATE)


def _pattern(template: str | None, word: str) -> re.Pattern[str]:
    """Return the pattern of the names in a set of rank files, whose names have `word` instead of `model`.

    In the template, `{}` or `{rank}` stands for the rank, and `{world}` for the number of ranks.
    """
    text = re.escape((template or _VERL).replace(_MODEL, word, 1))
    for place, group in (("{}", "rank"), ("{rank}", "rank"), ("{world}", "world")):
        text = text.replace(re.escape(place), rf"(?P<{group}>\d+)")
    return re.compile(text)


def rank_files(names: Sequence[str], template: re.Pattern[str]) -> dict[int, str]:
    """Return the files of all ranks: rank -> name of the rank's file.

    Args:
        names: names of the files in a folder.
        template: pattern of the names, whose group `rank` is the rank.

    Raises:
        Refused: with the code INCOMPLETE if the files of some ranks are missing; with the code CORRUPT if two files
            have the same rank.
    """
    matches = [match for name in names if (match := template.fullmatch(name))]
    worlds = sorted({int(match["world"]) for match in matches}) if "world" in template.groupindex else []
    if len(worlds) > 1:
        message = f"its files are those of {' and of '.join(f'{size} ranks' for size in worlds)}: of two runs"
        raise refuse("CORRUPT", message, file=min(match[0] for match in matches), hint=ONE_SAVE)
    files: dict[int, str] = {}
    for match in matches:
        if (first := files.setdefault(int(match["rank"]), match[0])) != match[0]:
            message = f"{first} and {match[0]} are both of rank {int(match['rank'])}"
            raise refuse("CORRUPT", message, file=match[0], hint=ONE_SAVE)
    count = next(iter(worlds), max(files, default=-1) + 1)
    missing = [rank for rank in range(count) if rank not in files]
    if missing:
        numbers = ", ".join(map(str, missing[:_SHOWN])) + (
            f" and {len(missing) - _SHOWN} more" * (len(missing) > _SHOWN)
        )
        message = f"of a job of {count} ranks, the files of rank {numbers} are missing"
        raise refuse("INCOMPLETE", message, file=min(files.values(), default=None), hint=GATHER)
    if len(files) > count:
        message = f"{len(files)} files are of a job of {count} ranks"
        raise refuse("CORRUPT", message, file=max(files.values()), hint=ONE_SAVE)
    return dict(sorted(files.items()))
