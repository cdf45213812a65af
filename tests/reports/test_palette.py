"""Colours of the figures: distinguishable for the colour-blind, and text on them is readable.

How such people see a colour is that of Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation
of Color Vision Deficiency" (2009), for those who lack one kind of cone; distances are those of CIE 1976.
"""

from __future__ import annotations

import re
from importlib import resources
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[np.float64]
SEEN = {
    "all cones": np.eye(3),
    "protanopia": np.array([
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ]),
    "deuteranopia": np.array([
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881],
    ]),
    "tritanopia": np.array([
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900],
    ]),
}  # fmt: skip
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def named(name: str) -> list[str]:
    """Return the colours that the scripts of a page call so."""
    assets = resources.files("transaxle.reports") / "assets"
    text = "".join((assets / script).read_text("utf-8") for script in ("page.js", "maps.js"))
    found = re.search(rf"\b{name} = (\[[^]]*\]|\"[^\"]*\")", text)
    assert found
    return re.findall(r"#[0-9a-f]{6}", found[1])


def linear(colour: str) -> Array:
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.asarray(np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4))


def lab(light: Array) -> Array:
    x, y, z = XYZ @ np.clip(light, 0, 1) / XYZ.sum(1)
    x, y, z = (v ** (1 / 3) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in (x, y, z))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SEEN)
def test_no_two_colours_look_alike(sight: str) -> None:
    """Neighbours of a distance of 2.3 are just told apart; all are several times that."""
    colours = named("COLOURS")
    assert len(colours) == 8
    seen = [lab(SEEN[sight] @ linear(colour)) for colour in colours]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 4 * 2.3


@pytest.mark.parametrize("sight", SEEN)
@pytest.mark.parametrize("ramp", ["LIGHT", "DARK"])
def test_more_is_always_further_from_the_paper(ramp: str, sight: str) -> None:
    lightness = [float(lab(SEEN[sight] @ linear(colour))[0]) for colour in named(ramp)]
    steps = np.diff(lightness)
    assert (steps > 5).all() or (steps < -5).all()


def test_text_on_colours_is_readable() -> None:
    """A contrast of 4.5, as WCAG 2.2 asks for."""
    (ink,) = named("INK")
    dark = float(XYZ[1] @ linear(ink))
    for colour in [*named("COLOURS"), *named("MIXED")]:
        assert (float(XYZ[1] @ linear(colour)) + 0.05) / (dark + 0.05) > 4.5
