"""Translates a live state dict into a different dialect, with placements chosen so that no rank needs bytes of another
rank.

For each tensor of the target dialect, a search finds a placement for which every rank can make its shard from its own
tensors. The search tries one placement after another. To test a placement, it plans the copies that would fill the
tensor, so it needs no special code for each framework.
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

from transaxle.arguments import Config, read_optional_text, read_text
from transaxle.axes.layout.relayout import Shape
from transaxle.axes.translation.grouped import Regrouping
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.settings import Settings, model_config
from transaxle.engine.source import Source
from transaxle.engine.wording import plural
from transaxle.errors import LACKING, Code, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.live.derived import find_unloadable, settle
from transaxle.live.global_tensors import Census, own_census
from transaxle.live.memory import check_zero, container, own_entry, rank_of, tensor_of
from transaxle.live.model.source_view import change_form, refuse_omitted
from transaxle.live.model.state_tensors import Leaves, State, leaves, own_config
from transaxle.live.transport.world import World
from transaxle.move.transfer import Transfer, as_box_copy
from transaxle.torch_tensors import (
    Placement,
    Positions,
    as_dtensor,
    assemble_boxes,
    byte_view,
    copy_box,
    copy_box_back,
    cut_of,
    flat,
    local_of,
    local_shape,
    torch_dtype,
)

ABSENT: Code = "INCOMPLETE"
"""Code of the refusal of a shard whose bytes are not all on this rank."""
Coordinate = tuple[int, ...]
"""Coordinates of a rank in a device mesh."""
Choice = TorchPlacement | int
"""Placement of a tensor along one mesh dim; an integer means that only ranks with this coordinate have the tensor."""


def is_present(choices: tuple[Choice, ...], coordinate: Coordinate) -> bool:
    """Return whether the rank with the given coordinates has a shard of a tensor."""
    return all(not isinstance(choice, int) or choice == at for choice, at in zip(choices, coordinate, strict=True))


class PlacementSearch:
    """Finds placements for the tensors of a state that is translated into the target dialect.

    Args:
        view: the state, translated into the target dialect.
        global_tensors: the tensors of all ranks, with the shard that each rank holds, as far as this rank knows.
    """

    def __init__(self, view: Checkpoint, global_tensors: Census) -> None:
        self._view = view
        self._global_tensors = global_tensors
        self._sources: dict[int, Source] = {}
        self._known_choices: dict[tuple[object, ...], tuple[Choice, ...]] = {}
        """Mapping rule, shape and placements of a tensor -> choices that worked; they are tried first for the same
        tensors of other layers.
        """

    def find(
        self,
        name: str,
        mesh: DeviceMesh,
        coordinates: Mapping[int, Coordinate],
        placements: tuple[tuple[TorchPlacement, ...], ...],
    ) -> tuple[Choice, ...] | None:
        """Return the placement of a tensor along each mesh dim; None if every placement would require communication
        between ranks.

        Args:
            name: name of the tensor.
            mesh: the mesh of the source tensors from which the tensor is made.
            coordinates: coordinates of each rank in the mesh.
            placements: the placements of the source tensors from which the tensor is made.
        """
        stored = self._view[name]
        owners = [coordinates[rank_of(transfer.file)] for transfer in stored.transfers()]
        only = tuple(places.pop() if len(places := set(column)) == 1 else None for column in zip(*owners, strict=True))
        key = self._view.targets[name].rule, stored.shape, placements, mesh
        worked = self._known_choices.get(key)
        if worked is not None:
            moved = tuple(
                at if isinstance(choice, int) and at is not None else choice
                for choice, at in zip(worked, only, strict=True)
            )
            if self._works(name, mesh, coordinates, moved):
                return moved
        for choices in _candidates(len(stored.shape), mesh, only):
            if self._works(name, mesh, coordinates, choices):
                self._known_choices[key] = choices
                return choices
        return None

    def intervals_by_rank(
        self, shape: Shape, mesh: DeviceMesh, choices: tuple[Choice, ...], name: str
    ) -> Mapping[int, Positions]:
        """Return rank -> intervals of the shard that it holds, for a tensor with the given placement."""
        ranks = tuple(mesh.mesh.flatten().tolist())
        cuts = tuple(cut_of(Replicate() if isinstance(choice, int) else choice, name) for choice in choices)
        return Placement(tuple(mesh.mesh.shape), ranks, cuts).positions(shape)

    def transfers(self, name: str, intervals: Positions, rank: int) -> list[Transfer] | None:
        """Return the transfers that make a shard of a tensor from one rank's memory; None if the rank lacks some of the
        bytes.
        """
        source = self._sources.get(rank)
        if source is None:
            entries = {n: own_entry(t, rank) for n, t in self._global_tensors.items() if rank in t.positions}
            source = self._sources[rank] = Source(self._view.container, entries)
        stored = self._view[name]
        part = StoredTensor(name, stored.dtype, stored.shape, self._view.targets[name], source)
        try:
            return part.transfers(intervals)
        except KeyError:
            return None
        except TransaxleError as error:
            if error.code != ABSENT:
                raise
            return None

    def _works(
        self, name: str, mesh: DeviceMesh, coordinates: Mapping[int, Coordinate], choices: tuple[Choice, ...]
    ) -> bool:
        """Return whether every rank has all bytes of its shard of the tensor in its memory."""
        intervals_by_rank = self.intervals_by_rank(self._view[name].shape, mesh, choices, name)
        return all(
            self.transfers(name, intervals_by_rank[rank], rank) is not None
            for rank, coordinate in coordinates.items()
            if is_present(choices, coordinate)
        )


def _candidates(dims: int, mesh: DeviceMesh, only: tuple[int | None, ...]) -> Iterator[tuple[Choice, ...]]:
    """Yield the possible placements of a tensor, beginning with the placement that replicates it most.

    Args:
        dims: number of dims of the tensor.
        mesh: mesh of the tensor.
        only: for each mesh dim, the single coordinate at which ranks have source tensors; None if there are several
            such coordinates.
    """
    sizes = tuple(mesh.mesh.shape)
    factors = sorted({size for size in (*sizes, prod(sizes)) if size > 1})
    cuts: list[Choice] = [Shard(dim) for dim in range(dims)]
    cuts += [_StridedShard(dim, split_factor=factor) for dim in range(dims) for factor in factors]
    per_dim: list[list[Choice]] = []
    for size, coordinate in zip(sizes, only, strict=True):
        alone: list[Choice] = [coordinate] if coordinate is not None and size > 1 else []
        per_dim.append([Replicate(), *alone, *cuts] if size > 1 else [Replicate()])
    yield from product(*per_dim)


def state_dict_as(
    state: State,
    dialect: str,
    *,
    family: str | None = None,
    source: str | None = None,
    config: Config | None = None,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a model or state dict in a different dialect, without a disk and without messages between
    ranks.

    Args:
        state: a model, or a state dict whose values are tensors or DTensors; a rank's state dict may lack names that
            other ranks have.
        dialect: label of the target dialect, such as `hf`.
        family: model family; None means that it is recognised from the tensor names.
        source: dialect of the state's present tensor names; None means that it is recognised from the names.
        config: the model's config, as a path, a mapping or an object with `to_dict()`; None means the config of the
            model, if it has one.

    This function sends no messages. So the function cannot detect that another rank of a tensor's mesh omits the
    tensor, or refuses its values (such as a nonzero bias for which the dialect has no name). `save`, `load` and
    `reshard` check this, and refuse such a tensor.

    Ranks may get different names. If a fused tensor of gate and up is sharded between the two, half of the ranks get
    `gate` and the other half `up`, and no rank knows both names. To copy values back into the state, use `loadable_as`,
    which stores how the tensors were split.

    Returns:
        Name -> tensor or DTensor, for tensors that this rank has, whole or as a shard. A DTensor is on the mesh of its
        source tensors, or on the submesh of the ranks that have its name; its shape and stride are those of the whole
        tensor. Tensors that need no rearrangement share the storage of the source tensors.

    Raises:
        TypeError: if an argument has the wrong type.
        Refused: with code UNSUPPORTED or MISSING_TENSOR, if a rank would need data of another rank; also any refusal of
            the translation between dialects.
        UsageError: with code UNKNOWN_FAMILY or AMBIGUOUS, if the dialect of the names cannot be recognised; with code
            UNKNOWN_AXIS, if the size of an axis is unknown.
    """
    adapter = _adapter(state, dialect, family, source, config)
    adapter.check_zero()
    return adapter.tensors()


