"""The files of a peft adapter, in another dialect of the model that it changes.

**Converting**: the files of an adapter as those of an adapter of the same model in another dialect.

The names are those that peft gives to the modules and parameters of a model whose weights have the dialect's names. The
tables need to know the whole model, of which an adapter changes a part: its config tells.

**Factors**: where the A and B of an adapter go when the weight that they change is laid out in another way.

A weight's change is `B @ A`, so the axes of its rows are B's and those of its columns A's. Where several weights become
one, their ranks lie side by side and B is zero outside of its blocks, which is the same change; weights with the same A
share its ranks. Nothing is computed: every value of the new factors is one of the old, or zero.

The files of an adapter as peft writes them: what its tensors are called, and what adapter_config.json says.

Modules and parameters are listed by their whole paths, which mean the same in every model that has them. peft nests the
parameters of one module in the order in which the module has them: here, that of the table's lines.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from msgspec import structs
from msgspec.structs import replace

from transaxle.axes.layout.model_tensors import Model as Tables
from transaxle.axes.layout.relayout import Check, Origin, Target, TargetPart
from transaxle.axes.notation.expression import Layout, Share
from transaxle.engine.lora import EMBEDDING, INNER, LINEAR, PREFIX, USUAL, Changes, Lora, LowRank
from transaxle.engine.merging import Model, missing, origins
from transaxle.engine.source import Source
from transaxle.engine.views.decoded import RowMajorBytes
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Container, Entry, Extent, nbytes
from transaxle.formats.storage.storage import InMemoryFile, VirtualFile, VirtualFiles
from transaxle.move.journal import digest

_RANK = "\0rank"
"""The axis that A and B have in common."""
_WHOLE = ""
"""Name of what a stored factor holds."""
_OUT, _IN, _STACK = "rows", "columns", "matrices"
WAY = "Merge it into the base:  transaxle convert BASE OUT --to hf --merge ADAPTER."
_EVERY = -1
"""The place of a change that reaches all matrices of a stack."""
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """The factors of what changes a weight of another dialect."""

    first: Target
    """A: `[matrices * rank, in]`."""
    second: Target
    """B: `[out, rank * matrices]`."""
    rank: int
    """Rank of each matrix."""
    scaling: float
    """What their product is multiplied with."""
    dims: int
    """Of the weight."""
    swapped: bool
    """Whether the weight is `[in, out]`."""
    embedding: bool
    """Whether the weight is that of an embedding."""


@dataclass(frozen=True, slots=True)
class _Term:
    """One weight's change, as a part of the target has it."""

    change: LowRank
    origin: Origin
    shares: tuple[Share, ...]
    """Of the target's dims, as far as the weight reaches."""

    def roles(self) -> dict[str, str]:
        """Return what each axis of the weight numbers."""
        *stack, rows, columns = self.origin.layout.shares[self.origin.component]
        if self.change.swapped:
            rows, columns = columns, rows
        named = ((_STACK, stack), (_OUT, [rows]), (_IN, [columns]))
        return {axis: role for role, shares in named for share in shares for axis, _, _ in share.axes}

    @property
    def rank(self) -> int:
        return self.change.first.shape[0] // self.change.matrices

    def stored(self, role: str) -> Share:
        """Return the stored weight's share of its matrices, rows or columns."""
        *stack, rows, columns = self.origin.layout.shares[self.origin.component]
        if role == _STACK:
            return stack[0] if stack else Share(0, ())
        return rows if (role == _OUT) != self.change.swapped else columns


