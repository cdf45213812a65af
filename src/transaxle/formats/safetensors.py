"""Safetensors: eight bytes of length, then JSON that says where each tensor is, then the tensors; one file or shards.

- Headers: we parse them ourselves. The library maps the file, keeps the last of two equal names, and stops at the first
  fault with a message that names no file. This parser trusts nothing, reports every fault at once, and reads a header
  of 70,000 tensors in a fraction of a second. What it accepts, the library accepts.
- Parts: torch keeps parts of tensors in such files, with a note in the header on which parts they are. The header lists
  each part as if it were a tensor; the note says where it begins in the whole. The shape of the whole is not recorded:
  it extends as far as the parts do. If the last parts of every tensor are missing, nothing can tell.
- Opening: one file, or the shards that an index names. transformers takes the index at its word: a path in it is
  followed, a tensor that moved to another shard is looked for in the wrong one, a tensor that is missing stays at its
  random initial value. Here the headers say what there is, and an index that says anything else is refused.
- Drafts: every tensor of files that do not exist yet gets its file and its offset before a byte moves. The files are
  those that Hugging Face's own writers make of the same tensors: shards filled in the given order, and in each file the
  widest types first, then by name. So every tensor begins at a multiple of its item size, and a conversion back is byte
  for byte the file it started from.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from operator import attrgetter, le
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from transaxle.errors import LONGEST_NAME, Code, Faults, TransaxleError, refuse
from transaxle.formats.catalog import (
    BITS,
    DIGITS,
    Container,
    Draft,
    Entry,
    Extent,
    Fragment,
    Seal,
    Shape,
    Spec,
    logical,
    nbytes,
    seal_of,
)
from transaxle.formats.registry import SAFETENSORS, sort_sidecars
from transaxle.formats.shards import Sized, has_state, lay_out_shards, read_files
from transaxle.formats.storage.storage import (
    MAX_PAIRS,
    NotJsonError,
    Storage,
    members,
    pairs_in,
    parsed_as,
    repeated,
    too_long,
)
from transaxle.formats.training_state import GROUPS, KEPT, KEPT_RUN, ParamGroup, decode, encode, facts_as_text, facts_in

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


_PART_NOTE = "DCP_SHARDING_INFO"
"""Key of the header's free text."""
PART_NOTES = frozenset({_PART_NOTE, "DCP_VERSION"})
"""Keys of free text that describe parts, and so do not apply to the whole."""


class _PartNote(msgspec.Struct, frozen=True):
    """The note on one part."""

    saved_offsets: list[int]
    """First index of the part in each dim of the whole."""


def part_starts(
    entries: Mapping[str, Entry], metadata: Mapping[str, str], file: str, faults: Faults
) -> dict[str, Shape] | None:
    """Return where each part of one file begins in its tensor.

    Args:
        entries: the tensors that the file's header lists.
        metadata: its free text.
        file: its name, for errors.
        faults: receives the problems.

    Returns:
        Name of the tensor -> first index of the part, in elements; None if the note is missing or malformed.
    """
    text = metadata.get(_PART_NOTE)
    if text is None:
        faults.add(
            "CORRUPT", f"the header has no {_PART_NOTE}: nothing says which parts of the tensors the file holds", file
        )
        return None
    try:
        note = parsed_as(text, dict[str, _PartNote])
    except NotJsonError as error:
        faults.add("CORRUPT", f"the header's {_PART_NOTE} is malformed: {error}", file)
        return None
    first_indices: dict[str, Shape] = {}
    for name, entry in entries.items():
        part_note = note.get(name)
        if (
            part_note is None
            or len(part_note.saved_offsets) != len(entry.shape)
            or any(at < 0 for at in part_note.saved_offsets)
        ):
            faults.add("CORRUPT", f"the header's {_PART_NOTE} does not say where this part begins", file, name)
            continue
        first_indices[name] = logical(tuple(part_note.saved_offsets), entry.dtype)
    return first_indices


