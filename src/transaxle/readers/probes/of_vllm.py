"""Builds a model of the installed vLLM on the meta device, and runs its own loading on a checkpoint without data.

vLLM reports too little: most of its models return the names of parameters of which they got any part, and skip names
for which they have no parameter. So every element of every parameter is followed (`written`), and every tensor that
ends nowhere is loaded once more to see why (`skipped`).
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from compared import compare_values
from headers import Headers, explain, run
from skipped import Skip, watch_skip
from written import Written

_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "", "DO_NOT_TRACK": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
"""Set before vLLM is imported."""
_DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Config keys for the number of layers that predict further tokens."""
_NUMBERS = re.compile(r"(?<=\.experts\.)\d+")
_BIAS = ".bias"


def trace(request: dict[str, Any], headers: Headers, result: dict[str, Any]) -> None:
    """Load the checkpoint, and the layers that predict further tokens if the config has some."""
    os.environ.update(_ENVIRONMENT)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    result["version"] = importlib.metadata.version(_distribution())
    _add_stand_ins()
    _start_groups()
    headers.write()
    _add_config_class(request["folder"], result)
    config = _config(request["folder"])
    model_config = config.model_config
    result["class"] = model_config.architecture
    result["config"], result["defaults"] = _config_values(model_config.hf_config)
    _Load(config, model_config, headers, result).run()
    result["twice"] = sorted(name for name, count in headers.taken.items() if count > 1)
    if request.get("twins") and not (result.get("error") or result.get("unbuilt")):
        result["values"] = _compare_twins(request["twins"], request["form"]["encoding"])
    if _promises_drafts(request["folder"]) and not result.get("error"):
        _trace_drafts(request["folder"], model_config, headers, result)


def _distribution() -> str:
    """Return the name of the distribution that has the package `vllm`; the one for CPUs has another name."""
    return next(iter(importlib.metadata.packages_distributions().get("vllm", ())), "vllm")


def _add_stand_ins() -> None:
    """Look at classes of models in this process, and let torchvision be imported without its compiled part."""
    if find_spec("torchvision") and not _KEPT and not _has_compiled_part():
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
    from vllm.model_executor.models import registry

    lazy = getattr(registry, "_LazyRegisteredModel", None)
    if lazy is not None:
        lazy.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())
    with suppress(AttributeError, ImportError):  # in another version, which then cannot build some models
        _build_on_a_cpu()


def _build_on_a_cpu() -> None:
    """Let vLLM build models of whose kernels a CPU has none: loading does not run them."""
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.platforms import PlatformEnum
    from vllm.platforms.cpu import CpuPlatform

    for name in ("Event", "Stream"):
        setattr(torch.cuda, name, _Idle)
    choose = CpuPlatform.get_attn_backend_cls.__func__

    def dense(cls: Any, *arguments: Any, **options: Any) -> Any:
        return choose(cls, *map(_densely, arguments), **{name: _densely(value) for name, value in options.items()})

    CpuPlatform.get_attn_backend_cls = classmethod(dense)
    config.current_platform = _Platform(config.current_platform, config.current_platform._enum)
    marlin_utils.current_platform = _Gpu(marlin_utils.current_platform, PlatformEnum.CUDA)
    _take_any_kernel()


