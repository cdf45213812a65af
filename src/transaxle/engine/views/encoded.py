"""Encoded tensors among plain ones: one name and one shape for the tables, several buffers on disk.

A table speaks of a weight. Where that is stored as codes and scales, the tables see only the codes, under the weight's
name and in its shape. After the translation each buffer follows: the scales by the tiles that they belong to, and all
of them under the names and shapes of the convention. Nothing is decoded on the way.

**Compact scales**: scales that torchao stores in the order of a matrix-multiply kernel, read in the order of rows.

The kernel wants tiles of 128 x 4 scales, padded, and within a tile four rows of 32 side by side (cuBLAS, "1-D block
scaling factors layout"). The tiles follow the order of the tensor's rows. Where such a tensor is decoded or moved to
another dialect, its scales are read from a virtual file whose bytes are reordered on the fly. Under its own name it
stays as it is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import structs
from msgspec.structs import replace

from transaxle.axes.layout.relayout import Check, Shape, Target
from transaxle.axes.translation.translate import Translation
from transaxle.encodings.conventions.buffer_group import SPEAKING, group
from transaxle.encodings.conventions.convention import CONVENTIONS, PREFERRED, TE_NOTE, Convention
from transaxle.encodings.conventions.quantization import SECTIONS, Quantization, read
from transaxle.encodings.conventions.scheme import UNKNOWN_KEY
from transaxle.encodings.conventions.torchao_convention import NAMES as TORCHAO_NAMES
from transaxle.encodings.conventions.torchao_convention import SwizzledTensor, find_swizzled
from transaxle.encodings.encoding import WHOLE, EncodedTensor, Encoding, Role
from transaxle.engine.source import Source, redescribed
from transaxle.errors import Refusal, TransaxleError, Where, refuse
from transaxle.formats.catalog import ITEM_BITS, Container, Entry, Extent
from transaxle.formats.storage.copier import Bytes
from transaxle.formats.storage.storage import VirtualFiles

if TYPE_CHECKING:
    from transaxle.axes.layout.tile import Tile


_ROWS, _COLUMNS, _LANES = 128, 4, 32
"""Rows and columns of one kernel tile, and how many of its rows lie one below the other."""
_KEPT = 8
"""Reordered buffers that are cached, so that reading one piece by piece reorders it once."""
_FILE = "\0compact "
"""What the name of a file that does not exist begins with."""


class _CompactScales(msgspec.Struct, frozen=True):
    """One buffer in the kernel's order, readable as a file in compact order."""

    source: Entry
    """As it is stored."""
    shape: tuple[int, int]
    """Scales along both dims, padding left out."""
    compact: Callable[[str], Bytes]
    """Returns a stored buffer in compact order, by its name."""

    @property
    def nbytes(self) -> int:
        """See `VirtualFile`."""
        return self.shape[0] * self.shape[1]

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `VirtualFile`."""
        view.cast("B")[:] = self.compact(self.source.name)[offset : offset + view.nbytes].data


def ordered(stored: Bytes, shape: tuple[int, int]) -> Bytes:
    """Return scales in compact order, flat.

    Args:
        stored: one byte each, in the kernel's order, padding included.
        shape: scales along both dims without padding.

    Post-condition: scale `(r, c)` was at `512 t + 16 (r % 32) + 4 (r % 128 // 32) + c % 4`, with `t` its tile.
    """
    rows, columns = (-(-size // step) for size, step in zip(shape, (_ROWS, _COLUMNS), strict=True))
    tiles = stored.reshape(rows, columns, _LANES, _ROWS // _LANES, _COLUMNS)
    padded = tiles.transpose(0, 3, 2, 1, 4).reshape(rows * _ROWS, columns * _COLUMNS)
    return np.ascontiguousarray(padded[: shape[0], : shape[1]]).reshape(-1)


def ordering(container: Container) -> Container:
    """Return the same container, which can also read torchao's scales in compact order; see `compacted`."""
    entries = container.entries
    described = {
        name: (tensor, shape)
        for name, tensor in find_swizzled(container.metadata).items()
        if (shape := _shape(entries, tensor))
    }
    if not described:
        return container
    scales = {tensor.scale: shape for tensor, shape in described.values()}
    source = Source(container, {name: entries[name] for name in scales})
    reordered = lru_cache(_KEPT)(lambda name: ordered(source.read(name), scales[name]))
    files = {_FILE + name: _CompactScales(entries[name], shape, reordered) for name, shape in scales.items()}
    compact = {
        tensor.source.name: replace(tensor.source, shape=tensor.shape, extents=(Extent((0, 0), tensor.shape, file, 0),))
        for file, tensor in files.items()
    }
    notes = {name: json.dumps(tensor.compact) for name, (tensor, _) in described.items()}
    recoding = replace(container.recoding, compact=compact, compact_notes=notes)
    return replace(container, storage=VirtualFiles(container.storage, files), recoding=recoding)


