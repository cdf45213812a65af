"""Issue 22, item 6: what is said while a command works, how much of it, and what a bug leaves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.running import BUG, DIFFERENT, MACHINE, USAGE, Transaxle, flip, on_terminal, only
from transaxle import __version__
from transaxle.cli import screen as screen_module
from transaxle.cli.screen import Screen


@contextmanager
def _every(seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screen_module, "_LINE_SECONDS", seconds)
        yield


def test_item_6_bars_have_labels(ck: Path) -> None:
    """On a terminal, each phase has its own."""
    text = on_terminal("convert", ck, "out", "--to", "torchtitan", "--verify", errors_only=True)
    places = [text.index(label) for label in ("planning", "copying", "verifying", "comparing")]
    assert places == sorted(places)


def test_item_6_lines_where_there_is_no_terminal(ck: Path, transaxle: Transaxle) -> None:
    with _every(0):
        told = transaxle("convert", ck, "out", "--to", "torchtitan", "--verify").err.splitlines()
    shape = re.compile(r"(copying|verifying|comparing): \S+ k?B of \S+ kB \(\d+ %\), \S+ [kMG]?B/s")
    assert [line for line in told if not shape.fullmatch(line)] == []
    labels = list(dict.fromkeys(line.partition(":")[0] for line in told))
    assert labels == ["copying", "verifying", "comparing"]
    assert "(100 %)" in [line for line in told if line.startswith("copying")][-1]


def test_item_6_lines_are_seconds_apart(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_item_6_short_work_says_nothing_and_json_is_alone(ck: Path, transaxle: Transaxle) -> None:
    assert transaxle("convert", ck, "out", "--to", "torchtitan").err == ""
    with _every(0):
        assert transaxle("verify", ck, "out", "--json").json["comparison"]


def test_item_6_quiet(ck: Path, transaxle: Transaxle) -> None:
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


def test_item_6_verbose(ck: Path, transaxle: Transaxle) -> None:
    outcome = transaxle("convert", ck, "out", "--to", "torchtitan", "--verify", "-v")
    labels = [line.partition(",")[0].partition(":")[0] for line in outcome.err.splitlines()]
    assert labels == ["planning", "copying", "verifying", "comparing"]
    assert all(re.search(r", \d+\.\d\d s$", line) for line in outcome.err.splitlines())
    assert transaxle("verify", "out", "-q", "-v").code == USAGE


@pytest.mark.parametrize("urls", [[], ["Homepage, https://example.org", "Issues, https://example.org/issues"]])
def test_item_6_a_bug_leaves_its_traceback(
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
    assert "transaxle-bug-" in transaxle("ls", ck, "--json").json["error"]["message"]


def test_item_6_a_bug_where_nothing_can_be_kept(
    ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("transaxle.verbs.open_checkpoint", broken)
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent/folder")
    outcome = transaxle("ls", ck)
    assert (outcome.code, "TRANSAXLE_DEBUG=1" in outcome.err) == (BUG, True)
