"""Notes: what a container says of its encoded tensors beside them, which must go where it is no longer so.

torchao's files describe each tensor in the header's metadata, and list the names of all. A tensor that was decoded, or
has another name, is not that tensor any more.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from transaxle.encodings.conventions.torchao_convention import NAMES


def without_notes(metadata: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """Return a container's metadata without what it says of some tensors.

    Args:
        metadata: of one file, or of all together, where a key on which they differ has `file:` before it.
        names: the tensors; None: all.
    """
    found = dict(metadata)
    for key in metadata:
        if key != NAMES and not key.endswith(f":{NAMES}"):
            continue
        try:
            listed = [str(name) for name in json.loads(metadata[key])]
        except (TypeError, ValueError):
            continue
        gone = listed if names is None else [name for name in listed if name in names]
        left = [name for name in listed if name not in set(gone)]
        if left:
            found[key] = json.dumps(left)
        else:
            del found[key]
        for name in gone:
            found.pop(name, None)
    return found


def joined(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container's metadata with one list of all tensors, where each file has a list of its own."""
    lists = [key for key in metadata if key.endswith(f":{NAMES}")]
    try:
        names = dict.fromkeys(str(name) for key in lists for name in json.loads(metadata[key]))
    except (TypeError, ValueError):
        return dict(metadata)
    found = {key: value for key, value in metadata.items() if key not in lists}
    return {**found, NAMES: json.dumps(list(names))} if lists else found
