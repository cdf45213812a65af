"""Reports in a browser without a network: they open and react, and no foreign script in them runs.

The browser is Chromium: Debian's, or the one that `playwright install chromium` has brought.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest

import transaxle as tx
from tests.checkpoints import CONFIG, TENSORS, tensors, tiny, write
from tests.engine import quantized
from tests.reports.embedded import data
from tests.reports.test_checkpoint_page import HOSTILE, cut_inside_a_tile, refusal_page
from transaxle.cli.command import program
from transaxle.engine.checkpoint_facts import ShardedTensor, Sharding

WIDTHS, SCHEMES = (1440, 390), ("light", "dark")
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
KINDS = ("page", "valued", "planned", "refused", "unopened", "finished", "differing", "sharded")
"""Every kind of page there is."""
TREE = "document.querySelector('[data-figure]').report"
Open = Callable[..., Any]


def _absent(what: str) -> NoReturn:
    """Skip, but not in CI, which must have it."""
    reason = f"{what}: reports are not looked at (see CONTRIBUTING.md)"
    if {"CI", "NEEDS_BROWSER"} & os.environ.keys():
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _absent("playwright is not installed")
    with sync_playwright() as started:
        own = started.chromium.executable_path
        found = next(filter(None, map(shutil.which, PROGRAMS)), own if Path(own).exists() else None)
        if found is None:
            _absent("there is no Chromium")
        running = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the tiny mixture of experts."""
    folder = tmp_path_factory.mktemp("page")
    return tx.report(tiny(folder / "tiny", shards=3), folder / "page.html")


@pytest.fixture(scope="module")
def planned(page: Path) -> Path:
    return tx.report(tx.plan(page.parent / "tiny", page.parent / "out", to="torchtitan"), page.parent / "plan.html")


@pytest.fixture(scope="module")
def refused(page: Path) -> Path:
    source = page.parent / "refused" / "tiny"
    quantized.store(source, quantized.llama(d=256, f=192, g=2, r=2, head=64))
    return tx.report(tx.plan(source, page.parent / "out", to="megatron"), page.parent / "refused.html")


@pytest.fixture(scope="module")
def unopened(page: Path) -> Path:
    """The report of a DCP folder that is refused: a quantized tensor was cut inside a tile."""
    return refusal_page(cut_inside_a_tile(page.parent / "cut" / "tiny"), page.parent / "unopened.html")


@pytest.fixture(scope="module")
def hostile_refusal(hostile: Path) -> Path:
    """The report of a checkpoint that is refused, whose names want to run something."""
    folder = hostile.parent / "cut" / "</script><i>"
    return refusal_page(cut_inside_a_tile(folder, next(iter(HOSTILE))), hostile.parent / "unopened.html")


@pytest.fixture(scope="module")
def differing(page: Path) -> Path:
    """The report of its difference from a model in which one layer was trained."""
    random = np.random.default_rng(1)
    trained = {
        name: (values.astype("f4") + 1e-2 * random.standard_normal(values.shape)).astype(values.dtype)
        if name.startswith("model.layers.1.") and "norm" not in name
        else values
        for name, values in tensors().items()
    }
    write(page.parent / "trained" / "tiny", trained, config=CONFIG)
    compared = tx.diff(page.parent / "tiny", page.parent / "trained" / "tiny", numeric=True)
    return tx.report(compared, page.parent / "difference.html")


@pytest.fixture(scope="module")
def sharded(page: Path) -> Path:
    """The report of its sharding: experts over eight ranks, everything else over the two halves of them."""
    held = []
    for name, values in tensors().items():
        ways = 8 if "experts" in name else 4
        rows = values.shape[0] // ways
        parts = {rank: rank % ways for rank in range(8)} if values.shape[0] % ways == 0 else {}
        rest = [((0, n),) for n in values.shape[1:]]
        share = {rank: (((at * rows, at * rows + rows),), *rest) for rank, at in parts.items()}
        whole = tuple(((0, n),) for n in values.shape)
        held.append(ShardedTensor(name, "BF16", values.shape, share or dict.fromkeys(range(7), whole)))
    return tx.report(Sharding(tuple(range(8)), tuple(held)), page.parent / "sharding.html")


