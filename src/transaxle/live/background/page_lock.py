"""Page-locked memory: what a GPU copies into by itself, at the full speed of the bus."""

from __future__ import annotations

from contextlib import suppress

import torch

from transaxle.torch_tensors.local_tensor import Bytes


class PageLock:
    """Locks memory for CUDA until it is released; where CUDA cannot, copies are slower, and nothing else differs.

    Args:
        memory: it must stay mapped until it is released.
    """

    def __init__(self, memory: Bytes) -> None:
        self._address = memory.ctypes.data if self._register(memory) else None

    @staticmethod
    def _register(memory: Bytes) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0:
            return True
        with suppress(RuntimeError):  # torch would hold the error against the next launch
            torch.zeros(1, device="cuda").add_(1)
        return False

    def release(self) -> None:
        """Let the memory go; it may be unmapped afterwards."""
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = None
