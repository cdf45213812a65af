"""The test kit for frameworks: right loaders pass every round, and each planted fault is named."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

from tests.oracles.quiet import quiet
from transaxle import testkit
from transaxle.errors import TransaxleError

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))

State = dict[str, Any]


def by_transformers(folder: Path) -> State:
    """A framework that uses models of transformers."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return dict(model.state_dict())


def by_files(folder: Path) -> State:
    """A framework with the hub's names, whose loader reads every file."""
    state: State = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path)
    return state


def swapped(folder: Path) -> State:
    state = by_files(folder)
    return state | {GATE: state[UP], UP: state[GATE]}


def of_first_file(folder: Path) -> State:
    """A loader that ignores the index: what is in further files keeps its first values."""
    files = sorted(folder.glob("*.safetensors"))
    first = load_file(files[0])
    return {name: first.get(name, torch.zeros_like(value)) for name, value in by_files(folder).items()}


def without_gate(folder: Path) -> State:
    return {name: value for name, value in by_files(folder).items() if name != GATE}


@pytest.mark.parametrize("model", ["qwen3_moe", SMALL], ids=["model type", "config"])
def test_transformers_passes_every_round(model: Any) -> None:
    rounds = testkit.run(by_transformers, model)
    assert rounds, str(rounds)
    assert {each.outcome for each in rounds.rounds} == {"equal"}
    assert len(rounds.rounds) > 15


@pytest.mark.parametrize(
    ("loader", "problem"),
    [
        (swapped, f"{GATE} differs in "),
        (of_first_file, "elements, first at [0, 0]: the loader has 0.0 where the table gives "),
        (without_gate, f"the loader returns no {GATE}"),
    ],
)
def test_a_wrong_loader_is_named_with_the_tensor(loader: Callable[[Path], State], problem: str) -> None:
    rounds = testkit.run(loader, SMALL)
    assert not rounds
    assert any(problem in each.problem for each in rounds.rounds if each.outcome == "different"), str(rounds)
    lines = str(rounds).splitlines()
    assert lines[1].startswith("  the loader differs from the table: ")
    assert problem in lines[1]
    assert str(rounds).count(lines[1].partition(": ")[2]) == 1, "one problem is said once"


def test_a_loader_that_depends_on_the_files_is_named() -> None:
    """Transaxle writes one file here; the first folder has two."""

    def loader(folder: Path) -> State:
        state = by_files(folder)
        return state if len([*folder.glob("*.safetensors")]) > 1 else state | {GATE: torch.zeros_like(state[GATE])}

    rounds = testkit.run(loader, SMALL)
    assert not rounds
    assert "the loader makes other tensors of the files that Transaxle writes" in str(rounds).splitlines()[1]
    assert f"{GATE} differs in " in str(rounds)
    assert "the loader has 0.0 for files that Transaxle writes, " in str(rounds)


def test_buffers_that_no_checkpoint_has_are_skipped() -> None:
    def loader(folder: Path) -> State:
        return by_files(folder) | {"rope.cache": torch.ones(3)}

    assert testkit.run(loader, SMALL, skip="rope.*")
    assert "the loader returns rope.cache, which no checkpoint has" in str(testkit.run(loader, SMALL))


def test_what_is_no_state_dict() -> None:
    with pytest.raises(TypeError, match=r"tensors of torch only; 'step' is int"):
        testkit.run(lambda folder: by_files(folder) | {"step": 3}, SMALL)
    with pytest.raises(TypeError, match="the loader returned NoneType; it must return the state dict"):
        testkit.run(lambda _: None, SMALL)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda _: {}, "without tensors"),
        (lambda value: {GATE: value.to("meta")}, f"'{GATE}' is on the meta device: the loader has given it no values"),
        (lambda value: {GATE: value.to(torch.complex64)}, f"real numbers; '{GATE}' is torch.strided, torch.complex64"),
        (lambda value: {GATE: value.to_sparse()}, f"dense tensors of real numbers; '{GATE}' is torch.sparse_coo"),
        (lambda value: {3: value}, "name tensors by texts; 3 is int"),
    ],
)
def test_tensors_without_comparable_values(change: Callable[[torch.Tensor], Any], problem: str) -> None:
    """The imaginary parts of complex values would not be compared."""
    with pytest.raises(TypeError, match=re.escape(problem)):
        testkit.run(lambda folder: change(by_files(folder)[GATE]), SMALL)


def test_divided_tensors(tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(TypeError, match=r"return its full_tensor\(\)"):
            testkit.run(lambda folder: {GATE: distribute_tensor(by_files(folder)[GATE], mesh)}, SMALL)
    finally:
        dist.destroy_process_group()


def ends(_folder: Path) -> State:
    sys.exit(0)


def test_a_loader_that_ends_the_program_is_no_success() -> None:
    with pytest.raises(RuntimeError, match="the loader ended the program, with the exit code 0"):
        testkit.main([f"{__name__}:ends", "llama"])


def test_unknown_models_are_refused() -> None:
    with pytest.raises(TransaxleError, match="no model type 'qwen3_mo'") as caught:
        testkit.run(by_files, "qwen3_mo")
    assert "Did you mean qwen3_moe" in caught.value.refusals[0].hint
    with pytest.raises(TransaxleError, match="no such file or folder") as caught:
        testkit.run(by_files, "configs/none.json")
    assert caught.value.code == "IO"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL), "utf-8")
    assert testkit.main([f"{__name__}:by_files", str(config)]) == 0
    assert "rounds equal, dialect hf" in capsys.readouterr().out
    assert testkit.main([f"{__name__}:swapped", str(config)]) == 1
    assert f"{GATE} differs in " in capsys.readouterr().out
    assert testkit.main([f"{__name__}:no_such", str(config)]) == 3
    assert "Name the function as MODULE:FUNCTION" in capsys.readouterr().err


def test_the_example_of_torchtitan() -> None:
    spec = importlib.util.spec_from_file_location("titan_testkit", EXAMPLES / "titan_testkit.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    with quiet():
        spec.loader.exec_module(example)
        rounds = testkit.run(example.load_hub, example.CONFIG)
    assert rounds, str(rounds)
    assert rounds.dialect.startswith("torchtitan@")
