"""Training state: what a checkpoint holds beside model and optimizer: schedulers, counters, the place in the data.

Trainers save it in the same dict as the model (torchtitan: `train_state`, `lr_scheduler`, `dataloader`). It is told by
the names of its containers, and by its kind where it is a Python number of its own (`epoch`): no parameter is one.
Its tensors and numbers are tensors of the catalog like any others; what they belong to is noted here, and the rest of
it is kept here too, as far as it is plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transaxle.formats.dtype import numpy_dtype
from transaxle.formats.pickled.descriptors import NOTHING, Scalar

_NAMES = frozenset(
    {
        "train_state", "training_state", "trainer_state", "lr_scheduler", "lr_schedulers", "lr_scheduler_state_dict",
        "scheduler", "schedulers", "scheduler_state_dict", "dataloader", "data_loader", "train_dataloader", "sampler",
        "rng_state", "rng", "grad_scaler", "scaler", "args", "epoch", "step", "global_step", "iteration",
    }
)  # fmt: skip
"""Containers and numbers at the top of a state that trainers write."""
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class Item:
    """One item of the training state."""

    path: tuple[str | int, ...]
    """Keys and list indices from the top of the state."""
    name: str | None
    """Name of the tensor in the catalog that it is; None: it is none."""
    value: Any = None
    """What it is, where it was saved as no tensor: as the pickle describes it."""
    what: str = ""
    """That in words."""


def is_training(path: tuple[str | int, ...], kind: str) -> bool:
    """Tell whether a leaf outside of model and optimizer is training state.

    Args:
        path: where it is.
        kind: see `formats.state.Leaf`; a tensor is a parameter, unless a container of training state holds it.
    """
    top = str(path[0])
    if kind == "tensor":
        return len(path) > 1 and top in _NAMES
    return top.partition(".")[0] in _NAMES or (kind == "number" and len(path) == 1 and "." not in top)


def tops(items: Sequence[Item]) -> list[str]:
    """Return the names that training state has at the top of a state."""
    return list(dict.fromkeys(str(item.path[0]) for item in items))


def nested(items: Sequence[Item], top: str, read: Callable[[str], object]) -> tuple[object, list[str]]:
    """Return the state of one name as it was saved, and what of it is no plain data.

    Args:
        items: of a container.
        top: the name.
        read: returns the value of a tensor of the catalog.
    """
    odd: list[str] = []
    found: dict[str | int, Any] = {}
    for item in items:
        if str(item.path[0]) != top:
            continue
        is_tensor = item.name is not None and item.value is None
        value = read(str(item.name)) if is_tensor else _plain(item.value, _DEEPEST)
        if value is NOTHING:
            odd.append(f"{'.'.join(map(str, item.path))} is {item.what}")
        at = found
        for part in item.path[:-1]:
            at = at.setdefault(part, {})
        at[item.path[-1]] = value
    return _listed(found).get(top), odd


def _listed(held: dict[str | int, Any]) -> Any:
    """Turn dicts whose keys are the numbers from 0 on into lists: that is how a path tells these."""
    inner = {key: _listed(value) if type(value) is dict else value for key, value in held.items()}
    numbers = [key for key in inner if isinstance(key, int)]
    return [inner[key] for key in sorted(numbers)] if inner and sorted(numbers) == list(range(len(inner))) else inner


def _plain(value: Any, depth: int) -> object:
    """Return a value as plain data; `NOTHING` where some of it is not."""
    if depth < 0:
        return NOTHING
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is Scalar:
        return np.frombuffer(value.data, numpy_dtype(value.code))[0]
    if type(value) in (list, tuple, set):
        items = [_plain(item, depth - 1) for item in value]
        return NOTHING if any(item is NOTHING for item in items) else type(value)(items)
    if isinstance(value, Mapping):
        pairs = {key: _plain(item, depth - 1) for key, item in value.items()}
        odd = any(not isinstance(key, str | int | float | bytes | tuple) or v is NOTHING for key, v in pairs.items())
        return NOTHING if odd else pairs
    return NOTHING
