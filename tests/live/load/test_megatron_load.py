"""Megatron jobs load a hub folder: every parameter of every rank is what is cut by hand from the hub's tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.formats.megatron import gpt_job
from tests.formats.megatron.gpt_job import Degrees
from tests.live.ranks import run
from tests.oracles import hub
from transaxle import convert
from transaxle.errors import Refused, TransaxleError
from transaxle.live.load import load

pytestmark = pytest.mark.peers

_SIZES: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 50,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _SIZES,
    "wide": {**_SIZES, "hidden_size": 256, "intermediate_size": 1024, "head_dim": 32},
    "tied": {**_SIZES, "tie_word_embeddings": True},
    "mixture": {**_SIZES, **_EXPERTS, "mlp_only_layers": []},
    "mixed": {**_SIZES, **_EXPERTS, "mlp_only_layers": [0, 2]},
}
JOBS = [
    ("dense", Degrees(tp=2, pp=2)),
    ("dense", Degrees(pp=4)),
    ("dense", Degrees(tp=4, padded=256)),
    ("dense", Degrees(tp=2, pp=2, vp=2)),
    ("tied", Degrees(tp=2, pp=2)),
    ("mixture", Degrees(pp=2, ep=2)),
    ("mixture", Degrees(tp=2, ep=2)),
    ("mixture", Degrees(tp=2, ep=2, etp=1)),
    ("mixed", Degrees(pp=2, ep=2)),
]
"""Models on four ranks. 50 rows of vocabulary padded to 256 leave three of four ranks nothing else than padding."""


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A hub folder of each model."""
    folders = {}
    for number, (name, sizes) in enumerate(MODELS.items()):
        config, tensors = hub.make(sizes, number)
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config))
        save_file({key: value.float() for key, value in tensors.items()}, folder / hub.WEIGHTS)
        folders[name] = str(folder)
    return folders


def _states(models: list[Any]) -> dict[str, Any]:
    """The sharded state dict that Megatron's own code hands to its checkpoints; all parameters are made NaN."""
    for parameter in (each for model in models for each in model.parameters()):
        parameter.data.fill_(torch.nan)
    if len(models) == 1:
        return {"model": models[0].sharded_state_dict()}
    return {f"model{number}": model.sharded_state_dict() for number, model in enumerate(models)}


def _loaded(rank: int, world: int, config: dict[str, Any], degrees: Degrees, source: str) -> dict[str, Any]:
    with gpt_job.models(config, degrees) as models:
        report = load(_states(models), source)
        tensors = gpt_job.whole(config, source, degrees.padded)
        differ = [
            name
            for model in models
            for name, wanted in gpt_job.parts(model, tensors).items()
            if not torch.equal(model.get_parameter(name), wanted)
        ]
        own = sum(parameter.nbytes for model in models for parameter in model.parameters())
    return {**report.as_json(), "differ": differ, "own": own}


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "degrees"), JOBS, ids=str)
def test_every_parameter_is_the_one_cut_by_hand(name: str, degrees: Degrees, hubs: dict[str, str]) -> None:
    found = run(4, _loaded, MODELS[name], degrees, hubs[name])
    for each in found:
        assert each["differ"] == []
        assert each["bytes_read"] <= 1.05 * each["bytes_needed"]
        assert each["bytes_needed"] <= each["own"]
        assert any(key.endswith("linear_qkv._extra_state") for key in each["untouched"])
    rows = {"embedding.word_embeddings.weight": (50, degrees.padded)}
    rows |= {} if name == "tied" else {"output_layer.weight": (50, degrees.padded)}
    assert all(each["padded"] == rows for each in found)
    assert {each["dialect"] for each in found} == {"megatron_layers" if name == "mixed" else "megatron_dist"}


def _read_by_the_system(rank: int, world: int, source: str) -> tuple[int, int]:
    """Load twice, the second time with all imports done; return what the kernel says was read, and the rank's own."""
    with gpt_job.models(MODELS["wide"], Degrees(tp=2, pp=2, padded=50)) as (model,):
        load(_states([model]), source)
        before = _bytes_read()
        load(_states([model]), source)
        read = _bytes_read() - before
        assert not any(bool(parameter.isnan().any()) for parameter in model.parameters())
        return read, sum(parameter.nbytes for parameter in model.parameters())


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_the_system_confirms_what_each_rank_has_read(hubs: dict[str, str]) -> None:
    found = run(4, _read_by_the_system, hubs["wide"])
    for read, own in found:
        assert 0.5 * own < read <= 1.05 * own, found


