"""The scan of a pickle reads what the interpreter reads, to the same value, or does not read it."""

from __future__ import annotations

import ctypes
import pickle
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.drafts import damage
from tests.formats.pickled.assemble import FILE, HEAD, call, name, program, text, value
from transaxle.formats.pickled import scan
from transaxle.formats.pickled.allowed import ALLOWED
from transaxle.formats.pickled.descriptors import Key, Object
from transaxle.formats.pickled.interpreter import read_pickle
from transaxle.formats.pickled.scan import Unread, scan_pickle

MEMORY = 1 << 24
SCANNED = b"(]}aseutbR\x81\x85\x86\x87)NKMJX\x8c\x8d\x8aG\x88\x89qrhj\x94\x93c\x80\x95"
needs_compiler = pytest.mark.skipif(scan._library() is None, reason="the scan was not compiled")
NAMES = [
    b"cargparse\nNamespace\n", b"ctorch\nSize\n", b"ccollections\nOrderedDict\n", b"cos\nsystem\n",
    b"ctorch\nfloat32\n", b"c__builtin__\ngetattr\n", b"cnumpy\ndtype\n",
]  # fmt: skip

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: (
        st.lists(inner) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=20,
)


def by_scan(data: bytes, memory: int = MEMORY) -> Any:
    with scan_pickle(data, ALLOWED, memory) as graph:
        return graph.value(graph.root)


def compared(data: bytes) -> bool:
    """Compare both readers; tell whether the scan reads it."""
    try:
        found = by_scan(data)
    except Unread:
        return False
    assert shown(found) == shown(read_pickle(data, file=FILE).value)
    return True


def shown(found: Any) -> str:
    """The value in words: objects are equal only to themselves."""
    if isinstance(found, Object):
        state = shown(found.state)
        return f"{found.cls} {found.new} {shown(found.args)} {state} {shown(found.items)} {shown(found.pairs)}"
    if isinstance(found, Key):
        return f"Key {shown(found.value)}"
    if isinstance(found, dict):
        return f"{type(found)} {[(shown(key), shown(each)) for key, each in found.items()]}"
    if isinstance(found, list | tuple):
        return f"{type(found)} {list(map(shown, found))}"
    return repr(found)


@needs_compiler
@given(plain, st.integers(2, 5))
def test_plain_values(what: Any, protocol: int) -> None:
    is_read = compared(pickle.dumps(what, protocol))
    assert is_read or max(map(abs, integers(what)), default=0) >= 2**63 - 1


def integers(what: Any) -> list[int]:
    if isinstance(what, dict):
        what = list(what.values())
    if isinstance(what, list | tuple):
        return [number for each in what for number in integers(each)]
    return [what] if type(what) is int else []


steps = st.sampled_from([bytes([code]) for code in SCANNED]) | st.sampled_from(NAMES)
arguments = st.sampled_from([b"", b"\0", b"\1", b"\2", b"\0\0\0\0", b"\2\0\0\0ab", b"\1a", b"\0" * 8])


@needs_compiler
@given(
    st.lists(
        st.tuples(steps, arguments).map(b"".join) | plain.map(lambda what: pickle.dumps(what, 4)[11:-1]), max_size=30
    )
)
@settings(max_examples=500)
def test_programs(parts: list[bytes]) -> None:
    compared(program(*parts))


def several() -> list[bytes]:
    size = torch.Size((1, 2**33, 3))
    what = {"a": [size, (size, size)], "b": {"c": [1.5, None, True, -7, 2**40]}, "é\ud800": torch.float32, "d": {}}
    return [pickle.dumps(what, protocol) for protocol in (2, 4, 5)]


@needs_compiler
@given(st.sampled_from(several()).flatmap(damage))
@settings(max_examples=500)
def test_changed_pickles(data: bytes) -> None:
    compared(data)


READ: dict[str, bytes] = {
    **{f"several values {number}": data for number, data in enumerate(several())},
    "lists of many steps": pickle.dumps([list(range(2500)), list(range(1001))], 2),
    "dicts of many steps": pickle.dumps({str(at): {str(at): at} for at in range(2500)}, 2),
    "appended one by one": program(b"]K\1aK\2a(K\3K\4eK\5a"),
    "an object with a state": program(name("argparse", "Namespace"), b")\x81", value({"x": 1}), b"b"),
    "a call of a function": program(call("numpy", "dtype", "f4", False, True)),
    "a dtype": program(name("torch", "float32")),
    "numbers with gaps": program(b"]q\x09K\1q\5ah\5a"),
    "a counted text": program(b"]", text("ab") + b"\x94\x94ah\0ah\1a"),
    "edges of integers": pickle.dumps([0, 255, 256, 65536, 2**31 - 2, 2**31 - 1, 2**31, 2**63 - 1, -1, -(2**63)], 2),
}


