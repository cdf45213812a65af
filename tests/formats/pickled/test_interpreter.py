"""Plain data of every protocol, as Python's own pickler writes it; and what stands for the rest."""

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
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.pickled.assemble import FILE, RECORD, call, name, program, read, text, value
from transaxle.errors import TransaxleError
from transaxle.formats.pickled.descriptors import (
    DType,
    Global,
    Key,
    Object,
    OrderedMap,
    Persistent,
    Scalar,
    StorageType,
)
from transaxle.formats.pickled.interpreter import Bounds, PickleEnds, read_pickle

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
def test_sets(protocol: int) -> None:
    for kind, what in (("set", {1, 2}), ("frozenset", frozenset({1, 2}))):
        found = read(pickle.dumps(what, protocol)).value
        assert (found.cls, sorted(found.items)) == (Global("builtins", kind), [1, 2])


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


@every_protocol
def test_numpy_arrays_and_other_scalars_are_described(protocol: int) -> None:
    found = read(pickle.dumps([np.arange(3), np.datetime64("2024"), np.dtype("f4"), np.clongdouble(1)], protocol)).value
    assert all(isinstance(one, Object) for one in found)
    assert str(found[0].cls).endswith(("_reconstruct", "_frombuffer"))


def test_named_arguments() -> None:
    made = read(program(name("argparse", "Namespace"), b")", value({"a": 1}), b"\x92")).value
    assert made.kwargs == {"a": 1}


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
        with pytest.raises(TransaxleError, match="protocol 0") as caught:
            read(data)
        assert caught.value.code == "CORRUPT"


def test_text_of_python_2() -> None:
    assert read(b"I5000000000\n.").value == 5_000_000_000
    assert read(b"U\x02ab.").value == "ab"
    assert read(b"T\x02\0\0\0\xc3\xa9.").value == "é"
    assert read(b"T\x02\0\0\0\xff\xfe.").value == b"\xff\xfe"


def test_dtypes_and_storages_of_torch() -> None:
    found = read(
        program(
            b"(",
            name("torch", "float32"),
            name("torch", "BFloat16Storage"),
            name("torch.storage", "UntypedStorage"),
            b"t",
        )
    )
    assert found.value == (DType("float32"), StorageType(DType("bfloat16")), StorageType(None))
    assert [DType(one).code for one in ("float8_e4m3fn", "complex128", "uint4")] == ["F8_E4M3", "COMPLEX128", "UINT4"]


def test_persistent_ids() -> None:
    assert isinstance(read(program(value((1, 2)), b"Q")).value, Persistent)
    assert read(program(value((1, 2)), b"Q"), persistent=lambda pid: ["found", pid]).value == ["found", (1, 2)]


def test_bound_methods_that_are_listed() -> None:
    """`getattr(Class, "method")` gives the method if the table has it, under the name it has in its module."""
    from transaxle.formats.pickled.allowed import ALLOWED, INERT

    allowed = {**ALLOWED, ("te", "Tensor"): INERT, ("te", "Tensor.make"): INERT}
    data = program(call("__builtin__", "getattr", name("te", "Tensor"), "make"), value((7,)), b"R")
    found = read_pickle(data, file=FILE, allowed=allowed).value
    assert (found.cls, found.args) == (Global("te", "Tensor.make"), (7,))
    with pytest.raises(TransaxleError, match=r"te\.Tensor\.other") as caught:
        read_pickle(data.replace(text("make"), text("other")), file=FILE, allowed=allowed)
    assert caught.value.code == "UNSAFE_PICKLE"


def test_keys_that_are_no_scalars_are_kept_aside() -> None:
    """Hashing what a stranger nested may never end: such a key is equal only to itself."""
    found = read(pickle.dumps({(1, 2): "a", 2**70: "b", 1j: "c", "d": "e"})).value
    assert [key.value if isinstance(key, Key) else key for key in found] == [(1, 2), 2**70, 1j, "d"]


def test_several_pickles_in_a_row() -> None:
    data = pickle.dumps(1) + pickle.dumps([2]) + b"rest"
    first = read_pickle(data, file=FILE)
    second = read_pickle(data, file=FILE, start=first.end)
    assert (first.value, second.value, data[second.end :]) == (1, [2], b"rest")


@given(st.integers(0, 200))
def test_a_pickle_that_goes_on(cut: int) -> None:
    data = pickle.dumps({"a": [1, "x" * 100], "b": b"y" * 50, "c": (1.5, 2**40)})
    part = data[: min(cut, len(data) - 1)]
    with pytest.raises(PickleEnds):
        read_pickle(part, file=FILE, complete=False)
    with pytest.raises(TransaxleError) as caught:
        read_pickle(part, file=FILE, record=RECORD)
    assert (caught.value.code, caught.value.where.file) == ("CORRUPT", FILE)
    assert RECORD in str(caught.value)


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
    with pytest.raises(TransaxleError) as caught:
        read(program(name("os", "system"))[:-1] + b"\xff")
    assert caught.value.code == "UNSAFE_PICKLE"


@pytest.mark.parametrize("steps", [b"}", b"]", b"(", b"N", b"\x8f", b"(t", b")R", b"K\0"], ids=repr)
def test_memory_is_bounded(steps: bytes) -> None:
    """However small its steps, a pickle cannot build more than it was granted."""
    head = name("argparse", "Namespace") if steps == b")R" else b""
    unit = name("argparse", "Namespace") + steps if head else steps
    data = program(unit * 20_000, b"0" * 19_999)
    with pytest.raises(TransaxleError, match="more objects than any real checkpoint") as caught:
        read(data, bounds=Bounds(memory=100_000))
    assert caught.value.code == "CORRUPT"


def test_size_is_bounded() -> None:
    with pytest.raises(TransaxleError, match="more objects than any real checkpoint"):
        read(program(b"N0" * 1000, b"N"), bounds=Bounds(size=1000))
