"""Where workers write: into the hidden folder beside the target, or whole files of an upload to a service.

Both keep the results of items, so that any process can see what is done. In the folder a lock keeps a commit from being
early; a service has none, and takes nothing more once an upload is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec

from transaxle.engine.carry import Share, write_fragments
from transaxle.engine.distribute.work_plan import WorkItem, WorkPlan, parse_share
from transaxle.engine.execute import united
from transaxle.engine.plan.conversion import Prepared
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.registry import SCRATCH
from transaxle.formats.storage.local import failed
from transaxle.formats.storage.storage import is_url
from transaxle.formats.store.place import MOVES, TargetPlace
from transaxle.formats.store.staging import Writer
from transaxle.move.journal import ItemResult, Task, digest, item_file, parse_result, read_results, read_task

if TYPE_CHECKING:
    from transaxle.formats.store.multipart import StoredPart
    from transaxle.formats.store.shared_upload import FileSender, SharedUpload
    from transaxle.formats.store.unfinished_uploads import BegunUpload
    from transaxle.move.transfer import Writable

_BEGIN = "Begin it:  transaxle work PLAN --begin."
_THERE = (
    "If it is what this plan makes, nothing is left to do:  transaxle verify tells. Otherwise plan for another place, "
    "or with --overwrite."
)


class WorkPlace(Protocol):
    """Where the work on a plan happens."""

    def refuse_not_begun(self) -> None:
        """Refuse to write where no work on the plan has begun.

        Raises:
            UsageError: EXISTS where it is the work of another conversion.
            Refused: INCOMPLETE where there is none.
        """

    def results(self, wanted: Iterable[int] | None = None) -> dict[int, ItemResult]:
        """Return results of items, all of them or some."""

    def stored_share(self, item: WorkItem) -> Share | None:
        """Return what an item does, where that is stored; whoever plans finds out otherwise.

        Raises:
            StorageError: IO.
        """

    def writing(self, item: WorkItem) -> AbstractContextManager[ItemWriter]:
        """Give what takes an item's bytes, and keeps its result: a context."""


class ItemWriter(Protocol):
    """Takes what an item writes."""

    @property
    def files(self) -> Writable:
        """Where the bytes go."""

    def keep(self, result: ItemResult) -> ItemResult:
        """Make the bytes durable, then keep the result, and return it."""


def work_place(plan: WorkPlan, prepared: Prepared | None = None) -> WorkPlace:
    """Return where the work on a plan happens.

    Args:
        plan: what is done there.
        prepared: the same, with the source open: for a service.
    """
    return _FolderPlace(plan) if prepared is None or not is_url(plan.order.target) else _ServicePlace(plan, prepared)


class _FolderPlace:
    """The hidden folder beside the target.

    Args:
        plan: what is done there.
    """

    def __init__(self, plan: WorkPlan) -> None:
        self._plan = plan
        self._place = TargetPlace(plan.order.target, overwrite=False)
        self._scratch = self._place.partial / SCRATCH

    def refuse_not_begun(self) -> None:
        """See `WorkPlace`."""
        begun = read_task(self._scratch)
        if begun is None:
            raise _not_begun(self._plan)
        _refuse_other(self._plan, begun.key)

    def results(self, wanted: Iterable[int] | None = None) -> dict[int, ItemResult]:
        """See `WorkPlace`."""
        return read_results(self._scratch, wanted)

    def stored_share(self, item: WorkItem) -> Share | None:
        """See `WorkPlace`."""
        begun = read_task(self._scratch) if item.key else None
        if begun is None or begun.key != self._plan.task.key:
            return None
        path = self._scratch / MOVES
        try:
            with path.open("rb") as file:
                file.seek(item.begin)
                return parse_share(file.read(item.size), item)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failed(error, "reading what an item does", str(path)) from error

    @contextmanager
    def writing(self, _item: WorkItem) -> Iterator[_FolderWriter]:
        """See `WorkPlace`."""
        if not self._place.partial.is_dir():
            raise _not_begun(self._plan)
        writer = Writer(self._place.partial, sync=True, shared=True)
        try:
            yield _FolderWriter(writer)
        finally:
            writer.close()


class _FolderWriter:
    def __init__(self, files: Writer) -> None:
        self.files: Writer = files

    def keep(self, result: ItemResult) -> ItemResult:
        """See `ItemWriter`."""
        self.files.flush()
        self.files.put(f"{SCRATCH}/{item_file(result.number)}", result.text)
        return result


