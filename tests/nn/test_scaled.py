"""The grouped product of float8 codes: torch's operation is written out here, in float64, where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.nn.layers import EXPERTS, SPLITS, experts, layer, of_output, rows
from transaxle.encodings.encoding import FLOAT8
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear
from transaxle.nn import path as module
from transaxle.nn.path import path
from transaxle.nn.scaled import rowwise
from transaxle.quant import MXFP8, DelayedScaling, Float8Block, Float8CurrentScaling, QuantizedTensor, kernels

SINGLE = {"single_grouped_weight": True, "single_grouped_bias": True}
FORMS: dict[str, dict[str, Any]] = {"experts": {}, "packed": SINGLE}
RECIPES = {"current": Float8CurrentScaling(), "delayed": DelayedScaling(length=4)}
SIZES: dict[str, Any] = {"in_features": 32, "out_features": 48, "params_dtype": torch.bfloat16}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FAR = 0.06
"""How far products of codes are from those of values, relative."""
forms = pytest.mark.parametrize("form", FORMS)


class Emulated:
    """`torch.nn.functional.scaled_grouped_mm` of rows and a stack, by its documentation: exact, then rounded once."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_recipe_a: Any,
        scale_b: torch.Tensor,
        scale_recipe_b: Any,
        *,
        offs: torch.Tensor,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return [rows, columns]; what is past the last offset is garbage, as it is there."""
        self.calls += 1
        row = functional.ScalingType.RowWise
        assert (scale_recipe_a, scale_recipe_b) == (row, row)
        # What torch checks (`_meta_grouped_mm_common`): types, strides, steps of 16 bytes, one float32 for each row.
        assert {mat_a.dtype, mat_b.dtype} == {torch.float8_e4m3fn}
        assert {scale_a.dtype, scale_b.dtype} == {torch.float32}
        assert output_dtype == torch.bfloat16
        assert offs.dtype == torch.int32
        assert mat_a.stride(1) == 1
        assert mat_b.stride(1) == 1
        assert not mat_a.stride(0) % 16
        assert not mat_b.stride(2) % 16
        assert scale_a.shape == mat_a.shape[:1]
        assert scale_b.shape == (len(offs), mat_b.shape[2])
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        made = torch.full((mat_a.shape[0], mat_b.shape[2]), torch.nan, dtype=torch.float64)
        start = 0
        for expert, stop in enumerate(offs.tolist()):
            left = mat_a[start:stop].double() * scale_a[start:stop, None].double()
            made[start:stop] = left @ (mat_b[expert].double() * scale_b[expert].double())
            start = stop
        return made.to(output_dtype)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    """The operation, on a CPU."""
    made = Emulated()
    monkeypatch.setattr(functional, "scaled_grouped_mm", made)
    monkeypatch.setattr(module, "SCALES", ("cpu", "cuda"))
    return made


def _far(made: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((made.double() - wanted.double()).norm() / wanted.double().norm())


def _codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of each row quantized alone, by the rules of the encodings."""
    found = [kernels.quantize(row[None], FLOAT8) for row in x]
    codes, scales = [one.data for one in found], [one.scale_inv for one in found]
    return torch.cat([one for one in codes if one is not None]), torch.cat([one for one in scales if one is not None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_each_row_is_quantized_as_if_it_were_alone(dtype: torch.dtype) -> None:
    x = (
        torch.randn((12, 32), generator=torch.Generator().manual_seed(0))
        * torch.exp2(torch.arange(12) * 3 - 16)[:, None]
    )
    x = x.to(dtype)
    x[3], x[4, 5], x[5, 6], x[6, 7] = 0, torch.inf, -torch.inf, torch.nan
    x[7] = torch.finfo(dtype).tiny
    x[8] = torch.finfo(dtype).max
    if dtype != torch.float16:
        x[9] = x[9] * 0 + 2e-38  # 448 / 2e-38 is no float32
    codes, scales = rowwise(x)
    wanted, of_rows = _codes(x)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, of_rows)


def _product(x: torch.Tensor, matrices: Sequence[torch.Tensor], splits: Sequence[int]) -> torch.Tensor:
    """Rows, quantized each alone, times the values of matrices [in, out], in float64; zeros for rows of no expert."""
    codes, scales = _codes(x)
    values = codes.double() * scales.double()[:, None]
    made, start = torch.zeros((len(x), matrices[0].shape[1]), dtype=torch.float64), 0
    for count, matrix in zip(splits, matrices, strict=True):
        made[start : start + count] = values[start : start + count] @ matrix.double()
        start += count
    return made


def _weights(made: GroupedLinear) -> list[torch.Tensor]:
    found = [one for one in experts(made, "weight") if isinstance(one, QuantizedTensor)]
    return [one.dequantize(torch.float32).detach() for one in found]


@forms
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_product_of_the_codes(
    emulated: Emulated, form: str, recipe: str, splits: list[int], bias: bool
) -> None:
    said = {**SIZES, **FORMS[form], "bias": bias, "single_grouped_bias": bias and form == "packed"}
    made = layer(**said).quantize_(RECIPES[recipe]).force_path("scaled")
    x = rows(made, dtype=torch.bfloat16)
    assert str(made.path(x)) == "scaled (forced): nothing stands against it"
    found = made(x, torch.tensor(splits))
    weights = _weights(made)
    wanted = _product(x.detach(), [one.t() for one in weights], splits).bfloat16()
    if bias:
        of_rows = [one.detach().expand(count, -1) for one, count in zip(experts(made, "bias"), splits, strict=True)]
        wanted[: sum(splits)] += torch.cat(of_rows)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-2 if bias else 1e-3)
    assert not found[sum(splits) :].any()
    grad = of_output(found.shape, torch.bfloat16)
    found.backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, _product(grad, weights, splits).bfloat16(), rtol=2**-7, atol=1e-3)
    assert not x.grad[sum(splits) :].any()
    assert emulated.calls == 2
    plain = layer(**said).quantize_(RECIPES[recipe])
    y = rows(plain, dtype=torch.bfloat16)
    plain(y, splits).backward(grad)
    for one, two in zip(made.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)  # no products of codes
    if any(splits):
        assert 0 < _far(x.grad, y.grad if y.grad is not None else x) < FAR


