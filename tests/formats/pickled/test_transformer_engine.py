"""TransformerEngine's tensors in pickles: what each release writes is understood, and nothing else is."""

from __future__ import annotations

import pytest

from tests.formats.pickled.assemble import FILE, RECORD, read
from tests.oracles.te_pickles import (
    BLOCKWISE,
    FLOAT8,
    FUNCTIONS,
    MODULES,
    MXFP8,
    NEWEST,
    NVFP4,
    ORDERS,
    PACKAGE,
    RELEASES,
    Release,
    call,
    member,
    name,
    plain,
    restored,
)
from transaxle.errors import Code, TransaxleError
from transaxle.formats.flattened_state import flatten
from transaxle.formats.pickled.descriptors import Global, Object, Quantized, TensorRef

BF16 = name("torch", "bfloat16")
SIZE = call(name("torch", "Size"), (2, 3))
VIEW = call(
    name("torch._utils", "_rebuild_tensor_v2"), 7, 0, (2, 3), (3, 1), False, call(name("collections", "OrderedDict"))
)
HOMES = {kind: f"{PACKAGE}.tensor.{module}" for kind, module in MODULES.items()}
BUFFERS = {
    argument
    for order in ORDERS.values()
    for argument in order
    if ("data" in argument and argument != "data_format") or "scale_inv" in argument or "amax" in argument
}


def value(opcodes: bytes) -> object:
    return read(b"\x80\x02" + opcodes + b".").value


def given(release: Release, **changed: object) -> dict[str, object]:
    arguments: dict[str, object] = dict.fromkeys(BUFFERS, VIEW)
    arguments |= {"codes": release.type_of_codes("e2m1" if release.kind == NVFP4 else "e4m3"), "dtype": BF16}
    arguments |= {"shape": SIZE, "is_2D_scaled": True, "quantizer": None}
    return arguments | changed


def refused(opcodes: bytes, code: Code, words: str) -> TransaxleError:
    with pytest.raises(TransaxleError) as error:
        value(opcodes)
    assert {refusal.code for refusal in error.value.refusals} == {code}
    for refusal in error.value.refusals:
        assert refusal.where.file == FILE
        assert RECORD in refusal.message
        assert words in refusal.message
    return error.value


@pytest.mark.parametrize("kind", MODULES)
def test_both_forms_are_found_at_any_protocol(kind: str) -> None:
    """`getattr` of a class is written as a name of its own at protocol 4."""
    release = NEWEST[kind]
    whole = given(release, nvfp4_e4m3_max=448)
    arguments = [whole.get(argument, False) for argument in release.arguments]
    stacked = plain(HOMES[kind]) + plain(FUNCTIONS[kind]) + b"\x93"
    assert isinstance(value(call(stacked, *arguments)), Quantized)


def test_a_tensor_that_a_recipe_leaves_alone() -> None:
    module = f"{PACKAGE}.tensor.identity_tensor"
    quantizer = restored(name(module, "IdentityQuantizer"), b"}")
    function = name(module, "_make_identity_tensor_in_reduce_ex")
    found = value(call(function, VIEW, quantizer, BF16, SIZE))
    assert isinstance(found, TensorRef)
    assert found.shape == (2, 3)
    refused(call(function, VIEW, quantizer, BF16, (2, 4)), "CORRUPT", "needs a tensor of the shape")
    refused(call(function, VIEW, quantizer, BF16), "CORRUPT", "4 arguments")


# What is not among them.


OUTSIDE = (
    ("torch", "Tensor"), ("transformer_engine_torch", "DType"), (f"{PACKAGE}.tensor.mxfp8_tensor", "Float8Tensor"),
    (f"{PACKAGE}.tensor.mxfp8_tensor", "MXFP8Quantizer"), (f"{PACKAGE}.mxfp8_tensor", "MXFP8Tensor"), ("os", "system"),
)  # fmt: skip
"""Classes whose methods are not read."""
OF_PACKAGE = (
    (f"{PACKAGE}.tensor.hybrid_tensor", "_make_hybrid_quantized_tensor_in_reduce_ex"),
    (f"{PACKAGE}.tensor.float8_tensor", "_make_mxfp8_tensor_in_reduce_ex"),
    (f"{PACKAGE}.tensor.float8_tensor", "torch"),
    (f"{PACKAGE}.tensor.storage.mxfp8_tensor_storage", "MXFP8TensorStorage"),
    ("transformer_engine_torch", "quantize"),
    ("transformer_engine.common.recipe", "DelayedScaling"),
)
ATTRIBUTES = ("__init__", "__reduce_ex__", "dequantize", "_make_in_reduce_ex.__func__", "")
UNREACHABLE = (
    *((member(HOMES[kind], kind, each), f"{HOMES[kind]}.{kind}", True) for kind in MODULES for each in ATTRIBUTES),
    *((member(*cls, "_make_in_reduce_ex"), f".{cls[1]}", False) for cls in OUTSIDE),
    *((name(*where), ".".join(where), True) for where in OF_PACKAGE),
)
"""What is called, what is said of it, and whether that is all."""


@pytest.mark.parametrize(("function", "said", "is_all"), UNREACHABLE, ids=[said for _, said, _ in UNREACHABLE])
def test_nothing_else_can_be_reached(function: bytes, said: str, is_all: bool) -> None:
    error = refused(call(function, VIEW), "UNSAFE_PICKLE", said)
    assert not is_all or len(error.refusals) == 1


