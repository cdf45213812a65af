"""The report pages of a plan, of a finished conversion and of a refusal.

The page of a plan shows which table lines of the source become which of the target, how axes move between names and
dims, and refusals. The page of a finished conversion also shows the bytes and times of files, the names of tensors that
were not converted, and changed values. If there is no plan, because a checkpoint cannot be opened or planned, the page
lists the reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from transaxle.axes.layout.tile import SplitTile
from transaxle.axes.notation.name import natural
from transaxle.encodings.value_steps import MeasuredTensor
from transaxle.engine.carry import Report
from transaxle.engine.execute import FileTime
from transaxle.engine.moves import (
    RENAMED,
    UNCHANGED,
    AxisMove,
    arrangements,
    axes_of,
    axis_moves,
    divide_bytes,
    rules,
    words,
)
from transaxle.engine.plan.planned import Plan, Route
from transaxle.engine.wording import duration, fold, plural, size
from transaxle.errors import Refusal, TransaxleError
from transaxle.families import builtin
from transaxle.reports.html_page import SHADES, Column, Figure, Page, Section, limit_rows, visible

_MOST_BARS = 200
_MOVE_SECTIONS = ("flow", "axes", "rules")
"""Ids of those sections of a plan's page that show how tensors move."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a plan that was executed."""

    report: Report
    """Report of the conversion."""
    times: Mapping[str, FileTime] = field(default_factory=dict)
    """File -> its size and the times at which it was written; empty if the times were not recorded."""


def result_page(finished: Finished, plan: Page | None = None) -> Page:
    """Return the page of a finished conversion.

    Args:
        finished: the result of the conversion.
        plan: the page of the conversion's plan; None means that only the report of the conversion is known.
    """
    report = finished.report
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
        first="Result",
        notices=tuple(_notices(report)),
        quiet=f"Source: {report.source or 'unknown'}. Every tensor was hashed while it was written (xxh3-128).",
        sections=tuple(_result_sections(finished, plan)),
        lead=() if plan is None else plan.lead,
        facts={
            "bytes_read": report.bytes_read, "bytes_written": report.bytes_written, "tensors": report.tensors,
            "seconds": report.seconds, "checks": report.checks, "resumed": report.resumed, "synced": report.synced,
            "recoded": len(report.recoded),
        },
    )  # fmt: skip


def _notices(report: Report) -> Iterator[tuple[str, str]]:
    verification = report.verification
    actions = Counter(each.what.action for each in report.recoded)
    exact = sum(each.error.exact for each in report.recoded)
    change_counts = ", ".join(f"{plural(count, 'tensor')} {action}" for action, count in actions.items())
    infinite = sum(each.infinite for each in report.recoded)
    if infinite:
        yield "Values became infinite", f"{plural(infinite, 'value')}; this was allowed."
    yield "Values", f"{change_counts}; {exact:,} exactly." if change_counts else "None changed."
    if verification is not None:
        yield "Verified" if verification.ok else "Verification failed", f"{verification.verdict}."
    if report.resumed:
        yield "Resumed", f"{plural(report.resumed, 'tensor')} had been written by an earlier run."
    if report.checks:
        yield "Copies", f"{plural(report.checks, 'copy', 'copies')} proved equal."
    if not report.synced:
        yield "Not synced", "A power cut in the minutes after the conversion may have damaged the checkpoint."
    yield from (("Note", note) for note in report.notes)
    yield from (("Left by a killed run", note) for note in report.leftovers)


def _result_sections(finished: Finished, plan: Page | None) -> Iterator[Section]:
    """Yield the sections about changed values, moves and times, then the other sections of the plan's page."""
    conversion_sections = {section.id: section for section in _conversion_sections(finished)}
    plan_sections = {} if plan is None else {section.id: section for section in plan.sections}
    ids = dict.fromkeys(("recoded", *_MOVE_SECTIONS, *conversion_sections, *plan_sections))
    yield from (
        chosen_section
        for each in ids
        if (chosen_section := conversion_sections.get(each) or plan_sections.get(each)) is not None
    )


