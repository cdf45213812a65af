"""Formulas and numbers of a family: what they evaluate to, and what is refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.axes.apply import Array, Store, carried, fill, law, only, same, translated
from tests.axes.toy import only_refusal
from transaxle.axes.layout.relayout import Copier
from transaxle.axes.layout.tile import scales
from transaxle.axes.notation.family import PLAIN, WORDS, Family, Formula, NumberFormat, words
from transaxle.encodings.encoding import ENCODINGS
from transaxle.errors import Refused, TransaxleError
from transaxle.families import builtin

CONFIG: dict[str, Any] = {
    "heads": 8, "kv": 2, "head_dim": None, "hidden": 48, "types": ["full", "sliding", "full"], "moe": "1, 2",
    "only": [0], "other": {"heads": 10, "deep": {"x": 3}}, "flag": False,
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), [
    ("heads/kv", 4), ("heads//3", 2), ("heads % 3", 2), ("-(heads - 3) * 2 + 1", -9), ("head_dim|hidden/heads", 6),
    ("absent|heads", 8), ("flag|heads", False), ("absent|head_dim", None), ("absent + 1", None), ("absent / 0", None),
    ('types[l] == "full"', True), ('types[l + 1] == "full"', False), ("types[7]", None), ("types[-1]", "full"),
    ("other.heads", 10), ("other.deep.x", 3), ('other["heads"]', 10), ("heads.x", None), ("absent.x", None),
    ("absent[0]", None), ("l in moe", False), ("l + 1 in moe", True), ("l in only", True), ("l not in only", False),
    ("l in [1, 0]", True), ("l in absent", None), ("8 if flag else 9", 9), ("8 if absent else 9", None),
    ("not flag", True), ("not absent", None), ("1 < heads <= 8 != 9", True), ("1 < absent", None),
    ("True and absent", None), ("False and absent", False), ("absent and False", False), ("absent or True", True),
    ("absent or False", None), ("kv and heads % kv == 0", True), ("flag and heads % flag == 0", False), ("None", None),
])  # fmt: skip
def test_values(text: str, value: Any) -> None:
    found = Formula(text)({**CONFIG, "l": 0})
    assert found == value
    assert type(found) is type(value)


@law
@given(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=4), st.booleans())
def test_connectives_are_certain_or_unknown(values: list[bool | None], conjunction: bool) -> None:
    """What is unknown may become either: the answer is known where both give the same."""
    names = {f"v{i}": value for i, value in enumerate(values)}
    worlds = product(*([True, False] if value is None else [value] for value in values))
    outcomes = {all(world) if conjunction else any(world) for world in worlds}
    wanted = outcomes.pop() if len(outcomes) == 1 else None
    assert Formula((" and " if conjunction else " or ").join(names))(names) is wanted


def test_names_and_equality() -> None:
    sparse = Formula("l in moe")
    assert Formula("heads/kv|other.heads", {}).names == {"heads", "kv", "other"}
    assert Formula("sparse and flag", {"sparse": sparse}).names == {"l", "moe", "flag"}
    assert Formula("sparse and not flag", {"sparse": sparse})({**CONFIG, "l": 2}) is True
    assert Formula("a", {"a": Formula("b")}) == Formula("a")
    assert len({Formula("a"), Formula("a"), Formula("b")}) == 2


@pytest.mark.parametrize(("text", "why"), [
    ("heads +", "invalid syntax"),
    ("", "invalid syntax"),
    ("f(x)", "only the call len(X) is allowed"),
    ("[x for x in y]", "ListComp is not allowed in formulas"),
    ("lambda: 1", "Lambda is not allowed in formulas"),
    ("a ** b", "Pow is not allowed in formulas"),
    ("a is b", "Is is not allowed in formulas"),
    ("f'{a}'", "JoinedStr is not allowed in formulas"),
    ("a[1:2]", "Slice is not allowed in formulas"),
    ("(a := 1)", "NamedExpr is not allowed in formulas"),
    ("a @ b", "MatMult is not allowed in formulas"),
    ("a\0b", ""),
    ("(" * 5000 + "a" + ")" * 5000, ""),
    ("+".join("a" * 50_000), ""),
    ("-" * 5000 + "a", ""),
    ("-" * 900 + "a", ""),
])  # fmt: skip
def test_only_arithmetic_is_read(text: str, why: str) -> None:
    with pytest.raises(Refused) as caught:
        _ = Formula(text).names
    assert caught.value.code == "CORRUPT"
    assert why in str(caught.value)


@pytest.mark.parametrize(("text", "code", "why"), [
    ("heads/3", "SHAPE_MISMATCH", "8 is not divisible by 3"),
    ("heads/zero", "CORRUPT", "zero"),
    ("heads % zero", "CORRUPT", "zero"),
    ("heads < text", "CORRUPT", "not supported"),
    ("heads in heads", "CORRUPT", "not iterable"),
    ("-text", "CORRUPT", "bad operand"),
    ("heads + text", "CORRUPT", "'%9d' is not a number"),
    ("text % heads", "CORRUPT", "'%9d' is not a number"),
    ("text / heads", "CORRUPT", "'%9d' is not a number"),
    ("many * heads", "CORRUPT", "is not a number"),
    ("mapping[many]", "CORRUPT", "unhashable"),
])  # fmt: skip
def test_what_a_config_may_not_do_to_it(text: str, code: str, why: str) -> None:
    """Configs are untrusted: text is never formatted, lists are never multiplied, and no error goes unexplained."""
    values = {"heads": 8, "zero": 0, "text": "%9d", "many": [1], "odd": "2,²,1", "mapping": {}}
    assert Formula("1 in odd")(values) is True
    with pytest.raises(TransaxleError) as caught:
        Formula(text)(values)
    assert caught.value.code == code
    assert text in str(caught.value)
    assert why in str(caught.value)


def test_a_number_finds_the_entry_that_json_writes_as_a_text() -> None:
    sized = Formula("per_layer_config[l].head_dim | head_dim")
    config = {"head_dim": 4, "per_layer_config": {"3": {"head_dim": 8}, "5": {}}}
    assert [sized({**config, "l": layer}) for layer in (2, 3, 5)] == [4, 8, 4]
    assert Formula("table[3]")({"table": {3: "number", "3": "text"}}) == "number"
    assert Formula("table[True]")({"table": {"True": 1}}) is None
    assert Formula("table['3']")({"table": {3: 1}}) is None


# Lines that hold for one encoding only: which is read, which is written, and where the codes go.

CODES = "F4"
"""Here one array element per code: packing two into a byte is not the algebra's."""
MX = "mxfp4"

