"""Compiled packages without what is compiled: their Python modules import, and hold what the real ones hold.

- TransformerEngine 2.20.2: its own Python modules, on `transformer_engine_torch` of which every function is a mock.
- fla and mamba_ssm: the modules that megatron-core 0.19.2 imports; of mamba_ssm's `layernorm_gated.RMSNorm`, which
  Megatron's norm is a subclass of, the parameters.

Nothing can be computed with them.
"""

from __future__ import annotations

import os
import re
import sys
import typing
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import typing_extensions

_COMPILED = "transformer_engine_torch"


class _Numbers(type):
    """The type of an enum whose members come into being when they are asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name == "__members__":
            return {each: value for each, value in vars(cls).items() if isinstance(value, int)}
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return getattr(cls, name)


class _Compiled(ModuleType):
    """A module in which every name is something: an enum, or a function that is a mock."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_enum = name[:1].isupper() or name.startswith("NVTE")
        found = _Numbers(name, (), {"__module__": _COMPILED}) if is_enum else MagicMock(name=name)
        setattr(self, name, found)
        return found


class _RMSNorm(torch.nn.Module):
    """Parameters of mamba_ssm's norm."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)


def _no_kernel(*_: Any, **__: Any) -> None:
    raise RuntimeError("a stand-in computes nothing")


def _module(name: str, **things: Any) -> None:
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []
    vars(module).update(things)
    package, _, last = name.rpartition(".")
    if package:
        setattr(sys.modules[package], last, module)


def install() -> None:
    """Put all of them into `sys.modules`. transformers, which has no use for them, is told that they are not there."""
    from transformers.utils import import_utils

    vars(typing).setdefault("override", typing_extensions.override)  # megatron-core asks for it in Python 3.11 as well
    for known in ("mamba_ssm", "mamba_2_ssm", "flash_linear_attention", "causal_conv1d"):
        getattr(import_utils, f"is_{known}_available")()  # these remember their answer
    for name in ("fla", "fla.modules", "fla.ops", "mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        _module(name)
    _module("fla.modules.convolution", causal_conv1d=_no_kernel)
    _module("fla.modules.l2norm", l2norm=_no_kernel)
    _module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=_no_kernel)
    _module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=_RMSNorm)
    kernels = dict.fromkeys(("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"), _no_kernel)
    _module("mamba_ssm.ops.triton.ssd_combined", **kernels)
    _transformer_engine()


def install_for_saving() -> None:
    """Put in the packages that Megatron-Bridge's training code imports, and that saving does not call.

    Call it when everything else has been imported: other packages look for these too.
    """
    if not any(isinstance(each, _Uncalled) for each in sys.meta_path):
        sys.meta_path.append(_Uncalled())


class _Uncalled(MetaPathFinder, Loader):
    """Finds packages in which every name is an empty class, or a function that does nothing."""

    _names = ("datasets", "modelopt", "megatron.energon")

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        known = any(fullname == name or fullname.startswith(f"{name}.") for name in self._names)
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _UncalledModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _UncalledModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {}) if name[:1].isupper() else _nothing
        setattr(self, name, found)
        return found


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _transformer_engine() -> None:
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # then it loads no CUDA libraries
    found = find_spec("transformer_engine")
    assert found is not None
    assert found.submodule_search_locations is not None
    constants = Path(found.submodule_search_locations[0], "pytorch/constants.py").read_text("utf-8")
    names = list(dict.fromkeys(re.findall(r"int\(tex\.DType\.(\w+)\)", constants)))
    types: dict[str, Any] = {name: number for number, name in enumerate(names)}
    sys.modules[_COMPILED] = _Compiled(_COMPILED)
    vars(sys.modules[_COMPILED])["DType"] = _Numbers("DType", (), types)
    import transformer_engine.common as common

    common.load_framework_extension = lambda _: None
    import transformer_engine.pytorch  # noqa: F401 - from here on it is there for megatron-core
