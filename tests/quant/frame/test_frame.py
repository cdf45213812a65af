"""Frames of ranks that FSDP2 leaves without rows: they know the whole matrix, and take part in what all ranks do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.live.ranks import run
from tests.quant.kinds import MORE, raw, same, values
from transaxle.quant import MasterWeights, QuantizedTensor, quantize_

ROWS = 4
"""Over three ranks: two, two and none."""


def _train(rank: int, world: int, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, ROWS, bias=False).bfloat16()
    quantize_(model, MORE[kind])
    whole = model.weight.detach().clone()
    x = values(4, 64)
    wanted = model(x)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = MasterWeights(model.parameters(), partial(torch.optim.SGD, lr=1e-3))
    for step in range(2):
        parameter: torch.Tensor = model.weight
        assert isinstance(parameter, DTensor)
        shard = parameter.to_local()
        assert isinstance(shard, QuantizedTensor)
        if step and not shard.state:
            whole = shard.quantizer.quantize(optimizer.masters[0].full_tensor().detach().bfloat16())  # type: ignore[attr-defined]
            wanted = x @ whole.dequantize().t()
        if not (step and shard.state):
            part = whole[min(2 * rank, ROWS) : 2 * rank + 2]
            assert isinstance(part, QuantizedTensor)
            assert same(shard, part)
            assert torch.equal(model(x), wanted)
        entries = {name: entry for name, entry in model.state_dict().items() if isinstance(entry, DTensor)}
        assert all(entry.shape[0] == ROWS for entry in entries.values() if entry.placements[0].is_shard())
        assert isinstance(whole, QuantizedTensor)
        for name, buffer in whole.frame.shared.items():
            if not shard.state:
                assert torch.equal(raw(entries[f"weight_{name}"].to_local().detach()), raw(buffer))
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", MORE)
def test_a_rank_without_rows_takes_part(kind: str) -> None:
    run(3, _train, kind)
