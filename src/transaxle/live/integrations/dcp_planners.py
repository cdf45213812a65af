"""Planners for those who call `torch.distributed.checkpoint` themselves: any dialect, and placements made right.

    dcp.save(state, checkpoint_id=..., planner=SavePlanner("hf"))
    dcp.load(state, checkpoint_id=..., planner=LoadPlanner("hf"))

`state` is under the names of the model, the checkpoint under those of the dialect; without a dialect both have the same
names. Beside dialects the planners mend what torch's own do not see: parts of several runs, types that differ (torch
copies fp8 codes into bf16 as if they were values), pickles in the checkpoint that run code.
"""

from __future__ import annotations

import io
import pickle
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import FLATTEN_MAPPING, flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from transaxle.arguments import Config, read_config, read_flag, read_optional_text, suggests
from transaxle.axes.layout.bind import join_slot, split_slot
from transaxle.axes.translation.grouped import Stem, between
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.live.model.destination import decode_hint
from transaxle.live.reexpress.state_dict_adapter import loadable_as, regroupable, state_dict_as
from transaxle.live.sharding.dcp_chunks import as_runs
from transaxle.live.sharding.dcp_experts import DualFormCheck, ExpertSlices, ParamGroupNames, without_other_forms
from transaxle.quant.entries import code_name
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.torch_arguments import code_of

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
