"""Encoded tensors among plain ones: one name and one shape for the tables, several buffers on disk.

A table speaks of a weight. Where that is stored as codes and scales, the tables see the codes alone, under the weight's
name and in its shape; after the translation each buffer follows: the scales by the tiles that they belong to, and all
of them under the names and shapes of the convention. Nothing is decoded on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from transaxle.axes.layout.relayout import IDENTITY, Check, Target
from transaxle.axes.layout.solve import Shape
from transaxle.axes.layout.tile import Tile, scales
from transaxle.axes.translation.translate import Translation
from transaxle.encodings.conventions.buffer_group import group
from transaxle.encodings.conventions.convention import CONVENTIONS, PREFERRED, Convention
from transaxle.encodings.conventions.quantization import Quantization, read
from transaxle.encodings.encoding import WHOLE, Encoded, Encoding, Role
from transaxle.engine.copying.bitcast import redescribed
from transaxle.engine.views.swizzled_scales import compacted
from transaxle.errors import Refusal, TransaxleError, Where, refuse
from transaxle.formats.catalog.catalog import Container, Entry

Stored = tuple[str, Shape]
"""Safetensors code and shape under which a target is stored, where these are not the target's own."""

_WAY_OUT = "what is stored still moves as it is:  --to FORMAT:identity"
"""What can be done with buffers that do not go together."""


def buffer_name(name: str, role: Role) -> str:
    """Return the name of a buffer among all entries: no stored tensor has it."""
    return name if role is Role.CODES else f"{name}\0{role}"


def matrix(shape: Shape) -> Tile:
    """Return the tile of what there is one of for every matrix: the last two dims."""
    return (*(1 for _ in shape[:-2]), *(max(size, 1) for size in shape[-2:]))


@dataclass(frozen=True)
class Catalog:
    """The tensors of a container as tables see them."""

    container: Container
    """The files."""
    entries: Mapping[str, Entry]
    """By table name: plain tensors, and the codes of encoded ones, in their elements."""
    encoded: Mapping[str, Encoded]
    """The encoded ones among them."""
    quantization: Quantization | None = None
    """What the config says of them."""
    refusals: tuple[Refusal, ...] = ()
    """Why their buffers cannot be told apart, or do not fit."""

    @cached_property
    def buffers(self) -> Mapping[str, Entry]:
        """Every entry that targets are made of: those of the tables, and the other buffers under inner names."""
        found = dict(self.entries)
        for one in self.encoded.values():
            for role, stored in one.parts.items():
                if role is not Role.CODES:
                    entry = self.container.entries[stored]
                    shape = grid_of(one.encoding, one.shape, role)
                    found[buffer_name(one.name, role)] = redescribed(entry, one.name, entry.dtype, shape)
        return found


def grid_of(encoding: Encoding, shape: Shape, role: Role) -> Shape:
    """Return the shape of a buffer of a tensor, counted in tiles; of the codes, in elements."""
    if role is Role.CODES:
        return shape
    tile = tile_of(encoding, shape, role)
    return tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))


def tile_of(encoding: Encoding, shape: Shape, role: Role) -> Tile:
    """Return how many elements along each dim have one number of a buffer in common."""
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
    container = compacted(container)
    try:
        quantization = read(config, modelopt=modelopt)
        found = group(container.entries, quantization, container.metadata)
    except TransaxleError as error:
        return Catalog(container, container.entries, {}, None, error.refusals)
    refusals = tuple(refusal if refusal.hint else replace(refusal, hint=_WAY_OUT) for refusal in found.refusals)
    if not found.encoded:
        return Catalog(container, container.entries, {}, quantization, refusals)
    codes = {one.parts[Role.CODES]: one for one in found.encoded.values()}
    others = {stored for one in found.encoded.values() for stored in one.parts.values()} - codes.keys()
    entries: dict[str, Entry] = {}
    problems = list(refusals)
    for stored, entry in container.entries.items():
        if stored in others:
            continue
        one = codes.get(stored)
        try:
            seen = entry if one is None else redescribed(entry, one.name, one.encoding.code, one.shape)
        except TransaxleError as error:
            problems.extend(error.refusals)
            continue
        if seen.name in entries:
            message = "this name is that of a plain tensor and of an encoded one"
            problems.append(Refusal("NAME_COLLISION", message, Where(None, seen.name)))
        entries[seen.name] = seen
    return Catalog(container, entries, found.encoded, quantization, tuple(problems))


