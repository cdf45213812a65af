"""Families as data: nothing is lost on the way there and back."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import pytest

from tests.some import some
from transaxle import families
from transaxle.axes.notation.family import Family, Formula
from transaxle.axes.notation.name import Name
from transaxle.axes.notation.tables import read
from transaxle.families import base, builtin, read_spelled, spell_out

EVERYTHING = """
family toy
  model_type toy toys
  wrapper toy_vl
  let sparse = l % 2 == 0
  axes l=layers d=width f=inner g=kv_heads r=heads//kv_heads
  axis n = vocabulary
  embed : n d
  head : n d when not tied
  up : l f d when sparse
  extra : d optional
  norm : l d
  q : g r d
  tie head = embed when tied
  precise norm
  cut tp = f (g r)
  cut tp = d of extra
  cut tp = r within g

dialect hf
  embed.weight = embed[n d]
  head.weight = head[n d]
  layers.{l}.up = up[f d] when not mxfp4
  layers.{l}.up = up[d f] when mxfp4
  layers.{l}.norm = norm[d] lossy: norm - 1
  also old.{l}.norm = norm[d]
  extra = extra[d]
  q = q[(g r) d]
  ignore layers.{l}.inv_freq
dialect other 2.0 like hf, layers. = blocks.
  without extra
"""


def _dump(value: Any) -> Any:
    """Return everything that a value says, without the text it was read from and where in it things stood."""
    if isinstance(value, Formula):
        return value.text
    if isinstance(value, msgspec.Struct):
        kind: Any = type(value)
        return kind.__name__, [_dump(getattr(value, name)) for name in _kept(kind)]
    if isinstance(value, dict):
        return [(key, _dump(each)) for key, each in value.items()]
    if isinstance(value, tuple | list):
        return [_dump(each) for each in value]
    return value


@cache
def _kept(kind: Any) -> list[str]:
    """Return the fields of a type that count."""
    left_out = {Family: "text", Name: "start"}.get(kind)
    return [name for name in kind.__struct_fields__ if name != left_out]


def _shared(family: Family) -> list[list[int]]:
    """Return for every dialect where its lines are among all lines: dialects that are alike share them."""
    lines = dict.fromkeys(line for dialect in family.dialects for line in dialect.lines)
    places = {line: place for place, line in enumerate(lines)}
    return [[places[line] for line in dialect.lines] for dialect in family.dialects]


def test_everything_a_table_says_is_kept() -> None:
    (family,) = read(EVERYTHING)
    again = read_spelled(spell_out(family))
    assert _dump(again) == _dump(family)
    assert _shared(again) == _shared(family)
    assert some(again.tensors["up"].when)({"l": 2}) is True


FILES = {name: entry.file for name, entry in builtin().entries.items() if not entry.traced}


@pytest.mark.oracle
@pytest.mark.parametrize("part", range(10))
def test_families_that_ship_are_their_tables(part: int) -> None:
    for file in sorted(set(FILES.values()))[part::10]:
        text = (files(families) / file).read_text("utf-8")
        found = {family.name: family for family in read(text, file=file, bases=base)}
        assert found.keys() == {name for name, home in FILES.items() if home == file}
        for name, family in found.items():
            assert _dump(builtin()[name]) == _dump(family)
            assert _shared(builtin()[name]) == _shared(family)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_heirs_build_on_the_text(name: str) -> None:
    (heir,) = read(f"family heir like {name}\n  model_type heir\n", bases=base)
    assert _dump(heir.tensors) == _dump(builtin()[name].tensors)
