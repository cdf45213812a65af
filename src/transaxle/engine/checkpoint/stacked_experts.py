"""A checkpoint whose grouped parameters are N tensors, seen as one stack each, or the other way round.

Such layers occur in models that no table knows. The names of both sides show which they are, and a table is built for
these; the codes and scales of quantized ones are tensors like others, and move unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from transaxle.axes.layout.bind import bind
from transaxle.axes.layout.solve import Shape
from transaxle.axes.translation.arrange import arranged, groups
from transaxle.axes.translation.grouped import FAMILY, STORED, WANTED, Stem, copy_checks, sizes, table, without_copies
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.views.encoded import Catalog
from transaxle.errors import gathered
from transaxle.families import Families


@dataclass(frozen=True, slots=True)
class Restacked:
    """A checkpoint under the wanted names, as far as these are grouped parameters in another form."""

    checkpoint: Checkpoint
    """Re-expressed where a form changes; sets of experts that do not fit stay as they are."""
    changed: bool
    """Whether any form changes."""
    complete: bool
    """Whether every wanted name now exists, or belongs to a set that does not fit."""


def grouped(checkpoint: Checkpoint, wanted: Mapping[str, Shape], beside: Iterable[str] = ()) -> Restacked:
    """Return a checkpoint with its grouped parameters in the wanted form.

    Args:
        checkpoint: under its stored names.
        wanted: names and whole shapes, without optimizer state.
        beside: wanted names that may be absent.

    Raises:
        Refused: what the translation refuses; UNEQUAL_COPIES where both forms exist with different shapes.
    """
    entries = {name: entry.shape for name, entry in checkpoint.container.entries.items()}
    arrangement = arranged(groups(wanted, entries), entries)
    available = {*arrangement.broken, *beside, *(name for stem in arrangement.stems for name in stem.targets)}
    complete = all(name in available or name in checkpoint for name in wanted)
    return Restacked(
        seen(checkpoint, arrangement.stems) if arrangement.stems else checkpoint, bool(arrangement.stems), complete
    )


def seen(checkpoint: Checkpoint, stems: Sequence[Stem]) -> Checkpoint:
    """Return a checkpoint whose grouped parameters are in their other form.

    Args:
        checkpoint: under its stored names.
        stems: the sets that change form.

    Raises:
        Refused: see `grouped`.
    """
    family, container = table(stems), checkpoint.container
    table_settings = replace(
        checkpoint.settings,
        family=FAMILY,
        dialect=STORED,
        families=Families({}, {FAMILY: family}, closed=True),
        axes=sizes(stems),
        config={},
    )
    restacked = Checkpoint(container, table_settings, None, None, checkpoint.undecoded)
    vars(restacked)["catalog"] = Catalog(
        container, container.entries, {}, None, ()
    )  # codes and scales, each for itself
    names = without_copies(stems, container.entries)
    vars(restacked)["bound"] = bind(names, family, family.dialects[0], restacked.sizes)
    checks, problems = copy_checks(stems, container.entries)
    if problems:
        raise gathered(problems)
    return restacked.as_dialect(WANTED).checking(checks)
