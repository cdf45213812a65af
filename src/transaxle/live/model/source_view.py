"""Translates a source checkpoint into the dialect of a live model; the dialect is recognised by the model's tensor
names, never by shapes. After the translation, the tensors of source and model are matched by name, and every difference
is reported before any byte is moved.

**Grouped parameters**: the source may have N separate tensors that are one stack in the model, or the reverse. Changing
the form of grouped parameters also works for models of unknown families. Grouped parameters are found by their names in
source and model, and a conversion table is built for them. Codes and scales of quantized parameters are moved without
change, like the tensors of plain parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from math import prod

import msgspec

from transaxle.axes.layout.bind import WEIGHT, BoundNames, bind, join_slot, split_slot
from transaxle.axes.layout.model_tensors import Model
from transaxle.axes.layout.relayout import Shape
from transaxle.axes.notation.family import Dialect, Line
from transaxle.axes.notation.name import own_names, skeleton
from transaxle.axes.translation.grouped import (
    FAMILY,
    STORED,
    WANTED,
    Regrouping,
    arrange,
    copy_checks,
    groups,
    sizes,
    table,
    without_copies,
)
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.recognise import IDENTITY, recognise
from transaxle.engine.checkpoint.settings import Settings
from transaxle.engine.checkpoint.stored_names import StoredNames
from transaxle.engine.views.encoded import Catalog
from transaxle.errors import LACKING, Code, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.families import Families
from transaxle.formats.catalog import Container
from transaxle.live.derived import EXTRA_STATE
from transaxle.live.global_tensors import Census
from transaxle.live.model.destination import decode_hint, may_become


@dataclass(frozen=True, slots=True)
class Restacked:
    """A checkpoint whose grouped parameters are in the model's form, either separate tensors or stacks."""

    checkpoint: Checkpoint
    """The checkpoint with changed forms; sets of experts that do not match those of the model remain as they are
    stored.
    """
    changed: bool
    """Whether the form of any parameter was changed."""
    complete: bool
    """Whether every requested name now exists, or belongs to a set of experts that does not match."""


def restack(checkpoint: Checkpoint, model_shapes: Mapping[str, Shape], optional_names: Iterable[str] = ()) -> Restacked:
    """Return a checkpoint with its grouped parameters in the model's form (separate tensors or stacks).

    Args:
        checkpoint: the checkpoint under its stored names.
        model_shapes: tensor name in the model -> shape of the whole tensor, without optimizer state.
        optional_names: names of the model's tensors that the source may lack.

    Raises:
        Refused: if the translation between names fails; with code UNEQUAL_COPIES, if the source has both forms with
            different shapes.
    """
    entries = {name: entry.shape for name, entry in checkpoint.container.entries.items()}
    arrangement = arrange(groups(model_shapes, entries), entries)
    available = {*arrangement.broken, *optional_names, *(name for stem in arrangement.stems for name in stem.targets)}
    complete = all(name in available or name in checkpoint for name in model_shapes)
    return Restacked(
        change_form(checkpoint, arrangement.stems) if arrangement.stems else checkpoint,
        bool(arrangement.stems),
        complete,
    )


def change_form(checkpoint: Checkpoint, stems: Sequence[Regrouping]) -> Checkpoint:
    """Return a checkpoint with the given grouped parameters changed from stack to separate tensors, or the reverse.

    Args:
        checkpoint: the checkpoint under its stored names.
        stems: the sets of parameters whose form is changed.

    Raises:
        Refused: any refusal that `restack` raises.
    """
    family, container = table(stems), checkpoint.container
    table_settings = msgspec.structs.replace(
        checkpoint.settings,
        family=FAMILY,
        dialect=STORED,
        families=Families({}, {FAMILY: family}, closed=True),
        axes=sizes(stems),
        config={},
    )
    undecoded = None if checkpoint.undecoded is None else checkpoint.undecoded.stored_names
    names = _TableNames(container, table_settings, undecoded, tuple(without_copies(stems, container.entries)))
    restacked = Checkpoint(container, table_settings, None, None, checkpoint.undecoded, names)
    checks, problems = copy_checks(stems, container.entries)
    if problems:
        raise gathered(problems)
    return restacked.view_as(WANTED).with_checks(checks)


def without_tensors(checkpoint: Checkpoint, stored_names: AbstractSet[str]) -> Checkpoint:
    """Return a checkpoint without some of its stored tensors."""
    container = checkpoint.container.without(stored_names)
    return Checkpoint(container, checkpoint.settings, None, None, checkpoint.undecoded)


