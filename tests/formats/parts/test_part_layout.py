"""The parts of a file: all bytes once, none too small, and whole parts for whoever writes enough in one piece."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.errors import Refused
from transaxle.formats.parts.part_layout import Extent, Fitting, Part, laid_out, layout_digest

LEAST, USUAL = 5, 8
MIB = 1 << 20


@st.composite
def files(draw: st.DrawFn) -> tuple[int, list[Extent], list[tuple[int, int]]]:
    """Runs of items, of nobody, and of what is known at the end."""
    at, extents, unknown = 0, [], []
    for kind, size in draw(st.lists(st.tuples(st.integers(-2, 4), st.integers(1, 40)), min_size=1, max_size=12)):
        if kind >= 0:
            extents.append((at, at + size, kind))
        elif kind == -1:
            unknown.append((at, at + size))
        at += size
    return at, draw(st.permutations(extents)), unknown


@given(files(), st.dictionaries(st.integers(0, 4), st.builds(Fitting, st.integers(LEAST, USUAL), st.integers(0, 50))))
def test_every_byte_is_in_one_part(
    file: tuple[int, list[Extent], list[tuple[int, int]]], fitting: dict[int, Fitting]
) -> None:
    size, extents, unknown = file
    if not extents:
        return
    found = laid_out(size, extents, unknown, USUAL, file="f", least=LEAST, fitting=fitting)
    parts = found.parts
    assert (parts[0].start, parts[-1].stop) == (0, size)
    assert all(one.stop == other.start for one, other in itertools.pairwise(parts))
    assert all(part.stop - part.start >= LEAST for part in parts[:-1])
    assert parts[-1].start < parts[-1].stop
    for part in parts:
        items = {item for start, stop, item in extents if start < part.stop and part.start < stop}
        late = any(start < part.stop and part.start < stop for start, stop in unknown)
        if part.item is not None:
            assert items <= {part.item}
            assert not late
            assert part.stop - part.start < 2 * USUAL + LEAST
        shares = list(found.shares(part))
        assert {item for _, _, item in shares} == items
        own = sum(max(0, min(stop, part.stop) - max(start, part.start)) for start, stop, _ in extents)
        assert sum(stop - start for start, stop, _ in shares) == own
    for start, stop, item in extents:
        # Who writes much in one piece sends most of it alone.
        alone = sum(
            min(stop, p.stop) - max(start, p.start) for p in parts if p.item == item if p.start < stop > start < p.stop
        )
        assert stop - start < 3 * LEAST or alone >= stop - start - 2 * LEAST


@given(files())
def test_even_parts_have_one_length(file: tuple[int, list[Extent], list[tuple[int, int]]]) -> None:
    """Whoever has all bytes of one sends it, and nobody sends one of which others have bytes."""
    size, extents, unknown = file
    if not extents:
        return
    found = laid_out(size, extents, unknown, USUAL, file="f", least=LEAST, even=True)
    assert [(part.start, part.stop) for part in found.parts] == [
        (start, min(size, start + USUAL)) for start in range(0, size, USUAL)
    ]
    for part in found.parts:
        items = {item for start, stop, item in extents if start < part.stop and part.start < stop}
        late = any(start < part.stop and part.start < stop for start, stop in unknown)
        if part.item is not None:
            assert items <= {part.item}
            assert not late
        alone = {item for start, stop, item in extents if start <= part.start and part.stop <= stop}
        assert not alone or part.item in alone
        assert {item for _, _, item in found.shares(part)} == items


@pytest.mark.parametrize("together", [4, 7])
@pytest.mark.parametrize("sizes", [(155,), (77, 78), (13, 200, 11), (154, 154, 12), (20,), (31, 1000)])
def test_the_last_parts_of_an_item_end_together(sizes: tuple[int, ...], together: int) -> None:
    """Over connections that are alike, each of which takes the next part when one is sent; the item has many files."""
    whole = sum(sizes) * MIB
    fitting = Fitting.of(whole, 8 * MIB, together)
    busy = [0] * together
    for size in sizes:
        parts = laid_out(size * MIB, [(0, size * MIB, 0)], [], 8 * MIB, file="f", fitting={0: fitting}).parts
        assert min(part.stop - part.start for part in parts) >= 5 * MIB
        assert max(part.stop - part.start for part in parts) < 20 * MIB
        fitting = fitting.after(size * MIB)
        for part in parts:
            busy[busy.index(min(busy))] += part.stop - part.start
    if whole >= together * 5 * MIB:
        assert max(busy) < 1.12 * whole / together


def test_headers_go_with_the_first_tensors() -> None:
    found = laid_out(100, [(3, 40, 0), (40, 100, 1)], [], 20, file="f", least=5)
    assert found.parts == (Part(0, 20, 0), Part(20, 40, 0), Part(40, 60, 1), Part(60, 80, 1), Part(80, 100, 1))
    late = laid_out(100, [(3, 40, 0), (40, 100, 1)], [(0, 3)], 20, file="f", least=5)
    assert late.parts[:2] == (Part(0, 5, None), Part(5, 40, 0))
    assert layout_digest({"f": found}) != layout_digest({"f": late})


def test_a_large_file_has_no_more_parts_than_services_take() -> None:
    size = 1 << 38
    found = laid_out(size, [(at << 23, (at + 1) << 23, at % 2) for at in range(size >> 23)], [], 1 << 23, file="f")
    assert len(found.parts) <= 10_000
    assert min(part.stop - part.start for part in found.parts[:-1]) >= 5 << 20


def test_two_items_never_write_one_byte() -> None:
    with pytest.raises(Refused, match="write byte 9"):
        laid_out(20, [(0, 10, 0), (9, 20, 1)], [], USUAL, file="f", least=LEAST)
    with pytest.raises(Refused, match="a part would have more"):
        laid_out(9 << 40, [(0, 9 << 40, 0)], [], 6 << 30, file="f")
