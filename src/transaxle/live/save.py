"""Saving live models: every rank writes its own byte ranges directly into the final files of a checkpoint.

All ranks compute the same plan from the census (the list of all ranks' tensors), and write the files once; no later
step joins files.

**In a folder**, rank 0 creates the files, and all ranks write into these files. A tensor that one rank writes is hashed
while it is written; a tensor that several ranks write is read back and hashed. At the end, rank 0 writes headers and
the manifest, and commits.

**On a storage service**, a file can be sent only from its beginning to its end. So each file is sent by one rank, which
receives the parts of the file that other ranks hold. No file becomes visible before all files were sent. Then the files
of the ranks 1, 2, … become visible, and at the end those of rank 0, which include the index and the manifest. If a rank
fails, every rank deletes the files that it sent, unless the manifest is already visible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from torch import nn

from transaxle.arguments import (
    EVERYTHING,
    Axes,
    Config,
    Degrees,
    Overwrite,
    PathLike,
    Size,
    check_flags,
    read_axes,
    read_degrees,
    read_optional_text,
    read_path,
    read_size,
    read_text,
    suggests,
)
from transaxle.encodings.encoding import PLAIN
from transaxle.engine.carry import carry, seal, write_fragments
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.recognise import IDENTITY, check_dialect, pick_dialect, pick_family
from transaxle.engine.checkpoint.settings import LONGEST_TABLE, model_config
from transaxle.engine.checkpoint.settings import settings as reading_settings
from transaxle.engine.duplicates import PlannedCheck
from transaxle.engine.plan.conversion import Prepared, for_hub, make_plan, parse_to, require_ready
from transaxle.engine.plan.planned import PlannedTensor
from transaxle.errors import TransaxleError, gathered, refuse
from transaxle.formats.registry import get_format, is_one_file
from transaxle.formats.storage.local import LocalStorage, read_file
from transaxle.formats.storage.storage import is_url
from transaxle.formats.store.staging import Writer, as_local_path, staging_at
from transaxle.formats.store.upload import Upload, opens
from transaxle.formats.training_state import ParamGroup
from transaxle.live.extra_state import EXTRA, FILE, MODEL, STATE, encode_states, state_of
from transaxle.live.global_tensors import Census, FsdpRanks, census, fsdp_ranks
from transaxle.live.memory import Memory, compare_copies, container, memory_of, rank_of
from transaxle.live.model.destination import SaveReport
from transaxle.live.model.quantized_model import to_hub_convention
from transaxle.live.model.state_tensors import State, common_config, leaves, unsavable
from transaxle.live.optimizer_state import all_groups, as_tensor, by_name, groups_of, names_without_optimizer, states_of
from transaxle.live.optimizers import AnyOptimizer
from transaxle.live.transport.tensor_exchange import RankExchange
from transaxle.live.transport.world import Clock, World, comparable, is_loss
from transaxle.move.journal import FinishedTensor, HashingFiles, digest, digest_in
from transaxle.move.mover import Movement
from transaxle.move.workers import DisjointSets, Item, Load, is_long, limits
from transaxle.options import SHARD_SIZE, select
from transaxle.torch_tensors import Ranks, local_parts

if TYPE_CHECKING:
    from transaxle.engine.verification import Verification
    from transaxle.formats.store.staging import Stage
    from transaxle.move.transfer import Writable


_FOLDED = 16 << 20
"""A tensor of at most this many bytes may be written by one rank, even if the rank then writes more than the others."""
_Hashes = dict[str, str]


def write(
    prepared: Prepared, dst: str, world: World, clock: Clock, *, overwrite: Overwrite, sync: bool
) -> tuple[int, int]:
    """Write the planned files from all ranks' memory, and commit all files or none; all ranks must call this.

    Args:
        prepared: the plan, which is equal on all ranks.
        dst: path of the target folder, or URL.
        world: all ranks that take part.
        clock: records the time of each stage.
        overwrite: whether to replace the checkpoint at `dst`; `everything` deletes unrelated files beside it too.
        sync: whether to make all files durable before the commit.

    Returns:
        the number of bytes that this rank received from other ranks, and the number of bytes that it wrote.

    Raises:
        TransaxleError: raised on every rank; the target is unchanged after an error.
    """
    plan, share = prepared.plan, _RankShare(prepared, world, clock)
    if plan.checks:
        with clock.stage("check"), world.together():
            _check_copies(plan.checks, memory_of(prepared.checkpoint.container), world)
    with ExitStack() as stack:
        stage: Stage | None = None

        def begin() -> tuple[str, str, tuple[int, ...]]:
            nonlocal stage
            if world.rank != world.ranks[0]:
                return "", "", ()
            stage = staging_at(dst, overwrite=overwrite, sync=sync)
            stack.enter_context(stage)
            if isinstance(stage, Upload):
                return "", "", world.ranks if stage.shared else world.ranks[:1]
            stage.prepare(plan.files if stage.single is None else prepared.draft.files)
            write_fragments(stage, prepared.draft.early_fragments())
            return str(stage.path), stage.mark(), ()

        with clock.stage("prepare"):
            folder, run, ranks = world.pool(begin)[0]
        if ranks:
            share.send(dst, stage if isinstance(stage, Upload) else None, ranks, overwrite=overwrite)
        else:
            hashes = share.write(folder, run, sync=sync)
            with clock.stage("commit"), world.together():
                if stage is not None:
                    share.seal(stage, hashes)
                    stage.commit()
    return share.received, share.written


class _RankShare:
    """The share of one rank in the work of a save.

    Args:
        prepared: the plan, which is equal on all ranks.
        world: all ranks that take part.
        clock: records the time of each stage.
    """

    def __init__(self, prepared: Prepared, world: World, clock: Clock) -> None:
        self._prepared = prepared
        self._world = world
        self._clock = clock
        self.received = 0
        """Number of bytes that this rank received from other ranks."""
        self.written = 0
        """Number of bytes of tensors that this rank wrote into files, or sent to a storage service."""

    def _move(self, target_ranks: Sequence[tuple[int, ...]], files: Writable | None, *, ordered: bool) -> _Hashes:
        """Move the tensors of the plan from all ranks' memory into the files; all ranks must call this method.

        Args:
            target_ranks: for each tensor, the rank that writes it; an empty tuple means that each rank writes its own
                shard.
            files: the files into which this rank writes; None means that the bytes are only hashed.
            ordered: whether the bytes of each file are written in order; if so, one rank writes all tensors of a file.

        Returns:
            The hashes of the tensors that this rank alone has written.
        """
        exchange = RankExchange(self._world)
        self.written = 0

        def count(size: int) -> None:
            self.written += size

        tensors, memory = self._prepared.plan.tensors, memory_of(self._prepared.checkpoint.container)
        limit = limits(jobs=1).for_item_ranges
        results = carry(
            tensors, memory, files, limit, progress=count, ordered=ordered, target_ranks=target_ranks, exchange=exchange
        )
        self.received = exchange.received
        return {name: each.hash for name, each in results.items()}

    def seal(self, stage: Stage, hashes: _Hashes, foretold: _Hashes | None = None) -> None:
        """Write headers, hashes and the manifest; only rank 0 calls this method."""
        seal(
            self._prepared,
            stage,
            limits(jobs=1),
            {name: FinishedTensor(xxh3) for name, xxh3 in hashes.items()},
            None,
            foretold,
        )

    def write(self, folder: str, run: str, *, sync: bool) -> _Hashes:
        """Write each run of bytes from its owner into the files; return all tensors' hashes (call on all ranks).

        Args:
            folder: the hidden staging folder with the new files.
            run: ID by which a rank recognises the staging folder of this save.
            sync: whether to make all files durable on disk.
        """
        world, clock, tensors = self._world, self._clock, self._prepared.plan.tensors
        target_ranks = owners(tensors, world)
        scattered = [tensor for tensor, ranks in zip(tensors, target_ranks, strict=True) if not ranks]
        # on another machine the folder may be missing, or an unrelated folder may have the same path
        with clock.stage("prepare"), world.together():
            writer = Writer(folder, sync=sync, run=run)

        def produce() -> _Hashes:
            hashes = self._move(target_ranks, writer, ordered=False)
            writer.finish()
            return hashes

        with clock.stage("write"):
            hashes = _merge_hashes(world.pool(produce))
        with clock.stage("hash"):
            if scattered:
                hashes |= _merge_hashes(world.pool(lambda: _hash_share(scattered, folder, world)))
        return hashes

    def send(self, dst: str, lead: Upload | None, ranks: tuple[int, ...], *, overwrite: Overwrite) -> None:
        """Send the planned files to a storage service, and make all or none visible; all ranks must call this method.

        Args:
            dst: URL of the target.
            lead: on rank 0, its upload, which has already begun; None on all other ranks.
            ranks: the ranks that can send files.
            overwrite: whether the upload replaces an existing checkpoint.
        """
        plan, draft, world, clock = self._prepared.plan, self._prepared.draft, self._world, self._clock
        owner = senders(self._prepared, ranks)
        target_ranks = [(owner[tensor.places[0].file],) if tensor.places else ranks[:1] for tensor in plan.tensors]
        own_files = {file: size for file, size in draft.files.items() if owner[file] == world.rank}
        with ExitStack() as stack:
            stage = lead

            def begin() -> None:
                nonlocal stage
                if stage is None and own_files:
                    # Rank 0 has already checked the target path.
                    stage = stack.enter_context(Upload(dst, overwrite=EVERYTHING if overwrite else False))
                if stage is not None:
                    carried = plan.carried if lead is not None and lead.single is None else ()
                    stage.prepare(own_files | {name: plan.files[name] for name in carried})
                    fragments = [
                        *draft.early_fragments(),
                        *(() if foretold is None else draft.late_fragments(foretold)),
                    ]
                    write_fragments(stage, (fragment for fragment in fragments if fragment.file in own_files))

            def send() -> _Hashes:
                hashes = self._move(target_ranks, stage, ordered=True)
                if stage is not None and lead is None:
                    stage.complete()
                return hashes

            def ready() -> None:
                if lead is not None:
                    self.seal(lead, hashes, foretold)
                    lead.complete()
                    lead.make_way()

            with clock.stage("prepare"):
                # An upload cannot go back to write digests before their data, so all bytes are moved twice.
                foretold = (
                    _merge_hashes(world.pool(lambda: self._move(target_ranks, None, ordered=True)))
                    if draft.has_leading_digests
                    else None
                )
                world.pool(begin)
            with clock.stage("write"):
                hashes = _merge_hashes(world.pool(send))
            with clock.stage("commit"):
                world.pool(ready)
                world.pool(lambda: stage.appear() if stage is not None and lead is None else None)
                try:
                    world.pool(lambda: lead.appear() if lead is not None else None)
                    world.pool(lambda: stage.recheck(owner if stage is lead else None) if stage is not None else None)
                except TransaxleError as error:
                    if is_loss(error) and stage is not None and stage.is_whole:
                        stage.keep()  # a rank was lost after all files had become visible
                    raise
            if stage is not None:
                stage.keep()


def _merge_hashes(of_ranks: Iterable[Mapping[str, str]]) -> _Hashes:
    return {name: xxh3 for hashes in of_ranks for name, xxh3 in hashes.items()}


def owners(tensors: Sequence[PlannedTensor], world: World) -> list[tuple[int, ...]]:
    """Choose for each tensor the rank that collects and writes it, so that all ranks write about equally many bytes.

    Returns:
        For each tensor, a tuple with this rank. The tuple is empty if several ranks hold long runs of the tensor; then
        each rank writes its own runs.
    """
    load = Load.of(world.ranks)
    writers: dict[int, tuple[int, ...]] = {}
    from_several: list[int] = []
    for number, tensor in enumerate(tensors):
        ranks = {rank_of(transfer.file) for transfer in tensor.transfers}
        if len(ranks) == 1:
            writers[number] = (load.add(ranks.pop(), tensor.nbytes),)
        elif any(is_long(transfer) for transfer in tensor.transfers):
            writers[number] = ()
            for transfer in tensor.transfers:
                load.add(rank_of(transfer.file), transfer.size)
        else:
            from_several.append(number)
    fair = sum(tensor.nbytes for tensor in tensors) // world.size
    for number in from_several:
        size, rank = tensors[number].nbytes, load.least()
        if size > _FOLDED and load[rank] + size > fair + _FOLDED:
            writers[number] = ()  # all ranks write this large tensor, so that none waits for another
            for writer in world.ranks:
                load.add(writer, size // world.size)
        else:
            writers[number] = (load.add(rank, size),)
    return [writers[number] for number in range(len(tensors))]


def senders(prepared: Prepared, ranks: tuple[int, ...]) -> dict[str, int]:
    """Assign each file to a rank that sends it, so that all ranks send about the same number of bytes.

    Files that have parts of the same tensor are assigned to the same rank. The index, the manifest and files without
    tensors are assigned to the first rank.
    """
    files, together = prepared.draft.files, DisjointSets[str]()
    for tensor in prepared.plan.tensors:
        for place in tensor.everywhere[1:]:
            together.join(place.file, tensor.places[0].file)
    with_tensors = {place.file for tensor in prepared.plan.tensors for place in tensor.everywhere}
    of_first_rank = {together.first(file) for file in files if opens(file) or file not in with_tensors}
    sizes: dict[str, int] = {}
    for file, size in files.items():
        sizes[together.first(file)] = sizes.get(together.first(file), 0) + size
    load, sender = Load.of(ranks), dict[str, int]()
    for file in sorted(sizes, key=lambda candidate: (candidate not in of_first_rank, -sizes[candidate], candidate)):
        sender[file] = load.add(ranks[0] if file in of_first_rank else load.least(), sizes[file])
    return {file: sender[together.first(file)] for file in files}


def _hash_share(tensors: Sequence[PlannedTensor], folder: str, world: World) -> _Hashes:
    """Hash this rank's share of the tensors, after reading them back from the files."""
    load, hashes = Load.of(world.ranks), _Hashes()
    storage = LocalStorage(folder)
    for tensor in tensors:
        if load.add(load.least(), tensor.nbytes) == world.rank:
            hashes[tensor.name] = digest_in(storage, tensor.places)
    storage.close()
    return hashes


