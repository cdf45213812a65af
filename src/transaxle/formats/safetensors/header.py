"""The header of a safetensors file: eight bytes of length, then JSON that says where each tensor is.

We parse it ourselves: the library maps the file, keeps the last of two equal names, and stops at the first fault with a
message that names no file. This parser trusts nothing, reports every fault at once, and reads a header of 70,000
tensors in a fraction of a second. What it accepts, the library accepts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import le
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from transaxle.errors import LONGEST_NAME, Code, Faults, refuse
from transaxle.formats.catalog.catalog import Entry, Extent, Spec
from transaxle.formats.catalog.seal import DIGITS, Seal, seal_of
from transaxle.formats.catalog.strict_json import MAX_PAIRS, NotJsonError, members, pairs_in, repeated
from transaxle.formats.dtype import BITS
from transaxle.formats.storage.storage import Storage, too_long

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

METADATA = "__metadata__"
"""The one key of a header that is not a tensor."""
SEALED = ("transaxle.digest", "transaxle.digests")
"""Keys of the metadata: the digest of all bytes outside the tensors, and the tensors' digests in file order. They are
two, so that damage to one name does not make a sealed file look like an ordinary one.
"""
LENGTH_BYTES = 8
MAX_HEADER = 100_000_000
"""Cap on the header's bytes, the library's own."""
MAX_NOTES = 100_000
"""Cap on the keys of `__metadata__`."""
MAX_DIMS = 64
"""Most dims that numpy supports."""
ALIGNMENT = 8
"""The data begins at a multiple of this."""

_MAX_COUNT = 2**63 - 1
_MAX_ITEM_BYTES = max(BITS.values()) // 8
_ORIGINS = tuple((0,) * dims for dims in range(MAX_DIMS + 1))
_LFS_POINTER = b"version https://git-lfs"
_AGAIN = "Copy or download the file again."

Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]


class _TensorInfo(msgspec.Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    """A header's entry for one tensor."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


_info = msgspec.json.Decoder(_TensorInfo)
_metadata: msgspec.json.Decoder[dict[str, str] | None] = msgspec.json.Decoder(dict[str, str] | None)
_INFO_FIELDS = len(_TensorInfo.__struct_fields__)


class Header(msgspec.Struct, frozen=True):
    """The contents of one safetensors file."""

    entries: Mapping[str, Entry]
    """Tensors by name, in the order of their bytes; each has one extent, with its offset from the file's beginning."""
    metadata: Mapping[str, str]
    """The free text under `__metadata__`."""
    size: int
    """Bytes before the data: the length field and the JSON."""
    seal: Seal | None = None
    """Where it keeps digests of the file's bytes; their text is not in the metadata."""


def read_header(storage: Storage, file: str, begin: int = 0) -> Header:
    """Read the header of one file, or of the safetensors data that a file ends with.

    Args:
        storage: where the file is.
        file: its name.
        begin: first byte of the header in the file, at most the file's size.

    Raises:
        Refused: CORRUPT, NAME_COLLISION, OVERLAP, UNSUPPORTED: every problem found, each with file and tensor.
        StorageError: IO.
    """
    size = storage.size(file) - begin
    start = storage.read(file, begin, min(size, len(_LFS_POINTER)))
    if start == _LFS_POINTER:
        hint = "This is a Git LFS pointer, not the file itself: run `git lfs pull`."
        raise refuse("CORRUPT", "not a safetensors file", file=file, hint=hint)
    if size < LENGTH_BYTES:
        message = (
            f"the file is truncated: its {size} bytes are shorter than the {LENGTH_BYTES} bytes of the header's length"
        )
        raise refuse("CORRUPT", message, file=file, hint=_AGAIN)
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > MAX_HEADER:
        message = f"the header claims to have {length} bytes, more than the {MAX_HEADER} that the format allows"
        raise refuse("CORRUPT", message, file=file, hint="Check that this is a safetensors file.")
    if LENGTH_BYTES + length > size:
        message = f"the file is truncated: a header of {length} bytes does not fit into {size} bytes"
        raise refuse("CORRUPT", message, file=file, hint=_AGAIN)
    text = storage.read(file, begin + LENGTH_BYTES, length)
    return parse_header(text, file, size - LENGTH_BYTES - length, begin)


