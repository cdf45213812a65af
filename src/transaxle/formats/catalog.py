"""The catalog of a checkpoint: its tensors and the places of their bytes, known before any data is read.

The readers of checkpoint formats, drafts (descriptions of checkpoints that do not exist yet), and conversion plans all
use catalogs. An existing checkpoint (`Container`) and a checkpoint that is not yet written (`Draft`) are described in
the same way: by one entry for each tensor, with extents, which are the tensor's chunks in files. A conversion plan is
therefore a list of copies from one catalog to a second catalog.

A file that is a whole checkpoint has no manifest beside it; it contains digests (hashes) of its own bytes instead: one
digest for each tensor, and one for all bytes outside the tensors. A `Seal` records where the digests are. Digests are
known only after the tensors' bytes are written, so space of a fixed width is reserved for the digests and filled in
last. To other programs the digests are ordinary metadata.

A plain number in a checkpoint's metadata, such as a number in a pickle, becomes a tensor without dims. The bytes of
such numbers are in a pseudo-file in memory, named `NUMBERS`; no real file can have this name.

Dtypes are named by their safetensors codes. A dtype without a safetensors code gets torch's name in capitals
(`COMPLEX32`); formats that cannot store the dtype refuse it. Shapes of F4 and F6 tensors count *elements*, although the
bytes of these tensors are packed along the last dim.
"""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
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
from transaxle.formats.storage.storage import Overlay, Storage, VirtualFiles, as_text

if TYPE_CHECKING:
    from transaxle.errors import Refusal
    from transaxle.formats.training_state import TrainingItem


