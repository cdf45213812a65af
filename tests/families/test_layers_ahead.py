"""Layers that predict ahead, as the hub has them beside models that transformers builds without: names by their source.

A source is vLLM's model of these layers, whose `load_weights` says the stored names, or transformers' `MtpModel`.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.some import some
from transaxle.axes.layout.bind import bind
from transaxle.axes.layout.model_tensors import Model
from transaxle.axes.notation.family import Sizes
from transaxle.axes.translation.translate import Translation, translate
from transaxle.families import builtin
from transaxle.formats.catalog import Entry, Extent

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
    held = {name: shape for name, shape in shapes.items() if name not in lost}
    return _expressed(name, {"model_type": name, **config, **changed}, held, target), held


def _expressed(name: str, config: dict[str, Any], held: Shapes, target: str) -> Translation:
    """Tensors of a family, of one value each in bf16, in another dialect than the hub's."""
    family = builtin()[name]
    hf, to = family.dialect("hf"), family.dialect(target)
    entries = {n: Entry(n, "BF16", s, (Extent((0,) * len(s), s, "file", 0),)) for n, s in held.items()}
    sizes = Sizes(family, config)
    return translate(bind(list(held), family, some(hf), sizes, stored=entries), entries, some(to), sizes)


def _missing(view: Translation) -> set[str]:
    """Names that are said to be missing, of these layers."""
    lines = [line for refusal in view.refusals for line in refusal.message.splitlines()[1:]]
    assert {refusal.code for refusal in view.refusals} <= {"MISSING_TENSOR"}
    return {line for line in lines if "mtp" in line}


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("target", ["hf", "transformers"])
def test_every_name_of_the_source_is_read_with_its_shape_and_kept(case: str, target: str) -> None:
    view, held = translated(case, target)
    assert _missing(view) == set()
    assert view.kept_names == ()
    assert {name: target.shape for name, target in view.targets.items()} == held
    assert all(target.component and np.prod(target.shape) > 0 for target in view.targets.values())


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_model_without_these_layers_lacks_none_of_them(case: str) -> None:
    _, held = translated(case, "hf")
    view, _ = translated(case, "hf", *held)
    assert _missing(view) == set()


@pytest.mark.parametrize(("case", "lost"), [
    ("mellum", "mtp.layers.0.mlp.experts.1.up_proj.weight"),
    ("exaone", "mtp.layers.1.self_attn.q_proj.weight"),
    ("nemotron", "mtp.layers.1.mixer.experts.2.down_proj.weight"),
])  # fmt: skip
def test_a_part_of_them_lacks_the_rest(case: str, lost: str) -> None:
    assert _missing(translated(case, "hf", lost)[0]) == {lost}


@pytest.mark.parametrize("case", ["mellum", "exaone", "ernie", "nemotron"])
def test_a_config_without_such_layers_keeps_them_under_their_names(case: str) -> None:
    """transformers writes a zero where it has left them out; a table need not know what is stored in spite of it."""
    view, held = translated(case, "transformers", num_nextn_predict_layers=0)
    assert _missing(view) == set()
    numbered = {name for name in held if any(part.isdigit() for part in name.split("."))}
    assert numbered <= set(view.kept_names) | {name for name, target in view.targets.items() if target.component}
    assert set(view.targets) == set(held)


EVERY_SIZE = {
    **_NEMOTRON, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_shared_experts": 1, "kv_lora_rank": 5,
    "q_lora_rank": 9, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "topk_method": "noaux_tc",
    "shared_expert_intermediate_size": S, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "use_qk_norm": True,
    "linear_key_head_dim": 3, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    "attention_bias": False, "use_bias": False, "moe_num_experts": E, "moe_num_shared_experts": 1,
    "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "num_sliding_attention_heads": 8,
    "share_expert_dim": S, "use_head_wise_attn_gate": True, "use_moe_router_bias": True, "index_n_heads": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "index_head_dim": 4, "mamba_num_heads": 2, "mamba_head_dim": 3,
    "n_groups": 1, "ssm_state_size": 4, "conv_kernel": 4, "mtp_hybrid_override_pattern": "*E",
}  # fmt: skip
"""Keys of the configs of all families whose layers predict ahead; one reads the keys that it knows."""
SLIDING = {"layer_types": ["full_attention", "sliding_attention"]}
BEGUN = ("enorm", "hnorm", "eh_proj", "mtp_norm", "ln1")
AHEAD = (
    "axk1", "bailing_moe_v2", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite",
    "hy_v3", "mellum", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "step3p5",
)  # fmt: skip
"""Families that have such layers; whole models around a text model take them over from these."""
NO_STACKS = frozenset({"bailing_moe_v2", "ernie4_5_moe", "exaone_moe", "qwen3_5_text", "step3p5"})
"""Those whose layers ahead have no experts, and Bailing, which transformers does not know."""


