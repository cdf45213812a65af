"""Destinations of loaded bytes: the memory of a local tensor where possible, otherwise a staging buffer.

A contiguous CPU tensor with the stored dtype is filled in place. If a tensor is on a GPU, strided, or of a different
dtype, its bytes are read into a buffer (in pinned memory for GPUs), and torch copies them into the tensor when all
bytes have arrived. This module also finds tensors that share memory, because the source must contain equal values for
them.

The arguments `decode` and `dtype` of `load` allow changes of dtype, and the report states whether any value was
rounded. An fp8 tensor without scales contains codes but no values, so it is never converted to another dtype. The
classes of the reports of `load` and `save` are in this module too.
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
"""A pair of tensor names of a model."""
_OVERLAP = "it shares elements with another tensor, or with itself, for which the source has other values"
_OWN_MEMORY = "Give each tensor memory of its own."
_DECODED_AS: Mapping[str, str] = {"bf16": "bf16", "fp16": "fp32", "fp32": "fp32"}
"""Value of the argument `decode` -> dtype in which decoded values are computed."""
_CODES = "F8"
"""Prefix of the safetensors codes of float8 dtypes, whose values cannot be computed without scales."""


class LocalSink(Sink):
    """A sink (receiver of bytes) that writes loaded bytes into this rank's local tensors.

    Args:
        destinations: tensor name -> destination of its bytes, for this rank's tensors.
        names: the tensor names; the key of an item is an index into this list.
    """

    ordered = False

    def __init__(self, destinations: Mapping[str, TensorDestination], names: Sequence[str]) -> None:
        self._landings = destinations
        self._names = names

    def buffer(self, key: int, start: int, stop: int) -> Bytes:
        """Return the memory for the bytes `[start, stop)` of an item."""
        return self._landings[self._names[key]].part(start, stop)

    def mark_filled(self, key: int, start: int, stop: int) -> None:
        """Mark the bytes `[start, stop)` of an item as written."""
        self._landings[self._names[key]].add_written(stop - start)

    def take(self, key: int, start: int, data: memoryview) -> None:
        """Copy bytes of an item that another rank sent into the item's tensor."""
        self.buffer(key, start, start + len(data)).data[:] = data
        self.mark_filled(key, start, start + len(data))


class TensorDestination:
    """The destination of the bytes of one local tensor; several threads may write into it.

    Args:
        tensor: the tensor or DTensor to fill; of a DTensor, only this rank's shard is written.
        dtype: safetensors code of the stored bytes.
        apart: whether to keep a second copy of the loaded values, because another tensor in the same memory may
            overwrite the first copy.
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
        """Whether every value written until now equals the stored value; False if a value was rounded to the tensor's
        dtype.
        """

    def part(self, start: int, stop: int) -> Bytes:
        """Return the memory for the bytes `[start, stop)` of the local tensor in row-major order."""
        with self._lock:
            if self._memory is None:
                pinned = self._local.device.type == "cuda"
                self._staging = torch.empty(self.size, dtype=torch.uint8, pin_memory=pinned)
                self._memory = self._staging.numpy()
            return self._memory[start:stop]

    def add_written(self, count: int) -> None:
        """Count `count` additional bytes as written; after the last bytes, copy a staging buffer into its tensor."""
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
        """Whether a tensor for which `apart` was given no longer contains the loaded values."""
        return self._values is not None and not same_bytes(self._local, self._values)

    @property
    def bytes_left(self) -> int:
        """Number of the tensor's stored bytes that have not arrived yet."""
        return self._bytes_left

    @property
    def bytes_written(self) -> int:
        """Number of bytes written into the tensor until now."""
        return (self.size - self._bytes_left) * self._local.element_size() // self._dtype.itemsize