def _take_any_kernel() -> None:
    """Where this processor has no kernel for a layer, take one for CUDA: only its parameters are made."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    for name, choose in list(vars(linear).items()):
        if re.fullmatch(r"(init|choose)_\w+_linear_kernel", name):
            _replace(name, choose, _relaxed(choose, linear, PlatformEnum.CUDA))
    for kind, (enumeration, preferred) in _EXPERT_KERNELS.items():
        oracle = import_module(f"vllm.model_executor.layers.fused_moe.oracle.{kind}")
        backend = getattr(oracle, enumeration)[preferred]
        name = f"select_{kind.replace('int_', '')}_moe_backend"
        select = getattr(oracle, name)
        _replace(name, select, _with_default(select, (backend, oracle.backend_to_kernel_cls(backend)[0])))


_EXPERT_KERNELS = {
    "unquantized": ("UnquantizedMoeBackend", "CPU"), "fp8": ("Fp8MoeBackend", "TRITON"),
    "nvfp4": ("NvFp4MoeBackend", "MARLIN"), "int_wna16": ("WNA16MoEBackend", "MARLIN"),
}  # fmt: skip
"""Kind of weights of experts -> the enumeration of its kernels, and one whose parameters are as in the files."""


def _replace(name: str, function: Any, other: Any) -> None:
    """Replace a function of vLLM wherever it is imported by name."""
    for module in [each for key, each in sys.modules.items() if key.startswith("vllm.")]:
        if vars(module).get(name) is function:
            setattr(module, name, other)


def _with_default(select: Callable[..., Any], default: Any) -> Callable[..., Any]:
    def select_any(*arguments: Any, **options: Any) -> Any:
        try:
            return select(*arguments, **options)
        except (NotImplementedError, ValueError):
            return default

    return select_any


def _relaxed(choose: Callable[..., Any], module: Any, platform: Any) -> Callable[..., Any]:
    """Return a function that chooses a kernel, of another platform if this one has none."""

    def choose_any(*arguments: Any, **options: Any) -> Any:
        try:
            return choose(*arguments, **options)
        except (NotImplementedError, ValueError):
            pass
        here, checks = module.current_platform, dict[Any, Any]()
        kernels = {each for each in vars(module).values() if isinstance(each, type)}
        for kernel in kernels:
            if "is_supported" in vars(kernel):
                checks[kernel] = vars(kernel)["is_supported"]
        places = {kernel.__module__ for kernel in kernels if kernel.__module__.startswith(module.__name__)}
        homes: list[Any] = [sys.modules[place] for place in places - {module.__name__}]
        homes = [home for home in homes if vars(home).get("current_platform") is here]
        for kernel in checks:
            kernel.is_supported = classmethod(lambda *_arguments, **_options: (True, None))
        module.current_platform = _Platform(here, platform)
        for home in homes:
            home.current_platform = _Gpu(here, platform)
        try:
            return choose(*arguments, **options)
        finally:
            for home in (module, *homes):
                home.current_platform = here
            for kernel, check in checks.items():
                kernel.is_supported = check

    return choose_any


class _Platform:
    """A CPU that has the kernels of a platform."""

    def __init__(self, platform: Any, kind: Any) -> None:
        self._platform, self._enum = platform, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        return True


class _Gpu(_Platform):
    """A CPU that also has the numbers of a GPU on which codes of every width have kernels."""

    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return True

    def get_device_capability(self, *_: Any) -> Any:
        from vllm.platforms.interface import DeviceCapability

        return DeviceCapability(9, 0)


def _densely(value: Any) -> Any:
    """Return what a model wants of its attention, without sparsity, for which CPUs have no kernels."""
    return value._replace(use_sparse=False) if hasattr(value, "use_sparse") else value


class _Idle:
    """Stands for streams and events of a CUDA device, which models make and loading does not use."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...


def _has_compiled_part() -> bool:
    """Return whether torchvision's compiled part is there and fits this torch."""
    place = find_spec("torchvision")
    for folder in place.submodule_search_locations or () if place else ():
        for library in Path(folder).glob("_C*"):
            try:
                torch.ops.load_library(str(library))
            except OSError:
                continue
            return True
    return False


_KEPT: list[Any] = []
"""Libraries of operations, which end with their objects."""


def _start_groups() -> None:
    """Make the groups of a job of one rank."""
    from torch import distributed
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())  # type: ignore[attr-defined]
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)


