"""Lays out new Megatron checkpoints with one folder for each rank (`--ckpt-format torch`).

    OUT/latest_checkpointed_iteration.txt             `release`, or the iteration if the optimizer's state is there
    OUT/release/mp_rank_00_001/model_optim_rng.pt     tensor-parallel rank 0, pipeline stage 1

A tensor that several ranks have is written to the file of each of these ranks. Optimizer state is written as Megatron's
plain optimizer stores it; the flat buffers of `--use-distributed-optimizer` would depend on the number of ranks of the
job.

Local names are the tensor names in the modules of one rank, where layers and experts are numbered from zero. The order
of local names matters, because the optimizer numbers its parameters in this order. Norms and experts are written under
several names, so that both Transformer Engine's modules and Megatron's own modules can load them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from transaxle.arguments import Degrees
from transaxle.axes.geometry import Intervals, row_major
from transaxle.axes.layout.bind import split_slot
from transaxle.axes.layout.divide import SharesByName
from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.catalog import (
    ITEM_BITS,
    PACKED,
    Draft,
    Entry,
    Extent,
    Fragment,
    Shape,
    Spec,
    nbytes,
    number_value,
)
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.megatron.iterations import RELEASE, iteration_folder
from transaxle.formats.megatron.legacy.global_names import (
    LOW,
    OrderUnknown,
    Parameter,
    by_groups,
    is_expert,
    is_vocabulary,
)
from transaxle.formats.megatron.legacy.rank_grid import OPTIMIZER_KEY, STEPS, Mesh, MeshPlace, folder_of
from transaxle.formats.megatron.legacy.rank_optimizer import EMBEDDING, HEAD, is_cut_by_rows
from transaxle.formats.megatron.torch_dist.written_state import (
    groups_in,
    optimizer_settings,
    run_facts,
    state_of_run,
    step_of,
)
from transaxle.formats.megatron.written_arguments import arguments
from transaxle.formats.pickled.descriptors import OrderedMap, TensorRef
from transaxle.formats.registry import MEGATRON_MODEL, MEGATRON_TORCH, MEGATRON_TRACKER
from transaxle.formats.torch_file.archive import ZipLayout
from transaxle.formats.torch_file.draft import lay_out_value, reference
from transaxle.formats.training_state import GROUPS, MASTER, OPTIMIZER, PARAMS

STEP = "step"
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.+\.experts\.linear_fc[12]\.(?:weight|bias))(\d{1,6})((?:_[a-z_]+)?)")
"""Regex for the name of one expert's parameter (`weight3`), or of a buffer of its encoding (`weight3_scale_inv`)."""
_ONE_BY_ONE = re.compile(r"(.+\.experts\.)(linear_fc[12]\.)(weight|bias)(\d+)")
_LAST = ("decoder.final_layernorm.", HEAD, "mtp.")
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Name of a norm inside a linear layer of Transformer Engine -> name of the norm as a separate module."""
_ORDER = (
    "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.router", "mlp.experts.linear_fc1",
    "mlp.experts.linear_fc2", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2", "mlp.linear_fc1",
    "mlp.linear_fc2",
)  # fmt: skip
"""Modules of a layer, in the order in which Megatron creates them."""
_MODULE_PARAMETERS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
"""Last segments of the names of a module's parameters, in the order in which the module registers the parameters."""
_TOPS = ("embedding.", "decoder.layers.", "decoder.", "mtp.", "output_layer.")
"""Name prefixes of a model's top-level modules, in the order in which Megatron creates them."""
_TOP_PARAMETERS = (EMBEDDING, "decoder.final_layernorm.weight", "decoder.final_layernorm.bias", HEAD)
_EXPERTS = "is_expert_parallel"


@dataclass(frozen=True, slots=True)
class ParameterRanks:
    """The ranks that have a parameter, and the local names of the parameter on these ranks."""

    stages: tuple[int, ...]
    """Numbers of the pipeline stages that have the parameter; all these stages but the first have copies."""
    expert: int | None
    """Number of the expert-parallel rank that has the parameter; None if all expert-parallel ranks have it."""
    names: tuple[str, ...]
    """Local name of the parameter in each stage of `stages`."""


