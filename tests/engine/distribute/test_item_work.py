"""One plan carried out by several processes: the bytes of one process, whoever dies, comes twice or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import transaxle as tx
from tests import checkpoints
from tests.engine import demand_refusal, killed, quantized
from tests.engine.distribute.arrays import all_of, do, ended, in_child, planned
from tests.engine.killed import contents
from transaxle.engine.distribute import work_plan as plans
from transaxle.engine.distribute.driver import begin_work, commit_work
from transaxle.engine.distribute.item_work import close_plan, do_item
from transaxle.engine.distribute.work_plan import (
    ConversionOrder,
    WorkPlan,
    parse_plan,
    part_of_item,
    read_plan,
    write_plan,
)
from transaxle.engine.views.encode import Encode
from transaxle.errors import Code
from transaxle.formats.registry import SCRATCH
from transaxle.formats.store.place import ITEMS, MOVES, PARTIAL, neighbour
from transaxle.formats.store.staging import Writer
from transaxle.move import journal

SMALL = {**checkpoints.SIZES, "num_hidden_layers": 1, "num_experts": 2}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoints.write(
        tmp_path / "source", checkpoints.tensors(SMALL), config={**checkpoints.CONFIG, **SMALL}, shards=2
    )


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Any:
    yield
    close_plan()


def refused(code: Code, call: Callable[[], object]) -> tx.TransaxleError:
    with demand_refusal(code) as caught:
        call()
    return caught.value


def plain(folder: Path, sizes: dict[str, int] = SMALL) -> Path:
    """A checkpoint in full precision."""
    rng = np.random.default_rng(0)
    held = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in checkpoints.shapes(sizes).items()}
    return checkpoints.write(folder, held, config={**checkpoints.CONFIG, **sizes})


def wide(folder: Path) -> Path:
    """One whose matrices have rows for any encoding."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "head_dim": 16}
    return plain(folder, {**SMALL, **sizes})


def zipped(folder: Path) -> Path:
    """A file of torch whose tensors are parts of one record with a checksum."""
    folder.mkdir()
    values = torch.arange(6000, dtype=torch.float32)
    torch.save({f"w{n}": values[1000 * n :][:1000] for n in range(6)}, folder / "pytorch_model.bin")
    return folder


def encoded(folder: Path) -> Path:
    """A checkpoint with codes of float8 and block scales."""
    held: quantized.Tensors = {}
    tensors = checkpoints.tensors({**SMALL, "hidden_size": 128})
    for name, values in tensors.items():
        if name.endswith("_proj.weight"):
            quantized.put(held, name, values.shape)
        else:
            held[name] = values
    config = {**checkpoints.CONFIG, **SMALL, "hidden_size": 128, "quantization_config": quantized.FP8}
    return checkpoints.write(folder, held, config=config)


