"""A conversion as data that other processes can execute, and its division into work items.

An item is a part of the plan that one worker does alone, of about the same size as the others. A tensor is divided only
into the spans in which it is hashed, and only if it is copied unchanged; the buffers of an encoded tensor stay
together. Checks that may refuse a conversion come first: copies that must be equal, and values that may become
infinite.

On a service an object has a single writer. There an item is one file or several: small ones, or files that share
tensors, each having parts of them. A tensor that still lies in the files of several items (a replica for each rank) is
produced by each of them.

A plan file says what to plan, and which numbers of the plan each item covers. The driver, which begins and commits,
opens the source and plans again; it must arrive at the same plan over the same files, or it refuses. The parts of the
items are stored beside the staged files, each as a range of one file, so that a worker reads those of its items instead
of planning; an item has the hash of its part. If the source is seen through a view (decoded, cast, averaged), which
cannot be stored, workers plan too.
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
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
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
"""Number of bytes per item if the user gives no number of items."""
_MAX_ITEMS = 4096
"""Largest number of items if the user gives no number of items."""
_CHEAP = 8
"""Producing tensors again for another file is cheap if it costs at most one part in this many of the file's size."""

Ranges = tuple[tuple[int, int], ...]
"""Ranges of numbers, each as (start, stop)."""


class _Piece(msgspec.Struct, frozen=True):
    """A part of a plan that is not divided further among work items."""

    nbytes: int
    """Number of bytes that the part moves or reads."""
    kind: str
    """Name of the field of `WorkItem` that receives `numbers`."""
    numbers: Sequence[int]
    """Indices of the plan's units, checks or recoded tensors that the part covers."""
    files: tuple[str, ...] = ()
    """Target files that the part fills completely; empty if workers share files."""


class ConversionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A conversion as plain data: everything that determines its result."""

    source: str
    """Absolute path or URL of the source."""
    target: str
    """Absolute path or URL of the target."""
    to: str
    """Format and dialect of the target, `FORMAT[:DIALECT]`."""
    reading: dict[str, Any]
    """Options of `open_checkpoint` as plain data; a config is given by its content."""
    rules: str | None = None
    """Text of the user's rules file; None if there is none."""
    shaping: dict[str, Any] = {}
    """Options of `make_plan` that are plain data."""
    encode: Encode | None = None
    """Which tensors to encode, and how; None: encode no tensor."""
    degrees: Degrees | None = None
    """Parallel degrees of a target with files for each rank; None for targets without files for each rank."""

    @contextmanager
    def prepare(self) -> Iterator[Prepared]:
        """Return a context that opens the source and plans; the files stay open until the context ends.

        Raises:
            TransaxleError: errors of `open_checkpoint` and `make_plan`.
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
        to: format and dialect of the target, `FORMAT[:DIALECT]`.
        reading: options of `open_checkpoint`, from `read_options`.
        shaping: options of `make_plan` that are plain data.
        encode: which tensors to encode, and how.
        degrees: parallel degrees of a target with files for each rank.

    Raises:
        Refused: UNSUPPORTED for a target that several workers cannot write.
        TransaxleError: errors of reading the config file and the rules file.
    """
    local_target = local_path(dst) if is_url(dst) else dst
    plain = {name: value for name, value in reading.items() if value is not None}
    config, rules = model_config(plain.pop("config", None)), plain.pop("rules", None)
    paths = [name for name in plain if OPTIONS[name].kind == "path"]
    for path in (src, dst, *(plain[name] for name in paths)):
        if as_text(path) != path:
            message = "its name is not UTF-8, and workers are told of paths as UTF-8"
            raise refuse("UNSUPPORTED", message, file=path, hint="Rename it, or convert in this process: without --on.")
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
    """Return a path that other processes can use; links are not resolved."""
    return path if is_url(path) else os.path.abspath(path)  # noqa: PTH100


