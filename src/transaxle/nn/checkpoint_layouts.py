"""Expert layouts of frameworks and grouped layers, converted in one step: names, order of gate and up, transposes.

This is for the state dict of one layer's experts. `transaxle.load`, `transaxle.state_dict_as` and `transaxle.convert`
do the same for whole models, and understand DTensors.

A whole model's state dict, loaded by all modules on all ranks or by none.

torch loads module by module and writes as it goes, so what the last module refuses finds the others changed. Here the
values of before are kept until every module of every rank has taken its own.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from transaxle.axes.layout.bind import bind, group, join_slot, score, split_slot
from transaxle.axes.notation.family import Dialect, Family, Sizes
from transaxle.axes.notation.tables import read
from transaxle.axes.translation.translate import translate
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.nn.expert_relayout import described, move, under
from transaxle.quant.quantized_tensor import QuantizedTensor
from transaxle.torch_tensors import Ranks, held_by, placed_like, read_group, stored_local, take

_TABLE = "experts.rules"
STACKED = "stacked"
"""The dialect of two grouped layers `linear_fc1`, `linear_fc2` with one weight each."""
SEPARATE = "separate"
"""The same, with one weight per expert."""


@cache
def family() -> Family:
    """Return the table of expert layouts."""
    (table,) = read(files("transaxle.nn").joinpath(_TABLE).read_text("utf-8"), file=_TABLE)
    return table


def _dialect(label: str) -> Dialect:
    dialect = family().dialect(label)
    if dialect is None:
        raise refuse("AMBIGUOUS", f"there is no expert layout {label!r}; known are {', '.join(family().labels)}")
    return dialect


def recognised(names: list[str]) -> Dialect | None:
    """Return the layout that reads most of the names; None if no layout reads any."""
    grouped = group(split_slot(name)[0] for name in names)
    scored = [(score(grouped, dialect), dialect) for dialect in family().dialects]
    fitting = [(matched, dialect) for (matched, prefix), dialect in scored if matched and not prefix]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def experts_as(state: Mapping[str, Any], layout: str, *, prefix: str = "", source: str | None = None) -> dict[str, Any]:
    """Return a state dict with one layer's experts in another layout; other entries stay as they are.

    Args:
        state: any state dict, which is not changed. Optimizer states are named `optim/<parameter>/<state>`.
        layout: `stacked`, `separate`, `hf`, `transformers`, `torchtitan`, `torchtitan@0.2` or `automodel`.
        prefix: prefix of the experts' names, such as `model.layers.0.mlp.experts.`
        source: their present layout; None: it is recognised by the names.

    Raises:
        Refused: MISSING_TENSOR for missing experts; SHAPE_MISMATCH; UNSUPPORTED for DTensors, and for codes, which
            cannot be moved without their scales.
        UsageError: AMBIGUOUS for an unknown layout, or names of no known layout.
    """
    target = _dialect(layout)
    own, rest = _divided(state, prefix)
    origin = recognised(list(own)) if source is None else _dialect(source)
    if origin is None:
        first = ", ".join(list(own)[:3]) or "(none)"
        raise refuse(
            "AMBIGUOUS",
            f"no expert layout reads the names {first}",
            hint=f"Give source= one of {', '.join(family().labels)}.",
        )
    sizes = Sizes(family(), {})
    bound = bind(tuple(own), family(), origin, sizes)
    _refuse_codes({name: value for name, value in own.items() if name not in bound.unknown})
    moved = move(translate(bound, described(own), target, sizes), own)
    return {**rest, **under(prefix, moved)}


def _divided(state: Mapping[str, Any], prefix: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors below a prefix, without it, and all the rest."""
    own, rest = {}, {}
    for name, value in state.items():
        parameter, slot = split_slot(name)
        if parameter.startswith(prefix) and isinstance(value, torch.Tensor):
            own[join_slot(parameter[len(prefix) :], slot)] = value
        else:
            rest[name] = value
    return own, rest


def _refuse_codes(own: Mapping[str, torch.Tensor]) -> None:
    for name, value in own.items():
        if value.dtype.itemsize == 1:
            raise refuse(
                "UNSUPPORTED",
                f"its codes of {value.dtype} cannot be moved without their scales",
                tensor=name,
                hint="Use transaxle.load or transaxle.convert, which move codes and scales together.",
            )