def _add_config_class(folder: str, result: dict[str, Any]) -> None:
    """Let transformers read a config whose class is code in the checkpoint: its keys are taken from the file, and the
    code is never run.
    """
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils import config as vllm_configs

    content = json.loads(Path(folder, "config.json").read_text("utf-8"))
    kind = content.get("model_type", "")
    known = kind in CONFIG_MAPPING or kind in getattr(vllm_configs, "_CONFIG_REGISTRY", ())
    if known or "AutoConfig" not in content.get("auto_map", ()):
        return

    def fill(self: Any, **keys: Any) -> None:
        sections = {key: PretrainedConfig(**value) for key, value in keys.items() if _is_section(key, value)}
        PretrainedConfig.__init__(self, **{**keys, **sections})

    AutoConfig.register(kind, type("PublishedConfig", (PretrainedConfig,), {"model_type": kind, "__init__": fill}))
    result["notes"] = [f"the config class of {kind} is code in the checkpoint; its values were taken from the file"]


def _is_section(key: str, value: object) -> bool:
    return key.endswith("_config") and key != "quantization_config" and isinstance(value, dict)


def _config(folder: str, dtype: str = "auto", speculation: Any = None) -> Any:
    """Return vLLM's configuration of an engine of one rank."""
    from vllm.config import CacheConfig, DeviceConfig, LoadConfig, ModelConfig, VllmConfig

    return VllmConfig(
        model_config=ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True,
        ),
        speculative_config=speculation,
        load_config=LoadConfig(load_format="safetensors", use_tqdm_on_load=False),
        device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(enable_prefix_caching=False),
    )  # fmt: skip


