"""The place where workers write a target: the hidden folder beside the target, or a cloud storage service, to which
they upload whole files.

The results of work items are stored in the same place, so that any process can see which work items are done. In the
folder, a lock prevents a premature commit. A service has no lock, but accepts no further parts once an upload is
complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec

from transaxle.engine.carry import PlanPart, write_fragments
from transaxle.engine.distribute.work_plan import WorkItem, WorkPlan, parse_part
from transaxle.engine.execute import join_spans
from transaxle.engine.plan.conversion import Prepared
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.registry import SCRATCH
from transaxle.formats.storage.local import storage_error
from transaxle.formats.storage.storage import is_url
from transaxle.formats.store.place import MOVES, TargetPlace
from transaxle.formats.store.staging import Writer
from transaxle.move.journal import ItemResult, Task, digest, item_file, parse_result, read_results, read_task

if TYPE_CHECKING:
    from transaxle.formats.store.multipart import StoredPart
    from transaxle.formats.store.shared_upload import FileSender, SharedUpload
    from transaxle.formats.store.unfinished_uploads import UploadRecord
    from transaxle.move.transfer import Writable

_BEGIN = "Begin the work:  transaxle work PLAN --begin."
_THERE = (
    "If  transaxle verify  shows that the target is the result of this plan, nothing remains to be done. Otherwise "
    "plan for a different target, or with --overwrite."
)


class WorkPlace(Protocol):
    """The place where workers write a plan's target and store the results of their work items."""

    def refuse_not_begun(self) -> None:
        """Refuse to write if no work on the plan has begun.

        Raises:
            UsageError: with code EXISTS, if work on a different conversion has begun in this place.
            Refused: with code INCOMPLETE, if no work has begun in this place.
        """

    def results(self, item_numbers: Iterable[int] | None = None) -> dict[int, ItemResult]:
        """Return work item number -> stored result, for all work items that have a result, or only for the given
        numbers.
        """

    def read_part(self, item: WorkItem) -> PlanPart | None:
        """Return the stored part of the plan for a work item. Return None if no part is stored, so that the worker must
        make the plan again.

        Raises:
            StorageError: with code IO, if the stored part cannot be read.
        """

    def open_writer(self, item: WorkItem) -> AbstractContextManager[ItemWriter]:
        """Return a context with a writer for the bytes and the result of a work item."""


class ItemWriter(Protocol):
    """Writes the bytes of one work item, and stores its result."""

    @property
    def files(self) -> Writable:
        """The target files into which the work item writes."""

    def store(self, result: ItemResult) -> ItemResult:
        """Make the written bytes durable, then store the work item's result, and return it."""


def work_place(plan: WorkPlan, prepared: Prepared | None = None) -> WorkPlace:
    """Return the place where workers execute a plan.

    Args:
        plan: the plan to execute.
        prepared: the same plan with its open source; it is needed if the target is on a cloud storage service.
    """
    return _FolderPlace(plan) if prepared is None or not is_url(plan.order.target) else _ServicePlace(plan, prepared)


class _FolderPlace:
    """The hidden folder beside the target as the place where workers write.

    Args:
        plan: the plan to execute.
    """

    def __init__(self, plan: WorkPlan) -> None:
        self._plan = plan
        self._place = TargetPlace(plan.order.target, overwrite=False)
        self._scratch = self._place.partial / SCRATCH

    def refuse_not_begun(self) -> None:
        """Refuse to write if no work has begun in the folder; see `WorkPlace.refuse_not_begun`."""
        started_task = read_task(self._scratch)
        if started_task is None:
            raise _not_begun(self._plan)
        _refuse_other(self._plan, started_task.key)

    def results(self, item_numbers: Iterable[int] | None = None) -> dict[int, ItemResult]:
        """Return the stored results of work items; see `WorkPlace.results`."""
        return read_results(self._scratch, item_numbers)

    def read_part(self, item: WorkItem) -> PlanPart | None:
        """Return the stored part of the plan for a work item; see `WorkPlace.read_part`."""
        started_task = read_task(self._scratch) if item.key else None
        if started_task is None or started_task.key != self._plan.task.key:
            return None
        path = self._scratch / MOVES
        try:
            with path.open("rb") as file:
                file.seek(item.begin)
                return parse_part(file.read(item.size), item)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(error, "reading what an item does", str(path)) from error

    @contextmanager
    def open_writer(self, _item: WorkItem) -> Iterator[_FolderWriter]:
        """Open the staged files and the folder of results; see `WorkPlace.open_writer`."""
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

    def store(self, result: ItemResult) -> ItemResult:
        """Sync the written files, then store the result; see `ItemWriter.store`."""
        self.files.flush()
        self.files.put(f"{SCRATCH}/{item_file(result.number)}", result.text)
        return result


class _ServicePlace:
    """A cloud storage service as the place where workers write: they upload whole files, and store results as objects
    beside the target.

    Args:
        plan: the plan to execute.
        prepared: the same plan with its open source.
    """

    def __init__(self, plan: WorkPlan, prepared: Prepared) -> None:
        self._plan = plan
        self._prepared = prepared
        self._early_fragments = prepared.draft.early_fragments()
        self._open_upload: tuple[int, SharedUpload] | None = None
        self._part_cache: dict[tuple[str, str], Mapping[int, StoredPart]] = {}

    @property
    def _upload(self) -> SharedUpload:
        """The target's upload, which each process opens anew, because processes cannot share the client of a
        service.
        """
        from transaxle.formats.store.shared_upload import SharedUpload

        if self._open_upload is None or self._open_upload[0] != os.getpid():
            self._open_upload = os.getpid(), SharedUpload(self._plan.order.target, resume=True)
        return self._open_upload[1]

    def refuse_not_begun(self) -> None:
        """Refuse to write if no work has begun on the service; see `WorkPlace.refuse_not_begun`."""
        self._current_upload()

    def _current_upload(self) -> UploadRecord:
        started_upload = self._upload.hidden.upload_record()
        if started_upload is None:
            raise _not_begun(self._plan)
        _refuse_other(self._plan, task_from(started_upload.task).key)
        return started_upload

    def results(self, item_numbers: Iterable[int] | None = None) -> dict[int, ItemResult]:
        """Return the stored results of work items; see `WorkPlace.results`."""
        return results_on(self._upload, self._current_upload().token, item_numbers)

    def read_part(self, item: WorkItem) -> PlanPart | None:  # noqa: ARG002 - as in a folder
        """Return None: a worker that uploads whole files needs their headers, so it must make the plan again."""
        return None

    @contextmanager
    def open_writer(self, item: WorkItem) -> Iterator[_ServiceWriter]:
        """Continue the uploads of a work item's files; see `WorkPlace.open_writer`."""
        from transaxle.formats.store.shared_upload import FileSender

        upload, started_upload = self._upload, self._current_upload()
        if started_upload.division != division_of(self._plan):
            message = "the work that has begun is divided otherwise"
            raise refuse("INCOMPLETE", message, file=self._plan.order.target, hint=_BEGIN)
        stored = self._parts_on_service(started_upload, item) if started_upload.continued else {}
        sizes = {file: self._prepared.draft.files[file] for file in item.files}
        files = FileSender(upload.calls, started_upload, sizes, self._early_fragments, stored)
        try:
            yield _ServiceWriter(files, upload, started_upload.token, self._prepared, item)
        finally:
            files.close()

    def _parts_on_service(self, started_upload: UploadRecord, item: WorkItem) -> Mapping[str, Mapping[int, StoredPart]]:
        """Return file -> part number -> uploaded part, for workers that left no result; the service is asked once per
        file.
        """
        for file in item.files:
            if (started_upload.token, file) not in self._part_cache and file in started_upload.uploads:
                parts = self._upload.calls.list_parts(started_upload.places[file], started_upload.uploads[file], file)
                self._part_cache[started_upload.token, file] = parts or {}
        return {file: self._part_cache.get((started_upload.token, file), {}) for file in item.files}


class _ServiceWriter:
    def __init__(self, files: FileSender, upload: SharedUpload, token: str, prepared: Prepared, item: WorkItem) -> None:
        self.files = files
        self._upload = upload
        self._token = token
        self._prepared = prepared
        self._item = item

    def store(self, result: ItemResult) -> ItemResult:
        """Complete the uploads, and store the result; see `ItemWriter.store`. Digests inside a file are written too,
        because one work item writes all tensors of the file.
        """
        draft = self._prepared.draft
        if self._item.files and draft.seal is not None:
            tensors = join_spans(self._prepared.plan, result.finished)
            write_fragments(self.files, draft.late_fragments({name: done.hash for name, done in tensors.items()}))
        result = msgspec.structs.replace(result, begun=self._token, sent=self.files.flush())
        self._upload.hidden.put_result(result.number, result.text)
        return result


def results_on(upload: SharedUpload, token: str, item_numbers: Iterable[int] | None = None) -> dict[int, ItemResult]:
    """Return the results of work items that were stored beside a target on a service since the work was last begun.

    Args:
        upload: the target's upload.
        token: identifies the last time the work was begun; results with a different token are ignored.
        item_numbers: numbers of the work items whose results are returned; None means all.

    Raises:
        StorageError: with code IO, if the service fails.
    """
    results = {}
    for number in upload.hidden.numbers() if item_numbers is None else item_numbers:
        text = upload.hidden.result(number)
        result = None if text is None else parse_result(text)
        if result is not None and result.begun == token and result.number == number:
            results[number] = result
    return results


def division_of(plan: WorkPlan) -> str:
    """Return a hash of a plan's division into work items, that is, which work item writes which files."""
    return digest(msgspec.json.encode([item.files for item in plan.items]))


def task_text(task: Task) -> str:
    """Return a task as JSON text."""
    return msgspec.json.encode(task).decode()


def task_from(text: str) -> Task:
    """Parse the text of a task. The function `task_text` is the inverse."""
    return msgspec.json.decode(text, type=Task)


def refuse_existing(plan: WorkPlan) -> None:
    """Refuse to begin the work if the target exists, unless the plan replaces it.

    Raises:
        UsageError: with code EXISTS, if the target exists.
    """
    if _exists(plan):
        raise refuse("EXISTS", "the target already exists", file=plan.order.target, hint=_THERE)


def _exists(plan: WorkPlan) -> bool:
    return not plan.overwrite and not is_url(plan.order.target) and os.path.lexists(plan.order.target)


def _not_begun(plan: WorkPlan) -> TransaxleError:
    if _exists(plan):
        message = "the target already exists, and no work on this plan has begun"
        return refuse("INCOMPLETE", message, file=plan.order.target, hint=_THERE)
    return refuse("INCOMPLETE", "the work on this plan has not begun", file=plan.order.target, hint=_BEGIN)


def _refuse_other(plan: WorkPlan, started_key: Sequence[str]) -> None:
    if started_key != plan.task.key:
        message = "beside the target is the unfinished work of another conversion"
        raise refuse(
            "EXISTS",
            message,
            file=plan.order.target,
            hint=(f"Remove the unfinished work with transaxle clean. {_BEGIN}"),
        )
