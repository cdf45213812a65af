"""How tensor-parallel ranks were cut, as the tables say: for checkpoints that do not say it themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transaxle.axes.layout.bind import Index, bind
from transaxle.axes.layout.divide import Division, divide
from transaxle.axes.notation.family import Line, Sizes
from transaxle.engine.checkpoint.recognise import recognise
from transaxle.engine.checkpoint.settings import CONFIG, LONGEST_CONFIG, Settings, parse_config
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.deepspeed.table_cuts import HINT, UNTOLD, Cutter, Divider
from transaxle.formats.storage.storage import Storage

_TP = "tp"


def stored_config(storage: Storage, file: str = CONFIG) -> Mapping[str, Any]:
    """Read the config.json of a checkpoint's folder, or another config beside it; empty where there is none.

    Raises:
        Refused: CORRUPT.
        StorageError: IO.
    """
    if file not in storage.names():
        return {}
    size = storage.size(file)
    if size > LONGEST_CONFIG:
        raise refuse("CORRUPT", f"a config of {size} bytes is longer than any real one", file=file)
    return parse_config(storage.read(file, 0, size), file)


def cutter(said: Settings) -> Cutter:
    """Return what asks the tables how a checkpoint's parameters are cut.

    Args:
        said: what the user says of the checkpoint.
    """

    def read(storage: Storage, names: Sequence[str]) -> Divider:
        config = stored_config(storage) if said.config is None else said.config
        try:
            found = recognise(names, config, said.families, said.family, said.dialect)
        except TransaxleError as error:
            if said.family or said.dialect:
                raise
            raise refuse("UNSUPPORTED", f"{UNTOLD}; {error.refusals[0].message}", hint=HINT) from None
        sizes = Sizes(found.family, config, said.axes)
        bound = bind(names, found.family, found.dialect, sizes, found.prefix)
        lines = {name: (line, index) for (line, _), held in bound.names.items() for index, name in held.items()}
        return _Tables(sizes, found.dialect.label, lines)

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
            raise refuse("UNSUPPORTED", message, tensor=name, hint="Add one: it names the axes that were cut.")
        line, position = self._lines[name]
        index = dict(zip(line.name.axes, position, strict=True))
        try:
            return divide(line.expression, self._cuts, self._sizes.at(index), shards)
        except TransaxleError as error:
            raise gathered(Refusal(r.code, r.message, Where(None, name), r.hint) for r in error.refusals) from None
