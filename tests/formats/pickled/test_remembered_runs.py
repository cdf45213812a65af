"""Runs in pickles by Python's own pickler, which remembers every object: they are read as step by step."""

from __future__ import annotations

import io
import pickle
import random
import sys
from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain
from types import ModuleType
from typing import Any

import pytest

from tests.formats.pickled.assemble import FILE
from transaxle.errors import TransaxleError
from transaxle.formats.pickled import repeats
from transaxle.formats.pickled.allowed_globals.allowed import ALLOWED, INERT, GlobalRule, Names
from transaxle.formats.pickled.allowed_globals.builders import size
from transaxle.formats.pickled.columns import Run
from transaxle.formats.pickled.descriptors import Key, Object, Persistent
from transaxle.formats.pickled.interpreter import Bounds, Pickled, read_pickle

MODULE = "repeated_records"
PLAIN: Names = {**ALLOWED, **{(MODULE, name): INERT for name in ("Chunk", "Index", "Place", "Item", "Bare")}}
FAST: Names = {
    **PLAIN,
    (MODULE, "Size"): GlobalRule(build=size),
    (MODULE, "Chunk"): GlobalRule(build=repeats.elements),
    (MODULE, "Item"): GlobalRule(build=repeats.elements),
    (MODULE, "Index"): GlobalRule(build=repeats.keys),
    (MODULE, "Bare"): GlobalRule(build=repeats.bare),
}
STEPWISE: Names = {**PLAIN, (MODULE, "Size"): GlobalRule(build=size)}
"""The names of a module that is there in this file alone."""


class Thing:
    """An object with attributes; what comes of it is told by its class's name."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


Chunk, Index, Place, Item, Bare = (
    type(name, (Thing,), {"__module__": MODULE}) for name in ("Chunk", "Index", "Place", "Item", "Bare")
)
Size: Any = type("Size", (tuple,), {"__module__": MODULE, "__reduce__": lambda self: (Size, (tuple(self),))})


@pytest.fixture(autouse=True)
def _classes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(MODULE)
    for made in (Chunk, Index, Place, Item, Bare, Size):
        setattr(module, made.__name__, made)
    monkeypatch.setitem(sys.modules, MODULE, module)


def text(value: str) -> str:
    """Return a text that the pickler does not know yet."""
    return value.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def described(count: int, seed: int = 0) -> dict[str, Any]:
    """Return what a checkpoint says of its chunks: each of them, its place, and a plan that refers to them."""
    whole = Size((4096, 8))
    chunks = [
        Chunk(offsets=Size((i // 300, i % 300, i % 2 * 2048)), sizes=Size((1, 1, 2048)), none=None)
        for i in range(count)
    ]
    places = {
        Index(fqn="fc1", offset=Size(each.offsets), index=None): Place(file="a.bin", at=i * 70_000_000, length=66_536)
        for i, each in enumerate(chunks)
    }
    shared = {
        Index(fqn="fc2", offset=each.offsets, index=i): Place(file="b.bin", at=i * 1000, length=10)
        for i, each in enumerate(chunks)
    }
    objects = {
        Index(fqn=text(f"extra/shard_{i}"), index=None): Place(file="c.bin", at=seed + i * 1513, length=10)
        for i in range(count)
    }
    items = [
        Item(index=Index(fqn="fc1", offset=Size(each.offsets)), data=Place(chunk=each, size=whole)) for each in chunks
    ]
    return {"chunks": chunks, "places": places, "shared": shared, "objects": objects, "plan": items}


def outcome(data: bytes, names: Names, **options: Any) -> tuple[Any, Pickled | None]:
    """Return what comes of a pickle, or what it is refused for."""
    try:
        found = read_pickle(data, file=FILE, allowed=names, **options)
    except TransaxleError as error:
        return [str(each) for each in error.refusals], None
    return (plain(found.value), found.end), found


def both(data: bytes, **options: Any) -> Pickled | None:
    fast, found = outcome(data, FAST, **options)
    stepwise, _ = outcome(data, STEPWISE, **options)
    assert fast == stepwise
    return found


def plain(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Return a value that can be compared, runs spread out; it may hold itself."""
    if id(value) in above:
        return "itself", above.index(id(value))
    above = (*above, id(value))
    if isinstance(value, list):
        return [plain(each, above) for element in value for each in _elements(element)]
    if isinstance(value, dict):
        return [(plain(key, above), plain(each, above)) for pair in value.items() for key, each in _items(*pair)]
    if isinstance(value, tuple):
        return tuple([plain(each, above) for each in value])
    if isinstance(value, Object):
        parts = (value.args, value.kwargs, value.state, value.items, value.pairs)
        return value.cls, value.new, *(plain(part, above) for part in parts)
    if isinstance(value, Key | Persistent):
        return type(value), plain(value.value if isinstance(value, Key) else value.pid, above)
    return type(value), value


