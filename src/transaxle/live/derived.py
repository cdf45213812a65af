"""Entries of a state dict that are no memory of the model: what they are, how values reach the model, and who keeps
them.

**Derived entries**: those of a model's state dict that are no memory of its own, and the modules that make them.

torchtitan's fused attention shows `wq`, `wk` and `wv` of one weight, hooks of state dicts rename and pack. Values that
are written into such an entry reach the model only through its own `load_state_dict` (`transaxle.live.derived`).
Whether an entry is a parameter itself is proved by where both lie in memory (`Extent`): nothing else tells it from a
copy, and what is written into a copy is lost.

The parameters of FSDP1 are flat; its state dict shows whole ones, which are copies. What it shows depends on a setting
of the user's. Here it is always every tensor, whole, on every rank: the one kind whose names and values mean the same
whatever the wrapping, and that its `load_state_dict` takes back.

**Settling**: values that came into derived entries are put into place by the module's own `load_state_dict`.

Beforehand a trial shows that it can: other values are put into the module, shown, replaced by others still, and
loaded. What then is not as it was shown would have been lost. The module's own values are put back in the end. After a
load the state dict is asked once more, and has to say what was loaded.

**Keepers**: libraries that keep the values of a model's parameters somewhere else than in the parameters.

What is written into such a parameter is replaced at the next forward pass or step, without a word. They are known by
the marks that they leave, and none of them is imported.

DeepSpeed ZeRO-3 leaves each rank a range of a parameter's elements, and nothing in the module. The ranges can be read:
what the optimizer updates are these, in the type that the model computes with.
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
"""Last part of the name under which a module keeps what its `get_extra_state` gives."""


def is_fsdp1(model: nn.Module) -> bool:
    """Whether FSDP1 holds any of a model's parameters."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


@contextmanager
def whole_states(model: nn.Module) -> Iterator[None]:
    """Let state dicts of a model under FSDP1 be whole, on all ranks; of any other model nothing changes."""
    if not is_fsdp1(model):
        yield
        return
    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        yield


@dataclass(frozen=True, slots=True)
class Extent:
    """The memory of a plain tensor."""

    storage: int
    """Identifies the storage; that of a meta tensor too, which has no memory. It is valid while the tensor lives."""
    start: int
    """First byte in it."""
    layout: tuple[Any, ...]
    """Shape, strides, type, and whether values are read conjugated or negated."""
    size: int
    """Bytes from the first to the last one, where the tensor has all that are between; else 0."""


def pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that this rank's part of a tensor is made of."""
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
    """Return what this rank holds; a wrapper that says so itself is asked, and nothing is made that has no need."""
    to_local = None if isinstance(tensor, DTensor) else getattr(tensor, TO_LOCAL, None)
    return raw_local(tensor) if to_local is None else to_local()


