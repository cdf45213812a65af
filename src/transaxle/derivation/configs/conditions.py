"""Conditions: what in the configs says where a tensor is."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transaxle.axes.notation.formula import Formula
from transaxle.derivation.configs.config_values import leaves
from transaxle.errors import TransaxleError

INDEX = "_index_"
"""Stands for the index in a condition, until its axis has a name."""
_OF_LAYERS = re.compile(r"dense|replace|first|step|offset|layer|interval|freq|period|every|start|skip|sparse|pattern")
"""Keys that may say which layers are of a kind; other numbers are sizes, and fit by accident."""
_PERIOD = re.compile(r"period|step|freq|interval")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_NO_KEYS = frozenset({"not", "in", "and", "or", "len", "True", "False", "None", INDEX})
SOMETIMES = "False"
"""The condition of a tensor of which only its names tell where it is."""


@dataclass(frozen=True)
class Seen:
    """Where a tensor is in one trace."""

    config: Mapping[str, Any]
    """The trace's config."""
    count: int
    """Number of indices that there are; 0: the tensor has none."""
    present: frozenset[int]
    """Those at which it is; {0} for a tensor without index that is there."""
    judged: frozenset[int] | None = None
    """Those that count; None: all."""


def condition(seen: Sequence[Seen], hints: Sequence[str] = (), *, careful: bool = False) -> str | None:
    """Return the first statement over the config that is true exactly where a tensor is.

    Args:
        seen: where it is in each trace.
        hints: words of the tensor's name: a statement about keys with such words comes first.

        careful: only a statement that fits alone.

    Returns:
        The formula, the index written as `INDEX`; None if no statement fits.
    """
    fitting = [text for text in dict.fromkeys(_candidates(seen)) if all(_holds(text, each) for each in seen)]
    fitting.sort(key=lambda text: (-sum(hint in text for hint in hints), *_unlikely(text)))
    return fitting[0] if fitting and not (careful and len(fitting) > 1) else None


def _unlikely(text: str) -> tuple[bool, bool, int]:
    """Return what makes a statement less likely than another one: a flag of ties is about tied tensors."""
    return "tie_word_embeddings" in text, text.startswith("not "), text.count(".")


def negated(text: str) -> str:
    """Return the statement that is true where another is false."""
    inner = text.removeprefix("not ")
    if inner != text and (" " not in inner or inner.startswith("(")):
        return inner
    return f"not ({text})" if " " in text else f"not {text}"


def keys_of(text: str) -> frozenset[str]:
    """Return the config keys that a statement speaks of."""
    return frozenset(_WORD.findall(re.sub('"[^"]*"', "", text))) - _NO_KEYS


def _holds(text: str, seen: Seen) -> bool:
    formula = Formula(text)
    for index in range(seen.count or 1) if seen.judged is None else seen.judged:
        try:
            value = formula(ChainMap({INDEX: index}, dict(seen.config)))
        except TransaxleError:
            return False
        if value is None or bool(value) is not (index in seen.present):
            return False
    return True


def _candidates(seen: Sequence[Seen]) -> Iterator[str]:
    configs = [dict(leaves(each.config)) for each in seen]
    common = [key for key in configs[0] if all(key in config for config in configs)]
    yield from _of_flags(configs, common)
    if not any(each.count for each in seen):
        return
    for period in (key for key in common if _PERIOD.search(key)):
        for offset in (key for key in common if key.startswith(period[:4]) and "offset" in key):
            if all(isinstance(c[period], int) and c[period] > 0 and isinstance(c[offset], int) for c in configs):
                yield from (f"{INDEX} % {period} == {offset}", f"{INDEX} % {period} != {offset}")
    for key in common:
        values = [config[key] for config in configs]
        if all(isinstance(value, list) for value in values):
            yield from _of_lists(key, seen, values)
        elif _OF_LAYERS.search(key) and all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            yield from (f"{INDEX} >= {key}", f"{INDEX} < {key}")
            if all(value > 0 for value in values) and any(v != s.count for v, s in zip(values, seen, strict=True)):
                yield from (f"({INDEX} + 1) % {key} == 0", f"{INDEX} % {key} == 0")
                yield from (f"({INDEX} + 1) % {key} != 0", f"{INDEX} % {key} != 0")
    yield from (f"{INDEX} == 0", f"{INDEX} > 0")


def _of_flags(configs: Sequence[Mapping[str, Any]], common: Sequence[str]) -> Iterator[str]:
    for key in dict.fromkeys(key for config in configs for key in config if key not in common):
        if all(isinstance(config.get(key, True), bool) for config in configs):  # left out where it has its default
            yield from (f"({key}|True)", f"({key}|False)", f"not ({key}|True)", f"not ({key}|False)")
    for key in common:
        values = [config[key] for config in configs]
        if all(isinstance(value, bool) for value in values):
            yield from (key, f"not {key}")
        elif len({repr(value) for value in values}) > 1 and all(isinstance(value, str | None) for value in values):
            yield from (f"{key} == {_quoted(value)}" for value in values if value is not None)


def _of_lists(key: str, seen: Sequence[Seen], values: Sequence[list[Any]]) -> Iterator[str]:
    if all(len(value) == each.count for value, each in zip(values, seen, strict=True) if each.count):
        kinds = {repr(item): item for value in values for item in value if isinstance(item, str) or item in (0, 1)}
        if all(isinstance(item, bool) for item in kinds.values()):
            yield from (f"{key}[{INDEX}]", f"not {key}[{INDEX}]")
        elif len(kinds) <= 8:  # other numbers are sizes
            yield from (f"{key}[{INDEX}] == {_quoted(item)}" for item in kinds.values())
            yield from (f"{key}[{INDEX}] != {_quoted(item)}" for item in kinds.values())
    if all(isinstance(item, int) for value in values for item in value) and all(len({*v}) == len(v) for v in values):
        yield from (f"{INDEX} in {key}", f"{INDEX} not in {key}")


def _quoted(item: object) -> str:
    return f'"{item}"' if isinstance(item, str) else repr(item)
