"""The adapter: a live state dict under another dialect's names and shapes, its placements worked out, not copied along.

For every tensor of the target dialect the placement is looked for under which each rank's part is made of what that
rank holds already; then nothing is sent. Placements are tried, and each trial is decided by the same box copies that
will fill the tensor: there is no rule per framework that could be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from transaxle.axes.translation.grouped import Stem
from transaxle.engine.checkpoint.checkpoint import LACKING, Checkpoint, StoredTensor
from transaxle.engine.checkpoint.settings import Settings
from transaxle.engine.checkpoint.stacked_experts import seen
from transaxle.engine.copying.source import Source
from transaxle.engine.units import plural
from transaxle.errors import Code, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.live.derived.settle import left_out, settle, untaken
from transaxle.live.model.live_config import Config, own_config, plain
from transaxle.live.model.state_tensors import Leaves, State, leaves
from transaxle.live.sharding.global_tensors import Census, own_census
from transaxle.live.sharding.memory import container, own_entry, rank_of, tensor_of
from transaxle.live.transport.world import World
from transaxle.move.transfer import Transfer
from transaxle.torch_tensors.local_tensor import as_dtensor, local_of
from transaxle.torch_tensors.placement import Held, Placement, cut_of, local_shape
from transaxle.torch_tensors.torch_dtype import torch_dtype

_At = int
"""A coordinate of a mesh dim: only ranks there have the tensor."""
_Choice = TorchPlacement | _At
_ABSENT: Code = "INCOMPLETE"


def state_dict_as(
    state: State,
    dialect: str,
    *,
    family: str | None = None,
    source: str | None = None,
    config: Config | None = None,
) -> dict[str, torch.Tensor]:
    """Return a model's or state dict's tensors in another dialect; no disk, and nothing is sent between ranks.

    Args:
        state: a model, or a state dict whose leaves are tensors or DTensors, with any rank's share of the names.
        dialect: the dialect wanted, such as `hf`.
        family: model family; None: recognised.
        source: dialect of the names as they are; None: recognised.
        config: the model's config; None: that of the model, where it has one.

    A tensor that another rank of its mesh omits is not noticed: that would need a question to it. `save`, `load` and
    `reshard` ask, and refuse it.

    The way back needs what `loadable_as` remembers where the ranks have different names: where a cut goes through gate
    and up in one tensor, one half of the mesh has the one and the other half the other, and no rank knows of both.

    Returns:
        Names of which this rank holds anything -> tensor or DTensor. A DTensor is on the mesh of its sources, or on the
        part of it whose ranks hold the name, with global shape and stride. What needs no rearrangement shares storage.

    Raises:
        Refused: UNSUPPORTED, MISSING_TENSOR where a rank would need what another holds; what stands against the
            translation.
        UsageError: UNKNOWN_FAMILY, AMBIGUOUS, UNKNOWN_AXIS.
    """
    adapter = _adapter(state, dialect, family, source, config)
    return adapter.all()


def loadable_as(
    state: State,
    dialect: str,
    *,
    family: str | None = None,
    source: str | None = None,
    config: Config | None = None,
) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Return tensors of another dialect to be written into, and what then gives their values to the state's own.

        state, give_back = tx.loadable_as(model, "hf")
        dcp.load(state, checkpoint_id="in-hf")
        give_back()

    The arguments are those of `state_dict_as`, whose result is the first part.

    Raises:
        Refused: as `state_dict_as`; INCOMPLETE for a tensor of the state that these are not all of.
    """
    return _to_be_filled(_adapter(state, dialect, family, source, config))


