"""Verification: no bit of what we wrote may change without being noticed, and of two checkpoints it is said which."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import transaxle as tx
from tests import checkpoints
from tests.checkpoints import write
from tests.corpus.deepspeed import MODEL, run
from tests.engine.killed import contents
from transaxle.engine.checkpoint.manifest import IN_SPANS, SCHEMA, decode, encode
from transaxle.engine.verification import Verification, open_pair, verify
from transaxle.errors import TransaxleError
from transaxle.move import journal

SIZES = {**checkpoints.SIZES, "num_hidden_layers": 1, "num_experts": 2}
CONFIG = {**checkpoints.CONFIG, **SIZES}
MANIFEST = "transaxle.json"
SHARD_SIZE = 3000


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion in several shards, with an index, a config and another file beside them."""
    folder = tmp_path_factory.mktemp("verify")
    source = checkpoints.write(folder / "source", checkpoints.tensors(SIZES), config=CONFIG)
    (source / "notes.txt").write_text("carried")
    tx.convert(source, folder / "out", to="automodel", shard_size=SHARD_SIZE)
    return folder / "out"


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "copy")
    return tmp_path / "copy"


def verified(folder: Path) -> Verification:
    with tx.open(folder) as checkpoint:
        return verify(checkpoint)


def well(folder: Path) -> bool:
    """False also where it cannot even be opened."""
    try:
        return verified(folder).ok
    except tx.TransaxleError as error:
        if error.exit_code not in {2, 3}:
            raise
        return False


Damage = Callable[[Path], object]


def _swap(folder: Path) -> None:
    """Two tensors of one shape and type change places."""
    with tx.open(folder) as checkpoint:
        one, two = (t.transfers()[0] for t in checkpoint.values() if t.shape == (checkpoints.SIZES["head_dim"],))
    data = bytearray((folder / one.file).read_bytes())
    a, b = (slice(t.source, t.source + t.width) for t in (one, two))
    data[a], data[b] = data[b], data[a]
    (folder / one.file).write_bytes(bytes(data))


