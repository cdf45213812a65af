"""Pickles that we write: Python, torch and our own interpreter must see in them what was meant."""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.pickled.assemble import read
from tests.formats.pickled.test_interpreter import plain
from transaxle.formats.pickled.descriptors import Global, Object, OrderedMap, Scalar
from transaxle.formats.pickled.writer import Streamed, write_pickle


def loads(data: bytes) -> Any:
    """What Python's own unpickler makes of bytes that we wrote."""
    return pickle.loads(data)  # noqa: S301


@given(plain)
def test_plain_values(what: Any) -> None:
    data = write_pickle(what)
    assert repr(loads(data)) == repr(what)
    assert repr(read(data).value) == repr(what)
    assert write_pickle(read(data).value) == data or _has_odd_keys(what)
    pickletools.dis(data, io.StringIO())


def _has_odd_keys(what: Any) -> bool:
    return "{" in repr(what)


@given(st.lists(st.text(max_size=2)), st.integers(0, 3000))
def test_texts_are_written_once(words: list[str], more: int) -> None:
    what = [*words, *words, *map(str, range(more)), *map(str, range(more))]
    data = write_pickle(what)
    assert loads(data) == what
    assert len(data) < 16 + 12 * len(what)


def test_what_python_makes_of_descriptors() -> None:
    queue = Object(Global("collections", "deque"), items=[1, 2])
    members = Object(Global("builtins", "set"), items=[3])
    space = Object(Global("argparse", "Namespace"), new=True, state={"lr": 0.5})
    bound = Object(Global("builtins", "dict.fromkeys"), (["a"],))
    ordered = OrderedMap({"b": 1})
    ordered.state = {"_metadata": 7}
    found = loads(write_pickle([queue, members, space, bound, ordered, b"\xff\0", 1j]))
    assert found[0] == collections.deque([1, 2])
    assert (found[1], found[2].lr, found[3], found[5], found[6]) == ({3}, 0.5, {"a": None}, b"\xff\0", 1j)
    assert (type(found[4]), found[4], found[4]._metadata) == (collections.OrderedDict, {"b": 1}, 7)


@pytest.mark.parametrize(
    "what",
    [
        object(),
        bytearray(b"x"),
        Scalar("F32", b"\0\0\0\0"),
        2**3000,
        Global("a\nb", "c"),
        Object(Global("a", "b"), kwargs={"c": 1}),
    ],
    ids=["object", "bytearray", "scalar", "int", "line break", "named arguments"],
)
def test_what_has_no_place(what: Any) -> None:
    with pytest.raises(ValueError, match=r"cannot be stored|an integer of|line break|named arguments"):
        write_pickle(what)


def test_what_is_nested_too_deeply() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        write_pickle(deep)
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(ValueError, match="deep"):
        write_pickle(itself)


def test_records_of_a_class_are_put_together_alike() -> None:
    space = Global("argparse", "Namespace")
    fields = [{"rate": number, "name": f"run {number // 2}"} for number in range(300)]
    other = [{"name": "a", "rate": None}, {}, {"rate": [1, {"rate": 2}]}]
    records = [Object(space, new=True, state=state) for state in [*fields, *other, *fields]]
    inner = Object(space, new=True, state={"rate": records[0], "name": records[1]})
    made = loads(write_pickle([*records, inner]))
    assert [vars(each) for each in made[:-1]] == [*fields, *other, *fields]
    assert [vars(each) for each in vars(made[-1]).values()] == fields[:2]
    assert [each.state for each in read(write_pickle(records)).value] == [each.state for each in records]


def test_a_field_that_is_no_text_is_not_mistaken_for_one() -> None:
    space = Global("argparse", "Namespace")
    states: list[dict[Any, Any]] = [{1: "a"}, {True: "b"}, {1.0: "c"}, {1: "d"}]
    shown = [repr(each.state) for each in read(write_pickle([Object(space, new=True, state=s) for s in states])).value]
    assert shown == [repr(state) for state in states]


@pytest.mark.parametrize("count", [0, 1, 3, 499, 500, 501, 1000, 1700])
def test_what_is_made_as_it_is_written_is_written_alike(count: int) -> None:
    pairs = {f"key {number}": [number, (number,)] for number in range(count)}
    assert write_pickle(Streamed(iter(pairs.items()), is_dict=True)) == write_pickle(pairs)
    assert write_pickle([Streamed(iter(pairs.values()))]) == write_pickle([list(pairs.values())])
