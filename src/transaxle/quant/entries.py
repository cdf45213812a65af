"""State dicts of quantized modules: a quantized weight appears as several plain tensors, each with its own name.

`weight` holds the codes and `weight_scale_inv` the scales, as DeepSeek-V3 names them; `weight_amax` and the rest follow
the same pattern. Files and checkpoints need to know nothing of quantized tensors, and dtypes in them are the real ones.
Codes are global tensors cut as the parameter is; what stands for tiles of several rows is replicated.

How a quantized parameter lies on its mesh: among which ranks it is cut, and by whom.
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
from transaxle.quant.frame import Frame, forget, fresh, put_state
from transaxle.quant.quantizers import AMAX, DATA, ORIGIN, ROUNDING, SCALE, STATE, Quantizer, buffers_of
from transaxle.quant.tensor import QuantizedTensor, from_components, quantized
from transaxle.quant.tp_share import Band, Share
from transaxle.torch_tensors import TO_LOCAL, as_dtensor, local_of, place_like, raw_local


def share_of(parameter: torch.Tensor) -> Share | None:
    """The share that this rank has of a quantized parameter cut by tensor parallelism; None if it was not cut."""
    inner = raw_local(parameter)
    assert isinstance(inner, QuantizedTensor)
    return inner.frame.share


def cut_along(parameter: DTensor) -> int | None:
    """The dim of the mesh along which tensor parallelism has cut a quantized parameter; None if it does not say so."""
    share = share_of(parameter)
    return None if share is None or tuple(parameter.shape) != share.shape else share.place_in(parameter.device_mesh)


def band_of(parameter: torch.Tensor) -> Band | None:
    """The band that this rank has of a quantized parameter; None if no cut left a part of each row, or each matrix."""
    inner = raw_local(parameter)
    assert isinstance(inner, QuantizedTensor)
    return inner.frame.band


def group_of(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks that together hold all of this rank's copy of a parameter (FSDP2's); None without such a cut.

    Ranks of a tensor-parallel cut are not among them; the tensor's share knows those.
    """
    if not isinstance(parameter, DTensor):
        return None
    own = cut_along(parameter)
    cut = [n for n, placement in enumerate(parameter.placements) if not placement.is_replicate() and n != own]
    if not cut:
        return None
    placement, band = parameter.placements[cut[0]], band_of(parameter)
    along = 0 if band is None else band.dim
    if band is None and parameter.device_mesh.size(cut[0]) == 1:
        return None
    if len(cut) > 1 or not isinstance(placement, Shard | _StridedShard) or placement.dim != along:
        raise refuse(
            "UNSUPPORTED",
            f"a quantized parameter cannot have the placements {parameter.placements}",
            hint="Cut it with fully_shard, over one mesh dim.",
        )
    return parameter.device_mesh.get_group(cut[0])


ASSIGN = "assign_to_params_buffers"
"""Key of the metadata by which torch tells a module that it is to take the tensors themselves (`assign=True`)."""
STATE_SUFFIXES = tuple(f"_{name}" for name in STATE)
"""Suffixes of what says how the next values are scaled."""
_MADE_OF = "_made_of"
"""Attribute of a class that was given entries: the class without them."""


