"""The process in Megatron's environment: megatron-core 0.19.2 with the training code of its wheel, on CPU ranks.

    python -m tests.formats.megatron.training.peer CASES.json

Megatron is imported once, and the ranks of each case are forked from there. A case loads with `--load` through
`setup_model_and_optimizer`, as `pretrain_gpt.py` does, and each rank leaves what it then has in `OUT/rank_N.pt`:
parameters, full-precision copies and moments, logits, and how many steps and samples Megatron counts.
Gradients are a hundredth of the weights, so that steps have the same bits at any degrees; or those of Megatron's own
`train_step`, where a case asks for it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import tempfile
import traceback
import typing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import typing_extensions
from torch import distributed as dist

from tests.formats.megatron.plain_attention import PlainAttention
from tests.formats.megatron.training import fused_adam
from tests.oracles.bridge_peer import without_cuda, without_kernels

GRADIENT = 1e-2
"""Gradients, in parts of the weights."""
RANK = "rank_{}.pt"
_ALWAYS = """
    --seq-length 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr-decay-style cosine --lr 1e-3
    --min-lr 1e-4 --clip-grad 0 --tokenizer-type NullTokenizer --mock-data --eval-iters 0 --save-interval 1000
    --distributed-backend gloo --use-cpu-initialization --attention-backend unfused --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion
    --no-bias-dropout-fusion --attention-dropout 0 --hidden-dropout 0 --ckpt-format torch_dist --async-strategy mcore
    --moe-router-load-balancing-type none --moe-token-dispatcher-type allgather --moe-router-dtype fp32 --no-load-rng
"""
"""What has nothing to do with the model: its sizes come from the folder, with `--use-checkpoint-args`."""

_LATENT_KEYS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
_DENSE_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
"""Names of norms in local layers -> in those of Transformer Engine, with which alone Megatron has latent attention."""


@dataclass(frozen=True)
class Case:
    """A run of Megatron."""

    out: str
    """Folder for what the ranks say."""
    words: str
    """Its command line beyond what every run has."""
    ranks: int = 1
    te: bool = False
    """Whether modules are those of Transformer Engine, with which nothing can be computed."""
    ids: list[int] = field(default_factory=list)
    """Tokens of which logits are wanted."""
    steps: int = 0
    """Optimizer steps after it has loaded."""
    more: int = 0
    """Steps after it has saved; then it saves again."""
    trains: bool = False
    """Whether steps are Megatron's own: a loss, its gradients, and what moves with them, such as routers' biases."""


def launch(python: Path, root: Path, cases: list[Case]) -> tuple[int, str]:
    """Return how the process ended, and what it said."""
    import subprocess

    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "cases.json")
        told.write_text(json.dumps([asdict(case) for case in cases]))
        cleared = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NVTE"))}
        command = [str(python), "-W", "ignore", "-m", __name__, str(told)]
        done = subprocess.run(
            command, cwd=root, env=cleared, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    return done.returncode, done.stdout


def _prepare(te: bool) -> None:
    """Import Megatron's training code, on this CPU."""
    without_cuda.pretend()
    logging.disable(logging.WARNING)
    if te:
        without_kernels.install()
    else:
        vars(typing).setdefault("override", typing_extensions.override)
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
        torch.cuda.is_available = lambda: False
        fused_adam.install()
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import initialize

    initialize._compile_dependencies = lambda: None  # kernels for a GPU
    filesystem_async._results_queue = queue.Queue()  # saves are not asynchronous here


def _model(args: Any, *, trains: bool, **stage: Any) -> Any:
    """A GPTModel, as Megatron's arguments say."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    te = args.transformer_impl == "transformer_engine"
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=te, vp_stage=stage["vp_stage"])
    if args.multi_latent_attention and not te:
        for layer, sparse in zip(spec.layer_specs, args.moe_layer_freq, strict=True):
            layer.submodules.self_attention.submodules.core_attention = PlainAttention
            layer.submodules.sharded_state_dict_keys_map = _LATENT_KEYS if sparse else {**_LATENT_KEYS, **_DENSE_KEYS}
    ahead = None
    if args.mtp_num_layers:
        ahead = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=te, vp_stage=stage["vp_stage"]
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        fp16_lm_cross_entropy=False,
        parallel_output=trains,
        mtp_block_spec=ahead,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        **stage,
    )


def _train(words: list[str], case: Case) -> dict[str, Any]:
    """Load, and step; return what this rank has."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.training import checkpointing, training
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron

    sys.argv = ["train", *_ALWAYS.split(), *words]
    args = parse_args()
    if args.use_checkpoint_args:
        checkpointing.load_args_from_checkpoint(args)
    validate_args(args)
    set_global_variables(args, build_tokenizer=True)
    initialize_megatron(allow_no_cuda=True)

    def provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any) -> Any:
        stage = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
        return _model(args, trains=case.trains, **stage)

    kind = ModelType.encoder_or_decoder
    chunks, optimizer, schedule = training.setup_model_and_optimizer(kind, provider, checkpointing_context={})
    models = training.unwrap_model(chunks)
    place = [
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    ]
    first = _held(models, optimizer)
    found = {"place": place, "iteration": args.iteration, "padded": args.padded_vocab_size, "first": first}
    if case.ids:
        found["logits"] = _logits(models[0], case.ids)
    step = _trained if case.trains else _step
    step(chunks, optimizer, schedule, args, case.steps)
    found["held"] = _held(models, optimizer)
    if args.save:
        told = {"checkpointing_context": {}, "preprocess_common_state_dict_fn": training.preprocess_common_state_dict}
        for steps in dict.fromkeys((case.steps, case.steps + case.more)):
            step(chunks, optimizer, schedule, args, steps - case.steps)
            checkpointing.save_checkpoint(args.iteration + steps, chunks, optimizer, schedule, 0, **told)
    if case.trains:
        found["buffers"] = {name: value.clone() for model in models for name, value in model.named_buffers()}
        if case.ids:  # in single precision, of whatever type the weights are
            found["trained"] = _logits(models[0].float(), case.ids)
    return found


