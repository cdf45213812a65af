"""Stored tensors: one tensor of a checkpoint, read whole or in boxes; a read touches only the bytes of its box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from operator import getitem
from typing import TYPE_CHECKING, Any

import msgspec

from transaxle.axes.geometry.piece import Interval
from transaxle.axes.layout.relayout import Target
from transaxle.engine.copying.bitcast import Intervals, positions
from transaxle.engine.copying.source import Source
from transaxle.engine.number_text import notebook, size
from transaxle.engine.reading.numpy_index import Index, taken_apart
from transaxle.engine.reading.reopening import refuse_to_pickle
from transaxle.engine.reading.torch_values import as_torch, check_elements
from transaxle.errors import refuse
from transaxle.formats.checksums import Witness
from transaxle.formats.dtype import ITEM_BITS, nbytes, numpy_dtype, packed_width
from transaxle.formats.storage.storage import is_closed, layer
from transaxle.move.endpoint import Bytes
from transaxle.move.strided_fill import Scratch, produce
from transaxle.move.transfer import Transfer

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import DTypeLike

_SCRATCH, _LEAST_SCRATCH = 8 << 20, 1 << 16
_WASTE, _GAP = 1.25, 64
"""A box is read with its gaps if that costs at most `_WASTE` bytes per wanted byte, or gaps are at most `_GAP` bytes.
"""
_CPU = 1
"""Number of the CPU among DLPack's kinds of devices."""
SliceBox = tuple[slice, ...]
"""One slice of step 1 per dim."""


class StoredTensor(msgspec.Struct, frozen=True, eq=False):
    """One tensor of an opened checkpoint: its name, dtype and shape are known, its values are read on demand."""

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
    _home: Mapping[str, StoredTensor] | None = None
    """The checkpoint that it belongs to."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when it is stored densely."""
        return nbytes(self.dtype, self.shape)

    @property
    def parameters(self) -> int:
        """Number of elements, several packed into a byte counted each; none where there are zeros for no tensor."""
        return prod(self._target.shape) if self._target.parts else 0

    @property
    def component(self) -> str:
        """Its logical tensors in the family's table, such as `gate, up`; empty if no table was needed to read it."""
        return self._target.component

    @property
    def origins(self) -> frozenset[str]:
        """Table names of the stored tensors that it is made of."""
        return frozenset(origin.name for part in self._target.parts for origin in part.origins)

    def transfers(self, intervals: Intervals | None = None) -> list[Transfer]:
        """Return the transfers that produce the tensor, or the chunk of it that holds `intervals`, in order.

        Args:
            intervals: per dim, the positions that the chunk holds, in chunk order; None: the whole tensor.
        """
        target = self._target
        if intervals is None or (self.dtype, self.shape) == (target.dtype, target.shape):
            return self._source.transfers(target, intervals)
        stored_intervals = positions(self.name, intervals, self.dtype, self.shape, target.dtype, target.shape)
        return [] if stored_intervals is None else self._source.transfers(target, stored_intervals)

    def read(self, box: SliceBox | slice | None = None) -> np.ndarray:
        """Read the tensor or a box of it.

        Args:
            box: one slice of step 1 per dim; one slice alone is that of the first dim; None: everything. Only the box's
                bytes are read.

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
            message = f"rows of {list(shape)} elements of {self.dtype} do not fill whole bytes"
            raise refuse("UNSUPPORTED", message, tensor=self.name, hint="Use tobytes() for the raw bytes.")
        return flat.reshape(*shape[:-1], len(flat) // rows if rows else packed_width(self.dtype, shape[-1]))

    def numpy(self) -> np.ndarray:
        """Return its values as a new numpy array; bf16 and fp8 have the types of `ml_dtypes`.

        Raises:
            Refused: UNSUPPORTED for types of which numpy has no elements; what the container refuses.
        """
        check_elements(self.name, self.dtype)
        return self.read()

    def torch(self) -> torch.Tensor:
        """Return its values as a new torch tensor of its own type, on the CPU.

        Raises:
            ImportError: torch is not installed.
            Refused: UNSUPPORTED for types that torch has not; what the container refuses.
        """
        return as_torch(self.name, self.dtype, self.read())

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self.name}: its values are in a file; they cannot be had without a copy")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Give the values to `torch.as_tensor` and `numpy.from_dlpack`; those of bf16 only torch has."""
        try:
            values: Any = self.torch()
        except ImportError:
            values = self.numpy()
        return values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    def __getitem__(self, index: Index) -> np.ndarray:
        """Read what numpy's slicing selects, `tensor[0:2, ..., -1]`; only the bytes of its box are read."""
        check_elements(self.name, self.dtype)
        found = taken_apart(index, self.shape)
        values: np.ndarray = self.read(found.box)[found.inside]
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        if self._home is None:
            raise refuse_to_pickle(repr(self))
        return getitem, (self._home, self.name)

    def tobytes(self) -> bytes:
        """Return the row-major little-endian bytes."""
        return self._bytes(_spans(self.name, self.shape, None)).tobytes()

    def _bytes(self, spans: Sequence[Interval]) -> Bytes:
        """Read the bytes of a box."""
        import numpy as np

        shape = tuple(stop - start for start, stop in spans)
        count = nbytes(self.dtype, shape)
        out = np.empty(count, np.uint8)
        scratch = Scratch(min(_SCRATCH, max(2 * count, _LEAST_SCRATCH)), waste=_WASTE, gap=_GAP)
        storage = self._source.container.storage
        transfers = self.transfers(None if shape == self.shape else [[span] for span in spans])
        produce(storage, transfers, 0, out, scratch)
        witness = layer(storage, Witness)
        if witness is not None:
            witness.judge((transfer.file, transfer.source, transfer.source_span) for transfer in transfers)
        return out

    def __repr__(self) -> str:
        closed = " · closed" if is_closed(self._source.container.storage) else ""
        return f"<{self.name} {self.dtype} {list(self.shape)}{closed}>"

    def _repr_html_(self) -> str:
        return notebook(f"{self!r} · {size(self.nbytes)}")


def _spans(name: str, shape: tuple[int, ...], box: SliceBox | slice | None) -> list[tuple[int, int]]:
    if box is None:
        return [(0, size) for size in shape]
    if isinstance(box, slice):
        box = (box, *(slice(None) for _ in shape[1:]))
    given: object = box
    if not isinstance(given, tuple | list) or not all(isinstance(bounds, slice) for bounds in given):
        raise refuse("SHAPE_MISMATCH", f"a box is a tuple of slices, and this is {box!r}", tensor=name)
    if len(box) != len(shape) or any(getattr(bounds, "step", 0) not in (None, 1) for bounds in box):
        raise refuse("SHAPE_MISMATCH", f"a box needs one slice of step 1 for each dim of {list(shape)}", tensor=name)
    spans = [bounds.indices(size)[:2] for bounds, size in zip(box, shape, strict=True)]
    return [(start, max(start, stop)) for start, stop in spans]
