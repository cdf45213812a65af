"""Locations: whether a path leads to this machine or, as a URL, to a service; decided only here."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from transaxle.errors import refuse, without_secrets
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import Storage, is_url
from transaxle.formats.store.service import HUB, local_path, scheme

if TYPE_CHECKING:
    from transaxle.arguments import Overwrite
    from transaxle.formats.store.shared_upload import SharedUpload
    from transaxle.formats.store.staging import Staging
    from transaxle.formats.store.upload import Upload

    Stage = Staging | Upload
    """A checkpoint in the making."""
    SharedStage = Staging | SharedUpload
    """One that several workers write."""


_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)(?:/tree/([^/?#]+))?/?")
"""The page of a repository in a browser: owner and name, and the revision that it shows."""


def storage_at(path: str | os.PathLike[str]) -> Storage:
    """Open a path or URL for reading; raises as `LocalStorage`, `RemoteStorage` or `HubService`.

    Raises:
        Refused: UNSUPPORTED for the page of a repository, which holds no files.
    """
    path = on_this_machine(os.fspath(path))
    if not is_url(path):
        return LocalStorage(path)
    if page := _PAGE.fullmatch(path):
        hint = f"Write {HUB}://{page[1]}{f'@{page[2]}' if page[2] else ''}"
        raise refuse("UNSUPPORTED", "this is the page of a repository, for browsers", file=path, hint=hint)
    from transaxle.formats.store.reading import RemoteStorage

    if scheme(path).lower() == HUB:
        from transaxle.formats.store.hub import HubService

        return RemoteStorage(path, service=HubService(path))
    return RemoteStorage(path)


def staging_at(
    target: str | os.PathLike[str], *, overwrite: Overwrite = False, resume: bool = False, sync: bool = True
) -> Stage:
    """Start a checkpoint at a path or URL; raises as `Staging` or `Upload`.

    `sync` concerns this machine only: what a service has accepted is durable.
    """
    target = on_this_machine(os.fspath(target))
    if is_url(target):
        if scheme(target).lower() == HUB:
            hint = "Convert to a local folder, then upload it:  hf upload OWNER/NAME FOLDER"
            raise refuse("UNSUPPORTED", "nothing is written to a hub", file=target, hint=hint)
        from transaxle.formats.store.upload import Upload

        return Upload(target, overwrite=overwrite, resume=resume)
    from transaxle.formats.store.staging import Staging

    return Staging(target, overwrite=overwrite, resume=resume, sync=sync)


def shared_staging_at(
    target: str | os.PathLike[str], *, overwrite: Overwrite = False, resume: bool = False, sync: bool = True
) -> SharedStage:
    """Start a checkpoint at a path or URL that several workers write; raises as `Staging` or `SharedUpload`."""
    target = on_this_machine(os.fspath(target))
    if is_url(target):
        from transaxle.formats.store.shared_upload import SharedUpload

        return SharedUpload(target, overwrite=overwrite, resume=resume)
    from transaxle.formats.store.staging import Staging

    return Staging(target, overwrite=overwrite, resume=resume, sync=sync)


def takes_parts(target: str) -> bool:
    """Tell whether a target is on a service to which any process can send parts of a file that another has begun."""
    if not is_url(target):
        return False
    from transaxle.formats.store.service import S3

    return scheme(target).lower() in S3


def on_this_machine(path: str) -> str:
    """Return the local path of a `file://` URL; any other path or URL unchanged."""
    if not is_url(path) or scheme(path).lower() != "file":
        return path
    local = local_path(path)
    if local is None:
        raise refuse("UNSUPPORTED", "the URL names a file on another machine", file=path)
    return local


def shown(path: str) -> str:
    """Return a path as reports and errors show it: a URL without its secrets, any other path as it is."""
    return without_secrets(path) if is_url(path) else path
