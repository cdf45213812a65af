r"""The pattern form of the metadata, and its patterns looked up by name.

"The pattern form of the metadata (up to 0.4): lists of name patterns, each saying how its parameters are cut.

A parameter that no list names is cut along its first dim: that is the schema's own rule, and it holds only where there
is such a schema. Widths are those of the shards themselves, or, for fused parameters, those the metadata gives.

Name patterns of DeepSpeed's metadata, looked up by name.

DeepSpeed's own patterns are escaped names; those of training frameworks have `.`, `\d+` and the like. As DeepSpeed uses
them, a pattern need only match the beginning of a name, unless it ends in `$`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from transaxle.encodings.conventions.linear_regex import Expressions, PatternError
from transaxle.errors import Code, TransaxleError, refuse
from transaxle.formats.catalog import Shape
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.spread import Spread, by_widths, clipped, folded, whole

_WHOLE_NAME = re.compile(r"\^?((?:\\[^a-zA-Z0-9]|[^\\.^$*+?{}\[\]()|])*)\$")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


class Patterns:
    """Many patterns: those that are whole names are found without trying the others.

    Raises:
        Refused: UNSUPPORTED for a pattern that is malformed, or that RE2 cannot run.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._of_name: dict[str, str] = {}
        self._others: list[str] = []
        for text in dict.fromkeys(texts):
            if found := _WHOLE_NAME.fullmatch(text):
                self._of_name[_ESCAPE.sub(r"\1", found[1])] = text
            else:
                self._others.append(text)
        try:
            self._expressions = Expressions(self._others)
        except PatternError as error:
            raise _unsupported(error) from None

    def match(self, name: str) -> tuple[str, ...]:
        """Return the patterns that match a name.

        Raises:
            Refused: UNSUPPORTED where that takes far longer than with any real patterns.
        """
        whole = [self._of_name[name]] if name in self._of_name else []
        try:
            return (*whole, *(self._others[number] for number in self._expressions.matching(name)))
        except PatternError as error:
            raise _unsupported(error) from None


def _unsupported(error: PatternError) -> TransaxleError:
    hint = "Write the patterns as escaped names, or as regular expressions without `\\1`, `\\b` and `(?=`."
    return refuse("UNSUPPORTED", f"name patterns: {error}", hint=hint)


def escaped(name: str) -> str:
    """Return the pattern that matches this name alone, as DeepSpeed writes it."""
    return f"^{re.escape(name)}$"


Widths = tuple[tuple[int, ...], ...]
"""Part -> rank -> rows."""


@dataclass(frozen=True, slots=True)
class Fused:
    """A parameter that consists of parts, one after the other along a dim."""

    shape: tuple[int | tuple[int, ...], ...]
    """Sizes as DeepSpeed states them: -1 for the remaining elements; at `dim` the parts' sizes, or (before 0.4) their
    number.
    """
    dim: int
    widths: Widths | None
    """None before version 0.4: every part is cut evenly."""


