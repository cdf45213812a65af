"""Tensors of an open checkpoint: a single tensor that is read whole or in boxes (rectangular regions), or a set of
tensors that are read one by one or in file order.

Reading a box of a tensor reads only the bytes of that box. For an index as in numpy, `[0:2, ..., -1]`, the smallest box
that contains the selected elements is read. Numpy then applies steps, reversals, and dropped and new dims. torch is
imported only if the caller asks for a torch tensor.

A pickled tensor or checkpoint contains no values, but the steps with which the checkpoint was opened. Unpickling opens
the files again, and refuses files that have changed.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from operator import getitem
from pathlib import Path
from posixpath import commonprefix
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import DTypeLike

from transaxle.arguments import Patterns, Size, read_patterns, read_size, wrong_type
from transaxle.axes.geometry import Interval
from transaxle.axes.layout.relayout import Target
from transaxle.axes.notation.name import natural
from transaxle.engine.source import Intervals, Source, translate_box
from transaxle.engine.views.encode import select_names
from transaxle.engine.wording import FoldedRow, fold, notebook, plural, size
from transaxle.errors import TransaxleError, refuse, shortened
from transaxle.formats.catalog import ITEM_BITS, nbytes, numpy_dtype, packed_width
from transaxle.formats.checksums import Witness
from transaxle.formats.storage.copier import Bytes
from transaxle.formats.storage.storage import Storage, is_closed, layer
from transaxle.move.transfer import Scratch, Transfer, produce

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch


IndexPart: TypeAlias = SupportsIndex | slice | EllipsisType | None
TensorIndex: TypeAlias = IndexPart | tuple[IndexPart, ...]
"""An index that numpy accepts between the brackets of `tensor[...]`."""


_SCRATCH, _LEAST_SCRATCH = 8 << 20, 1 << 16
_WASTE, _GAP = 1.25, 64
"""A box is read together with the gaps between its runs if this reads at most `_WASTE` bytes per needed byte, or if the
gaps are at most `_GAP` bytes long.
"""
_CPU = 1
"""DLPack's device type of the CPU."""
SliceBox = tuple[slice, ...]
"""A box (rectangular region) of a tensor, as one slice with step 1 per dim."""


