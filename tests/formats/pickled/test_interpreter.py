"""Pickles of every protocol are read as plain data and descriptors; any bytes give a value or a refusal."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import io
import pathlib
import pickle
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.pickled.assemble import FILE, RECORD, call, name, program, read, text, value
from tests.formats.refusals import refuses
from transaxle.errors import TransaxleError
from transaxle.formats.flattened_state import Odd, flatten, is_tensor
from transaxle.formats.pickled.descriptors import DType, Global, Key, Object, OrderedMap, Scalar, TensorRef
from transaxle.formats.pickled.interpreter import OPCODES, Bounds, PickleEnds, read_pickle
from transaxle.formats.training_state import KeyPath, Leaf, arrange

PROTOCOLS = range(1, pickle.HIGHEST_PROTOCOL + 1)
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**600), 2**600)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(2**63), 2**64 - 1) | st.none() | st.binary(), inner)
    ),
    max_leaves=20,
)


@given(plain, st.sampled_from(PROTOCOLS))
def test_plain_values(what: Any, protocol: int) -> None:
    data = pickle.dumps(what, protocol)
    found = read(data)
    assert found.value == what
    assert repr(found.value) == repr(what)
    assert found.end == len(data)
    assert found.protocol == (protocol if protocol > 1 else 0)


@given(plain, st.sampled_from(PROTOCOLS))
def test_the_other_pickler(what: Any, protocol: int) -> None:
    """Python has two picklers; the one written in Python chooses other opcodes here and there."""
    file = io.BytesIO()
    pickle._Pickler(file, protocol).dump(what)
    assert repr(read(file.getvalue()).value) == repr(what)


@every_protocol
def test_large_values(protocol: int) -> None:
    what = {
        "text": "é" * 70_000,
        "bytes": bytes(range(256)) * 300,
        "list": list(range(3000)),
        "array": bytearray(70_000),
    }
    found = read(pickle.dumps(what, protocol)).value
    assert found == what


@every_protocol
def test_what_is_shared_stays_shared(protocol: int) -> None:
    inner: list[int] = [1]
    found = read(pickle.dumps({"a": inner, "b": (inner, inner)}, protocol)).value
    assert found["a"] is found["b"][0] is found["b"][1]


@every_protocol
def test_what_holds_itself(protocol: int) -> None:
    what: list[Any] = []
    what.append({"self": what})
    found = read(pickle.dumps(what, protocol)).value
    assert found[0]["self"] is found


@every_protocol
def test_dicts_of_the_library(protocol: int) -> None:
    ordered = collections.OrderedDict([("b", 1), ("a", 2)])
    counted = collections.Counter("aab")
    default = collections.defaultdict(list, {"x": [1]})
    found = read(pickle.dumps([ordered, counted, default], protocol)).value
    assert [type(one) for one in found] == [OrderedMap] * 3
    assert [list(one.items()) for one in found] == [[("b", 1), ("a", 2)], [("a", 2), ("b", 1)], [("x", [1])]]


@every_protocol
def test_attributes_of_a_dict(protocol: int) -> None:
    """torch hangs the versions of its modules on a state dict."""
    what = collections.OrderedDict(weight=1)
    what._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    found = read(pickle.dumps(what, protocol)).value
    assert found == {"weight": 1}
    assert found.state == {"_metadata": {"": {"version": 1}}}


@every_protocol
def test_objects_are_described(protocol: int) -> None:
    space = argparse.Namespace(lr=0.1, name="x")
    moment = datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)
    path = pathlib.PurePosixPath("a/b")
    number, identity, queue = decimal.Decimal("1.5"), uuid.UUID(int=5), collections.deque([1, 2], 3)
    found = read(pickle.dumps([space, moment, path, number, identity, queue], protocol)).value
    assert [str(one.cls) for one in found] == [
        "argparse.Namespace", "datetime.datetime", f"{type(path).__module__}.PurePosixPath", "decimal.Decimal",
        "uuid.UUID", "collections.deque",
    ]  # fmt: skip
    assert found[0].state == {"lr": 0.1, "name": "x"}
    assert found[3].args == ("1.5",)
    assert found[5].items == [1, 2]


@every_protocol
@pytest.mark.parametrize(
    "number", [np.float32(1.5), np.int64(-3), np.bool_(True), np.uint8(200), np.float16(2), np.complex64(1j)]
)
def test_numpy_scalars(protocol: int, number: np.generic) -> None:
    found = read(pickle.dumps(number, protocol)).value
    assert isinstance(found, Scalar)
    assert found.data == number.tobytes()
    assert found.code == {"f": "F", "i": "I", "u": "U", "b": "BOOL", "c": "C"}[number.dtype.kind] + (
        "" if number.dtype.kind == "b" else str(8 * number.dtype.itemsize)
    )


def test_big_endian_scalars() -> None:
    dtype = np.dtype(">f4")
    found = read(pickle.dumps(_scalar(dtype, b"\x3f\xc0\0\0"))).value
    assert found == Scalar("F32", np.float32(1.5).tobytes())


class _Reduced:
    """Pickles as a call that was written down."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def _scalar(dtype: np.dtype[Any], data: bytes) -> _Reduced:
    return _Reduced(np.dtype("f4").type(0).__reduce__()[0], dtype, data)


