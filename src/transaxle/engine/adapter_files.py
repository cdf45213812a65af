"""The files of a peft adapter (LoRA), rewritten for a base model in a different dialect.

**Conversion**: an adapter's files are rewritten as an adapter of the same base model in a different dialect.

The tensor names are those that peft uses if the model's weights have the names of that dialect. An adapter changes only
some weights, but the conversion tables describe the whole model. So converting an adapter requires the base model's
config.

**Factors**: where the elements of the factors A and B are placed if the weight that they change has a different layout.

The change of a weight is `B @ A`. So the axes of the weight's rows are those of B, and the axes of its columns are
those of A. If several weights are joined into one, their rank indices (columns of B, rows of A) are concatenated, and B
is zero outside of the blocks of each weight. The change stays the same. Weights with the same A share its rank indices.
No value is computed: every value of the new factors is copied from an old factor, or is zero.

**Names and settings**: the names of an adapter's tensors and its file adapter_config.json are written as peft writes
them.

Modules and parameters are listed by their full paths, which are unambiguous in every model that contains them. If an
adapter changes several parameters of one `nn.Module`, peft wraps them one inside another, in that module's order; here
the order is that of the lines in the dialect's table.
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
from transaxle.engine.lora import DEFAULT_RANK, EMBEDDING, INNER, LINEAR, PREFIX, Changes, Lora, LowRank
from transaxle.engine.merging import Model, origin_names, refuse_missing
from transaxle.engine.source import Source
from transaxle.engine.views.decoded import RowMajorBytes
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Container, Entry, Extent, nbytes
from transaxle.formats.storage.storage import InMemoryFile, VirtualFile, VirtualFiles
from transaxle.move.journal import digest

_RANK = "\0rank"
"""Name of the axis that the factors A and B share; its size is the rank of the low-rank change."""
_WHOLE = ""
"""Name of the single component (logical tensor) of a stored factor."""
_OUT, _IN, _STACK = "rows", "columns", "matrices"
WAY = "Merge it into the base:  transaxle convert BASE OUT --to hf --merge ADAPTER."
_EVERY = -1
"""Index that stands for all matrices of a stack of matrices."""
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class FactorPair:
    """The LoRA factors A and B that change one weight of the target dialect."""

    first: Target
    """Where the values of A come from; A has the shape `[matrices * rank, in]`."""
    second: Target
    """Where the values of B come from; B has the shape `[out, rank * matrices]`."""
    rank: int
    """Rank of the change of each matrix."""
    scaling: float
    """Factor by which the product `B @ A` is multiplied."""
    dims: int
    """Number of dims of the changed weight."""
    swapped: bool
    """Whether the changed weight is stored as `[in, out]` instead of `[out, in]`."""
    embedding: bool
    """Whether the changed weight belongs to an embedding."""


@dataclass(frozen=True, slots=True)
class _Term:
    """The change of one source weight, as part of a target weight's change."""

    change: LowRank
    origin: Origin
    shares: tuple[Share, ...]
    """For each dim of the target weight, the share of the dim that the source weight fills."""

    def roles(self) -> dict[str, str]:
        """Return axis -> role of the axis in the weight: stack, rows or columns."""
        *stack, rows, columns = self.origin.layout.shares[self.origin.component]
        if self.change.swapped:
            rows, columns = columns, rows
        shares_by_role = ((_STACK, stack), (_OUT, [rows]), (_IN, [columns]))
        return {axis: role for role, shares in shares_by_role for share in shares for axis, _, _ in share.axes}

    @property
    def rank(self) -> int:
        return self.change.first.shape[0] // self.change.matrices

    def share_of(self, role: str) -> Share:
        """Return the share of the target's dim with a given role (stack, rows or columns) that the source weight
        fills.
        """
        *stack, rows, columns = self.origin.layout.shares[self.origin.component]
        if role == _STACK:
            return stack[0] if stack else Share(0, ())
        return rows if (role == _OUT) != self.change.swapped else columns


