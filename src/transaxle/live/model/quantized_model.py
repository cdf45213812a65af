"""Quantized weights of a live model: loaded from codes or values, and saved in a convention that programs which load
from a hub know.

**Loading**: a quantized parameter is either filled with the source's codes, or quantized from the source's values.

If the source contains codes and scales with the parameter's dtypes and shapes, they are copied. If the source contains
plain or decoded values, they are read into separate memory, as for a plain parameter, and are quantized once. The amax
of a weight is then reduced over the ranks that share the weight. Codes of a different encoding are decoded to values
only if the argument `decode` is given.

**Saving for a hub**: in training, a weight consists of codes, scales and state for the next training step. Programs
that load from a hub need codes and scales in a convention that they know and that the config declares. These programs
accept no additional tensors, because inference engines refuse unknown names. So before it plans, a save renames the
entries, converts the scales of whole matrices (`transaxle.encodings.conventions.convention`), and omits the training
state. Codes and block scales are never changed; if a value would change, the save is refused.
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
    refusal_for_hub,
    training_only,
)
from transaxle.encodings.conventions.quantization import read
from transaxle.encodings.conventions.rewriting import rewrite_config, without_quantization
from transaxle.encodings.encoding import FLOAT8, NVFP4, WHOLE, EncodedTensor, Encoding, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.errors import Refusal, TransaxleError, Where, gathered
from transaxle.live.global_tensors import Census
from transaxle.live.model.destination import Conversion, decode_hint, decode_tensors, is_plain
from transaxle.live.model.source_view import View, view
from transaxle.live.transport import wire
from transaxle.live.transport.world import World
from transaxle.quant.entries import STATE_SUFFIXES, is_state, layout_of, suffix_of, whole_shape
from transaxle.quant.quantizers import AMAX, SCALE
from transaxle.quant.tensor import QuantizedTensor
from transaxle.torch_tensors import code_of, local_of, mark, part_of, place_like, torch_dtype

_PLAIN = "BF16"
"""Assumed dtype of decoded values for codes in a state dict, which does not record this dtype."""


@dataclass(frozen=True, slots=True)
class _EncodedWeight:
    """Description of a quantized weight, which the ranks exchange before a save."""

    tensor: EncodedTensor
    """The encoded tensor, with the names of its codes and scales."""
    dtype: str
    """Safetensors code of the dtype of the decoded values."""


wire.tellable(_EncodedWeight)


@dataclass(frozen=True, slots=True)
class HubTensors:
    """Tensors and config of a model in a quantization convention for hubs."""

    tensors: Mapping[str, torch.Tensor]
    """Name -> tensor, for this rank's tensors."""
    global_tensors: Census
    """The tensors of all ranks, with the shard that each rank holds."""
    config: Mapping[str, Any] | None
    """The model's config, without its quantization section if that describes a different convention."""
    left_out: tuple[str, ...] = ()
    """Names of buffers that are not saved, because programs that load from a hub do not know them."""


def to_hub_convention(
    tensors: Mapping[str, torch.Tensor],
    global_tensors: Census,
    weights: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None,
    world: World,
) -> HubTensors:
    """Convert the quantized weights of all ranks to the convention in which model hubs store them. All ranks must call
    this if any rank has quantized weights.

    Args:
        tensors: name -> tensor, for this rank's tensors; codes and scales are separate entries.
        global_tensors: the tensors of all ranks, with the shard that each rank holds.
        weights: name -> quantized parameter of this rank; empty for a state dict, whose entry names show the encoding.
        config: the model's config; if it declares a quantization, tensors that are not parameters are converted as it
            declares.
        world: all ranks that take part.

    Raises:
        TransaxleError: raised on every rank with code UNSUPPORTED, if no convention for hubs can express the weights.
    """
    encoded = group(global_tensors).encoded
    trained = {name: _EncodedWeight(tensor, _PLAIN) for name, tensor in encoded.items() if tensor.convention in TRAINED}
    if not trained:
        return HubTensors(tensors, global_tensors, config)
    quantization = None if config is None else read(config)
    if quantization is not None:
        trained = {}
    own_weights = {name: _weight(name, parameter) for name, parameter in weights.items()}
    trained |= {name: weight for of_rank in world.gather(own_weights) for name, weight in of_rank.items()}
    if not trained:
        return HubTensors(tensors, global_tensors, config)
    to = hub_convention(weight.tensor.encoding for weight in trained.values())
    entries = _HubEntries(dict(tensors), to)
    with world.together():
        for weight in trained.values():
            entries.add(weight)
        if entries.problems:
            raise gathered(entries.problems)
    left_out = tuple(training_only(trained, global_tensors))
    kept_tensors = {
        entries.names.get(name, name): tensor for name, tensor in global_tensors.items() if name not in left_out
    }
    census = {
        name: replace(hub_tensor, name=name, dtype=entries.dtypes.get(name, hub_tensor.dtype))
        for name, hub_tensor in kept_tensors.items()
    }
    if config is not None and quantization is not None and to.name not in quantization.conventions:
        config = rewrite_config(config, {}, {})
    own_tensors = {name: tensor for name, tensor in entries.tensors.items() if name not in left_out}
    return HubTensors(own_tensors, census, config, left_out)


