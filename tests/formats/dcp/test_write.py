"""What is written is what plain torch reads: every type, any cut, any number of ranks."""

from __future__ import annotations

import random
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load

import transaxle as tx
from tests.formats.dcp.peers.loading import run
from tests.formats.dcp.peers.processes import start
from tests.formats.dcp.peers.truth import CODES, hold
from tests.formats.dcp.peers.world import CHECKPOINT, FULL, PLAIN, TRUTH, octets
from tests.formats.drafts import build
from tests.formats.refusals import refuses
from transaxle.errors import Code, Refused
from transaxle.formats.catalog import BITS, Spec, nbytes
from transaxle.formats.dcp.draft import draft, frame
from transaxle.formats.dcp.metadata import METADATA
from transaxle.formats.pickled.descriptors import DType

WRITTEN = sorted(code for code in BITS if not code.startswith("F6"))
PARAMETER = "layers.0.weight"


def filled(specs: list[Spec]) -> dict[str, bytes]:
    """Random bytes; booleans are 0 and 1, as torch makes them."""
    source = random.Random(0)
    data = {spec.name: source.randbytes(nbytes(spec.dtype, spec.shape)) for spec in specs}
    return data | {s.name: bytes(octet & 1 for octet in data[s.name]) for s in specs if s.dtype == "BOOL"}


