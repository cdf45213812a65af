"""Interrupted conversions: nothing looks complete, and a continued one writes the same bytes under any hash seed."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import transaxle as tx
from tests import checkpoints
from tests.cli.running import HUNG_UP, INTERRUPTED, TERMINATED, USAGE, Transaxle, command, process, tree
from tests.engine import quantized
from tests.engine.killed import contents

SLOWLY = """
import time
from transaxle.formats.store.staging import Staging
from transaxle.formats.storage import copier
copier.load_steps = lambda: None
write = Staging.pwrite
def slowly(*arguments):
    time.sleep(0.05)
    write(*arguments)
Staging.pwrite = slowly
"""
ENOUGH = 5
"""Lines of the journal, about one a tensor, that must be there before the end comes."""
CONVERT = ("convert", "ck", "out", "--to", "torchtitan", "--jobs", "2")


def _journal(folder: Path) -> int:
    """Count the tensors that a run in progress has finished."""
    journals = list(folder.glob(".out.transaxle-partial/.transaxle/*"))
    return sum(len(journal.read_bytes().splitlines()) for journal in journals if journal.is_file())


@contextmanager
def _running(*arguments: str, before: str = SLOWLY, screen: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """Start a slow conversion and wait until it has written some tensors.

    Args:
        arguments: of the program.
        before: Python that makes it slow.
        screen: a terminal for what is not the result.
    """
    line, environment = command(*arguments, before=before), os.environ | {"TERM": "xterm"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=screen, text=True, env=environment) as running:
        while _journal(Path()) <= ENOUGH:
            assert running.poll() is None, running.communicate()
            time.sleep(0.01)
        yield running


def _hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_killed_and_continued_gives_the_same_bytes(ck: Path, transaxle: Transaxle) -> None:
    with _running(*CONVERT) as running:
        running.send_signal(signal.SIGKILL)
    assert not Path("out").exists()
    assert _hidden(Path()) == [".out.transaxle-partial"]
    assert transaxle("ls", "out").code == 4
    assert transaxle("ls", ".out.transaxle-partial").code != 0, "what is not finished must not open"
    report = transaxle(*CONVERT, "--resume", "--json").json
    assert 0 < report["resumed"] < report["tensors"]
    assert _hidden(Path()) == []
    assert transaxle("convert", "ck", "whole", "--to", "torchtitan").code == 0
    assert tree(Path("out")) == tree(Path("whole"))


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, INTERRUPTED, "interrupted"),
        (signal.SIGTERM, TERMINATED, "stopped by SIGTERM"),
        (signal.SIGHUP, HUNG_UP, "stopped by SIGHUP"),
    ],
)
def test_signals_leave_what_resume_needs(number: signal.Signals, code: int, said: str, resume: bool, ck: Path) -> None:
    with _running(*CONVERT, *["--resume"] * resume) as running:
        running.send_signal(number)
        if number != signal.SIGINT:
            running.send_signal(number)  # what comes while it is putting things in order does not disturb that
        out, err = running.communicate(timeout=600)
    left = "run the same command again to continue" if resume else "nothing was written"
    assert (running.returncode, out, err) == (code, "", f"{said}, {left}\n")
    assert not Path("out").exists()
    assert _hidden(Path()) == [".out.transaxle-partial"] * resume


def test_nohup_is_respected(ck: Path, transaxle: Transaxle) -> None:
    ignoring = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{SLOWLY}"
    with _running(*CONVERT, before=ignoring) as running:
        running.send_signal(signal.SIGHUP)
        assert running.wait(600) == 0
    assert transaxle("verify", ck, "out").code == 0


def test_the_cursor_comes_back(ck: Path) -> None:
    outer, inner = pty.openpty()
    with _running(*CONVERT, screen=inner) as running:
        running.send_signal(signal.SIGTERM)
        assert running.wait(600) == TERMINATED
    os.close(inner)
    shown = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(outer, 1 << 16):
            shown += part
    os.close(outer)
    assert b"\x1b[?25l" in shown, "the bar hides the cursor"
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert _hidden(Path()) == []


def test_a_terminal_that_is_gone(ck: Path) -> None:
    outer, inner = pty.openpty()
    with _running(*CONVERT, screen=inner) as running:
        os.close(inner)
        os.close(outer)
        running.send_signal(signal.SIGHUP)
        assert running.wait(600) == HUNG_UP
    assert not Path("out").exists()
    assert _hidden(Path()) == []


def test_unfinished_work_is_kept_when_another_task_is_given(ck: Path, transaxle: Transaxle) -> None:
    """`--resume` continues the same conversion or refuses; unfinished work stays until `--overwrite` or `clean`."""
    with _running(*CONVERT, "--resume") as running:
        running.send_signal(signal.SIGKILL)
    left = tree(Path(".out.transaxle-partial"))
    said = {
        ("--to", "automodel"): "it writes safetensors:torchtitan@0.3, but this conversion writes safetensors:automodel",
        ("--to", "dcp:torchtitan"): "but this conversion writes dcp:torchtitan@0.3",
        ("--to", "torch:torchtitan"): "but this conversion writes torch:torchtitan@0.3",
        ("--to", "torchtitan", "--shard-size", "10kB"): "with other options",
        ("--to", "torchtitan", "--encode", "float8_block", "--only", "*.w1_EFD"): "with other options",
    }
    for options, reason in said.items():
        for name in ("plan", "convert"):
            outcome = transaxle(name, "ck", "out", *options, "--resume", "--json")
            assert (outcome.code, outcome.codes) == (USAGE, ["EXISTS"]), outcome
            (refusal,) = outcome.json["error"]["refusals"]
            assert reason in refusal["message"]
            assert "begin anew with --overwrite" in refusal["hint"]
            assert tree(Path(".out.transaxle-partial")) == left
    shutil.copytree(ck, "other")
    assert "which is another source" in transaxle("convert", "other", *CONVERT[2:], "--resume").err
    assert tree(Path(".out.transaxle-partial")) == left
    assert transaxle("plan", *CONVERT[1:], "--resume").code == 0
    assert transaxle(*CONVERT, "--resume", "--json").json["resumed"] > 0
    assert transaxle("verify", ck, "out").code == 0


WHILE_IT_IS_IMPORTED = """
import sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "click":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder)
"""


WHILE_A_CLASS_IS_MADE = """
from transaxle.engine.checkpoint import checkpoint
class Interrupted:
    def __set_name__(self, owner, name):
        raise KeyboardInterrupt
