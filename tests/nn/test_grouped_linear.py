"""`GroupedLinear` against a loop of `functional.linear`: outputs and all gradients, in every configuration."""

from __future__ import annotations

import copy
import inspect
import pickle
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.nn.layers import (
    EXPERTS,
    ROWS,
    SPLITS,
    Unreadable,
    assert_close,
    expected,
    experts,
    grad_of,
    layer,
    looped,
    of_output,
    readable,
    rows,
    run,
)
from tests.quant.kinds import KINDS
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear
from transaxle.nn.grouped_tensor import adjacent
from transaxle.quant import DelayedScaling, Float8Block, QuantizedTensor, Quantizer

FORMS = [
    dict(zip(("single_grouped_weight", "single_grouped_bias"), each, strict=True))
    for each in product((False, True), repeat=2)
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of what a bias takes part in: it is added after a rounding that `addmm` does not make, and summed otherwise."""


def _alike(results: dict[str, torch.Tensor], loops: dict[str, torch.Tensor], tolerance: float) -> None:
    assert results.keys() == loops.keys()
    for name, result in results.items():
        assert_close({name: result}, loops, tolerance if "bias" in name or name == "output" else 0)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_it_is_a_loop_of_linears(dtype: torch.dtype, form: dict[str, bool], splits: list[int]) -> None:
    made = layer(params_dtype=dtype, **form)
    x = rows(made, dtype=dtype)
    assert made.path(x).way == "grouped"
    _alike(run(made, x, torch.tensor(splits)), expected(made, x, splits), TOLERANCE[dtype])
    made = layer(bias=False, single_grouped_weight=form["single_grouped_weight"])
    x = rows(made)
    _alike(run(made, x, splits), expected(made, x, splits), 0)  # every bit


@pytest.mark.parametrize("features", [(15, 23), (1, 1), (16, 23), (7, 8)], ids=str)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_sizes_that_are_no_steps_of_16_bytes_are_padded(
    dtype: torch.dtype, single: bool, features: tuple[int, int]
) -> None:
    made = layer(in_features=features[0], out_features=features[1], params_dtype=dtype, single_grouped_weight=single)
    x = rows(made, dtype=dtype)
    # Other sizes are summed up in another order.
    assert_close(run(made, x, [1, 0, 3, 4]), expected(made, x, [1, 0, 3, 4]), TOLERANCE[dtype])


@pytest.mark.parametrize("way", ["grouped", "per_expert"])
@pytest.mark.parametrize("splits", [[3, 0, 4, 2], [0, 0, 0, 0]], ids=str)
def test_rows_past_the_last_expert_are_zeros_in_both_directions(splits: list[int], way: Any) -> None:
    made = layer().force_path(way)
    x = rows(made)
    with torch.no_grad():
        x[sum(splits) :] = float("nan")  # nobody looks there
    for given in (splits, torch.tensor(splits), Unreadable(torch.tensor(splits))):
        if way == "per_expert" and isinstance(given, Unreadable):
            continue
        found = run(made, x, given, of_output((ROWS, made.out_features), torch.float32))
        assert not readable(found["output"])[sum(splits) :].any()
        assert not readable(found["input"])[sum(splits) :].any()
        assert all(readable(one).isfinite().all() for one in found.values())


@pytest.mark.parametrize("way", ["grouped", "per_expert"])
def test_no_rows_at_all(way: Any) -> None:
    made = layer().force_path(way)
    x = rows(made, count=0)
    found = run(made, x, [0] * EXPERTS)
    assert found["output"].shape == (0, made.out_features)
    assert all(getattr(made, name).grad is not None for name, _ in made.named_parameters())
    assert not any(one.any() for one in found.values())


@pytest.mark.parametrize("way", ["grouped", "per_expert"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_of_stride_zero_and_none(form: dict[str, bool], way: Any) -> None:
    made = layer(**form).force_path(way)
    x = rows(made)
    grad = torch.ones(()).expand(ROWS, made.out_features)
    results = run(made, x, [3, 0, 5, 2], grad)
    _alike(results, expected(made, x, [3, 0, 5, 2], grad.contiguous()), 2e-6)
    made.zero_grad()
    made(x, [3, 0, 5, 2]).sum().backward()
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            output = made(x, [3, 0, 5, 2])
        assert not output.requires_grad
        assert torch.equal(output, results["output"])


def test_operands_begin_at_steps_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views at odd places of larger buffers, as data-parallel wrappers make them: a GPU refuses their addresses."""
    made = layer(single_grouped_weight=True, bias=False)
    flat = torch.zeros(3 + made.weight.numel())
    flat[3:] = made.weight.detach().flatten()
    made.weight.data = flat[3:].view(made.weight.shape)
    x = torch.zeros(1 + ROWS * 16)[1:].view(ROWS, 16).requires_grad_()
    with torch.no_grad():
        x.copy_(rows(made).detach())
    given: list[torch.Tensor] = []
    real = torch.nn.functional.grouped_mm

    def seen(*operands: torch.Tensor, **said: Any) -> torch.Tensor:
        given.extend(operands)
        return real(*operands, **said)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", seen)
    results = run(made, x, [3, 0, 5, 4])
    assert len(given) == 6
    assert all(one.data_ptr() % 16 == 0 for one in given)
    assert_close(results, expected(made, x, [3, 0, 5, 4]), 2e-6)  # unaligned, the loop sums up in another order


def test_more_dims_and_strided_rows() -> None:
    made = layer()
    wide = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(3))
    x = wide[..., ::2]
    found = made(x, [3, 0, 5, 4])
    assert found.shape == (3, 4, made.out_features)
    torch.testing.assert_close(found.view(-1, made.out_features), looped(made, x.reshape(12, 16), [3, 0, 5, 4]))


