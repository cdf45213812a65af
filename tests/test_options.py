"""The table of options, compared with signatures, docstrings and the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import click
import pytest
import torch

import transaxle as tx
from tests.checkpoints import tiny
from tests.cli.conftest import here, transaxle  # noqa: F401 - fixtures
from tests.cli.running import USAGE, Transaxle
from tests.some import some
from transaxle.arguments import read_options
from transaxle.cli.command import program
from transaxle.engine.observers import Unwatched
from transaxle.options import EXCLUSIONS, OPENING, OPTIONS, VERBS, Exclusion, combination_error, command_spelling

FUNCTIONS: Mapping[str, Callable[..., Any]] = {name: getattr(tx, name) for name in VERBS}
COMMANDS = {"open": "ls"}
"""Verbs whose command has another name."""
OBSERVERS = {"log", "progress", "watch"}
"""Keyword arguments of verbs that are no options: what sees the work."""
ANNOTATIONS = {
    "axes": "Axes | None", "config": "Config | None", "count": "int | None", "flag": "bool",
    "float_type": "DType | None", "memory": "Size | None", "on": "On | None", "overwrite": "Overwrite",
    "path": "PathLike | None", "patterns": "Patterns", "size": "Size", "switch": "bool | None", "text": "str | None",
}  # fmt: skip
"""Kind of an option -> its annotation."""
OWN = {"to": "str", "weights": "Weights | None", "encode": "str | None", "restate": "str | None"}
"""Annotations of single options."""


def keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Options that a function states, in their order."""
    return {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in OBSERVERS
    }


def command_of(verb: str) -> click.Command:
    return some(program.get_command(click.Context(program), COMMANDS.get(verb, verb)))


@pytest.mark.parametrize("verb", VERBS)
def test_signatures_are_those_of_the_table(verb: str) -> None:
    stated = keywords(FUNCTIONS[verb])
    assert tuple(stated) == VERBS[verb]
    for name, parameter in stated.items():
        option = OPTIONS[name]
        assert parameter.annotation == (OWN.get(name) or ANNOTATIONS[option.kind]), name
        assert parameter.default == (parameter.empty if option.required else option.default), name


@pytest.mark.parametrize("verb", VERBS)
def test_the_command_line_takes_what_python_takes(verb: str) -> None:
    params = {each.name: each for each in command_of(verb).params if isinstance(each, click.Option)}
    for name in VERBS[verb]:
        assert set(OPTIONS[name].spellings) <= {*params[name].opts, *params[name].secondary_opts}, name


def test_old_and_new_spellings_exist() -> None:
    """Those before the slash are older than the table; scripts have them."""
    taken = {word for each in command_of("convert").params for word in (*each.opts, *each.secondary_opts)}
    assert {
        "--from", "--axis", "--family", "--config", "--rules", "--shard-size", "--decode", "--encode", "--only",
        "--skip", "--allow-lossy", "--strict", "--resume", "--overwrite", "--verify", "--no-sync", "--weights",
        "--jobs", "--memory", "--to", "--average-replicas", "--optimizer", "--no-optimizer", "--merge", "--dtype",
        "--format", "--on", "--items", "--report", "--profile", "--derive", "--tp", "--pp", "--ep",
        "--make-vocab-size-divisible-by", *("--dialect", "--axes", "--average", "--sync"),
    } <= taken  # fmt: skip


def test_options_without_a_docstring_are_documented_by_open_or_convert() -> None:
    def documented(function: Callable[..., Any]) -> set[str]:
        lines = (function.__doc__ or "").splitlines()
        return {line.strip().partition(":")[0] for line in lines if line.startswith("        ") and ":" in line}

    assert set(OPENING) <= documented(tx.open)
    assert set(VERBS["convert"]) - set(OPENING) <= documented(tx.convert)
    for verb, function in FUNCTIONS.items():
        own = set(inspect.signature(function).parameters) - documented(function)
        referred = set(VERBS["convert"] if verb in {"plan", "serve", "supports"} else OPENING)
        assert own <= referred, (verb, own - referred)


