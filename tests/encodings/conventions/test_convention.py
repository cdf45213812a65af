"""Conventions: names both ways, shapes on disk, and what a per-tensor scale means."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transaxle.encodings.conventions.convention import (
    COMPRESSED_TENSORS,
    CONVENTIONS,
    PREFERRED,
    Convention,
    hub_convention,
    rescale,
)
from transaxle.encodings.conventions.scheme import CHANNEL
from transaxle.encodings.encoding import (
    ENCODINGS,
    FLOAT8,
    FLOAT8_BLOCK,
    INT4,
    INT8,
    MXFP4,
    MXFP8,
    NVFP4,
    Encoding,
    Role,
)
from transaxle.errors import TransaxleError
from transaxle.formats.catalog import nbytes

DEEPSEEK, COMPRESSED, GPT_OSS = (CONVENTIONS[name] for name in ("deepseek", "compressed_tensors", "gpt_oss"))
TORCHAO, MODELOPT = CONVENTIONS["torchao"], CONVENTIONS["modelopt"]

segments = st.one_of(st.sampled_from(["weight", "gate_up_proj", "weight_scale", "ü"]), st.text("ab_é1", min_size=1))
names = st.lists(segments, min_size=1, max_size=4).map(".".join)
held = st.sampled_from([(c, e) for c in CONVENTIONS.values() for e in ENCODINGS.values() if e.name in c.holds])


@given(names, held)
def test_names_go_both_ways(name: str, pair: tuple[Convention, Encoding]) -> None:
    convention, encoding = pair
    buffers = convention.buffers(name, encoding)
    assert len(set(buffers.values())) == len(buffers)
    for role, stored in buffers.items():
        assert stored == convention.stored(name, role, encoding)
        assert (name, role) in convention.places(stored)
        assert stored.rpartition(".")[0] == name.rpartition(".")[0]


@given(names, st.sampled_from(sorted(CONVENTIONS)))
def test_what_a_name_may_stand_for_is_stored_so(stored: str, key: str) -> None:
    convention = CONVENTIONS[key]
    kinds = [encoding for encoding in ENCODINGS.values() if encoding.name in convention.holds]
    for name, role in convention.places(stored):
        found = [convention.forms(kind)[role] for kind in kinds if role in convention.forms(kind)]
        head, dot, segment = name.rpartition(".")
        assert stored in {f"{head}{dot}{form(segment)}" for form in found}


@pytest.mark.parametrize(("convention", "encoding", "name", "expected"), [
    (DEEPSEEK, FLOAT8_BLOCK, "a.weight", ["a.weight", "a.weight_scale_inv", "a.activation_scale"]),
    (DEEPSEEK, FLOAT8_BLOCK, "experts.up", ["experts.up", "experts.up_scale_inv", "experts.up_activation_scale"]),
    (COMPRESSED, FLOAT8, "a.weight", ["a.weight", "a.weight_scale", "a.input_scale"]),
    (COMPRESSED, NVFP4, "a.weight",
     ["a.weight_packed", "a.weight_scale", "a.weight_global_scale", "a.input_global_scale"]),
    (COMPRESSED, INT4, "a.weight", ["a.weight_packed", "a.weight_scale", "a.weight_shape"]),
    (COMPRESSED, replace(INT4, zero_rows=8), "experts.up",
     ["experts.up_packed", "experts.up_scale", "experts.up_zero_point", "experts.up_shape"]),
    (COMPRESSED, replace(INT8, zero_rows=1), "a.weight",
     ["a.weight", "a.weight_scale", "a.weight_zero_point", "a.input_scale"]),
    (GPT_OSS, MXFP4, "experts.down_proj", ["experts.down_proj_blocks", "experts.down_proj_scales"]),
    (TORCHAO, NVFP4, "a.weight",
     ["a._weight_qdata", "a._weight_scale", "a._weight_per_tensor_scale", "a._weight_act_per_tensor_scale"]),
    (MODELOPT, NVFP4, "a.weight", ["a.weight", "a.weight_scale", "a.weight_scale_2", "a.input_scale"]),
])  # fmt: skip
def test_names_are_those_of_the_ecosystem(
    convention: Convention, encoding: Encoding, name: str, expected: list[str]
) -> None:
    assert list(convention.buffers(name, encoding).values()) == expected


def test_only_the_last_segment_counts() -> None:
    assert DEEPSEEK.places("weight_scale_inv.a") == (("weight_scale_inv.a", Role.CODES),)
    assert not GPT_OSS.places("down_proj_blocks.weight")
    assert TORCHAO.places("weight") == ()


@pytest.mark.parametrize(("convention", "encoding", "shape", "role", "expected"), [
    (DEEPSEEK, FLOAT8_BLOCK, (576, 7168), Role.CODES, ("F8_E4M3", (576, 7168))),
    (DEEPSEEK, FLOAT8_BLOCK, (576, 7168), Role.SCALE, ("F32", (5, 56))),
    (DEEPSEEK, FLOAT8_BLOCK, (8, 256, 384), Role.SCALE, ("F32", (8, 2, 3))),
    (DEEPSEEK, FLOAT8, (256, 384), Role.SCALE, ("F32", ())),
    (DEEPSEEK, FLOAT8, (8, 256, 384), Role.SCALE, ("F32", (8, 1, 1))),
    (DEEPSEEK, MXFP8, (256, 384), Role.SCALE, ("F8_E8M0", (256, 12))),
    (DEEPSEEK, FLOAT8_BLOCK, (8, 256, 384), Role.INPUT_SCALE, ("F32", (8,))),
    (COMPRESSED, FLOAT8, (256, 384), Role.SCALE, ("F32", (1,))),
    (COMPRESSED, CHANNEL, (256, 384), Role.SCALE, ("F32", (256, 1))),
    (COMPRESSED, MXFP8, (256, 384), Role.SCALE, ("U8", (256, 12))),
    (COMPRESSED, MXFP4, (256, 384), Role.CODES, ("U8", (256, 192))),
    (COMPRESSED, NVFP4, (256, 384), Role.SCALE, ("F8_E4M3", (256, 24))),
    (COMPRESSED, NVFP4, (256, 384), Role.GLOBAL, ("F32", (1,))),
    (GPT_OSS, MXFP4, (4, 96, 64), Role.CODES, ("U8", (4, 96, 2, 16))),
    (GPT_OSS, MXFP4, (4, 96, 64), Role.SCALE, ("U8", (4, 96, 2))),
    (MODELOPT, NVFP4, (256, 384), Role.GLOBAL, ("F32", ())),
    (MODELOPT, CHANNEL, (256, 384), Role.SCALE, ("F32", (256,))),
])  # fmt: skip
def test_shapes_on_disk(
    convention: Convention, encoding: Encoding, shape: tuple[int, ...], role: Role, expected: object
) -> None:
    assert convention.presented(encoding, shape, role) == expected


@given(held, st.integers(0, 5), st.integers(0, 5), st.integers(0, 4))
def test_elements_come_back_from_the_stored_codes(
    pair: tuple[Convention, Encoding], experts: int, rows: int, groups: int
) -> None:
    convention, encoding = pair
    shape = (experts, rows, 32 * groups)
    dtype, stored = convention.presented(encoding, shape, Role.CODES)
    assert convention.elements(encoding, dtype, stored) == shape
    assert nbytes(dtype, stored) * 8 == int(np.prod(shape)) * encoding.code_bits


def test_a_type_that_is_stored_stays_when_bytes_only_move() -> None:
    assert DEEPSEEK.presented(MXFP8, (4, 64), Role.SCALE, "U8") == ("U8", (4, 2))
    assert COMPRESSED.presented(FLOAT8, (4, 64), Role.INPUT_SCALE, "BF16") == ("BF16", (1,))
    assert COMPRESSED.presented(NVFP4, (4, 64), Role.CODES, "F4") == ("U8", (4, 32))


def test_codes_that_do_not_fit_are_refused_or_have_no_elements() -> None:
    for convention, width in ((COMPRESSED, 33), (GPT_OSS, 48)):
        with pytest.raises(TransaxleError, match=rf"found \[4, {width}\]") as caught:
            convention.presented(MXFP4, (4, width), Role.CODES)
        assert caught.value.code == "SHAPE_MISMATCH"
    assert GPT_OSS.elements(MXFP4, "U8", (4, 96, 2, 8)) is None
    assert GPT_OSS.elements(MXFP4, "U8", (16,)) is None
    assert COMPRESSED.elements(NVFP4, "U8", ()) is None


def test_a_foreign_encoding_is_refused() -> None:
    with pytest.raises(TransaxleError, match="can only hold float8, float8_block, mxfp8; found nvfp4") as caught:
        DEEPSEEK.stored("a.weight", Role.CODES, NVFP4)
    assert caught.value.code == "UNSUPPORTED"
    with pytest.raises(TransaxleError, match="no name for the input_scale of mxfp4"):
        GPT_OSS.stored("a", Role.INPUT_SCALE, MXFP4)


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_the_global_scale_means_amax_over_2688(amax: float) -> None:
    """NVFP4: `value = code x scale x amax / (6 x 448)`, whichever way round a convention stores that factor."""
    for convention in (COMPRESSED, MODELOPT, TORCHAO):
        stored = convention.global_from_amax(amax, NVFP4)
        assert stored.dtype == np.float32
        assert convention.factor(float(stored), NVFP4) == pytest.approx(amax / 2688, rel=3e-7)


def test_global_scales_at_the_ends() -> None:
    """Without a size it is one, and of a tensor that holds NaN nothing reads as a number."""
    for convention in (COMPRESSED, MODELOPT):
        assert [convention.global_from_amax(amax, NVFP4) for amax in (0.0, -0.0, float("inf"))] == [1, 1, 1]
        stored = convention.global_from_amax(float("nan"), NVFP4)
        assert np.isnan(stored)
        assert np.isnan(convention.factor(float(stored), NVFP4))
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    assert COMPRESSED.global_from_amax(tiny, NVFP4) == np.finfo(np.float32).max, "no overflow"
    assert COMPRESSED.factor(7.0, MXFP4) == 1, "without a global scale"


def test_what_is_encoded_here_has_a_convention_that_is_written() -> None:
    assert PREFERRED.keys() == ENCODINGS.keys()
    for encoding, name in PREFERRED.items():
        assert encoding in CONVENTIONS[name].writes or encoding in {"nf4", "fp4"}
    assert all(convention.writes <= convention.holds for convention in CONVENTIONS.values())


# Restating the amax of an nvfp4 tensor as a divisor, against what compressed-tensors computes with it.

BLOCKS = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BINADE = np.arange(0x3F80, 0x4000, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
"""Every bfloat16 from 1 to 2."""


def _unlike(amax: float, divisor: float, dtype: torch.dtype) -> bool:
    """Whether torch, an operation at a time, has another value somewhere."""
    ours = (BLOCKS.double() * (amax / 2688)).float()[:, None] * CODES
    theirs = (BLOCKS / torch.tensor([divisor]))[:, None] * CODES  # `_dequantize` of compressed-tensors 0.20
    return not torch.equal(ours.to(dtype), theirs.to(dtype))


@pytest.mark.parametrize(
    ("dtype", "kind", "found"), [("BF16", torch.bfloat16, 126), ("F16", torch.float16, 128), ("F32", torch.float32, 29)]
)
def test_an_amax_is_restated_where_no_value_changes(dtype: str, kind: torch.dtype, found: int) -> None:
    made, same = rescale(BINADE, NVFP4, COMPRESSED, dtype)
    assert np.array_equal(made, np.float32(2688) / BINADE)
    pairs = zip(BINADE.tolist(), made.tolist(), strict=True)
    assert same.tolist() == [not _unlike(amax, divisor, kind) for amax, divisor in pairs]
    assert same.sum() == found


def test_other_amaxes_are_restated() -> None:
    """Ties, where a divisor that is a little off goes wrong, need an amax of few digits: master weights have none."""
    amax = np.exp(np.random.default_rng(0).uniform(-6, 3, 400)).astype(np.float32)
    assert rescale(amax, NVFP4, COMPRESSED, "BF16")[1].all()
    amax = np.array([[0.0], [np.inf], [np.nan]], np.float32)
    made, same = rescale(amax, NVFP4, COMPRESSED, "BF16")
    assert (made.shape, same.tolist()) == ((3, 1), [[True], [False], [True]])
    halved = replace(NVFP4, scale_max=256)
    made, same = rescale(np.array([1.7], np.float32), halved, COMPRESSED, "BF16")
    assert (made.tolist(), same.tolist()) == ([float(np.float32(1536) / np.float32(1.7))], [True])


@pytest.mark.parametrize(("encodings", "name"), [
    ([FLOAT8_BLOCK], DEEPSEEK.name),
    ([MXFP8], DEEPSEEK.name),
    ([FLOAT8_BLOCK, MXFP8], DEEPSEEK.name),
    ([FLOAT8], COMPRESSED_TENSORS),
    ([MXFP8, NVFP4], COMPRESSED_TENSORS),
    ([FLOAT8_BLOCK, FLOAT8], COMPRESSED_TENSORS),
])  # fmt: skip
def test_one_config_speaks_of_one_convention(encodings: list[Encoding], name: str) -> None:
    assert hub_convention(encodings).name == name
