"""Tells tensors that a reader leaves out on purpose from those that its model has no parameter for.

Loading code is a loop over the tensors, and what it leaves out ends in a `continue`. Under `if "inv_freq" in name` that
is on purpose; under `if name not in params_dict` the model lacks a parameter of this name. So a tensor is loaded once
more, alone, while the lines of the reader's code are watched: the last `continue` of such a loop says which it is.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple


class Skip(NamedTuple):
    """Where a reader's code leaves a tensor out."""

    condition: str
    """The condition, as the code has it."""
    place: str
    """File and line."""
    on_purpose: bool
    """Whether the condition is about the tensor, and not about the parameters of the model."""


def watch_skip(
    load: Callable[[], object], has_tensor: Callable[[object], bool], root: Path, ignores: Callable[[FrameType], bool]
) -> Skip | None:
    """Return where a tensor is left out; None if no line of the code says so.

    Args:
        load: loads a single tensor; what it raises for want of others is ignored.
        has_tensor: whether a value in the code is this tensor.
        root: folder of the reader's code.
        ignores: whether a frame that asks a loader's list of ignored names has the tensor on that list on purpose.
    """
    skips: list[Skip] = []
    filters: dict[FrameType, Skip] = {}

    def follow(frame: FrameType, event: str, value: object) -> Any:
        code = _skips(frame.f_code.co_filename)
        if frame.f_code.co_name == _GENERATOR:
            if event == "line" and (condition := code.conditions.get(frame.f_lineno)):
                filters[frame] = condition
            elif event == "return" and (rejecting := filters.pop(frame, None)) and value is None:
                skips[:] = [rejecting]
        elif event == "line" and (skip := code.continues.get(frame.f_lineno)):
            if "ignore" in skip.condition:
                skips[:] = [skip._replace(on_purpose=ignores(frame))]
            elif "skip" in skip.condition or any(map(has_tensor, frame.f_locals.values())):
                skips[:] = [skip]
        return follow

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        return follow if frame.f_code.co_filename.startswith(str(root)) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        load()
    except Exception:  # noqa: BLE001 - code that needs other tensors too fails without them
        pass
    finally:
        sys.settrace(before)
    return skips[0] if skips else None


_GENERATOR = "<genexpr>"


class _Skips(NamedTuple):
    """Where the loops of a file of Python code leave something out, by line."""

    continues: Mapping[int, Skip]
    """A `continue` of an outermost loop."""
    conditions: Mapping[int, Skip]
    """A condition of a generator expression."""


@cache
def _skips(path: str) -> _Skips:
    text = Path(path).read_text("utf-8")
    continues: dict[int, Skip] = {}
    conditions: dict[int, Skip] = {}

    def skip_under(condition: ast.expr) -> Skip:
        source = " ".join((ast.get_source_segment(text, condition) or "").split())
        return Skip(source, f"{Path(path).name}, line {condition.lineno}", not _looks_up(condition))

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continues |= {line: skip_under(condition) for line, condition in _outermost(node.body, None)}
        elif isinstance(node, ast.GeneratorExp):
            for condition in (each for part in node.generators for each in part.ifs):
                lines = range(condition.lineno, (condition.end_lineno or condition.lineno) + 1)
                conditions |= dict.fromkeys(lines, skip_under(condition))
    return _Skips(continues, conditions)


def _outermost(body: list[ast.stmt], condition: ast.expr | None, *, loops: int = 0) -> Iterator[tuple[int, ast.expr]]:
    """Yield the line of each `continue` of a loop that is in no other loop, and the condition around it."""
    for place, statement in enumerate(body):
        if isinstance(statement, ast.Continue):
            if loops == 1 and condition is not None and all(map(_only_tells, body[:place])):
                yield statement.lineno, condition
        elif isinstance(statement, (ast.For, ast.While)):
            yield from _outermost(statement.body, None, loops=loops + 1)
            yield from _outermost(statement.orelse, condition, loops=loops)
        elif isinstance(statement, ast.If):
            yield from _outermost(statement.body, statement.test, loops=loops)
            yield from _outermost(statement.orelse, condition, loops=loops)
        elif isinstance(statement, (ast.With, ast.Try)):
            yield from _outermost(statement.body, condition, loops=loops)


def _only_tells(statement: ast.stmt) -> bool:
    """Return whether a statement only writes to a log."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logger.")


def _looks_up(condition: ast.expr) -> bool:
    """Return whether a condition asks if the model has a parameter: whether a name is in a collection that the code has
    made, or whether a parameter is None.
    """
    return any(
        isinstance(node, ast.Compare)
        and any(
            (isinstance(operator, (ast.In, ast.NotIn)) and not isinstance(left, ast.Constant) and _is_made(place))
            or (isinstance(operator, ast.Is) and "param" in ast.unparse(left))
            for left, operator, place in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False)
        )
        for node in ast.walk(condition)
    )


def _is_made(collection: ast.expr) -> bool:
    return not isinstance(collection, (ast.Constant, ast.Tuple, ast.List, ast.Set))
