"""Which family and dialect a checkpoint is of: its config and its names tell, never its shapes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transaxle.axes.layout.bind import group, score, split_slot
from transaxle.axes.notation.family import Dialect, Family, LogicalTensor
from transaxle.axes.notation.name import skeleton
from transaxle.errors import TransaxleError, refuse
from transaxle.families import Families

IDENTITY = "identity"
"""The dialect of every checkpoint: each tensor under its own name."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """How a checkpoint's names are read."""

    family: Family
    """Its family."""
    dialect: Dialect
    """Its dialect."""
    prefix: str
    """What stands before every name."""
    matched: int
    """Names that the dialect reads."""


def pick_family(label: str, families: Mapping[str, Family]) -> Family:
    """Return a family by name.

    Raises:
        UsageError: UNKNOWN_FAMILY, with the closest name.
    """
    if label in families:
        return families[label]
    close = difflib.get_close_matches(label, families, 1)
    hint = f"did you mean {close[0]}?" if close else "add one with --rules FILE"
    raise refuse("UNKNOWN_FAMILY", f"no family {label!r}; known: {', '.join(families)}", hint=hint)


def pick_dialect(family: Family, label: str) -> Dialect:
    """Return a dialect of a family by its label.

    Raises:
        UsageError: AMBIGUOUS, listing the dialects there are.
    """
    found = family.dialect(label)
    if found is None:
        close = difflib.get_close_matches(label, [*family.labels, *(d.name for d in family.dialects), IDENTITY], 1)
        raise refuse(
            "AMBIGUOUS",
            f"family {family.name} has no dialect {label!r}; it has: {', '.join(family.labels)}, {IDENTITY}",
            hint=f"did you mean {close[0]}?" if close else "add one with --rules FILE",
        )
    return found


def model_types(config: Mapping[str, Any]) -> list[str]:
    """Return what a config says the model is: its own type, and that of the text model in it."""
    nested = config.get("text_config")
    levels = [config, nested] if isinstance(nested, Mapping) else [config]
    return [level["model_type"] for level in levels if isinstance(level.get("model_type"), str)]


def _absent(found: Recognised, grouped: Mapping[str, list[str]]) -> list[LogicalTensor]:
    """Return the family's tensors that the names lack; one that may be stored as a tie is not missed."""
    present = {skeleton(names[0][len(found.prefix) :]) for names in grouped.values()}
    held = {c for line in found.dialect.lines if line.name.skeleton in present for c in line.expression.components}
    held |= {tie.alias for tie in found.family.ties}
    return [tensor for name, tensor in found.family.tensors.items() if name not in held]


def _most_complete(found: Sequence[Recognised], grouped: Mapping[str, list[str]]) -> list[Recognised]:
    """Return the readings under which nothing is lacking that must be there, and least that may be.

    A Llama's names are all names of a Qwen3, which always has more; a Qwen3's are all names of a Qwen3-MoE without
    any experts. Where every reading lacks something (one shard of several) there is no telling.
    """
    absent = [(reading, _absent(reading, grouped)) for reading in found]
    whole = [(reading, len(lacks)) for reading, lacks in absent if all(t.when is not None for t in lacks)]
    least = min((count for _, count in whole), default=0)
    return [reading for reading, count in whole if count == least] or list(found)


def _readings(family: Family, grouped: Mapping[str, list[str]], dialect: str | None) -> Iterator[Recognised]:
    """Yield how each dialect of a family, or the one named, reads the names."""
    for each in family.dialects if dialect is None else [family.dialect(dialect)]:
        matched, prefix = (0, "") if each is None else score(grouped, each)
        if each is not None and matched:
            yield Recognised(family, each, prefix, matched)


def _best_readings(families: Families, grouped: Mapping[str, list[str]], dialect: str | None) -> list[Recognised]:
    """Return the readings of the families that may read the most names; tables that read fewer stay unread."""
    found: list[Recognised] = []
    most = 0
    for bound, family in families.that_may_read({key: len(same) for key, same in grouped.items()}):
        if bound < most:
            break
        found.extend(_readings(family, grouped, dialect))
        most = max((reading.matched for reading in found), default=0)
    order = {name: place for place, name in enumerate(families)}
    return sorted(found, key=lambda reading: order[reading.family.name])


def recognise(
    names: Sequence[str],
    config: Mapping[str, Any],
    families: Families,
    family: str | None = None,
    dialect: str | None = None,
) -> Recognised:
    """Find the family and dialect of a checkpoint.

    Args:
        names: its stored names.
        config: its config.json; empty where there is none.
        families: all known families.
        family: what the user says it is; believed.
        dialect: likewise.

    Raises:
        UsageError: UNKNOWN_FAMILY or AMBIGUOUS, listing the candidates.
    """
    grouped = group(split_slot(name)[0] for name in names)
    told = model_types(config)
    candidates = [pick_family(family, families)] if family is not None else families.of_types(told)
    if candidates:
        found = [each for one in candidates for each in _readings(one, grouped, dialect)]
    else:
        found = _best_readings(families, grouped, dialect)
    if not found:
        raise _nothing(names, told, candidates or list(families.values()), dialect)
    most = max(r.matched for r in found)
    best = _most_complete([r for r in found if r.matched == most], grouped)
    distinct = {(r.family.name, _reading(r, grouped)): r for r in reversed(best)}
    if len(distinct) > 1:
        listed = ", ".join(f"{r.family.name}:{r.dialect.label}" for r in best)
        names_only = "" if told else " (no config.json says what it is)"
        raise refuse(
            "AMBIGUOUS",
            f"{most} of {len(names)} names are read alike by {listed}{names_only}",
            hint="say which with --config FILE, or with --family NAME and --from DIALECT (config=, family=, dialect=)",
        )
    chosen = best[0]
    if family is None and told and not any(t in chosen.family.model_types for t in told):
        raise refuse(
            "UNKNOWN_FAMILY",
            f"config.json says model_type {told[0]!r}, which no table knows; known: {', '.join(families)}",
            hint=f"its names read like {chosen.family.name}: if that is right, say --family {chosen.family.name}",
        )
    return chosen


def _reading(found: Recognised, grouped: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Return the rules by which a dialect reads the names: dialects that read them alike are one."""
    texts: set[str] = set()
    for names in grouped.values():
        name = names[0][len(found.prefix) :]
        lines = found.dialect.by_skeleton.get(skeleton(name), ())
        texts.update(line.text for line in lines if line.name.match(name) is not None)
    return tuple(sorted(texts))


def _nothing(
    names: Sequence[str], told: Sequence[str], candidates: Sequence[Family], dialect: str | None
) -> TransaxleError:
    """Build the refusal where no dialect reads any name, with the closest one."""
    samples = list(dict.fromkeys(skeleton(name) for name in names[:200]))
    close: list[str] = []
    for family in candidates:
        for each in family.dialects:
            matches = [m for s in samples[:20] for m in difflib.get_close_matches(s, each.by_skeleton, 1, 0.8)]
            if matches:
                close.append(f"{family.name}:{each.label}")
    wanted = f"dialect {dialect!r} reads none" if dialect else "no table reads any"
    first = ", ".join(names[:3]) or "(no tensors)"
    model = f" (config.json says {told[0]!r})" if told else ""
    own = 'convert it under its own names with --to FORMAT:identity (to="FORMAT:identity"), or add --rules FILE'
    hint = f"closest: {close[0]}" if close else own
    return refuse("UNKNOWN_FAMILY", f"{wanted} of its names: {first}{model}", hint=hint)
