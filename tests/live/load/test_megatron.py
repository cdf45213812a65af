"""Megatron jobs load a hub folder: every parameter of every rank is what is cut by hand from the hub's tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.checkpoints import WHOLE
from tests.formats.megatron import gpt_job
from tests.formats.megatron.gpt_job import Degrees
from tests.live.ranks import run
from tests.oracles import hub
from tests.oracles.quiet import quiet
from transaxle.errors import Refused, TransaxleError
from transaxle.live.load import load
from transaxle.live.model.state_tensors import leaves
from transaxle.live.save import save

pytestmark = pytest.mark.peers
_SIZES: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 50,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _SIZES,
    "tied": {**_SIZES, "tie_word_embeddings": True},
    "mixture": {**_SIZES, **_EXPERTS, "mlp_only_layers": []},
    "mixed": {**_SIZES, **_EXPERTS, "mlp_only_layers": [0, 2]},
}
JOBS = [
    ("dense", Degrees(tp=2, pp=2)), ("dense", Degrees(tp=4, padded=256)), ("dense", Degrees(tp=2, pp=2, vp=2)),
    ("tied", Degrees(tp=2, pp=2)), ("mixture", Degrees(pp=2, ep=2)), ("mixture", Degrees(tp=2, ep=2)),
    ("mixture", Degrees(tp=2, ep=2, etp=1)), ("mixed", Degrees(pp=2, ep=2)),
]  # fmt: skip
"""Models on four ranks. 50 rows of vocabulary padded to 256 leave three of four ranks nothing else than padding."""


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
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
def test_every_parameter_equals_the_shard_cut_by_hand(name: str, degrees: Degrees, hubs: dict[str, str]) -> None:
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
def test_a_megatron_checkpoint_loads_as_megatron_loads_it(
    name: str, writer: Degrees, reader: Degrees, hubs: dict[str, str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "iter_0000003")
    found = run(4, _through_megatron, MODELS[name], writer, reader, hubs[name], folder)
    assert found == [([], "identity")] * 4


def _rows(rank: int, world: int, source: str, degrees: Degrees, options: dict[str, Any]) -> Any:
    with gpt_job.models(MODELS["dense"], degrees) as models:
        return load(_states(models), source, **options).padded


def test_vocabulary_padding_of_another_size_needs_the_config(hubs: dict[str, str], tmp_path: Path) -> None:
    """A folder of DCP does not say which of its 64 rows are vocabulary; a config does."""
    folder = str(tmp_path / "dcp")
    run(2, saved, MODELS["dense"], Degrees(tp=2), hubs["dense"], folder, "dcp:identity")
    said = r"(?s)embedding.*\[56, 64\] in the model, but \[64, 64\].*give a config="
    with pytest.raises(Refused, match=said) as caught:
        run(2, _rows, folder, Degrees(tp=2, padded=56), {"config": {"vocab_size": None}})
    assert {refusal.code for refusal in caught.value.refusals} == {"SHAPE_MISMATCH"}
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    found = run(2, _rows, folder, Degrees(tp=2, padded=56), {"config": hubs["dense"]})
    assert found == [dict.fromkeys(names, (64, 56))] * 2
    with pytest.raises(Refused, match=r"\[48, 64\] in the model, but \[64, 64\]"):
        run(2, _rows, folder, Degrees(tp=2, padded=48), {"config": hubs["dense"]})


def _whole_model(rank: int, world: int, source: str, degrees: Degrees) -> str:
    with gpt_job.models(MODELS["dense"], degrees) as (model,), pytest.raises(Refused) as caught:
        load(model, source)
    return str(caught.value)


def test_a_model_parallel_model_must_be_given_as_sharded_state_dict(hubs: dict[str, str]) -> None:
    found = run(2, _whole_model, hubs["dense"], Degrees(tp=2))
    assert all("TP 2" in each and "sharded_state_dict()" in each for each in found)


# Megatron jobs save hub folders: what they loaded comes out again, byte for byte, without the padding.

__all__ = ["hubs"]


def saved(
    rank: int, world: int, config: dict[str, Any], degrees: Degrees, source: str, target: str, to: str
) -> dict[str, Any]:
    with gpt_job.models(config, degrees) as models:
        state = [model.sharded_state_dict() for model in models]
        load({"model": state}, source)
        return save({"model": state}, target, to=to, config=source).as_json()


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "degrees"), [JOBS[2], JOBS[3], JOBS[6], JOBS[7]], ids=str)
def test_a_loaded_hub_folder_is_saved_unchanged(
    name: str, degrees: Degrees, hubs: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    found = run(4, saved, MODELS[name], degrees, hubs[name], str(out), "safetensors:hf")
    truth, written = load_file(Path(hubs[name], hub.WEIGHTS)), load_file(out / hub.WEIGHTS)
    assert written.keys() == truth.keys()
    assert all(torch.equal(written[key], value) for key, value in truth.items())
    assert sum(each["bytes_own"] for each in found) == sum(value.nbytes for value in truth.values())
    assert all(any(key.endswith("._extra_state") for key in each["ignored"]) for each in found)


def test_a_dcp_folder_has_megatron_names_and_padding(hubs: dict[str, str], tmp_path: Path) -> None:
    degrees, out = Degrees(tp=2), tmp_path / "out"
    run(2, saved, MODELS["dense"], degrees, hubs["dense"], str(out), "dcp:identity")
    with tx.open(out) as written:
        assert written["embedding.word_embeddings.weight"].shape == (64, 64)
        assert written["decoder.layers.mlp.linear_fc1.weight"].shape == (4, 192, 64)
    assert run(2, _loaded_again, degrees, hubs["dense"], str(out)) == [[]] * 2


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "degrees"), [JOBS[0], JOBS[3], JOBS[7]], ids=str)
def test_megatron_loads_the_distributed_checkpoint_that_is_saved(
    name: str, degrees: Degrees, hubs: dict[str, str], tmp_path: Path
) -> None:
    out, config = tmp_path / "out", MODELS[name]
    run(4, saved, config, degrees, hubs[name], str(out), "torch_dist")
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    folder = str(out / "release")
    assert run(4, gpt_job.load, config, hubs[name], folder, degrees.tp, degrees.pp, degrees.ep) == [[]] * 4


def _loaded_again(rank: int, world: int, degrees: Degrees, source: str, folder: str) -> list[str]:
    with gpt_job.models(MODELS["dense"], degrees) as (model,):
        load(model.sharded_state_dict(), folder)
        expected = gpt_job.parts(model, gpt_job.whole(MODELS["dense"], source))
        return [name for name, value in expected.items() if not torch.equal(model.get_parameter(name), value)]


def _drifted(rank: int, world: int, source: str, target: str, check: bool) -> list[str]:
    with gpt_job.models(MODELS["dense"], Degrees(tp=2)) as (model,):
        state = model.sharded_state_dict()
        load(state, source)
        if any(state["decoder.layers.0.input_layernorm.weight"].replica_id):
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.data.zero_()
        try:
            save(state, target, config=source, check_copies=check)
        except TransaxleError as error:
            return [f"{each.code} {each.where.tensor}" for each in error.refusals]
    return []


def test_replicas_that_differ_are_refused_or_left_out(hubs: dict[str, str], tmp_path: Path) -> None:
    source, no, out = hubs["dense"], tmp_path / "no", tmp_path / "out"
    told = run(2, _drifted, source, str(no), True)
    assert all(each == told[0] and len(each) == 4 * 4 + 1 for each in told)
    assert "UNEQUAL_COPIES decoder.layers.self_attention.q_layernorm.weight[2, 0]" in told[0]
    assert not no.exists()
    assert run(2, _drifted, source, str(out), False) == [[]] * 2
    truth, written = load_file(Path(source, hub.WEIGHTS)), load_file(out / hub.WEIGHTS)
    assert all(torch.equal(written[name], value) for name, value in truth.items()), "those with replica id 0 are saved"


# Sharded state dicts, entry by entry: boxes, copies that factories make, objects, and what is refused.

EXPERTS, WIDTH, ROWS = 3, 4, 5
"""Of a layer's mixture: experts, columns, and rows of the gate."""