def parse_header(text: bytes, file: str, data_size: int, begin: int = 0) -> Header:
    """Parse the JSON of a header.

    Args:
        text: the JSON, without the length field.
        file: name used in errors and extents.
        data_size: bytes of the file that follow the header.
        begin: first byte of the header in the file.

    Raises:
        Refused: CORRUPT, NAME_COLLISION, OVERLAP, UNSUPPORTED: every problem found, each with file and tensor.
    """
    pair_count = pairs_in(text)
    if pair_count > MAX_PAIRS:
        raise refuse("UNSUPPORTED", f"the header has {pair_count} keys, more than {MAX_PAIRS}", file=file)
    try:
        top = members(text)
    except NotJsonError as error:
        raise refuse("CORRUPT", f"the header is not a JSON object: {error}", file=file) from error
    faults = Faults()
    top_level_count = len(top)
    metadata = _metadata_of(top, pair_count, file, faults)
    rows = _HeaderRows(file, faults)
    for name, raw in top.items():
        rows.add(name, raw)
        if faults.full:
            break
    # Every decoded key accounts for one colon: more colons mean that a key occurs twice.
    if not faults and pair_count != top_level_count + len(metadata) + _INFO_FIELDS * len(rows.names):
        _add_repeated(text, file, faults)
    entries_are_valid = not faults
    top.clear()
    layout = None if rows.are_in_order(data_size) else rows.layout()
    size = LENGTH_BYTES + len(text)
    entries = rows.entries(range(len(rows.names)) if layout is None else layout.order.tolist(), begin + size)
    if entries_are_valid and layout is not None:
        _add_layout(rows, layout, data_size, faults)
    if faults:
        raise faults.error()
    seal = _seal(text, metadata, entries, file, begin)
    free_text = {key: value for key, value in metadata.items() if key not in SEALED}
    return Header(entries, free_text, size, seal)


def _seal(text: bytes, metadata: Mapping[str, str], entries: Mapping[str, Entry], file: str, begin: int) -> Seal | None:
    """Return where a header keeps digests; None if it keeps none.

    Raises:
        Refused: CORRUPT where some of them are missing.
    """
    digest_texts = [metadata.get(key) for key in SEALED]
    if digest_texts == [None, None]:
        return None
    offsets = [entry.extents[0].offset for entry in entries.values() if entry.nbytes]
    places = [_value_at(text, key) for key in SEALED]
    for digest_text, at, count in zip(digest_texts, places, (1, len(offsets)), strict=True):
        if (
            digest_text is None
            or at is None
            or len(digest_text) != count * DIGITS
            or text[at : at + len(digest_text)] != digest_text.encode()
        ):
            raise refuse("CORRUPT", "the digests in the header are incomplete", file=file, hint=_AGAIN)
    head, first = (begin + LENGTH_BYTES + at for at in places if at is not None)
    return seal_of(file, head, first, offsets)


def _value_at(text: bytes, key: str) -> int | None:
    """Return where the value of a key of the metadata begins in a header as this module writes it."""
    key_text = f'"{key}":"'.encode()
    at = text.find(key_text)
    while at > 0 and text[at - 1 : at] == b"\\":
        at = text.find(key_text, at + 1)
    return at + len(key_text) if at >= 0 else None


def room_for_seal(header: bytes, file: str, offsets: Sequence[int]) -> Seal:
    """Return the seal of a header that was written with `blank_seal` among its metadata.

    Args:
        header: as `encode_header` gives it.
        file: name of the file.
        offsets: first bytes in the file of the tensors that have bytes, in file order.
    """
    head, first = (_value_at(header, key) for key in SEALED)
    assert head is not None
    assert first is not None
    return seal_of(file, head, first, offsets)


def blank_seal(count: int) -> dict[str, str]:
    """Return the metadata that leaves room for the digests of so many tensors, those that have bytes."""
    return dict(zip(SEALED, ("0" * DIGITS, "0" * DIGITS * count), strict=True))