def compacted(container: Container) -> Container:
    """Return a container with compact scales, as tables need them; see `ordering`."""
    compact, notes = container.recoding.compact, container.recoding.compact_notes
    if not compact:
        return container
    entries = {name: compact.get(name, entry) for name, entry in container.entries.items()}
    metadata = {key: notes.get(key, value) for key, value in container.metadata.items()}
    return replace(container, entries=entries, metadata=metadata)


def _shape(entries: Mapping[str, Entry], description: SwizzledTensor) -> tuple[int, int] | None:
    """Return the number of scales along both dims; None if the stored ones do not fill the kernel's tiles."""
    codes, scale = entries.get(description.codes), entries.get(description.scale)
    if codes is None or scale is None or len(codes.shape) != 2 or ITEM_BITS.get(scale.dtype) != 8:
        return None
    shape = codes.shape[0], -(-codes.shape[1] * description.per_byte // description.block)
    tiles = -(-shape[0] // _ROWS) * -(-shape[1] // _COLUMNS)
    return shape if scale.nbytes == tiles * _ROWS * _COLUMNS and scale.nbytes else None


StoredForm = tuple[str, Shape]
"""Safetensors code and shape under which a target is stored, if they differ from the target's own."""

_SCALE = "scale"
"""Part of the name of every buffer of scales."""
_WAY_OUT = "To keep the tensors exactly as stored:  --to safetensors:identity."
"""Hint for buffers that do not fit together."""
_DECODED = "Choose a dialect that keeps these tensors apart, or decode them:  --decode bf16."
"""Hint for tensors that would have to share one scale."""


def buffer_name(name: str, role: Role) -> str:
    """Return the internal name of a buffer; no stored tensor has it."""
    return name if role is Role.CODES else f"{name}\0{role}"


def matrix(shape: Shape) -> Tile:
    """Return the tile of a buffer with one number per matrix: the last two dims."""
    return (*(1 for _ in shape[:-2]), *(max(size, 1) for size in shape[-2:]))


class Catalog(msgspec.Struct, frozen=True, dict=True):
    """The tensors of a container as tables see them."""

    container: Container
    """The files."""
    entries: Mapping[str, Entry]
    """Table name -> entry: plain tensors, and the codes of encoded ones with the shape in elements."""
    encoded: Mapping[str, EncodedTensor]
    """The encoded tensors among them."""
    quantization: Quantization | None = None
    """The config's description of them."""
    refusals: tuple[Refusal, ...] = ()
    """Buffers that cannot be grouped, or do not fit."""

    @cached_property
    def buffers(self) -> Mapping[str, Entry]:
        """Every entry that targets are read from: the tables' entries, and the other buffers under internal names."""
        buffers = dict(self.entries)
        for tensor in self.encoded.values():
            for role, stored in tensor.parts.items():
                if role is not Role.CODES:
                    entry = self.container.entries[stored]
                    shape = grid_of(tensor.encoding, tensor.shape, role)
                    buffers[buffer_name(tensor.name, role)] = redescribed(entry, tensor.name, entry.dtype, shape)
        return buffers


def grid_of(encoding: Encoding, shape: Shape, role: Role) -> Shape:
    """Return the shape of a buffer of a tensor, counted in tiles; of the codes, in elements."""
    if role is Role.CODES:
        return shape
    tile = tile_of(encoding, shape, role)
    return tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))


def tile_of(encoding: Encoding, shape: Shape, role: Role) -> Tile:
    """Return how many elements along each dim share one number of a buffer."""
    return encoding.tiles(shape) if role is Role.SCALE else matrix(shape)


def catalog(container: Container, config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> Catalog:
    """Find the encoded tensors of a container.

    Args:
        container: the files.
        config: the model's config; empty where there is none.
        modelopt: what stands in the config of older ModelOpt exports, where there is one.

    Returns:
        Its tensors for the tables; with refusals where the buffers do not fit together.
    """
    if modelopt is None and not _speaks_of_encodings(container, config):
        return Catalog(container, container.entries, {})
    container = compacted(container)
    try:
        quantization = read(config, modelopt=modelopt)
        groups = group(container.entries, quantization, container.metadata)
    except TransaxleError as error:
        return Catalog(container, container.entries, {}, None, _explained(error, container))
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
                entry if tensor is None else redescribed(entry, tensor.name, tensor.encoding.code, tensor.shape)
            )
        except TransaxleError as error:
            problems.extend(error.refusals)
            continue
        if table_entry.name in entries:
            message = "a plain tensor and an encoded tensor have this name"
            problems.append(Refusal("NAME_COLLISION", message, Where(None, table_entry.name)))
        entries[table_entry.name] = table_entry
    return Catalog(container, entries, groups.encoded, quantization, tuple(problems))


