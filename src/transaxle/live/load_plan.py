"""Planning a load into a live model: which tensors are read, by which rank, and into which memory.

**The plan** lists the tensors that the ranks need, the places of their bytes in the source, and every reason to refuse
the load.

All ranks make the same plan or raise the same error before any tensor is written.

**Meta models**: parameters on torch's meta device get memory for this rank's shards just before the source is read.

A buffer that checkpoints do not store (such as rotary frequencies) is computed by the module that owns it. A tensor
that neither source nor module can fill is refused, so no uninitialised memory remains.

**The source**: each rank opens the source's path separately, and the checkpoint may be replaced after one rank and
before another rank has opened it. So the ranks compare the checkpoints that they have opened, and check the bytes that
they read against stored checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from transaxle.arguments import read_source
from transaxle.axes.notation.name import own_name
from transaxle.engine.checkpoint.checkpoint import Checkpoint, CheckpointLike, StoredTensor, open_checkpoint
from transaxle.engine.checkpoint.peft_adapter import adapter_config
from transaxle.engine.views.cast import refuse_scales_alone
from transaxle.engine.views.decoded import rename_groups
from transaxle.errors import Refusal, Refused, Where, gathered, refuse
from transaxle.formats.catalog import Container as OpenedFiles
from transaxle.formats.registry import MANIFEST
from transaxle.formats.storage.storage import Storage, without_commit
from transaxle.formats.training_state import GROUPS, OPTIMIZER, PARAMS, ParamGroup
from transaxle.live.derived import find_unloadable, indirectly_filled
from transaxle.live.extra_state import ExtraLoad
from transaxle.live.global_tensors import Census, census
from transaxle.live.model.destination import Conversion, check_dtype, is_plain, same_memory
from transaxle.live.model.peft_model import leaves_of_checkpoint, peft_model_of
from transaxle.live.model.quantized_model import Weights, stand_in
from transaxle.live.model.source_view import View, match_tensors, refuse_omitted, refuse_unmatched
from transaxle.live.model.state_tensors import Leaves, State, find_ties, leaves, sizes_that_differ, unwritable
from transaxle.live.optimizer_state import OptimizerLoad, find_missing_state
from transaxle.live.optimizers import AnyOptimizer
from transaxle.live.transport.world import World, comparable
from transaxle.move.journal import digest
from transaxle.torch_tensors import local_of

_INIT = ("reset_parameters", "init_weights", "_init_self_buffers")
"""Names of methods with which modules initialise themselves, in the order in which they are tried."""
_MODEL_INIT, _MODEL = "_init_weights", "_initialize_weights"
"""The method of a transformers model that initialises one of its modules, and a method by which such a model is
recognised.
"""
_FILLED = "_is_hf_initialized"
"""Attribute that marks tensors that transformers must not initialise."""
_UNFILLED = 0xA5
"""Byte value with which a new buffer is filled, to detect afterwards whether any method has initialised the buffer."""
Init = Callable[[nn.Module], object]
"""A function that initialises one module of a model."""


def unloadable(model: State, loaded: Container[str]) -> list[Refusal]:
    """Return a refusal for each meta tensor that neither the source nor the module that owns it can fill.

    Args:
        model: the model or state dict; if it is a state dict, every meta tensor is refused.
        loaded: names of tensors that the source has.
    """
    if not isinstance(model, nn.Module):
        message, hint = (
            "it is on the meta device, which has no memory to write to",
            "Give the model itself, not its state dict.",
        )
        tensors = leaves(model, sharded=True).tensors.items()
        return [Refusal("UNSUPPORTED", message, Where(None, name), hint) for name, each in tensors if each.is_meta]
    problems = []
    is_transformers = any(_model_init(module) is not None for module in model.modules())
    for name, owner, tensor, parameter in _meta(model):
        if name in loaded or (not parameter and (is_transformers or _own_initialisers(model, owner))):
            continue
        noun = "parameter" if parameter else "buffer"
        message = f"this {noun} of shape {list(tensor.shape)} is on the meta device, and nothing gives it values"
        hint = "Build the model on a real device, or give the module a method reset_parameters."
        problems.append(Refusal("MISSING_TENSOR", message, Where(None, name), hint))
    return problems


def materialise(model: nn.Module, loaded: Container[str], device: torch.device) -> bool:
    """Allocate memory on a device for each meta tensor of a model; tensors that the source lacks get initial values.

    Args:
        model: the model; tied parameters stay tied.
        loaded: names of tensors that the source has; their values are loaded later.
        device: device of plain tensors; a DTensor is placed on the device of its mesh.

    Returns:
        whether there were meta tensors; if so, the model's tensors and parameters are new objects.

    Raises:
        Refused: with code MISSING_TENSOR, if a module does not initialise its buffer.
    """
    on_meta = list(_meta(model))
    if not on_meta:
        return False
    materialised: dict[int, torch.Tensor] = {}

    def storage(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in materialised:
            target_device = torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else device
            materialised[id(tensor)] = torch.empty_like(tensor, device=target_device)
        return materialised[id(tensor)]

    with torch.no_grad():
        model._apply(storage)
        _tie([(owner, name, id(tensor)) for name, owner, tensor, parameter in on_meta if parameter])
        buffers: dict[nn.Module, list[str]] = {}
        for name, owner, _, parameter in on_meta:
            if name not in loaded and not parameter:
                buffers.setdefault(owner, []).append(name)
        problems = list(_fill(model, buffers)) if buffers else []
    if problems:
        raise gathered(problems)
    return True


def _fill(model: nn.Module, buffers: Mapping[nn.Module, Sequence[str]]) -> Iterator[Refusal]:
    """Let modules initialise the named buffers; yield a refusal for each buffer that remains uninitialised."""
    new_buffers = [_buffer(owner, name) for owner, names in buffers.items() for name in names]
    for buffer in new_buffers:
        local_of(buffer).reshape(-1).view(torch.uint8).fill_(_UNFILLED)
    with _mark_initialised(model, {id(buffer) for buffer in new_buffers}):
        _initialise(model, None, buffers)
    for owner, names in buffers.items():
        unfilled = [name for name in names if _is_unfilled(_buffer(owner, name))]
        for fill in _own_initialisers(model, owner):
            if unfilled:
                fill()
                unfilled = [name for name in unfilled if _is_unfilled(_buffer(owner, name))]
        for name in unfilled:
            message = "this buffer is on the meta device, and its module's own initialisation does not give it values"
            yield Refusal("MISSING_TENSOR", message, Where(None, name), "Build the model on a real device.")


@contextmanager
def _mark_initialised(model: nn.Module, anew: Container[int]) -> Iterator[None]:
    """Within the block, make transformers models initialise only the tensors whose `id` is in `anew`.

    Parameters are loaded from the source anyway, and initialising a sharded parameter may require other ranks, which do
    not take part.
    """
    tensors = chain(model.parameters(), model.buffers())
    marked = [each for each in tensors if id(each) not in anew and not hasattr(each, _FILLED)]
    for tensor in marked:
        setattr(tensor, _FILLED, True)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, _FILLED)


def _initialise(module: nn.Module, init: Init | None, owners: Container[nn.Module]) -> bool:
    """Initialise some modules and the modules that contain them as transformers does: innermost modules first, and each
    module with the method of the transformers model to which it belongs.

    Args:
        module: the model, or a submodule of it.
        init: function that initialises one module of the model to which `module` belongs.
        owners: the modules to initialise.

    Returns:
        whether `module` contains any of `owners`.
    """
    init = _model_init(module) or init
    holds = module in owners
    for child in module.children():
        holds = _initialise(child, init, owners) or holds
    if holds and init is not None:
        init(module)
    return holds


def _model_init(module: nn.Module) -> Init | None:
    """Return the method that initialises modules of a transformers model; None if the module is not a transformers
    model.
    """
    return getattr(module, _MODEL_INIT, None) if hasattr(module, _MODEL) else None


def _buffer(owner: nn.Module, name: str) -> torch.Tensor:
    """Return the buffer with a given full name in the model."""
    buffer = owner._buffers[name.rpartition(".")[2]]
    assert buffer is not None
    return buffer


def _is_unfilled(buffer: torch.Tensor) -> bool:
    return buffer.numel() > 0 and bool((local_of(buffer).reshape(-1).view(torch.uint8) == _UNFILLED).all())


def _tie(parameters: Sequence[tuple[nn.Module, str, int]]) -> None:
    """Tie parameters again, because `materialise` has created a separate new parameter for each name.

    Args:
        parameters: (owning module, name, identity of the original parameter) for each parameter.
    """
    first: dict[int, nn.Parameter | None] = {}
    for owner, name, identity in parameters:
        attribute = name.rpartition(".")[2]
        parameter = first.setdefault(identity, owner._parameters[attribute])
        if parameter is not owner._parameters[attribute] and not isinstance(parameter, DTensor):
            owner._parameters[attribute] = parameter


def _meta(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor, bool]]:
    """Yield (name, owning module, tensor, whether it is a parameter) for each tensor on the meta device."""
    for path, module in model.named_modules():
        for is_parameter, tensors in ((True, module._parameters), (False, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    yield own_name(f"{path}.{name}" if path else name), module, tensor, is_parameter


def _own_initialisers(model: nn.Module, owner: nn.Module) -> list[Callable[[], object]]:
    """Return the methods with which a module may initialise its own buffers; methods of the whole model are excluded.

    A method of the whole model would also initialise the model's parameters.
    """
    methods = [getattr(owner, name, None) for name in _INIT] if owner is not model else []
    return [each for each in methods if callable(each)]


_OPTIMIZER = "optimizer"
"""Name that the report lists as missing if the source has no optimizer state."""


class LoadPlan:
    """The plan of a load, which is equal on all ranks; all ranks must create it together.

    Args:
        state: the model or state dict to fill.
        checkpoint: the source checkpoint under its stored names.
        world: all ranks that take part.
        optimizer: the model's optimizer, or several.
        extra: name -> additional object to restore.
        family: family of the model.
        dialect: dialect of the model's names.
        strict: whether to refuse tensor names that only the model or only the source has.
        decode: dtype of parameters that may be loaded from encoded tensors.
        dtype: dtype of parameters that may be loaded from plain tensors of other dtypes.

    Attributes:
        state: the model or state dict to fill.
        checkpoint: the source checkpoint under its stored names.
        leaves: this rank's tensors of the model or state dict; if the model has adapters, the tensors of either the
            base or the adapter, depending on the checkpoint.
        view: the source translated into the model's dialect.
        stored: the model's tensor name -> tensor of the source.
        quantized: how the source fills the quantized parameters of all ranks.
        optimizers: the part of the load that fills optimizers.
        extra: the part of the load that is not tensors.
        targets: the tensors to read, each with the shard that each rank holds.
        missing: tensor names that only the model has.
        unexpected: tensor names that only the source has.
        conversions: name in the model -> change of dtype; only after the load is it known whether a cast was exact.
        on_meta: paths of this rank's modules with derived entries on the meta device; these modules are tested after
            they have memory.
        filled_by_modules: this rank's parameters and buffers that the state dict omits, but that modules fill in
            `load_state_dict`.
        same_memory: pairs of names that are a single tensor in the model on some rank, but two tensors in the source.
        same_state: pairs of names for the same optimizer state of a tied parameter: the name that is loaded, and a
            second name in the source.

    Raises:
        TransaxleError: raised on every rank, with every problem of every rank, if the load is refused.
    """

    def __init__(
        self,
        state: State,
        checkpoint: Checkpoint,
        world: World,
        *,
        optimizer: AnyOptimizer | None,
        extra: Mapping[str, Any],
        family: str | None,
        dialect: str | None,
        strict: bool,
        decode: str | None,
        dtype: str | None,
    ) -> None:
        self.state = state
        self.checkpoint = checkpoint
        with world.together():
            if dtype is not None:
                check_dtype(dtype)
            self.leaves = leaves = leaves_for(state, checkpoint)
        global_tensors = census(leaves.tensors, world)
        weights = Weights(leaves.weights, world)
        with world.together():
            unshown_names = frozenset(chain.from_iterable(world.gather(tuple(leaves.unshown))))
            if optimizer is None and not any(name.startswith(OPTIMIZER) for name in global_tensors):
                # names of optimizer state may need axis sizes that the names of weights do not need
                checkpoint = checkpoint.without_optimizer()
            view_options = family, dialect, decode
            self.view = weights.view_source(
                checkpoint, global_tensors, *view_options, partial=not strict, trained=unshown_names
            )
            self.stored = self.view.tensors()
            self.quantized = weights.choose_modes(self.view, self.stored)
            stand_ins = self.values_of_quantized(leaves, meta=True)
            self._filled = {**self.read_into(leaves), **stand_ins}
            self.optimizers = OptimizerLoad(optimizer, leaves, self.stored)
            is_custom = leaves.custom_modules and not leaves.refusals
            unloadable_modules, omitted = find_unloadable(leaves.custom_modules) if is_custom else ([], ())
        added = census({**stand_ins, **self.optimizers.states}, world)
        self._unite_names(omitted, world)
        targets = {name: tensor for name, tensor in global_tensors.items() if name not in self.quantized.gone}
        targets = {name: tensor for name, tensor in {**targets, **added}.items() if name not in self._tied}
        with world.together():
            problems = self._compare(targets, decode, dtype)
            self.extra = ExtraLoad(state, leaves.non_tensors, extra, self.view.checkpoint, self.stored, world)
            problems += [*self.extra.problems, *leaves.refusals, *unloadable_modules]
            if strict:
                problems += [*self._find_unmatched(targets), *refuse_omitted(self._omitted), *self.extra.lacking]
                problems += self._find_missing_state() if self.optimizers else []
            problems += [*self._find_unfilled(), *unwritable(self._filled)]
            problems += self._match_groups() if self.optimizers else []
            if problems:
                raise gathered(problems)
        missing = set(self.missing)
        self.targets: Census = {name: tensor for name, tensor in targets.items() if name not in missing}
        self.same_memory = frozenset(pair for pair in self._same_memory if self.targets.keys() >= set(pair))
        self.conversions = _conversions(self.targets, self.view, self.stored)
        requantized = weights.conversions(self.quantized.anew, self.view, self.stored)
        self.conversions |= {conversion.name: conversion for conversion in requantized}
        self.on_meta = frozenset(module.path for module in leaves.custom_modules if module.is_meta)

    @property
    def storage(self) -> Storage:
        """The storage of the source's files."""
        return self.view.checkpoint.container.storage

    @property
    def padding_rows(self) -> dict[str, tuple[int, int]]:
        """Name of a tensor with padding rows -> (its number of rows in the source, its number of rows in the model)."""
        shapes = (
            (name, self.stored[name].shape, tensor.shape) for name, tensor in self.targets.items() if tensor.padded
        )
        return {name: (stored[0], shape[0]) for name, stored, shape in shapes if stored != shape}

    def values_of_quantized(self, leaves: Leaves, *, meta: bool) -> dict[str, torch.Tensor]:
        """Return name -> plain tensor that receives the values, for those of this rank's parameters that are quantized
        during the load.

        Args:
            leaves: this rank's tensors of the model or state dict.
            meta: whether to create the tensors on the meta device.
        """
        codes_by_name = self.quantized.anew.items()
        return {
            name: stand_in(leaves.weights[name], code, meta=meta)
            for name, code in codes_by_name
            if name in leaves.weights
        }

    def read_into(self, leaves: Leaves) -> dict[str, torch.Tensor]:
        """Return name -> tensor, for those of this rank's tensors into which the load reads."""
        return {name: tensor for name, tensor in leaves.tensors.items() if name not in self.quantized.gone}

    def _unite_names(self, omitted: tuple[str, ...], world: World) -> None:
        """Make each rank's sets of names equal on all ranks, as the union of the sets; all ranks must call this method.

        Args:
            omitted: this rank's parameters and buffers that its state dict omits and a load leaves unchanged.
            world: all ranks that take part.
        """
        leaves, stored = self.leaves, self.stored
        in_memory = {name: leaves.weights.get(name, tensor) for name, tensor in self._filled.items()}
        pairs = tuple(same_memory(in_memory, stored))
        own_names = (
            find_ties(self._filled, stored),
            self.optimizers.second_copies,
            tuple(leaves.non_tensors),
            omitted,
            pairs,
        )
        united = [frozenset(chain.from_iterable(names)) for names in zip(*world.gather(own_names), strict=True)]
        self._tied, self.same_state, self._no_tensors, self._omitted, self._same_memory = united

    def _compare(self, targets: Census, decode: str | None, dtype: str | None) -> list[Refusal]:
        """Match the model's tensors with those of the source; return a refusal for each mismatch.

        Args:
            targets: the tensors of all ranks that the source should have.
            decode: dtype of parameters that may be loaded from encoded tensors.
            dtype: dtype of parameters that may be loaded from plain tensors of other dtypes.
        """
        checkpoint, with_state = self.view.checkpoint, bool(self.optimizers)
        problems, missing, unexpected = match_tensors(
            targets,
            self.stored,
            with_state,
            decode,
            cache(partial(sizes_that_differ, self.state, checkpoint.config)),
            dtype,
            checkpoint.decoded,
            checkpoint.config.get("vocab_size"),
        )
        problems += _scales_alone(checkpoint, targets, self.stored) if dtype is not None else ()
        no_state = (_OPTIMIZER,) if with_state and not self.checkpoint.has_state else ()
        self.missing = (*missing, *self.optimizers.stale_states, *sorted(self._omitted), *no_state)
        copies = {second for _, second in self.same_state}
        expected = self._no_tensors | copies | self.quantized.gone | self.checkpoint.container.beside
        self.unexpected = tuple(name for name in unexpected if name not in expected)
        return [*problems, *self.quantized.problems]

    def _find_unmatched(self, targets: Census) -> list[Refusal]:
        """Return a refusal for each tensor name that only the model or only the source has."""
        unused = [name for name in self.checkpoint if name not in targets]
        missing = [name for name in self.missing if name not in {*self._omitted, _OPTIMIZER}]
        return refuse_unmatched(missing, self.unexpected, unused)

    def _find_unfilled(self) -> list[Refusal]:
        """Return a refusal for each meta tensor that neither the source nor a module fills."""
        loaded = self.stored.keys() | self._tied
        self.filled_by_modules = (
            indirectly_filled(self.leaves.custom_modules, loaded) if self.leaves.custom_modules else set[str]()
        )
        tensors: Iterable[torch.Tensor] = self.leaves.tensors.values()
        if isinstance(self.state, nn.Module):
            tensors = chain(self.state.parameters(), self.state.buffers())
        if not any(tensor.is_meta for tensor in tensors):
            return []
        return unloadable(self.state, loaded | self.filled_by_modules)

    def _find_missing_state(self) -> list[Refusal]:
        """Return a refusal for state or settings of the optimizers that the source lacks."""
        ungrouped = self.optimizers.find_ungrouped(self._groups_in_source([]), self.stored)
        return [*find_missing_state(self.checkpoint), *ungrouped]

    def _match_groups(self) -> list[Refusal]:
        """Find the source's settings for the optimizers' parameter groups; return a refusal for each contradiction
        between these settings.
        """
        problems: list[Refusal] = []
        groups = self._groups_in_source(problems)
        return [*problems, *self.optimizers.match_groups(groups, self.stored, self.extra.objects_to_restore())]

    def _groups_in_source(self, problems: list[Refusal]) -> list[ParamGroup]:
        """Return the source's parameter groups, with the model's names of parameters; add refusals to `problems`."""
        stored_groups = self.view.checkpoint.container.metadata.get(GROUPS, ())
        return [
            {**group, PARAMS: [self.view.model_name(name) for name in group[PARAMS]]}
            for group in rename_groups(stored_groups, self.view.checkpoint.targets, problems)
        ]


