"""Compiled in one graph, and captured in CUDA graphs: splits change, the program does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.cuda import nothing_waits
from tests.nn.layers import (
    EXPERTS,
    ROWS,
    SINGLE,
    SPLITS,
    Graphs,
    assert_close,
    expected,
    grad_of,
    layer,
    of_output,
    rows,
    run,
    warm_up,
)
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear
from transaxle.quant import Float8CurrentScaling

quiet = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
"""Of torch's tracer, which does so itself."""
WITHIN = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@quiet
@pytest.mark.parametrize(
    ("said", "dtype"), [(SINGLE, torch.bfloat16), ({"in_features": 15, "out_features": 23}, torch.float32)], ids=str
)
def test_it_compiles_to_one_graph_for_all_splits(said: dict[str, Any], dtype: torch.dtype) -> None:
    made, graphs = layer(params_dtype=dtype, **said), Graphs()
    compiled = torch.compile(made, fullgraph=True, backend=graphs)
    x = rows(made, dtype=dtype)
    for splits in SPLITS:
        _forget(made, x)
        found = compiled(x, torch.tensor(splits))
        found.backward(of_output(found.shape, found.dtype))
        mine = {name: one.grad.clone() for name, one in made.named_parameters() if one.grad is not None}
        mine |= {"output": found.detach(), "input": grad_of(x).clone()}
        assert_close(mine, expected(made, x, splits), WITHIN[dtype])
    assert len(graphs) == 1


@quiet
def test_the_gradients_are_traced_too() -> None:
    """Ahead of time, forward and backward become two graphs, which know of no number of rows."""
    made = layer(**SINGLE)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    x = rows(made)
    for splits in SPLITS[:3]:
        _forget(made, x)
        found = compiled(x, torch.tensor(splits))
        found.backward(of_output(found.shape, found.dtype))
        mine = grad_of(x).clone()
        assert torch.equal(mine, expected(made, x, splits)["input"])


@quiet
def test_a_list_of_splits_is_traced_too() -> None:
    made = layer()
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    for splits in SPLITS[:3]:
        assert torch.equal(compiled(rows(made), splits), made(rows(made), splits))


@quiet
def test_the_other_way_breaks_the_graph_where_it_has_to_read() -> None:
    made = layer().force_path("per_expert")
    whole = torch.compile(made, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="needs m_splits on the host"):
        whole(rows(made), torch.tensor(SPLITS[0]))
    assert torch.equal(whole(rows(made), SPLITS[0]), made(rows(made), SPLITS[0]))
    broken = torch.compile(made, backend="eager")
    assert torch.equal(broken(rows(made), torch.tensor(SPLITS[0])), made(rows(made), SPLITS[0]))


@quiet
@pytest.mark.parametrize("said", [{"recipe": Float8CurrentScaling()}, {"delay_wgrad_compute": True}], ids=str)
def test_what_is_not_traced_runs_outside_of_the_graph(said: dict[str, Any]) -> None:
    made = layer(**said)
    x = rows(made)
    found = run(torch.compile(made, backend="aot_eager"), x, torch.tensor(SPLITS[0]))  # type: ignore[arg-type]
    assert torch.equal(found["input"], expected(made, x, SPLITS[0])["input"])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="are not traced"):
        torch.compile(made, fullgraph=True, backend="eager")(x, torch.tensor(SPLITS[0]))


