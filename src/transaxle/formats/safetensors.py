"""The safetensors format, as one file or several shard files. A file begins with eight bytes that state the length of
the header; a JSON header with the place of each tensor follows, then the tensors.

- Headers are parsed by this module, not by the safetensors library. The library maps the file into memory, keeps the
  last of two equal names, and stops at the first fault with a message that names no file. The parser in this module
  checks every field, reports all faults together, and parses a header of 70,000 tensors in a fraction of a second. The
  library accepts every header that this parser accepts.

- Chunks of tensors: torch can save chunks of tensors in such files, with a note about them in the header. The header
  lists each chunk as if it were a tensor; the note states where the chunk begins in the whole tensor. The shape of the
  whole tensor is not recorded: the tensor extends as far as its chunks. A checkpoint in which the last chunk of every
  tensor is missing can therefore not be recognised as incomplete.

- Opening: a checkpoint is one file, or the shard files that an index names. The library transformers trusts the index:
  it follows any path in the index, looks in the wrong shard file for a tensor that was moved, and leaves a missing
  tensor at its random initial value. Transaxle takes the tensors from the headers, and refuses an index that
  contradicts the headers.

- Drafts: each tensor to be written is assigned a file and an offset before any byte moves. The files equal those that
  Hugging Face's writers would write: tensors are distributed to shard files in the given order, and each file is sorted
  by dtype, the widest first, then by name. As a result, each tensor begins at a multiple of the size of its elements,
  and converting a file to another format and back restores the original bytes.
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
    elements_shape,
    make_seal,
    nbytes,
)
from transaxle.formats.registry import SAFETENSORS, sort_sidecars
from transaxle.formats.shards import Sized, has_state, lay_out_shards, read_files
from transaxle.formats.storage.storage import (
    MAX_PAIRS,
    NotJsonError,
    Storage,
    members,
    pairs_in,
    parse_json_as,
    repeated_keys,
    too_long,
)
from transaxle.formats.training_state import GROUPS, KEPT, KEPT_RUN, ParamGroup, decode, encode, facts_as_text, facts_in

METADATA = "__metadata__"
"""The only key of a header that does not name a tensor."""
SEALED = ("transaxle.digest", "transaxle.digests")
"""Metadata keys: the first for the digest (hash) of all bytes outside the tensors, the second for the tensors' digests
in file order. With two keys, damage to one key does not make a file with digests look like a file without digests.
"""
LENGTH_BYTES = 8
MAX_HEADER = 100_000_000
"""Maximum size of a header in bytes, as in the safetensors library."""
MAX_NOTES = 100_000
"""Maximum number of keys under `__metadata__`."""
MAX_DIMS = 64
"""Maximum number of dims of a numpy array."""
ALIGNMENT = 8
"""The tensor data of a file begins at a multiple of this number of bytes."""

_MAX_COUNT = 2**63 - 1
_MAX_ITEM_BYTES = max(BITS.values()) // 8
_ORIGINS = tuple((0,) * dims for dims in range(MAX_DIMS + 1))
_LFS_POINTER = b"version https://git-lfs"
_AGAIN = "Copy or download the file again."

Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]


class _TensorInfo(msgspec.Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    """The JSON entry of one tensor in a header."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


_info = msgspec.json.Decoder(_TensorInfo)
_metadata: msgspec.json.Decoder[dict[str, str] | None] = msgspec.json.Decoder(dict[str, str] | None)
_INFO_FIELDS = len(_TensorInfo.__struct_fields__)


class Header(msgspec.Struct, frozen=True):
    """The parsed header of one safetensors file."""

    entries: Mapping[str, Entry]
    """Tensor name -> catalog entry, in file order; each entry has one extent, with the tensor's offset in the file."""
    metadata: Mapping[str, str]
    """Strings under the header's `__metadata__`, except the digests."""
    size: int
    """Number of bytes before the tensors' data, which are the length field and the JSON."""
    seal: Seal | None = None
    """Where the digests of the file's bytes are; None if the file has no digests."""


