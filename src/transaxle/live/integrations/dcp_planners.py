"""Planners for those who call `torch.distributed.checkpoint` themselves: any dialect, and placements made right.

    dcp.save(state, checkpoint_id=..., planner=SavePlanner("hf"))
    dcp.load(state, checkpoint_id=..., planner=LoadPlanner("hf"))

`state` is under the names of the model, the checkpoint under those of the dialect; without a dialect both have the same
names. Beside dialects the planners mend what torch's own do not see: parts of several runs, types that differ (torch
copies fp8 codes into bf16 as if they were values), pickles in the checkpoint that run code.

Experts in torch's own checkpoints, whatever form a checkpoint and a model have them in.

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

import io
import pickle
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import FLATTEN_MAPPING, flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from transaxle.arguments import Config, read_config, read_flag, read_optional_text, suggests
from transaxle.axes.layout.bind import join_slot, split_slot
from transaxle.axes.layout.relayout import Shape
from transaxle.axes.translation.grouped import (
    MemberCopy,
    Stem,
    between,
    member_copies,
    members_by_stack,
    parameter_shapes,
    stack_name,
)
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.training_state import GROUPS, PARAMS, ParamGroup, group_numbers, renamed
from transaxle.live.global_tensors import Runs, as_runs
from transaxle.live.model.destination import decode_hint
from transaxle.live.state_dict_adapter import loadable_as, regroupable, state_dict_as
from transaxle.live.transport.world import World
from transaxle.quant.entries import code_name
from transaxle.torch_tensors import code_of, local_of, mark, part_of, placement_of, same_bytes, take, whole_shape

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
    return take(whole, placement_of(tensor, rank, name).positions(whole_shape(tensor))[rank])


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
    held = placement_of(first, rank, name).positions(whole_shape(first))[rank]
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


_STATE = re.compile(r"((?:.*?\.)?optim(?:izer)?\.state\.).+\.[^.]+")
"""Flat name of an optimizer's state, `app.optim.state.<parameter>.<state>`; the group is the prefix."""
_HOME = "optimizer.state."
"""Default prefix when the state dict has no optimizer entries."""


class _Translating:
    """The arguments of a planner in addition to those of torch's own."""

    def __init__(
        self,
        dialect: str | None = None,
        *,
        family: str | None = None,
        source: str | None = None,
        config: Config | None = None,
        **torch_options: Any,
    ) -> None:
        super().__init__(**torch_options)
        read_config(config)
        self._dialect = read_optional_text("dialect", dialect, "hf")
        self._said: dict[str, Any] = {
            "family": read_optional_text("family", family, "qwen3_moe"),
            "source": read_optional_text("source", source, "torchtitan"),
            "config": config,
        }


class SavePlanner(_Translating, DefaultSavePlanner):
    """A planner for `dcp.save` that writes a state dict under the names and in the shapes of a dialect.

    Its arguments are the `dialect` of the checkpoint (None: that of the state dict), `family`, `source` and `config` as
    for `state_dict_as`, and those of torch's `DefaultSavePlanner`.
    """

    @suggests
    def __init__(
        self,
        dialect: str | None = None,
        *,
        family: str | None = None,
        source: str | None = None,
        config: Config | None = None,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
    ) -> None:
        super().__init__(
            dialect,
            family=family,
            source=source,
            config=config,
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_replicated_tensors=dedup_replicated_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
            enable_plan_caching=enable_plan_caching,
        )

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """See torch's planner.

        Raises:
            TransaxleError: what `state_dict_as` raises.
        """
        if self._dialect is not None:
            flat = flatten_state_dict(state_dict)[0]
            home = _home(flat)
            tensors, others = _divided(flat, home)
            translated = state_dict_as(tensors, self._dialect, **self._said)
            state_dict = {**{_flat(name, home): value for name, value in translated.items()}, **others}
        super().set_up_planner(as_runs(state_dict), storage_meta, is_coordinator)


