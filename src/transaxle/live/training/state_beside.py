"""What a load restores beside tensors: numbers of a state dict, extra states of modules, and the user's own objects."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.errors import Refusal, Where
from transaxle.formats.training_items import nested, tops
from transaxle.live.model.state_tensors import State, set_extra_state
from transaxle.live.training.extra_state import EXTRA, FILE, MODEL, STATE, Extras, Random, Stateful
from transaxle.live.transport.world import World
from transaxle.torch_tensors.torch_arguments import torch_dtype


class Beside:
    """What one rank restores; made before anything is written.

    Args:
        state: the model or state dict.
        others: its entries that are no tensors, by name.
        extra: what the user wants, by name.
        checkpoint: the source.
        stored: its tensors by the model's names.
        world: the ranks.

    Attributes:
        missing: names that the source lacks.
        problems: what stands against restoring, missing ones included.
        scalars: values of the entries of a state dict, after `read`.
        extra: states whose names were given without an object that takes them, after `install`.

    Raises:
        TransaxleError: what reading the file of extras raises.
    """

    def __init__(
        self,
        state: State,
        others: Mapping[str, Any],
        extra: Mapping[str, Any],
        checkpoint: Checkpoint,
        stored: Mapping[str, StoredTensor],
        world: World,
    ) -> None:
        self._state = state
        self._others = others
        self._wanted = extra
        self._stored = {name: stored[name] for name in others if name in stored}
        self._owner = MODEL if isinstance(state, nn.Module) else STATE
        storage = checkpoint.container.storage
        there = FILE in checkpoint.container.carried
        self._extras = Extras(storage.read(FILE, 0, storage.size(FILE)) if there else None, world)
        self._items = checkpoint.container.training
        self._all = stored
        known = set(tops(self._items)) if self._items else set()
        self._trained = [name for name in extra if name in known and f"{EXTRA}/{name}" not in self._extras.states]
        """Extras that are training state of the source's own kind."""
        self.scalars: dict[str, Any] = {}
        self.extra: dict[str, Any] = {}
        lacking = [(name, self._extras.lacking(f"{self._owner}/{name}")) for name in others if name not in stored]
        lacking += [(n, self._lacking(f"{EXTRA}/{n}", known)) for n in extra if n not in self._trained]
        self.missing = tuple(name for name, problem in lacking if problem is not None)
        lenient = {name for name, held in extra.items() if isinstance(held, Random) and not held.strict}
        self.lacking = [problem for name, problem in lacking if problem is not None and name not in lenient]
        self.problems = [
            Refusal("SHAPE_MISMATCH", f"it is a number here, but {list(tensor.shape)} in the source", Where(None, name))
            for name, tensor in self._stored.items()
            if tensor.shape and self._owner == STATE
        ]
        for name in self._trained:
            odd = nested(self._items, name, lambda _: None)[1]
            message = f"it is not plain data, and a load never unpickles objects: {'; '.join(odd)}"
            hint = "Leave it out of extra, and restore that part yourself."
            self.problems += [Refusal("UNSUPPORTED", message, Where(None, name), hint)] if odd else []

    def _lacking(self, key: str, known: Collection[str]) -> Refusal | None:
        """Return why this rank has no state of a name, and which names there are."""
        problems = self._extras.lacking(key)
        if problems is None or not known:
            return problems
        return replace(problems, hint=f"The source has {', '.join(sorted(known))}. {problems.hint}")

    def given(self) -> dict[str, tuple[object, Any]]:
        """Return by name the objects that take states saved by Transaxle, with these."""
        states = ((name, held, f"{EXTRA}/{name}") for name, held in self._wanted.items())
        return {name: (held, self._extras.states[key]) for name, held, key in states if key in self._extras.states}

    def read(self) -> None:
        """Read everything; nothing is changed yet.

        Raises:
            TransaxleError: what reading raises.
        """
        for name in self._stored:
            value = self._read(name)
            self.scalars[name] = value if self._owner == MODEL else value.item()
        for name in self._trained:
            self._extras.states[f"{EXTRA}/{name}"] = nested(self._items, name, self._read)[0]
        for name in self._others:
            key = f"{self._owner}/{name}"
            if name not in self._stored and key in self._extras.states:
                self.scalars[name] = self._extras.states[key]

    def _read(self, name: str) -> torch.Tensor:
        """Read a tensor."""
        tensor = self._all[name]
        octets = bytearray(tensor.tobytes())
        dtype = torch_dtype(tensor.dtype, tensor=name)
        value = torch.frombuffer(octets, dtype=dtype) if octets else torch.empty(0, dtype=dtype)
        return value.reshape(tensor.shape)

    def install(self) -> None:
        """Hand every state to its owner."""
        if isinstance(self._state, nn.Module):
            for name, value in self.scalars.items():
                set_extra_state(self._state, name, value)
            self.scalars = {}
        for name, held in self._wanted.items():
            key = f"{EXTRA}/{name}"
            if key not in self._extras.states:
                continue
            if isinstance(held, Stateful):
                state = self._extras.states[key]
                held.load_state_dict(_with_empty(state, held.state_dict()) if name in self._trained else state)
            else:
                self.extra[name] = self._extras.states[key]


def _with_empty(state: Any, own: Any) -> Any:
    """Return a state with the empty dicts that an object has itself: torch leaves them out of DCP folders, and its own
    load keeps the object's.
    """
    if isinstance(own, list) and isinstance(state, list | dict):
        items = dict(enumerate(state)) if isinstance(state, list) else state
        filled = _with_empty(items, dict(enumerate(own)))
        return [filled[key] for key in range(len(filled))] if filled.keys() == set(range(len(filled))) else state
    if not isinstance(own, Mapping) or not isinstance(state, dict):
        return state
    lacking = {key: value for key, value in own.items() if key not in state and _is_empty(value)}
    return {key: _with_empty(value, own.get(key)) for key, value in state.items()} | lacking


def _is_empty(value: Any) -> bool:
    """Tell whether a value is a dict, or a list of dicts, in which nothing is, however deep."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return isinstance(value, list) and bool(value) and all(map(_is_empty, value))