BITS: dict[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Safetensors dtype code -> bits per element, in the order in which the safetensors library sorts tensors."""

ITEM_BITS: dict[str, int] = BITS | {
    "COMPLEX32": 32, "COMPLEX128": 128, "QINT8": 8, "QUINT8": 8, "QINT32": 32, "QUINT4X2": 8, "QUINT2X4": 8,
    "BITS8": 8, "BITS16": 16, "BITS1X8": 8, "BITS2X4": 8, "BITS4X2": 8,
    "I4": 4, "NF4": 4, "FP4": 4, **{f"{sign}INT{bits}": 8 for sign in ("", "U") for bits in range(1, 8)},
}  # fmt: skip
"""Dtype code -> bits per element, for every dtype that a checkpoint may contain, and for codes of 4 bits that are
stored in words; torch's packed dtypes count as 8 bits.
"""

Shape = tuple[int, ...]


@cache
def _numpy() -> Mapping[str, np.dtype]:
    """Return safetensors dtype code -> numpy dtype; the first call imports `ml_dtypes`."""
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
    """Return the numpy dtype of a safetensors code; it is U8 for packed dtypes (F4, F6) and for plain bytes."""
    return _numpy().get(code, np.dtype("u1"))


@cache
def _codes() -> Mapping[np.dtype, str]:
    return {dtype: code for code, dtype in reversed(list(_numpy().items()))}


def is_scalar(value: object) -> bool:
    """Return whether a value is a numpy scalar, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def scalar(data: bytes, code: str) -> np.generic:
    """Return the bytes `data` as a numpy scalar of the dtype with this safetensors code."""
    value: np.generic = np.frombuffer(data, numpy_dtype(code))[0]
    return value


def code_of(dtype: np.dtype) -> str:
    """Return the safetensors code of a numpy dtype.

    Raises:
        KeyError: if the dtype has no code.
    """
    return _codes()[dtype]


def number_value(data: bytes, code: str) -> float:
    """Return the number that one tensor element's bytes encode, such as an optimizer's step; integers stay exact."""
    value: float = scalar(data, code).item()
    return value


PACKED = {"F4": 2}
"""Packed dtype code -> number of elements along the last dim that torch counts as one."""


def elements_shape(counts: Shape, code: str) -> Shape:
    """Return the shape in elements for a shape as torch counts it; for packed dtypes, torch counts several elements as
    one.
    """
    packed = PACKED.get(code, 1)
    return counts if packed == 1 or not counts else (*counts[:-1], counts[-1] * packed)


def packed_width(code: str, width: int) -> int:
    """Return the number of bytes that `width` consecutive elements of a tensor's row occupy.

    Raises:
        Refused: with the code SHAPE_MISMATCH if packed elements do not fill whole bytes.
    """
    bits = ITEM_BITS[code] * width
    if bits % 8:
        raise refuse("SHAPE_MISMATCH", f"{width} elements of {code} do not fill whole bytes")
    return bits // 8


@lru_cache(maxsize=4096)
def nbytes(code: str, shape: tuple[int, ...]) -> int:
    """Return the size in bytes of a tensor without gaps; packed dtypes count as in `packed_width`. Results are cached,
    because a model has few distinct shapes.
    """
    count = 1
    for size in shape:
        count *= size
    return packed_width(code, count)


class Extent(msgspec.Struct, frozen=True, gc=False):
    """A rectangular chunk of a stored tensor, and the place of the chunk's bytes in a file."""

    start: tuple[int, ...]
    """Index of the chunk's first element in the stored tensor, one number for each dim."""
    shape: tuple[int, ...]
    """Size of the chunk in each dim, in elements."""
    file: str
    """Name of the file that contains the chunk, relative to the checkpoint's folder."""
    offset: int
    """Byte offset of the chunk's first element in the file."""
    strides: tuple[int, ...] | None = None
    """Strides of the chunk in the file, in elements; None if the chunk is row-major without gaps."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A stored tensor: its dtype, its shape, and the extents of its chunks."""

    name: str
    dtype: str
    """Code of the dtype: a key of `ITEM_BITS`, in most cases a safetensors code."""
    shape: tuple[int, ...]
    """Shape of the tensor, always in elements, even if the dtype is packed."""
    extents: tuple[Extent, ...]
    """Chunks that cover the tensor without gaps or overlaps."""

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes when its elements are stored without gaps."""
        return nbytes(self.dtype, self.shape)


class Checksum(msgspec.Struct, frozen=True, gc=False):
    """A checksum that a checkpoint's file contains for a range of the file's bytes; it is checked once the range has
    been read.
    """

    file: str
    """Name of the file that contains the byte range, relative to the checkpoint's folder."""
    offset: int
    """Offset in the file of the byte range's first byte."""
    size: int
    """Size of the byte range, in bytes."""
    crc32: int
    """CRC-32 of the bytes in the range."""
    what: str
    """Description of the byte range for error messages, such as the name of an archive's record."""

    @property
    def end(self) -> int:
        """Return the offset in the file after the byte range's last byte."""
        return self.offset + self.size


class Twin(msgspec.Struct, frozen=True):
    """Two stored tensors that must be equal, such as a tensor and its replica on a second rank, or a step number in
    several files.
    """

    first: Entry
    """The tensor that conversions read; the tensor `second` is only compared with it."""
    second: Entry
    """The tensor that is only compared; it has the dtype and shape of `first`."""
    why: str
    """Reason for which the two tensors must be equal, for error messages."""
    replica: bool = False
    """Whether the two tensors are replicas that ranks update independently, so that their values may have drifted
    apart."""
    rounded: bool = False
    """Whether `second` has lower precision; it must then equal, bit by bit, the tensor `first` after rounding."""
    dates: bool = False
    """Whether equality of the two tensors proves that two files come from one save; such tensors are compared even if
    nothing else reads them."""


class Recoding(msgspec.Struct, frozen=True):
    """How a view differs from the files: by decoding, by casts, by a merged adapter, or by grafted tensors."""

    computed: Mapping[str, ComputedTensor] = msgspec.field(default_factory=dict)
    """Name of a virtual file -> the computation that produces the file's values."""
    dtype: str | None = None
    """Safetensors code of the dtype to which plain tensors are cast; None means no cast."""
    stayed: tuple[str, ...] = ()
    """Names of the plain tensors that keep their dtype although all other plain tensors are cast."""
    additional: Mapping[str, Container] = msgspec.field(default_factory=dict)
    """Role -> checkpoint from which tensors are computed too: an `adapter` that is merged into the weights, or a
    `base` from which tensors are grafted."""
    grafted: frozenset[str] = frozenset()
    """Names of the tensors, without buffer suffixes, whose values come from the `base`."""
    grafted_files: tuple[str, ...] = ()
    """Names of the files without tensors, such as those of a tokenizer, that come from the `base`."""
    base_checksum: str = ""
    """Checksum of the manifest of the `base`; empty if no valid manifest describes it."""
    notes: tuple[str, ...] = ()
    """Sentences about the decoding, casts and merges, which are shown together with a conversion plan."""
    compact: Mapping[str, Entry] = msgspec.field(default_factory=dict)
    """Name of a scales tensor that is stored in a kernel's element order -> entry of the same scales in row-major
    order."""
    compact_notes: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Name of each tensor in `compact` -> metadata that describes the tensor in row-major order."""
    checks: tuple[Callable[[bool], Refusal | None], ...] = ()
    """Functions that return the refusal of a tensor whose restated values are not those in the files; the argument
    tells whether to count all such values."""
    encodings: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Encoding in the files -> encoding in which all tensors of this encoding are shown."""
    configs: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)
    """Name of a config file -> its content in the files, if the shown config describes restated tensors."""
    restated: str = ""
    """Convention in which tensors were restated; empty if they were not."""

    @property
    def base(self) -> str:
        """Path of the checkpoint from which tensors are grafted, as the user typed it; empty if none are."""
        return as_text(self.additional["base"].path) if self.grafted else ""


