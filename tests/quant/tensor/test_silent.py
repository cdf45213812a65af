"""Four failures that raise nothing in TransformerEngine, on the same inputs: here they are right, or raise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard

from tests.live.ranks import run
from tests.quant.kinds import raw, same, values
from tests.quant.training import built, bytes_of, equal, mesh_of
from transaxle.errors import TransaxleError
from transaxle.quant import MXFP8, NVFP4, Float8CurrentScaling, QuantizedTensor


def _save(rank: int, world: int, folder: Path) -> dict[str, torch.Tensor]:
    model = built("mxfp8", mesh_of(world))
    save(model.state_dict(), checkpoint_id=folder)
    return bytes_of(model)


def _load(rank: int, world: int, folder: Path, kept: dict[str, torch.Tensor]) -> None:
    model = built("mxfp8", mesh_of(world), seed=1)
    state = model.state_dict()
    for entry in state.values():
        raw(entry.to_local()).fill_(0x55)
    load(state, checkpoint_id=folder)
    assert equal(bytes_of(model), kept)


def test_a_resharded_load_reaches_the_parameters(tmp_path: Path) -> None:
    """There `view(-1)` and `narrow` of an MXFP8 shard were values of their own, and DCP copied into those."""
    kept = run(2, _save, tmp_path)[0]
    run(3, _load, tmp_path, kept)
    made = MXFP8().quantize(values(7, 64))
    other = MXFP8().quantize(values(7, 64, seed=1))
    flat, part = made.view(-1), other.narrow(0, 2, 3)
    made[2:5].copy_(part)
    assert isinstance(flat, QuantizedTensor)
    assert torch.equal(flat.dequantize().view(7, 64)[2:5], other.dequantize()[2:5])
    assert torch.equal(made.dequantize()[:2], MXFP8().quantize(values(7, 64)).dequantize()[:2])


def test_codes_of_another_kind_are_not_copied_as_bytes() -> None:
    """There E4M3 bytes became E5M2 codes."""
    first, second = (Float8CurrentScaling(code=code).quantize(values(8, 32)) for code in ("F8_E4M3", "F8_E5M2"))
    kept = second.clone()
    with pytest.raises(TransaxleError, match="F8_E5M2"):
        second.copy_(first)
    assert same(second, kept)  # type: ignore[arg-type]
    second.copy_(first.dequantize())
    assert torch.equal(second.dequantize(), Float8CurrentScaling("F8_E5M2").quantize(first.dequantize()).dequantize())


def test_no_columnwise_codes_are_left_stale() -> None:
    """There a copy from a row-wise tensor left the old column-wise buffer, which the backward pass then used.

    Here those of square blocks follow from the rowwise ones, and others are cleared.
    """
    target = NVFP4(square=True).quantize(values(32, 64))
    source = NVFP4(square=True).quantize(values(32, 64, seed=1))
    target.copy_(source)
    assert same(target, source)
    x, grad = values(4, 64).requires_grad_(), values(4, 32, seed=2)
    torch.nn.functional.linear(x, target).backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad, grad @ source.dequantize())
    for both, one in ((MXFP8(columnwise=True), MXFP8()), (NVFP4(columnwise=True), NVFP4())):
        target, source = both.quantize(values(32, 64)), one.quantize(values(32, 64, seed=1))
        target.copy_(source)
        assert target.components.keys() == source.components.keys()
        assert same(target, source)


def test_no_nvfp4_columnwise_codes_are_left_stale() -> None:
    """The same inputs as there: `a` with both usages, `b` with rowwise codes, `a.copy_(b)`."""
    a, b = (values(48, 64, seed=seed) for seed in (0, 1))
    for source_rule in (NVFP4(square=True), NVFP4(), NVFP4(square=True, columnwise=True)):
        for rule in (NVFP4(square=True, columnwise=True), NVFP4(columnwise=True)):
            target, source = rule.quantize(a), source_rule.quantize(b)
            old = target.dequantize(columnwise=True)
            target.copy_(source)
            assert torch.equal(target.dequantize(), source.dequantize())
            if source_rule.square:
                found = target.dequantize(columnwise=True)
                assert torch.equal(found, source.dequantize())
                assert not torch.equal(found, old)
                expected = replace(rule, square=True).quantize(b)  # as if the values had been quantized both ways
                assert same(target, expected)
                grad = values(4, 48, seed=2)
                assert torch.equal(grad @ target.transposed().dequantize().t(), grad @ source.dequantize())
            else:
                assert not [name for name in target.components if name.startswith("columnwise")]
                with pytest.raises(TransaxleError, match="no columnwise codes"):
                    target.dequantize(columnwise=True)


def _gather(rank: int, world: int) -> None:
    x = torch.full((10, 32), 0.01).bfloat16()
    x[9] = torch.linspace(100, 400, 32)  # of the last rank
    rows = x.chunk(world)[rank]
    for quantizer in (Float8CurrentScaling(), NVFP4(), NVFP4(square=True)):
        made = quantizer.quantize(rows, group=torch.distributed.group.WORLD)
        whole = DTensor.from_local(
            made.dequantize(), mesh_of(world), [Shard(0)], run_check=False, shape=x.shape, stride=x.stride()
        )
        assert torch.equal(whole.full_tensor(), quantizer.quantize(x).dequantize())
        # As there: each rank by its own amax, all read under that of rank 0.
        own = [quantizer.quantize(part) for part in x.chunk(world)]
        if rank == 0 and not quantizer.encoding.has_global:
            codes = torch.cat([one.components["data"].float() for one in own])
            wrong = codes * own[0].components["scale_inv"]
            assert (wrong - x.float()).abs().max() > 300
        with pytest.raises(TransaxleError, match="different global scales") as refused:
            torch.cat(own)  # type: ignore[arg-type]
        assert refused.value.code == "UNEQUAL_COPIES"


def test_shards_are_not_gathered_under_the_amax_of_one_rank() -> None:
    run(2, _gather)