class StoredTensor(msgspec.Struct, frozen=True, eq=False):
    """One tensor of an open checkpoint. The tensor's name, dtype and shape are known; its values are read on demand."""

    name: str
    """Name of the tensor in the checkpoint."""
    dtype: str
    """Safetensors code of the tensor's dtype, e.g. `BF16`."""
    shape: tuple[int, ...]
    """Number of logical elements along each dim; for the packed type F4, the last dim counts 4-bit elements."""
    _target: Target
    """How the tensor is composed of logical tensors and stored tensors."""
    _source: Source
    """Object that turns the tensor into transfers (reads of byte ranges)."""
    _home: Mapping[str, StoredTensor] | None = None
    """The checkpoint that the tensor belongs to."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes, if its elements are stored densely."""
        return nbytes(self.dtype, self.shape)

    @property
    def parameters(self) -> int:
        """Number of elements, even if several are packed into a byte; 0 for a tensor of zeros that is not stored."""
        return prod(self._target.shape) if self._target.parts else 0

    @property
    def component(self) -> str:
        """Names of the logical tensors in this tensor, such as `gate, up`; empty if the tensor was opened without a
        table of tensor names.
        """
        return self._target.component

    @property
    def origins(self) -> frozenset[str]:
        """Names of the stored tensors from which this tensor is composed."""
        return frozenset(origin.name for part in self._target.parts for origin in part.origins)

    def transfers(self, intervals: Intervals | None = None) -> list[Transfer]:
        """Return the transfers (reads of byte ranges) that produce, in order, the tensor or the region that `intervals`
        selects.

        Args:
            intervals: for each dim, the ranges of selected indices, in order; None means the whole tensor.
        """
        target = self._target
        if intervals is None or (self.dtype, self.shape) == (target.dtype, target.shape):
            return self._source.transfers(target, intervals)
        stored_intervals = translate_box(self.name, intervals, self.dtype, self.shape, target.dtype, target.shape)
        return [] if stored_intervals is None else self._source.transfers(target, stored_intervals)

    def read(self, box: SliceBox | slice | None = None) -> np.ndarray:
        """Read the tensor or a box of it; only the bytes of the box are read.

        Args:
            box: one slice with step 1 per dim; a single slice applies to the first dim; None means the whole tensor.

        Returns:
            A new array with the box's shape; packed types (F4, F6) are returned as U8, and the last dim then counts
            bytes.

        Raises:
            Refused: with code SHAPE_MISMATCH, if the box is outside the tensor; with code UNSUPPORTED, if the box would
                split a byte of packed elements; any refusal of the container.
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
        """Return the tensor's values as a new numpy array; bf16 and fp8 use the dtypes of `ml_dtypes`.

        Raises:
            Refused: with code UNSUPPORTED, if numpy has no such dtype; any refusal of the container.
        """
        check_elements(self.name, self.dtype)
        return self.read()

    def torch(self) -> torch.Tensor:
        """Return the tensor's values as a new torch tensor of the same dtype, on the CPU.

        Raises:
            ImportError: if torch is not installed.
            Refused: with code UNSUPPORTED, if torch has no such dtype; any refusal of the container.
        """
        return as_torch(self.name, self.dtype, self.read())

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self.name}: its values are in a file; they cannot be had without a copy")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Export the values to `torch.as_tensor` and `numpy.from_dlpack`; exporting bf16 needs torch."""
        try:
            values: Any = self.torch()
        except ImportError:
            values = self.numpy()
        return values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    def __getitem__(self, index: TensorIndex) -> np.ndarray:
        """Read the elements that an index such as `tensor[0:2, ..., -1]` selects; only the smallest box that contains
        them is read.
        """
        check_elements(self.name, self.dtype)
        box_index = split_index(index, self.shape)
        values: np.ndarray = self.read(box_index.box)[box_index.selection]
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        if self._home is None:
            raise refuse_to_pickle(repr(self))
        return getitem, (self._home, self.name)

    def tobytes(self) -> bytes:
        """Return the tensor's values as row-major little-endian bytes."""
        return self._bytes(_spans(self.name, self.shape, None)).tobytes()

    def _bytes(self, spans: Sequence[Interval]) -> Bytes:
        """Read the bytes of a box of the tensor."""
        shape = tuple(stop - start for start, stop in spans)
        count = nbytes(self.dtype, shape)
        out = np.empty(count, np.uint8)
        scratch = Scratch(min(_SCRATCH, max(2 * count, _LEAST_SCRATCH)), waste=_WASTE, gap=_GAP)
        storage = self._source.container.storage
        transfers = self.transfers(None if shape == self.shape else [[span] for span in spans])
        produce(storage, transfers, 0, out, scratch)
        witness = layer(storage, Witness)
        if witness is not None:
            witness.refuse_wrong((transfer.file, transfer.source, transfer.source_span) for transfer in transfers)
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
    raw_box: object = box
    if not isinstance(raw_box, tuple | list) or not all(isinstance(bounds, slice) for bounds in raw_box):
        raise refuse("SHAPE_MISMATCH", f"a box is a tuple of slices, and this is {box!r}", tensor=name)
    if len(box) != len(shape) or any(getattr(bounds, "step", 0) not in (None, 1) for bounds in box):
        raise refuse("SHAPE_MISMATCH", f"a box needs one slice of step 1 for each dim of {list(shape)}", tensor=name)
    spans = [bounds.indices(size)[:2] for bounds, size in zip(box, shape, strict=True)]
    return [(start, max(start, stop)) for start, stop in spans]


Kind = Literal["torch", "numpy"]
_KINDS = ("torch", "numpy")
_SHOWN, _LONGEST = 40, 200
"""Largest number of tensor rows that a notebook shows, and largest number of characters of a name in them."""
_NEAR = 0.7
"""Fraction of characters that an existing name must share with an unknown name, so that an error suggests it."""
_READERS = 2
"""Number of threads that read ahead: while one thread waits for the disk, the second decodes."""


_INTERNAL = {
    "bound", "catalog", "checks", "container", "fold_rows", "in_order", "in_part", "reading", "refuse_foreign",
    "refuse_half_converted", "reopening", "settings", "sizes", "source", "source_of", "stored_names", "targets",
    "translation", "undecoded", "view", "view_as", "with_checks", "without_optimizer",
}  # fmt: skip
"""Attributes of a checkpoint that only Transaxle's engine uses; tab completion hides them."""


