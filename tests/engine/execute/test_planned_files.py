"""Files of a plan that are computed when they are read: the bytes that `convert` writes, from any offset."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import transaxle as tx
from tests.checkpoints import CONFIG, SIZES, tensors, tiny, write
from tests.engine import quantized
from tests.formats.hub_server import files_of
from transaxle.arguments import Degrees
from transaxle.engine.plan.conversion import make_plan
from transaxle.engine.planned_files import PlannedFiles
from transaxle.engine.views.encode import Encode
from transaxle.errors import Refused, TransaxleError
from transaxle.formats.registry import MANIFEST
from transaxle.move.workers import limits

NORM = "model.norm.weight"
LARGE = {**SIZES, "hidden_size": 256, "vocab_size": 4096}
"""Sizes of a model with tensors of 2 MB, so that a tensor has several blocks."""


@contextmanager
def opened(source: Path, to: str = "hf", *, memory: str | None = None, **options: Any) -> Iterator[PlannedFiles]:
    """Open a source and yield the files that a conversion of it would write."""
    planning = {name: options.pop(name) for name in ("shard_size", "allow_lossy", "check_source") if name in options}
    encode = Encode(options.pop("encode")) if "encode" in options else None
    with tx.open(source, **options) as checkpoint:
        yield PlannedFiles(make_plan(checkpoint, to, encode=encode, **planning), limits(None, memory))


def whole(files: PlannedFiles, name: str) -> bytes:
    return b"".join(files.read(name, 0, files.files[name].size))


def _sources(folder: Path) -> dict[str, Path]:
    small = quantized.plain_llama(d=256, f=512, g=2, r=2, head=64, layers=1)
    sources = {
        "hub": tiny(folder / "hub", shards=3),
        "plain": quantized.store(folder / "plain", small),
        "fp8": quantized.store(folder / "fp8", quantized.llama(d=256, f=384, g=2, r=2, head=64, layers=1)),
        "mxfp4": quantized.store(folder / "mxfp4", quantized.gpt_oss(d=64, f=96, e=4)),
        "large": write(folder / "large", tensors(LARGE), config={**CONFIG, **LARGE}),
    }
    (sources["hub"] / "tokenizer.json").write_text("{}" * 1000)
    tx.convert(sources["hub"], folder / "dcp", to="dcp:torchtitan")
    tx.convert(sources["hub"], folder / "megatron", to="megatron_torch", tp=2, ep=2)
    return sources | {"dcp": folder / "dcp", "megatron": folder / "megatron"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of a source -> its folder."""
    return _sources(tmp_path_factory.mktemp("sources"))


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dcp", {"to": "hf", "shard_size": "20KB"}),
    ("megatron", {"to": "hf"}),
    ("hub", {"to": "dcp:torchtitan"}),
    ("hub", {"to": "torch:hf", "shard_size": "30KB"}),
    ("hub", {"to": "torch_dist"}),
    ("hub", {"to": "safetensors:megatron", "dtype": "fp32"}),
    ("large", {"to": "safetensors:torchtitan"}),
    ("plain", {"to": "hf", "encode": "float8_block"}),
    ("plain", {"to": "hf", "encode": "nvfp4", "shard_size": "200KB"}),
    ("plain", {"to": "hf", "encode": "int4"}),
    ("fp8", {"to": "hf", "decode": "bf16"}),
    ("mxfp4", {"to": "hf", "decode": "bf16"}),
)


@pytest.mark.parametrize("memory", [None, "400KB"])
@pytest.mark.parametrize(("source", "options"), CASES)
def test_bytes_are_those_of_convert(
    sources: dict[str, Path], source: str, options: dict[str, Any], memory: str | None, tmp_path: Path
) -> None:
    tx.convert(sources[source], tmp_path / "out", **options, memory=memory, sync=False)
    written = files_of(tmp_path / "out")
    del written[MANIFEST]
    with opened(sources[source], **{"memory": memory, **_with_bytes(options)}) as files:
        assert {name: file.size for name, file in files.files.items()} == {name: len(d) for name, d in written.items()}
        assert {name: whole(files, name) == data for name, data in written.items()} == dict.fromkeys(written, True)
        random = np.random.default_rng(0)
        for name, data in written.items():
            for _ in range(5):
                start, stop = sorted(random.integers(0, len(data) + 1, 2).tolist())
                assert b"".join(files.read(name, start, stop)) == data[start:stop]


