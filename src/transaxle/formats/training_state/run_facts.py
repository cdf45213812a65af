"""What a training run counts and schedules, kept beside the optimizer's state in formats without a place for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transaxle.formats.training_state.state import MEGATRON, RUN
from transaxle.formats.training_state.state_groups import PARAMS, decode, encode, settings_of

KEPT_RUN = "optim/run"
"""Key for the facts in the header of a file."""
_COUNTS = ("global_steps", "global_samples")


def facts_as_text(run: Mapping[str, Any]) -> str | None:
    """Return the facts as text; None where there are none.  Inverse: `facts_in`.

    Args:
        run: what the source says of its run, as drafts take it.
    """
    counts = {key: run[key] for key in _COUNTS if isinstance(run.get(key), int)}
    facts = {RUN: counts, MEGATRON: run.get(MEGATRON) or {}}
    return encode([{**facts, PARAMS: []}]) if any(facts.values()) else None


def facts_in(text: str) -> dict[str, Any]:
    """Return the facts as a container's metadata keep them; none for any other text."""
    groups = decode(text) or []
    found = settings_of(groups[0]) if len(groups) == 1 else {}
    facts = {key: found[key] for key in (RUN, MEGATRON) if isinstance(found.get(key), dict) and found[key]}
    counts = facts.get(MEGATRON, {}).get("counters", {})
    whole = [*facts.get(RUN, {}).values(), *(counts.values() if isinstance(counts, dict) else [None])]
    whole += [facts[MEGATRON]["iteration"]] if "iteration" in facts.get(MEGATRON, {}) else []
    return facts if all(type(count) is int and count >= 0 for count in whole) else {}
