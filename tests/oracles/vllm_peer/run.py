"""The process in vLLM's environment: builds each model on every rank, lets vLLM load it, and stores what it holds.

    python -m tests.oracles.vllm_peer.run FOLDER [MODEL ...]

writes, for each model, `hub` (what transformers stores of a model whose numbers are counted through), and for each rank
`TP-EP-RANK.safetensors`: the parameters and stored buffers of vLLM's own model after its own `load_weights`, before
kernels repack them; and what vLLM's `ShardedStateLoader` saves of that model, `TP-EP-state-RANK.safetensors`, with
`TP-EP-RANK.json`: each name in the model's state dict -> the name under which it is saved. The ranks are built one
after the other in this process, each under vLLM's own groups with the rank and the size of the job that it stands for.
`said.json` has what went wrong.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist

from tests.oracles.vllm_peer.mistral_format import mistral_format
from tests.oracles.vllm_peer.model import Model
from tests.oracles.vllm_peer.models import MODELS, model_named

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "", "DO_NOT_TRACK": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
"""Set before vLLM is imported."""
Tensors = dict[str, torch.Tensor]
HUB, SAID = "hub", "said.json"
BUFFER = "buffer "
"""Stands before the names of stored buffers."""
_MOST = 2**24
"""Integers up to here are float32 numbers."""
_COARSE = 2**8
"""Integers up to here are bfloat16 numbers."""
_EXPONENTS = "A_log"
"""Ends the names of what is stored as a logarithm."""


def _number(tensors: Tensors, start: int = 1, *, coarse: bool = False) -> int:
    """Give every element of the model a number of its own, from one on; return the one after the last.

    Coarse ones are drawn instead, of those that bfloat16 has: few enough that some are equal, and too many for a row or
    a block to be in the place of another unseen.
    """
    drawn = torch.Generator().manual_seed(1)
    for name, value in sorted(tensors.items()):
        if not value.is_floating_point():
            continue
        if name.endswith(_EXPONENTS):
            value.copy_(torch.linspace(0, 2, value.numel()).reshape(value.shape))
        elif coarse:
            value.copy_(torch.randint(-_COARSE, _COARSE + 1, value.shape, generator=drawn))
        else:
            value.copy_(torch.arange(start, start + value.numel()).reshape(value.shape))
            start += value.numel()
    assert start < _MOST, "more elements than there are numbers"
    return start


def _hub(model: Model, folder: Path) -> None:
    """Write the hub's folder: what transformers stores of the model, and what it does not make."""
    start, config = _made(model, folder) if model.kind else (1, model.config)
    path, weights = folder / "config.json", folder / "model.safetensors"
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps({**config, "architectures": [model.architecture], **model.more}), "utf-8")
    if model.described or (not model.kind and "text_config" in config):
        _config_class(model.model_type, known=model.described)
    if model.stored:
        more = {name: torch.empty(shape) for name, shape in model.stored.items()}
        _number(more, start)
        save_file((load_file(weights) if model.kind else {}) | more, weights, metadata={"format": "pt"})


def _made(model: Model, folder: Path) -> tuple[int, dict[str, Any]]:
    """Let transformers store the model; return the first number that it does not have, and its config.json."""
    import transformers

    keys = {key: value for key, value in model.config.items() if key != "model_type"}
    configuration = transformers.AutoConfig.for_model(model.config["model_type"], **keys)
    made = getattr(transformers, model.kind)(configuration).float().eval()
    with torch.no_grad():
        start = _number(made.state_dict(), coarse=model.dtype == "bfloat16")
    made.tie_weights()
    made.save_pretrained(folder)
    if model.mended:
        file = folder / "model.safetensors"
        stored = {_beginning(name, model.mended): value for name, value in load_file(file).items()}
        save_file(stored, file, metadata={"format": "pt"})
    return start, json.loads((folder / "config.json").read_text("utf-8"))


def _beginning(name: str, renamed: Mapping[str, str]) -> str:
    """Return a name with what it begins with renamed."""
    for old, new in renamed.items():
        name = re.sub(rf"^{re.escape(old)}", new, name)
    return name


def _config_class(model_type: str, *, known: bool) -> None:
    """Let transformers read configs of a type that it does not know: the parts in them are configs too, of their own
    types where these are known.
    """
    import transformers

    base: Any = transformers.PreTrainedConfig

    def part(value: dict[str, Any]) -> Any:
        own = known and value.get("model_type") in transformers.CONFIG_MAPPING
        return transformers.AutoConfig.for_model(**value) if own else base(**value)

    def filled(self: Any, **keys: Any) -> None:
        parts = {key: part(value) for key, value in keys.items() if key.endswith("_config") and value}
        base.__init__(self, **{**keys, **parts})

    made = type("PublishedConfig", (base,), {"model_type": model_type, "__init__": filled})
    transformers.AutoConfig.register(model_type, made, exist_ok=True)