def pair(target: Target, changes: Mapping[str, LowRank], content: Callable[[Entry], object]) -> Pair:
    """Return the factors of a target's change.

    Args:
        target: the weight in the other dialect, made of weights that the adapter may change.
        changes: weight -> its change.
        content: what is equal for tensors with equal values.

    Raises:
        Refused: UNSUPPORTED where the change of the target has no factors, or they need several scalings; DTYPE_MIXED.
    """
    terms = [
        _Term(changes[origin.name], origin, tuple(_reached(share, origin) for share in shares))
        for part in target.parts
        for shares in [target.layout.shares[part.component]]
        for origin in part.origins
        if origin.name in changes
    ]
    dims = _dims(target, terms)
    _check_alike(target, terms)
    offsets, rank = _ranks(terms, dims, content)
    shape, stack = target.shape, dims.get(_STACK)
    matrices = 1 if stack is None else shape[stack]
    first_shares, second_shares = dict[str, tuple[Share, ...]](), dict[str, tuple[Share, ...]]()
    firsts, seconds = list[TargetPart](), list[TargetPart]()
    for number, (term, (offset, shared)) in enumerate(zip(terms, offsets, strict=True)):
        place = Share(0, ()) if stack is None else term.shares[stack]
        name, ranks = str(number), (_RANK, term.rank, 1)
        if not shared:
            held = _outside(place, rank, ranks, offset)
            first_shares[name] = held, term.shares[dims[_IN]]
            firsts.append(TargetPart(name, (_first_origin(term),)))
        held = _inside(place, matrices, ranks, offset)
        second_shares[name] = term.shares[dims[_OUT]], held
        seconds.append(TargetPart(name, (_second_origin(term),)))
    a, b = (matrices * rank, shape[dims[_IN]]), (shape[dims[_OUT]], rank * matrices)
    dtype = terms[0].change.first.dtype
    return Pair(
        Target(target.name, dtype, Layout(a, first_shares), target.index, tuple(firsts), target.rule),
        Target(target.name, dtype, Layout(b, second_shares), target.index, tuple(seconds), target.rule),
        rank,
        terms[0].change.scaling,
        len(shape),
        dims[_IN] < dims[_OUT],
        terms[0].change.embedding,
    )


def _reached(share: Share, origin: Origin) -> Share:
    """Return the part of a dim's share that one stored tensor fills: the axes of its name have one index each."""
    offset = share.offset + sum(origin.index[axis] * step for axis, _, step in share.axes if axis in origin.index)
    return Share(offset, tuple(axis for axis in share.axes if axis[0] not in origin.index))


def _dims(target: Target, terms: Iterable[_Term]) -> dict[str, int]:
    """Return which dim of a target its rows, its columns and the matrices of a stack are.

    Raises:
        Refused: UNSUPPORTED where a dim is several of them, or one of them is several dims.
    """
    found: dict[str, set[int]] = defaultdict(set)
    for term in terms:
        roles = term.roles()
        for dim, share in enumerate(term.shares):
            for axis, _, _ in share.axes:
                if axis in roles:  # what only the target has repeats whatever the dim is
                    found[roles[axis]].add(dim)
    used = set().union(*found.values())
    wanted = (_STACK, _OUT, _IN) if len(target.shape) == 3 else (_OUT, _IN)
    lacking, free = [role for role in wanted if not found[role]], set(range(len(target.shape))) - used
    if len(lacking) == len(free) == 1:  # of a stack of named experts, or of size 1
        found[lacking[0]] = free
    dims = {role: next(iter(places)) for role, places in found.items() if len(places) == 1}
    if len(target.shape) not in (2, 3) or set(dims) != set(wanted) or len(set(dims.values())) != len(wanted):
        message = f"{target.rule}\nits dims are not rows and columns of what the adapter changes: no A and B give that"
        raise refuse("UNSUPPORTED", f"{message} ({_listed(terms)})", tensor=target.name, hint=WAY)
    return dims


