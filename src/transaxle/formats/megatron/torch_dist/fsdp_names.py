"""Checkpoints of Megatron-FSDP (`--ckpt-format fsdp_dtensor`): a DCP folder with names of its own.

    model.module.decoder.layers.0.mlp.linear_fc1.weight_w        gate of a gated MLP; _v: up
    optimizer.state.module.module.module.decoder.….exp_avg       the parameter before the state
    args, iteration, opt_param_scheduler.max_lr, …               pickled, an item each

Layers and experts are numbered through the model. Weights are those that the optimizer trains, in full precision.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from transaxle.axes.layout.bind import split_slot
from transaxle.errors import Faults
from transaxle.formats.catalog import Container, Entry, Twin
from transaxle.formats.dcp.metadata import Payload
from transaxle.formats.megatron.run_arguments import NAMES, RunState, run_state
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.saved import read_saved
from transaxle.formats.training_state.state import OPTIMIZER, KeyPath

_MODEL = "model.module."
_STATE = re.compile(r"optimizer\.state\.(?:module\.)+(.+)\.([A-Za-z_][A-Za-z0-9_]*)", re.DOTALL)
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias)\d*)_([wv])", re.DOTALL)
_GATE, _UP = "w", "v"
_SETTINGS = "optimizer.param_to_group_meta"
_FACTS = frozenset({"args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far"})
_SCHEDULER = "opt_param_scheduler"


def is_of_fsdp(keys: Collection[str]) -> bool:
    """Tell whether the keys of a folder are Megatron-FSDP's."""
    return any(key.startswith(_MODEL) for key in keys)


def fsdp_path(key: str) -> KeyPath:
    """Return the path that names an item: the optimizer's state by parameter."""
    match = _STATE.fullmatch(key)
    if match is not None:
        return ("optimizer", "state", *match.groups())
    return (key.removeprefix(_MODEL),)


def is_fact(key: str) -> bool:
    """Tell whether an item says something of the run."""
    return key in _FACTS or key.startswith(f"{_SCHEDULER}.")


def short_key(key: str) -> str:
    """Return the key under which an item that is not read is listed: settings of all parameters under one."""
    return _SETTINGS if key.startswith(f"{_SETTINGS}.") else key


def run_of_items(storage: Storage, payloads: Mapping[str, Payload]) -> RunState:
    """Return the state of a run that is kept in items of its own.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT.
    """
    found: dict[str, Any] = {}
    for key, payload in sorted(payloads.items()):
        value = read_saved(storage, *payload, allowed=NAMES).value
        above, _, name = key.rpartition(".")
        (found if not above else found.setdefault(above, {}))[name] = value
    return run_state(found)


def with_whole_gates(container: Container) -> Container:
    """Return a container in which gate and up of an MLP are one tensor, as they are in the model.

    Raises:
        Refused: INCOMPLETE for one without the other; SHAPE_MISMATCH where they do not fit together.
    """
    faults = Faults()
    entries: dict[str, Entry] = {}
    twins = list(container.twins)
    for name, entry in container.entries.items():
        parameter, state = split_slot(name)
        match = _HALF.fullmatch(parameter)
        if match is None:
            entries[name] = entry
            continue

        def named(of: str, state: str = state) -> str:
            return f"{OPTIMIZER}{of}/{state}" if state else of

        other = named(f"{match[1]}_{_UP if match[2] == _GATE else _GATE}")
        second = container.entries.get(other)
        if second is None:
            message = f"the other half of its projection, {other}, is missing"
            faults.add("INCOMPLETE", message, container.path, name, "Copy the missing files, or save again.")
        elif entry.dtype != second.dtype or entry.shape[1:] != second.shape[1:]:
            faults.add("SHAPE_MISMATCH", f"it does not fit to {other}, the other half", container.path, name)
        elif match[2] == _GATE:
            whole = named(match[1])
            entries[whole] = _stacked(whole, entry, second)
            if not entry.shape:
                twins.append(Twin(entry, second, "they are the steps of two halves of one parameter"))
    if faults:
        raise faults.error()
    return replace(container, entries=entries, twins=tuple(twins))


def _stacked(name: str, first: Entry, second: Entry) -> Entry:
    """Return two tensors as one, the second below the first; of two numbers the first."""
    if not first.shape:
        return replace(first, name=name)
    rows = first.shape[0]
    below = tuple(
        msgspec.structs.replace(each, start=(each.start[0] + rows, *each.start[1:])) for each in second.extents
    )
    return Entry(name, first.dtype, (rows + second.shape[0], *first.shape[1:]), (*first.extents, *below))
