"""Clients of the hub, as their users run them, against `tx.serve`: the files they get are those of `convert`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi, HfFileSystem, constants, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

import transaxle as tx
from tests.checkpoints import CONFIG, SIZES, WHOLE, tensors, write
from tests.engine import quantized
from tests.formats.hub_server import files_of
from transaxle import serving
from transaxle.formats.registry import MANIFEST
from transaxle.formats.store.hub import CLIENTS
from transaxle.serving import HubServer

NAME = "my-org/tiny"
LARGE = {**SIZES, "hidden_size": 256, "vocab_size": 4096}


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests go through the loopback, which the other tests' setting forbids too."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of torchtitan's names in DCP, with a config and a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("trained")
    source = write(folder / "hub", tensors(LARGE), config={**CONFIG, **LARGE})
    (source / "tokenizer_config.json").write_text('{"a": "é"}')
    tx.convert(source, folder / "step-100", to="dcp:torchtitan", sync=False)
    return folder / "step-100"


@pytest.fixture(scope="module")
def written(trained: Path) -> dict[str, bytes]:
    """What `convert` writes, without the manifest."""
    tx.convert(trained, trained.parent / "out", to="hf", shard_size="2MB", sync=False)
    written = files_of(trained.parent / "out")
    del written[MANIFEST]
    return written


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def hub(trained: Path, log: list[str]) -> Iterator[HubServer]:
    with tx.serve(trained, name=NAME, shard_size="2MB", log=log.append) as hub:
        yield hub


def run(hub: HubServer, cache: Path, *words: str) -> str:
    """Run a program of this environment with the hub's variables, and return what it prints."""
    environment = {**os.environ, **hub.environment, "HF_HOME": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hf_download(hub: HubServer, written: dict[str, bytes], tmp_path: Path) -> None:
    """With the program's defaults; a second download asks for no file."""
    hf = Path(sys.executable).with_name("hf")
    run(hub, tmp_path / "cache", str(hf), "download", NAME, "--local-dir", str(tmp_path / "local"))
    local = {name: data for name, data in files_of(tmp_path / "local").items() if not name.startswith(".cache/")}
    assert local == written
    for _ in range(2):
        run(hub, tmp_path / "cache", str(hf), "download", NAME)
    snapshot = tmp_path / "cache/hub/models--my-org--tiny/snapshots" / hub.commit
    assert files_of(snapshot) == written


def test_the_client_library(hub: HubServer, written: dict[str, bytes], tmp_path: Path) -> None:
    api = HfApi(endpoint=hub.url)
    assert sorted(api.list_repo_files(NAME)) == sorted(written)
    assert api.model_info(NAME, files_metadata=True).sha == hub.commit
    assert [each.path for each in api.get_paths_info(NAME, ["config.json", "nothing"])] == ["config.json"]
    assert {each.path for each in api.list_repo_tree(NAME, recursive=True)} == {*written}
    assert (api.file_exists(NAME, "config.json"), api.file_exists(NAME, "nothing")) == (True, False)
    assert (api.revision_exists(NAME, hub.commit), api.revision_exists(NAME, "v2")) == (True, False)
    assert (api.repo_exists(NAME), api.repo_exists("my-org/other")) == (True, False)
    assert [branch.name for branch in api.list_repo_refs(NAME).branches] == ["main"]
    for missing, call in (
        (EntryNotFoundError, lambda: api.hf_hub_download(NAME, "nothing", cache_dir=tmp_path)),
        (RevisionNotFoundError, lambda: api.model_info(NAME, revision="v2")),
        (RepositoryNotFoundError, lambda: api.model_info("my-org/other")),
    ):
        with pytest.raises(missing):
            call()
    system = HfFileSystem(endpoint=hub.url)
    shard = max(written, key=lambda name: len(written[name]))
    with system.open(f"{NAME}/{shard}", block_size=100_000) as file:
        file.seek(12_345)
        assert file.read(300_000) == written[shard][12_345:312_345]


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes after which the connection is cut, one for each following response that has more."""
    cuts: list[int] = []
    send = serving._Handler._send

    def cut(handler: Any, response: serving.Response, blocks: Iterator[memoryview]) -> int:
        def until(end: int) -> Iterator[memoryview]:
            for block in blocks:
                yield block[:end]
                end -= len(block)
                if end <= 0:
                    raise ConnectionResetError

        end = cuts.pop() if handler.command == "GET" and cuts and response.length > cuts[-1] else 0
        return send(handler, response, until(end) if end else blocks)

    monkeypatch.setattr(serving._Handler, "_send", cut)
    return cuts


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 28 MB."""
    values = np.random.default_rng(0).integers(0, 255, (28, 1 << 20), np.uint8)
    return write(tmp_path_factory.mktemp("large") / "ck", {f"layer.{n}": row for n, row in enumerate(values)})


def test_an_interrupted_download_resumes(large: Path, cuts: list[int], log: list[str], tmp_path: Path) -> None:
    """The client asks for the rest of the file. It keeps whole pieces of 10 MB of what it has got."""
    cuts += [12_000_000, 11_000_000]
    with tx.serve(large, "safetensors:identity", name=NAME, log=log.append) as hub:
        snapshot = snapshot_download(NAME, endpoint=hub.url, cache_dir=tmp_path / "cache")
        assert cuts == []
    assert (Path(snapshot) / WHOLE).read_bytes() == (large / WHOLE).read_bytes()
    parts = [line.split()[0] for line in log if line.split()[1] == "GET" and line.split()[2].endswith(WHOLE)]
    assert parts == ["200", "206", "206"]


def test_a_killed_client_resumes(large: Path, log: list[str], tmp_path: Path) -> None:
    """curl keeps the part of a file that it has got."""
    part = tmp_path / "part"
    with tx.serve(large, "safetensors:identity", name=NAME, log=log.append) as hub:
        words = ["curl", "-sSfL", "-C", "-", "-o", str(part), f"{hub.url}/{NAME}/resolve/main/{WHOLE}"]
        with subprocess.Popen([*words, "--limit-rate", "8M"]) as client:
            while not part.exists() or part.stat().st_size < 3_000_000:
                assert client.poll() is None
                time.sleep(0.01)
            client.kill()
        assert part.stat().st_size < 28_000_000
        subprocess.run(words, check=True, timeout=60)
    assert part.read_bytes() == (large / WHOLE).read_bytes()
    assert [line for line in log if line.startswith("206")]


def test_a_source_that_changes_is_an_error_for_clients(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    tx.convert(trained, copy, to="dcp:torchtitan", sync=False)
    with tx.serve(copy, name=NAME) as hub:
        HfApi(endpoint=hub.url).hf_hub_download(NAME, "config.json", cache_dir=tmp_path / "cache")
        chunk = max(copy.glob("*.distcp"), key=lambda path: path.stat().st_size)
        os.utime(chunk, (1, 1))
        with pytest.raises((HfHubHTTPError, OSError, ValueError)):
            snapshot_download(NAME, endpoint=hub.url, cache_dir=tmp_path / "cache", force_download=True)
        assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_token_for_clients(trained: Path, tmp_path: Path) -> None:
    with tx.serve(trained, name=NAME, host="0.0.0.0") as hub:
        url = f"http://127.0.0.1:{hub.url.rpartition(':')[2]}"
        for token in (False, "hf_" + "x" * 30):
            with pytest.raises((HfHubHTTPError, OSError)):
                snapshot_download(NAME, endpoint=url, cache_dir=tmp_path, token=token)
        snapshot = Path(snapshot_download(NAME, endpoint=url, cache_dir=tmp_path, token=hub.token))
        assert {*files_of(snapshot)} == {*hub.files}


_LOADED = """
import hashlib, json, sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
import torch
hashes = {name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
          for name, tensor in model.state_dict().items()}
print(json.dumps([type(model).__name__, str(model.dtype), hashes]))
"""


@pytest.mark.parametrize("kind", ["trained", "quantized"])
def test_transformers(kind: str, trained: Path, tmp_path: Path) -> None:
    """From a trainer's checkpoint, and from a quantized one that is decoded on the way."""
    options: dict[str, Any] = {}
    source = trained
    if kind == "quantized":
        made, config = quantized.llama(d=256, f=384, g=2, r=2, head=64, layers=1)
        source, options = quantized.store(tmp_path / "fp8", (made, config)), {"decode": "bf16"}
    tx.convert(source, tmp_path / "out", to="hf", **options, sync=False)
    with tx.serve(source, name=NAME, **options) as hub:
        served = run(hub, tmp_path / "cache", sys.executable, "-c", _LOADED, NAME)
        local = run(hub, tmp_path / "cache", sys.executable, "-c", _LOADED, str(tmp_path / "out"))
    assert json.loads(served) == json.loads(local)
    assert json.loads(served)[1] == "torch.bfloat16"


def test_transaxle_itself_reads_from_it(hub: HubServer, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `hf://`, as from any hub."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    CLIENTS.clear()
    try:
        with tx.open(f"hf://{NAME}") as there:
            assert there.path == f"hf://{NAME}@{hub.commit}"
            assert tx.verify(there, trained).ok
    finally:
        for client in CLIENTS.values():
            client.close()
        CLIENTS.clear()