CASES: dict[str, tuple[Callable[[Path], Path], str, str, dict[str, Any]]] = {
    "one file with digests": (plain, "out.safetensors", "automodel", {}),
    "dcp": (plain, "out", "dcp:torchtitan", {}),
    "megatron": (plain, "out", "torch_dist", {}),
    "ranks": (plain, "out", "megatron_torch", {"tp": 2}),
    "checksums": (zipped, "out", "safetensors", {}),
    "encoded": (wide, "out", "hf", {"encode": "mxfp8"}),
    "globally scaled": (wide, "out", "hf", {"encode": "nvfp4"}),
    "decoded": (encoded, "out", "hf", {"decode": "bf16"}),
    "cast": (plain, "out", "hf", {"dtype": "bf16"}),
}


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_one_process(case: str, tmp_path: Path) -> None:
    """Items in any order and in two processes, begun twice; more of them than tensors."""
    as_one_process(case, tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize("case", ["one file with digests", "dcp", "checksums"])
def test_workers_share_a_large_tensor(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SPAN", 32)
    plan = as_one_process(case, tmp_path)
    with plan.order.prepare() as prepared:
        spans = prepared.plan.spans
        names = [{each.name for each in part_of_item(prepared.plan, item).tensors} for item in plan.items]
        assert not any(tensor.name in spans for tensor in prepared.plan.tensors if tensor.step is not None)
    assert any(sum(not own.isdisjoint(each.name for each in large) for own in names) > 1 for large in spans.values())
    assert tx.verify(plan.order.target).ok


def as_one_process(case: str, tmp_path: Path) -> WorkPlan:
    make, name, to, options = CASES[case]
    source, target = make(tmp_path / "source"), tmp_path / name
    wanted = tx.convert(source, tmp_path / f"wanted{target.suffix}", to=to, shard_size=8000, **options)
    reading: dict[str, Any] = {key: options[key] for key in ("decode", "dtype") if key in options}
    shaping = {key: value for key, value in options.items() if key == "tp"}
    if "encode" in options:
        shaping["encode"] = Encode(options["encode"])
    plan = planned(source, target, to, 9, reading, **shaping)
    assert parse_plan(plan.text, "PLAN") == msgspec.structs.replace(plan, seal=parse_plan(plan.text, "").seal)
    assert begin_work(plan) == sum(bool(item.nbytes) for item in plan.items)
    through_a_view = case in ("checksums", "decoded", "cast")
    assert all(bool(item.key) != through_a_view for item in plan.items), "a worker plans where it sees through a view"
    numbers = random.Random(0).sample(range(9), 9)
    assert in_child(lambda: do(plan, numbers[:5])) == 0
    do(plan, numbers[5:])
    assert begin_work(plan) == 0
    report = commit_work(plan)
    assert contents(target) == contents(tmp_path / f"wanted{target.suffix}")
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted({"source", name, f"wanted{target.suffix}"})
    same = ("tensors", "bytes_read", "bytes_written", "checks", "kept", "ignored", "carried", "recoded", "stayed")
    assert {key: getattr(report, key) for key in same} == {key: getattr(wanted, key) for key in same}
    assert sum(report.workers.values()) == sum(tensor.nbytes for tensor in tx.open(target).values())
    assert len(report.workers) == 2
    return plan


def test_a_worker_that_dies_at_any_point_is_done_again(source: Path, tmp_path: Path) -> None:
    killed.convert(source, tmp_path / "wanted")
    wanted, target, deaths = contents(tmp_path / "wanted"), tmp_path / "out", 0
    for at in random.Random(1).sample(range(120), 8):
        plan = planned(source, target, killed.TO, 4)
        begin_work(plan)

        def dying(plan: WorkPlan = plan, at: int = at) -> None:
            killed.Death(at).prepare()
            do(plan)

        deaths += bool(in_child(dying))
        assert not target.exists()
        do(plan)
        commit_work(plan)
        assert contents(target) == wanted
        assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "source", "wanted"]
        killed.remove(target)
    assert deaths > 2


def test_a_driver_that_dies_is_followed_by_another(source: Path, tmp_path: Path) -> None:
    """While it begins, and while it commits: then the target is not there, or complete."""
    killed.convert(source, tmp_path / "wanted")
    wanted, target = contents(tmp_path / "wanted"), tmp_path / "out"
    for at in random.Random(2).sample(range(80), 6):
        plan = planned(source, target, killed.TO, 2)

        def dying(plan: WorkPlan = plan, at: int = at) -> None:
            killed.Death(at).prepare()
            all_of(plan)

        in_child(dying)
        if target.exists():
            assert contents(target) == wanted
        else:
            all_of(plan)
        tx.clean(target)
        assert contents(target) == wanted
        assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "source", "wanted"]
        killed.remove(target)


def test_items_done_twice_at_once_are_done_once(source: Path, tmp_path: Path) -> None:
    killed.convert(source, tmp_path / "wanted")
    plan = planned(source, tmp_path / "out", killed.TO, 3)
    begin_work(plan)
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            do(plan)
            os._exit(0)
        children.append(child)
    assert [ended(child) for child in children] == [0, 0, 0]
    first = do_item(plan.text, 1)
    assert do_item(plan.text, 1) == first, "it is not done again"
    commit_work(plan)
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


