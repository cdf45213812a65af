"""transformers' own bytes: what `save_pretrained` writes of a model and what the model holds, converted both ways."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import transaxle as tx

Tensors = dict[str, torch.Tensor]
_OF_HY_V4 = {
    ".mlp.linear_gate.": ".mlp.gate_proj.",
    ".mlp.shared_experts.linear_gate.": ".mlp.shared_experts.gate_proj.",
    ".hc_pre.hc_attn_layer.": ".hc_attn_layer.hc_pre.",
    ".hc_pre.hc_mlp_layer.": ".hc_mlp_layer.hc_pre.",
    ".hc_pre.hc_head.": ".hc_head.",
    "hc_head.hc_pre.": "hc_head.",
}
_PUBLISHED = {
    "deepseek_v4": {
        "model.embed_tokens.": "embed.", "model.hc_head.hc_": "hc_head_", "model.layers.": "layers.",
        "model.norm.": "norm.", ".attn.norm.": ".attn.kv_norm.",
    },
    "kimi_linear": {f".block_sparse_moe.{name}_proj.": f".mlp.{name}_proj." for name in ("gate", "up", "down")},
    "kimi_k25": {
        "language_model.model.blocks.": "language_model.model.layers.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        "model.mm_projector.": "mm_projector.",
        ".self_wqkv.": ".self_attn.q_proj.",
    },
    "cosmos3_edge": {
        f"model.visual.encoder.layers.{layer}.{old}.": f"model.visual.encoder.layers.{layer}.{new}."
        for layer in range(30)
        for old, new in (
            ("mlp.up_proj", "mlp.fc1"), ("mlp.down_proj", "mlp.fc2"), ("self_attn.to_q", "self_attn.q_proj"),
            ("self_attn.to_k", "self_attn.k_proj"), ("self_attn.to_v", "self_attn.v_proj"),
        )
    },
    "hy_v4": _OF_HY_V4,
    "hy_v4_vl": _OF_HY_V4,
    "hy_v4_vl_text": _OF_HY_V4,
    "qianfan_ocr": {"language_model.model.encoder.layers.": "language_model.model.layers."},
}  # fmt: skip
"""Model type -> parts of names that transformers 5.24 stores, and those of the published files, which it reads and we
write.
"""


_PAIRED = re.compile(r"backbone\.layers\.(\d+)\.(self_attn|mlp|lambda_1|lambda_2)")
_IN_PAIRS = {
    "self_attn": (0, "mixer"),
    "mlp": (1, "mixer"),
    "lambda_1": (0, "attn_alpha"),
    "lambda_2": (1, "mlp_alpha"),
}
"""Module of one of Dory's layers -> which of two published layers has it, and under which name."""


def randomise(model: Any) -> None:
    """Give everything that is stored random values; rotary frequencies and the like stay what they are."""
    generator = torch.Generator().manual_seed(17)
    model.tie_weights()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.zero_()


def memory(model: Any) -> Tensors:
    """What the model holds, buffers that are never stored left out; tied tensors are copies of their own."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def loaded(folder: Path) -> Tensors:
    """The tensors of a folder."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def published(model_type: str, stored: Tensors) -> Tensors:
    """What transformers has stored, under the names that the published files of this type have."""
    renamed = {}
    for name, value in stored.items():
        for part, other in _PUBLISHED.get(model_type, {}).items():
            name = name.replace(part, other)
        if model_type == "dory":
            name = _PAIRED.sub(_published_pair, name)
        renamed[name] = value
    return renamed


def _published_pair(match: re.Match[str]) -> str:
    second, module = _IN_PAIRS[match[2]]
    return f"backbone.layers.{2 * int(match[1]) + second}.{module}"


def write(folder: Path, tensors: Tensors, config: str) -> None:
    """Write one file, and the config beside it."""
    folder.mkdir()
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(config, "utf-8")


def differing(made: Tensors, wanted: Tensors) -> list[str]:
    """Names that only one side has, or whose values differ."""
    problems = sorted(made.keys() ^ wanted.keys())
    return problems + [n for n in made.keys() & wanted.keys() if not torch.equal(made[n], wanted[n])]


def both_ways(
    model: Any,
    folder: Path,
    model_type: str | None = None,
    config: dict[str, Any] | None = None,
    rules: Path | None = None,
) -> None:
    """Assert that a model's two sides are converted into each other, bit for bit; its weights are drawn anew.

    The largest of these models take most of the memory of the tests, so nothing is kept longer than it is compared: the
    model itself is left without values.

    `config` takes the place of what transformers writes, which must be of `model_type`; `rules` are a table
    of a type that no shipped one is for.
    """
    randomise(model)
    inside = memory(model)
    folder.mkdir(parents=True)
    model.save_pretrained(folder / "saved")
    model.to("meta")
    text = (folder / "saved/config.json").read_text("utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers says of sizes that are slow
        again = type(model).from_pretrained(folder / "saved").float().state_dict()
    assert model_type is None or json.loads(text)["model_type"] == model_type
    lost = differing(again, inside)
    assert not lost, f"transformers does not load what it saved: {', '.join(lost[:2])}"
    del again
    hub = loaded(folder / "saved")
    text = text if config is None else json.dumps(config)
    write(folder / "hub", hub, text)
    write(folder / "memory", inside, text)
    tx.convert(folder / "hub", folder / "to", to="safetensors:transformers", rules=rules, sync=False)
    assert differing(loaded(folder / "to"), inside) == []
    tx.convert(folder / "memory", folder / "back", to="safetensors:hf", rules=rules, sync=False)
    wanted = published(json.loads(text)["model_type"], hub)
    assert differing(loaded(folder / "back"), wanted) == []
    if wanted.keys() != hub.keys():
        again = memory(type(model).from_pretrained(folder / "back").float())
        assert differing(again, inside) == [], "transformers does not load the names of the published files"
