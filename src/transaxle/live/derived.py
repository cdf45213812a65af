"""State dict entries that do not share memory with the model's parameters, and how values loaded into them still reach
the model.

**Derived entries** are entries of a state dict that a module computes from its parameters, instead of returning the
parameters themselves.

For example, torchtitan's fused attention returns one weight as `wq`, `wk` and `wv`, and state dict hooks may rename and
pack entries. Values written into a derived entry reach the model only through the module's own `load_state_dict`. An
entry is treated as a parameter only if the entry and the parameter are the same memory (`Extent`). A copy looks like
the parameter, but values written into the copy are lost.

FSDP1 stores flat parameters, and its state dict returns unflattened copies, in a form that the user can choose. This
module always asks FSDP1 for the full state dict on every rank: its names and values do not depend on the wrapping, and
`load_state_dict` accepts it.

**Settling** (`settle`): the module's own `load_state_dict` moves loaded values from derived entries into the
parameters.

Before the load, a trial tests whether this works. The trial writes test values into the module, takes its state dict,
writes different values, and loads the state dict. If an entry does not have its test values again, a real load would
lose its values. At the end of the trial, the original values of the module are restored. After the real load, the
module's state dict must contain the loaded values.

**Keepers** are libraries that store the values of a model's parameters in a second place, apart from the parameters.

A library of this kind silently overwrites a loaded parameter at the next forward pass or optimizer step. Keepers are
recognised by attributes that they set on parameters and modules; none of the libraries is imported.

DeepSpeed ZeRO-3 empties the module's parameters. Each rank then stores a range of the parameters' elements, in the
dtype of the model's computations. A save of a ZeRO-3 model reads these ranges from the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from transaxle.axes.notation.name import own_name
from transaxle.errors import Refusal, Where, gathered
from transaxle.quant.entries import entries, is_quantized
from transaxle.torch_tensors import TO_LOCAL, Part, byte_view, mark, raw_local, same_bytes

_SEPARATOR = "."
EXTRA_STATE = "_extra_state"
"""Last segment of the state dict key under which a module's `get_extra_state` is stored."""


def is_fsdp1(model: nn.Module) -> bool:
    """Return whether FSDP1 wraps any module of a model."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


@contextmanager
def whole_states(model: nn.Module) -> Iterator[None]:
    """Within the block, a model under FSDP1 returns full state dicts on all ranks; a model without FSDP1 is not
    affected.
    """
    if not is_fsdp1(model):
        yield
        return
    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        yield


@dataclass(frozen=True, slots=True)
class Extent:
    """The memory range of a plain tensor."""

    storage: int
    """Identity of the tensor's storage (meta tensors have a storage too); it is valid while the tensor exists."""
    start: int
    """Offset of the tensor's first byte in the storage."""
    layout: tuple[Any, ...]
    """Shape, strides, dtype, and the tensor's lazy conjugate and negative flags."""
    size: int
    """Number of bytes from the first to the last element if the tensor is dense; otherwise 0."""


def pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that make up this rank's shard of a tensor."""
    if is_quantized(tensor):
        return [_local(entry) for entry in entries(tensor).values()]
    plain, open_ = [], [_local(tensor)]
    while open_:
        outer = open_.pop()
        flatten = getattr(outer, "__tensor_flatten__", None)
        if flatten is None or type(outer) in (torch.Tensor, torch.nn.Parameter):
            plain.append(outer)
        else:
            open_ += [inner for name in flatten()[0] if isinstance(inner := getattr(outer, name), torch.Tensor)]
    return plain


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, through `to_local` if the tensor has that method; no new tensor is made if
    possible.
    """
    to_local = None if isinstance(tensor, DTensor) else getattr(tensor, TO_LOCAL, None)
    return raw_local(tensor) if to_local is None else to_local()


def extent(piece: torch.Tensor) -> Extent:
    """Return the memory range of a plain tensor; a tensor without its own storage is identified by its Python
    object.
    """
    kind = (tuple(piece.shape), piece.dtype, piece.device.type)
    try:
        storage = int(piece.untyped_storage()._cdata)
        strides = piece.stride()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or a tensor class that does not expose its memory
        return Extent(id(piece), 0, kind, 0)
    item = piece.element_size()
    reads = (piece.is_conj(), piece.is_neg())
    size = piece.numel() * item if _dense(piece.shape, strides) and not any(reads) else 0
    live = tuple(stride for stride, length in zip(strides, piece.shape, strict=True) if length > 1)
    return Extent(storage, int(piece.storage_offset()) * item, (*kind, live, *reads), size)


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor's elements fill a memory range without gaps, in any order of dims."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def find_cover(whole: Extent, parts: Iterable[Extent]) -> list[Extent] | None:
    """Return those memory ranges in `parts` that together fill the whole range, without covering a byte twice; None if
    there are none.

    Args:
        whole: memory range of a parameter.
        parts: memory ranges of state dict entries.
    """
    contained = sorted(
        {
            part
            for part in parts
            if part.storage == whole.storage
            and part.size
            and whole.start <= part.start
            and part.start + part.size <= whole.start + whole.size
        },
        key=lambda part: part.start,
    )
    end = whole.start
    for part in contained:
        if part.start != end:
            return None
        end += part.size
    return contained if contained and end == whole.start + whole.size else None


@dataclass(frozen=True, eq=False)
class CustomModule:
    """The smallest module whose state dict has derived entries or omits parameters."""

    path: str
    """Path of the module in the model, including wrapper segments such as `_orig_mod`."""
    module: nn.Module
    """The module object itself."""
    derived: tuple[str, ...]
    """Names of the derived entries (copies) in the module's state dict."""
    hidden: Mapping[str, torch.Tensor]
    """Name in the module -> parameter or persistent buffer that no entry of the state dict contains."""

    @property
    def is_flat(self) -> bool:
        """Whether FSDP1 wraps the module. If FSDP1 does, the module's state dict entries are gathered copies, for which
        no trial load is needed.
        """
        return is_fsdp1(self.module)

    @property
    def is_meta(self) -> bool:
        """Whether any tensor of the module is on torch's meta device."""
        return any(tensor.is_meta for _, tensor in persistent(self.module))

    def state(self) -> dict[str, Any]:
        """Return the module's state dict with `keep_vars`, so that entries that are parameters are the parameter
        objects themselves.
        """
        with whole_states(self.module):
            state: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Call the module's `load_state_dict` with `strict=False`.

        Raises:
            RuntimeError: if the module's `load_state_dict` raises it.
        """
        with whole_states(self.module):
            self.module.load_state_dict(dict(state), strict=False)

    def full(self, name: str) -> str:
        """Return the full name, in the model, of a tensor with the given name in this module."""
        return join_path(self.path, name)


def join_path(path: str, name: str) -> str:
    """Join a module path, which may be empty, and a name with a dot."""
    return f"{path}{_SEPARATOR}{name}" if path else name


def persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for parameters and persistent buffers; a tied tensor is yielded once under each of its
    names.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and name not in owner._non_persistent_buffers_set:
                yield join_path(path, name), tensor


def custom_modules(model: nn.Module, state: Mapping[str, Any]) -> list[CustomModule]:
    """Find the modules whose state dicts have derived entries or omit parameters.

    Args:
        model: the model.
        state: the model's state dict, made with `keep_vars`.
    """
    if is_fsdp1(model):
        tensors = tuple(name for name, value in state.items() if _is_entry(name, value))
        return [CustomModule("", model, tensors, dict(persistent(model)))]
    derived, apart = _differences(model, state)
    return list(_smallest_modules(model, "", derived, apart)) if derived or apart else []


def _smallest_modules(
    module: nn.Module, path: str, derived: tuple[str, ...], apart: Mapping[str, torch.Tensor]
) -> Iterator[CustomModule]:
    """Yield the smallest submodules that contain all derived entries and omitted tensors of a module."""
    children = []
    for name, child in module.named_children():
        of_child = _differences(child, child.state_dict(keep_vars=True))
        if any(of_child):
            children.append((name, child, *of_child))
    names = {f"{name}{_SEPARATOR}{key}" for name, _, keys, _ in children for key in keys}
    tensors = {id(tensor) for _, _, _, child_apart in children for tensor in child_apart.values()}
    if names == set(derived) and tensors >= {id(tensor) for tensor in apart.values()}:
        for name, child, keys, child_apart in children:
            yield from _smallest_modules(child, join_path(path, name), keys, child_apart)
    else:
        yield CustomModule(path, module, derived, apart)


def _differences(module: nn.Module, state: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, torch.Tensor]]:
    """Return the names of state dict entries that are copies, and the module's tensors that no entry contains."""
    own_tensors = dict(persistent(module))
    tensors = {id(tensor): tensor for tensor in (*own_tensors.values(), *module.buffers())}
    entries = {id(value) for value in state.values() if id(value) in tensors}
    of_tensors = {key: _extents(tensor) for key, tensor in tensors.items() if key not in entries}
    of_entries = {
        name: _extents(value) for name, value in state.items() if _is_entry(name, value) and id(value) not in tensors
    }
    # A different tensor object may share the memory (`detach()`), and several entries may be regions of one tensor.
    parts = set(chain.from_iterable(of_entries.values()))
    module_memory = set(chain.from_iterable(of_tensors.values()))
    if of_entries:
        module_memory.update(*(_extents(tensors[key]) for key in entries))
    shown_memory = parts & module_memory
    for whole in chain.from_iterable(of_tensors.values()):
        if whole not in shown_memory and whole.size:
            views = find_cover(whole, parts)
            if views is not None:
                shown_memory.update((whole, *views))
    derived = tuple(name for name, extents in of_entries.items() if not shown_memory.issuperset(extents))
    hidden = {key for key, extents in of_tensors.items() if not shown_memory.issuperset(extents)}
    return derived, {name: tensor for name, tensor in own_tensors.items() if id(tensor) in hidden}


