"""The catalog: what a container holds and where, before any data is read; readers, drafts and plans share it.

A container that exists (`Container`) and one that is about to be written (`Draft`) have the same form: entries, each
with the extents that hold its bytes. That is why a plan is only a list of copies between two catalogs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from transaxle.encodings.value_steps import Computed
from transaxle.formats.catalog.seal import Seal, filled
from transaxle.formats.dtype import nbytes
from transaxle.formats.storage.storage import Storage, VirtualFiles

if TYPE_CHECKING:
    from transaxle.errors import Refusal
    from transaxle.formats.training_items import TrainingItem


class Extent(msgspec.Struct, frozen=True, gc=False):
    """A rectangular chunk of a stored tensor and the place of its bytes."""

    start: tuple[int, ...]
    """First index of the chunk in each dim of the stored tensor."""
    shape: tuple[int, ...]
    """Elements of the chunk along each dim."""
    file: str
    """Name of the file inside the container."""
    offset: int
    """Byte offset in the file of the chunk's first element."""
    strides: tuple[int, ...] | None = None
    """Element strides in the file; None when the chunk is row-major without gaps."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A stored tensor: its dtype, its shape, and the extents that hold it."""

    name: str
    dtype: str
    """Safetensors code, see `formats.dtype`."""
    shape: tuple[int, ...]
    """Logical elements along each dim."""
    extents: tuple[Extent, ...]
    """Chunks that tile the tensor without holes or overlaps."""

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return nbytes(self.dtype, self.shape)


class Checksum(msgspec.Struct, frozen=True, gc=False):
    """A checksum that a container's format keeps for a range of bytes; it is compared when the range has been read."""

    file: str
    """Name of the file inside the container."""
    offset: int
    """First byte of the range."""
    size: int
    """Bytes of the range."""
    crc32: int
    """Their CRC-32."""
    what: str
    """Description of the range, for errors."""

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.size


class Twin(msgspec.Struct, frozen=True):
    """Two places that must hold the same bytes: a replica on another rank, a step that several files record."""

    first: Entry
    """The tensor that is read."""
    second: Entry
    """Its copy, of the same type and shape."""
    why: str
    """Why they must be equal."""
    replica: bool = False
    """Whether each rank updates its copy by itself, so that the copies may drift apart."""
    rounded: bool = False
    """Whether the copy has lower precision: then it must be what the first rounds to, bit by bit."""
    dates: bool = False
    """Whether it tells that files are of one save: it is compared also where its tensor is not wanted."""


class Recoding(msgspec.Struct, frozen=True):
    """What is done to the values of a container's tensors when they are read."""

    computed: Mapping[str, Computed] = msgspec.field(default_factory=dict)
    """File that does not exist on disk -> the tensor whose values are computed for it."""
    dtype: str | None = None
    """Safetensors code of the type that plain tensors are cast to; None: they are not cast."""
    stayed: tuple[str, ...] = ()
    """Plain tensors of other types that keep them where others are cast."""
    adapter: Container | None = None
    """The adapter that is merged into the weights."""
    notes: tuple[str, ...] = ()
    """What plans say of it."""


