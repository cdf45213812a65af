"""What a torch checkpoint has in both forms, experts under their names and all in one tensor: read whole, and compared.

torch's planners are told of what was read only when it is there, tensor by tensor. So where anything is to be compared,
everything is read into memory of its own, and the caller's tensors get it when all is known to be equal. That costs a
second copy, and happens with checkpoints that hold experts twice only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from transaxle.axes.layout.bind import join_slot, split_slot
from transaxle.axes.translation.grouped import Stem
from transaxle.errors import Refusal, Where, gathered
from transaxle.live.transport.world import World
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.placement import placement_of, take
from transaxle.torch_tensors.tensor_bytes import as_bytes
from transaxle.torch_tensors.tp_shard import mark, part_of, whole_shape


class Doubled:
    """A load that compares what is there twice before it changes anything.

    Args:
        stems: what is there in both forms.
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
        self._pairs = [pair for stem in stems for pair in _pairs(stem, stored)]
        whole = dict.fromkeys(name for single, member, _, _ in self._pairs for name in (single, member))
        self._whole = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in whole}
        self.read = {name: _like(tensor) for name, tensor in asked.items()} | self._whole
        """What torch is to fill, by our names."""

    def finish(self) -> None:
        """Give what was read to the tensors asked for.

        Raises:
            Refused: UNEQUAL_COPIES, and nothing is changed.
        """
        problems = []
        for single, member, count, place in self._pairs:
            one, other = self._whole[single], self._whole[member]
            part = one.view(count, *other.shape)[place] if one.numel() == count * other.numel() and other.dim() else one
            if (part.dtype, part.shape) != (other.dtype, other.shape) or (as_bytes(part) != as_bytes(other)).any():
                message = f"{single} and {member} are both there: expert {place}\nbut they differ"
                problems.append(Refusal("UNEQUAL_COPIES", message, Where(None, member)))
        if problems:
            raise gathered(problems)
        with torch.no_grad():
            for name, tensor in self._asked.items():
                whole = self._whole.get(name)
                found = local_of(self.read[name]) if whole is None else _part(whole, tensor, name)
                local_of(tensor).copy_(found)


def _pairs(stem: Stem, stored: Mapping[str, TensorStorageMetadata]) -> Iterator[tuple[str, str, int, int]]:
    """Yield names of the one tensor and of an expert's, how many experts there are, and its number: states included."""
    members = {stem.member(place): place for place in stem.copies}
    for name in stored:
        parameter, slot = split_slot(name)
        single = join_slot(stem.single, slot)
        if parameter in members and single in stored:
            yield single, name, stem.count, members[parameter]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return mark(torch.empty_like(tensor, requires_grad=False), part_of(tensor))


def _part(whole: torch.Tensor, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    rank = World().rank
    return take(whole, placement_of(tensor, rank, name).held(whole_shape(tensor))[rank])
