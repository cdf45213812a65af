"""The state of random rounding that a weight has: a key, and how often gradients were rounded for it.

The state is a buffer of the weight, int64 [2] (of a stack [E, 2]), so that it is saved, cut and loaded with the codes:
a run that resumes draws the numbers that it would have drawn. The key is a hash of the recipe's seed, the weight's name
and, for experts, the number among all of them; so it does not depend on how the experts are packed, or on which rank
they are.

FSDP2 gathers a copy of a stack's states. A copy knows the buffers that it was made of (`Frame.echoes`) and counts there
too.
"""

from __future__ import annotations

from hashlib import blake2b

import torch

from transaxle.quant.frame.buffers import ROUNDING
from transaxle.quant.frame.frame import Frame

_CALLS = 1
"""Position of the number of calls in a state; the key stands before it."""
_KEY_BYTES = 8


def key_of(seed: int, name: str, number: int) -> int:
    """Return the key of a weight as a signed integer of 64 bits.

    Args:
        seed: of the recipe.
        name: of the weight; of an expert, what all experts have in common.
        number: of the expert; 0 for any other weight.
    """
    text = f"{seed}/{number}/{name}".encode()
    return int.from_bytes(blake2b(text, digest_size=_KEY_BYTES).digest(), "little", signed=True)


def state_of(frame: Frame) -> torch.Tensor | None:
    """Return the buffer, int64 [2] or [E, 2]; None for recipes that do not round at random."""
    return frame.cut.get(ROUNDING, frame.shared.get(ROUNDING))


def begin(frame: Frame) -> None:
    """Give a frame a state that has not rounded anything, with the key, or the keys, that its identity says."""
    seed = frame.quantizer.rounding_seed
    if seed is None:
        return
    name, first = frame.identity
    numbers = range(first, first + 1)
    if frame.matrix is not None:
        numbers = range(first + frame.start, first + frame.start + frame.rows)
    keys = [[key_of(seed, name, number), 0] for number in numbers]
    states = torch.tensor(keys, dtype=torch.int64, device=frame.device).view(-1, 2)
    put_state(frame, states[0] if frame.matrix is None else states)


def put_state(frame: Frame, state: torch.Tensor) -> None:
    """Give a frame a state."""
    (frame.shared if frame.matrix is None else frame.cut)[ROUNDING] = state


def fresh(state: torch.Tensor) -> torch.Tensor:
    """Return a copy of a state with the same keys and no calls."""
    copy = state.clone()
    forget(copy)
    return copy


def forget(state: torch.Tensor) -> None:
    """Set the number of calls to 0, in place."""
    if not state.is_meta:
        state[..., _CALLS] = 0


def taken(frame: Frame) -> torch.Tensor:
    """Return a copy of the state, and count a call: in the frame, and in what it was copied from."""
    state = state_of(frame)
    assert state is not None
    now = state.clone()
    counted = {state.untyped_storage().data_ptr()}
    state[..., _CALLS] += 1
    for echo in frame.echoes:
        if echo.untyped_storage().data_ptr() not in counted:
            counted.add(echo.untyped_storage().data_ptr())
            echo[..., _CALLS] += 1
    return now
