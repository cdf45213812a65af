"""All exception classes of Transaxle, and the closed set of their codes, each of which names a kind of problem.

TransaxleError
├── Refused     exit 3   the input is unsafe, corrupt or unsupported, or the conversion would be lossy
├── UsageError  exit 2   the call is wrong: unknown option or axis, existing target, ambiguous dialect
└── StorageError exit 4  the storage failed: missing or unreadable source, no space

Errors for a missing file, denied access, a folder in place of a file (or a file in place of a folder) and an existing
target have classes that also derive from the built-in FileNotFoundError, PermissionError, IsADirectoryError,
NotADirectoryError and FileExistsError.

Every error has a `code` (one of `CODES`), a `where` (file and tensor) and a `hint` (what to do). Problems are collected
and raised together: `.refusals` contains all of them, the most important first.
"""

from __future__ import annotations

import errno as numbers
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from transaxle.options import KEYWORDS

Code = Literal[
    "UNSAFE_PICKLE",
    "PATH_ESCAPE",
    "CORRUPT",
    "INCOMPLETE",
    "OVERLAP",
    "NAME_COLLISION",
    "AMBIGUOUS",
    "UNKNOWN_FAMILY",
    "UNKNOWN_AXIS",
    "SHAPE_MISMATCH",
    "DTYPE_MISMATCH",
    "DTYPE_MIXED",
    "UNEQUAL_COPIES",
    "BLOCK_MISALIGNED",
    "UNSUPPORTED",
    "LOSSY",
    "MISSING_TENSOR",
    "UNEXPECTED_TENSOR",
    "EXISTS",
    "IO",
    "NO_SPACE",
]
CODES: tuple[Code, ...] = get_args(Code)

LACKING: frozenset[Code] = frozenset({"MISSING_TENSOR", "INCOMPLETE"})
"""Codes that report only missing tensors."""
_USAGE: frozenset[Code] = frozenset({"AMBIGUOUS", "UNKNOWN_FAMILY", "UNKNOWN_AXIS", "EXISTS"})
_SHOWN = 30
"""Number of refusals that `str(error)` shows."""
_STORAGE: frozenset[Code] = frozenset({"IO", "NO_SPACE"})
_MAX_PROBLEMS = 100
"""Maximum number of problems that are collected for one error."""
LONGEST_NAME = 4_096
"""Maximum length in characters of a tensor's name, as for a path; a hostile file may have names of 100 MB."""
_LONGEST_TEXT = 10_000
"""Maximum number of characters of a message that are shown: enough for lists, too few for a name of megabytes."""

_RUN, _QUOTED = re.compile(r"\S+"), re.compile(r"[^\s'\"]+")
_URL, _WEB = re.compile(r":\\?/"), re.compile(r"(?i)\bhttps?:\\?/")
r"""Patterns for the beginning of a URL; the slashes may be escaped as `\/`, as in some JSON."""
_PASSWORD = re.compile(r":\\?/[\\/]*[^/@:\s]*:(?!\d{1,5}(?:[/?#\s'\",)]|$))")
"""Pattern for the beginning of a URL with a password. A password may contain `/` and `@`, but digits before a `/` are a
port.
"""
_KEY = re.compile(r"(?i)\bs3a?:\\?/[\\/]*[^/@:\s]*:")
"""Pattern for the beginning of an S3 URL with a secret key; in such a URL, digits are never a port."""
_TOKEN = re.compile(r"(?i)(\bhttps?:\\?/[\\/]*)[^\\/@:\s]+@")
"""Pattern for a URL's user name without a password; such a name may be an access token."""
HIDDEN = "…"
"""Text that replaces a secret in texts that are shown."""

_COMMAND = re.compile(r"(?:torchrun|transaxle)(?: [^\s,;)`]+)+")
_OPTION = re.compile(r"(--[a-z][a-z0-9-]*[a-z])(=\w+)?")
_VALUE = re.compile(r" ('[^']*'|[^\s,;()]*[^\s,;().:])")
_PROSE = frozenset({
    "adds", "and", "as", "asks", "casts", "chooses", "compares", "continues", "does", "excludes", "for", "gives", "has",
    "if", "instead", "is", "leaves", "looks", "lists", "makes", "of", "on", "or", "reads", "says", "takes", "that",
    "the", "there", "what", "where", "which", "with", "writes",
})  # fmt: skip
"""English words that may follow an option in a sentence but are not the option's value."""


TARGET = "target"
"""Keyword of `supports` for the option `--to`, which all other functions call `to`."""


