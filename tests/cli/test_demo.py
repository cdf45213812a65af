"""The demo: a model saved and loaded by transformers, with every bit unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import same
from tests.cli import documents
from tests.cli.running import USAGE, process


def test_the_demo_shows_all_steps(here: Path) -> None:
    outcome = process("demo")
    assert (outcome.code, outcome.err) == (0, ""), outcome.err
    for line in (
        "2  transaxle convert hub torchtitan --to dcp:torchtitan",
        "3  transaxle convert torchtitan automodel --to safetensors:automodel",
        "4  transaxle convert automodel back --to hf",
        "     gate, up: transposed, joined",
        "       -> model.layers.{l}.mlp.experts.gate_and_up_projs[e d [gate:f | up:f]]",
        "   its weights: yes, 51 of 51 tensors equal bit for bit, as the safetensors library reads them",
        "   its output:  yes, exactly the same logits for 16 tokens, loaded by transformers",
    ):
        assert line in outcome.out.splitlines()
    assert list(here.iterdir()) == []


def test_the_demo_keeps_its_files_if_told_so(here: Path) -> None:
    facts = process("demo", "--keep", "tour/", "--json").json
    documents.check("demo", facts)
    assert (facts["tensors_equal"], facts["logits_equal"]) == (True, True)
    assert len({number["value"] for number in facts["number"]}) == 1
    assert [step["dialect"] for step in facts["steps"]] == ["hf", "torchtitan@0.3", "automodel", "hf"]
    assert same(Path("tour/hub"), Path("tour/back"))
    again = process("demo", "--keep", "tour/")
    assert again.code == USAGE
    assert "EXISTS" in again.err


@pytest.mark.oracle
def test_a_disk_without_room_for_the_model(here: Path) -> None:
    """Simulated by a limit on the size of files."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    outcome = process("demo", before=limit)
    assert (outcome.code, "the model cannot be saved" in outcome.err) == (4, True), outcome.err
    assert list(here.iterdir()) == []


def test_a_folder_that_cannot_be_made(here: Path) -> None:
    Path("file").write_text("")
    outcome = process("demo", "--keep", "file/tour")
    assert (outcome.code, "making the folder" in outcome.err) == (4, True)
    assert [each.name for each in here.iterdir()] == ["file"]