def _mapping() -> Any:
    """Megatron's classes, which are imported when a test asks for them."""
    with quiet():
        from megatron.core.dist_checkpointing import mapping
    return mapping


def _stack() -> dict[str, torch.Tensor]:
    """Two layers of experts, gate above up; a norm; a number."""
    shape = (2, EXPERTS, 2 * ROWS, WIDTH)
    fc1 = torch.arange(2 * EXPERTS * 2 * ROWS * WIDTH, dtype=torch.float32).reshape(shape)
    return {"fc1": fc1, "norm": torch.arange(2.0 * WIDTH).reshape(2, WIDTH), "steps": torch.tensor(7)}


def _source(folder: Path) -> str:
    save_file(_stack(), folder / WHOLE)
    return str(folder)


def _shard(key: str, data: torch.Tensor | None, shape: tuple[int, ...], offset: tuple[int, ...], **more: Any) -> Any:
    local = tuple(data.shape) if data is not None else shape[1:]
    dtype = torch.float32 if data is None else data.dtype
    more = {"replica_id": (0, 0, 0), "prepend_axis_num": len(shape) - len(local), **more}
    return _mapping().ShardedTensor(key, data, dtype, local, shape, offset, None, **more)


def _columns(layer: int, *, copies: bool) -> tuple[torch.nn.Parameter, Any]:
    """A parameter that has its experts side by side as columns; its factory gives the two halves of their rows."""
    weight = torch.nn.Parameter(torch.full((WIDTH, EXPERTS * 2 * ROWS), torch.nan))

    def build(key: str, value: torch.Tensor, replica_id: Any, _: Any) -> dict[str, Any]:
        experts = value.detach().view(WIDTH, EXPERTS, 2 * ROWS).permute(1, 2, 0)
        halves = experts.chunk(2, dim=1)
        data = [half.contiguous() for half in halves] if copies else halves
        shape = (2, EXPERTS, 2 * ROWS, WIDTH)
        boxes = [_shard(key, half, shape, (layer, 0, at * ROWS, 0)) for at, half in enumerate(data)]
        return {"kind": _mapping().LocalNonpersistentObject("columns"), "halves": boxes}

    def merge(built: dict[str, Any]) -> torch.Tensor:
        assert built["kind"] == "columns"
        return torch.cat(built["halves"], dim=1).permute(2, 0, 1).reshape(WIDTH, -1)

    return weight, _mapping().ShardedTensorFactory("fc1", weight, build, merge)


