"""The order in which Megatron's optimizers keep parameters, rebuilt from the model: files number them or lay them flat.

A parameter's group follows from its shape and name: no weight decay for vectors and biases, an optimizer of their own
for experts that are not on every rank. Inside a group, and in a flat buffer backwards, the order is the module's. All
of it is checked against what the files hold; where it does not fit, or two readings would, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from transaxle.formats.deepspeed.checked_value import CheckedValue

LOW = ("BF16", "F16")
"""Types of weights of which an optimizer keeps copies in full precision."""
_BIAS = ".bias"
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
_HEAD_NORMS = ("q_layernorm.", "k_layernorm.")
_ALIGNED = 64
"""Elements at whose multiples parameters begin in a bucket."""
_LEAST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
_EXPERT, _NO_DECAY, _DECOUPLED = "is_expert_parallel", "wd_mult", "is_decoupled_lr"


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
    return any(_flag(group, _EXPERT) for group in groups)


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
        key = _flag(group, _EXPERT), _decay(group) == 0, decoupled[number]
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
