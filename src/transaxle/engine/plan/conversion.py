"""Plans: frozen, JSON-able data that says every byte a conversion will move, and every reason why it may not.

Making a plan reads catalogs only. All refusals are gathered before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from transaxle.axes.notation.family import Dialect
from transaxle.axes.notation.name import natural
from transaxle.encodings.encoding import Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.recognise import IDENTITY, pick_dialect
from transaxle.engine.copying.arithmetic import affine
from transaxle.engine.copying.duplicate_checks import PlannedCheck, plan_checks
from transaxle.engine.copying.source import Source
from transaxle.engine.plan.counted_axes import counted
from transaxle.engine.plan.file_names import clashing
from transaxle.engine.plan.hub_weights import published
from transaxle.engine.plan.model_config import rewritten, with_files
from transaxle.engine.plan.output_tensors import OutputTensor, Recoded, by_name, products
from transaxle.engine.plan.recoding import components, displaced, recoded, recoding
from transaxle.engine.plan.target_name import is_one_file, misnamed
from transaxle.engine.plan.training_beside import without_training
from transaxle.engine.views.cast import casts_of
from transaxle.engine.views.encode import Encode, Step, choose
from transaxle.engine.views.encoded import View
from transaxle.engine.views.header_metadata import joined, without_notes
from transaxle.engine.views.param_groups import regrouped
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.families import is_dialect
from transaxle.formats.builtin_formats import SAFETENSORS
from transaxle.formats.catalog.catalog import Draft, Entry, Spec
from transaxle.formats.dtype import nbytes
from transaxle.formats.format import Format
from transaxle.formats.registry import find, get, writable
from transaxle.formats.training_state.state import LEFT_BEHIND, ROOT, RUN
from transaxle.formats.training_state.state_groups import GROUPS, ParamGroup
from transaxle.move.transfer import Transfer
from transaxle.move.workers import Affine

SHARD_SIZE = 5_000_000_000
"""Default bytes of tensors per file."""
_FRAMEWORK = {"format": "pt"}
"""Header metadata that readers expect in every file."""


class PlannedTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor to be written, and where its bytes come from."""

    name: str
    """Stored name in the target."""
    dtype: str
    """Safetensors code."""
    shape: tuple[int, ...]
    """Logical elements along each dim."""
    places: tuple[Transfer, ...]
    """Destinations of its bytes: consecutive runs in order, each as the transfer that would read it back."""
    nbytes: int
    """Size in bytes."""
    rule: str
    """The target dialect's line, as written."""
    transfers: tuple[Transfer, ...]
    """Reads that fill it, sorted by target position."""
    arithmetic: Affine | None = None
    """Arithmetic on every value, where the user allowed it."""
    step: Step | None = None
    """How the transferred values are encoded; None: they are written as they are."""

    @property
    def codes_of(self) -> str | None:
        """Table name of the tensor whose codes these are, if it is encoded here."""
        return self.step.tensor if self.step is not None and self.step.role == Role.CODES else None


