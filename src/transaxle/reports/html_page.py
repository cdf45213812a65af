"""Report pages: sections with tables and figures, rendered into one HTML file that loads no other files.

Tensor names and metadata may come from hostile files. So names and metadata are embedded as JSON without characters
that are special in HTML, and the script of the page shows them as literal text. A content security policy allows only
the scripts that are embedded in the page to run.
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
from transaxle.formats.storage.local import storage_error
from transaxle.formats.store.access import open_draft

MARK = b"<!doctype html><!-- a report of transaxle -->"
"""First bytes of every report file; a file that does not begin with them is never replaced."""
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_MOST_TEXT, _LONG_TEXT = 2_000_000, 240
"""Largest total length of the texts in a page. If the texts are longer, each text is shortened to the second length."""
MOST_ROWS = 4000
"""Largest number of rows of a table; only checkpoints with irregular tensor names have more rows."""
SHADES = 6
"""Number of colours in a heat map."""
_ASSETS = "assets"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    """Heading of the column."""
    kind: str = "text"
    """Kind of the column's values: `text`, `name` (shown as code), `count`, `bytes`, `share` (bytes, shown as a bar of
    their share of the total), or `number` (any other number).
    """


@dataclass(frozen=True, slots=True)
class Table:
    """A table of plain values, which readers of the page can sort, search, copy and download."""

    id: str
    """Unique id of the table in the page, and name of the downloaded file."""
    title: str
    """Title of the table."""
    columns: tuple[Column, ...]
    """Columns of the table, one for each value of a row."""
    rows: Sequence[Sequence[Any]]
    """Rows of the table, each with one text or number for each column."""
    left_out: str = ""
    """A sentence about omitted rows; empty if the table is complete."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure, given as the data from which the page's script draws it."""

    kind: str
    """Kind of figure: `treemap`, `sankey`, `heat` (a map of cells), `moves` (axes in names and dims) or `bars`."""
    label: str
    """Description of the figure for screen readers."""
    data: Mapping[str, Any]
    """Data of the figure, in the form that the drawing script expects."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page with its own heading."""

    id: str
    """Unique id of the section in the page."""
    title: str
    """Heading of the section."""
    text: str = ""
    """One or two sentences below the heading."""
    figure: Figure | None = None
    """Figure of the section; None if it has no figure."""
    tables: tuple[Table, ...] = ()
    """Tables of the section, shown below the figure."""


@dataclass(frozen=True, slots=True)
class Page:
    """Content of a page, before it is rendered to HTML."""

    kind: str
    """Subject of the page: `checkpoint`, `plan`, `conversion`, `difference`, `sharding` or `refusal`."""
    title: str
    """Name of the page's subject, such as the path of a checkpoint."""
    headline: str
    """A summary of the page in one line."""
    tiles: tuple[tuple[str, str], ...]
    """The main numbers of the page, as pairs (number, label)."""
    first: str
    """The heading above the notices."""
    notices: tuple[tuple[str, str], ...]
    """The most important messages of the page, as pairs (title, text)."""
    quiet: str
    """Text below the notices, which is shown even if there are no notices."""
    sections: tuple[Section, ...]
    """The sections of the page, in reading order."""
    lead: tuple[str, ...] = ()
    """Sentences at the top of the page that summarise it."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Data that is embedded in the page for programs that read the page."""


def limit_rows(
    label: str, title: str, columns: tuple[Column, ...], rows: Sequence[tuple[Any, ...]], by: int | None = None
) -> Table:
    """Return a table with at most `MOST_ROWS` rows: those with the largest values in column `by`, or without `by` the
    first rows.
    """
    if len(rows) <= MOST_ROWS:
        return Table(label, title, columns, rows)
    ordered = rows if by is None else sorted(rows, key=lambda row: -row[by])
    which = "first" if by is None else "largest"
    left_out = f"The {which} {MOST_ROWS:,} of {len(rows):,} rows; --json of the command line has all."
    return Table(label, title, columns, ordered[:MOST_ROWS], left_out)