def open_safetensors(storage: Storage, path: str, member: str) -> Container:
    """Open one safetensors file, or all shards of an index, with the optimizer's state in its folder beside them.

    The sizes in the index's metadata are not compared with anything: many published ones are wrong, because tied
    weights were counted twice. They are left out of the container's metadata, which holds the headers' free text and
    the other strings of the index; a key on which shards differ appears once a shard, as `<file>:<key>`.

    Args:
        storage: where the files are.
        path: what the user typed.
        member: the file to open: `*.safetensors`, or an index `*.safetensors.index.json`.

    Raises:
        Refused: everything that is wrong with the index and with all headers: CORRUPT, INCOMPLETE for a shard or a
            tensor that is not there, NAME_COLLISION, OVERLAP, PATH_ESCAPE, UNSUPPORTED.
        StorageError: IO.
    """
    read = read_files(storage, member, lambda file: read_header(storage, file))
    _check_whole(read.parts)
    sidecars = sort_sidecars(storage, read.sizes)
    metadata: dict[str, Any] = {**read.index_texts, **_merged(read.parts)}
    if KEPT in metadata and (groups := decode(metadata[KEPT])) is not None:
        del metadata[KEPT]
        metadata[GROUPS] = groups
    if KEPT_RUN in metadata and (facts := facts_in(metadata[KEPT_RUN])):
        del metadata[KEPT_RUN]
        metadata |= facts
    seals = tuple(header.seal for header in read.parts.values() if header.seal is not None)
    return Container(
        SAFETENSORS.name,
        path,
        storage,
        read.entries,
        read.sizes,
        metadata,
        sidecars.carried,
        sidecars.ignored,
        seals=seals,
    )


def _check_whole(headers: Mapping[str, Header]) -> None:
    """Refuse files that hold parts of tensors, saved by torch, under the names of the tensors.

    Raises:
        Refused: INCOMPLETE; CORRUPT for a malformed note.
    """
    faults = Faults()
    for file, header in headers.items():
        if _PART_NOTE in header.metadata:
            for name, start in (part_starts(header.entries, header.metadata, file, faults) or {}).items():
                if any(start):
                    message = f"the file holds only a part of this tensor, from {list(start)} on"
                    faults.add("INCOMPLETE", message, file, name, "Open the folder that torch saved.")
    if faults:
        raise faults.error()


def _merged(headers: Mapping[str, Header]) -> dict[str, str]:
    """Return the free text of all headers; see `open_safetensors` for keys on which they differ.

    Torch's notes on parts are left out: they would be wrong for the same tensors under other names.
    """
    texts_by_file: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for file, header in headers.items():
        for key in [key for key in header.metadata if key not in PART_NOTES]:
            texts_by_file[key][file] = header.metadata[key]
    merged: dict[str, str] = {}
    for key, texts in texts_by_file.items():
        if len(set(texts.values())) == 1:
            merged[key] = next(iter(texts.values()))
        else:
            merged |= {f"{file}:{key}": text for file, text in texts.items()}
    return merged


_STEM = "model"
_RANK = {code: rank for rank, code in enumerate(BITS)}
_WHOLE_BYTES = frozenset(code for code, bits in BITS.items() if bits % 8 == 0)
"""First index of a whole tensor, by its dims."""


def draft(
    tensors: Sequence[Spec],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_size: int | None = None,
    groups: Sequence[ParamGroup] = (),
    run: Mapping[str, Any] | None = None,
    sealed: bool = False,
    stem: str = _STEM,
) -> Draft:
    """Lay out safetensors files.

    Args:
        tensors: what to write; shards are filled in this order.
        metadata: free text for the header of every file.
        shard_size: bytes of tensors in one file; a tensor that is larger gets a file of its own. Without it, or when
            everything fits, there is one file `model.safetensors` and no index.
        groups: settings of the optimizer, as text in the header of the first file.
        run: what the source says of its run, likewise where there is state of an optimizer.
        sealed: leave room for digests in the header; there must be one file.
        stem: how the names of the files begin.

    Raises:
        Refused: for every tensor that has no place: UNSUPPORTED (dtype, dims, a name that is no Unicode),
            NAME_COLLISION, SHAPE_MISMATCH (packed elements that do not fill whole bytes).
    """
    faults = Faults()
    if _are_plain(tensors):  # the usual case, of very many
        sized = list(zip(tensors, map(nbytes, map(_dtype, tensors), map(_shape, tensors)), strict=True))
    else:
        sized, names_so_far = [], set[str]()
        for spec in tensors:
            sized.append((spec, _size(spec, names_so_far, faults)))
            names_so_far.add(spec.name)
    if faults:
        raise faults.error()
    beside = {KEPT: encode(groups)} if groups else {}
    if has_state(map(_name, tensors)) and (facts := facts_as_text(run or {})) is not None:
        beside[KEPT_RUN] = facts
    first_file_metadata = iter([beside])
    room = blank_seal(sum(size > 0 for _, size in sized)) if sealed else {}

    def lay_out(file: str, shard: Iterable[Sized]) -> tuple[list[Entry], list[Fragment], int]:
        return _lay_out(file, shard, {**(metadata or {}), **next(first_file_metadata, {}), **room})

    files = lay_out_shards(SAFETENSORS.name, stem, SAFETENSORS.one_file[0], sized, shard_size, lay_out)
    if not sealed:
        return files
    (header,) = files.fragments
    offsets = [entry.extents[0].offset for entry in files.entries.values() if entry.nbytes]
    return replace(files, seal=room_for_seal(header.data, header.file, offsets))


