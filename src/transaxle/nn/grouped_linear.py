"""`GroupedLinear`: N linear layers of one size, each for its own rows of the input.

Names and meaning of arguments are TransformerEngine's. No environment variable changes anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from transaxle.arguments import DType
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.nn.expert_relayout import BIAS, WEIGHT
from transaxle.nn.grouped_gemm import (
    Operands,
    Pending,
    Setting,
    codes_of,
    grouped_product,
    mesh_of,
    placed,
    refuse_data_parallel,
    weights_of,
)
from transaxle.nn.grouped_parameters import GroupedParameters, Init
from transaxle.nn.grouped_tensor import Splits, read_back, splits
from transaxle.nn.kernel_choice import PER_EXPERT, WAYS, Path, Way, path
from transaxle.quant import DelayedScaling, QuantizedTensor, Quantizer, quantize_
from transaxle.quant.entries import is_quantized
from transaxle.torch_tensors import Device, read_device, read_optional_dtype, stored_local

MAIN_GRAD = "main_grad"
"""Attribute of a weight: where its gradient is summed up."""
OVERWRITE = "overwrite_main_grad"
"""Attribute of a weight: the next gradient replaces what is in `main_grad`."""
ADDED = "grad_added_to_main_grad"
"""Attribute of a weight that Megatron has set: whether `main_grad` has the gradient already."""
Made = torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]
"""The output; or that, and the biases."""
CAST = (torch.float32, torch.bfloat16, torch.float16)
"""Types of inputs that autocast casts."""


class GroupedLinear(GroupedParameters):
    """N linear layers of one size; layer `i` is applied to the next `m_splits[i]` rows.

    After `divide` only the layers of this rank remain; `experts` has their numbers among all N.

    Args:
        num_gemms: N, the number of layers.
        in_features: size of a row of the input.
        out_features: size of a row of the output.
        bias: whether the layers have biases.
        return_bias: return the biases with the output instead of adding them.
        params_dtype: dtype of the parameters; None: torch's default.
        device: device of the parameters; `meta` leaves them without values until `to_empty` and
            `reset_parameters`, or a load.
        init_method: fills each weight [out, in] in place; None: normal with standard deviation 0.023.
        fuse_wgrad_accumulation: add gradients of weights to the parameters' `main_grad`; parameters with
            `overwrite_main_grad` set have it overwritten.
        delay_wgrad_compute: compute gradients of weights and biases in `backward_dw`, not in backward.
        save_original_input: keep the given input for backward, not the cast or quantized one.
        single_grouped_weight: one parameter `weight` [N, out, in] in place of `weight0`, `weight1`, …
        single_grouped_bias: one parameter `bias` [N, out] in place of `bias0`, `bias1`, …
        recipe: how weights are quantized; None: they are plain.

    Raises:
        Refused: SHAPE_MISMATCH for invalid sizes; UNSUPPORTED for options that do not fit together.
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
        self._pending: deque[tuple[Pending, tuple[int, ...], dict[str, DeviceMesh | None]]] = deque()
        self._cached: torch.Tensor | None = None
        dtype = read_optional_dtype("params_dtype", params_dtype) or torch.get_default_dtype()
        self._make(single_grouped_weight, single_grouped_bias, dtype, read_device("device", device))
        self.reset_parameters()
        if recipe is not None:
            self.quantize_(recipe)

    def quantize_(self, recipe: Quantizer) -> GroupedLinear:
        """Quantize each expert's weights separately, in place; return the layer. See `transaxle.quant.quantize_`.

        Raises:
            Refused: UNSUPPORTED for weights that are already quantized or sharded, and for delayed scaling together
                with `save_original_input`.
        """
        if any(is_quantized(weight) for _, weight in self._named(WEIGHT)):
            raise refuse("UNSUPPORTED", "the weights are quantized already", hint="Quantize once, before sharding.")
        quantize_(self, recipe)
        return self

    def check_recipe(self, recipe: Quantizer) -> None:
        """Refuse a recipe that the layer cannot compute with.

        Raises:
            Refused: UNSUPPORTED for delayed scaling together with `save_original_input`.
        """
        if self.save_original_input and isinstance(recipe, DelayedScaling):
            raise refuse(
                "UNSUPPORTED",
                "save_original_input does not work with delayed scaling: backward would scale by another history",
                hint="Use save_original_input=False, or a recipe that scales by the current values.",
            )

    def _weights(self, inp: torch.Tensor) -> list[torch.Tensor]:
        """Return what is multiplied with an input; for a rank without experts a tensor of none."""
        none = (0, self.out_features, self.in_features)
        return self._own(WEIGHT) or [torch.empty(none, dtype=self._dtype(inp), device=inp.device)]

    def force_path(self, way: Way | None) -> GroupedLinear:
        """Choose how the layer multiplies; None lets it choose itself. Return the layer.

        Args:
            way: `grouped` or `per_expert`, which compute the same; or `scaled`, which multiplies the codes of float8
                weights and also rounds the rows of inputs and gradients to float8.

        Raises:
            UsageError: AMBIGUOUS for an unknown way.
        """
        if way is not None and way not in WAYS:
            raise refuse("AMBIGUOUS", f"there is no way {way!r}; known are {', '.join(WAYS)}")
        self._forced, self._cached = way, None
        return self

    def path(self, inp: torch.Tensor) -> Path:
        """Return how the layer multiplies an input, and why.

        Raises:
            Refused: UNSUPPORTED if the forced way is not possible.
        """
        return self._path(self._dtype(inp), inp.device, self._weights(inp)[0])

    def _path(self, dtype: torch.dtype, device: torch.device, weight: torch.Tensor) -> Path:
        settings: dict[str, Any] = {"forced": self._forced, "experts": len(self.experts)}
        if isinstance(weight, QuantizedTensor):
            settings |= {"quantizer": weight.quantizer, "columnwise": weight.frame.columnwise}
        return path(dtype, device, (self.out_features, self.in_features), **settings)

    def _dtype(self, inp: torch.Tensor) -> torch.dtype:
        """Return the type that is multiplied: autocast's, or the input's."""
        return torch.get_autocast_dtype(inp.device.type) if _is_autocast(inp) else inp.dtype

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> Made:
        """Return [..., out]: each row times its expert's weight, plus its bias.

        Rows past the last expert's give zeros, in the output and in the gradient of the input.

        Args:
            inp: [..., in]; plain or quantized.
            m_splits: rows of each expert: a list, or an int32 or int64 tensor on any device. On the
                `grouped` path numbers on the device are not copied to the host.
            is_first_microbatch: True: keep the weights as they are multiplied (cast, dequantized, in one piece) for
                later microbatches; False: use the kept ones; None: prepare them for this call only.
            out: buffer for the output, with its shape or as rows; it may be reused for the next call. If it is part
                of a larger buffer, that enters autograd's graph, unless you give `out=buffer.detach()[…]`.
            dgrad_out: buffer for the gradient of the input, with its shape or as rows.

        Returns:
            The output; with `return_bias` a pair of the output and the biases, which are not added.

        Raises:
            Refused: SHAPE_MISMATCH, DTYPE_MISMATCH, UNSUPPORTED.
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
            return _untraced(self, inp, m_splits, is_first_microbatch, out, dgrad_out)  # type: ignore[no-any-return]
        if self.delay_wgrad_compute and torch.is_grad_enabled():
            refuse_data_parallel(self.parameters(recurse=False))
        biases = [] if self.return_bias else self._own(BIAS)
        rows = inp if inp.dim() == 2 else inp.reshape(-1, self.in_features)
        setting, split = self._setting(rows, weights, m_splits)
        if out is not None and out.grad_fn is not None and not out._is_view():
            out.detach_()  # of an earlier call, all of which is written over
        out, dgrad_out = _as_rows(out, inp), _as_rows(dgrad_out, inp)
        _fitting(out, (rows.shape[0], self.out_features), setting.dtype, rows.device, "out")
        _fitting(dgrad_out, (rows.shape[0], self.in_features), inp.dtype, rows.device, "dgrad_out")
        cached = self._kept(weights, split, setting, is_first_microbatch)
        result = grouped_product(rows, split.offsets, cached, dgrad_out, setting, weights, biases)
        if out is not None:
            result = out.copy_(result)  # here, not in `Product`: torch loses gradients there where `out` is a view
        result = result if inp.dim() == 2 else result.view(*inp.shape[:-1], self.out_features)
        return (result, self._members(BIAS)) if self.return_bias else result

    def _setting(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], m_splits: Sequence[int] | torch.Tensor
    ) -> tuple[Setting, Splits]:
        """Choose how rows are multiplied, and find each expert's rows.

        Raises:
            Refused: DTYPE_MISMATCH for rows and weights of different types outside of autocast; SHAPE_MISMATCH.
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

    def _kept(
        self, weights: Sequence[torch.Tensor], split: Splits, setting: Setting, first: bool | None
    ) -> torch.Tensor | None:
        """Return the weights as an earlier microbatch multiplied them, or None."""
        if first is None:
            return None
        if first or not _usable(self._cached, setting.dtype):
            operands = Operands(split, setting.way, setting.features, setting.dtype, setting.codes)
            with torch.no_grad():
                self._cached = weights_of(weights, operands)
        return self._cached

    def need_backward_dw(self) -> bool:
        """Tell whether this layer delays gradients, so that `backward_dw` must be called."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the gradients of weights and biases that the oldest backward without them left out.

        In a layer that does not delay them it does nothing. Under FSDP2 every rank must call it after backward:
        gradients become means over the ranks that share the parameters, with the parameters' dtype and sharding.

        Raises:
            Refused: UNSUPPORTED if no backward left any, if its tensors were changed in place, or if the gradients no
                longer fit the parameters.
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

    def take(self, pending: Pending) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Accept gradients of weights, for `backward_dw` or for `main_grad`; see `Sink`."""
        if self.delay_wgrad_compute:
            meshes = {name: mesh_of(parameter) for stem in self._names for name, parameter in self._named(stem)}
            self._pending.append((pending, pending.versions(), meshes))
            return None, None
        weight = pending.weight()
        dummy = None if weight is None else self._to_main(weight)
        return dummy, pending.bias()

    def _to_main(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Add gradients to `main_grad`, or put them there; return what autograd is to be told, if anything."""
        parts = (grad,) if self.single_grouped_weight else grad
        every = zip(self._named(WEIGHT), parts, strict=True)
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
        """Add gradients to `.grad` of the parameters, as autograd and FSDP2 do."""
        single = self._single[stem]
        for place, (name, parameter) in enumerate(self._named(stem) if grad is not None else ()):
            if not parameter.requires_grad:
                continue
            assert grad is not None
            part = (grad if single else grad[place]).to(parameter.dtype)
            gradient = placed(part, parameter, meshes[name])
            local, own = (stored_local(tensor) for tensor in (gradient, parameter))
            if local.shape != own.shape:
                message = f"the gradient is {list(local.shape)}, but the parameter is now {list(own.shape)}"
                hint = "Call backward_dw() before the parameter is replaced or divided."
                raise refuse("UNSUPPORTED", message, tensor=name, hint=hint)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)  # where it is: it may be a part of a larger buffer

    def pack(self, *, fresh: bool = False) -> None:
        """See `GroupedParameters.pack`; weights kept for other microbatches are dropped."""
        self._cached = None
        super().pack(fresh=fresh)

    def __getstate__(self) -> dict[str, Any]:
        """Return the layer without what belongs to a step in progress."""
        return {**self.__dict__, "_pending": deque(), "_cached": None}

    def extra_repr(self) -> str:
        """Return the sizes, for `print`."""
        single = f"single_grouped_weight={self.single_grouped_weight}"
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, {single}"
            + ("" if self.ep is None else f", experts={self.experts.start}:{self.experts.stop}")
        )


def _check_main(trained: Sequence[tuple[str, nn.Parameter, torch.Tensor]]) -> None:
    """Refuse weights without a `main_grad` of their shape."""
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
def _untraced(layer: GroupedLinear, *arguments: Any) -> Made:
    return layer.forward(*arguments)


def _usable(kept: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Tell whether weights of an earlier microbatch serve this one: autograd takes none of inference mode."""
    if kept is None or kept.dtype != dtype:
        return False
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not kept.is_inference()


def _is_autocast(inp: torch.Tensor) -> bool:
    # torch.compile of torch 2.11 cannot ask whether a device has autocast. Of those that torch knows, meta has not.
    return inp.dtype in CAST and not inp.is_meta and torch.is_autocast_enabled(inp.device.type)


def _as_rows(buffer: torch.Tensor | None, inp: torch.Tensor) -> torch.Tensor | None:
    """Return a buffer for a result, of the input's dims, as rows; any other as it is."""
    if buffer is None or buffer.dim() == 2 or buffer.shape[:-1] != inp.shape[:-1] or not buffer.is_contiguous():
        return buffer
    return buffer.view(inp.shape[:-1].numel(), buffer.shape[-1])


def _fitting(
    buffer: torch.Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, name: str
) -> None:
    """Refuse a buffer for a result that the result does not fit."""
    if buffer is not None and (tuple(buffer.shape), buffer.dtype, buffer.device) != (shape, dtype, device):
        actual = f"{buffer.dtype} {list(buffer.shape)} on {buffer.device}"
        raise refuse("SHAPE_MISMATCH", f"{name} must be {dtype} {list(shape)} on {device}, not {actual}")
