"""Checkpoints in odd places and with odd names, from one end to the other: read where they are, names only names."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import transaxle as tx
from tests.checkpoints import GATE, INDEX, WHOLE, Tensors, read, same, tiny, write
from tests.formats.refusals import refuses
from transaxle.errors import TransaxleError
from transaxle.formats.registry import writable

CONFIG = "config.json"
FOLDERS = "deepspeed-universal"
"""The one format in which a tensor is a folder of its name."""
ENGINE = "vllm_sharded"
"""The one format that has only names of its own."""
NAMES = (
    "../../escaped", "/etc/passwd", "..", ".", "a/b/c", "a\\..\\b", "~/x", "C:\\x", "sub/", "größe", "重み.模型",
    "e\u0301", "\U0001f600", "a b", "with\nline", "tab\t", "\x1b[31mred", "\u202eright", "nul", "x" * 200, "*?[a]",
    "{l}", "%2e%2e%2f", "-rf", "$(x)", "'", '"',
)  # fmt: skip
"""Names of tensors; none of them is anything but a name."""


def tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below a folder: names, kinds, sizes, times of change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        found[str(path.relative_to(folder))] = (stat.st_mode, stat.st_size, stat.st_mtime_ns)
    return found


@pytest.fixture(params=[1, 3])
def hub(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The tiny model as huggingface_hub keeps it: a snapshot of links to blobs that are named by their hash."""
    local = tiny(tmp_path / "local", shards=request.param)
    repository = tmp_path / "hub" / "models--a--b"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0a1b2c"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in local.iterdir():
        name = hashlib.sha256(path.read_bytes()).hexdigest()
        (blobs / name).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def test_a_hub_cache(hub: Path, tmp_path: Path) -> None:
    local, before = tmp_path / "local", tree(tmp_path / "hub")
    member = INDEX if (hub / INDEX).exists() else WHOLE
    for path in (hub, hub / member):
        with tx.open(path) as there:
            assert (there.family, there.dialect) == ("qwen3_moe", "hf")
            assert there[GATE].tobytes() == read(local)[GATE].tobytes()
            assert there.container.carried == (CONFIG,)
            assert not [name for name in there.container.ignored if "blobs" in name]
    assert tx.verify(hub).ok
    assert tx.diff(hub, local).equal
    tx.convert(hub, tmp_path / "out", to="torchtitan")
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_symlink()]
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf")
    assert same(local, tmp_path / "back")
    assert tree(tmp_path / "hub") == before


def test_a_hub_cache_with_a_missing_blob(hub: Path) -> None:
    member = next(path for path in sorted(hub.iterdir()) if path.name.endswith(".safetensors"))
    member.resolve().unlink()
    with refuses("IO", file=member.name):
        tx.open(hub)


_WATCHED = """
import os, sys
from pathlib import Path

folder, out = Path(sys.argv[1]), sys.argv[2]
CHANGES = ("os.", "shutil.", "tempfile.")
LOOKS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr", "os.putenv", "os.unsetenv")

def watch(event, args):
    if event == "open":
        path, mode, flags = args
        changes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
    else:
        changes = event.startswith(CHANGES) and event not in LOOKS
    if changes and any(isinstance(arg, str | bytes | os.PathLike) and folder in Path(os.fsdecode(arg)).parents
                       for arg in args):
        raise AssertionError(f"{event} {args}")

sys.addaudithook(watch)
import transaxle as tx
from transaxle.cli.command import run

for command in (["ls"], ["info"], ["verify"], ["plan", "x", "--to", "torchtitan"]):
    assert run([command[0], str(folder), *command[1:]]) == 0, command
assert tx.diff(folder, folder).equal
tx.convert(folder, out, to="hf")
try:
    tx.convert(out, folder / "inside", to="hf")
except AssertionError:
    pass
else:
    raise SystemExit("the watch saw nothing")
"""


def test_a_read_only_place(tmp_path: Path) -> None:
    """Reading writes nothing there, not even for a moment; the permissions are for whoever is not root."""
    tx.convert(tiny(tmp_path / "local"), tmp_path / "held", to="torchtitan", shard_size=10_000)
    folder, out = tmp_path / "held", tmp_path / "out"
    before = tree(folder)
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        before = tree(folder)
        command = [sys.executable, "-c", _WATCHED, str(folder), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        assert tree(folder) == before
    finally:
        folder.chmod(0o755)
    assert same(tmp_path / "local", out)


def test_a_target_on_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tiny(tmp_path / "local")

    def read_only(path: object, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "mkdir", read_only)
    with refuses("IO", exit_code=4, hint="read-only"):
        tx.convert(local, tmp_path / "out", to="hf")


@pytest.mark.oracle
@pytest.mark.parametrize("form", sorted({*writable()} - {FOLDERS, ENGINE}))
def test_names_of_tensors_are_never_paths(tmp_path: Path, form: str) -> None:
    held: Tensors = {name: np.arange(i, i + 6, dtype=np.float32).reshape(2, 3) for i, name in enumerate(NAMES)}
    held |= {"": np.ones(2, np.float32)} if form == "safetensors" else {}
    inner = tmp_path / "a" / "b"
    local = write(inner / "local", held)
    before = tree(tmp_path)
    tx.convert(local, inner / "out", to=f"{form}:identity", shard_size=100 if form == "safetensors" else 1 << 30)
    with tx.open(inner / "out") as there:
        assert {name: there[name].tobytes() for name in there} == {name: held[name].tobytes() for name in held}
    assert tx.verify(inner / "out").ok
    assert tx.diff(local, inner / "out").equal
    after = tree(tmp_path)
    new = {name for name in after.keys() - before.keys() if not name.startswith("a/b/out")}
    assert new == set()
    assert {name: after[name] for name in before if name != "a/b"} == {
        name: before[name] for name in before if name != "a/b"
    }


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_a_format_whose_names_are_folders(tmp_path: Path, name: str) -> None:
    """It holds a name inside its folder, or refuses it."""
    inner = tmp_path / "a" / "b"
    local = write(inner / "local", {name: np.ones((2, 3), np.float32)})
    before = tree(tmp_path)
    try:
        tx.convert(local, inner / "out", to=FOLDERS)
    except TransaxleError as error:
        assert error.code in ("PATH_ESCAPE", "UNSUPPORTED")  # noqa: PT017
        assert not (inner / "out").exists()
    else:
        assert tx.diff(local, inner / "out").equal
    assert {name for name in tree(tmp_path).keys() - before.keys() if not name.startswith("a/b/out")} == set()


@pytest.mark.oracle
@pytest.mark.parametrize(
    "name", ["größe", "模型 1", "e\u0301", "a\nb", "-rf", "s3:", "$(x)", "%2e%2e", ".hidden", "a\\b"]
)
def test_names_of_folders_and_files(tmp_path: Path, name: str) -> None:
    local = tiny(tmp_path / name / "model", shards=3)
    (local / f"{name}.json").write_text("{}")
    os.chdir(tmp_path / name)
    tx.convert("model", name, to="torchtitan", shard_size=10_000)
    assert tx.diff("model", name).equal
    assert tx.verify(name).ok
    assert (Path(name) / f"{name}.json").exists() == (not name.startswith("."))
    save_file(read(local), local / f"{name}.safetensors")
    with tx.open(local / f"{name}.safetensors") as there:
        assert there[GATE].tobytes() == read(local)[GATE].tobytes()
