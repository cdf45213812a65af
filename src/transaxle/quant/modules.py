"""Modules with quantized weights: of a model that exists, and of one that is being built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from transaxle.errors import refuse
from transaxle.quant.entries import give_entries
from transaxle.quant.frame import ORIGIN
from transaxle.quant.quantizers import Quantizer
from transaxle.quant.tensor import QuantizedTensor

Filter = Callable[[str, nn.Linear], bool]
"""Says by name and module whether a linear layer is to be quantized."""


def quantize_(
    model: nn.Module,
    recipe: Quantizer,
    filter: Filter | None = None,  # noqa: A002 - the word for it
    *,
    preserve_high_precision_init: bool = False,
) -> list[str]:
    """Quantize the weights of linear layers, in place; call it before `fully_shard`. Meta models can be quantized too.

    A weight that a module of another kind shares, as an embedding does a head's, is left as it is. Layers that share a
    weight share the quantized one.

    Args:
        model: what to change.
        recipe: how.
        filter: which layers; all of them if not given.
        preserve_high_precision_init: keep the values for `MasterWeights`, which otherwise starts from the codes.

    Returns:
        Names of the weights that are quantized now.

    Raises:
        Refused: `UNSUPPORTED` for weights that are sharded already.
    """
    named = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module.weight, QuantizedTensor)
    ]
    wanted = [(name, module) for name, module in named if filter is None or filter(name, module)]
    chosen = {id(module) for _, module in wanted}
    elsewhere = {
        id(parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and not (key == "weight" and id(module) in chosen)
    }
    made: dict[int, nn.Parameter] = {}
    found = []
    for name, module in wanted:
        old = module.weight
        if id(old) not in elsewhere:
            if id(old) not in made:
                made[id(old)] = _parameter(f"{name}.weight", old, recipe, keep=preserve_high_precision_init)
            found.append((f"{name}.weight", module, made[id(old)]))
    for _, module, parameter in found:
        module.weight = parameter
        give_entries(module)
    return [name for name, _, _ in found]


@contextmanager
def quantized_init(
    recipe: Quantizer,
    *,
    filter: Callable[[nn.Linear], bool] | None = None,  # noqa: A002 - the word for it
    preserve_high_precision_init: bool = False,
) -> Iterator[None]:
    """Quantize the linear layers of models built in this block, when it ends and they have their initial values.

    Works for any code that makes `torch.nn.Linear` modules, Hugging Face models and `torch.device("meta")` included.

    Args:
        recipe: how.
        filter: which layers; all of them if not given, but for those that share their weight with an embedding.
        preserve_high_precision_init: keep the values for `MasterWeights`, which otherwise starts from the codes.
    """
    built: list[nn.Module] = []
    originals = {kind: kind.__init__ for kind in (nn.Linear, nn.Embedding)}

    def recording(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            built.append(self)

        return init

    for kind, original in originals.items():
        kind.__init__ = recording(original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[method-assign]
    quantize_(
        nn.ModuleList(built),
        recipe,
        None if filter is None else lambda _, module: filter(module),
        preserve_high_precision_init=preserve_high_precision_init,
    )


def _parameter(name: str, old: torch.Tensor, recipe: Quantizer, *, keep: bool) -> nn.Parameter:
    if type(old.data) is not torch.Tensor:
        raise refuse(
            "UNSUPPORTED",
            f"a weight of {type(old.data).__name__}",
            tensor=name,
            hint="quantize the model before it is sharded",
        )
    made = recipe.quantize(old.data)
    if keep and old.device.type != "meta":
        made.frame.cut[ORIGIN] = old.data.clone()
    return nn.Parameter(made, requires_grad=old.requires_grad)
