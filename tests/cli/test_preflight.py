"""`plan` exits as `convert` would and leaves nothing behind; `plan --write` and `work` convert in steps."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import transaxle as tx
from tests.checkpoints import CONFIG, write
from tests.cli.running import MACHINE, REFUSED, USAGE, Transaxle, process, tree
from transaxle.cli.command import program
from transaxle.formats.store.staging import Staging

Outcome = tuple[int, list[str]]
POWERLESS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
"""
"""Gives up what lets root pass permissions by, so that they mean something wherever the tests run."""


def _everything() -> dict[str, tuple[int, int]]:
    """Return every path below the working directory with its size and time of change."""
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in sorted(Path().rglob("*"))}


def _both(transaxle: Transaxle, *arguments: str | Path) -> Outcome:
    """Run `plan` and then `convert` with the same arguments; check that they agree and that `plan` writes nothing."""
    before = _everything()
    arguments = (*arguments, "--no-sync", "--json")
    planned = transaxle("plan", *arguments)
    assert _everything() == before, "a plan changes nothing"
    done = transaxle("convert", *arguments)
    assert planned.code == done.code, (planned.out, done.out)
    codes = [planned.codes if planned.code else [], done.codes if done.code else []]
    assert codes[0] == codes[1]
    if done.code and "put back" not in planned.out:
        assert [r["message"] for r in planned.json["error"]["refusals"]] == [
            r["message"] for r in done.json["error"]["refusals"]
        ]
    return done.code, codes[0]


def _nothing() -> None:
    pass


def _checkpoint_there() -> None:
    shutil.copytree("ck", "out")


def _notes_there() -> None:
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")


def _notes_beside_there() -> None:
    _checkpoint_there()
    Path("out/notes.txt").write_text("mine")


def _file_there() -> None:
    Path("out").write_text("mine")


def _dead_link_there() -> None:
    Path("out").symlink_to("gone")


def _moved_aside() -> None:
    """Leave what a run leaves that dies between the two renames on a file system without exchange."""
    shutil.copytree("ck", ".out.transaxle-old")


def _finished() -> None:
    tx.convert("ck", "out", to="torchtitan")


def _no_shard() -> None:
    Path("ck/model.safetensors").unlink()


def _truncated() -> None:
    os.truncate("ck/model.safetensors", 5000)


@pytest.mark.parametrize(
    ("make", "target", "options", "expected"),
    [
        (_nothing, "out", (), (0, [])),
        (_checkpoint_there, "out", (), (USAGE, ["EXISTS"])),
        (_checkpoint_there, "out", ("--overwrite",), (0, [])),
        (_checkpoint_there, "out", ("--resume",), (USAGE, ["EXISTS"])),
        (_finished, "out", ("--resume",), (0, [])),
        (_finished, "out", (), (USAGE, ["EXISTS"])),
        (_notes_there, "out", (), (USAGE, ["EXISTS"])),
        (_notes_there, "out", ("--overwrite",), (USAGE, ["EXISTS"])),
        (_file_there, "out", ("--overwrite",), (USAGE, ["EXISTS"])),
        (_dead_link_there, "out", (), (USAGE, ["EXISTS"])),
        (_moved_aside, "out", (), (USAGE, ["EXISTS"])),
        (_nothing, "no/such/out", (), (MACHINE, ["IO"])),
        (_nothing, "ck/config.json/out", (), (USAGE, ["EXISTS"])),
        (_nothing, "/", ("--overwrite",), (USAGE, ["EXISTS"])),
        (_nothing, "n" * 300, (), (MACHINE, ["IO"])),
        (_nothing, "ck", (), (USAGE, ["EXISTS"])),
        (_nothing, "ck", ("--overwrite",), (USAGE, ["EXISTS"])),
        (_nothing, "ck/sub", (), (USAGE, ["EXISTS"])),
        (_nothing, "ck/sub", ("--overwrite=everything",), (USAGE, ["EXISTS"])),
        (_notes_there, "out", ("--overwrite=everything",), (USAGE, ["EXISTS"])),
        (_notes_beside_there, "out", ("--overwrite",), (USAGE, ["EXISTS"])),
        (_notes_beside_there, "out", ("--overwrite=everything",), (0, [])),
        (_nothing, ".", ("--overwrite",), (USAGE, ["EXISTS"])),
        (_nothing, "out.pt", (), (REFUSED, ["UNSUPPORTED"])),
        (_nothing, "memory://bucket/out", ("--resume",), (REFUSED, ["UNSUPPORTED"])),
        (_nothing, "nowhere://bucket/out", (), (REFUSED, ["UNSUPPORTED"])),
        (_no_shard, "out", (), None),
        (_truncated, "out", (), (REFUSED, ["CORRUPT"])),
    ],
)
def test_plan_exits_with_what_convert_would(
    make: Callable[[], None], target: str, options: tuple[str, ...], expected: Outcome | None, ck: Path,
    transaxle: Transaxle,
) -> None:  # fmt: skip
    make()
    found = _both(transaxle, ck, target, "--to", "torchtitan", *options)
    assert found[0] if expected is None else found == expected
    assert make is not _moved_aside or (Path("out/model.safetensors").is_file() and not list(Path().glob(".out*")))


