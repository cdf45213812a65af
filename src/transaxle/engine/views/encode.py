"""Encoding: the last step of a planned tensor, from its values in target order to one of its buffers.

Values come in bands of whole tile rows, which is all that a codec needs at a time; every matrix of a stack is tiled by
itself. Each buffer is a planned tensor of its own and reads the values by itself. Where a matrix has a global scale,
its amax is computed before anything is written.

Choosing tensors by patterns of their names.
"""

from __future__ import annotations

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
from transaxle.encodings.encoding import ENCODINGS, WIDE, Encoding, Error, Role
from transaxle.engine.views.encoded import View
from transaxle.engine.wording import plural
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.catalog import nbytes, numpy_dtype


def chosen(
    names: Iterable[str], only: Sequence[str], skip: Sequence[str], noun: str, default: Sequence[str] | None = None
) -> list[str]:
    """Choose some of several names.

    Args:
        names: all of them; order is kept.
        only: patterns of wanted names, in which `*` stands for any characters; none: those of `default`.
        skip: patterns of those not wanted.
        noun: what the names name, for the error.
        default: names chosen where `only` has no patterns; None: all.

    Raises:
        UsageError: AMBIGUOUS for a pattern that no name has: nobody writes one for nothing.
    """
    all_names = list(names)
    idle = [pattern for pattern in (*only, *skip) if not any(fnmatchcase(name, pattern) for name in all_names)]
    if idle:
        raise gathered(_idle(pattern, all_names, noun) for pattern in idle)
    matched = [name for name in all_names if any(fnmatchcase(name, pattern) for pattern in only)]
    wanted = matched if only else all_names if default is None else default
    return [name for name in wanted if not any(fnmatchcase(name, pattern) for pattern in skip)]


def _idle(pattern: str, names: Sequence[str], noun: str) -> Refusal:
    close = get_close_matches(pattern, names, 1, 0.5) or names[:1]
    hint = f"Names look like {close[0]}; * stands for any text." if close else f"There is no {noun}."
    return Refusal("AMBIGUOUS", f"no {noun} has a name like {pattern!r}", hint=hint)


METHODS = ("float8_block", "mxfp8", "nvfp4")
"""Encodings that can be written."""
_LEFT_PLAIN = frozenset({
    "answers", "bias", "classifier", "downsample", "head", "patch", "patches", "pos", "position", "positions", "rel",
    "router", "score", "sentence", "sinks", "subsampling", "token", "tokens", "type", "types", "word", "words", "wpe",
    "wte",
})  # fmt: skip
"""Words in the names of tensors that nobody quantizes; `mtp_norm` consists of two words."""
_IN_WORDS = ("emb", "norm")
"""What such words have in them: `embeddings`, `layernorm`."""
_WORD = re.compile(r"[a-z]+")
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
"""A segment that counts layers or experts."""
_NO_LINEAR = re.compile(
    r"(?:.*\.)?(?:gate|shared|output_projection|predictions\.decoder|query_feat|[^.]*conv[^.]*|[^.]*_weight)\.weight"
    r"|(?:.*\.)?(?:DenseReluDense\.wo|weights_proj|compressor\.(?:indexer\.)?(?:wkv|wgate|kv_proj|gate_proj))\.weight"
    r"|qformer\..*"
)
"""Names of routers, embeddings, heads and convolutions whose tables, made from traces, have no names of their own.

Also of linear layers that transformers never takes for encoded: it keeps them in float32, or confuses a layer whose own
name ends with `_weight` with a weight.
"""
_KEPT = "left plain"
_NAMED = "encoded, as --only says"
_EXPERT = "expert"
_PICTURE = 4
"""Dims of a convolution over pictures."""
_OF_LAYER = re.compile(rf".*\.weight\d*|.*{_EXPERT}.*")
"""Names of layers' weights. Parameters with names of their own are of no linear layer, but for stacked experts."""
_ALSO_PLAIN = frozenset({"eh_proj", "mtp_proj"})
"""Whole names of logical tensors that nobody quantizes."""
_WAY_OUT = "Leave it out with --skip, or name others with --only."


