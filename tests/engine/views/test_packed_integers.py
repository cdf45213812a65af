"""Codes of GPTQ and AWQ, shown as those of compressed-tensors: its own decompression gives the programs' own values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

import transaxle as tx
from tests.engine.packed import Made, awq, gptq, nibbles
from transaxle.encodings.conventions.quantization import read_packed
from transaxle.engine.source import Source
from transaxle.engine.views import packed_integers
from transaxle.engine.views.packed_integers import as_compressed_tensors, transpose_nibbles
from transaxle.errors import Refused
from transaxle.formats.catalog import Container, numpy_dtype

MODULE = "model.layers.0.mlp.up_proj"
CONFIG = "quantization_config"

MADE = {
    "gptq": gptq(48, 64, 16),
    "gptq, 8 bits": gptq(48, 64, 16, bits=8),
    "gptq_v2": gptq(48, 64, 16, first=False),
    "gptq_v2, 8 bits": gptq(16, 128, 32, bits=8, first=False),
    "gptq, desc_act": gptq(48, 64, 16, act=True),
    "gptq, desc_act, 8 bits": gptq(48, 64, 16, bits=8, act=True),
    "gptq, one group": gptq(48, 64, 64),
    "awq": awq(48, 64, 16),
    "awq, one group": awq(16, 64, 64),
}


@contextmanager
def shown(
    path: Path, tensors: Mapping[str, torch.Tensor], section: Mapping[str, Any]
) -> Iterator[tuple[Container, Any]]:
    """A file with the tensors of some modules, shown as compressed-tensors stores them, with the new section."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    with tx.open(path) as checkpoint:
        config = {CONFIG: section}
        method = read_packed(config)
        assert method is not None
        form = as_compressed_tensors(checkpoint.container, config, method)
        yield form.container, form.config[CONFIG]


def read(container: Container, name: str) -> torch.Tensor:
    entry = container.entries[name]
    data = Source(container).read(name).view(numpy_dtype(entry.dtype)).reshape(entry.shape)
    return torch.from_numpy(data.copy())


def under(module: str, made: Made) -> dict[str, torch.Tensor]:
    return {f"{module}.{name}": tensor for name, tensor in made.tensors.items()}


@pytest.mark.parametrize("band", [64, 1 << 21], ids=["small bands", "one band"])
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_compressed_tensors_decompresses_the_values_of_the_program(
    made: Made, band: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_integers, "_BAND", band)
    with shown(tmp_path, under(MODULE, made), made.section) as (container, section):
        state = {name.rpartition(".")[2]: read(container, name) for name in container.entries}
    (weights,) = (group["weights"] for group in section["config_groups"].values())
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    assert torch.equal(PackedQuantizationCompressor.decompress(state, scheme)["weight"], made.values)


def test_any_range_of_bytes_is_that_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_integers, "_BAND", 300)
    for made in (MADE["gptq, desc_act"], MADE["awq"]):
        with shown(tmp_path, under(MODULE, made), made.section) as (container, _):
            for name, entry in container.entries.items():
                whole, (extent,) = read(container, name).contiguous().view(torch.uint8).flatten().numpy(), entry.extents
                if extent.strides is not None:
                    continue
                for start, stop in ((0, 1), (3, 9), (7, len(whole) - 5), (len(whole) - 1, len(whole))):
                    part = container.storage.read(extent.file, start, stop - start)
                    assert part == whole[start:stop].tobytes()


