"""The oracles themselves: each peer round-trips, and what is written out here is what its modules do."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.oracles import automodel_peer, cases, hub, megatron_peer, torchtitan_peer
from tests.oracles.cases import (
    AUTOMODEL,
    HF,
    MEGATRON,
    MEGATRON_LOCAL,
    PEERS,
    TE,
    TITAN_02,
    TORCHTITAN,
    TRANSFORMERS,
    Case,
)
from tests.oracles.hub import Tensors

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(bool(cases.MISSING), reason=f"not installed: {', '.join(cases.MISSING)}"),
]

ALL = [(family, variant) for family, variants in cases.VARIANTS.items() for variant in variants]
every_case = pytest.mark.parametrize(("family", "variant"), ALL, ids=["-".join(pair) for pair in ALL])


def _having(dialect: str) -> pytest.MarkDecorator:
    pairs = [pair for pair in ALL if dialect in cases.PLANS[pair[0]][pair[1]].dialects]
    return pytest.mark.parametrize(("family", "variant"), pairs, ids=["-".join(pair) for pair in pairs])


def _bits(tensors: Tensors) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {name: cases.bits(value) for name, value in tensors.items()}


def _shapes(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a module stores; Megatron also lists states that hold no tensor."""
    return {name: tuple(value.shape) for name, value in tensors.items() if isinstance(value, torch.Tensor)}


@every_case
def test_every_value_is_random_and_every_dialect_has_all_of_them(family: str, variant: str) -> None:
    case = cases.case(family, variant)
    assert case.config["model_type"] == family
    counts = {name: cases.parameters(tensors) for name, tensors in (case.dialects | case.versions).items()}
    tied = case.dialects[HF]["model.embed_tokens.weight"].numel() if variant == "tied" else 0
    assert set(counts.values()) <= {counts[HF], counts[HF] + tied}
    for name, tensors in (case.dialects | case.versions).items():
        assert case.sources[name]
        for tensor, value in tensors.items():
            assert value.dtype in {torch.bfloat16, torch.float32}, (name, tensor)
            assert value.unique().numel() > 0.7 * min(value.numel(), 64), (name, tensor)


@every_case
def test_peers_round_trip(family: str, variant: str) -> None:
    case = cases.case(family, variant)
    stored = _bits(case.dialects[HF])
    tensors = {**case.dialects, **case.versions}
    for name in tensors.keys() & PEERS.keys():
        back = cases.to_hf(name, case.config, tensors[name])
        assert _bits(back) == stored, name


@_having(TRANSFORMERS)
def test_transformers_builds_this_model_from_the_config_shown(family: str, variant: str) -> None:
    case = cases.case(family, variant)
    own = _shapes(hub.model(case.config).state_dict())
    assert _shapes(case.dialects[TRANSFORMERS]).items() <= own.items()


@_having(TORCHTITAN)
def test_names_and_shapes_are_those_of_torchtitan_models(family: str, variant: str) -> None:
    case = cases.case(family, variant)
    own = _shapes(torchtitan_peer.module(case.config).state_dict())
    assert {name: shape for name, shape in own.items() if not name.endswith(torchtitan_peer.BUFFER)} == _shapes(
        case.dialects[TORCHTITAN]
    )


@_having(AUTOMODEL)
def test_names_and_shapes_are_those_of_automodel_models(family: str, variant: str) -> None:
    case = cases.case(family, variant)
    # Automodel does not read the keys that transformers writes for this family.
    config = cases.case(family, "asymmetric").config if variant == "resaved" else case.config
    own = _shapes(automodel_peer.module(config).state_dict())
    if variant == "tied":
        del own[automodel_peer.HEAD]
    assert own == _shapes(case.dialects[AUTOMODEL])


@_having(MEGATRON)
def test_megatron_holds_these_tensors_and_computes_what_transformers_computes(family: str, variant: str) -> None:
    case = cases.case(family, variant)
    tokens = torch.arange(12)[None] % case.config["vocab_size"]
    reference = hub.model(case.config, torch.float32)
    reference.load_state_dict(case.dialects[TRANSFORMERS])
    with torch.no_grad():
        expected = reference(tokens).logits
    with megatron_peer.local_model(case.config) as model:
        assert _shapes(model.state_dict()) == _shapes(case.versions[MEGATRON_LOCAL])
        model.load_state_dict(case.versions[MEGATRON_LOCAL], strict=False)
        computed = megatron_peer.logits(model, tokens)
        keys = {
            name: part.key for name, part in model.sharded_state_dict().items() if name in case.versions[MEGATRON_LOCAL]
        }
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    if TE not in case.dialects:
        _same_names_as_te(keys, case)


def _same_names_as_te(keys: dict[str, str], case: Case) -> None:
    """Megatron stores a local model under the names of a TE model, without the layers' numbers."""
    number = ".layers.0."
    named = {name: key.replace(".layers.", number) for name, key in keys.items() if number in name}
    assert set(named.values()) == {name for name in case.dialects[MEGATRON] if number in name}
    for local, name in named.items():
        assert cases.bits(case.versions[MEGATRON_LOCAL][local]) == cases.bits(case.dialects[MEGATRON][name])


def test_grouped_experts_are_the_stack_of_the_single_ones() -> None:
    case = cases.case("qwen3_moe", "asymmetric")
    single, grouped = case.dialects[MEGATRON], case.dialects[TE]
    name = "decoder.layers.2.mlp.experts.linear_fc1.weight"
    assert tuple(grouped[name].shape) == (6, 48, 40)
    assert torch.equal(grouped[name][5], single[f"{name}5"])


def test_torchtitan_has_no_name_for_a_bias() -> None:
    case = cases.case("llama", "bias")
    with pytest.raises(KeyError, match="bias"):
        torchtitan_peer.from_hf(case.config, case.dialects[HF])


def test_automodel_refuses_a_tied_qwen3_moe() -> None:
    with pytest.raises(NotImplementedError, match="tie_word_embeddings"):
        automodel_peer.module(cases.case("qwen3_moe", "tied").config)


def test_torchtitan_moved_names_between_its_releases() -> None:
    case = cases.case("qwen3_moe", "dense_layers")
    older = case.versions[TITAN_02]
    assert {"output.weight", "layers.1.moe.experts.w2", "layers.3.attention.wk.weight"} <= older.keys()
    assert sorted(older.values(), key=id) == sorted(case.dialects[TORCHTITAN].values(), key=id)


def test_building_a_case_leaves_the_process_as_it_was() -> None:
    cases.case.cache_clear()
    before = torch.get_rng_state(), torch.get_default_dtype(), dict(os.environ), torch.is_grad_enabled()
    cases.case("step3p5", "asymmetric")
    after = torch.get_rng_state(), torch.get_default_dtype(), dict(os.environ), torch.is_grad_enabled()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert not torch.distributed.is_initialized()
