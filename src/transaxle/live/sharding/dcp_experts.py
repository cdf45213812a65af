"""Experts in torch's own checkpoints, whatever form a checkpoint and a model have them in.

A checkpoint may store experts twice, under their own names and stacked: the copies are compared before anything is
loaded (`DualFormCheck`). torch tells planners of a tensor only once it has been read. So where anything is stored
twice, everything is read into memory of its own, and the caller's tensors get their values when all copies are known
to be equal. That costs a second copy of the model, and happens with such checkpoints only. Who trusts a checkpoint has
one form read, in place.

Where ranks share the experts out, each loads its own as a slice of the stacked tensor (`ExpertSlices`).

Settings of an optimizer call its parameters by name: experts in the model's own form (`ParamGroupNames`).

    {"param_groups": [{"lr": 0.1, "params": ["fc1.weight0", "fc1.weight1"]}]}       one value for all groups
    {"param_groups.fc1.weight0.lr": 0.1, "param_groups.fc1.weight1.lr": 0.1}        one for each parameter, flattened

torch gives a group the settings of the one that has a parameter of the same name, and none where there is none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from transaxle.axes.layout.bind import split_slot
from transaxle.axes.layout.solve import Shape
from transaxle.axes.translation.grouped import (
    MemberCopy,
    Stem,
    member_copies,
    members_by_stack,
    parameter_shapes,
    stack_name,
)
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.training_state.state_groups import GROUPS, PARAMS, ParamGroup, group_numbers, renamed
from transaxle.live.sharding.dcp_chunks import Runs
from transaxle.live.transport.world import World
from transaxle.torch_tensors.local_tensor import local_of, same_bytes
from transaxle.torch_tensors.placement import mark, part_of, placement_of, take, whole_shape

_LISTED = re.compile(rf"(?:.*\.)?{GROUPS}")
"""Flat name of all groups."""
_NAMES = re.compile(rf"((?:.*\.)?{GROUPS})\.[0-9]+\.{PARAMS}")
"""Flat name of the parameters of one group, where some setting is a tensor; what stands before its number."""
_ONE = re.compile(rf"((?:.*\.)?{GROUPS}\.)(.+)(\.[^.]+)")
"""Flat name of one setting of one parameter."""
_HINT = "Build the optimizer with the groups that the source has."


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


@dataclass(frozen=True, slots=True)
class _Slice:
    """This rank's experts in one stacked tensor of the checkpoint."""

    read: torch.Tensor
    """The stacked tensor as torch reads it; this rank has its own experts of it."""
    values: torch.Tensor
    """The memory that is read into: the local parts of `members` stacked, or one number for all of them."""
    members: tuple[torch.Tensor, ...]
    """The experts' tensors, which get the values."""


class ExpertSlices:
    """Stand-ins for a rank's experts, which are read as slices and then copied into the experts.

    A rank that has all experts needs none.

    Args:
        tensors: this rank's, states of an optimizer included.
        stored: names and shapes of the checkpoint's.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Shape]) -> None:
        wanted_shapes = parameter_shapes({name: whole_shape(tensor) for name, tensor in tensors.items()})
        stored_shapes = parameter_shapes(stored)
        self._slices: dict[str, _Slice] = {}
        self.members: dict[str, torch.Tensor] = {}
        """The experts' tensors that have a stand-in."""
        for stack, names in members_by_stack(name for name in tensors if name not in stored).items():
            shape = stored_shapes.get(split_slot(stack)[0], ())  # a step has no dims
            is_stack = len(shape) == len(wanted_shapes[split_slot(names[min(names)])[0]]) + 1
            if is_stack and stack in stored and max(names) < shape[0] > len(names):
                numbers = sorted(names)
                self._slices[stack] = _slice(stack, shape[0], numbers, [tensors[names[number]] for number in numbers])
                self.members |= {name: tensors[name] for name in names.values()}
        self.stacks = frozenset(self._slices)
        """Names of the checkpoint's tensors that are read in the experts' place."""
        others = {name: tensor for name, tensor in tensors.items() if name not in self.members}
        self.read: dict[str, torch.Tensor] = {**others, **{name: each.read for name, each in self._slices.items()}}
        """All that is read into."""

    def finish(self) -> None:
        """Copy the values that were read into the experts."""
        with torch.no_grad():
            for each in self._slices.values():
                for place, member in enumerate(each.members):
                    local_of(member).copy_(each.values[place] if each.values.dim() else each.values)


