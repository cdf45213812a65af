"""Entries of state dicts: a quantized weight is several plain tensors there, under names of their own.

`weight` holds the codes and `weight_scale_inv` the scales, as DeepSeek-V3 names them; `weight_amax` and the rest follow
the same pattern. Files and checkpoints need to know nothing of quantized tensors, and dtypes in them are the real ones.
Codes are global tensors cut as the parameter is; what stands for tiles of several rows is replicated.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.quant.frame import DATA, Frame, buffers_of, is_cut
from transaxle.quant.masters import group_of
from transaxle.quant.quantizers import Quantizer
from transaxle.quant.tensor import QuantizedTensor, from_components

WEIGHT = "weight"
"""The parameter that is quantized."""


def entries(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return codes, scales and state of a parameter by the suffix of their names; the codes have none.

    They share its memory: what is written into them, as DCP does when it loads, is in the model.
    """
    inner = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    assert isinstance(inner, QuantizedTensor)
    found = {}
    for name, buffer in {**inner.components, **inner.state}.items():
        suffix = "" if name == DATA else f"_{name}"
        found[suffix] = buffer
        if isinstance(parameter, DTensor):
            cut = is_cut(inner.frame.encoding, name)
            shape = (parameter.shape[0], *buffer.shape[1:]) if cut else tuple(buffer.shape)
            found[suffix] = DTensor.from_local(
                buffer,
                parameter.device_mesh,
                parameter.placements if cut else [Replicate()] * parameter.device_mesh.ndim,
                run_check=False,
                shape=torch.Size(shape),
                stride=torch.empty(shape, device="meta").stride(),
            )
    return found


