"""Programs for GPUs on a machine without one: what they ask of CUDA is done on another device, or nothing is done.

With the meta device a model takes no memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_IDLE = (
    "set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "set_stream", "_lazy_init",
    "reset_peak_memory_stats",
)  # fmt: skip


class _Elsewhere(TorchFunctionMode):
    """Puts another device for CUDA in the arguments of every function of torch."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if name == "type":  # tensors have the names of a GPU's
            given = [each.replace("torch.cuda.", "torch.") if isinstance(each, str) else each for each in args]
            found = func(*given, **kwargs)
            return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = self._device
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*(self._device if _is_cuda(each) else each for each in args), **kwargs)


def _is_cuda(given: Any) -> bool:
    return str(given).startswith("cuda") if isinstance(given, str | torch.device) else False


class _Stream:
    """A stream, or an event, that everything has passed already."""

    device, cuda_stream = torch.device("cpu"), 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, *_: object) -> None:
        """It has passed everything."""

    record = record_event = synchronize = wait_event = wait = wait_stream


def _always(answer: Any) -> Callable[..., Any]:
    """Return a function with this answer; torch wants each of its functions to be another one."""
    return lambda *_, **__: answer


def _made(kind: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *_, **__: kind()


def pretend(device: str = "cpu") -> None:
    """Let this process take another device for a GPU, for good.

    Call it before megatron-core is imported.

    Args:
        device: the device, `cpu` or `meta`.
    """
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1", "TORCH_COMPILE_DISABLE": "1"}
    torch.set_num_threads(1)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=1, total_memory=8 << 30, name="cpu")
    answers: dict[str, Any] = {
        "is_available": True, "is_bf16_supported": True, "current_device": device, "device_count": 1,
        "get_device_properties": properties, "get_device_capability": (9, 0), "get_device_name": "cpu",
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "memory_stats": {}, "mem_get_info": (1 << 30, 1 << 30), "is_current_stream_capturing": False,
    }  # fmt: skip
    answers |= dict.fromkeys(_IDLE)
    calls: dict[str, Callable[..., Any]] = {
        **{name: _always(answer) for name, answer in answers.items()},
        **{name: _made(nullcontext) for name in ("stream", "device")},
        **{name: _made(_Stream) for name in ("current_stream", "default_stream")},
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    for name, call in calls.items():
        setattr(torch.cuda, name, call)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, _Stream)
    for name in ("get_rng_state", "set_rng_state", "_lazy_init"):
        setattr(torch.cuda.random, name, calls[name])
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, _always(None))
    _Elsewhere(torch.device(device)).__enter__()  # type: ignore[no-untyped-call]