def _explained(error: TransaxleError, container: Container) -> tuple[Refusal, ...]:
    """Return the refusals of a config; where all tensors are plain, with a hint that its section may be left over."""
    names_codes = group(container.entries).refusals
    if names_codes or any(entry.dtype in SPEAKING for entry in container.entries.values()):
        return error.refusals
    hint = "No tensor has codes: if that section is left over from before, remove it from {}."
    return tuple(
        refusal if refusal.hint == UNKNOWN_KEY else dataclasses.replace(refusal, hint=hint.format(refusal.where.file))
        for refusal in error.refusals
    )


def describes_tensors(metadata: Mapping[str, Any]) -> bool:
    """Tell whether a container's metadata describes encoded tensors, as torchao's files and TransformerEngine's do."""
    return any(key in (TE_NOTE, TORCHAO_NAMES) or key.endswith(f":{TORCHAO_NAMES}") for key in metadata)


def nothing_encoded(to: str) -> TransaxleError:
    """Build the refusal of `decode` for a checkpoint without encoded tensors."""
    hint = f'To cast plain tensors, use --dtype {to} (dtype="{to}").'
    return refuse("AMBIGUOUS", "nothing to decode: the checkpoint has no encoded tensors", hint=hint)


def _speaks_of_encodings(container: Container, config: Mapping[str, Any]) -> bool:
    """Tell whether anything speaks of encoded tensors: a dtype, a name, the metadata or the config.

    If nothing does, all tensors are plain, and nobody need know how encoded ones are stored.
    """
    return (
        any(entry.dtype in SPEAKING or _SCALE in name for name, entry in container.entries.items())
        or describes_tensors(container.metadata)
        or any(SECTIONS.intersection(section) for section in (config, *config.values()) if isinstance(section, Mapping))
    )


class View(Translation, frozen=True):
    """A checkpoint in another dialect, with every buffer under its stored name."""

    stored: Mapping[str, StoredForm] = msgspec.field(default_factory=dict)
    """Dtype and shape of targets that are stored in another form than their elements."""
    encoded: Mapping[str, EncodedTensor] = msgspec.field(default_factory=dict)
    """The encoded tensors by table name, with the names of their buffers."""

    def described(self, name: str) -> StoredForm:
        """Return the safetensors code and the shape under which a target is stored."""
        stored_form = self.stored.get(name)
        if stored_form is None:
            target = self.targets[name]
            return target.dtype, target.shape
        return stored_form


def viewed(translation: Translation, catalog: Catalog) -> View:
    """Make the other buffers of encoded tensors follow the codes.

    Args:
        translation: of the tensors that the tables see.
        catalog: these tensors.

    Returns:
        The same view with a target for every buffer, each under its stored name. Its refusals grow by BLOCK_MISALIGNED,
            DTYPE_MIXED and NAME_COLLISION.
    """
    if not catalog.encoded:
        return _view(structs.replace(translation, refusals=(*catalog.refusals, *translation.refusals)), {}, {})
    return _BufferFollower(translation, catalog).run()


def _view(translation: Translation, stored: Mapping[str, StoredForm], encoded: Mapping[str, EncodedTensor]) -> View:
    return View(**structs.asdict(translation), stored=stored, encoded=encoded)


