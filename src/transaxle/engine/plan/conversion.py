"""Making a plan: it reads catalogs only, and gathers all refusals before anything is written.

First it settles what is aimed at (format, dialect, the weights that a hub gets), then which tensors of the source make
which of the target, then the target's files; and from these the copies. Names that the target cannot have, files that
would collide and whatever else stands against it are refused together, in the plan.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from transaxle.arguments import Degrees
from transaxle.axes.geometry import coalesce, row_major
from transaxle.axes.layout.bind import BoundNames
from transaxle.axes.layout.relayout import chunk_cuts
from transaxle.axes.notation.family import Dialect, Family, Sizes
from transaxle.axes.notation.name import natural
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.manifest import edited
from transaxle.engine.checkpoint.peft_adapter import ADAPTER_STEM
from transaxle.engine.checkpoint.recognise import IDENTITY, check_dialect, other_meaning, pick_dialect
from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.engine.duplicates import plan_checks, steps
from transaxle.engine.plan.planned import OutputTensor, Plan, PlannedTensor, routes
from transaxle.engine.plan.recoding import (
    buffers_of,
    computed,
    config_notes,
    displaced,
    lacking_note,
    published,
    recoded,
    recoding,
    rewritten,
    to_encode,
)
from transaxle.engine.plan.training_beside import (
    left_behind,
    misplaced_state,
    nesting_of,
    plain_items,
    state_notes,
    state_of_other_names,
    without_training,
)
from transaxle.engine.source import Source
from transaxle.engine.views.decoded import joined, regrouped, without_notes
from transaxle.engine.views.encode import Encode
from transaxle.engine.views.encoded import View, describes_tensors
from transaxle.errors import Refusal, TransaxleError, Where, gathered, in_both_languages, refuse
from transaxle.families import is_dialect
from transaxle.formats import registry
from transaxle.formats.catalog import ITEM_BITS, Draft, Entry, Extent, Spec, nbytes
from transaxle.formats.registry import MANIFEST, SAFETENSORS, SCRATCH, Format, builtin, get, uncollected, writable
from transaxle.formats.storage.storage import as_text
from transaxle.formats.training_state import GROUPS, LEFT_BEHIND, MEGATRON, OPTIMIZER, ROOT, RUN, with_full_precision
from transaxle.move.transfer import Transfer, lower
from transaxle.options import SHARD_SIZE
from transaxle.spans import stage

_LARGEST = 1 << 44
"""Cap on the elements of a tensor."""
_MISSHAPEN = "SHAPE_MISMATCH"
_READ_NO_CODES = frozenset({"automodel", "megatron", "megatron_dist", "megatron_layers", "torchtitan"})
"""Dialects of trainers that load their own checkpoints by DCP, or by name into parameters: both cast, and look for no
scales. torchtitan and Automodel read codes from the hub's files only.
"""
_FOR_ANY = frozenset({SAFETENSORS.name, "torch"})
"""Formats that no trainer of these dialects loads, other than the hub's files."""
_FRAMEWORK = {"format": "pt"}
"""Header metadata that readers expect in every file."""


class Prepared(msgspec.Struct, frozen=True):
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


def for_hub(to: str) -> bool:
    """Tell whether `FORMAT[:DIALECT]` is that of a model on a hub; raises what `parse_to` does."""
    form, label = parse_to(to)
    return (form, (label or IDENTITY).partition("@")[0]) == HUB


