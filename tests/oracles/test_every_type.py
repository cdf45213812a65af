"""Every model type of transformers: converted both ways, derived anew, cut over ranks, and loaded under its own names.

What becomes of each type is recorded in `docs/reference/model-types.json`; almost all of them are exact.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.oracles import every_cut, wrappers
from tests.oracles.every_type import (
    EXACT,
    PEER,
    RECORD,
    UNBUILT,
    WRONG,
    installed_types,
    one_large_model,
    outcome,
    recorded,
)
from tests.oracles.every_type import HAND as BY_HAND
from tests.oracles.every_type import TRACED as BY_TRACING
from tests.oracles.peer_bytes import both_ways, differing, loaded, memory, randomise
from tests.oracles.quiet import quiet
from tests.oracles.test_full_families import ABSENT
from tests.oracles.traced_tables import shipped_text, statements
from transaxle.axes.notation.family import Formula
from transaxle.derivation.configs import COMPARED
from transaxle.derivation.sources import from_transformers
from transaxle.derivation.tiny_configs import PROPORTIONED
from transaxle.derivation.transformers_models import Peer, shapes, variants
from transaxle.families import builtin
from transaxle.parallel.tensor_parallel import proven_types

_LEAST_EXACT, _LEAST_OF_ALL = 0.98, 0.95
"""Of the types that transformers itself stores and loads again, and of all that it builds."""
TYPES = sorted(recorded()["types"])


def test_almost_all_types_are_exact() -> None:
    built = {each: said for each, (_, said) in recorded()["types"].items() if said != UNBUILT}
    assert not [each for each, said in built.items() if said.startswith(WRONG)]
    ours = [said for said in built.values() if not said.startswith(PEER)]
    assert ours.count(EXACT) >= _LEAST_EXACT * len(ours)
    assert ours.count(EXACT) >= _LEAST_OF_ALL * len(built)


@pytest.mark.oracle(turns=30)
@pytest.mark.parametrize("model_type", TYPES)
def test_every_type_is_as_recorded(model_type: str) -> None:
    assert list(outcome(model_type)) == recorded()["types"][model_type]


@pytest.mark.oracle
def test_types_that_are_new_are_named_for_review() -> None:
    """A newer transformers may have more: they are told, and fail nothing."""
    known = recorded()["types"]
    for model_type in installed_types():
        if model_type not in known:
            said = ", ".join(outcome(model_type))
            warnings.warn(f"to review, then add to {RECORD.name}: {model_type}: {said}", stacklevel=1)


# The shipped tables against the installed transformers: derived anew, and compared with its own bytes.

TRACED_TYPES = sorted(t for entry in builtin().entries.values() if entry.traced for t in entry.model_types)
HAND = sorted({t for entry in builtin().entries.values() if not entry.traced for t in entry.model_types} - ABSENT)
"""Types with a table by hand that transformers knows by the same word."""


def test_every_table_is_what_transformers_does() -> None:
    """The record, which the sweep above compares with what is true, says so of all types with a shipped table."""
    types = recorded()["types"]
    differ = [each for each in (*TRACED_TYPES, *HAND) if types[each] not in ([BY_TRACING, EXACT], [BY_HAND, EXACT])]
    assert differ == ["olmo_hybrid"]  # transformers stores another layout than it loads: see `test_rounds`


@pytest.mark.oracle(turns=30)
@pytest.mark.parametrize("model_type", TRACED_TYPES)
def test_every_table_is_what_is_derived(model_type: str) -> None:
    (family,) = (f for f in builtin().of_types([model_type]) if builtin().entries[f.name].traced)
    with quiet(), one_large_model(model for model, _ in variants(Peer(), model_type, numbers=(0,))):
        derived = from_transformers(model_type).text
    assert statements(derived) == statements(shipped_text(family.name))


@pytest.mark.oracle(turns=30)
@pytest.mark.parametrize("model_type", TRACED_TYPES)
def test_every_table_fits_the_default_config(model_type: str, tmp_path: Path) -> None:
    """A model of full size, whose proportions tiny ones may lack: no shape contradicts. The file is a hole."""
    peer = Peer()
    config = peer.config_class(model_type)().to_dict()
    with quiet():
        tensors = shapes(peer, model_type, config)
    if not tensors:
        pytest.skip("the default config builds no model")
    source = without_data(tmp_path / "source", tensors, config)
    with tx.open(source, dialect="transformers") as checkpoint:
        plan = tx.plan(checkpoint, tmp_path / "out", to="safetensors:hf")
    assert not {refusal.code for refusal in plan.refusals} - {"NO_SPACE"}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("d_fine", {}),
        ("d_fine", {"d_model": 128}),
        ("d_fine", {"decoder_in_channels": [128, 128, 256]}),
        ("d_fine", {"decoder_in_channels": [256, 256, 128]}),
        ("mask2former", {}),
        ("mask2former", {"hidden_dim": 128}),
        ("mask2former", {"enforce_input_projection": True}),
    ],
)
def test_projections_are_left_out_between_equal_sizes(model_type: str, changes: dict[str, Any]) -> None:
    """Conditions that no trace shows are those of transformers."""
    peer = Peer()
    config = peer.config_class(model_type)(**changes).to_dict()
    with quiet():
        tensors = shapes(peer, model_type, config)
    for beginning, condition in COMPARED[model_type].items():
        assert Formula(condition)(config) == any(name.startswith(beginning) for name in tensors)


_OF_TWO_LAYERS = {"mask_decoder_config": {"num_hidden_layers": 2}}
IN_PROPORTION: dict[str, dict[str, Any]] = {
    "d_fine": {"d_model": 64, "decoder_in_channels": [64, 64, 64]},
    "mask2former": {"hidden_dim": 64, "feature_size": 64, "mask_feature_size": 64},
    "molmo2_text": {"vocab_size": 1187, "additional_vocab_size": 1},
    "sam3_tracker": _OF_TWO_LAYERS,
    "sam3_tracker_video": _OF_TWO_LAYERS,
    "sam3_video": {"tracker_config": _OF_TWO_LAYERS},
}
"""Types with tensors that depend on which sizes are equal -> sizes in the proportions of the default config."""


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", sorted(IN_PROPORTION))
def test_small_models_in_the_proportions_of_the_default_are_exact(model_type: str, tmp_path: Path) -> None:
    """Converted both ways, loaded, and saved."""
    with quiet():
        ((small, _),) = variants(Peer(), model_type, numbers=(PROPORTIONED,))
        config = _changed(small.config.to_dict(), IN_PROPORTION[model_type])
        models = [type(small)(type(small.config).from_dict(config)).float() for _ in range(2)]
        del small
        randomise(models[0])
        values = memory(models[0])
        models[0].save_pretrained(tmp_path / "saved")
        tx.load(models[1], tmp_path / "saved")
        assert differing(memory(models[1]), values) == []
        tx.save(models[1], tmp_path / "hub", to="hf")
        assert differing(loaded(tmp_path / "hub"), loaded(tmp_path / "saved")) == []
        both_ways(models[0], tmp_path / "both")


def _changed(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values, also in its parts."""
    new = {key: _changed(config[key], value) if isinstance(value, dict) else value for key, value in changes.items()}
    return {**config, **new}