def read_header(storage: Storage, file: str, begin: int = 0) -> Header:
    """Read the header of a safetensors file, or of safetensors data at the end of a larger file.

    Args:
        storage: storage that reads the file.
        file: name of the file.
        begin: offset in the file at which the header begins.

    Raises:
        Refused: with every problem of the header, with file and tensor, and the code CORRUPT, NAME_COLLISION, OVERLAP
            or UNSUPPORTED.
        StorageError: with the code IO if the file cannot be read.
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
    """Parse the JSON of a header, and check it.

    Args:
        text: the JSON of the header, without the length field.
        file: name of the file, for extents and error messages.
        data_size: number of bytes in the file after the header.
        begin: offset in the file at which the header begins.

    Raises:
        Refused: with every problem of the header, with file and tensor, and the code CORRUPT, NAME_COLLISION, OVERLAP
            or UNSUPPORTED.
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
    # The text has one colon for each decoded key; more colons mean that a key occurs twice.
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
    """Return where a header contains digests; None if it has no digests.

    Raises:
        Refused: with the code CORRUPT if some of the digests are missing.
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
    return make_seal(file, head, first, offsets)


def _value_at(text: bytes, key: str) -> int | None:
    """Return the offset of a metadata value in a header that this module wrote; None if the header does not contain the
    key.
    """
    key_text = f'"{key}":"'.encode()
    at = text.find(key_text)
    while at > 0 and text[at - 1 : at] == b"\\":
        at = text.find(key_text, at + 1)
    return at + len(key_text) if at >= 0 else None


def seal_from_header(header: bytes, file: str, offsets: Sequence[int]) -> Seal:
    """Return the seal (where the digests are) of a header whose metadata includes `blank_seal`.

    Args:
        header: the bytes that `encode_header` returned.
        file: name of the file.
        offsets: offsets in the file of the tensors that are not empty, in file order.
    """
    head, first = (_value_at(header, key) for key in SEALED)
    assert head is not None
    assert first is not None
    return make_seal(file, head, first, offsets)


def blank_seal(count: int) -> dict[str, str]:
    """Return metadata with space for the digests of `count` tensors; `count` does not include empty tensors."""
    return dict(zip(SEALED, ("0" * DIGITS, "0" * DIGITS * count), strict=True))


def encode_header(tensors: Iterable[tuple[Spec, int, int]], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a header: length field, JSON, and spaces up to a multiple of eight bytes.

    Args:
        tensors: `(tensor, first byte, offset after the last byte)` in file order; offsets count from the end of the
            header.
        metadata: strings for the key `__metadata__`, which is omitted if there are no strings.

    Raises:
        Refused: with the code UNSUPPORTED for names or metadata that are not valid Unicode, and for a header over 100
            MB.
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
    """Remove `__metadata__` from a header's members, and return its value; `pair_count` is the number of keys in the
    header.
    """
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
    for name, *keys in repeated_keys(text):
        if not keys:
            faults.add("NAME_COLLISION", "the header lists this name twice", file, name)
        else:
            faults.add("CORRUPT", f"the header gives the key {keys[-1]!r} twice", file, name)


class _CheckedShape(NamedTuple):
    """A shape that was checked, with values that are computed once for all tensors of this shape."""

    dims: tuple[int, ...]
    start: tuple[int, ...]
    """One zero for each dim, the first index of a tensor's only extent."""
    elements: int
    fault: tuple[Code, str] | None


def _check_shape(dims: tuple[int, ...]) -> _CheckedShape:
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
    """Byte ranges of the tensors of one file, counted from the beginning of the tensor data."""

    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    order: npt.NDArray[np.intp]
    """Indices that sort the tensors by `begins`, then by `ends`."""


