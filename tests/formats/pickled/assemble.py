"""Pickles made by hand, opcode by opcode, for what no pickler would write."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from transaxle.formats.pickled.descriptors import Global
from transaxle.formats.pickled.interpreter import Bounds, PersistentId, UnpickledValue, read_pickle
from transaxle.formats.pickled.writer import write_pickle

FILE, RECORD = "model.pt", "data.pkl"
STOP = b"."
HEAD = b"\x80\x02"
MARKER = "marker"


def program(*steps: bytes) -> bytes:
    """A whole pickle of protocol 2."""
    return b"".join((HEAD, *steps, STOP))


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def value(what: Any) -> bytes:
    """Opcodes that put a plain value on the stack."""
    return write_pickle(what)[len(HEAD) : -len(STOP)]


def call(module: str, attribute: str, *args: Any, opcode: bytes = b"R") -> bytes:
    """Opcodes that call a global with plain values, or with values that were assembled."""
    parts = b"".join(arg if isinstance(arg, bytes) else value(arg) for arg in args)
    return name(module, attribute) + b"(" + parts + b"t" + opcode


def read(data: bytes, *, bounds: Bounds | None = None, persistent: PersistentId | None = None) -> UnpickledValue:
    if persistent is None:
        return read_pickle(data, file=FILE, record=RECORD, bounds=bounds)
    return read_pickle(data, file=FILE, record=RECORD, bounds=bounds, persistent=persistent)


def touches(folder: Path) -> str:
    """A shell command that leaves a marker."""
    return f"touch {folder / MARKER}"


SYSTEM = Global("os", "system")
