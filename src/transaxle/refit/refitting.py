"""Refit: sends live weights from a trainer into an inference engine, as often as the trainer wants. A refit is planned
once; afterwards each push only moves bytes.
"""

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
from transaxle.engine.views.encode import select_names
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
from transaxle.refit.agreement import Agreement, Buffers, RefitOptions, agree, encode, gather_maxima, put
from transaxle.refit.endpoints import Form, Overlaps, SourceReader, TargetMemory, check_forms, forms
from transaxle.refit.hops import Program, program, schedule
from transaxle.refit.hub_stream import carry
from transaxle.torch_tensors import Ranks, local_of

_SMALLEST_BUCKET = 1 << 20
"""Smallest size of an exchange bucket (buffer) in bytes."""
_ANEW = "Make a new Refit when all ranks run again."
Pause = Callable[[], AbstractContextManager[Any]]
"""Function that returns a context manager, which is active while the target is written; see the option `pause` of
`Refit`.
"""


@dataclass(frozen=True)
class RefitReport:
    """The result of a push (a transfer of weights) on one rank."""

    version: int
    """Number of pushes until now, including this push."""
    tensors: int
    """Number of target tensors in this push that this rank holds, whole or as a shard."""
    bytes_needed: int
    """Number of bytes of the pushed shards on this rank that only other ranks hold."""
    bytes_received: int
    """Number of bytes that other ranks sent to this rank."""
    bytes_written: int
    """Number of bytes written into the target on this rank."""
    buffers: int
    """Size in bytes of this rank's exchange buckets (at most two buffers)."""
    seconds: float
    """Wall time of the push in seconds."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        return asdict(self)


class Refit:
    """Copies live weights into other live tensors of any placement and dialect, as often as needed; all ranks must
    create this object together.

        refit = tx.Refit(trainer, {}, group)    # on the trainer's ranks
        refit.push()

        refit = tx.Refit({}, engine, group)     # on the engine's ranks
        refit.pull()

    Args:
        src_state: the model or state dict to read; `{}` on a rank that holds no shard of the source.
        dst_state: the model or state dict to write; `{}` on a rank that holds no shard of the target.
        group: the ranks of source and target, as a process group (`tx.refit.meet` makes one for two jobs) or a mesh
            with one dim; None means all ranks.
        in_place: whether to receive values directly in the target tensors. Receiving in place saves the memory for a
            second copy of this rank's shards. But readers can see a mixture of old and new weights, and a failed push
            leaves such a mixture.
        family: model family; None means that it is recognised from config and names.
        dialect: dialect of the target's tensor names; None means that it is recognised from the names.
        config: the model's config; None means the attribute `config` of the model, if it has one.
        rules: path of the user's own table of tensor names.
        dtype: `bf16`, `fp16` or `fp32`. Parameters of this dtype accept plain floating-point tensors of other dtypes,
            which are cast before they are sent. If `dtype` is None, tensors of other dtypes are refused.
        strict: whether to refuse tensor names that only source or target has, and configs that differ; the second name
            of a tied weight may be missing in one of the two.
        bucket: size of an exchange bucket (buffer); each rank has two of them.
        adapter: how a peft model is sent. `merged` sends the base weights with the active adapter merged in, under the
            names of a model without peft; `alone` sends only the adapter, under the names in its files. If `adapter` is
            None, all tensors of the model are sent, under its own names.
        pause: function that is called on ranks with a target, and returns a context manager. The context manager is
            active while the target is written, and may for example stop inference requests.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: raised on every rank, with every problem of source and target.
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
            options, bucket_bytes = (
                _read_refit_options(family, dialect, config, rules, dtype, strict=strict),
                _read_bucket(bucket),
            )
            self._adapter = read_adapter(adapter)
            source = source_leaves(src_state, self._adapter, values=False)
            target = target_leaves(dst_state, self._adapter)
            self._forms: tuple[Mapping[str, Form], Mapping[str, Form]] = forms(source.tensors), forms(target.tensors)
        compared = {name: getattr(options, name) for name in ("strict", "dtype", "family", "dialect")}
        world.require_alike({"adapter": self._adapter, **compared, "in_place": in_place, "bucket": bucket_bytes})
        self._plan: Agreement = agree((src_state, source), (dst_state, target), world, options)
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
        """Number of completed pushes in which this rank took part."""
        return self._version

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all target tensors, on all ranks, that receive values."""
        return tuple(dict.fromkeys(self._plan.names))

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of tensors that only the target has (if `strict` is False); these tensors are not written."""
        return self._plan.match.missing

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Names of tensors that only the source has (if `strict` is False), translated into the target's dialect."""
        return self._plan.match.unexpected

    def push(self, *, only: Patterns = (), skip: Patterns = ()) -> RefitReport:
        """Copy the present values of the source into the target; every rank must call this method or `pull`.

        First all ranks receive their values. Each rank writes its target only after all ranks have received their
        values.

        Args:
            only: patterns of target tensor names to push; no pattern means all tensors.
            skip: patterns of target tensor names that are not pushed, such as the names of frozen parameters.

        Raises:
            TypeError: if an argument has the wrong type.
            TransaxleError: raised on every rank; the targets are unchanged after an error, unless `in_place` is given.
                If a rank is lost just when other ranks begin to write, `version` of each rank shows whether that rank
                has written.
        """
        return self._move((read_patterns("only", only), read_patterns("skip", skip)))

    def pull(self) -> RefitReport:
        """Take part in a push for which the ranks that call `push` choose the tensors; every rank must call this method
        or `push`.
        """
        return self._move(None)

    def close(self) -> None:
        """Free the memory of the exchange buckets; a later push allocates new memory."""
        self._exchange.close()
        self._programs.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move(self, patterns: _Patterns | None) -> RefitReport:
        begin = time.monotonic()
        if self._lost:
            raise refuse("IO", f"an earlier push failed: {self._lost}", hint=_ANEW)
        try:
            program = self._program(self._choose_names(patterns))
            with ExitStack() as stack:
                endpoints, target_leaves_now = self._read(program)
                if self._in_place:
                    self._stop_requests(stack, endpoints)
                buffers = self._receive(program, endpoints)
                if not self._in_place:
                    self._stop_requests(stack, endpoints)
                with self._world.together():
                    written_bytes = self._write(program, endpoints, target_leaves_now, buffers)
        except TransaxleError as error:
            self._lost = error.refusals[0].message if is_loss(error) else ""
            raise
        self._version += 1
        return RefitReport(
            version=self._version,
            tensors=program.tensors,
            bytes_needed=program.remote_bytes,
            bytes_received=program.route.received,
            bytes_written=written_bytes,
            buffers=self._exchange.bucket_bytes,
            seconds=time.monotonic() - begin,
        )

    def _choose_names(self, patterns: _Patterns | None) -> frozenset[str] | None:
        """Return the target tensor names that the pushing ranks have chosen; None means all names. All ranks must call
        this method.
        """
        world = self._world
        answers = world.gather((self._version, patterns))
        if len({version for version, _ in answers}) > 1:
            versions = ", ".join(f"rank {rank}: {v}" for rank, (v, _) in zip(world.ranks, answers, strict=True))
            raise refuse("AMBIGUOUS", f"the ranks are at different versions: {versions}", hint=_ANEW)
        choices = {choice for _, choice in answers if choice is not None}
        if len(choices) > 1:
            message = "the ranks push different tensors"
            raise refuse("AMBIGUOUS", message, hint="Pass the same only= and skip= on all ranks that call push.")
        only, skip = choices.pop() if choices else ((), ())
        if not only and not skip:
            return None
        if (only, skip) not in self._chosen:
            self._chosen[only, skip] = frozenset(select_names(self.names, only, skip, "tensor"))
        return self._chosen[only, skip]

    def _program(self, names: frozenset[str] | None) -> Program:
        """Return the transfers for chosen tensor names; all ranks must call this method the first time these names are
        chosen.
        """
        if names not in self._programs:
            self._programs[names] = program(self._schedule, names, self._exchange)
        return self._programs[names]

    def _read(self, program: Program) -> tuple[_Endpoints, Leaves]:
        """Find this rank's current source and target tensors, and allocate memory for the values to receive."""
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
            local_targets = {n: t for n, t in target.tensors.items() if n not in plan.quantized.gone} | values | encoded
            matched = {name: tensor for name, tensor in local_targets.items() if name in plan.match.stored}
            shared = self._overlaps.of(matched)
            memory = TargetMemory(matched, plan.parts, self._padded, in_place=self._in_place, shared=shared)
            memory.begin(program.keys)
            return _Endpoints(SourceReader(source, plan.sent_as), memory, values, encoded), target

    def _receive(self, program: Program, endpoints: _Endpoints) -> Buffers:
        """Exchange the values of all ranks; return the codes and scales that were encoded from the received values."""
        with self._world.together():
            carry(program, endpoints.source, endpoints.target, self._exchange)
        with self._world.together():
            endpoints.target.hand_over(endpoints.encoded)
            endpoints.target.check_shared()
        targets = {name: encoded_target for name, encoded_target in self._plan.codes.items() if program.moves(name)}
        sizes = gather_maxima(targets, endpoints.encoded, self._world)
        buffers: dict[str, np.ndarray] = {}
        with self._world.together():
            for name, encoded_target in targets.items():
                if name in endpoints.encoded:
                    buffers |= encode(encoded_target, endpoints.encoded[name], sizes.get(name), self._world.rank)
        return buffers

    def _stop_requests(self, stack: ExitStack, endpoints: _Endpoints) -> None:
        """Enter the context of the user's `pause` on ranks with a target; it is left when `stack` is closed."""
        with self._world.together():
            if self._pause is not None and endpoints.target:
                stack.enter_context(self._pause())

    def _write(self, program: Program, endpoints: _Endpoints, target: Leaves, buffers: Buffers) -> int:
        """Write the received values into this rank's target; return the number of bytes written."""
        quantized = self._plan.quantized
        written_bytes = endpoints.target.switch() + put(
            buffers, {name: local_of(target.tensors[name]) for name in buffers}
        )
        for name, values in endpoints.values.items():
            if program.moves(name):
                written_bytes += put_values(target.weights[name], local_of(values)) - local_of(values).nbytes
        for name in quantized.begins:
            if name in target.weights and program.moves(name):
                reset_scaling_state(target.weights[name])
        settle(target.custom_modules, target.tensors)
        return written_bytes