def make_factors(target: Target, changes: Mapping[str, LowRank], content: Callable[[Entry], object]) -> FactorPair:
    """Return the factors A and B of a target weight's change.

    Args:
        target: the weight in the target dialect, composed of source weights that the adapter may change.
        changes: name of a source weight -> the change that the adapter makes to it.
        content: function from a tensor to a key; tensors with equal values have equal keys.

    Raises:
        Refused: with code UNSUPPORTED, if the target's change is not a product of two factors or needs several
            scalings; with code DTYPE_MIXED, if the source factors have different dtypes.
    """
    terms = [
        _Term(changes[origin.name], origin, tuple(_share_of_origin(share, origin) for share in shares))
        for part in target.parts
        for shares in [target.layout.shares[part.component]]
        for origin in part.origins
        if origin.name in changes
    ]
    dims = _dims_by_role(target, terms)
    _check_alike(target, terms)
    offsets, rank = _assign_ranks(terms, dims, content)
    shape, stack = target.shape, dims.get(_STACK)
    matrices = 1 if stack is None else shape[stack]
    first_shares, second_shares = dict[str, tuple[Share, ...]](), dict[str, tuple[Share, ...]]()
    firsts, seconds = list[TargetPart](), list[TargetPart]()
    for number, (term, (offset, is_shared)) in enumerate(zip(terms, offsets, strict=True)):
        stack_share = Share(0, ()) if stack is None else term.shares[stack]
        name, ranks = str(number), (_RANK, term.rank, 1)
        if not is_shared:
            factor_share = _first_factor_share(stack_share, rank, ranks, offset)
            first_shares[name] = factor_share, term.shares[dims[_IN]]
            firsts.append(TargetPart(name, (_first_origin(term),)))
        factor_share = _second_factor_share(stack_share, matrices, ranks, offset)
        second_shares[name] = term.shares[dims[_OUT]], factor_share
        seconds.append(TargetPart(name, (_second_origin(term),)))
    a, b = (matrices * rank, shape[dims[_IN]]), (shape[dims[_OUT]], rank * matrices)
    dtype = terms[0].change.first.dtype
    return FactorPair(
        Target(target.name, dtype, Layout(a, first_shares), target.index, tuple(firsts), target.rule),
        Target(target.name, dtype, Layout(b, second_shares), target.index, tuple(seconds), target.rule),
        rank,
        terms[0].change.scaling,
        len(shape),
        dims[_IN] < dims[_OUT],
        terms[0].change.embedding,
    )


def _share_of_origin(share: Share, origin: Origin) -> Share:
    """Return the part of a dim's share that one stored tensor fills, because the tensor has only one index of each axis
    in its name.
    """
    offset = share.offset + sum(origin.index[axis] * step for axis, _, step in share.axes if axis in origin.index)
    return Share(offset, tuple(axis for axis in share.axes if axis[0] not in origin.index))


def _dims_by_role(target: Target, terms: Iterable[_Term]) -> dict[str, int]:
    """Return role (rows, columns or stack of matrices) -> index of the target weight's dim that has this role.

    Raises:
        Refused: with code UNSUPPORTED, if a dim has several roles, or if several dims have the same role.
    """
    dims_by_role: dict[str, set[int]] = defaultdict(set)
    for term in terms:
        roles = term.roles()
        for dim, share in enumerate(term.shares):
            for axis, _, _ in share.axes:
                # an axis without a role occurs only in the target weight, and the change repeats along this axis
                if axis in roles:
                    dims_by_role[roles[axis]].add(dim)
    used = set().union(*dims_by_role.values())
    roles_needed = (_STACK, _OUT, _IN) if len(target.shape) == 3 else (_OUT, _IN)
    missing_roles, free_dims = (
        [role for role in roles_needed if not dims_by_role[role]],
        set(range(len(target.shape))) - used,
    )
    # One role and one dim are left: the experts of a stack are numbered in tensor names, or the stack has size 1.
    if len(missing_roles) == len(free_dims) == 1:
        dims_by_role[missing_roles[0]] = free_dims
    dims = {role: next(iter(places)) for role, places in dims_by_role.items() if len(places) == 1}
    if (
        len(target.shape) not in (2, 3)
        or set(dims) != set(roles_needed)
        or len(set(dims.values())) != len(roles_needed)
    ):
        message = f"{target.rule}\nits dims are not rows and columns of what the adapter changes: no A and B give that"
        raise refuse("UNSUPPORTED", f"{message} ({_list_weights(terms)})", tensor=target.name, hint=WAY)
    return dims


