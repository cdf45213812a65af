"""The target of a conversion, a folder or file to write: whether its present contents may be replaced, and how they are
replaced atomically.

A target is a folder or, if its name has the ending of a tensor file, a single file. During a conversion, the target can
have two hidden files or folders next to it (neighbours): `.<name>.transaxle-partial`, the work in progress, and
`.<name>.transaxle-old`, the replaced checkpoint. The second exists only for an instant, on file systems that cannot
exchange two names.

A folder with weights may also contain the user's notes, adapters, or a `.git`. When a checkpoint is replaced, only its
own files are deleted: unchanged files that Transaxle's manifest lists, and files with names that frameworks write.
Sub-folders are entered only if a format uses them. All other files count as foreign, and are reported before any file
is deleted.

This module calls three Linux functions that Python lacks, with fallbacks for systems and file systems without them. The
first reserves space for a file before the file is written, so that a full disk is noticed before the work starts;
`os.posix_fallocate` does not help, because it writes to every block if the file system cannot reserve space. The second
renames a file only if the new name does not exist. The third exchanges two names atomically, so that at every moment
either the old or the new checkpoint is in place.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Literal, Protocol, cast

import msgspec
import xxhash

from transaxle.arguments import EVERYTHING, Overwrite, read_overwrite
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.registry import (
    MANIFEST,
    SCRATCH,
    STATE_FOLDER,
    Format,
    builtin,
    every_format,
    has_right_signature,
    is_of_checkpoint,
    is_one_file,
    is_step,
    plugin_formats,
)
from transaxle.formats.storage.local import home_hint, storage_error
from transaxle.formats.storage.storage import NotJsonError, is_plain, parse_json_as
from transaxle.formats.store.service import FILE, Service

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_IN_MEMORY = frozenset({0x01021994, 0x858458F6})
"""Numbers that `statfs` returns as type of a file system in memory (tmpfs and ramfs)."""
_STATFS = 256
"""Size in bytes of a buffer for `statfs`, large enough for every Linux; its first word is the type of the file
system."""
_NOT_HERE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY})


def reserve(fd: int, size: int) -> bool:
    """Reserve disk space for the first `size` bytes of an open file; return False if this is impossible or useless.

    Reserving space is useless on a file system in memory, because one thread would allocate all pages before the
    workers begin.

    Raises:
        OSError: with ENOSPC, EFBIG, EIO or the like, if the system cannot reserve the space.
    """
    if _is_in_memory(fd):
        return False
    call = _linux("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return call is not None and _call_succeeds(lambda: call(fd, 0, 0, size))


def _is_in_memory(fd: int) -> bool:
    call = _linux("fstatfs", ctypes.c_int, ctypes.c_void_p)
    status = ctypes.create_string_buffer(_STATFS)
    return call is not None and call(fd, status) == 0 and ctypes.c_ulong.from_buffer(status).value in _IN_MEMORY


def rename_new(old: str, new: str) -> None:
    """Rename a file or folder to a name that does not exist yet.

    If the file system cannot check and rename in one step, a file or empty folder that another process creates between
    the two steps is lost.

    Raises:
        FileExistsError: if the new name exists.
        OSError: for any failure except an existing new name.
    """
    if _renameat2(old, new, _NOREPLACE):
        return
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    os.rename(old, new)  # noqa: PTH104


def exchange(first: str, second: str) -> bool:
    """Exchange two existing names atomically; return False if the file system cannot do so.

    Raises:
        OSError: for any other failure of the system call.
    """
    return _renameat2(first, second, _EXCHANGE)


def _renameat2(old: str, new: str, flags: int) -> bool:
    text = ctypes.c_char_p
    call = _linux("renameat2", ctypes.c_int, text, ctypes.c_int, text, ctypes.c_uint)
    if call is None:
        return False
    return _call_succeeds(lambda: call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags))


@cache
def _linux(name: str, *types: type) -> Callable[..., int] | None:
    """Return a function of Linux's C library; None if the library does not contain the function."""
    if sys.platform != "linux":
        return None
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    call.argtypes, call.restype = types, ctypes.c_int
    return cast("Callable[..., int]", call)


