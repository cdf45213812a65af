"""Checkpoints in Google Cloud Storage, by way of an emulator: the same bytes, all of them or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.checkpoints import tiny
from tests.engine.killed import contents
from tests.formats.gcs_server import GoogleBucket
from tests.formats.store.test_upload import _KILLED, StopError, large, refused
from tests.formats.stores import upload

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # gcsfs sends parts so


def look_at(google: GoogleBucket, under: str = "out") -> dict[str, bytes]:
    return {name.removeprefix(f"{under}/"): google.get(name) for name in google.names()}


def test_a_checkpoint_there_and_back(google: GoogleBucket, tmp_path: Path) -> None:
    """A small file is sent in one request, a large one in parts; nothing appears before the commit."""
    seen: list[list[str]] = []
    local = large(tmp_path / "local")
    how: dict[str, Any] = {"to": "safetensors", "shard_size": 20 << 20}
    tx.convert(local, tmp_path / "wanted", **how)
    wanted = contents(tmp_path / "wanted")
    tx.convert(local, f"{google.url}/out", progress=lambda _: seen.append(google.names()), **how)
    assert seen
    assert all(names == [] for names in seen)
    assert look_at(google) == wanted
    assert tx.verify(f"{google.url}/out").ok
    tx.convert(f"{google.url}/out", tmp_path / "back", to="safetensors")
    assert tx.diff(local, tmp_path / "back").equal
    assert refused(lambda: tx.convert(local, f"{google.url}/out", **how)).code == "EXISTS"
    tx.convert(local, f"{google.url}/out", overwrite=True, **how)
    assert look_at(google) == wanted


def test_what_others_have_put_there_is_read(google: GoogleBucket, tmp_path: Path) -> None:
    local = tiny(tmp_path / "local", shards=3)
    url = upload(local, google, "ck")
    assert tx.diff(local, url).equal
    name = next(name for name in google.names() if name.endswith(".safetensors"))
    with tx.open(url) as there:
        data = bytearray(google.get(name))
        data[-1] ^= 1
        google.put(name, bytes(data))
        error = refused(lambda: tx.convert(there, tmp_path / "out", to="hf"))
    assert error.code == "CORRUPT"


def test_runs_that_fail_or_are_killed_leave_nothing_to_be_seen(google: GoogleBucket, tmp_path: Path) -> None:
    local, url = large(tmp_path / "local"), f"{google.url}/out"
    done = 0

    def stop(count: int) -> None:
        nonlocal done
        done += count
        if done > 20 << 20:
            raise StopError

    with pytest.raises(StopError):
        tx.convert(local, url, to="safetensors", progress=stop)
    assert google.names() == []
    command = [sys.executable, "-c", _KILLED, str(local), url]
    assert subprocess.run(command, check=False, timeout=300, env={**os.environ}).returncode == -9
    assert google.names() == []
    assert refused(lambda: tx.convert(local, url, to="safetensors", resume=True)).code == "UNSUPPORTED"
    assert refused(lambda: tx.convert(local, url, to="safetensors", on="ray")).code == "UNSUPPORTED"
    assert refused(lambda: tx.clean(url)).code == "UNSUPPORTED"
    tx.convert(local, url, to="safetensors")
    assert tx.diff(local, url).equal
