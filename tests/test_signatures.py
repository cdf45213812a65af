"""Wrong arguments that type checkers, and callbacks when they are created, report."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import transaxle as tx

ROOT = Path(__file__).parent.parent
SRC = Path(tx.__file__).parent.parent
RIGHT = """
import torch
import transaxle as tx

model = torch.nn.Linear(2, 2)
tx.open("a", family="llama", config={"model_type": "llama"}, only="*.weight")
tx.plan("a", "b", to="hf", shard_size="5GB", overwrite="everything")
tx.convert("a", "b", to="hf", overwrite=True, jobs=2, axes={"g": 8}, rules="my.rules")
tx.convert("a", "b", to="hf", verify=True)
tx.info("a", family="llama")
tx.check_rules("my.rules", "a")
tx.verify("a", "b", family="llama")
tx.diff("a", "b", decode="bf16")
tx.load(model, "a", family="llama", dtype=torch.bfloat16)
tx.save(model, "b", to="hf", shard_size=5_000_000)
tx.async_save(model, "b", overwrite=True).result()
tx.reshard(model, model, family="llama")
tx.Refit(model, {}, family="llama", bucket="1GB")
tx.refit.VllmRefit(model, "http://127.0.0.1:1", dtype="bf16")
tx.refit.VllmSource(model, dtype="bf16")
tx.refit.named_tensors(model, dtype="bf16")
tx.TrainerCheckpoints(to="hf", family="llama")
tx.AccelerateHooks(model, to="hf", family="llama")
tx.SavePlanner("hf", family="llama", flatten_state_dict=True)
tx.LoadPlanner("hf", family="llama", allow_partial_load=True)
"""
"""Calls as they should be, one a line."""
WRONG = """
import torch
import transaxle as tx

