"""Views that show encoded tensors in a different convention or encoding, without rounding any value (`--restate`).

A restated checkpoint looks as if it had been saved in the target's convention: its entries have the names, dtypes and
shapes of that convention, and its config describes them. So the code that plans, translates, copies and verifies needs
to know nothing of restating. Buffers whose bytes do not change are read where they are stored. The bytes of all other
buffers are computed when they are read, in bounded memory, as virtual files.

Whether a tensor can be restated exactly may depend on its scales, and sometimes on its codes. A plan checks this before
anything is written, and a virtual file checks it again when it is read.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from math import prod
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.encodings.conventions.convention import (
    CONVENTIONS,
    DEEPSEEK,
    MODELOPT,
    PACKED_BYTES,
    PREFERRED,
    TE,
    TE_NOTE,
    TORCHAO,
    WORDS,
    Convention,
    Shape,
    training_only,
)
from transaxle.encodings.conventions.quantization import CONFIG, MODELOPT_CONFIG
from transaxle.encodings.conventions.restating import (
    BF16,
    RECODINGS,
    RESTATED_CONVENTIONS,
    RestatedNumbers,
    cache_scale_names,
    can_store,
    check_cache,
    conventions_with,
    dtype_of_model,
    encoding_in,
    expects_input_scales,
    input_meaning,
    restate_globals,
    restate_inputs,
    widen_integers,
    widen_zero_points,
)
from transaxle.encodings.conventions.rewriting import rewrite_config, without_quantization
from transaxle.encodings.conventions.scheme import CHANNEL
from transaxle.encodings.conventions.torchao_convention import NAMES, PLAIN_TENSOR, describe_tensor
from transaxle.encodings.encoding import (
    ENCODINGS,
    FLOAT8_BLOCK,
    INT8,
    MXFP8,
    NVFP4,
    EncodedTensor,
    Encoding,
    Role,
)
from transaxle.engine.source import Source, in_bytes, redescribe
from transaxle.engine.views.decoded import Decoder, RowMajorBytes, buffer_bytes, with_decoded, without_notes
from transaxle.engine.views.encoded import Catalog, buffer_name, catalog, without_zero_points
from transaxle.engine.views.stated_shapes import with_shape_files
from transaxle.engine.wording import plural
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Container, Entry, Extent, nbytes, numpy_dtype
from transaxle.formats.storage.copier import Bytes
from transaxle.formats.storage.storage import InMemoryFile, NotJsonError, VirtualFile, VirtualFiles, parse_json
from transaxle.move.transfer import Readable

Config: TypeAlias = Mapping[str, Any]
"""Content of a model's config.json."""

_FILE = "\0restated in "
"""Prefix of the names of the virtual files that contain computed buffers."""
_BAND = 1 << 18
"""Number of bytes of a buffer that are computed at once."""
_E8M0_NAN = 255
_E5M2 = "F8_E5M2"
_MATRIX, _OF_LINEAR = 2, ".weight"
"""Number of dims, and end of the name, of the weight of a linear layer."""
_CACHED = 64
"""Number of rows of tiles whose scales are cached."""
_LEAVE = "To leave the tensors in their convention, omit --restate. For decoded values, write --decode bf16 instead."
_RECODE = "To leave the tensors in their encoding, omit --restate. For decoded values, write --decode bf16 instead."
_SPAN = 32
"""Number of elements of an mxfp4 tensor that share one scale."""
_PAIRS = np.stack(np.meshgrid(np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8)), -1).reshape(256, 2)
"""Byte -> its two 4-bit codes, the low one first."""


def restate_tensors(tensors: Catalog, to: str, user_config: Config | None) -> tuple[Container, Config | None]:
    """Return a checkpoint's container with all encoded tensors in a different convention or encoding, and the user's
    config, changed to describe them.

    Args:
        tensors: the stored tensors.
        to: a convention, an encoding, or `bf16` for decoded values.
        user_config: the model's config that the user gave; None means the config.json of the checkpoint.

    Raises:
        Refused: if buffers of encoded tensors cannot be matched; with the code UNSUPPORTED, for every tensor that the
            target cannot express.
        UsageError: with code AMBIGUOUS, if the target is unknown, or the checkpoint has no encoded tensors.
    """
    targets = (*RESTATED_CONVENTIONS, *RECODINGS, BF16)
    if to not in targets:
        raise refuse("AMBIGUOUS", f"cannot restate as {to!r}", hint=f"Choose one of: {', '.join(targets)}.")
    if tensors.refusals:
        raise gathered(tensors.refusals)
    if not tensors.encoded:
        raise refuse("AMBIGUOUS", "nothing to restate: the checkpoint has no encoded tensors")
    if to != BF16:
        return _Restating(tensors, to, user_config).run()
    container = with_decoded(tensors, tensors.encoded, "BF16")
    computed = container.recoding.computed.values()
    checks = tuple(partial(_inexact_value, decoder) for decoder in computed if isinstance(decoder, Decoder))
    recoding = structs.replace(container.recoding, checks=(*container.recoding.checks, *checks))
    return structs.replace(container, recoding=recoding), user_config


