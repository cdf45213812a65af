"""Planners for `torch.distributed.checkpoint` (DCP) that read and write any dialect, and handle every placement
correctly.

    dcp.save(state, checkpoint_id=..., planner=SavePlanner("hf"))
    dcp.load(state, checkpoint_id=..., planner=LoadPlanner("hf"))

`state` uses the model's tensor names, and the checkpoint uses the dialect's names. If no dialect is given, checkpoint
and model have the same names. The planners also avoid errors of torch's own planners: with shards of several runs, with
differing dtypes (torch copies fp8 codes into bf16 as if they were values), and with pickles in the checkpoint that run
code.

**Experts** may be separate tensors or one stacked tensor, both in the checkpoint and in the model. If a checkpoint
stores experts in both forms, the two copies are compared before anything is loaded (`DualFormCheck`). But torch calls a
planner only after it has read a tensor. So all tensors of such a checkpoint are read into separate memory, and are
copied into the caller's tensors after all copies have proved equal. The separate memory has the size of the model. With
`trust_copies`, only one form is read, directly into the caller's tensors.

If the experts are distributed among ranks, each rank loads its own experts as a slice of the stack (`ExpertSlices`).

**Optimizer settings** in a state dict list parameters by name, with experts in the model's form (`ParamGroupNames`):

    {"param_groups": [{"lr": 0.1, "params": ["fc1.weight0", "fc1.weight1"]}]}       one value for all groups
    {"param_groups.fc1.weight0.lr": 0.1, "param_groups.fc1.weight1.lr": 0.1}        one for each parameter, flattened

For a parameter group, torch loads the settings of a stored group that has a parameter of the same name. If no stored
group has one, torch silently keeps the present settings.
"""

from __future__ import annotations

import io
import pickle
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    Regrouping,
    between,
    member_copies,
    members_by_stack,
    parameter_shapes,
    stack_name,
)
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.training_state import GROUPS, PARAMS, ParamGroup, group_numbers, rename_parameters
from transaxle.live.global_tensors import Runs, as_runs
from transaxle.live.model.destination import decode_hint
from transaxle.live.state_dict_adapter import loadable_as, regroupable, state_dict_as
from transaxle.live.transport.world import World
from transaxle.quant.entries import code_name
from transaxle.torch_tensors import code_of, local_of, mark, part_of, placement_of, same_bytes, take, whole_shape

_LISTED = re.compile(rf"(?:.*\.)?{GROUPS}")
"""Pattern of the flattened key under which the list of all parameter groups is stored."""
_NAMES = re.compile(rf"((?:.*\.)?{GROUPS})\.[0-9]+\.{PARAMS}")
"""Pattern of the key of one group's parameter names, if torch flattened the list of groups because a setting is a
tensor. Match group 1 ends before the number of the parameter group.
"""
_ONE = re.compile(rf"((?:.*\.)?{GROUPS}\.)(.+)(\.[^.]+)")
"""Pattern of the flattened key under which one setting of one parameter is stored."""
_HINT = "Build the optimizer with the groups that the source has."


