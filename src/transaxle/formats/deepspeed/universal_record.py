"""DeepSpeed's universal-checkpoint metadata about tensor-parallel cuts: the record of one parameter, and the metadata
of a model.

DeepSpeed attaches a record (a dict) to each parameter in memory. The dict repeats the same facts in several forms:
sizes of sub-parameters, widths per rank, a shape, the cut as an affine map, and a nested dict for DeepSpeed's
converter, which repeats half of the keys. `Record` stores each fact once, and derives the whole dict from these facts.
`read` derives all forms from these facts again, and refuses a dict that contradicts itself.

    Record.cut("column", (48, 32), 0, [[8, 8], [8, 8], [8, 8]], view=(3, -1)).as_dict()

returns the record of the weight of a `Linear(32, 48)`: three sub-parameters of 16 rows, each cut over two ranks.
Records are plain data and need no torch.

The metadata of a model, `universal_checkpoint_info`, describes each parameter by an affine map, by lists of name
patterns, or by both. One of the two forms is enough; if the metadata describes a parameter in both forms, the two cuts
must be equal.
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
    fold_dims,
    maps_of,
    owners,
    read_affine,
    same,
    whole,
    write_affine,
)

LayerKind = Literal["column", "row"]
"""Kind of a tensor-parallel layer: in a `column` layer each rank computes part of the output, in a `row` layer a
partial sum of the whole output.

The kind of the layer does not determine which dim of the parameter is cut.
"""
Size = int | tuple[int, ...]
View = tuple[Size, ...]
"""A shape in which the entry of the cut dim is a tuple of sub-parameter sizes, or the number of sub-parameters; -1 is a
size to be inferred."""


@dataclass(frozen=True, slots=True)
class Record:
    """How one parameter is cut over tensor-parallel ranks. Records are created by the class methods, such as `cut`, or
    by the function `read`.
    """

    kind: LayerKind
    original: Shape
    """Shape of the whole parameter in the module."""
    logical: Shape
    """Shape of the whole parameter after the parameter's `view` was applied; `dim` counts the dims of this shape. The
    view may split leading dims of the parameter."""
    dim: int | None
    """Index of the dim of `logical` that is cut; None if every rank has the whole parameter."""
    spread: Spread | None
    """The boxes of the logical shape that each rank has; None if the cut cannot be described."""
    widths: Widths | None = None
    """Size of each sub-parameter on each rank along the cut dim; None if there is no cut, or only `spread` can describe
    the cut."""
    view: View | None = None
    """The view (a shape with sub-parameters) as the caller passed it; None for a parameter without sub-parameters."""
    output: Shape | None = None
    """Shape that the record states for the layer's output; it does not affect the cut."""
    shard: Shape | None = None
    """Shape that the record states for this rank's shard; it does not affect the cut."""
    bias: bool = False
    reason: str | None = None
    """Reason why the cut cannot be described; None if it can be described."""

    @classmethod
    def cut(
        cls, kind: LayerKind, shape: Shape, dim: int, widths: Sequence[Sequence[int]], *, view: View | None = None,
        rank: int | None = None, bias: bool = False,
    ) -> Record:  # fmt: skip
        """Describe a parameter that is cut along one dim: every rank has some rows of every sub-parameter.

        Args:
            kind: kind of the layer.
            shape: shape of the whole parameter.
            dim: index of the dim that is cut, counted among the view's dims.
            widths: number of rows of each sub-parameter on each rank, as `widths[sub_parameter][rank]`.
            view: the shape in which the parameter is cut, if it differs from `shape`, as with a dim for sub-parameters.
            rank: the rank to which the record belongs; the record then states this rank's shard shape.
            bias: whether the parameter is a bias.

        Raises:
            Refused: with the code SHAPE_MISMATCH if view, widths and shape contradict each other.
        """
        logical, sizes = resolve_view(view, dim, shape, len(widths))
        _check_widths(widths, sizes, None)
        exact_widths = tuple(tuple(part_widths) for part_widths in widths)
        spread = by_widths(logical, dim, exact_widths)
        shard = None if rank is None else _merge_leading_dims(spread.shards[rank], len(shape))
        output = logical if bias else logical[:-1]
        return cls(kind, shape, logical, dim, spread, exact_widths, view, output, shard, bias)

    @classmethod
    def shared(cls, kind: LayerKind, shape: Shape, ranks: int, *, bias: bool = False) -> Record:
        """Describe a parameter that is whole on every rank."""
        output = shape if bias else shape[:-1]
        return cls(kind, shape, shape, None, whole(shape, ranks), output=output, shard=shape, bias=bias)

    @classmethod
    def placed(cls, kind: LayerKind, shape: Shape, dim: int, spread: Spread, *, bias: bool = False) -> Record:
        """Describe a cut that widths cannot express, such as sub-parameters that several ranks share, or blocks in a
        new order.

        Raises:
            Refused: with the code SHAPE_MISMATCH if the spread does not have this shape; with the code INCOMPLETE if
                there is an element that no rank has.
        """
        _check_spread(spread, shape)
        return cls(kind, shape, shape, dim, spread, output=shape if bias else shape[:-1], bias=bias)

    @classmethod
    def unsupported(cls, kind: LayerKind, shape: Shape, reason: str, *, bias: bool = False) -> Record:
        """Describe a parameter whose cut cannot be described, and state the reason; DeepSpeed's converter will refuse
        the parameter.
        """
        return cls(kind, shape, shape, None, None, output=shape if bias else shape[:-1], bias=bias, reason=reason)

    @property
    def replicated(self) -> bool:
        """Whether every rank has the whole parameter."""
        return self.dim is None and self.reason is None

    @property
    def parts(self) -> tuple[int, ...] | None:
        """Return the sizes of the sub-parameters along the cut dim; None for a parameter without a view."""
        if self.view is None or self.dim is None:
            return None
        if self.widths is not None:
            return tuple(map(sum, self.widths))
        return resolve_view(self.view, self.dim, self.original, None)[1]

    def as_dict(self) -> dict[str, Any]:
        """Return the record as the dict that DeepSpeed reads; `read` is the inverse function."""
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
        affine_map = {} if self.spread is None else {keys.AFFINE: write_affine(self.spread)}
        return {
            keys.INFO_VERSION: keys.INFO_CURRENT,
            **common,
            keys.LOGICAL_SHAPE: self.logical,
            keys.OUTPUT_SHAPE: self.output,
            keys.SUB_SIZES: self.parts,
            keys.PARTITION_SIZES: self.widths[0] if self.widths is not None and self.view is None else None,
            keys.TARGET_SHAPE: self.shard,
            keys.CONVERSION: {**common, keys.REASON: self.reason, **affine_map},
        }


