"""Distributed checkpoints of Megatron that are damaged, or out for harm: refused by file and reason; nothing runs."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

import transaxle as tx
from tests.formats.dcp.damage import MARKER, Damage, Evil, archive, edit, info, moved, place, put, read
from tests.formats.megatron.conftest import Hubs, Trained
from tests.formats.megatron.trained_job import Job
from transaxle.errors import Code, Refused, TransaxleError

FIRST, METADATA, COMMON = "__0_0.distcp", ".metadata", "common.pt"
QKV = "decoder.layers.self_attention.linear_qkv.weight"
BUFFER = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
SIZES = "optimizer.distributed.dp_group_idx_0.per_bucket_numel_unpadded/shard_0_1"
SETTINGS = "optimizer.distributed.dp_group_idx_{}.optimizer/shard_0_1"
EXTRA = "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4"
JOB = Job("llama", tp=2, dp=2)

pytestmark = pytest.mark.peers


@dataclass(frozen=True)
class Case:
    """What is done to a folder, and how it must be refused."""

    damage: Damage
    code: Code
    said: str
    """In the message."""
    file: str | None = METADATA


@pytest.fixture
def folder(trained: Trained, tmp_path: Path) -> Path:
    """An iteration with flat buckets."""
    return Path(shutil.copytree(trained(JOB) / "iter_0000007", tmp_path / "iter_0000007"))


def _saved(name: str, make: Callable[[Path], object]) -> Damage:
    """Write a file that torch would load."""
    return lambda folder: torch.save(make(folder), folder / name)


FOLDERS = {
    "a file that is missing": Case(lambda folder: (folder / FIRST).unlink(), "INCOMPLETE", "is missing", FIRST),
    "no metadata": Case(lambda folder: (folder / METADATA).unlink(), "INCOMPLETE", "the save was interrupted", None),
    "a command in the metadata": Case(
        lambda folder: (folder / METADATA).write_bytes(pickle.dumps(Evil(folder))), "UNSAFE_PICKLE", "system"),
    "a command in the arguments": Case(
        _saved(COMMON, lambda folder: {"iteration": 7, "args": Evil(folder)}), "UNSAFE_PICKLE", "system", COMMON),
    "arguments of nothing": Case(
        lambda folder: (folder / COMMON).write_bytes(b"x" * 100), "UNSUPPORTED", "not a torch file", COMMON),
    "flattened parts of another shape": Case(edit(lambda m: setattr(m, "mcore_data",
        {QKV: {"nd_reformulated_orig_global_shape": (4, 72, 24)}})), "CORRUPT", "do not make the shape"),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("case", FOLDERS.values(), ids=FOLDERS.keys())
def test_folders_that_are_damaged_are_refused(case: Case, folder: Path, tmp_path: Path) -> None:
    case.damage(folder)
    with pytest.raises(TransaxleError) as caught:
        tx.open(folder)
    refusals = caught.value.refusals
    assert any(
        refusal.code == case.code and case.said in refusal.message and case.file in (None, refusal.where.file)
        for refusal in refusals
    ), refusals
    assert not list(tmp_path.rglob(MARKER))


def _sizes(value: object) -> Damage:
    return lambda folder: put(folder, SIZES, archive(value), None)


def _ones(key: str) -> Damage:
    """Let a state be one chunk with other beginnings."""

    def merged(folder: Path) -> None:
        metadata: Any = read(folder)
        first, second = metadata.state_dict_metadata[key].chunks[:2]
        whole = [0], [first.sizes[0] + second.sizes[0]]
        metadata.storage_data.pop(MetadataIndex(key, second.offsets))
        metadata.state_dict_metadata[key].chunks.pop(1)
        moved(metadata, key, 0, *whole)
        (folder / METADATA).write_bytes(pickle.dumps(metadata))
        put(folder, key, archive(torch.zeros(whole[1])), 0)

    return merged


def _renamed(old: str, new: str) -> Damage:
    def rename(metadata: Any) -> None:
        metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
        for index in [index for index in metadata.storage_data if index.fqn == old]:
            metadata.storage_data[MetadataIndex(new, index.offset)] = metadata.storage_data.pop(index)

    return edit(rename)


OTHER = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "lr": 5.0}
NORM = "decoder.final_layernorm.weight"
OPTIMIZERS = {
    "sizes that are not those of the buckets": Case(
        _sizes([[{("bf16", "fp32"): [64]}]]), "UNSUPPORTED", "is not the 64 elements that the sizes", None
    ),
    "sizes of nothing": Case(_sizes([None]), "UNSUPPORTED", "the sizes of the buckets", None),
    "a command for sizes": Case(
        lambda folder: put(folder, SIZES, archive([Evil(folder)]), None), "UNSAFE_PICKLE", "system", None
    ),
    "settings that contradict each other": Case(
        lambda folder: put(folder, SETTINGS.format(1), archive([{"param_groups": [OTHER]}]), None),
        "UNSUPPORTED", "group 1 of ranks has other settings", None,
    ),
    "a chunk without a beginning": Case(
        lambda folder: [_ones(f"{BUFFER}.{state}")(folder) for state in ("param", "exp_avg", "exp_avg_sq")],
        "UNSUPPORTED", "does not hold consecutive parts of the model", None,
    ),
    "a state of other chunks": Case(_ones(f"{BUFFER}.exp_avg"), "UNSUPPORTED", "that the sizes beside it say", None),
    "a module of which nothing is known": Case(
        _renamed(NORM, "decoder.final_layernorm.gate.weight"), "UNSUPPORTED", "with 'gate'", None
    ),
    "a parameter too many": Case(
        edit(lambda m: m.state_dict_metadata.pop(NORM) and [
            m.storage_data.pop(index) for index in list(m.storage_data) if index.fqn == NORM
        ] and None),
        "UNSUPPORTED", "does not hold consecutive parts", None,
    ),
    "a bucket that is missing": Case(
        _renamed(f"{BUFFER}.param", f"{BUFFER.replace('bucket_idx_0', 'bucket_idx_3')}.param"),
        "UNSUPPORTED", "has the buckets [0, 3]", None,
    ),
    "a form that is not known": Case(
        _renamed(f"{BUFFER}.param", "optimizer.distributed.dp_group_idx_0.param"), "UNSUPPORTED", "not known", None
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_optimizer_that_cannot_be_read_is_refused_where_wanted(case: Case, folder: Path, tmp_path: Path) -> None:
    case.damage(folder)
    for to, optimizer in (("safetensors", None), ("dcp", True), ("safetensors", True)):
        with pytest.raises(Refused) as caught:
            tx.convert(folder, tmp_path / "out", to=to, optimizer=optimizer)
        refusals = caught.value.refusals
        assert any(refusal.code == case.code and case.said in refusal.message for refusal in refusals), refusals
        assert not (tmp_path / "out").exists()
    report = tx.convert(folder, tmp_path / "out", to="safetensors", optimizer=False)
    assert "optimizer" in report.ignored
    with tx.open(tmp_path / "out") as written:
        assert not any("optim" in name for name in written)
    assert not list(tmp_path.rglob(MARKER))


def test_extra_state_is_never_read(folder: Path, hubs: Hubs, tmp_path: Path) -> None:
    there = info(folder, EXTRA, None)
    for payload in (archive(Evil(folder)), pickle.dumps(Evil(folder)), b"text", b""):
        put(folder, EXTRA, payload, None)
        out = tmp_path / str(len(payload))
        tx.convert(folder, out, to="hf", config=hubs["llama"] / "config.json", optimizer=True)
        place(EXTRA, None, offset=there.offset, length=there.length)(folder)
    assert not list(tmp_path.rglob(MARKER))
