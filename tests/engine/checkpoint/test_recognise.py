"""Family and dialect are told by the config and the names, never by shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import transaxle as tx
from tests import checkpoints
from transaxle.axes.layout.bind import group, score
from transaxle.engine.checkpoint.recognise import pick_family, recognise
from transaxle.errors import Code
from transaxle.families import Families, builtin, with_rules

NAMES = tuple(checkpoints.shapes())
CONFIG = checkpoints.CONFIG
DENSE = tuple(name for name in NAMES if ".experts." not in name and ".mlp.gate." not in name) + tuple(
    f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(2) for part in ("gate", "up", "down")
)
"""Names of a Qwen3 without experts."""
PLAIN = tuple(name for name in DENSE if "_norm." not in name or "layernorm" in name)
"""Without norms of q and k: names of a Llama."""

TWINS = """
family one
  axes d
  a : d
  b : d
dialect hf
  a = a[d]
  b = b[d]
family two
  axes d f
  a : f
  b : d
dialect hf
  a = a[f]
  b = b[d]
family three
  axes d
  a : d
  b : d
  c : d
dialect hf
  a = a[d]
  b = b[d]
  c = c[d]
"""


def found(names: tuple[str, ...], config: dict[str, Any] | None = None, **said: str) -> tuple[str, str, str]:
    result = recognise(names, config or {}, builtin(), **said)
    return result.family.name, result.dialect.label, result.prefix


def refused(code: Code, *words: str) -> Any:
    return pytest.raises(tx.TransaxleError, match=rf"(?s)^{code}\b.*{'.*'.join(words)}")


@pytest.mark.parametrize(
    ("names", "family"), [(NAMES, "qwen3_moe"), (DENSE, "qwen3"), (PLAIN, "llama")], ids=["moe", "qwen3", "llama"]
)
def test_names_alone_tell_the_family(names: tuple[str, ...], family: str) -> None:
    """Every name of a Llama is one of a Qwen3 too; what a Qwen3 always has, and these lack, decides."""
    assert found(names) == (family, "hf", "")


@pytest.mark.parametrize("family", ["mistral", "altclip"])
def test_a_dialect_more_does_not_make_a_family_answer_to_names(family: str) -> None:
    """Its other dialects have names that many models have, and another layout."""
    added = with_rules(f"dialect mine of {family} like hf\n", "mine.rules")
    for families in (added, added.everything):
        assert not any(families.entries[family].dialects.values())
        assert [each.name for each in families.of_types(builtin()[family].model_types)] == [family]
    anew = with_rules(f"family {family}\n  axes d=width\n  a : d\ndialect hf\n  a = a[d]\n", "mine.rules")
    assert anew.entries[family].dialects == anew.everything.entries[family].dialects == {"hf": ("a",)}


@pytest.mark.parametrize(("alike", "family"), [(("one",), "two"), (("two",), "one"), (("one", "two"), "three")])
def test_a_checkpoint_is_what_is_alike_nothing_else(tmp_path: Path, alike: tuple[str, ...], family: str) -> None:
    table = TWINS
    for name in alike:
        table = table.replace(f"family {name}\n", f"family {name}\n  alike other\n")
    rules = tmp_path / "twins.rules"
    rules.write_text(table)
    source = checkpoints.write(tmp_path / "source", {name: np.zeros(4, np.float32) for name in "ab"})
    with tx.open(source, rules=rules) as checkpoint:
        assert checkpoint.family == family
    with tx.open(source, rules=rules, family=alike[0]) as checkpoint:
        assert checkpoint.family == alike[0]


@pytest.mark.parametrize("prefix", ["module.", "model.", "a.b.c."])
def test_one_prefix_stands_before_all_names(prefix: str) -> None:
    assert found(tuple(prefix + name for name in NAMES)) == ("qwen3_moe", "hf", prefix)
    states = tuple(f"optim/{prefix}{name}/{state}" for name in NAMES for state in ("exp_avg", "step"))
    assert found(states) == ("qwen3_moe", "hf", prefix)


@pytest.mark.parametrize("family", ["falcon", "phi3"])
def test_an_engine_that_has_the_names_of_the_hub_is_never_guessed(family: str) -> None:
    """It may hold other contents under them: its dialect must be named."""
    dialect = builtin()[family].dialect("vllm")
    assert dialect is not None
    names = tuple(line.name.text.replace("{l}", "0") for line in dialect.lines if not line.read_only)
    config = {"model_type": family}
    assert recognise(names, config, builtin()).dialect.name == "hf"
    assert recognise(names, config, builtin(), dialect="vllm").dialect.name == "vllm"


def test_what_the_user_says_is_believed() -> None:
    assert found(PLAIN, family="qwen3") == ("qwen3", "hf", "")
    assert found(PLAIN, {"model_type": "unheard_of"}, family="llama")[0] == "llama"
    assert found(PLAIN, dialect="automodel") == ("llama", "automodel", "")
    with refused("UNKNOWN_FAMILY", "Did you mean llama"):
        found(PLAIN, family="lama")


def test_an_unknown_model_type_is_refused_with_what_its_names_look_like() -> None:
    with refused("UNKNOWN_FAMILY", "'unheard_of'", "look like qwen3_moe", "--family qwen3_moe"):
        found(NAMES, {"model_type": "unheard_of"})


@pytest.mark.parametrize("names", [(), ("a", "b.c"), ("....",)])
def test_names_of_no_family(names: tuple[str, ...]) -> None:
    with refused("UNKNOWN_FAMILY", "identity"):
        found(names)


def test_close_names_are_pointed_out() -> None:
    with refused("UNKNOWN_FAMILY", "Closest: "):
        found(tuple(name.replace("model.layers", "model.layer") for name in NAMES if "layers" in name))


def test_a_checkpoint_without_config_is_asked_what_it_is() -> None:
    """Tables that answer to a model_type only know these names; one name that is like another's means nothing."""
    names = tuple(f"encoder.layer.{at}.output.dense.{kind}" for at in range(3) for kind in ("weight", "bias"))
    names = ("embeddings.position_embeddings.weight", *names)
    with refused(
        "UNKNOWN_FAMILY", "that answers to names alone", "Tensor names identify few", "--config FILE"
    ) as caught:
        found(names)
    assert "Closest" not in str(caught.value)
    assert found(names, {"model_type": "bert"})[0] == "bert"


