"""`--load-format transaxle` in a real vLLM: each rank's parameters from any checkpoint are those that vLLM's own loader
makes of the converted hub folder, and engines answer alike. vLLM runs in an environment of its own, on a CPU.

Parameters are compared without an engine, so that one process serves many cases. It fills each model with NaN first. A
CPU has no kernels for experts that are dealt out to ranks, so their parameters are compared only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.engine.adapters.tiny import train
from tests.engine.packed import awq
from tests.live.load.test_source_check import damaged
from tests.live.ranks import run
from tests.live.topologies import LLAMA, source
from tests.oracles import hub
from tests.readers import planted
from tests.readers.real_readers import needs_vllm
from tests.refit.plugs.loaded_parameters import Loaded, Loading
from tests.refit.plugs.loading_engines import LOADED, WorkerLoad, add_entry_point
from tests.refit.plugs.servers import PYTHON, ROOT, environment, serving
from tests.refit.plugs.test_vllm_refit import MODELS
from tests.refit.test_sources import gathered, zero3_engine
from transaxle.formats.registry import MANIFEST

pytestmark = [*needs_vllm, pytest.mark.filterwarnings("ignore")]

END = 60
"""Seconds in which a process without further orders ends."""
WASTE = 1.1
"""Bytes read per byte needed, at most: short gaps between rows are read with them."""
TIED = MODELS["llama"] | {"tie_word_embeddings": True}
UP = "model.layers.1.mlp.experts.2.up_proj.weight"
Ask = Callable[[object], Any]


@contextmanager
def _asking(module: str, folder: Path, cores: int, **variables: str) -> Iterator[Ask]:
    """Start a program in vLLM's environment; yield a function that sends it an order, and returns its answer."""
    log = folder / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [str(PYTHON), "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            cwd=ROOT, env=environment(folder / "site", range(cores)) | variables, start_new_session=True,
        )  # fmt: skip

    def ask(order: object) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # the process has ended: its log says why
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        assert line, log.read_text(errors="replace")[-4000:]
        return json.loads(line)

    try:
        yield ask
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=END)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


@pytest.fixture(scope="module")
def parameters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Loading], Loaded]]:
    """Return a function that loads with both loaders, in one process for all tests."""
    with _asking("tests.refit.plugs.loaded_parameters", tmp_path_factory.mktemp("parameters"), 1) as ask:
        yield lambda loading: Loaded(**ask(asdict(loading)))


def _hub(folder: Path, name: str) -> Path:
    return Path(source(folder / "hub", MODELS[name]))


def _config_alone(hub_folder: Path) -> str:
    """Return a folder with the config of a hub folder, and without its weights."""
    folder = hub_folder.with_name("config")
    folder.mkdir()
    shutil.copy(hub_folder / "config.json", folder)
    return str(folder)


def _convert_as_peers_save(hub_folder: Path, folder: Path, to: str, **degrees: Any) -> dict[str, Any]:
    """Write a folder without config and manifest, and return what the load format is told."""
    tx.convert(hub_folder, folder, to=to, sync=False, **degrees)
    for name in ("config.json", MANIFEST):
        (folder / name).unlink()
    return {"path": str(folder)}


def _same(loaded: Loaded, stored_bytes: int = 4) -> None:
    """Check that both loaders made the same parameters, and that each rank read the bytes of its own.

    Args:
        loaded: what both loaders made.
        stored_bytes: of an element in the files; parameters have 2.
    """
    assert (loaded.error, loaded.unequal) == ("", [])
    assert loaded.compared
    for read, needed in zip(loaded.read, loaded.needed, strict=True):
        assert read is not None
        assert 0 < read <= WASTE * needed * stored_bytes / 2


