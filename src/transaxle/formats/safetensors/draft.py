"""Laying out safetensors files that do not exist yet: every tensor gets its file and its offset before a byte moves.

The files are those that Hugging Face's own writers make of the same tensors: shards filled in the given order, and in
each file the widest types first, then by name. So every tensor begins at a multiple of its item size, and a conversion
back is byte for byte the file it started from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from transaxle.errors import Faults, TransaxleError
from transaxle.formats.builtin_formats import SAFETENSORS
from transaxle.formats.catalog.catalog import Draft, Entry, Extent, Fragment, Spec
from transaxle.formats.dtype import BITS, nbytes
from transaxle.formats.safetensors.header import MAX_DIMS, METADATA, blank_seal, encode_header, room_for_seal
from transaxle.formats.shards import Sized, has_state, lay_out_shards
from transaxle.formats.training_state.run_facts import KEPT_RUN, facts_as_text
from transaxle.formats.training_state.state_groups import KEPT, ParamGroup, encode

_STEM = "model"
_RANK = {code: rank for rank, code in enumerate(BITS)}
_WHOLE_BYTES = frozenset(code for code, bits in BITS.items() if bits % 8 == 0)
_STARTS = tuple((0,) * dims for dims in range(MAX_DIMS + 1))
"""First index of a whole tensor, by its dims."""


def draft(
    tensors: Sequence[Spec],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_size: int | None = None,
    groups: Sequence[ParamGroup] = (),
    run: Mapping[str, Any] | None = None,
    sealed: bool = False,
    stem: str = _STEM,
) -> Draft:
    """Lay out safetensors files.

    Args:
        tensors: what to write; shards are filled in this order.
        metadata: free text for the header of every file.
        shard_size: bytes of tensors in one file; a tensor that is larger gets a file of its own. Without it, or when
            everything fits, there is one file `model.safetensors` and no index.
        groups: settings of the optimizer, as text in the header of the first file.
        run: what the source says of its run, likewise where there is state of an optimizer.
        sealed: leave room for digests in the header; there must be one file.
        stem: how the names of the files begin.

    Raises:
        Refused: for every tensor that has no place: UNSUPPORTED (dtype, dims, a name that is no Unicode),
            NAME_COLLISION, SHAPE_MISMATCH (packed elements that do not fill whole bytes).
    """
    faults = Faults()
    if _are_plain(tensors):  # the usual case, of very many
        sized = list(zip(tensors, map(nbytes, map(_dtype, tensors), map(_shape, tensors)), strict=True))
    else:
        sized, names_so_far = [], set[str]()
        for spec in tensors:
            sized.append((spec, _size(spec, names_so_far, faults)))
            names_so_far.add(spec.name)
    if faults:
        raise faults.error()
    beside = {KEPT: encode(groups)} if groups else {}
    if has_state(map(_name, tensors)) and (facts := facts_as_text(run or {})) is not None:
        beside[KEPT_RUN] = facts
    first_file_metadata = iter([beside])
    room = blank_seal(sum(size > 0 for _, size in sized)) if sealed else {}

    def lay_out(file: str, shard: Iterable[Sized]) -> tuple[list[Entry], list[Fragment], int]:
        return _lay_out(file, shard, {**(metadata or {}), **next(first_file_metadata, {}), **room})

    files = lay_out_shards(SAFETENSORS.name, stem, SAFETENSORS.one_file[0], sized, shard_size, lay_out)
    if not sealed:
        return files
    (header,) = files.fragments
    offsets = [entry.extents[0].offset for entry in files.entries.values() if entry.nbytes]
    return replace(files, seal=room_for_seal(header.data, header.file, offsets))


def _are_plain(tensors: Sequence[Spec]) -> bool:
    """Tell whether nothing can be wrong with any of the tensors, and each of their elements fills whole bytes."""
    names = set(map(_name, tensors))
    kinds = set(zip(map(_dtype, tensors), map(len, map(_shape, tensors)), strict=True))
    has_places = all(dtype in _WHOLE_BYTES and dims <= MAX_DIMS for dtype, dims in kinds)
    return has_places and len(names) == len(tensors) and METADATA not in names and "".join(names).isascii()


def _size(spec: Spec, names_so_far: set[str], faults: Faults) -> int:
    """Return the bytes of a tensor; whatever forbids writing it is a fault."""
    shown = spec.name.encode("utf-8", "backslashreplace").decode()
    if spec.name == METADATA:
        faults.add("NAME_COLLISION", "safetensors uses this name for its metadata", None, shown)
    if spec.name in names_so_far:
        faults.add("NAME_COLLISION", "two tensors have this name", None, shown)
    if spec.name != shown:
        faults.add("UNSUPPORTED", "the name is not valid Unicode", None, shown)
    if len(spec.shape) > MAX_DIMS:
        faults.add("UNSUPPORTED", f"the tensor has {len(spec.shape)} dims, more than {MAX_DIMS}", None, shown)
    if spec.dtype not in BITS:
        hint = "Choose a format that can hold this tensor, or leave it out."
        faults.add("UNSUPPORTED", f"safetensors has no dtype for {spec.dtype}", None, shown, hint)
        return 0
    try:
        return nbytes(spec.dtype, spec.shape)
    except TransaxleError as error:
        faults.add(error.code, error.refusals[0].message, None, shown)
        return 0


def _lay_out(file: str, shard: Iterable[Sized], metadata: Mapping[str, str]) -> tuple[list[Entry], list[Fragment], int]:
    """Give each tensor of one file its offset; also return the file's header and its size."""
    items = list(shard)
    names = [spec.name for spec, _ in items]
    by_type: dict[str, list[Sized]] = {}
    for at in sorted(range(len(items)), key=names.__getitem__):
        item = items[at]
        by_type.setdefault(item[0].dtype, []).append(item)
    specs: list[Spec] = []
    ends = [0]
    for dtype in sorted(by_type, key=_RANK.__getitem__, reverse=True):
        of_type, sizes = zip(*by_type[dtype], strict=True)
        specs += of_type
        ends += [*accumulate(sizes, initial=ends[-1])][1:]
    header = encode_header(zip(specs, ends, ends[1:], strict=False), metadata)
    base, shapes = len(header), list(map(_shape, specs))
    extents = map(
        Extent, map(_STARTS.__getitem__, map(len, shapes)), shapes, repeat(file), [base + end for end in ends]
    )
    placed = list(map(Entry, map(_name, specs), map(_dtype, specs), shapes, zip(extents, strict=False)))
    return placed, [Fragment(file, 0, header)], base + ends[-1]


_name, _dtype, _shape = map(attrgetter, ("name", "dtype", "shape"))
