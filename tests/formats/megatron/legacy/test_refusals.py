"""What is wrong with the folders of a run is said, and nothing is guessed or executed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.formats.dcp.damage import MARKER, Evil
from tests.formats.megatron.legacy.run import FLAT, MODEL, Run, hub, write
from tests.formats.refusals import refuses
from transaxle.errors import TransaxleError

ALL = (0, 1, 2, 3)
ITERATION = "iter_0000007"
Edit = Callable[[dict[Any, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test writes its run."""
    return tmp_path / "run"


def _edited(file: Path, edit: Edit) -> None:
    value = torch.load(file, weights_only=False)
    edit(value)
    torch.save(value, file)


def _refused(folder: Path, code: str, *words: str, **options: Any) -> TransaxleError:
    with refuses(code) as caught:
        tx.convert(folder, folder.parent / "out", to="hf", **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (folder.parent / "out").exists()
    return caught.value


MISSING = [
    (Run(tp=2), "mp_rank_01", "tp 2"),
    (Run(pp=2), "mp_rank_00_001", "pp 2"),
    (Run(tp=2, ep=2, pp=2, sparse=ALL), "mp_rank_01_001_000", "tp 2 pp 2 ep 2"),
    (Run(tp=2, ep=2, etp=1, sparse=ALL), "mp_rank_01_001", "ep 2"),
]


@pytest.mark.parametrize(("run", "name", "words"), MISSING, ids=str)
def test_a_missing_rank(run: Run, name: str, words: str, folder: Path) -> None:
    write(run, folder)
    shutil.rmtree(folder / ITERATION / name)
    _refused(folder, "INCOMPLETE", f"{ITERATION}/{name}", words, "Copy the missing folders")


def test_the_folder_of_one_rank(folder: Path) -> None:
    write(Run(tp=2), folder)
    with pytest.raises(TransaxleError, match="Give the folder above"):
        tx.open(folder / ITERATION / "mp_rank_00")


def test_a_missing_optimizer_file(folder: Path) -> None:
    truth = write(Run(tp=2, optimizer="flat"), folder)
    (folder / ITERATION / "mp_rank_01" / FLAT).unlink()
    _refused(folder, "INCOMPLETE", "some ranks' optimizers have no fp32 of it", optimizer=True)
    (folder / ITERATION / "mp_rank_00" / FLAT).unlink()
    _refused(folder, "INCOMPLETE", FLAT, "--no-optimizer", optimizer=True)
    with tx.open(folder, optimizer=False) as checkpoint:
        assert len(checkpoint) == 27
        assert checkpoint.metadata["left_behind"]["optimizer"] == "not wanted"
        assert len(truth[""]) == 39


@pytest.mark.parametrize(("file", "key"), [(MODEL, "args"), (MODEL, "rng_state"), (FLAT, "iteration")])
def test_a_hostile_pickle_is_not_executed(file: str, key: str, folder: Path) -> None:
    write(Run(optimizer="flat"), folder)
    _edited(folder / ITERATION / "mp_rank_00" / file, lambda found: found.update({key: Evil(folder)}))
    _refused(folder, "UNSAFE_PICKLE", "posix.system", optimizer=True)
    assert not (folder / MARKER).exists()


def test_enums_among_the_arguments_are_only_described(folder: Path) -> None:
    enums = pytest.importorskip("megatron.core.transformer.enums")
    run = Run(args={"attention_backend": enums.AttnBackend.unfused, "params_dtype": torch.bfloat16})
    write(run, folder)
    with tx.open(folder) as checkpoint:
        assert checkpoint.metadata["megatron"]["iteration"] == 7
        assert checkpoint.metadata["megatron"]["parallel"] == {"tp": 1, "pp": 1, "ep": 1, "etp": 1}


def _exchanged(one: Path, other: Path) -> None:
    beside = one.with_name("beside")
    for old, new in ((one, beside), (other, one), (beside, other)):
        old.rename(new)


EXCHANGED = [
    (Run(tp=2), "mp_rank_00", "mp_rank_01"),
    (Run(tp=2, optimizer="flat"), "mp_rank_00", "mp_rank_01"),
    (Run(tp=2, pp=2, optimizer=None), "mp_rank_01_000", "mp_rank_01_001"),
    (Run(pp=4, args={"use_tp_pp_dp_mapping": True}), "mp_rank_00_001", "mp_rank_00_002"),
    (Run(ep=2, sparse=ALL), "mp_rank_00_000", "mp_rank_00_001"),
    (Run(tp=2, ep=2, etp=1, sparse=ALL), "mp_rank_00_000", "mp_rank_01_001"),
]


@pytest.mark.parametrize(("run", "one", "other"), EXCHANGED, ids=str)
def test_files_in_folders_of_other_ranks(run: Run, one: str, other: str, folder: Path) -> None:
    """Their shapes are equal, and their norms: only the args differ."""
    write(run, folder)
    _exchanged(folder / ITERATION / one, folder / ITERATION / other)
    _refused(folder, "CORRUPT", f"{one}/{MODEL}", "its args say that rank", f"folder is {other}", "into its own folder")
    _exchanged(folder / ITERATION / one, folder / ITERATION / other)
    shutil.copy(folder / ITERATION / one / MODEL, folder / ITERATION / other / MODEL)
    _refused(folder, "CORRUPT", f"{other}/{MODEL}", "is a copy of", f"{one}/{MODEL}", "Copy this rank's own file")


def test_ranks_of_a_converter_have_one_number(folder: Path) -> None:
    """Megatron's `tools/checkpoint/convert.py` writes all files in one process, as rank 0 of all."""
    truth = write(Run(tp=2, pp=2, optimizer=None, args={"rank": 0}), folder)
    tx.convert(folder, folder.parent / "out", to="hf")
    found = load_file(folder.parent / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in truth[""].items())
    shutil.copy(folder / ITERATION / "mp_rank_00_001" / MODEL, folder / ITERATION / "mp_rank_01_001" / MODEL)
    shutil.rmtree(folder.parent / "out")
    _refused(folder, "CORRUPT", "mp_rank_01_001", "is a copy of")


def test_a_folder_of_another_run(folder: Path) -> None:
    write(Run(tp=2), folder)
    shutil.copytree(folder / ITERATION / "mp_rank_01", folder / ITERATION / "mp_rank_02")
    _refused(folder, "CORRUPT", "mp_rank_02", "no rank of a run with tp 2 pp 1")
    (folder / ITERATION / "mp_rank_02").rename(folder / ITERATION / "mp_rank_001_000")
    _refused(folder, "CORRUPT", "mp_rank_001_000")


def _model(**changes: Any) -> Edit:
    """Change tensors of the model; None removes one, a number is added to it."""

    def edit(found: dict[Any, Any]) -> None:
        for name, change in changes.items():
            key = NAMES[name]
            if change is None:
                found["model"].pop(key)
            else:
                found["model"][key] = found["model"][key] + change if key in found["model"] else torch.zeros(4, 4)

    return edit


NAMES = {
    "fc1": "decoder.layers.0.mlp.experts.weight1", "fc2": "decoder.layers.2.mlp.linear_fc2.weight",
    "expert": "decoder.layers.2.mlp.experts.linear_fc2.weight1", "norm": "decoder.final_layernorm.weight",
    "head": "output_layer.weight", "adapter": "decoder.layers.0.adapter.weight",
}  # fmt: skip
OLD_MODEL = {"language_model": {"encoder": {"layers.0.attention.query_key_value.weight": torch.zeros(4, 4)}}}
EDITS: dict[str, tuple[Run, str, Edit, str, tuple[str, ...]]] = {
    "other layers": (Run(tp=2), "mp_rank_01", lambda found: setattr(found["args"], "num_layers", 8), "CORRUPT",
        ("mp_rank_01", "num_layers", "8")),
    "another activation": (
        Run(tp=2), "mp_rank_01", lambda found: setattr(found["args"], "swiglu", False), "CORRUPT", ("swiglu", "False")),
    "another iteration": (Run(tp=2), "mp_rank_01", lambda found: found.update(iteration=8), "CORRUPT",
        ("mp_rank_01", "have iteration 8; those of mp_rank_00 have 7")),
    "another copy of a tied embedding": (Run(tp=2, pp=2, tied=True), "mp_rank_01_001", _model(head=1), "UNEQUAL_COPIES",
        ("embedding.word_embeddings.weight", "two pipeline stages")),
    "another copy of a norm": (Run(tp=2), "mp_rank_01", _model(norm=1), "UNEQUAL_COPIES", (NAMES["norm"],)),
    "an expert that is missing": (Run(ep=2, sparse=ALL, optimizer=None), "mp_rank_00_001", _model(expert=None),
        "INCOMPLETE", ("there is nothing of [1]", "linear_fc2.weight")),
    "a tensor that other ranks have": (Run(tp=2, optimizer=None), "mp_rank_01", _model(fc2=None), "INCOMPLETE",
        (NAMES["fc2"], "tensor-parallel ranks [1] do not hold it")),
    "no version": (Run(), "mp_rank_00", lambda found: found.update(checkpoint_version=None), "UNSUPPORTED",
        ("checkpoint_version", "q, k and v may be in another order")),
    "an old version": (Run(), "mp_rank_00", lambda found: found.update(checkpoint_version=2.0), "UNSUPPORTED",
        ("checkpoint_version", "q, k and v may be in another order")),
    "a model of before megatron-core": (Run(), "mp_rank_00", lambda found: found.update(model=OLD_MODEL), "UNSUPPORTED",
        ("before megatron-core", "--use-mcore-models")),
    "experts in one tensor": (Run(ep=2, sparse=ALL, optimizer=None), "mp_rank_00_001", _model(fc1=1), "UNSUPPORTED",
        (NAMES["fc1"], "--ckpt-format torch_dist")),
    "a tensor that no table knows": (
        Run(tp=2, optimizer=None), "*", _model(adapter=1), "UNSUPPORTED", (NAMES["adapter"], "has no line for it")),
}  # fmt: skip


@pytest.mark.parametrize(("run", "rank", "edit", "code", "words"), EDITS.values(), ids=EDITS.keys())
def test_files_that_were_changed_are_refused(
    run: Run, rank: str, edit: Edit, code: str, words: tuple[str, ...], folder: Path
) -> None:
    write(run, folder)
    for file in (folder / ITERATION).glob(f"{rank}/{MODEL}"):
        _edited(file, edit)
    _refused(folder, code, *words)


RUNS: dict[str, tuple[Run, str, tuple[str, ...]]] = {
    "layers that are not there": (
        Run(pp=2, stages=((1, 3),)), "INCOMPLETE", ("2 layers", "nothing of [1]", "layer 2 of a rank that has 2")),
    "layers that do not divide": (Run(pp=2, vp=2, stages=((2, 1), (1, 0)), args={"num_layers": 5}), "UNSUPPORTED",
        ("5 layers do not divide into 2 stages",)),
    "a layout of too few stages": (Run(pp=2, vp=2, stages=((1, 2), (1, 0)),
        args={"pipeline_model_parallel_layout": "Et|t"}), "UNSUPPORTED", ("is no layout of 2 x 2 stages",)),
    "a layout that is no text": (Run(pp=2, vp=2, stages=((1, 2), (1, 0)),
        args={"pipeline_model_parallel_layout": {"a": 1}}), "UNSUPPORTED", ("is no layout of 2 x 2 stages",)),
    "experts cut over more ranks than the rest": (Run(sparse=ALL, args={"expert_tensor_parallel_size": 2}),
        "UNSUPPORTED", ("only the last one's experts are there",)),
    "another padding": (
        Run(tp=2, args={"padded_vocab_size": 64}), "SHAPE_MISMATCH", ("64 rows by the args of the run",)),
}  # fmt: skip


@pytest.mark.parametrize(("run", "code", "words"), RUNS.values(), ids=RUNS.keys())
def test_runs_that_contradict_their_args_are_refused(run: Run, code: str, words: tuple[str, ...], folder: Path) -> None:
    write(run, folder)
    _refused(folder, code, *words)


def test_no_arguments(folder: Path) -> None:
    truth = write(Run(tp=2, optimizer=None), folder)
    for rank in ("mp_rank_00", "mp_rank_01"):
        _edited(folder / ITERATION / rank / MODEL, lambda found: found.pop("args"))
    with tx.open(folder) as checkpoint, tx.open(folder, config=folder / "config.json") as same:
        assert checkpoint.as_dialect("hf").keys() == same.as_dialect("hf").keys() == truth[""].keys()
    write(Run(tp=2, pp=2, optimizer=None), folder.parent / "staged")
    for file in (folder.parent / "staged" / ITERATION).glob(f"*/{MODEL}"):
        _edited(file, lambda found: found.pop("args"))
    _refused(folder.parent / "staged", "UNSUPPORTED", "it holds no args")


@pytest.mark.parametrize("tp", [1, 2])
def test_the_config_of_another_model(tp: int, folder: Path) -> None:
    run = Run(tp=tp, optimizer=None)
    write(run, folder)
    changes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 3}
    _refused(folder, "SHAPE_MISMATCH", "num_attention_heads 8", config={**run.config(), **changes})