@pytest.mark.parametrize("experts", [False, True], ids=["experts cut", "experts dealt"])
def test_ranks_load_their_parts_from_megatron(
    experts: bool, tmp_path: Path, parameters: Callable[[Loading], Loaded]
) -> None:
    hub_folder = _hub(tmp_path, "moe")
    extra = _convert_as_peers_save(hub_folder, tmp_path / "megatron", "torch_dist")
    _same(parameters(Loading(str(hub_folder), _config_alone(hub_folder), extra, 2, experts)))


@pytest.mark.parametrize(("to", "degrees"), [
    ("dcp:torchtitan", {}),
    pytest.param("megatron_torch", {"tp": 2, "pp": 2}, marks=pytest.mark.oracle),
    pytest.param("deepspeed-universal:transformers", {}, marks=pytest.mark.oracle),
    pytest.param("torch:automodel", {}, marks=pytest.mark.oracle),
])  # fmt: skip
@pytest.mark.parametrize("name", ["moe", pytest.param("llama", marks=pytest.mark.oracle)])
def test_ranks_load_their_parts_from_any_format(
    to: str, degrees: dict[str, Any], name: str, tmp_path: Path, parameters: Callable[[Loading], Loaded]
) -> None:
    hub_folder = _hub(tmp_path, name)
    extra = _convert_as_peers_save(hub_folder, tmp_path / "other", to, **degrees)
    _same(parameters(Loading(str(hub_folder), _config_alone(hub_folder), extra, 2)))


def _save_zero3(rank: int, world: int, config: dict[str, Any], folder: str) -> None:
    """Train with DeepSpeed; save its checkpoint, and what DeepSpeed itself gathers as a hub folder."""
    engine = zero3_engine(config, "fp32")
    tokens = torch.arange(12).reshape(2, 6) % config["vocab_size"]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(f"{folder}/zero3")
    tensors = gathered(engine)
    if rank == 0:
        settings = hub.configuration(config).to_dict()
        Path(folder, "hub").mkdir()
        Path(folder, "hub/config.json").write_text(json.dumps(settings))
        if config["tie_word_embeddings"]:
            del tensors["lm_head.weight"]
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{folder}/hub/{hub.WEIGHTS}")
    dist.barrier()


@pytest.mark.parametrize(
    ("config", "world"), [(LLAMA, 2), pytest.param(TIED, 3, marks=pytest.mark.oracle)], ids=["llama", "tied"]
)
def test_ranks_load_their_parts_from_zero_3(
    config: dict[str, Any], world: int, tmp_path: Path, parameters: Callable[[Loading], Loaded]
) -> None:
    run(world, _save_zero3, config, str(tmp_path))
    hub_folder = tmp_path / "hub"
    _same(parameters(Loading(str(hub_folder), _config_alone(hub_folder), {"path": str(tmp_path / "zero3")}, 2)))


