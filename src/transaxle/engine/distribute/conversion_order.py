"""A conversion as it was asked for, as data: whoever opens it on another machine makes the same plan."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from transaxle.arguments import (
    Degrees,
    Size,
    read_config,
    read_degrees,
    read_float_type,
    read_path,
    read_patterns,
    read_size,
)
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.checkpoint.settings import LONGEST_TABLE, model_config
from transaxle.engine.plan.conversion import SHARD_SIZE, Prepared, make_plan
from transaxle.engine.views.encode import Encode
from transaxle.errors import refuse
from transaxle.formats.remote.multipart import multipart
from transaxle.formats.remote.service import Service
from transaxle.formats.remote.url import local_path
from transaxle.formats.storage.local import read_file
from transaxle.formats.storage.storage import as_text, is_url

_TEXTS = ("format", "family", "dialect", "weights", "optimizer", "average")
"""Options of `open_checkpoint` that are data as they are."""


class ConversionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what a conversion does."""

    source: str
    """Absolute path or URL."""
    target: str
    """Absolute path or URL."""
    to: str
    """`FORMAT[:DIALECT]`."""
    reading: dict[str, Any]
    """Options of `open_checkpoint`, all of them data; a config is its content."""
    rules: str | None = None
    """Text of the table of one's own; None: there is none."""
    shard_size: int = SHARD_SIZE
    """Bytes of tensors per file."""
    allow_lossy: bool = False
    """Run a dialect's arithmetic."""
    strict: bool = False
    """Refuse tensors without a line in the target dialect."""
    encode: Encode | None = None
    """Which tensors are encoded, and how."""
    degrees: Degrees | None = None
    """The ranks of a target that has files for each of them."""

    @contextmanager
    def planned(self) -> Iterator[Prepared]:
        """Open the source and plan; the files are open until the block ends.

        Raises:
            TransaxleError: what `open_checkpoint` and `make_plan` raise.
        """
        with tempfile.TemporaryDirectory(prefix="transaxle-rules-") as folder:
            reading = dict(self.reading)
            if self.rules is not None:
                table = Path(folder, "own.rules")
                table.write_text(self.rules, "utf-8")
                reading["rules"] = str(table)
            checkpoint = open_checkpoint(self.source, **reading)
        with checkpoint:
            yield make_plan(
                checkpoint,
                self.to,
                shard_size=self.shard_size,
                allow_lossy=self.allow_lossy,
                strict=self.strict,
                target=self.target,
                encode=self.encode,
                degrees=self.degrees,
            )


def order(src: str, dst: str, to: str, reading: Mapping[str, Any], shaping: Mapping[str, Any]) -> ConversionOrder:
    """Return a conversion as data.

    Args:
        src: the source's path or URL.
        dst: the target's path or URL.
        to: `FORMAT[:DIALECT]`.
        reading: options of `open_checkpoint`.
        shaping: options of `make_plan`, beside these; `degrees`, or `tp` and the others.

    Raises:
        Refused: UNSUPPORTED for a target that several workers cannot write.
        TransaxleError: what reading config and rules raises.
    """
    here = local_path(dst) if is_url(dst) else dst
    for path in (src, dst, str(reading.get("merge") or "")):
        if as_text(path) != path:
            message = "its name is not UTF-8, and workers are told of paths as UTF-8"
            raise refuse("UNSUPPORTED", message, file=path, hint="Rename it, or convert in this process: without --on.")
    if here is None:
        multipart(Service(dst))
    plain: dict[str, Any] = {name: reading[name] for name in _TEXTS if reading.get(name) is not None}
    config = model_config(read_config(reading.get("config")))
    if config is not None:
        plain["config"] = dict(config)
    if reading.get("axes"):
        plain["axes"] = dict(reading["axes"])
    for name in ("decode", "dtype"):
        if reading.get(name) is not None:
            plain[name] = read_float_type(name, reading[name])
    if reading.get("merge") is not None:
        adapter = read_path("merge", reading["merge"])
        plain["merge"] = adapter if is_url(adapter) else os.path.abspath(adapter)  # noqa: PTH100 - a link stays one
    for name in ("only", "skip"):
        if reading.get(name):
            plain[name] = read_patterns(name, reading[name])
    rules = reading.get("rules")
    shard_size: Size = shaping.get("shard_size", SHARD_SIZE)
    return ConversionOrder(
        source=src if is_url(src) else os.path.abspath(src),  # noqa: PTH100 - a link stays one
        target=dst if here is None else os.path.abspath(here),  # noqa: PTH100
        to=to,
        reading=plain,
        rules=None if rules is None else read_file(rules, LONGEST_TABLE).decode("utf-8"),
        shard_size=read_size("shard_size", shard_size),
        allow_lossy=bool(shaping.get("allow_lossy", False)),
        strict=bool(shaping.get("strict", False)),
        encode=shaping.get("encode"),
        degrees=shaping.get("degrees") or read_degrees(shaping),
    )
