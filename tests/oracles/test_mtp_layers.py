"""The layers that predict ahead as transformers builds them, where it does: in a model of their own."""

from __future__ import annotations

import re

import pytest

from tests.families.test_layers_ahead import SIZES, mellum
from tests.oracles.quiet import quiet

_HUB = (
    (r"^layers\.0\.enorm\.", "mtp.pre_fc_norm_embedding."),
    (r"^layers\.0\.hnorm\.", "mtp.pre_fc_norm_hidden."),
    (r"^layers\.0\.eh_proj\.", "mtp.fc."),
    (r"^layers\.0\.post_norm\.", "mtp.norm."),
    (r"^layers\.(\d+)\.mtp_block\.", r"mtp.layers.\1."),
)
"""Its names -> the hub's: `MtpModel` in transformers' conversion_mapping, the other way round."""


@pytest.mark.peers
def test_mellum_has_the_tensors_that_its_table_says() -> None:
    with quiet():
        from transformers import MellumConfig, MellumForCausalLM
        from transformers.modeling_layers import MtpModel

        config = MellumConfig(
            **{**SIZES, "num_experts_per_tok": 2, "num_mtp_layers": 1, "mlp_layer_types": ["sparse"] * 2}
        )
        ahead = MtpModel(MellumForCausalLM(config), 1).state_dict()
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in ahead.items():
        for pattern, hub in _HUB:
            name = re.sub(pattern, hub, name)
        found[name] = tuple(tensor.shape)
    experts, width, inner = found.pop("mtp.layers.0.mlp.experts.down_proj")
    assert found.pop("mtp.layers.0.mlp.experts.gate_up_proj") == (experts, 2 * inner, width)
    for e in range(experts):
        stem = f"mtp.layers.0.mlp.experts.{e}"
        found |= {f"{stem}.{n}_proj.weight": (inner, width) for n in ("gate", "up")}
        found[f"{stem}.down_proj.weight"] = (width, inner)
    shared = {"embed_tokens.weight", "shared_head.weight"}
    assert {name: shape for name, shape in found.items() if name not in shared} == mellum()
