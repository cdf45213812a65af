"""Publishing: quantized weights under the names and numbers by which readers of a hub know them.

In training a weight is codes, scales and, beside them, what the next step needs. A hub's readers want the first two in
a convention of theirs, with a config that says so, and nothing else: engines refuse names that they do not know. So
before anything is planned, entries are renamed, the numbers of whole tensors restated, and the rest stays behind. No
code and no block scale changes; where a value would, nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from transaxle.encodings.conventions.buffer_group import group
from transaxle.encodings.conventions.convention import COMPRESSED_TENSORS, CONVENTIONS, DEEPSEEK, TE, Convention
from transaxle.encodings.conventions.quantization import read
from transaxle.encodings.conventions.restated import ASIDE, TRAINED, hub_convention, inexact, restated, unsaid
from transaxle.encodings.conventions.rewriting import written
from transaxle.encodings.encoding import FLOAT8, Encoded, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.errors import Refusal, gathered
from transaxle.live.sharding.global_tensors import Census
from transaxle.live.transport.world import World
from transaxle.quant.frame.buffers import AMAX, SCALE
from transaxle.quant.modules.entries import suffix_of, whole_shape
from transaxle.quant.tensor.tensor import QuantizedTensor
from transaxle.torch_tensors.local_tensor import local_of, placed_like
from transaxle.torch_tensors.torch_dtype import code_of
from transaxle.torch_tensors.tp_shard import mark, part_of

_PLAIN = "BF16"
"""Type of the values of a state dict's codes, which do not say it."""


@dataclass(frozen=True, slots=True)
class _Weight:
    """A quantized weight, as ranks tell each other of it."""

    tensor: Encoded
    """Its buffers."""
    dtype: str
    """Safetensors code of its values."""


@dataclass(frozen=True, slots=True)
class Published:
    """What is saved for a hub."""

    tensors: Mapping[str, torch.Tensor]
    """This rank's."""
    everything: Census
    """Those of all ranks."""
    config: Mapping[str, Any] | None
    """The model's, without what was said of weights in another convention."""
    left: tuple[str, ...] = ()
    """Names of what stays behind."""


def published(
    tensors: Mapping[str, torch.Tensor],
    everything: Census,
    weights: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None,
    world: World,
) -> Published:
    """Express the quantized weights of all ranks as a hub has them; collective where there are any.

    Args:
        tensors: this rank's, by name; codes and scales are entries of their own.
        everything: those of all ranks.
        weights: this rank's quantized parameters; none in a state dict, whose entries tell what they are.
        config: the model's: where it says how weights are stored, entries that are no parameters are as it says.
        world: the ranks.

    Raises:
        TransaxleError: UNSUPPORTED, on every rank, for weights that no convention of a hub can express.
    """
    guessed = group(everything).encoded
    found = {name: _Weight(one, _PLAIN) for name, one in guessed.items() if one.convention in TRAINED}
    if not found:
        return Published(tensors, everything, config)
    said = None if config is None else read(config)
    if said is not None:
        found = {}
    own = {name: _told(name, parameter) for name, parameter in weights.items()}
    found |= {name: one for each in world.gather(own) for name, one in each.items()}
    if not found:
        return Published(tensors, everything, config)
    to = hub_convention(one.tensor.encoding for one in found.values())
    made = _Made(dict(tensors), to)
    with world.together():
        for name, one in found.items():
            made.add(name, one)
        if made.problems:
            raise gathered(made.problems)
    left = tuple(full for name in found for end in ASIDE if (full := f"{name}_{end}") in everything)
    held = {made.names.get(name, name): one for name, one in everything.items() if name not in left}
    census = {name: replace(one, name=name, dtype=made.dtypes.get(name, one.dtype)) for name, one in held.items()}
    if config is not None and said is not None and to.name not in said.conventions:
        config = written(config, {}, {})
    return Published({name: one for name, one in made.tensors.items() if name not in left}, census, config, left)


def as_trained(checkpoint: Checkpoint) -> Checkpoint:
    """Return what a hub has with the names that entries have in training, where these are all that differs.

    That is so for float8. The amax of nvfp4 does not follow from what stands for it.

    Args:
        checkpoint: under its stored names.
    """
    encoded = checkpoint.catalog.encoded.values()
    if not encoded or any((one.convention, one.encoding) != (COMPRESSED_TENSORS, FLOAT8) for one in encoded):
        return checkpoint
    own, container = CONVENTIONS[DEEPSEEK], checkpoint.container
    names = {old: own.stored(one.name, role, FLOAT8) for one in encoded for role, old in one.parts.items()}
    renamed = {new: replace(one, name=new) for old, one in container.entries.items() for new in [names.get(old, old)]}
    said = replace(checkpoint.settings, config=written(checkpoint.config, {}, {}))
    return Checkpoint(replace(container, entries=renamed), said, None, None, checkpoint.undecoded)


class _Made:
    """Collects what entries become."""

    def __init__(self, tensors: dict[str, torch.Tensor], to: Convention) -> None:
        self.tensors = tensors
        self.to = to
        self.names: dict[str, str] = {}
        self.dtypes: dict[str, str] = {}
        self.problems: list[Refusal] = []

    def add(self, name: str, one: _Weight) -> None:
        """Take in one weight."""
        encoding = one.tensor.encoding
        if (refusal := unsaid(one.tensor)) is not None:
            self.problems.append(refusal)
            return
        for role, old in one.tensor.parts.items():
            new = self.to.stored(name, role, encoding)
            own = self.to.presented(encoding, one.tensor.shape, role)[0]
            change: Callable[[torch.Tensor], torch.Tensor] | None = None
            if role is Role.GLOBAL:
                change = self._global(one)
            elif role is Role.SCALE and encoding.scale != own:
                change = _octets
                self.dtypes[new] = own
            held = self.tensors.pop(old, None)
            if held is not None:
                self.tensors[new] = held if change is None else _changed(held, change)
            self.names[old] = new

    def _global(self, one: _Weight) -> Callable[[torch.Tensor], torch.Tensor]:
        def change(amax: torch.Tensor) -> torch.Tensor:
            amaxes = amax.detach().cpu().numpy()
            numbers, same = restated(amaxes, one.tensor.encoding, self.to, one.dtype)
            if not same.all():
                self.problems.append(inexact(one.tensor, float(amaxes[~same][0]), self.to, one.dtype))
            return torch.from_numpy(np.ascontiguousarray(numbers)).to(amax.device)

        return change


def _told(name: str, parameter: torch.Tensor) -> _Weight:
    inner = local_of(parameter)
    assert isinstance(inner, QuantizedTensor)
    quantizer = inner.quantizer
    encoding = quantizer.encoding
    parts = {Role.CODES: name, Role.SCALE: name + suffix_of(SCALE, quantizer)}
    if encoding.has_global:
        parts[Role.GLOBAL] = name + suffix_of(AMAX, quantizer)
    return _Weight(Encoded(name, encoding, whole_shape(parameter), parts, TE), code_of(parameter.dtype))


def _octets(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8)


def _changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return what this rank has of a tensor changed number by number; it lies as before."""
    return mark(placed_like(tensor, change(local_of(tensor))), part_of(tensor))
