"""Conversions that are verified: what was written is read back, or nobody is told that all is well."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.checkpoints import tensors, tiny, write
from tests.cli import documents
from tests.cli.running import flip
from tests.engine import quantized
from transaxle.engine.distribute.driver import convert_on
from transaxle.engine.execute import execute
from transaxle.verbs import Unverified

RULES = """family own
  axes l n d=width
  up : l n d
dialect one
  layers.{l}.up = up[n d]
dialect two
  ups = up[l d n]
"""


@pytest.mark.parametrize(
    "options",
    [
        {"to": "dcp:torchtitan"},
        {"to": "hf", "decode": "bf16"},
        {"to": "hf", "dtype": "fp32"},
        {"to": "hf", "decode": "bf16", "only": "*.0.*"},
    ],
    ids=str,
)
def test_what_was_written_is_read_back(options: dict[str, Any], tmp_path: Path) -> None:
    quantized.store(tmp_path / "fp8", quantized.llama(d=256, f=384, g=2, r=2, head=128, layers=1))
    report = tx.convert(tmp_path / "fp8", tmp_path / "out", verify=True, **options)
    assert report.verification is not None
    assert (report.verification.ok, report.verification.against) == (True, "manifest")
    assert report.verification.comparison is not None
    assert report.verification.comparison.equal
    documents.check("convert", report.as_json())
    assert report.as_json()["comparison"]["equal"]
    assert tx.convert(tmp_path / "fp8", tmp_path / "again", **options).verification is None
    if options == {"to": "hf", "decode": "bf16"}:
        coded = tx.convert(tmp_path / "out", tmp_path / "coded", to="hf", encode="mxfp8", verify=True)
        assert coded.verification


def test_an_opened_source_says_how_it_was_opened(tmp_path: Path) -> None:
    """A table of the user's own is needed for the result too."""
    weights = tensors()
    held = {f"layers.{layer}.up": weights[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in range(2)}
    write(tmp_path / "own", held, config={"model_type": "own", "width": 16})
    rules = tmp_path / "own.rules"
    rules.write_text(RULES, "utf-8")
    with tx.open(tmp_path / "own", family="own", rules=rules) as source:
        report = tx.convert(source, tmp_path / "two", to="safetensors:two", verify=True)
        assert report.verification
        assert report.verification.comparison
        assert report.verification.comparison.dialect == "two"
        assert tx.convert(source.as_dialect("two"), tmp_path / "one", to="safetensors:one", verify=True).verification


def test_a_result_that_is_wrong_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path / "ck")

    def damaging(*given: Any, **more: Any) -> tx.Report:
        report = execute(*given, **more)
        flip(Path(report.path) / "model.safetensors", -1)
        return report

    monkeypatch.setattr("transaxle.engine.execute.execute", damaging)
    with pytest.raises(tx.TransaxleError) as found:
        tx.convert(tmp_path / "ck", tmp_path / "out", to="torchtitan", verify=True)
    assert {refusal.code for refusal in found.value.refusals} == {"CORRUPT"}
    assert "it is not what the source has" in str(found.value)
    assert "convert again with overwrite=True" in str(found.value)
    assert tx.convert(tmp_path / "ck", tmp_path / "silent", to="torchtitan").verification is None


def test_a_result_of_workers_is_read_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path / "ck")
    with ThreadPoolExecutor(1) as pool:
        assert tx.convert(tmp_path / "ck", tmp_path / "out", to="torchtitan", on=pool, verify=True).verification

        def damaging(*given: Any, **options: Any) -> tx.Report:
            report = convert_on(*given, **options)
            flip(Path(report.path) / "model.safetensors", -1)
            return report

        monkeypatch.setattr("transaxle.engine.distribute.driver.convert_on", damaging)
        with pytest.raises(Unverified, match="it is not what the source has") as caught:
            tx.convert(tmp_path / "ck", tmp_path / "wrong", to="torchtitan", on=pool, verify=True)
    found = caught.value.report.verification
    assert found is not None
    assert not found.ok
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - just written
    assert (again.refusals, again.report.path) == (caught.value.refusals, str(tmp_path / "wrong"))
