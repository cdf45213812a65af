"""Layers that training dropped, grafted from the base: what readers load then, run in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import transaxle as tx
from tests.oracles.quiet import quiet
from tests.readers.planted import DEPTH, FAULTS, retensor, tensors
from tests.readers.real_readers import needs_vllm, run_transformers, run_vllm

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

AHEAD = f"model.layers.{DEPTH}."


class Grafted(NamedTuple):
    """A GLM-4.5 that was trained without its layer ahead, and comes back with the layer of its base."""

    expected: Path
    """transformers' own save of the trained model, with the tensors of the layer put beside it by hand."""
    folder: Path
    """The training checkpoint, converted with `graft`."""


@pytest.fixture(scope="module")
def grafted(tmp_path_factory: pytest.TempPathFactory) -> Grafted:
    """Train a step in transformers, save with DCP as trainers do, without a config, and convert to the hub's files."""
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("grafts")
    base, expected, trained = place / "base", place / "expected", place / "step-1"
    FAULTS["no layer that predicts further tokens"].build(base)
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        save(dict(model.state_dict()), checkpoint_id=trained)
        model.save_pretrained(expected)
    assert not any(name.startswith(AHEAD) for name in tensors(expected))
    ahead = {name: value for name, value in tensors(base).items() if name.startswith(AHEAD)}
    retensor(expected, lambda values: values.update(ahead))
    report = tx.convert(trained, place / "out", to="hf", graft=base, verify=True)
    assert report.grafted.keys() == ahead.keys()
    return Grafted(expected, place / "out")


def test_every_tensor_is_that_of_the_trained_model_or_of_the_base(grafted: Grafted) -> None:
    written, expected = tensors(grafted.folder), tensors(grafted.expected)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_transformers_computes_what_the_trained_model_does(grafted: Grafted) -> None:
    expected, folder = run_transformers([grafted.expected, grafted.folder])
    assert expected.equals(folder), folder.error


@pytest.mark.parametrize("drafting", [False, pytest.param(True, id="the layer ahead")])
@pytest.mark.parametrize("marks", [pytest.param(None, marks=needs_vllm)], ids=["vllm"])
def test_vllm_loads_the_model_and_the_layer_ahead(drafting: bool, marks: None, grafted: Grafted) -> None:
    expected, folder = run_vllm([grafted.expected, grafted.folder], drafting=drafting)
    assert expected.equals(folder), folder.error
    assert all(value.isfinite().all() for value in folder.values.values())
