"""Lays out torch files: a single `pytorch_model.bin`, or shard files with an index.

Each file contains one flat dict from names to tensors, and each tensor has its own dense storage.
`torch.load(weights_only=True)` loads the file, also with `mmap=True`, and `load_state_dict` accepts the dict. In a
folder, optimizer state also has flat names (`optim/<parameter>/<state>`); in a single file it is nested, see
`flattened_state.Nesting`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from msgspec.structs import replace

from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.catalog import DIGITS, PACKED, Draft, Entry, Extent, Fragment, Spec, code_of, make_seal, nbytes
from transaxle.formats.flattened_state import Nesting, list_groups, nest_state
from transaxle.formats.pickled.allowed import DTYPES, STORAGES
from transaxle.formats.pickled.descriptors import DType, Persistent, StorageType, TensorRef
from transaxle.formats.pickled.interpreter import Bounds
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.registry import TORCH
from transaxle.formats.shards import Sized, lay_out_shards
from transaxle.formats.torch_file.archive import ALIGNMENT, ZipItem, ZipLayout, lay_out
from transaxle.formats.torch_file.saved import (
    BYTE_ORDER,
    DATA,
    LITTLE,
    PICKLE,
    SEALED,
    STORAGE,
    VERSION,
    item_bytes,
)
from transaxle.formats.training_state import KEPT, ParamGroup

_STEM, _ENDING = "pytorch_model", ".bin"
_FOLDER = "archive"
"""Name of the folder inside a zip archive that torch writes to a buffer."""
_NOTES = ((".format_version", b"1"), (".storage_alignment", str(ALIGNMENT).encode()), (BYTE_ORDER, LITTLE))
_VERSION = b"3\n"
_ID, _ID_DIGITS = ".data/serialization_id", 40
_DEVICE = "cpu"
_MAX_DIMS = 64
_TYPED = frozenset(STORAGES.values())
"""Dtypes for which torch has a storage class; tensors of all other dtypes get untyped storages."""
_BY_CODE = {DType(name).code: DType(name) for name in DTYPES if not name.startswith(("qint", "quint"))}
"""Safetensors code -> dtype, for the dtypes that can be written; torch's quantized dtypes cannot, because their scales
would be lost."""


def draft(
    tensors: Sequence[Spec],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_size: int | None = None,
    groups: Sequence[ParamGroup] = (),
    sealed: bool = False,
    stem: str = _STEM,
    nesting: Nesting | None = None,
) -> Draft:
    """Lay out torch files: assign a file and an offset to each tensor.

    Args:
        tensors: the tensors to write, in the order in which the files list them.
        metadata: not used, because a torch file has no place for it.
        shard_size: maximum number of tensor bytes in one file; a larger tensor gets a separate file. Without a shard
            size, or if everything fits into one file, there is one file `pytorch_model.bin` and no index.
        groups: parameter groups of the optimizer; stored in the first file as a list of dicts under a separate key.
        sealed: whether to reserve a record for digests in the file; only possible for a single file.
        stem: beginning of the file names.
        nesting: how the dict in a single file is nested; None means that the dict is flat.

    Raises:
        Refused: with each tensor that cannot be stored, and the code UNSUPPORTED (dtype, dims), NAME_COLLISION or
            SHAPE_MISMATCH (an odd number of F4 elements in a row).
    """
    del metadata
    faults = Faults()
    names_so_far: set[str] = set()
    sized: list[Sized] = []
    for spec in tensors:
        sized.append((spec, tensor_size(spec, names_so_far, faults)))
        names_so_far.add(spec.name)
    if faults:
        raise faults.error()
    groups_of_first_file = iter([groups])

    room: list[int] = []

    def lay_out(file: str, shard: Sequence[Sized]) -> tuple[list[Entry], list[Fragment], int]:
        return _lay_out(file, shard, next(groups_of_first_file, ()), room if sealed else None, nesting)

    files = lay_out_shards(TORCH.name, stem, _ENDING, sized, shard_size, lay_out)
    if not sealed:
        return files
    (file,), (head,) = files.files, room
    offsets = [entry.extents[0].offset for entry in files.entries.values() if entry.nbytes]
    return replace(files, seal=make_seal(file, head, head + DIGITS, offsets))


def tensor_size(spec: Spec, names_so_far: set[str], faults: Faults) -> int:
    """Return the size of a tensor in bytes; add a fault for each reason why a torch file cannot store the tensor.

    Args:
        spec: the tensor.
        names_so_far: names of the tensors before it.
        faults: list to which faults are added.
    """
    shown = spec.name.encode("utf-8", "backslashreplace").decode()
    if spec.name in names_so_far:
        faults.add("NAME_COLLISION", "two tensors have this name", None, shown)
    if len(spec.shape) > _MAX_DIMS:
        faults.add("UNSUPPORTED", f"the tensor has {len(spec.shape)} dims, more than {_MAX_DIMS}", None, shown)
    if spec.dtype not in _BY_CODE:
        hint = "Choose a format that can hold this tensor, or leave it out."
        faults.add("UNSUPPORTED", f"{spec.dtype} is not written to torch files", None, shown, hint)
        return 0
    pack = PACKED.get(spec.dtype, 1)
    if pack > 1 and (not spec.shape or spec.shape[-1] % pack):
        message = (
            f"torch packs {pack} elements of {spec.dtype} into one; the last dim of {list(spec.shape)} is not a "
            f"multiple of {pack}"
        )
        faults.add("SHAPE_MISMATCH", message, None, shown)
        return 0
    return nbytes(spec.dtype, spec.shape)


def _lay_out(
    file: str,
    shard: Sequence[Sized],
    groups: Sequence[ParamGroup],
    room: list[int] | None = None,
    nesting: Nesting | None = None,
) -> tuple[list[Entry], list[Fragment], int]:
    """Lay out one torch file; return its catalog entries, its bytes outside the storages, and its size.

    The offset of the space for digests is appended to the list `room`, unless `room` is None.
    """
    value: dict[str, object] = {}
    for key, (spec, _) in enumerate(shard):
        value[spec.name] = reference(spec.dtype, spec.shape, key)
    storages: list[int | bytes] = [size for _, size in shard]
    if nesting is not None:
        value = nest_state(value, nesting, [_group_to_save(group, storages) for group in list_groups(groups)])
    elif groups:
        value[KEPT] = [_group_to_save(group, storages) for group in groups]
    digests = None if room is None else DIGITS * (1 + sum(size > 0 for _, size in shard))
    layout = lay_out_value(file, value, storages, digests)
    if room is not None and layout.room is not None:
        room.append(layout.room)
    entries = [
        Entry(spec.name, spec.dtype, spec.shape, (Extent((0,) * len(spec.shape), spec.shape, file, offset),))
        for (spec, _), offset in zip(shard, layout.offsets, strict=False)
    ]
    return entries, [Fragment(file, at, data) for at, data in layout.fragments], layout.size


def _group_to_save(group: ParamGroup, storages: list[int | bytes]) -> dict[str, object]:
    return {key: settings_to_save(setting, storages) for key, setting in group.items()}


def settings_to_save(setting: Any, storages: list[int | bytes]) -> object:
    """Return an optimizer setting as torch saves it; a number with a dtype becomes a tensor, whose bytes are appended
    to `storages`.
    """
    if isinstance(setting, np.generic):
        storages.append(setting.tobytes())
        return reference(code_of(setting.dtype), (), len(storages) - 1)
    if isinstance(setting, dict):
        return {key: settings_to_save(item, storages) for key, item in setting.items()}
    return (
        type(setting)(settings_to_save(item, storages) for item in setting)
        if isinstance(setting, list | tuple)
        else setting
    )


def lay_out_value(file: str, value: object, storages: Sequence[int | bytes], digests: int | None = None) -> ZipLayout:
    """Lay out a torch file for an arbitrary value, such as a state dict.

    Args:
        file: name of the file, for error messages.
        value: plain values and descriptors; the tensors among them come from `reference`, and refer to storages by
            number.
        storages: for each storage, its size in bytes, or its bytes if they are known already.
        digests: number of bytes to reserve for digests; None means that the file gets no record for digests.

    Returns:
        the layout of the file; its `offsets` are the offsets of the storages.

    Raises:
        Refused: with the code UNSUPPORTED if the pickle would be too long to be read back.
    """
    pickle = write_pickle(value)
    if len(pickle) > Bounds().size:
        raise _too_many(file, len(pickle))
    items = [ZipItem(PICKLE, len(pickle), pickle)]
    items += [ZipItem(name, len(data), data) for name, data in _NOTES]
    first_storage = len(items)
    for key, content in enumerate(storages):
        items.append(
            ZipItem(f"{DATA}{key}", content if isinstance(content, int) else len(content), _known_bytes(content))
        )
    identity = f"{int(hashlib.sha256(pickle).hexdigest(), 16) % 10**_ID_DIGITS:0{_ID_DIGITS}}".encode()
    items += [ZipItem(VERSION, len(_VERSION), _VERSION), ZipItem(_ID, len(identity), identity)]
    if digests is not None:
        items.append(ZipItem(SEALED, digests, b"0" * digests, room=True))
    layout = lay_out(_FOLDER, items)
    room = None if digests is None else layout.offsets[-1]
    return ZipLayout(layout.offsets[first_storage : first_storage + len(storages)], layout.fragments, layout.size, room)


def _known_bytes(content: int | bytes) -> bytes | None:
    return None if isinstance(content, int) else content


def _too_many(file: str, size: int) -> TransaxleError:
    message = f"the pickle of the tensor names would have {size} bytes, more than readers accept"
    return refuse("UNSUPPORTED", message, file=file, hint="Write more, smaller files (--shard-size).")


def reference(code: str, shape: Sequence[int], key: int) -> TensorRef:
    """Return the description of a tensor for a pickle; the tensor is a dense view of a whole storage.

    Args:
        code: safetensors code of the tensor's dtype, which torch must support.
        shape: the tensor's shape in elements.
        key: number of the storage in the file.
    """
    dtype = _BY_CODE[code]
    typed = dtype.name in _TYPED
    if code in PACKED:
        shape = (*shape[:-1], shape[-1] // PACKED[code])
    count = prod(shape) if typed else prod(shape) * item_bytes(dtype)
    pid = (STORAGE, StorageType(dtype if typed else None), str(key), _DEVICE, count)
    return TensorRef(Persistent(pid), None if typed else dtype, 0, tuple(shape), _dense(shape))


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
