"""Any two options of `convert` together: the result is bit for bit what torch makes of the model, or is refused."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.oracles import cases, option_runs, option_sources
from tests.oracles import option_pairs as names
from tests.oracles.option_models import FAMILIES, WIDE
from tests.oracles.option_pairs import CLASHES, FACTORS, NONE, Row, allowed, clashing, covering, pairs_of
from tests.oracles.option_sources import Source
from transaxle.options import VERBS

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(bool(cases.MISSING), reason=f"not installed: {', '.join(cases.MISSING)}"),
]

ARRAYS = 3
"""Covering arrays, each of which has every pair."""
SHARES = 8
"""Tests that share the rows out, so that several processes have some."""
CONVERSIONS, DONE = 600, "done"
SUCCEED = 0.8
"""At least so many of the rows must end with a checkpoint: a sweep of refusals compares nothing."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Source]:
    """Sources that were written, by name and family."""
    return Sources(tmp_path_factory.mktemp("sources"))


class Sources(dict[tuple[str, str], Source]):
    """Writes each source when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, key: tuple[str, str]) -> Source:
        self[key] = option_sources.write(*key, self.folder / "-".join(key).replace(" ", "_"))
        return self[key]


@cache
def rows() -> list[Row]:
    """Every row of the sweep."""
    excluded = clashing(CLASHES)
    return [row for seed in range(ARRAYS) for row in covering(FACTORS, excluded, seed)]


def test_the_sweep_has_every_pair() -> None:
    array = rows()
    excluded = clashing(CLASHES)
    assert len(array) * SUCCEED >= CONVERSIONS
    assert {pair for row in array for pair in pairs_of(row)} == set(allowed(FACTORS, excluded))


OF_RANK_FILES = {"ranks", "dp", "device"}
"""Options of files of FSDP ranks, which `tests/formats/ranks` runs through: they belong to one format alone."""


OF_CONVENTIONS = {"restate", "group_size"}
"""What `tests/engine/views/test_restated.py` runs through: few sources are stored in several conventions."""


OF_READERS = {"reader", "python", "time_limit"}
"""What `tests/readers` runs through: the conversion is done when they begin to matter."""


OF_DAMAGE = {"check_source"}
"""What `tests/engine/checkpoint/test_source_hashes.py` runs through: for an intact source it changes nothing."""
OF_GRAFTS = {"graft", "graft_over"}
"""What `tests/engine/checkpoint/test_grafting.py` runs through: they need a source that lacks tensors."""


def test_the_sweep_has_every_option() -> None:
    several = {
        names.CHANGE: {"decode", "encode", "dtype", "merge"},
        "chosen": {"only", "skip"},
        "on": {"on", "items"},
        **{factor: {factor.removeprefix("named ")} for factor in FACTORS if factor.startswith("named ")},
    }
    listed = set().union(*(several.get(factor, {factor}) for factor in FACTORS))
    elsewhere = OF_RANK_FILES | OF_CONVENTIONS | OF_DAMAGE | OF_GRAFTS | OF_READERS
    assert (listed - {names.INTERFACE, names.SOURCE}) | elsewhere == {*VERBS["convert"]}


def test_what_has_no_oracle_is_excluded() -> None:
    for row in rows():
        for key in (option_sources.dialect(row[names.SOURCE]), option_runs.TARGETS[row[names.TO]][1]):
            assert not key or row[names.FAMILY] in FAMILIES[key]
        assert row[names.SOURCE] != names.FP8 or row[names.FAMILY] in WIDE


def _run(
    share: Sequence[Row], sources: dict[tuple[str, str], Source], folder: Path, *, clashes: bool = False
) -> Counter[str]:
    """Carry rows out; fail with all that are wrong, and count how the others ended: done, or a refusal's code."""
    ends: Counter[str] = Counter()
    wrong = []
    for number, row in enumerate(share):
        work = folder / str(number)
        source = sources[row[names.SOURCE], row[names.FAMILY]]
        code, problems = option_runs.problems(row, source, work, clashes=clashes)
        option_runs.clear(work)
        ends[code or DONE] += 1
        if problems:
            given = {factor: value for factor, value in row.items() if value != NONE}
            wrong.append(f"{given}\n    " + "\n    ".join(problems[:5]))
    assert not wrong, "\n".join(wrong)
    sys.stdout.write(f"{ends.total()} conversions: {dict(ends.most_common())}\n")
    return ends


@pytest.mark.oracle
@pytest.mark.parametrize("share", range(SHARES))
def test_every_row_is_exact_or_refused(share: int, sources: dict[tuple[str, str], Source], tmp_path: Path) -> None:
    mine = rows()[share::SHARES]
    ends = _run(mine, sources, tmp_path)
    assert ends[DONE] >= SUCCEED * len(mine), ends


@pytest.mark.oracle
def test_clashes_alone_are_exact_or_refused(sources: dict[tuple[str, str], Source], tmp_path: Path) -> None:
    """Each pair that the arrays leave out, with nothing else to refuse; one that is not refused belongs in them."""
    ends = _run(names.clashing_rows(CLASHES), sources, tmp_path, clashes=True)
    assert not ends[DONE]
