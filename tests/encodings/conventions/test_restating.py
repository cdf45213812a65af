"""Per-tensor scales in another convention, compared with the formulas of the ecosystems in torch's float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.some import some
from transaxle.encodings.conventions.convention import CONVENTIONS
from transaxle.encodings.conventions.quantization import read
from transaxle.encodings.conventions.restating import (
    RECODINGS,
    RESTATED_CONVENTIONS,
    RestatedNumbers,
    activations,
    describe_inputs,
    restate_globals,
)
from transaxle.encodings.encoding import ENCODINGS, MXFP8, NVFP4, EncodedTensor, Role
from transaxle.options import OPTIONS

PEER, EXPORTER, ENGINE = CONVENTIONS["compressed_tensors"], CONVENTIONS["modelopt"], CONVENTIONS["te"]
SCALES = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _values(number: float, name: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """All products of a code and a block scale, as the ecosystem computes them in float32."""
    whole = torch.tensor(number, dtype=torch.float32)
    scales = {
        "compressed_tensors": SCALES / whole,
        "modelopt": SCALES * whole,
        "te": (SCALES.double() * whole.double() / 2688).float(),
    }[name]
    return (scales[:, None] * CODES).to(dtype)


def _restate(number: float, source: str, target: str, dtype: str = "BF16") -> RestatedNumbers:
    numbers = np.array([number], np.float32)
    return restate_globals(numbers, NVFP4, CONVENTIONS[source], CONVENTIONS[target], dtype)


def test_the_command_line_names_the_targets() -> None:
    assert set(OPTIONS["restate"].choices) == {*RESTATED_CONVENTIONS, *RECODINGS, "bf16"}
    assert {source for sources in RECODINGS.values() for source in sources} | RECODINGS.keys() <= ENCODINGS.keys()


def test_a_divisor_of_300_becomes_the_nearest_factor_and_returns() -> None:
    there = _restate(300.0, "compressed_tensors", "modelopt")
    assert there.numbers[0] == np.float32(1) / np.float32(300)
    assert there.is_exact.all()
    assert there.returns.all()
    back = _restate(float(there.numbers[0]), "modelopt", "compressed_tensors")
    assert back.numbers.tobytes() == np.float32(300).tobytes()


@given(st.integers(0, 0xB504F2 - 0x800000), st.integers(-60, 60))
def test_a_mantissa_below_the_root_of_two_returns(fraction: int, power: int) -> None:
    number = float(np.ldexp(np.float32(0x800000 + fraction), power - 23))
    there = _restate(number, "compressed_tensors", "modelopt")
    assert there.returns.all() == there.is_exact.all()
    if there.is_exact.all() and there.numbers[0] == np.float32(1) / np.float32(number):
        assert np.float32(1) / there.numbers[0] == np.float32(number)


@given(
    st.floats(2.0**-20, 2.0**20, width=32),
    st.sampled_from(["compressed_tensors", "modelopt", "te"]),
    st.sampled_from(["compressed_tensors", "modelopt", "te"]),
    st.sampled_from(["BF16", "F16"]),
)
def test_exact_means_that_no_value_changes(number: float, source: str, target: str, dtype: str) -> None:
    result = _restate(number, source, target, dtype)
    kind = {"BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    before, after = _values(number, source, kind), _values(float(result.numbers[0]), target, kind)
    same = bool((before.view(torch.uint8) == after.view(torch.uint8)).all())
    assert same == bool(result.is_exact[0])


@pytest.mark.parametrize(
    ("number", "source", "target"),
    [(1.83984375, "modelopt", "compressed_tensors"), (1.1089109182357788, "compressed_tensors", "modelopt")],
)
def test_a_neighbour_keeps_values_that_the_nearest_number_changes(number: float, source: str, target: str) -> None:
    result = _restate(number, source, target)
    nearest = np.float32(1) / np.float32(number)
    assert result.is_exact.all()
    assert result.numbers[0] != nearest
    assert torch.equal(_values(number, source), _values(float(result.numbers[0]), target))
    assert not torch.equal(_values(number, source), _values(float(nearest), target))


def test_what_no_number_expresses_is_not_exact() -> None:
    """In float32 a factor of 1/3 rounds otherwise than a divisor of 3."""
    result = _restate(3.0, "compressed_tensors", "modelopt", "F32")
    assert not result.is_exact.any()
    assert not result.returns.any()


def test_an_amax_of_zero_is_one_in_other_conventions() -> None:
    assert _restate(0.0, "te", "compressed_tensors").numbers.tolist() == [1.0]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "NVFP4"])
def test_inputs_are_described_as_in_the_presets_of_compressed_tensors(name: str, static: bool) -> None:
    peers = pytest.importorskip("compressed_tensors.quantization")
    scheme = peers.preset_name_to_scheme(name, ["Linear"])
    assert (scheme.input_activations.dynamic is False or name == "NVFP4") == (name in {"FP8", "NVFP4"})
    if static != (name in {"FP8", "NVFP4"}):
        return
    section = {"config_groups": {name: ["Linear"]}, "format": "mixed-precision", "quant_method": "compressed-tensors"}
    (encoding,) = some(read({"quantization_config": section})).encodings("q_proj")
    described = peers.QuantizationArgs(**activations(encoding, static=static))
    fields = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic")
    assert [getattr(described, field) for field in fields] == [
        getattr(scheme.input_activations, field) for field in fields
    ]


def test_a_section_of_another_method_says_nothing_of_inputs() -> None:
    tensor = EncodedTensor("q.weight", MXFP8, (32, 32), {Role.CODES: "q.weight"}, "deepseek")
    source = read({"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 32]}})
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}}
    assert describe_inputs(config, source, {"q.weight": tensor}) == config
