"""What a conversion or a save has written, read back: against its manifest and, where there is one, its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.compare.compare import compare
from transaxle.engine.compare.verification import Verification, verify
from transaxle.engine.execute.resume_check import reproduced
from transaxle.engine.plan.conversion import Prepared
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.registry import is_one_file
from transaxle.move.workers import Limits, Progress, limits, unwatched

_OF_RESULT = ("config", "axes", "rules")
"""Options of reading the source that say what the model is, and so hold for what was made of it."""
Watching = Callable[[int, str], AbstractContextManager[Progress]]
"""Gives what is told the bytes of a task, by their number and the task's name."""


@contextmanager
def _nobody(_total: int, _label: str) -> Iterator[Progress]:
    yield unwatched


def read_back(
    prepared: Prepared,
    target: str,
    reading: Mapping[str, Any],
    limit: Limits,
    watching: Watching = _nobody,
) -> Verification:
    """Check what was written against its manifest and the source; what was encoded is encoded again for comparison.

    Args:
        prepared: the plan that was carried out.
        target: where the checkpoint is.
        reading: how the source was opened.
        limit: workers and memory.
        watching: shows progress.
    """
    with open_checkpoint(target, **_result(prepared, target, reading)) as written:
        with watching(written.container.nbytes, "verifying") as progress:
            found = verify(written, limit, progress)
        with watching(written.container.nbytes, "comparing") as progress:
            if prepared.plan.band:
                return replace(found, comparison=reproduced(prepared, written, limit, progress))
            return replace(found, comparison=compare(prepared.checkpoint, written, limit=limit, progress=progress))


def _result(prepared: Prepared, target: str, reading: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that open what was written as what the plan says it is.

    A folder says so itself, by its manifest and its config. One file does not: its names alone may fit several tables.
    """
    said = {name: reading[name] for name in _OF_RESULT if reading.get(name)}
    plan = prepared.plan
    if plan.family is None or not is_one_file(target) or Path(target).is_dir():
        return said
    axes = {**plan.axes, **said.get("axes", {})}
    config = prepared.checkpoint.config or None
    return {**said, "family": plan.family, "dialect": plan.dialect, "config": config, "axes": axes}


def check_saved(target: str) -> Verification:
    """Check what was saved against the hashes that were taken of memory while it was written.

    Raises:
        Refused: CORRUPT with every problem.
    """
    with open_checkpoint(target) as written:
        found = verify(written, limits(), unwatched)
    refuse_unequal(found, target)
    return found


def refuse_unequal(found: Verification, target: str) -> None:
    """Raise what a verification has found.

    Raises:
        Refused: CORRUPT with every problem, and every tensor that is not what the source has.
    """
    hint = "The checkpoint is there, and is wrong. Check memory and disk, and convert again with overwrite=True."
    differing = (
        Refusal("CORRUPT", f"it is not what the source has: {each.detail or each.kind}", Where(target, each.name), hint)
        for each in found.differences
    )
    if not found.ok:
        raise gathered([*found.problems, *differing])
