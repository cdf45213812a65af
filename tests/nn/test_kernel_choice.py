"""How a layer multiplies: each condition of the choice, and grouped products of float8 codes, emulated in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.cuda import nothing_waits
from tests.nn.layers import (
    EXPERTS,
    FORMS,
    ROWS,
    SINGLE,
    SPLITS,
    Unreadable,
    assert_close,
    expected,
    experts,
    forms,
    grad_of,
    layer,
    of_output,
    readable,
    rows,
    run,
    warm_up,
)
from transaxle.encodings import encoding as encodings
from transaxle.encodings.encoding import FLOAT8, Encoding
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear
from transaxle.nn import kernel_choice as module
from transaxle.nn.grouped_tensor import read_back
from transaxle.nn.kernel_choice import path
from transaxle.quant import MXFP8, DelayedScaling, Float8Block, Float8CurrentScaling, QuantizedTensor, kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
H200, B200, A100, RTX = (9, 0), (10, 0), (8, 0), (12, 0)


@pytest.mark.parametrize(
    ("dtype", "device", "features", "capability", "why"),
    [
        (torch.bfloat16, CPU, (24, 16), None, None),
        (torch.float32, CPU, (23, 15), None, None),
        (torch.float64, CPU, (24, 16), None, "not torch.float64"),
        (torch.float32, CPU, (0, 16), None, "have no elements"),
        (torch.bfloat16, CUDA, (24, 16), H200, None),
        (torch.bfloat16, CUDA, (24, 16), B200, None),
        (torch.bfloat16, CUDA, (24, 16), A100, r"\(8, 0\) torch copies the offsets"),
        (torch.float16, CUDA, (24, 16), H200, "not torch.float16"),
        (torch.bfloat16, torch.device("xpu"), (24, 16), None, "no grouped product on xpu"),
    ],
    ids=str,
)
def test_each_condition(dtype: Any, device: Any, features: Any, capability: Any, why: str | None) -> None:
    found = path(dtype, device, features, capability=capability)
    assert found.way == ("grouped" if why is None else "per_expert")
    if why is None:
        assert found.against == ()
        assert str(found) == "grouped (chosen): no obstacle to a grouped product"
    else:
        with pytest.raises(TransaxleError, match=why):
            path(dtype, device, features, capability=capability, forced="grouped")
        assert "per_expert (chosen)" in str(found)
    assert path(dtype, device, features, capability=capability, forced="per_expert").way == "per_expert"


def test_a_device_takes_only_so_many_experts() -> None:
    assert path(torch.bfloat16, CUDA, (24, 16), capability=H200, experts=1023).way == "grouped"
    found = path(torch.bfloat16, CUDA, (24, 16), capability=H200, experts=1024)
    assert str(found) == "per_expert (chosen): 1024 experts are more than the 1023 that torch multiplies at once"


def test_the_capability_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_capability", lambda index: A100 if index == 1 else H200)
    assert path(torch.bfloat16, torch.device("cuda", 1), (24, 16)).way == "per_expert"
    assert path(torch.bfloat16, torch.device("cuda", 0), (24, 16)).way == "grouped"


@pytest.mark.parametrize(
    "said", [{"params_dtype": torch.float64}, {"in_features": 0}, {"out_features": 0}, {}], ids=str
)
def test_a_device_m_splits_works_where_the_condition_fails_or_the_user_forces_the_other_way(said: Any) -> None:
    """One copy to the host, and the same results: here the numbers are on a CPU, but only reachable by that copy."""
    made = layer(**said)
    x = rows(made, dtype=said.get("params_dtype", torch.float32))
    assert made.path(x).way == ("per_expert" if said else "grouped")
    made.force_path(None if said else "per_expert")
    assert str(made.path(x)).startswith(f"per_expert ({'chosen' if said else 'forced'})")
    reads = Counted(torch.tensor([3, 0, 5, 2]))
    results = run(made, x, reads)
    assert reads.times == 1
    assert_close(results, expected(made, x, [3, 0, 5, 2]))
    assert made.force_path(None).path(x).way == ("per_expert" if said else "grouped")


def test_ways_that_are_not_possible() -> None:
    x = rows(layer())
    with pytest.raises(TransaxleError, match="a grouped product is not possible"):
        layer(params_dtype=torch.float64).force_path("grouped")(x.double(), [3, 0, 5, 2])
    with pytest.raises(TransaxleError, match="no way 'faster'"):
        layer().force_path("faster")  # type: ignore[arg-type]


def test_wrong_numbers_are_read_as_the_device_takes_them() -> None:
    made = layer().force_path("per_expert")
    x = rows(made)
    assert_close(run(made, x, Counted(torch.tensor([3, -2, 50, 2]))), expected(made, x, [3, 0, 9, 0]))


def test_no_copy_to_the_host_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(TransaxleError, match="a CUDA graph is being captured") as caught:
        read_back(OnCuda(), ROWS)
    assert caught.value.code == "UNSUPPORTED"


class Counted(Unreadable):
    """Numbers on the device, of which copies to the host are counted."""

    READS = frozenset()
    times = 0

    def tolist(self) -> Any:
        """The one copy."""
        type(self).times += 1
        return self.hidden.tolist()

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__(hidden)
        type(self).times = 0


class OnCuda:
    """As much of a CUDA tensor as is looked at before it is read."""

    device = CUDA

    def tolist(self) -> list[int]:
        """Must not be called."""
        raise AssertionError("the host reads it")


# The grouped product of float8 codes: torch's operation is written out here, in float64, where there is no GPU.

RECIPES = {"current": Float8CurrentScaling(), "delayed": DelayedScaling(length=4)}
MX, BOTH = MXFP8(), MXFP8(columnwise=True)
SIZES: dict[str, Any] = {"in_features": 32, "out_features": 48, "params_dtype": torch.bfloat16}
WIDE: dict[str, Any] = {"in_features": 160, "out_features": 192, "params_dtype": torch.bfloat16}
"""Of five and six blocks of 32, which are padded to eight; columns of scales for more than one block of 128 rows."""
MANY = ([131, 0, 5, 128], [0, 0, 0, 0], [0, 0, 0, 270], [1, 2, 3, 4])
"""Rows of each expert of 270: more than a block of scales, a whole one, none."""
BUILT = "USE_CUDA=1, USE_MSLK=1"
FAR = 0.06
"""How far products of codes are from those of values, relative."""


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
        swizzle_a: Any = None,
        swizzle_b: Any = None,
        *,
        offs: torch.Tensor,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return [rows, columns]; what is past the last offset is garbage, as it is there."""
        self.calls += 1
        mat_a, mat_b, scale_a, scale_b = map(readable, (mat_a, mat_b, scale_a, scale_b))
        # What torch checks (`_scaled_grouped_mm_cuda_v2` in GroupedBlas.cpp): types, strides, steps of 16 bytes.
        assert {mat_a.dtype, mat_b.dtype} == {torch.float8_e4m3fn}
        assert output_dtype == torch.bfloat16
        assert offs.dtype == torch.int32
        assert mat_a.is_contiguous()
        assert mat_b.transpose(-2, -1).is_contiguous()
        assert not any(size % 16 for size in (mat_a.shape[1], *mat_b.shape[1:]))
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert (scale_recipe_a, swizzle_a) == (scale_recipe_b, swizzle_b)
        ends = readable(offs).tolist()
        if scale_recipe_a == functional.ScalingType.RowWise:
            assert {scale_a.dtype, scale_b.dtype} == {torch.float32}
            assert scale_a.shape == mat_a.shape[:1]
            assert scale_b.shape == (len(ends), mat_b.shape[2])
            left = [one.double()[:, None] for one in scale_a.split(_counts(ends, len(mat_a)))]
            right = [one.double() for one in scale_b]
        else:
            left, right = self._blocks(mat_a, mat_b, scale_a, scale_b, ends)
            assert (scale_recipe_a, swizzle_a) == (
                functional.ScalingType.BlockWise1x32,
                functional.SwizzleType.SWIZZLE_32_4_4,
            )
        made = torch.full((mat_a.shape[0], mat_b.shape[2]), torch.nan, dtype=torch.float64)
        start = 0
        for expert, stop in enumerate(ends):
            made[start:stop] = (mat_a[start:stop].double() * left[expert]) @ (mat_b[expert].double() * right[expert])
            start = stop
        found = made.to(output_dtype)
        return Unreadable(found) if isinstance(offs, Unreadable) else found

    @staticmethod
    def _blocks(
        mat_a: torch.Tensor, mat_b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, ends: list[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Scales of MXFP8, one for each code: rows of each group, and of each expert's matrix, are padded to 128.

        Sizes are those that torch checks (`_check_scales_blocked`), places those of the kernel behind it: a group's
        scales begin after those of the groups before it, `round_up(rows, 128) * round_up(k / 32, 4)` bytes each.
        """
        assert {scale_a.dtype, scale_b.dtype} == {torch.float8_e8m0fnu}
        (_, inner), (many, _, outer) = mat_a.shape, mat_b.shape
        assert not inner % 32
        wide = -(-inner // 128) * 4
        assert scale_a.dim() == 2
        assert scale_a.shape[0] >= mat_a.shape[0]
        assert scale_b.shape == (many, wide * -(-outer // 128) * 128)
        left, place = [], 0
        for count in _counts(ends, ends[-1])[: len(ends)]:
            high = -(-count // 128) * 128
            left.append(_unswizzled(scale_a.view(torch.uint8).flatten()[place : place + high * wide], count, inner))
            place += high * wide
        return left, [_unswizzled(one, outer, inner).t() for one in scale_b.view(torch.uint8)]


def _counts(ends: list[int], rows: int) -> list[int]:
    return [stop - start for start, stop in zip([0, *ends], [*ends, rows], strict=True)]


def _unswizzled(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales, one for each code of a matrix, out of the order that torchao's `to_blocked` gives places in."""
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    high, wide = -(-rows // 128) * 128, -(-columns // 128) * 4
    found = torch.empty(high * wide, dtype=torch.uint8)
    found[to_blocked(torch.arange(high * wide).view(high, wide)) if rows else []] = flat
    exponents = found.view(high, wide)[:rows, : columns // 32].double() - 127
    return torch.exp2(exponents).repeat_interleave(32, 1)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    """The operation, on a CPU."""
    made = Emulated()
    monkeypatch.setattr(functional, "scaled_grouped_mm", made)
    monkeypatch.setattr(module, "SCALES", ("cpu", "cuda"))
    monkeypatch.setattr(module, "_build", lambda: BUILT)
    return made


def _far(made: torch.Tensor, wanted: torch.Tensor) -> float:
    made, wanted = made.detach().double(), wanted.detach().double()
    return float((made - wanted).norm() / wanted.norm())


def _codes(x: torch.Tensor, encoding: Encoding = FLOAT8) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of each row quantized alone, by the rules of the encodings."""
    found = [kernels.quantize(row[None], encoding) for row in x]
    codes, scales = [one.data for one in found], [one.scale_inv for one in found]
    return torch.cat([one for one in codes if one is not None]), torch.cat([one for one in scales if one is not None])


def _product(
    x: torch.Tensor, matrices: Sequence[torch.Tensor], splits: Sequence[int], encoding: Encoding = FLOAT8
) -> torch.Tensor:
    """Rows, quantized each alone, times the values of matrices [in, out], in float64; zeros for rows of no expert."""
    codes, scales = _codes(x, encoding)
    of_rows = scales.double().view(len(codes), -1)  # one for each row or for each 32 elements of it
    values = codes.double() * of_rows.repeat_interleave(codes.shape[1] // of_rows.shape[1], 1)
    made, start = torch.zeros((len(x), matrices[0].shape[1]), dtype=torch.float64), 0
    for count, matrix in zip(splits, matrices, strict=True):
        made[start : start + count] = values[start : start + count] @ matrix.double()
        start += count
    return made


def _with_bias(made: GroupedLinear, products: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
    """Products of all rows, with the bias of its expert added to each."""
    biases = [one.detach().expand(count, -1) for one, count in zip(experts(made, "bias"), splits, strict=True)]
    products[: sum(splits)] += torch.cat(biases)
    return products


def _weights(made: GroupedLinear, *, columnwise: bool = False) -> list[torch.Tensor]:
    found = [one for one in experts(made, "weight") if isinstance(one, QuantizedTensor)]
    return [one.dequantize(torch.float32, columnwise=columnwise).detach() for one in found]


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
    assert str(made.path(x)) == "scaled (forced): no obstacle"
    found = made(x, torch.tensor(splits))
    weights = _weights(made)
    wanted = _product(x.detach(), [one.t() for one in weights], splits).bfloat16()
    wanted = _with_bias(made, wanted, splits) if bias else wanted
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-2 if bias else 1e-3)
    assert not found[sum(splits) :].any()
    grad = of_output(found.shape, torch.bfloat16)
    found.backward(grad)
    torch.testing.assert_close(grad_of(x), _product(grad, weights, splits).bfloat16(), rtol=2**-7, atol=1e-3)
    assert not grad_of(x)[sum(splits) :].any()
    assert emulated.calls == 2
    plain = layer(**said).quantize_(RECIPES[recipe])
    y = rows(plain, dtype=torch.bfloat16)
    plain(y, splits).backward(grad)
    for one, two in zip(made.parameters(), plain.parameters(), strict=True):
        assert torch.equal(grad_of(one), grad_of(two))  # no products of codes
    assert not any(splits) or 0 < _far(grad_of(x), grad_of(y)) < FAR


@forms
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("splits", MANY, ids=str)
def test_mxfp8_is_the_product_of_the_codes(emulated: Emulated, form: str, both: bool, splits: list[int]) -> None:
    """It is chosen; the gradient of the input is one of codes only where there are columnwise ones."""
    said = {**WIDE, **FORMS[form]}
    made = layer(**said).quantize_(BOTH if both else MX)
    x = rows(made, count=270, dtype=torch.bfloat16)
    back = "" if both else "; the gradient of the input multiplies values, since the weights have no columnwise codes"
    assert str(made.path(x)) == f"scaled (chosen): no obstacle{back}"
    grad = of_output((270, made.out_features), torch.bfloat16)
    found = run(made, x, Unreadable(torch.tensor(splits)), grad)
    assert emulated.calls == 1 + both
    assert all(isinstance(one, Unreadable) for one in found.values())
    wanted = _product(x.detach(), [one.t() for one in _weights(made)], splits, encodings.MXFP8).bfloat16()
    wanted = _with_bias(made, wanted, splits)
    torch.testing.assert_close(readable(found["output"]), wanted, rtol=2**-7, atol=2e-2)
    of_values = run(made.force_path("grouped"), x, splits, grad)
    if both:
        back_wanted = _product(grad, _weights(made, columnwise=True), splits, encodings.MXFP8).bfloat16()
        torch.testing.assert_close(readable(found["input"]), back_wanted, rtol=2**-7, atol=1e-3)
        assert not any(splits) or 0 < _far(readable(found["input"]), of_values["input"]) < FAR
    for name in of_values.keys() - ({"output", "input"} if both else {"output"}):
        assert torch.equal(readable(found[name]), of_values[name])  # no products of codes
    for name in ("output", "input"):
        assert not readable(found[name])[sum(splits) :].any()


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


CONDITIONS: list[tuple[Any, Any, Any, Any, Any, str | None]] = [
    (torch.bfloat16, CUDA, (48, 32), H200, RECIPES["current"], None),
    (torch.bfloat16, CUDA, (48, 32), B200, RECIPES["delayed"], r"no kernel for E4M3 .* \(10, 0\)"),
    (torch.bfloat16, CPU, (48, 32), None, RECIPES["current"], "no product of float8 codes on cpu"),
    (torch.bfloat16, CUDA, (48, 32), (8, 9), RECIPES["current"], r"\(8, 9\) torch copies the offsets"),
    (torch.float16, CUDA, (48, 32), H200, RECIPES["current"], "not torch.float16"),
    (torch.bfloat16, CUDA, (40, 32), H200, RECIPES["current"], "not multiples of 16"),
    (torch.bfloat16, CUDA, (48, 0), H200, RECIPES["current"], "have no elements"),
    (torch.bfloat16, CUDA, (48, 32), H200, None, "weights are plain"),
    (torch.bfloat16, CUDA, (48, 32), H200, Float8Block(), "weights are Float8Block"),
    (torch.bfloat16, CUDA, (48, 32), H200, Float8CurrentScaling("F8_E5M2"), "no device multiplies these"),
    (torch.bfloat16, CUDA, (64, 32), B200, MX, None),
    (torch.bfloat16, CUDA, (64, 32), H200, MX, r"no kernel for MXFP8 .* \(9, 0\)"),
    (torch.float32, CUDA, (64, 32), B200, MX, "not torch.float32"),
    (torch.bfloat16, CUDA, (48, 32), B200, MX, "not multiples of 32"),
    (torch.bfloat16, CUDA, (64, 32), B200, MXFP8("F8_E5M2"), "no device multiplies these"),
]


@pytest.mark.parametrize(("dtype", "device", "features", "capability", "quantizer", "why"), CONDITIONS, ids=str)
def test_each_condition_of_products_of_codes(
    dtype: Any, device: Any, features: Any, capability: Any, quantizer: Any, why: str | None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "_build", lambda: BUILT)

    def asked(forced: Any) -> Any:
        return path(dtype, device, features, capability=capability, forced=forced, quantizer=quantizer, columnwise=True)

    # Float8 with one scale only where the user says so: its inputs become another format than they would be alone.
    chosen = why is None and isinstance(quantizer, MXFP8)
    assert (asked(None).way == "scaled") is chosen
    if why is None:
        assert str(asked("scaled")) == "scaled (forced): no obstacle"
        assert asked("grouped").values == (
            "values are multiplied; force_path('scaled') would multiply codes and round the inputs",
        )
    else:
        with pytest.raises(TransaxleError, match=why) as caught:
            asked("scaled")
        assert caught.value.code == "UNSUPPORTED"


def test_a_build_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_build", lambda: "USE_CUDA=1")
    found = path(torch.bfloat16, CUDA, (64, 32), capability=B200, quantizer=MX)
    assert str(found).startswith("grouped (chosen): no obstacle to a grouped product; torch was built without")
    of_float8 = path(torch.bfloat16, CUDA, (48, 32), capability=H200, forced="scaled", quantizer=RECIPES["current"])
    assert of_float8.way == "scaled"


def test_on_a_cpu_a_layer_says_why_not() -> None:
    made = layer(**SIZES).quantize_(RECIPES["current"]).force_path("scaled")
    x = rows(made, dtype=torch.bfloat16)
    for call in (lambda: made.path(x), lambda: made(x, SPLITS[0])):
        with pytest.raises(TransaxleError, match="a scaled product is not possible: no product of float8 codes on cpu"):
            call()


def test_experts_of_different_kinds_are_refused(emulated: Emulated) -> None:
    made = layer(**SIZES).quantize_(RECIPES["current"]).force_path("scaled")
    made.register_parameter("weight2", layer(**SIZES).weight2)
    with pytest.raises(TransaxleError, match="not all quantized in the same way"):
        made(rows(made, dtype=torch.bfloat16), SPLITS[0])
    assert not emulated.calls


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("splits", [[128, 0, 77, 300], [0, 0, 0, 0], [1, 2, 3, 4]], ids=str)
def test_on_a_gpu_it_is_near_the_product_of_the_values(form: str, recipe: str, splits: list[int]) -> None:
    said = {"in_features": 256, "out_features": 384, "params_dtype": torch.bfloat16, **FORMS[form]}
    made, plain = (layer(**said).cuda().quantize_({**RECIPES, "mxfp8": BOTH}[recipe]) for _ in range(2))
    counts = torch.tensor(splits, device=CUDA)
    x, y = (rows(made, count=512, dtype=torch.bfloat16).detach().cuda().requires_grad_() for _ in range(2))
    _needs_a_kernel(made, x)
    found, wanted = made(x, counts), plain.force_path("per_expert")(y, counts)
    grad = of_output(found.shape, torch.bfloat16).cuda()
    found.backward(grad)
    wanted.backward(grad)
    for one, two in ((found, wanted), (grad_of(x), grad_of(y))):
        assert not one[sum(splits) :].any()
        assert not any(splits) or 0 < _far(one, two) < FAR
    assert len(list(made.parameters())) in (2, 2 * EXPERTS)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_one_capture_serves_all_splits_of_codes(recipe: str) -> None:
    """Output and input gradient of replays with changed splits, none included, equal eager ones, and nothing waits."""
    said: dict[str, Any] = {"in_features": 256, "out_features": 384, "params_dtype": torch.bfloat16, **SINGLE}
    made = layer(**said).cuda().quantize_({**RECIPES, "mxfp8": BOTH}[recipe]).requires_grad_(False)
    x = rows(made, count=512, dtype=torch.bfloat16).detach().cuda().requires_grad_()
    _needs_a_kernel(made, x)
    grad = of_output((512, 384), torch.bfloat16).cuda()
    counts = torch.tensor([128, 0, 77, 300], device=CUDA)
    warm_up(lambda: torch.autograd.grad(made(x, counts), x, grad))
    graph = torch.cuda.CUDAGraph()
    with nothing_waits(), torch.cuda.graph(graph):
        found = made(x, counts)
        of_input = torch.autograd.grad(found, x, grad)[0]
    for splits in ([128, 0, 77, 300], [0, 0, 0, 0], [512, 0, 0, 0], [0, 1, 255, 256], [1, 2, 3, 4]):
        counts.copy_(torch.tensor(splits))
        graph.replay()
        other = x.detach().requires_grad_()  # the graph holds on to what x was captured with
        eager = made(other, counts)
        assert torch.equal(found, eager)
        assert torch.equal(of_input, torch.autograd.grad(eager, other, grad)[0])


def _needs_a_kernel(made: GroupedLinear, x: torch.Tensor) -> None:
    """Skip where this device, or this build of torch, has none for these codes."""
    try:
        made.force_path("scaled").path(x)
    except TransaxleError as error:
        pytest.skip(str(error))
