"""DeepSpeed without its C++: only its inference reduces through it, and it takes a minute and 3 GB to compile."""

from __future__ import annotations

_SHARED_MEMORY = "deepspeed_shm_comm"


def gloo_alone() -> None:
    """Let DeepSpeed send everything through gloo, as it does where it has no kernel; before it makes its groups."""
    import deepspeed.ops

    known = deepspeed.ops.__compatible_ops__
    assert _SHARED_MEMORY in known, sorted(known)
    known[_SHARED_MEMORY] = False