def test_biases_are_returned_and_not_added() -> None:
    for form in FORMS:
        made = layer(return_bias=True, **form)
        x = rows(made)
        found, biases = made(x, [3, 0, 5, 4])
        assert len(biases) == EXPERTS
        assert all(torch.equal(one, two) for one, two in zip(biases, experts(made, "bias"), strict=True))
        without = layer(**form)
        with torch.no_grad():
            for one in experts(without, "bias"):
                one.zero_()
        torch.testing.assert_close(found, without(x, [3, 0, 5, 4]), rtol=0, atol=0)


@pytest.mark.parametrize("way", ["grouped", "per_expert"])
def test_results_are_written_where_they_are_wanted(way: Any) -> None:
    made = layer().force_path(way)
    x = rows(made)
    out, dgrad = torch.full((ROWS, 24), 7.0), torch.full((ROWS, 16), 7.0)
    given = made(x, [3, 0, 5, 2], out=out, dgrad_out=dgrad)
    assert given.data_ptr() == out.data_ptr()
    assert torch.equal(out, looped(made, x, [3, 0, 5, 2]).detach()) or way == "grouped"
    torch.testing.assert_close(out, looped(made, x, [3, 0, 5, 2]))
    given.backward(of_output(given.shape, given.dtype))
    wanted = expected(made, x.detach().requires_grad_(), [3, 0, 5, 2])
    assert torch.equal(dgrad, wanted["input"])
    for bad in (torch.empty(ROWS, 23), torch.empty(ROWS, 24, dtype=torch.float64)):
        with pytest.raises(TransaxleError, match="SHAPE_MISMATCH"):
            made(x, [3, 0, 5, 2], out=bad)
    with pytest.raises(TransaxleError, match="dgrad_out"):
        made(x, [3, 0, 5, 2], dgrad_out=torch.empty(ROWS, 15))


def test_results_are_written_into_parts_of_larger_buffers() -> None:
    """Autograd loses the gradient of the input, where an operation of its own writes into a view."""
    made = layer()
    x = rows(made).detach().view(3, -1, 16).requires_grad_()
    wanted = run(made, x, [3, 0, 5, 2])
    outs, grads = torch.full((2, 3, 4, 24), 7.0), torch.full((2, *x.shape), 7.0)
    results = run(made, x, [3, 0, 5, 2], out=outs[1], dgrad_out=grads[1])
    assert results["output"].data_ptr() == outs[1].data_ptr()
    assert_close(results | {"output": outs[1], "input": grads[1]}, wanted)
    assert torch.equal(results["input"], wanted["input"])
    assert (outs[0] == 7).all()


