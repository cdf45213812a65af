"""Restating: the same values in the buffers of a different convention or encoding, without any rounding.

Conventions store the same codes and block scales, but differ in the numbers beside them. The per-tensor scale of
nvfp4 is a factor in ModelOpt, a divisor in compressed-tensors and an amax in TransformerEngine. No float32 number is
the exact inverse of most others, so a number counts as restated if all products of a code and a block scale decode to
the same values as before.

A **recoding** stores the values in a different encoding. It is exact because the new codes and scales represent the
same numbers: every E2M1 value is also an E4M3 value, and a power of two may be a scale of several encodings.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transaxle.encodings.conventions.convention import (
    COMPRESSED_TENSORS,
    CONVENTIONS,
    DEEPSEEK,
    GPT_OSS,
    MODELOPT,
    PACKED_BYTES,
    TE,
    TORCHAO,
    WORDS,
    Convention,
    GlobalMeaning,
    products_under,
)
from transaxle.encodings.conventions.quantization import NESTED, OLD_SECTION, Quantization, module_of
from transaxle.encodings.conventions.scheme import (
    CACHE,
    CHANNEL,
    COMPRESSED,
    FP8,
    GROUPS,
    METHOD,
    MODELOPT_METHOD,
    SECTION,
)
from transaxle.encodings.encoding import (
    FLOAT8,
    FLOAT8_BLOCK,
    INT4,
    INT8,
    INTEGER_CODES,
    MXFP4,
    MXFP8,
    NVFP4,
    WHOLE,
    EncodedTensor,
    Encoding,
    Role,
    Wide,
)
from transaxle.errors import refuse

TRANSFORMERS_FP8 = "transformers_fp8"
"""Name under which users may request `deepseek`: transformers' `FineGrainedFP8Config` reads DeepSeek's files."""
BF16 = "bf16"
"""Target of restating for which tensors are decoded, and refused if a value is not exact in this dtype."""
RESTATED_CONVENTIONS: Mapping[str, str] = MappingProxyType(
    {name: name for name in (COMPRESSED_TENSORS, MODELOPT, DEEPSEEK, GPT_OSS, TE, TORCHAO)}
    | {TRANSFORMERS_FP8: DEEPSEEK}
)
"""Target of restating -> convention in which the tensors are stored."""
RECODINGS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        MXFP8.name: frozenset({MXFP4.name}),
        FLOAT8_BLOCK.name: frozenset({MXFP4.name}),
        NVFP4.name: frozenset({MXFP4.name}),
        INT8.name: frozenset({INT4.name}),
    }
)
"""Target of restating -> encodings that can be recoded exactly to the encoding of this name."""
_CONFIG_DTYPES: Mapping[str, Wide] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_AT_ONCE = 256
"""Number of matrices that are compared at once, to limit the memory used."""
_NEIGHBOURS = 4
"""Number of float32 numbers on each side of the nearest one that are tried as a per-tensor scale."""


def input_meaning(convention: Convention, encoding: Encoding) -> GlobalMeaning:
    """Return whether a convention stores the scale of a layer's inputs as a factor or as its inverse, a divisor."""
    return "divisor" if convention.name == COMPRESSED_TENSORS and encoding.code_bits < 8 else "factor"


_WIDENED = INTEGER_CODES[PACKED_BYTES] - INTEGER_CODES[INT4.code]
"""Number that is added to a stored 4-bit integer to store it in a byte."""