def _conversion_sections(finished: Finished) -> Iterator[Section]:
    report = finished.report
    if report.recoded:
        yield _changed_values(report.recoded)
    if finished.times:
        yield _times_section(finished.times)
    if report.workers:
        rows = [(worker, count, count) for worker, count in report.workers.items()]
        columns = Column("worker", "name"), Column("written", "bytes"), Column("share", "share")
        yield Section("workers", "Workers", tables=(limit_rows("workers", "Workers", columns, rows, 1),))
    yield from _other_names_section(report)


def _changed_values(recoded: Sequence[MeasuredTensor]) -> Section:
    keys = [(each.what.action, each.what.encoding, each.what.convention, each.what.dtype) for each in recoded]
    # the step is part of the key, because one tensor may be changed in several steps
    steps = {(each.what.name, key): each for each, key in zip(recoded, keys, strict=True)}
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
    text = "Errors are the differences of the written values from the source's values."
    return Section("recoded", "Values that changed", text, None, (limit_rows("recoded", "Values", columns, rows, 7),))


def _times_section(times: Mapping[str, FileTime]) -> Section:
    ordered = sorted(times.items(), key=lambda item: natural(item[0]))
    rates = {file: round(each.bytes / max(each.last - each.first, 1e-9)) for file, each in ordered}
    rows = [(file, each.bytes, each.first, each.last, each.last - each.first, rates[file]) for file, each in ordered]
    columns = (
        Column("file", "name"), Column("tensors", "bytes"), Column("from second", "number"),
        Column("to second", "number"), Column("seconds", "number"), Column("bytes per second", "bytes"),
    )  # fmt: skip
    bars = [(file, rates[file]) for file, _ in ordered[:_MOST_BARS]]
    data = {"series": [{"title": "file", "kind": "bytes", "of": "bytes per second", "bars": bars}]}
    label = f"Bars: bytes per second of {plural(len(bars), 'file')}; the table below has the numbers."
    text = (
        "Each file's time runs from its first to its last written byte; seconds count from the first byte of all "
        "files. Several files may be written at the same time; syncing to disk comes later and is not included."
    )
    table = limit_rows("times", "Time of each file", columns, rows, 1)
    return Section(
        "times", "Time and rate by file", text, Figure("bars", label, data) if len(bars) > 1 else None, (table,)
    )


def _other_names_section(report: Report) -> Iterator[Section]:
    listed: tuple[tuple[str, Sequence[str]], ...] = (
        ("name unchanged: no rule in the target dialect", report.kept),
        ("file copied", report.carried),
        ("left behind", report.ignored),
        ("grafted from another checkpoint", (*report.grafted, *report.grafted_files)),
        ("dtype unchanged", report.stayed),
    )
    rows = [(what, row.name, row.count) for what, names in listed for row in fold(sorted(names, key=natural))]
    if rows:
        columns = Column("result"), Column("name", "name"), Column("names", "count")
        yield Section("others", "What was not converted", tables=(limit_rows("others", "Other names", columns, rows),))


_MOST_LINKS = 40
"""Largest number of links in the flow figure; all smaller links are joined into one."""
_IN_NAME = "name"
"""Text for an axis in tensor names, where each index of the axis is a separate tensor."""
_EXPERTS = "experts"
"""Description of the expert axis, whose position the page always states, even if the axis does not move."""
_MOST_REFUSALS = 50
_MOST_MOVES = 12
"""Largest number of table lines whose axes are drawn."""
_MOST_TILES = 16
"""Largest number of tiles (blocks with one scale) that are drawn, one per table line."""
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_AMOUNTS = (Column("tensors", "count"), Column("bytes", "bytes"), Column("share", "share"))


