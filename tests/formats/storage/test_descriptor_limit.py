"""Checkpoints of more files than a process may open."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

FILES = 300
CONVERT = """
import resource, sys
import transaxle as tx
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
source, target = sys.argv[2:]
tx.convert(source, target, to="safetensors:identity", shard_size=1, jobs=8)
assert tx.verify(target).ok
assert tx.diff(source, target).equal
"""


@pytest.mark.parametrize("limit", [64, 256])
def test_many_files_where_few_may_be_open(tmp_path: Path, limit: int) -> None:
    """256 is what macOS allows; each file of the source becomes a file of the target."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    values = {f"w.{number}": np.full((50, 40), number, np.int32) for number in range(FILES)}
    for name, value in values.items():
        save_file({name: value}, source / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in values}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    subprocess.run([sys.executable, "-c", CONVERT, str(limit), source, target], check=True)
    files = list(target.glob("*.safetensors"))
    assert len(files) == FILES
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert found.keys() == values.keys()
    assert all(np.array_equal(found[name], value) for name, value in values.items())
