"""Several tensors of a checkpoint: all of it, or those that patterns choose; read one by one, or in file order."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from posixpath import commonprefix
from typing import TYPE_CHECKING, Any, Literal

from transaxle.arguments import Patterns, Size, read_patterns, read_size
from transaxle.axes.notation.name import natural
from transaxle.engine.fold import FoldedRow, fold
from transaxle.engine.number_text import notebook, plural
from transaxle.engine.views.name_filter import chosen
from transaxle.errors import TransaxleError, shortened

if TYPE_CHECKING:
    from concurrent.futures import Future

    from transaxle.engine.checkpoint.stored_tensor import StoredTensor

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
