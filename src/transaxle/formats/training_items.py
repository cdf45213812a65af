"""Training state beside model and optimizer: schedulers, counters, the position in the data, averages of the weights.

Trainers save it in the same dict as the model (torchtitan: `train_state`, `lr_scheduler`, `dataloader`; Lightning:
`loops`, `callbacks`, `hyper_parameters`; nanoGPT: `model_args`, `iter_num`). It is recognised by the names of its
containers, by its place beside the model's container, or as a Python number (`epoch`), which no parameter is. Its
tensors and numbers are ordinary tensors of the catalog; this module records which items they are, and keeps the other
values as far as they are plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import msgspec

from transaxle.formats.dtype import scalar
from transaxle.formats.pickled.descriptors import NOTHING, Scalar

_NAMES = frozenset(
    {
        "train_state", "training_state", "trainer_state", "lr_scheduler", "lr_schedulers", "lr_scheduler_state_dict",
        "scheduler", "schedulers", "scheduler_state_dict", "opt_param_scheduler", "dataloader", "data_loader",
        "dataloaders", "train_dataloader", "dataloader_state_dict", "dataset_state", "sampler", "samplers", "rng_state",
        "rng_states", "rng", "random_state", "random_states", "cuda_rng_state", "torch_rng_state", "grad_scaler",
        "scaler", "scaler_state_dict", "loss_scaler", "native_amp_scaling_state", "amp_scaling_state",
        "MixedPrecision", "rerun_state_machine", "args", "epoch", "step", "global_step", "iteration", "loops",
        "callbacks", "hyper_parameters", "datamodule_hyper_parameters", "model_args", "iter_num", "best_val_loss",
        "client_state", "metrics", "history",
    }
)  # fmt: skip
"""Containers and numbers that trainers write at the top of a state."""
_AVERAGES = frozenset(
    {
        "ema", "ema_state", "ema_state_dict", "ema_model", "ema_model_state_dict", "model_ema", "state_dict_ema",
        "ema_params", "ema_weights", "averaged_model", "shadow_params",
    }
)  # fmt: skip
"""Containers of averages of the weights beside those of the model; alone they are the model."""
EXTRA_STATE = "_extra_state"
"""Last segment of what modules keep beside parameters, such as TransformerEngine's scales, as bytes."""
_DEEPEST = 64


class TrainingItem(msgspec.Struct, frozen=True):
    """One item of the training state."""

    path: tuple[str | int, ...]
    """Keys and list indices from the top of the state."""
    name: str | None
    """Name of its tensor in the catalog; None if it is not a tensor."""
    value: Any = None
    """Its value if it was not saved as a tensor, as the pickle describes it."""
    what: str = ""
    """A description of the value."""

    @property
    def is_tensor(self) -> bool:
        """Whether it was saved as a tensor."""
        return self.name is not None and self.value is None

    def plain(self) -> object:
        """Return the value as plain data; `NOTHING` where some of it is not, or it was saved as a tensor."""
        return NOTHING if self.is_tensor else _plain(self.value, _DEEPEST)


def is_training(path: tuple[str | int, ...], kind: str, root: str | None, holding: Container[str | int]) -> bool:
    """Tell whether a leaf outside of model and optimizer is training state.

    Args:
        path: where it is.
        kind: see `formats.state.Leaf`; a tensor is a parameter, unless a container of training state holds it, or the
            model is in a container and the tensor is alone beside that.
        root: name of the model's container; None: there is none.
        holding: tops of the paths of all tensors.
    """
    top, nested = str(path[0]), len(path) > 1
    if kind == "tensor":
        return top in _NAMES if nested and top not in _AVERAGES else root is not None and "." not in top
    if top.partition(".")[0] in _NAMES:
        return True
    return kind == "number" and "." not in top and (not nested or root is not None or path[0] not in holding)


def is_extra_state(name: str) -> bool:
    """Tell whether a tensor is what a module keeps beside its parameters; Megatron's shards add `/shard_0_2`."""
    return name.rpartition(".")[2].partition("/")[0] == EXTRA_STATE


def tops(items: Sequence[TrainingItem]) -> list[str]:
    """Return the top-level names of the training state."""
    return list(dict.fromkeys(str(item.path[0]) for item in items))


def nested(items: Sequence[TrainingItem], top: str, read: Callable[[str], object]) -> tuple[object, list[str]]:
    """Return the state under one name as it was saved, and descriptions of the values that are not plain data.

    Args:
        items: of a container.
        top: the name.
        read: returns the value of a tensor of the catalog.
    """
    odd: list[str] = []
    tree: dict[str | int, Any] = {}
    for item in items:
        if str(item.path[0]) != top:
            continue
        value = read(str(item.name)) if item.is_tensor else item.plain()
        if value is NOTHING:
            odd.append(f"{'.'.join(map(str, item.path))} is {item.what}")
        at = tree
        for key in item.path[:-1]:
            at = at.setdefault(key, {})
        at[item.path[-1]] = value
    return _listed(tree).get(top), odd


def _listed(tree: dict[str | int, Any]) -> Any:
    """Turn dicts whose keys are 0, 1, … into lists: a path does not tell the two apart."""
    inner = {key: _listed(value) if type(value) is dict else value for key, value in tree.items()}
    numbers = [key for key in inner if isinstance(key, int)]
    return [inner[key] for key in sorted(numbers)] if inner and sorted(numbers) == list(range(len(inner))) else inner


def _plain(value: Any, depth: int) -> object:
    """Return a value as plain data; `NOTHING` where some of it is not."""
    if depth < 0:
        return NOTHING
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is Scalar:
        return scalar(value.data, value.code)
    if type(value) in (list, tuple, set):
        items = [_plain(item, depth - 1) for item in value]
        return NOTHING if any(item is NOTHING for item in items) else type(value)(items)
    if isinstance(value, Mapping):
        pairs = {key: _plain(item, depth - 1) for key, item in value.items()}
        odd = any(not isinstance(key, str | int | float | bytes | tuple) or v is NOTHING for key, v in pairs.items())
        return NOTHING if odd else pairs
    return NOTHING
