"""Opening safetensors: files that real libraries wrote, byte for byte, and indexes that say what the shards do not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import transaxle as tx
from tests.formats.files import FILE, INDEX, dense, info, made
from tests.work import assert_linear, calls
from transaxle.errors import Code, Refusal, Refused, TransaxleError
from transaxle.formats.catalog import BITS, Container
from transaxle.formats.detect import open_container
from transaxle.formats.training_state import KEPT_RUN, MEGATRON, RUN, facts_as_text, facts_in

A, B, C = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
ONE = info("F32", [1], 0, 4)


def every_dtype() -> dict[str, torch.Tensor]:
    """One tensor of each type that torch and safetensors share."""
    codes = torch.arange(48, dtype=torch.uint8)
    types = [
        torch.bool, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu,
        torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2, torch.int16, torch.uint16, torch.float16,
        torch.bfloat16, torch.int32, torch.uint32, torch.float32, torch.complex64, torch.float64, torch.int64,
        torch.uint64,
    ]  # fmt: skip
    tensors = {
        str(kind).removeprefix("torch."): codes.clone().view(kind).reshape(3, -1)
        for kind in types
        if kind != torch.bool
    }
    tensors["bool"] = (codes % 3 == 0).reshape(3, -1)
    return tensors | {"0-d": torch.tensor(1.5), "empty": torch.zeros(0, 7, dtype=torch.int16), "é.weight": codes}


def octets(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1) if tensor.dim() else tensor.reshape(1)
    return flat.view(torch.uint8).numpy().tobytes()


def assert_equal(container: Container, tensors: Mapping[str, torch.Tensor]) -> None:
    assert container.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry = container.entries[name]
        packed = 2 if entry.dtype == "F4" else 1
        assert entry.shape == (*tensor.shape[:-1], tensor.shape[-1] * packed) if tensor.dim() else entry.shape == ()
        assert dense(container, entry) == octets(tensor), name


def test_every_dtype_that_torch_writes(tmp_path: Path) -> None:
    tensors = every_dtype()
    safetensors.torch.save_file(tensors, tmp_path / FILE, {"format": "pt"})
    container = open_container(str(tmp_path))
    assert (container.format, container.metadata) == ("safetensors", {"format": "pt"})
    assert container.files == {FILE: (tmp_path / FILE).stat().st_size}
    assert_equal(container, tensors)
    torch_types = BITS.keys() - {"F6_E2M3", "F6_E3M2"}
    assert {entry.dtype for entry in container.entries.values()} == torch_types


def test_what_transformers_writes(tmp_path: Path) -> None:
    """A real model, saved in shards by the library itself."""
    from tests.oracles.quiet import quiet

    with quiet():
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
        model = LlamaForCausalLM(config)
        model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / INDEX).exists()
    container = open_container(str(tmp_path))
    assert_equal(container, model.state_dict())
    assert container.metadata == {"format": "pt"}
    assert container.carried == ("config.json", "generation_config.json")
    assert len(container.files) > 2
    whole = open_container(str(tmp_path / INDEX))
    assert whole.entries == container.entries


# Indexes.


def write(folder: Path, weight_map: Mapping[str, Any], **shards: Mapping[str, Any]) -> None:
    for file, entries in shards.items():
        data = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values())
        folder.joinpath(file).write_bytes(made(entries, bytes(data)))
    folder.joinpath(INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def problems(folder: Path) -> list[tuple[Code, str | None, str | None]]:
    def short(refusal: Refusal) -> tuple[Code, str | None, str | None]:
        return refusal.code, refusal.where.file, refusal.where.tensor

    with pytest.raises(TransaxleError) as caught:
        open_container(str(folder))
    assert caught.value.exit_code == 3
    return [short(refusal) for refusal in caught.value.refusals]


def test_shards_in_order(tmp_path: Path) -> None:
    write(tmp_path, {"a": B, "b": A, "c": B}, **{A: {"b": ONE}, B: {"c": ONE, "a": info("F32", [1], 4, 8)}})
    container = open_container(str(tmp_path))
    assert list(container.entries) == ["b", "c", "a"]
    assert list(container.files) == [A, B, INDEX]


def test_a_wrong_total_size_is_no_reason(tmp_path: Path) -> None:
    """Published indexes count tied weights twice, or count parameters."""
    write(tmp_path, {"a": A}, **{A: {"a": ONE}})
    assert open_container(str(tmp_path)).metadata == {}


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "a\0b"]
)
def test_shards_that_are_paths(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "folder"
    folder.joinpath("sub").mkdir(parents=True)
    for place in (tmp_path / FILE, folder / "sub" / "x.safetensors"):
        place.write_bytes(made({"b": ONE}, bytes(4)))
    write(folder, {"a": A, "b": shard}, **{A: {"a": ONE}})
    assert problems(folder) == [("PATH_ESCAPE", INDEX, None)]


def test_shards_that_must_not_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    tmp_path.joinpath("outside").write_bytes(made({"a": ONE}, bytes(4)))
    write(folder, {"a": A, "b": B, "c": C}, **{A: {"a": ONE}})
    os.mkfifo(folder / B)
    folder.joinpath(C).symlink_to("../outside")
    assert problems(folder) == [("UNSUPPORTED", B, None), ("PATH_ESCAPE", C, None)]


def test_everything_on_which_index_and_shards_differ(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"kept": A, "moved": A, "nowhere": B, "lost": C},
        **{A: {"kept": ONE}, B: {"moved": ONE, "unlisted": info("F32", [1], 4, 8)}},
    )
    assert sorted(problems(tmp_path), key=str) == [
        ("CORRUPT", A, "moved"),
        ("CORRUPT", B, "unlisted"),
        ("INCOMPLETE", B, "nowhere"),
        ("INCOMPLETE", C, None),
    ]


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    write(tmp_path, {"a": A, "b": B}, **{A: {"a": ONE}, B: {"b": ONE, "a": info("F32", [1], 4, 8)}})
    assert problems(tmp_path) == [("NAME_COLLISION", B, "a")]


def test_all_broken_shards_at_once(tmp_path: Path) -> None:
    write(tmp_path, {"a": A, "b": B, "c": C}, **{A: {"a": ONE}, B: {"b": ONE}, C: {"c": ONE}})
    os.truncate(tmp_path / A, 5)
    os.truncate(tmp_path / C, (tmp_path / C).stat().st_size - 1)
    assert problems(tmp_path) == [("CORRUPT", A, None), ("CORRUPT", C, "c")]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"\xff",
        b"{}",
        b'{"weight_map":null}',
        b'{"weight_map":[]}',
        b'{"weight_map":{"a":1}}',
        b'{"weight_map":{"a":null}}',
        b'{"weight_map":{},"weight_map":{"a":"b"}}',
        b'{"weight_map":{"a":"b"},"metadata":[]}',
        b'{"weight_map":{"a":"b"},"metadata":{"x":"1","x":"2"}}',
        b'{"weight_map":{"a":"b"},"metadata":' + b'{"a":' * 10**5 + b"1" + b"}" * (10**5 + 1),
    ],
)
def test_malformed_indexes(tmp_path: Path, text: bytes) -> None:
    tmp_path.joinpath(INDEX).write_bytes(text)
    assert problems(tmp_path) == [("CORRUPT", INDEX, None)]


@given(st.binary(max_size=60) | st.builds(lambda inner: b'{"weight_map":{' + inner + b"}}", st.binary(max_size=30)))
def test_indexes_of_any_bytes(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    folder = tmp_path_factory.mktemp("index")
    folder.joinpath(INDEX).write_bytes(text)
    try:
        open_container(str(folder))
    except TransaxleError as error:
        if not all(refusal.where.file for refusal in error.refusals):
            raise AssertionError("a refusal names no file") from error
    folder.joinpath(INDEX).unlink()


def test_metadata_of_shards_and_index(tmp_path: Path) -> None:
    for file, name, note in ((A, "a", "1"), (B, "b", "2")):
        entries = {name: ONE, "__metadata__": {"format": "pt", "note": note}}
        tmp_path.joinpath(file).write_bytes(made(entries, bytes(4)))
    index = {"metadata": {"total_size": 8, "tool": "x", "number": 1}, "weight_map": {"a": A, "b": B}}
    tmp_path.joinpath(INDEX).write_text(json.dumps(index))
    said = open_container(str(tmp_path)).metadata
    assert said == {"format": "pt", "tool": "x", f"{A}:note": "1", f"{B}:note": "2"}


def test_the_optimizer_beside_a_model(tmp_path: Path) -> None:
    """Its folder is read where it holds the optimizer's state; each fault in it is one of the checkpoint."""
    state = tmp_path / "optimizer"
    state.mkdir()
    write(tmp_path, {"a": A}, **{A: {"a": ONE}})
    file = state / "optimizer.safetensors"

    def said(*names: str) -> Container:
        file.write_bytes(made({name: info("F32", [1], 4 * at, 4 * at + 4) for at, name in enumerate(names)}, bytes(8)))
        return open_container(str(tmp_path))

    whole = said("optim/a/step", "optim/a/exp_avg")
    assert list(whole.entries) == ["a", "optim/a/step", "optim/a/exp_avg"]
    assert list(whole.files) == [A, INDEX, "optimizer/optimizer.safetensors"]
    assert whole.ignored == ()
    state.joinpath("note.txt").touch()
    assert open_container(str(tmp_path)).ignored == ("optimizer/note.txt",)
    foreign = said("optim/a/step", "b")
    assert (list(foreign.entries), foreign.ignored) == (["a"], ("optimizer/",))
    file.write_bytes(b"torn")
    assert problems(tmp_path) == [("CORRUPT", "optimizer/optimizer.safetensors", None)]
    file.unlink()
    index = {"weight_map": {"optim/a/step": "x.safetensors", "optim/a/y": "../x"}}
    state.joinpath("optimizer.safetensors.index.json").write_text(json.dumps(index))
    assert problems(tmp_path) == [
        ("PATH_ESCAPE", "optimizer/optimizer.safetensors.index.json", None),
        ("INCOMPLETE", "optimizer/x.safetensors", None),
    ]
    state.joinpath("optimizer.safetensors.index.json").unlink()
    write(tmp_path, {"a": A, "optim/a/step": A}, **{A: {"a": ONE, "optim/a/step": info("F32", [1], 4, 8)}})
    assert list(open_container(str(tmp_path)).entries) == ["a", "optim/a/step"]
    file.write_bytes(made({"optim/a/step": ONE}, bytes(4)))
    assert problems(tmp_path) == [("NAME_COLLISION", "optimizer/optimizer.safetensors", "optim/a/step")]