class _HeaderRows:
    """The entries of a header while it is parsed, stored in columns because there may be a million entries."""

    def __init__(self, file: str, faults: Faults) -> None:
        self.file = file
        self.names: list[str] = []
        self._faults = faults
        self._dtypes: list[str] = []
        self._shapes: list[_CheckedShape] = []
        self._offsets = array("q")
        # A hundred thousand tensors have a few dozen shapes, so each distinct shape is checked and stored once.
        self._shapes_by_dims: dict[tuple[int, ...], _CheckedShape] = {}

    def add(self, name: str, raw: msgspec.Raw) -> None:
        """Decode and append one entry; if the entry is malformed, add a problem instead."""
        if len(name) > LONGEST_NAME:
            self._faults.add(*too_long(name), self.file, name)
            return
        try:
            info = _info.decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._faults.add("CORRUPT", f"the header's entry is malformed: {error}", self.file, name)
            return
        key = tuple(info.shape[: MAX_DIMS + 1])
        shape = self._shapes_by_dims.get(key)
        if shape is None:
            shape = self._shapes_by_dims[key] = _check_shape(key)
        self.names.append(name)
        self._dtypes.append(info.dtype)
        self._shapes.append(shape)
        self._offsets.extend(info.data_offsets)

    def are_in_order(self, data_size: int) -> bool:
        """Return whether the tensors cover the data without gaps in the order of the header, as in nearly all files."""
        begins, ends = self._offsets[::2], self._offsets[1::2]
        return array("q", (0, *ends)) == array("q", (*begins, data_size)) and all(map(le, begins, ends))

    def layout(self) -> _DataLayout:

        pairs = np.array(self._offsets, np.int64).reshape(-1, 2)
        begins, ends = pairs[:, 0], pairs[:, 1]
        return _DataLayout(begins, ends, np.lexsort((ends, begins)))

    def entries(self, order: Sequence[int], base: int) -> dict[str, Entry]:
        """Return the catalog entries in the given order; check that each dtype and shape matches the number of
        bytes.
        """
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
    """Check that the tensors cover the data from its first byte to its last, without gaps and overlaps."""
    begins, ends, order = layout
    file, names = rows.file, rows.names
    if (ends < begins).any():
        return  # a tensor of negative size was refused already, and would make the checks that follow meaningless
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
"""Metadata key of the note that torch writes about chunks of tensors."""
PART_NOTES = frozenset({_PART_NOTE, "DCP_VERSION"})
"""Metadata keys that describe chunks of tensors, and so would be wrong in a file of whole tensors."""


class _PartNote(msgspec.Struct, frozen=True):
    """The note that torch writes about one chunk of a tensor."""

    saved_offsets: list[int]
    """Index of the chunk's first element in the whole tensor, one number for each dim."""


def part_starts(
    entries: Mapping[str, Entry], metadata: Mapping[str, str], file: str, faults: Faults
) -> dict[str, Shape] | None:
    """Return where each chunk in a file begins in its whole tensor.

    Args:
        entries: the tensors that the file's header lists.
        metadata: the strings under `__metadata__`.
        file: name of the file, for error messages.
        faults: list of faults, to which the problems of the note are added.

    Returns:
        tensor name -> index of the chunk's first element in the whole tensor; None if the note is missing or malformed.
    """
    text = metadata.get(_PART_NOTE)
    if text is None:
        faults.add(
            "CORRUPT", f"the header has no {_PART_NOTE}: nothing says which parts of the tensors the file holds", file
        )
        return None
    try:
        note = parse_json_as(text, dict[str, _PartNote])
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
        first_indices[name] = elements_shape(tuple(part_note.saved_offsets), entry.dtype)
    return first_indices