@pytest.mark.parametrize(("label", "hint"), [("QWEN3", "Did you mean qwen3?"), ("ctrl", "transaxle derive")])
def test_names_of_families_that_are_not_known(label: str, hint: str) -> None:
    with refused("UNKNOWN_FAMILY", hint.replace("?", r"\?")):
        pick_family(label, builtin())


def test_two_families_that_read_alike_are_listed_and_never_guessed(tmp_path: Path) -> None:
    rules = tmp_path / "twins.rules"
    rules.write_text(TWINS)
    # Square or not, and of the one size or the other: shapes must not tell.
    for shape in ((4,), (5,)):
        source = checkpoints.write(
            tmp_path / str(shape), {"a": np.zeros(4, np.float32), "b": np.zeros(shape, np.float32)}
        )
        with tx.open(source, rules=rules) as checkpoint:
            with refused("AMBIGUOUS", "one:hf", "two:hf", "--family") as caught:
                _ = checkpoint.reading
            assert caught.value.exit_code == 2
            assert "three" not in str(caught.value), "it lacks a tensor that this family always has"
            assert (checkpoint.family, checkpoint.dialect) == (None, None)
        with tx.open(source, rules=rules, family="two") as checkpoint:
            assert checkpoint.family == "two"


OUTER = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@pytest.mark.parametrize(
    "names",
    [
        OUTER,
        ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"),
        (*OUTER, "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"),
    ],
    ids=["hf", "megatron", "some of a layer"],
)
def test_names_that_many_models_have_are_never_of_one_of_them(names: tuple[str, ...]) -> None:
    """All of DeepSeek-V3's layers have a condition: without any of them, it is no more complete than others."""
    with refused("AMBIGUOUS", "deepseek_v3:", "each read", "no config.json", "--config FILE", "identity") as caught:
        found(names)
    assert len(str(caught.value)) < 900
    assert found(names, {"model_type": "llama"})[0] == "llama"
    assert found(names, family="qwen3")[0] == "qwen3"


@pytest.mark.parametrize("transposed", [False, True])
def test_shapes_are_not_looked_at(tmp_path: Path, *, transposed: bool) -> None:
    """The same names with every matrix on its side are the same dialect; what does not fit is refused later."""
    held = {name: array.T if transposed else array for name, array in checkpoints.tensors().items()}
    held = {name: np.ascontiguousarray(array) for name, array in held.items()}
    source = checkpoints.write(tmp_path / "source", held, config=CONFIG)
    with tx.open(source) as checkpoint:
        assert (checkpoint.family, checkpoint.dialect) == ("qwen3_moe", "hf")
    plan = tx.plan(source, tmp_path / "out", to="megatron")
    assert {refusal.code for refusal in plan.refusals} == ({"SHAPE_MISMATCH"} if transposed else set())


