"""Folders of one rank each are written as Megatron's ranks would write them, and read back."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import transaxle as tx
from tests.formats.megatron.legacy.run import (
    ITERATION,
    LAYERS,
    MODEL,
    MULTIPLE,
    TRACKER,
    Run,
    Tensors,
    content,
    hub,
    module,
    ranks,
    write,
)
from transaxle.errors import TransaxleError

ALL = tuple(range(LAYERS))
RUNS = {
    "one rank": Run(),
    "tp2": Run(tp=2),
    "tp4, fewer kv heads": Run(tp=4),
    "pp2": Run(pp=2),
    "tp2 pp4": Run(tp=2, pp=4),
    "tied": Run(tied=True),
    "tied tp2 pp2": Run(tp=2, pp=2, tied=True),
    "biases tp2": Run(tp=2, biased=True),
    "experts": Run(sparse=ALL),
    "ep2": Run(ep=2, sparse=ALL),
    "tp2 pp2 ep2": Run(tp=2, pp=2, ep=2, sparse=ALL),
    "some layers dense": Run(ep=2, tp=2, pp=2, sparse=(1, 3)),
}


def _hub(folder: Path, run: Run) -> dict[str, Tensors]:
    truth = hub(run)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(run.config()))
    save_file(truth[""], folder / "model.safetensors")
    return truth


def _convert(source: Path, out: Path, run: Run, **options: Any) -> tx.Report:
    degrees: dict[str, Any] = {"tp": run.tp, "pp": run.pp, "ep": run.ep, "make_vocab_size_divisible_by": MULTIPLE}
    return tx.convert(source, out, to="megatron_torch", **degrees, **options)


def _loaded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / MODEL, weights_only=False)
    return found


@pytest.mark.oracle
@pytest.mark.parametrize("case", RUNS)
def test_every_rank_has_its_part_of_a_hub_s_model(case: str, tmp_path: Path) -> None:
    run = RUNS[case]
    truth = _hub(tmp_path / "hub", run)
    report = _convert(tmp_path / "hub", tmp_path / "out", run)
    assert (report.format, report.dialect) == ("megatron_torch", "megatron")
    assert (tmp_path / "out" / TRACKER).read_text() == "release"
    folders = {path.name for path in (tmp_path / "out" / "release").iterdir()}
    assert folders == {rank.folder(run) for rank in ranks(run)}
    for rank in ranks(run):
        found = _loaded(tmp_path / "out" / "release" / rank.folder(run))
        wanted = module(run, rank, 0, truth[""])
        same = {name: tensor for name, tensor in found["model"].items() if name in wanted}
        assert list(same) == list(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(same[name], tensor), (rank, name)
        assert found["checkpoint_version"] == 3.0
        assert (found["args"].tensor_model_parallel_size, found["args"].pipeline_model_parallel_size) == (
            run.tp,
            run.pp,
        )
        assert "optimizer" not in found
        told = content(run, rank, truth)["args"]
        assert (found["args"].rank, found["args"].world_size) == (told.rank, told.world_size)
    assert tx.verify(tmp_path / "out")
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf")
    assert tx.diff(tmp_path / "hub", tmp_path / "back")


def test_scales_of_experts_are_with_their_experts(tmp_path: Path) -> None:
    """Of several expert-parallel ranks each has the scales of its own experts, under its own numbers."""
    run = Run(pp=2, ep=2, sparse=ALL)
    _hub(tmp_path / "hub", run)
    how = {"encode": "float8_block", "only": "*.experts.linear_fc1.*"}
    end = "_scale_inv"
    _convert(tmp_path / "hub", tmp_path / "one", replace(run, pp=1, ep=1), **how)
    _convert(tmp_path / "hub", tmp_path / "out", run, **how)
    whole = _loaded(tmp_path / "one/release/mp_rank_00")["model"]
    for rank in ranks(run):
        held = _loaded(tmp_path / "out/release" / rank.folder(run))["model"]
        scales = {name for name in held if name.endswith(end)}
        assert len(scales) == 2 * 2
        for name in scales:
            match = re.fullmatch(rf"decoder\.layers\.(\d)\.(.*weight)(\d){end}", name)
            assert match is not None
            layer, expert = int(match[1]) + 2 * rank.pp, int(match[3]) + 2 * rank.ep
            stem = f"decoder.layers.{layer}.{match[2]}{expert}"
            assert torch.equal(held[name], whole[f"{stem}{end}"])
            assert torch.equal(held[name.removesuffix(end)].view(torch.uint8), whole[stem].view(torch.uint8))
    tx.convert(tmp_path / "out", tmp_path / "back", to="safetensors:megatron")
    tx.convert(tmp_path / "one", tmp_path / "other", to="safetensors:megatron")
    assert tx.diff(tmp_path / "other", tmp_path / "back")


def test_other_modules_find_their_names(tmp_path: Path) -> None:
    """Megatron's local modules have norms of their own, and may have experts one by one."""
    for name, run in (("dense", Run(bare_norms=True)), ("sparse", Run(sparse=ALL, one_by_one=True))):
        truth = _hub(tmp_path / name, run)
        _convert(tmp_path / name, tmp_path / f"{name}-out", run)
        found = _loaded(tmp_path / f"{name}-out" / "release" / "mp_rank_00")["model"]
        for key, tensor in module(run, ranks(run)[0], 0, truth[""]).items():
            assert torch.equal(found[key], tensor), key
        with tx.open(tmp_path / f"{name}-out") as checkpoint:
            assert len(checkpoint) == len({tensor.data_ptr() for tensor in found.values()})


