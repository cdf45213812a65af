"""Trainers that hold parts of their own kind push what plain ones would: Megatron's sharded state dicts, and ZeRO-3."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.formats.megatron import gpt_job
from tests.formats.megatron.gpt_job import Degrees
from tests.live.load.test_megatron import MODELS, _states
from tests.live.ranks import Ranks, run
from tests.live.topologies import LLAMA, MOE
from tests.oracles import hub
from tests.oracles.deepspeed_peer.uncompiled import gloo_alone

pytestmark = pytest.mark.peers
RANKS = 4


def _pushed_by_megatron(rank: int, world: int, config: dict[str, Any], degrees: Degrees, folder: str) -> list[str]:
    """Push twice, with a step in between; return what came otherwise than the hub has it."""
    wrong = []
    truth = load_file(Path(folder, hub.WEIGHTS))
    said = json.loads(Path(folder, "config.json").read_text("utf-8"))
    engine = {name: torch.full_like(value, -1) for name, value in truth.items()} if rank == world - 1 else {}
    with gpt_job.models(config, degrees) as models:
        state = _states(models)
        tx.load(state, folder)
        with tx.Refit(state, engine, config=said, dialect="hf") as refit:
            for times in (1, 2):
                report = refit.push()
                assert report.bytes_received == report.bytes_needed
                wrong += [name for name, value in engine.items() if not torch.equal(value, truth[name] * times)]
                for parameter in (each for model in models for each in model.parameters()):
                    parameter.data.mul_(2)
    return wrong


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "degrees"),
    [("dense", Degrees(tp=2, pp=2)), ("tied", Degrees(tp=2, pp=2)), ("mixture", Degrees(pp=2, ep=2))],
    ids=str,
)
def test_an_engine_gets_the_weights_of_the_job(name: str, degrees: Degrees, tmp_path: Path) -> None:
    config, tensors = hub.make(MODELS[name], 0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({key: value.float() for key, value in tensors.items()}, tmp_path / hub.WEIGHTS)
    assert run(RANKS, _pushed_by_megatron, MODELS[name], degrees, str(tmp_path)) == [[]] * RANKS


# DeepSpeed ZeRO-3, of which each rank has ranges of elements.

Tensors = dict[str, torch.Tensor]
STEPS = 3
TIED = LLAMA | {"tie_word_embeddings": True, "vocab_size": 37}


def zero3_engine(config: dict[str, Any], dtype: str) -> Any:
    """Return DeepSpeed's engine around a model from the hub; the same weights on every rank and at every call."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed
    from deepspeed.utils import groups

    gloo_alone()
    groups._WORLD_GROUP = None  # a rank serves several tests, each with process groups of its own
    torch.manual_seed(0)
    model = hub.model(config, torch.float32)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 40, "overlap_comm": False}
    said: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    said["zero_optimization"] = zero
    if dtype == "bf16":
        said["bf16"] = {"enabled": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=said)[0]


def gathered(engine: Any) -> Tensors:
    """Return what DeepSpeed itself gathers."""
    from deepspeed.runtime.zero import GatheredParameters

    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    with GatheredParameters(list(parameters.values())):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _pushed_by_zero3(rank: int, world: int, config: dict[str, Any], dtype: str, folder: str) -> None:
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
        ranks.run(_pushed_by_zero3, config, dtype, str(tmp_path / "saved"))


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