@pytest.mark.parametrize("way", ["grouped", "per_expert"])
@pytest.mark.parametrize("where", ["input", "grad"])
def test_the_gradient_of_the_input_may_lie_where_operands_were(where: str, way: Any) -> None:
    made = layer(out_features=16).force_path(way)
    x, grad = rows(made), of_output((ROWS, 16), torch.float32)
    wanted = run(made, x, [3, 0, 5, 2], grad)
    assert_close(run(made, x, [3, 0, 5, 2], grad, dgrad_out=x.detach() if where == "input" else grad), wanted)


def test_one_buffer_takes_the_outputs_of_all_steps() -> None:
    made = layer()
    out = torch.empty(3, 4, 24)
    for seed in range(3):
        x = rows(made, seed).detach().view(3, 4, 16).requires_grad_()
        wanted = run(made, x, [3, 0, 5, 2])
        assert_close(run(made, x, [3, 0, 5, 2], out=out), wanted)
        assert torch.equal(out, wanted["output"])


def test_on_the_meta_device_it_has_shapes() -> None:
    made = layer(device="meta")
    assert made(torch.empty(12, 16, device="meta"), [3, 0, 5, 2]).shape == (12, 24)
    with FakeTensorMode():
        made = GroupedLinear(EXPERTS, 16, 24)
        made(torch.randn(12, 16), torch.tensor([3, 0, 5, 2])).sum().backward()
        assert made.weight0.grad.shape == (24, 16)


def test_weights_that_are_no_parameters_any_more_are_refused() -> None:
    made = layer()
    nn.utils.parametrize.register_parametrization(made, "weight1", nn.Identity())
    with pytest.raises(TransaxleError, match="no longer parameters of the layer: weight1"):
        made(rows(made), [3, 0, 5, 2])


