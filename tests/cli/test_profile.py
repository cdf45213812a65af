"""`--profile FILE`: the spans of each thread, with the bytes that were really moved."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import tensors, tiny
from tests.cli.running import REFUSED, USAGE, Transaxle, process

Event = dict[str, Any]


def spans(path: Path) -> list[Event]:
    """Return the spans of a trace, which each have a thread that has a name."""
    events: list[Event] = json.loads(path.read_text("utf-8"))["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    found = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in found} == set(threads)
    assert len(found) + len(threads) == len(events)
    return found


def moved(found: list[Event], name: str) -> int:
    return sum(event["args"]["bytes"] for event in found if event["name"] == name)


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, int]:
    """A checkpoint, and the bytes of its tensors."""
    return tiny(tmp_path / "ck"), sum(tensor.nbytes for tensor in tensors().values())


def test_stages_and_bytes_are_those_of_the_conversion(source: tuple[Path, int], tmp_path: Path) -> None:
    folder, size = source
    done = process("convert", folder, tmp_path / "out", "--to", "torch_dist", "--profile", tmp_path / "trace.json")
    assert done.code == 0, done.err
    found = spans(tmp_path / "trace.json")
    stages = [event["name"] for event in found if event["name"] not in {"read", "write", "hash"}]
    order = ["import", "open", "plan", "lay out files", "create files", "move", "write index and manifest", "commit"]
    assert [name for name in stages if name in order and name != "move"] == [each for each in order if each != "move"]
    assert moved(found, "read") >= size
    assert moved(found, "write") >= size
    assert moved(found, "hash") >= size
    main = [event for event in found if event["name"] in order and event["name"] != "lay out files"]
    assert len({event["tid"] for event in main}) == 1
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(main)), "stages follow one another"
    plan, inner = (next(event for event in found if event["name"] == name) for name in ("plan", "lay out files"))
    assert plan["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= plan["ts"] + plan["dur"]
    begun = found[0]
    assert begun["name"] == "import"
    assert begun["ts"] == 0


def test_each_thread_has_its_own_name(tmp_path: Path, transaxle: Transaxle) -> None:
    ck = tiny(tmp_path / "ck")
    assert transaxle("verify", ck, ck, "--jobs", "3", "--profile", tmp_path / "t").code == 0
    by_thread = defaultdict(list)
    for event in spans(tmp_path / "t"):
        by_thread[event["tid"]].append(event)
    for events in by_thread.values():  # of one thread, spans lie inside one another or apart
        ends: list[float] = []
        for event in events:
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3
            ends.append(event["ts"] + event["dur"])


def test_a_failing_command_writes_its_trace(source: tuple[Path, int], tmp_path: Path, transaxle: Transaxle) -> None:
    (file,) = source[0].glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    outcome = transaxle("convert", source[0], tmp_path / "out", "--to", "hf", "--profile", tmp_path / "t")
    assert outcome.code == REFUSED
    assert "open" in {event["name"] for event in spans(tmp_path / "t")}


def test_an_existing_file_is_not_replaced(source: tuple[Path, int], tmp_path: Path, transaxle: Transaxle) -> None:
    (tmp_path / "t").write_text("mine")
    outcome = transaxle("convert", source[0], tmp_path / "out", "--to", "hf", "--profile", tmp_path / "t")
    assert outcome.code == USAGE
    assert "already exists" in outcome.err
    assert (tmp_path / "t").read_text() == "mine"
    assert not (tmp_path / "out").exists()


def test_a_trace_per_rank_by_an_environment_variable(
    source: tuple[Path, int], tmp_path: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSAXLE_TRACE", str(tmp_path / "trace.json"))
    assert transaxle("diff", source[0], source[0]).code == 0
    monkeypatch.setenv("RANK", "3")
    assert transaxle("diff", source[0], source[0]).code == 0
    assert spans(tmp_path / "trace.json")
    assert spans(tmp_path / "trace.rank3.json")
    monkeypatch.delenv("TRANSAXLE_TRACE")
    assert transaxle("diff", source[0], source[0]).code == 0
    assert len(list(tmp_path.glob("trace*"))) == 2