@dataclass(frozen=True, slots=True)
class ModelDivision:
    """How the layers and experts of a model are divided among ranks."""

    degrees: Degrees
    layers: int
    """Number of layers in each pipeline stage."""
    experts: int
    """Number of experts on each expert-parallel rank; 0 for a model without experts."""
    tied: bool
    """Whether the output head is tied to the embedding."""

    def ranks_of(self, name: str) -> ParameterRanks:
        """Return the ranks that have a parameter.

        Raises:
            Refused: with the code UNSUPPORTED if the parameter's name does not show its pipeline stage.
        """
        last = self.degrees.pp - 1
        match, expert = _LAYER.fullmatch(name), _EXPERT.fullmatch(name)
        rank, local = None, name
        if expert is not None and self.experts:
            rank, number = divmod(int(expert[2]), self.experts)
            local = f"{expert[1]}{number}{expert[3]}"
        if match is not None:
            stage, layer = divmod(int(match[1]), self.layers)
            return ParameterRanks((stage,), rank, (re.sub(r"\d+", str(layer), local, count=1),))
        if name == EMBEDDING and self.tied and last:
            return ParameterRanks((0, last), None, (name, HEAD))
        if name.startswith(_LAST):
            return ParameterRanks((last,), rank, (local,))
        if name.startswith("embedding.") or not last:
            return ParameterRanks((0,), rank, (local,))
        message = "it is no tensor of Megatron's of which it is known which pipeline stage holds it"
        raise refuse("UNSUPPORTED", message, tensor=name, hint=_ONE_STAGE)