class Route(msgspec.Struct, frozen=True):
    """One line of a plan, as people read it."""

    component: str
    """Logical tensors."""
    source: tuple[str, ...]
    """Rules of the source dialect."""
    target: str
    """Rule of the target dialect."""
    tensors: int
    """Target tensors of this line."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a conversion will do."""

    source: str
    """Path of the source, as typed."""
    source_format: str
    """Container format of the source."""
    format: str
    """Container format of the target."""
    family: str | None
    """Model family."""
    from_dialect: str | None
    """Dialect of the source."""
    dialect: str
    """Dialect of the target."""
    tensors: tuple[PlannedTensor, ...]
    """What is written, in file order."""
    checks: tuple[PlannedCheck, ...]
    """Copies that must prove equal first."""
    routes: tuple[Route, ...]
    """The plan by rules, for people."""
    files: dict[str, int]
    """Target files and their sizes, including copied ones."""
    carried: tuple[str, ...]
    """Files copied beside the tensors."""
    kept: tuple[str, ...]
    """Source tensors without a line in the target dialect: written under their own names."""
    ignored: tuple[str, ...]
    """Source tensors, files and notes that are left behind."""
    aliases: dict[str, str]
    """Target name -> target name of the tensor it is tied to."""
    axes: dict[str, int]
    """Axis sizes, as far as they are the same in every layer."""
    refusals: tuple[Refusal, ...]
    """Why it may not run; empty when it may."""
    recoded: tuple[Recoded, ...] = ()
    """Tensors that are decoded or encoded."""
    allow_lossy: bool = False
    """Whether a cast may turn finite values into infinities."""
    stayed: tuple[str, ...] = ()
    """Plain source tensors that keep their dtype where others are cast."""
    counted: dict[str, int] = {}
    """Name axes whose size only the names show -> that size: a missing last index would go unnoticed."""

    @property
    def band(self) -> int:
        """Bytes of values that must be in memory at once to encode the largest tensor."""
        return max((tensor.step.band for tensor in self.tensors if tensor.step is not None), default=0)

    @property
    def bytes_written(self) -> int:
        """Bytes of all target files."""
        return sum(self.files.values())

    @property
    def bytes_read(self) -> int:
        """Bytes of source tensors that are moved."""
        return sum(transfer.size for tensor in self.tensors for transfer in tensor.transfers)

    @property
    def carried_files(self) -> tuple[PlannedTensor, ...]:
        """The carried files, each as a tensor of bytes under the file's name."""
        sizes = [(name, self.files[name]) for name in self.carried]
        return tuple(
            PlannedTensor(name, "U8", (size,), (transfer,), size, "", (transfer,))
            for name, size in sizes
            for transfer in [Transfer(name, 0, 0, size)]
        )

    @property
    def copies(self) -> int:
        """Number of box copies."""
        return sum(len(tensor.transfers) for tensor in self.tensors)

    @property
    def contiguous(self) -> int:
        """Number of box copies that are one byte range on both sides."""
        return sum(not transfer.loops for tensor in self.tensors for transfer in tensor.transfers)

    def as_json(self, *, copies: bool = True) -> dict[str, Any]:
        """Return the plan as plain JSON data; without `copies` the single byte ranges are left out."""
        data: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, refusals=()))
        data["refusals"] = [refusal.as_json() for refusal in self.refusals]
        data |= {
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "copies": self.copies,
            "contiguous": self.contiguous,
        }
        if not copies:
            for tensor in data["tensors"]:
                del tensor["transfers"]
        return data


@dataclass(frozen=True)
class Prepared:
    """A plan, with the opened files that its execution needs."""

    plan: Plan
    """The plan."""
    checkpoint: Checkpoint
    """The opened source."""
    draft: Draft
    """The target's files, with the bytes (headers) that are known before any tensor is copied."""


HUB = (SAFETENSORS.name, "hf")
"""Format and dialect of a model on a hub; optimizer state is left out unless asked for. No property of the format, but
what programs that fetch a model from there expect."""


def parse_to(to: str) -> tuple[str, str | None]:
    """Split `FORMAT[:DIALECT]` or `DIALECT`, which is short for `safetensors:DIALECT`.

    Returns:
        format and dialect; no dialect means the source's own names.

    Raises:
        Refused: UNSUPPORTED for a format that cannot be written.
    """
    first, colon, second = to.partition(":")
    if not colon and (first == IDENTITY or is_dialect(first)):
        return SAFETENSORS.name, first  # asked first: a dialect that ships is no reason to look for installed formats
    kind = find(first)
    if kind is not None and kind.draft:
        return first, second or None
    if colon or not first or kind is not None:
        raise refuse(
            "UNSUPPORTED", f"cannot write format {first!r}; formats that can be written: {', '.join(writable())}"
        )
    return SAFETENSORS.name, first