@uncollected()
@stage("plan")
def make_plan(
    checkpoint: Checkpoint,
    to: str,
    *,
    shard_size: int = SHARD_SIZE,
    allow_lossy: bool = False,
    strict: bool = False,
    target: str | None = None,
    encode: Encode | None = None,
    degrees: Degrees | None = None,
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
        degrees: the ranks of a target that has files for each of them.

    Returns:
        The plan, with all refusals in `plan.refusals`; only usage errors and unreadable sources raise.
    """
    if shard_size < 1:
        raise ValueError(f"shard_size must be positive, not {shard_size}")
    to, checkpoint = _as_shown(checkpoint, to), checkpoint.stored
    checkpoint, form, wanted, hub_refusals, fitting = _aimed(checkpoint, to, degrees)
    view, names, problems, told = _viewed(checkpoint, (form, wanted), encode, fitting, bare=wanted == to)
    unknown = checkpoint.foreign(wanted) or checkpoint.half_converted(wanted, view)
    problems += [*hub_refusals, *checkpoint.container.unread, *unknown, *misnamed(target, form)]
    if strict and not unknown:
        problems.extend(without_line(name, wanted) for name in view.kept_names)
    single = is_one_file(target)
    source = checkpoint.source_of(wanted)
    options = {**_draft_options(checkpoint, view, source, get(form), problems), "sealed": single}
    plain = (item.name for item in checkpoint.container.training if item.path in options["training"])
    outputs = _by_name(_outputs(view, names, encode.encoding if encode else "", plain), problems)
    options |= _ranks_options(checkpoint, get(form), wanted, outputs, degrees, view.axes, problems)
    draft, lost = _drafted(checkpoint, (form, wanted), outputs, options, None if single else shard_size, problems)
    tensors = _planned(source, outputs, draft, allow_lossy, problems)
    checks = plan_checks(source, view.checks, problems) if view.checks or checkpoint.container.twins else ()
    recoding = checkpoint.container.recoding
    recoding_any = bool(names or recoding.computed)
    restated = not single and (recoding_any or wanted != IDENTITY or checkpoint.settings.config is not None)
    configs = rewritten(checkpoint, (form, wanted), view, outputs.values(), problems) if restated else {}
    draft, carried = _with_others(checkpoint, draft, configs, problems, single=single)
    reading = checkpoint.recognised if wanted != IDENTITY else None
    plan = Plan(
        source=as_text(checkpoint.path),
        source_format=checkpoint.format,
        format=form,
        family=reading.family.name if reading else checkpoint.family,
        from_dialect=checkpoint.dialect,
        dialect=pick_dialect(reading.family, wanted).label if reading else (checkpoint.dialect or IDENTITY),
        tensors=tuple(tensors),
        checks=tuple(checks),
        routes=routes(checkpoint.bound, view.targets.values()) if reading else (),
        files={**draft.files, **carried},
        carried=tuple(carried),
        kept=view.kept_names,
        ignored=(*view.ignored, *checkpoint.container.left, *checkpoint.container.ignored, *lost, *_dropped(configs)),
        aliases=dict(view.aliases),
        axes=recorded(view.axes, reading.family, wanted) if reading else dict(view.axes),
        refusals=tuple(problems),
        recoded=recoded(checkpoint, outputs, tensors) if recoding_any else (),
        computed=computed(checkpoint.container),
        allow_lossy=allow_lossy,
        stayed=recoding.stayed,
        counted=counted(checkpoint.bound, checkpoint.sizes, view.axes) if reading else {},
        notes=(*draft.notes, *told, *_target_notes(checkpoint, draft, configs, to, None if single else carried)),
    )
    return Prepared(plan, checkpoint, draft)


def _with_others(
    checkpoint: Checkpoint,
    draft: Draft,
    configs: Mapping[str, bytes | None],
    problems: list[Refusal],
    *,
    single: bool,
) -> tuple[Draft, dict[str, int]]:
    """Return a draft with rewritten configs, and the sizes of the files that are carried beside it as they are.

    Args:
        checkpoint: the source.
        draft: the files with tensors.
        configs: name -> new contents; None: it is left out.
        problems: receives the refusals.
        single: the target is one file.
    """
    carried = {name: size for name, size in _carried(checkpoint, draft, problems).items() if name not in configs}
    problems.extend(clashing((*draft.files, *(() if single else carried))))
    return draft.with_files({name: text for name, text in configs.items() if text is not None}), carried


def _dropped(configs: Mapping[str, bytes | None]) -> Iterator[str]:
    return (name for name, text in configs.items() if text is None)


def _target_notes(
    checkpoint: Checkpoint, draft: Draft, configs: Mapping[str, bytes | None], to: str, carried: Collection[str] | None
) -> Iterator[str]:
    """Yield what the target's config does not say, what is odd about an adapter, and formats beside safetensors.

    Args:
        checkpoint: the source.
        draft: the target's files.
        configs: those that are rewritten.
        to: `FORMAT[:DIALECT]`.
        carried: files that are copied beside the tensors; None: the target is one file.
    """
    yield from config_notes(checkpoint, configs) if checkpoint.settings.config else ()
    yield from edited(checkpoint.container.storage, carried or ())
    yield from checkpoint.container.recoding.notes
    framework, ways = _loads(to)
    if ways:
        ways_out = f"write --to {' or --to '.join(ways)}"
        yield in_both_languages(f"safetensors with the names of {to}; for what {framework} loads, {ways_out}")
    has_config = CONFIG in (*checkpoint.container.carried, *draft.files)
    if for_hub(to) and carried is not None and not has_config and not checkpoint.stored_names.is_adapter:
        yield in_both_languages(lacking_note(checkpoint))


def _without_reader(view: View, encoded: Collection[str], form: str, wanted: str) -> Iterator[str]:
    """Yield what is to be said of codes in a format of a program that takes them for the values themselves."""
    names = sorted({*encoded, *view.encoded} & view.targets.keys())
    if names and form not in _FOR_ANY and wanted.partition("@")[0] in _READ_NO_CODES:
        yield in_both_languages(
            f"{len(names):,} tensors are codes with scales, such as {names[0]}; programs that load {wanted} from "
            f"{form} read no scales: write values, with --decode bf16"
        )


def _loads(to: str) -> tuple[str, Sequence[str]]:
    """Return whose names those of a bare dialect are, and what to write for that framework; empty where it is this."""
    own = {name: kind.dialects for name, kind in builtin().items() if kind.draft and kind.dialects}
    name = to.partition("@")[0]
    if name == "te" or any(to in dialects for dialects in own.values()):
        return "Megatron", tuple(own)
    others = {"torchtitan": ("torchtitan", f"dcp:{to}"), "automodel": ("Automodel", "hf"), "vllm": ("vLLM", "hf")}
    framework, *ways = others.get(name, (to,))
    return framework, ways


def _as_shown(checkpoint: Checkpoint, to: str) -> str:
    """Return `FORMAT[:DIALECT]` with the dialect of a view, where none is named and the format has none of its own."""
    form, label = parse_to(to)
    return f"{form}:{checkpoint.shown_as}" if label is None and checkpoint.shown_as and not get(form).dialects else to


@stage("find tables")
def _aimed(
    checkpoint: Checkpoint, to: str, degrees: Degrees | None
) -> tuple[Checkpoint, str, str, list[Refusal], View | None]:
    """Return what is written, format and dialect of the target, and why some of it cannot be; also its translation,
    where that is known.

    Raises:
        Refused: UNSUPPORTED for a format that cannot be written, or not for several ranks.
        UsageError: as `parse_to` and `_written_in`.
    """
    form, label = parse_to(to)
    kind = get(form)
    is_adapter = checkpoint.stored_names.is_adapter
    if label and not is_adapter and checkpoint.family is None:  # the label is at fault rather than the names
        check_dialect(label, checkpoint.settings.families, () if ":" in to else writable())
    if label and label != IDENTITY and is_adapter:
        checkpoint, label = checkpoint.as_dialect(label), IDENTITY
    elif label and checkpoint.family is None and checkpoint.stored_names.keep(label):
        label = IDENTITY
    opened, fitting = checkpoint, None
    if label:
        wanted = label
    else:
        wanted, fitting = _written_in(checkpoint, kind)
    if degrees is not None and "degrees" not in kind.draft_takes:
        message = f"{kind.title} has no files for each rank: it is read at any degree of parallelism"
        kept = f":{label}" if label and ":" in to else ""
        others = [f"{each}{kept}" for each in writable() if "degrees" in get(each).draft_takes]
        options = "--tp, --pp, --ep and --make-vocab-size-divisible-by"
        raise refuse("UNSUPPORTED", message, hint=f"Omit {options}, or write --to {' or --to '.join(others)}.")
    if degrees is not None and "parts" not in kind.draft_takes and degrees.pp * degrees.ep > 1:
        message = f"{kind.title} is read at any degrees; --tp says for how many ranks the vocabulary is padded"
        raise refuse("UNSUPPORTED", message, hint="Omit --pp and --ep.")
    if "parts" in kind.draft_takes or degrees is not None:
        from transaxle.engine.plan.rank_parts import padded  # few formats have files for each rank

        checkpoint = checkpoint if wanted == IDENTITY else padded(checkpoint, wanted, degrees or Degrees())
    if for_hub(to):
        weights, refusals = _for_hub(checkpoint)
        return weights, form, wanted, refusals, fitting if weights is opened else None
    checkpoint = _for_format(checkpoint, kind)
    if kind.full_precision:  # it has a parameter's values and its state in one place
        checkpoint = checkpoint.with_state_of(frozenset())
        if wanted == IDENTITY and state_of_other_names(checkpoint):
            wanted = checkpoint.recognised.dialect.label
    return checkpoint, form, wanted, [], fitting if checkpoint is opened else None


def _written_in(checkpoint: Checkpoint, kind: Format) -> tuple[str, View | None]:
    """Return the dialect in which a format is written where none is named: the first of its own that fits.

    Also the translation into it, where one was made to find that out.

    Raises:
        UsageError: UNKNOWN_FAMILY, AMBIGUOUS where the format has dialects and the family is not known, or has none.
    """
    if not kind.dialects:
        return IDENTITY, None
    family = checkpoint.recognised.family
    known = [label for label in kind.dialects if family.dialect(label) is not None]
    if not known:
        listed = ", ".join(family.labels)
        message = f"{kind.name} has tensors of the dialect {kind.dialects[0]}, and family {family.name} has: {listed}"
        hint = f"Add the dialect with --rules FILE, or write the names that there are: --to {kind.name}:{IDENTITY}"
        raise refuse("UNSUPPORTED", message, hint=hint)
    for label in known[:-1]:
        view = checkpoint.translation(label)
        if not view.refusals:
            return label, view
    return known[-1], None


def _for_hub(checkpoint: Checkpoint) -> tuple[Checkpoint, list[Refusal]]:
    """Return what a hub gets of a checkpoint: its weights alone, as they are published."""
    weights, refusals = published(without_training(checkpoint))
    return (weights.without_optimizer() if weights.settings.optimizer is None else weights), refusals


def _for_format(checkpoint: Checkpoint, kind: Format) -> Checkpoint:
    """Return what a format gets of a checkpoint: where it has no place for weights twice, those of full precision.

    That is a change of weights that the checkpoint itself has in low precision too, so the user may refuse it: with
    `--weights lp` there is no place for the optimizer's copies, which is an error.
    """
    if not kind.full_precision or checkpoint.settings.weights is not None:
        return checkpoint
    container = with_full_precision(checkpoint.container, strict=False)
    if container.entries.keys() == checkpoint.container.entries.keys():
        return checkpoint
    return Checkpoint(container, checkpoint.settings, None, None, checkpoint.undecoded)


@stage("translate")
def _viewed(
    checkpoint: Checkpoint, to: tuple[str, str], encode: Encode | None, known: View | None = None, *, bare: bool
) -> tuple[View, Sequence[str], list[Refusal], Sequence[str]]:
    """Return the tensors of a format and dialect, the names of those that are encoded, all problems, and notes about
    the choice and the optimizer's state.

    A dialect may have other lines for encoded tensors, so the choice of tensors decides their layout.
    """
    form, wanted = to
    if bare and wanted != IDENTITY and checkpoint.recognised.family.dialect(wanted) is None:
        pick_dialect(checkpoint.recognised.family, wanted, writable())  # a bare name may be meant as a format's
    view = known or checkpoint.translation(wanted)
    if wanted == IDENTITY and (encode is not None or checkpoint.decoded):
        catalog = checkpoint.catalog
        view = replace(view, encoded=catalog.encoded, refusals=catalog.refusals)
    names: Sequence[str] = ()
    misfits: list[Refusal] = []
    notes: Sequence[str] = ()
    if encode is not None:
        names, misfits, notes = to_encode(checkpoint, wanted, view, encode)
        if wanted != IDENTITY:
            view = checkpoint.translation(wanted, recoding(names, encode.encoding))
    if wanted == IDENTITY and checkpoint.settings.family is not None and not checkpoint.stored_names.is_adapter:
        # Who names the family says that its rules hold of the shapes too.
        own = checkpoint.translation(checkpoint.recognised.dialect.label)
        misfits.extend(refusal for refusal in own.refusals if refusal.code == _MISSHAPEN)
    if wanted == IDENTITY and (names or checkpoint.decoded):
        misfits.extend(displaced(checkpoint, names))
    if any(name.startswith(OPTIMIZER) for name in view.targets):
        misfits += misplaced_state(checkpoint, view, get(form), wanted)
        notes = [*notes, *state_notes(checkpoint, view, wanted)]
    notes = (*view.notes, *notes, *_without_reader(view, names, form, wanted))
    return view, [name for name in names if name in view.targets], [*view.refusals, *misfits], notes


def _outputs(view: View, names: Iterable[str], encoding: str, plain: Iterable[str | None]) -> list[OutputTensor]:
    """Return the tensors that are written for a view, some as the buffers of an encoding, and none as plain data."""
    encoded, stored, outputs, omitted = frozenset(names), view.stored, list[OutputTensor](), frozenset(plain)
    for name, target in view.targets.items():
        if name in omitted:
            continue
        if name in encoded:
            outputs.extend(buffers_of(view, name, encoding))
        elif name in stored:
            outputs.append(OutputTensor(name, *stored[name], target))
        else:
            outputs.append(OutputTensor(name, target.dtype, target.layout.shape, target))
    return outputs


def _by_name(written: Sequence[OutputTensor], problems: list[Refusal]) -> dict[str, OutputTensor]:
    """Return output tensors by name; duplicates, and sizes that no machine can hold, are problems."""
    outputs = dict(zip(map(_name, written), written, strict=True))
    too_large = {shape for shape in set(map(_shape, written)) if prod(shape) > _LARGEST}
    if len(outputs) == len(written) and not too_large:
        return outputs
    outputs = {}
    for product in written:
        if product.shape in too_large:  # else laying it out would never end
            message = f"the tensor would have the shape {list(product.shape)}: a size in the config is not plausible"
            problems.append(Refusal("CORRUPT", message, Where(None, product.name)))
            continue
        if product.name in outputs:
            message = f"{product.target.rule}\nwrites the same name as {outputs[product.name].target.rule}"
            problems.append(Refusal("NAME_COLLISION", message, Where(None, product.name)))
        outputs[product.name] = product
    return outputs


_name, _shape = map(attrgetter, ("name", "shape"))


@stage("lay out files")
def _drafted(
    checkpoint: Checkpoint,
    to: tuple[str, str],
    written: Mapping[str, OutputTensor],
    draft_options: Mapping[str, Any],
    shard_size: int | None,
    problems: list[Refusal],
) -> tuple[Draft, list[str]]:
    """Lay out the files of a format and dialect; also return the source's notes that have no place in them."""
    form, wanted = to
    specs = [Spec(product.name, product.dtype, product.shape) for product in written.values()]
    keys = [natural(spec.name) for spec in specs]
    specs = [specs[at] for at in sorted(range(len(specs)), key=keys.__getitem__)]
    files = checkpoint.container.files
    metadata, left_out = dict(_FRAMEWORK), list[str]()
    for key, value in _notes(checkpoint, wanted).items():
        if key == LEFT_BEHIND:
            left_out.extend(left_behind(checkpoint, draft_options["training"]))
        elif not isinstance(value, str) or key == ROOT or _FRAMEWORK.get(key) == value:
            continue
        elif checkpoint.format != form or key.partition(":")[0] in files:
            left_out.append(f"note {key}")  # that of another format, or of one shard only
        else:
            metadata[key] = value
    kind = get(form)
    if draft_options["groups"] and not kind.draft_takes & {"groups", "run"}:
        left_out.append(GROUPS)
    problems.extend(unholdable(kind, specs))
    nesting = nesting_of(checkpoint, written) if draft_options["sealed"] else None
    options = {**draft_options, "nesting": nesting}
    taken = {name: option for name, option in options.items() if name in kind.draft_takes}
    try:
        drafter = kind.drafter
        with kind.answerable("its draft"):
            draft = drafter(specs, metadata=metadata, shard_size=None if "stem" in taken else shard_size, **taken)
        if kind.package:
            from transaxle.formats.package_checks import check_draft

            check_draft(kind, draft, specs)
        return draft, left_out
    except TransaxleError as error:
        problems.extend(error.refusals)
        return Draft(form, {}, {}, ()), left_out


def _notes(checkpoint: Checkpoint, wanted: str) -> dict[str, Any]:
    """Return the container's metadata, as far as it is true of the target."""
    notes = dict(checkpoint.metadata)
    if not describes_tensors(notes):
        return notes
    return joined(notes) if wanted == IDENTITY else without_notes(notes)


def _draft_options(
    checkpoint: Checkpoint, view: View, source: Source, kind: Format, problems: list[Refusal]
) -> dict[str, Any]:
    """Return what drafts may take: settings and counters of the run, a way to read small tensors, where to cut."""
    stored_groups = checkpoint.container.metadata.get(GROUPS, ())
    groups = regrouped(stored_groups, view.targets, problems) if stored_groups else []

    def read(name: str) -> bytes:
        return StoredTensor(name, *view.described(name), view.targets[name], source).tobytes()

    run = {**checkpoint.metadata.get(RUN, {}), MEGATRON: checkpoint.metadata.get(MEGATRON, {}), GROUPS: groups}
    reading = checkpoint.stored_names.recognition
    if "cuts" not in kind.draft_takes or isinstance(reading, TransaxleError):
        cuts = {}
    else:
        cuts = chunk_cuts(view.targets, reading.family.name_axes_by_tensor)
    stem = {"stem": ADAPTER_STEM} if checkpoint.stored_names.is_adapter else {}
    training = plain_items(checkpoint, kind) if checkpoint.container.training else {}
    given = {"groups": groups, "run": run, "read": read, "config": checkpoint.config, "cuts": cuts, **stem}
    return {**given, "training": training}


def _ranks_options(
    checkpoint: Checkpoint,
    kind: Format,
    dialect: str,
    names: Collection[str],
    degrees: Degrees | None,
    axes: Mapping[str, int],
    problems: list[Refusal],
) -> dict[str, Any]:
    """Return what drafts take that lay out files for each rank, or for so many of them."""
    if "parts" not in kind.draft_takes:
        return {} if degrees is None else {"degrees": degrees}
    from transaxle.engine.plan.rank_parts import of_ranks

    return of_ranks(checkpoint, dialect, names, degrees or Degrees(), axes, problems)


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


@stage("plan copies")
def _planned(
    source: Source, written: Mapping[str, OutputTensor], draft: Draft, allow_lossy: bool, problems: list[Refusal]
) -> list[PlannedTensor]:
    """Plan every tensor in file order; if the files could not be laid out, still collect the other problems."""
    planned = []
    further = draft.copies
    entries: Mapping[str, Entry | None] = draft.entries or dict.fromkeys(written)
    for name, entry in entries.items():
        output = written[name]
        target = output.target
        try:
            arithmetic = steps(target, allowed=allow_lossy) if target.computed else None
            transfers = source.whole_transfers(target)
        except TransaxleError as error:
            problems.extend(error.refusals)
            continue
        if entry is None:
            continue
        shape, extents = entry.shape, entry.extents
        dtype, size = output.dtype, nbytes(output.dtype, shape)
        if len(extents) == 1 and (extent := extents[0]).shape == shape and entry.dtype == dtype:
            places: tuple[Transfer, ...] = (Transfer(extent.file, extent.offset, 0, size),)
        else:
            places = _places(entry, extents)
        copies = _places(entry, further[name]) if further and name in further else ()
        rule, step = target.rule, output.step
        planned.append(PlannedTensor(name, dtype, shape, places, size, rule, transfers, arithmetic, step, copies))
    return planned


def _places(entry: Entry, extents: Sequence[Extent]) -> tuple[Transfer, ...]:
    """Return the destinations of a drafted tensor's bytes, chunk by chunk, sorted by where they are in the tensor."""
    if len(extents) == 1 and extents[0].shape == entry.shape:
        return (Transfer(extents[0].file, extents[0].offset, 0, entry.nbytes),)
    bits = ITEM_BITS.get(entry.dtype, 8)
    strides = row_major(entry.shape)
    places = []
    for extent in extents:
        size = nbytes(entry.dtype, extent.shape)
        start = sum(first * step for first, step in zip(extent.start, strides, strict=True))
        loops = coalesce(list(zip(extent.shape, extent.strides or row_major(extent.shape), strides, strict=True)))
        if size and loops and loops != ((loops[0][0], 1, 1),):
            places.append(lower(extent.file, extent.offset, bits // 8, 0, start, loops))
        else:
            places.append(Transfer(extent.file, extent.offset, start * bits // 8, size))
    return tuple(sorted(places, key=lambda place: place.target))


def ready(prepared: Prepared) -> Plan:
    """Return the plan if it may run.

    Raises:
        TransaxleError: every refusal, at once.
    """
    if prepared.plan.refusals:
        raise gathered(prepared.plan.refusals)
    return prepared.plan


def recorded(sizes: Mapping[str, int], family: Family, label: str) -> dict[str, int]:
    """Return the sizes to record with a target dialect: all but the padding of other dialects."""
    target = family.dialect(label)
    if target is None:
        return dict(sizes)
    padding = {axis for dialect in family.dialects for axis in _padding(dialect)} - _padding(target)
    return {axis: size for axis, size in sizes.items() if axis not in padding}


def _padding(dialect: Dialect) -> set[str]:
    return {axis for line in dialect.lines for axis in line.expression.padding}


def counted(bound: BoundNames, given_sizes: Sizes, all_sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the name axes whose size nothing states (layers, experts), with the size that the names show.

    A gap in their numbers is detected; a missing last layer cannot be, so the reader of a plan is told.

    Args:
        bound: the stored names.
        given_sizes: sizes from config, manifest and user.
        all_sizes: all sizes, including those that names and shapes imply.
    """
    named = {axis for line, _ in bound.names for axis in line.name.axes}
    return {axis: all_sizes[axis] for axis in sorted(named & all_sizes.keys() - given_sizes.at({}).keys())}


_PACKED = (
    ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".rar",
)  # fmt: skip
_OTHERS = (
    ".arrow", ".bak", ".caffemodel", ".csv", ".dat", ".data", ".db", ".engine", ".feather", ".hdf", ".hdf5", ".json",
    ".llamafile", ".mar", ".mat", ".mlmodel", ".mlpackage", ".nemo", ".parquet", ".params", ".pb", ".pdparams", ".pt2",
    ".ptd", ".pte", ".rten", ".tensors", ".tmp", ".torch", ".torchscript", ".txt", ".weights", ".yaml", ".yml",
    ".zarr",
)  # fmt: skip
_PLACE = "This looks like a place: the target is the second argument, and --to says what is written there."
_RENAME = "Rename one of them in the source."


def parse_to(to: str) -> tuple[str, str | None]:
    """Split `FORMAT[:DIALECT]` or `DIALECT`, which is short for `safetensors:DIALECT`.

    Returns:
        format and dialect; no dialect means the source's own names.

    Raises:
        UsageError: AMBIGUOUS for a format that does not exist, and for what is no name.
        Refused: UNSUPPORTED for one that cannot be written.
    """
    first, colon, second = to.partition(":")
    if not colon and (first == IDENTITY or is_dialect(first)):
        return SAFETENSORS.name, first  # asked first: a dialect that ships is no reason to look for installed formats
    kind = registry.find(first)
    if kind is not None and kind.draft:
        return first, second or None
    if kind is None and (colon or not first):
        raise registry.unknown(first, registry.writable(), _before_colon(first, second))
    if kind is not None:
        message = f"cannot write format {first!r}; formats that can be written: {', '.join(registry.writable())}"
        near = next((name for name in registry.writable() if name.startswith(first)), None)
        raise refuse("UNSUPPORTED", message, hint=f"Did you mean {near}?" if near else "")
    if hint := _no_name(to):
        raise refuse("AMBIGUOUS", f"{to!r} is neither FORMAT:DIALECT nor one of them", hint=hint)
    return SAFETENSORS.name, first


def _before_colon(first: str, second: str) -> str:
    """Return what to write instead of two words with a colon, the first of which is no format; empty if unknown."""
    if hint := other_meaning(first):
        return hint
    if second in registry.writable():
        return f"The format comes first: {second}:{first}"
    if second.startswith("//"):
        return _PLACE
    if not first and is_dialect(second):
        return f"Did you mean {second}?"
    if not is_dialect(first):
        return ""
    wanted = second if is_dialect(second) else first
    return f"{first} is a dialect; a format stands before the colon: {SAFETENSORS.name}:{wanted}"


def _no_name(to: str) -> str:
    """Return what to write instead of a text that can be no name: with another sign than a colon, or a path."""
    words = re.split(r"[^\w@.-]+", to)
    if len(words) == 2:
        for form, label in (words, reversed(words)):
            if form in registry.writable() and (label == IDENTITY or is_dialect(label)):
                return f"Did you mean {form}:{label}?"
    if "/" in to or registry.is_one_file(to):
        return _PLACE
    return ""


def is_one_file(target: str | None) -> bool:
    """Tell whether a name says that one file is to be written."""
    return target is not None and registry.is_one_file(target)


def misnamed(target: str | None, form: str) -> Iterator[Refusal]:
    """Yield why a container format cannot be written to a target of this name.

    A `/` at its end says that it is a folder, whatever the rest looks like.
    """
    if target is None:
        return
    written = registry.find(form)
    endings = () if written is None else written.one_file
    if registry.is_one_file(target):
        if not target.endswith(endings):
            message = f"the ending of the name belongs to another format, and {form} is to be written"
            others = [name for name in registry.writable() if target.endswith(registry.get(name).one_file)]
            name = f"End it in {endings[0]}" if endings else "Name a folder"
            hint = f"{name}, or write another format: --to {' or --to '.join(others)}." if others else f"{name}."
            yield Refusal("UNSUPPORTED", message, Where(target), hint)
        return
    lower, whole = target.lower(), (*registry.one_file_ends(), *endings)
    ending = next((end for end in (*whole, *registry.foreign_ends(), *_PACKED, *_OTHERS) if lower.endswith(end)), None)
    if ending is None or lower.rpartition("/")[2] == ending:  # a hidden folder is one
        return
    advice = f"a single file ends in {', '.join(endings)}" if endings else f"{form} is always a folder"
    if ending in whole:
        message = f"other programs do not recognise a file that ends in {target[-len(ending) :]}"
        yield Refusal("UNSUPPORTED", message, Where(target), f"End it in {ending}, or in {ending}/ for a folder.")
    else:
        message = f"files that end in {ending} cannot be written; {advice}"
        hint = f"Choose another name; to write a folder, end it in /: {target}/"
        if meaning := other_meaning(ending.lstrip(".")):
            hint = f"{meaning}\n{hint}"
        yield Refusal("UNSUPPORTED", message, Where(target), hint)


def clashing(names: Iterable[str]) -> list[Refusal]:
    """Return a refusal for every name that some file system would confuse with another one or with a file of ours.

    Args:
        names: paths in the target folder, `a/b/c`, without our own files.
    """
    spelled = {_folded(reserved): reserved for reserved in (MANIFEST, SCRATCH)}
    is_file_at = dict.fromkeys(spelled.values(), True)
    problems = []
    for name in names:
        parts = name.split("/")
        for count in range(1, len(parts) + 1):
            path, is_file = "/".join(parts[:count]), count == len(parts)
            spelling = spelled.setdefault(_folded(path), path)
            kind = is_file_at.setdefault(path, is_file)
            if spelling != path or kind != is_file or spelling in (MANIFEST, SCRATCH):
                message = f"on file systems that ignore case or accents it would be the same file as {spelling!r}"
                if spelling in (MANIFEST, SCRATCH):
                    message = f"the name {spelling} is reserved for Transaxle's own files"
                problems.append(Refusal("NAME_COLLISION", message, Where(name), _RENAME))
                break
    return problems


def _folded(name: str) -> str:
    """Return the key that names share if some file system treats them as equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def without_line(name: str, dialect: str) -> Refusal:
    """Say that a dialect has no line for a tensor."""
    message = f"dialect {dialect} has no line for this tensor"
    return Refusal("UNEXPECTED_TENSOR", message, Where(None, name), "Omit --strict.")


def unholdable(kind: Format, specs: Sequence[Spec]) -> Iterator[Refusal]:
    """Yield why a format cannot hold tensors of some types."""
    if kind.dtypes is None:
        return
    for spec in specs:
        if spec.dtype not in kind.dtypes:
            hint = "Choose a format that can hold it, or leave it out."
            yield Refusal("UNSUPPORTED", f"{kind.name} has no dtype for {spec.dtype}", Where(None, spec.name), hint)
