"""Recoding: tensors whose values change because they are decoded, encoded, cast, merged or averaged.

A plan lists these tensors, and the target tensors that it encodes. When the plan is executed, their errors are
measured, and values that become infinite are refused.

A training run saves quantized weights as codes, scales and an amax under its own names. A hub needs the names and
numbers that programs which load from the hub know (`to_hub_encoding`). Config files that describe number formats are
rewritten so that they describe the target (`rewrite_configs`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Container as Holding
from contextlib import suppress
from math import isinf, prod
from typing import Any

import numpy as np
from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.layout.relayout import Target, factors
from transaxle.axes.notation.family import NumberFormat, Recode
from transaxle.encodings.conventions.convention import (
    COMPRESSED_TENSORS,
    CONVENTIONS,
    DEEPSEEK,
    MODELOPT,
    PREFERRED,
    TE,
    TE_NOTE,
    TORCHAO,
    TRAINED,
    hub_buffers,
    hub_convention,
    hub_global_scales,
    refusal_for_hub,
    training_only,
)
from transaxle.encodings.conventions.packed_methods import PACKED_FILES
from transaxle.encodings.conventions.quantization import MODELOPT_CONFIG, module_of, read
from transaxle.encodings.conventions.restating import describe_inputs, dtype_of_model
from transaxle.encodings.conventions.rewriting import rewrite_config
from transaxle.encodings.encoding import FLOAT8_BLOCK, MXFP8, NVFP4, PLAIN, EncodedTensor, Error, Role
from transaxle.encodings.value_steps import CASTING, RecodedTensor
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.recognise import IDENTITY
from transaxle.engine.checkpoint.settings import CONFIG, read_stored_config
from transaxle.engine.plan.planned import OutputTensor, PlannedTensor
from transaxle.engine.plan.transformers_reader import HUB, MEMORY, misread_targets, reader_notes
from transaxle.engine.source import Source
from transaxle.engine.views.encode import Encode, Step, choose
from transaxle.engine.views.encoded import View
from transaxle.engine.wording import plural
from transaxle.errors import Refusal, TransaxleError, Where, gathered, in_both_languages
from transaxle.formats.catalog import Container, Entry, Extent, Recoding
from transaxle.formats.registry import SAFETENSORS, is_of_model
from transaxle.formats.storage.storage import InMemoryFile, VirtualFiles, is_url
from transaxle.formats.store.staging import storage_at
from transaxle.move.workers import Limits, limits, run_workers

_FILE = "\0restated "
"""Prefix of the names of the virtual files that contain recoded values."""
_COUNTED = 4
"""Number of tensors whose inexact values are counted; of all further tensors only the first such value is read."""


def to_hub_encoding(checkpoint: Checkpoint) -> tuple[Checkpoint, list[Refusal]]:
    """Return a checkpoint encoded as programs that load from a hub expect, and refusals of tensors that cannot be
    encoded so.

    A checkpoint whose config describes its quantization is returned unchanged. Weights in safetensors files under
    DeepSeek's names are not changed either, because models on hubs have such files.

    Args:
        checkpoint: the checkpoint with its stored names.
    """
    names = checkpoint.container.entries
    training_names = training_only(names, names)
    if training_names:
        checkpoint = _with_container(checkpoint, checkpoint.container.without(training_names))
    catalog = checkpoint.catalog
    if catalog.quantization is not None or catalog.refusals:
        return checkpoint, []
    trained_conventions = TRAINED - {DEEPSEEK} if checkpoint.format == SAFETENSORS.name else TRAINED
    trained_tensors = [tensor for tensor in catalog.encoded.values() if tensor.convention in trained_conventions]
    to = hub_convention(tensor.encoding for tensor in trained_tensors)
    if not trained_tensors or all(tensor.convention == to.name for tensor in trained_tensors):
        return checkpoint, []
    container = checkpoint.container
    if container.recoding.restated == TE:
        message = f"a hub's folder has such tensors in the convention {to.name}, because no config describes {TE}"
        hint = f"To keep the names:  --to {SAFETENSORS.name}:{IDENTITY}. For the hub:  --restate {to.name}."
        return checkpoint, [Refusal("UNSUPPORTED", message, Where(None, trained_tensors[0].name), hint)]
    values = dtype_of_model(checkpoint.config)
    files: dict[str, InMemoryFile] = {}
    entries: dict[str, Entry] = {}
    problems = [refusal for tensor in trained_tensors if (refusal := refusal_for_hub(tensor)) is not None]
    for tensor in trained_tensors:
        for buffer in hub_buffers(tensor, to):
            entry = names[buffer.stored]
            entries[buffer.stored] = replace(entry, name=buffer.name, dtype=buffer.dtype or entry.dtype)
        if Role.GLOBAL in tensor.parts:
            stored = entries[tensor.parts[Role.GLOBAL]]
            scales, refusal = hub_global_scales(tensor, _amaxes(container, tensor), to, values)
            problems += [refusal] if refusal is not None else []
            files[_FILE + stored.name] = InMemoryFile(scales.astype("<f4").tobytes())
            extent = Extent((0,) * len(stored.shape), stored.shape, _FILE + stored.name, 0)
            entries[tensor.parts[Role.GLOBAL]] = replace(stored, extents=(extent,))
    renamed_entries = {
        entries[old].name if old in entries else old: entries.get(old, entry)
        for old, entry in container.entries.items()
    }
    metadata = {key: value for key, value in container.metadata.items() if key != TE_NOTE}
    storage = VirtualFiles(container.storage, files)
    return _with_container(
        checkpoint, replace(container, storage=storage, entries=renamed_entries, metadata=metadata)
    ), problems


def _amaxes(container: Container, tensor: EncodedTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:

    name = tensor.parts[Role.GLOBAL]
    return Source(container).read(name).view("<f4").astype(np.float32)


def _with_container(checkpoint: Checkpoint, container: Container) -> Checkpoint:
    return Checkpoint(container, checkpoint.settings, None, None, checkpoint.undecoded)


def make_recode(names: Collection[str], encoding: str) -> Recode:
    """Return a function that maps each target tensor to the number format in which it is written."""
    encoded = frozenset(names)
    return lambda name, form: NumberFormat(form.dtype, encoding) if name in encoded else form


def target_components(checkpoint: Checkpoint, view: View | None) -> dict[str, Sequence[str]]:
    """Return target tensor name -> its logical tensors, for each target tensor that the family's table reads.

    Args:
        checkpoint: the source checkpoint.
        view: the tensors of the target; None means the source's own names.
    """
    if view is not None:
        return {
            name: [part.component for part in target.parts] for name, target in view.targets.items() if target.component
        }
    if checkpoint.family is None:
        return {}
    bound_names = checkpoint.bound.names.items()
    return {name: line.expression.components for (line, _), names in bound_names for name in names.values()}


def with_output_rows(checkpoint: Checkpoint, view: View | None) -> set[str]:
    """Return the target tensors whose rows are not aligned with the last axis (the layer's input) of a logical tensor.

    For a description of the arguments see `target_components`.
    """
    if checkpoint.family is None:
        return set()
    inputs = {name: tensor.axes[-1] for name, tensor in checkpoint.reading.family.tensors.items() if tensor.axes}
    rows: list[tuple[str, str, Sequence[str]]]
    if view is None:
        bound_names = checkpoint.bound.names.items()
        rows = [
            (name, component, line.expression.axes_of(component))
            for (line, _), names in bound_names
            for name in names.values()
            for component in line.expression.components
        ]
    else:
        rows = [
            (name, component, [axis for axis, *_ in shares[-1].axes])
            for name, target in view.targets.items()
            for component, shares in target.layout.shares.items()
            if shares
        ]
    return {name for name, component, axes in rows if axes and factors(axes[-1])[-1] != inputs.get(component, axes[-1])}


def choose_to_encode(
    checkpoint: Checkpoint, target_dialect: str, view: View, encode: Encode
) -> tuple[list[str], list[Refusal], list[str]]:
    """Choose which tensors of the target to encode.

    Args:
        checkpoint: the source checkpoint.
        target_dialect: dialect of the target.
        view: the tensors of the target.
        encode: the user's request to encode tensors.

    Returns:
        Names of the tensors to encode; refusals of requested tensors that cannot be encoded; and notes about codes that
        transformers would read wrongly.

    Raises:
        UsageError: any error that `choose` raises.
    """
    target = None if target_dialect == IDENTITY else view
    parts, turned = target_components(checkpoint, target), with_output_rows(checkpoint, target)
    label = (checkpoint.dialect if target_dialect == IDENTITY else target_dialect) or ""
    if checkpoint.family is None or label.partition("@")[0] not in (HUB, MEMORY):
        return choose(view, encode, parts, turned)
    family = checkpoint.reading.family
    unread = misread_targets(family, view, encode.encoding, parts, turned)
    names, misfits, notes = choose(view, encode, parts, turned, unread)
    notes.extend(reader_notes(family, view, encode.encoding, parts, names, label))
    return names, misfits, notes


def check_restated(checkpoint: Checkpoint, to: tuple[str, str], view: View) -> tuple[list[Refusal], list[str]]:
    """Return refusals of restated tensors whose values would change, and notes on what transformers reads of the
    others.

    Args:
        checkpoint: the source checkpoint.
        to: file format and dialect of the target.
        view: the tensors of the target.
    """
    form, target_dialect = to
    refusals, notes = _refuse_inexact(checkpoint.container), list[str]()
    if (form, target_dialect) != (SAFETENSORS.name, IDENTITY) and checkpoint.container.recoding.restated == TORCHAO:
        message = (
            "the headers of safetensors files describe torchao's tensors under the names that they have in the source"
        )
        refusals.append(Refusal("UNSUPPORTED", message, hint=f"Keep the names:  --to {SAFETENSORS.name}:{IDENTITY}."))
    label = (checkpoint.dialect if target_dialect == IDENTITY else target_dialect) or ""
    if not checkpoint.container.recoding.configs or label.partition("@")[0] not in (HUB, MEMORY):
        return refusals, notes
    buffers = {stored for tensor in view.encoded.values() for stored in tensor.parts.values()}
    weights = {name: view.targets[tensor.parts[Role.CODES]] for name, tensor in view.encoded.items()}
    plain = {name: target for name, target in view.targets.items() if name not in buffers}
    by_weight = replace(view, targets={**plain, **weights}, encoded={})
    parts = target_components(checkpoint, None if target_dialect == IDENTITY else by_weight)
    for encoding, convention in _MISREAD.items():
        kinds = view.encoded.items()
        names = [name for name, each in kinds if (each.encoding.name, each.convention) == (encoding, convention)]
        if names:
            notes += reader_notes(checkpoint.reading.family, by_weight, encoding, parts, names, label)
    if any(tensor.convention == MODELOPT for tensor in view.encoded.values()):
        notes.append("transformers 5.24 has no reader for files of ModelOpt; vLLM, SGLang and TensorRT-LLM have")
    return refusals, notes


_MISREAD = {FLOAT8_BLOCK.name: DEEPSEEK, MXFP8.name: COMPRESSED_TENSORS, NVFP4.name: COMPRESSED_TENSORS}
"""Name of an encoding -> convention in which transformers misreads some tensors of this encoding."""


def steps_by_file(container: Container) -> dict[str, tuple[RecodedTensor, ...]]:
    """Return virtual file -> the steps, in order, that compute the tensor in that file from stored tensors.

    Each tensor has a single virtual file, the file of its last step; a decoded or cast mean also has the step that
    averages.
    """
    by_name: dict[str, list[RecodedTensor]] = {}
    for tensor in container.recoding.computed.values():
        by_name.setdefault(tensor.step.name, []).append(tensor.step)
    return {file: tuple(by_name[tensor.step.name]) for file, tensor in container.recoding.computed.items()}


def refuse_reordered(checkpoint: Checkpoint, names: Collection[str]) -> Iterator[Refusal]:
    """Yield refusals of recoding under stored names, if the dialect orders the dims of codes differently from those of
    values.

    Args:
        checkpoint: the source checkpoint.
        names: names of the tensors to encode; the tensors to decode or recode are listed in the checkpoint.
    """
    changing = {*checkpoint.decoded, *checkpoint.stored_names.encodings_in_files, *names}
    if not changing or checkpoint.family is None:
        return
    for (line, slot), names_of_line in checkpoint.bound.names.items():
        if line.by_form and slot == WEIGHT:
            for name in [name for name in names_of_line.values() if name in changing]:
                message = f"{line.text}\nthe order of the dims depends on the encoding, which this conversion changes"
                hint = f"Name the dialect, so that the dims are reordered:  --to FORMAT:{checkpoint.dialect}."
                yield Refusal("UNSUPPORTED", message, Where(None, name), hint)


def value_changes(
    checkpoint: Checkpoint, outputs: Mapping[str, OutputTensor], planned: Sequence[PlannedTensor]
) -> tuple[RecodedTensor, ...]:
    """Return all steps of a plan that change values of tensors, such as casts.

    Args:
        checkpoint: the source checkpoint.
        outputs: tensor name -> tensor, for all output tensors.
        planned: the planned tensors with their transfers.
    """
    container = checkpoint.container
    read_files = {transfer.file for tensor in planned for transfer in tensor.transfers}
    averaged, changed = list[RecodedTensor](), list[RecodedTensor]()
    for file, tensor in container.recoding.computed.items():
        # A target reads this tensor directly, or reads a second tensor that is computed from it.
        entry = container.entries.get(tensor.step.name)
        if file in read_files or (
            entry is not None and read_files.intersection(extent.file for extent in entry.extents)
        ):
            (averaged if tensor.step.action == "averaged" else changed).append(tensor.step)
    changed.extend(averaged)
    planned_outputs = (outputs[tensor.name] for tensor in planned)
    steps = {product.step.tensor: product.step for product in planned_outputs if product.step is not None}
    for name, step in steps.items():
        changed.append(RecodedTensor(name, "encoded", step.encoding, step.convention, step.dtype, step.shape))
    return tuple(changed)


def buffers_of(view: View, name: str, encode: Encode) -> list[OutputTensor]:
    """Return the buffers (codes, scales) in which one encoded tensor is written."""
    convention = CONVENTIONS[PREFERRED[encode.encoding]]
    target = view.targets[name]
    dtype, shape = view.form_of(name)
    codes = Step(encode.encoding, convention.name, Role.CODES, name, dtype, shape, encode.group)
    spec, buffers = codes.spec, []
    for role in convention.buffers(name, spec):
        if role is Role.INPUT_SCALE:
            continue
        step = replace(codes, role=role)
        stored = convention.stored(name, role, spec)
        buffers.append(OutputTensor(stored, *convention.presented(spec, shape, role), target, step))
    return buffers


def encodings_by_name(view: View, outputs: Iterable[OutputTensor]) -> dict[str, EncodedTensor]:
    """Return tensor name -> encoded tensor of the target, for moved and for newly encoded tensors.

    Args:
        view: the tensors of the target.
        outputs: the output tensors of the target.
    """
    encoded = dict(view.encoded)
    for product in outputs:
        step = product.step
        if step is not None:
            known_tensor = encoded.get(step.tensor)
            parts = {**(known_tensor.parts if known_tensor else {}), Role(step.role): product.name}
            encoded[step.tensor] = EncodedTensor(step.tensor, step.spec, step.shape, parts, step.convention)
    return encoded


def _refuse_inexact(container: Container) -> list[Refusal]:
    """Return refusals of restated tensors whose values would change; their scales are read, and if necessary codes."""
    checks = container.recoding.checks
    if not checks:
        return []
    refusals: dict[int, Refusal] = {}

    def check(number: int, *, whole: bool) -> None:
        refusal = checks[number](whole)
        if refusal is not None:
            refusals[number] = refusal

    run_workers(range(len(checks)), limits().jobs, lambda _: None, lambda _, number: check(number, whole=False))
    for number in sorted(refusals)[:_COUNTED]:
        check(number, whole=True)
    return [refusals[number] for number in sorted(refusals)]


def measure(
    recoding: Recoding, steps: Iterable[RecodedTensor], limit: Limits
) -> dict[RecodedTensor, tuple[Error, int]]:
    """Return computed tensor -> its error and its number of new infinities, in the order of the source; most of these
    tensors are read once for this.

    Args:
        recoding: the computed tensors of the source.
        steps: the steps to measure; encoded tensors are measured while they are written.
        limit: number of worker threads, and memory of their buffers.
    """
    requested = set(steps)
    computed = [tensor for tensor in recoding.computed.values() if tensor.step in requested] if requested else []
    errors: dict[RecodedTensor, tuple[Error, int]] = {}

    def measure_one(_: object, number: int) -> None:
        errors[computed[number].step] = computed[number].measure()

    run_workers(range(len(computed)), limit.jobs, lambda _: None, measure_one)
    return {tensor.step: errors[tensor.step] for tensor in computed}


def refuse_infinite(errors: Mapping[RecodedTensor, tuple[Error, int]], dtype: str | None) -> None:
    """Refuse finite values that would become infinite when they are cast, merged, or decoded as products of code and
    scale.

    Args:
        errors: the errors that `measure` returned.
        dtype: dtype to which plain tensors are cast; None means no cast.

    Raises:
        Refused: with code LOSSY, and every tensor that has such values.
    """
    type_name = dtype or "the type of the weight"
    hint = (
        "Keep the dtype of these tensors with --skip NAME, allow infinite values with "
        "--allow-lossy, or use bf16, which has the range of fp32."
    )
    if dtype is None:
        hint = (
            "Allow infinite values with --allow-lossy, or cast the model first:  transaxle convert SRC CAST --to hf "
            "--dtype bf16, and then  transaxle convert CAST OUT --to hf --merge ADAPTER."
        )
    decoded = "finite values (code times scale) would become infinite when decoded"
    keep = "Leave these tensors encoded with --skip NAME, or allow infinite values with --allow-lossy."
    problems = []
    for step, (error, count) in errors.items():
        if step.action in CASTING and count:
            message = f"{plural(count, 'finite value')} would become infinite in {type_name}"
            problems.append(Refusal("LOSSY", message, Where(None, step.name), hint))
        elif step.action == "decoded" and isinf(error.max):
            problems.append(Refusal("LOSSY", decoded, Where(None, step.name), keep))
    if problems:
        raise gathered(problems)


def rewrite_configs(
    checkpoint: Checkpoint, to: tuple[str, str], view: View, products: Iterable[OutputTensor], problems: list[Refusal]
) -> dict[str, bytes | None]:
    """Return the config files whose quantization section or dtype must change, and a config that the user gave.

    Args:
        checkpoint: the source checkpoint.
        to: file format and dialect of the target.
        view: the tensors of the target.
        products: the output tensors of the target.
        problems: list to which refusals of configs that cannot be rewritten are added.

    Returns:
        File name -> new content; None means that the file is omitted.
    """
    format_name, dialect = to
    user_config = _user_config(checkpoint) if format_name == SAFETENSORS.name else None
    outputs, catalog, recoding = list(products), checkpoint.catalog, checkpoint.container.recoding
    actions = {tensor.step.action for tensor in recoding.computed.values()} - {"averaged"}
    changing = bool(checkpoint.decoded or actions or recoding.configs)
    changing = changing or any(product.step is not None for product in outputs)
    if not changing and (dialect == IDENTITY or (catalog.quantization is None and not catalog.encoded)):
        return {} if user_config is None else {CONFIG: _config_text(user_config)}
    if catalog.refusals:  # the plan lists these refusals already
        return {}
    encoded = encodings_by_name(view, outputs)
    buffers = {stored for tensor in encoded.values() for stored in tensor.parts.values()}
    plain = {p.name: p.target for p in outputs if p.name not in buffers and split_slot(p.name)[1] == WEIGHT}
    decoded = [name for name, target in plain.items() if _origins(target) & checkpoint.decoded.keys()]
    renamed = {origin for target in plain.values() for origin in _origins(target)} - plain.keys()
    dtypes = {tensor.step.dtype for tensor in recoding.computed.values() if tensor.step.action == "decoded"}
    in_memory, encoded_in_memory = (
        _in_memory(checkpoint, dialect, _origins_of_codes(view, encoded, dialect)) if changing or renamed else ({}, ())
    )
    decoded += [name for name, target in in_memory.items() if _origins(target) & checkpoint.decoded.keys()]
    plain = in_memory | plain
    shapes = {name: target.shape for name, target in plain.items()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if recoding.dtype is not None:
        dtype = recoding.dtype if recoding.dtype == _most_frequent_dtype(plain.values()) else None
    describing_file = (
        MODELOPT_CONFIG if catalog.quantization is not None and catalog.quantization.file == MODELOPT_CONFIG else CONFIG
    )
    new_texts = _stale_files(checkpoint)
    conventions = {tensor.convention for tensor in encoded.values()}
    config_files = {*checkpoint.container.carried, *([CONFIG] if user_config else ())}
    for file in sorted(config_files.intersection((CONFIG, MODELOPT_CONFIG))):
        if file == MODELOPT_CONFIG != describing_file and encoded and conventions != {MODELOPT}:
            new_texts[file] = None  # the file repeats the content of config.json, and cannot describe the new encoding
            continue
        try:
            before = _config_before(checkpoint, file, user_config)
            after = rewrite_config(
                before,
                {} if conventions == {TE} and recoding.configs else encoded,
                shapes,
                decoded=decoded,
                renamed=renamed,
                dtype=dtype,
                elsewhere=file == CONFIG != describing_file,
                in_memory=encoded_in_memory,
                own_method=bool(recoding.configs),
            )
            after = _describe_inputs(checkpoint, after)
        except TransaxleError as error:
            problems.extend(error.refusals)
            continue
        if file == MODELOPT_CONFIG and read(after) is None:
            new_texts[file] = None
        elif after != before or before is user_config or file in recoding.configs:
            new_texts[file] = _config_text(after)
    return new_texts


def _stale_files(checkpoint: Checkpoint) -> dict[str, bytes | None]:
    """Return the files to omit that describe codes of GPTQ or AWQ, if the target no longer has such codes."""
    source = (checkpoint.undecoded or checkpoint).catalog
    is_stale = source.program and not checkpoint.catalog.program
    return dict.fromkeys(PACKED_FILES.keys() & {*checkpoint.container.carried}) if is_stale else {}


def _config_before(checkpoint: Checkpoint, file: str, user_config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the content of a config file before it is rewritten; of a restated checkpoint, the source's content."""
    of_source = checkpoint.container.recoding.configs.get(file)
    if of_source is None and file == CONFIG:
        of_source = user_config
    return read_stored_config(checkpoint.container.storage, file) if of_source is None else of_source


def _describe_inputs(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config which, for a restated checkpoint, also says how inputs are quantized if the source's does."""
    if not checkpoint.container.recoding.configs:
        return config
    source = (checkpoint.undecoded or checkpoint).catalog
    return describe_inputs(config, source.quantization, source.encoded)


def _origins_of_codes(view: View, encoded: Mapping[str, EncodedTensor], dialect: str) -> set[str]:
    """Return the source names of tensors that are encoded in the target."""
    if dialect == IDENTITY:
        return set(encoded)
    targets = (view.targets.get(each.parts[Role.CODES]) or view.targets[each.name] for each in encoded.values())
    return {origin for target in targets for origin in _origins(target)}


def _in_memory(
    checkpoint: Checkpoint, dialect: str, codes: Collection[str]
) -> tuple[dict[str, Target], Collection[str]]:
    """Return the plain weights of a hub's model and the names of its encoded weights, under the names in transformers'
    memory.

    Lists of modules in configs use the names in memory, including tied heads that are not stored.

    Args:
        checkpoint: the source checkpoint.
        dialect: dialect of the target.
        codes: source names of tensors that are encoded in the target.
    """
    label = checkpoint.dialect if dialect == IDENTITY else dialect
    if not codes or not (label or "").startswith(HUB) or checkpoint.reading.family.dialect(MEMORY) is None:
        return {}, ()
    memory = checkpoint.translation(MEMORY)
    weights = {name: target for name, target in memory.targets.items() if split_slot(name)[1] == WEIGHT}
    encoded = {name for name, target in weights.items() if not _origins(target).isdisjoint(codes)}
    encoded.update(name for each in memory.encoded.values() for name in each.parts.values())
    modules = set(map(module_of, encoded))
    return {name: target for name, target in weights.items() if module_of(name) not in modules}, encoded


_READ_NO_CODES = frozenset({"automodel", "megatron", "megatron_dist", "megatron_layers", "torchtitan"})
"""Dialects of trainers that load their own checkpoints with DCP, or by name into parameters. DCP and these trainers
cast quantized codes without looking for scales. torchtitan and Automodel can read codes only from safetensors files of
the hub.
"""
_FOR_ANY = frozenset({SAFETENSORS.name, "torch"})
"""File formats, other than the hub's safetensors files, that no trainer of these dialects loads."""


def unread_code_notes(view: View, encoded: Collection[str], form: str, target_dialect: str) -> Iterator[str]:
    """Yield a note if the target has quantized codes that the programs of its dialect would read as values.

    Args:
        view: the target's tensors.
        encoded: names of the tensors that are encoded.
        form: file format of the target.
        target_dialect: dialect of the target.
    """
    names = sorted({*encoded, *view.encoded} & view.targets.keys())
    if names and form not in _FOR_ANY and target_dialect.partition("@")[0] in _READ_NO_CODES:
        remedy = "omit --encode" if encoded else "write values, with --decode bf16"
        yield in_both_languages(
            f"{len(names):,} tensors are codes with scales, such as {names[0]}; programs that load {target_dialect} "
            f"from {form} read no scales: {remedy}"
        )


NO_CONFIG = f"no {CONFIG} goes along"
"""Beginning of the warning that `note_without_config` returns."""


def place_notes(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield notes about a checkpoint that was found inside the given folder, and about a config from a folder above."""
    container = checkpoint.container
    if container.inside:
        yield f"the source is {checkpoint.path}, which was found in the folder that you gave"
    if container.config_path:
        yield f"{CONFIG} is {container.config_path}, since the folder of the source has none"
        folder = container.config_path.removesuffix(CONFIG)
        with suppress(TransaxleError):  # a folder that cannot be listed has nothing to name
            names = [name for name in storage_at(folder).listing().names if name != CONFIG and is_of_model(name)]
            if uncopied := [name for name in names if name not in container.carried]:
                yield f"these files beside it are not copied: {', '.join(sorted(uncopied))}"


def config_notes(checkpoint: Checkpoint, files: Holding[str]) -> tuple[str, ...]:
    """Return notes about a config that the user gave: either it is written to the target, or the source's config is
    kept.

    Args:
        checkpoint: the source checkpoint.
        files: names of the target's rewritten config files.
    """
    user_config = checkpoint.settings.config
    if user_config is None:
        return ()
    if CONFIG not in checkpoint.container.carried:
        return (f"{CONFIG} is written from the config that you gave",) if CONFIG in files else ()
    try:
        if read_stored_config(checkpoint.container.storage) == user_config:
            return ()
    except TransaxleError:
        pass  # a config that cannot be read is treated as different
    return (f"{CONFIG} is that of the source: the config that you gave differs from it, and only gave sizes",)


def note_without_config(checkpoint: Checkpoint) -> str:
    """Return the note that a target for a hub has no config, with the option that adds a config."""
    source = checkpoint.path
    note = f"{NO_CONFIG}, since the source has none: transformers cannot load the target without it; give --config FILE"
    if is_url(source):
        return note
    above = os.path.normpath(os.path.join(source, os.pardir, CONFIG))  # noqa: PTH118 - as typed
    return f"{note} (there is {above})" if os.path.isfile(above) else note  # noqa: PTH113


def _user_config(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the config that the user gave, if it is the config of a model and the source has no config."""
    user_config = checkpoint.settings.config
    if not user_config or CONFIG in checkpoint.container.carried or checkpoint.stored_names.is_adapter:
        return None
    return user_config if isinstance(user_config.get("model_type"), str) else None


def _config_text(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"


def _most_frequent_dtype(targets: Iterable[Target]) -> str | None:
    """Return the dtype of most floating-point elements; None if two dtypes have equally many elements."""
    counts: Counter[str] = Counter()
    for target in targets:
        if target.dtype in PLAIN:
            counts[target.dtype] += prod(target.shape)
    largest_count = max(counts.values(), default=0)
    dtypes = [code for code, count in counts.items() if count == largest_count]
    return dtypes[0] if len(dtypes) == 1 else None


def _origins(target: Any) -> set[str]:
    return {origin.name for part in target.parts for origin in part.origins}
