"""`check` against compressed-tensors itself: what it finds is what its two loading paths do with the same files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.oracles.quiet import quiet
from tests.readers import planted
from tests.readers.reported import REPORTED

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("in_process")]
Spoil = Callable[[str, Callable[[Path], None]], Path]

READER = "compressed-tensors"
DOWN = "model.layers.0.mlp.down_proj"
EXPERT = "model.layers.1.mlp.experts.2.up_proj"
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoints: each form, with zero points, with a plain module, and with packed experts."""
    folder = tmp_path_factory.mktemp("made")
    planted._compressed({**INT4, "symmetric": True}, "bfloat16")(folder / "int4")
    planted._compressed({**INT4, "symmetric": False}, "bfloat16")(folder / "zero points")
    planted._compressed(FP8, "float32")(folder / "fp8")
    planted.FAULTS["an inverted scale of the whole matrix"].build(folder / "nvfp4")
    planted.FAULTS["a list of plain modules in the names of another dialect"].build(folder / "partly")
    REPORTED["stacks of packed experts"].build(folder / "experts")
    return folder


@pytest.fixture
def spoil(made: Path, tmp_path: Path) -> Spoil:
    """Return a function that plants a fault in a copy of a checkpoint."""

    def spoilt(name: str, change: Callable[[Path], None]) -> Path:
        shutil.copytree(made / name, tmp_path / "spoilt")
        change(tmp_path / "spoilt")
        return tmp_path / "spoilt"

    return spoilt


def wrong(verdict: tx.Check) -> dict[str, tuple[str, ...]]:
    return {finding.kind: finding.names for finding in verdict.findings if finding.wrong}


def load(folder: Path) -> dict[str, set[str]]:
    """Return what does not fit when transformers loads with `ModelCompressor`."""
    from transformers import AutoModelForCausalLM

    with quiet():
        _, info = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, dtype="auto"
        )
    misfits = {key: set(info[f"{key}_keys"]) for key in ("missing", "unexpected", "mismatched")}
    misfits["mismatched"] = {name for name, *_ in misfits["mismatched"]}
    return {key: names for key, names in misfits.items() if names}


def decode(folder: Path, target: Path) -> None:
    """Let compressed-tensors convert a checkpoint to plain tensors."""
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer, convert_checkpoint

    with quiet():
        convert_checkpoint(folder, target, CompressedTensorsDequantizer(folder), max_workers=1)


@pytest.mark.parametrize("name", ["int4", "nvfp4", "partly", "experts"])
def test_good_checkpoints_give_no_finding(name: str, made: Path, tmp_path: Path) -> None:
    decode(made / name, tmp_path / "plain")
    verdict = tx.check(made / name, READER)
    assert verdict.ok
    assert [finding for finding in verdict.findings if finding.kind != "note"] == []
    assert verdict.parameters_compared > 20
    if name != "experts":  # transformers' own way with them is another reader's
        assert load(made / name) == {}


@pytest.mark.parametrize("part", ["weight_shape", "weight_scale"])
def test_parts_of_a_code_that_are_absent(part: str, spoil: Spoil, tmp_path: Path) -> None:
    folder = spoil("int4", planted.lose(f"{DOWN}.{part}"))
    assert wrong(tx.check(folder, READER))["missing"] == (f"{DOWN}.{part}",)
    assert load(folder) == {"missing": {f"{DOWN}.{part}"}}
    with pytest.raises(ValueError, match=f"{DOWN}.{part}"):
        decode(folder, tmp_path / "plain")


def test_zero_points_that_only_the_converter_reads(made: Path, tmp_path: Path) -> None:
    """On the meta device, on which transformers builds models, `ModelCompressor` does not pack them."""
    decode(made / "zero points", tmp_path / "plain")
    names = wrong(tx.check(made / "zero points", READER))["shape"]
    assert {"mismatched": set(names)} == load(made / "zero points")


def test_a_plain_module_that_the_config_selects(spoil: Spoil) -> None:
    folder = spoil("partly", planted._ignoring(EXPERT))
    assert wrong(tx.check(folder, READER)) == {"config": (f"{DOWN}.weight",)}
    assert load(folder)["unexpected"] == {f"{DOWN}.weight"}
    assert load(folder)["missing"] == {f"{DOWN}.weight_{part}" for part in ("packed", "scale", "shape")}


def test_codes_that_the_config_does_not_select(spoil: Spoil, tmp_path: Path) -> None:
    folder = spoil("int4", planted._ignoring(DOWN))
    (names,) = wrong(tx.check(folder, READER)).values()
    assert set(names) == {f"{DOWN}.weight_{part}" for part in ("packed", "scale", "shape")}
    assert load(folder) == {"missing": {f"{DOWN}.weight"}, "unexpected": set(names)}
    decode(folder, tmp_path / "plain")
    assert set(names) <= planted.tensors(tmp_path / "plain").keys()


def test_experts_that_transformers_stacks(spoil: Spoil, tmp_path: Path) -> None:
    folder = spoil("experts", planted.lose(f"{EXPERT}.weight_shape"))
    verdict = tx.check(folder, READER)
    assert wrong(verdict)["error"] == (f"{EXPERT}.weight_packed", f"{EXPERT}.weight_scale")
    assert "Missing expected compression param 'weight_shape'" in str(verdict)
    with pytest.raises(ValueError, match=f"{EXPERT}.weight_shape"):
        decode(folder, tmp_path / "plain")


def test_inverted_scales(spoil: Spoil) -> None:
    folder = spoil("nvfp4", lambda folder: planted.retensor(folder, planted._invert))
    (names,) = wrong(tx.check(folder, READER)).values()
    assert f"{DOWN}.weight_global_scale" in names


def test_plain_tensors_at_which_only_the_converter_stops(made: Path, tmp_path: Path) -> None:
    """`ModelCompressor` quantizes no embedding; the converter, which sees names only, takes it for codes."""
    verdict = tx.check(made / "fp8", READER)
    assert verdict.ok
    assert load(made / "fp8") == {}
    assert any("convert_checkpoint stops" in finding.effect for finding in verdict.findings)
    with pytest.raises(ValueError, match="embed_tokens"):
        decode(made / "fp8", tmp_path / "plain")


def test_a_config_that_it_does_not_read(spoil: Spoil) -> None:
    def change(config: planted.Config) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "spiral"

    verdict = tx.check(spoil("nvfp4", lambda folder: planted.reconfigure(folder, change)), READER)
    assert "error" in wrong(verdict)
    assert "does not match expected compressed-tensors quantization format" in str(verdict)


def test_values_that_are_decoded_otherwise(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor

    plain = Compressor.decompress.__func__

    def doubled(cls: Any, state: Any, scheme: Any) -> Any:
        return {name: value * 2 if name == "weight" else value for name, value in plain(cls, state, scheme).items()}

    monkeypatch.setattr(Compressor, "decompress", classmethod(doubled))
    monkeypatch.setenv("XDG_CACHE_HOME", str(made / "other-cache"))
    names = wrong(tx.check(made / "partly", READER))["values"]
    assert f"{DOWN.replace('0', '1')}.weight" in names


def test_other_methods_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # in a process of its own, as users run it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    planted.make(planted.LLAMA, tmp_path / "plain")
    with pytest.raises(tx.TransaxleError, match="this config has none"):
        tx.check(tmp_path / "plain", READER)