class WorkItem(msgspec.Struct, frozen=True, kw_only=True):
    """Work item: a part of a plan that one worker does alone."""

    number: int
    """Index of the item in the plan."""
    nbytes: int
    """Number of bytes that the item moves, or reads to compare and to measure."""
    tensors: Ranges = ()
    """Indices of the plan's units to write: tensors, and spans of large tensors."""
    checks: Ranges = ()
    """Indices of the plan's checks to make: pairs of copies to compare."""
    measures: Ranges = ()
    """Indices of the plan's recoded tensors whose errors to measure."""
    files: tuple[str, ...] = ()
    """Target files that the item writes into."""
    sources: tuple[str, ...] = ()
    """Source files that the item reads, those with the most bytes first."""
    begin: int = 0
    """Offset of the item's part in the file with the parts of all items."""
    size: int = 0
    """Size of the item's part in that file, in bytes."""
    key: str = ""
    """Hash of the item's part; empty if the part is not stored, so that a worker must plan the whole conversion."""

    @property
    def magnitude(self) -> int:
        """Number of the item's size class: items of about the same size have the same number."""
        return (3 * self.nbytes).bit_length()

    @property
    def is_empty(self) -> bool:
        """Whether the item has nothing to do."""
        return not (self.tensors or self.checks or self.measures)


class WorkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A conversion, divided into work items."""

    form: int = _VERSION
    """Version of the schema of a plan file."""
    program: str
    """Version of Transaxle that made the plan."""
    order: ConversionOrder
    """The conversion as plain data."""
    task: Task
    """Identity of the plan, and the state of the source's files."""
    overwrite: bool | str = False
    """Whether to replace a checkpoint at the target; `everything`: also delete all further files in its folder."""
    sync: bool = True
    """Whether to sync everything to disk before the target appears."""
    jobs: int | None = None
    """Number of threads of each worker; None: the worker's own default."""
    memory: int | None = None
    """Bytes of the buffers of each worker; None: the worker's own default."""
    items: tuple[WorkItem, ...]
    """The work items."""
    files: tuple[str, ...] = ()
    """Source files whose state is part of the task, if workers need not plan."""
    seal: str = ""
    """Hash of all further fields, computed while `seal` is empty."""

    @property
    def text(self) -> bytes:
        """The content of a plan file; `read_plan` reads it."""
        unsealed = msgspec.json.encode(msgspec.structs.replace(self, seal=""))
        return msgspec.json.encode(msgspec.structs.replace(self, seal=digest(unsealed)))


def program_version() -> str:
    """Return the version of the installed program; empty if it is not installed."""
    from importlib import metadata  # imported here: only plan files need it

    try:
        return metadata.version("transaxle")
    except metadata.PackageNotFoundError:
        return ""


def work_plan(order: ConversionOrder, cleared: CheckedPlan, count: int | None = None, **options: Any) -> WorkPlan:
    """Divide a checked plan into work items.

    Args:
        order: the conversion as plain data.
        cleared: the plan of this conversion, checked for its target.
        count: number of items; None: one per GiB.
        **options: `overwrite`, `sync`, `jobs`, `memory` of `WorkPlan`.

    Raises:
        TransaxleError: a file of the source cannot be read.
    """
    source = cleared.checkpoint.path
    if without_commit(source) != source:  # workers must read the planned commit, even if its branch has moved on
        order = msgspec.structs.replace(order, source=source)
    items = divide(cleared.plan, count, whole_files=is_url(order.target))
    storage = cleared.checkpoint.container.storage
    if isinstance(storage, Overlay):
        return WorkPlan(program=program_version(), order=order, task=cleared.task, items=items, **options)
    items, files = with_parts(cleared.plan, items, storage), source_files(cleared)
    return WorkPlan(program=program_version(), order=order, task=cleared.task, items=items, files=files, **options)


def parse_plan(text: bytes, file: str) -> WorkPlan:
    """Parse a plan file.

    Args:
        text: `WorkPlan.text`.
        file: name of the file, for errors.

    Raises:
        Refused: CORRUPT if the text is no plan, or was changed; UNSUPPORTED if a different version of Transaxle wrote
            it.
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
    """Read a plan file; raises like `parse_plan` and `read_file`."""
    return parse_plan(read_file(path, _LONGEST), path)


def write_plan(plan: WorkPlan, path: str) -> None:
    """Write a plan file, which must not exist; only its owner may read it if a URL in it has a password or a signature.

    Raises:
        UsageError: EXISTS, if the file exists.
        StorageError: IO or NO_SPACE, if the file cannot be written.
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
    """Parse a work item's stored part of the plan; None if its hash is not that of the planned part."""
    if not item.key or digest(text) != item.key:
        return None
    return msgspec.msgpack.decode(text, type=PlanPart)


