"""Hints in messages: the options that they name exist in both languages, and so do the packages to install."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import transaxle as tx
from tests.some import some
from transaxle.cli.command import program
from transaxle.errors import Refusal, in_both_languages
from transaxle.extras import install
from transaxle.options import KEYWORDS

SOURCE = Path(tx.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z]")
COMMANDS = re.compile(r"(?:torchrun|transaxle)(?: [^\s,;)`]+)+")
OF_COMMANDS = {
    "--begin": "work", "--commit": "work", "--derive": "convert", "--json": "ls", "--number": "derive",
}  # fmt: skip
"""Options without a keyword -> a command that has them: Python does these by functions of their own."""
OF_OTHERS = {
    "--ckpt-convert-update-legacy-dist-opt-format", "--ckpt-format", "--dist-ckpt-optim-fully-reshardable",
    "--fp8-param-gather", "--lr", "--min-lr", "--model-loader-extra-config", "--nproc-per-node", "--override-opt",
    "--use-mcore-models", "--weight-decay", "--weight-transfer-config",
}  # fmt: skip
"""Options of Megatron, torchrun and vLLM."""
PAGES = ("cli", "options.py", "engine/explanations.py", "errors.py")
"""What speaks to the command line alone, and the mechanism itself."""


def texts_by_module() -> Iterator[tuple[str, str]]:
    """Yield the path of each module and each text in it that is shown, with a mark for each value that is put in."""
    for file in sorted(SOURCE.rglob("*.py")):
        module = str(file.relative_to(SOURCE))
        if module.startswith(PAGES):
            continue
        tree = ast.parse(file.read_text("utf-8"))
        nodes = list(ast.walk(tree))
        inner = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
        inner |= {id(value) for n in nodes if isinstance(n, ast.JoinedStr) for value in n.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts = (str(v.value) if isinstance(v, ast.Constant) else "VALUE" for v in node.values)
                yield module, "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                yield module, node.value


def texts() -> Iterator[str]:
    return (text for _, text in texts_by_module())


def options_of(command: str) -> set[str]:
    found = some(program.get_command(click.Context(program), command))
    return {option for each in found.params for option in (*each.opts, *each.secondary_opts)}


def test_options_in_texts_exist_in_both_spellings() -> None:
    named: set[str] = set()
    for text in texts():
        both = in_both_languages(text)
        assert in_both_languages(both) == both
        left = COMMANDS.sub("", both)
        for option in OPTION.findall(text):
            named.add(option)
            keyword = KEYWORDS.get(option, "").partition("=")[0]
            assert not keyword or option not in left or f"{keyword}=" in both, text
    assert {"--axis", "--config", "--to", "--decode"} < named
    assert named - KEYWORDS.keys() - OF_OTHERS - OF_COMMANDS.keys() == set()


def test_keywords_are_those_of_functions_and_options_those_of_commands() -> None:
    known = {
        name
        for each in (tx.plan, tx.convert, tx.report, tx.diff, tx.check, tx.serve)
        for name in inspect.signature(each).parameters
    }
    assert [each for each in KEYWORDS.values() if each.partition("=")[0] not in known] == []
    commands = {
        option for each in ("plan", "convert", "report", "diff", "check", "serve") for option in options_of(each)
    }
    assert KEYWORDS.keys() <= commands
    for option, command in OF_COMMANDS.items():
        assert option in options_of(command), option


@pytest.mark.parametrize(
    ("text", "both"),
    [
        ("Give it with --axis g=N.", 'Give it with --axis g=N (axes={"g": N}).'),
        ("Pad it: --axis p=12, or not.", 'Pad it: --axis p=12 (axes={"p": 12}), or not.'),
        ("Omit --pp and --ep.", "Omit --pp (pp=) and --ep (ep=)."),
        ("Write --to hf or --to dcp:hf.", 'Write --to hf (to="hf") or --to dcp:hf.'),
        ("Leave it out (--no-optimizer).", "Leave it out (--no-optimizer, optimizer=False)."),
        ("Do it with --overwrite=everything.", 'Do it with --overwrite=everything (overwrite="everything").'),
        ("Write less: --shard-size 5GB (shard_size=).", "Write less: --shard-size 5GB (shard_size=)."),
        ("Leave them plain:  --skip '*.a b'", "Leave them plain:  --skip '*.a b' (skip=\"*.a b\")"),
        ("Use  transaxle convert A B --to hf --merge C, or --merge C.",
         'Use  transaxle convert A B --to hf --merge C, or --merge C (merge="C").'),
        ("Save it with --ckpt-format torch.", "Save it with --ckpt-format torch."),
    ],
)  # fmt: skip
def test_hints_give_both_spellings(text: str, both: str) -> None:
    assert in_both_languages(text) == both
    assert in_both_languages(both) == both
    refusal = Refusal("UNKNOWN_AXIS", "--axis is of the command line", hint=text)
    assert refusal.hint == refusal.shown().hint == both
    assert refusal.message == "--axis is of the command line"


# Hints on missing packages name what to install, however transaxle was installed.

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OFFERED = ("torch", "s3", "hf", "report", "vllm", "ray", "demo")
"""Extras for users; the others are for those who work on the package."""


def _asked(extra: str) -> set[tuple[str, frozenset[str], str]]:
    """Return what an extra asks for, with that of extras that it names."""
    found = set()
    for line in EXTRAS[extra]:
        one = Requirement(line)
        if one.name == PROJECT["name"]:
            found |= {each for other in one.extras for each in _asked(other)}
        else:
            found.add(_known(one))
    return found


def _known(one: Requirement) -> tuple[str, frozenset[str], str]:
    return canonicalize_name(one.name), frozenset(one.extras), str(one.specifier)


@pytest.mark.parametrize("extra", OFFERED)
def test_hints_name_packages_instead_of_extras(extra: str) -> None:
    """`pip install 'transaxle[report]'` finds no such package on an index until one is released."""
    words = shlex.split(install(extra))
    assert words[:2] == ["pip", "install"]
    assert {_known(Requirement(word)) for word in words[2:]} == _asked(extra)


def test_a_source_tree_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", missing)
    assert install("report") == "pip install 'transaxle[report]'"
