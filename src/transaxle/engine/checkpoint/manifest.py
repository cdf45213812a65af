"""The manifest is the file `transaxle.json`. The file describes a checkpoint that Transaxle wrote, with a hash of every
tensor and file header.

The manifest is written last. As long as file sizes and header hashes match the manifest, it states family and dialect
with certainty, and `verify` checks the bytes of every tensor against it. The manifest's own checksum covers the rest of
its text. The module `source_hashes` checks a source against it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from transaxle.axes.geometry import row_major
from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.errors import Refusal, StorageError, TransaxleError, Where, refuse
from transaxle.formats.catalog import (
    BITS,
    Container,
    Extent,
    Shape,
    nbytes,
)
from transaxle.formats.registry import MANIFEST

if TYPE_CHECKING:
    pass


SCHEMA, IN_SPANS = 2, 2
"""Versions of the manifest's schema: the current version, and the first version in which large tensors are hashed in
spans.
"""
_BLOCK = 1 << 18
_NEAR, _IN_A_ROW = 1 << 14, 4
"""A gap between two tensors in a file is near if both its length and its distance from the previous gap are at most
`_NEAR` bytes. After `_IN_A_ROW` near gaps, whole blocks of the file are read, including the tensors between the gaps.
"""
_LARGEST = 1 << 30


class FileRecord(msgspec.Struct, frozen=True):
    """Size and header hash of a file of the checkpoint."""

    size: int
    """Size of the file in bytes."""
    head: int
    """Number of the file's bytes that belong to no tensor: headers, or all bytes if the file has no tensors."""
    xxh3: str
    """The xxh3-128 hash, in hex, of the file's bytes outside the tensors, in file order."""


class TensorRecord(msgspec.Struct, frozen=True):
    """Dtype, shape and hash of a tensor of the checkpoint."""

    dtype: str
    """Safetensors code of the tensor's dtype."""
    shape: tuple[int, ...]
    """Number of logical elements along each dim of the tensor."""
    xxh3: str
    """The xxh3-128 hash, in hex, of the tensor's row-major little-endian bytes. In version 2 of the manifest, a tensor
    of more than 256 MiB has the xxh3-128 hash of the concatenated hex hashes of its 256 MiB spans.
    """


class Grafted(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a checkpoint has from another checkpoint than the source."""

    base: str
    """Path of the other checkpoint, as the user typed it; for a repository on a hub, with the commit."""
    tensors: tuple[str, ...]
    """Stored names of tensors."""
    files: tuple[str, ...] = ()
    """Names of files without tensors."""
    checksum: str = ""
    """Checksum of the other checkpoint's manifest; empty if it has none, or has changed since."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the manifest `transaxle.json`."""

    transaxle: int = 1
    """Version of the manifest's schema."""
    format: str
    """Container format of the checkpoint."""
    family: str | None
    """Model family; None if no family's table reads the tensor names."""
    dialect: str
    """Dialect of the tensor names."""
    axes: dict[str, int]
    """Axis sizes, without those that differ between layers."""
    aliases: dict[str, str]
    """Stored name of a tied tensor -> stored name of the tensor that it is a copy of."""
    files: dict[str, FileRecord]
    """File name -> size and hash of the file, for every file except the manifest."""
    tensors: dict[str, TensorRecord]
    """Stored tensor name -> dtype, shape and hash, for every tensor."""
    grafted: Grafted | msgspec.UnsetType = msgspec.UNSET
    """What comes from another checkpoint than the source; unset if nothing does."""
    source: str | msgspec.UnsetType = msgspec.UNSET
    """URL of the source if its content can never change: a hub's repository at a fixed commit."""
    checksum: str = ""
    """The xxh3-128 hash of the manifest's text, computed with an empty checksum."""


def encode(manifest: Manifest) -> bytes:
    """Return the text of a manifest, with its checksum. The function `decode` is the inverse."""
    bare = msgspec.structs.replace(manifest, checksum="")
    # imported inside the function, so that opening a folder without a manifest does not load the module
    from transaxle.move.journal import digest

    checksum = digest(msgspec.json.encode(bare))
    return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(bare, checksum=checksum)), indent=1)