def _config_values(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config as vLLM has read it, and the values that its class has without a file, as far as it has any."""
    try:
        read = config.to_dict()
    except Exception:  # noqa: BLE001 - a config that cannot be written, which is no fault of the checkpoint
        return {}, {}
    try:
        return read, type(config)().to_dict()
    except Exception:  # noqa: BLE001 - classes that cannot be built without values have no defaults
        return read, {}


class _Load:
    """One model, and its loading of all tensors of the checkpoint.

    Args:
        config: configuration of the engine.
        model_config: configuration of the model.
        headers: the checkpoint.
        result: gets `missing`, `incomplete`, `unexpected`, `ignored`, `partial`, `mismatched`, `failed`, and `error`.
    """

    def __init__(self, config: Any, model_config: Any, headers: Headers, result: dict[str, Any]) -> None:
        self._config, self._model_config, self._result = config, model_config, result
        self._headers = headers
        self._is_draft = model_config is not config.model_config
        self._written = Written()
        self._latest = ""
        self._mismatched: list[tuple[str, list[int], list[int]]] = []
        self._failed: list[tuple[str, str]] = []
        self._spoilt: set[str] = set()

    def run(self) -> None:
        """Build the model, load it, and report."""
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
        from vllm.model_executor.model_loader.utils import initialize_model

        try:
            with self._active():
                model = initialize_model(self._config, model_config=self._model_config)
        except Exception as error:  # noqa: BLE001 - models whose kernels need another processor
            self._result["unbuilt"] = _explain(error)
            return
        for name, parameter in model.named_parameters():
            load = getattr(parameter, "weight_loader", None) or _default_loader()
            parameter.weight_loader = _Collecting(load, name, self)
        loader = DefaultModelLoader(self._config.load_config)
        try:
            with self._active():
                self._written.recording = True
                model.load_weights(self._tensors(loader, model))
        except Exception as error:  # noqa: BLE001 - the reader's answer
            self._result |= {"error": _explain(error), "stopped": self._latest}
        finally:
            self._written.recording = False
            self._result |= {"mismatched": self._mismatched, "failed": self._failed}
        if "error" not in self._result or self._is_draft:
            self._report(model, loader)

    @contextmanager
    def _active(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        dtype = set_default_torch_dtype(self._model_config.dtype)
        setattr(torch.Tensor, "tolist", _tolist)  # noqa: B010 - mypy does not let a method be assigned
        with set_current_vllm_config(self._config), self._written, dtype, torch.device("meta"):
            yield

    def _tensors(self, loader: Any, model: Any) -> Iterator[tuple[str, Any]]:
        for name, tensor in loader.get_all_weights(self._model_config, model):
            self._latest = name
            self._written.tag(name, tensor)
            yield name, tensor

    def _report(self, model: Any, loader: Any) -> None:
        parameters = dict(model.named_parameters())
        used = self._written.used([*parameters.values(), *model.buffers()])
        used |= {name for name, *_ in (*self._mismatched, *self._failed)}
        gaps = {name: gap for name, value in parameters.items() if (gap := self._written.gap(value)) is not None}
        computed = {name for name in gaps if self._written.is_computed(parameters[name])}
        needed = gaps.keys() - computed - _exempt(loader, model, gaps) - self._spoilt
        whole = {name for name in needed if not self._written.is_written(parameters[name])}
        skips = self._skips(model, sorted(set(self._headers.taken) - used))
        self._result |= {
            "missing": sorted(whole),
            "incomplete": sorted([name, gaps[name]] for name in needed - whole),
            "unexpected": [name for name, skip in skips.items() if skip is None or not skip.on_purpose],
            "ignored": [name for name, skip in skips.items() if skip is not None and skip.on_purpose],
            "reasons": sorted({f"{skip.condition} ({skip.place})" for skip in skips.values() if skip is not None}),
            "partial": [item for item in self._written.partly_read() if item[0] in used],
        }

    def _skips(self, model: Any, names: list[str]) -> dict[str, Skip | None]:
        """Return where vLLM leaves each of these tensors out; experts that differ by their number share an answer."""
        import vllm

        root, skips, answers = Path(vllm.__file__).parent, {}, {}
        for name in names:
            shape = _NUMBERS.sub("*", name)
            if shape not in answers:
                answers[shape] = self._skip(model, name, root)
            skips[name] = answers[shape]
        return skips

    def _skip(self, model: Any, name: str, root: Path) -> Skip | None:
        tensor = self._headers.tensor(name)
        storage = tensor.untyped_storage()._cdata

        def has_tensor(value: object) -> bool:
            return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage

        with self._active():
            return watch_skip(lambda: model.load_weights([(name, tensor)]), has_tensor, root, _on_list)

    def collect(self, parameter: str, tensor: Any, error: Exception) -> bool:
        """Record that a tensor does not go into a parameter; false if it is not a tensor of the files."""
        names = sorted(self._written.names_of(tensor)) if tensor is not None else []
        if not names:
            return False
        self._spoilt.add(parameter)
        expected = _target_shape(error)
        if expected is not None and expected != list(tensor.shape):
            self._mismatched.append((names[0], list(tensor.shape), expected))
        else:
            self._failed.append((names[0], _explain(error)))
        return True


_TOLIST = torch.Tensor.tolist


def _tolist(tensor: torch.Tensor) -> Any:
    """Return a tensor as lists, with zeros for one without data."""
    return _TOLIST(torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor)


class _Collecting:
    """A parameter's own loading function; a tensor that does not fit does not stop it."""

    def __init__(self, load: Callable[..., Any], parameter: str, owner: _Load) -> None:
        self._load, self._parameter, self._owner = load, parameter, owner

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            return self._load(*arguments, **options)
        except (AssertionError, IndexError, RuntimeError, ValueError) as error:
            tensor = arguments[1] if len(arguments) > 1 else options.get("loaded_weight")
            if not self._owner.collect(self._parameter, tensor, error):
                raise
            return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load, name)

    def __eq__(self, other: object) -> bool:
        return self is other or self._load == other

    def __hash__(self) -> int:
        return hash(self._load)


def _default_loader() -> Callable[..., Any]:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    load: Callable[..., Any] = default_weight_loader
    return load


def _target_shape(error: Exception) -> list[int] | None:
    """Return the shape of the part of a parameter into which a loading function was to copy a tensor."""
    shape, step = None, error.__traceback__
    while step is not None:
        for name in ("param", "param_data", "expert_data"):
            value = step.tb_frame.f_locals.get(name)
            shape = list(value.shape) if isinstance(value, torch.Tensor) else shape
        step = step.tb_next
    return shape