def extent(piece: torch.Tensor) -> Extent:
    """Return where a plain tensor lies; of one without a storage of its own, what identifies it."""
    kind = (tuple(piece.shape), piece.dtype, piece.device.type)
    try:
        storage = int(piece.untyped_storage()._cdata)
        strides = piece.stride()
    except (NotImplementedError, RuntimeError):  # sparse, or of a library that says nothing of its memory
        return Extent(id(piece), 0, kind, 0)
    item = piece.element_size()
    reads = (piece.is_conj(), piece.is_neg())
    size = piece.numel() * item if _dense(piece.shape, strides) and not any(reads) else 0
    live = tuple(stride for stride, length in zip(strides, piece.shape, strict=True) if length > 1)
    return Extent(storage, int(piece.storage_offset()) * item, (*kind, live, *reads), size)


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill a range without holes, in whatever order."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def filled_by(whole: Extent, parts: Iterable[Extent]) -> list[Extent] | None:
    """Return those of the parts that together are the whole, each byte once; None where there are none such.

    Args:
        whole: of a parameter.
        parts: of entries, each without holes.
    """
    inside = sorted(
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
    at = whole.start
    for part in inside:
        if part.start != at:
            return None
        at += part.size
    return inside if inside and at == whole.start + whole.size else None


@dataclass(frozen=True, eq=False)
class Island:
    """A module whose state dict is not its memory; the smallest one that holds all that belongs together."""

    path: str
    """Its name in the model, with the segments of wrappers."""
    module: nn.Module
    """The module."""
    derived: tuple[str, ...]
    """Entries that are copies, by their names in the module's state dict."""
    apart: Mapping[str, torch.Tensor]
    """Parameters and persistent buffers that no entry is, by their names in the module."""

    @property
    def is_flat(self) -> bool:
        """Whether FSDP1 holds it: then its entries are made by gathering, and it is not tried beforehand."""
        return is_fsdp1(self.module)

    @property
    def is_meta(self) -> bool:
        """Whether any of its tensors has no memory yet."""
        return any(tensor.is_meta for _, tensor in persistent(self.module))

    def state(self) -> dict[str, Any]:
        """Return the module's state dict, with its parameters themselves where they are in it."""
        with whole_states(self.module):
            state: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Let the module load a state dict.

        Raises:
            RuntimeError: what its `load_state_dict` raises.
        """
        with whole_states(self.module):
            self.module.load_state_dict(dict(state), strict=False)

    def full(self, name: str) -> str:
        """Return the name in the whole model of something in the module."""
        return joined(self.path, name)


def joined(path: str, name: str) -> str:
    """Return a name under a path, which may be empty."""
    return f"{path}{_SEPARATOR}{name}" if path else name


def persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers by name; a tied one under each."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and name not in owner._non_persistent_buffers_set:
                yield joined(path, name), tensor


def islands(model: nn.Module, state: Mapping[str, Any]) -> list[Island]:
    """Return the modules whose state dicts are not their memory.

    Args:
        model: the model.
        state: its state dict, made with `keep_vars`.
    """
    if is_fsdp1(model):
        tensors = tuple(name for name, value in state.items() if _is_entry(name, value))
        return [Island("", model, tensors, dict(persistent(model)))]
    derived, apart = _differences(model, state)
    return list(_within(model, "", derived, apart)) if derived or apart else []


def _within(
    module: nn.Module, path: str, derived: tuple[str, ...], apart: Mapping[str, torch.Tensor]
) -> Iterator[Island]:
    """Yield the smallest modules in a module that explain what is derived in it."""
    children = []
    for name, child in module.named_children():
        of_child = _differences(child, child.state_dict(keep_vars=True))
        if any(of_child):
            children.append((name, child, *of_child))
    names = {f"{name}{_SEPARATOR}{key}" for name, _, keys, _ in children for key in keys}
    tensors = {id(tensor) for _, _, _, child_apart in children for tensor in child_apart.values()}
    if names == set(derived) and tensors >= {id(tensor) for tensor in apart.values()}:
        for name, child, keys, child_apart in children:
            yield from _within(child, joined(path, name), keys, child_apart)
    else:
        yield Island(path, module, derived, apart)


def _differences(module: nn.Module, state: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, torch.Tensor]]:
    """Return the entries of a state dict that are copies, and the tensors of the module that no entry is."""
    own = dict(persistent(module))
    tensors = {id(tensor): tensor for tensor in (*own.values(), *module.buffers())}
    entries = {id(value) for value in state.values() if id(value) in tensors}
    of_tensors = {key: _extents(tensor) for key, tensor in tensors.items() if key not in entries}
    of_entries = {
        name: _extents(value) for name, value in state.items() if _is_entry(name, value) and id(value) not in tensors
    }
    # Another object may still be the same memory (`detach()`), and several the parts of one tensor.
    parts = set(chain.from_iterable(of_entries.values()))
    memory = set(chain.from_iterable(of_tensors.values()))
    if of_entries:
        memory.update(*(_extents(tensors[key]) for key in entries))
    shown = parts & memory
    for whole in chain.from_iterable(of_tensors.values()):
        if whole not in shown and whole.size:
            views = filled_by(whole, parts)
            if views is not None:
                shown.update((whole, *views))
    derived = tuple(name for name, extents in of_entries.items() if not shown.issuperset(extents))
    hidden = {key for key, extents in of_tensors.items() if not shown.issuperset(extents)}
    return derived, {name: tensor for name, tensor in own.items() if id(tensor) in hidden}


def _is_entry(name: str, value: Any) -> bool:
    """Whether an entry is a tensor that a load fills."""
    return isinstance(value, torch.Tensor) and not name.endswith(EXTRA_STATE)


def _extents(tensor: torch.Tensor) -> list[Extent]:
    return [extent(piece) for piece in pieces(tensor) if piece.numel()]


_NO_STATE = "its optimizer state has no name that another layout could use"
_OTHER_FORM = 'Leave optimizer= out, and keep the optimizer\'s state with extra={"optimizer": optimizer}.'
_FLAT = "Shard the model with fully_shard (FSDP2), or omit optimizer= and use FSDP.optim_state_dict."
_SEED = 20_260
_LOWEST, _COUNT = 1, 62
"""Numbers that any type of integers holds, and of which eight bits are no NaN in any."""
_HINT = "Load into the module before it is wrapped or fused, or report this to the author of its state_dict."


def untaken(islands: Iterable[Island]) -> tuple[list[Refusal], tuple[str, ...]]:
    """Find out what the modules' own `load_state_dict` cannot load; modules on meta are tried when they have memory.

    Args:
        islands: of a model, see `Leaves`.

    Returns:
        why some cannot; and the names of parameters and buffers that neither state dicts show nor loads fill.
    """
    problems, omitted = [], list[str]()
    for island in islands:
        if island.is_flat or (island.derived and island.is_meta):
            continue
        refusals, names = tried(island) if island.derived else ([], tuple(island.apart))
        problems += refusals
        omitted += (own_name(island.full(name)) for name in names)
    return problems, tuple(dict.fromkeys(omitted))


def reached(islands: Iterable[Island], loaded: Container[str]) -> set[str]:
    """Return the names of parameters and buffers that are no entries, and get values all the same.

    Args:
        islands: of a model.
        loaded: names of the entries that get values.
    """
    return {
        own_name(island.full(name))
        for island in islands
        if island.derived and all(own_name(island.full(key)) in loaded for key in island.derived)
        for name in island.apart
    }


def settle(islands: Iterable[Island], tensors: Mapping[str, torch.Tensor]) -> None:
    """Put values of derived entries into place; all ranks that share a module do it together.

    Args:
        islands: of a model.
        tensors: its tensors by name, see `Leaves`: those that are copies hold what is to be loaded.

    Raises:
        Refused: UNSUPPORTED where a state dict says other values afterwards.
    """
    problems = []
    for island in islands:
        if not island.derived:
            continue
        loaded = {key: tensors[own_name(island.full(key))] for key in island.derived}
        with torch.no_grad():
            island.load({**island.state(), **loaded})
            shown = island.state()
        for key, values in loaded.items():
            if key not in shown or not same(shown[key].detach(), values):
                message = f"{type(island.module).__name__}.load_state_dict stored other values than it was given"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, own_name(island.full(key)))))
    if problems:
        raise gathered(problems)


def unnamed(parameters: Iterable[torch.Tensor], islands: Sequence[Island], entries: Container[str]) -> list[Refusal]:
    """Return a refusal for each parameter of an optimizer that has no name of its own: one that FSDP1 has in a flat
    parameter, or whose name the state dict has for another form of it.

    Args:
        parameters: the optimizer's.
        islands: of the model.
        entries: names of its state dict.
    """
    places = {id(tensor): (island, name) for island in islands for name, tensor in island.apart.items()}
    problems = []
    for parameter in parameters:
        island, name = places.get(id(parameter), (None, ""))
        if island is not None and (island.is_flat or own_name(island.full(name)) in entries):
            shown = ", ".join(island.derived[:3])
            message = (
                f"the state dict of {type(island.module).__name__} shows others in its place ({shown}): {_NO_STATE}"
            )
            hint = _FLAT if island.is_flat else _OTHER_FORM
            problems.append(Refusal("UNSUPPORTED", message, Where(None, own_name(island.full(name))), hint))
    return problems


def tried(island: Island) -> tuple[list[Refusal], tuple[str, ...]]:
    """Try a module, and leave it as it was; all ranks that share it try it together.

    Args:
        island: the module; none of its tensors is on the meta device.

    Returns:
        why it cannot be loaded; and the names, in the module, of the tensors that its `load_state_dict` leaves alone.
    """
    own = {id(tensor): (name, tensor) for name, tensor in persistent(island.module)}
    memory = [piece for _, tensor in own.values() for piece in pieces(tensor)]
    before = entries_of(island)
    with torch.no_grad(), _restored(island, memory):
        try:
            return _outcome(island, own.values(), memory, before)
        except Exception as error:  # noqa: BLE001 - whatever hooks of others raise: it cannot be loaded
            message = f"{type(island.module).__name__} cannot load its own state_dict: {error!r}"
            return [Refusal("UNSUPPORTED", message, Where(None, island.path or None), _HINT)], ()


def _outcome(
    island: Island,
    own: Iterable[tuple[str, torch.Tensor]],
    memory: list[torch.Tensor],
    before: Mapping[str, torch.Tensor],
) -> tuple[list[Refusal], tuple[str, ...]]:
    """Put values in, show, put others in, load; then compare tensors and entries with what was shown.

    Args:
        island: the module.
        own: its tensors by name.
        memory: the plain tensors that these are made of, in the same order.
        before: copies of its entries as they were.
    """
    for number, piece in enumerate(memory):
        piece.copy_(_values(piece, number))
    shown = _copied(island.state())
    for number, piece in enumerate(memory):
        piece.copy_(_others(_values(piece, number)))
    island.load(shown)
    numbers = iter(range(len(memory)))  # they run on from tensor to tensor
    untouched, lost = list[str](), list[str]()
    for name, tensor in own:
        pairs = [(piece, _values(piece, number)) for piece, number in zip(pieces(tensor), numbers, strict=False)]
        if all(same(piece, values) for piece, values in pairs):
            continue
        is_untouched = all(same(piece, _others(values)) for piece, values in pairs)
        (untouched if is_untouched and name in island.apart else lost).append(name)
    after = entries_of(island)
    unlike = [name for name, entry in after.items() if name not in shown or not same(entry, shown[name])]
    unlike += [name for name in before if name not in after]
    if not unlike and not lost:
        # An entry that no value in the parameters has changed may be kept somewhere else.
        fixed = [name for name in after if name in before and same(after[name], before[name]) and after[name].numel()]
        unlike = _not_taken(island, fixed, shown)
    if unlike:
        lost, untouched = [*lost, *untouched], []
    what = type(island.module).__name__
    message = f"{what} shows it differently in its state_dict, and its load_state_dict does not restore the values"
    names = [*lost, *(name for name in unlike if name not in lost)]
    return [Refusal("UNSUPPORTED", message, Where(None, island.full(name)), _HINT) for name in names], tuple(untouched)


def _not_taken(island: Island, names: list[str], shown: dict[str, Any]) -> list[str]:
    """Return those of some entries, which belong to no parameter or buffer, that do not take what is loaded."""
    if not names:
        return []
    original = {name: shown[name].clone() for name in names}
    for name in names:
        for piece in pieces(shown[name]):
            piece.copy_(_others(piece))
    loaded = {name: shown[name].clone() for name in names}
    island.load(shown)
    after = entries_of(island)
    unlike = [name for name in names if not same(after[name], loaded[name])]
    island.load({**shown, **original})
    return unlike


@contextmanager
def _restored(island: Island, memory: list[torch.Tensor]) -> Iterator[None]:
    """Put the values of a module back, and the tensors themselves where something replaced them."""
    owners = [(m, dict(m._parameters), dict(m._buffers)) for m in island.module.modules()]
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


def entries_of(island: Island) -> dict[str, torch.Tensor]:
    """Return copies of the entries that a module makes."""
    state = island.state()
    return {name: state[name].detach().clone() for name in island.derived if name in state}


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with copies of its tensors."""
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors of the same kind hold the same bits on this rank."""
    first_pieces, second_pieces = pieces(first), pieces(second)
    return len(first_pieces) == len(second_pieces) and all(map(same_bytes, first_pieces, second_pieces))


def _values(piece: torch.Tensor, number: int) -> torch.Tensor:
    """Return values for a tensor, the same on all ranks that hold it alike."""
    generator = torch.Generator().manual_seed(_SEED + number)
    if piece.dtype.itemsize > 1 and (piece.dtype.is_floating_point or piece.dtype.is_complex):
        exact = torch.rand(tuple(piece.shape), generator=generator, dtype=torch.float64) + _LOWEST
        return exact.to(piece.dtype).to(piece.device)  # every bit of a mantissa counts
    made = torch.randint(_LOWEST, _LOWEST + _COUNT, tuple(piece.shape), generator=generator, dtype=torch.int16)
    if piece.dtype == torch.bool:
        return (made % 2 == 0).to(piece.device)
    if piece.dtype.itemsize == 1:
        return made.to(torch.uint8).view(piece.dtype).to(piece.device)
    return made.to(piece.dtype).to(piece.device)


def _others(values: torch.Tensor) -> torch.Tensor:
    """Return values of which none is as it was."""
    if values.dtype == torch.bool:
        return ~values
    flipped = byte_view(values.detach().contiguous()) ^ 1
    return flipped.view(values.dtype).reshape(values.shape)


_HOOK, _HOOKS, _OFFLOAD = "_hf_hook", "hooks", "offload"
"""accelerate: a module's hook, those that are one, and whether it brings the weights for each forward pass."""
_MASTER = "_hp_mapping"
"""DeepSpeed: where the optimizer has the values of a parameter (ZeRO-1 and 2, bf16)."""
_DEEPSPEED = "deepspeed.runtime"
_MEGATRON, _MEGATRON_STATE = "megatron.core.", "megatron.core.parallel_state"
"""Megatron: what the names of its modules begin with, and the module that knows the degrees of parallelism."""
_FSDP, _STATES = "torch.distributed.fsdp._fully_shard._fsdp_state", "torch.distributed._composable_state"
"""FSDP2: the module of its states, and the one that has those of all modules."""
_WHILE_GATHERED = ("_unsharded_param", "_sharded_post_forward_param")
"""FSDP2: what takes the place of a parameter from its forward pass until it is sharded again."""
_BEFORE = (
    "Load into the model before deepspeed.initialize; to resume an engine, use a universal checkpoint (--to deepspeed)."
)
PARTITION = "ds_id"
"""What DeepSpeed calls a parameter that it has taken apart."""
_AVAILABLE = "AVAILABLE"


def gathered_for_now(parameters: Mapping[str, torch.Tensor]) -> list[Refusal]:
    """Refuse parameters that FSDP2 has gathered for a forward pass: it frees them, with what is written into them.

    A model's `state_dict` shards its parameters again; only who takes the parameters themselves gets these.

    Args:
        parameters: those in a state dict, by name.
    """
    if _FSDP not in sys.modules:
        return []
    memory = set(_gathered_memory())
    message = "FSDP2 has gathered this parameter for a forward pass, and frees it, with what is written into it"
    hint = "Give the model itself, or its state_dict(), which shards the parameters again."
    return [
        Refusal("UNSUPPORTED", message, Where(None, name), hint)
        for name, tensor in (parameters.items() if memory else ())
        if _memory(tensor) in memory
    ]


def _gathered_memory() -> Iterator[int]:
    """Yield where the parameters lie that FSDP2 has gathered, in all models."""
    for reference in list(sys.modules[_STATES]._module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for each in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
            held = () if each.sharded_state.name == "SHARDED" else _WHILE_GATHERED
            found = (getattr(each, name, None) for name in held)
            yield from (address for tensor in found if tensor is not None and (address := _memory(tensor)))


def _memory(tensor: torch.Tensor) -> int:
    local = raw_local(tensor)
    return local.untyped_storage().data_ptr() if local.layout == torch.strided and not local.is_meta else 0


def partitioned(model: nn.Module) -> list[Refusal]:
    """Return a refusal for each parameter that has no values: ZeRO-3 has taken them."""
    hint = "Load before deepspeed.initialize; to continue a run, convert DeepSpeed's own checkpoint."
    return [
        Refusal(
            "UNSUPPORTED", "DeepSpeed ZeRO-3 has taken its values out of the module", Where(None, own_name(name)), hint
        )
        for name, parameter in model.named_parameters()
        if is_taken_apart(parameter)
    ]


def shared_out(model: nn.Module) -> list[Refusal]:
    """Return a refusal for a model of Megatron's of which each rank has a part which its state dict does not tell."""
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
    message = f"Megatron has shared the model out over {shared}; its state dict does not say what this rank holds"
    hint = "Give model.sharded_state_dict() in place of the model."
    return [Refusal("UNSUPPORTED", message, Where(None, None), hint)] if shared else []


def kept_elsewhere(model: nn.Module) -> list[Refusal]:
    """Return a refusal for each parameter, or for the model, where what is loaded would be overwritten."""
    return [*_offloaded(model), *_mastered(model)]


def _offloaded(model: nn.Module) -> Iterator[Refusal]:
    message = "accelerate keeps its weights elsewhere and copies them in for each forward pass"
    hint = "Load first, then call dispatch_model, cpu_offload or disk_offload."
    for path, module in model.named_modules():
        hook = module.__dict__.get(_HOOK)
        every = getattr(hook, _HOOKS, (hook,))
        held = [own_name(f"{path}.{name}".lstrip(".")) for name, _ in module.named_parameters(recurse=False)]
        if held and any(getattr(each, _OFFLOAD, False) is True for each in every):
            yield Refusal("UNSUPPORTED", f"{message} ({', '.join(held)})", Where(None, path or None), hint)


def _mastered(model: nn.Module) -> Iterator[Refusal]:
    message = "DeepSpeed's optimizer has its own copy of the weights; its next step would overwrite the loaded values"
    keeper: object = getattr(model, "optimizer", None)
    if type(model).__module__.startswith(_DEEPSPEED) and type(keeper).__module__.startswith(_DEEPSPEED):
        yield Refusal("UNSUPPORTED", message, Where(None, None), _BEFORE)
        return
    for name, parameter in model.named_parameters():
        if getattr(parameter, _MASTER, None) is not None:
            yield Refusal("UNSUPPORTED", message, Where(None, own_name(name)), _BEFORE)


def is_taken_apart(value: object) -> bool:
    """Tell whether DeepSpeed has taken a parameter apart."""
    return hasattr(value, PARTITION)


def refused_parts(model: nn.Module) -> list[Refusal]:
    """Return a refusal for each parameter whose range this rank cannot read."""
    problems = []
    for name, parameter in model.named_parameters():
        own: Any = getattr(parameter, "ds_tensor", None)
        if not is_taken_apart(parameter):
            continue
        if own is None or own.status.name != _AVAILABLE:
            message, hint = "DeepSpeed ZeRO-3 has it on a disk now", "Keep parameters in memory: no offload to nvme."
        elif hasattr(own, "ds_quant_scale"):
            message, hint = "DeepSpeed ZeRO-3 keeps it quantized", "Turn zero_quantized_weights off."
        else:
            continue
        problems.append(Refusal("UNSUPPORTED", message, Where(None, own_name(name)), hint))
    return problems


def own_range(parameter: Any) -> torch.Tensor:
    """Return what this rank holds of a parameter that is taken apart: its elements in one dim, marked as that part."""
    whole, own = int(parameter.ds_numel), parameter.ds_tensor
    first = min(dist.get_rank(parameter.ds_process_group) * int(own.ds_numel), whole)
    stop = min(first + int(own.ds_numel), whole)
    return mark(own.detach().view(-1)[: stop - first], Part(tuple(parameter.ds_shape), (((first, stop),),)))
