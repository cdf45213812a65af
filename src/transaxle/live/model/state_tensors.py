"""Leaves: the tensors of a model or of a state dict, by the names a checkpoint knows them by; and the model's config.

Wrappers put segments of their own into names (`_orig_mod`, `_checkpoint_wrapped_module`, `_fsdp_wrapped_module`, DDP's
`module`); these are no part of the model and are taken out, segment by segment. numpy arrays of a state dict are
tensors in the same memory: they are saved like any tensor, and filled in place.

**Megatron's sharded state dicts**: what `model.sharded_state_dict()` says of this rank's parameters, as grids of
shards.

A `ShardedTensor` is a box of a whole tensor: several of them, of other layers or experts, or of the gate and the up
projection, have one key. A `ShardedTensorFactory` makes such boxes of a parameter: views of it, or copies that it can
put together again. Megatron is never imported: its objects exist only where it has been imported already.
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
    Island,
    gathered_for_now,
    is_taken_apart,
    islands,
    kept_elsewhere,
    own_range,
    partitioned,
    refused_parts,
    shared_out,
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
"""Where Megatron defines its objects."""
_ODD = "Give the state dict of model.sharded_state_dict()."


def is_sharded(value: object) -> bool:
    """Tell whether an entry is one of Megatron's own."""
    mapping = sys.modules.get(MODULE)
    return mapping is not None and isinstance(value, (mapping.ShardedBase, mapping.LocalNonpersistentObject))


@dataclass(frozen=True)
class Factory:
    """A parameter of which Megatron has made copies: what is written into these must be put together again."""

    key: str
    """Its key."""
    parameter: torch.Tensor
    """The parameter."""
    merge: Any
    """Makes the parameter's values of the copies, given as they were built."""
    built: Any
    """The copies, in lists and dicts."""

    def finish(self) -> None:
        """Write what the copies hold into the parameter."""
        with torch.no_grad():
            self.parameter.copy_(self.merge(_data_of(self.built)))


@dataclass(frozen=True)
class MegatronState:
    """What a sharded state dict holds on this rank."""

    grids: Mapping[str, torch.Tensor]
    """Its tensors, by key."""
    objects: tuple[str, ...]
    """Keys of what is no tensor: extra states of modules, random states."""
    factories: tuple[Factory, ...]
    """Parameters that are to be put together after a load."""
    problems: list[Refusal]
    """Why some tensor can be neither loaded nor saved."""


@dataclass(frozen=True)
class _Shard:
    """One `ShardedTensor`."""

    cell: Cell
    """Where it lies in the whole tensor."""
    data: torch.Tensor
    """Its values, with all dims of the whole."""
    spare: bool
    """It is a copy of another rank's."""
    padded: bool
    """The whole may have more rows than a checkpoint."""


def megatron_state(values: Iterable[Any]) -> MegatronState:
    """Read the entries of a sharded state dict.

    Args:
        values: those for which `is_sharded` holds.
    """
    mapping = sys.modules[MODULE]
    shards: dict[str, list[Any]] = {}
    objects: list[str] = []
    factories: list[Factory] = []
    problems: list[Refusal] = []
    for value in values:
        built = value
        if isinstance(value, mapping.ShardedTensorFactory):
            built, copied = _built(value, problems)
            if copied:
                factories.append(Factory(value.key, value.data, value.merge_fn, built))
        for each in _nested_values(built):
            if isinstance(each, mapping.ShardedTensor):
                shards.setdefault(each.key, []).append(each)
            elif isinstance(each, mapping.ShardedObject):
                objects.append(each.key)
    grids: dict[str, torch.Tensor] = {}
    for key, alike in shards.items():
        unusable = [message for each in alike if (message := _unusable(each)) is not None]
        if unusable:
            problems.append(Refusal("UNSUPPORTED", unusable[0], Where(None, key), _ODD))
        else:
            _add(key, alike, grids, problems)
    return MegatronState(grids, tuple(dict.fromkeys(objects)), tuple(factories), problems)


