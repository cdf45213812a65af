"""The manifest `transaxle.json`: the description of a checkpoint that we wrote, with a hash of every tensor and
header.

It is written last. While file sizes and header hashes match, it gives family and dialect without guessing, and `verify`
checks every tensor's bytes against it. Its own checksum covers the rest of its text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection

import msgspec
import xxhash

from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.errors import Refusal, StorageError, TransaxleError, Where, refuse
from transaxle.formats.catalog import Container
from transaxle.formats.dtype import Shape, nbytes
from transaxle.formats.registry import MANIFEST

SCHEMA, IN_SPANS = 2, 2
"""Versions of the manifest: the last one, and the first in which large tensors are hashed in spans."""
_BLOCK = 1 << 18
_NEAR, _IN_A_ROW = 1 << 14, 4
"""Bytes between small gaps that are near each other, and how many of them in a row tell that the next ones are too."""
_LARGEST = 1 << 30


class FileRecord(msgspec.Struct, frozen=True):
    """A file of the checkpoint."""

    size: int
    """Bytes."""
    head: int
    """Number of bytes that belong to no tensor: the headers of a tensor file, all of any other file."""
    xxh3: str
    """xxh3-128 of those bytes, in the order of the file, in hex."""


class TensorRecord(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint."""

    dtype: str
    """Safetensors code."""
    shape: tuple[int, ...]
    """Logical elements along each dim."""
    xxh3: str
    """xxh3-128 of its row-major little-endian bytes, in hex; in version 2, of one of more than 256 MiB, xxh3-128 of
    the text of the hashes of each 256 MiB, one after another.
    """


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of `transaxle.json`."""

    transaxle: int = 1
    """Version of this schema."""
    format: str
    """Container format."""
    family: str | None
    """Model family."""
    dialect: str
    """Dialect of the names."""
    axes: dict[str, int]
    """Axis sizes, as far as they are the same in every layer."""
    aliases: dict[str, str]
    """Stored name -> stored name of the tensor it is tied to."""
    files: dict[str, FileRecord]
    """Every other file."""
    tensors: dict[str, TensorRecord]
    """Every tensor."""
    source: str | msgspec.UnsetType = msgspec.UNSET
    """What was read, where its URL leads to the same for ever: a hub's repository at a commit."""
    checksum: str = ""
    """xxh3-128 of this text with an empty checksum."""


def encode(manifest: Manifest) -> bytes:
    """Return the manifest's text, with its checksum.  Inverse: `decode`."""
    bare = msgspec.structs.replace(manifest, checksum="")
    from transaxle.move.hashing import digest  # only manifests need it, and a look at other folders none

    checksum = digest(msgspec.json.encode(bare))
    return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(bare, checksum=checksum)), indent=1)


def decode(text: bytes, file: str = MANIFEST) -> Manifest:
    """Read a manifest's text.

    Raises:
        Refused: UNSUPPORTED for one of a later version; CORRUPT where it is malformed or was changed.
    """
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refuse("CORRUPT", f"malformed: {error}", file=file) from None
    if manifest.transaxle > SCHEMA:
        message = f"the manifest has version {manifest.transaxle}; this program reads versions up to {SCHEMA}"
        raise refuse("UNSUPPORTED", message, file=file, hint="Use a newer Transaxle.")
    if encode(manifest) != text:
        raise refuse("CORRUPT", "the manifest's text was changed: its checksum does not match", file=file)
    return manifest


def has_manifest(container: Container) -> bool:
    """Tell whether a checkpoint has a manifest, whatever it says.

    A file that was named alone has its folder's, if that can be read and lists it.
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
    """Return a checkpoint's manifest, whatever it says; of a file that was named alone, what its folder's says of it.

    None where there is none.

    Raises:
        Refused: CORRUPT.
        StorageError: IO.
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
    """Return the manifest's statements about files that are no longer true.

    Args:
        manifest: from `load`.
        container: the checkpoint.
        files: check only these; None: all that it lists.
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
        elif _digest_around(container, name, size, tensor_ranges.get(name, [])) != (record.head, record.xxh3):
            subject = "this file" if record.head == size else "its header"
            problems.append(Refusal("CORRUPT", f"{subject} was changed after it was written", Where(name)))
    return problems


def _size(container: Container, name: str, present: Collection[str]) -> int | None:
    """Return the size of a file, which may lie in a sub-folder; None if it is not there."""
    if "/" not in name and name not in present:
        return None
    try:
        return container.storage.size(name)
    except StorageError:
        return None


_Ranges = list[tuple[list[int], int]]
"""First bytes of ranges of one size, and that size."""


def _tensor_ranges(container: Container) -> dict[str, _Ranges]:
    """Return the byte ranges of every file that hold tensors."""
    alike: dict[tuple[str, str, Shape], list[int]] = {}
    copies = (twin.second for twin in (*container.twins, *container.uncompared))
    for entry in (*container.entries.values(), *container.left.values(), *copies):
        dtype = entry.dtype
        for extent in entry.extents:
            alike.setdefault((extent.file, dtype, extent.shape), []).append(extent.offset)
    ranges: dict[str, _Ranges] = {}
    for (file, dtype, shape), offsets in alike.items():
        if size := nbytes(dtype, shape):
            ranges.setdefault(file, []).append((offsets, size))
    return ranges


def _digest_around(container: Container, name: str, size: int, ranges: _Ranges) -> tuple[int, str]:
    """Return the number, and the xxh3-128, of a file's bytes outside its tensors."""
    state = xxhash.xxh3_128()
    starts, stops = _gaps(size, ranges)
    count, number = sum(stops) - sum(starts), 0
    reached = end_of_block = near = 0
    room = memoryview(bytearray(min(_BLOCK, size)))
    while number < len(starts):
        reached, stop = max(reached, starts[number]), stops[number]
        # Between small tensors there are small gaps: many of them are read together.
        near = near + 1 if max(reached - end_of_block, stop - reached) <= _NEAR else 0
        wanted = stop - reached if near < _IN_A_ROW else size - reached
        block = room[: min(_BLOCK, wanted)]
        container.storage.read_into(name, reached, block)
        begin, end_of_block = reached, reached + len(block)
        after = bisect_left(starts, end_of_block, number)
        here = zip([reached, *starts[number + 1 : after]], stops[number:after], strict=True)
        state.update(b"".join([block[start - begin : stop - begin] for start, stop in here]))
        reached, number = end_of_block, bisect_right(stops, end_of_block, number)
    return count, state.hexdigest()


def _gaps(size: int, ranges: _Ranges) -> tuple[list[int], list[int]]:
    """Return where the bytes of a file begin and end that are in none of the ranges."""
    starts, stops, reached = [], [], 0
    for begin, end in sorted((begin, begin + length) for begins, length in (*ranges, ([size], 0)) for begin in begins):
        if begin > reached:
            starts.append(reached)
            stops.append(begin)
        reached = max(reached, end)
    return starts, stops


def read_manifest(container: Container) -> Manifest | None:
    """Return the manifest if the checkpoint still matches it; None otherwise.

    Only files that hold or describe tensors, and config.json, are checked; `verify` checks the others.
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
