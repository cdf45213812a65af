"""What a load reads, by which rank, and into which memory.

**Planning a load**: what every rank needs, where the source has it, and every reason not to begin.

All ranks come to the same plan, or raise the same error; no tensor has been written then.

**Meta models**: parameters without storage get it shard by shard, just before their values come.

A buffer that no checkpoint holds (rotary frequencies) is computed by the module that owns it; what nobody can fill is
refused, so that nothing uninitialised is left behind.

The source of a load as all ranks read it: one checkpoint, whose bytes are compared with checksums.

Each rank opens the path for itself, and the checkpoint there may be replaced in between.
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
from transaxle.engine.views.cast import scales_alone
from transaxle.engine.views.decoded import regrouped
from transaxle.errors import Refusal, Refused, Where, gathered, refuse
from transaxle.formats.catalog import Checksum
from transaxle.formats.checksums import Tally, Witness
from transaxle.formats.registry import MANIFEST
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import Storage, layer, lowest, unpinned
from transaxle.formats.training_state import GROUPS, OPTIMIZER, PARAMS, ParamGroup
from transaxle.live.derived import reached, untaken
from transaxle.live.extra_state import ExtraLoad
from transaxle.live.global_tensors import Census, census
from transaxle.live.model.destination import Conversion, check_dtype, is_plain, same_memory
from transaxle.live.model.peft_model import adapted, seen_by
from transaxle.live.model.quantized_model import Weights, stand_in
from transaxle.live.model.source_view import View, compared, left_out, unmatched
from transaxle.live.model.state_tensors import Leaves, State, leaves, sizes_that_differ, tied, unwritable
from transaxle.live.optimizer_state import OptimizerLoad, lacking_state
from transaxle.live.optimizers import AnyOptimizer
from transaxle.live.transport import wire
from transaxle.live.transport.world import World, comparable
from transaxle.move.journal import digest
from transaxle.torch_tensors import local_of

_INIT = ("reset_parameters", "init_weights", "_init_self_buffers")
"""Methods by which modules fill what they own, in the order in which they are tried."""
_MODEL_INIT, _MODEL = "_init_weights", "_initialize_weights"
"""Method of a transformers model that fills one module of it, and one that only such models have."""
_FILLED = "_is_hf_initialized"
"""Attribute of tensors that it leaves alone."""
_UNFILLED = 0xA5
"""Byte of buffers that nobody has filled yet."""
Init = Callable[[nn.Module], object]
"""Fills one module of a model."""


def unloadable(model: State, loaded: Container[str]) -> list[Refusal]:
    """Return a refusal for every meta tensor that neither the source nor its own module fills.

    Args:
        model: the model; nothing can give storage to the tensors of a state dict.
        loaded: names that the source holds.
    """
    if not isinstance(model, nn.Module):
        message, hint = (
            "it is on the meta device, which has no memory to write to",
            "Give the model itself, not its state dict.",
        )
        tensors = leaves(model, sharded=True).tensors.items()
        return [Refusal("UNSUPPORTED", message, Where(None, name), hint) for name, each in tensors if each.is_meta]
    problems = []
    known = any(_model_init(module) is not None for module in model.modules())
    for name, owner, tensor, parameter in _meta(model):
        if name in loaded or (not parameter and (known or _own_initialisers(model, owner))):
            continue
        what = "parameter" if parameter else "buffer"
        message = f"this {what} of shape {list(tensor.shape)} is on the meta device, and nothing gives it values"
        hint = "Build the model on a real device, or give the module a method reset_parameters."
        problems.append(Refusal("MISSING_TENSOR", message, Where(None, name), hint))
    return problems


def materialise(model: nn.Module, loaded: Container[str], device: torch.device) -> bool:
    """Give every meta tensor of a model storage on a device; those that the source lacks, their initial values.

    Args:
        model: the model; ties stay ties.
        loaded: names that the source holds: their values are left to come.
        device: where plain tensors go; a DTensor goes to the device of its mesh.

    Returns:
        whether there were any: tensors and parameters of the model are others now.

    Raises:
        Refused: MISSING_TENSOR for a buffer that its module was to fill, and did not.
    """
    on_meta = list(_meta(model))
    if not on_meta:
        return False
    made: dict[int, torch.Tensor] = {}

    def storage(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            where = torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else device
            made[id(tensor)] = torch.empty_like(tensor, device=where)
        return made[id(tensor)]

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
    """Let modules fill their buffers, given by name; yield a refusal for each that is as it was before."""
    anew = [_buffer(owner, name) for owner, names in buffers.items() for name in names]
    for buffer in anew:
        local_of(buffer).reshape(-1).view(torch.uint8).fill_(_UNFILLED)
    with _protected(model, {id(buffer) for buffer in anew}):
        _initialise(model, None, buffers)
    for owner, names in buffers.items():
        left = [name for name in names if _is_unfilled(_buffer(owner, name))]
        for fill in _own_initialisers(model, owner):
            if left:
                fill()
                left = [name for name in left if _is_unfilled(_buffer(owner, name))]
        for name in left:
            message = "this buffer is on the meta device, and its module's own initialisation does not give it values"
            yield Refusal("MISSING_TENSOR", message, Where(None, name), "Build the model on a real device.")


@contextmanager
def _protected(model: nn.Module, anew: Container[int]) -> Iterator[None]:
    """Keep models of transformers from filling anything but some tensors, which are given by identity.

    Values of parameters come from the source; to fill those of one rank's part, ranks may have to wait for others that
    have none of it to fill.
    """
    tensors = chain(model.parameters(), model.buffers())
    kept = [each for each in tensors if id(each) not in anew and not hasattr(each, _FILLED)]
    for tensor in kept:
        setattr(tensor, _FILLED, True)
    try:
        yield
    finally:
        for tensor in kept:
            delattr(tensor, _FILLED)


def _initialise(module: nn.Module, init: Init | None, owners: Container[nn.Module]) -> bool:
    """Fill some modules and what they are in as transformers does: innermost first, by the model that each belongs to.

    Args:
        module: the model, or a part of it.
        init: what fills modules of the model that it belongs to.
        owners: the modules.

    Returns:
        whether any of them is in `module`.
    """
    init = _model_init(module) or init
    holds = module in owners
    for child in module.children():
        holds = _initialise(child, init, owners) or holds
    if holds and init is not None:
        init(module)
    return holds


def _model_init(module: nn.Module) -> Init | None:
    """Return what fills the modules of a model of transformers; None of any other module."""
    return getattr(module, _MODEL_INIT, None) if hasattr(module, _MODEL) else None


def _buffer(owner: nn.Module, name: str) -> torch.Tensor:
    """Return a module's buffer, given by its full name."""
    buffer = owner._buffers[name.rpartition(".")[2]]
    assert buffer is not None
    return buffer


