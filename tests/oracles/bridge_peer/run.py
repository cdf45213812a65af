"""The process in Megatron-Bridge's environment: builds each model with it, and stores what it makes of the tensors.

    python -m tests.oracles.bridge_peer.run FOLDER [--load] [MODEL ...]

writes, for each model, `hub` (what transformers 5.12.1 stores of a random model; of models that it does not know, what
the bridge exports of a random Megatron model), `held` (the bridge has read `hub` into a Megatron model, and this is its
state dict), `back` (what the bridge exports of that), `saved` (the folder in which it saves it) and `said.json`; and
`bridges.json`, all architectures that Megatron-Bridge has a bridge for. With `--load`, it lets Megatron load `ours`, a
distributed checkpoint, into each model, and writes `loaded`, what that then holds.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import queue
import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.oracles.bridge_peer import kimi_modules, without_cuda, without_kernels
from tests.oracles.bridge_peer.models import MODELS, Model

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

SAID, LOADED_SAID, BRIDGES = "said.json", "said_of_ours.json", "bridges.json"
HUB, HELD, BACK, SAVED, OURS, LOADED = "hub", "held", "back", "saved", "ours", "loaded"
ERROR, NOT_LOADED = "error", "not loaded"
_BACKENDS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")


def _configuration(config: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig, PretrainedConfig

    keys = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    try:
        made = AutoConfig.for_model(config["model_type"], **keys)
    except ValueError:  # the model is its maker's own code
        parts = ("text_config", "vision_config")
        keys |= {key: _configuration({"model_type": "", **keys[key]}) for key in parts if key in keys}
        made = PretrainedConfig(**keys)
        made.model_type = config["model_type"]
    made.architectures = config.get("architectures")
    return made


def _randomise(tensors: Mapping[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, value in sorted(tensors.items()):
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator))


def _save(folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    folder.mkdir()
    kept = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")


def _transformers(configuration: Any) -> tuple[Tensors, Config] | None:
    """What transformers stores of a random model; None where it has no such class."""
    import transformers

    kind = getattr(transformers, configuration.architectures[0], None)
    if kind is None:
        return None
    model = kind(configuration).float().eval()
    _randomise(model.state_dict(), 2)
    model.tie_weights()
    tensors: Tensors = {}
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for path in Path(folder).glob("*.safetensors"):
            tensors |= load_file(path)
        config = json.loads(Path(folder, "config.json").read_text("utf-8"))
    return tensors, config


class _Bridge:
    """A Megatron model and the bridge to it."""

    def __init__(self, configuration: Any, model: Model) -> None:
        from megatron.bridge.models.conversion.auto_bridge import AutoBridge
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        for name in _BACKENDS:
            os.environ.pop(name, None)
        auto = AutoBridge.from_hf_config(configuration)
        provider = auto.to_megatron_provider(load_weights=False)
        settings = {
            "use_cpu_initialization": True, "gradient_accumulation_fusion": False, "params_dtype": torch.float32,
            "bf16": False, "fp16": False, **model.provider,
        }  # fmt: skip
        for name, value in settings.items():
            setattr(provider, name, value)
        provider.finalize()
        provider.initialize_model_parallel(seed=0)
        self.configuration = configuration
        self.bridge = auto._model_bridge  # AutoBridge itself reads only folders that transformers knows
        self.parts = provider.provide_distributed_model(
            wrap_with_ddp=False, mixed_precision_wrapper=None, use_cpu_initialization=True, bf16=False
        )

    @property
    def state(self) -> Tensors:
        """What the model holds, TransformerEngine's extra states left out."""
        held = self.parts[0].state_dict().items()
        return {n: v for n, v in held if isinstance(v, torch.Tensor) and not n.endswith("_extra_state")}

    def export(self, source: Any) -> Tensors:
        """What the bridge makes of it for the hub: values, where it would quantize the experts."""
        streamed = self.bridge.stream_weights_megatron_to_hf(
            self.parts, source, show_progress=False, weight_dtype=torch.float32
        )
        return {each.param_name: each.weight.clone() for each in streamed}

    def read(self, folder: Path) -> tuple[Any, list[str]]:
        """Let the bridge read files; return them as it wants them, and the names that it leaves alone."""
        from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource, StateDict

        self._forget()
        files = StateDict(SafeTensorsStateSource(folder))
        source = SimpleNamespace(state=files, config=self.configuration, model_name_or_path=str(folder))
        self.bridge.load_weights_hf_to_megatron(source, self.parts)
        return source, sorted(name for name, value in self.state.items() if bool(value.isnan().any()))

    def _forget(self) -> None:
        for value in self.state.values():
            if value.is_floating_point():
                value.data.fill_(float("nan"))

    def load(self, folder: Path) -> None:
        """Let Megatron load a distributed checkpoint, as strictly as it does by default."""
        without_kernels.install_for_saving()
        from megatron.bridge.training.checkpointing import _load_model_weights_from_checkpoint

        self._forget()
        _load_model_weights_from_checkpoint(str(folder), self.parts)

    def save(self, folder: Path) -> None:
        """Let the bridge save the model as a distributed checkpoint."""
        without_kernels.install_for_saving()
        from megatron.bridge.training.model_load_save import save_megatron_model
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        filesystem_async._results_queue = queue.Queue()  # in place of a process that serves one
        save_megatron_model(self.parts, folder)