def conversion_page(plan: Plan, finished: Finished | None = None) -> Page:
    """Return the page of a plan or, if the plan was executed, the page of the finished conversion.

    Args:
        plan: the plan of the conversion.
        finished: the result of the executed plan; None means that the plan was not executed.
    """
    contiguous = round(100 * plan.contiguous / plan.copies) if plan.copies else 100
    refusal_count = len(plan.refusals)
    before = f"{plan.source_format}:{plan.from_dialect or 'own names'}"
    notices: list[tuple[str, str]] = [(each.code, _refusal_text(each)) for each in plan.refusals[:_MOST_REFUSALS]]
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
            *([(f"{refusal_count:,}", "refusal" if refusal_count == 1 else "refusals")] if refusal_count else []),
            (size(plan.bytes_read), "to read"),
            (size(plan.bytes_written), "to write"),
            (f"{len(plan.tensors):,}", "tensors in the target"),
            (f"{contiguous} %", f"of {plural(plan.copies, 'copy', 'copies')} in one piece"),
        ),
        first="Blockers",
        notices=tuple(notices),
        quiet="Nothing has been written. A conversion with refusals does not start."
        + (" Numbers of tensors and bytes exclude refused tensors." if refusal_count else ""),
        sections=tuple(_plan_sections(plan)),
        lead=tuple(_summary(plan)),
        facts={
            "bytes_read": plan.bytes_read, "bytes_written": plan.bytes_written, "tensors": len(plan.tensors),
            "copies": plan.copies, "contiguous": plan.contiguous,
        },
    )  # fmt: skip
    return page if finished is None else result_page(finished, page)


def refusal_page(source: str, error: TransaxleError) -> Page:
    """Return the page of a refusal: every reason, and a figure of split tiles (blocks with one scale) if there are any.

    Args:
        source: path of the checkpoint, as the user typed it.
        error: the error with the refusals.
    """
    refusals = [refusal.shown() for refusal in error.refusals]
    files = {each.where.file for each in refusals if each.where.file}
    names = {each.where.tensor for each in refusals if each.where.tensor}
    rows = [
        (each.code, each.where.file or "", each.where.tensor or "", " ".join(each.message.split()), each.hint)
        for each in refusals
    ]
    columns = Column("code"), Column("file", "name"), Column("tensor", "name"), Column("why"), Column("what to do")
    text = "The same reasons as on the command line, most important first."
    reasons = Section("reasons", "Every reason", text, None, (limit_rows("reasons", "Reasons", columns, rows),))
    kinds = Counter(each.code for each in refusals)
    return Page(
        kind="refusal",
        title=source,
        headline="refused: " + ", ".join(f"{code} x {count}" if count > 1 else code for code, count in kinds.items()),
        tiles=(
            (f"{len(refusals):,}", "reason" if len(refusals) == 1 else "reasons"),
            (f"{len(names):,}", "tensor named" if len(names) == 1 else "tensors named"),
            (f"{len(files):,}", "file named" if len(files) == 1 else "files named"),
        ),
        first="Why it is refused",
        notices=tuple((each.code, _refusal_text(each)) for each in error.refusals[:_MOST_REFUSALS]),
        quiet="The contents of a refused checkpoint are not shown, because its files cannot be trusted. "
        "transaxle explain CODE explains each code.",
        sections=(*_split_tiles(error.refusals), reasons),
        facts={"exit_code": error.exit_code, "refusals": [each.as_json() for each in error.refusals]},
    )


def _refusal_text(refusal: Refusal) -> str:
    """Return file, tensor, message and hint of a refusal as lines of text."""
    shown = refusal.shown()
    return "\n".join(filter(None, (visible(str(shown.where)), shown.message, shown.hint)))


def _plan_sections(plan: Plan) -> Iterator[Section]:
    amounts = _amounts(plan)
    yield from _split_tiles(plan.refusals)
    yield _flow_section(plan, amounts)
    yield _axes_section(plan)
    yield _rules_section(plan, amounts)
    yield _tensors_section(plan)
    files = [(name, count, count) for name, count in plan.files.items()]
    columns = Column("file", "name"), Column("size", "bytes"), Column("share", "share")
    yield Section("files", "Files of the target", tables=(limit_rows("files", "Files", columns, files, 1),))
    yield from _other_tensors(plan)


