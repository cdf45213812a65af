"""Opens torch files: a single file, or the shard files that an index names."""

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
"""Metadata key of tied tensors: a dict from name to the name of an earlier tensor that is the same view of the same
storage."""


@dataclass(frozen=True, slots=True)
class TorchContents:
    """The contents of one torch file."""

    entries: Mapping[str, Entry]
    """Name -> tensor or single number, in the order in which they were saved."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata: the key of the model's dict, ties, descriptions of quantized tensors, and a list of the values that are
    not read."""
    checksums: tuple[Checksum, ...] = ()
    """CRC-32 sums of the records in the file's zip archive."""
    training: tuple[TrainingItem, ...] = ()
    """Training state other than model and optimizer, such as schedules and step numbers."""
    seal: Seal | None = None
    """Where the digests of the file's bytes are; None if the file has no digests."""
    paths: Mapping[str, KeyPath] = field(default_factory=dict)
    """Tensor name -> key path in the saved dict; see `State.paths`."""
    is_numbered: bool = False
    """Whether the optimizer's groups list parameters by number; see `State.is_numbered`."""


def open_torch(storage: Storage, path: str, member: str) -> Container:
    """Open one torch file, or all shard files that an index names, with the optimizer's state in the index's
    sub-folder.

    Args:
        storage: storage that reads the files.
        path: the path as the user typed it.
        member: name of a file (`*.pt`, `*.pth` or `*.bin`), or of an index (`*.bin.index.json`).

    Raises:
        Refused: with all problems of all files, and the code UNSAFE_PICKLE, CORRUPT, INCOMPLETE, NAME_COLLISION,
            PATH_ESCAPE or UNSUPPORTED.
        StorageError: with the code IO if a file cannot be read.
    """
    inline = NumbersInMemory(storage)
    read = read_files(storage, member, lambda file: read_part(inline, file))
    sidecars = sort_sidecars(storage, read.sizes)
    checksums = tuple(checksum for contents in read.parts.values() for checksum in contents.checksums)
    training = tuple(item for contents in read.parts.values() for item in contents.training)
    metadata = {**read.index_texts, **_merge_metadata(read.parts), **({TRAINING: tops(training)} if training else {})}
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
        in_order=len(read.parts) == 1 and all(contents.is_numbered for contents in read.parts.values()),
    )


def read_part(inline: NumbersInMemory, file: str) -> TorchContents:
    """Read the catalog of one torch file, which may be one shard file of several.

    Raises:
        Refused: with the codes of `open_torch`.
        StorageError: with the code IO if the file cannot be read.
    """
    saved = read_saved(inline, file)
    leaves = flatten(saved.value, file)
    if not leaves and not isinstance(saved.value, dict | list | tuple):
        raise refuse("UNSUPPORTED", "the file holds neither tensors nor training state", file=file)
    state = arrange(leaves, file=file, read=partial(read_setting, inline, file))
    tensors = _TensorCollector(file)
    layouts = tensors.layouts(state.leaves)
    is_old = any(quantized_layout.kind.is_old for quantized_layout in layouts.values())
    for name, leaf in state.leaves.items():
        if leaf.kind == "number":
            tensors.entries[name] = number_entry(name, leaf.value, inline)
        elif any(isinstance(key, Odd) for key in leaf.path):
            tensors.faults.add("UNSUPPORTED", f"its key is not text: {list(leaf.path)}", file, name)
        elif name in layouts:
            tensors.add_quantized(name, layouts[name], old=is_old)
        elif not isinstance(leaf.value, Quantized):
            tensors.add_tensor(name, leaf.value)
        if tensors.repeated > REPEATED:
            message = f"with strides of zero the file claims more than {REPEATED} bytes that it does not hold"
            tensors.faults.add("CORRUPT", message, file, name)
            break
    if tensors.faults:
        raise tensors.faults.error()
    metadata = state.metadata() | ({TIES: tensors.ties} if tensors.ties else {}) | tensors.quantized_notes
    if tensors.left_behind:
        metadata[LEFT_BEHIND] = {**metadata.get(LEFT_BEHIND, {}), **tensors.left_behind}
    return TorchContents(
        tensors.entries,
        metadata,
        saved.checksums,
        tuple(state.training),
        saved.seal,
        state.paths,
        state.is_numbered,
    )


