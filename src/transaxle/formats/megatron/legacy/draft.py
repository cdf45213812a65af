"""Drafting Megatron's folders of one rank each (`--ckpt-format torch`): which rank's file holds which part of a tensor.

    OUT/latest_checkpointed_iteration.txt             `release`, or the iteration if the optimizer's state is there
    OUT/release/mp_rank_00_001/model_optim_rng.pt     tensor-parallel rank 0, pipeline stage 1

A tensor that several ranks hold is written to each of their files. The optimizer is the plain one
(`--use-distributed-optimizer` keeps its state in buffers whose layout depends on the job).

What each rank's file holds of a checkpoint that is written: its part of the model, and of the optimizer's state.

Local names are those of Megatron's modules, in their order: the optimizer numbers its parameters in it. Some tensors
have further names, so that Transformer Engine's modules and the local ones both find theirs: norms, and experts.
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
    stored_number,
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
from transaxle.formats.megatron.legacy.rank_grid import OPTIMIZER_KEY, STEPS, Mesh, Place, folder_of
from transaxle.formats.megatron.legacy.rank_optimizer import EMBEDDING, HEAD, is_cut_by_rows
from transaxle.formats.megatron.torch_dist.written_state import (
    counted,
    groups_in,
    optimizer_settings,
    state_of_run,
    step_of,
)
from transaxle.formats.megatron.written_arguments import arguments
from transaxle.formats.pickled.descriptors import OrderedMap, TensorRef
from transaxle.formats.registry import MEGATRON_MODEL, MEGATRON_TORCH, MEGATRON_TRACKER
from transaxle.formats.torch_file.archive import ZipLayout
from transaxle.formats.torch_file.draft import reference, surround
from transaxle.formats.training_state import GROUPS, MASTER, OPTIMIZER, PARAMS

STEP = "step"
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.+\.experts\.linear_fc[12]\.(?:weight|bias))(\d{1,6})((?:_[a-z_]+)?)")
"""A parameter of one expert, or a buffer of its encoding: `weight3`, `weight3_scale_inv`."""
_ONE_BY_ONE = re.compile(r"(.+\.experts\.)(linear_fc[12]\.)(weight|bias)(\d+)")
_LAST = ("decoder.final_layernorm.", HEAD, "mtp.")
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norm inside a linear layer of Transformer Engine -> the same norm as a module."""
_ORDER = (
    "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.router", "mlp.experts.linear_fc1",
    "mlp.experts.linear_fc2", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2", "mlp.linear_fc1",
    "mlp.linear_fc2",
)  # fmt: skip
"""Modules of a layer, in the order in which Megatron makes them."""
_OWN = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
"""Parameters of a module, in this order."""
_TOPS = ("embedding.", "decoder.layers.", "decoder.", "mtp.", "output_layer.")
"""Parts of a model, in their order."""
_ALONE = (EMBEDDING, "decoder.final_layernorm.weight", "decoder.final_layernorm.bias", HEAD)
_EXPERTS = "is_expert_parallel"


@dataclass(frozen=True, slots=True)
class Home:
    """The ranks that hold a parameter, and what they call it."""

    stages: tuple[int, ...]
    """Stages of the pipeline; of more than one where the others have copies."""
    expert: int | None
    """The one expert-parallel rank that holds it; None: all hold it."""
    names: tuple[str, ...]
    """Its name in each of the stages."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the layers and the experts of a model are shared out."""

    degrees: Degrees
    layers: int
    """Of each stage."""
    experts: int
    """Of each expert-parallel rank; 0 without experts."""
    tied: bool
    """Whether the head is the embedding."""

    def home(self, name: str) -> Home:
        """Return where a parameter belongs.

        Raises:
            Refused: UNSUPPORTED for one that no stage is known for.
        """
        last = self.degrees.pp - 1
        match, expert = _LAYER.fullmatch(name), _EXPERT.fullmatch(name)
        rank, local = None, name
        if expert is not None and self.experts:
            rank, number = divmod(int(expert[2]), self.experts)
            local = f"{expert[1]}{number}{expert[3]}"
        if match is not None:
            stage, layer = divmod(int(match[1]), self.layers)
            return Home((stage,), rank, (re.sub(r"\d+", str(layer), local, count=1),))
        if name == EMBEDDING and self.tied and last:
            return Home((0, last), None, (name, HEAD))
        if name.startswith(_LAST):
            return Home((last,), rank, (local,))
        if name.startswith("embedding.") or not last:
            return Home((0,), rank, (local,))
        message = "it is no tensor of Megatron's of which it is known which pipeline stage holds it"
        raise refuse("UNSUPPORTED", message, tensor=name, hint="Write --pp 1, or another format: --to torch_dist.")