CASES = (
    ("convert", {"decode": "bf16", "encode": "mxfp8"}, "decode and encode exclude each other; give only one"),
    ("open", {"decode": "bf16", "dtype": "fp32"}, "decode and dtype exclude each other; give only one"),
    ("convert", {"merge": "a", "dtype": "fp32"}, "dtype and merge exclude each other; give only one"),
    ("convert", {"only": "*"}, "only and skip need decode, encode or dtype"),
    ("verify", {"skip": "*", "merge": "a"}, "only and skip need decode or dtype"),
    ("convert", {"group_size": 64}, "group_size needs encode"),
    ("open", {"graft_over": "*"}, "graft_over needs graft"),
    ("convert", {"time_limit": 3}, "python and time_limit need reader"),
    ("convert", {"items": 3}, "items needs on: nothing else is divided"),
    ("plan", {"items": 3}, "items needs write or on: nothing else is divided"),
)
"""A verb, options that exclude each other, and the sentence."""


@pytest.mark.parametrize(("verb", "options", "sentence"), CASES)
def test_combinations_are_refused_in_both_languages(
    verb: str,
    options: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    transaxle: Transaxle,  # noqa: F811
) -> None:
    source, target = tiny(tmp_path / "ck"), tmp_path / "out"
    places = [source] if verb == "open" else [source, source] if verb == "verify" else [source, target]
    to = {"to": "hf"} if verb in {"plan", "convert"} else {}
    with pytest.raises(TypeError) as caught:
        FUNCTIONS[verb](*places, **to, **options)
    assert str(caught.value) == sentence
    words = [f"{command_spelling(name)}={value}" for name, value in {**to, **options}.items()]
    done = transaxle(COMMANDS.get(verb, verb), *map(str, places), *words)
    assert done.code == USAGE
    typed = done.err.splitlines()[0]
    assert typed == combination_error(verb, options, command_spelling)
    for option in sorted(OPTIONS, key=len, reverse=True):
        typed = typed.replace(command_spelling(option), option)
    assert typed == sentence
    assert not target.exists()


def test_each_option_is_of_a_verb_and_each_exclusion_tried() -> None:
    assert {name for names in VERBS.values() for name in names} == set(OPTIONS)
    tried: set[Exclusion] = set()
    for verb, options, _ in CASES:
        tried |= {each for each in EXCLUSIONS if each.sentence(verb, options, str)}
    assert tried == set(EXCLUSIONS)


@pytest.mark.parametrize("axes", [{"g": 8, "e": 4}, ["g=8", "e=4"], ("g=8", "e=4"), ["g=8", "g=8", "e=4"]])
def test_axes_are_taken_as_python_and_as_the_command_line_write_them(axes: Any) -> None:
    plain = dict.fromkeys(VERBS["open"])
    given = {**plain, "average": False, "graft_over": (), "only": (), "skip": ()}
    assert read_options("open", {**given, "axes": axes}) == {"axes": {"g": 8, "e": 4}}
    assert read_options("open", {**given, "axes": "g=8"}) == {"axes": {"g": 8}}
    nothing: tuple[Any, ...] = (None, {}, ())
    for none in nothing:
        assert read_options("open", {**given, "axes": none}) == {}
    for wrong, message in (("g", "'g' is not AXIS=SIZE"), (["g=8", "g=9"], "axis g is given twice: 8 and 9")):
        with pytest.raises(ValueError, match=message):
            read_options("open", {**given, "axes": wrong})


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "BF16", "torch.bfloat16"])
def test_a_type_has_the_same_names_in_both_languages(name: str, tmp_path: Path, transaxle: Transaxle) -> None:  # noqa: F811
    source = str(tiny(tmp_path / "ck"))
    assert transaxle("convert", source, "typed", "--to", "hf", "--dtype", name).code == 0
    values: tuple[str | torch.dtype, ...] = (name, torch.bfloat16)
    for number, value in enumerate(values):
        tx.convert(source, tmp_path / f"called{number}", to="hf", dtype=value)
        assert tx.diff(tmp_path / "typed", tmp_path / f"called{number}").equal


