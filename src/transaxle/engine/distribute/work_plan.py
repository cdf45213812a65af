"""A conversion as data that other processes carry out: what is asked for, and its division into items of work.

An item is a share of the plan that one worker does alone, of about as many bytes as the others. A tensor is divided
only into the spans in which it is hashed, and only where it is copied as it is; the buffers that one tensor is encoded
as stay together. What may refuse a conversion comes first: copies that must be equal, values that may become infinite.

On a service an object has one writer. There an item is a file, or several: small ones, and those that share tensors,
each with a part of them. A tensor that lies in the files of several items all the same (a replica for each rank) is
made by each of them.

A plan's file says what to plan, and numbers what each item does of it. Whoever begins and commits opens the source and
plans anew, and must come to the same plan over the same files, or is refused. The shares behind the numbers are kept
beside the draft, a range of one file for each item, so that a worker reads those of its items and plans nothing; an
item has their hash. Where the source is seen through a view (decoded, cast, averaged), which has no form on disk,
workers plan too.
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
from transaxle.engine.carry import Share
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.checkpoint.settings import LONGEST_TABLE, model_config
from transaxle.engine.execute import Cleared, source_files
from transaxle.engine.plan.conversion import Prepared, make_plan
from transaxle.engine.plan.planned import Plan
from transaxle.engine.views.encode import Encode
from transaxle.errors import refuse, without_secrets
from transaxle.formats.catalog import nbytes
from transaxle.formats.storage.local import failed, read_file
from transaxle.formats.storage.storage import Overlay, Storage, as_text, is_url, unpinned
from transaxle.formats.store.multipart import multipart
from transaxle.formats.store.service import Service, local_path
from transaxle.move.journal import Task, digest
from transaxle.move.workers import DisjointSets
from transaxle.options import OPTIONS

_VERSION = 1
"""Of the form of the file."""
_LONGEST = 1 << 28
_PLAN_AGAIN = "Plan again with this program:  transaxle plan SRC DST --to … --write PLAN."
_USUAL = 1 << 30
"""Bytes of an item where nobody says how many there are."""
_MOST = 4096
"""Items at most where nobody says how many there are."""
_LITTLE = 8
"""What is less than one part in so many of a file is little beside it."""

Ranges = tuple[tuple[int, int], ...]
"""First number and one past the last, of each range."""


class _Piece(msgspec.Struct, frozen=True):
    """A part of a plan that is not divided further."""

    nbytes: int
    """Bytes that it moves, or reads."""
    kind: str
    """The field of `WorkItem` that its numbers are of."""
    numbers: Sequence[int]
    """Of units, checks or recoded tensors of the plan."""
    files: tuple[str, ...] = ()
    """The files that it is all of; none where workers share files."""


class ConversionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what a conversion does."""

    source: str
    """Absolute path or URL."""
    target: str
    """Absolute path or URL."""
    to: str
    """`FORMAT[:DIALECT]`."""
    reading: dict[str, Any]
    """Options of `open_checkpoint`, all of them data; a config is its content."""
    rules: str | None = None
    """Text of the table of one's own; None: there is none."""
    shaping: dict[str, Any] = {}
    """Options of `make_plan` that are plain data."""
    encode: Encode | None = None
    """Which tensors are encoded, and how."""
    degrees: Degrees | None = None
    """The ranks of a target that has files for each of them."""

    @contextmanager
    def planned(self) -> Iterator[Prepared]:
        """Open the source and plan; the files are open until the block ends.

        Raises:
            TransaxleError: what `open_checkpoint` and `make_plan` raise.
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
    """Return a conversion as data.

    Args:
        src: the source's path or URL.
        dst: the target's path or URL.
        to: `FORMAT[:DIALECT]`.
        reading: options of `open_checkpoint`, as `read_options` gives them.
        shaping: those of `make_plan` that are plain data.
        encode: which tensors are encoded.
        degrees: the ranks of a target that has files for each of them.

    Raises:
        Refused: UNSUPPORTED for a target that several workers cannot write.
        TransaxleError: what reading config and rules raises.
    """
    here = local_path(dst) if is_url(dst) else dst
    plain = {name: value for name, value in reading.items() if value is not None}
    config, rules = model_config(plain.pop("config", None)), plain.pop("rules", None)
    paths = [name for name in plain if OPTIONS[name].kind == "path"]
    for path in (src, dst, *(plain[name] for name in paths)):
        if as_text(path) != path:
            message = "its name is not UTF-8, and workers are told of paths as UTF-8"
            raise refuse("UNSUPPORTED", message, file=path, hint="Rename it, or convert in this process: without --on.")
    if here is None:
        multipart(Service(dst))
    plain |= {name: _absolute(plain[name]) for name in paths} | ({} if config is None else {"config": dict(config)})
    return ConversionOrder(
        source=_absolute(src),
        target=dst if here is None else _absolute(here),
        to=to,
        reading=plain,
        rules=None if rules is None else read_file(rules, LONGEST_TABLE).decode("utf-8"),
        shaping=dict(shaping),
        encode=encode,
        degrees=degrees,
    )


def _absolute(path: str) -> str:
    """Return a path as other processes find it; a link stays one."""
    return path if is_url(path) else os.path.abspath(path)  # noqa: PTH100


class WorkItem(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a plan that one worker does alone."""

    number: int
    """Its place among the items."""
    nbytes: int
    """Bytes that it moves, or reads to compare and to measure."""
    tensors: Ranges = ()
    """Which units of the plan it writes: tensors, and spans of large ones."""
    checks: Ranges = ()
    """Which of the plan's copies it compares."""
    measures: Ranges = ()
    """Of which recoded tensors of the plan it measures the error."""
    files: tuple[str, ...] = ()
    """Target files that it writes into."""
    sources: tuple[str, ...] = ()
    """Source files that it reads, those first of which it reads most."""
    begin: int = 0
    """First byte of its share in the file that holds those of all items."""
    size: int = 0
    """Bytes of its share in that file."""
    key: str = ""
    """Hash of its share; empty where the file has none, and a worker must plan the whole conversion."""

    @property
    def magnitude(self) -> int:
        """A number that items of about one size share, those of the usual size among them."""
        return (3 * self.nbytes).bit_length()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.tensors or self.checks or self.measures)


class WorkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A conversion, divided into items of work."""

    form: int = _VERSION
    """Version of what follows."""
    program: str
    """Version of the program that planned."""
    order: ConversionOrder
    """What is converted."""
    task: Task
    """What the plan does, and the state of the source's files."""
    overwrite: bool | str = False
    """Replace a checkpoint at the target; `everything`: with whatever else is there."""
    sync: bool = True
    """Make everything durable before the target appears."""
    jobs: int | None = None
    """Threads of each worker."""
    memory: int | None = None
    """Bytes of the buffers of each worker."""
    items: tuple[WorkItem, ...]
    """The work."""
    files: tuple[str, ...] = ()
    """The source files whose state is that of the task, where workers need not plan."""
    seal: str = ""
    """Hash of all the rest, with this empty."""

    @property
    def text(self) -> bytes:
        """The file's content; `read_plan` reads it."""
        unsealed = msgspec.json.encode(msgspec.structs.replace(self, seal=""))
        return msgspec.json.encode(msgspec.structs.replace(self, seal=digest(unsealed)))


def program_version() -> str:
    """Return the version of the installed program; empty where it is not installed."""
    from importlib import metadata  # only whoever writes or reads a plan's file waits for it

    try:
        return metadata.version("transaxle")
    except metadata.PackageNotFoundError:
        return ""


def work_plan(order: ConversionOrder, cleared: Cleared, count: int | None = None, **options: Any) -> WorkPlan:
    """Divide a cleared plan into items of work.

    Args:
        order: what it was made of.
        cleared: the plan.
        count: how many items; None: one for each GiB.
        **options: `overwrite`, `sync`, `jobs`, `memory` of `WorkPlan`.

    Raises:
        TransaxleError: a file of the source cannot be read.
    """
    source = cleared.checkpoint.path
    if unpinned(source) != source:  # whoever does an item reads the commit that was planned, wherever a branch is then
        order = msgspec.structs.replace(order, source=source)
    items = divide(cleared.plan, count, whole_files=is_url(order.target))
    storage = cleared.checkpoint.container.storage
    if isinstance(storage, Overlay):
        return WorkPlan(program=program_version(), order=order, task=cleared.task, items=items, **options)
    items, files = keyed(cleared.plan, items, storage), source_files(cleared)
    return WorkPlan(program=program_version(), order=order, task=cleared.task, items=items, files=files, **options)


def parse_plan(text: bytes, file: str) -> WorkPlan:
    """Read a plan.

    Args:
        text: `WorkPlan.text`.
        file: where it is from, for errors.

    Raises:
        Refused: CORRUPT where it is none, or was changed; UNSUPPORTED where another version of the program wrote it.
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
    """Read a plan's file; raises as `parse_plan` and `read_file`."""
    return parse_plan(read_file(path, _LONGEST), path)


def write_plan(plan: WorkPlan, path: str) -> None:
    """Write a plan's file, which must not exist; for its owner alone where a URL in it has a password or a signature.

    Raises:
        UsageError: EXISTS.
        StorageError: IO, NO_SPACE.
    """
    try:
        places = plan.order.source, plan.order.target
        mode = 0o666 if places == tuple(map(without_secrets, places)) else 0o600
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(plan.text)
    except FileExistsError:
        raise refuse("EXISTS", "the file for the plan already exists", file=path, hint="Name another file.") from None
    except OSError as error:
        raise failed(error, "writing the plan", path) from error


def parse_share(text: bytes, item: WorkItem) -> Share | None:
    """Read the share of an item; None where it is not what was planned."""
    if not item.key or digest(text) != item.key:
        return None
    return msgspec.msgpack.decode(text, type=Share)


