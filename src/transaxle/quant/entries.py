"""State dicts of quantized modules: a quantized weight is saved as several plain tensors, each under its own name.

The entry `weight` contains the codes and `weight_scale_inv` the scales, as in DeepSeek-V3; `weight_amax` and further
names follow this pattern. Checkpoint files contain only plain tensors of standard dtypes. Codes are global tensors cut
like the parameter; buffers whose elements belong to several rows are replicated.

This module also determines how a quantized parameter is placed on its mesh, and which ranks share the parameter's
matrix.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from transaxle.axes.geometry import Intervals
from transaxle.encodings.encoding import NVFP4
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.quant.frame import Frame, fresh, put_state, reset_calls
from transaxle.quant.quantizers import AMAX, DATA, ORIGIN, ROUNDING, SCALE, STATE, Quantizer, buffers_of
from transaxle.quant.tensor import QuantizedTensor, from_components, make_quantized
from transaxle.quant.tp_share import Band, Share
from transaxle.torch_tensors import TO_LOCAL, as_dtensor, local_of, place_like, raw_local


def share_of(parameter: torch.Tensor) -> Share | None:
    """Return this rank's tensor-parallel share of a quantized parameter; None if tensor parallelism has not cut it."""
    inner = raw_local(parameter)
    assert isinstance(inner, QuantizedTensor)
    return inner.frame.share


def cut_along(parameter: DTensor) -> int | None:
    """Return the mesh dim along which tensor parallelism has cut a quantized parameter; None if the parameter's
    placements do not describe such a cut.
    """
    share = share_of(parameter)
    return None if share is None or tuple(parameter.shape) != share.shape else share.place_in(parameter.device_mesh)


def band_of(parameter: torch.Tensor) -> Band | None:
    """Return this rank's band (range of columns) of a quantized parameter; None if the rank has whole rows or
    matrices.
    """
    inner = raw_local(parameter)
    assert isinstance(inner, QuantizedTensor)
    return inner.frame.band


