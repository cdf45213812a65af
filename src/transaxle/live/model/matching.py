"""Matching: a model's tensors against those of a source, by name; every difference is found before anything moves."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from difflib import get_close_matches

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.translation.grouped import arranged, groups
from transaxle.engine.checkpoint.checkpoint import StoredTensor
from transaxle.errors import Refusal, Where
from transaxle.live.derived.derived import EXTRA_STATE
from transaxle.live.model.destination import decode_hint, may_become
from transaxle.live.sharding.global_tensors import Census

_COMPARED, _LIKE = 8, 0.6
"""Names for which the closest one is looked for, and how alike the two must be."""
_UNKNOWN_ROWS = "Nothing says which rows are padding: give config= with the vocab_size."
_OTHER_SIZES = "Build the model with the sizes that the source has."


def compared(
    everything: Census,
    stored: Mapping[str, StoredTensor],
    optimizer: bool,
    decode: str | None = None,
    sizes: Callable[[], str] = str,
    dtype: str | None = None,
    encoded: Container[str] = (),
    rows: object = None,
) -> tuple[list[Refusal], tuple[str, ...], tuple[str, ...]]:
    """Hold the model's tensors against the source's; return what differs, and the names that only one of them has.

    Another number of experts, or a part of them, differs; such names are not among those that one side lacks.

    Args:
        everything: the model's.
        stored: the source's, by the model's names.
        optimizer: whether state that only the source has counts.
        decode: type of parameters that take encoded tensors, decoded.
        sizes: tells how the configs of the two differ, "" where they do not; asked where a shape differs.
        dtype: type of parameters that take plain numbers of other types, cast.
        encoded: names, as tables have them, of what is decoded.
        rows: the source's size of the vocabulary, where it is known: further rows are padding.
    """
    there = {name: source.shape for name, source in stored.items()}
    experts = arranged(groups({name: tensor.shape for name, tensor in everything.items()}, there), there)
    missing = tuple(name for name in everything if name not in stored and name not in experts.broken)
    others = (name for name in stored if name not in everything and name not in experts.broken)
    others = (name for name in others if stored[name].origins)  # of what is zeros anyway, a model may have none
    unexpected = tuple(name for name in others if optimizer or split_slot(name)[1] == WEIGHT)
    problems = list(experts.problems)
    for name, tensor in everything.items():
        source = stored.get(name)
        if source is None or name in experts.broken:
            continue
        if not tensor.takes(source.shape, rows):
            message = f"its shape is {list(tensor.shape)} in the model, but {list(source.shape)} in the source"
            hint = _UNKNOWN_ROWS if rows is None and tensor.takes(source.shape, tensor.shape[0]) else sizes()
            problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name), hint or _OTHER_SIZES))
            continue
        codes = any(origin in encoded for origin in source.origins)
        to = decode if codes else dtype
        if source.dtype != tensor.dtype and source.origins and not may_become(source.dtype, tensor.dtype, to):
            message = f"its dtype is {tensor.dtype} in the model, but {source.dtype} in the source"
            hint = decode_hint(source.dtype, tensor.dtype, decode)
            problems.append(Refusal("DTYPE_MISMATCH", message, Where(None, name), hint))
    return problems, missing, unexpected


def unmatched(missing: Sequence[str], unexpected: Sequence[str], source: Iterable[str] = ()) -> list[Refusal]:
    """Return a refusal for every name that only one side has, with the closest name of the other side.

    Args:
        missing: names that only the model has.
        unexpected: names that only the source has, as the model would name them. The extra state of a module that
            keeps none is told of in the report, and no reason to refuse.
        source: those names of the source, as it names them, that are no names of the model.
    """
    rest = "Use strict=False to load the others."
    near = _closest(missing, (*unexpected, *source), "the source")
    lacking = [
        Refusal("MISSING_TENSOR", "the source has no tensor for it", Where(None, n), near.get(n, "") + rest)
        for n in missing
    ]
    near = _closest(unexpected, missing, "the model")
    return lacking + [
        Refusal("UNEXPECTED_TENSOR", "the model has no such tensor", Where(None, n), near.get(n, "") + rest)
        for n in unexpected
        if n.rpartition(".")[2] != EXTRA_STATE
    ]


def _closest(names: Sequence[str], others: Iterable[str], side: str) -> dict[str, str]:
    """Return for the first names what the other side has instead; names with the same end are preferred."""
    by_end: dict[str, list[str]] = {}
    for other in dict.fromkeys(others):
        by_end.setdefault(other.rpartition(".")[2], []).append(other)
    hints = {}
    for name in names[:_COMPARED]:
        near = get_close_matches(name, by_end.get(name.rpartition(".")[2], ()), 1, _LIKE)
        if near:
            hints[name] = f"The closest name in {side} is {near[0]}. "
    return hints


def left_out(names: Iterable[str]) -> list[Refusal]:
    """Return a refusal for each parameter and buffer that a state dict leaves out, and a load with it."""
    message = "its module leaves it out of state_dict, so load_state_dict cannot set it"
    return [
        Refusal("MISSING_TENSOR", message, Where(None, n), "Use strict=False to leave it unchanged.") for n in names
    ]
