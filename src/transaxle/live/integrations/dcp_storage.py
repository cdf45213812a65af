"""Storage for `torch.distributed.checkpoint` (DCP): `dcp.load` from any checkpoint, `dcp.save` into any.

    dcp.load(state, storage_reader=tx.dcp.Reader("Qwen3-30B-A3B/", dialect="torchtitan"))
    dcp.save(state, storage_writer=tx.dcp.Writer("out/", to="hf"))

The planner is torch's own or that of a trainer: it decides which boxes of which tensors a rank needs or has. `Reader`
shows a checkpoint of any format under the names of a dialect, and reads each rank's boxes straight into the tensors
that the planner gives. `Writer` collects the boxes of all ranks, and writes them once, into the final files.

**Names.** A state dict is often nested: {"model": ..., "optimizer": ...}. `model` and `optimizer` are the keys there,
dotted if they are nested deeper. The state of an optimizer has torch's names: `optimizer.state.<parameter>.exp_avg`,
and `optimizer.param_groups`, which may be flattened: `optimizer.param_groups.<parameter>.lr`.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.futures import Future

from transaxle.arguments import Overwrite, PathLike, read_count, read_flag, read_path, read_text
from transaxle.axes.layout.bind import split_slot
from transaxle.engine.checkpoint.checkpoint import Checkpoint, CheckpointLike, StoredTensor, open_checkpoint
from transaxle.engine.checkpoint.recognise import IDENTITY
from transaxle.engine.checkpoint.settings import settings as reading_settings
from transaxle.engine.checkpoint.source_hashes import UNCHECKED, damage_first
from transaxle.engine.duplicates import compare_copies, plan_checks
from transaxle.engine.plan.conversion import parse_to
from transaxle.engine.views.decoded import rename_groups
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.catalog import nbytes
from transaxle.formats.registry import get_format
from transaxle.formats.storage.storage import is_url
from transaxle.formats.training_state import (
    GROUPS,
    KEPT,
    PARAMS,
    ParamGroup,
    groups_of_equal_settings,
    is_extra_state,
)
from transaxle.live.integrations.dcp_planners import slot_name, torch_name
from transaxle.live.load import reading_limits
from transaxle.live.load_plan import compare_openings, identify_opening
from transaxle.live.memory import container
from transaxle.live.model.destination import (
    LocalSink,
    SaveReport,
    TensorDestination,
    check_filled,
    decode_hint,
)
from transaxle.live.save import (
    CollectedState,
    SaveSettings,
    add_unfinished,
    collect,
    read_settings,
    wait_for,
    write_checkpoint,
)
from transaxle.live.source_check import SourceCheck
from transaxle.live.transport.background import BackgroundSave, in_saving_thread, training_groups, wait_for_saves
from transaxle.live.transport.world import Clock, World
from transaxle.move.mover import Movement
from transaxle.move.workers import Item, limits
from transaxle.torch_tensors import Positions, Ranks, ShardGrid, cells_of, code_of, placement_of, torch_dtype

_Result = TypeVar("_Result")
_STATE = "state"
"""Key of the tensors in a state dict of an optimizer, as torch's `get_optimizer_state_dict` returns it."""
_OF_OPTIMIZER = re.compile(rf"(?:.*\.)?optim(?:izer)?\.(?:{_STATE}|{GROUPS})(?:\..*)?")
"""Pattern of the names that an optimizer's entries have in most programs."""
_LENIENT: Mapping[str, Any] = {"optimizer": True, "lenient": True}
"""Options of `open_checkpoint` for optimizer state, if the checkpoint has any."""

_FOREIGN = (
    'Leave it out: Writer(leave_out=["{entry}"]). If it is a part of the model, save {{"model": state}} with '
    'Writer(model="model").'
)
_UNGROUPED = (
    "If ranks have different parameters, torch saves the groups of one rank: flatten the optimizer's state, "
    "StateDictOptions(flatten_optimizer_state_dict=True)."
)
_NOT_IN_BACKGROUND = (
    "the training waited until dcp.async_save had written the checkpoint, because the save used a process group of the "
    'training. Make a group for all saves, group = dist.new_group(backend="gloo"), and call '
    "dcp.async_save(..., process_group=group)"
)
_UNREQUESTED = "The checkpoint may be that of a larger model. Reader(strict=False) loads it without these tensors."


