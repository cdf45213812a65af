"""Parameters of a grouped layer: one for all experts or one for each, of all experts or of this rank's.

How they are initialized, shared out over ranks and loaded; `grouped_linear` computes with them.

Initial values of some of the experts, equal to those of the whole layer with the same seed.

A generator gives its numbers in order, so the values of expert 3 come after those of the three experts before it.
Every rank therefore draws every expert and keeps only its own. Afterwards all generators are in the state that a whole
layer would leave, so that later draws agree too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from transaxle.axes.geometry import Intervals, torch_chunk
from transaxle.errors import refuse
from transaxle.nn.expert_relayout import BIAS, WEIGHT, Layer, apart, refuse_codes, remapped
from transaxle.nn.grouped_tensor import GroupedTensor, adjacent
from transaxle.quant.entries import ASSIGN, QuantizedEntries, is_quantized, layout_of, put_values
from transaxle.torch_tensors import as_dtensor, held_by, local_with_grad, take


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for this rank's values of some experts."""

    values: torch.Tensor
    """[experts, rows, columns] of this rank."""
    held: tuple[Intervals, ...]
    """For each dim, their positions in the stack of all experts."""


def fill(rooms: Sequence[Room], count: int, draw: Callable[[], torch.Tensor]) -> None:
    """Give experts their initial values.

    Args:
        rooms: the memory of this rank.
        count: all experts, here and elsewhere.
        draw: makes the values [rows, columns] of the next expert.
    """
    places: dict[int, list[tuple[torch.Tensor, tuple[Intervals, ...]]]] = {}
    for room in rooms:
        experts, *rest = room.held
        numbers = (number for start, stop in experts for number in range(start, stop))
        for number, values in zip(numbers, room.values, strict=True):
            places.setdefault(number, []).append((values, tuple(rest)))
    for number in range(count):
        drawn = draw()
        for values, positions in places.get(number, ()):
            values.copy_(take(drawn, positions))


_STD = 0.023
"""Standard deviation of initial weights, TransformerEngine's."""
_FSDP_MANAGED = "_is_fsdp_managed_module"
"""Attribute by which torch marks the modules whose parameters `fully_shard` has taken over."""

Init = Callable[[torch.Tensor], object]
"""Gives a weight [out, in] its initial values."""