def _translated(owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:  # noqa: ARG001
    """Bring experts into the layout `stacked`. A hook of torch, with a name, so that its module can be pickled."""
    own = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    layout = recognised(own)
    if layout is None or layout.label in (STACKED, SEPARATE):
        return
    stacked = experts_as(state, STACKED, prefix=prefix)
    for name in [name for name in state if name not in stacked]:
        del state[name]  # torch hands the hooks a copy that is theirs
    state.update(stacked)


def accept_layouts(module: nn.Module) -> nn.Module:
    """Let a module with grouped layers `linear_fc1` and `linear_fc2` load experts in any layout; return the module.

    The hook belongs to this module, since each layer sees only the names below its own.

    Args:
        module: the owner of both layers; the first computes gate and up.
    """
    module.register_load_state_dict_pre_hook(_translated)
    return module


def load_state_dict(
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    assign: bool = False,
    group: Ranks | None = None,
) -> Any:
    """Load a state dict into a module, all of it or nothing, on every rank or on none.

    It takes memory for one more copy of what this rank has of the module until it returns. If torch.distributed is
    initialized, every rank of the group must call it.

    Args:
        module: any module; one that is divided or sharded over ranks too.
        state: its state dict, as for the module's own `load_state_dict`, which loads it; of a tensor that the module
            has sharded, the whole tensor will do too, and each rank takes its own part of it.
        strict: see torch.
        assign: see torch.
        group: the ranks that load together, a process group or a mesh of one dim; None: all.

    Returns:
        What the module's `load_state_dict` returns: the names that were missing, and those not expected.

    Raises:
        Exception: what the module's `load_state_dict` raises on the first rank that it fails on. Parameters and buffers
            are then the objects that they were, with the values that they had.
    """
    ranks = read_group("group", group)
    before = _Kept(module)
    found, failure = None, None
    try:
        found = module.load_state_dict(_own_parts(module, state), strict=strict, assign=assign)
    except Exception as error:  # noqa: BLE001 - it is raised below, on every rank
        failure = error
    except BaseException:
        before.restore()
        raise
    failed = _first_of(failure, ranks)
    if failed is not None:
        before.restore()
        raise failed
    return found


def _own_parts(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict with this rank's parts of whole tensors that the module has sharded, which torch refuses."""
    whole = {name: value for name, value in state.items() if type(value) is torch.Tensor}
    entries = module.state_dict() if whole else {}
    parts = {
        name: placed_like(entry, take(value, held_by(entry)))
        for name, value in whole.items()
        if isinstance(entry := entries.get(name), DTensor) and entry.shape == value.shape
    }
    if not parts:
        return state
    own = OrderedDict(state) | parts
    own._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
    return own


class _Kept:
    """What a module holds, and the values."""

    def __init__(self, module: nn.Module) -> None:
        held: list[Any] = [tensors for each in module.modules() for tensors in (each._parameters, each._buffers)]
        self._held = [(tensors, dict(tensors)) for tensors in held]
        every = {id(each): each for _, tensors in self._held for each in tensors.values() if each is not None}
        self._values = [(room, room.clone()) for each in every.values() for room in _rooms(each)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for tensors, before in self._held:
            tensors.clear()
            tensors.update(before)
        for room, value in self._values:
            room.copy_(value)


def _rooms(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in which this rank keeps the values of one."""
    local = stored_local(tensor.detach())
    parts = [*local.components.values(), *local.state.values()] if isinstance(local, QuantizedTensor) else [local]
    yield from (part for part in parts if part.device.type != "meta")


def _first_of(failure: Exception | None, group: dist.ProcessGroup | None) -> Exception | None:
    """Return the failure of the first rank that failed; None where all have loaded."""
    if not dist.is_initialized():
        return failure
    device = torch.device("cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu")
    octets = b"" if failure is None else _as_bytes(failure)
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    lengths[dist.get_rank(group)] = len(octets)
    dist.all_reduce(lengths, group=group)
    failed = lengths.nonzero().flatten().tolist()
    if not failed:
        return None
    rank = failed[0] if group is None else dist.get_global_rank(group, failed[0])
    message = torch.zeros(int(lengths[failed[0]]), dtype=torch.uint8)
    if failed[0] == dist.get_rank(group):
        message[:] = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
    message = message.to(device)
    dist.broadcast(message, rank, group=group)
    error = _as_error(message.cpu().numpy().tobytes())
    error.add_note(f"This is rank {failed[0]}; no rank has loaded anything.")
    return error


def _as_bytes(failure: Exception) -> bytes:
    """Return an error as bytes: plain data, which other ranks read without unpickling anything."""
    text: object = str(failure) if isinstance(failure, RuntimeError) else repr(failure)
    if isinstance(failure, TransaxleError):
        text = [(r.code, r.message, r.where.file, r.where.tensor, r.hint) for r in failure.refusals]
    return json.dumps(text).encode()


def _as_error(octets: bytes) -> Exception:
    content = json.loads(octets)
    if isinstance(content, str):
        return RuntimeError(content)
    return gathered(
        [Refusal(code, message, Where(file, tensor), hint) for code, message, file, tensor, hint in content]
    )