@pytest.mark.oracle
@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("source", ["numbered", "flat"])
def test_an_optimizer_goes_to_other_ranks(source: str, case: str, tmp_path: Path) -> None:
    run = RUNS[case]
    truth = write(replace(run, tp=1, pp=1, ep=1, optimizer=source), tmp_path / "run")
    _convert(tmp_path / "run", tmp_path / "out", run)
    assert (tmp_path / "out" / TRACKER).read_text() == str(ITERATION)
    for rank in ranks(run):
        found = _loaded(tmp_path / "out" / f"iter_{ITERATION:07d}" / rank.folder(run))
        wanted = content(run, rank, truth)
        assert found["iteration"] == wanted["iteration"]
        assert found["opt_param_scheduler"] == wanted["opt_param_scheduler"]
        parts = (
            (found["optimizer"], wanted["optimizer"]) if run.ep > 1 else ([found["optimizer"]], [wanted["optimizer"]])
        )
        assert len(parts[0]) == len(parts[1])
        for ours, theirs in zip(*parts, strict=True):
            _same(ours["fp32_from_fp16_params"], theirs["fp32_from_fp16_params"])
            _same(ours["optimizer"]["state"], theirs["optimizer"]["state"])
            for group, other in zip(
                ours["optimizer"]["param_groups"], theirs["optimizer"]["param_groups"], strict=True
            ):
                assert {key: tuple(v) if isinstance(v, list) else v for key, v in group.items()} == {
                    key: tuple(v) if isinstance(v, list) else v for key, v in other.items()
                }
    assert tx.verify(tmp_path / "out")
    assert tx.diff(tmp_path / "run", tmp_path / "out", config=run.config())


def _same(ours: Any, theirs: Any) -> None:
    """Compare nested lists and dicts of tensors."""
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs)
        return
    keys = theirs if isinstance(theirs, dict) else range(len(theirs))
    assert len(ours) == len(theirs)
    for key in keys:
        _same(ours[key], theirs[key])


def test_steps_of_torch_s_own_optimizers_stay_with_each_state(tmp_path: Path) -> None:
    run = Run(tp=2)
    write(Run(), tmp_path / "run")
    file = tmp_path / "run" / f"iter_{ITERATION:07d}" / "mp_rank_00" / MODEL
    found = torch.load(file, weights_only=False)
    inner = found["optimizer"]["optimizer"]
    for group in inner["param_groups"]:
        del group["step"]
    for state in inner["state"].values():
        state["step"] = torch.tensor(3.0)
    torch.save(found, file)
    _convert(tmp_path / "run", tmp_path / "out", run)
    optimizer = _loaded(tmp_path / "out" / f"iter_{ITERATION:07d}" / "mp_rank_01")["optimizer"]["optimizer"]
    assert all(torch.equal(state["step"], torch.tensor(3.0)) for state in optimizer["state"].values())
    assert not any("step" in group for group in optimizer["param_groups"])
    assert tx.verify(tmp_path / "out")