def _call_succeeds(call: Callable[[], int]) -> bool:
    """Call a C function; return True if it succeeds, False if it is not supported; raise OSError for any other
    failure.
    """
    while call() != 0:
        number = ctypes.get_errno()
        if number in _NOT_HERE:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


EntryKind = Literal["file", "folder", "special"]

_BESIDE = frozenset({
    MANIFEST, "config.json", "params.json", "generation_config.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.json", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "hf_quant_config.json",
    "quantization_config.json", "quantize_config.json", "quant_config.json",
})  # fmt: skip
"""Names of files that frameworks write next to the tensor files."""
_LONGEST_TAG = 4096
_LONGEST_MANIFEST = 1 << 30
_COMPARED = 64 << 20
"""Maximum size in bytes of a file whose content is compared with its hash in the manifest."""
_SHOWN = 8
_WAY_OUT = f'--overwrite={EVERYTHING} (overwrite="{EVERYTHING}").'
ELSEWHERE = "Choose another place."
_HEAD = 16


class ReplaceableFolder(Protocol):
    """Interface of a folder, local or remote, that may be replaced by a new checkpoint."""

    def top(self) -> Mapping[str, EntryKind]:
        """Return name -> kind (file, folder or special file), for the members of the folder."""

    def inside(self, name: str) -> Iterable[str]:
        """Return the paths `a/b/c` of all files below a sub-folder; the path of anything but a regular file ends in
        `/`.
        """

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the bytes of a file; None if the file is longer than `max_bytes`."""


class _ListedFile(msgspec.Struct):
    """What a manifest states about one file."""

    size: int
    head: int
    xxh3: str


class _ManifestFiles(msgspec.Struct):
    """The part of the manifest that lists the checkpoint's files."""

    files: dict[str, _ListedFile]


def several_files(target: str) -> TransaxleError:
    """Return the refusal to write several files to a target that is a single file."""
    return refuse(
        "UNSUPPORTED", "the target is a single file, but several are to be written", file=target, hint="Give a folder."
    )


def irreplaceable(folder: ReplaceableFolder, overwrite: Overwrite) -> tuple[str, str]:
    """Return `(reason, hint)` if a folder must not be replaced; two empty strings if it may be replaced.

    Raises:
        StorageError: with the code IO if the folder cannot be read.
    """
    top = folder.top()
    if not top:
        return "", ""
    files = (name for name, kind in top.items() if kind == "file")
    if not any(name.endswith(MANIFEST) or is_of_checkpoint(name) for name in files) and not any(map(is_step, top)):
        return "the folder does not hold a checkpoint", ELSEWHERE
    foreign = [] if overwrite == EVERYTHING else foreign_files(folder)
    if not foreign:
        return "", ""
    more = f" and {len(foreign) - _SHOWN:,} more" if len(foreign) > _SHOWN else ""
    shown = ", ".join(foreign[:_SHOWN])
    verb = "belongs" if len(foreign) == 1 else "belong"
    reason = f"{shown}{more} {verb} to no checkpoint, and would be deleted with the checkpoint in that folder"
    return reason, f"Move these files elsewhere, or replace everything: {_WAY_OUT}"


def when_kept(reason: str, hint: str) -> tuple[str, str]:
    """Return what the error about an existing target says last, and its hint, for a run without `--overwrite`.

    Args:
        reason: why the target could not be replaced with `--overwrite` either; empty if it could be.
        hint: what the user can do about `reason`.
    """
    if not reason:
        return "", "Choose another place, or replace it with --overwrite (overwrite=True)."
    return f", and overwriting it would be refused: {reason}", hint


def foreign_files(folder: ReplaceableFolder) -> list[str]:
    """Return the names of the files of a folder that do not belong to a checkpoint; names of sub-folders end in `/`.

    Raises:
        StorageError: with the code IO if the folder cannot be read.
    """
    unknown = _unknown_to(builtin().values(), folder)
    # Files that no built-in format knows may belong to a plugin's format; plugins are loaded only if there are such
    # files.
    return _unknown_to(every_format(), folder) if unknown and plugin_formats() else unknown


