"""A source for the trainer engines that vLLM itself has, such as `nccl`: whole tensors under a hub's names.

Those engines broadcast every tensor to every worker. `VllmRefit` sends each worker its own part alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from transaxle.arguments import Config, DType, PathLike, Size, read_size, read_text, suggests
from transaxle.engine.plan.planned import PlannedTensor
from transaxle.live.model.state_tensors import State
from transaxle.live.transport.world import World
from transaxle.options import select
from transaxle.refit.hub_stream import STREAMING, planned_stream, read_streaming, streamed
from transaxle.torch_tensors.torch_arguments import Device, Ranks, read_device, torch_dtype

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer import ParamMeta


Named = tuple[str, torch.Tensor]


class VllmSource:
    """A model as vLLM's trainer engines take it: a `WeightSource` of vLLM 0.32; collective to make and to go through.

        source = tx.refit.VllmSource(model, dtype="bf16")
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    Its tensors are those that `tx.save(model, ..., to=to)` writes. All ranks go through it to the end, as vLLM's
    engines do. It needs vLLM in the trainer's environment.

    Args:
        state: a model under any parallelism, or a state dict.
        to: the dialect.
        bucket: bytes of the tensors that are put together at once.
        group: ranks that hold the state, a process group or a mesh of one dim; None: all.

    The other arguments are those of `tx.refit.named_tensors`.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: on every rank.
    """

    @suggests
    def __init__(
        self,
        state: State,
        *,
        to: str = "hf",
        bucket: Size = "1GB",
        group: Ranks | None = None,
        family: str | None = None,
        dialect: str | None = None,
        config: Config | None = None,
        rules: PathLike | None = None,
        dtype: DType | None = None,
        device: Device | None = None,
    ) -> None:
        self._state, self._options = state, select(locals(), STREAMING)
        self._world = World(group)
        with self._world.together():
            read_streaming(self._options)
            self._to, self._bucket = read_text("to", to, "hf"), read_size("bucket", bucket)
            self._device = read_device("device", device)
        self._planned = planned_stream(state, self._to, self._options, self._world).planned

    def metadata(self) -> list[ParamMeta]:
        """Return name, type and whole shape of everything that comes, in its order."""
        from vllm.distributed.weight_transfer import ParamMeta

        ordered = _by_layer(self._planned)
        return [ParamMeta(each.name, torch_dtype(each.dtype), tuple(each.shape)) for each in ordered]

    def __iter__(self) -> Iterator[Named]:
        stream = planned_stream(self._state, self._to, self._options, self._world)
        stream, takers = replace(stream, planned=_by_layer(stream.planned)), self._world.ranks
        for tensors in streamed(stream, takers, self._bucket, self._device, self._world):
            yield from tensors

    def held_names(self) -> None:
        """Return None: every rank gets every tensor."""

    def groups(self) -> list[list[str]]:
        """Return the names layer by layer."""
        from vllm.distributed.weight_transfer.base import layerwise_groups

        return list(layerwise_groups([each.name for each in self.metadata()]))

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Yield names and tensors layer by layer; collective."""
        tensors = iter(self)
        for names in self.groups():
            yield names, [next(tensors)[1] for _ in names]
        for _ in tensors:  # to the end, as all ranks
            raise AssertionError("there are as many tensors as names")


def _by_layer(planned: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    """Return tensors in the order of the layers."""
    from vllm.distributed.weight_transfer.base import layerwise_groups

    by_name = {each.name: each for each in planned}
    return [by_name[name] for names in layerwise_groups(list(by_name)) for name in names]
