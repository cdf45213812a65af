"""Tables that are derived on the way: `--derive` of `plan` and `convert`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import click

from transaxle.cli.screen.screen import Screen
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.errors import Code, TransaxleError

_UNKNOWN: Code = "UNKNOWN_FAMILY"


@contextmanager
def silence() -> Iterator[None]:
    """Keep apart what peers print while they are imported: a table or a JSON document is all that a reader expects."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield


def with_table(screen: Screen, src: str, source_options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for `open_checkpoint` with a derived table in them, where no other table knows the model."""
    with open_checkpoint(src, **source_options) as source:
        try:
            _ = source.recognised
        except TransaxleError as error:
            model_type = source.config.get("model_type")
            if error.code != _UNKNOWN or not isinstance(model_type, str):
                raise
            config = dict(source.config)
        else:
            return source_options
    from transaxle.derivation.sources import from_transformers

    with screen.working("tracing"), silence():
        table = from_transformers(model_type, config)
    folder = tempfile.TemporaryDirectory(prefix="transaxle-derived-")
    click.get_current_context().call_on_close(folder.cleanup)
    rules = Path(folder.name, f"{table.family}.rules")
    table.save(rules)
    screen.note(f"derived a table for {model_type} from {table.traces} traces of the installed transformers")
    return {**source_options, "rules": str(rules)}
