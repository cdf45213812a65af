"""The config of a live model: what becomes the checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transaxle.live.leaves import State
from transaxle.live.world import World


def shared_config(state: State, given: Mapping[str, Any] | None, world: World) -> Mapping[str, Any] | None:
    """Return the config of a model, the same on all ranks; collective.

    Args:
        state: the model; a transformers model has a config.
        given: what the user says it is; None: the model's own, on the first rank that has one.
        world: the ranks.
    """
    own = own_config(state) if given is None else given
    return next((each for each in world.gather(own) if each is not None), None)


def own_config(state: State) -> Mapping[str, Any] | None:
    """Return the config that a model carries, as config.json holds it; None where it has none."""
    config = getattr(state, "config", None)
    made = getattr(config, "to_diff_dict", None) or getattr(config, "to_dict", None)
    if made is None:
        return None
    found = dict(made())
    if not found.get("architectures"):
        found["architectures"] = [type(state).__name__.removeprefix("FSDP")]
    return found
