"""torchao's tensors and ours, on the same codes, against torchao's own quantizers and dequantizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.quant.kinds import KINDS, MORE, raw, values
from tests.some import a
from transaxle.errors import TransaxleError
from transaxle.quant import MXFP8, NVFP4, Float8Block, QuantizedTensor, Quantizer, from_torchao, to_torchao

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
SHAPE = (160, 384)
Make = Callable[[torch.Tensor], Any]


def _float8(kind: str, *arguments: Any) -> Make:
    def make(x: torch.Tensor) -> Any:
        from torchao.quantization import Float8Tensor, granularity

        return Float8Tensor.from_hp(x, granularity=getattr(granularity, kind)(*arguments))

    return make


def _mx(dtype: torch.dtype, *, swizzled: bool) -> Make:
    def make(x: torch.Tensor) -> Any:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        return MXTensor.to_mx(x, dtype, 32, is_swizzled_scales=swizzled)

    return make


def _nvfp4(*, total: bool, swizzled: bool) -> Make:
    def make(x: torch.Tensor) -> Any:
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

        scale = per_tensor_amax_to_scale(x.abs().max().float()) if total else None
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale, is_swizzled_scales=swizzled)

    return make


THEIRS: dict[str, Make] = {
    "float8 per tensor": _float8("PerTensor"),
    "float8 per row": _float8("PerRow"),
    "float8 1x128": _float8("PerBlock", [1, 128]),
    "mxfp8": _mx(torch.float8_e4m3fn, swizzled=False),
    "mxfp8, E5M2, swizzled": _mx(torch.float8_e5m2, swizzled=True),
    "nvfp4": _nvfp4(total=True, swizzled=False),
    "nvfp4, no global scale": _nvfp4(total=False, swizzled=False),
    "nvfp4, swizzled": _nvfp4(total=True, swizzled=True),
}


def _alike(made: torch.Tensor, wanted: torch.Tensor, *, exact: bool) -> bool:
    """Whether values are equal; nvfp4's, of which torchao multiplies the scales first, but for a rounding."""
    return torch.equal(made, wanted) if exact else torch.allclose(made, wanted, rtol=2**-22, atol=0)


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_theirs_becomes_ours(kind: str, dtype: torch.dtype) -> None:
    theirs = THEIRS[kind](values(*SHAPE, dtype=dtype))
    made = from_torchao(theirs)
    assert made.dtype == dtype
    assert torch.equal(raw(made.components["data"]), raw(theirs.qdata))
    for wanted in (torch.bfloat16, torch.float32):
        exact = wanted == torch.bfloat16 or "nvfp4" not in kind
        assert _alike(made.dequantize(wanted), theirs.dequantize(wanted), exact=exact)
    assert made.components["data"].data_ptr() == theirs.qdata.data_ptr()
    if "swizzled" not in kind:
        again: Any = to_torchao(made)
        assert type(again) is type(theirs)
        assert torch.equal(raw(again.scale).flatten(), raw(theirs.scale).flatten())
        assert torch.equal(again.dequantize(dtype), theirs.dequantize(dtype))
    else:
        e5m2 = _mx(torch.float8_e5m2, swizzled=False)
        plain = e5m2 if "E5M2" in kind else THEIRS[kind.replace(", swizzled", "")]
        assert torch.equal(raw(made.components["scale_inv"]), raw(plain(values(*SHAPE, dtype=dtype)).scale))


@pytest.mark.parametrize("quantizer", MORE.values(), ids=MORE.keys())
@pytest.mark.parametrize("stacked", [False, True], ids=["matrix", "stack"])
def test_ours_becomes_theirs_and_ours_again(quantizer: Quantizer, stacked: bool) -> None:
    x = values(256, 384)
    made = quantizer.quantize(torch.stack([x, x * 3]) if stacked else x)
    theirs: Any = to_torchao(made)
    assert theirs.shape == made.shape
    assert torch.equal(raw(theirs.qdata), raw(made.components["data"]))
    for dtype in (torch.bfloat16, torch.float32):
        exact = dtype == torch.bfloat16 or quantizer.encoding.name != NVFP4().encoding.name
        assert _alike(made.dequantize(dtype), theirs.dequantize(dtype), exact=exact)
    again = from_torchao(theirs)
    ours = {name: buffer for name, buffer in made.components.items() if not name.startswith("columnwise")}
    assert again.components.keys() == ours.keys()
    assert all(torch.equal(raw(again.components[name]), raw(ours[name])) for name in ours)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_matrix_become_theirs(kind: str) -> None:
    made = a(QuantizedTensor, KINDS[kind].quantize(values(384, 128))[128:256])
    assert torch.equal(to_torchao(made).dequantize(torch.bfloat16), made.dequantize())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_mx(torch.float4_e2m1fn_x2, swizzled=False), "only mxfp8 can be read"),
        (lambda x: THEIRS["mxfp8"](x).t(), "it is transposed"),
        (lambda x: x, "can be read"),
        (lambda x: _float8("PerTensor")(torch.stack([x, x])), "more than a matrix"),
    ],
    ids=["mxfp4", "transposed", "plain", "one scale for a stack"],
)
def test_theirs_without_an_equal_is_refused(make: Make, why: str) -> None:
    with pytest.raises(TransaxleError, match=why) as refused:
        from_torchao(make(values(*SHAPE)))
    assert refused.value.code == "UNSUPPORTED"


@pytest.mark.parametrize(
    ("quantizer", "shape", "why"),
    [
        (NVFP4(scale_max=256), (32, 64), "block scales up to 448 only"),
        (Float8Block(), (256, 130), "needs whole tiles"),
        (MXFP8(), (32, 50), "needs whole tiles"),
    ],
    ids=["4 over 6", "blocks", "mxfp8"],
)
def test_ours_without_an_equal_is_refused(quantizer: Quantizer, shape: tuple[int, int], why: str) -> None:
    with pytest.raises(TransaxleError, match=why) as refused:
        to_torchao(quantizer.quantize(values(*shape)))
    assert refused.value.code == "UNSUPPORTED"


def test_a_global_scale_of_no_amax_is_refused() -> None:
    """Some float32 are no quotient of a float32 by 2688."""
    theirs = THEIRS["nvfp4"](values(32, 64))
    found: set[str] = set()
    for step in range(64):
        theirs.per_tensor_scale = torch.tensor(2.0 - step * 2**-23)
        try:
            made = from_torchao(theirs)
        except TransaxleError as error:
            found.add(error.code)
        else:
            found.add("")
            assert torch.equal(made.dequantize(), theirs.dequantize(torch.bfloat16))
            again: Any = to_torchao(made)
            assert again.per_tensor_scale == theirs.per_tensor_scale
    assert found == {"", "LOSSY"}
