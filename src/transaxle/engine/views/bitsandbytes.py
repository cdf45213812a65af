"""A view that shows bitsandbytes' weights as codes and scales of blocks, without further buffers.

**4-bit weights** (`nf4`, `fp4`) are stored as a column of bytes, with two codes in a byte, the first one in the higher
nibble. Blocks of 64 codes in row-major order share a scale, `weight.absmax`. The shape, the block size and the type are
JSON text in a tensor of bytes, `weight.quant_state.bitsandbytes__nf4`. With double quantization the scales themselves
are bytes that index a table: `scale = table[byte] x nested_absmax + offset`, each step rounded to float32.

They are shown as `weight`, U8 `[N, K/2]` with the first code in the lower nibble, and `weight_absmax`, F32 `[N, K/64]`.
A value is `table[code] x scale` in float32, which bitsandbytes rounds once to its dtype.

**8-bit weights** (`LLM.int8`) are `weight`, I8 `[N, K]`, and `SCB`, the largest absolute value of each row. They are
shown as compressed-tensors' `weight` and `weight_scale`, F32 `[N, 1]`, which is `SCB x (1/127)` in float32. A value is
`code x scale`; bitsandbytes multiplies `code x SCB` first, so its float32 values may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from math import ceil, prod
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from transaxle.encodings.arithmetic.codes import KINDS
from transaxle.encodings.conventions.convention import WEIGHT
from transaxle.encodings.conventions.packed_methods import (
    BLOCK_SIZES,
    BLOCK_TYPES,
    OF_BITSANDBYTES,
    QUANT_STATE,
    ROW_SCALES,
)
from transaxle.encodings.conventions.quantization import read
from transaxle.encodings.conventions.scheme import METHOD, SECTION
from transaxle.encodings.encoding import INT8
from transaxle.engine.source import Source
from transaxle.engine.views.decoded import buffer_bytes
from transaxle.engine.views.packed_integers import BandCache, RowFile
from transaxle.errors import Code, Refusal, TransaxleError, gathered, refuse
from transaxle.formats.catalog import Container, Entry, Extent, numpy_dtype
from transaxle.formats.storage.copier import Bytes
from transaxle.formats.storage.storage import VirtualFile, VirtualFiles, parse_json

ABSMAX = "_absmax"
"""Suffix that is shown after a weight's name for its scales."""
_FORMAT = "weight_format"
"""Last name segment of a number that states the order of 8-bit weights; 0 is row-major."""
_ABSMAX, _MAP, _NESTED_ABSMAX, _NESTED_MAP = "absmax", "quant_map", "nested_absmax", "nested_quant_map"
_EIGHT = INT8.name
_LARGEST_STATE = 1 << 16
_CACHED = 8
_FILE = "\0bitsandbytes "
_ONE_OF_127 = np.float32(7.874015718698502e-3)
"""The factor of `int8_vectorwise_dequant`, 1/127 in float32."""
_KEEP = "To keep the tensors exactly as stored:  --to safetensors:identity."


class _State(msgspec.Struct):
    """The JSON text that describes a 4-bit weight (`QuantState.as_dict`)."""

    quant_type: str
    blocksize: int
    dtype: str
    shape: list[int]
    nested_blocksize: int = 0
    nested_dtype: str = "float32"
    nested_offset: float | None = None