def _elements(element: Any) -> Iterable[Any]:
    if isinstance(element, Run):
        return chain.from_iterable(element.records())
    return (element,)


def _items(key: Any, value: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(value, Run) or not isinstance(key, Key) or key.value is not value:
        return [(key, value)]
    return [pair for record in value.records() for pair in zip(record[::2], record[1::2], strict=True)]


def runs_of(value: Any) -> int:
    """Return how many elements or items came in runs."""
    found, parts = (value.values(), 2) if isinstance(value, dict) else (value, 1)
    return sum(len(each.columns) * len(each.templates) // parts for each in found if type(each) is Run)


def dumped(value: object, protocol: int, *, in_c: bool = True) -> bytes:
    if in_c:
        return pickle.dumps(value, protocol)
    file = io.BytesIO()
    pickle._Pickler(file, protocol).dump(value)
    return file.getvalue()


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_real_pickles(protocol: int, in_c: bool) -> None:
    """Frames, memo, texts in their places: everything a description has, and references from one part to another."""
    found = both(dumped(described(1500), protocol, in_c=in_c))
    assert found is not None
    assert found.has_runs == (protocol > 3)  # before, every number in the memo was written out
    if protocol > 3:
        assert {name: runs_of(part) > 1200 for name, part in found.value.items()} == dict.fromkeys(found.value, True)


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 12, 30])
def test_few_records(count: int) -> None:
    both(dumped(described(count), 4))


@pytest.mark.parametrize("seed", range(10))
def test_texts_of_any_kind(seed: int) -> None:
    """Lengths that change, texts that are not ASCII, and such that cost more than others."""
    chosen = random.Random(seed)
    letters = ["a", "b", "é", "\ud800", "𝄞", ""]
    names = [
        "x" * chosen.choice([3, 3, 3, 300])
        + chosen.choice(letters if chosen.random() < 0.2 else "ab")
        + str(i % 90 + 10)
        for i in range(400)
    ]
    data = dumped({Index(fqn=text(name), n=i): Place(file=text(name[::-1])) for i, name in enumerate(names)}, 4)
    both(data)


def test_texts_are_read() -> None:
    found = both(dumped({Index(fqn=text(f"n{i:05}")): Place(file=text(f"f{i % 7}")) for i in range(900)}, 4))
    assert found is not None
    (run,) = {id(each): each for each in found.value.values() if type(each) is Run}.values()
    texts = [index.state["fqn"] for index, _ in run.records()]
    assert texts == [f"n{i:05}" for i in range(900)][900 - len(texts) - 1 : -1] or len(texts) > 850


# What a step after a run does to its records.

APPENDED, LISTED = b"a", b"e"


def program(value: object, *steps: bytes) -> bytes:
    """Return the pickle of a value, and after it, in a list with it, what the steps leave."""
    data = pickle.dumps(value, 4)
    frame = 11  # protocol and frame
    return b"\x80\x04](" + data[frame:-1] + b"".join(steps) + b"e."


def memo_of(data: bytes) -> dict[int, Any]:
    """Return what is remembered, by number, where all is done step by step."""
    unpickler: Any = pickle._Unpickler(io.BytesIO(data))
    unpickler.load()
    return dict(unpickler.memo)


def get(number: int) -> bytes:
    return b"j" + number.to_bytes(4, "little")


def numbers(kind: type, value: object) -> list[int]:
    """Return under which numbers objects of a kind are remembered."""
    return [number for number, each in memo_of(program(value)).items() if type(each) is kind]