def _built(factory: Any, problems: list[Refusal]) -> tuple[Any, bool]:
    """Return what a factory makes of its parameter, and whether these are copies of it."""
    try:
        built = factory.build()
    except Exception as error:  # noqa: BLE001 - it is Megatron's, or the user's
        message = f"its factory failed: {error!r}"
        problems.append(Refusal("UNSUPPORTED", message, Where(None, factory.key)))
        return None, False
    data = [each.data for each in _nested_values(built) if isinstance(getattr(each, "data", None), torch.Tensor)]
    own = factory.data
    if own is None or own.is_meta:
        return built, False
    memory = own.untyped_storage().data_ptr()
    return built, any(each.numel() and each.untyped_storage().data_ptr() != memory for each in data)


def _nested_values(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _nested_values(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nested_values(item)
    else:
        yield value


def _data_of(value: Any) -> Any:
    """Return what a factory has built with the tensors in place of what describes them."""
    if isinstance(value, Mapping):
        return {key: _data_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_data_of(item) for item in value]
    return value.unwrap() if hasattr(value, "unwrap") else value.data


def _unusable(shard: Any) -> str | None:
    """Return why a `ShardedTensor` can be neither loaded nor saved; None where it can."""
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


def _add(key: str, alike: list[Any], grids: dict[str, torch.Tensor], problems: list[Refusal]) -> None:
    """Put the shards of one key together; those without elements hold nothing."""
    shapes = dict.fromkeys(tuple(each.global_shape) for each in alike)
    dtypes = dict.fromkeys(each.data.dtype for each in alike)
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
        grids[key] = alike[0].data.detach()
        return
    shards = [_shard(each) for each in alike if prod(each.data.shape)]
    by_cell: dict[Cell, _Shard] = {}
    for shard in shards:
        twin = by_cell.setdefault(shard.cell, shard)
        if twin is not shard and twin.data.data_ptr() != shard.data.data_ptr():
            message = "two tensors of this rank are the same part of it"
            problems.append(Refusal("NAME_COLLISION", message, Where(None, key), "Give each part once."))
            return
    if not by_cell:
        return
    held = tuple(tuple(sorted({cell[dim][0] for cell in by_cell})) for dim in range(len(shape)))
    if _overlap(held) or by_cell.keys() != set(cells_of(held)):
        message = (
            f"this rank's {len(by_cell)} shards of it form no grid: not every combination of their intervals is one"
        )
        problems.append(Refusal("UNSUPPORTED", message, Where(None, key), _ODD))
        return
    cells = [by_cell[cell] for cell in cells_of(held)]
    spare, padded = any(each.spare for each in cells), all(each.padded for each in cells)
    grids[key] = ShardGrid(shape, held, [each.data for each in cells], spare=spare, padded=padded)


def _shard(shard: Any) -> _Shard:
    data = shard.data.detach()[(None,) * shard.prepend_axis_num]
    spans = ((start, start + size) for start, size in zip(shard.global_offset, data.shape, strict=True))
    replica = shard.replica_id
    main = replica == 0 if isinstance(replica, int) else not any(replica)
    padded = bool(shard.allow_shape_mismatch) and not shard.prepend_axis_num
    return _Shard(tuple((span,) for span in spans), data, not main, padded)


def _overlap(held: Iterable[Intervals]) -> bool:
    return any(first[1] > second[0] for spans in held for first, second in pairwise(spans))


State = nn.Module | Mapping[str, Any]
"""A model, or a state dict, nested or flat."""
_SEPARATOR = "."
_OLD_SHARDS = "torch.distributed._shard.sharded_tensor"
_WITHOUT_SHARDS = (
    "Give the model itself, also under FSDP1; or build it with FullyShardedDataParallel(…, device_mesh=…): then its "
    "sharded state dict has DTensors."
)
_PLAIN_ONLY = "This module keeps its values in extra state: load and save the model before it is quantized."
_KINDS = "biufc"
"""What `torch.from_numpy` takes by itself."""
_LISTED = 4
"""Keys that are named where two configs differ."""


@dataclass(frozen=True)
class Leaves:
    """What a model or state dict holds."""

    tensors: Mapping[str, torch.Tensor]
    """Tensors and DTensors, by name; parameters are the parameters themselves, but for those of `islands`."""
    others: Mapping[str, Any]
    """Everything else, by name: of a state dict what is no tensor, of a model the extra states of its modules."""
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Quantized parameters of a model; of these `tensors` has codes and scales, each under a name of its own."""
    islands: tuple[Island, ...] = ()
    """Modules of a model whose entries in `tensors` are copies; `settle` puts their values into place."""

    kept: tuple[Refusal, ...] = ()
    """Why values that are written into them would be lost."""

    copies: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """What takes the values of one of `tensors` too: copies of a base's weights that an adapter trains."""
    untouched: tuple[str, ...] = ()
    """Names of what it holds beside `tensors`: a model's adapters, or their base; the objects of a sharded state dict.
    """
    sharded: bool = False
    """Whether some of `tensors` are grids of a sharded state dict."""
    factories: tuple[Factory, ...] = ()
    """Parameters of which `tensors` has copies, of a sharded state dict."""
    unshown: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Parameters that the state dict of a model shows in another form under other names, as a fused one in parts; by
    their names in the model.
    """

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """What an optimizer may have been given, by name."""
        return {**self.tensors, **self.weights, **self.unshown}


def leaves(state: State, *, sharded: bool = False, ranges: bool = False) -> Leaves:
    """Collect the leaves of a model or state dict.

    Args:
        state: a module (its persistent buffers included), or a mapping whose leaves may be anything; nested mappings
            and lists are flattened with `.`. Megatron's sharded tensors go by their keys.
        sharded: take these, as grids of shards.
        ranges: take the parameters of DeepSpeed ZeRO-3, as ranges of their elements.

    Raises:
        Refused: NAME_COLLISION where two paths have one name; UNSUPPORTED for what is no state, for lazy parameters,
            and for sharded tensors that are not taken.
    """
    _check(state)
    clean = isinstance(state, nn.Module)
    if isinstance(state, nn.Module):
        state = unwrap(state)
        if taken := [*(refused_parts(state) if ranges else partitioned(state)), *shared_out(state)]:
            raise gathered(taken)
        mark_all(state)
    found = iter((entries := _entries(state)).items()) if isinstance(state, nn.Module) else _named_values(state, "")
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    of_megatron: list[Any] = []
    of_zero3: dict[int, torch.Tensor] = {}
    problems = []
    for path, value in found:
        if MODULE in sys.modules and is_sharded(value):
            of_megatron.append(value)
            continue
        name = own_name(path) if clean else path
        if name in tensors or name in others:
            problems.append(
                Refusal("NAME_COLLISION", f"two entries have this name; one of them is {path}", Where(None, name))
            )
        strange = _strange(name, value, of_module=clean)
        if strange is not None:
            problems.append(strange)
        elif clean and is_taken_apart(value):
            tensors[name] = of_zero3[id(value)] = of_zero3.get(id(value), own_range(value))  # tied ones stay one
        elif isinstance(value, torch.Tensor) and not (clean and name.endswith(EXTRA_STATE)):
            tensors[name] = value
        else:
            others[name] = value
    if problems:
        raise gathered(problems)
    if not isinstance(state, nn.Module):
        return _of_mapping(tensors, others, of_megatron, sharded=sharded)
    apart = tuple(islands(state, entries))
    for path in (island.full(name) for island in apart for name in island.derived):
        tensors[own_name(path)] = _copy(tensors[own_name(path)])
    weights = _quantized(state)
    unshown = {} if any(island.is_flat for island in apart) else _unshown(state, entries, {*tensors, *weights})
    return Leaves(tensors, others, weights, apart, tuple(kept_elsewhere(state)), unshown=unshown)


def _unshown(model: nn.Module, entries: Mapping[str, Any], names: Container[str]) -> dict[str, torch.Tensor]:
    """Return the parameters that no entry of a model's state dict is, but for those that have one of their name."""
    shown = set(map(id, entries.values()))
    apart = {own_name(name): each for name, each in model.named_parameters() if id(each) not in shown}
    return {name: parameter for name, parameter in apart.items() if name not in names}


def _of_mapping(
    tensors: dict[str, torch.Tensor], others: dict[str, Any], of_megatron: list[Any], *, sharded: bool
) -> Leaves:
    """Return the leaves of a state dict.

    Raises:
        Refused: UNSUPPORTED for parameters that FSDP2 is about to free, and see `_take_arrays`, `_with_shards`.
    """
    parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    if parameters and (freed := gathered_for_now(parameters)):
        raise gathered(freed)
    kept = _take_arrays(tensors, others)
    own = _with_shards(tensors, others, of_megatron, sharded=sharded) if of_megatron else Leaves(tensors, others)
    return replace(own, kept=kept) if kept else own


def _take_arrays(tensors: dict[str, torch.Tensor], others: dict[str, Any]) -> tuple[Refusal, ...]:
    """Take numpy's arrays among the other entries as tensors; return why some of them cannot be filled.

    Raises:
        Refused: UNSUPPORTED for arrays that torch cannot hold.
    """
    arrays = {name: value for name, value in others.items() if is_array(value)}
    for name, array in arrays.items():
        tensors[name] = as_tensor(name, array)
        del others[name]
    return tuple(refusal for name, array in arrays.items() for refusal in read_only(name, array))


def _with_shards(
    tensors: dict[str, torch.Tensor], others: Mapping[str, Any], of_megatron: list[Any], *, sharded: bool
) -> Leaves:
    """Return the leaves of a state dict in which some are Megatron's.

    Raises:
        Refused: UNSUPPORTED where these are not taken, and see `megatron_state`; NAME_COLLISION where a key is also
            the name of another entry.
    """
    if not sharded:
        message = "only tx.load, tx.save and tx.async_save take the sharded state dict of a Megatron model"
        raise refuse("UNSUPPORTED", message, hint="Save it, and work with the checkpoint.")
    found = megatron_state(of_megatron)
    both = [name for name in found.grids if name in tensors or name in others]
    message = "an entry has this name, and a sharded tensor has it as its key"
    problems = [*found.problems, *(Refusal("NAME_COLLISION", message, Where(None, name)) for name in both)]
    if problems:
        raise gathered(problems)
    tensors |= found.grids
    return Leaves(tensors, others, untouched=found.objects, sharded=bool(found.grids), factories=found.factories)


def _strange(name: str, value: Any, *, of_module: bool) -> Refusal | None:
    """Return why an entry can be neither saved nor loaded; None where it can."""
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
    """Tell whether an entry is what sharded state dicts had before DTensors: torch's own type, not Megatron's."""
    module = sys.modules.get(_OLD_SHARDS)
    return module is not None and isinstance(value, module.ShardedTensor)


def _entries(model: nn.Module) -> dict[str, Any]:
    try:
        with whole_states(model):
            found: dict[str, Any] = model.state_dict(keep_vars=True)
    except TransaxleError:
        raise
    except Exception as error:  # whatever hooks of others raise
        raise refuse("UNSUPPORTED", f"{type(model).__name__}.state_dict() failed: {error!r}") from error
    return found


def _copy(entry: torch.Tensor) -> torch.Tensor:
    """Return a derived entry in memory of its own: it may be a part of a parameter, or one element many times."""
    return mark(entry.detach().clone(), part_of(entry))


def _check(state: object) -> None:
    """Refuse what is neither model nor state dict."""
    if not isinstance(state, nn.Module | Mapping):
        hint = "Give a torch.nn.Module, or a mapping of names to tensors."
        raise refuse(
            "UNSUPPORTED", f"this is neither a model nor a state dict, but of type {type(state).__name__}", hint=hint
        )


def _quantized(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {own_name(path): parameter for path, parameter in named if is_quantized(parameter)}


def unsavable(tensors: Mapping[str, torch.Tensor]) -> list[Refusal]:
    """Return a refusal for every tensor that has no bytes to be saved."""
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
    """Return a refusal for every tensor that cannot take values: not one for each element."""
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


def tied(tensors: Mapping[str, torch.Tensor], present: Container[str]) -> dict[str, str]:
    """Return the names that need no values of their own: their tensor is that of another name, which has them.

    Args:
        tensors: a model's, by name; tied parameters are one object under several names.
        present: names that have values.
    """
    loaded = {id(tensor): name for name, tensor in tensors.items() if name in present}
    return {name: loaded[id(t)] for name, t in tensors.items() if name not in present and id(t) in loaded}


def _named_values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of nested mappings and lists."""
    if isinstance(value, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = iter(enumerate(value))
    else:
        yield path, value
        return
    for key, child in items:
        yield from _named_values(child, f"{path}{_SEPARATOR}{key}" if path else str(key))


def set_extra_state(model: nn.Module, name: str, state: Any) -> None:
    """Hand an extra state to the module that it belongs to.

    Args:
        model: the whole model.
        name: the state's name, see `leaves`.
        state: as the module's `get_extra_state` gave it.
    """
    owner = name.removesuffix(EXTRA_STATE).removesuffix(_SEPARATOR)
    next(module for path, module in unwrap(model).named_modules() if own_name(path) == owner).set_extra_state(state)


def is_array(value: object) -> bool:
    """Tell whether an entry is an array of numbers; texts and objects are none."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.kind not in "USMm"


def as_tensor(name: str, array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor in the same memory; of one that is read-only, a copy.

    Raises:
        Refused: UNSUPPORTED for a type or strides that torch has not.
    """
    if not array.dtype.isnative or any(step < 0 for step in array.strides):
        message = f"an array of {array.dtype} with strides {array.strides} is no memory that torch can share"
        raise refuse("UNSUPPORTED", message, tensor=name, hint="Give numpy.ascontiguousarray(array) of a native type.")
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or array.dtype.names is not None:
        raise refuse("UNSUPPORTED", f"torch has no dtype for arrays of {array.dtype}", tensor=name)
    bits = array if array.dtype.kind in _KINDS else array.view(f"u{array.dtype.itemsize}")
    shared = torch.from_numpy(bits if bits.flags.writeable else bits.copy())  # torch warns of memory that is read-only
    return shared.view(dtype)


def read_only(name: str, array: np.ndarray) -> list[Refusal]:
    """Return why values that are written into an array would be lost."""
    if array.flags.writeable:
        return []
    hint = "Give an array that can be written, such as array.copy()."
    return [Refusal("UNSUPPORTED", "the array is read-only", Where(None, name), hint)]


def shared_config(
    state: State, given: Mapping[str, Any] | None, world: World, *, whole: bool = False
) -> Mapping[str, Any] | None:
    """Return the config of a model, the same on all ranks; collective.

    Args:
        state: the model; a transformers model has a config.
        given: what the user says it is; None: the model's own, on the first rank that has one.
        world: the ranks.
        whole: with what is as the class has it by default, which config.json leaves out.
    """
    own = own_config(state, whole=whole) if given is None else given
    return next((each for each in world.gather(own, repr) if each is not None), None)


def own_config(state: State, *, whole: bool = False) -> Mapping[str, Any] | None:
    """Return the config that a model carries, as config.json holds it, or the `whole` of it; None where it has none."""
    model = innermost(state) if isinstance(state, nn.Module) else state
    config = getattr(model, "config", None)
    said = None if whole else getattr(config, "to_diff_dict", None)
    as_mapping = said or getattr(config, "to_dict", None)
    if as_mapping is None:
        return None
    mapping = dict(as_mapping())
    if not mapping.get("architectures"):
        mapping["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    return mapping


def sizes_that_differ(state: State, stored: Mapping[str, Any]) -> str:
    """Return the sizes that a model's config and that of a source both give, and give differently; "" for none."""
    config = getattr(innermost(state) if isinstance(state, nn.Module) else state, "config", None)
    mine = config.to_dict() if isinstance(config, Configuration) else {}
    pairs = [(key, value, stored[key]) for key, value in mine.items() if key in stored and type(value) is int]
    unlike = [f"{key} is {here} here, {there} in the source" for key, here, there in pairs if here != there]
    if len(unlike) > _LISTED:
        unlike[_LISTED:] = [f"{len(unlike) - _LISTED} more"]
    return "; ".join(unlike)