def test_plan_while_another_run_is_writing(ck: Path, transaxle: Transaxle) -> None:
    with Staging("out"):
        assert _both(transaxle, ck, "out", "--to", "torchtitan") == (USAGE, ["EXISTS"])
    assert _both(transaxle, ck, "out", "--to", "torchtitan") == (0, [])


def test_plan_without_space_on_the_disk(ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10**6, free=20_000))
    assert _both(transaxle, ck, "out", "--to", "torchtitan") == (MACHINE, ["NO_SPACE"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10**6, free=40_000))
    assert _both(transaxle, ck, "out", "--to", "torchtitan") == (0, [])


def test_file_systems_of_no_size_are_not_full(ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of FUSE say zeros; those of the kernel that hold no files, such as /sys, refuse the first one."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, free=0))
    assert _both(transaxle, ck, "out", "--to", "torchtitan") == (0, [])


@pytest.mark.parametrize("what", ["folder", "tensors", "config", "tokenizer"])
def test_plan_without_permissions(what: str, ck: Path, here: Path) -> None:
    (ck / "tokenizer.json").write_text("{}")
    (here / "there").mkdir()
    names = {"tensors": "model.safetensors", "config": "config.json", "tokenizer": "tokenizer.json"}
    locked = here / "there" if what == "folder" else ck / names[what]
    locked.chmod(0o500 if what == "folder" else 0)
    before = _everything()
    try:
        arguments = (ck, "there/out", "--to", "torchtitan", "--json")
        outcomes = [process(command, *arguments, before=POWERLESS, cwd=here) for command in ("plan", "convert")]
    finally:
        locked.chmod(0o700)
    assert [outcome.code for outcome in outcomes] == [MACHINE, MACHINE], outcomes
    assert outcomes[0].codes == outcomes[1].codes == ["IO"]
    assert _everything() == before


def test_all_reasons_are_reported_at_once(ck: Path, transaxle: Transaxle) -> None:
    """Refusals of tensors and refusals of the target are one list."""
    config = json.loads((ck / "config.json").read_text())
    (ck / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 13}))
    code, codes = _both(transaxle, ck, "no/such/out", "--to", "torchtitan")
    assert code == MACHINE
    assert {"IO", "SHAPE_MISMATCH"} == set(codes)


