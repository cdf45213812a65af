"""The page of a plan: which rules become which, how axes move between names and dims, and what stands against it.

What is refused before there is a plan, or when a checkpoint is opened, has a page of its reasons alone.

The page of a finished conversion: what was written and how fast, what was left out, and which values changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from transaxle.axes.layout.tile import SplitTile
from transaxle.axes.notation.name import natural
from transaxle.encodings.value_steps import Measured
from transaxle.engine.carry import Report
from transaxle.engine.execute import FileTime
from transaxle.engine.moves import (
    RENAMED,
    UNCHANGED,
    AxisMove,
    arrangements,
    axes_of,
    axis_moves,
    divided,
    rules,
    words,
)
from transaxle.engine.plan.planned import Plan, Route
from transaxle.engine.wording import duration, fold, plural, size
from transaxle.errors import Refusal, TransaxleError
from transaxle.families import builtin
from transaxle.reports.html_page import SHADES, Column, Figure, Page, Section, capped, visible

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
        sections=tuple(_finished_sections(done, plan)),
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


def _finished_sections(done: Finished, plan: Page | None) -> Iterator[Section]:
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
    yield from _other_names(report)


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


def _other_names(report: Report) -> Iterator[Section]:
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


_MOST_LINKS = 40
"""Rules that the figure shows; the smaller ones are one line together."""
_IN_NAME = "name"
"""Where an axis is whose every index is a tensor of its own."""
_EXPERTS = "experts"
"""What an axis counts of which a page always says where it is."""
_MOST_REFUSALS = 50
_MOST_MOVES = 12
"""Rules whose axes are drawn."""
_MOST_TILES = 16
"""Tiles that are drawn: one of each rule."""
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_AMOUNTS = (Column("tensors", "count"), Column("bytes", "bytes"), Column("share", "share"))


def conversion_page(plan: Plan, done: Finished | None = None) -> Page:
    """Return the page of a plan.

    Args:
        plan: what is to be done.
        done: what was done of it.
    """
    contiguous = round(100 * plan.contiguous / plan.copies) if plan.copies else 100
    against = len(plan.refusals)
    before = f"{plan.source_format}:{plan.from_dialect or 'own names'}"
    notices: list[tuple[str, str]] = [(each.code, _told(each)) for each in plan.refusals[:_MOST_REFUSALS]]
    if plan.notes and not notices:
        notices = [("Refused", "Nothing.")]
    notices += [("Note", note) for note in plan.notes]
    notices += [
        ("Counted", f"No config says the size of axis {axis}; the names show {count}.")
        for axis, count in plan.counted.items()
    ]
    page = Page(
        kind="plan",
        title=plan.source,
        headline=f"{before} -> {plan.format}:{plan.dialect}" + (f" · {plan.family}" if plan.family else ""),
        tiles=(
            *([(f"{against:,}", "reason against it" if against == 1 else "reasons against it")] if against else []),
            (size(plan.bytes_read), "to read"),
            (size(plan.bytes_written), "to write"),
            (f"{len(plan.tensors):,}", "tensors in the target"),
            (f"{contiguous} %", f"of {plural(plan.copies, 'copy', 'copies')} in one piece"),
        ),
        first="What stands against it",
        notices=tuple(notices),
        quiet="Nothing has been written. A conversion with refusals does not begin."
        + (" All amounts leave out the tensors that are refused." if against else ""),
        sections=tuple(_planned_sections(plan)),
        lead=tuple(_in_short(plan)),
        facts={
            "bytes_read": plan.bytes_read, "bytes_written": plan.bytes_written, "tensors": len(plan.tensors),
            "copies": plan.copies, "contiguous": plan.contiguous,
        },
    )  # fmt: skip
    return page if done is None else finished_page(done, page)


def refused_page(source: str, error: TransaxleError) -> Page:
    """Return the page of what is refused: every reason, and the tensors whose tiles split.

    Args:
        source: what was to be read, as the user typed it.
        error: why it is not.
    """
    told = [refusal.shown() for refusal in error.refusals]
    files = {each.where.file for each in told if each.where.file}
    names = {each.where.tensor for each in told if each.where.tensor}
    rows = [
        (each.code, each.where.file or "", each.where.tensor or "", " ".join(each.message.split()), each.hint)
        for each in told
    ]
    columns = Column("code"), Column("file", "name"), Column("tensor", "name"), Column("why"), Column("what to do")
    text = "The same as the command line says, most important first."
    reasons = Section("reasons", "Every reason", text, None, (capped("reasons", "Reasons", columns, rows),))
    kinds = Counter(each.code for each in told)
    return Page(
        kind="refusal",
        title=source,
        headline="refused: " + ", ".join(f"{code} x {count}" if count > 1 else code for code, count in kinds.items()),
        tiles=(
            (f"{len(told):,}", "reason" if len(told) == 1 else "reasons"),
            (f"{len(names):,}", "tensor named" if len(names) == 1 else "tensors named"),
            (f"{len(files):,}", "file named" if len(files) == 1 else "files named"),
        ),
        first="Why it is refused",
        notices=tuple((each.code, _told(each)) for each in error.refusals[:_MOST_REFUSALS]),
        quiet="Nothing is shown of a checkpoint that is refused: what its files say cannot be relied on. "
        "transaxle explain CODE tells more of each code.",
        sections=(*_split_tiles(error.refusals), reasons),
        facts={"exit_code": error.exit_code, "refusals": [each.as_json() for each in error.refusals]},
    )


def _told(refusal: Refusal) -> str:
    """Return a refusal without its code, in the lines of the command line."""
    shown = refusal.shown()
    return "\n".join(filter(None, (visible(str(shown.where)), shown.message, shown.hint)))


def _planned_sections(plan: Plan) -> Iterator[Section]:
    amounts = _amounts(plan)
    yield from _split_tiles(plan.refusals)
    yield _flow(plan, amounts)
    yield _axes(plan)
    yield _rules(plan, amounts)
    yield _tensors(plan)
    files = [(name, count, count) for name, count in plan.files.items()]
    columns = Column("file", "name"), Column("size", "bytes"), Column("share", "share")
    yield Section("files", "Files of the target", tables=(capped("files", "Files", columns, files, 1),))
    yield from _other_tensors(plan)


def _split_tiles(refusals: Sequence[Refusal]) -> Iterator[Section]:
    """Yield the figure of tiles that draw on several: one of each rule, position by position."""
    tiles: dict[str, tuple[str, SplitTile]] = {}
    for refusal in refusals:
        rule = refusal.message.partition("\n")[0]
        if refusal.detail is None or rule in tiles or len(tiles) == _MOST_TILES:
            continue
        found = refusal.detail()
        if isinstance(found, SplitTile):
            tiles[rule] = refusal.where.tensor or rule, found
    if not tiles:
        return
    cells: list[Any] = []
    rows: list[tuple[Any, ...]] = []
    width = max(tile.runs[-1][1] - tile.runs[0][0] for _, tile in tiles.values())
    most = 0
    for row, (name, tile) in enumerate(tiles.values()):
        first, places = tile.runs[0][0], list(dict.fromkeys(run[2:] for run in tile.runs))
        for start, stop, source, number in tile.runs:
            at = places.index((source, number))
            most = max(most, at)
            words = f"{source}, tile {number}" if source else "padding"
            rows.append(
                (name, tile.dim, str(tile.number), start, stop, source or "padding", str(number) if source else "")
            )
            cells += [(position - first, row, "", (at,), (words,)) for position in range(start, stop)]
    shown = [min(each, SHADES - 1) for each in range(most + 1)]
    labels = [f"the {_ORDINALS[each]} source tile" for each in dict.fromkeys(shown)]
    if most >= SHADES:
        labels[-1] += " or a later one"
    data = {
        "columns": [str(at) for at in range(width)],
        "rows": [name for name, _ in tiles.values()],
        "across": "position in the tile",
        "measures": [{"title": "Source tile", "kind": "number", "bounds": [*range(1, len(labels))], "labels": labels}],
        "states": {},
        "cells": [(column, row, state, (min(at[0], SHADES - 1),), words) for column, row, state, at, words in cells],
    }
    text = (
        "A row is a tile along the dim in which it splits; all of it would have one scale. Where its colour changes, "
        "its elements come from another tile of the source, which has another."
    )
    columns = (
        Column("tensor", "name"), Column("dim", "count"), Column("its tile"), Column("from position", "count"),
        Column("to before", "count"), Column("source", "name"), Column("tile of the source"),
    )  # fmt: skip
    label = f"Map of {plural(len(tiles), 'tile')} by the source tile that each position comes from; a table has them."
    table = capped("split", "Positions of these tiles", columns, rows)
    yield Section("split", "Where tiles split", text, Figure("heat", label, data), (table,))


def _amounts(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return rule of the target -> how many tensors follow it, and their bytes; zeros for no tensor count nowhere."""
    count: Counter[str] = Counter()
    amount: Counter[str] = Counter()
    for tensor in plan.tensors:
        count[tensor.rule] += 1
        amount[tensor.rule] += tensor.nbytes
    return {rule: (count[rule], amount[rule]) for rule in count}


