"""A plan as a file, for workers that share nothing but a file system: what is converted, and the items of work.

The file says what to plan, not the plan itself. Whoever begins and commits opens the source and plans anew, and must
come to the same plan over the same files, or is refused. Workers read the moves of their items, which are kept beside
the draft; where the source is seen through a view (decoded, cast, averaged), which has no form on disk, they plan too.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from transaxle.engine.distribute.conversion_order import ConversionOrder
from transaxle.engine.distribute.work_items import WorkItem, divide, keyed
from transaxle.engine.execute.preflight import Cleared, source_files
from transaxle.errors import refuse, without_secrets
from transaxle.formats.storage.local import failed, read_file
from transaxle.formats.storage.storage import Overlay, unpinned
from transaxle.move.hashing import digest
from transaxle.move.journal import Task

_VERSION = 1
"""Of the form of the file."""
_LONGEST = 1 << 28
_AGAIN = "Plan again with this program:  transaxle plan SRC DST --to … --write PLAN."


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
    even: bool = False
    """Parts of a file that are sent to a service have one length, but for the last."""
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
    items, storage = divide(cleared.plan, count), cleared.checkpoint.container.storage
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
        raise refuse("CORRUPT", message, file=file, hint=_AGAIN) from None
    if plan is None or plan.program != program_version():
        wrote = f"version {plan.program or '?'}" if plan is not None else f"a version with plans of form {form}"
        message = f"{wrote} of the program made this plan; this is {program_version() or '?'}, which may plan otherwise"
        raise refuse("UNSUPPORTED", message, file=file, hint=_AGAIN)
    if plan.text != text:
        raise refuse("CORRUPT", "the plan was changed after it was written", file=file, hint=_AGAIN)
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
