"""Planning and opening grow with the size of a checkpoint and with nothing else: counted in calls, not in seconds.

`benchmarks/planning.py` and `make fuzz` give the seconds and the bytes for the largest there are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from fuzz.resources import chunked_payload, views
from tests.engine import synthetic
from tests.formats.files import FILE, info, made
from tests.work import assert_linear, peak
from tests.work import calls as count_calls
from transaxle.axes.geometry import PieceOverlap, Shard, whole
from transaxle.axes.layout import relayout
from transaxle.axes.notation.family import Formula
from transaxle.axes.notation.name import Name
from transaxle.cli import main
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.plan.conversion import make_plan

MEETS, FORMULAS, FORMATS, MATCHES, PIECES = "meets", "formulas", "names formatted", "names matched", "pieces"
RANKS = 256


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what planning does most."""
    counted: Counter[str] = Counter()

    def count(owner: Any, attribute: str, what: str) -> None:
        real: Callable[..., Any] = getattr(owner, attribute)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted[what] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, counting)

    count(PieceOverlap, "at", MEETS)
    count(relayout, "pieces", PIECES)
    count(Formula, "__call__", FORMULAS)
    count(Name, "format", FORMATS)
    count(Name, "match", MATCHES)
    return counted


@pytest.mark.parametrize("to", ["transformers", "automodel", "megatron"])
def test_each_tensor_of_one_layer_is_met_once(calls: Counter[str], to: str) -> None:
    """A copy is one meeting of two pieces; nobody looks for partners, and layers that are alike are met once."""
    met = {}
    for layers, experts in [(2, 8), (4, 8), (2, 64)]:
        source = synthetic.model(layers, experts)
        calls.clear()
        plan = make_plan(source, to).plan
        assert not plan.refusals
        met[layers, experts] = calls[MEETS]
        assert len(source) <= plan.copies <= 1.2 * len(source)
        assert calls[MATCHES] <= 1.2 * len(source) + 200
        assert calls[FORMATS] <= 1.1 * len(plan.tensors) + 50
    assert met[2, 8] == met[4, 8]
    assert met[2, 64] - met[2, 8] in (0, 3 * (64 - 8)), "experts that a target each takes are alike too"


@pytest.mark.parametrize("to", ["megatron"])
def test_formulas_and_pieces_do_not_grow_with_the_experts(calls: Counter[str], to: str) -> None:
    found = []
    for experts in (8, 128):
        source = synthetic.model(3, experts)
        calls.clear()
        make_plan(source, to)
        found.append((calls[FORMULAS], calls[PIECES]))
    assert found[0] == found[1]


def _rank(source: Checkpoint, to: str, rank: int) -> int:
    """Plan one rank's rows of every tensor; return the number of copies."""
    copies = 0
    for target in source.translation(to).targets.values():
        held = [whole(size) for size in target.shape]
        if held:
            held[0] = Shard()(held[0], RANKS, rank)
        copies += len(source.source.transfers(target, held))
    return copies


@pytest.mark.parametrize("to", ["transformers"])
def test_a_rank_meets_only_what_it_holds(calls: Counter[str], to: str) -> None:
    source = synthetic.model(3, RANKS)
    source.translation(to)
    met = 0
    for rank in (0, 1, 100, RANKS - 1):
        calls.clear()
        copies = _rank(source, to, rank)
        assert calls[MEETS] == copies
        assert copies < 3 * 40, "one expert a layer, and a few rows of the rest"
        met += copies
    assert met > 0


# Checkpoints of a great many parts: what looking at them takes grows with the parts and no faster.

Make = Callable[[Path, int], None]


def _tensors(folder: Path, count: int) -> None:
    held = {f"a.{at // 16}.b.{at}.c": info("U8", [1], at, at + 1) for at in range(count)}
    folder.joinpath(FILE).write_bytes(made(held, bytes(count)))


def _the_same_view(folder: Path, count: int) -> None:
    base = torch.zeros(2)
    torch.save({f"t{at}": base[at % 2 : at % 2 + 1] for at in range(count)}, folder / "model.pt")


def _shards(folder: Path, count: int) -> None:
    names = {f"t{at}": f"model-{at:05}-of-{count:05}.safetensors" for at in range(count)}
    for name, shard in names.items():
        folder.joinpath(shard).write_bytes(made({name: info("U8", [1], 0, 1)}, b"\0"))
    folder.joinpath(f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize(
    ("make", "each"),
    [(_tensors, 1_300), (views, 1_800), (_the_same_view, 1_800), (chunked_payload, 4_000), (_shards, 1_700)],
)
def test_opening_is_linear_in_the_parts_of_a_checkpoint(make: Make, each: int, tmp_path: Path) -> None:
    """`each`: bytes of memory for one more part, while it is opened and looked at."""

    def looking(count: int) -> Callable[[], None]:
        folder = tmp_path / str(count)
        folder.mkdir()
        make(folder, count)

        def work() -> None:
            with tx.open(folder) as found:
                assert sum(tensor.nbytes for tensor in found.values())

        return work

    works = [looking(count) for count in (60, 120, 240)]
    works[0]()  # what it imports counts once
    assert_linear([count_calls(work) for work in works], 1.6)  # beyond some files, the first ones are opened once more
    peaks = [peak(work) for work in works]
    assert (peaks[2] - peaks[1]) / 120 < each, peaks


@pytest.mark.parametrize("arguments", [("ls",), ("info",), ("plan", "OUT", "--to", "safetensors:identity")])
def test_commands_are_linear(arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def running(count: int) -> Callable[[], None]:
        folder = tmp_path / str(count)
        folder.mkdir()
        _tensors(folder, count)
        command, *rest = arguments
        options = [str(tmp_path / "out") if part == "OUT" else part for part in rest]

        def work() -> None:
            assert main([command, str(folder), *options]) == 0

        return work

    works = [running(count) for count in (64, 128, 256)]
    works[0]()
    assert_linear([count_calls(work) for work in works])
    capsys.readouterr()
