"""Proof: a table's conversions against a trace that it was not derived from, both ways, bit by bit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from transaxle.axes.layout.bind import bind
from transaxle.axes.layout.solve import fill
from transaxle.axes.notation import tables
from transaxle.axes.notation.family import Sizes
from transaxle.derivation.fitting.trace import Shape, Trace
from transaxle.derivation.tracing.saved_folder import loaded
from transaxle.derivation.writing.table import Labels
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.execute.execute import execute
from transaxle.engine.plan.conversion import make_plan
from transaxle.errors import Code, TransaxleError
from transaxle.move.workers import limits

Tensors = Mapping[str, npt.NDArray[Any]]
_MISFIT: Code = "SHAPE_MISMATCH"
_LISTED = 3
"""Names that a problem lists."""


def prove(text: str, trace: Trace, labels: Labels) -> tuple[str, ...]:
    """Convert the tensors of a trace with a table, in both directions, and compare with what the converter made.

    Args:
        text: the table.
        trace: a run of the converter; the proof is worth most if the table was derived without it.
        labels: names of the family and its dialects.

    Returns:
        What is wrong; nothing where both directions are exact.
    """
    sides = [_tensors(trace.hub, trace), _tensors(trace.memory, trace)]
    problems = []
    with tempfile.TemporaryDirectory(prefix="transaxle-proof-") as scratch:
        rules = Path(scratch, "table.rules")
        rules.write_text(text, "utf-8")
        for source, target in ((0, 1), (1, 0)):
            folder = Path(scratch, f"from-{source}")
            folder.mkdir()
            save_file(dict(sides[source]), folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(trace.config), "utf-8")
            direction = f"{labels.dialects[source]} -> {labels.dialects[target]}"
            try:
                made = _converted(folder, Path(scratch, f"to-{target}"), rules, labels, source, target)
            except TransaxleError as error:
                problems.append(f"{direction}: {error}")
                continue
            problems += [f"{direction}: {fault}" for fault in differences(made, sides[target])]
    return tuple(problems)


def misfits(text: str, shapes: Mapping[str, Shape], config: Mapping[str, Any], labels: Labels) -> tuple[str, ...]:
    """Hold a table against the shapes of a real model, whose sizes are in other ratios than those of tiny ones.

    Args:
        text: the table.
        shapes: name in memory -> shape.
        config: the model's config.
        labels: names of the family and its dialects.

    Returns:
        What the table says of these shapes, and is not so.
    """
    (family,) = tables.read(text)
    dialect = family.dialect(labels.dialects[1])
    assert dialect is not None  # the table has it by this name
    sizes, problems = Sizes(family, config), []
    bound = bind(tuple(shapes), family, dialect, sizes) if shapes else None
    for (line, _), names in bound.names.items() if bound else ():
        for position, name in names.items():
            try:
                fill(line.expression, shapes[name], sizes.at(dict(zip(line.name.axes, position, strict=True))))
            except TransaxleError as error:  # of sizes that nothing tells, nothing is said
                if error.code == _MISFIT:
                    problems.append(f"{name}: {error.refusals[0].message}")
    return tuple(problems)


def differences(made: Tensors, wanted: Tensors) -> list[str]:
    """Return how two sets of tensors differ in names, shapes, dtypes or bytes; nothing where they are equal."""
    missing, extra = sorted(wanted.keys() - made.keys()), sorted(made.keys() - wanted.keys())
    unlike = [name for name in made.keys() & wanted.keys() if not _same(made[name], wanted[name])]
    found = (("lacks", missing), ("has besides", extra), ("differs in", sorted(unlike)))
    return [f"{word} {', '.join(names[:_LISTED])}{_more(names)}" for word, names in found if names]


def _more(names: list[str]) -> str:
    return f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""


def _same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _tensors(numbers: Tensors, trace: Trace) -> dict[str, npt.NDArray[Any]]:
    """Return the numbers as tensors: 32 bits hold them all."""
    flags = {name: np.zeros(shape, np.bool_) for name, shape in trace.unnumbered.items()}
    return {**{name: np.array(each, np.int32, order="C") for name, each in numbers.items()}, **flags}


def _converted(folder: Path, out: Path, rules: Path, labels: Labels, source: int, target: int) -> Tensors:
    first, second = labels.dialects[source], labels.dialects[target]
    with open_checkpoint(str(folder), rules=str(rules), family=labels.family, dialect=first) as checkpoint:
        prepared = make_plan(checkpoint, f"safetensors:{second}", target=str(out))
        execute(prepared, str(out), sync=False, limit=limits(1, None))
    return loaded(out, load_file)
