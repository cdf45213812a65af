"""Makes a plan of a conversion from catalogs (names, dtypes, shapes), and collects all refusals before writing.

The plan first fixes the target (file format, dialect, number format of weights), then the source tensors for each
target tensor, then the target's files. The byte copies follow from these choices. Names that the target cannot have,
colliding files and all other problems are collected as refusals of the plan.
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
from transaxle.engine.checkpoint.grafting import plan_grafts
from transaxle.engine.checkpoint.peft_adapter import ADAPTER_STEM
from transaxle.engine.checkpoint.promised import find_lacks
from transaxle.engine.checkpoint.recognise import IDENTITY, check_dialect, other_meaning, pick_dialect
from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.engine.checkpoint.source_hashes import edit_notes
from transaxle.engine.duplicates import affine_steps, plan_checks
from transaxle.engine.plan.planned import OutputTensor, Plan, PlannedTensor, path_in, plan_files, routes
from transaxle.engine.plan.recoding import (
    buffers_of,
    check_restated,
    choose_to_encode,
    config_notes,
    make_recode,
    note_without_config,
    place_notes,
    refuse_reordered,
    rewrite_configs,
    steps_by_file,
    to_hub_encoding,
    unread_code_notes,
    value_changes,
)
from transaxle.engine.plan.training_beside import (
    has_state_of_other_names,
    refuse_misplaced_state,
    state_dict_nesting,
    state_notes,
    unwritten_items,
    whole_targets,
    without_training,
    writable_items,
)
from transaxle.engine.source import Source
from transaxle.engine.views.decoded import join_notes, rename_groups, without_notes
from transaxle.engine.views.encode import Encode
from transaxle.engine.views.encoded import View, describes_codes
from transaxle.errors import Refusal, TransaxleError, Where, gathered, in_both_languages, refuse
from transaxle.families import is_dialect
from transaxle.formats import registry
from transaxle.formats.catalog import ITEM_BITS, Draft, Entry, Extent, Spec, nbytes
from transaxle.formats.registry import MANIFEST, SAFETENSORS, SCRATCH, Format, builtin, get_format, without_gc, writable
from transaxle.formats.storage.storage import as_text
from transaxle.formats.training_state import (
    GROUPS,
    LEFT_BEHIND,
    MEGATRON,
    OPTIMIZER,
    ROOT,
    RUN,
    group_numbers,
    with_full_precision,
)
from transaxle.move.transfer import Transfer, lower
from transaxle.options import SHARD_SIZE
from transaxle.spans import stage

_LARGEST = 1 << 44
"""Largest number of elements that a tensor may plausibly have."""
_FRAMEWORK = {"format": "pt"}
"""Header metadata that programs expect in every safetensors file."""


class Prepared(msgspec.Struct, frozen=True):
    """A plan, with the open source and the layout of the target files that executing the plan needs."""

    plan: Plan
    """The plan of the conversion."""
    checkpoint: Checkpoint
    """The open source checkpoint."""
    draft: Draft
    """The target's files, with the bytes (headers) that are known before any tensor is copied."""
    check_source: bool = True
    """Whether the bytes that are read are checked against the source's own hashes and checksums, if it has any."""


HUB = (SAFETENSORS.name, "hf")
"""File format and dialect of a model on a hub; it has optimizer state only on request, because readers expect none."""


def for_hub(to: str) -> bool:
    """Return whether a text `FORMAT[:DIALECT]` is the layout of a model on a hub; raises errors of `parse_to`."""
    form, label = parse_to(to)
    return (form, (label or IDENTITY).partition("@")[0]) == HUB


