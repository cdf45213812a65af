"""Model types of transformers whose cut models were shown to compute what the whole ones do.

A table says which axes may be cut. What a model does between its layers no table says: statistics over a cut axis, or
heads that work in pairs, make a cut model another one, without an error. So each type is tried, and the list of those
whose logits and gradients are the same is part of the package.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from torch import nn

from transaxle.errors import refuse

RECORD_NAME = "proven_types.json"
"""The list; `python -m tests.oracles.every_cut` writes it."""
_OWNER = "transformers.models."


@cache
def proven_types() -> frozenset[str]:
    """Return the model types that were tried, and are exact."""
    return frozenset(json.loads(files(__package__).joinpath(RECORD_NAME).read_text("utf-8"))["types"])


def check_type(model: nn.Module) -> None:
    """Refuse a model of transformers of which nobody has shown that it can be cut; other models are their owners'.

    Raises:
        Refused: UNSUPPORTED.
    """
    if not any(type(module).__module__.startswith(_OWNER) for module in model.modules()):
        return
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type in proven_types():
        return
    known = "its logits or gradients differ from those of the whole model, or it was not possible to try"
    hint = "Shard it with FSDP2 instead. The types that can be cut are in the how-to on tensor parallelism."
    raise refuse("UNSUPPORTED", f"models of type {model_type} are not cut over ranks: {known}", hint=hint)
