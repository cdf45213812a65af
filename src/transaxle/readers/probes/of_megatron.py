"""Asks Megatron's own model for its sharded state dict, and validates the files of a `torch_dist` folder against it.

Megatron-Bridge builds the model of a config, here on the meta device and without a GPU. Megatron asks the folder for
every tensor of the model by its name; one that is absent or has another shape stops it. Tensors that it does not ask
for stay unread without a word, in the strictness that it has by default. The states of kernels (`_extra_state`) are no
tensors, and are not compared.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
import warnings
from typing import Any

from headers import Headers, explain, run

_ARGUMENTS = {
    "gradient_accumulation_fusion": False,
    "perform_initialization": False,
    "moe_token_dispatcher_type": "alltoall",
}
"""Settings of the model's provider that need no GPU; names and shapes do not depend on them."""
_BACKENDS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Variables by which a model chooses its attention; those of another model stop it."""


def trace(request: dict[str, Any], headers: Headers, result: dict[str, Any]) -> None:
    """Compare the checkpoint with Megatron's model of its config."""
    warnings.simplefilter("ignore")
    result["version"] = importlib.metadata.version("megatron-bridge")
    content = request["content"]
    if content.get("singleton_local_shards"):
        result["untraced"] = "the folder has the parts of a tensor under names of their own (singleton_local_shards)"
        return
    try:
        model, vocabulary = _build(request["folder"])
    except Exception as error:  # noqa: BLE001 - models without a bridge, and those that another transformers has
        result["untraced"] = f"Megatron-Bridge cannot build the model: {explain(error)}"
        return
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.validation import StrictHandling, validate_integrity_and_strict_load

    requested = _requested(model, content)
    stored = {
        name: ShardedTensor.from_rank_offsets(name, headers.take(tensors, name))
        for tensors in headers.files.values()
        for name in tensors
    }
    local = list(requested.values())
    _, unread, absent = validate_integrity_and_strict_load(
        dict(requested), StrictHandling.RETURN_ALL, False, local, [local], stored
    )
    result |= {"class": type(model).__name__, "stops": True, "missing": sorted(absent), "unexpected": sorted(unread)}
    result["mismatched"] = [
        [name, list(stored[name].global_shape), list(tensor.global_shape)]
        for name, tensor in requested.items()
        if name in stored and not _fits(tensor, stored[name], vocabulary)
    ]


def _build(folder: str) -> tuple[Any, int]:
    """Return Megatron's model of the config in a folder, as one rank has it, and the size of its vocabulary."""
    from torch import distributed

    if not distributed.is_initialized():
        _prepare()
        distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())  # type: ignore[attr-defined]
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge
    from megatron.core import parallel_state
    from transformers import AutoConfig

    parallel_state.destroy_model_parallel()
    for name in _BACKENDS:
        os.environ.pop(name, None)
    bridge = AutoBridge.from_hf_config(AutoConfig.from_pretrained(folder))
    provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in _ARGUMENTS.items():
        setattr(provider, name, value)
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    (model,) = provider.provide_distributed_model(
        wrap_with_ddp=False, mixed_precision_wrapper=None, init_model_with_meta_device=True
    )
    return model, provider.vocab_size


def _prepare() -> None:
    """Let Megatron be imported, and its models be built, without a GPU and without compiled kernels."""
    import without_cuda
    import without_kernels

    os.environ["HF_HUB_OFFLINE"] = "1"
    without_cuda.pretend("meta")
    without_kernels.install()
    logging.disable(logging.CRITICAL)


def _requested(model: Any, content: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors for which the model asks, by name."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

    state, _, _ = load_preprocess(model.sharded_state_dict(metadata=content or None))
    return {tensor.key: tensor for tensor in nested_values(state) if isinstance(tensor, ShardedTensor)}


def _fits(tensor: Any, stored: Any, vocabulary: int) -> bool:
    """Return whether a stored tensor has the shape of the model's.

    Megatron allows any number of rows that pad a vocabulary, and fills rows that a file lacks with zeros.
    """
    expected, shape = tuple(tensor.global_shape), tuple(stored.global_shape)
    if not tensor.allow_shape_mismatch:
        return expected == shape
    return expected[1:] == shape[1:] and shape[0] >= vocabulary


if __name__ == "__main__":
    sys.stdout = sys.stderr
    run(trace)