def _routes(plan: Plan) -> dict[str, Route]:
    return {route.target: route for route in plan.routes}


def _flow(plan: Plan, amounts: dict[str, tuple[int, int]]) -> Section:
    """Return the figure: rules of the source to the left, of the target to the right, as wide as the bytes written."""
    routes = _routes(plan)
    links: list[tuple[str, str, str, int]] = []
    joined: list[tuple[str, str, int, int]] = []
    amounts_in: dict[str, int] = {}
    unchanged = 0
    for rule, (_, nbytes) in amounts.items():
        route = routes.get(rule)
        if route is None:
            unchanged += nbytes
            continue
        target, what = rules(route)[1], words(route, plan.axes)
        amounts_in[target] = nbytes
        parts = divided(route, nbytes, plan.axes)
        links += [(source, target, what, part) for source, part in parts.items()]
        if len(parts) > 1:
            joined += [(source, target, part, part) for source, part in parts.items()]
    links.sort(key=lambda link: -amounts_in[link[1]])
    smaller = sum(link[3] for link in links[_MOST_LINKS:])
    everything = sum(nbytes for _, nbytes in amounts.values())
    zeros = sum(tensor.nbytes for tensor in plan.tensors if not tensor.transfers)
    others = ("smaller rules", smaller), ("as named", unchanged - zeros), ("zeros", zeros)
    data = {
        "links": links[:_MOST_LINKS],
        "others": [(text, nbytes) for text, nbytes in others if nbytes],
        "bytes": everything,
    }
    label = f"Flow of {size(everything)} from the rules of the source to those of the target; a table has its numbers."
    text = "Rules of the source are to the left, of the target to the right; a band is as wide as the bytes written."
    heads = Column("source", "name"), Column("target", "name"), Column("bytes", "bytes"), Column("share", "share")
    tables = (capped("joined", "Tensors that are joined", heads, joined, 2),) if joined else ()
    return Section("flow", "What becomes what", text, Figure("sankey", label, data), tables)