def _trained(chunks: list[Any], optimizer: Any, schedule: Any, args: Any, steps: int) -> None:
    """Make steps as Megatron's `train` does."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.core.utils import get_model_config
    from megatron.training import training

    config = get_model_config(chunks[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    for _ in range(steps):
        rows = RerunDataIterator(iter(range(args.global_batch_size)))
        told = training.train_step(
            _forward, rows, chunks, optimizer, schedule, config, get_forward_backward_func(), args.iteration
        )
        assert told[1] == 0, "a step was skipped"
        args.consumed_train_samples += args.global_batch_size


def _forward(rows: Any, model: Any) -> tuple[Any, Any]:
    """What `pretrain_gpt.py` does with the next text."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    row, length = next(rows), get_args().seq_length
    row += get_args().global_batch_size * parallel_state.get_data_parallel_rank()
    text = (torch.arange(length + 1) ** 2 * 3 + 7 * row) % get_args().vocab_size
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    losses = model(text[None, :-1], torch.arange(length)[None], mask, labels=text[None, 1:])

    def total(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss, count = output.float().sum(), torch.tensor(length, dtype=torch.int)
        return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}

    return losses, total


def _step(chunks: list[Any], optimizer: Any, schedule: Any, args: Any, steps: int) -> None:
    for _ in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.main_grad.copy_(parameter.detach().float() * GRADIENT)
        optimizer.step()
        schedule.step(increment=args.global_batch_size)
        args.consumed_train_samples += args.global_batch_size


def _held(models: list[Any], optimizer: Any) -> dict[str, Any]:
    """What this rank holds: its parameters and its optimizer's groups."""
    found = {name: value.detach().clone() for model in models for name, value in model.named_parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    settings = [{key: group.get(key) for key in ("lr", "weight_decay", "step", "betas", "eps")} for group in groups]
    return {"parameters": found, "groups": settings}


@torch.no_grad()
def _logits(model: Any, ids: list[int]) -> torch.Tensor | None:
    """The logits of one text on the ranks of the last stage: stages pass on what they have computed."""
    from megatron.core import parallel_state

    model.eval()
    tokens = torch.tensor([ids])
    mask = torch.ones(1, 1, len(ids), len(ids)).triu(1).bool()
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(len(ids), 1, model.config.hidden_size, dtype=next(model.parameters()).dtype)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    out = model(tokens, torch.arange(len(ids))[None], mask)
    model.train()
    if parallel_state.is_pipeline_last_stage():
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        return torch.Tensor((gather_from_tensor_model_parallel_region(out) if model.parallel_output else out)[0])
    dist.send(out, parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def _rank(rank: int, case: Case, meeting: str) -> int:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks)
    }  # fmt: skip
    try:
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=case.ranks)
        found = _train(case.words.split(), case)
        torch.save(found, Path(case.out, RANK.format(rank)))
        dist.barrier()
    except BaseException:  # noqa: BLE001 - it is told
        traceback.print_exc()
        return 1
    return 0


def _run(case: Case) -> list[int]:
    """Fork the ranks, and wait for them; the first says what Megatron says."""
    Path(case.out).mkdir(parents=True, exist_ok=True)
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(case.ranks):
            child = os.fork()
            if not child:
                sys.stdout = sys.stderr = Path(case.out, f"said_{rank}.txt").open("w", encoding="utf-8")  # noqa: SIM115
                code = _rank(rank, case, f"{folder}/meeting")
                sys.stdout.flush()
                os._exit(code)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(cases: list[Case]) -> int:
    """Run them; return how many failed."""
    _prepare(cases[0].te)
    failed = 0
    for case in cases:
        codes = _run(case)
        if any(codes):
            failed += 1
            rank = next(rank for rank, code in enumerate(codes) if code)
            said = Path(case.out, f"said_{rank}.txt").read_text("utf-8")
            sys.stdout.write(f"{case.words}: {codes}\n{said[-3000:]}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main([Case(**told) for told in json.loads(Path(sys.argv[1]).read_text("utf-8"))]))
