"""The catalog of a container: its tensors and the places of their bytes, known before any data is read.

Readers, drafts and plans all use catalogs. An existing container (`Container`) and one not yet written (`Draft`) are
described alike: by entries, each with extents (chunks of its bytes in files). A plan is therefore a list of copies
between two catalogs.

A `Seal` locates the digests (hashes of its bytes) that a file contains itself, if the file is a whole checkpoint
without a manifest: one digest for each tensor, and one for all bytes outside the tensors. Digests are known only after
the bytes are written, so space of a fixed width is reserved for the digests and filled in last. Other programs see the
digests as ordinary metadata.

A plain number in a container's metadata, such as a number in a pickle, becomes a tensor without dims. The bytes of a
metadata number are in a pseudo-file in memory, `NUMBERS`, a name that no real file can have.

Dtypes are named by their safetensors code. A dtype without a safetensors code has torch's name in capitals
(`COMPLEX32`); formats that cannot store the dtype refuse it. Shapes of F4 and F6 count *elements*, although their bytes
are packed along the last dim.
"""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash
from msgspec.structs import replace

from transaxle.axes.geometry import Loop
from transaxle.encodings.value_steps import ComputedTensor
from transaxle.errors import refuse
from transaxle.formats.storage.copier import READING, Steps, read_strided
from transaxle.formats.storage.storage import Overlay, Storage, VirtualFiles

if TYPE_CHECKING:
    from transaxle.errors import Refusal
    from transaxle.formats.training_state import TrainingItem


