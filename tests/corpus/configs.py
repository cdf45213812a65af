"""Configs whose sizes are no sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.checkpoints import CONFIG, tiny
from tests.corpus.case import Make


def sized(**sizes: object) -> Make:
    """Write the tiny checkpoint with another config."""

    def make(folder: Path) -> None:
        tiny(folder)
        (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes}))

    return make


CASES = {
    "a negative size": sized(hidden_size=-16),
    "a size of truth": sized(num_hidden_layers=True),
    "a size that is no number": sized(hidden_size=math.nan),
    "a size without end": sized(hidden_size=math.inf),
    "a size of fractions": sized(hidden_size=16.5),
}
