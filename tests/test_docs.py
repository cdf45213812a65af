"""The documentation builds without a warning, its examples give what they promise, and its figures are right."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import click
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.blocks import execute, typed
from tests.checkpoints import CONFIG, GATE, tensors, tiny, write
from tests.engine import quantized
from tests.formats.deepspeed.built import write_old
from transaxle import families
from transaxle.axes.notation import tables
from transaxle.axes.notation.expression import parse
from transaxle.axes.notation.family import Formula
from transaxle.cli import NAME
from transaxle.cli.command import program
from transaxle.errors import CODES, TransaxleError, refuse

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TINY = "tiny-qwen3-moe"
"""Name of the checkpoint that the README's example opens."""


def _run(*command: str, cwd: Path = ROOT, code: int = 0) -> str:
    """Run a command with this environment's scripts found first, and return what it prints."""
    scripts = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def _blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    return re.findall(rf"^```({'|'.join(languages)})\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_documentation_builds(tmp_path: Path) -> None:
    """The pages are read once for both."""
    how = ["-q", "-W", "--keep-going", "-d", str(tmp_path / "doctrees")]
    for builder in ("html", "doctest"):
        _run(sys.executable, "-m", "sphinx", *how, "-b", builder, "docs", str(tmp_path / builder))


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "reference" / "api.md"], ids=lambda page: page.name)
def test_the_python_example_prints_what_it_promises(page: Path, tmp_path: Path) -> None:
    """Run it as a reader would, beside a checkpoint; lines that end in `# -> text` must print that text."""
    ((_, code),) = _blocks(page.read_text("utf-8"), "python")
    promised = re.findall(r"# -> (.*)$", code, re.MULTILINE)
    tiny(tmp_path / TINY)
    assert TINY in code
    assert promised, "the example should say what it prints"
    printed = _run(sys.executable, "-W", "error", "-c", textwrap.dedent(code), cwd=tmp_path).splitlines()
    assert printed[: len(promised)] == promised


def test_links_between_files_work() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    links = {page: re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", page.read_text("utf-8")) for page in pages}
    assert [f"{at}: {to}" for at, targets in links.items() for to in targets if not (at.parent / to).exists()] == []


def test_every_refusal_is_explained_with_its_exit_code() -> None:
    page = (ROOT / "docs" / "reference" / "refusals.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (\d) \|", page, re.MULTILINE))
    assert rows == {code: str(refuse(code, "").exit_code) for code in CODES}


def _expected(shown: str) -> re.Pattern[str]:
    """Return what a page promises of a command's output: its lines, where `…` stands for anything."""
    lines = [
        ".*" if line.strip() == "…" else ".*?".join(map(re.escape, line.split("…"))) for line in shown.splitlines()
    ]
    return re.compile("\n(?:.*\n)*?".join(lines) if "…" in shown else "\n".join(lines))


def _biased(text: str, folder: Path) -> None:
    """Put a config beside the checkpoint that promises biases, if a page speaks of it."""
    if "biased.json" in text:
        (folder / "biased.json").write_text(json.dumps({**CONFIG, "attention_bias": True}))


def _beside(page: str, folder: Path) -> None:
    """Put what a page speaks of into a folder: the tiny checkpoint, a variant of it, the table, and its model."""
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    _biased(text, folder)
    if f'save_pretrained("{TINY}")' not in text:
        tiny(folder / TINY)
    if "examples/" in text:
        shutil.copytree(ROOT / "examples", folder / "examples")
    if "finetuned" in text:
        changed = tensors()
        for name in (f"model.layers.1.mlp.experts.{n}.down_proj.weight" for n in (2, 5)):
            changed[name][0, 0] += 1
        changed["model.norm.weight"][0] += 1
        write(folder / "finetuned", changed, config=CONFIG)
    if "mine.rules" in text:
        (rules,) = (block for _, block in _blocks(text, "text") if block.startswith("family"))
        (folder / "mine.rules").write_text(rules)
        _old_run(folder / "old-run")
    if "tiny-lacking" in text:
        write(folder / "tiny-lacking", {name: of for name, of in tensors().items() if name != GATE}, config=CONFIG)
    if "tiny-adapter" in text:
        (folder / "tiny-adapter").mkdir()
        adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
        (folder / "tiny-adapter" / "adapter_config.json").write_text(json.dumps(adapter))
        module, rank = "base_model.model.model.layers.0.self_attn.q_proj", 2
        rows, columns = tensors()["model.layers.0.self_attn.q_proj.weight"].shape
        held = {f"{module}.lora_A.weight": np.ones((rank, columns), np.float32)}
        held |= {f"{module}.lora_B.weight": np.ones((rows, rank), np.float32)}
        save_file(held, folder / "tiny-adapter" / "adapter_model.safetensors")
    if "tiny-llama-fp8" in text:
        quantized.store(folder / "tiny-llama-fp8", quantized.llama(d=256, f=384, g=2, r=2, head=128, layers=2))
    if "toy.rules" in text:
        (folder / "toy.rules").write_text(_blocks(text, "text")[0][1])
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (7, 4)}
        for layer in range(3):
            shapes |= {f"model.layers.{layer}.{half}_proj.weight": (5, 4) for half in ("gate", "up")}
        held = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        sizes = {"num_hidden_layers": 3, "hidden_size": 4, "intermediate_size": 5, "vocab_size": 7}
        write(folder / "my-toy", held, config={"model_type": "toy", **sizes})
    if "joined.rules" in text:
        (folder / "joined.rules").write_text(_blocks(text, "text")[1][1])