def _inexact_value(decoder: Decoder, whole: bool) -> Refusal | None:
    """Return the refusal of a tensor with a value that its dtype cannot represent."""
    count, first = decoder.inexact_values(whole=whole)
    if first is None:
        return None
    number = plural(count, "value") if whole else "a value"
    message = f"{number} (code times scale) cannot be represented in {decoder.dtype}; the first is at {list(first)}"
    hint = "For rounded values, write --decode bf16 instead. More values are exact in fp32:  --decode fp32 instead."
    return Refusal("UNSUPPORTED", message, Where(None, decoder.tensor.name), hint)


class _Computed(msgspec.Struct, frozen=True):
    """A virtual file whose bytes are computed in bands when they are read."""

    nbytes: int
    """Size of the file in bytes; see `VirtualFile`."""
    compute: Callable[[int, int], Bytes]
    """Function that returns the bytes from one offset up to another."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a view with the bytes that begin at `offset`; see `VirtualFile`."""
        out = np.frombuffer(view, np.uint8)
        for start in range(0, len(out), _BAND):
            stop = min(len(out), start + _BAND)
            out[start:stop] = self.compute(offset + start, offset + stop)


class _Stored:
    """The buffers of one encoded tensor as they are stored, read in row-major order."""

    def __init__(self, tensor: EncodedTensor, source: Source, reader: Readable) -> None:
        self.tensor = tensor
        self._source, self._reader = source, reader
        shape = (1,) * (2 - len(tensor.shape)) + tensor.shape
        self.matrices = prod(shape[:-2])
        self.rows, self.columns = shape[-2:]

    def entry(self, role: Role) -> Entry:
        """Return the entry of a buffer, in elements of the encoding."""
        return self._source.entries[buffer_name(self.tensor.name, role)]

    @cached_property
    def codes(self) -> RowMajorBytes:
        """The bytes of the codes."""
        return self._bytes(Role.CODES)

    @cached_property
    def scales(self) -> RowMajorBytes:
        """The bytes of the scales."""
        return self._bytes(Role.SCALE)

    def bytes_of(self, role: Role) -> RowMajorBytes:
        """Return the bytes of a buffer."""
        return self.codes if role is Role.CODES else self.scales if role is Role.SCALE else self._bytes(role)

    def _bytes(self, role: Role) -> RowMajorBytes:
        return buffer_bytes(self._source, self._reader, buffer_name(self.tensor.name, role))

    def numbers(self, role: Role) -> NDArray[np.float32]:
        """Return the numbers of a buffer with one number per matrix."""
        entry = self.entry(role)
        return self._bytes(role).read(0, entry.nbytes).view(numpy_dtype(entry.dtype)).astype(np.float32)


Place = tuple[str, Shape]
"""Dtype and shape with which a buffer is presented."""
Check = Callable[[bool], Refusal | None]
"""Function that returns the refusal of a tensor; its argument tells whether to count all values that are not exact."""


class _NewBuffers(msgspec.Struct, frozen=True):
    """How the buffers of one tensor are restated."""

    encoding: Encoding
    """Encoding of the tensor in the target."""
    computed: Mapping[Role, Callable[[int, int], Bytes]]
    """Role -> function that computes the bytes of this buffer; the bytes of all other buffers stay the same."""
    roles: Sequence[Role]
    """Roles of the tensor's buffers in the target."""
    checks: Sequence[Check] = ()
    """Functions that check whether all values stay the same."""


class _Globals:
    """Per-tensor scales (and scales of inputs) in a different convention, computed once for each tensor."""

    def __init__(self, stored: _Stored, target: Convention, dtype: str) -> None:
        self._stored, self._target, self._dtype = stored, target, dtype

    @cached_property
    def _result(self) -> RestatedNumbers:
        source, encoding = CONVENTIONS[self._stored.tensor.convention], self._stored.tensor.encoding
        return restate_globals(self._stored.numbers(Role.GLOBAL), encoding, source, self._target, self._dtype)

    def refusal(self, _: bool) -> Refusal | None:
        """Return the refusal of a tensor whose per-tensor scale cannot be expressed; see `Check`."""
        exact = self._result.is_exact
        if exact.all():
            return None
        number = float(self._stored.numbers(Role.GLOBAL)[~exact][0])
        message = (
            f"its per-tensor scale is {number!r}: values of {self._dtype} would change, because no float32 number "
            f"expresses it in {self._target.name}"
        )
        return Refusal("UNSUPPORTED", message, Where(None, self._stored.tensor.name), _LEAVE)

    def compute(self, start: int, stop: int) -> Bytes:
        """Return bytes of the restated scales."""
        if (refusal := self.refusal(False)) is not None:
            raise gathered([refusal])
        return self._result.numbers.astype("<f4").view(np.uint8)[start:stop]

    def compute_inputs(self, start: int, stop: int) -> Bytes:
        """Return bytes of the restated input scales."""
        return restate_inputs(self._stored.numbers(Role.INPUT_SCALE)).astype("<f4").view(np.uint8)[start:stop]


