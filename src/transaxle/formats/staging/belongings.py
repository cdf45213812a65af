"""What in a folder belongs to the checkpoint there, and what is somebody's own: replacing it takes only the former.

A folder with weights also holds notes, adapters, a `.git`. What our manifest lists is the checkpoint's, as long as it
is what was written; and so are the files that frameworks write, by their names. Sub-folders are entered only where a
format has them. Everything else is a stranger, and whoever replaces the checkpoint is told before it is touched.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import xxhash

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog.sidecar_files import MANIFEST, STATE_FOLDER
from transaxle.formats.format import Format
from transaxle.formats.registry import begins_right, every_format, is_of_checkpoint, is_step
from transaxle.formats.remote.service import FILE, Service
from transaxle.formats.storage.names import is_plain

Overwrite = bool | Literal["everything"]
"""Whether a checkpoint may be replaced; `everything`: with whatever else lies in its folder."""
EVERYTHING: Literal["everything"] = "everything"
Kind = Literal["file", "folder", "special"]

_BESIDE = frozenset({
    MANIFEST, "config.json", "params.json", "generation_config.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.json", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "hf_quant_config.json",
    "quantization_config.json",
})  # fmt: skip
"""Names of what frameworks write beside the tensors, whatever their format."""
_LONGEST_TAG = 4096
_LONGEST_MANIFEST = 1 << 30
_COMPARED = 64 << 20
"""Bytes of a listed file that are compared with what the manifest says of them."""
_SHOWN = 8
_WAY_OUT = f'--overwrite={EVERYTHING} (overwrite="{EVERYTHING}").'
_HEAD = 16


class Folder(Protocol):
    """A folder that may be replaced, on this machine or a service."""

    def top(self) -> Mapping[str, Kind]:
        """Return what lies directly in it."""

    def inside(self, name: str) -> Iterable[str]:
        """Return the files in a sub-folder and below it, `a/b/c`; what is no regular file has a `/` at its end."""

    def read(self, name: str, most: int) -> bytes | None:
        """Return the bytes of a file; None if they are more than `most`."""


class _Record(msgspec.Struct):
    """What the manifest says of a file."""

    size: int
    head: int
    xxh3: str


class _Manifest(msgspec.Struct):
    """The part of the manifest that tells which files are the checkpoint's."""

    files: dict[str, _Record]


def known(overwrite: object) -> Overwrite:
    """Return what was said of replacing, if it can be meant.

    Raises:
        UsageError: AMBIGUOUS for anything but True, False and `everything`.
    """
    if overwrite is True or overwrite is False:
        return overwrite
    if overwrite == EVERYTHING:
        return EVERYTHING
    message = f"overwrite: {overwrite!r} is none of True, False and {EVERYTHING!r}"
    raise refuse("AMBIGUOUS", message, hint=f"True replaces a checkpoint, {EVERYTHING!r} all that its folder holds.")


def several_files(target: str) -> TransaxleError:
    """Return the refusal to write several files where the target is one."""
    return refuse("UNSUPPORTED", "it is one file, and several are to be written", file=target, hint="Give a folder.")


def irreplaceable(folder: Folder, overwrite: Overwrite) -> tuple[str, str]:
    """Say why a folder must stay, and what to do about it; two empty texts where it may be replaced.

    Raises:
        StorageError: IO.
    """
    top = folder.top()
    if not top:
        return "", ""
    files = (name for name, kind in top.items() if kind == "file")
    if not any(name.endswith(MANIFEST) or is_of_checkpoint(name) for name in files) and not any(map(is_step, top)):
        return "it is a folder that holds no checkpoint", "Choose another place."
    found = [] if overwrite == EVERYTHING else strangers(folder)
    if not found:
        return "", ""
    more = f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
    shown = ", ".join(found[:_SHOWN])
    verb = "belongs" if len(found) == 1 else "belong"
    reason = f"{shown}{more} {verb} to no checkpoint, and would be deleted with the one that is there"
    return reason, f"Move that elsewhere, or replace all of it: {_WAY_OUT}"


