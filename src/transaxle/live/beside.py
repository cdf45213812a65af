"""What a load restores beside tensors: numbers of a state dict, extra states of modules, and the user's own objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from transaxle.engine.checkpoint import Checkpoint, StoredTensor
from transaxle.errors import Refusal, Where
from transaxle.live.dtype import torch_dtype
from transaxle.live.extras import EXTRA, FILE, MODEL, STATE, Extras, Random, Stateful
from transaxle.live.leaves import State, set_extra_state
from transaxle.live.world import World


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
        self.scalars: dict[str, Any] = {}
        self.extra: dict[str, Any] = {}
        lacking = [(name, self._extras.lacking(f"{self._owner}/{name}")) for name in others if name not in stored]
        lacking += [(name, self._extras.lacking(f"{EXTRA}/{name}")) for name in extra]
        self.missing = tuple(name for name, problem in lacking if problem is not None)
        lenient = {name for name, held in extra.items() if isinstance(held, Random) and not held.strict}
        self.lacking = [problem for name, problem in lacking if problem is not None and name not in lenient]
        self.problems = [
            Refusal("SHAPE_MISMATCH", f"it is a number here, {list(tensor.shape)} in the source", Where(None, name))
            for name, tensor in self._stored.items()
            if tensor.shape and self._owner == STATE
        ]

    def read(self) -> None:
        """Read everything; nothing is changed yet.

        Raises:
            TransaxleError: what reading raises.
        """
        for name, tensor in self._stored.items():
            octets = bytearray(tensor.tobytes())
            dtype = torch_dtype(tensor.dtype, tensor=name)
            value = torch.frombuffer(octets, dtype=dtype) if octets else torch.empty(0, dtype=dtype)
            self.scalars[name] = value.reshape(tensor.shape) if self._owner == MODEL else value.item()
        for name in self._others:
            key = f"{self._owner}/{name}"
            if name not in self._stored and key in self._extras.states:
                self.scalars[name] = self._extras.states[key]

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
                held.load_state_dict(self._extras.states[key])
            else:
                self.extra[name] = self._extras.states[key]
