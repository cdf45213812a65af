"""Answers, from a model's config alone, whether a conversion works.

The tables say which tensors a model has in a dialect. So a checkpoint can be made that has their names, dtypes and
shapes, but no bytes, and the planner plans its conversion as it plans any other. The answer is therefore the one that
`plan` gives for the files, except for reasons that only values or other files show.

If a plan reads values, or if the config does not determine the files, there is no answer: this is an error, never a
"no".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.layout.model_tensors import Model, TensorKind
from transaxle.axes.notation.family import PLAIN, WORDS, Dialect, Family, Sizes
from transaxle.axes.notation.name import natural
from transaxle.encodings.conventions.convention import CONVENTIONS, PREFERRED, Convention
from transaxle.encodings.conventions.packed_methods import PACKED_PARSERS
from transaxle.encodings.conventions.quantization import Quantization, module_of, read
from transaxle.encodings.encoding import CASTS, Encoding, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.promised import ahead_key
from transaxle.engine.checkpoint.recognise import pick_dialect
from transaxle.engine.checkpoint.settings import CONFIG, Settings
from transaxle.engine.plan.conversion import make_plan
from transaxle.engine.plan.planned import Plan
from transaxle.engine.traffic import config_dtype, family_of_config
from transaxle.engine.views.encode import is_linear
from transaxle.engine.wording import notebook, plural, size
from transaxle.errors import TARGET, Refusal, Refused, TransaxleError, refuse
from transaxle.families import is_dialect
from transaxle.formats import registry
from transaxle.formats.catalog import Container, Entry, Extent
from transaxle.formats.registry import SAFETENSORS, every_format, unknown_format, without_gc
from transaxle.formats.storage.storage import InMemoryFile, Listing, Storage, VirtualFiles

HUB = f"{SAFETENSORS.name}:hf"
"""Format and dialect of a model on a hub, the usual source."""
_ANY_SIZE = 64
"""Size that stands for one that only shapes show."""
_SHOWN = 3
"""Largest number of refusals that a printed answer shows."""
_FILE = "tensors"
"""Name of the file, of which no byte exists, in which all tensors of an implied checkpoint are."""
_EXACT = "only the files show whether restating changes a value: a conversion refuses those that it would round"
_Form = tuple[str, tuple[int, ...]]
"""Dtype and shape of a stored tensor."""
_HUB_NAMES = frozenset({"hf", "transformers", "torchtitan_hf"})
"""Dialects whose checkpoints a config's quantization section describes; trainers' own checkpoints are not quantized."""
_TO = re.compile(r"(?<![\w-])to(?==)")
"""Pattern of the keyword that names the target in Python, in hints."""
_OPEN_FILES = (
    "Give the checkpoint itself to plan (`transaxle plan SRC DST --to TARGET`, `tx.plan`), which opens its files."
)


@dataclass(frozen=True)
class Support:
    """Whether a conversion works, and why not; true if it works."""

    source: str
    """Format and dialect of the source, `FORMAT:DIALECT`."""
    target: str
    """Format and dialect of the target, `FORMAT:DIALECT`."""
    family: str | None
    """Model family of the config; None if no table is for its model type."""
    refusals: tuple[Refusal, ...]
    """Every reason against the conversion, the most important first; empty if it works."""
    notes: tuple[str, ...]
    """What programs that load the target need to know, and what the answer assumes of the source."""
    plan: Plan | None
    """The plan of the conversion; None if a refusal prevents even planning. Its source has no files: the places that
    the plan reads have no meaning."""

    def __bool__(self) -> bool:
        return not self.refusals

    def __repr__(self) -> str:
        verdict = plural(len(self.refusals), "refusal") if self.refusals else "supported"
        return f"<{self.family or 'unknown family'}: {self.source} -> {self.target} · {verdict}>"

    def __str__(self) -> str:
        """Return the text that `print` shows: the verdict, the size of the target, refusals and notes."""
        lines = [f"{self.source} -> {self.target}: {'not ' if self.refusals else ''}supported"]
        if self.plan is not None and not self.refusals:
            lines.append(f"  {plural(len(self.plan.tensors), 'tensor')}, {size(self.plan.bytes_written)}")
        lines += [f"  {line}" for refusal in self.refusals[:_SHOWN] for line in str(refusal).splitlines()]
        lines += [f"  … and {hidden:,} more: .refusals"] if (hidden := len(self.refusals) - _SHOWN) > 0 else []
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        return notebook(str(self))

    def as_json(self) -> dict[str, Any]:
        """Return the answer as plain JSON data; all sizes are in bytes."""
        plan = self.plan
        return {
            "supported": bool(self),
            "source": self.source,
            "target": self.target,
            "family": self.family,
            "refusals": [refusal.as_json() for refusal in self.refusals],
            "notes": list(self.notes),
            "tensors": None if plan is None else len(plan.tensors),
            "bytes": None if plan is None else plan.bytes_written,
            "files": {} if plan is None else dict(plan.files),
        }


class _NoBytes(Storage):
    """The files of an implied checkpoint, which have names and sizes, but no bytes."""

    def __init__(self) -> None:
        self.needed: list[str] = []
        """Names of the files that were asked for bytes."""

    @property
    def path(self) -> str:
        return "the config's model"

    @property
    def single(self) -> str | None:
        return None

    def listing(self, folder: str = "") -> Listing:  # noqa: ARG002 - a storage's signature
        return Listing((), (), {})

    def size(self, name: str) -> int:  # noqa: ARG002 - a storage's signature
        return 0

    def version(self, name: str) -> str:  # noqa: ARG002 - a storage's signature
        return ""

    def read_into(self, name: str, offset: int, view: memoryview) -> None:  # noqa: ARG002 - a storage's signature
        self.needed.append(name)
        raise refuse("UNSUPPORTED", "the values of the tensors decide this", hint=_OPEN_FILES)

    def recheck(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _Implied:
    """The checkpoint that a config implies."""

    checkpoint: Checkpoint
    """A checkpoint with the names, dtypes and shapes of all tensors."""
    files: _NoBytes
    """The storage of the checkpoint, without bytes."""
    notes: tuple[str, ...]
    """What is assumed of the files where the config leaves a choice."""

    def check_answered(self) -> None:
        """Refuse an answer that depends on bytes, which an implied checkpoint does not have.

        Raises:
            Refused: with the code UNSUPPORTED, if the planner asked for bytes.
        """
        if self.files.needed:
            message = "whether this works depends on values in the files, which a config does not have"
            raise refuse("UNSUPPORTED", message, hint=_OPEN_FILES)


def _imply(choices: Settings, family: Family, dialect: Dialect, form: str, *, ahead: bool) -> _Implied:
    """Return the checkpoint that a config implies, in a dialect and a format.

    Args:
        choices: the config, and the user's choice of axes.
        family: the model family.
        dialect: a dialect of the family.
        form: name of the format.
        ahead: whether the layers that predict ahead are stored, if the config promises any.

    Raises:
        Refused: with the code UNSUPPORTED, if the config does not say in which buffers weights are stored; with the
            codes of `read`, if its quantization section is not valid.
        UsageError: with the code UNKNOWN_AXIS or AMBIGUOUS, if the config does not determine the tensors of the model.
    """
    config = choices.config or {}
    quantization, notes = read(config), list[str]()
    if quantization is not None and dialect.name not in _HUB_NAMES:
        notes.append(f"the source is taken to have no quantized weights: the config describes those of {HUB} only")
        quantization = None
    if quantization is not None and (
        quantization.method in PACKED_PARSERS or (quantization.conventions and not quantization.scheme.groups)
    ):
        raise _refuse_undescribed(quantization)
    groups = () if quantization is None else quantization.scheme.groups
    sizes = Sizes(family, config, choices.axes)
    if assumed := _axes_of_shapes(sizes, dialect):
        notes.append(f"only shapes show the size of {', '.join(assumed)}, which is taken as {_ANY_SIZE}: bytes differ")
        sizes = sizes.with_solved(dict.fromkeys(assumed, _ANY_SIZE))
    forms = sorted({group.encoding.name for group in groups} & {*WORDS})
    key = ahead_key(sizes.settings, sizes.config)
    model = Model(family, sizes, ahead=ahead and key is not None, encoding=forms[0] if len(forms) == 1 else PLAIN)
    kinds = dict(model.kinds_by_name(dialect))
    model.check_decided(dialect)
    if model.undecided:
        notes.append(f"the config does not say whether the model has {', '.join(sorted(model.undecided))}: taken as no")
    if key is not None:
        components = {component for line in dialect.lines for component in line.expression.components}
        has_ahead = any(model.is_ahead(name, layer) for name in components for layer in model.present[name])
        state = f"stored; for files without them ask with {key} 0" if has_ahead else "absent"
        notes.append(f"the layers that predict ahead, which the config promises with {key}, are taken as {state}")
    buffers, encoded = _buffers(kinds, quantization, CASTS[config_dtype(config)])
    files = _NoBytes()
    text = json.dumps(dict(config), default=str).encode()
    storage = VirtualFiles(files, {CONFIG: InMemoryFile(text)}, listed=(CONFIG,))
    entries, end = dict[str, Entry](), 0
    for name, (code, shape) in sorted(buffers.items(), key=lambda item: natural(item[0])):
        entries[name] = Entry(name, code, shape, (Extent((0,) * len(shape), shape, _FILE, end),))
        end += entries[name].nbytes
    container = Container(form, files.path, storage, entries, {_FILE: end}, carried=(CONFIG,), implied=True)
    options = msgspec.structs.replace(choices, config=None, dialect=dialect.label)
    checkpoint = Checkpoint(container, options, None, None)
    if quantization is not None and (checkpoint.catalog.refusals or checkpoint.catalog.encoded.keys() != encoded):
        raise _refuse_undescribed(quantization)
    return _Implied(checkpoint, files, tuple(notes))


def _axes_of_shapes(sizes: Sizes, dialect: Dialect) -> list[str]:
    """Return the axes of tensors outside of layers whose size no config states, such as those of a patch embedding.

    An unknown axis of a layer's tensors is none of them: whether it can be cut or encoded is part of the question.
    """
    family, tensors_by_axis = sizes.family, dict[str, bool]()
    for line in dialect.lines:
        for component in line.expression.components:
            axes = family.tensors[component].axes
            for axis in line.expression.axes:
                is_inside = not family.name_axes.isdisjoint(axes)
                tensors_by_axis[axis] = tensors_by_axis.get(axis, False) or is_inside
    paddings = {axis for line in dialect.lines for axis in line.expression.padding}
    unsized = [axis for axis, formula in family.axes.items() if formula is None and axis not in sizes.overrides]
    return [axis for axis in unsized if tensors_by_axis.get(axis) is False and axis not in paddings]


def _buffers(
    kinds: Mapping[str, TensorKind], quantization: Quantization | None, dtype: str
) -> tuple[dict[str, _Form], set[str]]:
    """Return the dtype and shape of every stored tensor, and the names of the encoded ones without buffer suffixes.

    Args:
        kinds: name of a tensor in the tables -> its kind.
        quantization: how the config describes weights; it names either modules, or the class of linear layers, which
            the table tells from others. None if it describes none.
        dtype: dtype of plain tensors.
    """
    forms: dict[str, _Form] = {}
    encoded: set[str] = set()
    linear: dict[int, bool] = {}
    forms_of_kind: dict[tuple[int, Encoding], tuple[Convention, Mapping[Role, _Form]]] = {}
    for name, kind in kinds.items():
        shape, key = kind.layout.shape, id(kind)
        if key not in linear:  # names of one kind differ only in numbers
            components = kind.line.expression.components
            linear[key] = split_slot(name)[1] == WEIGHT and is_linear(name, shape, components)
        encodings = quantization.encodings(module_of(name)) if quantization and linear[key] else ()
        if quantization is None or not encodings:
            forms[name] = dtype, shape
            continue
        encoded.add(name)
        of_kind = key, encodings[0]
        if of_kind not in forms_of_kind:
            forms_of_kind[of_kind] = _forms(quantization, encodings[0], name, shape, dtype)
        convention, by_role = forms_of_kind[of_kind]
        for role, stored in convention.buffers(name, encodings[0]).items():
            if role in by_role:
                forms[stored] = by_role[role]
    return forms, encoded


def _forms(
    quantization: Quantization, encoding: Encoding, name: str, shape: tuple[int, ...], dtype: str
) -> tuple[Convention, Mapping[Role, _Form]]:
    """Return how an encoded tensor is stored: convention, and the dtype and shape of each buffer."""
    names = (PREFERRED[encoding.name], *quantization.conventions)
    conventions = (CONVENTIONS[name] for name in names if name in quantization.conventions)
    convention = next((each for each in conventions if encoding.name in each.holds), None)
    if convention is None:
        raise _refuse_undescribed(quantization)
    exact = replace(encoding, scale=dtype) if encoding.is_integer else encoding
    roles = [role for role in convention.buffers(name, exact) if role is not Role.INPUT_SCALE]
    return convention, {role: convention.presented(exact, shape, role) for role in roles}


def _refuse_undescribed(quantization: Quantization) -> TransaxleError:
    message = f"the config says that weights are quantized by {quantization.method}, but not in which buffers"
    return refuse("UNSUPPORTED", message, hint=_OPEN_FILES)


@without_gc()
def answer(choices: Settings, places: tuple[str, str], view: Mapping[str, Any], how: Mapping[str, Any]) -> Support:
    """Plan a conversion of the checkpoint that a config implies; for errors see `supports` in `verbs`.

    Args:
        choices: the config, and the user's choice of family, axes and tables.
        places: format and dialect of the source and of the target.
        view: options of `open` that change how values are shown.
        how: options of `make_plan`.
    """
    source, target = places
    family_name: str | None = None
    try:
        form, label = _parse_source(source)
        family = family_of_config(choices)
        family_name = family.name
        sizes = Sizes(family, choices.config or {}, choices.axes)
        dialect = _dialect_of(sizes, form, label)
        source = f"{form}:{dialect.label}"
    except TransaxleError as error:
        return Support(source, target, family_name, _in_own_words(error.refusals), (), None)
    key = ahead_key(sizes.settings, sizes.config)
    question = (choices, family, dialect, form), target, view, how
    try:
        support = _plan_implied(*question, ahead=True)
    except TransaxleError:
        if key is None:
            raise
        return _plan_implied(*question, ahead=False)
    if key is None or support or not _plan_implied(*question, ahead=False):
        return support
    note = "the conversion works for files without the layers that predict ahead"
    return replace(support, notes=(*support.notes, note))


def _plan_implied(
    source: tuple[Settings, Family, Dialect, str],
    target: str,
    view: Mapping[str, Any],
    how: Mapping[str, Any],
    *,
    ahead: bool,
) -> Support:
    """Plan the conversion of the checkpoint that a config implies, with its layers that predict ahead or without them.

    Args:
        source: the arguments of `_imply`.
        target: format and dialect of the target.
        view: options of `open` that change how values are shown.
        how: options of `make_plan`.
        ahead: whether the layers that predict ahead are stored, if the config promises any.

    Raises:
        TransaxleError: the errors of `_imply`, and of `check_answered`.
    """
    _, family, dialect, form = source
    implied, label = _imply(*source, ahead=ahead), f"{form}:{dialect.label}"
    try:
        shown, assumed = _show(implied.checkpoint, view)
        plan = make_plan(shown, target, **how).plan
    except TransaxleError as error:
        implied.check_answered()
        return Support(label, target, family.name, _in_own_words(error.refusals), implied.notes, None)
    implied.check_answered()
    notes = (*implied.notes, *assumed, *plan.notes)
    refusals = _in_own_words(plan.refusals)
    return Support(label, f"{plan.format}:{plan.dialect}", family.name, refusals, notes, plan)


def _in_own_words(refusals: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """Return refusals whose hints name the keyword of `supports` for the target, which other functions call `to`."""
    return tuple([replace(refusal, hint=_TO.sub(TARGET, refusal.hint)) for refusal in refusals])


def _parse_source(source: str) -> tuple[str, str | None]:
    """Split a source `FORMAT[:DIALECT]`, or `DIALECT` alone, which means `safetensors:DIALECT`.

    Raises:
        UsageError: with the code AMBIGUOUS, if there is no such format.
    """
    first, colon, second = source.partition(":")
    if not colon and is_dialect(first):
        return SAFETENSORS.name, first
    if registry.find(first) is not None:
        return first, second or None
    if not colon:
        return SAFETENSORS.name, first
    raise unknown_format(first, [kind.name for kind in every_format()])


def _dialect_of(sizes: Sizes, form: str, label: str | None) -> Dialect:
    """Return the dialect of a source; without a label, the first of the format's own dialects that the family has and
    that can store the model, or else the hub's.
    """
    family = sizes.family
    if label is not None:
        return pick_dialect(family, label)
    own_labels = registry.get_format(form).dialects or ("hf",)
    dialects = [dialect for each in own_labels if (dialect := family.dialect(each)) is not None]
    for dialect in dialects[:-1]:
        with suppress(Refused):  # one tensor for all layers, of which some are of another kind
            Model(family, sizes).kinds(dialect)
            return dialect
    return dialects[-1] if dialects else pick_dialect(family, own_labels[0])


def _show(checkpoint: Checkpoint, view: Mapping[str, Any]) -> tuple[Checkpoint, Sequence[str]]:
    """Return a checkpoint as `open` shows it with the options for its values, and what is assumed of the values."""
    patterns = {name: view[name] for name in ("only", "skip") if name in view}
    ((option, value),) = [item for item in view.items() if item[0] not in patterns] or [("", None)]
    if option == "restate":
        from transaxle.engine.views.restated import restate_tensors

        files, _ = restate_tensors(checkpoint.catalog, value, None)
        notes = [_EXACT] if files.recoding.checks else []
        files = msgspec.structs.replace(files, recoding=msgspec.structs.replace(files.recoding, checks=()))
        return Checkpoint(files, checkpoint.settings, None, None, checkpoint), notes
    if option == "dtype":
        return checkpoint.cast(value, **patterns), ()
    return checkpoint.decode(value, **patterns) if option else checkpoint, ()
