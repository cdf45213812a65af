"""What universal metadata states of a parameter, and of a model.

The record of one parameter: how it is cut over tensor-parallel ranks, as DeepSpeed attaches it to the live
parameter.

A record states the same facts many times: sizes of parts, widths per rank, a shape, a nested copy of half of it for
the converter, the same cut once more as an affine map. `Record` holds each fact once. It writes the whole dict from
them, and reads one by deriving everything again and refusing any contradiction.

    Record.cut("column", (48, 32), 0, [[8, 8], [8, 8], [8, 8]], view=(3, -1)).as_dict()

gives the record of a `Linear(32, 48)` with three parts of 16 rows on two ranks. All of it is plain data; nothing here
knows torch.

The metadata of one model, `universal_checkpoint_info`: its statements on each parameter, in either of its forms.

Either form alone suffices. Where a parameter is in both, both are reduced to the same geometry and must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, cast

from transaxle.errors import TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Shape
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.categories import Categories, Patterns, Widths
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.spread import (
    Spread,
    by_widths,
    folded,
    maps_of,
    owners,
    read_affine,
    same,
    whole,
    write_affine,
)

LayerKind = Literal["column", "row"]
"""What the layer does with the cut: it computes parts of its output, or partial sums of it. Independent of the
geometry.
"""
Size = int | tuple[int, ...]
View = tuple[Size, ...]
"""A shape whose cut dim holds the sizes of the parts, or their number; -1 stands for the remaining elements."""


@dataclass(frozen=True, slots=True)
class Record:
    """How one parameter is cut. Made by `cut`, `shared`, `placed` and `unsupported`, or by `read`."""

    kind: LayerKind
    original: Shape
    """Shape of the whole parameter, as the module has it."""
    logical: Shape
    """Shape of the same elements in the view that `dim` refers to: leading dims may be split further."""
    dim: int | None
    """The dim that is cut; None: every rank holds the whole parameter."""
    spread: Spread | None
    """The geometry, in the logical view; None where it cannot be described."""
    widths: Widths | None = None
    """Part -> rank -> rows; None where `spread` is more general, or the parameter is not cut."""
    view: View | None = None
    """The view as it was requested; None for a parameter without parts."""
    output: Shape | None = None
    """Dims of the layer's output; a note."""
    held: Shape | None = None
    """Shape of this rank's shard; a note."""
    bias: bool = False
    reason: str | None = None
    """Why it cannot be described."""

    @classmethod
    def cut(
        cls, kind: LayerKind, shape: Shape, dim: int, widths: Sequence[Sequence[int]], *, view: View | None = None,
        rank: int | None = None, bias: bool = False,
    ) -> Record:  # fmt: skip
        """Describe a parameter of which every rank holds some rows of every part.

        Args:
            kind: of the layer.
            shape: of the whole parameter.
            dim: the dim that is cut, counted in the view.
            widths: part -> rank -> rows.
            view: the view, where it has parts or other dims.
            rank: whose shard it is; for a note.
            bias: it is one.

        Raises:
            Refused: SHAPE_MISMATCH where view, widths and shape do not add up.
        """
        logical, sizes = resolved(view, dim, shape, len(widths))
        _check_widths(widths, sizes, None)
        exact_widths = tuple(tuple(part_widths) for part_widths in widths)
        spread = by_widths(logical, dim, exact_widths)
        shard = None if rank is None else _merged(spread.shards[rank], len(shape))
        output = logical if bias else logical[:-1]
        return cls(kind, shape, logical, dim, spread, exact_widths, view, output, shard, bias)

    @classmethod
    def shared(cls, kind: LayerKind, shape: Shape, ranks: int, *, bias: bool = False) -> Record:
        """Describe a parameter that every rank holds whole."""
        output = shape if bias else shape[:-1]
        return cls(kind, shape, shape, None, whole(shape, ranks), output=output, held=shape, bias=bias)

    @classmethod
    def placed(cls, kind: LayerKind, shape: Shape, dim: int, spread: Spread, *, bias: bool = False) -> Record:
        """Describe a parameter whose parts are cut in ways that widths cannot say: some parts shared, blocks reordered.

        Raises:
            Refused: SHAPE_MISMATCH where that is another parameter; INCOMPLETE where no rank holds an element.
        """
        _check_placed(spread, shape)
        return cls(kind, shape, shape, dim, spread, output=shape if bias else shape[:-1], bias=bias)

    @classmethod
    def unsupported(cls, kind: LayerKind, shape: Shape, reason: str, *, bias: bool = False) -> Record:
        """Say why a parameter cannot be described, so that nobody converts it."""
        return cls(kind, shape, shape, None, None, output=shape if bias else shape[:-1], bias=bias, reason=reason)

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole parameter."""
        return self.dim is None and self.reason is None

    @property
    def parts(self) -> tuple[int, ...] | None:
        """Sizes of the parts of a parameter that has a view; None where they are not known."""
        if self.view is None or self.dim is None:
            return None
        if self.widths is not None:
            return tuple(map(sum, self.widths))
        return resolved(self.view, self.dim, self.original, None)[1]

    def as_dict(self) -> dict[str, Any]:
        """Return the record as DeepSpeed reads it.  Inverse: `read`."""
        widths = None if self.widths is None else [list(each) for each in self.widths]
        common = {
            keys.PARTITION_TYPE: self.kind,
            keys.PARTITION_DIM: self.dim,
            keys.SUB_SHAPE: self.view,
            keys.SHARD_WIDTHS: widths if self.view is not None else None,
            keys.ORIGINAL_SHAPE: self.original,
            keys.IS_BIAS: self.bias,
            keys.REPLICATED: self.replicated,
        }
        described = {} if self.spread is None else {keys.AFFINE: write_affine(self.spread)}
        return {
            keys.INFO_VERSION: keys.INFO_CURRENT,
            **common,
            keys.LOGICAL_SHAPE: self.logical,
            keys.OUTPUT_SHAPE: self.output,
            keys.SUB_SIZES: self.parts,
            keys.PARTITION_SIZES: self.widths[0] if self.widths is not None and self.view is None else None,
            keys.TARGET_SHAPE: self.held,
            keys.CONVERSION: {**common, keys.REASON: self.reason, **described},
        }


def read(record: Mapping[str, Any], name: str, ranks: int) -> Record:
    """Read a record, and check every fact in it against the others.

    Args:
        record: the dict that the parameter carries.
        name: of the parameter, for errors.
        ranks: tensor-parallel degree.

    Raises:
        Refused: UNSUPPORTED for a later version, or an uneven cut of an earlier one that it does not describe; CORRUPT
            for contradictions; SHAPE_MISMATCH for sizes and widths that do not add up, with the numbers; INCOMPLETE
            where no rank holds an element.
    """
    with _about(name):
        node = CheckedValue(dict(record), keys.RECORD)
        version = node.get(keys.INFO_VERSION)
        if version is not None and version.real() > keys.INFO_CURRENT:
            message = f"the record has version {version.value}; versions up to {keys.INFO_CURRENT} can be read"
            raise refuse("UNSUPPORTED", message)
        _check_conversion(node)
        reader = _RecordReader(node, ranks)
        return reader.record()


class _RecordReader:
    """The fields of a record, read once.

    Args:
        node: the record.
        ranks: tensor-parallel degree.
    """

    def __init__(self, node: CheckedValue, ranks: int) -> None:
        self._node, self._ranks = node, ranks
        kind = node[keys.PARTITION_TYPE].text()
        if kind not in (keys.COLUMN, keys.ROW):
            raise node.fault(f"{keys.PARTITION_TYPE} must be {keys.COLUMN!r} or {keys.ROW!r}, not {kind!r}")
        self._kind = cast("LayerKind", kind)
        dim = node.get(keys.PARTITION_DIM)
        self._dim = None if dim is None else dim.natural()
        self._conversion = node[keys.CONVERSION]
        reason = self._conversion.get(keys.REASON)
        self._reason = None if reason is None else reason.text()
        original, logical = self._shape(keys.ORIGINAL_SHAPE), self._shape(keys.LOGICAL_SHAPE)
        if original is None and logical is None:
            raise node.fault(f"{keys.LOGICAL_SHAPE} is missing")
        self._original = cast("Shape", original if original is not None else logical)
        self._logical = logical if logical is not None else self._original
        self._view = _view(node.get(keys.SUB_SHAPE))
        widths = node.get(keys.SHARD_WIDTHS)
        self._parts = None if widths is None else tuple(each.naturals() for each in widths.list())
        self._bias = _flag(node, keys.IS_BIAS)

    def record(self) -> Record:
        """Return the record, once all fields agree."""
        record = Record(
            self._kind, self._original, self._logical, self._dim, None, view=self._view,
            output=self._shape(keys.OUTPUT_SHAPE), held=self._shape(keys.TARGET_SHAPE), bias=self._bias,
            reason=self._reason,
        )  # fmt: skip
        if _flag(self._node, keys.REPLICATED) != record.replicated:
            cut_text = "not cut" if self._dim is None else f"cut along dim {self._dim}"
            raise self._node.fault(f"{keys.REPLICATED} is {not record.replicated}, but the parameter is {cut_text}")
        self._check_counts(record)
        if record.reason is not None:
            return record
        widths, drawn = self._widths(), self._drawn()
        if record.dim is None:
            spread = whole(self._logical, self._ranks)
        # Cuts that widths cannot express come as an affine map only.
        elif widths is None and drawn is not None:
            spread = drawn
        else:
            widths = self._even() if widths is None else widths
            spread = by_widths(self._logical, record.dim, widths)
        if drawn is not None and not same(drawn, spread):
            raise self._node.fault(f"the widths and the {keys.AFFINE} describe different cuts")
        _check_placed(spread, self._logical)
        return replace(record, spread=spread, widths=widths)

    def _check_counts(self, record: Record) -> None:
        """Check the shapes against each other."""
        shapes = {keys.ORIGINAL_SHAPE: record.original, keys.LOGICAL_SHAPE: record.logical}
        if record.bias and record.output is not None:  # the same elements; the dims may be others
            shapes[keys.OUTPUT_SHAPE] = record.output
        if len({prod(shape) for shape in shapes.values()}) > 1:
            counts = ", ".join(f"{key} {list(shape)} has {prod(shape)} elements" for key, shape in shapes.items())
            raise _mismatch(counts)
        if record.dim is not None and record.dim >= len(record.logical):
            raise _mismatch(f"{keys.PARTITION_DIM} is {record.dim}, but the shape has only {len(record.logical)} dims")
        if record.dim is None or record.reason is not None:
            return
        logical, sizes = self._resolved(record.dim)
        if logical != record.logical:
            message = f"{keys.SUB_SHAPE} {list(record.view or ())} of {list(record.original)} gives {list(logical)}"
            raise _mismatch(f"{message}, but {keys.LOGICAL_SHAPE} is {list(record.logical)}")
        sub_sizes = self._node.get(keys.SUB_SIZES)
        if sub_sizes is not None and sub_sizes.naturals() != sizes:
            message = f"{keys.SUB_SIZES} is {list(sub_sizes.naturals())}, but the shape gives parts of {list(sizes)}"
            raise _mismatch(message)

    def _widths(self) -> Widths | None:
        """Return the rows of each part on each rank, if they are recorded."""
        single = self._node.get(keys.PARTITION_SIZES)
        if self._dim is None or (self._parts is None and single is None):
            return None
        whole_widths = None if single is None else (single.naturals(),)
        if self._parts is None:
            _check_widths(whole_widths or (), (self._logical[self._dim],), self._ranks)
            return whole_widths
        _check_widths(self._parts, self._resolved(self._dim)[1], self._ranks)
        sums = tuple(map(sum, zip(*self._parts, strict=True)))
        if whole_widths is not None and whole_widths != (sums,):
            message = f"{keys.PARTITION_SIZES} is {list(whole_widths[0])}, but the widths sum to {list(sums)}"
            raise _mismatch(message)
        return self._parts

    def _resolved(self, dim: int) -> tuple[Shape, tuple[int, ...]]:
        """Return the shape of the view, and the sizes of the parts."""
        shape = self._logical if self._view is None else self._original
        return resolved(self._view, dim, shape, None if self._parts is None else len(self._parts))

    def _even(self) -> Widths:
        """Return even widths: all that records had before version 0.4."""
        sizes = self._resolved(cast("int", self._dim))[1]
        uneven = [size for size in sizes if size % self._ranks]
        if uneven:
            message = (
                f"parts of {uneven} rows cannot be cut evenly over {self._ranks} ranks, and the record gives no widths"
            )
            raise refuse("UNSUPPORTED", message)
        return tuple((size // self._ranks,) * self._ranks for size in sizes)

    def _drawn(self) -> Spread | None:
        """Return the affine description, if there is one."""
        node = self._conversion.get(keys.AFFINE)
        if node is None:
            return None
        spread = read_affine(node, self._ranks)
        if spread.shape != self._logical:
            message = f"the {keys.AFFINE} has the shape {list(spread.shape)}, but {keys.LOGICAL_SHAPE} is "
            raise _mismatch(f"{message}{list(self._logical)}")
        return spread

    def _shape(self, key: str) -> Shape | None:
        value = self._node.get(key)
        return None if value is None else value.naturals()


def resolved(view: View | None, dim: int, shape: Shape, count: int | None) -> tuple[Shape, tuple[int, ...]]:
    """Return the shape that a view gives, and the sizes of its parts along the cut dim.

    A number there is that of the parts; with widths for one part only it is the size, as DeepSpeed has it for biases.

    Args:
        view: None: the shape itself, with one part.
        dim: the dim that is cut.
        shape: of the whole parameter.
        count: number of parts for which there are widths; None where it is not known.

    Raises:
        Refused: SHAPE_MISMATCH where the view does not have the parameter's elements.
    """
    asked = shape if view is None else view
    if dim >= len(asked):
        raise _mismatch(f"{keys.PARTITION_DIM} is {dim}, but the shape has only {len(asked)} dims")
    parts = -1 if view is None else asked[dim]
    # DeepSpeed writes the size of a fused bias where a weight has the number of its parts; one list of widths tells
    # them apart.
    sized = isinstance(parts, int) and parts > 1 and count == 1
    if any(isinstance(size, tuple) for at, size in enumerate(asked) if at != dim):
        raise _mismatch(f"{keys.SUB_SHAPE} {list(asked)} has parts in a dim other than the cut one, {dim}")
    counted = view is not None and not sized
    sizes = [_known(size, counted=counted and at == dim) for at, size in enumerate(asked)]
    unknown = [at for at, size in enumerate(sizes) if size == -1]
    # Several unknown sizes can only be solved if the view keeps the dims of the parameter.
    if len(unknown) > 1 and len(sizes) == len(shape):
        for at in unknown:
            sizes[at] = shape[at]
    elif len(unknown) == 1:
        product_of_known = prod(size for size in sizes if size != -1)
        sizes[unknown[0]] = prod(shape) // product_of_known if product_of_known else 0
    if -1 in sizes or prod(sizes) != prod(shape):
        raise _mismatch(f"{keys.SUB_SHAPE} {list(asked)} cannot be a view of a parameter of shape {list(shape)}")
    logical = tuple(sizes)
    if isinstance(parts, tuple):
        return logical, parts
    equal = 1 if parts == -1 or sized else parts
    if logical[dim] % equal:
        raise _mismatch(
            f"{keys.SUB_SHAPE} {list(asked)}: {logical[dim]} rows cannot be divided into {equal} equal parts"
        )
    return logical, (logical[dim] // equal,) * equal


def _known(size: Size, *, counted: bool) -> int:
    """Return the size of one dim of a view; -1 where it follows from the others, as where parts are only counted."""
    if isinstance(size, tuple):
        return sum(size)
    return -1 if counted else size


def _view(node: CheckedValue | None) -> View | None:
    if node is None:
        return None
    found: list[Size] = []
    for item in node.list():
        if item.is_list:
            sizes = item.naturals()
            if not sizes or 0 in sizes:
                raise item.fault(f"part sizes must be positive, not {list(sizes)}")
            found.append(sizes)
        elif item.value == -1:
            found.append(-1)
        elif item.natural():
            found.append(item.natural())
        else:
            raise item.fault("a size must not be 0")
    if not found:
        raise node.fault("the shape must have at least one dim")
    return tuple(found)


def _flag(node: CheckedValue, key: str) -> bool:
    found = node.get(key)
    return found is not None and found.flag()


_REPEATED = (
    keys.PARTITION_TYPE, keys.PARTITION_DIM, keys.SUB_SHAPE, keys.SHARD_WIDTHS, keys.ORIGINAL_SHAPE, keys.IS_BIAS,
    keys.REPLICATED,
)  # fmt: skip
"""What a record says twice: for restoring, and for converting."""


def _check_conversion(node: CheckedValue) -> None:
    """Hold what is said for converting against what is said for restoring."""
    conversion = node[keys.CONVERSION]
    for key in _REPEATED:
        one, other = (_plain(side.get(key)) for side in (node, conversion))
        if one != other:
            raise conversion.fault(f"{key} is {other} here, but {one} in the record itself")


def _plain(node: CheckedValue | None) -> object:
    if node is None:
        return None
    return [_plain(item) for item in node.list()] if node.is_list else node.value


def _check_widths(widths: Sequence[Sequence[int]], sizes: Sequence[int], ranks: int | None) -> None:
    """Check that there are widths for every part and rank, and that they sum to the part."""
    if len(widths) != len(sizes):
        raise _mismatch(f"there are widths of {len(widths)} parts, but it has {len(sizes)} parts: {list(sizes)}")
    for size, each in zip(sizes, widths, strict=True):
        if len(each) != (len(widths[0]) if ranks is None else ranks) or not each:
            raise _mismatch(f"widths {list(each)} are for {len(each)} ranks, not {ranks or len(widths[0])}")
        if sum(each) != size:
            raise _mismatch(f"widths {list(each)} sum to {sum(each)}, but the part has {size} rows")


def _check_placed(spread: Spread, shape: Shape) -> None:
    if spread.shape != shape:
        raise _mismatch(f"its pieces belong to a parameter of shape {list(spread.shape)}, but it has {list(shape)}")
    missing = owners(spread).missing
    if missing:
        raise refuse("INCOMPLETE", f"no rank holds {missing} of its elements")


def _merged(shard: Shape, dims: int) -> Shape:
    """Return a shard's shape with its leading dims merged into one, as the module has it."""
    extra = len(shard) - dims + 1
    return (prod(shard[:extra]), *shard[extra:])


