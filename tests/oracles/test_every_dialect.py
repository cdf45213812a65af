"""Every dialect of every family is compared with its peer, and the documentation says with which."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.oracles import cases
from tests.oracles.every_dialect import lists, recorded, rows
from transaxle.families import builtin

pytestmark = pytest.mark.skipif(bool(cases.MISSING), reason=f"not installed: {', '.join(cases.MISSING)}")


def _recorded() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for dialect, _, _, _, families in recorded()["oracles"]:
        found[dialect].update(families)
    return found


def test_no_dialect_is_without_an_oracle() -> None:
    shipped = {(label, name) for name, entry in builtin().entries.items() for label in entry.dialects if label != "hf"}
    assert shipped == set(lists())


def test_without_experts_te_is_megatron() -> None:
    for family in (builtin()[name] for name in cases.DENSE):
        te, megatron = family.dialect(cases.TE), family.dialect(cases.MEGATRON)
        assert te is not None
        assert megatron is not None
        assert [line.text for line in te.lines] == [line.text for line in megatron.lines]


def test_the_record_is_of_the_lists() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for dialect, family in lists():
        found[dialect].add(family)
    assert _recorded() == found, "python -m tests.oracles.every_dialect writes it"


@pytest.mark.oracle
def test_the_record_is_what_is_compared() -> None:
    assert rows() == recorded()["oracles"]
