"""Errors are raised on both sides, and the target keeps its old weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import transaxle as tx
from tests.live.jobs import SECRET, apart, free_port
from tests.live.load.test_shared import Tied
from tests.live.ranks import DIED, Ranks, run
from tests.live.refusals import refused
from transaxle.errors import refuse
from transaxle.live.model.state_tensors import State
from transaxle.live.transport.world import collective
from transaxle.refit import endpoints

WORLD = 3
SIDE = 1024


def _sides(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Rank 0 trains, the others are an engine."""
    if rank == 0:
        return {f"w{n}": torch.full((SIDE, SIDE), float(n + 1)) for n in range(3)}, {}
    return {}, {f"w{n}": torch.zeros(SIDE, SIDE) for n in range(3)}


def _killed(rank: int, world: int, victim: int, port: int) -> str:
    """Lose a rank in the middle of the second push; return the error, with the weights of the first push in place."""
    apart(rank, world, 1)
    group = tx.refit.meet(f"127.0.0.1:{port}", rank, world, timeout=8, secret=SECRET)
    given, taken = _sides(rank)
    refit = tx.Refit(given, taken, group, bucket="1MiB")
    refit.push()
    for tensor in given.values():
        tensor.add_(10)
    if rank == victim:
        moment = "copy" if rank == 0 else "lay"
        where: Any = endpoints.SourceReader if rank == 0 else endpoints.TargetMemory
        calls, usual = [], getattr(where, moment)

        def die(self: Any, *args: Any) -> None:
            calls.append(1)
            if len(calls) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            usual(self, *args)

        setattr(where, moment, die)
    with pytest.raises(tx.TransaxleError) as found:
        refit.push()
    assert found.value.code == "IO"
    assert all(bool((tensor == n + 1).all()) for n, tensor in enumerate(taken.values()))
    assert refit.version == 1
    with pytest.raises(tx.TransaxleError, match="an earlier push failed"):
        refit.pull()
    return str(found.value)


@pytest.mark.parametrize("victim", [0, 2], ids=["trainer", "engine"])
def test_a_killed_rank_leaves_the_old_weights(victim: int) -> None:
    with Ranks(WORLD) as ranks:
        answers = ranks.answers(_killed, victim, free_port())
    assert answers[victim] == (False, DIED)
    for rank, (fine, said) in enumerate(answers):
        if rank != victim:
            assert fine, said
            assert "a rank died or did not answer in time" in said


def test_a_lost_rank_is_reported_although_torch_fails_on_the_group() -> None:
    """When torch records the failed rank, it looks it up in a group that it does not know."""

    def stumble() -> None:
        try:
            raise RuntimeError("closed by peer")
        except RuntimeError:
            raise ValueError("Group is not registered")  # noqa: B904 - as torch raises it

    with pytest.raises(tx.TransaxleError, match="a rank died or did not answer in time: closed by peer"), collective():
        stumble()
    with pytest.raises(ValueError, match="an argument"), collective():
        raise ValueError("an argument")


def _failing(rank: int, world: int) -> tuple[str, int]:
    """An error of one rank in a push, and a push that succeeds afterwards."""
    given, taken = _sides(rank)
    refit = tx.Refit(given, taken, bucket="1MiB")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:

            def fail(*_: object) -> None:
                raise refuse("NO_SPACE", "no memory left")

            patch.setattr(endpoints.TargetMemory, "lay", fail)
        with pytest.raises(tx.TransaxleError) as found:
            refit.push()
    assert not any(bool(tensor.any()) for tensor in taken.values())
    version = refit.push().version
    assert all(bool((tensor == n + 1).all()) for n, tensor in enumerate(taken.values()))
    return str(found.value), version


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    for said, version in run(WORLD, _failing):
        assert "no memory left" in said
        assert version == 1


