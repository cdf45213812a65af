"""`check` against transformers itself: what it finds is what `from_pretrained` does with the same files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.engine.packed import Made, awq, gptq
from tests.oracles.quiet import quiet
from tests.readers.planted import FAULTS, config_of, make_packed, with_key
from transaxle.cli import main
from transaxle.readers.reader import READERS
from transaxle.verbs import Unverified

CONFIG: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 128, "tie_word_embeddings": False, "max_position_embeddings": 64, "rope_theta": 1e6,
}  # fmt: skip
WEIGHTS = "model.safetensors"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("hub") / "qwen"
    torch.manual_seed(0)
    with quiet():
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).save_pretrained(folder)
    return folder


@pytest.fixture
def planted(hub: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the checkpoint with other tensors or another config."""

    def plant(tensors: Callable[[Tensors], None] = lambda _: None, **config: Any) -> Path:
        folder = tmp_path / "planted"
        shutil.copytree(hub, folder)
        stored = load_file(folder / WEIGHTS)
        tensors(stored)
        save_file(stored, folder / WEIGHTS, {"format": "pt"})
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | config), "utf-8")
        return folder

    return plant


def loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model that transformers loads, and what it reports."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True
        )
    return model, info


def kinds(verdict: tx.Check) -> dict[str, tuple[str, ...]]:
    return {finding.kind: finding.names for finding in verdict.findings if finding.wrong}


def test_a_good_checkpoint_loads_and_is_kept_in_the_cache(hub: Path, cache: Path) -> None:
    first = tx.check(hub, "transformers")
    assert first.ok
    assert first.findings == ()
    assert first.traced == "run"
    assert len(list(cache.rglob("transformers-*.json"))) == 1
    again = tx.check(hub, "transformers")
    assert (again.ok, again.traced) == (True, "cache")
    assert "4 tensors" not in str(again)
    assert str(again).startswith(f"{hub}: transformers ")


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        ("ValueError: no such layer (a.py, line 1)", True),
        ("MemoryError:  (a.py, line 1)", False),
        ("OSError: [Errno 28] No space left on device", False),
        ("torch.OutOfMemoryError: Allocation failed", False),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory", False),
    ],
)
def test_an_error_of_the_machine_is_not_kept(hub: Path, cache: Path, error: str, is_kept: bool) -> None:
    before = {*cache.rglob("*.json")}
    runs = "transaxle.readers.reader_runs"
    key = f"{len(before)}-{is_kept}"
    with patch(f"{runs}._run", return_value={"unbuilt": error}), patch(f"{runs}._key", return_value=key):
        assert not tx.check(hub, "transformers").ok
    assert bool({*cache.rglob("*.json")} - before) is is_kept


@pytest.mark.usefixtures("in_process")
def test_a_missing_expert_is_named(planted: Callable[..., Path]) -> None:
    folder = planted(lambda tensors: tensors.__delitem__(EXPERT))
    verdict = tx.check(folder, "transformers")
    assert kinds(verdict)["absent"] == (EXPERT,)
    assert any("mlp.experts.gate_up_proj" in name for names in kinds(verdict).values() for name in names)
    with pytest.raises(RuntimeError):
        loaded(folder)


@pytest.mark.usefixtures("in_process")
def test_tensors_without_a_parameter_are_named(planted: Callable[..., Path]) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    folder = planted(lambda tensors: tensors.update({bias: torch.ones(64)}))
    verdict = tx.check(folder, "transformers")
    assert kinds(verdict) == {"dropped": (bias,)}
    assert loaded(folder)[1]["unexpected_keys"] == {bias}


@pytest.mark.usefixtures("in_process")
def test_an_absent_head_is_named(planted: Callable[..., Path]) -> None:
    folder = planted(lambda tensors: tensors.__delitem__("lm_head.weight"))
    assert kinds(tx.check(folder, "transformers")) == {"missing": ("lm_head.weight",), "absent": ("lm_head.weight",)}
    assert loaded(folder)[1]["missing_keys"] == {"lm_head.weight"}


@pytest.mark.usefixtures("in_process")
def test_a_size_that_is_not_that_of_the_tensors(planted: Callable[..., Path]) -> None:
    folder = planted(head_dim=32)
    verdict = tx.check(folder, "transformers")
    names = {name for name, *_ in loaded(folder)[1]["mismatched_keys"]}
    assert set(kinds(verdict)["shape"]) == names
    assert "model.layers.0.self_attn.q_proj.weight" in names


