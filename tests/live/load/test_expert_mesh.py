"""A mixture on eight ranks, pipeline x ep_shard x ep: from hub files, trained, and back to hub files.

The experts are cut as Automodel cuts them: over `ep` along the experts, and there by `fully_shard` along the next dim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from tests.live.ranks import run
from tests.live.topologies import Tensors, full, source
from transaxle.live.load import load
from transaxle.live.save import save

WIDTH, INNER, HEADS, HEAD, EXPERTS, CHOSEN, LAYERS, WORDS = 12, 8, 2, 6, 10, 2, 4, 32
CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 16, "head_dim": HEAD,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN, "moe_intermediate_size": INNER, "tie_word_embeddings": False,
    "norm_topk_prob": True, "rms_norm_eps": 1e-6, "decoder_sparse_step": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
STEPS, ROWS, TOKENS, MICRO = 10, 8, 6, 2
STAGES, PARTS, GROUPS = 2, 2, 2
MOMENT = "exp_avg"


def batch() -> torch.Tensor:
    return torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) * 5 % WORDS


def _all(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows of all ranks."""
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group)
    return torch.cat(parts)


def _own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks."""
    summed = whole.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed.chunk(group.size())[group.rank()].clone()


class _Exchanged(torch.autograd.Function):
    """What ranks exchange, and back the gradients. Torch's own, which do not wait, crash now and then in gloo's thread.

    Each of `_all` and `_own` is the way back of the other.
    """

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, group: dist.ProcessGroup, there: Any, back: Any) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        found: torch.Tensor = there(given, group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.group), None, None, None


_exchanged: Any = _Exchanged.apply


class Experts(nn.Module):
    """Gated experts in Automodel's layout: `[E, D, 2F]`, gate before up, and `[E, F, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_and_up_projs = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * INNER))
        self.down_projs = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.group: dist.ProcessGroup | None = None

    def divide(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts; tokens will come from, and go back to, all ranks of the mesh."""
        self.group, (rank, size) = mesh.get_group(), (mesh.get_local_rank(), mesh.size())
        for name, parameter in list(self.named_parameters()):
            own = DTensor.from_local(parameter.detach().chunk(size)[rank], mesh, [Shard(0)], run_check=False)
            setattr(self, name, nn.Parameter(own))

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return for each token the sum of its experts' answers; `weights` `[tokens, E]` has zeros for the others."""
        held = [p.to_local() if isinstance(p, DTensor) else p for p in (self.gate_and_up_projs, self.down_projs)]
        if self.group is not None:
            tokens, weights = (_exchanged(each, self.group, _all, _own) for each in (tokens, weights))
            weights = weights.tensor_split(dist.get_world_size(self.group), 1)[dist.get_rank(self.group)]
        gate, up = torch.einsum("td,edf->tef", tokens, held[0]).chunk(2, -1)
        answers = torch.einsum("tef,efd,te->td", functional.silu(gate) * up, held[1], weights)
        if self.group is None:
            return answers
        summed: torch.Tensor = _exchanged(answers, self.group, _own, _all)
        return summed


class Mixture(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)
        chances, chosen = self.gate(tokens).softmax(-1).topk(CHOSEN)
        weights = torch.zeros(len(tokens), EXPERTS).scatter(1, chosen, chances / chances.sum(-1, keepdim=True))
        answered: torch.Tensor = self.experts(tokens, weights)
        return answered.view_as(hidden)


def _turned(heads: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    angle = torch.arange(heads.shape[2])[:, None] * 1e4 ** (-torch.arange(0, HEAD, 2) / HEAD)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, HEADS * HEAD, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD, eps=1e-6), nn.RMSNorm(HEAD, eps=1e-6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        split = [p(hidden).unflatten(-1, (HEADS, HEAD)) for p in (self.q_proj, self.k_proj, self.v_proj)]
        query, key = self.q_norm(split[0]).transpose(1, 2), self.k_norm(split[1]).transpose(1, 2)
        value = split[2].transpose(1, 2)
        seen = functional.scaled_dot_product_attention(_turned(query), _turned(key), value, is_causal=True)
        found: torch.Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.self_attn = Attention()
        self.mlp = Mixture()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        found: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return found


class Trunk(nn.Module):
    """The layers of one stage, and an end that it has."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        own = range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)
        self.layers = nn.ModuleDict({str(number): Layer() for number in own})
        self.embed_tokens = None if stage else nn.Embedding(WORDS, WIDTH)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6) if stage + 1 == stages else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = given if self.embed_tokens is None else self.embed_tokens(given)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden if self.norm is None else self.norm(hidden)


class Model(nn.Module):
    """A Qwen3-MoE in Automodel's names, or one stage of it.

    Args:
        stage: number of the stage.
        stages: how many there are.
    """

    def __init__(self, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.model = Trunk(stage, stages)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False) if stage + 1 == stages else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(given)
        return hidden if self.lm_head is None else self.lm_head(hidden)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _sharded(mesh: DeviceMesh) -> Model:
    """A stage on the meta device: all ranks of a stage share the dense weights, and each `ep` its experts."""
    with torch.device("meta"):
        model = Model(mesh["pp"].get_local_rank(), STAGES)
    data = mesh["ep_shard", "ep"]._flatten("dp")
    for layer in model.model.layers.values():
        experts: Any = layer.get_submodule("mlp.experts")
        experts.divide(mesh["ep"])
        fully_shard(experts, mesh=mesh["ep_shard"], shard_placement_fn=lambda _: Shard(1))
        experts.set_gradient_divide_factor(float(PARTS * GROUPS))  # a rank's gradient is that of all its group's tokens
        experts.set_force_sum_reduction_for_comms(enable=True)  # gloo has no sum that multiplies
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    return model


def _work(rank: int, world: int, folder: str) -> Any:
    mesh = init_device_mesh("cpu", (STAGES, PARTS, GROUPS), mesh_dim_names=("pp", "ep_shard", "ep"))
    model = _sharded(mesh)
    report = load(model, f"{folder}/hub", config=CONFIG)
    assert report.dialect == "automodel"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    placements = {tuple(p.placements) for name, p in model.named_parameters() if "experts" in name}  # type: ignore[attr-defined]
    pipeline = mesh["pp"]
    piece = PipelineStage(model, pipeline.get_local_rank(), STAGES, torch.device("cpu"), group=pipeline.get_group())
    schedule = ScheduleGPipe(piece, n_microbatches=MICRO, loss_fn=_loss)
    own = batch().tensor_split(PARTS * GROUPS)[rank % (PARTS * GROUPS)]
    losses = []
    for _ in range(STEPS):
        parts: list[torch.Tensor] = []
        said: dict[str, Any] = {"target": own, "losses": parts} if piece.is_last else {}
        schedule.step(*([own] if piece.is_first else []), **said)
        losses.append(float(torch.stack(parts).mean()) if parts else 0.0)
        optimizer.step()
        optimizer.zero_grad()
    save(model, f"{folder}/out", to="hf", optimizer=optimizer, config=CONFIG)
    whole = {name: full(tensor) for name, tensor in model.state_dict().items()}
    moments = {name: full(optimizer.state[p][MOMENT]) for name, p in model.named_parameters()}
    return placements, losses, whole, moments


def unstacked(held: Tensors) -> Tensors:
    """The tensors of a hub checkpoint, cut out of Automodel's by hand."""
    found = {}
    for name, tensor in held.items():
        prefix, experts, own = name.partition(".experts.")
        for expert in range(EXPERTS) if experts else ():
            if own == "down_projs":
                found[f"{prefix}.experts.{expert}.down_proj.weight"] = tensor[expert].T
            else:
                found[f"{prefix}.experts.{expert}.gate_proj.weight"] = tensor[expert, :, :INNER].T
                found[f"{prefix}.experts.{expert}.up_proj.weight"] = tensor[expert, :, INNER:].T
        if not experts:
            found[name] = tensor
    return found


def _alone(given: Path) -> tuple[list[float], Model]:
    """The same training in one process, without any cut."""
    model = Model()
    load(model, given, config=CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(STEPS):
        loss = _loss(model(batch()), batch())
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def test_eight_ranks_train_a_mixture_and_give_it_to_the_hub(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source(tmp_path / "hub", CONFIG)
    answers = run(8, _work, str(tmp_path))
    assert all(placements == {(Shard(1), Shard(0))} for placements, *_ in answers)
    losses = [sum(step) / (PARTS * GROUPS) for step in zip(*(each[1] for each in answers), strict=True)]
    assert losses == sorted(losses, reverse=True)
    alone, trained = _alone(tmp_path / "hub")
    assert losses == pytest.approx(alone, rel=1e-5)
    weights, moments = ({name: t for each in answers for name, t in each[place].items()} for place in (2, 3))
    assert weights.keys() == trained.state_dict().keys()
    files = (tmp_path / "out").rglob("*.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    truth = unstacked(weights) | {f"optim/{name}/{MOMENT}": t for name, t in unstacked(moments).items()}
    assert {name for name in found if not name.startswith("optim/") or name.endswith(f"/{MOMENT}")} == truth.keys()
    for name, tensor in truth.items():
        assert torch.equal(found[name], tensor), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ours = Model()
    load(ours, tmp_path / "out")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in ours.state_dict().items())
    with torch.no_grad():
        assert torch.allclose(model(batch()).logits, ours(batch()), rtol=1e-4, atol=1e-5)
