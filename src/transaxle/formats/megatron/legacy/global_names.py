"""Names and order of parameters over the whole model, from those of a rank.

Names in the whole model: a rank counts its layers and its experts from zero.

Which layers a stage holds follows from the run's arguments, and must agree with what its files hold.

The order in which Megatron's optimizers keep parameters, rebuilt from the model: files number them or lay them flat.

A parameter's group follows from its shape and name: no weight decay for vectors and biases, an optimizer of their own
for experts that are not on every rank. Inside a group, and in a flat buffer backwards, the order is the module's. All
of it is checked against what the files hold; where it does not fit, or two readings would, nothing is guessed.
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
    """Tell whether a parameter is one of an expert that not every token passes."""
    return _EXPERTS in name.split(".")


def stage_layers(args: Mapping[str, Any], mesh: Mesh, file: str) -> list[list[range]]:
    """Return the layers of each stage, by pipeline rank and stage of the virtual pipeline.

    Args:
        args: the run's arguments.
        mesh: its degrees.
        file: for errors.

    Raises:
        Refused: CORRUPT, UNSUPPORTED where they say no such thing.
    """
    layers = args.get("num_layers")
    if mesh.pp == 1 and mesh.vp == 1:
        return [[range(layers if isinstance(layers, int) else 1 << 20)]]
    if not isinstance(layers, int) or isinstance(layers, bool) or not 0 < layers < 1_000_000:
        raise refuse("CORRUPT", f"args > num_layers: expected a number of layers, not {layers!r}", file=file)
    layout = args.get("pipeline_model_parallel_layout")
    counts = _counts(args, layers, mesh, file) if layout is None else _laid_out(layout, mesh, file)
    # Layers go round: those of all ranks' first virtual stages, then those of all ranks' second ones.
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
    """Return how many layers each stage has: as many as the others, but for the first and the last."""
    ends = [_count(args, f"decoder_{end}_pipeline_num_layers", file) for end in ("first", "last")]
    embeds, loses = (bool(args.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    if any(end is not None for end in ends):
        first, last = ends
        middle = mesh.pp - sum(end is not None for end in ends)
        rest = layers - sum(end or 0 for end in ends)
        each = _evenly(rest, middle, "stages", file) if middle else 0
        per_stage = [each] * mesh.pp
        per_stage[0] = each if first is None else first
        per_stage[-1] = each if last is None else last
    else:
        per_stage = [_evenly(layers + embeds + loses, mesh.pp, "stages", file)] * mesh.pp
    counts = [[_evenly(count, mesh.vp, "virtual stages", file)] * mesh.vp for count in per_stage]
    counts[0][0] -= embeds
    counts[-1][-1] -= loses
    return counts


def _count(args: Mapping[str, Any], key: str, file: str) -> int | None:
    value = args.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise refuse("CORRUPT", f"args > {key}: expected a number of layers, not {value!r}", file=file)
    return value


def _evenly(layers: int, parts: int, what: str, file: str) -> int:
    if layers < 0 or layers % parts:
        message = f"{layers} layers do not divide into {parts} {what}, and the args do not say where the others are"
        raise refuse("UNSUPPORTED", message, file=file, hint="Save the checkpoint with --ckpt-format torch_dist.")
    return layers // parts


def _laid_out(layout: object, mesh: Mesh, file: str) -> list[list[int]]:
    """Return the layers of each stage of a layout such as `Et*3|(tt|)*29m|L`."""
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
    """The layers and experts of one stage on one rank."""

    layers: range
    """Of the whole model."""
    experts: range
    """Likewise; empty where there is one rank for all, and the numbers are the model's."""

    def names(self, local: Iterable[str], file: str) -> dict[str, str]:
        """Return local name -> name in the whole model.

        Raises:
            Refused: CORRUPT for a number that the rank cannot have; INCOMPLETE for layers and experts that it lacks;
                UNSUPPORTED for experts that are stored as one.
        """
        named, layers = {}, set()
        mixtures: dict[str, set[int]] = {}
        for name in local:
            whole = name
            match = _LAYER.fullmatch(name)
            if match is not None:
                layer = int(match[2])
                layers.add(layer)
                if layer >= len(self.layers):
                    raise _beyond("layer", layer, len(self.layers), file, name)
                whole = f"{match[1]}{self.layers[layer]}{match[3]}"
            match = _EXPERT.fullmatch(whole)
            if match is not None and self.experts:
                expert = int(match[2])
                mixtures.setdefault(match[1], set()).add(expert)
                if expert >= len(self.experts):
                    raise _beyond("expert", expert, len(self.experts), file, name)
                whole = f"{match[1]}{self.experts[expert]}{match[3]}"
            elif _GROUPED.fullmatch(whole) or (self.experts and match is None and _IN_ONE.fullmatch(whole)):
                message = "it is all experts of a rank in one tensor, which no table describes over several ranks"
                hint = "Save the checkpoint with --ckpt-format torch_dist."
                raise refuse("UNSUPPORTED", message, file=file, tensor=name, hint=hint)
            named[name] = whole
        self._check_all(layers, mixtures, file)
        return named

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


def _beyond(what: str, number: int, count: int, file: str, name: str) -> TransaxleError:
    message = f"it is of {what} {number} of a rank that has {count}, by the args of the run"
    return refuse("CORRUPT", message, file=file, tensor=name)


