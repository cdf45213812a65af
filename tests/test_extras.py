"""Hints on missing packages name what to install, however transaxle was installed."""

from __future__ import annotations

import shlex
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from transaxle.extras import install

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OFFERED = ("torch", "s3", "hf", "report", "vllm", "ray", "demo")
"""Extras for users; the others are for those who work on the package."""


def _asked(extra: str) -> set[tuple[str, frozenset[str], str]]:
    """Return what an extra asks for, with that of extras that it names."""
    found = set()
    for line in EXTRAS[extra]:
        one = Requirement(line)
        if one.name == PROJECT["name"]:
            found |= {each for other in one.extras for each in _asked(other)}
        else:
            found.add(_known(one))
    return found


def _known(one: Requirement) -> tuple[str, frozenset[str], str]:
    return canonicalize_name(one.name), frozenset(one.extras), str(one.specifier)


@pytest.mark.parametrize("extra", OFFERED)
def test_hints_name_packages_instead_of_extras(extra: str) -> None:
    """`pip install 'transaxle[report]'` finds no such package on an index until one is released."""
    words = shlex.split(install(extra))
    assert words[:2] == ["pip", "install"]
    assert {_known(Requirement(word)) for word in words[2:]} == _asked(extra)


def test_a_source_tree_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", missing)
    assert install("report") == "pip install 'transaxle[report]'"
