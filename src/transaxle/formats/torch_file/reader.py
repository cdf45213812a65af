"""Opening torch files: one file, or the shards that an index names, as a catalog of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from transaxle.errors import Faults, refuse
from transaxle.formats.catalog import Checksum, Container, Entry, NumbersInMemory, Seal, number
from transaxle.formats.flattened_state import Odd, flatten
from transaxle.formats.pickled.descriptors import NOTHING, Object, Quantized, Scalar, TensorRef
from transaxle.formats.registry import TORCH, sort_sidecars
from transaxle.formats.shards import read_files
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.quantized_tensors import NOTE, TAKEN, PlainLayout, layout
from transaxle.formats.torch_file.saved import REPEATED, ViewFault, identity, place, read_saved
from transaxle.formats.training_state import (
    GROUPS,
    LEFT_BEHIND,
    TRAINING,
    KeyPath,
    Leaf,
    TrainingItem,
    arrange,
    single,
    tops,
)

TIES = "ties"
"""Key of a container's metadata: name -> name of the tensor that is the same view of the same storage."""


@dataclass(frozen=True, slots=True)
class TorchContents:
    """The contents of one torch file."""

    entries: Mapping[str, Entry]
    """Tensors and numbers by name, in the order in which they were saved."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Its root, its ties, its quantized tensors, and what is left behind."""
    checksums: tuple[Checksum, ...] = ()
    """Checksums of the archive's records."""
    training: tuple[TrainingItem, ...] = ()
    """State beside model and optimizer."""
    seal: Seal | None = None
    """Where the file keeps digests of its bytes."""
    paths: Mapping[str, KeyPath] = field(default_factory=dict)
    """See `State`."""


def open_torch(storage: Storage, path: str, member: str) -> Container:
    """Open one torch file, or all shards of an index, with the optimizer's state in its folder beside them.

    Args:
        storage: where the files are.
        path: what the user typed.
        member: the file to open: `*.pt`, `*.pth`, `*.bin`, or an index `*.bin.index.json`.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT, INCOMPLETE, NAME_COLLISION, PATH_ESCAPE, UNSUPPORTED: every problem found in
            the catalogs of all files.
        StorageError: IO.
    """
    inline = NumbersInMemory(storage)
    read = read_files(storage, member, lambda file: read_part(inline, file))
    sidecars = sort_sidecars(storage, read.sizes)
    checksums = tuple(checksum for contents in read.parts.values() for checksum in contents.checksums)
    training = tuple(item for contents in read.parts.values() for item in contents.training)
    metadata = {**read.index_texts, **_merged(read.parts), **({TRAINING: tops(training)} if training else {})}
    seals = tuple(contents.seal for contents in read.parts.values() if contents.seal is not None)
    return Container(
        TORCH.name,
        path,
        inline,
        read.entries,
        read.sizes,
        metadata,
        sidecars.carried,
        sidecars.ignored,
        checksums,
        training=training,
        seals=seals,
        paths={name: path for contents in read.parts.values() for name, path in contents.paths.items()},
    )


def read_part(inline: NumbersInMemory, file: str) -> TorchContents:
    """Read the catalog of one torch file.

    Raises:
        Refused: as `open_torch`.
        StorageError: IO.
    """
    saved = read_saved(inline, file)
    leaves = flatten(saved.value, file)
    if not leaves and not isinstance(saved.value, dict | list | tuple):
        raise refuse("UNSUPPORTED", "the file holds neither tensors nor training state", file=file)
    state = arrange(leaves, file=file, read=partial(_single, inline, file))
    placed = _Placed(file)
    layouts = placed.layouts(state.leaves)
    is_old = any(quantized_layout.kind.is_old for quantized_layout in layouts.values())
    for name, leaf in state.leaves.items():
        if leaf.kind == "number":
            placed.entries[name] = _number(name, leaf.value, inline)
        elif any(isinstance(key, Odd) for key in leaf.path):
            placed.faults.add("UNSUPPORTED", f"its key is not text: {list(leaf.path)}", file, name)
        elif name in layouts:
            placed.quantized(name, layouts[name], old=is_old)
        elif not isinstance(leaf.value, Quantized):
            placed.tensor(name, leaf.value)
        if placed.repeated > REPEATED:
            message = f"with strides of zero the file claims more than {REPEATED} bytes that it does not hold"
            placed.faults.add("CORRUPT", message, file, name)
            break
    if placed.faults:
        raise placed.faults.error()
    metadata = state.metadata() | ({TIES: placed.ties} if placed.ties else {}) | placed.said
    if placed.left:
        metadata[LEFT_BEHIND] = {**metadata.get(LEFT_BEHIND, {}), **placed.left}
    return TorchContents(placed.entries, metadata, saved.checksums, tuple(state.training), saved.seal, state.paths)