class LoadPlanner(_Translating, DefaultLoadPlanner):
    """A planner for `dcp.load` that reads a checkpoint in any dialect; its arguments begin as those of `SavePlanner`.

    If a tensor of the checkpoint corresponds to several tensors of the model or to a part of one, the planner reads it
    into separate memory, and fills the model's tensors when the last one has arrived. Without a dialect, experts of
    grouped layers may be in another form; the planner refuses another number of experts (counted on all ranks), a part
    of them, and two forms that differ.

    To find these, it reads whatever a checkpoint has in both forms whole, into separate memory, on every rank. With
    `trust_copies` it takes them for equal, and each rank reads its own part of one form: the one it asks for, if that
    is complete.
    """

    _given: dict[str, Any]
    _paths: FLATTEN_MAPPING
    _asked: dict[str, Any]
    _experts: dict[str, tuple[int, ...]]
    _bytes: dict[str, Any]
    _settings: ParamGroupNames
    _home: str
    _last: list[Callable[[], None]]
    _left: int
    _lock: threading.Lock

    @suggests
    def __init__(
        self,
        dialect: str | None = None,
        *,
        family: str | None = None,
        source: str | None = None,
        config: Config | None = None,
        trust_copies: bool = False,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        super().__init__(
            dialect,
            family=family,
            source=source,
            config=config,
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            allow_partial_load=allow_partial_load,
        )
        self._trusts = read_flag("trust_copies", trust_copies)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """See torch's planner.

        Raises:
            TransaxleError: what `state_dict_as` raises; SHAPE_MISMATCH and INCOMPLETE for another set of experts.
        """
        self._given, self._bytes, self._last, self._lock = state_dict, {}, [], threading.Lock()
        flat, self._paths = flatten_state_dict(state_dict)
        self._home = _home(flat)
        tensors, others = _divided(flat, self._home)
        self._settings = ParamGroupNames(others, () if metadata is None else metadata.state_dict_metadata.keys())
        others = self._settings.asked
        stored = _stored(metadata, self._home)
        read_into: Mapping[str, torch.Tensor] = tensors
        members: Mapping[str, torch.Tensor] = {}
        wholes: frozenset[str] = frozenset()
        stems: Sequence[Stem] = ()
        if self._dialect is not None:
            read_into, give_back = loadable_as(tensors, self._dialect, **self._said)
            self._last.append(give_back)
        else:
            if self._trusts:
                stored = without_other_forms(stored, tensors.keys())
            slices = ExpertSlices(tensors, _sizes(stored))
            stems = between(_shapes(slices.read), _sizes(stored)).checked()
            changed = [stem.reversed() for stem in stems if stem.stored != stem.wanted]
            if slices.members:
                read_into, members, wholes = slices.read, slices.members, slices.stacks
                self._last.append(slices.finish)
            if changed:
                read_into, give_back = regroupable(read_into, changed)
                self._last.append(give_back)
            read_into = self._begun_anew(read_into, tensors, stems, stored)
        self._experts = _shapes(
            {**{name: tensor for name, tensor in read_into.items() if name not in wholes}, **members}
        )
        doubled = [stem for stem in stems if stem.copies and not self._trusts]
        self._asked = {**{_flat(name, self._home): value for name, value in read_into.items()}, **others}
        if doubled:
            twice = DualFormCheck(doubled, stored, read_into)
            self._last.insert(0, twice.finish)
            read_into = twice.read
        if read_into is not tensors:
            state_dict = {**{_flat(name, self._home): value for name, value in read_into.items()}, **others}
        super().set_up_planner(as_runs(state_dict), metadata, is_coordinator)

    def _begun_anew(
        self,
        read_into: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        stems: Sequence[Stem],
        stored: Mapping[str, TensorStorageMetadata],
    ) -> Mapping[str, torch.Tensor]:
        """Leave out scaling histories that the checkpoint lacks beside its codes: they begin anew."""
        there = {*stored, *(name for stem in stems for name in stem.targets)}
        lacking = [name for name in read_into if name in tensors and name not in stored and code_name(name) in there]
        if not lacking:
            return read_into

        def begin() -> None:
            with torch.no_grad():
                for name in lacking:
                    local_of(tensors[name]).zero_()

        self._last.append(begin)
        return {name: tensor for name, tensor in read_into.items() if name not in lacking}

    def create_local_plan(self) -> LoadPlan:
        """See torch's planner.

        Raises:
            Refused: MISSING_TENSOR, SHAPE_MISMATCH, DTYPE_MISMATCH: everything at once.
        """
        known = {} if self.metadata is None else self.metadata.state_dict_metadata
        problems = []
        for name, value in self._asked.items():
            stored = known.get(name)
            where = Where(None, name)
            if stored is None and not self.allow_partial_load:
                hint = "Use allow_partial_load=True to load the others."
                problems.append(Refusal("MISSING_TENSOR", "the checkpoint has no tensor for it", where, hint))
            if not isinstance(value, torch.Tensor) or not isinstance(stored, TensorStorageMetadata):
                continue
            if tuple(stored.size) != tuple(value.shape):
                message = f"its shape is {list(value.shape)} in the model, but {list(stored.size)} in the checkpoint"
                problems.append(Refusal("SHAPE_MISMATCH", message, where))
            elif stored.properties.dtype != value.dtype:
                here, there = code_of(value.dtype), code_of(stored.properties.dtype)
                way = decode_hint(there, here)
                hint = f"With transaxle.load it can be changed. {way}" if way else ""
                message = f"its dtype is {here} in the model, but {there} in the checkpoint"
                problems.append(Refusal("DTYPE_MISMATCH", message, where, hint))
        if problems:
            raise gathered(problems)
        return replace(super().create_local_plan(), planner_data=self._experts)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """See torch's planner; this step knows the experts that all ranks request together.

        Raises:
            Refused: SHAPE_MISMATCH, INCOMPLETE for another set of them, before anything is read.
        """
        wanted: dict[str, tuple[int, ...]] = {}
        for plan in global_plan:
            wanted |= plan.planner_data
        between(wanted, _sizes(_stored(self.metadata, self._home)), shared_out=False).checked()
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """See torch's planner."""
        self._left = len(new_plan.items)
        return super().finish_plan(new_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See torch's planner; reading never runs code from the checkpoint.

        Raises:
            Refused: UNSAFE_PICKLE.
        """
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise refuse("UNSAFE_PICKLE", str(error).partition("\n")[0], tensor=name) from error
        self._bytes[name] = loaded
        self._one_less()

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """See torch's planner."""
        super().commit_tensor(read_item, tensor)
        self._one_less()

    def _one_less(self) -> None:
        """Count one item less; with the last one, fill the caller's entries."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
            settings = self._settings.restored(self._bytes)
            for make in self._last:
                make()
            for name, value in settings.items():
                path = self._paths.get(name) or self.mappings.get(name, (name,))
                set_element(self._given, path, value)


def _home(flat: Iterable[str]) -> str:
    """Return the prefix of the parameters' names in a state dict's optimizer entries."""
    return next((match[1] for name in flat if (match := _STATE.fullmatch(name)) is not None), _HOME)


def _divided(flat: Mapping[str, Any], home: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a flat state dict by our names, and the rest under its own."""
    tensors = {_slotted(name, home): value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in flat.items() if not isinstance(value, torch.Tensor)}


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _stored(metadata: Metadata | None, home: str) -> dict[str, TensorStorageMetadata]:
    """Return the tensors of a checkpoint by our names."""
    items = {} if metadata is None else metadata.state_dict_metadata
    return {_slotted(name, home): item for name, item in items.items() if isinstance(item, TensorStorageMetadata)}


def _sizes(stored: Mapping[str, TensorStorageMetadata]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(metadata.size) for name, metadata in stored.items()}


def _slotted(name: str, home: str) -> str:
    """Return our name of a tensor: torch's `optimizer.state.<parameter>.<state>` is `optim/<parameter>/<state>`."""
    parameter, dot, slot = name.removeprefix(home).rpartition(".")
    return join_slot(parameter, slot) if name.startswith(home) and dot else name


def _flat(name: str, home: str) -> str:
    """Inverse of `_slotted`."""
    parameter, slot = split_slot(name)
    return name if not slot else f"{home}{parameter}.{slot}"
