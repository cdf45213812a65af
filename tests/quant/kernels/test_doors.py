"""The door to the kernels on a CPU: what it returns, where it writes, what it refuses, and that triton stays away."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.quant.kernels.cases import CASES, ordinary
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP4, MXFP8, NVFP4
from transaxle.errors import TransaxleError
from transaxle.quant import kernels
from transaxle.quant.kernels import Components

E4M3, E8M0, F32, U8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32, torch.uint8


def test_the_buffers_of_each_format() -> None:
    """Shapes and dtypes of the tables in TransformerEngine, compact, for a matrix whose last tiles are cut short."""
    x = ordinary((300, 200), torch.bfloat16)
    expected: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
        "float8": {"data": (E4M3, (300, 200)), "scale_inv": (F32, (1,))},
        "float8, E5M2": {"data": (torch.float8_e5m2, (300, 200)), "scale_inv": (F32, (1,))},
        "float8_block": {"data": (E4M3, (300, 200)), "scale_inv": (F32, (3, 2))},
        "float8_block, 1x128": {"data": (E4M3, (300, 200)), "scale_inv": (F32, (300, 2))},
        "mxfp8": {"data": (E4M3, (300, 200)), "scale_inv": (E8M0, (300, 7))},
        "mxfp4": {"data": (U8, (300, 100)), "scale_inv": (E8M0, (300, 7))},
        "nvfp4": {"data": (U8, (300, 100)), "scale_inv": (E4M3, (300, 13)), "amax": (F32, (1,))},
        "nvfp4, 16x16": {"data": (U8, (300, 100)), "scale_inv": (E4M3, (300, 13)), "amax": (F32, (1,))},
    }
    for name, buffers in expected.items():
        made = kernels.quantize(x, CASES[name].encoding, over=CASES[name].over).present()
        assert {key: (buffer.dtype, tuple(buffer.shape)) for key, buffer in made.items()} == buffers
    both = kernels.quantize(x, MXFP8, columnwise=True).present()
    assert list(both) == ["data", "scale_inv", "columnwise_data", "columnwise_scale_inv"]
    assert both["columnwise_scale_inv"].shape == (10, 200)


def test_a_parameter_is_read_without_its_graph() -> None:
    weight = torch.nn.Parameter(ordinary((8, 32), torch.float32))
    made = kernels.quantize(weight, MXFP8)
    assert not any(buffer.requires_grad for buffer in made.present().values())
    assert kernels.amax(weight).item() == weight.abs().max().item()


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def _ends(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def _swapped(**buffers: Any) -> Components:
    return Components(**(kernels.quantize(_x(4, 64), MXFP8).present() | buffers))


REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "integers": ("DTYPE_MISMATCH", lambda: kernels.quantize(_x(4, 4, dtype=torch.int32), MXFP8)),
    "double": ("DTYPE_MISMATCH", lambda: kernels.amax(_x(4, 4, dtype=torch.float64))),
    "a vector": ("SHAPE_MISMATCH", lambda: kernels.quantize(_x(64), MXFP8)),
    "a stack": ("SHAPE_MISMATCH", lambda: kernels.quantize(_x(2, 4, 64), MXFP8)),
    "no place": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64).to("meta"), MXFP8)),
    "odd rows of nibbles": ("SHAPE_MISMATCH", lambda: kernels.quantize(_x(4, 63), NVFP4)),
    "columns of float8": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64), FLOAT8, columnwise=True)),
    "columns of mxfp4": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64), MXFP4, columnwise=True)),
    "nothing": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64), MXFP8, rowwise=False)),
    "an amax for tiles": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64), FLOAT8_BLOCK, amax=1.0)),
    "a scale for tiles": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64), NVFP4, scale=1.0)),
    "amax and scale": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64), FLOAT8, amax=1.0, scale=1.0)),
    "two amaxes": ("SHAPE_MISMATCH", lambda: kernels.quantize(_x(4, 64), FLOAT8, amax=torch.ones(2))),
    "a double amax": ("SHAPE_MISMATCH", lambda: kernels.quantize(_x(4, 64), FLOAT8, amax=torch.ones(1).double())),
    "tiles of 48": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), replace(MXFP8, tile=(1, 48)))),
    "tiles of 256": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), replace(FLOAT8_BLOCK, tile=(256, 256)))),
    "one level of E4M3": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), replace(NVFP4, has_global=False))),
    "scales of bfloat16": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), replace(FLOAT8, scale="BF16"))),
    "a scale per row": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), replace(FLOAT8, tile=(1, 0)))),
    "part of a tile": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), NVFP4, over=(16, 8))),
    "an amax over 16 x 32, both ways": ("UNSUPPORTED",
        lambda: kernels.quantize(_x(32, 96), NVFP4, columnwise=True, over=(16, 32))),
    "an amax over three rows": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), NVFP4, over=(3, 16))),
    "over the tensor": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), FLOAT8, over=(16, 16))),
    "offsets of int64": ("SHAPE_MISMATCH", lambda: kernels.quantize_groups(_x(4, 64), torch.tensor([4]), MXFP8)),
    "groups that go back": ("SHAPE_MISMATCH", lambda: kernels.quantize_groups(_x(4, 64), _ends(3, 2), FLOAT8)),
    "groups beyond the end": ("SHAPE_MISMATCH", lambda: kernels.quantize_groups(_x(4, 64), _ends(3, 5), MXFP8)),
    "rows with a scale for each tile": ("UNSUPPORTED", lambda: kernels.quantize_rows(_x(4, 64), _ends(3, 4), MXFP8)),
    "swizzled scales of blocks": ("UNSUPPORTED",
        lambda: kernels.quantize_groups(_x(4, 64), _ends(3, 4), FLOAT8_BLOCK, swizzled=True)),
    "swizzled, both ways": ("UNSUPPORTED",
        lambda: kernels.quantize_groups(_x(4, 64), _ends(3, 4), MXFP8, swizzled=True, columnwise=True)),
    "swizzled, with gaps": ("UNSUPPORTED", lambda: kernels.quantize_groups(_x(4, 64), _ends(3, 4), MXFP8,
        swizzled=True, out=Components(_x(4, 64).to(E4M3), torch.zeros((256, 8), dtype=U8)[:, :4].view(E8M0)))),
    "out for other groups": ("SHAPE_MISMATCH",
        lambda: kernels.quantize_groups(_x(4, 64), _ends(3, 4), FLOAT8, out=kernels.quantize(_x(4, 64), FLOAT8))),
    "out too small": ("SHAPE_MISMATCH", lambda: kernels.quantize(_x(8, 64), MXFP8, out=_swapped())),
    "out of bytes": ("DTYPE_MISMATCH", lambda: kernels.quantize(_x(4, 64), MXFP8, out=_swapped(data=_x(4, 64)))),
    "no codes": ("MISSING_TENSOR", lambda: kernels.dequantize(Components(), MXFP8, torch.float32)),
    "no scales": ("MISSING_TENSOR", lambda: kernels.dequantize(_swapped(scale_inv=None), MXFP8, torch.float32)),
    "no amax": ("MISSING_TENSOR",
        lambda: kernels.dequantize(replace(kernels.quantize(_x(4, 64), NVFP4), amax=None), NVFP4, torch.float32)),
    "e5m2 as e4m3": ("DTYPE_MISMATCH",
        lambda: kernels.dequantize(_swapped(data=_x(4, 64).to(torch.float8_e5m2)), MXFP8, torch.float32)),
    "scales of another matrix": ("SHAPE_MISMATCH",
        lambda: kernels.dequantize(_swapped(scale_inv=torch.ones(4, 3).to(E8M0)), MXFP8, torch.float32)),
    "columns apart": ("UNSUPPORTED",
        lambda: kernels.dequantize(_swapped(data=_x(64, 4).to(E4M3).t()), MXFP8, torch.float32)),
    "to integers": ("DTYPE_MISMATCH", lambda: kernels.dequantize(_swapped(), MXFP8, torch.int32)),
    "out of another dtype": ("SHAPE_MISMATCH",
        lambda: kernels.dequantize(_swapped(), MXFP8, torch.float32, out=_x(4, 64, dtype=torch.float16))),
    "out with columns apart": ("UNSUPPORTED",
        lambda: kernels.dequantize(_swapped(), MXFP8, torch.float32, out=_x(64, 4).t())),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    code, call = REFUSED[why]
    with pytest.raises(TransaxleError) as refused:
        call()
    assert refused.value.code == code


def test_all_that_is_wrong_with_buffers_is_said_at_once() -> None:
    wrong = _swapped(data=_x(4, 64), scale_inv=None)
    with pytest.raises(TransaxleError) as refused:
        kernels.quantize(_x(4, 64), MXFP8, out=wrong)
    assert sorted(refusal.code for refusal in refused.value.refusals) == ["DTYPE_MISMATCH", "MISSING_TENSOR"]


def test_the_cpu_needs_no_triton() -> None:
    script = """
        import sys

        sys.modules["triton"] = None  # importing it is an ImportError, and looking for it finds nothing
        import torch
        from transaxle.encodings.encoding import MXFP8
        from transaxle.quant import kernels

        made = kernels.quantize(torch.full((2, 64), 3.0), MXFP8, columnwise=True)
        assert kernels.dequantize(made, MXFP8, torch.float32).eq(3).all()
        assert sys.modules["triton"] is None
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
