"""A job of megatron-core 0.16.1 on CPU ranks: saves distributed checkpoints of a known model, and loads ours.

Which part of a whole tensor a rank holds is written out here in plain torch operations, from megatron-core's own
layers: a weight is cut along the dim in which a rank's parameter is shorter (a column-parallel one along its rows, a
row-parallel one along its columns), and the fused gate and up each for itself.
"""

from __future__ import annotations

import queue
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from tests.oracles import hub, megatron_peer
from tests.oracles.megatron_peer import Spec
from tests.oracles.quiet import quiet

_FUSED = "linear_fc1"
_EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")
PADDED = 64
"""Rows of the vocabulary, with padding."""


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let megatron-core run without a device; its saves are synchronous here."""
    with (
        quiet(),
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(torch.cuda, "synchronize", lambda *_: None),
        patch.object(torch.Tensor, "cuda", lambda tensor, *_: tensor),
    ):
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        with patch.object(filesystem_async, "_results_queue", queue.Queue()):
            yield


@dataclass(frozen=True)
class Degrees:
    """How a job shares a model out."""

    tp: int = 1
    """Ranks that share the weights."""
    pp: int = 1
    """Stages."""
    ep: int = 1
    """Ranks that share the experts."""
    etp: int | None = None
    """Ranks that share the weights of an expert; None: those that share other weights."""
    vp: int | None = None
    """Stages of the virtual pipeline on each rank."""
    padded: int = PADDED
    """Rows of the vocabulary, with padding."""


@contextmanager
def models(config: dict[str, Any], degrees: Degrees) -> Iterator[list[Any]]:
    """This rank's part of a GPTModel of local layers: one model for each of its stages."""
    with on_cpu():
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(
            degrees.tp,
            degrees.pp,
            degrees.vp,
            expert_model_parallel_size=degrees.ep,
            expert_tensor_parallel_size=degrees.etp,
        )
        try:
            known = hub.configuration(config)
            settings = megatron_peer.transformer_config(known)
            settings.tensor_model_parallel_size = degrees.tp
            settings.pipeline_model_parallel_size = degrees.pp
            settings.virtual_pipeline_model_parallel_size = degrees.vp
            settings.expert_model_parallel_size = degrees.ep
            settings.expert_tensor_parallel_size = degrees.etp or degrees.tp
            settings.pipeline_dtype = torch.float32
            if isinstance(settings.moe_layer_freq, list) and all(settings.moe_layer_freq):
                settings.moe_layer_freq = 1  # a list, whatever is in it, means layers with numbers
            stages = [None] if degrees.vp is None else range(degrees.vp)
            yield [_model(known, settings, degrees.padded, stage) for stage in stages]
        finally:
            parallel_state.destroy_model_parallel()


def _model(known: Any, settings: Any, padded: int, stage: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    return GPTModel(
        settings,
        get_gpt_decoder_block_spec(settings, use_transformer_engine=False, vp_stage=stage),
        vocab_size=padded,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=known.tie_word_embeddings,
        position_embedding_type="rope",
        vp_stage=stage,
    )


def whole(config: dict[str, Any], folder: str, padded: int = PADDED) -> dict[str, torch.Tensor]:
    """The tensors of a hub folder under Megatron's local names, the vocabulary padded with zeros."""
    stored = load_file(Path(folder, hub.WEIGHTS))
    native = megatron_peer.from_hf(config, stored, Spec.LOCAL)
    for name in _EMBEDDINGS:
        if name in native:
            rows = native[name]
            native[name] = torch.cat([rows, rows.new_zeros(padded, rows.shape[1])])[:padded]
    return native


def parts(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank's parameters hold of whole tensors."""
    from megatron.core import parallel_state

    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    local = (model.config.num_moe_experts or 0) // model.config.expert_model_parallel_size
    experts = local * parallel_state.get_expert_model_parallel_rank()
    held = {}
    for name, parameter in model.named_parameters():
        shifted = re.sub(r"layers\.(\d+)\.", lambda found: f"layers.{layers[int(found[1])]}.", name)
        shifted = re.sub(r"local_experts\.(\d+)\.", lambda found: f"local_experts.{int(found[1]) + experts}.", shifted)
        value = tensors[_EMBEDDINGS[0] if shifted not in tensors else shifted]
        ranks = parallel_state.get_tensor_model_parallel_group()
        if "local_experts" in name:
            ranks = parallel_state.get_expert_tensor_parallel_group()
        for dim in (dim for dim, size in enumerate(parameter.shape) if size != value.shape[dim]):
            halves = value.chunk(2) if _FUSED in name else (value,)
            value = torch.cat([half.chunk(ranks.size(), dim)[ranks.rank()] for half in halves])
        held[name] = value
    return held


def save(rank: int, world: int, config: dict[str, Any], source: str, folder: str, tp: int, pp: int, ep: int) -> None:
    """Save the tensors of a hub folder as a distributed checkpoint."""
    from megatron.core import dist_checkpointing

    with models(config, Degrees(tp, pp, ep)) as (model,):
        for name, value in parts(model, whole(config, source)).items():
            model.get_parameter(name).data = value.clone()
        if not rank:
            Path(folder).mkdir(parents=True)
        torch.distributed.barrier()
        state = {**model.sharded_state_dict(), "iteration": 3, "checkpoint_version": 3.0}
        dist_checkpointing.save(state, folder)


def load(
    rank: int, world: int, config: dict[str, Any], source: str, folder: str, tp: int, pp: int, ep: int
) -> list[str]:
    """Load a distributed checkpoint; return the parameters that are not those of the hub folder."""
    from megatron.core import dist_checkpointing

    with models(config, Degrees(tp, pp, ep)) as (model,):
        for value in model.parameters():
            value.data.fill_(float("nan"))
        wanted = model.sharded_state_dict()
        state = dist_checkpointing.load(wanted, folder)
        model.load_state_dict({name: state[name] for name in wanted})
        expected = parts(model, whole(config, source))
        return [
            name for name, value in model.named_parameters() if not torch.equal(value, expected[name].to(value.dtype))
        ]
