"""Belongings: which files of a folder belong to the checkpoint there; replacing it deletes only those.

A folder with weights also holds notes, adapters, a `.git`. The files that our manifest lists belong to the checkpoint,
if they are unchanged; so do files with names that frameworks write. Sub-folders are entered only where a format has
them. Everything else is a stranger, and the user is told before anything is deleted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import xxhash

from transaxle.arguments import EVERYTHING, Overwrite
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.format import Format
from transaxle.formats.registry import (
    MANIFEST,
    STATE_FOLDER,
    begins_right,
    builtin,
    every_format,
    installed,
    is_of_checkpoint,
    is_step,
)
from transaxle.formats.remote.service import FILE, Service
from transaxle.formats.storage.storage import is_plain
from transaxle.formats.strict_json import NotJsonError, parsed_as

EntryKind = Literal["file", "folder", "special"]

_BESIDE = frozenset({
    MANIFEST, "config.json", "params.json", "generation_config.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.json", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "hf_quant_config.json",
    "quantization_config.json",
})  # fmt: skip
"""Names of files that frameworks write beside the tensors."""
_LONGEST_TAG = 4096
_LONGEST_MANIFEST = 1 << 30
_COMPARED = 64 << 20
"""Cap on the bytes of a listed file that are compared with the manifest."""
_SHOWN = 8
_WAY_OUT = f'--overwrite={EVERYTHING} (overwrite="{EVERYTHING}").'
ELSEWHERE = "Choose another place."
_HEAD = 16


class ReplaceableFolder(Protocol):
    """A folder that may be replaced, local or remote."""

    def top(self) -> Mapping[str, EntryKind]:
        """Return its direct contents."""

    def inside(self, name: str) -> Iterable[str]:
        """Return the files in a sub-folder and below it, `a/b/c`; anything but a regular file ends in `/`."""

    def read(self, name: str, most: int) -> bytes | None:
        """Return the bytes of a file; None if they are more than `most`."""


class _ListedFile(msgspec.Struct):
    """The manifest's record of a file."""

    size: int
    head: int
    xxh3: str


class _ManifestFiles(msgspec.Struct):
    """The part of the manifest that lists the checkpoint's files."""

    files: dict[str, _ListedFile]


def several_files(target: str) -> TransaxleError:
    """Return the refusal to write several files where the target is one."""
    return refuse(
        "UNSUPPORTED", "the target is a single file, but several are to be written", file=target, hint="Give a folder."
    )


def irreplaceable(folder: ReplaceableFolder, overwrite: Overwrite) -> tuple[str, str]:
    """Return why a folder must stay, and a hint; two empty texts if it may be replaced.

    Raises:
        StorageError: IO.
    """
    top = folder.top()
    if not top:
        return "", ""
    files = (name for name, kind in top.items() if kind == "file")
    if not any(name.endswith(MANIFEST) or is_of_checkpoint(name) for name in files) and not any(map(is_step, top)):
        return "the folder does not hold a checkpoint", ELSEWHERE
    foreign = [] if overwrite == EVERYTHING else strangers(folder)
    if not foreign:
        return "", ""
    rest = f" and {len(foreign) - _SHOWN:,} more" if len(foreign) > _SHOWN else ""
    shown = ", ".join(foreign[:_SHOWN])
    verb = "belongs" if len(foreign) == 1 else "belong"
    reason = f"{shown}{rest} {verb} to no checkpoint, and would be deleted with the checkpoint in that folder"
    return reason, f"Move these files elsewhere, or replace everything: {_WAY_OUT}"


def when_kept(reason: str, hint: str) -> tuple[str, str]:
    """Return what an error adds about a target that exists and was not to be replaced, and its hint.

    Args:
        reason: why it must stay even if it is to be replaced; empty if it may be.
        hint: what goes with the reason.
    """
    if not reason:
        return "", "Choose another place, or replace it with --overwrite (overwrite=True)."
    return f", and overwriting it would be refused: {reason}", hint


def strangers(folder: ReplaceableFolder) -> list[str]:
    """Return the files of a folder that belong to no checkpoint; sub-folders end in `/`.

    Raises:
        StorageError: IO.
    """
    unknown = _unknown_to(builtin().values(), folder)
    # What no format that ships knows may be of one that is installed: these are asked before anybody is refused.
    return _unknown_to(every_format(), folder) if unknown and installed() else unknown