@pytest.mark.parametrize("copies", [False, True])
def test_factories_that_build_views_or_copies_are_filled(copies: bool, tmp_path: Path) -> None:
    weights, factories = zip(*(_columns(layer, copies=copies) for layer in range(2)), strict=True)
    norms = [torch.full((WIDTH,), torch.nan) for _ in range(2)]
    state = {
        "layers": [{"fc1": factory} for factory in factories],
        **{f"{number}.norm": _shard("norm", norm, (2, WIDTH), (number, 0)) for number, norm in enumerate(norms)},
        "steps": _shard("steps", steps := torch.tensor(0), (), ()),
        "extra": _mapping().ShardedObject("fc1._extra_state", b"untouched", (2,), (0,)),
        "own": _mapping().LocalNonpersistentObject(object()),
    }
    assert bool(leaves(state, sharded=True).factories) == copies
    report = load(state, _source(tmp_path))
    truth = _stack()
    assert (report.tensors, report.untouched, steps.item()) == (3, ("fc1._extra_state",), 7)
    for layer, (weight, norm) in enumerate(zip(weights, norms, strict=True)):
        assert torch.equal(weight, truth["fc1"][layer].permute(2, 0, 1).reshape(WIDTH, -1))
        assert torch.equal(norm, truth["norm"][layer])
    saved = save(state, tmp_path / "out", to="safetensors:identity")
    assert saved.ignored == ("fc1._extra_state",)
    written = load_file(tmp_path / "out" / WHOLE)
    assert written.keys() == truth.keys()
    assert all(torch.equal(written[name], value) for name, value in truth.items())


def _norms(*, key: str = "norm", **more: Any) -> list[Any]:
    return [_shard(key, torch.zeros(WIDTH), (2, WIDTH), (layer, 0), **more) for layer in range(2)]


class _Codes(torch.Tensor):
    """A tensor whose memory is not its values."""

    def detach(self) -> _Codes:
        return self


def _broken(_: str, value: torch.Tensor, *__: Any) -> Any:
    raise ValueError("no such split")


def _norm(data: torch.Tensor | None, shape: tuple[int, ...] = (2, WIDTH), offset: tuple[int, ...] = (0, 0)) -> Any:
    return _shard("norm", data, shape, offset)