def test_the_company_of_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, {"a": A}, **{A: {"a": ONE}, "consolidated.safetensors": {"a": ONE}})
    carried = ["config.json", "chat_template.jinja", "modeling_x.py", "tokenizer.model", "README.md"]
    ignored = ["pytorch_model.bin", "pytorch_model.bin.index.json", "x.gguf", "X.PT", ".gitattributes"]
    for name in (*carried, *ignored, "transaxle.json"):
        tmp_path.joinpath(name).touch()
    tmp_path.joinpath("original").mkdir()
    tmp_path.joinpath("link").symlink_to("/etc/passwd")
    container = open_container(str(tmp_path))
    assert container.carried == tuple(sorted(carried))
    assert container.ignored == tuple(sorted([*ignored, "consolidated.safetensors", "original/", "link"]))


def test_a_config_that_must_not_be_read(tmp_path: Path) -> None:
    write(tmp_path, {"a": A}, **{A: {"a": ONE}})
    tmp_path.joinpath("config.json").symlink_to("/etc/passwd")
    assert problems(tmp_path) == [("PATH_ESCAPE", "config.json", None)]


# Step and sample counts of a run, in the header of a file.

FACTS: dict[str, dict[str, object]] = {
    RUN: {"global_steps": 3, "global_samples": 48},
    MEGATRON: {"iteration": 3, "counters": {"consumed_train_samples": 48}, "opt_param_scheduler": {"max_lr": 1e-3}},
}


