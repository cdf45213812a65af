"""Repositories of a hub, read: the same as on this machine, at one commit, and no more bytes than are wanted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import transaxle as tx
from tests.checkpoints import GATE, WHOLE, read, same, tensors, tiny, write
from tests.formats.hub_server import SIGNATURE, TOKEN, Hub, files_of
from tests.formats.refusals import refuses
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.distribute.work_plan import order, work_plan
from transaxle.engine.execute import preflight
from transaxle.engine.plan.conversion import make_plan
from transaxle.errors import TransaxleError
from transaxle.formats.store.reading import LEAST
from transaxle.formats.store.staging import storage_at

NAME = "owner/tiny-qwen3"


def refused(url: str) -> TransaxleError:
    with pytest.raises(TransaxleError) as caught:
        tx.open(url)
    return caught.value


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_in_a_hub(hub: Hub, tmp_path: Path, shards: int) -> None:
    local = tiny(tmp_path / "local", shards=shards)
    commit = hub.put(NAME, files_of(local))
    url = f"hf://{NAME}"
    held = read(local)
    with tx.open(url) as there, tx.open(local) as here:
        assert there.path == f"hf://{NAME}@{commit}"
        assert (there.format, there.family, there.dialect) == (here.format, here.family, here.dialect)
        assert all(there[name].tobytes() == held[name].tobytes() for name in held)
    assert tx.verify(url).ok
    assert tx.diff(local, url).equal
    report = tx.convert(url, tmp_path / "out", to="torchtitan")
    assert report.as_json()["source"] == f"hf://{NAME}@{commit}"
    tx.convert(local, tmp_path / "expected", to="torchtitan")
    written, expected = files_of(tmp_path / "out"), files_of(tmp_path / "expected")
    assert written.keys() == expected.keys()
    assert all(written[name] == expected[name] for name in written if name != "transaxle.json")
    manifest, plain = (json.loads(files["transaxle.json"]) for files in (written, expected))
    assert (manifest.pop("source"), "source" in plain) == (f"hf://{NAME}@{commit}", False)
    assert {**manifest, "checksum": ""} == {**plain, "checksum": ""}
    assert tx.verify(tmp_path / "out").ok
    tx.convert(url, tmp_path / "out", to="torchtitan", resume=True)  # it is finished
    hub.put(NAME, files_of(local) | {"README.md": b"#"})
    with pytest.raises(TransaxleError, match="EXISTS"):
        tx.convert(url, tmp_path / "out", to="torchtitan", resume=True)


def test_revisions_folders_and_files(hub: Hub, tmp_path: Path) -> None:
    local = tiny(tmp_path / "local")
    files = files_of(local)
    first = hub.put(NAME, {f"a folder/x@1/{name}": data for name, data in files.items()}, "v1.0")
    second = hub.put(NAME, files, "feature/x")
    third = hub.put(NAME, files | {"README.md": b"#"}, "refs/pr/3")
    of_data = hub.put(NAME, files, kind="datasets")
    for typed, path in {
        "@v1.0/a folder/x@1": f"@{first}/a folder/x@1",
        f"@{first}/a folder/x@1/": f"@{first}/a folder/x@1",
        f"@v1.0/a folder/x@1/{WHOLE}": f"@{first}/a folder/x@1/{WHOLE}",
        "@feature%2Fx": f"@{second}",
        "@refs/pr/3": f"@{third}",
        f"@refs/pr/3/{WHOLE}": f"@{third}/{WHOLE}",
    }.items():
        with tx.open(f"hf://{NAME}{typed}", family="qwen3_moe") as there:
            assert there.path == f"hf://{NAME}{path}"
            assert there[GATE].tobytes() == read(local)[GATE].tobytes()
        with tx.open(there.path, family="qwen3_moe") as again:
            assert again.path == there.path
    with tx.open(f"hf://datasets/{NAME}") as there:
        assert there.path == f"hf://datasets/{NAME}@{of_data}"
    with tx.open(f"hf://models/{NAME}@feature%2Fx") as there:
        assert there.path == f"hf://{NAME}@{second}"


def test_a_step_in_a_repository(hub: Hub, tmp_path: Path) -> None:
    """It is read at the commit of the repository, and so is the config of the repository."""
    files = files_of(tiny(tmp_path / "local"))
    config = files.pop("config.json")
    steps = {f"checkpoint-500/{name}": data for name, data in files.items()}
    commit = hub.put(NAME, {**steps, "config.json": config})
    for given in (f"hf://{NAME}", f"hf://{NAME}/checkpoint-500"):
        with tx.open(given) as there:
            assert there.path == f"hf://{NAME}@{commit}/checkpoint-500"
            assert there.container.config_path == f"hf://{NAME}@{commit}/config.json"
            assert there.config == json.loads(config)


def test_a_list_of_several_pages(hub: Hub, tmp_path: Path) -> None:
    local = tiny(tmp_path / "local", shards=7)
    hub.put(NAME, files_of(local))
    hub.page = 2
    assert storage_at(f"hf://{NAME}").names() == tuple(sorted(files_of(local)))
    assert tx.diff(local, f"hf://{NAME}").equal


def test_a_branch_that_moves(hub: Hub, tmp_path: Path) -> None:
    """Also between the first request and the second: from the first on everything is asked for at the commit."""
    local = tiny(tmp_path / "local")
    first = hub.put(NAME, files_of(local))
    other = write(tmp_path / "other", {name: -array for name, array in tensors().items()})

    def move(handler: object) -> bool:
        if len(hub.seen) == 2:
            hub.put(NAME, files_of(other))
        return False

    hub.meddle = move
    with tx.open(f"hf://{NAME}") as there:
        assert there.path == f"hf://{NAME}@{first}"
        tx.convert(there, tmp_path / "out", to="hf")
        there.container.storage.recheck()
    assert same(local, tmp_path / "out")
    with tx.open(f"hf://{NAME}", family="qwen3_moe") as there:
        assert there.path != f"hf://{NAME}@{first}"
        assert there[GATE].tobytes() == read(other)[GATE].tobytes()
    assert tx.diff(local, f"hf://{NAME}@{first}").equal


def test_workers_read_the_commit_that_was_planned(hub: Hub, tmp_path: Path) -> None:
    commit = hub.put(NAME, files_of(tiny(tmp_path / "local")))
    target = str(tmp_path / "out")
    asked = order(f"hf://{NAME}", target, "torchtitan", {}, {})
    with open_checkpoint(f"hf://{NAME}") as source:
        plan = work_plan(asked, preflight(make_plan(source, "torchtitan", target=target), target), 2)
    hub.put(NAME, files_of(write(tmp_path / "other", {"w": np.ones(4, np.float32)})))
    assert plan.order.source == f"hf://{NAME}@{commit}"
    with plan.order.prepare() as prepared:
        assert prepared.checkpoint.path == plan.order.source
        assert not prepared.plan.refusals


def test_few_bytes_and_few_requests(hub: Hub, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    held = {f"block.{at}.w": random.standard_normal((128, 1024), np.float32) for at in range(48)}
    local = write(tmp_path / "local", held, shards=3)
    hub.put(NAME, files_of(local))
    total = sum(array.nbytes for array in held.values())
    with tx.open(f"hf://{NAME}") as there:
        assert len(there) == 48
        # A revision, a list; of the index and of each file's header an address and a range; the index is redirected.
        assert len(hub.seen) <= 2 + 4 * 2 + 1
        assert hub.sent <= 5 * LEAST < total / 20
        before = hub.sent
        assert there["block.20.w"].tobytes() == held["block.20.w"].tobytes()
        assert hub.sent - before <= held["block.20.w"].nbytes + LEAST
        hub.seen.clear()
        there["block.40.w"].read((slice(10, 20), slice(0, 1024)))
        assert hub.sent <= 10 * 4096 + LEAST
        assert [each.host for each in hub.seen] == ["large"]  # its address is known
    hub.seen.clear()
    tx.convert(f"hf://{NAME}", tmp_path / "out", to="safetensors", jobs=4)
    assert same(local, tmp_path / "out")
    assert hub.sent <= 1.5 * total
    assert all("range" in each.headers for each in hub.asked("large"))
    assert len(hub.asked("hub", "HEAD")) <= 3 * 4 + 1


def test_signatures_that_expire(hub: Hub, tmp_path: Path) -> None:
    local = tiny(tmp_path / "local")
    hub.put(NAME, files_of(local))
    with tx.open(f"hf://{NAME}") as there:
        there.container.storage._ahead.clear()  # type: ignore[attr-defined]
        for generation in (1, 2):
            hub.generation = generation
            there.container.storage._ahead.clear()  # type: ignore[attr-defined]
            assert there[GATE].tobytes() == read(local)[GATE].tobytes()


@pytest.mark.parametrize("place", ["environment", "file", "nowhere", "forbidden"])
def test_the_token_is_for_the_hub_alone(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    from huggingface_hub import constants

    local = tiny(tmp_path / "local")
    hub.put(NAME, files_of(local))
    hub.repositories[f"models/{NAME}"].private = place in ("environment", "file")
    if place == "file":
        (tmp_path / "login").write_text(f"{TOKEN}\n")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "login"))
    elif place != "nowhere":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", place == "forbidden")
    report = tx.convert(f"hf://{NAME}", tmp_path / "out", to="torchtitan")
    said = {each.headers.get("authorization") for each in hub.asked("hub")}
    assert said == ({f"Bearer {TOKEN}"} if place in ("environment", "file") else {None})
    assert hub.asked("large")
    assert not any("authorization" in each.headers for each in hub.asked("large"))
    written = b"".join(files_of(tmp_path / "out").values())
    for secret in (TOKEN, SIGNATURE):
        assert secret.encode() not in written
        assert secret not in json.dumps(report.as_json())


def test_the_program_finds_hub_and_login_in_the_environment(hub: Hub, tmp_path: Path) -> None:
    commit, url = hub.put(NAME, files_of(tiny(tmp_path / "local"))), f"hf://{NAME}"
    hub.repositories[f"models/{NAME}"].private = True
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN)
    environment = {name: text for name, text in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "transaxle", *arguments],
            env=environment | more, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False,
        )  # fmt: skip

    to = ["--to", "torchtitan"]
    for arguments in (["info", url], ["ls", url], ["plan", url, "out", *to, "--json"], ["info", url, "--json"]):
        ran = run(*arguments)
        assert ran.returncode == 0, ran.stderr
        assert commit in ran.stdout or arguments[0] == "ls"
        assert TOKEN not in ran.stdout + ran.stderr
    for arguments in (["convert", url, "out", *to], ["info", "out"]):
        ran = run(*arguments)
        assert (ran.returncode, f"{url}@{commit}" in ran.stdout) == (0, True)
    ran = run("info", url, HF_HUB_OFFLINE="1")
    assert (ran.returncode, "HF_HUB_OFFLINE" in ran.stderr) == (3, True)


def test_nothing_is_written_to_a_hub(hub: Hub, tmp_path: Path) -> None:
    with refuses("UNSUPPORTED", hint="hf upload", exit_code=3):
        tx.convert(tiny(tmp_path / "local"), f"hf://{NAME}", to="torchtitan")
    assert hub.seen == []


NO_REPOSITORIES = (
    "", "gpt2", "owner/", "owner/name@", "owner/name@/x", "datasets/name", "buckets/owner/name", "../name", "owner/..",
    "owner/na me", "owner/name\udcff",
)  # fmt: skip
OUTSIDE = ("owner/name/../../other/x", "owner/name@main/a//b")


@pytest.mark.parametrize("name", [*NO_REPOSITORIES, *OUTSIDE])
def test_urls_that_name_no_repository(hub: Hub, name: str) -> None:
    error = refused(f"hf://{name}")
    code = "PATH_ESCAPE" if name in OUTSIDE else "UNSUPPORTED"
    assert (error.code, bool(error.hint), hub.seen) == (code, True, [])


def test_what_is_not_there(hub: Hub, tmp_path: Path) -> None:
    hub.put(NAME, {f"tiny-model/{name}": data for name, data in files_of(tiny(tmp_path / "local")).items()})
    hub.put(NAME, {}, "empty")
    error = refused(f"hf://{NAME}/tiny-modle")
    assert (error.code, "tiny-model?" in error.hint) == ("IO", True)
    assert "tiny-model" in refused(f"hf://{NAME}/tiny-modle/").hint
    assert "config.json" in refused(f"hf://{NAME}/tiny-model/config.jsn").hint
    assert refused(f"hf://{NAME}").code == "UNSUPPORTED"
    assert refused(f"hf://{NAME}@empty").code in ("IO", "UNSUPPORTED")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refuses("UNSUPPORTED", hint="'httpx>=0.27' 'huggingface-hub>=0.30'"):
        tx.open(f"hf://{NAME}")


def test_without_the_network() -> None:
    """As the tests are all run, but for those that have a hub of their own."""
    pytest.importorskip("huggingface_hub")
    with refuses("UNSUPPORTED", "HF_HUB_OFFLINE"):
        tx.open(f"hf://{NAME}")
