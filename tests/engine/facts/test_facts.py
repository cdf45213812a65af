"""What Python is told of checkpoints and tables is what the command line prints as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

import transaxle as tx
from tests.checkpoints import CONFIG, tensors, tiny, write
from tests.cli import documents

RULES = """family small
  model_type small
  axes d=hidden_size
  norm : d
dialect mine
  model.norm.weight = norm[d]
"""


def test_info_is_what_the_command_prints_of_a_checkpoint(tmp_path: Path) -> None:
    tiny(tmp_path / "model")
    told = tx.info(tmp_path / "model")
    assert (told["family"], told["dialect"], told["tensors"]) == ("qwen3_moe", "hf", 69)
    documents.check("info", told | {"transaxle": "", "kernels": "", "python": ""})
    with tx.open(tmp_path / "model") as opened:
        assert tx.info(opened) == told
        assert tx.info(opened.as_dialect("torchtitan"))["tensors"] == 29
        with pytest.raises(TypeError, match="family: pass this to open"):
            tx.info(opened, family="llama")


def test_check_rules_is_what_the_command_prints(tmp_path: Path) -> None:
    rules, model = tmp_path / "small.rules", tmp_path / "model"
    rules.write_text(RULES, "utf-8")
    write(model, {"model.norm.weight": tensors()["model.norm.weight"]}, config={"model_type": "small"})
    alone, told = tx.check_rules(rules), tx.check_rules(rules, model)
    assert "fits" not in alone
    assert told["fits"] is True
    for document in (alone, told):
        documents.check("check-rules", document)
    assert (
        tx.check_rules(rules, write(tmp_path / "square", {"model.norm.weight": tensors()["lm_head.weight"]}))["fits"]
        is False
    )
    rules.write_text("family small\n  nonsense\n", "utf-8")
    with pytest.raises(tx.TransaxleError, match=r"small\.rules, line 2"):
        tx.check_rules(rules)


def test_what_is_printed_of_results_is_short(tmp_path: Path) -> None:
    tiny(tmp_path / "a")
    changed = tensors()
    changed["model.norm.weight"][0] += 1
    write(tmp_path / "b", changed, config=CONFIG)
    report = tx.convert(tmp_path / "a", tmp_path / "c", to="dcp:torchtitan")
    assert str(report).startswith(f"{tmp_path / 'c'} · dcp · torchtitan@0.3 · 29 tensors · ")
    assert repr(report) == f"<report {report}>"
    assert repr(tx.verify(tmp_path / "c")) == "<verification against the manifest: intact, 29 tensors, 27.94 kB read>"
    assert str(tx.verify(tmp_path / "a")).startswith("against the structure: sound, the data is unchecked, 69 tensors")
    found = tx.diff(tmp_path / "a", tmp_path / "b", numeric=True)
    assert repr(found).endswith("b: 1 difference, 69 tensors, 55.74 kB compared>")
    assert repr(found.differences[0]).startswith("<difference model.norm.weight: ")
    assert str(found).splitlines()[1].startswith("  difference model.norm.weight: ")
    assert str(tx.verify(tmp_path / "a", tmp_path / "b")).splitlines()[0] == str(found).splitlines()[0]
    many = tx.diff(tmp_path / "a", write(tmp_path / "d", {}, config=CONFIG))
    experts = "model.layers.[0-1].mlp.experts.[0-7].down_proj.weight x16"
    assert any(line.startswith(f"  differences {experts}: ") for line in str(many).splitlines())
    part = tmp_path / "c" / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert "1 problem" in repr(tx.verify(tmp_path / "c"))
    assert "CORRUPT" in str(tx.verify(tmp_path / "c"))