class Encode(msgspec.Struct, frozen=True):
    """What the user wants to encode."""

    encoding: str
    """One of `METHODS`."""
    only: tuple[str, ...] = ()
    """Patterns of the target's table names; none: the weights of linear layers."""
    skip: tuple[str, ...] = ()
    """Patterns of names that stay plain."""

    def __post_init__(self) -> None:
        if self.encoding not in METHODS:
            raise refuse(
                "AMBIGUOUS", f"cannot encode to {self.encoding!r}", hint=f"Choose one of: {', '.join(METHODS)}."
            )


class Step(msgspec.Struct, frozen=True, gc=False):
    """How a tensor's values become one of its buffers."""

    encoding: str
    """Key of `ENCODINGS`."""
    convention: str
    """Key of `CONVENTIONS`."""
    role: str
    """The buffer, a `Role`."""
    tensor: str
    """Table name of the tensor."""
    dtype: str
    """Safetensors code of the values."""
    shape: tuple[int, ...]
    """The values along each dim."""

    @property
    def spec(self) -> Encoding:
        """The encoding."""
        return ENCODINGS[self.encoding]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return nbytes(self.dtype, self.shape)

    @property
    def matrices(self) -> int:
        """How many matrices there are."""
        return prod(self.shape[:-2])

    @property
    def band(self) -> int:
        """Bytes of the smallest band that can be encoded: one row of tiles."""
        rows, columns = self.shape[-2:]
        return min(self.spec.tiles(self.shape)[-2], rows) * columns * numpy_dtype(self.dtype).itemsize

    def bands(self, room: int) -> Iterator[tuple[int, int, int]]:
        """Yield `(matrix, first row, last row)` of each band, in order, with as many rows of tiles as fit into `room`
        bytes.
        """
        rows = self.shape[-2]
        tile = self.spec.tiles(self.shape)[-2]
        step = tile * max(1, room // max(self.band, 1))
        for number in range(self.matrices):
            for first_row in range(0, rows, step):
                yield number, first_row, min(first_row + step, rows)

    def global_scale(self, size: float) -> np.float32:
        """Return the global scale of a matrix with this amax."""
        return CONVENTIONS[self.convention].global_from_amax(size, self.spec)

    def factor(self, sizes: Sequence[float], number: int) -> float:
        """Return the factor of a matrix's values, beside their scales, when they are decoded."""
        if not self.spec.has_global:
            return 1.0
        return CONVENTIONS[self.convention].factor(float(self.global_scale(sizes[number])), self.spec)


Measure = Callable[[Error], None]
"""Receives the error of encoded values."""
Values = Callable[[Sequence[int]], Iterator[memoryview]]
"""Yields the bytes of a tensor's values in order, cut at the given ends."""


def buffer_blocks(
    step: Step, values: Values, sizes: Sequence[float], *, room: int, measured: Measure
) -> Iterator[memoryview]:
    """Produce one buffer of a tensor that is encoded, in order.

    Args:
        step: what is produced.
        values: gives the tensor's values.
        sizes: amax of each matrix, where there is a scale for the whole of it.
        room: bytes of values at once, unless one row of tiles takes more.
        measured: told the error of each band of codes.
    """
    if step.role == Role.GLOBAL:
        yield np.array([step.global_scale(size) for size in sizes], np.float32).view(np.uint8).data
        return
    from transaxle.encodings.arithmetic.codec import encode_error, encode_rows

    rows, columns = step.shape[-2:]
    kind = numpy_dtype(step.dtype)
    bands = list(step.bands(room))
    ends = [(number * rows + last_row) * columns * kind.itemsize for number, _, last_row in bands]
    for (number, first_row, last_row), block in zip(bands, values(ends), strict=True):
        band_values = np.frombuffer(block, kind).reshape(last_row - first_row, columns)
        size = sizes[number] if step.spec.has_global else None
        codes, scale = encode_rows(step.spec, band_values, amax=size)
        if step.role == Role.SCALE:
            yield np.ascontiguousarray(scale).view(np.uint8).reshape(-1).data
            continue
        measured(encode_error(step.spec, band_values, codes, scale, factor=step.factor(sizes, number)))
        yield codes.reshape(-1).data


def largest(step: Step, values: Values, *, room: int) -> tuple[float, ...]:
    """Return the amax of each matrix of a tensor; arguments as of `buffer_blocks`."""
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
    wanted: Encode,
    components: Mapping[str, Sequence[str]],
    across: Container[str] = (),
    unread: Mapping[str, str] | None = None,
) -> tuple[list[str], list[Refusal], list[str]]:
    """Choose the tensors of a view that are encoded.

    Args:
        view: the target.
        wanted: what the user said. Without patterns, the weights of linear layers as the tables know them: never
            embeddings, heads, routers, norms, biases or sinks, and nothing that is encoded already.
        components: target name -> its logical tensors, where a table reads it.
        across: names of targets whose rows do not run along the input of their layers.
        unread: names of targets whose codes transformers would read wrongly, and why. They are encoded only where the
            user's patterns name them.

    Returns:
        Target names, why others that are wanted cannot be encoded, and notes about what transformers would not read.

    Raises:
        UsageError: AMBIGUOUS for a pattern that no tensor has; where neither a table nor a pattern says which tensors
            are wanted; and where nothing is left to be encoded.
    """
    buffers = {stored for one in view.encoded.values() for stored in one.parts.values()}
    plain = {name: target for name, target in view.targets.items() if name not in buffers and _is_weight(target)}
    hint = "Choose the tensors with --only PATTERN."
    if not wanted.only and not components:
        raise refuse("AMBIGUOUS", "no table says which tensors are weights of linear layers", hint=hint)
    linear = [name for name, target in plain.items() if _is_linear(target, components.get(name, ()))]
    names = chosen([*plain, *view.encoded], wanted.only, wanted.skip, "tensor", default=linear)
    unread = {name: unread[name] for name in names if name in unread} if unread else {}
    if not wanted.only:
        names = [name for name in names if name not in unread]
    notes = list(_notes(unread, _NAMED if wanted.only else _KEPT))
    if not names:
        why = (
            f"{len(view.encoded)} tensors are already encoded"
            if view.encoded
            else "\n".join(notes) or "no plain tensor is the weight of a linear layer"
        )
        raise refuse("AMBIGUOUS", f"nothing to encode: {why}", hint=hint)
    encoding = ENCODINGS[wanted.encoding]
    misfits = {name: _misfit(view, plain.get(name), encoding, name, across=name in across) for name in names}
    problems = [Refusal("UNSUPPORTED", why, Where(None, name), _WAY_OUT) for name, why in misfits.items() if why]
    return [name for name, why in misfits.items() if not why], problems, notes


