"""Promise: encoding and decoding keep up with disks: GB of bfloat16 a second, on one core.

Each encoding in both directions, in one run: compiled, in numpy, and in plain torch eager as the peers write it
(torchao for mx and nvfp4, the elementwise recipe of transformers for float8). Seconds are of the processor, the least
of the rounds; results are bytes of the bfloat16 side by second.

    python benchmarks/encodings.py [--megabytes 32] [--rounds 5]
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
from promises import Promises

from transaxle.encodings.arithmetic.codec import Path, active, amax, decode_box, encode_rows
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP4, MXFP8, NVFP4, Encoding

COLUMNS = 4096
PROMISED = {"float8_block": (2.0, 3.0), "mxfp8": (1.5, 3.0), "nvfp4": (0.3, 0.0)}
"""GB/s to encode and to decode."""

Work = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """An encoding, and the same computation in torch eager."""

    encoding: Encoding
    eager_encode: Work
    eager_decode: Work
    square: bool = False
    """Sixteen rows share the scales of nvfp4, as in weights."""

    @property
    def label(self) -> str:
        """Name in the table."""
        return f"{self.encoding.name}{' 16x16' if self.square else ''}"


def rate(nbytes: int, rounds: int, work: Work) -> float:
    """Return GB per second of processor time."""
    least = float("inf")
    for _ in range(rounds):
        begin = time.process_time()
        work()
        least = min(least, time.process_time() - begin)
    return nbytes / least / 1e9


def float8_encode(x: torch.Tensor, tile: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize as `Fp8Quantize` of transformers and TransformerEngine's reference do, an operation at a time."""
    rows, columns = x.shape
    blocks = x.float().reshape(rows // tile[0], tile[0], columns // tile[1], tile[1])
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = 448.0 / torch.where(largest > 0, largest, 448.0)
    codes = (blocks * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.reshape(rows, columns), (1 / scale)[:, 0, :, 0]


def float8_decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantize as `Fp8Dequantize` of transformers does."""
    rows, columns = codes.shape
    down, along = scale.shape
    blocks = codes.float().reshape(down, rows // down, along, columns // along)
    return (blocks * scale[:, None, :, None]).to(torch.bfloat16).reshape(rows, columns)


def cases(x: torch.Tensor) -> list[Case]:
    """Return all encodings with their torch eager versions."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    all_cases = []
    shape = (x.shape[0], x.shape[1])
    for encoding, tile in ((FLOAT8, shape), (FLOAT8_BLOCK, (128, 128))):
        encode = partial(float8_encode, x, tile)
        all_cases.append(Case(encoding, encode, partial(float8_decode, *encode())))
    for encoding, element in ((MXFP8, torch.float8_e4m3fn), (MXFP4, torch.float4_e2m1fn_x2)):
        encode = partial(to_mx, x, element, 32, ScaleCalculationMode.RCEIL)
        scale, codes = encode()
        all_cases.append(Case(encoding, encode, partial(to_dtype, codes, scale, element, 32, torch.bfloat16)))
    encode = partial(NVFP4Tensor.to_nvfp4, x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax()))
    decode = partial(encode().dequantize, torch.bfloat16)
    return [*all_cases, Case(NVFP4, encode, decode), Case(NVFP4, encode, decode, square=True)]


def ours(case: Case, values: np.ndarray[Any, Any], path: Path) -> tuple[Work, Work]:
    """Return our encode and decode for a case, with preallocated outputs."""
    largest = float(amax(values)) if case.encoding.has_global else None
    over = (16, 16) if case.square else None
    codes, scale = encode_rows(case.encoding, values, amax=largest, over=over)
    factor = 1.0 if largest is None else largest / 2688
    encode = partial(encode_rows, case.encoding, values, amax=largest, over=over, codes_out=codes, path=path)
    out = np.empty_like(values)
    return encode, partial(decode_box, case.encoding, codes, scale, factor=factor, out=out, path=path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = max(128, options.megabytes * 1_000_000 // (2 * COLUMNS) // 128 * 128)
    x = (torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    values = x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    print(f"{values.nbytes / 1e6:.0f} MB of bfloat16, one core, GB/s; our fastest path here: {active()}")
    print(f"{'':14}{'':8}{'compiled':>10}{'numpy':>8}{'torch eager':>13}{'ratio':>8}")
    promises = Promises()
    for case in cases(x):
        eager = (case.eager_encode, case.eager_decode)
        promised = PROMISED.get(case.encoding.name, (0.0, 0.0))
        for way, eager_work, least in zip(("encode", "decode"), eager, promised, strict=True):
            direction = 0 if way == "encode" else 1
            fast = rate(values.nbytes, options.rounds, ours(case, values, active())[direction])
            slow = rate(values.nbytes, 1, ours(case, values, "numpy")[direction])
            eager_rate = rate(values.nbytes, 2, eager_work)
            compiled = fast if active() == "compiled" else float("nan")
            print(f"{case.label:14}{way:8}{compiled:10.2f}{slow:8.2f}{eager_rate:13.2f}{fast / eager_rate:7.1f}x")
            if least:
                promises.at_least(f"{case.label}, {way}, one core", fast, least, "GB/s")
    return promises.exit_code


if __name__ == "__main__":
    sys.exit(main())