def in_both_languages(text: str) -> str:
    """Add to a hint, after each command-line option, the equivalent Python keyword in parentheses.

    Complete commands, and options whose Python keyword the text already contains, are not changed.
    """
    if "--" not in text:
        return text
    parts: list[str] = []
    copied_to = 0
    commands = [match.span() for match in _COMMAND.finditer(text)]
    for option in _OPTION.finditer(text):
        keyword, _, value = KEYWORDS.get(option[1], "").partition("=")
        words = f"{keyword}|{TARGET}" if keyword == "to" else keyword
        is_named = any(re.search(rf"(?<![\w-])(?:{words})=", part) for part in (text, *parts))
        if not keyword or is_named or any(start <= option.start() < end for start, end in commands):
            continue
        end, typed_value = option.end(), (option[2] or "")[1:]
        match = None if value or typed_value else _VALUE.match(text, end)
        if match is not None and match[1] not in _PROSE:
            end, typed_value = match.end(), match[1]
        python_option = f"{keyword}={_in_python(keyword, typed_value) or value}"
        parts += [
            text[copied_to:end],
            f", {python_option}" if text[option.start() - 1 : option.start()] == "(" else f" ({python_option})",
        ]
        copied_to = end
    return "".join((*parts, text[copied_to:]))


def _in_python(keyword: str, typed_value: str) -> str:
    """Return the value of a command-line option in Python syntax."""
    if keyword == "axes" and typed_value:
        axis, _, size = typed_value.partition("=")
        return f'{{"{axis}": {size}}}'
    if not typed_value or typed_value.isdecimal() or typed_value == "N":
        return typed_value
    text = typed_value.strip("'")
    return f'"{text}"'


def without_secrets(text: str) -> str:
    """Remove passwords, access tokens (used as user names) and query strings from the URLs in a text."""
    if _URL.search(text) is None:
        return text
    text = _TOKEN.sub(rf"\1{HIDDEN}@", _RUN.sub(_without_password, text))
    return _QUOTED.sub(_without_query, text)


def _without_password(run: re.Match[str]) -> str:
    text = run[0]
    for pattern in (_PASSWORD, _KEY):
        last = text.rfind("@")
        begin = pattern.search(text) if last >= 0 else None
        if begin is not None and begin.end() <= last:
            text = f"{text[: begin.end()]}{HIDDEN}{text[last:]}"
    return text


def _without_query(run: re.Match[str]) -> str:
    text = run[0]
    for pattern, mark in ((_URL, "?"), (_WEB, "#")):
        begin = pattern.search(text)
        at = -1 if begin is None else text.find(mark, begin.end())
        text = text if at < 0 else f"{text[: at + 1]}{HIDDEN}"
    return text


def shortened(text: str, limit: int) -> str:
    """Replace the middle of a text by a note of the text's length, if the text is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … ({len(text):,} characters) … {text[-half:]}"


@dataclass(frozen=True, slots=True)
class Where:
    """The file and the tensor that an error concerns."""

    file: str | None = None
    """Path of the file as the user typed it, or name of the file inside the checkpoint."""
    tensor: str | None = None
    """Stored name of the tensor."""

    def __str__(self) -> str:
        return " · ".join(part for part in (self.file, self.tensor) if part)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why something is refused."""

    code: Code
    """Code of the reason: a member of the closed set `CODES`."""
    message: str
    """Description of the problem, such as the mapping rule, and the expected and the actual value."""
    where: Where = field(default_factory=Where)
    """The file and the tensor with the problem."""
    hint: str = ""
    """Advice to the user, in the words of Python and of the command line."""
    detail: Callable[[], object] | None = field(default=None, compare=False, repr=False)
    """Function that computes the data of a figure for report pages; None if the refusal has no figure."""
    system: type[OSError] | None = field(default=None, compare=False, repr=False)
    """Built-in exception class from which the error also derives; None means no built-in class."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hint", in_both_languages(self.hint))

    def shown(self) -> Refusal:
        """Return the refusal with texts that can be printed: very long texts are shortened, and secrets in URLs are
        removed.
        """
        file = self.where.file and shortened(without_secrets(self.where.file), LONGEST_NAME)
        tensor = self.where.tensor and shortened(self.where.tensor, LONGEST_NAME)
        message, hint = (shortened(without_secrets(text), _LONGEST_TEXT) for text in (self.message, self.hint))
        return Refusal(self.code, message, Where(file, tensor), hint)

    def __str__(self) -> str:
        shown = self.shown()
        place = str(shown.where)
        head = f"{self.code}  {place}" if place else self.code
        lines = [head, *(f"    {line}" for line in shown.message.splitlines())]
        if self.hint:
            lines += [f"    {line}" for line in shown.hint.splitlines()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the refusal as plain JSON data; very long texts are shortened, as in `str()`."""
        shown = self.shown()
        return {
            "code": self.code,
            "message": shown.message,
            "file": shown.where.file,
            "tensor": shown.where.tensor,
            "hint": shown.hint,
        }


