"""Publishes a model: its quantized weights under the names and numbers that readers of a hub know.

In training a weight is codes, scales and, beside them, what the next step needs. A hub's readers want the first two in
a convention of theirs, with a config that says so, and nothing else: engines refuse names that they do not know. So
entries are renamed before anything is planned, the scales of whole matrices are restated
(`transaxle.encodings.conventions.convention`), and the rest is left out. No code and no block scale changes; where a
value would, nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from transaxle.encodings.conventions.buffer_group import group
from transaxle.encodings.conventions.convention import (
    COMPRESSED_TENSORS,
    CONVENTIONS,
    DEEPSEEK,
    TE,
    TRAINED,
    Convention,
    hub_buffers,
    hub_convention,
    hub_global_scales,
    training_only,
    unsaid,
)
from transaxle.encodings.conventions.quantization import read
from transaxle.encodings.conventions.rewriting import unquantized, written
from transaxle.encodings.encoding import FLOAT8, Encoded, Encoding, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.errors import Refusal, gathered
from transaxle.live.sharding.global_tensors import Census
from transaxle.live.transport import wire
from transaxle.live.transport.world import World
from transaxle.quant.entries import suffix_of, whole_shape
from transaxle.quant.quantized_tensor import QuantizedTensor
from transaxle.quant.quantizers import AMAX, SCALE
from transaxle.torch_tensors.local_tensor import local_of, placed_like
from transaxle.torch_tensors.placement import mark, part_of
from transaxle.torch_tensors.torch_arguments import code_of

_PLAIN = "BF16"
"""Type of the decoded values of a state dict's codes, which do not say it."""


@dataclass(frozen=True, slots=True)
class _Weight:
    """A quantized weight, as ranks tell each other of it."""

    tensor: Encoded
    """Its buffers."""
    dtype: str
    """Safetensors code of its values."""


wire.tellable(_Weight, Encoded, Encoding, Role)


@dataclass(frozen=True, slots=True)
class Published:
    """What is saved for a hub."""

    tensors: Mapping[str, torch.Tensor]
    """This rank's tensors."""
    everything: Census
    """The tensors of all ranks."""
    config: Mapping[str, Any] | None
    """The model's config, without a quantization section of another convention."""
    left: tuple[str, ...] = ()
    """Names of buffers that are left out."""


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
    encoded = group(everything).encoded
    trained = {name: _Weight(tensor, _PLAIN) for name, tensor in encoded.items() if tensor.convention in TRAINED}
    if not trained:
        return Published(tensors, everything, config)
    quantization = None if config is None else read(config)
    if quantization is not None:
        trained = {}
    own = {name: _weight(name, parameter) for name, parameter in weights.items()}
    trained |= {name: weight for of_rank in world.gather(own) for name, weight in of_rank.items()}
    if not trained:
        return Published(tensors, everything, config)
    to = hub_convention(weight.tensor.encoding for weight in trained.values())
    entries = _HubEntries(dict(tensors), to)
    with world.together():
        for weight in trained.values():
            entries.add(weight)
        if entries.problems:
            raise gathered(entries.problems)
    left = tuple(training_only(trained, everything))
    saved = {entries.names.get(name, name): tensor for name, tensor in everything.items() if name not in left}
    census = {name: replace(one, name=name, dtype=entries.dtypes.get(name, one.dtype)) for name, one in saved.items()}
    if config is not None and quantization is not None and to.name not in quantization.conventions:
        config = written(config, {}, {})
    own_tensors = {name: tensor for name, tensor in entries.tensors.items() if name not in left}
    return Published(own_tensors, census, config, left)


def as_trained(checkpoint: Checkpoint) -> Checkpoint:
    """Return what a hub has with the names that entries have in training, where these are all that differs.

    That is so for float8. The amax of nvfp4 does not follow from what stands for it.

    Args:
        checkpoint: under its stored names.
    """
    encoded = checkpoint.catalog.encoded.values()
    if not encoded or any((each.convention, each.encoding) != (COMPRESSED_TENSORS, FLOAT8) for each in encoded):
        return checkpoint
    trained, container = CONVENTIONS[DEEPSEEK], checkpoint.container
    names = {old: trained.stored(each.name, role, FLOAT8) for each in encoded for role, old in each.parts.items()}
    renamed = [msgspec.structs.replace(entry, name=names.get(old, old)) for old, entry in container.entries.items()]
    entries = {entry.name: entry for entry in renamed}
    settings = msgspec.structs.replace(checkpoint.settings, config=unquantized(checkpoint.config))
    return Checkpoint(msgspec.structs.replace(container, entries=entries), settings, None, None, checkpoint.undecoded)


class _HubEntries:
    """Collects what this rank's entries, and their names and types on all ranks, become for a hub."""

    def __init__(self, tensors: dict[str, torch.Tensor], to: Convention) -> None:
        self.tensors = tensors
        self.names: dict[str, str] = {}
        self.dtypes: dict[str, str] = {}
        self.problems: list[Refusal] = []
        self._to = to

    def add(self, weight: _Weight) -> None:
        """Rename and restate the buffers of one weight."""
        if (refusal := unsaid(weight.tensor)) is not None:
            self.problems.append(refusal)
            return
        for buffer in hub_buffers(weight.tensor, self._to):
            change: Callable[[torch.Tensor], torch.Tensor] | None = None
            if buffer.role is Role.GLOBAL:
                change = partial(self._restated, weight)
            elif buffer.role is Role.SCALE and buffer.dtype not in (None, weight.tensor.encoding.scale):
                change = _octets
                self.dtypes[buffer.name] = str(buffer.dtype)
            tensor = self.tensors.pop(buffer.stored, None)
            if tensor is not None:
                self.tensors[buffer.name] = tensor if change is None else _changed(tensor, change)
            self.names[buffer.stored] = buffer.name

    def _restated(self, weight: _Weight, amax: torch.Tensor) -> torch.Tensor:
        scales, refusal = hub_global_scales(weight.tensor, amax.detach().cpu().numpy(), self._to, weight.dtype)
        self.problems += [refusal] if refusal is not None else []
        return torch.from_numpy(np.ascontiguousarray(scales)).to(amax.device)


def _weight(name: str, parameter: torch.Tensor) -> _Weight:
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