@dataclass(frozen=True)
class _Endpoints:
    """The source and the target of this rank in one push."""

    source: SourceReader
    """Reads the values that this rank sends."""
    target: TargetMemory
    """Receives values for this rank's target."""
    values: Mapping[str, torch.Tensor]
    """Parameter name -> received values, for parameters that quantize their values when all values have arrived."""
    encoded: Mapping[str, torch.Tensor]
    """Logical tensor name -> received values, for tensors that are encoded into the codes and scales of the target."""


_Patterns = tuple[tuple[str, ...], tuple[str, ...]]
"""(patterns of tensor names to push, patterns of tensor names that are not pushed)."""


def _read_refit_options(
    family: str | None,
    dialect: str | None,
    config: Config | None,
    rules: PathLike | None,
    dtype: DType | None,
    *,
    strict: bool,
) -> RefitOptions:
    """Check the user's options, and return them as one record.

    Raises:
        TypeError: if an option has the wrong type.
        Refused: with code UNSUPPORTED, if parameters cannot be cast to `dtype`.
    """
    cast_to = read_float_type("dtype", dtype)
    if cast_to is not None:
        check_dtype(cast_to)
    return RefitOptions(
        read_optional_text("family", family, "qwen3_moe"),
        read_optional_text("dialect", dialect, "hf"),
        config,
        rules,
        cast_to,
        strict,
    )


def _read_bucket(bucket: Size) -> int:
    """Parse the option `bucket`; return the size in bytes.

    Raises:
        TypeError: if the option is not a size.
        ValueError: if the size is less than 1 MiB.
    """
    size = read_size("bucket", bucket)
    if size < _SMALLEST_BUCKET:
        raise ValueError(f"bucket must be at least {_SMALLEST_BUCKET:,} bytes (1 MiB); got {bucket!r}")
    return size
