r"""Name patterns of DeepSpeed's metadata, looked up by name.

DeepSpeed's own patterns are escaped names; those of training frameworks have `.`, `\d+` and the like. As DeepSpeed uses
them, a pattern need only match the beginning of a name, unless it ends in `$`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from transaxle.encodings.conventions.linear_regex import Expressions, PatternError
from transaxle.errors import TransaxleError, refuse

_WHOLE_NAME = re.compile(r"\^?((?:\\[^a-zA-Z0-9]|[^\\.^$*+?{}\[\]()|])*)\$")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


class Patterns:
    """Many patterns: those that are whole names are found without trying the others.

    Raises:
        Refused: UNSUPPORTED for a pattern that is malformed, or that RE2 cannot run.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._of_name: dict[str, str] = {}
        self._others: list[str] = []
        for text in dict.fromkeys(texts):
            if found := _WHOLE_NAME.fullmatch(text):
                self._of_name[_ESCAPE.sub(r"\1", found[1])] = text
            else:
                self._others.append(text)
        try:
            self._expressions = Expressions(self._others)
        except PatternError as error:
            raise _unsupported(error) from None

    def match(self, name: str) -> tuple[str, ...]:
        """Return the patterns that match a name.

        Raises:
            Refused: UNSUPPORTED where that takes far longer than with any real patterns.
        """
        whole = [self._of_name[name]] if name in self._of_name else []
        try:
            return (*whole, *(self._others[number] for number in self._expressions.matching(name)))
        except PatternError as error:
            raise _unsupported(error) from None


def _unsupported(error: PatternError) -> TransaxleError:
    hint = "Write the patterns as escaped names, or as regular expressions without `\\1`, `\\b` and `(?=`."
    return refuse("UNSUPPORTED", f"name patterns: {error}", hint=hint)


def escaped(name: str) -> str:
    """Return the pattern that matches this name alone, as DeepSpeed writes it."""
    return f"^{re.escape(name)}$"
