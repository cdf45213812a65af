"""What stands in the state dict of a model cut for DeepSpeed: this rank's part, as a tensor that is nobody's whole.

DeepSpeed wants ordinary tensors there, and pickles them as such. `torch.distributed.checkpoint` would take each for the
whole, and one rank's part would be all that it saves.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from transaxle.errors import TransaxleError, refuse


class Alone(torch.Tensor):
    """A part, and what is computed of it, that `torch.distributed.checkpoint` refuses."""

    def new_empty(self, *args: Any, **kwargs: Any) -> Alone:
        """See torch: `deepcopy` begins with this, and wants the same class."""
        made: Alone = super().new_empty(*args, **kwargs).as_subclass(Alone)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __create_write_items__(self, name: str, value: Any) -> NoReturn:
        """Refuse to be saved.

        Raises:
            Refused: UNSUPPORTED.
        """
        raise _refusal(name, self)

    def __create_chunk_list__(self) -> NoReturn:
        """Refuse to be loaded.

        Raises:
            Refused: UNSUPPORTED.
        """
        raise _refusal(None, self)


def _refusal(name: str | None, tensor: torch.Tensor) -> TransaxleError:
    message = f"{list(tensor.shape)} is this rank's part of a parameter, and torch's checkpoint takes it for the whole"
    hint = "tx.save and tx.load the model, or cut it with dtensor=True"
    return refuse("UNSUPPORTED", message, tensor=name, hint=hint)
