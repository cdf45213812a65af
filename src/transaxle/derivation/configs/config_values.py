"""What a config says: numbers that may be sizes, and statements that may be conditions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

from transaxle.derivation.configs.naming import LETTERS

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"(?!len\()[A-Za-z_][A-Za-z0-9_.]*")
_OF_NO_SIZE = re.compile(r"(_token_id|_token_index|_id|_ids|version|seed|_class)$")
"""Keys whose numbers are no sizes."""
_DEEPEST = 4
"""Levels of configs inside configs that are read."""


def leaves(config: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield every value of a config with its dotted key."""
    for key, value in config.items():
        if not _KEY.fullmatch(str(key)) or key.startswith("_"):
            continue
        if isinstance(value, Mapping):
            if depth < _DEEPEST:
                yield from ((f"{key}.{inner}", leaf) for inner, leaf in leaves(value, depth + 1))
        else:
            yield key, value


def numbers(config: Mapping[str, Any]) -> dict[str, int]:
    """Return what may be a size: whole numbers, and how many entries a list has."""
    found = {}
    for key, value in leaves(config):
        if _OF_NO_SIZE.search(key):
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            found[key] = value
        elif isinstance(value, list) and value:
            found[f"len({key})"] = len(value)
    return found


class Sizes:
    """Formulas for sizes, by their values in all traces.

    Args:
        configs: the config of every trace.
        aliases: key -> other keys under which configs have the same.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]], aliases: Mapping[str, Sequence[str]]) -> None:
        found = [numbers(config) for config in configs]
        common = [key for key in found[0] if all(key in each for each in found)] if found else []
        self._values = {key: tuple(each[key] for each in found) for key in common}
        self._aliases = aliases

    def formula(self, size: Mapping[int, int], near: str = "", *, deep: bool = False) -> str | None:
        """Return the formula of a size, None if none fits or none is better than others.

        Args:
            size: trace -> size there.
            near: part of a config that the tensor belongs to; its keys come first.
            deep: try products and sums of keys too, and take the best of several.
        """
        for level in (self._simple, self._of_two, self._of_three) if deep else (self._simple,):
            fitting = sorted({text: self._rank(text, near) for text in level(size)}.items(), key=lambda item: item[1])
            if not fitting:
                continue
            if not deep and len(fitting) > 1 and fitting[0][1][:2] == fitting[1][1][:2]:
                return None
            return self.spelled(fitting[0][0])
        return None

    @staticmethod
    def _rank(text: str, near: str) -> tuple[int, int, int, str]:
        """Return how far a formula is from a tensor: keys of its part of the config first, then those we know."""
        keys = _NAME.findall(text)
        far = sum(not key.startswith(f"{near}.") if near else "." in key for key in keys)
        unknown = sum(key.rpartition(".")[2] not in LETTERS for key in keys) + text.count("len(")
        return far, unknown, len(text), text

    def spelled(self, formula: str) -> str:
        """Return a formula with all spellings of its keys."""

        def alternatives(match: re.Match[str]) -> str:
            key = match[0]
            scope, _, leaf = key.rpartition(".")
            others = [f"{scope}.{alias}" if scope else alias for alias in self._aliases.get(leaf, ())]
            both = "|".join([key, *others])
            return both if not others or both == formula else f"({both})"

        text = _NAME.sub(alternatives, formula)
        return text.removeprefix("(").removesuffix(")") if text == f"({text[1:-1]})" and text.count("(") == 1 else text

    def _fits(self, size: Mapping[int, int], values: Sequence[int | None]) -> bool:
        return all(values[trace] == count for trace, count in size.items())

    def _simple(self, size: Mapping[int, int]) -> Iterator[str]:
        for key, values in self._values.items():
            if self._fits(size, values):
                yield key

    def _candidates(self) -> dict[str, tuple[int, ...]]:
        """Return one key for each vector of values that may be a factor."""
        return {key: values for key, values in self._values.items() if min(values) > 0}

    def _of_two(self, size: Mapping[int, int]) -> Iterator[str]:
        keys = self._candidates()
        for key, values in keys.items():
            for factor in (2, 3, 4, 8):
                if self._fits(size, [value * factor for value in values]):
                    yield f"{key}*{factor}"
                if self._fits(size, [value // factor if value % factor == 0 else None for value in values]):
                    yield f"{key}/{factor}"
        for (one, first), (other, second) in combinations(keys.items(), 2):
            if self._fits(size, [a * b for a, b in zip(first, second, strict=True)]):
                yield f"{one}*{other}"
            if self._fits(size, [a + b for a, b in zip(first, second, strict=True)]):
                yield f"{one}+{other}"
        for (one, first), (other, second) in permutations(keys.items(), 2):
            if self._fits(size, [a // b if a % b == 0 else None for a, b in zip(first, second, strict=True)]):
                yield f"{one}/{other}"
            if self._fits(size, [a - b for a, b in zip(first, second, strict=True)]):
                yield f"{one}-{other}"

    def _of_three(self, size: Mapping[int, int]) -> Iterator[str]:
        keys = self._candidates()
        by_value: dict[tuple[int, ...], str] = {}
        for key, values in keys.items():
            by_value.setdefault(tuple(values[trace] for trace in size), key)
        few = list(by_value.items())
        wanted = tuple(size.values())
        for (first, one), (second, other) in combinations(few, 2):
            for factor in (1, 2):
                product = [factor * a * b for a, b in zip(first, second, strict=True)]
                scale = "" if factor == 1 else f"{factor}*"
                rest = tuple(w - p for w, p in zip(wanted, product, strict=True))
                if rest in by_value:
                    yield f"{scale}{one}*{other}+{by_value[rest]}"
                if all(w % p == 0 for w, p in zip(wanted, product, strict=True)):
                    quotient = tuple(w // p for w, p in zip(wanted, product, strict=True))
                    if quotient in by_value:
                        yield f"{scale}{one}*{other}*{by_value[quotient]}"
                if all(p % w == 0 for w, p in zip(wanted, product, strict=True)):
                    quotient = tuple(p // w for w, p in zip(wanted, product, strict=True))
                    if quotient in by_value:
                        yield f"{scale}{one}*{other}/{by_value[quotient]}"
