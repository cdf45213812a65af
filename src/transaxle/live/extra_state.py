"""State of a training run that is not tensors: random states, the position in the data, schedulers, and extra state of
modules.

Extra state is plain data (numbers, strings, bytes, None, lists, tuples, dicts, sets, tensors and arrays). Extra state
is stored as JSON in one file of the checkpoint. The file is no pickle, so reading it runs no code. A state that is
equal on all ranks is stored once, and any number of ranks can load it. A state that differs between ranks is stored per
rank, and only the same number of ranks can load it.
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
from transaxle.formats.storage.storage import parse_json
from transaxle.formats.training_state import nest_items, tops
from transaxle.live.model.state_tensors import State, set_extra_state
from transaxle.live.transport.world import World
from transaxle.torch_tensors import as_bytes, code_of, copy_to_cpu, torch_dtype

FILE = "transaxle_extra.json"
"""Name of the file with extra state in a checkpoint."""
MODEL, STATE, EXTRA = "model", "state", "extra"
"""The possible first segments of a state's name, for a module's extra state, an entry of a state dict, and an object in
the argument `extra`.
"""
_DEEPEST = 64
_WORLD, _SHARED, _RANKS = "world", "shared", "ranks"
_TUPLE, _SET, _DICT, _COUNTER, _BYTES, _STREAM, _TENSOR, _ARRAY, _SCALAR, _FLOAT = (
    "tuple", "set", "dict", "counter", "bytes", "stream", "tensor", "array", "scalar", "float",
)  # fmt: skip
_DTYPE, _SHAPE, _DATA = "dtype", "shape", "data"


@runtime_checkable
class Stateful(Protocol):
    """Any object with the methods `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Any:
        """Return the object's state as plain data."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore a state that `state_dict` returned earlier."""


class Random:
    """State of the random generators of this process: Python, NumPy, torch and its GPUs.

    Args:
        strict: whether to refuse a checkpoint that has no state for this rank, because a different number of ranks
            wrote it. If `strict` is False, the generators are left unchanged, and the load's report mentions it.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all random generators."""
        state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the states of all random generators; those of GPUs are set only if the number of GPUs is the same as at
        the save.
        """
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        on_gpus = state.get("cuda", ())
        if torch.cuda.is_available() and len(on_gpus) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(on_gpus)


def state_of(stateful: Any) -> Any:
    """Return the state of a `Stateful` object; any other object must be plain data, and is returned itself."""
    return stateful.state_dict() if isinstance(stateful, Stateful) else stateful


def encode_states(states: Mapping[str, Any], world: World) -> bytes | None:
    """Encode the states of all ranks as the content of `FILE`; return None if no rank has a state. All ranks must call
    this function.

    Args:
        states: name -> state, for this rank's states.
        world: all ranks that take part.

    Raises:
        Refused: raised on every rank, with code UNSUPPORTED, if a value is not plain data; each refusal contains the
            path of the value.
    """
    with world.together():
        problems: list[Refusal] = []
        encoded_own = {name: json.dumps(_tag(state, name, problems, 0)) for name, state in states.items()}
        if problems:
            raise gathered(problems)
    everyone = world.gather(encoded_own)
    if not any(everyone):
        return None
    shared = {
        name: text for name, text in everyone[0].items() if all(rank_texts.get(name) == text for rank_texts in everyone)
    }
    parts = [{name: text for name, text in rank_texts.items() if name not in shared} for rank_texts in everyone]

    def decode_texts(texts: Mapping[str, str]) -> dict[str, Any]:
        return {name: parse_json(text) for name, text in texts.items()}

    contents = {_WORLD: world.size, _SHARED: decode_texts(shared), _RANKS: [decode_texts(part) for part in parts]}
    return json.dumps(contents, indent=1, allow_nan=False).encode() + b"\n"


class SavedStates:
    """The states in an extra state file that one rank loads.

    Args:
        text: content of the extra state file; None if the checkpoint has no such file.
        world: the ranks that load.

    Raises:
        Refused: with code CORRUPT, if the extra state file is not valid.
    """

    def __init__(self, text: bytes | None, world: World) -> None:
        position = world.ranks.index(world.rank)
        self._size = world.size
        try:
            empty = {_WORLD: world.size, _SHARED: {}, _RANKS: []}
            contents: dict[str, Any] = empty if text is None else parse_json(text)
            self._saved_by = int(contents[_WORLD])
            self._non_tensors = {name for part in contents[_RANKS] for name in part}
            rank_states = contents[_RANKS][position] if contents[_RANKS] and self._saved_by == self._size else {}
            self.states: dict[str, Any] = {
                name: _untag(value) for name, value in {**contents[_SHARED], **rank_states}.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise refuse("CORRUPT", f"not a valid {FILE}: {error!r}", file=FILE) from error

    def refusal_for(self, name: str) -> Refusal | None:
        """Return a refusal if the file has no state with this name for this rank; otherwise return None."""
        if name in self.states:
            return None
        if name in self._non_tensors:
            message = f"{self._saved_by} ranks saved a state each, but {self._size} ranks load it"
            hint = (
                "Leave this name out of extra, or load with strict=False; with Random(strict=False), "
                "the random state is not changed."
            )
            return Refusal("UNSUPPORTED", message, Where(FILE, name), hint)
        return Refusal(
            "MISSING_TENSOR",
            "the source does not have this state",
            Where(FILE, name),
            "Use strict=False to leave this entry unchanged.",
        )


class ExtraLoad:
    """The part of a load that is not tensors: entries of a state dict, extra states of modules, and objects in the
    argument `extra`.

    An `ExtraLoad` is created while the load is planned, before any tensor is written.

    Args:
        state: the model or state dict.
        non_tensors: name -> entry of the model or state dict that is not a tensor.
        extra: name -> object to restore.
        checkpoint: the source checkpoint.
        stored: the model's tensor name -> tensor of the source.
        world: all ranks that take part.

    Attributes:
        missing: names of extra states that the source lacks.
        problems: refusals of the extra state, except refusals of missing states.
        scalars: key -> value, for entries of a state dict that are not tensors; set by `read`.
        extra: name -> state, for objects without the method `load_state_dict`; set by `install`.

    Raises:
        TransaxleError: if the extra state file cannot be read.
    """

    def __init__(
        self,
        state: State,
        non_tensors: Mapping[str, Any],
        extra: Mapping[str, Any],
        checkpoint: Checkpoint,
        stored: Mapping[str, StoredTensor],
        world: World,
    ) -> None:
        self._state = state
        self._non_tensors = non_tensors
        self._requested = extra
        self._stored = {name: stored[name] for name in non_tensors if name in stored}
        self._owner = MODEL if isinstance(state, nn.Module) else STATE
        storage = checkpoint.container.storage
        has_file = FILE in checkpoint.container.carried
        self._extras = SavedStates(storage.read(FILE, 0, storage.size(FILE)) if has_file else None, world)
        self._items = checkpoint.container.training
        self._all = stored
        training_names = set(tops(self._items)) if self._items else set()
        self._trained = [
            name for name in extra if name in training_names and f"{EXTRA}/{name}" not in self._extras.states
        ]
        """Names in the argument `extra` that the source stores as training state in its own format."""
        self.scalars: dict[str, Any] = {}
        self.extra: dict[str, Any] = {}
        refusals_by_name = [
            (name, self._extras.refusal_for(f"{self._owner}/{name}")) for name in non_tensors if name not in stored
        ]
        refusals_by_name += [
            (n, self._refusal_with_names(f"{EXTRA}/{n}", training_names)) for n in extra if n not in self._trained
        ]
        self.missing = tuple(name for name, problem in refusals_by_name if problem is not None)
        lenient = {name for name, stateful in extra.items() if isinstance(stateful, Random) and not stateful.strict}
        self.lacking = [problem for name, problem in refusals_by_name if problem is not None and name not in lenient]
        self.problems = [
            Refusal("SHAPE_MISMATCH", f"it is a number here, but {list(tensor.shape)} in the source", Where(None, name))
            for name, tensor in self._stored.items()
            if tensor.shape and self._owner == STATE
        ]
        for name in self._trained:
            unreadable = nest_items(self._items, name, lambda _: None)[1]
            message = f"it is not plain data, and a load never unpickles objects: {'; '.join(unreadable)}"
            hint = "Leave this name out of extra, and restore the state yourself."
            self.problems += [Refusal("UNSUPPORTED", message, Where(None, name), hint)] if unreadable else []

    def _refusal_with_names(self, key: str, training_names: Collection[str]) -> Refusal | None:
        """Return a refusal if the source has no state with this name for this rank; its hint lists the names in the
        source.
        """
        refusal = self._extras.refusal_for(key)
        if refusal is None or not training_names:
            return refusal
        return replace(refusal, hint=f"The source has {', '.join(sorted(training_names))}. {refusal.hint}")

    def objects_to_restore(self) -> dict[str, tuple[object, Any]]:
        """Return name -> (object, state), for the objects whose states were saved by Transaxle."""
        states = ((name, stateful, f"{EXTRA}/{name}") for name, stateful in self._requested.items())
        return {
            name: (stateful, self._extras.states[key]) for name, stateful, key in states if key in self._extras.states
        }

    def read(self) -> None:
        """Read all states from the source; the model and the objects are not changed by this.

        Raises:
            TransaxleError: if a state in the source cannot be read.
        """
        for name in self._stored:
            value = self._read(name)
            self.scalars[name] = value if self._owner == MODEL else value.item()
        for name in self._trained:
            self._extras.states[f"{EXTRA}/{name}"] = nest_items(self._items, name, self._read)[0]
        for name in self._non_tensors:
            key = f"{self._owner}/{name}"
            if name not in self._stored and key in self._extras.states:
                self.scalars[name] = self._extras.states[key]

    def _read(self, name: str) -> torch.Tensor:
        """Read a whole stored tensor into a new CPU tensor."""
        tensor = self._all[name]
        octets = bytearray(tensor.tobytes())
        dtype = torch_dtype(tensor.dtype, tensor=name)
        value = torch.frombuffer(octets, dtype=dtype) if octets else torch.empty(0, dtype=dtype)
        return value.reshape(tensor.shape)

    def install(self) -> None:
        """Restore each state into the module or object that the state belongs to."""
        if isinstance(self._state, nn.Module):
            for name, value in self.scalars.items():
                set_extra_state(self._state, name, value)
            self.scalars = {}
        for name, stateful in self._requested.items():
            key = f"{EXTRA}/{name}"
            if key not in self._extras.states:
                continue
            if isinstance(stateful, Stateful):
                state = self._extras.states[key]
                stateful.load_state_dict(
                    _add_empty_dicts(state, stateful.state_dict()) if name in self._trained else state
                )
            else:
                self.extra[name] = self._extras.states[key]


def _add_empty_dicts(state: Any, own_state: Any) -> Any:
    """Add to a loaded state the empty dicts of the object's present state: torch omits empty dicts from DCP folders,
    and torch's own load keeps those of the object.
    """
    if isinstance(own_state, list) and isinstance(state, list | dict):
        items = dict(enumerate(state)) if isinstance(state, list) else state
        filled = _add_empty_dicts(items, dict(enumerate(own_state)))
        return [filled[key] for key in range(len(filled))] if filled.keys() == set(range(len(filled))) else state
    if not isinstance(own_state, Mapping) or not isinstance(state, dict):
        return state
    empty_dicts = {key: value for key, value in own_state.items() if key not in state and _is_empty(value)}
    return {key: _add_empty_dicts(value, own_state.get(key)) for key, value in state.items()} | empty_dicts


def _is_empty(value: Any) -> bool:
    """Return whether a value is an empty dict, or a dict or list that contains only empty dicts, at any depth."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return isinstance(value, list) and bool(value) and all(map(_is_empty, value))


def _tag(value: Any, path: str, problems: list[Refusal], depth: int) -> Any:
    """Convert plain data to JSON; a value of a type that JSON lacks becomes a dict with a single key, the name of the
    type.
    """

    def inner(items: Any) -> list[Any]:
        return [_tag(item, f"{path}[{number}]", problems, depth + 1) for number, item in enumerate(items)]

    if depth > _DEEPEST:
        problems.append(Refusal("UNSUPPORTED", f"it is nested more than {_DEEPEST} levels deep", Where(FILE, path)))
        return None
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if np.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, Mapping):
        pairs = [
            (_tag(key, f"{path} key", problems, depth + 1), _tag(item, f"{path}.{key}", problems, depth + 1))
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
    """Convert bytes, a tensor or an array to JSON; for any other value, add a refusal to `problems`."""
    if isinstance(value, bytes | bytearray):
        return {_BYTES: _text(bytes(value))}
    if isinstance(value, io.BytesIO):
        return {_STREAM: _text(value.getvalue())}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        kind = _SCALAR if isinstance(value, np.generic) else _ARRAY
        return {kind: {_DTYPE: array.dtype.str, _SHAPE: list(value.shape), _DATA: _text(array.tobytes())}}
    if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta and value.layout == torch.strided:
        on_cpu = copy_to_cpu(value)
        data = _text(as_bytes(on_cpu).tobytes())
        return {_TENSOR: {_DTYPE: code_of(on_cpu.dtype), _SHAPE: list(on_cpu.shape), _DATA: data}}
    message = f"it is a {type(value).__module__}.{type(value).__qualname__}, which is not plain data"
    hint = "Give a state_dict of numbers, texts, bytes, lists, dicts, tensors and arrays."
    problems.append(Refusal("UNSUPPORTED", message, Where(FILE, path), hint))
    return None


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _untag(value: Any) -> Any:
    if isinstance(value, list):
        return [_untag(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in (_DICT, _COUNTER):
        pairs = {_untag(key): _untag(item) for key, item in content}
        return pairs if kind == _DICT else Counter(pairs)
    if kind in (_TUPLE, _SET):
        items = [_untag(item) for item in content]
        return tuple(items) if kind == _TUPLE else set(items)
    if kind == _FLOAT:
        return float(content)
    if kind in (_BYTES, _STREAM):
        data = base64.b64decode(content, validate=True)
        return data if kind == _BYTES else io.BytesIO(data)
    return _array(kind, content)


def _array(kind: str, content: Mapping[str, Any]) -> Any:
    """Decode a tensor or a numpy array from its JSON form."""
    data = bytearray(base64.b64decode(content[_DATA], validate=True))
    if kind == _TENSOR:
        dtype = torch_dtype(content[_DTYPE])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(content[_SHAPE])
    if kind not in (_ARRAY, _SCALAR):
        raise ValueError(f"unknown kind {kind}")
    array = np.frombuffer(data, np.dtype(content[_DTYPE])).reshape(content[_SHAPE])
    return array[()] if kind == _SCALAR else array
