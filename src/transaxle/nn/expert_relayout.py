"""Experts renamed and restacked in a state dict: N tensors and one stack are two dialects of one table.

Carry out a translation of `transaxle.axes` on the torch tensors of a state dict.

What a state dict has to hold for a grouped layer: how many experts, of what shapes, under one name or under N.

Rename and restack grouped parameters in state dicts: N tensors and one stack are two dialects of one table.

One implementation for the module, for containers of modules, and for optimizer state; `transaxle.load` and the DCP
planners use the same (`transaxle.axes.translation.grouped`) on what is in
files. Quantized parameters are several plain entries, each of which is stacked or taken apart by itself: no value is
computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from transaxle.axes.layout.bind import join_slot, split_slot
from transaxle.axes.layout.relayout import Check, Copier, Shape, Target
from transaxle.axes.translation.grouped import ExpertSet, Stem, arranged, numbered, regrouped, stack_name
from transaxle.axes.translation.translate import Translation
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.quant.entries import entries, is_quantized
from transaxle.torch_tensors import assemble_boxes, flat, raw_local, same_bytes


@dataclass(frozen=True, slots=True)
class _Whole:
    """The one chunk of a tensor."""

    start: tuple[int, ...]
    """First index along each dim."""
    shape: tuple[int, ...]
    """Elements along each dim."""
    strides: tuple[int, ...] | None = None
    """Row-major."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a state dict, as the tables see it."""

    dtype: str
    """Its type, as torch calls it: a translation only compares types."""
    shape: tuple[int, ...]
    """Elements along each dim."""

    @cached_property
    def extents(self) -> tuple[_Whole, ...]:
        """The tensor in one chunk."""
        return (_Whole((0,) * len(self.shape), self.shape),)


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, Entry]:
    """Return what the tables need to know of tensors."""
    return {name: Entry(str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


def move(
    found: Translation, tensors: Mapping[str, torch.Tensor], targets: Mapping[str, Target] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a translation; none shares memory with those given, unless it is one of them.

    Args:
        found: the translation.
        tensors: what it is of, by name.
        targets: those of its tensors that are wanted; None: all.

    Raises:
        Refused: what stands against the translation; UNEQUAL_COPIES for numbers that had to be equal and are not;
            UNSUPPORTED for a rearrangement of DTensors that is more than putting together and taking apart.
    """
    if found.refusals:
        raise gathered(found.refusals)
    copier = Copier(described(tensors))
    unequal = [check for check in found.checks if not _agree(check, copier, tensors)]
    if unequal:
        told = [(check.why, check.second.parts[0].origins[0].name) for check in unequal]
        raise gathered(Refusal("UNEQUAL_COPIES", f"{why}\nbut they differ", Where(None, name)) for why, name in told)
    with torch.no_grad():
        return {
            name: _made(target, copier, tensors)
            for name, target in (found.targets if targets is None else targets).items()
        }


def _agree(check: Check, copier: Copier, tensors: Mapping[str, torch.Tensor]) -> bool:
    first, second = (_whole(_made(side, copier, tensors)) for side in (check.first, check.second))
    return same_bytes(first, second)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _made(target: Target, copier: Copier, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    origins = [origin.name for part in target.parts for origin in part.origins]
    first = tensors[origins[0]]
    if len(origins) == 1 and tuple(first.shape) == target.shape and _is_whole(target, copier):
        return first
    if any(isinstance(tensors[name], DTensor) for name in origins):
        return _distributed(target, origins, tensors)
    sources = {name: flat(tensors[name]) for name in origins}
    boxes = [(copy.move, sources[copy.source]) for copy in copier.copies(target)]
    return assemble_boxes(target.shape, first.dtype, first.device, boxes)


def _is_whole(target: Target, copier: Copier) -> bool:
    """Tell whether a target is its one source, element by element."""
    copies = list(copier.copies(target))
    loops = copies[0].move.loops if len(copies) == 1 else ()
    run = not loops or (len(loops) == 1 and loops[0][1:] == (1, 1))
    return len(copies) == 1 and run and not copies[0].move.source_offset and not copies[0].move.target_offset


def _distributed(target: Target, origins: list[str], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Stack DTensors, or take one out of a stack: torch keeps their placements right in both."""
    first = tensors[origins[0]]
    if len(target.parts) == 1 and len(origins) > 1 and target.shape == (len(origins), *first.shape):
        return torch.stack([tensors[name] for name in origins])
    if len(origins) == 1 and len(target.index) == 1 and tuple(first.shape[1:]) == target.shape:
        return first[next(iter(target.index.values()))].clone()
    raise refuse(
        "UNSUPPORTED",
        f"{target.rule}\nits sources are DTensors, which can only be stacked or taken out of a stack here",
        tensor=target.name,
        hint="Use transaxle.state_dict_as or transaxle.load, which work out the placements.",
    )


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with a prefix before their names; states of an optimizer have it before their parameters'."""
    found = {}
    for name, tensor in tensors.items():
        parameter, slot = split_slot(name)
        found[join_slot(f"{prefix}{parameter}", slot)] = tensor
    return found


WEIGHT = "weight"
BIAS = "bias"


@dataclass(frozen=True, slots=True)
class Layer:
    """A grouped layer as its state dict sees it."""

    count: int
    """Experts."""
    shapes: Mapping[str, tuple[int, ...]]
    """Stem (`weight`, `bias`) -> shape of one expert's."""
    single: Mapping[str, bool]
    """Stem -> whether all experts are one tensor."""
    beside: Mapping[str, Mapping[str, tuple[int, ...]]]
    """Stem -> what follows it in the names of the other buffers of a quantized parameter -> shape of one expert's."""
    own: range
    """Experts whose parameters are here, where each has its own: not those of other ranks."""


EXTRA_STATE = "_extra_state"
"""Name of what TransformerEngine keeps beside the parameters of a module; nothing in it is needed here."""


def remapped(state: Mapping[str, Any], prefix: str, layer: Layer) -> dict[str, Any]:
    """Return a state dict whose entries have the names and the form (one stack, or N) of a layer's parameters.

    Args:
        state: any state dict; it is left as it is.
        prefix: what stands before the layer's names.
        layer: what it needs.

    Returns:
        A new dict. Tensors that are rearranged have memory of their own; the others are the same objects.

    Raises:
        Refused: see `transaxle.axes.translation.grouped.Arranged`; UNEQUAL_COPIES for two forms of one parameter
            that differ.
    """
    entries = {name: value for name, value in state.items() if name != f"{prefix}{EXTRA_STATE}"}
    _unwrap(entries, prefix, layer)
    shapes = {
        name: tuple(value.shape)
        for name, value in entries.items()
        if name.startswith(prefix) and isinstance(value, torch.Tensor)
    }
    changing = stems(shapes, prefix, layer)
    sources = {name: entries.pop(name) for stem in changing for name in stem.sources}
    entries |= move(regrouped(changing, described(sources)), sources)
    return {name: value for name, value in entries.items() if not _elsewhere(name, prefix, layer)}


def stems(shapes: Mapping[str, Shape], prefix: str, layer: Layer) -> tuple[Stem, ...]:
    """Return which of a layer's parameters are there in another form than its own, or in both.

    Args:
        shapes: what is there.
        prefix: what stands before the layer's names.
        layer: what it needs.

    Raises:
        Refused: see `transaxle.axes.translation.grouped.Arranged`.
    """
    return arranged(_groups(prefix, layer), shapes).checked()


def _groups(prefix: str, layer: Layer) -> list[ExpertSet]:
    return [
        ExpertSet(f"{prefix}{stem}", rest, layer.count, shape, layer.single[stem], own=layer.own)
        for stem, own in layer.shapes.items()
        for rest, shape in {"": own, **layer.beside.get(stem, {})}.items()
    ]


def _unwrap(state: dict[str, Any], prefix: str, layer: Layer) -> None:
    """Put codes and scales in the place of quantized tensors."""
    for name in [name for name, value in state.items() if is_quantized(value) and _is_own(name, prefix, layer)]:
        parameter = state.pop(name)
        state |= {f"{name}{rest}": entry for rest, entry in entries(parameter).items()}


def _is_own(name: str, prefix: str, layer: Layer) -> bool:
    """Tell whether a name is that of a layer's parameter, in either form."""
    stem = stack_name(name)
    return stem.startswith(prefix) and stem.removeprefix(prefix) in layer.shapes


def _elsewhere(name: str, prefix: str, layer: Layer) -> bool:
    """Tell whether a name is that of an expert whose parameters another rank has."""
    split = numbered(name)
    if split is None or not split.before.startswith(prefix):
        return False
    stem = split.before.removeprefix(prefix)
    return stem in layer.shapes and not layer.single[stem] and split.number not in layer.own


def refuse_codes(state: Mapping[str, Any], prefix: str, parameters: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse codes for parameters that are not quantized: torch would copy the codes as if they were values.

    Args:
        state: a state dict.
        prefix: what stands before the parameters' names in it.
        parameters: of a module, by name.

    Raises:
        Refused: DTYPE_MISMATCH.
    """
    problems = []
    for name, parameter in parameters.items():
        entry = state.get(f"{prefix}{name}")
        if parameter is None or is_quantized(parameter) or not isinstance(entry, torch.Tensor):
            continue
        if entry.dtype.itemsize == 1 and parameter.dtype.itemsize > 1:
            message = (
                f"the state dict has codes of {entry.dtype}, but the parameter is {parameter.dtype} and not quantized"
            )
            hint = "Make the layer with recipe= to load codes, or load values with transaxle.load(..., decode=...)."
            problems.append(Refusal("DTYPE_MISMATCH", message, Where(None, f"{prefix}{name}"), hint))
    if problems:
        raise gathered(problems)


def apart(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return copies of those tensors that share memory with another one, or with themselves (`expand`).

    Taken as they are (`assign=True`), experts would change together.
    """
    spans: list[tuple[int, int, str]] = []
    copied: list[str] = []
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.is_meta or not value.numel():
            continue
        local = raw_local(value)
        steps = [(size - 1, stride) for size, stride in zip(local.shape, local.stride(), strict=True) if size > 1]
        size = (sum(most * stride for most, stride in steps) + 1) * local.element_size()
        spans.append((local.data_ptr(), local.data_ptr() + size, name))
        copied += [name] if any(not stride for _, stride in steps) else []
    end = 0
    for start, stop, name in sorted(spans):
        copied += [name] if start < end else []
        end = max(end, stop)
    return {name: state[name].detach().clone(memory_format=torch.contiguous_format) for name in copied}
