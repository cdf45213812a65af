"""What tests of a GPU share: what waits for the device is an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Let each operation that waits for the device raise a RuntimeError.

    Once it is turned on, torch warns that it does not know all of them: as an error, that warning would leave it on for
    the tests that follow.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
