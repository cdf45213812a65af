"""Rename and restack grouped parameters in state dicts: N tensors and one stack are two dialects of one table.

One implementation for the module, for containers of modules, and for optimizer state; `transaxle.load` and the DCP
planners use the same (`transaxle.axes.translation.grouped`, `transaxle.axes.translation.grouped`) on what is in
files. Quantized parameters are several plain entries, each of which is stacked or taken apart by itself: no value is
computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from transaxle.axes.layout.solve import Shape
from transaxle.axes.translation.grouped import ExpertSet, Stem, arranged, numbered, regrouped, stack_name
from transaxle.errors import Refusal, Where, gathered
from transaxle.nn.checkpoints.packed_layer import Layer
from transaxle.nn.checkpoints.torch_relayout import described, move
from transaxle.quant.modules.entries import entries, is_quantized
from transaxle.torch_tensors.local_tensor import stored_local

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
        local = stored_local(value)
        steps = [(size - 1, stride) for size, stride in zip(local.shape, local.stride(), strict=True) if size > 1]
        size = (sum(most * stride for most, stride in steps) + 1) * local.element_size()
        spans.append((local.data_ptr(), local.data_ptr() + size, name))
        copied += [name] if any(not stride for _, stride in steps) else []
    end = 0
    for start, stop, name in sorted(spans):
        copied += [name] if start < end else []
        end = max(end, stop)
    return {name: state[name].detach().clone(memory_format=torch.contiguous_format) for name in copied}
