"""The catalog: what a container holds and where, before any data is read; readers, drafts and plans share it.

A container that exists (`Container`) and one that is about to be written (`Draft`) have the same form: entries, each
with the extents that hold its bytes. That is why a plan is only a list of copies between two catalogs.

A `Seal` says where a file keeps digests of its own bytes, if it is a checkpoint by itself and has no manifest. There is
one digest for each tensor, and one for all other bytes, the other digests included. They are known only when the bytes
are written, so space of a fixed width is reserved, and filled in last. Other readers see the text as an ordinary note.

A number that a container keeps in its description, as a pickle does, is a tensor without dims like any other, but its
bytes are not in a file. They are put into a pseudo-file in memory, `NUMBERS`, that is read like real ones, under a name
that no file can have.

Element types are named by their safetensors code. A type that safetensors has no code for is named as torch names it,
in capitals (`COMPLEX32`); sinks that cannot hold it refuse it. F4 and F6 count *elements* in shapes; their bytes are
packed along the last dim.
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
from transaxle.formats.storage.copier import READING, Steps, read_each
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
"""Bits per element of every safetensors code, in the order of the library's own list: its writer sorts by it."""

ITEM_BITS: dict[str, int] = BITS | {
    "COMPLEX32": 32, "COMPLEX128": 128, "QINT8": 8, "QUINT8": 8, "QINT32": 32, "QUINT4X2": 8, "QUINT2X4": 8,
    "BITS8": 8, "BITS16": 16, "BITS1X8": 8, "BITS2X4": 8, "BITS4X2": 8,
    **{f"{sign}INT{bits}": 8 for sign in ("", "U") for bits in range(1, 8)},
}  # fmt: skip
"""Bits per element of every type that may be stored; torch counts a whole byte for each element of its packed ones."""

Shape = tuple[int, ...]


@cache
def _numpy() -> Mapping[str, np.dtype]:
    """Return the numpy types by code; `ml_dtypes` is imported by the first who reads values."""
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
    """Return the numpy type for reading: the real one, or U8 for packed types (F4, F6) and for bare bits."""
    return _numpy().get(code, np.dtype("u1"))


@cache
def _codes() -> Mapping[np.dtype, str]:
    return {dtype: code for code, dtype in reversed(list(_numpy().items()))}


def is_scalar(value: object) -> bool:
    """Tell whether something is one of numpy's scalars; numpy is not imported for that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def scalar(data: bytes, code: str) -> np.generic:
    """Return the numpy scalar of these bytes."""
    found: np.generic = np.frombuffer(data, numpy_dtype(code))[0]
    return found


def code_of(dtype: np.dtype) -> str:
    """Return the code of a numpy type.

    Raises:
        KeyError: where there is none.
    """
    return _codes()[dtype]


def stored_number(data: bytes, code: str) -> float:
    """Return the number that the bytes of one element mean, such as an optimizer's step; integers stay exact."""
    value: float = scalar(data, code).item()
    return value


PACKED = {"F4": 2}
"""Codes of which torch counts several elements as one, along the last dim."""


def logical(counts: Shape, code: str) -> Shape:
    """Return torch's counts along each dim as ours: elements, also of packed types."""
    packed = PACKED.get(code, 1)
    return counts if packed == 1 or not counts else (*counts[:-1], counts[-1] * packed)


def packed_width(code: str, width: int) -> int:
    """Return the bytes that `width` consecutive elements of one row take.

    Raises:
        Refused: SHAPE_MISMATCH where packed elements do not fill whole bytes.
    """
    bits = ITEM_BITS[code] * width
    if bits % 8:
        raise refuse("SHAPE_MISMATCH", f"{width} elements of {code} do not fill whole bytes")
    return bits // 8