def strangers(folder: Folder) -> list[str]:
    """Return what in a folder belongs to no checkpoint; sub-folders have a `/` at their end.

    Raises:
        StorageError: IO.
    """
    top = folder.top()
    listed = _listed(folder) if top.get(MANIFEST) == "file" else {}
    inner = {STATE_FOLDER} | {name.partition("/")[0] for name in listed if "/" in name}
    newest = {_tag(folder, each.newest) for each in every_format() if each.newest in top}
    steps = {name for name in top if is_step(name)} | newest
    here = [each for each in every_format() if each.inner and any(map(each.file_pattern.fullmatch, top))]

    def mine(name: str) -> bool:
        first, _, rest = name.partition("/")
        if not rest:
            expected = name in _BESIDE or any(_is_of(each, name) or name in each.sidecars for each in every_format())
        elif first in steps:
            expected = any(_is_of(each, rest) for each in every_format() if each.steps)
        elif first == STATE_FOLDER:
            expected = any(_is_of(each, rest) for each in every_format() if not each.steps)
        else:
            expected = any(_is_of(each, name) for each in here)
        return expected or (name in listed and _unchanged(folder, name, listed[name]))

    found: list[str] = []
    for name, kind in sorted(top.items()):
        if kind == "folder":
            entered = name in inner or name in steps or any(name == each.inner for each in here)
            found += [each for each in folder.inside(name) if not mine(each)] if entered else [f"{name}/"]
        elif kind == "special" or not mine(name):
            found.append(name)
    return found


def _is_of(kind: Format, path: str) -> bool:
    return kind.file_pattern.fullmatch(path) is not None


def _tag(folder: Folder, name: str) -> str:
    """Return the sub-folder that a file names; empty where it names none."""
    said = (folder.read(name, _LONGEST_TAG) or b"").decode("utf-8", "replace").strip()
    return said if is_plain(said) else ""


def _listed(folder: Folder) -> Mapping[str, _Record]:
    """Return the files that the manifest lists; none where it cannot be read."""
    text = folder.read(MANIFEST, _LONGEST_MANIFEST)
    try:
        return {} if text is None else msgspec.json.decode(text, type=_Manifest).files
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _unchanged(folder: Folder, name: str, record: _Record) -> bool:
    """Tell whether a listed file is what was written: one that somebody has edited since is theirs."""
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

    def top(self) -> Mapping[str, Kind]:
        """See `Folder`; a link counts as a file: removing it takes nothing from what it leads to."""
        with os.scandir(self._path) as entries:
            return {entry.name: _kind(entry) for entry in entries}

    def inside(self, name: str) -> Iterator[str]:
        """See `Folder`."""
        with os.scandir(self._path / name) as entries:
            found = sorted((entry.name, _kind(entry)) for entry in entries)
        if not found:
            yield f"{name}/"
        for inner, kind in found:
            if kind == "folder":
                yield from self.inside(f"{name}/{inner}")
            else:
                yield f"{name}/{inner}" + "/" * (kind == "special")

    def read(self, name: str, most: int) -> bytes | None:
        """See `Folder`."""
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

    def top(self) -> Mapping[str, Kind]:
        """See `Folder`."""
        found: dict[str, Kind] = {}
        for member in self._service.members(self._service.path, self._service.shown):
            name = str(member["name"]).rstrip("/").rpartition("/")[2]
            if str(member["name"]).rstrip("/") != self._service.path.rstrip("/"):
                found[name] = "file" if member.get("type") == FILE else "folder"
        return found

    def inside(self, name: str) -> list[str]:
        """See `Folder`."""
        start = f"{self._service.path}/"
        return [path.removeprefix(start) for path in self._service.below(f"{start}{name}", name)]

    def read(self, name: str, most: int) -> bytes | None:
        """See `Folder`."""
        path = f"{self._service.path}/{name}"
        found = self._service.info(path, name)
        size = None if found is None else found.get("size")
        if not isinstance(size, int) or size > most:
            return None
        return self._service.fetch(path, 0, size, name) if size else b""


def replaced_file(name: str, head: bytes, overwrite: Overwrite) -> tuple[str, str]:
    """Say why a file must stay, as `irreplaceable` does for a folder.

    Args:
        name: its name.
        head: its first bytes, as `head_of` and services give them.
        overwrite: what was said.
    """
    if overwrite == EVERYTHING or begins_right(name, head):
        return "", ""
    return "it does not begin as a file with tensors does", f"Move it elsewhere, or replace it all the same: {_WAY_OUT}"


def head_of(path: Path) -> bytes:
    """Return the first bytes of a local file."""
    with path.open("rb") as file:
        return file.read(_HEAD)


def remote_head_of(service: Service, size: int) -> bytes:
    """Return the first bytes of the file that a service's path denotes; size: of all of it."""
    return service.fetch(service.path, 0, min(size, _HEAD), service.shown) if size else b""


def _kind(entry: os.DirEntry[str]) -> Kind:
    if entry.is_symlink():
        return "file"
    mode = entry.stat(follow_symlinks=False).st_mode
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "special"