def test_an_optimizer_comes_from_another_framework(tmp_path: Path) -> None:
    """By way of the hub's names: the settings of its groups become those of Megatron's."""
    run = Run(tp=2, pp=2)
    truth = write(Run(tp=2), tmp_path / "run")
    tx.convert(tmp_path / "run", tmp_path / "dcp", to="dcp:hf", config=run.config())
    _convert(tmp_path / "dcp", tmp_path / "out", run, config=run.config())
    wanted = content(run, ranks(run)[1], truth)["optimizer"]
    found = _loaded(tmp_path / "out" / "iter_0000003" / ranks(run)[1].folder(run))["optimizer"]
    _same(found["fp32_from_fp16_params"], wanted["fp32_from_fp16_params"])
    _same(found["optimizer"]["state"], wanted["optimizer"]["state"])
    decays = [group["weight_decay"] for group in found["optimizer"]["param_groups"]]
    assert (decays, found["optimizer"]["param_groups"][0]["step"]) == ([0.1, 0.0], 3)


def test_weights_of_full_precision_need_no_copies(tmp_path: Path) -> None:
    run = Run(tp=2)
    write(Run(), tmp_path / "run")
    tx.convert(tmp_path / "run", tmp_path / "fp32", to="dcp:hf", config=run.config(), weights="fp32")
    _convert(tmp_path / "fp32", tmp_path / "out", run, config=run.config())
    found = _loaded(tmp_path / "out" / "iter_0000003" / "mp_rank_00")
    assert found["model"]["decoder.final_layernorm.weight"].dtype == torch.float32
    assert set(found["optimizer"]) == {"state", "param_groups"}
    assert tx.verify(tmp_path / "out")
    with tx.open(tmp_path / "out") as checkpoint:
        assert not any(name.endswith("/fp32") for name in checkpoint)