def names_ahead(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the stored names of tensors in layers that predict further tokens (MTP); empty for unknown families."""
    if checkpoint.family is None:
        return frozenset()
    tables = Model(checkpoint.reading.family, checkpoint.sizes)
    names = set()
    for (line, _), by_position in checkpoint.bound.names.items():
        components = line.expression.components
        for position, name in by_position.items():
            at = line.name.index_at(position)
            indices = {part: tuple(at.get(axis, -1) for axis in tables.axes_of(part)) for part in components}
            if components and all(tables.is_ahead(part, index) for part, index in indices.items()):
                names.add(name)
    return frozenset(names)


class _TableNames(StoredNames):
    """Stored names that are read with a table that was made for this checkpoint alone; in this table, codes and scales
    are separate tensors.

    Args:
        container: the container of the stored tensors.
        settings: settings for opening the checkpoint; their only model family is the one whose table was made for this
            checkpoint.
        undecoded: the stored names of the undecoded checkpoint, if `container` is a decoded view; see `StoredNames`.
        names: the stored names that the table contains.
    """

    def __init__(
        self, container: Container, settings: Settings, undecoded: StoredNames | None, names: Sequence[str]
    ) -> None:
        super().__init__(container, settings, undecoded)
        self._table_names = names

    @cached_property
    def catalog(self) -> Catalog:
        """Catalog of all stored tensors without decoding any of them."""
        return Catalog(self._container, self._container.entries, {}, None, ())

    @cached_property
    def bound(self) -> BoundNames:
        """The stored names that the table contains, each matched with its line."""
        family = self._settings.families[FAMILY]
        return bind(self._table_names, family, family.dialects[0], self.sizes)


_UNREAD: Code = "UNKNOWN_FAMILY"
_UNDECIDED: Code = "AMBIGUOUS"
_LACKS = "A shard may be missing. Use strict=False to load the tensors that exist."
_SHOWN = 3
"""Largest number of model names, and of source names, that an error lists."""
_COMPARED, _LIKE = 8, 0.6
"""Largest number of names for which the closest match is suggested, and the lowest similarity of such a match."""
_UNKNOWN_ROWS = "It is unknown which rows are padding: give a config= with the vocab_size."
_OTHER_SIZES = "Build the model with the sizes that the source has."


@dataclass(frozen=True)
class View:
    """A checkpoint translated into the model's dialect."""

    checkpoint: Checkpoint
    """The checkpoint, translated into the model's dialect."""
    dialect: str
    """Label of the model's dialect; `identity` if source and model have the same names, so that no table is needed."""
    prefix: str
    """Prefix of the model's names that the dialect's names do not have."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Name in the checkpoint -> name in the model, for parameters that have two names for which the dialect has only
    one.
    """
    numbers: Mapping[str, Shape] = field(default_factory=dict)
    """Name in the model -> shape, for scales with one number per matrix. Quantization conventions store such scales as
    `[]`, `[1]` or `[1, 1]`.
    """

    def model_name(self, name: str) -> str:
        """Return the name in the model for a tensor of the checkpoint."""
        parameter, slot = split_slot(name)
        return join_slot(self.other_names.get(parameter) or self.prefix + parameter, slot)

    def tensors(self) -> dict[str, StoredTensor]:
        """Return name in the model -> tensor of the checkpoint."""
        tensors = {self.model_name(name): self.checkpoint[name] for name in self.checkpoint}
        for name, shape in self.numbers.items():
            if name in tensors and prod(tensors[name].shape) == prod(shape):
                tensors[name] = msgspec.structs.replace(tensors[name], shape=shape)
        return tensors


def view(
    checkpoint: Checkpoint,
    names: Mapping[str, Shape],
    family: str | None,
    dialect: str | None,
    neutral_names: Iterable[str] = (),
    *,
    partial: bool = False,
    trained: Collection[str] | None = None,
) -> View:
    """Translate a checkpoint into the dialect of a model's names.

    Args:
        checkpoint: the source checkpoint under its stored names.
        names: tensor name in the model -> shape of the whole tensor, for the tensors of all ranks together.
        family: the family that the user gave; None means that it is recognised.
        dialect: the dialect of the model's names that the user gave; None means that it is recognised.
        neutral_names: tensor names that are ignored when the dialect is recognised.
        partial: whether to omit tensors of which the source has only some pieces.
        trained: parameters with optimizer state that are not in `names`, because the state dict contains only parts of
            them; None means that they are unknown.

    Raises:
        UsageError: with code UNKNOWN_FAMILY or AMBIGUOUS, if no table fits the model's names and the source's names are
            different; the message contains the closest dialect.
        Refused: with the code of the translation, if the translation into the dialect fails.
    """
    if dialect == IDENTITY:
        return View(checkpoint, IDENTITY, "")
    shapes = {name: shape for name, shape in names.items() if split_slot(name)[1] == WEIGHT}
    identity_view = View(checkpoint, IDENTITY, "")
    if dialect is None and family is None:
        restacked = restack(checkpoint, shapes, neutral_names)
        identity_view = View(restacked.checkpoint, FAMILY if restacked.changed else IDENTITY, "")
        if restacked.complete and _same_trained(restacked.checkpoint, shapes.keys(), trained):
            return identity_view
    neutral = frozenset(neutral_names)
    weight_names = [name for name in shapes if name not in neutral]
    identity_view = replace(identity_view, other_names=_match_unwrapped(identity_view, weight_names))
    settings = checkpoint.settings
    families = settings.families.only(checkpoint.family) if checkpoint.family else settings.families
    is_explicit = family is not None or dialect is not None
    try:
        recognised = recognise(weight_names, checkpoint.config, families, family or checkpoint.family, dialect)
    except TransaxleError as error:
        common_count = sum(name in identity_view.checkpoint for name in weight_names) + len(identity_view.other_names)
        if not is_explicit and ((error.code == _UNREAD and common_count) or 2 * common_count > len(weight_names)):
            return identity_view  # source and model have names in common, so the names that differ are reported instead
        if checkpoint.family is None or family is not None:
            raise _show_both_sides(error, weight_names, checkpoint, is_explicit) from None
        try:
            recognised = recognise(weight_names, {}, settings.families, None, dialect)
        except TransaxleError as again:
            # Without a config, other tables may fit too, and the refusal would say that there is no config.
            last = again if again.code == _UNREAD else error
            raise _show_both_sides(last, weight_names, checkpoint, is_explicit) from None
    label = recognised.dialect.label
    try:
        source = _of_family(checkpoint, recognised.family.name)
        if trained is not None:
            source = source.with_state_of(frozenset(name.removeprefix(recognised.prefix) for name in trained))
        model_view = View(_translate(source, label, partial=partial), label, recognised.prefix)
        return replace(
            model_view,
            other_names=_other_names(model_view, recognised.dialect, weight_names)
            | _match_unwrapped(model_view, weight_names),
        )
    except TransaxleError as error:
        raise _show_both_sides(error, weight_names, checkpoint, is_explicit) from None


def _same_trained(checkpoint: Checkpoint, names: AbstractSet[str], trained: Collection[str] | None) -> bool:
    """Return whether optimizer state already has the model's names, that is, each state belongs to a parameter of the
    model, which may be fused.
    """
    model_parameters = names | set(trained or ())
    stated = {parameter for parameter, slot in map(split_slot, checkpoint) if slot != WEIGHT}
    return trained is None or not stated or (stated <= model_parameters and stated.issuperset(trained))


def _match_unwrapped(source_view: View, model_names: Sequence[str]) -> dict[str, str]:
    """Return name in the translated checkpoint -> name in the model, for names that differ only in wrapper segments."""
    own_of_model = own_names(model_names, outer=True) or {name: name for name in model_names}
    parameters = [source_view.prefix + name for name in source_view.checkpoint if split_slot(name)[1] == WEIGHT]
    own_of_view = own_names(parameters, outer=True) or {name: name for name in parameters}
    by_own = {own: name for name, own in own_of_model.items()}
    if len(by_own) < len(own_of_model) or len(set(own_of_view.values())) < len(own_of_view):
        return {}
    return {
        name.removeprefix(source_view.prefix): by_own[own]
        for name, own in own_of_view.items()
        if own in by_own and by_own[own] not in own_of_view
    }


def _other_names(source_view: View, dialect: Dialect, weight_names: Sequence[str]) -> dict[str, str]:
    """Return name in the translated checkpoint -> name in the model, for different names that the dialect reads as the
    same tensor.

    A table may contain several names of one tensor; a conversion writes only one of them. For example, Megatron's norms
    have different names with and without Transformer Engine.
    """
    model_names = set(weight_names)
    free = {name for name in source_view.checkpoint if source_view.prefix + name not in model_names}
    lacking = [
        name for name in weight_names if free and name.removeprefix(source_view.prefix) not in source_view.checkpoint
    ]
    pairs: dict[str, str] = {}
    for name in lacking:
        bare = name.removeprefix(source_view.prefix)
        for line in dialect.by_skeleton.get(skeleton(bare), ()):
            numbers = line.name.match(bare)
            alike = () if numbers is None else [o for o in dialect.lines if _one_tensor(line, o)]
            stored_name = next(
                (candidate for other in alike if (candidate := other.name.format(numbers or ())) in free), None
            )
            if stored_name is not None:
                pairs.setdefault(stored_name, name)
                break
    return pairs


def _one_tensor(first: Line, second: Line) -> bool:
    """Return whether two table lines are two names for one tensor."""
    same_numbers = first.name.holes == second.name.holes
    same_values = (first.expression.text, first.lossy) == (second.expression.text, second.lossy)
    return first is not second and same_numbers and same_values


def _of_family(checkpoint: Checkpoint, family: str) -> Checkpoint:
    """If the tables of several families fit a source's names, return the source as a checkpoint of the model's
    family.
    """
    try:
        _ = checkpoint.reading
    except TransaxleError as error:
        if error.code != _UNDECIDED or checkpoint.settings.family is not None:
            raise
        family_settings = msgspec.structs.replace(checkpoint.settings, family=family)
        return Checkpoint(checkpoint.container, family_settings, None, None, checkpoint.undecoded)
    return checkpoint


def _translate(checkpoint: Checkpoint, label: str, *, partial: bool) -> Checkpoint:
    """Return a source translated into a different dialect; with `partial`, without tensors of which the source lacks a
    piece.
    """
    try:
        return checkpoint.view_as(label)
    except TransaxleError as error:
        if not LACKING.issuperset(refusal.code for refusal in error.refusals):
            raise
        if not partial:
            raise gathered(replace(refusal, hint=_LACKS) for refusal in error.refusals) from None
    return checkpoint.in_part(label)


def _show_both_sides(
    error: TransaxleError, model_names: Sequence[str], checkpoint: Checkpoint, is_explicit: bool
) -> TransaxleError:
    """Return an error that shows tensor names of source and model, if no table fits the names of one of the two."""
    if is_explicit or error.code != _UNREAD or any(name in checkpoint for name in model_names):
        return error
    shown_of_model, shown_of_source = (
        ", ".join(names[:_SHOWN]) or "(none)" for names in (model_names, list(checkpoint))
    )
    unread = error.refusals[0].message
    message = f"model and source have no name in common\nmodel: {shown_of_model}\nsource: {shown_of_source}\n{unread}"
    hint = (
        "Does the checkpoint belong to another model? If not, give family=, or a table of "
        "tensor names: tx.open(…, rules=…)."
    )
    return refuse(_UNREAD, message, file=checkpoint.path, hint=hint)


def match_tensors(
    targets: Census,
    stored: Mapping[str, StoredTensor],
    optimizer: bool,
    decode: str | None = None,
    sizes: Callable[[], str] = str,
    dtype: str | None = None,
    encoded: Collection[str] = (),
    rows: object = None,
) -> tuple[list[Refusal], tuple[str, ...], tuple[str, ...]]:
    """Match the model's tensors with those of the source; return refusals, names that only the model has, and names
    that only the source has.

    If the source has a different number of experts, or only some of the experts, this results in a single refusal, and
    the names of the experts are not listed as missing.

    Args:
        targets: the model's tensors.
        stored: the model's tensor name -> tensor of the source.
        optimizer: whether optimizer state that only the source has is reported.
        decode: dtype of parameters that may be loaded from encoded tensors.
        sizes: function that returns a text on how the sizes in the two configs differ, or ""; it is called only if a
            shape differs.
        dtype: dtype of parameters that may be loaded from plain tensors of other dtypes.
        encoded: names of encoded tensors that are decoded, as the catalog spells them.
        rows: the vocabulary size of the source, if it is known; rows beyond this size are padding.
    """
    stored_shapes = {name: source.shape for name, source in stored.items()}
    experts = arrange(groups({name: tensor.shape for name, tensor in targets.items()}, stored_shapes), stored_shapes)
    missing = tuple(name for name in targets if name not in stored and name not in experts.broken)
    extra_names = (name for name in stored if name not in targets and name not in experts.broken)
    # tensors that no stored tensor fills are zero, and a model need not have such tensors
    extra_names = (name for name in extra_names if stored[name].origins)
    unexpected = tuple(name for name in extra_names if optimizer or split_slot(name)[1] == WEIGHT)
    problems = list(experts.problems)
    for name, tensor in targets.items():
        source = stored.get(name)
        if source is None or name in experts.broken:
            continue
        if not tensor.accepts(source.shape, rows):
            message = f"its shape is {list(tensor.shape)} in the model, but {list(source.shape)} in the source"
            hint = _UNKNOWN_ROWS if rows is None and tensor.accepts(source.shape, tensor.shape[0]) else sizes()
            problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name), hint or _OTHER_SIZES))
            continue
        codes = any(origin in encoded for origin in source.origins)
        to = decode if codes else dtype
        if source.dtype != tensor.dtype and source.origins and not may_become(source.dtype, tensor.dtype, to):
            message = f"its dtype is {tensor.dtype} in the model, but {source.dtype} in the source"
            hint = decode_hint(source.dtype, tensor.dtype, decode)
            problems.append(Refusal("DTYPE_MISMATCH", message, Where(None, name), hint))
    return problems, missing, unexpected


