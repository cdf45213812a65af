"""Entries of state dicts: a quantized weight is several plain tensors there, under names of their own.

`weight` holds the codes and `weight_scale_inv` the scales, as DeepSeek-V3 names them; `weight_amax` and the rest follow
the same pattern. Files and checkpoints need to know nothing of quantized tensors, and dtypes in them are the real ones.
Codes are global tensors cut as the parameter is; what stands for tiles of several rows is replicated.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.quant.frame import DATA, STATE, Frame, buffers_of
from transaxle.quant.placed import group_of
from transaxle.quant.quantizers import Quantizer
from transaxle.quant.tensor import QuantizedTensor, from_components

_MADE_OF = "_made_of"
"""Attribute of a class that was given entries: the class without them."""


def entries(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return codes, scales and state of a parameter by the suffix of their names; the codes have none.

    They share its memory: what is written into them, as DCP does when it loads, is in the model.
    """
    inner = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    assert isinstance(inner, QuantizedTensor)
    if inner.device.type != "meta":
        inner.frame.blank = False  # what is written here says nothing to the frame
    found = {}
    for name, buffer in {**inner.components, **inner.state}.items():
        suffix = "" if name == DATA else f"_{name}"
        found[suffix] = buffer
        if isinstance(parameter, DTensor):
            cut = inner.frame.is_cut(name)
            shape = (parameter.shape[0], *buffer.shape[1:]) if cut else tuple(buffer.shape)
            placements = parameter.placements if cut else [Replicate()] * parameter.device_mesh.ndim
            found[suffix] = _entry(buffer, parameter.device_mesh, placements, shape)
    return found


class _Octets(DTensor):
    """An entry of eight bits: it is gathered as bytes, since gloo moves no other type of that size than uint8."""

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """See torch."""
        moved = self._as(torch.uint8).redistribute(*args, **kwargs)
        return _plainly(moved.to_local().view(self.dtype), moved.device_mesh, moved.placements, tuple(self.shape))

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """See torch."""
        return self._as(torch.uint8).full_tensor(grad_placements=grad_placements).view(self.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as what torch knows."""
        return self._as(self.dtype).__reduce_ex__(protocol)

    def _as(self, dtype: torch.dtype) -> DTensor:
        return _plainly(self.to_local().view(dtype), self.device_mesh, self.placements, tuple(self.shape))


def _entry(buffer: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]) -> DTensor:
    made = _plainly(buffer, mesh, placements, shape)
    if buffer.dtype.itemsize > 1 or buffer.dtype == torch.uint8:
        return made
    octets: DTensor = _Octets(made._local_tensor, made._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return octets


def _plainly(
    buffer: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]
) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(buffer, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


class QuantizedEntries(nn.Module):
    """What a module with quantized parameters does with state dicts; mixed into its class."""

    def __getattr__(self, name: str) -> Any:
        """Resolve the names of entries, as torch's `get_model_state_dict` needs."""
        for own, weight in self.__dict__.get("_parameters", {}).items():
            if name.startswith(f"{own}_") and is_quantized(weight):
                found = entries(weight).get(name.removeprefix(own))
                if found is not None:
                    return found
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the class that this was made of, which has a name."""
        kind = vars(type(self)).get(_MADE_OF)
        return super().__reduce_ex__(protocol) if kind is None else (_remade, (kind,), vars(self))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for own, weight in self._parameters.items():
            if is_quantized(weight):
                destination.update({f"{prefix}{own}{suffix}": entry for suffix, entry in entries(weight).items()})

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
        rest, done = dict(state_dict), set()
        for own, weight in list(self._parameters.items()):
            key = f"{prefix}{own}"
            if is_quantized(weight) and key in rest:
                suffixes = [suffix for suffix in layout_of(weight) if f"{key}{suffix}" in rest]
                given = {suffix: rest.pop(f"{key}{suffix}") for suffix in suffixes}
                made = _loaded(key, weight, given)
                if local_metadata.get("assign_to_params_buffers", False):
                    self._parameters[own] = nn.Parameter(made, requires_grad=weight.requires_grad)
                else:
                    _write(key, weight, made)
                done.add(key)
        absent: list[str] = []
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, absent, unexpected_keys, error_msgs)
        missing_keys += [name for name in absent if name not in done]


def give_entries(module: nn.Module) -> None:
    """Make the state dicts of a module hold plain entries for its quantized parameters."""
    if not isinstance(module, QuantizedEntries):
        kind: Any = type(module)
        module.__class__ = _with_entries(kind)


@cache
def _with_entries(kind: Any) -> Any:
    own = {"__module__": kind.__module__, "__doc__": kind.__doc__, _MADE_OF: kind}
    return type(kind.__name__, (QuantizedEntries, kind), own)


def _remade(kind: Any) -> nn.Module:
    made: nn.Module = object.__new__(_with_entries(kind))
    return made


def is_quantized(parameter: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether a parameter, or what this rank has of it, is a QuantizedTensor."""
    inner = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return isinstance(inner, QuantizedTensor)


def _local(parameter: torch.Tensor) -> QuantizedTensor:
    inner = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    assert isinstance(inner, QuantizedTensor)
    return inner


def layout_of(parameter: torch.Tensor) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return type and whole shape of each entry that a quantized parameter has, by suffix."""
    wanted = buffers_of(_local(parameter).quantizer, tuple(parameter.shape))
    return {"" if name == DATA else f"_{name}": found for name, found in wanted.items()}


def is_state(suffix: str) -> bool:
    """Whether an entry says how the next values are scaled, and nothing of these."""
    return suffix.removeprefix("_") in STATE


@torch.no_grad()
def put_values(parameter: torch.Tensor, values: torch.Tensor) -> int:
    """Quantize this rank's rows of a matrix into a parameter as if nothing had been there. Collective.

    Args:
        parameter: a QuantizedTensor, or a DTensor of one.
        values: as many rows as this rank has.

    Returns:
        Bytes written: of codes, scales and state.
    """
    inner = _local(parameter)
    made = _anew(parameter, values)
    inner.adopt(made.frame, made.skip, made.height)
    return sum(buffer.nbytes for buffer in {**inner.components, **inner.state}.values())


def _anew(weight: torch.Tensor, values: torch.Tensor) -> QuantizedTensor:
    inner = _local(weight)
    return inner.quantizer.quantize(
        values.to(inner.dtype), group=group_of(weight), start=_start(inner), whole=weight.shape[0]
    )


def _loaded(key: str, weight: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Return this rank's rows of a weight, of entries that may be cut in another way or not be quantized."""
    inner = _local(weight)
    frame, codes = inner.frame, given[""]
    wanted = buffers_of(frame.quantizer, tuple(weight.shape))
    if codes.dtype.is_floating_point and codes.dtype.itemsize > 1:
        return _quantized(key, weight, codes)
    faults = _faults(key, frame.quantizer, wanted, given)
    if faults:
        raise gathered(faults)
    buffers = {}
    for name in wanted:
        suffix = "" if name == DATA else f"_{name}"
        if suffix in given:
            buffers[name] = _part(given[suffix], weight, inner, cut=frame.is_cut(name))
    shape = (inner.height, *frame.row)
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
    return _anew(weight, _part(values, weight, inner, cut=True))


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