def open_safetensors(storage: Storage, path: str, member: str) -> Container:
    """Open one safetensors file, or all shard files that an index names, and also the optimizer's state in its
    sub-folder.

    The sizes in the index's metadata are ignored: many published sizes are wrong, because tied weights were counted
    twice. The metadata of the opened checkpoint consists of the headers' strings and the index's strings (without
    sizes); a key on which shard files differ appears once per file, as `<file>:<key>`.

    Args:
        storage: storage that reads the files.
        path: the path as the user typed it.
        member: name of a `*.safetensors` file or of an index, `*.safetensors.index.json`.

    Raises:
        Refused: with all problems of the index and the headers, and the code CORRUPT, INCOMPLETE (a missing shard file
            or tensor), NAME_COLLISION, OVERLAP, PATH_ESCAPE or UNSUPPORTED.
        StorageError: with the code IO if a file cannot be read.
    """
    read = read_files(storage, member, lambda file: read_header(storage, file))
    _check_whole(read.parts)
    sidecars = sort_sidecars(storage, read.sizes)
    metadata: dict[str, Any] = {**read.index_texts, **_merge_metadata(read.parts)}
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
    """Refuse files in which torch saved only chunks of tensors.

    Raises:
        Refused: with the code INCOMPLETE for a file with chunks of tensors; with the code CORRUPT for a malformed note
            about chunks.
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


def _merge_metadata(headers: Mapping[str, Header]) -> dict[str, str]:
    """Merge the metadata of all headers; see `open_safetensors` for keys on which the headers differ.

    torch's notes about chunks are omitted, because they would be wrong once tensors have different names.
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
"""Safetensors codes of the dtypes whose elements fill whole bytes."""


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
    """Lay out safetensors files: assign a file and an offset to each tensor.

    Args:
        tensors: the tensors to write; shard files are filled in this order.
        metadata: strings for the header of each file.
        shard_size: maximum number of tensor bytes in one file; a larger tensor gets a separate file. Without a shard
            size, or if everything fits into one file, there is one file `model.safetensors` and no index.
        groups: parameter groups of the optimizer, stored as text in the header of the first file.
        run: facts about the training run, also stored as text in the header if there is optimizer state.
        sealed: whether to reserve space for digests in the header; only possible for a single file.
        stem: beginning of the file names.

    Raises:
        Refused: with each tensor that cannot be stored, and the code UNSUPPORTED (dtype, dims, a name that is not
            Unicode), NAME_COLLISION or SHAPE_MISMATCH (packed elements that do not fill whole bytes).
    """
    faults = Faults()
    if _are_plain(tensors):  # drafts of very many tensors take this fast path
        sized = list(zip(tensors, map(nbytes, map(_dtype, tensors), map(_shape, tensors)), strict=True))
    else:
        sized, names_so_far = [], set[str]()
        for spec in tensors:
            sized.append((spec, size_of(spec, names_so_far, faults)))
            names_so_far.add(spec.name)
    if faults:
        raise faults.error()
    first_metadata = {KEPT: encode(groups)} if groups else {}
    if has_state(map(_name, tensors)) and (facts := facts_as_text(run or {})) is not None:
        first_metadata[KEPT_RUN] = facts
    first_file_metadata = iter([first_metadata])
    seal_metadata = blank_seal(sum(size > 0 for _, size in sized)) if sealed else {}

    def lay_out(file: str, shard: Iterable[Sized]) -> tuple[list[Entry], list[Fragment], int]:
        return lay_out_file(file, shard, {**(metadata or {}), **next(first_file_metadata, {}), **seal_metadata})

    files = lay_out_shards(SAFETENSORS.name, stem, SAFETENSORS.one_file[0], sized, shard_size, lay_out)
    if not sealed:
        return files
    (header,) = files.fragments
    offsets = [entry.extents[0].offset for entry in files.entries.values() if entry.nbytes]
    return replace(files, seal=seal_from_header(header.data, header.file, offsets))


def _are_plain(tensors: Sequence[Spec]) -> bool:
    """Return whether all tensors can certainly be stored, and their elements fill whole bytes."""
    names = set(map(_name, tensors))
    kinds = set(zip(map(_dtype, tensors), map(len, map(_shape, tensors)), strict=True))
    has_places = all(dtype in _WHOLE_BYTES and dims <= MAX_DIMS for dtype, dims in kinds)
    return has_places and len(names) == len(tensors) and METADATA not in names and "".join(names).isascii()


def size_of(spec: Spec, names_so_far: set[str], faults: Faults) -> int:
    """Return the size of a tensor in bytes; add a fault for each reason why the tensor cannot be stored.

    Args:
        spec: the tensor.
        names_so_far: names of the tensors that are stored already.
        faults: list of faults.
    """
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


def lay_out_file(
    file: str, shard: Iterable[Sized], metadata: Mapping[str, str]
) -> tuple[list[Entry], list[Fragment], int]:
    """Lay out one file; return its catalog entries, its header as a fragment, and the size of the file in bytes.

    Args:
        file: name of the file.
        shard: the tensors of the file.
        metadata: strings for the header.
    """
    items = list(shard)
    names = [spec.name for spec, _ in items]
    by_type: dict[str, list[Sized]] = {}
    for at in sorted(range(len(items)), key=names.__getitem__):
        item = items[at]
        by_type.setdefault(item[0].dtype, []).append(item)
    specs: list[Spec] = []
    ends = [0]
    for dtype in sorted(by_type, key=_RANK.__getitem__, reverse=True):
        dtype_specs, sizes = zip(*by_type[dtype], strict=True)
        specs += dtype_specs
        ends += [*accumulate(sizes, initial=ends[-1])][1:]
    header = encode_header(zip(specs, ends, ends[1:], strict=False), metadata)
    base, shapes = len(header), list(map(_shape, specs))
    extents = map(
        Extent, map(_ORIGINS.__getitem__, map(len, shapes)), shapes, repeat(file), [base + end for end in ends]
    )
    entries = list(map(Entry, map(_name, specs), map(_dtype, specs), shapes, zip(extents, strict=False)))
    return entries, [Fragment(file, 0, header)], base + ends[-1]


_name, _dtype, _shape = map(attrgetter, ("name", "dtype", "shape"))