def leaves_for(state: State, checkpoint: Checkpoint) -> Leaves:
    """Collect the tensors of a model or state dict; if the model has adapters, those of the base or of the adapter,
    depending on the checkpoint.

    Raises:
        Refused: any refusal that `leaves` raises.
    """
    state_leaves = leaves(state, sharded=True)
    peft_model = peft_model_of(state) if isinstance(state, nn.Module) else None
    if peft_model is None:
        return state_leaves
    is_adapter = adapter_config(checkpoint.container) is not None
    return leaves_of_checkpoint(peft_model, state_leaves, checkpoint.catalog.entries.keys(), adapter=is_adapter)


def _scales_alone(checkpoint: Checkpoint, targets: Census, stored: Mapping[str, StoredTensor]) -> Iterator[Refusal]:
    """Yield a refusal for each tensor of scales that would be cast to a dtype other than float32."""
    pairs = ((stored[name], tensor.dtype) for name, tensor in targets.items() if name in stored)
    casts = [(source, dtype) for source, dtype in pairs if source.dtype != dtype and is_plain(source.dtype)]
    if casts:
        yield from checkpoint.catalog.refusals
    narrowed = dict.fromkeys(origin for source, dtype in casts if dtype != "F32" for origin in source.origins)
    for refusal in refuse_scales_alone(
        (origin for origin in narrowed if origin not in checkpoint.decoded), checkpoint.catalog
    ):
        yield replace(refusal, hint="Build the model with the dtype that the source has.")