def sharing(names: Sequence[str], degrees: Degrees) -> Sharing:
    """Return how the layers and experts with these names are shared out.

    Raises:
        Refused: UNSUPPORTED where they do not divide.
    """
    layers = 1 + max((int(match[1]) for name in names if (match := _LAYER.fullmatch(name))), default=-1)
    experts = 1 + max((int(match[2]) for name in names if (match := _EXPERT.fullmatch(name))), default=-1)
    if layers % degrees.pp or (degrees.pp > 1 and not layers):
        raise _uneven(f"{layers} layers", degrees.pp, "pipeline stages", "--pp")
    if experts % degrees.ep or (degrees.ep > 1 and not experts):
        raise _uneven(f"{experts} experts", degrees.ep, "expert-parallel ranks", "--ep")
    if degrees.pp > 1 and any(name.startswith("mtp.") for name in names):
        message = "layers that predict ahead are written for one pipeline stage only"
        raise refuse("UNSUPPORTED", message, hint="Write --pp 1, or another format: --to torch_dist.")
    return Sharing(degrees, layers // degrees.pp or 1, experts // degrees.ep, HEAD not in names)


def _uneven(what: str, ranks: int, of: str, option: str) -> TransaxleError:
    return refuse("UNSUPPORTED", f"{what} do not divide into {ranks} {of}", hint=f"Choose another {option}.")


@dataclass(slots=True)
class RankContents:
    """One rank's file, as far as it is known."""

    place: Place
    storages: list[int | bytes] = field(default_factory=list)
    """Bytes of each storage: how many."""
    model: dict[str, TensorRef] = field(default_factory=dict)
    """Local name -> weight."""
    parameters: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    """Local name -> dtype and shape."""
    states: dict[str, dict[str, TensorRef]] = field(default_factory=dict)
    """Local name -> state -> tensor."""

    def add(self, local: str, state: str, dtype: str, shape: Shape) -> int:
        """Add a tensor; return the number of its storage."""
        key = len(self.storages)
        self.storages.append(nbytes(dtype, shape))
        if state:
            self.states.setdefault(local, {})[state] = reference(dtype, shape, key)
        else:
            self.model[local] = reference(dtype, shape, key)
            self.parameters[local] = dtype, shape
        return key

    def state_dict(self) -> OrderedMap:
        """Return the model's part of the file."""
        found = OrderedMap()
        for name in sorted(self.model, key=_module_order):
            found[name] = self.model[name]
            found.update(dict.fromkeys(_other_names(name), self.model[name]))
        return found

    def optimizer(self, groups: Sequence[Mapping[str, Any]], *, apart: bool, torch_steps: bool) -> dict[str, Any]:
        """Return the optimizer's part of the file: states by number, and full-precision copies by group.

        Args:
            groups: settings.
            apart: experts have an optimizer of their own.
            torch_steps: each state has the number of steps, as torch's optimizers have it; otherwise groups have it,
                and the tensors are kept besides.

        Raises:
            Refused: UNSUPPORTED where the order of the parameters is not known, or Megatron could not hold the state.
        """
        parts, steps = [], []
        for experts in (False, True) if apart else (None,):
            own = [group for group in groups if experts is None or bool(group.get(_EXPERTS)) is experts]
            names = [name for name in self.states if experts is None or is_expert(name) is experts]
            part, numbers = self._part(own, sorted(names, key=_module_order), experts=bool(experts))
            for number, step in numbers.items() if torch_steps else ():
                part[OPTIMIZER_KEY]["state"][number][STEP] = step
            parts.append(part if self._is_low(names) else part[OPTIMIZER_KEY])
            steps.append(numbers)
        found = {OPTIMIZER_KEY: parts if apart else parts[0]}
        return found if torch_steps else {**found, STEPS: steps}

    def _is_low(self, names: Sequence[str]) -> bool:
        """Tell whether Megatron keeps full-precision copies: also of no parameters, as of a stage without experts."""
        return not names or any(self.parameters[name][0] in LOW for name in names)

    def _part(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[str], *, experts: bool
    ) -> tuple[dict[str, Any], dict[int, TensorRef]]:
        """Return one of the optimizers, and the steps of its parameters by number."""
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
        for group, listed in zip(groups, members, strict=True):
            numbers = range(len(states), len(states) + len(listed))
            for number, each in zip(numbers, listed, strict=True):
                kept = self.states[each.name]
                states[number] = {state: ref for state, ref in kept.items() if state not in (MASTER, STEP)}
                if STEP in kept:
                    steps[number] = kept[STEP]
            settings.append({**group, PARAMS: list(numbers)})
        copies = [[self._copy(each) for each in group if each.dtype in LOW] for group in members]
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
    """Return where a parameter is in the order of Megatron's modules: top, layer, module, expert, parameter."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return next((place for place, top in enumerate(_TOPS) if name.startswith(top)), len(_TOPS)), 0, 0, 0, 0, name
    module, _, own = match[2].rpartition(".")
    bare = own.rstrip("0123456789")
    places = (order.index(key) if key in order else len(order) for key, order in ((module, _ORDER), (bare, _OWN)))
    in_layer, in_module = places
    return _TOPS.index("decoder.layers."), int(match[1]), in_layer, int(own[len(bare) :] or 0), in_module, name


def _has_order(name: str) -> bool:
    """Tell whether the place of a parameter among all is known."""
    in_layer, _, in_module = _module_order(name)[2:5]
    return name in _ALONE or (_LAYER.fullmatch(name) is not None and in_layer < len(_ORDER) and in_module < len(_OWN))


def _other_names(name: str) -> Iterator[str]:
    """Yield further names of a tensor in other kinds of modules."""
    match = _LAYER.fullmatch(name)
    if match is not None and match[2] in _NORMS:
        yield f"decoder.layers.{match[1]}.{_NORMS[match[2]]}"
    expert = _ONE_BY_ONE.fullmatch(name)
    if expert is not None:
        yield f"{expert[1]}local_experts.{expert[4]}.{expert[2]}{expert[3]}"


Parts = Mapping[str, tuple[int, tuple[Intervals, ...]] | None]
"""Parameter -> the dim that tensor-parallel ranks share out, and each one's positions in it; None: all have all."""
_GLOBAL_STEPS = "global_steps"
_EXPERT_GROUP = "is_expert_parallel"
_TRAINED = frozenset({*LOW, "F32", "F64"})
"""Types of weights that have state."""


class _Box(NamedTuple):
    """A box of a tensor in a storage of a rank."""

    place: Place
    storage: int
    start: Shape
    shape: Shape
    at: int
    """Its first byte in the storage."""
    strides: Shape | None


def draft(
    tensors: Sequence[Spec],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_size: int | None = None,
    degrees: Degrees | None = None,
    parts: Parts | None = None,
    config: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    read: Callable[[str], bytes] | None = None,
) -> Draft:
    """Lay out the folders of all ranks: weights as a release, or an iteration with the optimizer's state.

    Args:
        tensors: what to write, under Megatron's names of the whole model.
        metadata: left out: the format has no place for free text.
        shard_size: left out: a rank has one file.
        degrees: the ranks; None: one.
        parts: what tensor-parallel ranks share out.
        config: the model's config.json.
        run: what the source says of its run.
        read: returns the bytes of a small tensor, for the optimizer's steps.

    Raises:
        Refused: for every tensor that has no place: UNSUPPORTED, NAME_COLLISION, SHAPE_MISMATCH; for an optimizer that
            Megatron cannot hold, UNSUPPORTED.
    """
    del metadata, shard_size
    degrees = degrees or Degrees()
    facts = counted(run or {})
    weights = {spec.name: spec for spec in tensors if not spec.name.startswith(OPTIMIZER)}
    shared = sharing(list(weights), degrees)
    _refuse_codes(tensors, weights)
    contents, boxes, copies = _held(tensors, weights, shared, parts or {})
    settings, notes = _settings(tensors, facts, (run or {}).get(GROUPS, ()), degrees, read)
    if settings is not None:
        facts.setdefault("iteration", (run or {}).get(_GLOBAL_STEPS) or step_of(settings))
    args = _args(config or {}, weights, degrees)
    states = {place: state_of_run(_numbered(args, place, degrees), facts, settings) for place in contents}
    folder = RELEASE if settings is None else iteration_folder(facts["iteration"])
    files = {
        place: (f"{folder}/{_folder(place, degrees)}/{MEGATRON_MODEL}", _value(rank, states[place], settings, degrees))
        for place, rank in contents.items()
    }
    layouts = {place: surround(file, value, contents[place].storages) for place, (file, value) in files.items()}
    tracker = (RELEASE if settings is None else str(facts["iteration"])).encode()

    def extents(held: Sequence[_Box]) -> tuple[Extent, ...]:
        return tuple(_extent(box, files[box.place][0], layouts[box.place]) for box in held)

    return Draft(
        MEGATRON_TORCH.name,
        {spec.name: Entry(spec.name, spec.dtype, spec.shape, extents(boxes[spec.name])) for spec in tensors},
        {MEGATRON_TRACKER: len(tracker), **{file: layouts[place].size for place, (file, _) in files.items()}},
        (
            Fragment(MEGATRON_TRACKER, 0, tracker),
            *(Fragment(file, at, data) for place, (file, _) in files.items() for at, data in layouts[place].known),
        ),
        copies={name: extents(held) for name, held in copies.items() if held},
        notes=tuple(notes),
    )


def _refuse_codes(tensors: Sequence[Spec], weights: Mapping[str, Spec]) -> None:
    """Refuse weights that are codes beside state of the optimizer, which has a place for values alone.

    Raises:
        Refused: UNSUPPORTED for each of them.
    """
    trained = dict.fromkeys(split_slot(spec.name)[0] for spec in tensors if spec.name.startswith(OPTIMIZER))
    faults = Faults()
    for weight in (weights[name] for name in trained if name in weights):
        if weight.dtype not in _TRAINED:
            message = f"the optimizer has state of this weight, which would be {weight.dtype} codes; it needs values"
            faults.add("UNSUPPORTED", message, None, weight.name, "Write the weights alone: --no-optimizer.")
    if faults:
        raise faults.error()


def _extent(box: _Box, file: str, layout: ZipLayout) -> Extent:
    return Extent(box.start, box.shape, file, layout.offsets[box.storage] + box.at, box.strides)


def _folder(place: Place, degrees: Degrees) -> str:
    return folder_of(place, Mesh(degrees.tp, degrees.pp, degrees.ep))


def _held(
    tensors: Sequence[Spec], weights: Mapping[str, Spec], shared: Sharing, parts: Parts
) -> tuple[dict[Place, RankContents], dict[str, list[_Box]], dict[str, list[_Box]]]:
    """Give every rank its part of every tensor.

    Returns:
        the ranks; for each tensor its boxes; and for each the boxes that hold the same again.

    Raises:
        Refused: every tensor that has no place.
    """
    degrees = shared.degrees
    everyone = [Place(*at) for at in np.ndindex(degrees.pp, degrees.ep, degrees.tp)]
    contents = {place: RankContents(place) for place in everyone}
    boxes: dict[str, list[_Box]] = {}
    copies: dict[str, list[_Box]] = {}
    faults = Faults()
    for spec in tensors:
        parameter, state = split_slot(spec.name)
        try:
            if spec.name in boxes:
                raise refuse("NAME_COLLISION", "two tensors have this name", tensor=spec.name)
            home = shared.home(parameter)
            of_ranks = _parts_of(spec, parameter, state, weights, parts, degrees)
        except TransaxleError as error:
            faults.extend(*error.refusals)
            continue
        boxes[spec.name], copies[spec.name] = [], []
        for place, local in _holders(home, degrees):
            shape, inside = of_ranks[place.tp]
            storage = contents[place].add(local, state, spec.dtype, shape)
            first = place.pp == home.stages[0] and place.ep == (home.expert or 0)
            again = not first or (place.tp and of_ranks[place.tp] is of_ranks[0])
            item = ITEM_BITS[spec.dtype] // 8 or 1
            held = [_Box(place, storage, start, box, at * item, strides) for start, box, at, strides in inside]
            (copies if again else boxes)[spec.name].extend(held)
    if faults:
        raise faults.error()
    return contents, boxes, copies


def _holders(home: Home, degrees: Degrees) -> Iterator[tuple[Place, str]]:
    """Yield the ranks that hold a parameter, each with its name for it."""
    for stage, local in zip(home.stages, home.names, strict=True):
        for expert in range(degrees.ep) if home.expert is None else (home.expert,):
            for rank in range(degrees.tp):
                yield Place(stage, expert, rank), local


_Inside = list[tuple[Shape, Shape, int, Shape | None]]
"""Boxes of a rank's part: first index in the whole tensor, shape, first element in the part, and strides there."""


def _parts_of(
    spec: Spec, parameter: str, state: str, weights: Mapping[str, Spec], parts: Parts, degrees: Degrees
) -> list[tuple[Shape, _Inside]]:
    """Return each tensor-parallel rank's part of a tensor: its shape and its boxes; of copies, one object for all.

    Raises:
        Refused: UNSUPPORTED, SHAPE_MISMATCH.
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


def _cut_of(weight: Spec, parts: Parts, degrees: Degrees) -> tuple[int, Sequence[Intervals]] | None:
    """Return how a weight is shared out; None where every rank holds all of it."""
    rows = weight.shape[0] if weight.shape else 0
    if is_cut_by_rows(weight.name):
        if rows % degrees.tp:
            hint = f"Pad it: --axis p={-rows % (degrees.tp * degrees.rows)}." if is_vocabulary(weight.name) else ""
            message = f"its {rows} rows do not divide over {degrees.tp} ranks"
            raise refuse("UNSUPPORTED", message, tensor=weight.name, hint=hint)
        each = rows // degrees.tp
        return 0, [((rank * each, (rank + 1) * each),) for rank in range(degrees.tp)]
    if weight.name not in parts:
        message = "the table has no line for it, so it is not known how tensor-parallel ranks share it out"
        raise refuse("UNSUPPORTED", message, tensor=weight.name, hint="Add a line with --rules FILE, or write --tp 1.")
    return parts[weight.name]


def _part(whole: Shape, dim: int, intervals: Intervals) -> tuple[Shape, _Inside]:
    """Return one rank's part of a tensor."""
    shape = (*whole[:dim], sum(stop - start for start, stop in intervals), *whole[dim + 1 :])
    strides = row_major(shape)
    inside: _Inside = []
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
    """Return the settings of the optimizer's groups, those of experts apart where they have ranks of their own.

    Also return notes on what Megatron must be told.

    Raises:
        Refused: UNSUPPORTED where the parameters have made different numbers of steps.
    """
    states = [(spec, *split_slot(spec.name)) for spec in tensors if spec.name.startswith(OPTIMIZER)]
    parameters = dict.fromkeys(parameter for _, parameter, _ in states)
    if not parameters:
        return None, []
    shapes = {spec.name: spec.shape for spec in tensors if spec.name in parameters}
    stored = {(spec.dtype, read(spec.name)) for spec, _, state in states if state == STEP and read is not None}
    steps = {int(stored_number(data, dtype)) for dtype, data in stored}
    if len(steps) > 1:
        message = f"its parameters have made {' and '.join(map(str, sorted(steps)))} steps; Megatron keeps one number"
        raise refuse("UNSUPPORTED", message, hint="Write the weights alone: --no-optimizer.")
    step = steps.pop() if steps else 0
    names = {state for _, _, state in states} - {STEP, MASTER}
    made, notes = optimizer_settings(shapes, facts, groups, step, names)
    found = groups_in(made)
    dense = [{**group, _EXPERT_GROUP: False} for group in found if not group.get(_EXPERT_GROUP)]
    experts = [group for group in found if group.get(_EXPERT_GROUP)]
    if degrees.ep > 1 and not experts:
        experts = [{**group, _EXPERT_GROUP: True} for group in dense if group.get("wd_mult", 1.0)]
    return {"param_groups": [*dense, *(experts if degrees.ep > 1 else ())]}, notes


def _value(
    rank: RankContents, state: Mapping[str, Any], settings: Mapping[str, Any] | None, degrees: Degrees
) -> dict[str, Any]:
    """Return what a rank's file holds."""
    found = {**state, "model": rank.state_dict()}
    if settings is None:
        return found
    groups = settings["param_groups"]
    # Where the source's groups do not have the number of steps, its optimizer keeps it with each state, as torch's do.
    torch_steps = all("step" not in group for group in groups)
    return found | rank.optimizer(groups, apart=degrees.ep > 1, torch_steps=torch_steps)


def _args(config: Mapping[str, Any], weights: Mapping[str, Spec], degrees: Degrees) -> dict[str, Any]:
    """Return Megatron's arguments for these ranks.

    Raises:
        Refused: UNSUPPORTED where several ranks need them, and they are not known; where heads do not divide.
    """
    rows = weights[EMBEDDING].shape[0] if EMBEDDING in weights else None
    found = arguments(config, list(weights), rows)
    if not found and degrees.pp * degrees.ep > 1:
        message = "the sizes of the model are not known, and the ranks of a pipeline or of experts need them"
        raise refuse("UNSUPPORTED", message, hint="Give the model's config.json: --config FILE.")
    heads = found.get("num_attention_heads", 0)
    if heads % degrees.tp:
        message = f"{heads} attention heads do not divide over {degrees.tp} tensor-parallel ranks"
        raise refuse("UNSUPPORTED", message, hint="Give another --tp.")
    ranks = {
        "tensor_model_parallel_size": degrees.tp,
        "pipeline_model_parallel_size": degrees.pp,
        "expert_model_parallel_size": degrees.ep,
        "expert_tensor_parallel_size": degrees.tp,
        "use_distributed_optimizer": False,
    }
    return found | ranks if found else {}


def _numbered(args: Mapping[str, Any], place: Place, degrees: Degrees) -> Mapping[str, Any]:
    """Return the arguments of one rank: they tell its number, so that files in each other's folders are found."""
    rank = (place.pp * degrees.ep + place.ep) * degrees.tp + place.tp
    return {**args, "rank": rank, "world_size": degrees.pp * degrees.ep * degrees.tp} if args else args