def _unknown_to(formats: Collection[Format], folder: ReplaceableFolder) -> list[str]:
    top = folder.top()
    recorded_files = _manifest_files(folder) if top.get(MANIFEST) == "file" else {}
    inner = {STATE_FOLDER} | {name.partition("/")[0] for name in recorded_files if "/" in name}
    newest = {_tag(folder, record.newest) for record in formats if record.newest in top}
    steps = {name for name in top if is_step(name)} | newest
    formats_here = [record for record in formats if record.inner and any(map(record.file_pattern.fullmatch, top))]

    def belongs(name: str) -> bool:
        folder_name, _, inner_name = name.partition("/")
        if not inner_name:
            expected = name in _BESIDE or any(_is_of(record, name) or name in record.sidecars for record in formats)
        elif folder_name in steps:
            expected = any(_is_of(record, inner_name) for record in formats if record.steps)
        elif folder_name == STATE_FOLDER:
            expected = any(_is_of(record, inner_name) for record in formats if not record.steps)
        else:
            expected = any(_is_of(record, name) for record in formats_here)
        return expected or (name in recorded_files and _is_unchanged(folder, name, recorded_files[name]))

    foreign: list[str] = []
    for name, kind in sorted(top.items()):
        if kind == "folder":
            entered = name in inner or name in steps or any(name == record.inner for record in formats_here)
            foreign += [path for path in folder.inside(name) if not belongs(path)] if entered else [f"{name}/"]
        elif kind == "special" or not belongs(name):
            foreign.append(name)
    return foreign


def _is_of(kind: Format, path: str) -> bool:
    return kind.file_pattern.fullmatch(path) is not None


def _tag(folder: ReplaceableFolder, name: str) -> str:
    """Return the name of the sub-folder that a tag file names; empty if this name is invalid."""
    tag = (folder.read(name, _LONGEST_TAG) or b"").decode("utf-8", "replace").strip()
    return tag if is_plain(tag) else ""


def _manifest_files(folder: ReplaceableFolder) -> Mapping[str, _ListedFile]:
    """Return file name -> what the manifest states about the file; empty if the manifest cannot be read."""
    text = folder.read(MANIFEST, _LONGEST_MANIFEST)
    try:
        return {} if text is None else parse_json_as(text, _ManifestFiles).files
    except NotJsonError:
        return {}


def _is_unchanged(folder: ReplaceableFolder, name: str, record: _ListedFile) -> bool:
    """Return whether a file still has the content that the manifest states; a file that was edited since belongs to the
    user.
    """
    if record.head != record.size or record.size > _COMPARED:
        return True
    data = folder.read(name, record.size)
    return data is not None and len(data) == record.size and xxhash.xxh3_128_hexdigest(data) == record.xxh3


class LocalFolder:
    """A local folder that may be replaced.

    Args:
        path: path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def top(self) -> Mapping[str, EntryKind]:
        """Return the members of the folder; a symbolic link counts as a file, because removing the link does not affect
        its target.
        """
        with os.scandir(self._path) as entries:
            return {entry.name: _kind(entry) for entry in entries}

    def inside(self, name: str) -> Iterator[str]:
        """Return the paths of all files below a sub-folder; see `ReplaceableFolder.inside`."""
        with os.scandir(self._path / name) as entries:
            contents = sorted((entry.name, _kind(entry)) for entry in entries)
        if not contents:
            yield f"{name}/"
        for child, kind in contents:
            if kind == "folder":
                yield from self.inside(f"{name}/{child}")
            else:
                yield f"{name}/{child}" + "/" * (kind == "special")

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the bytes of a file; see `ReplaceableFolder.read`."""
        path = self._path / name
        if not path.is_file() or path.stat().st_size > max_bytes:
            return None
        with path.open("rb") as file:
            return file.read(max_bytes)