def test_a_file_system_without_locks(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    killed.convert(source, tmp_path / "wanted")
    monkeypatch.setattr(fcntl, "flock", unsupported)
    plan = planned(source, tmp_path / "out", killed.TO, 3)
    all_of(plan)
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


def test_nothing_is_committed_while_something_is_missing(source: Path, tmp_path: Path) -> None:
    plan, target = planned(source, tmp_path / "out", killed.TO, 4), tmp_path / "out"
    for call in (lambda: commit_work(plan), lambda: do(plan, [0])):
        assert "has not begun" in str(refused("INCOMPLETE", call))
    begin_work(plan)
    do(plan, [0, 2])
    assert "2 of 4 items have no result: 1,3\n" in str(refused("INCOMPLETE", lambda: commit_work(plan)))
    do(plan, [1, 3])
    partial = neighbour(target, PARTIAL)
    result = partial / SCRATCH / ITEMS / "2"
    text = result.read_bytes()
    result.write_bytes(text[:-1] + b" ")
    assert "no result: 2\n" in str(refused("INCOMPLETE", lambda: commit_work(plan))), "a damaged one is none"
    worker = Writer(partial, sync=True, shared=True)
    do(plan)
    assert result.read_bytes() != text, "done again"
    refused("EXISTS", lambda: commit_work(plan))
    worker.close()
    assert not target.exists()
    largest = max((each for each in partial.iterdir() if each.is_file()), key=lambda each: each.stat().st_size)
    os.truncate(largest, 7)
    refused("INCOMPLETE", lambda: commit_work(plan))
    assert not target.exists()
    do(plan)
    commit_work(plan)
    killed.convert(source, tmp_path / "wanted")
    assert contents(target) == contents(tmp_path / "wanted")


def test_a_source_that_changes_is_refused(source: Path, tmp_path: Path) -> None:
    plan = planned(source, tmp_path / "out", killed.TO, 2)
    begin_work(plan)
    do(plan, [0])
    file = next(source.glob("*.safetensors"))
    before = file.read_bytes()
    os.utime(file)
    for call in (lambda: begin_work(plan), lambda: do(plan, [1]), lambda: commit_work(plan)):
        assert "changed or replaced since" in str(refused("CORRUPT", call))
    assert file.read_bytes() == before
    assert not (tmp_path / "out").exists()


def test_plans_that_are_none_are_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = planned(source, tmp_path / "out", killed.TO, 2), tmp_path / "PLAN"
    write_plan(plan, str(path))
    assert read_plan(str(path)).items == plan.items
    refused("EXISTS", lambda: write_plan(plan, str(path)))
    text = path.read_bytes()
    for damaged in (b"", text[:100], text[:-1], b"\xff", b"[]", b"{}", text.replace(b'"number":1', b'"number":0')):
        path.write_bytes(damaged)
        refused("CORRUPT", lambda: read_plan(str(path)))
    path.write_bytes(json.dumps({**json.loads(text), "form": 2, "items": "others"}).encode())
    assert "form 2" in str(refused("UNSUPPORTED", lambda: read_plan(str(path))))
    path.write_bytes(text)
    monkeypatch.setattr(plans, "program_version", lambda: "9.9")
    assert "this is 9.9" in str(refused("UNSUPPORTED", lambda: read_plan(str(path))))


def forbidden(patch: pytest.MonkeyPatch) -> list[str]:
    """Count who plans."""
    planning: list[str] = []
    planned_before = ConversionOrder.prepare

    def counted(order: ConversionOrder) -> Any:
        planning.append(order.source)
        return planned_before(order)

    patch.setattr(ConversionOrder, "prepare", counted)
    return planning


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_other_moves_are_not_done(damage: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker then plans itself."""
    killed.convert(source, tmp_path / "wanted")
    plan = planned(source, tmp_path / "out", killed.TO, 3)
    begin_work(plan)
    moves = neighbour(tmp_path / "out", PARTIAL) / SCRATCH / MOVES
    data = bytearray(moves.read_bytes())
    assert sum(item.size for item in plan.items) == len(data)
    if damage == "changed":
        data[plan.items[1].begin + 100] ^= 1
        moves.write_bytes(data)
    else:
        moves.unlink()
    planning = forbidden(monkeypatch)
    do_item(plan.text, 0)
    assert len(planning) == (damage == "gone")
    do_item(plan.text, 1)
    do_item(plan.text, 2)
    assert len(planning) == 1
    close_plan()
    commit_work(plan)
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


def test_work_of_another_conversion_is_left_alone(source: Path, tmp_path: Path) -> None:
    first, second = (planned(source, tmp_path / "out", to, 2) for to in (killed.TO, "torchtitan"))
    begin_work(first)
    assert "another conversion" in str(refused("EXISTS", lambda: do(second, [0])))
    do(first, [0])
    assert "another conversion" in str(refused("EXISTS", lambda: begin_work(second)))
    with pytest.raises(tx.TransaxleError, match="another conversion"):
        tx.convert(source, tmp_path / "out", to="torchtitan", shard_size=8000, resume=True)
    (left,) = tx.clean(tmp_path / "out", remove=False)
    assert left.what == "unfinished work: 1 work items are done, --resume continues it"
    do(first, [1])
    commit_work(first)


def test_one_process_goes_on_where_several_were(source: Path, tmp_path: Path) -> None:
    killed.convert(source, tmp_path / "wanted")
    plan = planned(source, tmp_path / "out", killed.TO, 3)
    begin_work(plan)
    do(plan, [0, 2])
    report = tx.convert(source, tmp_path / "out", to=killed.TO, shard_size=8000, resume=True)
    assert 0 < report.resumed < report.tensors
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "source", "wanted"]
    again = tx.convert(source, tmp_path / "out", to=killed.TO, shard_size=8000, resume=True)
    assert again.resumed == again.tensors


@pytest.mark.parametrize("span", [journal.SPAN, 256])
def test_another_division_goes_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, span: int) -> None:
    """A driver that resumes may have other workers; what is done of an item that is not complete is done again."""
    monkeypatch.setattr(journal, "SPAN", span)
    killed.convert(source, tmp_path / "wanted")
    begin_work(first := planned(source, tmp_path / "out", killed.TO, 2))
    do(first, [1])
    second = planned(source, tmp_path / "out", killed.TO, 20)
    left = begin_work(second)
    assert 0 < left < 15
    do(second)
    commit_work(second)
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


def test_copies_that_differ_and_values_that_overflow_are_refused(tmp_path: Path) -> None:
    tensors = checkpoints.tensors(SMALL)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    config = {**checkpoints.CONFIG, **SMALL, "tie_word_embeddings": True}
    source = checkpoints.write(tmp_path / "source", tensors, config=config)
    plan = planned(source, tmp_path / "out", "torchtitan", 2)
    begin_work(plan)
    refused("UNEQUAL_COPIES", lambda: do(plan, [0]))
    refused("INCOMPLETE", lambda: commit_work(plan))
    large = tmp_path / "large"
    large.mkdir()
    save_file({"w": np.full(4, 1e30, ml_dtypes.bfloat16)}, large / "model.safetensors")
    plan = planned(large, tmp_path / "cast", "safetensors", 1, {"dtype": "fp16"})
    refused("LOSSY", lambda: all_of(plan))
    assert not (tmp_path / "cast").exists()


def test_a_checksum_that_nobody_read_whole_is_checked(tmp_path: Path) -> None:
    source = zipped(tmp_path / "source")
    file = source / "pytorch_model.bin"
    data = bytearray(file.read_bytes())
    at = data.index(np.arange(3000, 3010, dtype=np.float32).tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    plan = planned(source, tmp_path / "out", "safetensors", 6)
    assert "do not match the checksum" in str(refused("CORRUPT", lambda: all_of(plan)))
    assert not (tmp_path / "out").exists()
