"""Uploading a checkpoint to a service: every file is sent in parts, and none is visible before all are complete.

Services have no rename, but they have multipart uploads: parts are sent, and the file appears with the final call. So
all files are sent first. Committing then makes them appear: files that turn a folder into a checkpoint come after the
files they refer to, and the manifest comes last. A run that fails takes everything back; a killed one leaves parts that
nobody sees, and that the service deletes if it is configured to.

Without `overwrite` S3 is asked to let a file appear only where there is none: of two runs at one place, the second one
is refused. On other services each run looks before, and looks afterwards whether its files are still its own.

A stream is written from beginning to end, by one thread at a time: `ordered` tells the engine so.

A file is sent as a stream of the service's client, which takes its bytes from beginning to end. On S3 a stream has an
upload in parts, which is completed by the calls of `S3Multipart`: they know what to do where an answer is lost, or
where nothing may be replaced.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from transaxle.arguments import Overwrite, read_overwrite
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.registry import MANIFEST, STATE_FOLDER, holds_tensors, is_one_file, opens_checkpoint
from transaxle.formats.storage.storage import split_name
from transaxle.formats.store.multipart import OpenUpload, S3Multipart, completed_tag
from transaxle.formats.store.place import (
    ELSEWHERE,
    RemoteFolder,
    irreplaceable,
    remote_head_of,
    replaced_file,
    several_files,
    when_kept,
)
from transaxle.formats.store.service import FILE, S3, Info, Service, Stream
from transaxle.formats.store.unfinished_uploads import remove_unanswered

_MOST_EARLY = 64 << 20
"""Cap on the bytes of a file that are kept until their turn."""


class SentFile(Protocol):
    """A file that is being sent, by whatever means."""

    size: int

    def write(self, offset: int, view: memoryview, /) -> None:
        """Take bytes."""

    def close(self) -> None:
        """Send the rest."""

    @property
    def foretold(self) -> str:
        """The tag that the file will have where it is the sum of its bytes; empty where that is not known."""

    def commit(self, *, new: bool) -> str:
        """Let the file appear; see `S3Multipart.complete` for what is returned."""

    def discard(self) -> None:
        """Abandon the file, unless it has appeared."""


class StreamedFile:
    """One file that is being sent.

    Args:
        service: the service.
        stream: takes its bytes.
        name: for errors.
        size: total bytes.
        part: bytes of every part but the last.
    """

    def __init__(self, service: Service, stream: Stream, name: str, size: int, part: int) -> None:
        self.size = size
        self._service = service
        self._stream: Stream | None = stream
        self._name = name
        self._part = part
        self._sent = 0
        self._copied = 0
        self._early: dict[int, memoryview] = {}
        self.beginning: OpenUpload | None = None
        """The upload that is over, if it was one in parts."""

    def write(self, offset: int, view: memoryview) -> None:
        """Send bytes if it is their turn, else keep them until it is."""
        octets = view.cast("B")
        if offset < self._sent or offset + octets.nbytes > self.size:
            message = (
                f"{self._name}: bytes {offset} to {offset + octets.nbytes} of {self.size} are out of order; "
                f"{self._sent} were sent"
            )
            raise ValueError(message)
        if offset > self._sent:
            self._keep(offset, octets)
            return
        self._send(octets)
        while self._sent in self._early:
            self._send(self._early.pop(self._sent))
        if self._sent == self.size:
            self.close()

    def _keep(self, offset: int, octets: memoryview) -> None:
        if not octets.readonly:
            self._copied += octets.nbytes
            if self._copied > _MOST_EARLY:
                raise ValueError(f"{self._name}: bytes at {offset} come too early; {self._sent} were sent")
            octets = memoryview(bytes(octets))
        self._early[offset] = octets

    def _send(self, octets: memoryview) -> None:
        sent = 0
        while sent < octets.nbytes:
            # Up to the end of a part and no further: some services want all parts but the last to be of one length.
            count = min(octets.nbytes - sent, self._part - self._sent % self._part)
            with self._service.working(f"sending {count} bytes at offset {self._sent}", self._name):
                self._open.write(octets[sent : sent + count])
            sent += count
            self._sent += count

    @property
    def _open(self) -> Stream:
        if self._stream is None:
            raise ValueError(f"{self._name}: this file was abandoned, or is already complete")
        return self._stream

    def close(self) -> None:
        """Send the rest; does nothing if all was sent."""
        if self._sent != self.size:
            raise ValueError(f"{self._name}: only {self._sent} of {self.size} bytes were written")
        with self._service.working("sending the last part", self._name):
            self._open.close()

    @property
    def foretold(self) -> str:
        """See `SentFile`."""
        tags = _tags_of(self._stream)
        return completed_tag(tags) or "" if tags else ""

    def commit(self, *, new: bool) -> str:
        """Let the file appear; where the answer is lost, what is there tells whether it has."""
        tag = _complete(self._service, self._open, self._name, new=new)
        if tag is None:
            with self._service.working("completing the upload", self._name):
                self._open.commit()
        self._over(self._open)
        return tag or ""

    def discard(self) -> None:
        """Abandon the file, unless it has appeared; errors of the service no longer matter."""
        if self._stream is None:
            return
        stream = self._stream
        self._over(stream)
        with suppress(TransaxleError), self._service.working("abandoning the upload", self._name):
            try:
                stream.discard()
            finally:
                stream.closed = True  # else it would be sent when it is collected as garbage
        self._early.clear()

    def _over(self, stream: Stream) -> None:
        self.beginning, self._stream = _begun_by(self._service, stream), None


def _complete(service: Service, stream: Any, file: str, *, new: bool) -> str | None:
    """Let the file of a client's own stream appear.

    Args:
        service: it.
        stream: of fsspec, all of whose bytes were sent.
        file: its name, for errors.
        new: only where there is no file.

    Returns:
        As `S3Multipart.complete`; None where the stream must do it.

    Raises:
        UsageError: EXISTS, where `new`.
        StorageError: IO.
    """
    upload = getattr(stream, "mpu", None)
    if service.scheme not in S3 or not upload:
        return None
    calls, path = S3Multipart(service), str(stream.path)
    if tags := _tags_of(stream):
        return calls.complete(path, str(upload["UploadId"]), tags, file, new=new)
    calls.abort(path, str(upload["UploadId"]), file)  # an upload has at least one part
    return calls.put(path, b"", file, new=new)


def _tags_of(stream: Any) -> list[str]:
    """Return the tags of the parts that a client's own stream has sent."""
    return [str(part["ETag"]).strip('"') for part in getattr(stream, "parts", None) or ()]


