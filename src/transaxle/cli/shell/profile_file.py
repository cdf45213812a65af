"""The file of `--profile`: a trace of the command, as `transaxle.spans` records it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transaxle.arguments import read_number_of_job
from transaxle.errors import refuse
from transaxle.formats.storage.local import failed
from transaxle.spans import recording


@contextmanager
def profiled(typed: str) -> Iterator[None]:
    """Record what the block does, and write it into a file at its end, also where it fails.

    Args:
        typed: a file that is not there yet. Ranks of a job other than the first write into
            files of their own beside it, `trace.rank1.json`.

    Raises:
        UsageError: EXISTS, before the block.
        StorageError: IO, NO_SPACE.
    """
    rank = read_number_of_job("RANK", 0)
    path = Path(typed) if rank == 0 else Path(typed).with_suffix(f".rank{rank}{Path(typed).suffix}")
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        raise refuse("EXISTS", "the file for the trace already exists", file=str(path), hint="Name another.") from None
    except OSError as error:
        raise failed(error, "creating the trace", str(path)) from error
    with recording() as trace:
        try:
            yield
        finally:
            try:
                with file:
                    json.dump(trace.document(), file)
            except OSError as error:
                raise failed(error, "writing the trace", str(path)) from error
