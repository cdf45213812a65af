"""Writes what the program itself knows: parts of the reference, the index of families, tables spelled out, and figures.

    python docs/generate.py [--check]

A generated part stands between `<!-- generated: name -->` and `<!-- end -->`. With `--check` nothing is written, and
pages that are out of date are an error.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

import click
import figures
import msgspec

from transaxle import cli, families
from transaxle.cli import NAME
from transaxle.cli.command import COMMANDS, program, with_all_options
from transaxle.engine.explanations import EXPLANATIONS
from transaxle.engine.moves import dialect_rows
from transaxle.errors import CODES, refuse
from transaxle.families import (
    BLOCKS,
    GENERATED,
    INDEX,
    SKELETONS,
    Entry,
    Tables,
    is_traced,
    read_all,
    spell_out,
    table_text,
)

REFERENCE = Path(__file__).parent / "reference"
FAMILIES = Path(families.__file__).parent
SCHEMAS = Path(cli.__file__).parent / "schemas"
PROVEN = FAMILIES.parent / "parallel/proven_types.json"
WIDTH = 92
_PEER = re.compile(r"Derived from transformers ([0-9.]+[0-9])")
_OF_PEER = "transformers: "
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@cache
def _tables() -> Tables:
    return read_all()


@cache
def _index() -> dict[str, Entry]:
    return _tables().index()


def commands() -> Iterator[str]:
    """Yield the help of every command, as it is printed."""
    yield from _help(NAME, program)
    root = click.Context(program, info_name=NAME)
    for name in COMMANDS:
        command = program.get_command(root, name)
        assert command is not None
        yield f"\n## {name}\n\n"
        yield from _help(name, command, root)


def _help(name: str, command: click.Command, parent: click.Context | None = None) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent, terminal_width=WIDTH, **program.context_settings)
    yield f"```text\n{with_all_options(context).get_help().strip()}\n```\n"


def codes() -> Iterator[str]:
    """Yield the table of refusal codes, and a section for each."""
    yield "| code | exit | meaning |\n|---|---|---|\n"
    for code in CODES:
        yield f"| `{code}` | {refuse(code, '').exit_code} | {EXPLANATIONS[code].summary} |\n"
    for code in CODES:
        text = EXPLANATIONS[code]
        yield f"\n## {code}\n\n{text.summary} {text.meaning}\n\n"
        yield f"```text\n{code}  {text.example}\n```\n\n{text.remedy}\n"


def known_families() -> Iterator[str]:
    """Yield the table of families: what each is, its dialects, its length, and what it was compared with."""
    yield "| family | model types | dialects | lines | made | compared with |\n|---|---|---|---|---|---|\n"
    for name, entry in _index().items():
        text = table_text(entry.file)
        peer = _PEER.search(text)
        made = (
            ("by tracing", f"transformers {peer[1]}") if entry.traced and peer else ("by hand", "[oracles](#oracles)")
        )
        written = _tables().families[name][0].written
        assert written is not None
        own, whole = (_count_lines(each) for each in (text, written.spell_out()))
        lines = str(own) if entry.traced else f"{own} of {whole}"
        cells = (f"`{name}`", ", ".join(entry.model_types), ", ".join(entry.dialects), lines, *made)
        yield f"| {' | '.join(cells)} |\n"


def known_dialects() -> Iterator[str]:
    """Yield the table of dialects: whose they are, and how many families have them."""
    yield "| dialect | framework | families | what |\n|---|---|---|---|\n"
    count = Counter(label for entry in _index().values() for label in entry.dialects)
    for label, framework, what in dialect_rows(count):
        yield f"| `{label}` | {framework} | {count[label]} | {what} |\n"


def _count_lines(table: str) -> int:
    return sum(bool(line.split("#")[0].strip()) for line in table.splitlines())


def model_types() -> Iterator[str]:
    """Yield what becomes of every model type of transformers: counts, those that are exact, and why others are not."""
    record = msgspec.json.decode((REFERENCE / "model-types.json").read_bytes())
    outcomes: dict[str, tuple[str, str]] = record["types"]
    built = {name: (table, said) for name, (table, said) in outcomes.items() if said != "does not build"}
    peers = {name: said.removeprefix(_OF_PEER) for name, (_, said) in built.items() if said.startswith(_OF_PEER)}
    ours = {name: outcome for name, outcome in built.items() if name not in peers}
    exact = {name: table for name, (table, said) in ours.items() if said == "exact"}
    yield f"transformers {record['transformers']} has {len(outcomes)} model types. "
    yield f"{len(outcomes) - len(built)} have no model class, or none that a tiny config builds; "
    yield f"{len(peers)} transformers does not round-trip. "
    yield f"Of the other {len(ours)}, {len(exact)} are exact both ways "
    yield f"({100 * len(exact) / len(ours):.1f} %):\n"
    for table, title in (
        ("by hand", "with a table by hand"),
        ("by tracing", "with a shipped table that was derived"),
        ("derived", "with a table that `--derive` makes"),
    ):
        names = [name for name, its in exact.items() if its == table]
        yield f"\n- **{title}** ({len(names)}): {', '.join(f'`{name}`' for name in names)}\n"
    yield "\n## Not exact\n\n| model type | table | why |\n|---|---|---|\n"
    for name, (table, said) in ours.items():
        if said != "exact":
            yield f"| `{name}` | {table} | {_cell(said)} |\n"
    yield "\n## transformers does not round-trip it\n\n"
    yield "What it stores it does not load, or not as it was, or not without packages that are not installed.\n\n"
    yield "| model type | what transformers does |\n|---|---|\n"
    for name, said in peers.items():
        yield f"| `{name}` | {_cell(said)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "/")


def oracles() -> Iterator[str]:
    """Yield what the dialects of the families are compared with."""
    yield "| dialect | compared with | version | families |\n|---|---|---|---|\n"
    rows = msgspec.json.decode((REFERENCE / "oracles.json").read_bytes())["oracles"]
    for dialect, package, version, what, names in rows:
        cells = (f"`{dialect}`", f"{package}: {what}" if package else what, version, _listed(names))
        yield f"| {' | '.join(cells)} |\n"


def besides() -> Iterator[str]:
    """Yield the models of Automodel that no dialect is for, and why."""
    names: dict[str, list[str]] = {}
    for name, why in msgspec.json.decode((REFERENCE / "oracles.json").read_bytes())["automodel besides"]:
        names.setdefault(why, []).append(name)
    yield "| why | models |\n|---|---|\n"
    for why, theirs in sorted(names.items()):
        yield f"| {why} | {_listed(theirs)} |\n"


def documents() -> Iterator[str]:
    """Yield what `--json` prints: a table for each form that a command's document has."""
    for name in (*COMMANDS, "error", "event", "parts"):
        schema = _schema(name)
        yield f"\n## {name}\n"
        for form, each in schema.get("$defs", {"": schema}).items():
            title = each.get("title", form) if form else ""
            yield f"\n`{title}`\n" if title else ""
            yield f"\n{each['description']}\n" if "description" in each else ""
            rows = "".join(_keys(each, ""))
            yield f"\n| key | value | meaning |\n|---|---|---|\n{rows}" if rows else ""
            yield f"\nThat of {_kind(each)}.\n" if "$ref" in each else ""