def shades(values: Sequence[float], words: str, times: int) -> dict[str, Any]:
    """Return the bounds between the colours of a heat map, and a label for each colour.

    If there are few distinct values, each gets its own colour; otherwise each colour represents a group of equally many
    values.

    Args:
        values: the values of the cells in the map.
        words: format string that makes a label from a value.
        times: factor by which a value is multiplied before it is formatted.
    """
    distinct = sorted({round(value, 6) for value in values})
    if len(distinct) <= SHADES:
        return {"bounds": distinct[1:], "labels": [words.format(times * value) for value in distinct]}
    lowest = [distinct[at * len(distinct) // SHADES] for at in range(SHADES)]
    highest = [distinct[(at + 1) * len(distinct) // SHADES - 1] for at in range(SHADES)]
    pairs = [(words.format(times * low), words.format(times * high)) for low, high in zip(lowest, highest, strict=True)]
    return {"bounds": lowest[1:], "labels": [low if low == high else f"{low} to {high}" for low, high in pairs]}


def check_jinja() -> None:
    """Refuse to make a page if Jinja2, the package that renders pages, is not installed.

    Raises:
        Refused: with code UNSUPPORTED, if Jinja2 is not installed.
    """
    try:
        import jinja2  # noqa: F401 - checks only that it is installed
    except ModuleNotFoundError:
        from transaxle.extras import install

        hint = f"Install it:  {install('report')}"
        raise refuse("UNSUPPORTED", "a report needs Jinja2, which is not installed", hint=hint) from None


def visible(text: str) -> str:
    """Escape characters in a text that are invisible or that change the order of the text around them."""
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def as_html(page: Page) -> bytes:
    """Render a page to HTML."""
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
        data=_data_json(page),
    )
    return text.encode("utf-8")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(_ASSETS, name).read_text("utf-8")


def _policy(style: str, scripts: Sequence[str]) -> str:
    """Return the content security policy that allows only the given style and the given scripts."""
    hashes = " ".join(_hash(script) for script in scripts)
    forbidden = " ".join(f"{kind} 'none';" for kind in ("default-src", "base-uri", "form-action"))
    return f"{forbidden} script-src {hashes}; style-src {_hash(style)}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data_json(page: Page) -> str:
    """Return the data of a page as JSON in which all characters that are special in HTML are escaped."""
    tables = [asdict(table) for section in page.sections for table in section.tables]
    figures = {section.id: asdict(section.figure) for section in page.sections if section.figure is not None}
    data: Any = {"kind": page.kind, "title": page.title, "facts": page.facts, "tables": tables, "figures": figures}
    data = _plain(data)
    if _text_length(data) > _MOST_TEXT:
        data = _cut_texts(data)
    text = json.dumps(data, separators=(",", ":"), default=str, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text_length(data: object) -> int:
    if isinstance(data, str):
        return len(data)
    if isinstance(data, Mapping):
        return sum(map(_text_length, data.values()))
    return sum(map(_text_length, data)) if isinstance(data, list | tuple) else 0


def _cut_texts(data: Any) -> Any:
    """Shorten each long text in the data by omitting its middle."""
    if isinstance(data, str):
        return shortened(data, _LONG_TEXT)
    if isinstance(data, Mapping):
        return {key: _cut_texts(value) for key, value in data.items()}
    return [_cut_texts(value) for value in data] if isinstance(data, list | tuple) else data


def _plain(data: Any) -> Any:
    """Convert numpy scalars in the data to plain numbers, and NaN and infinities to texts that JavaScript parses."""
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    value = data.item() if hasattr(data, "item") else data
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def check_destination(path: str, *, overwrite: bool | None) -> None:
    """Refuse a path at which a report cannot be written.

    Args:
        path: path of the report.
        overwrite: whether an existing report may be replaced; None means no, and that the error suggests no option for
            it.

    Raises:
        UsageError: with code EXISTS, if the file exists, unless it is a report that may be replaced.
        StorageError: with code IO, if the folder is missing or read-only.
        Refused: with code UNSUPPORTED, if the path is a URL.
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
        raise storage_error(error, "writing the report", path) from error
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
    """Write a page to a file; the file appears either complete or not at all.

    Raises:
        TransaxleError: any error of `check_destination`; with code IO or NO_SPACE, if the file cannot be written.
    """
    check_destination(path, overwrite=overwrite)
    target = Path(path)
    draft = target.with_name(f".{target.name[:64]}.{os.getpid()}.part")
    try:
        with open_draft(draft, target) as file:
            file.write(html)
        draft.replace(target)
    except OSError as error:
        raise storage_error(error, "writing the report", path) from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
