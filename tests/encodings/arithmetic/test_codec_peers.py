"""The same rule in other libraries gives the same bytes; where their rule is another one, what differs and by how much.

torchao 0.18, compressed-tensors 0.20 and transformers 5.24, called as they are, on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.oracles.quiet import quiet
from transaxle.encodings.arithmetic.codec import amax, decode_box, encode_rows
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP4, MXFP8, NVFP4, WHOLE, Encoding, Wide

pytestmark = pytest.mark.peers

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
DTYPES: list[Wide] = ["BF16", "F32"]
each_dtype = pytest.mark.parametrize("wide", DTYPES)
BLOCK = replace(FLOAT8_BLOCK, name="float8_block without powers of two", power_of_two=False)
ROWS = replace(BLOCK, name="float8_block of rows", tile=(1, 128))
CHANNEL = replace(FLOAT8, name="float8 per channel", tile=(1, WHOLE))


def name(encoding: Encoding) -> str:
    return encoding.name


def weights(shape: tuple[int, int], seed: int = 0, spread: float = 0.0) -> torch.Tensor:
    """bfloat16 numbers of a layer's size; with `spread`, rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp2(torch.randint(-60, 60, (shape[0], 1), generator=generator) * spread)
    return (torch.randn(shape, generator=generator) * 0.02 * rows).to(torch.bfloat16)


