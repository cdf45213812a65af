"""Run the benchmark scripts, print all their promises in one table, and record the figures.

Each script runs its two sides in turns and reports medians of the rounds, so ratios are meaningful on a busy machine
too; note if it was not idle. With `--base REV` each script runs twice, with the package of this tree and with that of
another revision, whose kernels are built first; the table shows both. A missed promise shows the floor beside it, if
the script measures one.

    python benchmarks/table.py [SCRIPT ...] [--base REV] [--json docs/reference/promises.json] [--machine TEXT]

`docs/generate.py` makes the page on speed from `docs/reference/promises.json`. Figures of other scripts in an existing
file are kept; each script's entry has its date and machine.
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
SCRIPTS = (
    "convert", "dequantize", "verify", "megatron", "zero", "live", "refit", "planning", "startup", "encodings", "look",
)  # fmt: skip
"""Scripts with promises for CPUs; together they take about an hour."""

KERNELS = """
from pathlib import Path
from hatch_build import PARTS, KernelHook
hook = KernelHook(".", {}, None, None, ".", "wheel")
assert all([hook.library(Path(), part) for part in PARTS])
"""
"""Program that builds the kernels of the tree in the working directory."""

COLUMNS = ("what", "measured", "rounds", "promise", "verdict", "floor")
FiguresByScript = dict[str, list[Figure]]
"""Figures by script."""


def run_script(script: str, package: Path) -> list[Figure]:
    """Run a script with the package of a tree, and return its figures; its output is printed.

    Raises:
        SystemExit: the script failed for another reason than a missed promise.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures")
        environment = {**os.environ, FILE: str(file), "PYTHONPATH": str(package / "src")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        process = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / f"{script}.py")], env=environment, check=False
        )
        if process.returncode not in {0, 1} or not file.exists():
            raise SystemExit(f"{script} failed with {process.returncode}")
        return [Figure(**json.loads(line)) for line in file.read_text("utf-8").splitlines()]


@contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    """Check out another revision and build its kernels; the context gives the folder."""
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
    """Return the cells of a figure, in the order of `COLUMNS`."""
    value = f"{number(figure.measured)} {figure.unit}"
    return [figure.label, value, figure.spread, figure.promise, figure.verdict, figure.reachable]


def table(
    figures_by_script: Mapping[str, Sequence[Figure]], base: Mapping[str, Sequence[Figure]] | None
) -> list[list[str]]:
    """Return the rows of the table, beginning with the header."""
    rows = [["script", *COLUMNS]]
    rows[0] += [] if base is None else ["base", "now / base"]
    for script, figures in figures_by_script.items():
        before = {} if base is None else {figure.label: figure.measured for figure in base[script]}
        for entry in figures:
            row = [script, *cells(entry)]
            if base is not None:
                old = before.get(entry.label)
                row += ["", ""] if not old else [f"{number(old)} {entry.unit}", number(entry.measured / old)]
            rows.append(row)
    return rows


def align(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def keep(file: Path, figures_by_script: FiguresByScript, when: str) -> None:
    """Record the figures of scripts in a JSON file; entries of other scripts are kept."""
    recorded = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for script, figures in figures_by_script.items():
        lines = [dict(zip(COLUMNS, cells(each), strict=True)) for each in figures]
        recorded[script] = {"when": when, "figures": lines}
    file.parent.mkdir(parents=True, exist_ok=True)
    ordered = {script: recorded[script] for script in SCRIPTS if script in recorded}
    file.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(SCRIPTS)}; default: all")
    parser.add_argument("--base", metavar="REV", help="compare with the package of this revision")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "promises.json", help="where the figures go")
    parser.add_argument("--machine", help="machine and its load, for the page; default: number of cores")
    options = parser.parse_args()
    if unknown := set(options.scripts) - set(SCRIPTS):
        parser.error(f"no script {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}")
    scripts = options.scripts or SCRIPTS
    figures_by_script: FiguresByScript = {}
    base: FiguresByScript | None = None
    if options.base is None:
        figures_by_script = {script: run_script(script, ROOT) for script in scripts}
    else:
        base = {}
        with tree_of(options.base) as tree:
            for script in scripts:
                base[script], figures_by_script[script] = run_script(script, tree), run_script(script, ROOT)
    print(align(table(figures_by_script, base)))
    when = f"{date.today():%-d %B %Y}, {options.machine or f'{os.cpu_count()} cores'}"
    keep(options.json, figures_by_script, when)
    return 0 if all(each.is_kept for figures in figures_by_script.values() for each in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
