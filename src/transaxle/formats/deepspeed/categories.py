r"""Reads the pattern lists in DeepSpeed's universal-checkpoint metadata: for each kind of tensor-parallel cut, a list
of patterns for parameter names.

If the metadata has pattern lists, DeepSpeed cuts a parameter that matches no list along its first dim. The widths of a
cut are the sizes of the shards along the cut dim; for fused parameters (such as q, k and v in one tensor) the metadata
states these widths.

The patterns that DeepSpeed itself writes are escaped names; the patterns of training frameworks are regular expressions
with `.`, `\d+` and the like. A pattern need only match the beginning of a parameter name, unless the pattern ends in
`$`.
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
from transaxle.formats.deepspeed.spread import Spread, by_widths, clip_rows, fold_dims, whole

_WHOLE_NAME = re.compile(r"\^?((?:\\[^a-zA-Z0-9]|[^\\.^$*+?{}\[\]()|])*)\$")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


class Patterns:
    """Finds the patterns that match a parameter name; patterns for exactly one name are looked up in a dict.

    Raises:
        Refused: with the code UNSUPPORTED if a pattern is malformed, or RE2 cannot run it.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._of_name: dict[str, str] = {}
        self._regexes: list[str] = []
        for text in dict.fromkeys(texts):
            if match := _WHOLE_NAME.fullmatch(text):
                self._of_name[_ESCAPE.sub(r"\1", match[1])] = text
            else:
                self._regexes.append(text)
        try:
            self._expressions = Expressions(self._regexes)
        except PatternError as error:
            raise _refusal(error) from None

    def match(self, name: str) -> tuple[str, ...]:
        """Return the patterns that match a parameter name.

        Raises:
            Refused: with the code UNSUPPORTED if matching takes far longer than for any real checkpoint.
        """
        whole = [self._of_name[name]] if name in self._of_name else []
        try:
            return (*whole, *(self._regexes[number] for number in self._expressions.find_matches(name)))
        except PatternError as error:
            raise _refusal(error) from None


def _refusal(error: PatternError) -> TransaxleError:
    hint = "Write the patterns as escaped names, or as regular expressions without `\\1`, `\\b` and `(?=`."
    return refuse("UNSUPPORTED", f"name patterns: {error}", hint=hint)


def exact_pattern(name: str) -> str:
    """Return the pattern that DeepSpeed writes for exactly this parameter name."""
    return f"^{re.escape(name)}$"


Widths = tuple[tuple[int, ...], ...]
"""Sizes along the cut dim, as `widths[sub_parameter][rank]`: of each sub-parameter of a fused parameter on each
tensor-parallel rank."""


@dataclass(frozen=True, slots=True)
class FusedParameter:
    """A fused parameter: several sub-parameters, such as q, k and v, concatenated along one dim."""

    shape: tuple[int | tuple[int, ...], ...]
    """Shape as DeepSpeed writes it: one size may be -1, which means that it is inferred; the entry at `dim` is a tuple
    of the sub-parameters' sizes, or (before metadata version 0.4) the number of sub-parameters.
    """
    dim: int
    widths: Widths | None
    """Size of each sub-parameter on each rank; None before metadata version 0.4, when every sub-parameter was cut
    evenly."""


