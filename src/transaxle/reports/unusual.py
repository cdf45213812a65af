"""What somebody who looks at a checkpoint should look at first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

from transaxle.engine.facts.checkpoint_facts import JsonFacts
from transaxle.engine.facts.value_facts import CheckpointValues
from transaxle.engine.number_text import plural, size
from transaxle.reports.layout_rows import LayoutRow

_LOOKED_FOR = (
    "Looked for: names outside the table, scales that do not fit, shapes that do not fit the config, files that "
    "changed since they were written, files more than twice as large as usual, tensors that differ in type or shape "
    "from the others of their rule, missing combinations of indices, and tensors without elements."
)
_NO_VALUES = "Values were not read; --values (values=True) looks for NaN and infinite ones."
_MOST = 30
"""Notices that are shown."""
_LARGER = 2
"""How many times as large as the median an unusual file is."""
_FEW = 3
"""Files of which none is unusual."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to look at."""

    title: str
    """What it is, in a few words."""
    text: str
    """What was seen."""


def looked_for(values: CheckpointValues | None) -> str:
    """Return what would be unusual, and was looked for."""
    return f"{_LOOKED_FOR} {_NO_VALUES if values is None else 'And NaN and infinite values.'}"


def unusual(
    facts: JsonFacts,
    rows: Sequence[LayoutRow],
    tensor_bytes: Mapping[str, int],
    values: CheckpointValues | None = None,
) -> list[Notice]:
    """Return what is unusual about a checkpoint; values that are no numbers come first.

    Args:
        facts: of the checkpoint.
        rows: its tensors.
        tensor_bytes: file -> bytes of tensors in it.
        values: of its tensors, where they were measured.
    """
    of_values = [] if values is None else _of_values(values)
    notices = [
        *of_values,
        *_of_names(facts, rows),
        *_of_shapes(rows),
        *_of_files(facts, tensor_bytes),
        *_of_rules(rows),
    ]
    more = len(notices) - _MOST
    return [*notices[:_MOST], *([Notice("And more", f"{plural(more, 'notice')} like these.")] if more > 0 else [])]


def _of_values(values: CheckpointValues) -> Iterator[Notice]:
    for title, counts in (
        ("NaN values", {name: each.nans for name, each in values.tensors.items()}),
        ("Infinite values", {name: each.infinite for name, each in values.tensors.items()}),
    ):
        counts = {name: count for name, count in counts.items() if count}
        if counts:
            most = max(counts, key=counts.__getitem__)
            of_most = f"{counts[most]:,} of {values.tensors[most].elements:,}"
            text = f"{plural(sum(counts.values()), 'element')} of {plural(len(counts), 'tensor')}, the most"
            yield Notice(title, f"{text} in {most}: {of_most}.")


def _of_names(facts: JsonFacts, rows: Sequence[LayoutRow]) -> Iterator[Notice]:
    reason = facts["reason"]
    if reason is not None:
        yield Notice("No table reads these names", f"{reason['message']}. {reason['hint']}".strip())
    else:
        outside = [row for row in rows if row.key.kind == "unknown"]
        count = sum(row.count for row in outside)
        if count:
            amount = size(sum(row.bytes for row in outside))
            have = "has" if count == 1 else "have"
            text = f"{plural(count, 'tensor')} ({amount}) {have} no line in dialect {facts['dialect']}"
            yield Notice("Tensors outside the table", f"{text}, such as {outside[0].example}.")
    if facts["misfits"]:
        first = facts["misfits"][0]
        more = f" And {len(facts['misfits']) - 1:,} more." if len(facts["misfits"]) > 1 else ""
        place = first["tensor"] or first["file"] or ""
        yield Notice("Scales that do not fit", f"{place} {first['message']}{more}".strip())


def _of_shapes(rows: Sequence[LayoutRow]) -> Iterator[Notice]:
    misfits = [row for row in rows if row.misfit]
    if misfits:
        amount, first = plural(sum(row.count for row in misfits), "tensor"), misfits[0]
        text = f"{amount}, such as {first.example}, {first.misfit}. A conversion refuses them."
        yield Notice("Shapes that do not fit the config", text)


def _of_files(facts: JsonFacts, tensor_bytes: Mapping[str, int]) -> Iterator[Notice]:
    problems = facts["manifest"]["problems"]
    if problems:
        file = problems[0]["file"] or ""
        yield Notice("The manifest no longer matches", f"{file} {problems[0]['message']}".strip())
    usual = median(tensor_bytes.values()) if len(tensor_bytes) > _FEW else 0
    for file, count in tensor_bytes.items():
        if usual and count > _LARGER * usual:
            text = f"{file} has {size(count)} of tensors; half of the files have {size(int(usual))} or less."
            yield Notice("A file much larger than the others", text)


def _of_rules(rows: Sequence[LayoutRow]) -> Iterator[Notice]:
    by_rule: defaultdict[tuple[str, str, str], list[LayoutRow]] = defaultdict(list)
    for row in rows:
        if row.key.kind == "table":
            by_rule[row.key.rule, row.key.slot, row.key.role].append(row)
    for (rule, _, _), alike in by_rule.items():
        name = f"{alike[0].key.component} ({rule})"
        yield from _different("types", name, [(row.key.dtype, row) for row in alike])
        yield from _different("shapes", name, [(str(list(row.key.shape)), row) for row in alike])
        combinations = prod(len(set().union(*places)) for places in zip(*(row.sets for row in alike), strict=True))
        count_all = sum(row.count for row in alike)
        if count_all != combinations:
            axes = " x ".join(alike[0].key.axes)
            yield Notice(
                "Missing combinations of indices",
                f"{name}: {count_all:,} tensors, but {combinations:,} combinations of {axes}.",
            )
    empty = [row for row in rows if row.bytes == 0]
    if empty:
        count_empty = sum(row.count for row in empty)
        yield Notice("Tensors without elements", f"{plural(count_empty, 'tensor')}, such as {empty[0].example}.")


def _different(what: str, name: str, valued: Sequence[tuple[str, LayoutRow]]) -> Iterator[Notice]:
    """Yield a notice if the rows of a rule have different values: the usual first, an example of the rarest."""
    count: Counter[str] = Counter()
    for value, row in valued:
        count[value] += row.count
    if len(count) > 1:
        listed = ", ".join(f"{number:,} of {value}" for value, number in count.most_common(_FEW))
        rarest = count.most_common()[-1][0]
        example = next(row.example for value, row in valued if value == rarest)
        yield Notice(f"Different {what} in one rule", f"{name}: {listed}; {example} is of {rarest}.")
