"""Megatron's folders of one rank each, written with torch alone: what each rank holds, said in plain operations.

A run has a hub model's tensors, and for each of them the optimizer's full-precision copy and two moments, all random.
What Megatron makes of them is in `module` (names and packing on one rank), `_shard` (the part of a tensor-parallel
rank), `_flat` (the distributed optimizer's buffers). Nothing here is taken from the program under test.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STATES = ("fp32", "exp_avg", "exp_avg_sq")
MODEL, FLAT, TRACKER = "model_optim_rng.pt", "distrib_optim.pt", "latest_checkpointed_iteration.txt"
ITERATION = 7
LR, BETAS = 1e-3, (0.9, 0.95)
LAYERS, HEADS, GROUPS, HEAD, WIDTH, VOCABULARY = 4, 4, 2, 6, 20, 41
INNER, EXPERT_INNER, EXPERTS = 12, 8, 4
MULTIPLE = 12
"""Of which the vocabulary's rows on each rank are a multiple: the same for 1, 2 and 4 ranks."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """The settings of a run."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vp: int | None = None
    optimizer: str | None = "numbered"
    """`numbered`, `flat` (the distributed optimizer), or None."""
    tied: bool = False
    biased: bool = False
    sparse: tuple[int, ...] = ()
    """Layers with experts."""
    one_by_one: bool = False
    """Experts are modules of their own (SequentialMLP)."""
    stages: tuple[tuple[int, ...], ...] | None = None
    """Layers of each stage, by virtual stage; None: evenly."""
    bucket: int | None = None
    """Elements of a bucket, where gradients are reduced while others are computed."""
    bare_norms: bool = False
    """Norms are modules of their own (Megatron's local spec)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments besides."""

    @property
    def experts_apart(self) -> bool:
        """Whether experts have an optimizer of their own."""
        return bool(self.sparse) and (self.ep > 1 or self.expert_tp != self.tp)

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def config(self) -> dict[str, Any]:
        """Return the config of the hub's model."""
        kind = "qwen3_moe" if self.sparse else "qwen2" if self.biased else "llama"
        found: dict[str, Any] = {
            "model_type": kind, "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": INNER,
            "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD, "vocab_size": VOCABULARY,
            "tie_word_embeddings": self.tied,
        }  # fmt: skip
        if self.sparse:
            dense = [layer for layer in range(LAYERS) if layer not in self.sparse]
            found |= {
                "num_experts": EXPERTS, "moe_intermediate_size": EXPERT_INNER, "decoder_sparse_step": 1,
                "mlp_only_layers": dense,
            }  # fmt: skip
        return found


def hub(run: Run, seed: int = 0) -> dict[str, Tensors]:
    """Return the tensors of a hub's model by state: `fp32`, `exp_avg`, `exp_avg_sq`, and the weights as ``."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(_hub_shapes(run))
    found = {state: {n: torch.randn(s, generator=generator) for n, s in shapes.items()} for state in STATES}
    return {**found, "": {name: master.bfloat16() for name, master in found["fp32"].items()}}


def _hub_shapes(run: Run) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, WIDTH)
    yield "model.norm.weight", (WIDTH,)
    if not run.tied:
        yield "lm_head.weight", (VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{base}.{norm}.weight", (WIDTH,)
        for part, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            yield f"{base}.self_attn.{part}_proj.weight", (heads * HEAD, WIDTH)
            if run.biased:
                yield f"{base}.self_attn.{part}_proj.bias", (heads * HEAD,)
        yield f"{base}.self_attn.o_proj.weight", (WIDTH, HEADS * HEAD)
        if run.sparse:
            for norm in ("q_norm", "k_norm"):
                yield f"{base}.self_attn.{norm}.weight", (HEAD,)
        inner, mlps = INNER, [f"{base}.mlp"]
        if layer in run.sparse:
            yield f"{base}.mlp.gate.weight", (EXPERTS, WIDTH)
            inner, mlps = EXPERT_INNER, [f"{base}.mlp.experts.{expert}" for expert in range(EXPERTS)]
        for mlp in mlps:
            yield f"{mlp}.gate_proj.weight", (inner, WIDTH)
            yield f"{mlp}.up_proj.weight", (inner, WIDTH)
            yield f"{mlp}.down_proj.weight", (WIDTH, inner)


@dataclass(frozen=True)
class Rank:
    """One rank's place."""

    tp: int
    pp: int
    ep: int

    def folder(self, run: Run) -> str:
        stage = f"_{self.pp:03d}" if run.pp > 1 else ""
        return f"mp_rank_{self.tp:02d}{stage}" + (f"_{self.ep:03d}" if run.ep > 1 else "")