DAMAGES: dict[str, Damage] = {
    "shard gone": lambda folder: next(folder.glob("model-00001*")).unlink(),
    "index gone": lambda folder: (folder / checkpoints.INDEX).unlink(),
    "notes gone": lambda folder: (folder / "notes.txt").unlink(),
    "shard cut": lambda folder: os.truncate(next(folder.glob("model-00001*")), 900),
    "shard longer": lambda folder: next(folder.glob("model-00001*")).open("ab").write(b"x"),
    "shard replaced": lambda folder: shutil.copy(*sorted(folder.glob("model-*.safetensors"))[:2]),
    "tensors swapped": _swap,
    "manifest of another": lambda folder: (folder / MANIFEST).write_text("{}"),
    "manifest not UTF-8": lambda folder: (folder / MANIFEST).write_bytes(b'{"transaxle": "\xff"}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_other_damage_is_noticed(copy: Path, damage: str) -> None:
    DAMAGES[damage](copy)
    assert not well(copy)


def test_all_problems_are_listed_with_their_places(copy: Path) -> None:
    with tx.open(copy) as checkpoint:
        names = list(checkpoint)[:3]
        places = [checkpoint[name].transfers()[0] for name in names]
    for place in places:
        with (copy / place.file).open("r+b") as file:
            file.seek(place.source)
            byte = file.read(1)
            file.seek(place.source)
            file.write(bytes([byte[0] ^ 4]))
    (copy / "notes.txt").write_text("changed")
    (copy / "config.json").unlink()
    found = verified(copy)
    assert [problem.where.tensor for problem in found.problems if problem.where.tensor] == names
    assert {(p.code, p.where.file) for p in found.problems if p.where.file} == {
        *(("CORRUPT", place.file) for place in places),
        ("CORRUPT", "notes.txt"),
        ("INCOMPLETE", "config.json"),
    }


def test_tensors_that_the_manifest_does_not_know(copy: Path) -> None:
    """The files and the manifest of two different checkpoints, each of them intact."""
    manifest = decode((copy / MANIFEST).read_bytes())
    tensors = dict(manifest.tensors)
    gone = tensors.pop("lm_head.weight")
    tensors["invented"] = gone
    text = encode(
        type(manifest)(**{f: getattr(manifest, f) for f in manifest.__struct_fields__} | {"tensors": tensors})
    )
    (copy / MANIFEST).write_bytes(text)
    found = verified(copy)
    assert {(p.code, p.where.tensor) for p in found.problems} == {
        ("MISSING_TENSOR", "invented"),
        ("UNEXPECTED_TENSOR", "lm_head.weight"),
    }


def test_a_manifest_that_lies_about_a_header(copy: Path) -> None:
    text = (copy / MANIFEST).read_bytes()
    manifest = decode(text)
    file = next(name for name in manifest.files if name.endswith(".safetensors"))
    for head in (-1, 1 << 60):
        record = type(manifest.files[file])(manifest.files[file].size, head, manifest.files[file].xxh3)
        fields = {f: getattr(manifest, f) for f in manifest.__struct_fields__}
        changed = type(manifest)(**fields | {"files": {**manifest.files, file: record}})
        (copy / MANIFEST).write_bytes(encode(changed))
        assert [problem.code for problem in verified(copy).problems] == ["CORRUPT"]
        with tx.open(copy) as checkpoint:
            assert checkpoint.manifest is None


def test_a_manifest_of_a_later_version_is_not_called_corrupt(copy: Path) -> None:
    manifest = json.loads((copy / MANIFEST).read_bytes())
    (copy / MANIFEST).write_text(json.dumps({**manifest, "transaxle": SCHEMA + 1, "more": []}))
    with pytest.raises(tx.TransaxleError, match="UNSUPPORTED"):
        verified(copy)


def test_large_tensors_were_once_hashed_whole(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests in one file, of which nothing says how they were made, as in manifests of version 1."""
    name = "out.safetensors"
    tx.convert(written, tmp_path / name, to="identity")
    monkeypatch.setattr(journal, "SPAN", 64)
    assert verified(tmp_path / name).ok
    largest = max(tx.open(tmp_path / name).values(), key=lambda tensor: tensor.nbytes).transfers()[0]
    with (tmp_path / name).open("r+b") as file:
        file.seek(largest.source + largest.size - 1)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))
    assert len(verified(tmp_path / name).problems) == 1


def test_manifests_say_how_tensors_are_hashed(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SPAN", 64)
    tx.convert(written, tmp_path / "out", to="identity")
    assert decode((tmp_path / "out" / MANIFEST).read_bytes()).transaxle == IN_SPANS
    assert verified(tmp_path / "out").ok
    monkeypatch.undo()
    assert not verified(tmp_path / "out").ok
    assert decode((written / MANIFEST).read_bytes()).transaxle == 1


def test_the_manifest_is_the_same_text_each_time(written: Path, tmp_path: Path) -> None:
    """It tells what the checkpoint is, not when or where it was made."""
    tx.convert(written, tmp_path / "a", to="hf", shard_size=SHARD_SIZE)
    shutil.copytree(written, tmp_path / "elsewhere")
    tx.convert(tmp_path / "elsewhere", tmp_path / "b", to="hf", shard_size=SHARD_SIZE, jobs=3)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    text = (tmp_path / "a" / MANIFEST).read_bytes()
    assert encode(decode(text)) == text
    assert str(tmp_path).encode() not in text


def test_the_truth_of_what_is_found_is_the_verdict(tmp_path: Path, copy: Path) -> None:
    """`if tx.verify(a, b)` must never be taken where they differ; any object without a truth of its own is true."""
    other = checkpoints.write(tmp_path / "other", checkpoints.tensors(SIZES), config=CONFIG)
    assert tx.verify(copy)
    assert tx.verify(copy, other)
    assert tx.diff(copy, other)
    changed = checkpoints.tensors(SIZES)
    name = "model.norm.weight"
    changed[name] = changed[name] + 1
    other = checkpoints.write(tmp_path / "changed", changed, config=CONFIG)
    found = tx.verify(copy, other)
    assert not found
    assert not tx.diff(copy, other)
    assert (found.ok, found.equal, [each.name for each in found.differences]) == (False, False, [name])
    shard = next(copy.glob("model-00001*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    alone = tx.verify(copy)
    assert not alone
    assert (alone.ok, alone.equal, alone.comparison) == (False, False, None)


# Two checkpoints opened together: what is wrong with one of them is said with its path.

FILE = "model.safetensors"


@pytest.mark.parametrize("inside", ["", FILE])
@pytest.mark.parametrize("damaged", ["one", "other"])
def test_a_damaged_file_is_told_from_its_namesake(inside: str, damaged: str, tmp_path: Path) -> None:
    for name in ("one", "other"):
        write(tmp_path / name, {"a": np.zeros(3, np.float32)})
    content = (tmp_path / damaged / FILE).read_bytes()
    (tmp_path / damaged / FILE).write_bytes(content[:20])
    with pytest.raises(TransaxleError) as caught:
        open_pair(tmp_path / "one" / inside, tmp_path / "other" / inside, {}).__enter__()
    assert [refusal.where.file for refusal in caught.value.refusals] == [str(tmp_path / damaged / FILE)]


def test_other_files_keep_their_names(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write(tmp_path / name, {"a": np.zeros(3, np.float32)})
    with pytest.raises(TransaxleError) as caught, open_pair(tmp_path / "one", tmp_path / "absent", {}):
        pass
    assert caught.value.refusals[0].where.file == str(tmp_path / "absent")
    (tmp_path / "mine.rules").write_text("famly x\n")
    with (
        pytest.raises(TransaxleError) as caught,
        open_pair(tmp_path / "one", tmp_path / "other", {"rules": tmp_path / "mine.rules"}),
    ):
        pass
    assert caught.value.refusals[0].where.file == f"{tmp_path / 'mine.rules'}, line 1"


def test_one_of_the_two_may_store_its_weights_once(tmp_path: Path) -> None:
    """What DeepSpeed trained in low precision, beside a file of it, in either order."""
    step = run(tmp_path / "run")
    low = torch.load(step / MODEL, weights_only=False)["module"]
    file = tmp_path / FILE
    save_file(dict(low), file)
    for pair in ((step, file), (file, step)):
        assert tx.diff(*pair, weights="lp", optimizer=False)
        assert not tx.diff(*pair, weights="fp32", optimizer=False)
        assert not tx.diff(*pair, average=True, optimizer=False)
    for chosen in ({"weights": "lp"}, {"average": True}):
        with pytest.raises(TransaxleError, match="both store their weights once"):
            tx.diff(file, file, **chosen)
        with pytest.raises(TransaxleError, match="stores its weights once"):
            tx.open(file, **chosen)
