"""Seals: digests in a file that is a checkpoint by itself and has no manifest beside it.

There is one digest for each tensor, and one for all other bytes, the other digests included. They are known only when
the bytes are written, so space of a fixed width is reserved, and filled in last. Other readers see the text as an
ordinary note.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
import xxhash

from transaxle.formats.storage.storage import Storage

DIGITS = 32
"""Characters of one digest: an xxh3-128 in hex."""
_BLANK = b"0" * DIGITS
_BLOCK = 1 << 20


class Seal(msgspec.Struct, frozen=True):
    """Where the digests of a file are."""

    file: str
    """Name of the file inside the container."""
    head: int
    """First byte of the digest of all bytes outside the tensors, computed with zeros in its own place."""
    places: Mapping[int, int]
    """First byte of a tensor -> first byte of its digest; tensors without bytes have none."""


def seal_of(file: str, head: int, begin: int, offsets: Iterable[int]) -> Seal:
    """Return the seal of a file whose tensor digests follow one another.

    Args:
        file: name of the file.
        head: first byte of the digest of the other bytes.
        begin: first byte of the first tensor's digest.
        offsets: first bytes of the tensors that have bytes, in the order of their digests.
    """
    return Seal(file, head, {offset: begin + number * DIGITS for number, offset in enumerate(offsets)})


def read_digest(storage: Storage, seal: Seal, place: int) -> str:
    """Return a digest as the file states it."""
    return storage.read(seal.file, place, DIGITS).decode("latin-1")


def rest_of(storage: Storage, seal: Seal, tensors: Iterable[tuple[int, int]]) -> str:
    """Return the digest of all bytes outside the tensors.

    Args:
        storage: the files.
        seal: of the file.
        tensors: first byte of each tensor and the one after its last.
    """
    return _digest(_bytes_outside(storage, seal.file, tensors), seal.head)


def _bytes_outside(storage: Storage, file: str, tensors: Iterable[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    size = storage.size(file)
    reached = 0
    for begin, end in [*sorted(tensors), (size, size)]:
        for start in range(reached, begin, _BLOCK):
            yield start, storage.read(file, start, min(_BLOCK, begin - start))
        reached = max(reached, end)


def _digest(parts: Iterable[tuple[int, bytes]], head: int) -> str:
    """Return the digest of pieces of a file, with zeros in the place of the digest itself."""
    state = xxhash.xxh3_128()
    for offset, data in parts:
        first, last = max(head, offset), min(head + DIGITS, offset + len(data))
        if first < last:
            data = data[: first - offset] + _BLANK[: last - first] + data[last - offset :]
        state.update(data)
    return state.hexdigest()


def filled(parts: Iterable[tuple[int, bytes]], seal: Seal, hashes: Mapping[int, str]) -> list[tuple[int, bytes]]:
    """Return all bytes outside the tensors with the digests filled in.

    Args:
        parts: those bytes, in the order of the file, each with its offset.
        seal: where the digests go.
        hashes: first byte of a tensor -> its digest.
    """
    pieces = []
    for offset, data in parts:
        text = bytearray(data)
        for begin, place in seal.places.items():
            if offset <= place < offset + len(text):
                text[place - offset : place - offset + DIGITS] = hashes[begin].encode()
        pieces.append((offset, text))
    digest_of_rest = _digest(((offset, bytes(text)) for offset, text in pieces), seal.head).encode()
    for offset, text in pieces:
        if offset <= seal.head < offset + len(text):
            text[seal.head - offset : seal.head - offset + DIGITS] = digest_of_rest
    return [(offset, bytes(text)) for offset, text in pieces]
