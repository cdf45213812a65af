"""A load compares what it reads with the source's own hashes, also if each rank reads a part of every tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import transaxle as tx
from tests.cli.running import flip
from tests.engine.checkpoint.test_source_hashes import ADAPTER, middles
from tests.live import topologies
from tests.live.ranks import run
from tests.live.refusals import refused
from tests.live.topologies import ALONE, FSDP, FSDP_TP, LLAMA, MOE, TP, build
from transaxle.formats.registry import MANIFEST
from transaxle.live.integrations.pretrained import GENERATION
from transaxle.torch_tensors import Part, mark

FORMS = ("hf", "dcp:torchtitan", "torch:automodel", "megatron_torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(topologies.source(tmp_path_factory.mktemp("checked") / "hub", MOE))


def convert(hub_folder: Path, target: Path, to: str) -> Path:
    if to == "hf":
        tx.convert(hub_folder, target, to=to, sync=False, shard_size=20_000)  # several files
    else:
        tx.convert(hub_folder, target, to=to, sync=False)
    return target


@contextmanager
def damaged(source: Path, part_of_name: str) -> Iterator[str]:
    """Flip a bit in the last byte of a tensor; yield the tensor's name."""
    with tx.open(source) as checkpoint:
        name = next(name for name in checkpoint if part_of_name in name)
        entry = checkpoint.container.entries[name]
    place = source / entry.extents[0].file, entry.extents[0].offset + entry.nbytes // len(entry.extents) - 1
    flip(*place)
    yield name
    flip(*place)