def _reals_of_exponents(stored: _Stored, start: int, stop: int) -> Bytes:
    """Return bytes of E8M0 scales as float32 numbers."""
    from transaxle.encodings.arithmetic.minifloat import power_of_two

    first = start // 4
    numbers = power_of_two(stored.scales.read(first, -(-stop // 4)))
    return numbers.astype("<f4").view(np.uint8)[start - 4 * first : stop - 4 * first]


def _as_eight_bits(stored: _Stored, start: int, stop: int) -> Bytes:
    """Return E2M1 codes as E4M3 codes of the same values."""
    pairs = _e4m3_pairs()[-_LEAST << 8 :].take(stored.codes.read(start // 2, -(-stop // 2)))
    return pairs.view(np.uint8)[start % 2 :][: stop - start]


def _as_bytes(stored: _Stored, start: int, stop: int) -> Bytes:
    """Return 4-bit integers as 8-bit integers of the same values."""
    return widen_integers(stored.codes.read(start // 2, -(-stop // 2)))[start % 2 :][: stop - start]


def _zeros_as_bytes(stored: _Stored, start: int, stop: int) -> Bytes:
    """Return 4-bit zero points as 8-bit zero points of the same values."""
    shape = stored.entry(Role.ZERO).shape
    matrix_bytes = prod(shape[-2:]) * _WORD_BYTES
    wide_bytes = -(-stored.rows // WORDS[PACKED_BYTES]) * shape[-1] * _WORD_BYTES
    first, last = start // wide_bytes, -(-stop // wide_bytes)
    words = stored.bytes_of(Role.ZERO).read(first * matrix_bytes, last * matrix_bytes)
    matrices = words.reshape(last - first, *shape[-2:], _WORD_BYTES)
    wide = np.concatenate([widen_zero_points(matrix, stored.rows).reshape(-1) for matrix in matrices])
    return wide[start - first * wide_bytes : stop - first * wide_bytes]


_WORD_BYTES = 4


@cache
def _e4m3_pairs() -> NDArray[np.uint16]:
    """Return a table of pairs of E4M3 codes: entry `256 (8 + n) + b` has the codes of the two E2M1 values of the byte
    `b`, times `2**n`; the last 256 entries are NaN.
    """
    from transaxle.encodings.arithmetic.minifloat import E2M1, E4M3

    byte_of = {float(value): byte for byte, value in enumerate(E4M3.values[: E4M3.largest + 1])}
    rows = [[byte_of[float(value) * 2.0**power] for value in E2M1.values[:8]] for power in range(_LEAST, _MOST + 1)]
    table = np.array([*rows, [E4M3.nan] * 8], np.uint8)
    codes = np.concatenate([table, table | 0x80], axis=1)
    return np.ascontiguousarray(codes[:, _PAIRS]).view("<u2").reshape(-1)


_LEAST, _MOST = -8, 6
"""Smallest and largest power of two by which every E2M1 value can be multiplied to become an E4M3 value."""


class _TileRow(msgspec.Struct, frozen=True):
    """The scales of one row of 128 x 128 tiles."""

    power: NDArray[np.int16]
    """Power of two that is the scale of each tile."""
    spread: int
    """Largest difference of two exponents in one tile, of blocks with a code other than 0."""


class _InTiles:
    """mxfp4 codes and scales as E4M3 codes with one scale, a power of two, per tile of 128 x 128."""

    def __init__(self, stored: _Stored) -> None:
        self._stored = stored
        self._groups = stored.columns // _SPAN
        self._tile, self._width = FLOAT8_BLOCK.tile[0], FLOAT8_BLOCK.tile[1] // _SPAN
        self._grid_rows, self._grid_columns = (-(-size // self._tile) for size in (stored.rows, stored.columns))
        self._tile_row = lru_cache(_CACHED)(self._read_tile_row)

    def refusal(self, _: bool) -> Refusal | None:
        """Return the refusal of a tensor with a tile whose scales are too far apart; see `Check`."""
        for number in range(self._stored.matrices * self._grid_rows):
            spread = self._read_tile_row(number).spread
            if spread > _MOST - _LEAST:
                message = (
                    f"the scales in one tile of 128 x 128 are up to 2^{spread} apart; E4M3 codes under one scale "
                    f"express 2^{_MOST - _LEAST}"
                )
                return Refusal("UNSUPPORTED", message, Where(None, self._stored.tensor.name), _RECODE)
        return None

    def compute_scales(self, start: int, stop: int) -> Bytes:
        """Return bytes of the scales of tiles."""
        width = self._grid_columns * 4
        first, last = start // width, -(-stop // width)
        powers = np.concatenate([self._require_tile_row(number).power for number in range(first, last)])
        numbers = np.ldexp(np.float32(1), powers.astype(np.int32)).astype("<f4")
        return numbers.view(np.uint8)[start - first * width : stop - first * width]

    def compute_codes(self, start: int, stop: int) -> Bytes:
        """Return E4M3 codes."""
        columns = self._stored.columns
        first, last = start // columns, -(-stop // columns)
        parts, row = [], first
        while row < last:
            matrix, inside = divmod(row, self._stored.rows)
            count = min(last - row, self._tile - inside % self._tile, self._stored.rows - inside)
            tile_row = self._require_tile_row(matrix * self._grid_rows + inside // self._tile)
            parts.append(self._codes(row, count, tile_row))
            row += count
        return np.concatenate(parts)[start - first * columns : stop - first * columns]

    def _codes(self, row: int, count: int, tile_row: _TileRow) -> Bytes:
        exponents, codes = self._read(row, count)
        powers = tile_row.power.repeat(self._width)[: self._groups]
        shifts = exponents.astype(np.int16) - 127 - powers
        table_rows = np.where(exponents == _E8M0_NAN, _MOST - _LEAST + 1, shifts.clip(_LEAST, _MOST) - _LEAST)
        first_entries = (table_rows.astype(np.int16) << 8)[..., None]
        return _e4m3_pairs().take(first_entries + codes.reshape(count, self._groups, -1)).reshape(-1).view(np.uint8)

    def _require_tile_row(self, number: int) -> _TileRow:
        tile_row = self._tile_row(number)
        if tile_row.spread > _MOST - _LEAST and (refusal := self.refusal(False)) is not None:
            raise gathered([refusal])
        return tile_row

    def _read(self, row: int, count: int) -> tuple[Bytes, Bytes]:
        """Read the scales and the codes of some rows."""
        groups, half = self._groups, self._stored.columns // 2
        scales = self._stored.scales.read(row * groups, (row + count) * groups).reshape(count, groups)
        return scales, self._stored.codes.read(row * half, (row + count) * half).reshape(count, half)

    def _read_tile_row(self, number: int) -> _TileRow:
        """Return one row of tiles; codes are read only if the scales alone are too far apart."""
        matrix, inside = divmod(number, self._grid_rows)
        row = matrix * self._stored.rows + inside * self._tile
        count = min(self._tile, self._stored.rows - inside * self._tile)
        groups = self._groups
        scales = self._stored.scales.read(row * groups, (row + count) * groups).reshape(count, groups)
        tile_row = self._tile_row_of(scales, scales != _E8M0_NAN)
        if tile_row.spread <= _MOST - _LEAST:
            return tile_row
        _, codes = self._read(row, count)
        return self._tile_row_of(scales, (scales != _E8M0_NAN) & _has_values(codes, groups))

    def _tile_row_of(self, scales: Bytes, counted: NDArray[np.bool_]) -> _TileRow:
        padding = ((0, 0), (0, self._grid_columns * self._width - self._groups))
        low, high = (
            np.pad(np.where(counted, scales.astype(np.int16), empty), padding, constant_values=empty).reshape(
                len(scales), self._grid_columns, self._width
            )
            for empty in (_E8M0_NAN, -1)
        )
        lowest, highest = low.min(axis=(0, 2)), high.max(axis=(0, 2))
        used = highest >= 0
        power = np.where(used, highest - 127 - _MOST, 0).astype(np.int16)
        return _TileRow(power, int((highest - lowest)[used].max(initial=0)))


def _has_values(codes: Bytes, groups: int) -> NDArray[np.bool_]:
    """Return for each group of 32 codes, two to a byte, whether one of them is not 0."""
    return np.asarray((codes.reshape(len(codes), groups, _SPAN // 2) & 0x77).any(axis=2))


class _InTwoLevels:
    """mxfp4 scales as E4M3 scales of half as long blocks, with a power of two as the scale of each matrix."""

    def __init__(self, stored: _Stored, target: Convention) -> None:
        self._stored, self._target = stored, target
        self._size = stored.rows * stored.columns // _SPAN
        """Number of scales of one matrix."""
        self._lock = threading.Lock()
        self._ranges: dict[int, tuple[int, int]] = {}

    def refusal(self, _: bool) -> Refusal | None:
        """Return the refusal of a tensor with a matrix whose scales are too far apart; see `Check`."""
        for matrix in range(self._stored.matrices):
            lowest, highest = self._range(matrix)
            if highest - lowest > _E4M3_POWERS:
                message = f"the scales of one matrix are up to 2^{highest - lowest} apart; E4M3 expresses 2^17"
                return Refusal("UNSUPPORTED", message, Where(None, self._stored.tensor.name), _RECODE)
        return None

    def compute_globals(self, start: int, stop: int) -> Bytes:
        """Return bytes of the per-tensor scales."""
        powers = np.array([self._power(matrix) for matrix in range(self._stored.matrices)], np.int32)
        factors = np.ldexp(np.float32(1), -powers if self._target.meaning == "divisor" else powers)
        numbers = factors * np.float32(NVFP4.scale_max * NVFP4.code_max if self._target.meaning == "amax" else 1)
        return numbers.astype("<f4").view(np.uint8)[start:stop]

    def compute_scales(self, start: int, stop: int) -> Bytes:
        """Return E4M3 scales: the scale of a block of 32 elements twice."""
        first, last = start // 2, -(-stop // 2)
        parts = []
        while first < last:
            matrix = first // self._size
            end = min(last, (matrix + 1) * self._size)
            shifts = self._stored.scales.read(first, end).astype(np.int16) - 127 - self._power(matrix)
            nan = shifts == _E8M0_NAN - 127 - self._power(matrix)
            parts.append(np.where(nan, _E4M3_NAN, _POWERS[shifts.clip(-9, 8) + 9]).astype(np.uint8))
            first = end
        return np.concatenate(parts).repeat(2)[start % 2 :][: stop - start]

    def _power(self, matrix: int) -> int:
        """Return the exponent of a matrix's scale: its largest block scale becomes 2^8, if float32 allows it."""
        lowest, highest = self._range(matrix)
        if highest - lowest > _E4M3_POWERS and (refusal := self.refusal(False)) is not None:
            raise gathered([refusal])
        return max(highest - 127 - 8, -126)

    def _range(self, matrix: int) -> tuple[int, int]:
        """Return the smallest and the largest exponent of a matrix, of blocks that have a code other than 0."""
        with self._lock:
            if matrix not in self._ranges:
                lowest, highest = self._scan(matrix, by_codes=False)
                if highest - lowest > _E4M3_POWERS:
                    lowest, highest = self._scan(matrix, by_codes=True)
                self._ranges[matrix] = (lowest, highest) if lowest <= highest else (127, 127)
            return self._ranges[matrix]

    def _scan(self, matrix: int, *, by_codes: bool) -> tuple[int, int]:
        lowest, highest = _E8M0_NAN, -1
        begin, end = matrix * self._size, (matrix + 1) * self._size
        for start in range(begin, end, _BAND):
            stop = min(end, start + _BAND)
            scales = self._stored.scales.read(start, stop)
            counted = scales != _E8M0_NAN
            if by_codes:
                codes = self._stored.codes.read(start * _SPAN // 2, stop * _SPAN // 2)
                counted &= _has_values(codes.reshape(1, -1), stop - start).reshape(-1)
            if counted.any():
                lowest = min(lowest, int(scales[counted].min()))
                highest = max(highest, int(scales[counted].max()))
        return lowest, highest


_E4M3_POWERS = 17
"""Largest difference of the exponents of two powers of two in E4M3, which are 2^-9 to 2^8."""
_E4M3_NAN = 0x7F
_POWERS = np.array([1, 2, 4, *(exponent << 3 for exponent in range(1, 16))], np.uint8)
"""E4M3 codes of 2^-9 to 2^8."""


class _Restating:
    """Restates all encoded tensors of one checkpoint."""

    def __init__(self, tensors: Catalog, to: str, user_config: Config | None) -> None:
        self._catalog, self._to, self._user_config = tensors, to, user_config
        self._container = self._catalog.container
        self._source = Source(self._container, self._catalog.buffers)
        self._dtype = dtype_of_model(_read_config(self._container) if user_config is None else user_config)
        self._problems: list[Refusal] = []
        self._files: dict[str, VirtualFile] = {}
        self._checks: list[Check] = []
        self._encoded: dict[str, EncodedTensor] = {}
        self._new: dict[str, list[Entry]] = {}
        """Stored name of codes -> entries of all buffers of the restated tensor."""

    def run(self) -> tuple[Container, Config | None]:
        """Return the restated container, and the user's config with a description of the restated tensors."""
        for tensor in self._catalog.encoded.values():
            try:
                self._restate(tensor)
            except TransaxleError as error:
                self._problems.extend(error.refusals)
        if self._problems:
            raise gathered(self._problems)
        if not self._new and not self._catalog.program:
            return self._container, self._user_config
        container = self._with_buffers()
        user_config = None if self._user_config is None else self._rewrite(self._user_config, container)
        container = self._with_config(container)
        config = _read_config(container) if user_config is None else user_config
        reread = catalog(container, config, None).encoded
        if {name: tensor.parts for name, tensor in reread.items()} != {
            name: tensor.parts for name, tensor in self._encoded.items()
        }:
            message = "without a config, the names of its tensors would not show how they are encoded"
            hint = "Give the model's config with --config FILE."
            raise refuse("UNSUPPORTED", f"{self._to}: {message}", file=self._container.path, hint=hint)
        return container, user_config

    def _restate(self, tensor: EncodedTensor) -> None:
        stored = _Stored(tensor, self._source, self._container.storage)
        if self._catalog.program and tensor.encoding.tiles(tensor.shape)[-1] == 1 < tensor.shape[-1]:
            message = f"{self._catalog.program} has its columns in another order (desc_act): each would get a scale"
            raise refuse("UNSUPPORTED", message, tensor=tensor.name, hint=_LEAVE)
        recoded = self._to not in RESTATED_CONVENTIONS
        is_unchanged = self._to == tensor.encoding.name or RESTATED_CONVENTIONS.get(self._to) == tensor.convention
        target = CONVENTIONS[tensor.convention] if is_unchanged else self._target(tensor)
        if tensor.name in self._catalog.symmetric:
            tensor = without_zero_points(tensor)
            stored = _Stored(tensor, self._source, self._container.storage)
            self._new[tensor.parts[Role.CODES]] = [self._container.entries[name] for name in tensor.parts.values()]
        if is_unchanged:
            self._encoded[tensor.name] = tensor
            return
        new = self._recode(stored, target) if recoded else self._rename(stored, target)
        parts = {role: target.stored(tensor.name, role, new.encoding) for role in new.roles}
        self._encoded[tensor.name] = EncodedTensor(tensor.name, new.encoding, tensor.shape, parts, target.name)
        self._new[tensor.parts[Role.CODES]] = [
            self._entry(stored, role, name, self._place(stored, role, new, target), new.computed.get(role))
            for role, name in parts.items()
        ]
        self._checks += new.checks

    def _target(self, tensor: EncodedTensor) -> Convention:
        """Return the convention of a tensor in the target, or refuse the tensor."""
        name, where = tensor.encoding.name, tensor.name
        if self._to in RESTATED_CONVENTIONS:
            target = CONVENTIONS[RESTATED_CONVENTIONS[self._to]]
            if not can_store(target, tensor.encoding):
                kind = f"{name} with a scale per row" if tensor.encoding.tile == CHANNEL.tile else name
                message = f"{kind} cannot be stored in the convention {target.name}"
                listed = ", ".join(conventions_with(tensor.encoding))
                hint = f"Conventions with {name}: {listed}." if listed else _LEAVE
                raise refuse("UNSUPPORTED", message, tensor=where, hint=hint)
            if target.name == TORCHAO and (len(tensor.shape) != _MATRIX or not tensor.name.endswith(_OF_LINEAR)):
                message = "torchao describes weights of linear layers only"
                raise refuse("UNSUPPORTED", message, tensor=where, hint=_LEAVE)
            if tensor.encoding.code == _E5M2:
                message = f"codes of {tensor.encoding.code}: the config of {target.name} cannot describe them"
                raise refuse("UNSUPPORTED", message, tensor=where, hint=_LEAVE)
            return target
        source = CONVENTIONS[tensor.convention]
        if name not in RECODINGS[self._to]:
            message = f"{name} cannot be recoded as {self._to} without rounding; only {_join(RECODINGS[self._to])} can"
            raise refuse("UNSUPPORTED", message, tensor=where, hint=_RECODE)
        return source if self._to in source.writes else CONVENTIONS[PREFERRED[self._to]]

    def _rename(self, stored: _Stored, target: Convention) -> _NewBuffers:
        """Return a tensor's buffers in a different convention, in the same encoding."""
        tensor = stored.tensor
        encoding, source = encoding_in(tensor.encoding, target), CONVENTIONS[tensor.convention]
        computed: dict[Role, Callable[[int, int], Bytes]] = {}
        checks: list[Check] = []
        numbers = _Globals(stored, target, self._dtype)
        if Role.GLOBAL in tensor.parts and (source.meaning, source.scale_max) != (target.meaning, target.scale_max):
            computed[Role.GLOBAL] = numbers.compute
            checks.append(numbers.refusal)
        if Role.INPUT_SCALE in tensor.parts:
            if Role.INPUT_SCALE not in target.forms(encoding) or target.name == TORCHAO:
                message = f"{target.name} has no place for the scale of its inputs, {tensor.parts[Role.INPUT_SCALE]}"
                raise refuse("UNSUPPORTED", message, tensor=tensor.name, hint=_LEAVE)
            if input_meaning(source, encoding) != input_meaning(target, encoding):
                computed[Role.INPUT_SCALE] = numbers.compute_inputs
        elif expects_input_scales(target, encoding):
            message = f"{encoding.name} of {target.name} has a scale of its inputs, and this layer has none"
            raise refuse("UNSUPPORTED", message, tensor=tensor.name, hint=_LEAVE)
        if encoding.scale == MXFP8.scale and encoding.name == FLOAT8_BLOCK.name and not _has_exponents(target):
            encoding = replace(encoding, scale=FLOAT8_BLOCK.scale)
            computed[Role.SCALE] = partial(_reals_of_exponents, stored)
        return _NewBuffers(encoding, computed, tuple(tensor.parts), checks)

    def _recode(self, stored: _Stored, target: Convention) -> _NewBuffers:
        """Return a tensor's buffers in a different encoding."""
        tensor, encoding = stored.tensor, ENCODINGS[self._to]
        if Role.INPUT_SCALE in tensor.parts:
            message = f"the scale of its inputs, {tensor.parts[Role.INPUT_SCALE]}, belongs to {tensor.encoding.name}"
            raise refuse("UNSUPPORTED", message, tensor=tensor.name, hint=_RECODE)
        if encoding is INT8:
            zero_rows = WORDS[PACKED_BYTES] if tensor.encoding.zero_rows else 0
            encoding = replace(tensor.encoding, name=INT8.name, code=PACKED_BYTES, zero_rows=zero_rows)
            computed: dict[Role, Callable[[int, int], Bytes]] = {Role.CODES: partial(_as_bytes, stored)}
            if zero_rows:
                computed[Role.ZERO] = partial(_zeros_as_bytes, stored)
            return _NewBuffers(encoding, computed, tuple(tensor.parts))
        if encoding is MXFP8:
            return _NewBuffers(encoding, {Role.CODES: partial(_as_eight_bits, stored)}, (Role.CODES, Role.SCALE))
        if encoding is FLOAT8_BLOCK:
            tiles = _InTiles(stored)
            computed = {Role.CODES: tiles.compute_codes, Role.SCALE: tiles.compute_scales}
            return _NewBuffers(encoding, computed, (Role.CODES, Role.SCALE), (tiles.refusal,))
        levels = _InTwoLevels(stored, target)
        computed = {Role.SCALE: levels.compute_scales, Role.GLOBAL: levels.compute_globals}
        return _NewBuffers(encoding, computed, (Role.CODES, Role.SCALE, Role.GLOBAL), (levels.refusal,))

    def _place(self, stored: _Stored, role: Role, new: _NewBuffers, target: Convention) -> Place:
        """Return the dtype and shape of a buffer in the target; real numbers keep the dtype that they have."""
        dtype = None
        if role not in new.computed and role in stored.tensor.parts and role is not Role.CODES:
            dtype = stored.entry(role).dtype
        if role is Role.SCALE and target.name == TORCHAO:
            return dtype or new.encoding.scale, new.encoding.grid(stored.tensor.shape)
        exponents = dtype in ("U8", MXFP8.scale)
        return target.presented(new.encoding, stored.tensor.shape, role, None if exponents else dtype)

    def _entry(
        self,
        stored: _Stored,
        role: Role,
        name: str,
        place: Place,
        compute: Callable[[int, int], Bytes] | None,
    ) -> Entry:
        """Return the entry of a buffer: with the stored bytes if they fit into it, else with a virtual file."""
        dtype, shape = place
        if compute is None:
            try:
                return redescribe(in_bytes(stored.entry(role)), name, dtype, shape)
            except TransaxleError:  # the stored chunks are no boxes of the new shape
                compute = stored.bytes_of(role).read
        self._files[_FILE + name] = _Computed(nbytes(dtype, shape), compute)
        return Entry(name, dtype, shape, (Extent((0,) * len(shape), shape, _FILE + name, 0),))

    def _with_buffers(self) -> Container:
        """Return the container with the entries of all restated tensors."""
        container = self._container
        changed = [tensor for tensor in self._catalog.encoded.values() if tensor.parts[Role.CODES] in self._new]
        new_names = {
            old: self._encoded[tensor.name].parts.get(role) for tensor in changed for role, old in tensor.parts.items()
        }
        training = training_only([tensor.parts[Role.CODES] for tensor in changed], container.entries)
        entries: dict[str, Entry] = {}
        cached = cache_scale_names(container.entries, RESTATED_CONVENTIONS.get(self._to, ""))
        for name, entry in container.entries.items():
            plain = _rename_number(entry, cached[name], RESTATED_CONVENTIONS[self._to]) if name in cached else entry
            for new_entry in self._new.get(name, () if name in new_names or name in training else (plain,)):
                if new_entry.name in entries:
                    message = "two tensors would have this name"
                    raise refuse("NAME_COLLISION", message, tensor=new_entry.name)
                entries[new_entry.name] = new_entry
        metadata = without_notes(container.metadata, {tensor.name for tensor in changed})
        metadata.pop(TE_NOTE, None)
        if any(tensor.convention == TORCHAO for tensor in self._encoded.values()):
            metadata |= self._torchao_notes(entries)
        renamed = {old: new for old, new in new_names.items() if new is not None}
        renamed |= cached
        training_entries = {name: container.entries[name] for name in training}
        encodings = {tensor.encoding.name: self._encoded[tensor.name].encoding.name for tensor in changed}
        recoding = structs.replace(
            container.recoding,
            checks=(*container.recoding.checks, *self._checks),
            encodings={old: new for old, new in encodings.items() if old != new},
            notes=(*container.recoding.notes, *self._notes(changed)),
            restated=RESTATED_CONVENTIONS.get(self._to, ""),
        )
        return structs.replace(
            container,
            storage=VirtualFiles(with_shape_files(container).storage, self._files),
            entries=entries,
            metadata=metadata,
            left={**container.left, **training_entries},
            recoding=recoding,
            whole=None if container.whole is None else frozenset(renamed.get(name, name) for name in container.whole),
            spreads={renamed.get(name, name): spread for name, spread in container.spreads.items()},
        )

    def _torchao_notes(self, entries: Mapping[str, Entry]) -> dict[str, str]:
        """Return torchao's descriptions of all tensors, for the headers of the files."""
        parts = {stored for tensor in self._encoded.values() for stored in tensor.parts.values()}
        notes: dict[str, Any] = {name: dict(PLAIN_TENSOR) for name in entries if name not in parts}
        for tensor in self._encoded.values():
            stored = tensor.parts.values()
            notes[tensor.name] = describe_tensor(tensor.encoding, tensor.shape, stored, tensor.name, self._dtype)
        return {NAMES: json.dumps(list(notes)), **{name: json.dumps(note) for name, note in notes.items()}}

    def _notes(self, changed: Sequence[EncodedTensor]) -> Iterator[str]:
        kinds: dict[tuple[str, str], int] = {}
        for tensor in changed:
            new = self._encoded[tensor.name]
            before, after = (f"{each.encoding.name} ({each.convention})" for each in (tensor, new))
            kinds[before, after] = kinds.get((before, after), 0) + 1
        for (before, after), count in kinds.items():
            if before == after:
                continue
            yield f"restated without rounding: {plural(count, 'tensor')}, {before} as {after}"
        if self._catalog.program:
            count = len(self._encoded)
            yield f"{plural(count, 'tensor')} of {self._catalog.program} with the same codes, scales and zero points"
            if symmetric := self._catalog.symmetric:
                middle = "all their zero points are the middle one"
                yield f"{plural(len(symmetric), 'tensor')} stored as symmetric, without zero points: {middle}"
        if any(Role.INPUT_SCALE in tensor.parts and self._inverts_inputs(tensor) for tensor in changed):
            yield "scales of inputs are the inverses of the source's, in float32; they belong to no weight"

    def _inverts_inputs(self, tensor: EncodedTensor) -> bool:
        source, target = (CONVENTIONS[each.convention] for each in (tensor, self._encoded[tensor.name]))
        return input_meaning(source, tensor.encoding) != input_meaning(target, tensor.encoding)

    def _with_config(self, container: Container) -> Container:
        """Return the container with a config.json that describes the restated tensors."""
        files: dict[str, InMemoryFile] = {}
        for name in sorted({tensor.convention for tensor in self._encoded.values()}):
            check_cache(self._catalog.quantization, CONVENTIONS[name])
        config = self._user_config
        if CONFIG in container.carried:
            config = _read_config(container)
            files[CONFIG] = InMemoryFile(json.dumps(self._rewrite(config, container)).encode())
        dropped = [name for name in container.carried if name == MODELOPT_CONFIG]
        configs = {} if config is None else {CONFIG: config}
        return structs.replace(
            container,
            storage=VirtualFiles(container.storage, files) if files else container.storage,
            carried=tuple(name for name in container.carried if name not in dropped),
            ignored=(*container.ignored, *dropped),
            recoding=structs.replace(container.recoding, configs=configs),
        )

    def _rewrite(self, config: Config, container: Container) -> dict[str, Any]:
        """Return a config that describes the restated tensors."""
        if {tensor.convention for tensor in self._encoded.values()} == {TE}:  # no config describes this convention
            return without_quantization(config)
        parts = {stored for tensor in self._encoded.values() for stored in tensor.parts.values()}
        plain = {name: entry.shape for name, entry in container.entries.items() if name not in parts}
        weights = {name: shape for name, shape in plain.items() if split_slot(name)[1] == WEIGHT}
        return rewrite_config(config, self._encoded, weights, own_method=True)


def _read_config(container: Container) -> Config:
    """Return the content of a checkpoint's config.json, or without one the facts that its own files have."""
    if CONFIG not in container.carried:
        return container.config
    try:
        config = parse_json(container.storage.read(CONFIG, 0, container.storage.size(CONFIG)))
    except NotJsonError as error:
        raise refuse("CORRUPT", f"not JSON: {error}", file=CONFIG) from None
    if not isinstance(config, dict):
        raise refuse("CORRUPT", "not a JSON object", file=CONFIG)
    return config


def _rename_number(entry: Entry, name: str, convention: str) -> Entry:
    """Return the entry of a scale of cached keys or values under its name in a convention, and in its shape."""
    shape = entry.shape if prod(entry.shape) != 1 else () if convention == MODELOPT else (1,)
    return redescribe(entry, name, entry.dtype, shape)


def _has_exponents(target: Convention) -> bool:
    """Return whether programs that read a convention take E8M0 scales of 128 x 128 tiles for powers of two."""
    return target.name == DEEPSEEK


def _join(names: Iterable[str]) -> str:
    return " or ".join(sorted(names))