def _is_unfilled(buffer: torch.Tensor) -> bool:
    return buffer.numel() > 0 and bool((local_of(buffer).reshape(-1).view(torch.uint8) == _UNFILLED).all())


def _tie(parameters: Sequence[tuple[nn.Module, str, int]]) -> None:
    """Make parameters one again that were one: giving them storage made a new parameter for each of their names.

    Args:
        parameters: owner, name, and what identifies the parameter as it was.
    """
    first: dict[int, nn.Parameter | None] = {}
    for owner, name, identity in parameters:
        own = name.rpartition(".")[2]
        found = first.setdefault(identity, owner._parameters[own])
        if found is not owner._parameters[own] and not isinstance(found, DTensor):
            owner._parameters[own] = found


def _meta(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor, bool]]:
    """Yield (name, owner, tensor, whether it is a parameter) of everything on the meta device."""
    for path, module in model.named_modules():
        for kind, held in ((True, module._parameters), (False, module._buffers)):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    yield own_name(f"{path}.{name}" if path else name), module, tensor, kind


def _own_initialisers(model: nn.Module, owner: nn.Module) -> list[Callable[[], object]]:
    """Return a module's own methods that may fill its buffers; one that knows only its base class may leave some out.

    Those of the whole model would fill its parameters, too.
    """
    own = [getattr(owner, name, None) for name in _INIT] if owner is not model else []
    return [each for each in own if callable(each)]


