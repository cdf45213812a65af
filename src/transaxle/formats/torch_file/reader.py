"""Opening torch files: one file, or the shards that an index names, as a catalog of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transaxle.errors import refuse
from transaxle.formats.catalog import Checksum, Container, Entry
from transaxle.formats.company import INDEX, company
from transaxle.formats.faults import Faults
from transaxle.formats.index import agreed, read_index, read_shards
from transaxle.formats.inline import Inline, number
from transaxle.formats.pickled.descriptors import Scalar
from transaxle.formats.pickled.flatten import Odd, flatten
from transaxle.formats.state import State, arrange
from transaxle.formats.storage import Storage
from transaxle.formats.torch_file.saved import read_saved
from transaxle.formats.torch_file.views import REPEATED, ViewFault, identity, place

FORMAT = "torch"
TIES = "ties"
"""Key of a container's metadata: name -> name of the tensor that is the same view of the same storage."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one torch file holds."""

    entries: Mapping[str, Entry]
    """Tensors and numbers by name, in the order in which they were saved."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Its root, its ties, and what is left behind."""
    checksums: tuple[Checksum, ...] = ()
    """What the archive says of its records' bytes."""


def open_torch(storage: Storage, path: str, member: str) -> Container:
    """Open one torch file, or all shards of an index.

    Args:
        storage: where the files are.
        path: what the user typed.
        member: the file to open: `*.pt`, `*.pth`, `*.bin`, or an index `*.bin.index.json`.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT, INCOMPLETE, NAME_COLLISION, PATH_ESCAPE, UNSUPPORTED: every problem found in
            the catalogs of all files.
        StorageError: IO.
    """
    inline = Inline(storage)
    said: dict[str, Any] = {}
    entries: Mapping[str, Entry]
    if member.endswith(INDEX):
        weight_map, said = read_index(storage, member)
        faults = Faults()
        parts = read_shards(storage, member, weight_map, lambda shard: read_part(inline, shard), faults)
        entries = agreed(member, weight_map, {name: part.entries for name, part in parts.items()}, faults)
        if faults:
            raise faults.error()
    else:
        parts = {member: read_part(inline, member)}
        entries = parts[member].entries
    files = {name: storage.size(name) for name in (*parts, *([member] if member not in parts else []))}
    around = company(storage, files)
    checksums = tuple(checksum for part in parts.values() for checksum in part.checksums)
    metadata = {**said, **_merged(parts)}
    return Container(FORMAT, path, inline, entries, files, metadata, around.carried, around.ignored, checksums)


def read_part(inline: Inline, file: str) -> Part:
    """Read the catalog of one torch file.

    Raises:
        Refused: as `open_torch`.
        StorageError: IO.
    """
    saved = read_saved(inline, file)
    leaves = flatten(saved.value, file)
    if not leaves and not isinstance(saved.value, dict | list | tuple):
        raise refuse("UNSUPPORTED", "it holds neither tensors nor a state", file=file)
    state = arrange(leaves, file=file)
    faults = Faults()
    entries: dict[str, Entry] = {}
    ties: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    repeated = 0
    for name, leaf in state.leaves.items():
        if leaf.kind == "number":
            entries[name] = _number(name, leaf.value, inline)
            continue
        if any(isinstance(key, Odd) for key in leaf.path):
            faults.add("UNSUPPORTED", f"it is under a key that is no text: {list(leaf.path)}", file, name)
            continue
        try:
            entries[name], more = place(name, leaf.value, file)
        except ViewFault as fault:
            faults.add(fault.code, fault.message, file, name, fault.hint)
            continue
        repeated += more
        if repeated > REPEATED:
            message = f"by strides of zero the file claims more than {REPEATED} bytes that it does not hold"
            faults.add("CORRUPT", message, file, name)
            break
        seen = identity(leaf.value)
        if seen is not None and first.setdefault(seen, name) != name:
            ties[name] = first[seen]
    if faults:
        raise faults.error()
    return Part(entries, _metadata(state, ties), saved.checksums)


def _number(name: str, value: Scalar | float | bool, inline: Inline) -> Entry:
    found = (value.code, value.data) if isinstance(value, Scalar) else number(value)
    assert found is not None
    code, data = found
    return Entry(name, code, (), (inline.add(data),))


def _metadata(state: State, ties: Mapping[str, str]) -> dict[str, Any]:
    return state.metadata() | ({TIES: dict(ties)} if ties else {})


def _merged(parts: Mapping[str, Part]) -> dict[str, Any]:
    """Return the metadata of all files: mappings are joined, of other values the first one counts."""
    merged: dict[str, Any] = {}
    for part in parts.values():
        for key, value in part.metadata.items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else merged.get(key, value)
    return merged