def _check_copies(checks: Sequence[PlannedCheck], memory: Memory, world: World) -> None:
    """Compare the pairs of tensors that the plan stores as one tensor; one rank compares each pair.

    Raises:
        Refused: with code UNEQUAL_COPIES or UNEXPECTED_TENSOR, on the rank that compared a pair with different values.
    """
    items = []
    for number, check in enumerate(checks):
        taker = (world.ranks[number % world.size],)
        items.append(Item(2 * number, check.nbytes, check.first, taker))
        items.append(Item(2 * number + 1, check.nbytes, check.second, taker))
    hashes = HashingFiles(None, (), range(len(items)))
    Movement(items, memory, hashes, limits(jobs=1), RankExchange(world)).run()
    problems = [
        check.refusal
        for number, check in enumerate(checks)
        if 2 * number in hashes.digests and hashes.digests[2 * number] != hashes.digests[2 * number + 1]
    ]
    if problems:
        raise gathered(problems)


SAVING = ("family", "dialect", "config", "axes", "rules", "shard_size", "sync", "check_copies", "verify")
"""Names of those options of `save` that the integrations with trainers accept too."""
_UNFINISHED: dict[tuple[int, str], Callable[[], object]] = {}
"""(process id, target) -> function that waits for the last background save there; unused after a fork."""


