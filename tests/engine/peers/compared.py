"""The oracles' tensors as checkpoints on disk, written and read by the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.oracles import MISSING, VARIANTS, cases
from tests.oracles.hub import WEIGHTS, Tensors
from transaxle.axes.notation.family import Family
from transaxle.families import builtin

CONFIG = "config.json"

pytestmark = [pytest.mark.peers, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")]
"""Every module that uses this one takes these marks over."""

ALL = [(family, variant) for family, variants in VARIANTS.items() for variant in variants]
every_case = pytest.mark.parametrize(("family", "variant"), ALL, ids=["-".join(pair) for pair in ALL])
every_family = pytest.mark.parametrize("family", list(VARIANTS))

Bits = dict[str, tuple[Any, tuple[int, ...], bytes]]


def held(family: str, variant: str) -> dict[str, Tensors]:
    """Every dialect, and every version of one that the tables know, that the peers give this model in."""
    case = cases.case(family, variant)
    table: Family = builtin()[family]
    return case.dialects | {label: held for label, held in case.versions.items() if table.dialect(label)}


def bits(tensors: Tensors) -> Bits:
    """Dtype, shape and bytes by name."""
    return {name: cases.bits(value) for name, value in tensors.items()}


def store(folder: Path, tensors: Tensors, config: dict[str, Any] | None) -> Path:
    """Write a checkpoint as its framework would, in one file."""
    folder.mkdir(parents=True)
    save_file(
        {name: value.contiguous().clone() for name, value in tensors.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    if config is not None:
        (folder / CONFIG).write_text(json.dumps(config))
    return folder


def load(folder: Path) -> Bits:
    """Read all tensors of a folder."""
    return bits(load_file(folder / WEIGHTS))


def pairs(family: str, variant: str) -> Iterator[tuple[str, str]]:
    """Every ordered pair of dialects."""
    labels = list(held(family, variant))
    yield from ((a, b) for a in labels for b in labels if a != b)