def encode_header(tensors: Iterable[tuple[Spec, int, int]], metadata: Mapping[str, str]) -> bytes:
    """Write a header: length field, JSON, and spaces up to a multiple of eight bytes.

    Args:
        tensors: what the file holds, and the first byte of each and the one after its last, counted from the end of
            the header; in the order of their bytes.
        metadata: free text; left out when empty.

    Raises:
        Refused: UNSUPPORTED for names or metadata that are no Unicode, and for a header over 100 MB.
    """
    document: dict[str, object] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    for spec, begin, end in tensors:
        document[spec.name] = _TensorInfo(spec.dtype, spec.shape, (begin, end))
    try:
        text = msgspec.json.encode(document)
    except UnicodeEncodeError as error:
        message = f"{error.object!r} is not valid Unicode; safetensors cannot hold it"
        raise refuse("UNSUPPORTED", message) from error
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        message = f"the header would have {len(text)} bytes, more than the {MAX_HEADER} that the format allows"
        raise refuse("UNSUPPORTED", message, hint="Write more, smaller files (--shard-size).")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _metadata_of(top: dict[str, msgspec.Raw], pair_count: int, file: str, faults: Faults) -> dict[str, str]:
    """Take `__metadata__` out of the header's members; `said` are the keys of the whole header, at every level."""
    raw = top.pop(METADATA, None)
    if raw is None:
        return {}
    if pair_count > MAX_NOTES and pairs_in(bytes(raw)) > MAX_NOTES:
        faults.add("UNSUPPORTED", f"{METADATA} has more than {MAX_NOTES:,} keys", file)
        return {}
    try:
        return _metadata.decode(raw) or {}
    except (msgspec.MsgspecError, RecursionError) as error:
        faults.add("CORRUPT", f"{METADATA} must map strings to strings: {error}", file)
        return {}


def _add_repeated(text: bytes, file: str, faults: Faults) -> None:
    for name, *keys in repeated(text):
        if not keys:
            faults.add("NAME_COLLISION", "the header lists this name twice", file, name)
        else:
            faults.add("CORRUPT", f"the header gives the key {keys[-1]!r} twice", file, name)


class _CheckedShape(NamedTuple):
    """What is computed once for all tensors of one shape."""

    dims: tuple[int, ...]
    start: tuple[int, ...]
    """As many zeros: where a tensor's only extent begins."""
    elements: int
    fault: tuple[Code, str] | None


def _checked_shape(dims: tuple[int, ...]) -> _CheckedShape:
    if len(dims) > MAX_DIMS:
        return _CheckedShape(
            (), (), 0, ("UNSUPPORTED", f"the tensor has more than the {MAX_DIMS} dims that numpy supports")
        )
    if math.prod(size or 1 for size in dims) * _MAX_ITEM_BYTES > _MAX_COUNT:
        return _CheckedShape(
            dims, (), 0, ("CORRUPT", f"the shape {list(dims)} overflows: no file holds so many elements")
        )
    return _CheckedShape(dims, _ORIGINS[len(dims)], math.prod(dims), None)


class _DataLayout(NamedTuple):
    """Byte ranges of the tensors of one file, counted from its data."""

    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    order: npt.NDArray[np.intp]
    """The tensors sorted by `begins`, then `ends`."""


