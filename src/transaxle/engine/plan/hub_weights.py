"""Publishing: what training has saved, under the names and numbers by which readers of a hub know it.

Quantized weights of a training run have codes, scales and an amax under names of their own, and beside them what the
next step needs. For a hub they are renamed before anything is planned, the amax is a file that does not exist and holds
the number that stands for it, and the rest is left behind. Code by code and block by block nothing changes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from transaxle.encodings.conventions import te_convention as te
from transaxle.encodings.conventions.convention import DEEPSEEK
from transaxle.encodings.conventions.restated import ASIDE, TRAINED, hub_convention, inexact, restated, unsaid
from transaxle.encodings.encoding import Encoded, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.copying.source import Source
from transaxle.errors import Refusal
from transaxle.formats.catalog.catalog import Container, Entry, Extent
from transaxle.formats.safetensors.index_name import FORMAT as SAFETENSORS
from transaxle.formats.storage.storage import Beside, Octets

_FILE = "\0restated "
"""What the name of a file that does not exist begins with."""
_VALUES = "BF16"
"""Type of the values of a checkpoint's codes, which do not say it."""


def published(checkpoint: Checkpoint) -> tuple[Checkpoint, list[Refusal]]:
    """Return a checkpoint as a hub has it, and why some of its tensors cannot be had so.

    Where its config says how weights are stored, they stay as they are; likewise under DeepSeek's names in a container
    that a hub may have itself.

    Args:
        checkpoint: under its stored names.
    """
    names = checkpoint.container.entries
    aside = {full for name in names for end in ASIDE if (full := f"{name}_{end}") in names}
    if aside:
        checkpoint = _of(checkpoint, checkpoint.container.without(aside))
    held = checkpoint.catalog
    if held.quantization is not None or held.refusals:
        return checkpoint, []
    mine = TRAINED - {DEEPSEEK} if checkpoint.format == SAFETENSORS else TRAINED
    found = [one for one in held.encoded.values() if one.convention in mine]
    to = hub_convention(one.encoding for one in found)
    if not found or all(one.convention == to.name for one in found):
        return checkpoint, []
    container = checkpoint.container
    files: dict[str, Octets] = {}
    entries: dict[str, Entry] = {}
    problems = [refusal for one in found if (refusal := unsaid(one)) is not None]
    for one in found:
        for role, old in one.parts.items():
            name, dtype = to.stored(one.name, role, one.encoding), to.presented(one.encoding, one.shape, role)[0]
            entries[old] = replace(names[old], name=name, dtype=names[old].dtype if role is Role.CODES else dtype)
        if Role.GLOBAL in one.parts:
            stored = entries[one.parts[Role.GLOBAL]]
            amaxes = _amaxes(container, one)
            numbers, same = restated(amaxes, one.encoding, to, _VALUES)
            if not same.all():
                problems.append(inexact(one, float(amaxes[~same][0]), to, _VALUES))
            files[_FILE + stored.name] = Octets(numbers.astype("<f4").tobytes())
            extent = Extent((0,) * len(stored.shape), stored.shape, _FILE + stored.name, 0)
            entries[one.parts[Role.GLOBAL]] = replace(stored, extents=(extent,))
    renamed = {
        entries[old].name if old in entries else old: entries.get(old, entry)
        for old, entry in container.entries.items()
    }
    said = {key: value for key, value in container.metadata.items() if key != te.NOTE}
    storage = Beside(container.storage, files)
    return _of(checkpoint, replace(container, storage=storage, entries=renamed, metadata=said)), problems


def _amaxes(container: Container, one: Encoded) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    name = one.parts[Role.GLOBAL]
    return Source(container).read(name).view("<f4").astype(np.float32)


def _of(checkpoint: Checkpoint, container: Container) -> Checkpoint:
    return Checkpoint(container, checkpoint.settings, None, None, checkpoint.undecoded)