@without_gc()
@stage("plan")
def make_plan(
    checkpoint: Checkpoint,
    to: str,
    *,
    shard_size: int = SHARD_SIZE,
    allow_lossy: bool = False,
    strict: bool = False,
    check_source: bool = True,
    target: str | None = None,
    encode: Encode | None = None,
    degrees: Degrees | None = None,
) -> Prepared:
    """Plan a conversion of an open checkpoint.

    Args:
        checkpoint: the open source checkpoint.
        to: file format and dialect of the target, written as `FORMAT[:DIALECT]`.
        shard_size: largest number of bytes of tensors in one file.
        allow_lossy: whether to allow the arithmetic of a dialect, which rounds values.
        strict: whether to refuse tensors that the target dialect does not know, instead of keeping their names.
        check_source: whether the bytes that are read are checked against the source's own hashes and checksums.
        target: path or URL of the target; a target that is a single file has no shards.
        encode: which tensors to encode, and in which number format.
        degrees: parallel degrees of a target with separate files for each rank.

    Returns:
        The plan, with all refusals in `plan.refusals`; only usage errors and unreadable sources raise an error.
    """
    if shard_size < 1:
        raise ValueError(f"shard_size must be positive, not {shard_size}")
    to, checkpoint = _with_view_dialect(checkpoint, to), checkpoint.stored
    checkpoint, form, label, hub_refusals, known_view = _choose_target(checkpoint, to, degrees)
    view, names, problems, notes = _translate(checkpoint, (form, label), encode, known_view, bare=label == to)
    unknown = checkpoint.refuse_foreign(label) or checkpoint.refuse_half_converted(label, view)
    problems += [*hub_refusals, *checkpoint.container.unread, *unknown, *refuse_name(target, form)]
    problems += [refuse_without_line(name, label) for name in view.kept_names if strict and not unknown]
    single, source = is_one_file(target), checkpoint.source_of(label)
    options = {**_draft_options(checkpoint, view, source, get_format(form), problems), "sealed": single}
    outputs = _outputs_by_name(_outputs(checkpoint, view, names, encode, options["training"]), problems)
    options |= _ranks_options(checkpoint, get_format(form), label, outputs, degrees, view.axes, problems)
    draft, lost = _draft_files(checkpoint, (form, label), outputs, options, None if single else shard_size, problems)
    tensors = _plan_tensors(source, outputs, draft, allow_lossy, problems)
    checks = plan_checks(source, view.checks, problems) if view.checks or checkpoint.container.twins else ()
    container, recoding = checkpoint.container, checkpoint.container.recoding
    recodes = bool(names or recoding.computed or recoding.configs)
    restated = not single and (recodes or label != IDENTITY or checkpoint.settings.config is not None)
    left_out: Mapping[str, bytes | None] = dict.fromkeys(container.carried if single else ())
    configs = rewrite_configs(checkpoint, (form, label), view, outputs.values(), problems) if restated else left_out
    draft, carried = _with_other_files(checkpoint, draft, configs, problems)
    reading = checkpoint.reading if label != IDENTITY else None
    plan = Plan(
        source=as_text(checkpoint.path),
        source_format=checkpoint.format,
        format=form,
        family=reading.family.name if reading else checkpoint.family,
        from_dialect=checkpoint.dialect,
        dialect=pick_dialect(reading.family, label).label if reading else (checkpoint.dialect or IDENTITY),
        tensors=tuple(tensors),
        checks=tuple(checks),
        routes=routes(checkpoint.bound, view.targets.values()) if reading else (),
        **plan_files(draft, carried),
        kept=view.kept_names,
        ignored=(*view.ignored, *container.left, *container.ignored, *lost, *_configs_left_out(configs)),
        aliases=dict(view.aliases),
        axes=sizes_to_record(view.axes, reading.family, label) if reading else dict(view.axes),
        refusals=tuple(problems),
        recoded=value_changes(checkpoint, outputs, tensors) if recodes else (),
        computed=steps_by_file(checkpoint.container),
        **plan_grafts(recoding, outputs.values(), path_in(get_format(form).model_folder, ""), carried),
        allow_lossy=allow_lossy,
        stayed=recoding.stayed,
        counted=axes_without_size(checkpoint.bound, checkpoint.sizes, view.axes) if reading else {},
        notes=(*draft.notes, *notes, *_target_notes(checkpoint, draft, configs, to, None if single else carried)),
    )
    return Prepared(plan, checkpoint, draft, check_source)


def _with_other_files(
    checkpoint: Checkpoint, draft: Draft, configs: Mapping[str, bytes | None], problems: list[Refusal]
) -> tuple[Draft, dict[str, int]]:
    """Return the target's draft with rewritten configs, and the sizes of the files that are copied unchanged.

    Args:
        checkpoint: the source checkpoint.
        draft: layout of the files with tensors.
        configs: file name -> new content; None means that the file is omitted.
        problems: list to which refusals of files that cannot be copied are added.
    """
    carried = {name: size for name, size in _files_to_copy(checkpoint, draft, problems).items() if name not in configs}
    problems.extend(refuse_clashes((*draft.files, *carried)))
    folder = get_format(draft.format).model_folder
    texts = {path_in(folder, name): text for name, text in configs.items() if text is not None}
    return draft.with_files(texts), {path_in(folder, name): size for name, size in carried.items()}


