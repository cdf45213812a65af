"""The training side with models of every type: refit between memory and a hub's names."""

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

Check = Callable[[Any, Path], None]
"""Asserts something of a model; files go into a folder."""


def everything(model: Any) -> Tensors:
    """Return copies of all parameters and buffers, those that are never stored too."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def refit(source: Any, folder: Path) -> None:
    """Assert that a model's weights arrive in another model and under a hub's names."""
    target = deepcopy(source)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    with quiet():
        source.save_pretrained(folder / "hub")
    hub = published(source.config.model_type, loaded(folder / "hub"))
    engine = {name: torch.zeros_like(tensor) for name, tensor in hub.items()}
    tx.Refit(source, target).push()
    tx.Refit(source, engine, dialect="hf").push()
    assert differing(everything(target), everything(source)) == []
    assert differing(engine, hub) == []


SAMPLE = (
    pytest.param(refit, "gemma3", id="refit-gemma3"),  # the config of its text says more than the whole one
)


@pytest.mark.peers
@pytest.mark.parametrize(("check", "model_type"), SAMPLE)
def test_every_value_arrives(check: Check, model_type: str, tmp_path: Path) -> None:
    with quiet():
        model = drawn(model_type)
    check(model, tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("check", [refit])
def test_of_every_type_every_value_arrives(check: Check, model_type: str, tmp_path: Path) -> None:
    try:
        with quiet():
            model = drawn(model_type)
    except Exception as error:  # noqa: BLE001 - of the peer
        pytest.skip(f"no model of these sizes: {error}")
    try:
        check(model, tmp_path)
    except TransaxleError as error:
        pytest.skip(f"its tiny model is refused: {error}")
