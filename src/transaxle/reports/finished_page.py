"""The page of a finished conversion: what was written and how fast, what was left out, and which values changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transaxle.axes.notation.name import natural
from transaxle.encodings.value_steps import Measured
from transaxle.engine.execute.carry import Report
from transaxle.engine.execute.execute import FileTime
from transaxle.engine.fold import fold
from transaxle.engine.number_text import duration, plural, size
from transaxle.reports.html_page import Column, Figure, Page, Section, capped

_MOST_BARS = 200
_MOVED = ("flow", "axes", "rules")
"""Sections of the plan's page that say what becomes of the tensors."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What was done of a plan."""

    report: Report
    """What the conversion says."""
    times: Mapping[str, FileTime] = field(default_factory=dict)
    """File -> when it was written; empty where nobody noted that."""


def finished_page(done: Finished, plan: Page | None = None) -> Page:
    """Return the page of a finished conversion.

    Args:
        done: what was done.
        plan: the page of the plan; None: there is only what the conversion says.
    """
    report = done.report
    rate = f"{size(round(report.bytes_written / report.seconds))}/s" if report.seconds else ""
    return Page(
        kind="conversion",
        title=report.path,
        headline=plan.headline if plan is not None else f"{report.format}:{report.dialect}",
        tiles=(
            (size(report.bytes_written), "written"),
            (duration(report.seconds), f"at {rate}" if rate else "in all"),
            (f"{report.tensors:,}", "tensors"),
            (f"{len(report.recoded):,}", "changed in value"),
            *(() if plan is None else plan.tiles[-1:]),
        ),
        first="What was done",
        notices=tuple(_notices(report)),
        quiet=f"Read {report.source or 'the source'}; every tensor was hashed while it was written (xxh3-128).",
        sections=tuple(_sections(done, plan)),
        lead=() if plan is None else plan.lead,
        facts={
            "bytes_read": report.bytes_read, "bytes_written": report.bytes_written, "tensors": report.tensors,
            "seconds": report.seconds, "checks": report.checks, "resumed": report.resumed, "synced": report.synced,
            "recoded": len(report.recoded),
        },
    )  # fmt: skip


def _notices(report: Report) -> Iterator[tuple[str, str]]:
    found = report.verification
    actions = Counter(each.what.action for each in report.recoded)
    exact = sum(each.error.exact for each in report.recoded)
    done = ", ".join(f"{plural(count, 'tensor')} {action}" for action, count in actions.items())
    infinite = sum(each.infinite for each in report.recoded)
    if infinite:
        yield "Values became infinite", f"{plural(infinite, 'value')}; this was allowed."
    yield "Values", f"{done}; {exact:,} exactly." if done else "None changed."
    if found is not None:
        yield "Verified" if found.ok else "Not what it should be", f"{found.verdict}."
    if report.resumed:
        yield "Resumed", f"{plural(report.resumed, 'tensor')} had been written by an earlier run."
    if report.checks:
        yield "Copies", f"{plural(report.checks, 'copy', 'copies')} proved equal."
    if not report.synced:
        yield "Not synced", "A power cut in the minutes after it may have damaged the checkpoint."
    yield from (("Note", note) for note in report.notes)
    yield from (("Left by a killed run", note) for note in report.leftovers)


def _sections(done: Finished, plan: Page | None) -> Iterator[Section]:
    """Yield which values changed, what became what, how long it took, and what else the plan's page says."""
    own = {section.id: section for section in _own_sections(done)}
    planned = {} if plan is None else {section.id: section for section in plan.sections}
    ids = dict.fromkeys(("recoded", *_MOVED, *own, *planned))
    yield from (found for each in ids if (found := own.get(each) or planned.get(each)) is not None)


def _own_sections(done: Finished) -> Iterator[Section]:
    report = done.report
    if report.recoded:
        yield _recoded(report.recoded)
    if done.times:
        yield _files(done.times)
    if report.workers:
        rows = [(worker, count, count) for worker, count in report.workers.items()]
        columns = Column("worker", "name"), Column("written", "bytes"), Column("share", "share")
        yield Section("workers", "Workers", tables=(capped("workers", "Workers", columns, rows, 1),))
    yield from _others(report)


def _recoded(recoded: Sequence[Measured]) -> Section:
    keys = [(each.what.action, each.what.encoding, each.what.convention, each.what.dtype) for each in recoded]
    steps = {(each.what.name, key): each for each, key in zip(recoded, keys, strict=True)}  # some tensors have several
    rows: list[tuple[Any, ...]] = []
    for row in fold([each.what.name for each in recoded], keys):
        assert isinstance(row.key, tuple)
        measured = [steps[name, row.key] for name in row.names]
        largest, rms = (max(getattr(each.error, what) for each in measured) for what in ("max", "rms"))
        exact, infinite = sum(each.error.exact for each in measured), sum(each.infinite for each in measured)
        rows.append((row.name, *row.key, row.count, exact, largest, rms, infinite))
    columns = (
        Column("name", "name"), Column("action"), Column("encoding"), Column("convention"), Column("type"),
        Column("tensors", "count"), Column("exact", "count"), Column("max |Δ|", "number"),
        Column("largest RMS of Δ", "number"), Column("became infinite", "count"),
    )  # fmt: skip
    text = "Errors are those of the values that were written, measured against those that they were made of."
    return Section("recoded", "Values that changed", text, None, (capped("recoded", "Values", columns, rows, 7),))


def _files(times: Mapping[str, FileTime]) -> Section:
    ordered = sorted(times.items(), key=lambda item: natural(item[0]))
    rates = {file: round(each.bytes / max(each.last - each.first, 1e-9)) for file, each in ordered}
    rows = [(file, each.bytes, each.first, each.last, each.last - each.first, rates[file]) for file, each in ordered]
    columns = (
        Column("file", "name"), Column("tensors", "bytes"), Column("from second", "number"),
        Column("to second", "number"), Column("seconds", "number"), Column("bytes a second", "bytes"),
    )  # fmt: skip
    bars = [(file, rates[file]) for file, _ in ordered[:_MOST_BARS]]
    data = {"series": [{"title": "file", "kind": "bytes", "of": "bytes a second", "bars": bars}]}
    label = f"Bars: bytes a second of {plural(len(bars), 'file')}, from its first to its last byte; a table has them."
    text = (
        "From the first bytes of tensors that were given to the system to the last, counted from the first of all; "
        "several files may be written at a time, and syncing comes after."
    )
    table = capped("times", "Files in time", columns, rows, 1)
    return Section(
        "times", "Time and rate by file", text, Figure("bars", label, data) if len(bars) > 1 else None, (table,)
    )


def _others(report: Report) -> Iterator[Section]:
    listed: tuple[tuple[str, Sequence[str]], ...] = (
        ("kept under its name: no rule in the target", report.kept),
        ("copied along", report.carried),
        ("left behind", report.ignored),
        ("kept its type", report.stayed),
    )
    rows = [(what, row.name, row.count) for what, names in listed for row in fold(sorted(names, key=natural))]
    if rows:
        columns = Column("what became of it"), Column("name", "name"), Column("names", "count")
        yield Section("others", "What was not converted", tables=(capped("others", "Other names", columns, rows),))