class _Between(torch.nn.Module):
    """A layer with torch's own around it, which are compiled whatever becomes of it."""

    def __init__(self, made: GroupedLinear) -> None:
        super().__init__()
        self.before, self.made = torch.nn.Linear(made.in_features, made.in_features), made
        self.after = torch.nn.Linear(made.out_features, 4)

    def forward(self, x: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.after(self.made(self.before(x).relu(), splits).relu())
        return found


@quiet
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("said", "breaks"), [({}, 0), ({"recipe": Float8CurrentScaling()}, 1), ({"delay_wgrad_compute": True}, 1)], ids=str
)
def test_ten_steps_with_changing_splits_compile_once(said: dict[str, Any], breaks: int) -> None:
    """What is quantized, or delays its gradients, breaks the graph in one place, and nothing is compiled again."""
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    made = layer(**said)
    model, graphs = _Between(made), Graphs()
    compiled = torch.compile(model, backend=graphs)
    x, seen = rows(made).detach(), []
    for step in range(10):
        splits = torch.tensor(SPLITS[step % len(SPLITS)])
        found = compiled(x, splits)
        assert torch.equal(found, model(x, splits))
        found.sum().backward()
        if made.need_backward_dw():
            made.backward_dw()
        model.zero_grad()
        seen.append(len(graphs))
    assert seen == [breaks + 1] * 10
    assert len(torch._dynamo.utils.counters["graph_break"]) == breaks  # told for the layer and for what is around it


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """What other tests compiled, or this one, is forgotten."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _forget(made: GroupedLinear, x: torch.Tensor) -> None:
    made.zero_grad()
    x.grad = None


def _on_gpu(**said: Any) -> GroupedLinear:
    return layer(in_features=64, out_features=128, params_dtype=torch.bfloat16, **said).to("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("said", [{}, SINGLE, {"bias": False}], ids=str)
def test_one_capture_serves_all_splits(said: dict[str, Any]) -> None:
    """Output and gradients of five replays with changed splits equal eager."""
    made = _on_gpu(**said)
    x = torch.randn(ROWS, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad = of_output((ROWS, 128), torch.bfloat16).to("cuda")
    splits = torch.tensor(SPLITS[0], device="cuda")
    assert made.path(x).way == "grouped"
    warm_up(lambda: made(x, splits).backward(grad))
    for one in (x, *made.parameters()):
        one.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = made(x, splits)
        found.backward(grad)
    held = [x.grad, *(one.grad for one in made.parameters())]
    for numbers in SPLITS:
        splits.copy_(torch.tensor(numbers))
        graph.replay()
        replayed = [found.detach().clone(), *(one.clone() for one in held if one is not None)]
        other = x.detach().requires_grad_()
        fresh = _on_gpu(**said)
        eager = fresh(other, torch.tensor(numbers, device="cuda"))
        eager.backward(grad)
        wanted = [eager.detach(), grad_of(other), *(one.grad for one in fresh.parameters() if one.grad is not None)]
        assert all(torch.equal(one, two) for one, two in zip(replayed, wanted, strict=True)), numbers


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_on_a_gpu_it_is_a_loop_of_linears(splits: list[int]) -> None:
    made = _on_gpu()
    x = torch.randn(ROWS, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad = torch.ones((ROWS, 128), dtype=torch.bfloat16, device="cuda")
    assert_close(run(made, x, torch.tensor(splits, device="cuda"), grad), expected(made, x, splits, grad), 3e-2)


@pytest.mark.gpu
def test_the_other_way_raises_while_a_graph_is_captured() -> None:
    made = _on_gpu().force_path("per_expert")
    x = torch.randn(ROWS, 64, dtype=torch.bfloat16, device="cuda")
    splits = torch.tensor(SPLITS[0], device="cuda")
    made(x, splits)
    with pytest.raises(TransaxleError, match="being captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        made(x, splits)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [[3, 0, 5, 2], torch.tensor([3, 0, 5, 2])], ids=["list", "tensor"])
def test_numbers_of_the_host_are_sent_without_waiting(given: Any) -> None:
    made = _on_gpu()
    x = torch.randn(ROWS, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    wanted = made(x, torch.tensor([3, 0, 5, 2], device="cuda"))
    with nothing_waits():
        found = made(x, given)
        found.backward(torch.ones_like(found))
    assert torch.equal(found, wanted)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add(1)  # torch warns of graphs that are empty
        with pytest.raises(TransaxleError, match="being captured"):
            made(x, given)


def test_there_are_as_many_experts_as_splits() -> None:
    assert all(len(splits) == EXPERTS and sum(splits) <= ROWS for splits in SPLITS)