def _begun_by(service: Service, stream: Any) -> OpenUpload | None:
    """Return the upload that a client's own stream has begun; None where it is no such upload.

    Args:
        service: it.
        stream: of fsspec, neither committed nor discarded, or just committed.
    """
    upload = getattr(stream, "mpu", None)
    if service.scheme not in S3 or not upload:
        return None
    date = upload.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    return OpenUpload(str(stream.path), str(upload["UploadId"]), str(date and parsedate_to_datetime(date)))


PART = 8 << 20
"""Default bytes of a part; larger if the file would have too many."""
_MOST_PARTS = 10_000
_GRAIN = 1 << 20
_OWN = "memory"
"""Scheme of a store in the memory of one process."""
_PAUSES = (0.25, 0.5, 1.0, 2.0, 0.0)
"""Seconds between the looks at a file that has appeared: a service may be late to tell."""


class Upload:
    """A checkpoint that is being written under a URL; used like `formats.store.Staging`.

    Args:
        target: URL of a folder, or of one file if it ends in `.safetensors`, `.bin`, `.pt` or `.pth`.
        overwrite: replace an existing checkpoint, which stays readable until everything is sent. `everything`: also
            delete everything else under the URL; otherwise that is refused.
        resume: refused: another run cannot continue an upload.
        part: bytes of a part; more for files that would have more than 10,000. S3 wants at least 5 MiB.

    Raises:
        UsageError: EXISTS if the target exists and may not be replaced.
        Refused: UNSUPPORTED for `resume`, and for services without multipart uploads.
        StorageError: IO.
    """

    ordered: Literal[True] = True
    """The bytes of a file must come in order, and from one thread at a time."""

    def __init__(self, target: str, *, overwrite: Overwrite = False, resume: bool = False, part: int = PART) -> None:
        self._service = Service(target, writing=True)
        self._shown = self._service.shown
        if resume:
            hint = "Run it without --resume, or convert to a local folder and upload that; with --on, work is resumed."
            raise refuse("UNSUPPORTED", "an upload cannot be resumed", file=self._shown, hint=hint)
        if not self._service.path.strip("/").partition("/")[2] and self._service.scheme != _OWN:
            raise refuse("EXISTS", "this is the root of the store", file=self._shown, hint="Name a folder in it.")
        self.found: tuple[str, ...] = ()
        """Nothing: what a killed run has sent is not to be seen."""
        self._overwrite = read_overwrite(overwrite)
        self._part = part
        self._single: str | None = None
        self._streams: dict[str, SentFile] = {}
        self._appeared: list[str] = []
        self._stamps: dict[str, str] = {}
        self._scratch: Path | None = None

    @property
    def path(self) -> Path:
        """A local folder for files outside the checkpoint; it holds nothing of the checkpoint."""
        if self._scratch is None:
            raise ValueError("this upload has not begun, or has already ended")
        return self._scratch

    @property
    def scratch(self) -> Path:
        """The same folder: there is no resuming, so nothing in it must survive."""
        return self.path

    @property
    def single(self) -> str | None:
        """Name of the target if it is a file: just one file can be written then, under any name."""
        return self._single

    def look(self, folder: Mapping[str, int], file: Mapping[str, int]) -> None:  # noqa: ARG002 - as in `Staging`
        """Refuse what entering and preparing would refuse, as far as that is known without sending anything.

        Args:
            folder: names and sizes of the files, if the target is a folder.
            file: the same of the one file, if the target is a file.

        Raises as entering the context and `prepare` do.
        """
        self._begin_at()
        if self._single and len(file) > 1:
            raise several_files(self._shown)

    def _begin_at(self) -> None:
        """Find out whether the target is a file, and check it."""
        info = self._service.info(self._service.path, self._shown)
        is_file = info is not None and info.get("type") == FILE
        if is_one_file(self._shown) and (info is None or is_file):
            self._single = self._service.path.rpartition("/")[2]
        self._check(info)

    def __enter__(self) -> Self:
        self._begin_at()
        self._scratch = Path(tempfile.mkdtemp(prefix="transaxle-"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._streams.values():
            file.discard()
        with suppress(TransaxleError):
            self._remove_unanswered()
        for name in reversed(self._appeared):  # the commit failed half-way: what has appeared goes again
            with suppress(TransaxleError):
                if not self._is_of_another(name):
                    self._service.delete(self._place(name), name)
        self._finish()

    def prepare(self, files: Mapping[str, int]) -> frozenset[str]:
        """Start all files of known size.

        Args:
            files: name (`a` or `folder/a`) to size in bytes.

        Returns:
            An empty set: no file was started by an earlier run.

        Raises:
            Refused: PATH_ESCAPE; UNSUPPORTED if the target is one file and these are not one, or cannot be written.
            StorageError: IO.
        """
        for name, size in files.items():
            self._begin(name, size)
        return frozenset()

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write a contiguous view into a prepared file.

        Bytes that come before their turn are kept until then; that is meant for headers and indexes, not for tensors. A
        read-only view is kept without a copy, so its bytes must not change.

        Raises:
            StorageError: IO.
        """
        if view.nbytes:
            self._streams[file].write(offset, view)

    def write(self, file: str, data: bytes) -> None:
        """Write a file with this content: one whose size was not known before.

        Raises:
            Refused: PATH_ESCAPE.
            StorageError: IO.
        """
        self._begin(file, len(data))
        self.pwrite(file, 0, memoryview(data))

    def flush(self, file: str) -> None:
        """Do nothing: a file is complete, and closed, with its last byte."""

    @property
    def shared(self) -> bool:
        """Whether other processes see what is written."""
        return self._service.scheme != _OWN

    def commit(self) -> None:
        """Make all files appear. All threads must be done writing.

        A checkpoint that is replaced is deleted first, starting with its manifest, so that nobody reads a mixture of
        both.

        Raises:
            UsageError: EXISTS if the target appeared in the meantime.
            StorageError: IO, also if the service does not hold what was sent.
        """
        self.complete()
        self.make_way()
        self.appear()
        self.recheck(())
        self.keep()

    def complete(self) -> None:
        """Send the rest of all files: the first step of `commit`, for callers that upload with other ranks.

        Raises:
            StorageError: IO.
        """
        for file in self._streams.values():
            file.close()

    def make_way(self) -> None:
        """Check the target once more, and delete what is replaced: the second step, for one rank only.

        Raises:
            UsageError: EXISTS if the target appeared in the meantime.
            StorageError: IO.
        """
        info = self._service.info(self._service.path, self._shown)
        self._check(info)
        if self._overwrite and not self._single:
            self._delete_old()

    def appear(self) -> None:
        """Make the files appear: the third step. They are deleted again if the context fails before `keep`.

        Raises:
            UsageError: EXISTS if another run has put one of them there since `make_way`, and nothing may be replaced.
            StorageError: IO, also if the service does not hold what was sent.
        """
        for name in sorted(self._streams, key=turn):
            self._appear_one(name)

    def _appear_one(self, name: str) -> None:
        file = self._streams[name]
        self._appeared.append(name)  # also if it fails: then it may have appeared all the same
        self._stamps[name] = file.foretold
        try:
            self._stamps[name] = file.commit(new=not self._overwrite)
        except TransaxleError as error:
            if error.code == "EXISTS":
                self._appeared.remove(name)
            raise
        self._compare(name)

    def recheck(self, others: Collection[str] | None = None) -> None:
        """Check that the files that have appeared are still ours, once all of the checkpoint have: the fourth step.

        There is no lock, so another run may have written to the same place meanwhile. Whoever is the last to make its
        manifest appear sees here that a file is the other's; those files are not deleted again.

        Args:
            others: names of the files that other ranks have sent, so that there must be no more than these and our
                own; None: they are not all known here.

        Raises:
            StorageError: IO.
        """
        names = list(self._appeared)
        foreign = [name for name, stamp in self._looks(names).items() if stamp != self._stamps.get(name)]
        if foreign:
            self._appeared = [name for name in names if name not in foreign]
            raise _replaced(foreign[0])
        if others is not None and not self._single:
            self._refuse_strays({*others, *self._streams})

    def _refuse_strays(self, whole: Collection[str]) -> None:
        """Refuse to end with files in the folder that are not of the checkpoint: what was there was deleted."""
        start, strays = f"{self._service.path}/", list[str]()
        for pause in _PAUSES:
            found = self._service.below(self._service.path, self._shown)
            names = (path.removeprefix(start) for path in found if path.startswith(start))
            strays = [name for name in names if name not in whole]
            if not strays:
                return
            time.sleep(pause)
        message = "this file is none of this run's: another run wrote to the same place, or it was listed too late"
        hint = "What this run wrote is removed. Write again, with --overwrite (overwrite=True), or to another place."
        raise refuse("IO", message, file=strays[0], hint=hint)

    def _is_of_another(self, name: str) -> bool:
        """Tell whether another run has put its file at the place of one of ours since that appeared."""
        own, there = self._stamps.get(name, ""), self._looks([name])[name]
        return bool(own and there and own != there)

    def _looks(self, names: Sequence[str]) -> dict[str, str]:
        """Return what tells the versions of files apart, by name."""
        return {name: _stamp(self._service.info(self._place(name), name)) for name in names}

    @property
    def is_whole(self) -> bool:
        """Whether the manifest, which appears after everything else, is there; False if the service does not say."""
        with suppress(TransaxleError):
            return self._service.info(self._place(MANIFEST), MANIFEST) is not None
        return False

    def keep(self) -> None:
        """Keep the files that have appeared: the last step."""
        with suppress(TransaxleError):  # it may be forbidden to list uploads
            self._remove_unanswered()
        self._streams.clear()
        self._appeared.clear()
        self._finish()

    def _remove_unanswered(self) -> None:
        """Remove uploads that the service began without our being told, so that the client asked again.

        Raises:
            StorageError: IO.
        """
        begun = [file.beginning for file in self._streams.values() if isinstance(file, StreamedFile) and file.beginning]
        if begun:
            remove_unanswered(self._service, begun)

    def _place(self, name: str) -> str:
        """Return what the client calls a file of the checkpoint."""
        parts = split_name(name)
        return self._service.path if self._single else "/".join((self._service.path, *parts))

    def _begin(self, name: str, size: int) -> None:
        place = self._place(name)
        if self._single and self._streams.keys() - {name}:
            raise several_files(self._shown)
        if name in self._streams:
            self._streams.pop(name).discard()
        part = part_size(size, self._part)
        self._streams[name] = StreamedFile(self._service, self._service.create(place, part, name), name, size, part)

    def _check(self, info: Info | None) -> None:
        """Check that a checkpoint may be put here; only an empty folder or a checkpoint is replaced.

        Args:
            info: the service's information on the target.
        """
        if info is None:
            return
        if not self._overwrite:
            reason, hint = when_kept(*self._irreplaceable(info, overwrite=True))
            raise refuse("EXISTS", f"the target already exists{reason}", file=self._shown, hint=hint)
        reason, hint = self._irreplaceable(info, self._overwrite)
        if reason:
            raise refuse("EXISTS", f"the target is not replaced: {reason}", file=self._shown, hint=hint)

    def _irreplaceable(self, info: Info, overwrite: Overwrite) -> tuple[str, str]:
        """Return why an existing target must stay, and a hint; two empty texts if it may be replaced."""
        if info.get("type") != FILE:
            return irreplaceable(RemoteFolder(self._service), overwrite)
        if self._single:
            head = remote_head_of(self._service, int(info.get("size") or 0))
            return replaced_file(self._single, head, overwrite)
        return "the target is a file, but a folder is to be written", ELSEWHERE

    def _delete_old(self) -> None:
        start = f"{self._service.path}/"
        old = {path.removeprefix(start): path for path in self._service.below(self._service.path, self._shown)}
        for name in sorted(old, key=turn, reverse=True):
            if not self.has_gone(name):
                self._service.delete(old[name], name)

    def has_gone(self, file: str) -> bool:  # noqa: ARG002 - for uploads that several workers send
        """Tell whether a file has appeared in a commit that is continued: nothing, as nothing is continued here."""
        return False

    def _compare(self, name: str) -> None:
        """Check that the service holds as many bytes as were sent, and under the tag that it gave them."""
        size, tag, info = self._streams[name].size, self._stamps[name], None
        for pause in _PAUSES:
            info = self._service.info(self._place(name), name)
            if info is not None and info.get("size") == size and tag in ("", _stamp(info)):
                self._stamps[name] = _stamp(info)
                return
            time.sleep(pause)
        if info is not None and info.get("size") == size:
            raise _replaced(name)
        actual = "nothing" if info is None else f"{info.get('size')} bytes"
        raise refuse("IO", f"{size} bytes were sent, but the service holds {actual}", file=name)

    def _finish(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None


def _stamp(info: Info | None) -> str:
    """Return the tag of a file, and its time where it has none; empty where there is no file."""
    return str((info or {}).get("ETag") or (info or {}).get("created") or "").removeprefix("W/").strip('"')


def _replaced(file: str) -> TransaxleError:
    message = "another run wrote to the same place at the same time, and this file is not ours any more"
    hint = "What this run wrote is removed. Write again when the other run is over, or to another place."
    return refuse("IO", message, file=file, hint=hint)


def part_size(size: int, part: int = PART) -> int:
    """Return the bytes of a part: no file may have more than 10,000, the limit of services.

    Args:
        size: bytes of the file.
        part: bytes of a part if that does not make too many.
    """
    least = -(-size // _MOST_PARTS)
    return max(part, -(-least // _GRAIN) * _GRAIN)


def opens(name: str) -> bool:
    """Tell whether a file turns the files around it into a checkpoint, so that it must appear after them."""
    return turn(name)[0] > 1


def turn(name: str) -> tuple[int, str]:
    """Return a sort key for the order of appearance: sidecars, tensors, files that open a checkpoint, the manifest.

    The optimizer's state comes before the model, which is a checkpoint without it.
    """
    if name == MANIFEST:
        return 3, name
    if name.startswith(f"{STATE_FOLDER}/"):
        return (1 if opens_checkpoint(name) else 0), name
    if opens_checkpoint(name):
        return 2, name
    return (1 if holds_tensors(name) else 0), name