def ranks(run: Run) -> list[Rank]:
    """Return the ranks that write: where experts are not cut like the rest, not every combination exists."""
    places = [Rank(tp, pp, ep) for pp in range(run.pp) for ep in range(run.ep) for tp in range(run.tp)]
    if run.sparse and run.expert_tp == 1 and run.tp > 1:
        assert run.ep == run.tp
        return [place for place in places if place.ep == place.tp]
    return places


def _shard(tensor: Tensor, parts: int, rank: int, dim: int) -> Tensor:
    assert tensor.shape[dim] % parts == 0
    return tensor.chunk(parts, dim)[rank].clone()


def _halves(gate: Tensor, up: Tensor, parts: int, rank: int) -> Tensor:
    return torch.cat([_shard(gate, parts, rank, 0), _shard(up, parts, rank, 0)])


def _padded(rows: Tensor, run: Run) -> Tensor:
    multiple = MULTIPLE * run.tp
    count = -(-rows.shape[0] // multiple) * multiple
    return torch.cat([rows, rows.new_zeros(count - rows.shape[0], *rows.shape[1:])])


def _qkv(part: dict[str, Tensor]) -> Tensor:
    rest = part["q"].shape[1:]
    per_group = [part[name].reshape(GROUPS, -1, *rest) for name in "qkv"]
    return torch.cat(per_group, 1).reshape(-1, *rest)


def stage_layers(run: Run) -> list[list[int]]:
    """Return the layers of each stage, stage of the virtual pipeline by stage."""
    vp = run.vp or 1
    counts = run.stages or ((LAYERS // (run.pp * vp),) * run.pp,) * vp
    each = iter(range(LAYERS))
    chunks = [[[next(each) for _ in range(counts[chunk][stage])] for stage in range(run.pp)] for chunk in range(vp)]
    return [chunks[chunk][stage] for stage in range(run.pp) for chunk in range(vp)]


def module(run: Run, rank: Rank, chunk: int, source: Tensors) -> Tensors:
    """Return what one rank holds in one stage of the virtual pipeline, in the order of Megatron's modules."""
    vp = run.vp or 1
    layers = stage_layers(run)[rank.pp * vp + chunk]
    first = rank.pp == 0 and chunk == 0
    last = rank.pp == run.pp - 1 and chunk == vp - 1
    found: Tensors = {}
    if first:
        rows = _padded(source["model.embed_tokens.weight"], run)
        found["embedding.word_embeddings.weight"] = _shard(rows, run.tp, rank.tp, 0)
    for number, layer in enumerate(layers):
        found |= {f"decoder.layers.{number}.{name}": t for name, t in _layer(run, rank, layer, source).items()}
    if last:
        found["decoder.final_layernorm.weight"] = source["model.norm.weight"].clone()
        head = source["model.embed_tokens.weight" if run.tied else "lm_head.weight"]
        if not (run.tied and first):
            found["output_layer.weight"] = _shard(_padded(head, run), run.tp, rank.tp, 0)
    return found


def _layer(run: Run, rank: Rank, layer: int, source: Tensors) -> Tensors:
    base = f"model.layers.{layer}"
    tp, at = run.tp, rank.tp
    norms = {n: source[f"{base}.{n}.weight"].clone() for n in ("input_layernorm", "post_attention_layernorm")}
    found: Tensors = {}
    if run.bare_norms:
        found["input_layernorm.weight"] = norms["input_layernorm"]
    found["self_attention.linear_proj.weight"] = _shard(source[f"{base}.self_attn.o_proj.weight"], tp, at, 1)
    if not run.bare_norms:
        found["self_attention.linear_qkv.layer_norm_weight"] = norms["input_layernorm"]
    for kind in ("weight", "bias") if run.biased else ("weight",):
        parts = {part: source[f"{base}.self_attn.{part}_proj.{kind}"] for part in "qkv"}
        found[f"self_attention.linear_qkv.{kind}"] = _shard(_qkv(parts), tp, at, 0)
    if run.sparse:
        for part in "qk":
            found[f"self_attention.{part}_layernorm.weight"] = source[f"{base}.self_attn.{part}_norm.weight"].clone()
    if layer in run.sparse:
        found["pre_mlp_layernorm.weight"] = norms["post_attention_layernorm"]
        found["mlp.router.weight"] = source[f"{base}.mlp.gate.weight"].clone()
        return found | _experts(run, rank, f"{base}.mlp.experts", source)
    if run.bare_norms:
        found["pre_mlp_layernorm.weight"] = norms["post_attention_layernorm"]
    else:
        found["mlp.linear_fc1.layer_norm_weight"] = norms["post_attention_layernorm"]
    gate, up, down = (source[f"{base}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    found["mlp.linear_fc1.weight"] = _halves(gate, up, tp, at)
    found["mlp.linear_fc2.weight"] = _shard(down, tp, at, 1)
    return found


def _experts(run: Run, rank: Rank, base: str, source: Tensors) -> Tensors:
    each = EXPERTS // run.ep
    parts, at = run.expert_tp, rank.tp % run.expert_tp
    first: Tensors = {}
    second: Tensors = {}
    for number in range(each):
        gate, up, down = (
            source[f"{base}.{rank.ep * each + number}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        head = "mlp.experts.local_experts." if run.one_by_one else "mlp.experts."
        fc1, fc2 = (
            f"{head}{number}.linear_{fc}.weight" if run.one_by_one else f"{head}linear_{fc}.weight{number}"
            for fc in ("fc1", "fc2")
        )
        first[fc1], second[fc2] = _halves(gate, up, parts, at), _shard(down, parts, at, 1)
    if run.one_by_one:
        pairs = zip(first.items(), second.items(), strict=True)
        return dict(item for pair in pairs for item in pair)
    return first | second


_Key = tuple[int, str]
"""Stage of the virtual pipeline, and name on the rank."""


def _decays(name: str, tensor: Tensor) -> bool:
    return tensor.dim() != 1 and not name.endswith(".bias")


def _settings(decays: bool, experts: bool) -> dict[str, Any]:
    return {
        "is_expert_parallel": experts, "wd_mult": float(decays), "lr_mult": 1.0, "is_decoupled_lr": False,
        "max_lr": LR, "min_lr": 0.0, "lr": LR, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1 * decays, "step": 3,
    }  # fmt: skip


def _is_expert(key: _Key) -> bool:
    return ".experts." in key[1]


def _parts(run: Run, keys: list[_Key]) -> list[tuple[bool, list[_Key]]]:
    """Return the optimizers: of everything, or of dense parameters and of experts."""
    if not run.experts_apart:
        return [(False, keys)]
    return [(experts, [key for key in keys if _is_expert(key) is experts]) for experts in (False, True)]


def _groups(run: Run, keys: list[_Key], tensors: dict[_Key, Tensor], experts: bool) -> list[tuple[bool, list[_Key]]]:
    kinds = (True, False) if not experts else (True,)
    return [(decays, [key for key in keys if _decays(key[1], tensors[key]) is decays]) for decays in kinds]


def _numbered(run: Run, experts: bool, keys: list[_Key], by_state: dict[str, dict[_Key, Tensor]]) -> dict[str, Any]:
    groups, copies, states, number = [], [], {}, 0
    for decays, members in _groups(run, keys, by_state[""], experts):
        for key in members:
            states[number] = {state: by_state[state][key] for state in STATES[1:]}
            number += 1
        groups.append({**_settings(decays, experts), "params": list(range(number - len(members), number))})
        copies.append([by_state["fp32"][key] for key in members])
    return {"optimizer": {"state": states, "param_groups": groups}, "fp32_from_fp16_params": copies}


def _flat(run: Run, rank: Rank, keys: list[_Key], by_state: dict[str, dict[_Key, Tensor]]) -> dict[Any, Any]:
    """Return the buffers of the distributed optimizer: the last parameter first, each at a multiple of 64."""
    found: dict[Any, Any] = {"buckets_coalesced": True}
    for number, chunk in enumerate(dict.fromkeys(chunk for chunk, _ in keys)):
        own = [key for key in reversed(keys) if key[0] == chunk]
        limit = run.bucket if rank.pp == 0 and chunk == 0 else None
        buffer: dict[str, Any] = {
            stored: _buckets(run, [(name, by_state[state][chunk, name].flatten()) for _, name in own], limit)
            for state, stored in zip(STATES, ("param", *STATES[1:]), strict=True)
        }
        buffer["numel_unpadded"] = buffer["param"].numel()
        found[number] = {(torch.bfloat16, torch.float32): buffer}
    return found


def _buckets(run: Run, flattened: list[tuple[str, Tensor]], limit: int | None) -> Tensor:
    """Join flattened parameters; an embedding that two stages share has a bucket of its own."""
    done: list[Tensor] = []
    bucket = torch.zeros(0)
    for name, flat in flattened:
        alone = run.tied and run.pp > 1 and name.endswith(("word_embeddings.weight", "output_layer.weight"))
        if bucket.numel():
            bucket = torch.cat([bucket, torch.zeros(-bucket.numel() % 64)])
        if alone and bucket.numel():
            done, bucket = [*done, bucket], torch.zeros(0)
        bucket = torch.cat([bucket, flat])
        if alone or (limit is not None and bucket.numel() >= limit):
            done, bucket = [*done, bucket], torch.zeros(0)
    return torch.cat([*done, bucket])


def _number(run: Run, rank: Rank) -> dict[str, int]:
    """Return which of all processes a rank is: the ranks of a stage side by side, in the order of both grids."""
    stage = max(run.tp, run.expert_tp * run.ep)
    at = next(n for n in range(stage) if n % run.tp == rank.tp and n // run.expert_tp % run.ep == rank.ep)
    return {"rank": rank.pp * stage + at, "world_size": run.pp * stage}


def arguments(run: Run, rank: Rank) -> argparse.Namespace:
    """Return what Megatron calls its args."""
    said = {
        "num_layers": LAYERS, "hidden_size": WIDTH, "ffn_hidden_size": INNER, "num_attention_heads": HEADS,
        "num_query_groups": GROUPS, "group_query_attention": True, "kv_channels": HEAD, "vocab_size": VOCABULARY,
        "padded_vocab_size": -(-VOCABULARY // (MULTIPLE * run.tp)) * MULTIPLE * run.tp, "swiglu": True,
        "untie_embeddings_and_output_weights": not run.tied, "add_qkv_bias": run.biased, **_number(run, rank),
        "tensor_model_parallel_size": run.tp, "pipeline_model_parallel_size": run.pp,
        "virtual_pipeline_model_parallel_size": run.vp, "expert_model_parallel_size": run.ep,
        "expert_tensor_parallel_size": run.expert_tp, "num_experts": EXPERTS if run.sparse else None,
        "moe_ffn_hidden_size": EXPERT_INNER if run.sparse else None,
        "moe_layer_freq": [int(layer in run.sparse) for layer in range(LAYERS)] if run.sparse else 1,
        "data_parallel_size": 1, "context_parallel_size": 1, "use_distributed_optimizer": run.optimizer == "flat",
        "overlap_grad_reduce": run.bucket is not None, "ddp_bucket_size": run.bucket, "ddp_num_buckets": None,
        "optimizer": "adam",
    }  # fmt: skip
    return argparse.Namespace(**{**said, **run.args})


def write(run: Run, folder: Path, seed: int = 0) -> dict[str, Tensors]:
    """Write the folders of all ranks; return the hub's tensors by state."""
    truth = hub(run, seed)
    iteration = folder / f"iter_{ITERATION:07d}"
    for rank in ranks(run):
        place = iteration / rank.folder(run)
        place.mkdir(parents=True)
        torch.save(content(run, rank, truth), place / MODEL)
        if run.optimizer == "flat":
            by_state, keys = _by_state(run, rank, truth)
            copies = [other for other in ranks(run) if (other.tp, other.pp) == (rank.tp, rank.pp)]
            parts = [
                _flat(run, rank, own, by_state) if experts or copies[0] == rank else None
                for experts, own in _parts(run, keys)
            ]
            torch.save(parts if len(parts) > 1 else parts[0], place / FLAT)
    (folder / TRACKER).write_text(str(ITERATION))
    (folder / "config.json").write_text(json.dumps(run.config()))
    return truth


def _by_state(run: Run, rank: Rank, truth: dict[str, Tensors]) -> tuple[dict[str, dict[_Key, Tensor]], list[_Key]]:
    chunks = range(run.vp or 1)
    found = {
        state: {(chunk, n): t for chunk in chunks for n, t in module(run, rank, chunk, source).items()}
        for state, source in truth.items()
    }
    return found, list(found[""])


def content(run: Run, rank: Rank, truth: dict[str, Tensors]) -> dict[str, Any]:
    """Return what the model file of a rank holds."""
    by_state, keys = _by_state(run, rank, truth)
    found: dict[str, Any] = {
        "args": arguments(run, rank), "checkpoint_version": 3.0, "iteration": ITERATION,
        "opt_param_scheduler": {"num_steps": 24, "max_lr": LR}, "rng_state": [{"torch_rng_state": torch.zeros(8)}],
    }  # fmt: skip
    for chunk in range(run.vp or 1):
        named = {name: tensor for (where, name), tensor in by_state[""].items() if where == chunk}
        norms = [name for name in named if name.endswith("linear_proj.weight")]
        extra = {name.replace("weight", "_extra_state"): torch.zeros(0, dtype=torch.uint8) for name in norms}
        found["model" if run.vp is None else f"model{chunk}"] = {**named, **extra, "output_layer._extra_state": None}
    if run.optimizer == "numbered":
        parts = [_numbered(run, experts, own, by_state) for experts, own in _parts(run, keys)]
        found["optimizer"] = parts if len(parts) > 1 else parts[0]
    elif run.optimizer == "flat":
        parts = [
            {
                "optimizer": {
                    "param_groups": [
                        _settings(decays, experts) for decays, _ in _groups(run, own, by_state[""], experts)
                    ]
                }
            }
            for experts, own in _parts(run, keys)
        ]
        found["optimizer"] = parts if len(parts) > 1 else parts[0]
    return found