def make_a_class(*_, **__):
    type("Made", (), {"member": Interrupted()})
checkpoint.open_container = make_a_class
"""
"""Python 3.11 makes a RuntimeError of it."""


@pytest.mark.parametrize("before", [WHILE_IT_IS_IMPORTED, WHILE_A_CLASS_IS_MADE], ids=["imports", "a class"])
def test_ctrl_c_is_an_interruption_whenever_it_comes(before: str, ck: Path) -> None:
    done = process("ls", ck, before=before)
    assert (done.code, done.out, done.err) == (INTERRUPTED, "", "interrupted\n")


# Identities under hash seeds: plans, manifests, files, reports and work plans do not depend on the order of sets.

SEEDS = 3
KINDS: Mapping[str, tuple[str, ...]] = {
    "merge": ("source", "--to", "automodel", "--merge", "adapter"),
    "decode": ("fp8", "--to", "hf", "--decode", "bf16"),
    "encode": ("plain", "--to", "hf", "--encode", "mxfp8"),
    "ties": ("tied", "--to", "dcp:transformers"),
    "zeros": ("titan", "--to", "hf"),
    "ranks": ("source", "--to", "megatron_torch", "--tp", "2"),
}
"""Conversions, as the command line has them; each is planned, written to a file for workers, reported and done."""
RUN = """
import json, sys
from transaxle.cli import main
def said(*arguments):
    assert not main(list(arguments)), arguments
for kind, (source, *options) in json.loads(sys.argv[1]).items():
    target = f"{kind}-out"
    written = ["--json", "--report", f"{kind}.html", "--write", f"{kind}.work", "--items", "3"]
    said("plan", source, target, *options, *written)
    said("convert", source, target, *options, "--no-sync", "--quiet")
    said("report", target, "--output", f"{kind}-out.html")
    said("info", target, "--json")
"""


def _adapter(folder: Path) -> None:
    """Write an adapter of many weights, with copies of those of the base that it changes as peft stores them."""
    random, base, rank = np.random.default_rng(1), checkpoints.tensors(), 2
    modules = [name.removesuffix(".weight") for name in base if "_proj" in name and "experts" not in name]
    low: dict[str, np.ndarray] = {}
    for module in [*modules, "lm_head"]:
        rows, columns = base[f"{module}.weight"].shape
        shapes = {"A": (rank, columns), "B": (rows, rank)}
        low |= {
            f"base_model.model.{module}.lora_{which}.weight": random.standard_normal(shape).astype(np.float32)
            for which, shape in shapes.items()
        }
    for name in ("lm_head", "model.norm"):
        inside = ".base_layer" if name == "lm_head" else ""
        low[f"base_model.model.{name}{inside}.weight"] = base[f"{name}.weight"].astype(np.float32)
    folder.mkdir()
    save_file(low, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 3, "target_modules": [*modules, "lm_head"]}
    (folder / "adapter_config.json").write_text(json.dumps(said), "utf-8")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    checkpoints.tiny(folder / "source", shards=3)
    _adapter(folder / "adapter")
    sizes = {"d": 128, "f": 256, "g": 2, "r": 2, "head": 64, "layers": 2}
    quantized.store(folder / "fp8", quantized.llama(**sizes))
    quantized.store(folder / "plain", quantized.plain_llama(**sizes))
    tensors = checkpoints.tensors()
    del tensors["lm_head.weight"]
    checkpoints.write(folder / "tied", tensors, config={**checkpoints.CONFIG, "tie_word_embeddings": True})
    tx.convert(folder / "source", folder / "titan", to="dcp:torchtitan", sync=False)
    return folder


def _under(seed: int, folder: Path, *command: str, code: int = 0) -> bytes:
    """Run Python under a hash seed in a folder; return what it prints."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    line = [sys.executable, *command]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, check=False)
    assert done.returncode == code, done.stderr.decode()[-2000:]
    return done.stdout