class _BufferFollower:
    """Adds to each target of codes the targets of the other buffers."""

    def __init__(self, translation: Translation, catalog: Catalog) -> None:
        self.translation = translation
        self.catalog = catalog
        self.problems = [*catalog.refusals, *translation.refusals]
        self.targets: dict[str, Target] = {}
        self.stored: dict[str, StoredForm] = {}
        self.encoded: dict[str, EncodedTensor] = {}
        self.checks: list[Check] = []
        self.names: dict[str, str] = {}

    def run(self) -> View:
        for name, target in self.translation.targets.items():
            try:
                if tensor := self._encoded(target):
                    self._follow(target, tensor)
                else:
                    self._add(target, name)
            except TransaxleError as error:
                self._refuse(error.refusals, name)
        for check in self.translation.checks:
            try:
                self.checks.extend(self._checked(check))
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

    def _encoded(self, target: Target) -> EncodedTensor | None:
        """Return one of the encoded tensors that a target consists of, which are all alike; None for a plain target.

        Raises:
            Refused: DTYPE_MIXED for encoded tensors of several kinds, or beside plain ones.
        """
        names = [origin.name for part in target.parts for origin in part.origins]
        kinds = {self._kind(name): name for name in names}
        if len(kinds) > 1:
            listed = " and ".join(f"{words} ({name})" for (words, *_), name in kinds.items())
            message = f"{target.rule}\nits parts are stored as {listed}"
            hint = "Decode them with --decode (decode=), or choose a dialect that stores them apart."
            raise refuse("DTYPE_MIXED", message, tensor=target.name, hint=hint)
        return self.catalog.encoded.get(names[0]) if names else None

    def _kind(self, name: str) -> tuple[str, Encoding | None, str]:
        """Return how a tensor is stored, as a text that names its buffers, its encoding and its convention."""
        tensor = self.catalog.encoded.get(name)
        if tensor is None:
            return self.catalog.entries[name].dtype, None, ""
        buffers = (
            f"{role} {self.catalog.container.entries[stored].dtype}" for role, stored in sorted(tensor.parts.items())
        )
        return f"{tensor.encoding.name} ({tensor.convention}: {', '.join(buffers)})", tensor.encoding, tensor.convention

    def _follow(self, target: Target, tensor: EncodedTensor) -> None:
        """Add a target for each buffer of an encoded tensor."""
        convention = CONVENTIONS[tensor.convention] if target.is_identity else written_as(tensor)
        parts: dict[Role, str] = {}
        for role, buffer, checks in list(self._buffers(target, tensor)):  # all of them, or none
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
        """Yield the target of each buffer, in tiles, with checks of the numbers that become one and so must be equal.

        Raises:
            Refused: BLOCK_MISALIGNED; DTYPE_MIXED where one of several sources lacks a buffer.
        """
        from transaxle.axes.layout.tile import scales  # few checkpoints are encoded

        yield Role.CODES, target, ()
        sources = {o.name: self.catalog.encoded[o.name] for part in target.parts for o in part.origins}
        for role in tensor.parts:
            if role is Role.CODES:
                continue
            tiles = {name: tile_of(source.encoding, source.shape, role) for name, source in sources.items()}
            tile = tile_of(tensor.encoding, target.shape, role)
            dtype = self.catalog.container.entries[tensor.parts[role]].dtype
            per_matrix = role is not Role.SCALE or set(tensor.encoding.tile) == {WHOLE}
            split_parts = per_matrix and len(target.parts) > 1 and len(target.shape) > 2
            targets = [structs.replace(target, parts=(part,)) for part in target.parts] if split_parts else [target]
            relayouts = [
                scales(relayout, tile, tiles, scale_name=partial(buffer_name, role=role), dtype=dtype)
                for relayout in targets
            ]
            first, *other_targets = (relayout.target for relayout in relayouts)
            other_targets = [*(check.second for relayout in relayouts for check in relayout.checks), *other_targets]
            yield (
                role,
                first,
                [
                    Check(first, other_target, _merged(target, role, first, other_target), _DECODED)
                    for other_target in other_targets
                ],
            )

    def _checked(self, check: Check) -> Iterator[Check]:
        """Yield a check of two copies, and those of their other buffers."""
        yield check
        first_tensor, second_tensor = self._encoded(check.first), self._encoded(check.second)
        if first_tensor is None and second_tensor is None:
            return
        ways = [self._kind(side.parts[0].origins[0].name) for side in (check.first, check.second)]
        if first_tensor is None or second_tensor is None or ways[0] != ways[1]:
            kinds = " and ".join(words for words, *_ in ways)
            message = f"{check.why}\nbut they are stored as {kinds}"
            raise refuse("UNEQUAL_COPIES", message, tensor=check.first.name)
        sides = zip(self._buffers(check.first, first_tensor), self._buffers(check.second, second_tensor), strict=True)
        for (role, first, inside), (_, second, _) in sides:
            if role is not Role.CODES:
                yield from inside
                named = structs.replace(first, name=first_tensor.parts[role])
                yield Check(named, second, check.why, check.hint)


def _merged(target: Target, role: Role, first: Target, second: Target) -> str:
    """Say that one number of a target stands for those of two sources: what their names do not have in common."""
    names = [target_side.parts[0].origins[0].name.partition("\0")[0].split(".") for target_side in (first, second)]
    while names[0][:1] == names[1][:1] != []:
        names = [name[1:] for name in names]
    while names[0][-1:] == names[1][-1:] != []:
        names = [name[:-1] for name in names]
    first_name, second_name = (".".join(name) for name in names)
    return f"{target.rule}\nit has one {role} for the tensors of {first_name} and {second_name}, which have one each"


def written_as(tensor: EncodedTensor) -> Convention:
    """Return the convention in which an encoded tensor is written: its own, or one with the same numbers.

    Raises:
        Refused: UNSUPPORTED where there is none.
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