def _configs_left_out(configs: Mapping[str, bytes | None]) -> Iterator[str]:
    return (name for name, text in configs.items() if text is None)


def _target_notes(
    checkpoint: Checkpoint, draft: Draft, configs: Mapping[str, bytes | None], to: str, carried: Collection[str] | None
) -> Iterator[str]:
    """Yield notes about the target's config, an adapter, and file formats that the dialect's programs can load.

    Args:
        checkpoint: the source checkpoint.
        draft: layout of the target's files.
        configs: file name -> content of rewritten config files.
        to: file format and dialect of the target, written as `FORMAT[:DIALECT]`.
        carried: files that are copied beside the tensors; None means that the target is a single file.
    """
    yield from place_notes(checkpoint)
    yield from config_notes(checkpoint, configs) if checkpoint.settings.config else ()
    start = len(path_in(get_format(draft.format).model_folder, ""))
    yield from edit_notes(checkpoint.container.storage, [name[start:] for name in carried or ()])
    yield from checkpoint.container.recoding.notes
    framework, loadable = _loadable_targets(to)
    if loadable:
        ways_out = f"write --to {' or --to '.join(loadable)}"
        yield in_both_languages(f"safetensors with the names of {to}; for what {framework} loads, {ways_out}")
    has_config = CONFIG in (*checkpoint.container.carried, *draft.files)
    if for_hub(to) and carried is not None and not has_config and not checkpoint.stored_names.is_adapter:
        yield in_both_languages(note_without_config(checkpoint))


def _loadable_targets(to: str) -> tuple[str, Sequence[str]]:
    """Return a dialect's framework and targets that it can load; no targets if the framework can load safetensors."""
    with_dialects = (kind for kind in builtin().values() if kind.draft and kind.dialects)
    of_megatron = [kind for kind in with_dialects if kind is not registry.VLLM_SHARDED]
    name = to.partition("@")[0]
    if name == "te" or any(to in kind.dialects for kind in of_megatron):
        return "Megatron", [kind.name for kind in of_megatron]
    by_dialect = {
        "torchtitan": ("torchtitan", f"dcp:{to}"),
        "automodel": ("Automodel", "hf"),
        registry.VLLM: ("vLLM", "hf", registry.VLLM_SHARDED.name),
    }
    framework, *loadable = by_dialect.get(name, (to,))
    return framework, loadable


def _with_view_dialect(checkpoint: Checkpoint, to: str) -> str:
    """Return `FORMAT[:DIALECT]`; if it names no dialect, add the view's dialect, unless the format has its own."""
    form, label = parse_to(to)
    return (
        f"{form}:{checkpoint.shown_as}"
        if label is None and checkpoint.shown_as and not get_format(form).dialects
        else to
    )


