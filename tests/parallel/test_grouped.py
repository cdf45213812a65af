"""Mixtures made of grouped layers: every expert is cut inside, and computes what the whole one does."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import transaxle as tx
from tests.live.ranks import run
from tests.oracles import hub
from tests.parallel.models import beyond, gradients_off, off, tokens
from transaxle.errors import TransaxleError
from transaxle.nn.grouped_linear import GroupedLinear
from transaxle.nn.moe import MoE
from transaxle.parallel.cutting import cut_parameters
from transaxle.parallel.tensor_parallel import tensor_parallel
from transaxle.torch_tensors import local_of

INNER, EXPERTS, CHOSEN = 10, 3, 2
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": INNER,
    "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True, "tie_word_embeddings": False,
    "pad_token_id": 5, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip


def _model(seed: int, *, single: bool, ep: Any = None) -> nn.Module:
    model = hub.model(CONFIG, torch.float32)
    for layer in model.model.layers:
        layer.mlp = MoE(CONFIG["hidden_size"], INNER, EXPERTS, CHOSEN, single_grouped_weight=single, ep=ep)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        local_of(parameter).copy_(torch.randn(local_of(parameter).shape, generator=generator) * 0.2)
    found: nn.Module = model.train()
    return found


def _compare(rank: int, world: int, single: bool, out: str) -> tuple[dict[str, float], list[str], int]:
    with torch.no_grad():
        whole = _model(0, single=single)
        same, other = (_model(1, single=each) for each in (single, not single))
    mesh = init_device_mesh("cpu", (world,))
    cut = tensor_parallel(deepcopy(whole), mesh)
    ids = tokens(CONFIG)
    outputs = [model(input_ids=ids, labels=ids) for model in (whole, cut)]
    for output in outputs:
        output.loss.backward()
    found = {"logits": off(outputs[1].logits, outputs[0].logits), **gradients_off(cut, whole)}
    experts = sum("experts" in name and sum(kept.widths) in (INNER, 2 * INNER) for name, _, kept in cut_parameters(cut))
    tx.save(cut, out, to="dcp")
    resumed = tensor_parallel(other, mesh)  # one parameter for each expert where it was one for all, and the reverse
    tx.load(resumed, out)
    back = _model_of(whole, single=not single)
    wrong = [n for n, p, kept in cut_parameters(resumed) if not torch.equal(local_of(p), kept.take(back[n]))]
    tensor_parallel(same, mesh)  # through torch's checkpoint and state dicts
    dcp_save(cut.state_dict(), checkpoint_id=f"{out}-torch")
    state = same.state_dict()
    dcp_load(state, checkpoint_id=f"{out}-torch")
    same.load_state_dict(state)
    pairs = zip(cut.named_parameters(), same.parameters(), strict=True)
    return found, [*wrong, *(n for (n, p), q in pairs if not torch.equal(local_of(p), local_of(q)))], experts


def _model_of(whole: nn.Module, *, single: bool) -> dict[str, Tensor]:
    """The weights of a model in the names of the other form, written out."""
    found = {}
    for name, value in whole.state_dict().items():
        stem, _, last = name.rpartition(".")
        if "experts" not in name:
            found[name] = value
        elif not single:
            found |= {f"{name}{place}": part for place, part in enumerate(value)}
        elif last == "weight0":
            found[f"{stem}.weight"] = torch.stack([whole.state_dict()[f"{stem}.weight{e}"] for e in range(EXPERTS)])
    return found


@pytest.mark.parametrize(("single", "world"), [(True, 2), (False, 3)])
def test_every_expert_is_cut_inside(single: bool, world: int, tmp_path: Path) -> None:
    for found, wrong, experts in run(world, _compare, single, str(tmp_path / "saved")):
        assert beyond(found, 2e-5) == {}
        assert wrong == []
        assert experts == 2 * 2 * (1 if single else EXPERTS)


def _refused(rank: int, world: int) -> list[str]:
    mesh, said = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp")), []
    with torch.no_grad():
        models = [_model(0, single=single, ep=mesh["ep"]) for single in (True, False)]
    calls: list[Callable[[], object]] = [
        lambda: tensor_parallel(models[0], mesh["ep"]),
        lambda: tensor_parallel(models[1], mesh["ep"]),
        lambda: tensor_parallel(models[0], mesh["tp"], dtensor=False),
    ]
    for call in calls:
        with pytest.raises(TransaxleError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_experts_that_the_same_ranks_share_out_are_refused() -> None:
    for *same, plain in run(3, _refused):
        for said in same:
            assert "ranks [0, 1, 2] already divide its experts" in said
            assert "model.layers.1.mlp.experts.linear_fc2" in said
        assert "and so a DTensor" in plain


# Experts that ranks share out, each of which other ranks cut.


def _at(name: str, place: tuple[int, int], degrees: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Where in a tensor for all experts lies what a rank has under a name, as torch cuts experts and their inside.

    `place` is the rank's among those that share experts out, and among those that cut them; `degrees` are as many.
    """
    shared, cut = (torch.arange(n).chunk(d) for n, d in zip((EXPERTS, INNER), degrees, strict=True))
    number = name.rpartition(".weight")[2]
    own = shared[place[0]] if place[0] < len(shared) else torch.arange(0)
    experts = torch.tensor([int(number)]) if number else own
    inside, width = cut[place[1]], torch.arange(CONFIG["hidden_size"])
    both = torch.cat([inside, inside + INNER])
    rows, columns = (both, width) if "linear_fc1" in name else (width, inside)
    return experts[:, None, None], rows[:, None], columns