_OPTIMIZER = "optimizer"
"""What a report calls an optimizer of which the source has nothing."""


class LoadPlan:
    """What a load does, agreed on by all ranks; collective to make.

    Args:
        state: model or state dict to fill.
        checkpoint: the source under its stored names.
        world: the ranks.
        optimizer: the model's optimizer, or several.
        extra: what else is restored, by name.
        family: model family.
        dialect: dialect of the model's names.
        strict: whether names that only one side has are refused.
        decode: type of the parameters that take encoded tensors.
        dtype: type of the parameters that take plain tensors of other types.

    Attributes:
        state: the model or state dict.
        checkpoint: the source under its stored names.
        own: what it holds on this rank; of a model with adapters, the side that the checkpoint is for.
        view: the source in the model's dialect.
        stored: the source's tensors by the model's names.
        quantized: how the source fills quantized parameters of all ranks.
        optimizers: what is loaded into optimizers.
        extra: state that is no tensor.
        wanted: the tensors to be read, as all ranks hold them.
        missing: names that only the model has.
        unexpected: names that only the source has.
        conversions: type changes by the model's names; whether a cast is exact is known when it is done.
        on_meta: names of modules of this rank on the meta device: whether they load what they show is tried when they
            have memory.
        filled_by_modules: parameters and buffers of this rank that are no entries: their modules' `load_state_dict`
            fills them.
        same_memory: pairs of names whose tensors are one on some rank, and that the source has both.
        same_state: pairs of names of optimizer state: what is loaded, and what the source has for another name of the
            same parameter.

    Raises:
        TransaxleError: on every rank, with every problem of every rank.
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
            self.own = own = leaves_for(state, checkpoint)
        global_tensors = census(own.tensors, world)
        weights = Weights(own.weights, world)
        with world.together():
            unshown = frozenset(chain.from_iterable(world.gather(tuple(own.unshown))))
            if optimizer is None and not any(name.startswith(OPTIMIZER) for name in global_tensors):
                checkpoint = checkpoint.without_optimizer()  # its names may ask for sizes that the values do not need
            asked = family, dialect, decode
            self.view = weights.seen(checkpoint, global_tensors, *asked, partial=not strict, trained=unshown)
            self.stored = self.view.tensors()
            self.quantized = weights.sorted(self.view, self.stored)
            stand_ins = self.values_of_quantized(own, meta=True)
            self._filled = {**self.read_into(own), **stand_ins}
            self.optimizers = OptimizerLoad(optimizer, own, self.stored)
            unloadable_modules, omitted = untaken(own.islands) if own.islands and not own.kept else ([], ())
        added = census({**stand_ins, **self.optimizers.states}, world)
        self._unite_names(omitted, world)
        targets = {name: tensor for name, tensor in global_tensors.items() if name not in self.quantized.gone}
        targets = {name: tensor for name, tensor in {**targets, **added}.items() if name not in self._tied}
        with world.together():
            problems = self._compare(targets, decode, dtype)
            self.extra = ExtraLoad(state, own.others, extra, self.view.checkpoint, self.stored, world)
            problems += [*self.extra.problems, *own.kept, *unloadable_modules]
            if strict:
                problems += [*self._left_over(targets), *left_out(self._omitted), *self.extra.lacking]
                problems += lacking_state(self.checkpoint) if self.optimizers else []
            problems += [*self._find_unfilled(), *unwritable(self._filled)]
            if self.optimizers:
                problems += self._match_groups()
            if problems:
                raise gathered(problems)
        missing = set(self.missing)
        self.wanted: Census = {name: tensor for name, tensor in targets.items() if name not in missing}
        self.same_memory = frozenset(pair for pair in self._same_memory if self.wanted.keys() >= set(pair))
        requantized = weights.conversions(self.quantized.anew, self.view, self.stored)
        self.conversions = _conversions(self.wanted, self.view, self.stored)
        self.conversions |= {conversion.name: conversion for conversion in requantized}
        self.on_meta = frozenset(island.path for island in own.islands if island.is_meta)

    @property
    def storage(self) -> Storage:
        """The source's files."""
        return self.view.checkpoint.container.storage

    @property
    def padded(self) -> dict[str, tuple[int, int]]:
        """Tensors with rows of padding: rows in the source and in the model."""
        shapes = (
            (name, self.stored[name].shape, tensor.shape) for name, tensor in self.wanted.items() if tensor.padded
        )
        return {name: (stored[0], shape[0]) for name, stored, shape in shapes if stored != shape}

    def values_of_quantized(self, own: Leaves, *, meta: bool) -> dict[str, torch.Tensor]:
        """Return tensors for the values of this rank's parameters that are quantized here, by the parameters' names.

        Args:
            own: what the model holds.
            meta: without memory.
        """
        anew = self.quantized.anew.items()
        return {name: stand_in(own.weights[name], code, meta=meta) for name, code in anew if name in own.weights}

    def read_into(self, own: Leaves) -> dict[str, torch.Tensor]:
        """Return this rank's tensors without those that nothing is read into."""
        return {name: tensor for name, tensor in own.tensors.items() if name not in self.quantized.gone}

    def _unite_names(self, omitted: tuple[str, ...], world: World) -> None:
        """Put together what the ranks know of their names; collective.

        Args:
            omitted: parameters and buffers of this rank that neither a state dict shows nor a load fills.
            world: the ranks.
        """
        own, stored = self.own, self.stored
        in_memory = {name: own.weights.get(name, tensor) for name, tensor in self._filled.items()}
        pairs = tuple(same_memory(in_memory, stored))
        mine = tied(self._filled, stored), self.optimizers.doubled, tuple(own.others), omitted, pairs
        united = [frozenset(chain.from_iterable(names)) for names in zip(*world.gather(mine), strict=True)]
        self._tied, self.same_state, self._no_tensors, self._omitted, self._same_memory = united

    def _compare(self, targets: Census, decode: str | None, dtype: str | None) -> list[Refusal]:
        """Compare the model's tensors with the source's; return what does not fit.

        Args:
            targets: the tensors of all ranks that values are looked for in the source.
            decode: as for the whole.
            dtype: likewise.
        """
        seen, with_state = self.view.checkpoint, bool(self.optimizers)
        problems, missing, unexpected = compared(
            targets,
            self.stored,
            with_state,
            decode,
            cache(partial(sizes_that_differ, self.state, seen.config)),
            dtype,
            seen.decoded,
            seen.config.get("vocab_size"),
        )
        problems += _scales_alone(seen, targets, self.stored) if dtype is not None else ()
        no_state = (_OPTIMIZER,) if with_state and not self.checkpoint.has_state else ()
        self.missing = (*missing, *self.optimizers.unrestored, *sorted(self._omitted), *no_state)
        copies = {second for _, second in self.same_state}
        expected = self._no_tensors | copies | self.quantized.gone | self.checkpoint.container.beside
        self.unexpected = tuple(name for name in unexpected if name not in expected)
        return [*problems, *self.quantized.problems]

    def _left_over(self, targets: Census) -> list[Refusal]:
        """Return a refusal for each name that only one side has."""
        unused = [name for name in self.checkpoint if name not in targets]
        missing = [name for name in self.missing if name not in {*self._omitted, _OPTIMIZER}]
        return unmatched(missing, self.unexpected, unused)

    def _find_unfilled(self) -> list[Refusal]:
        """Return a refusal for each tensor on the meta device that nothing gives values."""
        loaded = self.stored.keys() | self._tied
        self.filled_by_modules = reached(self.own.islands, loaded) if self.own.islands else set[str]()
        tensors: Iterable[torch.Tensor] = self.own.tensors.values()
        if isinstance(self.state, nn.Module):
            tensors = chain(self.state.parameters(), self.state.buffers())
        if not any(tensor.is_meta for tensor in tensors):
            return []
        return unloadable(self.state, loaded | self.filled_by_modules)

    def _match_groups(self) -> list[Refusal]:
        """Find the settings that the source has for the optimizers' groups; return what speaks against them."""
        problems: list[Refusal] = []
        stored_groups = self.view.checkpoint.container.metadata.get(GROUPS, ())
        groups: list[ParamGroup] = [
            {**group, PARAMS: [self.view.named(name) for name in group[PARAMS]]}
            for group in regrouped(stored_groups, self.view.checkpoint.targets, problems)
        ]
        return [*problems, *self.optimizers.match_groups(groups, self.stored, self.extra.given())]