@cache
def _schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode((SCHEMAS / f"{name}.json").read_bytes())
    return found


def _keys(schema: dict[str, Any], before: str) -> Iterator[str]:
    """Yield a row for each key of an object, and for those of the objects in it."""
    for key, value in schema.get("properties", {}).items():
        optional = "" if key in schema["required"] else " (optional)"
        yield f"| `{before}{key}` | {_kind(value)}{optional} | {_cell(value['description'])} |\n"
        yield from _keys(value, f"{before}{key}.")
        for form in value.get("anyOf", ()):
            yield from _keys(form, f"{before}{key}.")
        yield from _inside(value, f"{before}{key}")
    if not before:
        yield from _inside(schema, "")


def _inside(schema: dict[str, Any], name: str) -> Iterator[str]:
    """Yield the rows of what an array or a mapping holds."""
    for key, shown in (("items", "[]"), ("additionalProperties", "{}")):
        yield from _keys(schema.get(key, {}), f"{name}{shown}.")


def _kind(value: dict[str, Any]) -> str:
    """Say what a value is."""
    if "$ref" in value:
        file, _, part = value["$ref"].partition(".json")
        return f"[{part.rpartition('/')[2] if file == 'parts' else file}](#{file})"
    if "anyOf" in value:
        return " or ".join(map(_kind, value["anyOf"]))
    if "enum" in value:
        return ", ".join(f"`{each}`" for each in value["enum"])
    kinds = value["type"] if isinstance(value["type"], list) else [value["type"]]
    inner = value.get("items") or value.get("additionalProperties")
    first = ("list" if kinds[0] == "array" else str(kinds[0])) + (f" of {_kind(inner)}" if inner else "")
    return " or ".join((first, *kinds[1:]))


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def promises() -> Iterator[str]:
    """Yield the table of what the benchmarks measured, as `benchmarks/table.py --json` has kept it."""
    kept = msgspec.json.decode((REFERENCE / "promises.json").read_bytes())
    runs: dict[str, list[str]] = {}
    for script, part in kept.items():
        runs.setdefault(part["when"], []).append(f"`{script}`")
    for when, scripts in runs.items():
        yield f"- {', '.join(scripts)}: {when}.\n"
    columns = [*next(iter(kept.values()))["figures"][0]]
    yield f"\n| script | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}\n"
    for script, part in kept.items():
        for figure in part["figures"]:
            yield f"| {script} | {' | '.join(figure.values())} |\n"