class RemoteFolder:
    """A folder on a remote service that may be replaced.

    Args:
        service: storage service whose path is the folder.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def top(self) -> Mapping[str, EntryKind]:
        """Return the members of the folder; see `ReplaceableFolder.top`."""
        contents: dict[str, EntryKind] = {}
        for member in self._service.members(self._service.path, self._service.shown):
            name = str(member["name"]).rstrip("/").rpartition("/")[2]
            if str(member["name"]).rstrip("/") != self._service.path.rstrip("/"):
                contents[name] = "file" if member.get("type") == FILE else "folder"
        return contents

    def inside(self, name: str) -> list[str]:
        """Return the paths of all files below a sub-folder; see `ReplaceableFolder.inside`."""
        start = f"{self._service.path}/"
        return [path.removeprefix(start) for path in self._service.below(f"{start}{name}", name)]

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the bytes of a file; see `ReplaceableFolder.read`."""
        path = f"{self._service.path}/{name}"
        info = self._service.info(path, name)
        size = None if info is None else info.get("size")
        if not isinstance(size, int) or size > max_bytes:
            return None
        return self._service.fetch(path, 0, size, name) if size else b""


def irreplaceable_file(name: str, head: bytes, overwrite: Overwrite) -> tuple[str, str]:
    """Return `(reason, hint)` if a single file must not be replaced; see `irreplaceable`.

    Args:
        name: name of the file.
        head: first bytes of the file, from `head_of` or `remote_head_of`.
        overwrite: the option `overwrite` of the user.
    """
    if overwrite == EVERYTHING or has_right_signature(name, head):
        return "", ""
    return "the file does not begin like a file of tensors", f"Move it away, or replace it anyway: {_WAY_OUT}"


def head_of(path: Path) -> bytes:
    """Return the first bytes of a local file."""
    with path.open("rb") as file:
        return file.read(_HEAD)


def remote_head_of(service: Service, size: int) -> bytes:
    """Return the first bytes of the remote file at the service's path; `size` is the size of the file."""
    return service.fetch(service.path, 0, min(size, _HEAD), service.shown) if size else b""


def _kind(entry: os.DirEntry[str]) -> EntryKind:
    if entry.is_symlink():
        return "file"
    mode = entry.stat(follow_symlinks=False).st_mode
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "special"


PARTIAL, OLD = "partial", "old"
"""Suffixes of the names of a target's two hidden neighbours."""


OURS = re.compile(rf"\.(.+)\.transaxle-({PARTIAL}|{OLD})", re.DOTALL)
"""Pattern for the name of a hidden neighbour; its groups match the target's name and the suffix."""


_LONGEST = 200
"""Maximum number of bytes of a target's name; with a suffix, the name then has at most 255 bytes, which is the limit of
file systems."""


_EXISTS = "the target already exists"
JOURNAL, ITEMS, MOVES = "journal", "items", "moves"
"""Names inside the folder `SCRATCH`: the journal of finished tensors, the folder with the results of work items (parts
of a conversion), and the file that describes the work items.
"""


