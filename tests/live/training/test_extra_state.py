"""What is no tensor: numbers, extra states, random states, anything with a state; and what is refused."""

from __future__ import annotations

import collections
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.live.ranks import run
from transaxle.errors import TransaxleError
from transaxle.live.extra_state import FILE, Random
from transaxle.live.load import load
from transaxle.live.save import save


class Loader:
    """A data loader's place, different on every rank."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Scaled(nn.Linear):
    """A module with extra state, as TransformerEngine's have."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EVERYTHING: dict[str, Any] = {
    "ints": [1, -(2**70), True, None],
    "floats": (0.1, float("inf"), -0.0),
    "texts": {"a": "ü", 3: b"\x00\xff", (1, 2): {4, 5}},
    "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "empty": torch.empty(0, 3, dtype=torch.int8),
    "array": np.arange(4, dtype=np.uint32),
    "scalars": [np.float64(0.1), np.int32(7), np.array(2.5)],
    "milestones": collections.Counter([3, 5, 3]),
    "stream": io.BytesIO(b"abc"),
}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, io.BytesIO):
        return isinstance(b, io.BytesIO) and a.getvalue() == b.getvalue()
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)


def test_plain_data_comes_back_as_it_was(tmp_path: Path) -> None:
    save({"w": torch.arange(3.0)}, tmp_path / "out", to="safetensors", extra={"all": EVERYTHING})
    report = load({"w": torch.zeros(3)}, tmp_path / "out", extra={"all": None})
    assert _equal(EVERYTHING, report.extra["all"])


def test_a_state_dict_gets_its_numbers_back(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0), "at": {"step": 7, "loss": 0.1, "warm": True}, "name": "run", "big": 2**80}
    for to in ("safetensors", "dcp"):
        save(state, tmp_path / to, to=to)
        mine = {"w": torch.zeros(3), "at": {"step": 0, "loss": 0.0, "warm": False}, "name": "", "big": 0}
        report = load(mine, tmp_path / to)
        want = {"at.step": 7, "at.loss": 0.1, "at.warm": True, "name": "run", "big": 2**80}
        assert report.scalars == want
        assert {key: type(value) for key, value in report.scalars.items()} == {k: type(v) for k, v in want.items()}
        with pytest.raises(TransaxleError) as found:
            load({"w": torch.zeros(3), "nothing": 3}, tmp_path / to)
        assert {(r.code, r.where.tensor) for r in found.value.refusals} == {
            ("UNEXPECTED_TENSOR", "at.step"),
            ("UNEXPECTED_TENSOR", "at.loss"),
            ("UNEXPECTED_TENSOR", "at.warm"),
            ("MISSING_TENSOR", "state/nothing"),
        }


@pytest.mark.parametrize("extra", [torch.arange(5, dtype=torch.uint8), io.BytesIO(b"scales"), {"amax": [1.5]}])
def test_extra_states_reach_their_modules(tmp_path: Path, extra: Any) -> None:
    save(nn.Sequential(nn.ReLU(), Scaled(extra)), tmp_path / "out", to="safetensors")
    other = nn.Sequential(nn.ReLU(), Scaled(None))
    load(other, tmp_path / "out")
    assert _equal(extra, other[1].extra)
    with pytest.raises(TransaxleError) as found:
        save(Scaled(object()), tmp_path / "no", to="safetensors")
    assert found.value.code == "UNSUPPORTED"
    assert "builtins.object" in str(found.value)


def test_what_is_no_plain_data_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(TransaxleError) as found:
        save({"w": torch.ones(1), "f": print}, tmp_path / "out", to="safetensors", extra={"a": {"b": [1, object()]}})
    assert {r.where.tensor for r in found.value.refusals} == {"state/f", "extra/a.b[1]"}
    assert not (tmp_path / "out").exists()
    with pytest.raises(TransaxleError) as found:
        save({"w": torch.ones(1)}, tmp_path / "one.safetensors", to="safetensors", extra={"a": 1})
    assert found.value.code == "UNSUPPORTED"


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    save({"w": torch.ones(1)}, tmp_path / "out", to="safetensors", extra={"a": 1})
    for text in ("[]", "{}", '{"world": 1, "shared": {"extra/a": {"what": 1}}, "ranks": []}', "\x00"):
        (tmp_path / "out" / FILE).write_text(text)
        with pytest.raises(TransaxleError) as found:
            load({"w": torch.ones(1)}, tmp_path / "out", extra={"a": None})
        assert found.value.code == "CORRUPT"


def _save(rank: int, world: int, target: str) -> list[float]:
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    extra = {"rng": Random(), "loader": Loader({"at": 10 + rank}), "schedule": Loader({"epoch": 3})}
    save({"w": torch.arange(4.0)}, target, to="safetensors", extra=extra)
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def _load(rank: int, world: int, source: str, strict: bool) -> Any:
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    loader, schedule = Loader(None), Loader(None)
    extra = {"rng": Random(), "loader": loader, "schedule": schedule}
    report = load({"w": torch.zeros(4)}, source, extra=extra, strict=strict)
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return drawn, loader.state, schedule.state, report.missing


def test_each_rank_gets_its_own_state(tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    drawn = run(2, _save, target)
    assert drawn[0] != drawn[1]
    for rank, (after, loader, schedule, missing) in enumerate(run(2, _load, target, True)):
        assert after == drawn[rank]
        assert (loader, schedule, missing) == ({"at": 10 + rank}, {"epoch": 3}, ())


def test_another_number_of_ranks_gets_what_was_alike(tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    run(2, _save, target)
    with pytest.raises(TransaxleError) as found:
        run(1, _load, target, True)
    assert {r.where.tensor for r in found.value.refusals} == {"extra/rng", "extra/loader"}
    ((_, loader, schedule, missing),) = run(1, _load, target, False)
    assert (loader, schedule) == (None, {"epoch": 3})
    assert set(missing) == {"rng", "loader"}