@dataclass(frozen=True)
class SaveSettings:
    """The validated arguments of `save`, except for the state to save."""

    dst: str
    """Target folder or URL, as the user typed it."""
    to: str
    """File format and dialect of the target, written as `FORMAT[:DIALECT]`."""
    family: str | None
    """Model family; None means that it is recognised from the tensor names."""
    dialect: str | None
    """Dialect of the model's tensor names; None means that it is recognised from the names."""
    config: Mapping[str, Any] | None
    """The config that the user gave; None means the model's own config."""
    optimizer: bool
    """Whether optimizer state is saved too."""
    shard_size: int
    """Largest number of bytes of tensors per file."""
    overwrite: Overwrite
    """Whether an existing target may be replaced."""
    sync: bool
    """Whether all files are made durable before the commit."""
    check_copies: bool
    """Whether copies of a tensor on several ranks are compared with each other."""
    verify: bool
    """Whether the saved checkpoint is read back and compared with the bytes that were written."""
    axes: Mapping[str, int]
    """Axis -> size, for axis sizes that the user gave."""
    rules: str | None
    """Path of a file with the user's own families and dialects."""
    degrees: Degrees | None = None
    """Parallel degrees of a target with separate files for each rank."""


@dataclass(frozen=True)
class CollectedState:
    """The state to save, as collected from all ranks."""

    local_tensors: Mapping[str, torch.Tensor]
    """Name of a shard (see `local_parts`) -> this rank's local tensor."""
    global_tensors: Census
    """The tensors of all ranks, with the shard that each rank holds."""
    config: Mapping[str, Any] | None
    """The model's config, which is equal on all ranks."""
    groups: Sequence[ParamGroup]
    """Parameter groups of the optimizers, which list the names of their parameters."""
    files: Mapping[str, bytes]
    """File name -> content, for additional files of the checkpoint."""
    left_out: tuple[str, ...]
    """Names of entries of the state that are not saved."""
    untrained: tuple[str, ...]
    """Names of this rank's parameters that require gradients but belong to no optimizer."""
    fsdp: FsdpRanks | None = None
    """The model's FSDP ranks, for a target with files for each of them."""
    in_order: bool = False
    """Whether the groups list the parameters as the optimizer, the only one, numbers them on every rank."""