class DualFormCheck:
    """Compares the copies of experts that are stored both separately and stacked, before a load changes any tensor.

    Args:
        stems: names of the sets of experts that are stored in both forms.
        stored: Transaxle's tensor name -> tensor of the checkpoint.
        requested: Transaxle's tensor name -> tensor to fill, in the checkpoint's form.
    """

    def __init__(
        self,
        stems: Iterable[Regrouping],
        stored: Mapping[str, TensorStorageMetadata],
        requested: Mapping[str, torch.Tensor],
    ) -> None:
        self._requested = requested
        self._copies = member_copies(stems, stored)
        names = dict.fromkeys(name for copy in self._copies for name in (copy.stack, copy.name))
        self._whole = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
        self.read = {name: _like(tensor) for name, tensor in requested.items()} | self._whole
        """Transaxle's tensor name -> tensor that torch should fill."""

    def finish(self) -> None:
        """Compare the copies of the experts, and fill the requested tensors.

        Raises:
            Refused: with code UNEQUAL_COPIES, if the two copies of an expert differ; no requested tensor is changed in
                this case.
        """
        unequal = [copy for copy in self._copies if not self._is_equal(copy)]
        if unequal:
            raise gathered(
                Refusal("UNEQUAL_COPIES", f"{copy.why}\nbut they differ", Where(None, copy.name)) for copy in unequal
            )
        with torch.no_grad():
            for name, tensor in self._requested.items():
                whole = self._whole.get(name)
                values = local_of(self.read[name]) if whole is None else _part(whole, tensor, name)
                local_of(tensor).copy_(values)

    def _is_equal(self, copy: MemberCopy) -> bool:
        stack, member, count = self._whole[copy.stack], self._whole[copy.name], copy.stem.count
        # The optimizer state of a stack has one 0-d `step` for all experts.
        is_stacked = member.dim() and stack.numel() == count * member.numel()
        return same_bytes(stack.view(count, *member.shape)[copy.place] if is_stacked else stack, member)


def without_other_forms(
    stored: Mapping[str, TensorStorageMetadata], requested: Collection[str]
) -> dict[str, TensorStorageMetadata]:
    """Return a checkpoint's tensors with only one form of each set of experts that is stored in both forms.

    The requested form is kept. If the requested form lacks a state or an expert, the second form is kept instead,
    provided that the second form is complete.

    Args:
        stored: Transaxle's tensor name -> tensor of the checkpoint.
        requested: the tensor names that this rank requests.
    """
    numbered, dropped = members_by_stack(stored), set[str]()
    members, stacks = _by_parameter(stored)
    requested_members, requested_stacks = _by_parameter(requested)
    for parameter in members.keys() & stacks.keys():
        wanted_members, wanted_stacks = requested_members[parameter], requested_stacks[parameter]
        if bool(wanted_members) == bool(wanted_stacks):
            continue
        if wanted_members:
            as_stacks = members_by_stack(wanted_members)
            forms = [(wanted_members <= stored.keys(), stacks), (as_stacks.keys() <= stored.keys(), members)]
        else:
            counts = {stored[name].size[0] for name in stacks[parameter] if stored[name].size}
            are_whole = all(counts == {len(numbered.get(name, ()))} for name in wanted_stacks)
            forms = [(wanted_stacks <= stored.keys(), members), (are_whole, stacks)]
        dropped |= next((other_forms[parameter] for is_whole, other_forms in forms if is_whole), set())
    return {name: metadata for name, metadata in stored.items() if name not in dropped}