class Categories:
    """The pattern lists in the universal-checkpoint metadata of one model.

    Args:
        info: the model's universal-checkpoint metadata.

    Raises:
        Refused: with the code CORRUPT if the metadata is malformed; with the code UNSUPPORTED if its version is too new
            or a pattern cannot be run.
    """

    def __init__(self, info: CheckedValue) -> None:
        self._info = info
        version = info.get(keys.INFO_VERSION)
        self.version = 0.0 if version is None else version.real()
        if self.version > keys.INFO_CURRENT:
            message = f"the metadata has version {self.version}; versions up to {keys.INFO_CURRENT} can be read"
            raise refuse("UNSUPPORTED", message, file=info.file)
        # AutoTP always writes a list of unsupported parameters; metadata without this list was written by a training
        # framework.
        self._of_framework = info.get(keys.UNSUPPORTED_PATTERNS) is None
        self._lists = {
            key: Patterns(_texts(info, key))
            for key in (
                keys.REPLICATED_PATTERNS, keys.AVERAGED_PATTERNS, keys.ROW_PATTERNS, keys.VOCABULARY_PATTERNS,
                keys.PIPELINE_PATTERNS, keys.HALVES_PATTERNS,
            )
        }  # fmt: skip
        reasons = info.get(keys.UNSUPPORTED_PATTERNS)
        self._reasons = {} if reasons is None else {text: reason.text() for text, reason in reasons.string_items()}
        self._refusal = Patterns(self._reasons)
        self._fused = dict(self._read_fused())
        self._fused_patterns = Patterns(self._fused)

    def why_unsupported(self, name: str) -> str | None:
        """Return the reason in the metadata why DeepSpeed could not describe a parameter's cut; None if DeepSpeed could
        describe it.
        """
        patterns = self._refusal.match(name)
        return self._reasons[patterns[0]] if patterns else None

    def spread(self, name: str, shards: Sequence[Shape]) -> Spread:
        """Return how a parameter is distributed over the tensor-parallel ranks, according to the pattern lists.

        Args:
            name: name of the parameter.
            shards: shape of the parameter's shard on each rank.

        Raises:
            Refused: with the code CORRUPT if lists contradict each other; with the code SHAPE_MISMATCH if the shards'
                shapes do not fit the cut; with the code UNSUPPORTED for an uneven cut that the metadata does not
                describe.
        """
        kind = self.kind(name)
        if kind in (keys.REPLICATED_PATTERNS, keys.AVERAGED_PATTERNS):
            if len(set(shards)) > 1:
                raise self._fault(name, f"every rank holds all of it, but in different shapes: {_shapes_text(shards)}")
            return whole(shards[0], len(shards))
        if kind == keys.SUB_PARAMS:
            return self._parts(name, self.fused_parameter(name), shards)
        dim = 1 if kind == keys.ROW_PATTERNS else 0
        rows = self._rows(name, shards, dim)
        if kind == keys.HALVES_PATTERNS:
            if any(count % 2 for count in rows):
                raise self._fault(name, f"shards of {rows} rows cannot be split into two halves")
            halves = tuple(count // 2 for count in rows)
            return by_widths(_whole_shape(shards, dim), dim, (halves, halves))
        return by_widths(_whole_shape(shards, dim), dim, (rows,))

    def without_padding(self, name: str, spread: Spread) -> Spread:
        """Return how a parameter is distributed over the ranks, without padding rows if the parameter is a padded
        vocabulary.

        AutoTP pads nothing, but lists every parameter with `embed` in its name as a vocabulary. AutoTP's list of
        vocabularies is therefore used only if the metadata also states the padded size.

        Raises:
            Refused: with the code CORRUPT if the unpadded size is missing; with the code SHAPE_MISMATCH if sizes
                contradict the shards.
        """
        if not self.is_padded_vocabulary(name):
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
        return clip_rows(spread, rows.natural())

    @property
    def any(self) -> bool:
        """Whether the metadata has any pattern lists; if so, a parameter that no list matches is cut along its first
        dim.
        """
        return any(
            self._info.get(key) is not None for key in (*self._cut_lists(), keys.SUB_PARAMS, keys.VOCABULARY_PATTERNS)
        )

    def names(self, name: str) -> bool:
        """Return whether a parameter's name matches any pattern list that states a cut."""
        return bool(self._kinds(name))

    def is_padded_vocabulary(self, name: str) -> bool:
        """Return whether a parameter has padded vocabulary rows."""
        is_reliable = self._of_framework or self._info.get(keys.PADDED_VOCABULARY) is not None
        return is_reliable and self._match(keys.VOCABULARY_PATTERNS, name)

    def kind(self, name: str) -> str:
        """Return the metadata key of the list that states a parameter's cut; the key is empty if the parameter is cut
        along dim 0 as a single block.

        Raises:
            Refused: with the code CORRUPT if lists contradict each other.
        """
        kinds = self._kinds(name)
        if len(kinds) > 1:
            raise self._fault(name, f"several lists match it: {', '.join(kinds)}", "CORRUPT")
        return kinds[0] if kinds else ""

    def fused_parameter(self, name: str) -> FusedParameter:
        """Return the layout of a fused parameter (a parameter of kind `SUB_PARAMS`)."""
        return self._fused[self._fused_patterns.match(name)[0]]

    def only_rows(self, name: str) -> bool:
        """Return whether AutoTP's lists state only that a parameter is cut along dim 1, without the order of the
        parameter's blocks.
        """
        return not self._of_framework and self._kinds(name) == [keys.ROW_PATTERNS]

    def _kinds(self, name: str) -> list[str]:
        """Return the metadata keys of all lists that state a parameter's cut.

        AutoTP lists a row-parallel fused parameter twice, as row-parallel and as fused; then only the list of fused
        parameters counts.
        """
        lists = [key for key in (*self._cut_lists(), keys.SUB_PARAMS) if self._match(key, name)]
        # The list of fused parameters is more exact than the list of row-parallel parameters.
        return [keys.SUB_PARAMS] if lists == [keys.ROW_PATTERNS, keys.SUB_PARAMS] else lists

    @staticmethod
    def _cut_lists() -> tuple[str, ...]:
        return keys.REPLICATED_PATTERNS, keys.AVERAGED_PATTERNS, keys.HALVES_PATTERNS, keys.ROW_PATTERNS

    def _match(self, key: str, name: str) -> bool:
        patterns = self._fused_patterns if key == keys.SUB_PARAMS else self._lists[key]
        return bool(patterns.match(name))

    def _rows(self, name: str, shards: Sequence[Shape], dim: int) -> tuple[int, ...]:
        """Return the size of each shard along the cut dim; in all other dims the shards must have equal sizes."""
        if any(len(shape) <= dim for shape in shards):
            raise self._fault(
                name, f"it is cut along dim {dim}, which not all of its shards have: {_shapes_text(shards)}"
            )
        if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shards}) > 1:
            raise self._fault(
                name, f"the shards are joined along dim {dim}, but differ in another dim: {_shapes_text(shards)}"
            )
        return tuple(shape[dim] for shape in shards)

    def _parts(self, name: str, fused_parameter: FusedParameter, shards: Sequence[Shape]) -> Spread:
        total = sum(map(prod, shards))
        sizes = fused_parameter.shape[fused_parameter.dim]
        parts = sizes if isinstance(sizes, tuple) else self._equal_parts(name, sizes, shards, fused_parameter.dim)
        widths = fused_parameter.widths
        if widths is None:
            uneven = [size for size in parts if size % len(shards)]
            if uneven:
                message = f"parts of {uneven} rows cannot be cut evenly over {len(shards)} ranks, and the metadata "
                raise self._fault(name, f"{message}(version {self.version}) gives no widths", "UNSUPPORTED")
            # Before version 0.4, the metadata could describe only even cuts.
            widths = tuple((size // len(shards),) * len(shards) for size in parts)
        if len(widths) != len(parts) or any(len(part_widths) != len(shards) for part_widths in widths):
            raise self._fault(
                name, f"widths {_shapes_text(widths)} do not fit {len(parts)} parts on {len(shards)} ranks"
            )
        for size, part_widths in zip(parts, widths, strict=True):
            if sum(part_widths) != size:
                raise self._fault(
                    name, f"widths {list(part_widths)} sum to {sum(part_widths)}, but the part has {size} rows"
                )
        logical = _complete_shape(fused_parameter, parts, total)
        if logical is None or prod(logical) != total:
            raise self._fault(
                name, f"its shape {list(fused_parameter.shape)} does not have the {total} elements of its shards"
            )
        return fold_dims(by_widths(logical, fused_parameter.dim, widths), shards)

    def _equal_parts(self, name: str, count: int, shards: Sequence[Shape], dim: int) -> tuple[int, ...]:
        """Return the sizes of `count` equal sub-parameters; before version 0.4, the metadata states only how many there
        are.
        """
        if self.version >= keys.INFO_CURRENT:
            raise self._fault(
                name, f"{keys.SUB_PARAMS} must give the sizes of the parts, not only their number {count}", "CORRUPT"
            )
        rows = sum(self._rows(name, shards, dim))
        if count < 1 or rows % count:
            raise self._fault(name, f"{rows} rows cannot be divided into {count} equal parts")
        return (rows // count,) * count

    def _read_fused(self) -> list[tuple[str, FusedParameter]]:
        fused_parameter: list[tuple[str, FusedParameter]] = []
        listed = self._info.get(keys.SUB_PARAMS)
        widths = self._info.get(keys.SHARD_WIDTHS)
        widths_by_pattern = {} if widths is None else dict(widths.string_items())
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
                fused_parameter.append((text, FusedParameter(sizes, dim, part_widths)))
        return fused_parameter

    def _fault(self, name: str, message: str, code: Code = "SHAPE_MISMATCH") -> TransaxleError:
        return refuse(code, message, file=self._info.file, tensor=name)


def _texts(info: CheckedValue, key: str) -> tuple[str, ...]:
    listed = info.get(key)
    return () if listed is None else listed.texts()


def size_of(node: CheckedValue) -> int | tuple[int, ...]:
    """Return the size of one dim of a fused parameter: an int, a tuple of the sub-parameters' sizes, or -1.

    -1 means that the size is inferred from the number of elements.

    Raises:
        Refused: with the code CORRUPT if the value is neither an int nor a list of ints.
    """
    if node.is_list:
        sizes = node.naturals()
        if not sizes:
            raise node.fault("the list of part sizes is empty")
        return sizes
    return -1 if node.value in (-1, None) else node.natural()


def _complete_shape(fused_parameter: FusedParameter, parts: Sequence[int], total: int) -> Shape | None:
    """Return a fused parameter's shape with the size -1 replaced by the inferred size; None if no size fits."""
    sizes = [sum(parts) if dim == fused_parameter.dim else size for dim, size in enumerate(fused_parameter.shape)]
    known_sizes = [sum(size) if isinstance(size, tuple) else size for size in sizes]
    if known_sizes.count(-1) > 1:
        return None
    known_product = prod(size for size in known_sizes if size != -1)
    if -1 in known_sizes:
        if known_product == 0 or total % known_product:
            return None
        known_sizes[known_sizes.index(-1)] = total // known_product
    return tuple(known_sizes)


def _whole_shape(shards: Sequence[Shape], dim: int) -> Shape:
    return (*shards[0][:dim], sum(shape[dim] for shape in shards), *shards[0][dim + 1 :])


def _shapes_text(shapes: Sequence[Sequence[object]] | Mapping[str, object]) -> str:
    shown = ", ".join(str(list(shape)) for shape in list(shapes)[:8])
    return f"{shown}, …" if len(shapes) > 8 else shown