@forms
def test_microbatches_and_hooks_that_copy(emulated: Emulated, form: str) -> None:
    made = layer(**SIZES, **FORMS[form]).quantize_(RECIPES["current"]).force_path("scaled")
    x = rows(made, dtype=torch.bfloat16)
    grad = of_output((len(x), 48), torch.bfloat16)
    wanted = made(x, SPLITS[0])
    of_input = torch.autograd.grad(wanted, x, grad)[0]
    for first in (True, False):
        found = made(x, SPLITS[0], is_first_microbatch=first)
        assert torch.equal(found, wanted)
        assert torch.equal(torch.autograd.grad(found, x, grad)[0], of_input)

    def values(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor

    with torch.autograd.graph.saved_tensors_hooks(values, lambda tensor: tensor):
        found = made(x, SPLITS[0])
    calls = emulated.calls
    again = torch.autograd.grad(found, x, grad)[0]
    assert emulated.calls == calls
    assert _far(again, of_input) < FAR


@pytest.mark.parametrize(
    ("dtype", "device", "features", "capability", "quantizer", "why"),
    [
        (torch.bfloat16, CUDA, (48, 32), (9, 0), RECIPES["current"], None),
        (torch.bfloat16, CUDA, (48, 32), (10, 0), RECIPES["delayed"], None),
        (torch.bfloat16, CPU, (48, 32), None, RECIPES["current"], "no product of float8 codes on cpu"),
        (torch.bfloat16, CUDA, (48, 32), (8, 9), RECIPES["current"], r"capability \(8, 9\), below"),
        (torch.bfloat16, CUDA, (48, 32), (12, 0), RECIPES["current"], r"\(12, 0\), where float8 codes are not"),
        (torch.float16, CUDA, (48, 32), (9, 0), RECIPES["current"], "the result is torch.float16"),
        (torch.bfloat16, CUDA, (40, 32), (9, 0), RECIPES["current"], "no multiples of 16"),
        (torch.bfloat16, CUDA, (48, 24), (9, 0), RECIPES["current"], "no multiples of 16"),
        (torch.bfloat16, CUDA, (48, 0), (9, 0), RECIPES["current"], "have no elements"),
        (torch.bfloat16, CUDA, (48, 32), (9, 0), None, "weights are plain"),
        (torch.bfloat16, CUDA, (48, 32), (9, 0), MXFP8(), "weights are MXFP8"),
        (torch.bfloat16, CUDA, (48, 32), (9, 0), Float8Block(), "weights are Float8Block"),
        (torch.bfloat16, CUDA, (48, 32), (9, 0), Float8CurrentScaling("F8_E5M2"), "not E4M3 codes"),
    ],
    ids=str,
)
def test_each_condition(
    dtype: Any, device: Any, features: Any, capability: Any, quantizer: Any, why: str | None
) -> None:
    def asked(forced: Any) -> Any:
        return path(dtype, device, features, capability=capability, forced=forced, quantizer=quantizer)

    assert asked(None).way != "scaled"  # only where the user says so: it rounds inputs and gradients
    if why is None:
        assert str(asked("scaled")) == "scaled (forced): nothing stands against it"
    else:
        with pytest.raises(TransaxleError, match=why) as caught:
            asked("scaled")
        assert caught.value.code == "UNSUPPORTED"


def test_on_a_cpu_a_layer_says_why_not() -> None:
    made = layer(**SIZES).quantize_(RECIPES["current"]).force_path("scaled")
    x = rows(made, dtype=torch.bfloat16)
    for call in (lambda: made.path(x), lambda: made(x, SPLITS[0])):
        with pytest.raises(TransaxleError, match="no scaled product: no product of float8 codes on cpu"):
            call()


def test_experts_of_different_kinds_are_refused(emulated: Emulated) -> None:
    made = layer(**SIZES).quantize_(RECIPES["current"]).force_path("scaled")
    made.register_parameter("weight2", layer(**SIZES).weight2)
    with pytest.raises(TransaxleError, match="not all quantized in one way"):
        made(rows(made, dtype=torch.bfloat16), SPLITS[0])
    assert not emulated.calls


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("splits", [[128, 0, 77, 300], [0, 0, 0, 0], [1, 2, 3, 4]], ids=str)
def test_on_a_gpu_it_is_near_the_product_of_the_values(form: str, splits: list[int]) -> None:
    said = {"in_features": 256, "out_features": 384, "params_dtype": torch.bfloat16, **FORMS[form]}
    made, plain = (layer(**said).cuda().quantize_(RECIPES["current"]) for _ in range(2))
    made.force_path("scaled")
    counts = torch.tensor(splits, device=CUDA)
    x, y = (rows(made, count=512, dtype=torch.bfloat16).detach().cuda().requires_grad_() for _ in range(2))
    found, wanted = made(x, counts), plain.force_path("per_expert")(y, counts)
    grad = of_output(found.shape, torch.bfloat16).cuda()
    found.backward(grad)
    wanted.backward(grad)
    assert x.grad is not None
    assert y.grad is not None
    for one, two in ((found, wanted), (x.grad, y.grad)):
        assert not one[sum(splits) :].any()
        assert not any(splits) or 0 < _far(one, two) < FAR
    assert len(list(made.parameters())) in (2, 2 * EXPERTS)
