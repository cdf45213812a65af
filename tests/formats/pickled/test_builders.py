"""What well-known calls amount to."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from tests.formats.pickled.assemble import call, name, program, read, value
from transaxle.errors import TransaxleError
from transaxle.formats.pickled.descriptors import DType, Global, Object, Scalar, TensorRef

UTILS = "torch._utils"
VIEW = call(UTILS, "_rebuild_tensor_v2", 7, 3, (2, 5), (5, 1), False, {})


def test_views() -> None:
    old = read(program(call(UTILS, "_rebuild_tensor", 7, 3, (2, 5), (5, 1)))).value
    new = read(program(VIEW)).value
    typed = read(
        program(call(UTILS, "_rebuild_tensor_v3", 7, 3, (2, 5), (5, 1), False, {}, name("torch", "uint16")))
    ).value
    for view in (old, new, typed):
        assert (view.storage, view.offset, view.shape, view.strides, view.flags) == (7, 3, (2, 5), (5, 1), ())
    assert (old.dtype, new.dtype, typed.dtype) == (None, None, DType("uint16"))


def test_bits_that_change_values() -> None:
    flags = {"conj": True, "neg": False}
    assert read(program(call(UTILS, "_rebuild_tensor_v2", 7, 0, (), (), False, {}, flags))).value.flags == ("conj",)


@pytest.mark.parametrize(
    "wrapped",
    [
        call(UTILS, "_rebuild_parameter", VIEW, True, {}),
        call(UTILS, "_rebuild_parameter_with_state", VIEW, True, {}, {"note": 1}),
        call("torch.nn.parameter", "Parameter", VIEW, True),
        call("torch.nn.parameter", "Parameter", VIEW, opcode=b"\x81"),
    ],
)
def test_parameters_are_their_tensors(wrapped: bytes) -> None:
    found = read(program(wrapped)).value
    assert isinstance(found, TensorRef)
    assert found.storage == 7


def test_tensors_of_other_devices_are_kept_on_the_cpu() -> None:
    found = read(
        program(call(UTILS, "_rebuild_device_tensor_from_cpu_tensor", VIEW, name("torch", "bfloat16"), "xla:0", False))
    )
    assert (found.value.storage, found.value.dtype) == (7, DType("bfloat16"))
    sparse = call(UTILS, "_rebuild_sparse_tensor")
    found = read(
        program(call(UTILS, "_rebuild_device_tensor_from_cpu_tensor", sparse, name("torch", "bfloat16"), "x", False))
    )
    assert isinstance(found.value, Object)
    with pytest.raises(TransaxleError, match="needs a dtype"):
        read(program(call(UTILS, "_rebuild_device_tensor_from_cpu_tensor", VIEW, "bfloat16", "xla:0", False)))


def test_sizes() -> None:
    assert read(pickle.dumps(torch.Size([2, 3]))).value == (2, 3)
    assert read(program(call("torch", "Size"))).value == ()


def test_scalars_of_odd_types_stay_objects() -> None:
    for dtype, state, data in (
        ("M8[s]", (3, "<", None), bytes(8)),
        ("f8", (3, "?", None), bytes(8)),
        ("f8", (3,), bytes(8)),
        ("c8", (3, ">", None), bytes(8)),
        (5, (3, "<", None), bytes(8)),
    ):
        made = call("numpy", "dtype", dtype, False, True) + value(state) + b"b"
        found = read(program(call("numpy.core.multiarray", "scalar", made, value(data)))).value
        assert found.cls == Global("numpy.core.multiarray", "scalar")
    assert isinstance(read(program(call("numpy.core.multiarray", "scalar", 1))).value, Object)
    assert read(pickle.dumps(np.float64(2))).value == Scalar("F64", np.float64(2).tobytes())