class Categories:
    """The lists of one model.

    Args:
        info: the model's metadata.

    Raises:
        Refused: CORRUPT; UNSUPPORTED for patterns that are not read.
    """

    def __init__(self, info: CheckedValue) -> None:
        self._info = info
        version = info.get(keys.INFO_VERSION)
        self.version = 0.0 if version is None else version.real()
        if self.version > keys.INFO_CURRENT:
            message = f"the metadata has version {self.version}; versions up to {keys.INFO_CURRENT} can be read"
            raise refuse("UNSUPPORTED", message, file=info.file)
        # Lists without a list of what is unsupported were written by a training framework, not by AutoTP.
        self._of_framework = info.get(keys.UNSUPPORTED_PATTERNS) is None
        self._lists = {
            key: Patterns(_texts(info, key))
            for key in (
                keys.REPLICATED_PATTERNS, keys.AVERAGED_PATTERNS, keys.ROW_PATTERNS, keys.VOCABULARY_PATTERNS,
                keys.PIPELINE_PATTERNS, keys.HALVES_PATTERNS,
            )
        }  # fmt: skip
        reasons = info.get(keys.UNSUPPORTED_PATTERNS)
        self._reasons = {} if reasons is None else {text: reason.text() for text, reason in reasons.named()}
        self._unsupported = Patterns(self._reasons)
        self._fused = dict(self._read_fused())
        self._fused_patterns = Patterns(self._fused)

    def unsupported(self, name: str) -> str | None:
        """Return why DeepSpeed itself could not describe a parameter; None where it could."""
        patterns = self._unsupported.match(name)
        return self._reasons[patterns[0]] if patterns else None

    def spread(self, name: str, shards: Sequence[Shape]) -> Spread:
        """Return how the lists say that a parameter is spread.

        Args:
            name: its name.
            shards: the shape on every rank.

        Raises:
            Refused: CORRUPT where lists contradict each other; SHAPE_MISMATCH where the shapes do not
                fit; UNSUPPORTED for an uneven cut that the metadata does not describe.
        """
        kind = self.kind(name)
        if kind in (keys.REPLICATED_PATTERNS, keys.AVERAGED_PATTERNS):
            if len(set(shards)) > 1:
                raise self._fault(name, f"every rank holds all of it, but in different shapes: {_listed(shards)}")
            return whole(shards[0], len(shards))
        if kind == keys.SUB_PARAMS:
            return self._parts(name, self.fused(name), shards)
        dim = 1 if kind == keys.ROW_PATTERNS else 0
        rows = self._rows(name, shards, dim)
        if kind == keys.HALVES_PATTERNS:
            if any(count % 2 for count in rows):
                raise self._fault(name, f"shards of {rows} rows cannot be split into two halves")
            halves = tuple(count // 2 for count in rows)
            return by_widths(_joined(shards, dim), dim, (halves, halves))
        return by_widths(_joined(shards, dim), dim, (rows,))

    def unpadded(self, name: str, spread: Spread) -> Spread:
        """Take the padding off a vocabulary.

        AutoTP pads nothing; it puts parameters into this list by looking for `embed` in their names. So there the list
        says nothing about rows, unless it also gives the padded size.

        Raises:
            Refused: CORRUPT where the true size is missing; SHAPE_MISMATCH where sizes contradict the shards.
        """
        if not self.pads(name):
            return spread
        padded = self._info.get(keys.PADDED_VOCABULARY)
        rows = self._info.get(keys.TRUE_VOCABULARY)
        if rows is None:
            raise self._fault(name, f"it is a padded vocabulary, but {keys.TRUE_VOCABULARY} is missing", "CORRUPT")
        have = spread.shape[0] if spread.shape else 0
        if padded is not None and padded.natural() != have:
            raise self._fault(name, f"{keys.PADDED_VOCABULARY} is {padded.natural()}, but its shards have {have} rows")
        if rows.natural() > have:
            raise self._fault(name, f"{keys.TRUE_VOCABULARY} is {rows.natural()}, but its shards have only {have} rows")
        return clipped(spread, rows.natural())

    @property
    def any(self) -> bool:
        """Whether such a schema exists at all: without one, an unlisted parameter is not described."""
        return any(
            self._info.get(key) is not None for key in (*self._cuts(), keys.SUB_PARAMS, keys.VOCABULARY_PATTERNS)
        )

    def names(self, name: str) -> bool:
        """Tell whether a list states how a parameter is cut."""
        return bool(self._kinds(name))

    def pads(self, name: str) -> bool:
        """Tell whether a parameter is a padded vocabulary."""
        meant = self._of_framework or self._info.get(keys.PADDED_VOCABULARY) is not None
        return meant and self._match(keys.VOCABULARY_PATTERNS, name)

    def kind(self, name: str) -> str:
        """Return the list that states how a parameter is cut; empty for a cut along dim 0, in one part.

        Raises:
            Refused: CORRUPT where lists contradict each other.
        """
        kinds = self._kinds(name)
        if len(kinds) > 1:
            raise self._fault(name, f"several lists match it: {', '.join(kinds)}", "CORRUPT")
        return kinds[0] if kinds else ""

    def fused(self, name: str) -> Fused:
        """Return the parts of a parameter whose kind is that of the fused ones."""
        return self._fused[self._fused_patterns.match(name)[0]]

    def only_rows(self, name: str) -> bool:
        """Tell whether the lists say only that AutoTP cut a parameter along dim 1, not in which order."""
        return not self._of_framework and self._kinds(name) == [keys.ROW_PATTERNS]

    def _kinds(self, name: str) -> list[str]:
        """Return the lists that state how a parameter is cut; AutoTP also lists row-parallel fused ones as
        row-parallel.
        """
        lists = [key for key in (*self._cuts(), keys.SUB_PARAMS) if self._match(key, name)]
        # The list of fused parameters is the more exact of the two.
        return [keys.SUB_PARAMS] if lists == [keys.ROW_PATTERNS, keys.SUB_PARAMS] else lists

    @staticmethod
    def _cuts() -> tuple[str, ...]:
        return keys.REPLICATED_PATTERNS, keys.AVERAGED_PATTERNS, keys.HALVES_PATTERNS, keys.ROW_PATTERNS

    def _match(self, key: str, name: str) -> bool:
        patterns = self._fused_patterns if key == keys.SUB_PARAMS else self._lists[key]
        return bool(patterns.match(name))

    def _rows(self, name: str, shards: Sequence[Shape], dim: int) -> tuple[int, ...]:
        """Return the size of every shard along the dim in which they are joined; all others must be equal."""
        if any(len(shape) <= dim for shape in shards):
            raise self._fault(name, f"it is cut along dim {dim}, which not all of its shards have: {_listed(shards)}")
        if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shards}) > 1:
            raise self._fault(
                name, f"the shards are joined along dim {dim}, but differ in another dim: {_listed(shards)}"
            )
        return tuple(shape[dim] for shape in shards)

    def _parts(self, name: str, fused: Fused, shards: Sequence[Shape]) -> Spread:
        total = sum(map(prod, shards))
        sizes = fused.shape[fused.dim]
        parts = sizes if isinstance(sizes, tuple) else self._equal_parts(name, sizes, shards, fused.dim)
        widths = fused.widths
        if widths is None:
            uneven = [size for size in parts if size % len(shards)]
            if uneven:
                message = f"parts of {uneven} rows cannot be cut evenly over {len(shards)} ranks, and the metadata "
                raise self._fault(name, f"{message}(version {self.version}) gives no widths", "UNSUPPORTED")
            # Before version 0.4 only even cuts could be described.
            widths = tuple((size // len(shards),) * len(shards) for size in parts)
        if len(widths) != len(parts) or any(len(part_widths) != len(shards) for part_widths in widths):
            raise self._fault(name, f"widths {_listed(widths)} do not fit {len(parts)} parts on {len(shards)} ranks")
        for size, part_widths in zip(parts, widths, strict=True):
            if sum(part_widths) != size:
                raise self._fault(
                    name, f"widths {list(part_widths)} sum to {sum(part_widths)}, but the part has {size} rows"
                )
        logical = _resolved(fused, parts, total)
        if logical is None or prod(logical) != total:
            raise self._fault(name, f"its shape {list(fused.shape)} does not have the {total} elements of its shards")
        return folded(by_widths(logical, fused.dim, widths), shards)

    def _equal_parts(self, name: str, count: int, shards: Sequence[Shape], dim: int) -> tuple[int, ...]:
        """Return the sizes of equal parts: before version 0.4 only their number was kept."""
        if self.version >= keys.INFO_CURRENT:
            raise self._fault(
                name, f"{keys.SUB_PARAMS} must give the sizes of the parts, not only their number {count}", "CORRUPT"
            )
        rows = sum(self._rows(name, shards, dim))
        if count < 1 or rows % count:
            raise self._fault(name, f"{rows} rows cannot be divided into {count} equal parts")
        return (rows // count,) * count

    def _read_fused(self) -> list[tuple[str, Fused]]:
        fused: list[tuple[str, Fused]] = []
        listed = self._info.get(keys.SUB_PARAMS)
        widths = self._info.get(keys.SHARD_WIDTHS)
        widths_by_pattern = {} if widths is None else dict(widths.named())
        for entry in [] if listed is None else listed.list():
            sizes = tuple(size_of(item) for item in entry[keys.SHAPE].list())
            dim = entry[keys.PARTITION_DIM].natural()
            if dim >= len(sizes):
                raise entry.fault(f"{keys.PARTITION_DIM} is {dim}, but its shape has only {len(sizes)} dims")
            for text in entry[keys.PATTERNS].texts():
                width_lists = widths_by_pattern.get(text)
                if width_lists is None and self.version >= keys.INFO_CURRENT:
                    message = f"{keys.SHARD_WIDTHS} for {text!r} is missing; version {self.version} requires it"
                    raise entry.fault(message)
                part_widths = None if width_lists is None else tuple(item.naturals() for item in width_lists.list())
                fused.append((text, Fused(sizes, dim, part_widths)))
        return fused

    def _fault(self, name: str, message: str, code: Code = "SHAPE_MISMATCH") -> TransaxleError:
        return refuse(code, message, file=self._info.file, tensor=name)


def _texts(info: CheckedValue, key: str) -> tuple[str, ...]:
    listed = info.get(key)
    return () if listed is None else listed.texts()


def size_of(node: CheckedValue) -> int | tuple[int, ...]:
    """Return the size of one dim of a fused parameter: a number, the sizes of its parts, or -1 for the remaining
    elements.

    Raises:
        Refused: CORRUPT for anything else.
    """
    if node.is_list:
        sizes = node.naturals()
        if not sizes:
            raise node.fault("the list of part sizes is empty")
        return sizes
    return -1 if node.value in (-1, None) else node.natural()


def _resolved(fused: Fused, parts: Sequence[int], total: int) -> Shape | None:
    """Return a fused parameter's shape with its one unknown size filled in; None where that cannot be."""
    sizes = [sum(parts) if dim == fused.dim else size for dim, size in enumerate(fused.shape)]
    sizes_known = [sum(size) if isinstance(size, tuple) else size for size in sizes]
    if sizes_known.count(-1) > 1:
        return None
    product_of_known = prod(size for size in sizes_known if size != -1)
    if -1 in sizes_known:
        if product_of_known == 0 or total % product_of_known:
            return None
        sizes_known[sizes_known.index(-1)] = total // product_of_known
    return tuple(sizes_known)


def _joined(shards: Sequence[Shape], dim: int) -> Shape:
    return (*shards[0][:dim], sum(shape[dim] for shape in shards), *shards[0][dim + 1 :])


def _listed(shapes: Sequence[Sequence[object]] | Mapping[str, object]) -> str:
    shown = ", ".join(str(list(shape)) for shape in list(shapes)[:8])
    return f"{shown}, …" if len(shapes) > 8 else shown
