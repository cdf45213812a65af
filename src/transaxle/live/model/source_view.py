"""The source as the model names it: the model's own names decide the dialect, never its shapes.

Then the tensors of both are matched by name; every difference is found before anything moves.

A checkpoint whose grouped parameters are N tensors, seen as one stack each, or the other way round.

Such layers occur in models that no table knows. The names of both sides show which they are, and a table is built for
these; the codes and scales of quantized ones are tensors like others, and move unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from math import prod

import msgspec

from transaxle.axes.layout.bind import WEIGHT, Bound, bind, join_slot, split_slot
from transaxle.axes.layout.relayout import Shape
from transaxle.axes.notation.family import Dialect, Line
from transaxle.axes.notation.name import own_names, skeleton
from transaxle.axes.translation.grouped import (
    FAMILY,
    STORED,
    WANTED,
    Stem,
    arranged,
    copy_checks,
    groups,
    sizes,
    table,
    without_copies,
)
from transaxle.engine.checkpoint.checkpoint import LACKING, Checkpoint, StoredTensor
from transaxle.engine.checkpoint.recognise import IDENTITY, StoredNames, recognise
from transaxle.engine.checkpoint.settings import Settings
from transaxle.engine.views.encoded import Catalog
from transaxle.errors import Code, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.families import Families
from transaxle.formats.catalog import Container
from transaxle.live.derived import EXTRA_STATE
from transaxle.live.global_tensors import Census
from transaxle.live.model.destination import decode_hint, may_become


@dataclass(frozen=True, slots=True)
class Restacked:
    """A checkpoint under the wanted names, as far as these are grouped parameters in another form."""

    checkpoint: Checkpoint
    """Re-expressed where a form changes; sets of experts that do not fit stay as they are."""
    changed: bool
    """Whether any form changes."""
    complete: bool
    """Whether every wanted name now exists, or belongs to a set that does not fit."""


def grouped(checkpoint: Checkpoint, wanted: Mapping[str, Shape], beside: Iterable[str] = ()) -> Restacked:
    """Return a checkpoint with its grouped parameters in the wanted form.

    Args:
        checkpoint: under its stored names.
        wanted: names and whole shapes, without optimizer state.
        beside: wanted names that may be absent.

    Raises:
        Refused: what the translation refuses; UNEQUAL_COPIES where both forms exist with different shapes.
    """
    entries = {name: entry.shape for name, entry in checkpoint.container.entries.items()}
    arrangement = arranged(groups(wanted, entries), entries)
    available = {*arrangement.broken, *beside, *(name for stem in arrangement.stems for name in stem.targets)}
    complete = all(name in available or name in checkpoint for name in wanted)
    return Restacked(
        seen(checkpoint, arrangement.stems) if arrangement.stems else checkpoint, bool(arrangement.stems), complete
    )


def seen(checkpoint: Checkpoint, stems: Sequence[Stem]) -> Checkpoint:
    """Return a checkpoint whose grouped parameters are in their other form.

    Args:
        checkpoint: under its stored names.
        stems: the sets that change form.

    Raises:
        Refused: see `grouped`.
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
    return restacked.seen_as(WANTED).checking(checks)


class _TableNames(StoredNames):
    """Names under a table of their own, in which codes and scales are tensors, each for itself.

    Args:
        container: the files.
        settings: with the table as their only family.
        undecoded: as for `StoredNames`.
        names: the stored names that the table reads.
    """

    def __init__(
        self, container: Container, settings: Settings, undecoded: StoredNames | None, names: Sequence[str]
    ) -> None:
        super().__init__(container, settings, undecoded)
        self._table_names = names

    @cached_property
    def catalog(self) -> Catalog:
        """Every stored tensor, as it is stored."""
        return Catalog(self._container, self._container.entries, {}, None, ())

    @cached_property
    def bound(self) -> Bound:
        """The names that the table reads."""
        family = self._settings.families[FAMILY]
        return bind(self._table_names, family, family.dialects[0], self.sizes)


_UNREAD: Code = "UNKNOWN_FAMILY"
_UNDECIDED: Code = "AMBIGUOUS"
_LACKS = "A shard may be missing. Use strict=False to load the tensors that exist."
_SHOWN = 3
"""Names of each side that an error shows."""
_COMPARED, _LIKE = 8, 0.6
"""Names for which the closest one is looked for, and how alike the two must be."""
_UNKNOWN_ROWS = "Nothing says which rows are padding: give config= with the vocab_size."
_OTHER_SIZES = "Build the model with the sizes that the source has."


