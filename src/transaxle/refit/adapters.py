"""LoRA adapters of a trainer in a refit: an inference engine receives either base weights with adapters merged in, or
one adapter alone.

The merged weights are computed by peft itself. After each merge, the trainer's weights are restored bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from transaxle.axes.notation.name import own_name
from transaxle.errors import Refusal, gathered, refuse
from transaxle.live.model.peft_model import base_names, is_active, leaves_of_checkpoint, peft_model_of, tuners
from transaxle.live.model.state_tensors import Leaves, State, leaves
from transaxle.torch_tensors import local_of, place_like, same_bytes

MERGED, ALONE = "merged", "alone"
_MODES = (MERGED, ALONE)


def read_adapter(adapter: object) -> str | None:
    """Check the option `adapter`, which may be `merged`, `alone` or None, and return it.

    Raises:
        ValueError: if the option is not `merged`, `alone` or None.
    """
    if adapter is not None and adapter not in _MODES:
        raise ValueError(f"adapter must be one of {', '.join(_MODES)}, or None; got {adapter!r}")
    return None if adapter is None else str(adapter)


def source_leaves(state: State, adapter: str | None, *, values: bool) -> Leaves:
    """Return this rank's source tensors in the form in which they are sent: with the adapter merged in, or the adapter
    alone.

    Args:
        state: a model, a state dict, or the sharded state dict of a Megatron model. If `adapter` is None, the state may
            also be a model under ZeRO-3.
        adapter: how the adapter of a peft model is sent; see `read_adapter`.
        values: whether to compute merged values; if False, the returned tensors have their final shapes, dtypes and
            ties, but not their final values.

    Raises:
        Refused: any refusal that `leaves` raises; with code UNSUPPORTED or AMBIGUOUS, if the adapter cannot be sent as
            the option `adapter` requires.
    """
    state_leaves = leaves(state, sharded=True, ranges=adapter is None)
    model = peft_model_of(state) if isinstance(state, nn.Module) else None
    if adapter is None or not state_leaves.tensors:
        return state_leaves
    if model is None:
        raise refuse("UNSUPPORTED", "adapter= is given, but the source is no model of peft", hint="Omit adapter=.")
    base = leaves_of_checkpoint(model, state_leaves, (), adapter=adapter == ALONE)
    if problems := [each for each in base.refusals if each not in state_leaves.refusals]:
        raise gathered(problems)
    if adapter == ALONE:
        return base
    trained = dict(_active_copies(model, base))
    with torch.no_grad():
        merged = dict(_merge_adapters(model, _Names(model, state_leaves, base), values=values))
    return replace(base, tensors={**base.tensors, **trained, **merged}, copies={})


def target_leaves(state: State, adapter: str | None) -> Leaves:
    """Return this rank's target tensors: all tensors, or only those of the active adapter if the engine receives an
    adapter.
    """
    state_leaves = leaves(state)
    model = peft_model_of(state) if adapter == ALONE and isinstance(state, nn.Module) else None
    return state_leaves if model is None else leaves_of_checkpoint(model, state_leaves, (), adapter=True)


def _active_copies(model: Any, base: Leaves) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the active copy, for each module that peft trains as a whole copy (`modules_to_save`).

    Raises:
        Refused: with code AMBIGUOUS, unless exactly one copy of each module is active.
    """
    for name, copies in base.copies.items():
        active = [copy for copy in copies if is_active(model, copy)]
        if len(active) != 1:
            raise gathered([Refusal("AMBIGUOUS", "several adapters have trained it", hint="Call set_adapter().")])
        yield name, active[0]


class _Names:
    """Names that weights under adapters have in the model without peft, and which of these weights are tied.

    Args:
        model: the peft model.
        state_leaves: all tensors of the peft model.
        base: name in the model without peft -> tensor of the base model.
    """

    def __init__(self, model: nn.Module, state_leaves: Leaves, base: Leaves) -> None:
        self._tensors = base.tensors
        self._plain = base_names(model, state_leaves.tensors)
        self._paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)
        self.tied: dict[int, set[str]] = {}
        """`id` of a tied tensor -> all its names."""
        for name, tensor in self._tensors.items():
            self.tied.setdefault(id(tensor), set()).add(name)
        self.tied = {key: names for key, names in self.tied.items() if len(names) > 1}

    def of(self, base: nn.Module) -> dict[str, list[str]]:
        """Return name of a parameter of an adapter's base layer -> its names in the model without peft."""
        base_parameters = {}
        for parameter_name, parameter in base.named_parameters(recurse=False):
            paths = (own_name(f"{path}.{parameter_name}") for path in self._paths[id(base)])
            names = (self._plain.get(path) for path in paths)
            base_parameters[parameter_name] = [
                name for name in names if name is not None and self._tensors.get(name) is parameter
            ]
        return base_parameters


def _merge_adapters(model: nn.Module, names: _Names, *, values: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each base weight, with the active adapter merged in.

    A tied weight may have adapters under several of its names. If a tied weight has several adapters, each name gets
    its own merged values, and the tie is kept if the values of all names are equal.

    Args:
        model: the peft model.
        names: names of the base weights in the model without peft.
        values: whether to merge every weight; if False, only tied weights are merged, because merged values decide
            which ties are kept.
    """
    by_base: dict[int, list[Any]] = {}
    for module in tuners(model):  # several tuners may wrap one module, each for a different parameter of the module
        by_base.setdefault(id(module.get_base_layer()), []).append(module)
    tied_results: dict[int, dict[str, torch.Tensor]] = {}
    for changing in by_base.values():
        parameters, plain = _parameters(changing[0]), names.of(changing[0].get_base_layer())
        tied = {parameter_name for parameter_name, parameter in parameters.items() if id(parameter) in names.tied}
        if not values and not tied:
            continue
        with _merge_temporarily(changing):
            for parameter_name, merged in _parameters(changing[0]).items():
                plain_names, result = plain[parameter_name], place_like(merged, local_of(merged).clone())
                if parameter_name in tied:
                    tied_results.setdefault(id(parameters[parameter_name]), {}).update(
                        dict.fromkeys(plain_names, result)
                    )
                else:
                    yield from ((name, result) for name in plain_names)
    for key, results in tied_results.items():
        first_result = next(iter(results.values()), None)
        stays_tied = results.keys() == names.tied[key] and all(
            _same_values(first_result, tensor) for tensor in results.values()
        )
        yield from (
            (name, first_result if stays_tied and first_result is not None else tensor)
            for name, tensor in results.items()
        )


@contextmanager
def _merge_temporarily(changing: Sequence[Any]) -> Iterator[None]:
    """Merge adapters into their module for the duration of the `with` block, then restore the module's parameters bit
    by bit.
    """
    saved = {name: local_of(parameter).clone() for name, parameter in _parameters(changing[0]).items()}
    started = list[Any]()
    try:
        for module in changing:
            started.append(module)
            module.merge()
        yield
    finally:
        for module in reversed(started):
            if module.merged:
                module.unmerge()
        for name, parameter in _parameters(changing[0]).items():
            local_of(parameter).copy_(saved[name])


def _parameters(module: Any) -> dict[str, torch.Tensor]:
    """Return name -> current parameter of an adapter's base layer; a merge may replace the parameters by new
    objects.
    """
    return dict(module.get_base_layer().named_parameters(recurse=False))


def _same_values(first: torch.Tensor | None, second: torch.Tensor) -> bool:
    return first is second or (first is not None and same_bytes(local_of(first), local_of(second)))
