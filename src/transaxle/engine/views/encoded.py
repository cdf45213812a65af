"""Encoded (quantized) tensors: a tensor with one name and one shape in the families' tables, but with several buffers
on disk.

The table of a model family describes the model's weights. If a weight is stored as codes and scales, only the codes are
translated with the table, under the weight's name and in its shape. The translation moves the codes to their places in
the target. After the translation a target tensor is added for every other buffer: scales move with the tiles (blocks
with one scale) that they belong to, and all buffers get the names and shapes of the convention. No value is decoded for
this.

**Compact scales**: scales that torchao stores in the order of a matrix-multiplication kernel, but that are read in
row-major order.

The kernel needs the scales padded to whole tiles of 128 x 4. In each tile the four groups of 32 rows are side by side
(cuBLAS, "1-D block scaling factors layout"). The kernel's tiles are stored in the order of the tensor's rows. If such a
tensor is decoded or moved to a different dialect, its scales are read from a virtual file, whose bytes are reordered
when they are read. A tensor that keeps its name keeps the kernel's order of scales too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import structs
from msgspec.structs import replace

from transaxle.axes.layout.relayout import Check, Origin, Shape, Target, TargetPart, identity_target
from transaxle.axes.translation.translate import Translation
from transaxle.encodings.conventions.buffer_group import SPEAKING, group
from transaxle.encodings.conventions.convention import COMPRESSED_TENSORS, CONVENTIONS, PREFERRED, TE_NOTE, Convention
from transaxle.encodings.conventions.quantization import SECTIONS, Quantization, read
from transaxle.encodings.conventions.scheme import UNKNOWN_KEY
from transaxle.encodings.conventions.torchao_convention import NAMES as TORCHAO_NAMES
from transaxle.encodings.conventions.torchao_convention import SwizzledTensor, find_swizzled
from transaxle.encodings.encoding import WHOLE, EncodedTensor, Encoding, Role
from transaxle.engine.source import Source, alike_key, origin_names, redescribe
from transaxle.engine.views.stated_shapes import SHAPE_HINT, shape_entry
from transaxle.errors import Refusal, TransaxleError, Where, refuse
from transaxle.formats.catalog import ITEM_BITS, Container, Entry, Extent
from transaxle.formats.storage.copier import Bytes
from transaxle.formats.storage.storage import VirtualFiles

if TYPE_CHECKING:
    from transaxle.axes.layout.tile import Tile


_ROWS, _COLUMNS, _LANES = 128, 4, 32
"""Rows and columns of scales in one tile of the kernel, and the number of consecutive rows that are stored as lanes of
the tile.
"""
_CACHED = 8
"""Number of reordered buffers that are cached, so that a buffer that is read in several blocks is reordered only
once.
"""
_READERS = 8
"""Number of threads that read zero points; they mostly wait."""
_FILE = "\0compact "
"""Prefix of the names of the virtual files that contain reordered scales."""


class _CompactScales(msgspec.Struct, frozen=True):
    """A virtual file with one buffer of scales in compact (row-major) order; the stored buffer is in the kernel's
    order.
    """

    source: Entry
    """The stored buffer of scales, in the kernel's order."""
    shape: tuple[int, int]
    """Number of scales along both dims, without padding."""
    compact: Callable[[str], Bytes]
    """Function from the name of a stored buffer to its scales in compact order."""

    @property
    def nbytes(self) -> int:
        """Size of the virtual file in bytes; see `VirtualFile`."""
        return self.shape[0] * self.shape[1]

    def read_into(self, offset: int, view: memoryview) -> None:
        """Copy bytes of the compact scales into `view`; see `VirtualFile`."""
        view.cast("B")[:] = self.compact(self.source.name)[offset : offset + view.nbytes].data