def _old_run(folder: Path) -> None:
    """Build what the page on DeepSpeed speaks of: two tensor-parallel ranks that do not say how they are cut."""
    random = np.random.default_rng(0)
    (g, r, c, d, n), layers = (2, 2, 3, 4, 8), 2
    whole: dict[str, np.ndarray] = {"embed.weight": random.standard_normal((n, d), np.float32)}
    ranks: list[dict[str, np.ndarray]] = [{"embed.weight": half} for half in np.split(whole["embed.weight"], 2)]
    for layer in range(layers):
        norm, o = random.standard_normal(d, np.float32), random.standard_normal((d, g * r * c), np.float32)
        q, *kv = (random.standard_normal((rows, d), np.float32) for rows in (g * r * c, g * c, g * c))
        for rank, mine in enumerate(ranks):
            parts = [np.split(part, 2)[rank] for part in (q, *kv)]
            mine[f"layers.{layer}.norm.weight"] = norm
            mine[f"layers.{layer}.qkv_proj.weight"] = np.concatenate(parts)
            mine[f"layers.{layer}.o_proj.weight"] = np.ascontiguousarray(np.split(o, 2, 1)[rank])
    write_old(folder, ranks)
    config = {"model_type": "mine", "num_hidden_layers": layers, "vocab_size": n, "hidden_size": d, "head_dim": c}
    config |= {"num_key_value_heads": g, "num_attention_heads": g * r}
    (folder / "config.json").write_text(json.dumps(config))


PAGES = (
    "tutorial", "how-to/recipes", "how-to/look", "how-to/convert", "how-to/verify", "how-to/urls",
    "how-to/many-machines", "how-to/add-a-family", "how-to/deepspeed", "how-to/quantized", "how-to/training",
    "how-to/load", "how-to/save", "how-to/async-save", "how-to/resume", "how-to/training-refused",
    "how-to/quantized-training", "how-to/moe", "how-to/inference", "how-to/refit", "how-to/dcp",
    "how-to/derive-a-table", "how-to/check", "how-to/graft", "how-to/serve", "how-to/megatron",
    "reference/cli", "reference/json", "reference/plan", "depend",
)  # fmt: skip
"""Pages whose examples run as they are written, in a fresh folder."""
AS_PROGRAMS = "tutorial"
"""The page whose commands start the installed program; those of others are forked, which saves its imports."""
ELSEWHERE = {
    "reference/api": "test_the_python_example_prints_what_it_promises",
    "how-to/refit-vllm": "tests/refit/plugs, with an engine that stands for vLLM's",
    "how-to/vllm": "tests/refit/plugs/test_vllm_loader.py, with vLLM itself",
    "extending": "tests/test_plugins.py",
    "index": "tests/test_new_user.py: the README has the same command",
}
"""Pages with examples that run somewhere else -> where."""


@pytest.mark.oracle
@pytest.mark.parametrize("page", PAGES)
def test_commands_on_pages_print_what_the_pages_show(page: str, tmp_path: Path) -> None:
    """Run a page's blocks in order; below a command, a page shows what it prints, with `…` for what is left out.

    The page on resuming starts its ranks by torchrun, which fails if one of them is aborted as it ends.
    """
    _beside(page, tmp_path)
    blocks = _blocks((ROOT / "docs" / f"{page}.md").read_text("utf-8"), "python", "console")
    assert blocks
    for language, block in blocks:
        if language == "python":
            code, printed = execute(block, tmp_path)
            assert code == 0, f"{block}\n{printed}"
            continue
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            words, wanted = shlex.split(command), int("differ" in shown or "does not load" in shown)
            if page == AS_PROGRAMS or words[0] != NAME:
                printed = _run(*words, cwd=tmp_path, code=wanted)
            else:
                code, printed, errors = typed(words, tmp_path)
                assert code == wanted, f"{command}\n{printed}{errors}"
            if shown:
                assert _expected(shown).match(printed), f"{command}\n{printed}"


def test_every_page_with_examples_is_run() -> None:
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).with_suffix("").as_posix(): page.read_text("utf-8") for page in docs.rglob("*.md")}
    shown = {name for name, text in pages.items() if _blocks(text, "python", "console")}
    assert {*PAGES, *ELSEWHERE} == shown