def entries(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return codes, scales and state of a parameter by the suffix of their names; the suffix of the codes is empty.

    They share the parameter's memory: whatever is written into them, as DCP does when it loads, changes the model.
    """
    inner = _local(parameter)
    if inner.device.type != "meta":
        inner.frame.blank = False  # what is written here says nothing to the frame
    by_suffix = {}
    for name, buffer in {**inner.components, **inner.state}.items():
        suffix = suffix_of(name, inner.quantizer)
        by_suffix[suffix] = buffer
        if isinstance(parameter, DTensor):
            placements, shape = _lies(parameter, inner, name, tuple(buffer.shape))
            by_suffix[suffix] = _entry(buffer, parameter.device_mesh, placements, shape)
    return by_suffix


def parts_of(parameter: torch.Tensor) -> dict[str, tuple[tuple[int, ...], tuple[Intervals, ...]]]:
    """Return which parts of whole tensors the entries of a parameter are, where no DTensor says so.

    Args:
        parameter: what this rank has of one that tensor parallelism has cut in a way that no DTensor can say, or such
            parts that FSDP2 has cut once more.

    Returns:
        Suffix -> shape of the whole entry, and by dim the positions that the tensor-parallel rank has.
    """
    inner, share = _local(parameter), share_of(parameter)
    assert share is not None
    return {
        suffix_of(name, inner.quantizer): (share.whole_of(inner.quantizer, name), share.holds(inner.quantizer, name))
        for name in {**inner.components, **inner.state}
    }


def suffix_of(name: str, quantizer: Quantizer) -> str:
    """Return the suffix of an entry's name; empty for the codes.

    Scales made to reach elsewhere than usual mean other values, so their names say how far they reach
    (`transaxle.encodings.conventions.convention`).
    """
    most = quantizer.encoding.scale_max
    if name in (SCALE, AMAX) and most != NVFP4.scale_max:
        return f"_{name}_{most}"
    return "" if name == DATA else f"_{name}"


def _lies(
    parameter: DTensor, inner: QuantizedTensor, name: str, local: tuple[int, ...]
) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
    """Return how a buffer of a parameter lies on its mesh, and its shape there."""
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
    """An entry of eight bits: it is gathered as bytes, since gloo moves no other type of that size than uint8."""

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """See torch."""
        moved = self._as(torch.uint8).redistribute(*args, **kwargs)
        return as_dtensor(moved.to_local().view(self.dtype), moved.device_mesh, moved.placements, tuple(self.shape))

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """See torch."""
        return self._as(torch.uint8).full_tensor(grad_placements=grad_placements).view(self.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as what torch knows."""
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
    """Mixin of modules with quantized parameters: state dicts hold and accept plain entries."""

    def __getattr__(self, name: str) -> Any:
        """Resolve the names of entries, as torch's `get_model_state_dict` needs."""
        for own, weight in self.__dict__.get("_parameters", {}).items():
            if name.startswith(f"{own}_") and is_quantized(weight):
                entry = entries(weight).get(name.removeprefix(own))
                if entry is not None:
                    return entry
        return super().__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the class that this was made of, which has a name."""
        kind = vars(type(self)).get(_MADE_OF)
        return super().__reduce_ex__(protocol) if kind is None else (_remade, (kind,), vars(self))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep the codes where another dtype is asked for, also of parameters that are DTensors."""
        named: Mapping[str, torch.Tensor | None] = self._parameters
        shards = {own: parameter._local_tensor for own, parameter in named.items() if isinstance(parameter, DTensor)}
        quantized_shards = {own: inner for own, inner in shards.items() if isinstance(inner, QuantizedTensor)}
        module = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for own, inner in quantized_shards.items():
            parameter = named[own]
            if isinstance(parameter, DTensor) and not is_quantized(parameter):
                parameter._local_tensor = inner.retyped(parameter._local_tensor)
        return module

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
        rest, ready, problems = dict(state_dict), dict[str, torch.Tensor](), list[Refusal]()
        for own, weight in self._parameters.items():
            key = f"{prefix}{own}"
            if is_quantized(weight) and key in rest:
                suffixes = [suffix for suffix in _taken(weight) if f"{key}{suffix}" in rest]
                own_entries = {suffix: rest.pop(f"{key}{suffix}") for suffix in suffixes}
                try:
                    ready[own] = _loaded(key, weight, own_entries)
                except TransaxleError as error:
                    problems += error.refusals
        if problems:
            raise gathered(problems)
        for own, loaded in ready.items():
            weight = self._parameters[own]
            assert weight is not None
            if local_metadata.get(ASSIGN, False):
                self._parameters[own] = nn.Parameter(place_like(weight, loaded), requires_grad=weight.requires_grad)
            else:
                _write(f"{prefix}{own}", weight, loaded)
        done = {f"{prefix}{own}" for own in ready}
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
    module: nn.Module = object.__new__(_with_entries(kind))
    return module


def is_quantized(parameter: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether a parameter, or what this rank has of it, is a QuantizedTensor."""
    return parameter is not None and isinstance(raw_local(parameter), QuantizedTensor)


def _local(parameter: torch.Tensor) -> QuantizedTensor:
    inner = raw_local(parameter)
    assert isinstance(inner, QuantizedTensor)
    return inner


def layout_of(parameter: torch.Tensor) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return, by suffix, dtype and whole shape of each entry of a quantized parameter."""
    quantizer = _local(parameter).quantizer
    wanted = buffers_of(quantizer, whole_shape(parameter))
    return {suffix_of(name, quantizer): layout for name, layout in wanted.items()}


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a whole quantized parameter, counted in values, however it is cut over ranks."""
    share = share_of(parameter)
    return tuple(parameter.shape) if share is None else share.shape


def _taken(parameter: torch.Tensor) -> list[str]:
    """Return the suffixes of the entries that a load reads: state of a scaling included, which some recipes ignore."""
    return list(dict.fromkeys((*layout_of(parameter), *STATE_SUFFIXES)))


def is_state(suffix: str) -> bool:
    """Whether an entry holds state for scaling the next values, not codes or scales of the present ones."""
    return suffix in STATE_SUFFIXES


def code_name(name: str) -> str | None:
    """Return the name of the codes beside which an entry says how the next values are scaled; None for any other."""
    return next((name.removesuffix(state) for state in STATE_SUFFIXES if name.endswith(state)), None)


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
    requantized = _anew(parameter, values)
    inner.adopt(requantized.frame, requantized.skip, requantized.height)
    return sum(buffer.nbytes for buffer in {**inner.components, **inner.state}.values())


@torch.no_grad()
def begin_anew(parameter: torch.Tensor) -> None:
    """Clear the state for scaling the next values, which the loaded source lacks: they are scaled by their own amax.

    Random rounding begins with its first call, and keeps its key.
    """
    for name, buffer in _local(parameter).state.items():
        if name == ROUNDING:
            forget(buffer)
        else:
            buffer.zero_()


def _anew(weight: torch.Tensor, values: torch.Tensor) -> QuantizedTensor:
    inner, (start, rows) = _local(weight), _rows(weight)
    made = quantized(
        inner.quantizer,
        values.to(inner.dtype),
        group=group_of(weight),
        start=start,
        whole=rows,
        share=inner.frame.share,
        band=inner.frame.band,
    )
    if ROUNDING in inner.state:
        put_state(made.frame, fresh(inner.state[ROUNDING]))
    return made


def _loaded(key: str, weight: torch.Tensor, loaded_entries: dict[str, Any]) -> torch.Tensor:
    """Return this rank's rows of a weight from entries that may be cut otherwise, or hold plain values."""
    inner, codes = _local(weight), loaded_entries[""]
    frame, (start, rows) = inner.frame, _rows(weight)
    if codes.dtype.is_floating_point and codes.dtype.itemsize > 1:
        return _quantized(key, weight, codes)
    faults = _faults(key, weight, loaded_entries)
    if faults:
        raise gathered(faults)
    names = {suffix_of(name, frame.quantizer): name for name in buffers_of(frame.quantizer, whole_shape(weight))}
    own_entries = {suffix: entry for suffix, entry in loaded_entries.items() if suffix in names}
    buffers = {names[suffix]: _part(entry, weight, names[suffix]) for suffix, entry in own_entries.items()}
    shape = (inner.height, *frame.row)
    for name, (dtype, size) in buffers_of(frame.quantizer, shape).items():
        if name in STATE and name not in buffers:  # none in the checkpoint: what was here is of other values
            none = torch.zeros(size, dtype=dtype, device=buffers[DATA].device)
            buffers[name] = fresh(inner.state[name]).to(none.device) if name == ROUNDING else none
    tensor = from_components(frame.quantizer, buffers, shape, inner.dtype, start=start, whole=rows)
    tensor.frame.share, tensor.frame.band = frame.share, frame.band
    return tensor


def _rows(weight: torch.Tensor) -> tuple[int, int]:
    """Return which row is the first of this rank's, and how many there are: in what tensor parallelism has left."""
    inner, share = _local(weight), share_of(weight)
    return inner.frame.start + inner.skip, weight.shape[0] if share is None else share.local[0]


def _faults(key: str, weight: torch.Tensor, loaded_entries: dict[str, Any]) -> list[Refusal]:
    """Return a refusal for each entry that is not as this quantizer makes it."""
    faults = []
    inner, own = _local(weight), _own_shapes(weight)
    quantizer = inner.quantizer
    for suffix, (dtype, shape) in layout_of(weight).items():
        where, entry = Where(tensor=f"{key}{suffix}"), loaded_entries.get(suffix)
        if entry is None:
            if not is_state(suffix):
                faults.append(Refusal("MISSING_TENSOR", f"{quantizer} needs this entry", where))
        elif entry.dtype != dtype:
            hint = "Load it into a model with that encoding, or convert the checkpoint with --decode and --encode."
            faults.append(Refusal("DTYPE_MISMATCH", f"{quantizer} needs {dtype}, got {entry.dtype}", where, hint))
        elif tuple(entry.shape) not in (shape, own.get(suffix)):
            hint = "Leave it out of the state dict to begin a history of the new length." if is_state(suffix) else ""
            faults.append(Refusal("SHAPE_MISMATCH", f"expected {list(shape)}, got {list(entry.shape)}", where, hint))
    return faults


def _own_shapes(weight: torch.Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shapes of entries that are this rank's already: of a part that no DTensor describes."""
    inner = _local(weight)
    if inner.frame.share is None or (isinstance(weight, DTensor) and cut_along(weight) is not None):
        return {}
    buffers = {**inner.components, **inner.state}
    return {suffix_of(name, inner.quantizer): tuple(buffer.shape) for name, buffer in buffers.items()}


def _part(entry: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return what this rank has of a buffer, or of values (`ORIGIN`), of which there is all or that is here already."""
    inner = _local(weight)
    values, share = entry, inner.frame.share
    if isinstance(entry, DTensor):
        same = isinstance(weight, DTensor) and entry.device_mesh == weight.device_mesh
        if same and entry.placements == _lies(cast(DTensor, weight), inner, name, tuple(entry.shape))[0]:
            return entry.to_local()
        values = _full(entry)
    elif hasattr(entry, TO_LOCAL):
        values = local_of(entry)
    where = entry.device if inner.is_meta else inner.device
    if share is not None:
        own = tuple(inner.shape) if name == ORIGIN else _own_shapes(weight).get(suffix_of(name, inner.quantizer))
        if tuple(values.shape) == own:
            return values.to(where)
        values = share.part(inner.quantizer, name, values)
    start, _ = _rows(weight)
    if inner.frame.band is not None:
        values = inner.frame.band.part(inner.quantizer, name, values)
    cut = name == ORIGIN or inner.frame.is_cut(name)
    return (values[start : start + inner.height] if cut else values).to(where)


def _full(entry: DTensor) -> torch.Tensor:
    """Gather an entry; as bytes, since gloo moves no other type of eight bits than uint8."""
    if entry.dtype.itemsize > 1:
        return entry.full_tensor()
    raw = cast(DTensor, entry.view(torch.uint8))
    return raw.full_tensor().view(entry.dtype)


def _quantized(key: str, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Quantize values from a checkpoint that is not quantized."""
    inner = _local(weight)
    if tuple(values.shape) not in (whole_shape(weight), tuple(weight.shape)):
        raise refuse("SHAPE_MISMATCH", f"expected {list(whole_shape(weight))}, got {list(values.shape)}", tensor=key)
    warnings.warn(f"{key}: {values.dtype} values are quantized once, by {inner.quantizer}", stacklevel=2)
    return _anew(weight, _part(values, weight, ORIGIN))


def _write(key: str, weight: torch.Tensor, loaded: torch.Tensor) -> None:
    """Copy codes and scales into a parameter.

    Raises:
        Refused: UNSUPPORTED for one on the meta device, which holds nothing.
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
