"""Decoding as a view of storage: an encoded tensor becomes a plain one in a file that does not exist.

Whoever reads a range of that file gets the values of just that range, decoded from the codes and the scales of just
that range. So planning, copying, resharding, comparing and loading need not know that anything was ever encoded.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from transaxle.axes.layout.relayout import unchanged
from transaxle.axes.notation.number_format import PLAIN, NumberFormat, Recode
from transaxle.encodings.arithmetic.codec import Error, Wide, decode_box, decode_error
from transaxle.encodings.conventions.convention import CONVENTIONS
from transaxle.encodings.encoding import Encoded, Role
from transaxle.engine.copying.source import Source
from transaxle.engine.views.encoded import Catalog, buffer_name
from transaxle.engine.views.header_metadata import without_notes
from transaxle.errors import refuse
from transaxle.formats.catalog.catalog import Container, Entry, Extent
from transaxle.formats.dtype import nbytes, numpy_dtype
from transaxle.formats.storage.storage import Beside, Storage, layer
from transaxle.move.endpoint import Bytes, Readable
from transaxle.move.strided_fill import Scratch, fill
from transaxle.move.transfer import Transfer, clip

DTYPES: Mapping[str, Wide] = {"bf16": "BF16", "fp32": "F32"}
"""Types that can be decoded to, as users write them, and their safetensors codes."""
_FILE = "decoded:"
_BAND = 1 << 18
"""Elements that are decoded at once."""
_CHUNK = 1 << 20
"""Bytes of scales that are read at once."""
_KEPT = 16 << 20
"""Bytes of scales that are kept."""

Scales = npt.NDArray[Any]


class Rows:
    """The bytes of one stored buffer in row-major order, wherever its chunks lie."""

    def __init__(self, reader: Readable, transfers: list[Transfer]) -> None:
        self._reader = reader
        self._transfers = transfers
        self._plain = len(transfers) == 1 and not transfers[0].loops
        self._local = threading.local()

    def read(self, start: int, stop: int) -> Bytes:
        """Return a range of bytes."""
        out: Bytes = np.empty(stop - start, np.uint8)
        if start == stop:
            return out
        if self._plain:
            self._reader.read_into(self._transfers[0].file, self._transfers[0].source + start, out.data)
            return out
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = Scratch(_CHUNK)
        for transfer in self._transfers:
            if transfer.target < stop and start < transfer.target_end:
                for part in clip(transfer, start, stop):
                    fill(self._reader, part, out, start, scratch)
        return out


class _Kept:
    """Scales that were read last; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, int], Bytes] = OrderedDict()
        self._size = 0

    def get(self, key: tuple[str, int]) -> Bytes | None:
        """Return what is kept under a key."""
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
            return found

    def put(self, key: tuple[str, int], data: Bytes) -> None:
        """Keep something, and drop what was used longest ago."""
        with self._lock:
            if key not in self._held:
                self._held[key] = data
                self._size += data.nbytes
            while self._size > _KEPT and len(self._held) > 1:
                self._size -= self._held.popitem(last=False)[1].nbytes