def _adapter(hub_folder: Path, folder: Path) -> Path:
    """Let peft train an adapter, and merge it into a copy of the base."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(hub_folder, dtype=torch.float32)
    draw = torch.Generator().manual_seed(5)
    fill = partial(torch.nn.init.normal_, std=0.05, generator=draw)
    model = train(base, folder, fill, target_modules=["q_proj", "v_proj", "down_proj"], lora_alpha=8)
    model.merge_and_unload().save_pretrained(folder / "merged")
    return folder / "adapter"


def test_adapters_are_merged(tmp_path: Path, parameters: Callable[[Loading], Loaded]) -> None:
    """What peft itself merges is rounded to bfloat16 alike but for a few elements, so `convert` is the truth."""
    hub_folder = _hub(tmp_path, "llama")
    adapter = _adapter(hub_folder, tmp_path)
    tx.convert(hub_folder, tmp_path / "truth", to="hf", merge=adapter, sync=False)
    ours, peft = (load_file(next((tmp_path / each).glob("*.safetensors"))) for each in ("truth", "merged"))
    assert ours.keys() == peft.keys()
    assert all(torch.allclose(ours[name], peft[name], atol=1e-6) for name in ours)
    assert any(not torch.equal(tensor, ours[name]) for name, tensor in load_file(hub_folder / hub.WEIGHTS).items())
    loaded = parameters(Loading(str(tmp_path / "truth"), str(hub_folder), {"merge": str(adapter)}, 2))
    assert (loaded.error, loaded.unequal) == ("", [])


def test_a_tied_head_and_other_names(tmp_path: Path, parameters: Callable[[Loading], Loaded]) -> None:
    hub_folder = Path(source(tmp_path / "hub", TIED))
    tx.convert(hub_folder, tmp_path / "titan", to="dcp:torchtitan", sync=False)
    _same(parameters(Loading(str(hub_folder), str(tmp_path / "titan"), {}, 2)))  # this folder has a config


def test_layers_that_predict_further_tokens(tmp_path: Path, parameters: Callable[[Loading], Loaded]) -> None:
    """The model leaves them out, as vLLM does; the draft model is loaded from the same checkpoint."""
    hub_folder = tmp_path / "hub"
    planted.FAULTS["no layer that predicts further tokens"].build(hub_folder)
    loaded = parameters(Loading(str(hub_folder), str(hub_folder), {}, 2))
    _same(loaded)
    assert "predict further tokens, and are not read" in loaded.log
    drafts = parameters(Loading(str(hub_folder), str(hub_folder), {}, drafting=True))
    assert (drafts.error, drafts.unequal, drafts.read) == ("", [], [None])
    assert "reads whole tensors" in drafts.log
    assert "it is a draft model" in drafts.log


def test_quantized_weights_are_loaded_by_vllm(tmp_path: Path, parameters: Callable[[Loading], Loaded]) -> None:
    planted.make_packed(awq, tmp_path / "hub")
    loaded = parameters(Loading(str(tmp_path / "hub"), str(tmp_path / "hub"), {}, dtype="float16"))
    assert (loaded.error, loaded.unequal, loaded.read) == ("", [], [None])
    assert "reads whole tensors" in loaded.log
    assert "vLLM quantizes weights" in loaded.log
    planted.retensor(tmp_path / "hub", lambda tensors: tensors.pop("model.layers.0.mlp.down_proj.scales"))
    loaded = parameters(Loading(str(tmp_path / "hub"), str(tmp_path / "hub"), {}, dtype="float16"))
    assert "model.layers.0.mlp.down_proj.scales" in loaded.error


def test_codes_are_decoded(tmp_path: Path, parameters: Callable[[Loading], Loaded]) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 128}
    planted.make({**planted.QWEN3_MOE, **sizes}, tmp_path / "plain")
    tx.convert(tmp_path / "plain", tmp_path / "codes", to="hf", encode="float8_block", sync=False)
    tx.convert(tmp_path / "codes", tmp_path / "truth", to="hf", decode="bf16", sync=False)
    extra = {"path": str(tmp_path / "codes"), "decode": "bf16"}
    _same(parameters(Loading(str(tmp_path / "truth"), str(tmp_path / "plain"), extra, 2)), stored_bytes=2)
    loaded = parameters(Loading(str(tmp_path / "truth"), str(tmp_path / "plain"), {"path": str(tmp_path / "codes")}))
    assert "is quantized" in loaded.error
    assert '"decode"' in loaded.error


def test_what_does_not_fit_is_refused(tmp_path: Path, parameters: Callable[[Loading], Loaded]) -> None:
    hub_folder = _hub(tmp_path, "moe")
    served = _config_alone(hub_folder)

    def refused(extra: dict[str, Any], folder: str = served) -> str:
        return parameters(Loading(str(hub_folder), folder, extra)).error

    assert "unknown key 'pth'" in refused({"pth": "x"})
    assert "Did you mean 'dialect'?" in refused({"from": "hf"})
    assert "decode" in refused({"decode": 3})
    assert "no checkpoint" in (error := refused({}))
    assert '{"path": "PATH"}' in error
    lacking, more = tmp_path / "lacking", tmp_path / "more"
    for copy in (lacking, more):
        shutil.copytree(hub_folder, copy)
    planted.retensor(lacking, lambda tensors: tensors.pop(UP))
    assert UP in refused({"path": str(lacking)})
    assert refused({"path": str(lacking), "graft": str(hub_folder)}) == ""
    planted.retensor(more, lambda tensors: tensors.update({"value_head.weight": torch.ones(4)}))
    assert "value_head.weight" in (error := refused({"path": str(more)}))
    assert '"ignore"' in error
    assert refused({"path": str(more), "ignore": ["value_head.*"]}) == ""
    planted.reconfigure(Path(served), lambda keys: keys.update(num_attention_heads=4, head_dim=128))
    assert "in vLLM's config" in (error := refused({"path": str(hub_folder)}))
    assert "vllm serve FOLDER" in error


def test_damaged_tensors_are_refused(tmp_path: Path, parameters: Callable[[Loading], Loaded]) -> None:
    """By our own loader, and where vLLM's takes whole tensors."""
    planted.make_packed(awq, tmp_path / "packed")
    tx.convert(_hub(tmp_path, "moe"), tmp_path / "plain", to="safetensors:torchtitan", sync=False)
    tx.convert(tmp_path / "packed", tmp_path / "codes", to="safetensors:identity", sync=False)
    served = {"plain": _config_alone(tmp_path / "hub"), "codes": str(tmp_path / "codes")}
    for folder, dtype in (("plain", "bfloat16"), ("codes", "float16")):
        for check in ({}, {"check_source": False}):
            extra = {"path": str(tmp_path / folder), **check}
            order = Loading(served[folder], served[folder], extra, dtype=dtype)
            with damaged(tmp_path / folder, "") as name:
                error = parameters(order).error
            assert (name in error) != bool(check), error
            assert bool(check) or '"check_source": false' in error


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Return a function that starts an engine, asks it, and returns its answers and what its workers loaded."""
    folder = tmp_path_factory.mktemp("engines")
    add_entry_point(folder / "site")
    with _asking("tests.refit.plugs.loading_engines", folder, 2, **{LOADED: str(folder / "loaded")}) as ask:
        yield ask


TP, PP, EXPERTS = "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"


def _converted(config: dict[str, Any], to: str, folder: Path) -> tuple[Path, str, dict[str, Any]]:
    hub_folder = Path(source(folder / "hub", config))
    return hub_folder, _config_alone(hub_folder), _convert_as_peers_save(hub_folder, folder / "other", to)


def _trained(config: dict[str, Any], to: str, folder: Path) -> tuple[Path, str, dict[str, Any]]:
    del to
    run(2, _save_zero3, config, str(folder))
    return folder / "hub", _config_alone(folder / "hub"), {"path": str(folder / "zero3")}


def _adapted(config: dict[str, Any], to: str, folder: Path) -> tuple[Path, str, dict[str, Any]]:
    hub_folder = Path(source(folder / "hub", config))
    adapter = _adapter(hub_folder, folder)
    tx.convert(hub_folder, folder / "converted", to=to, merge=adapter, sync=False)
    return folder / "converted", str(hub_folder), {"merge": str(adapter)}


@pytest.mark.parametrize(("make", "config", "to", "parallel", "asks"), [
    pytest.param(_converted, MODELS["moe"], "torch_dist", {TP: 2}, True, id="experts of Megatron on two ranks"),
    *(
        pytest.param(make, config, to, parallel, asks, id=name, marks=pytest.mark.deferred)
        for name, make, config, to, parallel, asks in (
            ("Llama of Megatron", _converted, MODELS["llama"], "torch_dist", {}, True),
            ("Llama of torchtitan on two ranks", _converted, MODELS["llama"], "dcp:torchtitan", {TP: 2}, True),
            ("experts of torchtitan", _converted, MODELS["moe"], "dcp:torchtitan", {}, True),
            ("ZeRO-3", _trained, MODELS["llama"], "", {}, True),
            ("ZeRO-3 on two ranks", _trained, MODELS["llama"], "", {TP: 2}, True),
            ("an adapter", _adapted, MODELS["llama"], "hf", {}, True),
            ("an adapter on two ranks", _adapted, MODELS["llama"], "hf", {TP: 2}, True),
            ("experts dealt out", _converted, MODELS["moe"], "torch_dist", {TP: 2, EXPERTS: True}, False),
            ("a tied head on two stages", _converted, TIED, "torch_dist", {PP: 2}, False),
        )
    ),
])  # fmt: skip
def test_engines_answer_alike(
    make: Callable[[dict[str, Any], str, Path], tuple[Path, str, dict[str, Any]]],
    config: dict[str, Any],
    to: str,
    parallel: dict[str, Any],
    asks: bool,
    tmp_path: Path,
    engines: Ask,
) -> None:
    """The same tokens with the same probabilities as from the hub's folder; each worker reads its own bytes.

    vLLM 0.32 does not compute on a CPU with experts that are dealt out, or with stages: there the parameters of the
    workers are compared only.
    """
    hub_folder, served, extra = make(config, to, tmp_path)
    ours = {"model": served, "load_format": "transaxle", "model_loader_extra_config": extra}
    (truth, of_truth), (answers, of_ours) = (
        engines([{**arguments, **parallel}, asks, None]) for arguments in ({"model": str(hub_folder)}, ours)
    )
    assert answers == truth
    assert bool(truth) == asks
    loads, expected = ([WorkerLoad(**load) for load in each] for each in (of_ours, of_truth))
    assert [load.digests for load in loads] == [load.digests for load in expected]
    assert len(loads) == max(parallel.values(), default=1)
    read_folder = Path(extra.get("path", served))
    whole = sum(file.stat().st_size for file in read_folder.rglob("*") if file.is_file())
    for load in loads:
        assert load.reported is not None
        assert load.reported <= WASTE * 2 * load.parameters  # files have float32, and parameters bfloat16
        assert load.reported <= load.counted < load.reported + whole  # the latter includes metadata and modules


@pytest.mark.deferred
def test_an_engine_reloads_another_checkpoint(tmp_path: Path, engines: Ask) -> None:
    first, second = (Path(source(tmp_path / name, MODELS["llama"], seed)) for seed, name in enumerate(("one", "two")))
    extra = _convert_as_peers_save(first, tmp_path / "first", "torch_dist")
    tx.convert(second, tmp_path / "second", to="dcp:torchtitan", sync=False)
    truth, _ = engines([{"model": str(second)}, True, None])
    ours = {"model": _config_alone(first), "load_format": "transaxle", "model_loader_extra_config": extra}
    answers, _ = engines([ours, True, str(tmp_path / "second")])
    assert answers == truth


@pytest.mark.deferred
def test_a_server_answers_from_a_folder_of_megatron(tmp_path: Path) -> None:
    """`vllm serve CONFIG_FOLDER --load-format transaxle` with the path of the checkpoint, over HTTP; and its error."""
    hub_folder = _hub(tmp_path, "llama")
    extra = json.dumps(_convert_as_peers_save(hub_folder, tmp_path / "megatron", "torch_dist"))
    served = _config_alone(hub_folder)
    told = ("--load-format", "transaxle", "--model-loader-extra-config")
    with serving(tmp_path, str(hub_folder), range(1)) as server:
        server.wait()
        truth = server.answers()
    with serving(tmp_path, served, range(1), *told, extra) as server:
        server.wait()
        assert server.answers() == truth
    planted.retensor(hub_folder, lambda tensors: tensors.pop("model.norm.weight"))
    with serving(tmp_path, served, range(2), *told, json.dumps({"path": str(hub_folder)})) as server:
        with pytest.raises(AssertionError, match="vLLM did not start"):
            server.wait()
        log = server.log.read_text(errors="replace")
    assert "model.norm.weight" in log
    assert '"graft"' in log
