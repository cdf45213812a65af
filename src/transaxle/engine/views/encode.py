"""Encoding: the last step for a planned tensor, which computes one stored buffer (such as codes or scales) from values.

Values are read in bands of whole rows of tiles, because a codec needs no more values at once. Every matrix of a stack
is divided into tiles separately. Each buffer is a separate planned tensor, for which the values are read separately. If
a matrix has a global scale, the amax (largest absolute value) of the matrix is computed before anything is written.

The module also selects tensors by patterns of their names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod

import msgspec
import numpy as np

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.layout.relayout import Target
from transaxle.encodings.conventions.convention import CONVENTIONS
from transaxle.encodings.encoding import ENCODINGS, INT4, WIDE, Encoding, Error, Role
from transaxle.engine.views.encoded import View
from transaxle.engine.wording import plural
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.catalog import nbytes, numpy_dtype


def select_names(
    names: Iterable[str], only: Sequence[str], skip: Sequence[str], noun: str, default: Sequence[str] | None = None
) -> list[str]:
    """Select names with the user's patterns.

    Args:
        names: the names to select from; the selected names keep this order.
        only: patterns of names to select, in which `*` matches any characters; if there are none, `default` is
            selected.
        skip: patterns of names to omit.
        noun: what the names denote (such as `tensor`), for error messages.
        default: names that are selected if `only` is empty; None means all names.

    Raises:
        UsageError: with code AMBIGUOUS, if a pattern matches no name.
    """
    all_names = list(names)
    idle = [pattern for pattern in (*only, *skip) if not any(fnmatchcase(name, pattern) for name in all_names)]
    if idle:
        raise gathered(_refuse_pattern(pattern, all_names, noun) for pattern in idle)
    matched = [name for name in all_names if any(fnmatchcase(name, pattern) for pattern in only)]
    selected = matched if only else all_names if default is None else default
    return [name for name in selected if not any(fnmatchcase(name, pattern) for pattern in skip)]


def _refuse_pattern(pattern: str, names: Sequence[str], noun: str) -> Refusal:
    close = get_close_matches(pattern, names, 1, 0.5) or names[:1]
    hint = f"Names look like {close[0]}; * stands for any text." if close else f"There is no {noun}."
    return Refusal("AMBIGUOUS", f"no {noun} has a name like {pattern!r}", hint=hint)


METHODS = ("float8_block", "mxfp8", "nvfp4", INT4.name)
"""Names of the encodings that Transaxle can write."""
_PLAIN_WORDS = frozenset({
    "answers", "bias", "classifier", "downsample", "head", "patch", "patches", "pos", "position", "positions", "rel",
    "router", "score", "sentence", "sinks", "subsampling", "token", "tokens", "type", "types", "word", "words", "wpe",
    "wte",
})  # fmt: skip
"""A tensor whose name contains one of these words is never quantized; `mtp_norm` counts as two words."""
_PLAIN_PARTS = ("emb", "norm")
"""A tensor is never quantized if a word of its name contains one of these texts, as in `embeddings` or `layernorm`."""
_WORD = re.compile(r"[a-z]+")
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
"""Pattern of a segment of a tensor name that is only a number, such as that of a layer or an expert."""
_NO_LINEAR = re.compile(
    r"(?:.*\.)?(?:gate|shared|output_projection|predictions\.decoder|query_feat|[^.]*conv[^.]*|[^.]*_weight)\.weight"
    r"|(?:.*\.)?(?:DenseReluDense\.wo|weights_proj|compressor\.(?:indexer\.)?(?:wkv|wgate|kv_proj|gate_proj))\.weight"
    r"|qformer\..*"
)
"""Pattern of names of routers, embeddings, heads and convolutions, which derived tables do not distinguish from linear
layers.