@suggests
def save(
    state: State,
    dst: PathLike,
    *,
    to: str = "hf",
    optimizer: AnyOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: Overwrite = False,
    group: Ranks | None = None,
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    shard_size: Size = SHARD_SIZE,
    sync: bool = True,
    check_copies: bool = True,
    verify: bool = False,
    tp: int | None = None,
    ep: int | None = None,
) -> SaveReport:
    """Save a model or state dict; all ranks of the group must call this function.

    Args:
        state: a model under any parallelism, or a state dict whose values are tensors, DTensors or numpy arrays.
        dst: target folder or URL. The target must not exist, unless `overwrite` is given; then the old checkpoint
            remains readable until the new one is complete. On a storage service, each file is sent by one rank, which
            receives the shards of other ranks.
        to: file format and dialect, `FORMAT[:DIALECT]`; `hf` means `safetensors:hf`.
        optimizer: the model's optimizer, whose state and parameter groups are saved too. A list or dict of optimizers,
            or a wrapper or container of them (ZeRO, accelerate, torchtitan), is accepted too.
        extra: name -> additional state that a training run needs to resume: plain data, or objects with `state_dict`
            and `load_state_dict` whose state is plain data, such as `Random()`, a scheduler, a data loader.
        overwrite: whether to replace the checkpoint at `dst`. If the folder contains unrelated files, True refuses it,
            and `"everything"` deletes these files too.
        group: the ranks that save together, as a process group or a mesh with one dim; None means all ranks.
        family: the model's family, such as `qwen3_moe`; None means that it is recognised from the tensor names.
        dialect: dialect of the model's tensor names, such as `hf`; None means that it is recognised from the names.
        config: the model's config (a path, a mapping or an object with `to_dict()`); None means `model.config`.
        axes: axis -> size, such as `{"g": 8}`; these sizes override sizes from configs and shapes.
        rules: path of a rules file with your own families and dialects.
        shard_size: largest number of bytes of tensors per file, 5_000_000_000 or "5GB".
        sync: whether to make all files durable on disk before `dst` appears.
        check_copies: whether to compare copies on several ranks that no mesh guarantees to be equal, and to refuse
            copies that differ.
        verify: whether to read the complete checkpoint back on one rank, and compare every byte with the written bytes;
            the report contains the verification.
        tp: number of tensor-parallel ranks that read the target, if it has files for each (`to="vllm_sharded"`).
        ep: number of expert-parallel ranks that read the target.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: raised on every rank; the target is unchanged after an error, unless `verify` found the error.
    """
    world, clock = World(group), Clock()
    settings_of = partial(
        read_settings, dst, to, optimizer=optimizer is not None, family=family, dialect=dialect, config=config,
        axes=axes, rules=rules, shard_size=shard_size, overwrite=overwrite, sync=sync, check_copies=check_copies,
        verify=verify, tp=tp, ep=ep,
    )  # fmt: skip
    with clock.stage("plan"):
        settings, collected = collect(settings_of, state, optimizer, extra, world)
    return write_checkpoint(settings, collected, world, clock)


