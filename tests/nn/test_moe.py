"""The mixture: output and gradients of transformers' block, the same on several ranks, and nothing read by the host."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import transaxle as tx
from tests.cuda import nothing_waits
from tests.live.ranks import run
from tests.nn.layers import Graphs, grad_of
from tests.oracles import hub
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear, MoE, experts_as
from transaxle.nn.moe import order
from transaxle.quant import MXFP8
from transaxle.torch_tensors import local_of

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
    found = {"output": made.detach(), "input": grad_of(own)}
    grads = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return found | experts_as(grads, "transformers", prefix="experts.")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_it_equals_the_block_of_transformers(packed: bool, normed: bool) -> None:
    """Experts without tokens have gradients of zeros; no tokens are no output."""
    theirs = _block(norm_topk_prob=normed)
    ours = _mixture(norm_topk_prob=normed, single_grouped_weight=packed)
    ours.load_state_dict(theirs.state_dict())
    for x in (_tokens(3, 7), _tokens(1, 1)):
        wanted, found = _gradients(theirs, x), _gradients(ours, x)
        assert wanted.keys() == found.keys() == {"output", "input", *WEIGHTS}
        torch.testing.assert_close(found, wanted, **CLOSE)
    empty = _gradients(ours, _tokens(2, 0))
    assert empty["output"].shape == empty["input"].shape == (2, 0, WIDTH)
    assert all(not empty[name].any() for name in WEIGHTS)
    x = _tokens(3, 7).detach().bfloat16()
    torch.testing.assert_close(ours.bfloat16()(x), theirs.bfloat16()(x), rtol=3e-2, atol=3e-2)


def test_shared_experts_are_added() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

    theirs, beside = _block(), _random(Qwen3MoeMLP(hub.configuration(CONFIG)), 5)
    ours = _mixture(shared_intermediate_size=SHARED)
    ours.load_state_dict(
        theirs.state_dict() | {f"shared_experts.{name}": value for name, value in beside.state_dict().items()}
    )
    x = _tokens(3, 7)
    torch.testing.assert_close(ours(x), theirs(x) + beside(x), **CLOSE)


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
    ours, graphs = _mixture(single_grouped_weight=True), Graphs()
    compiled = torch.compile(ours, fullgraph=True, backend=graphs)
    for seed in (1, 2):
        x = _tokens(3, 7, seed=seed).detach()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), ours(x), **CLOSE)
    assert len(graphs) == 1
    torch._dynamo.reset()


def _own(rank: int, world: int, experts: int) -> list[int]:
    """Experts of a rank, as torch cuts them."""
    held = torch.arange(experts).chunk(world)
    return held[rank].tolist() if rank < len(held) else []


def _slices(packed: Mapping[str, torch.Tensor], ours: nn.Module, own: list[int]) -> dict[str, torch.Tensor]:
    """What a rank is to have, under its own names, of tensors under those of a whole mixture with packed experts."""
    found = {}
    for name, parameter in ours.named_parameters():
        stem, _, number = name.rpartition(".weight")
        whole = packed[f"{stem}.weight"]
        if number:
            found[name] = whole[int(number)]
        else:
            found[name] = whole[own] if isinstance(parameter, DTensor) else whole
    return found


ROWS = ([9, 9, 0, 3], [17, 1, 2, 2], [5, 0, 0, 0])
"""Tokens of each rank."""


def _built(experts: int, packed: bool, ep: Any = None) -> tuple[MoE, torch.optim.Optimizer]:
    made = MoE(WIDTH, INNER, experts, CHOSEN, single_grouped_weight=packed, ep=ep)
    return made, torch.optim.AdamW(made.parameters(), lr=1e-2)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of what this rank has of weights and moments."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        moments = {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
        found |= {key: local_of(value).detach().clone() for key, value in {name: parameter, **moments}.items()}
    return found


def _shared_out(rank: int, world: int, experts: int, packed: bool, folder: str) -> dict[str, torch.Tensor]:
    """Compute as the mixture of one process does, train a step, save; return what this rank has of it."""
    mesh, own = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)), _own(rank, world, experts)
    whole, (ours, optimizer) = _random(_built(experts, packed=True)[0]), _built(experts, packed, mesh)
    names = [name for name, _ in ours.named_parameters() if "linear_fc2" in name]
    assert names == [f"experts.linear_fc2.weight{number}" for number in ([""] if packed else own)]
    weights = _slices(dict(whole.named_parameters()), ours, own)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            assert parameter.shape == (experts, *parameter.shape[1:]) or not isinstance(parameter, DTensor)
            local_of(parameter).copy_(weights[name])
    for rows in (each[:world] for each in ROWS):
        _compare(rank, whole, ours, rows, own)
    optimizer.step()
    tx.save(ours, f"{folder}/saved", to="dcp:identity", optimizer=optimizer)
    dcp_save({"model": ours.state_dict()}, checkpoint_id=f"{folder}/torch")
    ours.load_state_dict(ours.state_dict())
    return _held(ours, optimizer)


def _compare(rank: int, whole: nn.Module, ours: nn.Module, rows: list[int], own: list[int]) -> None:
    """Output and gradients of this rank's tokens against those of a whole mixture, which has the tokens of all."""
    every, grad = _tokens(sum(rows)), _tokens(sum(rows), seed=2).detach()
    x = every.detach().split(rows)[rank].requires_grad_(rows[1] > 0)  # at last nobody asks for it
    ours.zero_grad()
    whole.zero_grad()
    wanted, found = whole(every), ours(x)
    wanted.backward(grad)
    found.backward(grad.split(rows)[rank])
    torch.testing.assert_close(found, wanted.split(rows)[rank], **CLOSE)
    if x.requires_grad:
        torch.testing.assert_close(x.grad, grad_of(every).split(rows)[rank], **CLOSE)
    dist.all_reduce(grad_of(ours.get_parameter("gate.weight")))
    grads = {name: grad_of(one) for name, one in whole.named_parameters()}
    for name, one in _slices(grads, ours, own).items():
        torch.testing.assert_close(local_of(grad_of(ours.get_parameter(name))), one, **CLOSE)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), found.detach(), **CLOSE)