def _made(seed: int, folder: Path, sources: list[Path], *command: str) -> dict[str, bytes]:
    """Run Python in an empty folder of this name, in which there are links to sources; return the files it leaves."""
    folder.mkdir()
    for path in sources:
        (folder / path.name).symlink_to(path)
    said = _under(seed, folder, *command)
    found = contents(folder)
    shutil.rmtree(folder)
    left_out = {path.name for path in sources}
    return {name: data for name, data in found.items() if name.split("/")[0] not in left_out} | {"said": said}


def test_files_and_plans_are_the_same_under_every_seed(inputs: Path, tmp_path: Path) -> None:
    command = ("-c", RUN, json.dumps(KINDS))
    made = [_made(seed, tmp_path / "here", [*inputs.iterdir()], *command) for seed in range(SEEDS)]
    assert sum(name.endswith((".work", ".html")) for name in made[0]) == 3 * len(KINDS)
    assert sum(name.endswith("transaxle.json") for name in made[0]) == len(KINDS)
    for seed, each in enumerate(made):
        assert each.keys() == made[0].keys()
        different = [name for name, content in each.items() if content != made[0][name]]
        assert not different, f"seed {seed}: {different}"


LIVE = """
import json
from pathlib import Path
import torch
import transaxle as tx
source = tx.open("source")
state = {name: torch.from_numpy(tensor.read().astype("float32")) for name, tensor in source.items()}
for to in ("hf", "dcp:transformers", "megatron_torch"):
    tx.save(state, to.partition(":")[0], to=to, config=dict(source.config), sync=False)
torch.manual_seed(1)
layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "abcdefgh"})
optimizer = torch.optim.AdamW(layers.parameters())
sum(each(torch.ones(2)).sum() for each in layers.values()).backward()
optimizer.step()
tx.save(layers, "trained", to="dcp:identity", optimizer=optimizer, extra={"run": {"a": 1, "b": 2}}, sync=False)
refit = tx.Refit(state, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
print(refit.names, [(item.size, item.transfers) for item in refit._plan.items], refit._plan.parts)
tx.convert("source", "ranks", to="megatron_torch", tp=2, sync=False)
(drifted,) = Path("ranks").rglob("mp_rank_01*/*.pt")
held = torch.load(drifted, weights_only=False)
norms = [name for name in held["model"] if "norm" in name]
for name in norms:
    held["model"][name] += 1
torch.save(held, drifted)
Path("ranks/transaxle.json").unlink()
report = tx.convert("ranks", "mean", to="hf", average=True, sync=False)
assert len(report.recoded) > 3, (report, norms)
print(json.dumps({**report.as_json(), "seconds": 0}))
"""


@pytest.mark.oracle
def test_saves_and_averages_are_the_same_under_every_seed(inputs: Path, tmp_path: Path) -> None:
    made = [_made(seed, tmp_path / "here", [inputs / "source"], "-c", LIVE) for seed in range(2)]  # each imports torch
    saved = {name: data for name, data in made[0].items() if not name.startswith("ranks/")}
    assert len(saved) > 15
    assert [name for name, data in saved.items() if made[1].get(name) != data] == []


KILLED = """
import os
import transaxle as tx
blocks = iter(range(20))
def progress(_):
    if next(blocks, None) is None:
        os._exit(9)
tx.convert("source", "out", to="automodel", merge="adapter", resume=True, jobs=1, progress=progress)
"""
RESUMED = """
import transaxle as tx
print(tx.convert("source", "out", to="automodel", merge="adapter", resume=True, jobs=1).resumed)
"""


def test_a_merge_is_continued_and_shared_under_other_seeds(inputs: Path, tmp_path: Path) -> None:
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    _under(1, tmp_path, "-c", KILLED, code=9)
    assert int(_under(2, tmp_path, "-c", RESUMED)) > 0
    steps = ("--begin", "--items=0", "--items=1", "--commit")
    planned = ("plan", "source", "shared", *KINDS["merge"][1:], "--write", "work", "--items", "2")
    for seed, words in enumerate([planned, *(("work", "work", step) for step in steps)], 3):
        _under(seed, tmp_path, "-m", "transaxle", *words)
    assert (tmp_path / "shared" / checkpoints.WHOLE).read_bytes() == (tmp_path / "out" / checkpoints.WHOLE).read_bytes()