def test_getattr_is_of_classes_only() -> None:
    module, function = HOMES[FLOAT8], name("builtins", "getattr")
    bound = member(module, FLOAT8, "_make_in_reduce_ex")
    for args in (
        (bound, "__func__"),
        (bound, "__globals__"),
        (VIEW, "data"),
        ("os", "system"),
        (name(module, FLOAT8), "_make_in_reduce_ex", None),
        (name(module, FLOAT8), 1),
        (name(module, FLOAT8),),
        (),
    ):
        with pytest.raises(TransaxleError) as error:
            value(call(function, *args))
        assert {refusal.code for refusal in error.value.refusals} <= {"CORRUPT", "UNSAFE_PICKLE"}


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: f"{release.kind} {release.version}")
def test_another_number_of_arguments(release: Release) -> None:
    whole = given(release)
    arguments = [whole.get(argument, False) for argument in release.arguments]
    known = {each.args for each in RELEASES if each.kind == release.kind and each.function() == release.function()}
    for count in range(17):
        if count not in known:
            refused(call(release.function(), *(arguments + [None] * 17)[:count]), "CORRUPT", f"arguments, not {count}")


_ENUM = name("transformer_engine_torch", "DType")
HUGE = 1 << 2000


@pytest.mark.parametrize(
    ("argument", "wrong", "words"),
    [
        ("codes", 7, "needs a type of codes"),
        ("codes", None, "needs a type of codes"),
        ("codes", _ENUM, "needs a type of codes"),
        ("codes", call(name("torch", "device"), 7), "needs a type of codes"),
        ("codes", call(_ENUM, 11), "unknown type 11"),
        ("codes", call(_ENUM, HUGE), "unknown type"),
        ("codes", call(_ENUM, -7), "malformed DType"),
        ("codes", call(_ENUM, True), "malformed DType"),
        ("codes", call(_ENUM, "7"), "malformed DType"),
        ("codes", call(_ENUM, 7, 8), "malformed DType"),
        ("codes", call(_ENUM), "malformed DType"),
        ("codes", restored(_ENUM, (7,)), "malformed DType"),
        ("codes", call(_ENUM, 7) + plain(7) + b"b", "malformed DType"),
        ("dtype", "bfloat16", "needs a dtype"),
        ("dtype", None, "needs a dtype"),
        ("shape", (2, -1), "-1 is not valid in the sizes"),
        ("shape", (2, HUGE), "out of range"),
        ("shape", (True, 2), "out of range"),
        ("shape", (1,) * 65, "65 sizes"),
        ("shape", 6, "list of counts, not a int"),
        ("shape", None, "list of counts, not a NoneType"),
        ("rowwise_data", 7, "needs a tensor for each buffer"),
        ("rowwise_data", call(name("torch", "Tensor")), "needs a tensor for each buffer"),
        ("rowwise_scale_inv", (VIEW,), "needs a tensor for each buffer"),
        ("columnwise_data", "x", "needs a tensor for each buffer"),
        ("quantizer", 7, "needs a quantizer"),
        ("quantizer", call(name("torch", "device"), "cpu"), "needs a quantizer"),
    ],
)
@pytest.mark.parametrize("kind", [MXFP8, BLOCKWISE, NVFP4])
def test_arguments_of_the_wrong_kind(kind: str, argument: str, wrong: object, words: str) -> None:
    release = NEWEST[kind]
    refused(release.pickled(given(release, **{argument: wrong})), "CORRUPT", words)


@pytest.mark.parametrize(
    ("kind", "argument", "wrong"),
    [
        (MXFP8, "with_gemm_swizzled_scales", 1),
        (MXFP8, "with_gemm_swizzled_scales", "yes"),
        (BLOCKWISE, "is_2D_scaled", 2),
        (BLOCKWISE, "data_format", 1),
        (BLOCKWISE, "data_format", call(_ENUM, 1)),
        (NVFP4, "row_scaled_nvfp4", b"]"),
        (NVFP4, "nvfp4_use_4over6", 0),
        (NVFP4, "nvfp4_e4m3_max", True),
        (NVFP4, "nvfp4_e4m3_max", "448"),
    ],
)
def test_settings_of_the_wrong_type(kind: str, argument: str, wrong: object) -> None:
    release = NEWEST[kind]
    refused(release.pickled(given(release, **{argument: wrong})), "CORRUPT", argument)


def test_nothing_is_given_to_such_a_tensor() -> None:
    """No release gives it attributes, items or keys."""
    release = NEWEST[FLOAT8]
    inner = release.pickled(given(release))
    refused(inner + b"}b", "CORRUPT", "gives attributes to a Quantized")
    refused(inner + b"Na", "CORRUPT", "appends to a Quantized")
    refused(inner + b"NNs", "CORRUPT", "sets a key of a Quantized")
    refused(inner + b")R", "CORRUPT", "calls a Quantized")


def test_a_class_that_is_called_otherwise_is_a_tensor_that_is_not_read() -> None:
    made = value(name(HOMES[MXFP8], MXFP8) + b")\x81")
    assert isinstance(made, Object)
    assert made.cls == Global(HOMES[MXFP8], MXFP8)
    (leaf,) = flatten({"a": made}, FILE)
    assert leaf.kind == "tensor"
