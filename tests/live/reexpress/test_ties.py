"""Ties, and names that only one side of `reshard` has: told, or proved to be nothing else than what is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import run
from transaxle.errors import TransaxleError
from transaxle.live.reshard import reshard

EMBED, HEAD, NORM = "embed.weight", "head.weight", "norm.weight"


class Tiny(nn.Module):
    def __init__(self, *, tie: bool, head: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3, bias=False)
        if head:
            self.head = nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def zeros(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(3) if name == NORM else torch.zeros(5, 3) for name in names}


def test_training_6_what_one_side_lacks_is_in_the_report() -> None:
    source = Tiny(tie=False)
    target = {**zeros(EMBED, NORM), "heda.weight": torch.full((5, 3), 7.0)}
    report = reshard(source, target, strict=False)
    assert report.tensors == 2
    assert report.missing == ("heda.weight",)
    assert report.unexpected == (HEAD,)
    assert torch.equal(target["heda.weight"], torch.full((5, 3), 7.0))
    assert torch.equal(target[EMBED], source.embed.weight)
    assert (reshard(source, zeros(EMBED, NORM, HEAD)).missing, report.as_json()["missing"]) == ((), ("heda.weight",))


@pytest.mark.parametrize("strict", [False, True])
def test_training_6_nothing_in_common_is_refused(strict: bool) -> None:
    target = {"a.b": torch.zeros(2)}
    with pytest.raises(TransaxleError) as found:
        reshard({"c.d": torch.ones(2)}, target, strict=strict)
    assert found.value.code == "UNKNOWN_FAMILY"
    assert "c.d" in str(found.value)
    assert not target["a.b"].any()


def test_training_6_the_hint_for_types_names_what_there_is() -> None:
    with pytest.raises(TransaxleError) as found:
        reshard({"a": torch.ones(2)}, {"a": torch.zeros(2, dtype=torch.bfloat16)})
    assert found.value.code == "DTYPE_MISMATCH"
    assert "decode" not in str(found.value)
    assert ".to(torch." in found.value.hint


@pytest.mark.parametrize("given", ["model", "state dict", "copies"])
def test_training_6_a_tied_model_into_its_embedding_alone(given: str) -> None:
    model = Tiny(tie=True)
    source: Any = model if given == "model" else model.state_dict()
    if given == "copies":  # as a gathered state dict has them
        source = {name: tensor.clone() for name, tensor in source.items()}
    target = zeros(EMBED, NORM)
    report = reshard(source, target)
    assert (report.tensors, report.missing, report.unexpected) == (2, (), ())
    assert torch.equal(target[EMBED], model.head.weight)


def test_a_head_that_is_not_tied_is_refused_where_the_target_has_none() -> None:
    model = Tiny(tie=True)
    source = {**model.state_dict(), HEAD: model.head.weight.detach().clone()}
    source[HEAD][4, 2] += 1e-6
    target = zeros(EMBED, NORM)
    with pytest.raises(TransaxleError) as found:
        reshard(source, target)
    assert [(one.code, one.where.tensor) for one in found.value.refusals] == [("UNEXPECTED_TENSOR", HEAD)]
    assert not target[EMBED].any()


def test_a_tied_target_takes_one_name_and_refuses_two_that_differ() -> None:
    given, target = Tiny(tie=False), Tiny(tie=True)
    assert reshard({EMBED: given.embed.weight, NORM: given.norm.weight}, target).missing == ()
    assert torch.equal(target.head.weight, given.embed.weight)
    before = target.embed.weight.detach().clone()
    with pytest.raises(TransaxleError) as found:
        reshard(given, target)
    assert [(one.code, one.where.tensor) for one in found.value.refusals] == [("UNEQUAL_COPIES", HEAD)]
    assert torch.equal(target.embed.weight, before)
    assert reshard(Tiny(tie=True), target).tensors == 3


def _cut(rank: int, world: int, tie: str) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(30.0).reshape(10, 3)
    embed = distribute_tensor(whole, mesh, [Shard(0)])
    head = distribute_tensor(whole, mesh, [Shard(0) if tie != "elsewhere" else Replicate()])
    if tie == "one rank differs" and rank:
        head.to_local()[0, 0] += 1
    source = {EMBED: embed, HEAD: embed if tie == "same" else head}
    target = {EMBED: distribute_tensor(torch.zeros(10, 3), mesh, [Replicate()])}
    report = reshard(source, target)
    assert isinstance(target[EMBED], DTensor)
    return report.unexpected, torch.equal(target[EMBED].to_local(), whole)


@pytest.mark.parametrize("tie", ["same", "equal"])
def test_ties_are_proved_on_every_rank(tie: str) -> None:
    assert run(2, _cut, tie) == [((), True)] * 2


@pytest.mark.parametrize("tie", ["one rank differs", "elsewhere"])
def test_ties_that_one_rank_cannot_prove_are_refused(tie: str) -> None:
    with pytest.raises(TransaxleError) as found:
        run(2, _cut, tie)
    assert {one.where.tensor for one in found.value.refusals} == {HEAD}


@pytest.mark.parametrize("how", ["refit", "reshard"])
def test_two_names_of_one_memory_take_one_tensor_only(how: str) -> None:
    """The state dict of a tied model has two tensors, but one memory."""

    def move(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
        if how == "refit":
            tx.Refit(source, target).push()
        else:
            tx.reshard(source, target)

    memory = torch.zeros(4, 3)
    target = {"embed": memory.detach(), "head": memory.detach()}
    with pytest.raises(tx.TransaxleError, match="embed has other"):
        move({"embed": torch.ones(4, 3), "head": torch.full((4, 3), 2.0)}, target)
    assert not memory.any()
    both = torch.ones(4, 3)
    move({"embed": both, "head": both.detach()}, target)
    assert torch.equal(memory, both)
