"""The target of a checkpoint, and the single step that puts a finished one there.

A target is a folder or, if its name ends like that of a tensor file, one file. While needed it has two hidden
neighbours: `.<name>.transaxle-partial`, the work in progress, and `.<name>.transaxle-old`, which holds the replaced
checkpoint for an instant on file systems that cannot exchange two names.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from transaxle.arguments import Overwrite, read_overwrite
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.registry import SCRATCH, is_one_file
from transaxle.formats.staging.belongings import (
    ELSEWHERE,
    LocalFolder,
    head_of,
    irreplaceable,
    replaced_file,
    when_kept,
)
from transaxle.formats.staging.syscalls import exchange, rename_new
from transaxle.formats.storage.local import unexpanded
from transaxle.formats.storage.os_errors import failed

PARTIAL, OLD = "partial", "old"
"""Suffixes of the two hidden neighbours."""
JOURNAL, ITEMS, MOVES = "journal", "items", "moves"
"""Inside `SCRATCH`: the file that lists finished tensors, the folder with the results of work items, and the file that
says what each of them does.
"""
OURS = re.compile(rf"\.(.+)\.transaxle-({PARTIAL}|{OLD})", re.DOTALL)
"""Name of a hidden neighbour: groups are the target's name and the suffix."""
_LONGEST = 200
"""Cap on the bytes of a name that our suffix still fits within the 255 of file systems."""
_EXISTS = "the target already exists"