def regroupable(state: State, given: Sequence[Stem]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Do the same with grouped parameters in their other form (`transaxle.engine.checkpoint.stacked_experts`)."""
    return _to_be_filled(_adapted(state, None, Settings(partial=True), lambda held: seen(held, given)))


def _to_be_filled(adapter: _Adapter) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    made = adapter.all()
    adapter.check_complete(made)
    adapter.check_taken()
    made = adapter.apart(made)
    return made, lambda: adapter.give_back(made)


def _adapter(state: State, dialect: str, family: str | None, source: str | None, config: Config | None) -> _Adapter:
    told = own_config(state) if config is None else plain(config)
    said = Settings(family=family, dialect=source, partial=True)
    return _adapted(state, told, said, lambda held: _expressed(held, dialect))


def _expressed(held: Checkpoint, dialect: str) -> Checkpoint:
    """Return a state in another dialect; where it lacks something, tell of the call that knows the way back.

    Raises:
        TransaxleError: what stands against it.
    """
    try:
        return held.as_dialect(dialect)
    except TransaxleError as error:
        if not LACKING.issuperset(refusal.code for refusal in error.refusals):
            raise
        call = f'state, give_back = tx.loadable_as(model, "{held.dialect}")'
        hint = f"if another rank holds it: make the state by  {call}  from the one in {dialect}, and then give_back()"
        raise gathered(replace(refusal, hint=hint) for refusal in error.refusals) from None


def _adapted(
    state: State, config: Mapping[str, Any] | None, said: Settings, change: Callable[[Checkpoint], Checkpoint]
) -> _Adapter:
    rank = World().rank
    found = leaves(state)
    mine = found.tensors
    everything = own_census(mine, rank)
    seen = change(Checkpoint(container(everything, mine, rank, config), said, None, None))
    return _Adapter(seen, everything, found, rank)


class _Adapter:
    """Makes the tensors of one view out of this rank's tensors."""

    def __init__(self, seen: Checkpoint, everything: Census, found: Leaves, rank: int) -> None:
        self._seen = seen
        self._everything = everything
        self._mine = found.tensors
        self._islands, self._kept = found.islands, found.kept
        self._rank = rank
        self._known: dict[Any, tuple[_Choice, ...]] = {}
        self._sources: dict[int, Source] = {}
        self._given: dict[str, list[Transfer]] = {}
        self._follow: dict[str, str] = {}
        self._shared: frozenset[str] = frozenset()

    def all(self) -> dict[str, torch.Tensor]:
        """Return every tensor of which this rank has anything."""
        made = {name: self.make(name) for name in self._seen}
        return {name: tensor for name, tensor in made.items() if tensor is not None}

    def check_complete(self, made: Mapping[str, torch.Tensor]) -> None:
        """Refuse tensors of which some bytes went nowhere.

        Raises:
            Refused: INCOMPLETE.
        """
        given = dict.fromkeys(self._mine, 0)
        for name in made:
            for transfer in self._given[name]:
                given[tensor_of(transfer.file)] += transfer.size
        problems = []
        self._follow = {name: first for name, first in self._numbers().items() if not given[name]}
        for name, size in given.items():
            own = _size(self._mine[name])
            if name not in self._follow and size < own:
                message = f"{size} of this rank's {own} bytes are in the other dialect"
                problems.append(Refusal("INCOMPLETE", message, Where(None, name)))
        if problems:
            raise gathered(problems)
        self._shared = frozenset(name for name, size in given.items() if size > _size(self._mine[name]))

    def check_taken(self) -> None:
        """Refuse entries of a model that are copies and whose values its own `load_state_dict` does not take.

        Raises:
            Refused: UNSUPPORTED, MISSING_TENSOR.
        """
        problems, left = untaken(() if self._kept else self._islands)
        if problems or left or self._kept:
            raise gathered([*self._kept, *problems, *left_out(left)])

    def apart(self, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors; those made of the same bytes get memory of their own, since they may be filled unlike."""
        return {name: tensor.clone() if self._is_shared(name) else tensor for name, tensor in made.items()}

    def _is_shared(self, name: str) -> bool:
        return any(tensor_of(transfer.file) in self._shared for transfer in self._given[name])

    def _check_alike(self, made: Mapping[str, torch.Tensor]) -> None:
        """Refuse values of which one has to become of several, such as a step, where these differ.

        Raises:
            Refused: UNEQUAL_COPIES.
        """
        shared = [name for name in made if self._is_shared(name)]
        needed = {tensor_of(transfer.file) for name in shared for transfer in self._given[name]}
        flat = {name: _flat(self._mine[name]).clone() for name in needed}
        for name in shared:
            for transfer in self._given[name]:
                _copy(transfer, flat[tensor_of(transfer.file)], _flat(made[name]), back=True)
        problems = []
        for name in shared:
            again = _flat(made[name]).clone()
            for transfer in self._given[name]:
                _copy(transfer, flat[tensor_of(transfer.file)], again)
            if not torch.equal(again.view(torch.uint8), _flat(made[name]).view(torch.uint8)):
                whole = ", ".join(dict.fromkeys(tensor_of(transfer.file) for transfer in self._given[name]))
                message = f"others of which {whole} is to be made have other values"
                problems.append(Refusal("UNEQUAL_COPIES", message, Where(None, name)))
        if problems:
            raise gathered(problems)

    def give_back(self, made: Mapping[str, torch.Tensor]) -> None:
        """Write the values of made tensors into those that they were made of.

        Raises:
            Refused: UNEQUAL_COPIES where one value is to be made of several that differ.
        """
        flat = {name: _flat(tensor) for name, tensor in self._mine.items()}
        with torch.no_grad():
            self._check_alike(made)
            for name, tensor in made.items():
                for transfer in self._given[name]:
                    _copy(transfer, flat[tensor_of(transfer.file)], _flat(tensor), back=True)
            for name, tensor in self._mine.items():
                local = local_of(tensor)
                if local.numel() and not local.is_contiguous():
                    local.copy_(flat[name].view(local.shape))
            for name, first in self._follow.items():
                self._mine[name].copy_(self._mine[first])
        settle(self._islands, self._mine)

    def _numbers(self) -> dict[str, str]:
        """Return the numbers (a step) that are one in the other dialect, each with the one that is taken for all."""
        pairs = [[side.parts[0].origins[0].name for side in (c.first, c.second)] for c in self._seen.checks]
        return {second: first for first, second in pairs if self._mine[second].numel() == 1}

    def make(self, name: str) -> torch.Tensor | None:
        """Return one tensor, or None where this rank has nothing of it.

        Raises:
            Refused: UNSUPPORTED.
        """
        origins = sorted(self._seen[name].origins)
        tensors = [self._mine[origin] for origin in origins]
        distributed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        meshes = {tensor.device_mesh for tensor in distributed}
        if not meshes:
            return self._local(name, tuple(((0, size),) for size in self._seen[name].shape))
        if len(meshes) > 1 or len(distributed) < len(tensors):
            message = f"it is made of tensors on different meshes: {', '.join(origins)}"
            raise refuse("UNSUPPORTED", message, tensor=name, hint="redistribute them to one mesh first")
        mesh = meshes.pop()
        ranks = mesh.mesh.flatten().tolist()
        if self._rank not in ranks:
            return None
        coordinates = {rank: tuple((mesh.mesh == rank).nonzero()[0].tolist()) for rank in ranks}
        choices = self._choices(name, mesh, coordinates, tuple(t.placements for t in distributed))
        if choices is None:
            placed = ", ".join(f"{o} {list(t.placements)}" for o, t in zip(origins, distributed, strict=True))
            message = f"no placement gives every rank a part that it holds already; it is made of {placed}"
            hint = "tx.reshard moves what other ranks hold; or redistribute the sources"
            raise refuse("UNSUPPORTED", message, tensor=name, hint=hint)
        here = coordinates[self._rank]
        if not _present(choices, here):
            return None
        local = self._local(name, self._held(name, mesh, choices)[self._rank])
        return _distributed(local, mesh, choices, self._seen[name].shape, name)

    def _choices(
        self,
        name: str,
        mesh: DeviceMesh,
        coordinates: Mapping[int, tuple[int, ...]],
        placements: tuple[tuple[TorchPlacement, ...], ...],
    ) -> tuple[_Choice, ...] | None:
        """Return, per mesh dim, where a tensor lies; None where no choice does without sending."""
        stored = self._seen[name]
        owners = [coordinates[rank_of(transfer.file)] for transfer in stored.transfers()]
        at = tuple(found.pop() if len(found := set(column)) == 1 else None for column in zip(*owners, strict=True))
        key = self._seen.targets[name].rule, stored.shape, placements, mesh
        known = self._known.get(key)
        if known is not None:
            moved = tuple(a if isinstance(c, int) and a is not None else c for c, a in zip(known, at, strict=True))
            if self._works(name, mesh, coordinates, moved):
                return moved
        for choices in _candidates(len(stored.shape), mesh, at):
            if self._works(name, mesh, coordinates, choices):
                self._known[key] = choices
                return choices
        return None

    def _works(
        self, name: str, mesh: DeviceMesh, coordinates: Mapping[int, tuple[int, ...]], choices: tuple[_Choice, ...]
    ) -> bool:
        """Tell whether every rank holds all that its part is made of."""
        held = self._held(name, mesh, choices)
        return all(
            self._transfers(name, held[rank], rank) is not None
            for rank, coordinate in coordinates.items()
            if _present(choices, coordinate)
        )

    def _held(self, name: str, mesh: DeviceMesh, choices: tuple[_Choice, ...]) -> Mapping[int, Held]:
        ranks = tuple(mesh.mesh.flatten().tolist())
        cuts = tuple(cut_of(Replicate() if isinstance(choice, int) else choice, name) for choice in choices)
        return Placement(tuple(mesh.mesh.shape), ranks, cuts).held(self._seen[name].shape)

    def _transfers(self, name: str, held: Held, rank: int) -> list[Transfer] | None:
        """Return what makes a part of a tensor out of one rank's memory; None where something is missing there."""
        source = self._sources.get(rank)
        if source is None:
            entries = {n: own_entry(t, rank) for n, t in self._everything.items() if rank in t.held}
            source = self._sources[rank] = Source(self._seen.container, entries)
        stored = self._seen[name]
        part = StoredTensor(name, stored.dtype, stored.shape, self._seen.targets[name], source)
        try:
            return part.transfers(held)
        except KeyError:
            return None
        except TransaxleError as error:
            if error.code != _ABSENT:
                raise
            return None

    def _local(self, name: str, held: Held) -> torch.Tensor:
        """Make this rank's part of a tensor.

        Raises:
            Refused: INCOMPLETE where this rank has some of what it is made of only, as of experts that ranks share out.
        """
        stored = self._seen[name]
        found = self._transfers(name, held, self._rank)
        if found is None:
            message = f"this rank has {plural(len(stored.origins), 'tensor')} of it, and needs more"
            raise refuse(_ABSENT, message, tensor=name, hint="tx.save and tx.load put together what ranks have")
        transfers = self._given[name] = found
        dtype, shape = torch_dtype(stored.dtype, tensor=name), local_shape(held)
        first = self._mine[min(stored.origins)]
        if len(transfers) == 1 and not transfers[0].loops and transfers[0].size == prod(shape) * dtype.itemsize:
            only = transfers[0]
            flat = _flat(self._mine[tensor_of(only.file)])
            start = only.source // dtype.itemsize
            return flat[start : start + prod(shape)].view(shape)
        filled = sum(transfer.size for transfer in transfers) == prod(shape) * dtype.itemsize
        out = (torch.empty if filled else torch.zeros)(shape, dtype=dtype, device=local_of(first).device)
        for transfer in transfers:
            _copy(transfer, _flat(self._mine[tensor_of(transfer.file)]), out.view(-1))
        return out


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes that this rank has of a tensor."""
    local = local_of(tensor)
    return local.numel() * local.element_size()


def _candidates(dims: int, mesh: DeviceMesh, at: tuple[int | None, ...]) -> Iterator[tuple[_Choice, ...]]:
    """Yield what a tensor's placement may be, those that hold most first."""
    sizes = tuple(mesh.mesh.shape)
    factors = sorted({size for size in (*sizes, prod(sizes)) if size > 1})
    cuts: list[_Choice] = [Shard(dim) for dim in range(dims)]
    cuts += [_StridedShard(dim, split_factor=factor) for dim in range(dims) for factor in factors]
    per_dim: list[list[_Choice]] = []
    for size, coordinate in zip(sizes, at, strict=True):
        alone: list[_Choice] = [coordinate] if coordinate is not None and size > 1 else []
        per_dim.append([Replicate(), *alone, *cuts] if size > 1 else [Replicate()])
    yield from product(*per_dim)


def _present(choices: tuple[_Choice, ...], coordinate: tuple[int, ...]) -> bool:
    return all(not isinstance(c, int) or c == here for c, here in zip(choices, coordinate, strict=True))


def _distributed(
    local: torch.Tensor, mesh: DeviceMesh, choices: tuple[_Choice, ...], shape: tuple[int, ...], name: str
) -> torch.Tensor:
    """Wrap a local part; on the part of the mesh that has the tensor, if that is not all of it."""
    placements = [choice for choice in choices if not isinstance(choice, int)]
    if not placements:
        return local
    if len(placements) < len(choices):
        names = mesh.mesh_dim_names
        if names is None:
            message = "only some ranks of the mesh have it, and the mesh dims have no names to tell which"
            raise refuse("UNSUPPORTED", message, tensor=name, hint="give init_device_mesh mesh_dim_names")
        mesh = mesh[tuple(n for n, choice in zip(names, choices, strict=True) if not isinstance(choice, int))]
    return as_dtensor(local, mesh, placements, shape)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as one dim; it shares storage if it is contiguous."""
    return local_of(tensor).contiguous().view(-1)


def _copy(transfer: Transfer, source: torch.Tensor, out: torch.Tensor, *, back: bool = False) -> None:
    """Carry a copy out between two flat tensors of one type; `back`: from its target to its source."""
    item = out.element_size()
    shape = [*(count for count, _, _ in transfer.loops), transfer.width // item]
    steps = [[*(loop[side] // item for loop in transfer.loops), 1] for side in (1, 2)]
    into = out.as_strided(shape, steps[1], out.storage_offset() + transfer.target // item)
    given = source.as_strided(shape, steps[0], source.storage_offset() + transfer.source // item)
    if back:
        given.copy_(into)
    else:
        into.copy_(given)
