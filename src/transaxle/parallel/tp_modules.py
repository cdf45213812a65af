"""Cut modules: the module's own class, with a forward around its own.

While it computes, `self.weight` is this rank's part as an ordinary tensor; at any other time it is the parameter, which
is a DTensor where a DTensor can say how it is cut.

Dropout of activations that are the same on all ranks: every rank must drop the same elements.

Each rank draws from its own generator, and attention dropout on uneven heads makes these diverge even after equal
seeds. Ranks that drop different elements of a residual stream would each compute another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.dropout import _DropoutNd

from transaxle.errors import Refusal, Where
from transaxle.nn.grouped_linear import GroupedLinear
from transaxle.parallel.cutting import WEIGHT, Kept, enter, gather, kept_by, leave, local, scatter, summed, sums_outputs
from transaxle.parallel.tp_plan import Plan, Role
from transaxle.quant.nvfp4 import counting
from transaxle.torch_tensors.placement import Held, mark_all, placement_of, whole_shape

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
        with counting(tuple(kept.owned(positions))):
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
    def held(self, name: str) -> Held:
        """Return the positions of a parameter that this rank has, however it is cut; see `GroupedLinear`."""
        mark_all(self)
        parameter, rank = self._parameters[name], dist.get_rank()
        assert parameter is not None
        return placement_of(parameter, rank, name).held(whole_shape(parameter))[rank]


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
