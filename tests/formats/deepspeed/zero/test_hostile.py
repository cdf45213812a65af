"""Folders that are incomplete, contradict themselves or mean harm: refused by name, and nothing is written."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transaxle as tx
from tests.formats.deepspeed.zero.test_truth import differing
from tests.formats.refusals import refuses
from tests.oracles.deepspeed_peer.case import FP32, STATES, TAG
from tests.oracles.deepspeed_peer.farm import Farm
from transaxle.formats.deepspeed.categories import exact_pattern
from transaxle.formats.deepspeed.keys import INFO, LATEST_UNIVERSAL, UNIVERSAL, UNSUPPORTED_PATTERNS
from transaxle.formats.training_state import OPTIMIZER

pytestmark = pytest.mark.peers
CASE = "z1-bf16-w2"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


@pytest.fixture
def copied(farm: Farm, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(farm.checkpoint(name), tmp_path / "source"))

    return copy


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    torch = pytest.importorskip("torch")
    held = torch.load(path, weights_only=False)
    change(held)
    torch.save(held, path)


def refused(path: Path, tmp_path: Path, code: str) -> tx.TransaxleError:
    target = tmp_path / "target"
    with pytest.raises(tx.TransaxleError) as caught:
        tx.convert(path, target, to=UNIVERSAL)
    assert code in {refusal.code for refusal in caught.value.refusals}, caught.value
    assert not target.exists()
    assert not (tmp_path / LATEST_UNIVERSAL).exists()
    return caught.value


@pytest.mark.parametrize(
    ("case", "file", "words"),
    [
        ("tp2-fused", MODEL, MODEL),
        ("ep2-z1-w2", "layer_1_expert_2_mp_rank_00_model_states.pt", "[2] of mixture 1"),
        ("pp2-tp2", "layer_03-model_01-model_states.pt", "layer 3"),
        ("pp2", "layer_03-model_states.pt", "layer 3"),  # the optimizer has its weights, but nothing has its buffers
    ],
)
def test_a_lost_file_is_named(copied: Callable[[str], Path], tmp_path: Path, case: str, file: str, words: str) -> None:
    source = copied(case)
    (source / TAG / file).unlink()
    assert words in str(refused(source, tmp_path, "INCOMPLETE"))


def test_shapes_in_another_order_are_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    def swap(held: dict[str, Any]) -> None:
        shapes = held["param_shapes"][0]
        held["param_shapes"][0] = type(shapes)(reversed(shapes.items()))

    source = copied(CASE)
    edit(source / TAG / MODEL, swap)
    refused(source, tmp_path, "CORRUPT")


@pytest.mark.parametrize(("case", "words"), [("z3-fp32-w2", "it is a copy of .*rank_0"), (CASE, "mappings says")])
def test_a_copy_of_another_rank_s_file_is_refused(copied: Callable[[str], Path], case: str, words: str) -> None:
    """Files of ZeRO-1 and 2 record their fragments; those of ZeRO-3 do not."""
    source = copied(case)
    first, second = sorted(source.rglob("*_optim_states.pt"))
    shutil.copy(first, second)
    with pytest.raises(tx.TransaxleError, match=rf"CORRUPT .*{second.name}[\s\S]*{words}"):
        tx.open(source)


def test_two_files_of_one_rank_are_named(copied: Callable[[str], Path], tmp_path: Path) -> None:
    source = copied(CASE)
    name = OPTIM.format(1)
    shutil.copy(source / TAG / name, source / TAG / name.removeprefix("bf16_"))
    assert name in str(refused(source, tmp_path, "CORRUPT"))


def test_a_dense_group_on_some_ranks_only_is_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    source = copied(CASE)

    def change(held: dict[str, Any]) -> None:
        held["optimizer_state_dict"]["partition_count"][0] = 1

    for rank in (0, 1):
        edit(source / TAG / OPTIM.format(rank), change)
    assert "is no expert" in str(refused(source, tmp_path, "UNSUPPORTED"))


def test_a_weight_that_is_in_no_layers_file_is_named(copied: Callable[[str], Path]) -> None:
    source = copied("pp2")
    edit(source / TAG / "layer_03-model_states.pt", lambda held: held.pop("ln.weight"))
    with tx.open(source) as ck:
        assert "3.ln.weight" in ck
    with refuses("INCOMPLETE", "no file holds this parameter in low precision", tensor="3.ln.weight"):
        tx.open(source, weights="lp")


@pytest.mark.parametrize("name", ["odd-z1-w2", "odd-z2-w4", "one-group-w2", "pp2"])
def test_files_of_earlier_versions(farm: Farm, copied: Callable[[str], Path], name: str) -> None:
    """They say nothing of alignment, of fragments or of parallel degrees, and one group's shapes were no list.

    DeepSpeed 0.19.8 without `parameter_alignment` lays its buffers out as they did, so its files without these entries
    are theirs.
    """
    source = copied(name)

    def forget(held: dict[str, Any]) -> None:
        held.pop("checkpoint_parallel_dimensions", None)
        if len(held.get("param_shapes") or ()) == 1:
            held["param_shapes"] = held["param_shapes"][0]
        state = held.get("optimizer_state_dict", {})
        for key in ("param_alignment_paddings", "param_slice_mappings", "universal_checkpoint_info"):
            state.pop(key, None)

    for file in (source / TAG).glob("*.pt"):
        edit(file, forget)
    wanted = dict(farm.truth(name, FP32))
    for state in STATES:
        wanted |= {f"{OPTIMIZER}{n}/{state}": held for n, held in farm.truth(name, state).items()}
    with tx.open(source) as ck:
        assert differing(ck, wanted) == []


def test_replicas_that_differ_are_refused_by_name(copied: Callable[[str], Path], tmp_path: Path) -> None:
    source = copied("tp2-fused")
    name = "layers.0.ln1.weight"
    with tx.open(source) as checkpoint:
        before = {each: tensor.read() for each, tensor in checkpoint.items()}

    def change(held: dict[str, Any]) -> None:
        state = held["optimizer_state_dict"]
        for group, shapes in enumerate(state["param_slice_mappings"]):
            if name in shapes:
                state["single_partition_of_fp32_groups"][group].data[shapes[name].start] += 1

    edit(source / TAG / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", change)
    assert name in str(refused(source, tmp_path, "UNEQUAL_COPIES"))
    drifted = before[name].copy()
    drifted.flat[0] += 1
    expected = ((before[name].astype(np.float64) + drifted) / 2).astype(np.float32)
    with tx.open(source, average=True) as mean:
        assert mean[name].tobytes() == expected.tobytes()
        assert all(tensor.tobytes() == before[each].tobytes() for each, tensor in mean.items() if each != name)
    report = tx.convert(source, tmp_path / "mean", to="deepspeed-universal", average=True, sync=False, verify=True)
    assert report.verification
    assert [(one.what.name, one.what.action) for one in report.recoded] == [(name, "averaged")]
    assert report.recoded[0].error.max == pytest.approx(0.5, abs=1e-6)
    with tx.open(tmp_path / "mean") as written:
        assert written[name].tobytes() == expected.tobytes()


def test_tensor_parallel_ranks_are_not_joined_by_guess(copied: Callable[[str], Path], tmp_path: Path) -> None:
    source = copied("tp2-fused")
    for rank in (0, 1):
        edit(source / TAG / f"mp_rank_{rank:02d}_model_states.pt", lambda held: held.pop(INFO))
    assert "cannot be joined" in str(refused(source, tmp_path, "UNSUPPORTED"))


def test_what_autotp_could_not_describe_is_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    name, reason = "layers.1.self_attn.qkv_proj.weight", "heads of several ranks lie between each other"
    source = copied("tp2-fused")

    def change(held: dict[str, Any]) -> None:
        held[INFO][UNSUPPORTED_PATTERNS] = {exact_pattern(name): reason}

    for rank in (0, 1):
        edit(source / TAG / f"mp_rank_{rank:02d}_model_states.pt", change)
    error = refused(source, tmp_path, "UNSUPPORTED")
    assert (error.where.tensor, reason in str(error)) == (name, True)


def test_a_name_is_never_a_path(copied: Callable[[str], Path], tmp_path: Path) -> None:
    source = copied(CASE)
    evil = "../../../escaped"

    def rename(shapes: Any) -> Any:
        return type(shapes)((evil if n == "lm_head.weight" else n, value) for n, value in shapes.items())

    def model(held: dict[str, Any]) -> None:
        held["param_shapes"] = [rename(group) for group in held["param_shapes"]]
        held["module"] = rename(held["module"])

    def state(held: dict[str, Any]) -> None:
        inner = held["optimizer_state_dict"]
        inner["param_slice_mappings"] = [rename(group) for group in inner["param_slice_mappings"]]

    edit(source / TAG / MODEL, model)
    for rank in (0, 1):
        edit(source / TAG / OPTIM.format(rank), state)
    with tx.open(source) as ck:  # as a name it is as good as any
        assert ck[evil].shape == (250, 32)
    refused(source, tmp_path, "PATH_ESCAPE")
    assert not (tmp_path.parent / "escaped").exists()


_ALONE = """
import sys
sys.modules["deepspeed"] = sys.modules["torch"] = None  # importing them is an ImportError now
from transaxle.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_neither_deepspeed_nor_torch_is_needed(copied: Callable[[str], Path], tmp_path: Path) -> None:
    commands = ["ls"], ["convert", str(tmp_path / "out"), "--to", "deepspeed-universal", "--no-sync"]
    source = copied(CASE)
    for command, *rest in commands:
        arguments = [command, str(source), *rest]
        done = subprocess.run([sys.executable, "-c", _ALONE, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    with tx.open(source) as before, tx.open(tmp_path / "out") as after:
        assert all(after[name].tobytes() == tensor.tobytes() for name, tensor in before.items())
