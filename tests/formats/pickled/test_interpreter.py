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

from tests.formats.drafts import damage
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
    """Python has two picklers; the one written in Python chooses other opcodes here and there."""
    file = io.BytesIO()
    pickle._Pickler(file, protocol).dump(what)
    for data in (pickle.dumps(what, protocol), file.getvalue()):
        found = read(data)
        assert found.value == what
        assert repr(found.value) == repr(what)
        assert found.end == len(data)
        assert found.protocol == (protocol if protocol > 1 else 0)


@every_protocol
def test_large_values(protocol: int) -> None:
    what = {"text": "é" * 70_000, "bytes": bytes(range(256)) * 300, "list": [*range(3000)], "array": bytearray(70_000)}
    assert read(pickle.dumps(what, protocol)).value == what


@every_protocol
def test_what_is_shared_stays_shared(protocol: int) -> None:
    inner, itself = [1], list[Any]()
    itself.append({"self": itself})
    found = read(pickle.dumps({"a": inner, "b": (inner, inner)}, protocol)).value
    assert found["a"] is found["b"][0] is found["b"][1]
    found = read(pickle.dumps(itself, protocol)).value
    assert found[0]["self"] is found


@every_protocol
def test_dicts_of_the_library(protocol: int) -> None:
    """torch hangs the versions of its modules on a state dict."""
    ordered = collections.OrderedDict([("b", 1), ("a", 2)])
    ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    default = collections.defaultdict(list, {"x": [1]})
    found = read(pickle.dumps([ordered, collections.Counter("aab"), default], protocol)).value
    assert [type(one) for one in found] == [OrderedMap] * 3
    assert [list(one.items()) for one in found] == [[("b", 1), ("a", 2)], [("a", 2), ("b", 1)], [("x", [1])]]
    assert found[0].state == {"_metadata": {"": {"version": 1}}}


@every_protocol
def test_objects_are_described(protocol: int) -> None:
    path = pathlib.PurePosixPath("a/b")
    objects = [
        argparse.Namespace(lr=0.1, name="x"), datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), path,
        decimal.Decimal("1.5"), uuid.UUID(int=5), collections.deque([1, 2], 3),
    ]  # fmt: skip
    found = read(pickle.dumps(objects, protocol)).value
    kinds = "argparse.Namespace datetime.datetime path.PurePosixPath decimal.Decimal uuid.UUID collections.deque"
    assert [str(one.cls) for one in found] == kinds.replace("path", type(path).__module__).split()
    assert (found[0].state, found[3].args, found[5].items) == ({"lr": 0.1, "name": "x"}, ("1.5",), [1, 2])


@every_protocol
@pytest.mark.parametrize(
    ("number", "code"),
    [(np.float32(1.5), "F32"), (np.int64(-3), "I64"), (np.bool_(True), "BOOL"), (np.uint8(200), "U8"),
     (np.float16(2), "F16"), (np.complex64(1j), "C64")],
)  # fmt: skip
def test_numpy_scalars(protocol: int, number: np.generic, code: str) -> None:
    assert read(pickle.dumps(number, protocol)).value == Scalar(code, number.tobytes())


def test_big_endian_scalars() -> None:
    found = read(pickle.dumps(_Scalar())).value
    assert found == Scalar("F32", np.float32(1.5).tobytes())


class _Scalar:
    """Pickles as a big-endian scalar of numpy."""

    def __reduce__(self) -> Any:
        return np.float32(0).__reduce__()[0], (np.dtype(">f4"), b"\x3f\xc0\0\0")


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
    with refuses("UNSAFE_PICKLE") as caught:
        read(data)
    for refusal, word in zip(caught.value.refusals, ("os.system", "builtins.eval"), strict=True):
        assert (refusal.code, word in refusal.message, RECORD in refusal.message) == ("UNSAFE_PICKLE", True, True)
    with refuses("UNSAFE_PICKLE"):  # even if the rest is broken
        read(data[:-2] + b"\xff")


@pytest.mark.parametrize("steps", [b"}", b"]", b"(", b"N", b"\x8f", b"(t", b")R", b"K\0"], ids=repr)
def test_memory_and_size_are_bounded(steps: bytes) -> None:
    """However small its steps, a pickle cannot build more than it was granted."""
    unit = name("argparse", "Namespace") + steps if steps == b")R" else steps
    with refuses("CORRUPT", "more objects than any real checkpoint"):
        read(program(unit * 20_000, b"0" * 19_999), bounds=Bounds(memory=100_000))
    with refuses("CORRUPT", "more objects than any real checkpoint"):
        read(program(b"N0" * 1000, b"N"), bounds=Bounds(size=1000))


# Calls that rebuild tensors, parameters and scalars.

UTILS = "torch._utils"
VIEW = call(UTILS, "_rebuild_tensor_v2", 7, 3, (2, 5), (5, 1), False, {})


def test_views() -> None:
    v3 = call(UTILS, "_rebuild_tensor_v3", 7, 3, (2, 5), (5, 1), False, {}, name("torch", "uint16"))
    kinds = (call(UTILS, "_rebuild_tensor", 7, 3, (2, 5), (5, 1)), None), (VIEW, None), (v3, DType("uint16"))
    for opcodes, dtype in kinds:
        view = read(program(opcodes)).value
        assert (view.storage, view.offset, view.shape, view.strides, view.flags) == (7, 3, (2, 5), (5, 1), ())
        assert view.dtype == dtype
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
    def moved(tensor: bytes, dtype: object) -> Any:
        return read(program(call(UTILS, "_rebuild_device_tensor_from_cpu_tensor", tensor, dtype, "xla:0", False))).value

    found = moved(VIEW, name("torch", "bfloat16"))
    assert (found.storage, found.dtype) == (7, DType("bfloat16"))
    assert isinstance(moved(call(UTILS, "_rebuild_sparse_tensor"), name("torch", "bfloat16")), Object)
    with pytest.raises(TransaxleError, match="needs a dtype"):
        moved(VIEW, "bfloat16")


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


@given(st.sampled_from(_saved()).flatmap(damage))
@settings(max_examples=500)
def test_changed_pickles_give_a_value_or_a_refusal(data: bytes) -> None:
    survives(data)
