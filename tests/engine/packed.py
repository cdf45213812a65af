"""Modules of GPTQ and AWQ, packed by the formulas of the programs that write them, and what they stand for.

The formulas are those of GPTQModel 7.7 (`BaseQuantLinear.pack_original`, `convert_gptq_v2_to_v1_format_module`,
`dequantize_weight`) and AutoAWQ 0.2.9 (`WQLinear_GEMM.from_linear`, `dequantize_gemm`), written out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Made(NamedTuple):
    """The tensors of one module, its weight as the program dequantizes it (in F16), and the config's section."""

    tensors: dict[str, torch.Tensor]
    values: torch.Tensor
    section: dict[str, Any]


def pack(codes: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes in words of 32 bits along a dim, the first one lowest, or in an order of their own."""
    per_word = 32 // bits
    grouped = codes.long().unflatten(dim, (-1, per_word)).movedim(dim + 1, -1)
    shifts = torch.arange(per_word) * bits
    words: torch.Tensor = (grouped[..., list(order or range(per_word))] << shifts).sum(-1).to(torch.uint32)
    return words.view(torch.int32)


def gptq(
    rows: int,
    columns: int,
    group: int,
    *,
    bits: int = 4,
    first: bool = True,
    act: bool = False,
    sym: bool = False,
    seed: int = 0,
) -> Made:
    """A module of GPTQ of the first or second format, with random codes, and random zero points or the middle one."""
    draw = torch.Generator().manual_seed(seed)
    groups = columns // group
    codes = torch.randint(0, 1 << bits, (columns, rows), generator=draw)
    zeros = torch.randint(0, 1 << bits, (groups, rows), generator=draw)
    if sym:
        zeros[:] = 1 << (bits - 1)
    scales = torch.rand(groups, rows, generator=draw).half()
    index = torch.arange(columns) // group
    if act:
        index = index[torch.randperm(columns, generator=draw)]
    words = pack(zeros, bits, 1)
    if first:
        words -= {4: 0x11111111, 8: 0x01010101}[bits]
    tensors = {"qweight": pack(codes, bits, 0), "qzeros": words, "scales": scales, "g_idx": index.int()}
    values = (scales[index] * (codes - zeros[index]).half()).T
    section = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act, "sym": sym, "lm_head": False,
        "checkpoint_format": "gptq" if first else "gptq_v2", "pack_dtype": "int32", "damp_percent": 0.05,
        "meta": {"quantizer": ["gptqmodel:7.7.0"]}, "true_sequential": True,
    }  # fmt: skip
    return Made(tensors, values, section)


def awq(rows: int, columns: int, group: int, *, seed: int = 0) -> Made:
    """A module of AWQ (gemm) with random codes and zero points."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (columns, rows), generator=draw)
    zeros = torch.randint(0, 16, (columns // group, rows), generator=draw)
    scales = torch.rand(columns // group, rows, generator=draw).half()
    tensors = {"qweight": pack(codes, 4, 1, AWQ_ORDER), "qzeros": pack(zeros, 4, 1, AWQ_ORDER), "scales": scales}
    of_columns = [numbers.repeat_interleave(group, 0) for numbers in (zeros, scales)]
    values = ((codes - of_columns[0]).half() * of_columns[1]).T
    section = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Made(tensors, values, section)


def nibbles(words: np.ndarray[Any, np.dtype[np.uint32]]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The 4-bit codes of words, the lowest first, in a dim of their own at the end."""
    return words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
