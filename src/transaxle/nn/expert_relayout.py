"""Renames and restacks experts in state dicts: N tensors and one stack are two layouts of the same parameter.

One implementation serves the grouped layer, models with such layers, and optimizer state. For files, `transaxle.load`
and the DCP planners use the same implementation (`transaxle.axes.translation.grouped`). This module applies the
translations (renaming and rearranging) that `transaxle.axes` computes to the torch tensors of a state dict.

A quantized parameter is stored as several plain entries, and each entry is stacked or split. No values are computed.
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
from transaxle.axes.translation.grouped import ExpertSet, Regrouping, arrange, regroup, split_number, stack_name
from transaxle.axes.translation.translate import Translation
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.quant.entries import entries, is_quantized
from transaxle.torch_tensors import assemble_boxes, flat, raw_local, same_bytes


@dataclass(frozen=True, slots=True)
class _Whole:
    """A whole tensor, described as one chunk."""

    start: tuple[int, ...]
    """First index of the chunk along each dim."""
    shape: tuple[int, ...]
    """Number of elements along each dim."""
    strides: tuple[int, ...] | None = None
    """Strides of the tensor in elements; None means row-major."""


@dataclass(frozen=True)
class Entry:
    """Dtype and shape of a tensor in a state dict, in the form in which translations of `transaxle.axes` read them."""

    dtype: str
    """Name of the dtype in torch's spelling; translations only compare dtypes."""
    shape: tuple[int, ...]
    """Number of elements along each dim."""

    @cached_property
    def extents(self) -> tuple[_Whole, ...]:
        """The whole tensor, described as one chunk."""
        return (_Whole((0,) * len(self.shape), self.shape),)


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, Entry]:
    """Return tensor name -> dtype and shape, in the form in which translations of `transaxle.axes` read them."""
    return {name: Entry(str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


def move(
    translation: Translation, tensors: Mapping[str, torch.Tensor], targets: Mapping[str, Target] | None = None
) -> dict[str, torch.Tensor]:
    """Apply a translation of tensor names and layouts to tensors, and return the target tensors. Rearranged tensors
    have new memory; unchanged tensors share memory with their sources.

    Args:
        translation: the translation, which `transaxle.axes` computed from names and shapes.
        tensors: source tensor name -> tensor.
        targets: target tensor name -> description, for the tensors to make; None means all targets of the translation.

    Raises:
        Refused: if the translation contains errors; with the code UNEQUAL_COPIES if duplicates that must be equal
            differ; with the code UNSUPPORTED if DTensors would be rearranged other than by stacking and unstacking.
    """
    if translation.refusals:
        raise gathered(translation.refusals)
    copier = Copier(describe(tensors))
    unequal = [check for check in translation.checks if not _agree(check, copier, tensors)]
    if unequal:
        differences = [(check.why, check.second.parts[0].origins[0].name) for check in unequal]
        raise gathered(
            Refusal("UNEQUAL_COPIES", f"{why}\nbut they differ", Where(None, name)) for why, name in differences
        )
    with torch.no_grad():
        return {
            name: _build_target(target, copier, tensors)
            for name, target in (translation.targets if targets is None else targets).items()
        }


def _agree(check: Check, copier: Copier, tensors: Mapping[str, torch.Tensor]) -> bool:
    first, second = (_whole(_build_target(side, copier, tensors)) for side in (check.first, check.second))
    return same_bytes(first, second)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _build_target(target: Target, copier: Copier, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    origins = [origin.name for part in target.parts for origin in part.origins]
    first = tensors[origins[0]]
    if len(origins) == 1 and tuple(first.shape) == target.shape and _is_whole(target, copier):
        return first
    if any(isinstance(tensors[name], DTensor) for name in origins):
        return _stack_dtensors(target, origins, tensors)
    sources = {name: flat(tensors[name]) for name in origins}
    boxes = [(copy.move, sources[copy.source]) for copy in copier.copies(target)]
    return assemble_boxes(target.shape, first.dtype, first.device, boxes)


def _is_whole(target: Target, copier: Copier) -> bool:
    """Return whether a target has a single source with the same elements in the same order."""
    copies = list(copier.copies(target))
    loops = copies[0].move.loops if len(copies) == 1 else ()
    run = not loops or (len(loops) == 1 and loops[0][1:] == (1, 1))
    return len(copies) == 1 and run and not copies[0].move.source_offset and not copies[0].move.target_offset


def _stack_dtensors(target: Target, origins: list[str], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Stack DTensors, or return one slice of a stacked DTensor; torch computes the placements of the result."""
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


def add_prefix(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with a prefix before their names; for optimizer states, before the parameter name inside
    the name.
    """
    prefixed = {}
    for name, tensor in tensors.items():
        parameter, slot = split_slot(name)
        prefixed[join_slot(f"{prefix}{parameter}", slot)] = tensor
    return prefixed


WEIGHT = "weight"
BIAS = "bias"


@dataclass(frozen=True, slots=True)
class Layer:
    """The number of experts of a grouped layer, and the names and shapes that its state dict must have."""

    count: int
    """Number of experts."""
    shapes: Mapping[str, tuple[int, ...]]
    """Kind of parameter (`weight`, `bias`) -> shape of one expert's parameter."""
    single: Mapping[str, bool]
    """Kind of parameter (`weight`, `bias`) -> whether one tensor contains the parameters of all experts."""
    further_buffers: Mapping[str, Mapping[str, tuple[int, ...]]]
    """Kind of parameter -> suffix of each additional buffer of a quantized parameter -> shape of one expert's
    buffer.
    """
    local_experts: range
    """Numbers of this rank's experts. If each expert has its own parameter, the layer has only parameters of these
    experts.
    """


EXTRA_STATE = "_extra_state"
"""State-dict name of the extra state of a TransformerEngine module, which is ignored."""


def remap(state: Mapping[str, Any], prefix: str, layer: Layer) -> dict[str, Any]:
    """Return a state dict in which a layer's parameters have the names and the form (one stack, or N tensors) of the
    layer.

    Args:
        state: a state dict; it is not changed.
        prefix: prefix of the layer's names.
        layer: names and shapes that the layer's state dict must have.

    Returns:
        A new dict. Rearranged tensors have new memory; unchanged tensors are the same objects.

    Raises:
        Refused: with the errors of `transaxle.axes.translation.grouped.Arrangement`; with the code UNEQUAL_COPIES if a
            parameter is stored in two forms that differ.
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
    entries |= move(regroup(changing, describe(sources)), sources)
    return {name: value for name, value in entries.items() if not _elsewhere(name, prefix, layer)}


def stems(shapes: Mapping[str, Shape], prefix: str, layer: Layer) -> tuple[Regrouping, ...]:
    """Return the layer's parameters whose form must change: the state dict has them as N tensors and the layer as a
    stack, or the reverse, or the state dict has both forms.

    Args:
        shapes: tensor name -> shape, for the tensors in the state dict.
        prefix: prefix of the layer's names.
        layer: names and shapes that the layer's state dict must have.

    Raises:
        Refused: with the errors of `transaxle.axes.translation.grouped.Arrangement`.
    """
    return arrange(_groups(prefix, layer), shapes).check()


def _groups(prefix: str, layer: Layer) -> list[ExpertSet]:
    return [
        ExpertSet(f"{prefix}{stem}", suffix, layer.count, shape, layer.single[stem], local_numbers=layer.local_experts)
        for stem, weight_shape in layer.shapes.items()
        for suffix, shape in {"": weight_shape, **layer.further_buffers.get(stem, {})}.items()
    ]


def _unwrap(state: dict[str, Any], prefix: str, layer: Layer) -> None:
    """Replace quantized tensors by the entries for their codes and scales."""
    for name in [name for name, value in state.items() if is_quantized(value) and _is_own(name, prefix, layer)]:
        parameter = state.pop(name)
        state |= {f"{name}{suffix}": entry for suffix, entry in entries(parameter).items()}


def _is_own(name: str, prefix: str, layer: Layer) -> bool:
    """Return whether a name belongs to a parameter of the layer, as one stack or as N tensors."""
    stem = stack_name(name)
    return stem.startswith(prefix) and stem.removeprefix(prefix) in layer.shapes


def _elsewhere(name: str, prefix: str, layer: Layer) -> bool:
    """Return whether a name belongs to an expert that a different rank has."""
    split = split_number(name)
    if split is None or not split.before.startswith(prefix):
        return False
    stem = split.before.removeprefix(prefix)
    return stem in layer.shapes and not layer.single[stem] and split.number not in layer.local_experts


def refuse_codes(state: Mapping[str, Any], prefix: str, parameters: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse quantized codes for parameters that are not quantized, because torch would copy the codes as if they were
    values.

    Args:
        state: a state dict.
        prefix: prefix of the parameters' names in the state dict.
        parameters: parameters of a module, by name.

    Raises:
        Refused: with the code DTYPE_MISMATCH if the state dict has codes for an unquantized parameter.
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
    """Return copies of tensors that share memory with a second tensor, or have overlapping elements (`expand`).

    If torch assigned shared memory to several experts (`assign=True`), updating one expert would change all of them.
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
