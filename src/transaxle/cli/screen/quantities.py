"""Numbers with the units people use: 1 GB is 10^9 bytes, 1 B parameters are 10^9 of them."""

from __future__ import annotations

from transaxle.engine.number_text import duration, plural, short, size

__all__ = ["duration", "parameters", "percent", "plural", "size", "speed"]

_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"))


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
    """Write a share in whole percent; a share of nothing is 100 %, and only the whole is 100 %."""
    share = 100 if part >= whole else min(99, round(100 * part / whole))
    return f"{share} %"
