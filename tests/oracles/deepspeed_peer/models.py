"""The tiny models, and where a model's own mathematics says that tensor parallelism may cut them.

`share` is our own statement about each parameter. The generator proves it before training: merged by it, the shards
that DeepSpeed made must be the full initial weights, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.oracles.deepspeed_peer.case import Case

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
_ROW = ("o_proj", "down_proj")
EXPERTS = 4


class Attention(nn.Module):
    """Grouped-query attention with one fused projection: all q heads, then k, then v."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.width = case.hidden // case.heads
        self.ratio = case.heads // case.kv
        self.qkv_proj = nn.Linear(case.hidden, (case.heads + 2 * case.kv) * self.width, bias=True)
        self.o_proj = nn.Linear(case.hidden, case.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv_proj(x)
        batch, length, wide = y.shape
        kv = wide // (self.width * (self.ratio + 2))
        q, k, v = (
            part.view(batch, length, -1, self.width).transpose(1, 2)
            for part in y.split([kv * self.ratio * self.width, kv * self.width, kv * self.width], -1)
        )
        k, v = k.repeat_interleave(self.ratio, 1), v.repeat_interleave(self.ratio, 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        done: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return done


class Gated(nn.Module):
    """An MLP with gate and up in one projection, and biases."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(case.hidden, 2 * case.inner, bias=True)
        self.down_proj = nn.Linear(case.inner, case.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        done: Tensor = self.down_proj(functional.silu(gate) * up)
        return done


class Block(nn.Module):
    """One layer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(case.hidden), nn.LayerNorm(case.hidden)
        self.self_attn, self.mlp = Attention(case), Gated(case)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.ln1(x))
        done: Tensor = x + self.mlp(self.ln2(x))
        return done


class Fused(nn.Module):
    """A language model with fused projections, as no family of transformers has them all."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(case.vocab, case.hidden)
        self.blocks = case.blocks
        setattr(self, case.blocks, nn.ModuleList(Block(case) for _ in range(case.layers)))
        self.norm = nn.LayerNorm(case.hidden)
        self.lm_head = nn.Linear(case.hidden, case.vocab, bias=False)
        if case.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.embed_tokens(input_ids)
        for block in getattr(self, self.blocks):
            x = block(x)
        return SimpleNamespace(loss=_loss(self.lm_head(self.norm(x)), labels))


class Mix(nn.Module):
    """A parameter of one element, and one of three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.conv = nn.Parameter(torch.randn(3, 7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.conv.mean((0, 2))


class Odd(nn.Module):
    """Shapes that no world size divides: every kind of padding is needed."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.inner = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 11, bias=False), nn.Linear(11, 7)])
        self.mix = Mix()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.arange(7.0))
        self.head = nn.Linear(7, 13)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids % 13) - self.mean.to(self.embed.weight.dtype)
        for layer in self.inner:
            x = torch.tanh(layer(x))
        x = self.mix(x)
        return SimpleNamespace(loss=_loss(self.head(x), labels % 13))


class Expert(nn.Module):
    """One expert of a mixture."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(case.hidden, case.inner), nn.Linear(case.inner, case.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = self.down(torch.tanh(self.up(x)))
        return done


class Mixture(nn.Module):
    """A language model with DeepSpeed's own MoE layers: four experts, over `ep` ranks."""

    def __init__(self, case: Case) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.embed = nn.Embedding(case.vocab, case.hidden)
        self.first = nn.Linear(case.hidden, case.hidden)
        self.blocks = nn.ModuleList(
            MoE(
                case.hidden, Expert(case), EXPERTS, ep_size=case.ep, k=1, capacity_factor=4.0, min_capacity=0,
                use_rts=False,
            )
            for _ in range(case.layers)
        )  # fmt: skip
        self.head = nn.Linear(case.hidden, case.vocab)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = torch.tanh(self.first(self.embed(input_ids)))
        for block in self.blocks:
            x = x + block(x)[0]
        return SimpleNamespace(loss=_loss(self.head(x), labels))


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits[:, :-1].float()
    return functional.cross_entropy(flat.reshape(-1, flat.shape[-1]), labels[:, 1:].reshape(-1))


def build(case: Case) -> nn.Module:
    """The whole model, not yet cut, drawn from a fixed seed."""
    torch.manual_seed(1234)
    made = {"fused": Fused, "odd": Odd, "moe": Mixture}.get(case.model)
    model: nn.Module = made(case) if made else _hub(case)
    return model.to(DTYPES[case.dtype])


def _hub(case: Case) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": case.vocab, "hidden_size": case.hidden, "intermediate_size": case.inner,
        "num_hidden_layers": case.layers, "num_attention_heads": case.heads, "num_key_value_heads": case.kv,
        "max_position_embeddings": 32, "tie_word_embeddings": case.tied, "attn_implementation": "eager",
        "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if case.model == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(case.model, **sizes))


def declared(case: Case) -> dict[str, Any]:
    """The `tensor_parallel` section of DeepSpeed's configuration for the fused model: its sub-parameters."""
    width = case.hidden // case.heads
    qkv = [[case.heads * width, case.kv * width, case.kv * width], -1]
    rows = [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$", *([r".*lm_head\.weight$"] if case.head_rows else [])]
    row = {"patterns": rows, "partition_type": "row"}
    specs = [
        row,
        {"patterns": [r".*\.qkv_proj\.weight$"], "partition_type": "column", "shape": qkv, "partition_dim": 0},
        {"patterns": [r".*\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
    ]
    return {"partition_config": {"use_default_specs": False, "layer_specs": specs}}


def components(case: Case, name: str) -> list[int]:
    """Rows of the parts that a fused projection consists of; empty for everything else."""
    width = case.hidden // case.heads
    if "qkv_proj" in name:
        return [case.heads * width, case.kv * width, case.kv * width]
    return [case.inner, case.inner] if "gate_up_proj" in name else []


def share(case: Case, name: str) -> int | None:
    """The dim along which a parameter may be cut; None where every rank holds all of it."""
    if case.model == "pipe":  # its own tensor-parallel layers
        return 0 if ".up." in name else 1 if name.endswith(".down.weight") else None
    if case.head_rows and "embed_tokens" in name:
        return 1
    # DeepSpeed cuts a tied embedding by its rows, as the output; we cut any.
    vocabulary = ("embed_tokens",) if case.tied or case.ours else ()
    if case.model == "fused" and "lm_head" in name:  # `declared` leaves it whole
        return None
    if components(case, name) or any(f"{part}." in f"{name}." for part in (*_COLUMN, *vocabulary)):
        return 0
    return 1 if name.endswith("weight") and any(f"{part}." in f"{name}." for part in _ROW) else None


def is_expert(name: str) -> bool:
    """Whether it is a parameter of an expert."""
    return ".deepspeed_experts." in name


def everywhere(case: Case, name: str, rank: int) -> str:
    """The name of an expert's parameter in the whole model: each expert-parallel rank counts its own from zero."""
    head, mark, tail = name.partition(".deepspeed_experts.")
    number, dot, rest = tail.partition(".")
    return f"{head}{mark}{int(number) + rank * EXPERTS // case.ep}{dot}{rest}" if mark else name


def merged(case: Case, name: str, shards: Sequence[Tensor], full: Sequence[int]) -> Tensor:
    """The whole tensor from the shards of all tensor-parallel ranks."""
    dim = share(case, name)
    if dim is None or all(tuple(shard.shape) == tuple(full) for shard in shards):
        if not all(torch.equal(shards[0], other) for other in shards[1:]):
            raise AssertionError(f"{name}: the ranks hold different values")
        return shards[0]
    parts = components(case, name)
    if case.ours:
        return _placed(case, name, shards, full, dim)
    if not parts:
        return torch.cat(list(shards), dim)
    # All parts of a fused projection are cut evenly here.
    cut = [shard.split([part * len(shard) // sum(parts) for part in parts], 0) for shard in shards]
    return torch.cat([torch.cat([pieces[part] for pieces in cut], 0) for part in range(len(parts))], 0)


def shard(case: Case, name: str, full: Tensor, rank: int, parts: int) -> Tensor:
    """This rank's part of a whole tensor, where every part is cut as evenly as can be. Inverse of `merged`."""
    dim = share(case, name)
    if dim is None or parts == 1:
        return full
    if case.ours:
        return full.index_select(dim, rows(case, name, rank))
    pieces = full.split(components(case, name) or [full.shape[dim]], dim)
    return torch.cat([piece.tensor_split(parts, dim)[rank] for piece in pieces], dim)


def _chunk(count: int, rank: int, parts: int) -> list[int]:
    """This rank's part of so many."""
    found: list[int] = torch.arange(count).chunk(parts)[rank].tolist()
    return found


def rows(case: Case, name: str, rank: int) -> Tensor:
    """Where a rank's rows, or columns, of a parameter lie in the whole one, in a model that we cut.

    A key and value head goes with its query heads; where there are more ranks than such heads, some ranks have one
    alike, and share out its query heads.
    """
    ranks, shared, width = case.launch.tp, case.heads // case.kv, case.hidden // case.heads
    beside = max(ranks // case.kv, 1)
    heads = _chunk(case.kv, rank, ranks) if beside == 1 else [rank // beside]
    queries = [head * shared + each for head in heads for each in _chunk(shared, rank % beside, beside)]

    def span(picked: Sequence[int], start: int = 0) -> list[int]:
        return [(start + head) * width + each for head in picked for each in range(width)]

    inner, words = _chunk(case.inner, rank, ranks), _chunk(case.vocab, rank, ranks)
    keys, values = span(heads, case.heads), span(heads, case.heads + case.kv)
    found = {
        "qkv_proj": [*span(queries), *keys, *values], "gate_up_proj": [*inner, *(case.inner + each for each in inner)],
        "q_proj": span(queries), "o_proj": span(queries), "k_proj": span(heads), "v_proj": span(heads),
        "gate_proj": inner, "up_proj": inner, "down_proj": inner,
        "embed_tokens": words, "lm_head": words,
    }  # fmt: skip
    return torch.tensor(found[name.split(".")[-2]])


def _placed(case: Case, name: str, shards: Sequence[Tensor], full: Sequence[int], dim: int) -> Tensor:
    """The whole tensor, every rank's rows put where they belong."""
    size = max(int(rows(case, name, rank).max()) for rank in range(len(shards))) + 1
    shape = [*shards[0].shape]
    shape[dim] = size
    found = torch.full(shape, torch.nan, dtype=shards[0].dtype)
    for rank, held in enumerate(shards):
        found.index_copy_(dim, rows(case, name, rank), held)
    for rank, held in enumerate(shards):
        if not torch.equal(found.index_select(dim, rows(case, name, rank)), held):
            raise AssertionError(f"{name}: the ranks hold different values")
    if found.isnan().any() or (full and tuple(full) != tuple(found.shape)):
        raise AssertionError(f"{name}: {shape}, of {list(full)}")
    return found
