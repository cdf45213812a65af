"""Quantized weights of a live model: filled from codes or values, and published as readers of a hub know them.

Quantized parameters in a load: a source that has their codes fills these; of one that has values, they are made.

A weight is filled as it is where the source has each of its entries in the same type and shape. Where the source has
plain values, or decodes them, the values are read as if the parameter were plain, into memory of their own, and
quantized once, with amaxes reduced over the ranks that share it. Codes of another encoding are values only to those who
say `decode=`.

**Publishes a model**: its quantized weights under the names and numbers that readers of a hub know.

In training a weight is codes, scales and, beside them, what the next step needs. A hub's readers want the first two in
a convention of theirs, with a config that says so, and nothing else: engines refuse names that they do not know. So
entries are renamed before anything is planned, the scales of whole matrices are restated
(`transaxle.encodings.conventions.convention`), and the rest is left out. No code and no block scale changes; where a
value would, nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
from transaxle.encodings.encoding import FLOAT8, NVFP4, WHOLE, Encoded, Encoding, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.errors import Refusal, TransaxleError, Where, gathered
from transaxle.live.global_tensors import Census
from transaxle.live.model.destination import Conversion, decode_hint, decoded, is_plain
from transaxle.live.model.source_view import View, view
from transaxle.live.transport import wire
from transaxle.live.transport.world import World
from transaxle.quant.entries import STATE_SUFFIXES, is_state, layout_of, suffix_of, whole_shape
from transaxle.quant.quantizers import AMAX, SCALE
from transaxle.quant.tensor import QuantizedTensor
from transaxle.torch_tensors import code_of, local_of, mark, part_of, place_like, torch_dtype

_PLAIN = "BF16"
"""Type of the decoded values of a state dict's codes, which do not say it."""


@dataclass(frozen=True, slots=True)
class _EncodedWeight:
    """A quantized weight, as ranks tell each other of it."""

    tensor: Encoded
    """Its buffers."""
    dtype: str
    """Safetensors code of its values."""


wire.tellable(_EncodedWeight, Encoded, Encoding, Role)


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
    trained = {name: _EncodedWeight(tensor, _PLAIN) for name, tensor in encoded.items() if tensor.convention in TRAINED}
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

    def add(self, weight: _EncodedWeight) -> None:
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

    def _restated(self, weight: _EncodedWeight, amax: torch.Tensor) -> torch.Tensor:
        scales, refusal = hub_global_scales(weight.tensor, amax.detach().cpu().numpy(), self._to, weight.dtype)
        self.problems += [refusal] if refusal is not None else []
        return torch.from_numpy(np.ascontiguousarray(scales)).to(amax.device)


def _weight(name: str, parameter: torch.Tensor) -> _EncodedWeight:
    inner = local_of(parameter)
    assert isinstance(inner, QuantizedTensor)
    quantizer = inner.quantizer
    encoding = quantizer.encoding
    parts = {Role.CODES: name, Role.SCALE: name + suffix_of(SCALE, quantizer)}
    if encoding.has_global:
        parts[Role.GLOBAL] = name + suffix_of(AMAX, quantizer)
    return _EncodedWeight(Encoded(name, encoding, whole_shape(parameter), parts, TE), code_of(parameter.dtype))


def _octets(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8)


