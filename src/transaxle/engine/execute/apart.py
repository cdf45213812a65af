"""Source and target stay apart: what is read is never written to, by whatever path it is reached.

Replacing a source by what is made of it would leave the result as the only copy, whatever was lost on the way; and a
target inside the source, or around it, changes or deletes what is being read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.remote.url import address, is_url, local_path

_HINT = "Choose another target; once the new checkpoint is verified, you can remove the old one."


def refuse_together(checkpoint: Checkpoint, target: str) -> None:
    """Refuse a target that is the source, lies in it or around it, or holds a file that was named beside it.

    Args:
        checkpoint: the source.
        target: path or URL, as typed.

    Raises:
        UsageError: EXISTS, with every reason.
    """
    found = list(dict.fromkeys(_reasons(checkpoint, target)))
    if found:
        raise gathered(Refusal("EXISTS", reason, Where(target), _HINT) for reason in found)


def _reasons(checkpoint: Checkpoint, target: str) -> Iterator[str]:
    source = checkpoint.path
    here, there = _here(source), _here(target)
    if here is None or there is None:
        if here is there:
            yield from _remote(source, target)
        return
    target_path, source_path = Path(os.path.realpath(there)), Path(os.path.realpath(here))
    if _same(source_path, target_path):
        yield f"the target is the source {source} itself, which is never changed"
    elif source_path.is_dir() and any(_same(source_path, above) for above in target_path.parents):
        yield f"the target lies inside the source {source}, which is never changed"
    elif any(_same(target_path, above) for above in source_path.parents):
        yield f"the target contains the source {source}, which would be deleted"
    else:
        yield from _files(checkpoint, source_path, target_path)
    for name in checkpoint.settings.files:
        if target_path in (named := Path(os.path.realpath(name)), *named.parents):
            yield f"the target contains {name}, which would be deleted"


def _files(checkpoint: Checkpoint, source: Path, target: Path) -> Iterator[str]:
    """Yield a reason for the first file of the source that the target holds through a link."""
    container = checkpoint.container
    folder = source if source.is_dir() else source.parent
    for name in (*container.files, *container.carried):
        file = Path(os.path.realpath(folder / name))
        if _same(target, file) or target in file.parents:
            yield f"the source's {name} is a link to {file}, which would be replaced"
            return


def _remote(source: str, target: str) -> Iterator[str]:
    here, there = address(source), address(target)
    if here == there:
        yield f"the target is the source {source} itself, which is never changed"
    elif there.startswith(f"{here}/"):
        yield f"the target lies inside the source {source}, which is never changed"
    elif here.startswith(f"{there}/"):
        yield f"the target contains the source {source}, which would be deleted"


def _here(path: str) -> str | None:
    """Return where a path leads on this machine; None for another one's."""
    return local_path(path) if is_url(path) else path


def _same(one: Path, other: Path) -> bool:
    """Tell whether two paths lead to one file or folder, also where their names do not show it."""
    try:
        return one == other or one.samefile(other)
    except OSError:
        return False
