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
    "in a sub-folder": (["part-1/config.json", f"part-2/{FILE}"], "UNSUPPORTED", "part-2"),
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


MODEL = json.dumps({"model_type": "llama"})
VERL = "latest_checkpointed_iteration.txt"
RANK = "model_world_size_1_rank_0.pt"

INNER: dict[str, tuple[list[str], str]] = {
    "Trainer": (["runs/", f"checkpoint-50/{FILE}"], "checkpoint-50"),
    "Trainer, beside pruned steps": (["checkpoint-2/trainer_state.json", f"checkpoint-30/{FILE}"], "checkpoint-30"),
    "accelerate": ([f"checkpoints/checkpoint_7/{FILE}"], "checkpoints/checkpoint_7"),
    "Lightning": ([f"lightning_logs/version_0/checkpoints/epoch=1.ckpt/{FILE}"],
        "lightning_logs/version_0/checkpoints/epoch=1.ckpt"),
    "torchtune": ([f"epoch_0/{FILE}", "recipe_state/recipe_state.pt", "logs/"], "epoch_0"),
    "torchtune before 0.5": ([f"epoch_0/{FILE}", "recipe_state.pt"], "epoch_0"),
    "torchtitan": ([f"checkpoint/step-1000/{FILE}"], "checkpoint/step-1000"),
    "SkyRL": ([f"policy/{FILE}", "data.pt", "trainer_state.pt"], "policy"),
    "SkyRL's run": (["latest_ckpt_global_step.txt=4", f"global_step_4/policy/{FILE}", "global_step_4/data.pt",
        f"global_step_2/policy/{FILE}"], "global_step_4/policy"),
    "verl": ([f"actor/{FILE}", "data.pt"], "actor"),
    "verl's run": ([f"{VERL}=100", f"global_step_100/actor/{FILE}", f"global_step_90/actor/{FILE}"],
        "global_step_100/actor"),
    "one step of verl without its file": ([f"global_step_90/actor/{FILE}"], "global_step_90/actor"),
    "a hub's cache": (["refs/main", "blobs/", f"snapshots/0123abcd/{FILE}"], "snapshots/0123abcd"),
}  # fmt: skip


def fill_run(folder: Path, names: Iterable[str]) -> None:
    """Create the files of a run; `NAME=TEXT` is a file with this text."""
    for name in names:
        file, _, text = name.partition("=") if ".txt" in name else (name, "", "")
        fill(folder, [file])
        if text:
            (folder / file).write_text(f"{text}\n")


@pytest.mark.parametrize(("names", "inner"), INNER.values(), ids=INNER.keys())
def test_the_one_checkpoint_in_a_trainers_folder_is_opened(tmp_path: Path, names: list[str], inner: str) -> None:
    fill_run(tmp_path, names)
    for path in (f"{tmp_path}", f"{tmp_path}/", tmp_path.as_uri()):
        container = open_container(path)
        assert (container.path, container.inside) == (f"{tmp_path}/{inner}", inner)
        assert list(container.files) == [FILE]
        container.storage.close()
    assert open_container(f"{tmp_path}/{inner}").inside == ""


