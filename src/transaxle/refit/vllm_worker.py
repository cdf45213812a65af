"""The parameters of a vLLM worker, each described as a region of a whole tensor of the dialect `vllm`.

vLLM names parameters as the dialect does, and divides them among ranks as the family's table says. The description is
that of the parameters before vLLM repacks them for its kernels: a loader fills them then, and a refit reproduces that
state (see `refit.vllm_engine`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from transaxle.axes.geometry import Intervals
from transaxle.engine.checkpoint.recognise import recognise
from transaxle.engine.plan.rank_parts import engine_parts
from transaxle.errors import Refusal, Where
from transaxle.families import builtin
from transaxle.torch_tensors import Part

DIALECT = "vllm"
ANOTHER_WAY = "Update this model in another way, such as vLLM's own backend `nccl`."


@dataclass(frozen=True)
class Ranks:
    """The position of a worker among the tensor-parallel and expert-parallel ranks."""

    tp: int
    """Number of tensor-parallel ranks."""
    tp_rank: int
    """This worker's tensor-parallel rank."""
    ep: int = 1
    """Number of expert-parallel ranks; 1 if each rank has a shard of every expert."""
    ep_rank: int = 0
    """This worker's expert-parallel rank."""


@dataclass(frozen=True)
class Slot:
    """A parameter or buffer of one layer, with its shape and dtype before vLLM repacked it."""

    layer: nn.Module
    """Layer that the parameter or buffer belongs to."""
    name: str
    """Attribute name of the parameter or buffer in the layer."""
    form: torch.Tensor
    """Tensor with the shape and dtype before repacking; a meta tensor, unless vLLM never repacks the parameter."""

    @property
    def live(self) -> torch.Tensor | None:
        """The tensor that the running model uses now; None if repacking has removed the parameter."""
        tensor: torch.Tensor | None = getattr(self.layer, self.name, None)
        return tensor


class WorkerParameters:
    """Which region of which whole tensor each parameter of a worker is.

    Args:
        model: vLLM's model on this worker.
        config: config of the model, as vLLM read it.
        ranks: the worker's parallel ranks.

    Attributes:
        family: name of the model's family.
        slots: full name -> parameter or persistent buffer.
        parts: full name -> region of the whole tensor, None if the parameter is the whole tensor; without parameters
            that the table does not know, and without further names of tied parameters.
        twins: further name of a tied parameter -> its name in `parts`.
        problems: a refusal for each parameter of which the region is unknown.

    Raises:
        TransaxleError: if no table with the dialect `vllm` has the parameters' names, or its axes cannot be divided.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, Any], ranks: Ranks) -> None:
        self.slots = dict(_find_slots(model))
        parameters = [name for name, slot in self.slots.items() if slot.name in _names(slot.layer, buffers=False)]
        read = recognise(parameters, config, builtin(), None, DIALECT)
        self.family = read.family.name
        shares = engine_parts(read.family, DIALECT, config, self.slots, tp=ranks.tp, ep=ranks.ep)
        self.twins = _twins(self.slots, shares)
        self.problems = [
            Refusal("UNSUPPORTED", f"the table {self.family} does not say what it is", Where(None, name), ANOTHER_WAY)
            for name in parameters
            if name not in shares and name not in self.twins and not _is_scale(self.slots[name])
        ]
        self.parts: dict[str, Part | None] = {}
        for name, share in shares.items():
            if name in self.twins:
                continue
            try:
                self.parts[name] = worker_share(tuple(self.slots[name].form.shape), share, ranks)
            except ValueError as error:
                self.problems.append(Refusal("SHAPE_MISMATCH", str(error), Where(None, name), ANOTHER_WAY))


def _names(layer: nn.Module, *, buffers: bool) -> dict[str, torch.Tensor]:
    """Return attribute name -> tensor, for the tensors that vLLM loads into a layer, with shape and dtype before
    repacking.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    parameters, all_buffers = get_layerwise_info(layer).restore_metadata
    live = {n: p for n, p in layer._parameters.items() if p is not None and n in SKIP_TENSORS}
    non_persistent = layer._non_persistent_buffers_set
    layer_buffers = {n: b for n, b in all_buffers.items() if n not in non_persistent} if buffers else {}
    return {**parameters, **live, **layer_buffers}


def _find_slots(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    for path, layer in model.named_modules():
        for name, form in _names(layer, buffers=True).items():
            yield f"{path}.{name}" if path else name, Slot(layer, name, form)


def _twins(slots: Mapping[str, Slot], table_names: Collection[str]) -> dict[str, str]:
    """Return, for each further name of a tied parameter, name -> the name under which the table of tensor names lists
    the same tensor first.
    """
    first: dict[int, str] = {}
    for name in table_names:
        if slots[name].live is not None:
            first.setdefault(id(slots[name].live), name)
    return {name: first[id(e.live)] for name, e in slots.items() if first.get(id(e.live), name) != name}


def _is_scale(slot: Slot) -> bool:
    """Return whether a parameter is a scale of an attention layer's key-value cache, which trainers do not have."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return bool(is_deferred_attention_layer(slot.layer))


def worker_share(shape: tuple[int, ...], part: tuple[int, tuple[Intervals, ...]] | None, ranks: Ranks) -> Part | None:
    """Return which region of a whole tensor a worker's parameter is; None if the parameter is the whole tensor.

    Raises:
        ValueError: if the parameter's size differs from the size of this region according to the table.
    """
    if part is None:
        return None
    dim, positions = part
    intervals = positions[ranks.ep_rank if len(positions) == ranks.ep > 1 else ranks.tp_rank]
    count = sum(stop - start for start, stop in intervals)
    if shape[dim] != count:
        raise ValueError(f"vLLM has {shape[dim]} along dim {dim} on this worker, where the table gives it {count}")
    whole = max(stop for each in positions for _, stop in each)
    box = tuple(intervals if at == dim else ((0, size),) for at, size in enumerate(shape))
    return Part((*shape[:dim], whole, *shape[dim + 1 :]), box)


def ranks_of(parallel: Any) -> Ranks:
    """Return the parallel ranks of this worker."""
    from vllm.distributed.parallel_state import get_ep_group, get_tp_group

    tp = get_tp_group()
    if not parallel.enable_expert_parallel:
        return Ranks(tp.world_size, tp.rank_in_group)
    ep = get_ep_group()
    return Ranks(tp.world_size, tp.rank_in_group, ep.world_size, ep.rank_in_group)


def find_moving_option(vllm_config: Any) -> str:
    """Return which option of vLLM changes where a worker's parameters are, in ways that the table does not know; "" if
    none does.

    Args:
        vllm_config: vLLM's `VllmConfig`.
    """
    parallel = vllm_config.parallel_config
    offloads = getattr(getattr(vllm_config, "cache_config", None), "cpu_offload_gb", 0)
    for enabled, feature in (
        (getattr(parallel, "enable_eplb", False), "experts that move between ranks (enable_eplb)"),
        (getattr(parallel, "expert_placement_strategy", "linear") != "linear", "experts that are dealt out in turn"),
        (bool(offloads), "weights that are offloaded"),
    ):
        if enabled:
            return feature
    return ""