@stage("find tables")
def _choose_target(
    checkpoint: Checkpoint, to: str, degrees: Degrees | None
) -> tuple[Checkpoint, str, str, list[Refusal], View | None]:
    """Return the source to write, format and dialect of the target, refusals, and the translation if it is known.

    Raises:
        Refused: with code UNSUPPORTED, if the format cannot be written, or not for several ranks.
        UsageError: any error that `parse_to` or `_default_dialect` raises.
    """
    form, label = parse_to(to)
    kind = get_format(form)
    is_adapter = checkpoint.stored_names.is_adapter
    # an unknown dialect label is reported before unknown tensor names
    if label and not is_adapter and checkpoint.family is None:
        check_dialect(label, checkpoint.settings.families, () if ":" in to else writable())
    if label and label != IDENTITY and is_adapter:
        checkpoint, label = checkpoint.as_dialect(label), IDENTITY
    elif label and checkpoint.family is None and checkpoint.stored_names.has_names_of(label):
        label = IDENTITY
    as_opened, known_view = checkpoint, None
    if label:
        target_dialect = label
    else:
        target_dialect, known_view = _default_dialect(checkpoint, kind)
    if "parts" in kind.draft_takes or degrees is not None:
        # only a few formats have separate files for each rank
        from transaxle.engine.plan.rank_parts import check_degrees, fit_engine, pad_for_ranks

        check_degrees(kind, degrees, f":{label}" if label and ":" in to else "")
        if "ones" in kind.draft_takes:
            checkpoint = fit_engine(checkpoint, target_dialect, degrees or Degrees())
            return checkpoint, form, target_dialect, [], known_view if checkpoint is as_opened else None
        if target_dialect != IDENTITY and "degrees" in kind.draft_takes:
            checkpoint = pad_for_ranks(checkpoint, target_dialect, degrees or Degrees())
    if for_hub(to):
        weights, refusals = _prepare_for_hub(checkpoint)
        return weights, form, target_dialect, refusals, known_view if weights is as_opened else None
    checkpoint = _prepare_for_format(checkpoint, kind)
    if kind.full_precision:  # the format stores a parameter's values together with its optimizer state
        checkpoint = checkpoint.with_state_of(frozenset())
        if target_dialect == IDENTITY and has_state_of_other_names(checkpoint):
            target_dialect = checkpoint.reading.dialect.label
    return checkpoint, form, target_dialect, [], known_view if checkpoint is as_opened else None


def _default_dialect(checkpoint: Checkpoint, kind: Format) -> tuple[str, View | None]:
    """Return the default dialect of a format: the first of the format's own dialects that can be written.

    If the choice required a translation of the tensors, the translation is returned too.

    Raises:
        UsageError: with code UNKNOWN_FAMILY or AMBIGUOUS, if the format has its own dialects, but the family is unknown
            or has none of them.
    """
    if not kind.dialects:
        return IDENTITY, None
    family = checkpoint.reading.family
    own_labels = [label for label in kind.dialects if family.dialect(label) is not None]
    if not own_labels:
        listed = ", ".join(family.labels)
        message = f"{kind.name} has tensors of the dialect {kind.dialects[0]}, and family {family.name} has: {listed}"
        hint = f"Add the dialect with --rules FILE, or keep the present tensor names: --to {kind.name}:{IDENTITY}"
        raise refuse("UNSUPPORTED", message, hint=hint)
    for label in own_labels[:-1]:
        view = checkpoint.translation(label)
        if not view.refusals:
            return label, view
    return own_labels[-1], None


def _prepare_for_hub(checkpoint: Checkpoint) -> tuple[Checkpoint, list[Refusal]]:
    """Return a checkpoint whose weights are encoded as programs that load from a hub expect, and refusals."""
    weights, refusals = to_hub_encoding(without_training(checkpoint))
    return (weights.without_optimizer() if weights.settings.optimizer is None else weights), refusals


def _prepare_for_format(checkpoint: Checkpoint, kind: Format) -> Checkpoint:
    """Return a checkpoint with full-precision weights, if the format cannot store weights twice.

    The full-precision weights replace low-precision ones, so the user may forbid it with `--weights lp`. With that
    option the target has no place for the optimizer's copies, which is an error.
    """
    if not kind.full_precision or checkpoint.settings.weights is not None:
        return checkpoint
    container = with_full_precision(checkpoint.container, require_copies=False)
    if container.entries.keys() == checkpoint.container.entries.keys():
        return checkpoint
    return Checkpoint(container, checkpoint.settings, None, None, checkpoint.undecoded)


