"""Runs the state-dict adapter of NeMo Automodel's own model on hub files without data.

Automodel builds a model of its own for the architectures in its registry, and transformers' model for all others. Its
own model asks the files for what `to_hf` of its adapter makes of the state dict, or for its own names if it has no
adapter, and takes what `from_hf` makes of them.
"""

from __future__ import annotations

import importlib.metadata
import logging
from contextlib import ExitStack
from importlib import import_module
from inspect import signature
from typing import Any
from unittest.mock import patch

from adapted import compare_files
from headers import Headers, explain, run

_BACKEND = {"attn": "sdpa", "linear": "torch", "rms_norm": "torch", "experts": "torch", "dispatcher": "torch"}
"""Implementations that need no GPU; names and shapes do not depend on them."""
_ATTENTION = {"gpt_oss": "flex"}
"""Model type -> the attention that its model insists on."""
_OUTPUTS = {
    "transformers.models.qwen3_vl.modeling_qwen3_vl": "Qwen3VLCausalLMOutputWithPast",
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe": "Qwen3VLMoeModelOutputWithPast",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe": "Qwen3_5MoeModelOutputWithPast",
}
"""Modules of transformers -> a class of outputs that Automodel imports from them, which some versions lack."""


def trace(request: dict[str, Any], headers: Headers, result: dict[str, Any]) -> None:
    """Compare the checkpoint with Automodel's own model of its config."""
    import torch
    from transformers.modeling_outputs import BaseModelOutputWithPast

    logging.disable(logging.WARNING)
    result["version"] = importlib.metadata.version("nemo-automodel")
    with ExitStack() as stack:
        for module, name in _OUTPUTS.items():
            stack.enter_context(patch.object(import_module(module), name, BaseModelOutputWithPast, create=True))
        # some of its models ask which CUDA device is current before they build anything on the device given
        stack.enter_context(patch.object(torch.cuda, "current_device", lambda: 0))
        model, tied = _build(request["folder"], stack, result)
    if model is None:
        return
    result["class"] = type(model).__name__
    adapter = getattr(model, "state_dict_adapter", None)
    result["stops"] = True
    if adapter is not None and not getattr(adapter, "supports_low_memory_dcp_load", False):
        result["fate"] = "stops, or in a job of one process leaves random values there"
    files = {name: headers.take(tensors, name) for tensors in request["files"].values() for name in tensors}
    compare_files(model, adapter, files, tied, result, _tied_head(model, files))


def _tied_head(model: Any, files: dict[str, Any]) -> dict[str, Any]:
    """Return the head that Automodel takes from the embedding if the files have none; empty if it does not."""
    from nemo_automodel.components.checkpoint import utils

    with_head = dict(files)
    if materialize := getattr(utils, "materialize_missing_tied_lm_head", None):  # older versions have another way
        materialize(with_head, model)
    return {name: value for name, value in with_head.items() if name not in files}


def _build(folder: str, stack: ExitStack, result: dict[str, Any]) -> tuple[Any, bool]:
    """Return Automodel's own model on the meta device, and whether its head is tied; None if it has no such model."""
    import torch
    from nemo_automodel._transformers import model_init, registry
    from nemo_automodel.components.models.common import BackendConfig
    from transformers import AutoConfig

    plain = AutoConfig.from_pretrained(folder)
    config_class = registry.resolve_custom_config_cls(plain.model_type) or AutoConfig
    config = config_class.from_pretrained(folder)
    model_class = model_init._resolve_custom_model_cls_for_config(config)
    if model_class is None:
        name = (getattr(plain, "architectures", None) or ["?"])[0]
        result["unsupported"] = (
            f"Automodel has no model of its own for {name}, and trains that of transformers: --for transformers tells"
        )
        return None, False
    takes_backend = "backend" in signature(model_class.__init__).parameters
    backend = {**_BACKEND, "attn": _ATTENTION.get(plain.model_type, _BACKEND["attn"])}
    arguments = {"backend": BackendConfig(**backend)} if takes_backend else {}
    stack.enter_context(patch.object(model_class, "initialize_weights", lambda *_, **__: None, create=True))
    try:
        with torch.device("meta"):
            model = model_class(config, **arguments)
    except Exception as error:  # noqa: BLE001 - a model that needs what is not here has not been checked
        result["unbuilt"] = explain(error)
        return None, False
    return model, bool(getattr(config, "tie_word_embeddings", False))


if __name__ == "__main__":
    run(trace)