def leaves_for(state: State, checkpoint: Checkpoint) -> Leaves:
    """Return what a state holds; of a model with adapters, the side that the checkpoint is for.

    Raises:
        Refused: see `leaves`.
    """
    own = leaves(state, sharded=True)
    peft_model = adapted(state) if isinstance(state, nn.Module) else None
    if peft_model is None:
        return own
    is_adapter = adapter_config(checkpoint.container) is not None
    return seen_by(peft_model, own, checkpoint.catalog.entries.keys(), adapter=is_adapter)


def _scales_alone(seen: Checkpoint, targets: Census, stored: Mapping[str, StoredTensor]) -> Iterator[Refusal]:
    """Yield why some tensors must not be cast; to float32 no value of a scale changes."""
    pairs = ((stored[name], tensor.dtype) for name, tensor in targets.items() if name in stored)
    casts = [(source, dtype) for source, dtype in pairs if source.dtype != dtype and is_plain(source.dtype)]
    if casts:
        yield from seen.catalog.refusals
    narrowed = dict.fromkeys(origin for source, dtype in casts if dtype != "F32" for origin in source.origins)
    for refusal in scales_alone((origin for origin in narrowed if origin not in seen.decoded), seen.catalog):
        yield replace(refusal, hint="Build the model with the type that the source has.")


