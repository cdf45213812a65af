"""A folder with the tiny checkpoint in it, and the program to run there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import tiny
from tests.cli import documents
from tests.cli.running import Outcome, Transaxle
from transaxle.cli import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: empty, so that paths are short in what is printed."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ck(here: Path) -> Path:
    """The tiny checkpoint, `ck` in the working directory."""
    tiny(here / "ck")
    return Path("ck")


@pytest.fixture
def transaxle(here: Path, capsys: pytest.CaptureFixture[str]) -> Transaxle:
    """Runs a command in this process."""

    def run(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        if "--json" in arguments:
            documents.check(str(arguments[0]), json.loads(captured.out))
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def converted(ck: Path, transaxle: Transaxle) -> Callable[[str], Path]:
    """Converts the tiny checkpoint to a dialect; the folder has its name."""

    def convert(dialect: str) -> Path:
        assert transaxle("convert", ck, dialect, "--to", dialect).code == 0
        return Path(dialect)

    return convert
