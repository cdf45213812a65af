"""How parameters are cut that no metadata describes: as the table of their model says, or the user's rules.

Tables are not known here. Whoever opens a checkpoint may hand in a `Cutter`, which is asked once for all names, and
then name by name with the shapes of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transaxle.axes.layout.divide import Division
from transaxle.errors import refuse
from transaxle.formats.deepspeed.metadata.spread import Shape, Spread, cut
from transaxle.formats.storage.storage import Storage

Divider = Callable[[str, Sequence[Shape]], Division]
"""Name of a parameter and its shape on every rank -> how it is cut; raises a refusal where that is not known."""
Cutter = Callable[[Storage, Sequence[str], Mapping[str, Any]], Divider]
"""The checkpoint's files, the names of its parameters, and what the files say of sizes where there is no config.json ->
what cuts them; raises where no table reads the names."""

UNTOLD = "the checkpoint does not say how it was cut over the tensor-parallel ranks, so they cannot be joined"
HINT = (
    "The table of the model's family can say it: give --family NAME and --config FILE, or --rules FILE for a model "
    "without a table. The guide on DeepSpeed checkpoints has an example."
)


def untold(_storage: Storage, names: Sequence[str], _config: Mapping[str, Any]) -> Divider:
    """Refuse: the cutter where nothing is known of tables.

    Raises:
        Refused: UNSUPPORTED.
    """
    raise refuse("UNSUPPORTED", UNTOLD, tensor=names[0] if names else None, hint=HINT)


class TableCuts:
    """The tensor-parallel cuts that a table states, in place of a checkpoint's own metadata.

    Args:
        cutter: asks the tables.
        storage: the checkpoint's files.
        names: of all its parameters.
        config: what the files say of sizes, under the keys of a config.json.

    Raises:
        Refused, UsageError: where no table reads the names.
    """

    def __init__(
        self, cutter: Cutter, storage: Storage, names: Sequence[str], config: Mapping[str, Any] | None = None
    ) -> None:
        self._divide = cutter(storage, names, config or {})

    def spread(self, name: str, shards: Sequence[Shape]) -> Spread:
        """Return how a parameter is spread over the tensor-parallel ranks.

        Args:
            name: its name.
            shards: its shape on every rank.

        Raises:
            Refused: UNSUPPORTED where the table does not know it; SHAPE_MISMATCH where it knows no such cut.
            UsageError: UNKNOWN_AXIS, AMBIGUOUS where more must be said.
        """
        division = self._divide(name, shards)
        return cut(division.shape, division.dim, division.rule, len(shards))
