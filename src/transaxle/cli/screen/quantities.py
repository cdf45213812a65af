"""Numbers with the units people use: 1 GB is 10^9 bytes, 1 B parameters are 10^9 of them."""

from __future__ import annotations

import re

from transaxle.engine.units import duration, plural, short, size

__all__ = ["duration", "parameters", "parse_size", "percent", "plural", "size", "speed"]

_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"))
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = "kmgt"


def parameters(count: int) -> str:
    """Write a number of parameters: `30.53 B parameters`, `13,936 parameters`."""
    for unit, letter in _COUNTS:
        if count >= unit:
            return f"{short(count / unit)} {letter} parameters"
    return plural(count, "parameter")


def speed(count: int, seconds: float) -> str:
    """Write a speed: `2.4 GB/s`."""
    return f"{size(round(count / max(seconds, 1e-9)))}/s"


def percent(part: int, whole: int) -> str:
    """Write a share in whole percent; nothing of nothing is all of it, and only all of it is 100 %."""
    share = 100 if part >= whole else min(99, round(100 * part / whole))
    return f"{share} %"


def parse_size(text: str) -> int | None:
    """Read a number of bytes such as `5GB`, `512MB`, `1.5 GiB` or `1000`; None where it is no such thing."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        return None
    power = _POWERS.index(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
