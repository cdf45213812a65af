"""Pages: sections of tables and figures, written into one HTML file that loads nothing and trusts nothing.

Names and metadata come from files that anybody may have written. They reach the page as JSON that no parser of HTML
can leave, and the page's script shows them as text; its policy lets nothing run but the scripts that were packed.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from transaxle.errors import refuse, shortened
from transaxle.formats.storage.local import failed
from transaxle.formats.store.access import opened_draft

MARK = b"<!doctype html><!-- a report of transaxle -->"
"""How every report begins: what begins otherwise is never replaced."""
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_MOST_TEXT, _LONG_TEXT = 2_000_000, 240
"""Characters of all names of a page, and of each where there are more."""
MOST_ROWS = 4000
"""Rows of a table; a checkpoint of 70,000 tensors has some twenty, one without rhyme or reason one for each."""
SHADES = 6
"""Colours of a map, from little to much."""
_ASSETS = "assets"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    """Its heading."""
    kind: str = "text"
    """`text`, `name` (set as code), `count`, `bytes`, `share` (bytes, with a bar of their share of all), or `number`
    (any other number)."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of plain values; readers sort, search, copy and download them."""

    id: str
    """Unique in the page; also the name of what is downloaded."""
    title: str
    """What its rows are."""
    columns: tuple[Column, ...]
    """One for each value of a row."""
    rows: Sequence[Sequence[Any]]
    """Texts and numbers."""
    left_out: str = ""
    """What is not in it, in words; empty where it is complete."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What is drawn, as data for the script of the same name."""

    kind: str
    """`treemap`, `sankey`, `heat` (a map of cells), `moves` (axes in names and dims) or `bars`."""
    label: str
    """What it shows, for those who do not see it."""
    data: Mapping[str, Any]
    """Its numbers."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page with a heading."""

    id: str
    """Unique in the page."""
    title: str
    """Its heading."""
    text: str = ""
    """A sentence or two below the heading."""
    figure: Figure | None = None
    """What is drawn there."""
    tables: tuple[Table, ...] = ()
    """The numbers."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page before it is HTML."""

    kind: str
    """What is reported on, in a word: `checkpoint`, `plan`, `conversion`, `difference`, `sharding`, `refusal`."""
    title: str
    """Its name."""
    headline: str
    """All of it on one line."""
    tiles: tuple[tuple[str, str], ...]
    """The main numbers: value and label."""
    first: str
    """Heading of the notices."""
    notices: tuple[tuple[str, str], ...]
    """What to look at first: title and text."""
    quiet: str
    """What is said where there are no notices, and below those that there are."""
    sections: tuple[Section, ...]
    """In reading order."""
    lead: tuple[str, ...] = ()
    """What everybody should know, in sentences above all else."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers, for programs that read the page."""


def capped(
    label: str, title: str, columns: tuple[Column, ...], rows: Sequence[tuple[Any, ...]], by: int | None = None
) -> Table:
    """Return a table of at most so many rows: those with the most in column `by`, or the first."""
    if len(rows) <= MOST_ROWS:
        return Table(label, title, columns, rows)
    kept = rows if by is None else sorted(rows, key=lambda row: -row[by])
    which = "first" if by is None else "largest"
    left_out = f"The {which} {MOST_ROWS:,} of {len(rows):,} rows; --json of the command line has all."
    return Table(label, title, columns, kept[:MOST_ROWS], left_out)


