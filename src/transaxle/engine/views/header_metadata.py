"""Header notes: what a container's metadata says about encoded tensors, removed where it is no longer true.

torchao's files describe each tensor in the header's metadata, and list the names of all. The description of a tensor
that was decoded or renamed must not be carried over.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from transaxle.encodings.conventions.torchao_convention import NAMES
from transaxle.formats.strict_json import parsed


def without_notes(metadata: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """Return a container's metadata without the notes on some tensors.

    Args:
        metadata: of one file, or of all together, where a key on which they differ has `file:` before it.
        names: the tensors; None: all.
    """
    remaining = dict(metadata)
    for key in metadata:
        if key != NAMES and not key.endswith(f":{NAMES}"):
            continue
        try:
            listed = [str(name) for name in parsed(metadata[key])]
        except (TypeError, ValueError):
            continue
        removed = listed if names is None else [name for name in listed if name in names]
        still_listed = [name for name in listed if name not in set(removed)]
        if still_listed:
            remaining[key] = json.dumps(still_listed)
        else:
            del remaining[key]
        for name in removed:
            remaining.pop(name, None)
    return remaining


def joined(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container's metadata with one joint list of tensors instead of one list per file."""
    lists = [key for key in metadata if key.endswith(f":{NAMES}")]
    try:
        names = dict.fromkeys(str(name) for key in lists for name in parsed(metadata[key]))
    except (TypeError, ValueError):
        return dict(metadata)
    joined_notes = {key: value for key, value in metadata.items() if key not in lists}
    return {**joined_notes, NAMES: json.dumps(list(names))} if lists else joined_notes