def _together(parts: list[dict[str, torch.Tensor]], own: list[list[int]]) -> dict[str, torch.Tensor]:
    """What ranks have, as a mixture of one process with packed experts has it."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for part, numbers in zip(parts, own, strict=True):
        for name, value in part.items():
            stem, mark, rest = name.partition(".weight")
            number, slash, slot = rest.partition("/")
            full = f"{stem}{mark}{slash}{slot}"
            if number or ("experts" in name and value.dim()):
                rows = {int(number): value} if number else dict(zip(numbers, value, strict=True))
                stacks.setdefault(full, {}).update(rows)
            else:
                assert torch.equal(found.setdefault(full, value), value)
    return found | {name: torch.stack([one[n] for n in range(len(one))]) for name, one in stacks.items()}


def _loaded(rank: int, world: int, experts: int, packed: bool, folder: str, truth: dict[str, torch.Tensor]) -> None:
    """Load what was saved elsewhere: ours, and torch's through our planner."""
    mesh, own = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)), _own(rank, world, experts)
    made, optimizer = _built(experts, packed, mesh)
    tx.load(made, f"{folder}/saved", optimizer=optimizer)
    other, _ = _built(experts, packed, mesh)
    state = {"model": other.state_dict()}
    dcp_load(state, checkpoint_id=f"{folder}/torch", planner=tx.LoadPlanner())
    other.load_state_dict(state["model"])
    found = _held(made, optimizer)
    for name, value in _slices(truth, made, own).items():
        assert torch.equal(found[name], value), name
        assert torch.equal(local_of(other.get_parameter(name)), value), name
    for key in ("step", "exp_avg", "exp_avg_sq"):
        moments = {name.removesuffix(f"/{key}"): value for name, value in truth.items() if name.endswith(f"/{key}")}
        if key == "step":
            moments = {name: value.expand(experts) for name, value in moments.items()}
        for name, value in _slices(moments, made, own).items():
            mine = found[f"{name}/{key}"]
            assert torch.equal(mine.expand(value.shape), value), (name, key)
    if not packed:
        lone = MoE(WIDTH, INNER, experts, CHOSEN, ep=mesh)
        lone.load_state_dict({name: value for name, value in truth.items() if "/" not in name})  # of all experts
        assert all(torch.equal(lone.get_parameter(name), one) for name, one in made.named_parameters())


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("world", "experts", "packed", "there"),
    [(2, 6, True, 4), (4, 6, True, 1), (2, 5, False, 4), (4, 6, False, 2)],
    ids=["packed", "packed, uneven", "uneven", "uneven, one with none"],
)
def test_ranks_that_share_out_experts_equal_one(
    world: int, experts: int, packed: bool, there: int, tmp_path: Path
) -> None:
    """Output, gradients, and checkpoints: loaded by another number of ranks, in the other form and the same."""
    parts = run(world, _shared_out, experts, packed, str(tmp_path))
    truth = _together(parts, [_own(rank, world, experts) for rank in range(world)])
    for form in (packed, not packed):
        run(there, _loaded, experts, form, str(tmp_path), truth)


