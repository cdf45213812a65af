"""The tables by tracing in `families/generated/`, derived anew from the installed transformers.

    make tables

or, for some of them, `python -m tests.oracles.traced_tables FAMILY ...`: it writes those that differ. Where no table
can be derived any more, the shipped one stays, and the reason is printed. A model type without a table gets one; then
`python docs/generate.py` adds it to the index.
"""

from __future__ import annotations

import gzip
import multiprocessing
import re
import sys
from pathlib import Path

from transaxle import families
from transaxle.families import builtin, table_text

_SECONDS = 600


def path_of(family: str) -> Path:
    """Return the file of a shipped table, or the one of a new table."""
    entry = builtin().entries.get(family)
    return Path(families.__file__).parent / (f"{families.GENERATED}/{family}.rules.gz" if entry is None else entry.file)


def shipped_text(family: str) -> str:
    """Return the shipped table; empty if there is none."""
    entry = builtin().entries.get(family)
    return "" if entry is None else table_text(entry.file)


def statements(text: str) -> list[str]:
    """Return what a table says, but for the words that it answers to."""
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    return [" ".join(words) for words in lines if words and words[0] not in {"family", "model_type"}]


def derived(family: str) -> tuple[str, list[str]]:
    """Return the table of a family as it is derived today, and the model types of which that is not the table.

    Raises:
        Refused: UNSUPPORTED where none can be derived.
    """
    from tests.oracles.quiet import quiet
    from transaxle.derivation.sources import from_transformers

    shipped = shipped_text(family)
    if not shipped:
        with quiet():
            return from_transformers(family).text, []
    first, *others = builtin().entries[family].model_types
    with quiet():
        text = from_transformers(first).text
        differ = [each for each in others if statements(from_transformers(each).text) != statements(text)]
    for line in (r"^family .*$", r"^  model_type .*$"):
        (words,) = re.findall(line, shipped, re.MULTILINE)
        text = re.sub(line, lambda _, words=words: words, text, count=1, flags=re.MULTILINE)
    return text, differ


def main(names: list[str]) -> int:
    """Derive the tables, all where none is named."""
    traced = [name for name, entry in builtin().entries.items() if entry.traced]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=10) as pool:
        for family in names or traced:
            try:
                text, differ = pool.apply_async(derived, (family,)).get(_SECONDS)
            except Exception as error:  # noqa: BLE001 - of the peer or of the derivation: said, and the table stays
                sys.stdout.write(f"{family}: {type(error).__name__}: {' '.join(str(error).split())[:400]}\n")
                continue
            path = path_of(family)
            same = statements(text) == statements(shipped_text(family))
            if not same:
                path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
            besides = f"; not the table of {', '.join(differ)}" if differ else ""
            sys.stdout.write(f"{family}: {'as it is' if same else 'written'}{besides}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
