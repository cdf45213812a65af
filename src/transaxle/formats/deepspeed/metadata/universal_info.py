"""The metadata of one model, `universal_checkpoint_info`: its statements on each parameter, in either of its forms.

Either form alone suffices. Where a parameter is in both, both are reduced to the same geometry and must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from transaxle.errors import TransaxleError, Where, gathered, refuse
from transaxle.formats.deepspeed.checked_value import CheckedValue
from transaxle.formats.deepspeed.metadata import affine
from transaxle.formats.deepspeed.metadata.categories import Categories
from transaxle.formats.deepspeed.metadata.name_patterns import Patterns
from transaxle.formats.deepspeed.metadata.spread import Shape, Spread, folded, same


class UniversalInfo:
    """A checkpoint's own description of its tensor-parallel cuts.

    Args:
        node: the metadata.
        ranks: tensor-parallel degree.

    Raises:
        Refused: CORRUPT, UNSUPPORTED.
    """

    def __init__(self, node: CheckedValue, ranks: int) -> None:
        self._file = node.file
        self._ranks = ranks
        self._maps = affine.maps_of(node)
        self._patterns = Patterns(self._maps)
        self._categories = Categories(node)

    def spread(self, name: str, shards: Sequence[Shape]) -> Spread:
        """Return how a parameter is spread over the tensor-parallel ranks.

        Args:
            name: its name.
            shards: its shape on every rank.

        Raises:
            Refused: UNSUPPORTED where DeepSpeed could not describe it, or nothing does; CORRUPT where the two forms
                disagree; SHAPE_MISMATCH where what they say does not fit the shards.
        """
        reason = self._categories.unsupported(name)
        if reason is not None:
            message = f"DeepSpeed itself could not describe how it was cut: {reason}"
            raise refuse("UNSUPPORTED", message, file=self._file, tensor=name)
        patterns = self._patterns.match(name)
        if len(patterns) > 1:
            raise refuse(
                "CORRUPT", f"several patterns of the affine map match it: {patterns}", file=self._file, tensor=name
            )
        described = self._named(name, lambda: affine.read(self._maps[patterns[0]], self._ranks)) if patterns else None
        if described is not None:
            unfolded = described
            described = self._named(name, lambda: folded(unfolded, shards))
        if described is None and not self._categories.any:
            raise refuse("UNSUPPORTED", "the metadata does not say how it was cut", file=self._file, tensor=name)
        if described is None or (not described.scaled and self._categories.names(name)):
            listed = self._named(name, lambda: self._categories.spread(name, shards))
            described = listed if described is None else self._agreed(name, described, listed)
        return self._categories.unpadded(name, described)

    def _agreed(self, name: str, described: Spread, listed: Spread) -> Spread:
        """Check two descriptions of a parameter against each other; the affine one may add the order of rows."""
        finer = self._categories.only_rows(name) and _along(described, 1) and described.shards == listed.shards
        if described.shape != listed.shape or not (finer or same(described, listed)):
            message = (
                f"its two descriptions disagree in shape or cut: the affine map gives {list(described.shape)}, "
                f"the lists give {list(listed.shape)}"
            )
            raise refuse("CORRUPT", message, file=self._file, tensor=name)
        return described

    def _named(self, name: str, make: Callable[[], Spread]) -> Spread:
        """Make a spread; a refusal that names no tensor gets this one."""
        try:
            return make()
        except TransaxleError as error:
            raise gathered(
                replace(refusal, where=Where(refusal.where.file or self._file, name)) for refusal in error.refusals
            ) from None


def _along(spread: Spread, dim: int) -> bool:
    """Tell whether a parameter is cut along this dim only."""
    return all(
        size == full_size
        for blocks in spread.blocks
        for block in blocks
        for at, (size, full_size) in enumerate(zip(block.shape, spread.shape, strict=True))
        if at != dim
    )