def _unknown_to(formats: Collection[Format], folder: ReplaceableFolder) -> list[str]:
    top = folder.top()
    listed = _listed(folder) if top.get(MANIFEST) == "file" else {}
    inner = {STATE_FOLDER} | {name.partition("/")[0] for name in listed if "/" in name}
    newest = {_tag(folder, record.newest) for record in formats if record.newest in top}
    steps = {name for name in top if is_step(name)} | newest
    here = [record for record in formats if record.inner and any(map(record.file_pattern.fullmatch, top))]

    def belongs(name: str) -> bool:
        folder_name, _, rest = name.partition("/")
        if not rest:
            expected = name in _BESIDE or any(_is_of(record, name) or name in record.sidecars for record in formats)
        elif folder_name in steps:
            expected = any(_is_of(record, rest) for record in formats if record.steps)
        elif folder_name == STATE_FOLDER:
            expected = any(_is_of(record, rest) for record in formats if not record.steps)
        else:
            expected = any(_is_of(record, name) for record in here)
        return expected or (name in listed and _unchanged(folder, name, listed[name]))

    foreign: list[str] = []
    for name, kind in sorted(top.items()):
        if kind == "folder":
            entered = name in inner or name in steps or any(name == record.inner for record in here)
            foreign += [path for path in folder.inside(name) if not belongs(path)] if entered else [f"{name}/"]
        elif kind == "special" or not belongs(name):
            foreign.append(name)
    return foreign


def _is_of(kind: Format, path: str) -> bool:
    return kind.file_pattern.fullmatch(path) is not None


def _tag(folder: ReplaceableFolder, name: str) -> str:
    """Return the sub-folder that a tag file names; empty if it names none."""
    tag = (folder.read(name, _LONGEST_TAG) or b"").decode("utf-8", "replace").strip()
    return tag if is_plain(tag) else ""


def _listed(folder: ReplaceableFolder) -> Mapping[str, _ListedFile]:
    """Return the files that the manifest lists; empty if it cannot be read."""
    text = folder.read(MANIFEST, _LONGEST_MANIFEST)
    try:
        return {} if text is None else parsed_as(text, _ManifestFiles).files
    except NotJsonError:
        return {}


def _unchanged(folder: ReplaceableFolder, name: str, record: _ListedFile) -> bool:
    """Tell whether a listed file is still as it was written: an edited one belongs to whoever edited it."""
    if record.head != record.size or record.size > _COMPARED:
        return True
    data = folder.read(name, record.size)
    return data is not None and len(data) == record.size and xxhash.xxh3_128_hexdigest(data) == record.xxh3


class LocalFolder:
    """A folder of this machine.

    Args:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def top(self) -> Mapping[str, EntryKind]:
        """See `ReplaceableFolder`; a link counts as a file: removing it takes nothing from what it leads to."""
        with os.scandir(self._path) as entries:
            return {entry.name: _kind(entry) for entry in entries}

    def inside(self, name: str) -> Iterator[str]:
        """See `ReplaceableFolder`."""
        with os.scandir(self._path / name) as entries:
            contents = sorted((entry.name, _kind(entry)) for entry in entries)
        if not contents:
            yield f"{name}/"
        for child, kind in contents:
            if kind == "folder":
                yield from self.inside(f"{name}/{child}")
            else:
                yield f"{name}/{child}" + "/" * (kind == "special")

    def read(self, name: str, most: int) -> bytes | None:
        """See `ReplaceableFolder`."""
        path = self._path / name
        if not path.is_file() or path.stat().st_size > most:
            return None
        with path.open("rb") as file:
            return file.read(most)


class RemoteFolder:
    """A folder of a service.

    Args:
        service: what is asked; its path is the folder.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def top(self) -> Mapping[str, EntryKind]:
        """See `ReplaceableFolder`."""
        contents: dict[str, EntryKind] = {}
        for member in self._service.members(self._service.path, self._service.shown):
            name = str(member["name"]).rstrip("/").rpartition("/")[2]
            if str(member["name"]).rstrip("/") != self._service.path.rstrip("/"):
                contents[name] = "file" if member.get("type") == FILE else "folder"
        return contents

    def inside(self, name: str) -> list[str]:
        """See `ReplaceableFolder`."""
        start = f"{self._service.path}/"
        return [path.removeprefix(start) for path in self._service.below(f"{start}{name}", name)]

    def read(self, name: str, most: int) -> bytes | None:
        """See `ReplaceableFolder`."""
        path = f"{self._service.path}/{name}"
        info = self._service.info(path, name)
        size = None if info is None else info.get("size")
        if not isinstance(size, int) or size > most:
            return None
        return self._service.fetch(path, 0, size, name) if size else b""


def replaced_file(name: str, head: bytes, overwrite: Overwrite) -> tuple[str, str]:
    """Return why a file must stay, like `irreplaceable` for a folder.

    Args:
        name: its name.
        head: its first bytes, from `head_of` or `remote_head_of`.
        overwrite: the user's option.
    """
    if overwrite == EVERYTHING or begins_right(name, head):
        return "", ""
    return "the file does not begin like a file of tensors", f"Move it elsewhere, or replace it anyway: {_WAY_OUT}"


def head_of(path: Path) -> bytes:
    """Return the first bytes of a local file."""
    with path.open("rb") as file:
        return file.read(_HEAD)


def remote_head_of(service: Service, size: int) -> bytes:
    """Return the first bytes of the remote file of `size` bytes at the service's path."""
    return service.fetch(service.path, 0, min(size, _HEAD), service.shown) if size else b""


def _kind(entry: os.DirEntry[str]) -> EntryKind:
    if entry.is_symlink():
        return "file"
    mode = entry.stat(follow_symlinks=False).st_mode
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "special"