def refuse_unmatched(missing: Sequence[str], unexpected: Sequence[str], source: Iterable[str] = ()) -> list[Refusal]:
    """Return a refusal for every tensor name that only the model or only the source has, with the most similar name on
    the other side.

    Args:
        missing: names that only the model has.
        unexpected: tensor names that only the source has, as the model's dialect spells them. Extra state of a module
            that the model does not have is only reported, and not refused.
        source: names that only the source has, as the source spells them.
    """
    advice = "Use strict=False to load all other tensors."
    as_codes = _find_codes(missing, {*unexpected, *source})
    buffers = {stored for stored_names in as_codes.values() for stored in stored_names}
    missing = [name for name in missing if name not in as_codes]
    unexpected = [name for name in unexpected if name not in buffers]
    near = _closest(missing, (*unexpected, *source), "the source")
    quantized = [
        Refusal("DTYPE_MISMATCH", f"the source stores it quantized, as {names[0]}", Where(None, name), _DECODE)
        for name, names in as_codes.items()
    ]
    lacking = [
        *quantized,
        *(
            Refusal("MISSING_TENSOR", "the source has no tensor for it", Where(None, n), near.get(n, "") + advice)
            for n in missing
        ),
    ]
    near = _closest(unexpected, missing, "the model")
    return lacking + [
        Refusal("UNEXPECTED_TENSOR", "the model has no such tensor", Where(None, n), near.get(n, "") + advice)
        for n in unexpected
        if n.rpartition(".")[2] != EXTRA_STATE
    ]


