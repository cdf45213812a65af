"""What is encoded unless the user says otherwise: weights of linear layers and experts, as real models have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import transaxle as tx
from tests.oracles.every_type import EXACT, HAND, TRACED, recorded
from tests.oracles.quiet import quiet
from tests.oracles.tiny_models import drawn
from transaxle.errors import TransaxleError

SAMPLE = ("bert", "gemma3", "gpt2", "mixtral", "mt5")
"""Embeddings under other names, a picture tower, transposed layers, experts, and a table made from a trace."""
_WHOLE = ("gpt2", "mixtral")
"""Types of which every linear layer is encoded."""
TYPES = sorted(each for each, (table, said) in recorded()["types"].items() if table in (HAND, TRACED) and said == EXACT)


def layers(model: Any) -> set[str]:
    """Return the weights of linear layers, all but those of heads and routers, and stacked experts."""
    head = model.get_output_embeddings()
    found = set()
    for path, module in model.named_modules():
        kind = type(module).__name__
        is_layer = (isinstance(module, nn.Linear) or kind == "Conv1D") and module is not head
        if is_layer and not path.endswith(".gate"):
            found.add(f"{path}.weight")
        elif "Expert" in kind:
            found |= {f"{path}.{name}" for name, value in module.named_parameters(recurse=False) if value.dim() == 3}
    return found


def encoded(model_type: str, folder: Path) -> tuple[set[str], set[str]]:
    """Return what is encoded of a type, under the names in memory, and what its linear layers are."""
    with quiet():
        model = drawn(model_type, wider=True).to(torch.bfloat16)
        model.save_pretrained(folder / "base")
    tx.convert(folder / "base", folder / "out", to="transformers", encode="float8_block", sync=False)
    chosen = set()
    for file in (folder / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            chosen |= {name for name in opened.keys() if opened.get_slice(name).get_dtype() == "F8_E4M3"}  # noqa: SIM118
    return chosen, layers(model)


@pytest.mark.peers
@pytest.mark.parametrize("model_type", SAMPLE)
def test_nothing_else_is_encoded(model_type: str, tmp_path: Path) -> None:
    chosen, linear = encoded(model_type, tmp_path)
    assert chosen
    assert chosen <= linear
    assert model_type not in _WHOLE or chosen == linear


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
def test_of_every_type_nothing_else_is_encoded(model_type: str, tmp_path: Path) -> None:
    try:
        chosen, linear = encoded(model_type, tmp_path)
    except TransaxleError as error:
        pytest.skip(f"its tiny model is not encoded: {error}")
    except Exception as error:  # noqa: BLE001 - of the peer
        pytest.skip(f"no model of these sizes: {error}")
    assert chosen <= linear
