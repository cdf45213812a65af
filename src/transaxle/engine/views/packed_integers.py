"""A view that shows integer codes of GPTQ and AWQ as compressed-tensors stores them, in its format `pack-quantized`.

All three store a weight `[N, K]` (outputs, inputs) as unsigned codes with scales and zero points of groups of inputs; a
value is `(code - zero point) x scale`. They differ in the order of the numbers:

| | codes | scales | zero points |
|---|---|---|---|
| compressed-tensors | `weight_packed [N, K/8]` | `weight_scale [N, K/g]` | `weight_zero_point [N/8, K/g]` |
| GPTQ | `qweight [K/8, N]` | `scales [K/g, N]` | `qzeros [K/g, N/8]`, minus one in the first format |
| AWQ | `qweight [K, N/8]` | `scales [K/g, N]` | `qzeros [K/g, N/8]` |

Eight 4-bit codes (four 8-bit codes) are in a 32-bit word, the first one lowest; AWQ has the outputs 0 2 4 6 1 3 5 7 of
eight in this order. So every number keeps its value, and nothing is rounded. The bytes are computed in bands of rows
when they are read, and the scales are read with strides.

GPTQ's first format subtracts one from the zero points as one subtraction of whole words, so that a zero point of 0
borrows from its neighbor. The addition that undoes this is GPTQModel's (`convert_gptq_v1_to_v2_format`).

Zero points of symmetric codes are all the middle one, 8 or 128. If the config says so (`sym`), `middle_zeros` reads the
zero points and proves it, because a checkpoint of compressed-tensors needs no zero points then.

With `desc_act` the columns of a group are anywhere in a row: `g_idx` has the group of each column. Then every column is
shown as a group of its own, with the scale and the zero point of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from math import ceil
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from transaxle.axes.layout.relayout import identity_target
from transaxle.encodings.conventions.packed_methods import (
    AWQ,
    BITS,
    PACKED_CODES,
    PACKED_METHODS,
    Kind,
    PackedMethod,
    make_section,
    with_section,
)
from transaxle.engine.source import Source
from transaxle.engine.views.encoded import ForeignForm
from transaxle.errors import Code, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Container, Entry, Extent, numpy_dtype
from transaxle.formats.storage.copier import Bytes, scatter
from transaxle.formats.storage.storage import InMemoryFile, VirtualFile, VirtualFiles
from transaxle.move.transfer import Scratch, produce

CODES, ZEROS, SCALES, ORDER = PACKED_CODES, "qzeros", "scales", "g_idx"
"""Last name segments of the four tensors of a module in GPTQ and AWQ."""
PACKED, SCALE, ZERO, SHAPE = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"
"""Last name segments of the four tensors of a module in compressed-tensors."""
_REALS = ("F16", "BF16", "F32")
_WORD = 32
"""Bits of a word of packed codes."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Position of a code in a word of AWQ -> which of eight neighboring outputs it belongs to."""
_BAND = 1 << 21
"""Number of bytes that are computed at once."""
_AT_ONCE = 128
"""Number of inputs whose codes are transposed at once, so that they stay in the processor's cache."""
_CACHED = 8
"""Number of bands that are cached, since a reader takes smaller pieces."""
_SCRATCH = 1 << 20
_FILE = "\0packed "
"""Prefix of the names of the virtual files."""
_KEEP = "To keep the tensors exactly as stored:  --to safetensors:identity."

Words = NDArray[np.uint32]
Shape = tuple[int, ...]