def _check_alike(target: Target, terms: Sequence[_Term]) -> None:
    """Refuse source weights whose changes cannot be expressed together by a single pair of factors."""
    dtypes = {entry.dtype for term in terms for entry in (term.change.first, term.change.second)}
    if len(dtypes) > 1:
        message = (
            f"{target.rule}\nthe factors of {_list_weights(terms)} have several types: {', '.join(sorted(dtypes))}"
        )
        raise refuse("DTYPE_MIXED", message, tensor=target.name, hint=WAY)
    scalings = {term.change.scaling for term in terms}
    if len(scalings) > 1:
        listed = "; ".join(f"{each.change.name} {each.change.scaling:g}" for each in _first_of_each(terms))
        raise _refuse_fused(target, f"their scalings differ ({listed}), and a pair of factors has one")
    if len({term.change.embedding for term in terms}) > 1:
        raise _refuse_fused(target, f"of {_list_weights(terms)}, some are embeddings and some are not")


def _refuse_fused(target: Target, why: str) -> TransaxleError:
    message = f"{target.rule}\njoins weights that the adapter changes, but {why}"
    return refuse("UNSUPPORTED", message, tensor=target.name, hint=WAY)


def _first_of_each(terms: Iterable[_Term]) -> list[_Term]:
    """Return, for each distinct scaling, the first source weight's change that has this scaling."""
    return list({term.change.scaling: term for term in reversed(list(terms))}.values())[::-1]


def _list_weights(terms: Iterable[_Term]) -> str:
    names = list(dict.fromkeys(term.change.name for term in terms))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _assign_ranks(
    terms: Sequence[_Term], dims: Mapping[str, int], content: Callable[[Entry], object]
) -> tuple[list[tuple[int, bool]], int]:
    """Assign rank indices of the target's factors to the change of each source weight (`_Term`).

    Returns:
        For each term, its first rank index, and whether it shares the A of an earlier term. The second value is the
        total rank of the target's factors.
    """
    places = [_place(term, dims.get(_STACK)) for term in terms]
    factors: dict[int, set[str]] = defaultdict(set)
    for term, place in zip(terms, places, strict=True):
        factors[place].add(term.change.first.name)
    order = sorted(range(len(terms)), key=lambda number: places[number] != _EVERY)
    ranks_used: dict[int, int] = defaultdict(int)
    first_rank_of: dict[_Key, int] = {}
    assigned: dict[int, tuple[int, bool]] = {}
    for number in order:
        term, place = terms[number], places[number]
        entry = term.change.first
        values = content(entry) if len(factors[place]) > 1 else entry.name
        stack = () if _STACK not in dims else (term.shares[dims[_STACK]],)
        key = (
            place,
            values,
            entry.shape,
            term.share_of(_STACK),
            term.share_of(_IN),
            term.shares[dims[_IN]],
            stack,
        )
        start = first_rank_of.get(key)
        if start is None:
            first_rank_of[key] = ranks_used[_EVERY] + (ranks_used[place] if place != _EVERY else 0)
            ranks_used[place] += term.rank
        assigned[number] = first_rank_of[key], start is not None
    every = ranks_used.pop(_EVERY, 0)
    return [assigned[number] for number in range(len(terms))], every + max(ranks_used.values(), default=0)


def _place(term: _Term, stack: int | None) -> int:
    """Return the index of the matrix that a weight's change applies to; `_EVERY` if it applies to all matrices."""
    if stack is None:
        return 0
    return _EVERY if term.shares[stack].axes else term.shares[stack].offset


def _first_factor_share(place: Share, rank: int, ranks: tuple[str, int, int], offset: int) -> Share:
    """Return the share of A's first dim that a weight's change fills; the rows of one matrix are adjacent in this
    dim.
    """
    return Share(place.offset * rank + offset, (*((axis, size, step * rank) for axis, size, step in place.axes), ranks))


