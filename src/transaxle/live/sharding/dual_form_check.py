"""Compares experts that a checkpoint stores twice, under their own names and stacked, before anything is loaded.

torch tells planners of a tensor only once it has been read. So where anything is stored twice, everything is read into
memory of its own, and the caller's tensors get their values when all copies are known to be equal. That costs a second
copy of the model, and happens with such checkpoints only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from transaxle.axes.translation.grouped import MemberCopy, Stem, member_copies
from transaxle.errors import Refusal, Where, gathered
from transaxle.live.transport.world import World
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.placement import placement_of, take
from transaxle.torch_tensors.tensor_bytes import same_bytes
from transaxle.torch_tensors.tp_shard import mark, part_of, whole_shape


class DualFormCheck:
    """A load that compares what is stored twice before it changes anything.

    Args:
        stems: the sets of experts that are stored in both forms.
        stored: what the checkpoint has, by our names.
        asked: the tensors that are to be filled, by our names, in the checkpoint's form.
    """

    def __init__(
        self,
        stems: Iterable[Stem],
        stored: Mapping[str, TensorStorageMetadata],
        asked: Mapping[str, torch.Tensor],
    ) -> None:
        self._asked = asked
        self._copies = member_copies(stems, stored)
        names = dict.fromkeys(name for copy in self._copies for name in (copy.stack, copy.name))
        self._whole = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
        self.read = {name: _like(tensor) for name, tensor in asked.items()} | self._whole
        """What torch is to fill, by our names."""

    def finish(self) -> None:
        """Copy what was read into the tensors asked for.

        Raises:
            Refused: UNEQUAL_COPIES, and nothing is changed.
        """
        unequal = [copy for copy in self._copies if not self._is_equal(copy)]
        if unequal:
            raise gathered(
                Refusal("UNEQUAL_COPIES", f"{copy.why}\nbut they differ", Where(None, copy.name)) for copy in unequal
            )
        with torch.no_grad():
            for name, tensor in self._asked.items():
                whole = self._whole.get(name)
                values = local_of(self.read[name]) if whole is None else _part(whole, tensor, name)
                local_of(tensor).copy_(values)

    def _is_equal(self, copy: MemberCopy) -> bool:
        stack, member, count = self._whole[copy.stack], self._whole[copy.name], copy.stem.count
        is_stacked = member.dim() and stack.numel() == count * member.numel()  # a step has no dims: one for all
        return same_bytes(stack.view(count, *member.shape)[copy.place] if is_stacked else stack, member)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return mark(torch.empty_like(tensor, requires_grad=False), part_of(tensor))


def _part(whole: torch.Tensor, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    rank = World().rank
    return take(whole, placement_of(tensor, rank, name).held(whole_shape(tensor))[rank])
