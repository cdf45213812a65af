"""How tensor-parallel ranks were cut according to the tables, for checkpoints that do not record it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transaxle.axes.layout.bind import Index, bind
from transaxle.axes.layout.divide import Division, divide
from transaxle.axes.notation.family import Line, Sizes
from transaxle.engine.checkpoint.recognise import check_same, recognise
from transaxle.engine.checkpoint.settings import Settings, stored_config
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.deepspeed.spread import HINT, UNTOLD, Cutter, Divider
from transaxle.formats.storage.storage import Storage

_TP = "tp"


def cutter(settings: Settings) -> Cutter:
    """Return a function that asks the tables how a checkpoint's parameters are cut.

    Args:
        settings: the user's settings for the checkpoint.
    """

    def read(storage: Storage, names: Sequence[str], said: Mapping[str, Any]) -> Divider:
        config = settings.config
        if config is None:
            config = stored_config(storage) or said
        check_same(config, said, settings.axes)
        try:
            reading = recognise(names, config, settings.families, settings.family, settings.dialect)
        except TransaxleError as error:
            if settings.family or settings.dialect:
                raise
            raise refuse("UNSUPPORTED", f"{UNTOLD}; {error.refusals[0].message}", hint=HINT) from None
        sizes = Sizes(reading.family, config, settings.axes)
        bound = bind(names, reading.family, reading.dialect, sizes, reading.prefix)
        lines = {
            name: (line, index)
            for (line, _), names_of_line in bound.names.items()
            for index, name in names_of_line.items()
        }
        return _Tables(sizes, reading.dialect.label, lines)

    return read


class _Tables:
    """Divides parameters by the lines of a dialect."""

    def __init__(self, sizes: Sizes, dialect: str, lines: Mapping[str, tuple[Line, Index]]) -> None:
        self._sizes, self._lines = sizes, lines
        self._cuts = tuple(cut for cut in sizes.family.cuts if cut.mesh == _TP)
        self._table = f"{sizes.family.name}, dialect {dialect},"

    def __call__(self, name: str, shards: Sequence[tuple[int, ...]]) -> Division:
        if name not in self._lines:
            raise refuse("UNSUPPORTED", f"{UNTOLD}; {self._table} has no line for it", tensor=name, hint=HINT)
        if not self._cuts:
            message = f"{UNTOLD}; {self._table} has no `cut tp` statement"
            raise refuse(
                "UNSUPPORTED",
                message,
                tensor=name,
                hint="Add one that names the axes over which tensor parallelism splits.",
            )
        line, position = self._lines[name]
        index = dict(zip(line.name.axes, position, strict=True))
        try:
            return divide(line.expression, self._cuts, self._sizes.at(index), shards)
        except TransaxleError as error:
            raise gathered(Refusal(r.code, r.message, Where(None, name), r.hint) for r in error.refusals) from None