@pytest.mark.usefixtures("in_process")
def test_numbered_experts_in_nvfp4_lose_their_scales(hub: Path, tmp_path: Path) -> None:
    """transformers 5.24 leaves out their global scales: the model in memory has other values."""
    tx.convert(hub, tmp_path / "nvfp4", to="hf", encode="nvfp4")
    verdict = tx.check(tmp_path / "nvfp4", "transformers")
    assert {name.rpartition(".")[2] for name in kinds(verdict)["values"]} <= {"gate_up_proj", "down_proj"}
    assert not verdict
    tx.convert(tmp_path / "nvfp4", tmp_path / "plain", to="hf", decode="bf16")
    assert tx.check(tmp_path / "plain", "transformers")


@pytest.mark.usefixtures("in_process")
def test_block_scaled_codes_load_with_their_values(hub: Path, tmp_path: Path) -> None:
    tx.convert(hub, tmp_path / "fp8", to="hf", encode="float8_block")
    verdict = tx.check(tmp_path / "fp8", "transformers")
    assert verdict
    assert verdict.parameters_compared > 20


@pytest.mark.usefixtures("in_process")
def test_plain_modules_under_other_names_get_no_scale_where_codes_have_kernels(tmp_path: Path) -> None:
    """As transformers itself loads the folder when it takes this machine for one with a GPU."""
    from transformers import AutoModelForCausalLM

    folder, down = tmp_path / "fp8", "model.layers.0.mlp.down_proj"
    FAULTS["FP8 without a quantization config"].build(folder)
    stored = load_file(folder / WEIGHTS)
    shape = stored[f"{down}.weight"].shape
    del stored[f"{down}.weight_scale_inv"]
    save_file({**stored, f"{down}.weight": torch.ones(shape)}, folder / WEIGHTS, {"format": "pt"})
    section = config_of(folder)["quantization_config"]
    for name, lost in (
        ("model.language_model" + down.removeprefix("model"), {f"{down}.weight_scale_inv"}),
        (down, set()),
    ):
        with_key("quantization_config", {**section, "modules_to_not_convert": ["lm_head", name]})(folder)
        with (
            quiet(),
            patch.object(torch.cuda, "is_available", lambda: True),
            patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        ):
            model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, device_map="cpu")
        assert info["missing_keys"] == lost
        assert (model.get_submodule(down).weight.dtype == torch.float8_e4m3fn) is bool(lost)
        assert {*kinds(tx.check(folder, "transformers")).get("missing", ())} == lost


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("form", [gptq, awq])
def test_codes_for_which_transformers_needs_other_programs(form: Callable[..., Made], tmp_path: Path) -> None:
    make_packed(form, tmp_path / "hub")
    with pytest.raises(ImportError) as error:
        loaded(tmp_path / "hub")
    assert str(error.value) in str(tx.check(tmp_path / "hub", "transformers"))
    tx.convert(tmp_path / "hub", tmp_path / "plain", to="hf", decode="fp16", sync=False)
    assert tx.check(tmp_path / "plain", "transformers")


def test_unknown_readers_and_formats(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(tx.TransaxleError, match="there is no reader 'transfomers'") as unknown:
        tx.check(hub, "transfomers")
    assert "Did you mean transformers?" in unknown.value.hint
    tx.convert(hub, tmp_path / "dcp", to="dcp")
    with pytest.raises(tx.TransaxleError, match="transformers does not open dcp"):
        tx.check(tmp_path / "dcp", "transformers")
    with pytest.raises(tx.TransaxleError, match="this Python cannot be run"):
        tx.check(hub, "transformers", python=tmp_path / "none")


@pytest.mark.usefixtures("in_process")
def test_convert_checks_its_result(hub: Path, tmp_path: Path) -> None:
    """What would not load is written, and the error has the report; unknown readers are refused before anything is."""
    report = tx.convert(hub, tmp_path / "good", to="hf", reader="transformers")
    assert report.check.ok
    with pytest.raises(Unverified, match="transformers puts other values into") as unloadable:
        tx.convert(hub, tmp_path / "bad", to="hf", encode="nvfp4", reader="transformers")
    assert not unloadable.value.report.check
    assert tx.verify(tmp_path / "bad")
    for to, reader in (("hf", "nonsense"), ("dcp", "transformers")):
        with pytest.raises(tx.TransaxleError):
            tx.convert(hub, tmp_path / "none", to=to, reader=reader)
    assert not (tmp_path / "none").exists()
    with pytest.raises(TypeError, match="python and time_limit need reader"):
        tx.convert(hub, tmp_path / "none", to="hf", time_limit=3)


@pytest.mark.usefixtures("in_process")
def test_the_command_exits_with_one(planted: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = planted(lambda tensors: tensors.__delitem__("lm_head.weight"))
    assert main(["check", str(folder), "--for", "transformers"]) == 1
    shown = capsys.readouterr().out
    assert "does not load it as it is" in shown
    assert "lm_head.weight" in shown


def test_the_help_names_every_reader(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in READERS if name not in shown] == []
