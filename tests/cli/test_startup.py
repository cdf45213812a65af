"""Commands import and parse only what they need. Times are in `benchmarks/startup.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import tiny

NEVER = (
    "torch", "rich", "fsspec", "asyncio", "sqlite3", "importlib.metadata", "xml", "unittest",
    "transaxle.formats.dcp", "transaxle.formats.torch_file", "transaxle.formats.deepspeed", "transaxle.live",
    "transaxle.formats.store.reading",
)  # fmt: skip
"""Modules that neither help nor a look at a folder of safetensors files needs."""
_READING = (
    "transaxle.engine.plan", "transaxle.engine.execute", "transaxle.engine.compare",
    "transaxle.formats.store.upload", "transaxle.formats.pickled.interpreter",
    "transaxle.formats.pickled.scan",
    "transaxle.encodings.arithmetic", "transaxle.axes.layout.divide", "transaxle.move.workers", "ml_dtypes",
    "concurrent.futures", "logging",
)  # fmt: skip
"""Modules that listing needs no more: of writing, of arithmetic, of workers."""
_LISTING = (
    "numpy", "msgspec", "xxhash", "transaxle.engine", "transaxle.formats", "transaxle.axes", "transaxle.families",
)  # fmt: skip
"""Modules that help needs no more."""
_OF_PLANS = ("transaxle.engine.plan.conversion", "transaxle.engine.execute", "transaxle.engine.compare", "numpy.ma")
"""Modules that only plans, conversions and comparisons need, and numpy's masked arrays, which nothing does."""
_OF_WORKERS = ("transaxle.engine.distribute", "secrets")
"""Modules that only work of several processes needs."""
_OF_VALUES = ("ml_dtypes", "transaxle.encodings.arithmetic")
"""Modules that nobody needs who moves values as they are."""
BLAS = "OPENBLAS_NUM_THREADS"
COMMANDS = {
    "--help": (("--help",), (*NEVER, *_READING, *_LISTING)),
    "ls": (("ls", "ck"), (*NEVER, *_READING, *_OF_VALUES)),
    "plan": (("plan", "ck", "out", "--to", "torchtitan"), (*NEVER, *_OF_WORKERS, *_OF_VALUES)),
    "convert": (("convert", "ck", "out", "--to", "torchtitan"), (*NEVER, *_OF_WORKERS, *_OF_VALUES)),
    "diff": (("diff", "ck", "ck"), (*NEVER, *_OF_WORKERS, *_OF_VALUES)),
    "verify": (("verify", "ck", "ck"), (*NEVER, *_OF_WORKERS, *_OF_VALUES)),
    "report": (("report", "ck", "--values", "-o", "page.html"), (*NEVER, *_OF_WORKERS, *_OF_PLANS)),
}
SCRIPT = """
import json, sys
from contextlib import redirect_stdout
from io import StringIO
from transaxle.cli import main
with redirect_stdout(StringIO()):
    code = main(sys.argv[1:])
files = sys.modules.get("transaxle.families")
tables = files and files._read_family.cache_info().currsize
print(json.dumps({"code": code, "modules": sorted(sys.modules), "tables": tables}))
"""


@pytest.mark.parametrize(("words", "unneeded"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_imports_what_it_needs(words: tuple[str, ...], unneeded: tuple[str, ...], tmp_path: Path) -> None:
    """And of the tables, it reads that of the model."""
    tiny(tmp_path / "ck")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout)
    assert seen["code"] == 0
    found = [name for name in seen["modules"] if any(name == each or name.startswith(f"{each}.") for each in unneeded)]
    assert found == []
    assert seen["tables"] in (None, 1)


@pytest.mark.parametrize(("said", "kept"), [({}, "1"), ({BLAS: "3"}, "3")])
def test_the_program_alone_limits_the_threads_of_numpy(said: dict[str, str], kept: str, tmp_path: Path) -> None:
    """A number that the user set is kept, and a calling process is not changed."""
    tiny(tmp_path / "ck")
    script = f"""if True:
        import os, sys
        from transaxle.cli import main
        before = os.environ.get({BLAS!r})
        main(["ls", "ck"])
        assert os.environ.get({BLAS!r}) == before
        sys.argv = ["transaxle", "ls", "ck"]
        main()
        sys.stderr.write(os.environ[{BLAS!r}])"""
    environment = {name: value for name, value in os.environ.items() if name != BLAS} | said
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == kept