def as_trained(checkpoint: Checkpoint) -> Checkpoint:
    """Rename the entries of a checkpoint from a hub to the names used in training, if only the names differ.

    For float8, only the names differ. For nvfp4, also the amax differs, and it cannot be computed from the global scale
    in hub files.

    Args:
        checkpoint: the checkpoint under its stored names.
    """
    encoded = checkpoint.catalog.encoded.values()
    if not encoded or any((each.convention, each.encoding) != (COMPRESSED_TENSORS, FLOAT8) for each in encoded):
        return checkpoint
    trained, container = CONVENTIONS[DEEPSEEK], checkpoint.container
    names = {old: trained.stored(each.name, role, FLOAT8) for each in encoded for role, old in each.parts.items()}
    renamed = [msgspec.structs.replace(entry, name=names.get(old, old)) for old, entry in container.entries.items()]
    entries = {entry.name: entry for entry in renamed}
    settings = msgspec.structs.replace(checkpoint.settings, config=without_quantization(checkpoint.config))
    return Checkpoint(msgspec.structs.replace(container, entries=entries), settings, None, None, checkpoint.undecoded)


_CAST = "To keep the codes and lose precision, use model.bfloat16(). "


class _HubEntries:
    """Collects this rank's entries for a hub, and the new names and dtypes of the entries on all ranks."""

    def __init__(self, tensors: dict[str, torch.Tensor], to: Convention) -> None:
        self.tensors = tensors
        self.names: dict[str, str] = {}
        self.dtypes: dict[str, str] = {}
        self.problems: list[Refusal] = []
        self._to = to

    def add(self, weight: _EncodedWeight) -> None:
        """Rename and convert the codes and scales of one weight."""
        if (refusal := refusal_for_hub(weight.tensor)) is not None:
            self.problems.append(refusal)
            return
        for buffer in hub_buffers(weight.tensor, self._to):
            change: Callable[[torch.Tensor], torch.Tensor] | None = None
            if buffer.role is Role.GLOBAL:
                change = partial(self._convert_global, weight)
            elif buffer.role is Role.SCALE and buffer.dtype not in (None, weight.tensor.encoding.scale):
                change = _octets
                self.dtypes[buffer.name] = str(buffer.dtype)
            tensor = self.tensors.pop(buffer.stored, None)
            if tensor is not None:
                self.tensors[buffer.name] = tensor if change is None else _map_local(tensor, change)
            self.names[buffer.stored] = buffer.name

    def _convert_global(self, weight: _EncodedWeight, amax: torch.Tensor) -> torch.Tensor:
        scales, refusal = hub_global_scales(weight.tensor, amax.detach().cpu().numpy(), self._to, weight.dtype)
        if refusal is not None:
            hint = f"{_CAST}{refusal.hint}" if weight.dtype == "F32" else refusal.hint
            self.problems.append(replace(refusal, hint=hint))
        return torch.from_numpy(np.ascontiguousarray(scales)).to(amax.device)


def _weight(name: str, parameter: torch.Tensor) -> _EncodedWeight:
    inner = local_of(parameter)
    assert isinstance(inner, QuantizedTensor)
    quantizer = inner.quantizer
    encoding = quantizer.encoding
    parts = {Role.CODES: name, Role.SCALE: name + suffix_of(SCALE, quantizer)}
    if encoding.has_global:
        parts[Role.GLOBAL] = name + suffix_of(AMAX, quantizer)
    return _EncodedWeight(EncodedTensor(name, encoding, whole_shape(parameter), parts, TE), code_of(parameter.dtype))


def _octets(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8)