def _published(model: Model, folder: Path) -> Path:
    """The folder that vLLM reads: tensors as in the hub's own files, where transformers stores them otherwise."""
    if not (model.renamed or model.transposed or model.inside or model.mistral):
        return folder
    target = folder.with_name("published")
    (target / model.inside).mkdir(parents=True)
    stored: Tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        name = _beginning(name, model.renamed)
        turned = model.transposed and ".experts." in name and name.endswith(model.transposed)
        stored[name] = value.transpose(1, 2).contiguous() if turned else value
    stored = mistral_format(stored, model.config["text_config"]) if model.mistral else stored
    save_file(stored, target / model.inside / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folder / "config.json", target)
    return target


def add_stand_ins() -> None:
    """What a CPU lacks of vLLM and does not need to load weights, and a look at classes without a process for each."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    add_stand_ins.library = library  # type: ignore[attr-defined]
    from transformers.models.inkling import modeling_inkling
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import backend_to_kernel_cls
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo
    from vllm.model_executor.models import nano_nemotron_vl, registry
    from vllm.model_executor.models.transformers import multimodal
    from vllm.models.inkling.common import towers
    from vllm.models.kimi_k3.nvidia import model as kimi
    from vllm.models.qwen4_exp.nvidia import model as exp
    from vllm.models.qwen4_exp.nvidia import qsa
    from vllm.platforms.cpu import CpuPlatform
    from vllm.transformers_utils.configs import radio
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )
    select = experts.select_unquantized_moe_backend

    def selected(moe_config: Any) -> Any:
        try:
            return select(moe_config=moe_config)
        except NotImplementedError:
            cpu = experts.UnquantizedMoeBackend.CPU
            return cpu, backend_to_kernel_cls(cpu)[0]

    experts.select_unquantized_moe_backend = selected
    config.current_platform = _Platform()
    backend = CpuPlatform.get_attn_backend_cls.__func__

    def dense(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> Any:
        if attn_selector_config.use_mla:  # the other one, of processors with AMX, does not take what sparse ones take
            selected_backend = AttentionBackendEnum.CPU_MLA
        return backend(cls, selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)

    CpuPlatform.get_attn_backend_cls = classmethod(dense)
    for name in ("Event", "Stream"):
        setattr(torch.cuda, name, _Idle)
    kimi.maybe_init_gemm_rs_ar = _Idle
    olmo.set_triton_allocator = _Idle
    assert exp.Qwen4ExpQSAAttention is qsa.Qwen4ExpQSAAttention
    qsa.Qwen4ExpQSAFlashAttentionImpl = _Idle
    _name_convolutions(olmo)
    processor = SimpleNamespace(image_processor=None)  # its files are not there, and loading asks nothing of it
    multimodal.MultiModalProcessingInfo.get_hf_processor = lambda _, **_options: processor
    _without_filters()
    nano_nemotron_vl.cached_tokenizer_from_config = lambda _: SimpleNamespace(encode=lambda _, **_options: [])
    radio.VIT_TIMM_DIM_BY_NAME["vit_tiny"] = (64, 2, 4, 256)
    modeling_inkling.plan_out_scales = lambda *sizes: torch.tensor(towers.plan_out_scales(*sizes))  # scipy is not there


def _without_filters() -> None:
    """Import what hears for Cohere's transcriber, whose filters, which loading does not need, are not installed."""
    filters: Any = ModuleType("torchaudio.functional")
    filters.melscale_fbanks = _Idle
    stand_ins = {"torchaudio": ModuleType("torchaudio"), filters.__name__: filters}
    sys.modules.update(stand_ins)
    import_module("vllm.transformers_utils.processors.cohere_asr")
    for name in stand_ins:
        del sys.modules[name]


def _name_convolutions(olmo: Any) -> None:
    """Tell OLMo Hybrid's loader which of three convolutions it gets: vLLM 0.32 does not, and so loads no checkpoint."""
    make = olmo._make_fused_conv1d_weight_loader

    def made(*sizes: Any) -> Any:
        load = make(*sizes)
        return lambda parameter, loaded, shard=None: load(parameter, loaded, getattr(loaded, "shard_id", shard))

    olmo._make_fused_conv1d_weight_loader = made


class _Idle:
    """What only a CUDA device has: events, streams, Triton's memory, attention, a product beside the communication."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def __bool__(self) -> bool:
        return False


class _Platform:
    """A CPU that has kernels for experts without a gate."""

    def __getattr__(self, name: str) -> Any:
        from vllm.platforms import current_platform

        return getattr(current_platform, name)

    def is_cuda_alike(self) -> bool:
        return True


def start_groups() -> None:
    """Make the groups of a job of one rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
        parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)


def _described(model_type: str) -> None:
    """Let transformers read configs of a model whose class is the maker's: a stand-in that keeps all keys."""
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    if model_type not in CONFIG_MAPPING and model_type not in _CONFIG_REGISTRY:
        AutoConfig.register(model_type, type("Described", (PreTrainedConfig,), {"model_type": model_type}))