def empty_state() -> dict[str, torch.Tensor]:
    model = build(MOE, ALONE, meta=False)
    return {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("to", FORMS)
def test_no_damaged_byte_is_loaded(to: str, hub_folder: Path, tmp_path: Path) -> None:
    source = convert(hub_folder, tmp_path / "source", to)
    report = tx.load(empty_state(), source)
    assert (report.source_against, report.partly_read) == ("manifest", ())
    places = [place for place in middles(source) if place[0].name != MANIFEST]
    for file, at in places[:: -(-len(places) // 6)]:
        flip(file, at)
        with pytest.raises(tx.TransaxleError) as caught:
            tx.load(empty_state(), source)
        assert caught.value.code != "IO", (file, caught.value)
        with pytest.raises(CheckpointException):
            load(empty_state(), storage_reader=tx.dcp.Reader(source, "transformers"))
        flip(file, at)
    load(empty_state(), storage_reader=tx.dcp.Reader(source, "transformers"))


def test_damaged_bytes_are_loaded_on_request(hub_folder: Path, tmp_path: Path) -> None:
    source = convert(hub_folder, tmp_path / "source", "hf")
    state = empty_state()
    with damaged(source, "mlp.gate.weight") as name:
        with refused("CORRUPT", tensors=[name], hint="check_source=False"):
            tx.load(state, source)
        with refused("CORRUPT", tensors=[name]):
            tx.from_pretrained(AutoModelForCausalLM, source)
        report = tx.load(state, source, check_source=False)
        assert report.source_against == "unchecked"
        with tx.open(source) as checkpoint:
            assert checkpoint[name].torch().equal(state[name])
        reader = tx.dcp.Reader(source, "transformers", check_source=False)
        load(state, storage_reader=reader)
        (source / MANIFEST).unlink()
        assert tx.load(state, source).source_against == "structure"


def test_an_open_checkpoint_is_checked_at_each_load(hub_folder: Path, tmp_path: Path) -> None:
    source = convert(hub_folder, tmp_path / "source", "hf")
    with damaged(source, "o_proj") as name, tx.open(source) as checkpoint:
        tx.load(empty_state(), checkpoint, check_source=False)
        for _ in range(2):
            with refused("CORRUPT", tensors=[name]):
                tx.load(empty_state(), checkpoint)
    with tx.open(source) as checkpoint:
        for check_source in (True, True, False, True):
            report = tx.load(empty_state(), checkpoint, check_source=check_source)
            assert (report.source_against == "manifest", report.partly_read) == (check_source, ())


def test_a_damaged_base_is_refused(hub_folder: Path, tmp_path: Path) -> None:
    base = convert(hub_folder, tmp_path / "base", "hf")
    source = convert(hub_folder, tmp_path / "source", "torch:hf")
    tensors = torch.load(source / "pytorch_model.bin", weights_only=True)
    for name in [name for name in tensors if "embed_tokens" in name]:
        tensors.pop(name)
    torch.save(tensors, source / "pytorch_model.bin")
    (source / MANIFEST).unlink()
    report = tx.load(empty_state(), source, graft=base)
    assert len(report.partly_read) == 0
    with damaged(base, "embed_tokens") as name, refused("CORRUPT", tensors=[name]):
        tx.load(empty_state(), source, graft=base)
    with damaged(base, "o_proj"):  # not taken from the base
        tx.load(empty_state(), source, graft=base)


def test_an_edited_config_needs_a_word(hub_folder: Path, tmp_path: Path) -> None:
    source = convert(hub_folder, tmp_path / "source", "hf")
    config = source / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 96', '"vocab_size": 96, "note": 1'))
    with refused("CORRUPT", "config.json", hint="config="):
        tx.load(empty_state(), source)
    tx.load(empty_state(), source, config=config)
    tx.load(empty_state(), source, check_source=False)


def _load(rank: int, world: int, how: str, source: str, replicated: bool) -> tuple[float, str]:
    """Load a divided model; return the bytes read per byte of this rank's shards, and the tensor that is refused."""
    model = build(MOE, how, meta=False)
    try:
        report = tx.load(model, source, broadcast_replicated=replicated)
    except tx.TransaxleError as error:
        refusals = [f"{each.code} {each.where.tensor}" for each in error.refusals]
        state = tx.as_runs(model.state_dict()) if how != FSDP else model.state_dict()
        with pytest.raises(CheckpointException) as caught:
            load(state, storage_reader=tx.dcp.Reader(source, "transformers"))
        assert all(refusal.partition(" ")[2] in str(caught.value) for refusal in refusals)
        return 0, ", ".join(refusals)
    assert (report.source_against, report.partly_read) == ("manifest", ())
    parameters = (each.to_local() if isinstance(each, DTensor) else each for each in model.parameters())
    return report.bytes_read / sum(part.nbytes for part in parameters), ""


@pytest.mark.parametrize(("how", "world"), [(FSDP, 2), (TP, 2), (FSDP_TP, 4)])
@pytest.mark.parametrize("to", ["hf", "dcp:torchtitan"])
def test_ranks_compare_what_they_have_read_together(
    to: str, how: str, world: int, hub_folder: Path, tmp_path: Path
) -> None:
    source = convert(hub_folder, tmp_path / "source", to)
    assert max(ratio for ratio, _ in run(world, _load, how, str(source), False)) <= 1.05
    for part_of_name in ("q_proj" if to == "hf" else "wq", "embed", "down_proj" if to == "hf" else "w2"):
        with damaged(source, part_of_name) as name:
            refusals = {refusal for _, refusal in run(world, _load, how, str(source), True)}
        assert refusals == {f"CORRUPT {name}"}


def _disagree(rank: int, world: int, source: str) -> str:
    del world
    with pytest.raises(CheckpointException) as caught:
        load(empty_state(), storage_reader=tx.dcp.Reader(source, "transformers", check_source=rank == 0))
    return str(caught.value)


def test_ranks_that_disagree_are_refused(hub_folder: Path) -> None:
    assert all("check_source: rank 1 reads" in error for error in run(2, _disagree, str(hub_folder)))


def _load_alone(rank: int, world: int, source: str) -> tuple[str, tuple[str, ...]]:
    del rank, world
    reader = tx.dcp.Reader(source, "transformers", strict=False)  # a rank may have no expert
    load(build(MOE, FSDP, meta=False).state_dict(), storage_reader=reader, no_dist=True)
    return reader.source_against, reader.partly_read


def test_a_rank_that_loads_alone_says_what_it_has_not_compared(hub_folder: Path, tmp_path: Path) -> None:
    source = convert(hub_folder, tmp_path / "source", "hf")
    for world, is_partly in ((2, False), (4, True)):
        for against, partly_read in run(world, _load_alone, str(source)):
            assert (against, "model.embed_tokens.weight" in partly_read) == ("manifest", is_partly)


def test_a_part_of_a_tensor_is_not_compared_and_the_report_names_it(tmp_path: Path) -> None:
    whole = {name: torch.randn(64, 16) for name in ("a", "b")}
    tx.save(whole, tmp_path / "source", to="safetensors:identity")
    part = Part((64, 16), (((0, 24),), ((0, 16),)))
    state = {"a": torch.zeros(64, 16), "b": mark(torch.zeros(24, 16), part)}
    for part_of_name in ("", "b"):
        with damaged(tmp_path / "source", part_of_name) if part_of_name else nullcontext():
            report = tx.load(state, tmp_path / "source")
        assert (report.source_against, report.partly_read) == ("manifest", ("b",))
        assert state["b"].equal(whole["b"][:24])
        assert ("1 not compared with their hashes" in str(report)) == bool(report.partly_read)
    with damaged(tmp_path / "source", "a"), refused("CORRUPT", tensors=["a"]):
        tx.load(state, tmp_path / "source")


def test_padding_that_a_model_lacks_hides_no_damage(hub_folder: Path, tmp_path: Path) -> None:
    source = convert(hub_folder, tmp_path / "source", "vllm_sharded")  # the vocabulary of 96 is padded to 128
    assert tx.load(empty_state(), source).partly_read == ()
    with tx.open(source) as checkpoint:
        (extent,) = checkpoint.container.entries["lm_head.weight"].extents
        assert checkpoint["lm_head.weight"].shape == (128, 32)
    flip(source / extent.file, extent.offset + 5)
    with refused("CORRUPT", tensors=["lm_head.weight"]):
        tx.load(empty_state(), source)


def test_damage_of_one_copy_is_no_difference_between_copies(tmp_path: Path) -> None:
    """Who removes the copy that is called outdated could remove the intact one."""
    model = build({**LLAMA, "tie_word_embeddings": True}, ALONE, meta=False)
    (tmp_path / "config.json").write_text(model.config.to_json_string(use_diff=False))
    torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "both.pt")
    source, config = tmp_path / "source", tmp_path / "config.json"
    tx.convert(tmp_path / "both.pt", source, to="safetensors:identity", sync=False)
    dialect: dict[str, Any] = {"to": "torchtitan", "config": config}
    ways: list[Callable[[], object]] = [
        lambda: tx.load(model, source),
        lambda: tx.from_pretrained(AutoModelForCausalLM, source, config=config),
        lambda: tx.convert(source, tmp_path / "out", sync=False, **dialect),
        lambda: tx.serve(source, **dialect).close(),
    ]
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        with damaged(source, name):
            for way in ways:
                with refused("CORRUPT", tensors=[name]):
                    way()
            with pytest.raises(CheckpointException, match="CORRUPT"):
                load(model.state_dict(), storage_reader=tx.dcp.Reader(source, "transformers", config=config))
            with tx.open(source) as checkpoint:
                with refused("CORRUPT", tensors=[name]):
                    tx.load(model, checkpoint)
                with refused("UNEQUAL_COPIES", tensors=["lm_head.weight"]):
                    tx.load(model, checkpoint, check_source=False)
    for way in ways:
        way()


def test_an_adapter_without_hashes_is_no_proof(hub_folder: Path, tmp_path: Path) -> None:
    base, adapter = convert(hub_folder, tmp_path / "base", "hf"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({**ADAPTER, "layers_to_transform": [0]}))
    with tx.open(base) as checkpoint:
        name = "model.layers.0.self_attn.q_proj.weight"
        rows, columns = checkpoint[name].shape
    factors = {"lora_A": torch.randn(2, columns), "lora_B": torch.randn(rows, 2)}
    prefix = f"base_model.model.{name.removesuffix('.weight')}"
    save_file(
        {f"{prefix}.{factor}.weight": tensor for factor, tensor in factors.items()},
        adapter / "adapter_model.safetensors",
    )
    tx.convert(adapter, tmp_path / "own", to="identity", sync=False)
    for path, against in ((adapter, "structure"), (tmp_path / "own", "manifest")):
        with tx.open(base, merge=path) as checkpoint:
            assert tx.load(empty_state(), checkpoint).source_against == against
        assert tx.convert(base, tmp_path / against, to="hf", merge=path, sync=False).source_against == against


def test_a_damaged_generation_config_is_refused(hub_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(hub_folder, tmp_path / "hub")
    (tmp_path / "hub" / GENERATION).write_text('{"temperature": 0.6, "top_p": 0.9}')
    source = convert(tmp_path / "hub", tmp_path / "source", "hf")
    file = source / GENERATION
    text = file.read_text()

    def temperature(*, check_source: bool = True) -> float:
        model = tx.from_pretrained(AutoModelForCausalLM, source, check_source=check_source)
        value = model.generation_config.temperature
        assert isinstance(value, float)
        return value

    assert temperature() == 0.6
    file.write_text(text.replace("0.6", "0.7"))
    with refused("CORRUPT", GENERATION):
        temperature()
    assert temperature(check_source=False) == 0.7
    file.write_text(text.replace("0.6", "0.75"))
    assert temperature() == 0.75, "an edited file has another length"
    (source / MANIFEST).unlink()
    for no_json in (b"[1]", b"{", b"\xff\xfe"):
        file.write_bytes(no_json)
        with refused("CORRUPT", GENERATION):
            temperature()
