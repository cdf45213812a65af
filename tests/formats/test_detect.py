"""Which checkpoint a folder holds: the fixed order, and the cases that are the user's to decide."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.formats.files import FILE, INDEX, info, made, names_in, open_files
from tests.formats.refusals import refuses
from transaxle.errors import Code, TransaxleError, UsageError
from transaxle.formats.detect import open_container
from transaxle.formats.registry import SCRATCH, builtin

ONE = made({"a": info("F32", [1], 0, 4)}, bytes(4))
SHARD = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"
FOLDER = "/"


def fill(folder: Path, names: Iterable[str]) -> None:
    """Create files and folders; those of safetensors are valid, `latest` names a folder."""
    for name in names:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(FOLDER):
            place.mkdir(exist_ok=True)
        elif name.endswith(".safetensors"):
            place.write_bytes(ONE)
        elif name.endswith(".safetensors.index.json"):
            place.with_name(SHARD).write_bytes(ONE)
            place.write_text(json.dumps({"weight_map": {"a": SHARD}}))
        else:
            place.write_text("global_step2\n" if place.name == "latest" else "{}")


@pytest.mark.parametrize("name", ["", FILE, "transaxle.json"], ids=["folder", "file", "manifest"])
def test_what_a_killed_run_left_is_not_opened(tmp_path: Path, name: str) -> None:
    """Its headers are whole and its data may be zeros, so nothing else would tell."""
    partial = tmp_path / ".out.transaxle-partial"
    fill(partial, [FILE, "transaxle.json"])
    open_container(str(partial / name if name == FILE else partial)).storage.close()
    (partial / SCRATCH).mkdir()
    with refuses("INCOMPLETE", "--resume"):
        open_container(str(partial / name))
    with pytest.raises(TransaxleError) as around:
        open_container(str(tmp_path))
    assert "There is one in" not in str(around.value)


OPENED = {
    "an index": ([INDEX], INDEX),
    "an index of diffusers": (["diffusion_pytorch_model.safetensors.index.json"], SHARD),
    "an index before another file": ([INDEX, "consolidated.safetensors"], INDEX),
    "an index before torch": ([INDEX, "pytorch_model.bin.index.json", "pytorch_model.bin"], INDEX),
    "a whole file": ([FILE], FILE),
    "a whole file before others": ([FILE, "adapter.safetensors", "pytorch_model.bin"], FILE),
    "a whole file before an index of torch": ([FILE, "pytorch_model.bin.index.json"], FILE),
    "one file of any name": (["adapter_model.safetensors"], "adapter_model.safetensors"),
    "beside what a trainer keeps": (["adapter_model.safetensors", "training_args.bin", "optimizer.pt",
        "rng_state_0.pth", "scheduler.pt"], "adapter_model.safetensors"),
    "with a manifest": ([FILE, "transaxle.json"], FILE),
    "latest without a folder": ([FILE, "latest"], FILE),
    "latest that names no folder": ([FILE, "latest", "logs/"], FILE),
}  # fmt: skip


@pytest.mark.parametrize(("names", "member"), OPENED.values(), ids=OPENED.keys())
def test_what_is_opened(tmp_path: Path, names: list[str], member: str) -> None:
    fill(tmp_path, names)
    container = open_container(str(tmp_path))
    assert member in container.files
    assert container.format == "safetensors"
    listed = {*container.files, *container.carried, *container.ignored, "transaxle.json"}
    assert {name.rstrip(FOLDER) for name in listed} >= set(names_in(tmp_path))


REFUSED: dict[str, tuple[list[str], Code, str]] = {
    "empty": ([], "UNSUPPORTED", "nothing"),
    "nothing that is read": (["notes.txt"], "UNSUPPORTED", "these are read: torch_dist"),
    "no tensors": (["README.md", "logs/"], "UNSUPPORTED", "README.md, logs/"),
    "only a manifest": (["transaxle.json"], "UNSUPPORTED", "no checkpoint"),
    "DCP": ([".metadata", "__0_0.distcp"], "CORRUPT", "pickle"),
    "DCP before others": ([".metadata", FILE, INDEX, "latest", "global_step2/"], "CORRUPT", ".metadata"),
    "DCP of every rank": (["__0.metadata", "__1.metadata"], "CORRUPT", "__0.metadata"),
    "DCP in safetensors": (["shard-00001-model-00001-of-00002.safetensors"], "CORRUPT", "DCP_SHARDING_INFO"),
    "DeepSpeed": (["latest", "global_step2/"], "INCOMPLETE", "_model_states.pt"),
    "DeepSpeed of several steps": (["latest", "global_step1/", "global_step2/"], "INCOMPLETE", "_model_states.pt"),
    "DeepSpeed without latest": (["global_step10/"], "INCOMPLETE", "_model_states.pt"),
    "DeepSpeed before others": (["global_step2/", FILE], "INCOMPLETE", "_model_states.pt"),
    "an index and a whole file": ([INDEX, FILE], "AMBIGUOUS", "two checkpoints in one folder"),
    "DeepSpeed undecided": (["global_step1/", "global_step2/"], "AMBIGUOUS", "global_step1, global_step2"),
    "torch": (["pytorch_model.bin"], "UNSUPPORTED", "not a torch file"),
    "torch of several files": (["pytorch_model.bin.index.json", "a.bin", "b.bin"], "CORRUPT", "weight_map"),
    "two torch files": (["a.pt", "b.pth"], "AMBIGUOUS", "a.pt, b.pth"),
    "two formats": (["a.safetensors", "b.bin"], "AMBIGUOUS", "--format"),
    "two indexes": ([INDEX, "model.fp16.safetensors.index.json"], "AMBIGUOUS", INDEX),
    "two files": (["a.safetensors", "b.safetensors"], "AMBIGUOUS", "a.safetensors, b.safetensors"),
    "shards without their index": ([SHARD, OTHER], "AMBIGUOUS", "index"),
    "one of two shards": ([SHARD], "INCOMPLETE", "shard 1 of 2"),
    "in a sub-folder": (["step-1/config.json", f"step-2/{FILE}"], "UNSUPPORTED", "step-2"),
}


@pytest.mark.parametrize(("names", "code", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(tmp_path: Path, names: list[str], code: Code, said: str) -> None:
    fill(tmp_path, names)
    with refuses(code, said) as caught:
        open_container(str(tmp_path))
    assert isinstance(caught.value, UsageError) == (code == "AMBIGUOUS")


def test_the_format_decides(tmp_path: Path) -> None:
    fill(tmp_path, [".metadata", "global_step1/", "a.safetensors", "b.bin"])
    container = open_container(str(tmp_path), "safetensors")
    assert list(container.files) == ["a.safetensors"]
    assert container.ignored == (".metadata", "b.bin", "global_step1/")
    for name in set(builtin()) - {"safetensors"}:
        with pytest.raises(TransaxleError) as caught:
            open_container(str(tmp_path), name)
        assert caught.value.code in {"CORRUPT", "INCOMPLETE", "UNSUPPORTED"}


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [("hdf5", "AMBIGUOUS", "dcp"), ("safetensors", "UNSUPPORTED", "no safetensors checkpoint")],
)
def test_a_format_that_is_not_there(tmp_path: Path, name: str, code: Code, said: str) -> None:
    fill(tmp_path, ["a.bin"])
    with refuses(code, said):
        open_container(str(tmp_path), name)


@pytest.mark.parametrize("name", [SHARD, "b.safetensors", INDEX])
def test_a_file_that_the_user_names(tmp_path: Path, name: str) -> None:
    fill(tmp_path, [INDEX, ".metadata", "b.safetensors", "c.bin", "config.json"])
    container = open_container(str(tmp_path / name))
    assert container.path == str(tmp_path / name)
    assert name in container.files
    assert container.carried == ("config.json",)


def test_a_name_that_tells_nothing(tmp_path: Path) -> None:
    tmp_path.joinpath("weights").write_bytes(ONE)
    with refuses("UNSUPPORTED", hint="--format safetensors"):
        open_container(str(tmp_path / "weights"))
    assert list(open_container(str(tmp_path / "weights"), "safetensors").entries) == ["a"]


@pytest.mark.parametrize("name", ["a.bin", "a.pt", "optimizer.pt", "rng_state_0.pth"])
def test_a_torch_file_that_the_user_names(tmp_path: Path, name: str) -> None:
    """What a trainer keeps beside the weights is no candidate in a folder, and is read where it is asked for."""
    fill(tmp_path, [name])
    with refuses("UNSUPPORTED", "not a torch file", file=name):
        open_container(str(tmp_path / name))


@pytest.mark.parametrize("name", [FILE, INDEX, "latest", "other.safetensors"])
def test_a_fifo_is_neither_waited_for_nor_overlooked(tmp_path: Path, name: str) -> None:
    fill(tmp_path, ["global_step2/"] if name == "latest" else [])
    os.mkfifo(tmp_path / name)
    with refuses("UNSUPPORTED", "FIFO", file=name):
        open_container(str(tmp_path))


def test_nothing_stays_open_after_a_refusal(tmp_path: Path) -> None:
    tmp_path.joinpath(FILE).write_bytes(ONE[:-1])
    before = open_files()
    with pytest.raises(TransaxleError):
        open_container(str(tmp_path))
    assert open_files() == before


@pytest.mark.parametrize("wanted", [None, "dcp"])
def test_a_dcp_folder_without_its_metadata_is_incomplete(wanted: str | None, tmp_path: Path) -> None:
    fill(tmp_path, ["__0_0.distcp", "__1_0.distcp", "config.json"])
    with pytest.raises(TransaxleError) as caught:
        open_container(str(tmp_path), wanted)
    (refusal,) = caught.value.refusals
    assert (refusal.code, refusal.where.file) == ("INCOMPLETE", ".metadata")
    assert "left out hidden files" in refusal.message


def test_other_formats_ask_for_no_metadata_of_dcp(tmp_path: Path) -> None:
    fill(tmp_path, ["__0_0.distcp", "model.safetensors"])
    assert open_container(str(tmp_path)).format == "safetensors"
    (tmp_path / "model.safetensors").unlink()
    with refuses("UNSUPPORTED"):
        open_container(str(tmp_path), "torch")