def check_savable(
    state: State,
    dst: PathLike,
    *,
    to: str = "hf",
    group: Ranks | None = None,
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    shard_size: Size = SHARD_SIZE,
    sync: bool = True,
    check_copies: bool = True,
    verify: bool = False,
) -> None:
    """Plan a save without optimizer, and write nothing. Call it early, to learn whether a save would be refused.

    All ranks of the group must call this function. The arguments are those of `save`.

    Raises:
        TransaxleError: raised on every rank, if `save` would raise it.
    """
    world = World(group)
    options = select(locals(), SAVING)
    settings, collected = collect(partial(read_settings, dst, to, **options), state, None, None, world)
    with world.together():
        require_ready(_plan_files(settings, collected, world.rank))


@suggests
def read_settings(
    dst: PathLike,
    to: str,
    *,
    optimizer: bool = False,
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    shard_size: Size = SHARD_SIZE,
    overwrite: Overwrite = False,
    sync: bool = True,
    check_copies: bool = True,
    verify: bool = False,
    tp: int | None = None,
    ep: int | None = None,
) -> SaveSettings:
    """Validate arguments of `save`; `optimizer` states whether an optimizer is given.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: if a config cannot be read.
    """
    check_flags(sync=sync, check_copies=check_copies, verify=verify)
    return SaveSettings(
        dst=read_path("dst", dst),
        to=read_text("to", to, "safetensors:hf"),
        family=read_optional_text("family", family, "qwen3_moe"),
        dialect=read_optional_text("dialect", dialect, "hf"),
        optimizer=optimizer,
        shard_size=read_size("shard_size", shard_size),
        overwrite=overwrite,
        sync=sync,
        check_copies=check_copies,
        verify=verify,
        axes=read_axes(axes),
        rules=None if rules is None else read_path("rules", rules),
        config=model_config(config),
        degrees=read_degrees({"tp": tp, "ep": ep}),
    )