def _exempt(loader: Any, model: Any, gaps: dict[str, Any]) -> set[str]:
    """Return the parameters with gaps that vLLM does not expect in a checkpoint, such as scales of a cache."""
    loaded = {name for name, _ in model.named_parameters()} - gaps.keys()
    loaded |= {
        f"{place}.{name}"
        for place, module in model.named_modules()
        if getattr(getattr(module, "quant_method", None), "use_a16", False)
        for name, _ in module.named_parameters(recurse=False)
        if "_input_" in name  # made for activations in few bits, and not read for those in 16 bits
    }
    with suppress(AttributeError, TypeError, ValueError):
        loader.track_weights_loading(model, loaded, quantized=True)
    return loaded & gaps.keys()


def _on_list(frame: FrameType) -> bool:
    """Return whether the tensor of a frame of vLLM's loader is on its list of what to ignore.

    Biases that the model lacks are on every list, and do not count.
    """
    loader = frame.f_locals.get("self")
    names = [value for value in frame.f_locals.values() if isinstance(value, str)]
    starts = tuple(getattr(loader, "ignore_unexpected_prefixes", ()))
    ends = tuple(each for each in getattr(loader, "ignore_unexpected_suffixes", ()) if each != _BIAS)
    return any(f"{name}.".startswith(starts) or name.endswith(ends) for name in names if name)


def _promises_drafts(folder: str) -> bool:
    """Return whether the config file, and not only a default of its class, has layers that predict further tokens."""
    config = json.loads(Path(folder, "config.json").read_text("utf-8"))
    return any((each.get(key) or 0) > 0 for each in (config, config.get("text_config") or {}) for key in _DRAFTS)


def _trace_drafts(folder: str, model_config: Any, headers: Headers, result: dict[str, Any]) -> None:
    """Load the layers that predict further tokens, which vLLM builds as a model of their own."""
    from vllm.config import ParallelConfig, SpeculativeConfig

    drafts: dict[str, Any] = {}
    try:
        speculation = SpeculativeConfig(
            method="mtp", num_speculative_tokens=1, model=folder, target_model_config=copy.deepcopy(model_config),
            target_parallel_config=ParallelConfig(),
        )  # fmt: skip
        config = _config(folder, speculation=speculation)
        _Load(config, speculation.draft_model_config, headers, drafts).run()
    except Exception as error:  # noqa: BLE001 - a model without such layers in this vLLM
        drafts["error"] = _explain(error)
    result["drafts"] = {key: drafts[key] for key in ("missing", "incomplete", "unbuilt", "error") if drafts.get(key)}


def _compare_twins(twins: list[tuple[str, str]], encoding: str) -> dict[str, Any]:
    """Load the first pair of small checkpoints that vLLM can load, and compare the parameters of the two models."""
    values: dict[str, Any] = {"error": "vLLM keeps codes, so that only names and shapes are compared", "plain": True}
    for plain_folder, stored_folder in [] if encoding else twins:
        try:
            plain = _load_values(plain_folder)
        except Exception as error:  # noqa: BLE001 - the next pair has other sizes
            values = {"error": _explain(error), "plain": True}
            continue
        try:
            stored = _load_values(stored_folder)
        except Exception as error:  # noqa: BLE001 - the reader's answer
            return {"error": _explain(error), "plain": False}
        filled = {name: value for name, value in plain.items() if not value.isnan().any()}
        values = compare_values(filled, stored)
        break
    return values


def _load_values(folder: str) -> dict[str, torch.Tensor]:
    """Return the parameters of a small model, with NaN for elements that nothing fills."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = _config(folder, "float32")
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        model = initialize_model(config)
        parameters = {name: value for name, value in model.named_parameters() if value.is_floating_point()}
        for value in parameters.values():
            value.data.fill_(torch.nan)
        loader = DefaultModelLoader(config.load_config)
        model.load_weights(loader.get_all_weights(config.model_config, model))
    return {name: value.detach() for name, value in parameters.items()}


_LONGEST = 300


def _explain(error: Exception) -> str:
    """Return an exception as text, without the lists of parameters that vLLM appends."""
    text, _, place = explain(error).rpartition(" (")
    return f"{text[:_LONGEST]}{'…' if len(text) > _LONGEST else ''} ({place}"


if __name__ == "__main__":
    run(trace)
