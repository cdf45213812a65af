"""Tensor parallelism: cuts a model over the ranks of a mesh, by the table of mapping rules of the model's family.

**Cut modules** have a class derived from the module's own class, with a forward around the original forward. During
forward, `self.weight` is this rank's shard as an ordinary tensor. At any other time, `self.weight` is the parameter,
which is a DTensor if a DTensor can describe how it is cut.

**Guards** refuse calls in which torch would treat a rank's shard of a parameter as the whole parameter. DeepSpeed needs
ordinary tensors in a state dict, and pickles them. `torch.distributed.checkpoint` would save such an ordinary tensor as
if it were the whole parameter, so that only one rank's shard would be saved. Optimizer moments of a shard are ordinary
tensors too, and nothing marks them as shards. But torch's `get_optimizer_state_dict` calls a function of the modules to
get parameter names; the modules refuse this call.

**Proven model types.** The table of a family lists which axes may be cut, but not how a model computes between its
layers. Statistics over a cut axis, or heads that work in pairs, make a cut model compute wrong results without an
error. So tests compare each model type of transformers, cut and whole. The package lists the types whose logits and
gradients are the same when they are cut.

**Dropout** of activations that are equal on all ranks must drop the same elements on each rank. Every rank has its own
random generator, and attention dropout on uneven heads makes generators diverge even after equal seeds. Ranks that
dropped different elements of a residual stream would compute different models.
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
    ParameterCut,
    cuts_of,
    enter,
    gather,
    leave,
    local,
    mark_parts,
    record_cut,
    replace_parameter,
    scatter,
    sum_shared,
    sums_outputs,
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
"""`_ALIGNED`: `torch.nn.functional.grouped_mm` needs rows and columns whose size is a multiple of this many bytes.
`_NARROWEST`: bytes of a bf16 element; under autocast, even a fp32 model computes in bf16.
"""
_NOW = "_transaxle_computing"


def _weight_cut(module: nn.Module) -> ParameterCut:
    return cuts_of(module)[WEIGHT]


def _group(module: nn.Module) -> dist.ProcessGroup:
    return next(iter(cuts_of(module).values())).group


class _Column(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch names it
        entered = enter(input, _group(self))
        if not sums_outputs(self):
            columns: Tensor = super().forward(entered)
            return columns
        cut = _weight_cut(self)
        positions = cut.positions_by_rank[cut.rank]
        with count_columns(tuple(cut.unshared_spans(positions))):
            output: Tensor = super().forward(entered)
        return sum_shared(output, output.dim() - 1, positions, cut.shape[cut.dim], cut.group)


class _Gathered(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        cut = _weight_cut(self)
        return gather(super().forward(enter(input, cut.group)), cut.widths, cut.group)


class _Row(nn.Module):
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        total = leave(nn.functional.linear(input, self.weight), _group(self))
        return total if self.bias is None else total + self.bias.to(total.dtype)  # autocast casts the bias like this


class _Sliced(_Row):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        cut = _weight_cut(self)
        return super().forward(scatter(input, cut.widths, cut.group))


class _Vocabulary(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        cut = _weight_cut(self)
        ((start, stop),) = cut.positions_by_rank[cut.rank]
        elsewhere = (input < start) | (input >= stop)
        looked_up: Tensor = super().forward((input - start).masked_fill(elsewhere, 0))
        return leave(looked_up.masked_fill(elsewhere.unsqueeze(-1), 0), cut.group)


class _Hidden(nn.Module):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        cut = _weight_cut(self)
        return gather(super().forward(input), cut.widths, cut.group)


class _Region(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        group = _group(self)
        entered = [_enter_value(arg, group) for arg in args]
        return leave(super().forward(*entered, **{key: _enter_value(arg, group) for key, arg in kwargs.items()}), group)


class _Grouped(nn.Module):
    def positions(self, name: str) -> Positions:
        """Return, for each dim of a whole parameter, the indices that this rank has (see `GroupedLinear.positions`)."""
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


def _enter_value(value: Any, group: dist.ProcessGroup) -> Any:
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


_CLASSES_BY_KEY: dict[tuple[type, Role, tuple[str, ...]], type[nn.Module]] = {}


def _class(kind: type[nn.Module], role: Role, names: tuple[str, ...]) -> type[nn.Module]:
    """Return the class of a cut module, derived from the module's class; during forward, the module's parameters are
    this rank's shards.
    """

    def read(name: str) -> property:
        return property(lambda module: local(module, name) if _NOW in module.__dict__ else module._parameters[name])

    key = kind, role, names
    if key not in _CLASSES_BY_KEY:
        bases = (_Computing, _CLASSES[role], kind)
        _CLASSES_BY_KEY[key] = type(f"Cut{kind.__name__}", bases, {name: read(name) for name in names})
    return _CLASSES_BY_KEY[key]


def cut_module(module: nn.Module, role: Role) -> None:
    """Change a module in place so that it computes with this rank's shards of its parameters.

    Args:
        module: a module whose own parameters are already cut and recorded (`cutting.record_cut`).
        role: how the module computes with shards (see `Role`).
    """
    names = tuple(sorted(cuts_of(module)))
    module.__class__ = _class(type(module), role, names)
    if isinstance(module, nn.Linear | GroupedLinear):
        cut = next(cut for cut in cuts_of(module).values() if len(cut.shape) > 1)
        sizes = [*cut.shape]
        sizes[cut.dim] = cut.widths[cut.rank]
        module.out_features, module.in_features = sizes[-2:]
    elif isinstance(module, nn.Embedding):
        cut = _weight_cut(module)
        sizes = [*cut.shape]
        sizes[cut.dim] = cut.widths[cut.rank]
        module.num_embeddings, module.embedding_dim = sizes
        if role is Role.VOCABULARY and module.padding_idx is not None:
            ((start, stop),) = cut.positions_by_rank[cut.rank]
            has_padding = start <= module.padding_idx < stop
            module.padding_idx = module.padding_idx - start if has_padding else None
    elif role is Role.REGION:
        _align(module)


def _align(module: nn.Module) -> None:
    """Let stacked experts be multiplied one by one, if torch's grouped products do not support the length of their
    rows.
    """
    config = module.__dict__.get(_CONFIG)
    parts = [part for name in cuts_of(module) if (part := local(module, name)) is not None]
    widths = ((size, min(part.element_size(), _NARROWEST)) for part in parts for size in part.shape[1:])
    odd = any(size * element % _ALIGNED for size, element in widths)
    if odd and hasattr(config, _EXPERTS):
        module.__dict__[_CONFIG] = LocalConfig(config, {_EXPERTS: _EAGER})


class LocalConfig:
    """A model's config in the view of one rank's modules: numbers of heads and similar settings are those of the rank.

    Args:
        config: the model's config; later changes of it are visible in the `LocalConfig`.
        local: setting -> value, for the settings whose values differ on this rank.
    """

    def __init__(self, config: Any, local: Mapping[str, Any]) -> None:
        self._config, self._own = config, dict(local)

    def __getattr__(self, name: str) -> Any:
        """Return the local value of a setting or, if there is no local value, the config's value."""
        if name.startswith("__") or "_own" not in self.__dict__:
            raise AttributeError(name)
        return self._own[name] if name in self._own else getattr(self._config, name)