@pytest.fixture(scope="module")
def valued(page: Path) -> Path:
    return tx.report(page.parent / "tiny", page.parent / "values.html", values=True)


@pytest.fixture(scope="module")
def finished(page: Path) -> Path:
    source, to = page.parent / "tiny", ("--to", "torchtitan", "--shard-size", "10kB", "--no-sync")
    path = page.parent / "finished.html"
    (page.parent / "done").mkdir()
    with pytest.raises(SystemExit) as ended:
        program(["convert", str(source), str(page.parent / "done" / "tiny"), *to, "--report", str(path), "--quiet"])
    assert not ended.value.code
    assert data(path)["kind"] == "conversion"
    return path


@pytest.fixture(scope="module")
def hostile_conversion(page: Path) -> Path:
    """The report of a conversion that kept names which want to run something."""
    report = tx.convert(page.parent / "tiny", page.parent / "kept", to="hf", sync=False)
    names = tuple(HOSTILE)
    report = replace(report, kept=names, notes=names, path="</script><script>document.title='x'</script>")
    return tx.report(report, page.parent / "kept.html")


def _hostile_plan(hostile: Path, head: int, f: int) -> Path:
    """Return the report of a plan that keeps names which want to run something."""
    names = {name: np.ones(size, np.uint8) for name, size in HOSTILE.items()}
    held, config = quantized.llama(d=256, f=f, g=2, r=2, head=head)
    source = hostile.parent / f"</script><i>{head}"
    quantized.store(source, (held | names, config | {"</script><script>alert(4)</script>": "<img src=x>"}))
    plan = tx.plan(source, hostile.parent / "<b>", to="megatron")
    refusals = tuple(
        replace(each, where=replace(each.where, tensor=next(iter(HOSTILE))), hint="<img src=x>")
        for each in plan.refusals
    )
    return tx.report(msgspec.structs.replace(plan, refusals=refusals), hostile.parent / f"plan{head}.html")


@pytest.fixture(scope="module")
def hostile_plan(hostile: Path) -> Path:
    return _hostile_plan(hostile, 128, 256)


@pytest.fixture(scope="module")
def hostile_refused_plan(hostile: Path) -> Path:
    return _hostile_plan(hostile, 64, 192)


@pytest.fixture(scope="module")
def hostile_sharding(hostile: Path) -> Path:
    held = tuple(ShardedTensor(name, "U8", (size,), {0: (((0, size),),)}) for name, size in HOSTILE.items())
    return tx.report(Sharding((0, 1), held, {"<b>alias</b>": next(iter(HOSTILE))}), hostile.parent / "sharding.html")


