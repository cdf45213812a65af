"""Ranges that are read together: each is the slice of its file that it is said to be, by whichever way it is read."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transaxle.errors import Refused
from transaxle.formats.catalog import NUMBERS, Checksum, NumbersInMemory
from transaxle.formats.checksums import Witness
from transaxle.formats.storage import copier
from transaxle.formats.storage.copier import Steps
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import InMemoryFile, Storage, SubFolder, VirtualFiles

DATA = {f"{number}.bin": os.urandom(5000) for number in range(3)}
COMPILED = copier.load_steps()


def halting(numbers: int, total: int, first: int) -> int:
    """The compiled loop, which stops at every third step."""
    assert COMPILED is not None
    return COMPILED(numbers, min(total, first - first % 3 + 2), first)


WAYS: dict[str, Callable[..., int] | None] = {"plain": None, "again": lambda *said: said[-1]}
WAYS |= {} if COMPILED is None else {"compiled": COMPILED, "halting": halting}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of reading in turn."""
    monkeypatch.setattr(copier, "load_steps", lambda: WAYS[request.param])


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[LocalStorage]:
    (tmp_path / "sub").mkdir()
    for name, data in DATA.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / "sub" / name).write_bytes(data[::-1])
    found = LocalStorage(tmp_path)
    yield found
    found.close()


def read(storage: Storage, places: list[tuple[str, int, int]]) -> list[bytes]:
    """Read ranges next to each other into one buffer of 7s, and check that nothing else was written."""
    room = np.full(sum(size for *_, size in places) + 2, 7, np.uint8)
    at, ranges = 1, list[tuple[str, int, memoryview]]()
    for name, offset, size in places:
        ranges.append((name, offset, room.data[at : at + size]))
        at += size
    with Steps() as steps:
        for name, offset, view in ranges:
            storage.add_read(steps, name, offset, view)
        steps.run()
    assert room[0] == room[-1] == 7
    return [bytes(view) for *_, view in ranges]


@pytest.mark.usefixtures("way")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*DATA]), st.integers(0, 4000), st.integers(0, 1000)), max_size=12),
    st.sampled_from([1, 12]),
)
def test_every_range_is_a_slice(storage: LocalStorage, places: list[tuple[str, int, int]], times: int) -> None:
    places = places * times  # more than are read in one call
    expected = [DATA[name][at : at + size] for name, at, size in places]
    assert read(storage, places) == expected
    of_folder = SubFolder(storage, "sub")
    assert read(of_folder, places) == [DATA[name][::-1][at : at + size] for name, at, size in places]
    more = VirtualFiles(NumbersInMemory(storage), {"made": InMemoryFile(b"12345678")})
    assert read(more, places) == expected
    assert read(more, [*places, ("made", 2, 3)]) == [*expected, b"345"]


@pytest.mark.usefixtures("way")
def test_numbers_in_memory_and_files_together(storage: LocalStorage) -> None:
    numbers = NumbersInMemory(storage)
    place = numbers.add(b"\1\2\3")
    assert read(numbers, [("0.bin", 5, 4), (NUMBERS, place.offset, 3)]) == [DATA["0.bin"][5:9], b"\1\2\3"]


@pytest.mark.usefixtures("way")
def test_a_truncated_file_is_an_error_that_names_it(storage: LocalStorage) -> None:
    with pytest.raises(Refused, match="truncated") as caught:
        read(storage, [("0.bin", 0, 10), ("1.bin", 4990, 11), ("2.bin", 0, 10)])
    assert (caught.value.code, caught.value.where.file) == ("CORRUPT", "1.bin")


@pytest.mark.parametrize("damaged", range(4))
def test_what_is_read_together_is_summed_up(storage: LocalStorage, damaged: int) -> None:
    """Ranges read whole, a range read in two parts, one with more around it: the one that is damaged is named."""
    stretches = [("0.bin", 0, 1000), ("0.bin", 1000, 500), ("1.bin", 100, 3000), ("2.bin", 9, 61)]
    checksums = [
        Checksum(name, at, size, zlib.crc32(DATA[name][at : at + size]) ^ (number == damaged), f"stretch {number}")
        for number, (name, at, size) in enumerate(stretches)
    ]
    witness = Witness(storage, checksums, {})
    places = [("0.bin", 0, 1500), ("1.bin", 100, 2000), ("1.bin", 2100, 1000), ("2.bin", 0, 100)]
    assert read(witness, places) == [DATA[name][at : at + size] for name, at, size in places]
    assert [witness.is_right(each) for each in checksums] == [number != damaged for number in range(4)]
    with pytest.raises(Refused, match=f"stretch {damaged}: its bytes do not match"):
        witness.refuse_wrong()
