"""TransformerEngine's pickles, opcode by opcode, from the table in docs/reference/transformer-engine.md.

Neither a pickler of ours nor TransformerEngine is used: a release is a row of names and of arguments in order, and the
opcodes are those that Python's pickler writes for such a call at protocol 2, at which torch.save pickles.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Opcodes.


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def plain(value: object) -> bytes:
    """Opcodes of a constant, an integer, a text or a tuple of such; opcodes are themselves."""
    if isinstance(value, bytes):
        return value
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return number(value)
    if isinstance(value, str):
        return text(value)
    assert isinstance(value, tuple)
    return b"(" + b"".join(map(plain, value)) + b"t"


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def call(function: bytes, *args: object) -> bytes:
    return function + plain(args) + b"R"


def restored(cls: bytes, state: object) -> bytes:
    """An object that is made without arguments and then given its state."""
    return cls + b")\x81" + plain(state) + b"b"


def member(module: str, cls: str, attribute: str) -> bytes:
    """A bound class method, as Python's pickler writes it."""
    return call(name("__builtin__", "getattr"), name(module, cls), attribute)


# Files.

_STORAGES = {"uint8": "ByteStorage", "float32": "FloatStorage", "bfloat16": "BFloat16Storage"}


@dataclass
class File:
    """A torch file in the making: its pickle and its records."""

    items: dict[str, bytes] = field(default_factory=dict)
    """Name -> the opcodes of what it is."""
    records: list[bytes] = field(default_factory=list)

    def tensor(self, array: Array | None, *, shape: object = None, strides: object = None, offset: int = 0) -> bytes:
        """Opcodes of a plain tensor, whose bytes become a record; None of nothing."""
        if array is None:
            return b"N"
        kind, key = _STORAGES[array.dtype.name], str(len(self.records))
        self.records.append(array.tobytes())
        storage = plain(("storage", name("torch", kind), key, "cuda:0", array.size)) + b"Q"
        steps = tuple(prod(array.shape[at + 1 :]) for at in range(array.ndim))
        args = (array.shape if shape is None else shape, steps if strides is None else strides, False)
        hooks = call(name("collections", "OrderedDict"))
        return call(name("torch._utils", "_rebuild_tensor_v2"), storage, offset, *args, hooks)

    def pickled(self, value: bytes | None = None) -> bytes:
        """The whole file: of a dict of all items, or of one value."""
        pairs = b"".join(text(key) + what for key, what in self.items.items())
        value = b"}(" + pairs + b"u" if value is None else value
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02" + value + b".")
            archive.writestr("archive/byteorder", "little")
            for at, data in enumerate(self.records):
                archive.writestr(f"archive/data/{at}", data)
            archive.writestr("archive/version", "3\n")
        return stream.getvalue()


# Releases.

PACKAGE = "transformer_engine.pytorch"
FLOAT8, MXFP8, BLOCKWISE, NVFP4 = "Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor"
MODULES = {FLOAT8: "float8_tensor", MXFP8: "mxfp8_tensor", BLOCKWISE: "float8_blockwise_tensor", NVFP4: "nvfp4_tensor"}
FUNCTIONS = {
    FLOAT8: "_make_float8_tensor_in_reduce_ex",
    MXFP8: "_make_mxfp8_tensor_in_reduce_ex",
    BLOCKWISE: "_make_float8_blockwise_tensor_in_reduce_ex",
    NVFP4: "_make_nvfp4_tensor_in_reduce_ex",
}
_QUANTIZERS = {MXFP8: "MXFP8Quantizer", BLOCKWISE: "Float8BlockQuantizer", NVFP4: "NVFP4Quantizer"}
_SWITCHES = ["with_gemm_swizzled_scales", "row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max"]


@dataclass(frozen=True)
class Release:
    """How one release pickles tensors of one class."""

    version: str
    kind: str
    args: int
    """How many of the arguments below it has."""
    types: Mapping[str, int]
    """Its numbers for the types of codes."""
    native: str = "transformer_engine_torch"
    module: str = ""
    is_method: bool = True
    type_form: str = "state"
    """How it pickles the type of codes: by the state of an object, by the value of one, or as a Python enum."""

    def function(self) -> bytes:
        module = f"{PACKAGE}.{self.module or 'tensor.' + MODULES[self.kind]}"
        if self.is_method:
            return member(module, self.kind, "_make_in_reduce_ex")
        return name(module, FUNCTIONS[self.kind])

    def type_of_codes(self, code: str) -> bytes:
        if self.type_form == "state":
            return restored(name(self.native, "DType"), self.types[code])
        module = self.native if self.type_form == "value" else f"{PACKAGE}.constants"
        return call(name(module, "DType"), self.types[code])

    def pickled(self, given: Mapping[str, object]) -> bytes:
        """Opcodes of one tensor; `given` has opcodes or plain values by the names of the arguments."""
        return call(self.function(), *[given.get(argument, DEFAULTS.get(argument)) for argument in self.arguments])

    @property
    def arguments(self) -> tuple[str, ...]:
        return ORDERS[self.kind][: self.args]

    def quantizer(self) -> bytes:
        """Opcodes of a quantizer, whose attributes say nothing that is needed."""
        cls = name(f"{PACKAGE}.tensor.{MODULES[self.kind]}", _QUANTIZERS[self.kind])
        state = b"}(" + text("rowwise_usage") + b"\x88" + text("dtype") + self.type_of_codes("e4m3") + b"u"
        return cls + b")\x81" + state + b"b"


