"""A checkpoint whose grouped parameters are N tensors, seen as one stack each, or the other way round.

Such layers occur in models that no table knows. The names of both sides show which they are, and a table is built for
these; the codes and scales of quantized ones are tensors like others, and move unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from transaxle.axes.layout.bind import Bound, bind
from transaxle.axes.layout.solve import Shape
from transaxle.axes.translation.grouped import (
    FAMILY,
    STORED,
    WANTED,
    Stem,
    arranged,
    copy_checks,
    groups,
    sizes,
    table,
    without_copies,
)
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.recognise import StoredNames
from transaxle.engine.checkpoint.settings import Settings
from transaxle.engine.views.encoded import Catalog
from transaxle.errors import gathered
from transaxle.families import Families
from transaxle.formats.catalog import Container


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
    table_settings = msgspec.structs.replace(
        checkpoint.settings,
        family=FAMILY,
        dialect=STORED,
        families=Families({}, {FAMILY: family}, closed=True),
        axes=sizes(stems),
        config={},
    )
    undecoded = None if checkpoint.undecoded is None else checkpoint.undecoded.stored_names
    names = _TableNames(container, table_settings, undecoded, tuple(without_copies(stems, container.entries)))
    restacked = Checkpoint(container, table_settings, None, None, checkpoint.undecoded, names)
    checks, problems = copy_checks(stems, container.entries)
    if problems:
        raise gathered(problems)
    return restacked.seen_as(WANTED).checking(checks)


class _TableNames(StoredNames):
    """Names under a table of their own, in which codes and scales are tensors, each for itself.

    Args:
        container: the files.
        settings: with the table as their only family.
        undecoded: as for `StoredNames`.
        names: the stored names that the table reads.
    """

    def __init__(
        self, container: Container, settings: Settings, undecoded: StoredNames | None, names: Sequence[str]
    ) -> None:
        super().__init__(container, settings, undecoded)
        self._table_names = names

    @cached_property
    def catalog(self) -> Catalog:
        """Every stored tensor, as it is stored."""
        return Catalog(self._container, self._container.entries, {}, None, ())

    @cached_property
    def bound(self) -> Bound:
        """The names that the table reads."""
        family = self._settings.families[FAMILY]
        return bind(self._table_names, family, family.dialects[0], self.sizes)