def test_plan_and_convert_take_the_same_options() -> None:
    # of refits, and where a plan is stored
    taken, alone = [], {"meshes", "together", "ranks_per_node", "write"}
    for name in ("plan", "convert"):
        command = program.commands.get(name) or program.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        taken.append(
            [
                (p.name, p.opts, p.secondary_opts, getattr(p, "help", None))
                for p in command.params
                if p.name not in alone
            ]
        )
    assert taken[0] == taken[1]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("out.gguf", "files that end in .gguf cannot be written; a single file ends in .safetensors"),
        ("OUT.GGUF", ".gguf cannot be written"),
        ("out.pth.tar", ".tar cannot be written"),
        ("out.SafeTensors", "do not recognise"),
        ("memory://bucket/out.gguf", ".gguf cannot be written"),
        ("out.pt", "belongs to another format"),
    ],
)
def test_a_target_named_like_a_file_of_another_format(target: str, said: str, ck: Path, transaxle: Transaxle) -> None:
    assert _both(transaxle, ck, target, "--to", "torchtitan") == (REFUSED, ["UNSUPPORTED"])
    assert said in transaxle("plan", ck, target, "--to", "torchtitan").out
    assert not Path(target).exists()


@pytest.mark.parametrize("target", ["Qwen2.5-0.5B", "step.100", "run.best", "v1.0", ".hidden", "out.gguf/"])
def test_a_folder_may_have_a_dot_in_its_name(target: str, ck: Path, transaxle: Transaxle) -> None:
    assert _both(transaxle, ck, target, "--to", "torchtitan") == (0, [])
    assert Path(target).is_dir()


def test_memory_that_does_not_hold_what_is_encoded(here: Path, transaxle: Transaxle) -> None:
    """A given limit is never exceeded."""
    config = {**CONFIG, "hidden_size": 4096, "num_hidden_layers": 1, "intermediate_size": 8}
    wide = np.zeros((256, 4096), np.float32)
    write(here / "wide", {"model.layers.0.mlp.gate_proj.weight": wide}, config=config)
    options = ("--to", "safetensors", "--encode", "float8_block", "--only", "*")
    said = ("wide", "out", *options, "--memory", "384KiB")
    assert _both(transaxle, *said) == (REFUSED, ["UNSUPPORTED"])
    assert "bytes of buffers" in transaxle("plan", *said).out
    assert _both(transaxle, "wide", "out", *options) == (0, [])


# `transaxle plan --write` and `transaxle work`: a conversion in steps, as a job array runs them.

PLAN = ("plan", "ck", "out", "--to", "torchtitan", "--shard-size", "8kB")


def test_the_steps_of_a_job_array(ck: Path, here: Path, transaxle: Transaxle) -> None:
    assert transaxle("convert", ck, "wanted", *PLAN[3:]).code == 0
    transaxle(*PLAN, "--items", "5", "--write", "PLAN").expect(
        0, out="written into PLAN: next  transaxle work PLAN --begin"
    )
    assert len(json.loads((here / "PLAN").read_text("utf-8"))["items"]) == 5
    assert sorted(path.name for path in here.iterdir()) == ["PLAN", "ck", "wanted"], "nothing else is written"
    outcome = transaxle("work", "PLAN", "--begin")
    assert outcome.out.splitlines() == ["5 items of 5 left to do", "  transaxle work PLAN --items 0-4"]
    outcome = transaxle("work", "PLAN", "--items", "3,0-1")
    assert [line.partition(" · ")[0] for line in outcome.out.splitlines()] == ["item 3", "item 0", "item 1"]
    transaxle("work", "PLAN", "--commit").expect(REFUSED, err="transaxle work PLAN --items 2,4.")
    found = json.loads(transaxle("work", "PLAN", "--items", "2-4", "--json").out)["items"]
    assert [item["number"] for item in found] == [2, 3, 4]
    assert json.loads(transaxle("work", "PLAN", "--begin", "--json").out) == {"items": 5, "left": 0}
    transaxle("work", "PLAN", "--commit").expect(0, out="written by 1 process")
    assert tree(here / "out") == tree(here / "wanted")
    assert transaxle("work", "PLAN", "--items", "0").code == REFUSED, "there is nothing left to work on"
    assert transaxle("work", "PLAN", "--begin").code == USAGE, "the target exists"


