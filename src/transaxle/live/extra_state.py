"""What a run keeps besides tensors: random states, the place in the data, schedulers, a module's extra state.

It is plain data (numbers, texts, bytes, None, lists, tuples, dicts, sets, tensors and arrays), written as JSON in one
file that travels with the checkpoint: no pickle, so reading it runs nothing. What all ranks say alike is written once,
and any number of ranks can read it; what differs is each rank's own, and only as many ranks as wrote it can read it.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.storage.storage import parsed
from transaxle.formats.training_state import nested, tops
from transaxle.live.model.state_tensors import State, set_extra_state
from transaxle.live.transport.world import World
from transaxle.torch_tensors import as_bytes, code_of, copy_to_cpu, torch_dtype

FILE = "transaxle_extra.json"
"""Name of the file."""
MODEL, STATE, EXTRA = "model", "state", "extra"
"""Whose states are in it, as the first part of their names: the modules', the state dict's, the user's own."""
_DEEPEST = 64
_WORLD, _SHARED, _RANKS = "world", "shared", "ranks"
_TUPLE, _SET, _DICT, _COUNTER, _BYTES, _STREAM, _TENSOR, _ARRAY, _SCALAR, _FLOAT = (
    "tuple", "set", "dict", "counter", "bytes", "stream", "tensor", "array", "scalar", "float",
)  # fmt: skip
_DTYPE, _SHAPE, _DATA = "dtype", "shape", "data"


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives its state and takes it back."""

    def state_dict(self) -> Any:
        """Return it, as plain data."""

    def load_state_dict(self, state: Any) -> Any:
        """Take it."""


class Random:
    """The states of all random generators of this process: Python's, NumPy's, torch's, and those of its GPUs.

    Args:
        strict: refuse a checkpoint without states for this rank, which happens if another number of ranks wrote it;
            False: leave the generators unchanged, and report it.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict

    def state_dict(self) -> dict[str, Any]:
        """Return the states."""
        state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the states; those of GPUs only if this process has the same number of GPUs."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        on_gpus = state.get("cuda", ())
        if torch.cuda.is_available() and len(on_gpus) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(on_gpus)


def state_of(held: Any) -> Any:
    """Return the state of a Stateful; plain data is its own state."""
    return held.state_dict() if isinstance(held, Stateful) else held


def written(states: Mapping[str, Any], world: World) -> bytes | None:
    """Return the file that holds the states of all ranks; None where no rank has any; collective.

    Args:
        states: this rank's, by name.
        world: the ranks.

    Raises:
        Refused: on every rank: UNSUPPORTED for everything that is no plain data, with its path.
    """
    with world.together():
        problems: list[Refusal] = []
        mine = {name: json.dumps(_tagged(state, name, problems, 0)) for name, state in states.items()}
        if problems:
            raise gathered(problems)
    everyone = world.gather(mine)
    if not any(everyone):
        return None
    shared = {name: text for name, text in everyone[0].items() if all(each.get(name) == text for each in everyone)}
    parts = [{name: text for name, text in each.items() if name not in shared} for each in everyone]

    def listed(texts: Mapping[str, str]) -> dict[str, Any]:
        return {name: parsed(text) for name, text in texts.items()}

    found = {_WORLD: world.size, _SHARED: listed(shared), _RANKS: [listed(part) for part in parts]}
    return json.dumps(found, indent=1, allow_nan=False).encode() + b"\n"


class Extras:
    """What a file says to one rank.

    Args:
        text: the file; None where there is none.
        world: the ranks that load.

    Raises:
        Refused: CORRUPT.
    """

    def __init__(self, text: bytes | None, world: World) -> None:
        place = world.ranks.index(world.rank)
        self._size = world.size
        try:
            empty = {_WORLD: world.size, _SHARED: {}, _RANKS: []}
            found: dict[str, Any] = empty if text is None else parsed(text)
            self._saved_by = int(found[_WORLD])
            self._others = {name for part in found[_RANKS] for name in part}
            own = found[_RANKS][place] if found[_RANKS] and self._saved_by == self._size else {}
            self.states: dict[str, Any] = {name: _untagged(value) for name, value in {**found[_SHARED], **own}.items()}
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise refuse("CORRUPT", f"not a valid {FILE}: {error!r}", file=FILE) from error

    def lacking(self, name: str) -> Refusal | None:
        """Return why this rank has no state of a name; None where it has."""
        if name in self.states:
            return None
        if name in self._others:
            message = f"{self._saved_by} ranks saved a state each, but {self._size} ranks load it"
            hint = "Leave it out of extra, or load with strict=False; Random(strict=False) stays as it is."
            return Refusal("UNSUPPORTED", message, Where(FILE, name), hint)
        return Refusal(
            "MISSING_TENSOR",
            "the source does not have this state",
            Where(FILE, name),
            "Use strict=False to leave it unchanged.",
        )


