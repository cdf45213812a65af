"""Destinations of loaded bytes: a local tensor's own storage where possible, otherwise a staging buffer.

A contiguous CPU tensor of the stored dtype is filled in place. For any other tensor (on a GPU, strided, of another
dtype) the bytes go into a buffer, pinned for GPUs, and torch copies them once all have arrived. This module also finds
tensors that share memory, because the source must have equal values for them.

`decode=` and `dtype=` allow dtype changes, and the report tells whether any value was rounded. An fp8 tensor without
scales has codes but no values, so it is never converted. The reports of loads and saves are here too.
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
"""`decode=` option -> dtype in which encoded values are computed."""
_CODES = "F8"
"""Prefix of the safetensors codes of dtypes that need scales."""


class LocalSink(Sink):
    """Sink that writes loaded bytes into this rank's local tensors.

    Args:
        destinations: destinations of this rank's tensors, by name.
        names: name of each item's tensor, by item key.
    """

    ordered = False

    def __init__(self, destinations: Mapping[str, TensorDestination], names: Sequence[str]) -> None:
        self._landings = destinations
        self._names = names

    def buffer(self, key: int, start: int, stop: int) -> Bytes:
        """Return the memory for bytes `[start, stop)` of an item."""
        return self._landings[self._names[key]].part(start, stop)

    def mark_filled(self, key: int, start: int, stop: int) -> None:
        """Report that bytes `[start, stop)` of an item are in place."""
        self._landings[self._names[key]].add_written(stop - start)

    def take(self, key: int, start: int, data: memoryview) -> None:
        """Copy bytes from another rank into the tensor."""
        self.buffer(key, start, start + len(data)).data[:] = data
        self.mark_filled(key, start, start + len(data))


class TensorDestination:
    """Destination of one local tensor's bytes; several threads fill it.

    Args:
        tensor: the tensor or DTensor, of which only this rank's part is written.
        dtype: safetensors code of the stored bytes.
        apart: keep the loaded values too, since another tensor in the same memory may overwrite them.
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
        self._bytes_left = self.size
        self._staging: torch.Tensor | None = None
        self._memory: Bytes | None = as_bytes(self._local) if self._direct else None
        self._lock = threading.Lock()
        self.exact = True
        """False once a value was rounded to the tensor's dtype."""

    def part(self, start: int, stop: int) -> Bytes:
        """Return the memory for bytes `[start, stop)` of the row-major local tensor."""
        with self._lock:
            if self._memory is None:
                pinned = self._local.device.type == "cuda"
                self._staging = torch.empty(self.size, dtype=torch.uint8, pin_memory=pinned)
                self._memory = self._staging.numpy()
            return self._memory[start:stop]

    def add_written(self, count: int) -> None:
        """Report that `count` more bytes are in place; after the last ones, a staged tensor is written."""
        with self._lock:
            self._bytes_left -= count
            finished = self._bytes_left == 0 and self._staging is not None
        if finished and self._staging is not None:
            values = self._staging.view(self._dtype).reshape(self._local.shape)
            if self._local.dtype != self._dtype:
                values, self.exact = cast(values, self._local.dtype)
            with torch.no_grad():
                self._local.copy_(values)
            self._values = values if self._apart else None
            self._staging = self._memory = None

    @property
    def is_overwritten(self) -> bool:
        """Whether a tensor created with `apart` no longer has the loaded values."""
        return self._values is not None and not same_bytes(self._local, self._values)

    @property
    def bytes_left(self) -> int:
        """Bytes of the source that have not arrived yet."""
        return self._bytes_left

    @property
    def bytes_written(self) -> int:
        """Bytes of the tensor that are in place."""
        return (self.size - self._bytes_left) * self._local.element_size() // self._dtype.itemsize


def check_filled(destinations: Mapping[str, TensorDestination]) -> None:
    """Prove that every byte of every tensor was written and not overwritten.

    Raises:
        Refused: INCOMPLETE; UNEQUAL_COPIES for tensors that share memory but have different values in the source.
    """
    short = [
        Refusal(
            "INCOMPLETE",
            f"{destination.bytes_written} bytes were written, but {destination.bytes_left} are missing",
            Where(None, name),
        )
        for name, destination in destinations.items()
        if destination.bytes_left
    ]
    lost = [unlike_overlap(name) for name, each in destinations.items() if not each.bytes_left and each.is_overwritten]
    if short or lost:
        raise gathered([*short, *lost])


def unlike_overlap(name: str) -> Refusal:
    """Return the refusal for a tensor whose values another tensor in the same memory would overwrite."""
    return Refusal("UNEQUAL_COPIES", _OVERLAP, Where(None, name), _OWN_MEMORY)