def _changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return what this rank has of a tensor changed number by number; it lies as before."""
    return mark(place_like(tensor, change(local_of(tensor))), part_of(tensor))


_HALF = "the source has other codes or scales of its weight, which mean nothing without it"
_WHOLE_WEIGHT = "Copy the tensor into the source, or leave out all of the weight's."


@dataclass(frozen=True, slots=True)
class _TypedWeight:
    """A quantized parameter, as ranks tell each other of it."""

    encoding: Encoding
    """Of its codes."""
    quantizer: str
    """What makes them, in words."""
    dtype: str
    """Safetensors code of its values."""
    shape: tuple[int, ...]
    """Of the whole, in values."""
    entries: Mapping[str, tuple[str, tuple[int, ...]]]
    """Safetensors code and whole shape of codes and scales, by full name."""
    state: tuple[str, ...]
    """Full names of what else it keeps."""

    def fits(self, stored: Mapping[str, StoredTensor]) -> bool:
        """Whether a source has its codes and scales as they are here."""
        found = ((stored.get(name), wanted) for name, wanted in self.entries.items())
        return all(one is not None and (one.dtype, one.shape) == wanted for one, wanted in found)


wire.tellable(_TypedWeight, Encoding)


@dataclass(frozen=True, slots=True)
class Sorted:
    """Which quantized parameters a source fills in which way; the same on all ranks."""

    anew: Mapping[str, str]
    """Those that are quantized, and the safetensors code of the values that the source has."""
    begins: tuple[str, ...]
    """Those whose codes the source has without what the next values are scaled by: that begins anew."""
    gone: frozenset[str]
    """Names of entries that nothing is read into, and those of the source that say why: of refused weights."""
    problems: list[Refusal]
    """Those that cannot be filled."""


class Weights:
    """The quantized parameters of all ranks; collective to make.

    Args:
        own: this rank's, by name.
        world: the ranks.
    """

    def __init__(self, own: Mapping[str, torch.Tensor], world: World) -> None:
        mine = {name: _told(name, parameter) for name, parameter in own.items()}
        self._all: dict[str, _TypedWeight] = {name: one for each in world.gather(mine) for name, one in each.items()}

    @property
    def beside(self) -> frozenset[str]:
        """Names of entries that are not the weights' own: they say nothing of the dialect."""
        return frozenset(
            name for weight, one in self._all.items() for name in (*one.entries, *one.state) if name != weight
        )

    @property
    def names(self) -> frozenset[str]:
        """Names of all their entries."""
        return frozenset(name for one in self._all.values() for name in (*one.entries, *one.state))

    @property
    def _numbers(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the scales of whole matrices, by full name."""
        whole = ((weight, one) for weight, one in self._all.items() if one.encoding.name == FLOAT8.name)
        return {name: shape for weight, one in whole for name, (_, shape) in one.entries.items() if name != weight}

    def value_type(self, name: str) -> str | None:
        """Return the safetensors code of a parameter's values; None for a name that is no quantized parameter."""
        one = self._all.get(name)
        return None if one is None else one.dtype

    def seen(
        self,
        checkpoint: Checkpoint,
        names: Census,
        family: str | None,
        dialect: str | None,
        decode: str | None,
        *,
        partial: bool,
        trained: Collection[str] | None = None,
    ) -> View:
        """Return a source in the model's dialect, decoded but for what fills quantized parameters as it is.

        Args:
            checkpoint: under its stored names.
            names: the model's tensors.
            family: what the user says the model is.
            dialect: what the user says its names are.
            decode: what the user allows.
            partial: leave out what the source does not hold all of.
            trained: see `view`.

        Raises:
            TransaxleError: see `view`.
        """
        if self._all:
            checkpoint = as_trained(checkpoint)
        wanted, beside = {name: tensor.shape for name, tensor in names.items()}, self.beside

        def read(source: Checkpoint) -> View:
            found = view(source, wanted, family, dialect, beside, partial=partial, trained=trained)
            return replace(found, numbers=self._numbers)

        keep: set[str] = set()
        if decode is not None and self._all:
            try:
                raw = read(checkpoint)
            except TransaxleError:
                pass  # as codes it cannot be had in this dialect at all
            else:
                stored = raw.tensors()
                unproven = {raw.named(check.first.name) for check in raw.checkpoint.checks}  # scales that may differ
                fits = [
                    name for name, one in self._all.items() if one.fits(stored) and unproven.isdisjoint(one.entries)
                ]
                origins = {origin for name in fits for origin in stored[name].origins}
                keep = origins & checkpoint.catalog.encoded.keys()
        if decode is not None:
            checkpoint = decoded(checkpoint, decode, keep)
        return read(checkpoint)

    def sorted(self, seen: View, stored: Mapping[str, StoredTensor]) -> Sorted:
        """Find out how a source fills them.

        Args:
            seen: the source.
            stored: its tensors by the model's names.
        """
        encoded = seen.checkpoint.stored.catalog.encoded
        anew: dict[str, str] = {}
        gone: set[str] = set()
        begins: list[str] = []
        problems = []
        for name, one in self._all.items():
            source = stored.get(name)
            if one.fits(stored):
                kept = {full for suffix in STATE_SUFFIXES if (full := name + suffix) in stored}
                gone |= kept.difference(one.state)  # of a scaling that needs none
                if one.state and not kept:
                    begins.append(name)
                    gone.update(one.state)
                continue
            if source is not None and is_plain(source.dtype):
                if source.shape == one.shape:
                    anew[name] = source.dtype
                    gone.update(name + suffix for suffix in STATE_SUFFIXES)  # of the scaling that the source had
                else:
                    message = f"its shape is {list(one.shape)} in the model, but {list(source.shape)} in the source"
                    problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name)))
            else:
                codes = source or stored.get(CONVENTIONS[COMPRESSED_TENSORS].stored(name, Role.CODES, NVFP4))
                origins = (name,) if codes is None else codes.origins
                other = next((encoded[origin] for origin in origins if origin in encoded), None)
                lacking = [full for full in one.entries if full not in stored]
                if other is None and (not lacking or len(lacking) == len(one.entries)):
                    continue  # what is missing, or of another type, is told entry by entry
                if other is None:
                    problems += [Refusal("MISSING_TENSOR", _HALF, Where(None, full), _WHOLE_WEIGHT) for full in lacking]
                else:
                    problems.append(_another(name, one, other))
                gone.update(full for full in stored if full.startswith(f"{name}_"))
            gone.update((*one.entries, *one.state))
        return Sorted(anew, tuple(begins), frozenset(gone), problems)

    def conversions(self, anew: Mapping[str, str], seen: View, stored: Mapping[str, StoredTensor]) -> list[Conversion]:
        """Return what is quantized, for the report."""
        held = seen.checkpoint.decoded
        found = []
        for name, code in anew.items():
            codes = next((held[origin] for origin in stored[name].origins if origin in held), None)
            was = code if codes is None else codes.encoding.name
            found.append(Conversion(name, was, self._all[name].encoding.name, None))
        return found