def _conversions(targets: Census, view: View, stored: Mapping[str, StoredTensor]) -> dict[str, Conversion]:
    """Return name -> conversion, for each tensor that is decoded or cast."""
    decoded = view.checkpoint.decoded
    conversions = {}
    for name, tensor in targets.items():
        source = stored[name]
        codes = next((decoded[origin] for origin in source.origins if origin in decoded), None)
        if codes is not None:
            conversions[name] = Conversion(name, codes.encoding.name, tensor.dtype, None)
        elif source.dtype != tensor.dtype:
            conversions[name] = Conversion(name, source.dtype, tensor.dtype, exact=True)
    return conversions


_LARGEST_MANIFEST = 1 << 30


@contextmanager
def open_source(
    src: CheckpointLike, world: World, reading: Mapping[str, Any], *, with_state: bool = False, strict: bool = True
) -> Iterator[Checkpoint]:
    """Yield the source as an open checkpoint; close it afterwards, unless the caller opened it. All ranks must call
    this function.

    Args:
        src: path of the source, or an open checkpoint.
        world: all ranks that take part.
        reading: name of an argument of `load` for opening the source -> its value, or None if the caller did not pass
            it.
        with_state: whether to open optimizer state too, if the source has any.
        strict: whether to refuse optimizer state of unknown parameters; if False, it is omitted.

    Raises:
        TypeError: if `reading` has options, but the source is already open.
        TransaxleError: raised on every rank, if the source cannot be opened; with code CORRUPT or AMBIGUOUS, if ranks
            have opened different checkpoints, or opened a checkpoint with different options.
    """
    reading = {name: value for name, value in reading.items() if value is not None}
    if isinstance(src, Checkpoint):
        with world.together():
            if reading:
                raise TypeError(f"{', '.join(reading)}: pass this to open() instead; the checkpoint is already open")
        if world.size > 1:
            refuse_different(src, world)
        yield src
        return
    with world.together():
        state: dict[str, Any] = {"optimizer": True, "lenient": True} if with_state else {}
        try:
            checkpoint = open_checkpoint(read_source("src", src), **reading, **state)
        except Refused:
            if strict or not with_state:
                raise
            checkpoint = open_checkpoint(read_source("src", src), **reading)
    with checkpoint:
        if world.size > 1:
            refuse_different(checkpoint, world)
        yield checkpoint


