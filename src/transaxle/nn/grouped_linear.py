"""`GroupedLinear`: N linear layers of equal size (experts), each of which is applied to its own rows of the input.

Arguments have the names and meanings of TransformerEngine's `GroupedLinear`. No environment variable has any effect.

`GroupedParameters` contains the layer's parameters, one for all experts or one per expert, and defines how they are
initialized, divided over ranks and loaded. `GroupedLinear` computes with these parameters.

**Initial values** of a rank's experts equal the values that they have in a whole layer with the same seed. A random
generator yields its numbers in order, so the values of expert 3 follow those of experts 0 to 2. Every rank therefore
draws the values of every expert, and keeps those of its own experts. After the weights are drawn, all generators are in
the same state as after initializing a whole layer, so later random numbers are the same too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from transaxle.arguments import DType
from transaxle.axes.geometry import Intervals, torch_chunk
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.nn.expert_relayout import BIAS, WEIGHT, Layer, apart, refuse_codes, remap
from transaxle.nn.grouped_gemm import (
    Operands,
    PendingGradients,
    Setting,
    apply_product,
    codes_of,
    mesh_of,
    place_gradient,
    refuse_data_parallel,
    weights_of,
)
from transaxle.nn.grouped_tensor import GroupedTensor, Splits, adjacent, read_back, splits
from transaxle.nn.kernel_choice import PER_EXPERT, WAYS, Path, Way, path
from transaxle.quant import DelayedScaling, QuantizedTensor, Quantizer, quantize_
from transaxle.quant.entries import ASSIGN, QuantizedEntries, is_quantized, layout_of, put_values
from transaxle.torch_tensors import (
    Device,
    as_dtensor,
    local_with_grad,
    positions_of,
    raw_local,
    read_device,
    read_optional_dtype,
    take,
)


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """Memory for initial values of some experts on this rank."""

    values: torch.Tensor
    """The tensor on this rank that receives the values, [experts, rows, columns]."""
    positions: tuple[Intervals, ...]
    """For each dim of `values`, its indices in the stack of all experts."""


def fill(destinations: Sequence[ExpertMemory], count: int, draw: Callable[[], torch.Tensor]) -> None:
    """Set the initial values of this rank's experts.

    Args:
        destinations: memory of this rank's experts.
        count: number of experts on all ranks.
        draw: function that creates the values [rows, columns] of the next expert.
    """
    rows_by_expert: dict[int, list[tuple[torch.Tensor, tuple[Intervals, ...]]]] = {}
    for destination in destinations:
        experts, *positions_in_matrix = destination.positions
        numbers = (number for start, stop in experts for number in range(start, stop))
        for number, values in zip(numbers, destination.values, strict=True):
            rows_by_expert.setdefault(number, []).append((values, tuple(positions_in_matrix)))
    for number in range(count):
        drawn = draw()
        for values, positions in rows_by_expert.get(number, ()):
            values.copy_(take(drawn, positions))


_STD = 0.023
"""Standard deviation of initial weights, as in TransformerEngine."""
_FSDP_MANAGED = "_is_fsdp_managed_module"
"""Name of the attribute by which torch marks modules whose parameters `fully_shard` manages."""

Init = Callable[[torch.Tensor], object]
"""Function that fills a weight [out, in] with initial values, in place."""


class GroupedParameters(QuantizedEntries):
    """Weights and biases of N linear layers of one size (the experts)."""

    num_gemms: int
    """Number of experts N, on all ranks together."""
    in_features: int
    """Number of elements of an input row; if tensor parallelism cuts rows, the number on this rank."""
    out_features: int
    """Number of elements of an output row; if tensor parallelism cuts rows, the number on this rank."""
    use_bias: bool
    """Whether the layers have biases."""
    init_method: Init | None
    """Function that fills each weight with initial values; None means a normal distribution with standard deviation
    0.023.
    """
    experts: range
    """Numbers of this rank's experts."""
    ep: DeviceMesh | None
    """Mesh over whose ranks the experts are divided; None means that each rank has all experts."""

    def _make(
        self, single_weight: bool, single_bias: bool, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        """Create the parameters without initial values.

        Args:
            single_weight: whether to create one parameter for all weights; otherwise, one per expert.
            single_bias: whether to create one parameter for all biases; otherwise, one per expert.
            dtype: dtype of the parameters.
            device: device of the parameters.
        """
        self.single_grouped_weight, self.single_grouped_bias = single_weight, single_bias
        self.experts, self.ep = range(self.num_gemms), None
        self._single = {WEIGHT: single_weight, BIAS: single_bias}
        self._names = {stem: self._names_of(stem) for stem in self._single}
        # Shape and dtype of a weight before it is divided or sharded.
        self._whole, self._whole_dtype = (self.out_features, self.in_features), dtype
        for stem, shape in self._shapes().items():
            buffer = torch.empty((self.num_gemms, *shape), dtype=dtype, device=device)
            parts = (buffer,) if self._single[stem] else buffer
            for name, part in zip(self._names[stem], parts, strict=True):
                self.register_parameter(name, nn.Parameter(part))

    def _names_of(self, stem: str) -> tuple[str, ...]:
        """Return the parameter names of weights or biases (`stem`): one name, or one for each expert of this rank."""
        return (stem,) if self._single[stem] else tuple(f"{stem}{expert}" for expert in self.experts)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return kind of parameter (`weight`, and `bias` if there are biases) -> shape of one expert's parameter."""
        weight = {WEIGHT: (self.out_features, self.in_features)}
        return {**weight, BIAS: (self.out_features,)} if self.use_bias else {**weight}

    def layer(self) -> Layer:
        """Return the names and shapes that a state dict for this layer must have."""
        shapes, further_buffers = self._shapes(), dict[str, dict[str, tuple[int, ...]]]()
        for stem in shapes:
            quantized = next((weight for _, weight in self._parameters_of(stem) if is_quantized(weight)), None)
            layout = {} if quantized is None else layout_of(quantized)
            first = 1 if self._single[stem] else 0
            further_buffers[stem] = {suffix: shape[first:] for suffix, (_, shape) in layout.items() if suffix}
        return Layer(
            self.num_gemms, shapes, {stem: self._single[stem] for stem in shapes}, further_buffers, self.experts
        )

    def quantizable(self) -> Sequence[str]:
        """Return the names of the parameters that can be quantized (the weights); see `Quantizable`."""
        return self._names[WEIGHT]

    def divide(self, mesh: DeviceMesh) -> Self:
        """Divide the experts over the ranks of a mesh, in place, keeping only this rank's experts; return the layer.

        Each rank keeps the experts that `torch.chunk` assigns to it, possibly none. A single parameter becomes a
        DTensor, cut along the experts. If each expert has a parameter, only those of this rank's experts remain, with
        unchanged names: `weight5` is the same expert on every rank. After the experts are divided, `m_splits` counts
        only the rows of this rank's experts.

        Args:
            mesh: a mesh of one dim. Shard the layer on other mesh dims (as by `fully_shard`) only after it is divided.

        Raises:
            Refused: with the code UNSUPPORTED if the mesh has several dims, or parameters are already quantized or
                sharded.
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
            before = self._local_parameters(stem)
            if self._single[stem]:
                parts = [_divide_stack(before[0], mesh, self.experts)]
            else:
                parts = list(torch.stack(before[start:stop])) if self.experts else []
            by_name = dict(self._parameters_of(stem))
            for name in self._names[stem]:
                del self._parameters[name]
            self._names[stem] = self._names_of(stem)
            for name, part in zip(self._names[stem], parts, strict=True):
                self.register_parameter(name, nn.Parameter(part.detach(), by_name[name].requires_grad))
        return self

    def refuse_idle_ranks(self) -> None:
        """Refuse, on every rank, to train a stacked parameter under FSDP2 if any rank has no expert of the stack.

        A rank without experts has an empty gradient, for which torch's reduce-scatter fails, while all other ranks
        wait.

        Raises:
            Refused: with the code UNSUPPORTED if a rank has no expert.
        """
        if self.ep is None or not getattr(self, _FSDP_MANAGED, False) or not torch.is_grad_enabled():
            return
        size = self.ep.size()
        chunks = [torch_chunk(self.num_gemms, size, rank) for rank in range(size)]
        idle = [rank for rank, (start, stop) in enumerate(chunks) if start == stop]
        stacks = [
            parameter for stem in self._shapes() if self._single[stem] for _, parameter in self._parameters_of(stem)
        ]
        if idle and any(stack.requires_grad for stack in stacks):
            few = f"{self.num_gemms} experts over {size} ranks leave {', '.join(map(str, idle))} without any"
            message = f"{few}: fully_shard cannot reduce the gradient of a parameter that is empty there"
            hint = "Give each expert a parameter (single_grouped_weight=False), or divide them over fewer ranks."
            raise refuse("UNSUPPORTED", message, hint=hint)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set weights to their initial values, and biases to zero.

        Sharded or divided weights get the values that a whole layer would get from the same seed: each rank draws the
        values of every expert and keeps its own. If weights are quantized, all ranks must call this method.
        """
        weights = self._local_parameters(WEIGHT)
        if not any(weight.is_meta for weight in weights) and (weights or self.ep is not None):
            self._draw(weights)
        for bias in self._local_parameters(BIAS):
            if not bias.is_meta:
                bias.zero_()

    def _draw(self, weights: Sequence[torch.Tensor]) -> None:
        """Draw the weights of all experts, and copy the values of this rank's experts into `weights`."""
        destinations: list[ExpertMemory] = []
        codes: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, ((name, parameter), weight) in enumerate(zip(self._parameters_of(WEIGHT), weights, strict=True)):
            values: torch.Tensor = weight.detach()
            if is_quantized(weight):
                values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                codes.append((parameter, values))
            positions = self.positions(name)
            if not self.single_grouped_weight:
                expert = self.experts[index]
                values, positions = values.unsqueeze(0), (((expert, expert + 1),), *positions)
            destinations.append(ExpertMemory(values, positions))
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

        fill(destinations, self.num_gemms, draw)
        for quantized, whole in codes:
            put_values(quantized, whole)

    def positions(self, name: str) -> tuple[Intervals, ...]:
        """Return, for each dim of a whole parameter, the indices that this rank has.

        Args:
            name: name of a parameter of this module.
        """
        parameter = self._parameters[name]
        assert parameter is not None
        return positions_of(parameter)

    def _parameters_of(self, stem: str) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs of weights or biases (`stem`), in the order of the experts; empty if the layer
        has no biases.
        """
        by_name = self._parameters
        return [(name, parameter) for name in self._names[stem] if (parameter := by_name.get(name)) is not None]

    def _local_parameters(self, stem: str) -> list[torch.Tensor]:
        """Return the parameters of a kind (weights or biases); if they are sharded, this rank's shards."""
        by_name = self._parameters
        parameters = [parameter for name in self._names[stem] if (parameter := by_name.get(name)) is not None]
        if len(parameters) != (len(self._names[stem]) if stem == WEIGHT or self.use_bias else 0):
            lacking = ", ".join(name for name in self._names[stem] if self._parameters.get(name) is None)
            hint = "Call torch.nn.utils.parametrize.remove_parametrizations to make them parameters again."
            raise refuse("UNSUPPORTED", f"these are no longer parameters of the layer: {lacking}", hint=hint)
        return [local_with_grad(parameter) for parameter in parameters]

    def _members(self, stem: str) -> list[torch.Tensor]:
        """Return one tensor per expert: the expert's parameter, or a view of the stacked parameter."""
        parameters = self._local_parameters(stem)
        if not (self._single[stem] and parameters):
            return parameters
        (stack,) = parameters
        return [stack[place] for place in range(stack.shape[0])]

    @property
    def grouped_weight(self) -> GroupedTensor:
        """The weights of all experts as one grouped tensor, [N, out, in].

        Raises:
            Refused: with the code UNSUPPORTED if each expert has its own parameter.
        """
        if not self.single_grouped_weight:
            raise refuse(
                "UNSUPPORTED", "the layer has one weight per expert", hint="Make it with single_grouped_weight=True."
            )
        return GroupedTensor(self._parameters[WEIGHT])  # type: ignore[arg-type]

    @torch.no_grad()
    def pack(self, *, fresh: bool = False) -> None:
        """Move the experts' unquantized parameters into one buffer, unless they are in one buffer, so that forward
        copies nothing.

        Parameters that are in a larger buffer are not moved, because optimizers and collectives may use that buffer.

        Args:
            fresh: whether the parameters are new, so that no other code refers to their memory.
        """
        for stem in (WEIGHT, BIAS):
            parameters = [parameter for _, parameter in self._parameters_of(stem)]
            plain = len(parameters) > 1 and all(type(each.data) is torch.Tensor for each in parameters)
            alike = plain and len({(each.dtype, each.device, each.shape) for each in parameters}) == 1
            if (
                alike
                and parameters[0].device.type != "meta"
                and not adjacent(parameters)
                and _has_own_storage(parameters, fresh)
            ):
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
        state = remap(state_dict, prefix, self.layer())
        refuse_codes(state, prefix, self._parameters)
        if local_metadata.get(ASSIGN, False):
            state |= apart({name: value for name, value in state.items() if name.startswith(prefix)})
        super()._load_from_state_dict(state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self.pack()


def _has_own_storage(tensors: Sequence[torch.Tensor], fresh: bool) -> bool:
    """Return whether each tensor has a separate storage of exactly the tensor's size; if `fresh`, storages may be
    larger.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    sizes = {tensor.numel() * tensor.element_size() for tensor in tensors}
    return len(storages) == len(tensors) and (fresh or set(storages.values()) == sizes)


def _divide_stack(whole: torch.Tensor, mesh: DeviceMesh, experts: range) -> DTensor:
    """Create a DTensor from a stack of all experts, cut along the experts; this rank's shard is a copy."""
    local = whole.detach()[experts.start : experts.stop].clone()
    return as_dtensor(local, mesh, [Shard(0)], whole.shape, whole.stride())


MAIN_GRAD = "main_grad"
"""Name of a weight's attribute that contains the buffer in which the weight's gradient accumulates."""
OVERWRITE = "overwrite_main_grad"
"""Name of a weight's attribute: whether the next gradient overwrites `main_grad`."""
ADDED = "grad_added_to_main_grad"
"""Name of a weight's attribute that Megatron sets: whether the gradient has been added to `main_grad`."""
Output = torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]
"""Result of forward: the output, or (output, biases)."""
CAST = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of inputs that autocast casts to its own dtype."""


class GroupedLinear(GroupedParameters):
    """N linear layers of equal size; layer `i` is applied to the next `m_splits[i]` rows of the input.

    After `divide`, only the layers of this rank remain; `experts` contains their numbers among all N layers.

    Args:
        num_gemms: N, the number of layers.
        in_features: size of a row of the input.
        out_features: size of a row of the output.
        bias: whether the layers have biases.
        return_bias: whether to return the biases beside the output, without adding them.
        params_dtype: dtype of the parameters; None means torch's default.
        device: device of the parameters. On `meta`, parameters have no values until `to_empty` and `reset_parameters`
            are called, or until a checkpoint is loaded.
        init_method: function that fills each weight [out, in] in place; None means a normal distribution with standard
            deviation 0.023.
        fuse_wgrad_accumulation: whether to add gradients of weights to the parameters' `main_grad`; if a parameter has
            `overwrite_main_grad` set, the gradient replaces `main_grad`.
        delay_wgrad_compute: whether gradients of weights and biases are computed in `backward_dw`, and not in backward.
        save_original_input: whether the given input is kept for backward, and not the cast or quantized input.
        single_grouped_weight: whether to create one parameter `weight` [N, out, in] instead of `weight0`, `weight1`, …
        single_grouped_bias: whether to create one parameter `bias` [N, out] instead of `bias0`, `bias1`, …
        recipe: recipe by which the weights are quantized; None means that the weights are not quantized.

    Raises:
        Refused: with the code SHAPE_MISMATCH if a size is invalid; with the code UNSUPPORTED if options do not fit
            together.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: DType | None = None,
        device: Device | None = None,
        init_method: Init | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        *,
        recipe: Quantizer | None = None,
    ) -> None:
        super().__init__()
        if num_gemms < 1 or in_features < 0 or out_features < 0:
            raise refuse(
                "SHAPE_MISMATCH",
                f"sizes must not be negative, nor num_gemms 0: {num_gemms=}, {in_features=}, {out_features=}",
            )
        if single_grouped_bias and not bias:
            raise refuse("UNSUPPORTED", "single_grouped_bias=True needs a bias", hint="Add bias=True.")
        if return_bias and not bias:
            raise refuse("UNSUPPORTED", "return_bias=True needs a bias", hint="Add bias=True.")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self.init_method = init_method
        self._forced: Way | None = None
        self._pending: deque[tuple[PendingGradients, tuple[int, ...], dict[str, DeviceMesh | None]]] = deque()
        self._cached: torch.Tensor | None = None
        dtype = read_optional_dtype("params_dtype", params_dtype) or torch.get_default_dtype()
        self._make(single_grouped_weight, single_grouped_bias, dtype, read_device("device", device))
        self.reset_parameters()
        if recipe is not None:
            self.quantize_(recipe)

    def quantize_(self, recipe: Quantizer) -> GroupedLinear:
        """Quantize each expert's weights separately, in place; return the layer (see `transaxle.quant.quantize_`).

        Raises:
            Refused: with the code UNSUPPORTED if weights are already quantized or sharded, or if delayed scaling is
                combined with `save_original_input`.
        """
        if any(is_quantized(weight) for _, weight in self._parameters_of(WEIGHT)):
            raise refuse("UNSUPPORTED", "the weights are quantized already", hint="Quantize once, before sharding.")
        quantize_(self, recipe)
        return self

    def check_recipe(self, recipe: Quantizer) -> None:
        """Refuse a quantization recipe with which the layer cannot compute.

        Raises:
            Refused: with the code UNSUPPORTED if delayed scaling is combined with `save_original_input`.
        """
        if self.save_original_input and isinstance(recipe, DelayedScaling):
            raise refuse(
                "UNSUPPORTED",
                "save_original_input does not work with delayed scaling: backward would scale by another history",
                hint="Use save_original_input=False, or a recipe that scales by the current values.",
            )

    def _weights(self, inp: torch.Tensor) -> list[torch.Tensor]:
        """Return the weights by which an input is multiplied; on a rank without experts, one empty tensor."""
        empty_shape = (0, self.out_features, self.in_features)
        return self._local_parameters(WEIGHT) or [torch.empty(empty_shape, dtype=self._dtype(inp), device=inp.device)]

    def force_path(self, way: Way | None) -> GroupedLinear:
        """Force the way in which the layer multiplies, or let the layer choose (None); return the layer.

        Args:
            way: `grouped` or `per_expert`, whose results are equal; or `scaled`, which multiplies the codes of float8
                weights and also rounds the rows of inputs and gradients to float8.

        Raises:
            UsageError: with the code AMBIGUOUS if the way is unknown.
        """
        if way is not None and way not in WAYS:
            raise refuse("AMBIGUOUS", f"there is no way {way!r}; known are {', '.join(WAYS)}")
        self._forced, self._cached = way, None
        return self

    def path(self, inp: torch.Tensor) -> Path:
        """Return the way in which the layer multiplies an input, with the reasons.

        Raises:
            Refused: with the code UNSUPPORTED if the forced way is not possible.
        """
        return self._path(self._dtype(inp), inp.device, self._weights(inp)[0])

    def _path(self, dtype: torch.dtype, device: torch.device, weight: torch.Tensor) -> Path:
        settings: dict[str, Any] = {"forced": self._forced, "experts": len(self.experts)}
        if isinstance(weight, QuantizedTensor):
            settings |= {"quantizer": weight.quantizer, "columnwise": weight.frame.columnwise}
        return path(dtype, device, (self.out_features, self.in_features), **settings)

    def _dtype(self, inp: torch.Tensor) -> torch.dtype:
        """Return the dtype of the product: the dtype of autocast if it is enabled, otherwise that of the input."""
        return torch.get_autocast_dtype(inp.device.type) if _is_autocast(inp) else inp.dtype

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> Output:
        """Return [..., out]: each row times its expert's weight, plus the expert's bias.

        For rows after the last expert's rows, the output and the gradient of the input are zero.

        Args:
            inp: [..., in]; plain or quantized.
            m_splits: number of rows of each expert: a list, or an int32 or int64 tensor on any device. With the way
                `grouped`, numbers on the device are not copied to the host.
            is_first_microbatch: True caches the weights in the form in which they are multiplied (cast, dequantized, in
                one buffer) for later microbatches. False uses the cached weights. None prepares the weights for this
                call only.
            out: buffer for the output, in the output's shape or as rows, which can be used again in the next call. If
                `out` is a view of a larger buffer, that buffer becomes part of autograd's graph, unless you pass
                `out=buffer.detach()[…]`.
            dgrad_out: buffer for the gradient of the input, in the input's shape or as rows.

        Returns:
            The output; with `return_bias`, a pair of the output and the biases, which are not added to the output.

        Raises:
            Refused: with the code SHAPE_MISMATCH, DTYPE_MISMATCH or UNSUPPORTED if the arguments do not fit the layer.
        """
        if inp.dim() < 1 or inp.shape[-1] != self.in_features:
            raise refuse(
                "SHAPE_MISMATCH", f"the input must have the shape [..., {self.in_features}], not {list(inp.shape)}"
            )
        self.refuse_idle_ranks()
        weights = self._weights(inp)
        if torch.compiler.is_compiling() and (
            self.delay_wgrad_compute or any(isinstance(tensor, QuantizedTensor) for tensor in (inp, *weights))
        ):
            return _run_untraced(self, inp, m_splits, is_first_microbatch, out, dgrad_out)  # type: ignore[no-any-return]
        if self.delay_wgrad_compute and torch.is_grad_enabled():
            refuse_data_parallel(self.parameters(recurse=False))
        biases = [] if self.return_bias else self._local_parameters(BIAS)
        rows = inp if inp.dim() == 2 else inp.reshape(-1, self.in_features)
        setting, split = self._setting(rows, weights, m_splits)
        if out is not None and out.grad_fn is not None and not out._is_view():
            out.detach_()  # drop the graph of an earlier call, whose output is overwritten
        out, dgrad_out = _as_rows(out, inp), _as_rows(dgrad_out, inp)
        _check_buffer(out, (rows.shape[0], self.out_features), setting.dtype, rows.device, "out")
        _check_buffer(dgrad_out, (rows.shape[0], self.in_features), inp.dtype, rows.device, "dgrad_out")
        cached = self._cached_weights(weights, split, setting, is_first_microbatch)
        result = apply_product(rows, split.offsets, cached, dgrad_out, setting, weights, biases)
        if out is not None:
            result = out.copy_(result)  # inside `Product`, torch would lose gradients if `out` is a view
        result = result if inp.dim() == 2 else result.view(*inp.shape[:-1], self.out_features)
        return (result, self._members(BIAS)) if self.return_bias else result

    def _setting(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], m_splits: Sequence[int] | torch.Tensor
    ) -> tuple[Setting, Splits]:
        """Choose how rows are multiplied, and compute which rows each expert has.

        Raises:
            Refused: with the code DTYPE_MISMATCH if rows and weights have different dtypes outside of autocast; with
                the code SHAPE_MISMATCH if `m_splits` does not fit the rows.
        """
        dtype = self._dtype(rows)
        if not _is_autocast(rows) and dtype != weights[0].dtype:
            raise refuse(
                "DTYPE_MISMATCH",
                f"the input is {dtype}, but the weights are {weights[0].dtype}",
                hint="Cast the input, or use autocast.",
            )
        chosen = self._path(dtype, rows.device, weights[0])
        experts = weights[0].shape[0] if weights[0].dim() > 2 else len(weights)
        split = self._splits(m_splits, experts, rows, chosen)
        setting = Setting(
            chosen.way,
            (self.out_features, self.in_features),
            dtype,
            split.counts,
            len(weights),
            self.save_original_input,
            self if self.fuse_wgrad_accumulation or self.delay_wgrad_compute else None,
            codes_of(weights, split.counts, rows.device),
        )
        return setting, split

    def _splits(self, m_splits: Sequence[int] | torch.Tensor, experts: int, rows: torch.Tensor, chosen: Path) -> Splits:
        split = splits(m_splits, experts, rows.shape[0], rows.device)
        if chosen.way == PER_EXPERT and split.counts is None:
            assert isinstance(m_splits, torch.Tensor)
            return Splits(split.offsets, split.rows, read_back(m_splits, split.rows))
        return split

    def _cached_weights(
        self, weights: Sequence[torch.Tensor], split: Splits, setting: Setting, first: bool | None
    ) -> torch.Tensor | None:
        """Return the cached weights, which the first microbatch prepares; None if weights are not cached."""
        if first is None:
            return None
        if first or not _usable(self._cached, setting.dtype):
            operands = Operands(split, setting.way, setting.features, setting.dtype, setting.codes)
            with torch.no_grad():
                self._cached = weights_of(weights, operands)
        return self._cached

    def need_backward_dw(self) -> bool:
        """Return whether this layer delays gradients of weights, in which case the user must call `backward_dw`."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the delayed gradients of weights and biases for the oldest backward whose gradients are still
        missing.

        If the layer does not delay gradients, the method does nothing. Under FSDP2, every rank must call `backward_dw`
        after each backward. The gradients become means over the ranks that share the parameters, with the parameters'
        dtype and sharding.

        Raises:
            Refused: with the code UNSUPPORTED if no backward is pending, if tensors of the pending backward were
                changed in place, or if the gradients no longer fit the parameters.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._pending:
            raise refuse(
                "UNSUPPORTED",
                "backward_dw() was called without a backward before it",
                hint="Call it once after each backward.",
            )
        pending, versions, meshes = self._pending.popleft()
        if pending.versions() != versions:
            message = "the input, or the gradient of the output, was changed in place after backward"
            raise refuse(
                "UNSUPPORTED",
                message,
                hint="Call backward_dw() before changing them, and do not put dgrad_out into their memory.",
            )
        with torch.no_grad():
            weight = pending.weight()
            if weight is not None and self.fuse_wgrad_accumulation:
                self._to_main(weight)
                weight = None
            for stem, grad in ((WEIGHT, weight), (BIAS, pending.bias())):
                self._to_grad(stem, grad, meshes)

    def take(self, pending: PendingGradients) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Accept pending gradients of weights: keep them for `backward_dw`, or add them to `main_grad` (see `Sink`)."""
        if self.delay_wgrad_compute:
            meshes = {name: mesh_of(parameter) for stem in self._names for name, parameter in self._parameters_of(stem)}
            self._pending.append((pending, pending.versions(), meshes))
            return None, None
        weight = pending.weight()
        dummy = None if weight is None else self._to_main(weight)
        return dummy, pending.bias()

    def _to_main(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Add gradients to `main_grad`, or overwrite `main_grad`; return a dummy gradient if Megatron needs one."""
        parts = (grad,) if self.single_grouped_weight else grad
        every = zip(self._parameters_of(WEIGHT), parts, strict=True)
        trained = [(name, parameter, part) for (name, parameter), part in every if parameter.requires_grad]
        _check_main(trained)
        flagged = False
        for _, parameter, part in trained:
            main: torch.Tensor = getattr(parameter, MAIN_GRAD)
            if getattr(parameter, OVERWRITE, False):
                main.copy_(part)
            else:
                main.add_(part)
            if hasattr(parameter, ADDED):
                setattr(parameter, ADDED, True)
                flagged = True
        return grad.new_zeros(()).expand(grad.shape) if flagged else None

    def _to_grad(self, stem: str, grad: torch.Tensor | None, meshes: Mapping[str, DeviceMesh | None]) -> None:
        """Add gradients to the parameters' `.grad`, as autograd and FSDP2 do."""
        single = self._single[stem]
        for index, (name, parameter) in enumerate(self._parameters_of(stem) if grad is not None else ()):
            if not parameter.requires_grad:
                continue
            assert grad is not None
            part = (grad if single else grad[index]).to(parameter.dtype)
            gradient = place_gradient(part, parameter, meshes[name])
            local_grad, target = (raw_local(tensor) for tensor in (gradient, parameter))
            if local_grad.shape != target.shape:
                message = f"the gradient is {list(local_grad.shape)}, but the parameter is now {list(target.shape)}"
                hint = "Call backward_dw() before the parameter is replaced or divided."
                raise refuse("UNSUPPORTED", message, tensor=name, hint=hint)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)  # in place, because `.grad` may be a view of a larger buffer

    def pack(self, *, fresh: bool = False) -> None:
        """Move unquantized parameters into one buffer (see `GroupedParameters.pack`), and drop cached weights."""
        self._cached = None
        super().pack(fresh=fresh)

    def __getstate__(self) -> dict[str, Any]:
        """Return the layer's attributes for pickling, without unfinished gradients and cached weights."""
        return {**self.__dict__, "_pending": deque(), "_cached": None}

    def extra_repr(self) -> str:
        """Return the layer's sizes as text, for `print`."""
        single = f"single_grouped_weight={self.single_grouped_weight}"
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, {single}"
            + ("" if self.ep is None else f", experts={self.experts.start}:{self.experts.stop}")
        )


