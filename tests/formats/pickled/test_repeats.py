"""Runs of records: read as columns, they are what the machine builds of them step by step."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.formats.pickled.assemble import FILE, STOP
from transaxle.errors import TransaxleError
from transaxle.formats.pickled import repeats
from transaxle.formats.pickled.allowed_globals.allowed import ALLOWED, INERT, GlobalRule, Names
from transaxle.formats.pickled.descriptors import Global, Key, Object
from transaxle.formats.pickled.interpreter import Bounds, read_pickle
from transaxle.formats.pickled.repeats import Run
from transaxle.formats.pickled.writer import write_pickle

CHUNK, INDEX, PLACE, SIZE = (Global("torch", name) for name in ("Chunk", "Index", "Place", "Size"))
INERT_NAMES = {("torch", "Chunk"): INERT, ("torch", "Index"): INERT, ("torch", "Place"): INERT}
STEPWISE: Names = {**ALLOWED, **INERT_NAMES}
FAST: Names = {
    **STEPWISE,
    ("torch", "Chunk"): GlobalRule(build=repeats.elements),
    ("torch", "Index"): GlobalRule(build=repeats.keys),
}
Make = Callable[[int], int]


def size(*counts: int) -> Object:
    return Object(SIZE, (counts,))


def chunk(*counts: int) -> Object:
    return Object(CHUNK, state={"offsets": size(*counts), "sizes": size(1, 1, 8), "none": None}, new=True)


def item(text: str, number: int, *counts: int) -> tuple[Object, Object]:
    index = Object(INDEX, state={"fqn": text, "offset": size(*counts), "index": number}, new=True)
    return index, Object(PLACE, state={"file": "a.bin", "offset": number * 1000, "length": 10}, new=True)


def plain(value: Any) -> Any:
    """Return a value that can be compared, runs spread out."""
    if isinstance(value, list):
        return [plain(each) for element in value for each in _elements(element)]
    if isinstance(value, dict):
        return [(plain(key), plain(each)) for pair in value.items() for key, each in _pairs(*pair)]
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, Object):
        return value.cls, plain(value.args), plain(value.state), value.new
    return value


def _elements(element: Any) -> Iterator[Any]:
    if isinstance(element, Run):
        yield from itertools.chain.from_iterable(element.records())
    else:
        yield element


def _pairs(key: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(key, Key):
        assert isinstance(value, Run)
        assert key.value is value
        for record in value.records():
            yield from zip(record[::2], record[1::2], strict=True)
    else:
        yield key, value


def runs(value: Any) -> int:
    """Return how many records came in runs."""
    return sum(
        len(each.columns) for each in (value.values() if isinstance(value, dict) else value) if type(each) is Run
    )


def both(data: bytes, **options: Any) -> tuple[Any, Any]:
    fast, stepwise = (read_pickle(data, file=FILE, allowed=names, **options) for names in (FAST, STEPWISE))
    assert fast.end == stepwise.end
    assert plain(fast.value) == plain(stepwise.value)
    return fast.value, stepwise.value


FORMS: dict[str, tuple[Make, Make]] = {
    "one octet": (lambda i: i % 256, lambda _: 7),
    "growing": (lambda i: i, lambda i: i * 37),
    "beyond 32 bits": (lambda i: i << 30, lambda i: 2**40 + i),
    "beyond 56 bits": (lambda i: 2**62 + i, lambda i: i),
    "halves": (lambda i: i // 2, lambda i: i % 2 * 2048),
    "thirds": (lambda i: i // 3, lambda i: i % 3 * 2048),
}


@pytest.mark.parametrize("form", FORMS)
def test_elements(form: str) -> None:
    """Records of equal and of growing widths, and those that take turns."""
    first, second = FORMS[form]
    fast, _ = both(write_pickle([chunk(first(i), second(i), 0) for i in range(3000)]))
    assert runs(fast) > (1000 if form != "thirds" else -1)


@pytest.mark.parametrize("form", FORMS)
def test_items(form: str) -> None:
    first, second = FORMS[form]
    texts = [f"layer.{i // 500}" for i in range(3000)]
    fast, _ = both(write_pickle(dict(item(text, i, first(i), second(i)) for i, text in enumerate(texts))))
    assert runs(fast) > (200 if form != "thirds" else -1)


def test_texts_that_differ() -> None:
    """A reference to another text in every record is a column as well."""
    texts = [f"experts.{i}" for i in range(2000)]
    fast, _ = both(write_pickle([texts, dict(item(text, i, i) for i, text in enumerate(texts))]))
    assert runs(fast[1]) > 1500


@pytest.mark.parametrize("seed", range(20))
def test_any_numbers(seed: int) -> None:
    """Numbers of any width in any order."""
    chosen = random.Random(seed)

    def number() -> int:
        return chosen.choice([0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**63 - 1, chosen.randrange(2**40)])

    widths = [number() for _ in range(3)]
    records = [
        chunk(*(chosen.choice([width, number()]) if chosen.random() < 0.1 else width for width in widths))
        for _ in range(500)
    ]
    both(write_pickle(records))
    both(write_pickle(dict(item("x", i, *(number() if i % 50 == 0 else 3 for _ in range(2))) for i in range(500))))


def record_of(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return what precedes the third of many equal records, that record, and what follows the last."""
    assert data.count(b"\x81") > 20
    places = [at for at in range(len(data)) if data.startswith(b"\x81}", at)]
    return data[: places[2]], data[places[2] : places[3]], data[places[-1] :]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"K\x03", b"J\xff\xff\xff\xff"),  # negative
        (b"K\x03", b"N"),  # no number
        (b"K\x03", b"G" + bytes(8)),
        (b"K\x03", b"I3\n"),
        (b"K\x03", b"\x8a\x01\xff"),
        (b"K\x03", b"\x8a\x00"),
        (b"N", b"\x88"),
        (b"N", b"2"),
        (b"N", b"(0"),
        (b"u", b"u0"),
        (b"u", b"u2"),
        (b"u", b"uq\x01"),
        (b"b", b"bb"),
        (b"b", b"b\x85"),
        (b"b", b"b0N"),
        (b"b", b"b2"),
        (b"b", b"bu("),
        (b")", b"K\x01\x85"),
        (b")", b"]"),
        (b"}", b"]"),
        (b"\x85R", b"R"),
        (b"\x85R", b""),
        (b"\x85R", b"]R"),
    ],
)
@pytest.mark.parametrize("everywhere", [False, True])
def test_odd_records(before: bytes, after: bytes, everywhere: bool) -> None:
    """Whatever a record is changed into: it reads, or is refused, as it is without runs."""
    for whole in (
        write_pickle([chunk(i % 5, 3, 3) for i in range(60)]),
        write_pickle(dict(item("x", 3, 3, i % 5) for i in range(60))),
    ):
        head, record, tail = record_of(whole)
        assert before in record or before == b"N"
        odd = record.replace(before, after)
        data = head + (odd * 50 if everywhere else record * 20 + odd + record * 29) + tail
        found = []
        for names in (FAST, STEPWISE):
            try:
                found.append(plain_or_odd(read_pickle(data, file=FILE, allowed=names).value))
            except TransaxleError as error:
                found.append([(each.code, each.message.partition(" at byte ")[0]) for each in error.refusals])
        assert found[0] == found[1] or found[0] == ODD


ODD = "odd"


def plain_or_odd(value: Any) -> Any:
    """Return what can be compared; where steps that no pickler writes took a run apart, its readers refuse it."""
    try:
        return plain(value)
    except AssertionError:
        return ODD


def test_cut_off() -> None:
    """A run that ends with the file, or with anything but the next record."""
    whole = write_pickle([chunk(i % 5, 3, 3) for i in range(60)])
    for end in range(len(whole) - 200, len(whole) - 1):
        found = []
        for names in (FAST, STEPWISE):
            with pytest.raises(TransaxleError) as caught:
                read_pickle(whole[:end] + STOP, file=FILE, allowed=names)
            found.append(str(caught.value))
        assert found[0] == found[1]


def test_memory_is_charged() -> None:
    """A run costs what its records would cost."""
    data = write_pickle([chunk(i % 5, 3, 3) for i in range(900)])

    def fits(names: Names, memory: int) -> bool:
        try:
            read_pickle(data, file=FILE, allowed=names, bounds=Bounds(memory=memory))
        except TransaxleError:
            return False
        return True

    memory = bisect_left(range(10**7), True, key=lambda memory: fits(STEPWISE, memory))
    assert fits(FAST, memory)
    assert not fits(FAST, memory * 98 // 100)
