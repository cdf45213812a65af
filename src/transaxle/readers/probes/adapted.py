"""What a state-dict adapter of a trainer makes of the files, against the state dict of the trainer's own model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_HEAD = "lm_head.weight"


def compare_files(
    model: Any,
    adapter: Any,
    files: dict[str, Any],
    tied: bool,
    result: dict[str, Any],
    derived: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Compare the tensors of hub files with those for which the adapter asks, and what it makes of them with the model.

    Args:
        model: the trainer's model, on the meta device.
        adapter: its adapter, with `to_hf` and `from_hf`; None if the model's own names are those of the files.
        files: tensor name -> tensor on the meta device.
        tied: whether the config ties the head, so that a copy of it in the files is not needed.
        result: what the probe reports; gets `missing`, `unexpected`, `mismatched`, `ignored`.
        derived: tensor name -> tensor that the trainer makes of others where the files lack it.
    """
    state = model.state_dict()
    hub_state = dict(state) if adapter is None else adapter.to_hf(dict(state))
    files = {**{name: value for name, value in derived.items() if name in hub_state}, **files}
    compare_states(hub_state, files, result)
    without = getattr(adapter, "from_hf_map", {})
    skipped = {name for name in result["unexpected"] if without.get(re.sub(r"\d+", "{}", name), "") is None}
    skipped |= {_HEAD} & set(result["unexpected"]) if tied else set()
    result["ignored"] = sorted(skipped)
    result["unexpected"] = sorted(set(result["unexpected"]) - skipped)
    if adapter is None or result["missing"] or result["mismatched"]:
        return
    own_state = adapter.from_hf({name: files[name] for name in hub_state})
    filled: dict[str, Any] = {}
    compare_states(state, own_state, filled)
    fresh = {name for name, _ in model.named_buffers()}  # trainers begin them at zero if no file has them
    result["missing"], result["mismatched"] = sorted(set(filled["missing"]) - fresh), filled["mismatched"]
    result["unexpected"] = sorted({*result["unexpected"], *filled["unexpected"]})


def compare_states(expected: dict[str, Any], actual: dict[str, Any], result: dict[str, Any]) -> None:
    """Report names that only one of two state dicts has, and tensors of other shapes."""
    result["missing"] = sorted(set(expected) - set(actual))
    result["unexpected"] = sorted(set(actual) - set(expected))
    result["mismatched"] = [
        [name, list(actual[name].shape), list(value.shape)]
        for name, value in expected.items()
        if name in actual and actual[name].shape != value.shape
    ]