def check_options(to: str, options: Mapping[str, Any]) -> None:
    """Refuse wrong arguments of a save before there is a state to save.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: if the format, family or dialect is unknown, or the config cannot be read.
    """
    settings = read_settings("", to, **options)
    families = reading_settings(rules=settings.rules, axes=settings.axes).families
    labels = [each for each in (parse_to(settings.to)[1], settings.dialect) if each and each != IDENTITY]
    if settings.family is not None:
        family = pick_family(settings.family, families)
        for label in labels:
            pick_dialect(family, label)
        return
    for label in labels:
        check_dialect(label, families)


def collect(
    settings_of: Callable[[], SaveSettings],
    state: State,
    optimizer: AnyOptimizer | None,
    extra: Mapping[str, Any] | None,
    world: World,
) -> tuple[SaveSettings, CollectedState]:
    """Collect the state of all ranks for a save; all ranks must call this function.

    Args:
        settings_of: function that returns this rank's settings; if it raises an error, all ranks raise it, so that no
            rank waits for this one.
        state: the model or state dict to save.
        optimizer: the optimizer whose state to save, as for `save`.
        extra: name -> additional state to save, as for `save`.
        world: all ranks that take part.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: raised on every rank, with every problem of every rank, if the state cannot be saved.
    """
    groups: list[ParamGroup] = []
    is_single = True
    states: dict[str, torch.Tensor] = {}
    without_optimizer: tuple[str, ...] = ()
    with world.together():
        settings = settings_of()
        contents = _contents(settings)
        wait_for(settings.dst)
        state_leaves = leaves(state, sharded=True)
        if problems := unsavable(state_leaves.tensors):
            raise gathered(problems)
        if optimizer is not None:
            optimizers, parameters = by_name(optimizer, state_leaves)
            is_single = len(optimizers.members) == 1
            groups, states = groups_of(optimizers, parameters), states_of(optimizers, parameters)
            without_optimizer = names_without_optimizer(parameters, state_leaves.parameters)
        numbers, non_tensors = _numbers(state, state_leaves.non_tensors)
        tensors = {**state_leaves.tensors, **states, **numbers}
        owner = MODEL if isinstance(state, nn.Module) else STATE
        extra_states = {f"{owner}/{name}": value for name, value in non_tensors.items()}
        extra_states |= {f"{EXTRA}/{name}": state_of(value) for name, value in (extra or {}).items()}
    world.require_alike({**{field.name: getattr(settings, field.name) for field in fields(settings)}, **contents})
    extra_file = encode_states(extra_states, world)
    global_tensors, config = census(tensors, world), common_config(state, settings.config, world)
    fsdp = None
    if "fsdp" in get_format(parse_to(settings.to)[0]).draft_takes:
        fsdp = fsdp_ranks(tensors, world)
        if extra_file is not None:
            raise refuse("UNSUPPORTED", "files of ranks have no place for extra=", hint='Omit it, or save to="dcp".')
    left_out = state_leaves.untouched
    if for_hub(settings.to) and any(tensor.dtype not in PLAIN for tensor in global_tensors.values()):
        of_hub = to_hub_convention(tensors, global_tensors, state_leaves.weights, config, world)
        tensors, global_tensors, config = dict(of_hub.tensors), of_hub.global_tensors, of_hub.config
        left_out = (*of_hub.left_out, *left_out)
    pooled_groups = all_groups(groups, world) if settings.optimizer else []
    return settings, CollectedState(
        local_tensors={part: tensor for _, part, tensor in local_parts(tensors)},
        global_tensors=global_tensors,
        config=config,
        groups=pooled_groups,
        fsdp=fsdp,
        in_order=all(world.gather(is_single and pooled_groups == groups)),
        files={} if extra_file is None else {FILE: extra_file},
        left_out=left_out,
        untrained=without_optimizer,
    )