def _stem(name: str) -> str:
    return name.rstrip("0123456789")


_State = dict[tuple[str, str], Tensor]
"""Weights, gradients and moments of experts, by name and what it is."""


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> _State:
    """What a rank has of them."""
    found = {}
    for name, parameter in model.named_parameters():
        if "experts" in name:
            kinds = {"weight": parameter, "grad": parameter.grad, **optimizer.state[parameter]}
            for kind, value in kinds.items():
                if value is not None and value.dim():
                    local = local_of(value).clone()
                    found[name, kind] = local if local.dim() > 2 else local[None]
    return found


def _together(parts: list[_State], degrees: tuple[int, int]) -> _State:
    """All of it, put together by places alone."""
    found: _State = {}
    for rank, part in enumerate(parts):
        for (name, kind), value in part.items():
            sizes = (2 * INNER, CONFIG["hidden_size"]) if "linear_fc1" in name else (CONFIG["hidden_size"], INNER)
            whole = found.setdefault((_stem(name), kind), torch.full((EXPERTS, *sizes), torch.nan))
            whole[_at(name, divmod(rank, degrees[1]), degrees)] = value
    assert not any(whole.isnan().any() for whole in found.values())
    return found


def _meshes(degrees: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", (1, *degrees), mesh_dim_names=("ep_shard", "ep", "tp"))


def _cut(seed: int, mesh: DeviceMesh, *, single: bool, fsdp: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose experts are shared out over some ranks, and cut over others."""
    with torch.no_grad():
        model: Any = _model(0, single=True)
        whole = dict(model.named_parameters())
        own = _model(seed, single=single, ep=mesh["ep"]) if mesh["ep"].size() > 1 else _model(seed, single=single)
        for name, parameter in own.named_parameters() if not seed else ():
            place = (mesh["ep"].get_local_rank(), 0)
            value = whole[_stem(name)][_at(name, place, (mesh["ep"].size(), 1))] if "experts" in name else whole[name]
            local_of(parameter).copy_(value.view(local_of(parameter).shape))
    model = tensor_parallel(own, mesh["tp"])
    if fsdp:
        data = mesh["ep_shard", "ep"]._flatten("dp")
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, mesh=mesh["ep_shard"])
            layer.mlp.experts.set_gradient_divide_factor(float(data.size()))
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


DEGREES = (2, 2)
_Step = tuple[_State, float, float, dict[str, float]]


def _step(rank: int, world: int, single: bool, fsdp: bool, out: str) -> _Step:
    """Train a step, on another batch for each rank that has other experts, and save; tell what came of it."""
    mesh = _meshes(DEGREES)
    data = mesh["ep"]
    cut, optimizer = _cut(0, mesh, single=single, fsdp=fsdp)
    ids = tokens(CONFIG, data.get_local_rank())
    loss = cut(input_ids=ids, labels=ids).loss
    loss.backward()
    wrong: dict[str, float] = {}
    if not fsdp:  # as FSDP does it: means over the batches, here by hand
        whole = _whole_step()
        for name, parameter, kept in cut_parameters(cut):
            assert parameter.grad is not None
            local_of(parameter.grad).div_(DEGREES[0])
            if "experts" not in name:
                dist.all_reduce(local_of(parameter.grad), group=data.get_group())
                wanted = whole.get_parameter(name).grad
                assert wanted is not None
                wrong[name] = off(local_of(parameter.grad), kept.take(wanted))
    norm = float(tx.parallel.clip_grad_norm_(cut, 1e9))
    optimizer.step()
    tx.save(cut, out, to="dcp", optimizer=optimizer)
    dcp_save(cut.state_dict(), checkpoint_id=f"{out}-torch")
    held = _held(cut, optimizer)
    wrong |= _begun(cut, (data.get_local_rank(), mesh["tp"].get_local_rank()))
    return held, loss.item(), norm, beyond(wrong, 2e-5)


def _begun(cut: nn.Module, place: tuple[int, int]) -> dict[str, float]:
    """How far the initial values of layers are from those of a whole one with the same seed."""
    found = {}
    for path, layer in cut.named_modules():
        if isinstance(layer, GroupedLinear):
            sizes = (CONFIG["hidden_size"], 2 * INNER) if "linear_fc1" in path else (INNER, CONFIG["hidden_size"])
            torch.manual_seed(len(path))
            layer.reset_parameters()
            torch.manual_seed(len(path))
            whole = GroupedLinear(EXPERTS, sizes[0], sizes[1], bias=False, single_grouped_weight=True).weight.detach()
            for name, parameter in layer.named_parameters():
                wanted = whole[_at(f"{path}.{name}", place, DEGREES)]
                alike = torch.equal(local_of(parameter).view(wanted.shape), wanted)
                found[f"{path}.{name} begins"] = 0.0 if alike else 1.0
    return found


def _whole_step() -> Any:
    """The same model in one piece, with the gradients of the mean of the batches' losses."""
    with torch.no_grad():
        whole = _model(0, single=True)
    for step in range(DEGREES[0]):
        ids = tokens(CONFIG, step)
        (whole(input_ids=ids, labels=ids).loss / DEGREES[0]).backward()
    return whole


def _resumed(
    rank: int, world: int, degrees: tuple[int, int], single: bool, torchs: bool, out: str, truth: _State
) -> list[str]:
    """Names of what a load at these degrees, by us or also by torch, does not bring back bit for bit."""
    mesh = _meshes(degrees)
    model, optimizer = _cut(3, mesh, single=single, fsdp=degrees == DEGREES)
    tx.load(model, out, optimizer=optimizer)
    other, _ = _cut(4, mesh, single=single)
    if torchs:
        state = other.state_dict()
        dcp_load(state, checkpoint_id=f"{out}-torch", planner=tx.LoadPlanner())
        other.load_state_dict(state)
    wrong = []
    for (name, kind), value in _held(model, optimizer).items():
        wanted = truth[_stem(name), kind][_at(name, divmod(rank, degrees[1]), degrees)]
        through = local_of(other.get_parameter(name)).view(wanted.shape) if torchs and kind == "weight" else value
        if not torch.equal(value, wanted) or not torch.equal(through, wanted):
            wrong.append(f"{name} {kind}")
    return wrong


@pytest.mark.parametrize(("single", "fsdp"), [(True, False), (False, True)], ids=["packed", "per expert, fsdp"])
def test_experts_are_shared_out_and_cut(single: bool, fsdp: bool, tmp_path: Path) -> None:
    """Three experts over two ranks times two: what they compute, and what they save, at other degrees in both forms."""
    out = str(tmp_path / "saved")
    found = run(4, _step, single, fsdp, out)
    whole = _whole_step()
    truth = _together([held for held, *_ in found], DEGREES)
    for name, parameter in whole.named_parameters():
        if "experts" in name:
            assert off(truth[name, "grad"], parameter.grad) < 2e-5
    wanted = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9))
    for rank, (_, loss, norm, wrong) in enumerate(found):
        ids = tokens(CONFIG, rank // DEGREES[1])
        assert loss == pytest.approx(whole(input_ids=ids, labels=ids).loss.item(), rel=1e-5)
        assert norm == pytest.approx(wanted, rel=1e-5)
        assert wrong == {}
    for degrees, form in ((DEGREES, not single), ((1, 4), single), ((1, 1), not single)):
        for names in run(degrees[0] * degrees[1], _resumed, degrees, form, form is single or single, out, truth):
            assert names == []
