"""Views that show encoded tensors as plain tensors, with metadata and optimizer parameter groups that fit the new
tensors.

**Decoding** is a view of storage: an encoded tensor is shown as a plain tensor in a virtual file.

Reading a byte range of that virtual file decodes only the values in that range, and reads only their codes and scales.
So the code that plans, copies, reshards, compares and loads treats the tensor as a plain tensor.

**Header notes**: the descriptions of encoded tensors in a container's metadata, which are removed when they are no
longer true.

For example, torchao's files describe each tensor in the header's metadata, and list all tensor names in that metadata.
After a tensor was decoded or renamed, its old description must not be copied into the target.

**Parameter groups** of an optimizer: if parameters get new names, their groups list the new names.

A tensor composed of several parameters (a stack, a fused projection) is a single parameter of the target. So all these
parameters must be in one group, because an optimizer cannot train parts of a parameter with different settings.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.layout.relayout import Target, identity_target
from transaxle.axes.notation.family import PLAIN, NumberFormat, Recode
from transaxle.encodings.conventions.convention import CONVENTIONS, training_only
from transaxle.encodings.conventions.torchao_convention import NAMES
from transaxle.encodings.encoding import EncodedTensor, Error, Role, Wide
from transaxle.encodings.value_steps import RecodedTensor
from transaxle.engine.source import Source
from transaxle.engine.views.encoded import Catalog, buffer_name
from transaxle.engine.views.stated_shapes import SHAPE_HINT
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.catalog import Container, Entry, Extent, nbytes, numpy_dtype
from transaxle.formats.storage.copier import Bytes
from transaxle.formats.storage.storage import parse_json
from transaxle.formats.training_state import ParamGroup, group_numbers, rename_parameters
from transaxle.move.transfer import Readable, Scratch, Transfer, clip, produce


def without_notes(metadata: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """Return a container's metadata without the descriptions of some tensors.

    Args:
        metadata: metadata of one file, or joint metadata of several files, in which a key whose values differ between
            files has the prefix `file:`.
        names: names of the tensors whose descriptions are removed; None means all tensors.
    """
    remaining = dict(metadata)
    for key in metadata:
        if key != NAMES and not key.endswith(f":{NAMES}"):
            continue
        try:
            listed = [str(name) for name in parse_json(metadata[key])]
        except (TypeError, ValueError):
            continue
        removed = listed if names is None else [name for name in listed if name in names]
        still_listed = [name for name in listed if name not in set(removed)]
        if still_listed:
            remaining[key] = json.dumps(still_listed)
        else:
            del remaining[key]
        for name in removed:
            remaining.pop(name, None)
    return remaining


def join_notes(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container's metadata with one joint list of tensor names instead of one list per file."""
    lists = [key for key in metadata if key.endswith(f":{NAMES}")]
    try:
        names = dict.fromkeys(str(name) for key in lists for name in parse_json(metadata[key]))
    except (TypeError, ValueError):
        return dict(metadata)
    joined_notes = {key: value for key, value in metadata.items() if key not in lists}
    return {**joined_notes, NAMES: json.dumps(list(names))} if lists else joined_notes


DTYPES: Mapping[str, Wide] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""Name of a dtype to which users can decode -> safetensors code of this dtype."""
_FILE = "decoded:"
_BAND = 1 << 18
"""Number of tensor elements that are decoded at once."""
_CHUNK = 1 << 20
"""Number of bytes of scales that are read at once."""
_ROWS_AT_ONCE = 512
"""Number of rows of scales that are examined at once."""
_CACHE_BYTES = 16 << 20
"""Size of the cache of scales in bytes."""

ScaleArray: TypeAlias = "npt.NDArray[Any]"


class RowMajorBytes:
    """The bytes of one stored buffer in row-major order, however the buffer is cut into chunks; bytes that are not
    stored are zero.
    """

    def __init__(self, reader: Readable, transfers: list[Transfer]) -> None:
        self._reader = reader
        self._transfers = transfers
        self._plain = len(transfers) == 1 and not transfers[0].loops and not transfers[0].target
        self._local = threading.local()

    def read(self, start: int, stop: int) -> Bytes:
        """Return the buffer's bytes from offset `start` up to `stop`."""
        out: Bytes = np.empty(stop - start, np.uint8)
        if start == stop:
            return out
        if self._plain and stop <= self._transfers[0].target_end:
            self._reader.read_into(self._transfers[0].file, self._transfers[0].source + start, out.data)
            return out
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = Scratch(_CHUNK)
        overlapping = (t for t in self._transfers if t.target < stop and start < t.target_end)
        produce(
            self._reader,
            [part for transfer in overlapping for part in clip(transfer, start, stop)],
            start,
            out,
            scratch,
        )
        return out


