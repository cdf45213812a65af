"""A platform of verl for machines without accelerators; verl imports this module by `VERL_USE_EXTERNAL_MODULES`."""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

for _name in ("mindspeed", "nemo_automodel", "megatron", "torchtitan", "trl", "veomni"):
    sys.modules[_name] = None  # type: ignore[assignment]  # verl does without these, and is imported in half the time


class Cpu(PlatformCUDA):  # type: ignore[misc]  # verl has no types
    """What verl asks a platform for, of a CPU."""

    device_name = "cpu"
    vendor_name = "none"

    @property
    def device_module(self) -> ModuleType:
        return torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    def empty_cache(self) -> None:
        pass


set_platform(Cpu())