def stand_in(parameter: torch.Tensor, code: str, *, meta: bool) -> torch.Tensor:
    """Return an empty plain tensor of a quantized parameter's shape and placements.

    Args:
        parameter: a QuantizedTensor, or a DTensor of one.
        code: safetensors code of the values that come.
        meta: without memory.
    """
    inner = local_of(parameter)
    values = torch.empty(inner.shape, dtype=torch_dtype(code), device="meta" if meta else inner.device)
    return mark(place_like(parameter, values), part_of(parameter))


def _told(name: str, parameter: torch.Tensor) -> _TypedWeight:
    inner = local_of(parameter)
    assert isinstance(inner, QuantizedTensor)
    layout = {name + suffix: (suffix, code_of(dtype), shape) for suffix, (dtype, shape) in layout_of(parameter).items()}
    return _TypedWeight(
        inner.quantizer.encoding,
        repr(inner.quantizer),
        code_of(parameter.dtype),
        whole_shape(parameter),
        {full: (code, shape) for full, (suffix, code, shape) in layout.items() if not is_state(suffix)},
        tuple(full for full, (suffix, _, _) in layout.items() if is_state(suffix)),
    )


def _another(name: str, one: _TypedWeight, other: Encoded) -> Refusal:
    message = f"the model has {_words(one.encoding)} ({one.quantizer}), but the source has {_words(other.encoding)}"
    if other.encoding == one.encoding:
        message += f" in the names of {other.convention}"
    hint = f"{decode_hint('F8_E4M3', one.dtype)} The parameter then quantizes the values again."
    return Refusal("DTYPE_MISMATCH", message, Where(None, name), hint)


def _words(encoding: Encoding) -> str:
    tile = " x ".join("all" if size == WHOLE else str(size) for size in encoding.tile)
    reach = f", scales up to {encoding.scale_max}" if encoding.has_global else ""
    return f"{encoding.name} of {encoding.code} in tiles of {tile}{reach}"
