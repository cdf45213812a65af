"""Numbers as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.arguments import parse_size
from transaxle.engine import wording as units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (27_872, "27.87 kB"),
        (50_331_648, "50.33 MB"),
        (123_456_789, "123.5 MB"),
        (5_000_000_000, "5 GB"),
        (61_064_245_248, "61.06 GB"),
        (1_340_000_000_000, "1.34 TB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert units.size(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1 parameter"), (13_936, "13,936 parameters"), (30_532_122_624, "30.53 B parameters")]
)
def test_parameters(count: int, text: str) -> None:
    assert units.parameters(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.018, "0.02 s"), (25.13, "25.1 s"), (61, "0:01:01"), (3723, "1:02:03")]
)
def test_durations(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(0, 0, "100 %"), (1999, 2000, "99 %"), (2, 2, "100 %"), (1, 3, "33 %")]
)
def test_only_all_of_it_is_a_hundred_percent(part: int, whole: int, text: str) -> None:
    assert units.percent(part, whole) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("5GB", 5 * 10**9),
        ("512MB", 512 * 10**6),
        ("1.5GiB", 3 << 29),
        ("100", 100),
        ("5 gb", 5 * 10**9),
        ("64M", 64 * 10**6),
    ],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "5x", "-5", "1e9", "2i", "5GBB", "५GB"])
def test_texts_that_are_no_size_are_refused(text: str) -> None:
    assert parse_size(text) is None


@given(st.integers(0, 10**15))
def test_printed_sizes_are_read_back(count: int) -> None:
    read = parse_size(units.size(count))
    assert read is not None
    assert abs(read - count) <= 0.005 * count