def read(record: Mapping[str, Any], name: str, ranks: int) -> Record:
    """Read a record from DeepSpeed's dict, and check that the facts in the dict agree.

    Args:
        record: the dict that DeepSpeed attached to the parameter.
        name: name of the parameter, for error messages.
        ranks: tensor-parallel degree.

    Raises:
        Refused: with the code UNSUPPORTED for a later version, or an uneven cut in a version that only describes even
            cuts; with the code CORRUPT if fields contradict each other; with the code SHAPE_MISMATCH if sizes and
            widths do not add up; with the code INCOMPLETE if there is an element that no rank has.
    """
    with _tensor_context(name):
        node = CheckedValue(dict(record), keys.RECORD)
        version = node.get(keys.INFO_VERSION)
        if version is not None and version.real() > keys.INFO_CURRENT:
            message = f"the record has version {version.value}; versions up to {keys.INFO_CURRENT} can be read"
            raise refuse("UNSUPPORTED", message)
        _check_conversion(node)
        reader = _RecordReader(node, ranks)
        return reader.record()


class _RecordReader:
    """Reads the fields of DeepSpeed's dict, and builds a `Record` if the fields agree.

    Args:
        node: the dict that DeepSpeed attached to the parameter.
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
        """Return the `Record`; refuse fields that contradict each other."""
        record = Record(
            self._kind, self._original, self._logical, self._dim, None, view=self._view,
            output=self._shape(keys.OUTPUT_SHAPE), shard=self._shape(keys.TARGET_SHAPE), bias=self._bias,
            reason=self._reason,
        )  # fmt: skip
        if _flag(self._node, keys.REPLICATED) != record.replicated:
            cut_or_not = "not cut" if self._dim is None else f"cut along dim {self._dim}"
            raise self._node.fault(f"{keys.REPLICATED} is {not record.replicated}, but the parameter is {cut_or_not}")
        self._check_counts(record)
        if record.reason is not None:
            return record
        widths, affine = self._widths(), self._affine_spread()
        if record.dim is None:
            spread = whole(self._logical, self._ranks)
        # A cut that widths cannot express is stored only as an affine map.
        elif widths is None and affine is not None:
            spread = affine
        else:
            widths = self._even_widths() if widths is None else widths
            spread = by_widths(self._logical, record.dim, widths)
        if affine is not None and not same(affine, spread):
            raise self._node.fault(f"the widths and the {keys.AFFINE} describe different cuts")
        _check_spread(spread, self._logical)
        return replace(record, spread=spread, widths=widths)

    def _check_counts(self, record: Record) -> None:
        """Check that all shapes have the same number of elements, and that the view implies the sub-parameter sizes in
        the dict.
        """
        shapes = {keys.ORIGINAL_SHAPE: record.original, keys.LOGICAL_SHAPE: record.logical}
        # `output` has as many elements as the bias, but may have different dims
        if record.bias and record.output is not None:
            shapes[keys.OUTPUT_SHAPE] = record.output
        if len({prod(shape) for shape in shapes.values()}) > 1:
            counts = ", ".join(f"{key} {list(shape)} has {prod(shape)} elements" for key, shape in shapes.items())
            raise _mismatch(counts)
        if record.dim is not None and record.dim >= len(record.logical):
            raise _mismatch(f"{keys.PARTITION_DIM} is {record.dim}, but the shape has only {len(record.logical)} dims")
        if record.dim is None or record.reason is not None:
            return
        logical, sizes = self._resolve_view(record.dim)
        if logical != record.logical:
            message = f"{keys.SUB_SHAPE} {list(record.view or ())} of {list(record.original)} gives {list(logical)}"
            raise _mismatch(f"{message}, but {keys.LOGICAL_SHAPE} is {list(record.logical)}")
        sub_sizes = self._node.get(keys.SUB_SIZES)
        if sub_sizes is not None and sub_sizes.naturals() != sizes:
            message = f"{keys.SUB_SIZES} is {list(sub_sizes.naturals())}, but the shape gives parts of {list(sizes)}"
            raise _mismatch(message)

    def _widths(self) -> Widths | None:
        """Return the size of each sub-parameter on each rank; None if the dict does not contain these sizes."""
        single = self._node.get(keys.PARTITION_SIZES)
        if self._dim is None or (self._parts is None and single is None):
            return None
        whole_widths = None if single is None else (single.naturals(),)
        if self._parts is None:
            _check_widths(whole_widths or (), (self._logical[self._dim],), self._ranks)
            return whole_widths
        _check_widths(self._parts, self._resolve_view(self._dim)[1], self._ranks)
        sums = tuple(map(sum, zip(*self._parts, strict=True)))
        if whole_widths is not None and whole_widths != (sums,):
            message = f"{keys.PARTITION_SIZES} is {list(whole_widths[0])}, but the widths sum to {list(sums)}"
            raise _mismatch(message)
        return self._parts

    def _resolve_view(self, dim: int) -> tuple[Shape, tuple[int, ...]]:
        """Return the logical shape, and the sizes of the sub-parameters along `dim`."""
        shape = self._logical if self._view is None else self._original
        return resolve_view(self._view, dim, shape, None if self._parts is None else len(self._parts))

    def _even_widths(self) -> Widths:
        """Return even widths, because records before version 0.4 describe only even cuts."""
        sizes = self._resolve_view(cast("int", self._dim))[1]
        uneven = [size for size in sizes if size % self._ranks]
        if uneven:
            message = (
                f"parts of {uneven} rows cannot be cut evenly over {self._ranks} ranks, and the record gives no widths"
            )
            raise refuse("UNSUPPORTED", message)
        return tuple((size // self._ranks,) * self._ranks for size in sizes)

    def _affine_spread(self) -> Spread | None:
        """Return the spread (which boxes each rank has) that the record's affine map describes; None if the record has
        no affine map.
        """
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


def resolve_view(view: View | None, dim: int, shape: Shape, count: int | None) -> tuple[Shape, tuple[int, ...]]:
    """Return the logical shape that a view describes, and the sizes of the sub-parameters along the cut dim.

    An int at the cut dim of a view is the number of sub-parameters. But if widths are stated for only one
    sub-parameter, as DeepSpeed does for biases, the int is the size of this sub-parameter.

    Args:
        view: the view; None means that the parameter has the shape `shape` and a single sub-parameter.
        dim: index of the dim that is cut.
        shape: shape of the whole parameter.
        count: number of sub-parameters for which there are widths; None if unknown.

    Raises:
        Refused: with the code SHAPE_MISMATCH if the view does not have as many elements as the parameter.
    """
    view_sizes = shape if view is None else view
    if dim >= len(view_sizes):
        raise _mismatch(f"{keys.PARTITION_DIM} is {dim}, but the shape has only {len(view_sizes)} dims")
    parts = -1 if view is None else view_sizes[dim]
    # A number in the cut dim is the number of sub-parameters for a weight, but the size for a fused bias, which has one
    # list of widths.
    sized = isinstance(parts, int) and parts > 1 and count == 1
    if any(isinstance(size, tuple) for at, size in enumerate(view_sizes) if at != dim):
        raise _mismatch(f"{keys.SUB_SHAPE} {list(view_sizes)} has parts in a dim other than the cut one, {dim}")
    counted = view is not None and not sized
    sizes = [_view_size(size, counted=counted and at == dim) for at, size in enumerate(view_sizes)]
    unknown = [at for at, size in enumerate(sizes) if size == -1]
    # Several unknown sizes can be inferred only if the view has as many dims as the parameter.
    if len(unknown) > 1 and len(sizes) == len(shape):
        for at in unknown:
            sizes[at] = shape[at]
    elif len(unknown) == 1:
        known_product = prod(size for size in sizes if size != -1)
        sizes[unknown[0]] = prod(shape) // known_product if known_product else 0
    if -1 in sizes or prod(sizes) != prod(shape):
        raise _mismatch(f"{keys.SUB_SHAPE} {list(view_sizes)} cannot be a view of a parameter of shape {list(shape)}")
    logical = tuple(sizes)
    if isinstance(parts, tuple):
        return logical, parts
    equal = 1 if parts == -1 or sized else parts
    if logical[dim] % equal:
        raise _mismatch(
            f"{keys.SUB_SHAPE} {list(view_sizes)}: {logical[dim]} rows cannot be divided into {equal} equal parts"
        )
    return logical, (logical[dim] // equal,) * equal


def _view_size(size: Size, *, counted: bool) -> int:
    """Return the size of one dim of a view; -1 if the size must be inferred from the sizes of the other dims.

    Args:
        size: entry of this dim in the view.
        counted: whether the entry is a number of sub-parameters, so that the dim's size is unknown.
    """
    if isinstance(size, tuple):
        return sum(size)
    return -1 if counted else size


def _view(node: CheckedValue | None) -> View | None:
    if node is None:
        return None
    view: list[Size] = []
    for item in node.list():
        if item.is_list:
            sizes = item.naturals()
            if not sizes or 0 in sizes:
                raise item.fault(f"part sizes must be positive, not {list(sizes)}")
            view.append(sizes)
        elif item.value == -1:
            view.append(-1)
        elif item.natural():
            view.append(item.natural())
        else:
            raise item.fault("a size must not be 0")
    if not view:
        raise node.fault("the shape must have at least one dim")
    return tuple(view)


def _flag(node: CheckedValue, key: str) -> bool:
    flag = node.get(key)
    return flag is not None and flag.flag()


_REPEATED = (
    keys.PARTITION_TYPE, keys.PARTITION_DIM, keys.SUB_SHAPE, keys.SHARD_WIDTHS, keys.ORIGINAL_SHAPE, keys.IS_BIAS,
    keys.REPLICATED,
)  # fmt: skip
"""Keys that a record contains twice: at the top level, for restoring, and in the nested dict, for DeepSpeed's
converter."""


def _check_conversion(node: CheckedValue) -> None:
    """Check that the nested dict for DeepSpeed's converter has the same values as the top level of the record."""
    conversion = node[keys.CONVERSION]
    for key in _REPEATED:
        recorded, repeated = (_plain(side.get(key)) for side in (node, conversion))
        if recorded != repeated:
            raise conversion.fault(f"{key} is {repeated} here, but {recorded} in the record itself")


