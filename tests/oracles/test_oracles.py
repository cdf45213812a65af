"""The oracles themselves: each peer round-trips, and what is written out here is what its modules do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_loader import load

from tests.oracles import automodel_peer, cases, hub, megatron_peer, torchtitan_peer
from tests.oracles.cases import AUTOMODEL, HF, MEGATRON, MEGATRON_LOCAL, PEERS, TORCHTITAN, TRANSFORMERS, Case
from tests.oracles.hub import Tensors
from tests.oracles.quiet import quiet

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(bool(cases.MISSING), reason=f"not installed: {', '.join(cases.MISSING)}"),
]

ALL = [(family, variant) for family, variants in cases.VARIANTS.items() for variant in variants]
every_case = pytest.mark.parametrize(("family", "variant"), ALL, ids=["-".join(pair) for pair in ALL])


def _having(*dialects: str) -> pytest.MarkDecorator:
    pairs = [pair for pair in ALL if set(dialects) <= set(cases.PLANS[pair[0]][pair[1]].dialects)]
    return pytest.mark.parametrize(("family", "variant"), pairs, ids=["-".join(pair) for pair in pairs])


def _bits(tensors: Tensors) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {name: cases.bits(value) for name, value in tensors.items()}


def _shapes(tensors: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a module stores; Megatron also lists states that hold no tensor."""
    return {name: tuple(value.shape) for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def _without_balance(tensors: Tensors) -> Tensors:
    """Tensors without the load-balancing state of torchtitan's routers, which begins at zero."""
    names = ("expert_bias", "e_score_correction_bias")
    return {name: value for name, value in tensors.items() if value.any() or not any(each in name for each in names)}


@pytest.mark.oracle
@every_case
def test_every_value_is_random_and_every_dialect_has_all_of_them(family: str, variant: str) -> None:
    case = cases.case(family, variant)
    assert case.config["model_type"] == cases.PLANS[family][variant].options.get("model_type", family)
    every = {name: _without_balance(tensors) for name, tensors in (case.dialects | case.versions).items()}
    counts = {name: cases.parameters(tensors) for name, tensors in every.items()}
    tied = case.dialects[HF]["model.embed_tokens.weight"].numel() if variant == "tied" else 0
    assert set(counts.values()) <= {counts[HF], counts[HF] + tied}
    for name, tensors in every.items():
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
        assert _bits(_without_balance(back)) == stored, name


@_having(TRANSFORMERS)
def test_transformers_builds_this_model_from_the_config_shown(family: str, variant: str) -> None:
    case = cases.case(family, variant)
    own = _shapes(hub.model(case.config).state_dict())
    assert _shapes(case.dialects[TRANSFORMERS]).items() <= own.items()


@_having(TORCHTITAN)
def test_names_and_shapes_are_those_of_torchtitan_models(family: str, variant: str) -> None:
    case = cases.case(family, variant)
    own = _shapes(torchtitan_peer.module(case.config).state_dict())
    held = _shapes(case.dialects[TORCHTITAN])
    assert {name: own[name] for name in held} == held
    assert all(name.endswith(torchtitan_peer.BUFFER) for name in own.keys() - held.keys())
    assert {name for name in held if name.endswith(torchtitan_peer.BUFFER)} in (
        set(),
        {name for name in own if name.endswith(torchtitan_peer.BUFFER)},
    )


@_having(AUTOMODEL)
def test_names_and_shapes_are_those_of_automodel_models(family: str, variant: str) -> None:
    case = cases.case(family, variant)
    # Automodel does not read the keys that transformers writes for this family.
    config = cases.case(family, "asymmetric").config if variant == "resaved" else case.config
    own = _shapes(automodel_peer.module(config).state_dict())
    if variant == "tied":
        del own[automodel_peer.HEAD]
    held = _shapes(case.dialects[AUTOMODEL])
    ahead = tuple(f"model.layers.{config['num_hidden_layers'] + number}." for number in range(cases.ahead(case)))
    assert own == {name: shape for name, shape in held.items() if not name.startswith(ahead)}
    assert len(held) > len(own) if ahead else held == own  # its model leaves those layers out, its adapter does not


@pytest.mark.oracle
@_having(MEGATRON)
def test_megatron_holds_these_tensors(family: str, variant: str) -> None:
    case = cases.case(family, variant)
    with megatron_peer.local_model(case.config) as model:
        assert _shapes(model.state_dict()) == _shapes(case.versions[MEGATRON_LOCAL])


@pytest.mark.oracle
@_having(MEGATRON, TRANSFORMERS)
def test_megatron_computes_what_transformers_computes(family: str, variant: str) -> None:
    case = cases.case(family, variant)
    tokens = torch.arange(12)[None] % case.config["vocab_size"]
    reference = hub.model(case.config, torch.float32)
    reference.load_state_dict(case.dialects[TRANSFORMERS])
    with torch.no_grad():
        expected = reference(tokens).logits
    with megatron_peer.local_model(case.config) as model:
        model.load_state_dict(case.versions[MEGATRON_LOCAL], strict=False)
        computed = megatron_peer.logits(model, tokens)
        keys = {
            name: part.key for name, part in model.sharded_state_dict().items() if name in case.versions[MEGATRON_LOCAL]
        }
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    if family in cases.DENSE:
        _same_names_as_te(keys, case)


def _same_names_as_te(keys: dict[str, str], case: Case) -> None:
    """Megatron stores a local model under the names of a TE model, without the layers' numbers."""
    number = ".layers.0."
    named = {name: key.replace(".layers.", number) for name, key in keys.items() if number in name}
    assert set(named.values()) == {name for name in case.dialects[MEGATRON] if number in name}
    for local, name in named.items():
        assert cases.bits(case.versions[MEGATRON_LOCAL][local]) == cases.bits(case.dialects[MEGATRON][name])


def test_torchtitan_computes_what_transformers_computes_with_the_experts_of_gpt_oss() -> None:
    """Where gate and up lie, and that its weights are [out, in]: shapes alone do not tell, when they are square."""
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    case = cases.case("gpt_oss", "square")
    count, width = 16, 16
    titan = GptOssGroupedExperts(GptOssGroupedExperts.Config(dim=width, hidden_dim=16, num_experts=count))
    stem = "layers.1.moe.routed_experts.inner_experts."
    held = {name.removeprefix(stem): value for name, value in case.dialects[TORCHTITAN].items() if stem in name}
    titan.load_state_dict(held, assign=True)
    reference = hub.model(case.config)
    reference.load_state_dict(case.dialects[TRANSFORMERS])
    tokens = torch.randn(2 * count, width, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    chosen, weight = torch.arange(count).repeat_interleave(2)[:, None], torch.ones(2 * count, 1, dtype=torch.bfloat16)
    with torch.no_grad():
        computed = titan(tokens, torch.full((count,), 2))
        expected = reference.model.layers[1].mlp.experts(tokens, chosen, weight)
    torch.testing.assert_close(computed, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_codes_and_their_plain_files_lie_as_transformers_decodes_them(tmp_path: Path) -> None:
    """MXFP4 codes are [out, in]; transformers turns them round. torch's reader, which torchtitan uses, does not.

    That reader fills only as many columns as there are scales in a row (torch 2.13.0): these are compared.
    """
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(8)
    name, groups = "model.layers.0.mlp.experts.gate_up_proj", 2
    blocks = torch.randint(0, 256, (3, 10, groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 130, (3, 10, groups), generator=generator, dtype=torch.uint8)
    files = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(files, tmp_path / hub.WEIGHTS, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(files, hub.WEIGHTS)}
    (tmp_path / f"{hub.WEIGHTS}.index.json").write_text(json.dumps(index))
    decoded = convert_moe_packed_tensors(blocks, scales)
    assert decoded.shape == (3, 32 * groups, 10)
    read = {f"{name}_blocks": torch.zeros(3, 10, 32 * groups, dtype=torch.bfloat16)}
    with quiet():
        load(read, storage_reader=QuantizedHuggingFaceStorageReader(str(tmp_path), thread_count=1), no_dist=True)
    (value,) = read.values()
    assert value[..., :groups].abs().sum() > 0
    assert torch.equal(value[..., :groups], decoded.mT[..., :groups])
