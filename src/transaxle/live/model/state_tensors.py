"""Collects the tensors of a model or state dict under the names that a checkpoint uses, and reads the model's config.

Name segments that wrappers insert (`_orig_mod`, `_checkpoint_wrapped_module`, `_fsdp_wrapped_module`, DDP's `module`)
are removed. Numpy arrays in a state dict become tensors in the same memory, so they are saved like tensors and filled
in place.

**Megatron's sharded state dicts**: the entries of `model.sharded_state_dict()` are combined into one grid of shards per
key.

A `ShardedTensor` of Megatron is a box (region) of a whole tensor. Several such boxes (layers, experts, the gate and the
up projection) may share one key. A `ShardedTensorFactory` makes such boxes from a parameter: either views of the
parameter, or copies that the factory can merge again after a load. This module never imports Megatron: objects of its
classes exist only in programs that have imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from transaxle.arguments import Configuration
from transaxle.axes.geometry import Intervals
from transaxle.axes.notation.name import own_name
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.live.derived import (
    EXTRA_STATE,
    CustomModule,
    custom_modules,
    find_gathered,
    find_kept_elsewhere,
    find_model_parallel,
    find_partitioned,
    find_unreadable,
    is_partitioned,
    own_range,
    whole_states,
)
from transaxle.live.transport.world import World
from transaxle.quant.entries import is_quantized
from transaxle.torch_tensors import (
    Cell,
    ShardGrid,
    cells_of,
    innermost,
    local_of,
    local_parts,
    mark,
    mark_all,
    part_of,
    unwrap,
)

MODULE = "megatron.core.dist_checkpointing.mapping"
"""Name of the Python module in which Megatron defines the classes of sharded state dicts."""
_ODD = "Give the state dict of model.sharded_state_dict()."


def is_sharded(value: object) -> bool:
    """Return whether an entry of a state dict is an object of Megatron's sharded state dicts."""
    mapping = sys.modules.get(MODULE)
    return mapping is not None and isinstance(value, (mapping.ShardedBase, mapping.LocalNonpersistentObject))


@dataclass(frozen=True)
class Factory:
    """A parameter that a Megatron factory has copied; after a load, the copies must be merged into the parameter."""

    key: str
    """Key of the factory in the sharded state dict."""
    parameter: torch.Tensor
    """The parameter into which the copies are merged."""
    merge: Any
    """Function that computes the parameter's values from the copies, nested as in `built`."""
    built: Any
    """The copies, nested in lists and dicts as the factory returned them."""

    def finish(self) -> None:
        """Merge the copies' values into the parameter."""
        with torch.no_grad():
            self.parameter.copy_(self.merge(_data_of(self.built)))


@dataclass(frozen=True)
class MegatronState:
    """The entries of this rank's sharded state dict, sorted by kind."""

    grids: Mapping[str, torch.Tensor]
    """Key -> tensor, represented as a grid of shards (`ShardGrid`)."""
    objects: tuple[str, ...]
    """Keys of entries that are not tensors, such as modules' extra states and random states."""
    factories: tuple[Factory, ...]
    """Parameters into which copies must be merged after a load."""
    problems: list[Refusal]
    """A refusal for each tensor that can be neither loaded nor saved."""


@dataclass(frozen=True)
class _Shard:
    """A Megatron `ShardedTensor`, reduced to what loads and saves need."""

    cell: Cell
    """For each dim of the whole tensor, the interval that the shard covers."""
    data: torch.Tensor
    """Values of the shard, with as many dims as the whole tensor has."""
    spare: bool
    """Whether the shard is a replica of another rank's shard."""
    padded: bool
    """Whether the whole tensor may have more rows (padding) than the tensor in a checkpoint."""


def megatron_state(values: Iterable[Any]) -> MegatronState:
    """Convert the entries of a sharded state dict to grids of shards.

    Args:
        values: the entries for which `is_sharded` is true.
    """
    mapping = sys.modules[MODULE]
    shards: dict[str, list[Any]] = {}
    objects: list[str] = []
    factories: list[Factory] = []
    problems: list[Refusal] = []
    for value in values:
        entries = value
        if isinstance(value, mapping.ShardedTensorFactory):
            entries, is_copy = _build_entries(value, problems)
            if is_copy:
                factories.append(Factory(value.key, value.data, value.merge_fn, entries))
        for shard in _flatten_values(entries):
            if isinstance(shard, mapping.ShardedTensor):
                shards.setdefault(shard.key, []).append(shard)
            elif isinstance(shard, mapping.ShardedObject):
                objects.append(shard.key)
    grids: dict[str, torch.Tensor] = {}
    for key, alike in shards.items():
        unusable = [message for shard in alike if (message := _unusable(shard)) is not None]
        if unusable:
            problems.append(Refusal("UNSUPPORTED", unusable[0], Where(None, key), _ODD))
        else:
            _add(key, alike, grids, problems)
    return MegatronState(grids, tuple(dict.fromkeys(objects)), tuple(factories), problems)