def cut_types() -> Iterator[str]:
    """Yield the model types that `tensor_parallel` cuts."""
    record = msgspec.json.decode(PROVEN.read_bytes())
    types = ", ".join(f"`{each}`" for each in record["types"])
    yield fill(f"With transformers {record['transformers']}, {len(record['types'])} types: {types}.", 120) + "\n"


def journeys() -> Iterator[str]:
    """Yield the steps of journeys, and a table for each peer: how each step of each journey ended."""
    record = msgspec.json.decode((REFERENCE / "journeys.json").read_bytes())
    steps: dict[str, str] = record["steps"]
    yield "| step | what is done |\n|---|---|\n"
    for step, what in steps.items():
        yield f"| {step} | {what} |\n"
    peers: dict[str, list[dict[str, Any]]] = {}
    for row in record["journeys"]:
        peers.setdefault(f"{row['peer']} {row['version']}", []).append(row)
    for peer, rows in peers.items():
        taken = {step for row in rows for step, _ in row["steps"]}
        columns = [step for step in (*steps, "failed") if step in taken]
        yield f"\n## {peer}\n\n| journey | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
        for row in rows:
            yield f"| {row['journey']} | {' | '.join(_verdicts(row, step) for step in columns)} |\n"


def _verdicts(row: dict[str, Any], step: str) -> str:
    said = dict.fromkeys(verdict for taken, verdict in row["steps"] if taken == step)
    return ", ".join(re.sub(r"[A-Z_]{2,}", r"`\g<0>`", verdict) for verdict in said)


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "commands": commands,
    "codes": codes,
    "families": known_families,
    "dialects": known_dialects,
    "model_types": model_types,
    "oracles": oracles,
    "journeys": journeys,
    "besides": besides,
    "documents": documents,
    "promises": promises,
    "cut_types": cut_types,
}


def _page(before: str) -> str:
    return _PART.sub(lambda match: f"{match[1]}\n{''.join(PARTS[match[2]]())}\n{match[3]}", before)


def _json(content: bytes) -> str:
    return msgspec.json.format(content, indent=1).decode() + "\n"


def _data() -> dict[Path, str]:
    """Return the files that follow from the tables: the indices, and each table by hand spelled out."""
    indices = {INDEX: _index(), BLOCKS: _tables().blocks, SKELETONS: _tables().skeletons()}
    found = {FAMILIES / file: _json(msgspec.json.encode(content)) for file, content in indices.items()}
    for name, (family, file) in _tables().families.items():
        if not is_traced(file):
            found[FAMILIES / GENERATED / f"{name}.json"] = _json(spell_out(family))
    return found


def main() -> int:
    """Write the generated parts, or with `--check` say which pages are out of date."""
    stale = []
    check = "--check" in sys.argv[1:]
    written = _data()
    written |= {page: _page(page.read_text("utf-8")) for page in sorted(REFERENCE.glob("*.md"))}
    written |= dict(figures.drawn())
    for path in sorted({*written, *(FAMILIES / GENERATED).glob("*.json"), *figures.FOLDER.glob("*.svg")}):
        if path not in written:
            stale.append(path)
            if not check:
                path.unlink()
        elif not path.exists() or path.read_text("utf-8") != written[path]:
            stale.append(path)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(written[path], "utf-8")
    if check and stale:
        sys.stderr.write(f"out of date, run `python docs/generate.py`: {', '.join(page.name for page in stale)}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
