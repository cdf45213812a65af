"""Derives the whole model's tensor names, and the order of parameters in the optimizer, from the tensor names on one
rank.

A rank numbers its layers and experts from zero. The run's arguments determine which layers a pipeline stage has, and
the files must agree with the arguments.

Optimizer state in the files has no parameter names: it is listed by parameter number, or is in flat buffers. A
parameter's shape and name determine its optimizer group: vectors and biases have no weight decay, and expert-parallel
experts have a separate optimizer. An optimizer group lists parameters in the module's order, a flat buffer contains
them in the reverse order. These assumptions about groups and order are checked against the files; if an assumption does
not fit, or is ambiguous, the optimizer state is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.megatron.legacy.rank_grid import Mesh

_LAYER = re.compile(r"((?:language_model\.)?decoder\.layers\.)(0|[1-9]\d{0,5})(\..+)", re.DOTALL)
_EXPERT = re.compile(r"(.+\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(0|[1-9]\d{0,5})((?:[._].+)?)")
_IN_ONE = re.compile(r".+\.experts\.linear_fc[12]\.(?:weight|bias)")
_GROUPED = re.compile(r".+\.experts\.weight[12]")
_EXPERTS = "experts"
_LAYOUT = re.compile(r"\(([^()]*)\)\*(\d{1,5})|([EtmL|])\*(\d{1,5})")
_LONGEST_LAYOUT = 100_000


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to routed experts."""
    return _EXPERTS in name.split(".")


def stage_layers(args: Mapping[str, Any], mesh: Mesh, file: str) -> list[list[range]]:
    """Return the layer numbers in the whole model of each pipeline stage, as `layers[pipeline stage][virtual stage]`.

    Args:
        args: Megatron's training arguments of the run.
        mesh: parallel degrees of the run.
        file: name of the file with the arguments, for error messages.

    Raises:
        Refused: with the code CORRUPT if the arguments are malformed; with the code UNSUPPORTED if they do not
            determine which stage has which layers.
    """
    layers = args.get("num_layers")
    if mesh.pp == 1 and mesh.vp == 1:
        return [[range(layers if isinstance(layers, int) else 1 << 20)]]
    if not isinstance(layers, int) or isinstance(layers, bool) or not 0 < layers < 1_000_000:
        raise refuse("CORRUPT", f"args > num_layers: expected a number of layers, not {layers!r}", file=file)
    layout = args.get("pipeline_model_parallel_layout")
    counts = _counts(args, layers, mesh, file) if layout is None else _layout_counts(layout, mesh, file)
    # Layer numbers run through the first virtual stage of every rank, then through the second virtual stage of every
    # rank, and so on.
    stages: list[list[range]] = [[] for _ in range(mesh.pp)]
    begin = 0
    for chunk in range(mesh.vp):
        for stage in range(mesh.pp):
            stages[stage].append(range(begin, begin + counts[stage][chunk]))
            begin += counts[stage][chunk]
    if begin != layers:
        message = f"by its args the stages have {begin} layers, but the model has {layers}"
        raise refuse("CORRUPT", message, file=file)
    return stages