def _through_megatron(
    rank: int, world: int, config: dict[str, Any], writer: Degrees, reader: Degrees, source: str, folder: str
) -> tuple[list[str], str]:
    from megatron.core import dist_checkpointing

    gpt_job.save(rank, world, config, source, folder, writer.tp, writer.pp, writer.ep)
    with gpt_job.models(config, reader) as (model,):
        state = _states([model])
        wanted = dist_checkpointing.load(_states([model]), folder)["model"]
        wanted = {name: value.clone() for name, value in wanted.items() if isinstance(value, torch.Tensor)}
        state = _states([model])
        report = load(state, folder)
        assert report.bytes_read <= 1.05 * report.bytes_needed
        return [n for n, value in model.named_parameters() if not torch.equal(value, wanted[n])], report.dialect


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    [
        ("tied", Degrees(tp=2, pp=2), Degrees(pp=4)),
        ("mixture", Degrees(pp=2, ep=2), Degrees(tp=2, ep=2)),
        ("mixed", Degrees(pp=4), Degrees(ep=4)),
    ],
    ids=str,
)
def test_a_folder_of_megatron_gives_what_megatron_itself_loads(
    name: str, writer: Degrees, reader: Degrees, hubs: dict[str, str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "iter_0000003")
    found = run(4, _through_megatron, MODELS[name], writer, reader, hubs[name], folder)
    assert found == [([], "identity")] * 4


def _of_any_form(
    rank: int, world: int, config: dict[str, Any], degrees: Degrees, source: str, folders: list[str]
) -> list[tuple[str, str]]:
    """Load every folder, into layers that are an axis and into layers with numbers; return what differs."""
    with gpt_job.models(config, degrees) as (model,):
        wanted = gpt_job.parts(model, gpt_job.whole(config, source, degrees.padded))
        differ = []
        for folder in folders:
            for numbered in (False, True):
                for parameter in model.parameters():
                    parameter.data.fill_(torch.nan)
                load(model.sharded_state_dict(metadata={"non_homogeneous_layers": numbered}), folder)
                differ += [(folder, n) for n, value in wanted.items() if not torch.equal(model.get_parameter(n), value)]
    return differ


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_the_source_may_have_any_format_and_dialect(name: str, hubs: dict[str, str], tmp_path: Path) -> None:
    forms = ("torch_dist", "torch_dist:megatron_layers", "safetensors:te", "dcp:transformers", "torch:torchtitan")
    folders = [str(tmp_path / str(number)) for number in range(len(forms))]
    for form, folder in zip(forms, folders, strict=True):
        convert(hubs[name], folder, to=form)
    assert run(4, _of_any_form, MODELS[name], Degrees(tp=2, pp=2), hubs[name], folders) == [[]] * 4


def _rows(rank: int, world: int, source: str, degrees: Degrees, options: dict[str, Any]) -> Any:
    with gpt_job.models(MODELS["dense"], degrees) as models:
        return load(_states(models), source, **options).padded


def test_padding_of_another_job_is_cut_off_where_it_is_known(hubs: dict[str, str], tmp_path: Path) -> None:
    """A folder of DCP does not say which of its 64 rows are vocabulary; a config does."""
    from tests.live.save.test_megatron_save import saved

    folder = str(tmp_path / "dcp")
    run(4, saved, MODELS["dense"], Degrees(tp=2, pp=2), hubs["dense"], folder, "dcp:identity")
    with pytest.raises(
        Refused, match=r"(?s)embedding.*\[56, 64\] in the model, but \[64, 64\].*give config="
    ) as caught:
        run(4, _rows, folder, Degrees(tp=4, padded=56), {"config": {"vocab_size": None}})
    assert {refusal.code for refusal in caught.value.refusals} == {"SHAPE_MISMATCH"}
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    found = run(4, _rows, folder, Degrees(tp=4, padded=56), {"config": hubs["dense"]})
    assert found == [dict.fromkeys(names, (64, 56))] * 4
    with pytest.raises(Refused, match=r"\[48, 64\] in the model, but \[64, 64\]"):
        run(4, _rows, folder, Degrees(tp=4, padded=48), {"config": hubs["dense"]})


def _refused(rank: int, world: int, config: dict[str, Any], degrees: Degrees, source: str, **options: Any) -> Any:
    with gpt_job.models(config, degrees) as models:
        try:
            load(_states(models), source, **options)
        except TransaxleError as error:
            untouched = all(bool(value.isnan().all()) for model in models for value in model.parameters())
            return [(each.code, each.where.tensor) for each in error.refusals], untouched
    return None


def test_tensors_that_are_missing_are_refused(hubs: dict[str, str], tmp_path: Path) -> None:
    tensors = load_file(Path(hubs["dense"], hub.WEIGHTS))
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / hub.WEIGHTS)
    (tmp_path / "config.json").write_bytes(Path(hubs["dense"], "config.json").read_bytes())
    found = run(4, _refused, MODELS["dense"], Degrees(tp=2, pp=2), str(tmp_path))
    assert all(each == found[0] for each in found)
    ((codes, untouched),) = {(tuple(codes), untouched) for codes, untouched in found}
    assert {code for code, _ in codes} <= {"MISSING_TENSOR", "INCOMPLETE"}
    assert untouched


def test_other_sizes_are_refused(hubs: dict[str, str]) -> None:
    config = {**MODELS["dense"], "intermediate_size": 128, "num_hidden_layers": 8}
    found = run(4, _refused, config, Degrees(tp=2, pp=2), hubs["dense"])
    names = {name for each, _ in found for code, name in each if code == "SHAPE_MISMATCH"}
    assert {"decoder.layers.mlp.linear_fc1.weight", "decoder.layers.self_attention.linear_proj.weight"} <= names
    assert all(untouched for _, untouched in found)


def _whole_model(rank: int, world: int, source: str, degrees: Degrees) -> str:
    with gpt_job.models(MODELS["dense"], degrees) as (model,), pytest.raises(Refused) as caught:
        load(model, source)
    return str(caught.value)


def test_a_model_that_is_shared_out_must_say_how(hubs: dict[str, str]) -> None:
    found = run(4, _whole_model, hubs["dense"], Degrees(tp=2, pp=2))
    assert all("TP 2 x PP 2" in each and "sharded_state_dict()" in each for each in found)