@lru_cache(maxsize=4096)
def nbytes(code: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a dense tensor; see `packed_width`. Cached, as models have few shapes."""
    count = 1
    for size in shape:
        count *= size
    return packed_width(code, count)


class Extent(msgspec.Struct, frozen=True, gc=False):
    """A rectangular chunk of a stored tensor and the place of its bytes."""

    start: tuple[int, ...]
    """First index of the chunk in each dim of the stored tensor."""
    shape: tuple[int, ...]
    """Elements of the chunk along each dim."""
    file: str
    """Name of the file inside the container."""
    offset: int
    """Byte offset in the file of the chunk's first element."""
    strides: tuple[int, ...] | None = None
    """Element strides in the file; None when the chunk is row-major without gaps."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A stored tensor: its dtype, its shape, and the extents that hold it."""

    name: str
    dtype: str
    """A key of `ITEM_BITS`: mostly a safetensors code."""
    shape: tuple[int, ...]
    """Logical elements along each dim."""
    extents: tuple[Extent, ...]
    """Chunks that tile the tensor without holes or overlaps."""

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return nbytes(self.dtype, self.shape)


class Checksum(msgspec.Struct, frozen=True, gc=False):
    """A checksum that a container's format keeps for a range of bytes; it is compared when the range has been read."""

    file: str
    """Name of the file inside the container."""
    offset: int
    """First byte of the range."""
    size: int
    """Bytes of the range."""
    crc32: int
    """Their CRC-32."""
    what: str
    """Description of the range, for errors."""

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.size


class Twin(msgspec.Struct, frozen=True):
    """Two places that must hold the same bytes: a replica on another rank, a step that several files record."""

    first: Entry
    """The tensor that is read."""
    second: Entry
    """Its copy, of the same type and shape."""
    why: str
    """Why they must be equal."""
    replica: bool = False
    """Whether each rank updates its copy by itself, so that the copies may drift apart."""
    rounded: bool = False
    """Whether the copy has lower precision: then it must be what the first rounds to, bit by bit."""
    dates: bool = False
    """Whether it tells that files are of one save: it is compared also where its tensor is not wanted."""


class Recoding(msgspec.Struct, frozen=True):
    """What is done to the values of a container's tensors when they are read."""

    computed: Mapping[str, ComputedTensor] = msgspec.field(default_factory=dict)
    """File that does not exist on disk -> the tensor whose values are computed for it."""
    dtype: str | None = None
    """Safetensors code of the type that plain tensors are cast to; None: they are not cast."""
    stayed: tuple[str, ...] = ()
    """Plain tensors of other types that keep them where others are cast."""
    adapter: Container | None = None
    """The adapter that is merged into the weights."""
    notes: tuple[str, ...] = ()
    """What plans say of it."""
    compact: Mapping[str, Entry] = msgspec.field(default_factory=dict)
    """Scales that are stored in the order of a kernel -> the same in the order of rows, as tables need them."""
    compact_notes: Mapping[str, str] = msgspec.field(default_factory=dict)
    """What the container's metadata would say of their tensors, were they stored so."""


class Container(msgspec.Struct, frozen=True):
    """An opened checkpoint: its catalog, and the storage its bytes are read from."""

    format: str
    """Name of the format, e.g. `safetensors`."""
    path: str
    """The path as the user typed it."""
    storage: Storage
    """Reads byte ranges of the files below."""
    entries: Mapping[str, Entry]
    """Stored tensors by name, in file order."""
    files: Mapping[str, int]
    """Size in bytes of every file that holds tensors or describes them."""
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Everything the container records beside its tensors."""
    carried: tuple[str, ...] = ()
    """Other files of the folder that travel with the model (config, tokenizer)."""
    ignored: tuple[str, ...] = ()
    """Names that are left alone: other tensor files, hidden files, sub-folders, links and special files; see
    `registry`.
    """
    checksums: tuple[Checksum, ...] = ()
    """Checksums that the format itself keeps; `verify` checks them."""
    twins: tuple[Twin, ...] = ()
    """Copies whose equality every conversion checks before it writes."""
    left: Mapping[str, Entry] = msgspec.field(default_factory=dict)
    """Tensors that exist but are not wanted."""
    training: tuple[TrainingItem, ...] = ()
    """State beside model and optimizer; see `TrainingItem`."""
    seals: tuple[Seal, ...] = ()
    """Places where files keep digests of all their bytes; `verify` checks them."""
    config: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """What its own files say of the model, under the keys of a config.json; used where there is none."""
    unread: tuple[Refusal, ...] = ()
    """Why the optimizer's state, or some of it, cannot be read; whatever wants the optimizer is refused for it."""
    uncompared: tuple[Twin, ...] = ()
    """Tensors that are not wanted, with their copies; only `verify` compares them."""
    paths: Mapping[str, tuple[str | int, ...]] = msgspec.field(default_factory=dict)
    """Tensor -> path in the state dict, of those nested in neither the model nor the optimizer; see `State`."""
    recoding: Recoding = Recoding()
    """Which tensors are computed from stored ones, and how."""

    def recoded(
        self, computed: Mapping[str, ComputedTensor], entries: Mapping[str, Entry], **changes: Any
    ) -> Container:
        """Return the container with further computed tensors.

        Args:
            computed: file, of a name that no other has -> the tensor whose values are computed for it.
            entries: all tensors, those among them.
            **changes: of the recoding, and of the container.
        """
        recoding = {name: changes.pop(name) for name in Recoding.__struct_fields__ if name in changes}
        adapter: Container | None = recoding.get("adapter")
        storage = VirtualFiles(self.storage, computed, () if adapter is None else (adapter.storage,))
        recoding["computed"] = {**self.recoding.computed, **computed}
        return replace(self, storage=storage, entries=entries, recoding=replace(self.recoding, **recoding), **changes)

    @property
    def beside(self) -> frozenset[str]:
        """Names of the tensors that are training state."""
        return frozenset([item.name for item in self.training if item.name is not None])

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def without(self, names: Collection[str]) -> Container:
        """Return the container without some tensors: they move to `left`, and their copies are not compared.

        Copies that tell whether all files are of one save are compared nevertheless.
        """
        unwanted = {name: entry for name, entry in self.entries.items() if name in names}
        places = {(extent.file, extent.offset) for entry in unwanted.values() for extent in entry.extents}
        kept = [
            twin.dates or any((each.file, each.offset) not in places for each in twin.first.extents)
            for twin in self.twins
        ]
        return replace(
            self,
            entries={name: entry for name, entry in self.entries.items() if name not in unwanted},
            left={**self.left, **unwanted},
            twins=tuple(itertools.compress(self.twins, kept)),
            uncompared=(
                *self.uncompared,
                *(twin for twin, wanted in zip(self.twins, kept, strict=True) if not wanted),
            ),
        )


class Spec(msgspec.Struct, frozen=True, gc=False):
    """A tensor to be written, as a draft needs it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Fragment(msgspec.Struct, frozen=True):
    """Bytes of a draft that are known before any tensor: a header, an index."""

    file: str
    offset: int
    data: bytes


class Draft(msgspec.Struct, frozen=True):
    """A container that does not exist yet: every tensor already has its place."""

    format: str
    entries: Mapping[str, Entry]
    """Tensors by name, in the order in which their files are written."""
    files: Mapping[str, int]
    """Final size of every file."""
    fragments: tuple[Fragment, ...]
    """Bytes that are known before any tensor is copied."""
    seal: Seal | None = None
    """Space for digests in a file that is the whole checkpoint; the fragment around it is written last."""
    copies: Mapping[str, tuple[Extent, ...]] = msgspec.field(default_factory=dict)
    """Further places of a tensor, by its name: chunks that several ranks hold, each with the same bytes."""
    notes: tuple[str, ...] = ()
    """What a reader of the files must be told, or takes for what the source does not say; one sentence each."""

    def early(self) -> tuple[Fragment, ...]:
        """Return the fragments that are known before any tensor is copied: all but the one with room for digests."""
        return tuple(fragment for fragment in self.fragments if not self._is_sealed(fragment))

    def late(self, hashes: Mapping[str, str]) -> Iterator[Fragment]:
        """Yield the fragment that holds the digests, filled in.

        Args:
            hashes: of every tensor, by name.
        """
        if self.seal is None:
            return
        firsts = {entry.extents[0].offset: hashes[name] for name, entry in self.entries.items() if entry.nbytes}
        ordered = sorted(self.fragments, key=lambda fragment: fragment.offset)
        parts = [(fragment.offset, fragment.data) for fragment in ordered]
        for sealed, (_, data) in zip(ordered, filled(parts, self.seal, firsts), strict=True):
            if self._is_sealed(sealed):
                yield replace(sealed, data=data)

    def with_files(self, files: Mapping[str, bytes]) -> Draft:
        """Return the same draft with further files of known contents."""
        fragments = (Fragment(name, 0, text) for name, text in sorted(files.items()))
        sizes = {name: len(text) for name, text in sorted(files.items())}
        return replace(self, files={**self.files, **sizes}, fragments=(*self.fragments, *fragments))

    @property
    def sealed_first(self) -> bool:
        """Whether the digests precede the tensors: a stream then needs them before it begins."""
        return self.seal is not None and any(
            not fragment.offset and self._is_sealed(fragment) for fragment in self.fragments
        )

    def _is_sealed(self, fragment: Fragment) -> bool:
        return self.seal is not None and fragment.offset <= self.seal.head < fragment.offset + len(fragment.data)


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


NUMBERS = "//numbers"
"""Name of the pseudo-file; as a path it would have an empty part."""
Number = int | float | bool
_I64, _U64 = range(-(2**63), 2**63), range(2**64)


def number(value: Number) -> tuple[str, bytes] | None:
    """Return the safetensors code and the bytes of a Python number: BOOL, I64 (U64 above its range) or F64.

    Returns:
        None for an integer that is too large for either.
    """
    if isinstance(value, bool):
        return "BOOL", bytes([value])
    if isinstance(value, float):
        return "F64", struct.pack("<d", value)
    if value in _I64:
        return "I64", struct.pack("<q", value)
    return ("U64", struct.pack("<Q", value)) if value in _U64 else None


class NumbersInMemory(Overlay):
    """A storage with one further file, which exists in memory only.

    Args:
        below: the real files.
    """

    def __init__(self, below: Storage) -> None:
        super().__init__(below)
        self._numbers = bytearray()

    def over(self, below: Storage) -> NumbersInMemory:
        """Return the same numbers on top of other files."""
        moved = NumbersInMemory(below)
        moved._numbers = self._numbers
        return moved

    def add(self, data: bytes) -> Extent:
        """Keep the bytes of one number and return where they are."""
        extent = Extent((), (), NUMBERS, len(self._numbers))
        self._numbers += data
        return extent

    def add_all(self, other: NumbersInMemory) -> int:
        """Keep the numbers of another storage, too, and return where the first of them is."""
        start = len(self._numbers)
        self._numbers += other._numbers
        return start

    def size(self, name: str) -> int:
        """See `Storage`."""
        return len(self._numbers) if name == NUMBERS else super().size(name)

    def version(self, name: str) -> str:
        """See `Storage`; numbers change only with the file they were read from."""
        return "" if name == NUMBERS else super().version(name)

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """See `Storage`."""
        if name == NUMBERS:
            steps.call(partial(read_each, self._copy, offset, view, width, loops), READING, view.nbytes)
        else:
            self.below.add_read(steps, name, offset, view, width, loops)

    def _copy(self, offset: int, view: memoryview) -> None:
        view.cast("B")[:] = self._numbers[offset : offset + view.nbytes]
