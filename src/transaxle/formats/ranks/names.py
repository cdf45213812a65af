"""Groups the rank files in a folder by their names, into files of the model, of the optimizer, and of other training
state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from transaxle.errors import refuse

_WORLD = re.compile(r"(?P<stem>.*?)world_size_\d+_rank_\d+(?P<end>\.\w+)")
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
        template: the user's template for the names of the model's files. The names of the optimizer's files are the
            same, with `optim` or `optimizer` instead of `model`.
    """
    model = template or "model_world_size_{world}_rank_{rank}.pt"

    def first(*words: str) -> str:
        for word in words if _MODEL in model else ():
            pattern = names_like("", model.replace(_MODEL, word, 1))
            if matches := [name for name in names if pattern.fullmatch(name)]:
                return min(matches)
        return ""

    pattern = names_like("", model)
    return RankSets(min(filter(pattern.fullmatch, names), default=""), first(*_OPTIMIZERS), first(*_OTHERS))


def names_like(member: str, template: str | None) -> re.Pattern[str]:
    """Return a pattern that matches the names of all ranks' files. Its group `rank` is the rank; a group `world` is the
    number of ranks, if the names contain it.

    Args:
        member: name of one of the files.
        template: the user's template for the names, in which `{}` or `{rank}` stands for the rank, and `{world}` for
            the number of ranks.
    """
    if template is not None:
        text = (
            re.escape(template)
            .replace(re.escape("{}"), r"(?P<rank>\d+)")
            .replace(re.escape("{rank}"), r"(?P<rank>\d+)")
        )
        return re.compile(text.replace(re.escape("{world}"), r"(?P<world>\d+)"))
    match = _WORLD.fullmatch(member)
    if match is None:
        raise refuse("UNSUPPORTED", "its name does not say which rank wrote it", file=member, hint=_TEMPLATE)
    return re.compile(
        rf"{re.escape(match['stem'])}world_size_(?P<world>\d+)_rank_(?P<rank>\d+){re.escape(match['end'])}"
    )


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