def for_hub(to: str) -> bool:
    """Tell whether `FORMAT[:DIALECT]` is that of a model on a hub.

    Raises:
        Refused: as `parse_to`.
    """
    form, label = parse_to(to)
    return (form, (label or IDENTITY).partition("@")[0]) == HUB


def make_plan(
    checkpoint: Checkpoint,
    to: str,
    *,
    shard_size: int = SHARD_SIZE,
    allow_lossy: bool = False,
    strict: bool = False,
    target: str | None = None,
    encode: Encode | None = None,
) -> Prepared:
    """Plan a conversion.

    Args:
        checkpoint: the opened source.
        to: `FORMAT[:DIALECT]`.
        shard_size: bytes of tensors per file.
        allow_lossy: run a dialect's arithmetic.
        strict: refuse tensors that have no line in the target dialect instead of keeping them under their names.
        target: where it is to be written; where that is one file, there are no shards.
        encode: which tensors are encoded on the way, and how.

    Returns:
        The plan, with all refusals in `plan.refusals`; only usage errors and unreadable sources raise.
    """
    if shard_size < 1:
        raise ValueError(f"shard_size must be positive, not {shard_size}")
    form, label = parse_to(to)
    wanted = label or IDENTITY
    checkpoint, hub_refusals = _for_hub(checkpoint) if for_hub(to) else (checkpoint, [])
    view, names, problems = _viewed(checkpoint, wanted, encode, bare=wanted == to)
    problems.extend(hub_refusals)
    unknown = checkpoint.foreign(wanted)
    problems.extend(unknown)
    if strict and not unknown:
        problems.extend(_without_line(name, wanted) for name in view.kept)
    single = is_one_file(target)
    problems.extend(misnamed(target, form))
    source = checkpoint.source_of(wanted)
    outputs = by_name(products(view, names, encode.encoding if encode else ""), problems)
    groups = regrouped(checkpoint.container.metadata.get(GROUPS, ()), view.targets, problems)
    draft_options = _draft_options(checkpoint, view, source, groups) | {"sealed": single}
    notes = joined(checkpoint.metadata) if wanted == IDENTITY else without_notes(checkpoint.metadata)
    draft, lost = _drafted(checkpoint, form, outputs, notes, draft_options, None if single else shard_size, problems)
    tensors = _planned(source, outputs, draft, allow_lossy, problems)
    checks = plan_checks(source, view.checks, problems)
    configs = {} if single else rewritten(checkpoint, wanted, view, outputs.values(), problems)
    lost.extend(name for name, text in configs.items() if text is None)
    carried = {name: size for name, size in _carried(checkpoint, draft, problems).items() if name not in configs}
    draft = _with_configs(draft, configs, () if single else carried, problems)
    reading = checkpoint.recognised if wanted != IDENTITY else None
    family = reading.family.name if reading else checkpoint.family
    plan = Plan(
        source=checkpoint.path,
        source_format=checkpoint.format,
        format=form,
        family=family,
        from_dialect=checkpoint.dialect,
        dialect=pick_dialect(reading.family, wanted).label if reading else (checkpoint.dialect or IDENTITY),
        tensors=tuple(tensors),
        checks=tuple(checks),
        routes=_routes(checkpoint, view) if reading else (),
        files={**draft.files, **carried},
        carried=tuple(carried),
        kept=view.kept,
        ignored=(*view.ignored, *checkpoint.container.left, *checkpoint.container.ignored, *lost),
        aliases=dict(view.aliases),
        axes=_axes(checkpoint, view, reading.family.dialect(wanted) if reading else None),
        refusals=tuple(problems),
        recoded=tuple(recoded(checkpoint, [(outputs[tensor.name], tensor.transfers) for tensor in tensors])),
        allow_lossy=allow_lossy,
        stayed=casts_of(checkpoint.container.storage).stayed,
        counted=counted(checkpoint.bound, checkpoint.sizes, view.axes) if reading else {},
    )
    return Prepared(plan, checkpoint, draft)


