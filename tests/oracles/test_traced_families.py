"""The tables in `families/traced/` against the installed transformers: derived anew, and held against its own bytes.

A model of a size that no table follows from gets random weights. What `save_pretrained` writes and what the model holds
are converted into each other with the shipped table; both must be the peer's bytes, and what it loads again as well.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from transaxle import families
from transaxle.derivation.sources import from_transformers
from transaxle.derivation.tracing.transformers_models import Peer, loaded, saved, variants
from transaxle.families import builtin

SAMPLE = ("glm4_moe", "gpt_neox", "qwen2_vl", "jamba")
"""Types in the normal run: experts stacked, names changed, a model in a wrapper, layers of two kinds."""
TYPES = sorted(t for entry in builtin().entries.values() if entry.traced for t in entry.model_types)
HAND = sorted(
    {t for entry in builtin().entries.values() if not entry.traced for t in entry.model_types}
    - {"step3p5", "step3p7_text", "kimi_k2"}
)
"""Types with a table by hand that transformers knows by the same word."""


@cache
def _peer() -> Peer:
    return Peer()


def _models(model_type: str) -> Iterator[tuple[Any, int]]:
    models = list(variants(_peer(), model_type))
    yield models[-1]


def _randomise(model: Any) -> None:
    torch = _peer().torch
    generator = torch.Generator().manual_seed(17)
    model.tie_weights()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.zero_()


def _write(folder: Path, tensors: dict[str, Any], config: str) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(config, "utf-8")


def _same(made: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    torch = _peer().torch
    problems = sorted(made.keys() ^ wanted.keys())
    return problems + [n for n in made.keys() & wanted.keys() if not torch.equal(made[n], wanted[n])]


def check(model_type: str, tmp_path: Path) -> None:
    """Convert the peer's bytes both ways with the shipped table, and compare with what the peer has."""
    for model, _ in _models(model_type):
        _randomise(model)
        memory = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        with saved(model) as folder, warnings.catch_warnings():
            hub, config = loaded(folder), (folder / "config.json").read_text("utf-8")
            warnings.simplefilter("ignore")  # what transformers says of sizes that are slow
            again = type(model).from_pretrained(folder).float().state_dict()
        assert json.loads(config)["model_type"] == model_type
        assert _same(again, memory) == [], "transformers does not load what it saved"
        _write(tmp_path / "hub", hub, config)
        _write(tmp_path / "memory", memory, config)
        tx.convert(tmp_path / "hub", tmp_path / "to", to="safetensors:transformers", sync=False)
        assert _same(loaded(tmp_path / "to"), memory) == []
        tx.convert(tmp_path / "memory", tmp_path / "back", to="safetensors:hf", sync=False)
        assert _same(loaded(tmp_path / "back"), hub) == []


def _statements(text: str) -> list[str]:
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    return [" ".join(words) for words in lines if words and words[0] not in {"family", "model_type"}]


@pytest.mark.peers
@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_shipped_table_is_what_transformers_does(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.peers
def test_a_shipped_table_is_what_is_derived() -> None:
    (family,) = builtin().of_types(["gpt_neox"])
    shipped = Path(families.__file__).parent / builtin().entries[family.name].file
    assert _statements(from_transformers("gpt_neox").text) == _statements(shipped.read_text("utf-8"))


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", [*TYPES, *HAND])
def test_every_table_is_what_transformers_does(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
def test_every_table_is_what_is_derived(model_type: str) -> None:
    (family,) = (f for f in builtin().of_types([model_type]) if builtin().entries[f.name].traced)
    shipped = Path(families.__file__).parent / builtin().entries[family.name].file
    assert _statements(from_transformers(model_type).text) == _statements(shipped.read_text("utf-8"))
