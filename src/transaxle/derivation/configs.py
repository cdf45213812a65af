"""Derives three things from models' configs: sizes of axes, names for axes and tensors, and conditions for tensors.

**Sizes**: for the size of each axis, a formula over config keys.

**Names**: for axes and tensors in derived mapping rules, short names.

**Conditions**: statements over config keys that are true exactly if a tensor exists.

A *trace* is a record of a converter's input and output tensors for one tiny model, whose config is known.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

from transaxle.axes.notation.family import WORDS, Formula
from transaxle.errors import TransaxleError

RESERVED = frozenset(
    {
        *WORDS,
        "family",
        "dialect",
        "axes",
        "axis",
        "let",
        "tie",
        "cut",
        "precise",
        "added",
        "wrapper",
        "model_type",
        "ignore",
    }
    | {
        "alike",
        "when",
        "optional",
        "lossy",
        "like",
        "of",
        "len",
        "and",
        "or",
        "not",
        "in",
        "if",
        "else",
        "is",
        "None",
        "True",
        "False",
    }
)
LETTERS = {
    "num_hidden_layers": "l", "num_layers": "l", "n_layer": "l", "layers": "l", "blocks": "l", "block": "l",
    "layer": "l", "h": "l", "hidden_size": "d", "d_model": "d", "n_embd": "d", "embed_dim": "d", "vocab_size": "n",
    "intermediate_size": "f", "moe_intermediate_size": "f", "num_experts": "e", "num_local_experts": "e",
    "n_routed_experts": "e", "experts": "e", "num_key_value_heads": "g", "num_attention_heads": "a", "head_dim": "c",
    "out_channels": "o", "kernel_size": "k", "max_position_embeddings": "s", "patch_size": "p", "num_channels": "r",
}  # fmt: skip
"""Config key of a size -> name that hand-written rules files use for the axis."""
_WORD = re.compile(r"[a-z][a-z0-9_]*")


def axis_letters(source: str) -> str:
    """Return a short name for an axis: from its config key, or from the word before its index in names, or `x`."""
    words = _WORD.findall(source.lower())
    if not words:
        return "x"
    last = words[-1] if len(words) == 1 or "." in source else "_".join(words)
    if last in LETTERS:
        return LETTERS[last]
    if len(words) == 1 or "." in source:
        return "".join(part[0] for part in last.split("_") if part and part[0].isalpha())[:3] or "x"
    return "".join(word.split("_")[-1][0] for word in words)[:3]


def first_free(base: str, used: Iterable[str]) -> str:
    """Return the name `base` if it is unused, otherwise the name with the smallest number appended that makes it
    unused.
    """
    used = set(used) | RESERVED
    if base not in used:
        return base
    return next(name for number in range(2, len(used) + 3) if (name := f"{base}{number}") not in used)


def tensor_names(patterns: Sequence[tuple[str, str]]) -> list[str]:
    """Name logical tensors after their stored names, with the fewest last words that make the names distinct.

    Args:
        patterns: for each tensor, the patterns of its names in both dialects (hub, memory).
    """
    stems = [_stem(hub, memory, patterns) for hub, memory in patterns]
    names: list[str] = []
    for at, words in enumerate(stems):
        other_stems = stems[:at] + stems[at + 1 :]
        for count in range(min(2, len(words)), len(words) + 1):
            end = words[-count:]
            if all(other[-count:] != end for other in other_stems):
                break
        else:
            end = words
        name = re.sub(r"\W+", "_", "_".join(end)).strip("_").lower() or "t"
        names.append(first_free(name if name[0].isalpha() else f"t_{name}", names))
    return names


def _stem(hub: str, memory: str, patterns: Sequence[tuple[str, str]]) -> list[str]:
    """Return the words of a tensor's name in the dialect (hub or memory) in which no other tensor has the same name."""
    chosen = hub if sum(pattern[0] == hub for pattern in patterns) == 1 else memory
    if chosen == memory and sum(pattern[1] == memory for pattern in patterns) > 1:
        chosen = f"{memory}.{hub.rpartition('.')[2]}"
    words = [word for word in chosen.replace("{}", "").split(".") if word]
    return words[:-1] if len(words) > 1 and words[-1] == "weight" else words


