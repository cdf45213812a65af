"""A job of megatron-core 0.16.1 on CPU ranks: saves distributed checkpoints of a known model, and loads ours.

Which part of a whole tensor a rank holds is written out here in plain torch operations, from megatron-core's own
layers: a column-parallel weight is cut along its rows, a row-parallel one along its columns, and the fused gate and up
each for itself.
"""

from __future__ import annotations

import queue
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from tests.oracles import hub, megatron_peer
from tests.oracles.megatron_peer import Spec
from tests.oracles.quiet import quiet

_COLUMNS = re.compile(r".*(linear_proj|mlp\.linear_fc2)\.weight")
_ROWS = re.compile(r".*(linear_qkv\.(weight|bias)|word_embeddings\.weight|output_layer\.weight)")
_FUSED = re.compile(r".*mlp\.linear_fc1\.weight")
PADDED = 64
"""Rows of the vocabulary, with padding."""


@contextmanager
def _on_cpu() -> Iterator[None]:
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


@contextmanager
def _model(config: dict[str, Any], tp: int, pp: int, ep: int) -> Iterator[Any]:
    """This rank's part of a GPTModel of local layers."""
    with _on_cpu():
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        try:
            known = hub.configuration(config)
            settings = megatron_peer.transformer_config(known)
            settings.tensor_model_parallel_size = tp
            settings.pipeline_model_parallel_size = pp
            settings.expert_model_parallel_size = ep
            settings.pipeline_dtype = torch.float32
            if isinstance(settings.moe_layer_freq, list) and all(settings.moe_layer_freq):
                settings.moe_layer_freq = 1  # a list, whatever is in it, means layers with numbers
            first = parallel_state.is_pipeline_first_stage()
            last = parallel_state.is_pipeline_last_stage()
            yield GPTModel(
                settings,
                get_gpt_decoder_block_spec(settings, use_transformer_engine=False),
                vocab_size=PADDED,
                max_sequence_length=64,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=known.tie_word_embeddings,
                position_embedding_type="rope",
            )
        finally:
            parallel_state.destroy_model_parallel()


def whole(config: dict[str, Any], folder: str) -> dict[str, torch.Tensor]:
    """The tensors of a hub folder under Megatron's local names, the vocabulary padded with zeros."""
    stored = load_file(Path(folder, hub.WEIGHTS))
    native = megatron_peer.from_hf(config, stored, Spec.LOCAL)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in native:
            rows = native[name]
            native[name] = torch.cat([rows, rows.new_zeros(PADDED - len(rows), rows.shape[1])])
    return native


def parts(model: Any, tensors: dict[str, torch.Tensor], tp: int) -> dict[str, torch.Tensor]:
    """What this rank's parameters hold of whole tensors."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    rank = parallel_state.get_tensor_model_parallel_rank()
    layers = get_transformer_layer_offset(model.config)
    local = (model.config.num_moe_experts or 0) // model.config.expert_model_parallel_size
    experts = local * parallel_state.get_expert_model_parallel_rank()
    held = {}
    for name, _ in model.named_parameters():
        shifted = re.sub(r"layers\.(\d+)\.", lambda found: f"layers.{int(found[1]) + layers}.", name)
        shifted = re.sub(r"local_experts\.(\d+)\.", lambda found: f"local_experts.{int(found[1]) + experts}.", shifted)
        value = tensors["embedding.word_embeddings.weight" if shifted not in tensors else shifted]
        if "experts" in name:
            held[name] = value
        elif _FUSED.fullmatch(name):
            held[name] = torch.cat([half.chunk(tp)[rank] for half in value.chunk(2)])
        elif _ROWS.fullmatch(name):
            held[name] = value.chunk(tp)[rank]
        else:
            held[name] = value.chunk(tp, dim=1)[rank] if _COLUMNS.fullmatch(name) else value
    return held


def save(rank: int, world: int, config: dict[str, Any], source: str, folder: str, tp: int, pp: int, ep: int) -> None:
    """Save the tensors of a hub folder as a distributed checkpoint."""
    from megatron.core import dist_checkpointing

    with _model(config, tp, pp, ep) as model:
        for name, value in parts(model, whole(config, source), tp).items():
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

    with _model(config, tp, pp, ep) as model:
        for value in model.parameters():
            value.data.fill_(float("nan"))
        wanted = model.sharded_state_dict()
        state = dist_checkpointing.load(wanted, folder)
        model.load_state_dict({name: state[name] for name in wanted})
        expected = parts(model, whole(config, source), tp)
        return [
            name for name, value in model.named_parameters() if not torch.equal(value, expected[name].to(value.dtype))
        ]