def experts_of(args: Mapping[str, Any], mesh: Mesh, rank: int, file: str) -> range:
    """Return the experts of an expert-parallel rank; an empty range where there is one such rank.

    Raises:
        Refused: CORRUPT where the experts do not divide.
    """
    count = args.get("num_experts")
    if mesh.ep == 1:
        return range(0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1 or count % mesh.ep:
        message = f"args > num_experts: {count!r} experts do not divide over {mesh.ep} ranks"
        raise refuse("CORRUPT", message, file=file)
    each = count // mesh.ep
    return range(rank * each, (rank + 1) * each)


LOW = ("BF16", "F16")
"""Types of weights of which an optimizer keeps copies in full precision."""
_BIAS = ".bias"
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
_HEAD_NORMS = ("q_layernorm.", "k_layernorm.")
_ALIGNED = 64
"""Elements at whose multiples parameters begin in a bucket."""
_LEAST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
_EXPERT_FLAG, _NO_DECAY, _DECOUPLED = "is_expert_parallel", "wd_mult", "is_decoupled_lr"


class OrderUnknown(Exception):
    """Why it is not known which state belongs to which parameter."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of one rank."""

    chunk: int
    """Stage of the virtual pipeline on the rank."""
    name: str
    """In the whole model."""
    dtype: str
    shape: tuple[int, ...]
    expert: bool
    """Whether the optimizer for experts has it."""
    shared: bool = False
    """Whether another pipeline stage holds the same embedding."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def is_vocabulary(name: str) -> bool:
    """Tell whether a parameter has one row for each word."""
    return f".{name}".endswith(tuple(f".{end}" for end in _VOCABULARY))


def has_expert_groups(groups: Sequence[CheckedValue]) -> bool:
    """Tell whether groups of an optimizer are for experts alone."""
    return any(_flag(group, _EXPERT_FLAG) for group in groups)


def by_groups(
    parameters: Sequence[Parameter], groups: Sequence[CheckedValue], args: Mapping[str, Any]
) -> list[list[Parameter]]:
    """Return the parameters of each group of an optimizer, in order.

    Args:
        parameters: of the rank, as far as the optimizer has them, in the order of the module.
        groups: settings.
        args: of the run.

    Raises:
        OrderUnknown: the settings do not say which group a parameter is in.
        Refused: CORRUPT for malformed settings.
    """
    if len(groups) == 1:
        return [list(parameters)]
    found: list[list[Parameter]] = [[] for _ in groups]
    decoupled = [_is_decoupled(group, args) for group in groups]
    keys: dict[tuple[bool, bool, bool], int] = {}
    for number, group in enumerate(groups):
        key = _flag(group, _EXPERT_FLAG), _decay(group) == 0, decoupled[number]
        if keys.setdefault(key, number) != number:
            raise OrderUnknown(
                f"its groups {keys[key]} and {number} have the same settings, but for those of one layer"
            )
    for parameter in parameters:
        key = parameter.expert, _decays_not(parameter, args), any(decoupled) and is_vocabulary(parameter.name)
        if key not in keys:
            raise OrderUnknown(f"none of its groups has settings for {parameter.name}")
        found[keys[key]].append(parameter)
    return found


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
    rate, own = args.get("decoupled_lr"), group.get("max_lr")
    return rate is not None and own is not None and own.real() == rate


def _decays_not(parameter: Parameter, args: Mapping[str, Any]) -> bool:
    """Tell whether a parameter is one of those whose weights do not decay."""
    bare = len(parameter.shape) == 1 or parameter.name.endswith(_BIAS)
    if args.get("apply_wd_to_qk_layernorm"):
        return bare and not any(norm in parameter.name for norm in _HEAD_NORMS)
    return bare


def buffers(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Return the parameters of each flat buffer: one for each stage of the virtual pipeline and each dtype."""
    found: dict[tuple[int, str], list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault((parameter.chunk, parameter.dtype), []).append(parameter)
    order = {key: number for number, key in enumerate(found)}
    return [found[key] for key in sorted(found, key=lambda key: (key[0], order[key]))]


def bucket_size(args: Mapping[str, Any], stage: int, chunk: int, elements: int) -> int | None:
    """Return after how many elements Megatron begins another bucket; None: there is one for all.

    Args:
        args: of the run.
        stage: of the pipeline.
        chunk: stage of the virtual pipeline.
        elements: of all parameters of the rank.
    """
    if not args.get("overlap_grad_reduce") or stage or chunk or args.get("overlap_param_gather_with_optimizer_step"):
        return None
    count, size = args.get("ddp_num_buckets"), args.get("ddp_bucket_size")
    if isinstance(count, int) and count > 0:
        return elements // count
    ranks = (args.get("data_parallel_size") or 1) * (args.get("context_parallel_size") or 1)
    return size if isinstance(size, int) and size > 0 else max(_LEAST_BUCKET, _BUCKET_PER_RANK * ranks)


def laid_flat(parameters: Sequence[Parameter], bucket: int | None) -> tuple[list[tuple[Parameter, int]], int]:
    """Lay the parameters of a buffer out as Megatron does, last ones first, without the padding after its buckets.

    Buckets begin at multiples of the alignment of parameters, so that each can be laid out by itself.

    Args:
        parameters: in the order of the module.
        bucket: after how many elements a bucket ends.

    Returns:
        each parameter with its first element, and the elements of it all.
    """
    places: list[tuple[Parameter, int]] = []
    stored = at = 0  # elements of the buckets before, and of the current one
    empty = True
    for parameter in reversed(parameters):
        at = -(-at // _ALIGNED) * _ALIGNED
        if parameter.shared and not empty:
            stored, at = stored + at, 0
        places.append((parameter, stored + at))
        at, empty = at + parameter.size, False
        if parameter.shared or (bucket is not None and at >= bucket):
            stored, at, empty = stored + at, 0, True
    return places, stored + at