def buffer_bytes(source: Source, reader: Readable, name: str) -> RowMajorBytes:
    """Return the bytes of the buffer that has a name in `source`."""
    return RowMajorBytes(reader, source.transfers(identity_target(name, source.entries[name])))


class _ScaleCache:
    """The most recently used chunks of scales; several threads can share the cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, int], Bytes] = OrderedDict()
        self._size = 0

    def get(self, key: tuple[str, int]) -> Bytes | None:
        """Return the cached chunk of scales with a given key; None if it is not cached."""
        with self._lock:
            cached = self._entries.get(key)
            if cached is not None:
                self._entries.move_to_end(key)
            return cached

    def put(self, key: tuple[str, int], data: Bytes) -> None:
        """Add a chunk of scales, and drop the least recently used chunks if the cache has become too large."""
        with self._lock:
            if key not in self._entries:
                self._entries[key] = data
                self._size += data.nbytes
            while self._size > _CACHE_BYTES and len(self._entries) > 1:
                self._size -= self._entries.popitem(last=False)[1].nbytes


class Decoder:
    """A virtual file with the decoded values of one encoded tensor, in row-major order.

    Args:
        tensor: the encoded tensor.
        source: object that turns the tensor's buffers into transfers (reads of byte ranges).
        reader: object that reads the files in which the buffers are stored.
        dtype: safetensors code of the dtype of the decoded values.
        cache: cache of scales, which several decoders share.
    """

    def __init__(
        self, tensor: EncodedTensor, source: Source, reader: Readable, dtype: Wide, cache: _ScaleCache
    ) -> None:

        self.tensor = tensor
        self.dtype = dtype
        self._source, self._reader, self._cache = source, reader, cache
        shape = (1,) * (2 - len(tensor.shape)) + tensor.shape
        tile = (1,) * (2 - len(tensor.shape)) + tensor.encoding.tiles(tensor.shape)
        self._encoding = replace(tensor.encoding, tile=tensor.encoding.tile[-2:])
        """The encoding of a single matrix; the tensor may be a stack of matrices."""
        *outer, self._rows, self._columns = shape
        *steps, self._tile_rows, self._tile_columns = tile
        self._bits = tensor.encoding.code_bits
        self._shape_agrees = False
        self._item = numpy_dtype(dtype).itemsize
        grid = [-(-size // step) for size, step in zip(shape, tile, strict=True)]
        self._grid_rows, self._grid_columns = grid[-2:]
        self._all_grid_rows = prod(grid[:-1])
        numbers = np.arange(prod(grid[:-2])).reshape(grid[:-2])
        for dim, (size, step) in enumerate(zip(outer, steps, strict=True)):
            numbers = numbers.take(np.arange(size) // step, dim)
        self._grids: list[int] = numbers.reshape(-1).tolist()
        """For each matrix of the tensor, the index of the grid of scales that belongs to it."""
        if self._bits < 8 and self._columns % 2:
            message = f"rows of {self._columns} codes of {self._bits} bits do not fill whole bytes"
            raise refuse("UNSUPPORTED", message, tensor=tensor.name)

    @property
    def nbytes(self) -> int:
        """Size of the decoded values in bytes."""
        return nbytes(self.dtype, self.tensor.shape)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a memory view with bytes of the decoded values, beginning at byte `offset` of the values.

        Raises:
            TransaxleError: any error of reading the stored buffers.
        """
        out = np.frombuffer(view, np.uint8)
        item = self._item
        first_element, last_element = offset // item, -(-(offset + len(out)) // item)
        if first_element * item == offset and last_element * item == offset + len(out) and out.ctypes.data % item == 0:
            self._decode(first_element, last_element, out.view(numpy_dtype(self.dtype)))
            return
        elements = np.empty(last_element - first_element, numpy_dtype(self.dtype))
        self._decode(first_element, last_element, elements)
        begin = offset - first_element * item
        out[:] = elements.view(np.uint8)[begin : begin + len(out)]

    def scales(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """Return the scale of each element in a range: the scale of its tile, times the global scale if the tensor has
        one.
        """
        out = np.empty(last - first, np.float64)
        position = 0
        for row, rows, column, columns in self._boxes(first, last):
            scale, phase = self._scales_of(row, rows, column, columns)
            tall = (np.arange(rows) + phase[0]) // self._tile_rows
            wide = (np.arange(columns) + phase[1]) // self._tile_columns
            factors = scale.astype(np.float64) * self._factors[row // self._rows]
            out[position : position + rows * columns] = factors[np.ix_(tall, wide)].reshape(-1)
            position += rows * columns
        return out

    @property
    def step(self) -> RecodedTensor:
        """The step of the plan that describes this decoding; see `Computed.step`."""
        tensor = self.tensor
        return RecodedTensor(tensor.name, "decoded", tensor.encoding.name, tensor.convention, self.dtype, tensor.shape)

    def measure(self) -> tuple[Error, int]:
        """Return the rounding error of all decoded values, compared with the exact products of code and scale.

        A finite product that overflows is counted as an infinite error.
        """
        total = Error()
        for box in self._boxes(0, prod(self.tensor.shape)):
            total += self._error_of(*box)
        return total, 0

    def inexact_values(self, *, whole: bool) -> tuple[int, tuple[int, ...] | None]:
        """Return the number of values that differ from the exact product of code and scale, and the index of the first;
        None if there is no such value.

        Args:
            whole: whether to count all such values; otherwise nothing is read after the first.
        """
        count, first = 0, None
        self._check_shape()
        if not prod(self.tensor.shape) or self._has_short_scales():
            return count, first
        for box in self._boxes(0, prod(self.tensor.shape)):
            unequal = self._error_of(*box).unequal
            count += unequal
            if unequal and first is None:
                first = self._first_inexact(*box)
                if not whole:
                    break
        return count, first

    def _error_of(self, row: int, rows: int, column: int, columns: int, *, once: bool = False) -> Error:
        """Return the rounding error of a box; if `once`, of the first code of a byte that contains two."""
        from transaxle.encodings.arithmetic.codec import decode_error

        codes, scale, phase = self._read_box(row, rows, column, columns)
        if once:
            codes = np.bitwise_and(codes, 15) * np.uint8(17)
        factor, zero = self._factors[row // self._rows], self._zeros_of(row, rows, column, columns)
        return decode_error(self._encoding, codes, scale, phase=phase, factor=factor, dtype=self.dtype, zero=zero)

    def _first_inexact(self, row: int, rows: int, column: int, columns: int) -> tuple[int, ...]:
        """Return the index of the first inexact value of a box that has one."""
        row = next(each for each in range(row, row + rows) if self._error_of(each, 1, column, columns).unequal)
        step = 2 if self._bits < 8 else 1
        while columns > step:
            half = max(step, columns // 2 // step * step)
            in_first_half = self._error_of(row, 1, column, half).unequal > 0
            column, columns = (column, half) if in_first_half else (column + half, columns - half)
        second = step == 2 and not self._error_of(row, 1, column, columns, once=True).unequal
        position = np.unravel_index(row * self._columns + column + second, self.tensor.shape)
        return tuple(int(index) for index in position)

    def _has_short_scales(self) -> bool:
        """Return whether all scales have so few significant bits, and are so far from the ends of the range, that every
        product with a code is exact. Only scales are read.
        """
        from transaxle.encodings.arithmetic.codec import scale_values

        of_codes = {"F8_E4M3": 4, "F8_E5M2": 3, "F4": 2, "I4": 4}
        digits = {"BF16": 8, "F16": 0, "F32": 24}[self.dtype] - of_codes.get(self._encoding.code, 24)
        if digits < 1:
            return False
        cut = np.uint32((1 << (24 - min(digits, 24))) - 1)
        for matrix, grid in enumerate(self._grids):
            for first in range(grid * self._grid_rows, (grid + 1) * self._grid_rows, _ROWS_AT_ONCE):
                stored = self._scales(first, min(first + _ROWS_AT_ONCE, (grid + 1) * self._grid_rows))
                plain = scale_values(self._encoding, stored)
                with np.errstate(all="ignore"):
                    exact = plain.astype(np.float64) * self._factors[matrix]
                    single = exact.astype(np.float32)
                    size = np.abs(single)
                    short = (single == exact) & (single.view(np.uint32) & cut == 0)
                    short &= (size == 0) | ((size >= 2.0**-100) & (size <= 2.0**100))
                if not short.all():
                    return False
        return True

    def _decode(self, first: int, last: int, out: npt.NDArray[Any]) -> None:
        from transaxle.encodings.arithmetic.codec import decode_box

        self._check_shape()
        position = 0
        for row, rows, column, columns in self._boxes(first, last):
            # Packed codes are read in whole bytes, so the range of columns is extended to even bounds.
            left, right = (column & ~1, column + columns + 1 & ~1) if self._bits < 8 else (column, column + columns)
            codes, scale, phase = self._read_box(row, rows, left, right - left)
            into = out[position : position + rows * columns].reshape(rows, columns)
            fits = right - left == columns
            values = decode_box(
                self._encoding,
                codes,
                scale,
                phase=phase,
                factor=self._factors[row // self._rows],
                dtype=self.dtype,
                zero=self._zeros_of(row, rows, left, right - left),
                out=into if fits else None,
            )
            if not fits:
                into[...] = values[:, column - left : column - left + columns]
            position += rows * columns

    def _boxes(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Split a range of elements into boxes `(row, rows, column, columns)`, in order; each box is within one
        matrix.
        """
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

    def _read_box(self, row: int, rows: int, column: int, columns: int) -> tuple[Bytes, ScaleArray, tuple[int, int]]:
        """Read the codes and scales of a box within one matrix, and the box's offset in its first tile."""
        if columns == self._columns:
            begin = row * columns * self._bits // 8
            codes = self._codes.read(begin, begin + rows * columns * self._bits // 8)
        else:
            begin = (row * self._columns + column) * self._bits // 8
            codes = self._codes.read(begin, begin + columns * self._bits // 8)
        return codes.reshape(rows, columns * self._bits // 8), *self._scales_of(row, rows, column, columns)

    def _scales_of(self, row: int, rows: int, column: int, columns: int) -> tuple[ScaleArray, tuple[int, int]]:
        """Read the scales of a box within one matrix, and return them with the box's offset in its first tile."""
        number, inside = divmod(row, self._rows)
        top = self._grids[number] * self._grid_rows
        scale = self._scales(top + inside // self._tile_rows, top + (inside + rows - 1) // self._tile_rows + 1)
        left, right = column // self._tile_columns, (column + columns - 1) // self._tile_columns + 1
        return scale[:, left:right], (inside % self._tile_rows, column % self._tile_columns)

    def _zeros_of(self, row: int, rows: int, column: int, columns: int) -> npt.NDArray[np.float32] | None:
        """Read the zero points of a box within one matrix, one for each tile; None if the tensor has none."""
        per_number = self.tensor.encoding.zero_rows
        if not per_number:
            return None
        from transaxle.encodings.arithmetic.codes import KINDS, split_halves

        kind = KINDS[self.tensor.encoding.code]
        number, inside = divmod(row, self._rows)
        first, last = inside // self._tile_rows, (inside + rows - 1) // self._tile_rows + 1
        grid_columns = slice(column // self._tile_columns, (column + columns - 1) // self._tile_columns + 1)
        item = per_number * kind.bits // 8
        per_matrix = -(-self._grid_rows // per_number)
        begin, end = (
            self._grids[number] * per_matrix + position for position in (first // per_number, -(-last // per_number))
        )
        width = self._grid_columns * item
        stored = self._zero.read(begin * width, end * width).reshape(end - begin, self._grid_columns, item)
        codes = stored if kind.bits == 8 else split_halves(stored)
        by_row = codes.transpose(0, 2, 1).reshape(-1, self._grid_columns)
        skipped = first % per_number
        return kind.values[by_row[skipped : skipped + last - first, grid_columns]]

    def _check_shape(self) -> None:
        """Refuse a stored shape that differs from the shape of the codes."""
        if self._shape_agrees or Role.SHAPE not in self.tensor.parts:
            return
        name = buffer_name(self.tensor.name, Role.SHAPE)
        entry = self._source.entries[name]
        stated = self._source.read(name).view(numpy_dtype(entry.dtype)).tolist()
        if tuple(stated) != self.tensor.shape:
            message = f"it states the shape {stated}, but the codes have the shape {list(self.tensor.shape)}"
            raise refuse("SHAPE_MISMATCH", message, tensor=self.tensor.parts[Role.SHAPE], hint=SHAPE_HINT)
        self._shape_agrees = True

    @cached_property
    def _codes(self) -> RowMajorBytes:
        return self._buffer(Role.CODES)

    @cached_property
    def _scale(self) -> RowMajorBytes:
        return self._buffer(Role.SCALE)

    @cached_property
    def _zero(self) -> RowMajorBytes:
        return self._buffer(Role.ZERO)

    def _buffer(self, role: Role) -> RowMajorBytes:
        return buffer_bytes(self._source, self._reader, buffer_name(self.tensor.name, role))

    @cached_property
    def _scale_dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self._source.entries[buffer_name(self.tensor.name, Role.SCALE)].dtype)

    def _scales(self, first: int, last: int) -> ScaleArray:
        """Return rows of the grid of scales; the grid is read in chunks, which are cached."""
        width = self._grid_columns * self._scale_dtype.itemsize
        rows_per_chunk = max(1, _CHUNK // width)
        chunks = []
        for chunk in range(first // rows_per_chunk, (last - 1) // rows_per_chunk + 1):
            key = self.tensor.name, chunk
            data = self._cache.get(key)
            if data is None:
                data = self._scale.read(
                    chunk * rows_per_chunk * width, min(self._all_grid_rows, (chunk + 1) * rows_per_chunk) * width
                )
                self._cache.put(key, data)
            low, high = (
                max(first, chunk * rows_per_chunk) - chunk * rows_per_chunk,
                min(last, (chunk + 1) * rows_per_chunk) - chunk * rows_per_chunk,
            )
            chunks.append(data[low * width : high * width])
        rows = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        return rows.view(self._scale_dtype).reshape(last - first, self._grid_columns)

    @cached_property
    def _factors(self) -> list[float]:
        """For each matrix, the factor by which products of code and scale are multiplied: the global scale, or 1
        without one.
        """
        count = len(self._grids)
        if Role.GLOBAL not in self.tensor.parts:
            return [1.0] * count
        name = buffer_name(self.tensor.name, Role.GLOBAL)
        entry = self._source.entries[name]
        values = self._buffer(Role.GLOBAL).read(0, entry.nbytes).view(numpy_dtype(entry.dtype)).astype(np.float64)
        convention = CONVENTIONS[self.tensor.convention]
        factors = [convention.factor(float(value), self.tensor.encoding) for value in values]
        return factors * (count // len(factors))


def recode_as_shown(recode: Recode, encodings: Mapping[str, str]) -> Recode:
    """Return a version of the function `recode` that gets the number formats of the view, not those of the files.

    Args:
        recode: (target name, its number format) -> number format in which it is written.
        encodings: encoding in the files -> encoding in the view, as in `Recoding.encodings`.
    """

    def form(name: str, stored: NumberFormat) -> NumberFormat:
        is_decoded = stored.encoding and stored.dtype in DTYPES.values()
        encoding = PLAIN if is_decoded else encodings.get(stored.encoding, stored.encoding)
        return recode(name, NumberFormat(stored.dtype, encoding))

    return form


def with_decoded(catalog: Catalog, chosen: Collection[str], dtype: Wide) -> Container:
    """Return a container in which the chosen encoded tensors appear as plain, decoded tensors.

    Args:
        catalog: the stored tensors of a container.
        chosen: names of the encoded tensors to decode, as the conversion tables spell them.
        dtype: safetensors code of the dtype of the decoded values.

    Returns:
        A container that has, instead of the buffers of each chosen tensor, one plain entry with the tensor's name.
        Input scales, which belong to a layer's activations, and tensors that are needed only for training with codes
        are omitted.

    Raises:
        Refused: with code UNSUPPORTED, if a row of a tensor's codes is not a whole number of bytes, or if only some of
            the tensors are chosen that are shown in another form than they are stored.
    """
    if 0 < len(chosen) < len(catalog.encoded) and (refusals := [*catalog.refuse_in_other_form("; decode all of them")]):
        raise gathered(refusals)
    container = catalog.container
    source, cache = Source(container, catalog.buffers), _ScaleCache()
    tensors = {name: catalog.encoded[name] for name in chosen}
    parts = {stored: role for tensor in tensors.values() for role, stored in tensor.parts.items()}
    input_scales = {stored: container.entries[stored] for stored, role in parts.items() if role is Role.INPUT_SCALE}
    prefix = _FILE
    # The prefix for virtual files must not be the beginning of a real file's name.
    while any(name.startswith(prefix) for name in container.files):
        prefix += ":"
    entries: dict[str, Entry] = {}
    decoders: dict[str, Decoder] = {}
    tensor_by_codes = {tensor.parts[Role.CODES]: tensor for tensor in tensors.values()}
    training_entries = {name: container.entries[name] for name in training_only(tensor_by_codes, container.entries)}
    for stored, entry in container.entries.items():
        tensor = tensor_by_codes.get(stored)
        if tensor is not None:
            file = prefix + tensor.name
            decoders[file] = Decoder(tensor, source, container.storage, dtype, cache)
            entries[tensor.name] = Entry(
                tensor.name, dtype, tensor.shape, (Extent((0,) * len(tensor.shape), tensor.shape, file, 0),)
            )
        elif stored not in parts and stored not in training_entries:
            entries[stored] = entry
    metadata = without_notes(container.metadata, tensors)
    left_entries = {**container.left, **input_scales, **training_entries}
    return container.with_computed(decoders, entries, metadata=metadata, left=left_entries)


_HINT = "--no-optimizer leaves the optimizer state and its settings out."


def rename_groups(
    groups: Iterable[ParamGroup], targets: Mapping[str, Target], problems: list[Refusal]
) -> list[ParamGroup]:
    """Return the optimizer's parameter groups with the parameter names of the target.

    Args:
        groups: parameter groups with the parameter names of the source.
        targets: the tensors of the target.
        problems: list to which a refusal (UNSUPPORTED) is added for every target tensor whose parameters are in
            different groups.

    If a target's optimizer state comes from different source parameters than its values, its group is that of the
    state's parameters. The reason is that a file may store the values of a fused parameter in parts, but its state and
    its group whole.
    """
    groups = list(groups)
    group_of = group_numbers(groups)
    names: dict[str, list[str]] = {}
    sources_of: dict[str, tuple[Target, dict[str, None]]] = {}
    sources_of_state: dict[str, tuple[Target, dict[str, None]]] = {}
    trained: set[str] = set()
    for target in targets.values() if groups else ():
        parameter, slot = split_slot(target.name)
        origins = (origin.name for target_part in target.parts for origin in target_part.origins)
        sources = dict.fromkeys(split_slot(origin)[0] for origin in origins)
        if slot == WEIGHT:
            sources_of[parameter] = target, sources
        else:
            trained.update(sources)
            sources_of_state.setdefault(parameter, (target, {}))[1].update(sources)
    fused = {source for name, (_, sources) in sources_of_state.items() if name not in sources_of for source in sources}
    for parameter, (target, sources) in sources_of_state.items():
        if parameter not in sources_of or not sources.keys() <= sources_of[parameter][1].keys():
            sources_of[parameter] = target, sources
    for parameter, (target, sources) in sources_of.items():
        if parameter not in sources_of_state and fused.issuperset(sources):
            continue
        memberships = {group_of.get(source) for source in sources if source in group_of or source not in trained}
        if len(memberships) > 1:
            problems.append(
                Refusal("UNSUPPORTED", _describe_unlike(target, sources, group_of), Where(None, parameter), _HINT)
            )
            continue
        for source in sources:
            names.setdefault(source, []).append(parameter)
    return rename_parameters(groups, names)


def _describe_unlike(target: Target, sources: Iterable[str], group_of: Mapping[str, int]) -> str:
    """Describe which source parameters of a target tensor are trained with settings that differ from those of the first
    parameter.
    """
    first, *other_sources = sources
    unlike_source = next(name for name in other_sources if group_of.get(name) != group_of.get(first))
    memberships: Sequence[str] = [
        f"{name} is in {'no group' if name not in group_of else f'group {group_of[name]}'}"
        for name in (first, unlike_source)
    ]
    return f"{target.rule}\nthe parts are trained with different settings: {', '.join(memberships)}"
