"""Parses the quantization section of a config for GPTQ, AWQ and bitsandbytes, whose tensors are shown in another form.

GPTQ and AWQ store integer codes with scales and zero points, as the format `pack-quantized` of compressed-tensors does,
but in another order and under other names. So a checkpoint of GPTQ or AWQ is read as the checkpoint of
compressed-tensors with the same codes, scales and zero points, and its section is read as the section that
compressed-tensors would have. The module `engine.views.packed_integers` shows the tensors. Those of bitsandbytes are
shown by `engine.views.bitsandbytes`, as codes and scales of blocks.

The fields are those of GPTQModel 7.7, AutoGPTQ 0.7, AutoAWQ 0.2, bitsandbytes 0.50 and transformers 5.24. As for other
methods, a field that may mean different values is refused, and so is an unknown field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from transaxle.encodings.conventions.convention import BITSANDBYTES
from transaxle.encodings.conventions.scheme import (
    COMPRESSED,
    GROUPS,
    INT_QUANTIZED,
    LINEAR,
    METHOD,
    METHODS,
    PACK_QUANTIZED,
    UNKNOWN_KEY,
    ModuleGroup,
    Modules,
    Scheme,
)
from transaxle.encodings.encoding import FP4, NF4
from transaxle.errors import Refusal, Where, gathered, refuse

GPTQ, AWQ, OF_BITSANDBYTES = "gptq", "awq", "bitsandbytes"
CONV1D_TYPES = frozenset({"clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"})
"""Model types of transformers 5.24 whose layers are `Conv1D`, with weights `[inputs, outputs]`."""
PACKED_METHODS: Mapping[str, str] = MappingProxyType({GPTQ: "GPTQ", AWQ: "AWQ", OF_BITSANDBYTES: "bitsandbytes"})
"""`quant_method` of the config -> name of the method in messages."""
PACKED_FILES: Mapping[str, str] = MappingProxyType({"quantize_config.json": GPTQ, "quant_config.json": AWQ})
"""Name of a file that has the fields of the section without a config around them -> `quant_method` of a file that does
not state it. AutoGPTQ and AutoAWQ wrote such files before config.json had a section; GPTQModel writes one besides.
"""
_T = TypeVar("_T", bound=msgspec.Struct)
PACKED_CODES = "qweight"
"""Last name segment of the codes of GPTQ and AWQ."""
QUANT_STATE = ".quant_state.bitsandbytes__"
"""Text between a weight's name and the type of its codes, in the name of the tensor that describes a 4-bit weight."""
ROW_SCALES = "SCB"
"""Last name segment of the scales of 8-bit weights of bitsandbytes."""
BLOCK_TYPES = {NF4.name: NF4, FP4.name: FP4}
"""bitsandbytes' name of a type of 4-bit codes -> encoding."""
BLOCK_SIZES = (64, 32, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of codes that may share a scale in bitsandbytes, the usual one first."""
BITS = (4, 8)
"""Bit widths of codes that are read."""
_FIRST, _SECOND = "gptq", "gptq_v2"
"""The two formats of GPTQ: the first one stores zero points minus one."""


class PackedMethod(msgspec.Struct, frozen=True):
    """How a checkpoint of GPTQ or AWQ stores its weights, according to its config."""

    name: str
    """The config's `quant_method`, `gptq` or `awq`."""
    bits: int
    """Number of bits of one code."""
    group: int
    """Number of consecutive input columns that share a scale; -1 for whole rows."""
    path: tuple[str, ...]
    """Config keys that lead to the section."""
    reordered: bool = False
    """Whether the columns of a group need not be neighbors (`desc_act`), so that `g_idx` is needed to read a value."""
    shift: int = 0
    """Number that is added to a stored zero point to get the zero point."""
    varied: bool = False
    """Whether bits and group sizes differ between modules (`dynamic`), so that shapes determine them."""
    symmetric: bool = False
    """Whether zero points may all be the middle one (`sym`), which only the tensors prove."""


STATED: Mapping[str, str] = MappingProxyType({
    "name": METHOD, "bits": "bits", "group": "group_size", "reordered": "desc_act", "shift": "checkpoint_format",
    "varied": "dynamic",
})  # fmt: skip
"""Field of `PackedMethod` on which values depend -> key of the section that states it."""


class Kind(msgspec.Struct, frozen=True):
    """Bits and group size of a module, as compressed-tensors states them."""

    bits: int
    group: int
    """Number of columns of a group; -1 for whole rows."""


class _Gptq(msgspec.Struct):
    """Fields of GPTQModel's `QuantizeConfig` and transformers' `GPTQConfig` that affect weights."""

    bits: int
    group_size: int = 128
    desc_act: bool | None = False
    sym: bool = True
    checkpoint_format: str | None = None
    format: str | None = None
    pack_dtype: str = "int32"
    is_marlin_format: bool | None = None
    dynamic: dict[str, Any] | None = None


class _Awq(msgspec.Struct):
    """Fields of AutoAWQ's and transformers' `AwqConfig` that affect weights; older files have other names for them."""

    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    zero_point: bool = True
    version: str | None = None
    format: str | None = None
    backend: str | None = None
    pack_dtype: str = "int32"


_BESIDE_WEIGHTS: Mapping[str, frozenset[str]] = MappingProxyType({
    GPTQ: frozenset({
        METHOD, "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
        "damp_auto_increment", "damp_percent", "dataset", "disable_exllama", "exllama_config", "lm_head",
        "max_input_length", "meta", "method", "model_file_base_name", "model_name_or_path", "model_seqlen",
        "module_name_preceding_first_block", "modules_in_block_to_quantize", "mse", "pad_token_id", "static_groups",
        "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "version",
    }),
    AWQ: frozenset({
        METHOD, "act_group_aware", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_percent",
        "dataset", "desc_act", "do_fuse", "exllama_config", "fuse_max_seq_len", "lm_head", "max_input_length", "meta",
        "method", "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize",
        "modules_to_fuse", "modules_to_not_convert", "pad_token_id", "sym", "tokenizer", "true_sequential",
    }),
    OF_BITSANDBYTES: frozenset({
        METHOD, "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage",
        "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
        "llm_int8_skip_modules", "llm_int8_threshold",
    }),
})  # fmt: skip
"""Method -> config keys that may be ignored: settings of the search for codes, and of the program that runs the model.
AWQ's search scales the columns of weights, but folds the scales into the layers before, so values are complete.
"""


class _BitsAndBytes(msgspec.Struct):
    """Fields of transformers' `BitsAndBytesConfig` that affect weights."""

    load_in_4bit: bool | None = None
    load_in_8bit: bool | None = None
    bnb_4bit_quant_type: str = FP4.name


def parse_packed(section: Mapping[str, Any], path: tuple[str, ...]) -> PackedMethod | None:
    """Parse the section of a checkpoint of GPTQ or AWQ; None for the section of another method.

    Args:
        section: the quantization section of the config, or the content of a file that has nothing else.
        path: config keys that lead to the section; empty for such a file.

    Raises:
        Refused: with the code CORRUPT if the section is malformed, with the code UNSUPPORTED if it describes codes that
            are not read.
    """
    method = section.get(METHOD)
    return _gptq(section, path) if method == GPTQ else _awq(section, path) if method == AWQ else None


def _parse_as_compressed(section: Mapping[str, Any], location: str) -> Scheme:
    method = parse_packed(section, tuple(location.split(".")))
    assert method is not None
    return METHODS[COMPRESSED](make_section({Kind(method.bits, method.group): ()}), location)


def _bitsandbytes(section: Mapping[str, Any], location: str) -> Scheme:
    fields = _fields(section, _BitsAndBytes, f"{location}.", OF_BITSANDBYTES)
    if bool(fields.load_in_4bit) == bool(fields.load_in_8bit):
        message = f"{location}: load_in_4bit is {fields.load_in_4bit}, and load_in_8bit {fields.load_in_8bit}"
        raise refuse("CORRUPT", message)
    if fields.load_in_8bit:
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        groups = {"group_0": {"targets": [LINEAR], "weights": weights}}
        return METHODS[COMPRESSED]({METHOD: COMPRESSED, "format": INT_QUANTIZED, GROUPS: groups}, location)
    _check(fields.bnb_4bit_quant_type, tuple(BLOCK_TYPES), f"{location}.bnb_4bit_quant_type")
    encoding = BLOCK_TYPES[fields.bnb_4bit_quant_type]
    groups_of_blocks = tuple(ModuleGroup(replace(encoding, tile=(1, size)), None) for size in BLOCK_SIZES)
    return Scheme((BITSANDBYTES,), groups_of_blocks, Modules())


PACKED_PARSERS: Mapping[str, Callable[[Mapping[str, Any], str], Scheme]] = MappingProxyType(
    {GPTQ: _parse_as_compressed, AWQ: _parse_as_compressed, OF_BITSANDBYTES: _bitsandbytes}
)
"""`quant_method` in the config -> function that parses sections of this method, as in `METHODS`."""


def make_section(kinds: Mapping[Kind, Iterable[str]]) -> dict[str, Any]:
    """Return the section with which compressed-tensors describes packed integers with zero points.

    Args:
        kinds: kind of weight -> modules with such weights. With one kind, the section lists classes, not modules.
    """
    groups: dict[str, Any] = {}
    for number, (kind, modules) in enumerate(kinds.items()):
        weights = {"num_bits": kind.bits, "type": "int", "symmetric": False, "dynamic": False}
        weights |= {"strategy": "channel"} if kind.group < 0 else {"strategy": "group", "group_size": kind.group}
        targets = [LINEAR] if len(kinds) == 1 else sorted(modules)
        groups[f"group_{number}"] = {"targets": targets, "weights": weights, "input_activations": None}
    return {
        METHOD: COMPRESSED,
        "format": PACK_QUANTIZED,
        "quantization_status": "compressed",
        "ignore": [],
        GROUPS: groups,
    }


def with_section(config: Mapping[str, Any], path: tuple[str, ...], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which a section is replaced."""
    first, *inner_path = path
    inner = with_section(config[first], tuple(inner_path), section) if inner_path else dict(section)
    return {**config, first: inner}


def _gptq(section: Mapping[str, Any], path: tuple[str, ...]) -> PackedMethod:
    at = "".join(f"{key}." for key in path)
    fields = _fields(section, _Gptq, at, GPTQ)
    stated = [name.lower() for name in (fields.checkpoint_format, fields.format) if name]
    if len(set(stated)) > 1:
        raise refuse("CORRUPT", f"{at}checkpoint_format is {stated[0]!r}, but {at}format is {stated[1]!r}")
    form = stated[0] if stated else _FIRST
    _check(form, (_FIRST, _SECOND), f"{at}checkpoint_format")
    _check(bool(fields.is_marlin_format), (False,), f"{at}is_marlin_format")
    _check(fields.bits, BITS, f"{at}bits")
    _check_common(fields.pack_dtype, fields.group_size, at)
    shift = 1 if form == _FIRST else 0
    varied = bool(fields.dynamic)
    # One group has all columns, in whatever order.
    reordered, symmetric = bool(fields.desc_act) and (fields.group_size != -1 or varied), fields.sym or varied
    return PackedMethod(GPTQ, fields.bits, fields.group_size, path, reordered, shift, varied, symmetric)


def _awq(section: Mapping[str, Any], path: tuple[str, ...]) -> PackedMethod:
    at = "".join(f"{key}." for key in path)
    fields = _fields(section, _Awq, at, AWQ)
    bits = _join_stated((fields.bits, fields.w_bit), 4, f"{at}bits")
    group = _join_stated((fields.group_size, fields.q_group_size), 128, f"{at}group_size")
    version = fields.version or fields.format or "gemm"
    if fields.backend == "llm-awq":
        version = fields.backend
    _check(version.lower(), ("gemm",), f"{at}version")
    _check(bits, (4,), f"{at}bits")
    _check(fields.zero_point, (True,), f"{at}zero_point")
    _check_common(fields.pack_dtype, group, at)
    return PackedMethod(AWQ, bits, group, path)


def _check_common(dtype: str, group: int, at: str) -> None:
    _check(dtype, ("int32",), f"{at}pack_dtype")
    if group != -1 and group < 1:
        raise refuse("CORRUPT", f"{at}group_size is {group}; expected -1 or a positive number")


def _join_stated(values: tuple[int | None, int | None], default: int, at: str) -> int:
    stated = {value for value in values if value is not None}
    if len(stated) > 1:
        raise refuse("CORRUPT", f"{at} is stated twice: {values[0]} and {values[1]}")
    return stated.pop() if stated else default


def _fields(section: Mapping[str, Any], kind: type[_T], at: str, method: str) -> _T:
    accepted = {*kind.__struct_fields__, *_BESIDE_WEIGHTS[method]}
    unknown = [key for key, value in section.items() if key not in accepted and value not in (None, False, {}, [])]
    if unknown:
        message = "is not known here, and may change what the weights stand for"
        raise gathered(Refusal("UNSUPPORTED", f"{at}{key} {message}", Where(None), UNKNOWN_KEY) for key in unknown)
    try:
        return msgspec.convert({key: value for key, value in section.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise refuse("CORRUPT", f"{at[:-1]}: {error}" if at else str(error)) from None


def _check(value: object, accepted: tuple[object, ...], at: str) -> None:
    if value not in accepted:
        hint = "To keep the tensors exactly as stored:  --to safetensors:identity."
        raise refuse("UNSUPPORTED", f"{at} is {value!r}; known: {', '.join(map(str, accepted))}", hint=hint)
