"""The compiled kernel: built when there is a compiler, used only if it is of this source, and never needed."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from transaxle.encodings.arithmetic import codec, kernel
from transaxle.encodings.encoding import MXFP8
from transaxle.formats.pickled import scan
from transaxle.formats.storage import copier

ROOT = Path(__file__).parents[3]
LIBRARIES = {kernel.LIBRARY.name, copier.LIBRARY.name, scan.LIBRARY.name}
HOOK = "hatch_build.py"
compilers = [path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
needs_compiler = pytest.mark.skipif(not compilers, reason="no C compiler")
needs_kernel = pytest.mark.skipif(kernel.load() is None, reason="the kernel is not built here")


@pytest.fixture
def reloaded() -> Iterator[None]:
    kernel.load.cache_clear()
    yield
    kernel.load.cache_clear()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package's sources, without what is compiled, as someone gets them who builds it."""
    place = tmp_path / "tree"
    wanted = shutil.ignore_patterns("__pycache__", *LIBRARIES)
    shutil.copytree(ROOT / "src", place / "src", ignore=wanted)
    for name in (HOOK, "pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, place / name)
    return place


def wheel(place: Path, **environment: str) -> tuple[Path, str]:
    """Build a wheel; return it, and what was said meanwhile."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "made"]
    done = subprocess.run(
        command, cwd=place, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (made,) = (place / "made").glob("*.whl")
    return made, done.stdout + done.stderr


def held(made: Path) -> set[str]:
    return {Path(name).name for name in zipfile.ZipFile(made).namelist()}


@needs_compiler
@pytest.mark.slow
def test_a_wheel_holds_the_kernel_and_works_where_it_is_unpacked(copy: Path, tmp_path: Path) -> None:
    """The compiler is told not to optimize, which takes a tenth of the time."""
    fast = tmp_path / "cc"
    fast.write_text(f'#!/bin/sh\nexec {compilers[0]} "$@" -O0\n', "utf-8")
    fast.chmod(0o755)
    made, _ = wheel(copy, CC=str(fast))
    assert held(made) >= LIBRARIES
    assert re.fullmatch(r"transaxle-.*-py3-none-(?!any).*\.whl", made.name)
    assert not list((copy / "src").glob(".build-*"))
    installed = tmp_path / "installed"
    zipfile.ZipFile(made).extractall(installed)
    program = """from transaxle.encodings.arithmetic import codec
from transaxle.formats.storage import copier
print(codec.__file__, codec.active(), copier.load_steps() is not None)"""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    module = installed / "transaxle" / "encodings" / "arithmetic" / "codec.py"
    assert said.stdout.split() == [str(module), "compiled", "True"]


def test_without_a_compiler_the_install_succeeds_and_numpy_computes(copy: Path) -> None:
    made, said = wheel(copy, CC="false")
    assert not held(made) & LIBRARIES
    assert made.name.endswith("-py3-none-any.whl")
    assert "computed with numpy" in said
    assert "done one by one" in said
    program = """
        import json, numpy as np
        from transaxle.encodings.arithmetic import codec
        from transaxle.encodings.encoding import MXFP8
        codes, scale = codec.encode_rows(MXFP8, np.arange(64, dtype=np.float32).reshape(2, 32))
        print(json.dumps([codec.active(), codes.tolist(), scale.tolist()]))
    """
    environment = os.environ | {"PYTHONPATH": str(copy / "src")}
    command = [sys.executable, "-c", "\n".join(line.strip() for line in program.splitlines())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    path, codes, scale = json.loads(done.stdout)
    expected = codec.encode_rows(MXFP8, np.arange(64, dtype=np.float32).reshape(2, 32))
    assert path == "numpy"
    assert (codes, scale) == (expected[0].tolist(), expected[1].tolist())


@needs_kernel
def test_a_kernel_of_another_source_is_not_used(
    reloaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changed = tmp_path / kernel.SOURCE.name
    changed.write_bytes(kernel.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(kernel, "SOURCE", changed)
    assert codec.active() == "numpy"
    with pytest.raises(ValueError, match="is not built"):
        codec.amax(np.ones((1, 1), np.float32), path="compiled")


def test_what_is_no_kernel_is_not_used(reloaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for octets in (b"", b"\x7fELF", b"text"):
        false = tmp_path / kernel.LIBRARY.name
        false.write_bytes(octets)
        kernel.load.cache_clear()
        monkeypatch.setattr(kernel, "LIBRARY", false)
        assert codec.active() == "numpy"


@needs_kernel
def test_threads_compute_side_by_side() -> None:
    """One shared kernel, many threads, each its own matrix."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((64, 512)).astype(np.float32) for _ in range(8)]
    expected = [codec.encode_rows(MXFP8, one, path="numpy")[0] for one in values]
    found: dict[int, list[bytes]] = {}

    def work(number: int) -> None:
        found[number] = [codec.encode_rows(MXFP8, values[number])[0].tobytes() for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(set(found[number]) == {expected[number].tobytes()} for number in range(8))


def test_the_kernel_is_built_without_fast_math() -> None:
    """The hook's flags: contraction off, nothing that lets results differ between processors."""
    flags = next(
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / HOOK).read_text("utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLAGS"
    )
    assert {"-ffp-contract=off", "-std=c11"} <= set(flags)
    assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-march=native"} & set(flags)


@needs_compiler
def test_the_kernel_compiles_without_a_warning(tmp_path: Path) -> None:
    strict = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-pedantic", "-Werror"]
    command = [compilers[0], *strict, "-fsyntax-only", "-DSTAMP=1u", str(kernel.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