def _pretend(rank: int, ranks: int) -> None:
    """Let vLLM's groups say that this is one rank of several."""
    from vllm.distributed import parallel_state

    for group in (parallel_state._TP, parallel_state._EP, parallel_state._ETP):
        if group is not None:
            group.world_size, group.rank_in_group = ranks, rank


def _pad(model: torch.nn.Module) -> None:
    """Put zeros where a model has put them when it was built, into experts that are wider than those of the files, and
    into rows that nothing loads or reads.
    """
    for module in model.modules():
        if getattr(module, "pad_size", 0):  # of a product of Qwen4-Exp
            for parameter in module.parameters():
                parameter.data.zero_()
        sizes = getattr(module, "moe_config", None)
        width = getattr(sizes, "intermediate_size_per_partition_unpadded", None)
        if sizes is not None and width not in (None, sizes.intermediate_size_per_partition):
            for parameter in module.parameters():
                parameter.data.zero_()


def load_model(
    folder: Path,
    rank: int,
    ranks: int,
    *,
    experts: bool,
    dtype: str,
    drafting: bool = False,
    extra: dict[str, Any] | None = None,
) -> Any:
    """The model that vLLM has on one rank.

    Args:
        folder: what vLLM serves.
        rank: which rank this process stands for.
        ranks: of the job.
        experts: whether ranks have whole experts.
        dtype: of the model.
        drafting: return the model of the layers that predict further tokens.
        extra: what the load format `transaxle` is told; None means vLLM's own loader.
    """
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    model_config = ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype=dtype, max_model_len=64,
        enforce_eager=True,
    )  # fmt: skip
    parallel_config = ParallelConfig(
        tensor_parallel_size=ranks, enable_expert_parallel=experts, distributed_executor_backend="mp"
    )
    speculation = None
    if drafting:
        speculation = SpeculativeConfig(
            method="mtp", num_speculative_tokens=1, model=str(folder), target_model_config=model_config,
            target_parallel_config=parallel_config,
        )  # fmt: skip
    config = VllmConfig(
        model_config=model_config,
        parallel_config=parallel_config,
        speculative_config=speculation,
        load_config=LoadConfig(
            load_format="safetensors" if extra is None else "transaxle",
            model_loader_extra_config=extra or {},
            use_tqdm_on_load=False,
        ),
        device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(enable_prefix_caching=False),
    )
    config.parallel_config.rank = rank
    _pretend(rank, ranks)
    built = speculation.draft_model_config if speculation else model_config
    with set_current_vllm_config(config):
        torch.set_default_dtype(getattr(torch, dtype))
        model = initialize_model(config, model_config=built)
        for parameter in model.parameters():  # what is not loaded shows
            parameter.data.fill_(float("nan") if parameter.is_floating_point() else -1)
        _pad(model)
        get_model_loader(config.load_config).load_weights(model, built)
    return model


def tensors_in(model: Any) -> Tensors:
    """The parameters and stored buffers of a model of vLLM's."""
    buffers = {f"{BUFFER}{name}": value for name, value in model.named_buffers() if name in model.state_dict()}
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *buffers.items())}


def _save_state(model: Any, folder: Path, degrees: str, rank: int) -> None:
    """Let vLLM's own loader of files for each rank save the model."""
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    ShardedStateLoader.save_model(model, str(folder), f"{degrees}-state-{{rank}}.safetensors")
    saved = load_file(folder / f"{degrees}-state-{rank}.safetensors").keys()
    state = model.state_dict()
    first = {_memory(state[name]): name for name in saved}
    names = {name: first[_memory(value)] for name, value in state.items() if value.numel()}
    (folder / f"{degrees}-{rank}.json").write_text(json.dumps(names), "utf-8")


def _memory(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape)


def write_hub(model: Model, folder: Path) -> Path:
    """Write the hub's folder, and return the one that vLLM reads."""
    folder.mkdir(parents=True, exist_ok=True)
    _hub(model, folder / HUB)
    _described(model.model_type)
    return _published(model, folder / HUB)


def _one(model: Model, folder: Path) -> None:
    read = write_hub(model, folder)
    for ranks, sharing in model.degrees:
        for rank in range(ranks):
            loaded = load_model(read, rank, ranks, experts=sharing > 1, dtype=model.dtype)
            held = {name: value.contiguous() for name, value in tensors_in(loaded).items()}
            save_file(held, folder / f"{ranks}-{sharing}-{rank}.safetensors")
            _save_state(loaded, folder, f"{ranks}-{sharing}", rank)


def main(target: Path, names: list[str]) -> None:
    """Write what vLLM holds of models, of all where none is named."""
    os.environ.update(ENVIRONMENT)
    add_stand_ins()
    start_groups()
    for name in names or MODELS:
        folder = target / name
        folder.mkdir()
        said: dict[str, str] = {}
        try:
            _one(model_named(name), folder)
        except Exception as error:  # noqa: BLE001 - the test shows it
            said = {"error": f"{type(error).__name__}: {error}"}
        (folder / SAID).write_text(json.dumps(said), "utf-8")
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
