"""FSDP on CPUs, where accelerate by itself falls back to DDP, and what sharded folders of trainers must contain."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import transaxle as tx
from tests.journeys import trained_models as models
from tests.journeys.record import Journey
from tests.journeys.trained_models import Tensors, launched_as


@contextmanager
def fsdp1_on_cpus() -> Iterator[None]:
    """Let FSDP1 take the CPU for its device, which it refuses, and `cpu:0` beside parameters on `cpu` too."""
    from torch.distributed.fsdp import _init_utils

    made = _init_utils._init_device_handle

    def with_cpu(state: Any, module: Any, ignored: Any, _: Any) -> Any:
        return made(state, module, ignored, torch.device("cpu"))

    with (
        patch("torch.distributed.fsdp.fully_sharded_data_parallel._init_device_handle", with_cpu),
        patch.object(_init_utils, "_get_device_from_device_id", return_value=None),
    ):
        yield


@contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """Let this process look to accelerate like one that torchrun has started, on a machine whose devices FSDP takes.

    One that is alone is left as it is.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def with_fsdp(state: Any, *args: Any, **said: Any) -> None:
        made(state, *args, **said)
        plugin = said.get("fsdp_plugin")
        if plugin is not None:
            state.fsdp_plugin = plugin
            for shared in (AcceleratorState._shared_state, PartialState._shared_state):
                shared["distributed_type"] = DistributedType.FSDP

    told = launched_as(rank, world) if world > 1 else {}
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with patch.dict(os.environ, told), patch.object(AcceleratorState, "__init__", with_fsdp), fsdp1_on_cpus():
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def whole_training_state(model: Any, optimizer: Any) -> tuple[Tensors, Tensors]:
    """Return whole copies of the weights of a model under FSDP1 or FSDP2, and of its optimizer's state by
    `PARAMETER/STATE`, as torch gathers them.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    weights, states = get_state_dict(model, optimizer, options=options)
    by_name: Any = states["state"]
    flat = {f"{name}/{key}": value for name, state in by_name.items() for key, value in state.items()}
    return {name: torch.as_tensor(value).clone() for name, value in weights.items()}, flat


def check_training_state(
    journey: Journey,
    outer: Path,
    inner: str,
    truth: tuple[Tensors, Tensors],
    hub: Path,
    folder: Path,
    attribute: str = "",
) -> None:
    """Open a trainer's outer folder: its weights and its optimizer's state are, bit by bit, what torch gathered.

    `truth` is what `whole_training_state` returned on rank 0; `folder` is where the weights go on to the hub's format,
    whose names do not begin with the `attribute` of a trainer's module.
    """
    weights, states = truth
    assert weights
    assert states
    with tx.open(outer, optimizer=True) as checkpoint:
        assert (checkpoint.path, checkpoint.container.inside) == (f"{outer}/{inner}", inner)
        prefix = "optim/"
        found = {name for name in checkpoint if name.startswith(prefix)}
        assert found == {f"{prefix}{name}" for name in states}
        for name, value in states.items():
            assert torch.equal(checkpoint[f"{prefix}{name}"].torch().reshape(value.shape), value), name
    tx.convert(outer, folder / "back", to="hf", config=hub / "config.json", sync=False)
    journey.passed("back")
    weights = {name.removeprefix(attribute): value for name, value in weights.items()}
    returned = models.whole(models.loaded(folder / "back"))
    assert returned.keys() == weights.keys()
    assert models.unmoved(weights, returned) == list(weights)
    tx.convert(outer, folder / "universal", to="deepspeed-universal", config=hub / "config.json", sync=False)
    assert tx.verify(outer, folder / "universal", config=hub / "config.json").ok
    journey.passed("optimizer")
