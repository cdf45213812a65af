"""Guards against torch taking a rank's part of a parameter for the whole: tensors and hooks that refuse.

DeepSpeed wants ordinary tensors in a state dict, and pickles them. `torch.distributed.checkpoint` would save such a
tensor as if it were the whole parameter: one rank's part would be all that is saved. The moments that an optimizer
keeps for a part are ordinary tensors too, and nothing on them says so. But torch's `get_optimizer_state_dict` asks the
modules for their names before it returns, and there it is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from transaxle.errors import TransaxleError, refuse


class Alone(torch.Tensor):
    """A rank's part, or what is computed from it: `torch.distributed.checkpoint` is refused."""

    def new_empty(self, *args: Any, **kwargs: Any) -> Alone:
        """See torch; `deepcopy` calls this, and wants the same class."""
        empty: Alone = super().new_empty(*args, **kwargs).as_subclass(Alone)
        return empty

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


ASKED = "_fqn_modifiers"
"""Attribute of a module that only `torch.distributed.checkpoint.state_dict` looks for and calls."""
_OPTIMIZER = "_get_optim_state_dict"
"""Its function for the state of an optimizer."""
_MODEL, _FULL = "_get_model_state_dict", "full_state_dict"
"""Its function for the state of a model, and the option by which it would make whole tensors; it cannot here."""
_METHODS = {
    "save_pretrained": 'Call tx.save(model, path, to="hf") instead.',
    "resize_token_embeddings": "Resize the embeddings before the model is cut.",
}
"""Methods of a transformers model that would take a rank's part for the whole -> what to do instead."""


def no_names(name: str, *, always: bool) -> Mapping[str, str]:
    """Take the place of a module's `ASKED`, where the module has parts.

    Args:
        name: of a part in it.
        always: refuse weights too; otherwise the module's state dict says which parts they are.

    Raises:
        Refused: UNSUPPORTED.
    """
    caller = sys._getframe(2)  # of torch's function that calls this
    asks = caller.f_code.co_name
    whole = asks == _MODEL and getattr(caller.f_locals.get("info"), _FULL, False)
    if not always and asks != _OPTIMIZER and not whole:
        return {}
    message = "it is this rank's part of a parameter; torch's state dicts would take it, or its moments, for the whole"
    raise refuse("UNSUPPORTED", message, tensor=name, hint="Give model and optimizer to tx.save and tx.load.")


def refuse_methods(model: nn.Module) -> None:
    """Let a cut model refuse the methods of its class that do not know of parts."""
    for name, hint in _METHODS.items():
        if hasattr(model, name):
            model.__dict__[name] = partial(_no_method, name, hint)


def _no_method(name: str, hint: str, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise refuse("UNSUPPORTED", f"{name} would take this rank's part of a cut model for the whole", hint=hint)


def _refusal(name: str | None, tensor: torch.Tensor) -> TransaxleError:
    message = (
        f"{list(tensor.shape)} is this rank's part of a parameter, which torch's checkpoint would take for the whole"
    )
    hint = "Use tx.save and tx.load, or cut the model with dtensor=True."
    return refuse("UNSUPPORTED", message, tensor=name, hint=hint)
