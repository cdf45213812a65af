"""The part of YAML in which programs write settings: blocks of keys and lists, quoted texts, lists and dicts in a line.

Everything is data. A tag such as `!!python/object` is passed over, and an alias stands for the value of its anchor.
"""

from __future__ import annotations

import re
from typing import Any

_DEEPEST, _WIDEST, _LONGEST = 60, 20_000, 1000
"""Levels, characters of a line, and lines of one value at most."""
_KEY = re.compile(r"""('(?:[^']|'')*'|"(?:[^"\\]|\\.)*"|[^\s'"\[\]{}#&*!|>%@`,][^#]*?)\s*:(?:\s+|$)""")
_PROPERTY = re.compile(r"([&!])(\S*)(?:\s+|$)")
_COMMENT = re.compile(r"\s#.*")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})")
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,40}\.[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,4})?")
_WORDS: dict[str, Any] = {
    "": None, "~": None, "null": None, "true": True, "false": False, ".inf": float("inf"), "-.inf": float("-inf"),
    ".nan": float("nan"),
}  # fmt: skip
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.)|$)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "e": "\x1b", "_": "\xa0"}
_JOINED, _BREAK = re.compile(r"\\\n[ \t]*"), re.compile(r"[ \t]*(?:\n[ \t]*)+")
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_IN_LINE = re.compile(
    rf"\s*(?:([\[\]{{}},:])|({_QUOTED.pattern})|((?!['\"\s])(?:[^\s\[\]{{}},:]|:(?=\S)|\s(?=[^\s\[\]{{}},:]))+))"
)


class NotUnderstood(ValueError):
    """A text is not of the part of YAML that is read."""


def read_settings(text: str) -> Any:
    """Return what a text says, as dicts, lists, texts and numbers.

    Raises:
        NotUnderstood: with the number of the line.
    """
    reader = _Reader(text)
    value = reader.block(reader.indent()) if reader.more() else None
    if reader.more():
        raise reader.fault("belongs to nothing above it")
    return value


