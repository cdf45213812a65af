"""`check` of adapters against peft itself: it finds what `PeftModel.from_pretrained` does with the same files."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.oracles.quiet import quiet
from tests.readers.conftest import served
from tests.readers.planted import BASE, FAULTS, LLAMA, make
from tests.readers.real_readers import run_peft

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
LAYERS = "base_model.model.model.layers"
Tensors = dict[str, torch.Tensor]

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with served(Path(sys.executable), "of_peft", tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DoRA of several ranks, with a trained head, beside its base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    make(LLAMA, folder / BASE)
    settings = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], rank_pattern={"q_proj": 2}, use_dora=True,
        alpha_pattern={"down_proj": 16}, modules_to_save=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    with quiet():
        torch.manual_seed(4)
        get_peft_model(AutoModelForCausalLM.from_pretrained(folder / BASE), settings).save_pretrained(folder / "right")
    settings_file = folder / "right" / SETTINGS
    settings_file.write_text(settings_file.read_text("utf-8").replace(str(folder), "/nowhere"), "utf-8")
    return folder / "right"


def spoilt(adapter: Path, folder: Path, change: Callable[[Tensors], object], **settings: Any) -> Path:
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    path = folder / SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | settings), "utf-8")
    return folder


def kinds(verdict: tx.Check) -> dict[str, tuple[str, ...]]:
    return {finding.kind: finding.names for finding in verdict.findings if finding.wrong}


def test_a_good_adapter_loads_onto_the_config_of_its_base(adapter: Path) -> None:
    with pytest.raises(tx.TransaxleError, match="does not say what its base is like"):
        tx.check(adapter, "peft")
    verdict = tx.check(adapter, "peft", config=adapter.parent / BASE)
    assert verdict.ok
    assert verdict.findings == ()
    assert verdict.tensors == len(load_file(adapter / WEIGHTS))
    with pytest.raises(tx.TransaxleError, match="loads whole models, and this is an adapter"):
        tx.check(adapter, "transformers", config=adapter.parent / BASE)
    with pytest.raises(tx.TransaxleError, match="loads adapters, and this folder has no adapter_config"):
        tx.check(adapter.parent / BASE, "peft")


def test_lost_and_surplus_tensors_and_settings_are_named(adapter: Path, tmp_path: Path) -> None:
    lost, surplus = f"{LAYERS}.1.mlp.down_proj.lora_magnitude_vector", f"{LAYERS}.1.mlp.up_proj.lora_A.weight"

    def change(tensors: Tensors) -> None:
        tensors[surplus] = tensors.pop(lost).reshape(1, -1)

    folder = spoilt(adapter, tmp_path / "spoilt", change, alpha_pattern={"mlp.dwn_proj": 16})
    verdict = tx.check(folder, "peft", config=adapter.parent / BASE)
    assert kinds(verdict) == {"missing": (lost,), "dropped": (surplus,), "config": ()}
    assert "mlp.dwn_proj" in str(verdict)
    right, real = run_peft(adapter.parent / BASE, [adapter, folder])
    assert not right.error
    assert not real.error
    assert not right.equals(real)
    with warnings.catch_warnings(record=True) as warned, quiet():
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        warnings.simplefilter("always")
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(adapter.parent / BASE), folder)
    assert any("layers.1.mlp.down_proj.lora_magnitude_vector" in str(each.message) for each in warned)


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer modules": ({"target_modules": ["q_proj"]}, "dropped"),
    "more modules": ({"target_modules": ["q_proj", "down_proj", "o_proj"]}, "missing"),
    "modules left out": ({"exclude_modules": ["q_proj"]}, "dropped"),
    "fewer layers": ({"layers_to_transform": [1]}, "dropped"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 2]]}, "missing"),
    "other ranks": ({"rank_pattern": {}}, "shape"),
    "no vectors of DoRA": ({"use_dora": False}, "dropped"),
}


def test_settings_that_are_not_those_of_the_files(adapter: Path, tmp_path: Path) -> None:
    def train(tensors: Tensors) -> None:
        tensors.update({name: 1.5 * value for name, value in tensors.items() if "magnitude" in name or "head" in name})

    trained = spoilt(adapter, tmp_path / "trained", train)
    folders = [spoilt(trained, tmp_path / name, dict, **settings) for name, (settings, _) in MISFITS.items()]
    right, *real = run_peft(adapter.parent / BASE, [trained, *folders])
    verdicts = [kinds(tx.check(folder, "peft", config=adapter.parent / BASE)) for folder in folders]
    assert [name for name, each in zip(MISFITS, real, strict=True) if right.equals(each)] == []
    assert [kind in verdict for (_, kind), verdict in zip(MISFITS.values(), verdicts, strict=True)] == [True] * len(
        MISFITS
    )


def test_an_adapter_for_which_peft_changes_its_base(adapter: Path, tmp_path: Path) -> None:
    folder = spoilt(adapter, tmp_path / "pissa", dict, init_lora_weights="pissa", use_dora=False)
    notes = [each for each in tx.check(folder, "peft", config=adapter.parent / BASE).findings if each.kind == "note"]
    assert ["pissa" in note.effect for note in notes] == [True]


def test_stacks_of_an_older_peft_are_named(tmp_path: Path) -> None:
    fault = FAULTS["LoRA of an older peft"]
    fault.build(tmp_path / "right")
    shutil.copytree(tmp_path / "right", tmp_path / "older")
    fault.spoil(tmp_path / "older")
    assert tx.check(tmp_path / "right", "peft").ok
    older = kinds(tx.check(tmp_path / "older", "peft"))
    assert fault.mentions in older["values"]
    assert set(older["shape"]) < set(older["values"]), "the matrices with as many rows as columns have equal shapes"
    fault.spoil(tmp_path / "older")
    (tmp_path / "older" / SETTINGS).write_text(
        (tmp_path / "right" / SETTINGS).read_text("utf-8").replace("peft_version", "by"), "utf-8"
    )
    assert set(kinds(tx.check(tmp_path / "older", "peft"))) == {"values", "config"}
