"""What Megatron-Bridge and NeMo keep beside a distributed checkpoint in place of Megatron's arguments.

    iter_0000007/run_config.yaml      Megatron-Bridge: `model`, the settings of what makes the model
    iter_0000007/train_state.pt       what the run has read
    CHECKPOINT/context/model.yaml     NeMo 2: `config`, the same settings; the checkpoint itself is CHECKPOINT/weights

The classes that they name are never looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from transaxle.formats.format import HERE
from transaxle.formats.megatron.arguments_of_run import COUNTERS, NAMES, RunState, plain_data
from transaxle.formats.megatron.iterations import WEIGHTS
from transaxle.formats.megatron.settings_text import NotUnderstood, read_settings
from transaxle.formats.pickled.descriptors import TensorRef
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.saved import read_saved

RUN_CONFIG, TRAIN_STATE, LATEST_TRAIN_STATE = "run_config.yaml", "train_state.pt", "latest_train_state.pt"
MODEL_SETTINGS = "context/model.yaml"
_LONGEST = 1 << 20
_SECTIONS, _INNER = ("model", "config"), "transformer"
"""Keys below which the settings of a model are, and below these those that Megatron calls a transformer's."""
_STEP = "step"
_NAMED = {"num_moe_experts": "num_experts", "hybrid_layer_pattern": "hybrid_override_pattern"}
"""Setting -> Megatron's argument, where it has another name."""
_SHARED, _GROUPS = "share_embeddings_and_output_weights", "num_query_groups"


@dataclass(frozen=True)
class _Settings:
    """A file of settings."""

    file: str
    args: Mapping[str, Any]
    fault: str = ""
    """Why it was not read."""


def with_settings_of_run(
    state: RunState, storage: Storage, member: str, number: Callable[[Storage, str, TensorRef], float | None]
) -> tuple[RunState, dict[str, str]]:
    """Return the state of a run with what settings beside it say, and files that were not understood, with the reason.

    Megatron's own arguments are preferred.

    Args:
        state: from the checkpoint itself.
        storage: where the files are.
        member: the folder of the checkpoint in it.
        number: returns the value of a tensor without dims, of a file.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT.
        StorageError: IO.
    """
    inside = "" if member == HERE else f"{member}/"
    args = dict(state.args)
    left: dict[str, str] = {}
    for file in settings_files(storage, member):
        if args:
            continue
        found = _read(storage, file)
        args |= found.args
        left |= {file: found.fault} if found.fault else {}
    facts = dict(state.facts)
    file = f"{inside}{TRAIN_STATE}"
    if _has(storage, file):
        read = plain_data(read_saved(storage, file, allowed=NAMES).value, partial(number, storage, file))
        counted = {key: int(value) for key, value in (read or {}).items() if isinstance(value, int | float)}
        args |= {key: counted[key] for key in COUNTERS if key in counted}
        facts |= {"iteration": counted[_STEP]} if _STEP in counted and "iteration" not in facts else {}
    return replace(state, args=args, facts=facts), left


def settings_files(storage: Storage, member: str) -> list[str]:
    """Return the files with the settings of a run that are there, beside a checkpoint and above it."""
    inside = "" if member == HERE else f"{member}/"
    above = inside.removesuffix(f"{WEIGHTS}/")
    files = [f"{inside}{RUN_CONFIG}", *([f"{above}{MODEL_SETTINGS}"] if above != inside else [])]
    return [file for file in files if _has(storage, file)]


def _has(storage: Storage, file: str) -> bool:
    folder, _, name = file.rpartition("/")
    above, _, last = folder.rpartition("/")
    if folder and last not in storage.listing(above).folders:
        return False
    return name in storage.listing(folder).names


def _read(storage: Storage, file: str) -> _Settings:
    size = storage.size(file)
    if size > _LONGEST:
        return _Settings(file, {}, f"not read: it has more than {_LONGEST} bytes")
    try:
        settings = read_settings(storage.read(file, 0, size).decode())
    except (NotUnderstood, UnicodeDecodeError, RecursionError) as error:
        return _Settings(file, {}, f"not understood: {error}")
    return _Settings(file, arguments_of(settings))


def arguments_of(settings: object) -> dict[str, Any]:
    """Return Megatron's arguments for the settings of a model."""
    sections = [settings.get(key) for key in _SECTIONS] if isinstance(settings, dict) else []
    model = next((each for each in sections if isinstance(each, dict)), {})
    inner = model.get(_INNER)
    known = {**(inner if isinstance(inner, dict) else {}), **model}
    args = {
        _NAMED.get(key, key): value
        for key, value in plain_data(known).items()
        if not isinstance(value, dict) and not key.startswith("_")
    }
    if isinstance(args.get(_SHARED), bool):
        args["untie_embeddings_and_output_weights"] = not args[_SHARED]
    if _GROUPS in known and known[_GROUPS] is None:
        args["group_query_attention"] = False
    return args