def _check_main(trained: Sequence[tuple[str, nn.Parameter, torch.Tensor]]) -> None:
    """Refuse weights without a `main_grad` that has the shape of the weight."""
    problems = []
    for name, parameter, part in trained:
        main = getattr(parameter, MAIN_GRAD, None)
        if main is None or main.shape != part.shape:
            actual = "there is none" if main is None else f"it is {list(main.shape)}"
            message = f"fuse_wgrad_accumulation needs a main_grad of {list(part.shape)}, but {actual}"
            problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name)))
    if problems:
        raise gathered(problems)


@torch.compiler.disable(reason="quantized tensors, and gradients left to backward_dw(), are not traced")  # type: ignore[untyped-decorator]
def _run_untraced(layer: GroupedLinear, *arguments: Any) -> Output:
    return layer.forward(*arguments)


def _usable(cached: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether cached weights can be used: their dtype must fit, and autograd accepts no tensors of inference
    mode.
    """
    if cached is None or cached.dtype != dtype:
        return False
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not cached.is_inference()


def _is_autocast(inp: torch.Tensor) -> bool:
    # torch.compile of torch 2.11 cannot query whether a device supports autocast. All devices except `meta` support
    # autocast.
    return inp.dtype in CAST and not inp.is_meta and torch.is_autocast_enabled(inp.device.type)


def _as_rows(buffer: torch.Tensor | None, inp: torch.Tensor) -> torch.Tensor | None:
    """Return a result buffer as rows: a view if it has the input's leading dims, otherwise the buffer itself."""
    if buffer is None or buffer.dim() == 2 or buffer.shape[:-1] != inp.shape[:-1] or not buffer.is_contiguous():
        return buffer
    return buffer.view(inp.shape[:-1].numel(), buffer.shape[-1])


def _check_buffer(
    buffer: torch.Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, name: str
) -> None:
    """Refuse a result buffer with the wrong shape, dtype or device."""
    if buffer is not None and (tuple(buffer.shape), buffer.dtype, buffer.device) != (shape, dtype, device):
        actual = f"{buffer.dtype} {list(buffer.shape)} on {buffer.device}"
        raise refuse("SHAPE_MISMATCH", f"{name} must be {dtype} {list(shape)} on {device}, not {actual}")
