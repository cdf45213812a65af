"""The program around its commands: help, suggestions, completion, and what happens when it fails."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from tests.checkpoints import TENSORS
from tests.cli.running import BUG, DIFFERENT, MACHINE, USAGE, Transaxle, command, flip, on_terminal, only, process
from transaxle import __version__
from transaxle.cli import NAME, main
from transaxle.cli import screen as screen_module
from transaxle.cli.command import COMMANDS, Command, program
from transaxle.cli.screen import Screen

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers"}:
            raise ImportError(f"{name} is blocked here")
sys.meta_path.insert(0, Blocked())
"""


def _commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(program, info_name=NAME)
    for name in COMMANDS:
        found = program.get_command(context, name)
        assert found is not None
        yield name, found


def test_without_a_command_the_help_is_shown(transaxle: Transaxle) -> None:
    outcome = transaxle()
    assert outcome.code == 0
    assert outcome.out == transaxle("--help").out == transaxle("-h").out
    assert outcome.out.index("transaxle demo") < outcome.out.index("Commands:") < outcome.out.index("Options:")
    assert all(f"  {name} " in outcome.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples_first(name: str, transaxle: Transaxle) -> None:
    outcome = transaxle(name, "--help")
    assert outcome.code == 0
    assert outcome.out.index(f"\n  transaxle {name}") < outcome.out.index("Usage:") < outcome.out.index("Options:")
    assert all(option in outcome.out for option in ("--json", "--all", "--help"))


def test_examples_in_the_help_can_be_typed() -> None:
    for name, found in _commands():
        assert isinstance(found, Command)
        assert found.examples
        for line, _ in found.examples:
            program_name, command_name, *arguments = shlex.split(line)
            assert (program_name, command_name) == (NAME, name)
            found.make_context(name, arguments)


def test_the_help_mentions_only_options_of_the_command() -> None:
    strange = {}
    for name, found in _commands():
        context = click.Context(found, info_name=name)
        options = {word for each in found.get_params(context) for word in (*each.opts, *each.secondary_opts)}
        strange[name] = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", found.get_help(context))) - options
    assert strange.pop("work") == {"--array", "--wrap", "--write"}  # of Slurm and of `plan`, in its example
    assert {name for name, words in strange.items() if words} == set()


def test_the_version(transaxle: Transaxle) -> None:
    assert transaxle("--version").out == f"transaxle {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lss"], "Did you mean ls?"),
        (["covert"], "Did you mean convert?"),
        (["frobnicate"], "Commands: ls, info"),
        (["ls"], "Missing argument 'PATH'."),
        (["ls", ".", "--al"], "--all"),
        (["--frob"], "--frob"),
    ],
)
def test_a_typing_mistake_gets_a_suggestion(arguments: list[str], said: str, transaxle: Transaxle) -> None:
    outcome = transaxle(*arguments)
    assert outcome.code == USAGE
    assert said in outcome.err
    assert outcome.out == ""
    assert "message" in transaxle(*arguments, "--json").json["error"]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("transaxle con", {"convert"}),
        ("transaxle convert a b --to torch", {"torchtitan", "torchtitan@0.2", "torchtitan@0.3"}),
        ("transaxle convert a b --family qwen3_", {"qwen3_moe"}),
        ("transaxle explain BLOCK", {"BLOCK_MISALIGNED"}),
    ],
)
def test_completion(typed: str, offered: set[str]) -> None:
    words = shlex.split(typed)
    environment = {"_TRANSAXLE_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    outcome = process(environment=environment)
    found = {line.partition(",")[2] for line in outcome.out.splitlines()}
    assert offered <= found
    assert all(name.startswith(words[-1]) for name in found)
    assert "complete" in process(environment={"_TRANSAXLE_COMPLETE": "bash_source"}).out


def test_the_demo_says_that_it_needs_torch(here: Path) -> None:
    refused = process("demo", before=BLOCKED)
    assert refused.code == 3
    assert "pip install 'torch>=2.11' transformers==" in refused.err
    assert process("demo", "--json", before=BLOCKED).codes == ["UNSUPPORTED"]


def test_it_is_a_module_too(ck: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "transaxle", "ls", str(ck)], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"{TENSORS} tensors" in done.stdout


def test_it_is_plain_when_piped(ck: Path, transaxle: Transaxle) -> None:
    for arguments in (["convert", "ck", "out", "--to", "hf"], ["ls", "nowhere"], ["verify", "ck", "ck"]):
        outcome = process(*arguments)
        assert "\x1b" not in outcome.out + outcome.err


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_on_a_terminal_it_has_progress_and_colours(environment: dict[str, str], ck: Path) -> None:
    text = on_terminal("convert", ck, "out", "--to", "torchtitan", "--verify", environment=environment)
    assert "equal: " in text.replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert ("\x1b[1mout" in text) == (environment == {})
    assert ("━" in text) == (environment.get("TERM") != "dumb")


def test_a_reader_that_stops_is_no_error(ck: Path) -> None:
    writing = subprocess.Popen(
        command("ls", ck, "--all", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writing.stdout is not None
    assert writing.stderr is not None
    writing.stdout.close()
    err = writing.stderr.read()
    writing.stderr.close()
    assert (writing.wait(60), err) == (141, "")


def test_a_full_disk_behind_the_output(ck: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("ls", ck), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (4, "writing the result: No space left on device\n")


def test_closed_streams_are_no_error(ck: Path) -> None:
    closing = "import os, sys\nos.close(1)\nos.close(2)\nsys.stdout = sys.stderr = None"
    assert process("ls", ck, before=closing).code == 0
    assert process("ls", "nowhere", before=closing).code == 4


@contextmanager
def _every(seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screen_module, "_LINE_SECONDS", seconds)
        yield


def test_bars_have_labels(ck: Path) -> None:
    """On a terminal, each phase has its own."""
    text = on_terminal("convert", ck, "out", "--to", "torchtitan", "--verify", errors_only=True)
    places = [text.index(label) for label in ("planning", "copying", "verifying", "comparing")]
    assert places == sorted(places)


def test_lines_of_progress_without_a_terminal(ck: Path, transaxle: Transaxle) -> None:
    with _every(0):
        told = transaxle("convert", ck, "out", "--to", "torchtitan", "--verify").err.splitlines()
    shape = re.compile(r"(copying|verifying|comparing): \S+ k?B of \S+ kB \(\d+ %\), \S+ [kMG]?B/s")
    assert [line for line in told if not shape.fullmatch(line)] == []
    labels = list(dict.fromkeys(line.partition(":")[0] for line in told))
    assert labels == ["copying", "verifying", "comparing"]
    assert "(100 %)" in [line for line in told if line.startswith("copying")][-1]


def test_lines_are_seconds_apart(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with Screen().progress(1000) as progress:
        for _ in range(12):
            clock[0] += 1
            progress(50)
    assert capsys.readouterr().err.splitlines() == [
        "copying: 250 B of 1 kB (25 %), 50 B/s",
        "copying: 500 B of 1 kB (50 %), 50 B/s",
    ]


def test_short_work_and_json_print_no_progress(ck: Path, transaxle: Transaxle) -> None:
    assert transaxle("convert", ck, "out", "--to", "torchtitan").err == ""
    with _every(0):
        assert transaxle("verify", ck, "out", "--json").json["comparison"]


def test_quiet(ck: Path, transaxle: Transaxle) -> None:
    """The exit code says it all; errors are still said."""
    with _every(0):
        assert transaxle("convert", ck, "out", "--to", "torchtitan", "--quiet") == transaxle("verify", "out", "-q")
        done = transaxle("verify", "out", "-q")
        assert (done.code, done.out, done.err) == (0, "", "")
        flip(only(list(Path("out").glob("*.safetensors"))), -1)
        differs = transaxle("verify", ck, "out", "-q")
        assert (differs.code, differs.out) == (DIFFERENT, "")
    missing = transaxle("verify", "nowhere", "-q")
    assert (missing.code, missing.out) == (MACHINE, "")
    assert "nowhere" in missing.err
    assert transaxle("ls", ck, "-q", "--json").json["tensors"]


def test_verbose(ck: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("convert", ck, "out", "--to", "torchtitan", "--verify", "-v")
    labels = [line.partition(",")[0].partition(":")[0] for line in outcome.err.splitlines()]
    assert labels == ["planning", "copying", "verifying", "comparing"]
    assert all(re.search(r", \d+\.\d\d s$", line) for line in outcome.err.splitlines())
    assert transaxle("verify", "out", "-q", "-v").code == USAGE


@pytest.mark.parametrize("urls", [[], ["Homepage, https://example.org", "Issues, https://example.org/issues"]])
def test_a_bug_leaves_its_traceback(
    urls: list[str], ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    class Described:
        def get_all(self, name: str) -> list[str]:
            assert name == "Project-URL"
            return urls

    monkeypatch.setattr("transaxle.verbs.open_checkpoint", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.metadata", lambda _: Described())
    outcome = transaxle("ls", ck)
    assert outcome.code == BUG
    report = only(list(tmp_path.glob("transaxle-bug-*.txt")))
    assert str(report) in outcome.err
    assert ("https://example.org/issues" in outcome.err) == bool(urls)
    text = report.read_text("utf-8")
    assert f"transaxle {__version__}" in text
    assert f"transaxle ls {ck}" in text
    assert "in broken" in text
    assert "ZeroDivisionError: division by zero" in text
    assert "internal error: ZeroDivisionError: division by zero" in outcome.err
    error = transaxle("ls", ck, "--json").json["error"]
    assert ("transaxle-bug-" in error["message"], error["exit_code"]) == (True, BUG)


def test_a_bug_without_a_place_for_the_report(
    ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("transaxle.verbs.open_checkpoint", broken)
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent/folder")
    outcome = transaxle("ls", ck)
    assert (outcome.code, "TRANSAXLE_DEBUG=1" in outcome.err) == (BUG, True)
    monkeypatch.setenv("TRANSAXLE_DEBUG", "1")
    assert main(["ls", str(ck)]) == BUG
    assert "Traceback" in capsys.readouterr().err


def test_running_out_of_memory_is_reported(ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("transaxle.verbs.open_checkpoint", greedy)
    outcome = transaxle("ls", ck)
    assert outcome.code == 4
    assert "--memory" in outcome.err
