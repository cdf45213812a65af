"""Tensor parallelism: cut a model whose family has a table over the ranks of a mesh, and the modules that it becomes.

**Tensor parallelism**: cut a model whose family has a table over the ranks of a mesh.

Guards against torch taking a rank's part of a parameter for the whole: tensors and hooks that refuse.

DeepSpeed wants ordinary tensors in a state dict, and pickles them. `torch.distributed.checkpoint` would save such a
tensor as if it were the whole parameter: one rank's part would be all that is saved. The moments that an optimizer
keeps for a part are ordinary tensors too, and nothing on them says so. But torch's `get_optimizer_state_dict` asks the
modules for their names before it returns, and there it is refused.

Model types of transformers whose cut models were shown to compute what the whole ones do.

A table says which axes may be cut. What a model does between its layers no table says: statistics over a cut axis, or
heads that work in pairs, make a cut model another one, without an error. So each type is tried, and the list of those
whose logits and gradients are the same is part of the package.

**Cut modules**: the module's own class, with a forward around its own.

While it computes, `self.weight` is this rank's part as an ordinary tensor; at any other time it is the parameter, which
is a DTensor where a DTensor can say how it is cut.

Dropout of activations that are the same on all ranks: every rank must drop the same elements.

Each rank draws from its own generator, and attention dropout on uneven heads makes these diverge even after equal
seeds. Ranks that drop different elements of a residual stream would each compute another model.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from transaxle.arguments import wrong_type
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.live.global_tensors import Runs, runs
from transaxle.live.transport.world import World
from transaxle.nn.grouped_linear import GroupedLinear
from transaxle.parallel.cutting import (
    WEIGHT,
    Kept,
    enter,
    gather,
    keep,
    kept_by,
    leave,
    local,
    replaced,
    scatter,
    summed,
    sums_outputs,
    tell_parts,
)
from transaxle.parallel.tp_plan import Plan, Role, Rules, make_plan, read
from transaxle.parallel.universal_metadata import record_of, universal_checkpoint_info
from transaxle.quant.entries import is_quantized, parts_of
from transaxle.quant.nvfp4 import count_columns
from transaxle.quant.tensor import QuantizedTensor
from transaxle.quant.tp_share import tile_refusal
from transaxle.torch_tensors import (
    Part,
    Positions,
    local_of,
    mark,
    mark_all,
    part_of,
    parts_in,
    place_like,
    placement_of,
    positions_of,
    take,
    whole_shape,
)

_CONFIG = "config"
_EXPERTS, _EAGER = "_experts_implementation", "eager"
_ALIGNED, _NARROWEST = 16, 2
"""`torch.nn.functional.grouped_mm` needs rows and columns of a multiple of so many bytes; and bytes of an element of
bf16, in which a model of fp32 may compute under autocast."""
_NOW = "_transaxle_computing"


def _kept(module: nn.Module) -> Kept:
    return kept_by(module)[WEIGHT]


def _group(module: nn.Module) -> dist.ProcessGroup:
    return next(iter(kept_by(module).values())).group


class _Column(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch names it
        entered = enter(input, _group(self))
        if not sums_outputs(self):
            own_columns: Tensor = super().forward(entered)
            return own_columns
        kept = _kept(self)
        positions = kept.held[kept.rank]
        with count_columns(tuple(kept.owned(positions))):
            shared: Tensor = super().forward(entered)
        return summed(shared, shared.dim() - 1, positions, kept.shape[kept.dim], kept.group)


class _Gathered(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        kept = _kept(self)
        return gather(super().forward(enter(input, kept.group)), kept.widths, kept.group)


class _Row(nn.Module):
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        total = leave(nn.functional.linear(input, self.weight), _group(self))
        return total if self.bias is None else total + self.bias.to(total.dtype)  # as autocast does it


class _Sliced(_Row):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        kept = _kept(self)
        return super().forward(scatter(input, kept.widths, kept.group))


class _Vocabulary(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        kept = _kept(self)
        ((start, stop),) = kept.held[kept.rank]
        elsewhere = (input < start) | (input >= stop)
        looked_up: Tensor = super().forward((input - start).masked_fill(elsewhere, 0))
        return leave(looked_up.masked_fill(elsewhere.unsqueeze(-1), 0), kept.group)


class _Hidden(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        kept = _kept(self)
        return gather(super().forward(input), kept.widths, kept.group)


class _Region(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group = _group(self)
        entered = [_entered(arg, group) for arg in args]
        return leave(super().forward(*entered, **{key: _entered(arg, group) for key, arg in kwargs.items()}), group)


class _Grouped(nn.Module):
    def positions(self, name: str) -> Positions:
        """Return the positions of a parameter that this rank has, however it is cut; see `GroupedLinear`."""
        mark_all(self)
        parameter, rank = self._parameters[name], dist.get_rank()
        assert parameter is not None
        return placement_of(parameter, rank, name).positions(whole_shape(parameter))[rank]


class _GroupedColumn(_Grouped):
    def forward(self, inp: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(enter(inp, _group(self)), *args, **kwargs)


class _GroupedRow(_Grouped):
    def forward(self, inp: Tensor, *args: Any, **kwargs: Any) -> Any:
        return leave(super().forward(inp, *args, **kwargs), _group(self))


def _entered(value: Any, group: dist.ProcessGroup) -> Any:
    return enter(value, group) if isinstance(value, Tensor) and value.is_floating_point() else value


class _Local(nn.Module):
    pass


class _Computing(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__[_NOW] = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            del self.__dict__[_NOW]


_CLASSES: Mapping[Role, type[nn.Module]] = {
    Role.LOCAL: _Local, Role.COLUMN: _Column, Role.GATHERED: _Gathered, Role.ROW: _Row, Role.SLICED: _Sliced,
    Role.VOCABULARY: _Vocabulary, Role.HIDDEN: _Hidden, Role.REGION: _Region,
    Role.GROUPED_COLUMN: _GroupedColumn, Role.GROUPED_ROW: _GroupedRow,
}  # fmt: skip


_MADE: dict[tuple[type, Role, tuple[str, ...]], type[nn.Module]] = {}


def _class(kind: type[nn.Module], role: Role, names: tuple[str, ...]) -> type[nn.Module]:
    """Return a module's class with a cut forward, which reads its parameters as this rank's part."""

    def read(name: str) -> property:
        return property(lambda module: local(module, name) if _NOW in module.__dict__ else module._parameters[name])

    key = kind, role, names
    if key not in _MADE:
        bases = (_Computing, _CLASSES[role], kind)
        _MADE[key] = type(f"Cut{kind.__name__}", bases, {name: read(name) for name in names})
    return _MADE[key]


def cut_module(module: nn.Module, role: Role) -> None:
    """Let a module compute with what this rank holds.

    Args:
        module: one whose own parameters are cut and kept already (`cutting.keep`).
        role: what it does.
    """
    names = tuple(sorted(kept_by(module)))
    module.__class__ = _class(type(module), role, names)
    if isinstance(module, nn.Linear | GroupedLinear):
        kept = next(kept for kept in kept_by(module).values() if len(kept.shape) > 1)
        sizes = [*kept.shape]
        sizes[kept.dim] = kept.widths[kept.rank]
        module.out_features, module.in_features = sizes[-2:]
    elif isinstance(module, nn.Embedding):
        kept = _kept(module)
        sizes = [*kept.shape]
        sizes[kept.dim] = kept.widths[kept.rank]
        module.num_embeddings, module.embedding_dim = sizes
        if role is Role.VOCABULARY and module.padding_idx is not None:
            ((start, stop),) = kept.held[kept.rank]
            inside = start <= module.padding_idx < stop
            module.padding_idx = module.padding_idx - start if inside else None
    elif role is Role.REGION:
        _align(module)


def _align(module: nn.Module) -> None:
    """Let stacked experts compute one by one where torch's grouped products do not take rows of their length."""
    config = module.__dict__.get(_CONFIG)
    parts = [part for name in kept_by(module) if (part := local(module, name)) is not None]
    widths = ((size, min(part.element_size(), _NARROWEST)) for part in parts for size in part.shape[1:])
    odd = any(size * element % _ALIGNED for size, element in widths)
    if odd and hasattr(config, _EXPERTS):
        module.__dict__[_CONFIG] = LocalConfig(config, {_EXPERTS: _EAGER})