def loadable_as(
    state: State,
    dialect: str,
    *,
    family: str | None = None,
    source: str | None = None,
    config: Config | None = None,
) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Return tensors of a different dialect to fill, and a function that copies their values back into the state.

        state, give_back = tx.loadable_as(model, "hf")
        dcp.load(state, checkpoint_id="in-hf")
        give_back()

    The arguments are those of `state_dict_as`, whose result is the first of the two returned values.

    Raises:
        Refused: any refusal of `state_dict_as`; with code INCOMPLETE, if the returned tensors do not cover all bytes of
            the state.
    """
    return _to_be_filled(_adapter(state, dialect, family, source, config))


def regroupable(state: State, stems: Sequence[Regrouping]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """Do what `loadable_as` does, but for grouped parameters: return stacks as separate tensors, and separate tensors
    as stacks.
    """
    return _to_be_filled(
        _make_adapter(state, None, Settings(partial=True), lambda state_view: change_form(state_view, stems))
    )


def _to_be_filled(adapter: _Adapter) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    tensors = adapter.tensors()
    adapter.check_complete(tensors)
    adapter.check_taken()
    tensors = adapter.apart(tensors)
    return tensors, lambda: adapter.give_back(tensors)


def _adapter(state: State, dialect: str, family: str | None, source: str | None, config: Config | None) -> _Adapter:
    target_dialect = read_text("dialect", dialect, "hf")
    family = read_optional_text("family", family, "qwen3_moe")
    source = read_optional_text("source", source, "torchtitan")
    content = own_config(state) if config is None else model_config(config)
    settings = Settings(family=family, dialect=source, partial=True)
    return _make_adapter(state, content, settings, lambda state_view: _translate(state_view, target_dialect))


def _translate(state_view: Checkpoint, dialect: str) -> Checkpoint:
    """Return a state translated into a different dialect; if the state lacks tensors, the hint of the refusal names
    `loadable_as`.

    Raises:
        TransaxleError: if the dialect cannot express the state.
    """
    try:
        return state_view.as_dialect(dialect)
    except TransaxleError as error:
        if not LACKING.issuperset(refusal.code for refusal in error.refusals):
            raise
        call = f'state, give_back = tx.loadable_as(model, "{state_view.dialect}")'
        hint = (
            f"If another rank holds the tensor, build the state with  {call}  from the one in {dialect}, and then call "
            "give_back()."
        )
        raise gathered(replace(refusal, hint=hint) for refusal in error.refusals) from None


def _make_adapter(
    state: State, config: Mapping[str, Any] | None, settings: Settings, change: Callable[[Checkpoint], Checkpoint]
) -> _Adapter:
    rank = World().rank
    state_leaves = leaves(state)
    global_tensors = own_census(state_leaves.tensors, rank)
    view = change(Checkpoint(container(global_tensors, state_leaves.tensors, rank, config), settings, None, None))
    return _Adapter(view, PlacementSearch(view, global_tensors), state_leaves, rank)


class _Adapter:
    """Makes the tensors of the target dialect from this rank's tensors.

    Args:
        view: the state, translated into the target dialect.
        search: object that finds the placements of the target dialect's tensors.
        state_leaves: this rank's tensors of the state.
        rank: number of this rank.
    """

    def __init__(self, view: Checkpoint, search: PlacementSearch, state_leaves: Leaves, rank: int) -> None:
        self._view = view
        self._search = search
        self._leaves = state_leaves
        self._rank = rank
        self._transfers: dict[str, list[Transfer]] = {}
        """Tensor name -> transfers with which this rank's shard of the tensor was made."""
        self._followers: dict[str, str] = {}
        """Name of a 0-d tensor (a step) that the target dialect omits -> name of the 0-d tensor that represents it in
        the target dialect.
        """
        self._shared: frozenset[str] = frozenset()
        """Names of the state's tensors from which several tensors of the target dialect are made."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the target dialect that this rank has, whole or as a shard.

        Raises:
            Refused: with code UNSUPPORTED or INCOMPLETE, if no placement works, or this rank lacks bytes.
        """
        tensors = {name: self._make(name) for name in self._view}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def check_zero(self) -> None:
        """Refuse nonzero values in those of this rank's tensors for which the target dialect has no name.

        Raises:
            Refused: with code UNEXPECTED_TENSOR, if such a value is nonzero.
        """
        check_zero(self._view.checks, self._leaves.tensors)

    def check_complete(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse tensors of the state if none of the new tensors contains some of their bytes.

        Raises:
            Refused: with code INCOMPLETE, if there are such bytes.
        """
        used = dict.fromkeys(self._leaves.tensors, 0)
        for name in tensors:
            for transfer in self._transfers[name]:
                used[tensor_of(transfer.file)] += transfer.size
        problems = []
        self._followers = {name: first for name, first in self._numbers().items() if not used[name]}
        sizes = {name: local_of(tensor).nbytes for name, tensor in self._leaves.tensors.items()}
        sizes |= {check.first.name: 0 for check in self._view.checks if check.zero}
        for name, size in used.items():
            if name not in self._followers and size < sizes[name]:
                message = f"only {size} of this rank's {sizes[name]} bytes are in the other dialect"
                problems.append(Refusal("INCOMPLETE", message, Where(None, name)))
        if problems:
            raise gathered(problems)
        self._shared = frozenset(name for name, size in used.items() if size > sizes[name])

    def check_taken(self) -> None:
        """Refuse derived entries of a model (copies in its state dict) that its own `load_state_dict` cannot load.

        Raises:
            Refused: with code UNSUPPORTED or MISSING_TENSOR, if a module cannot load such an entry.
        """
        refusals = self._leaves.refusals
        problems, omitted = find_unloadable(() if refusals else self._leaves.custom_modules)
        if problems or omitted or refusals:
            raise gathered([*refusals, *problems, *refuse_omitted(omitted)])

    def apart(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors; a tensor that shares bytes with another one is cloned, because the two may get different
        values.
        """
        return {name: tensor.clone() if self._is_shared(name) else tensor for name, tensor in tensors.items()}

    def give_back(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy values of the new tensors back into the tensors of the state.

        Raises:
            Refused: with code UNEQUAL_COPIES, if several different values would become one value; with code
                UNEXPECTED_TENSOR, if a tensor that the state lacks has nonzero values.
        """
        own_tensors = self._leaves.tensors
        message = "it is not all zero, and the state has no such tensor"
        unplaced = (name for name in tensors if not self._transfers[name])
        problems = [
            Refusal("UNEXPECTED_TENSOR", message, Where(None, name))
            for name in unplaced
            if local_of(tensors[name]).count_nonzero()
        ]
        if problems:
            raise gathered(problems)
        flat_own = {name: flat(tensor) for name, tensor in own_tensors.items()}
        with torch.no_grad():
            self._check_alike(tensors)
            for name, tensor in tensors.items():
                self._copy_back(name, tensor, flat_own)
            for name, tensor in own_tensors.items():
                local = local_of(tensor)
                if local.numel() and not local.is_contiguous():
                    local.copy_(flat_own[name].view(local.shape))
            for name, first in self._followers.items():
                own_tensors[name].copy_(own_tensors[first])
            for name in (check.first.name for check in self._view.checks if check.zero):
                own_tensors[name].zero_()
        settle(self._leaves.custom_modules, own_tensors)

    def _is_shared(self, name: str) -> bool:
        return any(tensor_of(transfer.file) in self._shared for transfer in self._transfers[name])

    def _copy_back(self, name: str, tensor: torch.Tensor, sources: Mapping[str, torch.Tensor]) -> None:
        """Copy the values of a new tensor back into the source tensors, which are given as flat views."""
        values = flat(tensor)
        for transfer in self._transfers[name]:
            copy_box_back(as_box_copy(transfer, values.element_size()), sources[tensor_of(transfer.file)], values)

    def _check_alike(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse new tensors with different values for the same value of the state, such as a shared step.

        To test this, all values are written into copies of the source tensors. If a value is different when it is read
        back, a second new tensor has overwritten it.

        Raises:
            Refused: with code UNEQUAL_COPIES, if two values for the same value of the state differ.
        """
        shared = [name for name in tensors if self._is_shared(name)]
        needed = {tensor_of(transfer.file) for name in shared for transfer in self._transfers[name]}
        merged = {name: flat(self._leaves.tensors[name]).clone() for name in needed}
        for name in shared:
            self._copy_back(name, tensors[name], merged)
        problems = []
        for name in shared:
            values = flat(tensors[name])
            read_back = values.clone()
            for transfer in self._transfers[name]:
                move = as_box_copy(transfer, values.element_size())
                copy_box(move, merged[tensor_of(transfer.file)], read_back)
            if not torch.equal(byte_view(read_back), byte_view(values)):
                sources = ", ".join(dict.fromkeys(tensor_of(transfer.file) for transfer in self._transfers[name]))
                message = f"the tensors to be joined ({sources}) have unequal values"
                problems.append(Refusal("UNEQUAL_COPIES", message, Where(None, name)))
        if problems:
            raise gathered(problems)

    def _numbers(self) -> dict[str, str]:
        """Return, for 0-d tensors (steps) that become one entry of the target dialect, name -> name of the tensor whose
        value this entry gets.
        """
        checks = [check for check in self._view.checks if not check.zero]
        pairs = [[side.parts[0].origins[0].name for side in (c.first, c.second)] for c in checks]
        return {second: first for first, second in pairs if self._leaves.tensors[second].numel() == 1}

    def _make(self, name: str) -> torch.Tensor | None:
        """Make one tensor of the target dialect; return None if this rank has no shard of it.

        Raises:
            Refused: with code UNSUPPORTED or INCOMPLETE, if no placement works, or this rank lacks bytes.
        """
        stored = self._view[name]
        origins = sorted(stored.origins)
        tensors = [self._leaves.tensors[origin] for origin in origins]
        distributed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        meshes = {tensor.device_mesh for tensor in distributed}
        if not meshes:
            return self._local(name, tuple(((0, size),) for size in stored.shape))
        if len(meshes) > 1 or len(distributed) < len(tensors):
            message = f"it joins tensors on different meshes: {', '.join(origins)}"
            raise refuse("UNSUPPORTED", message, tensor=name, hint="Redistribute the source tensors to one mesh first.")
        mesh = meshes.pop()
        ranks = mesh.mesh.flatten().tolist()
        if self._rank not in ranks:
            return None
        coordinates = {rank: tuple((mesh.mesh == rank).nonzero()[0].tolist()) for rank in ranks}
        choices = self._search.find(name, mesh, coordinates, tuple(t.placements for t in distributed))
        if choices is None:
            placements_shown = ", ".join(f"{o} {list(t.placements)}" for o, t in zip(origins, distributed, strict=True))
            message = f"no placement matches the parts that the ranks already hold; its sources are {placements_shown}"
            hint = "Use tx.reshard to move parts between ranks, or redistribute the sources."
            raise refuse("UNSUPPORTED", message, tensor=name, hint=hint)
        if not is_present(choices, coordinates[self._rank]):
            return None
        intervals = self._search.intervals_by_rank(stored.shape, mesh, choices, name)[self._rank]
        return _to_dtensor(self._local(name, intervals), mesh, choices, stored.shape, name)

    def _local(self, name: str, intervals: Positions) -> torch.Tensor:
        """Make this rank's shard of a tensor; a shard that is one run of one source tensor shares the storage of that
        tensor.

        Raises:
            Refused: with code INCOMPLETE, if this rank has only some of the source tensors, such as its own experts.
        """
        stored = self._view[name]
        transfers = self._search.transfers(name, intervals, self._rank)
        if transfers is None:
            message = f"this rank has {plural(len(stored.origins), 'tensor')} of it, but needs more"
            raise refuse(
                ABSENT, message, tensor=name, hint="Use tx.save and tx.load, which join the parts of all ranks."
            )
        self._transfers[name] = transfers
        dtype, shape = torch_dtype(stored.dtype, tensor=name), local_shape(intervals)
        own_tensors = self._leaves.tensors
        if len(transfers) == 1 and not transfers[0].loops and transfers[0].size == prod(shape) * dtype.itemsize:
            start = transfers[0].source // dtype.itemsize
            return flat(own_tensors[tensor_of(transfers[0].file)])[start : start + prod(shape)].view(shape)
        sources = {file: flat(own_tensors[tensor_of(file)]) for file in {each.file for each in transfers}}
        boxes = [(as_box_copy(each, dtype.itemsize), sources[each.file]) for each in transfers]
        like = local_of(own_tensors[min(stored.origins or own_tensors)])
        return assemble_boxes(shape, dtype, like.device, boxes)


def _to_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, choices: tuple[Choice, ...], shape: tuple[int, ...], name: str
) -> torch.Tensor:
    """Wrap a local shard as a DTensor, on the submesh of the ranks that have the tensor."""
    placements = [choice for choice in choices if not isinstance(choice, int)]
    if not placements:
        return local
    if len(placements) < len(choices):
        names = mesh.mesh_dim_names
        if names is None:
            message = "only some ranks of the mesh have it, and without names the mesh dims do not say which"
            raise refuse("UNSUPPORTED", message, tensor=name, hint="Give init_device_mesh the argument mesh_dim_names.")
        mesh = mesh[tuple(n for n, choice in zip(names, choices, strict=True) if not isinstance(choice, int))]
    return as_dtensor(local, mesh, placements, shape)
