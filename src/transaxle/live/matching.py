"""Matching: a model's tensors against those of a source, by name; every difference is found before anything moves."""

from __future__ import annotations

from collections.abc import Mapping

from transaxle.axes.bind import WEIGHT, split_slot
from transaxle.engine.checkpoint import StoredTensor
from transaxle.errors import Refusal, Where
from transaxle.live.census import Census
from transaxle.live.convert import decode_hint, may_become


def compared(
    everything: Census, stored: Mapping[str, StoredTensor], optimizer: bool, decode: str | None = None
) -> tuple[list[Refusal], tuple[str, ...], tuple[str, ...]]:
    """Hold the model's tensors against the source's; return what differs, and the names that only one of them has.

    Args:
        everything: the model's.
        stored: the source's, by the model's names.
        optimizer: whether state that only the source has counts.
        decode: type of parameters that other floating-point types may be converted to.
    """
    missing = tuple(name for name in everything if name not in stored)
    unexpected = tuple(n for n in stored if n not in everything and (optimizer or split_slot(n)[1] == WEIGHT))
    problems = []
    for name, tensor in everything.items():
        source = stored.get(name)
        if source is None:
            continue
        if source.shape != tensor.shape:
            message = f"the model's is {list(tensor.shape)}, the source's {list(source.shape)}"
            problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name)))
        elif source.dtype != tensor.dtype and not may_become(source.dtype, tensor.dtype, decode):
            message = f"the model's is {tensor.dtype}, the source's {source.dtype}"
            hint = decode_hint(source.dtype, tensor.dtype)
            problems.append(Refusal("DTYPE_MISMATCH", message, Where(None, name), hint))
    return problems, missing, unexpected


def unmatched(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> list[Refusal]:
    """Return a refusal for every name that only one side has."""
    hint = "strict=False loads the others"
    lacking = [Refusal("MISSING_TENSOR", "the source has nothing for it", Where(None, n), hint) for n in missing]
    extra = [Refusal("UNEXPECTED_TENSOR", "the model has no such tensor", Where(None, n), hint) for n in unexpected]
    return lacking + extra
