"""`check`: whether a reader loads every tensor of a checkpoint, each to its place, with its values.

The reader's own code runs on the real names, shapes and dtypes without data (`reader_runs`), and on two small
checkpoints with data (`twins`); or tables stand for it (`by_tables`). `findings` reads the report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.peft_adapter import adapter_config
from transaxle.engine.wording import notebook, plural
from transaxle.errors import refuse
from transaxle.formats.registry import ADAPTER_CONFIG
from transaxle.readers.by_tables import compare_with_tables, merge_traces
from transaxle.readers.findings import Finding, findings_of
from transaxle.readers.reader import Reader, reader_named
from transaxle.readers.reader_runs import LIMIT, Trace, reader_versions, run_reader


class Check(msgspec.Struct, frozen=True):
    """The verdict on a checkpoint and a reader; it is true if the reader loads the checkpoint as it is."""

    path: str
    """Path of the checkpoint."""
    reader: str
    """Name of the reader."""
    versions: Mapping[str, str]
    """Distribution -> version, for the reader and what it depends on."""
    findings: tuple[Finding, ...]
    """What the reader does otherwise, and notes; wrong ones first."""
    tensors: int
    """Number of stored tensors."""
    parameters_compared: int
    """Number of parameters of small models whose values were compared; 0 if none were."""
    traced: Literal["run", "cache", "tables"]
    """Whether the reader was run for this check, its result was in the cache, or only tables of names were compared."""
    seconds: float
    """Time that the check took."""

    @property
    def ok(self) -> bool:
        """Whether the reader loads every tensor to its place with its values."""
        return not any(finding.wrong for finding in self.findings)

    def __bool__(self) -> bool:
        return self.ok

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as plain JSON data, as `transaxle check --json` prints it."""
        return {
            "schema_version": 1, "path": self.path, "reader": self.reader, "versions": dict(self.versions),
            "ok": self.ok, "findings": [finding.as_json() for finding in self.findings], "tensors": self.tensors,
            "parameters_compared": self.parameters_compared, "traced": self.traced, "seconds": round(self.seconds, 3),
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n".join([self.headline, *map(str, self.findings)])

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        who = " ".join(filter(None, (self.reader, self.versions.get(self.reader, ""))))
        count = plural(self.tensors, "tensor")
        if self.traced == "tables":
            verdict = f"should load its {count}" if self.ok else "should not load it as it is"
            return f"{self.path}: {who}, which was not run, {verdict} by the tables of its names"
        if not self.ok:
            return f"{self.path}: {who} does not load it as it is"
        values = ""
        if self.parameters_compared:
            values = f", and {plural(self.parameters_compared, 'parameter')} of a small model get the right values"
        return f"{self.path}: {who} loads its {count}{values}"

    def _repr_html_(self) -> str:
        return notebook(str(self))


def require_reader(reader: str, python: str | None, form: str, path: str) -> None:
    """Refuse a reader that is unknown, not installed, or does not open a format.

    Args:
        reader: name of the reader.
        python: path of the Python interpreter of the reader's environment; None means this one.
        form: name of the container format.
        path: path of the checkpoint, for the error.

    Raises:
        UsageError: with the code AMBIGUOUS if there is no such reader.
        Refused: with the code UNSUPPORTED if the reader is not installed, or does not open this format.
    """
    program = reader_named(reader)
    reader_versions(program, python, form)
    _refuse_format(program, form, path)


def check(checkpoint: Checkpoint, reader: str, *, python: str | None = None, time_limit: int = LIMIT) -> Check:
    """Return whether a reader loads a checkpoint; no tensor is read but scales of a single element.

    Args:
        checkpoint: the checkpoint.
        reader: name of the reader, a key of `READERS`.
        python: path of the Python interpreter of the reader's environment; None means this one.
        time_limit: seconds after which the reader is stopped.

    Raises:
        UsageError: with the code AMBIGUOUS if there is no such reader; with the code UNKNOWN_FAMILY if the base of an
            adapter has no config.
        Refused: with the code UNSUPPORTED if the reader is not installed, or does not open this container
            format; or if an adapter is given to a reader of whole models, or the other way round.
    """
    began = time.monotonic()
    program = reader_named(reader)
    versions = reader_versions(program, python, checkpoint.format)
    _refuse_format(program, checkpoint.format, checkpoint.path)
    _refuse_other_kind(checkpoint, program)
    run = run_reader(checkpoint, program, versions, python, time_limit) if versions else None
    trace: Trace = {} if run is None else run.trace
    by_tables = program.by_tables and not (program.runs and run is not None and "untraced" not in trace)
    if by_tables:
        trace = merge_traces(compare_with_tables(checkpoint, program), trace)
    values = trace.get("values") or {}
    return Check(
        path=checkpoint.path,
        reader=reader,
        versions=versions,
        findings=findings_of(checkpoint, program, trace),
        tensors=len(checkpoint.container.entries),
        parameters_compared=values.get("compared", 0),
        traced="tables" if run is None or by_tables else "cache" if run.is_cached else "run",
        seconds=time.monotonic() - began,
    )


def _refuse_format(reader: Reader, form: str, path: str) -> None:
    formats = (*reader.formats, *reader.takes)
    if form in formats:
        return
    message = f"{reader.name} does not open {form}; it opens {' and '.join(formats)}"
    hint = f"Convert it first:  transaxle convert {path} DST --to {reader.formats[0]}:{reader.dialect}"
    raise refuse("UNSUPPORTED", message, file=path, hint=hint)


def _refuse_other_kind(checkpoint: Checkpoint, reader: Reader) -> None:
    """Refuse an adapter for a reader of whole models, and a whole model for a reader of adapters."""
    is_adapter = adapter_config(checkpoint.container) is not None
    if is_adapter and not reader.opens_adapters:
        hint = f"Check the adapter:  transaxle check {checkpoint.path} --for peft --config BASE/config.json"
        raise refuse("UNSUPPORTED", f"{reader.name} loads whole models, and this is an adapter", hint=hint)
    if reader.opens_adapters and not is_adapter:
        message = f"{reader.name} loads adapters, and this folder has no {ADAPTER_CONFIG}"
        raise refuse("UNSUPPORTED", message, file=checkpoint.path, hint="Name the folder of the adapter.")
