"""TransformerEngine's tensors in DCP folders: each rank's part with its own scales, read as one tensor."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import transaxle as tx
from tests.formats.dcp.damage import METADATA, archive
from tests.formats.refusals import refuses
from tests.oracles.te_pickles import (
    MXFP8,
    RELEASES,
    Array,
    File,
    Release,
    Tensor,
    blockwise,
    float8,
    mxfp8,
    name,
    nvfp4,
    padded,
)
from transaxle.errors import Code
from transaxle.formats.detect import open_container
from transaxle.formats.torch_file.quantized_tensors import NOTE, SCALE

NAME, DATA = "layer.weight", "__{}_0.distcp"
Part = tuple[tuple[int, ...], Tensor]
"""First index of a chunk, and the chunk as a tensor of its own."""


def one(tensor: Tensor, release: Release | None = None, **changed: Any) -> bytes:
    file = File()
    return file.pickled(tensor.opcodes(file, release, **changed))


Boxes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
Places = dict[tuple[str, tuple[int, ...] | None], tuple[str, bytes]]
"""Key, and first index of a chunk, or None for an object -> file and data."""


def described(shape: tuple[int, ...], boxes: Boxes = (), dtype: torch.dtype = torch.bfloat16) -> TensorStorageMetadata:
    """A tensor of these chunks, or of one; the metadata shows the type that torch sees."""
    places = boxes or [((0,) * len(shape), shape)]
    chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in places]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def store(folder: Path, items: dict[str, Any], places: Places, rank: str = "") -> None:
    """Write files, and the metadata that says which chunks, or objects, they are."""
    folder.mkdir(exist_ok=True)
    stored = {}
    for (key, start), (file, data) in places.items():
        (folder / file).write_bytes(data)
        stored[MetadataIndex(key, None if start is None else torch.Size(start))] = _StorageInfo(file, 0, len(data))
    (folder / f"{rank}{METADATA}").write_bytes(pickle.dumps(Metadata(items, {}, stored)))


def write(
    folder: Path, shape: tuple[int, ...], parts: Sequence[Part], archives: list[bytes] | None = None, *, key: str = NAME
) -> None:
    """A folder as torch lays it out, with a file for each rank."""
    data = [one(part) for _, part in parts] if archives is None else archives
    places: Places = {(key, start): (DATA.format(rank), data[rank]) for rank, (start, _) in enumerate(parts)}
    store(folder, {key: described(shape, [(start, part.shape) for start, part in parts])}, places)


def cut(tensor: Tensor, first: int, last: int) -> Part:
    """Some rows of a tensor as a tensor of its own, with scales that are padded again."""
    rows = last - first
    buffers: dict[str, Array] = {}
    for key, buffer in tensor.buffers.items():
        if key.endswith("_data") or key == "data":
            buffers[key] = np.ascontiguousarray(buffer[first:last])
        elif key == "rowwise_scale_inv":
            tile = 128 if tensor.kind.startswith("Float8Block") else 1
            pad = (1, 4) if tile > 1 else (128, 4)
            buffers[key] = padded(buffer[first // tile : -(-last // tile)], *pad)
        else:
            buffers[key] = buffer
    shape = (rows, *tensor.shape[1:])
    return (first, 0), Tensor(tensor.kind, buffers, tensor.values[first:last], shape, tensor.settings, tensor.code)


CASES: dict[str, tuple[Callable[[], Tensor], list[int]]] = {
    "float8": (lambda: float8(1, (10, 8)), [0, 4, 7, 10]),
    "mxfp8": (lambda: mxfp8(2, (160, 64), "rows"), [0, 64, 96, 160]),
    "float8_block": (lambda: blockwise(3, (300, 200)), [0, 128, 256, 300]),
    "nvfp4": (lambda: nvfp4(4, (20, 48)), [0, 5, 6, 20]),
    "nvfp4 of 256": (lambda: nvfp4(4, (20, 48), 256), [0, 11, 20]),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_of_several_ranks_are_one_tensor(case: str, tmp_path: Path) -> None:
    make, edges = CASES[case]
    whole = make()
    write(tmp_path / "cut", whole.shape, [cut(whole, *pair) for pair in pairwise(edges)])
    write(tmp_path / "whole", whole.shape, [((0, 0), whole)])
    with tx.open(tmp_path / "cut") as parts, tx.open(tmp_path / "whole") as all_of_it:
        assert list(parts) == list(all_of_it)
        for key in parts:
            assert (parts[key].dtype, parts[key].shape) == (all_of_it[key].dtype, all_of_it[key].shape)
            assert parts[key].tobytes() == all_of_it[key].tobytes()
        assert parts.encoded == all_of_it.encoded
        assert parts.encoded.keys() == {NAME}
        values = parts.decode("fp32")[NAME].read()
        np.testing.assert_allclose(values, whole.values, rtol=1e-6 if "nvfp4" in case else 0)


def test_two_matrices_side_by_side(tmp_path: Path) -> None:
    left, right = mxfp8(5, (32, 64), "rows"), mxfp8(6, (32, 32), "rows")
    write(tmp_path / "a", (32, 96), [((0, 0), left), ((0, 64), right)])
    with tx.open(tmp_path / "a") as checkpoint:
        values = checkpoint.decode("fp32")[NAME].read()
        np.testing.assert_array_equal(values, np.concatenate([left.values, right.values], 1))
    three, four = nvfp4(7, (8, 32)), nvfp4(7, (8, 16))
    four = Tensor(four.kind, {**four.buffers, "amax_rowwise": three.buffers["amax_rowwise"]}, four.values, four.shape)
    four = Tensor(four.kind, four.buffers, four.values, four.shape, three.settings, "e2m1")
    write(tmp_path / "b", (8, 48), [((0, 0), three), ((0, 32), four)])
    with tx.open(tmp_path / "b") as checkpoint:
        assert checkpoint[NAME].shape == (8, 24)
        found = checkpoint[NAME].read()
        np.testing.assert_array_equal(found[:, 16:], four.buffers["rowwise_data"])


def test_one_number_of_several_chunks_must_be_one(tmp_path: Path) -> None:
    """Each rank has the number; where they differ the codes mean other values, and no conversion is made."""
    whole = float8(8, (8, 4))
    first, (start, second) = cut(whole, 0, 4), cut(whole, 4, 8)
    write(tmp_path / "good", (8, 4), [first, (start, second)])
    other = {**second.buffers, "scale_inv": second.buffers["scale_inv"] * np.float32(2)}
    second = Tensor(second.kind, other, second.values, second.shape)
    write(tmp_path / "bad", (8, 4), [first, (start, second)])
    tx.convert(tmp_path / "good", tmp_path / "fine", to="safetensors")
    for options in ({}, {"decode": "bf16"}):
        with refuses("UNEQUAL_COPIES", NAME):
            tx.convert(tmp_path / "bad", tmp_path / "out", to="safetensors", **options)  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()


def test_the_type_of_codes_is_that_of_the_whole_checkpoint(tmp_path: Path) -> None:
    """A 6 in one tensor says that a 7 in another is e5m2."""
    old = next(each for each in RELEASES if each.kind == "Float8Tensor" and each.version == "2.0")
    archives = {"a": one(float8(1, (4, 4), "e5m2"), old), "b": one(float8(2, (4, 4)), old)}
    places: Places = {(key, (0, 0)): (f"{key}.distcp", data) for key, data in archives.items()}
    store(tmp_path, {key: described((4, 4)) for key in archives}, places)
    entries = open_container(str(tmp_path)).entries
    assert (entries["a"].dtype, entries["b"].dtype) == ("F8_E5M2", "F8_E4M3")


def test_a_tensor_that_was_saved_as_an_object(tmp_path: Path) -> None:
    tensor = mxfp8(9, (32, 64))
    store(tmp_path, {NAME: BytesStorageMetadata()}, {(NAME, None): ("a.distcp", one(tensor))})
    container = open_container(str(tmp_path))
    assert set(container.entries) == {NAME, NAME + SCALE}
    assert container.metadata[NOTE].keys() == {NAME}
    assert list(container.metadata["left_behind"]) == [f"{NAME}.columnwise_data"]
    with tx.open(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.decode("fp32")[NAME].read(), tensor.values)


def _halves(tensor: Tensor) -> list[Part]:
    rows = tensor.shape[0]
    return [cut(tensor, 0, rows // 2), cut(tensor, rows // 2, rows)]


def _release(version: str) -> Release:
    return next(each for each in RELEASES if (each.kind, each.version) == (MXFP8, version))


def _stack() -> list[Part]:
    stack = nvfp4(17, (4, 2, 32))
    part = Tensor(stack.kind, {**stack.buffers}, stack.values, stack.shape, stack.settings, "e2m1")
    return [((0, 0, 0), part), ((4, 0, 0), part)]


ROWS = mxfp8(12, (64, 32), "rows")
FIRST, SECOND = (part for _, part in _halves(ROWS))
REFUSED: dict[str, tuple[list[Part], list[bytes] | None, Code, str, str]] = {
    "a cut inside a tile": ([cut(blockwise(11, (256, 128)), 0, 192), cut(blockwise(11, (256, 128)), 192, 256)], None,
        "BLOCK_MISALIGNED", "begins at [192, 0], inside a tile of [128, 128]", METADATA),
    "two encodings": ([_halves(ROWS)[0], _halves(float8(12, (64, 32)))[1]], None, "DTYPE_MIXED",
        "float8 in tiles of (0, 0), type 7 and mxfp8", METADATA),
    "two numberings": (_halves(ROWS), [one(FIRST, _release("2.0")), one(SECOND, _release("2.16"))], "DTYPE_MIXED",
        "type 6 and mxfp8 in tiles of (1, 32), type 7", METADATA),
    "a plain part": (_halves(ROWS), [one(FIRST), archive(torch.ones(32, 32, dtype=torch.bfloat16))], "DTYPE_MIXED",
        "1 of its 2 chunks are quantized", METADATA),
    "another shape": (
        _halves(ROWS), [one(FIRST), one(ROWS)], "SHAPE_MISMATCH", "but [64, 32] in the file", DATA.format(1)),
    "another dtype": (_halves(ROWS), [one(FIRST), one(SECOND, dtype=name("torch", "float32"))], "DTYPE_MISMATCH",
        "says bfloat16, but the file holds float32", DATA.format(1)),
    "swizzled scales": ([((0, 0), ROWS)], [one(ROWS, with_gemm_swizzled_scales=True)], "UNSUPPORTED",
        "matrix-multiply kernel", DATA.format(0)),
    "a stack of matrices": (_stack(), None, "UNSUPPORTED", "stack of matrices in 2 chunks", METADATA),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "archives", "code", "words", "file"), REFUSED.values(), ids=REFUSED.keys())
def test_parts_that_do_not_fit_together_are_refused(
    parts: list[Part], archives: list[bytes] | None, code: Code, words: str, file: str, tmp_path: Path
) -> None:
    start, last = parts[-1]
    write(tmp_path, (start[0] + last.shape[0], *last.shape[1:]), parts, archives)
    with refuses(code, words, file=file, tensor=NAME) as caught:
        open_container(str(tmp_path))
    assert len(caught.value.refusals) == 1


@pytest.mark.parametrize("differs", [False, True])
def test_copies_of_ranks_that_saved_alone(differs: bool, tmp_path: Path) -> None:
    """Without coordination every rank wrote its own metadata, and all of the tensor; both are compared."""
    for rank in range(2):
        tensor = mxfp8(18, (32, 32), "rows")
        if differs and rank:
            tensor.buffers["rowwise_data"][3, 4] ^= 1
        place = DATA.format(rank), one(tensor)
        store(tmp_path / "in", {NAME: described((32, 32))}, {(NAME, (0, 0)): place}, f"__{rank}")
    assert len(open_container(str(tmp_path / "in")).twins) == 2
    with refuses("UNEQUAL_COPIES") if differs else nullcontext():
        tx.convert(tmp_path / "in", tmp_path / "out", to="safetensors")


def test_names_of_buffers_collide(tmp_path: Path) -> None:
    items = {NAME: described((4, 4)), NAME + SCALE: described((1,), dtype=torch.float32)}
    places: Places = {
        (NAME, (0, 0)): ("a.distcp", one(float8(19, (4, 4)))),
        (NAME + SCALE, (0,)): ("x.distcp", archive(torch.ones(1))),
    }
    store(tmp_path, items, places)
    with refuses("NAME_COLLISION", tensor=NAME + SCALE):
        open_container(str(tmp_path))
