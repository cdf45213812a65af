"""Full-precision weights: the copies of low-precision weights that an optimizer updates, `optim/<parameter>/fp32`."""

from __future__ import annotations

from msgspec.structs import replace

from transaxle.errors import Faults
from transaxle.formats.catalog import Container, Entry
from transaxle.formats.training_state.state import OPTIMIZER

MASTER = "fp32"
"""State: the full-precision copy of a low-precision weight."""
_FULL = frozenset({"F32", "F64"})


def with_full_precision(container: Container, *, strict: bool) -> Container:
    """Return a container whose weights are the copies in full precision that the optimizer keeps.

    Args:
        container: with optimizer state by parameter.
        strict: refuse weights of low precision that have no such copy, instead of keeping them.

    Raises:
        Refused: UNSUPPORTED for each of these.
    """
    faults = Faults()
    entries: dict[str, Entry] = {}
    for name, entry in container.entries.items():
        if name.startswith(OPTIMIZER):
            parameter, _, state = name.removeprefix(OPTIMIZER).rpartition("/")
            if state != MASTER or parameter not in container.entries:
                entries[name] = entry
            continue
        master = container.entries.get(f"{OPTIMIZER}{name}/{MASTER}")
        entries[name] = entry if master is None else replace(master, name=name)
        if strict and master is None and entry.dtype not in _FULL:
            message = "the checkpoint holds no full-precision copy of this tensor"
            faults.add("UNSUPPORTED", message, container.path, name, "Omit --weights fp32.")
    if faults:
        raise faults.error()
    return replace(container, entries=entries)