OSS = builtin()["gpt_oss"]
CONFIG_NUMBER_FORMAT = {
    "num_hidden_layers": 2, "num_local_experts": 3, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
EXPERTS = "model.layers.{}.mlp.experts."


def model(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """gpt-oss as its hub stores it: the experts' codes [out in], gate and up row by row in turn."""
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (64,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (5, 64))
    for layer in range(2):
        stem = f"model.layers.{layer}."
        for letter, rows in (("q", 32), ("k", 16), ("v", 16)):
            shapes[f"{stem}self_attn.{letter}_proj.weight"] = (rows, 64)
            shapes[f"{stem}self_attn.{letter}_proj.bias"] = (rows,)
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
    view = translated(family, "hf", target, store, CONFIG_NUMBER_FORMAT, encodings=encodings)
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
        view = translated(OSS, "hf", target, store, CONFIG_NUMBER_FORMAT, encodings=encodings)
        assert {name for name, one in view.targets.items() if one.encoding == MX} == set(experts())
        assert {one.dtype for one in view.targets.values() if one.encoding == PLAIN} == {"BF16"}
        assert view.targets[experts()[0]].rule.endswith("[e (f [gate: | up:]) d]")


def test_codes_keep_their_names_where_plain_numbers_have_taken_them() -> None:
    """torchtitan's files call bf16 numbers what the hub calls codes; codes themselves have no line there."""
    tensors = model(torch.Generator().manual_seed(7))
    store, encodings = stored(tensors, experts())
    view = translated(OSS, "hf", "torchtitan_hf", store, CONFIG_NUMBER_FORMAT, encodings=encodings)
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


TILING = dict.fromkeys(experts(), (1, 1, 32))


def test_codes_that_would_leave_their_scale_are_refused() -> None:
    """Automodel stores experts [in out] only: 32 codes of one scale would lie in 32 rows."""
    store, encodings = stored(model(torch.Generator().manual_seed(5)), experts())
    view = translated(OSS, "hf", "automodel", store, CONFIG_NUMBER_FORMAT, encodings=encodings)
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

    for held, coded_names, recode, wanted in (
        (tensors, experts(), decoded, {**tensors, **plain}),
        ({**tensors, **plain}, [], coded, tensors),
    ):
        store, encodings = stored(held, coded_names)
        view = translated(OSS, "hf", "hf", store, CONFIG_NUMBER_FORMAT, encodings=encodings, recode=recode)
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
