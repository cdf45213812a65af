"""Calling a peer without its noise, and without what it changes in the process."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings, log lines or progress bars; random state, default dtype and environment come back."""
    from transformers.utils import logging as hub_logging

    environment, dtype, disabled = dict(os.environ), torch.get_default_dtype(), logging.root.manager.disable
    bars, hook = hub_logging.is_progress_bar_enabled(), sys.excepthook
    hub_logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if bars:
            hub_logging.enable_progress_bar()
        torch.set_default_dtype(dtype)
        sys.excepthook = hook  # a process group puts its own in front
        os.environ.clear()
        os.environ.update(environment)