@stage("translate")
def _translate(
    checkpoint: Checkpoint, to: tuple[str, str], encode: Encode | None, known_view: View | None = None, *, bare: bool
) -> tuple[View, Sequence[str], list[Refusal], Sequence[str]]:
    """Return the target's tensors, the names of tensors to encode, refusals, and notes for the user.

    A dialect may have different table lines for encoded tensors, so the layout depends on which tensors are encoded.
    """
    form, target_dialect = to
    if bare and target_dialect != IDENTITY and checkpoint.reading.family.dialect(target_dialect) is None:
        pick_dialect(checkpoint.reading.family, target_dialect, writable())  # the error suggests formats too
    view = known_view or checkpoint.translation(target_dialect)
    recoding = checkpoint.container.recoding
    if target_dialect == IDENTITY and (encode is not None or checkpoint.decoded or recoding.configs):
        catalog = checkpoint.catalog
        view = replace(view, encoded=catalog.encoded, refusals=catalog.refusals)
    names: Sequence[str] = ()
    misfits: list[Refusal] = []
    notes: Sequence[str] = ()
    if encode is not None:
        names, misfits, notes = choose_to_encode(checkpoint, target_dialect, view, encode)
        if target_dialect != IDENTITY:
            view = checkpoint.translation(target_dialect, make_recode(names, encode.encoding))
    if target_dialect == IDENTITY and checkpoint.settings.family is not None and not checkpoint.stored_names.is_adapter:
        # If the user names the family, shapes must also agree with the family's mapping rules.
        own_view = checkpoint.translation(checkpoint.reading.dialect.label)
        misfits.extend(refusal for refusal in own_view.refusals if refusal.code == "SHAPE_MISMATCH")
    if target_dialect == IDENTITY and (names or checkpoint.decoded or recoding.encodings):
        misfits.extend(refuse_reordered(checkpoint, names))
    if "ones" in get_format(form).draft_takes:
        from transaxle.engine.plan.rank_parts import without_foreign

        view, notes = without_foreign(view)
    if any(name.startswith(OPTIMIZER) for name in view.targets):
        misfits += refuse_misplaced_state(checkpoint, view, get_format(form), target_dialect)
        notes = [*notes, *state_notes(checkpoint, view, target_dialect)]
    inexact, of_restated = check_restated(checkpoint, to, view)
    notes = (*view.notes, *notes, *of_restated, *unread_code_notes(view, names, form, target_dialect))
    notes = (*notes, *(lack.text for lack in find_lacks(checkpoint, required=target_dialect == IDENTITY)))
    return view, [name for name in names if name in view.targets], [*view.refusals, *misfits, *inexact], notes


def _outputs(
    checkpoint: Checkpoint, view: View, names: Iterable[str], encode: Encode | None, training: Collection[Any]
) -> list[OutputTensor]:
    """Return the output tensors of a view: encoded tensors as buffers, tensors stored as plain data omitted."""
    encoded, stored, outputs = frozenset(names), view.stored, list[OutputTensor]()
    omitted = frozenset(item.name for item in checkpoint.container.training if item.path in training)
    for name, target in view.targets.items():
        if name in omitted:
            continue
        if encode is not None and name in encoded:
            outputs.extend(buffers_of(view, name, encode))
        elif name in stored:
            outputs.append(OutputTensor(name, *stored[name], target))
        else:
            outputs.append(OutputTensor(name, target.dtype, target.layout.shape, target))
    return outputs


def _outputs_by_name(written: Sequence[OutputTensor], problems: list[Refusal]) -> dict[str, OutputTensor]:
    """Return name -> output tensor; add refusals of duplicate names and implausible sizes to `problems`."""
    outputs = dict(zip(map(_name, written), written, strict=True))
    too_large = {shape for shape in set(map(_shape, written)) if prod(shape) > _LARGEST}
    if len(outputs) == len(written) and not too_large:
        return outputs
    outputs = {}
    for product in written:
        if product.shape in too_large:  # computing the layout of so large a tensor would never end
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
def _draft_files(
    checkpoint: Checkpoint,
    to: tuple[str, str],
    written: Mapping[str, OutputTensor],
    draft_options: Mapping[str, Any],
    shard_size: int | None,
    problems: list[Refusal],
) -> tuple[Draft, list[str]]:
    """Lay out the target's files in a format and dialect; also return the source's notes that cannot be stored."""
    form, target_dialect = to
    specs = [Spec(product.name, product.dtype, product.shape) for product in written.values()]
    keys = [natural(spec.name) for spec in specs]
    specs = [specs[at] for at in sorted(range(len(specs)), key=keys.__getitem__)]
    files = checkpoint.container.files
    metadata, left_out = dict(_FRAMEWORK), list[str]()
    for key, value in _notes(checkpoint, target_dialect).items():
        if key == LEFT_BEHIND:
            left_out.extend(unwritten_items(checkpoint, draft_options["training"]))
        elif not isinstance(value, str) or key == ROOT or _FRAMEWORK.get(key) == value:
            continue
        elif checkpoint.format != form or key.partition(":")[0] in files:
            left_out.append(f"note {key}")  # the note concerns the source's file format, or only one of its shard files
        else:
            metadata[key] = value
    kind = get_format(form)
    if draft_options["groups"] and not kind.draft_takes & {"groups", "run"}:
        left_out.append(GROUPS)
    problems.extend(refuse_dtypes(kind, specs))
    nesting = state_dict_nesting(checkpoint, written) if draft_options["sealed"] else None
    options = {**draft_options, "nesting": nesting}
    accepted = {name: option for name, option in options.items() if name in kind.draft_takes}
    try:
        drafter = kind.drafter
        with kind.answerable("its draft"):
            draft = drafter(specs, metadata=metadata, shard_size=None if "stem" in accepted else shard_size, **accepted)
        if kind.package:
            from transaxle.formats.package_checks import check_draft

            check_draft(kind, draft, specs)
        return draft, left_out
    except TransaxleError as error:
        problems.extend(error.refusals)
        return Draft(form, {}, {}, ()), left_out


