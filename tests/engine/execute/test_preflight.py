"""Source and target stay apart: whatever path leads there, what is read is never changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import transaxle as tx
from tests import checkpoints
from tests.engine.killed import contents
from transaxle.errors import UsageError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoints.tiny(tmp_path / "ck", shards=2)


def _link(path: Path, leads_to: Path) -> Path:
    path.symlink_to(leads_to)
    return path


TARGETS: dict[str, tuple[Callable[[Path], str | Path], str]] = {
    "itself": (lambda ck: ck, "itself"),
    "with dots": (lambda ck: ck / ".." / ck.name, "itself"),
    "as a URL": (lambda ck: f"file://{ck}", "itself"),
    "through a link": (lambda ck: _link(ck.with_name("link"), ck), "itself"),
    "inside": (lambda ck: ck / "sub", "inside the source"),
    "one file inside": (lambda ck: ck / "out.safetensors", "inside the source"),
    "around": (lambda ck: ck.parent, "would be deleted"),
}


@pytest.mark.parametrize("overwrite", [False, "everything"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_source_is_never_written_to(source: Path, name: str, overwrite: bool) -> None:
    make, said = TARGETS[name]
    target = make(source)
    before = contents(source.parent)
    with pytest.raises(UsageError, match=said) as caught:
        tx.convert(source, target, to="torchtitan", overwrite=overwrite, resume=not overwrite)
    assert caught.value.code == "EXISTS"
    assert contents(source.parent) == before


def test_one_file_is_not_replaced_by_what_is_made_of_it(source: Path, tmp_path: Path) -> None:
    one = checkpoints.tiny(tmp_path / "one") / "model.safetensors"
    before = one.read_bytes()
    linked = one.with_name("linked.safetensors")
    os.link(one, linked)
    for target in (one, linked, _link(tmp_path / "link.safetensors", one), one.parent):
        with pytest.raises(UsageError, match="the source") as caught:
            tx.convert(one, target, to="torchtitan", overwrite="everything")
        assert caught.value.code == "EXISTS"
    assert one.read_bytes() == before
    tx.convert(one, one.with_name("beside.safetensors"), to="torchtitan")


def test_a_folder_of_links_is_the_files_that_they_lead_to(source: Path, tmp_path: Path) -> None:
    """A snapshot of the hub's cache: the target holds what the links of the source lead to."""
    store = tmp_path / "cache" / "blobs"
    shutil.copytree(source, store)
    snapshot = tmp_path / "cache" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for file in store.iterdir():
        _link(snapshot / file.name, Path("../../blobs", file.name))
    before = contents(store)
    with pytest.raises(UsageError, match="a link to") as caught:
        tx.convert(snapshot, store, to="torchtitan", overwrite=True)
    assert caught.value.code == "EXISTS"
    assert contents(store) == before


def test_what_was_named_beside_the_source_is_not_deleted(source: Path, tmp_path: Path) -> None:
    """`--config out/config.json` with `--overwrite`: the file would go with the checkpoint that it lies in."""
    out = tmp_path / "out"
    tx.convert(source, out, to="torchtitan")
    before = contents(out)
    with pytest.raises(UsageError, match=r"the target contains .*config.json"):
        tx.convert(source, out, to="hf", config=out / "config.json", overwrite=True)
    assert contents(out) == before


@pytest.mark.parametrize(
    ("target", "said"), [("/ck", "itself"), ("/ck/sub", "inside the source"), ("", "would be deleted")]
)
def test_a_source_at_a_service_is_never_written_to(source: Path, tmp_path: Path, target: str, said: str) -> None:
    url = f"memory://{tmp_path.name}"
    tx.convert(source, f"{url}/ck", to="hf")
    with pytest.raises(UsageError, match=said):
        tx.convert(f"{url}/ck", f"{url}{target}", to="torchtitan", overwrite="everything")
    assert tx.diff(source, f"{url}/ck").equal
