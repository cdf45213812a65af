"""All promises in one table: runs the scripts, each by itself, and keeps what they measured.

Each script takes turns with what it is compared with and gives medians of its rounds, so ratios mean something on a
machine that others use too; say when it was not idle. With `--base REV` each script runs twice, with the package of
this tree and with that of another revision (of which the kernels are built anew), and the table shows both. A promise
that is not kept has the floor beside it, where the script measures one.

    python benchmarks/table.py [SCRIPT ...] [--base REV] [--json docs/reference/promises.json] [--machine TEXT]

The page on speed is made of `docs/reference/promises.json` by `docs/generate.py`. A file that is there keeps
what it has of other scripts; each says when and on what it ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from promises import FILE, Figure, number

ROOT = Path(__file__).parents[1]
SCRIPTS = ("convert", "verify", "megatron", "zero", "live", "refit", "planning", "startup", "encodings", "look")
"""Those that hold promises on a CPU, in about three quarters of an hour."""

KERNELS = """
from pathlib import Path
from hatch_build import PARTS, KernelHook
hook = KernelHook(".", {}, None, None, ".", "wheel")
assert all([hook.library(Path(), part) for part in PARTS])
"""
"""Builds the kernels of the tree that is the working directory."""

COLUMNS = ("what", "measured", "rounds", "promise", "verdict", "floor")
Found = dict[str, list[Figure]]
"""Figures by script."""


def measured(script: str, package: Path) -> list[Figure]:
    """Run a script with the package of a tree, and return its figures; what it prints is seen.

    Raises:
        SystemExit: it failed otherwise than by a promise that is not kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures")
        environment = {**os.environ, FILE: str(file), "PYTHONPATH": str(package / "src")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / f"{script}.py")], env=environment, check=False)
        if done.returncode not in {0, 1} or not file.exists():
            raise SystemExit(f"{script} failed with {done.returncode}")
        return [Figure(**json.loads(line)) for line in file.read_text("utf-8").splitlines()]


@contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    """Give a checkout of another revision with its kernels."""
    with tempfile.TemporaryDirectory(prefix="transaxle-base-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            subprocess.run([sys.executable, "-c", KERNELS], cwd=tree, check=True)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def cells(figure: Figure) -> list[str]:
    """Return a figure in words, column by column."""
    measured = f"{number(figure.measured)} {figure.unit}"
    return [figure.what, measured, figure.spread, figure.promise, figure.verdict, figure.reachable]


def table(found: Mapping[str, Sequence[Figure]], base: Mapping[str, Sequence[Figure]] | None) -> list[list[str]]:
    """Return the rows of the table, the first of them its head."""
    rows = [["script", *COLUMNS]]
    rows[0] += [] if base is None else ["base", "now / base"]
    for script, figures in found.items():
        before = {} if base is None else {figure.what: figure.measured for figure in base[script]}
        for each in figures:
            row = [script, *cells(each)]
            if base is not None:
                old = before.get(each.what)
                row += ["", ""] if not old else [f"{number(old)} {each.unit}", number(each.measured / old)]
            rows.append(row)
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def keep(file: Path, found: Found, when: str) -> None:
    """Put what scripts have measured into a file; what it has of other scripts stays as it is."""
    kept = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for script, figures in found.items():
        lines = [dict(zip(COLUMNS, cells(each), strict=True)) for each in figures]
        kept[script] = {"when": when, "figures": lines}
    file.parent.mkdir(parents=True, exist_ok=True)
    ordered = {script: kept[script] for script in SCRIPTS if script in kept}
    file.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(SCRIPTS)}; default: all")
    parser.add_argument("--base", metavar="REV", help="compare with the package of this revision")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "promises.json", help="where the figures go")
    parser.add_argument("--machine", help="what it ran on, and beside what, for the page; default: the cores")
    said = parser.parse_args()
    if unknown := set(said.scripts) - set(SCRIPTS):
        parser.error(f"no script {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}")
    scripts = said.scripts or SCRIPTS
    found: Found = {}
    base: Found | None = None
    if said.base is None:
        found = {script: measured(script, ROOT) for script in scripts}
    else:
        base = {}
        with tree_of(said.base) as tree:
            for script in scripts:
                base[script], found[script] = measured(script, tree), measured(script, ROOT)
    print(aligned(table(found, base)))
    when = f"{date.today():%-d %B %Y}, {said.machine or f'{os.cpu_count()} cores'}"
    keep(said.json, found, when)
    return 0 if all(each.kept for figures in found.values() for each in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
