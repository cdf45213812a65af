"""Option `--derive` of the commands `plan` and `convert`: derives a table of tensor names for a model that no table
supports.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import click

from transaxle.arguments import Overwrite
from transaxle.cli.screen import Screen
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.checkpoint.recognise import IDENTITY
from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.errors import Code, TransaxleError, refuse
from transaxle.formats.registry import ADAPTER_CONFIG
from transaxle.formats.store.staging import staging_at

_UNKNOWN: Code = "UNKNOWN_FAMILY"


@contextmanager
def silence() -> Iterator[None]:
    """Discard what packages print inside the `with` block, so that only the table or JSON document is printed."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield


def derive_rules(screen: Screen, src: str, opening: Mapping[str, Any], check: Callable[[], None]) -> str | None:
    """Return the path of a table derived for the model, or the user's `--rules` if an existing table already supports
    the model.

    Args:
        screen: where to print a note that a table was derived.
        src: path of the checkpoint.
        opening: keyword arguments of `open_checkpoint`.
        check: function called before a table is derived; it raises an error if the conversion would fail anyway.

    Raises:
        UsageError: with code UNKNOWN_FAMILY, if the checkpoint does not name its model type.
        TransaxleError: any error raised by `open_checkpoint`, `check` or `from_transformers`.
    """
    with open_checkpoint(src, **opening) as source:
        try:
            _ = source.reading
        except TransaxleError as error:
            if error.code != _UNKNOWN or ADAPTER_CONFIG in source.container.carried:
                raise
            if opening.get("family") is not None:
                hint = "Leave --family out: --derive asks transformers for the model_type of config.json."
                raise refuse(_UNKNOWN, error.refusals[0].message, hint=hint) from None
            model_type = source.config.get("model_type")
            if not isinstance(model_type, str):
                raise _no_type(error, has_config=bool(source.config) or CONFIG in source.container.carried) from None
            config = dict(source.config)
        else:
            return opening.get("rules")
    check()
    from transaxle.derivation.sources import from_transformers

    with screen.working("tracing"), silence():
        table = from_transformers(model_type, config)
    folder = tempfile.TemporaryDirectory(prefix="transaxle-derived-")
    click.get_current_context().call_on_close(folder.cleanup)
    rules = Path(folder.name, f"{table.family}.rules")
    table.save(rules)
    own_rules = opening.get("rules")
    instead = f"; it takes the place of {own_rules}, which does not know the model" if own_rules else ""
    derivable = opening.get("config") or (src if Path(src, CONFIG).is_file() else model_type)
    screen.note(
        f"derived a table for {model_type} from {table.traces} traces of the installed transformers, for this command "
        f"only{instead}; info and diff need it as a file:  transaxle derive {shlex.quote(derivable)} -o {rules.name},  "
        f"and then --rules {rules.name}"
    )
    return str(rules)


def check_dialect(to: str) -> None:
    """Refuse a conversion target (dialect or file format) that a derived table cannot produce.

    Raises:
        UsageError: with code AMBIGUOUS, if the dialect is unknown.
        Refused: with code UNSUPPORTED, if Transaxle cannot write the file format.
    """
    from transaxle.derivation.table import Labels
    from transaxle.engine.plan.conversion import parse_to

    label = parse_to(to)[1]
    dialects = (*Labels.dialects, IDENTITY)
    if label is not None and label not in dialects:
        raise refuse(
            "AMBIGUOUS",
            f"a derived table has no dialect {label!r}; it has: {', '.join(dialects)}",
            hint="Keep the table in a file, and add the dialect by hand:  docs/how-to/derive-a-table.md.",
        )


def check_target(dst: str, *, overwrite: Overwrite, resume: bool) -> None:
    """Refuse a target path that a conversion could not write; with `resume` an existing target is allowed."""
    if not resume:
        staging_at(dst, overwrite=overwrite).look({}, {})


def _no_type(error: TransaxleError, *, has_config: bool) -> TransaxleError:
    """Return the error for a checkpoint that does not name its model type."""
    why = "its config.json has no model_type" if has_config else "it has no config.json"
    first = error.refusals[0]
    return refuse(
        _UNKNOWN,
        f"{first.message}; and --derive cannot tell what to ask transformers for: {why}",
        hint="Give a config.json with the model_type, --config FILE.",
    )