def _conversions(wanted: Census, view: View, stored: Mapping[str, StoredTensor]) -> dict[str, Conversion]:
    """Return which tensors are decoded or cast."""
    decoded = view.checkpoint.decoded
    conversions = {}
    for name, tensor in wanted.items():
        source = stored[name]
        codes = next((decoded[origin] for origin in source.origins if origin in decoded), None)
        if codes is not None:
            conversions[name] = Conversion(name, codes.encoding.name, tensor.dtype, None)
        elif source.dtype != tensor.dtype:
            conversions[name] = Conversion(name, source.dtype, tensor.dtype, exact=True)
    return conversions


wire.tellable(Checksum, Tally)
_LARGEST_MANIFEST = 1 << 30


@contextmanager
def opened(
    src: CheckpointLike, world: World, reading: Mapping[str, Any], *, with_state: bool, strict: bool
) -> Iterator[Checkpoint]:
    """Give the source; one that is opened here is closed again, the caller's own is not. Collective.

    Args:
        src: as `load` takes it.
        world: the ranks.
        reading: arguments of `load` for opening the source, None where they are not given.
        with_state: whether the optimizer's state is wanted, if there is any.
        strict: whether state whose parameters are not known is refused, rather than left out.

    Raises:
        TypeError: there are options for a source that is open already.
        TransaxleError: on every rank: what opening it raises; CORRUPT, AMBIGUOUS where the ranks have opened different
            ones, or in different ways.
    """
    if isinstance(src, Checkpoint):
        with world.together():
            given = [name for name, value in reading.items() if value is not None]
            if given:
                raise TypeError(f"{', '.join(given)}: pass this to open() instead; the checkpoint is already open")
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
    """Prove that all ranks have opened one checkpoint, in one way; collective.

    Copies on the disks of several machines are one if their manifests are, or without manifests their files' sizes;
    they may have several paths. So may configs and tables of rules, whose contents are compared.

    Args:
        checkpoint: what this rank opened.
        world: the ranks.

    Raises:
        Refused: on every rank: CORRUPT where they have one path, else AMBIGUOUS.
    """
    with world.together():
        mine = unpinned(checkpoint.path), _identity(checkpoint), _reading(checkpoint)
    opened_by_rank = world.gather(mine)
    first_path, first_identity, first_reading = opened_by_rank[0]
    for rank, (path, identity, reading) in zip(world.ranks, opened_by_rank, strict=True):
        if identity != first_identity:
            message = f"ranks {world.ranks[0]} and {rank} opened different checkpoints"
            if path != first_path:
                message = f"{message}: {first_path} and {path}"
                raise refuse("AMBIGUOUS", message, hint="Give the same path on all ranks, or paths of equal copies.")
            message = f"{message}: it was replaced while they were opening it"
            raise refuse("CORRUPT", message, file=path, hint="Load again when no other program writes to this path.")
        if reading != first_reading:
            names = sorted({*first_reading, *reading})
            name = next(name for name in names if reading.get(name) != first_reading.get(name))
            message = f"{name}: rank {rank} reads the checkpoint with another value than rank {world.ranks[0]}"
            raise refuse("AMBIGUOUS", message, file=path, hint="Give the same arguments on all ranks.")


