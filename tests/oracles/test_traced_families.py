"""The tables in `families/generated/` against the installed transformers: derived anew, and held against its own bytes.

A model of a size that no table follows from, and one in the proportions of the default config, get random weights. What
`save_pretrained` writes and what the model holds are converted into each other with the shipped table; both must be the
peer's bytes, and what it loads again as well.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracles.every_type import built
from tests.oracles.peer_bytes import both_ways
from tests.oracles.test_full_families import ABSENT
from tests.oracles.traced_tables import shipped_text, statements
from transaxle.derivation.sources import from_transformers
from transaxle.families import builtin

SAMPLE = ("bailing_hybrid", "mbart", "aya_vision", "recurrent_gemma")
"""Types in the normal run: experts stacked, an encoder and a decoder, a model in a wrapper, layers of two kinds."""
TYPES = sorted(t for entry in builtin().entries.values() if entry.traced for t in entry.model_types)
HAND = sorted({t for entry in builtin().entries.values() if not entry.traced for t in entry.model_types} - ABSENT)
"""Types with a table by hand that transformers knows by the same word."""


def check(model_type: str, tmp_path: Path) -> None:
    """Convert the peer's bytes both ways with the shipped table, and compare with what the peer has."""
    ours = {
        each for entry in builtin().entries.values() if model_type in entry.model_types for each in entry.model_types
    }
    for number, model in enumerate(built(model_type)):
        assert model.config.model_type in ours
        both_ways(model, tmp_path / str(number))


@pytest.mark.peers
@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_shipped_table_is_what_transformers_does(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.peers
def test_a_shipped_table_is_what_is_derived() -> None:
    assert statements(from_transformers("recurrent_gemma").text) == statements(shipped_text("recurrent_gemma"))


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", [*TYPES, *HAND])
def test_every_table_is_what_transformers_does(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
def test_every_table_is_what_is_derived(model_type: str) -> None:
    (family,) = (f for f in builtin().of_types([model_type]) if builtin().entries[f.name].traced)
    assert statements(from_transformers(model_type).text) == statements(shipped_text(family.name))