def share_of(plan: Plan, item: WorkItem, storage: Storage | None = None) -> Share:
    """Return what an item of a plan does.

    Args:
        plan: the plan.
        item: the item.
        storage: the source, for the versions of its files; None: they are left out.

    Raises:
        TransaxleError: a file of the source cannot be read.
    """
    return Share(
        versions=() if storage is None else tuple((name, storage.version(name)) for name in item.sources),
        tensors=tuple(plan.units[number] for number in numbers(item.tensors)),
        checks=tuple(plan.checks[number] for number in numbers(item.checks)),
        measures=tuple(plan.recoded[number] for number in numbers(item.measures)),
    )


def keyed(plan: Plan, items: Iterable[WorkItem], storage: Storage) -> tuple[WorkItem, ...]:
    """Return the items of a plan with the places and hashes of their shares; raises as `share_of`."""
    found, at = [], 0
    for item in items:
        text = share_of(plan, item, storage).text
        found.append(msgspec.structs.replace(item, begin=at, size=len(text), key=digest(text)))
        at += len(text)
    return tuple(found)


def numbers(ranges: Ranges) -> Iterator[int]:
    """Yield the numbers in ranges."""
    for first, stop in ranges:
        yield from range(first, stop)


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Inverse of `numbers`, for numbers in any order, also given several times."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return tuple((first, stop) for first, stop in ranges)


def in_order(items: Iterable[WorkItem]) -> list[WorkItem]:
    """Return items in the order in which they should begin: what may refuse the conversion, then the large ones.

    A large item that is begun last would leave all others waiting. Items of about one size stay in the order of the
    files, so those that are done at the same time read and write near each other.
    """
    return sorted(items, key=lambda item: (not (item.checks or item.measures), -item.magnitude))


def divide(plan: Plan, count: int | None = None, *, whole_files: bool = False) -> tuple[WorkItem, ...]:
    """Divide a plan into work items.

    Args:
        plan: what is to be done.
        count: how many items; some are empty where there are not so many units, or files. None: one for each GiB.
        whole_files: no two items write into one file.

    Raises:
        TypeError: `count` is no number.
        ValueError: it is less than one.
    """
    pieces = [*_proofs(plan), *(_files(plan) if whole_files else _tensors(plan))]
    total = sum(piece.nbytes for piece in pieces)
    if count is None:
        count = max(1, min(_MOST, len(pieces), -(-total // _USUAL)))
    count = read_count("items", count)
    shares: list[list[_Piece]] = [[] for _ in range(count)]
    at = 0
    for number, piece in enumerate(pieces):
        # The item in whose share of all bytes the middle of the piece lies, if there is not one for each piece.
        middle = min(count - 1, (at + piece.nbytes // 2) * count // total) if total else 0
        shares[number if len(pieces) <= count else middle].append(piece)
        at += piece.nbytes
    return tuple(_item(plan, number, share) for number, share in enumerate(shares))


def _item(plan: Plan, number: int, share: Sequence[_Piece]) -> WorkItem:
    tensors, compared, measures = (
        ranges_of(itertools.chain.from_iterable(piece.numbers for piece in share if piece.kind == kind))
        for kind in ("tensors", "checks", "measures")
    )
    units = [plan.units[each] for each in numbers(tensors)]
    checks = [plan.checks[each] for each in numbers(compared)]
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
        checks=compared,
        measures=measures,
        files=tuple(files),
        sources=tuple(sorted(reads, key=lambda file: -reads[file])),
    )


def _proofs(plan: Plan) -> Iterator[_Piece]:
    """Yield what may refuse a conversion."""
    for number, check in enumerate(plan.checks):
        yield _Piece(2 * check.nbytes, "checks", [number])
    for number, step in enumerate(plan.recoded):
        if step.action in MEASURED_BY_READING:
            yield _Piece(nbytes(step.dtype, step.shape), "measures", [number])


def _tensors(plan: Plan) -> Iterator[_Piece]:
    """Yield the units of a plan; the buffers that one tensor is encoded as together."""
    together: dict[str, list[int]] = {}
    for number, tensor in enumerate(plan.units):
        if tensor.step is not None:
            together.setdefault(tensor.step.tensor, []).append(number)
    for number, tensor in enumerate(plan.units):
        group = [number] if tensor.step is None else together[tensor.step.tensor]
        if group[0] == number:
            yield _Piece(sum(plan.units[each].nbytes for each in group), "tensors", group)


def _files(plan: Plan) -> Iterator[_Piece]:
    """Yield the units of each file; those without bytes are in none.

    A unit that lies in several files is made anew for each of them. Where that is much beside the files, as where ranks
    share every tensor, these are one piece.
    """
    places: list[dict[str, int]] = []
    own, beyond = Counter[str](), Counter[str]()
    for unit in plan.units:
        inside = Counter[str]()
        for place in unit.everywhere:
            inside[place.file] += place.size
        places.append(dict(inside) if unit.nbytes else {"": 0})
        own.update(inside)
        beyond.update({file: unit.nbytes - size for file, size in inside.items()})
    wasteful = {file for file in own if beyond[file] * _LITTLE > own[file]}
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