class Config:
    """A model's config."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def to_dict(self) -> dict[str, Any]:
        return self._values


class Model(nn.Module):
    """One weight, and a config that says how many heads it is for."""

    def __init__(self, heads: int, size: int = 8) -> None:
        super().__init__()
        self.config = Config(model_type="mine", num_attention_heads=heads, pad_token_id=heads)
        self.w = nn.Parameter(torch.full((size, size), float(heads)))


def _differing(rank: int, world: int, heads: int, size: int) -> str:
    trainer: State = Model(4) if rank == 0 else {}
    engine: State = Model(heads, size) if rank == 1 else {}
    with pytest.raises(tx.TransaxleError) as found:
        tx.Refit(trainer, engine)
    if heads != 4 and size == 8:
        tx.Refit(trainer, engine, strict=False).push()
        assert not isinstance(engine, Model) or bool((engine.w == 4).all())
    return str(found.value)


@pytest.mark.parametrize(("heads", "size"), [(2, 8), (4, 16)])
def test_another_config_is_refused_on_both_sides(heads: int, size: int) -> None:
    """The same shapes with other heads are another model; a padded vocabulary is not."""
    first, second = run(2, _differing, heads, size)
    assert first == second
    assert ("num_attention_heads is 2 in the target's config, but 4 in the source's" in first) == (heads == 2)
    assert "pad_token_id" not in first
    assert "SHAPE_MISMATCH" in first


def _unlike(rank: int, world: int) -> tuple[str, str, str]:
    """Arguments, choices and versions that differ from rank to rank."""
    given, taken = ({"w": torch.ones(4)}, {}) if rank == 0 else ({}, {"w": torch.zeros(4)})
    said = []
    with pytest.raises(tx.TransaxleError) as found:
        tx.Refit(given, taken, in_place=rank == 0)
    said.append(str(found.value))
    for side in (given, taken):
        side |= {"v": torch.ones(2)} if side else {}
    refit = tx.Refit(given, taken)
    with pytest.raises(tx.TransaxleError) as found:
        refit.push(only="w" if rank == 0 else "v")
    said.append(str(found.value))
    with pytest.raises(tx.TransaxleError) as found:
        _ = refit.push(only="x*") if rank == 0 else refit.pull()
    said.append(str(found.value))
    return said[0], said[1], said[2]


def test_different_options_on_ranks_are_reported() -> None:
    first, second = run(2, _unlike)
    assert first == second
    assert "in_place: rank 1 gave False, but rank 0 gave True" in " ".join(first[0].split())
    assert "the ranks push different tensors" in first[1]
    assert "no tensor has a name like 'x*'" in first[2]


def _mistyped(rank: int, world: int) -> list[str]:
    """Give one rank a value of a type that its argument cannot have."""
    wrong: Any = {"family": 3} if rank else {}
    calls: list[Callable[[], object]] = [
        lambda: tx.Refit({"w": torch.ones(4)}, {"w": torch.zeros(4)}, **wrong),
        lambda: tx.reshard({"w": torch.ones(4)}, {"w": torch.zeros(4)}, **wrong),
        lambda: list(tx.refit.named_tensors({"w": torch.ones(4)}, to="identity", **wrong)),
        lambda: tx.reshard({"w": torch.ones(4)}, {"w": torch.zeros(4)}, strict=not rank),
    ]
    said = []
    for call in calls:
        with pytest.raises((tx.TransaxleError, TypeError)) as found:
            call()
        said.append(" ".join(str(found.value).split()))
    return said


def test_a_wrong_type_on_one_rank_is_raised_on_all() -> None:
    others, own = run(2, _mistyped)
    assert all("rank 1 failed: TypeError" in each for each in others[:3])
    assert all("family must be a str" in each for each in own[:3])
    assert others[3] == own[3]
    assert "strict: rank 1 gave False, but rank 0 gave True" in own[3]


def test_a_tensor_that_is_replaced_by_another_form_is_refused() -> None:
    source, target = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    refit = tx.Refit(source, target)
    source["w"] = torch.full((4,), 2.0)  # of the same form: it is looked up anew
    refit.push()
    assert target["w"].tolist() == [2.0] * 4
    source["w"] = torch.ones(5)
    with pytest.raises(tx.TransaxleError, match="the source has it in another form"):
        refit.push()
    del source["w"]
    with pytest.raises(tx.TransaxleError, match="the source no longer has it"):
        refit.push()
    source |= {"w": torch.ones(4), "v": torch.ones(1)}
    with pytest.raises(tx.TransaxleError, match="the source did not have it"):
        refit.push()
    assert (refit.version, target["w"].tolist()) == (1, [2.0] * 4)


def test_types_are_cast_only_if_asked() -> None:
    source, target = {"w": torch.randn(100)}, {"w": torch.zeros(100, dtype=torch.bfloat16)}
    with pytest.raises(tx.TransaxleError, match="Give dtype="):
        tx.Refit(source, target)
    tx.Refit(source, target, dtype="bf16").push()
    assert torch.equal(target["w"], source["w"].bfloat16())
    with pytest.raises(tx.TransaxleError, match="parameters cannot be cast to dtype='fp8'"):
        tx.Refit(source, target, dtype="fp8")


def test_equal_tensors_are_not_taken_for_tied() -> None:
    """A head that equals the embedding at the first push may differ at the next."""
    weight = torch.ones(2, 2)
    with pytest.raises(tx.TransaxleError, match="the model has no such tensor"):
        tx.Refit({"embed": weight, "head": weight.clone()}, {"embed": torch.zeros(2, 2)})
    target = {"embed": torch.zeros(2, 2)}
    tx.Refit({"embed": weight, "head": weight}, target).push()
    assert torch.equal(target["embed"], weight)


def test_requests_are_stopped_while_the_target_is_written() -> None:
    seen: list[str] = []
    source, target = {"w": torch.ones(4)}, {"w": torch.zeros(4)}

    @contextmanager
    def pause() -> Iterator[None]:
        seen.append(f"stopped at {target['w'][0]:.0f}")
        yield
        seen.append(f"goes on at {target['w'][0]:.0f}")

    for in_place in (False, True):
        target["w"].zero_()
        tx.Refit(source, target, in_place=in_place, pause=pause).push()
    assert seen == ["stopped at 0", "goes on at 1"] * 2


@pytest.mark.parametrize(
    ("address", "number", "size", "text"),
    [
        ("here", 0, 1, "address must be HOST:PORT"),
        ("here:port", 0, 1, "address must be HOST:PORT"),
        ("127.0.0.1:1", 2, 2, "number must be from 0 to 1"),
    ],
)
def test_an_impossible_meeting_is_refused(address: str, number: int, size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tx.refit.meet(address, number, size, secret=SECRET)
    with pytest.raises(ValueError, match="backend must be one of gloo, nccl"):
        tx.refit.meet("127.0.0.1:1", 0, 1, backend="mpi", secret=SECRET)


def test_nobody_at_the_address_is_an_io_error() -> None:
    with refused("IO"):
        tx.refit.meet(f"127.0.0.1:{free_port()}", 1, 2, timeout=1, secret=SECRET)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_tie_that_changes_between_pushes_is_refused(side: str, *, tied: bool) -> None:
    """With the old plan, one of both tensors would get wrong values."""
    models = {"source": Tied(tie=tied), "target": Tied(tie=tied)}
    refit = tx.Refit(models["source"], models["target"])
    refit.push()
    changed = models[side]
    changed.head.weight = nn.Parameter(torch.randn(4, 3)) if tied else changed.embed.weight
    before = {name: tensor.clone() for name, tensor in models["target"].state_dict().items()}
    with pytest.raises(tx.TransaxleError, match=rf"the {side} has it in another form: .*tied") as found:
        refit.push()
    assert [each.where.tensor for each in found.value.refusals] == ["head.weight"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in models["target"].state_dict().items())
    tied_now = models["source"].head.weight is models["source"].embed.weight
    if tied_now or models["target"].head.weight is not models["target"].embed.weight:
        tx.Refit(models["source"], models["target"]).push()
        assert all(torch.equal(models["source"].state_dict()[n], t) for n, t in models["target"].state_dict().items())
