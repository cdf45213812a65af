"""Stored tensors: one tensor of a checkpoint, read whole or in boxes, and several, read one by one or in file order.

A read touches only the bytes of its box. Slices as numpy writes them, `[0:2, ..., -1]`, become the smallest box that
holds what they select; steps, reversals, dropped and new dims are then numpy's own. torch is imported by the first who
asks for a tensor of it.

A pickle holds how the checkpoint was opened, so that another process can open it again, no values and no catalog:
whoever unpickles it reads the files, and refuses if they are others.
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
from transaxle.engine.source import Intervals, Source, positions
from transaxle.engine.views.encode import chosen
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


One: TypeAlias = SupportsIndex | slice | EllipsisType | None
TensorIndex: TypeAlias = One | tuple[One, ...]
"""What may stand between the brackets of a tensor."""


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

    def __getitem__(self, index: TensorIndex) -> np.ndarray:
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


Kind = Literal["torch", "numpy"]
_KINDS = ("torch", "numpy")
_SHOWN, _LONGEST = 40, 200
"""Rows that a notebook shows, and characters of a name."""
_NEAR = 0.7
"""Share of a name that is like the nearest one, from which on the nearest is told."""
_READERS = 2
"""Threads that read ahead: one waits for the disk while the other decodes."""


_INTERNAL = {
    "bound", "catalog", "checking", "checks", "container", "folded", "foreign", "half_converted", "in_order", "in_part",
    "recognised",
    "reopening", "seen_as", "settings", "sizes", "source", "source_of", "stored_names", "targets", "translation",
    "undecoded", "view", "without_optimizer",
}  # fmt: skip
"""Attributes of a checkpoint that the engine uses, and Tab does not show."""


class TensorSet(Mapping[str, "StoredTensor"]):
    """A mapping from names to stored tensors, from which values are read."""

    def __dir__(self) -> list[str]:
        """Return what users need, for Tab."""
        return sorted(name for name in super().__dir__() if name not in _INTERNAL)

    def _repr_html_(self) -> str:
        try:
            rows = self.folded()
        except TransaxleError as error:
            return notebook(f"{self!r}\n{error}")
        cells = [
            (shortened(row.name, _LONGEST), row.times, *(str(part) for part in self._kind(row.names[0])))
            for row in rows[:_SHOWN]
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        more = [f"… and {plural(len(rows) - _SHOWN, 'more row')}"] if len(rows) > _SHOWN else []
        return notebook("\n  ".join([repr(self), *map(str.rstrip, lines), *more]))

    def in_order(self) -> list[str]:
        """Return the names in the order in which people read them."""
        return sorted(self, key=natural)

    def folded(self) -> list[FoldedRow]:
        """Return the tensors in that order, those that differ only in their numbers as one row."""
        names = self.in_order()
        return fold(names, [(kind, tuple(shape)) for kind, shape in map(self._kind, names)])

    def _kind(self, name: str) -> tuple[str, list[int]]:
        tensor = self[name]
        return tensor.dtype, list(tensor.shape)

    def select(self, only: Patterns = (), skip: Patterns = ()) -> Selection:
        """Return some of the tensors, as a mapping; nothing is read.

        Args:
            only: patterns of their names, in which `*` stands for any characters; none: all.
            skip: patterns of names to leave out.

        Raises:
            TypeError: an argument of a type that it cannot have.
            UsageError: AMBIGUOUS for a pattern that no name has.
        """
        names = chosen(self, read_patterns("only", only), read_patterns("skip", skip), "tensor")
        return Selection(self, tuple(names))

    def state_dict(self, kind: Kind = "torch") -> dict[str, Any]:
        """Return all values by name, as `torch.load` would: torch tensors, or numpy arrays.

        Args:
            kind: `torch` or `numpy`.

        Raises:
            Refused: UNSUPPORTED for types that there are not.
            ImportError: torch is not installed.
        """
        values = dict(self.stream(kind))
        return {name: values[name] for name in self}

    def stream(self, kind: Kind = "torch", *, memory: Size = "256MB") -> Iterator[tuple[str, Any]]:
        """Yield (name, values) in the order in which they lie in the files, while the next ones are read.

        Args:
            kind: `torch` or `numpy`.
            memory: bytes of values that are read ahead; one tensor is, however large.

        Raises:
            TypeError: an argument of a type that it cannot have.
            ValueError: another `kind`.
            Refused: UNSUPPORTED for types that there are not.
        """
        if kind not in _KINDS:
            raise ValueError(f"kind must be 'torch' or 'numpy'; got {kind!r}")
        return self._read_ahead(kind, read_size("memory", memory))

    def _read_ahead(self, kind: Kind, memory: int) -> Iterator[tuple[str, Any]]:
        from concurrent.futures import ThreadPoolExecutor  # only whoever streams waits for it

        waiting: deque[tuple[StoredTensor, Future[Any]]] = deque()
        held = 0
        pool = ThreadPoolExecutor(_READERS, thread_name_prefix="transaxle-read")
        try:
            for tensor in sorted(self.values(), key=_place):
                while waiting and held + tensor.nbytes > memory:
                    held -= waiting[0][0].nbytes
                    yield _read(waiting.popleft())
                waiting.append((tensor, pool.submit(tensor.torch if kind == "torch" else tensor.numpy)))
                held += tensor.nbytes
            while waiting:
                yield _read(waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)


class Selection(TensorSet):
    """Some tensors of a checkpoint."""

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
        """Return the names in the order of the whole checkpoint."""
        return [name for name in self._home.in_order() if name in self._names]

    def __repr__(self) -> str:
        return f"<{plural(len(self), 'tensor')} of {self._home!r}>"


class _NoSuchNameError(KeyError):
    """A name that no tensor has; it is compared with those there are when it is shown, and not when `get` meets it."""

    def __init__(self, name: str, names: Collection[str] = ()) -> None:
        super().__init__(name)
        self._names = names

    def __reduce__(self) -> tuple[type[KeyError], tuple[object, ...]]:
        return KeyError, (str(self),)

    def __str__(self) -> str:
        (name,) = self.args
        if "*" in name:
            return f"no tensor is named {name!r}: for those that match it, .select({name!r})"
        nearest = max(self._names, key=lambda other: _alike(name, other), default="")
        near_enough = _alike(name, nearest) > _NEAR * max(len(name), len(nearest))
        return f"no tensor is named {name!r}" + (f". Did you mean {nearest!r}?" if near_enough else "")


def no_such_name(name: object, names: Collection[str]) -> KeyError | TypeError:
    """Return the error of a name that no tensor has: of a pattern it says how tensors are selected.

    Args:
        name: what was asked for.
        names: what there is.
    """
    if isinstance(name, str):
        return _NoSuchNameError(name, names)
    return TypeError(f"a checkpoint takes the name of a tensor, a str; got {name!r}. For several: .select('*.norm.*')")


def _alike(name: str, other: str) -> int:
    """Return how many characters two names have in common at their beginning and at their end."""
    start = len(commonprefix((name, other)))
    return start + len(commonprefix((name[start:][::-1], other[start:][::-1])))


def _place(tensor: StoredTensor) -> tuple[str, int]:
    """Return where the first byte of a tensor lies."""
    return min(((each.file, each.source) for each in tensor.transfers()), default=("", 0))


def _read(waiting: tuple[StoredTensor, Future[Any]]) -> tuple[str, Any]:
    tensor, values = waiting
    return tensor.name, values.result()


class BoxIndex(msgspec.Struct, frozen=True):
    """An index, taken apart."""

    box: tuple[slice, ...]
    """What is read: one slice of step 1 for each dim."""
    inside: tuple[int | slice | None, ...]
    """What numpy selects in it."""


def taken_apart(index: object, shape: tuple[int, ...]) -> BoxIndex:
    """Take an index apart.

    Raises:
        IndexError: it has too many dims, two `...`, or a number outside its dim, as numpy says it.
        TypeError: it is no slice, number, `...` or None.
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
        span, rest = _of_dim(part, shape[len(box)], len(box))
        box.append(span)
        inside.append(rest)
    return BoxIndex(tuple(box), tuple(inside))


