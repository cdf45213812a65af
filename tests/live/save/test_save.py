"""Saving: the files hold the full tensors, whatever the mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import transaxle as tx
from tests import checkpoints
from tests.formats.s3_server import Bucket
from tests.live.load.test_load import FULL, PLACEMENTS, WORLDS, _octets, on
from tests.live.ranks import ranks, run
from tests.live.refusals import refused
from transaxle.formats.store.staging import Writer
from transaxle.formats.store.upload import Upload
from transaxle.live.asynchronous import async_save
from transaxle.live.save import save


def _save(rank: int, world: int, target: str, shape: tuple[int, ...]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape)
    state = {
        f"{name}.{number}": distribute_tensor(FULL[name], mesh, on(shape, placements), src_data_rank=None)
        for name, choices in PLACEMENTS.items()
        for number, placements in enumerate(choices)
    }
    report = save(state, target, to="safetensors")
    return {"own": report.bytes_own, "all": report.bytes_written}


@pytest.mark.oracle
@pytest.mark.parametrize(("world", "shape"), WORLDS)
def test_the_files_hold_the_full_tensors(tmp_path: Path, world: int, shape: tuple[int, ...]) -> None:
    target = str(tmp_path / "out")
    found = run(world, _save, target, shape)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for key, value in stored.items():
        assert torch.equal(_octets(value), _octets(FULL[key.rpartition(".")[0]])), key
    assert len(stored) == sum(map(len, PLACEMENTS.values()))
    assert sum(each["own"] for each in found) == sum(v.nbytes for v in stored.values())
    assert tx.verify(target).ok


def _unlike(rank: int, world: int, folder: str) -> list[str]:
    told = []
    for options in ({"rules": Path(folder, f"{rank}.rules")}, {"config": {"vocab_size": rank}}):
        with pytest.raises(tx.TransaxleError) as found:
            tx.save({"w": torch.ones(2)}, Path(folder, "out"), to="dcp", **options)
        told.append(f"{found.value.code} {found.value.refusals[0].message}")
    return told


def test_tables_and_configs_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    for rank, name in enumerate("vw"):
        (tmp_path / f"{rank}.rules").write_text(
            f"family own\n  axes d\n  {name} : d\ndialect mine\n  {name} = {name}[d]\n"
        )
    for rules, config in run(2, _unlike, str(tmp_path)):
        assert rules.startswith("AMBIGUOUS rules: rank 1 gave 'one with the hash ")
        assert config.startswith("AMBIGUOUS config: rank 1 gave 'one with the hash ")
    assert not (tmp_path / "out").exists()


def test_a_hub_folder_without_a_config_is_noted(tmp_path: Path) -> None:
    """As the command line does; with the model's config, there is nothing to tell."""
    state = {name: torch.from_numpy(array.astype(np.float32)) for name, array in checkpoints.tensors().items()}
    report = tx.save(state, tmp_path / "bare", to="hf", family="qwen3_moe", axes={"l": 2, "r": 2, "g": 2, "c": 8})
    assert [note.partition(",")[0] for note in report.notes] == ["no config.json goes along"]
    told = tx.save(state, tmp_path / "whole", to="hf", config=checkpoints.CONFIG)
    assert not [note for note in told.notes if "goes along" in note]
    assert (tmp_path / "whole" / "config.json").exists()


@pytest.mark.parametrize(("typed", "nearest"), [("safetensor", "safetensors"), ("dcp:hff", "hf")])
def test_a_misspelt_format_gets_the_nearest_name(typed: str, nearest: str, tmp_path: Path) -> None:
    with pytest.raises(tx.TransaxleError, match=f"Did you mean {nearest}") as caught:
        tx.save(torch.nn.Linear(2, 2), tmp_path / "out", to=typed)
    assert caught.value.code == "AMBIGUOUS"
    with pytest.raises(tx.TransaxleError, match=r"convert_hf_to_gguf\.py"):
        tx.save(torch.nn.Linear(2, 2), tmp_path / "out", to="gguf")


# Weights that change while they are saved: whatever is stored of them has the hashes that are stored of it.


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {f"w{number}": torch.randn(300, 1000, generator=generator) for number in range(3)}
    return state | {"turned": torch.randn(40, 50, generator=generator).T, "small": torch.arange(3.0)}


def _changing(state: dict[str, torch.Tensor], kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let all values change whenever bytes have been written, and before they are hashed."""
    written: list[int] = []
    pwrite = kind.pwrite

    def after(files: Any, file: str, offset: int, view: memoryview) -> None:
        pwrite(files, file, offset, view)
        written.append(view.nbytes)
        for tensor in state.values():
            tensor.add_(1)

    monkeypatch.setattr(kind, "pwrite", after)
    return written


@pytest.mark.parametrize(
    ("to", "laid_out"),
    [
        ("safetensors:identity", "anew"),
        ("dcp:identity", "as it is"),
        ("torch:identity", "anew"),
        ("one.safetensors", "as it is"),
    ],
)
def test_weights_changed_during_a_save_match_their_hashes(
    to: str, laid_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _state()
    if laid_out == "anew":
        state = {name: tensor.T if tensor.dim() == 2 else tensor for name, tensor in state.items()}
    written = _changing(state, Writer, monkeypatch)
    target = tmp_path / ("out" if ":" in to else to)
    tx.save(state, target, to=to if ":" in to else "safetensors:identity")
    assert len(written) >= len(state)
    found = tx.verify(target)
    assert found, found
    with tx.open(target) as checkpoint:
        names = ("w0", "w1", "w2")
        moved = [
            checkpoint[name].torch() - (_state()[name].T if laid_out == "anew" else _state()[name]) for name in names
        ]
    assert max(each.max() for each in moved) >= 1, "nothing changed while it was saved"
    assert all(torch.allclose(each, each.round(), atol=1e-3) for each in moved)


def test_weights_changed_during_an_upload_match_their_hashes(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's hashes come last; the digests of one file come first, so it is read twice, and refused."""
    state = _state()
    _changing(state, Upload, monkeypatch)
    tx.save(state, f"{bucket.url}/out", to="safetensors:identity")
    assert tx.verify(f"{bucket.url}/out")
    before = bucket.names()
    with refused("CORRUPT", "changed between two reads"):
        tx.save(state, f"{bucket.url}/one.safetensors", to="safetensors:identity")
    assert bucket.names() == before


# `verify=True` of a save: what the disk has is read back, and a byte that is not what was held in memory is told.

WORLD = 2
LARGE = 4096
"""Bytes of a write that is a part of a tensor, and no header."""
WRITE = Writer.pwrite


def _two_tensors(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (WORLD,))
    full = torch.arange(64 * 256.0).reshape(64, 256)
    return {"w": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None), "b": torch.arange(7)}


