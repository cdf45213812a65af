"""The restricted pickle interpreter: a pickle is a program, and this machine runs it without its one dangerous part.

Python's own machine imports what the program names and calls it. This one has a table of names (`allowed`): a name in
it becomes a `Global`, calling that gives a description (`descriptors`), and nothing is imported or called. A name that
is not in the table refuses the pickle. The program's steps, its memory and its numbers are bounded, and it cannot
recurse. So whatever a pickle says, it costs at most the memory it was granted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.pickled.allowed_globals.allowed import ALLOWED, Names
from transaxle.formats.pickled.descriptors import Persistent
from transaxle.formats.pickled.fault import PickleEnds, PickleFault, TakenApart, malformed
from transaxle.formats.pickled.machine import Bounds, Machine, PersistentId
from transaxle.formats.pickled.steps import perform

_UNSAFE = "the pickle asks for {}, which is not on the list of harmless names; nothing was imported or run"
_HINT = "Only if you trust its author: load it with the program that wrote it, and save plain tensors."


class Pickled(msgspec.Struct, frozen=True):
    """The contents of a pickle."""

    value: Any
    """Plain values and descriptors; parts may be shared, and may hold themselves."""
    end: int
    """Position after its last byte."""
    protocol: int
    """0 to 5; 0 if it states none."""
    has_runs: bool = False
    """Some records are in it as a `Run`, which builders in `repeats` make."""


def read_pickle(
    data: bytes,
    *,
    file: str,
    record: str = "",
    start: int = 0,
    complete: bool = True,
    bounds: Bounds | None = None,
    allowed: Names = ALLOWED,
    persistent: PersistentId = Persistent,
) -> Pickled:
    """Read one pickle.

    Args:
        data: the bytes that hold it.
        file: its name, for errors.
        record: its name inside the file, for errors.
        start: its first byte.
        complete: the bytes are all there is; if not, a pickle that goes on after them raises PickleEnds.
        bounds: what it may cost.
        allowed: names it may use.
        persistent: resolves its persistent ids.

    Raises:
        Refused: UNSAFE_PICKLE naming every global that is not allowed; CORRUPT; UNSUPPORTED for buffers that lie
            outside of the pickle.
        PickleEnds: see `complete`.
    """
    record_prefix = f"record {record}: " if record else ""

    def machine_for(*, finds_runs: bool) -> Machine:
        machine = Machine(data, start, bounds or Bounds(), allowed, persistent)
        machine.finds_runs = finds_runs
        return machine

    machine = machine_for(finds_runs=True)
    try:
        try:
            value = _whole(machine)
        except (PickleFault, TakenApart):
            # Whatever is wrong is said as the single steps say it.
            if not machine.has_runs:
                raise
            machine = machine_for(finds_runs=False)
            value = _whole(machine)
    except PickleFault as fault:
        if not complete and isinstance(fault, PickleEnds):
            raise
        if not machine.unsafe:
            message = f"{record_prefix}the pickle is not valid at byte {machine.begin}: {fault.message}"
            raise refuse(fault.code, message, file=file) from None
        value = None
    if machine.unsafe:
        raise _unsafe(machine.unsafe, file, record_prefix)
    return Pickled(value, machine.at, machine.protocol, machine.has_runs)


def _whole(machine: Machine) -> Any:
    """Do all steps of a pickle, and return the one value that it has built.

    Raises:
        PickleFault: whatever is wrong.
        TakenApart: it cannot be read with runs.
    """
    perform(machine)
    if machine.outer or len(machine.stack) != 1:
        raise malformed("it does not end with exactly one value")
    if machine.loose_runs or machine.memo.is_changed() or not all(each.is_bare for each in machine.shared):
        raise TakenApart
    return machine.stack[0]


def _unsafe(names: Mapping[str, int], file: str, record_prefix: str) -> TransaxleError:
    return gathered(
        Refusal("UNSAFE_PICKLE", f"{record_prefix}{_UNSAFE.format(name)} (byte {at})", Where(file), _HINT)
        for name, at in names.items()
    )


__all__ = ["Bounds", "PersistentId", "PickleEnds", "Pickled", "read_pickle"]