class _Reader:
    """Reads lines, from one that is not read yet."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._at = 0
        if any(len(line) > _WIDEST for line in self._lines):
            raise NotUnderstood(f"a line is longer than {_WIDEST} characters")
        self._anchors: dict[str, Any] = {}
        self._depth = 0

    def fault(self, message: str) -> NotUnderstood:
        return NotUnderstood(f"line {min(self._at, len(self._lines) - 1) + 1} {message}")

    def more(self) -> bool:
        """Go on to the next line that says something; tell whether there is one."""
        while self._at < len(self._lines):
            line = self._lines[self._at].strip()
            if line and not line.startswith("#") and line not in ("---", "..."):
                return True
            self._at += 1
        return False

    def indent(self) -> int:
        line = self._lines[self._at]
        return len(line) - len(line.lstrip(" "))

    def block(self, indent: int) -> Any:
        """Read the keys, the list or the one value whose lines begin at this column."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self.fault("is nested too deep")
        line = self._lines[self._at][indent:]
        if line == "-" or line.startswith("- "):
            value: Any = self._items(indent)
        elif _KEY.match(line):
            value = self._keys(indent)
        else:
            self._at += 1
            value = self._value(line, indent - 1)
        self._depth -= 1
        return value

    def _keys(self, indent: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.more() and self.indent() == indent:
            match = _KEY.match(self._lines[self._at], indent)
            if match is None:
                raise self.fault("has no key")
            key = _unquoted(match[1]) if match[1][0] in "'\"" else match[1]
            if key in found:
                raise self.fault(f"has the key {key[:50]!r} again")
            self._at += 1
            found[key] = self._value(match.string[match.end() :], indent, lists=True)
        return found

    def _items(self, indent: int) -> list[Any]:
        found: list[Any] = []
        while self.more() and self.indent() == indent and re.match(r"-(?: |$)", self._lines[self._at][indent:]):
            rest = self._lines[self._at][indent + 1 :]
            inside = rest.strip()
            if _KEY.match(inside) or inside.startswith("- "):
                self._lines[self._at] = " " * (indent + 1) + rest
                found.append(self.block(self.indent()))
            else:
                self._at += 1
                found.append(self._value(inside, indent))
        return found

    def _value(self, text: str, indent: int, *, lists: bool = False) -> Any:
        """Read a value that begins in a line read already, and goes on in lines further right than a column.

        Args:
            text: the rest of the line.
            indent: the column.
            lists: whether a list may begin at the column itself.
        """
        text, name = text.strip(), ""
        while match := _PROPERTY.match(text):
            name = match[2] if match[1] == "&" else name
            text = text[match.end() :]
        if text.startswith("#"):
            text = ""
        if text[:1] == "*":
            if text[1:] not in self._anchors:
                raise self.fault("names an anchor that is not above it")
            return self._anchors[text[1:]]
        value = self._nested(indent, lists=lists) if not text else self._scalar(text, indent)
        if name:
            self._anchors[name] = value
        return value

    def _nested(self, indent: int, *, lists: bool) -> Any:
        if not self.more():
            return None
        found = self.indent()
        is_list = lists and found == indent and re.match(r"-(?: |$)", self._lines[self._at][found:])
        return self.block(found) if found > indent or is_list else None

    def _scalar(self, text: str, indent: int) -> Any:
        if text[0] in "|>":
            return "\n".join(line.strip() for line in self._further(indent))
        if text[0] in "'\"":
            first = self._at
            while not (match := _QUOTED.match(text)):
                text = f"{text}\n{self._line('ends within quotes', first)}"
            return _unquoted(match[0])
        if text[0] in "[{":
            first = self._at
            while (read := _in_line(text)) is None:
                text = f"{text}\n{self._line('ends within brackets', first)}"
            return read[0]
        more = [_COMMENT.sub("", line).strip() for line in self._further(indent)]
        plain = _COMMENT.sub("", text).strip()
        return " ".join([plain, *more]) if more else _plain(plain)

    def _line(self, message: str, first: int) -> str:
        if self._at == len(self._lines) or self._at > first + _LONGEST:
            raise self.fault(message)
        self._at += 1
        return self._lines[self._at - 1].strip()

    def _further(self, indent: int) -> list[str]:
        """Read all lines that begin further right than a column."""
        found = []
        while self._at < len(self._lines) and (not self._lines[self._at].strip() or self.indent() > indent):
            found.append(self._line("has a value of too many lines", self._at))
        while found and not found[-1]:
            found.pop()
        return found


def _plain(text: str) -> Any:
    if text in _WORDS or text.lower() in ("null", "true", "false"):
        return _WORDS[text if text in _WORDS else text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def _unquoted(text: str) -> str:
    inside = text[1:-1] if text[0] == "'" else _JOINED.sub("", text[1:-1])
    inside = _BREAK.sub(_folded, inside)
    return inside.replace("''", "'") if text[0] == "'" else _ESCAPE.sub(_escaped, inside)


def _folded(match: re.Match[str]) -> str:
    return "\n" * (match[0].count("\n") - 1) or " "


def _escaped(match: re.Match[str]) -> str:
    code = match[1] or match[2]
    return chr(int(code, 16)) if code else _ESCAPES.get(match[3] or "", match[3] or "")


def _in_line(text: str, at: int = 0, depth: int = 0) -> tuple[Any, int] | None:
    """Return the list or dict that begins at a place of a text, and where it ends; None where it does not end.

    Raises:
        NotUnderstood: it is neither.
    """
    if depth > _DEEPEST:
        raise NotUnderstood("a value is nested too deep")
    is_dict, end = text[at] == "{", {"[": "]", "{": "}"}[text[at]]
    items: list[Any] = []
    keys: list[Any] = []
    pending: list[Any] = []
    at += 1
    while match := _IN_LINE.match(text, at):
        mark, at = match[1], match.end()
        if mark in ("[", "{"):
            inner = _in_line(text, match.start(1), depth + 1)
            if inner is None:
                return None
            pending.append(inner[0])
            at = inner[1]
        elif mark == ":":
            keys.append(pending.pop() if pending else None)
        elif mark is None:
            pending.append(_unquoted(match[2]) if match[2] else _plain(_BREAK.sub(" ", match[3].strip())))
        if len(pending) > 1 or (mark == ":" and not is_dict):
            raise NotUnderstood(f"a value in a line is not a list or dict: {text[:50]!r}")
        if mark in (",", end) and (pending or len(keys) > len(items)):
            items.append(pending.pop() if pending else None)
        if mark == end:
            if is_dict and len(keys) != len(items):
                raise NotUnderstood(f"a dict in a line has no keys: {text[:50]!r}")
            return (dict(zip(map(str, keys), items, strict=True)) if is_dict else items), at
    return None