def ours(tensor: torch.Tensor) -> NDArray[Any]:
    """The same memory as numpy knows it."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def octets(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.contiguous().view(torch.uint8).numpy()


def same(made: NDArray[Any], theirs: torch.Tensor) -> bool:
    """Equal bit for bit; a NaN equals any NaN."""
    wide, other = made.astype(np.float64), theirs.double().numpy()
    signs = np.signbit(wide) == np.signbit(other)
    return np.array_equal(wide, other, equal_nan=True) and bool(signs[~np.isnan(wide)].all())


def typed(codes: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(codes.copy()).view(dtype)


class TestTransformers:
    """`integrations/finegrained_fp8.py` and `integrations/mxfp4.py`."""

    @pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
    def test_float8_block_is_quantized_alike(self, scale_fmt: str | None) -> None:
        """Its plain rule is ours without power-of-two scales, its `ue8m0` is ours with them.

        `448 / amax` is torch's product with the reciprocal, which rounds twice: a scale may be an ulp off. Wherever
        the scales are equal, so are all codes.
        """
        with quiet():
            from transformers.integrations.finegrained_fp8 import Fp8Quantize

            config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=scale_fmt)
            peer = Fp8Quantize(SimpleNamespace(quantization_config=config))
            for seed in range(4):
                x = weights((256, 384), seed, spread=seed / 4)
                made = peer.convert({"x.weight": x})
                codes, scale = encode_rows(BLOCK if scale_fmt is None else FLOAT8_BLOCK, ours(x))
                other = made["x.weight_scale_inv"].float().numpy()
                np.testing.assert_array_max_ulp(scale, other, 2 if scale_fmt is None else 0)
                alike = (scale == other).repeat(128, axis=0).repeat(128, axis=1)
                assert alike.mean() > 0.3
                assert (codes == octets(made["x.weight"]))[alike].all()

    @each_dtype
    @pytest.mark.parametrize("encoding", [BLOCK, FLOAT8_BLOCK, MXFP8, MXFP4], ids=name)
    def test_dequantizes_alike(self, encoding: Encoding, wide: Wide) -> None:
        with quiet():
            from transformers.integrations.finegrained_fp8 import Fp8Dequantize

            x = weights((256, 256), 3, spread=0.2)
            codes, scale = encode_rows(encoding, ours(x))
            packed = typed(codes, torch.int8 if encoding is MXFP4 else torch.float8_e4m3fn)
            made = Fp8Dequantize(None)._dequantize_one(packed, torch.from_numpy(scale), TORCH[wide])
            assert same(decode_box(encoding, codes, scale, dtype=wide), made)

    def test_gpt_oss_is_dequantized_alike(self) -> None:
        """Every byte under every scale but NaN, of which its `ldexp` makes infinities."""
        with quiet():
            from transformers.integrations.mxfp4 import convert_moe_packed_tensors

            codes = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (255, 1))
            scale = np.arange(255, dtype=np.uint8).repeat(16)
            made = convert_moe_packed_tensors(torch.from_numpy(codes[None, None]), torch.from_numpy(scale[None, None]))
            assert same(decode_box(MXFP4, codes, scale[:, None]).ravel(), made.ravel())


class TestTorchao:
    """`prototype/mx_formats`, `prototype/blockwise_fp8_training` and `quantization/quant_primitives.py`."""

    @each_dtype
    @pytest.mark.parametrize("encoding", [MXFP8, MXFP4], ids=name)
    def test_mx_is_quantized_alike(self, encoding: Encoding, wide: Wide) -> None:
        """Its RCEIL mode is our rule; FLOOR, its default, saturates the top of a block and is another one."""
        with quiet():
            from torchao.prototype.mx_formats.config import ScaleCalculationMode
            from torchao.prototype.mx_formats.mx_tensor import to_mx

            element = torch.float8_e4m3fn if encoding is MXFP8 else torch.float4_e2m1fn_x2
            for seed in range(4):
                x = weights((64, 512), seed, spread=seed / 2).to(TORCH[wide])
                x[0, :32], x[1, :32], x[2, 5] = 0, 448, torch.inf
                scale, data = to_mx(x, element, 32, ScaleCalculationMode.RCEIL)
                codes, stored = encode_rows(encoding, ours(x))
                assert (stored == octets(scale)).all()
                assert (codes == octets(data)).all()

    @each_dtype
    def test_every_mxfp8_product_is_decoded_alike(self, wide: Wide) -> None:
        with quiet():
            from torchao.prototype.mx_formats.mx_tensor import to_dtype

            codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1)).reshape(256 * 8, 32)
            scale = np.arange(256, dtype=np.uint8).repeat(8)[:, None]
            buffers = typed(codes, torch.float8_e4m3fn), typed(scale, torch.float8_e8m0fnu)
            made = to_dtype(*buffers, torch.float8_e4m3fn, 32, TORCH[wide])
            assert same(decode_box(MXFP8, codes, scale, dtype=wide), made)

    @pytest.mark.parametrize("encoding", [BLOCK, ROWS], ids=name)
    def test_float8_block_is_quantized_alike(self, encoding: Encoding) -> None:
        with quiet():
            from torchao.prototype.blockwise_fp8_training import kernels

            x = weights((256, 384), 5, spread=0.1)
            if encoding is ROWS:
                data, inverse = kernels.torch_blockwise_scale_act_quant_lhs(x)
            else:
                data, inverse = kernels.torch_blockwise_scale_weight_quant(x)
            codes, scale = encode_rows(encoding, ours(x))
            assert (codes == octets(data)).all()
            assert same(scale, inverse)

    @each_dtype
    def test_nvfp4(self, wide: Wide) -> None:
        """Decoding is the same. Encoding is not: it divides in another order, and keeps block scales above 2**-6."""
        with quiet():
            from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

            x = weights((64, 512), 11).to(TORCH[wide])
            factor = per_tensor_amax_to_scale(x.abs().amax())
            peer = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=factor)
            packed, scale = octets(peer.qdata), octets(peer.scale)
            made = peer.dequantize(TORCH[wide])
            assert same(decode_box(NVFP4, packed, scale, factor=float(factor), dtype=wide), made)
            codes, stored = encode_rows(NVFP4, ours(x), amax=float(amax(ours(x))))
            assert (stored == scale).mean() > 0.999
            assert (codes == packed).mean() > 0.998


class TestCompressedTensors:
    """`quantization/lifecycle/forward.py`, as its compressors call it."""

    def dequantized(self, args: dict[str, Any], codes: torch.Tensor, scale: torch.Tensor, **more: Any) -> torch.Tensor:
        from compressed_tensors.quantization import QuantizationArgs
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        said = QuantizationArgs(type="float", symmetric=True, **args)
        found: torch.Tensor = dequantize(codes, scale, args=said, **more)
        return found

    @each_dtype
    @pytest.mark.parametrize(
        ("encoding", "args"),
        [
            (FLOAT8, {"num_bits": 8, "strategy": "tensor"}),
            (CHANNEL, {"num_bits": 8, "strategy": "channel"}),
            (FLOAT8_BLOCK, {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}),
        ],
        ids=["tensor", "channel", "block"],
    )
    def test_float8_is_decoded_alike(self, encoding: Encoding, args: dict[str, Any], wide: Wide) -> None:
        """Its scales have the model's type, and the product is made in that."""
        codes, scale = encode_rows(encoding, ours(weights((256, 384), 2, spread=0.1)))
        with quiet():
            narrow = torch.from_numpy(scale).to(TORCH[wide])
            made = self.dequantized(args, typed(codes, torch.float8_e4m3fn), narrow)
        assert same(decode_box(replace(encoding, scale=wide), codes, ours(narrow), dtype=wide), made)

    def test_nvfp4_is_decoded_alike(self) -> None:
        """It divides each scale by the global one: as ours, with the inverse of that as the factor, in double."""
        args = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
        with quiet():
            from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
            from compressed_tensors.quantization.utils import generate_gparam

            for seed in range(6):
                x = weights((64, 512), seed, spread=seed / 40)
                whole = generate_gparam(x.float().min(), x.float().max())
                codes, scale = encode_rows(NVFP4, ours(x), amax=float(amax(ours(x))))
                unpacked = unpack_fp4_from_uint8(torch.from_numpy(codes), 64, 512)
                narrow = typed(scale, torch.float8_e4m3fn).to(torch.bfloat16)
                made = self.dequantized(args, unpacked, narrow, global_scale=whole, dtype=torch.bfloat16)
                assert same(decode_box(NVFP4, codes, scale, factor=1 / float(whole)), made)

    def test_mxfp8_is_decoded_alike_and_scaled_nearly_so(self) -> None:
        """Its scales are ours, but twice as large where an amax is 448 times a power of two exactly."""
        args = {"num_bits": 8, "strategy": "group", "group_size": 32}
        with quiet():
            from compressed_tensors.compressors.mx_utils import decompress_mx_scale
            from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

            x = weights((64, 512), 4, spread=0.2)
            codes, scale = encode_rows(MXFP8, ours(x))
            powers = decompress_mx_scale(torch.from_numpy(scale))
            made = self.dequantized(args, typed(codes, torch.float8_e4m3fn).to(torch.bfloat16), powers)
            assert same(decode_box(MXFP8, codes, scale), made)
            most = x.reshape(64, 16, 32).abs().amax(-1).float()
            above = generate_mx_scales(most, num_bits=8).numpy().astype(int) - scale
            assert above.tolist() == (np.frexp(most.numpy())[0] == 448 / 512).astype(int).tolist()
            assert 0 < above.mean() < 0.1
