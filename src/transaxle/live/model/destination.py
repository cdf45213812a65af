"""Where loaded bytes go: a local tensor's own storage where that is possible, else through a staging buffer.

A contiguous CPU tensor of the stored type is filled in place. Any other (on a GPU, strided, of another type) gets its
bytes in a buffer, pinned for GPUs, from which torch copies once all of them are there. Tensors that share memory are
found here, because what the source has for each of them must be the same, or one would be lost.

`decode=` and `dtype=` allow some types to become others, and the report says whether a value was rounded on the way.
Codes without their scales are no values: a tensor of fp8 that no encoding explains is converted by nothing here.

What a load or a save did, in numbers a person can check.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from glob import escape
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from transaxle.encodings.encoding import CASTS, PLAIN
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.wording import duration, plural, size
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.move.transfer import Sink
from transaxle.torch_tensors import Bytes, ShardGrid, as_bytes, local_of, raw_local, same_bytes, torch_dtype

if TYPE_CHECKING:
    from transaxle.engine.verification import Verification


NamePair = tuple[str, str]
"""Names of two tensors of a model."""
_OVERLAP = "it shares elements with another tensor, or with itself, for which the source has other values"
_OWN_MEMORY = "Give each tensor memory of its own."
_DECODED_AS: Mapping[str, str] = {"bf16": "bf16", "fp16": "fp32", "fp32": "fp32"}
"""Type in which encoded values are computed."""
_CODES = "F8"
"""Begin of the safetensors codes that stand for no values."""


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

    def buffer(self, key: int, start: int, stop: int) -> Bytes:
        """See `Sink`."""
        return self._landings[self._names[key]].part(start, stop)

    def mark_filled(self, key: int, start: int, stop: int) -> None:
        """See `Sink`."""
        self._landings[self._names[key]].done(stop - start)

    def take(self, key: int, start: int, data: memoryview) -> None:
        """Copy bytes that another rank sent into their room."""
        self.buffer(key, start, start + len(data)).data[:] = data
        self.mark_filled(key, start, start + len(data))


class Landing:
    """One local tensor, being filled by several threads.

    Args:
        tensor: the tensor or DTensor; only this rank's part is written.
        dtype: safetensors code of the bytes that come.
        apart: keep the bytes that came, since something else may be written over them.
    """

    def __init__(self, tensor: torch.Tensor, dtype: str, *, apart: bool = False) -> None:
        self._local = local_of(tensor)
        self._dtype = torch_dtype(dtype)
        self._direct = (
            not apart
            and self._local.device.type == "cpu"
            and self._local.is_contiguous()
            and self._local.dtype == self._dtype
            and not (self._local.is_conj() or self._local.is_neg())
        )
        self._apart = apart
        self._values: torch.Tensor | None = None
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
            self._values = values if self._apart else None
            self._staging = self._held = None

    @property
    def is_overwritten(self) -> bool:
        """Whether the tensor, kept `apart`, has other values by now than it was given."""
        return self._values is not None and not same_bytes(self._local, self._values)

    @property
    def left(self) -> int:
        """Bytes of the source that are still to come."""
        return self._left

    @property
    def written(self) -> int:
        """Bytes of the tensor that are in their place."""
        return (self.size - self._left) * self._local.element_size() // self._dtype.itemsize


def check_filled(landings: Mapping[str, Landing]) -> None:
    """Prove that every byte of every tensor was written, and is still there.

    Raises:
        Refused: INCOMPLETE; UNEQUAL_COPIES for tensors that share memory, and that the source has other values for.
    """
    short = [
        Refusal(
            "INCOMPLETE", f"{landing.written} bytes were written, but {landing.left} are missing", Where(None, name)
        )
        for name, landing in landings.items()
        if landing.left
    ]
    lost = [unlike_overlap(name) for name, each in landings.items() if not each.left and each.is_overwritten]
    if short or lost:
        raise gathered([*short, *lost])


def unlike_overlap(name: str) -> Refusal:
    """Return UNEQUAL_COPIES for a tensor whose values would be lost to another one's, in the same memory."""
    return Refusal("UNEQUAL_COPIES", _OVERLAP, Where(None, name), _OWN_MEMORY)


def same_memory(tensors: Mapping[str, torch.Tensor], present: Collection[str]) -> Iterator[NamePair]:
    """Yield pairs of names whose tensors are one object, or this rank's parts of them one view of one memory.

    Args:
        tensors: this rank's, by name.
        present: names that are looked at.
    """
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        if name in present and (other := first.setdefault(view_of(tensor), name)) != name:
            yield other, name