def _commands() -> list[tuple[str, str]]:
    """Return every command of ours that a page shows, run here or not, with the page's name."""
    found = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        if page.name == "CHANGELOG.md":
            continue
        for _, block in _blocks(page.read_text("utf-8"), "console", "sh", "text"):
            lines = re.findall(r"^(?:\$ )?transaxle ([a-z-]+ .*)$", block.replace("\\\n", " "), re.MULTILINE)
            found += [(page.name, line) for line in lines]
    return found


def test_options_on_pages_exist() -> None:
    root = click.Context(program, info_name="transaxle")
    commands = _commands()
    assert len(commands) > 60
    for page, line in commands:
        name, *given = shlex.split(line.partition("  #")[0])
        command = program.get_command(root, name)
        assert command is not None, f"{page}: {line}"
        context = click.Context(command, info_name=name, parent=root)
        try:
            command.make_parser(context).parse_args(given)
        except click.UsageError as error:
            pytest.fail(f"{page}: {line}: {error.format_message()}")


def test_the_generated_reference_is_up_to_date() -> None:
    _run(sys.executable, str(ROOT / "docs" / "generate.py"), "--check")


NOTATION = ROOT / "docs" / "reference" / "notation.md"
_SCAFFOLD = """family scaffold
  axes l=n1 L=n2 m=n3 e=n4 d=n5 f=n6 g=n7 r=n8 c=n9 h=n10 n=n11 p
  up : l f d
  gate : l f d
  mlp : l e d f
  bare : d
  {0}
dialect hf
  backbone.{{l}}.up = up[f d]
"""
_BELOW = "  embed : n d\n  head : n d\n  q_norm : l c\n  k_norm : l c\n  router_bias : l e\n  enorm : l d\n"
_HF = "  backbone.{l}.q = q_norm[c]\n  backbone.{l}.k = k_norm[c]\n"


def _cells(section: str) -> list[str]:
    """Return the code in the first column of a section's table."""
    text = NOTATION.read_text("utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [cell.replace("\\|", "|") for cell in re.findall(r"^\| `(.*?)` \|", text, re.MULTILINE)]


def test_the_tables_of_the_notation_page_are_read() -> None:
    blocks = [block for _, block in _blocks(NOTATION.read_text("utf-8"), "text")]
    shown = [block for block in blocks if re.match(r"family |block ", block)]
    assert len(shown) >= 3
    for table in shown:
        assert tables.read(table, bases=families.base)


def test_the_blocks_of_the_notation_page_are_those_that_ship() -> None:
    listed = NOTATION.read_text("utf-8").partition("Those that ship are in")[2].partition("\n\n")[0]
    shared = [name for name, file in families.blocks().items() if file == "blocks.rules"]
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(shared)


def test_expressions_names_and_formulas_of_the_notation_page_are_read() -> None:
    for cell in _cells("Expressions"):
        assert parse(cell).dims
    for cell in _cells("Formulas"):
        assert Formula(cell).names
    for cell in _cells("Names"):
        held = " ".join(dict.fromkeys(re.findall(r"\{(?:\d+\*)?\(?(\w+(?: \w+)*)", cell)))
        assert tables.read(f"family toy\n axes l=n1 L=n2 m=n3 e=n4 d\n x : {held} d\ndialect a\n {cell} = x[d]\n")


@pytest.mark.parametrize("statement", _cells("Families"))
def test_statements_of_a_family_on_the_notation_page_are_read(statement: str) -> None:
    if statement.startswith("family"):
        assert tables.read(statement)
        return
    tensors = "  down : l e d f\n" if statement.startswith("cut") else ""
    problems = []
    for text in (_SCAFFOLD.format(f"\n{_BELOW}{tensors}  {statement}"), f"family bare\n  {statement}\n"):
        try:
            assert tables.read(text)
            return
        except TransaxleError as error:
            problems.append(str(error))
    pytest.fail("\n".join(problems))


@pytest.mark.parametrize("statement", [cell for cell in _cells("Dialects") if not cell.startswith("…")])
def test_statements_of_a_dialect_on_the_notation_page_are_read(statement: str) -> None:
    table = _SCAFFOLD.format(f"\n{_BELOW}")
    if statement == "dialect hf":
        table = table.partition("dialect hf")[0]
    if not statement.startswith("dialect"):
        statement = f"dialect mine{' like hf' if statement.startswith('without') else ''}\n  {statement}"
        table += _HF
    assert tables.read(f"{table}{statement}\n", known_families=families.builtin())


# The figures of the docs: they show what numpy computes, and each is on a page.

DOCS = ROOT / "docs"
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
    for loader, rows in (("transformers 5.24", cut_first), ("Transaxle", split_first)):
        assert [words.partition(": ")[2] for words in drawn if words.startswith(loader)] == rows
