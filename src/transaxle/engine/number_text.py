"""Numbers with the units people use, for reports and for the command line: 1 GB is 10^9 bytes."""

from __future__ import annotations

_STEPS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"))


def short(value: float) -> str:
    """Write a number below a thousand with three or four digits that count."""
    text = f"{value:.2f}" if value < 100 else f"{value:.1f}"
    return text.rstrip("0").rstrip(".")


def parameters(count: int) -> str:
    """Write a number of parameters: `30.53 B parameters`, `13,936 parameters`."""
    for unit, letter in _COUNTS:
        if count >= unit:
            return f"{short(count / unit)} {letter} parameters"
    return plural(count, "parameter")


def size(count: int) -> str:
    """Write bytes: `61.06 GB`, `512 B`."""
    for unit, letter in _STEPS:
        if count >= unit:
            return f"{short(count / unit)} {letter}B"
    return f"{count} B"


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """Write a number with its noun: `1 tensor`, `18,867 tensors`."""
    return f"{count:,} {noun if count == 1 else plural_noun or f'{noun}s'}"


def tensors_in_words(count: int, optimizer: int) -> str:
    """Write a number of tensors, and how many of them are the optimizer's state, if any are."""
    return plural(count, "tensor") + (f", {optimizer:,} of them optimizer state" if optimizer else "")


def duration(seconds: float) -> str:
    """Write a duration: `0.02 s`, `25.1 s`, `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}"


def notebook(text: str) -> str:
    """Write a text as a notebook shows it: names of files and tensors may have any characters."""
    from html import escape  # with a table of all entities, which only notebooks need

    return f"<pre>{escape(text)}</pre>"


def speed(count: int, seconds: float) -> str:
    """Write a speed: `2.4 GB/s`."""
    return f"{size(round(count / max(seconds, 1e-9)))}/s"


def percent(part: int, whole: int) -> str:
    """Write a share in whole percent; a share of nothing is 100 %, and only the whole is 100 %."""
    share = 100 if part >= whole else min(99, round(100 * part / whole))
    return f"{share} %"
