"""A trainer under DeepSpeed ZeRO-3, of which each rank has ranges of elements, pushes what a plain trainer would."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import transaxle as tx
from tests.live.ranks import Ranks
from tests.live.topologies import LLAMA, MOE
from tests.oracles import hub
from tests.refit.zero3_trainer import Tensors, gathered, zero3_engine

pytestmark = pytest.mark.peers
STEPS = 3
TIED = LLAMA | {"tie_word_embeddings": True, "vocab_size": 37}


def _pushed(rank: int, world: int, config: dict[str, Any], dtype: str, folder: str) -> None:
    engine = zero3_engine(config, dtype)
    torch_type = torch.bfloat16 if dtype == "bf16" else torch.float32
    target: Any = hub.model(config, torch_type) if rank == world - 1 else {}
    before: Tensors = {}
    with tx.Refit(engine.module, target) as refit:
        for step in range(STEPS):
            tokens = torch.arange(12).reshape(2, 6) * (rank + step + 2) % config["vocab_size"]
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
            truth = gathered(engine)
            report = refit.push()
            assert report.bytes_received == report.bytes_needed
            if rank == world - 1:
                held = dict(target.named_parameters(remove_duplicate=False))
                assert held.keys() == truth.keys()
                assert all(torch.equal(held[name], tensor) for name, tensor in truth.items())
                assert any(not torch.equal(truth[name], tensor) for name, tensor in before.items()) or not step
                assert 0 < report.bytes_received < sum(tensor.nbytes for tensor in target.parameters())
            before = truth
    if rank == 0:
        plain = hub.model(config, torch_type)
        plain.load_state_dict(before)
        tx.save(plain.state_dict(), folder, to="hf", config=config, group=dist.new_group([0]))
    else:
        dist.new_group([0])
    dist.barrier()
    found = {name: tensor for bucket in tx.refit.named_tensors(engine.module, bucket=20_000) for name, tensor in bucket}
    saved = load_file(Path(folder, "model.safetensors"))
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("config", "dtype", "world"),
    [(LLAMA, "fp32", 2), (MOE, "bf16", 3), (TIED, "bf16", 3)],
    ids=["llama", "mixture", "tied"],
)
def test_received_tensors_are_what_deepspeed_gathers(
    config: dict[str, Any], dtype: str, world: int, tmp_path: Path
) -> None:
    """Ranges that begin and end within rows, and small parameters that DeepSpeed keeps whole on every rank."""
    with Ranks(world) as ranks:  # DeepSpeed remembers the process group
        ranks.run(_pushed, config, dtype, str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({"status": SimpleNamespace(name="NOT_AVAILABLE")}, "has moved the parameter to a disk"),
        (
            {"status": SimpleNamespace(name="AVAILABLE"), "ds_quant_scale": torch.ones(1)},
            "stores the parameter quantized",
        ),
    ],
)
def test_ranges_that_cannot_be_read_are_refused(marks: dict[str, Any], said: str) -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    own: Any = torch.zeros(6)
    for name, value in marks.items():
        setattr(own, name, value)
    parameter: Any = model.weight
    parameter.ds_id, parameter.ds_tensor = 0, own  # as DeepSpeed does
    with pytest.raises(tx.TransaxleError, match=said):
        list(tx.refit.named_tensors(model, to="identity"))
    with pytest.raises(tx.TransaxleError, match="moved the parameter's values out of the module"):
        tx.save(model, "nowhere", to="hf:identity")