_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"(?!len\()[A-Za-z_][A-Za-z0-9_.]*")
_OF_NO_SIZE = re.compile(r"(_token_id|_token_index|_id|_ids|version|seed|_class)$")
"""Pattern for config keys whose numbers are not sizes."""
_DEEPEST = 4
"""Maximum nesting depth of the configs that are read."""


def leaves(config: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield every value in a config with its dotted key, such as `text_config.hidden_size`."""
    for key, value in config.items():
        if not _KEY.fullmatch(str(key)) or key.startswith("_"):
            continue
        if isinstance(value, Mapping):
            if depth < _DEEPEST:
                yield from ((f"{key}.{inner}", leaf) for inner, leaf in leaves(value, depth + 1))
        else:
            yield key, value


def numbers(config: Mapping[str, Any]) -> dict[str, int]:
    """Return dotted key -> possible size: the integers in a config, and the lengths of its lists."""
    sizes = {}
    for key, value in leaves(config):
        if _OF_NO_SIZE.search(key):
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            sizes[key] = value
        elif isinstance(value, list) and value:
            sizes[f"len({key})"] = len(value)
    return sizes


class Sizes:
    """Finds a formula over config keys for a size, given the value of the size in every trace (every traced model).

    Args:
        configs: for each trace, the config of the traced model.
        aliases: config key -> further config keys with the same meaning.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]], aliases: Mapping[str, Sequence[str]]) -> None:
        sizes_by_trace = [numbers(config) for config in configs]
        common = (
            [key for key in sizes_by_trace[0] if all(key in each for each in sizes_by_trace)] if sizes_by_trace else []
        )
        self._values = {key: tuple(each[key] for each in sizes_by_trace) for key in common}
        self._aliases = aliases

    def formula(self, size: Mapping[int, int], near: str = "", *, deep: bool = False) -> str | None:
        """Return the formula of a size; None if no formula fits, or if several formulas fit equally well.

        Args:
            size: index of the trace -> size of the axis in this trace.
            near: config section of the tensor's submodel, such as `vision_config`; formulas over keys in this section
                are preferred.
            deep: whether to try also products and sums of config keys, and to choose the best formula if several fit.
        """
        for level in (self._simple, self._of_two, self._of_three) if deep else (self._simple,):
            fitting = sorted({text: self._rank(text, near) for text in level(size)}.items(), key=lambda item: item[1])
            if not fitting:
                continue
            if not deep and len(fitting) > 1 and fitting[0][1][:2] == fitting[1][1][:2]:
                return None
            return self.with_aliases(fitting[0][0])
        return None

    def less(self, size: Mapping[int, int], near: str, fits: Callable[[str], bool]) -> str | None:
        """Return a config key minus 1 or 2, as the formula of a number of modules between the first and the last one;
        None if no such formula fits, or if several fit equally well.

        Args:
            size: index of the trace -> number of modules in this trace.
            near: config section of the tensor's submodel.
            fits: function that returns whether a formula agrees with the modules' name.
        """
        texts = [
            f"{key}-{less}"
            for key, values in self._values.items()
            for less in (1, 2)
            if self._fits(size, [value - less for value in values]) and fits(key)
        ]
        fitting = sorted((self._rank(text, near), text) for text in texts)
        if not fitting or (len(fitting) > 1 and fitting[0][0][:2] == fitting[1][0][:2]):
            return None
        return self.with_aliases(fitting[0][1])

    @staticmethod
    def _rank(text: str, near: str) -> tuple[int, int, int, str]:
        """Return a sort key of formulas: formulas over keys in the tensor's config section are first, then those over
        well-known keys.
        """
        keys = _NAME.findall(text)
        far = sum(not key.startswith(f"{near}.") if near else "." in key for key in keys)
        unknown = sum(key.rpartition(".")[2] not in LETTERS for key in keys) + text.count("len(")
        return far, unknown, len(text), text

    def with_aliases(self, formula: str) -> str:
        """Return a formula in which each config key is followed by its aliases, as in `num_layers|n_layer`."""

        def alternatives(match: re.Match[str]) -> str:
            key = match[0]
            scope, _, leaf = key.rpartition(".")
            alias_keys = [f"{scope}.{alias}" if scope else alias for alias in self._aliases.get(leaf, ())]
            alternative_keys = "|".join([key, *alias_keys])
            return alternative_keys if not alias_keys or alternative_keys == formula else f"({alternative_keys})"

        text = _NAME.sub(alternatives, formula)
        return text.removeprefix("(").removesuffix(")") if text == f"({text[1:-1]})" and text.count("(") == 1 else text

    def _fits(self, size: Mapping[int, int], values: Sequence[int | None]) -> bool:
        return all(values[trace] == count for trace, count in size.items())

    def _simple(self, size: Mapping[int, int]) -> Iterator[str]:
        for key, values in self._values.items():
            if self._fits(size, values):
                yield key

    def _candidates(self) -> dict[str, tuple[int, ...]]:
        """Return config key -> values in all traces, for keys that can be factors because all their values are
        positive.
        """
        return {key: values for key, values in self._values.items() if min(values) > 0}

    def _of_two(self, size: Mapping[int, int]) -> Iterator[str]:
        keys = self._candidates()
        for key, values in keys.items():
            for factor in (2, 3, 4, 8):
                if self._fits(size, [value * factor for value in values]):
                    yield f"{key}*{factor}"
                if self._fits(size, [value // factor if value % factor == 0 else None for value in values]):
                    yield f"{key}/{factor}"
        for (left, first), (right, second) in combinations(keys.items(), 2):
            if self._fits(size, [a * b for a, b in zip(first, second, strict=True)]):
                yield f"{left}*{right}"
            if self._fits(size, [a + b for a, b in zip(first, second, strict=True)]):
                yield f"{left}+{right}"
        for (left, first), (right, second) in permutations(keys.items(), 2):
            if self._fits(size, [a // b if a % b == 0 else None for a, b in zip(first, second, strict=True)]):
                yield f"{left}/{right}"
            if self._fits(size, [a - b for a, b in zip(first, second, strict=True)]):
                yield f"{left}-{right}"

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


INDEX = "_index_"
"""Placeholder for the index (such as the layer's) in a condition, until its axis has a name."""
_OF_LAYERS = re.compile(r"dense|replace|first|step|offset|layer|interval|freq|period|every|start|skip|sparse|pattern")
"""Pattern for config keys whose numbers may determine the kind of a layer. Numbers under different keys are sizes,
which would fit a condition only by chance.
"""
_PERIOD = re.compile(r"period|step|freq|interval")
_KEY_IN_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_NO_KEYS = frozenset({"not", "in", "and", "or", "len", "True", "False", "None", INDEX})
_OF_D_FINE = {"decoder_input_proj.": "(d_model|hidden_size) != decoder_in_channels[-1]"}
COMPARED: Mapping[str, Mapping[str, str]] = {
    "d_fine": _OF_D_FINE,
    "deimv2": _OF_D_FINE,
    "mask2former": {
        "transformer_module.input_projections.": "enforce_input_projection or feature_size != (hidden_dim|hidden_size)"
    },
}
"""Model type -> beginning of tensor names in memory -> condition of these tensors, for projections that transformers
leaves out if two sizes are equal. Tiny configs cannot show this: many of their sizes are equal by chance.
"""
SOMETIMES = "False"
"""Condition of a tensor that only some models have, if no config key determines which models have it."""


@dataclass(frozen=True)
class Presence:
    """The layers (or other indices) at which a tensor exists in one trace."""

    config: Mapping[str, Any]
    """Config of the traced model."""
    count: int
    """Number of possible indices; 0 if the tensor's name has no index."""
    present: frozenset[int]
    """Indices at which the tensor exists; `{0}` for a tensor that exists and has no index."""
    judged: frozenset[int] | None = None
    """Indices at which a condition must be right; None means all indices."""


def condition(presences: Sequence[Presence], hints: Sequence[str] = (), *, careful: bool = False) -> str | None:
    """Return the first statement over config keys that is true exactly at the indices at which a tensor exists.

    Args:
        presences: whether the tensor exists, for each traced config in order.
        hints: words of the tensor's name; statements about config keys that contain these words are tried first.
        careful: whether to return None if more than one statement fits.

    Returns:
        The statement as a formula, with `INDEX` in place of the index; None if no statement fits.
    """
    fitting = [text for text in dict.fromkeys(_candidates(presences)) if all(holds(text, each) for each in presences)]
    fitting.sort(key=lambda text: (-sum(hint in text for hint in hints), *_unlikely(text)))
    return fitting[0] if fitting and not (careful and len(fitting) > 1) else None


def _unlikely(text: str) -> tuple[bool, bool, int]:
    """Return a sort key that sorts unlikely conditions last: conditions that depend on `tie_word_embeddings`, negated
    conditions, and conditions on nested config keys.
    """
    return "tie_word_embeddings" in text, text.startswith("not "), text.count(".")


def negate(text: str) -> str:
    """Return a formula that is true exactly if the given statement is false."""
    inner = text.removeprefix("not ")
    if inner != text and (" " not in inner or inner.startswith("(")):
        return inner
    return f"not ({text})" if " " in text else f"not {text}"


def keys_of(text: str) -> frozenset[str]:
    """Return the config keys that occur in a statement."""
    return frozenset(_KEY_IN_TEXT.findall(re.sub('"[^"]*"', "", text))) - _NO_KEYS


def holds(text: str, presence: Presence) -> bool:
    """Return whether a statement over config keys is true exactly at the indices at which a tensor exists."""
    formula = Formula(text)
    for index in range(presence.count or 1) if presence.judged is None else presence.judged:
        try:
            value = formula(ChainMap({INDEX: index}, dict(presence.config)))
        except TransaxleError:
            return False
        if value is None or bool(value) is not (index in presence.present):
            return False
    return True


def _candidates(presences: Sequence[Presence]) -> Iterator[str]:
    configs = [dict(leaves(each.config)) for each in presences]
    common = [key for key in configs[0] if all(key in config for config in configs)]
    yield from _of_flags(configs, common)
    if not any(each.count for each in presences):
        return
    for period in (key for key in common if _PERIOD.search(key)):
        for offset in (key for key in common if key.startswith(period[:4]) and "offset" in key):
            if all(isinstance(c[period], int) and c[period] > 0 and isinstance(c[offset], int) for c in configs):
                yield from (f"{INDEX} % {period} == {offset}", f"{INDEX} % {period} != {offset}")
    for key in common:
        values = [config[key] for config in configs]
        if all(isinstance(value, list) for value in values):
            yield from _of_lists(key, presences, values)
        elif _OF_LAYERS.search(key) and all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            yield from (f"{INDEX} >= {key}", f"{INDEX} < {key}")
            if all(value > 0 for value in values) and any(v != s.count for v, s in zip(values, presences, strict=True)):
                yield from (f"({INDEX} + 1) % {key} == 0", f"{INDEX} % {key} == 0")
                yield from (f"({INDEX} + 1) % {key} != 0", f"{INDEX} % {key} != 0")
    yield from (f"{INDEX} == 0", f"{INDEX} > 0")


def _of_flags(configs: Sequence[Mapping[str, Any]], common: Sequence[str]) -> Iterator[str]:
    for key in dict.fromkeys(key for config in configs for key in config if key not in common):
        # A config may omit a key if its value is the default.
        if all(isinstance(config.get(key, True), bool) for config in configs):
            yield from (f"({key}|True)", f"({key}|False)", f"not ({key}|True)", f"not ({key}|False)")
    for key in common:
        values = [config[key] for config in configs]
        if all(isinstance(value, bool) for value in values):
            yield from (key, f"not {key}")
        elif len({repr(value) for value in values}) > 1 and all(isinstance(value, str | None) for value in values):
            yield from (f"{key} == {_quote(value)}" for value in values if value is not None)


def _of_lists(key: str, presences: Sequence[Presence], values: Sequence[list[Any]]) -> Iterator[str]:
    if all(len(value) == each.count for value, each in zip(values, presences, strict=True) if each.count):
        kinds = {repr(item): item for value in values for item in value if isinstance(item, str) or item in (0, 1)}
        if all(isinstance(item, bool) for item in kinds.values()):
            yield from (f"{key}[{INDEX}]", f"not {key}[{INDEX}]")
        elif len(kinds) <= 8:  # a longer list contains sizes, not kinds
            yield from (f"{key}[{INDEX}] == {_quote(item)}" for item in kinds.values())
            yield from (f"{key}[{INDEX}] != {_quote(item)}" for item in kinds.values())
    if all(isinstance(item, int) for value in values for item in value) and all(len({*v}) == len(v) for v in values):
        yield from (f"{INDEX} in {key}", f"{INDEX} not in {key}")


def _quote(item: object) -> str:
    return f'"{item}"' if isinstance(item, str) else repr(item)