def _notes(checkpoint: Checkpoint, target_dialect: str) -> dict[str, Any]:
    """Return those entries of the container's metadata that are also true of the target."""
    notes = dict(checkpoint.metadata)
    if not describes_codes(notes):
        return notes
    return join_notes(notes) if target_dialect == IDENTITY else without_notes(notes)


def _draft_options(
    checkpoint: Checkpoint, view: View, source: Source, kind: Format, problems: list[Refusal]
) -> dict[str, Any]:
    """Return options for the layout of the target's files: run settings, reader of small tensors, cuts."""
    stored_groups = checkpoint.container.metadata.get(GROUPS, ())
    groups = rename_groups(stored_groups, view.targets, problems) if stored_groups else []

    def read(name: str) -> bytes:
        return StoredTensor(name, *view.form_of(name), view.targets[name], source).tobytes()

    run = {**checkpoint.metadata.get(RUN, {}), MEGATRON: checkpoint.metadata.get(MEGATRON, {}), GROUPS: groups}
    reading = checkpoint.stored_names.reading_or_error
    if "cuts" not in kind.draft_takes or isinstance(reading, TransaxleError):
        cuts = {}
    else:
        cuts = chunk_cuts(view.targets, reading.family.name_axes_by_tensor)
    in_order = checkpoint.container.in_order and group_numbers(groups) == group_numbers(stored_groups)
    stem = {"stem": ADAPTER_STEM} if checkpoint.stored_names.is_adapter else {}
    training = writable_items(checkpoint, kind) if checkpoint.container.training else {}
    options = {"groups": groups, "run": run, "read": read, "config": checkpoint.config, "cuts": cuts, **stem}
    paths = {item.name: item.path for item in checkpoint.container.training if item.name is not None}
    whole = whole_targets(view, checkpoint.container.whole) if "whole" in kind.draft_takes else None
    return {**options, "training": training, "in_order": in_order, "training_paths": paths, "whole": whole}


def _ranks_options(
    checkpoint: Checkpoint,
    kind: Format,
    dialect: str,
    names: Collection[str],
    degrees: Degrees | None,
    axes: Mapping[str, int],
    problems: list[Refusal],
) -> dict[str, Any]:
    """Return layout options for a target that has separate files for each rank, or whose layout depends on the number
    of ranks.
    """
    if "parts" not in kind.draft_takes:
        return {} if degrees is None else {"fsdp" if "fsdp" in kind.draft_takes else "degrees": degrees}
    from transaxle.engine.plan.rank_parts import engine_draft_options, rank_draft_options

    options_of = engine_draft_options if "ones" in kind.draft_takes else rank_draft_options
    return options_of(checkpoint, dialect, names, degrees or Degrees(), axes, problems)


def _files_to_copy(checkpoint: Checkpoint, draft: Draft, problems: list[Refusal]) -> dict[str, int]:
    """Return file name -> size, for the source's files that are copied beside the tensors."""
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
def _plan_tensors(
    source: Source, written: Mapping[str, OutputTensor], draft: Draft, allow_lossy: bool, problems: list[Refusal]
) -> list[PlannedTensor]:
    """Plan every tensor, in file order; if the files could not be laid out, still collect refusals of tensors."""
    planned, draft_copies = list[PlannedTensor](), draft.copies
    entries: Mapping[str, Entry | None] = draft.entries or dict.fromkeys(written)
    for name, entry in entries.items():
        output = written[name]
        target = output.target
        try:
            arithmetic = affine_steps(target, allowed=allow_lossy) if target.computed else None
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
        copies = _places(entry, draft_copies[name]) if draft_copies and name in draft_copies else ()
        rule, step = target.rule, output.step
        planned.append(PlannedTensor(name, dtype, shape, places, size, rule, transfers, arithmetic, step, copies))
    return planned


