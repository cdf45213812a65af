"""Refit: live weights of a trainer into an inference engine, again and again. It plans once; then only bytes move."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import numpy as np
import torch

from transaxle.arguments import (
    Config,
    DType,
    PathLike,
    Patterns,
    Size,
    read_float_type,
    read_optional_text,
    read_patterns,
    read_size,
    suggests,
)
from transaxle.engine.views.encode import chosen
from transaxle.errors import TransaxleError, refuse
from transaxle.live.derived import settle
from transaxle.live.memory import check_zero, rank_of
from transaxle.live.model.destination import check_dtype
from transaxle.live.model.quantized_model import stand_in
from transaxle.live.model.state_tensors import Leaves, State
from transaxle.live.transport.tensor_exchange import BucketExchange
from transaxle.live.transport.world import World, is_loss
from transaxle.quant.entries import put_values, reset_scaling_state
from transaxle.refit.adapters import read_adapter, source_leaves, target_leaves
from transaxle.refit.agreement import Agreement, Asked, Buffers, agreed, encode, largest, put
from transaxle.refit.endpoints import Form, Overlaps, SourceValues, TargetRoom, check_forms, forms
from transaxle.refit.hops import Program, program, schedule
from transaxle.refit.hub_stream import carry
from transaxle.torch_tensors import Ranks, local_of

_LEAST = 1 << 20
"""Bytes of a bucket at least."""
_ANEW = "Make a new Refit when all ranks are there again."
Pause = Callable[[], AbstractContextManager[Any]]
"""Returns what is entered while a target is written; see `Refit`."""


@dataclass(frozen=True)
class RefitReport:
    """What a push did on this rank."""

    version: int
    """How many pushes there have been, this one included."""
    tensors: int
    """Target tensors of which this rank holds anything, and which were moved."""
    bytes_needed: int
    """Bytes of them that other ranks hold."""
    bytes_received: int
    """Bytes that came from other ranks."""
    bytes_written: int
    """Bytes written into the target."""
    buffers: int
    """Bytes of this rank's buckets: at most two of them."""
    seconds: float
    """Wall time."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return asdict(self)


class Refit:
    """Moves live weights into other live tensors of any placement and dialect, as often as asked; collective to make.

        refit = tx.Refit(trainer, {}, group)    # on the trainer's ranks
        refit.push()

        refit = tx.Refit({}, engine, group)     # on the engine's
        refit.pull()

    Args:
        src_state: model or state dict to read; a rank without any of it gives `{}`.
        dst_state: model or state dict to write; likewise.
        group: ranks of both sides, a process group (see `tx.refit.meet` for that of two jobs) or a mesh of one dim;
            None: all.
        in_place: write what comes straight into the target. It needs no memory for a second copy of this rank's part of
            the target, but a reader sees old and new weights beside one another, and a push that fails leaves both.
        family: model family; None: recognised.
        dialect: of the target's names; None: recognised.
        config: the model's config; None: that of a model that has one.
        rules: path of a table of your own.
        dtype: `bf16`, `fp16` or `fp32`: parameters of this type take plain floating-point tensors of other types, cast
            where they are sent; None: other types are refused.
        strict: refuse names that only one side has, and configs that differ; a tied name may be missing where both are
            one tensor.
        bucket: bytes; each rank has two for what is sent.
        adapter: of a source that is a model of peft: `merged` sends the base with the active adapter merged into it, as
            a plain model; `alone` sends the adapter, under the names of its files; None: all that the model has, under
            its own names.
        pause: called on ranks with a target; returns a context manager that is entered while the target is written,
            such as one that stops requests.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: on every rank, with every problem of both sides.
    """

    @suggests
    def __init__(
        self,
        src_state: State,
        dst_state: State,
        group: Ranks | None = None,
        *,
        in_place: bool = False,
        family: str | None = None,
        dialect: str | None = None,
        config: Config | None = None,
        rules: PathLike | None = None,
        dtype: DType | None = None,
        strict: bool = True,
        bucket: Size = "64MB",
        adapter: Literal["merged", "alone"] | None = None,
        pause: Pause | None = None,
    ) -> None:
        self._world = world = World(group)
        self._states = src_state, dst_state
        self._in_place = in_place
        self._pause = pause
        with world.together():
            asked, bucket_bytes = _asked(family, dialect, config, rules, dtype, strict=strict), _bucket(bucket)
            self._adapter = read_adapter(adapter)
            source = source_leaves(src_state, self._adapter, values=False)
            target = target_leaves(dst_state, self._adapter)
            self._forms: tuple[Mapping[str, Form], Mapping[str, Form]] = forms(source.tensors), forms(target.tensors)
        said = {name: getattr(asked, name) for name in ("strict", "dtype", "family", "dialect")}
        world.require_alike({"adapter": self._adapter, **said, "in_place": in_place, "bucket": bucket_bytes})
        self._plan: Agreement = agreed((src_state, source), (dst_state, target), world, asked)
        plan = self._plan
        self._exchange = BucketExchange(world)
        self._schedule = schedule(plan.items, plan.names, rank_of, world, bucket_bytes)
        self._padded = [i.key for i in plan.items if sum(t.size for t in i.transfers) != i.size]
        self._chosen: dict[_Patterns, frozenset[str]] = {}
        self._programs: dict[frozenset[str] | None, Program] = {}
        self._overlaps = Overlaps()
        self._version = 0
        self._lost = ""
        self._program(None)

    @property
    def version(self) -> int:
        """How many pushes have changed the target of this rank, or were sent from its source."""
        return self._version

    @property
    def names(self) -> tuple[str, ...]:
        """The target's names of what is moved, those of other ranks too."""
        return tuple(dict.fromkeys(self._plan.names))

    @property
    def missing(self) -> tuple[str, ...]:
        """Names that only the target has (`strict=False`); their values are unchanged."""
        return self._plan.match.missing

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Names that only the source has (`strict=False`), as the target would name them."""
        return self._plan.match.unexpected

    def push(self, *, only: Patterns = (), skip: Patterns = ()) -> RefitReport:
        """Move the values of now; collective: every rank calls this, or `pull`.

        All ranks receive everything first; only if all of them have it, each writes it into its target.

        Args:
            only: patterns of the target's names that are moved; none: all.
            skip: patterns of names that are not moved, such as those of frozen parameters.

        Raises:
            TypeError: an argument of a type that it cannot have.
            TransaxleError: on every rank. The targets are then as they were, unless this writes in place; and where a
                rank is lost in the moment in which the others begin to write, `version` tells which have written.
        """
        return self._move((read_patterns("only", only), read_patterns("skip", skip)))

    def pull(self) -> RefitReport:
        """Do the same on a rank that leaves the choice to those that push."""
        return self._move(None)

    def close(self) -> None:
        """Let the buckets go; another push makes them anew."""
        self._exchange.close()
        self._programs.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move(self, asked: _Patterns | None) -> RefitReport:
        begin = time.monotonic()
        if self._lost:
            raise refuse("IO", f"an earlier push failed: {self._lost}", hint=_ANEW)
        try:
            program = self._program(self._wanted(asked))
            with ExitStack() as stack:
                room, own = self._read(program)
                if self._in_place:
                    self._stop_requests(stack, room)
                buffers = self._receive(program, room)
                if not self._in_place:
                    self._stop_requests(stack, room)
                with self._world.together():
                    written = self._write(program, room, own, buffers)
        except TransaxleError as error:
            self._lost = error.refusals[0].message if is_loss(error) else ""
            raise
        self._version += 1
        return RefitReport(
            version=self._version,
            tensors=program.tensors,
            bytes_needed=program.needed,
            bytes_received=program.route.received,
            bytes_written=written,
            buffers=self._exchange.held,
            seconds=time.monotonic() - begin,
        )

    def _wanted(self, asked: _Patterns | None) -> frozenset[str] | None:
        """Return the names that are moved, as those say that push; None: all. Collective."""
        world = self._world
        said = world.gather((self._version, asked))
        if len({version for version, _ in said}) > 1:
            versions = ", ".join(f"rank {rank}: {v}" for rank, (v, _) in zip(world.ranks, said, strict=True))
            raise refuse("AMBIGUOUS", f"the ranks are at different versions: {versions}", hint=_ANEW)
        choices = {patterns for _, patterns in said if patterns is not None}
        if len(choices) > 1:
            message = "the ranks push different tensors"
            raise refuse("AMBIGUOUS", message, hint="Give the same only= and skip= wherever push is called.")
        only, skip = choices.pop() if choices else ((), ())
        if not only and not skip:
            return None
        if (only, skip) not in self._chosen:
            self._chosen[only, skip] = frozenset(chosen(self.names, only, skip, "tensor"))
        return self._chosen[only, skip]

    def _program(self, wanted: frozenset[str] | None) -> Program:
        """Return what is carried out for some names; collective when they are asked for the first time."""
        if wanted not in self._programs:
            self._programs[wanted] = program(self._schedule, wanted, self._exchange)
        return self._programs[wanted]

    def _read(self, program: Program) -> tuple[_Room, Leaves]:
        """Look at both sides as they are now, and make room for what comes."""
        with self._world.together():
            source = source_leaves(self._states[0], self._adapter, values=True)
            target = target_leaves(self._states[1], self._adapter)
            check_forms("source", source.tensors, self._forms[0])
            check_forms("target", target.tensors, self._forms[1])
            check_zero(self._plan.checks, source.tensors)
            plan = self._plan
            values = {
                name: stand_in(target.weights[name], code, meta=False)
                for name, code in plan.quantized.anew.items()
                if name in target.weights
            }
            codes = {
                name: each.stand_in(self._world.rank, plan.match.stored[name].dtype, "cpu")
                for name, each in plan.codes.items()
            }
            encoded = {name: tensor for name, tensor in codes.items() if tensor is not None}
            filled = {n: t for n, t in target.tensors.items() if n not in plan.quantized.gone} | values | encoded
            taken = {name: tensor for name, tensor in filled.items() if name in plan.match.stored}
            shared = self._overlaps.of(taken)
            room = TargetRoom(taken, plan.parts, self._padded, in_place=self._in_place, shared=shared)
            room.begin(program.keys)
            return _Room(SourceValues(source, plan.sent_as), room, values, encoded), target

    def _receive(self, program: Program, room: _Room) -> Buffers:
        """Exchange everything; every rank has then what it needs. Return the codes and scales that were made of it."""
        with self._world.together():
            carry(program, room.source, room.target, self._exchange)
        with self._world.together():
            room.target.hand_over(room.encoded)
            room.target.check_shared()
        targets = {name: each for name, each in self._plan.codes.items() if program.moves(name)}
        sizes = largest(targets, room.encoded, self._world)
        buffers: dict[str, np.ndarray] = {}
        with self._world.together():
            for name, each in targets.items():
                if name in room.encoded:
                    buffers |= encode(each, room.encoded[name], sizes.get(name), self._world.rank)
        return buffers

    def _stop_requests(self, stack: ExitStack, room: _Room) -> None:
        """Enter what the user gave for the time in which the target is written."""
        with self._world.together():
            if self._pause is not None and room.target:
                stack.enter_context(self._pause())

    def _write(self, program: Program, room: _Room, own: Leaves, buffers: Buffers) -> int:
        """Give this rank's target the values that it has received; return the bytes written."""
        quantized = self._plan.quantized
        written = room.target.switch() + put(buffers, {name: local_of(own.tensors[name]) for name in buffers})
        for name, values in room.values.items():
            if program.moves(name):
                written += put_values(own.weights[name], local_of(values)) - local_of(values).nbytes
        for name in quantized.begins:
            if name in own.weights and program.moves(name):
                reset_scaling_state(own.weights[name])
        settle(own.islands, own.tensors)
        return written