def decode(text: bytes, file: str = MANIFEST) -> Manifest:
    """Parse the text of a manifest, and check it against its checksum.

    Raises:
        Refused: with code UNSUPPORTED, if the manifest has a later version; with code CORRUPT, if the text is malformed
            or was changed.
    """
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refuse("CORRUPT", f"malformed: {error}", file=file) from None
    if manifest.transaxle > SCHEMA:
        message = f"the manifest has version {manifest.transaxle}; this program reads versions up to {SCHEMA}"
        raise refuse("UNSUPPORTED", message, file=file, hint="Use a newer version of Transaxle.")
    if encode(manifest) != text:
        raise refuse("CORRUPT", "the manifest's text was changed: its checksum does not match", file=file)
    return manifest


def has_manifest(container: Container) -> bool:
    """Return whether a checkpoint has a manifest, valid or not.

    A file that is opened alone has the manifest of its folder, if that manifest can be read and lists the file.
    """
    if MANIFEST not in container.storage.names():
        return False
    if not container.storage.single:
        return True
    try:
        return load(container) is not None
    except TransaxleError:
        return False


def load(container: Container) -> Manifest | None:
    """Return the manifest of a checkpoint, even if it no longer matches the files; None if the checkpoint has no
    manifest.

    For a file that is opened alone, return the part of its folder's manifest that describes this file.

    Raises:
        Refused: with code CORRUPT, if the manifest is malformed or was changed.
        StorageError: with code IO, if the manifest cannot be read.
    """
    storage = container.storage
    if MANIFEST not in storage.names():
        return None
    size = storage.size(MANIFEST)
    if size > _LARGEST:
        raise refuse("CORRUPT", f"a manifest of {size} bytes is too long to be real", file=MANIFEST)
    manifest = decode(storage.read(MANIFEST, 0, size))
    file = storage.single
    if not file:
        return manifest
    if file not in manifest.files or manifest.format != container.format:
        return None
    names = {**container.entries, **container.left}
    tensors = {name: record for name, record in manifest.tensors.items() if name in names}
    return msgspec.structs.replace(manifest, files={file: manifest.files[file]}, tensors=tensors, aliases={})


def stale(manifest: Manifest, container: Container, files: Collection[str] | None = None) -> list[Refusal]:
    """Return refusals of files that no longer match the manifest.

    Args:
        manifest: the manifest, as returned by `load`.
        container: the files of the checkpoint.
        files: names of the files to check; None means all files that the manifest lists.
    """
    problems = []
    tensor_ranges = _tensor_ranges(container)
    present = set(container.storage.names())
    for name, record in manifest.files.items():
        if files is not None and name not in files:
            continue
        size = _size(container, name, present)
        if size is None:
            problems.append(Refusal("INCOMPLETE", "the manifest lists this file, but it is missing", Where(name)))
        elif size != record.size:
            message = f"the manifest says {record.size} bytes, the file has {size}"
            problems.append(Refusal("CORRUPT", message, Where(name)))
        elif (digest := _digest_around(container, name, size, tensor_ranges.get(name, []))) != (
            record.head,
            record.xxh3,
        ):
            subject = "this file" if record.head == size else "its header"
            message = describe_change(record.xxh3, digest[1], f"{subject} was changed after it was written")
            problems.append(Refusal("CORRUPT", message, Where(name)))
    return problems


def _size(container: Container, name: str, present: Collection[str]) -> int | None:
    """Return the size of a file, whose name may contain a sub-folder; None if the file does not exist."""
    if "/" not in name and name not in present:
        return None
    try:
        return container.storage.size(name)
    except StorageError:
        return None


_Ranges = list[tuple[list[int], int]]
"""Byte ranges in one file: one pair (offsets, size) for all ranges of the same size."""


