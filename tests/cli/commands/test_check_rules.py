"""`check-rules`: a table is correct, or every mistake is reported with its line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import write
from tests.cli.running import MACHINE, REFUSED, USAGE, Transaxle
from transaxle.families import builtin

SOUND = """\
family toy
  model_type toy
  axes  l=num_hidden_layers d=hidden_size f=intermediate_size v=vocab_size
  embed : v d
  gate  : l f d
  up    : l f d

dialect hf
  model.embed_tokens.weight         = embed[v d]
  model.layers.{l}.gate_proj.weight = gate[f d]
  model.layers.{l}.up_proj.weight   = up[f d]

dialect joined
  embed.weight                      = embed[v d]
  blocks.{l}.gate_up                = [d [gate:f | up:f]]
"""


SIZES = {"num_hidden_layers": 3, "hidden_size": 4, "intermediate_size": 5, "vocab_size": 7}


def _toy(folder: Path, *surplus: str, **sizes: int) -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (7, 4)}
    for layer in range(3):
        shapes |= {f"model.layers.{layer}.{half}_proj.weight": (5, 4) for half in ("gate", "up")}
    shapes |= dict.fromkeys(surplus, (2,))
    write(
        folder,
        {name: np.zeros(shape, np.float32) for name, shape in shapes.items()},
        config={"model_type": "toy", **sizes},
    )


def test_a_correct_table(here: Path, transaxle: Transaxle) -> None:
    Path("toy.rules").write_text(SOUND)
    outcome = transaxle("check-rules", "toy.rules")
    assert outcome.out == (
        "toy.rules: sound\n"
        "  family toy: 4 axes, 3 logical tensors\n"
        "    dialect hf: 3 lines\n"
        "    dialect joined: 2 lines\n"
    )
    assert transaxle("check-rules", "toy.rules", "--json").json["families"] == [
        {
            "name": "toy",
            "model_types": ["toy"],
            "axes": {"l": "num_hidden_layers", "d": "hidden_size", "f": "intermediate_size", "v": "vocab_size"},
            "unsized": [],
            "tensors": ["embed", "gate", "up"],
            "dialects": {"hf": 3, "joined": 2},
            "says_anew": [],
            "replaces": False,
        }
    ]


def test_with_a_checkpoint(here: Path, transaxle: Transaxle) -> None:
    Path("toy.rules").write_text(SOUND)
    _toy(here / "ck", "extra.0.x", "extra.1.x")
    transaxle("check-rules", "toy.rules", "ck").expect(
        0, out=("read as toy, dialect hf", "reads 7 of 9 names", "extra.[0-1].x  x2", "to joined: 6 tensors")
    )
    (found,) = transaxle("check-rules", "toy.rules", "ck", "--json").json["reads"]
    assert (found["names_read"], found["unknown"]) == ({"hf": 7, "joined": 0}, ["extra.0.x", "extra.1.x"])
    assert found["writes"] == {"joined": {"tensors": 6, "refusals": []}}


def test_a_table_that_reads_nothing_of_a_checkpoint(here: Path, transaxle: Transaxle) -> None:
    """The line closest to a name is shown; one family of two that reads names is enough."""
    _toy(here / "ck")
    strange = SOUND.replace("family toy", "family strange").replace("embed_tokens", "embedding").replace("_proj", "_p")
    Path("strange.rules").write_text(strange)
    outcome = transaxle("check-rules", "strange.rules", "ck")
    assert outcome.code == USAGE
    said = " ".join(outcome.err.split())
    assert "no dialect of strange reads any of its 7 names: model.embed_tokens.weight, model.layers.0.gate" in said
    assert "Closest to model.embed_tokens.weight: model.embedding.weight = embed[v d]" in said
    assert "--derive" not in said
    Path("both.rules").write_text(strange + "\n" + SOUND)
    transaxle("check-rules", "both.rules", "ck").expect(
        0, out=("ck: no dialect of strange reads any of its names", "ck: read as toy, dialect hf")
    )
    found = transaxle("check-rules", "both.rules", "ck", "--json").json["reads"]
    assert [(read["family"], read["dialect"]) for read in found] == [("strange", None), ("toy", "hf")]
    assert found[0].keys() == found[1].keys()


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "block half\n  axes l=layers\n"])
def test_a_file_that_declares_nothing(text: str, here: Path, transaxle: Transaxle) -> None:
    Path("empty.rules").write_text(text)
    transaxle("check-rules", "empty.rules").expect(0, out="it declares no family and no dialect")


def test_shapes_that_are_not_those_of_their_lines(here: Path, transaxle: Transaxle) -> None:
    """A transposed line reads every name; only the shapes reveal it."""
    own_only = SOUND.partition("\ndialect joined")[0].replace("up[f d]", "up[d f]")
    Path("toy.rules").write_text(own_only)
    _toy(here / "ck", **SIZES)
    transaxle("check-rules", "toy.rules", "ck").expect(
        REFUSED,
        out=(
            "reads 7 of 7 names",
            "3 tensors without the shape that the table says",
            "model.layers.0.up_proj.weight: up[d f]: expected [4, 5] (d=4, f=5), got [5, 4]",
        ),
    )
    (read,) = transaxle("check-rules", "toy.rules", "ck", "--json").json["reads"]
    assert [refusal["tensor"] for refusal in read["misshapen"]] == [
        f"model.layers.{layer}.up_proj.weight" for layer in range(3)
    ]
    Path("toy.rules").write_text(SOUND.replace("up[f d]", "up[d f]"))
    transaxle("check-rules", "toy.rules", "ck").expect(
        REFUSED, out="to joined: 3 refusals; the first is SHAPE_MISMATCH model.layers.0.up_proj.weight: up[d f]"
    )
    Path("toy.rules").write_text(SOUND)
    outcome = transaxle("check-rules", "toy.rules", "ck")
    assert (outcome.code, "without the shape" in outcome.out) == (0, False)


def test_config_keys_that_do_not_exist(here: Path, transaxle: Transaxle) -> None:
    Path("toy.rules").write_text(SOUND.replace("d=hidden_size", "d=hidden"))
    _toy(here / "ck", **SIZES)
    outcome = transaxle("check-rules", "toy.rules", "ck").expect(
        0, out="config.json has no 'hidden' (axis d); its size comes from the tensors"
    )
    assert outcome.out.count("config.json has no") == 1
    (read,) = transaxle("check-rules", "toy.rules", "ck", "--json").json["reads"]
    assert read["absent_keys"] == [{"axis": "d", "keys": ["hidden"], "size_from": "the tensors"}]
    (here / "ck" / "config.json").unlink()
    assert "config.json" not in transaxle("check-rules", "toy.rules", "ck").out


def test_keys_with_a_substitute_and_axes_that_are_not_in_use_are_not_reported(ck: Path, transaxle: Transaxle) -> None:
    Path("my.rules").write_text("dialect mine of qwen3_moe like hf\n")
    assert "config.json has no" not in transaxle("check-rules", "my.rules", ck).out


def test_replacing_a_built_in_family_is_reported(here: Path, transaxle: Transaxle) -> None:
    Path("toy.rules").write_text(
        SOUND.replace("family toy", "family llama").replace("model_type toy", "model_type x toy")
    )
    _toy(here / "ck", **SIZES)
    assert "replaces the built-in family llama" in transaxle("check-rules", "toy.rules").out
    assert "llama, which replaces the built-in family" in transaxle("info", "ck", "--rules", "toy.rules").out
    Path("more.rules").write_text("dialect mine of llama like hf\n")
    assert "replaces" not in transaxle("check-rules", "more.rules").out


def test_overrides_of_a_family_are_listed(here: Path, transaxle: Transaxle) -> None:
    Path("heir.rules").write_text(
        "family heir like llama\n  dialects hf\n  model_type heir\n  axes f=ffn_dim\n  let tied = True\n"
        "  mount qwen3 as draft from draft\n  axes draft_l=1\n"
        "dialect hf\n  mount draft under draft.\n"
    )
    out = transaxle("check-rules", "heir.rules").out
    assert (
        "    overrides what it takes over:\n"
        "      let tied = True  (in decoder: let tied = tie_word_embeddings)\n"
        "      axes f=ffn_dim  (in mlp: axes f=intermediate_size)\n"
        "      axes draft_l=1  (in decoder: axes draft_l=draft.num_hidden_layers)\n"
    ) in out
    (family,) = transaxle("check-rules", "heir.rules", "--json").json["families"]
    assert family["says_anew"][0] == {
        "of": "decoder",
        "taken": "let tied = tie_word_embeddings",
        "own": "let tied = True",
    }


def test_hints_for_a_forgotten_colon_and_for_like_on_its_own_line(here: Path, transaxle: Transaxle) -> None:
    Path("toy.rules").write_text(SOUND.replace("embed : v d", "embed v d"))
    assert "Is a ':' missing after 'embed'?" in transaxle("check-rules", "toy.rules").err
    Path("toy.rules").write_text(SOUND.replace("embed : v d", "wraper toy_vl"))
    outcome = transaxle("check-rules", "toy.rules")
    assert "missing after" not in outcome.err
    assert "docs/reference/notation.md" in outcome.err
    Path("joined.rules").write_text("dialect joined of qwen3\n  like hf\n")
    hint = "write it in the first line: dialect joined of qwen3 like hf"
    assert hint in transaxle("check-rules", "joined.rules").err


def test_every_mistake_is_reported_with_its_line(here: Path, transaxle: Transaxle) -> None:
    Path("bad.rules").write_text(
        "family toy\n"
        "  axes l=layers d=hidden f=inner\n"
        "  gate : l f d\n"
        "dialect hf\n"
        "  model.layers.{l}.a = gate[f d\n"
        "  model.layers.{l}.b = gate[d]\n"
        "  model.layers.{l.c = gate[f d]\n"
        "  nonsense\n"
        "  model.layers.{l}.d = gat[f d]\n"
    )
    outcome = transaxle("check-rules", "bad.rules")
    assert outcome.code == REFUSED
    assert [f"bad.rules, line {n}" in outcome.err for n in range(5, 10)] == [True] * 5
    assert "column" in outcome.err
    refusals = transaxle("check-rules", "bad.rules", "--json").json["error"]["refusals"]
    assert {refusal["code"] for refusal in refusals} == {"CORRUPT"}
    assert all("expected" in refusal["message"] or "column" in refusal["message"] for refusal in refusals)


def test_a_dialect_of_a_built_in_family(ck: Path, transaxle: Transaxle) -> None:
    Path("my.rules").write_text("dialect mine of qwen3_moe like hf\n  experts.{l} = [e [gate:f | up:f] d]\n")
    (family,) = transaxle("check-rules", "my.rules", "--json").json["families"]
    assert (family["name"], list(family["dialects"])) == ("qwen3_moe", ["mine"])
    assert "to mine: 39 tensors" in transaxle("check-rules", "my.rules", ck).out


def test_files_that_cannot_be_read(ck: Path, transaxle: Transaxle) -> None:
    assert transaxle("check-rules", "none.rules").code == MACHINE
    assert transaxle("check-rules", ck / "model.safetensors").code == REFUSED
    Path("toy.rules").write_text(SOUND)
    assert transaxle("check-rules", "toy.rules", "nowhere").code == MACHINE
    write(Path("other"), {"h.0.w": np.zeros(2)})
    assert transaxle("check-rules", "toy.rules", "other").code == USAGE


def test_axes_without_a_size_are_reported(here: Path, transaxle: Transaxle) -> None:
    Path("toy.rules").write_text(SOUND.replace("l=num_hidden_layers ", "l "))
    assert "axis l has no size: it is counted from the tensor names" in transaxle("check-rules", "toy.rules").out
    assert transaxle("check-rules", "toy.rules", "--json").json["families"][0]["unsized"] == ["l"]


def test_overlapping_lines_are_refused_with_both_of_them(here: Path, transaxle: Transaxle) -> None:
    Path("toy.rules").write_text(SOUND + "  blocks.2.gate_up                  = embed[v d]\n")
    transaxle("check-rules", "toy.rules").expect(
        REFUSED,
        err=(
            "blocks.{l}.gate_up = [d [gate:f | up:f]]",
            "blocks.2.gate_up = embed[v d]",
            "both lines match 'blocks.2.gate_up'",
        ),
    )


def test_info_prints_the_whole_table_of_a_family(transaxle: Transaxle, tmp_path: Path) -> None:
    shown = transaxle("info", "--family", "mixtral").out
    assert shown.startswith("# dialects\n#   hf ")
    assert "\nfamily mixtral\n" in shown
    assert "  model.layers.{l}.block_sparse_moe.gate.weight           = router[e d]\n" in shown
    assert " like " not in shown
    found = transaxle("info", "--family", "mixtral", "--json").json
    assert found["table"].startswith("family mixtral\n")
    assert shown.endswith(f"\n{found['table']}")
    assert found["dialects"] == list(builtin()["mixtral"].labels)
    (tmp_path / "heir.rules").write_text("family heir like mixtral\n  dialects hf\n  without router\n")
    shown = transaxle("info", "--family", "heir", "--rules", tmp_path / "heir.rules").out
    assert "router" not in shown
    assert shown.count("\ndialect ") == 1
    assert transaxle("info", "--family", "mixtrel").code == USAGE