def _by_parameter(names: Collection[str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return stacked parameter -> names of its experts' tensors, and stacked parameter -> names of the tensors of the
    stack itself.
    """
    members: dict[str, set[str]] = defaultdict(set)
    stacks: dict[str, set[str]] = defaultdict(set)
    for stack, members_by_number in members_by_stack(names).items():
        members[split_slot(stack)[0]].update(members_by_number.values())
    for name in names:
        stacks[split_slot(name)[0]].add(name)
    return members, stacks


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return mark(torch.empty_like(tensor, requires_grad=False), part_of(tensor))


def _part(whole: torch.Tensor, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return this rank's shard of a whole tensor."""
    rank = World().rank
    return take(whole, placement_of(tensor, rank, name).positions(whole_shape(tensor))[rank])


@dataclass(frozen=True, slots=True)
class _Slice:
    """The experts of this rank as a slice of a stacked tensor in the checkpoint."""

    read: torch.Tensor
    """Tensor that is read instead of the stacked tensor; its local shard contains this rank's experts."""
    values: torch.Tensor
    """Memory into which torch reads: the stacked local tensors of `members`, or a single number that all members
    share.
    """
    members: tuple[torch.Tensor, ...]
    """The tensors of this rank's experts, into which the values are copied."""


class ExpertSlices:
    """Reads a rank's experts as slices of stacked tensors, and then copies the values into the experts' tensors.

    On a rank that has all experts no slices are needed.

    Args:
        tensors: name -> tensor, for this rank's tensors including optimizer state.
        stored: name -> shape, for the checkpoint's tensors.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Shape]) -> None:
        wanted_shapes = parameter_shapes({name: whole_shape(tensor) for name, tensor in tensors.items()})
        stored_shapes = parameter_shapes(stored)
        self._slices: dict[str, _Slice] = {}
        self.members: dict[str, torch.Tensor] = {}
        """Name of an expert's tensor -> the tensor, for experts that are read as slices of a stack."""
        for stack, names in members_by_stack(name for name in tensors if name not in stored).items():
            shape = stored_shapes.get(split_slot(stack)[0], ())  # an optimizer's `step` is a 0-d tensor
            is_stack = len(shape) == len(wanted_shapes[split_slot(names[min(names)])[0]]) + 1
            if is_stack and stack in stored and max(names) < shape[0] > len(names):
                numbers = sorted(names)
                self._slices[stack] = _slice(stack, shape[0], numbers, [tensors[names[number]] for number in numbers])
                self.members |= {name: tensors[name] for name in names.values()}
        self.stacks = frozenset(self._slices)
        """Names of the stacked tensors that are read instead of the experts' tensors."""
        whole_tensors = {name: tensor for name, tensor in tensors.items() if name not in self.members}
        self.read: dict[str, torch.Tensor] = {
            **whole_tensors,
            **{name: expert_slice.read for name, expert_slice in self._slices.items()},
        }
        """Name -> tensor, for all tensors that torch should read, including slices of stacks."""

    def finish(self) -> None:
        """Copy the values that were read into the experts' tensors."""
        with torch.no_grad():
            for expert_slice in self._slices.values():
                for place, member in enumerate(expert_slice.members):
                    local_of(member).copy_(
                        expert_slice.values[place] if expert_slice.values.dim() else expert_slice.values
                    )


def _slice(name: str, count: int, numbers: list[int], members: list[torch.Tensor]) -> _Slice:
    first = members[0]
    # each expert of the model has its own `step`, but the stored stack has one `step` for all experts
    if not first.dim():
        return _Slice(first, first, tuple(members))
    local, rank = local_of(first), World().rank
    intervals = placement_of(first, rank, name).positions(whole_shape(first))[rank]
    values = torch.empty((len(members), *local.shape), dtype=local.dtype, device=local.device)
    expert_intervals = tuple((number, number + 1) for number in numbers)
    read = Runs(torch.Size((count, *whole_shape(first))), values, (expert_intervals, *intervals))
    return _Slice(read, values, tuple(members))


class ParamGroupNames:
    """Selects which optimizer settings to read from a checkpoint, and translates them to the parameter names of a state
    dict.

    Args:
        non_tensors: flattened key -> value of the state dict that is not a tensor.
        stored: flattened keys of the checkpoint's entries.
    """

    def __init__(self, non_tensors: Mapping[str, Any], stored: Collection[str]) -> None:
        self._state_dict = non_tensors
        self._sources = _sources([name for name in non_tensors if name not in stored], stored)
        read_instead = {source: non_tensors[name] for name, sources in self._sources.items() for source in sources}
        self.requested: dict[str, Any] = {
            n: value for n, value in non_tensors.items() if n not in self._sources
        } | read_instead
        """Flattened key -> entry of the checkpoint that torch should read."""

    def to_state_dict(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """Return key in the state dict -> value that was read from the checkpoint.

        Args:
            read: key in `requested` -> value that was read.

        Raises:
            Refused: with code UNSUPPORTED, if experts that are one parameter in the state dict were trained with
                different settings.
        """
        problems: list[Refusal] = []
        values = {name: value for name, value in read.items() if name in self._state_dict}
        for name, sources in self._sources.items():
            values[name] = read[sources[0]]
            conflicting = next((source for source in sources if repr(read[source]) != repr(values[name])), None)
            if conflicting is not None:
                message = (
                    f"{sources[0]} is {values[name]!r} and {conflicting} is {read[conflicting]!r}, "
                    "but here they are one parameter"
                )
                problems.append(Refusal("UNSUPPORTED", message, Where(None, name), _HINT))
        lists: dict[str, list[str]] = defaultdict(list)
        for name, value in values.items():
            split = _NAMES.fullmatch(name)
            if split is not None:
                lists[split[1]].append(name)
            elif _LISTED.fullmatch(name) and _are_groups(value) and _are_groups(self._state_dict[name]):
                values[name] = _rename_experts(self._state_dict[name], value, problems)
        for names in lists.values():
            own_groups, stored_groups = (
                [{PARAMS: side[name]} for name in names] for side in (self._state_dict, values)
            )
            if _are_groups(own_groups) and _are_groups(stored_groups):
                groups = _rename_experts(own_groups, stored_groups, problems)
                values |= {name: group[PARAMS] for name, group in zip(names, groups, strict=True)}
        if problems:
            raise gathered(problems)
        return values


def _sources(lacking: Iterable[str], stored: Iterable[str]) -> dict[str, list[str]]:
    """For settings that the checkpoint lacks, return key -> keys of the same experts' settings in the form that the
    checkpoint uses.
    """
    by_stack: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name in stored:
        if (setting := _of_stack(name)) is not None:
            by_stack[setting].append(name)
    settings = {name: setting for name in lacking if (setting := _of_stack(name)) is not None}
    return {name: by_stack[setting] for name, setting in settings.items() if setting in by_stack}


def _of_stack(name: str) -> tuple[str, str, str] | None:
    """Split the key of a parameter's setting into prefix, parameter and setting; the name of an expert becomes the name
    of its stack.
    """
    split = _ONE.fullmatch(name)
    return None if split is None else (split[1], stack_name(split[2]), split[3])


def _are_groups(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(group, dict) and _are_names(group.get(PARAMS)) for group in value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _rename_experts(
    own_groups: Iterable[ParamGroup], stored: Sequence[ParamGroup], problems: list[Refusal]
) -> list[ParamGroup]:
    """Return the stored parameter groups, with experts named as in the optimizer.

    Args:
        own_groups: parameter groups of the optimizer that loads.
        stored: parameter groups of the checkpoint.
        problems: list to which a refusal (UNSUPPORTED) is added for each parameter that would belong to several groups.
    """
    group_of = group_numbers(stored)
    by_stack: dict[str, list[str]] = defaultdict(list)
    for name in group_of:
        by_stack[stack_name(name)].append(name)
    own_names = dict.fromkeys(name for group in own_groups for name in group[PARAMS])
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
    return rename_parameters(stored, new_names)


_STATE = re.compile(r"((?:.*?\.)?optim(?:izer)?\.state\.).+\.[^.]+")
"""Pattern of the flattened key of optimizer state, `app.optim.state.<parameter>.<state>`; match group 1 is the
prefix.
"""
_HOME = "optimizer.state."
"""Prefix of the keys of optimizer state, if the state dict has no optimizer entry from which the prefix could be
read.
"""


class _Translating:
    """Base class with the arguments that both planners have in addition to the arguments of torch's planners."""

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
        self._dialect_options: dict[str, Any] = {
            "family": read_optional_text("family", family, "qwen3_moe"),
            "source": read_optional_text("source", source, "torchtitan"),
            "config": config,
        }


class SavePlanner(_Translating, DefaultSavePlanner):
    """A planner for `dcp.save` that writes a state dict with the tensor names and shapes of a dialect.

    The arguments of the planner are the `dialect` of the checkpoint (None means the dialect of the state dict),
    `family`, `source` and `config` as for `state_dict_as`, and the arguments of torch's `DefaultSavePlanner`.
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
        """Prepare to save a state dict, translated into the dialect of the checkpoint.

        Raises:
            TransaxleError: any error that `state_dict_as` raises; with code UNSUPPORTED, if the optimizer's state or
                settings keep names that the dialect does not have.
        """
        if self._dialect is not None:
            flat = flatten_state_dict(state_dict)[0]
            home = _home(flat)
            tensors, non_tensors = _split_tensors(flat, home)
            translated = state_dict_as(tensors, self._dialect, **self._dialect_options)
            if problems := list(_find_other_names(tensors, translated, non_tensors, self._dialect)):
                raise gathered(problems)
            state_dict = {**{torch_name(name, home): value for name, value in translated.items()}, **non_tensors}
        super().set_up_planner(as_runs(state_dict), storage_meta, is_coordinator)


class LoadPlanner(_Translating, DefaultLoadPlanner):
    """A planner for `dcp.load` that reads a checkpoint in any dialect. The first arguments of the planner are the same
    as for `SavePlanner`.

    If a tensor of the checkpoint corresponds to several tensors of the model or to a region of one, the planner reads
    it into separate memory. The planner fills the model's tensors when all tensors have been read. Without a dialect,
    the experts of grouped layers may still be separate tensors in the checkpoint and a stack in the model, or the
    reverse. The planner refuses a checkpoint with a different number of experts (counted on all ranks), with only some
    of them, or with experts in two forms whose values differ.

    To find copies that differ, every rank reads all experts that are stored in both forms completely, into separate
    memory. With `trust_copies` the planner assumes that the copies are equal. With `trust_copies`, each rank reads only
    its own shard of one form of the experts: the requested form, if that is complete.
    """

    _state_dict: dict[str, Any]
    _paths: FLATTEN_MAPPING
    _requested: dict[str, Any]
    _experts: dict[str, tuple[int, ...]]
    _bytes: dict[str, Any]
    _settings: ParamGroupNames
    _home: str
    _final_steps: list[Callable[[], None]]
    _items_left: int
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
        """Prepare to load a checkpoint, which is in its own dialect, into a state dict.

        Raises:
            TransaxleError: any error that `state_dict_as` raises; with code SHAPE_MISMATCH or INCOMPLETE, if the
                checkpoint has a different set of experts.
        """
        self._state_dict, self._bytes, self._final_steps, self._lock = state_dict, {}, [], threading.Lock()
        flat, self._paths = flatten_state_dict(state_dict)
        self._home = _home(flat)
        tensors, non_tensors = _split_tensors(flat, self._home)
        self._settings = ParamGroupNames(non_tensors, () if metadata is None else metadata.state_dict_metadata.keys())
        non_tensors = self._settings.requested
        stored = _tensors_of(metadata, self._home)
        read_into: Mapping[str, torch.Tensor] = tensors
        members: Mapping[str, torch.Tensor] = {}
        wholes: frozenset[str] = frozenset()
        stems: Sequence[Regrouping] = ()
        if self._dialect is not None:
            read_into, give_back = loadable_as(tensors, self._dialect, **self._dialect_options)
            self._final_steps.append(give_back)
        else:
            if self._trusts:
                stored = without_other_forms(stored, tensors.keys())
            slices = ExpertSlices(tensors, _sizes(stored))
            stems = between(_shapes(slices.read), _sizes(stored)).check()
            changed = [stem.invert() for stem in stems if stem.stored != stem.requested]
            if slices.members:
                read_into, members, wholes = slices.read, slices.members, slices.stacks
                self._final_steps.append(slices.finish)
            if changed:
                read_into, give_back = regroupable(read_into, changed)
                self._final_steps.append(give_back)
            read_into = self._reset_missing_histories(read_into, tensors, stems, stored)
        self._experts = _shapes(
            {**{name: tensor for name, tensor in read_into.items() if name not in wholes}, **members}
        )
        doubled = [stem for stem in stems if stem.copies and not self._trusts]
        self._requested = {**{torch_name(name, self._home): value for name, value in read_into.items()}, **non_tensors}
        if doubled:
            check = DualFormCheck(doubled, stored, read_into)
            self._final_steps.insert(0, check.finish)
            read_into = check.read
        if read_into is not tensors:
            state_dict = {**{torch_name(name, self._home): value for name, value in read_into.items()}, **non_tensors}
        super().set_up_planner(as_runs(state_dict), metadata, is_coordinator)

    def _reset_missing_histories(
        self,
        read_into: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        stems: Sequence[Regrouping],
        stored: Mapping[str, TensorStorageMetadata],
    ) -> Mapping[str, torch.Tensor]:
        """If the checkpoint has the codes of tensors but not their scaling histories, do not request the histories;
        they start at zero.
        """
        available = {*stored, *(name for stem in stems for name in stem.targets)}
        lacking = [
            name for name in read_into if name in tensors and name not in stored and code_name(name) in available
        ]
        if not lacking:
            return read_into

        def begin() -> None:
            with torch.no_grad():
                for name in lacking:
                    local_of(tensors[name]).zero_()

        self._final_steps.append(begin)
        return {name: tensor for name, tensor in read_into.items() if name not in lacking}

    def create_local_plan(self) -> LoadPlan:
        """Plan which tensors this rank reads, and check that every stored tensor fits the requested tensor.

        Raises:
            Refused: one error with a refusal for each tensor that does not fit, with code MISSING_TENSOR,
                SHAPE_MISMATCH or DTYPE_MISMATCH.
        """
        stored_items = {} if self.metadata is None else self.metadata.state_dict_metadata
        problems = []
        for name, value in self._requested.items():
            stored = stored_items.get(name)
            where = Where(None, name)
            if stored is None and not self.allow_partial_load:
                hint = "Use allow_partial_load=True to load all other tensors."
                problems.append(Refusal("MISSING_TENSOR", "the checkpoint has no tensor for it", where, hint))
            if not isinstance(value, torch.Tensor) or not isinstance(stored, TensorStorageMetadata):
                continue
            if tuple(stored.size) != tuple(value.shape):
                message = f"its shape is {list(value.shape)} in the model, but {list(stored.size)} in the checkpoint"
                problems.append(Refusal("SHAPE_MISMATCH", message, where))
            elif stored.properties.dtype != value.dtype:
                model_code, stored_code = code_of(value.dtype), code_of(stored.properties.dtype)
                advice = decode_hint(stored_code, model_code)
                hint = f"Use transaxle.load, which can change the dtype. {advice}" if advice else ""
                message = f"its dtype is {model_code} in the model, but {stored_code} in the checkpoint"
                problems.append(Refusal("DTYPE_MISMATCH", message, where, hint))
        if problems:
            raise gathered(problems)
        return replace(super().create_local_plan(), planner_data=self._experts)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Check the plans of all ranks together: the ranks must request exactly the experts that the checkpoint stores.

        Raises:
            Refused: with code SHAPE_MISMATCH or INCOMPLETE, before anything is read, if the checkpoint has a different
                set of experts.
        """
        requested_experts: dict[str, tuple[int, ...]] = {}
        for plan in global_plan:
            requested_experts |= plan.planner_data
        between(requested_experts, _sizes(_tensors_of(self.metadata, self._home)), shared_out=False).check()
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Accept this rank's final plan, and count the read items in it."""
        self._items_left = len(new_plan.items)
        return super().finish_plan(new_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an entry that is not a tensor; reading it never runs code from the checkpoint.

        Raises:
            Refused: with code UNSAFE_PICKLE, if the entry's pickle would run code.
        """
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise refuse("UNSAFE_PICKLE", str(error).partition("\n")[0], tensor=name) from error
        self._bytes[name] = loaded
        self._count_finished()

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Count a tensor as finished after torch has filled it."""
        super().commit_tensor(read_item, tensor)
        self._count_finished()

    def _count_finished(self) -> None:
        """Count a finished read item of the plan; after the last read item, fill the caller's state dict."""
        with self._lock:
            self._items_left -= 1
            if self._items_left:
                return
            settings = self._settings.to_state_dict(self._bytes)
            for make in self._final_steps:
                make()
            for name, value in settings.items():
                path = self._paths.get(name) or self.mappings.get(name, (name,))
                set_element(self._state_dict, path, value)


def _find_other_names(
    tensors: Iterable[str], translated: Iterable[str], non_tensors: Mapping[str, Any], dialect: str
) -> Iterator[Refusal]:
    """Yield a refusal for the first parameter whose optimizer state or settings would keep a name that the dialect of
    the checkpoint does not have.

    Args:
        tensors: Transaxle's names of the tensors in the state dict.
        translated: Transaxle's names of the tensors in the checkpoint.
        non_tensors: flattened key -> entry of the state dict that is not a tensor.
        dialect: the dialect of the checkpoint.
    """
    own_weights, own_states = _weights_and_states(tensors)
    weights, states = _weights_and_states(translated)
    unknown = [name for name in _parameters_of_settings(non_tensors) if name not in weights | states]
    if weights.isdisjoint(own_weights):
        unknown += sorted(own_states & states - weights)
    if weights and unknown:
        message = f"the optimizer's entries would keep this name, which no weight has in the dialect {dialect}"
        hint = 'Save with storage_writer=tx.dcp.Writer(to="dcp:DIALECT", optimizer=KEY), which translates all of it.'
        yield Refusal("UNSUPPORTED", message, Where(None, unknown[0]), hint)


def _weights_and_states(names: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the names of weights, and the names of parameters that have optimizer state."""
    pairs = list(map(split_slot, names))
    return {name for name, slot in pairs if not slot}, {name for name, slot in pairs if slot}


def _parameters_of_settings(non_tensors: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parameter names in an optimizer's settings, in any of the forms that torch gives them."""
    for name, value in non_tensors.items():
        if _NAMES.fullmatch(name) and _are_names(value):
            yield from value
        elif _LISTED.fullmatch(name) and _are_groups(value):
            yield from (parameter for group in value for parameter in group[PARAMS])
        elif (of_parameter := _ONE.fullmatch(name)) and not of_parameter[2].isdecimal():
            yield of_parameter[2]


def _home(flat: Iterable[str]) -> str:
    """Return the prefix of optimizer state in the keys of a state dict."""
    return next((match[1] for name in flat if (match := _STATE.fullmatch(name)) is not None), _HOME)


def _split_tensors(flat: Mapping[str, Any], home: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split a flattened state dict into Transaxle's tensor name -> tensor, and key -> entry that is not a tensor."""
    tensors = {slot_name(name, home): value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in flat.items() if not isinstance(value, torch.Tensor)}


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _tensors_of(metadata: Metadata | None, home: str) -> dict[str, TensorStorageMetadata]:
    """Return Transaxle's tensor name -> tensor, for the tensors of a checkpoint."""
    items = {} if metadata is None else metadata.state_dict_metadata
    return {slot_name(name, home): item for name, item in items.items() if isinstance(item, TensorStorageMetadata)}


def _sizes(stored: Mapping[str, TensorStorageMetadata]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(metadata.size) for name, metadata in stored.items()}


def slot_name(name: str, home: str) -> str:
    """Return Transaxle's name for a tensor: torch's `optimizer.state.<parameter>.<state>` becomes
    `optim/<parameter>/<state>`.
    """
    parameter, dot, slot = name.removeprefix(home).rpartition(".")
    return join_slot(parameter, slot) if name.startswith(home) and dot else name


def torch_name(name: str, home: str) -> str:
    """Return torch's name for a tensor, given the name `optim/<parameter>/<state>`; `slot_name` converts in the
    opposite direction.
    """
    parameter, slot = split_slot(name)
    return name if not slot else f"{home}{parameter}.{slot}"
