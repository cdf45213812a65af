"""The training side with models of every type: refit between memory and a hub's names, and models without memory."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.oracles.peer_bytes import Tensors, differing, loaded, published
from tests.oracles.quiet import quiet
from tests.oracles.test_encoded_types import TYPES
from tests.oracles.tiny_models import drawn
from transaxle.errors import TransaxleError
from transaxle.quant import Float8CurrentScaling, quantize_

Check = Callable[[Any, Path], None]
"""Asserts something of a model that transformers has stored in `HUB` of a folder; files go into that folder."""
HUB = "hub"


def _stored(model_type: str, folder: Path) -> Any:
    with quiet():
        model = drawn(model_type)
        model.save_pretrained(folder / HUB)
    return model


def cut_parameters(model: Any) -> Tensors:
    """Return copies of all parameters and buffers, those that are never stored too."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def refit(source: Any, folder: Path) -> None:
    """Assert that a model's weights arrive in another model and under a hub's names."""
    target = deepcopy(source)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    hub = published(source.config.model_type, loaded(folder / HUB))
    engine = {name: torch.zeros_like(tensor) for name, tensor in hub.items()}
    tx.Refit(source, target).push()
    tx.Refit(source, engine, dialect="hf").push()
    assert differing(cut_parameters(target), cut_parameters(source)) == []
    assert differing(engine, hub) == []


def built_empty(model: Any, folder: Path) -> None:
    """Assert that a model on the meta device has all values of one that is not, once it is loaded."""
    with quiet(), torch.device("meta"):
        empty = type(model)._from_config(deepcopy(model.config)).eval()
    tx.save(model, folder / "saved", to="safetensors")
    tx.load(empty, folder / "saved")
    assert differing(cut_parameters(empty), cut_parameters(model)) == []


def float8_from_a_hub(model: Any, folder: Path) -> None:
    """Assert that codes and scales that were saved for a hub are loaded bit for bit."""
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    for each in (model, other):
        quantize_(each, Float8CurrentScaling())
    tx.save(model, folder / "saved", to="hf")
    tx.load(other, folder / "saved")
    assert differing(other.state_dict(), model.state_dict()) == []


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("check", [refit, built_empty, float8_from_a_hub])
def test_of_every_type_every_value_arrives(check: Check, model_type: str, tmp_path: Path) -> None:
    try:
        model = _stored(model_type, tmp_path)
    except Exception as error:  # noqa: BLE001 - of the peer
        pytest.skip(f"no model of these sizes: {error}")
    try:
        check(model, tmp_path)
    except TransaxleError as error:
        pytest.skip(f"its tiny model is refused: {error}")
