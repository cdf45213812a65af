"""Factors: where the A and B of an adapter go when the weight that they change is laid out in another way.

A weight's change is `B @ A`, so the axes of its rows are B's and those of its columns A's. Where several weights become
one, their ranks lie side by side and B is zero outside of its blocks, which is the same change; weights with the same A
share its ranks. Nothing is computed: every value of the new factors is one of the old, or zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from transaxle.axes.layout.relayout import Origin, Target, TargetPart
from transaxle.axes.notation.expression import Layout, Share
from transaxle.engine.adapters.lora import LowRank
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog import Entry

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