def _map_local(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply an elementwise function to this rank's shard of a tensor, and keep the tensor's placement."""
    return mark(place_like(tensor, change(local_of(tensor))), part_of(tensor))


_HALF = "the source has other codes or scales of its weight, which mean nothing without it"
_WHOLE_WEIGHT = "Copy the tensor into the source, or leave out all tensors of the weight."


@dataclass(frozen=True, slots=True)
class _TypedWeight:
    """Description of a quantized parameter, which the ranks exchange before a load."""

    encoding: Encoding
    """Encoding of the parameter's codes."""
    quantizer: str
    """Description of the parameter's quantizer, for use in messages."""
    dtype: str
    """Safetensors code of the dtype of the decoded values."""
    shape: tuple[int, ...]
    """Shape of the whole decoded tensor."""
    entries: Mapping[str, tuple[str, tuple[int, ...]]]
    """Full name of codes or scales -> (safetensors code, shape of the whole tensor)."""
    state: tuple[str, ...]
    """Full names of the parameter's other buffers, such as a scaling history."""

    def fits(self, stored: Mapping[str, StoredTensor]) -> bool:
        """Return whether a source contains the parameter's codes and scales, with the same dtypes and shapes."""
        pairs = ((stored.get(name), expected) for name, expected in self.entries.items())
        return all(
            stored_tensor is not None and (stored_tensor.dtype, stored_tensor.shape) == expected
            for stored_tensor, expected in pairs
        )


wire.tellable(_TypedWeight)


@dataclass(frozen=True, slots=True)
class FillModes:
    """How a source fills each quantized parameter: with copied codes, or with values to quantize. The object is equal
    on all ranks.
    """

    anew: Mapping[str, str]
    """Name of a parameter to be quantized -> safetensors code of the source's values."""
    begins: tuple[str, ...]
    """Names of parameters whose codes the source has without their scaling history; a new history is begun for them."""
    gone: frozenset[str]
    """Names of entries that are not read, and source names that `match_tensors` need not report, because their weight
    is refused.
    """
    problems: list[Refusal]
    """A refusal for each parameter that the source cannot fill."""


class Weights:
    """The quantized parameters of all ranks; all ranks must create this object together.

    Args:
        parameters: name -> quantized parameter of this rank.
        world: all ranks that take part.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], world: World) -> None:
        descriptions = {name: _describe(name, parameter) for name, parameter in parameters.items()}
        self._all: dict[str, _TypedWeight] = {
            name: weight for each in world.gather(descriptions) for name, weight in each.items()
        }

    @property
    def beside(self) -> frozenset[str]:
        """Names of scales and other buffers, from which the dialect cannot be recognised."""
        return frozenset(
            name for weight, typed in self._all.items() for name in (*typed.entries, *typed.state) if name != weight
        )

    @property
    def names(self) -> frozenset[str]:
        """Names of all codes, scales and other buffers of the quantized parameters."""
        return frozenset(name for weight in self._all.values() for name in (*weight.entries, *weight.state))

    @property
    def _numbers(self) -> dict[str, tuple[int, ...]]:
        """Full name -> shape, for scales with one number per matrix."""
        whole = ((weight, typed) for weight, typed in self._all.items() if typed.encoding.name == FLOAT8.name)
        return {name: shape for weight, typed in whole for name, (_, shape) in typed.entries.items() if name != weight}

    def value_type(self, name: str) -> str | None:
        """Return the safetensors code of a parameter's decoded values; None if the parameter is not quantized."""
        weight = self._all.get(name)
        return None if weight is None else weight.dtype

    def view_source(
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
        """Return a source translated into the model's dialect, and decoded except for codes that fill quantized
        parameters.

        Args:
            checkpoint: the source checkpoint under its stored names.
            names: name -> shape, for the model's tensors.
            family: the family that the user gave; None means that it is recognised.
            dialect: the dialect of the model's names that the user gave; None means that it is recognised.
            decode: dtype to which encoded tensors may be decoded, as for `load`.
            partial: whether to omit tensors of which the source has only some pieces.
            trained: parameters with optimizer state that are not in `names`; None means that they are unknown (see
                `source_view.view`).

        Raises:
            TransaxleError: any error that `source_view.view` raises.
        """
        if self._all:
            checkpoint = as_trained(checkpoint)
        shapes, other_entries = {name: tensor.shape for name, tensor in names.items()}, self.beside

        def read(source: Checkpoint) -> View:
            source_view = view(source, shapes, family, dialect, other_entries, partial=partial, trained=trained)
            return replace(source_view, numbers=self._numbers)

        keep: set[str] = set()
        if decode is not None and self._all:
            try:
                raw = read(checkpoint)
            except TransaxleError:
                pass  # the source's codes cannot be read under the model's names, so all weights are decoded
            else:
                stored = raw.tensors()
                # names of tensors that the source stores twice, perhaps with unequal values
                unproven = {raw.model_name(check.first.name) for check in raw.checkpoint.checks}
                fits = [
                    name
                    for name, typed in self._all.items()
                    if typed.fits(stored) and unproven.isdisjoint(typed.entries)
                ]
                origins = {origin for name in fits for origin in stored[name].origins}
                keep = origins & checkpoint.catalog.encoded.keys()
        if decode is not None:
            checkpoint = decode_tensors(checkpoint, decode, keep)
        return read(checkpoint)

    def choose_modes(self, source_view: View, stored: Mapping[str, StoredTensor]) -> FillModes:
        """Decide how a source fills each quantized parameter.

        Args:
            source_view: the source translated into the model's dialect.
            stored: the model's tensor name -> tensor of the source.
        """
        encoded = source_view.checkpoint.stored.catalog.encoded
        anew: dict[str, str] = {}
        gone: set[str] = set()
        begins: list[str] = []
        problems = []
        for name, weight in self._all.items():
            source = stored.get(name)
            if weight.fits(stored):
                stored_state = {full for suffix in STATE_SUFFIXES if (full := name + suffix) in stored}
                # State that the weight's quantization recipe does not use is ignored.
                gone |= stored_state.difference(weight.state)
                if weight.state and not stored_state:
                    begins.append(name)
                    gone.update(weight.state)
                continue
            if source is not None and is_plain(source.dtype):
                if source.shape == weight.shape:
                    anew[name] = source.dtype
                    # The scaling state in the source belongs to the source's codes, but the new codes differ from
                    # these.
                    gone.update(name + suffix for suffix in STATE_SUFFIXES)
                else:
                    message = f"its shape is {list(weight.shape)} in the model, but {list(source.shape)} in the source"
                    problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name)))
            else:
                codes = source or stored.get(CONVENTIONS[COMPRESSED_TENSORS].stored(name, Role.CODES, NVFP4))
                origins = (name,) if codes is None else codes.origins
                stored_encoding = next((encoded[origin] for origin in origins if origin in encoded), None)
                lacking = [full for full in weight.entries if full not in stored]
                if stored_encoding is None and (not lacking or len(lacking) == len(weight.entries)):
                    continue  # `match_tensors` reports each missing codes or scales entry of the weight
                if stored_encoding is None:
                    problems += [Refusal("MISSING_TENSOR", _HALF, Where(None, full), _WHOLE_WEIGHT) for full in lacking]
                else:
                    problems.append(_refuse_other_encoding(name, weight, stored_encoding))
                gone.update(full for full in stored if full.startswith(f"{name}_"))
            gone.update((*weight.entries, *weight.state))
        return FillModes(anew, tuple(begins), frozenset(gone), problems)

    def conversions(
        self, anew: Mapping[str, str], source_view: View, stored: Mapping[str, StoredTensor]
    ) -> list[Conversion]:
        """Return a conversion for each parameter that is quantized during the load."""
        encoded_origins = source_view.checkpoint.decoded
        conversions = []
        for name, code in anew.items():
            codes = next(
                (encoded_origins[origin] for origin in stored[name].origins if origin in encoded_origins), None
            )
            stored_as = code if codes is None else codes.encoding.name
            conversions.append(Conversion(name, stored_as, self._all[name].encoding.name, None))
        return conversions


