"""Safetensors files in which torch keeps parts of tensors, with a note in the header on which parts they are.

The header lists each part as if it were a tensor; the header's free text says where it begins in the whole. The shape
of the whole is not recorded: it extends as far as the parts do. If the last parts of every tensor are missing, nothing
can tell.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from transaxle.errors import Faults
from transaxle.formats.catalog.catalog import Entry
from transaxle.formats.catalog.strict_json import NotJsonError, parsed_as
from transaxle.formats.dtype import Shape, logical

NOTE = "DCP_SHARDING_INFO"
"""Key of the header's free text."""
NOTES = frozenset({NOTE, "DCP_VERSION"})
"""Keys of free text that describe parts, and so do not apply to the whole."""


class _PartNote(msgspec.Struct, frozen=True):
    """The note on one part."""

    saved_offsets: list[int]
    """First index of the part in each dim of the whole."""


def starts(
    entries: Mapping[str, Entry], metadata: Mapping[str, str], file: str, faults: Faults
) -> dict[str, Shape] | None:
    """Return where each part of one file begins in its tensor.

    Args:
        entries: the tensors that the file's header lists.
        metadata: its free text.
        file: its name, for errors.
        faults: receives the problems.

    Returns:
        Name of the tensor -> first index of the part, in elements; None if the note is missing or malformed.
    """
    text = metadata.get(NOTE)
    if text is None:
        faults.add("CORRUPT", f"the header has no {NOTE}: nothing says which parts of the tensors the file holds", file)
        return None
    try:
        note = parsed_as(text, dict[str, _PartNote])
    except NotJsonError as error:
        faults.add("CORRUPT", f"the header's {NOTE} is malformed: {error}", file)
        return None
    first_indices: dict[str, Shape] = {}
    for name, entry in entries.items():
        part_note = note.get(name)
        if (
            part_note is None
            or len(part_note.saved_offsets) != len(entry.shape)
            or any(at < 0 for at in part_note.saved_offsets)
        ):
            faults.add("CORRUPT", f"the header's {NOTE} does not say where this part begins", file, name)
            continue
        first_indices[name] = logical(tuple(part_note.saved_offsets), entry.dtype)
    return first_indices
