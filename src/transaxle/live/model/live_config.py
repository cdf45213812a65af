"""The config of a live model: what becomes the checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from transaxle.arguments import Configuration
from transaxle.live.model.state_tensors import State
from transaxle.live.transport.world import World
from transaxle.torch_tensors.torch_arguments import innermost

_LISTED = 4
"""Keys that are named where two configs differ."""


def shared_config(
    state: State, given: Mapping[str, Any] | None, world: World, *, whole: bool = False
) -> Mapping[str, Any] | None:
    """Return the config of a model, the same on all ranks; collective.

    Args:
        state: the model; a transformers model has a config.
        given: what the user says it is; None: the model's own, on the first rank that has one.
        world: the ranks.
        whole: with what is as the class has it by default, which config.json leaves out.
    """
    own = own_config(state, whole=whole) if given is None else given
    return next((each for each in world.gather(own, repr) if each is not None), None)


def own_config(state: State, *, whole: bool = False) -> Mapping[str, Any] | None:
    """Return the config that a model carries, as config.json holds it, or the `whole` of it; None where it has none."""
    model = innermost(state) if isinstance(state, nn.Module) else state
    config = getattr(model, "config", None)
    said = None if whole else getattr(config, "to_diff_dict", None)
    as_mapping = said or getattr(config, "to_dict", None)
    if as_mapping is None:
        return None
    mapping = dict(as_mapping())
    if not mapping.get("architectures"):
        mapping["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    return mapping


def sizes_that_differ(state: State, stored: Mapping[str, Any]) -> str:
    """Return the sizes that a model's config and that of a source both give, and give differently; "" for none."""
    config = getattr(innermost(state) if isinstance(state, nn.Module) else state, "config", None)
    mine = config.to_dict() if isinstance(config, Configuration) else {}
    pairs = [(key, value, stored[key]) for key, value in mine.items() if key in stored and type(value) is int]
    unlike = [f"{key} is {here} here, {there} in the source" for key, here, there in pairs if here != there]
    if len(unlike) > _LISTED:
        unlike[_LISTED:] = [f"{len(unlike) - _LISTED} more"]
    return "; ".join(unlike)
