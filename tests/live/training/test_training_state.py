"""Training state beside model and optimizer, as trainers write it: not in the way of a load, and claimed by `extra`.

The checkpoints are written by torch's own `dcp.save` of objects with a state, in the layout of torchtitan (the model's
names at the top) and nested, and by `torch.save`.
"""

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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

import transaxle as tx
from tests.live.ranks import run
from tests.live.refusals import refused
from transaxle.errors import TransaxleError
from transaxle.live.extra_state import FILE, Random
from transaxle.live.load import load

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG = LlamaConfig(
    hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=32, attn_implementation="eager",
)  # fmt: skip
LAYOUTS = ["flat", "nested", "torch"]


class Progress:
    """What torchtitan calls its train state."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.losses = [1.5, 0.5]

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32), "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["step"], torch.Tensor)
        self.step, self.losses = int(state["step"]), state["losses"]


class Loader:
    """A data loader's place."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _run() -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    return model, optimizer, LambdaLR(optimizer, lambda step: 0.5**step)


def _written(folder: Path, layout: str) -> tuple[Path, nn.Module]:
    model, optimizer, schedule = _run()
    tokens = torch.arange(4)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    schedule.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=layout == "flat")
    others: dict[str, Any] = {
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "lr_scheduler": schedule,
        "train_state": Progress(7),
        "dataloader": Loader({"dp_rank_0": b"\x80here", "world_size": 1}),  # as torchtitan writes it
        "epoch": 3,
    }
    if layout == "torch":
        states = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in others.items()}
        torch.save({"model": model.state_dict(), **states}, folder / "saved.pt")
        return folder / "saved.pt", model
    top = model.state_dict() if layout == "flat" else {"model": model.state_dict()}
    save({**top, **others}, checkpoint_id=folder / "saved", no_dist=True)
    return folder / "saved", model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_state_is_loaded_where_extra_names_it_and_ignored_elsewhere(tmp_path: Path, layout: str) -> None:
    source, model = _written(tmp_path, layout)
    other, optimizer, schedule = _run()
    tx.load(other, source)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    tx.load(other, source, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.125
    progress, place = Progress(0), Loader({})
    progress.losses = []
    claimed = {"train_state": progress, "lr_scheduler": schedule, "dataloader": place, "epoch": None}
    report = tx.load(other, source, optimizer=optimizer, extra=claimed)
    assert (progress.step, progress.losses) == (7, [1.5, 0.5])
    assert (schedule.last_epoch, schedule.get_last_lr()) == (1, [0.125])
    assert place.state == {"dp_rank_0": b"\x80here", "world_size": 1}
    assert report.extra == {"epoch": 3}
    assert type(report.extra["epoch"]) is int
    assert not report.unexpected


def test_a_hub_folder_has_no_training_state(tmp_path: Path) -> None:
    source, model = _written(tmp_path, "nested")
    report = tx.convert(source, tmp_path / "hub", to="hf", config=CONFIG.to_dict())
    assert {"train_state", "lr_scheduler", "dataloader", "epoch"} <= set(report.ignored)
    assert not report.kept
    with tx.open(tmp_path / "hub") as made:
        assert set(made) == set(model.state_dict())
    assert tx.verify(tmp_path / "hub").ok
    with tx.open(source, optimizer=False) as held, tx.open(tmp_path / "hub") as made:
        assert tx.diff(held, made).equal


def test_a_missing_name_in_extra_is_refused_with_the_available_names(tmp_path: Path) -> None:
    source, _ = _written(tmp_path, "flat")
    model, _, schedule = _run()
    with refused("MISSING_TENSOR", hint="The source has dataloader, epoch, lr_scheduler, train_state"):
        tx.load(model, source, extra={"schedule": schedule})


def test_a_stored_state_that_is_not_plain_data_is_refused_with_its_path(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2), "train_state": {"step": torch.tensor(3), "when": Path("somewhere")}}
    torch.save(state, tmp_path / "saved.pt")
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2))
    tx.load(model, tmp_path / "saved.pt")
    with refused("UNSUPPORTED", "train_state.when"):
        tx.load(model, tmp_path / "saved.pt", extra={"train_state": None})


def test_a_parameter_named_like_training_state_is_a_parameter(tmp_path: Path) -> None:
    torch.save({"scheduler.weight": torch.ones(2), "step": torch.ones(1)}, tmp_path / "saved.pt")
    model = nn.Module()
    model.step = nn.Parameter(torch.zeros(1))
    with refused("UNEXPECTED_TENSOR", tensors=["scheduler.weight"]):
        tx.load(model, tmp_path / "saved.pt")