class Container(msgspec.Struct, frozen=True):
    """An opened checkpoint: its catalog of tensors, and the storage that reads its files."""

    format: str
    """Name of the checkpoint's format, such as `safetensors`."""
    path: str
    """Path of the checkpoint as the user typed it, followed by `inside`."""
    storage: Storage
    """The storage that reads byte ranges of `files`."""
    entries: Mapping[str, Entry]
    """Tensor name -> catalog entry, in the order of the files."""
    files: Mapping[str, int]
    """File name -> size in bytes, for each file that contains tensors or their description."""
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Metadata of the checkpoint, in the structure that the format prescribes."""
    carried: tuple[str, ...] = ()
    """Names of further files of the folder that conversions copy along with the model, such as its config and its
    tokenizer."""
    ignored: tuple[str, ...] = ()
    """Names in the folder that conversions neither read nor copy: unrelated tensor files, hidden files, sub-folders,
    links and special files; see `registry`.
    """
    checksums: tuple[Checksum, ...] = ()
    """Checksums that the checkpoint's files contain; `verify` checks them."""
    twins: tuple[Twin, ...] = ()
    """Pairs of tensors that must be equal; each conversion compares the two tensors of a pair before it writes."""
    left: Mapping[str, Entry] = msgspec.field(default_factory=dict)
    """Tensor name -> catalog entry, for tensors that the files contain but that were not selected."""
    training: tuple[TrainingItem, ...] = ()
    """Training state other than the model and the optimizer, such as learning rate schedules."""
    seals: tuple[Seal, ...] = ()
    """Where files contain digests of their own bytes; `verify` checks these digests."""
    config: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Facts about the model from the checkpoint's own files, with the keys of a config.json; used if there is no
    config.json."""
    unread: tuple[Refusal, ...] = ()
    """Refusals of optimizer state that cannot be read; they are raised if the user requests the optimizer."""
    uncompared: tuple[Twin, ...] = ()
    """Pairs of equal tensors that were not selected; only `verify` compares the two tensors of such a pair."""
    paths: Mapping[str, tuple[str | int, ...]] = msgspec.field(default_factory=dict)
    """Tensor name -> key path in the state dict, for tensors outside the dicts of the model and the optimizer; see
    `State`."""
    whole: frozenset[str] | None = None
    """Names of the tensors that every rank of the job that saved them had whole, such as buffers; None if unknown."""
    in_order: bool = False
    """Whether the parameter groups list their parameters in the order in which the optimizer numbers them."""
    recoding: Recoding = Recoding()
    """Which tensors are computed, and from which stored tensors."""
    inside: str = ""
    """Path of the checkpoint in the folder that the user gave, if it was found in a folder of a trainer there; empty if
    the user gave the checkpoint itself. The field `path` ends with it."""
    config_path: str = ""
    """Path of the config.json in a folder above the checkpoint that is used as the checkpoint's own; empty without."""
    implied: bool = False
    """Whether there are no files: the tensors are all that the config implies."""
    spreads: Mapping[str, Hashable] = msgspec.field(default_factory=dict)
    """Tensor name -> how ranks share it, in files of ranks; a parameter and its optimizer state are shared alike."""

    def with_computed(
        self, computed: Mapping[str, ComputedTensor], entries: Mapping[str, Entry], **changes: Any
    ) -> Container:
        """Return the opened checkpoint with further computed tensors.

        Args:
            computed: maps the name of a virtual file, unique in the checkpoint, to the computation of the file's
                values.
            entries: all tensors of the returned checkpoint, including the computed tensors.
            **changes: new values of fields of `Recoding` and `Container`.
        """
        recoding = {name: changes.pop(name) for name in Recoding.__struct_fields__ if name in changes}
        additional: Mapping[str, Container] = recoding.get("additional", {})
        storage = VirtualFiles(self.storage, computed, [container.storage for container in additional.values()])
        recoding["additional"] = {**self.recoding.additional, **additional}
        recoding["computed"] = {**self.recoding.computed, **computed}
        return replace(self, storage=storage, entries=entries, recoding=replace(self.recoding, **recoding), **changes)

    @property
    def beside(self) -> frozenset[str]:
        """Names of the tensors that belong to the training state in `training`."""
        return frozenset([item.name for item in self.training if item.name is not None])

    @property
    def nbytes(self) -> int:
        """Return the total size in bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def without(self, names: Collection[str]) -> Container:
        """Return the opened checkpoint without some tensors: these tensors move to `left`, and the pairs of equal
        tensors that contain them (twins) to `uncompared`.

        Pairs of equal tensors that prove that all files come from one save (`dates`) are still compared.
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
    """Bytes of a new file that do not depend on tensor values, such as the bytes of a header or an index."""

    file: str
    offset: int
    data: bytes