@pytest.mark.parametrize("above", [False, True], ids=["own config", "config of the run"])
def test_workers_read_the_step_that_was_planned(ck: Path, here: Path, transaxle: Transaxle, *, above: bool) -> None:
    """A later step in the run's folder is not read instead; where the folder is searched again, it is refused."""
    assert transaxle("convert", ck, "wanted", *PLAN[3:]).code == 0
    step = here / "run" / "checkpoints" / "checkpoint_1"
    shutil.copytree(ck, step)
    if above:
        shutil.move(step / "config.json", here / "run" / "config.json")
    planned = transaxle("plan", "run", "out", *PLAN[3:], "--items", "3", "--write", "PLAN")
    assert "note: the source is run/checkpoints/checkpoint_1, which was found in the folder" in planned.out
    for asked in (("--begin",), ("--items", "0")):
        assert transaxle("work", "PLAN", *asked).code == 0
    shutil.copytree(step, step.with_name("checkpoint_2"))
    code, refusal = (USAGE, "checkpoint_2, checkpoints/checkpoint_1") if above else (0, "")
    transaxle("work", "PLAN", "--items", "1-2").expect(code, err=refusal)
    shutil.rmtree(step.with_name("checkpoint_2"))
    assert not above or transaxle("work", "PLAN", "--items", "1-2").code == 0
    assert transaxle("work", "PLAN", "--commit").code == 0
    assert transaxle("verify", "wanted", "out").code == 0
    assert (here / "out" / "config.json").read_bytes() == (here / "wanted" / "config.json").read_bytes()


def test_a_stored_plan_is_executed(ck: Path, here: Path, transaxle: Transaxle) -> None:
    """A table and a config of one's own are in the plan: their files may be gone."""
    config = here / "config.json"
    config.write_bytes((ck / "config.json").read_bytes())
    (ck / "config.json").unlink()
    rules = here / "my.rules"
    rules.write_text("# nothing of my own\n", "utf-8")
    more = ("--config", config, "--rules", rules)
    assert transaxle("convert", ck, "wanted", *PLAN[3:], *more).code == 0
    assert transaxle(*PLAN, "--write", "PLAN", "--jobs", "1", *more).code == 0
    config.unlink()
    rules.unlink()
    outcome = transaxle("work", "PLAN")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith(f"{here / 'out'} · safetensors · torchtitan")
    assert tree(here / "out") == tree(here / "wanted")
    for step, code in (("", "EXISTS"), ("--begin", "EXISTS"), ("--commit", "INCOMPLETE"), ("--items=0", "INCOMPLETE")):
        done = transaxle("work", "PLAN", *step.split(), "--json")
        assert done.codes == [code]
        assert "transaxle verify" in done.json["error"]["refusals"][0]["hint"], "no step of work has --overwrite"
    assert transaxle("verify", "out").code == 0


@pytest.mark.parametrize("typed", ["", "a", "1-", "-1", "3-1", "0,,1", "1..2", "9999999999"])
def test_invalid_worker_numbers_are_usage_errors(typed: str, ck: Path, transaxle: Transaxle) -> None:
    transaxle(*PLAN, "--items", "2", "--write", "PLAN")
    assert transaxle("work", "PLAN", "--items", typed).code == USAGE


def test_options_that_exclude_each_other(ck: Path, here: Path, transaxle: Transaxle) -> None:
    assert transaxle(*PLAN, "--items", "2").code == USAGE
    assert transaxle(*PLAN, "--items", "2", "--write", "PLAN").code == 0
    assert transaxle(*PLAN, "--items", "2", "--write", "PLAN").code == USAGE, "PLAN exists"
    assert transaxle("work", "PLAN", "--begin", "--commit").code == USAGE
    assert "the plan has the items 0-1, and not 2-4" in transaxle("work", "PLAN", "--items", "1-4").err
    assert transaxle("work", "ck", "--begin").code == REFUSED
    assert transaxle("plan", "ck", "ck/out", "--to", "hf", "--write", "other").code == USAGE
    assert not (here / "other").exists(), "a plan that cannot run is not written"