@dataclass(frozen=True)
class View:
    """A checkpoint, re-expressed in the model's dialect."""

    checkpoint: Checkpoint
    """The checkpoint in that dialect."""
    dialect: str
    """Its label; `identity` where both sides have the same names and no table is needed."""
    prefix: str
    """What the model's names have before those of the dialect."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Parameters that the model has under another name which the dialect reads alike: name in the checkpoint -> the
    model's."""
    numbers: Mapping[str, Shape] = field(default_factory=dict)
    """Shapes of one number for each matrix, by the model's names: conventions have others, as `[]`, `[1]`, `[1, 1]`."""

    def named(self, name: str) -> str:
        """Return the model's name of a tensor of the checkpoint."""
        parameter, slot = split_slot(name)
        return join_slot(self.others.get(parameter) or self.prefix + parameter, slot)

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the checkpoint's tensors by the model's names."""
        tensors = {self.named(name): self.checkpoint[name] for name in self.checkpoint}
        for name, shape in self.numbers.items():
            if name in tensors and prod(tensors[name].shape) == prod(shape):
                tensors[name] = msgspec.structs.replace(tensors[name], shape=shape)
        return tensors


def view(
    checkpoint: Checkpoint,
    names: Mapping[str, Shape],
    family: str | None,
    dialect: str | None,
    beside: Iterable[str] = (),
    *,
    partial: bool = False,
    trained: Collection[str] | None = None,
) -> View:
    """Re-express a checkpoint in the dialect of a model's names.

    Args:
        checkpoint: the source, under its own names.
        names: the model's, on all ranks together, with the whole tensors' shapes.
        family: what the user says the model is.
        dialect: what the user says its names are.
        beside: those of the names that say nothing of the dialect.
        partial: leave out what the source does not hold all of.
        trained: those of the model's parameters that have optimizer state and are in none of `names`, as the state dict
            shows parts of them; None: not known.

    Raises:
        UsageError: UNKNOWN_FAMILY, AMBIGUOUS where no table reads the names and the source has others; with the
            closest dialect.
        Refused: what stands against the translation.
    """
    if dialect == IDENTITY:
        return View(checkpoint, IDENTITY, "")
    shapes = {name: shape for name, shape in names.items() if split_slot(name)[1] == WEIGHT}
    unsaid = View(checkpoint, IDENTITY, "")
    if dialect is None and family is None:
        found = grouped(checkpoint, shapes, beside)
        unsaid = View(found.checkpoint, FAMILY if found.changed else IDENTITY, "")
        if found.complete and _same_trained(found.checkpoint, shapes.keys(), trained):
            return unsaid
    aside = frozenset(beside)
    wanted = [name for name in shapes if name not in aside]
    unsaid = replace(unsaid, others=_rewrapped(unsaid, wanted))
    settings = checkpoint.settings
    families = settings.families.only(checkpoint.family) if checkpoint.family else settings.families
    said = family is not None or dialect is not None
    try:
        read = recognise(wanted, checkpoint.config, families, family or checkpoint.family, dialect)
    except TransaxleError as error:
        same = sum(name in unsaid.checkpoint for name in wanted) + len(unsaid.others)
        if not said and ((error.code == _UNREAD and same) or 2 * same > len(wanted)):
            return unsaid  # both sides have the same names: which of them differ is to be told
        if checkpoint.family is None or family is not None:
            raise _told(error, wanted, checkpoint, said) from None
        try:
            read = recognise(wanted, {}, settings.families, None, dialect)
        except TransaxleError as again:
            raise _told(again, wanted, checkpoint, said) from None
    label = read.dialect.label
    try:
        source = _of_family(checkpoint, read.family.name)
        if trained is not None:
            source = source.with_state_of(frozenset(name.removeprefix(read.prefix) for name in trained))
        seen = View(_expressed(source, label, partial=partial), label, read.prefix)
        return replace(seen, others=_other_names(seen, read.dialect, wanted) | _rewrapped(seen, wanted))
    except TransaxleError as error:
        raise _told(error, wanted, checkpoint, said) from None


def _same_trained(seen: Checkpoint, names: AbstractSet[str], trained: Collection[str] | None) -> bool:
    """Tell whether optimizer state needs no other names: it is of the model's own parameters, fused ones included."""
    known = names | set(trained or ())
    stated = {parameter for parameter, slot in map(split_slot, seen) if slot != WEIGHT}
    return trained is None or not stated or (stated <= known and stated.issuperset(trained))


