"""Where loaded bytes go: a local tensor's own storage where that is possible, else through a staging buffer.

A contiguous CPU tensor of the stored type is filled in place. Any other (on a GPU, strided, of another type) gets its
bytes in a buffer, pinned for GPUs, from which torch copies once all of them are there.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import prod

import torch

from transaxle.live.tensors.type_change import cast
from transaxle.move.endpoint import Sink
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.tensor_bytes import Bytes, as_bytes
from transaxle.torch_tensors.torch_dtype import torch_dtype


class Rooms(Sink):
    """Memory that takes what is loaded: for each item the local tensor that it fills.

    Args:
        landings: this rank's tensors, by name.
        names: the name of each item, by key.
    """

    ordered = False

    def __init__(self, landings: Mapping[str, Landing], names: Sequence[str]) -> None:
        self._landings = landings
        self._names = names

    def room(self, key: int, start: int, stop: int) -> Bytes:
        """See `Sink`."""
        return self._landings[self._names[key]].part(start, stop)

    def filled(self, key: int, start: int, stop: int) -> None:
        """See `Sink`."""
        self._landings[self._names[key]].done(stop - start)

    def take(self, key: int, start: int, data: memoryview) -> None:
        """Copy bytes that another rank sent into their room."""
        self.room(key, start, start + len(data)).data[:] = data
        self.filled(key, start, start + len(data))


class Landing:
    """One local tensor, being filled by several threads.

    Args:
        tensor: the tensor or DTensor; only this rank's part is written.
        dtype: safetensors code of the bytes that come.
    """

    def __init__(self, tensor: torch.Tensor, dtype: str) -> None:
        self._local = local_of(tensor)
        self._dtype = torch_dtype(dtype)
        self._direct = (
            self._local.device.type == "cpu" and self._local.is_contiguous() and self._local.dtype == self._dtype
        )
        self.size = prod(self._local.shape) * self._dtype.itemsize
        self._left = self.size
        self._staging: torch.Tensor | None = None
        self._held: Bytes | None = as_bytes(self._local) if self._direct else None
        self._lock = threading.Lock()
        self.exact = True
        """Whether no value was rounded to the tensor's type so far."""

    def part(self, start: int, stop: int) -> Bytes:
        """Return the room for the bytes `[start, stop)` of the row-major local tensor."""
        with self._lock:
            if self._held is None:
                pinned = self._local.device.type == "cuda"
                self._staging = torch.empty(self.size, dtype=torch.uint8, pin_memory=pinned)
                self._held = self._staging.numpy()
            return self._held[start:stop]

    def done(self, count: int) -> None:
        """Say that `count` bytes more are in their place; with the last ones, the tensor is written."""
        with self._lock:
            self._left -= count
            finished = self._left == 0 and self._staging is not None
        if finished and self._staging is not None:
            values = self._staging.view(self._dtype).reshape(self._local.shape)
            if self._local.dtype != self._dtype:
                values, self.exact = cast(values, self._local.dtype)
            with torch.no_grad():
                self._local.copy_(values)
            self._staging = self._held = None

    @property
    def left(self) -> int:
        """Bytes of the source that are still to come."""
        return self._left

    @property
    def written(self) -> int:
        """Bytes of the tensor that are in their place."""
        return (self.size - self._left) * self._local.element_size() // self._dtype.itemsize