def widen_integers(halves: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the bytes in which the integers of packed 4-bit codes are stored, for codes `u8[…, n]`: `u8[…, 2 n]`."""
    from transaxle.encodings.arithmetic.codes import split_halves

    return split_halves(halves) + np.uint8(_WIDENED)


def widen_zero_points(words: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
    """Return the zero points of a matrix in words of four bytes instead of words of eight 4-bit integers.

    Args:
        words: the bytes of the words, `u8[ceil(rows / 8), groups, 4]`.
        rows: number of rows of the matrix; words are padded with zeros.

    Returns:
        The bytes of the new words, `u8[ceil(rows / 4), groups, 4]`.
    """
    per_row = widen_integers(words).transpose(0, 2, 1).reshape(-1, words.shape[1])
    per_row[rows:] = 0
    count = -(-rows // WORDS[PACKED_BYTES])
    per_word = per_row[: count * WORDS[PACKED_BYTES]].reshape(count, WORDS[PACKED_BYTES], -1)
    return np.ascontiguousarray(per_word.transpose(0, 2, 1))


def expects_input_scales(convention: Convention, encoding: Encoding) -> bool:
    """Return whether programs that read a convention expect a scale of the inputs of every layer of an encoding.

    vLLM and SGLang quantize the inputs of ModelOpt's `FP8` with a stored scale only, and take a missing one for the
    number that the memory contains.
    """
    return convention.name == MODELOPT and encoding.name == FLOAT8.name and set(encoding.tile) == {WHOLE}


_CACHE_SCALES: Mapping[str, tuple[re.Pattern[str], str]] = MappingProxyType({
    COMPRESSED_TENSORS: (re.compile(r"(.*\.)([kv])_proj\.\2_scale"), r"\1\2_scale"),
    MODELOPT: (re.compile(r"(.*\.)([kv])_scale"), r"\1\2_proj.\2_scale"),
})  # fmt: skip
"""Convention -> names of scales of cached keys and values in the other convention, and their names in this one."""


def cache_scale_names(names: Collection[str], convention: str) -> dict[str, str]:
    """Return stored name -> name in a convention, for scales of cached keys and values with another name in it.

    compressed-tensors has them in the attention (`self_attn.k_scale`), ModelOpt in the projection
    (`self_attn.k_proj.k_scale`). A name stays if the attention has no such projection.
    """
    pattern, new = _CACHE_SCALES.get(convention, (None, ""))
    if pattern is None:
        return {}
    modules = {module_of(name) for name in names}
    matches = ((name, pattern.fullmatch(name)) for name in names)
    return {name: match.expand(new) for name, match in matches if match and f"{match[1]}{match[2]}_proj" in modules}


class RestatedNumbers(msgspec.Struct, frozen=True):
    """Per-tensor scales of a convention, computed from those of a different convention."""

    numbers: NDArray[np.float32]
    """The scales, one for each matrix."""
    is_exact: NDArray[np.bool_]
    """Whether every product of a code and a block scale decodes to the same value as before."""
    returns: NDArray[np.bool_]
    """Whether restating the scale back gives its original bytes."""


def restate_globals(
    numbers: NDArray[np.float32], encoding: Encoding, source: Convention, target: Convention, dtype: str
) -> RestatedNumbers:
    """Convert per-tensor scales from one convention to another.

    The nearest float32 number is chosen if it keeps all values, else a neighbour that keeps them. If any float32 number
    returns to the original bytes, the nearest one does: where the inverses of floats lie closer together than the
    floats, the error of the nearest is below half a step of the original, and elsewhere it is the only one that may.

    Args:
        numbers: per-tensor scale of each matrix, as an array of one dim.
        encoding: encoding of the matrices in the source.
        source: convention of the given scales.
        target: convention of the returned scales.
        dtype: safetensors code of the dtype in which values are compared.
    """
    ends = _End(source, encoding), _End(target, encoding_in(encoding, target))
    restated = _nearest(numbers, *ends)
    if source.meaning == "amax":
        restated[numbers == 0] = 1  # all codes are 0
    is_exact = np.ones(len(numbers), np.bool_)
    for start in range(0, len(numbers), _AT_ONCE):
        batch = slice(start, start + _AT_ONCE)
        before = _values_under(numbers[batch], ends[0], dtype)
        is_exact[batch] = _equal_rows(before, _values_under(restated[batch], ends[1], dtype))
        for number in np.flatnonzero(~is_exact[batch]):
            near = _neighbours(restated[start + number])
            fitting = np.flatnonzero(_equal_rows(before[number : number + 1], _values_under(near, ends[1], dtype)))
            if len(fitting):
                restated[start + number] = near[fitting[0]]
                is_exact[start + number] = True
    if source.meaning == "amax":
        is_exact |= numbers == 0
    returns = is_exact & (_nearest(restated, *reversed(ends)).view(np.uint32) == numbers.view(np.uint32))
    return RestatedNumbers(restated, is_exact, returns)


def encoding_in(encoding: Encoding, convention: Convention) -> Encoding:
    """Return an encoding with the largest block scale of a convention."""
    return replace(encoding, scale_max=convention.scale_max) if encoding.has_global else encoding


class _End(msgspec.Struct, frozen=True):
    """The source or the target of restating: a convention, and the encoding of a tensor in it."""

    convention: Convention
    encoding: Encoding

    @property
    def top(self) -> np.float32:
        """Largest product of a code and a block scale."""
        return np.float32(self.encoding.scale_max * self.encoding.code_max)


def _nearest(numbers: NDArray[np.float32], source: _End, target: _End) -> NDArray[np.float32]:
    """Return the exact per-tensor scales of the target, rounded once to float32."""
    meanings = source.convention.meaning, target.convention.meaning
    with np.errstate(all="ignore"):
        if meanings in (("factor", "divisor"), ("divisor", "factor")):
            return np.float32(1) / numbers
        if meanings == ("factor", "amax"):
            return numbers * target.top
        if meanings == ("divisor", "amax"):
            return target.top / numbers
        if meanings == ("amax", "factor"):
            return numbers / source.top
        if meanings == ("amax", "divisor"):
            return source.top / numbers
        ratio = float(target.top) / float(source.top) if meanings == ("amax", "amax") else 1.0
        return (numbers.astype(np.float64) * ratio).astype(np.float32)


def _neighbours(number: np.float32) -> NDArray[np.float32]:
    """Return the float32 numbers around a number, the nearest first."""
    near, below, above = [number], number, number
    for _ in range(_NEIGHBOURS):
        below, above = np.nextafter(below, np.float32(0)), np.nextafter(above, np.float32(np.inf))
        near += [below, above]
    return np.array(near, np.float32)


def _values_under(numbers: NDArray[np.float32], end: _End, dtype: str) -> NDArray[Any]:
    """Return all values that codes and block scales can have under each of some per-tensor scales."""
    factors = [end.convention.factor(number, end.encoding) for number in numbers.tolist()]
    # Block scales above the source's limit do not occur, so both ends compare the products below the smaller limit.
    return products_under(factors, end.encoding, dtype).reshape(len(factors), -1)


def _equal_rows(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.bool_]:
    width = min(first.shape[1], second.shape[1])
    equal: NDArray[np.bool_] = (first[:, :width].view(np.uint8) == second[:, :width].view(np.uint8)).all(axis=1)
    return equal


def restate_inputs(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the inverses of input scales, rounded to float32, for a convention with the other meaning."""
    with np.errstate(all="ignore"):
        return (np.float32(1) / numbers.astype(np.float32)).astype(np.float32)


_STATIC_8: Mapping[str, Any] = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False,
}  # fmt: skip
_STATIC_4: Mapping[str, Any] = {
    "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
    "dynamic": "local",
}  # fmt: skip