def _in_short(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each axis that leaves the names or enters them, for experts, and for what is joined."""
    meanings, found = _meanings(plan), dict[tuple[str, str, str], dict[str, None]]()
    for move in (move for route in plan.routes for move in axis_moves(route)):
        if (move.before == _IN_NAME) != (move.after == _IN_NAME) or meanings.get(move.axis) == _EXPERTS:
            found.setdefault((move.axis, move.before, move.after), {})[move.component] = None
    changing = {axis for axis, before, after in found if (before == _IN_NAME) != (after == _IN_NAME)}
    for (axis, before, after), components in found.items():
        count, what = plan.axes.get(axis), _listed(list(components))
        called = f"{axis} ({meanings[axis]})" if meanings.get(axis) else axis
        many = f"{count:,} tensors" if isinstance(count, int) else "several tensors"
        if axis not in changing:
            place = "the names" if before == _IN_NAME else before
            yield f"Axis {called} {'stays in' if before == after else f'goes to {after} from'} {place} of {what}."
        elif before == after:
            continue  # the router's, which has a row for each expert
        elif before == _IN_NAME:
            yield f"Axis {called} goes from the names into {after} of {what}: {many} of each become one."
        else:
            yield f"Axis {called} goes from {before} into the names of {what}: one tensor of each becomes {many}."
    joined: dict[str, list[str]] = {}
    for route in plan.routes:
        sources, target = rules(route)
        if len(sources) > 1:
            joined.setdefault(route.component, []).append(target)
    for component, targets in joined.items():
        yield f"Joined: {_listed(component.split(', '))} become {_listed(targets)}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _meanings(plan: Plan) -> dict[str, str]:
    """Return what axes count, where the family is one of ours and has all of them."""
    family = builtin().get(plan.family or "")
    if family is None or not plan.axes.keys() <= family.axes.keys():
        return {}
    return {each.axis: each.meaning.partition(":")[0] for each in axes_of(family)}


def _rules(plan: Plan, amounts: dict[str, tuple[int, int]]) -> Section:
    routes, rows = _routes(plan), []
    for rule, (count, nbytes) in amounts.items():
        route = routes.get(rule)
        if route is not None:
            sources = " + ".join(text for text in route.source if text) or "(tied)"
            rows.append((route.component, words(route, plan.axes), sources, rule, count, nbytes, nbytes))
    rows.sort(key=lambda row: -row[5])
    kept = [amounts[rule] for rule in amounts if rule not in routes]
    if kept:
        total = sum(nbytes for _, nbytes in kept)
        rows.append(("", "unchanged", "names without a rule", "the same names", sum(n for n, _ in kept), total, total))
    columns = (Column("tensor"), Column("what moves"), Column("source", "name"), Column("target", "name"), *_AMOUNTS)
    text = "Each rule of the target with those of the source that it is made of, and what happens on the way."
    return Section("rules", "Rules", text, None, (capped("rules", "Rules", columns, rows, 5),))


def _axes(plan: Plan) -> Section:
    meanings = _meanings(plan)
    rows = [
        (
            move.component,
            move.axis,
            meanings.get(move.axis, ""),
            str(plan.axes.get(move.axis, "by layer")),
            move.before,
            move.after,
            _moved(move),
        )
        for route in plan.routes
        for move in axis_moves(route)
    ]
    rows.sort(key=lambda row: not row[-1])
    columns = (
        Column("tensor"), Column("axis"), Column("what it counts"), Column("size"), Column("in the source"),
        Column("in the target"), Column("moves"),
    )  # fmt: skip
    text = "An axis is in the name, where each index is a tensor of its own, or in a dim."
    figure = _drawn_moves(plan, meanings)
    table = capped("axes", "Axes of each tensor; those that move come first", columns, rows)
    return Section("axes", "How axes move", text if rows else "No rule moves any.", figure, (table,))


def _drawn_moves(plan: Plan, meanings: Mapping[str, str]) -> Figure | None:
    """Return the drawing of the rules that move axes: those with the most bytes, before and after."""
    amounts = _amounts(plan)
    moving = [(route, words(route, plan.axes)) for route in plan.routes]
    moving = [(route, what) for route, what in moving if what not in {RENAMED, UNCHANGED} and any(route.source)]
    moving.sort(key=lambda item: -amounts.get(item[0].target, (0, 0))[1])
    if not moving:
        return None
    drawn = []
    for route, what in moving[:_MOST_MOVES]:
        sources, target = arrangements(route)
        moves = dict.fromkeys(f"{move.axis}: {_moved(move)}" for move in axis_moves(route) if _moved(move))
        moved = sorted({move.axis for move in axis_moves(route) if _moved(move)})
        drawn.append(
            {
                "tensors": route.component, "what": what, "steps": list(moves), "moved": moved,
                "before": [asdict(each) for each in sources], "after": asdict(target),
            }
        )  # fmt: skip
    count = plural(len(drawn), "rule")
    label = f"Drawing of the axes of {count} in names and dims, before and after; the table below says the same."
    return Figure("moves", label, {"rules": drawn, "meanings": dict(meanings), "sizes": dict(plan.axes)})


def _moved(move: AxisMove) -> str:
    return "" if move.before == move.after else f"{move.before} -> {move.after}"


def _tensors(plan: Plan) -> Section:
    keys = [(tensor.dtype, tensor.shape, tensor.nbytes) for tensor in plan.tensors]
    rows = []
    for row in fold([tensor.name for tensor in plan.tensors], keys):
        assert isinstance(row.key, tuple)
        dtype, shape, nbytes = row.key
        total = nbytes * row.count
        rows.append((row.name, dtype, " x ".join(map(str, shape)) or "1", row.count, total, total))
    columns = Column("name", "name"), Column("type"), Column("shape"), *_AMOUNTS
    return Section("tensors", "Tensors of the target", tables=(capped("tensors", "Tensors", columns, rows, 4),))


def _other_tensors(plan: Plan) -> Iterator[Section]:
    """Yield the sections that not every plan has."""
    listed: tuple[tuple[str, Sequence[str]], ...] = (
        ("kept under its name: no rule in the target", plan.kept),
        ("copied along", plan.carried),
        ("left behind", plan.ignored),
        ("keeps its type", plan.stayed),
    )
    rows = [(what, row.name, row.count) for what, names in listed for row in fold(sorted(names, key=natural))]
    rows += [(f"tied to {original}", alias, 1) for alias, original in plan.aliases.items()]
    if rows:
        columns = Column("what becomes of it"), Column("name", "name"), Column("names", "count")
        yield Section("others", "What is not converted", tables=(capped("others", "Other names", columns, rows),))
    if plan.recoded:
        recoded: list[tuple[Any, ...]] = []
        keys = [(each.action, each.encoding, each.convention, each.dtype) for each in plan.recoded]
        for row in fold([each.name for each in plan.recoded], keys):
            assert isinstance(row.key, tuple)
            recoded.append((row.name, *row.key, row.count))
        heads = Column("name", "name"), Column("action"), Column("encoding"), Column("convention"), Column("type")
        table = capped("recoded", "Values", (*heads, Column("tensors", "count")), recoded)
        yield Section("recoded", "Values that change", tables=(table,))