def _buffer(found: dict[Any, Any]) -> Any:
    return found[0][torch.bfloat16, torch.float32]


FLAT_FAULTS: list[tuple[Edit, str]] = [
    (lambda found: _buffer(found).update(param=_buffer(found)["param"].flip(0)), "has other values than the weight"),
    (lambda found: _buffer(found).update(exp_avg=_buffer(found)["exp_avg"][:-8].clone()), "exp_avg has"),
    (lambda found: found.update({0: {(torch.float16, torch.float32): _buffer(found)}}), "is of F16 parameters"),
]


@pytest.mark.parametrize(("edit", "words"), FLAT_FAULTS)
def test_an_unknown_order_of_flat_buffers(edit: Edit, words: str, folder: Path) -> None:
    write(Run(optimizer="flat", biased=True), folder)
    _edited(folder / ITERATION / "mp_rank_00" / FLAT, edit)
    _refused(folder, "UNSUPPORTED", words, "--no-optimizer", optimizer=True)
    with tx.open(folder) as checkpoint:  # not asked for: left behind, and said so
        assert not any(name.startswith("optim/") for name in checkpoint)
        assert words in checkpoint.metadata["left_behind"]["optimizer"]


def test_a_load_with_an_optimizer_does_without_only_where_it_is_told_so(folder: Path) -> None:
    write(Run(optimizer="flat", biased=True), folder)
    edit, words = FLAT_FAULTS[0]
    _edited(folder / ITERATION / "mp_rank_00" / FLAT, edit)
    with tx.open(folder) as checkpoint:
        weights = {
            name: torch.nn.Parameter(torch.zeros(t.shape, dtype=torch.bfloat16)) for name, t in checkpoint.items()
        }
    optimizer = torch.optim.AdamW(weights.values())
    with pytest.raises(TransaxleError, match=re.escape(words)):
        tx.load(weights, folder, optimizer=optimizer)
    report = tx.load(weights, folder, optimizer=optimizer, strict=False)
    assert (report.tensors, report.states, report.missing) == (len(weights), 0, ("optimizer",))