class GroupedParameters(QuantizedEntries):
    """Weights and biases of N linear layers of one size: the experts."""

    num_gemms: int
    """N, on all ranks together."""
    in_features: int
    """Size of a row, of this rank's part where tensor parallelism cuts it."""
    out_features: int
    """Size of a row of the output; of this rank's part, where tensor parallelism cuts it."""
    use_bias: bool
    """Whether there are biases."""
    init_method: Init | None
    """Gives each weight its values; None: normal, 0.023."""
    experts: range
    """Numbers of the experts that this rank has."""
    ep: DeviceMesh | None
    """The ranks that share out the experts; None: each has all."""

    def _make(
        self, single_weight: bool, single_bias: bool, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        """Make the parameters, without values.

        Args:
            single_weight: one for all weights.
            single_bias: one for all biases.
            dtype: of the parameters.
            device: of the parameters.
        """
        self.single_grouped_weight, self.single_grouped_bias = single_weight, single_bias
        self.experts, self.ep = range(self.num_gemms), None
        self._single = {WEIGHT: single_weight, BIAS: single_bias}
        self._names = {stem: self._names_of(stem) for stem in self._single}
        self._whole, self._whole_dtype = (self.out_features, self.in_features), dtype  # of a weight before any cut
        for stem, shape in self._shapes().items():
            buffer = torch.empty((self.num_gemms, *shape), dtype=dtype, device=device)
            parts = (buffer,) if self._single[stem] else buffer
            for name, part in zip(self._names[stem], parts, strict=True):
                self.register_parameter(name, nn.Parameter(part))

    def _names_of(self, stem: str) -> tuple[str, ...]:
        """Return what the parameters of a stem are called: one, or one for each expert of this rank."""
        return (stem,) if self._single[stem] else tuple(f"{stem}{expert}" for expert in self.experts)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of one expert's weight, and of its bias if there is one."""
        weight = {WEIGHT: (self.out_features, self.in_features)}
        return {**weight, BIAS: (self.out_features,)} if self.use_bias else {**weight}

    def layer(self) -> Layer:
        """Return what a state dict has to hold for this layer."""
        shapes, beside = self._shapes(), dict[str, dict[str, tuple[int, ...]]]()
        for stem in shapes:
            quantized = next((weight for _, weight in self._named(stem) if is_quantized(weight)), None)
            layout = {} if quantized is None else layout_of(quantized)
            first = 1 if self._single[stem] else 0
            beside[stem] = {suffix: shape[first:] for suffix, (_, shape) in layout.items() if suffix}
        return Layer(self.num_gemms, shapes, {stem: self._single[stem] for stem in shapes}, beside, self.experts)

    def quantizable(self) -> Sequence[str]:
        """Return the names of the weights: see `Quantizable` of `transaxle.quant.quantized_modules`."""
        return self._names[WEIGHT]

    def divide(self, mesh: DeviceMesh) -> Self:
        """Divide the experts over the ranks of a mesh, in place, keeping those of this rank; return the layer.

        Each rank gets the experts that `torch.chunk` gives it, possibly none. A single parameter becomes a DTensor, cut
        along the experts. Of one parameter per expert, only this rank's remain, and keep their names: `weight5` is the
        same expert on every rank. `m_splits` then counts the rows of this rank's experts only.

        Args:
            mesh: a mesh of one dim. Sharding on other mesh dims, such as `fully_shard`, comes afterwards.

        Raises:
            Refused: UNSUPPORTED for a mesh of several dims, and for parameters that are already quantized or sharded.
        """
        if mesh.ndim != 1:
            raise refuse(
                "UNSUPPORTED",
                f"ep must be a mesh of one dim, not of {mesh.ndim}",
                hint='Give one of its dims, mesh["ep"].',
            )
        parameters: list[torch.Tensor] = [each for each in self._parameters.values() if each is not None]
        if self.ep is not None or any(isinstance(each, DTensor) or is_quantized(each) for each in parameters):
            message = "its parameters are already quantized, sharded or divided over ranks"
            raise refuse("UNSUPPORTED", message, hint="Divide the layer first.")
        start, stop = torch_chunk(self.num_gemms, mesh.size(), mesh.get_local_rank())
        self.experts, self.ep = range(start, stop), mesh
        for stem in self._shapes():
            before = self._own(stem)
            if self._single[stem]:
                parts = [_divided(before[0], mesh, self.experts)]
            else:
                parts = list(torch.stack(before[start:stop])) if self.experts else []
            named = dict(self._named(stem))
            for name in self._names[stem]:
                del self._parameters[name]
            self._names[stem] = self._names_of(stem)
            for name, part in zip(self._names[stem], parts, strict=True):
                self.register_parameter(name, nn.Parameter(part.detach(), named[name].requires_grad))
        return self

    def refuse_idle_ranks(self) -> None:
        """Refuse, on every rank, to train one parameter of all experts under FSDP2 where a rank has none of them.

        That rank has an empty gradient, with which torch's reduce-scatter fails, while the other ranks wait for it.

        Raises:
            Refused: UNSUPPORTED.
        """
        if self.ep is None or not getattr(self, _FSDP_MANAGED, False) or not torch.is_grad_enabled():
            return
        size = self.ep.size()
        chunks = [torch_chunk(self.num_gemms, size, rank) for rank in range(size)]
        idle = [rank for rank, (start, stop) in enumerate(chunks) if start == stop]
        stacks = [parameter for stem in self._shapes() if self._single[stem] for _, parameter in self._named(stem)]
        if idle and any(stack.requires_grad for stack in stacks):
            few = f"{self.num_gemms} experts over {size} ranks leave {', '.join(map(str, idle))} without any"
            message = f"{few}: fully_shard cannot reduce the gradient of a parameter that is empty there"
            hint = "Give each expert a parameter (single_grouped_weight=False), or divide them over fewer ranks."
            raise refuse("UNSUPPORTED", message, hint=hint)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give weights their initial values, and biases zeros.

        Sharded or divided weights get the values that the whole layer would get from the same seed: each rank draws
        every expert and keeps its part. For quantized weights all ranks must call it.
        """
        weights = self._own(WEIGHT)
        if not any(weight.is_meta for weight in weights) and (weights or self.ep is not None):
            self._draw(weights)
        for bias in self._own(BIAS):
            if not bias.is_meta:
                bias.zero_()

    def _draw(self, weights: Sequence[torch.Tensor]) -> None:
        """Draw the weights of all experts, and put into those of this rank what they hold of it."""
        rooms: list[Room] = []
        codes: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place, ((name, parameter), weight) in enumerate(zip(self._named(WEIGHT), weights, strict=True)):
            values: torch.Tensor = weight.detach()
            if is_quantized(weight):
                values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                codes.append((parameter, values))
            positions = self.held(name)
            if not self.single_grouped_weight:
                expert = self.experts[place]
                values, positions = values.unsqueeze(0), (((expert, expert + 1),), *positions)
            rooms.append(Room(values, positions))
        if weights:
            dtype, device = weights[0].dtype, weights[0].device
        else:
            assert self.ep is not None
            dtype, device = self._whole_dtype, torch.device(self.ep.device_type)

        def draw() -> torch.Tensor:
            initial = torch.empty(self._whole, dtype=dtype, device=device)
            if self.init_method is None:
                return nn.init.normal_(initial, std=_STD)
            self.init_method(initial)
            return initial

        fill(rooms, self.num_gemms, draw)
        for quantized, whole in codes:
            put_values(quantized, whole)

    def held(self, name: str) -> tuple[Intervals, ...]:
        """Return, for each dim of a whole parameter, the positions that this rank has.

        Args:
            name: of one of its own.
        """
        parameter = self._parameters[name]
        assert parameter is not None
        return held_by(parameter)

    def _named(self, stem: str) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of a stem by name, in the order of the experts; none where there is no bias."""
        by_name = self._parameters
        return [(name, parameter) for name in self._names[stem] if (parameter := by_name.get(name)) is not None]

    def _own(self, stem: str) -> list[torch.Tensor]:
        """Return the parameters of a stem; of sharded ones, this rank's part."""
        by_name = self._parameters
        parameters = [parameter for name in self._names[stem] if (parameter := by_name.get(name)) is not None]
        if len(parameters) != (len(self._names[stem]) if stem == WEIGHT or self.use_bias else 0):
            lacking = ", ".join(name for name in self._names[stem] if self._parameters.get(name) is None)
            hint = "Call torch.nn.utils.parametrize.remove_parametrizations to make them parameters again."
            raise refuse("UNSUPPORTED", f"these are no longer parameters of the layer: {lacking}", hint=hint)
        return [local_with_grad(parameter) for parameter in parameters]

    def _members(self, stem: str) -> list[torch.Tensor]:
        """Return one tensor per expert: the parameters, or views of the stacked one."""
        parameters = self._own(stem)
        if not (self._single[stem] and parameters):
            return parameters
        (stack,) = parameters
        return [stack[place] for place in range(stack.shape[0])]

    @property
    def grouped_weight(self) -> GroupedTensor:
        """The weights as one tensor.

        Raises:
            Refused: UNSUPPORTED if each expert has its own parameter.
        """
        if not self.single_grouped_weight:
            raise refuse(
                "UNSUPPORTED", "the layer has one weight per expert", hint="Make it with single_grouped_weight=True."
            )
        return GroupedTensor(self._parameters[WEIGHT])  # type: ignore[arg-type]

    @torch.no_grad()
    def pack(self, *, fresh: bool = False) -> None:
        """Move the experts' plain parameters into one buffer, unless they are in one, so that forward copies nothing.

        Parameters that are part of a larger buffer stay there, since optimizers and collectives may work on it.

        Args:
            fresh: whether the parameters are new, so that nothing else can refer to their memory.
        """
        for stem in (WEIGHT, BIAS):
            parameters = [parameter for _, parameter in self._named(stem)]
            plain = len(parameters) > 1 and all(type(each.data) is torch.Tensor for each in parameters)
            alike = plain and len({(each.dtype, each.device, each.shape) for each in parameters}) == 1
            if alike and parameters[0].device.type != "meta" and not adjacent(parameters) and _apart(parameters, fresh):
                buffer = torch.stack([each.data for each in parameters])
                for parameter, part in zip(parameters, buffer.unbind(0), strict=True):
                    parameter.data = part

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.pack()
        return self

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(dict(state))  # type: ignore[no-untyped-call]
        self.pack(fresh=True)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state = remapped(state_dict, prefix, self.layer())
        refuse_codes(state, prefix, self._parameters)
        if local_metadata.get(ASSIGN, False):
            state |= apart({name: value for name, value in state.items() if name.startswith(prefix)})
        super()._load_from_state_dict(state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self.pack()


def _apart(tensors: Sequence[torch.Tensor], fresh: bool) -> bool:
    """Tell whether each tensor has a storage of its own, of its own size; fresh ones may have a larger one."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    most = {tensor.numel() * tensor.element_size() for tensor in tensors}
    return len(storages) == len(tensors) and (fresh or set(storages.values()) == most)


def _divided(whole: torch.Tensor, mesh: DeviceMesh, experts: range) -> DTensor:
    """Return a stack of all experts as a DTensor; this rank keeps its own."""
    own = whole.detach()[experts.start : experts.stop].clone()
    return as_dtensor(own, mesh, [Shard(0)], whole.shape, whole.stride())
