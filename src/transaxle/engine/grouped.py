"""A checkpoint whose grouped parameters are N names, seen as one tensor each, or the other way round.

Such layers stand in models that no table knows. The names of both sides tell which they are, and a table is made for
these; the codes and scales of quantized ones are tensors like others, so they move as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from transaxle.axes.bind import WEIGHT, split_slot
from transaxle.axes.grouped import FAMILY, STORED, WANTED, Stem, sizes, stems, table
from transaxle.axes.solve import Shape
from transaxle.engine.checkpoint import Checkpoint
from transaxle.engine.encoded import Catalog


def grouped(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint | None:
    """Return a checkpoint under the names wanted, where it differs from these in grouped parameters only.

    Args:
        checkpoint: under its stored names.
        names: wanted, without optimizer state.

    Returns:
        The checkpoint re-expressed; None where some name is neither there nor the other form of one that is.

    Raises:
        Refused: MISSING_TENSOR for a set of numbered names with holes; what else stands against the translation.
    """
    found = stems(names, {name: entry.shape for name, entry in checkpoint.container.entries.items()})
    return seen(checkpoint, found) if found else None


def seen(checkpoint: Checkpoint, given: Sequence[Stem]) -> Checkpoint:
    """Return a checkpoint whose grouped parameters are in their other form.

    Raises:
        Refused: see `grouped`.
    """
    family = table(given)
    said = replace(
        checkpoint.settings, family=FAMILY, dialect=STORED, families={FAMILY: family}, axes=sizes(given), config={}
    )
    container = checkpoint.container
    made = Checkpoint(container, said, None, None, checkpoint.undecoded)
    vars(made)["catalog"] = Catalog(container, container.entries, {}, None, ())  # codes and scales, each for itself
    return made.as_dialect(WANTED)


def between(mine: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> list[Stem]:
    """Return which tensors of one side are grouped in the other form on the other; none where that is not all.

    Args:
        mine: names and shapes of tensors and of optimizer states.
        theirs: the same of the other side.

    Returns:
        The stems as `mine` has them.
    """
    found = stems(_parameters(mine), _parameters(theirs)) or ()
    return [replace(stem, stored=None if stem.stored else "stack") for stem in found]


def _parameters(tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return names and shapes of parameters, of those too that are known by their states only."""
    found: dict[str, Shape] = {}
    for name, shape in tensors.items():
        parameter, slot = split_slot(name)
        if slot == WEIGHT or len(found.get(parameter, ())) <= len(shape):
            found[parameter] = shape
    return found
