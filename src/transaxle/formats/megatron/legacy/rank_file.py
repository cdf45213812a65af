"""What one rank wrote: its part of the model, by local names, and everything beside it as plain descriptions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from transaxle.errors import refuse
from transaxle.formats.builtin_formats import MEGATRON_MODEL
from transaxle.formats.catalog import Checksum, Entry, Extent, NumbersInMemory
from transaxle.formats.deepspeed.checked_value import CheckedValue
from transaxle.formats.deepspeed.zero.ranks import Tensors
from transaxle.formats.megatron.arguments_of_run import NAMES, RunState, run_state
from transaxle.formats.pickled.descriptors import Object, TensorRef
from transaxle.formats.torch_file.saved import read_saved
from transaxle.formats.training_state.flatten import is_tensor

OPTIMIZER_KEY = "optimizer"
STEPS = "transaxle_steps"
"""Tensors that we write besides: for each part of the optimizer, number of the parameter -> its steps."""
_MODEL = re.compile(r"model(\d{0,4})")
_EXTRA = "_extra_state"
_ARGS, _VERSION, _SCHEDULER = "args", "checkpoint_version", "opt_param_scheduler"
_FACTS = (_ARGS, _VERSION, "iteration", _SCHEDULER, "num_floating_point_operations_so_far")
"""Entries of a file whose plain data is kept."""
_SETTLED = 3.0
"""Version from which q, k and v are in the order of today."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleChunk:
    """A part of the model, by the names that the rank has for it."""

    tensors: Mapping[str, Entry]
    """In the order of the module."""
    extra: tuple[str, ...]
    """Names of TransformerEngine's own state, which is not read."""


@dataclass(frozen=True, slots=True, eq=False)
class RankFile:
    """The contents of one rank's model file."""

    folder: str
    """Its folder, as named in the iteration's."""
    file: str
    """The file, inside the checkpoint."""
    root: CheckedValue
    """All of it."""
    run: RunState
    """Arguments and counters."""
    chunks: tuple[ModuleChunk, ...]
    """One for each stage of a virtual pipeline."""
    left: Mapping[str, str]
    """Key -> description of what is not read."""
    checksums: tuple[Checksum, ...]


def read_rank(inline: NumbersInMemory, prefix: str, folder: str) -> RankFile:
    """Read the model file of one rank.

    Args:
        inline: the checkpoint's files.
        prefix: folder of the iteration, with a `/`; empty for the checkpoint itself.
        folder: the rank's folder in it.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT, UNSUPPORTED.
        StorageError: IO.
    """
    file = f"{prefix}{folder}/{MEGATRON_MODEL}"
    saved = read_saved(inline, file, allowed=NAMES)
    root = CheckedValue(saved.value, file)
    _check_version(root)
    left: dict[str, str] = {}
    chunks: dict[int, ModuleChunk] = {}
    for key, node in root.items():
        stage = _MODEL.fullmatch(key) if isinstance(key, str) else None
        if stage is not None:
            chunks[int(stage[1] or 0)] = _chunk(Tensors(inline, file), node, left)
        elif key not in (*_FACTS, OPTIMIZER_KEY, STEPS):
            left[str(key)] = "state of Megatron's that is not read"
    if not chunks:
        raise root.fault("it holds no model")
    if sorted(chunks) != list(range(len(chunks))):
        raise root.fault(f"it holds the stages {sorted(chunks)[:8]} of a virtual pipeline, which are not all")
    run = run_state({key: root.value[key] for key in _FACTS if key in root.value})
    return RankFile(folder, file, root, run, tuple(chunk for _, chunk in sorted(chunks.items())), left, saved.checksums)


def _check_version(root: CheckedValue) -> None:
    """Refuse files in which q, k and v may be in another order.

    Raises:
        Refused: CORRUPT, UNSUPPORTED.
    """
    node = root.get(_VERSION)
    version = 0.0 if node is None else node.real()
    if version < _SETTLED:
        message = f"its checkpoint_version is {version:g}; below {_SETTLED:g}, q, k and v may be in another order"
        hint = "Load it with the Megatron-LM of its time, save it with one from 2021 or later, and convert that."
        raise refuse("UNSUPPORTED", message, file=root.file, hint=hint)


def _chunk(reader: Tensors, model: CheckedValue, left: dict[str, str]) -> ModuleChunk:
    """Return the tensors of a module; what is neither tensor nor extra state is listed in `left`."""
    tensors: dict[str, Entry] = {}
    extra: list[str] = []
    places: dict[tuple[Extent, ...], str] = {}
    for name, node in model.named():
        if name.rpartition(".")[2] == _EXTRA:
            if node.value is not None:
                extra.append(name)
        elif isinstance(node.value, dict):
            message = f"{name!r} is a module in a module: this is the model of a Megatron-LM before megatron-core"
            hint = "Load it with Megatron-LM, save it with --use-mcore-models, and convert that."
            raise refuse("UNSUPPORTED", message, file=model.file, hint=hint)
        elif isinstance(node.value, TensorRef | Object) and is_tensor(node.value):
            entry = reader.tensor(name, node)
            # A further name of a tensor, for another kind of module, is none of its own.
            if entry.extents and places.setdefault(entry.extents, name) == name:
                tensors[name] = entry
        elif is_tensor(node.value):
            message = "it is a quantized tensor, whose numbers Megatron keeps in several"
            hint = "Save the checkpoint without --fp8-param-gather."
            raise refuse("UNSUPPORTED", message, file=model.file, tensor=name, hint=hint)
        elif node.value is not None:
            left[f"{'/'.join(model.path)}/{name}"] = f"a {type(node.value).__name__}"
    return ModuleChunk(tensors, tuple(extra))
