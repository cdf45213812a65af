"""Programs of pages: what they print, how they end, and that one knows nothing of another."""

from __future__ import annotations

from pathlib import Path

from tests.blocks import execute, typed


def test_a_program_prints_and_ends(tmp_path: Path) -> None:
    assert execute("import os\nprint(os.getcwd())\nx = 1", tmp_path) == (0, f"{tmp_path}\n")
    code, printed = execute("print(x)", tmp_path)
    assert code == 1
    assert "NameError: name 'x' is not defined" in printed
    assert execute("raise SystemExit(3)", tmp_path) == (3, "")
    assert execute("import atexit\natexit.register(print, __name__)", tmp_path)[1] == "__main__\n"
    assert execute("import os\nos.abort()", tmp_path)[0] < 0


def test_a_command_prints_and_ends_as_its_script_does(tmp_path: Path) -> None:
    code, printed, errors = typed(["transaxle", "--version"], tmp_path)
    assert (code, printed.split()[0], errors) == (0, "transaxle", "")
    code, printed, errors = typed(["transaxle", "ls", "nothing"], tmp_path)
    assert (code, printed) == (4, "")
    assert "nothing" in errors