@dataclass(frozen=True)
class _Room:
    """Both sides of this rank in one push."""

    source: SourceValues
    """What is sent."""
    target: TargetRoom
    """Where it comes in."""
    values: Mapping[str, torch.Tensor]
    """Values that are quantized into the target when all of them are there, by the parameters' names."""
    encoded: Mapping[str, torch.Tensor]
    """Values that are encoded for the target, by the names that tables know."""


_Patterns = tuple[tuple[str, ...], tuple[str, ...]]
"""What is moved, and what is not."""


def _asked(
    family: str | None,
    dialect: str | None,
    config: Config | None,
    rules: PathLike | None,
    dtype: DType | None,
    *,
    strict: bool,
) -> Asked:
    """Return what the user says, checked.

    Raises:
        TypeError: an argument of a type that it cannot have.
        Refused: UNSUPPORTED for a `dtype` that parameters cannot be cast to.
    """
    cast_to = read_float_type("dtype", dtype)
    if cast_to is not None:
        check_dtype(cast_to)
    return Asked(
        read_optional_text("family", family, "qwen3_moe"),
        read_optional_text("dialect", dialect, "hf"),
        config,
        rules,
        cast_to,
        strict,
    )


def _bucket(given: Size) -> int:
    """Return the bytes of a bucket.

    Raises:
        TypeError: it is no size.
        ValueError: it is too small.
    """
    size = read_size("bucket", given)
    if size < _LEAST:
        raise ValueError(f"bucket must be at least {_LEAST:,} bytes (1 MiB); got {given!r}")
    return size
