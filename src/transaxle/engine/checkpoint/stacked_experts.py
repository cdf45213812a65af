"""A checkpoint whose grouped parameters are N names, seen as one tensor each, or the other way round.

Such layers stand in models that no table knows. The names of both sides tell which they are, and a table is made for
these; the codes and scales of quantized ones are tensors like others, so they move as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from transaxle.axes.layout.bind import bind
from transaxle.axes.layout.solve import Shape
from transaxle.axes.translation.arrange import Arranged, arranged, groups, parameter_shapes
from transaxle.axes.translation.grouped import FAMILY, STORED, WANTED, Stem, copy_checks, sizes, table, without_copies
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.views.encoded import Catalog
from transaxle.errors import gathered
from transaxle.families import Families


@dataclass(frozen=True, slots=True)
class Grouped:
    """A checkpoint under the names wanted, as far as these are grouped parameters in another form."""

    checkpoint: Checkpoint
    """Re-expressed, where anything is to be; sets of experts that do not fit stay as they are."""
    changed: bool
    """Whether anything is."""
    complete: bool
    """Whether every name wanted is there now, or is of a set that does not fit."""


def grouped(checkpoint: Checkpoint, wanted: Mapping[str, Shape], beside: Iterable[str] = ()) -> Grouped:
    """Return a checkpoint with its grouped parameters in the form that is wanted.

    Args:
        checkpoint: under its stored names.
        wanted: names and whole shapes, without optimizer state.
        beside: those of the names that may lack.

    Raises:
        Refused: what stands against the translation; UNEQUAL_COPIES for both forms at once, of unlike shapes.
    """
    entries = {name: entry.shape for name, entry in checkpoint.container.entries.items()}
    found = arranged(groups(wanted, entries), entries)
    made = {*found.broken, *beside, *(name for stem in found.stems for name in stem.targets)}
    complete = all(name in made or name in checkpoint for name in wanted)
    return Grouped(seen(checkpoint, found.stems) if found.stems else checkpoint, bool(found.stems), complete)


def seen(checkpoint: Checkpoint, given: Sequence[Stem]) -> Checkpoint:
    """Return a checkpoint whose grouped parameters are in their other form.

    Raises:
        Refused: see `grouped`.
    """
    family, container = table(given), checkpoint.container
    said = replace(
        checkpoint.settings,
        family=FAMILY,
        dialect=STORED,
        families=Families({}, {FAMILY: family}),
        axes=sizes(given),
        config={},
    )
    made = Checkpoint(container, said, None, None, checkpoint.undecoded)
    vars(made)["catalog"] = Catalog(container, container.entries, {}, None, ())  # codes and scales, each for itself
    names = without_copies(given, container.entries)
    vars(made)["bound"] = bind(names, family, family.dialects[0], made.sizes)
    checks, problems = copy_checks(given, container.entries)
    if problems:
        raise gathered(problems)
    return made.as_dialect(WANTED).checking(checks)


def between(mine: Mapping[str, Shape], theirs: Mapping[str, Shape], *, shared_out: bool = True) -> Arranged:
    """Return how one side holds what the other wants, both with states of optimizers.

    Args:
        mine: names and shapes of what is wanted.
        theirs: the same of what there is.
        shared_out: other ranks may want other experts: that there are more of them is nothing against it.
    """
    wanted, stored = parameter_shapes(mine), parameter_shapes(theirs)
    found = groups(wanted, stored)
    if shared_out:
        found = [one for one in found if one.single or one.whole in stored or not stored.keys() >= {*one.names}]
    return arranged(found, stored)
