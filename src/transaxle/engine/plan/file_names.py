"""File names of a target: each must be distinct on every file system, and none may be one of ours.

`A` and `a` are one file on many file systems, and so are an `é` of one character and one of two. Checkpoints are copied
between disks, so such pairs are refused wherever they are written.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from transaxle.errors import Refusal, Where
from transaxle.formats.catalog.sidecar_files import MANIFEST
from transaxle.formats.staging.place import SCRATCH

_HINT = "Rename one of them in the source."


def clashing(names: Iterable[str]) -> list[Refusal]:
    """Return a refusal for every name that some file system would confuse with another one or with a file of ours.

    Args:
        names: paths in the target folder, `a/b/c`, without our own files.
    """
    spelled = {_folded(reserved): reserved for reserved in (MANIFEST, SCRATCH)}
    is_file_at = dict.fromkeys(spelled.values(), True)
    problems = []
    for name in names:
        parts = name.split("/")
        for count in range(1, len(parts) + 1):
            path, is_file = "/".join(parts[:count]), count == len(parts)
            spelling = spelled.setdefault(_folded(path), path)
            kind = is_file_at.setdefault(path, is_file)
            if spelling != path or kind != is_file or spelling in (MANIFEST, SCRATCH):
                message = f"on file systems that ignore case or accents it would be the same file as {spelling!r}"
                if spelling in (MANIFEST, SCRATCH):
                    message = f"the name {spelling} is reserved for Transaxle's own files"
                problems.append(Refusal("NAME_COLLISION", message, Where(name), _HINT))
                break
    return problems


def _folded(name: str) -> str:
    """Return the key that names share if some file system treats them as equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
