"""Two checkpoints to be compared, opened together: what is said of both, and what of the first one only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transaxle.engine.checkpoint.checkpoint import Checkpoint, CheckpointLike, opened, stateless
from transaxle.engine.views.encoded import nothing_encoded
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.detect import has_choices
from transaxle.options import OF_FIRST, OF_ONE


def of_second(reading: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that also hold for the second checkpoint of a comparison."""
    return {name: value for name, value in reading.items() if name not in OF_FIRST}


@contextmanager
def _named(opening: AbstractContextManager[Checkpoint], source: CheckpointLike) -> Iterator[Checkpoint]:
    """Give one of two checkpoints; what is wrong with its files is said with its path, which tells it from the other.

    Args:
        opening: opens it.
        source: its path, or the opened checkpoint.

    Raises:
        TransaxleError: what `opening` raises.
    """
    with ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(opening)
        except TransaxleError as error:
            if isinstance(source, Checkpoint):
                raise
            raise gathered(_placed(refusal, Path(source)) for refusal in error.refusals) from error
        yield checkpoint


def _placed(refusal: Refusal, path: Path) -> Refusal:
    # Of a path that cannot be examined, the refusal says why: `Path.is_file` would raise.
    file = refusal.where.file
    inside = path if file == path.name and os.path.isfile(path) else path / (file or "")  # noqa: PTH113
    known = file is not None and os.path.isfile(inside)  # noqa: PTH113
    return replace(refusal, where=Where(str(inside), refusal.where.tensor)) if known else refusal


@contextmanager
def opened_pair(
    a: CheckpointLike, b: CheckpointLike, reading: Mapping[str, Any]
) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Give two checkpoints; one of them may have nothing to decode, no weights to choose, and no optimizer state.

    Args:
        a: a path, or an opened checkpoint.
        b: likewise.
        reading: options of `open_checkpoint`; where only `b` is a path, they are said of that.

    Raises:
        TypeError: there are options, and `a` and `b` are both open already.
        Refused: UNSUPPORTED where neither stores weights twice, and some are chosen; MISSING_TENSOR where neither has
            the optimizer's state that is asked for.
        UsageError: AMBIGUOUS where tensors are to be decoded, and neither has anything encoded.
        TransaxleError: what `open_checkpoint` raises.
    """
    decode = reading.get("decode")
    first: Mapping[str, Any] = {} if isinstance(a, Checkpoint) and not isinstance(b, Checkpoint) else reading
    second: Mapping[str, Any] = {} if isinstance(b, Checkpoint) else of_second(reading)
    chosen = {name for name in OF_ONE if reading.get(name)}
    with_state = reading.get("optimizer") is True
    if chosen or with_state:
        first, second = ({**options, "lenient": True} if options else options for options in (first, second))
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(_named(opened(argument, source, options), source))
            for argument, source, options in (("a", a, first), ("b", b, second))
        )
        if chosen - {"decode"} and not any(
            has_choices(side.format) for side, options in ((one, first), (two, second)) if options
        ):
            message = f"both store their weights once: {', '.join(sorted(chosen - {'decode'}))} has nothing to choose"
            raise refuse("UNSUPPORTED", message, hint="Omit --weights and --average-replicas (weights=, average=).")
        if with_state and not (one.has_state or two.has_state):
            raise stateless(one)
        if decode is not None and not (one.decoded or two.decoded):
            raise nothing_encoded(decode)
        yield one, two