def _is_entry(name: str, value: Any) -> bool:
    """Return whether a load fills a state dict entry, that is, whether the entry is a tensor but not extra state."""
    return isinstance(value, torch.Tensor) and not name.endswith(EXTRA_STATE)


def _extents(tensor: torch.Tensor) -> list[Extent]:
    return [extent(piece) for piece in pieces(tensor) if piece.numel()]


_NO_STATE = "its optimizer state has no name that another layout could use"
_OTHER_FORM = 'Leave optimizer= out, and keep the optimizer\'s state with extra={"optimizer": optimizer}.'
_FLAT = "Shard the model with fully_shard (FSDP2), or omit optimizer= and use FSDP.optim_state_dict."
_SEED = 20_260
_LOWEST, _COUNT = 1, 62
"""Range of the test values: integers that fit every integer dtype and are not NaN in any 8-bit float dtype."""
_HINT = "Load into the module before it is wrapped or fused, or report this to the author of its state_dict."


def find_unloadable(custom_modules: Iterable[CustomModule]) -> tuple[list[Refusal], tuple[str, ...]]:
    """Find entries that the modules' own `load_state_dict` cannot load; modules on the meta device are not tested.

    Args:
        custom_modules: the `CustomModule`s of a model; see `Leaves`.

    Returns:
        refusals, and the names of parameters and buffers that the state dict omits and that a load leaves unchanged.
    """
    problems, omitted = [], list[str]()
    for custom_module in custom_modules:
        if custom_module.is_flat or (custom_module.derived and custom_module.is_meta):
            continue
        refusals, names = try_loading(custom_module) if custom_module.derived else ([], tuple(custom_module.hidden))
        problems += refusals
        omitted += (own_name(custom_module.full(name)) for name in names)
    return problems, tuple(dict.fromkeys(omitted))


def indirectly_filled(custom_modules: Iterable[CustomModule], loaded: Container[str]) -> set[str]:
    """Return the names of parameters and buffers that the state dict omits, but that a module fills from loaded
    entries.

    Args:
        custom_modules: the `CustomModule`s of a model.
        loaded: names of the entries that are loaded.
    """
    return {
        own_name(custom_module.full(name))
        for custom_module in custom_modules
        if custom_module.derived and all(own_name(custom_module.full(key)) in loaded for key in custom_module.derived)
        for name in custom_module.hidden
    }


