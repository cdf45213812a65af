"""The data of a page, read from its HTML."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path
from typing import Any


class _Parts(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script" and dict(attrs).get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        self.data += data if self._inside else ""


def parts(page: Path) -> tuple[list[tuple[str, dict[str, str | None]]], Any]:
    """Return the tags of a page with their attributes, and its data."""
    parser = _Parts()
    parser.feed(page.read_text("utf-8"))
    return parser.tags, json.loads(parser.data)


def data(page: Path) -> Any:
    return parts(page)[1]


def table(page_data: Any, name: str) -> list[dict[str, Any]]:
    """Return a table of a page as one mapping a row."""
    (found,) = (each for each in page_data["tables"] if each["id"] == name)
    titles = [column["title"] for column in found["columns"]]
    return [dict(zip(titles, row, strict=True)) for row in found["rows"]]


def leaf_bytes(page_data: Any) -> dict[tuple[str, str, tuple[int, ...]], int]:
    """Return the leaves of the treemap: (rule, role, indices) -> bytes."""
    found: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for group in page_data["figures"]["bytes"]["data"]["groups"]:
        places: list[tuple[int, ...]] = [()]
        for runs in group["sets"]:
            places = [(*place, n) for place in places for first, last in runs for n in range(first, last + 1)]
        for place in places:
            key = group["rule"], group["slot"] + group["role"] + group["dtype"], place
            assert key not in found
            found[key] = group["each"]
    return found
