"""Settings that programs write as YAML, read as data.

A tag such as `!!python/object` is passed over, and an alias stands for the value of its anchor.
"""

from __future__ import annotations

from typing import Any

_DEEPEST, _MOST = 60, 50_000
"""Levels, and values, an alias counted as what it stands for."""
_PLAIN = frozenset(f"tag:yaml.org,2002:{word}" for word in ("null", "bool", "int", "float"))
"""Tags of what is no text."""


class NotUnderstood(ValueError):
    """A text is not YAML, or of no use as settings."""


def read_settings(text: str) -> Any:
    """Return what a text says, as dicts, lists, texts and numbers.

    Raises:
        NotUnderstood: with the number of the line.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        return _Reading(loader).value(loader.get_single_node(), 0)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise NotUnderstood(f"{line}{error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise NotUnderstood(" ".join(str(error).split())) from None


class _Reading:
    """Makes data of parsed nodes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._left = _MOST

    def value(self, node: Any, depth: int) -> Any:
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            raise NotUnderstood(f"line {node.start_mark.line + 1}: too many values, or nested too deep")
        if node is None:
            return None
        if node.id == "scalar":
            return self._loader.construct_object(node) if node.tag in _PLAIN else node.value
        if node.id == "sequence":
            return [self.value(each, depth + 1) for each in node.value]
        found: dict[str, Any] = {}
        for key, value in node.value:
            if key.id != "scalar" or key.value in found:
                raise NotUnderstood(f"line {key.start_mark.line + 1}: a key is no text, or is there again")
            found[key.value] = self.value(value, depth + 1)
        return found