def test_the_newest_version_is_written_and_every_one_is_read(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    for to, label in [("torchtitan", "torchtitan@0.3"), ("torchtitan@0.2", "torchtitan@0.2")]:
        out = tmp_path / to
        assert tx.convert(source, out, to=to, sync=False).dialect == label
        (out / "transaxle.json").unlink()
        with tx.open(out) as checkpoint:
            assert checkpoint.dialect == label
    with refused("AMBIGUOUS", "torchtitan@9", "torchtitan@0.2"):
        tx.plan(source, tmp_path / "x", to="torchtitan@9")


def test_axes_must_exist(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    with refused("UNKNOWN_AXIS", "zz"):
        tx.open(source, axes={"zz": 3})


@pytest.mark.parametrize("said", [{}, {"family": "llama"}])
def test_names_of_a_model_without_its_head_are_told_what_they_lack(said: dict[str, str]) -> None:
    bare = tuple(name.removeprefix("model.") for name in PLAIN if name != "lm_head.weight")
    with refused("UNKNOWN_FAMILY", "llama:hf without 'model.' in front", "Save the whole model", "identity"):
        found(bare, {"model_type": "llama"}, **said)
    assert found(PLAIN, {"model_type": "llama"}) == ("llama", "hf", "")


def titan_names(family: str, layers: int = 2) -> list[str]:
    """All that torchtitan's dialect of a family has for some layers, and what a run remembers."""
    dialect = builtin()[family].dialect("torchtitan")
    assert dialect is not None
    names = {line.name.format((layer,) * len(line.name.holes)) for line in dialect.lines for layer in range(layers)}
    return sorted(names)


def stored(folder: Path, names: list[str]) -> Path:
    np_file = {name: np.full((2, 2), number, "float32") for number, name in enumerate(names)}
    folder.mkdir()
    save_file(np_file, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_names_of_a_dialect_stay_in_it_whichever_model_has_them(family: str, tmp_path: Path) -> None:
    names = titan_names(family)
    source = stored(tmp_path / "source", [*names, "train_state.step"])
    tx.convert(source, tmp_path / "titan", to="safetensors:torchtitan", verify=True)
    assert set(tx.open(tmp_path / "titan")) == {*names, "train_state.step"}
    assert tx.verify(source, tmp_path / "titan")
    for to in ("hf", "safetensors:torchtitan@0.2", "dcp:megatron"):
        with refused("AMBIGUOUS", f"{family}:torchtitan@0.3", "config="):
            tx.plan(source, tmp_path / "out", to=to)


def bounds_and_matches(families: Families, names: list[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return family and dialect -> how many names it may read by the index, and how many it reads."""
    grouped = group(names)
    bounds = families.most_names({key: len(alike) for key, alike in grouped.items()})
    return {
        (name, dialect.label): (bounds.get((name, dialect.label), 0), score(grouped, dialect)[0])
        for name in families.entries
        for dialect in families[name].dialects
    }


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "module.layers.3."])
@pytest.mark.parametrize("source", ["qwen3_5_moe", "deepseek_v4", "sam3_tracker"])
def test_no_table_reads_more_names_than_the_index_says(source: str, prefix: str) -> None:
    """Tables are skipped, unread, whose bound is too small; so none may be too small, of any table."""
    dialect = builtin()[source].dialects[0]
    formatted = {line.name.format((at,) * len(line.name.holes)) for line in dialect.lines for at in range(2)}
    names = [*(prefix + name for name in sorted(formatted)), "one.more.weight"]
    found_bounds = bounds_and_matches(builtin(), names)
    assert not {dialect: pair for dialect, pair in found_bounds.items() if pair[0] < pair[1]}
    assert found_bounds[source, dialect.label] == (len(formatted), len(formatted))


def test_tables_of_a_user_may_read_every_name() -> None:
    """No index lists their names."""
    families = with_rules(TWINS, "twins.rules")
    assert families.most_names({"a": 2, "x.b": 1}) == {(name, "hf"): 3 for name in ("one", "two", "three")}
