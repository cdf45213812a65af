"""The mixture: output and gradients of transformers' block, the same on several ranks, and nothing read by the host."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.live.ranks import run
from tests.oracles import hub
from transaxle.errors import TransaxleError
from transaxle.nn import MoE, experts_as
from transaxle.nn.order import order

WIDTH, INNER, EXPERTS, CHOSEN, SHARED = 16, 12, 6, 2, 20
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": WIDTH, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN, "norm_topk_prob": True, "intermediate_size": SHARED,
}  # fmt: skip
WEIGHTS = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
"""Parameters of transformers' block."""
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}


def _random(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def _block(**said: Any) -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    return _random(Qwen3MoeSparseMoeBlock(hub.configuration({**CONFIG, **said})))


def _mixture(**said: Any) -> MoE:
    return MoE(WIDTH, INNER, EXPERTS, CHOSEN, **said)


def _tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((*shape, WIDTH), generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and all gradients, in the names and shapes of transformers' block."""
    model.zero_grad()
    own = x.detach().requires_grad_()
    made = model(own)
    made.backward(_tokens(*x.shape[:-1], seed=2).detach())
    assert own.grad is not None
    found = {"output": made.detach(), "input": own.grad}
    grads = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return found | experts_as(grads, "transformers", prefix="experts.")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_it_equals_the_block_of_transformers(packed: bool, normed: bool) -> None:
    theirs = _block(norm_topk_prob=normed)
    ours = _mixture(norm_topk_prob=normed, single_grouped_weight=packed)
    ours.load_state_dict(theirs.state_dict())
    x = _tokens(3, 7)
    wanted, found = _gradients(theirs, x), _gradients(ours, x)
    assert set(wanted) == {"output", "input", *WEIGHTS}
    assert wanted.keys() == found.keys()
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, **CLOSE)


def test_shared_experts_are_added() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

    theirs, beside = _block(), _random(Qwen3MoeMLP(hub.configuration(CONFIG)), 5)
    ours = _mixture(shared_intermediate_size=SHARED)
    ours.load_state_dict(
        theirs.state_dict() | {f"shared_experts.{name}": value for name, value in beside.state_dict().items()}
    )
    x = _tokens(3, 7)
    torch.testing.assert_close(ours(x), theirs(x) + beside(x), **CLOSE)


def test_few_tokens_and_none() -> None:
    """Experts without tokens have gradients of zeros; no tokens are no output."""
    theirs, ours = _block(), _mixture()
    ours.load_state_dict(theirs.state_dict())
    x = _tokens(1, 1)
    wanted, found = _gradients(theirs, x), _gradients(ours, x)
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, **CLOSE)
    empty = _gradients(ours, _tokens(2, 0))
    assert empty["output"].shape == empty["input"].shape == (2, 0, WIDTH)
    assert all(not empty[name].any() for name in WEIGHTS)


def test_bfloat16() -> None:
    theirs, ours = _block().bfloat16(), _mixture(params_dtype=torch.bfloat16)
    ours.load_state_dict(theirs.state_dict())
    x = _tokens(3, 7).detach().bfloat16()
    torch.testing.assert_close(ours(x), theirs(x), rtol=3e-2, atol=3e-2)


def test_the_order_of_rows() -> None:
    groups = torch.tensor([2, 0, 2, 4, 0, 2])
    found = order(groups, 6)
    assert found.counts.tolist() == [2, 0, 3, 0, 1, 0]
    assert groups[found.places].tolist() == [0, 0, 2, 2, 2, 4]
    assert found.places.tolist() == [1, 4, 0, 2, 5, 3]
    assert found.places[found.back].tolist() == list(range(6))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_host_reads_nothing() -> None:
    """One graph serves all routes: a value that the host reads would break it."""
    torch._dynamo.reset()
    ours = _mixture(single_grouped_weight=True)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    for seed in (1, 2):
        x = _tokens(3, 7, seed=seed).detach()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), ours(x), **CLOSE)
    assert len(graphs) == 1
    torch._dynamo.reset()


def _ranks(rank: int, world: int, rows: list[int]) -> Any:
    """Output and gradients under EP of this rank's tokens: the experts' in full, those of the router summed."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    whole = _random(_mixture(single_grouped_weight=True))
    ours = _mixture(single_grouped_weight=True, ep=mesh)
    with torch.no_grad():
        ours.gate.weight.copy_(whole.get_parameter("gate.weight"))
        for name in ("experts.linear_fc1.weight", "experts.linear_fc2.weight"):
            own = ours.get_parameter(name)
            assert isinstance(own, DTensor)
            assert own.placements == (Shard(0),)
            own.to_local().copy_(whole.get_parameter(name).chunk(world)[rank])
    every = _tokens(sum(rows)).detach()
    x = every.split(rows)[rank].clone().requires_grad_()
    made = ours(x)
    made.backward(_tokens(sum(rows), seed=2).detach().split(rows)[rank])
    dist.all_reduce(ours.gate.weight.grad)
    grads = {name: one.grad for name, one in ours.named_parameters()}
    assert x.grad is not None
    return made.detach(), x.grad, {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


@pytest.mark.parametrize("rows", [[9, 9], [17, 1], [5, 0]])
def test_two_ranks_equal_one(rows: list[int]) -> None:
    answers = run(2, _ranks, rows)
    ours = _random(_mixture(single_grouped_weight=True))
    x = _tokens(sum(rows))
    made = ours(x)
    made.backward(_tokens(sum(rows), seed=2).detach())
    assert x.grad is not None
    torch.testing.assert_close(torch.cat([each[0] for each in answers]), made.detach(), **CLOSE)
    torch.testing.assert_close(torch.cat([each[1] for each in answers]), x.grad, **CLOSE)
    for name, parameter in ours.named_parameters():
        for _, _, grads in answers:
            torch.testing.assert_close(grads[name], parameter.grad, **CLOSE)


def _refused(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    grid = init_device_mesh("cpu", (1, world), mesh_dim_names=("ep_shard", "ep"))
    found: list[str] = []
    cases: list[tuple[int, dict[str, Any]]] = [
        (EXPERTS, {"ep": mesh}), (EXPERTS, {"ep": grid, "single_grouped_weight": True}),
        (5, {"ep": mesh, "single_grouped_weight": True}), (1, {}),
    ]  # fmt: skip
    for experts, said in cases:
        with pytest.raises(TransaxleError) as error:
            MoE(WIDTH, INNER, experts, CHOSEN, **said)
        found.append(error.value.code)
    return found


def test_copies_and_pickles_load_any_layout_too() -> None:
    theirs, ours = _block(), _mixture()
    x = _tokens(5)
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):  # noqa: S301 - made above
        made.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(made(x), theirs(x[None])[0], **CLOSE)


def test_what_cannot_be_shared_out_is_refused() -> None:
    codes = ["UNSUPPORTED", "UNSUPPORTED", "SHAPE_MISMATCH", "SHAPE_MISMATCH"]
    assert run(2, _refused) == [codes, codes]


@pytest.mark.gpu
def test_one_cuda_graph_serves_all_routes() -> None:
    ours = _random(_mixture(single_grouped_weight=True)).bfloat16().cuda()
    every = [_tokens(3, 7, seed=seed).detach().bfloat16().cuda() for seed in (1, 2, 3)]
    x = every[0].clone()
    with torch.no_grad():
        wanted = [ours(each) for each in every]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                made = ours(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for each, one in zip(every, wanted, strict=True):
            x.copy_(each)
            graph.replay()
            assert torch.equal(made, one)