class Reader(StorageReader):
    """A storage reader with which `dcp.load` loads any checkpoint in any dialect; each rank reads its own bytes.

    Each rank may use any planner. Torch's own reader copies a tensor into one of any dtype, even codes without their
    scales; this one refuses another dtype, unless `dtype` or `decode` asks for it.

    Args:
        src: path or URL of a checkpoint, or an open checkpoint.
        dialect: dialect of the names in the state dict, such as `torchtitan`; None means the names of the checkpoint.
        model: key of the model's tensors in the state dict; empty if they are at its top.
        optimizer: key of the optimizer's state in the state dict; None means that no optimizer state is offered.
        jobs: number of reading threads per rank; None means as many as there are processors for it, but at most 8.
        strict: whether to refuse tensors of the model that no rank's state dict asks for; an optimizer's state may be
            left.
        check_source: whether to compare what is read with the hashes in the checkpoint's manifest and the checksums in
            its files, if it has any. Tensors that the ranks have read in parts are read a second time for their hashes.
        **opening: options of `open`: `family`, `config`, `decode`, `graft` and others; not with an open checkpoint.

    Attributes:
        bytes_read: number of bytes that this rank has read from the checkpoint's files for tensors.
        source_against: what the last load compared the bytes with, as in the report of `tx.load`.
        partly_read: stored names of the tensors that it did not compare, because it read less than half of them.

    Raises:
        TypeError: if an argument has the wrong type, or options are given with an open checkpoint.
        TransaxleError: when `dcp.load` begins: if the checkpoint cannot be opened or read in this dialect.
    """

    def __init__(
        self,
        src: CheckpointLike,
        dialect: str | None = None,
        *,
        model: str = "",
        optimizer: str | None = None,
        jobs: int | None = None,
        strict: bool = True,
        check_source: bool = True,
        **opening: Any,
    ) -> None:
        super().__init__()
        self._source: CheckpointLike = src if isinstance(src, Checkpoint) else read_path("src", src)
        if isinstance(src, Checkpoint) and opening:
            raise TypeError(f"{', '.join(opening)}: pass this to open() instead; the checkpoint is already open")
        for argument in opening.keys() - {
            *signature(open_checkpoint).parameters,
            *signature(reading_settings).parameters,
        }:
            raise TypeError(f"Reader() got an unexpected keyword argument {argument!r}")
        self._dialect = None if dialect is None else read_text("dialect", dialect, "torchtitan")
        self._model, self._optimizer = model, optimizer
        self._jobs = None if jobs is None else read_count("jobs", jobs)
        self._strict = read_flag("strict", strict)
        self._check_source = read_flag("check_source", check_source)
        self._opening = opening
        self._checkpoint: Checkpoint | None = None
        self._tensors: dict[str, StoredTensor] = {}
        self._objects: dict[str, Any] = {}
        self.bytes_read = 0
        self.source_against, self.partly_read = UNCHECKED, tuple[str, ...]()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for a new load, of another path if `checkpoint_id` is given."""
        if checkpoint_id and os.fspath(checkpoint_id) != self.checkpoint_id:
            self._close()
            self._source = read_path("checkpoint_id", checkpoint_id)
        self.bytes_read = 0

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Open the checkpoint, and return the names, shapes and dtypes that its tensors have in the dialect.

        This first waits for saves that `dcp.async_save` runs in the background with a `Writer`.

        Raises:
            TransaxleError: if the checkpoint cannot be opened, or not be expressed in the dialect.
        """
        wait_for_saves()
        checkpoint = self._open()
        self._tensors, self._objects = dict(self._list_tensors(checkpoint)), dict(self._settings(checkpoint))
        entries: dict[str, Any] = dict.fromkeys(self._objects, BytesStorageMetadata())
        properties: dict[str, TensorProperties] = {}
        for name, tensor in self._tensors.items():
            if tensor.dtype not in properties:
                properties[tensor.dtype] = TensorProperties(torch_dtype(tensor.dtype, tensor=name))
            shape = torch.Size(tensor.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            entries[name] = TensorStorageMetadata(properties[tensor.dtype], shape, [whole])
        return Metadata(entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan what this rank has opened, for `prepare_global_plan`."""
        path, identity, options = identify_opening(self._open())
        return replace(plan, storage_data=(path, identity, {**options, "check_source": str(self._check_source)}))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have opened the same checkpoint with the same options, and ask for all of the model.

        Raises:
            Refused: with the code AMBIGUOUS or CORRUPT if ranks have opened different checkpoints; with the code
                UNEXPECTED_TENSOR if no rank asks for some tensor, unless `strict` is False.
        """
        compare_openings([plan.storage_data for plan in plans], range(len(plans)))
        requested = {item.storage_index.fqn for plan in plans for item in plan.items}
        if self._strict and (problems := list(self._find_unrequested(requested))):
            raise gathered(problems)
        return [replace(plan, storage_data=len(plans)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes of a plan into the tensors that the planner gives for them.

        Raises:
            Refused: before a tensor is changed: with the code DTYPE_MISMATCH if a tensor has another dtype than its
                stored values; with the code UNSUPPORTED if the planner asks for other elements than the tensor has;
                with the code UNEQUAL_COPIES if stored copies of a tensor, such as ties, differ. Later: with the code
                CORRUPT if bytes do not match their checksum or hash, or a file was rewritten.
            StorageError: with the code IO if a file cannot be read.
        """
        checkpoint, world = self._open(), World()
        if world.size != plan.storage_data:
            world = World.alone()  # torch was given some of the ranks, and does not say which
        boxes = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        check = SourceCheck(checkpoint, world, is_enabled=self._check_source)
        with world.together():
            targets = [planner.resolve_tensor(item).detach() for item in boxes]
            problems = [*_find_misplaced(planner, boxes), *self._find_unlike(boxes, targets)]
            if problems:
                raise gathered(problems)
            self._refuse_unequal(checkpoint, world)
        with world.together():
            self._read(checkpoint, boxes, targets)
        check.finish()
        self.source_against, self.partly_read = check.against, check.partly_read
        for item, target in zip(boxes, targets, strict=True):
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickle(self._objects[item.storage_index.fqn]))
        self._close()
        return _future_of(None)

    def _read(self, checkpoint: Checkpoint, boxes: Sequence[ReadItem], targets: Sequence[torch.Tensor]) -> None:
        """Read boxes of stored tensors into as many targets."""
        items, destinations = list[Item](), dict[str, TensorDestination]()
        for number, (box, target) in enumerate(zip(boxes, targets, strict=True)):
            stored = self._tensors[box.storage_index.fqn]
            positions = _positions(box.storage_offsets, box.lengths)
            destinations[f"{box.storage_index.fqn}, box {number}"] = TensorDestination(target, stored.dtype)
            size = nbytes(stored.dtype, tuple(box.lengths))
            items.append(Item(number, size, partial(stored.transfers, positions), (0,), (0,)))
        storage = checkpoint.container.storage
        before = storage.bytes_read
        sink = LocalSink(destinations, list(destinations))
        Movement(items, storage, sink, reading_limits(self._jobs)).move_local()
        self.bytes_read += storage.bytes_read - before
        check_filled(destinations)

    def _find_unlike(self, boxes: Sequence[ReadItem], targets: Sequence[torch.Tensor]) -> Iterator[Refusal]:
        """Yield a refusal for each tensor whose dtype is not that of the stored one."""
        refused_names = set[str]()
        for box, target in zip(boxes, targets, strict=True):
            name = box.storage_index.fqn
            stored, requested = self._tensors[name].dtype, code_of(target.dtype)
            if stored != requested and name not in refused_names:
                refused_names.add(name)
                message = f"its dtype is {requested} in the state dict, but {stored} in the checkpoint"
                yield Refusal("DTYPE_MISMATCH", message, Where(None, name), decode_hint(stored, requested))

    def _find_unrequested(self, requested: AbstractSet[str]) -> Iterator[Refusal]:
        """Yield a refusal for each tensor of the model that the state dicts lack.

        A tensor without elements, one that the files do not store, and a copy of a tensor that is loaded (a tie) may be
        left.
        """
        by_origins: dict[frozenset[str], list[StoredTensor]] = {}
        for name in requested & self._tensors.keys():
            by_origins.setdefault(self._tensors[name].origins, []).append(self._tensors[name])
        copies = self._copies_of(frozenset().union(*by_origins))
        for name, tensor in self._tensors.items():
            if name in requested or self._is_slot(name) or is_extra_state(name) or tensor.origins <= copies:
                continue  # a tensor that the files do not store has no origins
            aliases = [alias for alias in by_origins.get(tensor.origins, ()) if alias.shape == tensor.shape]
            if tensor.nbytes and not (aliases and tensor.transfers() in [alias.transfers() for alias in aliases]):
                message = "the checkpoint has this tensor, and no rank's state dict asks for it"
                yield Refusal("UNEXPECTED_TENSOR", message, Where(None, name), _UNREQUESTED)

    def _copies_of(self, loaded: AbstractSet[str]) -> set[str]:
        """Return the names of stored tensors that the load compares with others, which it loads."""
        copies = set[str]()
        for check in self._open().checks:
            first, second = (
                {origin.name for part in target.parts for origin in part.origins}
                for target in (check.first, check.second)
            )
            if not check.zero:
                copies |= (first if second <= loaded else set()) | (second if first <= loaded else set())
        return copies

    def _is_slot(self, name: str) -> bool:
        """Return whether a name in the state dict is that of an optimizer's state."""
        return self._optimizer is not None and name.startswith(f"{_join(self._optimizer, _STATE)}.")

    def _refuse_unequal(self, checkpoint: Checkpoint, world: World) -> None:
        """Compare stored copies that must be equal; each rank compares its share of them.

        Raises:
            Refused: with the code UNEQUAL_COPIES; with the code CORRUPT, if damage is the reason.
        """
        if not checkpoint.checks and not checkpoint.container.twins:
            return
        problems: list[Refusal] = []
        storage, recoding = checkpoint.container.storage, checkpoint.container.recoding
        with damage_first(storage, recoding, is_checked=self._check_source):
            checks = plan_checks(checkpoint.source, checkpoint.checks, problems)
            problems += compare_copies(checks[world.ranks.index(world.rank) :: world.size], storage, limits(self._jobs))
            if problems:
                raise gathered(problems)

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            source = self._source
            if not isinstance(source, Checkpoint):
                source = open_checkpoint(source, **self._opening, **({} if self._optimizer is None else _LENIENT))
            self._checkpoint = source if self._dialect is None else source.as_dialect(self._dialect)
        return self._checkpoint

    def _close(self) -> None:
        """Close the checkpoint, unless the caller opened it."""
        if self._checkpoint is not None and not isinstance(self._source, Checkpoint):
            self._checkpoint.close()
        self._checkpoint, self._tensors, self._objects = None, {}, {}

    def _list_tensors(self, checkpoint: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
        """Yield (name in the state dict, tensor)."""
        for name, tensor in checkpoint.items():
            if not split_slot(name)[1]:
                yield _join(self._model, name), tensor
            elif self._optimizer is not None:
                yield torch_name(name, f"{_join(self._optimizer, _STATE)}."), tensor

    def _settings(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
        """Yield (name in the state dict, value) for the settings of parameter groups, as a list and flattened."""
        stored = checkpoint.container.metadata.get(GROUPS, ()) if self._optimizer is not None else ()
        if self._optimizer is None or not stored:
            return
        problems: list[Refusal] = []
        groups = rename_groups(stored, checkpoint.targets, problems)
        if problems:
            raise gathered(problems)
        yield _join(self._optimizer, GROUPS), groups
        for group in groups:
            for parameter in group[PARAMS]:
                for key, value in group.items():
                    if key != PARAMS:
                        yield _join(self._optimizer, GROUPS, parameter, key), value

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a path or URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    @property
    def checkpoint_id(self) -> str:
        """Path or URL of the checkpoint."""
        return self._source.path if isinstance(self._source, Checkpoint) else str(self._source)


class _Entries(msgspec.Struct, frozen=True):
    """The entries of a plan that saves, of this rank."""

    left_out: list[str]
    """Names in the state dict that are not saved."""
    boxes: dict[str, list[WriteItem]]
    """Transaxle's name of a tensor -> its boxes."""
    pickles: dict[str, io.BytesIO]
    """Transaxle's name of a value that is not a tensor -> its pickle, by torch's planner."""


class Writer(StorageWriter, AsyncStager):
    """A storage writer with which `dcp.save` and `dcp.async_save` write a checkpoint of any format and dialect, in one
    pass and without files that are joined later.

    All ranks must create it, and call `dcp.save` together. The checkpoint appears as a whole, or not at all. Folders
    above a local target are created, as by torch's own writer.

    A second `dcp.async_save` waits until the first has ended. If a save in a thread uses a process group with which the
    model may be trained, such as the default group with gloo alone, `dcp.async_save` returns when the save has ended;
    give it a `process_group` of its own, and the training goes on meanwhile.

    Args:
        dst: target folder or URL; None means the `checkpoint_id` of `dcp.save`.
        to: file format and dialect, `FORMAT[:DIALECT]`; `hf` means `safetensors:hf`.
        model: key of the model's tensors in the state dict; empty if they are at its top. Then entries at the top are
            refused if a family's table knows no name in them.
        optimizer: key of the optimizer's state in the state dict, which is saved too; None if it has none.
        leave_out: keys of entries that are not saved, such as `train_state`.
        group: the ranks that save together; None means all ranks. A save in a thread needs a process group of its own,
            which is created if this is None; so create the writer before the other thread starts.
        overwrite: whether to replace the checkpoint at `dst`, as for `save`.
        **saving: options of `save`: `family`, `config`, `verify` and others. Without `config`, a folder for a hub has
            no config.json.

    Attributes:
        report: the report of the last save on this rank; None before it, and if a background process saved.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: raised on every rank by `dcp.save`; the target is then unchanged.
    """

    report: SaveReport | None

    def __init__(
        self,
        dst: PathLike | None = None,
        *,
        to: str = "hf",
        model: str = "",
        optimizer: str | None = None,
        leave_out: Collection[str] = (),
        group: Ranks | None = None,
        overwrite: Overwrite = False,
        **saving: Any,
    ) -> None:
        super().__init__()
        self._dst = None if dst is None else read_path("dst", dst)
        self._model, self._optimizer = model, optimizer
        self._leave_out = tuple(leave_out)
        self._settings = read_settings(
            self._dst or "", to, optimizer=optimizer is not None, overwrite=overwrite, **saving
        )
        if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            group = dist.new_group(backend="gloo")
        self._group = group
        self._save: BackgroundSave | None = None
        self._training_groups: AbstractSet[dist.ProcessGroup] = frozenset()
        self.report = None

    def __getstate__(self) -> dict[str, Any]:
        """A background process has a process group of its own, of the same ranks."""
        if (save := self._own_save()) is not None:
            save.leave_process()
        of_this_process = ("_group", "_save", "report")
        return {**self.__dict__, **dict.fromkeys(of_this_process), "_training_groups": frozenset()}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Wait for the last save in the background, and return a copy of the state dict; `dcp.async_save` calls this.

        torch itself lets two saves run at the same time, which fails: two threads use one process group, or read
        answers from one pipe.
        """
        wait_for_saves()
        if self._dst is not None:
            wait_for(self._dst)
        copy = DefaultStager(StagingOptions(*[False] * len(fields(StagingOptions)))).stage(state_dict)
        assert isinstance(copy, dict)  # it was not copied in another thread
        self._save, self._training_groups = BackgroundSave(), training_groups(state_dict)
        return copy

    def synchronize_staging(self) -> None:
        """Register the save, which has been started; if it uses a process group of the training, wait until it has
        ended. `dcp.async_save` calls this.
        """
        save = self._save
        assert save is not None  # torch has called `stage`
        save.register()
        if self._dst is not None:
            add_unfinished(self._dst, save.wait)
        if self._training_groups and save.find_groups() & self._training_groups:
            if dist.get_rank() == 0:
                warnings.warn(_NOT_IN_BACKGROUND, stacklevel=2)
            save.wait()

    def close(self) -> None:
        """Do nothing: nothing is kept of a staged state dict."""

    def _own_save(self) -> BackgroundSave | None:
        """Return the save in the background that the current thread runs with this writer, if it runs one."""
        if self._save is not None:
            self._save.begin()
        return self._save if self._save is not None and self._save.is_own_thread else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for a new save, to another target if `checkpoint_id` is given."""
        self._own_save()  # torch may call this first in the thread that saves
        if checkpoint_id:
            self._dst = read_path("checkpoint_id", checkpoint_id)
        self.report = None

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: ARG002 - torch's name
        """Wait for other saves in the background, and refuse to save without a target.

        Raises:
            UsageError: with the code IO if there is no target.
        """
        if self._own_save() is None and in_saving_thread():  # `dcp.async_save` has another stager
            self._save = BackgroundSave.of_this_thread()
        wait_for_saves()
        if (save := self._own_save()) is not None:
            save.begin_plan()
        if self._dst is None:
            raise refuse("IO", "there is no target", hint="Give Writer(dst), or checkpoint_id= to dcp.save.")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add the number of ranks to each plan."""
        return [replace(plan, storage_data=len(plans)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes into the target's files together with all other ranks, and commit the files.

        Raises:
            TransaxleError: raised on every rank; the target is unchanged after an error.
        """
        if (save := self._own_save()) is not None:
            save.end_plan()
        world, clock = _ranks_of(plan.storage_data, self._group), Clock()
        with world.together():
            entries = self._sort(plan.items, planner)
            tensors = {name: _part(name, items, planner) for name, items in entries.boxes.items()}
            # planning needs numbers, such as an optimizer's step, on every rank, and torch leaves each on one
            numbers = {name: _pickle(tensors.pop(name)) for name in [*tensors] if not tensors[name].dim()}
            pickles = {name: value.getvalue() for name, value in (entries.pickles | numbers).items()}
        all_pickles = [pair for of_rank in world.gather(pickles) for pair in of_rank.items()]
        with world.together():
            values = {name: _unpickle(name, octets) for name, octets in all_pickles}
        groups = {name: values.pop(name) for name in [*values] if name == KEPT or name.startswith(f"{KEPT}.")}
        settings_of = partial(replace, self._settings, dst=str(self._dst))
        settings, collected = collect(settings_of, {**tensors, **values}, None, None, world)
        out = sorted({name for of_rank in world.gather(entries.left_out) for name in of_rank})
        with world.together():
            collected = replace(collected, groups=_as_groups(groups), left_out=(*collected.left_out, *out))
            if problems := list(_find_ungrouped(collected.groups, collected.global_tensors)):
                raise gathered(problems)
            if not self._model and (problems := list(_find_foreign(settings, collected, values))):
                raise gathered(problems)
            if world.rank == world.ranks[0] and not is_url(settings.dst):
                Path(settings.dst).parent.mkdir(parents=True, exist_ok=True)
        self.report = write_checkpoint(settings, collected, world, clock)
        return _future_of([WriteResult(item.index, 0, None) for item in plan.items])

    def _sort(self, items: Iterable[WriteItem], planner: SavePlanner) -> _Entries:
        """Return the entries of a plan by their kind.

        Raises:
            Refused: with the code UNEXPECTED_TENSOR if an entry belongs to nothing that is saved.
        """
        entries = _Entries([], {}, {})
        for item in items:
            name = self._own_name(item.index.fqn)
            if not name:
                entries.left_out.append(item.index.fqn)
            elif item.type == WriteItemType.BYTE_IO:
                pickle_of_value = planner.resolve_data(item)
                assert isinstance(pickle_of_value, io.BytesIO)  # a planner pickles what is not a tensor
                entries.pickles[name] = pickle_of_value
            else:
                entries.boxes.setdefault(name, []).append(item)
        return entries

    def _own_name(self, name: str) -> str:
        """Return Transaxle's name of an entry of the state dict; empty if it is left out."""
        if any(name == key or _inside(name, key) for key in self._leave_out):
            return ""
        if self._optimizer is not None and (inside := _inside(name, self._optimizer)):
            if (of_state := slot_name(name, f"{_join(self._optimizer, _STATE)}.")) != name:
                return of_state
            if inside.partition(".")[0] == GROUPS:
                return f"{KEPT}{inside.removeprefix(GROUPS)}"
        elif (inside := _inside(name, self._model)) and (self._optimizer or not _OF_OPTIMIZER.match(name)):
            return inside
        first = name.partition(".")[0]
        hint = f'Say what it is: Writer(optimizer="{first}"), model="{first}" or leave_out=["{first}"].'
        raise refuse("UNEXPECTED_TENSOR", "this entry of the state dict is not the model's", tensor=name, hint=hint)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: `write_data` has committed the checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a path or URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    @property
    def checkpoint_id(self) -> str:
        """Path or URL of the target; empty if none was given yet."""
        self._own_save()  # torch may read this first in the thread that saves
        return self._dst or ""


def _ranks_of(count: int, group: Ranks | None) -> World:
    """Return the ranks that save together.

    Args:
        count: number of ranks that take part in the call of torch.
        group: the ranks as far as the user said; None means all ranks.

    Raises:
        Refused: with the code UNSUPPORTED if these are other ranks than those of the group.
    """
    if count == 1:
        return World.alone()
    world = World(group)
    if world.size != count:
        message = f"{count} ranks take part in this call of torch, and the group has {world.size}"
        raise refuse("UNSUPPORTED", message, hint="Give Writer the group= that is process_group= of the call.")
    return world


def _find_foreign(settings: SaveSettings, state: CollectedState, values: Iterable[str]) -> Iterator[Refusal]:
    """Yield a refusal for each entry at the top of a state dict in which a family's table knows no name.

    A target without a dialect of a family keeps every name.

    Args:
        settings: the settings of the save.
        state: the collected state of all ranks.
        values: names of the entries that are numbers or no tensors.
    """
    form, label = parse_to(settings.to)
    if label == IDENTITY or not (label or get_format(form).dialects):
        return
    reading = reading_settings(
        family=settings.family, dialect=settings.dialect, optimizer=settings.optimizer, axes=settings.axes,
        rules=settings.rules,
    )  # fmt: skip
    checkpoint = Checkpoint(container(state.global_tensors, {}, 0, state.config), reading, None, None)
    if checkpoint.family is None:
        return  # the plan says why
    bound = checkpoint.bound
    read_names = {bound.own.get(name, name) for names in bound.names.values() for name in names.values()} | {
        *bound.ignored
    }
    known_entries = {name.partition(".")[0] for name in read_names}
    unknown = dict.fromkeys(name for name in (*bound.unknown, *values) if not is_extra_state(name))
    foreign = {entry: name for name in unknown if (entry := split_slot(name)[0].partition(".")[0]) not in known_entries}
    for entry, name in foreign.items():
        message = f"no line of {bound.family.name}, dialect {bound.dialect.label}, reads a tensor in this entry"
        yield Refusal("UNEXPECTED_TENSOR", message, Where(None, name), _FOREIGN.format(entry=entry))


def _find_misplaced(planner: LoadPlanner, boxes: Sequence[ReadItem]) -> Iterator[Refusal]:
    """Yield a refusal for each tensor of several runs of rows for which torch's planner asks for a single box."""
    state: Mapping[str, Any] = getattr(planner, "state_dict", {})
    requested: dict[str, set[Positions]] = {}
    for box in boxes:
        requested.setdefault(box.dest_index.fqn, set()).add(_positions(box.storage_offsets, box.lengths))
    for name, boxes_of_name in requested.items():
        tensor = state.get(name)
        if isinstance(tensor, DTensor) and any(isinstance(each, _StridedShard) for each in tensor.placements):
            rank = dist.get_rank()
            positions = placement_of(tensor, rank, name).positions(tuple(tensor.shape))[rank]
            if boxes_of_name != set(cells_of(positions)):
                message = "its placements give this rank several runs of rows, and the planner asks for one box"
                yield Refusal("UNSUPPORTED", message, Where(None, name), "Use dcp.load(tx.as_runs(state), ...).")


def _join(*keys: str) -> str:
    return ".".join(filter(None, keys))


def _inside(name: str, key: str) -> str:
    """Return the name of an entry below a key; empty if it is not below it."""
    if not key:
        return name
    return name.removeprefix(f"{key}.") if name.startswith(f"{key}.") else ""


def _positions(starts: Sequence[int], sizes: Sequence[int]) -> Positions:
    return tuple(((start, start + size),) for start, size in zip(starts, sizes, strict=True))


def _part(name: str, items: Sequence[WriteItem], planner: SavePlanner) -> torch.Tensor:
    """Return this rank's part of a tensor, from its boxes.

    Raises:
        Refused: with the code UNSUPPORTED if the boxes are not a grid.
    """
    cells: dict[Positions, torch.Tensor] = {}
    shape: tuple[int, ...] = ()
    for item in items:
        assert item.tensor_data is not None  # only values that are not tensors have none
        shape, chunk = tuple(item.tensor_data.size), item.tensor_data.chunk
        values = planner.resolve_data(item)
        assert isinstance(values, torch.Tensor)
        cells[_positions(chunk.offsets, chunk.sizes)] = values.detach()
    if len(cells) == 1 and next(iter(cells.values())).shape == torch.Size(shape):
        return next(iter(cells.values()))
    grid = tuple(tuple(sorted({cell[dim][0] for cell in cells})) for dim in range(len(shape)))
    in_order = list(cells_of(grid))
    if set(in_order) != cells.keys():
        message = f"the {len(cells)} boxes of it that this rank has are no grid"
        raise refuse("UNSUPPORTED", message, tensor=name, hint="Wrap the state dict: dcp.save(tx.as_runs(state)).")
    return ShardGrid(shape, grid, [cells[cell] for cell in in_order])


def _unpickle(name: str, octets: bytes) -> Any:
    """Return a value that a planner has pickled.

    Raises:
        Refused: with the code UNSUPPORTED if it is not plain data.
    """
    try:
        return torch.load(io.BytesIO(octets), weights_only=True)
    except pickle.UnpicklingError as error:
        hint = f'Leave it out: Writer(leave_out=["{name.partition(".")[0]}"]).'
        raise refuse(
            "UNSUPPORTED", f"it is not plain data: {error}".partition("\n")[0], tensor=name, hint=hint
        ) from None


def _as_groups(settings: Mapping[str, Any]) -> list[ParamGroup]:
    """Return parameter groups from the entries of a state dict under `KEPT`.

    torch flattens a list of groups to `KEPT.<number>.<setting>`; state dicts whose optimizer is flattened have
    `KEPT.<parameter>.<setting>`. Only groups in a list have the setting `params`.

    Raises:
        Refused: with the code UNSUPPORTED if a setting is a list of tensors.
    """
    groups: list[ParamGroup] = list(settings.get(KEPT, ()))
    by_number: dict[int, dict[str, Any]] = {}
    by_parameter: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        key = name.removeprefix(f"{KEPT}.")
        number, _, setting = key.partition(".")
        if name == KEPT:
            continue
        if not number.isdecimal() or f"{KEPT}.{number}.{PARAMS}" not in settings:
            parameter, _, setting = key.rpartition(".")
            by_parameter.setdefault(parameter, {})[setting] = value
        elif "." in setting:
            message = f"group {number} of the optimizer has a setting of several tensors"
            raise refuse("UNSUPPORTED", message, tensor=setting.partition(".")[0], hint="Make numbers of the tensors.")
        else:
            by_number.setdefault(int(number), {})[setting] = value
    groups += [by_number[number] for number in sorted(by_number)]
    return [*groups, *groups_of_equal_settings(by_parameter)]


def _find_ungrouped(groups: Sequence[ParamGroup], names: Iterable[str]) -> Iterator[Refusal]:
    """Yield a refusal for each parameter that has an optimizer's state and is in no group, if there are groups.

    Args:
        groups: the parameter groups of all ranks.
        names: names of the tensors of all ranks.
    """
    grouped = {parameter for group in groups for parameter in group[PARAMS]}
    with_state = dict.fromkeys(parameter for parameter, slot in map(split_slot, names) if slot)
    for parameter in with_state if groups else ():
        if parameter not in grouped:
            message = "the optimizer has state of this parameter, and the parameter is in none of its groups"
            yield Refusal("MISSING_TENSOR", message, Where(None, parameter), _UNGROUPED)


def _pickle(value: Any) -> io.BytesIO:
    """Return a value as torch's planners expect it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _future_of(result: _Result) -> Future[_Result]:
    """Return a future that has this result."""
    future: Future[_Result] = Future()
    future.set_result(result)
    return future
