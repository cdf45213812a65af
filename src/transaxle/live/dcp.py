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
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import FLATTEN_MAPPING, flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from transaxle.axes.bind import join_slot, split_slot
from transaxle.axes.grouped import Stem
from transaxle.engine.grouped import between
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.live.adapt import loadable_as, regroupable, state_dict_as
from transaxle.live.config import Config
from transaxle.live.convert import decode_hint
from transaxle.live.dtype import code_of
from transaxle.live.runs import as_runs

_STATE = re.compile(r"optimizer\.state\.(.+)\.([^.]+)")
"""Flat name of an optimizer's state: parameter, state."""


class _Translating:
    """What a planner is told, beside what torch's own takes."""

    def __init__(
        self,
        dialect: str | None = None,
        *,
        family: str | None = None,
        source: str | None = None,
        config: Config | None = None,
        **said: Any,
    ) -> None:
        super().__init__(**said)
        self._dialect = dialect
        self._said: dict[str, Any] = {"family": family, "source": source, "config": config}


class SavePlanner(_Translating, DefaultSavePlanner):
    """Writes a state dict under the names and in the shapes of a dialect.

    Its arguments are the `dialect` of the checkpoint (None: that of the state dict), `family`, `source` and `config` as
    for `state_dict_as`, and those of torch's `DefaultSavePlanner`.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """See torch's planner.

        Raises:
            TransaxleError: what `state_dict_as` raises.
        """
        if self._dialect is not None:
            tensors, others = _divided(flatten_state_dict(state_dict)[0])
            made = state_dict_as(tensors, self._dialect, **self._said)
            state_dict = {**{_flat(name): value for name, value in made.items()}, **others}
        super().set_up_planner(as_runs(state_dict), storage_meta, is_coordinator)


class LoadPlanner(_Translating, DefaultLoadPlanner):
    """Reads a checkpoint in any dialect into a state dict; its arguments are those of `SavePlanner`.

    Where a tensor of the checkpoint is not one of the model with other names, it is read into memory of its own, and
    the model's tensors are made of these when the last one is there.
    """

    _given: dict[str, Any]
    _paths: FLATTEN_MAPPING
    _give_back: Callable[[], None] | None
    _left: int
    _lock: threading.Lock

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """See torch's planner.

        Raises:
            TransaxleError: what `state_dict_as` raises.
        """
        self._give_back, self._lock = None, threading.Lock()
        flat, self._paths = flatten_state_dict(state_dict)
        tensors, others = _divided(flat)
        made: Mapping[str, torch.Tensor] | None = None
        if self._dialect is not None:
            made, self._give_back = loadable_as(tensors, self._dialect, **self._said)
        elif stems := _grouped(tensors, metadata):
            made, self._give_back = regroupable(tensors, stems)
        if made is not None:
            self._given = state_dict
            state_dict = {**{_flat(name): value for name, value in made.items()}, **others}
        super().set_up_planner(as_runs(state_dict), metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """See torch's planner.

        Raises:
            Refused: MISSING_TENSOR, SHAPE_MISMATCH, DTYPE_MISMATCH: everything at once.
        """
        known = {} if self.metadata is None else self.metadata.state_dict_metadata
        problems = []
        for name, value in self.state_dict.items():
            stored = known.get(name)
            where = Where(None, name)
            if stored is None and not self.allow_partial_load:
                hint = "allow_partial_load=True loads the others"
                problems.append(Refusal("MISSING_TENSOR", "the checkpoint has nothing for it", where, hint))
            if not isinstance(value, torch.Tensor) or not isinstance(stored, TensorStorageMetadata):
                continue
            if tuple(stored.size) != tuple(value.shape):
                message = f"the model's is {list(value.shape)}, the checkpoint's {list(stored.size)}"
                problems.append(Refusal("SHAPE_MISMATCH", message, where))
            elif stored.properties.dtype != value.dtype:
                here, there = code_of(value.dtype), code_of(stored.properties.dtype)
                hint = decode_hint(there, here).replace("decode=", "transaxle.load with decode=")
                message = f"the model's is {here}, the checkpoint's {there}"
                problems.append(Refusal("DTYPE_MISMATCH", message, where, hint))
        if problems:
            raise gathered(problems)
        return super().create_local_plan()

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """See torch's planner."""
        self._left = len(new_plan.items)
        return super().finish_plan(new_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See torch's planner; what is read runs no code.

        Raises:
            Refused: UNSAFE_PICKLE.
        """
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise refuse("UNSAFE_PICKLE", str(error).partition("\n")[0], tensor=name) from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], found)
        else:
            self.state_dict[name] = found
        if self._give_back is not None:
            set_element(self._given, self._paths[name], found)
        self._one_less()

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """See torch's planner."""
        super().commit_tensor(read_item, tensor)
        self._one_less()

    def _one_less(self) -> None:
        """Make the model's tensors, when everything that they are made of is there."""
        with self._lock:
            self._left -= 1
            if not self._left and self._give_back is not None:
                self._give_back()


def _divided(flat: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a flat state dict by our names, and the rest under its own."""
    tensors = {_slotted(name): value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in flat.items() if not isinstance(value, torch.Tensor)}


def _grouped(tensors: Mapping[str, torch.Tensor], metadata: Metadata | None) -> list[Stem]:
    """Return what is N names on one side and one tensor on the other, where nothing else differs."""
    stored = {} if metadata is None else metadata.state_dict_metadata
    sizes = {_slotted(n): tuple(one.size) for n, one in stored.items() if isinstance(one, TensorStorageMetadata)}
    return between({name: tuple(tensor.shape) for name, tensor in tensors.items()}, sizes)


def _slotted(name: str) -> str:
    """Return what we call a tensor that torch calls so: `optimizer.state.<parameter>.<state>` is one of its states."""
    found = _STATE.fullmatch(name)
    return name if found is None else join_slot(found[1], found[2])


def _flat(name: str) -> str:
    """Inverse of `_slotted`."""
    parameter, slot = split_slot(name)
    return name if not slot else f"optimizer.state.{parameter}.{slot}"