class TensorSet(Mapping[str, "StoredTensor"]):
    """A mapping from names to stored tensors, whose values are read on demand."""

    def __dir__(self) -> list[str]:
        """Return the public attributes of the set, for tab completion."""
        return sorted(name for name in super().__dir__() if name not in _INTERNAL)

    def _repr_html_(self) -> str:
        try:
            rows = self.fold_rows()
        except TransaxleError as error:
            return notebook(f"{self!r}\n{error}")
        cells = [
            (shortened(row.name, _LONGEST), row.times, *(str(part) for part in self._kind(row.names[0])))
            for row in rows[:_SHOWN]
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        omitted_line = [f"… and {plural(len(rows) - _SHOWN, 'more row')}"] if len(rows) > _SHOWN else []
        return notebook("\n  ".join([repr(self), *map(str.rstrip, lines), *omitted_line]))

    def in_order(self) -> list[str]:
        """Return the tensor names in natural order (numbers sorted by value)."""
        return sorted(self, key=natural)

    def fold_rows(self) -> list[FoldedRow]:
        """Return the tensors in natural order of their names; names that differ only in their numbers become one
        row.
        """
        names = self.in_order()
        return fold(names, [(kind, tuple(shape)) for kind, shape in map(self._kind, names)])

    def _kind(self, name: str) -> tuple[str, list[int]]:
        tensor = self[name]
        return tensor.dtype, list(tensor.shape)

    def select(self, only: Patterns = (), skip: Patterns = ()) -> Selection:
        """Return a selection of the tensors as a mapping; no tensor data is read.

        Args:
            only: patterns of tensor names, in which `*` matches any characters; the default is all tensors.
            skip: patterns of tensor names to omit.

        Raises:
            TypeError: if an argument has the wrong type.
            UsageError: with code AMBIGUOUS, if a pattern matches no name.
        """
        names = select_names(self, read_patterns("only", only), read_patterns("skip", skip), "tensor")
        return Selection(self, tuple(names))

    def state_dict(self, kind: Kind = "torch") -> dict[str, Any]:
        """Return tensor name -> values, as `torch.load` would: all tensors as torch tensors, or as numpy arrays.

        Args:
            kind: `torch` for torch tensors, or `numpy` for numpy arrays.

        Raises:
            Refused: with code UNSUPPORTED, if torch or numpy has no dtype for a tensor.
            ImportError: if torch is not installed.
        """
        values = dict(self.stream(kind))
        return {name: values[name] for name in self}

    def stream(self, kind: Kind = "torch", *, memory: Size = "256MB") -> Iterator[tuple[str, Any]]:
        """Yield (name, values) of the tensors in file order, while the next tensors are read in the background.

        Args:
            kind: `torch` for torch tensors, or `numpy` for numpy arrays.
            memory: bytes of values to read ahead; at least one tensor is read ahead, however large.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if `kind` is unknown.
            Refused: with code UNSUPPORTED, if torch or numpy has no dtype for a tensor.
        """
        if kind not in _KINDS:
            raise ValueError(f"kind must be 'torch' or 'numpy'; got {kind!r}")
        return self._read_ahead(kind, read_size("memory", memory))

    def _read_ahead(self, kind: Kind, memory: int) -> Iterator[tuple[str, Any]]:
        # imported inside the function, because most callers do not stream tensors
        from concurrent.futures import ThreadPoolExecutor

        waiting: deque[tuple[StoredTensor, Future[Any]]] = deque()
        pending_bytes = 0
        pool = ThreadPoolExecutor(_READERS, thread_name_prefix="transaxle-read")
        try:
            for tensor in sorted(self.values(), key=_file_position):
                while waiting and pending_bytes + tensor.nbytes > memory:
                    pending_bytes -= waiting[0][0].nbytes
                    yield _read(waiting.popleft())
                waiting.append((tensor, pool.submit(tensor.torch if kind == "torch" else tensor.numpy)))
                pending_bytes += tensor.nbytes
            while waiting:
                yield _read(waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)


class Selection(TensorSet):
    """A selection of a checkpoint's tensors, as a mapping."""

    def __init__(self, home: TensorSet, names: tuple[str, ...]) -> None:
        self._home = home
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self:
            raise no_such_name(name, self._names)
        return self._home[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def in_order(self) -> list[str]:
        """Return the selected names in the order of the whole checkpoint."""
        return [name for name in self._home.in_order() if name in self._names]

    def __repr__(self) -> str:
        return f"<{plural(len(self), 'tensor')} of {self._home!r}>"


class _NoSuchNameError(KeyError):
    """The error for a name that no tensor has. The closest existing name is computed only when the error is shown,
    because `get` discards the error.
    """

    def __init__(self, name: str, names: Collection[str] = ()) -> None:
        super().__init__(name)
        self._names = names

    def __reduce__(self) -> tuple[type[KeyError], tuple[object, ...]]:
        return KeyError, (str(self),)

    def __str__(self) -> str:
        (name,) = self.args
        if "*" in name:
            return f"no tensor is named {name!r}: for those that match it, .select({name!r})"
        nearest = max(self._names, key=lambda candidate: _common_length(name, candidate), default="")
        near_enough = _common_length(name, nearest) > _NEAR * max(len(name), len(nearest))
        return f"no tensor is named {name!r}" + (f". Did you mean {nearest!r}?" if near_enough else "")


def no_such_name(name: object, names: Collection[str]) -> KeyError | TypeError:
    """Return the error for a name that no tensor has; if the name is a pattern, the error points to `select`.

    Args:
        name: the key that the caller used.
        names: the names of the existing tensors.
    """
    if isinstance(name, str):
        return _NoSuchNameError(name, names)
    return TypeError(f"a checkpoint takes the name of a tensor, a str; got {name!r}. For several: .select('*.norm.*')")


def _common_length(name: str, candidate: str) -> int:
    """Return how many characters two names have in common at their beginnings and ends."""
    start = len(commonprefix((name, candidate)))
    return start + len(commonprefix((name[start:][::-1], candidate[start:][::-1])))


def _file_position(tensor: StoredTensor) -> tuple[str, int]:
    """Return the file and offset of a tensor's first byte."""
    return min(((each.file, each.source) for each in tensor.transfers()), default=("", 0))


def _read(waiting: tuple[StoredTensor, Future[Any]]) -> tuple[str, Any]:
    tensor, values = waiting
    return tensor.name, values.result()


class BoxIndex(msgspec.Struct, frozen=True):
    """An index of a tensor, split into the box to read and a selection inside the box."""

    box: tuple[slice, ...]
    """The box to read: one slice with step 1 for each dim."""
    selection: tuple[int | slice | None, ...]
    """Index that numpy applies to the values of the box."""


def split_index(index: object, shape: tuple[int, ...]) -> BoxIndex:
    """Split an index of a tensor into a box to read and a selection inside the box.

    Raises:
        IndexError: if the index has too many dims, two `...`, or a number outside its dim; the messages are numpy's.
        TypeError: if a part of the index is not a slice, a number, `...` or None.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    dims = sum(part is not None and part is not Ellipsis for part in parts)
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    if dims > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} dims, but {dims} were indexed")
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    place = dots[0] if dots else len(parts)
    parts[place : place + 1] = [slice(None)] * (len(shape) - dims)
    box: list[slice] = []
    inside: list[int | slice | None] = []
    for part in parts:
        if part is None:
            inside.append(None)
            continue
        span, selection = _split_dim(part, shape[len(box)], len(box))
        box.append(span)
        inside.append(selection)
    return BoxIndex(tuple(box), tuple(inside))


def _split_dim(part: object, size: int, dim: int) -> tuple[slice, int | slice]:
    """Return the slice of one dim to read, and the selection inside that slice."""
    if isinstance(part, slice):
        selected = range(*part.indices(size))
        if not selected:
            return slice(0, 0), slice(None)
        return slice(min(selected), max(selected) + 1), slice(None, None, selected.step)
    if isinstance(part, bool) or getattr(part, "shape", None) or not isinstance(part, SupportsIndex):
        raise wrong_type(
            "an index of a tensor", "slices, numbers, ... and None (.numpy() gives an array, for more)", part
        )
    number = operator.index(part)
    if not -size <= number < size:
        raise IndexError(f"index {number} is out of bounds for dim {dim} with size {size}")
    return slice(number % size, number % size + 1), 0


_NAMES = {"COMPLEX32": "complex32", "F4": "float4_e2m1fn_x2"}
"""Dtype code -> torch's name of the dtype, where numpy has a different name or no such dtype."""


_RAW = "read() and tobytes() give the bytes as they are stored."


def check_elements(name: str, dtype: str) -> None:
    """Check that numpy has a dtype in which each array item is one element of the tensor.

    Raises:
        Refused: with code UNSUPPORTED, for packed and quantized types.
    """
    whole = ITEM_BITS.get(dtype, 0) >= 8 and (numpy_dtype(dtype) != numpy_dtype("U8") or dtype == "U8")
    if not whole or dtype.startswith(("QINT", "BITS", "COMPLEX32")):
        raise refuse("UNSUPPORTED", f"numpy has no type for elements of {dtype}", tensor=name, hint=_RAW)


def as_torch(name: str, dtype: str, values: np.ndarray) -> torch.Tensor:
    """Return values as a torch tensor that shares the memory of the array.

    Args:
        name: name of the tensor, for errors.
        dtype: safetensors code of the tensor's dtype.
        values: the array that `StoredTensor.read` returned.

    Raises:
        Refused: with code UNSUPPORTED, if torch has no such dtype.
        ImportError: if torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        from transaxle.extras import install

        message = f"torch() needs torch, which is not installed: {install('torch')}"
        raise ImportError(message, name=error.name) from None
    if dtype not in _NAMES:
        check_elements(name, dtype)
    torch_dtype = getattr(torch, _NAMES.get(dtype, numpy_dtype(dtype).name), None)
    if torch_dtype is None:
        raise refuse("UNSUPPORTED", f"torch {torch.__version__} has no dtype for {dtype}", tensor=name, hint=_RAW)
    if not values.size:
        return torch.empty(values.shape, dtype=torch_dtype)
    flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    tensor: torch.Tensor = flat.view(torch_dtype).reshape(values.shape)
    return tensor


_AGAIN = "Open the checkpoint again, and pickle the new object."


class Reopening(msgspec.Struct, frozen=True):
    """The steps with which another process opens a checkpoint again and makes the same view of it."""

    path: str
    """Path or URL of the checkpoint; a local path is stored as an absolute path."""
    options: Mapping[str, Any]
    """Keyword arguments of `open`, as plain data."""
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Method calls, with their arguments, that turn the open checkpoint into the view."""
    versions: Mapping[str, str] = msgspec.field(default_factory=dict)
    """File name -> version of the file at the time when the view was pickled."""
    rules: str | None = None
    """Text of the user's rules file at the time when the checkpoint was opened; None without a rules file."""

    def with_step(self, method: str, *arguments: Any) -> Reopening:
        """Return a copy with an additional method call at the end."""
        return replace(self, steps=(*self.steps, (method, arguments)))

    def with_versions(self, storage: Storage, files: Mapping[str, int]) -> Reopening:
        """Return a copy that also records the current versions of the given files.

        Raises:
            Refused: with code CORRUPT, if the files were changed since the checkpoint was opened.
            ValueError: if the checkpoint is closed.
        """
        storage.recheck()
        return replace(self, versions={name: storage.version(name) for name in files})

    def check(self, storage: Storage) -> None:
        """Check that the files have the versions that the pickle records.

        Raises:
            Refused: with code CORRUPT; the error lists the files that have changed.
        """
        changed = [name for name, version in self.versions.items() if storage.version(name) != version]
        if changed or (self.rules is not None and self.rules != table(self.options["rules"])):
            changed_files = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            message = f"changed since the checkpoint was pickled: {changed_files or self.options['rules']}"
            raise refuse("CORRUPT", message, file=self.path, hint=_AGAIN)


def table(path: str) -> str:
    """Return the text of the rules file (the user's table of tensor names)."""
    return Path(path).read_text("utf-8")


def refuse_to_pickle(description: str) -> TypeError:
    """Return the error for a view that cannot be recreated when it is unpickled."""
    return TypeError(
        f"cannot pickle {description}: pickle the checkpoint that open() returned, and make the view again"
    )


def reopened(opener: Callable[..., Any], reopening: Reopening) -> Any:
    """Open a pickled checkpoint again, and recreate its view.

    Raises:
        Refused: with code CORRUPT, if the checkpoint's files were changed since it was pickled.
        TransaxleError: any error that opening the checkpoint raises.
    """
    checkpoint = opener(reopening.path, **reopening.options)
    try:
        reopening.check(checkpoint.container.storage)
        for method, arguments in reopening.steps:
            checkpoint = getattr(checkpoint, method)(*arguments)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint
