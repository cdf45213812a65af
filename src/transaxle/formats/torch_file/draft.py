"""Drafting torch files: `pytorch_model.bin`, or shards of it with their index.

Each file holds one flat dict from names to tensors, each tensor dense in a storage of its own:
`torch.load(weights_only=True)` returns it, mapped or not, and `load_state_dict` accepts it. In a folder the names of
optimizer state are kept whole too (`optim/<parameter>/<state>`); one file with everything is nested, see
`flattened_state.nesting`.
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
from transaxle.formats.torch_file.saved import BYTE_ORDER, DATA, LITTLE, PICKLE, SEALED, STORAGE, VERSION, item_bytes
from transaxle.formats.training_state import KEPT, ParamGroup

_STEM, _ENDING = "pytorch_model", ".bin"
_FOLDER = "archive"
"""What torch calls the archive's folder where it writes to no file of its own."""
_NOTES = ((".format_version", b"1"), (".storage_alignment", str(ALIGNMENT).encode()), (BYTE_ORDER, LITTLE))
_VERSION = b"3\n"
_ID, _ID_DIGITS = ".data/serialization_id", 40
_DEVICE = "cpu"
_MAX_DIMS = 64
_TYPED = frozenset(STORAGES.values())
"""Types that have a storage class of their own; storages of any other are bytes."""
_BY_CODE = {DType(name).code: DType(name) for name in DTYPES if not name.startswith(("qint", "quint"))}
"""Dtypes that can be written; a quantized one would lack its scale."""


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
    """Lay out torch files.

    Args:
        tensors: what to write, in this order.
        metadata: left out: a torch file has no place for it.
        shard_size: bytes of tensors in one file; a tensor that is larger gets a file of its own. Without it, or when
            everything fits, there is one file `pytorch_model.bin` and no index.
        groups: settings of the optimizer, in the first file: a list of dicts under a key of its own.
        sealed: leave room for digests in a record of their own; there must be one file.
        stem: how the names of the files begin.
        nesting: how the dict of the one file is nested; None: it is flat.

    Raises:
        Refused: for every tensor that has no place: UNSUPPORTED (dtype, dims), NAME_COLLISION, SHAPE_MISMATCH (an odd
            number of F4 elements in a row).
    """
    del metadata
    faults = Faults()
    names_so_far: set[str] = set()
    sized: list[Sized] = []
    for spec in tensors:
        sized.append((spec, _size(spec, names_so_far, faults)))
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


def _size(spec: Spec, names_so_far: set[str], faults: Faults) -> int:
    """Return the bytes of a tensor; whatever forbids writing it is a fault."""
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
    """Give each tensor of one file its offset; also return all bytes around them, and the file's size.

    Where there is to be room for digests, its offset is added to `room`.
    """
    value: dict[str, object] = {}
    for key, (spec, _) in enumerate(shard):
        value[spec.name] = reference(spec.dtype, spec.shape, key)
    storages: list[int | bytes] = [size for _, size in shard]
    if nesting is not None:
        value = nest_state(value, nesting, [_saved_group(group, storages) for group in list_groups(groups)])
    elif groups:
        value[KEPT] = [_saved_group(group, storages) for group in groups]
    digests = None if room is None else DIGITS * (1 + sum(size > 0 for _, size in shard))
    layout = surround(file, value, storages, digests)
    if room is not None and layout.room is not None:
        room.append(layout.room)
    placed = [
        Entry(spec.name, spec.dtype, spec.shape, (Extent((0,) * len(spec.shape), spec.shape, file, offset),))
        for (spec, _), offset in zip(shard, layout.offsets, strict=False)
    ]
    return placed, [Fragment(file, at, data) for at, data in layout.known], layout.size


def _saved_group(group: ParamGroup, storages: list[int | bytes]) -> dict[str, object]:
    return {key: saved(setting, storages) for key, setting in group.items()}


def saved(setting: Any, storages: list[int | bytes]) -> object:
    """Return a setting as torch saves it: a number with a dtype becomes a tensor, whose bytes are appended to
    `storages`.
    """
    if isinstance(setting, np.generic):
        storages.append(setting.tobytes())
        return reference(code_of(setting.dtype), (), len(storages) - 1)
    if isinstance(setting, dict):
        return {key: saved(item, storages) for key, item in setting.items()}
    return type(setting)(saved(item, storages) for item in setting) if isinstance(setting, list | tuple) else setting


def surround(file: str, value: object, storages: Sequence[int | bytes], digests: int | None = None) -> ZipLayout:
    """Lay out the file of any value.

    Args:
        file: its name, for errors.
        value: plain values and descriptors; its tensors are `reference`s to the storages by their numbers.
        storages: bytes of each storage: how many, or they themselves where they are known.
        digests: bytes of room for digests; None: no record for them.

    Returns:
        where everything lies; of the offsets, those of the storages.

    Raises:
        Refused: UNSUPPORTED where its pickle would be too long to be read back.
    """
    pickle = write_pickle(value)
    if len(pickle) > Bounds().size:
        raise _too_many(file, len(pickle))
    items = [ZipItem(PICKLE, len(pickle), pickle)]
    items += [ZipItem(name, len(data), data) for name, data in _NOTES]
    first_storage = len(items)
    for key, content in enumerate(storages):
        items.append(ZipItem(f"{DATA}{key}", content if isinstance(content, int) else len(content), _known(content)))
    identity = f"{int(hashlib.sha256(pickle).hexdigest(), 16) % 10**_ID_DIGITS:0{_ID_DIGITS}}".encode()
    items += [ZipItem(VERSION, len(_VERSION), _VERSION), ZipItem(_ID, len(identity), identity)]
    if digests is not None:
        items.append(ZipItem(SEALED, digests, b"0" * digests, room=True))
    layout = lay_out(_FOLDER, items)
    room = None if digests is None else layout.offsets[-1]
    return ZipLayout(layout.offsets[first_storage : first_storage + len(storages)], layout.known, layout.size, room)


def _known(content: int | bytes) -> bytes | None:
    return None if isinstance(content, int) else content


def _too_many(file: str, size: int) -> TransaxleError:
    message = f"the pickle of the tensor names would have {size} bytes, more than readers accept"
    return refuse("UNSUPPORTED", message, file=file, hint="Write more, smaller files (--shard-size).")


def reference(code: str, shape: Sequence[int], key: int) -> TensorRef:
    """Return a tensor's description in a pickle: a dense view of the whole of its own storage.

    Args:
        code: its dtype, one that torch has.
        shape: its logical elements.
        key: number of the storage.
    """
    dtype = _BY_CODE[code]
    typed = dtype.name in _TYPED
    if code in PACKED:
        shape = (*shape[:-1], shape[-1] // PACKED[code])
    count = prod(shape) if typed else prod(shape) * item_bytes(dtype)
    pid = (STORAGE, StorageType(dtype if typed else None), str(key), _DEVICE, count)
    return TensorRef(Persistent(pid), None if typed else dtype, 0, tuple(shape), _dense(shape))


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, as torch counts them."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