def refuse_different(checkpoint: Checkpoint, world: World) -> None:
    """Check that all ranks have opened the same checkpoint with the same options; all ranks must call this function.

    Copies of a checkpoint on several machines are the same checkpoint if their manifests are equal, or, without
    manifests, their file sizes; the paths may differ. Configs and rules files are compared by content, so their paths
    may differ too.

    Args:
        checkpoint: the checkpoint that this rank has opened.
        world: all ranks that take part.

    Raises:
        Refused: raised on every rank, if checkpoints or options differ: with code CORRUPT, if the paths are equal, and
            otherwise with code AMBIGUOUS.
    """
    with world.together():
        own_opening = identify_opening(checkpoint)
    compare_openings(world.gather(own_opening), world.ranks)


Opening = tuple[str, str, dict[str, str]]
"""Path of an open checkpoint, hash of its files, and option name -> hash of the option's value."""


def identify_opening(checkpoint: Checkpoint) -> Opening:
    """Return what must be equal on all ranks that have opened a checkpoint.

    Raises:
        StorageError: with code IO, if the manifest cannot be read.
    """
    return without_commit(checkpoint.path), _identity(checkpoint), _reading(checkpoint)


def compare_openings(openings: Sequence[Opening], ranks: Sequence[int]) -> None:
    """Check that ranks have opened the same checkpoint with the same options; `refuse_different` says what is the same.

    Args:
        openings: the opening of each rank.
        ranks: numbers of the ranks.

    Raises:
        Refused: with code CORRUPT or AMBIGUOUS, if openings differ.
    """
    first_path, first_identity, first_reading = openings[0]
    for rank, (path, identity, reading) in zip(ranks, openings, strict=True):
        if identity != first_identity:
            message = f"ranks {ranks[0]} and {rank} opened different checkpoints"
            if path != first_path:
                message = f"{message}: {first_path} and {path}"
                raise refuse("AMBIGUOUS", message, hint="Give the same path on all ranks, or paths of equal copies.")
            message = f"{message}: it was replaced while they were opening it"
            raise refuse("CORRUPT", message, file=path, hint="Load again when no other program writes to this path.")
        if reading != first_reading:
            names = sorted({*first_reading, *reading})
            name = next(name for name in names if reading.get(name) != first_reading.get(name))
            message = f"{name}: rank {rank} reads the checkpoint with another value than rank {ranks[0]}"
            raise refuse("AMBIGUOUS", message, file=path, hint="Give the same arguments on all ranks.")


def _reading(checkpoint: Checkpoint) -> dict[str, str]:
    """Return option name -> hash of the option's value, for the options with which a checkpoint was opened."""
    how, settings = checkpoint.reopening, checkpoint.settings
    options: Mapping[str, Any] = {"config": settings.config, "axes": settings.axes}
    if how is not None:
        options = {**how.options, "rules": how.rules, "view": how.steps}
    return {name: digest(comparable(value)) for name, value in options.items() if value}


def _identity(checkpoint: Checkpoint) -> str:
    containers = checkpoint.container, *checkpoint.container.recoding.additional.values()
    return " ".join(map(_identity_of, containers))


def _identity_of(container: OpenedFiles) -> str:
    storage = container.storage
    if storage.single is None and MANIFEST in storage.names() and storage.size(MANIFEST) <= _LARGEST_MANIFEST:
        return digest(storage.read(MANIFEST, 0, storage.size(MANIFEST)))
    pinned = container.path if without_commit(container.path) != container.path else ""
    return digest(repr((pinned, sorted(container.files.items()))).encode())