def _places(entry: Entry, extents: Sequence[Extent]) -> tuple[Transfer, ...]:
    """Return where a tensor's bytes are written in the target's files, sorted by position in the tensor."""
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


def require_ready(prepared: Prepared) -> Plan:
    """Return the plan if it has no refusals.

    Raises:
        TransaxleError: one error with all refusals of the plan.
    """
    if prepared.plan.refusals:
        raise gathered(prepared.plan.refusals)
    return prepared.plan


def sizes_to_record(sizes: Mapping[str, int], family: Family, label: str) -> dict[str, int]:
    """Return the axis sizes to record for a target dialect: all sizes except padding that the dialect does not have."""
    target = family.dialect(label)
    if target is None:
        return dict(sizes)
    padding = {axis for dialect in family.dialects for axis in _padding(dialect)} - _padding(target)
    return {axis: size for axis, size in sizes.items() if axis not in padding}


def _padding(dialect: Dialect) -> set[str]:
    return {axis for line in dialect.lines for axis in line.expression.padding}


def axes_without_size(bound: BoundNames, given_sizes: Sizes, all_sizes: Mapping[str, int]) -> dict[str, int]:
    """Return axis -> size counted in tensor names, for axes in names (layers, experts) whose size nothing else states.

    A gap in the numbers is detected, but a missing last layer cannot be detected. So a plan shows the sizes that were
    counted in names.

    Args:
        bound: the stored tensor names, matched with their dialect.
        given_sizes: axis sizes from the config, the manifest and the user.
        all_sizes: all axis sizes, including sizes that follow from names and shapes.
    """
    name_axes = {axis for line, _ in bound.names for axis in line.name.axes}
    return {axis: all_sizes[axis] for axis in sorted(name_axes & all_sizes.keys() - given_sizes.at({}).keys())}


_PACKED_ENDS = (
    ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".rar",
)  # fmt: skip
_OTHER_ENDS = (
    ".arrow", ".bak", ".caffemodel", ".csv", ".dat", ".data", ".db", ".engine", ".feather", ".hdf", ".hdf5", ".json",
    ".llamafile", ".mar", ".mat", ".mlmodel", ".mlpackage", ".nemo", ".parquet", ".params", ".pb", ".pdparams", ".pt2",
    ".ptd", ".pte", ".rten", ".tensors", ".tmp", ".torch", ".torchscript", ".txt", ".weights", ".yaml", ".yml",
    ".zarr",
)  # fmt: skip
_PLACE = "This looks like a path: the target path is the second argument, and --to is the format to write."
_RENAME = "Rename one of the two tensors in the source."


def parse_to(to: str) -> tuple[str, str | None]:
    """Split a target `FORMAT[:DIALECT]`, or `DIALECT` alone, which means `safetensors:DIALECT`.

    Returns:
        The format and the dialect; None as dialect means the source's own names.

    Raises:
        UsageError: with code AMBIGUOUS, if the format is unknown, or the text is no name of a format or dialect.
        Refused: with code UNSUPPORTED, if the format cannot be written.
    """
    first, colon, second = to.partition(":")
    if not colon and (first == IDENTITY or is_dialect(first)):
        return SAFETENSORS.name, first  # checked first, because for a built-in dialect no plugins need to be searched
    kind = registry.find(first)
    if kind is not None and kind.draft:
        return first, second or None
    if kind is None and (colon or not first):
        raise registry.unknown_format(first, registry.writable(), _correct_format(first, second))
    if kind is not None:
        message = f"cannot write format {first!r}; formats that can be written: {', '.join(registry.writable())}"
        suggestion = next((name for name in registry.writable() if name.startswith(first)), None)
        raise refuse("UNSUPPORTED", message, hint=f"Did you mean {suggestion}?" if suggestion else "")
    if hint := _correct_name(to):
        raise refuse("AMBIGUOUS", f"{to!r} is neither FORMAT:DIALECT nor one of them", hint=hint)
    return SAFETENSORS.name, first