def _build_entries(factory: Any, problems: list[Refusal]) -> tuple[Any, bool]:
    """Return the entries that a factory builds from its parameter, and whether these entries are copies."""
    try:
        built = factory.build()
    except Exception as error:  # noqa: BLE001 - the factory is Megatron's or the user's code
        message = f"its factory failed: {error!r}"
        problems.append(Refusal("UNSUPPORTED", message, Where(None, factory.key)))
        return None, False
    data = [each.data for each in _flatten_values(built) if isinstance(getattr(each, "data", None), torch.Tensor)]
    parameter = factory.data
    if parameter is None or parameter.is_meta:
        return built, False
    memory = parameter.untyped_storage().data_ptr()
    return built, any(each.numel() and each.untyped_storage().data_ptr() != memory for each in data)


def _flatten_values(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _flatten_values(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flatten_values(item)
    else:
        yield value


def _data_of(value: Any) -> Any:
    """Return a factory's nested entries, with each shard replaced by its tensor."""
    if isinstance(value, Mapping):
        return {key: _data_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_data_of(item) for item in value]
    return value.unwrap() if hasattr(value, "unwrap") else value.data


def _unusable(shard: Any) -> str | None:
    """Return the reason why a `ShardedTensor` can be neither loaded nor saved; None if it can be."""
    if shard.data is None:
        return "it describes a tensor without its data"
    if getattr(shard, "flattened_range", None) is not None:
        return "it is a range of a flattened tensor, as older versions describe the distributed optimizer's state"
    if type(shard.data.detach()) is not torch.Tensor:
        return f"its data is a {type(shard.data).__name__}, whose memory is not its values"
    local = (1,) * shard.prepend_axis_num + tuple(shard.data.shape)
    pairs = zip(shard.global_offset, local, shard.global_shape, strict=False)
    if len(local) != len(shard.global_shape) or any(start < 0 or start + size > of for start, size, of in pairs):
        return f"its local shape {list(local)} at {list(shard.global_offset)} is no part of {list(shard.global_shape)}"
    return None


def _add(key: str, candidates: list[Any], grids: dict[str, torch.Tensor], problems: list[Refusal]) -> None:
    """Combine the shards of one key into a grid in `grids`; shards without elements are skipped."""
    shapes = dict.fromkeys(tuple(each.global_shape) for each in candidates)
    dtypes = dict.fromkeys(each.data.dtype for each in candidates)
    if len(shapes) > 1:
        listed = " and ".join(str(list(shape)) for shape in shapes)
        problems.append(Refusal("SHAPE_MISMATCH", f"its shards are of tensors of shapes {listed}", Where(None, key)))
        return
    if len(dtypes) > 1:
        listed = " and ".join(map(str, dtypes))
        problems.append(Refusal("DTYPE_MISMATCH", f"its shards have dtypes {listed}", Where(None, key)))
        return
    (shape,) = shapes
    if not shape:
        grids[key] = candidates[0].data.detach()
        return
    nonempty = [_shard(each) for each in candidates if prod(each.data.shape)]
    by_cell: dict[Cell, _Shard] = {}
    for shard in nonempty:
        same_cell = by_cell.setdefault(shard.cell, shard)
        if same_cell is not shard and same_cell.data.data_ptr() != shard.data.data_ptr():
            message = "two tensors of this rank are the same part of it"
            problems.append(Refusal("NAME_COLLISION", message, Where(None, key), "Pass each shard only once."))
            return
    if not by_cell:
        return
    intervals_per_dim = tuple(tuple(sorted({cell[dim][0] for cell in by_cell})) for dim in range(len(shape)))
    if _overlap(intervals_per_dim) or by_cell.keys() != set(cells_of(intervals_per_dim)):
        message = (
            f"this rank's {len(by_cell)} shards of it form no grid: not every combination of their intervals is one"
        )
        problems.append(Refusal("UNSUPPORTED", message, Where(None, key), _ODD))
        return
    cells = [by_cell[cell] for cell in cells_of(intervals_per_dim)]
    spare, padded = any(each.spare for each in cells), all(each.padded for each in cells)
    grids[key] = ShardGrid(shape, intervals_per_dim, [each.data for each in cells], spare=spare, padded=padded)


def _shard(shard: Any) -> _Shard:
    data = shard.data.detach()[(None,) * shard.prepend_axis_num]
    spans = ((start, start + size) for start, size in zip(shard.global_offset, data.shape, strict=True))
    replica = shard.replica_id
    main = replica == 0 if isinstance(replica, int) else not any(replica)
    padded = bool(shard.allow_shape_mismatch) and not shard.prepend_axis_num
    return _Shard(tuple((span,) for span in spans), data, not main, padded)


def _overlap(intervals_per_dim: Iterable[Intervals]) -> bool:
    return any(first[1] > second[0] for spans in intervals_per_dim for first, second in pairwise(spans))


State = nn.Module | Mapping[str, Any]
"""A model, or a state dict, which may be nested or flat."""
_SEPARATOR = "."
_OLD_SHARDS = "torch.distributed._shard.sharded_tensor"
_WITHOUT_SHARDS = (
    "Give the model itself, also under FSDP1; or build it with FullyShardedDataParallel(…, device_mesh=…): then its "
    "sharded state dict has DTensors."
)
_PLAIN_ONLY = "This module stores its values in extra state: load and save the model before it is quantized."
_KINDS = "biufc"
"""Codes (`dtype.kind`) of the numpy dtypes that `torch.from_numpy` accepts."""
_LISTED = 4
"""Largest number of config keys that a message lists."""


@dataclass(frozen=True)
class Leaves:
    """The tensors of a model or state dict on this rank, and its entries that are not tensors."""

    tensors: Mapping[str, torch.Tensor]
    """Name -> tensor or DTensor; parameters are the parameter objects themselves, except for derived entries."""
    non_tensors: Mapping[str, Any]
    """Name -> value, for entries that are not tensors: entries of a state dict, or extra states of a model's
    modules.
    """
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Name -> quantized parameter of a model; `tensors` contains its codes and scales as separate entries."""
    custom_modules: tuple[CustomModule, ...] = ()
    """Modules of a model whose entries in `tensors` are copies; after a load, `settle` moves the values of the copies
    into the modules.
    """

    refusals: tuple[Refusal, ...] = ()
    """A refusal for each tensor into which loaded values could not be stored."""

    copies: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """Name of a base weight -> additional tensors that get the same values, namely the copies of the weight that an
    adapter trains.
    """
    untouched: tuple[str, ...] = ()
    """Names of entries that a load does not change: a model's adapters or their base, or entries of a sharded state
    dict that are not tensors.
    """
    sharded: bool = False
    """Whether some of `tensors` are grids of a Megatron sharded state dict."""
    factories: tuple[Factory, ...] = ()
    """Parameters of a Megatron sharded state dict whose values `tensors` contains as copies."""
    unshown: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Name in the model -> parameter that the state dict contains only in a different form, such as a fused parameter
    that appears as separate parts.
    """

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Name -> tensor, for all tensors that may be parameters of an optimizer."""
        return {**self.tensors, **self.weights, **self.unshown}


def leaves(state: State, *, sharded: bool = False, ranges: bool = False) -> Leaves:
    """Collect the tensors of a model or state dict, and its entries that are not tensors.

    Args:
        state: a module, whose persistent buffers are included, or a mapping; the keys of nested mappings and lists are
            joined with `.`. The name of a Megatron sharded tensor is its `key`.
        sharded: whether to accept Megatron's sharded tensors, which become grids of shards.
        ranges: whether to accept parameters of DeepSpeed ZeRO-3, each as this rank's range of the parameter's elements.

    Raises:
        Refused: with code NAME_COLLISION, if two entries get the same name; with code UNSUPPORTED, if `state` is
            neither a module nor a mapping, or has lazy parameters or sharded tensors that are not accepted.
    """
    _check(state)
    is_module = isinstance(state, nn.Module)
    if isinstance(state, nn.Module):
        state = unwrap(state)
        if refusals := [*(find_unreadable(state) if ranges else find_partitioned(state)), *find_model_parallel(state)]:
            raise gathered(refusals)
        mark_all(state)
    paths = iter((entries := _entries(state)).items()) if isinstance(state, nn.Module) else _flatten(state, "")
    tensors: dict[str, torch.Tensor] = {}
    non_tensors: dict[str, Any] = {}
    of_megatron: list[Any] = []
    of_zero3: dict[int, torch.Tensor] = {}
    problems = []
    for path, value in paths:
        if MODULE in sys.modules and is_sharded(value):
            of_megatron.append(value)
            continue
        name = own_name(path) if is_module else path
        if name in tensors or name in non_tensors:
            problems.append(
                Refusal("NAME_COLLISION", f"two entries have this name; one of them is {path}", Where(None, name))
            )
        strange = _refuse_entry(name, value, of_module=is_module)
        if strange is not None:
            problems.append(strange)
        elif is_module and is_partitioned(value):
            # tied parameters remain a single object
            tensors[name] = of_zero3[id(value)] = of_zero3.get(id(value), own_range(value))
        elif isinstance(value, torch.Tensor) and not (is_module and name.endswith(EXTRA_STATE)):
            tensors[name] = value
        else:
            non_tensors[name] = value
    if problems:
        raise gathered(problems)
    if not isinstance(state, nn.Module):
        return _of_mapping(tensors, non_tensors, of_megatron, sharded=sharded)
    custom = tuple(custom_modules(state, entries))
    for path in (custom_module.full(name) for custom_module in custom for name in custom_module.derived):
        tensors[own_name(path)] = _copy(tensors[own_name(path)])
    weights = _find_quantized(state)
    unshown = (
        {} if any(custom_module.is_flat for custom_module in custom) else _unshown(state, entries, {*tensors, *weights})
    )
    return Leaves(tensors, non_tensors, weights, custom, tuple(find_kept_elsewhere(state)), unshown=unshown)


def _unshown(model: nn.Module, entries: Mapping[str, Any], names: Container[str]) -> dict[str, torch.Tensor]:
    """Return the parameters that no entry of a model's state dict contains, unless an entry has the name of the
    parameter.
    """
    shown = set(map(id, entries.values()))
    hidden_parameters = {own_name(name): each for name, each in model.named_parameters() if id(each) not in shown}
    return {name: parameter for name, parameter in hidden_parameters.items() if name not in names}


def _of_mapping(
    tensors: dict[str, torch.Tensor], non_tensors: dict[str, Any], of_megatron: list[Any], *, sharded: bool
) -> Leaves:
    """Return the `Leaves` (tensors and other entries) of a state dict.

    Raises:
        Refused: with code UNSUPPORTED, if FSDP2 is about to free a parameter; also any refusal that `_take_arrays` and
            `_with_shards` raise.
    """
    parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    if parameters and (freed := find_gathered(parameters)):
        raise gathered(freed)
    refusals = _take_arrays(tensors, non_tensors)
    state_leaves = (
        _with_shards(tensors, non_tensors, of_megatron, sharded=sharded)
        if of_megatron
        else Leaves(tensors, non_tensors)
    )
    return replace(state_leaves, refusals=refusals) if refusals else state_leaves


def _take_arrays(tensors: dict[str, torch.Tensor], non_tensors: dict[str, Any]) -> tuple[Refusal, ...]:
    """Move numpy arrays from `non_tensors` to `tensors`; return a refusal for each array that a load cannot fill.

    Raises:
        Refused: with code UNSUPPORTED, if torch does not support an array's dtype or strides.
    """
    arrays = {name: value for name, value in non_tensors.items() if is_array(value)}
    for name, array in arrays.items():
        tensors[name] = as_tensor(name, array)
        del non_tensors[name]
    return tuple(refusal for name, array in arrays.items() for refusal in read_only(name, array))


def _with_shards(
    tensors: dict[str, torch.Tensor], non_tensors: Mapping[str, Any], of_megatron: list[Any], *, sharded: bool
) -> Leaves:
    """Return the `Leaves` (tensors and other entries) of a state dict that contains Megatron's entries.

    Raises:
        Refused: with code UNSUPPORTED, if Megatron's entries are not accepted; with code NAME_COLLISION, if a key is
            also the name of an ordinary entry.
    """
    if not sharded:
        message = "only tx.load, tx.save and tx.async_save take the sharded state dict of a Megatron model"
        raise refuse("UNSUPPORTED", message, hint="Save the state, and work with the checkpoint.")
    megatron = megatron_state(of_megatron)
    colliding = [name for name in megatron.grids if name in tensors or name in non_tensors]
    message = "an entry has this name, and a sharded tensor has it as its key"
    problems = [*megatron.problems, *(Refusal("NAME_COLLISION", message, Where(None, name)) for name in colliding)]
    if problems:
        raise gathered(problems)
    tensors |= megatron.grids
    return Leaves(
        tensors, non_tensors, untouched=megatron.objects, sharded=bool(megatron.grids), factories=megatron.factories
    )


def _refuse_entry(name: str, value: Any, *, of_module: bool) -> Refusal | None:
    """Return a refusal if an entry can be neither saved nor loaded; None if it can be."""
    if is_lazy(value):
        message, hint = "it is a lazy parameter without a shape", "Run the model once first."
    elif _is_of_old_shards(value):
        message, hint = f"it is a {type(value).__name__}, which says neither mesh nor dim of its parts", _WITHOUT_SHARDS
    elif isinstance(value, torch.Tensor) and value.is_quantized:
        message, hint = (
            f"it has torch's own quantized type {value.dtype}",
            "Load and save the model before it is quantized.",
        )
    elif of_module and not isinstance(value, torch.Tensor) and not name.endswith(EXTRA_STATE):
        message, hint = f"the state dict of its module has a {type(value).__name__} here, not a tensor", _PLAIN_ONLY
    else:
        return None
    return Refusal("UNSUPPORTED", message, Where(None, name), hint)


def _is_of_old_shards(value: Any) -> bool:
    """Return whether an entry is torch's own `ShardedTensor`, a class that DTensors have replaced."""
    module = sys.modules.get(_OLD_SHARDS)
    return module is not None and isinstance(value, module.ShardedTensor)


def _entries(model: nn.Module) -> dict[str, Any]:
    try:
        with whole_states(model):
            entries: dict[str, Any] = model.state_dict(keep_vars=True)
    except TransaxleError:
        raise
    except Exception as error:  # hooks of a state dict may raise any exception
        raise refuse("UNSUPPORTED", f"{type(model).__name__}.state_dict() failed: {error!r}") from error
    return entries


def _copy(entry: torch.Tensor) -> torch.Tensor:
    """Copy a derived entry, because the entry may be a region of a parameter, or repeat one element (an expanded
    tensor).
    """
    return mark(entry.detach().clone(), part_of(entry))


def _check(state: object) -> None:
    """Refuse an object that is neither a model nor a state dict."""
    if not isinstance(state, nn.Module | Mapping):
        hint = "Give a torch.nn.Module, or a mapping of names to tensors."
        raise refuse(
            "UNSUPPORTED", f"this is neither a model nor a state dict, but of type {type(state).__name__}", hint=hint
        )


def _find_quantized(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {own_name(path): parameter for path, parameter in parameters if is_quantized(parameter)}


def unsavable(tensors: Mapping[str, torch.Tensor]) -> list[Refusal]:
    """Return a refusal for every tensor without bytes that could be saved, such as a meta tensor."""
    problems = []
    for name, tensor in tensors.items():
        if tensor.is_meta:
            message, hint = "it is on the meta device and has no values", "Load or initialise the model first."
        elif tensor.layout != torch.strided:
            message, hint = f"its layout is {tensor.layout}; only dense tensors can be used", "Give tensor.to_dense()."
        else:
            continue
        problems.append(Refusal("UNSUPPORTED", message, Where(None, name), hint))
    return problems


def unwritable(tensors: Mapping[str, torch.Tensor]) -> list[Refusal]:
    """Return a refusal for every tensor that cannot store a separate value for each element, such as an expanded
    tensor.
    """
    problems = []
    for _, name, tensor in local_parts(tensors):
        local = local_of(tensor)
        if local.layout != torch.strided:
            message, hint = f"its layout is {local.layout}; only dense tensors can be used", "Give a dense tensor."
        elif any(size > 1 and not step for size, step in zip(local.shape, local.stride(), strict=True)):
            message, hint = "several of its elements share memory (`expand`)", "Give tensor.contiguous()."
        else:
            continue
        problems.append(Refusal("UNSUPPORTED", message, Where(None, name), hint))
    return problems


def find_ties(tensors: Mapping[str, torch.Tensor], present: Container[str]) -> dict[str, str]:
    """Return name -> present name, for each absent name whose tensor also has a name in `present`.

    Args:
        tensors: name -> tensor of a model; a tied parameter is a single object under several names.
        present: names of tensors whose values exist.
    """
    loaded = {id(tensor): name for name, tensor in tensors.items() if name in present}
    return {name: loaded[id(t)] for name, t in tensors.items() if name not in present and id(t) in loaded}


def _flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for the innermost values of nested mappings and lists."""
    if isinstance(value, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = iter(enumerate(value))
    else:
        yield path, value
        return
    for key, child in items:
        yield from _flatten(child, f"{path}{_SEPARATOR}{key}" if path else str(key))


def set_extra_state(model: nn.Module, name: str, state: Any) -> None:
    """Set the extra state of a module.

    Args:
        model: the whole model.
        name: full name of the module's extra state in the model, as `leaves` returns it.
        state: the state that the module's `get_extra_state` returned when it was saved.
    """
    owner = name.removesuffix(EXTRA_STATE).removesuffix(_SEPARATOR)
    next(module for path, module in unwrap(model).named_modules() if own_name(path) == owner).set_extra_state(state)


def is_array(value: object) -> bool:
    """Return whether an entry is a numpy array of numbers (and not of strings or objects)."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.kind not in "USMm"


def as_tensor(name: str, array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor in the same memory; a read-only array is copied.

    Raises:
        Refused: with code UNSUPPORTED, if torch does not support the array's dtype or strides.
    """
    if not array.dtype.isnative or any(step < 0 for step in array.strides):
        message = f"an array of {array.dtype} with strides {array.strides} is no memory that torch can share"
        raise refuse("UNSUPPORTED", message, tensor=name, hint="Give numpy.ascontiguousarray(array) of a native type.")
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or array.dtype.names is not None:
        raise refuse("UNSUPPORTED", f"torch has no dtype for arrays of {array.dtype}", tensor=name)
    bits = array if array.dtype.kind in _KINDS else array.view(f"u{array.dtype.itemsize}")
    # avoids a warning of torch about read-only memory
    shared = torch.from_numpy(bits if bits.flags.writeable else bits.copy())
    return shared.view(dtype)


def read_only(name: str, array: np.ndarray) -> list[Refusal]:
    """Return a list with one refusal if an array is read-only, because a load cannot fill it; otherwise return an empty
    list.
    """
    if array.flags.writeable:
        return []
    hint = "Give an array that can be written, such as array.copy()."
    return [Refusal("UNSUPPORTED", "the array is read-only", Where(None, name), hint)]


def common_config(
    state: State, user_config: Mapping[str, Any] | None, world: World, *, whole: bool = False
) -> Mapping[str, Any] | None:
    """Return a model's config, which is the same on all ranks; all ranks must call this function.

    Args:
        state: the model, for example a transformers model, which has a config.
        user_config: the config that the user gave; None means the model's own config, from the first rank that has one.
        world: all ranks that take part.
        whole: whether to include values that equal the defaults of the config class, which config.json omits.
    """
    own_or_given = own_config(state, whole=whole) if user_config is None else user_config
    return next((each for each in world.gather(own_or_given, repr) if each is not None), None)


def own_config(state: State, *, whole: bool = False) -> Mapping[str, Any] | None:
    """Return a model's config as in config.json, or with all default values if `whole`; None if the model has no
    config.
    """
    model = innermost(state) if isinstance(state, nn.Module) else state
    config = getattr(model, "config", None)
    to_dict = None if whole else getattr(config, "to_diff_dict", None)
    as_mapping = to_dict or getattr(config, "to_dict", None)
    if as_mapping is None:
        return None
    mapping = dict(as_mapping())
    if not mapping.get("architectures"):
        mapping["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    return mapping


def sizes_that_differ(state: State, stored: Mapping[str, Any]) -> str:
    """Return a text that lists the sizes that differ between the model's and the source's config; "" if no size
    differs.
    """
    config = getattr(innermost(state) if isinstance(state, nn.Module) else state, "config", None)
    own_sizes = config.to_dict() if isinstance(config, Configuration) else {}
    pairs = [(key, value, stored[key]) for key, value in own_sizes.items() if key in stored and type(value) is int]
    unlike = [f"{key} is {here} here, {there} in the source" for key, here, there in pairs if here != there]
    if len(unlike) > _LISTED:
        unlike[_LISTED:] = [f"{len(unlike) - _LISTED} more"]
    return "; ".join(unlike)