def _split_tiles(refusals: Sequence[Refusal]) -> Iterator[Section]:
    """Yield the section about target tiles (blocks with one scale) that would mix several source tiles, with one
    example per table line.
    """
    tiles: dict[str, tuple[str, SplitTile]] = {}
    for refusal in refusals:
        rule = refusal.message.partition("\n")[0]
        if refusal.detail is None or rule in tiles or len(tiles) == _MOST_TILES:
            continue
        tile_detail = refusal.detail()
        if isinstance(tile_detail, SplitTile):
            tiles[rule] = refusal.where.tensor or rule, tile_detail
    if not tiles:
        return
    cells: list[Any] = []
    rows: list[tuple[Any, ...]] = []
    width = max(tile.runs[-1][1] - tile.runs[0][0] for _, tile in tiles.values())
    highest = 0
    for row, (name, tile) in enumerate(tiles.values()):
        first, places = tile.runs[0][0], list(dict.fromkeys(run[2:] for run in tile.runs))
        for start, stop, source, number in tile.runs:
            at = places.index((source, number))
            highest = max(highest, at)
            words = f"{source}, tile {number}" if source else "padding"
            rows.append(
                (name, tile.dim, str(tile.number), start, stop, source or "padding", str(number) if source else "")
            )
            cells += [(position - first, row, "", (at,), (words,)) for position in range(start, stop)]
    shown = [min(each, SHADES - 1) for each in range(highest + 1)]
    labels = [f"the {_ORDINALS[each]} source tile" for each in dict.fromkeys(shown)]
    if highest >= SHADES:
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
        "A row is a tile of the target, along the dim in which it splits; a tile has one scale. Where the colour "
        "changes, the elements come from another tile of the source, which has another scale."
    )
    columns = (
        Column("tensor", "name"), Column("dim", "count"), Column("its tile"), Column("from position", "count"),
        Column("to before", "count"), Column("source", "name"), Column("tile of the source"),
    )  # fmt: skip
    label = f"Map of {plural(len(tiles), 'tile')} by the source tile that each position comes from; a table has them."
    table = limit_rows("split", "Positions of these tiles", columns, rows)
    yield Section("split", "Where tiles split", text, Figure("heat", label, data), (table,))