def _idle(rank: int, world: int) -> list[str]:
    """Train one expert over two ranks under FSDP2: as one parameter it is refused, as one of several it is as alone."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    tokens = _tokens(5, seed=2)
    found: list[str] = []
    alone = _random(MoE(WIDTH, INNER, 1, 1))
    wanted = alone(tokens)
    wanted.sum().backward()
    for packed in (True, False):
        for all_of_it in (True, False):
            made = MoE(WIDTH, INNER, 1, 1, single_grouped_weight=packed, ep=mesh["ep"])
            made.load_state_dict(alone.state_dict()) if not packed else _fill(made, alone)
            fully_shard(made if all_of_it else made.experts, mesh=mesh["dp"])
            with torch.no_grad():
                assert torch.equal(made(tokens), wanted)
            if packed:
                with pytest.raises(TransaxleError, match="1 experts over 2 ranks leave 1 without any") as error:
                    made(tokens)
                found.append(error.value.code)
                for layer in (made.experts.linear_fc1, made.experts.linear_fc2):
                    layer.requires_grad_(False)  # what is not trained has no gradient to be reduced
            made(tokens).sum().backward()
            for name, parameter in made.named_parameters():
                gradient = parameter.grad
                if gradient is None:
                    assert packed, name
                    continue
                expected = grad_of(alone.get_parameter(name)) * (2 if "experts" in name else 1)
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                torch.testing.assert_close(whole, expected, **CLOSE)
    return found


def _fill(made: MoE, alone: nn.Module) -> None:
    """Give one parameter per layer the values of its only expert, where this rank has it."""
    made.gate.load_state_dict(alone.get_submodule("gate").state_dict())
    with torch.no_grad():
        for name in ("experts.linear_fc1", "experts.linear_fc2"):
            own = local_of(made.get_parameter(f"{name}.weight"))
            own.copy_(alone.get_parameter(f"{name}.weight0").unsqueeze(0)[: len(own)])


def test_a_rank_without_experts_is_refused_where_torch_cannot_reduce_for_it() -> None:
    """On every rank, before any waits; torch's reduce-scatter fails on the rank with an empty gradient only."""
    assert run(4, _idle) == [["UNSUPPORTED"] * 2] * 4


def _refused(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    grid = init_device_mesh("cpu", (1, world), mesh_dim_names=("ep_shard", "ep"))
    quantized = GroupedLinear(EXPERTS, 32, 32, bias=False, recipe=MXFP8())
    lacking = _mixture(ep=mesh)
    calls: list[Callable[[], Any]] = [
        lambda: _mixture(ep=grid), lambda: _mixture().experts.linear_fc1.divide(grid), lambda: quantized.divide(mesh),
        lambda: lacking.experts.divide(mesh),
        lambda: lacking.load_state_dict({k: v for k, v in _mixture().state_dict().items() if k[-1] not in "15"}),
    ]  # fmt: skip
    found = []
    for call in calls:
        with pytest.raises(TransaxleError) as error:
            call()
        found.append(f"{error.value.code} {error.value.refusals[0].message}")
    return found


def test_copies_and_pickles_load_any_layout_too() -> None:
    theirs, ours = _block(), _mixture()
    x = _tokens(5)
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):  # noqa: S301 - made above
        made.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(made(x), theirs(x[None])[0], **CLOSE)


def test_what_cannot_be_shared_out_is_refused() -> None:
    for rank, said in enumerate(run(2, _refused)):
        assert [each.partition(" ")[0] for each in said] == ["UNSUPPORTED"] * 4 + ["INCOMPLETE"]
        assert f"experts {[1, 5][rank]} of 6 are missing" in said[-1]
    with pytest.raises(TransaxleError, match="num_experts=1"):
        MoE(WIDTH, INNER, 1, CHOSEN)


@pytest.mark.gpu
def test_one_cuda_graph_serves_all_routes() -> None:
    ours = _random(_mixture(single_grouped_weight=True)).bfloat16().cuda()
    every = [_tokens(3, 7, seed=seed).detach().bfloat16().cuda() for seed in (1, 2, 3)]
    x = every[0].clone()
    with torch.no_grad():
        wanted = [ours(each) for each in every]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with nothing_waits(), torch.cuda.graph(graph):
            made = ours(x)
        for each, one in zip(every, wanted, strict=True):
            x.copy_(each)
            graph.replay()
            assert torch.equal(made, one)