UNDECIDED: dict[str, tuple[list[str], Code, str]] = {
    "steps": ([f"checkpoint-{step}/{FILE}" for step in (9, 100, 20)], "AMBIGUOUS",
        "checkpoint-100, checkpoint-20, checkpoint-9"),
    "two models": ([f"global_step_5/{name}/{FILE}" for name in ("critic", "actor")], "AMBIGUOUS",
        "global_step_5/actor, global_step_5/critic"),
    "two models of a step": ([f"actor/{FILE}", f"critic/{FILE}", "data.pt"], "AMBIGUOUS", "actor, critic"),
    "two steps of verl": ([f"global_step_{step}/actor/{FILE}" for step in (5, 10)], "AMBIGUOUS",
        "global_step_10/actor, global_step_5/actor"),
    "revisions": ([f"snapshots/{name}/{FILE}" for name in ("b1", "a2")], "AMBIGUOUS", "snapshots/a2, snapshots/b1"),
    "versions": ([f"lightning_logs/version_{one}/checkpoints/a.ckpt/{FILE}" for one in (0, 1)], "AMBIGUOUS",
        "version_1/checkpoints/a.ckpt, lightning_logs/version_0"),
    "a step whose save was interrupted": ([f"checkpoint-1/{FILE}", "checkpoint-2/__0_0.distcp"], "AMBIGUOUS",
        "checkpoint-2, checkpoint-1"),
    "only an interrupted save": (["checkpoint-2/__0_0.distcp"], "INCOMPLETE", ".metadata"),
    "an unfinished conversion": ([f"checkpoint-2/{FILE}", f"checkpoint-2/{SCRATCH}/"], "INCOMPLETE", "--resume"),
    "the newest step is missing": ([f"{VERL}=100", f"global_step_90/actor/{FILE}"], "INCOMPLETE", "global_step_100"),
    "more folders than are examined": ([f"checkpoint-1/{FILE}", *(f"checkpoint-{n}/" for n in range(2, 80))],
        "UNSUPPORTED", "newest 60 folders, and 19 more"),
    "a checkpoint among many folders": ([f"checkpoint-99/{FILE}", *(f"checkpoint-{n}/" for n in range(2, 80))],
        "AMBIGUOUS", "19 more folders were not examined"),
    "too deep": ([f"checkpoints/checkpoints/checkpoints/checkpoints/checkpoint-1/{FILE}"], "UNSUPPORTED", ""),
}  # fmt: skip


@pytest.mark.parametrize(("names", "code", "said"), UNDECIDED.values(), ids=UNDECIDED.keys())
def test_nothing_is_chosen_silently(tmp_path: Path, names: list[str], code: Code, said: str) -> None:
    fill_run(tmp_path, names)
    with refuses(code, said):
        open_container(str(tmp_path))


def test_a_format_is_searched_for_in_inner_folders(tmp_path: Path) -> None:
    fill(tmp_path, [f"checkpoint-1/{FILE}", "checkpoint-2/.metadata"])
    assert open_container(str(tmp_path), "safetensors").inside == "checkpoint-1"


@pytest.mark.parametrize(
    ("given", "config", "used"),
    [
        ("run/checkpoint-1", "run/config.json", True),
        ("run/checkpoint-1/part", "run/config.json", False),
        ("run", "run/config.json", True),
        ("run", "config.json", True),
        ("run/checkpoint-1", "config.json", False),
        (".", "run/config.json", False),
    ],
)
def test_the_config_of_a_folder_above(tmp_path: Path, given: str, config: str, *, used: bool) -> None:
    fill(tmp_path, [f"run/checkpoint-1/{FILE}", f"run/checkpoint-1/part/{FILE}"])
    (tmp_path / config).write_text(MODEL)
    if given == ".":
        with pytest.raises(TransaxleError, match="no checkpoint"):
            open_container(str(tmp_path))
        return
    container = open_container(str(tmp_path / given))
    assert (container.config_path, container.carried) == (
        (str(tmp_path / config), ("config.json",)) if used else ("", ())
    )
    if used:
        assert container.storage.read("config.json", 0, container.storage.size("config.json")) == MODEL.encode()
        assert "config.json" in container.storage.names()
    assert open_container(str(tmp_path / given), config_above=False).carried == ()


@pytest.mark.parametrize("text", ["{}", "[1]", "no JSON", '{"model_type": 3}', '{"architectures": "A"}'])
def test_no_config_of_a_model_above(tmp_path: Path, text: str) -> None:
    fill(tmp_path, [f"out/{FILE}"])
    (tmp_path / "config.json").write_text(text)
    assert open_container(str(tmp_path / "out")).carried == ()


def test_a_relative_folder_has_a_folder_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, [f"run/out/{FILE}"])
    (tmp_path / "run" / "config.json").write_text(MODEL)
    for here, given, path in (("run", "out", "./config.json"), ("run/out", ".", "../config.json")):
        monkeypatch.chdir(tmp_path / here)
        assert open_container(given).config_path == path