def test_objects_of_old_protocols() -> None:
    """`copyreg._reconstructor` names the class; steps of protocol 0 that nobody writes are refused."""
    made = read(
        program(call("copy_reg", "_reconstructor", name("argparse", "Namespace"), name("__builtin__", "object"), None))
    )
    assert str(made.value.cls) == "argparse.Namespace"
    oldest = (
        b"(I5\niargparse\nNamespace\n.",
        program(b"(", name("argparse", "Namespace"), value(5), b"o"),
        b"Pkey 7\n.",
    )
    for data in (*oldest, b"(l.", *(pickle.dumps(what, 0) for what in ("text", 1.5, [1], {1: 2}, (1,)))):
        with refuses("CORRUPT", "protocol 0"):
            read(data)


def test_text_of_python_2() -> None:
    assert read(b"I5000000000\n.").value == 5_000_000_000
    assert read(b"U\x02ab.").value == "ab"
    assert read(b"T\x02\0\0\0\xc3\xa9.").value == "é"
    assert read(b"T\x02\0\0\0\xff\xfe.").value == b"\xff\xfe"


def test_bound_methods_that_are_listed() -> None:
    """`getattr(Class, "method")` gives the method if the table has it, under the name it has in its module."""
    from transaxle.formats.pickled.allowed import ALLOWED, INERT

    allowed = {**ALLOWED, ("te", "Tensor"): INERT, ("te", "Tensor.make"): INERT}
    data = program(call("__builtin__", "getattr", name("te", "Tensor"), "make"), value((7,)), b"R")
    found = read_pickle(data, file=FILE, allowed=allowed).value
    assert (found.cls, found.args) == (Global("te", "Tensor.make"), (7,))
    with refuses("UNSAFE_PICKLE", "te.Tensor.other"):
        read_pickle(data.replace(text("make"), text("other")), file=FILE, allowed=allowed)


def test_keys_that_are_no_scalars_are_kept_aside() -> None:
    """Hashing what a stranger nested may never end: such a key is equal only to itself."""
    found = read(pickle.dumps({(1, 2): "a", 2**70: "b", 1j: "c", "d": "e"})).value
    assert [key.value if isinstance(key, Key) else key for key in found] == [(1, 2), 2**70, 1j, "d"]


@given(st.integers(0, 200))
def test_a_pickle_that_goes_on(cut: int) -> None:
    data = pickle.dumps({"a": [1, "x" * 100], "b": b"y" * 50, "c": (1.5, 2**40)})
    part = data[: min(cut, len(data) - 1)]
    with pytest.raises(PickleEnds):
        read_pickle(part, file=FILE, complete=False)
    with refuses("CORRUPT", RECORD, file=FILE):
        read_pickle(part, file=FILE, record=RECORD)


def test_all_names_are_listed_at_once() -> None:
    data = program(b"(", name("os", "system"), name("builtins", "eval"), name("os", "system"), b"t")
    with pytest.raises(TransaxleError) as caught:
        read(data)
    assert [refusal.code for refusal in caught.value.refusals] == ["UNSAFE_PICKLE"] * 2
    said = [refusal.message for refusal in caught.value.refusals]
    assert "os.system" in said[0]
    assert "builtins.eval" in said[1]
    assert all(RECORD in message for message in said)


def test_a_name_is_reported_even_if_the_rest_is_broken() -> None:
    with refuses("UNSAFE_PICKLE"):
        read(program(name("os", "system"))[:-1] + b"\xff")


@pytest.mark.parametrize("steps", [b"}", b"]", b"(", b"N", b"\x8f", b"(t", b")R", b"K\0"], ids=repr)
def test_memory_is_bounded(steps: bytes) -> None:
    """However small its steps, a pickle cannot build more than it was granted."""
    head = name("argparse", "Namespace") if steps == b")R" else b""
    unit = name("argparse", "Namespace") + steps if head else steps
    data = program(unit * 20_000, b"0" * 19_999)
    with refuses("CORRUPT", "more objects than any real checkpoint"):
        read(data, bounds=Bounds(memory=100_000))


def test_size_is_bounded() -> None:
    with pytest.raises(TransaxleError, match="more objects than any real checkpoint"):
        read(program(b"N0" * 1000, b"N"), bounds=Bounds(size=1000))


# Calls that rebuild tensors, parameters and scalars.

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


# Leaves of nested values.


def tensor_ref() -> TensorRef:
    return TensorRef(None, None, 0, (1,), (1,))


def paths(leaves: list[Leaf], kind: str) -> list[KeyPath]:
    return [leaf.path for leaf in leaves if leaf.kind == kind]