def _reading(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the arguments that say how a checkpoint is read, by name, as hashes of them."""
    how, settings = checkpoint.reopening, checkpoint.settings
    options: Mapping[str, Any] = {"config": settings.config, "axes": settings.axes}
    if how is not None:
        options = {**how.options, "rules": how.rules, "view": how.steps}
    return {name: digest(comparable(value)) for name, value in options.items() if value}


def _identity(checkpoint: Checkpoint) -> str:
    storage = checkpoint.container.storage
    if storage.single is None and MANIFEST in storage.names() and storage.size(MANIFEST) <= _LARGEST_MANIFEST:
        return digest(storage.read(MANIFEST, 0, storage.size(MANIFEST)))
    pinned = checkpoint.path if unpinned(checkpoint.path) != checkpoint.path else ""
    return digest(repr((pinned, sorted(checkpoint.container.files.items()))).encode())


def check_read(storage: Storage, world: World) -> None:
    """Prove that nobody has written to the files meanwhile, and that what was read has its checksums; collective.

    What a service sends is held against its version at every request.

    Raises:
        Refused: CORRUPT, on every rank.
        StorageError: IO.
    """
    with world.together():
        files = lowest(storage)
        if isinstance(files, LocalStorage):
            files.refuse_rewritten()
    _check_sums(storage, world)


def _check_sums(storage: Storage, world: World) -> None:
    """Hold every range that the ranks have read whole, alone or together, against its checksum; collective.

    What each rank has summed up is put together, also of runs between which others have read theirs. A range that was
    read in a way that cannot be summed up is read once more by one of the ranks. A range of which they need only a part
    is not checked: the rest of it would have to be read for that.

    Raises:
        Refused: CORRUPT, on every rank.
        StorageError: IO.
    """
    witness = layer(storage, Witness)
    of_all_ranks = world.gather(None if witness is None else {each: witness.tally(each) for each in witness.open()})
    if witness is None or any(tallies is None for tallies in of_all_ranks):
        return  # all ranks read the same files, which give no checksums
    with world.together():
        read: dict[Checksum, list[Tally]] = {}
        for tallies in of_all_ranks:
            for checksum, tally in (tallies or {}).items():
                read.setdefault(checksum, []).append(tally)
        ranges = sorted(read, key=lambda each: (each.file, each.offset))
        for checksum in ranges[world.ranks.index(world.rank) :: world.size]:
            witness.put_together(checksum, read[checksum])
            if witness.is_right(checksum) is None and sum(tally.read for tally in read[checksum]) >= checksum.size:
                witness.settle([checksum])
        witness.judge()