def _mismatch(message: str) -> TransaxleError:
    return refuse("SHAPE_MISMATCH", message)


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Name the parameter in what is refused."""
    try:
        yield
    except TransaxleError as error:
        raise gathered(replace(refusal, where=Where(keys.RECORD, name)) for refusal in error.refusals) from None


class UniversalInfo:
    """A checkpoint's own description of its tensor-parallel cuts.

    Args:
        node: the metadata.
        ranks: tensor-parallel degree.

    Raises:
        Refused: CORRUPT, UNSUPPORTED.
    """

    def __init__(self, node: CheckedValue, ranks: int) -> None:
        self._file = node.file
        self._ranks = ranks
        self._maps = maps_of(node)
        self._patterns = Patterns(self._maps)
        self._categories = Categories(node)

    def spread(self, name: str, shards: Sequence[Shape]) -> Spread:
        """Return how a parameter is spread over the tensor-parallel ranks.

        Args:
            name: its name.
            shards: its shape on every rank.

        Raises:
            Refused: UNSUPPORTED where DeepSpeed could not describe it, or nothing does; CORRUPT where the two forms
                disagree; SHAPE_MISMATCH where what they say does not fit the shards.
        """
        reason = self._categories.unsupported(name)
        if reason is not None:
            message = f"DeepSpeed itself could not describe how it was cut: {reason}"
            raise refuse("UNSUPPORTED", message, file=self._file, tensor=name)
        patterns = self._patterns.match(name)
        if len(patterns) > 1:
            raise refuse(
                "CORRUPT", f"several patterns of the affine map match it: {patterns}", file=self._file, tensor=name
            )
        described = self._named(name, lambda: read_affine(self._maps[patterns[0]], self._ranks)) if patterns else None
        if described is not None:
            unfolded = described
            described = self._named(name, lambda: folded(unfolded, shards))
        if described is None and not self._categories.any:
            raise refuse("UNSUPPORTED", "the metadata does not say how it was cut", file=self._file, tensor=name)
        if described is None or (not described.scaled and self._categories.names(name)):
            listed = self._named(name, lambda: self._categories.spread(name, shards))
            described = listed if described is None else self._agreed(name, described, listed)
        return self._categories.unpadded(name, described)

    def _agreed(self, name: str, described: Spread, listed: Spread) -> Spread:
        """Check two descriptions of a parameter against each other; the affine one may add the order of rows."""
        finer = self._categories.only_rows(name) and _along(described, 1) and described.shards == listed.shards
        if described.shape != listed.shape or not (finer or same(described, listed)):
            message = (
                f"its two descriptions disagree in shape or cut: the affine map gives {list(described.shape)}, "
                f"the lists give {list(listed.shape)}"
            )
            raise refuse("CORRUPT", message, file=self._file, tensor=name)
        return described

    def _named(self, name: str, make: Callable[[], Spread]) -> Spread:
        """Make a spread; a refusal that names no tensor gets this one."""
        try:
            return make()
        except TransaxleError as error:
            raise gathered(
                replace(refusal, where=Where(refusal.where.file or self._file, name)) for refusal in error.refusals
            ) from None


def _along(spread: Spread, dim: int) -> bool:
    """Tell whether a parameter is cut along this dim only."""
    return all(
        size == full_size
        for blocks in spread.blocks
        for block in blocks
        for at, (size, full_size) in enumerate(zip(block.shape, spread.shape, strict=True))
        if at != dim
    )