@dataclass(frozen=True)
class View(Translation):
    """A checkpoint in another dialect, with every buffer under the name that it is stored by."""

    stored: Mapping[str, Stored] = field(default_factory=dict)
    """Type and shape of the targets that are stored otherwise than they are counted."""
    encoded: Mapping[str, Encoded] = field(default_factory=dict)
    """The encoded tensors by table name, with the names of their buffers."""

    def described(self, name: str) -> Stored:
        """Return the safetensors code and the shape under which a target is stored."""
        found = self.stored.get(name)
        if found is None:
            target = self.targets[name]
            return target.dtype, target.shape
        return found


def viewed(translation: Translation, held: Catalog) -> View:
    """Let the other buffers of encoded tensors follow the codes.

    Args:
        translation: of the tensors that the tables see.
        held: these tensors.

    Returns:
        The same with a target for every buffer, each under its stored name. What stands against it is added to the
        refusals: BLOCK_MISALIGNED, DTYPE_MIXED, NAME_COLLISION.
    """
    if not held.encoded:
        return View(**{**vars(translation), "refusals": (*held.refusals, *translation.refusals)})
    return _Viewer(translation, held).run()


class _Viewer:
    def __init__(self, translation: Translation, held: Catalog) -> None:
        self.translation = translation
        self.held = held
        self.problems = [*held.refusals, *translation.refusals]
        self.targets: dict[str, Target] = {}
        self.stored: dict[str, Stored] = {}
        self.encoded: dict[str, Encoded] = {}
        self.checks: list[Check] = []
        self.names: dict[str, str] = {}

    def run(self) -> View:
        for name, target in self.translation.targets.items():
            try:
                if one := self._encoded(target):
                    self._follow(target, one)
                else:
                    self._add(target, name)
            except TransaxleError as error:
                self._refuse(error.refusals, name)
        for check in self.translation.checks:
            try:
                self.checks.extend(self._checked(check))
            except TransaxleError as error:
                self._refuse(error.refusals, check.first.name)
        changed = {
            "targets": self.targets,
            "checks": tuple(self.checks),
            "kept": tuple(name for old in self.translation.kept for name in self._parts(old)),
            "aliases": {self.names.get(a, a): self.names.get(b, b) for a, b in self.translation.aliases.items()},
            "refusals": tuple(self.problems),
        }
        return View(**{**vars(self.translation), **changed}, stored=self.stored, encoded=self.encoded)

    def _refuse(self, refusals: Iterable[Refusal], name: str) -> None:
        for found in refusals:
            where = Where(found.where.file, found.where.tensor or name)
            self.problems.append(replace(found, where=where))

    def _parts(self, name: str) -> Iterable[str]:
        one = self.encoded.get(name)
        return (name,) if one is None else one.parts.values()

    def _add(self, target: Target, name: str, described: Stored | None = None) -> None:
        if name in self.targets:
            message = f"{target.rule}\nwrites the name of {self.targets[name].rule}"
            self._refuse([Refusal("NAME_COLLISION", message)], name)
        self.targets[name] = target if name == target.name else replace(target, name=name)
        if described is not None and described != (target.dtype, target.shape):
            self.stored[name] = described

    def _encoded(self, target: Target) -> Encoded | None:
        """Return one of the encoded tensors that a target consists of, which are all alike; None for a plain target.

        Raises:
            Refused: DTYPE_MIXED for encoded tensors of several kinds, or beside plain ones.
        """
        names = [origin.name for part in target.parts for origin in part.origins]
        kinds = {self._kind(name): name for name in names}
        if len(kinds) > 1:
            listed = " and ".join(f"{words} ({name})" for (words, *_), name in kinds.items())
            raise refuse("DTYPE_MIXED", f"{target.rule}\nits parts are stored as {listed}", tensor=target.name)
        return self.held.encoded.get(names[0]) if names else None

    def _kind(self, name: str) -> tuple[str, Encoding | None, str]:
        """Return how a tensor is stored: in words, which name all its buffers, and what else must be alike."""
        one = self.held.encoded.get(name)
        if one is None:
            return self.held.entries[name].dtype, None, ""
        buffers = (f"{role} {self.held.container.entries[stored].dtype}" for role, stored in sorted(one.parts.items()))
        return f"{one.encoding.name} ({one.convention}: {', '.join(buffers)})", one.encoding, one.convention

    def _follow(self, target: Target, one: Encoded) -> None:
        """Add a target for each buffer of an encoded tensor."""
        kept = _alone(target, one)
        convention = CONVENTIONS[one.convention] if kept else written_as(one)
        parts: dict[Role, str] = {}
        for role, buffer, checks in list(self._buffers(target, one)):  # all of them, or none
            stored = self.held.container.entries[one.parts[role]]
            if kept:
                name, described = stored.name, (stored.dtype, stored.shape)
            else:
                name = convention.stored(target.name, role, one.encoding)
                own = stored.dtype if role is not Role.CODES else None
                described = convention.presented(one.encoding, target.shape, role, own)
            parts[role] = name
            self._add(buffer, name, described)
            self.checks.extend(replace(c, first=replace(c.first, name=name)) for c in checks)
        self.names[target.name] = parts[Role.CODES]
        self.encoded[target.name] = Encoded(target.name, one.encoding, target.shape, parts, convention.name)

    def _buffers(self, target: Target, one: Encoded) -> Iterator[tuple[Role, Target, Sequence[Check]]]:
        """Yield the target of each buffer, in tiles, and the numbers that must be equal because they become one.

        Raises:
            Refused: BLOCK_MISALIGNED; DTYPE_MIXED where one of several sources lacks a buffer.
        """
        yield Role.CODES, target, ()
        sources = {o.name: self.held.encoded[o.name] for part in target.parts for o in part.origins}
        for role in one.parts:
            if role is Role.CODES:
                continue
            tiles = {name: tile_of(source.encoding, source.shape, role) for name, source in sources.items()}
            tile = tile_of(one.encoding, target.shape, role)
            dtype = self.held.container.entries[one.parts[role]].dtype
            whole = role is not Role.SCALE or set(one.encoding.tile) == {WHOLE}
            several = whole and len(target.parts) > 1 and len(target.shape) > 2
            targets = [replace(target, parts=(part,)) for part in target.parts] if several else [target]
            found = [scales(each, tile, tiles, named=partial(buffer_name, role=role), dtype=dtype) for each in targets]
            first, *others = (each.target for each in found)
            others = [*(check.second for each in found for check in each.checks), *others]
            yield role, first, [Check(first, other, _merged(target, role, first, other)) for other in others]

    def _checked(self, check: Check) -> Iterator[Check]:
        """Yield a check of two copies, and those of their other buffers."""
        yield check
        one, two = self._encoded(check.first), self._encoded(check.second)
        if one is None and two is None:
            return
        ways = [self._kind(side.parts[0].origins[0].name) for side in (check.first, check.second)]
        if one is None or two is None or ways[0] != ways[1]:
            kinds = " and ".join(words for words, *_ in ways)
            message = f"{check.why}\nbut they are stored as {kinds}"
            raise refuse("UNEQUAL_COPIES", message, tensor=check.first.name)
        sides = zip(self._buffers(check.first, one), self._buffers(check.second, two), strict=True)
        for (role, first, inside), (_, second, _) in sides:
            if role is not Role.CODES:
                yield from inside
                named = replace(first, name=one.parts[role])
                yield Check(named, second, check.why)