def _one(model: Model, folder: Path) -> dict[str, Any]:
    configuration = _configuration(model.config)
    stored = _transformers(configuration)
    if stored is not None and model.fault:
        _save(folder / HUB, *stored)
    made = _Bridge(configuration, model)
    _randomise(made.state, 1)
    exported = made.export(configuration)
    tensors, config = stored or (exported, dict(model.config))
    depth = model.config.get("num_hidden_layers", sys.maxsize)
    # Layers that predict ahead, which transformers does not store.
    ahead = [n for n in exported if "mtp" in n or any(int(number) >= depth for number in _LAYER.findall(n))]
    tensors |= {n: exported[n] for n in ahead if not n.endswith(_COPIES) and n not in tensors}
    tensors = {model.renamed.get(name, name): value for name, value in tensors.items()}
    config = {**model.config, **config}
    if not model.fault:
        _save(folder / HUB, tensors, config)
    with TemporaryDirectory() as place:
        copies = {name: value for name, value in exported.items() if name.endswith(_COPIES) and name not in tensors}
        _save(Path(place, HUB), tensors | copies, config)
        source, left = made.read(Path(place, HUB))
        _save(folder / HELD, made.state, config)
        _save(folder / BACK, {n: v for n, v in made.export(source).items() if n not in copies}, config)
    made.save(folder / SAVED)
    return {NOT_LOADED: left}


def _loaded(model: Model, folder: Path) -> dict[str, Any]:
    made = _Bridge(_configuration(model.config), model)
    made.load(folder / OURS / "release")
    _save(folder / LOADED, made.state, model.config)
    return {}


def _architectures() -> list[str]:
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge

    return sorted(each if isinstance(each, str) else each.__name__ for each in get_model_bridge._exact_types)


def main(target: Path, names: list[str], *, load: bool = False) -> None:
    """Write what Megatron-Bridge makes of models, of all where none is named, or what Megatron loads of ours."""
    without_cuda.pretend()
    without_kernels.install()
    kimi_modules.install()
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    with redirect_stdout(StringIO()):
        for name in names or MODELS:
            folder = target / name
            folder.mkdir(exist_ok=load)
            try:
                said = (_loaded if load else _one)(MODELS[name], folder)
            except (Exception, CheckpointException) as error:  # noqa: BLE001 - the test tells whether it is the expected one
                said = {ERROR: f"{type(error).__name__}: {error}"}
            (folder / (LOADED_SAID if load else SAID)).write_text(json.dumps(said), "utf-8")
            gc.collect()
        (target / BRIDGES).write_text(json.dumps(_architectures()), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    words = sys.argv[2:]
    main(Path(sys.argv[1]), [word for word in words if word != "--load"], load="--load" in words)