def test_tensors_that_are_not_quantized_stay_as_they_are_and_in_place(tmp_path: Path) -> None:
    made = MADE["gptq"]
    others = {
        "a.weight": torch.ones(2),
        f"{MODULE}.bias": torch.ones(48),
        "z.weight": torch.ones(3, 3, dtype=torch.int8),
    }
    with shown(tmp_path, under(MODULE, made) | others, made.section) as (container, _):
        heads = [f"{MODULE}.{last}" for last in ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")]
        assert [*container.entries] == ["a.weight", f"{MODULE}.bias", *heads, "z.weight"]
        assert read(container, f"{MODULE}.weight_shape").tolist() == [48, 64]
        assert torch.equal(read(container, "z.weight"), others["z.weight"])


def test_modules_of_different_kinds_are_listed_by_name(tmp_path: Path) -> None:
    """`dynamic` of GPTQModel: other bits and group sizes for some modules, which the shapes show."""
    kinds = {"a": gptq(16, 64, 16), "b": gptq(16, 64, 32, bits=8), "c": gptq(16, 64, 64), "d": gptq(32, 64, 16)}
    tensors = {name: tensor for module, made in kinds.items() for name, tensor in under(module, made).items()}
    section = kinds["a"].section | {"dynamic": {"+:b": {"bits": 8, "group_size": 32}, "+:c": {"group_size": -1}}}
    with shown(tmp_path, tensors, section) as (container, changed):
        assert read(container, "b.weight_packed").shape == (16, 16)
    groups = [(group["targets"], group["weights"]) for group in changed["config_groups"].values()]
    assert [(sorted(names), w["num_bits"], w["strategy"], w.get("group_size")) for names, w in groups] == [
        (["a", "d"], 4, "group", 16), (["b"], 8, "group", 32), (["c"], 4, "channel", None)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_transposed_nibbles(seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 1 << 32, (3, 8, 5), np.uint32)
    assert (nibbles(transpose_nibbles(words)).swapaxes(1, 3) == nibbles(words)).all()


def test_a_zero_point_of_zero_borrows_from_its_neighbor() -> None:
    """The words of GPTQ's first format are one subtraction, as GPTQModel makes and undoes them."""
    made = MADE["gptq"]
    stored = nibbles(made.tensors["qzeros"].numpy().view(np.uint32))
    second = nibbles(gptq(48, 64, 16, first=False).tensors["qzeros"].numpy().view(np.uint32))
    assert (second == 0).any()
    assert not ((second - stored) % 16 == 1).all()


SMALL = gptq(16, 64, 16)
SMALL_AWQ = awq(16, 64, 16)


def changed(made: Made, name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tensors of a module with another tensor under one name, or none."""
    tensors = under("m", made) | ({} if tensor is None else {name: tensor})
    return {key: value for key, value in tensors.items() if tensor is not None or key != name}


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


MISFITS: dict[str, tuple[Made, str, torch.Tensor | None, str, str]] = {
    "no zero points": (SMALL, "m.qzeros", None, "MISSING_TENSOR", "codes of GPTQ need qzeros beside them"),
    "no scales": (SMALL_AWQ, "m.scales", None, "MISSING_TENSOR", "codes of AWQ need scales beside them"),
    "no codes": (SMALL, "m.qweight", None, "UNEXPECTED_TENSOR", "without codes; expected m.qweight"),
    "codes of bytes": (SMALL, "m.qweight", torch.zeros(8, 16, dtype=torch.uint8), "DTYPE_MISMATCH", "must be I32"),
    "codes of three dims": (SMALL, "m.qweight", i32(1, 8, 16), "SHAPE_MISMATCH", "of 2 dims"),
    "one word fewer": (SMALL, "m.qweight", i32(6, 16), "SHAPE_MISMATCH", "expected [3, 2] for 16 outputs, 48 inputs"),
    "half a group": (SMALL, "m.qweight", i32(7, 16), "SHAPE_MISMATCH", "do not fill whole words and groups"),
    "another number of outputs": (SMALL, "m.qweight", i32(8, 24), "SHAPE_MISMATCH", "expected [8, 16]"),
    "outputs that fill no word": (SMALL, "m.scales", torch.zeros(4, 15).half(), "SHAPE_MISMATCH", "15 outputs"),
    "zero points of fewer groups": (SMALL, "m.qzeros", i32(3, 2), "SHAPE_MISMATCH", "expected [4, 2]"),
    "scales of fewer groups": (SMALL, "m.scales", torch.zeros(2, 16).half(), "SHAPE_MISMATCH", "group_size 16"),
    "scales of integers": (SMALL, "m.scales", i32(4, 16), "DTYPE_MISMATCH", "must be F16 or BF16 or F32"),
    "an index of fewer columns": (SMALL, "m.g_idx", i32(63), "SHAPE_MISMATCH", "expected [64]"),
    "AWQ's zero points of fewer outputs": (SMALL_AWQ, "m.qzeros", i32(4, 1), "SHAPE_MISMATCH", "expected [4, 2]"),
    "a tensor with the new name": (SMALL, "m.weight_packed", i32(1), "NAME_COLLISION", "the codes m.qweight"),
}


@pytest.mark.parametrize(("made", "name", "tensor", "code", "message"), MISFITS.values(), ids=MISFITS)
def test_tensors_that_do_not_fit_are_refused(
    made: Made, name: str, tensor: torch.Tensor | None, code: str, message: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(Refused) as refused,
        shown(tmp_path, changed(made, name, tensor) | {"a": torch.ones(1)}, made.section),
    ):
        pass
    assert refused.value.code == code
    assert message in str(refused.value)
    assert (refused.value.where.tensor or "").startswith("m.")


def reindexed(made: Made, index: torch.Tensor) -> dict[str, torch.Tensor]:
    return under("m", made) | {"m.g_idx": index.int()}


ACT = gptq(16, 64, 16, act=True)
INDICES: dict[str, tuple[Made, torch.Tensor, str]] = {
    "columns in another order": (SMALL, (torch.arange(64) // 16).flip(0), "column 0 is in group 3, not 0"),
    "an index of another module": (SMALL, ACT.tensors["g_idx"], "the config says desc_act false"),
    "a group that does not exist": (ACT, torch.full((64,), 4), "column 0 is in group 4; there are 4 groups"),
    "a negative group": (ACT, torch.arange(64) // 16 - 1, "column 0 is in group -1; there are 4 groups"),
}


@pytest.mark.parametrize(("made", "index", "message"), INDICES.values(), ids=INDICES)
def test_an_index_that_contradicts_the_config_is_refused_when_codes_are_read(
    made: Made, index: torch.Tensor, message: str, tmp_path: Path
) -> None:
    name = "m.weight_scale" if made is ACT else "m.weight_packed"
    with shown(tmp_path, reindexed(made, index), made.section) as (container, _), pytest.raises(Refused) as refused:
        read(container, name)
    assert (refused.value.code, refused.value.where.tensor) == ("CORRUPT", "m.g_idx")
    assert message in str(refused.value)


def test_files_without_an_index_have_groups_in_order(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in under(MODULE, SMALL).items() if not name.endswith("g_idx")}
    with shown(tmp_path, tensors, SMALL.section) as (container, _):
        codes = read(container, f"{MODULE}.weight_packed")
    with shown(tmp_path, under(MODULE, SMALL), SMALL.section) as (container, _):
        assert torch.equal(read(container, f"{MODULE}.weight_packed"), codes)
