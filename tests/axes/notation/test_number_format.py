"""Lines that hold for one encoding only: which is read, which is written, and where the codes go."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from tests.axes.apply import Array, Store, carried, fill, only, same, translated
from tests.axes.toy import only_refusal
from transaxle.axes.layout.relayout import Copier
from transaxle.axes.layout.tile import scales
from transaxle.axes.notation import tables
from transaxle.axes.notation.family import PLAIN, WORDS, Family, NumberFormat, words
from transaxle.encodings.encoding import ENCODINGS
from transaxle.errors import Refused
from transaxle.families import builtin

CODES = "F4"
"""Here one array element per code: packing two into a byte is not the algebra's."""
MX = "mxfp4"

OSS = builtin()["gpt_oss"]
CONFIG = {
    "num_hidden_layers": 2,
    "num_local_experts": 3,
    "hidden_size": 64,
    "intermediate_size": 32,
    "vocab_size": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = "model.layers.{}.mlp.experts."


def model(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """gpt-oss as its hub stores it: the experts' codes [out in], gate and up row by row in turn."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (5, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (5, 64),
    }
    for layer in range(2):
        stem = f"model.layers.{layer}."
        for letter, rows in (("q", 32), ("k", 16), ("v", 16)):
            shapes |= {
                f"{stem}self_attn.{letter}_proj.weight": (rows, 64),
                f"{stem}self_attn.{letter}_proj.bias": (rows,),
            }
        shapes |= {
            f"{stem}self_attn.o_proj.weight": (64, 32),
            f"{stem}self_attn.o_proj.bias": (64,),
            f"{stem}self_attn.sinks": (4,),
            f"{stem}input_layernorm.weight": (64,),
            f"{stem}post_attention_layernorm.weight": (64,),
            f"{stem}mlp.router.weight": (3, 64),
            f"{stem}mlp.router.bias": (3,),
            f"{stem}mlp.experts.gate_up_proj": (3, 64, 64),
            f"{stem}mlp.experts.gate_up_proj_bias": (3, 64),
            f"{stem}mlp.experts.down_proj": (3, 64, 32),
            f"{stem}mlp.experts.down_proj_bias": (3, 64),
        }
    return {name: torch.randint(0, 16, shape, generator=generator) for name, shape in shapes.items()}


def stored(tensors: dict[str, torch.Tensor], coded: list[str]) -> tuple[Store, dict[str, str]]:
    """These tensors, some of them as codes, and what their encodings are."""
    store = Store()
    for name, tensor in tensors.items():
        store.put(name, tensor, dtype=CODES if name in coded else "BF16")
    return store, dict.fromkeys(coded, MX)


def experts(layers: int = 2) -> list[str]:
    return [EXPERTS.format(layer) + name for layer in range(layers) for name in ("gate_up_proj", "down_proj")]


def filled(family: Family, target: str, tensors: dict[str, torch.Tensor], coded: list[str]) -> dict[str, Array]:
    """The numbers of a Hugging Face model in another dialect."""
    store, encodings = stored(tensors, coded)
    view = translated(family, "hf", target, store, CONFIG, encodings=encodings)
    assert view.refusals == ()
    copier = Copier(store.entries)
    return {name: fill(store, one, copier=copier) for name, one in view.targets.items()}


def test_the_words_are_the_encodings() -> None:
    assert set(WORDS) == set(ENCODINGS)
    assert words(MX) == {word: word == MX for word in WORDS}
    assert not any(words(PLAIN).values())


def test_codes_stay_as_they_lie_where_both_sides_hold_codes() -> None:
    tensors = model(torch.Generator().manual_seed(1))
    store, encodings = stored(tensors, experts())
    for target in ("hf", "transformers"):
        same(filled(OSS, target, tensors, experts()), tensors)
        view = translated(OSS, "hf", target, store, CONFIG, encodings=encodings)
        assert {name for name, one in view.targets.items() if one.encoding == MX} == set(experts())
        assert {one.dtype for one in view.targets.values() if one.encoding == PLAIN} == {"BF16"}
        assert view.targets[experts()[0]].rule.endswith("[e (f [gate: | up:]) d]")


def test_codes_keep_their_names_where_plain_numbers_have_taken_them() -> None:
    """torchtitan's files call bf16 numbers what the hub calls codes; codes themselves have no line there."""
    tensors = model(torch.Generator().manual_seed(7))
    store, encodings = stored(tensors, experts())
    view = translated(OSS, "hf", "torchtitan_hf", store, CONFIG, encodings=encodings)
    assert view.refusals == ()
    assert sorted(view.kept_names) == sorted(experts())
    same({name: fill(store, one) for name, one in view.targets.items()}, tensors)
    assert {view.targets[name].encoding for name in experts()} == {MX}


TITAN = "layers.{}.moe.routed_experts.inner_experts.mlp{}_weight_{}"


def test_plain_files_of_the_same_names_are_read_the_other_way_round() -> None:
    """gate_up_proj is square here, so nothing but the encoding can tell."""
    tensors = model(torch.Generator().manual_seed(2))
    found = filled(OSS, "torchtitan", {**tensors, **{name: tensors[name].mT for name in experts()}}, [])
    same(found, filled(OSS, "torchtitan", tensors, experts()))
    np.testing.assert_array_equal(found[TITAN.format(0, 1, "EGD")], tensors[experts()[0]])


def test_one_layer_may_be_coded_and_another_plain() -> None:
    tensors = model(torch.Generator().manual_seed(3))
    mixed = {**tensors, **{name: tensors[name].mT for name in experts()[2:]}}
    same(filled(OSS, "hf", mixed, experts(1)), mixed)
    titan = filled(OSS, "torchtitan", mixed, experts(1))
    for layer in range(2):
        for number, end in ((1, "EGD"), (2, "EDF")):
            wanted = tensors[experts()[2 * layer + number - 1]]
            np.testing.assert_array_equal(titan[TITAN.format(layer, number, end)], wanted)


SPLIT = """
dialect split of gpt_oss like hf
  model.layers.{l}.mlp.experts.{e}.gate.weight = gate[f d]
  model.layers.{l}.mlp.experts.{e}.up.weight   = up[f d]
  model.layers.{l}.mlp.experts.{e}.down.weight = down[d f]
"""
TILING = dict.fromkeys(experts(), (1, 1, 32))


@pytest.mark.parametrize(("part", "source", "first", "step"), [("gate", 0, 0, 2), ("up", 0, 1, 2), ("down", 1, 0, 1)])
def test_interleaved_codes_part_along_whole_rows_with_their_scales(
    part: str, source: int, first: int, step: int
) -> None:
    """Each expert's gate is every other row, and its scales are every other row of the scales: by slicing."""
    (family,) = tables.read(SPLIT, known_families=builtin())
    tensors = model(torch.Generator().manual_seed(4))
    store, encodings = stored(tensors, experts())
    grids = {
        f"{name}_scales": torch.arange(tensors[name].numel() // 32).reshape(3, 64, -1) + 1000 * number
        for number, name in enumerate(experts())
    }
    view = translated(family, "hf", "split", store, CONFIG, encodings=encodings)
    assert view.refusals == ()
    for layer, e in product(range(2), range(3)):
        target = view.targets[f"model.layers.{layer}.mlp.experts.{e}.{part}.weight"]
        assert (target.dtype, target.encoding) == (CODES, MX)
        name = experts()[2 * layer + source]
        np.testing.assert_array_equal(fill(store, target), tensors[name][e, first::step])
        moved = scales(target, (1, 32), TILING, scale_name=lambda codes: f"{codes}_scales", dtype="U8")
        np.testing.assert_array_equal(fill(Store(grids), moved.target), grids[f"{name}_scales"][e, first::step])


def test_codes_that_would_leave_their_scale_are_refused() -> None:
    """Automodel stores experts [in out] only: 32 codes of one scale would lie in 32 rows."""
    store, encodings = stored(model(torch.Generator().manual_seed(5)), experts())
    view = translated(OSS, "hf", "automodel", store, CONFIG, encodings=encodings)
    target = view.targets["model.layers.0.mlp.experts.gate_and_up_projs"]
    assert (target.encoding, target.shape) == (MX, (3, 64, 64))
    with pytest.raises(Refused, match="BLOCK_MISALIGNED"):
        scales(target, (1, 1, 32), TILING, scale_name=str, dtype="U8")


def test_what_is_decoded_is_written_in_the_plain_layout() -> None:
    """The line follows what is written, not what is read: with `recode`, and the other way round."""
    tensors = model(torch.Generator().manual_seed(6))
    plain = {name: tensors[name].mT for name in experts()}

    def decoded(name: str, form: NumberFormat) -> NumberFormat:
        assert name in tensors
        return NumberFormat("BF16") if form.encoding else form

    def coded(name: str, form: NumberFormat) -> NumberFormat:
        return NumberFormat(CODES, MX) if name in experts() else form

    for held, given, recode, wanted in (
        (tensors, experts(), decoded, {**tensors, **plain}),
        ({**tensors, **plain}, [], coded, tensors),
    ):
        store, encodings = stored(held, given)
        view = translated(OSS, "hf", "hf", store, CONFIG, encodings=encodings, recode=recode)
        assert view.refusals == ()
        same({name: fill(store, one) for name, one in view.targets.items()}, wanted)
        form = recode(experts()[0], NumberFormat(CODES, MX))
        assert {(view.targets[name].dtype, view.targets[name].encoding) for name in experts()} == {form}


FUSED = only("""
family fused
  axes f=f d=d
  gate : f d
  up   : f d
dialect apart
  gate = gate[f d]
  up = up[f d]
dialect one
  both = [[gate:f | up:f] d]
dialect none
  gate = gate[f d]
""")


def test_parts_in_different_encodings_are_not_put_together() -> None:
    store = Store()
    for name in ("gate", "up"):
        store.put(name, torch.arange(12).reshape(3, 4), dtype="F8_E4M3")
    for encodings, kinds in (
        ({"gate": "float8", "up": "mxfp8"}, "F8_E4M3 float8 and F8_E4M3 mxfp8"),
        ({"gate": "float8"}, "F8_E4M3 and F8_E4M3 float8"),
    ):
        refusal = only_refusal(translated(FUSED, "apart", "one", store, encodings=encodings), "DTYPE_MIXED")
        assert kinds in refusal.message
    view = translated(FUSED, "apart", "one", store, encodings=dict.fromkeys(("gate", "up"), "mxfp8"))
    assert (view.targets["both"].dtype, view.targets["both"].encoding) == ("F8_E4M3", "mxfp8")


def test_a_tensor_without_a_place_keeps_its_encoding() -> None:
    store = Store()
    for name in ("gate", "up", "else"):
        store.put(name, torch.arange(12).reshape(3, 4), dtype="F8_E4M3")
    view = translated(FUSED, "apart", "none", store, encodings=dict.fromkeys(("up", "else"), "float8"))
    assert view.kept_names == ("else", "up")
    assert {name: one.encoding for name, one in view.targets.items()} == {"gate": "", "up": "float8", "else": "float8"}


def test_without_encodings_words_are_false() -> None:
    """A line that asks for one is not taken, and its negation is."""
    family = only(
        "family two\n  axes l=n d=d f=f\n  x : l d f\n"
        "dialect a\n  x.{l} = x[f d] when float8\n  x.{l} = x[d f] when not float8\n"
        "dialect b\n  y.{l} = x[d f]\n"
    )
    tensor = torch.arange(16).reshape(4, 4)
    same(carried(family, "a", "b", Store({"x.0": tensor}), {"n": 1}), {"y.0": tensor})
    view = translated(family, "a", "b", Store({"x.0": tensor}), {"n": 1}, encodings={"x.0": "float8"})
    np.testing.assert_array_equal(fill(Store({"x.0": tensor}), view.targets["y.0"]), tensor.T)
