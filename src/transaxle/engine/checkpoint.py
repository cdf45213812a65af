"""An opened checkpoint: a mapping from stored names to tensors, in its own dialect or, lazily, in another.

Nothing is loaded until a tensor is read, and a read touches only the bytes of its box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from transaxle.axes.bind import Bound, bind
from transaxle.axes.family import Sizes
from transaxle.axes.piece import Interval, Move
from transaxle.axes.relayout import Check, Copier, Target, unchanged
from transaxle.axes.translate import Translation, translate
from transaxle.engine.arithmetic import affine
from transaxle.engine.manifest import Manifest, read_manifest
from transaxle.engine.recognise import IDENTITY, Recognised, pick_dialect, recognise
from transaxle.engine.settings import CONFIG, Settings, parse_config, settings
from transaxle.engine.transfer import Bytes, Scratch, Transfer, fill, lower
from transaxle.errors import TransaxleError, gathered, refuse
from transaxle.formats.catalog import Container, Entry
from transaxle.formats.detect import open_container
from transaxle.formats.dtype import ITEM_BITS, nbytes, numpy_dtype, packed_width

_SCRATCH, _LEAST_SCRATCH = 8 << 20, 1 << 16
_WASTE, _GAP = 1.25, 64
"""A read of a box may take so many bytes for each one wanted, or gaps of so many bytes between two runs."""
_LARGEST_CONFIG = 64 << 20
_UNRECOGNISED = frozenset({"UNKNOWN_FAMILY", "AMBIGUOUS"})
Box = tuple[slice, ...]
Intervals = Sequence[Sequence[Interval]]


class Source:
    """A container's catalog turned into transfers: the one place where copies in elements become copies in bytes."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self._copier = Copier(container.entries)

    def transfers(self, target: Target, intervals: Intervals | None = None) -> list[Transfer]:
        """Return the transfers that fill a target tensor, or a chunk of it, sorted by where they land.

        Raises:
            Refused: INCOMPLETE; UNSUPPORTED where packed elements would have to be taken apart.
        """
        bits = ITEM_BITS.get(target.dtype, 8)
        entries = self.container.entries
        found = []
        for copy in self._copier.copies(target, intervals):
            move = copy.move
            if move.size == 0:
                continue
            extent = entries[copy.source].extents[copy.chunk]
            if bits < 8:
                move = _in_bytes(entries[copy.source], bits, move)
            item = max(bits // 8, 1)
            found.append(lower(extent.file, extent.offset, item, move.source_offset, move.target_offset, move.loops))
        found.sort(key=_landing)
        return found


def _landing(transfer: Transfer) -> int:
    return transfer.target


def _in_bytes(entry: Entry, bits: int, move: Move) -> Move:
    """Turn a copy of elements smaller than a byte into one of bytes: it must not take any of them apart."""
    loops = move.loops or ((1, 1, 1),)
    *outer, (count, source, target) = loops
    edges = [move.source_offset, move.target_offset, count, *(step for _, *steps in outer for step in steps)]
    if (source, target) != (1, 1) or any(edge * bits % 8 for edge in edges):
        raise refuse(
            "UNSUPPORTED",
            f"{entry.dtype} elements have {bits} bits; this layout would take a byte of them apart",
            tensor=entry.name,
        )
    scaled = [(n, s * bits // 8, t * bits // 8) for n, s, t in outer]
    run = (count * bits // 8, 1, 1)
    return Move(move.source_offset * bits // 8, move.target_offset * bits // 8, (*scaled, run))


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor of a checkpoint."""

    name: str
    """Stored name."""
    dtype: str
    """Safetensors code, e.g. `BF16`."""
    shape: tuple[int, ...]
    """Logical elements along each dim; for F4 the last dim counts nibbles."""
    _target: Target
    """How its logical tensors lie in it."""
    _source: Source
    """Where its bytes come from."""

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return nbytes(self.dtype, self.shape)

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def component(self) -> str:
        """Logical tensors in it, `gate, up`; empty where no table was needed to read it."""
        return self._target.component

    def transfers(self, intervals: Intervals | None = None) -> list[Transfer]:
        """Return the transfers that produce the tensor, or the chunk of it that holds `intervals`, in order.

        Args:
            intervals: per dim, the positions that the chunk holds, in chunk order; None: the whole tensor.
        """
        return self._source.transfers(self._target, intervals)

    def read(self, box: Box | None = None) -> np.ndarray:
        """Read the tensor or a box of it.

        Args:
            box: one slice of step 1 per dim; None: everything. Only the box's bytes are read.

        Returns:
            A new array of the box's shape; packed types (F4, F6) come as U8 with the packed last dim.

        Raises:
            Refused: SHAPE_MISMATCH for a box that does not fit; UNSUPPORTED for one that would take a byte of packed
                elements apart; what the container refuses.
        """
        spans = _spans(self.name, self.shape, box)
        shape = tuple(stop - start for start, stop in spans)
        flat = self._bytes(spans)
        if ITEM_BITS.get(self.dtype, 8) >= 8:
            return flat.view(numpy_dtype(self.dtype)).reshape(shape)
        rows = prod(shape[:-1])
        if not shape or (rows and len(flat) % rows):
            message = f"rows of {list(shape)} elements of {self.dtype} are no whole bytes"
            raise refuse("UNSUPPORTED", message, tensor=self.name, hint="tobytes() gives its bytes")
        return flat.reshape(*shape[:-1], len(flat) // rows if rows else packed_width(self.dtype, shape[-1]))

    def tobytes(self) -> bytes:
        """Return the row-major little-endian bytes."""
        return self._bytes(_spans(self.name, self.shape, None)).tobytes()

    def _bytes(self, spans: Sequence[Interval]) -> Bytes:
        """Read the bytes of a box."""
        shape = tuple(stop - start for start, stop in spans)
        size = nbytes(self.dtype, shape)
        out = np.empty(size, np.uint8)
        scratch = Scratch(min(_SCRATCH, max(2 * size, _LEAST_SCRATCH)), waste=_WASTE, gap=_GAP)
        storage = self._source.container.storage
        transfers = self.transfers(None if shape == self.shape else [[span] for span in spans])
        if sum(transfer.size for transfer in transfers) != size:
            out[:] = 0  # padding: bytes that no transfer fills
        for transfer in transfers:
            fill(storage, transfer, out, 0, scratch)
        return out

    def __repr__(self) -> str:
        return f"<{self.name} {self.dtype} {list(self.shape)}>"


def _spans(name: str, shape: tuple[int, ...], box: Box | None) -> list[tuple[int, int]]:
    if box is None:
        return [(0, size) for size in shape]
    if len(box) != len(shape) or any(getattr(part, "step", 0) not in (None, 1) for part in box):
        raise refuse("SHAPE_MISMATCH", f"a box is one slice of step 1 per dim of {list(shape)}", tensor=name)
    spans = [part.indices(size)[:2] for part, size in zip(box, shape, strict=True)]
    return [(start, max(start, stop)) for start, stop in spans]


class Checkpoint(Mapping[str, StoredTensor]):
    """An opened checkpoint, in its own dialect or re-expressed in another.

    Attributes:
        container: the files behind it.
        settings: what the user said about it.
        source: turns its tensors into transfers.
    """

    def __init__(self, container: Container, said: Settings, view: Translation | None, label: str | None) -> None:
        self.container = container
        self.settings = said
        self._view = view
        self._label = label
        self.source = Source(container)

    @cached_property
    def manifest(self) -> Manifest | None:
        """The checkpoint's `transaxle.json`; None where there is none, or its files were changed since."""
        return read_manifest(self.container)

    @property
    def format(self) -> str:
        """Container format, e.g. `safetensors`."""
        return self.container.format

    @property
    def path(self) -> str:
        """The path as the user typed it."""
        return self.container.path

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the container says beside its tensors."""
        return self.container.metadata

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json: the user's, or the checkpoint's; empty where there is none."""
        if self.settings.config is not None:
            return self.settings.config
        if CONFIG not in self.container.carried:
            return {}
        storage = self.container.storage
        size = storage.size(CONFIG)
        if size > _LARGEST_CONFIG:
            raise refuse("CORRUPT", f"a config of {size} bytes is longer than any real one", file=CONFIG)
        return parse_config(storage.read(CONFIG, 0, size), CONFIG)

    @property
    def recognised(self) -> Recognised:
        """Family and dialect of the stored names.

        Raises:
            UsageError: UNKNOWN_FAMILY, AMBIGUOUS.
        """
        if isinstance(self._recognition, TransaxleError):
            raise self._recognition
        return self._recognition

    @cached_property
    def _recognition(self) -> Recognised | TransaxleError:
        said = self.settings
        family, dialect = said.family, said.dialect
        known = said.families.get(self.manifest.family or "") if self.manifest is not None else None
        if self.manifest is not None and known is not None:
            family = family or known.name
            if dialect is None and family == known.name and known.dialect(self.manifest.dialect) is not None:
                dialect = self.manifest.dialect
        try:
            return recognise(tuple(self.container.entries), self.config, said.families, family, dialect)
        except TransaxleError as error:
            return error

    @property
    def family(self) -> str | None:
        """Name of the model family; None where no table reads the names."""
        found = self._recognised_or_none()
        return None if found is None else found.family.name

    @property
    def dialect(self) -> str | None:
        """Label of the dialect of this view; None where no table reads the names."""
        if self._label is not None:
            return self._label
        found = self._recognised_or_none()
        return None if found is None else found.dialect.label

    def _recognised_or_none(self) -> Recognised | None:
        """Return what the names are read as; None if they are not, unless the user said how to read them."""
        found = self._recognition
        if not isinstance(found, TransaxleError):
            return found
        if self.settings.family or self.settings.dialect or found.code not in _UNRECOGNISED:
            raise found
        return None

    @cached_property
    def sizes(self) -> Sizes:
        """Axis sizes: the user's, the manifest's (unless the user gave a config), the config's."""
        trusted = self.manifest if self.settings.config is None else None
        axes = {} if trusted is None else trusted.axes
        return Sizes(self.recognised.family, self.config, {**axes, **self.settings.axes})

    @cached_property
    def bound(self) -> Bound:
        """The stored names read through the dialect."""
        found = self.recognised
        return bind(tuple(self.container.entries), found.family, found.dialect, self.sizes, found.prefix)

    def translation(self, dialect: str) -> Translation:
        """Return this checkpoint's tensors in another dialect, with everything that stands against it.

        Raises:
            UsageError: UNKNOWN_FAMILY, AMBIGUOUS, UNKNOWN_AXIS.
        """
        entries = self.container.entries
        if dialect == IDENTITY:
            targets = {name: unchanged(name, entry) for name, entry in entries.items()}
            axes = self.sizes.at({}) if self.family else {}
            return Translation(targets, (), (), (), {}, (), axes)
        target = pick_dialect(self.recognised.family, dialect)
        return translate(self.bound, entries, target, self.sizes)

    def as_dialect(self, dialect: str) -> Checkpoint:
        """Return the same checkpoint lazily re-expressed in another dialect; nothing is converted or written.

        Copies of one tensor (ties) are not compared here: `convert`, `verify` and `diff` do that.

        Raises:
            TransaxleError: everything that stands against it, at once.
        """
        view = self.translation(dialect)
        problems = list(view.refusals)
        for target in view.targets.values():
            try:
                affine(target, allowed=False)
            except TransaxleError as error:
                problems.extend(error.refusals)
        if problems:
            raise gathered(problems)
        label = IDENTITY if dialect == IDENTITY else pick_dialect(self.recognised.family, dialect).label
        return Checkpoint(self.container, self.settings, view, label)

    @property
    def stored(self) -> Checkpoint:
        """The checkpoint under its own names, whatever dialect this view is in."""
        return self if self._view is None else Checkpoint(self.container, self.settings, None, None)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Stored copies that must be equal for this view to be true; none where nothing was re-expressed."""
        return () if self._view is None else self._view.checks

    @cached_property
    def targets(self) -> Mapping[str, Target]:
        """The tensors of this view, as the planner sees them."""
        if self._view is not None:
            return self._view.targets
        return {name: unchanged(name, entry) for name, entry in self.container.entries.items()}

    def __getitem__(self, name: str) -> StoredTensor:
        target = self.targets[name]
        return StoredTensor(name, target.dtype, target.shape, target, self.source)

    def __iter__(self) -> Iterator[str]:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __contains__(self, name: object) -> bool:
        return name in self.targets

    def close(self) -> None:
        """Release the files behind it."""
        self.container.storage.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<checkpoint {self.path} · {self.format} · {len(self)} tensors>"


def open_checkpoint(path: str | Path, **said: Any) -> Checkpoint:
    """Open a checkpoint of any known format; nothing is loaded, and torch is not imported.

    Args:
        path: a folder or a file.
        **said: `format`, `family`, `dialect`, `config`, `axes`, `rules`, `weights`: see `settings`.

    Raises:
        StorageError: IO where it is missing or unreadable.
        Refused: CORRUPT, INCOMPLETE, UNSUPPORTED …: every problem of its files.
    """
    given = settings(**said)
    return Checkpoint(open_container(str(path), given.format, given.weights), given, None, None)