def compact_order(stored: Bytes, shape: tuple[int, int]) -> Bytes:
    """Reorder scales from the kernel's order to row-major order, as a flat array.

    Args:
        stored: one byte per scale, in the kernel's order, including padding.
        shape: number of scales along both dims, without padding.

    Post-condition: scale `(r, c)` of tile `t` was at byte `512 t + 16 (r % 32) + 4 (r % 128 // 32) + c % 4`.
    """
    rows, columns = (-(-size // step) for size, step in zip(shape, (_ROWS, _COLUMNS), strict=True))
    tiles = stored.reshape(rows, columns, _LANES, _ROWS // _LANES, _COLUMNS)
    padded = tiles.transpose(0, 3, 2, 1, 4).reshape(rows * _ROWS, columns * _COLUMNS)
    return np.ascontiguousarray(padded[: shape[0], : shape[1]]).reshape(-1)


def add_compact_scales(container: Container) -> Container:
    """Return a container in which torchao's scales can also be read in compact order; see `use_compact_scales`."""
    entries = container.entries
    described = {
        name: (tensor, shape)
        for name, tensor in find_swizzled(container.metadata).items()
        if (shape := _scale_shape(entries, tensor))
    }
    if not described:
        return container
    scales = {tensor.scale: shape for tensor, shape in described.values()}
    source = Source(container, {name: entries[name] for name in scales})
    reordered = lru_cache(_CACHED)(lambda name: compact_order(source.read(name), scales[name]))
    files = {_FILE + name: _CompactScales(entries[name], shape, reordered) for name, shape in scales.items()}
    compact = {
        tensor.source.name: replace(tensor.source, shape=tensor.shape, extents=(Extent((0, 0), tensor.shape, file, 0),))
        for file, tensor in files.items()
    }
    notes = {name: json.dumps(tensor.compact) for name, (tensor, _) in described.items()}
    recoding = replace(container.recoding, compact=compact, compact_notes=notes)
    return replace(container, storage=VirtualFiles(container.storage, files), recoding=recoding)


def use_compact_scales(container: Container) -> Container:
    """Return a container with scales in compact order, which the conversion tables need; see `add_compact_scales`."""
    compact, notes = container.recoding.compact, container.recoding.compact_notes
    if not compact:
        return container
    entries = {name: compact.get(name, entry) for name, entry in container.entries.items()}
    metadata = {key: notes.get(key, value) for key, value in container.metadata.items()}
    return replace(container, entries=entries, metadata=metadata)


def _scale_shape(entries: Mapping[str, Entry], description: SwizzledTensor) -> tuple[int, int] | None:
    """Return the number of scales along both dims; None if the stored buffer does not fill the kernel's tiles."""
    codes, scale = entries.get(description.codes), entries.get(description.scale)
    if codes is None or scale is None or len(codes.shape) != 2 or ITEM_BITS.get(scale.dtype) != 8:
        return None
    shape = codes.shape[0], -(-codes.shape[1] * description.per_byte // description.block)
    tiles = -(-shape[0] // _ROWS) * -(-shape[1] // _COLUMNS)
    return shape if scale.nbytes == tiles * _ROWS * _COLUMNS and scale.nbytes else None


StoredForm = tuple[str, Shape]
"""Safetensors code and shape with which a target tensor is stored, if they differ from those of the tensor's
elements.
"""

_SCALE = "scale"
"""Text that occurs in the name of every buffer that contains scales."""
_WAY_OUT = "To keep the tensors exactly as stored:  --to safetensors:identity."
"""Hint in refusals of buffers that do not fit their tensor."""
_DECODED = "Write decoded values:  --decode bf16."
"""Hint in refusals of tensors that are shown in another form than that in which they are stored."""
_RESTATE_HINT = "For the same codes with other names:  --restate compressed_tensors."
"""Hint in refusals of tensors that are shown as those of compressed-tensors."""
_DECODE_HINT = "Choose a dialect that stores these tensors separately, or decode them:  --decode bf16."
"""Hint in refusals of tensors that would have to share one scale."""


def buffer_name(name: str, role: Role) -> str:
    """Return the internal name of a buffer of an encoded tensor; no stored tensor can have this name."""
    return name if role is Role.CODES else f"{name}\0{role}"


def matrix_tile(shape: Shape) -> Tile:
    """Return the tile of a buffer with one number per matrix; this tile spans the last two dims of the shape."""
    return (*(1 for _ in shape[:-2]), *(max(size, 1) for size in shape[-2:]))


class ForeignForm(msgspec.Struct, frozen=True):
    """A checkpoint and its config, in a form in which encoded tensors can be read."""

    container: Container
    config: Mapping[str, Any]
    program: str = ""
    """Name of the program that stores the tensors in another form; empty if they are shown as they are stored."""
    middle_zeros: Mapping[str, Callable[[], bool]] = msgspec.field(default_factory=dict)
    """Name of the shown zero points of a tensor that may be symmetric -> function that reads them, and returns whether
    all of them are the middle one.
    """


class Catalog(msgspec.Struct, frozen=True, dict=True):
    """The tensors of a container as entries for the families' tables: an encoded tensor and its buffers are one
    entry.
    """

    container: Container
    """The container with the stored tensors."""
    entries: Mapping[str, Entry]
    """Tensor name -> entry, for plain tensors and for the codes of encoded tensors, with their shape in elements."""
    encoded: Mapping[str, EncodedTensor]
    """Tensor name -> encoded tensor with its buffers."""
    quantization: Quantization | None = None
    """The config's description of the encoded tensors; None if the config does not describe encoded tensors."""
    refusals: tuple[Refusal, ...] = ()
    """Refusals of buffers that cannot be assigned to a tensor or do not fit it."""
    program: str = ""
    """Name of the program that stores the encoded tensors, if `container` shows them in another form than they are
    stored; empty if not.
    """
    middle_zeros: Mapping[str, Callable[[], bool]] = msgspec.field(default_factory=dict)
    """See `ForeignForm`."""

    @cached_property
    def symmetric(self) -> frozenset[str]:
        """Names of the tensors whose zero points are all the middle one; the zero points are read."""
        from transaxle.move.workers import run_workers  # imported here, because few checkpoints need it

        names: list[str] = []

        def read(_: object, tensor: EncodedTensor) -> None:
            if self.middle_zeros[tensor.parts[Role.ZERO]]():
                names.append(tensor.name)

        claimed = (each for each in self.encoded.values() if each.parts.get(Role.ZERO) in self.middle_zeros)
        run_workers(claimed, _READERS, lambda _: None, read)
        return frozenset(names)

    def refuse_in_other_form(self, reason: str, *, instead: bool = False) -> Iterator[Refusal]:
        """Yield the refusal of an action that is not possible with encoded tensors that are shown in another form.

        Args:
            reason: why the action is not possible.
            instead: whether the user has to leave the action out to follow a hint.
        """
        if self.program and self.encoded:
            message = f"its weights are stored as {self.program} stores them{reason}"
            conventions = {tensor.convention for tensor in self.encoded.values()}
            hints = [_DECODED, *([_RESTATE_HINT] if conventions == {COMPRESSED_TENSORS} else []), _WAY_OUT]
            hint = "\n".join(f"{text.removesuffix('.')} instead." if instead else text for text in hints)
            where = Where(None, next(iter(self.encoded)))
            yield Refusal("UNSUPPORTED", message, where, hint)

    @cached_property
    def buffers(self) -> dict[str, Entry]:
        """All entries from which target tensors are read: `entries`, and all other buffers by internal names. Virtual
        files with the shapes of targets are added by `add_buffers`.
        """
        buffers = dict(self.entries)
        for tensor in self.encoded.values():
            for role, stored in tensor.parts.items():
                if role is not Role.CODES:
                    entry = self.container.entries[stored]
                    if role is Role.SHAPE:
                        buffers[buffer_name(tensor.name, role)] = entry
                        continue
                    shape = grid_of(tensor.encoding, tensor.shape, role)
                    buffers[buffer_name(tensor.name, role)] = redescribe(entry, tensor.name, entry.dtype, shape)
        return buffers


def without_zero_points(tensor: EncodedTensor) -> EncodedTensor:
    """Return an encoded tensor as a symmetric one; its zero points must all be the middle one."""
    parts = {role: name for role, name in tensor.parts.items() if role != Role.ZERO}
    return replace(tensor, encoding=dataclasses.replace(tensor.encoding, zero_rows=0), parts=parts)


def grid_of(encoding: Encoding, shape: Shape, role: Role) -> Shape:
    """Return the shape of a tensor's buffer: one number per tile, or for codes the tensor's shape."""
    if role is Role.CODES:
        return shape
    tile = tile_of(encoding, shape, role)
    return tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))


def tile_of(encoding: Encoding, shape: Shape, role: Role) -> Tile:
    """Return how many elements along each dim share one number of a buffer."""
    if role is Role.ZERO:
        return encoding.zero_tiles(shape)
    return encoding.tiles(shape) if role is Role.SCALE else matrix_tile(shape)


def catalog(
    container: Container,
    config: Mapping[str, Any],
    modelopt: Mapping[str, Any] | None,
    foreign: ForeignForm | None = None,
) -> Catalog:
    """Find the encoded tensors of a container.

    Args:
        container: the container with the stored tensors.
        config: content of the model's config; empty if there is none.
        modelopt: content of the separate config of older ModelOpt exports; None if there is no such config.
        foreign: the form in which `container` shows the tensors of another program; None if there is none.

    Returns:
        The container's tensors as entries for the families' tables, with refusals of buffers that do not fit.
    """
    if modelopt is None and not _may_be_encoded(container, config):
        return Catalog(container, container.entries, {})
    container = use_compact_scales(container)
    try:
        quantization = read(config, modelopt=modelopt)
        groups = group(container.entries, quantization, container.metadata)
    except TransaxleError as error:
        return Catalog(container, container.entries, {}, None, refuse_section(error, container))
    refusals = tuple(
        refusal if refusal.hint else dataclasses.replace(refusal, hint=_WAY_OUT) for refusal in groups.refusals
    )
    if not groups.encoded:
        return Catalog(container, container.entries, {}, quantization, refusals)
    codes = {tensor.parts[Role.CODES]: tensor for tensor in groups.encoded.values()}
    other_buffers = {stored for tensor in groups.encoded.values() for stored in tensor.parts.values()} - codes.keys()
    entries: dict[str, Entry] = {}
    problems = list(refusals)
    for stored, entry in container.entries.items():
        if stored in other_buffers:
            continue
        tensor = codes.get(stored)
        try:
            table_entry = (
                entry if tensor is None else redescribe(entry, tensor.name, tensor.encoding.code, tensor.shape)
            )
        except TransaxleError as error:
            problems.extend(error.refusals)
            continue
        if table_entry.name in entries:
            message = "a plain tensor and an encoded tensor have this name"
            problems.append(Refusal("NAME_COLLISION", message, Where(None, table_entry.name)))
        entries[table_entry.name] = table_entry
    tensors = Catalog(container, entries, groups.encoded, quantization, tuple(problems))
    return tensors if foreign is None else replace(tensors, program=foreign.program, middle_zeros=foreign.middle_zeros)


def refuse_section(error: TransaxleError, container: Container) -> tuple[Refusal, ...]:
    """Return the refusals of a quantization config; if all tensors are plain, add the hint that the section may be left
    over.
    """
    names_codes = group(container.entries).refusals
    if names_codes or any(entry.dtype in SPEAKING for entry in container.entries.values()):
        return error.refusals
    hint = "No tensor has codes: if the quantization section is left over from an earlier state, remove it from {}."
    return tuple(
        refusal if refusal.hint == UNKNOWN_KEY else dataclasses.replace(refusal, hint=hint.format(refusal.where.file))
        for refusal in error.refusals
    )


def describes_codes(metadata: Mapping[str, Any]) -> bool:
    """Return whether a container's metadata describes encoded tensors, as in files of torchao and TransformerEngine."""
    return any(key in (TE_NOTE, TORCHAO_NAMES) or key.endswith(f":{TORCHAO_NAMES}") for key in metadata)


def refuse_plain(to: str) -> TransaxleError:
    """Return the error of `decode` for a checkpoint without encoded tensors."""
    hint = f'To cast plain tensors, use --dtype {to} (dtype="{to}") instead.'
    return refuse("AMBIGUOUS", "nothing to decode: the checkpoint has no encoded tensors", hint=hint)


def _may_be_encoded(container: Container, config: Mapping[str, Any]) -> bool:
    """Return whether a dtype, a tensor name, the metadata or the config indicates encoded tensors.

    If nothing indicates encoded tensors, all tensors are plain, and modules for encodings need not be imported.
    """
    return (
        any(entry.dtype in SPEAKING or _SCALE in name for name, entry in container.entries.items())
        or describes_codes(container.metadata)
        or any(SECTIONS.intersection(section) for section in (config, *config.values()) if isinstance(section, Mapping))
    )


class View(Translation, frozen=True):
    """A checkpoint translated into a target dialect; every buffer of an encoded tensor has its stored name."""

    stored: Mapping[str, StoredForm] = msgspec.field(default_factory=dict)
    """Target name -> stored dtype and shape, for targets whose stored dtype or shape differs from that of their
    elements.
    """
    encoded: Mapping[str, EncodedTensor] = msgspec.field(default_factory=dict)
    """Tensor name -> encoded tensor, with the names of its buffers in the target."""

    def form_of(self, name: str) -> StoredForm:
        """Return the safetensors code and the shape with which a target is stored."""
        stored_form = self.stored.get(name)
        if stored_form is None:
            target = self.targets[name]
            return target.dtype, target.shape
        return stored_form


def add_buffers(translation: Translation, catalog: Catalog) -> View:
    """Return a translation with targets for all buffers of encoded tensors.

    Args:
        translation: translation of plain tensors and codes, without any other buffers.
        catalog: the source's tensors as entries for the families' tables.

    Returns:
        The translation with a target for every buffer, under the buffer's stored name, and with further refusals if
        buffers do not fit: BLOCK_MISALIGNED, DTYPE_MIXED and NAME_COLLISION.
    """
    if not catalog.encoded:
        return _view(structs.replace(translation, refusals=(*catalog.refusals, *translation.refusals)), {}, {})
    foreign = catalog.refuse_in_other_form(", which cannot be written with other names")
    return _BufferFollower(structs.replace(translation, refusals=(*foreign, *translation.refusals)), catalog).run()


def _view(translation: Translation, stored: Mapping[str, StoredForm], encoded: Mapping[str, EncodedTensor]) -> View:
    return View(**structs.asdict(translation), stored=stored, encoded=encoded)


class _BufferFollower:
    """Adds, to each target of codes, the targets of the tensor's other buffers, such as scales."""

    def __init__(self, translation: Translation, catalog: Catalog) -> None:
        self.translation = translation
        self.catalog = catalog
        self.problems = [*catalog.refusals, *translation.refusals]
        self.targets: dict[str, Target] = {}
        self.stored: dict[str, StoredForm] = {}
        self.encoded: dict[str, EncodedTensor] = {}
        self.checks: list[Check] = []
        self.names: dict[str, str] = {}
        self.computed: dict[Hashable, tuple[Target, Sequence[Target]]] = {}
        """Targets of scales by what they have in common with those of other layers and experts; see `alike_key`."""

    def run(self) -> View:
        for name, target in self.translation.targets.items():
            try:
                if tensor := self._encoding_of(target):
                    self._follow(target, tensor)
                else:
                    self._add(target, name)
            except TransaxleError as error:
                self._refuse(error.refusals, name)
        for check in self.translation.checks:
            try:
                self.checks.extend(self._buffer_checks(check))
            except TransaxleError as error:
                self._refuse(error.refusals, check.first.name)
        changed = structs.replace(
            self.translation,
            targets=self.targets,
            checks=tuple(self.checks),
            kept_names=tuple(name for old in self.translation.kept_names for name in self._parts(old)),
            aliases={self.names.get(a, a): self.names.get(b, b) for a, b in self.translation.aliases.items()},
            refusals=tuple(self.problems),
        )
        return _view(changed, self.stored, self.encoded)

    def _refuse(self, refusals: Iterable[Refusal], name: str) -> None:
        for refusal in refusals:
            where = Where(refusal.where.file, refusal.where.tensor or name)
            self.problems.append(dataclasses.replace(refusal, where=where))

    def _parts(self, name: str) -> Iterable[str]:
        tensor = self.encoded.get(name)
        return (name,) if tensor is None else tensor.parts.values()

    def _add(self, target: Target, name: str, described: StoredForm | None = None) -> None:
        if name in self.targets:
            message = f"{target.rule}\nwrites the same name as {self.targets[name].rule}"
            self._refuse([Refusal("NAME_COLLISION", message)], name)
        self.targets[name] = target if name == target.name else structs.replace(target, name=name)
        if described is not None and described != (target.dtype, target.shape):
            self.stored[name] = described

    def _encoding_of(self, target: Target) -> EncodedTensor | None:
        """Return one of the encoded tensors from which a target is composed (all are of the same kind); None for a
        plain target.

        Raises:
            Refused: with code DTYPE_MIXED, if the target is composed of encoded tensors of several kinds, or also of
                plain tensors.
        """
        names = [origin.name for part in target.parts for origin in part.origins]
        kinds = {self._kind(name): name for name in names}
        if len(kinds) > 1:
            listed = " and ".join(f"{words} ({name})" for (words, *_), name in kinds.items())
            message = f"{target.rule}\nits parts are stored as {listed}"
            hint = "Decode the tensors with --decode (decode=), or choose a dialect that stores them separately."
            raise refuse("DTYPE_MIXED", message, tensor=target.name, hint=hint)
        return self.catalog.encoded.get(names[0]) if names else None

    def _kind(self, name: str) -> tuple[str, Encoding | None, str]:
        """Return how a tensor is stored: a text that describes its encoding and buffers, the encoding, and the
        convention.
        """
        tensor = self.catalog.encoded.get(name)
        if tensor is None:
            return self.catalog.entries[name].dtype, None, ""
        buffers = (
            f"{role} {self.catalog.container.entries[stored].dtype}" for role, stored in sorted(tensor.parts.items())
        )
        return f"{tensor.encoding.name} ({tensor.convention}: {', '.join(buffers)})", tensor.encoding, tensor.convention

    def _follow(self, target: Target, tensor: EncodedTensor) -> None:
        """Add a target for each buffer of an encoded tensor."""
        convention = CONVENTIONS[tensor.convention] if target.is_identity else writable_convention(tensor)
        parts: dict[Role, str] = {}
        # collected in a list first, so that either all buffers are added, or none
        for role, buffer, checks in list(self._buffers(target, tensor)):
            stored = self.catalog.container.entries[tensor.parts[role]]
            if target.is_identity:
                name, described = stored.name, (stored.dtype, stored.shape)
            else:
                name = convention.stored(target.name, role, tensor.encoding)
                stored_dtype = stored.dtype if role is not Role.CODES else None
                described = convention.presented(tensor.encoding, target.shape, role, stored_dtype)
            parts[role] = name
            self._add(buffer, name, described)
            self.checks.extend(structs.replace(c, first=structs.replace(c.first, name=name)) for c in checks)
        self.names[target.name] = parts[Role.CODES]
        self.encoded[target.name] = EncodedTensor(target.name, tensor.encoding, target.shape, parts, convention.name)

    def _buffers(self, target: Target, tensor: EncodedTensor) -> Iterator[tuple[Role, Target, Sequence[Check]]]:
        """Yield the target of each buffer, with checks that source numbers are equal if they become a single target
        number.

        Raises:
            Refused: with code BLOCK_MISALIGNED, if a target tile needs two scales; with code DTYPE_MIXED, if a source
                tensor lacks a buffer.
        """
        yield Role.CODES, target, ()
        for role in tensor.parts:
            if role is Role.CODES:
                continue
            if role is Role.SHAPE:
                names = dict.fromkeys(origin_names(target))
                yield role, *self._shape(target, tensor, [self.catalog.encoded[name] for name in names])
                continue
            scales = self._scales(target, tensor, role)
            first, *other_targets = scales
            yield (
                role,
                first,
                [
                    Check(first, other_target, _describe_shared(target, role, first, other_target), _DECODE_HINT)
                    for other_target in other_targets
                ],
            )

    def _scales(self, target: Target, tensor: EncodedTensor, role: Role) -> Sequence[Target]:
        """Return the targets of the scales, or other numbers, with a role; the first is written, and the others must
        equal it.
        """
        alike = alike_key(target)
        if alike is None:
            return self._compute_scales(target, tensor, role)
        key = alike, role, self._kind(tensor.name)
        if key in self.computed:
            return _with_names(*self.computed[key], target, role)
        computed = self._compute_scales(target, tensor, role)
        self.computed[key] = target, computed
        return computed

    def _compute_scales(self, target: Target, tensor: EncodedTensor, role: Role) -> Sequence[Target]:
        """Compute the targets of `_scales`."""
        # imported inside the function, because few checkpoints are encoded
        from transaxle.axes.layout.tile import scales

        sources = [self.catalog.encoded[name] for name in origin_names(target)]
        tiles = {source.name: tile_of(source.encoding, source.shape, role) for source in sources}
        tile = tile_of(tensor.encoding, target.shape, role)
        dtype = self.catalog.container.entries[tensor.parts[role]].dtype
        per_matrix = role not in (Role.SCALE, Role.ZERO) or set(tensor.encoding.tile) == {WHOLE}
        split_parts = per_matrix and len(target.parts) > 1 and len(target.shape) > 2
        targets = [structs.replace(target, parts=(part,)) for part in target.parts] if split_parts else [target]
        name_of = partial(buffer_name, role=role)
        relayouts = [scales(relayout, tile, tiles, scale_name=name_of, dtype=dtype) for relayout in targets]
        first, *further = (relayout.target for relayout in relayouts)
        return (first, *(check.second for relayout in relayouts for check in relayout.checks), *further)

    def _shape(
        self, target: Target, tensor: EncodedTensor, sources: Iterable[EncodedTensor]
    ) -> tuple[Target, Sequence[Check]]:
        """Return the target with the shape of an encoded tensor, with checks that the sources state theirs."""
        dtype = self.catalog.container.entries[tensor.parts[Role.SHAPE]].dtype
        checks = []
        for source in sources:
            stored, name = source.parts[Role.SHAPE], buffer_name(source.name, Role.SHAPE)
            stated, entry = self._literal(source.shape, dtype), self.catalog.buffers[name]
            why = f"{stored} states another shape than the codes have, {list(source.shape)}"
            checks.append(Check(identity_target(name, entry), stated, why, SHAPE_HINT))
        return structs.replace(self._literal(target.shape, dtype), rule=target.rule), checks

    def _literal(self, shape: Shape, dtype: str) -> Target:
        """Return a target whose elements are the numbers of a shape."""
        entry = shape_entry(shape, dtype)
        self.catalog.buffers[entry.name] = entry
        return identity_target(entry.name, entry)

    def _buffer_checks(self, check: Check) -> Iterator[Check]:
        """Yield the checks that two copies of an encoded tensor are equal: their codes, scales and other buffers."""
        yield check
        first_tensor, second_tensor = self._encoding_of(check.first), self._encoding_of(check.second)
        if first_tensor is None and second_tensor is None:
            return
        kinds_of_sides = [self._kind(side.parts[0].origins[0].name) for side in (check.first, check.second)]
        if first_tensor is None or second_tensor is None or kinds_of_sides[0] != kinds_of_sides[1]:
            kinds = " and ".join(words for words, *_ in kinds_of_sides)
            message = f"{check.why}\nbut they are stored as {kinds}"
            raise refuse("UNEQUAL_COPIES", message, tensor=check.first.name)
        sides = zip(self._buffers(check.first, first_tensor), self._buffers(check.second, second_tensor), strict=True)
        for (role, first, inside), (_, second, _) in sides:
            if role is not Role.CODES:
                yield from inside
                renamed = structs.replace(first, name=first_tensor.parts[role])
                yield Check(renamed, second, check.why, check.hint)


def _with_names(model: Target, scales: Sequence[Target], target: Target, role: Role) -> Sequence[Target]:
    """Return the targets of the scales of a target that is alike to another one.

    Args:
        model: the other target.
        scales: the targets of its scales.
        target: the target.
        role: role of the scales.
    """
    names = zip(origin_names(model), origin_names(target), strict=True)
    stored = {buffer_name(old, role): buffer_name(new, role) for old, new in names}
    return [
        Target(
            buffer_name(target.name, role),
            each.dtype,
            each.layout,
            each.index,
            tuple(
                [
                    TargetPart(
                        part.component,
                        tuple([Origin(stored[o.name], o.component, o.layout, o.index) for o in part.origins]),
                    )
                    for part in each.parts
                ]
            ),
            target.rule,
        )
        for each in scales
    ]


def _describe_shared(target: Target, role: Role, first: Target, second: Target) -> str:
    """Describe that one number of a target tensor replaces the numbers of two source tensors, and name the two."""
    names = [target_side.parts[0].origins[0].name.partition("\0")[0].split(".") for target_side in (first, second)]
    while names[0][:1] == names[1][:1] != []:
        names = [name[1:] for name in names]
    while names[0][-1:] == names[1][-1:] != []:
        names = [name[:-1] for name in names]
    first_name, second_name = (".".join(name) for name in names)
    return f"{target.rule}\nit has one {role} for the tensors of {first_name} and {second_name}, which have one each"


def writable_convention(tensor: EncodedTensor) -> Convention:
    """Return the convention in which to write an encoded tensor: its own convention, or one with equivalent numbers.

    Raises:
        Refused: with code UNSUPPORTED, if no writable convention has equivalent numbers.
    """
    own_convention, name = CONVENTIONS[tensor.convention], tensor.encoding.name
    for candidate in (own_convention, CONVENTIONS[PREFERRED[name]], *CONVENTIONS.values()):
        if name in candidate.writes and (
            Role.GLOBAL not in tensor.parts or candidate.meaning == own_convention.meaning
        ):
            return candidate
    raise refuse(
        "UNSUPPORTED",
        f"{name} tensors in the convention {own_convention.name} can be read, but not written",
        tensor=tensor.name,
    )
