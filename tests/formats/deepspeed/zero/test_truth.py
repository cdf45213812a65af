"""Real checkpoints against the truth gathered from the live optimizers: bit by bit, nothing missing or extra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import transaxle as tx
from tests.oracles.deepspeed_peer.case import BY_NAME, CASES, FP32, LOW, STATES, STEP, UNSHARDED
from tests.oracles.deepspeed_peer.farm import Farm
from transaxle.formats.training_state import OPTIMIZER

pytestmark = pytest.mark.peers
BUFFERS = {"seen", "mean"}
ALIAS = "lm_head.weight"
COMMON = {"odd-z3-w2", "sub-groups-odd-w4", "odd-aligned-w2", "frozen-z2-w2"}
"""The launches that train these are needed by default anyway; all other cases are oracles."""
every_case = pytest.mark.parametrize(
    "name", [pytest.param(case.name, marks=() if case.name in COMMON else pytest.mark.oracle) for case in CASES]
)


def differing(ck: Mapping[str, object], wanted: Mapping[str, tuple[tuple[int, ...], bytes]]) -> list[str]:
    """Names that are missing, or differ in shape or bytes."""
    return [
        name for name, (shape, data) in wanted.items()
        if name not in ck or ck[name].shape != shape or ck[name].tobytes() != data  # type: ignore[attr-defined]
    ]  # fmt: skip


@every_case
def test_weights_and_moments_are_the_live_ones(farm: Farm, name: str) -> None:
    weights = farm.truth(name, FP32)
    low = farm.truth(name, LOW)
    with tx.open(farm.checkpoint(name)) as ck:
        wanted = weights | {n: held for n, held in low.items() if n not in weights}
        for state in STATES:
            wanted |= {f"{OPTIMIZER}{n}/{state}": held for n, held in farm.truth(name, state).items()}
        assert differing(ck, wanted) == []
        steps = {f"{OPTIMIZER}{n}/{STEP}" for n in weights}
        assert {float(ck[n].read()) for n in steps} == set(farm.facts(name)["steps"])
        extra = {ALIAS} if BY_NAME[name].tied and BY_NAME[name].launch.pp == 1 else set()
        assert set(ck) - set(wanted) - steps == extra | (BUFFERS if BY_NAME[name].model == "odd" else set())


@every_case
def test_low_precision_weights_are_the_live_ones(farm: Farm, name: str) -> None:
    path = farm.checkpoint(name)
    if BY_NAME[name].zero == 3:
        with pytest.raises(tx.TransaxleError, match="ZeRO-3 saves no weights in low precision"):
            tx.open(path, weights="lp")
        return
    with tx.open(path, weights="lp") as ck:
        assert differing(ck, farm.truth(name, LOW)) == []


@pytest.mark.parametrize("name", [case.name for case in CASES if case.dealt])
def test_what_was_dealt_out_is_what_the_module_has(farm: Farm, name: str) -> None:
    """DeepSpeed's own map of fragments is of another order, so the truth here is not what it finds by that."""
    path = farm.checkpoint(name)
    low = farm.truth(name, LOW)
    with tx.open(path, dtype="bf16") as ck:
        assert differing(ck, {parameter: low[parameter] for parameter in farm.truth(name, FP32)}) == []


def typed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that went through JSON, with the type that betas have in the optimizer."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


@every_case
def test_groups_keep_their_settings_by_name(farm: Farm, name: str) -> None:
    facts = farm.facts(name)
    with tx.open(farm.checkpoint(name)) as ck:
        groups = ck.metadata["param_groups"]
    keep = ("lr", "weight_decay", "betas", "eps")
    got = [(sorted(group["params"]), {key: group[key] for key in keep}) for group in groups]
    if BY_NAME[name].elastic:  # it saves no settings
        assert got == []
        return
    settings = zip(facts["groups"], facts["settings"], strict=True)
    if BY_NAME[name].launch.pp > 1:  # the facts are those of the first stage's ranks
        assert [each for _, each in got] == [typed(each) for each in facts["settings"]]
        return
    assert got == [(names, typed(each)) for names, each in settings]


@pytest.mark.parametrize("name", [case.name for case in UNSHARDED])
def test_without_zero_the_state_keeps_its_numbers(farm: Farm, name: str) -> None:
    """Nothing in the files says which parameter a number stands for, so none is said here."""
    case = BY_NAME[name]
    wanted = dict(farm.truth(name, LOW))
    numbered = [] if case.model == "moe" else [*STATES, *([FP32] if case.dtype == "bf16" else [])]
    for state in numbered:
        wanted |= {f"{OPTIMIZER}{number}/{state}": held for number, held in farm.truth(name, state).items()}
    with tx.open(farm.checkpoint(name)) as ck:
        assert differing(ck, wanted) == []
        steps = {key for key in ck if key.endswith(f"/{STEP}")}
        assert len(steps) == (len(farm.truth(name, FP32)) if numbered else 0)
        assert {float(ck[key].read()) for key in steps} <= set(farm.facts(name)["steps"])
        assert set(ck) - set(wanted) - steps == (BUFFERS if case.model == "odd" else set())
        if case.model == "moe":
            assert [key for key in ck.metadata["left_behind"] if key.startswith("expp_rank_")] == [
                f"expp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(case.ep)
            ]
