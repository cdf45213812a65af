"""The stream of whole tensors yields what a save writes, once, on the requested ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.live.ranks import run
from tests.live.topologies import FSDP, HSDP, LLAMA, MOE, PP, TP, build

MODEL = "model.safetensors"


def _streamed(rank: int, world: int, folder: str, config: dict[str, Any], how: str, to: str) -> list[int]:
    torch.manual_seed(0)
    model = build(config, how, meta=False)
    tx.save(model, folder, to=f"safetensors:{to}")
    truth, sizes = load_file(Path(folder, MODEL)), []
    for tensors in tx.refit.named_tensors(model, to=to, bucket=20_000):
        sizes.append(sum(tensor.nbytes for _, tensor in tensors))
        for name, tensor in tensors:
            expected = truth.pop(name)
            assert torch.equal(tensor, expected), name
            assert tensor.dtype == expected.dtype
            tensor.zero_()  # it is the caller's
    assert truth == {}
    tx.save(model, f"{folder}/again", to=f"safetensors:{to}")
    assert Path(folder, "again", MODEL).read_bytes() == Path(folder, MODEL).read_bytes()
    return sizes


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("config", "how", "to"), [(MOE, FSDP, "hf"), (MOE, TP, "hf"), (LLAMA, PP, "megatron"), (LLAMA, HSDP, "hf")]
)
def test_every_rank_gets_what_a_save_writes(tmp_path: Path, config: dict[str, Any], how: str, to: str) -> None:
    first, *others = run(4 if how == HSDP else 2, _streamed, str(tmp_path / "out"), config, how, to)
    assert all(sizes == first for sizes in others)
    assert len(first) > 2
    assert max(first) <= 20_000


def _on_one(rank: int, world: int) -> int:
    model = build(LLAMA, FSDP, meta=False)
    count = 0
    for tensors in tx.refit.named_tensors(model, on=[1], dtype="bf16"):
        assert all(tensor.dtype == torch.bfloat16 for _, tensor in tensors)
        count += len(tensors)
    return count


def test_one_rank_may_get_all() -> None:
    assert run(2, _on_one) == [0, 21]


def test_values_are_cast_on_the_way() -> None:
    state = {"w": torch.randn(7, 5), "n": torch.arange(3)}
    ((first, second),) = tx.refit.named_tensors(state, to="identity", dtype="bf16")
    assert {first[0], second[0]} == {"w", "n"}
    found = dict([first, second])
    assert torch.equal(found["w"], state["w"].bfloat16())
    assert torch.equal(found["n"], state["n"])


def test_other_ranks_get_nothing() -> None:
    with pytest.raises(ValueError, match=r"on must be ranks of the group, \[0\]; got \[3\]"):
        tx.refit.named_tensors({"w": torch.ones(2)}, on=[3])


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(tx.TransaxleError, match="it is on the meta device"):
        next(tx.refit.named_tensors({"w": torch.ones(2, device="meta")}, to="identity"))