ODD: dict[str, tuple[type, bytes]] = {
    "nothing": (dict, b""),
    "one more attribute": (dict, b"\x8c\x03newK\x01s"),
    "another offset": (dict, b"\x8c\x07offsetsNs"),
    "a key twice": (dict, b"(\x8c\x01aN\x8c\x01aNu"),
    "items": (Chunk, b"Na"),
    "more items": (Chunk, b"(NNe"),
    "pairs": (Chunk, b"\x8c\x01aNs"),
    "attributes again": (Chunk, b"}b"),
    "it in itself": (dict, b"\x8c\x01a" + b"%s" + b"s"),
    "in a call": (tuple, b"\x85"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("which", [0, 1, 2, 3, 50, 199, -2, -1])
def test_records_that_are_changed(name: str, which: int) -> None:
    """A later step refers to something in a run, and changes it."""
    kind, steps = ODD[name]
    value = [Chunk(offsets=Size((i, 7)), none=None) for i in range(200)]
    found = numbers(kind, value)
    number = found[which if which < len(found) else -1]
    both(program(value, get(number), steps.replace(b"%s", get(number)), get(number), get(number)))


def test_what_is_not_changed_is_shared() -> None:
    value = [Chunk(offsets=Size((i, 7)), none=None) for i in range(200)]
    number = numbers(Chunk, value)[100]
    found = both(program(value, get(number), get(number)))
    assert found is not None
    assert found.has_runs
    assert found.value[1] is found.value[2]
    assert found.value[1].state["offsets"] == (100, 7)


@pytest.mark.parametrize(
    "steps",
    [
        b"0N", b"2", b"(N1", b"Nq\x05", b"Nr\x10\x00\x00\x00", b"Np9\n", b"\x94", b"N\x94", b"N\x94j\x90\x01\x00\x00",
        b"j\xff\xff\x00\x00", b"h\xff", b"g900\n", b"g70000\n", b"\x85", b"\x86", b"\x90", b"e", b"u", b"(u", b"b",
        b"R", b"\x81", b"N", b"a", b"]N", b"s", b"Q", b"\x8f", b"cos\nsystem\n", b"\x80\x09",
        b"\x95" + bytes([255] * 8),
    ],
)  # fmt: skip
@pytest.mark.parametrize("within", [True, False])
def test_steps_after_a_run(steps: bytes, within: bool) -> None:
    """Steps that take a run apart, that give numbers, or that are not there: before and after the end of its list."""
    value = [Chunk(offsets=Size((i, 7)), none=None) for i in range(200)]
    data = program(value)
    at = len(data) - (3 if within else 2)
    both(data[:at] + steps + data[at:])
    both(data[:at] + steps + b".")


def test_records_that_refer_to_each_other() -> None:
    """Chains: each list's records refer to those of the list before."""
    lists: list[list[Any]] = [[Chunk(offsets=Size((i,)), none=None) for i in range(40)]]
    for _ in range(30):
        lists.append([Item(of=each, n=i) for i, each in enumerate(lists[-1])])
    both(dumped(lists, 4))
    found = both(dumped(lists[:2], 4))
    assert found is not None
    assert runs_of(found.value[1]) > 30


def test_a_record_that_refers_to_the_last() -> None:
    items = [Item(of=None, n=0)]
    for n in range(60):
        items.append(Item(of=items[-1], n=n))
    both(dumped(items[::-1], 4))
    both(dumped(items, 4))
    both(dumped([[Item(of=i, n=i.n) for i in items], items], 4))


def test_what_the_records_share() -> None:
    """Sizes and names that all records have in common, and such that half of them have."""
    sizes = [Size((i, 1)) for i in range(3)]
    both(dumped([Chunk(offsets=sizes[i % 3], sizes=sizes[0], n=i) for i in range(100)], 4))
    names = [text("n"), text("m")]
    both(dumped({Index(fqn=names[i % 2], n=i): Place(file=names[0], of=sizes[1]) for i in range(100)}, 4))
    both(dumped({Index(fqn=names[i > 50], n=i): Place(file=sizes, of=sizes[1]) for i in range(100)}, 4))


@pytest.mark.parametrize("seed", range(20))
def test_damage(seed: int) -> None:
    """Whatever is changed in such a pickle: it reads, or is refused, as it does step by step."""
    chosen = random.Random(seed)
    data = dumped(described(60, seed), chosen.choice([4, 5]))
    for _ in range(25):
        damaged = bytearray(data)
        for _ in range(chosen.choice([1, 1, 1, 3])):
            at = chosen.randrange(len(data))
            kind = chosen.random()
            if kind < 0.6:
                damaged[at] = chosen.choice([chosen.randrange(256), damaged[at] ^ (1 << chosen.randrange(8))])
            elif kind < 0.8:
                del damaged[at : at + chosen.choice([1, 2, 5, 90])]
            else:
                damaged[at:at] = damaged[max(0, at - chosen.choice([1, 2, 5, 90, 200])) : at]
        both(bytes(damaged), bounds=Bounds(memory=10_000_000))


def test_memory_is_charged() -> None:
    """A run costs what its records would cost."""
    data = dumped(described(300), 4)

    def fits(names: Names, memory: int) -> bool:
        return not isinstance(outcome(data, names, bounds=Bounds(memory=memory))[0], list)

    memory = bisect_left(range(10**8), True, key=lambda memory: fits(STEPWISE, memory))
    assert fits(FAST, memory)
    assert not fits(FAST, memory * 97 // 100)


def test_keys_are_only_keys() -> None:
    """Records of keys in a list, as of no pickler: they are read as they are."""
    both(dumped([Index(fqn="x", n=i) for i in range(100)], 4))
    both(dumped({i: Chunk(n=i) for i in range(100)}, 4))
    both(dumped([Key, Object][:0], 4))


# Objects without attributes, the values of a dict.


def bare(count: int, *, shared: bool = False) -> dict[str, Any]:
    """Return objects by texts of several lengths; each is its own, or all are one."""
    one = Bare()
    return {text(f"layers.{i * i}._extra_state/shard_{i}_{count}"): one if shared else Bare() for i in range(count)}


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 400])
def test_bare_objects(count: int, protocol: int, in_c: bool) -> None:
    found = both(dumped(bare(count), protocol, in_c=in_c))
    assert found is not None
    assert len(found.value) == count
    if count > 100:
        assert found.has_runs
        assert len(set(map(id, found.value.values()))) < 20
    both(dumped(bare(count, shared=True), protocol, in_c=in_c))
    both(dumped([bare(count), Bare(), bare(count)], protocol, in_c=in_c))
    both(dumped([described(20), bare(count), described(20)], protocol, in_c=in_c))


@pytest.mark.parametrize("texts", [["é", "a"], ["\ud800"], ["", "a"], ["a" * 300, "b"], ["a\0", "b"]])
@pytest.mark.parametrize("protocol", [2, 4])
def test_bare_objects_by_other_texts(texts: list[str], protocol: int) -> None:
    both(dumped({text(f"{i}{texts[i % len(texts)]}"): Bare() for i in range(50)}, protocol))
    both(dumped({(i if i % 9 == 8 else text(f"{i}")): Bare() for i in range(50)}, protocol))
    both(dumped({text(f"{i}"): Bare(n=i) if i % 9 == 8 else Bare() for i in range(50)}, protocol))


def test_a_key_twice_among_bare_objects() -> None:
    data = dumped({"a11": Bare(), "a22": Bare(), "a33": Bare(), "a44": Bare(), "b": b" " * 600}, 4)
    assert isinstance(outcome(data.replace(b"a44", b"a33"), FAST)[0], list)
    both(data.replace(b"a44", b"a33"))


@pytest.mark.parametrize(
    "steps", [b"Na", b"(NNe", b"\x8c\x01aNs", b"}b", b"}\x8c\x01aNsb", b"Nb", b")\x81", b"\x85", b"]\x94%sa", b""]
)
@pytest.mark.parametrize("which", [0, 1, 2, 30, -1])
@pytest.mark.parametrize("kind", [Bare, str])
def test_bare_objects_that_are_changed(kind: type, which: int, steps: bytes) -> None:
    value = bare(200)
    found = numbers(kind, value)
    number = found[which]
    both(program(value, get(number), steps.replace(b"%s", get(number)), get(number), get(number)))


@pytest.mark.parametrize(
    "steps", [b"0", b"00N", b"2", b"1", b"}b", b"s", b"Na", b"]s", b"\x85", b"\x86", b"u", b"\x94", b"q\x01"]
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_steps_among_bare_objects(protocol: int, steps: bytes) -> None:
    """Steps in the middle of them that take something off the stack, or change what is on it."""
    data = dumped([bare(60), b" " * 600], protocol)
    ends = [at for at in range(len(data)) if data.startswith(b")\x81", at)]
    for at in (ends[0], ends[1], ends[2], ends[30], ends[-1]):
        both(data[: at + 2] + steps + data[at + 2 :])


@pytest.mark.parametrize("seed", range(20))
def test_damage_among_bare_objects(seed: int) -> None:
    chosen = random.Random(seed)
    data = dumped([bare(30), Bare(), described(12, seed), bare(8)], chosen.choice([2, 4, 5]))
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(chosen.choice([1, 1, 1, 3])):
            at = chosen.randrange(len(damaged))
            if chosen.random() < 0.6:
                damaged[at] = chosen.choice([*b"hjqrX)\x81\x94\x8cb0s}]", chosen.randrange(256)])
            elif chosen.random() < 0.5:
                del damaged[at : at + chosen.choice([1, 2, 5, 40])]
            else:
                damaged[at:at] = damaged[max(0, at - chosen.choice([1, 2, 5, 40, 90])) : at]
        both(bytes(damaged), bounds=Bounds(memory=10_000_000))


@pytest.mark.parametrize("protocol", [2, 4])
def test_memory_of_bare_objects_is_charged(protocol: int) -> None:
    data = dumped(bare(300), protocol)

    def fits(names: Names, memory: int) -> bool:
        return not isinstance(outcome(data, names, bounds=Bounds(memory=memory))[0], list)

    memory = bisect_left(range(10**7), True, key=lambda memory: fits(STEPWISE, memory))
    assert fits(FAST, memory)
    assert not fits(FAST, memory * 97 // 100)