def _of_dim(part: object, size: int, dim: int) -> tuple[slice, int | slice]:
    """Return what is read of one dim, and what is selected in that."""
    if isinstance(part, slice):
        found = range(*part.indices(size))
        if not found:
            return slice(0, 0), slice(None)
        return slice(min(found), max(found) + 1), slice(None, None, found.step)
    if isinstance(part, bool) or getattr(part, "shape", None) or not isinstance(part, SupportsIndex):
        raise wrong_type(
            "an index of a tensor", "slices, numbers, ... and None (.numpy() gives an array, for more)", part
        )
    number = operator.index(part)
    if not -size <= number < size:
        raise IndexError(f"index {number} is out of bounds for dim {dim} with size {size}")
    return slice(number % size, number % size + 1), 0


_NAMES = {"COMPLEX32": "complex32", "F4": "float4_e2m1fn_x2"}
"""Codes of types that numpy calls otherwise, or has none of -> torch's name."""


_RAW = "read() and tobytes() give the bytes as they are stored."


def check_elements(name: str, dtype: str) -> None:
    """Prove that numpy has one element for each of a type.

    Raises:
        Refused: UNSUPPORTED for packed and quantized types.
    """
    whole = ITEM_BITS.get(dtype, 0) >= 8 and (numpy_dtype(dtype) != numpy_dtype("U8") or dtype == "U8")
    if not whole or dtype.startswith(("QINT", "BITS", "COMPLEX32")):
        raise refuse("UNSUPPORTED", f"numpy has no type for elements of {dtype}", tensor=name, hint=_RAW)


