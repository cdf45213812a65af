"""accelerate's FSDP on CPUs, where by itself it falls back to DDP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.journeys.trained_models import launched_as


@contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """Let this process look to accelerate like one that torchrun has started, on a machine whose devices FSDP takes.

    One that is alone is left as it is.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def with_fsdp(state: Any, *args: Any, **said: Any) -> None:
        made(state, *args, **said)
        plugin = said.get("fsdp_plugin")
        if plugin is not None:
            state.fsdp_plugin = plugin
            for shared in (AcceleratorState._shared_state, PartialState._shared_state):
                shared["distributed_type"] = DistributedType.FSDP

    told = launched_as(rank, world) if world > 1 else {}
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with patch.dict(os.environ, told), patch.object(AcceleratorState, "__init__", with_fsdp):
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