def group_of(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the ranks over which FSDP2 has divided this rank's copy of a parameter; None if FSDP2 has not divided it.

    Tensor-parallel ranks are not included; the frame's field `share` contains the tensor-parallel ranks.
    """
    if not isinstance(parameter, DTensor):
        return None
    tp_dim = cut_along(parameter)
    cut_dims = [n for n, placement in enumerate(parameter.placements) if not placement.is_replicate() and n != tp_dim]
    if not cut_dims:
        return None
    placement, band = parameter.placements[cut_dims[0]], band_of(parameter)
    along = 0 if band is None else band.dim
    if band is None and parameter.device_mesh.size(cut_dims[0]) == 1:
        return None
    if len(cut_dims) > 1 or not isinstance(placement, Shard | _StridedShard) or placement.dim != along:
        raise refuse(
            "UNSUPPORTED",
            f"a quantized parameter cannot have the placements {parameter.placements}",
            hint="Cut it with fully_shard, over one mesh dim.",
        )
    return parameter.device_mesh.get_group(cut_dims[0])


ASSIGN = "assign_to_params_buffers"
"""Metadata key by which torch tells a module to use the loaded tensors themselves as parameters (`assign=True`)."""
STATE_SUFFIXES = tuple(f"_{name}" for name in STATE)
"""Name suffixes of the entries that are state for scaling or rounding the next values."""
_ORIGINAL = "_made_of"
"""Attribute of a class that `give_entries` created: the original class."""


def entries(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return name suffix -> tensor, for the codes, scales and state of a parameter; the suffix of the codes is empty.

    The entries share the parameter's memory: writing into them, as DCP does when it loads, changes the model.
    """
    inner = _local(parameter)
    if inner.device.type != "meta":
        inner.frame.blank = False  # later writes into the entries are not noticed
    by_suffix = {}
    for name, buffer in {**inner.components, **inner.state}.items():
        suffix = suffix_of(name, inner.quantizer)
        by_suffix[suffix] = buffer
        if isinstance(parameter, DTensor):
            placements, shape = _buffer_placement(parameter, inner, name, tuple(buffer.shape))
            by_suffix[suffix] = _entry(buffer, parameter.device_mesh, placements, shape)
    return by_suffix


def parts_of(parameter: torch.Tensor) -> dict[str, tuple[tuple[int, ...], tuple[Intervals, ...]]]:
    """Return, for each entry of a parameter that no DTensor can describe, which part of a whole tensor the entry is.

    Args:
        parameter: this rank's shard, cut by tensor parallelism in a way that no DTensor can describe; FSDP2 may have
            cut the shard again.

    Returns:
        Name suffix -> (shape of the whole entry, for each dim the indices that the tensor-parallel rank has).
    """
    inner, share = _local(parameter), share_of(parameter)
    assert share is not None
    return {
        suffix_of(name, inner.quantizer): (share.whole_of(inner.quantizer, name), share.holds(inner.quantizer, name))
        for name in {**inner.components, **inner.state}
    }


def suffix_of(name: str, quantizer: Quantizer) -> str:
    """Return the suffix of an entry's name; empty for the codes.

    If block scales have an unusual maximum, codes have a different meaning, so the entry's name ends in that maximum
    (see `transaxle.encodings.conventions.convention`).
    """
    scale_max = quantizer.encoding.scale_max
    if name in (SCALE, AMAX) and scale_max != NVFP4.scale_max:
        return f"_{name}_{scale_max}"
    return "" if name == DATA else f"_{name}"


def _buffer_placement(
    parameter: DTensor, inner: QuantizedTensor, name: str, local: tuple[int, ...]
) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
    """Return the placements of a parameter's buffer on its mesh, and the buffer's global shape."""
    band, share, along = inner.frame.band, inner.frame.share, cut_along(parameter)
    cut = name == ORIGIN or inner.frame.is_cut(name)
    if band is not None:
        cut = bool(band.step(inner.quantizer, name))
    placements: list[Placement] = [placement if cut else Replicate() for placement in parameter.placements]
    if share is None or along is None:
        if band is not None:
            whole = {ORIGIN: tuple(parameter.shape)}.get(name) or layout_of(parameter)[
                suffix_of(name, inner.quantizer)
            ][1]
            return tuple(placements), whole
        return tuple(placements), (parameter.shape[0], *local[1:]) if cut else local
    placements[along] = Shard(share.dim) if share.step(inner.quantizer, name) else Replicate()
    return tuple(placements), share.whole_of(inner.quantizer, name)


class _Octets(DTensor):
    """DTensor of an entry with eight-bit elements, which is gathered as uint8, the only eight-bit dtype that gloo
    supports.
    """

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Change the placements, as torch's `DTensor.redistribute` does."""
        moved = self._as(torch.uint8).redistribute(*args, **kwargs)
        return as_dtensor(moved.to_local().view(self.dtype), moved.device_mesh, moved.placements, tuple(self.shape))

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor, as torch's `DTensor.full_tensor` does."""
        return self._as(torch.uint8).full_tensor(grad_placements=grad_placements).view(self.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the entry as a plain DTensor."""
        return self._as(self.dtype).__reduce_ex__(protocol)

    def _as(self, dtype: torch.dtype) -> DTensor:
        return as_dtensor(self.to_local().view(dtype), self.device_mesh, self.placements, tuple(self.shape))


def _entry(buffer: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]) -> DTensor:
    entry = as_dtensor(buffer, mesh, placements, shape)
    if buffer.dtype.itemsize > 1 or buffer.dtype == torch.uint8:
        return entry
    octets: DTensor = _Octets(entry._local_tensor, entry._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return octets


class QuantizedEntries(nn.Module):
    """Base class for modules with quantized parameters, whose state dicts contain and accept plain entries."""

    def __getattr__(self, name: str) -> Any:
        """Return an entry by its name, as torch's `get_model_state_dict` requires."""
        for parameter_name, weight in self.__dict__.get("_parameters", {}).items():
            if name.startswith(f"{parameter_name}_") and is_quantized(weight):
                entry = entries(weight).get(name.removeprefix(parameter_name))
                if entry is not None:
                    return entry
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the module under its original class, which can be imported."""
        kind = vars(type(self)).get(_ORIGINAL)
        return super().__reduce_ex__(protocol) if kind is None else (_remade, (kind,), vars(self))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply a function such as a cast to all parameters; if only the dtype changes, quantized codes are kept."""
        parameters: Mapping[str, torch.Tensor | None] = self._parameters
        shards = {
            name: parameter._local_tensor for name, parameter in parameters.items() if isinstance(parameter, DTensor)
        }
        quantized_shards = {name: shard for name, shard in shards.items() if isinstance(shard, QuantizedTensor)}
        module = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, shard in quantized_shards.items():
            parameter = parameters[name]
            if isinstance(parameter, DTensor) and not is_quantized(parameter):
                parameter._local_tensor = shard.with_dtype_of(parameter._local_tensor)
        return module

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, weight in self._parameters.items():
            if is_quantized(weight):
                destination.update({f"{prefix}{name}{suffix}": entry for suffix, entry in entries(weight).items()})

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
        remaining, loaded_weights, problems = dict(state_dict), dict[str, torch.Tensor](), list[Refusal]()
        for parameter_name, weight in self._parameters.items():
            key = f"{prefix}{parameter_name}"
            if is_quantized(weight) and key in remaining:
                suffixes = [suffix for suffix in _load_suffixes(weight) if f"{key}{suffix}" in remaining]
                own_entries = {suffix: remaining.pop(f"{key}{suffix}") for suffix in suffixes}
                try:
                    loaded_weights[parameter_name] = _load_rows(key, weight, own_entries)
                except TransaxleError as error:
                    problems += error.refusals
        if problems:
            raise gathered(problems)
        for parameter_name, loaded in loaded_weights.items():
            weight = self._parameters[parameter_name]
            assert weight is not None
            if local_metadata.get(ASSIGN, False):
                self._parameters[parameter_name] = nn.Parameter(
                    place_like(weight, loaded), requires_grad=weight.requires_grad
                )
            else:
                _write(f"{prefix}{parameter_name}", weight, loaded)
        loaded_keys = {f"{prefix}{parameter_name}" for parameter_name in loaded_weights}
        absent_keys: list[str] = []
        super()._load_from_state_dict(
            remaining, prefix, local_metadata, strict, absent_keys, unexpected_keys, error_msgs
        )
        missing_keys += [name for name in absent_keys if name not in loaded_keys]


def give_entries(module: nn.Module) -> None:
    """Make the state dicts of a module contain plain entries for the module's quantized parameters."""
    if not isinstance(module, QuantizedEntries):
        kind: Any = type(module)
        module.__class__ = _with_entries(kind)


@cache
def _with_entries(kind: Any) -> Any:
    attributes = {"__module__": kind.__module__, "__doc__": kind.__doc__, _ORIGINAL: kind}
    return type(kind.__name__, (QuantizedEntries, kind), attributes)


def _remade(kind: Any) -> nn.Module:
    module: nn.Module = object.__new__(_with_entries(kind))
    return module


def is_quantized(parameter: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether a parameter, or this rank's shard of the parameter, is a QuantizedTensor."""
    return parameter is not None and isinstance(raw_local(parameter), QuantizedTensor)


def _local(parameter: torch.Tensor) -> QuantizedTensor:
    inner = raw_local(parameter)
    assert isinstance(inner, QuantizedTensor)
    return inner


def layout_of(parameter: torch.Tensor) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return name suffix -> (dtype, whole shape), for each entry of a quantized parameter."""
    quantizer = _local(parameter).quantizer
    buffers = buffers_of(quantizer, whole_shape(parameter))
    return {suffix_of(name, quantizer): layout for name, layout in buffers.items()}


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape, in elements, of a whole quantized parameter, regardless of the part that this rank has."""
    share = share_of(parameter)
    return tuple(parameter.shape) if share is None else share.shape


def _load_suffixes(parameter: torch.Tensor) -> list[str]:
    """Return the suffixes of the entries that a load reads, including scaling state that the recipe may not use."""
    return list(dict.fromkeys((*layout_of(parameter), *STATE_SUFFIXES)))


def is_state(suffix: str) -> bool:
    """Return whether an entry is state for scaling the next values, as opposed to codes or scales of present values."""
    return suffix in STATE_SUFFIXES


def code_name(name: str) -> str | None:
    """Return the name of the codes to which an entry with scaling state belongs; None for any other entry."""
    return next((name.removesuffix(state) for state in STATE_SUFFIXES if name.endswith(state)), None)


@torch.no_grad()
def put_values(parameter: torch.Tensor, values: torch.Tensor) -> int:
    """Quantize this rank's rows of a matrix into a parameter, replacing its codes and scales. All ranks must call this
    function.

    Args:
        parameter: a QuantizedTensor, or a DTensor of one.
        values: the values of this rank's rows.

    Returns:
        Number of bytes written into codes, scales and state.
    """
    inner = _local(parameter)
    requantized = _requantize(parameter, values)
    inner.adopt(requantized.frame, requantized.skip, requantized.height)
    return sum(buffer.nbytes for buffer in {**inner.components, **inner.state}.values())


@torch.no_grad()
def reset_scaling_state(parameter: torch.Tensor) -> None:
    """Clear a scaling state that a loaded checkpoint lacks; the next values are then scaled by their own amax.

    After the reset, stochastic rounding restarts from its first call, with the same key.
    """
    for name, buffer in _local(parameter).state.items():
        if name == ROUNDING:
            reset_calls(buffer)
        else:
            buffer.zero_()


def _requantize(weight: torch.Tensor, values: torch.Tensor) -> QuantizedTensor:
    inner, (start, rows) = _local(weight), _rows(weight)
    requantized = make_quantized(
        inner.quantizer,
        values.to(inner.dtype),
        group=group_of(weight),
        start=start,
        whole=rows,
        share=inner.frame.share,
        band=inner.frame.band,
    )
    if ROUNDING in inner.state:
        put_state(requantized.frame, fresh(inner.state[ROUNDING]))
    return requantized


def _load_rows(key: str, weight: torch.Tensor, loaded_entries: dict[str, Any]) -> torch.Tensor:
    """Return this rank's rows of a weight, computed from entries that may be cut differently or may be plain values."""
    inner, code_entry = _local(weight), loaded_entries[""]
    frame, (start, rows) = inner.frame, _rows(weight)
    if code_entry.dtype.is_floating_point and code_entry.dtype.itemsize > 1:
        return _quantize_values(key, weight, code_entry)
    faults = _faults(key, weight, loaded_entries)
    if faults:
        raise gathered(faults)
    names = {suffix_of(name, frame.quantizer): name for name in buffers_of(frame.quantizer, whole_shape(weight))}
    own_entries = {suffix: entry for suffix, entry in loaded_entries.items() if suffix in names}
    buffers = {names[suffix]: _part(entry, weight, names[suffix]) for suffix, entry in own_entries.items()}
    shape = (inner.height, *frame.row)
    for name, (dtype, size) in buffers_of(frame.quantizer, shape).items():
        # The source lacks this state, and the parameter's old state belongs to other values, so the state is reset.
        if name in STATE and name not in buffers:
            zeros = torch.zeros(size, dtype=dtype, device=buffers[DATA].device)
            buffers[name] = fresh(inner.state[name]).to(zeros.device) if name == ROUNDING else zeros
    tensor = from_components(frame.quantizer, buffers, shape, inner.dtype, start=start, whole=rows)
    tensor.frame.share, tensor.frame.band = frame.share, frame.band
    return tensor


def _rows(weight: torch.Tensor) -> tuple[int, int]:
    """Return (first row, number of rows) of this rank, inside the tensor-parallel shard."""
    inner, share = _local(weight), share_of(weight)
    return inner.frame.start + inner.skip, weight.shape[0] if share is None else share.local[0]


def _faults(key: str, weight: torch.Tensor, loaded_entries: dict[str, Any]) -> list[Refusal]:
    """Return an error for each loaded entry that does not fit the weight's quantizer."""
    faults = []
    inner, local_shapes = _local(weight), _own_shapes(weight)
    quantizer = inner.quantizer
    for suffix, (dtype, shape) in layout_of(weight).items():
        where, entry = Where(tensor=f"{key}{suffix}"), loaded_entries.get(suffix)
        if entry is None:
            if not is_state(suffix):
                faults.append(Refusal("MISSING_TENSOR", f"{quantizer} needs this entry", where))
        elif entry.dtype != dtype:
            hint = "Load it into a model with that encoding, or convert the checkpoint with --decode and --encode."
            faults.append(Refusal("DTYPE_MISMATCH", f"{quantizer} needs {dtype}, got {entry.dtype}", where, hint))
        elif tuple(entry.shape) not in (shape, local_shapes.get(suffix)):
            hint = "Leave it out of the state dict to begin a history of the new length." if is_state(suffix) else ""
            faults.append(Refusal("SHAPE_MISMATCH", f"expected {list(shape)}, got {list(entry.shape)}", where, hint))
    return faults


def _own_shapes(weight: torch.Tensor) -> dict[str, tuple[int, ...]]:
    """Return name suffix -> local shape of each entry, for a weight whose tensor-parallel cut no DTensor can describe.

    A loaded entry with this local shape is not cut again. For weights whose cut a DTensor describes, the result is
    empty.
    """
    inner = _local(weight)
    if inner.frame.share is None or (isinstance(weight, DTensor) and cut_along(weight) is not None):
        return {}
    buffers = {**inner.components, **inner.state}
    return {suffix_of(name, inner.quantizer): tuple(buffer.shape) for name, buffer in buffers.items()}


def _part(entry: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return this rank's part of a loaded entry (a buffer, or the values `ORIGIN`), which may already be cut."""
    inner = _local(weight)
    values, share = entry, inner.frame.share
    if isinstance(entry, DTensor):
        same_mesh = isinstance(weight, DTensor) and entry.device_mesh == weight.device_mesh
        if (
            same_mesh
            and entry.placements == _buffer_placement(cast(DTensor, weight), inner, name, tuple(entry.shape))[0]
        ):
            return entry.to_local()
        values = _full(entry)
    elif hasattr(entry, TO_LOCAL):
        values = local_of(entry)
    device = entry.device if inner.is_meta else inner.device
    if share is not None:
        local_shape = (
            tuple(inner.shape) if name == ORIGIN else _own_shapes(weight).get(suffix_of(name, inner.quantizer))
        )
        if tuple(values.shape) == local_shape:
            return values.to(device)
        values = share.part(inner.quantizer, name, values)
    start, _ = _rows(weight)
    if inner.frame.band is not None:
        values = inner.frame.band.part(inner.quantizer, name, values)
    cut = name == ORIGIN or inner.frame.is_cut(name)
    return (values[start : start + inner.height] if cut else values).to(device)


def _full(entry: DTensor) -> torch.Tensor:
    """Gather an entry from all ranks; eight-bit elements are gathered as uint8, because gloo supports no other
    eight-bit dtype.
    """
    if entry.dtype.itemsize > 1:
        return entry.full_tensor()
    raw = cast(DTensor, entry.view(torch.uint8))
    return raw.full_tensor().view(entry.dtype)


def _quantize_values(key: str, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Quantize plain values from a checkpoint with the weight's quantizer."""
    inner = _local(weight)
    if tuple(values.shape) not in (whole_shape(weight), tuple(weight.shape)):
        raise refuse("SHAPE_MISMATCH", f"expected {list(whole_shape(weight))}, got {list(values.shape)}", tensor=key)
    warnings.warn(f"{key}: {values.dtype} values are quantized once, by {inner.quantizer}", stacklevel=2)
    return _requantize(weight, _part(values, weight, ORIGIN))


def _write(key: str, weight: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copy loaded codes and scales into a parameter.

    Raises:
        Refused: with the code UNSUPPORTED if the parameter is on the meta device, and therefore has no memory.
    """
    inner = _local(weight)
    if inner.device.type == "meta":
        raise refuse(
            "UNSUPPORTED",
            "the parameter is on the meta device",
            tensor=key,
            hint="Call model.to_empty(device=...) first, or load with assign=True.",
        )
    assert isinstance(loaded, QuantizedTensor)
    source: Frame = loaded.frame
    inner.adopt(source, loaded.skip, loaded.height)