def _text(facts: object) -> str:
    return json.dumps([{**facts, "params": []}]) if isinstance(facts, dict) else json.dumps(facts)


def test_facts_are_kept_as_they_are() -> None:
    run = {**FACTS[RUN], MEGATRON: FACTS[MEGATRON], "param_groups": [], "zero_stage": 1}
    text = facts_as_text(run)
    assert text is not None
    assert facts_in(text) == FACTS
    assert facts_as_text({"global_steps": None, MEGATRON: {}}) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[[]]",
        _text({RUN: 3}),
        _text({MEGATRON: {"iteration": "../3"}}),
        _text({MEGATRON: {"iteration": -1}}),
        _text({MEGATRON: {"iteration": True}}),
        _text({MEGATRON: {"counters": [3]}}),
        _text({RUN: {"global_samples": 1.5}}),
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_such_text_is_left_as_it_is(text: str, tmp_path: Path) -> None:
    assert facts_in(text) == {}
    save_file({"optim/w/exp_avg": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={KEPT_RUN: text})
    with tx.open(tmp_path / "model.safetensors") as checkpoint:
        assert checkpoint.metadata == {KEPT_RUN: text}


# Indexes of very many shards.


def test_an_index_of_absent_shards_is_refused_in_linear_time(tmp_path: Path) -> None:
    def read(count: int) -> Callable[[], None]:
        names = {f"t{at}": f"model-{at:06}.safetensors" for at in range(count)}
        folder = tmp_path / str(count)
        folder.mkdir()
        folder.joinpath(INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))

        def work() -> None:
            with pytest.raises(Refused, match="places 1 tensors in it") as caught:
                tx.open(folder)
            assert len(caught.value.refusals) == 101

        return work

    works = [read(count) for count in (500, 1_000, 2_000)]
    works[0]()  # what it imports counts once
    assert_linear([calls(work) for work in works])
    assert calls(works[-1]) - calls(works[0]) < 1_500 * 20