def _rewrapped(seen: View, wanted: Sequence[str]) -> dict[str, str]:
    """Return the names of a view that the model has with other wrappers around its modules, or with none."""
    mine = own_names(wanted, outer=True) or {name: name for name in wanted}
    parameters = [seen.prefix + name for name in seen.checkpoint if split_slot(name)[1] == WEIGHT]
    theirs = own_names(parameters, outer=True) or {name: name for name in parameters}
    by_own = {own: name for name, own in mine.items()}
    if len(by_own) < len(mine) or len(set(theirs.values())) < len(theirs):
        return {}
    return {
        name.removeprefix(seen.prefix): by_own[own]
        for name, own in theirs.items()
        if own in by_own and by_own[own] not in theirs
    }


def _other_names(seen: View, dialect: Dialect, wanted: Sequence[str]) -> dict[str, str]:
    """Return the names of a view that the model has in another form, where the dialect reads both as one tensor.

    A table may know several names of one tensor, of which it writes one: Megatron's norms with and without Transformer
    Engine.
    """
    own = set(wanted)
    free = {name for name in seen.checkpoint if seen.prefix + name not in own}
    lacking = [name for name in wanted if free and name.removeprefix(seen.prefix) not in seen.checkpoint]
    others: dict[str, str] = {}
    for name in lacking:
        bare = name.removeprefix(seen.prefix)
        for line in dialect.by_skeleton.get(skeleton(bare), ()):
            numbers = line.name.match(bare)
            alike = () if numbers is None else [o for o in dialect.lines if _one_tensor(line, o)]
            named = next((each for other in alike if (each := other.name.format(numbers or ())) in free), None)
            if named is not None:
                others.setdefault(named, name)
                break
    return others


def _one_tensor(line: Line, other: Line) -> bool:
    """Tell whether two lines are two names of one tensor."""
    same_numbers = line.name.holes == other.name.holes
    same_values = (line.expression.text, line.lossy) == (other.expression.text, other.lossy)
    return line is not other and same_numbers and same_values


def _of_family(checkpoint: Checkpoint, family: str) -> Checkpoint:
    """Return a source as one of the model's family, where tables of several read its names alike."""
    try:
        _ = checkpoint.recognised
    except TransaxleError as error:
        if error.code != _UNDECIDED or checkpoint.settings.family is not None:
            raise
        said = msgspec.structs.replace(checkpoint.settings, family=family)
        return Checkpoint(checkpoint.container, said, None, None, checkpoint.undecoded)
    return checkpoint


def _expressed(checkpoint: Checkpoint, label: str, *, partial: bool) -> Checkpoint:
    """Return a source in another dialect; `partial`: where something is lacking, as far as it goes."""
    try:
        return checkpoint.seen_as(label)
    except TransaxleError as error:
        if not LACKING.issuperset(refusal.code for refusal in error.refusals):
            raise
        if not partial:
            raise gathered(replace(refusal, hint=_LACKS) for refusal in error.refusals) from None
    return checkpoint.in_part(label)


def _told(error: TransaxleError, wanted: Sequence[str], checkpoint: Checkpoint, said: bool) -> TransaxleError:
    """Return the error that tells of both sides, where no table reads the names of one of them."""
    if said or error.code != _UNREAD or any(name in checkpoint for name in wanted):
        return error
    mine, theirs = (", ".join(names[:_SHOWN]) or "(none)" for names in (wanted, list(checkpoint)))
    unread = error.refusals[0].message
    message = f"model and source have no name in common\nmodel: {mine}\nsource: {theirs}\n{unread}"
    hint = "Is it the checkpoint of another model? If not, give family=, or a table of its names: tx.open(…, rules=…)."
    return refuse(_UNREAD, message, file=checkpoint.path, hint=hint)