@pytest.fixture(scope="module")
def hostile_difference(hostile: Path) -> Path:
    """The report of its difference from one that wants to run something else."""
    held = {name: np.zeros(size, np.uint8) for name, size in HOSTILE.items()} | {
        "<script>alert(3)</script>": np.ones(1)
    }
    compared = tx.diff(hostile.parent / "</script><i>", write(hostile.parent / "<b>", held), numeric=True)
    return tx.report(compared, hostile.parent / "difference.html")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    held = {name: np.ones(size, np.uint8) for name, size in HOSTILE.items()}
    source = write(folder / "</script><i>", held, config={"</script><script>alert(2)</script>": "<img src=x>"})
    return tx.report(source, folder / "page.html", values=True)


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Opens a file as a reader would, and fails where the console says anything."""
    said: list[str] = []
    contexts = []

    def show(file: Path, width: int = 1440, scheme: str = "light") -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            reduced_motion="reduce",
            offline=True,
            accept_downloads=True,
        )
        contexts.append(context)
        made = context.new_page()
        made.on("console", lambda message: said.append(message.text))
        made.on("pageerror", lambda error: said.append(str(error)))
        made.on("request", lambda each: None if each.url.startswith(("file:", "blob:")) else said.append(each.url))
        made.goto(file.as_uri())
        return made

    yield show
    for context in contexts:
        context.close()
    assert said == []


def test_a_long_rule_in_the_summary_does_not_widen_the_page(planned: Path, opened: Open) -> None:
    shown = opened(planned, min(WIDTHS), SCHEMES[0])
    shown.locator(".lead").first.evaluate("(text) => { text.textContent = 'mtp.layers.'.repeat(40); }")
    assert shown.evaluate("document.documentElement.scrollWidth") <= min(WIDTHS)


@pytest.mark.oracle
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("which", KINDS)
def test_a_page_fits_and_is_accessible(
    which: str, width: int, scheme: str, opened: Open, request: pytest.FixtureRequest
) -> None:
    """No error, nothing wider than the screen, and no serious fault for axe-core."""
    from axe_playwright_python.sync_playwright import Axe

    shown = opened(request.getfixturevalue(which), width, scheme)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.locator("h1").inner_text().endswith(("/tiny", "Live model"))
    assert shown.locator("canvas").count() == shown.locator("[data-figure]:not(:has(.moves))").count() >= 1
    drawn = shown.evaluate(
        "(() => { const c = document.querySelector('canvas');"
        " const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " return new Set(new Uint32Array(pixels.buffer)).size; })()"
    )
    assert drawn > 6  # colours: a blank canvas has one
    faults = Axe().run(shown, options={"resultTypes": ["violations"]}).response["violations"]
    assert [(each["id"], each["help"]) for each in faults if each["impact"] in {"serious", "critical"}] == []


def test_areas_add_up_to_the_bytes(page: Path, opened: Open) -> None:
    shown = opened(page)
    nbytes = sum(each.nbytes for each in tensors().values())
    for order in ("By tensor", "By layer"):
        shown.get_by_role("button", name=order).click()
        sums = shown.evaluate(
            f"""(() => {{
                const walk = (node) => {{
                    const inside = {TREE}.children(node);
                    if (!inside.length) return [node.bytes, node.tensors];
                    const sums = inside.map(walk).reduce((a, b) => [a[0] + b[0], a[1] + b[1]], [0, 0]);
                    if (sums[0] !== node.bytes || sums[1] !== node.tensors) throw Error(node.label);
                    return sums;
                }};
                return [...walk({TREE}.root), {TREE}.tiles().reduce((sum, tile) => sum + tile.value, 0)];
            }})()"""
        )
        assert sums == [nbytes, TENSORS, nbytes]


def test_a_flow_is_as_wide_as_its_bytes(planned: Path, opened: Open) -> None:
    shown = opened(planned)
    drawn = shown.evaluate(f"{TREE}.drawn.getOption().series[0].links.map((link) => link.value)")
    biases = 2 * 8 * 4  # of torchtitan's routers, in single precision
    assert sum(drawn) == sum(each.nbytes for each in tensors().values()) + biases
    shown.locator(".chart").hover(position={"x": 500, "y": 40})
    from playwright.sync_api import expect

    expect(shown.locator(".hint")).to_contain_text("-> layers.{l}.moe.")


def test_bands_do_not_cross_names(planned: Path, opened: Open) -> None:
    """Names stand to the left and to the right of all bands, on a phone too."""
    for width in WIDTHS:
        shown = opened(planned, width)
        whole = shown.locator("[data-figure=flow] .chart").bounding_box()["width"]
        series = f"({TREE}).drawn.getModel().getSeriesByIndex(0)"
        bars = shown.evaluate(f"{series}.getGraph().nodes.map((node) => [node.getLayout().x, node.getLayout().dx])")
        places = shown.evaluate(
            f"{series}.getData().mapArray((at) => {series}.getData().getItemModel(at).get('label.position'))"
        )
        view = shown.evaluate(f"{series}.layoutInfo.x")
        assert set(places) == {"left", "right"}
        for side, place in (("from", "left"), ("to", "right")):
            widest = shown.evaluate(
                "(() => { const pen = document.createElement('canvas').getContext('2d'); pen.font = '11px monospace';"
                f" return Math.max(...({TREE}).names('{side}').map((label) => pen.measureText(label).width)); }})()"
            )
            spans = [(view + x, view + x + dx) for (x, dx), at in zip(bars, places, strict=True) if at == place]
            free = min(first for first, _ in spans) if side == "from" else whole - max(last for _, last in spans)
            assert 40 < widest < free < whole * 3 / 8


def test_axes_that_move_keep_their_colour(finished: Path, opened: Open) -> None:
    """What is drawn before and after says in words what the colours say."""
    shown = opened(finished)
    for rule in shown.locator(".moves").all():
        moved = rule.locator(".axis.moved").evaluate_all(
            "all => all.map((each) => [each.textContent, each.style.background])"
        )
        colours = dict(moved)
        assert all(colours[name] == colour for name, colour in moved)
        assert len(set(colours.values())) == len(colours) >= 2
    expert = shown.locator(".moves").first.locator(".arranged").first
    assert " ".join(expert.inner_text().split()).startswith("source name l e dim 0 f dim 1 d model.layers.")
    assert expert.get_by_text("e", exact=True).get_attribute("title") == "experts: 8"
    shown.locator("#search").fill("down_proj")
    from playwright.sync_api import expect

    expect(shown.locator(".moves:visible")).to_have_count(1)


def test_the_page_of_a_conversion_begins_with_its_result(finished: Path, opened: Open) -> None:
    shown = opened(finished)
    assert "experts" in shown.locator("header .lead").first.inner_text()
    assert "Values. None changed." in shown.locator("#first").inner_text()
    assert "Nothing." not in shown.locator("#first").inner_text()
    titles = shown.locator("main h2").all_inner_texts()
    assert titles[:5] == ["Result", "From source to target", "How axes move", "Rules", "Time and rate by file"]


def test_zooming_in_and_out(page: Path, opened: Open) -> None:
    from playwright.sync_api import expect

    shown = opened(page)
    inside = shown.locator("#title-bytes")
    shown.get_by_role("button", name="down", exact=True).press("Enter")
    shown.get_by_role("button", name="layer 1", exact=True).click()
    assert inside.inner_text() == "Inside layer 1"
    experts = [f"expert {number}" for number in range(8)]
    assert shown.locator("[data-figure] tbody td.text").all_inner_texts() == experts
    shown.get_by_role("button", name="everything").click()
    assert inside.inner_text() == "Inside everything"
    within = {"x": 40, "y": 60}  # inside the largest area
    shown.locator(".chart").hover(position=within)
    expect(shown.locator(".hint")).to_contain_text("gate / layer 0")
    expect(shown.locator(".hint")).to_contain_text("8 tensors, 3.07 kB, 11.0 % of all")
    shown.locator(".chart").click(position=within)
    expect(inside).to_have_text("Inside layer 0")


def test_search_finds_rows_by_name_rule_and_any_number(page: Path, opened: Open) -> None:
    from playwright.sync_api import expect

    shown = opened(page)
    shown.keyboard.press("/")
    for wanted, first in (
        ("down_proj", "down"),
        ("model.layers.1.mlp.experts.7.gate_proj", "gate"),
        ("router[e", "router"),
    ):
        shown.locator("#search").fill(wanted)
        expect(shown.locator("[data-table=layout] tbody tr")).to_have_count(1)
        expect(shown.locator("[data-table=layout] tbody td").first).to_have_text(first)
        faded = shown.evaluate(f"{TREE}.tiles().filter((tile) => tile.itemStyle.opacity < 1).length")
        assert faded == shown.evaluate(f"{TREE}.tiles().length - 1")
    shown.locator("#search").fill("no such thing")
    shown.get_by_text("No row matches.").first.wait_for()


def test_tables_are_sorted_and_downloaded(page: Path, opened: Open, tmp_path: Path) -> None:
    shown = opened(page)
    host = shown.locator("[data-table=layout]")
    head = host.get_by_role("button", name="bytes", exact=True)
    head.click()
    assert head.locator("xpath=..").get_attribute("aria-sort") == "descending"
    found = []
    for kind in ("csv", "json"):
        with shown.expect_download() as download:
            host.get_by_role("button", name=f"Download Tensors by rule as {kind.upper()}").click()
        assert download.value.suggested_filename == f"layout.{kind}"
        download.value.save_as(tmp_path / kind)
        text = (tmp_path / kind).read_bytes().decode()
        found.append(json.loads(text) if kind == "json" else list(csv.DictReader(text.splitlines())))
    rows, as_json = found
    sizes = [each["bytes"] for each in as_json]
    assert [int(row["bytes"]) for row in rows] == sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == sum(each.nbytes for each in tensors().values())
    assert [row["rule"] for row in rows] == [each["rule"] for each in as_json]


SCRIPT_NAME, BIDI_NAME = "</script><script>document.title='x'</script>", "\\u202egnp.tier\\u2066 bidi"
HOSTILE_PAGES = {
    "hostile": {"layout": {SCRIPT_NAME, BIDI_NAME}, "tensor-values": {SCRIPT_NAME, BIDI_NAME}},
    "hostile_difference": {"worst": {SCRIPT_NAME, BIDI_NAME}, "alone": {"<script>alert(3)</script>"}},
    "hostile_conversion": {"others": {SCRIPT_NAME, BIDI_NAME}},
    "hostile_plan": {"others": {SCRIPT_NAME, BIDI_NAME}},
    "hostile_refused_plan": {"others": {SCRIPT_NAME, BIDI_NAME}, "split": {next(iter(HOSTILE))}},
    "hostile_refusal": {"reasons": {next(iter(HOSTILE))}, "split": {next(iter(HOSTILE))}},
    "hostile_sharding": {"tensors": {SCRIPT_NAME, BIDI_NAME}},
}
"""Page with names that are scripts or tags -> its tables -> names in them."""


@pytest.mark.parametrize("which", HOSTILE_PAGES)
def test_hostile_names_are_shown_and_do_nothing(which: str, opened: Open, request: pytest.FixtureRequest) -> None:
    shown = opened(request.getfixturevalue(which))
    assert shown.title() != "x"
    for table, expected in HOSTILE_PAGES[which].items():
        names = shown.locator(f"[data-table={table}] :is(td.name, td:last-child)").all_inner_texts()
        assert expected <= set(names), table
    assert shown.locator("main img, main i:not(.share i):not(.legend i), main b:not(.hint b)").count() == 0
    if which == "hostile_difference":
        shown.locator("[data-figure=map] .chart").hover(position={"x": 250, "y": 12})
        assert shown.locator(".hint").first.inner_text()
    if which == "hostile_conversion":
        assert shown.locator("h1").inner_text() == SCRIPT_NAME
    if which == "hostile_refused_plan":
        assert "<img src=x>" in shown.locator(".notices").inner_text()


def test_a_refused_cut_is_drawn(unopened: Path, opened: Open) -> None:
    """Half of the tile's positions have the colour of one chunk, and half that of the other."""
    shown = opened(unopened)
    assert shown.locator(".kind").inner_text().casefold() == "refusal"
    assert "BLOCK_MISALIGNED" in shown.locator(".notices").inner_text()
    colours = shown.evaluate(f"({TREE}).cells.map((cell, at) => ({TREE}).colour(at))")
    assert len(colours) == 128
    assert len(set(colours[:64])) == len(set(colours[64:])) == 1 != len(set(colours)) == 2