def _plain(node: CheckedValue | None) -> object:
    if node is None:
        return None
    return [_plain(item) for item in node.list()] if node.is_list else node.value


def _check_widths(widths: Sequence[Sequence[int]], sizes: Sequence[int], ranks: int | None) -> None:
    """Check that there are widths for every sub-parameter and rank, and that these widths add up to the sub-parameter's
    size.
    """
    if len(widths) != len(sizes):
        raise _mismatch(f"there are widths of {len(widths)} parts, but it has {len(sizes)} parts: {list(sizes)}")
    for size, part_widths in zip(sizes, widths, strict=True):
        if len(part_widths) != (len(widths[0]) if ranks is None else ranks) or not part_widths:
            raise _mismatch(
                f"widths {list(part_widths)} are for {len(part_widths)} ranks, not {ranks or len(widths[0])}"
            )
        if sum(part_widths) != size:
            raise _mismatch(f"widths {list(part_widths)} sum to {sum(part_widths)}, but the part has {size} rows")


def _check_spread(spread: Spread, shape: Shape) -> None:
    if spread.shape != shape:
        raise _mismatch(f"its pieces belong to a parameter of shape {list(spread.shape)}, but it has {list(shape)}")
    missing = owners(spread).missing
    if missing:
        raise refuse("INCOMPLETE", f"no rank holds {missing} of its elements")