def as_torch(name: str, dtype: str, values: np.ndarray) -> torch.Tensor:
    """Return values as a torch tensor that shares their memory.

    Args:
        name: of the tensor, for errors.
        dtype: its safetensors code.
        values: as `StoredTensor.read` gives them.

    Raises:
        Refused: UNSUPPORTED for a type that torch has not.
        ImportError: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        from transaxle.extras import install

        message = f"torch() needs torch, which is not installed: {install('torch')}"
        raise ImportError(message, name=error.name) from None
    if dtype not in _NAMES:
        check_elements(name, dtype)
    found = getattr(torch, _NAMES.get(dtype, numpy_dtype(dtype).name), None)
    if found is None:
        raise refuse("UNSUPPORTED", f"torch {torch.__version__} has no dtype for {dtype}", tensor=name, hint=_RAW)
    if not values.size:
        return torch.empty(values.shape, dtype=found)
    flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    tensor: torch.Tensor = flat.view(found).reshape(values.shape)
    return tensor


_AGAIN = "Open the checkpoint anew, and pickle it then."


class Reopening(msgspec.Struct, frozen=True):
    """How a checkpoint, or a view of one, comes about."""

    path: str
    """Where it is; of a path on this machine, from the root."""
    options: Mapping[str, Any]
    """Keyword arguments of `open`, as plain data."""
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Methods that led from there to the view, with their arguments."""
    versions: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Files and their versions when it was pickled."""
    rules: str | None = None
    """Text of the table of the user's own, when it was opened."""

    def after(self, method: str, *arguments: Any) -> Reopening:
        """Return how a view of it comes about."""
        return replace(self, steps=(*self.steps, (method, arguments)))

    def pickled(self, storage: Storage, files: Mapping[str, int]) -> Reopening:
        """Return it with the versions of the files.

        Raises:
            Refused: CORRUPT if they were changed since the checkpoint was opened.
            ValueError: it is closed.
        """
        storage.recheck()
        return replace(self, versions={name: storage.version(name) for name in files})

    def check(self, storage: Storage) -> None:
        """Prove that the files are those that were pickled.

        Raises:
            Refused: CORRUPT, with every file that is another.
        """
        changed = [name for name, version in self.versions.items() if storage.version(name) != version]
        if changed or (self.rules is not None and self.rules != table(self.options["rules"])):
            what = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            message = f"changed since the checkpoint was pickled: {what or self.options['rules']}"
            raise refuse("CORRUPT", message, file=self.path, hint=_AGAIN)


def table(path: str) -> str:
    """Return the text of a rules file."""
    return Path(path).read_text("utf-8")


def refuse_to_pickle(what: str) -> TypeError:
    """Build the error for a view of which nobody knows how it came about."""
    return TypeError(f"cannot pickle {what}: pickle the checkpoint that open() returned, and make the view again")


def reopened(opener: Callable[..., Any], how: Reopening) -> Any:
    """Open a checkpoint again.

    Raises:
        Refused: CORRUPT if its files were changed since it was pickled.
        TransaxleError: what opening it raises.
    """
    found = opener(how.path, **how.options)
    try:
        how.check(found.container.storage)
        for method, arguments in how.steps:
            found = getattr(found, method)(*arguments)
    except BaseException:
        found.close()
        raise
    return found
