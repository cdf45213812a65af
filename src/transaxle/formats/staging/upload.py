"""Writing a checkpoint to a service: every file is sent in parts, and none is to be seen before all are complete.

Services have no rename. What they have is the multipart upload: parts are sent, and the file appears when the last call
says so. So all files are sent first; committing lets them appear, the ones that make a folder a checkpoint after the
ones they speak of, and the manifest last. A run that fails takes everything back; of one that is killed there remain
parts that nobody sees, and that the service forgets by itself if it is told to.

A stream is written from its beginning to its end, by one thread at a time: `ordered` tells the engine so.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog.sidecar_files import MANIFEST, STATE_FOLDER
from transaxle.formats.registry import holds_tensors, is_one_file, opens_checkpoint
from transaxle.formats.remote.service import FILE, Info, Service, Stream
from transaxle.formats.staging.belongings import (
    Overwrite,
    RemoteFolder,
    irreplaceable,
    known,
    remote_head_of,
    replaced_file,
    several_files,
)
from transaxle.formats.storage.names import checked_parts

PART = 8 << 20
"""Bytes of a part, unless a file would have too many."""
_MOST_PARTS = 10_000
_GRAIN = 1 << 20
_MOST_EARLY = 64 << 20
"""Bytes of a file that are kept until it is their turn."""
_OWN = "memory"
"""Scheme of a store that is in the memory of one process."""


class Upload:
    """A checkpoint in the making under a URL; it is used as `formats.staging.Staging` is.

    Args:
        target: URL of a folder, or of one file if it ends in `.safetensors`, `.bin`, `.pt` or `.pth`.
        overwrite: replace a checkpoint that is there. It stays readable until everything is sent. `everything`:
            whatever else is under the URL goes too; else it is refused.
        resume: refused: parts that were sent cannot be continued by another run.
        part: bytes of a part; more for files that would have more than 10,000. S3 wants at least 5 MiB.

    Raises:
        UsageError: EXISTS if the target is there and may not be replaced.
        Refused: UNSUPPORTED for `resume`, and for services that cannot be written to in this way.
        StorageError: IO.
    """

    ordered: Literal[True] = True
    """The bytes of a file must come in order, and from one thread at a time."""

    def __init__(self, target: str, *, overwrite: Overwrite = False, resume: bool = False, part: int = PART) -> None:
        self._service = Service(target, writing=True)
        self._shown = self._service.shown
        if resume:
            hint = "Run it without --resume, or convert to a local folder and upload that."
            raise refuse("UNSUPPORTED", "an upload cannot be resumed", file=self._shown, hint=hint)
        if not self._service.path.strip("/").partition("/")[2] and self._service.scheme != _OWN:
            raise refuse("EXISTS", "it is the root of the store", file=self._shown, hint="Name a folder in it.")
        self.found: tuple[str, ...] = ()
        """Nothing: what a killed run has sent is not to be seen."""
        self._overwrite = known(overwrite)
        self._part = part
        self._single: str | None = None
        self._streams: dict[str, _File] = {}
        self._appeared: list[str] = []
        self._scratch: Path | None = None

    @property
    def path(self) -> Path:
        """A folder on this machine for what is not part of the checkpoint; nothing of the checkpoint is in it."""
        if self._scratch is None:
            raise ValueError("this upload is not begun, or at its end")
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
        """Refuse what beginning and preparing would refuse, as far as it is known without sending anything.

        Args:
            folder: names and sizes of the files, where the target is a folder.
            file: those of the one, where the target is a file.

        Raises as entering the context and `prepare` do.
        """
        self._begin_at()
        if self._single and len(file) > 1:
            raise several_files(self._shown)

    def _begin_at(self) -> None:
        """Find out whether the target is a file, and check it."""
        found = self._service.info(self._service.path, self._shown)
        is_file = found is not None and found.get("type") == FILE
        if is_one_file(self._shown) and (found is None or is_file):
            self._single = self._service.path.rpartition("/")[2]
        self._check(found)

    def __enter__(self) -> Self:
        self._begin_at()
        self._scratch = Path(tempfile.mkdtemp(prefix="transaxle-"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._streams.values():
            file.discard()
        for name in self._appeared:  # the commit failed half-way: what has appeared goes again
            with suppress(TransaxleError):
                self._service.delete(self._place(name), name)
        self._finish()

    def prepare(self, files: Mapping[str, int]) -> frozenset[str]:
        """Begin all files of known size.

        Args:
            files: name (`a` or `folder/a`) to size in bytes.

        Returns:
            Nothing: no file was begun by an earlier run.

        Raises:
            Refused: PATH_ESCAPE; UNSUPPORTED if the target is one file and these are not one, or cannot be written to.
            StorageError: IO.
        """
        for name, size in files.items():
            self._begin(name, size)
        return frozenset()

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write a contiguous view into a prepared file.

        What comes before its turn is kept until then: headers and indexes may, tensors should not. A view that cannot
        be written to is not copied for that: its bytes must not change.

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
        """Whether other processes see what is written there."""
        return self._service.scheme != _OWN

    def commit(self) -> None:
        """Let everything appear. All threads must be done writing.

        A checkpoint that is replaced is deleted first, its manifest before all else: nobody may read files of both.

        Raises:
            UsageError: EXISTS if the target appeared in the meantime.
            StorageError: IO, also if the service does not hold what was sent.
        """
        self.complete()
        self.make_way()
        self.appear()
        self.keep()

    def complete(self) -> None:
        """Send what is left of all files: the first step of `commit`, for those who upload with others.

        Raises:
            StorageError: IO.
        """
        for file in self._streams.values():
            file.close()

    def make_way(self) -> None:
        """Check the target once more, and delete what is replaced: the second step, which one of many takes.

        Raises:
            UsageError: EXISTS if the target appeared in the meantime.
            StorageError: IO.
        """
        found = self._service.info(self._service.path, self._shown)
        self._check(found)
        if self._overwrite and not self._single:
            self._delete_old()

    def appear(self) -> None:
        """Let the files appear: the third step. Until the last one they are taken back if the context fails.

        Raises:
            StorageError: IO, also if the service does not hold what was sent.
        """
        for name in sorted(self._streams, key=_turn):
            self._appeared.append(name)  # also if it fails: then it may have appeared all the same
            self._streams[name].commit()
            self._compare(name)

    def keep(self) -> None:
        """Let what has appeared stay: the last step."""
        self._streams.clear()
        self._appeared.clear()
        self._finish()

    def _place(self, name: str) -> str:
        """Return what the client calls a file of the checkpoint."""
        parts = checked_parts(name)
        return self._service.path if self._single else "/".join((self._service.path, *parts))

    def _begin(self, name: str, size: int) -> None:
        place = self._place(name)
        if self._single and self._streams.keys() - {name}:
            raise several_files(self._shown)
        if name in self._streams:
            self._streams.pop(name).discard()
        part = part_size(size, self._part)
        self._streams[name] = _File(self._service, self._service.create(place, part, name), name, size, part)

    def _check(self, found: Info | None) -> None:
        """Check that a checkpoint may be put here; only what is empty or a checkpoint is replaced.

        Args:
            found: what the service says of the place.
        """
        if found is None:
            return
        if not self._overwrite:
            hint = "Choose another place, or replace it with --overwrite (overwrite=True)."
            raise refuse("EXISTS", "it exists already", file=self._shown, hint=hint)
        if found.get("type") != FILE:
            reason, hint = irreplaceable(RemoteFolder(self._service), self._overwrite)
        elif self._single:
            head = remote_head_of(self._service, int(found.get("size") or 0))
            reason, hint = replaced_file(self._single, head, self._overwrite)
        else:
            reason, hint = "it is a file, and a folder is to be written", "Choose another place."
        if reason:
            raise refuse("EXISTS", f"it is not replaced: {reason}", file=self._shown, hint=hint)

    def _delete_old(self) -> None:
        start = f"{self._service.path}/"
        old = {path.removeprefix(start): path for path in self._service.below(self._service.path, self._shown)}
        for name in sorted(old, key=_turn, reverse=True):
            self._service.delete(old[name], name)

    def _compare(self, name: str) -> None:
        """Check that the service holds as many bytes as were sent."""
        found = self._service.info(self._place(name), name)
        size = self._streams[name].size
        if found is None or found.get("size") != size:
            there = "nothing" if found is None else f"{found.get('size')} bytes"
            raise refuse("IO", f"{size} bytes were sent, the service holds {there}", file=name)

    def _finish(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None


class _File:
    """One file on its way.

    Args:
        service: where it goes.
        stream: takes its bytes.
        name: for errors.
        size: bytes, in the end.
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

    def write(self, offset: int, view: memoryview) -> None:
        """Send bytes if it is their turn, else keep them until it is."""
        octets = view.cast("B")
        if offset < self._sent or offset + octets.nbytes > self.size:
            message = f"{self._name}: bytes {offset} to {offset + octets.nbytes} of {self.size}, {self._sent} were sent"
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
                raise ValueError(f"{self._name}: bytes at {offset} come long before their turn at {self._sent}")
            octets = memoryview(bytes(octets))
        self._early[offset] = octets

    def _send(self, octets: memoryview) -> None:
        done = 0
        while done < octets.nbytes:
            # Up to the end of a part and no further: some services want all parts but the last to be of one length.
            count = min(octets.nbytes - done, self._part - self._sent % self._part)
            with self._service.working(f"sending {count} bytes at offset {self._sent}", self._name):
                self._open.write(octets[done : done + count])
            done += count
            self._sent += count

    @property
    def _open(self) -> Stream:
        if self._stream is None:
            raise ValueError(f"{self._name}: this file was given up, or has appeared")
        return self._stream

    def close(self) -> None:
        """Send what is left; nothing happens if that is done."""
        if self._sent != self.size:
            raise ValueError(f"{self._name}: {self._sent} of {self.size} bytes were written")
        with self._service.working("sending the last part", self._name):
            self._open.close()

    def commit(self) -> None:
        """Let the file appear."""
        with self._service.working("completing it", self._name):
            self._open.commit()
        self._stream = None

    def discard(self) -> None:
        """Forget the file, unless it has appeared; what the service says to that no longer matters."""
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        with suppress(TransaxleError), self._service.working("giving it up", self._name):
            try:
                stream.discard()
            finally:
                stream.closed = True  # else it would be sent when it is collected as garbage
        self._early.clear()


def part_size(size: int, part: int = PART) -> int:
    """Return the bytes of a part: no file has more than 10,000, which is what services take.

    Args:
        size: bytes of the file.
        part: bytes of a part if there are not too many.
    """
    least = -(-size // _MOST_PARTS)
    return max(part, -(-least // _GRAIN) * _GRAIN)


def opens(name: str) -> bool:
    """Tell whether a file makes the files around it a checkpoint, so that it must appear after them."""
    return _turn(name)[0] > 1


def _turn(name: str) -> tuple[int, str]:
    """Return when a file appears: what travels along, tensors, what makes them a checkpoint, the manifest.

    The optimizer's state comes before the model, which is a checkpoint without it.
    """
    if name == MANIFEST:
        return 3, name
    if name.startswith(f"{STATE_FOLDER}/"):
        return (1 if opens_checkpoint(name) else 0), name
    if opens_checkpoint(name):
        return 2, name
    return (1 if holds_tensors(name) else 0), name
