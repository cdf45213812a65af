"""Numbers with the units people use: 1 GB is 10^9 bytes, 1 B parameters are 10^9 of them."""

from __future__ import annotations

from transaxle.engine.number_text import duration, parameters, plural, size, tensors_in_words

__all__ = ["duration", "parameters", "percent", "plural", "size", "speed", "tensors_in_words"]


def speed(count: int, seconds: float) -> str:
    """Write a speed: `2.4 GB/s`."""
    return f"{size(round(count / max(seconds, 1e-9)))}/s"


def percent(part: int, whole: int) -> str:
    """Write a share in whole percent; a share of nothing is 100 %, and only the whole is 100 %."""
    share = 100 if part >= whole else min(99, round(100 * part / whole))
    return f"{share} %"
