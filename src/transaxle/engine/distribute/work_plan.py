"""A conversion as data that other processes can execute, and the division of its plan into work items.

A work item is the part of a plan that one worker does alone; all work items have about the same size. A tensor is
divided only into the spans in which it is hashed, and only if it is copied unchanged. The buffers of an encoded tensor
stay in one work item. Checks that may refuse a conversion are done first: comparing copies that must be equal, and
measuring values that may become infinite.

On a cloud storage service, each file has a single writer. So on a service a work item consists of whole files: one
large file, several small files, or files that contain parts of the same tensors. A tensor that several work items need
for their files (a replica for each rank) is produced by each of these work items.

A plan file contains what to convert, and which tensors and checks of the plan each work item covers. The driver, which
begins and commits the work, opens the source and makes the plan again. The plan and the files of the source must be the
same as before, or the driver refuses them. The part of the plan for each work item is stored in one file beside the
staged files, with its byte range and hash in the work item. A worker reads its part from there instead of planning. If
tensors of the source are decoded, cast or averaged, these parts cannot be stored, so workers make the plan again.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from transaxle.arguments import (
    Degrees,
    read_count,
)
from transaxle.encodings.value_steps import MEASURED_BY_READING
from transaxle.engine.carry import PlanPart
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.engine.checkpoint.settings import LONGEST_TABLE, model_config
from transaxle.engine.execute import CheckedPlan, source_files
from transaxle.engine.plan.conversion import Prepared, make_plan
from transaxle.engine.plan.planned import Plan
from transaxle.engine.views.encode import Encode
from transaxle.errors import refuse, without_secrets
from transaxle.formats.catalog import nbytes
from transaxle.formats.storage.local import read_file, storage_error
from transaxle.formats.storage.storage import Overlay, Storage, as_text, is_url, without_commit
from transaxle.formats.store.multipart import multipart
from transaxle.formats.store.service import Service, local_path
from transaxle.move.journal import Task, digest
from transaxle.move.workers import DisjointSets
from transaxle.options import OPTIONS

_VERSION = 1
"""Version of the schema of a plan file."""
_LONGEST = 1 << 28
_PLAN_AGAIN = "Plan again with this program:  transaxle plan SRC DST --to … --write PLAN."
_ITEM_BYTES = 1 << 30
"""Number of bytes per work item if the user gives no number of work items."""
_MAX_ITEMS = 4096
"""Largest number of work items if the user gives no number of work items."""
_CHEAP = 8
"""Producing tensors a second time, for another file, is cheap if their size is at most the file's size divided by this
number.
"""

Ranges = tuple[tuple[int, int], ...]
"""Ranges of numbers, each as (start, stop); stop is not included."""


class _Piece(msgspec.Struct, frozen=True):
    """A part of a plan that is never divided among several work items."""

    nbytes: int
    """Number of bytes that this part of the plan moves or reads."""
    kind: str
    """Name of the field of `WorkItem` into which `numbers` is written."""
    numbers: Sequence[int]
    """Indices of the plan's tensors (or spans of tensors), checks or recoded tensors that this part covers."""
    files: tuple[str, ...] = ()
    """Target files that this part fills completely; empty if several workers may write into one file."""


class ConversionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A conversion as plain data: all arguments that determine its result."""

    source: str
    """Absolute path or URL of the source."""
    target: str
    """Absolute path or URL of the target."""
    to: str
    """File format and dialect of the target, written as `FORMAT[:DIALECT]`."""
    reading: dict[str, Any]
    """Options of `open_checkpoint` as plain data; a config is stored as its content."""
    rules: str | None = None
    """Text of the user's rules file; None without a rules file."""
    shaping: dict[str, Any] = {}
    """Options of `make_plan` that are plain data."""
    encode: Encode | None = None
    """Which tensors to encode, and in which number format; None means that no tensor is encoded."""
    degrees: Degrees | None = None
    """Parallel degrees of a target with separate files for each rank; None for all other targets."""

    @property
    def check_source(self) -> bool:
        """Whether workers check what they read against the source's own hashes and checksums."""
        return bool(self.shaping.get("check_source", True))

    @contextmanager
    def prepare(self) -> Iterator[Prepared]:
        """Return a context that opens the source and makes the plan; the files stay open until the context ends.

        Raises:
            TransaxleError: any error that `open_checkpoint` and `make_plan` raise.
        """
        with tempfile.TemporaryDirectory(prefix="transaxle-rules-") as folder:
            reading = dict(self.reading)
            if self.rules is not None:
                table = Path(folder, "own.rules")
                table.write_text(self.rules, "utf-8")
                reading["rules"] = str(table)
            checkpoint = open_checkpoint(self.source, **reading)
        with checkpoint:
            how: dict[str, Any] = {"encode": self.encode, "degrees": self.degrees, **self.shaping}
            yield make_plan(checkpoint, self.to, target=self.target, **how)