def loaded(folder: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    target = tmp_path / "all.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, target)
    held: dict[str, torch.Tensor] = torch.load(target)
    return held


@pytest.mark.parametrize("shard_size", [None, 10])
def test_every_type(tmp_path: Path, shard_size: int | None) -> None:
    specs = [Spec(code, code, (3, 4)) for code in WRITTEN] + [Spec("empty", "F32", (0, 3)), Spec("none", "I64", ())]
    data = filled(specs)
    folder = build(draft(specs, shard_size=shard_size), tmp_path / "folder", data)
    held = loaded(folder, tmp_path)
    assert set(held) == set(data)
    for spec in specs:
        tensor = held[spec.name]
        assert octets(tensor) == data[spec.name], spec
        if spec.dtype != "F4":
            assert (CODES[tensor.dtype], tuple(tensor.shape)) == (spec.dtype, spec.shape)
    assert (held["F4"].dtype, tuple(held["F4"].shape)) == (torch.float4_e2m1fn_x2, (3, 2))
    with tx.open(folder) as checkpoint:
        assert {name: (t.dtype, t.shape, t.tobytes()) for name, t in checkpoint.items()} == {
            spec.name: (spec.dtype, spec.shape, data[spec.name]) for spec in specs
        }


any_specs = st.lists(
    st.builds(Spec, st.text(max_size=4), st.sampled_from(WRITTEN), st.tuples(st.integers(0, 5), st.just(8))),
    max_size=8,
    unique_by=lambda spec: spec.name,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_specs, st.none() | st.integers(1, 200))
def test_every_draft_is_a_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, specs: list[Spec], shard_size: int | None
) -> None:
    folder = tmp_path_factory.mktemp("draft")
    plan = draft(specs, metadata={"format": "pt"}, shard_size=shard_size)
    data = filled(specs)
    with tx.open(build(plan, folder, data)) as checkpoint:
        container = checkpoint.container
        assert {name: entry for name, entry in container.entries.items() if entry.nbytes} == {
            name: entry for name, entry in plan.entries.items() if entry.nbytes
        }
        used = {METADATA} | {extent.file for entry in plan.entries.values() for extent in entry.extents}
        assert container.files == {file: size for file, size in plan.files.items() if file in used}
        assert {name: tensor.tobytes() for name, tensor in checkpoint.items()} == data
    for entry in plan.entries.values():
        for extent in entry.extents:
            size = nbytes(entry.dtype, extent.shape)
            assert not size or extent.offset % 64 == 0
            assert shard_size is None or size <= max(shard_size, BITS[entry.dtype] // 8)


def test_tensors_are_cut_into_runs_of_rows() -> None:
    plan = draft([Spec("a", "F32", (3, 5, 2)), Spec("b", "U8", (2,))], shard_size=16)
    spans = [(extent.start, extent.shape) for extent in plan.entries["a"].extents]
    assert spans == [((row, first, 0), (1, min(2, 5 - first), 2)) for row in range(3) for first in (0, 2, 4)]
    assert list(plan.files) == [f"__0_{number}.distcp" for number in range(len(plan.files) - 1)] + [METADATA]
    assert len(draft([Spec("a", "F32", (3, 5, 2))]).entries["a"].extents) == 1


def test_an_archive_is_torch_s_own_but_for_checksum_and_serial_number(tmp_path: Path) -> None:
    """The pickle and the layout up to the tensor are those of `torch.save`."""
    tensor = torch.arange(12.0).reshape(3, 4)
    target = tmp_path / "archive.pt"
    with target.open("wb") as stream:
        torch.save(tensor, stream)
    theirs = target.read_bytes()
    head, tail = frame(DType("float32"), (3, 4), tensor.nbytes)
    target.write_bytes(head + octets(tensor) + tail)
    assert torch.equal(torch.load(target), tensor)
    assert len(head) % 64 == 0
    assert theirs.index(octets(tensor)) >= len(head)


def test_the_optimizer_s_state(tmp_path: Path) -> None:
    """It lies where torch looks for it, by name and by number."""
    specs = [Spec(PARAMETER, "F32", (2, 3))]
    specs += [Spec(f"optim/{PARAMETER}/{state}", "F32", (2, 3)) for state in ("exp_avg", "exp_avg_sq")]
    specs += [Spec(f"optim/{PARAMETER}/step", "F32", ()), Spec("optim/#3/step", "F32", ())]
    data = filled(specs)
    folder = build(draft(specs), tmp_path / "folder", data)
    state = {"exp_avg": torch.zeros(2, 3), "exp_avg_sq": torch.zeros(2, 3), "step": torch.zeros(())}
    numbered = {"step": torch.zeros(())}
    nested = {PARAMETER: torch.zeros(2, 3), "optimizer": {"state": {PARAMETER: state, "3": numbered}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(nested, checkpoint_id=folder)
    for key, tensor in state.items():
        assert octets(tensor) == data[f"optim/{PARAMETER}/{key}"]
    assert octets(numbered["step"]) == data["optim/#3/step"]
    flat = {f"state.{PARAMETER}.exp_avg": torch.zeros(2, 3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load({"optimizer": flat}, checkpoint_id=folder)
    assert octets(flat[f"state.{PARAMETER}.exp_avg"]) == data[f"optim/{PARAMETER}/exp_avg"]
    assert set(tx.open(folder)) == set(data)


REFUSED: dict[str, tuple[Spec, Code, str]] = {
    "no dtype of torch's": (Spec("b", "F6_E2M3", (4,)), "UNSUPPORTED", "b"),
    "packs that are torn": (Spec("b", "F4", (2, 3)), "SHAPE_MISMATCH", "b"),
    "half a byte": (Spec("b", "F4", (3,)), "SHAPE_MISMATCH", "b"),
    "no dims to pack along": (Spec("b", "F4", ()), "SHAPE_MISMATCH", "b"),
    "a name twice": (Spec("a", "U8", (1,)), "NAME_COLLISION", "a"),
    "a key twice": (Spec("optim/a/step", "U8", (1,)), "NAME_COLLISION", "optim/a/step"),
    "no Unicode": (Spec("\ud800", "U8", (1,)), "UNSUPPORTED", "\\ud800"),
}


@pytest.mark.parametrize(("spec", "code", "tensor"), REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_place(spec: Spec, code: Code, tensor: str) -> None:
    with refuses(code, tensor=tensor):
        draft([Spec("a", "F32", (2,)), Spec("optimizer.state.a.step", "F32", ()), spec])


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A folder with a checkpoint that we wrote, cut into files of a few bytes, and the truth beside it."""
    truth = {name: tensor.contiguous() for name, tensor in (FULL | PLAIN).items()}
    safetensors.torch.save_file(truth, tmp_path / "model.safetensors")
    torch.save(truth, tmp_path / TRUTH)
    tx.convert(tmp_path / "model.safetensors", tmp_path / CHECKPOINT, to="dcp", shard_size=40)
    with tx.open(tmp_path / CHECKPOINT) as checkpoint:
        hold(checkpoint, truth)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_number_of_ranks_loads_it(ours: Path, world: int) -> None:
    start(run, world, ours)


@pytest.mark.slow
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.oracle)])
def test_every_flipped_bit_is_seen(tmp_path: Path, step: int) -> None:
    """In tensors, archives, padding and metadata alike: refused when opened, or found when verified."""
    truth = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7, dtype=torch.int16)}
    safetensors.torch.save_file(truth, tmp_path / "model.safetensors")
    folder = tmp_path / CHECKPOINT
    tx.convert(tmp_path / "model.safetensors", folder, to="dcp")
    files = [path for path in folder.iterdir() if path.suffix != ".json"]
    assert len(files) == 2
    unseen = []
    for path in files:
        whole = path.read_bytes()
        for at in range(0, len(whole), step):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            with suppress(Refused), tx.open(folder) as checkpoint:
                if tx.verify(checkpoint).ok:
                    unseen.append((path.name, at))
        path.write_bytes(whole)
    assert unseen == []
    assert tx.verify(folder).ok