def compared(
    everything: Census,
    stored: Mapping[str, StoredTensor],
    optimizer: bool,
    decode: str | None = None,
    sizes: Callable[[], str] = str,
    dtype: str | None = None,
    encoded: Collection[str] = (),
    rows: object = None,
) -> tuple[list[Refusal], tuple[str, ...], tuple[str, ...]]:
    """Hold the model's tensors against the source's; return what differs, and the names that only one of them has.

    Another number of experts, or a part of them, differs; such names are not among those that one side lacks.

    Args:
        everything: the model's.
        stored: the source's, by the model's names.
        optimizer: whether state that only the source has counts.
        decode: type of parameters that take encoded tensors, decoded.
        sizes: tells how the configs of the two differ, "" where they do not; asked where a shape differs.
        dtype: type of parameters that take plain numbers of other types, cast.
        encoded: names, as tables have them, of what is decoded.
        rows: the source's size of the vocabulary, where it is known: further rows are padding.
    """
    there = {name: source.shape for name, source in stored.items()}
    experts = arranged(groups({name: tensor.shape for name, tensor in everything.items()}, there), there)
    missing = tuple(name for name in everything if name not in stored and name not in experts.broken)
    others = (name for name in stored if name not in everything and name not in experts.broken)
    others = (name for name in others if stored[name].origins)  # of what is zeros anyway, a model may have none
    unexpected = tuple(name for name in others if optimizer or split_slot(name)[1] == WEIGHT)
    problems = list(experts.problems)
    for name, tensor in everything.items():
        source = stored.get(name)
        if source is None or name in experts.broken:
            continue
        if not tensor.takes(source.shape, rows):
            message = f"its shape is {list(tensor.shape)} in the model, but {list(source.shape)} in the source"
            hint = _UNKNOWN_ROWS if rows is None and tensor.takes(source.shape, tensor.shape[0]) else sizes()
            problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name), hint or _OTHER_SIZES))
            continue
        codes = any(origin in encoded for origin in source.origins)
        to = decode if codes else dtype
        if source.dtype != tensor.dtype and source.origins and not may_become(source.dtype, tensor.dtype, to):
            message = f"its dtype is {tensor.dtype} in the model, but {source.dtype} in the source"
            hint = decode_hint(source.dtype, tensor.dtype, decode)
            problems.append(Refusal("DTYPE_MISMATCH", message, Where(None, name), hint))
    return problems, missing, unexpected


def unmatched(missing: Sequence[str], unexpected: Sequence[str], source: Iterable[str] = ()) -> list[Refusal]:
    """Return a refusal for every name that only one side has, with the closest name of the other side.

    Args:
        missing: names that only the model has.
        unexpected: names that only the source has, as the model would name them. The extra state of a module that
            keeps none is told of in the report, and no reason to refuse.
        source: those names of the source, as it names them, that are no names of the model.
    """
    rest = "Use strict=False to load the others."
    near = _closest(missing, (*unexpected, *source), "the source")
    lacking = [
        Refusal("MISSING_TENSOR", "the source has no tensor for it", Where(None, n), near.get(n, "") + rest)
        for n in missing
    ]
    near = _closest(unexpected, missing, "the model")
    return lacking + [
        Refusal("UNEXPECTED_TENSOR", "the model has no such tensor", Where(None, n), near.get(n, "") + rest)
        for n in unexpected
        if n.rpartition(".")[2] != EXTRA_STATE
    ]


def _closest(names: Sequence[str], others: Iterable[str], side: str) -> dict[str, str]:
    """Return for the first names what the other side has instead; names with the same end are preferred."""
    by_end: dict[str, list[str]] = {}
    for other in dict.fromkeys(others):
        by_end.setdefault(other.rpartition(".")[2], []).append(other)
    hints = {}
    for name in names[:_COMPARED]:
        near = get_close_matches(name, by_end.get(name.rpartition(".")[2], ()), 1, _LIKE)
        if near:
            hints[name] = f"The closest name in {side} is {near[0]}. "
    return hints


def left_out(names: Iterable[str]) -> list[Refusal]:
    """Return a refusal for each parameter and buffer that a state dict leaves out, and a load with it."""
    message = "its module leaves it out of state_dict, so load_state_dict cannot set it"
    return [
        Refusal("MISSING_TENSOR", message, Where(None, n), "Use strict=False to leave it unchanged.") for n in names
    ]