class Draft(msgspec.Struct, frozen=True):
    """The layout of a checkpoint that is not written yet: the place of each tensor in the checkpoint's files."""

    format: str
    entries: Mapping[str, Entry]
    """Tensor name -> catalog entry of a tensor to write, in the order of writing."""
    files: Mapping[str, int]
    """File name -> final size of the file in bytes."""
    fragments: tuple[Fragment, ...]
    """All bytes of the files that are outside the tensors."""
    seal: Seal | None = None
    """Space for digests in a checkpoint that is a single file; the fragment with the digests is written last. None
    means that the checkpoint gets no digests."""
    copies: Mapping[str, tuple[Extent, ...]] = msgspec.field(default_factory=dict)
    """Tensor name -> further places of the tensor's bytes, for chunks that several ranks store."""
    owners: Mapping[str, Mapping[str, int]] = msgspec.field(default_factory=dict)
    """File that one rank of a job reads -> the rank's index in each dim of the job's mesh, such as `tp`. Empty if each
    rank reads what it needs from any file.
    """
    notes: tuple[str, ...] = ()
    """Sentences for the user: which settings other programs need to read the files, and what was assumed where the
    source checkpoint lacks information."""

    def early_fragments(self) -> tuple[Fragment, ...]:
        """Return the fragments that can be written before any tensor: all fragments except the one with space for
        digests.
        """
        return tuple(fragment for fragment in self.fragments if not self._contains_digests(fragment))

    def late_fragments(self, hashes: Mapping[str, str]) -> Iterator[Fragment]:
        """Yield the fragment that contains the digests, with all digests filled in.

        Args:
            hashes: maps the name of each tensor to the hash of the tensor's bytes.
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
        """Return the draft with further files; `files` maps each file name to the file's contents."""
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
    """Where a file's digests are, as byte offsets in the file."""

    file: str
    """Name of the file that contains the digests, relative to the checkpoint's folder."""
    head: int
    """Offset of the digest of all bytes outside the tensors; this digest is computed with zeros at its own place in the
    file."""
    places: Mapping[int, int]
    """Offset of each tensor that is not empty -> offset of the tensor's digest."""


def make_seal(file: str, head: int, begin: int, offsets: Iterable[int]) -> Seal:
    """Return the `Seal` (where the digests are) of a file in which the digests of tensors are contiguous.

    Args:
        file: name of the file with the digests.
        head: offset of the digest of all bytes outside the tensors.
        begin: offset of the first tensor's digest.
        offsets: offsets of the tensors that are not empty, in the order of their digests.
    """
    return Seal(file, head, {offset: begin + number * DIGITS for number, offset in enumerate(offsets)})