def _second_factor_share(place: Share, matrices: int, ranks: tuple[str, int, int], offset: int) -> Share:
    """Return the share of B's last dim that a weight's change fills; the columns of one rank index are adjacent in this
    dim.
    """
    axis, size, _ = ranks
    return Share(offset * matrices + place.offset, ((axis, size, matrices), *place.axes))


def _first_origin(term: _Term) -> Origin:
    entry, stack = term.change.first, term.share_of(_STACK)
    shares = _first_factor_share(stack, term.rank, (_RANK, term.rank, 1), 0), term.share_of(_IN)
    return Origin(entry.name, _WHOLE, Layout(entry.shape, {_WHOLE: shares}), {})


def _second_origin(term: _Term) -> Origin:
    entry, stack = term.change.second, term.share_of(_STACK)
    shares = term.share_of(_OUT), _second_factor_share(stack, term.change.matrices, (_RANK, term.rank, 1), 0)
    return Origin(entry.name, _WHOLE, Layout(entry.shape, {_WHOLE: shares}), {})


_WEIGHT = ".weight"
_HINT = (
    "Choose a dialect that stores these weights in one tensor, or each in a module of its own; or merge the adapter "
    "into the base:  transaxle convert BASE OUT --to FORMAT:DIALECT --merge ADAPTER."
)
_FLIPPED = "fan_in_fan_out"


@dataclass(frozen=True, slots=True)
class Module:
    """A weight that the adapter changes, with the two factors of its change."""

    name: str
    """Name of the changed weight."""
    factors: FactorPair
    """Factors A and B of the weight's change."""

    @property
    def is_parameter(self) -> bool:
        """Whether peft treats the weight as a single parameter, rather than as the weight of a linear layer or an
        embedding.
        """
        return self.factors.dims != 2 or not self.name.endswith(_WEIGHT)

    @property
    def path(self) -> str:
        """Path of the module that contains the changed weight."""
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        """Name under which adapter_config.json lists the changed weight."""
        return self.name if self.is_parameter else self.path


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that the adapter stores as a replacement for the base model's tensor of the same name."""

    name: str
    """Name of the replaced tensor in the base model."""
    target: Target
    """Where the values of the replacement tensor come from."""
    is_module: bool
    """Whether the whole module of the tensor is trained (peft's setting `modules_to_save`)."""