def _tensor_ranges(container: Container) -> dict[str, _Ranges]:
    """Return file name -> byte ranges of the tensors in the file."""
    alike: dict[tuple[str, str, Shape], list[int]] = {}
    copies = (twin.second for twin in (*container.twins, *container.uncompared))
    for entry in (*container.entries.values(), *container.left.values(), *copies):
        dtype = entry.dtype
        for extent in entry.extents:
            if extent.strides is None:
                alike.setdefault((extent.file, dtype, extent.shape), []).append(extent.offset)
            else:
                shape, offsets = _runs(extent, extent.strides, BITS[dtype])
                alike.setdefault((extent.file, dtype, shape), []).extend(offsets)
    ranges: dict[str, _Ranges] = {}
    for (file, dtype, shape), offsets in alike.items():
        if size := nbytes(dtype, shape):
            ranges.setdefault(file, []).append((offsets, size))
    return ranges


def _runs(extent: Extent, strides: Shape, bits: int) -> tuple[Shape, list[int]]:
    """Return the contiguous parts of a strided chunk: the shape of each, and their offsets in the file."""
    dims = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    shape = tuple(extent.shape[dim] for dim in dims)
    steps = tuple(strides[dim] for dim in dims)
    dense = row_major(shape)
    outer = next((at for at in range(len(dims)) if steps[at:] == dense[at:]), len(dims))
    starts = np.zeros(1, np.int64)
    for size, step in zip(shape[:outer], steps[:outer], strict=True):
        starts = (starts[:, None] + np.arange(size) * step).ravel()
    return shape[outer:], (extent.offset + starts * bits // 8).tolist()


def _digest_around(container: Container, name: str, size: int, ranges: _Ranges) -> tuple[int, str]:
    """Return the number of a file's bytes outside its tensors, and their xxh3-128 hash."""
    state = xxhash.xxh3_128()
    starts, stops = _gaps(size, ranges)
    count, number = sum(stops) - sum(starts), 0
    reached = end_of_block = near_gaps = 0
    buffer = memoryview(bytearray(min(_BLOCK, size)))
    while number < len(starts):
        reached, stop = max(reached, starts[number]), stops[number]
        # Gaps between small tensors are small, so many gaps are read at once.
        near_gaps = near_gaps + 1 if max(reached - end_of_block, stop - reached) <= _NEAR else 0
        wanted_bytes = stop - reached if near_gaps < _IN_A_ROW else size - reached
        block = buffer[: min(_BLOCK, wanted_bytes)]
        container.storage.read_into(name, reached, block)
        begin, end_of_block = reached, reached + len(block)
        after = bisect_left(starts, end_of_block, number)
        gaps = zip([reached, *starts[number + 1 : after]], stops[number:after], strict=True)
        state.update(b"".join([block[start - begin : stop - begin] for start, stop in gaps]))
        reached, number = end_of_block, bisect_right(stops, end_of_block, number)
    return count, state.hexdigest()


def _gaps(size: int, ranges: _Ranges) -> tuple[list[int], list[int]]:
    """Return the start offsets and the end offsets of the parts of a file that lie outside all given ranges."""
    starts, stops, reached = [], [], 0
    for begin, end in sorted((begin, begin + length) for begins, length in (*ranges, ([size], 0)) for begin in begins):
        if begin > reached:
            starts.append(reached)
            stops.append(begin)
        reached = max(reached, end)
    return starts, stops


def read_manifest(container: Container) -> Manifest | None:
    """Return the manifest if the checkpoint still matches it; None otherwise.

    Only files with tensors or descriptions of tensors, and config.json, are checked; `verify` checks all other files.
    """
    try:
        manifest = None if container.storage.single else load(container)
        if manifest is None or not container.files.keys() <= manifest.files.keys():
            return None
        if stale(manifest, container, {*container.files, CONFIG}):
            return None
    except TransaxleError:
        return None
    return manifest


CHANGED = "the bytes were changed after they were written"


def describe_change(expected: str, actual: str, change: str = CHANGED) -> str:
    """Return the message about bytes whose xxh3-128 hash differs from the recorded hash."""
    # a digest inside a damaged file may be any bytes
    return f"{change}: xxh3-128 {actual}, expected {ascii(expected)[1:-1]}"