class _TensorCollector:
    """Collects the tensors of one torch file, with the places of their bytes.

    Attributes:
        entries: tensor name -> catalog entry, in order.
        ties: name -> name of the tensor that is the same view of the same storage.
        quantized_notes: descriptions of the quantized tensors, which become part of the metadata.
        left_behind: maps the name of each buffer that is not read to a description of the buffer.
        repeated: number of bytes by which expanded views (stride 0) repeat stored elements.
        faults: problems of tensors found so far.
    """

    def __init__(self, file: str) -> None:
        self.entries: dict[str, Entry] = {}
        self.ties: dict[str, str] = {}
        self.quantized_notes: dict[str, dict[str, Any]] = {}
        self.left_behind: dict[str, str] = {}
        self.repeated = 0
        self.faults = Faults()
        self._file = file
        self._first: dict[tuple[object, ...], str] = {}

    def layouts(self, leaves: Mapping[str, Leaf]) -> dict[str, PlainLayout]:
        """Return name -> layout, for the quantized tensors; add their problems to `faults`."""
        layouts = {}
        for name, leaf in leaves.items():
            if isinstance(leaf.value, Quantized):
                try:
                    layouts[name] = layout(leaf.value)
                except ViewFault as fault:
                    self._refuse(name, fault)
        return layouts

    def add_tensor(self, name: str, tensor: TensorRef | Object, dtype: str | None = None) -> None:
        """Add a tensor, with the place of its bytes.

        Args:
            name: name of the tensor.
            tensor: description of the tensor in the pickle.
            dtype: safetensors code of the values, if the pickle stores them as bytes.
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

    def add_quantized(self, name: str, plain_layout: PlainLayout, *, old: bool) -> None:
        """Add the buffers of a quantized tensor; see `StoringKind.codes`."""
        try:
            self.quantized_notes.setdefault(NOTE, {})[name] = plain_layout.kind.describe(old=old)
            codes = plain_layout.kind.stored_code(old=old)
        except ViewFault as fault:
            self._refuse(name, fault)
            return
        for end, buffer in plain_layout.parts.items():
            self.add_tensor(name + end, buffer.view, buffer.dtype or codes)
        self.left_behind.update({name + end: reason for end, reason in plain_layout.left.items()})

    def _refuse(self, name: str, fault: ViewFault) -> None:
        self.faults.add(fault.code, fault.message, self._file, name, fault.hint)


def read_setting(inline: NumbersInMemory, file: str, value: TensorRef | Object) -> object:
    """Read a tensor without dims as a plain number; see `training_state.arrange`."""
    try:
        entry, _ = place("", value, file)
    except ViewFault:
        return NOTHING
    return single(inline, entry)


def number_entry(name: str, value: Scalar | float | bool, inline: NumbersInMemory) -> Entry:
    """Return a plain number in a pickle as a tensor without dims."""
    code_and_bytes = (value.code, value.data) if isinstance(value, Scalar) else number(value)
    assert code_and_bytes is not None
    code, data = code_and_bytes
    return Entry(name, code, (), (inline.add(data),))


def _merge_metadata(parts: Mapping[str, TorchContents]) -> dict[str, Any]:
    """Merge the metadata of all files: dicts and parameter groups are united; any other value is that of the first file
    with the key.
    """
    merged: dict[str, Any] = {}
    for contents in parts.values():
        for key, value in contents.metadata.items():
            if key == GROUPS:
                merged[key] = [*merged.get(key, ()), *value]
            else:
                merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else merged.get(key, value)
    return merged