def _for_hub(checkpoint: Checkpoint) -> tuple[Checkpoint, list[Refusal]]:
    """Return what a hub gets of a checkpoint: its weights alone, as they are published."""
    weights, refusals = published(without_training(checkpoint))
    return (weights.without_optimizer() if weights.settings.optimizer is None else weights), refusals


def _with_configs(
    draft: Draft, configs: Mapping[str, bytes | None], carried: Iterable[str], problems: list[Refusal]
) -> Draft:
    """Return a draft that also writes the configs that change; names that clash with carried files are refused."""
    problems.extend(clashing((*draft.files, *carried)))
    return with_files(draft, {name: text for name, text in configs.items() if text is not None})


def _without_line(name: str, dialect: str) -> Refusal:
    message = f"dialect {dialect} has no line for this tensor"
    return Refusal("UNEXPECTED_TENSOR", message, Where(None, name), "omit --strict")


def _viewed(
    checkpoint: Checkpoint, wanted: str, encode: Encode | None, *, bare: bool
) -> tuple[View, Sequence[str], list[Refusal]]:
    """Return the target's tensors, the names of those that are encoded, and all problems.

    A dialect may have other lines for encoded tensors, so the choice of tensors decides their layout.
    """
    if bare and wanted != IDENTITY and checkpoint.recognised.family.dialect(wanted) is None:
        pick_dialect(checkpoint.recognised.family, wanted, writable())  # a bare name may be meant as a format's
    view = checkpoint.translation(wanted)
    if wanted == IDENTITY and (encode is not None or checkpoint.decoded):
        catalog = checkpoint.catalog
        view = replace(view, encoded=catalog.encoded, refusals=catalog.refusals)
    names: Sequence[str] = ()
    misfits: list[Refusal] = []
    if encode is not None:
        names, misfits = choose(view, encode, components(checkpoint, None if wanted == IDENTITY else view))
        if wanted != IDENTITY:
            view = checkpoint.translation(wanted, recoding(names, encode.encoding))
    if wanted == IDENTITY:
        misfits.extend(displaced(checkpoint, names))
    return view, [name for name in names if name in view.targets], [*view.refusals, *misfits]


def _axes(checkpoint: Checkpoint, translation: View, target: Dialect | None) -> dict[str, int]:
    """Return the axis sizes to record, without the padding of dialects other than the target's."""
    if target is None:
        return dict(translation.axes)
    padding = {axis for d in checkpoint.recognised.family.dialects for axis in _padding(d)} - _padding(target)
    return {axis: size for axis, size in translation.axes.items() if axis not in padding}


def _padding(dialect: Dialect) -> set[str]:
    return {axis for line in dialect.lines for axis in line.expression.padding}


def _drafted(
    checkpoint: Checkpoint,
    form: str,
    written: Mapping[str, OutputTensor],
    notes: Mapping[str, Any],
    draft_options: Mapping[str, Any],
    shard_size: int | None,
    problems: list[Refusal],
) -> tuple[Draft, list[str]]:
    """Lay out the target files; also return the source's notes that have no place in them."""
    specs = [Spec(product.name, product.dtype, product.shape) for product in written.values()]
    specs.sort(key=lambda spec: natural(spec.name))
    files = checkpoint.container.files
    metadata, left_out = dict(_FRAMEWORK), []
    for key, value in notes.items():
        if key == LEFT_BEHIND:
            left_out.extend(value)
        elif not isinstance(value, str) or key == ROOT or _FRAMEWORK.get(key) == value:
            continue
        elif checkpoint.format != form or key.partition(":")[0] in files:
            left_out.append(f"note {key}")  # that of another format, or of one shard only
        else:
            metadata[key] = value
    kind = get(form)
    if draft_options["groups"] and not kind.draft_takes & {"groups", "run"}:
        left_out.append(GROUPS)
    problems.extend(_unholdable(kind, specs))
    taken = {name: option for name, option in draft_options.items() if name in kind.draft_takes}
    try:
        drafter = kind.drafter
        with kind.answerable("its draft"):
            draft = drafter(specs, metadata=metadata, shard_size=shard_size, **taken)
        if kind.package:
            from transaxle.formats.package_checks import check_draft

            check_draft(kind, draft, specs)
        return draft, left_out
    except TransaxleError as error:
        problems.extend(error.refusals)
        return Draft(form, {}, {}, ()), left_out