def _check_alike(target: Target, terms: Sequence[_Term]) -> None:
    """Refuse what one pair of factors cannot say of several weights."""
    dtypes = {entry.dtype for term in terms for entry in (term.change.first, term.change.second)}
    if len(dtypes) > 1:
        message = f"{target.rule}\nthe factors of {_listed(terms)} have several types: {', '.join(sorted(dtypes))}"
        raise refuse("DTYPE_MIXED", message, tensor=target.name, hint=WAY)
    scalings = {term.change.scaling for term in terms}
    if len(scalings) > 1:
        listed = "; ".join(f"{each.change.name} {each.change.scaling:g}" for each in _first_of_each(terms))
        raise _one_tensor(target, f"their scalings differ ({listed}), and a pair of factors has one")
    if len({term.change.embedding for term in terms}) > 1:
        raise _one_tensor(target, f"of {_listed(terms)}, some are embeddings and some are not")


def _one_tensor(target: Target, why: str) -> TransaxleError:
    message = f"{target.rule}\njoins weights that the adapter changes, but {why}"
    return refuse("UNSUPPORTED", message, tensor=target.name, hint=WAY)


def _first_of_each(terms: Iterable[_Term]) -> list[_Term]:
    """Return one term for each scaling."""
    return list({term.change.scaling: term for term in reversed(list(terms))}.values())[::-1]


def _listed(terms: Iterable[_Term]) -> str:
    names = list(dict.fromkeys(term.change.name for term in terms))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _ranks(
    terms: Sequence[_Term], dims: Mapping[str, int], content: Callable[[Entry], object]
) -> tuple[list[tuple[int, bool]], int]:
    """Give every term its ranks.

    Returns:
        For each term its first rank, and whether an earlier term has the same A there; and the rank of the whole.
    """
    places = [_place(term, dims.get(_STACK)) for term in terms]
    factors: dict[int, set[str]] = defaultdict(set)
    for term, place in zip(terms, places, strict=True):
        factors[place].add(term.change.first.name)
    order = sorted(range(len(terms)), key=lambda number: places[number] != _EVERY)
    taken: dict[int, int] = defaultdict(int)
    known: dict[_Key, int] = {}
    found: dict[int, tuple[int, bool]] = {}
    for number in order:
        term, place = terms[number], places[number]
        entry = term.change.first
        values = content(entry) if len(factors[place]) > 1 else entry.name
        stack = () if _STACK not in dims else (term.shares[dims[_STACK]],)
        key = place, values, entry.shape, term.stored(_STACK), term.stored(_IN), term.shares[dims[_IN]], stack
        start = known.get(key)
        if start is None:
            known[key] = taken[_EVERY] + (taken[place] if place != _EVERY else 0)
            taken[place] += term.rank
        found[number] = known[key], start is not None
    every = taken.pop(_EVERY, 0)
    return [found[number] for number in range(len(terms))], every + max(taken.values(), default=0)


def _place(term: _Term, stack: int | None) -> int:
    """Return the matrix of a stack that a term changes."""
    if stack is None:
        return 0
    return _EVERY if term.shares[stack].axes else term.shares[stack].offset


def _outside(place: Share, rank: int, ranks: tuple[str, int, int], offset: int) -> Share:
    """Return the share of A's first dim: the ranks of a matrix lie together."""
    return Share(place.offset * rank + offset, (*((axis, size, step * rank) for axis, size, step in place.axes), ranks))


def _inside(place: Share, matrices: int, ranks: tuple[str, int, int], offset: int) -> Share:
    """Return the share of B's last dim: the matrices of a rank lie together."""
    axis, size, _ = ranks
    return Share(offset * matrices + place.offset, ((axis, size, matrices), *place.axes))


def _first_origin(term: _Term) -> Origin:
    entry, stack = term.change.first, term.stored(_STACK)
    held = _outside(stack, term.rank, (_RANK, term.rank, 1), 0), term.stored(_IN)
    return Origin(entry.name, _WHOLE, Layout(entry.shape, {_WHOLE: held}), {})