_QUERIES = ("num_heads", "num_attention_heads")
_KEYS = ("num_key_value_heads", "num_kv_heads")
_RATIO = ("num_key_value_groups",)


def count_heads(module: nn.Module, whole: tuple[int, int], local: tuple[int, int]) -> None:
    """Set the numbers of heads of an attention module to this rank's numbers.

    Args:
        module: attention module of transformers, whose own attributes or config contain the numbers.
        whole: numbers of query heads, and of key and value heads, in the whole model.
        local: numbers of query heads, and of key and value heads, on this rank.
    """
    ratios = (whole[0] // whole[1], local[0] // local[1])
    counts = [(_QUERIES, whole[0], local[0]), (_KEYS, whole[1], local[1]), (_RATIO, *ratios)]
    changed = {name: (old, new) for names, old, new in counts for name in names}
    for name, (old, new) in changed.items():
        if module.__dict__.get(name) == old:
            setattr(module, name, new)
    config = module.__dict__.get(_CONFIG)
    if config is not None:
        overrides = {name: new for name, (old, new) in changed.items() if getattr(config, name, None) == old}
        module.__dict__[_CONFIG] = LocalConfig(config, overrides)


def is_cut(module: nn.Module) -> bool:
    """Return whether `tensor_parallel` has cut a module."""
    return bool(cuts_of(module))


_RANKS = "_transaxle_ranks"
_NOISE = ("jitter_noise", "router_jitter_noise")


@dataclass(frozen=True, slots=True, eq=False)
class _Ranks:
    """The ranks on which dropout must drop the same elements."""

    mesh: DeviceMesh
    """Mesh of the ranks, with one dim."""

    def __deepcopy__(self, _: Any) -> _Ranks:
        """Return the same object, because a copy of the model is on the same mesh."""
        return self


class CutDropout(nn.Dropout):
    """Dropout that uses the first rank's random mask on all ranks."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch names it
        """Multiply activations that are equal on all ranks by the first rank's mask, and rescale them."""
        if not self.training or not self.p:
            return input
        mask = nn.functional.dropout(torch.ones_like(input), self.p)
        dist.broadcast(mask, group=self.__dict__[_RANKS].mesh.get_group(), group_src=0)
        return input * mask


def drop_alike(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Let dropout of activations that are equal on all ranks drop the same elements on every rank."""
    for module in model.modules():
        for child in module.children():
            if type(child) is nn.Dropout and not _is_between(module, model, plan):
                child.__class__ = CutDropout
                child.__dict__[_RANKS] = _Ranks(mesh)


def random_refusals(model: nn.Module, plan: Plan) -> Iterator[Refusal]:
    """Yield an error for each source of noise that would differ between ranks that compute the same values."""
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
    """Return whether a module contains cut layers, between which activations, and so their dropout, may differ
    by rank.
    """
    names = {child: path for path, child in model.named_modules()}
    return any(plan.roles.get(names[child], Role.LOCAL) is not Role.LOCAL for child in module.children())


class LocalPart(torch.Tensor):
    """A rank's shard of a parameter, or a tensor computed from a shard. It refuses to be saved by
    `torch.distributed.checkpoint`.
    """

    def new_empty(self, *args: Any, **kwargs: Any) -> LocalPart:
        """Return an uninitialized tensor of the same class, as `deepcopy` requires."""
        empty: LocalPart = super().new_empty(*args, **kwargs).as_subclass(LocalPart)
        return empty

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __create_write_items__(self, name: str, value: Any) -> NoReturn:
        """Refuse that `torch.distributed.checkpoint` saves the tensor.

        Raises:
            Refused: with the code UNSUPPORTED, in every call.
        """
        raise _refusal(name, self)

    def __create_chunk_list__(self) -> NoReturn:
        """Refuse that `torch.distributed.checkpoint` loads into the tensor.

        Raises:
            Refused: with the code UNSUPPORTED, in every call.
        """
        raise _refusal(None, self)


NAMES_HOOK = "_fqn_modifiers"
"""Name of a module attribute that only `torch.distributed.checkpoint.state_dict` reads and calls."""
_OPTIMIZER = "_get_optim_state_dict"
"""Name of torch's function that collects an optimizer's state."""
_MODEL, _FULL = "_get_model_state_dict", "full_state_dict"
"""Names of torch's function that collects a model's state, and of its option to assemble whole tensors, which is
impossible for cut models.
"""
_METHODS = {
    "save_pretrained": 'Call tx.save(model, path, to="hf") instead.',
    "resize_token_embeddings": "Resize the embeddings before the model is cut.",
}
"""Method of a transformers model that would treat a rank's shards as whole parameters -> hint with an alternative."""


def no_names(name: str, *, always: bool) -> Mapping[str, str]:
    """Refuse calls in which torch would misread shards; a module with shards has this function as its `NAMES_HOOK`
    attribute.

    Args:
        name: name of a parameter in the module of which the rank has a shard.
        always: whether to refuse weights too; False if the module's state dict describes the shards.

    Raises:
        Refused: with the code UNSUPPORTED if torch would misread a shard.
    """
    caller = sys._getframe(2)  # the stack frame of torch's function that reads the names
    asks = caller.f_code.co_name
    whole = asks == _MODEL and getattr(caller.f_locals.get("info"), _FULL, False)
    if not always and asks != _OPTIMIZER and not whole:
        return {}
    message = "it is this rank's part of a parameter; torch's state dicts would take it, or its moments, for the whole"
    raise refuse("UNSUPPORTED", message, tensor=name, hint="Give model and optimizer to tx.save and tx.load.")


def refuse_methods(model: nn.Module) -> None:
    """Make a cut model refuse calls of methods that would treat shards as whole parameters."""
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
"""File with the model types whose cut models compute the same as whole models; `python -m tests.oracles.every_cut`
tests them and writes the file.
"""
_OWNER = "transformers.models."


@cache
def proven_types() -> frozenset[str]:
    """Return the model types for which tests have shown that a cut model computes the same as a whole model."""
    return frozenset(json.loads(files(__package__).joinpath(RECORD_NAME).read_text("utf-8"))["types"])


def check_type(model: nn.Module) -> None:
    """Refuse a transformers model whose type is not proven; models of other libraries are accepted at the user's own
    risk.

    Raises:
        Refused: with the code UNSUPPORTED if the model type is not proven.
    """
    if not any(type(module).__module__.startswith(_OWNER) for module in model.modules()):
        return
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type in proven_types():
        return
    reason = "its logits or gradients differ from those of the whole model, or it was not possible to try"
    hint = "Shard it with FSDP2 instead. The types that can be cut are in the how-to on tensor parallelism."
    raise refuse("UNSUPPORTED", f"models of type {model_type} are not cut over ranks: {reason}", hint=hint)


_SAMPLE = 64
"""Number of elements of each parameter that are compared between ranks."""


def tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: Literal["auto"] | Rules = "auto", *, dtensor: bool = True
) -> nn.Module:
    """Cut a model over the ranks of a mesh, in place; every rank of the mesh must call this function.

    Every rank passes the same whole model (on the meta device if weights are loaded afterwards) and keeps its shards.
    Parameters whose values differ between ranks, as in models built without a seed, get the first rank's values. Inputs
    and outputs keep their shapes and are equal on all ranks. The table of the model's family determines which axes may
    be cut.

    Args:
        model: a model of a family that has a table of mapping rules. The model must not be sharded yet, except that
            experts may be divided over a different mesh. Codes and scales of a quantized model are cut without
            quantizing again.
        mesh: a mesh of one dim with the tensor-parallel ranks.
        plan: `auto`, or a mapping of module paths (`*` matches one segment of a path) to kinds of cut. A kind is
            `column`, `row`, `vocabulary`, `hidden` or `replicate`, or a pair of a kind and the rows of each rank.
            Modules without an entry are cut as `auto` cuts them.
        dtensor: whether parameters become DTensors on the mesh, if a DTensor can describe the cut. Parameters that no
            DTensor can describe are ordinary tensors with this rank's shard, which `model.state_dict()` describes. If
            False, all parameters are ordinary tensors, in state dicts too, as DeepSpeed's engine requires. A model of
            ordinary tensors can be handled only by `tx.save` and `tx.load`, and `torch.distributed.checkpoint` is
            refused.

    Returns:
        The cut model.

    Raises:
        UsageError: with the code UNKNOWN_FAMILY, AMBIGUOUS or UNKNOWN_AXIS if no table, or no single table, fits the
            model.
        Refused: before anything is changed, with every problem. The table may not allow a cut, or the cut may go
            through a head or a tile of a quantized parameter (BLOCK_MISALIGNED). Modules may be missing or unknown. The
            table may lack a parameter. The plan of a rank may differ from the first rank's plan. A transformers model's
            type may not be among the proven types.
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
    """Refuse experts that are already divided over the mesh's ranks, and stacked experts that cannot be ordinary
    tensors.
    """
    problems = []
    for path, module in model.named_modules():
        if not isinstance(module, GroupedLinear) or module.ep is None:
            continue
        common_ranks = sorted({*mesh.mesh.flatten().tolist()} & {*module.ep.mesh.flatten().tolist()})
        if len(common_ranks) > 1:
            message = f"ranks {common_ranks} already divide its experts, so each would cut other experts"
            hint = 'Use two dims of one mesh: MoE(…, ep=mesh["ep"]) and tensor_parallel(model, mesh["tp"]).'
            problems.append(Refusal("UNSUPPORTED", message, Where(None, path), hint))
        elif module.single_grouped_weight and not dtensor:
            message = "its one parameter for all experts is divided over ranks, and so a DTensor"
            hint = "Use single_grouped_weight=False, or dtensor=True."
            problems.append(Refusal("UNSUPPORTED", message, Where(None, path), hint))
    if problems:
        raise gathered(problems)


def _check_ties(model: nn.Module, plan: Plan) -> None:
    """Refuse tied parameters that would be cut in two different ways."""
    first_cuts: dict[int, Any] = {}
    problems = []
    for cut in plan.cuts:
        parameter = model.get_submodule(cut.weight.module)._parameters[cut.weight.parameter_name]
        first_cut = first_cuts.setdefault(id(parameter), cut)
        if (first_cut.option, first_cut.positions_by_rank) != (cut.option, cut.positions_by_rank):
            ways = " and ".join("whole" if c.option is None else f"along dim {c.dim}" for c in (first_cut, cut))
            message = f"it is the same parameter as {first_cut.weight.name}, but they would be cut in two ways: {ways}"
            problems.append(Refusal("UNSUPPORTED", message, Where(None, cut.weight.name)))
    if problems:
        raise gathered(problems)


def _check_tiles(model: nn.Module, plan: Plan) -> None:
    """Refuse cuts of quantized parameters that divide a tile (block with one scale)."""
    problems: list[Refusal] = []
    for cut in plan.cuts:
        parameter: torch.Tensor | None = model.get_submodule(cut.weight.module)._parameters[cut.weight.parameter_name]
        if cut.option is not None and isinstance(parameter, QuantizedTensor):
            has_columnwise = parameter.frame.columnwise
            refusal = tile_refusal(
                parameter.quantizer, cut.weight.shape, cut.dim, cut.positions_by_rank, columnwise=has_columnwise
            )
            problems += [] if refusal is None else [replace(refusal, where=Where(None, cut.weight.name))]
    if problems:
        raise gathered(problems)


def _check_ranks(model: nn.Module, plan: Plan, world: World) -> list[str]:
    """Refuse ranks whose plan differs from the first rank's plan; return the names of the parameters whose values
    differ.
    """
    crcs: dict[str, tuple[int, int | None]] = {}
    for cut in plan.cuts:
        parameter = model.get_submodule(cut.weight.module)._parameters[cut.weight.parameter_name]
        assert parameter is not None
        description = cut.weight.shape, cut.dim, cut.positions_by_rank, parameter.requires_grad
        crcs[cut.weight.name] = zlib.crc32(repr(description).encode()), _first_values(parameter)
    first, *other_ranks = world.gather(crcs)
    problems, unlike = [], set[str]()
    for rank, of_rank in enumerate(other_ranks, 1):
        different_cuts = {
            name for name in first.keys() | of_rank.keys() if first.get(name, (0,))[0] != of_rank.get(name, (0,))[0]
        }
        unlike.update(
            name for name in first.keys() & of_rank.keys() - different_cuts if first[name][1] != of_rank[name][1]
        )
        if different_cuts:
            message = f"{len(different_cuts)} parameters are cut or trained differently on rank {rank} and rank 0"
            hint = "Give every rank the same model and plan."
            problems.append(Refusal("UNSUPPORTED", message, Where(None, min(different_cuts)), hint))
    missing = [name for name in sorted(unlike) if any(None in (first[name][1], each[name][1]) for each in other_ranks)]
    if missing:
        message = f"{len(missing)} parameters have values on some ranks, but none on others"
        hint = "Build the model with storage on every rank, or on the meta device on every rank."
        problems.append(Refusal("UNSUPPORTED", message, Where(None, missing[0]), hint))
    if problems:
        raise gathered(problems)
    return sorted(unlike)


def _share_values(model: nn.Module, names: Iterable[str], world: World) -> None:
    """Copy the first rank's values of parameters to all ranks."""
    for name in names:
        local = local_of(model.get_parameter(name)).detach()
        values = local.clone(memory_format=torch.contiguous_format)
        dist.broadcast(values, group=world.group, group_src=0)
        local.copy_(values)


def _first_values(parameter: torch.Tensor) -> int | None:
    """Return a checksum of a parameter's first values; None on the meta device, 0 for quantized codes (never
    compared).
    """
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
        parameter = module._parameters[cut.weight.parameter_name]
        assert parameter is not None
        record = record_of(cut, cut.shares, plan.ranks)
        parameter_cut = ParameterCut(mesh, cut.weight.shape, cut.dim, cut.positions_by_rank, cut.replicas, record)
        record_cut(module, cut.weight.parameter_name, parameter_cut)
        if id(parameter) not in replacements:
            replacements[id(parameter)] = replace_parameter(parameter, parameter_cut, dtensor=dtensor)
            replacements[id(replacements[id(parameter)])] = replacements[id(parameter)]
        module._parameters[cut.weight.parameter_name] = replacements[id(parameter)]
    for path, role in plan.roles.items():
        module = model.get_submodule(path)
        cut_module(module, role)
        mark_parts(module)
        parts = [name for name, _ in parts_in(module)]
        if parts:
            module.register_state_dict_post_hook(_as_runs if dtensor else _as_alone)
            module.__dict__[NAMES_HOOK] = partial(no_names, f"{path}.{parts[0]}", always=not dtensor)
        if dtensor:
            module.register_load_state_dict_pre_hook(_from_whole)
    rank = mesh.get_local_rank()
    for heads in plan.heads:
        count_heads(model.get_submodule(heads.module), heads.whole, heads.local[rank])


def _as_runs(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Describe in a state dict which part of a whole parameter each tensor is, so that `torch.distributed.checkpoint`
    can save the tensor.
    """
    mark_all(module)
    for name, _part in parts_in(module):
        value, parameter = state.get(prefix + name), module._parameters[name]
        if is_quantized(parameter):
            state |= {key: runs(entry, key) for key, entry in _entries(parameter, state, prefix + name)}
        elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and parameter is not None:
            state[prefix + name] = runs(parameter, prefix + name)


def _as_alone(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Make `torch.distributed.checkpoint` refuse tensors in a state dict that it would treat as whole parameters."""
    mark_all(module)
    for name, _part in parts_in(module):
        value, parameter = state.get(prefix + name), module._parameters[name]
        if is_quantized(parameter):
            entries = _entries(parameter, state, prefix + name)
            state |= {key: mark(entry.as_subclass(LocalPart), part_of(entry)) for key, entry in entries}
        elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            state[prefix + name] = value.as_subclass(LocalPart)


def _entries(parameter: torch.Tensor, state: dict[str, Any], name: str) -> list[tuple[str, torch.Tensor]]:
    """Return (name, entry) pairs of a quantized shard in a state dict; each entry is marked with its part of
    the whole.
    """
    parts = ((name + suffix, Part(*part)) for suffix, part in parts_of(parameter).items())
    return [(key, mark(state[key].detach(), part)) for key, part in parts]


def _from_whole(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole tensors, or tensors that describe their parts, in a state dict by this rank's shards.

    Without this hook, torch would replace this rank's shards by whole tensors (`assign=True`). Quantized parameters are
    omitted, because `QuantizedEntries` loads them.
    """
    for name, cut in cuts_of(module).items():
        value, parameter = state.get(prefix + name), module._parameters[name]
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or parameter is None:
            continue
        if isinstance(value, Runs):
            state[prefix + name] = place_like(parameter, value.to_local())
        elif value.shape == cut.shape and not is_quantized(parameter):
            state[prefix + name] = _place_part(value, cut, parameter)


def _place_part(value: torch.Tensor, cut: ParameterCut, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a whole tensor, with the placements of the parameter to which it belongs."""
    of_whole = isinstance(parameter, DTensor) and parameter.shape == cut.shape  # else `value` is the rank's shard
    return place_like(parameter, take(value if of_whole else cut.take(value), positions_of(parameter)))
