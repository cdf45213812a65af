"""Small checkpoints for a reader that are like the user's: the same config with small sizes, names and number formats.

One is plain, with the names for which the reader is made; the other has the dialect, the encodings and the quantization
config of the user's checkpoint, and the same values. A reader that loads both and computes different outputs puts
values in other places, or decodes them otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file

from transaxle.axes.layout.model_tensors import Model
from transaxle.axes.notation.family import Sizes
from transaxle.derivation.tiny_configs import OWN, PLAIN, tiny
from transaxle.encodings.conventions.convention import PREFERRED
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.engine.execute import execute, preflight
from transaxle.engine.plan.conversion import make_plan
from transaxle.engine.views.encode import Encode
from transaxle.errors import TransaxleError
from transaxle.move.workers import limits

_WIDTHS = re.compile(r"(?!.*(vocab|num_|n_|max_|layer)).*(size|dim|rank|ff|ffn|d_model|embd|channels|inner)\w*")
"""Pattern of the config keys that are multiplied, so that every row of a matrix has whole tiles and groups."""
_TIMES = 16
_NORMS = re.compile(r"(^|[._])(\w*norm\w*|ln\w*|layernorm)\.weight$")
_SEED = 53
_ENCODED = ("float8_block", "mxfp8", "nvfp4", "int4")
"""Encodings in which small checkpoints can be written."""


class StoredForm(msgspec.Struct, frozen=True):
    """How a checkpoint stores its tensors, as far as a reader's handling of values depends on it."""

    dialect: str
    """Label of the dialect of the names."""
    encoding: str = ""
    """Names of the encodings, joined with `+`; empty if all tensors are plain."""
    convention: str = ""
    """Names of the conventions of the encoded tensors, joined with `+`."""


def form_of(checkpoint: Checkpoint) -> StoredForm:
    """Return the dialect, the encoding and the convention of a checkpoint's tensors.

    Raises:
        UsageError: with the code UNKNOWN_FAMILY or AMBIGUOUS if no table reads the names.
    """
    encoded = list(checkpoint.encoded.values())
    encodings = {tensor.encoding.name for tensor in encoded}
    conventions = {tensor.convention for tensor in encoded}
    dialect = checkpoint.reading.dialect.label
    if not encoded:
        return StoredForm(dialect)
    return StoredForm(dialect, "+".join(sorted(encodings)), "+".join(sorted(conventions)))


def needs_twins(checkpoint: Checkpoint, reader_dialect: str) -> bool:
    """Return whether tensors are encoded, or have names of another dialect than the reader is made for."""
    return bool(checkpoint.encoded) or (checkpoint.dialect or reader_dialect).partition("@")[0] != reader_dialect


def own_table(checkpoint: Checkpoint) -> str:
    """Return the text of the rules file with which the user opened the checkpoint; empty if there is none."""
    return (checkpoint.reopening.rules if checkpoint.reopening else None) or ""


def why_no_twins(checkpoint: Checkpoint, reader_dialect: str) -> str:
    """Return why small checkpoints of this kind cannot be made; empty if they can."""
    try:
        encoding = form_of(checkpoint).encoding
        family = checkpoint.reading.family
    except TransaxleError as error:
        return f"no table reads the names: {error.refusals[0].message.splitlines()[0]}"
    if encoding and encoding not in _ENCODED:
        return f"Transaxle reads {encoding.replace('+', ' and ')}, but does not write it"
    if family.dialect(reader_dialect) is None:
        return f"the table of {family.name} has no dialect {reader_dialect}"
    return ""


def make_twins(checkpoint: Checkpoint, reader_dialect: str, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Write pairs of small checkpoints, with fewer changes to the proportions of the config in each further pair.

    Args:
        checkpoint: the user's checkpoint; `why_no_twins` has no objection.
        reader_dialect: dialect of the plain checkpoints.
        folder: an existing empty folder.

    Yields:
        The folders of the plain checkpoint and of the one with the user's dialect and encoding.
    """
    form = form_of(checkpoint)
    dialect, encoding, convention = form.dialect, form.encoding, form.convention
    family = checkpoint.reading.family
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    table = own_table(checkpoint)
    of_drawn: dict[str, Any] = {}
    of_stored: dict[str, Any] = {}
    if table:  # its names may be those of another dialect too
        (folder / "own.rules").write_text(table, "utf-8")
        of_drawn = {"rules": folder / "own.rules", "family": family.name, "dialect": reader_dialect}
        of_stored = {**of_drawn, "dialect": dialect}
    for sizes in (OWN, PLAIN):
        small = tiny(config, 0, sizes=sizes)
        if encoding:
            small = _widen(config, small)
        drawn, stored, plain = (folder / f"{name}-{sizes}" for name in ("drawn", "stored", "plain"))
        try:
            model = Model(family, Sizes(family, small))
            chosen = family.dialect(reader_dialect)
            assert chosen is not None
            shapes = dict(model.stored_shapes(chosen))
            _write(drawn, small, shapes)
            if not encoding:
                _convert(drawn, stored, f"safetensors:{dialect}", **of_drawn)
                yield drawn, stored
                continue
            _convert(drawn, stored, f"safetensors:{dialect}", encode=encoding, **of_drawn)
            if convention != PREFERRED[encoding]:
                restated = folder / f"restated-{sizes}"
                _convert(stored, restated, f"safetensors:{dialect}", restate=convention, **of_stored)
                stored = restated
            with open_checkpoint(stored, **of_stored) as encoded:
                _write_as(encoded.decode("fp32"), plain, f"safetensors:{reader_dialect}")
        except TransaxleError:
            continue
        yield plain, stored


def _widen(config: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Return a small config whose widths are multiplied, so that quantized matrices have whole tiles."""
    wide: dict[str, Any] = {}
    for key, value in small.items():
        if isinstance(value, Mapping):
            inner = config.get(key)
            wide[key] = _widen(inner if isinstance(inner, Mapping) else {}, value)
        elif type(value) is int and value != config.get(key) and _WIDTHS.fullmatch(key):
            wide[key] = value * _TIMES
        else:
            wide[key] = value
    return wide


def _write(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a checkpoint of random values, whose norms are near 1."""
    random = np.random.default_rng(_SEED)
    tensors = {}
    for name, shape in shapes.items():
        fan_in = shape[-1] if len(shape) > 1 else 1
        values = random.standard_normal(shape, np.float32) / np.sqrt(fan_in, dtype=np.float32)
        tensors[name] = np.float32(1) + values / 8 if _NORMS.search(name) else values / (1 if len(shape) > 1 else 8)
    folder.mkdir()
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    (folder / CONFIG).write_text(json.dumps(dict(config)), "utf-8")


def _convert(source: Path, target: Path, to: str, encode: str | None = None, **opening: Any) -> None:
    """Convert a small checkpoint."""
    with open_checkpoint(source, **opening) as checkpoint:
        _write_as(checkpoint, target, to, None if encode is None else Encode(encode, (), (), 0))


def _write_as(checkpoint: Checkpoint, target: Path, to: str, encode: Encode | None = None) -> None:
    prepared = make_plan(checkpoint, to, target=str(target), encode=encode)
    cleared = preflight(prepared, str(target), running=True, several=False, limit=limits(None, None))
    execute(cleared, str(target), limit=limits(None, None), sync=False)
