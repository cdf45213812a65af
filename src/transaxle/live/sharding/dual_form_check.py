"""Compares experts that a checkpoint stores twice, under their own names and stacked, before anything is loaded.

torch tells planners of a tensor only once it has been read. So where anything is stored twice, everything is read into
memory of its own, and the caller's tensors get their values when all copies are known to be equal. That costs a second
copy of the model, and happens with such checkpoints only. Who trusts a checkpoint has one form read, in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from transaxle.axes.layout.bind import split_slot
from transaxle.axes.translation.grouped import MemberCopy, Stem, member_copies, members_by_stack
from transaxle.errors import Refusal, Where, gathered
from transaxle.live.transport.world import World
from transaxle.torch_tensors.local_tensor import local_of, same_bytes
from transaxle.torch_tensors.placement import mark, part_of, placement_of, take, whole_shape


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


def without_other_forms(
    stored: Mapping[str, TensorStorageMetadata], asked: Collection[str]
) -> dict[str, TensorStorageMetadata]:
    """Return what a checkpoint has, without one form of each set of experts that it stores twice.

    The form asked for stays, or, where that lacks something (a state, an expert), the other one if it is whole.

    Args:
        stored: what the checkpoint has, by our names.
        asked: the names that this rank asks for.
    """
    numbered, dropped = members_by_stack(stored), set[str]()
    members, stacks = _by_parameter(stored)
    asked_members, asked_stacks = _by_parameter(asked)
    for parameter in members.keys() & stacks.keys():
        wanted_members, wanted_stacks = asked_members[parameter], asked_stacks[parameter]
        if bool(wanted_members) == bool(wanted_stacks):
            continue
        if wanted_members:
            as_stacks = members_by_stack(wanted_members)
            forms = [(wanted_members <= stored.keys(), stacks), (as_stacks.keys() <= stored.keys(), members)]
        else:
            counts = {stored[name].size[0] for name in stacks[parameter] if stored[name].size}
            are_whole = all(counts == {len(numbered.get(name, ()))} for name in wanted_stacks)
            forms = [(wanted_stacks <= stored.keys(), members), (are_whole, stacks)]
        dropped |= next((others[parameter] for is_whole, others in forms if is_whole), set())
    return {name: metadata for name, metadata in stored.items() if name not in dropped}


def _by_parameter(names: Collection[str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return by the name of the stack, states with their parameter: names with a number, and all others."""
    members: dict[str, set[str]] = defaultdict(set)
    stacks: dict[str, set[str]] = defaultdict(set)
    for stack, named in members_by_stack(names).items():
        members[split_slot(stack)[0]].update(named.values())
    for name in names:
        stacks[split_slot(name)[0]].add(name)
    return members, stacks


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return mark(torch.empty_like(tensor, requires_grad=False), part_of(tensor))


def _part(whole: torch.Tensor, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    rank = World().rank
    return take(whole, placement_of(tensor, rank, name).held(whole_shape(tensor))[rank])