def check_filled(destinations: Mapping[str, TensorDestination]) -> None:
    """Check that every byte of every tensor was written, and was not overwritten through another tensor.

    Raises:
        Refused: with code INCOMPLETE, if bytes are missing; with code UNEQUAL_COPIES, if tensors that share memory have
            different values in the source.
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
    """Yield pairs of names whose tensors are a single object, or whose local tensors view the same memory in the same
    way.

    Args:
        tensors: name -> tensor, for this rank's tensors.
        present: names of the tensors to compare.
    """
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        if name in present and (first_name := first.setdefault(view_of(tensor), name)) != name:
            yield first_name, name


def view_of(tensor: torch.Tensor) -> object:
    """Return a key that is equal for two tensors whose elements are the same memory in the same order."""
    if isinstance(tensor, ShardGrid) or tensor.is_meta:
        return id(tensor)
    local = raw_local(tensor)
    if type(local) is not torch.Tensor:  # `local_of` is slower, and is not needed for most DTensors
        local = local_of(tensor)
    if local.layout != torch.strided or not local.numel() or not local.data_ptr():
        return id(tensor)
    return local.device, local.data_ptr(), tuple(local.shape), local.stride(), local.dtype


def find_overlapping(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of local tensors that may share elements with another tensor, or whose own elements share
    memory.

    Two tensors that view the same memory in the same way are not included; see `same_memory`. Interleaved views, such
    as columns of one matrix, are treated as overlapping.

    Args:
        tensors: name -> tensor, for this rank's tensors; no tensor may be on the meta device.
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
    """Yield the names of tensors whose memory range overlaps the memory range of a different view."""
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
    """Return whether several indices of a tensor may refer to the same element in memory."""
    reach = 0
    dims = zip(local.shape, local.stride(), strict=True)
    for step, count in sorted((step, count) for count, step in dims if count > 1):
        if step <= reach:
            return True
        reach += step * (count - 1)
    return False


@dataclass(frozen=True)
class Conversion:
    """A tensor whose dtype changed when it was loaded."""

    name: str
    """Name of the tensor in the model."""
    stored: str
    """Safetensors code of the stored dtype, or name of the stored encoding."""
    to: str
    """Safetensors code of the dtype in the model."""
    exact: bool | None
    """Whether every value equals the stored value; None for an encoded tensor, because a load does not measure how
    products of codes and scales are rounded.
    """


OWN = "own"
"""Value of the argument `dtype`: each parameter takes values of other dtypes, cast to its own."""


def may_become(stored: str, target: str, allowed: str | None) -> bool:
    """Return whether a load may change a stored dtype to the model's dtype; `allowed` is the argument `dtype`, or
    `decode` for an encoded tensor.
    """
    if allowed is None or stored not in PLAIN:
        return False
    return target in CASTS.values() if allowed == OWN else CASTS[allowed] == target


def check_dtype(dtype: str) -> None:
    """Refuse an unknown value of the argument `dtype`.

    Raises:
        Refused: with code UNSUPPORTED, if `dtype` is not one of the allowed values.
    """
    if dtype not in {*CASTS, OWN}:
        choices = ", ".join(f'dtype="{choice}"' for choice in (*CASTS, OWN))
        raise refuse("UNSUPPORTED", f"parameters cannot be cast to dtype={dtype!r}", hint=f"Give {choices}.")


def is_plain(stored: str) -> bool:
    """Return whether a safetensors code denotes plain values, rather than codes that need scales."""
    return stored in PLAIN


def decode_hint(stored: str, target: str, decode: str | None = None) -> str:
    """Return the hint for a stored dtype that differs from the model's dtype, with the options that would allow the
    change.
    """
    option = next((key for key, code in CASTS.items() if code == target), None)
    if stored in PLAIN and target.startswith(_CODES):
        return "To quantize, use transaxle convert --encode, or a parameter of tx.quant."
    if option is None or not stored.startswith(("F", "BF")):
        return ""
    if stored in PLAIN:
        return f'Use dtype="{option}" to cast the stored values to the parameter\'s dtype.'
    if option == decode:
        return "The stored codes have no scales, so their values are unknown."
    return f'Use decode="{option}" to convert the stored tensor to the parameter\'s dtype.'


def decode_tensors(checkpoint: Checkpoint, decode: str | None, keep: Iterable[str] = ()) -> Checkpoint:
    """Return a checkpoint whose encoded tensors are decoded, if `decode` is given.

    Args:
        checkpoint: the checkpoint under its stored names.
        decode: dtype to which encoded tensors may be decoded, as for `load`.
        keep: names of encoded tensors that stay encoded, as the catalog spells the names.

    Raises:
        Refused: with code UNSUPPORTED, if `decode` is unknown; with other codes, if codes or scales cannot be read.
    """
    if decode is None:
        return checkpoint
    if decode not in CASTS:
        choices = ", ".join(f'decode="{one}"' for one in CASTS)
        raise refuse("UNSUPPORTED", f"parameters cannot be decoded to decode={decode!r}", hint=f"Give {choices}.")
    if not checkpoint.catalog.encoded and not checkpoint.catalog.refusals:
        # a source without encoded tensors need not be decoded; changes of plain dtypes are allowed by the argument
        # `dtype`
        return checkpoint
    return checkpoint.decode(_DECODED_AS[decode], skip=[escape(name) for name in keep])


def cast(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """Convert values to a dtype; also return whether all values, including NaN, are unchanged."""
    converted = values.to(dtype)
    back = converted.to(values.dtype)
    same = (back == values) | (values != values)
    return converted, bool(same.all())


@dataclass(frozen=True)
class LoadReport:
    """The result of `load` on one rank."""

    path: str
    """Path or URL of the source, as the caller gave it."""
    format: str
    """Container format of the source checkpoint."""
    dialect: str
    """Dialect of the model's tensor names."""
    tensors: int
    """Number of tensors that this rank holds, whole or as a shard."""
    states: int
    """Number of this rank's tensors that are optimizer state."""
    bytes_needed: int
    """Size of this rank's shards in bytes, with the stored dtypes."""
    bytes_read: int
    """Number of bytes that this rank read from the source's tensor files."""
    bytes_received: int
    """Number of bytes that other ranks read from the source and sent to this rank."""
    bytes_written: int
    """Number of bytes written into this rank's tensors, which is the size of the tensors without padding rows."""
    converted: tuple[Conversion, ...]
    """Tensors that were decoded or cast (`decode`, `dtype`), and whether any value was rounded."""
    missing: tuple[str, ...]
    """Names of the model's tensors that the source lacks (if `strict` was False), and `optimizer` if the source has no
    optimizer state. The values of these tensors and states are unchanged.
    """
    unexpected: tuple[str, ...]
    """Names of the source's tensors that the model lacks (if `strict` was False)."""
    untouched: tuple[str, ...] = ()
    """For a model with adapters, the tensor names of the adapters if the source is a base checkpoint, or of the base
    model if the source is an adapter. For a sharded state dict of Megatron, the keys of entries that are not tensors,
    such as extra states.
    """
    padded: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Name of a Megatron tensor with padding rows -> its numbers of rows in the source and in the model, if these
    numbers differ. Rows of the model that the source lacks were set to zero.
    """
    zeros: tuple[str, ...] = ()
    """Names of the model's tensors that the source does not store because they are zero; these tensors were filled with
    zeros.
    """
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Key -> value in the source, for entries of a state dict that are not tensors."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Name in the argument `extra` -> state, for objects without the method `load_state_dict`; the caller must restore
    these states.
    """
    untrained: tuple[str, ...] = ()
    """Names of parameters that require gradients but belong to none of the given optimizers."""
    source_against: str = "structure"
    """What the source's bytes were compared with: the hashes in its `manifest`, the `digests` in its files, only what
    headers and checksums of the format reveal (`structure`), or nothing (`unchecked`). It is the weakest of checkpoint,
    adapter and base.
    """
    partly_read: tuple[str, ...] = ()
    """Stored names of the tensors that have a hash, but were not compared with it, because all ranks together have read
    less than half of them.
    """
    seconds: float = 0.0
    """Wall time of the load on this rank in seconds."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Stage of the load (`plan`, `read`, `exchange`, …) -> seconds spent in the stage."""

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
            "not compared with their hashes": self.partly_read,
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
    """Path or URL of the target, as the caller gave it."""
    format: str
    """Container format of the saved checkpoint."""
    dialect: str
    """Dialect of the saved checkpoint's tensor names."""
    tensors: int
    """Number of tensors written by all ranks together."""
    bytes_written: int
    """Total size in bytes of all files."""
    bytes_own: int
    """Number of bytes that this rank wrote into files."""
    bytes_received: int
    """Number of bytes that other ranks sent to this rank, so that this rank could write longer runs of contiguous
    bytes.
    """
    kept: tuple[str, ...]
    """Names of tensors that the target dialect does not know; these tensors are saved under the model's names."""
    ignored: tuple[str, ...]
    """Names of entries of the state that were not saved."""
    notes: tuple[str, ...] = ()
    """Notes for users of the checkpoint, for example that a folder for a hub has no config."""
    untrained: tuple[str, ...] = ()
    """Names of this rank's parameters that require gradients but belong to none of the given optimizers."""
    verification: Verification | None = None
    """The result of reading the saved checkpoint back; None unless `verify` was given."""
    seconds: float = 0.0
    """Wall time of the save on this rank in seconds."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Stage of the save (`plan`, `check`, `write`, `hash`, `commit`, `verify`) -> seconds spent in the stage."""

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
