"""A job of megatron-core on CPU ranks that makes one step of Adam and saves, in each form of the optimizer's state.

Gradients are a hundredth of the weights, so what the state is after a step is known for every element, however ranks
cut and order it. megatron-core 0.12 to 0.16 run this; what says that it is for CUDA devices is sent to the CPU.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from tests.formats.megatron import gpt_job
from tests.oracles import hub, megatron_peer

LR, DECAY, BETAS, EPS = 1e-3, 0.01, (0.9, 0.999), 1e-8
GRADIENT = 1e-2
"""Gradients, in parts of the weights."""


class Job(NamedTuple):
    """What is trained, and how."""

    model: str
    form: str | None = "dp_reshardable"
    """In which the distributed optimizer's state is saved; None: every rank has an optimizer of its own."""
    tp: int = 1
    pp: int = 1
    vp: int | None = None
    ep: int = 1
    etp: int | None = None
    """Ranks that share the weights of an expert; None: those that share other weights."""
    dp: int = 1
    """Data-parallel ranks: of experts, those are among them that have other experts."""
    bucket: int | None = None
    """Elements after which a bucket is full; None: one holds all."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp


class _OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that are meant for CUDA devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if getattr(func, "__name__", "") == "type" and not kwargs and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


@contextmanager
def _chunks(config: dict[str, Any], job: Job) -> Iterator[list[Any]]:
    """This rank's model chunks: GPTModels of local layers in bfloat16."""
    with gpt_job.on_cpu(), _OnCpu():
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        parallel_state.initialize_model_parallel(
            job.tp, job.pp, job.vp, expert_model_parallel_size=job.ep, expert_tensor_parallel_size=job.etp
        )
        try:
            known = hub.configuration(config)
            settings = megatron_peer.transformer_config(known)
            settings.bf16, settings.params_dtype, settings.pipeline_dtype = True, torch.bfloat16, torch.bfloat16
            settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size = job.tp, job.pp
            settings.virtual_pipeline_model_parallel_size = job.vp
            settings.expert_model_parallel_size = job.ep
            settings.expert_tensor_parallel_size = job.etp or job.tp
            if isinstance(settings.moe_layer_freq, list) and all(settings.moe_layer_freq):
                settings.moe_layer_freq = 1  # a list, whatever is in it, means layers with numbers
            yield [
                GPTModel(
                    settings,
                    get_gpt_decoder_block_spec(settings, use_transformer_engine=False, vp_stage=stage),
                    vocab_size=gpt_job.PADDED,
                    max_sequence_length=64,
                    pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                    post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                    share_embeddings_and_output_weights=known.tie_word_embeddings,
                    position_embedding_type="rope",
                    vp_stage=stage,
                ).bfloat16()
                for stage in (range(job.vp) if job.vp else (None,))
            ]
        finally:
            parallel_state.destroy_model_parallel()


def save(rank: int, world: int, config: dict[str, Any], source: str, folder: str, job: Job) -> None:
    """Train the tensors of a hub folder for one step, and save weights and optimizer."""
    with _chunks(config, job) as chunks:
        _saved(config, source, Path(folder), Job(*job), chunks, first=not rank)


def _saved(config: dict[str, Any], source: str, folder: Path, job: Job, chunks: list[Any], *, first: bool) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    tensors = gpt_job.whole(config, source)
    for model in chunks:
        for name, value in gpt_job.parts(model, tensors).items():
            model.get_parameter(name).data.copy_(value)
    buckets = DistributedDataParallelConfig(
        use_distributed_optimizer=job.form is not None,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=job.bucket is not None,
        bucket_size=job.bucket,
    )
    trained = [
        DistributedDataParallel(model.config, buckets, model, disable_bucketing=number > 0)
        for number, model in enumerate(chunks)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LR,
            weight_decay=DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPS,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=job.form is not None,
            clip_grad=0.0,
        ),
        trained,
    )
    for chunk in trained:
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(parameter.detach().float() * GRADIENT)
    for group in optimizer.param_groups:  # what Megatron's scheduler does before a step
        group["lr"], group["weight_decay"] = LR, DECAY * group["wd_mult"]
    with patch.object(*_stateful()):
        optimizer.step()
        metadata = {"distrib_optim_sharding_type": job.form}
        keys = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
        weights = {key: model.sharded_state_dict(metadata=metadata) for key, model in zip(keys, chunks, strict=True)}
        given = {"metadata": metadata} if job.form is not None else {}
        state = {**weights, "optimizer": optimizer.sharded_state_dict(weights, **given)}
    arguments = argparse.Namespace(
        tensor_model_parallel_size=job.tp, transformer_impl="local", consumed_train_samples=56, iteration=7
    )
    if first:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    parallel = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy(), parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    about = {"args": arguments, "iteration": 7, "checkpoint_version": 3.0}
    dist_checkpointing.save({**state, **about}, str(folder), parallel)


def _stateful() -> tuple[Any, str, Any]:
    """Return what keeps the step out of a parameter's state: Apex and Transformer Engine keep it with the group."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "_get_main_param_and_optimizer_states"
    own = inspect.getattr_static(DistributedOptimizer, name)

    def without_step(optimizer: Any, parameter: Any) -> dict[str, Any]:
        return {key: value for key, value in own(optimizer, parameter).items() if key != "step"}

    return DistributedOptimizer, name, without_step


def after_a_step(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of full precision, and moments, after a step of torch's AdamW on whole tensors, as converted state."""
    found = {}
    for name, weight in weights.items():
        master = torch.nn.Parameter(weight.float())
        master.grad = master.detach() * GRADIENT
        decay = DECAY if weight.dim() > 1 else 0.0
        optimizer = torch.optim.AdamW([master], LR, BETAS, EPS, weight_decay=decay)
        optimizer.step()
        found[f"optim/{name}/fp32"] = master.detach()
        found |= {f"optim/{name}/{moment}": optimizer.state[master][moment] for moment in ("exp_avg", "exp_avg_sq")}
    return found