def test_weights_of_full_precision_are_held_against_the_manifest(tmp_path: Path) -> None:
    """They have the names of the model's own weights, whose hashes are not theirs."""
    run = Run(tp=2)
    write(Run(), tmp_path / "run")
    _convert(tmp_path / "run", tmp_path / "own", run, config=run.config())
    said: dict[str, Any] = {"to": "dcp:hf", "weights": "fp32", "sync": False}
    assert tx.verify(tmp_path / "own", weights="fp32")
    assert tx.convert(tmp_path / "own", tmp_path / "out", **said).source_against == "manifest"
    with tx.open(tmp_path / "own", weights="fp32") as checkpoint:
        entry = next(each for each in checkpoint.container.entries.values() if len(each.extents) == 2)
        extent = entry.extents[0]
        assert entry.dtype == "F32"
    file = tmp_path / "own" / extent.file
    data = bytearray(file.read_bytes())
    data[extent.offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(TransaxleError) as caught:
        tx.convert(tmp_path / "own", tmp_path / "again", **said)
    assert {each.code for each in caught.value.refusals} == {"CORRUPT"}
    assert not tx.verify(tmp_path / "own", weights="fp32")
    assert not tx.verify(tmp_path / "own")


def test_padding_is_that_of_the_ranks(tmp_path: Path) -> None:
    run = Run()
    truth = _hub(tmp_path / "hub", run)
    rows = {"embedding.word_embeddings.weight", "output_layer.weight"}
    cases: tuple[tuple[dict[str, Any], int], ...] = (({}, 128), ({"tp": 2}, 128), ({"tp": 2, "axes": {"p": 7}}, 24))
    for options, wanted in cases:
        out = tmp_path / f"out{len(options)}"
        tx.convert(tmp_path / "hub", out, to="megatron_torch", **options)
        model = _loaded(out / "release" / "mp_rank_00")["model"]
        assert {model[name].shape[0] for name in rows} == {wanted}
        assert torch.equal(model["output_layer.weight"][:24], truth[""]["lm_head.weight"][:24])
    # from more padding to less, and back
    tx.convert(tmp_path / "out0", tmp_path / "less", to="megatron_torch", make_vocab_size_divisible_by=1)
    assert _loaded(tmp_path / "less" / "release" / "mp_rank_00")["model"]["output_layer.weight"].shape[0] == 41
    tx.convert(tmp_path / "less", tmp_path / "more", to="megatron_torch", tp=4, make_vocab_size_divisible_by=3)
    parts = [
        _loaded(tmp_path / "more" / "release" / f"mp_rank_{n:02d}")["model"]["output_layer.weight"] for n in range(4)
    ]
    assert torch.equal(torch.cat(parts)[:41], truth[""]["lm_head.weight"])
    assert torch.cat(parts).shape[0] == 48
    assert not torch.cat(parts)[41:].any()
    assert tx.verify(tmp_path / "less")
    assert tx.verify(tmp_path / "more")


REFUSED = [
    (Run(pp=3), "4 layers do not divide into 3 pipeline stages", "another --pp"),
    (Run(ep=3, sparse=ALL), "4 experts do not divide into 3", "another --ep"),
    (Run(ep=2), "0 experts do not divide into 2", "another --ep"),
    (Run(tp=3), "4 attention heads do not divide over 3", "different --tp"),
]


@pytest.mark.parametrize(("run", "message", "hint"), REFUSED, ids=str)
def test_ranks_that_do_not_fit(run: Run, message: str, hint: str, tmp_path: Path) -> None:
    _hub(tmp_path / "hub", run)
    with pytest.raises(TransaxleError) as caught:
        _convert(tmp_path / "hub", tmp_path / "out", run)
    assert message in str(caught.value)
    assert hint in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_formats_without_ranks(tmp_path: Path) -> None:
    _hub(tmp_path / "hub", Run())
    for to, dialect in (("hf", ""), ("safetensors:hf", ""), ("dcp", ""), ("safetensors:megatron", ":megatron")):
        with pytest.raises(TransaxleError, match=r"has no files for each rank") as caught:
            tx.convert(tmp_path / "hub", tmp_path / "out", to=to, tp=2)
        first, second = "torch_dist", f"megatron_torch{dialect}"
        assert f'or write --to {first} (to="{first}") or --to {second} or --to vllm_sharded.' in str(caught.value)
    with pytest.raises(ValueError, match="tp must be"):
        tx.convert(tmp_path / "hub", tmp_path / "out", to="megatron_torch", tp=0)


def test_an_optimizer_without_copies(tmp_path: Path) -> None:
    write(Run(), tmp_path / "run")
    tx.convert(tmp_path / "run", tmp_path / "state", to="dcp")
    with tx.open(tmp_path / "state") as checkpoint:
        kept = {
            name: torch.frombuffer(bytearray(each.tobytes()), dtype=torch.uint8) for name, each in checkpoint.items()
        }
        assert len(kept) == 135
    shutil.rmtree(tmp_path / "state")
    file = tmp_path / "run" / f"iter_{ITERATION:07d}" / "mp_rank_00" / MODEL
    found = torch.load(file, weights_only=False)
    del found["optimizer"]["fp32_from_fp16_params"]
    torch.save(found, file)
    with pytest.raises(TransaxleError, match="no full-precision copy of this weight"):
        tx.convert(tmp_path / "run", tmp_path / "out", to="megatron_torch", tp=2, config=Run().config())
    tx.convert(tmp_path / "run", tmp_path / "out", to="megatron_torch", tp=2, config=Run().config(), optimizer=False)
    assert (tmp_path / "out" / TRACKER).read_text() == "release"


def test_codes_are_not_trained(tmp_path: Path) -> None:
    write(Run(), tmp_path / "run")
    given: dict[str, Any] = {"config": Run().config(), "to": "megatron_torch", "encode": "float8_block"}
    source = tmp_path / "run"
    with pytest.raises(TransaxleError, match="F8_E4M3 codes") as refused:
        tx.convert(source, tmp_path / "out", **given)
    coded = [refusal.where.tensor for refusal in refused.value.refusals]
    assert len(coded) == len(set(coded)) == 4 * LAYERS
    assert not (tmp_path / "out").exists()
    assert tx.convert(source, tmp_path / "out", optimizer=False, verify=True, **given).recoded


def test_files_with_an_optimizer_are_intact_without_it(tmp_path: Path) -> None:
    write(Run(), tmp_path / "run")
    _convert(tmp_path / "run", tmp_path / "out", Run(tp=2, pp=2))
    found = tx.verify(tmp_path / "out", optimizer=False)
    assert found
    assert found.tensors == tx.verify(tmp_path / "out").tensors > 27, "a verdict is on all bytes"