def _correct_format(first: str, second: str) -> str:
    """Return a correction of `first:second` whose first word is no format; return "" if there is none."""
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
    dialect = second if is_dialect(second) else first
    return f"{first} is a dialect; a format stands before the colon: {SAFETENSORS.name}:{dialect}"


def _correct_name(to: str) -> str:
    """Return a correction of a text that cannot be a name: a path, or a name with a wrong character for a colon."""
    words = re.split(r"[^\w@.-]+", to)
    if len(words) == 2:
        for form, label in (words, reversed(words)):
            if form in registry.writable() and (label == IDENTITY or is_dialect(label)):
                return f"Did you mean {form}:{label}?"
    if "/" in to or registry.is_one_file(to):
        return _PLACE
    return ""


def is_one_file(target: str | None) -> bool:
    """Return whether a target's name ends like that of a checkpoint in a single file (such as `.safetensors`)."""
    return target is not None and registry.is_one_file(target)


def refuse_name(target: str | None, form: str) -> Iterator[Refusal]:
    """Yield refusals if a file format cannot be written to a target with this name.

    A name that ends in `/` means a folder, whatever else the name looks like.
    """
    if target is None:
        return
    written = registry.find(form)
    endings = () if written is None else written.one_file
    if registry.is_one_file(target):
        if not target.endswith(endings):
            message = f"the ending of the name belongs to another format, and {form} is to be written"
            alternatives = [name for name in registry.writable() if target.endswith(registry.get_format(name).one_file)]
            name = f"End it in {endings[0]}" if endings else "Name a folder"
            hint = (
                f"{name}, or write another format: --to {' or --to '.join(alternatives)}."
                if alternatives
                else f"{name}."
            )
            yield Refusal("UNSUPPORTED", message, Where(target), hint)
        return
    lower, whole = target.lower(), (*registry.one_file_ends(), *endings)
    ending = next(
        (end for end in (*whole, *registry.foreign_ends(), *_PACKED_ENDS, *_OTHER_ENDS) if lower.endswith(end)), None
    )
    # a name like `.bin`, without a stem, means a hidden folder
    if ending is None or lower.rpartition("/")[2] == ending:
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


def refuse_clashes(names: Iterable[str]) -> list[Refusal]:
    """Return a refusal for every file name that some file system would confuse with another or a reserved name.

    Args:
        names: paths relative to the target folder, such as `a/b/c`, without Transaxle's own files.
    """
    spelled = {_fold_spelling(reserved): reserved for reserved in (MANIFEST, SCRATCH)}
    is_file_at = dict.fromkeys(spelled.values(), True)
    problems = []
    for name in names:
        parts = name.split("/")
        for count in range(1, len(parts) + 1):
            path, is_file = "/".join(parts[:count]), count == len(parts)
            spelling = spelled.setdefault(_fold_spelling(path), path)
            kind = is_file_at.setdefault(path, is_file)
            if spelling != path or kind != is_file or spelling in (MANIFEST, SCRATCH):
                message = f"on file systems that ignore case or accents it would be the same file as {spelling!r}"
                if spelling in (MANIFEST, SCRATCH):
                    message = f"the name {spelling} is reserved for Transaxle's own files"
                problems.append(Refusal("NAME_COLLISION", message, Where(name), _RENAME))
                break
    return problems


def _fold_spelling(name: str) -> str:
    """Return a key that is equal for two names that some file system treats as equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def refuse_without_line(name: str, dialect: str) -> Refusal:
    """Return the refusal of a tensor for which a dialect's table has no line."""
    message = f"dialect {dialect} has no line for this tensor"
    return Refusal("UNEXPECTED_TENSOR", message, Where(None, name), "Omit --strict.")


def refuse_dtypes(kind: Format, specs: Sequence[Spec]) -> Iterator[Refusal]:
    """Yield refusals of tensors whose dtypes a file format cannot store."""
    if kind.dtypes is None:
        return
    for spec in specs:
        if spec.dtype not in kind.dtypes:
            hint = "Choose a format that can store this dtype, or leave the tensor out."
            yield Refusal("UNSUPPORTED", f"{kind.name} has no dtype for {spec.dtype}", Where(None, spec.name), hint)