def _are_plain(tensors: Sequence[Spec]) -> bool:
    """Tell whether nothing can be wrong with any of the tensors, and each of their elements fills whole bytes."""
    names = set(map(_name, tensors))
    kinds = set(zip(map(_dtype, tensors), map(len, map(_shape, tensors)), strict=True))
    has_places = all(dtype in _WHOLE_BYTES and dims <= MAX_DIMS for dtype, dims in kinds)
    return has_places and len(names) == len(tensors) and METADATA not in names and "".join(names).isascii()


def _size(spec: Spec, names_so_far: set[str], faults: Faults) -> int:
    """Return the bytes of a tensor; whatever forbids writing it is a fault."""
    shown = spec.name.encode("utf-8", "backslashreplace").decode()
    if spec.name == METADATA:
        faults.add("NAME_COLLISION", "safetensors uses this name for its metadata", None, shown)
    if spec.name in names_so_far:
        faults.add("NAME_COLLISION", "two tensors have this name", None, shown)
    if spec.name != shown:
        faults.add("UNSUPPORTED", "the name is not valid Unicode", None, shown)
    if len(spec.shape) > MAX_DIMS:
        faults.add("UNSUPPORTED", f"the tensor has {len(spec.shape)} dims, more than {MAX_DIMS}", None, shown)
    if spec.dtype not in BITS:
        hint = "Choose a format that can hold this tensor, or leave it out."
        faults.add("UNSUPPORTED", f"safetensors has no dtype for {spec.dtype}", None, shown, hint)
        return 0
    try:
        return nbytes(spec.dtype, spec.shape)
    except TransaxleError as error:
        faults.add(error.code, error.refusals[0].message, None, shown)
        return 0


def _lay_out(file: str, shard: Iterable[Sized], metadata: Mapping[str, str]) -> tuple[list[Entry], list[Fragment], int]:
    """Give each tensor of one file its offset; also return the file's header and its size."""
    items = list(shard)
    names = [spec.name for spec, _ in items]
    by_type: dict[str, list[Sized]] = {}
    for at in sorted(range(len(items)), key=names.__getitem__):
        item = items[at]
        by_type.setdefault(item[0].dtype, []).append(item)
    specs: list[Spec] = []
    ends = [0]
    for dtype in sorted(by_type, key=_RANK.__getitem__, reverse=True):
        of_type, sizes = zip(*by_type[dtype], strict=True)
        specs += of_type
        ends += [*accumulate(sizes, initial=ends[-1])][1:]
    header = encode_header(zip(specs, ends, ends[1:], strict=False), metadata)
    base, shapes = len(header), list(map(_shape, specs))
    extents = map(
        Extent, map(_ORIGINS.__getitem__, map(len, shapes)), shapes, repeat(file), [base + end for end in ends]
    )
    placed = list(map(Entry, map(_name, specs), map(_dtype, specs), shapes, zip(extents, strict=False)))
    return placed, [Fragment(file, 0, header)], base + ends[-1]


_name, _dtype, _shape = map(attrgetter, ("name", "dtype", "shape"))
