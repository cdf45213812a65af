"""Quantize the weights of a model: in place, or while it is being built."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from transaxle.errors import Refusal, TransaxleError, Where, gathered
from transaxle.quant.entries import give_entries, is_quantized
from transaxle.quant.frame import begin
from transaxle.quant.quantized_tensor import QuantizedTensor, quantized
from transaxle.quant.quantizers import ORIGIN, Quantizer
from transaxle.quant.tp_share import Share
from transaxle.torch_tensors import held_by, placed_like, stored_local

Filter = Callable[[str, nn.Module], bool]
"""Says by name and module whether a linear layer, or experts in stacks, are to be quantized."""


@runtime_checkable
class Quantizable(Protocol):
    """A module that chooses itself which of its parameters are quantized, as `transaxle.nn.GroupedLinear` does."""

    def quantizable(self) -> Sequence[str]:
        """Return the names of its own parameters that can be quantized."""

    def check_recipe(self, recipe: Quantizer) -> None:
        """Refuse a recipe that the module cannot compute with.

        Raises:
            Refused: UNSUPPORTED.
        """


class Cut(Protocol):
    """How tensor parallelism has cut a parameter; see `transaxle.parallel`."""

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks."""

    @property
    def share(self) -> Share | None:
        """What this rank has; None where it has all."""

    def misplaced(self, quantizer: Quantizer) -> Refusal | None:
        """Return the refusal of a cut that goes through a tile of a quantizer; None if all lie between tiles."""


EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
"""Parameters of three dims that hold a matrix for each expert, [E, out, in], as modules of transformers have them."""
CUTS = "_transaxle_cuts"
"""Attribute of modules that tensor parallelism has cut: name of a parameter -> how (`Cut`)."""
_WEIGHT = "weight"
_NUMBERED = re.compile(r"(.*\D)(0|[1-9][0-9]*)")
"""Name of an expert's own parameter: what all experts have in common, and the expert's number."""
_STACK = 3
_TRANSPOSED = "is_transposed"
"""What transformers sets on experts of [E, in, out], as gpt-oss's are: tiles would lie across their rows; they stay."""