class TargetPlace:
    """The target of a conversion: the place where a checkpoint is to be written.

    Args:
        target: path as the user typed it; if it is a symbolic link, the target of the link is replaced.
        overwrite: whether an existing checkpoint may be replaced; `everything` also replaces all other files in the
            folder.

    Raises:
        UsageError: with the code EXISTS for the root of the file system; with the code AMBIGUOUS for an invalid
            `overwrite`.
        Refused: with the code NAME_COLLISION for a name that is reserved for hidden neighbours.
        StorageError: with the code IO if the target is not a valid path, or its parent folder is missing.
    """

    def __init__(self, target: str | os.PathLike[str], *, overwrite: Overwrite) -> None:
        self.typed = os.fspath(target)
        """The target's path as the user typed it."""
        if not self.typed or "\0" in self.typed:
            raise refuse("IO", f"{self.typed!r} is not a path", file=self.typed)
        try:
            self.target = Path(os.path.realpath(self.typed))
            """Path of the target, without symbolic links."""
            is_file = is_one_file(self.typed) and not self.target.is_dir()
            has_parent = self.target.parent.is_dir()
            with suppress(FileNotFoundError):
                self.target.lstat()  # if the name is too long, this raises the error before the work begins
        except OSError as error:
            raise storage_error(error, "reading its status", self.typed) from error
        if not self.target.name:
            raise refuse("EXISTS", "this is the root of the file system", file=self.typed)
        reserved = next(
            (segment for segment in self.target.parts if segment == SCRATCH or OURS.fullmatch(segment)), None
        )
        if reserved is not None:
            message = f"the name {reserved} is reserved: the next run beside it deletes everything of that name"
            raise refuse("NAME_COLLISION", message, file=self.typed, hint="Choose another name.")
        if not has_parent:
            message = f"the folder {self.target.parent} does not exist"
            hint = home_hint(self.typed) or "Create the folder first."
            raise refuse("IO", message, file=self.typed, hint=hint, system=FileNotFoundError)
        self._overwrite = read_overwrite(overwrite)
        self.single = self.target.name if is_file else None
        """Name of the file to write; None if the target is a folder."""
        self.partial = neighbour(self.target, PARTIAL)
        """Hidden folder that contains the work in progress."""
        self.old = neighbour(self.target, OLD)
        """Hidden folder to which the replaced checkpoint is moved."""

    def check(self, leftover_hint: str = "") -> None:
        """Check that a checkpoint may be written to the target; a folder is replaced only if it is empty or contains a
        checkpoint.

        The user can override this check with `overwrite="everything"`. The default is strict so that a typing error in
        the path does not delete a project.

        Args:
            leftover_hint: text about leftovers next to the target, for the error message.

        Raises:
            UsageError: with the code EXISTS if the target may not be replaced.
            StorageError: with the code IO if the target cannot be examined.
        """
        if not os.path.lexists(self.typed if not self._overwrite else self.target):
            return
        if not self._overwrite:
            reason, hint = self._if_overwritten(self._irreplaceable)
            raise refuse("EXISTS", f"{_EXISTS}{reason}", file=self.typed, hint=hint + leftover_hint)
        self._refuse(*self._irreplaceable(self._overwrite))

    def recover(self) -> None:
        """Move back the old checkpoint that a run moved aside before it was killed."""
        try:
            if os.path.lexists(self.old):
                if os.path.lexists(self.target):
                    shutil.rmtree(self.old)
                else:
                    self.old.rename(self.target)
                    make_durable(self.target.parent)
        except OSError as error:
            raise storage_error(error, "putting the previous checkpoint back", str(self.old)) from error

    @property
    def replaced(self) -> Path | None:
        """Path that a commit would replace; None if there is nothing to replace."""
        return next((path for path in (self.target, self.old) if os.path.lexists(path)), None)

    @property
    def moved_aside(self) -> bool:
        """Whether `recover` will move back an old checkpoint."""
        return os.path.lexists(self.old) and not os.path.lexists(self.target)

    def foresee(self) -> None:
        """Raise the errors that `recover` and `check` would raise, without changing anything.

        Raises the errors that `check` raises.
        """
        if not self.moved_aside:
            partial_exists = os.path.lexists(self.partial)
            self.check(
                f" {self.partial} was left by another run: transaxle clean removes it." if partial_exists else ""
            )
        elif self._overwrite:
            self._refuse(*irreplaceable(LocalFolder(self.old), self._overwrite))
        else:
            _, hint = self._if_overwritten(partial(irreplaceable, LocalFolder(self.old)))
            message = f"{_EXISTS}: {self.old}, left by a run that died while replacing it, will be put back"
            raise refuse("EXISTS", message, file=self.typed, hint=hint)

    def check_writable(self) -> None:
        """Check that files can be created next to the target.

        Raises:
            OSError: with EROFS or EACCES, if files cannot be created.
        """
        folder = self.target.parent
        # if the real and the effective user id are equal, the plain system call is more reliable
        by_effect = os.geteuid() != os.getuid()
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=by_effect):
            read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise OSError(number, os.strerror(number))

    def publish(self, work: Path) -> None:
        """Move the finished checkpoint to the target. Afterwards, a replaced folder has the name of a hidden neighbour,
        until `sweep` removes it.

        Args:
            work: path of the finished checkpoint: `partial`, or the single file in it, with its final access rights.

        Raises:
            UsageError: with the code EXISTS if the target appeared in the meantime.
            StorageError: with the code IO if the rename fails.
        """
        try:
            if self.single:
                self._publish_file(work)
            else:
                self._publish_folder(work)
        except FileExistsError as error:
            message = "something else created the target in the meantime"
            raise refuse("EXISTS", message, file=self.typed) from error
        except OSError as error:
            raise storage_error(error, "moving the finished checkpoint into place", self.typed) from error

    def sweep(self) -> None:
        """Remove the hidden neighbours (abandoned work, or a replaced checkpoint); failures to remove them are
        ignored.
        """
        shutil.rmtree(self.partial, ignore_errors=True)
        if os.path.lexists(self.target):
            shutil.rmtree(self.old, ignore_errors=True)

    def _refuse(self, reason: str, hint: str) -> None:
        if reason:
            raise refuse("EXISTS", f"the target is not replaced: {reason}", file=self.typed, hint=hint)

    def _if_overwritten(self, look: Callable[[Overwrite], tuple[str, str]]) -> tuple[str, str]:
        """Return the end of an error message, and a hint; both state whether `--overwrite` would help.

        Args:
            look: function that returns why the target must not be replaced, as `irreplaceable` does.
        """
        try:
            return when_kept(*look(True))
        except (OSError, TransaxleError):
            return when_kept("it cannot be examined", ELSEWHERE)

    def _irreplaceable(self, overwrite: Overwrite) -> tuple[str, str]:
        """Return `(reason, hint)` if an existing target must not be replaced; two empty strings if it may be
        replaced.
        """
        try:
            if not os.path.lexists(self.target):  # the path is a symbolic link without a target
                return "", ""
            mode = os.lstat(self.target).st_mode
            if self.single:
                if not stat.S_ISREG(mode):
                    return "it is not a regular file", ELSEWHERE
                return irreplaceable_file(self.target.name, head_of(self.target), overwrite)
            if not stat.S_ISDIR(mode):
                return "it is a file, but a folder is to be written", ELSEWHERE
            current = Path.cwd()
            if self.target == current or self.target in current.parents:
                return "it is the current folder, or contains it", ELSEWHERE
            if self.target.is_mount():
                return "a file system is mounted there; use a folder inside it", ELSEWHERE
            return irreplaceable(LocalFolder(self.target), overwrite)
        except OSError as error:
            raise storage_error(error, "reading its status", self.typed) from error

    def _publish_file(self, work: Path) -> None:
        if self._overwrite:
            work.replace(self.target)
        else:
            rename_new(str(work), str(self.target))

    def _publish_folder(self, work: Path) -> None:
        if not self._overwrite or not os.path.lexists(self.target):
            rename_new(str(work), str(self.target))
        elif exchange(str(work), str(self.target)):
            try:
                # the contents of the folder may have changed meanwhile
                self._refuse(*irreplaceable(LocalFolder(work), self._overwrite))
            except BaseException:
                exchange(str(work), str(self.target))
                raise
        else:
            # The replacement is not atomic, because it consists of two renames. If the run is killed between the two
            # renames, `recover` moves the old checkpoint back.
            self.target.rename(self.old)
            try:
                self._refuse(*irreplaceable(LocalFolder(self.old), self._overwrite))
                rename_new(str(work), str(self.target))
            except BaseException:
                self.old.rename(self.target)
                raise


def neighbour(target: Path, ending: str) -> Path:
    """Return the path of one of a target's hidden neighbours.

    Args:
        target: path of the target, without symbolic links.
        ending: suffix of the neighbour's name, `PARTIAL` or `OLD`.
    """
    name = target.name
    if len(os.fsencode(name)) > _LONGEST:
        import hashlib

        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return target.with_name(f".{name}.transaxle-{ending}")


def make_durable(folder: Path) -> None:
    """Write a folder's directory entries to the disk, on file systems that support it.

    Raises:
        StorageError: with the code IO if the sync fails.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise storage_error(error, "making the folder durable", str(folder)) from error