def shades(values: Sequence[float], words: str, times: int) -> dict[str, Any]:
    """Return bounds between colours, and labels: a colour for each value where they are few, or for as many of them.

    Args:
        values: what is drawn.
        words: how a value is written.
        times: what it is multiplied by then.
    """
    distinct = sorted({round(value, 6) for value in values})
    if len(distinct) <= SHADES:
        return {"bounds": distinct[1:], "labels": [words.format(times * value) for value in distinct]}
    lowest = [distinct[at * len(distinct) // SHADES] for at in range(SHADES)]
    highest = [distinct[(at + 1) * len(distinct) // SHADES - 1] for at in range(SHADES)]
    pairs = [(words.format(times * low), words.format(times * high)) for low, high in zip(lowest, highest, strict=True)]
    return {"bounds": lowest[1:], "labels": [low if low == high else f"{low} to {high}" for low, high in pairs]}


def check_jinja() -> None:
    """Refuse where the package that fills in the page is not installed.

    Raises:
        Refused: UNSUPPORTED.
    """
    try:
        import jinja2  # noqa: F401 - only whether it is there
    except ModuleNotFoundError:
        from transaxle.extras import install

        hint = f"Install it:  {install('report')}"
        raise refuse("UNSUPPORTED", "a report needs Jinja2, which is not installed", hint=hint) from None


def visible(text: str) -> str:
    """Return a text with those characters spelled out that cannot be seen, or that reorder what is beside them."""
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def as_html(page: Page) -> bytes:
    """Return a page as HTML."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["visible"] = visible
    style, scripts = _asset("page.css"), [_asset(name) for name in ("echarts.min.js", "maps.js", "page.js")]
    text = environment.get_template("page.html.jinja").render(
        mark=MARK.decode(),
        page=page,
        style=style,
        scripts=scripts,
        policy=_policy(style, scripts),
        data=_embedded(page),
    )
    return text.encode("utf-8")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(_ASSETS, name).read_text("utf-8")


def _policy(style: str, scripts: Sequence[str]) -> str:
    """Return a policy under which nothing is loaded, and nothing runs but these."""
    hashes = " ".join(_hash(script) for script in scripts)
    nothing = " ".join(f"{kind} 'none';" for kind in ("default-src", "base-uri", "form-action"))
    return f"{nothing} script-src {hashes}; style-src {_hash(style)}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(page: Page) -> str:
    """Return the data of a page as JSON without a character that means something in HTML."""
    tables = [asdict(table) for section in page.sections for table in section.tables]
    figures = {section.id: asdict(section.figure) for section in page.sections if section.figure is not None}
    data: Any = {"kind": page.kind, "title": page.title, "facts": page.facts, "tables": tables, "figures": figures}
    data = _plain(data)
    if _characters(data) > _MOST_TEXT:
        data = _cut(data)
    text = json.dumps(data, separators=(",", ":"), default=str, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _characters(data: object) -> int:
    if isinstance(data, str):
        return len(data)
    if isinstance(data, Mapping):
        return sum(map(_characters, data.values()))
    return sum(map(_characters, data)) if isinstance(data, list | tuple) else 0


def _cut(data: Any) -> Any:
    """Return the data with the middle of each long text left out."""
    if isinstance(data, str):
        return shortened(data, _LONG_TEXT)
    if isinstance(data, Mapping):
        return {key: _cut(value) for key, value in data.items()}
    return [_cut(value) for value in data] if isinstance(data, list | tuple) else data


def _plain(data: Any) -> Any:
    """Return the data with numpy's scalars as plain numbers, and with those that JSON lacks as JavaScript's words."""
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    value = data.item() if hasattr(data, "item") else data
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def check_destination(path: str, *, overwrite: bool | None) -> None:
    """Refuse a file that cannot be written.

    Args:
        path: the file.
        overwrite: a report that is there may be replaced; None: nothing ever is, whatever the user says.

    Raises:
        UsageError: EXISTS for a file that is there, unless it is a report that may be replaced.
        StorageError: IO for a folder that is missing or read-only.
        Refused: UNSUPPORTED for a URL.
    """
    if "://" in path:
        raise refuse("UNSUPPORTED", "a report is written to this machine only", file=path, hint="Name a local file.")
    target = Path(path)
    if not os.path.lexists(target.parent):
        raise refuse("IO", f"the folder {target.parent} does not exist", file=path, hint="Create it first.")
    try:
        if not os.access(target.parent, os.W_OK | os.X_OK):
            target.parent.stat()
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise failed(error, "writing the report", path) from error
    if not os.path.lexists(target):
        return
    is_report = target.is_file() and _is_report(target)
    if not overwrite:
        way = "Name another file, or "
        way += "remove this one." if overwrite is None else "replace it: --overwrite (overwrite=True)."
        hint = way if is_report else "Name another file."
        raise refuse("EXISTS", f"the {'folder' if target.is_dir() else 'file'} already exists", file=path, hint=hint)
    if not is_report:
        raise refuse(
            "EXISTS", "it exists and is no report, so it is not replaced", file=path, hint="Name another file."
        )


def _is_report(target: Path) -> bool:
    with suppress(OSError), target.open("rb") as file:
        return file.read(len(MARK)) == MARK
    return False


def write_page(html: bytes, path: str, *, overwrite: bool) -> None:
    """Write a page; the file appears complete or not at all.

    Raises:
        TransaxleError: EXISTS, UNSUPPORTED, IO, NO_SPACE.
    """
    check_destination(path, overwrite=overwrite)
    target = Path(path)
    draft = target.with_name(f".{target.name[:64]}.{os.getpid()}.part")
    try:
        with opened_draft(draft, target) as file:
            file.write(html)
        draft.replace(target)
    except OSError as error:
        raise failed(error, "writing the report", path) from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
