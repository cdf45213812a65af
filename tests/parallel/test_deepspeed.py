"""DeepSpeed and a model that we cut: its engine trains, saves and resumes it, and each resumes the other's checkpoints.

`tests.formats.deepspeed.zero.test_truth` compares what its engine saved of models that we cut with what it then held.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Set
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.formats.deepspeed.universal.test_resume import check
from tests.live.ranks import run
from tests.oracles.deepspeed_peer.case import BY_NAME, CASES
from tests.oracles.deepspeed_peer.farm import Farm, facts
from tests.oracles.deepspeed_peer.models import build as as_there
from tests.oracles.deepspeed_peer.resumes import CARRIED, CUT_BY_US, OWN, Resume
from tests.parallel.models import CONFIGS, build
from transaxle.errors import TransaxleError
from transaxle.formats.deepspeed.keys import INFO, RECORD
from transaxle.formats.deepspeed.universal_record import read as read_record
from transaxle.parallel.cutting import cut_parameters
from transaxle.parallel.tensor_parallel import tensor_parallel
from transaxle.parallel.tp_plan import make_plan, read
from transaxle.parallel.universal_metadata import collected, record_of, universal_checkpoint_info

pytestmark = [pytest.mark.peers, pytest.mark.slow]
OURS = [case.name for case in CASES if case.ours]
ALWAYS = {
    Resume("ours-tp2-dp2-z3", "ours-tp2-dp2-z3", OWN), Resume("ours-tp4-uneven", "ours-tp2-uneven"),
    Resume("ours-tp4", "tp2-wide"), Resume("tp4", "ours-tp2", CARRIED),
}  # fmt: skip
"""Resumes that every run makes: with ZeRO-3, of uneven cuts, of what AutoTP cut, and through `tx.load`."""


def _by_turns(cases: Iterable[Hashable], always: Set[Hashable]) -> list[Any]:
    """Mark the cases that are part of a sweep."""
    return [pytest.param(case, marks=[pytest.mark.oracle] * (case not in always)) for case in cases]


@pytest.mark.parametrize("name", _by_turns(OURS, {"ours-tp2", "ours-tp2-dp2-z3"}))
def test_the_engine_saves_the_metadata(farm: Farm, name: str) -> None:
    """In model and optimizer files, as it follows from the plan alone; DeepSpeed's ZeRO-3 writes it into the former."""
    case = BY_NAME[name]
    model = as_there(case)
    tied = {"lm_head.weight"} if case.tied else set[str]()
    ranks, cuts = case.launch.tp, make_plan(model, read(model), case.launch.tp, None).cuts
    info = collected(
        {cut.weight.name: record_of(cut, cut.shares, ranks) for cut in cuts if cut.weight.name not in tied}, ranks
    )
    models = list(farm.checkpoint(name).glob("*/*model_states.pt"))
    optimizers = list(farm.checkpoint(name).glob("*/*optim_states.pt"))
    assert (len(models), len(optimizers)) == (case.launch.world if case.zero == 3 else ranks, case.launch.world)
    assert all(torch.load(file, weights_only=False)[INFO] == info for file in models)
    for file in optimizers if case.zero < 3 else ():
        assert torch.load(file, weights_only=False)["optimizer_state_dict"][INFO] == info, file.name


@pytest.mark.parametrize("resume", _by_turns(CUT_BY_US, ALWAYS), ids=str)
def test_resumed_bit_for_bit(farm: Farm, resume: Resume) -> None:
    """Masters, moments and steps are those that were saved, and the next loss and update those of the same state."""
    check(farm, resume)


def test_the_next_loss_is_the_same_at_any_degree(farm: Farm) -> None:
    same = "ours-tp4-uneven"
    there, elsewhere = (facts(farm.resumed(each) / "loaded")["loss"] for each in (
        Resume(same, same, OWN), Resume(same, "ours-tp2-uneven"),
    ))  # fmt: skip
    assert elsewhere == pytest.approx(there, rel=1e-5)


def _collected(rank: int, world: int, config: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(build(config), mesh["tp"])
    first = getattr(model, INFO)
    records = {name: kept.record.as_dict() for name, _, kept in cut_parameters(model)}
    for new in (False, True):
        if new:
            fully_shard(model, mesh=mesh["dp"])  # it makes other parameters, which know nothing
            assert not any(hasattr(parameter, RECORD) for parameter in model.parameters())
        assert universal_checkpoint_info(model) == first == getattr(model, INFO)
        assert {name: getattr(parameter, RECORD) for name, parameter in model.named_parameters()} == records
    with pytest.raises(TransaxleError, match="this LlamaForCausalLM was not cut"):
        universal_checkpoint_info(build(config))


def test_one_record_for_every_parameter_and_collecting_twice_is_the_same() -> None:
    run(4, _collected, CONFIGS["llama"])


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_record_says_the_same_when_it_is_read(kind: str) -> None:
    model = build(CONFIGS[kind])
    for ranks in (2, 3, 4):
        for cut in make_plan(model, read(model), ranks, None).cuts:
            record = record_of(cut, cut.shares, ranks)
            again = read_record(record.as_dict(), cut.weight.name, ranks)
            assert again.spread == record.spread, cut.weight.name
            assert again.as_dict() == record.as_dict(), cut.weight.name
