"""The file of a derived table: complete as soon as it is there, and never in place of anything that must stay."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from transaxle.arguments import EVERYTHING, Overwrite, PathLike, read_overwrite, read_path
from transaxle.axes.notation.statement import BLOCK, DIALECT, FAMILY
from transaxle.errors import refuse
from transaxle.formats.storage.local import failed
from transaxle.formats.store.access import opened_draft
from transaxle.formats.store.place import rename_new

_TABLE = re.compile(rf"^\s*({FAMILY}|{BLOCK}|{DIALECT})\s".encode(), re.MULTILINE)
_READ = 1 << 20
"""Bytes of an existing file in which a table has its first statement."""
_ELSEWHERE = "Choose another name, or replace it"


def check_place(path: PathLike, *, overwrite: Overwrite = False) -> None:
    """Refuse a place where no table can or may be put.

    Args:
        path: the file.
        overwrite: an existing table there may be replaced; `everything`: any file.

    Raises:
        UsageError: EXISTS for what must stay; AMBIGUOUS for an invalid `overwrite`.
        StorageError: IO where the folder is missing, or the existing file cannot be read.
    """
    target, overwrite = Path(read_path("path", path)), read_overwrite(overwrite)
    shown = str(path)
    if not target.parent.is_dir():
        raise refuse("IO", f"the folder {target.parent} does not exist", file=shown, hint="Create it first.")
    if not os.path.lexists(target):
        return
    if target.is_dir():
        raise refuse("EXISTS", "this is a folder", file=shown, hint="Name a file in it.")
    try:
        is_other = overwrite != EVERYTHING and target.exists() and not (target.is_file() and _is_table(target))
    except OSError as error:
        if overwrite:
            raise failed(error, "reading the file that is to be replaced", shown) from error
        is_other = True
    anyway = f'{_ELSEWHERE} anyway: --overwrite={EVERYTHING} (overwrite="{EVERYTHING}").'
    if not overwrite:
        hint = anyway if is_other else f"{_ELSEWHERE} with --overwrite (overwrite=True)."
        raise refuse("EXISTS", "the file already exists", file=shown, hint=hint)
    if is_other:
        raise refuse("EXISTS", "the file is not replaced: it is no table", file=shown, hint=anyway)


def write_table(text: str, path: PathLike, *, overwrite: Overwrite = False) -> None:
    """Write a table.

    Args:
        text: the table.
        path: the file; a link is followed.
        overwrite: an existing table there may be replaced; `everything`: any file.

    Raises:
        UsageError: EXISTS for what must stay; AMBIGUOUS for an invalid `overwrite`.
        StorageError: IO, NO_SPACE.
    """
    check_place(path, overwrite=overwrite)
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.transaxle-partial")
    try:
        with opened_draft(partial, target) as file:
            file.write(text.encode())
        if overwrite:
            partial.replace(target)
        else:
            rename_new(str(partial), str(target))
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, FileExistsError):
            raise refuse("EXISTS", "something else created the file in the meantime", file=str(path)) from error
        raise failed(error, "writing the table", str(path)) from error


def _is_table(path: Path) -> bool:
    with path.open("rb") as file:
        return _TABLE.search(file.read(_READ)) is not None