_DECODE = 'Load the decoded values:  decode="bf16".'
"""Hint in refusals of parameters that the source stores in several buffers."""


def _find_codes(missing: Iterable[str], names: AbstractSet[str]) -> dict[str, list[str]]:
    """Return missing name -> names of its buffers in the source, the codes first, for tensors with other names for
    their codes.
    """
    from transaxle.encodings.conventions.convention import CONVENTIONS
    from transaxle.encodings.encoding import Role

    missing_names, codes = set(missing), dict[str, dict[str, None]]()
    places = [(stored, place) for stored in sorted(names) for c in CONVENTIONS.values() for place in c.places(stored)]
    for stored, (name, role) in places:
        if role is Role.CODES and name in missing_names and stored != name:
            codes.setdefault(name, {})[stored] = None
    for stored, (name, _) in places:
        if name in codes:
            codes[name][stored] = None
    return {name: list(buffers) for name, buffers in codes.items()}


def _closest(names: Sequence[str], candidates: Iterable[str], side: str) -> dict[str, str]:
    """Return name -> hint with the most similar candidate, for the first few names; candidates with the same last
    segment are preferred.
    """
    by_end: dict[str, list[str]] = {}
    for candidate in dict.fromkeys(candidates):
        by_end.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    hints = {}
    for name in names[:_COMPARED]:
        near = get_close_matches(name, by_end.get(name.rpartition(".")[2], ()), 1, _LIKE)
        if near:
            hints[name] = f"The closest name in {side} is {near[0]}. "
    return hints


def refuse_omitted(names: Iterable[str]) -> list[Refusal]:
    """Return a refusal for each parameter or buffer that the state dict omits, because a load cannot set it."""
    message = "its module leaves it out of state_dict, so load_state_dict cannot set it"
    return [
        Refusal("MISSING_TENSOR", message, Where(None, n), ("Use strict=False to leave this entry unchanged."))
        for n in names
    ]