def test_flat_buffers_of_an_older_form(folder: Path) -> None:
    write(Run(optimizer="flat"), folder)
    _edited(folder / ITERATION / "mp_rank_00" / FLAT, lambda found: found.pop("buckets_coalesced"))
    _refused(folder, "UNSUPPORTED", "February 2024", optimizer=True)


def _swapped(found: dict[Any, Any]) -> None:
    copies = found["optimizer"]["fp32_from_fp16_params"][0]
    copies[1], copies[5] = copies[5], copies[1]


def _groups(found: dict[Any, Any]) -> Any:
    return found["optimizer"]["optimizer"]["param_groups"]


def _another_shape(found: dict[Any, Any]) -> None:
    state = found["optimizer"]["optimizer"]["state"][0]
    state["exp_avg"] = state["exp_avg"].T.clone()


NUMBERED_FAULTS: list[tuple[Edit, str]] = [
    (_swapped, "has other values than the weight"),
    (lambda found: _groups(found)[0]["params"].pop(), "parameters; by their shapes"),
    (lambda found: [group.pop("wd_mult") for group in _groups(found)], "do not say wd_mult"),
    (lambda found: [group.update(wd_mult=1.0) for group in _groups(found)], "have the same settings"),
    (_another_shape, "has the shape"),
]


