"""Files that the user names beside a checkpoint: regular, short, and read as such, whatever stands under the name."""

from __future__ import annotations

import json
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import transaxle as tx
from tests import checkpoints
from tests.engine import demand_refusal
from transaxle.engine.checkpoint.settings import LONGEST_CONFIG, LONGEST_TABLE, settings
from transaxle.errors import Refused, StorageError, TransaxleError

TARGET = "model.layers.0.self_attn.q_proj.weight"
Read = Callable[[Path], object]


def as_rules(path: Path) -> object:
    return settings(rules=path).families["mine"].name


def as_config(path: Path) -> object:
    return settings(config=path).config


@pytest.fixture(params=[as_rules, as_config])
def read(request: pytest.FixtureRequest) -> Read:
    found: Read = request.param
    return found


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_special_files_are_refused(tmp_path: Path, kind: str, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = Path("special")
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(Refused, match=f"this is a {kind}, not a regular file") as caught:
        read(path)
    assert (caught.value.code, caught.value.where.file) == ("UNSUPPORTED", "special")
    assert caught.value.hint


def test_links_in_a_loop_and_missing_files_are_errors_of_the_machine(tmp_path: Path, read: Read) -> None:
    tmp_path.joinpath("loop").symlink_to("loop")
    for name in ("loop", "missing", "nul\0"):
        with pytest.raises(StorageError) as caught:
            read(tmp_path / name)
        assert caught.value.code == "IO"


@pytest.mark.parametrize(("read_it", "most"), [(as_rules, LONGEST_TABLE), (as_config, LONGEST_CONFIG)])
def test_endless_rules_and_configs_are_refused_in_bounded_memory(tmp_path: Path, read_it: Read, most: int) -> None:
    path = tmp_path / "long"
    path.touch()
    os.truncate(path, 40 * most)
    tracemalloc.start()
    try:
        with pytest.raises(TransaxleError, match=rf"longer than the {most:,} bytes") as caught:
            read_it(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.code == "CORRUPT"
    assert peak < 3 * most


def twice(file: Path, key: str, other: object) -> None:
    """Give a key of a JSON file a second value, after the one that it has."""
    text = file.read_text("utf-8").rstrip()
    assert f'"{key}"' in text
    file.write_text(f'{text[:-1]}, "{key}": {json.dumps(other)}}}', "utf-8")


FILES: dict[str, tuple[str, object, dict[str, Any]]] = {
    "config.json": ("num_attention_heads", 2, {"to": "megatron"}),
    "given.json": ("num_attention_heads", 2, {"to": "megatron", "config": "given.json"}),
    "hf_quant_config.json": ("quantization", {}, {"to": "megatron"}),
    "adapter/adapter_config.json": ("lora_alpha", 400, {"to": "hf", "merge": "adapter"}),
    "model.safetensors.index.json": ("weight_map", {}, {"to": "safetensors"}),
}
"""File -> a key in it, another value, and a conversion that reads it."""


@pytest.mark.parametrize("file", FILES)
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """A decoder keeps one of the two, and the next program the other."""
    monkeypatch.chdir(tmp_path)
    source = checkpoints.tiny(tmp_path / "source", shards=2)
    (tmp_path / "given.json").write_text(json.dumps(checkpoints.CONFIG), "utf-8")
    (source / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}', "utf-8")
    (tmp_path / "adapter").mkdir()
    rows, columns = checkpoints.shapes()[TARGET]
    factors = {"A": np.ones((2, columns), np.float32), "B": np.ones((rows, 2), np.float32)}
    named = {f"base_model.model.{TARGET[:-7]}.lora_{which}.weight": value for which, value in factors.items()}
    save_file(named, tmp_path / "adapter" / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [TARGET[:-7]]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(said), "utf-8")
    key, other, how = FILES[file]
    tx.convert("source", "before", sync=False, **how)
    path = tmp_path / file if (tmp_path / file).exists() else source / file
    twice(path, key, other)
    with demand_refusal("CORRUPT", "twice", Path(file).name):
        tx.convert("source", "out", sync=False, **how)
    assert not (tmp_path / "out").exists()