def test_weights_of_the_first_microbatch_serve_the_others() -> None:
    made = layer(single_grouped_weight=True, bias=False, recipe=Float8Block())
    x = rows(made)
    first = made(x, [3, 0, 5, 4], is_first_microbatch=True)
    with torch.no_grad():
        made.weight.copy_(torch.ones(EXPERTS, 24, 16))
    again = made(x, [3, 0, 5, 4], is_first_microbatch=False)
    assert torch.equal(first, again)
    again.backward(torch.ones_like(again))
    assert not (grad_of(x) == 24.0).all()
    assert torch.equal(made(x, [3, 0, 5, 4], is_first_microbatch=True), looped(made, x, [3, 0, 5, 4]))
    assert not torch.equal(first, made(x, [3, 0, 5, 4]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("way", ["grouped", "per_expert"])
def test_quantized_weights_give_the_products_of_their_values(kind: str, single: bool, way: Any) -> None:
    recipe = KINDS[kind]
    made = layer(
        in_features=32, out_features=64, bias=False, single_grouped_weight=single, params_dtype=torch.bfloat16,
        recipe=recipe,
    ).force_path(way)  # fmt: skip
    assert all(isinstance(one, QuantizedTensor) for one in made.parameters())
    x = rows(made, dtype=torch.bfloat16)
    found = run(made, x, [3, 0, 5, 4])
    plain = layer(
        in_features=32, out_features=64, bias=False, params_dtype=torch.bfloat16, single_grouped_weight=single
    )
    with torch.no_grad():
        for one, two in zip(plain.parameters(), made.parameters(), strict=True):
            assert isinstance(two, QuantizedTensor)
            one.copy_(two.dequantize(torch.bfloat16))
    assert all(type(result) is torch.Tensor for result in found.values())
    assert_close(found, expected(plain, x, [3, 0, 5, 4]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("original", [False, True])
def test_quantized_inputs_give_the_products_of_their_values(kind: str, original: bool) -> None:
    recipe: Quantizer = KINDS[kind]
    made = layer(in_features=32, params_dtype=torch.bfloat16, save_original_input=original)
    codes = recipe.quantize(rows(made, dtype=torch.bfloat16).detach())
    saved: list[torch.Tensor] = []

    def packed(one: torch.Tensor) -> torch.Tensor:
        saved.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda one: one):
        found = made(codes, [3, 0, 5, 4])
    assert isinstance(saved[0], QuantizedTensor) == original
    found.backward(of_output(found.shape, found.dtype))
    mine = {name: grad_of(one).clone() for name, one in made.named_parameters()}
    wanted = run(made, codes.dequantize().requires_grad_(), [3, 0, 5, 4])
    assert_close({"output": found.detach(), **mine}, wanted)


@pytest.mark.parametrize("single", [False, True])
def test_activations_can_be_computed_again(single: bool) -> None:
    made = layer(single_grouped_weight=single)
    x, splits = rows(made), torch.tensor([3, 0, 5, 2])
    wanted = run(made, x, splits)
    made.zero_grad()
    x.grad = None
    again = checkpoint(made, x, splits, use_reentrant=False)
    again.backward(of_output(again.shape, again.dtype))
    assert_close({"input": grad_of(x), **{name: grad_of(one) for name, one in made.named_parameters()}}, wanted)


def test_autocast_decides_the_type() -> None:
    made = layer()
    x = rows(made)
    with torch.autocast("cpu", torch.bfloat16):
        found = made(x, [3, 0, 5, 4])
        wanted = looped(made, x, [3, 0, 5, 4]).to(torch.bfloat16)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=0.1)
    found.backward(of_output(found.shape, found.dtype))
    assert grad_of(x).dtype == made.weight0.grad.dtype == torch.float32
    with pytest.raises(TransaxleError, match="DTYPE_MISMATCH"):
        made(x.to(torch.bfloat16), [3, 0, 5, 4])
    double = layer(params_dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):  # neither does it cast these for `functional.linear`
        assert torch.equal(double(x.double(), [3, 0, 5, 4]), looped(double, x.double(), [3, 0, 5, 4]))
        with pytest.raises(TransaxleError, match="DTYPE_MISMATCH"):
            made(torch.ones(ROWS, 16, dtype=torch.int64), [3, 0, 5, 4])


def test_weights_kept_in_inference_mode_serve_no_training() -> None:
    made = layer()
    x = rows(made)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.inference_mode():
            made(x, [3, 0, 5, 4], is_first_microbatch=True)
        made(x, [3, 0, 5, 4], is_first_microbatch=False).sum().backward()
    assert made.weight0.grad is not None


@pytest.mark.parametrize("order", [1, -1], ids=["forward", "reversed"])
def test_parameters_stay_in_the_buffer_that_an_optimizer_works_on(order: int) -> None:
    made = layer()
    held = list(made.parameters())[::order]
    buffer = torch.empty(sum(one.numel() + 1 for one in held))
    start = 0
    for one in held:
        one.data = buffer[start : start + one.numel()].view(one.shape).copy_(one.data)
        start += one.numel() + 1
    made.load_state_dict(layer(seed=5).state_dict())
    made.float()
    assert all(one.untyped_storage().data_ptr() == buffer.data_ptr() for one in held)
    assert torch.equal(made(rows(made), SPLITS[0]), layer(seed=5)(rows(made), SPLITS[0]))


@pytest.mark.parametrize("delay", [False, True])
def test_frozen_parameters_get_no_gradients(delay: bool) -> None:
    made = layer(delay_wgrad_compute=delay)
    made.weight1.requires_grad_(False)
    made.bias0.requires_grad_(False)
    x = rows(made)
    wanted = expected(layer(), x, [3, 4, 3, 2])
    run(made, x, [3, 4, 3, 2])
    if delay:
        made.backward_dw()
    assert made.weight1.grad is None
    assert made.bias0.grad is None
    assert torch.equal(made.weight0.grad, wanted["weight0"])
    torch.testing.assert_close(made.bias1.grad, wanted["bias1"])
    for one in made.parameters():
        one.requires_grad_(False)
    made(x, [3, 4, 3, 2]).sum().backward()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"save_original_input": True, "recipe": DelayedScaling()}, "save_original_input does not work with delayed"),
        ({"bias": False, "single_grouped_bias": True}, "needs a bias"),
        ({"bias": False, "return_bias": True}, "needs a bias"),
    ],
)
def test_what_does_not_go_together_is_refused_at_construction(said: dict[str, Any], why: str) -> None:
    with pytest.raises(TransaxleError, match=why) as caught:
        layer(**said)
    assert caught.value.code == "UNSUPPORTED"
    with pytest.raises(TransaxleError, match="num_gemms=0"):
        GroupedLinear(0, 16, 16)