The pattern also matches linear layers that transformers never treats as encoded. Transformers keeps some of these
layers in float32, and mistakes a layer whose name ends in `_weight` for a weight.
"""
_LEFT_PLAIN_NOTE = "left plain"
_ENCODED_NOTE = "encoded on request"
_EXPERT = "expert"
_CONV2D_DIMS = 4
"""Number of dims of the weight of a 2-D convolution."""
_LAYER_WEIGHT = re.compile(rf".*\.weight\d*|.*{_EXPERT}.*")
"""Pattern of names of layers' weights, including stacked experts. Parameters with different names do not belong to
linear layers.
"""
_ALSO_PLAIN = frozenset({"eh_proj", "mtp_proj"})
"""Names of additional logical tensors that are never quantized."""
_WAY_OUT = "Omit the tensor with --skip, or name other tensors with --only."


class Encode(msgspec.Struct, frozen=True):
    """The user's request to encode (quantize) tensors."""

    encoding: str
    """Name of the encoding to write, one of `METHODS`."""
    only: tuple[str, ...] = ()
    """Patterns of target tensor names to encode; if there are none, the weights of linear layers are encoded."""
    skip: tuple[str, ...] = ()
    """Patterns of target tensor names that are not encoded."""
    group: int = 0
    """Number of values in a row that share one scale, for int4; 0 means 32, and every other encoding."""

    def __post_init__(self) -> None:
        if self.encoding not in METHODS:
            raise refuse(
                "AMBIGUOUS", f"cannot encode to {self.encoding!r}", hint=f"Choose one of: {', '.join(METHODS)}."
            )
        if self.group and self.encoding != INT4.name:
            raise refuse(
                "AMBIGUOUS", f"group_size is {self.group}, but the groups of {self.encoding} have a fixed size"
            )
        if self.group % _LEAST_GROUP:
            message = f"group_size is {self.group}; readers need groups of a multiple of {_LEAST_GROUP} values"
            raise refuse("AMBIGUOUS", message, hint="Usual are 32, 64 and 128.")

    @property
    def spec(self) -> Encoding:
        """The description of the encoding to write, apart from the dtype of its scales."""
        return with_group(ENCODINGS[self.encoding], self.group)


_LEAST_GROUP = 16
"""Number of which the size of a group must be a multiple."""


def with_group(encoding: Encoding, group: int) -> Encoding:
    """Return an encoding with groups of a given size; 0 means the usual size."""
    return dataclasses.replace(encoding, tile=(1, group)) if group else encoding