class Decoder:
    """One encoded tensor as the row-major bytes of its values.

    Args:
        tensor: what it is.
        source: where its buffers are.
        reader: the files.
        dtype: safetensors code of the values.
        kept: shared memory for scales.
    """

    def __init__(self, tensor: Encoded, source: Source, reader: Readable, dtype: Wide, kept: _Kept) -> None:
        self.tensor = tensor
        self.dtype = dtype
        self._source, self._reader, self._kept = source, reader, kept
        shape = (1,) * (2 - len(tensor.shape)) + tensor.shape
        tile = (1,) * (2 - len(tensor.shape)) + tensor.encoding.tiles(tensor.shape)
        self._encoding = replace(tensor.encoding, tile=tensor.encoding.tile[-2:])
        """Of one matrix."""
        *outer, self._rows, self._columns = shape
        *steps, self._tile_rows, self._tile_columns = tile
        self._bits = tensor.encoding.code_bits
        self._item = numpy_dtype(dtype).itemsize
        grid = [-(-size // step) for size, step in zip(shape, tile, strict=True)]
        self._grid_rows, self._grid_columns = grid[-2:]
        self._all_grid_rows = prod(grid[:-1])
        numbers = np.arange(prod(grid[:-2])).reshape(grid[:-2])
        for dim, (size, step) in enumerate(zip(outer, steps, strict=True)):
            numbers = numbers.take(np.arange(size) // step, dim)
        self._grids: list[int] = numbers.reshape(-1).tolist()
        """Number of the grid of each matrix."""
        if self._bits < 8 and self._columns % 2:
            message = f"rows of {self._columns} codes of {self._bits} bits are no whole bytes"
            raise refuse("UNSUPPORTED", message, tensor=tensor.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return nbytes(self.dtype, self.tensor.shape)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a view with the bytes of the values from `offset` on.

        Raises:
            TransaxleError: what the reader raises.
        """
        out = np.frombuffer(view, np.uint8)
        item = self._item
        first, last = offset // item, -(-(offset + len(out)) // item)
        if first * item == offset and last * item == offset + len(out) and out.ctypes.data % item == 0:
            self._decode(first, last, out.view(numpy_dtype(self.dtype)))
            return
        whole = np.empty(last - first, numpy_dtype(self.dtype))
        self._decode(first, last, whole)
        begin = offset - first * item
        out[:] = whole.view(np.uint8)[begin : begin + len(out)]

    def error(self) -> Error:
        """Return how far the values are from the products that they stand for, over the whole tensor."""
        found = Error()
        for row, rows, column, columns in self._boxes(0, prod(self.tensor.shape)):
            codes, scale, phase = self._held(row, rows, column, columns)
            factor = self._factors[row // self._rows]
            found += decode_error(self._encoding, codes, scale, phase=phase, factor=factor, dtype=self.dtype)
        return found

    def _decode(self, first: int, last: int, out: npt.NDArray[Any]) -> None:
        at = 0
        for row, rows, column, columns in self._boxes(first, last):
            # Packed codes are read byte by byte, which may be one more on either side.
            left, right = (column & ~1, column + columns + 1 & ~1) if self._bits < 8 else (column, column + columns)
            codes, scale, phase = self._held(row, rows, left, right - left)
            into = out[at : at + rows * columns].reshape(rows, columns)
            fits = right - left == columns
            made = decode_box(
                self._encoding,
                codes,
                scale,
                phase=phase,
                factor=self._factors[row // self._rows],
                dtype=self.dtype,
                out=into if fits else None,
            )
            if not fits:
                into[...] = made[:, column - left : column - left + columns]
            at += rows * columns

    def _boxes(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Cut a range of elements into boxes `(row, rows, column, columns)` of one matrix each, in order."""
        width = self._columns
        while first < last:
            row, column = divmod(first, width)
            if column or last - first < width or width > _BAND:
                columns = min(width - column, last - first, _BAND)
                yield row, 1, column, columns
                first += columns
            else:
                rows = min((last - first) // width, self._rows - row % self._rows, max(1, _BAND // width))
                yield row, rows, 0, width
                first += rows * width

    def _held(self, row: int, rows: int, column: int, columns: int) -> tuple[Bytes, Scales, tuple[int, int]]:
        """Read the codes and the scales of a box that lies in one matrix."""
        if columns == self._columns:
            begin = row * columns * self._bits // 8
            codes = self._codes.read(begin, begin + rows * columns * self._bits // 8)
        else:
            begin = (row * self._columns + column) * self._bits // 8
            codes = self._codes.read(begin, begin + columns * self._bits // 8)
        codes = codes.reshape(rows, columns * self._bits // 8)
        number, inside = divmod(row, self._rows)
        top = self._grids[number] * self._grid_rows
        scale = self._scales(top + inside // self._tile_rows, top + (inside + rows - 1) // self._tile_rows + 1)
        left, right = column // self._tile_columns, (column + columns - 1) // self._tile_columns + 1
        return codes, scale[:, left:right], (inside % self._tile_rows, column % self._tile_columns)

    @cached_property
    def _codes(self) -> Rows:
        return self._buffer(Role.CODES)

    @cached_property
    def _scale(self) -> Rows:
        return self._buffer(Role.SCALE)

    def _buffer(self, role: Role) -> Rows:
        name = buffer_name(self.tensor.name, role)
        return Rows(self._reader, self._source.transfers(unchanged(name, self._source.entries[name])))

    @cached_property
    def _scale_dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self._source.entries[buffer_name(self.tensor.name, Role.SCALE)].dtype)

    def _scales(self, first: int, last: int) -> Scales:
        """Return rows of the grid of scales; they are read in chunks, which are kept."""
        width = self._grid_columns * self._scale_dtype.itemsize
        each = max(1, _CHUNK // width)
        found = []
        for chunk in range(first // each, (last - 1) // each + 1):
            key = self.tensor.name, chunk
            data = self._kept.get(key)
            if data is None:
                data = self._scale.read(chunk * each * width, min(self._all_grid_rows, (chunk + 1) * each) * width)
                self._kept.put(key, data)
            low, high = max(first, chunk * each) - chunk * each, min(last, (chunk + 1) * each) - chunk * each
            found.append(data[low * width : high * width])
        rows = found[0] if len(found) == 1 else np.concatenate(found)
        return rows.view(self._scale_dtype).reshape(last - first, self._grid_columns)

    @cached_property
    def _factors(self) -> list[float]:
        """Per matrix, what its products are multiplied by."""
        count = len(self._grids)
        if Role.GLOBAL not in self.tensor.parts:
            return [1.0] * count
        name = buffer_name(self.tensor.name, Role.GLOBAL)
        entry = self._source.entries[name]
        values = self._buffer(Role.GLOBAL).read(0, entry.nbytes).view(numpy_dtype(entry.dtype)).astype(np.float64)
        convention = CONVENTIONS[self.tensor.convention]
        factors = [convention.factor(float(value), self.tensor.encoding) for value in values]
        return factors * (count // len(factors))


class DecodedStorage(Beside):
    """The files of a checkpoint, and beside them one file for each tensor that is decoded when it is read."""

    def __init__(self, below: Storage, decoders: Mapping[str, Decoder]) -> None:
        self.decoders: Mapping[str, Decoder] = {**decoders_of(below), **decoders}
        """By the file that they are."""
        super().__init__(below, self.decoders)


def decoders_of(storage: Storage) -> Mapping[str, Decoder]:
    """Return what decodes the files of a storage that do not exist, by their names."""
    found = layer(storage, DecodedStorage)
    return {} if found is None else found.decoders


def plainly(recode: Recode) -> Recode:
    """Let what was decoded be written as plain numbers, and what was not as `recode` says."""

    def form(name: str, stored: NumberFormat) -> NumberFormat:
        return recode(
            name, NumberFormat(stored.dtype, PLAIN) if stored.encoding and stored.dtype in DTYPES.values() else stored
        )

    return form


def decoded(held: Catalog, chosen: Collection[str], dtype: Wide) -> Container:
    """Return a container in which some encoded tensors are plain ones.

    Args:
        held: the tensors of a container.
        chosen: table names of the encoded tensors that are decoded.
        dtype: safetensors code of their values.

    Returns:
        A container with a plain entry under each of these names, in place of its buffers; a number for the layer's
        activations, which is no part of the weight, is left out.

    Raises:
        Refused: UNSUPPORTED for a tensor whose codes are no whole bytes row by row.
    """
    container = held.container
    source, kept = Source(container, held.buffers), _Kept()
    tensors = {name: held.encoded[name] for name in chosen}
    parts = {stored: role for one in tensors.values() for role, stored in one.parts.items()}
    left = {stored: container.entries[stored] for stored, role in parts.items() if role is Role.INPUT_SCALE}
    begin = _FILE
    while any(name.startswith(begin) for name in container.files):
        begin += ":"
    entries: dict[str, Entry] = {}
    decoders: dict[str, Decoder] = {}
    heads = {one.parts[Role.CODES]: one for one in tensors.values()}
    for stored, entry in container.entries.items():
        one = heads.get(stored)
        if one is not None:
            file = begin + one.name
            decoders[file] = Decoder(one, source, container.storage, dtype, kept)
            entries[one.name] = Entry(one.name, dtype, one.shape, (Extent((0,) * len(one.shape), one.shape, file, 0),))
        elif stored not in parts:
            entries[stored] = entry
    storage = DecodedStorage(container.storage, decoders)
    metadata = without_notes(container.metadata, tensors)
    return replace(container, storage=storage, entries=entries, metadata=metadata, left={**container.left, **left})