def _slice(name: str, count: int, numbers: list[int], members: list[torch.Tensor]) -> _Slice:
    first = members[0]
    if not first.dim():  # a step: every expert has one, the stack has one for all
        return _Slice(first, first, tuple(members))
    local, rank = local_of(first), World().rank
    held = placement_of(first, rank, name).held(whole_shape(first))[rank]
    values = torch.empty((len(members), *local.shape), dtype=local.dtype, device=local.device)
    expert_intervals = tuple((number, number + 1) for number in numbers)
    read = Runs(torch.Size((count, *whole_shape(first))), values, (expert_intervals, *held))
    return _Slice(read, values, tuple(members))


class ParamGroupNames:
    """Which settings of a checkpoint are read, and what they become under the names of a state dict.

    Args:
        given: values of a state dict that are no tensors, by flat name.
        stored: flat names of the checkpoint.
    """

    def __init__(self, given: Mapping[str, Any], stored: Collection[str]) -> None:
        self._given = given
        self._sources = _sources([name for name in given if name not in stored], stored)
        read_instead = {source: given[name] for name, sources in self._sources.items() for source in sources}
        self.asked: dict[str, Any] = {n: value for n, value in given.items() if n not in self._sources} | read_instead
        """What is to be read."""

    def restored(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was read by the names of the state dict.

        Args:
            read: values by the names of `asked`.

        Raises:
            Refused: UNSUPPORTED for experts that are one parameter here, and were trained with different settings.
        """
        problems: list[Refusal] = []
        values = {name: value for name, value in read.items() if name in self._given}
        for name, sources in self._sources.items():
            values[name] = read[sources[0]]
            other = next((source for source in sources if repr(read[source]) != repr(values[name])), None)
            if other is not None:
                message = (
                    f"{sources[0]} is {values[name]!r} and {other} is {read[other]!r}, but here they are one parameter"
                )
                problems.append(Refusal("UNSUPPORTED", message, Where(None, name), _HINT))
        lists: dict[str, list[str]] = defaultdict(list)
        for name, value in values.items():
            split = _NAMES.fullmatch(name)
            if split is not None:
                lists[split[1]].append(name)
            elif _LISTED.fullmatch(name) and _are_groups(value) and _are_groups(self._given[name]):
                values[name] = _renamed(self._given[name], value, problems)
        for names in lists.values():
            own, stored = ([{PARAMS: side[name]} for name in names] for side in (self._given, values))
            if _are_groups(own) and _are_groups(stored):
                groups = _renamed(own, stored, problems)
                values |= {name: group[PARAMS] for name, group in zip(names, groups, strict=True)}
        if problems:
            raise gathered(problems)
        return values


def _sources(lacking: Iterable[str], stored: Iterable[str]) -> dict[str, list[str]]:
    """Return for settings of parameters that the checkpoint lacks those of the same experts in the other form."""
    by_stack: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name in stored:
        if (setting := _of_stack(name)) is not None:
            by_stack[setting].append(name)
    settings = {name: setting for name in lacking if (setting := _of_stack(name)) is not None}
    return {name: by_stack[setting] for name, setting in settings.items() if setting in by_stack}


def _of_stack(name: str) -> tuple[str, str, str] | None:
    """Return the flat name of one parameter's setting in three parts, an expert's under the name of the stack."""
    split = _ONE.fullmatch(name)
    return None if split is None else (split[1], stack_name(split[2]), split[3])


def _are_groups(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(group, dict) and _are_names(group.get(PARAMS)) for group in value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _renamed(own: Iterable[ParamGroup], stored: Sequence[ParamGroup], problems: list[Refusal]) -> list[ParamGroup]:
    """Return the stored groups, with experts under the names that the optimizer has for them.

    Args:
        own: groups of the optimizer.
        stored: groups of the checkpoint.
        problems: receives UNSUPPORTED for a parameter that would be of several groups.
    """
    group_of = group_numbers(stored)
    by_stack: dict[str, list[str]] = defaultdict(list)
    for name in group_of:
        by_stack[stack_name(name)].append(name)
    own_names = dict.fromkeys(name for group in own for name in group[PARAMS])
    new_names: dict[str, list[str]] = {}
    for name in own_names:
        sources = by_stack.get(stack_name(name), []) if name not in group_of else []
        first_of = {group_of[source]: source for source in reversed(sources)}
        if len(first_of) > 1:
            shown = " and ".join(first_of[number] for number in dict.fromkeys(map(group_of.__getitem__, sources)))
            message = f"{shown} were trained with different settings, but here they are one parameter"
            problems.append(Refusal("UNSUPPORTED", message, Where(None, name), _HINT))
        for source in sources:
            new_names.setdefault(source, [source] if source in own_names else []).append(name)
    return renamed(stored, new_names)