class QuantizedEntries(nn.Module):
    """What a module with a quantized weight does with state dicts; mixed into its class."""

    def __getattr__(self, name: str) -> Any:
        """Resolve the names of entries, as torch's `get_model_state_dict` needs."""
        if name.startswith(f"{WEIGHT}_"):
            weight = self._parameters.get(WEIGHT)
            found = entries(weight).get(name.removeprefix(WEIGHT)) if is_quantized(weight) else None
            if found is not None:
                return found
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = self._parameters.get(WEIGHT)
        if is_quantized(weight):
            destination.update({f"{prefix}{WEIGHT}{suffix}": entry for suffix, entry in entries(weight).items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        weight, rest = self._parameters.get(WEIGHT), dict(state_dict)
        key = f"{prefix}{WEIGHT}"
        if is_quantized(weight) and key in rest:
            suffixes = [suffix for suffix in _suffixes(weight) if f"{key}{suffix}" in rest]
            given = {suffix: rest.pop(f"{key}{suffix}") for suffix in suffixes}
            made = _loaded(key, weight, given)
            if local_metadata.get("assign_to_params_buffers", False):
                self._parameters[WEIGHT] = nn.Parameter(made, requires_grad=weight.requires_grad)
            else:
                _write(key, weight, made)
        absent: list[str] = []
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs)
        missing_keys += [name for name in absent if name != key or key not in state_dict]


def give_entries(module: nn.Module) -> None:
    """Make the state dicts of a module hold plain entries for its quantized weight."""
    if not isinstance(module, QuantizedEntries):
        kind: Any = type(module)
        module.__class__ = _with_entries(kind)


@cache
def _with_entries(kind: Any) -> Any:
    return type(kind.__name__, (QuantizedEntries, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def is_quantized(parameter: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether a parameter, or what this rank has of it, is a QuantizedTensor."""
    inner = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return isinstance(inner, QuantizedTensor)


def _local(parameter: torch.Tensor) -> QuantizedTensor:
    inner = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    assert isinstance(inner, QuantizedTensor)
    return inner


def _suffixes(parameter: torch.Tensor) -> list[str]:
    quantizer, columns = _local(parameter).quantizer, _local(parameter).frame.columns
    wanted = buffers_of(quantizer, (parameter.shape[0], columns))
    return ["" if name == DATA else f"_{name}" for name in wanted]


def _loaded(key: str, weight: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Return this rank's rows of a weight, of entries that may be cut in another way or not be quantized."""
    inner = _local(weight)
    frame, codes = inner.frame, given[""]
    wanted = buffers_of(frame.quantizer, (weight.shape[0], frame.columns))
    if codes.dtype.is_floating_point and codes.dtype.itemsize > 1:
        return _quantized(key, weight, codes)
    faults = _faults(key, frame.quantizer, wanted, given)
    if faults:
        raise gathered(faults)
    buffers = {}
    for name in wanted:
        suffix = "" if name == DATA else f"_{name}"
        if suffix in given:
            buffers[name] = _part(given[suffix], weight, inner, cut=is_cut(frame.encoding, name))
    shape = (inner.height, frame.columns)
    return from_components(frame.quantizer, buffers, shape, inner.dtype, start=_start(inner), whole=weight.shape[0])


def _start(inner: QuantizedTensor) -> int:
    return inner.frame.start + inner.skip


def _faults(key: str, quantizer: Quantizer, wanted: dict[str, Any], given: dict[str, Any]) -> list[Refusal]:
    """Everything about entries that is not as this quantizer makes it."""
    faults = []
    for name, (dtype, shape) in wanted.items():
        full = key if name == DATA else f"{key}_{name}"
        entry = given.get("" if name == DATA else f"_{name}")
        if entry is None:
            if name not in quantizer.state_sizes:
                faults.append(Refusal("MISSING_TENSOR", f"{quantizer} needs it", Where(tensor=full)))
        elif entry.dtype != dtype:
            hint = "load it into a model in that encoding, or convert the checkpoint with --decode and --encode"
            faults.append(
                Refusal("DTYPE_MISMATCH", f"{entry.dtype}, expected {dtype}: {quantizer}", Where(tensor=full), hint)
            )
        elif tuple(entry.shape) != shape:
            faults.append(Refusal("SHAPE_MISMATCH", f"{list(entry.shape)}, expected {list(shape)}", Where(tensor=full)))
    return faults


def _part(entry: torch.Tensor, weight: torch.Tensor, inner: QuantizedTensor, *, cut: bool) -> torch.Tensor:
    """Return what this rank has of an entry: rows of one that is cut, all of another."""
    whole = entry
    if isinstance(entry, DTensor):
        same = isinstance(weight, DTensor) and entry.device_mesh == weight.device_mesh
        cuts = weight.placements if isinstance(weight, DTensor) else ()
        if same and entry.placements == (cuts if cut else (Replicate(),) * entry.device_mesh.ndim):
            return entry.to_local()
        whole = _full(entry)
    start = _start(inner)
    return (whole[start : start + inner.height] if cut else whole).to(entry.device if inner.is_meta else inner.device)


def _full(entry: DTensor) -> torch.Tensor:
    """Gather an entry; as bytes, since gloo moves no other type of eight bits than uint8."""
    if entry.dtype.itemsize > 1:
        return entry.full_tensor()
    raw = cast(DTensor, entry.view(torch.uint8))
    return raw.full_tensor().view(entry.dtype)


def _quantized(key: str, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Quantize values from a checkpoint that is not quantized."""
    inner = _local(weight)
    if tuple(values.shape) != tuple(weight.shape):
        raise refuse("SHAPE_MISMATCH", f"{list(values.shape)}, expected {list(weight.shape)}", tensor=key)
    warnings.warn(f"{key}: {values.dtype} values are quantized once, by {inner.quantizer}", stacklevel=2)
    own = _part(values, weight, inner, cut=True)
    return inner.quantizer.quantize(
        own.to(inner.dtype), group=group_of(weight), start=_start(inner), whole=weight.shape[0]
    )


def _write(key: str, weight: torch.Tensor, made: torch.Tensor) -> None:
    """Copy codes and scales into a parameter.

    Raises:
        Refused: UNSUPPORTED for one on the meta device, which holds nothing.
    """
    inner = _local(weight)
    if inner.device.type == "meta":
        raise refuse(
            "UNSUPPORTED", "the parameter is on the meta device", tensor=key, hint="to_empty(), or assign=True"
        )
    assert isinstance(made, QuantizedTensor)
    source: Frame = made.frame
    inner.adopt(source, made.skip, made.height)