class LocalConfig:
    """A model's config as a module of one rank sees it: the same, but for the numbers of heads and the like.

    Args:
        config: the model's; what is changed there later is seen here.
        local: what is different here.
    """

    def __init__(self, config: Any, local: Mapping[str, Any]) -> None:
        self._config, self._own = config, dict(local)

    def __getattr__(self, name: str) -> Any:
        """Return what is different here, or what the config says."""
        if name.startswith("__") or "_own" not in self.__dict__:
            raise AttributeError(name)
        return self._own[name] if name in self._own else getattr(self._config, name)


_QUERIES = ("num_heads", "num_attention_heads")
_KEYS = ("num_key_value_heads", "num_kv_heads")
_RATIO = ("num_key_value_groups",)


def count_heads(module: nn.Module, whole: tuple[int, int], local: tuple[int, int]) -> None:
    """Let an attention module count the heads of this rank.

    Args:
        module: as transformers has it: what it counts are its attributes, or those of its config.
        whole: heads of queries and of keys and values, of the whole model.
        local: those of this rank.
    """
    ratios = (whole[0] // whole[1], local[0] // local[1])
    counts = [(_QUERIES, whole[0], local[0]), (_KEYS, whole[1], local[1]), (_RATIO, *ratios)]
    changed = {name: (old, new) for names, old, new in counts for name in names}
    for name, (old, new) in changed.items():
        if module.__dict__.get(name) == old:
            setattr(module, name, new)
    config = module.__dict__.get(_CONFIG)
    if config is not None:
        own = {name: new for name, (old, new) in changed.items() if getattr(config, name, None) == old}
        module.__dict__[_CONFIG] = LocalConfig(config, own)


def is_cut(module: nn.Module) -> bool:
    """Tell whether a module is cut."""
    return bool(kept_by(module))


_RANKS = "_transaxle_ranks"
_NOISE = ("jitter_noise", "router_jitter_noise")


@dataclass(frozen=True, slots=True, eq=False)
class _Ranks:
    """The ranks that drop alike."""

    mesh: DeviceMesh
    """Of one dim."""

    def __deepcopy__(self, _: Any) -> _Ranks:
        """A copy of the model is on the same mesh."""
        return self


class CutDropout(nn.Dropout):
    """Dropout by the first rank's draw."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch names it
        """Return what is left of activations that all ranks have alike, scaled; the same on all of them."""
        if not self.training or not self.p:
            return input
        left = nn.functional.dropout(torch.ones_like(input), self.p)
        dist.broadcast(left, group=self.__dict__[_RANKS].mesh.get_group(), group_src=0)
        return input * left


def drop_alike(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Make dropout of activations that all ranks share drop the same elements on each."""
    for module in model.modules():
        for child in module.children():
            if type(child) is nn.Dropout and not _is_between(module, model, plan):
                child.__class__ = CutDropout
                child.__dict__[_RANKS] = _Ranks(mesh)


def random_refusals(model: nn.Module, plan: Plan) -> Iterator[Refusal]:
    """Yield a refusal for each source of noise that would differ between ranks computing the same values."""
    for path, module in model.named_modules():
        for name in _NOISE:
            if getattr(module, name, None):
                message = (
                    f"{name}={getattr(module, name)}: each rank would draw other noise for values that all ranks share"
                )
                yield Refusal("UNSUPPORTED", message, Where(None, path), f"Set {name} to 0.")
        for name, child in module.named_children():
            if not isinstance(child, _DropoutNd) or not child.p:
                continue
            if type(child) is not nn.Dropout or _is_between(module, model, plan):
                message = f"{child}: it is not known whether its input is the same on all ranks or a part on each"
                where = Where(None, f"{path}.{name}" if path else name)
                yield Refusal("UNSUPPORTED", message, where, "Set its p to 0.")


def _is_between(module: nn.Module, model: nn.Module, plan: Plan) -> bool:
    """Tell whether a module has layers that are cut, between which what it drops may be each rank's own."""
    names = {child: path for path, child in model.named_modules()}
    return any(plan.roles.get(names[child], Role.LOCAL) is not Role.LOCAL for child in module.children())


class Alone(torch.Tensor):
    """A rank's part, or what is computed from it: `torch.distributed.checkpoint` is refused."""

    def new_empty(self, *args: Any, **kwargs: Any) -> Alone:
        """See torch; `deepcopy` calls this, and wants the same class."""
        empty: Alone = super().new_empty(*args, **kwargs).as_subclass(Alone)
        return empty

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __create_write_items__(self, name: str, value: Any) -> NoReturn:
        """Refuse to be saved.

        Raises:
            Refused: UNSUPPORTED.
        """
        raise _refusal(name, self)

    def __create_chunk_list__(self) -> NoReturn:
        """Refuse to be loaded.

        Raises:
            Refused: UNSUPPORTED.
        """
        raise _refusal(None, self)


ASKED = "_fqn_modifiers"
"""Attribute of a module that only `torch.distributed.checkpoint.state_dict` looks for and calls."""
_OPTIMIZER = "_get_optim_state_dict"
"""Its function for the state of an optimizer."""
_MODEL, _FULL = "_get_model_state_dict", "full_state_dict"
"""Its function for the state of a model, and the option by which it would make whole tensors; it cannot here."""
_METHODS = {
    "save_pretrained": 'Call tx.save(model, path, to="hf") instead.',
    "resize_token_embeddings": "Resize the embeddings before the model is cut.",
}
"""Methods of a transformers model that would take a rank's part for the whole -> what to do instead."""


def no_names(name: str, *, always: bool) -> Mapping[str, str]:
    """Take the place of a module's `ASKED`, where the module has parts.

    Args:
        name: of a part in it.
        always: refuse weights too; otherwise the module's state dict says which parts they are.

    Raises:
        Refused: UNSUPPORTED.
    """
    caller = sys._getframe(2)  # of torch's function that calls this
    asks = caller.f_code.co_name
    whole = asks == _MODEL and getattr(caller.f_locals.get("info"), _FULL, False)
    if not always and asks != _OPTIMIZER and not whole:
        return {}
    message = "it is this rank's part of a parameter; torch's state dicts would take it, or its moments, for the whole"
    raise refuse("UNSUPPORTED", message, tensor=name, hint="Give model and optimizer to tx.save and tx.load.")


def refuse_methods(model: nn.Module) -> None:
    """Let a cut model refuse the methods of its class that do not know of parts."""
    for name, hint in _METHODS.items():
        if hasattr(model, name):
            model.__dict__[name] = partial(_no_method, name, hint)


def _no_method(name: str, hint: str, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise refuse("UNSUPPORTED", f"{name} would take this rank's part of a cut model for the whole", hint=hint)


def _refusal(name: str | None, tensor: torch.Tensor) -> TransaxleError:
    message = (
        f"{list(tensor.shape)} is this rank's part of a parameter, which torch's checkpoint would take for the whole"
    )
    hint = "Use tx.save and tx.load, or cut the model with dtensor=True."
    return refuse("UNSUPPORTED", message, tensor=name, hint=hint)


RECORD_NAME = "proven_types.json"
"""The list; `python -m tests.oracles.every_cut` writes it."""
_OWNER = "transformers.models."


@cache
def proven_types() -> frozenset[str]:
    """Return the model types that were tried, and are exact."""
    return frozenset(json.loads(files(__package__).joinpath(RECORD_NAME).read_text("utf-8"))["types"])


def check_type(model: nn.Module) -> None:
    """Refuse a model of transformers of which nobody has shown that it can be cut; other models are their owners'.

    Raises:
        Refused: UNSUPPORTED.
    """
    if not any(type(module).__module__.startswith(_OWNER) for module in model.modules()):
        return
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type in proven_types():
        return
    known = "its logits or gradients differ from those of the whole model, or it was not possible to try"
    hint = "Shard it with FSDP2 instead. The types that can be cut are in the how-to on tensor parallelism."
    raise refuse("UNSUPPORTED", f"models of type {model_type} are not cut over ranks: {known}", hint=hint)


_SAMPLE = 64
"""Elements of each parameter by which those of other values on some ranks are found."""


def tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: Literal["auto"] | Rules = "auto", *, dtensor: bool = True
) -> nn.Module:
    """Cut a model over the ranks of a mesh, in place; collective over them.

    Every rank gives the same whole model (on the meta device, if its weights are loaded afterwards) and keeps its part.
    Values that differ between ranks, as in models built without a seed, become the first rank's.
    Inputs and outputs keep their shapes and are the same on all ranks. The model's table says which axes may be cut.

    Args:
        model: a model of a family that has a table, not sharded yet except for experts divided over another mesh. Codes
            and scales of a quantized model are cut without requantizing.
        mesh: a mesh of one dim with the tensor-parallel ranks.
        plan: `auto`, or a mapping of module paths (`*` stands for one part of a path) to kinds of cut: `column`, `row`,
            `vocabulary`, `hidden`, `replicate`, or a pair of a kind and the rows of each rank. Modules without an entry
            are cut as by `auto`.
        dtensor: make parameters DTensors on the mesh where a DTensor can describe the cut. Others are ordinary tensors
            with this rank's part, which `model.state_dict()` describes. With False all are ordinary tensors, in
            state dicts too, as DeepSpeed's engine needs; then only `tx.save` and `tx.load` can handle the model, and
            `torch.distributed.checkpoint` is refused.

    Returns:
        The model.

    Raises:
        UsageError: UNKNOWN_FAMILY, AMBIGUOUS, UNKNOWN_AXIS.
        Refused: before anything is changed, with every problem: cuts that the table does not allow, or that go through
            a head or a tile of a quantized parameter (BLOCK_MISALIGNED); missing or unknown modules; parameters that
            the table does not have; ranks with another plan than the first one; a model of transformers whose type is
            not among those that were shown to compute the same when they are cut.
    """
    if not isinstance(mesh, DeviceMesh):
        raise wrong_type("mesh", "a DeviceMesh of one dim", mesh)
    if mesh.ndim != 1:
        message = f"the mesh has {mesh.ndim} dims {list(mesh.mesh.shape)}; tensor parallelism takes one"
        raise refuse("UNSUPPORTED", message, hint='Give one of its dims, mesh["tp"].')
    world = World(mesh.get_group())
    with world.together():
        if any(is_cut(module) for module in model.modules()):
            raise refuse("UNSUPPORTED", f"this {type(model).__name__} is already cut")
        check_type(model)
        _check_experts(model, mesh, dtensor=dtensor)
        tp_plan = make_plan(model, read(model), mesh.size(), None if plan == "auto" else plan)
        _check_ties(model, tp_plan)
        _check_tiles(model, tp_plan)
        if problems := list(random_refusals(model, tp_plan)):
            raise gathered(problems)
    _share_values(model, _check_ranks(model, tp_plan, world), world)
    _apply(model, mesh, tp_plan, dtensor=dtensor)
    drop_alike(model, mesh, tp_plan)
    refuse_methods(model)
    universal_checkpoint_info(model)
    return model


def _check_experts(model: nn.Module, mesh: DeviceMesh, *, dtensor: bool) -> None:
    """Refuse experts that the same ranks share out, and those that cannot be ordinary tensors."""
    problems = []
    for path, module in model.named_modules():
        if not isinstance(module, GroupedLinear) or module.ep is None:
            continue
        both = sorted({*mesh.mesh.flatten().tolist()} & {*module.ep.mesh.flatten().tolist()})
        if len(both) > 1:
            message = f"ranks {both} already divide its experts, so each would cut other experts"
            hint = 'Use two dims of one mesh: MoE(…, ep=mesh["ep"]) and tensor_parallel(model, mesh["tp"]).'
            problems.append(Refusal("UNSUPPORTED", message, Where(None, path), hint))
        elif module.single_grouped_weight and not dtensor:
            message = "its one parameter for all experts is divided over ranks, and so a DTensor"
            hint = "Use single_grouped_weight=False, or dtensor=True."
            problems.append(Refusal("UNSUPPORTED", message, Where(None, path), hint))
    if problems:
        raise gathered(problems)


def _check_ties(model: nn.Module, plan: Plan) -> None:
    """Refuse tied parameters that would be cut in two ways."""
    first: dict[int, Any] = {}
    problems = []
    for cut in plan.cuts:
        parameter = model.get_submodule(cut.weight.module)._parameters[cut.weight.own]
        known = first.setdefault(id(parameter), cut)
        if (known.option, known.held) != (cut.option, cut.held):
            ways = " and ".join("whole" if c.option is None else f"along dim {c.dim}" for c in (known, cut))
            message = f"it is the same parameter as {known.weight.name}, but they would be cut in two ways: {ways}"
            problems.append(Refusal("UNSUPPORTED", message, Where(None, cut.weight.name)))
    if problems:
        raise gathered(problems)


def _check_tiles(model: nn.Module, plan: Plan) -> None:
    """Refuse cuts of quantized parameters that go through a tile."""
    problems: list[Refusal] = []
    for cut in plan.cuts:
        parameter: torch.Tensor | None = model.get_submodule(cut.weight.module)._parameters[cut.weight.own]
        if cut.option is not None and isinstance(parameter, QuantizedTensor):
            both = parameter.frame.columnwise
            refusal = tile_refusal(parameter.quantizer, cut.weight.shape, cut.dim, cut.held, columnwise=both)
            problems += [] if refusal is None else [replace(refusal, where=Where(None, cut.weight.name))]
    if problems:
        raise gathered(problems)


def _check_ranks(model: nn.Module, plan: Plan, world: World) -> list[str]:
    """Refuse ranks that cut otherwise than the first; return the parameters that begin with other values there."""
    crcs: dict[str, tuple[int, int | None]] = {}
    for cut in plan.cuts:
        parameter = model.get_submodule(cut.weight.module)._parameters[cut.weight.own]
        assert parameter is not None
        how = cut.weight.shape, cut.dim, cut.held, parameter.requires_grad
        crcs[cut.weight.name] = zlib.crc32(repr(how).encode()), _first_values(parameter)
    first, *rest = world.gather(crcs)
    problems, unlike = [], set[str]()
    for rank, other in enumerate(rest, 1):
        ways = {name for name in first.keys() | other.keys() if first.get(name, (0,))[0] != other.get(name, (0,))[0]}
        unlike.update(name for name in first.keys() & other.keys() - ways if first[name][1] != other[name][1])
        if ways:
            message = f"{len(ways)} parameters are cut or trained differently on rank {rank} and rank 0"
            hint = "Give every rank the same model and plan."
            problems.append(Refusal("UNSUPPORTED", message, Where(None, min(ways)), hint))
    lacking = [name for name in sorted(unlike) if any(None in (first[name][1], each[name][1]) for each in rest)]
    if lacking:
        message = f"{len(lacking)} parameters have values on some ranks, but none on others"
        hint = "Build the model with storage on every rank, or on the meta device on every rank."
        problems.append(Refusal("UNSUPPORTED", message, Where(None, lacking[0]), hint))
    if problems:
        raise gathered(problems)
    return sorted(unlike)


def _share_values(model: nn.Module, names: Iterable[str], world: World) -> None:
    """Give parameters the values that they have on the first rank."""
    for name in names:
        own = local_of(model.get_parameter(name)).detach()
        values = own.clone(memory_format=torch.contiguous_format)
        dist.broadcast(values, group=world.group, group_src=0)
        own.copy_(values)


def _first_values(parameter: torch.Tensor) -> int | None:
    """Return a checksum of a parameter's first values; None where it has none yet, 0 for codes, which are not read."""
    row = local_of(parameter).detach()
    if row.is_meta:
        return None
    if isinstance(row, QuantizedTensor) or not row.numel():
        return 0
    while row.dim() > 1:
        row = row[0]
    return zlib.crc32(row.reshape(-1)[:_SAMPLE].contiguous().view(torch.uint8).cpu().numpy().tobytes())


def _apply(model: nn.Module, mesh: DeviceMesh, plan: Plan, *, dtensor: bool) -> None:
    replacements: dict[int, nn.Parameter] = {}
    for cut in plan.cuts:
        module = model.get_submodule(cut.weight.module)
        parameter = module._parameters[cut.weight.own]
        assert parameter is not None
        record = record_of(cut, cut.shares, plan.ranks)
        kept = Kept(mesh, cut.weight.shape, cut.dim, cut.held, cut.replicas, record)
        keep(module, cut.weight.own, kept)
        if id(parameter) not in replacements:
            replacements[id(parameter)] = replaced(parameter, kept, dtensor=dtensor)
            replacements[id(replacements[id(parameter)])] = replacements[id(parameter)]
        module._parameters[cut.weight.own] = replacements[id(parameter)]
    for path, role in plan.roles.items():
        module = model.get_submodule(path)
        cut_module(module, role)
        tell_parts(module)
        parts = [name for name, _ in parts_in(module)]
        if parts:
            module.register_state_dict_post_hook(_as_runs if dtensor else _as_alone)
            module.__dict__[ASKED] = partial(no_names, f"{path}.{parts[0]}", always=not dtensor)
        if dtensor:
            module.register_load_state_dict_pre_hook(_from_whole)
    rank = mesh.get_local_rank()
    for heads in plan.heads:
        count_heads(model.get_submodule(heads.module), heads.whole, heads.local[rank])


def _as_runs(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Let a state dict say which part of the whole each tensor is, so that `torch.distributed.checkpoint` saves it."""
    mark_all(module)
    for name, _part in parts_in(module):
        value, parameter = state.get(prefix + name), module._parameters[name]
        if is_quantized(parameter):
            state |= {key: runs(entry, key) for key, entry in _entries(parameter, state, prefix + name)}
        elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and parameter is not None:
            state[prefix + name] = runs(parameter, prefix + name)


def _as_alone(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Let `torch.distributed.checkpoint` be refused where it would take a part for the whole."""
    mark_all(module)
    for name, _part in parts_in(module):
        value, parameter = state.get(prefix + name), module._parameters[name]
        if is_quantized(parameter):
            entries = _entries(parameter, state, prefix + name)
            state |= {key: mark(entry.as_subclass(Alone), part_of(entry)) for key, entry in entries}
        elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            state[prefix + name] = value.as_subclass(Alone)


def _entries(parameter: torch.Tensor, state: dict[str, Any], name: str) -> list[tuple[str, torch.Tensor]]:
    """Return (name, entry) of a quantized part in a state dict; each entry is marked with the part that it is."""
    parts = ((name + suffix, Part(*part)) for suffix, part in parts_of(parameter).items())
    return [(key, mark(state[key].detach(), part)) for key, part in parts]


def _from_whole(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take this rank's part out of a state dict that holds whole tensors, or says which parts it holds.

    Without it torch would put whole tensors in the place of this rank's parts (`assign=True`). Of quantized parameters
    the module itself does so.
    """
    for name, kept in kept_by(module).items():
        value, parameter = state.get(prefix + name), module._parameters[name]
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or parameter is None:
            continue
        if isinstance(value, Runs):
            state[prefix + name] = place_like(parameter, value.to_local())
        elif value.shape == kept.shape and not is_quantized(parameter):
            state[prefix + name] = _laid(value, kept, parameter)


def _laid(value: torch.Tensor, kept: Kept, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor, placed as its parameter is."""
    of_whole = isinstance(parameter, DTensor) and parameter.shape == kept.shape  # and not of this rank's part
    return place_like(parameter, take(value if of_whole else kept.take(value), positions_of(parameter)))