def _second_origin(term: _Term) -> Origin:
    entry, stack = term.change.second, term.stored(_STACK)
    held = term.stored(_OUT), _inside(stack, term.change.matrices, (_RANK, term.rank, 1), 0)
    return Origin(entry.name, _WHOLE, Layout(entry.shape, {_WHOLE: held}), {})


_WEIGHT = ".weight"
_HINT = (
    "Choose a dialect with one tensor for all of them, or one module for each; or merge it into the base:  transaxle "
    "convert BASE OUT --to FORMAT:DIALECT --merge ADAPTER."
)
_FLIPPED = "fan_in_fan_out"


@dataclass(frozen=True, slots=True)
class Module:
    """A weight that the adapter changes."""

    name: str
    """The weight's."""
    factors: Pair
    """Its A and B."""

    @property
    def is_parameter(self) -> bool:
        """Whether peft reaches it as a parameter, not as the weight of a linear layer or an embedding."""
        return self.factors.dims != 2 or not self.name.endswith(_WEIGHT)

    @property
    def path(self) -> str:
        """The module that has it."""
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """What adapter_config.json calls it."""
        return self.name if self.is_parameter else self.path


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that the adapter has instead of the base's."""

    name: str
    """In the base."""
    target: Target
    """Its values in the adapter's files."""
    is_module: bool
    """Whether its whole module is trained (`modules_to_save`)."""


