"""Quantizes a model's weights, in place or while the model is built; converts tensors from and to torchao's classes.

Conversions between torchao's and Transaxle's quantized tensors keep codes and scales; no value is quantized again.
torchao is imported only to create a torchao tensor. A torchao tensor that a user passes is recognised by the name of
its class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from transaxle.encodings.encoding import NVFP4 as NVFP4_ENCODING
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.quant import kernels
from transaxle.quant.entries import give_entries, is_quantized
from transaxle.quant.frame import begin_rounding
from transaxle.quant.joined_parts import standalone_buffers
from transaxle.quant.quantizers import (
    AMAX,
    DATA,
    MXFP8,
    NVFP4,
    ORIGIN,
    SCALE,
    DelayedScaling,
    Float8Block,
    Float8CurrentScaling,
    Quantizer,
)
from transaxle.quant.tensor import QuantizedTensor, from_components, make_quantized
from transaxle.quant.tp_share import Share
from transaxle.torch_tensors import place_like, positions_of, raw_local

Filter = Callable[[str, nn.Module], bool]
"""Function that decides, from a module's name and the module (linear layer or stacked experts), whether to
quantize it.
"""


@runtime_checkable
class Quantizable(Protocol):
    """A module that determines which of its parameters can be quantized, such as `transaxle.nn.GroupedLinear`."""

    def quantizable(self) -> Sequence[str]:
        """Return the names of the parameters directly in the module that can be quantized."""

    def check_recipe(self, recipe: Quantizer) -> None:
        """Refuse a recipe with which the module cannot compute.

        Raises:
            Refused: with the code UNSUPPORTED if the module cannot compute with the recipe.
        """


class Cut(Protocol):
    """How tensor parallelism has cut a parameter; `transaxle.parallel` implements this protocol."""

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of the tensor-parallel ranks."""

    @property
    def share(self) -> Share | None:
        """This rank's share of the parameter; None if the rank has the whole parameter."""

    def tile_refusal(self, quantizer: Quantizer) -> Refusal | None:
        """Return the error for a cut that divides a tile of a quantizer; None if all cuts are between tiles."""


EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
"""Names of parameters with one matrix per expert, [E, out, in], in modules of transformers."""
CUTS = "_transaxle_cuts"
"""Attribute of modules that tensor parallelism has cut; it contains parameter name -> `Cut`."""
_WEIGHT = "weight"
_NUMBERED = re.compile(r"(.*\D)(0|[1-9][0-9]*)")
"""Pattern for the name of a parameter of one expert; it separates the expert's number from the text before it."""
_STACK = 3
_TRANSPOSED = "is_transposed"
"""Attribute that transformers sets on modules with experts of shape [E, in, out], as in gpt-oss. Experts of shape [E,
in, out] are not quantized, because tiles would run across rows.
"""