def test_report_verify_and_on_work_together_in_python(tmp_path: Path) -> None:
    """A page, a verification, and a pool that does the work."""
    source = tiny(tmp_path / "ck")
    with ThreadPoolExecutor(1) as pool:
        report = tx.convert(
            source, tmp_path / "out", to="torchtitan", on=pool, items=2, verify=True, report=tmp_path / "page.html"
        )
    assert report.verification
    assert len(report.workers) == 1
    assert "<html" in (tmp_path / "page.html").read_text("utf-8")
    (tmp_path / "out" / "transaxle.json").unlink()
    with pytest.raises(tx.TransaxleError) as caught:
        tx.convert(source, tmp_path / "out", to="torchtitan", report=tmp_path / "why.html")
    assert caught.value.code in (tmp_path / "why.html").read_text("utf-8")
    planned = tx.plan(
        source, tmp_path / "new", to="hf", items=2, write=tmp_path / "PLAN", report=tmp_path / "plan.html"
    )
    assert not planned.refusals
    assert (tmp_path / "PLAN").stat().st_size > 0
    assert (tmp_path / "plan.html").exists()
    assert tx.diff(source, source, report=tmp_path / "diff.html").equal
    assert (tmp_path / "diff.html").exists()


def test_a_choice_is_one_of_those_of_the_command_line(tmp_path: Path) -> None:
    """In any case, and a type by any of its names; another text would quietly stand for the other choice."""
    source = tiny(tmp_path / "ck")
    for name in ("fp32", "FP32", "float32", "lp", "LP"):
        with pytest.raises(tx.TransaxleError, match="stores its weights once"):
            tx.open(source, weights=cast("Any", name))
    for verb in (partial(tx.open, source), partial(tx.plan, source, tmp_path / "out", to="hf")):
        with pytest.raises(tx.TransaxleError, match="Choose one of: fp32, lp") as caught:
            verb(weights=cast("Any", "half"))
        assert caught.value.code == "AMBIGUOUS"
        with pytest.raises(TypeError, match=r'^weights must be a str such as "fp32"; got 3'):
            verb(weights=cast("Any", 3))
    # So is the place where a plan is carried out.
    with pytest.raises(tx.TransaxleError, match="cannot convert on 'nope'"):
        tx.plan(source, tmp_path / "out", to="hf", on="nope")
    for other in (3, ThreadPoolExecutor):
        with pytest.raises(TypeError, match=r'^on must be "ray", "torchrun", an executor or a pool'):
            tx.plan(source, tmp_path / "out", to="hf", on=cast("Any", other))


def test_a_watch_and_progress_both_count_the_bytes(tmp_path: Path) -> None:
    counts = {"watch": 0, "progress": 0}

    def count(who: str, size: int) -> None:
        counts[who] += size

    class Watching(Unwatched):
        def progress(self, total: int, label: str = "", *, stays: bool = False) -> AbstractContextManager[Any]:
            return nullcontext(partial(count, "watch"))

    source = tiny(tmp_path / "ck")
    watch, progress = Watching(), partial(count, "progress")
    tx.convert(source, tmp_path / "out", to="torchtitan", watch=watch, progress=progress)
    assert 0 < counts["watch"] == counts["progress"]
    tx.verify(source, tmp_path / "out", watch=watch, progress=progress)
    tx.diff(source, tmp_path / "out", watch=watch, progress=progress)
    assert counts["watch"] == counts["progress"]


def test_a_watch_sees_each_phase(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watching(Unwatched):
        def state(self, consequence: str, way_on: str = "") -> None:
            seen.append(f"{consequence}; {way_on}")

        def planned(self, cleared: Any) -> None:
            seen.append(f"planned {len(cleared.plan.tensors)} tensors")

        def opened(self, *checkpoints: tx.Checkpoint) -> None:
            seen.append(f"opened {len(checkpoints)}")

    source = tiny(tmp_path / "ck")
    report = tx.convert(source, tmp_path / "out", to="torchtitan", verify=True, resume=True, watch=Watching())
    assert seen == [
        "nothing was written; ",
        f"planned {report.tensors} tensors",
        "nothing was written; run the same command again to continue",
        f"{tmp_path / 'out'} is written, but not verified; ",
    ]
    del seen[:]
    tx.diff(source, tmp_path / "out", watch=Watching())
    assert seen == ["opened 2"]