def problems_of(modules: Sequence[Module], config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield why peft cannot be told of these modules, with the other settings of adapter_config.json."""
    for each in modules:
        if _alpha(each.factors, config) is None:
            message = f"at rank {each.factors.rank}, no lora_alpha gives the scaling {each.factors.scaling!r} exactly"
            yield Refusal("UNSUPPORTED", message, Where(None, each.name), _HINT)
    for path, inside in _parameters(modules).items():
        shapes = [(each.factors.first.shape, each.factors.second.shape) for each in inside]
        if len(set(shapes)) < len(shapes):
            message = (
                f"{len(inside)} parameters of this module are changed by factors of equal shapes, and no file of "
                "peft's says which belong to which: peft goes by the order in which a model registers them"
            )
            yield Refusal("UNSUPPORTED", message, Where(None, path), _HINT)
        for each in inside:
            if each.factors.dims == 2 and each.factors.swapped:
                message = f"{each.factors.first.rule}\nis [in, out], and peft takes such a parameter for [out, in]"
                yield Refusal("UNSUPPORTED", message, Where(None, each.name), _HINT)
    linear = _linear(modules)
    flipped = {each.factors.swapped for each in linear}
    if len(flipped) > 1 or (flipped == {True} and _parameters(modules)):
        names = ", ".join(each.name for each in linear if each.factors.swapped)
        message = f"some weights are [in, out] and others not, and {_FLIPPED} is for all of them: {names[:300]}"
        yield Refusal("UNSUPPORTED", message, Where(), _HINT)
    for each in modules:
        if each.factors.embedding and (each.is_parameter or not each.factors.swapped):
            message = f"{each.factors.first.rule}\nis no embedding [rows, width], which the adapter changes"
            yield Refusal("UNSUPPORTED", message, Where(None, each.name), _HINT)


def names_of(modules: Sequence[Module], saved: Sequence[Saved]) -> dict[str, Target]:
    """Return the adapter's tensors by the names that peft gives them."""
    named: dict[str, Target] = {}
    wrapped: Counter[str] = Counter()
    for each in modules:
        if not each.is_parameter:
            wrapped[each.path] = 1
            for end, target in zip(_ends(each), (each.factors.first, each.factors.second), strict=True):
                named[f"{PREFIX}{each.path}.{end}"] = target
    for path, inside in _parameters(modules).items():
        wrapped[path] = len(inside)
        for depth, each in enumerate(reversed(inside)):
            for end, target in zip(LINEAR, (each.factors.first, each.factors.second), strict=True):
                named[f"{PREFIX}{path}{INNER * depth}.{end}"] = target
    for kept in saved:
        path, _, last = kept.name.rpartition(".")
        named[f"{PREFIX}{path}{INNER * wrapped[path]}.{last}"] = kept.target
    return named


def is_flipped(modules: Sequence[Module], config: Mapping[str, Any]) -> bool:
    """Tell whether the weights of linear layers are `[in, out]`; where there are none, what the config says."""
    flipped = {each.factors.swapped for each in _linear(modules)}
    return flipped.pop() if flipped else bool(config.get(_FLIPPED))


def config_of(config: Mapping[str, Any], modules: Sequence[Module], saved: Sequence[Saved]) -> bytes:
    """Return the text of adapter_config.json.

    Args:
        config: the one that the adapter had.
        modules: what it changes.
        saved: what it replaces.
    """
    ranks = {each.key: each.factors.rank for each in modules}
    alphas = {each.key: _alpha(each.factors, config) or 0.0 for each in modules}
    usual = {key: _most(values, config.get(key, USUAL)) for key, values in (("r", ranks), ("lora_alpha", alphas))}
    parameters = sorted(each.key for each in modules if each.is_parameter)
    whole = sorted({each.name.rpartition(".")[0] for each in saved if each.is_module})
    changed: dict[str, Any] = {
        **config,
        **usual,
        "rank_pattern": {key: rank for key, rank in ranks.items() if rank != usual["r"]},
        "alpha_pattern": {key: alpha for key, alpha in alphas.items() if alpha != usual["lora_alpha"]},
        "target_modules": sorted(each.key for each in modules if not each.is_parameter),
        "target_parameters": parameters or None,
        "modules_to_save": whole or None,
        _FLIPPED: is_flipped(modules, config) and not parameters,
        "exclude_modules": None,
        "layers_pattern": None,
        "layers_to_transform": None,
    }
    if parameters:
        changed["lora_dropout"] = 0.0  # peft has none for parameters
    return json.dumps(changed, indent=2, sort_keys=True).encode() + b"\n"


def _alpha(factors: Pair, config: Mapping[str, Any]) -> float | None:
    """Return the alpha that gives a scaling, bit by bit, a whole number where that is one; None where there is none."""
    divisor = math.sqrt(factors.rank) if config.get("use_rslora") else factors.rank
    near = factors.scaling * divisor
    for alpha in (round(near), near, math.nextafter(near, 0), math.nextafter(near, math.inf)):
        if alpha > 0 and alpha / divisor == factors.scaling:
            return alpha
    return None


def _most(values: Mapping[str, float], default: float) -> float:
    """Return the most frequent number."""
    return Counter(values.values()).most_common(1)[0][0] if values else default


def _ends(module: Module) -> tuple[str, str]:
    return EMBEDDING if module.factors.embedding else LINEAR


def _linear(modules: Sequence[Module]) -> list[Module]:
    return [each for each in modules if not each.is_parameter and not each.factors.embedding]


def _parameters(modules: Sequence[Module]) -> dict[str, list[Module]]:
    """Return the parameters that are changed, by their modules."""
    inside: dict[str, list[Module]] = defaultdict(list)
    for each in modules:
        if each.is_parameter:
            inside[each.path].append(each)
    return inside


_FILE = "\0converted "
"""What the names of files that do not exist begin with."""
_ANY = "F32"
"""Type of a model's weights, of which nothing depends on it."""
Express = Callable[[Container, str, Mapping[str, Any]], Model]
"""Makes a checkpoint of a container, of the label of its dialect, which may be empty, and of the model's config."""


class _Relaid:
    """A file of the bytes of a tensor, gathered where they lie.

    Args:
        target: the tensor.
        source: where it is gathered.
    """

    def __init__(self, target: Target, source: Source) -> None:
        self.nbytes = nbytes(target.dtype, target.shape)
        self._rows = RowMajorBytes(source.container.storage, source.transfers(target))

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `VirtualFile`."""
        out = view.cast("B")
        out[:] = self._rows.read(offset, offset + len(out)).data


def converted(
    adapter: Container, said: tuple[str, Mapping[str, Any]], config: Mapping[str, Any], dialect: str, express: Express
) -> Container:
    """Return the files of an adapter for the same model in another dialect.

    Args:
        adapter: the files.
        said: the name of its adapter_config.json, and what that says.
        config: the config.json of the base, without what it says of encodings.
        dialect: label of the other dialect.
        express: makes a checkpoint of other tensors of the model.

    Raises:
        UsageError: UNKNOWN_FAMILY, AMBIGUOUS, UNKNOWN_AXIS where the base is not known.
        Refused: UNSUPPORTED for another adapter than LoRA, and where the other dialect's weights are changed by what
            has no factors; MISSING_TENSOR, SHAPE_MISMATCH where it is not an adapter of this model; AMBIGUOUS.
    """
    lora = Lora(adapter.entries, said[1], config)
    reading, base = _base(adapter, lora, config, express)
    changes = lora.changes({name: entry.shape for name, entry in base.entries.items()})
    view = express(base, reading.dialect.label, config).translation(dialect)
    if view.refusals:
        raise gathered(view.refusals)
    changed = changes.names
    wanted = {name: target for name, target in view.targets.items() if origins(target) & changed}
    problems: list[Refusal] = [*_bound(changes), *_lost(changes, wanted), *_misfits(wanted, dialect)]
    problems.extend(_checked(view.checks, changed))
    source = Source(adapter)
    modules = [] if problems else list(_modules(wanted, changes, source, problems))
    problems.extend(problems_of(modules, said[1]))
    saved = list(_saved(wanted, changes, said[1], problems))
    if problems:
        raise gathered(problems)
    named = names_of(modules, saved)
    files: dict[str, VirtualFile] = {_FILE + name: _Relaid(target, source) for name, target in named.items()}
    alike = {name: target.shape for name, target in named.items()} == {n: e.shape for n, e in adapter.entries.items()}
    alike = alike and {*(each.name for each in modules), *(each.name for each in saved)} == changed
    if not alike or is_flipped(modules, said[1]) != is_flipped((), said[1]):
        files[said[0]] = InMemoryFile(config_of(said[1], modules, saved))
    entries = {name: _entry(name, _FILE + name, target.dtype, target.shape) for name, target in named.items()}
    return structs.replace(adapter, storage=VirtualFiles(adapter.storage, files), entries=entries)


def _base(adapter: Container, lora: Lora, config: Mapping[str, Any], express: Express) -> tuple[Any, Container]:
    """Return the base's family and dialect, and a container of the shapes of all its tensors.

    Raises:
        UsageError: UNKNOWN_FAMILY, AMBIGUOUS, UNKNOWN_AXIS.
        Refused: MISSING_TENSOR where it does not have what the adapter changes.
    """
    bare = structs.replace(adapter, carried=(), metadata={}, twins=(), left={}, training=(), unread=())
    targets = lora.targets()
    named = express(structs.replace(bare, entries={name: _entry(name, name, _ANY, ()) for name in targets}), "", config)
    reading = named.recognised
    tables = Tables(reading.family, named.sizes, tp=0)
    shapes = {reading.prefix + name: shape for name, shape in tables.stored_shapes(reading.dialect)}
    if not targets <= shapes.keys():
        raise gathered(missing(name, shapes) for name in sorted(targets - shapes.keys()))
    return reading, structs.replace(
        bare, entries={name: _entry(name, name, _ANY, shape) for name, shape in shapes.items()}
    )


def _entry(name: str, file: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    return Entry(name, dtype, shape, (Extent((0,) * len(shape), shape, file, 0),))


def _modules(
    wanted: Mapping[str, Target], changes: Changes, source: Source, problems: list[Refusal]
) -> Iterator[Module]:
    """Yield what the adapter changes in the other dialect."""
    content = lru_cache(None)(lambda name: digest(source.read(name).data))
    for name, target in wanted.items():
        if not origins(target).isdisjoint(changes.added):
            try:
                yield Module(name, pair(target, changes.added, lambda entry: content(entry.name)))
            except TransaxleError as error:
                problems.extend(error.refusals)


def _saved(
    wanted: Mapping[str, Target], changes: Changes, config: Mapping[str, Any], problems: list[Refusal]
) -> Iterator[Saved]:
    """Yield what the adapter has instead of the base's tensors in the other dialect."""
    whole = tuple(f".{name}" for name in config.get("modules_to_save") or ())
    for name, target in wanted.items():
        parts = origins(target)
        replaced = parts & changes.replaced.keys()
        if not replaced:
            continue
        dtypes = {changes.replaced[each].dtype for each in replaced}
        if replaced != parts:
            message = f"the adapter has some of its parts anew ({', '.join(sorted(replaced))}), and others not"
            problems.append(Refusal("UNSUPPORTED", message, Where(None, name), WAY))
        elif len(dtypes) > 1:
            message = f"its parts have several types: {', '.join(sorted(dtypes))}"
            problems.append(Refusal("DTYPE_MIXED", message, Where(None, name), WAY))
        else:
            is_module = any(f".{each.rpartition('.')[0]}".endswith(whole) for each in parts) if whole else False
            yield Saved(name, _renamed(target, changes.replaced, dtypes.pop()), is_module)


def _renamed(target: Target, entries: Mapping[str, Entry], dtype: str) -> Target:
    """Return a target that is made of the adapter's tensors, not of the base's."""
    parts = tuple(
        part._replace(origins=tuple(structs.replace(origin, name=entries[origin.name].name) for origin in part.origins))
        for part in target.parts
    )
    return replace(target, dtype=dtype, parts=parts)


def _bound(changes: Changes) -> Iterator[Refusal]:
    """Yield what only the model has for which an adapter was trained."""
    for name, change in changes.added.items():
        if len(change.first.shape) > 2:
            yield Refusal("UNSUPPORTED", "its A and B are those of a convolution", Where(None, name), WAY)
    for name in changes.copies:
        yield Refusal("UNSUPPORTED", "peft has it twice, for a vocabulary that was resized", Where(None, name), WAY)


def _lost(changes: Changes, wanted: Mapping[str, Target]) -> Iterator[Refusal]:
    """Yield changes that would reach no weight, and those of embeddings that would reach several."""
    reached = Counter(name for target in wanted.values() for name in origins(target))
    for name in sorted(set(changes.names) - reached.keys()):
        yield Refusal("UNSUPPORTED", "the other dialect has nothing that is made of it", Where(None, name), WAY)
    for name, change in changes.added.items():
        if change.embedding and reached[name] > 1:
            message = "the other dialect has it in several tensors, and the adapter changes one as an embedding"
            yield Refusal("UNSUPPORTED", message, Where(None, name), WAY)


def _misfits(wanted: Mapping[str, Target], dialect: str) -> Iterator[Refusal]:
    """Yield weights whose change is none of the adapter's."""
    for name, target in wanted.items():
        if target.is_identity:
            yield Refusal("UNSUPPORTED", f"{dialect} has no line for it", Where(None, name), WAY)
        elif target.computed:
            message = f"{target.rule}\ncomputes its values, and those of a change would be others"
            yield Refusal("UNSUPPORTED", message, Where(None, name), WAY)


def _checked(checks: Iterable[Check], changed: Collection[str]) -> Iterator[Refusal]:
    """Yield weights that the base has twice, of which an adapter may change one."""
    for check in checks:
        for name in sorted((origins(check.first) | origins(check.second)) & set(changed)):
            yield Refusal("UNSUPPORTED", f"the base has it twice: {check.why}", Where(None, name), WAY)
