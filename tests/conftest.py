"""What every test starts from: no network, one native thread, Ctrl-C, and process state put back afterwards."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

# Before torch is imported anywhere: xdist already uses the cores, and peers must never reach for the hub.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)
# A shell without job control starts what is followed by `&` with Ctrl-C ignored, and so would every program here.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none; torch is imported only if such a test is here."""
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _process_state() -> Iterator[None]:
    """Put back environment, working directory and random state, also when the test fails."""
    environment, here = dict(os.environ), Path.cwd()
    state, numpy_state = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    torch_state = (torch.get_default_dtype(), torch.get_rng_state()) if torch else None
    yield
    os.chdir(here)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    random.setstate(state)
    np.random.set_state(numpy_state)
    if torch and torch_state:
        torch.set_default_dtype(torch_state[0])
        torch.set_rng_state(torch_state[1])
