"""Safetensors data in which torch keeps parts of tensors: the note in the header that says which parts they are.

The header gives each part as if it were a tensor; where in the whole tensor it begins stands in the header's free text.
The shape of the whole is written nowhere: it is as far as the parts reach. If the last parts of every tensor are
missing, nothing can tell.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from transaxle.formats.catalog.catalog import Entry
from transaxle.formats.catalog.problem_list import Faults
from transaxle.formats.dtype import Shape, logical

NOTE = "DCP_SHARDING_INFO"
"""Key of the header's free text."""
NOTES = frozenset({NOTE, "DCP_VERSION"})
"""Free text that describes parts; it is not that of the whole."""


class _Part(msgspec.Struct, frozen=True):
    """What the note says of one part."""

    saved_offsets: list[int]
    """First index of the part in each dim of the whole."""


_note: msgspec.json.Decoder[dict[str, _Part]] = msgspec.json.Decoder(dict[str, _Part])


def starts(
    entries: Mapping[str, Entry], metadata: Mapping[str, str], file: str, faults: Faults
) -> dict[str, Shape] | None:
    """Return where each part of one file begins in its tensor.

    Args:
        entries: the tensors that the file's header lists.
        metadata: its free text.
        file: its name, for errors.
        faults: receives what is wrong.

    Returns:
        Name of the tensor -> first index of the part, in elements; None if the note is missing or malformed.
    """
    text = metadata.get(NOTE)
    if text is None:
        faults.add("CORRUPT", f"its header has no {NOTE}: nothing says which parts of the tensors it holds", file)
        return None
    try:
        note = _note.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        faults.add("CORRUPT", f"its header's {NOTE} is malformed: {error}", file)
        return None
    found: dict[str, Shape] = {}
    for name, entry in entries.items():
        part = note.get(name)
        if part is None or len(part.saved_offsets) != len(entry.shape) or any(at < 0 for at in part.saved_offsets):
            faults.add("CORRUPT", f"its header's {NOTE} does not say where this part begins", file, name)
            continue
        found[name] = logical(tuple(part.saved_offsets), entry.dtype)
    return found
