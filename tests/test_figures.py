"""The figures of the docs: they show what numpy computes, and each is on a page."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

DOCS = Path(__file__).parent.parent / "docs"
FIGURES = DOCS / "figures"
SVG = "{http://www.w3.org/2000/svg}"


def _titled(name: str) -> list[tuple[str, str]]:
    """Return what the rectangles of a figure say they are, with their colours, in the order in which they are drawn."""
    root = ElementTree.parse(FIGURES / f"{name}.svg").getroot()
    return [
        (title.text or "", rect.attrib["fill"])
        for rect in root.iter(f"{SVG}rect")
        if (title := rect.find(f"{SVG}title")) is not None
    ]


def test_each_figure_is_on_a_page_and_described_in_words() -> None:
    shown = {
        ((page.parent / target).resolve(), bool(words.strip()))
        for page in DOCS.rglob("*.md")
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]*\.svg)\)", page.read_text("utf-8"))
    }
    assert shown == {(figure.resolve(), True) for figure in FIGURES.iterdir()}
    for figure in FIGURES.iterdir():
        root = ElementTree.parse(figure).getroot()
        assert (root.attrib["role"], bool(root.findtext(f"{SVG}title"))) == ("img", True)


def test_fused_rows_are_in_the_order_of_groups_and_halves() -> None:
    head = 4
    q, k, v = (
        np.array([f"{part}, row {row}" for row in range(count * head)]).reshape(2, -1)
        for part, count in (("q", 4), ("k", 2), ("v", 2))
    )
    grouped = np.concatenate([q, k, v], 1).ravel().tolist()
    halves = [f"{part}, row {row}" for part in ("gate", "up") for row in range(12)]
    drawn = _titled("fused")
    for matrix, expected in (("linear_qkv", grouped), ("linear_fc1", halves)):
        assert [words.partition(": ")[2] for words, _ in drawn if words.startswith(f"{matrix}:")] == expected
    colours: dict[str, set[str]] = {}
    for words, colour in drawn:
        colours.setdefault(words.partition(": ")[2].partition(",")[0], set()).add(colour)
    assert all(len(each) == 1 for each in colours.values())
    assert len({*colours["q"], *colours["k"], *colours["v"]}) == 3


def test_an_expert_has_one_colour_wherever_its_axis_is() -> None:
    drawn = _titled("name-shape-mesh")
    by_name = [colour for words, colour in drawn if words.startswith("model.layers")]
    assert len(set(by_name)) == 4
    assert by_name == [colour for words, colour in drawn if words.startswith("layers.0")]
    on_ranks = [(words, colour) for words, colour in drawn if words.startswith("rank")]
    assert [words for words, _ in on_ranks] == [f"rank {e // 2}: expert {e}" for e in range(4)]
    assert [colour for _, colour in on_ranks] == by_name


def test_tiles_are_dashed_where_several_heads_of_other_matrices_share_them() -> None:
    root = ElementTree.parse(FIGURES / "tiles.svg").getroot()
    dashed = [rect for rect in root.iter(f"{SVG}rect") if "stroke-dasharray" in rect.attrib]
    order = np.repeat(["q", "q", "k", "v", "q", "q", "k", "v"], 64).reshape(-1, 128)
    several = [at for at, tile in enumerate(order) if len(set(tile.tolist())) > 1]
    places = [(float(rect.attrib["x"]) - 16) / float(rect.attrib["width"]) for rect in dashed]
    assert [round(place) for place in places] == several == [1, 3]
    assert len({rect.attrib["y"] for rect in dashed}) == 1


def test_ranks_hold_what_chunks_of_both_dims_give_them() -> None:
    experts, rows = np.array_split(np.arange(4), 2), np.array_split(np.arange(6), 2)
    expected = {
        f"expert {e}, row {row}: on rank {2 * ep + shard}"
        for ep, mine in enumerate(experts)
        for shard, part in enumerate(rows)
        for e in mine
        for row in part
    }
    drawn = _titled("ep-fsdp")
    assert {words for words, _ in drawn if ": on " in words} == expected
    assert len(drawn) == 4 * 4 * 6


def test_the_silent_failure_is_cut_before_split_and_split_before_cut() -> None:
    fused = [f"{part}, row {row}" for part in "qkv" for row in range(4)]
    cut_first = np.array_split(fused, 2)[0].tolist()
    split_first = np.concatenate([np.array_split(part, 2)[0] for part in np.split(np.array(fused), 3)]).tolist()
    drawn = [words for words, _ in _titled("wrong-rows")]
    for loader, rows in (("transformers 5.23", cut_first), ("Transaxle", split_first)):
        assert [words.partition(": ")[2] for words in drawn if words.startswith(loader)] == rows
