"""Layers that are one tensor, as numbered tensors: where a model has layers that predict ahead, too.

Megatron numbers these, `mtp.layers.0.…`, also where it keeps the model's own layers in one tensor. In tables both are
layers of one kind, so that all of them have to be numbered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from transaxle.axes.geometry.strided import row_major
from transaxle.axes.layout.bind import join_slot, split_slot
from transaxle.formats.catalog import ITEM_BITS, PACKED, Container, Entry, Extent

_AHEAD = re.compile(r"((?:.+\.)?)mtp\.layers\.\d+\..+", re.DOTALL)
_TOGETHER = re.compile(r"((?:.+\.)?)(decoder\.layers)\.(?!\d)(.+)", re.DOTALL)
_MOST = 100_000


def with_numbered_layers(container: Container) -> Container:
    """Return a container in which all layers are numbered, if it has layers that predict ahead."""
    models = {match[1] for name in container.entries if (match := _AHEAD.fullmatch(split_slot(name)[0]))}
    if not models:
        return container
    entries: dict[str, Entry] = {}
    for name, entry in container.entries.items():
        parameter, state = split_slot(name)
        match = _TOGETHER.fullmatch(parameter)
        if (
            match is None
            or match[1] not in models
            or not entry.shape
            or entry.shape[0] > _MOST
            or entry.dtype in PACKED
        ):
            entries[name] = entry
            continue
        for layer in range(entry.shape[0]):
            numbered = join_slot(f"{match[1]}{match[2]}.{layer}.{match[3]}", state)
            entries[numbered] = Entry(numbered, entry.dtype, entry.shape[1:], tuple(_of_layer(entry, layer)))
    return replace(container, entries=entries)


def _of_layer(entry: Entry, layer: int) -> Iterator[Extent]:
    """Yield the parts of one layer of a tensor."""
    item = ITEM_BITS[entry.dtype] // 8
    for each in entry.extents:
        row = layer - each.start[0]
        if 0 <= row < each.shape[0]:
            strides = each.strides or row_major(each.shape)
            inside = None if each.strides is None else each.strides[1:]
            offset = each.offset + row * strides[0] * item
            yield msgspec.structs.replace(
                each, start=each.start[1:], shape=each.shape[1:], offset=offset, strides=inside
            )