def _flipped(self: Writer, file: str, offset: int, view: memoryview) -> None:
    """Write as a disk or a cable that turns a bit."""
    octets = bytearray(view)
    if len(octets) >= LARGE:
        octets[-1] ^= 1
    WRITE(self, file, offset, memoryview(octets))


def _saved(rank: int, world: int, folder: str, to: str) -> list[tuple[bool, int, str]]:
    """Save well, now and in the background; return what each report says of the verification."""
    jobs = (
        tx.save(_two_tensors(rank), f"{folder}/now", to=to, verify=True),
        tx.async_save(_two_tensors(rank), f"{folder}/later", to=to, verify=True).result(),
    )
    found = []
    for report in jobs:
        assert report.verification is not None
        assert "verify" in report.stages
        assert "read back" in str(report)
        found.append((report.verification.ok, report.verification.tensors, report.verification.against))
    assert tx.save(_two_tensors(rank), f"{folder}/unread", to=to).verification is None
    return found


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_the_report_has_the_verification(tmp_path: Path, to: str) -> None:
    assert run(WORLD, _saved, str(tmp_path), to) == [[(True, 2, "manifest")] * 2] * WORLD


def _damaged(rank: int, world: int, folder: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Writer, "pwrite", _flipped)
        tx.save(_two_tensors(rank), f"{folder}/unread", to="dcp")  # nobody notices
        with pytest.raises(tx.TransaxleError) as found:
            tx.save(_two_tensors(rank), f"{folder}/read", to="dcp", verify=True)
    return [found.value.code, str(found.value)]


def test_a_flipped_bit_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (code, text), other = run(WORLD, _damaged, str(tmp_path))
    assert [code, text] == other
    assert code == "CORRUPT"
    assert "the bytes were changed after they were written" in text
    assert not tx.verify(tmp_path / "unread").ok


# Copies that differ between ranks are refused, by name and rank: one checkpoint has room for one of them.


def _possibly_odd_state(rank: int, world: int, odd: str) -> dict[str, Any]:
    """Tensors of four ranks, 2 x 2; of the one that is named, rank 3 has other values."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    state: dict[str, Any] = {
        "plain": torch.tensor([1.0, float("nan"), -0.0]),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "sharded": distribute_tensor(torch.arange(8.0), mesh["dp"], [Shard(0)], src_data_rank=None),
        "cut": distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)], src_data_rank=None),
        "number": 7,
    }
    if odd and rank == 3:
        other = state[odd]
        state[odd] = 8 if isinstance(other, int) else other + 0.5
    return state


def _refused(rank: int, world: int, target: str, odd: str, background: bool) -> None:
    state = _possibly_odd_state(rank, world, odd)
    if background:
        async_save(state, target, to="safetensors").result()
    else:
        save(state, target, to="safetensors")


@pytest.mark.parametrize("odd", ["plain", "sharded", "number"])
def test_copies_that_differ_are_refused_on_every_rank(tmp_path: Path, odd: str) -> None:
    for error in ranks(4).refusals(_refused, str(tmp_path / "out"), odd, False):
        assert [(each.code, each.where.tensor) for each in error.refusals] == [("UNEQUAL_COPIES", odd)]
        assert ("2; 3" if odd == "sharded" else "0, 1, 2; 3") in str(error)
        assert "check_copies=False" in str(error)
    assert not list(tmp_path.iterdir())


def test_copies_that_differ_are_refused_in_the_background(tmp_path: Path) -> None:
    with refused("UNEQUAL_COPIES"):
        run(4, _refused, str(tmp_path / "out"), "plain", True)
    assert not (tmp_path / "out").exists()


def _allowed(rank: int, world: int, folder: str) -> None:
    save(_possibly_odd_state(rank, world, ""), f"{folder}/equal", to="safetensors")
    save(_possibly_odd_state(rank, world, "turned"), f"{folder}/any", to="safetensors", check_copies=False)


def test_copies_that_differ_are_saved_with_check_copies_false(tmp_path: Path) -> None:
    run(4, _allowed, str(tmp_path))
    equal = load_file(tmp_path / "equal" / "model.safetensors")
    turned = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(equal["plain"].view(torch.int32), torch.tensor([1.0, float("nan"), -0.0]).view(torch.int32))
    assert torch.equal(equal["turned"], turned)
    assert torch.equal(equal["sharded"], torch.arange(8.0))
    found = load_file(tmp_path / "any" / "model.safetensors")["turned"]
    assert torch.equal(found, turned) or torch.equal(found, turned + 0.5)