@needs_compiler
@pytest.mark.parametrize("case", READ)
def test_what_is_read(case: str) -> None:
    assert compared(READ[case])


UNREAD: dict[str, bytes] = {
    "nothing": b"",
    "no stop": HEAD + b"N",
    "nothing left": HEAD + b".",
    "two values": HEAD + b"NN.",
    "a mark is left": HEAD + b"N(.",
    "underflow behind a mark": HEAD + b"N(\x85.",
    "a mark that is not there": HEAD + b"Nt.",
    "a list behind a mark": HEAD + b"](N(e.",
    "a memo that is not there": HEAD + b"h\7.",
    "a memo of four thousand million": HEAD + b"Nr\xff\xff\xff\xff.",
    "a text of four gigabytes": HEAD + b"X\xff\xff\xff\xffab.",
    "a text of all there is": HEAD + b"\x8d" + b"\xff" * 8 + b"ab.",
    "a frame of all there is": b"\x80\4\x95" + b"\xff" * 8 + b"N.",
    "an integer of nine bytes": HEAD + b"\x8a\x09" + b"\1" * 9 + b".",
    "an integer of a megabyte": HEAD + b"\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".",
    "protocol 6": b"\x80\6N.",
    "no UTF-8": program(b"]", text("ab").replace(b"b", b"\xff"), b"a"),
    "overlong UTF-8": program(b"]X\2\0\0\0\xc0\x80a"),
    "beyond Unicode": program(b"]X\4\0\0\0\xf4\x90\x80\x80a"),
    "the same key twice": program(b"}(", text("a"), b"N", text("a"), b"Nu"),
    "the same key later": program(b"}", text("a"), b"Ns(", text("b"), b"N", text("a"), b"Nu"),
    "the same object twice": program(b"}", name("argparse", "Namespace"), b")\x81q\0Nsh\0Ns"),
    "keys that may be equal": program(b"}(K\1N\x88Nu"),
    "a key without a value": program(b"}(Nu"),
    "attributes twice": program(name("argparse", "Namespace"), b")\x81}b}b"),
    "attributes of a call": program(call("argparse", "Namespace"), b"}b"),
    "a size of a truth": program(call("torch", "Size", (True,))),
    "a negative size": program(call("torch", "Size", (-1,))),
    "an endless size": program(call("torch", "Size", (1,) * 65)),
    "a size that grows": program(name("torch", "Size"), b"]q\0\x85R0h\0"),
    "what is given may change": program(name("collections", "OrderedDict"), b"]\x85R"),
    "a class with a builder": program(name("collections", "OrderedDict"), b")\x81"),
    "a name that is not allowed": program(name("os", "system")),
    "a method that is not allowed": program(call("builtins", "getattr", name("torch", "Tensor"), "__init__")),
    "an unsafe call that nobody sees": program(b"(", call("os", "system", "x"), b"Nt"),
    "itself": program(b"]q\0h\0a"),
    "a hundred deep": program(b"]" * 100, b"a" * 99),
    "a million names": program(b"(", name("torch", "float32") * 10_000, b"t"),
    "an extension": b"\x80\2\x82\1.",
}


@needs_compiler
@pytest.mark.parametrize("case", UNREAD)
def test_what_is_not_read(case: str) -> None:
    with pytest.raises(Unread):
        by_scan(UNREAD[case])


@needs_compiler
@pytest.mark.parametrize(
    "unit", [b"N", b"]", b"}", b"(", b"Nq\1", b"N\x94", text("abc"), b"N\x85", b"J\xff\xff\xff\xff"]
)
def test_memory_is_bounded(unit: bytes) -> None:
    data = HEAD + unit * 1_000_000
    with pytest.raises(Unread):
        by_scan(data + b".", 100_000)


@needs_compiler
def test_everything_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = []
    library = scan._library()
    assert library is not None
    scan_itself, free = library.transaxle_scan, library.transaxle_scan_free

    class Counting:
        transaxle_scan = scan_itself

        @staticmethod
        def transaxle_scan_free(arrays: ctypes.Structure) -> None:
            free(arrays)
            given_back.append(arrays.nodes)

    monkeypatch.setattr(scan, "_library", lambda: Counting)
    by_scan(program(b"]"))
    with pytest.raises(Unread):
        by_scan(program(name("os", "system")))
    assert given_back == [0, 0]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_library", lambda: None)
    with pytest.raises(Unread):
        by_scan(program(b"]"))
