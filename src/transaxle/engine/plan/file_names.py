"""The names of the files that a target gets: each must be a file of its own on every file system, and none is ours.

`A` and `a` are one file on many a disk, and so are an `é` of one character and one of two. A checkpoint is copied from
one disk to another, so such pairs are refused wherever they are written.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from transaxle.errors import Refusal, Where
from transaxle.formats.catalog.sidecar_files import MANIFEST
from transaxle.formats.staging.place import SCRATCH

_HINT = "Rename one of them in the source."


def clashing(names: Iterable[str]) -> list[Refusal]:
    """Return a refusal for every name that another one, or a file of ours, would be on some file system.

    Args:
        names: of files in folders, `a/b/c`, without those of our own.
    """
    spelled = {_folded(own): own for own in (MANIFEST, SCRATCH)}
    whole = dict.fromkeys(spelled.values(), True)
    problems = []
    for name in names:
        parts = name.split("/")
        for count in range(1, len(parts) + 1):
            path, is_file = "/".join(parts[:count]), count == len(parts)
            known = spelled.setdefault(_folded(path), path)
            kind = whole.setdefault(path, is_file)
            if known != path or kind != is_file or known in (MANIFEST, SCRATCH):
                message = f"it would be one file with {known!r} where file systems do not tell such names apart"
                if known in (MANIFEST, SCRATCH):
                    message = f"the name {known} is one of our own"
                problems.append(Refusal("NAME_COLLISION", message, Where(name), _HINT))
                break
    return problems


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