class TransaxleError(Exception):
    """Base class of all errors for bad input, bad calls and storage failures; one exception lists every problem.

    `str(error)` shows the first 30 problems, each with code, file, tensor, message and hint.

    Attributes:
        refusals: every problem, most important first; never empty.
        code: code of the first problem, a member of `CODES`.
        where: file and tensor of the first problem.
        hint: what to do about the first problem; may be empty.
        exit_code: exit status of the command line: 2 (usage), 3 (refused) or 4 (storage).
    """

    exit_code = 3

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        lines = [str(refusal) for refusal in refusals[:_SHOWN]]
        if len(refusals) > _SHOWN:
            lines.append(f"… and {len(refusals) - _SHOWN:,} more, in .refusals")
        super().__init__("\n".join(lines))
        self.refusals: tuple[Refusal, ...] = tuple(refusals)

    def __reduce__(self) -> tuple[type[TransaxleError], tuple[tuple[Refusal, ...]]]:
        return type(self), (self.refusals,)

    @property
    def code(self) -> Code:
        """Code of the first refusal."""
        return self.refusals[0].code

    @property
    def where(self) -> Where:
        """File and tensor of the first refusal."""
        return self.refusals[0].where

    @property
    def hint(self) -> str:
        """Hint of the first refusal."""
        return self.refusals[0].hint


class Refused(TransaxleError):
    """Raised if the input is unsafe, corrupt or unsupported, or if the conversion would be lossy (exit code 3)."""


class UsageError(TransaxleError):
    """Raised if the call is wrong: the target exists, an axis or family is unknown, a dialect is ambiguous (exit code
    2).
    """

    exit_code = 2


class StorageError(TransaxleError):
    """Raised if the storage failed: a missing or unreadable source, an unwritable target, no space (exit code 4)."""

    exit_code = 4


class MissingFileError(StorageError, FileNotFoundError):
    """Raised for a file or folder that does not exist."""

    errno = numbers.ENOENT


class NoAccessError(StorageError, PermissionError):
    """Raised for a file or folder to which access is denied."""

    errno = numbers.EACCES


class FolderError(StorageError, IsADirectoryError):
    """Raised for a folder where a file is required."""

    errno = numbers.EISDIR


class NoFolderError(StorageError, NotADirectoryError):
    """Raised for a path on which a file is in place of a folder."""

    errno = numbers.ENOTDIR


class ExistsError(UsageError, FileExistsError):
    """Raised for a target that already exists."""

    errno = numbers.EEXIST


OF_SYSTEM: dict[type[OSError], type[StorageError]] = {
    FileNotFoundError: MissingFileError,
    PermissionError: NoAccessError,
    IsADirectoryError: FolderError,
    NotADirectoryError: NoFolderError,
}
"""Built-in exception class -> class of Transaxle that also derives from the built-in class."""


def refuse(
    code: Code,
    message: str,
    *,
    file: str | None = None,
    tensor: str | None = None,
    hint: str = "",
    system: type[OSError] | None = None,
) -> TransaxleError:
    """Build the error for a single refusal, without raising it; the error's class depends on `code` and `system`."""
    return gathered([Refusal(code, message, Where(file, tensor), hint, system=system)])


def gathered(refusals: Iterable[Refusal]) -> TransaxleError:
    """Build the error for several refusals, without raising it.

    The most important refusal determines the class and the exit code of the error. Storage failures are most important,
    then refused input, then wrong usage, because a broken source explains more than a missing option.
    """
    items = sorted(refusals, key=lambda r: (r.code not in _STORAGE, r.code in _USAGE))
    first = items[0].code
    if first in _STORAGE:
        return OF_SYSTEM.get(items[0].system or OSError, StorageError)(items)
    if first == "EXISTS":
        return ExistsError(items)
    return (UsageError if first in _USAGE else Refused)(items)


class Faults:
    """Collects the problems of one input, up to a maximum number, so that one error lists all problems."""

    def __init__(self) -> None:
        self._refusals: list[Refusal] = []

    def __bool__(self) -> bool:
        return bool(self._refusals)

    @property
    def full(self) -> bool:
        """Whether the maximum number of problems has been reached, so that the search for problems can stop."""
        return len(self._refusals) >= _MAX_PROBLEMS

    def add(self, code: Code, message: str, file: str | None, tensor: str | None = None, hint: str = "") -> None:
        """Add one refusal, whose fields are the arguments."""
        self.extend(Refusal(code, message, Where(file, tensor), hint))

    def extend(self, *refusals: Refusal) -> None:
        """Add existing refusals, such as those of an error that was caught."""
        self._refusals.extend(refusals[: _MAX_PROBLEMS - len(self._refusals)])

    def error(self) -> TransaxleError:
        """Build the error for the collected refusals; there must be at least one."""
        if self.full:
            overflow = Refusal("CORRUPT", f"there are more; these are the first {_MAX_PROBLEMS} problems")
            return gathered([*self._refusals, overflow])
        return gathered(self._refusals)
