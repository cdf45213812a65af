"""The Triton programs run where there is no GPU: in Triton's interpreter, in a process of its own.

Whether it interprets is fixed when triton is imported, and a process that has imported triton cannot go back.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quant.kernels.test_programs import EVERY_TYPE
from tests.some import some

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(__file__).with_name("test_programs.py")
TESTS = 80
"""At least so many must have run there."""


@pytest.mark.slow
@pytest.mark.parametrize("every_type", [False, pytest.param(True, marks=pytest.mark.oracle)])
def test_the_programs_give_the_codecs_bits_in_the_interpreter(every_type: bool) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(PROGRAMS)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", **({EVERY_TYPE: "1"} if every_type else {})},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(some(passed)[1]) >= TESTS