REFUSED: list[tuple[str, Callable[[], list[Any]], str]] = [
    ("UNSUPPORTED", lambda: [_norm(None)], "without its data"),
    ("UNSUPPORTED", lambda: [_norm(torch.zeros(WIDTH).as_subclass(_Codes))], "a _Codes, whose"),
    ("UNSUPPORTED", lambda: [_norm(torch.zeros(WIDTH, device="meta"))], "meta device"),
    ("UNSUPPORTED", lambda: [_norm(torch.zeros(1).expand(WIDTH))], "share memory"),
    ("UNSUPPORTED", lambda: [_norm(torch.zeros(WIDTH), offset=(2, 0))], "at [2, 0] is no part of [2, 4]"),
    ("SHAPE_MISMATCH", lambda: [_norms()[0], _norm(torch.zeros(WIDTH), (3, WIDTH), (1, 0))], "[2, 4] and [3, 4]"),
    ("DTYPE_MISMATCH", lambda: [_norms()[0], _norm(torch.zeros(4).half(), offset=(1, 0))], "float32 and torch.fl"),
    ("NAME_COLLISION", lambda: [*_norms(), *_norms()], "the same part"),
    ("NAME_COLLISION", lambda: [*_norms(), *_norms(key="there")], "has it as its key"),
    ("UNSUPPORTED", lambda: [_mapping().ShardedTensorFactory("norm", torch.zeros(4), _broken, None)], "no such split"),
    ("UNSUPPORTED", lambda: [_norm(torch.zeros(2, 2), (4, 4), at) for at in ((0, 0), (2, 2))], "no grid"),
    ("UNSUPPORTED", lambda: [_norm(torch.zeros(3, 4), (4, 4)), _norm(torch.zeros(2, 4), (4, 4), (2, 0))], "no grid"),
]


@pytest.mark.parametrize(("code", "shards", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_sharded_entries_that_cannot_be_loaded_are_refused(
    code: str, shards: Callable[[], list[Any]], text: str, tmp_path: Path
) -> None:
    state = {**{str(number): shard for number, shard in enumerate(shards())}, "there": torch.zeros(1)}
    with pytest.raises(Refused, match=re.escape(text)) as caught:
        load(state, _source(tmp_path), strict=False)
    assert {refusal.code for refusal in caught.value.refusals} == {code}


def test_a_shard_may_appear_twice_or_be_empty(tmp_path: Path) -> None:
    norms = _norms()
    empty = _shard("fc1", torch.zeros(0, 2 * ROWS, WIDTH), (2, EXPERTS, 2 * ROWS, WIDTH), (0, 0, 0, 0))
    state = {"first": norms, "again": list(norms), "empty": empty}
    report = load(state, _source(tmp_path), strict=False)
    assert (report.tensors, set(report.unexpected)) == (1, {"fc1", "steps"})
    assert torch.equal(torch.stack([norm.data for norm in norms]), _stack()["norm"])


@pytest.mark.parametrize("call", [tx.state_dict_as, lambda state, _: tx.reshard(state, state)])
def test_other_functions_refuse_sharded_state_dicts(call: Any) -> None:
    with pytest.raises(Refused, match=r"only tx.load, tx.save and tx.async_save"):
        call({"norm": _norms()}, "hf")


def _one_in_shards(rank: int, world: int, folder: str) -> None:
    state = {"norm": torch.zeros(2, WIDTH)} if rank else {"norms": _norms()}
    load(state, folder, strict=False)


def test_ranks_must_describe_a_tensor_alike(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="only one has it in shards"):
        run(2, _one_in_shards, _source(tmp_path))


def _in_background(rank: int, world: int, folder: str) -> bool:
    shape = (2, EXPERTS, 2 * ROWS, WIDTH)
    own = _stack()["fc1"][rank].clone()
    shards = [_shard("fc1", own[e], shape, (rank, e, 0, 0)) for e in range(EXPERTS)]
    shards.append(_shard("norm", _stack()["norm"], (2, WIDTH), (0, 0), replica_id=(0, rank, 0)))
    job = tx.async_save({"model": shards}, folder, to="safetensors:identity")
    own.zero_()
    return bool(job.result().tensors == 2)


def test_a_background_save_of_shards_has_the_values_of_the_call(tmp_path: Path) -> None:
    assert run(2, _in_background, str(tmp_path / "out")) == [True] * 2
    written, truth = load_file(tmp_path / "out" / WHOLE), _stack()
    assert torch.equal(written["fc1"], truth["fc1"])
    assert torch.equal(written["norm"], truth["norm"])
