"""Layers that predict ahead, as the hub has them beside models that transformers builds without: names by their source.

A source is vLLM's model of these layers, whose `load_weights` says the stored names, or transformers' `MtpModel`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from transaxle.axes.layout.bind import bind
from transaxle.axes.layout.relayout import Target
from transaxle.axes.notation.family import Sizes
from transaxle.axes.translation.translate import Translation, translate
from transaxle.families import builtin
from transaxle.formats.catalog.catalog import Entry, Extent

D, INNER, F, E, S, N = 12, 20, 7, 3, 14, 11
SIZES = {
    "num_hidden_layers": 2, "vocab_size": N, "hidden_size": D, "intermediate_size": INNER, "moe_intermediate_size": F,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "num_experts": E, "tie_word_embeddings": False,
}  # fmt: skip
Shapes = dict[str, tuple[int, ...]]


def _attention(stem: str, *, norms: bool = True) -> Shapes:
    shapes: Shapes = {f"{stem}.{n}_proj.weight": (8, D) for n in "kv"}
    shapes |= {f"{stem}.q_proj.weight": (24, D), f"{stem}.o_proj.weight": (D, 24)}
    return shapes | ({f"{stem}.{n}_norm.weight": (4,) for n in "qk"} if norms else {})


def _mlp(stem: str, inner: int) -> Shapes:
    shapes: Shapes = {f"{stem}.{n}_proj.weight": (inner, D) for n in ("gate", "up")}
    return {**shapes, f"{stem}.down_proj.weight": (D, inner)}


def _beside(layers: int) -> Shapes:
    """What Qwen, Mellum and K-EXAONE have in common."""
    shapes: Shapes = {f"mtp.{n}.weight": (D,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes["mtp.fc.weight"] = (D, 2 * D)
    for x in range(layers):
        shapes |= {f"mtp.layers.{x}.{n}_layernorm.weight": (D,) for n in ("input", "post_attention")}
        shapes |= _attention(f"mtp.layers.{x}.self_attn")
    return shapes


def mellum() -> Shapes:
    shapes = _beside(1) | {"mtp.layers.0.mlp.gate.weight": (E, D)}
    for e in range(E):
        shapes |= _mlp(f"mtp.layers.0.mlp.experts.{e}", F)
    return shapes


def _ernie() -> Shapes:
    shapes: Shapes = {"model.mtp_emb_norm.0.weight": (D,), "model.mtp_hidden_norm.0.weight": (D,)}
    shapes["model.mtp_linear_proj.0.weight"] = (D, 2 * D)
    shapes |= {f"model.mtp_block.0.{n}_layernorm.weight": (D,) for n in ("input", "post_attention")}
    return shapes | _attention("model.mtp_block.0.self_attn", norms=False) | _mlp("model.mtp_block.0.mlp", INNER)


def _nemotron(latent: int | None = None) -> Shapes:
    inner = latent or D
    shapes: Shapes = {f"mtp.layers.0.{n}.weight": (D,) for n in ("enorm", "hnorm", "norm")}
    shapes |= {"mtp.layers.0.eh_proj.weight": (D, 2 * D), **_attention("mtp.layers.0.mixer", norms=False)}
    shapes |= {f"mtp.layers.1.{n}.weight": (D,) for n in ("final_layernorm", "norm")}
    shapes |= {"mtp.layers.1.mixer.gate.weight": (E, D), "mtp.layers.1.mixer.gate.e_score_correction_bias": (E,)}
    for e in range(E):
        shapes[f"mtp.layers.1.mixer.experts.{e}.up_proj.weight"] = (F, inner)
        shapes[f"mtp.layers.1.mixer.experts.{e}.down_proj.weight"] = (inner, F)
    if latent:
        shapes["mtp.layers.1.mixer.fc1_latent_proj.weight"] = (latent, D)
        shapes["mtp.layers.1.mixer.fc2_latent_proj.weight"] = (D, latent)
    shapes["mtp.layers.1.mixer.shared_experts.up_proj.weight"] = (S, D)
    shapes["mtp.layers.1.mixer.shared_experts.down_proj.weight"] = (D, S)
    return shapes


_NEMOTRON = {
    **SIZES, "n_routed_experts": E, "moe_shared_expert_intermediate_size": S, "hybrid_override_pattern": "*E",
    "num_nextn_predict_layers": 1,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], Shapes]] = {
    "mellum": ("mellum", {**SIZES, "num_nextn_predict_layers": 1}, mellum()),
    "exaone": ("exaone_moe", {**SIZES, "num_nextn_predict_layers": 2}, _beside(2)
               | _mlp("mtp.layers.0.mlp", INNER) | _mlp("mtp.layers.1.mlp", INNER)),
    "ernie": ("ernie4_5_moe", {**SIZES, "num_nextn_predict_layers": 1}, _ernie()),
    "nemotron": ("nemotron_h", {**_NEMOTRON, "mtp_hybrid_override_pattern": "*E"}, _nemotron()),
    "nemotron, listed": ("nemotron_h", {**_NEMOTRON, "mtp_layers_block_type": ["attention", "moe"]}, _nemotron()),
    "nemotron, latent": ("nemotron_h", {**_NEMOTRON, "moe_latent_size": 4}, _nemotron(4)),
}  # fmt: skip


def translated(case: str, target: str, *lost: str, **changed: Any) -> tuple[Translation, Shapes]:
    """These layers alone, with what refuses their translation; the rest of the model counts as another part."""
    name, config, shapes = CASES[case]
    family = builtin()[name]
    hf, to = family.dialect("hf"), family.dialect(target)
    assert hf is not None
    assert to is not None
    held = {name: shape for name, shape in shapes.items() if name not in lost}
    entries = {
        name: Entry(name, "BF16", shape, (Extent((0,) * len(shape), shape, "file", 0),)) for name, shape in held.items()
    }
    sizes = Sizes(family, {"model_type": name, **config, **changed})
    return translate(bind(list(held), family, hf, sizes, stored=entries), entries, to, sizes), held


def _missing(view: Translation) -> set[str]:
    """Names that are said to be missing, of these layers."""
    lines = [line for refusal in view.refusals for line in refusal.message.splitlines()[1:]]
    assert {refusal.code for refusal in view.refusals} <= {"MISSING_TENSOR"}
    return {line for line in lines if "mtp" in line}


def _whole(target: Target) -> bool:
    return target.component != "" and int(np.prod(target.shape)) > 0


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("target", ["hf", "transformers"])
def test_every_name_of_the_source_is_read_with_its_shape_and_kept(case: str, target: str) -> None:
    view, held = translated(case, target)
    assert _missing(view) == set()
    assert view.kept == ()
    assert {name: target.shape for name, target in view.targets.items()} == held
    assert all(map(_whole, view.targets.values()))


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_model_without_these_layers_lacks_none_of_them(case: str) -> None:
    _, held = translated(case, "hf")
    view, _ = translated(case, "hf", *held)
    assert _missing(view) == set()


@pytest.mark.parametrize(
    ("case", "lost"),
    [
        ("mellum", "mtp.layers.0.mlp.experts.1.up_proj.weight"),
        ("exaone", "mtp.layers.1.self_attn.q_proj.weight"),
        ("nemotron", "mtp.layers.1.mixer.experts.2.down_proj.weight"),
    ],
)
def test_a_part_of_them_lacks_the_rest(case: str, lost: str) -> None:
    assert _missing(translated(case, "hf", lost)[0]) == {lost}


@pytest.mark.parametrize("case", ["mellum", "exaone", "ernie", "nemotron"])
def test_a_config_without_such_layers_keeps_them_under_their_names(case: str) -> None:
    """transformers writes a zero where it has left them out; a table need not know what is stored in spite of it."""
    view, held = translated(case, "transformers", num_nextn_predict_layers=0)
    assert _missing(view) == set()
    numbered = {name for name in held if any(part.isdigit() for part in name.split("."))}
    assert numbered <= set(view.kept) | {name for name, target in view.targets.items() if target.component}
    assert set(view.targets) == set(held)