def _contents(settings: SaveSettings) -> dict[str, str | None]:
    """Return hashes of the rules file and the config, to compare those of all ranks, whose paths may differ.

    Raises:
        Refused: with code UNSUPPORTED, if the rules file is not a regular file, or is too long.
        StorageError: with code IO, if the rules file cannot be read.
    """
    table = None if settings.rules is None else read_file(settings.rules, LONGEST_TABLE)
    contents = {"rules": table, "config": None if settings.config is None else comparable(settings.config)}
    return {
        name: None if octets is None else f"one with the hash {digest(octets)}" for name, octets in contents.items()
    }


def _numbers(state: State, non_tensors: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split entries that are not tensors into numbers, which are saved as 0-d tensors, and all other entries."""
    if isinstance(state, nn.Module):
        return {}, dict(non_tensors)
    tensors = {name: as_tensor(value) for name, value in non_tensors.items()}
    numbers = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return numbers, {name: value for name, value in non_tensors.items() if name not in numbers}


def write_checkpoint(settings: SaveSettings, state: CollectedState, world: World, clock: Clock) -> SaveReport:
    """Write the checkpoint with the collected state of all ranks; all ranks must call this function.

    Args:
        settings: the validated arguments of `save`, equal on all ranks.
        state: the collected state of all ranks.
        world: all ranks that take part.
        clock: records the time of each stage.

    Raises:
        TransaxleError: raised on every rank. The target is unchanged, unless reading it back found the error.
    """
    with clock.stage("plan"), world.together():
        prepared = _plan_files(settings, state, world.rank)
        plan = require_ready(prepared)
    if settings.check_copies and world.size > 1:
        with clock.stage("check"):
            compare_copies(state.global_tensors, state.local_tensors, world)
    received, bytes_own = write(prepared, settings.dst, world, clock, overwrite=settings.overwrite, sync=settings.sync)
    verification = None
    if settings.verify:
        with clock.stage("verify"):
            verification = _read_back(settings.dst, world)
    return SaveReport(
        path=settings.dst,
        format=plan.format,
        dialect=plan.dialect,
        tensors=len(plan.tensors),
        bytes_written=sum(plan.files.values()),
        bytes_own=bytes_own,
        bytes_received=received,
        kept=plan.kept,
        ignored=(*plan.ignored, *state.left_out),
        notes=plan.notes,
        untrained=state.untrained,
        verification=verification,
        seconds=clock.total,
        stages=clock.stages,
    )


def _plan_files(settings: SaveSettings, state: CollectedState, rank: int) -> Prepared:
    """Plan the target's files, whose tensors come from the memory of all ranks."""
    if is_one_file(settings.dst) and state.files:
        message = "states that are not tensors need separate files, but the target is a single file"
        raise refuse("UNSUPPORTED", message, file=settings.dst, hint="Give a folder.")
    memory = container(
        state.global_tensors, state.local_tensors, rank, state.config, groups=state.groups, files=state.files
    )
    fsdp = state.fsdp
    memory = replace(memory, in_order=state.in_order, whole=None if fsdp is None else fsdp.whole)
    reading = reading_settings(
        family=settings.family, dialect=settings.dialect, optimizer=settings.optimizer, axes=settings.axes,
        rules=settings.rules,
    )  # fmt: skip
    checkpoint = Checkpoint(memory, reading, None, None)
    degrees = settings.degrees if settings.degrees is not None or fsdp is None else fsdp.degrees
    return make_plan(checkpoint, settings.to, shard_size=settings.shard_size, target=settings.dst, degrees=degrees)


def _read_back(target: str, world: World) -> Verification:
    """Read the saved checkpoint back on the first rank; all ranks must call this function.

    Raises:
        Refused: raised on every rank with code CORRUPT, if a byte differs from the byte that was written.
    """
    from transaxle.engine.read_back import check_saved

    def read() -> Verification | None:
        return check_saved(target) if world.rank == world.ranks[0] else None

    verification = world.pool(read)[0]
    assert verification is not None  # only the first rank has read the checkpoint back
    return verification


def add_unfinished(target: str, wait: Callable[[], object]) -> None:
    """Make later saves to a target wait for a background save that has begun.

    If a later save did not wait, the background save might be committed after it, and older values would replace newer
    values.

    Args:
        target: folder or URL, as the user typed it.
        wait: function that returns when the save has ended, successfully or not. In the thread that runs the save, it
            returns False immediately.
    """
    _UNFINISHED[_key(target)] = wait


def wait_for(target: str) -> None:
    """Wait until no save of this process to a given target is running."""
    key = _key(target)
    wait = _UNFINISHED.get(key)
    # if Ctrl-C ends this wait, the next call waits again
    if wait is not None and wait() is not False and _UNFINISHED.get(key) is wait:
        del _UNFINISHED[key]


def _key(target: str) -> tuple[int, str]:
    place = as_local_path(target)
    return os.getpid(), place.rstrip("/") if is_url(place) else os.path.abspath(place)  # noqa: PTH100 - links stay