def _notes(unread: Mapping[str, str], text: str) -> Iterator[str]:
    """Yield what transformers would not read, by reasons; numbers in names as `*`, as patterns have it."""
    for reason in dict.fromkeys(unread.values()):
        names = [name for name, why in unread.items() if why == reason]
        patterns = ", ".join(dict.fromkeys(_NUMBER.sub("*", name) for name in names))
        count = plural(len(names), "weight")
        yield f"{text}: {count} whose codes transformers would read wrongly, because {reason} ({patterns})"


def _misfit(view: View, target: Target | None, encoding: Encoding, name: str, *, across: bool) -> str:
    """Return why a tensor cannot be encoded; empty if it can."""
    if target is None:
        return f"the tensor is already encoded in {view.encoded[name].encoding.name}: decode it first"
    dtype, shape = view.described(name)
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


def _is_linear(target: Target, components: Sequence[str]) -> bool:
    """Tell whether a target is the weight of linear layers, which all of its logical tensors must be."""
    if not components or len(target.shape) < 2 or 1 in target.shape[-2:] or not _ALSO_PLAIN.isdisjoint(components):
        return False
    of_picture = len(target.shape) == _PICTURE and _EXPERT not in target.name  # or experts of all layers
    if of_picture or not _OF_LAYER.fullmatch(target.name) or _NO_LINEAR.fullmatch(target.name):
        return False
    words = _WORD.findall(" ".join((target.name, *components)).lower())
    return not any(word in _LEFT_PLAIN or any(part in word for part in _IN_WORDS) for word in words)