def part_of_item(plan: Plan, item: WorkItem, storage: Storage | None = None) -> PlanPart:
    """Return the part of a plan that an item does.

    Args:
        plan: the whole plan.
        item: the work item.
        storage: the source, for the versions of its files; None: leave the versions out.

    Raises:
        TransaxleError: a file of the source cannot be read.
    """
    return PlanPart(
        versions=() if storage is None else tuple((name, storage.version(name)) for name in item.sources),
        tensors=tuple(plan.units[number] for number in numbers(item.tensors)),
        checks=tuple(plan.checks[number] for number in numbers(item.checks)),
        measures=tuple(plan.recoded[number] for number in numbers(item.measures)),
    )


def with_parts(plan: Plan, items: Iterable[WorkItem], storage: Storage) -> tuple[WorkItem, ...]:
    """Return the items of a plan with the offsets and hashes of their parts; raises like `part_of_item`."""
    keyed_items, offset = [], 0
    for item in items:
        text = part_of_item(plan, item, storage).text
        keyed_items.append(msgspec.structs.replace(item, begin=offset, size=len(text), key=digest(text)))
        offset += len(text)
    return tuple(keyed_items)


def numbers(ranges: Ranges) -> Iterator[int]:
    """Yield every number in ranges."""
    for first, stop in ranges:
        yield from range(first, stop)


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Return numbers (in any order, with or without repetition) as ranges. Inverse: `numbers`."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return tuple((first, stop) for first, stop in ranges)


def order_items(items: Iterable[WorkItem]) -> list[WorkItem]:
    """Return work items in the order in which they should begin: checks that may refuse first, then large items.

    A large item that begins last would let all workers but one wait. Items of about the same size stay in file order,
    so that concurrent workers read and write near each other.
    """
    return sorted(items, key=lambda item: (not (item.checks or item.measures), -item.magnitude))


def divide(plan: Plan, count: int | None = None, *, whole_files: bool = False) -> tuple[WorkItem, ...]:
    """Divide a plan into work items.

    Args:
        plan: the whole plan.
        count: number of items, of which some are empty if there are fewer units or files. None: one per GiB.
        whole_files: whether each target file belongs to a single item.

    Raises:
        TypeError: `count` is no number.
        ValueError: `count` is less than one.
    """
    pieces = [*_check_pieces(plan), *(_file_pieces(plan) if whole_files else _tensor_pieces(plan))]
    total = sum(piece.nbytes for piece in pieces)
    if count is None:
        count = max(1, min(_MAX_ITEMS, len(pieces), -(-total // _ITEM_BYTES)))
    count = read_count("items", count)
    shares: list[list[_Piece]] = [[] for _ in range(count)]
    offset = 0
    for number, piece in enumerate(pieces):
        # With more pieces than items, a piece goes to the item whose share of all bytes contains its middle.
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
    """Yield a piece for each check that may refuse the conversion."""
    for number, check in enumerate(plan.checks):
        yield _Piece(2 * check.nbytes, "checks", [number])
    for number, step in enumerate(plan.recoded):
        if step.action in MEASURED_BY_READING:
            yield _Piece(nbytes(step.dtype, step.shape), "measures", [number])


def _tensor_pieces(plan: Plan) -> Iterator[_Piece]:
    """Yield the units of a plan as pieces; the buffers of an encoded tensor share one piece."""
    together: dict[str, list[int]] = {}
    for number, tensor in enumerate(plan.units):
        if tensor.step is not None:
            together.setdefault(tensor.step.tensor, []).append(number)
    for number, tensor in enumerate(plan.units):
        group = [number] if tensor.step is None else together[tensor.step.tensor]
        if group[0] == number:
            yield _Piece(sum(plan.units[each].nbytes for each in group), "tensors", group)


def _file_pieces(plan: Plan) -> Iterator[_Piece]:
    """Yield the units of each target file as a piece; units without bytes belong to no file.

    A unit that lies in several files is produced again for each file. If that costs much compared with the files' size,
    for example because ranks share every tensor, these files form one piece.
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