_FOUR = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
ORDERS = {
    FLOAT8: ("data", "codes", "scale_inv", "dtype", "shape", "data_transpose"),
    MXFP8: (*_FOUR, "codes", "dtype", "shape", "quantizer", "with_gemm_swizzled_scales"),
    BLOCKWISE: ("shape", *_FOUR, "codes", "dtype", "quantizer", "is_2D_scaled", "data_format"),
    NVFP4: ("shape", *_FOUR, "amax_rowwise", "amax_columnwise", "codes", "dtype", "quantizer", *_SWITCHES),
}
DEFAULTS = {**dict.fromkeys(_SWITCHES[:3], False), "nvfp4_e4m3_max": 448}
_BEFORE_2_4, _SINCE = {"e4m3": 6, "e5m2": 7}, {"e4m3": 7, "e5m2": 8, "e2m1": 10}

RELEASES = (
    Release("1.2", FLOAT8, 4, _BEFORE_2_4, native="transformer_engine_extensions", module="float8_tensor"),
    Release("1.8", FLOAT8, 4, _BEFORE_2_4, module="float8_tensor"),
    Release("1.11", FLOAT8, 4, _BEFORE_2_4),
    Release("2.0", FLOAT8, 5, _BEFORE_2_4),
    Release("2.4", FLOAT8, 5, _SINCE),
    Release("2.16", FLOAT8, 5, _SINCE, is_method=False, type_form="value"),
    Release("2.17", FLOAT8, 5, _SINCE, is_method=False, type_form="enum"),
    Release("2026-08", FLOAT8, 6, _SINCE, is_method=False, type_form="enum"),
    Release("2.0", MXFP8, 6, _BEFORE_2_4),
    Release("2.3", MXFP8, 7, _BEFORE_2_4),
    Release("2.4", MXFP8, 7, _SINCE),
    Release("2.6", MXFP8, 8, _SINCE),
    Release("2.12", MXFP8, 9, _SINCE),
    Release("2.16", MXFP8, 9, _SINCE, is_method=False, type_form="value"),
    Release("2.17", MXFP8, 9, _SINCE, is_method=False, type_form="enum"),
    Release("2.3", BLOCKWISE, 9, _BEFORE_2_4),
    Release("2.4", BLOCKWISE, 9, _SINCE),
    Release("2.5", BLOCKWISE, 10, _SINCE),
    Release("2.16", BLOCKWISE, 10, _SINCE, is_method=False, type_form="value"),
    Release("2.17", BLOCKWISE, 10, _SINCE, is_method=False, type_form="enum"),
    Release("2.8", NVFP4, 10, _SINCE),
    Release("2.12", NVFP4, 11, _SINCE),
    Release("2.16", NVFP4, 11, _SINCE, is_method=False, type_form="value"),
    Release("2.17", NVFP4, 14, _SINCE, is_method=False, type_form="enum"),
)
NEWEST = {release.kind: release for release in RELEASES}
"""Class -> the last of its releases."""


# Tensors.