def settle(custom_modules: Iterable[CustomModule], tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the values of derived entries into their modules; all ranks that share a module must call this function.

    Args:
        custom_modules: the `CustomModule`s of a model.
        tensors: tensor name -> tensor of the model; see `Leaves`. Derived entries are copies with the loaded values.

    Raises:
        Refused: with code UNSUPPORTED, if a module's state dict does not contain the loaded values afterwards.
    """
    problems = []
    for custom_module in custom_modules:
        if not custom_module.derived:
            continue
        loaded = {key: tensors[own_name(custom_module.full(key))] for key in custom_module.derived}
        with torch.no_grad():
            custom_module.load({**custom_module.state(), **loaded})
            shown = custom_module.state()
        for key, values in loaded.items():
            if key not in shown or not same(shown[key].detach(), values):
                message = f"{type(custom_module.module).__name__}.load_state_dict stored other values than it was given"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, own_name(custom_module.full(key)))))
    if problems:
        raise gathered(problems)


def find_unnamed(
    parameters: Iterable[torch.Tensor], custom_modules: Sequence[CustomModule], entries: Container[str]
) -> list[Refusal]:
    """Return a refusal for each optimizer parameter that no entry stores alone: either FSDP1 has flattened the
    parameter, or the state dict contains a different form of it under its name.

    Args:
        parameters: the optimizer's parameters.
        custom_modules: the `CustomModule`s of the model.
        entries: names of the entries in the model's state dict.
    """
    places = {
        id(tensor): (custom_module, name)
        for custom_module in custom_modules
        for name, tensor in custom_module.hidden.items()
    }
    problems = []
    for parameter in parameters:
        custom_module, name = places.get(id(parameter), (None, ""))
        if custom_module is not None and (custom_module.is_flat or own_name(custom_module.full(name)) in entries):
            entry_names = ", ".join(custom_module.derived[:3])
            module_name = type(custom_module.module).__name__
            message = f"the state dict of {module_name} shows others in its place ({entry_names}): {_NO_STATE}"
            hint = _FLAT if custom_module.is_flat else _OTHER_FORM
            problems.append(Refusal("UNSUPPORTED", message, Where(None, own_name(custom_module.full(name))), hint))
    return problems


def try_loading(custom_module: CustomModule) -> tuple[list[Refusal], tuple[str, ...]]:
    """Test whether a module can load its own state dict, and restore its values; all ranks that share the module must
    call this function.

    Args:
        custom_module: the module to test; none of its tensors may be on the meta device.

    Returns:
        refusals, and the names, in the module, of the tensors that its `load_state_dict` leaves unchanged.
    """
    own_tensors = {id(tensor): (name, tensor) for name, tensor in persistent(custom_module.module)}
    memory = [piece for _, tensor in own_tensors.values() for piece in pieces(tensor)]
    before = entries_of(custom_module)
    with torch.no_grad(), _restore_afterwards(custom_module, memory):
        try:
            return _compare_after_load(custom_module, own_tensors.values(), memory, before)
        except Exception as error:  # noqa: BLE001 - whatever hooks of others raise: it cannot be loaded
            message = f"{type(custom_module.module).__name__} cannot load its own state_dict: {error!r}"
            return [Refusal("UNSUPPORTED", message, Where(None, custom_module.path or None), _HINT)], ()


def _compare_after_load(
    custom_module: CustomModule,
    own_tensors: Iterable[tuple[str, torch.Tensor]],
    memory: list[torch.Tensor],
    before: Mapping[str, torch.Tensor],
) -> tuple[list[Refusal], tuple[str, ...]]:
    """Write test values, take the state dict, write different values, and load the state dict; then compare tensors and
    entries with the test values.

    Args:
        custom_module: the module to test.
        own_tensors: name in the module -> tensor.
        memory: the plain tensors that make up `own_tensors`, in the same order.
        before: copies of the state dict's original entries.
    """
    for number, piece in enumerate(memory):
        piece.copy_(_values(piece, number))
    shown = _copy_state(custom_module.state())
    for number, piece in enumerate(memory):
        piece.copy_(_different_values(_values(piece, number)))
    custom_module.load(shown)
    numbers = iter(range(len(memory)))  # plain tensors have consecutive numbers, as above
    untouched, lost = list[str](), list[str]()
    for name, tensor in own_tensors:
        pairs = [(piece, _values(piece, number)) for piece, number in zip(pieces(tensor), numbers, strict=False)]
        if all(same(piece, values) for piece, values in pairs):
            continue
        is_untouched = all(same(piece, _different_values(values)) for piece, values in pairs)
        (untouched if is_untouched and name in custom_module.hidden else lost).append(name)
    after = entries_of(custom_module)
    unlike = [name for name, entry in after.items() if name not in shown or not same(entry, shown[name])]
    unlike += [name for name in before if name not in after]
    if not unlike and not lost:
        # The value of an entry that depends on no parameter may come from any other place, so such entries are tested
        # separately.
        fixed = [name for name in after if name in before and same(after[name], before[name]) and after[name].numel()]
        unlike = _find_not_loaded(custom_module, fixed, shown)
    if unlike:
        lost, untouched = [*lost, *untouched], []
    module_name = type(custom_module.module).__name__
    message = (
        f"{module_name} shows it differently in its state_dict, and its load_state_dict does not restore the values"
    )
    names = [*lost, *(name for name in unlike if name not in lost)]
    return [Refusal("UNSUPPORTED", message, Where(None, custom_module.full(name)), _HINT) for name in names], tuple(
        untouched
    )


def _find_not_loaded(custom_module: CustomModule, names: list[str], shown: dict[str, Any]) -> list[str]:
    """Return the names of entries that depend on no parameter or buffer, and that do not contain the loaded values."""
    if not names:
        return []
    original = {name: shown[name].clone() for name in names}
    for name in names:
        for piece in pieces(shown[name]):
            piece.copy_(_different_values(piece))
    loaded = {name: shown[name].clone() for name in names}
    custom_module.load(shown)
    after = entries_of(custom_module)
    unlike = [name for name in names if not same(after[name], loaded[name])]
    custom_module.load({**shown, **original})
    return unlike


@contextmanager
def _restore_afterwards(custom_module: CustomModule, memory: list[torch.Tensor]) -> Iterator[None]:
    """After the block, restore a module's tensors and their original values."""
    owners = [(m, dict(m._parameters), dict(m._buffers)) for m in custom_module.module.modules()]
    values = [piece.clone() for piece in memory]
    try:
        yield
    finally:
        for owner, parameters, buffers in owners:
            owner._parameters.update(parameters)
            owner._buffers.update(buffers)
        with torch.no_grad():
            for piece, value in zip(memory, values, strict=True):
                piece.copy_(value)


def entries_of(custom_module: CustomModule) -> dict[str, torch.Tensor]:
    """Return copies of a module's derived entries."""
    state = custom_module.state()
    return {name: state[name].detach().clone() for name in custom_module.derived if name in state}


def _copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state dict, including the values of its tensors."""
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of the same type, shape and dtype have equal bits on this rank."""
    first_pieces, second_pieces = pieces(first), pieces(second)
    return len(first_pieces) == len(second_pieces) and all(map(same_bytes, first_pieces, second_pieces))


def _values(piece: torch.Tensor, number: int) -> torch.Tensor:
    """Return reproducible test values for a tensor; they are equal on all ranks that hold the same shard."""
    generator = torch.Generator().manual_seed(_SEED + number)
    if piece.dtype.itemsize > 1 and (piece.dtype.is_floating_point or piece.dtype.is_complex):
        exact = torch.rand(tuple(piece.shape), generator=generator, dtype=torch.float64) + _LOWEST
        return exact.to(piece.dtype).to(piece.device)  # uniformly random values use every bit of the mantissa
    integers = torch.randint(_LOWEST, _LOWEST + _COUNT, tuple(piece.shape), generator=generator, dtype=torch.int16)
    if piece.dtype == torch.bool:
        return (integers % 2 == 0).to(piece.device)
    if piece.dtype.itemsize == 1:
        return integers.to(torch.uint8).view(piece.dtype).to(piece.device)
    return integers.to(piece.dtype).to(piece.device)


def _different_values(values: torch.Tensor) -> torch.Tensor:
    """Return values that differ, at every position, from the given values."""
    if values.dtype == torch.bool:
        return ~values
    flipped = byte_view(values.detach().contiguous()) ^ 1
    return flipped.view(values.dtype).reshape(values.shape)


_HOOK, _HOOKS, _OFFLOAD = "_hf_hook", "hooks", "offload"
"""Names of accelerate's attributes: the hook of a module, the list of hooks in a sequential hook, and the flag of a
hook for offloading.
"""
_MASTER = "_hp_mapping"
"""DeepSpeed (ZeRO-1 and 2, bf16): the attribute of a parameter that refers to the optimizer's copy of it."""
_DEEPSPEED = "deepspeed.runtime"
_MEGATRON, _MEGATRON_STATE = "megatron.core.", "megatron.core.parallel_state"
"""Megatron: prefix of its Python modules, and the Python module that stores the parallel degrees."""
_FSDP, _STATES = "torch.distributed.fsdp._fully_shard._fsdp_state", "torch.distributed._composable_state"
"""FSDP2: the Python module that defines the class of its state, and the Python module with the registry of all
states.
"""
_WHILE_GATHERED = ("_unsharded_param", "_sharded_post_forward_param")
"""FSDP2: attributes with the tensors that replace a parameter from its forward pass until the parameter is sharded
again.
"""
_BEFORE = (
    "Load into the model before deepspeed.initialize; to resume an engine, use a universal checkpoint (--to deepspeed)."
)
PARTITION = "ds_id"
"""Attribute that DeepSpeed sets on a parameter that ZeRO-3 has partitioned among ranks."""
_AVAILABLE = "AVAILABLE"


def find_gathered(parameters: Mapping[str, torch.Tensor]) -> list[Refusal]:
    """Refuse parameters that FSDP2 has gathered for a forward pass, because FSDP2 will free them together with any
    loaded values.

    `model.state_dict()` shards gathered parameters again, so they are met only if callers collect the parameters
    themselves.

    Args:
        parameters: name -> parameter in a state dict.
    """
    if _FSDP not in sys.modules:
        return []
    memory = set(_memory_of_gathered())
    message = "FSDP2 has gathered this parameter for a forward pass, and will free it with all values written into it"
    hint = "Give the model itself, or its state_dict(), which shards the parameters again."
    return [
        Refusal("UNSUPPORTED", message, Where(None, name), hint)
        for name, tensor in (parameters.items() if memory else ())
        if _memory(tensor) in memory
    ]


def _memory_of_gathered() -> Iterator[int]:
    """Yield the memory addresses of the gathered parameters of all FSDP2 models in this process."""
    for reference in list(sys.modules[_STATES]._module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for parameter_state in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
            attributes = () if parameter_state.sharded_state.name == "SHARDED" else _WHILE_GATHERED
            tensors = (getattr(parameter_state, name, None) for name in attributes)
            yield from (address for tensor in tensors if tensor is not None and (address := _memory(tensor)))


def _memory(tensor: torch.Tensor) -> int:
    local = raw_local(tensor)
    return local.untyped_storage().data_ptr() if local.layout == torch.strided and not local.is_meta else 0


def find_partitioned(model: nn.Module) -> list[Refusal]:
    """Return a refusal for each parameter whose values DeepSpeed ZeRO-3 has moved out of the module."""
    hint = "Load before deepspeed.initialize; to continue a run, convert DeepSpeed's own checkpoint."
    return [
        Refusal(
            "UNSUPPORTED",
            ("DeepSpeed ZeRO-3 has moved the parameter's values out of the module"),
            Where(None, own_name(name)),
            hint,
        )
        for name, parameter in model.named_parameters()
        if is_partitioned(parameter)
    ]


def find_model_parallel(model: nn.Module) -> list[Refusal]:
    """Refuse a Megatron model under model parallelism, because its state dict does not show which shard of a tensor
    each rank holds.
    """
    state = sys.modules.get(_MEGATRON_STATE)
    if state is None or not state.model_parallel_is_initialized():
        return []
    if not any(type(module).__module__.startswith(_MEGATRON) for module in model.modules()):
        return []
    degrees = {
        "TP": state.get_tensor_model_parallel_world_size(),
        "PP": state.get_pipeline_model_parallel_world_size(),
        "EP": state.get_expert_model_parallel_world_size(),
    }
    shared = " x ".join(f"{axis} {size}" for axis, size in degrees.items() if size > 1)
    message = f"Megatron has divided the model among {shared}; its state dict does not say what this rank holds"
    hint = "Give model.sharded_state_dict() in place of the model."
    return [Refusal("UNSUPPORTED", message, Where(None, None), hint)] if shared else []


def find_kept_elsewhere(model: nn.Module) -> list[Refusal]:
    """Return a refusal for each parameter, or for the whole model, if a library would overwrite the loaded values."""
    return [*_find_offloaded(model), *_find_master_copies(model)]


def _find_offloaded(model: nn.Module) -> Iterator[Refusal]:
    message = "accelerate keeps its weights elsewhere and copies them in for each forward pass"
    hint = "Load first, then call dispatch_model, cpu_offload or disk_offload."
    for path, module in model.named_modules():
        hook = module.__dict__.get(_HOOK)
        hooks = getattr(hook, _HOOKS, (hook,))
        parameter_names = [own_name(f"{path}.{name}".lstrip(".")) for name, _ in module.named_parameters(recurse=False)]
        if parameter_names and any(getattr(each, _OFFLOAD, False) is True for each in hooks):
            yield Refusal("UNSUPPORTED", f"{message} ({', '.join(parameter_names)})", Where(None, path or None), hint)


def _find_master_copies(model: nn.Module) -> Iterator[Refusal]:
    message = "DeepSpeed's optimizer has its own copy of the weights; its next step would overwrite the loaded values"
    keeper: object = getattr(model, "optimizer", None)
    if type(model).__module__.startswith(_DEEPSPEED) and type(keeper).__module__.startswith(_DEEPSPEED):
        yield Refusal("UNSUPPORTED", message, Where(None, None), _BEFORE)
        return
    for name, parameter in model.named_parameters():
        if getattr(parameter, _MASTER, None) is not None:
            yield Refusal("UNSUPPORTED", message, Where(None, own_name(name)), _BEFORE)


def is_partitioned(value: object) -> bool:
    """Return whether DeepSpeed ZeRO-3 has partitioned a parameter among ranks."""
    return hasattr(value, PARTITION)


def find_unreadable(model: nn.Module) -> list[Refusal]:
    """Return a refusal for each ZeRO-3 parameter whose elements on this rank cannot be read."""
    problems = []
    for name, parameter in model.named_parameters():
        partition: Any = getattr(parameter, "ds_tensor", None)
        if not is_partitioned(parameter):
            continue
        if partition is None or partition.status.name != _AVAILABLE:
            message, hint = (
                ("DeepSpeed ZeRO-3 has moved the parameter to a disk"),
                "Keep parameters in memory: no offload to nvme.",
            )
        elif hasattr(partition, "ds_quant_scale"):
            message, hint = "DeepSpeed ZeRO-3 stores the parameter quantized", "Turn zero_quantized_weights off."
        else:
            continue
        problems.append(Refusal("UNSUPPORTED", message, Where(None, own_name(name)), hint))
    return problems


def own_range(parameter: Any) -> torch.Tensor:
    """Return this rank's range of a ZeRO-3 parameter, as a flat tensor that is marked as a part of the whole
    parameter.
    """
    whole, partition = int(parameter.ds_numel), parameter.ds_tensor
    first = min(dist.get_rank(parameter.ds_process_group) * int(partition.ds_numel), whole)
    stop = min(first + int(partition.ds_numel), whole)
    return mark(partition.detach().view(-1)[: stop - first], Part(tuple(parameter.ds_shape), (((first, stop),),)))
