"""Where a path leads: to this machine or, if it is a URL, to a service. The one place that decides it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from transaxle.errors import refuse
from transaxle.formats.remote.url import is_url, local_path, scheme
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import Storage

if TYPE_CHECKING:
    from transaxle.formats.staging.belongings import Overwrite
    from transaxle.formats.staging.staging import Staging
    from transaxle.formats.staging.upload import Upload

    Stage = Staging | Upload
    """A checkpoint in the making."""


def storage_at(path: str | os.PathLike[str]) -> Storage:
    """Open what a path or URL denotes for reading; raises as `LocalStorage` or `RemoteStorage`."""
    path = _on_this_machine(os.fspath(path))
    if not is_url(path):
        return LocalStorage(path)
    from transaxle.formats.remote.remote_storage import RemoteStorage

    return RemoteStorage(path)


def staging_at(
    target: str | os.PathLike[str], *, overwrite: Overwrite = False, resume: bool = False, sync: bool = True
) -> Stage:
    """Begin a checkpoint at a path or URL; raises as `Staging` or `Upload`.

    What a service has taken is durable: `sync` is about this machine.
    """
    target = _on_this_machine(os.fspath(target))
    if is_url(target):
        from transaxle.formats.staging.upload import Upload

        return Upload(target, overwrite=overwrite, resume=resume)
    from transaxle.formats.staging.staging import Staging

    return Staging(target, overwrite=overwrite, resume=resume, sync=sync)


def _on_this_machine(path: str) -> str:
    """Return the local path that a `file://` URL denotes; anything else as it is."""
    if not is_url(path) or scheme(path).lower() != "file":
        return path
    found = local_path(path)
    if found is None:
        raise refuse("UNSUPPORTED", "the URL names a file on another machine", file=path)
    return found