def _merge_leading_dims(shard: Shape, dims: int) -> Shape:
    """Return a shard's shape with the leading dims merged, so that `dims` dims remain."""
    extra = len(shard) - dims + 1
    return (prod(shard[:extra]), *shard[extra:])


def _mismatch(message: str) -> TransaxleError:
    return refuse("SHAPE_MISMATCH", message)


@contextmanager
def _tensor_context(name: str) -> Iterator[None]:
    """Context manager that adds the parameter's name to each `Refused` raised in its block."""
    try:
        yield
    except TransaxleError as error:
        raise gathered(replace(refusal, where=Where(keys.RECORD, name)) for refusal in error.refusals) from None


class UniversalInfo:
    """The tensor-parallel cuts of a checkpoint, from the universal-checkpoint metadata in its files.

    Args:
        node: the universal-checkpoint metadata.
        ranks: tensor-parallel degree.

    Raises:
        Refused: with the code CORRUPT if the metadata is malformed; with the code UNSUPPORTED if its version is too
            new.
    """

    def __init__(self, node: CheckedValue, ranks: int) -> None:
        self._file = node.file
        self._ranks = ranks
        self._maps = maps_of(node)
        self._patterns = Patterns(self._maps)
        self._categories = Categories(node)

    def spread(self, name: str, shards: Sequence[Shape]) -> Spread:
        """Return how a parameter is distributed over the tensor-parallel ranks.

        Args:
            name: name of the parameter.
            shards: shape of the parameter's shard on each rank.

        Raises:
            Refused: with the code UNSUPPORTED if the metadata does not describe the parameter; with the code CORRUPT if
                the affine map and the pattern lists disagree; with the code SHAPE_MISMATCH if the metadata does not fit
                the shards' shapes.
        """
        reason = self._categories.why_unsupported(name)
        if reason is not None:
            message = f"DeepSpeed itself could not describe how it was cut: {reason}"
            raise refuse("UNSUPPORTED", message, file=self._file, tensor=name)
        patterns = self._patterns.match(name)
        if len(patterns) > 1:
            raise refuse(
                "CORRUPT", f"several patterns of the affine map match it: {patterns}", file=self._file, tensor=name
            )
        affine = (
            self._with_tensor_name(name, lambda: read_affine(self._maps[patterns[0]], self._ranks))
            if patterns
            else None
        )
        if affine is not None:
            unfolded_spread = affine
            affine = self._with_tensor_name(name, lambda: fold_dims(unfolded_spread, shards))
        if affine is None and not self._categories.any:
            raise refuse("UNSUPPORTED", "the metadata does not say how it was cut", file=self._file, tensor=name)
        if affine is None or (not affine.is_scaled and self._categories.names(name)):
            from_lists = self._with_tensor_name(name, lambda: self._categories.spread(name, shards))
            affine = from_lists if affine is None else self._reconcile(name, affine, from_lists)
        return self._categories.without_padding(name, affine)

    def _reconcile(self, name: str, affine: Spread, from_lists: Spread) -> Spread:
        """Return the spread (which boxes each rank has) from the affine map, after comparing it with that from the
        pattern lists, which cannot describe a new order of blocks.
        """
        finer = self._categories.only_rows(name) and _along(affine, 1) and affine.shards == from_lists.shards
        if affine.shape != from_lists.shape or not (finer or same(affine, from_lists)):
            message = (
                f"its two descriptions disagree in shape or cut: the affine map gives {list(affine.shape)}, "
                f"the lists give {list(from_lists.shape)}"
            )
            raise refuse("CORRUPT", message, file=self._file, tensor=name)
        return affine

    def _with_tensor_name(self, name: str, make: Callable[[], Spread]) -> Spread:
        """Return the spread (which boxes each rank has) that `make` returns; if `make` raises `Refused`, add the
        parameter's name to the error.
        """
        try:
            return make()
        except TransaxleError as error:
            raise gathered(
                replace(refusal, where=Where(refusal.where.file or self._file, name)) for refusal in error.refusals
            ) from None


def _along(spread: Spread, dim: int) -> bool:
    """Return whether a spread cuts the parameter along `dim` and no further dim."""
    return all(
        size == full_size
        for blocks in spread.blocks
        for block in blocks
        for at, (size, full_size) in enumerate(zip(block.shape, spread.shape, strict=True))
        if at != dim
    )
