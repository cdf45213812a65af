"""Wrong values planted in random functions: how many do the tests notice?

`python -m tests.mutation --seed 1 --count 20` draws functions of the rooms where a wrong value would be silent, changes
one operator, number or condition in a copy of the repository, and runs the tests there: those of the room, then all
of `make test`. It prints each change with the test that failed, or SURVIVED.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = {
    "axes": ["tests/axes", "tests/engine/plan", "tests/engine/execute"],
    "engine/plan": ["tests/engine/plan", "tests/engine/views", "tests/engine/checkpoint", "tests/cli"],
    "engine/carry.py": [
        "tests/engine/execute",
        "tests/engine/plan",
        "tests/engine/views",
        "tests/engine/compare",
        "tests/live/save",
    ],
    "formats/store": ["tests/formats/store", "tests/engine/execute", "tests/cli"],
}
"""Path below the package -> the tests to run first."""
_LIMIT = 1800
"""Seconds for one run of tests; a change that makes them hang is noticed as well."""

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "*", ast.LShift: ">>", ast.RShift: "<<",
    ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
_COMPARISONS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One expression of a function, and what replaces it."""

    file: str
    function: str
    node: ast.expr
    replacement: str

    def apply(self, source: str) -> str:
        """Return the changed source."""
        lines = [line.encode() for line in source.splitlines(keepends=True)]
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        first = starts[self.node.lineno - 1] + self.node.col_offset
        last = starts[(self.node.end_lineno or 0) - 1] + (self.node.end_col_offset or 0)
        text = b"".join(lines)
        return (text[:first] + f"({self.replacement})".encode() + text[last:]).decode()

    def __str__(self) -> str:
        return f"{self.file}:{self.node.lineno} {self.function}: {ast.unparse(self.node)}  ->  {self.replacement}"


def main() -> None:
    """Draw changes, run the tests on each, print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", action="store_true", help="only the tests beside each room")
    options = parser.parse_args()
    changes = _drawn(random.Random(options.seed), options.count)
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        ignored = shutil.ignore_patterns(".venv*", ".git", "build", "__pycache__", ".mypy_cache", ".hypothesis")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for room, change in changes:
            file = copy / change.file
            source = file.read_text("utf-8")
            file.write_text(change.apply(source), "utf-8")
            runs = [ROOMS[room], *([] if options.first else [["tests"]])]
            noticed = next(filter(None, (_failure(copy, tests) for tests in runs)), "")
            file.write_text(source, "utf-8")
            killed += bool(noticed)
            print(f"{noticed or 'SURVIVED'}\n    {change}", flush=True)  # noqa: T201
    print(f"{killed} of {len(changes)} noticed")  # noqa: T201


def _drawn(drawing: random.Random, count: int) -> list[tuple[str, Change]]:
    """Draw functions, each with one change: rooms in turn, every function once."""
    functions = {
        room: [
            (path, node)
            for path in _modules(room)
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.FunctionDef) and [*_changes(path, node)]
        ]
        for room in ROOMS
    }
    drawn = []
    for number in range(count):
        room = [*ROOMS][number % len(ROOMS)]
        path, node = functions[room].pop(drawing.randrange(len(functions[room])))
        drawn.append((room, drawing.choice([*_changes(path, node)])))
    return drawn


def _modules(room: str) -> list[Path]:
    place = ROOT / "src/transaxle" / room
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def _changes(path: Path, function: ast.FunctionDef) -> Iterator[Change]:
    file = path.relative_to(ROOT).as_posix()
    texts = [node for node in ast.walk(function) if isinstance(node, ast.JoinedStr | ast.Raise)]
    types = [node.annotation for node in ast.walk(function) if isinstance(node, ast.AnnAssign)]
    unchanged = {id(part) for node in (*texts, *types) for part in ast.walk(node)}
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.expr) and id(node) not in unchanged and (text := _replacement(node)):
                yield Change(file, function.name, node, text)


def _replacement(node: ast.expr) -> str:
    """Return a wrong expression for some kinds of expressions."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return f"({ast.unparse(node.left)}) {_OPERATORS[type(node.op)]} ({ast.unparse(node.right)})"
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return f"({ast.unparse(node.left)}) {_COMPARISONS[type(node.ops[0])]} ({ast.unparse(node.comparators[0])})"
    if isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        return word.join(f"({ast.unparse(value)})" for value in node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ast.unparse(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return str(node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return str(not node.value)
    return ""


def _failure(copy: Path, tests: Sequence[str]) -> str:
    """Return the first test that fails, or how the run ended; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--numprocesses", "2", *tests]
    environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}:{copy}"}
    try:
        run = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if run.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    return failed.group(1) if failed else f"ends with {run.returncode}"


if __name__ == "__main__":
    main()