class _HeaderRows:
    """The entries of a header while it is parsed, in columns: a header may have a million of them."""

    def __init__(self, file: str, faults: Faults) -> None:
        self.file = file
        self.names: list[str] = []
        self._faults = faults
        self._dtypes: list[str] = []
        self._shapes: list[_CheckedShape] = []
        self._offsets = array("q")
        # A hundred thousand tensors have a few dozen shapes: each is checked and kept once.
        self._known: dict[tuple[int, ...], _CheckedShape] = {}

    def add(self, name: str, raw: msgspec.Raw) -> None:
        """Decode one entry; a malformed one becomes a fault, not a row."""
        if len(name) > LONGEST_NAME:
            self._faults.add(*too_long(name), self.file, name)
            return
        try:
            info = _info.decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._faults.add("CORRUPT", f"the header's entry is malformed: {error}", self.file, name)
            return
        key = tuple(info.shape[: MAX_DIMS + 1])
        shape = self._known.get(key)
        if shape is None:
            shape = self._known[key] = _checked_shape(key)
        self.names.append(name)
        self._dtypes.append(info.dtype)
        self._shapes.append(shape)
        self._offsets.extend(info.data_offsets)

    def are_in_order(self, data_size: int) -> bool:
        """Tell whether the tensors, as they are listed, tile the data, which nearly all headers' do."""
        begins, ends = self._offsets[::2], self._offsets[1::2]
        return array("q", (0, *ends)) == array("q", (*begins, data_size)) and all(map(le, begins, ends))

    def layout(self) -> _DataLayout:
        import numpy as np

        pairs = np.array(self._offsets, np.int64).reshape(-1, 2)
        begins, ends = pairs[:, 0], pairs[:, 1]
        return _DataLayout(begins, ends, np.lexsort((ends, begins)))

    def entries(self, order: Sequence[int], base: int) -> dict[str, Entry]:
        """Build the catalog, and check that each dtype and shape fills exactly its bytes."""
        entries: dict[str, Entry] = {}
        codes = {code: code for code in BITS}
        file, faults = self.file, self._faults
        for at in order:
            name, shape = self.names[at], self._shapes[at]
            begin, end = self._offsets[2 * at : 2 * at + 2]
            code = codes.get(self._dtypes[at])
            if code is None:
                hint = f"Known are {', '.join(BITS)}."
                faults.add("UNSUPPORTED", f"{self._dtypes[at]!r} is not a known safetensors dtype", file, name, hint)
            elif shape.fault:
                faults.add(*shape.fault, file, name)
            elif shape.elements * BITS[code] != (end - begin) * 8:
                faults.add("CORRUPT", _misfit(code, shape, begin, end), file, name)
            else:
                extent = Extent(shape.start, shape.dims, file, base + begin)
                entries[name] = Entry(name, code, shape.dims, (extent,))
        return entries


def _misfit(code: str, shape: _CheckedShape, begin: int, end: int) -> str:
    whole_bytes, rest_bits = divmod(shape.elements * BITS[code], 8)
    takes = f"{whole_bytes} bytes and {rest_bits} bits" if rest_bits else f"{whole_bytes} bytes"
    return f"{code} {list(shape.dims)} takes {takes}, but data_offsets [{begin}, {end}] give it {end - begin}"


def _add_layout(rows: _HeaderRows, layout: _DataLayout, data_size: int, faults: Faults) -> None:
    """Check that the tensors tile the data: from its first byte to its last, no gaps, no overlaps."""
    import numpy as np

    begins, ends, order = layout
    file, names = rows.file, rows.names
    if (ends < begins).any():
        return  # their sizes have been refused, and the rest cannot be judged
    starts, stops = begins[order], ends[order]
    covered = np.concatenate((np.zeros(1, np.int64), np.maximum.accumulate(stops)))
    for at in np.flatnonzero(starts != covered[:-1]).tolist():
        start, stop, reached, name = int(starts[at]), int(stops[at]), int(covered[at]), names[order[at]]
        if start > reached:
            faults.add(
                "CORRUPT",
                f"bytes {reached} to {start} of the data, before this tensor, belong to no tensor",
                file,
                name,
            )
        else:
            other = names[order[int(np.argmax(stops[:at] == reached))]]
            message = f"data_offsets [{start}, {stop}] overlap {other!r}, which ends at {reached}"
            faults.add("OVERLAP", message, file, name)
        if faults.full:
            return
    needed = int(covered[-1])
    if needed > data_size:
        name = names[order[int(np.argmax(stops > data_size))]]
        message = f"the file is truncated: its tensors take {needed} bytes, but there are only {data_size}"
        faults.add("CORRUPT", message, file, name, _AGAIN)
    elif needed < data_size:
        faults.add("CORRUPT", f"the last {data_size - needed} bytes of the file belong to no tensor", file)