class TargetPlace:
    """The place where a checkpoint will be.

    Args:
        target: the path as the user typed it; a link is followed, so that its destination is replaced, not the link.
        overwrite: an existing checkpoint there may be replaced; `everything`: with everything in its folder.

    Raises:
        UsageError: EXISTS for the root of the file system; AMBIGUOUS for an invalid `overwrite`.
        Refused: NAME_COLLISION for a name that is one of our own.
        StorageError: IO if it is no path, or the folder around it is missing.
    """

    def __init__(self, target: str | os.PathLike[str], *, overwrite: Overwrite) -> None:
        self.typed = os.fspath(target)
        """The path as the user typed it."""
        if not self.typed or "\0" in self.typed:
            raise refuse("IO", f"{self.typed!r} is not a path", file=self.typed)
        try:
            self.target = Path(os.path.realpath(self.typed))
            """Where it is."""
            is_file = is_one_file(self.typed) and not self.target.is_dir()
            has_parent = self.target.parent.is_dir()
            with suppress(FileNotFoundError):
                self.target.lstat()  # a name that is too long is better refused now than after the work
        except OSError as error:
            raise failed(error, "reading its status", self.typed) from error
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
            hint = unexpanded(self.typed) or "Create it first."
            raise refuse("IO", message, file=self.typed, hint=hint, system=FileNotFoundError)
        self._overwrite = read_overwrite(overwrite)
        self.single = self.target.name if is_file else None
        """Name of the one file to write; None for a folder."""
        self.partial = neighbour(self.target, PARTIAL)
        """Folder for the work in progress."""
        self.old = neighbour(self.target, OLD)
        """Folder for what is replaced."""

    def check(self, beside: str = "") -> None:
        """Check that a checkpoint may be put here.

        A folder is replaced only if it is empty or holds a checkpoint, unless the user said otherwise: a slip in the
        path must not cost a project.

        Args:
            beside: text about leftovers beside the target, for the error.

        Raises:
            UsageError: EXISTS.
            StorageError: IO if it cannot be examined.
        """
        if not os.path.lexists(self.typed if not self._overwrite else self.target):
            return
        if not self._overwrite:
            reason, hint = self._if_overwritten(self._irreplaceable)
            raise refuse("EXISTS", f"{_EXISTS}{reason}", file=self.typed, hint=hint + beside)
        self._refuse(*self._irreplaceable(self._overwrite))

    def recover(self) -> None:
        """Put back the checkpoint that a run moved aside before it died while replacing it."""
        try:
            if os.path.lexists(self.old):
                if os.path.lexists(self.target):
                    shutil.rmtree(self.old)
                else:
                    self.old.rename(self.target)
                    make_durable(self.target.parent)
        except OSError as error:
            raise failed(error, "putting the previous checkpoint back", str(self.old)) from error

    @property
    def replaced(self) -> Path | None:
        """What a commit would replace; None where nothing is there."""
        return next((path for path in (self.target, self.old) if os.path.lexists(path)), None)

    @property
    def moved_aside(self) -> bool:
        """Whether `recover` has something to put back."""
        return os.path.lexists(self.old) and not os.path.lexists(self.target)

    def foresee(self) -> None:
        """Check what `recover` and then `check` would refuse, without changing anything.

        Raises as `check`.
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
        """Check that files can be created beside the target.

        Raises:
            OSError: EROFS, EACCES.
        """
        folder = self.target.parent
        by_effect = os.geteuid() != os.getuid()  # where both are the same, C libraries guess worse than the system
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=by_effect):
            read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise OSError(number, os.strerror(number))

    def publish(self, work: Path) -> None:
        """Move the finished work to the target. A replaced folder is in a hidden neighbour afterwards; see `sweep`.

        Args:
            work: `partial`, or the one file in it, with the access of what it replaces.

        Raises:
            UsageError: EXISTS if the target appeared in the meantime.
            StorageError: IO.
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
            raise failed(error, "moving the finished checkpoint into place", self.typed) from error

    def sweep(self) -> None:
        """Remove the hidden neighbours: abandoned work, or what was replaced. Failure is ignored."""
        shutil.rmtree(self.partial, ignore_errors=True)
        if os.path.lexists(self.target):
            shutil.rmtree(self.old, ignore_errors=True)

    def _refuse(self, reason: str, hint: str) -> None:
        if reason:
            raise refuse("EXISTS", f"the target is not replaced: {reason}", file=self.typed, hint=hint)

    def _if_overwritten(self, look: Callable[[Overwrite], tuple[str, str]]) -> tuple[str, str]:
        """Return why `--overwrite` would not do either, to follow a message, and a hint that names only what would.

        Args:
            look: what says why a target must stay, as `irreplaceable`.
        """
        try:
            return when_kept(*look(True))
        except (OSError, TransaxleError):
            return when_kept("it cannot be examined", ELSEWHERE)

    def _irreplaceable(self, overwrite: Overwrite) -> tuple[str, str]:
        """Return why an existing target must stay, and a hint; two empty texts if it may be replaced."""
        try:
            if not os.path.lexists(self.target):  # a link that leads nowhere yet
                return "", ""
            mode = os.lstat(self.target).st_mode
            if self.single:
                if not stat.S_ISREG(mode):
                    return "it is not a regular file", ELSEWHERE
                return replaced_file(self.target.name, head_of(self.target), overwrite)
            if not stat.S_ISDIR(mode):
                return "it is a file, but a folder is to be written", ELSEWHERE
            current = Path.cwd()
            if self.target == current or self.target in current.parents:
                return "it is the current folder, or contains it", ELSEWHERE
            if self.target.is_mount():
                return "a file system is mounted there; use a folder inside it", ELSEWHERE
            return irreplaceable(LocalFolder(self.target), overwrite)
        except OSError as error:
            raise failed(error, "reading its status", self.typed) from error

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
                self._refuse(*irreplaceable(LocalFolder(work), self._overwrite))  # what came since the last look
            except BaseException:
                exchange(str(work), str(self.target))
                raise
        else:
            # Not in one step here. A run that dies between the two renames is put right by `recover`.
            self.target.rename(self.old)
            try:
                self._refuse(*irreplaceable(LocalFolder(self.old), self._overwrite))
                rename_new(str(work), str(self.target))
            except BaseException:
                self.old.rename(self.target)
                raise


def neighbour(target: Path, ending: str) -> Path:
    """Return a hidden neighbour of a target.

    Args:
        target: where it is, without links.
        ending: `PARTIAL` or `OLD`.
    """
    name = target.name
    if len(os.fsencode(name)) > _LONGEST:
        import hashlib

        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return target.with_name(f".{name}.transaxle-{ending}")


def make_durable(folder: Path) -> None:
    """Write a folder's directory entries to the disk, on file systems that can.

    Raises:
        StorageError: IO.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise failed(error, "making the folder durable", str(folder)) from error