def refuse_unsupported(modules: Sequence[Module], config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield refusals of modules that cannot be expressed by peft's names and adapter_config.json."""
    for module in modules:
        if _alpha(module.factors, config) is None:
            message = (
                f"at rank {module.factors.rank}, no lora_alpha gives the scaling {module.factors.scaling!r} exactly"
            )
            yield Refusal("UNSUPPORTED", message, Where(None, module.name), _HINT)
    for path, module_parameters in _parameters(modules).items():
        shapes = [(module.factors.first.shape, module.factors.second.shape) for module in module_parameters]
        if len(set(shapes)) < len(shapes):
            message = (
                f"{len(module_parameters)} parameters of this module are changed by factors of equal shapes, and no "
                "file of peft's says which belong to which: peft goes by the order in which a model registers them"
            )
            yield Refusal("UNSUPPORTED", message, Where(None, path), _HINT)
        for module in module_parameters:
            if module.factors.dims == 2 and module.factors.swapped:
                message = f"{module.factors.first.rule}\nis [in, out], and peft takes such a parameter for [out, in]"
                yield Refusal("UNSUPPORTED", message, Where(None, module.name), _HINT)
    linear = _linear(modules)
    flipped = {module.factors.swapped for module in linear}
    if len(flipped) > 1 or (flipped == {True} and _parameters(modules)):
        names = ", ".join(module.name for module in linear if module.factors.swapped)
        message = f"some weights are [in, out] and others not, and {_FLIPPED} is for all of them: {names[:300]}"
        yield Refusal("UNSUPPORTED", message, Where(), _HINT)
    for module in modules:
        if module.factors.embedding and (module.is_parameter or not module.factors.swapped):
            message = f"{module.factors.first.rule}\nis no embedding [rows, width], which the adapter changes"
            yield Refusal("UNSUPPORTED", message, Where(None, module.name), _HINT)


def peft_names(modules: Sequence[Module], saved: Sequence[SavedTensor]) -> dict[str, Target]:
    """Return the name that peft uses for a tensor of the adapter -> where the tensor's values come from."""
    targets: dict[str, Target] = {}
    wrapped: Counter[str] = Counter()
    for module in modules:
        if not module.is_parameter:
            wrapped[module.path] = 1
            for end, target in zip(_ends(module), (module.factors.first, module.factors.second), strict=True):
                targets[f"{PREFIX}{module.path}.{end}"] = target
    for path, module_parameters in _parameters(modules).items():
        wrapped[path] = len(module_parameters)
        for depth, module in enumerate(reversed(module_parameters)):
            for end, target in zip(LINEAR, (module.factors.first, module.factors.second), strict=True):
                targets[f"{PREFIX}{path}{INNER * depth}.{end}"] = target
    for saved_tensor in saved:
        path, _, last = saved_tensor.name.rpartition(".")
        targets[f"{PREFIX}{path}{INNER * wrapped[path]}.{last}"] = saved_tensor.target
    return targets


def is_flipped(modules: Sequence[Module], config: Mapping[str, Any]) -> bool:
    """Return whether the weights of linear layers are stored as `[in, out]`; without linear layers, return the value in
    the config.
    """
    flipped = {each.factors.swapped for each in _linear(modules)}
    return flipped.pop() if flipped else bool(config.get(_FLIPPED))


def config_of(config: Mapping[str, Any], modules: Sequence[Module], saved: Sequence[SavedTensor]) -> bytes:
    """Return the text of the file adapter_config.json.

    Args:
        config: the adapter_config.json of the source adapter.
        modules: the weights that the adapter changes.
        saved: the tensors that the adapter stores as replacements for tensors of the base model.
    """
    ranks = {each.key: each.factors.rank for each in modules}
    alphas = {each.key: _alpha(each.factors, config) or 0.0 for each in modules}
    usual = {
        key: _most_common(values, config.get(key, DEFAULT_RANK))
        for key, values in (("r", ranks), ("lora_alpha", alphas))
    }
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
        changed["lora_dropout"] = 0.0  # peft refuses dropout for parameters that are no modules
    return json.dumps(changed, indent=2, sort_keys=True).encode() + b"\n"


def _alpha(factors: FactorPair, config: Mapping[str, Any]) -> float | None:
    """Return the setting alpha (an integer if possible) that results in exactly the factors' scaling; None if there is
    no such alpha.
    """
    divisor = math.sqrt(factors.rank) if config.get("use_rslora") else factors.rank
    near = factors.scaling * divisor
    for alpha in (round(near), near, math.nextafter(near, 0), math.nextafter(near, math.inf)):
        if alpha > 0 and alpha / divisor == factors.scaling:
            return alpha
    return None


def _most_common(values: Mapping[str, float], default: float) -> float:
    """Return the most frequent number among the given values, or `default` if there are no values."""
    return Counter(values.values()).most_common(1)[0][0] if values else default


def _ends(module: Module) -> tuple[str, str]:
    return EMBEDDING if module.factors.embedding else LINEAR


def _linear(modules: Sequence[Module]) -> list[Module]:
    return [each for each in modules if not each.is_parameter and not each.factors.embedding]


def _parameters(modules: Sequence[Module]) -> dict[str, list[Module]]:
    """Return module path -> parameters of that module that the adapter changes."""
    parameters: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        if module.is_parameter:
            parameters[module.path].append(module)
    return parameters


_FILE = "\0converted "
"""Prefix of the names of the virtual files that contain gathered tensors."""
_ANY = "F32"
"""Placeholder for the dtype of the base model's weights, on which no result depends."""
Express = Callable[[Container, str, Mapping[str, Any]], Model]
"""`express(container, label of its dialect or "", config of the model)` opens a container of tensors as a checkpoint.
"""


class _GatheredFile:
    """A virtual file with the bytes of a target tensor, which are gathered from source tensors when the file is read.

    Args:
        target: the tensor to gather.
        source: object that turns the tensor into transfers (reads of byte ranges).
    """

    def __init__(self, target: Target, source: Source) -> None:
        self.nbytes = nbytes(target.dtype, target.shape)
        self._rows = RowMajorBytes(source.container.storage, source.transfers(target))

    def read_into(self, offset: int, view: memoryview) -> None:
        """Copy bytes of the tensor into `view`; see `VirtualFile`."""
        out = view.cast("B")
        out[:] = self._rows.read(offset, offset + len(out)).data


def convert_adapter(
    adapter: Container,
    adapter_settings: tuple[str, Mapping[str, Any]],
    config: Mapping[str, Any],
    dialect: str,
    express: Express,
) -> Container:
    """Return the files of an adapter for the same base model in a different dialect.

    Args:
        adapter: the files of the adapter.
        adapter_settings: the name and the content of the adapter's adapter_config.json.
        config: content of the base model's config.json, without its section on encodings.
        dialect: label of the target dialect.
        express: opens a container of computed tensors as a checkpoint of the model; see `Express`.

    Raises:
        UsageError: with code UNKNOWN_FAMILY, AMBIGUOUS or UNKNOWN_AXIS, if the family, dialect or an axis size of the
            base model is unknown.
        Refused: with code UNSUPPORTED, if the adapter is not LoRA, or a change has no factors A and B in the target
            dialect; with code MISSING_TENSOR or SHAPE_MISMATCH, if the adapter belongs to a different model; with code
            AMBIGUOUS, if a change fits several parameters.
    """
    lora = Lora(adapter.entries, adapter_settings[1], config)
    reading, base = _base_shapes(adapter, lora, config, express)
    changes = lora.changes({name: entry.shape for name, entry in base.entries.items()})
    view = express(base, reading.dialect.label, config).translation(dialect)
    if view.refusals:
        raise gathered(view.refusals)
    changed = changes.names
    changed_targets = {name: target for name, target in view.targets.items() if origin_names(target) & changed}
    problems: list[Refusal] = [
        *_refuse_merge_only(changes),
        *_refuse_lost(changes, changed_targets),
        *_refuse_misfits(changed_targets, dialect),
    ]
    problems.extend(_refuse_copies(view.checks, changed))
    source = Source(adapter)
    modules = [] if problems else list(_modules(changed_targets, changes, source, problems))
    problems.extend(refuse_unsupported(modules, adapter_settings[1]))
    saved = list(_replacement_tensors(changed_targets, changes, adapter_settings[1], problems))
    if problems:
        raise gathered(problems)
    targets = peft_names(modules, saved)
    files: dict[str, VirtualFile] = {_FILE + name: _GatheredFile(target, source) for name, target in targets.items()}
    alike = {name: target.shape for name, target in targets.items()} == {n: e.shape for n, e in adapter.entries.items()}
    alike = alike and {*(each.name for each in modules), *(each.name for each in saved)} == changed
    if not alike or is_flipped(modules, adapter_settings[1]) != is_flipped((), adapter_settings[1]):
        files[adapter_settings[0]] = InMemoryFile(config_of(adapter_settings[1], modules, saved))
    entries = {name: _entry(name, _FILE + name, target.dtype, target.shape) for name, target in targets.items()}
    return structs.replace(adapter, storage=VirtualFiles(adapter.storage, files), entries=entries)


def _base_shapes(adapter: Container, lora: Lora, config: Mapping[str, Any], express: Express) -> tuple[Any, Container]:
    """Return the base model's family and dialect, and a container with the shapes of all its tensors.

    Raises:
        UsageError: with code UNKNOWN_FAMILY, AMBIGUOUS or UNKNOWN_AXIS, if the family, dialect or an axis size of the
            base model is unknown.
        Refused: with code MISSING_TENSOR, if the base model lacks tensors that the adapter changes.
    """
    bare = structs.replace(adapter, carried=(), metadata={}, twins=(), left={}, training=(), unread=())
    targets = lora.targets()
    bare_model = express(
        structs.replace(bare, entries={name: _entry(name, name, _ANY, ()) for name in targets}), "", config
    )
    reading = bare_model.reading
    tables = Tables(reading.family, bare_model.sizes, tp=0)
    shapes = {reading.prefix + name: shape for name, shape in tables.stored_shapes(reading.dialect)}
    if not targets <= shapes.keys():
        raise gathered(refuse_missing(name, shapes) for name in sorted(targets - shapes.keys()))
    return reading, structs.replace(
        bare, entries={name: _entry(name, name, _ANY, shape) for name, shape in shapes.items()}
    )


def _entry(name: str, file: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    return Entry(name, dtype, shape, (Extent((0,) * len(shape), shape, file, 0),))


def _modules(
    changed_targets: Mapping[str, Target], changes: Changes, source: Source, problems: list[Refusal]
) -> Iterator[Module]:
    """Yield the weights of the target dialect that the adapter changes, each with its factors."""
    content = lru_cache(None)(lambda name: digest(source.read(name).data))
    for name, target in changed_targets.items():
        if not origin_names(target).isdisjoint(changes.added):
            try:
                yield Module(name, make_factors(target, changes.added, lambda entry: content(entry.name)))
            except TransaxleError as error:
                problems.extend(error.refusals)


def _replacement_tensors(
    changed_targets: Mapping[str, Target], changes: Changes, config: Mapping[str, Any], problems: list[Refusal]
) -> Iterator[SavedTensor]:
    """Yield the tensors of the target dialect that the adapter stores as replacements for the base model's tensors."""
    whole = tuple(f".{name}" for name in config.get("modules_to_save") or ())
    for name, target in changed_targets.items():
        parts = origin_names(target)
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
            yield SavedTensor(name, _rename_origins(target, changes.replaced, dtypes.pop()), is_module)


def _rename_origins(target: Target, entries: Mapping[str, Entry], dtype: str) -> Target:
    """Return a copy of a target tensor that reads the adapter's tensors instead of the base model's tensors."""
    parts = tuple(
        part._replace(origins=tuple(structs.replace(origin, name=entries[origin.name].name) for origin in part.origins))
        for part in target.parts
    )
    return replace(target, dtype=dtype, parts=parts)


def _refuse_merge_only(changes: Changes) -> Iterator[Refusal]:
    """Yield refusals of changes that can only be merged: changes of convolutions and of resized vocabularies."""
    for name, change in changes.added.items():
        if len(change.first.shape) > 2:
            yield Refusal("UNSUPPORTED", "its A and B are those of a convolution", Where(None, name), WAY)
    for name in changes.copies:
        yield Refusal("UNSUPPORTED", "peft has it twice, for a vocabulary that was resized", Where(None, name), WAY)


def _refuse_lost(changes: Changes, changed_targets: Mapping[str, Target]) -> Iterator[Refusal]:
    """Yield refusals of changes that no target weight contains, and of changed embeddings that several weights
    contain.
    """
    reach_count = Counter(name for target in changed_targets.values() for name in origin_names(target))
    for name in sorted(set(changes.names) - reach_count.keys()):
        yield Refusal("UNSUPPORTED", "the other dialect has nothing that is made of it", Where(None, name), WAY)
    for name, change in changes.added.items():
        if change.embedding and reach_count[name] > 1:
            message = "the other dialect has it in several tensors, and the adapter changes one as an embedding"
            yield Refusal("UNSUPPORTED", message, Where(None, name), WAY)


def _refuse_misfits(changed_targets: Mapping[str, Target], dialect: str) -> Iterator[Refusal]:
    """Yield refusals of weights whose change in the target dialect would differ from the adapter's change."""
    for name, target in changed_targets.items():
        if target.is_identity:
            yield Refusal("UNSUPPORTED", f"{dialect} has no line for it", Where(None, name), WAY)
        elif target.computed:
            message = f"{target.rule}\ncomputes its values, and those of a change would be others"
            yield Refusal("UNSUPPORTED", message, Where(None, name), WAY)


def _refuse_copies(checks: Iterable[Check], changed: Collection[str]) -> Iterator[Refusal]:
    """Yield refusals of weights that the base model stores twice, because an adapter might change only one of the two
    copies.
    """
    for check in checks:
        for name in sorted((origin_names(check.first) | origin_names(check.second)) & set(changed)):
            yield Refusal("UNSUPPORTED", f"the base has it twice: {check.why}", Where(None, name), WAY)