def test_initial_values() -> None:
    torch.manual_seed(0)
    for single in (False, True):
        made = GroupedLinear(8, 64, 64, single_grouped_weight=single)
        values = torch.stack(experts(made, "weight"))
        assert abs(values.std().item() - 0.023) < 0.001
        assert abs(values.mean().item()) < 0.001
        assert not torch.stack(experts(made, "bias")).any()
        told = GroupedLinear(8, 64, 64, single_grouped_weight=single, init_method=nn.init.ones_)
        assert torch.equal(torch.stack(experts(told, "weight")), torch.ones(8, 64, 64))
        late = GroupedLinear(8, 64, 64, single_grouped_weight=single, device="meta", init_method=nn.init.ones_)
        assert all(one.is_meta for one in late.parameters())
        late.to_empty(device="cpu").reset_parameters()
        assert torch.equal(torch.stack(experts(late, "weight")), torch.ones(8, 64, 64))


def test_experts_lie_in_one_buffer_whatever_happens_to_the_layer() -> None:
    made = layer()

    def packed(one: GroupedLinear) -> bool:
        return adjacent([one.weight0, one.weight1, one.weight2, one.weight3])

    assert packed(made)
    assert packed(copy.deepcopy(made))
    assert packed(pickle.loads(pickle.dumps(made)))  # noqa: S301
    assert packed(made.to(torch.bfloat16))
    copied = copy.deepcopy(made)
    assert copied.weight0.data_ptr() != made.weight0.data_ptr()
    assert torch.equal(copied.weight3, made.weight3)
    made.weight2.data = made.weight2.data.clone()  # behind its back: slower, and right
    assert not packed(made)
    x = rows(made, dtype=torch.bfloat16)
    torch.testing.assert_close(made(x, [3, 0, 5, 4]), looped(made, x, [3, 0, 5, 4]), rtol=2e-2, atol=0.1)


def test_it_says_what_it_is() -> None:
    assert "num_gemms=4, in_features=16, out_features=24, bias=True, single_grouped_weight=False" in repr(layer())
    with pytest.raises(TransaxleError, match="SHAPE_MISMATCH"):
        layer()(torch.randn(3, 15), [3, 0, 0, 0])
    with pytest.raises(TransaxleError, match="one weight per expert"):
        _ = layer().grouped_weight


def test_names_and_defaults_are_those_of_transformer_engine() -> None:
    """Of August 2026: its `GroupedLinear`, without the arguments for its own kernels and communication."""
    said = {
        "bias": True, "return_bias": False, "params_dtype": None, "device": None, "init_method": None,
        "fuse_wgrad_accumulation": False, "delay_wgrad_compute": False, "save_original_input": False,
        "single_grouped_weight": False, "single_grouped_bias": False,
    }  # fmt: skip
    call = {"is_first_microbatch": None, "out": None, "dgrad_out": None}
    needed = inspect.Parameter.empty
    made = inspect.signature(GroupedLinear).parameters
    found = {name: one.default for name, one in made.items() if one.kind != inspect.Parameter.KEYWORD_ONLY}
    assert found == {"num_gemms": needed, "in_features": needed, "out_features": needed, **said}
    given = inspect.signature(GroupedLinear.forward).parameters
    defaults = {name: one.default for name, one in given.items() if name != "self"}
    assert defaults == {"inp": needed, "m_splits": needed, **call}
    assert list(inspect.signature(GroupedLinear.backward_dw).parameters) == ["self"]