BITS: dict[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits per element by safetensors code, in the order by which the safetensors library sorts tensors."""

ITEM_BITS: dict[str, int] = BITS | {
    "COMPLEX32": 32, "COMPLEX128": 128, "QINT8": 8, "QUINT8": 8, "QINT32": 32, "QUINT4X2": 8, "QUINT2X4": 8,
    "BITS8": 8, "BITS16": 16, "BITS1X8": 8, "BITS2X4": 8, "BITS4X2": 8,
    **{f"{sign}INT{bits}": 8 for sign in ("", "U") for bits in range(1, 8)},
}  # fmt: skip
"""Bits per element of every dtype that may be stored; torch's packed dtypes count as 8 bits."""

Shape = tuple[int, ...]


@cache
def _numpy() -> Mapping[str, np.dtype]:
    """Return the numpy dtypes by code; the first call imports `ml_dtypes`."""
    import ml_dtypes

    return {
        "BOOL": np.dtype(np.bool_), "U8": np.dtype("u1"), "I8": np.dtype("i1"), "I16": np.dtype("<i2"),
        "U16": np.dtype("<u2"), "I32": np.dtype("<i4"), "U32": np.dtype("<u4"), "I64": np.dtype("<i8"),
        "U64": np.dtype("<u8"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8"),
        "C64": np.dtype("<c8"), "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz), "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
        "COMPLEX32": np.dtype([("real", "<f2"), ("imag", "<f2")]), "COMPLEX128": np.dtype("<c16"),
        "QINT8": np.dtype("i1"), "QINT32": np.dtype("<i4"), "BITS16": np.dtype("<u2"),
    }  # fmt: skip


def numpy_dtype(code: str) -> np.dtype:
    """Return the numpy dtype of a code; U8 for packed dtypes (F4, F6) and for plain bytes."""
    return _numpy().get(code, np.dtype("u1"))


@cache
def _codes() -> Mapping[np.dtype, str]:
    return {dtype: code for code, dtype in reversed(list(_numpy().items()))}


def is_scalar(value: object) -> bool:
    """Tell whether a value is a numpy scalar, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def scalar(data: bytes, code: str) -> np.generic:
    """Return the bytes `data` as a numpy scalar of the dtype with this safetensors code."""
    value: np.generic = np.frombuffer(data, numpy_dtype(code))[0]
    return value


def code_of(dtype: np.dtype) -> str:
    """Return the safetensors code of a numpy dtype.

    Raises:
        KeyError: for a dtype without a code.
    """
    return _codes()[dtype]


def number_value(data: bytes, code: str) -> float:
    """Return the number that the bytes of one element encode, such as an optimizer's step; integers stay
    exact.
    """
    value: float = scalar(data, code).item()
    return value


PACKED = {"F4": 2}
"""Maps a dtype code to the number of elements that torch counts as one along the last dim."""


def elements_shape(counts: Shape, code: str) -> Shape:
    """Convert torch's shape to the shape in elements, which differs for packed dtypes."""
    packed = PACKED.get(code, 1)
    return counts if packed == 1 or not counts else (*counts[:-1], counts[-1] * packed)


def packed_width(code: str, width: int) -> int:
    """Return the number of bytes of `width` consecutive elements in a row.

    Raises:
        Refused: SHAPE_MISMATCH if packed elements do not fill whole bytes.
    """
    bits = ITEM_BITS[code] * width
    if bits % 8:
        raise refuse("SHAPE_MISMATCH", f"{width} elements of {code} do not fill whole bytes")
    return bits // 8


@lru_cache(maxsize=4096)
def nbytes(code: str, shape: tuple[int, ...]) -> int:
    """Return the size in bytes of a dense tensor; see `packed_width`. Cached, as a model has few distinct shapes."""
    count = 1
    for size in shape:
        count *= size
    return packed_width(code, count)


class Extent(msgspec.Struct, frozen=True, gc=False):
    """A rectangular chunk of a stored tensor, and the place of its bytes in a file."""

    start: tuple[int, ...]
    """Index of the chunk's first element in the stored tensor, one number for each dim."""
    shape: tuple[int, ...]
    """Size of the chunk in each dim, in elements."""
    file: str
    """Name of the file that contains the chunk, relative to the container."""
    offset: int
    """Byte offset of the chunk's first element in the file."""
    strides: tuple[int, ...] | None = None
    """Strides in the file, in elements; None if the chunk is row-major without gaps."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A stored tensor: its dtype, its shape, and its extents."""

    name: str
    dtype: str
    """Code of the dtype: a key of `ITEM_BITS`, in most cases a safetensors code."""
    shape: tuple[int, ...]
    """Shape of the tensor in elements, also for packed dtypes."""
    extents: tuple[Extent, ...]
    """Chunks that tile the tensor without gaps or overlaps."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes when stored densely."""
        return nbytes(self.dtype, self.shape)


class Checksum(msgspec.Struct, frozen=True, gc=False):
    """A checksum that a file has for a range of its bytes; the checksum is checked when the range has been read."""

    file: str
    """Name of the file that contains the range, relative to the container."""
    offset: int
    """Offset in the file of the range's first byte."""
    size: int
    """Size of the range in bytes."""
    crc32: int
    """CRC-32 of the bytes in the range."""
    what: str
    """Description of the range for error messages, such as a record's name."""

    @property
    def end(self) -> int:
        """Offset in the file after the range's last byte."""
        return self.offset + self.size


class Twin(msgspec.Struct, frozen=True):
    """Two stored tensors that must be equal, such as a replica on another rank, or a step number in several files."""

    first: Entry
    """The tensor that conversions read; the second tensor is only compared."""
    second: Entry
    """The copy that is compared, of the same dtype and shape as the first tensor."""
    why: str
    """Reason for which the two tensors must be equal, for error messages."""
    replica: bool = False
    """Whether the two are copies that ranks update independently, so that the values may have drifted apart."""
    rounded: bool = False
    """Whether the copy has lower precision; it must then equal, bit by bit, the first tensor after rounding."""
    dates: bool = False
    """Whether equality proves that two files come from one save; such tensors are compared even if nothing else reads
    them."""


class Recoding(msgspec.Struct, frozen=True):
    """Conversions of tensor values while a container is read: decoding, casts, and a merged adapter."""

    computed: Mapping[str, ComputedTensor] = msgspec.field(default_factory=dict)
    """Maps the name of a virtual file to the computation that produces its values."""
    dtype: str | None = None
    """Safetensors code of the dtype that plain tensors are cast to; None: no cast."""
    stayed: tuple[str, ...] = ()
    """Names of the plain tensors that keep their dtype while all other plain tensors are cast."""
    adapter: Container | None = None
    """The LoRA adapter that is merged into the weights."""
    notes: tuple[str, ...] = ()
    """Sentences about the recoding, which are shown with a plan."""
    compact: Mapping[str, Entry] = msgspec.field(default_factory=dict)
    """Maps scales that are stored in a kernel's order to the entry of the same scales in row-major order."""
    compact_notes: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Maps each tensor in `compact` to the metadata that describes it in row-major order."""


class Container(msgspec.Struct, frozen=True):
    """An opened checkpoint: its catalog, and the storage of its files."""

    format: str
    """Name of the checkpoint's format, such as `safetensors`."""
    path: str
    """Path of the checkpoint as the user typed it."""
    storage: Storage
    """Storage that reads byte ranges of `files`."""
    entries: Mapping[str, Entry]
    """Stored tensors by name, in file order."""
    files: Mapping[str, int]
    """Size in bytes of each file that contains tensors or their description."""
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Metadata of the container, in the structure that its format has."""
    carried: tuple[str, ...] = ()
    """Further files of the folder that conversions copy with the model (config, tokenizer)."""
    ignored: tuple[str, ...] = ()
    """Names that conversions neither read nor copy: unrelated tensor files, hidden files, sub-folders, links and
    special files; see `registry`.
    """
    checksums: tuple[Checksum, ...] = ()
    """Checksums that the checkpoint's files contain, as their format provides; `verify` checks them."""
    twins: tuple[Twin, ...] = ()
    """Pairs of tensors that must be equal; each conversion compares them before it writes."""
    left: Mapping[str, Entry] = msgspec.field(default_factory=dict)
    """Tensors that the files contain, but that were not selected."""
    training: tuple[TrainingItem, ...] = ()
    """Training state other than model and optimizer, such as schedules; see `TrainingItem`."""
    seals: tuple[Seal, ...] = ()
    """Locations of the digests that files contain of their own bytes; `verify` checks them."""
    config: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Facts about the model from the container's own files, with the keys of a config.json; used if there is no
    config.json."""
    unread: tuple[Refusal, ...] = ()
    """Refusals of optimizer state that cannot be read; the refusals are raised if the optimizer is requested."""
    uncompared: tuple[Twin, ...] = ()
    """Pairs of equal tensors that were not selected; only `verify` compares them."""
    paths: Mapping[str, tuple[str | int, ...]] = msgspec.field(default_factory=dict)
    """Maps a tensor to its key path in the state dict, for tensors outside the model's and the optimizer's dicts; see
    `State`."""
    recoding: Recoding = Recoding()
    """The tensors that are computed, and the stored tensors from which they are computed."""

    def with_computed(
        self, computed: Mapping[str, ComputedTensor], entries: Mapping[str, Entry], **changes: Any
    ) -> Container:
        """Return the container with further computed tensors.

        Args:
            computed: maps a virtual file's name, unique in the container, to the computation of its values.
            entries: all tensors of the new container, including the computed ones.
            **changes: new values of fields of `Recoding` and `Container`.
        """
        recoding = {name: changes.pop(name) for name in Recoding.__struct_fields__ if name in changes}
        adapter: Container | None = recoding.get("adapter")
        storage = VirtualFiles(self.storage, computed, () if adapter is None else (adapter.storage,))
        recoding["computed"] = {**self.recoding.computed, **computed}
        return replace(self, storage=storage, entries=entries, recoding=replace(self.recoding, **recoding), **changes)

    @property
    def beside(self) -> frozenset[str]:
        """Names of the tensors that belong to the items of `training`."""
        return frozenset([item.name for item in self.training if item.name is not None])

    @property
    def nbytes(self) -> int:
        """Total size of all tensors in bytes."""
        return sum(entry.nbytes for entry in self.entries.values())

    def without(self, names: Collection[str]) -> Container:
        """Return the container without some tensors: these move to `left`, and their twins to `uncompared`.

        Twins that prove that all files come from one save (`dates`) are still compared.
        """
        omitted = {name: entry for name, entry in self.entries.items() if name in names}
        places = {(extent.file, extent.offset) for entry in omitted.values() for extent in entry.extents}
        is_compared = [
            twin.dates or any((each.file, each.offset) not in places for each in twin.first.extents)
            for twin in self.twins
        ]
        return replace(
            self,
            entries={name: entry for name, entry in self.entries.items() if name not in omitted},
            left={**self.left, **omitted},
            twins=tuple(itertools.compress(self.twins, is_compared)),
            uncompared=(
                *self.uncompared,
                *(twin for twin, wanted in zip(self.twins, is_compared, strict=True) if not wanted),
            ),
        )


class Spec(msgspec.Struct, frozen=True, gc=False):
    """A tensor to be written: its name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Fragment(msgspec.Struct, frozen=True):
    """Bytes of a new file that do not depend on tensor values, such as a header or an index."""

    file: str
    offset: int
    data: bytes


class Draft(msgspec.Struct, frozen=True):
    """The layout of a container that is not written yet: the place of each tensor in its files."""

    format: str
    entries: Mapping[str, Entry]
    """Tensors to write by name, in the order in which they are written."""
    files: Mapping[str, int]
    """Final size of each file, in bytes."""
    fragments: tuple[Fragment, ...]
    """All bytes of the files that are outside the tensors."""
    seal: Seal | None = None
    """Space for digests in a single-file checkpoint; the fragment with the digests is written last. None: the
    checkpoint gets no digests."""
    copies: Mapping[str, tuple[Extent, ...]] = msgspec.field(default_factory=dict)
    """Maps a tensor to further places of its bytes, for chunks that several ranks store."""
    notes: tuple[str, ...] = ()
    """Sentences for the user: settings that programs need to read the files, and assumptions where the source gives no
    information."""

    def early_fragments(self) -> tuple[Fragment, ...]:
        """Return the fragments that can be written before any tensor: all but the one with space for digests."""
        return tuple(fragment for fragment in self.fragments if not self._contains_digests(fragment))

    def late_fragments(self, hashes: Mapping[str, str]) -> Iterator[Fragment]:
        """Yield the fragment that contains the digests, with all digests filled in.

        Args:
            hashes: maps each tensor to the hash of its bytes.
        """
        if self.seal is None:
            return
        firsts = {entry.extents[0].offset: hashes[name] for name, entry in self.entries.items() if entry.nbytes}
        ordered = sorted(self.fragments, key=lambda fragment: fragment.offset)
        parts = [(fragment.offset, fragment.data) for fragment in ordered]
        for sealed, (_, data) in zip(ordered, fill_digests(parts, self.seal, firsts), strict=True):
            if self._contains_digests(sealed):
                yield replace(sealed, data=data)

    def with_files(self, files: Mapping[str, bytes]) -> Draft:
        """Return the draft with further files, given as a mapping from name to contents."""
        fragments = (Fragment(name, 0, text) for name, text in sorted(files.items()))
        sizes = {name: len(text) for name, text in sorted(files.items())}
        return replace(self, files={**self.files, **sizes}, fragments=(*self.fragments, *fragments))

    @property
    def has_leading_digests(self) -> bool:
        """Whether the digests precede the tensors in the file, so that a stream needs the digests before it starts."""
        return self.seal is not None and any(
            not fragment.offset and self._contains_digests(fragment) for fragment in self.fragments
        )

    def _contains_digests(self, fragment: Fragment) -> bool:
        return self.seal is not None and fragment.offset <= self.seal.head < fragment.offset + len(fragment.data)


DIGITS = 32
"""Number of hex characters of a digest, which is an xxh3-128 hash."""
_BLANK = b"0" * DIGITS
_BLOCK = 1 << 20


class Seal(msgspec.Struct, frozen=True):
    """Locations of the digests in a file, as byte offsets."""

    file: str
    """Name of the file with the digests, relative to the container."""
    head: int
    """Offset of the digest of all bytes outside the tensors; this digest is computed with zeros in its own place."""
    places: Mapping[int, int]
    """Maps the offset of each tensor that is not empty to the offset of its digest."""


def make_seal(file: str, head: int, begin: int, offsets: Iterable[int]) -> Seal:
    """Return the seal of a file whose tensor digests are contiguous.

    Args:
        file: name of the file with the digests.
        head: offset of the digest of all bytes outside the tensors.
        begin: offset of the first tensor's digest.
        offsets: offsets of the tensors that are not empty, in the order of their digests.
    """
    return Seal(file, head, {offset: begin + number * DIGITS for number, offset in enumerate(offsets)})


def read_digest(storage: Storage, seal: Seal, place: int) -> str:
    """Read the digest that is stored at an offset of the file."""
    return storage.read(seal.file, place, DIGITS).decode("latin-1")


def digest_outside(storage: Storage, seal: Seal, tensors: Iterable[tuple[int, int]]) -> str:
    """Compute the digest of all bytes of a file outside its tensors.

    Args:
        storage: storage of the file.
        seal: locations of the file's digests.
        tensors: `(first byte, offset after the last byte)` of each tensor.
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
    """Return the digest of `(offset, bytes)` parts, with zeros at `head`, the place of the digest itself."""
    state = xxhash.xxh3_128()
    for offset, data in parts:
        first, last = max(head, offset), min(head + DIGITS, offset + len(data))
        if first < last:
            data = data[: first - offset] + _BLANK[: last - first] + data[last - offset :]
        state.update(data)
    return state.hexdigest()


def fill_digests(parts: Iterable[tuple[int, bytes]], seal: Seal, hashes: Mapping[int, str]) -> list[tuple[int, bytes]]:
    """Return the bytes outside the tensors with the digests filled in.

    Args:
        parts: `(offset, bytes)` of all bytes outside the tensors, in file order.
        seal: locations of the file's digests.
        hashes: maps the offset of each tensor to its digest.
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


NUMBERS = "//numbers"
"""Name of the pseudo-file; as a path it would have an empty component."""
Number = int | float | bool
_I64, _U64 = range(-(2**63), 2**63), range(2**64)


def number(value: Number) -> tuple[str, bytes] | None:
    """Return the safetensors code and the bytes of a Python number: BOOL, I64 (U64 above its range) or F64.

    Returns:
        None for an integer that is too large for I64 and U64.
    """
    if isinstance(value, bool):
        return "BOOL", bytes([value])
    if isinstance(value, float):
        return "F64", struct.pack("<d", value)
    if value in _I64:
        return "I64", struct.pack("<q", value)
    return ("U64", struct.pack("<Q", value)) if value in _U64 else None


class NumbersInMemory(Overlay):
    """A storage with `NUMBERS`, an additional file in memory, beside its real files.

    Args:
        below: the storage of the real files.
    """

    def __init__(self, below: Storage) -> None:
        super().__init__(below)
        self._numbers = bytearray()

    def moved_onto(self, below: Storage) -> NumbersInMemory:
        """Return an overlay of a different storage that shares these numbers."""
        moved = NumbersInMemory(below)
        moved._numbers = self._numbers
        return moved

    def add(self, data: bytes) -> Extent:
        """Append the bytes of one number to `NUMBERS`, and return their extent."""
        extent = Extent((), (), NUMBERS, len(self._numbers))
        self._numbers += data
        return extent

    def add_all(self, other: NumbersInMemory) -> int:
        """Append the numbers of a second overlay, and return the new offset of its first number."""
        start = len(self._numbers)
        self._numbers += other._numbers
        return start

    def size(self, name: str) -> int:
        """Return the size of a file, also of `NUMBERS`; see `Storage.size`."""
        return len(self._numbers) if name == NUMBERS else super().size(name)

    def version(self, name: str) -> str:
        """Return a file's version (see `Storage.version`); `NUMBERS` has none, as its numbers come from a real file."""
        return "" if name == NUMBERS else super().version(name)

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Add a read of a file, also of `NUMBERS`; see `Storage.add_read`."""
        if name == NUMBERS:
            steps.call(partial(read_strided, self._copy, offset, view, width, loops), READING, view.nbytes)
        else:
            self.below.add_read(steps, name, offset, view, width, loops)

    def _copy(self, offset: int, view: memoryview) -> None:
        view.cast("B")[:] = self._numbers[offset : offset + view.nbytes]
