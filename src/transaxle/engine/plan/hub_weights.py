"""Hub weights: what training saved, under the names and numbers that readers of a hub know.

A training run saves quantized weights as codes, scales and an amax under names of its own, with buffers that only the
next step needs. For a hub they are renamed before anything is planned; the amax is replaced by a virtual file with the
number that hubs expect, and the other buffers are left out. Codes and block scales stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from transaxle.encodings.conventions.convention import DEEPSEEK, TE_NOTE, training_only
from transaxle.encodings.conventions.restated import (
    TRAINED,
    hub_buffers,
    hub_convention,
    hub_global_scales,
    unsaid,
)
from transaxle.encodings.encoding import Encoded, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.copying.source import Source
from transaxle.errors import Refusal
from transaxle.formats.builtin_formats import SAFETENSORS
from transaxle.formats.catalog import Container, Entry, Extent
from transaxle.formats.storage.storage import InMemoryFile, VirtualFiles

if TYPE_CHECKING:
    import numpy as np

_FILE = "\0restated "
"""Prefix of the names of virtual files."""
_VALUES = "BF16"
"""Dtype of the decoded values, which codes do not say."""


def published(checkpoint: Checkpoint) -> tuple[Checkpoint, list[Refusal]]:
    """Return a checkpoint as a hub expects it, and why some of its tensors cannot be written so.

    A checkpoint whose config describes its quantization stays as it is; so do DeepSeek's names in a container that a
    hub may have itself.

    Args:
        checkpoint: under its stored names.
    """
    names = checkpoint.container.entries
    left_out = training_only(names, names)
    if left_out:
        checkpoint = _of(checkpoint, checkpoint.container.without(left_out))
    catalog = checkpoint.catalog
    if catalog.quantization is not None or catalog.refusals:
        return checkpoint, []
    trained_conventions = TRAINED - {DEEPSEEK} if checkpoint.format == SAFETENSORS.name else TRAINED
    trained = [tensor for tensor in catalog.encoded.values() if tensor.convention in trained_conventions]
    to = hub_convention(tensor.encoding for tensor in trained)
    if not trained or all(tensor.convention == to.name for tensor in trained):
        return checkpoint, []
    container = checkpoint.container
    files: dict[str, InMemoryFile] = {}
    entries: dict[str, Entry] = {}
    problems = [refusal for tensor in trained if (refusal := unsaid(tensor)) is not None]
    for tensor in trained:
        for buffer in hub_buffers(tensor, to):
            entry = names[buffer.stored]
            entries[buffer.stored] = replace(entry, name=buffer.name, dtype=buffer.dtype or entry.dtype)
        if Role.GLOBAL in tensor.parts:
            stored = entries[tensor.parts[Role.GLOBAL]]
            scales, refusal = hub_global_scales(tensor, _amaxes(container, tensor), to, _VALUES)
            problems += [refusal] if refusal is not None else []
            files[_FILE + stored.name] = InMemoryFile(scales.astype("<f4").tobytes())
            extent = Extent((0,) * len(stored.shape), stored.shape, _FILE + stored.name, 0)
            entries[tensor.parts[Role.GLOBAL]] = replace(stored, extents=(extent,))
    renamed = {
        entries[old].name if old in entries else old: entries.get(old, entry)
        for old, entry in container.entries.items()
    }
    metadata = {key: value for key, value in container.metadata.items() if key != TE_NOTE}
    storage = VirtualFiles(container.storage, files)
    return _of(checkpoint, replace(container, storage=storage, entries=renamed, metadata=metadata)), problems


def _amaxes(container: Container, tensor: Encoded) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    import numpy as np

    name = tensor.parts[Role.GLOBAL]
    return Source(container).read(name).view("<f4").astype(np.float32)


def _of(checkpoint: Checkpoint, container: Container) -> Checkpoint:
    return Checkpoint(container, checkpoint.settings, None, None, checkpoint.undecoded)
