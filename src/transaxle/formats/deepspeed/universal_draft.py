"""Lays out new universal checkpoints, from which DeepSpeed can resume with any ZeRO stage and any parallel degrees.

    latest_universal
    global_step3_universal/
        mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_model_states.pt      counters; DeepSpeed reads one of them
        zero/optimizer_state.pt                                                   settings, in the forms of all stages
        zero/<parameter>/fp32.pt, exp_avg.pt, …                                   {"param": tensor}, and hints
        zero/<parameter>/step.pt                                                  a number

DeepSpeed 0.19.8 reads optimizer settings in one form for ZeRO-1 and 2, and in a second form for ZeRO-3; each stage
reads only its own form. The two forms use different keys, so the files that Transaxle writes contain both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from transaxle.errors import Faults, TransaxleError
from transaxle.formats.catalog import Draft, Entry, Extent, Fragment, Spec, nbytes, number_value
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.hints import HINTS, Hint, hint_fields
from transaxle.formats.deepspeed.rank_files import CLASS, CLIENT, FIELDS
from transaxle.formats.pickled.allowed import ALLOWED
from transaxle.formats.pickled.descriptors import Global, Object, OrderedMap
from transaxle.formats.storage.storage import is_plain
from transaxle.formats.torch_file.draft import lay_out_value, reference
from transaxle.formats.training_state import MEGATRON, OPTIMIZER

MODEL_FILES = (f"mp_rank_00{keys.MODEL_END}", f"zero_pp_rank_0_mp_rank_00{keys.MODEL_END}")
_DEFAULT_VERSION = "0.19.8"
"""DeepSpeed version that a new checkpoint states if the source was not written by DeepSpeed: the version whose layout
is written."""
_MIN_GROUPS = 32
"""Minimum number of parameter groups to write; empty groups are added up to this number, since DeepSpeed skips groups
that a file lacks."""
_MAX_NAME_BYTES = 255
_UNNAMED = "#"
_RATE = "lr"
_SIZE = Global("torch", "Size")
_NEW_OPTIMIZER = (
    "there is no optimizer state: DeepSpeed begins with a new optimizer at ZeRO-1 and 2, and fails at ZeRO-3, where "
    "the weights are to be loaded before deepspeed.initialize (tx.load)"
)
"""Note for the user about a checkpoint without optimizer state: what DeepSpeed 0.19.8 does without a message when it
loads."""
_WEIGHTS_ALONE = "Leave out the optimizer: --no-optimizer, or optimizer=False."


def draft(
    tensors: Sequence[Spec],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_size: int | None = None,
    run: Mapping[str, Any] | None = None,
    read: Callable[[str], bytes] | None = None,
) -> Draft:
    """Lay out a universal checkpoint.

    Args:
        tensors: the tensors to write; a tensor named `optim/<parameter>/<state>` is optimizer state, all other tensors
            are weights.
        metadata: not used, because the format has no place for free text.
        shard_size: not used, because every tensor has a separate file.
        run: counters and settings of the training run, as `rank_files.run_of` returns them.
        read: function that returns the bytes of a tensor by name; called for step counters, which ZeRO-3 reads from the
            settings.

    Raises:
        Refused: with every tensor that cannot be stored, and the code UNSUPPORTED (its dtype; a name that cannot be a
            file name; optimizer state of a parameter without name, or whose step differs from its group's step),
            PATH_ESCAPE, NAME_COLLISION or SHAPE_MISMATCH.
    """
    del metadata, shard_size
    facts = _run_facts(run or {})
    folder = f"global_step{facts.get(keys.GLOBAL_STEPS, 0)}_universal"
    faults = Faults()
    places: dict[str, tuple[Spec, str, str]] = {}
    for spec in tensors:
        parameter, state = split_name(spec.name)
        file = f"{folder}/{keys.ZERO_FOLDER}/{parameter}/{state}{keys.STATE_END}"
        _check(spec, parameter, state, file, places, faults)
        places[file] = spec, parameter, state
    if faults:
        raise faults.error()
    entries: dict[str, Entry] = {}
    files: dict[str, int] = {}
    fragments: list[Fragment] = []
    hints: Mapping[str, Hint] = facts.get(HINTS, {})
    for file, (spec, parameter, state) in places.items():
        shape = () if state == keys.STEP else spec.shape
        value: object = reference(spec.dtype, shape, 0)
        if state != keys.STEP:
            value = {**_hint_fields(spec, parameter, hints, faults), keys.PARAM: value}
        layout = lay_out_value(file, value, [nbytes(spec.dtype, shape)])
        extent = Extent((0,) * len(shape), shape, file, layout.offsets[0])
        entries[spec.name] = Entry(spec.name, spec.dtype, shape, (extent,))
        files[file] = layout.size
        fragments.extend(Fragment(file, at, data) for at, data in layout.fragments)
    step = None if read is None else _common_step(facts, tensors, read, faults)
    if faults:
        raise faults.error()
    for file, data in _small_files(folder, facts, tensors, step):
        files[file] = sum(map(len, data))
        fragments.extend(_fragments_of(file, data))
    trained = any(parameter != spec.name for spec, parameter, _ in places.values())
    notes = _notes(facts) if trained else (_NEW_OPTIMIZER,)
    return Draft(keys.UNIVERSAL, entries, files, tuple(fragments), notes=notes)


def _notes(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note for the user if parameter groups have different learning rates, because ZeRO-3 loads one learning
    rate for all groups.
    """
    groups = facts.get(keys.GROUPS, ())
    if not groups or _agree(groups, _RATE, groups[0].get(_RATE)):
        return ()
    return ("the optimizer's groups differ in lr, which ZeRO-3 does not load: see docs/how-to/deepspeed.md",)


def _run_facts(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training run's counters and settings; counters under Megatron's keys are renamed to
    DeepSpeed's keys.
    """
    megatron = run.get(MEGATRON) or {}
    counts = {
        keys.GLOBAL_STEPS: megatron.get("iteration"),
        keys.GLOBAL_SAMPLES: (megatron.get("counters") or {}).get("consumed_train_samples"),
    }
    return {**{key: count for key, count in counts.items() if isinstance(count, int)}, **run}


def split_name(name: str) -> tuple[str, str]:
    """Split a tensor name into the names of the parameter and of its optimizer state; a weight counts as the state
    `fp32`.
    """
    if name.startswith(OPTIMIZER):
        parameter, slash, state = name.removeprefix(OPTIMIZER).rpartition("/")
        if slash:
            return parameter, state
    return name, keys.FP32


def _check(spec: Spec, parameter: str, state: str, file: str, places: Mapping[str, object], faults: Faults) -> None:
    """Add a fault for each reason why a tensor cannot be written, such as a name that cannot be a folder or
    file name.
    """
    shown = spec.name.encode("utf-8", "backslashreplace").decode()
    if not is_plain(parameter) or not is_plain(state):
        message = f"it would become the folder {parameter!r} and the file {state!r}, which are not plain names"
        faults.add("PATH_ESCAPE", message, None, shown)
    elif parameter.startswith(_UNNAMED):
        faults.add("UNSUPPORTED", "it is optimizer state of a parameter whose name is unknown", None, shown)
    elif shown != spec.name or max(len(parameter.encode()), len(f"{state}{keys.STATE_END}".encode())) > _MAX_NAME_BYTES:
        faults.add("UNSUPPORTED", "its name is not allowed as a file name: too long, or not valid Unicode", None, shown)
    if state == keys.STEP and prod(spec.shape) != 1:
        faults.add("SHAPE_MISMATCH", f"a step must be one number, but has the shape {list(spec.shape)}", None, shown)
    if file in places:
        faults.add("NAME_COLLISION", "two tensors have this name", None, shown)
    try:
        reference(spec.dtype, spec.shape, 0)
        nbytes(spec.dtype, spec.shape)
    except KeyError:
        faults.add("UNSUPPORTED", f"{spec.dtype} is not written to universal checkpoints", None, shown)
    except TransaxleError as error:
        faults.add(error.code, error.refusals[0].message, None, shown)


def _hint_fields(spec: Spec, parameter: str, hints: Mapping[str, Hint], faults: Faults) -> dict[str, Any]:
    """Return the hint entries for a tensor's file; add a fault for a hint that does not fit the tensor's shape."""
    try:
        return hint_fields(hints.get(parameter, {}), parameter, spec.shape)
    except TransaxleError as error:
        faults.add(error.code, error.refusals[0].message, None, spec.name)
        return {}


_Data = list[bytes]


def _common_step(
    facts: Mapping[str, Any], tensors: Sequence[Spec], read: Callable[[str], bytes], faults: Faults
) -> tuple[Spec, bytes] | None:
    """Return the step that all parameters have, as a tensor and its bytes; None if groups have different steps, or no
    step is stored.

    ZeRO-1 and 2 read one step per group from the files of the group's parameters. ZeRO-3 reads one step for all groups
    from the settings. Different steps within a group are therefore a fault; if only the steps of different groups
    differ, no step is written into the settings.
    """
    group_of = {name: at for at, group in enumerate(facts.get(keys.GROUPS, ())) for name in group[keys.PARAMS]}
    first_of: dict[int | None, tuple[str, float]] = {}
    common: tuple[Spec, bytes] | None = None
    for spec in tensors:
        parameter, state = split_name(spec.name)
        if state != keys.STEP:
            continue
        data = read(spec.name)
        common = common or (spec, data)
        step = number_value(data, spec.dtype)
        first, first_step = first_of.setdefault(group_of.get(parameter), (parameter, step))
        if step != first_step:
            message = f"it was updated {step:g} times, {first} {first_step:g} times: DeepSpeed has one step for a group"
            faults.add("UNSUPPORTED", message, None, spec.name, _WEIGHTS_ALONE)
    return common if len({step for _, step in first_of.values()}) == 1 else None


def _small_files(
    folder: str, facts: Mapping[str, Any], tensors: Sequence[Spec], step: tuple[Spec, bytes] | None
) -> Iterator[tuple[str, _Data]]:
    """Yield the files that contain no weights or optimizer tensors: settings file, model files, and
    `latest_universal`.
    """
    step_bytes: list[int | bytes] = []
    step_state: dict[str, object] = {}
    if step is not None:
        spec, data = step
        step_bytes.append(data)
        step_state[keys.STEP] = reference(spec.dtype, (), 0)
    file = f"{folder}/{keys.ZERO_FOLDER}/{keys.OPTIMIZER_FILE}"
    layout = lay_out_value(file, _settings(facts, step_state), step_bytes)
    yield file, [data for _, data in layout.fragments]
    for name in MODEL_FILES:
        file = f"{folder}/{name}"
        yield file, [data for _, data in lay_out_value(file, _model(facts, tensors), []).fragments]
    yield keys.LATEST_UNIVERSAL, [folder.encode()]


def _fragments_of(file: str, parts: _Data) -> Iterator[Fragment]:
    at = 0
    for data in parts:
        yield Fragment(file, at, data)
        at += len(data)


def _settings(facts: Mapping[str, Any], step_state: Mapping[str, object]) -> dict[str, Any]:
    """Return the optimizer's settings: ZeRO-1 and 2 read `param_groups`, ZeRO-3 reads `optimizer_state_dict`.

    ZeRO-3 applies the settings of the first group to all groups. The first group is therefore written with only those
    settings that are equal in all groups; for all other settings the resuming run keeps its own values.
    """
    groups = [
        {key: _plain(value) for key, value in group.items() if key != keys.PARAMS}
        for group in facts.get(keys.GROUPS, ())
    ]
    common = {key: value for key, value in (groups[0] if groups else {}).items() if _agree(groups, key, value)}
    numbered: list[dict[str, Any]] = [{**group, keys.PARAMS: [number]} for number, group in enumerate(groups)]
    numbered += [{keys.PARAMS: []} for _ in range(_MIN_GROUPS - len(groups))]
    stored_facts: dict[str, Any] = {
        key: facts[key] for key in (keys.DYNAMIC_SCALE, keys.OVERFLOW, keys.CLIP) if facts.get(key) is not None
    }
    scaler = _scaler(facts.get(keys.LOSS_SCALER))
    return {
        **stored_facts,
        **({keys.LOSS_SCALER: scaler} if scaler is not None else {}),
        keys.VERSION: facts.get(keys.VERSION) or _DEFAULT_VERSION,
        keys.GROUPS: numbered,
        keys.STATE: {keys.STATES: {0: dict(step_state)}, keys.GROUPS: [{**common, keys.PARAMS: []}]},
    }


def _agree(groups: Sequence[Mapping[str, Any]], key: str, value: object) -> bool:
    return all(key in group and group[key] == value for group in groups)


def _plain(value: object) -> object:
    """Return a setting as DeepSpeed stores it: a plain number, even if torch's optimizer stores a tensor
    without dims.
    """
    if isinstance(value, np.generic):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _scaler(recorded: object) -> Object | None:
    """Return DeepSpeed's loss scaler object; None if the run had no loss scaler, or one of a forbidden class."""
    if not isinstance(recorded, dict) or not isinstance(recorded.get(FIELDS), dict):
        return None
    module, _, name = str(recorded.get(CLASS)).rpartition(".")
    return Object(Global(module, name), state=dict(recorded[FIELDS]), new=True) if (module, name) in ALLOWED else None


def _model(facts: Mapping[str, Any], tensors: Sequence[Spec]) -> dict[str, Any]:
    """Return the contents of the model file: counters, and for each parameter group a dict from parameter name to
    shape.
    """
    shapes = {spec.name: spec.shape for spec in tensors}
    groups = [
        OrderedMap({name: Object(_SIZE, (shapes[name],)) for name in group[keys.PARAMS] if name in shapes})
        for group in facts.get(keys.GROUPS, ())
    ]
    counters = {key: facts.get(key) or 0 for key in (keys.GLOBAL_STEPS, keys.GLOBAL_SAMPLES, keys.SKIPPED_STEPS)}
    return {
        **facts.get(CLIENT, {}),
        keys.MODULE: OrderedMap(),
        keys.BUFFER_NAMES: [],
        keys.OPTIMIZER: None,
        keys.PARAM_SHAPES: groups,
        keys.FROZEN_SHAPES: None,
        keys.SHARED: {},
        keys.FROZEN_FRAGMENTS: None,
        keys.SCHEDULER: facts.get(keys.SCHEDULER),
        **counters,
        keys.DP_WORLD: 1,
        keys.MP_WORLD: 1,
        keys.DIMENSIONS: {keys.PP_DEGREE: 1, keys.TP_DEGREE: 1},
        keys.VERSION: facts.get(keys.VERSION) or _DEFAULT_VERSION,
    }