class Step(msgspec.Struct, frozen=True, gc=False):
    """How to compute one buffer (such as the codes) of an encoded tensor from the tensor's values."""

    encoding: str
    """Name of the encoding to write, a key of `ENCODINGS`."""
    convention: str
    """Name of the convention that determines how buffers are named and scaled, a key of `CONVENTIONS`."""
    role: str
    """The buffer to compute, given as a `Role` such as codes or scales."""
    tensor: str
    """Name of the encoded tensor in the family's table."""
    dtype: str
    """Safetensors code of the dtype of the values to encode."""
    shape: tuple[int, ...]
    """Shape of the values to encode."""
    group: int = 0
    """Number of values in a row that share one scale; 0 if the encoding determines it."""

    @property
    def spec(self) -> Encoding:
        """The description of the encoding; scales of integers have the dtype of the values."""
        spec = with_group(ENCODINGS[self.encoding], self.group)
        return dataclasses.replace(spec, scale=self.dtype) if spec.is_integer else spec

    @property
    def nbytes(self) -> int:
        """Size in bytes of the values to encode."""
        return nbytes(self.dtype, self.shape)

    @property
    def matrices(self) -> int:
        """Number of matrices in the tensor; a tensor with two dims is one matrix, and a tensor with more dims is a
        stack.
        """
        return prod(self.shape[:-2])

    @property
    def band(self) -> int:
        """Size in bytes of the smallest band (group of rows) of values that can be encoded: one row of tiles."""
        rows, columns = self.shape[-2:]
        return min(self.spec.tiles(self.shape)[-2], rows) * columns * numpy_dtype(self.dtype).itemsize

    def bands(self, room: int) -> Iterator[tuple[int, int, int]]:
        """Yield `(matrix, first row, last row)` of each band (group of rows), in order.

        A band has as many rows of tiles as fit into `room` bytes, but at least one.
        """
        rows = self.shape[-2]
        tile = self.spec.tiles(self.shape)[-2]
        step = tile * max(1, room // max(self.band, 1))
        for number in range(self.matrices):
            for first_row in range(0, rows, step):
                yield number, first_row, min(first_row + step, rows)

    def end_of_band(self, band: tuple[int, int, int]) -> int:
        """Return the offset, in the bytes of the values, after the last byte of a band."""
        rows, columns = self.shape[-2:]
        number, _, last_row = band
        return (number * rows + last_row) * columns * numpy_dtype(self.dtype).itemsize

    def global_scale(self, size: float) -> np.float32:
        """Return the global scale of a matrix whose amax (largest absolute value) is `size`."""
        return CONVENTIONS[self.convention].global_from_amax(size, self.spec)

    def factor(self, sizes: Sequence[float], number: int) -> float:
        """Return the factor by which decoding multiplies the values of a matrix, in addition to the scales of the
        tiles.
        """
        if not self.spec.has_global:
            return 1.0
        return CONVENTIONS[self.convention].factor(float(self.global_scale(sizes[number])), self.spec)


Measure = Callable[[Error], None]
"""A function that receives the rounding error of encoded values."""
Values = Callable[[Sequence[int]], Iterator[memoryview]]
"""A function that yields the bytes of a tensor's values in order, split at the given end offsets."""


def buffer_blocks(
    step: Step, values: Values, sizes: Sequence[float], *, room: int, report_error: Measure
) -> Iterator[memoryview]:
    """Produce the bytes of one buffer of an encoded tensor, in order and in blocks.

    Args:
        step: the description of the buffer to compute.
        values: function that reads the values of the tensor.
        sizes: the amax (largest absolute value) of each matrix, if matrices have global scales.
        room: number of bytes of values per band (group of rows); a single row of tiles may exceed it.
        report_error: function called with the rounding error of each band of codes.
    """
    if step.role in WITHOUT_BANDS:
        yield whole_buffer(step, sizes)
        return
    bands = list(step.bands(room))
    ends = [step.end_of_band(band) for band in bands]
    for band, block in zip(bands, values(ends), strict=True):
        codes, error = encode_band(step, band, block, sizes)
        if error is not None:
            report_error(error)
        yield codes


WITHOUT_BANDS = frozenset({Role.GLOBAL, Role.SHAPE})
"""Buffers that are computed without the tensor's values, other than the amax of each matrix."""


def whole_buffer(step: Step, sizes: Sequence[float]) -> memoryview:
    """Return the bytes of a buffer in `WITHOUT_BANDS`; for a description of the arguments see `buffer_blocks`."""
    if step.role == Role.GLOBAL:
        return np.array([step.global_scale(size) for size in sizes], np.float32).view(np.uint8).data
    return np.array(step.shape, np.int64).view(np.uint8).data


def encode_band(
    step: Step, band: tuple[int, int, int], block: memoryview, sizes: Sequence[float]
) -> tuple[memoryview, Error | None]:
    """Return the bytes of one band of a buffer, and the rounding error of the band if the buffer is that of the codes.

    Args:
        step: the description of the buffer to compute.
        band: `(matrix, first row, last row)`, as `Step.bands` yields it.
        block: the values of the band.
        sizes: the amax (largest absolute value) of each matrix, if matrices have global scales.
    """
    from transaxle.encodings.arithmetic.codec import encode_error, encode_rows

    number, first_row, last_row = band
    band_values = np.frombuffer(block, numpy_dtype(step.dtype)).reshape(last_row - first_row, step.shape[-1])
    codes, scale = encode_rows(step.spec, band_values, amax=sizes[number] if step.spec.has_global else None)
    if step.role == Role.SCALE:
        return np.ascontiguousarray(scale).view(np.uint8).reshape(-1).data, None
    error = encode_error(step.spec, band_values, codes, scale, factor=step.factor(sizes, number))
    return codes.reshape(-1).data, error


def matrix_amaxes(step: Step, values: Values, *, room: int) -> tuple[float, ...]:
    """Return the amax (largest absolute value) of each matrix of a tensor; for a description of the arguments see
    `buffer_blocks`.
    """
    from transaxle.encodings.arithmetic.codec import amax

    kind = numpy_dtype(step.dtype)
    matrix_bytes = prod(step.shape[-2:]) * kind.itemsize
    amaxes = np.zeros(step.matrices, np.float32)
    starts = ((number, start) for number in range(step.matrices) for start in range(0, matrix_bytes, room))
    ends = [number * matrix_bytes + min(start + room, matrix_bytes) for number, start in starts]
    for end, block in zip(ends, values(ends), strict=True):
        number = (end - 1) // matrix_bytes
        amaxes[number] = np.maximum(amaxes[number], amax(np.frombuffer(block, kind).reshape(1, -1)))
    return tuple(float(size) for size in amaxes)


def choose(
    view: View,
    request: Encode,
    components: Mapping[str, Sequence[str]],
    across: Container[str] = (),
    unread: Mapping[str, str] | None = None,
) -> tuple[list[str], list[Refusal], list[str]]:
    """Choose which tensors of the target to encode.

    Args:
        view: the tensors of the target.
        request: the user's request to encode tensors. If the request has no patterns, the weights of linear layers
            according to the family's table are chosen, but never embeddings, heads, routers, norms, biases, sinks or
            encoded tensors.
        components: target tensor name -> names of its logical tensors, for targets that the family's table describes.
        across: names of target tensors whose rows are not aligned with the input dim of their layers.
        unread: name of a target tensor whose codes transformers would read wrongly -> the reason. A tensor in `unread`
            is encoded only if a pattern of the user matches its name.

    Returns:
        Names of the tensors to encode; refusals of requested tensors that cannot be encoded; and notes about codes that
        transformers would read wrongly.

    Raises:
        UsageError: with code AMBIGUOUS, if a pattern matches no tensor, if neither a table nor a pattern selects
            tensors, or if no tensor remains to be encoded.
    """
    buffers = {stored for one in view.encoded.values() for stored in one.parts.values()}
    plain = {name: target for name, target in view.targets.items() if name not in buffers and _is_weight(target)}
    hint = "Choose the tensors with --only PATTERN."
    if not request.only and not components:
        raise refuse("AMBIGUOUS", "no table says which tensors are weights of linear layers", hint=hint)
    linear = [name for name, target in plain.items() if is_linear(name, target.shape, components.get(name, ()))]
    names = select_names([*plain, *view.encoded], request.only, request.skip, "tensor", default=linear)
    unread = {name: unread[name] for name in names if name in unread} if unread else {}
    if not request.only:
        names = [name for name in names if name not in unread]
    notes = list(_notes(unread, _ENCODED_NOTE if request.only else _LEFT_PLAIN_NOTE))
    if not names:
        why = (
            f"{len(view.encoded)} tensors are already encoded"
            if view.encoded
            else "\n".join(notes) or "no plain tensor is the weight of a linear layer"
        )
        raise refuse("AMBIGUOUS", f"nothing to encode: {why}", hint=hint)
    encoding = request.spec
    misfits = {name: _misfit(view, plain.get(name), encoding, name, across=name in across) for name in names}
    problems = [Refusal("UNSUPPORTED", why, Where(None, name), _WAY_OUT) for name, why in misfits.items() if why]
    return [name for name, why in misfits.items() if not why], problems, notes


def _notes(unread: Mapping[str, str], text: str) -> Iterator[str]:
    """Yield one note per reason why transformers would read codes wrongly; in tensor names, `*` replaces numbers."""
    for reason in dict.fromkeys(unread.values()):
        names = [name for name, why in unread.items() if why == reason]
        count = plural(len(names), "weight")
        yield f"{text}: {count} whose codes transformers would read wrongly, because {reason} ({name_patterns(names)})"


def name_patterns(names: Iterable[str]) -> str:
    """Return a list of tensor names as text, in which `*` replaces numbers."""
    return ", ".join(dict.fromkeys(_NUMBER.sub("*", name) for name in names))


def _misfit(view: View, target: Target | None, encoding: Encoding, name: str, *, across: bool) -> str:
    """Return the reason why a tensor cannot be encoded; return "" if it can be encoded."""
    if target is None:
        return f"the tensor is already encoded in {view.encoded[name].encoding.name}: decode it first"
    dtype, shape = view.form_of(name)
    if dtype not in WIDE:
        return f"values of {dtype} cannot be encoded; {', '.join(WIDE)} can"
    if len(shape) < 2:
        return f"{encoding.name} encodes matrices; this tensor has the shape {list(shape)}"
    if encoding.has_global and 0 in shape:
        return f"{encoding.name} has one scale for a whole matrix; this one has no elements, {list(shape)}"
    size = encoding.tile[-1]
    if encoding.tile[0] == 1 and across:
        return (
            f"{target.rule}\n{encoding.name} has one scale for {size} inputs of a layer; the rows here are its outputs"
        )
    if encoding.tile[0] == 1 and shape[-1] % size:
        return f"{encoding.name} has one scale for every {size} elements of a row; the rows here have {shape[-1]}"
    return ""


def _is_weight(target: Target) -> bool:
    return split_slot(target.name)[1] == WEIGHT


def is_linear(name: str, shape: Sequence[int], components: Sequence[str]) -> bool:
    """Return whether a tensor consists only of weights of linear layers, as far as its names and shape show.

    Args:
        name: stored name of the tensor.
        shape: shape of the tensor.
        components: names of its logical tensors.
    """
    if not components or len(shape) < 2 or 1 in shape[-2:] or not _ALSO_PLAIN.isdisjoint(components):
        return False
    # a tensor with 4 dims may also have the dims layers, experts, rows, columns
    of_picture = len(shape) == _CONV2D_DIMS and _EXPERT not in name
    if of_picture or not _LAYER_WEIGHT.fullmatch(name) or _NO_LINEAR.fullmatch(name):
        return False
    words = _WORD.findall(" ".join((name, *components)).lower())
    return not any(word in _PLAIN_WORDS or any(part in word for part in _PLAIN_PARTS) for word in words)
