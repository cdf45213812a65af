"""What an error shows: everything that a person reads, and never a name by the megabyte."""

from __future__ import annotations

from transaxle.errors import LONGEST_NAME, Refusal, Where, gathered, shortened


def test_a_long_name_is_cut_in_the_middle() -> None:
    assert shortened("x" * 10, 10) == "x" * 10
    assert shortened("a" * 6 + "b" * 6, 4) == "aa … (12 characters) … bb"


def test_the_text_of_a_name_of_150_megabytes_is_short() -> None:
    name = "x" * 150_000_000
    refusal = Refusal("CORRUPT", f"{name!r} is odd", Where(name, name), f"Rename {name}.")
    error = gathered([refusal] * 40)
    assert len(str(error)) < 30 * 4 * 11_000
    assert "(150,000,000 characters)" in str(error)
    told = refusal.as_json()
    assert sum(len(text) for text in told.values()) < 40_000
    assert error.where.tensor == name, "programs have the whole of it"


def test_what_is_no_longer_than_a_path_is_shown_whole() -> None:
    name = "x" * LONGEST_NAME
    assert name in str(Refusal("CORRUPT", "odd", Where(None, name)))