def stand_in(parameter: torch.Tensor, code: str, *, meta: bool) -> torch.Tensor:
    """Return an empty plain tensor with a quantized parameter's shape and placements.

    Args:
        parameter: a QuantizedTensor, or a DTensor that consists of QuantizedTensors.
        code: safetensors code of the values to load.
        meta: whether to create the tensor on the meta device.
    """
    inner = local_of(parameter)
    values = torch.empty(inner.shape, dtype=torch_dtype(code), device="meta" if meta else inner.device)
    return mark(place_like(parameter, values), part_of(parameter))


def _describe(name: str, parameter: torch.Tensor) -> _TypedWeight:
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


def _refuse_other_encoding(name: str, weight: _TypedWeight, stored: EncodedTensor) -> Refusal:
    message = (
        f"the model has {_words(weight.encoding)} ({weight.quantizer}), but the source has {_words(stored.encoding)}"
    )
    if stored.encoding == weight.encoding:
        message += f" in the names of {stored.convention}"
    hint = f"{decode_hint('F8_E4M3', weight.dtype)} The parameter then quantizes the values again."
    return Refusal("DTYPE_MISMATCH", message, Where(None, name), hint)


def _words(encoding: Encoding) -> str:
    tile = " x ".join("all" if size == WHOLE else str(size) for size in encoding.tile)
    reach = f", scales up to {encoding.scale_max}" if encoding.has_global else ""
    return f"{encoding.name} of {encoding.code} in tiles of {tile}{reach}"
