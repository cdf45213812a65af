"""Strict JSON: text from strangers, in which no key may occur twice.

Decoders silently keep the last of two equal keys, so that two readers of one file may see different tensors. JSON of
strangers is read here. In headers and indexes, which may be long, each decoded key accounts for one colon in the text;
more colons than keys mean that a key was dropped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

MAX_PAIRS = 4_000_000
"""Cap on the key-value pairs of one text: a million tensors. More would take memory out of proportion to the file."""
_CHUNK = 1 << 16
"""Bytes of text that are split at a time: in objects they take some twenty times as much memory."""
_TOO_DEEP = "it is nested too deeply"

_Form = TypeVar("_Form")

_top: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


class NotJsonError(ValueError):
    """The text is not JSON in UTF-8, or none of the expected form; the message says where it stops being that."""


def parsed(text: bytes | str) -> Any:
    """Return what JSON text says.

    Raises:
        NotJsonError: also for nesting that is too deep, and for an object that has a key twice.
    """
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8-sig")
        return json.loads(plain, object_pairs_hook=_once)
    except RecursionError as error:
        raise NotJsonError(_TOO_DEEP) from error
    except ValueError as error:
        raise NotJsonError(str(error)) from error


def parsed_as(text: bytes | str, form: type[_Form]) -> _Form:
    """Return what JSON text says, as a type of msgspec.

    Raises:
        NotJsonError: see `parsed`; and where it has another form.
    """
    try:
        return msgspec.convert(parsed(text), form)
    except msgspec.MsgspecError as error:
        raise NotJsonError(str(error)) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members_of_it = dict(pairs)
    if len(members_of_it) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise NotJsonError(f"the key {twice[:100]!r} is there twice")
    return members_of_it


def members(text: bytes) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON object, their values not yet decoded.

    Raises:
        NotJsonError: also for nesting that is too deep, and for text that is not UTF-8.
    """
    try:
        text.decode("utf-8")
        return _top.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NotJsonError(str(error)) from error
    except RecursionError as error:
        raise NotJsonError(_TOO_DEEP) from error


def pairs_in(text: bytes) -> int:
    """Count the key-value pairs of valid JSON text, at every level: the colons outside its strings."""
    # What follows a backslash is part of a string, a quote included: `\\` goes first, then `\"`.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    pairs, within = 0, 0
    for start in range(0, len(plain), _CHUNK):
        pieces = plain[start : start + _CHUNK].split(b'"')  # every other one is inside a string
        pairs += b"".join(pieces[within::2]).count(b":")
        within = (within + len(pieces) - 1) % 2
    return pairs


def dropped(text: bytes, top: Mapping[str, msgspec.Raw]) -> bool:
    """Tell whether `members(text)`, which returned `top`, dropped a repeated key."""
    return pairs_in(text) != len(top) + sum(pairs_in(bytes(raw)) for raw in top.values())


def repeated(text: bytes) -> list[tuple[str, ...]]:
    """Return the path of every repeated key in valid JSON text; items of arrays count as keys `0`, `1`, ….

    Raises:
        NotJsonError: for nesting that is too deep.
    """
    try:
        top = json.loads(text, object_pairs_hook=_repeats, parse_int=str, parse_float=str)
    except RecursionError as error:
        raise NotJsonError(_TOO_DEEP) from error
    return list(_paths(top))


class _Repeats(msgspec.Struct, frozen=True):
    """A JSON object with repeated keys in or below it."""

    paths: tuple[tuple[str, ...], ...]
    """Keys from this object to each repeated key."""


def _repeats(pairs: list[tuple[str, object]]) -> _Repeats | None:
    times = Counter(key for key, _ in pairs) if len(dict(pairs)) < len(pairs) else {}
    repeated_here = [(key,) for key, count in times.items() if count > 1]
    below = [(key, *path) for key, value in pairs for path in _paths(value)]
    return _Repeats((*repeated_here, *below)) if repeated_here or below else None


def _paths(value: object) -> Iterator[tuple[str, ...]]:
    if isinstance(value, _Repeats):
        yield from value.paths
    elif isinstance(value, list):
        yield from ((str(at), *path) for at, item in enumerate(value) for path in _paths(item))