def divide_model(names: Sequence[str], degrees: Degrees) -> ModelDivision:
    """Divide a model's layers and experts evenly among ranks, given the model's parameter names.

    Raises:
        Refused: with the code UNSUPPORTED if layers or experts do not divide evenly among the ranks.
    """
    layers = 1 + max((int(match[1]) for name in names if (match := _LAYER.fullmatch(name))), default=-1)
    experts = 1 + max((int(match[2]) for name in names if (match := _EXPERT.fullmatch(name))), default=-1)
    if layers % degrees.pp or (degrees.pp > 1 and not layers):
        raise _uneven(f"{layers} layers", degrees.pp, "pipeline stages", "--pp")
    if experts % degrees.ep or (degrees.ep > 1 and not experts):
        raise _uneven(f"{experts} experts", degrees.ep, "expert-parallel ranks", "--ep")
    if degrees.pp > 1 and any(name.startswith("mtp.") for name in names):
        message = "layers that predict ahead are written for one pipeline stage only"
        raise refuse("UNSUPPORTED", message, hint=_ONE_STAGE)
    return ModelDivision(degrees, layers // degrees.pp or 1, experts // degrees.ep, HEAD not in names)


def _uneven(count: str, ranks: int, kind: str, option: str) -> TransaxleError:
    return refuse("UNSUPPORTED", f"{count} do not divide into {ranks} {kind}", hint=f"Choose another {option}.")


@dataclass(slots=True)
class RankContents:
    """The contents of one rank's file, except the bytes of tensors."""

    place: MeshPlace
    storages: list[int | bytes] = field(default_factory=list)
    """Size of each tensor storage in the file, in bytes."""
    model: dict[str, TensorRef] = field(default_factory=dict)
    """Local name -> weight."""
    parameters: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    """Local name -> dtype and shape of the weight."""
    states: dict[str, dict[str, TensorRef]] = field(default_factory=dict)
    """Local name -> name of the optimizer state -> tensor of this state."""

    def add(self, local: str, state: str, dtype: str, shape: Shape) -> int:
        """Add a weight, or an optimizer state if `state` is not empty; return the number of the new tensor storage."""
        key = len(self.storages)
        self.storages.append(nbytes(dtype, shape))
        if state:
            self.states.setdefault(local, {})[state] = reference(dtype, shape, key)
        else:
            self.model[local] = reference(dtype, shape, key)
            self.parameters[local] = dtype, shape
        return key

    def state_dict(self) -> OrderedMap:
        """Return the model's state dict in the module's order; it also contains the names that other kinds of modules
        use.
        """
        state_dict = OrderedMap()
        for name in sorted(self.model, key=_module_order):
            state_dict[name] = self.model[name]
            state_dict.update(dict.fromkeys(_other_names(name), self.model[name]))
        return state_dict

    def optimizer(self, groups: Sequence[Mapping[str, Any]], *, apart: bool, torch_steps: bool) -> dict[str, Any]:
        """Return the file's entries for the optimizer: optimizer states by parameter number, and full-precision copies
        by group.

        Args:
            groups: settings of each parameter group.
            apart: whether experts have a separate optimizer.
            torch_steps: whether to store the step in each parameter's state, as torch's optimizers do; otherwise the
                step is stored in the groups' settings, and the step tensors in a separate entry.

        Raises:
            Refused: with the code UNSUPPORTED if the order of the parameters is unknown, or a full-precision copy is
                missing.
        """
        parts, steps = [], []
        for experts in (False, True) if apart else (None,):
            optimizer_groups = [group for group in groups if experts is None or bool(group.get(_EXPERTS)) is experts]
            names = [name for name in self.states if experts is None or is_expert(name) is experts]
            part, numbers = self._part(optimizer_groups, sorted(names, key=_module_order), experts=bool(experts))
            for number, step in numbers.items() if torch_steps else ():
                part[OPTIMIZER_KEY]["state"][number][STEP] = step
            parts.append(part if self._is_low(names) else part[OPTIMIZER_KEY])
            steps.append(numbers)
        entries = {OPTIMIZER_KEY: parts if apart else parts[0]}
        return entries if torch_steps else {**entries, STEPS: steps}

    def _is_low(self, names: Sequence[str]) -> bool:
        """Return whether Megatron's optimizer stores full-precision copies of these parameters; True if there are no
        parameters.
        """
        return not names or any(self.parameters[name][0] in LOW for name in names)

    def _part(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[str], *, experts: bool
    ) -> tuple[dict[str, Any], dict[int, TensorRef]]:
        """Return the entry of one of the chained optimizers, and a dict from parameter number to step for this
        optimizer.
        """
        unknown = next((name for name in names if not _has_order(name)), None)
        if unknown is not None:
            raise _no_order(f"the place of {unknown} among Megatron's parameters is not known")
        parameters = [Parameter(0, name, *self.parameters[name], expert=experts) for name in names]
        try:
            members = by_groups(parameters, [CheckedValue(dict(group), "the optimizer") for group in groups], {})
        except OrderUnknown as reason:
            raise _no_order(str(reason)) from None
        states: dict[int, dict[str, TensorRef]] = {}
        steps: dict[int, TensorRef] = {}
        settings = []
        for group, group_members in zip(groups, members, strict=True):
            numbers = range(len(states), len(states) + len(group_members))
            for number, parameter in zip(numbers, group_members, strict=True):
                parameter_states = self.states[parameter.name]
                states[number] = {state: ref for state, ref in parameter_states.items() if state not in (MASTER, STEP)}
                if STEP in parameter_states:
                    steps[number] = parameter_states[STEP]
            settings.append({**group, PARAMS: list(numbers)})
        copies = [[self._copy(parameter) for parameter in group if parameter.dtype in LOW] for group in members]
        part = {OPTIMIZER_KEY: {"state": states, "param_groups": settings}, "fp32_from_fp16_params": copies}
        return part, steps

    def _copy(self, parameter: Parameter) -> TensorRef:
        master = self.states[parameter.name].get(MASTER)
        if master is None:
            message = "the optimizer's state has no full-precision copy of this weight, and Megatron needs one"
            hint = "Write the weights alone: --no-optimizer."
            raise refuse("UNSUPPORTED", message, tensor=parameter.name, hint=hint)
        return master


def _no_order(why: str) -> TransaxleError:
    message = f"the optimizer's state cannot be written in Megatron's order: {why}"
    hint = "Write the weights alone (--no-optimizer), or another format: --to torch_dist."
    return refuse("UNSUPPORTED", message, hint=hint)


def _module_order(name: str) -> tuple[int, int, int, int, int, str]:
    """Return a parameter's sort key in the order of Megatron's modules: top-level module, layer, module, expert,
    parameter, name.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return next((place for place, top in enumerate(_TOPS) if name.startswith(top)), len(_TOPS)), 0, 0, 0, 0, name
    module, _, parameter = match[2].rpartition(".")
    kind = parameter.rstrip("0123456789")
    places = (
        order.index(key) if key in order else len(order)
        for key, order in ((module, _ORDER), (kind, _MODULE_PARAMETERS))
    )
    in_layer, in_module = places
    return _TOPS.index("decoder.layers."), int(match[1]), in_layer, int(parameter[len(kind) :] or 0), in_module, name


def _has_order(name: str) -> bool:
    """Return whether a parameter's position in the module's order is known."""
    in_layer, _, in_module = _module_order(name)[2:5]
    return name in _TOP_PARAMETERS or (
        _LAYER.fullmatch(name) is not None and in_layer < len(_ORDER) and in_module < len(_MODULE_PARAMETERS)
    )


def _other_names(name: str) -> Iterator[str]:
    """Yield the names that a tensor has in other implementations of the tensor's module."""
    match = _LAYER.fullmatch(name)
    if match is not None and match[2] in _NORMS:
        yield f"decoder.layers.{match[1]}.{_NORMS[match[2]]}"
    expert = _ONE_BY_ONE.fullmatch(name)
    if expert is not None:
        yield f"{expert[1]}local_experts.{expert[4]}.{expert[2]}{expert[3]}"


_GLOBAL_STEPS = "global_steps"
_EXPERT_GROUP = "is_expert_parallel"
_TRAINED = frozenset({*LOW, "F32", "F64"})
"""Safetensors dtype codes of weights for which optimizer state can be written."""


_ONE_STAGE = "Write --pp 1; or write --to torch_dist instead of --pp, which is read at any degrees."


class _StorageBox(NamedTuple):
    """A box of a tensor, and the place of the box in a tensor storage of a rank's file."""

    place: MeshPlace
    storage: int
    start: Shape
    shape: Shape
    at: int
    """Offset in bytes of the box in the storage."""
    strides: Shape | None


def draft(
    tensors: Sequence[Spec],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_size: int | None = None,
    degrees: Degrees | None = None,
    parts: SharesByName | None = None,
    config: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    read: Callable[[str], bytes] | None = None,
) -> Draft:
    """Lay out the folders of all ranks: in the folder `release` if there are only weights, in the folder of an
    iteration if there is optimizer state.

    Args:
        tensors: the tensors to write, under the whole model's names.
        metadata: not used, because the format has no place for free text.
        shard_size: not used, because each rank has exactly one file.
        degrees: the parallel degrees of the new checkpoint; None means a single rank.
        parts: tensor-parallel cut of each parameter.
        config: the model's config.json.
        run: counters and settings of the training run that wrote the source checkpoint.
        read: function that returns the bytes of a tensor by name; called for the optimizer's steps.

    Raises:
        Refused: with every tensor that cannot be stored, and the code UNSUPPORTED, NAME_COLLISION or SHAPE_MISMATCH; or
            with the code UNSUPPORTED if Megatron could not load the optimizer state.
    """
    del metadata, shard_size
    degrees = degrees or Degrees()
    facts = run_facts(run or {})
    weights = {spec.name: spec for spec in tensors if not spec.name.startswith(OPTIMIZER)}
    division = divide_model(list(weights), degrees)
    _refuse_codes(tensors, weights)
    contents, boxes, copies = _distribute(tensors, weights, division, parts or {})
    settings, notes = _settings(tensors, facts, (run or {}).get(GROUPS, ()), degrees, read)
    if settings is not None:
        facts.setdefault("iteration", (run or {}).get(_GLOBAL_STEPS) or step_of(settings))
    args = _args(config or {}, weights, degrees)
    states = {place: state_of_run(_rank_args(args, place, degrees), facts, settings) for place in contents}
    folder = RELEASE if settings is None else iteration_folder(facts["iteration"])
    files = {
        place: (f"{folder}/{_folder(place, degrees)}/{MEGATRON_MODEL}", _value(rank, states[place], settings, degrees))
        for place, rank in contents.items()
    }
    layouts = {place: lay_out_value(file, value, contents[place].storages) for place, (file, value) in files.items()}
    tracker = (RELEASE if settings is None else str(facts["iteration"])).encode()

    def extents(storage_boxes: Sequence[_StorageBox]) -> tuple[Extent, ...]:
        return tuple(_extent(box, files[box.place][0], layouts[box.place]) for box in storage_boxes)

    return Draft(
        MEGATRON_TORCH.name,
        {spec.name: Entry(spec.name, spec.dtype, spec.shape, extents(boxes[spec.name])) for spec in tensors},
        {MEGATRON_TRACKER: len(tracker), **{file: layouts[place].size for place, (file, _) in files.items()}},
        (
            Fragment(MEGATRON_TRACKER, 0, tracker),
            *(Fragment(file, at, data) for place, (file, _) in files.items() for at, data in layouts[place].fragments),
        ),
        copies={name: extents(held) for name, held in copies.items() if held},
        owners={file: {"pp": place.pp, "ep": place.ep, "tp": place.tp} for place, (file, _) in files.items()},
        notes=tuple(notes),
    )


def _refuse_codes(tensors: Sequence[Spec], weights: Mapping[str, Spec]) -> None:
    """Refuse quantized weights for which there is optimizer state, because Megatron's optimizer needs unquantized
    values.

    Raises:
        Refused: with the code UNSUPPORTED for each quantized weight with optimizer state.
    """
    trained = dict.fromkeys(split_slot(spec.name)[0] for spec in tensors if spec.name.startswith(OPTIMIZER))
    faults = Faults()
    for weight in (weights[name] for name in trained if name in weights):
        if weight.dtype not in _TRAINED:
            message = f"the optimizer has state of this weight, which would be {weight.dtype} codes; it needs values"
            faults.add("UNSUPPORTED", message, None, weight.name, "Write the weights alone: --no-optimizer.")
    if faults:
        raise faults.error()


def _extent(box: _StorageBox, file: str, layout: ZipLayout) -> Extent:
    return Extent(box.start, box.shape, file, layout.offsets[box.storage] + box.at, box.strides)


def _folder(place: MeshPlace, degrees: Degrees) -> str:
    return folder_of(place, Mesh(degrees.tp, degrees.pp, degrees.ep))


def _distribute(
    tensors: Sequence[Spec], weights: Mapping[str, Spec], division: ModelDivision, parts: SharesByName
) -> tuple[dict[MeshPlace, RankContents], dict[str, list[_StorageBox]], dict[str, list[_StorageBox]]]:
    """Distribute every tensor over the ranks.

    Returns:
        the contents of each rank's file; the boxes of each tensor; and the boxes that are repeated on further ranks.

    Raises:
        Refused: with every tensor that cannot be stored.
    """
    degrees = division.degrees
    all_places = [MeshPlace(*at) for at in np.ndindex(degrees.pp, degrees.ep, degrees.tp)]
    contents = {place: RankContents(place) for place in all_places}
    boxes: dict[str, list[_StorageBox]] = {}
    copies: dict[str, list[_StorageBox]] = {}
    faults = Faults()
    for spec in tensors:
        parameter, state = split_slot(spec.name)
        try:
            if spec.name in boxes:
                raise refuse("NAME_COLLISION", "two tensors have this name", tensor=spec.name)
            holders = division.ranks_of(parameter)
            rank_parts = _parts_of(spec, parameter, state, weights, parts, degrees)
        except TransaxleError as error:
            faults.extend(*error.refusals)
            continue
        boxes[spec.name], copies[spec.name] = [], []
        for place, local in _rank_names(holders, degrees):
            shape, inside = rank_parts[place.tp]
            storage = contents[place].add(local, state, spec.dtype, shape)
            first = place.pp == holders.stages[0] and place.ep == (holders.expert or 0)
            is_copy = not first or (place.tp and rank_parts[place.tp] is rank_parts[0])
            item = ITEM_BITS[spec.dtype] // 8 or 1
            part_boxes = [
                _StorageBox(place, storage, start, box, at * item, strides) for start, box, at, strides in inside
            ]
            (copies if is_copy else boxes)[spec.name].extend(part_boxes)
    if faults:
        raise faults.error()
    return contents, boxes, copies


def _rank_names(holders: ParameterRanks, degrees: Degrees) -> Iterator[tuple[MeshPlace, str]]:
    """Yield the ranks that have a parameter, each with the parameter's local name on the rank."""
    for stage, local in zip(holders.stages, holders.names, strict=True):
        for expert in range(degrees.ep) if holders.expert is None else (holders.expert,):
            for rank in range(degrees.tp):
                yield MeshPlace(stage, expert, rank), local


_PartBoxes = list[tuple[Shape, Shape, int, Shape | None]]
"""Boxes in a rank's shard of a tensor, each as (first index in the whole tensor, shape, first element in the shard,
strides)."""


def _parts_of(
    spec: Spec, parameter: str, state: str, weights: Mapping[str, Spec], parts: SharesByName, degrees: Degrees
) -> list[tuple[Shape, _PartBoxes]]:
    """Return for each tensor-parallel rank the shape and the boxes of the rank's shard of a tensor; equal shards are
    one shared object.

    Raises:
        Refused: with one of the codes UNSUPPORTED or SHAPE_MISMATCH if the cut does not fit the tensor.
    """
    weight = weights.get(parameter)
    if weight is None:
        message = f"it is state of {parameter}, which is not among the weights"
        raise refuse("UNSUPPORTED", message, tensor=spec.name, hint="Write the weights alone: --no-optimizer.")
    if state and state != STEP and spec.shape != weight.shape:
        message = f"its shape is {list(spec.shape)}, that of the weight {list(weight.shape)}: Megatron's is the same"
        raise refuse("UNSUPPORTED", message, tensor=spec.name, hint="Write the weights alone: --no-optimizer.")
    if state == STEP and spec.shape:
        raise refuse("SHAPE_MISMATCH", f"a step must be one number, not {list(spec.shape)}", tensor=spec.name)
    cut = None if state == STEP or degrees.tp == 1 else _cut_of(weight, parts, degrees)
    if cut is None:
        return [(spec.shape, [((0,) * len(spec.shape), spec.shape, 0, None)])] * degrees.tp
    if spec.dtype in PACKED:
        raise refuse("UNSUPPORTED", f"{spec.dtype} elements are not cut over ranks", tensor=spec.name)
    dim, positions = cut
    return [_part(spec.shape, dim, intervals) for intervals in positions]


def _cut_of(weight: Spec, parts: SharesByName, degrees: Degrees) -> tuple[int, Sequence[Intervals]] | None:
    """Return the tensor-parallel cut of a weight; None if every rank has the whole weight."""
    rows = weight.shape[0] if weight.shape else 0
    if is_cut_by_rows(weight.name):
        if rows % degrees.tp:
            hint = f"Pad it: --axis p={-rows % (degrees.tp * degrees.rows)}." if is_vocabulary(weight.name) else ""
            message = f"its {rows} rows do not divide over {degrees.tp} ranks"
            raise refuse("UNSUPPORTED", message, tensor=weight.name, hint=hint)
        rows_per_rank = rows // degrees.tp
        return 0, [((rank * rows_per_rank, (rank + 1) * rows_per_rank),) for rank in range(degrees.tp)]
    if weight.name not in parts:
        message = "the table has no line for it, so it is not known how tensor-parallel ranks share it out"
        raise refuse("UNSUPPORTED", message, tensor=weight.name, hint="Add a rule (--rules FILE), or write --tp 1.")
    return parts[weight.name]


def _part(whole: Shape, dim: int, intervals: Intervals) -> tuple[Shape, _PartBoxes]:
    """Return the shape of one rank's shard of a tensor, and the boxes in this shard."""
    shape = (*whole[:dim], sum(stop - start for start, stop in intervals), *whole[dim + 1 :])
    strides = row_major(shape)
    inside: _PartBoxes = []
    at = 0
    for start, stop in intervals:
        box = (*whole[:dim], stop - start, *whole[dim + 1 :])
        dense = box == shape or all(size == 1 for size in whole[:dim])
        origin = tuple(start if number == dim else 0 for number in range(len(whole)))
        inside.append((origin, box, at * strides[dim], None if dense else strides))
        at += stop - start
    return shape, inside


def _settings(
    tensors: Sequence[Spec],
    facts: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    degrees: Degrees,
    read: Callable[[str], bytes] | None,
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the settings of the optimizer's groups, and notes that tell the user which arguments to pass to Megatron.

    With expert parallelism, the parameters of experts are in separate groups.

    Raises:
        Refused: with the code UNSUPPORTED if the parameters have taken different numbers of steps.
    """
    states = [(spec, *split_slot(spec.name)) for spec in tensors if spec.name.startswith(OPTIMIZER)]
    parameters = dict.fromkeys(parameter for _, parameter, _ in states)
    if not parameters:
        return None, []
    shapes = {spec.name: spec.shape for spec in tensors if spec.name in parameters}
    stored = {(spec.dtype, read(spec.name)) for spec, _, state in states if state == STEP and read is not None}
    steps = {int(number_value(data, dtype)) for dtype, data in stored}
    if len(steps) > 1:
        message = f"its parameters have made {' and '.join(map(str, sorted(steps)))} steps; Megatron keeps one number"
        raise refuse("UNSUPPORTED", message, hint="Write the weights alone: --no-optimizer.")
    step = steps.pop() if steps else 0
    names = {state for _, _, state in states} - {STEP, MASTER}
    optimizer, notes = optimizer_settings(shapes, facts, groups, step, names)
    all_groups = groups_in(optimizer)
    dense = [{**group, _EXPERT_GROUP: False} for group in all_groups if not group.get(_EXPERT_GROUP)]
    experts = [group for group in all_groups if group.get(_EXPERT_GROUP)]
    if degrees.ep > 1 and not experts:
        experts = [{**group, _EXPERT_GROUP: True} for group in dense if group.get("wd_mult", 1.0)]
    return {"param_groups": [*dense, *(experts if degrees.ep > 1 else ())]}, notes


def _value(
    rank: RankContents, state: Mapping[str, Any], settings: Mapping[str, Any] | None, degrees: Degrees
) -> dict[str, Any]:
    """Return the object to pickle into a rank's file."""
    content = {**state, "model": rank.state_dict()}
    if settings is None:
        return content
    groups = settings["param_groups"]
    # If the source's groups have no step, the source's optimizer stores the step per parameter, as torch's optimizers
    # do.
    torch_steps = all("step" not in group for group in groups)
    return content | rank.optimizer(groups, apart=degrees.ep > 1, torch_steps=torch_steps)


def _args(config: Mapping[str, Any], weights: Mapping[str, Spec], degrees: Degrees) -> dict[str, Any]:
    """Return Megatron's training arguments for these parallel degrees; empty if the config does not contain the model's
    sizes.

    Raises:
        Refused: with the code UNSUPPORTED if there are several ranks but the sizes are unknown, or attention heads do
            not divide evenly.
    """
    rows = weights[EMBEDDING].shape[0] if EMBEDDING in weights else None
    args = arguments(config, list(weights), rows)
    if not args and degrees.pp * degrees.ep > 1:
        message = "the sizes of the model are not known, and the ranks of a pipeline or of experts need them"
        raise refuse("UNSUPPORTED", message, hint="Give the model's config.json: --config FILE.")
    heads = args.get("num_attention_heads", 0)
    if heads % degrees.tp:
        message = f"{heads} attention heads do not divide over {degrees.tp} tensor-parallel ranks"
        raise refuse("UNSUPPORTED", message, hint="Choose a different --tp.")
    ranks = {
        "tensor_model_parallel_size": degrees.tp,
        "pipeline_model_parallel_size": degrees.pp,
        "expert_model_parallel_size": degrees.ep,
        "expert_tensor_parallel_size": degrees.tp,
        "use_distributed_optimizer": False,
    }
    return args | ranks if args else {}


def _rank_args(args: Mapping[str, Any], place: MeshPlace, degrees: Degrees) -> Mapping[str, Any]:
    """Return the training arguments of one rank, which include the rank's number, so that a reader notices a file in a
    wrong folder.
    """
    rank = (place.pp * degrees.ep + place.ep) * degrees.tp + place.tp
    return {**args, "rank": rank, "world_size": degrees.pp * degrees.ep * degrees.tp} if args else args