def order(
    src: str,
    dst: str,
    to: str,
    reading: Mapping[str, Any],
    shaping: Mapping[str, Any],
    *,
    encode: Encode | None = None,
    degrees: Degrees | None = None,
) -> ConversionOrder:
    """Return a conversion as plain data.

    Args:
        src: path or URL of the source.
        dst: path or URL of the target.
        to: file format and dialect of the target, written as `FORMAT[:DIALECT]`.
        reading: options of `open_checkpoint`, as returned by `read_options`.
        shaping: options of `make_plan` that are plain data.
        encode: which tensors to encode, and in which number format.
        degrees: parallel degrees of a target with separate files for each rank.

    Raises:
        Refused: with code UNSUPPORTED, if several workers cannot write the target.
        TransaxleError: any error of reading the config file or the rules file.
    """
    local_target = local_path(dst) if is_url(dst) else dst
    plain = {name: value for name, value in reading.items() if value is not None}
    config, rules = model_config(plain.pop("config", None)), plain.pop("rules", None)
    paths = [name for name in plain if OPTIONS[name].kind == "path"]
    for path in (src, dst, *(plain[name] for name in paths)):
        if as_text(path) != path:
            message = "its name is not UTF-8, and workers are told of paths as UTF-8"
            raise refuse(
                "UNSUPPORTED", message, file=path, hint=("Rename the target, or convert in this process, without --on.")
            )
    if local_target is None:
        multipart(Service(dst))
    plain |= {name: _absolute(plain[name]) for name in paths} | ({} if config is None else {"config": dict(config)})
    return ConversionOrder(
        source=_absolute(src),
        target=dst if local_target is None else _absolute(local_target),
        to=to,
        reading=plain,
        rules=None if rules is None else read_file(rules, LONGEST_TABLE).decode("utf-8"),
        shaping=dict(shaping),
        encode=encode,
        degrees=degrees,
    )


def _absolute(path: str) -> str:
    """Return an absolute path, which processes with a different working folder can use; links are not resolved."""
    return path if is_url(path) else os.path.abspath(path)  # noqa: PTH100