def transpose_nibbles(words: Words) -> Words:
    """Transpose blocks of 8 x 8 codes of four bits.

    Args:
        words: array `[B, 8, C]`; the code `j` of a word is in its bits `4j` to `4j + 3`.

    Post-condition: code `j` of word `i` becomes code `i` of word `j`, in every block `[b, :, c]`.
    """
    out = words.copy()
    for step, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        blocks = out.reshape(len(out), 8 // (2 * step), 2, step, -1)
        low, high = blocks[:, :, 0], blocks[:, :, 1]
        swapped = ((low >> np.uint32(4 * step)) ^ high) & np.uint32(mask)
        high ^= swapped
        low ^= swapped << np.uint32(4 * step)
    return out


def in_order(words: Words) -> Words:
    """Put the codes of AWQ's words in the order of the outputs that they belong to, the first one lowest."""
    out = np.zeros_like(words)
    for position, output in enumerate(_AWQ_ORDER):
        out |= ((words >> np.uint32(4 * position)) & np.uint32(15)) << np.uint32(4 * output)
    return out


def gptq_rows(words: Words) -> Words:
    """Return rows of `weight_packed` `[n, K/8]` from columns of GPTQ's `qweight` `[K/8, n]`."""
    rows, columns = words.shape
    out: Bytes = np.empty(words.nbytes, np.uint8)
    loops = [(columns, words.itemsize, rows * words.itemsize), (rows, columns * words.itemsize, words.itemsize)]
    scatter(words.reshape(-1).view(np.uint8), out, 0, words.itemsize, loops)
    return out.view(words.dtype).reshape(columns, rows)


def awq_rows(words: Words) -> Words:
    """Return rows of `weight_packed` `[8n, K/8]` from columns of AWQ's `qweight` `[K, n]`."""
    inputs, columns = words.shape
    rows = np.empty((columns, 8, inputs // 8), np.uint32)
    for start in range(0, inputs, _AT_ONCE):
        blocks = transpose_nibbles(words[start : start + _AT_ONCE].reshape(-1, 8, columns))
        for position, output in enumerate(_AWQ_ORDER):
            rows[:, output, start // 8 : start // 8 + len(blocks)] = blocks[:, position].T
    return rows.reshape(columns * 8, inputs // 8)


class _Layer(msgspec.Struct, frozen=True, dict=True):
    """The tensors of one quantized module of GPTQ or AWQ, whose shapes fit together."""

    module: str
    method: PackedMethod
    kind: Kind
    codes: Entry
    zeros: Entry
    scales: Entry
    order: Entry | None
    """Group of each input column; None if a file has no `g_idx`, as in AWQ."""
    rows: int
    """Number of outputs, N."""
    columns: int
    """Number of inputs, K."""
    source: Source

    @property
    def per_word(self) -> int:
        """Number of codes in a word."""
        return _WORD // self.kind.bits

    def has_middle_zeros(self) -> bool:
        """Read the zero points, and return whether all of them are the middle one."""
        middle = self._in_all_codes((1 << self.kind.bits - 1) - self.method.shift)
        rows, columns = self.zeros.shape
        step = max(1, _SCRATCH // (columns * _WORD // 8))
        bands = ((first, min(first + step, rows)) for first in range(0, rows, step))
        return all((self._box(self.zeros, band, (0, columns)) == middle).all() for band in bands)

    def code_rows(self, first: int, last: int) -> NDArray[Any]:
        """Return rows of `weight_packed`; for AWQ, `first` must be a multiple of 8."""
        if not self.method.reordered:
            self.groups  # noqa: B018 - proves that the columns of a group are neighbors
        if self.method.name == AWQ:
            return awq_rows(self._columns(self.codes, first // 8, ceil(last / 8)))[: last - first]
        return gptq_rows(self._columns(self.codes, first, last))

    def zero_rows(self, first: int, last: int) -> NDArray[Any]:
        """Return rows of `weight_zero_point`, each of which has the zero points of several outputs."""
        words = self._columns(self.zeros, first, last)
        if self.method.name == AWQ:
            words = in_order(words)
        if self.method.shift:
            words = words + self._in_all_codes(1)
        return self._of_columns(words)

    def _in_all_codes(self, number: int) -> np.uint32:
        """Return the word in which every code is a number."""
        return np.uint32(sum(number << self.kind.bits * index for index in range(self.per_word)))

    def scale_rows(self, first: int, last: int) -> NDArray[Any]:
        """Return rows of `weight_scale` with one scale per column, for a module with `desc_act`."""
        return self._of_columns(self._columns(self.scales, first, last))

    def _of_columns(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return numbers of groups `[K/g, n]` in rows; with `desc_act` one number for every column."""
        return np.ascontiguousarray((numbers[self.groups] if self.method.reordered else numbers).T)

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """The group of each input column.

        Raises:
            Refused: with the code CORRUPT if a group does not exist, or if groups are not in order although the config
                says so.
        """
        size = self.columns if self.kind.group < 0 else self.kind.group
        expected = np.arange(self.columns, dtype=np.int64) // size
        if self.order is None:
            return expected
        stored = self.source.read(self.order.name).view(numpy_dtype(self.order.dtype)).astype(np.int64)
        count = self.scales.shape[0]
        outside = np.flatnonzero((stored < 0) | (stored >= count))
        if len(outside):
            message = f"column {outside[0]:,} is in group {stored[outside[0]]:,}; there are {count:,} groups"
            raise refuse("CORRUPT", message, tensor=self.order.name)
        if not self.method.reordered and not np.array_equal(stored, expected):
            column = int(np.flatnonzero(stored != expected)[0])
            message = (
                f"column {column:,} is in group {stored[column]:,}, not {expected[column]:,}, but the config says "
                f"desc_act false and group_size {self.method.group}"
            )
            hint = "If the columns were reordered, correct desc_act in the config; if not, the file is damaged."
            raise refuse("CORRUPT", message, tensor=self.order.name, hint=hint)
        return stored

    def _columns(self, entry: Entry, first: int, last: int) -> NDArray[Any]:
        """Return columns of a stored matrix, as they are stored."""
        return self._box(entry, (0, entry.shape[0]), (first, last))

    def _box(self, entry: Entry, rows: tuple[int, int], columns: tuple[int, int]) -> NDArray[Any]:
        """Return some rows and columns of a stored matrix, as they are stored."""
        item = numpy_dtype(entry.dtype).itemsize
        height, width = (stop - start for start, stop in (rows, columns))
        out: Bytes = np.empty(height * width * item, np.uint8)
        transfers = self.source.transfers(identity_target(entry.name, entry), [[rows], [columns]])
        produce(self.source.container.storage, transfers, 0, out, Scratch(_SCRATCH))
        return out.view(np.uint32 if entry.dtype == "I32" else f"u{item}").reshape(height, width)


class RowFile(VirtualFile):
    """A virtual file with a matrix whose rows are computed in bands."""

    def __init__(
        self, rows: int, width: int, unit: int, compute: Callable[[int, int], NDArray[Any]], cache: BandCache
    ) -> None:
        self.rows, self.width, self.compute = rows, width, compute
        self.band = max(unit, _BAND // max(width, 1) // unit * unit)
        self._cache = cache

    @property
    def nbytes(self) -> int:
        """Size of the matrix in bytes; see `VirtualFile`."""
        return self.rows * self.width

    def read_into(self, offset: int, view: memoryview) -> None:
        """Compute the rows that contain the bytes from `offset` on; see `VirtualFile`."""
        out = np.frombuffer(view, np.uint8)
        size, position = self.band * self.width, 0
        while position < len(out):
            band, inside = divmod(offset + position, size)
            data = self._cache(self, band)
            count = min(len(data) - inside, len(out) - position)
            out[position : position + count] = data[inside : inside + count]
            position += count

    def band_bytes(self, band: int) -> Bytes:
        """Return the bytes of one band of rows."""
        first = band * self.band
        return self.compute(first, min(first + self.band, self.rows)).reshape(-1).view(np.uint8)


BandCache = Callable[["RowFile", int], Bytes]
"""Function that returns the bytes of a band of a file, and remembers the last ones."""


def as_compressed_tensors(container: Container, config: Mapping[str, Any], method: PackedMethod) -> ForeignForm:
    """Return a checkpoint of GPTQ or AWQ, and its config, as compressed-tensors would store the same numbers.

    Args:
        container: the stored tensors.
        config: the model's config.
        method: how the config says that weights are stored.

    Raises:
        TransaxleError: one error with all refusals of modules whose tensors do not fit together: MISSING_TENSOR,
            UNEXPECTED_TENSOR, DTYPE_MISMATCH, SHAPE_MISMATCH and UNSUPPORTED.
    """
    layers = _layers(container, method)
    problems: list[Refusal] = []
    hidden = {entry.name for layer in layers.values() for entry in (layer.zeros, layer.scales, layer.order) if entry}
    files: dict[str, VirtualFile] = {}
    cache: BandCache = lru_cache(_CACHED)(RowFile.band_bytes)
    entries: dict[str, Entry] = {}
    for name, entry in container.entries.items():
        if name in layers:
            for part in _show(layers[name], files, cache):
                if part.name in container.entries:
                    message = f"the codes {name} would be shown under this name, which another tensor has"
                    problems.append(Refusal("NAME_COLLISION", message, Where(None, part.name)))
                entries[part.name] = part
        elif name not in hidden:
            entries[name] = entry
    if problems:
        raise gathered(problems)
    kinds: dict[Kind, list[str]] = {}
    for layer in layers.values():
        kind = Kind(layer.kind.bits, 1) if layer.method.reordered else layer.kind
        kinds.setdefault(kind, []).append(layer.module)
    section = make_section(kinds or {Kind(method.bits, method.group): ()})
    new_config = with_section(config, method.path, section)
    if not files:
        return ForeignForm(container, new_config)
    changed = replace(container, storage=VirtualFiles(container.storage, files), entries=entries)
    in_order = (layer for layer in layers.values() if method.symmetric and not layer.method.reordered)
    middle_zeros = {_join(layer.module, ZERO): layer.has_middle_zeros for layer in in_order}
    return ForeignForm(changed, new_config, PACKED_METHODS[method.name], middle_zeros)


def _layers(container: Container, method: PackedMethod) -> dict[str, _Layer]:
    """Return name of codes -> module, for all modules of a checkpoint; raise all refusals together."""
    problems: list[Refusal] = []
    source = Source(container)
    layers: dict[str, _Layer] = {}
    for name in container.entries:
        module, _, segment = name.rpartition(".")
        try:
            if segment == CODES:
                layers[name] = _layer(container.entries, module, method, source)
            elif segment in (ZEROS, ORDER) and _join(module, CODES) not in container.entries:
                message = f"without codes; expected {_join(module, CODES)}"
                raise refuse("UNEXPECTED_TENSOR", message, tensor=name)
        except TransaxleError as error:
            problems.extend(error.refusals)
    if problems:
        raise gathered(problems)
    return layers


def _join(module: str, segment: str) -> str:
    return f"{module}.{segment}" if module else segment


def _show(layer: _Layer, files: dict[str, VirtualFile], cache: BandCache) -> list[Entry]:
    """Return the entries of compressed-tensors for a module, the codes first, and add their virtual files."""
    rows, columns, words = layer.rows, layer.columns, layer.columns // layer.per_word
    groups = columns if layer.method.reordered else layer.scales.shape[0]
    real = layer.scales.dtype

    def entry(segment: str, dtype: str, shape: Shape, file: VirtualFile) -> Entry:
        name = _join(layer.module, segment)
        files[_FILE + name] = file
        return Entry(name, dtype, shape, (Extent((0,) * len(shape), shape, _FILE + name, 0),))

    def in_bands(height: int, width: int, unit: int, compute: Callable[[int, int], NDArray[Any]]) -> RowFile:
        return RowFile(height, width, unit, compute, cache)

    if layer.method.reordered:
        width = columns * numpy_dtype(real).itemsize
        scale = entry(SCALE, real, (rows, groups), in_bands(rows, width, 1, layer.scale_rows))
    else:
        scale = _transpose(layer.scales, _join(layer.module, SCALE))
    unit = 8 if layer.method.name == AWQ else 1
    return [
        entry(PACKED, "I32", (rows, words), in_bands(rows, words * 4, unit, layer.code_rows)),
        scale,
        entry(
            ZERO,
            "I32",
            (rows // layer.per_word, groups),
            in_bands(rows // layer.per_word, groups * 4, 1, layer.zero_rows),
        ),
        entry(SHAPE, "I64", (2,), InMemoryFile(np.array([rows, columns], "<i8").tobytes())),
    ]


def _transpose(entry: Entry, name: str) -> Entry:
    """Return the entry of a matrix whose dims are exchanged; its bytes are read with strides."""
    extents = tuple(
        replace(
            extent,
            start=extent.start[::-1],
            shape=extent.shape[::-1],
            strides=(extent.strides or (extent.shape[1], 1))[::-1],
        )
        for extent in entry.extents
    )
    return Entry(name, entry.dtype, entry.shape[::-1], extents)


def _layer(entries: Mapping[str, Entry], module: str, method: PackedMethod, source: Source) -> _Layer:
    """Return a module whose tensors fit together and fit the config.

    Raises:
        Refused: with the first reason for which they do not fit.
    """
    find = partial(_find, entries, module, PACKED_METHODS[method.name])
    codes, zeros, scales = find(CODES, ("I32",), 2), find(ZEROS, ("I32",), 2), find(SCALES, _REALS, 2)
    needs_order = method.reordered or _join(module, ORDER) in entries
    order = find(ORDER, ("I32", "I64"), 1) if needs_order else None
    groups, rows = scales.shape
    bits = method.bits
    if method.varied and rows and zeros.shape[1] * _WORD % rows == 0:
        bits = zeros.shape[1] * _WORD // rows
    if bits not in BITS:
        message = f"codes of {bits} bits; known: {', '.join(map(str, BITS))}"
        raise refuse("UNSUPPORTED", message, tensor=codes.name, hint=_KEEP)
    per_word = _WORD // bits
    columns = codes.shape[0] * (1 if method.name == AWQ else per_word)
    size = columns // groups if method.varied and groups else method.group
    size = size if 0 < size < columns else -1
    if not rows or not columns or rows % per_word or columns % per_word or (size > 0 and columns % size):
        message = f"{rows:,} outputs and {columns:,} inputs do not fill whole words and groups"
        raise refuse("SHAPE_MISMATCH", message, tensor=codes.name)
    count = 1 if size < 0 else columns // size
    packed = (columns, rows // per_word) if method.name == AWQ else (columns // per_word, rows)
    expected = [(codes, packed), (zeros, (count, rows // per_word)), (scales, (count, rows))]
    for entry, shape in expected if order is None else [*expected, (order, (columns,))]:
        if entry.shape != shape:
            message = (
                f"it is {list(entry.shape)}; expected {list(shape)} for {rows:,} outputs, {columns:,} inputs, "
                f"{bits} bits and group_size {method.group}"
            )
            raise refuse("SHAPE_MISMATCH", message, tensor=entry.name)
    return _Layer(module, method, Kind(bits, size), codes, zeros, scales, order, rows, columns, source)


def _find(
    entries: Mapping[str, Entry], module: str, program: str, segment: str, dtypes: Sequence[str], dims: int
) -> Entry:
    """Return a tensor of a module, or refuse a missing one, another dtype and another number of dims."""
    name = _join(module, segment)
    entry = entries.get(name)
    if entry is None:
        message = f"codes of {program} need {segment} beside them"
        raise refuse("MISSING_TENSOR", message, tensor=_join(module, CODES))
    if entry.dtype in dtypes and len(entry.shape) == dims:
        return entry
    code: Code = "SHAPE_MISMATCH" if entry.dtype in dtypes else "DTYPE_MISMATCH"
    message = f"{segment} of {program} must be {' or '.join(dtypes)} of {dims} dims"
    raise refuse(code, f"{message}; found {entry.dtype} {list(entry.shape)}", tensor=name)
