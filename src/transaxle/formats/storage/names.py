"""Names that come from inside a checkpoint: text to be checked, never a path to be followed."""

from __future__ import annotations

from transaxle.errors import LONGEST_NAME, Code, refuse

_HINT = "Names of files in a checkpoint are relative to its folder and stay inside it."


def checked_parts(name: str) -> tuple[str, ...]:
    """Return the parts of `a/b/c`, a relative name that stays inside its folder.

    Raises:
        Refused: PATH_ESCAPE for an empty or absolute name, for `.`, `..` or empty parts (also between backslashes,
            which other systems read as separators), and for names that hold a NUL.
    """
    parts = tuple(name.split("/"))
    if "\0" in name or any(segment in ("", ".", "..") for segment in parts) or ".." in name.split("\\"):
        raise refuse("PATH_ESCAPE", f"{name!r} is not the name of a file inside the folder", file=name, hint=_HINT)
    return parts


def is_plain(name: str) -> bool:
    """Tell whether a name is a single path segment, with no separator of any operating system."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def too_long(name: str) -> tuple[Code, str]:
    """Return the code and message for a tensor name beyond the cap on its length."""
    return "UNSUPPORTED", f"its name has {len(name):,} characters; names have at most {LONGEST_NAME:,}"
