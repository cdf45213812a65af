"""Numbers with the units people use: 1 GB is 10^9 bytes, 1 B parameters are 10^9 of them."""

from __future__ import annotations

import re

_STEPS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"))
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = "kmgt"


def _short(value: float) -> str:
    """Write a number below a thousand with three or four digits that count."""
    text = f"{value:.2f}" if value < 100 else f"{value:.1f}"
    return text.rstrip("0").rstrip(".")


def size(count: int) -> str:
    """Write bytes: `61.06 GB`, `512 B`."""
    for unit, letter in _STEPS:
        if count >= unit:
            return f"{_short(count / unit)} {letter}B"
    return f"{count} B"


def parameters(count: int) -> str:
    """Write a number of parameters: `30.53 B parameters`, `13,936 parameters`."""
    for unit, letter in _COUNTS:
        if count >= unit:
            return f"{_short(count / unit)} {letter} parameters"
    return plural(count, "parameter")


def plural(count: int, noun: str, many: str = "") -> str:
    """Write a number with its noun: `1 tensor`, `18,867 tensors`."""
    return f"{count:,} {noun if count == 1 else many or f'{noun}s'}"


def duration(seconds: float) -> str:
    """Write a duration: `0.02 s`, `25.1 s`, `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


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