def _amounts(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return table line of the target -> (number of tensors, number of bytes)."""
    count: Counter[str] = Counter()
    amount: Counter[str] = Counter()
    for tensor in plan.tensors:
        count[tensor.rule] += 1
        amount[tensor.rule] += tensor.nbytes
    return {rule: (count[rule], amount[rule]) for rule in count}


def _routes(plan: Plan) -> dict[str, Route]:
    return {route.target: route for route in plan.routes}


def _flow_section(plan: Plan, amounts: dict[str, tuple[int, int]]) -> Section:
    """Return the section with the flow figure, with table lines of the source on the left and of the target on the
    right.
    """
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
        target, movement = rules(route)[1], words(route, plan.axes)
        amounts_in[target] = nbytes
        parts = divide_bytes(route, nbytes, plan.axes)
        links += [(source, target, movement, part) for source, part in parts.items()]
        if len(parts) > 1:
            joined += [(source, target, part, part) for source, part in parts.items()]
    links.sort(key=lambda link: -amounts_in[link[1]])
    smaller = sum(link[3] for link in links[_MOST_LINKS:])
    total = sum(nbytes for _, nbytes in amounts.values())
    zeros = sum(tensor.nbytes for tensor in plan.tensors if not tensor.transfers)
    other_flows = ("smaller rules", smaller), ("as named", unchanged - zeros), ("zeros", zeros)
    data = {
        "links": links[:_MOST_LINKS],
        "others": [(text, nbytes) for text, nbytes in other_flows if nbytes],
        "bytes": total,
    }
    label = f"Flow of {size(total)} from the rules of the source to those of the target; a table has its numbers."
    text = (
        "Rules of the source are on the left, rules of the target on the right; bands are as wide as the bytes written."
    )
    heads = Column("source", "name"), Column("target", "name"), Column("bytes", "bytes"), Column("share", "share")
    tables = (limit_rows("joined", "Tensors that are joined", heads, joined, 2),) if joined else ()
    return Section("flow", "From source to target", text, Figure("sankey", label, data), tables)


def _summary(plan: Plan) -> Iterator[str]:
    """Yield sentences about axes that move into or out of tensor names, about experts, and about joined tensors."""
    meanings, places = _meanings(plan), dict[tuple[str, str, str], dict[str, None]]()
    for move in (move for route in plan.routes for move in axis_moves(route)):
        if (move.before == _IN_NAME) != (move.after == _IN_NAME) or meanings.get(move.axis) == _EXPERTS:
            places.setdefault((move.axis, move.before, move.after), {})[move.component] = None
    changing = {axis for axis, before, after in places if (before == _IN_NAME) != (after == _IN_NAME)}
    for (axis, before, after), components in places.items():
        count, tensors = plan.axes.get(axis), _join_words(list(components))
        called = f"{axis} ({meanings[axis]})" if meanings.get(axis) else axis
        count_text = f"{count:,} tensors" if isinstance(count, int) else "several tensors"
        if axis not in changing:
            place = "the names" if before == _IN_NAME else before
            yield f"Axis {called} {'stays in' if before == after else f'goes to {after} from'} {place} of {tensors}."
        elif before == after:
            continue  # the axis of experts is the rows of the router, and does not move
        elif before == _IN_NAME:
            yield f"Axis {called} goes from the names into {after} of {tensors}: {count_text} of each become one."
        else:
            yield f"Axis {called} goes from {before} into the names of {tensors}: each becomes {count_text}."
    joined: dict[str, list[str]] = {}
    for route in plan.routes:
        sources, target = rules(route)
        if len(sources) > 1:
            joined.setdefault(route.component, []).append(target)
    for component, targets in joined.items():
        yield f"Joined: {_join_words(component.split(', '))} become {_join_words(targets)}."


def _join_words(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _meanings(plan: Plan) -> dict[str, str]:
    """Return axis -> what it counts; empty unless the family is built in and has all axes of the plan."""
    family = builtin().get(plan.family or "")
    if family is None or not plan.axes.keys() <= family.axes.keys():
        return {}
    return {each.axis: each.meaning.partition(":")[0] for each in axes_of(family)}


def _rules_section(plan: Plan, amounts: dict[str, tuple[int, int]]) -> Section:
    routes, rows = _routes(plan), []
    for rule, (count, nbytes) in amounts.items():
        route = routes.get(rule)
        if route is not None:
            sources = " + ".join(text for text in route.source if text) or "(tied)"
            rows.append((route.component, words(route, plan.axes), sources, rule, count, nbytes, nbytes))
    rows.sort(key=lambda row: -row[5])
    unruled = [amounts[rule] for rule in amounts if rule not in routes]
    if unruled:
        total = sum(nbytes for _, nbytes in unruled)
        rows.append(
            ("", "unchanged", "names without a rule", "the same names", sum(n for n, _ in unruled), total, total)
        )
    columns = (Column("tensor"), Column("moves"), Column("source", "name"), Column("target", "name"), *_AMOUNTS)
    text = (
        "Each row shows a rule of the target, the rules of the source from which it is made, "
        "and the moves of axes between them."
    )
    return Section("rules", "Rules", text, None, (limit_rows("rules", "Rules", columns, rows, 5),))


def _axes_section(plan: Plan) -> Section:
    meanings = _meanings(plan)
    rows = [
        (
            move.component,
            move.axis,
            meanings.get(move.axis, ""),
            str(plan.axes.get(move.axis, "by layer")),
            move.before,
            move.after,
            _move_text(move),
        )
        for route in plan.routes
        for move in axis_moves(route)
    ]
    rows.sort(key=lambda row: not row[-1])
    columns = (
        Column("tensor"), Column("axis"), Column("meaning"), Column("size"), Column("in the source"),
        Column("in the target"), Column("moves"),
    )  # fmt: skip
    text = "An axis is either in the tensor name, so that each index is a separate tensor, or in a dim."
    figure = _moves_figure(plan, meanings)
    table = limit_rows("axes", "Axes of each tensor; those that move come first", columns, rows)
    return Section("axes", "How axes move", text if rows else "No rule moves any axis.", figure, (table,))


def _moves_figure(plan: Plan, meanings: Mapping[str, str]) -> Figure | None:
    """Return a figure of the axes in source and target, for the table lines with the most bytes; None if no axis
    moves.
    """
    amounts = _amounts(plan)
    moving = [(route, words(route, plan.axes)) for route in plan.routes]
    moving = [
        (route, movement) for route, movement in moving if movement not in {RENAMED, UNCHANGED} and any(route.source)
    ]
    moving.sort(key=lambda item: -amounts.get(item[0].target, (0, 0))[1])
    if not moving:
        return None
    drawn = []
    for route, movement in moving[:_MOST_MOVES]:
        sources, target = arrangements(route)
        moves = dict.fromkeys(f"{move.axis}: {_move_text(move)}" for move in axis_moves(route) if _move_text(move))
        moved = sorted({move.axis for move in axis_moves(route) if _move_text(move)})
        drawn.append(
            {
                "tensors": route.component, "what": movement, "steps": list(moves), "moved": moved,
                "before": [asdict(each) for each in sources], "after": asdict(target),
            }
        )  # fmt: skip
    count = plural(len(drawn), "rule")
    label = f"Drawing of the axes of {count} in names and dims, before and after; the table below says the same."
    return Figure("moves", label, {"rules": drawn, "meanings": dict(meanings), "sizes": dict(plan.axes)})


def _move_text(move: AxisMove) -> str:
    return "" if move.before == move.after else f"{move.before} -> {move.after}"


def _tensors_section(plan: Plan) -> Section:
    keys = [(tensor.dtype, tensor.shape, tensor.nbytes) for tensor in plan.tensors]
    rows = []
    for row in fold([tensor.name for tensor in plan.tensors], keys):
        assert isinstance(row.key, tuple)
        dtype, shape, nbytes = row.key
        total = nbytes * row.count
        rows.append((row.name, dtype, " x ".join(map(str, shape)) or "1", row.count, total, total))
    columns = Column("name", "name"), Column("type"), Column("shape"), *_AMOUNTS
    return Section("tensors", "Tensors of the target", tables=(limit_rows("tensors", "Tensors", columns, rows, 4),))


def _other_tensors(plan: Plan) -> Iterator[Section]:
    """Yield the sections about tensors that occur in only some plans, such as ignored tensors."""
    listed: tuple[tuple[str, Sequence[str]], ...] = (
        ("name unchanged: no rule in the target dialect", plan.kept),
        ("file copied", plan.carried),
        ("left behind", plan.ignored),
        ("grafted from another checkpoint", (*plan.grafted, *plan.grafted_files)),
        ("dtype unchanged", plan.stayed),
    )
    rows = [(what, row.name, row.count) for what, names in listed for row in fold(sorted(names, key=natural))]
    rows += [(f"tied to {original}", alias, 1) for alias, original in plan.aliases.items()]
    if rows:
        columns = Column("result"), Column("name", "name"), Column("names", "count")
        yield Section("others", "What is not converted", tables=(limit_rows("others", "Other names", columns, rows),))
    if plan.recoded:
        recoded: list[tuple[Any, ...]] = []
        keys = [(each.action, each.encoding, each.convention, each.dtype) for each in plan.recoded]
        for row in fold([each.name for each in plan.recoded], keys):
            assert isinstance(row.key, tuple)
            recoded.append((row.name, *row.key, row.count))
        heads = Column("name", "name"), Column("action"), Column("encoding"), Column("convention"), Column("type")
        table = limit_rows("recoded", "Values", (*heads, Column("tensors", "count")), recoded)
        yield Section("recoded", "Values that change", tables=(table,))