def _counts(args: Mapping[str, Any], layers: int, mesh: Mesh, file: str) -> list[list[int]]:
    """Return the number of layers in each stage; all numbers are equal, but the arguments can set those of the first
    and the last stage separately.
    """
    ends = [_count(args, f"decoder_{end}_pipeline_num_layers", file) for end in ("first", "last")]
    embeds, loses = (bool(args.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    if any(end is not None for end in ends):
        first, last = ends
        middle = mesh.pp - sum(end is not None for end in ends)
        middle_layers = layers - sum(end or 0 for end in ends)
        layers_per_stage = _divide_layers(middle_layers, middle, "stages", file) if middle else 0
        per_stage = [layers_per_stage] * mesh.pp
        per_stage[0] = layers_per_stage if first is None else first
        per_stage[-1] = layers_per_stage if last is None else last
    else:
        per_stage = [_divide_layers(layers + embeds + loses, mesh.pp, "stages", file)] * mesh.pp
    counts = [[_divide_layers(count, mesh.vp, "virtual stages", file)] * mesh.vp for count in per_stage]
    counts[0][0] -= embeds
    counts[-1][-1] -= loses
    return counts


def _count(args: Mapping[str, Any], key: str, file: str) -> int | None:
    value = args.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise refuse("CORRUPT", f"args > {key}: expected a number of layers, not {value!r}", file=file)
    return value


def _divide_layers(layers: int, parts: int, kind: str, file: str) -> int:
    if layers < 0 or layers % parts:
        message = f"{layers} layers do not divide into {parts} {kind}, and the args do not say where the others are"
        raise refuse("UNSUPPORTED", message, file=file, hint="Save the checkpoint with --ckpt-format torch_dist.")
    return layers // parts


def _layout_counts(layout: object, mesh: Mesh, file: str) -> list[list[int]]:
    """Return the number of layers in each stage of a pipeline layout such as `Et*3|(tt|)*29m|L`, where `t` is a
    layer.
    """
    text = layout.replace(",", "") if isinstance(layout, str) else ""
    while (match := _LAYOUT.search(text)) is not None and len(text) < _LONGEST_LAYOUT:
        part, times = (match[1], match[2]) if match[2] else (match[3], match[4])
        text = text[: match.start()] + part * min(int(times), _LONGEST_LAYOUT) + text[match.end() :]
    stages = text.split("|")
    if set(text) - set("EtmL|") or len(stages) != mesh.pp * mesh.vp:
        message = (
            f"args > pipeline_model_parallel_layout: {str(layout)[:80]!r} is no layout of {mesh.pp} x {mesh.vp} stages"
        )
        raise refuse("UNSUPPORTED", message, file=file, hint="Save the checkpoint with --ckpt-format torch_dist.")
    return [[stages[chunk * mesh.pp + stage].count("t") for chunk in range(mesh.vp)] for stage in range(mesh.pp)]


@dataclass(frozen=True, slots=True)
class Numbering:
    """The numbers, in the whole model, of the layers and experts that one rank has in one pipeline stage."""

    layers: range
    """Numbers of the stage's layers in the whole model."""
    experts: range
    """Numbers of the rank's experts in the whole model; empty without expert parallelism, because the file's own
    numbers are those of the whole model then."""

    def names(self, local: Iterable[str], file: str) -> dict[str, str]:
        """Return a dict from each local tensor name to the tensor's name in the whole model.

        Raises:
            Refused: with the code CORRUPT if the rank cannot have a layer or expert of this number; with the code
                INCOMPLETE if layers or experts are missing; with the code UNSUPPORTED if all experts are stored as one
                tensor.
        """
        global_names, layers = {}, set()
        mixtures: dict[str, set[int]] = {}
        for name in local:
            global_name = name
            match = _LAYER.fullmatch(name)
            if match is not None:
                layer = int(match[2])
                layers.add(layer)
                if layer >= len(self.layers):
                    raise _number_too_large("layer", layer, len(self.layers), file, name)
                global_name = f"{match[1]}{self.layers[layer]}{match[3]}"
            match = _EXPERT.fullmatch(global_name)
            if match is not None and self.experts:
                expert = int(match[2])
                mixtures.setdefault(match[1], set()).add(expert)
                if expert >= len(self.experts):
                    raise _number_too_large("expert", expert, len(self.experts), file, name)
                global_name = f"{match[1]}{self.experts[expert]}{match[3]}"
            elif _GROUPED.fullmatch(global_name) or (self.experts and match is None and _IN_ONE.fullmatch(global_name)):
                message = "it is all experts of a rank in one tensor, which no table describes over several ranks"
                hint = "Save the checkpoint with --ckpt-format torch_dist."
                raise refuse("UNSUPPORTED", message, file=file, tensor=name, hint=hint)
            global_names[name] = global_name
        self._check_all(layers, mixtures, file)
        return global_names

    def _check_all(self, layers: set[int], mixtures: Mapping[str, set[int]], file: str) -> None:
        if layers and len(self.layers) < 1 << 20 and len(layers) < len(self.layers):
            lacking = sorted(set(range(len(self.layers))) - layers)[:8]
            message = f"by the args of the run this stage has {len(self.layers)} layers; there is nothing of {lacking}"
            raise refuse("INCOMPLETE", message, file=file)
        for head, experts in mixtures.items():
            if len(experts) < len(self.experts):
                lacking = sorted(set(range(len(self.experts))) - experts)[:8]
                message = f"this rank has {len(self.experts)} experts; there is nothing of {lacking} in {head}"
                raise refuse("INCOMPLETE", message, file=file)


def _number_too_large(kind: str, number: int, count: int, file: str, name: str) -> TransaxleError:
    message = f"it is of {kind} {number} of a rank that has {count}, by the args of the run"
    return refuse("CORRUPT", message, file=file, tensor=name)


def experts_of(args: Mapping[str, Any], mesh: Mesh, rank: int, file: str) -> range:
    """Return the numbers of a rank's experts in the whole model; an empty range without expert parallelism.

    Raises:
        Refused: with the code CORRUPT if the number of experts is not divisible by the number of ranks.
    """
    count = args.get("num_experts")
    if mesh.ep == 1:
        return range(0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1 or count % mesh.ep:
        message = f"args > num_experts: {count!r} experts do not divide over {mesh.ep} ranks"
        raise refuse("CORRUPT", message, file=file)
    experts_per_rank = count // mesh.ep
    return range(rank * experts_per_rank, (rank + 1) * experts_per_rank)


LOW = ("BF16", "F16")
"""Low-precision dtypes: an optimizer has full-precision copies of weights of these dtypes."""
_BIAS = ".bias"
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
_HEAD_NORMS = ("q_layernorm.", "k_layernorm.")
_ALIGNMENT = 64
"""In a flat buffer, a parameter begins at a multiple of this number of elements."""
_LEAST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
_EXPERT_FLAG, _NO_DECAY, _DECOUPLED = "is_expert_parallel", "wd_mult", "is_decoupled_lr"


class OrderUnknown(Exception):
    """The files do not show which optimizer state belongs to which parameter; the error message states the reason."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trained parameter on one rank."""

    chunk: int
    """Number of the virtual pipeline stage, counted on the rank."""
    name: str
    """Name of the parameter in the whole model."""
    dtype: str
    shape: tuple[int, ...]
    expert: bool
    """Whether the parameter belongs to the separate optimizer for experts."""
    shared: bool = False
    """Whether the parameter is an embedding that a second pipeline stage also has."""

    @property
    def size(self) -> int:
        """Number of the parameter's elements on the rank."""
        return prod(self.shape)


def is_vocabulary(name: str) -> bool:
    """Return whether a parameter has one row for each token of the vocabulary."""
    return f".{name}".endswith(tuple(f".{end}" for end in _VOCABULARY))


def has_expert_groups(groups: Sequence[CheckedValue]) -> bool:
    """Return whether the settings of optimizer groups mark any groups as groups of experts."""
    return any(_flag(group, _EXPERT_FLAG) for group in groups)


def by_groups(
    parameters: Sequence[Parameter], groups: Sequence[CheckedValue], args: Mapping[str, Any]
) -> list[list[Parameter]]:
    """Divide parameters among an optimizer's groups, according to the settings of the groups.

    Args:
        parameters: the parameters on this rank that the optimizer trains, in the order of the module.
        groups: settings of each optimizer group.
        args: Megatron's training arguments of the run.

    Returns:
        a list of parameters for each group, in the order of the module.

    Raises:
        OrderUnknown: if the settings do not determine the group of a parameter.
        Refused: with the code CORRUPT if the settings are malformed.
    """
    if len(groups) == 1:
        return [list(parameters)]
    members: list[list[Parameter]] = [[] for _ in groups]
    decoupled = [_is_decoupled(group, args) for group in groups]
    keys: dict[tuple[bool, bool, bool], int] = {}
    for number, group in enumerate(groups):
        key = _flag(group, _EXPERT_FLAG), _decay(group) == 0, decoupled[number]
        if keys.setdefault(key, number) != number:
            raise OrderUnknown(
                f"its groups {keys[key]} and {number} have the same settings, but for those of one layer"
            )
    for parameter in parameters:
        key = parameter.expert, _has_no_decay(parameter, args), any(decoupled) and is_vocabulary(parameter.name)
        if key not in keys:
            raise OrderUnknown(f"none of its groups has settings for {parameter.name}")
        members[keys[key]].append(parameter)
    return members


def _flag(group: CheckedValue, key: str) -> bool:
    node = group.get(key)
    return node is not None and node.flag()


def _decay(group: CheckedValue) -> float:
    node = group.get(_NO_DECAY) or group.get(f"pre_{_NO_DECAY}")
    if node is None:
        raise OrderUnknown(f"its groups do not say {_NO_DECAY}, which tells them apart")
    return node.real()


def _is_decoupled(group: CheckedValue, args: Mapping[str, Any]) -> bool:
    if _flag(group, _DECOUPLED):
        return True
    rate, group_rate = args.get("decoupled_lr"), group.get("max_lr")
    return rate is not None and group_rate is not None and group_rate.real() == rate


def _has_no_decay(parameter: Parameter, args: Mapping[str, Any]) -> bool:
    """Return whether Megatron applies no weight decay to a parameter."""
    bare = len(parameter.shape) == 1 or parameter.name.endswith(_BIAS)
    if args.get("apply_wd_to_qk_layernorm"):
        return bare and not any(norm in parameter.name for norm in _HEAD_NORMS)
    return bare


def buffers(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Return the parameters in each flat buffer; each virtual pipeline stage has one buffer per dtype."""
    parameters_by_buffer: dict[tuple[int, str], list[Parameter]] = {}
    for parameter in parameters:
        parameters_by_buffer.setdefault((parameter.chunk, parameter.dtype), []).append(parameter)
    order = {key: number for number, key in enumerate(parameters_by_buffer)}
    return [parameters_by_buffer[key] for key in sorted(parameters_by_buffer, key=lambda key: (key[0], order[key]))]


def bucket_size(args: Mapping[str, Any], stage: int, chunk: int, elements: int) -> int | None:
    """Return the number of elements after which Megatron begins a new bucket of a flat buffer; None means a single
    bucket.

    Args:
        args: Megatron's training arguments of the run.
        stage: number of the pipeline stage.
        chunk: number of the virtual pipeline stage.
        elements: total number of elements of the parameters on the rank.
    """
    if not args.get("overlap_grad_reduce") or stage or chunk or args.get("overlap_param_gather_with_optimizer_step"):
        return None
    count, size = args.get("ddp_num_buckets"), args.get("ddp_bucket_size")
    if isinstance(count, int) and count > 0:
        return elements // count
    ranks = (args.get("data_parallel_size") or 1) * (args.get("context_parallel_size") or 1)
    return size if isinstance(size, int) and size > 0 else max(_LEAST_BUCKET, _BUCKET_PER_RANK * ranks)


def lay_flat(parameters: Sequence[Parameter], bucket: int | None) -> tuple[list[tuple[Parameter, int]], int]:
    """Place the parameters in a flat buffer in Megatron's order (the last parameter first), without the padding after
    buckets.

    Every bucket begins at a multiple of the parameters' alignment, so each bucket can be laid out without knowing the
    previous ones.

    Args:
        parameters: the parameters, in the order of the module.
        bucket: number of elements after which a bucket ends; None means a single bucket.

    Returns:
        each parameter with the index of its first element in the buffer, and the buffer's total number of elements.
    """
    places: list[tuple[Parameter, int]] = []
    stored = at = 0  # number of elements in all finished buckets, and in the current bucket
    empty = True
    for parameter in reversed(parameters):
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        if parameter.shared and not empty:
            stored, at = stored + at, 0
        places.append((parameter, stored + at))
        at, empty = at + parameter.size, False
        if parameter.shared or (bucket is not None and at >= bucket):
            stored, at, empty = stored + at, 0, True
    return places, stored + at