model = torch.nn.Linear(2, 2)
tx.open("a", famly="llama")
tx.open("a", family=3)
tx.plan("a", "b", to="hf", famly="llama")
tx.convert("a", "b", to="hf", overwite=True)
tx.convert("a", "b", to="hf", overwrite="all")
tx.convert("a", "b", to="hf", shard_size=2.5)
tx.convert("a", "b", to="hf", verify="yes")
tx.info("a", famly="llama")
tx.check_rules("my.rules", family="llama")
tx.verify("a", famly="llama")
tx.diff("a", "b", famly="llama")
tx.load(model, "a", famly="llama")
tx.save(model, "b", overwite=True)
tx.async_save(model, "b", overwite=True)
tx.reshard(model, model, famly="llama")
tx.Refit(model, {}, famly="llama")
tx.refit.VllmRefit(model, "http://127.0.0.1:1", famly="llama")
tx.refit.VllmSource(model, famly="llama")
tx.refit.named_tensors(model, famly="llama")
tx.TrainerCheckpoints(famly="llama")
tx.AccelerateHooks(model, overwite=True)
tx.SavePlanner("hf", famly="llama")
tx.LoadPlanner("hf", famly="llama")
"""
"""Calls each of which is wrong, one a line."""
_CALL = "tx."


def _calls(program: str) -> set[int]:
    """Numbers of the lines with calls."""
    return {number for number, line in enumerate(program.splitlines(), 1) if line.startswith(_CALL)}


def _lines_with_errors(tool: str, programs: Mapping[str, str], folder: Path) -> dict[str, set[int]]:
    """Return for each program, by its name, the lines of which a type checker complains."""
    files = [f"{name}.py" for name in programs]
    for file, program in zip(files, programs.values(), strict=True):
        (folder / file).write_text(program, "utf-8")
    if tool == "mypy":
        # As strict as this project is with itself, and with what `make lint` has found out about torch.
        command = [sys.executable, "-m", "mypy", "--output", "json", *(str(folder / file) for file in files)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode in {0, 1}, done.stderr
        complaints = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        found = [(each["file"], each["line"]) for each in complaints if each["severity"] == "error"]
    else:
        (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(SRC)], "include": files}), "utf-8")
        command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode in {0, 1}, done.stderr
        complaints = json.loads(done.stdout)["generalDiagnostics"]
        found = [
            (each["file"], each["range"]["start"]["line"] + 1) for each in complaints if each["severity"] == "error"
        ]
    lines: dict[str, set[int]] = {name: set() for name in programs}
    for file, line in found:
        lines[Path(file).stem].add(line)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("tool", [pytest.param("mypy", marks=pytest.mark.oracle), "pyright"])
def test_type_checkers_catch_wrong_arguments(tool: str, tmp_path: Path) -> None:
    """Both programs are checked by one start, which reads torch once."""
    found = _lines_with_errors(tool, {"right": RIGHT, "wrong": WRONG}, tmp_path)
    assert found == {"right": set(), "wrong": _calls(WRONG)}


def test_planners_take_what_torch_takes() -> None:
    for ours, torchs in ((tx.SavePlanner, DefaultSavePlanner), (tx.LoadPlanner, DefaultLoadPlanner)):
        own, known = inspect.signature(ours).parameters, inspect.signature(torchs).parameters
        assert {name: each.default for name, each in known.items()} == {
            name: own[name].default
            for name in own
            if name not in {"dialect", "family", "source", "config", "trust_copies"}
        }
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'famly'. Did you mean 'family'"):
            ours(famly="llama")  # type: ignore[call-arg]  # what is tried


def _made(**options: Any) -> None:
    """Make both kinds of callbacks."""
    with pytest.raises((TypeError, tx.TransaxleError)) as first:
        tx.TrainerCheckpoints(**options)
    with pytest.raises((TypeError, tx.TransaxleError)) as second:
        tx.AccelerateHooks(torch.nn.Linear(2, 2), **options)
    assert str(first.value).replace("TrainerCheckpoints", "AccelerateHooks") == str(second.value)
    raise first.value


def test_an_argument_that_is_misspelt_is_named_wherever_it_is_declared(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"argument 'overwite'. Did you mean 'overwrite'\?"):
        tx.convert(tmp_path, tmp_path / "out", to="hf", overwite=True)  # type: ignore[call-arg]  # what is tried
    with pytest.raises(TypeError, match=r"argument 'in_plac'. Did you mean 'in_place'\?"):
        tx.Refit({}, {}, in_plac=True)  # type: ignore[call-arg]  # what is tried


def test_callbacks_check_their_arguments_when_they_are_made(tmp_path: Path) -> None:
    """Not only at the first save, after hours of training."""
    refused: list[tuple[dict[str, Any], str]] = [
        ({"to": "safetensrs:hf"}, "there is no format 'safetensrs'"),
        ({"to": "torchtitn"}, "no family has a dialect 'torchtitn'"),
        ({"to": "dcp:torchtitn"}, "Did you mean torchtitan"),
        ({"dialect": "hff"}, "no family has a dialect 'hff'"),
        ({"family": "lama"}, "no family 'lama'"),
        ({"family": "llama", "to": "hff"}, "family llama has no dialect 'hff'"),
        ({"config": tmp_path / "missing.json"}, "missing.json"),
    ]
    for options, message in refused:
        with pytest.raises(tx.TransaxleError, match=message):
            _made(**options)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"famly": "llama"}, "'famly'. Did you mean 'family'"),
        ({"family": 3}, "family must be a str"),
        ({"to": None}, "to must be a str"),
        ({"shard_size": 2.5}, "shard_size must be a number of bytes"),
        ({"sync": "no"}, "sync must be a bool"),
        ({"check_copies": 1}, "check_copies must be a bool"),
        ({"config": 3}, "config must be a path"),
        ({"group": "all"}, "group must be a ProcessGroup"),
    ]
    for options, message in wrong:
        with pytest.raises(TypeError, match=message):
            _made(**options)
    with pytest.raises(TypeError, match="background must be a bool"):
        tx.TrainerCheckpoints(background="no")  # type: ignore[arg-type]  # what is tried
    with pytest.raises(TypeError, match="extra must be a mapping"):
        tx.AccelerateHooks(torch.nn.Linear(2, 2), extra=[1])  # type: ignore[arg-type]  # what is tried
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        tx.AccelerateHooks({}, None)  # type: ignore[arg-type]  # what is tried
    for options in ({}, {"to": "dcp:torchtitan"}, {"to": "dcp"}, {"to": "identity"}, {"family": "llama", "to": "hf"}):
        tx.TrainerCheckpoints(**options)  # type: ignore[arg-type]  # several at once