def _unholdable(kind: Format, specs: Sequence[Spec]) -> Iterator[Refusal]:
    """Yield why a format cannot hold tensors of some types."""
    for spec in specs:
        if kind.dtypes is not None and spec.dtype not in kind.dtypes:
            hint = "Choose a format that can hold it, or leave it out."
            yield Refusal("UNSUPPORTED", f"{kind.name} has no dtype for {spec.dtype}", Where(None, spec.name), hint)


def _draft_options(checkpoint: Checkpoint, view: View, source: Source, groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """Return what drafts may take of the run: settings, with counters, and a way to read small tensors."""

    def read(name: str) -> bytes:
        return StoredTensor(name, *view.described(name), view.targets[name], source).tobytes()

    return {"groups": groups, "run": {**checkpoint.metadata.get(RUN, {}), GROUPS: groups}, "read": read}


def _carried(checkpoint: Checkpoint, draft: Draft, problems: list[Refusal]) -> dict[str, int]:
    """Return the files that are copied along, and their sizes."""
    storage = checkpoint.container.storage
    sizes = {}
    for name in checkpoint.container.carried:
        if name in draft.files:
            message = "a file beside the source has the same name as a file that will be written"
            problems.append(Refusal("NAME_COLLISION", message, Where(name)))
            continue
        try:
            sizes[name] = storage.size(name)
        except TransaxleError as error:
            problems.extend(error.refusals)
    return sizes


def _planned(
    source: Source, written: Mapping[str, OutputTensor], draft: Draft, allow_lossy: bool, problems: list[Refusal]
) -> list[PlannedTensor]:
    """Plan every tensor in file order; if the files could not be laid out, still collect the other problems."""
    planned = []
    for name in draft.entries or written:
        output = written[name]
        try:
            arithmetic = affine(output.target, allowed=allow_lossy)
            transfers = tuple(source.transfers(output.target))
        except TransaxleError as error:
            problems.extend(error.refusals)
            continue
        if name not in draft.entries:
            continue
        shape, places = draft.entries[name].shape, _places(draft.entries[name])
        size, rule = nbytes(output.dtype, shape), output.target.rule
        step = output.step
        planned.append(PlannedTensor(name, output.dtype, shape, places, size, rule, transfers, arithmetic, step))
    return planned


def _places(entry: Entry) -> tuple[Transfer, ...]:
    """Return the destinations of a drafted tensor's bytes: its chunks are runs of its row-major bytes, in order."""
    places = []
    start = 0
    for extent in entry.extents:
        size = nbytes(entry.dtype, extent.shape)
        places.append(Transfer(extent.file, extent.offset, start, size))
        start += size
    return tuple(places)


def _routes(checkpoint: Checkpoint, translation: View) -> tuple[Route, ...]:
    """Group the targets by rule."""
    rules = {component: line.text for line, _ in checkpoint.bound.names for component in line.expression.components}
    counts: dict[tuple[str, str], int] = {}
    for target in translation.targets.values():
        if target.component:
            key = target.component, target.rule
            counts[key] = counts.get(key, 0) + 1
    return tuple(
        Route(component, tuple(dict.fromkeys(rules.get(c, "") for c in component.split(", "))), rule, number)
        for (component, rule), number in counts.items()
    )


def ready(prepared: Prepared) -> Plan:
    """Return the plan if it may run.

    Raises:
        TransaxleError: every refusal, at once.
    """
    if prepared.plan.refusals:
        raise gathered(prepared.plan.refusals)
    return prepared.plan