def padded(array: Array, rows: int, columns: int) -> Array:
    """A matrix up to multiples of rows and columns, with bytes there that no one should read."""
    height, width = (-(-size // step) * step for size, step in zip(array.shape, (rows, columns), strict=True))
    out = np.full((height, width), 77, array.dtype)
    out[: array.shape[0], : array.shape[1]] = array
    return out


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Tensor:
    """A quantized tensor: what is pickled of it, and what it stands for."""

    kind: str
    buffers: Mapping[str, Array]
    """By the names of the arguments, as they lie in memory."""
    values: Array
    """float32, by the definition of the format."""
    shape: tuple[int, ...]
    settings: Mapping[str, object] = field(default_factory=dict)
    code: str = "e4m3"

    def opcodes(self, file: File, release: Release | None = None, **changed: object) -> bytes:
        """Put it into a file as a release would, with some arguments changed."""
        release = release or NEWEST[self.kind]
        given: dict[str, object] = dict.fromkeys(ORDERS[self.kind])
        given |= {**DEFAULTS, **{key: file.tensor(array) for key, array in self.buffers.items()}, **self.settings}
        given |= {"codes": release.type_of_codes(self.code), "dtype": name("torch", "bfloat16")}
        given["shape"] = call(name("torch", "Size"), self.shape)
        if self.kind in _QUANTIZERS:
            given["quantizer"] = release.quantizer()
        return release.pickled({**given, **changed})


def _codes(random: np.random.Generator, shape: tuple[int, ...], kind: Any = ml_dtypes.float8_e4m3fn) -> Array:
    """Random finite codes, as the bytes that TransformerEngine keeps."""
    codes = random.integers(0, 256, shape, np.uint8)
    return np.where(np.isfinite(codes.view(kind).astype(np.float32)), codes, 1).astype(np.uint8)


def _real(codes: Array, kind: Any = ml_dtypes.float8_e4m3fn) -> Array:
    found: Array = codes.view(kind).astype(np.float32)
    return found


def float8(seed: int, shape: tuple[int, ...] = (6, 10), code: str = "e4m3", *, transposed: bool = False) -> Tensor:
    """`transposed`: only the codes of the transpose are there."""
    random = np.random.default_rng(seed)
    kind = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[code]
    codes, scale = _codes(random, shape, kind), random.uniform(0.1, 2, 1).astype(np.float32)
    buffers = {"scale_inv": scale}
    buffers |= {"data_transpose": np.ascontiguousarray(codes.T)} if transposed else {"data": codes}
    return Tensor(FLOAT8, buffers, _real(codes, kind) * scale, shape, code=code)


def mxfp8(seed: int, shape: tuple[int, ...] = (64, 96), sides: str = "both") -> Tensor:
    """`sides`: `both`, `rows` or `columns`. The values are those of the rows, where these are there."""
    random = np.random.default_rng(seed)
    rows, columns = prod(shape[:-1]), shape[-1]
    buffers: dict[str, Array] = {}
    values = np.zeros(0)
    for side, grid, pad in (("columns", (rows // 32, columns), (4, 128)), ("rows", (rows, columns // 32), (128, 4))):
        if sides not in ("both", side):
            continue
        codes, exponents = _codes(random, (rows, columns)), random.integers(118, 134, grid, np.uint8)
        scale = np.exp2(exponents.astype(np.float32) - 127)
        scale = np.repeat(scale, 32, 0 if side == "columns" else 1)
        values = (_real(codes) * scale).reshape(shape)
        buffers[f"{side.removesuffix('s')}wise_data"] = codes.reshape(shape)
        buffers[f"{side.removesuffix('s')}wise_scale_inv"] = padded(exponents, *pad)
    return Tensor(MXFP8, buffers, values, shape)


def blockwise(seed: int, shape: tuple[int, int] = (200, 300), layout: str = "square") -> Tensor:
    """`layout`: `square`, `square columns`, `rows`, `rows compact`, `columns`, `columns compact`."""
    random = np.random.default_rng(seed)
    tile = (128, 128) if "square" in layout else (1, 128) if "rows" in layout else (128, 1)
    codes = _codes(random, shape)
    grid = tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))
    scale = np.exp2(random.integers(-4, 4, grid)).astype(np.float32)
    whole = np.repeat(np.repeat(scale, tile[0], 0), tile[1], 1)[: shape[0], : shape[1]]
    compact = "compact" in layout
    by_columns = "columns" in layout
    turned_codes = by_columns and not compact
    turned_scale = layout in ("square columns", "rows")
    stored = scale.T if turned_scale else scale
    side = "columnwise" if by_columns else "rowwise"
    buffers = {
        f"{side}_data": np.ascontiguousarray(codes.T if turned_codes else codes),
        f"{side}_scale_inv": np.ascontiguousarray(stored) if compact else padded(stored, 1, 4),
    }
    form = restored(name("transformer_engine_torch", "Float8BlockScaleTensorFormat"), int(compact))
    settings = {"is_2D_scaled": "square" in layout, "data_format": form if compact else None}
    return Tensor(BLOCKWISE, buffers, _real(codes) * whole, shape, settings)


def nvfp4(seed: int, shape: tuple[int, ...] = (20, 48), scale_max: int = 448) -> Tensor:
    random = np.random.default_rng(seed)
    rows, columns = prod(shape[:-1]), shape[-1]
    nibbles = random.integers(0, 16, (rows, columns), np.uint8)
    scale = random.integers(1, 127, (rows, -(-columns // 16)), np.uint8)
    amax = random.uniform(1, 50, 1).astype(np.float32)
    factor = np.repeat(_real(scale), 16, 1)[:, :columns].astype(np.float64) * float(amax[0]) / (6 * scale_max)
    buffers = {
        "rowwise_data": (nibbles[:, ::2] | nibbles[:, 1::2] << 4).reshape(*shape[:-1], columns // 2),
        "rowwise_scale_inv": padded(scale, 128, 4),
        "amax_rowwise": amax,
    }
    settings = {"nvfp4_use_4over6": scale_max != 448, "nvfp4_e4m3_max": scale_max}
    values = (_E2M1[nibbles].astype(np.float64) * factor).astype(np.float32).reshape(shape)
    return Tensor(NVFP4, buffers, values, shape, settings, "e2m1")


MAKERS = {FLOAT8: float8, MXFP8: mxfp8, BLOCKWISE: blockwise, NVFP4: nvfp4}