def quantize_(
    model: nn.Module,
    recipe: Quantizer,
    filter: Filter | None = None,  # noqa: A002 - the word for it
    *,
    preserve_high_precision_init: bool = False,
) -> list[str]:
    """Quantize the weights of linear and grouped layers, and stacks of experts, in place.

    Call this function before `fully_shard`, and before or after `tensor_parallel`, on every tensor-parallel rank. The
    model may be on the meta device. Stacks of experts are parameters with the names in `EXPERTS`, which transformers
    uses.

    A weight that a module of a different kind uses too (a head tied to an embedding) is not quantized. If several
    layers share a weight, they also share the quantized weight.

    Args:
        model: the model, which is changed.
        recipe: quantizer of the weights.
        filter: selects linear layers and modules of experts; None means that all are quantized.
        preserve_high_precision_init: whether to keep the values for `MasterWeights`, which otherwise starts from the
            codes.

    Returns:
        The names of the weights that were quantized.

    Raises:
        Refused: with the code UNSUPPORTED if weights are already sharded, or a layer cannot compute with the recipe;
            with the code BLOCK_MISALIGNED if tensor parallelism has cut a weight inside a tile.
    """
    candidates = [
        (name, key, module)
        for name, module in model.named_modules()
        for key in _weights(module)
        if filter is None or filter(name, module)
    ]
    chosen = {(id(module), key) for _, key, module in candidates}
    shared = {
        id(parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and (id(module), key) not in chosen
    }
    selected = [
        (f"{name}.{key}" if name else key, key, module)
        for name, key, module in candidates
        if id(getattr(module, key)) not in shared
    ]
    problems = [fault for full, key, module in selected for fault in _faults(full, key, module, recipe)]
    if problems:
        raise gathered(problems)
    replacements: dict[int, nn.Parameter] = {}
    for name, key, module in selected:
        old = getattr(module, key)
        if id(old) not in replacements:
            share = _expert_share(old) if (cut := _cut(module, key)) is None else cut.share
            replacement = _parameter(old, recipe, share, keep=preserve_high_precision_init)
            _identify(replacement, _identity(name, module, share))
            replacements[id(old)] = replacement
    for _, key, module in selected:
        setattr(module, key, replacements[id(getattr(module, key))])
        give_entries(module)
    return [full for full, *_ in selected]


def _weights(module: nn.Module) -> list[str]:
    """Return the names of the weights directly in a module that can be quantized and are not quantized yet."""
    if isinstance(module, Quantizable):
        names = tuple(module.quantizable())
    elif isinstance(module, nn.Linear):
        names = (_WEIGHT,)
    else:
        candidates = {} if getattr(module, _TRANSPOSED, False) else module._parameters
        names = tuple(
            name for name in EXPERTS if (parameter := candidates.get(name)) is not None and parameter.dim() == _STACK
        )
    parameters = {name: module._parameters.get(name) for name in names}
    return [name for name, parameter in parameters.items() if parameter is not None and not is_quantized(parameter)]


def _cut(module: nn.Module, key: str) -> Cut | None:
    """Return the tensor-parallel cut of a module's parameter; None if the parameter is not cut."""
    cuts: Mapping[str, Cut] = module.__dict__.get(CUTS, {})
    return cuts.get(key)


def _expert_share(weight: torch.Tensor) -> Share | None:
    """Return this rank's share of a stack of experts that expert parallelism has divided; None for any other weight."""
    if not isinstance(weight, DTensor) or weight.dim() != _STACK or weight.placements != (Shard(0),):
        return None
    return Share(weight.device_mesh.get_group(), tuple(weight.shape), 0, positions_of(weight)[0])


def _faults(name: str, key: str, module: nn.Module, recipe: Quantizer) -> list[Refusal]:
    """Return an error for each reason why a weight cannot be quantized."""
    problems = []
    weight, cut = getattr(module, key).data, _cut(module, key)
    kind = type(weight)
    sharded = isinstance(weight, DTensor) and (cut is None or weight.device_mesh != cut.mesh)
    if (sharded and _expert_share(weight) is None) or kind not in (torch.Tensor, DTensor):
        hint = "Quantize the model before it is sharded; only experts in stacks may be divided over ranks before."
        problems.append(
            Refusal(
                "UNSUPPORTED", f"a weight of the class {kind.__name__} cannot be quantized", Where(tensor=name), hint
            )
        )
    wrong = None if cut is None else cut.tile_refusal(recipe)
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
    """Context manager: at the end of the block, quantize layers and stacks of experts in the models that were built
    inside it.

    The context manager works for any code that creates `torch.nn.Linear` modules or copies them, as
    `torch.nn.TransformerEncoder` does, including Hugging Face models and `torch.device("meta")`. Weights that code
    inside the block has already quantized are not changed.

    Args:
        recipe: quantizer of the weights.
        filter: function that selects layers; None means that all layers are quantized except those that share a weight
            with an embedding.
        preserve_high_precision_init: whether to keep the values for `MasterWeights`, which otherwise starts from the
            codes.
    """
    built: dict[int, nn.Module] = {}
    originals = {kind: kind.__init__ for kind in (nn.Linear, nn.Embedding)}
    registers = nn.Module.register_parameter
    copies: Callable[[nn.Module, Any], None] = nn.Module.__setstate__

    def record(original: Callable[..., None]) -> Callable[..., None]:
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
    def record_copy(self: nn.Module, state: dict[str, Any]) -> None:
        copies(self, state)
        if isinstance(self, (*originals, Quantizable)) or not self._parameters.keys().isdisjoint(EXPERTS):
            built[id(self)] = self

    for kind, original in originals.items():
        kind.__init__ = record(original)  # type: ignore[method-assign]
    nn.Module.register_parameter = register  # type: ignore[method-assign]
    nn.Module.__setstate__ = record_copy  # type: ignore[method-assign]
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
    """Return (weight name, global number of the first expert), from which a weight's random numbers are computed.

    Experts in separate parameters (`weight7`) get the same name as experts in one stack (`weight`).
    """
    if share is not None and share.common is None:
        return name, share.positions[0][0] if share.positions else 0
    numbered = _NUMBERED.fullmatch(name) if isinstance(module, Quantizable) else None
    return (name, 0) if numbered is None else (numbered[1], int(numbered[2]))


def _identify(parameter: nn.Parameter, identity: tuple[str, int]) -> None:
    """Set a weight's identity, and create its rounding state, whose key is computed from this identity."""
    inner = raw_local(parameter)
    assert isinstance(inner, QuantizedTensor)
    inner.frame.identity = identity
    begin_rounding(inner.frame)


def _parameter(old: torch.Tensor, recipe: Quantizer, share: Share | None, *, keep: bool) -> nn.Parameter:
    values = raw_local(old.data)
    tensor = make_quantized(recipe, values, share=share)
    if keep and old.device.type != "meta":
        tensor.frame.cut[ORIGIN] = values.clone()
    return nn.Parameter(place_like(old.data, tensor), requires_grad=old.requires_grad)


_CODES: dict[torch.dtype, Any] = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_TOTAL = NVFP4_ENCODING.code_max * NVFP4_ENCODING.scale_max
"""In nvfp4, the ratio of a tensor's amax to its global scale."""
_WIDEST = 1 << 14
"""Maximum number of elements of a block with one scale."""
_MATRIX = 2


def from_torchao(tensor: torch.Tensor) -> QuantizedTensor:
    """Convert a `Float8Tensor`, `MXTensor` or `NVFP4Tensor` of torchao to a QuantizedTensor that shares its codes.

    Scales are shared too, unless they are in a kernel's swizzled order. A `Float8Tensor` with one scale per row becomes
    blocks of one row.

    Raises:
        Refused: with the code UNSUPPORTED if the tensor has no exact equivalent in Transaxle, with the reason; with the
            code LOSSY if no float32 amax results in the global scale of an nvfp4 tensor.
    """
    kind = type(tensor).__name__
    make = _READERS.get(kind)
    if make is None:
        raise _unequal(kind, f"only {', '.join(_READERS)} can be read")
    source: Any = tensor
    if source.dtype not in kernels.VALUES:
        raise _unequal(kind, f"its values are {source.dtype}")
    if source.qdata.dim() > 1 and source.qdata.stride(-2) < source.qdata.stride(-1):
        raise _unequal(kind, "it is transposed", hint="Transpose it back.")
    quantizer, buffers = make(source)
    return from_components(quantizer, buffers, tuple(tensor.shape), source.dtype)


def to_torchao(tensor: QuantizedTensor) -> torch.Tensor:
    """Convert a matrix, rows of a matrix, or a stack to torchao's class for the encoding; the result shares the codes.

    Columnwise codes and the history of delayed scaling are not converted.

    Raises:
        Refused: with the code UNSUPPORTED if the tensor has no exact equivalent in torchao, with the reason; with the
            code BLOCK_MISALIGNED if rows do not form whole tiles.
    """
    if tuple(tensor.shape) != (tensor.height, *tensor.frame.row):
        raise _unequal(str(tensor.quantizer), "it is a view of another shape")
    parts = tensor.components if tensor.frame.matrix is not None else standalone_buffers(tensor)
    quantizer, tile = tensor.quantizer, tensor.quantizer.encoding.tile
    if isinstance(quantizer, (Float8CurrentScaling, DelayedScaling, Float8Block)):
        return _float8_of(tensor, parts)
    if tensor.shape[-1] % tile[1]:
        raise _cut_short(quantizer, tensor.shape[-1], tile[1])
    if isinstance(quantizer, MXFP8):
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        whole = parts[DATA], parts[SCALE], parts[DATA].dtype, tile[1], tensor.dtype
        return cast(torch.Tensor, MXTensor(*whole, KernelPreference.EMULATED, None, False))
    return _nvfp4_of(tensor, parts)


def _float8_of(tensor: QuantizedTensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from torchao.quantization import Float8Tensor

    block = [1] * (tensor.dim() - _MATRIX)
    for size, tile_size in zip(tensor.shape[-2:], tensor.quantizer.encoding.tile, strict=True):
        if tile_size and size > tile_size and size % tile_size:
            raise _cut_short(tensor.quantizer, size, tile_size)
        block.append(min(tile_size or size, size))
    scale = parts[SCALE].view([size // max(tile_size, 1) for size, tile_size in zip(tensor.shape, block, strict=True)])
    return cast(torch.Tensor, Float8Tensor(parts[DATA], scale, block_size=block, dtype=tensor.dtype))


def _nvfp4_of(tensor: QuantizedTensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    encoding = tensor.quantizer.encoding
    if encoding.scale_max != NVFP4_ENCODING.scale_max:
        raise _unequal(str(tensor.quantizer), f"torchao uses block scales up to {NVFP4_ENCODING.scale_max} only")
    total = (parts[AMAX].double() / _TOTAL).float()
    total = total.reshape(()) if tensor.dim() == _MATRIX else total.view(-1, 1, 1)
    return cast(torch.Tensor, NVFP4Tensor(parts[DATA], parts[SCALE], encoding.tile[1], tensor.dtype, total))


def _cut_short(quantizer: Quantizer, size: int, step: int) -> TransaxleError:
    return _unequal(str(quantizer), f"torchao needs whole tiles, but {size} is not a multiple of {step}")


def _float8(source: Any) -> tuple[Quantizer, dict[str, torch.Tensor]]:
    *leading, rows, columns = source.qdata.shape
    block, code = list(source.block_size), _CODES[source.qdata.dtype]
    if len(block) != len(leading) + _MATRIX or any(step != 1 for step in block[:-2]):
        raise _unequal(
            "Float8Tensor", f"one scale covers {block} of {list(source.qdata.shape)}, which is more than a matrix"
        )
    high, wide = block[-2:]
    scale = source.scale.view(*leading, -(-rows // high), -(-columns // wide))
    if scale.dtype != torch.float32:
        raise _unequal("Float8Tensor", f"its scales are {scale.dtype}, not float32")
    if (high, wide) == (rows, columns):
        return Float8CurrentScaling(code=code), {DATA: source.qdata, SCALE: scale.flatten(-2)}
    if high == 1 and wide == columns and columns <= _WIDEST:
        wide = 1 << (columns - 1).bit_length()
    if high & (high - 1) or wide & (wide - 1) or high * wide > _WIDEST:
        raise _unequal(
            "Float8Tensor", f"its blocks of {high} x {wide} must be powers of two, of at most {_WIDEST} elements"
        )
    return Float8Block(block=(high, wide), code=code, power_of_two=False), {DATA: source.qdata, SCALE: scale}


def _mx(source: Any) -> tuple[Quantizer, dict[str, torch.Tensor]]:
    code = _CODES.get(source.elem_dtype)
    quantizer = MXFP8(code="F8_E4M3" if code is None else code)
    if code is None or source.block_size != quantizer.encoding.tile[1]:
        raise _unequal(
            "MXTensor",
            f"it has elements of {source.elem_dtype}, {source.block_size} to a scale; only mxfp8 can be read",
        )
    return quantizer, {DATA: source.qdata, SCALE: _scales(source, source.block_size)}


def _nvfp4(source: Any) -> tuple[Quantizer, dict[str, torch.Tensor]]:
    if source.block_size != NVFP4_ENCODING.tile[1]:
        raise _unequal("NVFP4Tensor", f"it has {source.block_size} elements to a scale, not {NVFP4_ENCODING.tile[1]}")
    leading = source.qdata.shape[:-2]
    global_scale = source.per_tensor_scale
    if global_scale is None:  # torchao multiplies by no global scale
        global_scale = torch.ones((), device=source.qdata.device)
    if global_scale.numel() not in (1, leading.numel()) or (leading.numel() > 1 and global_scale.numel() == 1):
        raise _unequal(
            "NVFP4Tensor", f"it has {global_scale.numel()} global scales for a stack of {leading.numel()} matrices"
        )
    global_scale = global_scale.float().reshape(*leading, 1)
    amax = (global_scale.double() * _TOTAL).float()
    if not torch.equal((amax.double() / _TOTAL).float(), global_scale):
        raise refuse(
            "LOSSY",
            f"no float32 amax gives the global scale {global_scale.tolist()}",
            hint="Quantize the values that dequantize() gives.",
        )
    return NVFP4(), {DATA: source.qdata.view(torch.uint8), SCALE: _scales(source, source.block_size), AMAX: amax}


def _scales(source: Any, block: int) -> torch.Tensor:
    """Return one row of scales per row of codes, in the order of tiles; swizzled input scales are in blocks of
    128 x 4.
    """
    *leading, rows, columns = source.shape
    scale: torch.Tensor = source.scale
    across = columns // block
    if not source.is_swizzled_scales:
        return scale.view(*leading, rows, across)
    high, wide = -(-torch.Size((*leading, rows)).numel() // 128), -(-across // 4)
    raw = scale.contiguous().view(torch.uint8).reshape(high, wide, 32, 4, 4)
    compact = raw.permute(0, 3, 2, 1, 4).reshape(high * 128, wide * 4)
    return compact[: torch.Size((*leading, rows)).numel(), :across].reshape(*leading, rows, across).view(scale.dtype)


def _unequal(kind: str, why: str, *, hint: str = "Quantize the values that dequantize() gives.") -> TransaxleError:
    return refuse("UNSUPPORTED", f"{kind} has no exact equivalent: {why}", hint=hint)


_READERS = {"Float8Tensor": _float8, "MXTensor": _mx, "NVFP4Tensor": _nvfp4}