class _Weight(msgspec.Struct, frozen=True, dict=True):
    """A 4-bit weight whose buffers fit together."""

    codes: Entry
    buffers: Mapping[str, Entry]
    """Last name segment of a buffer below the weight -> the buffer."""
    state: _State
    source: Source

    @property
    def name(self) -> str:
        """Name of the weight."""
        return self.codes.name

    @property
    def columns(self) -> int:
        """Number of inputs."""
        return self.state.shape[-1]

    @property
    def rows(self) -> int:
        """Number of outputs."""
        return prod(self.state.shape[:-1])

    def code_rows(self, first: int, last: int) -> Bytes:
        """Return rows of codes, with the first code of a byte in the lower nibble."""
        width = self.columns // 2
        stored = self._range(self.codes, first * width, last * width)
        swapped: Bytes = (stored << np.uint8(4)) | (stored >> np.uint8(4))
        return swapped

    def scale_rows(self, first: int, last: int) -> NDArray[np.float32]:
        """Return rows of scales."""
        self.table  # noqa: B018 - compares the table
        width = self.columns // self.state.blocksize
        return self._scales(first * width, last * width)

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """The values of the 16 codes.

        Raises:
            Refused: with the code UNSUPPORTED if they are not bitsandbytes' usual values.
        """
        stored = self.source.read(self.buffers[_MAP].name).view("<f4")
        usual = KINDS[BLOCK_TYPES[self.state.quant_type].code].values
        if not np.array_equal(stored, usual):
            position = int(np.flatnonzero(stored != usual)[0])
            message = (
                f"code {position} has the value {stored[position]!s}; in {self.state.quant_type} it has "
                f"{usual[position]!s}"
            )
            raise refuse("UNSUPPORTED", message, tensor=self.buffers[_MAP].name, hint=_KEEP)
        return usual

    def _scales(self, first: int, last: int) -> NDArray[np.float32]:
        """Return the scales of some blocks, in float32."""
        absmax = self.buffers[_ABSMAX]
        stored = self._range(absmax, *(index * numpy_dtype(absmax.dtype).itemsize for index in (first, last)))
        if absmax.dtype == "F32":
            return stored.view("<f4")
        size = self.state.nested_blocksize
        begin = first // size
        outer = self._range(self.buffers[_NESTED_ABSMAX], begin * 4, ceil(last / size) * 4).view("<f4")
        factors = outer[np.arange(first, last) // size - begin]
        scales: NDArray[np.float32] = self._values_of_bytes[stored] * factors
        return scales + np.float32(self.state.nested_offset or 0)

    @cached_property
    def _values_of_bytes(self) -> NDArray[np.float32]:
        return self.source.read(self.buffers[_NESTED_MAP].name).view("<f4")

    def _range(self, entry: Entry, start: int, stop: int) -> Bytes:
        """Return some bytes of a stored buffer, in row-major order."""
        return buffer_bytes(self.source, self.source.container.storage, entry.name).read(start, stop)


class _RowScales(msgspec.Struct, frozen=True):
    """A virtual file with the scales of an 8-bit weight, one per row."""

    entry: Entry
    """The stored largest absolute values of the rows."""
    source: Source

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes; see `VirtualFile`."""
        return self.entry.nbytes

    def read_into(self, offset: int, view: memoryview) -> None:
        """Compute the scales, and copy some of their bytes into `view`; see `VirtualFile`."""
        scales = self.source.read(self.entry.name).view("<f4") * _ONE_OF_127
        view.cast("B")[:] = scales.view(np.uint8)[offset : offset + view.nbytes].data


def show_blocks(container: Container, config: Mapping[str, Any]) -> tuple[Container, Mapping[str, Any]]:
    """Return a checkpoint in which bitsandbytes' weights are codes and scales, with a config that describes them.

    Args:
        container: the stored tensors.
        config: the model's config. Without a quantization section in it, the weights' own descriptions decide.

    Raises:
        TransaxleError: one error with the refusals of all weights whose buffers do not fit together, with the codes
            MISSING_TENSOR, DTYPE_MISMATCH, SHAPE_MISMATCH, CORRUPT and UNSUPPORTED.
    """
    shower = _Shower(container)
    for name in container.entries:
        try:
            if QUANT_STATE in name:
                shower.show_four(name)
            elif name.rpartition(".")[2] == ROW_SCALES and _sibling(name, WEIGHT) in container.entries:
                shower.show_eight(name)
        except TransaxleError as error:
            shower.problems.extend(error.refusals)
    if shower.problems:
        raise gathered(shower.problems)
    if not shower.shown:
        return container, config
    new_config = shower.describe(config)
    entries: dict[str, Entry] = {}
    for name, entry in container.entries.items():
        if name in shower.shown:
            entries |= {part.name: part for part in shower.shown[name]}
        elif name not in shower.hidden:
            entries[name] = entry
    return replace(container, storage=VirtualFiles(container.storage, shower.files), entries=entries), new_config


class _Shower:
    """Collects the entries and virtual files with which bitsandbytes' weights are shown."""

    def __init__(self, container: Container) -> None:
        self.entries, self.source = container.entries, Source(container)
        self.files: dict[str, VirtualFile] = {}
        self.shown: dict[str, list[Entry]] = {}
        self.hidden: set[str] = set()
        self.problems: list[Refusal] = []
        self.types: dict[str, str] = {}
        """Type of codes -> the first weight with it."""
        self._cache: BandCache = lru_cache(_CACHED)(RowFile.band_bytes)

    def show_four(self, name: str) -> None:
        """Show the 4-bit weight that a tensor describes."""
        weight = _read_weight(self.source, name)
        self.types.setdefault(weight.state.quant_type, weight.name)
        shape, rows = tuple(weight.state.shape), weight.rows
        packed, grid = (
            (*shape[:-1], weight.columns // 2),
            (*shape[:-1], weight.columns // weight.state.blocksize),
        )
        codes = RowFile(rows, packed[-1], 1, weight.code_rows, self._cache)
        scales = RowFile(rows, grid[-1] * 4, 1, weight.scale_rows, self._cache)
        self.shown[weight.name] = [
            self._entry(weight.name, "U8", packed, codes),
            self._entry(weight.name + ABSMAX, "F32", grid, scales),
        ]
        self.hidden.update((name, *(entry.name for entry in weight.buffers.values())))

    def show_eight(self, name: str) -> None:
        """Show the 8-bit weight that belongs to row scales."""
        codes, scales = self.entries[_sibling(name, WEIGHT)], self.entries[name]
        if codes.dtype != "I8" or len(codes.shape) != 2:
            message = f"codes with {ROW_SCALES} must be I8 of 2 dims; found {codes.dtype} {list(codes.shape)}"
            raise refuse("DTYPE_MISMATCH", message, tensor=codes.name)
        if scales.dtype != "F32" or scales.shape != codes.shape[:1]:
            message = f"{ROW_SCALES} must be F32 {list(codes.shape[:1])}; found {scales.dtype} {list(scales.shape)}"
            raise refuse("SHAPE_MISMATCH", message, tensor=name)
        self.types.setdefault(_EIGHT, codes.name)
        form = self.entries.get(_sibling(name, _FORMAT))
        if form is not None:
            if form.nbytes != 1 or self.source.read(form.name)[0]:
                message = "the codes are in the order of a matrix-multiplication kernel, not in rows"
                raise refuse("UNSUPPORTED", message, tensor=form.name, hint=_KEEP)
            self.hidden.add(form.name)
        shape = (codes.shape[0], 1)
        self.shown[name] = [self._entry(f"{codes.name}_scale", "F32", shape, _RowScales(scales, self.source))]

    def describe(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a config that describes the weights, or refuse one that contradicts them."""
        if len(self.types) > 1:
            listed = " and ".join(f"{kind} ({name})" for kind, name in self.types.items())
            raise refuse("UNSUPPORTED", f"weights of bitsandbytes are {listed}; one config describes one type")
        ((kind, name),) = self.types.items()
        quantization = read(config)
        if quantization is None:
            four = {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
            described = {"load_in_8bit": True} if kind == _EIGHT else four
            return {**config, SECTION: {METHOD: OF_BITSANDBYTES, **described}}
        if kind not in {group.encoding.name for group in quantization.scheme.groups}:
            message = f"it is {kind}, but the config's {SECTION} describes another type"
            raise refuse("CORRUPT", message, tensor=name, hint="Correct the section, or remove it.")
        return config

    def _entry(self, name: str, dtype: str, shape: tuple[int, ...], file: VirtualFile) -> Entry:
        if name.endswith((ABSMAX, "_scale")) and name in self.entries:
            message = "scales of bitsandbytes would be shown under this name, which another tensor has"
            raise refuse("NAME_COLLISION", message, tensor=name)
        self.files[_FILE + name] = file
        return Entry(name, dtype, shape, (Extent((0,) * len(shape), shape, _FILE + name, 0),))


def _sibling(name: str, segment: str) -> str:
    """Return the name of a tensor in the same module."""
    head, dot, _ = name.rpartition(".")
    return f"{head}{dot}{segment}"


def _read_weight(source: Source, name: str) -> _Weight:
    """Return the 4-bit weight that a tensor describes, whose text is read.

    Raises:
        Refused: with the first reason for which its buffers do not fit together.
    """
    entries = source.entries
    weight, _, kind = name.partition(QUANT_STATE)
    codes = entries.get(weight)
    if codes is None:
        raise refuse("MISSING_TENSOR", f"it describes {weight}, which is missing", tensor=name)
    state = _read_state(source, name)
    if state.quant_type != kind or kind not in BLOCK_TYPES:
        message = f"it describes codes of {state.quant_type!r}; known: {', '.join(BLOCK_TYPES)}, as the name says"
        raise refuse("UNSUPPORTED", message, tensor=name, hint=_KEEP)
    elements = prod(state.shape)
    if len(state.shape) < 2 or min(state.shape) < 1 or state.blocksize < 1 or codes.nbytes * 2 != elements:
        message = f"{codes.dtype} {list(codes.shape)} are not the codes of {state.shape}, two in a byte"
        raise refuse("SHAPE_MISMATCH", message, tensor=weight)
    if state.blocksize not in BLOCK_SIZES:
        message = f"blocksize is {state.blocksize}; known: {', '.join(map(str, sorted(BLOCK_SIZES)))}"
        raise refuse("UNSUPPORTED", message, tensor=name, hint=_KEEP)
    if state.shape[-1] % state.blocksize:
        message = f"its rows of {state.shape[-1]:,} are not whole blocks of {state.blocksize}, which is not supported"
        raise refuse("UNSUPPORTED", message, tensor=weight, hint=_KEEP)
    blocks = elements // state.blocksize
    nested = state.nested_offset is not None
    expected = {_ABSMAX: ("U8" if nested else "F32", blocks), _MAP: ("F32", 16)}
    if nested:
        if state.nested_blocksize < 1 or state.nested_dtype != "float32":
            message = f"nested_blocksize is {state.nested_blocksize}, nested_dtype {state.nested_dtype!r}"
            raise refuse("UNSUPPORTED", message, tensor=name, hint=_KEEP)
        expected |= {_NESTED_ABSMAX: ("F32", ceil(blocks / state.nested_blocksize)), _NESTED_MAP: ("F32", 256)}
    buffers = {}
    for segment, (dtype, count) in expected.items():
        buffer = entries.get(f"{weight}.{segment}")
        if buffer is None:
            raise refuse("MISSING_TENSOR", f"codes of bitsandbytes need {segment} below them", tensor=weight)
        if buffer.dtype != dtype or buffer.shape != (count,):
            message = f"{segment} must be {dtype} [{count}]; found {buffer.dtype} {list(buffer.shape)}"
            code: Code = "SHAPE_MISMATCH" if buffer.dtype == dtype else "DTYPE_MISMATCH"
            raise refuse(code, message, tensor=buffer.name)
        buffers[segment] = buffer
    return _Weight(codes, buffers, state, source)


def _read_state(source: Source, name: str) -> _State:
    entry = source.entries[name]
    if entry.dtype != "U8" or len(entry.shape) != 1 or entry.nbytes > _LARGEST_STATE:
        message = f"the description of a weight must be U8 of 1 dim; found {entry.dtype} {list(entry.shape)}"
        raise refuse("DTYPE_MISMATCH", message, tensor=name)
    try:
        content: Any = parse_json(source.read(name).tobytes().decode())
        return msgspec.convert(content, _State)
    except (UnicodeDecodeError, ValueError, msgspec.ValidationError) as error:
        raise refuse("CORRUPT", f"it does not describe a weight: {error}", tensor=name) from None
