"""What a table declares, and what it reads of a checkpoint: the data of `transaxle check-rules`."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from msgspec.structs import replace

from transaxle.axes.layout.bind import group, score, split_slot
from transaxle.axes.notation.family import Dialect, Family
from transaxle.axes.notation.name import skeleton
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.engine.checkpoint.settings import settings
from transaxle.engine.number_text import plural
from transaxle.errors import Code, TransaxleError, refuse
from transaxle.families import builtin

JsonFacts = dict[str, Any]
_MISSHAPEN: Code = "SHAPE_MISMATCH"
_TENSORS, _MANIFEST = "the tensors", "transaxle.json"
_TOLD, _TRIED = 3, 50
"""Names that a refusal shows, and those for which it looks for a line that is close."""
_NOTHING: JsonFacts = {
    "dialect": None, "unknown": [], "ignored": [], "misshapen": [], "axes": {}, "absent_keys": [], "writes": {},
}  # fmt: skip
"""What is read of a checkpoint by a family that knows none of its names."""


def rules_facts(file: str, checkpoint: str | None = None) -> JsonFacts:
    """Return what a table declares, and what its families read of a checkpoint.

    Raises:
        TransaxleError: every mistake in the table; UNKNOWN_FAMILY where it reads no name of the checkpoint.
    """
    known = settings(rules=file).families
    declared = [known[name] for name, entry in known.entries.items() if not entry.file]
    facts: JsonFacts = {
        "file": file,
        "families": [_declared(family) | {"replaces": known.replaces(family.name)} for family in declared],
    }
    if checkpoint is None:
        return facts
    reads = [_read(checkpoint, file, family) for family in declared]
    if declared and not any(map(reads_any, reads)):
        raise _unread(checkpoint, declared)
    return facts | {"checkpoint": checkpoint, "fits": not any(map(_shapes_differ, reads)), "reads": reads}


def _declared(family: Family) -> JsonFacts:
    new = [dialect for dialect in family.dialects if not _ships(family, dialect)]
    return {
        "name": family.name,
        "model_types": list(family.model_types),
        "axes": {axis: None if formula is None else formula.text for axis, formula in family.axes.items()},
        "unsized": _unsized(family),
        "tensors": list(family.tensors),
        "dialects": {dialect.label: len(dialect.lines) for dialect in new},
        "says_anew": _said_anew(family),
    }


def _said_anew(family: Family) -> list[JsonFacts]:
    """Return the statements of other families that a family replaces by its own."""
    replaced = () if family.written is None else family.written.replaced
    return [
        {"of": each.taken.owner, "taken": " ".join(each.taken.text.split()), "own": " ".join(each.own.text.split())}
        for each in replaced
    ]


def _unsized(family: Family) -> list[str]:
    """Return the name axes without a formula: their size is known from a checkpoint's names only."""
    return [axis for axis, formula in family.axes.items() if formula is None and axis in family.name_axes]


def _ships(family: Family, dialect: Dialect) -> bool:
    shipped_family = builtin().get(family.name)
    return shipped_family is not None and any(dialect is shipped for shipped in shipped_family.dialects)


def _read(ckpt: str, file: str, family: Family) -> JsonFacts:
    """Return which names of a checkpoint each dialect of a family reads, and what prevents writing the others."""
    with open_checkpoint(ckpt, rules=file, family=family.name) as checkpoint:
        names = checkpoint.catalog.entries
        grouped = group(split_slot(name)[0] for name in names)
        counts = {dialect.label: score(grouped, dialect)[0] for dialect in family.dialects}
        if not any(counts.values()):
            return {**_NOTHING, "family": family.name, "tensors": len(names), "names_read": counts}
        source_dialect = checkpoint.recognised.dialect
        own_refusals = _written(checkpoint, source_dialect)["refusals"]
        return {
            "family": family.name,
            "tensors": len(checkpoint),
            "names_read": counts,
            "dialect": source_dialect.label,
            "unknown": list(checkpoint.bound.unknown),
            "ignored": list(checkpoint.bound.ignored),
            "misshapen": [refusal for refusal in own_refusals if refusal["code"] == _MISSHAPEN],
            "axes": dict(checkpoint.sizes.at({})),
            "absent_keys": _absent_keys(checkpoint),
            "writes": {d.label: _written(checkpoint, d) for d in family.dialects if d.label != source_dialect.label},
        }


def reads_any(read: JsonFacts) -> bool:
    """Tell whether any dialect reads any name."""
    return any(read["names_read"].values())


def _unread(ckpt: str, families: Sequence[Family]) -> TransaxleError:
    """Build the refusal of a checkpoint of which no family reads a name, with the line closest to one."""
    with open_checkpoint(ckpt) as checkpoint:
        names = list(checkpoint)
    lines = {key: found[0] for each in families for d in each.dialects for key, found in d.by_skeleton.items()}
    close = [(name, match) for name in names[:_TRIED] for match in get_close_matches(skeleton(name), lines, 1, 0.7)]
    closest = f" Closest to {close[0][0]}:  {lines[close[0][1]].text}" if close else ""
    listed, shown = ", ".join(family.name for family in families), ", ".join(names[:_TOLD]) or "(no tensors)"
    return refuse(
        "UNKNOWN_FAMILY",
        f"no dialect of {listed} reads any of its {plural(len(names), 'name')}: {shown}",
        file=ckpt,
        hint=f"A line begins with the whole name; only what all names begin with may be missing.{closest}",
    )


def _absent_keys(checkpoint: Checkpoint) -> list[JsonFacts]:
    """Return the axes in use whose formula has no value because the config lacks its keys."""
    sizes, family = checkpoint.sizes, checkpoint.recognised.family
    if not sizes.config:
        return []
    lines = {line for line, _ in checkpoint.bound.names}
    used = {axis for line in lines for axis in (*line.name.axes, *line.expression.axes)}
    from_config = replace(sizes, given={}).at({})
    absent = []
    for axis, formula in family.axes.items():
        if formula is None or axis in from_config or axis not in used:
            continue
        keys = sorted(formula.names - sizes.settings.keys() - (family.axes.keys() - {axis}))
        if keys:
            absent.append({"axis": axis, "keys": keys, "size_from": _MANIFEST if axis in sizes.given else _TENSORS})
    return absent


def _shapes_differ(read: JsonFacts) -> bool:
    refusals = [refusal for outcome in read["writes"].values() for refusal in outcome["refusals"]]
    return bool(read["misshapen"]) or any(refusal["code"] == _MISSHAPEN for refusal in refusals)


def _written(checkpoint: Checkpoint, dialect: Dialect) -> JsonFacts:
    """Return the result of writing a checkpoint in another dialect, or everything that prevents it."""
    try:
        translation = checkpoint.translation(dialect.label)
    except TransaxleError as error:
        return {"tensors": 0, "refusals": [refusal.as_json() for refusal in error.refusals]}
    unknown = checkpoint.foreign(dialect.label) or checkpoint.half_converted(dialect.label, translation)
    refusals = (*unknown, *translation.refusals)
    return {"tensors": len(translation.targets), "refusals": [refusal.as_json() for refusal in refusals]}
