"""Derivation: from traces to the text of a table, and what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transaxle.derivation.fitting.structure import structure
from transaxle.derivation.fitting.trace import Trace
from transaxle.derivation.writing.table import Labels, Writer


@dataclass(frozen=True)
class Derived:
    """A table, and what it does not say."""

    text: str
    """The table in the notation."""
    left_out: tuple[str, ...]
    """What the converter does that no table says: tensors that it drops or invents."""
    traces: int
    """Number of configs that it follows from."""


def derive(
    traces: Sequence[Trace],
    labels: Labels,
    aliases: Mapping[str, Sequence[str]] | None = None,
    *,
    sparse: bool = False,
) -> Derived:
    """Return the table that says what a converter did.

    Args:
        traces: the converter's runs, each with a config of its own.
        labels: what the family and the dialects are to be called.
        aliases: config key -> other keys under which configs have the same.
        sparse: say less: formulas only for sizes that a conversion needs, conditions only where one alone fits.

    Raises:
        Underivable: no table in the notation says it; the message names the tensor.
    """
    found = structure(traces, careful=sparse)
    writer = Writer(found, [trace.config for trace in traces], aliases or {}, sparse=sparse)
    return Derived(writer.text(labels), tuple(found.left_out), len(traces))