def quantize_(
    model: nn.Module,
    recipe: Quantizer,
    filter: Filter | None = None,  # noqa: A002 - the word for it
    *,
    preserve_high_precision_init: bool = False,
) -> list[str]:
    """Quantize the weights of linear and grouped layers, and stacks of experts, in place; on the meta device too.

    Call it before `fully_shard`, and either before `tensor_parallel` or after it, on all of its ranks. Stacks of
    experts are parameters with the names in `EXPERTS`, those of transformers.

    A weight that is also used by a module of another kind (a head tied to an embedding) is not quantized. Layers that
    share a weight also share the quantized one.

    Args:
        model: the model, which is changed.
        recipe: how weights are quantized.
        filter: chooses layers and modules of experts; without it all are quantized.
        preserve_high_precision_init: keep the values for `MasterWeights`, which otherwise starts from the codes.

    Returns:
        Names of the weights that were quantized.

    Raises:
        Refused: `UNSUPPORTED` for weights that are already sharded, and for a recipe that a layer cannot compute with;
            `BLOCK_MISALIGNED` where tensor parallelism has cut a weight inside a tile.
    """
    wanted = [
        (name, key, module)
        for name, module in model.named_modules()
        for key in _weights(module)
        if filter is None or filter(name, module)
    ]
    chosen = {(id(module), key) for _, key, module in wanted}
    elsewhere = {
        id(parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and (id(module), key) not in chosen
    }
    kept = [
        (f"{name}.{key}" if name else key, key, module)
        for name, key, module in wanted
        if id(getattr(module, key)) not in elsewhere
    ]
    problems = [fault for full, key, module in kept for fault in _faults(full, key, module, recipe)]
    if problems:
        raise gathered(problems)
    replacements: dict[int, nn.Parameter] = {}
    for name, key, module in kept:
        old = getattr(module, key)
        if id(old) not in replacements:
            share = _dealt(old) if (cut := _cut(module, key)) is None else cut.share
            made = _parameter(old, recipe, share, keep=preserve_high_precision_init)
            _identify(made, _identity(name, module, share))
            replacements[id(old)] = made
    for _, key, module in kept:
        setattr(module, key, replacements[id(getattr(module, key))])
        give_entries(module)
    return [full for full, *_ in kept]


def _weights(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters that inputs are multiplied with and that are not quantized yet."""
    if isinstance(module, Quantizable):
        names = tuple(module.quantizable())
    elif isinstance(module, nn.Linear):
        names = (_WEIGHT,)
    else:
        candidates = {} if getattr(module, _TRANSPOSED, False) else module._parameters
        names = tuple(name for name in EXPERTS if (each := candidates.get(name)) is not None and each.dim() == _STACK)
    parameters = {name: module._parameters.get(name) for name in names}
    return [name for name, each in parameters.items() if each is not None and not is_quantized(each)]


def _cut(module: nn.Module, key: str) -> Cut | None:
    """Return how tensor parallelism has cut a parameter; None of one that it has not."""
    cuts: Mapping[str, Cut] = module.__dict__.get(CUTS, {})
    return cuts.get(key)


def _dealt(weight: torch.Tensor) -> Share | None:
    """Return which experts of a stack this rank has, where expert parallelism has divided them; None of any other."""
    if not isinstance(weight, DTensor) or weight.dim() != _STACK or weight.placements != (Shard(0),):
        return None
    return Share(weight.device_mesh.get_group(), tuple(weight.shape), 0, held_by(weight)[0])


def _faults(name: str, key: str, module: nn.Module, recipe: Quantizer) -> list[Refusal]:
    """Return the reasons why a weight cannot be quantized."""
    problems = []
    weight, cut = getattr(module, key).data, _cut(module, key)
    kind = type(weight)
    sharded = isinstance(weight, DTensor) and (cut is None or weight.device_mesh != cut.mesh)
    if (sharded and _dealt(weight) is None) or kind not in (torch.Tensor, DTensor):
        hint = "Quantize the model before it is sharded; only experts in stacks may be divided over ranks before."
        problems.append(
            Refusal(
                "UNSUPPORTED", f"a weight of the class {kind.__name__} cannot be quantized", Where(tensor=name), hint
            )
        )
    wrong = None if cut is None else cut.misplaced(recipe)
    if wrong is not None:
        problems.append(replace(wrong, where=Where(tensor=name)))
    if isinstance(module, Quantizable):
        try:
            module.check_recipe(recipe)
        except TransaxleError as error:
            problems += [Refusal(each.code, each.message, Where(tensor=name), each.hint) for each in error.refusals]
    return problems


@contextmanager
def quantized_init(
    recipe: Quantizer,
    *,
    filter: Callable[[nn.Module], bool] | None = None,  # noqa: A002 - the word for it
    preserve_high_precision_init: bool = False,
) -> Iterator[None]:
    """Context manager: when the block ends, quantize the layers and stacks of experts of models built in it.

    It works for any code that creates `torch.nn.Linear` modules or copies them, as `torch.nn.TransformerEncoder` does,
    including Hugging Face models and `torch.device("meta")`. Weights that the block itself quantized stay as they are.

    Args:
        recipe: how weights are quantized.
        filter: chooses layers; without it all are quantized except those that share a weight with an embedding.
        preserve_high_precision_init: keep the values for `MasterWeights`, which otherwise starts from the codes.
    """
    built: dict[int, nn.Module] = {}
    originals = {kind: kind.__init__ for kind in (nn.Linear, nn.Embedding)}
    registers = nn.Module.register_parameter
    copies: Callable[[nn.Module, Any], None] = nn.Module.__setstate__

    def recording(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            built[id(self)] = self

        return init

    @wraps(registers)
    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        registers(self, name, param)
        if param is not None and (name in EXPERTS or isinstance(self, Quantizable)):
            built[id(self)] = self

    @wraps(copies)
    def copied(self: nn.Module, state: dict[str, Any]) -> None:
        copies(self, state)
        if isinstance(self, (*originals, Quantizable)) or not self._parameters.keys().isdisjoint(EXPERTS):
            built[id(self)] = self

    for kind, original in originals.items():
        kind.__init__ = recording(original)  # type: ignore[method-assign]
    nn.Module.register_parameter = register  # type: ignore[method-assign]
    nn.Module.__setstate__ = copied  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[method-assign]
        nn.Module.register_parameter = registers  # type: ignore[method-assign]
        nn.Module.__setstate__ = copies  # type: ignore[method-assign]
    quantize_(
        nn.ModuleList(built.values()),
        recipe,
        None if filter is None else lambda _, module: filter(module),
        preserve_high_precision_init=preserve_high_precision_init,
    )


def _identity(name: str, module: nn.Module, share: Share | None) -> tuple[str, int]:
    """Return by what random numbers of a weight are keyed: its name, and the number of the (first) expert.

    Experts in one parameter each (`weight7`) are named as those of a stack (`weight`) are.
    """
    if share is not None and share.common is None:
        return name, share.held[0][0] if share.held else 0
    numbered = _NUMBERED.fullmatch(name) if isinstance(module, Quantizable) else None
    return (name, 0) if numbered is None else (numbered[1], int(numbered[2]))


def _identify(parameter: nn.Parameter, identity: tuple[str, int]) -> None:
    """Begin the random numbers of a weight by its own name."""
    inner = stored_local(parameter)
    assert isinstance(inner, QuantizedTensor)
    inner.frame.identity = identity
    begin(inner.frame)


def _parameter(old: torch.Tensor, recipe: Quantizer, share: Share | None, *, keep: bool) -> nn.Parameter:
    values = stored_local(old.data)
    tensor = quantized(recipe, values, share=share)
    if keep and old.device.type != "meta":
        tensor.frame.cut[ORIGIN] = values.clone()
    return nn.Parameter(placed_like(old.data, tensor), requires_grad=old.requires_grad)