def activations(encoding: Encoding, *, static: bool) -> dict[str, Any]:
    """Return how compressed-tensors describes the quantization of a layer's inputs (`input_activations`).

    Args:
        encoding: encoding of the layer's weight.
        static: whether the checkpoint has a scale for the inputs.
    """
    if encoding.code_bits < 8:
        return dict(_STATIC_4)
    if static:
        return dict(_STATIC_8)
    dynamic = {**_STATIC_8, "dynamic": True}
    if encoding.tile[-1] == WHOLE:
        return {**dynamic, "strategy": "token"}
    dtype = {"scale_dtype": "torch.uint8"} if encoding.name == MXFP8.name else {}
    return {**dynamic, "strategy": "group", "group_size": encoding.tile[-1], **dtype}


def quantizes_inputs(source: Quantization | None, tensor: EncodedTensor) -> bool:
    """Return whether programs that read the source also quantize the inputs of a tensor's layer."""
    if Role.INPUT_SCALE in tensor.parts:
        return True
    if source is not None and source.method == MODELOPT_METHOD:
        return tensor.encoding.name == MXFP8.name or tensor.encoding.tile == CHANNEL.tile
    return source is not None and source.method == FP8


_CACHE_OF = {
    COMPRESSED: {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
    MODELOPT_METHOD: {"num_bits": 8, "type": "float", "dynamic": False},
}
"""Quantization method -> its description of a cache of keys and values in FP8 with one scale per tensor."""


def check_cache(source: Quantization | None, target: Convention) -> None:
    """Refuse a config with a description of cached keys and values that the target's method cannot express.

    Raises:
        Refused: with the code UNSUPPORTED.
    """
    keys = [key for key in CACHE if source is not None and source.section.get(key)]
    if source is None or not keys or source.method == _METHOD_OF.get(target.name):
        return
    if _has_fp8_cache(source) and _METHOD_OF.get(target.name) in _CACHE_OF:
        return
    location = ".".join((*source.paths[0], keys[0]))
    message = f"{location} describes how keys and values are cached, which {target.name} cannot express"
    hint = f"If the cache is not to be quantized, remove {keys[0]} from the file."
    raise refuse("UNSUPPORTED", message, file=source.file, hint=hint)


_METHOD_OF = {COMPRESSED_TENSORS: COMPRESSED, MODELOPT: MODELOPT_METHOD, DEEPSEEK: FP8}
"""Convention -> quantization method in the config, if the method describes a cache."""


def _has_fp8_cache(source: Quantization) -> bool:
    """Return whether keys and values are cached in FP8 with one scale per tensor, as far as the config says."""
    algorithm, scheme = source.section.get(CACHE[1]), source.section.get(CACHE[0])
    if algorithm:
        return str(algorithm).upper() == "FP8"
    expected: Mapping[str, Any] = _CACHE_OF[COMPRESSED]
    pairs = scheme.items() if isinstance(scheme, Mapping) else ()
    stated = {key: value for key, value in pairs if value is not None and key in expected}
    return all(expected[key] == value for key, value in stated.items()) and {"num_bits", "type"} <= stated.keys()


def describe_inputs(
    config: Mapping[str, Any], source: Quantization | None, encoded: Mapping[str, EncodedTensor]
) -> dict[str, Any]:
    """Return a config that also says how inputs and cached keys and values are quantized, if the source's config says
    so.

    Args:
        config: the new config; its quantization section describes weights only.
        source: the quantization that the source's config describes.
        encoded: the tensors as they are stored in the source.
    """
    result = deepcopy(dict(config))
    for outer in (result, *(result[key] for key in NESTED if isinstance(result.get(key), dict))):
        for key in (SECTION, OLD_SECTION):
            if key in outer:
                outer[key] = _with_cache(_with_inputs(outer[key], source, encoded), source)
    return result


def _with_cache(section: Mapping[str, Any], source: Quantization | None) -> dict[str, Any]:
    cache = _CACHE_OF.get(str(section.get(METHOD)))
    is_described = any(section.get(key) for key in CACHE)
    if source is None or cache is None or is_described or not any(source.section.get(key) for key in CACHE):
        return dict(section)
    return {**section, CACHE[0]: dict(cache)}


def _with_inputs(
    section: Mapping[str, Any], source: Quantization | None, encoded: Mapping[str, EncodedTensor]
) -> dict[str, Any]:
    if section.get(METHOD) != COMPRESSED or (source is not None and source.method == COMPRESSED):
        return dict(section)
    by_code: dict[str, EncodedTensor] = {}
    weights_only: dict[str, EncodedTensor] = {}
    for tensor in encoded.values():
        (by_code if quantizes_inputs(source, tensor) else weights_only).setdefault(_kind(tensor.encoding), tensor)
    for kind in by_code.keys() & weights_only.keys():
        message = f"its inputs are not quantized, but those of {by_code[kind].name} are, in the same encoding"
        hint = (
            "To leave the tensors in their convention, omit --restate. For decoded values, write --decode bf16 instead."
        )
        raise refuse("UNSUPPORTED", message, tensor=weights_only[kind].name, hint=hint)
    groups = {}
    for key, group in section[GROUPS].items():
        weights = group.get("weights") or {}
        like = next((each for each in by_code.values() if _describes(weights, each.encoding)), None)
        inputs = group.get("input_activations")
        if like is not None and inputs is None:
            inputs = activations(like.encoding, static=Role.INPUT_SCALE in like.parts)
        groups[key] = {**group, "input_activations": inputs}
    return {**section, GROUPS: groups}


def _kind(encoding: Encoding) -> str:
    return f"{encoding.name} {encoding.tile}"


def _describes(weights: Mapping[str, Any], encoding: Encoding) -> bool:
    """Return whether the arguments of a group in a compressed-tensors section fit the weights of an encoding."""
    if weights.get("num_bits") != encoding.code_bits:
        return False
    tile = encoding.tile
    if weights.get("strategy") == "tensor":
        return set(tile) == {WHOLE}
    if weights.get("strategy") == "channel":
        return tile == (1, WHOLE)
    if weights.get("strategy") == "block":
        return list(tile) == weights.get("block_structure")
    return tile == (1, weights.get("group_size"))


_OF_TORCHAO = ((WHOLE, WHOLE), (1, WHOLE))
"""Tiles of float8 weights that a configuration object of torchao describes."""


def can_store(convention: Convention, encoding: Encoding) -> bool:
    """Return whether tensors of an encoding can be restated in a convention."""
    if convention.name == DEEPSEEK and encoding.tile == CHANNEL.tile:
        return False  # no config of its method describes a scale per row
    if convention.name != TORCHAO:
        return encoding.name in convention.writes
    return encoding.has_global or (encoding.name == FLOAT8.name and encoding.tile in _OF_TORCHAO)


def conventions_with(encoding: Encoding) -> Iterator[str]:
    """Yield the targets of restating in which tensors of an encoding can be stored."""
    for target, name in RESTATED_CONVENTIONS.items():
        if can_store(CONVENTIONS[name], encoding):
            yield target


def dtype_of_model(config: Mapping[str, Any]) -> Wide:
    """Return the dtype in which values are compared: the dtype of the model according to its config, or BF16."""
    for section in (config, *(config.get(key) or {} for key in NESTED)):
        for key in ("dtype", "torch_dtype"):
            if isinstance(section, Mapping) and section.get(key) in _CONFIG_DTYPES:
                return _CONFIG_DTYPES[section[key]]
    return "BF16"