class WorkItem(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a plan that one worker does alone."""

    number: int
    """Index of the work item in the plan."""
    nbytes: int
    """Number of bytes that the work item moves, or reads to compare and to measure."""
    tensors: Ranges = ()
    """Indices of the plan's tensors, and of spans of its large tensors, to write."""
    checks: Ranges = ()
    """Indices of the plan's checks (pairs of copies to compare)."""
    measures: Ranges = ()
    """Indices of the plan's recoded tensors whose errors to measure."""
    files: tuple[str, ...] = ()
    """Target files into which the work item writes."""
    sources: tuple[str, ...] = ()
    """Source files that the work item reads, the file with the most bytes first."""
    begin: int = 0
    """Offset of the work item's stored part of the plan, in the file with these parts of all work items."""
    size: int = 0
    """Size in bytes of the work item's stored part of the plan."""
    key: str = ""
    """Hash of the work item's stored part of the plan; empty if it is not stored, so that a worker must make the whole
    plan.
    """

    @property
    def magnitude(self) -> int:
        """Number of the work item's size class; work items of about the same size are in the same class."""
        return (3 * self.nbytes).bit_length()

    @property
    def is_empty(self) -> bool:
        """Whether the work item contains nothing to do."""
        return not (self.tensors or self.checks or self.measures)


class WorkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a conversion, divided into work items."""

    form: int = _VERSION
    """Version of the schema of a plan file."""
    program: str
    """Version of Transaxle that made the plan."""
    order: ConversionOrder
    """The conversion as plain data."""
    task: Task
    """Identity of the plan, together with the state of the source's files."""
    overwrite: bool | str = False
    """Whether to replace a checkpoint at the target path; `everything` means to delete all other files in its folder
    too.
    """
    sync: bool = True
    """Whether to sync everything to disk before the target gets its final name."""
    jobs: int | None = None
    """Number of threads of each worker process; None means the worker's default."""
    memory: int | None = None
    """Bytes of the buffers of each worker process; None means the worker's default."""
    items: tuple[WorkItem, ...]
    """The work items of the plan."""
    files: tuple[str, ...] = ()
    """Source files whose state is part of `task`, if workers need not make the plan again."""
    seal: str = ""
    """Hash of all other fields, computed with an empty `seal`."""

    @property
    def text(self) -> bytes:
        """The content of a plan file, which `read_plan` reads."""
        unsealed = msgspec.json.encode(msgspec.structs.replace(self, seal=""))
        return msgspec.json.encode(msgspec.structs.replace(self, seal=digest(unsealed)))


def program_version() -> str:
    """Return the version of the installed Transaxle; return "" if it is not installed."""
    from importlib import metadata  # imported inside the function, because only plan files need it

    try:
        return metadata.version("transaxle")
    except metadata.PackageNotFoundError:
        return ""


def _source_for_workers(order: ConversionOrder, checkpoint: Checkpoint) -> str:
    """Return the path or URL that workers open: the commit of a hub that was planned, even if its branch has a newer
    one, and the checkpoint that was found in the given folder, even if the folder has a newer one.
    """
    container = checkpoint.container
    inside = f"/{container.inside}" if container.inside else ""
    if without_commit(checkpoint.path) != checkpoint.path:
        return checkpoint.path.removesuffix(inside) if container.config_path else checkpoint.path
    # workers find the config above the given folder only if they start from this folder
    return order.source if container.config_path or not inside else order.source.rstrip("/") + inside


def work_plan(order: ConversionOrder, cleared: CheckedPlan, count: int | None = None, **options: Any) -> WorkPlan:
    """Divide a checked plan into work items.

    Args:
        order: the conversion as plain data.
        cleared: the plan of this conversion, after the check that its target may be written.
        count: number of work items; None means one work item per GiB.
        **options: the fields `overwrite`, `sync`, `jobs` and `memory` of `WorkPlan`.

    Raises:
        TransaxleError: if a file of the source cannot be read.
    """
    order = msgspec.structs.replace(order, source=_source_for_workers(order, cleared.checkpoint))
    items = divide(cleared.plan, count, whole_files=is_url(order.target))
    storage = cleared.checkpoint.container.storage
    if isinstance(storage, Overlay):
        return WorkPlan(program=program_version(), order=order, task=cleared.task, items=items, **options)
    items, files = with_parts(cleared.plan, items, storage), source_files(cleared)
    return WorkPlan(program=program_version(), order=order, task=cleared.task, items=items, files=files, **options)


def parse_plan(text: bytes, file: str) -> WorkPlan:
    """Parse a plan file.

    Args:
        text: the content of the plan file (`WorkPlan.text`).
        file: name of the file, for errors.

    Raises:
        Refused: with code CORRUPT, if the text is not a plan, or was changed; with code UNSUPPORTED, if a different
            version of Transaxle wrote it.
    """
    try:
        form = msgspec.json.decode(text, type=_Form).form
        plan = msgspec.json.decode(text, type=WorkPlan) if form == _VERSION else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        message = f"this is no plan for workers, or only the beginning of one: {error}"
        raise refuse("CORRUPT", message, file=file, hint=_PLAN_AGAIN) from None
    if plan is None or plan.program != program_version():
        wrote = f"version {plan.program or '?'}" if plan is not None else f"a version with plans of form {form}"
        message = f"{wrote} of the program made this plan; this is {program_version() or '?'}, which may plan otherwise"
        raise refuse("UNSUPPORTED", message, file=file, hint=_PLAN_AGAIN)
    if plan.text != text:
        raise refuse("CORRUPT", "the plan was changed after it was written", file=file, hint=_PLAN_AGAIN)
    return plan


class _Form(msgspec.Struct):
    form: int


def read_plan(path: str) -> WorkPlan:
    """Read a plan file; the errors are those of `parse_plan` and `read_file`."""
    return parse_plan(read_file(path, _LONGEST), path)


def write_plan(plan: WorkPlan, path: str) -> None:
    """Write a new plan file. If a URL in it contains a password or a signature, only the file's owner may read the
    file.

    Raises:
        UsageError: with code EXISTS, if the file exists.
        StorageError: with code IO or NO_SPACE, if the file cannot be written.
    """
    try:
        places = plan.order.source, plan.order.target
        mode = 0o666 if places == tuple(map(without_secrets, places)) else 0o600
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(plan.text)
    except FileExistsError:
        raise refuse("EXISTS", "the file for the plan already exists", file=path, hint="Name another file.") from None
    except OSError as error:
        raise storage_error(error, "writing the plan", path) from error


def parse_part(text: bytes, item: WorkItem) -> PlanPart | None:
    """Parse a work item's stored part of the plan; return None if its hash differs from the hash in the work item."""
    if not item.key or digest(text) != item.key:
        return None
    return msgspec.msgpack.decode(text, type=PlanPart)


def part_of_item(plan: Plan, item: WorkItem, storage: Storage | None = None) -> PlanPart:
    """Return the part of a plan that a work item does.

    Args:
        plan: the whole plan.
        item: the work item.
        storage: storage of the source, from which the versions of its files are taken; None means without versions.

    Raises:
        TransaxleError: if a file of the source cannot be read.
    """
    return PlanPart(
        versions=() if storage is None else tuple((name, storage.version(name)) for name in item.sources),
        tensors=tuple(plan.units[number] for number in numbers(item.tensors)),
        checks=tuple(plan.checks[number] for number in numbers(item.checks)),
        measures=tuple(plan.recoded[number] for number in numbers(item.measures)),
    )


def with_parts(plan: Plan, items: Iterable[WorkItem], storage: Storage) -> tuple[WorkItem, ...]:
    """Return the work items with the offsets and hashes of their stored parts; the errors are those of
    `part_of_item`.
    """
    keyed_items, offset = [], 0
    for item in items:
        text = part_of_item(plan, item, storage).text
        keyed_items.append(msgspec.structs.replace(item, begin=offset, size=len(text), key=digest(text)))
        offset += len(text)
    return tuple(keyed_items)


def numbers(ranges: Ranges) -> Iterator[int]:
    """Yield every number in the given ranges."""
    for first, stop in ranges:
        yield from range(first, stop)


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Return the given numbers, in any order and with or without repetition, as ranges. The function `numbers` is the
    inverse.
    """
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return tuple((first, stop) for first, stop in ranges)


def order_items(items: Iterable[WorkItem]) -> list[WorkItem]:
    """Return work items in the order in which they should begin: first those with checks that may refuse, then large
    ones.

    If a large work item began last, all workers but one would have to wait for its end. Work items of about the same
    size stay in file order, so that concurrent workers read and write at nearby places.
    """
    return sorted(items, key=lambda item: (not (item.checks or item.measures), -item.magnitude))


def divide(plan: Plan, count: int | None = None, *, whole_files: bool = False) -> tuple[WorkItem, ...]:
    """Divide a plan into work items.

    Args:
        plan: the whole plan.
        count: number of work items, some of which are empty if the plan has fewer tensors or files. If `count` is None,
            there is one work item per GiB.
        whole_files: whether each target file belongs to a single work item.

    Raises:
        TypeError: if `count` is not a number.
        ValueError: if `count` is less than one.
    """
    pieces = [*_check_pieces(plan), *(_file_pieces(plan) if whole_files else _tensor_pieces(plan))]
    total = sum(piece.nbytes for piece in pieces)
    if count is None:
        count = max(1, min(_MAX_ITEMS, len(pieces), -(-total // _ITEM_BYTES)))
    count = read_count("items", count)
    shares: list[list[_Piece]] = [[] for _ in range(count)]
    offset = 0
    for number, piece in enumerate(pieces):
        # If there are more pieces than work items, a piece belongs to the work item whose share of all bytes contains
        # its middle.
        middle = min(count - 1, (offset + piece.nbytes // 2) * count // total) if total else 0
        shares[number if len(pieces) <= count else middle].append(piece)
        offset += piece.nbytes
    return tuple(_item(plan, number, share) for number, share in enumerate(shares))


def _item(plan: Plan, number: int, share: Sequence[_Piece]) -> WorkItem:
    tensors, check_ranges, measures = (
        ranges_of(itertools.chain.from_iterable(piece.numbers for piece in share if piece.kind == kind))
        for kind in ("tensors", "checks", "measures")
    )
    units = [plan.units[each] for each in numbers(tensors)]
    checks = [plan.checks[each] for each in numbers(check_ranges)]
    own_files = dict.fromkeys(file for piece in share for file in piece.files)
    files = own_files or dict.fromkeys(place.file for unit in units for place in unit.everywhere)
    reads: dict[str, int] = {}
    sides = (side for check in checks for side in (check.first, check.second))
    for transfer in itertools.chain.from_iterable((*(unit.transfers for unit in units), *sides)):
        reads[transfer.file] = reads.get(transfer.file, 0) + transfer.size
    return WorkItem(
        number=number,
        nbytes=sum(piece.nbytes for piece in share),
        tensors=tensors,
        checks=check_ranges,
        measures=measures,
        files=tuple(files),
        sources=tuple(sorted(reads, key=lambda file: -reads[file])),
    )


def _check_pieces(plan: Plan) -> Iterator[_Piece]:
    """Yield a piece (indivisible part of the plan) for each check that may refuse the conversion."""
    for number, check in enumerate(plan.checks):
        yield _Piece(2 * check.nbytes, "checks", [number])
    for number, step in enumerate(plan.recoded):
        if step.action in MEASURED_BY_READING:
            yield _Piece(nbytes(step.dtype, step.shape), "measures", [number])


def _tensor_pieces(plan: Plan) -> Iterator[_Piece]:
    """Yield the plan's tensors, and spans of tensors, as pieces; the buffers of an encoded tensor are in one piece."""
    together: dict[str, list[int]] = {}
    for number, tensor in enumerate(plan.units):
        if tensor.step is not None:
            together.setdefault(tensor.step.tensor, []).append(number)
    for number, tensor in enumerate(plan.units):
        group = [number] if tensor.step is None else together[tensor.step.tensor]
        if group[0] == number:
            yield _Piece(sum(plan.units[each].nbytes for each in group), "tensors", group)


def _file_pieces(plan: Plan) -> Iterator[_Piece]:
    """Yield, for each target file, its tensors and spans of tensors as one piece; those without bytes belong to no
    file.

    A tensor that is in several files is produced again for each file. If that is expensive compared with the files'
    size, for example because ranks share every tensor, these files form one piece together.
    """
    places: list[dict[str, int]] = []
    own_bytes, extra_bytes = Counter[str](), Counter[str]()
    for unit in plan.units:
        bytes_in_file = Counter[str]()
        for place in unit.everywhere:
            bytes_in_file[place.file] += place.size
        places.append(dict(bytes_in_file) if unit.nbytes else {"": 0})
        own_bytes.update(bytes_in_file)
        extra_bytes.update({file: unit.nbytes - size for file, size in bytes_in_file.items()})
    wasteful = {file for file in own_bytes if extra_bytes[file] * _CHEAP > own_bytes[file]}
    together = DisjointSets[str]()
    for unit, sizes in zip(plan.units, places, strict=True):
        parted = [file for file, size in sizes.items() if size < unit.nbytes]
        if not wasteful.isdisjoint(parted):
            for file in parted[1:]:
                together.join(file, parted[0])
    files: dict[str, dict[str, None]] = {}
    units: dict[str, list[int]] = {}
    for number, sizes in enumerate(places):
        for piece in dict.fromkeys(map(together.first, sizes)):
            units.setdefault(piece, []).append(number)
        for file in sizes:
            files.setdefault(together.first(file), {})[file] = None
    for piece, group in units.items():
        yield _Piece(
            sum(plan.units[each].nbytes for each in group), "tensors", group, tuple(filter(None, files[piece]))
        )
