"""Averages: replicas that ranks hold differently, taken as their mean where the user asks for it.

Tensor-parallel ranks update a replicated parameter each for itself. Where their copies have drifted apart, a conversion
refuses them; on request they are one tensor, the mean of all copies: summed in float64 and rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from transaxle.encodings.encoding import Error
from transaxle.encodings.value_steps import Recoded
from transaxle.engine.copying.source import Source
from transaxle.errors import refuse
from transaxle.formats.catalog import Container, Entry, Extent, Twin, numpy_dtype

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_LARGEST = 256 << 20
"""Bytes of a replica at most: all copies of one are in memory at once."""
_REAL = frozenset({"F64", "F32", "F16", "BF16"})
_FILE = "\0mean of "
"""What the name of a file that does not exist begins with."""


class Mean(msgspec.Struct, frozen=True):
    """The mean of the replicas of one tensor; see `Computed`."""

    entry: Entry
    """The tensor."""
    data: bytes
    """Its values."""
    error: Error
    """How far the replicas are from it, all of them together."""

    @property
    def step(self) -> Recoded:
        """See `Computed`."""
        return Recoded(self.entry.name, "averaged", "", "", self.entry.dtype, self.entry.shape)

    @property
    def nbytes(self) -> int:
        """See `Computed`."""
        return len(self.data)

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `Computed`."""
        view.cast("B")[:] = self.data[offset : offset + view.nbytes]

    def measure(self) -> tuple[Error, int]:
        """See `Computed`; nothing is read for it."""
        return self.error, 0


def averaged(container: Container) -> Container:
    """Return a container in which replicas that differ are one tensor, their mean; those that are equal stay checked.

    Replicas of what is not read (the module's weights beside the optimizer's, or the other way round) drift apart with
    those that are, and are compared no more.

    Raises:
        Refused: UNSUPPORTED for replicas of more than 256 MiB, or of numbers that have no mean.
    """
    import numpy as np

    replicas = _replicas(container)
    read = [pair for pairs in replicas.values() for pair in pairs]
    entries, twins = dict(container.entries), [twin for twin in container.twins if not twin.replica or twin in read]
    means: dict[str, Mean] = {}
    for name, pairs in replicas.items():
        copies = {copy.extents: copy for pair in pairs for copy in (pair.first, pair.second)}
        held = [_read(container, copy) for copy in copies.values()]
        if all(one.tobytes() == held[0].tobytes() for one in held):
            continue
        entry = entries[name]
        if entry.dtype not in _REAL or entry.nbytes > _LARGEST:
            message = f"the replicas differ, and a mean of {entry.nbytes} bytes of {entry.dtype} cannot be computed"
            raise refuse("UNSUPPORTED", message, tensor=name)
        mean = np.mean([one.astype(np.float64) for one in held], axis=0).astype(held[0].dtype)
        file = _FILE + name
        means[file] = Mean(entry, mean.tobytes(), sum((_error(one, mean) for one in held), Error()))
        extent = Extent((0,) * len(entry.shape), entry.shape, file, 0)
        entries[name] = Entry(name, entry.dtype, entry.shape, (extent,))
        twins = [twin for twin in twins if twin not in pairs]
    if not means:
        return replace(container, twins=tuple(twins))
    return container.recoded(means, entries, twins=tuple(twins))


def _replicas(container: Container) -> dict[str, list[Twin]]:
    """Return each tensor that ranks hold whole and alike, with the pairs that must be equal for that.

    A pair is of a tensor if it begins where that lies: weights and moments of one parameter have one name there.
    """
    lies = {entry.extents: name for name, entry in container.entries.items()}
    found: dict[str, list[Twin]] = {}
    for twin in container.twins:
        name = lies.get(twin.first.extents)
        if twin.replica and name is not None:
            found.setdefault(name, []).append(twin)
    return found


def _read(container: Container, copy: Entry) -> npt.NDArray[np.generic]:
    octets = Source(container, {copy.name: copy}).read(copy.name)
    return octets.view(numpy_dtype(copy.dtype)).reshape(copy.shape)


def _error(copy: npt.NDArray[np.generic], mean: npt.NDArray[np.generic]) -> Error:
    import numpy as np

    apart = np.abs(copy.astype(np.float64) - mean.astype(np.float64))
    return Error(float(apart.max(initial=0.0)), float(np.square(apart).sum()), apart.size, int(np.count_nonzero(apart)))