class _Placed:
    """The tensors of one file, with their places.

    Attributes:
        entries: by name, in order.
        ties: name -> name of the tensor that is the same view of the same storage.
        said: notes on quantized tensors for the metadata.
        left: buffers that are not read, with descriptions.
        repeated: bytes that views claim beyond those stored.
        faults: the problems.
    """

    def __init__(self, file: str) -> None:
        self.entries: dict[str, Entry] = {}
        self.ties: dict[str, str] = {}
        self.said: dict[str, dict[str, Any]] = {}
        self.left: dict[str, str] = {}
        self.repeated = 0
        self.faults = Faults()
        self._file = file
        self._first: dict[tuple[object, ...], str] = {}

    def layouts(self, leaves: Mapping[str, Leaf]) -> dict[str, PlainLayout]:
        """Return the layouts of the quantized tensors; their problems are noted."""
        layouts = {}
        for name, leaf in leaves.items():
            if isinstance(leaf.value, Quantized):
                try:
                    layouts[name] = layout(leaf.value)
                except ViewFault as fault:
                    self._refuse(name, fault)
        return layouts

    def tensor(self, name: str, tensor: TensorRef | Object, dtype: str | None = None) -> None:
        """Place one tensor.

        Args:
            name: its name.
            tensor: its description in the pickle.
            dtype: safetensors code of its numbers, where the pickle has them as bytes.
        """
        try:
            entry, repeated_here = place(name, tensor, self._file)
        except ViewFault as fault:
            self._refuse(name, fault)
            return
        if name in self.entries:
            self.faults.add("NAME_COLLISION", TAKEN, self._file, name)
        self.entries[name] = entry if dtype is None else replace(entry, dtype=dtype)
        self.repeated += repeated_here
        view_identity = identity(tensor) if isinstance(tensor, TensorRef) else None
        if view_identity is not None and self._first.setdefault(view_identity, name) != name:
            self.ties[name] = self._first[view_identity]

    def quantized(self, name: str, plain_layout: PlainLayout, *, old: bool) -> None:
        """Place the buffers of a quantized tensor; see `Kind.codes`."""
        try:
            self.said.setdefault(NOTE, {})[name] = plain_layout.kind.said(old=old)
            codes = plain_layout.kind.stored(old=old)
        except ViewFault as fault:
            self._refuse(name, fault)
            return
        for end, buffer in plain_layout.parts.items():
            self.tensor(name + end, buffer.view, buffer.dtype or codes)
        self.left.update({name + end: reason for end, reason in plain_layout.left.items()})

    def _refuse(self, name: str, fault: ViewFault) -> None:
        self.faults.add(fault.code, fault.message, self._file, name, fault.hint)


def _single(inline: NumbersInMemory, file: str, value: TensorRef | Object) -> object:
    """Return the number in a tensor without dims; see `formats.training_state`."""
    try:
        entry, _ = place("", value, file)
    except ViewFault:
        return NOTHING
    return single(inline, entry)


def _number(name: str, value: Scalar | float | bool, inline: NumbersInMemory) -> Entry:
    code_and_bytes = (value.code, value.data) if isinstance(value, Scalar) else number(value)
    assert code_and_bytes is not None
    code, data = code_and_bytes
    return Entry(name, code, (), (inline.add(data),))


def _merged(parts: Mapping[str, TorchContents]) -> dict[str, Any]:
    """Return the metadata of all files: mappings and groups are joined; of other values the first counts."""
    merged: dict[str, Any] = {}
    for contents in parts.values():
        for key, value in contents.metadata.items():
            if key == GROUPS:
                merged[key] = [*merged.get(key, ()), *value]
            else:
                merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else merged.get(key, value)
    return merged