class ExtraLoad:
    """What one rank restores besides tensors: numbers of a state dict, extra states of modules, the user's own objects.

    It is made before anything is written.

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


def _tagged(value: Any, path: str, problems: list[Refusal], depth: int) -> Any:
    """Return plain data as JSON; what JSON has no word for is a dict of one key that names it."""

    def inner(items: Any) -> list[Any]:
        return [_tagged(item, f"{path}[{number}]", problems, depth + 1) for number, item in enumerate(items)]

    if depth > _DEEPEST:
        problems.append(Refusal("UNSUPPORTED", f"it is nested more than {_DEEPEST} levels deep", Where(FILE, path)))
        return None
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if np.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, Mapping):
        pairs = [
            (_tagged(key, f"{path} key", problems, depth + 1), _tagged(item, f"{path}.{key}", problems, depth + 1))
            for key, item in value.items()
        ]
        return {_COUNTER if isinstance(value, Counter) else _DICT: pairs}
    if type(value) is list:
        return inner(value)
    if isinstance(value, tuple):
        return {_TUPLE: inner(value)}
    if type(value) in (set, frozenset):
        return {_SET: inner(sorted(value, key=repr))}
    return _octets(value, path, problems)


def _octets(value: Any, path: str, problems: list[Refusal]) -> Any:
    """Return what has bytes of its own as JSON."""
    if isinstance(value, bytes | bytearray):
        return {_BYTES: _text(bytes(value))}
    if isinstance(value, io.BytesIO):
        return {_STREAM: _text(value.getvalue())}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        kind = _SCALAR if isinstance(value, np.generic) else _ARRAY
        return {kind: {_DTYPE: array.dtype.str, _SHAPE: list(value.shape), _DATA: _text(array.tobytes())}}
    if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta and value.layout == torch.strided:
        held = copy_to_cpu(value)
        data = _text(as_bytes(held).tobytes())
        return {_TENSOR: {_DTYPE: code_of(held.dtype), _SHAPE: list(held.shape), _DATA: data}}
    message = f"it is a {type(value).__module__}.{type(value).__qualname__}, which is not plain data"
    hint = "Give a state_dict of numbers, texts, bytes, lists, dicts, tensors and arrays."
    problems.append(Refusal("UNSUPPORTED", message, Where(FILE, path), hint))
    return None


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind in (_DICT, _COUNTER):
        pairs = {_untagged(key): _untagged(item) for key, item in held}
        return pairs if kind == _DICT else Counter(pairs)
    if kind in (_TUPLE, _SET):
        items = [_untagged(item) for item in held]
        return tuple(items) if kind == _TUPLE else set(items)
    if kind == _FLOAT:
        return float(held)
    if kind in (_BYTES, _STREAM):
        data = base64.b64decode(held, validate=True)
        return data if kind == _BYTES else io.BytesIO(data)
    return _array(kind, held)


def _array(kind: str, held: Mapping[str, Any]) -> Any:
    """Return a tensor or an array."""
    data = bytearray(base64.b64decode(held[_DATA], validate=True))
    if kind == _TENSOR:
        dtype = torch_dtype(held[_DTYPE])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(held[_SHAPE])
    if kind not in (_ARRAY, _SCALAR):
        raise ValueError(f"unknown kind {kind}")
    array = np.frombuffer(data, np.dtype(held[_DTYPE])).reshape(held[_SHAPE])
    return array[()] if kind == _SCALAR else array