@pytest.mark.parametrize(("edit", "words"), NUMBERED_FAULTS)
def test_an_unknown_order_of_numbered_states(edit: Edit, words: str, folder: Path) -> None:
    write(Run(), folder)
    _edited(folder / ITERATION / "mp_rank_00" / MODEL, edit)
    _refused(folder, "UNSUPPORTED", words, optimizer=True)
    tx.convert(folder, folder.parent / "weights", to="hf")


def test_what_is_left_behind_is_listed(folder: Path) -> None:
    write(Run(pp=2), folder)
    (folder / "events.out.tfevents").write_text("a log")
    (folder / ITERATION / "mp_rank_00_000" / "notes.txt").write_text("")
    with tx.open(folder) as checkpoint:
        left = checkpoint.metadata["left_behind"]
        assert left["rng_state"]
        assert left["decoder.layers.3.self_attention.linear_proj._extra_state"]
        assert set(checkpoint.container.ignored) == {"events.out.tfevents", f"{ITERATION}/mp_rank_00_000/notes.txt"}
        assert checkpoint.container.carried == ("config.json",)


def test_full_precision_copies_are_the_weights_where_wanted(folder: Path) -> None:
    run = Run(tp=2)
    truth = write(run, folder)
    with tx.open(folder, weights="fp32") as checkpoint, tx.open(folder, weights="lp") as low:
        name = "decoder.final_layernorm.weight"
        assert checkpoint[name].dtype == "F32"
        assert checkpoint[name].tobytes() == truth["fp32"]["model.norm.weight"].numpy().tobytes()
        assert f"optim/{name}/fp32" not in checkpoint
        assert low[name].dtype == "BF16"
        assert f"optim/{name}/fp32" in low
    write(Run(optimizer=None), folder.parent / "bare")
    with pytest.raises(TransaxleError, match="no full-precision copy"):
        tx.open(folder.parent / "bare", weights="fp32")


def test_groups_keep_their_settings(folder: Path) -> None:
    run = Run(tp=2, ep=2, sparse=ALL)
    write(run, folder)
    with tx.open(folder) as checkpoint:
        decays, bare, experts = checkpoint.metadata["param_groups"]
        assert (decays["weight_decay"], bare["weight_decay"], experts["is_expert_parallel"]) == (0.1, 0.0, True)
        assert "decoder.layers.3.mlp.experts.linear_fc1.weight3" in experts["params"]
        assert "decoder.final_layernorm.weight" in bare["params"]
        total = len(decays["params"]) + len(bare["params"]) + len(experts["params"])
        assert total == sum(not name.startswith("optim/") for name in checkpoint)
        assert len(hub(run)[""]) > total