def _with_bytes(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of `convert` with the shard size as `make_plan` takes it."""
    if "shard_size" not in options:
        return options
    return options | {"shard_size": int(options["shard_size"].removesuffix("KB")) * 1000}


Served = dict[str, tuple[PlannedFiles, dict[str, bytes]]]
"""Name of a source -> the files of a plan, and the bytes that `convert` writes."""


@pytest.fixture(scope="module")
def served(sources: dict[str, Path]) -> Iterator[Served]:
    with ExitStack() as stack:
        served = {}
        for name, to, decode in (("large", "safetensors:torchtitan", None), ("fp8", "hf", "bf16")):
            out = sources[name].parent / f"{name}-out"
            tx.convert(sources[name], out, to=to, decode=decode, sync=False)
            served[name] = stack.enter_context(opened(sources[name], to, decode=decode)), files_of(out)
        yield served


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_range_is_that_slice_of_the_file(served: Served, data: st.DataObject) -> None:
    files, written = served[data.draw(st.sampled_from(sorted(served)))]
    name = data.draw(st.sampled_from(sorted(files.files)))
    size = len(written[name])
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, min(size, start + 300_000)))
    assert b"".join(files.read(name, start, stop)) == written[name][start:stop]


def test_many_threads_read_at_once(served: Served) -> None:
    files, written = served["large"]
    name = max(files.files, key=lambda each: files.files[each].size)
    step = 777_777
    starts = range(0, len(written[name]), step)

    def read(start: int) -> bytes:
        return b"".join(files.read(name, start, min(start + step, len(written[name]))))

    with ThreadPoolExecutor(8) as pool:
        assert b"".join(pool.map(read, starts)) == written[name]


def test_a_range_reads_only_what_it_needs_and_a_stream_reads_each_byte_once(sources: dict[str, Path]) -> None:
    with tx.open(sources["large"]) as checkpoint:
        files = PlannedFiles(make_plan(checkpoint, "hf"), limits(1))
        storage = checkpoint.container.storage
        name = "model.safetensors"
        size = files.files[name].size
        before = storage.bytes_read
        assert len(b"".join(files.read(name, size - 100, size))) == 100
        assert storage.bytes_read - before <= 2 << 20
        before = storage.bytes_read
        for start in range(0, size, 100_001):  # as a client that asks for one range after the other
            b"".join(files.read(name, start, min(start + 100_001, size)))
        assert storage.bytes_read - before <= size


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    held = {f"layer.{n}": np.zeros((2048, 2048), ml_dtypes.bfloat16) for n in range(8)}
    with opened(write(tmp_path / "ck", held), "safetensors:identity", memory="4MB") as files:
        size = files.files["model.safetensors"].size
        assert size > 60 << 20
        tracemalloc.start()
        try:
            assert sum(len(block) for block in files.read("model.safetensors", 0, size)) == size
            assert tracemalloc.get_traced_memory()[1] < 24 << 20
        finally:
            tracemalloc.stop()


def test_a_changed_source_ends_every_read_before_its_last_block(tmp_path: Path) -> None:
    source = tiny(tmp_path / "ck", shards=2)
    with opened(source, "safetensors:torchtitan") as files:
        name, size = "model.safetensors", files.files["model.safetensors"].size
        blocks = files.read(name, 0, size)
        received = len(next(blocks))
        shard = source / "model-00002-of-00002.safetensors"
        os.utime(shard, (1, 1))
        with pytest.raises(Refused, match="changed") as caught:
            received += sum(map(len, blocks))
        assert received < size
        assert caught.value.code == "CORRUPT"
        with pytest.raises(Refused, match="changed"):
            files.require_unchanged()
        with pytest.raises(Refused, match="changed"):
            next(files.read("config.json", 0, 1))


def test_a_replaced_source_is_noticed(tmp_path: Path) -> None:
    source = tiny(tmp_path / "ck")
    with opened(source) as files:
        other = tiny(tmp_path / "other")
        (other / "model.safetensors").rename(source / "model.safetensors")
        with pytest.raises(TransaxleError):
            whole(files, "model.safetensors")


def test_damaged_tensors_never_arrive_whole(tmp_path: Path) -> None:
    """A source with hashes: the last block comes after they are checked, for ranges too."""
    tx.convert(tiny(tmp_path / "ck"), tmp_path / "hashed", to="hf")
    file = tmp_path / "hashed/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    last = len(data)
    with opened(tmp_path / "hashed", "safetensors:torchtitan") as files:
        size = files.files["model.safetensors"].size
        with pytest.raises(Refused, match="hash"):
            for _ in files.read("model.safetensors", 0, size):
                pass
    with opened(tmp_path / "hashed") as files, pytest.raises(Refused, match="hash"):
        b"".join(files.read("model.safetensors", last - 2, last))
    with opened(tmp_path / "hashed", check_source=False) as files:
        assert whole(files, "model.safetensors")[-3:] == bytes(data[-3:])


def test_values_that_become_infinite_are_refused_when_they_are_read(tmp_path: Path) -> None:
    held = tensors()
    held[NORM] = np.full(SIZES["hidden_size"], 1e38, ml_dtypes.bfloat16)
    source = write(tmp_path / "ck", held, config=CONFIG)
    with opened(source, dtype="fp16") as files, pytest.raises(Refused) as caught:
        whole(files, "model.safetensors")
    assert (caught.value.code, caught.value.where.tensor) == ("LOSSY", NORM)
    with opened(source, dtype="fp16", allow_lossy=True) as files:
        assert whole(files, "model.safetensors")
    held[NORM][:] = np.inf  # as it was before
    with opened(write(tmp_path / "infinite", held, config=CONFIG), dtype="fp16") as files:
        assert whole(files, "model.safetensors")


def test_everything_that_convert_refuses_first_is_refused_at_once(sources: dict[str, Path], tmp_path: Path) -> None:
    with tx.open(sources["hub"]) as checkpoint:
        plan = make_plan(checkpoint, "megatron_torch", degrees=Degrees(tp=2))
        with pytest.raises(Refused, match="among files of ranks"):
            PlannedFiles(plan, limits())
    tied = {**CONFIG, "tie_word_embeddings": True}
    untied = write(tmp_path / "untied", tensors(), config=tied)
    with pytest.raises(Refused, match="UNEQUAL_COPIES"), opened(untied, "safetensors:torchtitan"):
        pass


def test_identities_change_with_the_source_and_with_the_options(sources: dict[str, Path], tmp_path: Path) -> None:
    def identities(source: Path, to: str = "hf", **options: Any) -> list[str]:
        with opened(source, to, **options) as files:
            return [files.identity, files.files["model.safetensors"].identity]

    first = identities(sources["hub"])
    assert identities(sources["hub"]) == first
    variants = [
        identities(sources["hub"], "safetensors:torchtitan"),
        identities(sources["hub"], dtype="fp32"),
        identities(sources["plain"]),
        identities(tiny(tmp_path / "copy", shards=3)),
    ]
    assert len({name for names in [first, *variants] for name in names}) == 10
    os.utime(tmp_path / "copy/model-00001-of-00003.safetensors", (1, 1))
    assert identities(tmp_path / "copy") != variants[-1]
    with opened(sources["hub"]) as files:
        data = whole(files, "config.json")
        assert files.files["config.json"].identity == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
