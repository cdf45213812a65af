"""Programs of pages: what they print, how they end, and that one knows nothing of another."""

from __future__ import annotations

from pathlib import Path

from tests.blocks import execute


def test_a_program_prints_and_ends(tmp_path: Path) -> None:
    assert execute("import os\nprint(os.getcwd())\nx = 1", tmp_path) == (0, f"{tmp_path}\n")
    code, printed = execute("print(x)", tmp_path)
    assert code == 1
    assert "NameError: name 'x' is not defined" in printed
    assert execute("raise SystemExit(3)", tmp_path) == (3, "")
    assert execute("import atexit\natexit.register(print, __name__)", tmp_path)[1] == "__main__\n"
    assert execute("import os\nos.abort()", tmp_path)[0] < 0
