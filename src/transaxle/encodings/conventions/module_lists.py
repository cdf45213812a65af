"""Lists of modules in config files, each asked as the config's own reader would ask it.

Three dialects are known: that of transformers (an expression that ends at a module's boundary, or any suffix), that of
compressed-tensors (`re:` and an expression, or a whole name), and ModelOpt's wildcards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Literal

import msgspec

from transaxle.encodings.conventions.linear_regex import Expressions

EXPRESSION = "re:"
"""What a regular expression starts with where compressed-tensors lists modules."""


class Modules(msgspec.Struct, frozen=True, dict=True):
    """A list of modules as a config file gives it, to be asked as the config's own reader would."""

    names: frozenset[str] = frozenset()
    """Modules named whole."""
    inside: bool = False
    """Whether a name also stands for what is inside that module, and for every name that ends with it."""
    expressions: Expressions | None = None
    """What matches others."""
    until: Literal["anywhere", "segment", "end"] = "anywhere"
    """Where a match of an expression must end."""

    def __contains__(self, module: str) -> bool:
        """Tell whether the list holds a module.

        Raises:
            PatternError: for an expression that takes too long.
        """
        if self.names and (module in self.names or (self.inside and self._inside(module))):
            return True
        if self.expressions is None or not self.expressions.match(module):
            return False
        return self.until == "anywhere" or any(self.expressions.ends_at(module, at) for at in self._ends(module))

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(sorted({len(name) for name in self.names}))

    def _inside(self, module: str) -> bool:
        dots = (at for at, letter in enumerate(module) if letter == ".")
        starts = (module[:end] for at in dots for end in (at, at + 1))
        return any(start in self.names for start in starts) or any(module[-n:] in self.names for n in self._lengths)

    def _ends(self, module: str) -> Iterator[int]:
        """Yield where a match may end."""
        yield len(module)
        if self.until == "segment":
            for at, letter in enumerate(module):
                if letter == ".":
                    yield from (at, at + 1)


def transformers_modules(texts: Iterable[str]) -> Modules:
    """Return the modules of a list such as `modules_to_not_convert` (`should_convert_module` of transformers 5.23).

    An entry is the name of a module, with all inside it, or the end of one; or else an expression. A dot in a name
    is taken for a dot, where transformers takes it for any character.

    Raises:
        PatternError: for an entry that is malformed.
    """
    listed = frozenset(text for text in texts if text)
    expressions = sorted(text for text in listed if set(text) & _SPECIAL)
    return Modules(listed, inside=True, expressions=Expressions(expressions) if expressions else None, until="segment")


def compressed_modules(texts: Iterable[str]) -> Modules:
    """Return the modules of a list of compressed-tensors: whole names, and expressions after `re:`.

    Raises:
        PatternError: for an entry that is malformed.
    """
    listed = frozenset(texts)
    expressions = sorted(text.removeprefix(EXPRESSION) for text in listed if text.startswith(EXPRESSION))
    return Modules(listed, expressions=Expressions(expressions) if expressions else None)


def wildcard_modules(texts: Iterable[str]) -> Modules:
    """Return the modules of a list of ModelOpt's, in which `*` stands for any characters and `?` for one."""
    listed = frozenset(texts)
    wild = sorted(text for text in listed if set(text) & _WILD.keys())
    expressions = ["".join(_WILD.get(letter) or _escaped(letter) for letter in text) for text in wild]
    return Modules(listed, expressions=Expressions(expressions) if expressions else None, until="end")


_SPECIAL = frozenset("\\^$*+?{}[]()|")
_WILD = {"*": ".*", "?": "."}


def _escaped(letter: str) -> str:
    return letter if letter.isalnum() else "\\" + letter