class Container(msgspec.Struct, frozen=True):
    """An opened checkpoint: its catalog, and the storage its bytes are read from."""

    format: str
    """Name of the format, e.g. `safetensors`."""
    path: str
    """The path as the user typed it."""
    storage: Storage
    """Reads byte ranges of the files below."""
    entries: Mapping[str, Entry]
    """Stored tensors by name, in file order."""
    files: Mapping[str, int]
    """Size in bytes of every file that holds tensors or describes them."""
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Everything the container records beside its tensors."""
    carried: tuple[str, ...] = ()
    """Other files of the folder that travel with the model (config, tokenizer)."""
    ignored: tuple[str, ...] = ()
    """Names that are left alone: other tensor files, hidden files, sub-folders, links and special files; see
    `sidecar_files`.
    """
    checksums: tuple[Checksum, ...] = ()
    """Checksums that the format itself keeps; `verify` checks them."""
    twins: tuple[Twin, ...] = ()
    """Copies whose equality every conversion checks before it writes."""
    left: Mapping[str, Entry] = msgspec.field(default_factory=dict)
    """Tensors that exist but are not wanted."""
    training: tuple[TrainingItem, ...] = ()
    """State beside model and optimizer; see `formats.training_items`."""
    seals: tuple[Seal, ...] = ()
    """Places where files keep digests of all their bytes; `verify` checks them."""
    config: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """What its own files say of the model, under the keys of a config.json; used where there is none."""
    unread: tuple[Refusal, ...] = ()
    """Why the optimizer's state, or some of it, cannot be read; whatever wants the optimizer is refused for it."""
    uncompared: tuple[Twin, ...] = ()
    """Tensors that are not wanted, with their copies; only `verify` compares them."""
    paths: Mapping[str, tuple[str | int, ...]] = msgspec.field(default_factory=dict)
    """Tensor -> path in the state dict, of those nested in neither the model nor the optimizer; see `State`."""
    recoding: Recoding = Recoding()
    """Which tensors are computed from stored ones, and how."""

    def recoded(self, computed: Mapping[str, Computed], entries: Mapping[str, Entry], **changes: Any) -> Container:
        """Return the container with further computed tensors.

        Args:
            computed: file, of a name that no other has -> the tensor whose values are computed for it.
            entries: all tensors, those among them.
            **changes: of the recoding, and of the container.
        """
        recoding = {name: changes.pop(name) for name in Recoding.__struct_fields__ if name in changes}
        adapter: Container | None = recoding.get("adapter")
        storage = VirtualFiles(self.storage, computed, () if adapter is None else (adapter.storage,))
        recoding["computed"] = {**self.recoding.computed, **computed}
        return replace(self, storage=storage, entries=entries, recoding=replace(self.recoding, **recoding), **changes)

    @property
    def beside(self) -> frozenset[str]:
        """Names of the tensors that are training state."""
        return frozenset([item.name for item in self.training if item.name is not None])

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def without(self, names: Collection[str]) -> Container:
        """Return the container without some tensors: they move to `left`, and their copies are not compared.

        Copies that tell whether all files are of one save are compared nevertheless.
        """
        unwanted = {name: entry for name, entry in self.entries.items() if name in names}
        places = {(extent.file, extent.offset) for entry in unwanted.values() for extent in entry.extents}
        kept = [
            twin.dates or any((each.file, each.offset) not in places for each in twin.first.extents)
            for twin in self.twins
        ]
        return replace(
            self,
            entries={name: entry for name, entry in self.entries.items() if name not in unwanted},
            left={**self.left, **unwanted},
            twins=tuple(itertools.compress(self.twins, kept)),
            uncompared=(
                *self.uncompared,
                *(twin for twin, wanted in zip(self.twins, kept, strict=True) if not wanted),
            ),
        )


class Spec(msgspec.Struct, frozen=True, gc=False):
    """A tensor to be written, as a draft needs it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Fragment(msgspec.Struct, frozen=True):
    """Bytes of a draft that are known before any tensor: a header, an index."""

    file: str
    offset: int
    data: bytes


class Draft(msgspec.Struct, frozen=True):
    """A container that does not exist yet: every tensor already has its place."""

    format: str
    entries: Mapping[str, Entry]
    """Tensors by name, in the order in which their files are written."""
    files: Mapping[str, int]
    """Final size of every file."""
    fragments: tuple[Fragment, ...]
    """Bytes that are known before any tensor is copied."""
    seal: Seal | None = None
    """Space for digests in a file that is the whole checkpoint; the fragment around it is written last."""
    copies: Mapping[str, tuple[Extent, ...]] = msgspec.field(default_factory=dict)
    """Further places of a tensor, by its name: chunks that several ranks hold, each with the same bytes."""
    notes: tuple[str, ...] = ()
    """What a reader of the files must be told, or takes for what the source does not say; one sentence each."""

    def early(self) -> tuple[Fragment, ...]:
        """Return the fragments that are known before any tensor is copied: all but the one with room for digests."""
        return tuple(fragment for fragment in self.fragments if not self._is_sealed(fragment))

    def late(self, hashes: Mapping[str, str]) -> Iterator[Fragment]:
        """Yield the fragment that holds the digests, filled in.

        Args:
            hashes: of every tensor, by name.
        """
        if self.seal is None:
            return
        firsts = {entry.extents[0].offset: hashes[name] for name, entry in self.entries.items() if entry.nbytes}
        ordered = sorted(self.fragments, key=lambda fragment: fragment.offset)
        parts = [(fragment.offset, fragment.data) for fragment in ordered]
        for sealed, (_, data) in zip(ordered, filled(parts, self.seal, firsts), strict=True):
            if self._is_sealed(sealed):
                yield replace(sealed, data=data)

    def with_files(self, files: Mapping[str, bytes]) -> Draft:
        """Return the same draft with further files of known contents."""
        fragments = (Fragment(name, 0, text) for name, text in sorted(files.items()))
        sizes = {name: len(text) for name, text in sorted(files.items())}
        return replace(self, files={**self.files, **sizes}, fragments=(*self.fragments, *fragments))

    @property
    def sealed_first(self) -> bool:
        """Whether the digests precede the tensors: a stream then needs them before it begins."""
        return self.seal is not None and any(
            not fragment.offset and self._is_sealed(fragment) for fragment in self.fragments
        )

    def _is_sealed(self, fragment: Fragment) -> bool:
        return self.seal is not None and fragment.offset <= self.seal.head < fragment.offset + len(fragment.data)
