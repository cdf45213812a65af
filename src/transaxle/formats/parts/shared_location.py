"""Where several workers write a checkpoint to: a folder that all see, or a service."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from transaxle.arguments import Overwrite
from transaxle.formats.staging.location import on_this_machine
from transaxle.formats.staging.staging import Staging
from transaxle.formats.storage.storage import is_url

if TYPE_CHECKING:
    from transaxle.formats.parts.shared_upload import SharedUpload

    SharedStage = Staging | SharedUpload
    """A checkpoint that several workers write."""


def shared_staging_at(
    target: str | os.PathLike[str], *, overwrite: Overwrite = False, resume: bool = False, sync: bool = True
) -> SharedStage:
    """Start a checkpoint at a path or URL that several workers write; raises as `Staging` or `SharedUpload`."""
    target = on_this_machine(os.fspath(target))
    if is_url(target):
        from transaxle.formats.parts.shared_upload import SharedUpload

        return SharedUpload(target, overwrite=overwrite, resume=resume)
    return Staging(target, overwrite=overwrite, resume=resume, sync=sync)