def read_digest(storage: Storage, seal: Seal, place: int) -> str:
    """Read the digest that is stored at the offset `place` of the file."""
    return storage.read(seal.file, place, DIGITS).decode("latin-1")


def digest_outside(storage: Storage, seal: Seal, tensors: Iterable[tuple[int, int]]) -> str:
    """Compute the digest of all bytes of a file outside its tensors.

    Args:
        storage: storage that reads the file.
        seal: where the digests are in the file.
        tensors: `(first byte, offset after the last byte)` of each tensor in the file.
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
    """Return the digest of `(offset, bytes)` pairs, with zeros at `head`, where the digest itself is stored."""
    state = xxhash.xxh3_128()
    for offset, data in parts:
        first, last = max(head, offset), min(head + DIGITS, offset + len(data))
        if first < last:
            data = data[: first - offset] + _BLANK[: last - first] + data[last - offset :]
        state.update(data)
    return state.hexdigest()


def fill_digests(parts: Iterable[tuple[int, bytes]], seal: Seal, hashes: Mapping[int, str]) -> list[tuple[int, bytes]]:
    """Return the bytes outside the tensors with all digests filled in.

    Args:
        parts: `(offset, bytes)` of all bytes outside the tensors, in file order.
        seal: where the digests are in the file.
        hashes: maps the offset of each tensor in the file to the tensor's digest.
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
"""Name of the pseudo-file in memory for numbers; no real file can have it, because one component of the path is
empty.
"""
Number = int | float | bool
_I64, _U64 = range(-(2**63), 2**63), range(2**64)


def number(value: Number) -> tuple[str, bytes] | None:
    """Return the safetensors code and the bytes of a Python number: BOOL for a bool, I64 for an int (U64 above the
    range of I64), F64 for a float.

    Returns:
        The result is None for an integer that is too large for both I64 and U64.
    """
    if isinstance(value, bool):
        return "BOOL", bytes([value])
    if isinstance(value, float):
        return "F64", struct.pack("<d", value)
    if value in _I64:
        return "I64", struct.pack("<q", value)
    return ("U64", struct.pack("<Q", value)) if value in _U64 else None


class NumbersInMemory(Overlay):
    """A storage that adds to real files one file in memory, `NUMBERS`, with the bytes of numbers.

    Args:
        below: the storage that reads the real files.
    """

    def __init__(self, below: Storage) -> None:
        super().__init__(below)
        self._numbers = bytearray()

    def moved_onto(self, below: Storage) -> NumbersInMemory:
        """Return a `NumbersInMemory` on top of the storage `below`, with the numbers of this one."""
        moved = NumbersInMemory(below)
        moved._numbers = self._numbers
        return moved

    def add(self, data: bytes) -> Extent:
        """Append the bytes of one number to `NUMBERS`, and return their extent."""
        extent = Extent((), (), NUMBERS, len(self._numbers))
        self._numbers += data
        return extent

    def add_all(self, other: NumbersInMemory) -> int:
        """Append the numbers of a second `NumbersInMemory`, and return the new offset of the first appended number."""
        start = len(self._numbers)
        self._numbers += other._numbers
        return start

    def size(self, name: str) -> int:
        """Return the size of a real file or of `NUMBERS`; see `Storage.size`."""
        return len(self._numbers) if name == NUMBERS else super().size(name)

    def version(self, name: str) -> str:
        """Return a file's version (see `Storage.version`); `NUMBERS` has no version, because its numbers come from a
        real file.
        """
        return "" if name == NUMBERS else super().version(name)

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Add a read of a real file or of `NUMBERS` to the steps; see `Storage.add_read`."""
        if name == NUMBERS:
            steps.call(partial(read_strided, self._copy, offset, view, width, loops), READING, view.nbytes)
        else:
            self.below.add_read(steps, name, offset, view, width, loops)

    def _copy(self, offset: int, view: memoryview) -> None:
        view.cast("B")[:] = self._numbers[offset : offset + view.nbytes]