def without_data(folder: Path, tensors: Mapping[str, tuple[int, ...]], config: Mapping[str, object]) -> Path:
    """Write a checkpoint of these shapes that takes no room on the disk."""
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config, default=str), "utf-8")
    return folder


# Models of transformers that are cut over ranks compute what the whole ones do; types that would not are not cut.


@pytest.mark.oracle
@pytest.mark.peers
@pytest.mark.parametrize(
    ("model_type", "difference"), [("diffllama", "logits"), ("apertus", "gradient of model.layers.0.mlp.act")]
)
def test_a_type_that_would_compute_something_else_is_not_cut(model_type: str, difference: str) -> None:
    """Heads in pairs, and parameters between layers that are cut: right by the table, and another model."""
    assert every_cut.outcome(model_type, 2).startswith(f"{every_cut.WRONG}: {difference}")
    assert model_type not in proven_types()


@pytest.mark.oracle
@pytest.mark.parametrize("world", every_cut.WORLDS)
@pytest.mark.parametrize("model_type", sorted(proven_types()))
def test_every_type_that_is_cut_is_exact(model_type: str, world: int) -> None:
    assert every_cut.outcome(model_type, world) == every_cut.EXACT


# Every name that is written as `transformers` is one that transformers has, or it is refused.

_MOST_DIFFER = 5
CONVERTED = {"gemma3", "llava", "voxtral", "qwen3_vl", "step3p7", "gemma3_text", "llama", "qwen3_moe"}
"""Types that must not be refused with their config, with wrappers and without."""


def _load(model: torch.nn.Module, source: Path) -> None:
    """Load what a model has stored into it after its values were changed: they are back, or it was refused."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    try:
        with quiet():
            tx.load(model, source)
    except tx.TransaxleError:
        return
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    differ = [name for name, tensor in model.state_dict().items() if not tensor.equal(before[name])]
    differ = [name for name in differ if name in parameters and not before[name].isnan().any()]
    assert not differ, f"loaded, and not as they were: {differ[:_MOST_DIFFER]}"


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
def test_names_are_those_of_the_peer_or_refused(model_type: str, tmp_path: Path) -> None:
    """With its config, without, and in a load; what is wrong and not refused fails."""
    model = wrappers.build(model_type)
    source = None if model is None else wrappers.saved(model, tmp_path / "source")
    if model is None or source is None or not (source / "model.safetensors").exists():
        pytest.skip("no tiny model of this type")
    names = model.state_dict().keys()
    _load(model, source)
    for number in range(2):
        out = tmp_path / f"out{number}"
        try:
            tx.convert(source, out, to="transformers", sync=False)
        except tx.TransaxleError:
            assert number or model_type not in CONVERTED
        else:
            with tx.open(out) as checkpoint:
                differ = sorted(set(checkpoint) ^ names)
            assert not differ, f"{model_type}: names that only one side has: {differ[:_MOST_DIFFER]}"
        (source / "config.json").unlink(missing_ok=True)