class Rate:
    """A schedule of a class: LambdaLR keeps its attributes."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __call__(self, step: int) -> float:
        return 0.5**step


@pytest.mark.parametrize("held", [{}, {"deep": {"er": {}}, "list": [], "of": [{}, {"a": 1}]}])
@pytest.mark.parametrize("layout", ["dcp", "torch"])
def test_empty_dicts_inside_a_state_come_back(tmp_path: Path, layout: str, held: dict[str, Any]) -> None:
    """torch leaves them out of DCP folders, and loads into what is there."""
    model = LlamaForCausalLM(CONFIG)

    def schedule(*rates: Rate) -> LambdaLR:
        vectors = [value for value in model.parameters() if value.dim() == 1]
        groups = [{"params": vectors}, {"params": [value for value in model.parameters() if value.dim() > 1]}]
        return LambdaLR(torch.optim.AdamW(groups), list(rates))

    saved = schedule(Rate(**held), Rate())
    for _ in range(2):
        saved.optimizer.step()
        saved.step()
    state = {"model": model.state_dict(), "lr_scheduler": saved.state_dict()}
    source = tmp_path / ("saved" if layout == "dcp" else "saved.pt")
    if layout == "dcp":
        save(state, checkpoint_id=source)
    else:
        torch.save(state, source)
    emptied = {"deep": {"er": {}}, "list": [1], "of": [{}, {"a": 2}]} if "deep" in held else dict.fromkeys(held, 0)
    loaded = schedule(Rate(**emptied), Rate())
    tx.load(model, source, extra={"lr_scheduler": loaded})
    assert loaded.state_dict() == saved.state_dict()


# What is no tensor: numbers, extra states, random states, anything with a state; and what is refused.


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


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, io.BytesIO):
        return isinstance(b, io.BytesIO) and a.getvalue() == b.getvalue()
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


def test_plain_data_is_restored_exactly(tmp_path: Path) -> None:
    tx.save({"w": torch.arange(3.0)}, tmp_path / "out", to="safetensors", extra={"all": EVERYTHING})
    report = load({"w": torch.zeros(3)}, tmp_path / "out", extra={"all": None})
    assert equal(EVERYTHING, report.extra["all"])


def test_numbers_in_a_state_dict_are_restored(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0), "at": {"step": 7, "loss": 0.1, "warm": True}, "name": "run", "big": 2**80}
    for to in ("safetensors", "dcp"):
        tx.save(state, tmp_path / to, to=to)
        mine = {"w": torch.zeros(3), "at": {"step": 0, "loss": 0.0, "warm": False}, "name": "", "big": 0}
        report = load(mine, tmp_path / to)
        want = {"at.step": 7, "at.loss": 0.1, "at.warm": True, "name": "run", "big": 2**80}
        assert report.scalars == want
        assert {key: type(value) for key, value in report.scalars.items()} == {k: type(v) for k, v in want.items()}
        with pytest.raises(TransaxleError) as found:
            load({"w": torch.zeros(3), "nothing": 3}, tmp_path / to)
        unexpected = {("UNEXPECTED_TENSOR", f"at.{name}") for name in ("step", "loss", "warm")}
        told = {(each.code, each.where.tensor) for each in found.value.refusals}
        assert told == unexpected | {("MISSING_TENSOR", "state/nothing")}


@pytest.mark.parametrize("extra", [io.BytesIO(b"scales"), {"amax": [1.5]}])
def test_extra_states_are_restored_in_their_modules(tmp_path: Path, extra: Any) -> None:
    tx.save(nn.Sequential(nn.ReLU(), Scaled(extra)), tmp_path / "out", to="safetensors")
    other = nn.Sequential(nn.ReLU(), Scaled(None))
    load(other, tmp_path / "out")
    assert equal(extra, other[1].extra)
    with refused("UNSUPPORTED", "builtins.object"):
        tx.save(Scaled(object()), tmp_path / "no", to="safetensors")


def test_objects_that_are_not_plain_data_are_refused_with_their_paths(tmp_path: Path) -> None:
    with pytest.raises(TransaxleError) as found:
        tx.save({"w": torch.ones(1), "f": print}, tmp_path / "out", to="safetensors", extra={"a": {"b": [1, object()]}})
    assert {r.where.tensor for r in found.value.refusals} == {"state/f", "extra/a.b[1]"}
    assert not (tmp_path / "out").exists()
    with refused("UNSUPPORTED"):
        tx.save({"w": torch.ones(1)}, tmp_path / "one.safetensors", to="safetensors", extra={"a": 1})


def test_a_damaged_extra_state_file_is_refused(tmp_path: Path) -> None:
    tx.save({"w": torch.ones(1)}, tmp_path / "out", to="safetensors", extra={"a": 1})
    for text in ("[]", "{}", '{"world": 1, "shared": {"extra/a": {"what": 1}}, "ranks": []}', "\x00"):
        (tmp_path / "out" / FILE).write_text(text)
        with refused("CORRUPT"):
            load({"w": torch.ones(1)}, tmp_path / "out", extra={"a": None})


def _save(rank: int, world: int, target: str) -> list[float]:
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    extra = {"rng": Random(), "loader": Loader({"at": 10 + rank}), "schedule": Loader({"epoch": 3})}
    tx.save({"w": torch.arange(4.0)}, target, to="safetensors", extra=extra)
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


def test_another_number_of_ranks_loads_only_states_equal_on_all_ranks(tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    run(2, _save, target)
    with pytest.raises(TransaxleError) as found:
        run(1, _load, target, True)
    assert {r.where.tensor for r in found.value.refusals} == {"extra/rng", "extra/loader"}
    ((_, loader, schedule, missing),) = run(1, _load, target, False)
    assert (loader, schedule) == (None, {"epoch": 3})
    assert set(missing) == {"rng", "loader"}