def same_memory(tensors: Mapping[str, torch.Tensor], present: Collection[str]) -> Iterator[NamePair]:
    """Yield pairs of names whose tensors are one object, or whose local parts are the same view of one memory.

    Args:
        tensors: this rank's tensors by name.
        present: names to consider.
    """
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        if name in present and (first_name := first.setdefault(view_of(tensor), name)) != name:
            yield first_name, name


def view_of(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors with the same elements in the same order."""
    if isinstance(tensor, ShardGrid) or tensor.is_meta:
        return id(tensor)
    local = raw_local(tensor)
    if type(local) is not torch.Tensor:  # `local_of` is slower, and most DTensors do not need it
        local = local_of(tensor)
    if local.layout != torch.strided or not local.numel() or not local.data_ptr():
        return id(tensor)
    return local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype


def find_overlapping(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of local tensors that may share elements with another tensor, or within themselves.

    Tensors that are the same view of one memory do not count, see `same_memory`; interleaved views, such as columns of
    one matrix, count as overlapping.

    Args:
        tensors: this rank's tensors by name, none on the meta device.
    """
    spans: dict[tuple[torch.device, int], list[tuple[int, int, object, str]]] = {}
    names = set[str]()
    for name, tensor in tensors.items():
        local = local_of(tensor)
        if not local.numel() or not local.data_ptr():
            continue
        if _folds(local):
            names.add(name)
        begin, size = local.data_ptr(), local.element_size()
        reach = sum((count - 1) * step for count, step in zip(local.shape, local.stride(), strict=True)) + 1
        key = local.device, local.untyped_storage().data_ptr()
        spans.setdefault(key, []).append((begin, begin + reach * size, view_of(tensor), name))
    return names.union(*(set(_find_crossing(each)) for each in spans.values() if len(each) > 1))


def _find_crossing(spans: list[tuple[int, int, object, str]]) -> Iterator[str]:
    """Yield the names of spans that overlap another span which is not the same view."""
    run: list[tuple[int, int, object, str]] = []
    end = 0
    for span in chain(sorted(spans, key=lambda spans_of_run: spans_of_run[:2]), [(0, 0, None, "")]):
        if run and (not span[3] or span[0] >= end):
            if len({view for _, _, view, _ in run}) > 1:
                yield from (name for *_, name in run)
            run, end = [], 0
        run.append(span)
        end = max(end, span[1])


def _folds(local: torch.Tensor) -> bool:
    """Tell whether several indices may refer to one element."""
    reach = 0
    dims = zip(local.shape, local.stride(), strict=True)
    for step, count in sorted((step, count) for count, step in dims if count > 1):
        if step <= reach:
            return True
        reach += step * (count - 1)
    return False


@dataclass(frozen=True)
class Conversion:
    """A tensor whose dtype changed in a load."""

    name: str
    """Name of the tensor in the model."""
    stored: str
    """Safetensors code of the stored dtype, or the name of the encoding."""
    to: str
    """Safetensors code of the dtype in the model."""
    exact: bool | None
    """Whether every value equals the stored one; None for an encoded tensor, since a load does not measure the rounding
    of codes times scales.
    """


def may_become(stored: str, target: str, allowed: str | None) -> bool:
    """Tell whether a dtype may change; `allowed` is `dtype=`, or `decode=` for an encoded tensor."""
    return allowed is not None and stored in PLAIN and CASTS[allowed] == target


def check_dtype(dtype: str) -> None:
    """Refuse an unknown `dtype=`.

    Raises:
        Refused: UNSUPPORTED.
    """
    if dtype not in CASTS:
        choices = ", ".join(f'dtype="{one}"' for one in CASTS)
        raise refuse("UNSUPPORTED", f"parameters cannot be cast to dtype={dtype!r}", hint=f"Give {choices}.")


def is_plain(stored: str) -> bool:
    """Tell whether a safetensors code stands for plain values, not for codes that need scales."""
    return stored in PLAIN


def decode_hint(stored: str, target: str, decode: str | None = None) -> str:
    """Return the hint for two dtypes that differ, although `decode` was given."""
    option = next((key for key, code in CASTS.items() if code == target), None)
    if stored in PLAIN and target.startswith(_CODES):
        return "To quantize, use transaxle convert --encode, or a parameter of tx.quant."
    if option is None or not stored.startswith(("F", "BF")):
        return ""
    if stored in PLAIN:
        return f'Use dtype="{option}" to cast the stored values to the parameter\'s dtype.'
    if option == decode:
        return "These are codes without scales, which have no values."
    return f'Use decode="{option}" to convert the stored tensor to the parameter\'s dtype.'


def decode_tensors(checkpoint: Checkpoint, decode: str | None, keep: Iterable[str] = ()) -> Checkpoint:
    """Return a checkpoint whose encoded tensors are decoded, if `decode` is given.

    Args:
        checkpoint: the checkpoint under its stored names.
        decode: as `load` takes it.
        keep: names of encoded tensors, as catalogs have them, that stay encoded.

    Raises:
        Refused: UNSUPPORTED for an unknown `decode=`, and refusals about encoded buffers.
    """
    if decode is None:
        return checkpoint
    if decode not in CASTS:
        choices = ", ".join(f'decode="{one}"' for one in CASTS)
        raise refuse("UNSUPPORTED", f"parameters cannot be decoded to decode={decode!r}", hint=f"Give {choices}.")
    if not checkpoint.catalog.encoded and not checkpoint.catalog.refusals:
        return checkpoint  # a plain source needs no decoding; other dtypes need `dtype`
    return checkpoint.decode(_DECODED_AS[decode], skip=[escape(name) for name in keep])


def cast(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """Convert values; also return whether all values, NaN included, are unchanged."""
    converted = values.to(dtype)
    back = converted.to(values.dtype)
    same = (back == values) | (values != values)
    return converted, bool(same.all())


@dataclass(frozen=True)
class LoadReport:
    """The result of `load` on this rank."""

    path: str
    """The source as typed."""
    format: str
    """Container format of the source."""
    dialect: str
    """Dialect of the model's names."""
    tensors: int
    """Number of tensors of which this rank has any part."""
    states: int
    """Number of these that are optimizer state."""
    bytes_needed: int
    """Bytes of this rank's shards, as stored."""
    bytes_read: int
    """Bytes that this rank read from the source's tensor files."""
    bytes_received: int
    """Bytes that other ranks read and sent to this rank."""
    bytes_written: int
    """Bytes written into this rank's tensors: the size of the tensors without padding rows."""
    converted: tuple[Conversion, ...]
    """Tensors that were decoded or cast (`decode`, `dtype`), and whether any value was rounded."""
    missing: tuple[str, ...]
    """Names of the model that the source lacks (`strict=False`), and `optimizer` if the source has no optimizer state;
    their values are unchanged.
    """
    unexpected: tuple[str, ...]
    """Names of the source that the model lacks (`strict=False`)."""
    untouched: tuple[str, ...] = ()
    """In a model with adapters, names of the adapters or of the base, whichever the source does not have. In a sharded
    state dict of Megatron, keys of entries that are not tensors, such as extra states.
    """
    padded: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Tensors of Megatron with padding rows -> number of rows in the source and in the model, where these differ. The
    model's rows that the source lacks are now zero.
    """
    zeros: tuple[str, ...] = ()
    """Names of the model that the source has no tensor for, and that are now zeros, which is equivalent."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Entries of a state dict that are not tensors, with the source's values."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """States named in `extra=` without an object that restores them."""
    untrained: tuple[str, ...] = ()
    """Parameters that require gradients but are in no given optimizer."""
    seconds: float = 0.0
    """Wall time on this rank in seconds."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage: `plan`, `read`, `exchange`, …"""

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
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
        counts_shown = "".join(f", {len(names):,} {what}" for what, names in counts.items() if names)
        tensors = f"{plural(self.tensors, 'tensor')}, {self.states:,} of the optimizer{counts_shown}"
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
    """Container format of the target."""
    dialect: str
    """Dialect of the target."""
    tensors: int
    """Number of tensors written by all ranks together."""
    bytes_written: int
    """Bytes of all files."""
    bytes_own: int
    """Bytes that this rank wrote."""
    bytes_received: int
    """Bytes that other ranks sent to this rank, so that it could write longer runs."""
    kept: tuple[str, ...]
    """Tensors without a line in the target dialect, saved under their own names."""
    ignored: tuple[str, ...]
    """Names of entries that were not saved."""
    notes: tuple[str, ...] = ()
    """Notes for the next user of the checkpoint, such as that a hub folder has no config."""
    untrained: tuple[str, ...] = ()
    """This rank's parameters that require gradients but are in no given optimizer."""
    verification: Verification | None = None
    """Result of reading the checkpoint back; None unless `verify` was given."""
    seconds: float = 0.0
    """Wall time on this rank in seconds."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage: `plan`, `check`, `write`, `hash`, `commit`, `verify`."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        kept_shown = f", {len(self.kept):,} under their own names" if self.kept else ""
        proved = "" if self.verification is None else ", read back"
        return (
            f"{self.path} · {self.format} · {self.dialect} · {plural(self.tensors, 'tensor')}{kept_shown} · "
            f"{size(self.bytes_written)}{proved}, {duration(self.seconds)}"
        )