def test_a_rank_has_a_column_and_a_bar(sharded: Path, opened: Open) -> None:
    """Cells without bytes are said to have none, and bars are as high as the ranks' bytes."""
    shown = opened(sharded)
    page = shown.evaluate("JSON.parse(document.getElementById('data').textContent)")
    drawn = shown.evaluate("document.querySelector('[data-figure=ranks]').report.drawn.getOption().series[0].data")
    assert drawn == [page["facts"]["rank_bytes"][str(rank)] for rank in range(8)]
    assert "nothing on this rank" in shown.locator("[data-figure=map] .legend").inner_text()
    shares = shown.locator("[data-figure=map] .legend li").all_inner_texts()
    shown.get_by_role("button", name="Ranks with the same part").click()
    assert shown.locator("[data-figure=map] .legend li").all_inner_texts() != shares


def test_equal_cells_have_no_colour(differing: Path, opened: Open) -> None:
    """What is drawn is what the table says: no colour where bits are equal, and more of it where more changed."""
    shown = opened(differing)
    cells = shown.evaluate(f"{TREE}.cells.map((cell, at) => [cell[1], cell[2], ({TREE}).colour(at)])")
    rows = shown.evaluate("JSON.parse(document.getElementById('data').textContent).figures.map.data.rows")
    states = {(rows[row], state) for row, state, _ in cells}
    assert {("down", ""), ("down", "equal"), ("norm", "equal")} <= states
    assert ("norm", "") not in states
    assert len({colour for _, state, colour in cells if not state}) >= 1
    painted = shown.evaluate(
        "(() => { const c = document.querySelector('[data-figure=map] canvas');"
        " const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, found = {};"
        " for (let at = 0; at < pixels.length; at += 4) {"
        "   const hex = (from) => pixels[at + from].toString(16).padStart(2, '0'), key = hex(0) + hex(1) + hex(2);"
        "   if (pixels[at + 3] === 255) found['#' + key] = (found['#' + key] || 0) + 1; }"
        " return found; })()"
    )
    for colour in {colour for _, state, colour in cells if not state}:
        assert painted[colour] > 500
    shown.get_by_role("button", name="Changed elements").click()
    assert shown.locator(".legend li").all_inner_texts()[-1] == "all"
    shown.get_by_role("button", name="|A - B| / |B|", exact=True).click()
    drawn = shown.evaluate("document.querySelectorAll('[data-figure]')[1].report.drawn.getOption().series[0].data")
    assert sum(drawn) == sum(int(row[5]) for row in shown.evaluate(
        "JSON.parse(document.getElementById('data').textContent).tables.find((table) => table.id === 'cells').rows"
    ))  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("which", KINDS)