def view_of(tensor: torch.Tensor) -> object:
    """Return what is equal for tensors that are the same elements in the same order."""
    if isinstance(tensor, ShardGrid) or tensor.is_meta:
        return id(tensor)
    local = raw_local(tensor)
    if type(local) is not torch.Tensor:  # of DTensors this is the quick way, which most have
        local = local_of(tensor)
    if local.layout != torch.strided or not local.numel() or not local.data_ptr():
        return id(tensor)
    return local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype


def overlapping(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names whose local tensors may share elements with another one, or within themselves.

    Tensors that are one view of one memory are no reason, see `same_memory`; views between whose elements others lie,
    such as columns, are taken for overlapping ones.

    Args:
        tensors: this rank's, by name; none of them on the meta device.
    """
    spans: dict[tuple[torch.device, int], list[tuple[int, int, object, str]]] = {}
    found = set[str]()
    for name, tensor in tensors.items():
        local = local_of(tensor)
        if not local.numel() or not local.data_ptr():
            continue
        if _folds(local):
            found.add(name)
        begin, size = local.data_ptr(), local.element_size()
        reach = sum((count - 1) * step for count, step in zip(local.shape, local.stride(), strict=True)) + 1
        key = local.device, local.untyped_storage().data_ptr()
        spans.setdefault(key, []).append((begin, begin + reach * size, view_of(tensor), name))
    return found.union(*(set(_crossing(each)) for each in spans.values() if len(each) > 1))


def _crossing(spans: list[tuple[int, int, object, str]]) -> Iterator[str]:
    """Yield the names of those that cross another one which is no view of the same elements."""
    run: list[tuple[int, int, object, str]] = []
    end = 0
    for span in chain(sorted(spans, key=lambda each: each[:2]), [(0, 0, None, "")]):
        if run and (not span[3] or span[0] >= end):
            if len({view for _, _, view, _ in run}) > 1:
                yield from (name for *_, name in run)
            run, end = [], 0
        run.append(span)
        end = max(end, span[1])


def _folds(local: torch.Tensor) -> bool:
    """Tell whether several indices may stand for one element."""
    reach = 0
    dims = zip(local.shape, local.stride(), strict=True)
    for step, count in sorted((step, count) for count, step in dims if count > 1):
        if step <= reach:
            return True
        reach += step * (count - 1)
    return False


@dataclass(frozen=True)
class Conversion:
    """One tensor whose values were not copied as they are."""

    name: str
    """The model's name."""
    stored: str
    """Safetensors code it had, or the encoding's name."""
    to: str
    """Safetensors code it has now."""
    exact: bool | None
    """Whether every value is the stored one; None for an encoded tensor: how far codes times scales are from what they
    became is not measured while loading."""


def may_become(stored: str, wanted: str, allowed: str | None) -> bool:
    """Tell whether values of one type may become another: `allowed` is `dtype`, or `decode` of what was encoded."""
    return allowed is not None and stored in PLAIN and CASTS[allowed] == wanted


def check_dtype(dtype: str) -> None:
    """Refuse a `dtype=` that parameters cannot be cast to.

    Raises:
        Refused: UNSUPPORTED.
    """
    if dtype not in CASTS:
        named = ", ".join(f'dtype="{one}"' for one in CASTS)
        raise refuse("UNSUPPORTED", f"parameters cannot be cast to dtype={dtype!r}", hint=f"Give {named}.")


def is_plain(stored: str) -> bool:
    """Tell whether a safetensors code is that of values, not of codes that need scales."""
    return stored in PLAIN


def decode_hint(stored: str, wanted: str, decode: str | None = None) -> str:
    """Return what a user can do about two types that differ, although `decode` was given."""
    said = next((key for key, code in CASTS.items() if code == wanted), None)
    if stored in PLAIN and wanted.startswith(_CODES):
        return "To quantize, use transaxle convert --encode, or a parameter of tx.quant."
    if said is None or not stored.startswith(("F", "BF")):
        return ""
    if stored in PLAIN:
        return f'Use dtype="{said}" to cast the stored values to the parameter\'s dtype.'
    if said == decode:
        return "These are codes without scales, which have no values."
    return f'Use decode="{said}" to convert the stored tensor to the parameter\'s dtype.'


def decoded(checkpoint: Checkpoint, decode: str | None, keep: Iterable[str] = ()) -> Checkpoint:
    """Return a checkpoint whose encoded tensors are plain ones, if `decode` says so.

    Args:
        checkpoint: under its stored names.
        decode: as `load` takes it.
        keep: names of encoded tensors, as tables have them, that stay as they are.

    Raises:
        Refused: what stands against telling encoded buffers apart.
    """
    if decode is None:
        return checkpoint
    if decode not in CASTS:
        named = ", ".join(f'decode="{one}"' for one in CASTS)
        raise refuse("UNSUPPORTED", f"parameters cannot be decoded to decode={decode!r}", hint=f"Give {named}.")
    if not checkpoint.catalog.encoded and not checkpoint.catalog.refusals:
        return checkpoint  # a plain source needs no decoding, and what is of another type needs `dtype`
    return checkpoint.decode(_DECODED_AS[decode], skip=[escape(name) for name in keep])


def cast(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """Convert values; also tell whether all of them, NaN included, are what they were."""
    found = values.to(dtype)
    back = found.to(values.dtype)
    same = (back == values) | (values != values)
    return found, bool(same.all())


@dataclass(frozen=True)
class LoadReport:
    """The result of `load` on this rank."""

    path: str
    """The source as typed."""
    format: str
    """Its container format."""
    dialect: str
    """The dialect of the model's names."""
    tensors: int
    """Tensors of which this rank has any part."""
    states: int
    """How many of these belong to the optimizer's state."""
    bytes_needed: int
    """Bytes of this rank's shards, as stored."""
    bytes_read: int
    """Bytes that this rank read from the source's tensor files."""
    bytes_received: int
    """Bytes that other ranks read for it."""
    bytes_written: int
    """Bytes written into this rank's tensors; equal to their size, but for rows of padding."""
    converted: tuple[Conversion, ...]
    """Tensors whose values were decoded or cast (`decode`, `dtype`), and whether any was rounded."""
    missing: tuple[str, ...]
    """Names of the model that the source lacks (`strict=False`), and `optimizer` if it has nothing of one; their values
    are unchanged."""
    unexpected: tuple[str, ...]
    """Names of the source that the model lacks (`strict=False`)."""
    untouched: tuple[str, ...] = ()
    """In a model with adapters, the names that the source does not concern: its adapters, or their base. In a sharded
    state dict of Megatron, the keys of what is no tensor, such as the extra states of modules."""
    padded: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Tensors of Megatron that may have rows of padding: rows in the source and in the model, where these differ. Rows
    that the source lacks are zero now."""
    zeros: tuple[str, ...] = ()
    """Names of the model that the source has no tensor for, and that are zeros now, which are the same as none."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Entries of a state dict that are not tensors, with the source's values."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """States that the caller requested without an object to restore."""
    untrained: tuple[str, ...] = ()
    """Parameters with gradients that are in none of the given optimizers."""
    seconds: float = 0.0
    """Wall time of this rank."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds of it by stage: `plan`, `read`, `exchange`."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        read, needed, received = map(size, (self.bytes_read, self.bytes_needed, self.bytes_received))
        counts = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "untouched": self.untouched,
            "padded": self.padded,
            "zeros": self.zeros,
            "converted": self.converted,
        }
        rest = "".join(f", {len(names):,} {what}" for what, names in counts.items() if names)
        tensors = f"{plural(self.tensors, 'tensor')}, {self.states:,} of the optimizer{rest}"
        return (
            f"{self.path} · {self.dialect} · {tensors} · {read} read of {needed} needed, {received} received, "
            f"{duration(self.seconds)}"
        )


@dataclass(frozen=True)
class SaveReport:
    """The result of `save`."""

    path: str
    """The target as typed."""
    format: str
    """Its container format."""
    dialect: str
    """Its dialect."""
    tensors: int
    """Tensors written, by all ranks."""
    bytes_written: int
    """Bytes of all files."""
    bytes_own: int
    """Bytes that this rank wrote."""
    bytes_received: int
    """Bytes that other ranks sent to this one, so that it could write longer runs."""
    kept: tuple[str, ...]
    """Tensors without a line in the target dialect: under their own names."""
    ignored: tuple[str, ...]
    """What was left behind."""
    notes: tuple[str, ...] = ()
    """What whoever goes on with the checkpoint must be told, such as that a hub's folder has no config."""
    untrained: tuple[str, ...] = ()
    """Parameters with gradients that are in none of the given optimizers, on this rank."""
    verification: Verification | None = None
    """What reading the checkpoint back has shown, if that was asked for."""
    seconds: float = 0.0
    """Wall time of this rank."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds of it by stage: `plan`, `check`, `write`, `hash`, `commit`, `verify`."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        rest = f", {len(self.kept):,} under their own names" if self.kept else ""
        proved = "" if self.verification is None else ", read back"
        return (
            f"{self.path} · {self.format} · {self.dialect} · {plural(self.tensors, 'tensor')}{rest} · "
            f"{size(self.bytes_written)}{proved}, {duration(self.seconds)}"
        )