def model_of(name: str) -> tuple[dict[str, Any], Shapes, Shapes]:
    """A config of a family, the stored tensors of its model, and those of the layers ahead, all of them."""
    family = builtin()[name]
    config = {**EVERY_SIZE, "model_type": name, **(SLIDING if name.startswith("step") else {})}
    sizes, hf = Sizes(family, config), family.dialects[0]
    own = {tensor for tensor in family.tensors if tensor.startswith(("ahead_", "mtp_"))} | {*BEGUN}
    known, there, layers = sizes.at({}), dict.fromkeys(own, True), Shapes()
    numbered = "enorm" in family.tensors
    for line in hf.lines:
        for position in product(*(range(known[axis]) for axis in line.name.axes)):
            index, parts = dict(zip(line.name.axes, position, strict=True)), line.expression.components
            if line.read_only or (index.get("l", 0) < 2 if numbered else own.isdisjoint(parts)):
                continue
            conditions = [*(family.tensors[part].when for part in parts), line.when]
            if all(sizes.holds(condition, index, there) for condition in conditions):
                numbers = line.name.numbering(known).numbers(position)
                layers[line.name.format(tuple(n or 0 for n in numbers))] = line.expression.layout(sizes.at(index)).shape
    return config, dict(Model(family, sizes, tp=0).stored_shapes(hf)), layers


def _stacked(layers: Shapes) -> Shapes:
    """The same layers with their experts in stacks, as models have them in memory; empty where they have none."""
    stacks = Shapes()
    for name, shape in layers.items():
        before, experts, rest = name.partition(".experts.0.")
        if experts and rest == "down_proj.weight":
            stacks[f"{before}.experts.down_proj"] = (E, *shape)
        elif experts and rest == "up_proj.weight":
            gated = f"{before}.experts.0.gate_proj.weight" in layers
            stack = "gate_up_proj" if gated else "up_proj"
            stacks[f"{before}.experts.{stack}"] = (E, 2 * shape[0] if gated else shape[0], *shape[1:])
    return {**{name: shape for name, shape in layers.items() if ".experts." not in name}, **stacks}


@pytest.mark.parametrize("family", AHEAD)
def test_the_config_alone_shows_all_tensors_of_the_layers_ahead(family: str) -> None:
    config, model, layers = model_of(family)
    hf = some(builtin()[family].dialect("hf"))
    with_layers = Model(builtin()[family], Sizes(builtin()[family], config), tp=0, ahead=True)
    assert dict(with_layers.stored_shapes(hf)) == {**model, **layers}
    assert len(layers.keys() - model.keys()) > 11


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_config_alone_shows_the_tensors_that_the_source_names(case: str) -> None:
    name, config, shapes = CASES[case]
    family = builtin()[name]
    model = Model(family, Sizes(family, {**EVERY_SIZE, "model_type": name, **config}), tp=0, ahead=True)
    stored = dict(model.stored_shapes(some(family.dialect("hf"))))
    assert {name: shape for name, shape in stored.items() if "mtp" in name} == shapes


@pytest.mark.oracle
@pytest.mark.parametrize("family", AHEAD)
def test_a_layer_ahead_is_whole_or_refused(family: str) -> None:
    """Whatever one of its tensors is missing, and the dialect."""
    config, model, layers = model_of(family)
    target = "megatron" if builtin()[family].dialect("megatron") else "transformers"
    whole = _expressed(family, config, {**model, **layers}, target)
    assert (len(layers) > 11, whole.refusals) == (True, ())
    for lost in (name for name in layers if ".experts.1." not in name):
        held = {name: shape for name, shape in {**model, **layers}.items() if name != lost}
        refusals = _expressed(family, config, held, target).refusals
        assert {refusal.code for refusal in refusals} == {"MISSING_TENSOR"}, lost
        assert any(_unnumbered(lost) in _unnumbered(refusal.message) for refusal in refusals), lost


def _unnumbered(text: str) -> str:
    return re.sub(r"\d+|{[^}]*}", "#", text)


@pytest.mark.parametrize("family", sorted({*AHEAD} - NO_STACKS))
def test_experts_of_a_layer_ahead_in_the_other_form_are_read(family: str) -> None:
    config, model, layers = model_of(family)
    numbered = _expressed(family, config, {**model, **layers}, "hf")
    stacked = _expressed(family, config, {**model, **_stacked(layers)}, "hf")
    assert (stacked.refusals, stacked.kept_names) == ((), ())
    first, second = ({name: target.shape for name, target in each.targets.items()} for each in (stacked, numbered))
    assert first == second
    held = {**model, **_stacked(layers)}
    for lost in held.keys() - layers.keys() - model.keys():
        rest = {name: shape for name, shape in held.items() if name != lost}
        assert "MISSING_TENSOR" in {refusal.code for refusal in _expressed(family, config, rest, "hf").refusals}