def test_added_scripts_do_not_run(which: str, browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The policy is in force: a script and a picture that are added are stopped, which the console tells."""
    page: Path = request.getfixturevalue(which)
    text = page.read_text("utf-8")
    forged = tmp_path / "forged.html"
    forged.write_text(text.replace("<header>", "<header><script>document.title='x'</script><img src='https://a.b/c'>"))
    said: list[str] = []
    with browser.new_context(offline=True) as context:
        shown = context.new_page()
        shown.on("console", lambda message: said.append(message.text))
        shown.goto(forged.as_uri())
        assert shown.title() != "x"
        assert sum("Content Security Policy" in each for each in said) == 2


def test_it_prints(page: Path, opened: Open) -> None:
    shown = opened(page)
    shown.emulate_media(media="print")
    assert not shown.locator("nav").is_visible()
    assert shown.pdf()[:5] == b"%PDF-"


def test_tables_are_copied_with_exact_numbers(page: Path, opened: Open) -> None:
    shown = opened(page)
    shown.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shown.locator("#search").fill("down_proj")
    from playwright.sync_api import expect

    expect(shown.locator("[data-table=layout] tbody tr")).to_have_count(1)
    shown.get_by_role("button", name="Copy Tensors by rule").click()
    expect(shown.get_by_role("button", name="Copy Tensors by rule")).to_have_text("Copied")
    (row,) = csv.DictReader(shown.evaluate("navigator.clipboard.readText()").splitlines())
    nbytes = sum(each.nbytes for name, each in tensors().items() if name.endswith("down_proj.weight"))
    assert (row["tensor"], int(row["bytes"])) == ("down", nbytes)