def test_lists_are_walked_only_for_what_they_hold() -> None:
    """As `torch.distributed.checkpoint` does: a list of numbers is one thing, a list of tensors is many."""
    leaves = flatten(
        {"a": [tensor_ref(), 1], "b": [1, 2], "c": [{"d": 3}], "e": (tensor_ref(),), "f": [], "g": ()}, FILE
    )
    assert paths(leaves, "tensor") == [("a", 0), ("e", 0)]
    assert paths(leaves, "number") == [("a", 1), ("c", 0, "d")]
    assert [(leaf.path, leaf.what) for leaf in leaves if leaf.kind == "other"] == [
        (("b",), "list of 2"),
        (("f",), "list of 0"),
        (("g",), "tuple of 0"),
    ]


def test_keys_in_the_paths_of_leaves() -> None:
    leaves = flatten(OrderedMap({1: tensor_ref(), "x": {b"y": 2, None: 3, Key((1, 2)): 4}}), FILE)
    assert [leaf.path for leaf in leaves] == [(1,), ("x", "<bytes>"), ("x", "<NoneType>"), ("x", "<Key>")]
    assert [isinstance(leaf.path[-1], Odd) for leaf in leaves] == [False, True, True, True]


@given(plain)
def test_every_leaf_is_where_its_path_leads(what: Any) -> None:
    for leaf in flatten(what, FILE):
        if any(isinstance(key, Odd) for key in leaf.path):
            continue
        found = what
        for key in leaf.path:
            found = found[key]
        assert found is leaf.value or found == leaf.value
        assert not is_tensor(found)


# Any bytes, and changed bytes of real pickles.

REFUSAL_CODES = {"CORRUPT", "UNSAFE_PICKLE", "UNSUPPORTED", "NAME_COLLISION"}
BOUNDS = Bounds(memory=10_000_000)
GLOBALS = [
    "ccollections\nOrderedDict\n", "cargparse\nNamespace\n", "ctorch._utils\n_rebuild_tensor_v2\n", "ctorch\nSize\n",
    "cnumpy.core.multiarray\nscalar\n", "c__builtin__\ngetattr\n", "c_codecs\nencode\n", "cos\nsystem\n",
    "ctorch\nfloat32\n", "ctorch._tensor\n_rebuild_from_type_v2\n", "ctorch._utils\n_rebuild_parameter\n",
]  # fmt: skip


def survives(data: bytes) -> None:
    refused: TransaxleError | None = None
    try:
        arrange(flatten(read(data, bounds=BOUNDS).value, FILE), file=FILE)
    except TransaxleError as error:
        refused = error
    if refused is not None:
        assert {refusal.code for refusal in refused.refusals} <= REFUSAL_CODES
        assert refused.where.file == FILE


@given(st.binary())
def test_any_bytes_give_a_value_or_a_refusal(data: bytes) -> None:
    survives(data)


opcodes = st.sampled_from(sorted(OPCODES)) | st.sampled_from(GLOBALS).map(str.encode)
operands = st.sampled_from([b"", b"\0", b"\1", b"\0\0\0\0", b"\2\0\0\0ab", b"1\n", b"\1a"])


@given(
    st.lists(st.tuples(opcodes, operands).map(b"".join) | plain.map(lambda what: pickle.dumps(what)[2:-1]), max_size=30)
)
@settings(max_examples=500)
def test_any_programs_give_a_value_or_a_refusal(parts: list[bytes]) -> None:
    survives(program(*parts))


class _Pickler(pickle.Pickler):
    """Leaves the storages out, as torch does."""

    def persistent_id(self, obj: Any) -> str | None:
        return "key" if isinstance(obj, torch.storage.TypedStorage) else None


def _saved() -> list[bytes]:
    tensor = torch.arange(6.0).reshape(2, 3)
    what = {"w": tensor, "t": tensor.t(), "p": torch.nn.Parameter(tensor), "n": {"a": 1, "b": [1.5, None]}}
    made = []
    for protocol in (1, 2, 4, 5):
        file = io.BytesIO()
        _Pickler(file, protocol).dump(what)
        made.append(file.getvalue())
    return made


@given(st.data(), st.sampled_from(_saved()))
@settings(max_examples=500)
def test_changed_pickles_give_a_value_or_a_refusal(choice: st.DataObject, data: bytes) -> None:
    changed = bytearray(data)
    for _ in range(choice.draw(st.integers(1, 5))):
        at = choice.draw(st.integers(0, len(changed) - 1))
        kind = choice.draw(st.sampled_from(["set", "cut", "insert"]))
        if kind == "set":
            changed[at] = choice.draw(st.integers(0, 255))
        elif kind == "cut":
            del changed[at : at + choice.draw(st.integers(1, 20))]
            changed = changed or bytearray(b".")
        else:
            changed[at:at] = choice.draw(st.binary(max_size=8))
    survives(bytes(changed))
