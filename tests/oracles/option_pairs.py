"""A covering array over the options of `convert`: in some row, every two values that may meet do.

Two options that work alone can be wrong together, and nobody lists all pairs by hand. Here each option is a factor with
a few values. Pairs that a conversion refuses are clashes: they have rows of their own, so that one refusal does not
hide what the rest of a row would have done.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import NamedTuple

Row = Mapping[str, str]
"""Factor -> value."""
Setting = tuple[str, str]
"""A factor and one of its values."""
Pair = frozenset[Setting]

INTERFACE, FAMILY, SOURCE, TO, CHANGE = "interface", "family", "source", "to", "change"
NONE = "-"
"""The option is not given."""
PLAIN_CHANGES = ("dtype=bf16", "dtype=fp16", "dtype=fp32")
ENCODINGS = ("encode=float8_block", "encode=mxfp8", "encode=nvfp4")
DECODINGS = ("decode=bf16", "decode=fp32")
TRAINED = ("dcp trained", "zero", "replicas", "universal")
"""Sources with the state of an optimizer."""
DEEPSPEED = ("zero", "replicas", "universal")
MEGATRON_RUNS = ("torch_dist", "ranks")
"""Sources that may have replicas and several kinds of weights, and here have neither."""
FP8 = "fp8"
WITH_RANKS = ("megatron_torch", "torch_dist")
"""Targets that depend on the ranks of a job."""

FACTORS: dict[str, tuple[str, ...]] = {
    FAMILY: ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "gemma3", "deepseek_v3"),
    SOURCE: (
        "hf", "shards", "transformers", "bin", "pt", "dcp titan", "megatron", "torch_dist", "ranks", FP8, *TRAINED,
    ),
    TO: (
        "hf", "safetensors", "safetensors:transformers", "megatron", "safetensors:te", "automodel", "vllm", "one file",
        "torch:hf", "pt", "dcp", "dcp:torchtitan", "torch_dist", "megatron_torch", "deepspeed-universal:hf",
    ),
    CHANGE: (NONE, *PLAIN_CHANGES, *ENCODINGS, *DECODINGS, "merge"),
    INTERFACE: ("python", "command line"),
    "chosen": (NONE, "only", "skip", "only and skip"),
    "shard_size": (NONE, "20KB"),
    "memory": (NONE, "1MB"),
    "jobs": (NONE, "1", "3"),
    "strict": (NONE, "yes"),
    "allow_lossy": (NONE, "yes"),
    "optimizer": (NONE, "yes", "no"),
    "weights": (NONE, "fp32", "lp"),
    "average": (NONE, "yes"),
    "tp": (NONE, "2"),
    "pp": (NONE, "2"),
    "ep": (NONE, "2"),
    "make_vocab_size_divisible_by": (NONE, "4"),
    "resume": (NONE, "new", "again"),
    "overwrite": (NONE, "yes", "everything"),
    "sync": (NONE, "no"),
    "verify": (NONE, "yes"),
    "report": (NONE, "yes"),
    "on": (NONE, "a pool", "a pool, items=3"),
    "config": (NONE, "path", "mapping"),
    "axes": (NONE, "given"),
    "named family": (NONE, "yes"),
    "named dialect": (NONE, "yes"),
    "named format": (NONE, "yes"),
    "rules": (NONE, "of another family"),
}  # fmt: skip


class Clash(NamedTuple):
    """Values of one factor that do not go with values of another."""

    first: str
    values: Sequence[str]
    second: str
    others: Sequence[str]
    expressible: bool = True
    """Whether a conversion can be asked for that has both."""

    def pairs(self) -> Iterator[Pair]:
        for value, other in product(self.values, self.others):
            yield frozenset({(self.first, value), (self.second, other)})


def others(factor: str, *values: str) -> tuple[str, ...]:
    """Every value of a factor but these."""
    return tuple(value for value in FACTORS[factor] if value not in values)


def clashing(clashes: Sequence[Clash], factors: Mapping[str, Sequence[str]] = FACTORS) -> frozenset[Pair]:
    """The pairs that have no place in a covering array: these, and those that leave no value to another factor."""
    collected = {pair for clash in clashes for pair in clash.pairs()}
    while implied := {
        pair for pair in allowed(factors, frozenset(collected)) if _leaves_none(pair, factors, collected)
    }:
        collected |= implied
    return frozenset(collected)


def _leaves_none(pair: Pair, factors: Mapping[str, Sequence[str]], excluded: set[Pair]) -> bool:
    taken = {factor for factor, _ in pair}
    return any(
        all(any(frozenset({(factor, value), one}) in excluded for one in pair) for value in values)
        for factor, values in factors.items()
        if factor not in taken
    )


def covering(factors: Mapping[str, Sequence[str]], excluded: frozenset[Pair], seed: int) -> list[dict[str, str]]:
    """Rows that have every pair which is not excluded, and no excluded one; the same for the same seed.

    Raises ValueError where each way to complete a pair has an excluded one.
    """
    order = random.Random(seed)
    missing = dict.fromkeys(allowed(factors, excluded))
    rows: list[dict[str, str]] = []
    while missing:
        pair = next(iter(missing)) if len(rows) % 2 else order.choice(list(missing))
        completed = (_complete(pair, factors, excluded, missing, order) for _ in range(200))
        row = next((row for row in completed if row is not None), None)
        if row is None:
            raise ValueError(f"no row can have {sorted(pair)}")
        rows.append(row)
        for done in pairs_of(row):
            missing.pop(done, None)
    return rows


def allowed(factors: Mapping[str, Sequence[str]], excluded: frozenset[Pair]) -> list[Pair]:
    """Every pair of values of two factors that is not excluded."""
    return [
        pair
        for one, two in combinations(factors, 2)
        for value, other in product(factors[one], factors[two])
        if (pair := frozenset({(one, value), (two, other)})) not in excluded
    ]


def pairs_of(row: Row) -> Iterator[Pair]:
    """The pairs that a row has."""
    return (frozenset(two) for two in combinations(row.items(), 2))


def _complete(
    pair: Pair,
    factors: Mapping[str, Sequence[str]],
    excluded: frozenset[Pair],
    missing: Mapping[Pair, None],
    order: random.Random,
) -> dict[str, str] | None:
    """A row with this pair, its other values those that have most missing pairs; None where no value fits."""
    row = dict(sorted(pair))
    rest = [factor for factor in factors if factor not in row]
    order.shuffle(rest)
    for factor in rest:
        best: list[str] = []
        most = -1
        for value in factors[factor]:
            new = [frozenset({(factor, value), other}) for other in row.items()]
            count = sum(two in missing for two in new)
            if count >= most and excluded.isdisjoint(new):
                best, most = ([*best, value] if count == most else [value]), count
        if not best:
            return None
        row[factor] = order.choice(best)
    return {factor: row[factor] for factor in factors}


_DENSE = ("llama", "qwen2", "qwen3")
_ANY_MEGATRON = ("phi3", "gemma3")
CLASHES: tuple[Clash, ...] = (
    # There is no oracle, or no such program.
    Clash(FAMILY, _ANY_MEGATRON, SOURCE, ("megatron", "torch_dist", "ranks"), expressible=False),
    Clash(FAMILY, _ANY_MEGATRON, TO, ("megatron", "safetensors:te", *WITH_RANKS), expressible=False),
    Clash(FAMILY, ("qwen2", "mixtral", "phi3", "gemma3"), SOURCE, ("dcp titan",), expressible=False),
    Clash(FAMILY, ("qwen2", "mixtral", "phi3", "gemma3"), TO, ("dcp:torchtitan",), expressible=False),
    Clash(FAMILY, ("mixtral", "phi3", "gemma3"), TO, ("automodel",), expressible=False),
    Clash(FAMILY, ("mixtral", "phi3", "gemma3", "deepseek_v3"), TO, ("vllm",), expressible=False),
    Clash(FAMILY, others(FAMILY, "llama", "qwen3_moe"), SOURCE, (FP8,), expressible=False),
    Clash(FAMILY, others(FAMILY, *_DENSE), SOURCE, ("replicas",), expressible=False),
    Clash(TO, ("megatron_torch",), CHANGE, ("encode=nvfp4",), expressible=False),
    # The command line has no word for it.
    Clash(INTERFACE, ("command line",), "on", ("a pool", "a pool, items=3"), expressible=False),
    Clash(INTERFACE, ("command line",), "config", ("mapping",), expressible=False),
    # Refused.
    Clash(SOURCE, others(SOURCE, *DEEPSPEED), "weights", ("fp32",)),
    Clash(SOURCE, others(SOURCE, *DEEPSPEED, *MEGATRON_RUNS), "weights", ("lp",)),
    Clash(SOURCE, others(SOURCE, *DEEPSPEED, *MEGATRON_RUNS), "average", ("yes",)),
    Clash(SOURCE, ("replicas",), "average", (NONE,)),
    Clash(SOURCE, others(SOURCE, *TRAINED), "optimizer", ("yes",)),
    Clash(SOURCE, others(SOURCE, FP8), CHANGE, DECODINGS),
    Clash(SOURCE, (FP8,), CHANGE, ("merge", *ENCODINGS)),
    Clash(CHANGE, (NONE, "merge"), "chosen", others("chosen", NONE)),
    Clash(TO, others(TO, *WITH_RANKS), "tp", ("2",)),
    Clash(TO, others(TO, "megatron_torch"), "pp", ("2",)),
    Clash(TO, others(TO, "megatron_torch"), "ep", ("2",)),
    Clash(TO, others(TO, *WITH_RANKS), "make_vocab_size_divisible_by", ("4",)),
    Clash(FAMILY, _DENSE, "ep", ("2",)),
)
"""What is left out of the arrays."""


def clashing_rows(clashes: Sequence[Clash]) -> list[dict[str, str]]:
    """A row for each pair that can be asked for and is left out, with the first value that goes with both elsewhere."""
    excluded = clashing(clashes)
    collected = []
    for clash in clashes:
        if not clash.expressible:
            continue
        for pair in clash.pairs():
            row = dict(sorted(pair))
            for factor, values in FACTORS.items():
                if factor not in row:
                    fits = (v for v in values if excluded.isdisjoint(frozenset({(factor, v), o}) for o in row.items()))
                    row[factor] = next(fits, values[0])
            collected.append({factor: row[factor] for factor in FACTORS})
    return collected