def _merged(target: Target, role: Role, first: Target, second: Target) -> str:
    """Say that one number of a target stands for those of two sources: what their names do not have in common."""
    names = [each.parts[0].origins[0].name.partition("\0")[0].split(".") for each in (first, second)]
    while names[0][:1] == names[1][:1] != []:
        names = [name[1:] for name in names]
    while names[0][-1:] == names[1][-1:] != []:
        names = [name[:-1] for name in names]
    one, other = (".".join(name) for name in names)
    return f"{target.rule}\none {role} stands for those of {one} and {other}; --decode bf16 needs none"


def _alone(target: Target, one: Encoded) -> bool:
    """Tell whether a target is a stored tensor as it is, under its own name."""
    return target.name == one.name and [part.component for part in target.parts] == [IDENTITY]


def written_as(one: Encoded) -> Convention:
    """Return the convention in which an encoded tensor is written: its own, or one with the same numbers.

    Raises:
        Refused: UNSUPPORTED where there is none.
    """
    own, name = CONVENTIONS[one.convention], one.encoding.name
    for each in (own, CONVENTIONS[PREFERRED[name]], *CONVENTIONS.values()):
        if name in each.writes and (Role.GLOBAL not in one.parts or each.meaning == own.meaning):
            return each
    raise refuse("UNSUPPORTED", f"{name} tensors as {own.name} has them are read, not written", tensor=one.name)
