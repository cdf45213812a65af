"""What does not fit is refused before anything is written: on every rank, with everything that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from tests.live.ranks import ranks, run
from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.reshard import reshard
from transaxle.live.save import save


def _bad(rank: int, world: int, source: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, Any] = {
        "good": distribute_tensor(torch.full((4, 2), 5.0), mesh, [Shard(0)], src_data_rank=None),
        "tall": torch.full((3, 2), 5.0),
        "kind": torch.full((2,), 5),
    }
    if rank == 1:
        state["only here"] = torch.full((1,), 5.0)
    try:
        load(state, source)
    finally:
        for value in state.values():
            assert bool(((value.to_local() if hasattr(value, "to_local") else value) == 5).all())


def test_everything_is_listed_on_every_rank_and_nothing_written(tmp_path: Path) -> None:
    tensors = {"good": torch.arange(8.0).reshape(4, 2), "tall": torch.ones(2, 2), "kind": torch.ones(2)}
    save_file({**tensors, "more": torch.ones(1)}, tmp_path / "model.safetensors")
    want = {
        ("SHAPE_MISMATCH", "tall"),
        ("DTYPE_MISMATCH", "kind"),
        ("MISSING_TENSOR", "only here"),
        ("UNEXPECTED_TENSOR", "more"),
    }
    for fine, error in ranks(2).answers(_bad, str(tmp_path)):
        assert not fine
        assert isinstance(error, TransaxleError), error
        assert {(r.code, r.where.tensor) for r in error.refusals} == want
        assert all(r.hint for r in error.refusals if r.code.endswith("TENSOR"))


def _fails_on_one(rank: int, world: int, source: str) -> None:
    from transaxle.engine.checkpoint.checkpoint import open_checkpoint
    from transaxle.errors import refuse

    mesh = init_device_mesh("cpu", (world,))
    checkpoint = open_checkpoint(source)
    if rank == 1:
        storage = checkpoint.container.storage

        def broken(_steps: object, name: str, *_: object) -> None:
            raise refuse("IO", "the disk of rank 1 is gone", file=name)

        object.__setattr__(storage, "note_read", broken)
    load({"w": distribute_tensor(torch.zeros(64, 64), mesh, [Shard(0)], src_data_rank=None)}, checkpoint)


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    save_file({"w": torch.arange(4096.0).reshape(64, 64)}, tmp_path / "model.safetensors")
    for fine, error in ranks(2).answers(_fails_on_one, str(tmp_path)):
        assert not fine
        assert isinstance(error, TransaxleError), error
        assert "the disk of rank 1 is gone" in str(error)


def _partial(rank: int, world: int, target: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    save({"w": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)}, target, to="safetensors")


def test_terms_of_a_sum_are_no_tensor(tmp_path: Path) -> None:
    with pytest.raises(TransaxleError) as found:
        run(2, _partial, str(tmp_path / "out"))
    assert found.value.code == "UNSUPPORTED"
    assert not (tmp_path / "out").exists()


class Rotary(nn.Module):
    """A buffer that no checkpoint holds, computed by its module."""

    def __init__(self, *, knows: bool) -> None:
        super().__init__()
        self.register_buffer("turns", torch.arange(3.0), persistent=False)
        if knows:
            self.reset_parameters = self._reset

    def _reset(self) -> None:
        with torch.no_grad():
            self.turns.copy_(torch.arange(3.0))  # type: ignore[operator]


def _meta(*, knows: bool = True) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 2), Rotary(knows=knows), nn.Linear(2, 2))


@pytest.mark.parametrize("strict", [True, False])
def test_no_meta_tensor_is_left(tmp_path: Path, strict: bool) -> None:
    full = nn.Linear(2, 2).state_dict()
    save_file({f"0.{name}": tensor for name, tensor in full.items()}, tmp_path / "model.safetensors")
    model = _meta()
    with pytest.raises(TransaxleError) as found:
        load(model, tmp_path, strict=strict)
    assert {r.where.tensor for r in found.value.refusals} == {"2.weight", "2.bias"}
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(TransaxleError) as found:
        load(_meta(knows=False), tmp_path, strict=strict)
    assert {r.where.tensor for r in found.value.refusals} == {"2.weight", "2.bias", "1.turns"}
    save_file({f"{n}.{k}": t + n for n in (0, 2) for k, t in full.items()}, tmp_path / "model.safetensors")
    load(model, tmp_path, strict=strict)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(model[2].weight, full["weight"] + 2)  # type: ignore[index]
    assert torch.equal(model[1].turns, torch.arange(3.0))  # type: ignore[index]


def test_a_meta_tensor_of_a_state_dict_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(TransaxleError) as found:
        load({"w": torch.empty(2, device="meta")}, tmp_path)
    assert found.value.code == "UNSUPPORTED"


def test_without_strict_the_rest_is_loaded_and_reported(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    state = {"a": torch.zeros(3), "c": torch.full((2,), 9.0)}
    report = load(state, tmp_path, strict=False)
    assert (report.missing, report.unexpected) == (("c",), ("b",))
    assert torch.equal(state["a"], torch.arange(3.0))
    assert torch.equal(state["c"], torch.full((2,), 9.0))


def test_a_tensor_whose_elements_are_one_in_memory_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0), "w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "model.safetensors")
    state = {"a": torch.zeros(3), "w": torch.zeros(3).expand(2, 3)}
    for ask in (
        lambda: load(state, tmp_path),
        lambda: reshard({n: torch.ones(t.shape) for n, t in state.items()}, state),
    ):
        with pytest.raises(TransaxleError) as found:
            ask()
        assert [(r.code, r.where.tensor) for r in found.value.refusals] == [("UNSUPPORTED", "w")]
        assert not state["a"].any()


def _unlike(rank: int, world: int, target: str) -> str:
    with pytest.raises(TransaxleError) as found:
        save({"w": torch.ones(2)}, f"{target}-{rank}", to="safetensors")
    return f"{found.value.code} {found.value}"


def test_ranks_that_ask_for_different_saves_are_refused(tmp_path: Path) -> None:
    for said in run(2, _unlike, str(tmp_path / "run")):
        assert said.startswith("AMBIGUOUS")
        assert f"dst: rank 1 gave '{tmp_path}/run-1', but rank 0 gave '{tmp_path}/run-0'" in said
    assert not list(tmp_path.iterdir())