class _ServicePlace:
    """Uploads of whole files, and the objects beside the target of a service.

    Args:
        plan: what is done there.
        prepared: the same, with the source open.
    """

    def __init__(self, plan: WorkPlan, prepared: Prepared) -> None:
        self._plan = plan
        self._prepared = prepared
        self._known = prepared.draft.early()
        self._opened: tuple[int, SharedUpload] | None = None
        self._stored: dict[tuple[str, str], Mapping[int, StoredPart]] = {}

    @property
    def _upload(self) -> SharedUpload:
        """The target, opened in this process: a client belongs to one."""
        from transaxle.formats.store.shared_upload import SharedUpload

        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), SharedUpload(self._plan.order.target, resume=True)
        return self._opened[1]

    def refuse_not_begun(self) -> None:
        """See `WorkPlace`."""
        self._begun()

    def _begun(self) -> BegunUpload:
        begun = self._upload.hidden.begun()
        if begun is None:
            raise _not_begun(self._plan)
        _refuse_other(self._plan, task_from(begun.task).key)
        return begun

    def results(self, wanted: Iterable[int] | None = None) -> dict[int, ItemResult]:
        """See `WorkPlace`."""
        return results_on(self._upload, self._begun().token, wanted)

    def stored_share(self, item: WorkItem) -> Share | None:  # noqa: ARG002 - as in a folder
        """Return None: whoever sends files needs their headers, and so the plan."""
        return None

    @contextmanager
    def writing(self, item: WorkItem) -> Iterator[_ServiceWriter]:
        """See `WorkPlace`."""
        from transaxle.formats.store.shared_upload import FileSender

        upload, begun = self._upload, self._begun()
        if begun.division != division_of(self._plan):
            message = "the work that has begun is divided otherwise"
            raise refuse("INCOMPLETE", message, file=self._plan.order.target, hint=_BEGIN)
        stored = self._stored_parts(begun, item) if begun.continued else {}
        sizes = {file: self._prepared.draft.files[file] for file in item.files}
        files = FileSender(upload.calls, begun, sizes, self._known, stored)
        try:
            yield _ServiceWriter(files, upload, begun.token, self._prepared, item)
        finally:
            files.close()

    def _stored_parts(self, begun: BegunUpload, item: WorkItem) -> Mapping[str, Mapping[int, StoredPart]]:
        """Ask once for each file which parts there are: those of workers that left no result."""
        for file in item.files:
            if (begun.token, file) not in self._stored and file in begun.uploads:
                found = self._upload.calls.stored_parts(begun.places[file], begun.uploads[file], file)
                self._stored[begun.token, file] = found or {}
        return {file: self._stored.get((begun.token, file), {}) for file in item.files}


class _ServiceWriter:
    def __init__(self, files: FileSender, upload: SharedUpload, token: str, prepared: Prepared, item: WorkItem) -> None:
        self.files = files
        self._upload = upload
        self._token = token
        self._prepared = prepared
        self._item = item

    def keep(self, result: ItemResult) -> ItemResult:
        """See `ItemWriter`; a file with room for digests is the only one, and its item has all of its tensors."""
        draft = self._prepared.draft
        if self._item.files and draft.seal is not None:
            tensors = united(self._prepared.plan, result.finished)
            write_fragments(self.files, draft.late({name: done.hash for name, done in tensors.items()}))
        result = msgspec.structs.replace(result, begun=self._token, sent=self.files.flush())
        self._upload.hidden.put_result(result.number, result.text)
        return result


def results_on(upload: SharedUpload, token: str, wanted: Iterable[int] | None = None) -> dict[int, ItemResult]:
    """Return results that lie beside a target on a service, of one beginning of the work.

    Args:
        upload: the target.
        token: of the beginning.
        wanted: numbers of items; None: all.

    Raises:
        StorageError: IO.
    """
    found = {}
    for number in upload.hidden.numbers() if wanted is None else wanted:
        text = upload.hidden.result(number)
        result = None if text is None else parse_result(text)
        if result is not None and result.begun == token and result.number == number:
            found[number] = result
    return found


def division_of(plan: WorkPlan) -> str:
    """Return a hash of which item of a plan writes which files."""
    return digest(msgspec.json.encode([item.files for item in plan.items]))


def task_text(task: Task) -> str:
    """Return a task as text."""
    return msgspec.json.encode(task).decode()


def task_from(text: str) -> Task:
    """Inverse of `task_text`."""
    return msgspec.json.decode(text, type=Task)


def refuse_there(plan: WorkPlan) -> None:
    """Refuse to begin where the target is there, and the plan does not say that it is replaced.

    Raises:
        UsageError: EXISTS.
    """
    if _is_there(plan):
        raise refuse("EXISTS", "the target already exists", file=plan.order.target, hint=_THERE)


def _is_there(plan: WorkPlan) -> bool:
    return not plan.overwrite and not is_url(plan.order.target) and os.path.lexists(plan.order.target)


def _not_begun(plan: WorkPlan) -> TransaxleError:
    if _is_there(plan):
        message = "the target already exists, and no work on this plan has begun"
        return refuse("INCOMPLETE", message, file=plan.order.target, hint=_THERE)
    return refuse("INCOMPLETE", "the work on this plan has not begun", file=plan.order.target, hint=_BEGIN)


def _refuse_other(plan: WorkPlan, begun: Sequence[str]) -> None:
    if begun != plan.task.key:
        message = "beside the target is the unfinished work of another conversion"
        raise refuse("EXISTS", message, file=plan.order.target, hint=f"Remove it with transaxle clean. {_BEGIN}")
