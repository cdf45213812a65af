"""Parses the quantization section of a config, for each `quant_method`, into a description of how weights are stored.

For each method, one function converts the section into groups of modules, each group with one encoding. The fields and
their defaults are those of transformers 5.24 (`fp8`, `mxfp4`, `torchao`), compressed-tensors 0.20 and ModelOpt's
exports. A field of the wrong type is refused with the code CORRUPT. An unknown value is refused with the code
UNSUPPORTED, as is an unknown field, because such a field may mean that weights are rotated or scaled.

**Lists of modules** in config files are matched as the library that wrote the config would match them. Three kinds of
lists are known. In transformers, an entry is a regular expression that must end at a module boundary, or a suffix of
names. In compressed-tensors, an entry is a whole name, or `re:` and a regular expression. In ModelOpt, an entry may
contain wildcards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from transaxle.encodings.conventions.convention import (
    COMPRESSED_TENSORS,
    DEEPSEEK,
    DEEPSEEK_V4,
    GPT_OSS,
    MODELOPT,
    PACKED_BYTES,
    TORCHAO,
    WORDS,
)
from transaxle.encodings.conventions.linear_regex import Expressions
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, INT4, INT8, MXFP4, MXFP8, NVFP4, WHOLE, Encoding
from transaxle.errors import Refusal, Where, gathered, refuse

EXPRESSION = "re:"
"""Prefix that marks a regular expression in module lists of compressed-tensors."""


class Modules(msgspec.Struct, frozen=True, dict=True):
    """A list of modules from a config file, matched as the library that wrote the config would match it."""

    names: frozenset[str] = frozenset()
    """Full names of listed modules."""
    inside: bool = False
    """Whether an entry of `names` also matches the modules inside the named module, and all module names that end with
    the entry.
    """
    expressions: Expressions | None = None
    """Regular expressions that match further modules; None if the list has no regular expressions."""
    until: Literal["anywhere", "segment", "end"] = "anywhere"
    """Where in a module name the match of an expression must end."""

    def __contains__(self, module: str) -> bool:
        """Return whether the list matches a module name.

        Raises:
            PatternError: if matching an expression takes too long.
        """
        if self.names and (module in self.names or (self.inside and self._inside(module))):
            return True
        if self.expressions is None or not self.expressions.match(module):
            return False
        return self.until == "anywhere" or any(self.expressions.ends_at(module, at) for at in self._ends(module))

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(sorted({len(name) for name in self.names}))

    def _inside(self, module: str) -> bool:
        dots = (at for at, letter in enumerate(module) if letter == ".")
        starts = (module[:end] for at in dots for end in (at, at + 1))
        return any(start in self.names for start in starts) or any(module[-n:] in self.names for n in self._lengths)

    def _ends(self, module: str) -> Iterator[int]:
        """Yield the positions in a module name at which the match of an expression may end."""
        yield len(module)
        if self.until == "segment":
            for at, letter in enumerate(module):
                if letter == ".":
                    yield from (at, at + 1)


def transformers_modules(texts: Iterable[str]) -> Modules:
    """Parse a list such as `modules_to_not_convert`, as `should_convert_module` of transformers 5.24 does.

    An entry is the name of a module, which includes all modules inside it, or the end of a module name, or a regular
    expression. A dot in a name matches only a dot, whereas in transformers it matches any character.

    Raises:
        PatternError: if an entry of the list is a malformed regular expression.
    """
    listed = frozenset(text for text in texts if text)
    expressions = sorted(text for text in listed if set(text) & _SPECIAL)
    return Modules(listed, inside=True, expressions=Expressions(expressions) if expressions else None, until="segment")


def compressed_modules(texts: Iterable[str]) -> Modules:
    """Parse a module list of compressed-tensors: full names, and regular expressions after `re:`.

    Raises:
        PatternError: if an entry of the list is a malformed regular expression.
    """
    listed = frozenset(texts)
    expressions = sorted(text.removeprefix(EXPRESSION) for text in listed if text.startswith(EXPRESSION))
    return Modules(listed, expressions=Expressions(expressions) if expressions else None)


def wildcard_modules(texts: Iterable[str]) -> Modules:
    """Parse a module list of ModelOpt, in which `*` matches any characters and `?` matches one character."""
    listed = frozenset(texts)
    wild = sorted(text for text in listed if set(text) & _WILD.keys())
    expressions = ["".join(_WILD.get(letter) or _escape(letter) for letter in text) for text in wild]
    return Modules(listed, expressions=Expressions(expressions) if expressions else None, until="end")


_SPECIAL = frozenset("\\^$*+?{}[]()|")
_WILD = {"*": ".*", "?": "."}


def _escape(letter: str) -> str:
    return letter if letter.isalnum() else "\\" + letter


SECTION = "quantization_config"
"""Config key of the quantization section in config.json."""
METHOD = "quant_method"
"""Key of the quantization method inside the section."""
GROUPS = "config_groups"
"""Key of the groups of modules inside a section of compressed-tensors."""
EXPERT_DTYPE = "expert_dtype"
"""Key of the format of routed experts inside a section of the method `fp8`, or beside it."""
LINEAR = "Linear"
"""Class name that groups in a compressed-tensors section usually target."""
FP8, COMPRESSED = "fp8", "compressed-tensors"
MXFP4_METHOD, TORCHAO_METHOD, MODELOPT_METHOD = "mxfp4", "torchao", "modelopt"

CHANNEL = replace(FLOAT8, tile=(1, WHOLE))
"""Variant of the float8 encoding with one scale per row."""

CACHE = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Config keys for the quantization of cached keys and values. These keys do not affect weights, but an inference engine
that does not find the keys would store its cache in a different precision.
"""
UNKNOWN_KEY = (
    "To keep the tensors exactly as stored:  --to safetensors:identity.\n"
    "If the key does not concern the weights, remove it from the config."
)
"""Hint of the error for an unknown config key."""
_BESIDE_WEIGHTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        FP8: frozenset({METHOD, CACHE[0], "dequantize"}),
        MXFP4_METHOD: frozenset({METHOD, "dequantize"}),
        TORCHAO_METHOD: frozenset({
            METHOD, "include_input_output_embeddings", "quant_type", "quant_type_kwargs", "untie_embedding_weights",
        }),
        COMPRESSED: frozenset({
            METHOD, CACHE[0], "dequantize", "global_compression_ratio", "run_compressed", "use_optimized_inference",
            "version",
        }),
        MODELOPT_METHOD: frozenset({METHOD, *CACHE, "producer"}),
        GROUPS: frozenset({"input_activations", "output_activations"}),
        "weights": frozenset({"observer", "observer_kwargs", "zp_dtype"}),
        "quantized_layers": frozenset(),
    }
)  # fmt: skip
"""Method, or part of its section -> config keys that may be ignored, because they do not affect weights or repeat the
dtype of the codes.
"""

_E8M0 = "F8_E8M0"
_GROUP = 32
"""Number of elements that share one scale in the MX encodings."""

Positive = Annotated[int, msgspec.Meta(gt=0)]
_T = TypeVar("_T")


def variant(code: str, scale: str, tile: tuple[int, ...], *, has_global: bool = False) -> Encoding:
    """Return an encoding with these dtypes and this tile size, under the name of the most similar standard encoding."""
    if code == MXFP4.code:
        base = MXFP4 if scale == _E8M0 else NVFP4
    elif scale == _E8M0 and tile == MXFP8.tile:
        base = MXFP8
    else:
        base = FLOAT8 if tile[-1] == WHOLE and set(tile) <= {WHOLE, 1} else FLOAT8_BLOCK
    return replace(base, code=code, scale=scale, tile=tile, has_global=has_global)


class ModuleGroup(msgspec.Struct, frozen=True):
    """A group of modules whose weights have the same encoding."""

    encoding: Encoding
    """Encoding of the weights according to the config, except for the dtype of the scales, which the stored tensors
    determine.
    """
    modules: Modules | None
    """The modules, if the config lists names; None if it lists a class, whose modules the names do not show."""
    key: str = ""
    """Key of the group in the config section."""


class Scheme(msgspec.Struct, frozen=True):
    """The parsed contents of a config's quantization section."""

    conventions: tuple[str, ...]
    """Naming conventions (keys of `CONVENTIONS`) that the tensors may follow; empty if weights are stored plain."""
    groups: tuple[ModuleGroup, ...]
    """Groups of modules; if a module is in several groups, the first of them applies."""
    ignored: Modules
    """Modules whose weights are not quantized."""


_EXPERTS = r"re:(?:.*\.)?experts(?:\..*)?$"
"""Entry of a module list that matches the routed experts of all layers, numbered or stacked."""


class _Fp8(msgspec.Struct):
    """Fields of transformers' `FineGrainedFP8Config`; without a block size, each tensor has one scale."""

    weight_block_size: tuple[Positive, Positive] | None = (128, 128)
    activation_scheme: str = "dynamic"
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    scale_fmt: str | None = None
    fmt: str = "e4m3"
    expert_dtype: str = "fp8"


def _fp8(section: Mapping[str, Any], location: str) -> Scheme:
    fields = _fields(section, _Fp8, location, FP8)
    _check_known(fields.activation_scheme.lower(), ("dynamic", "static"), f"{location}.activation_scheme")
    _check_known(fields.scale_fmt or "float", ("float", "ue8m0"), f"{location}.scale_fmt")
    _check_known(fields.expert_dtype, ("fp8", "fp4"), f"{location}.{EXPERT_DTYPE}")
    _check_known(fields.fmt, ("e4m3", "float8_e4m3fn"), f"{location}.fmt")
    listed = fields.ignored_layers if fields.modules_to_not_convert is None else fields.modules_to_not_convert
    if fields.weight_block_size is None:
        encoding = FLOAT8
    else:
        exponents = fields.scale_fmt == "ue8m0" and fields.weight_block_size == MXFP8.tile
        encoding = variant(FLOAT8.code, _E8M0 if exponents else FLOAT8.scale, fields.weight_block_size)
    groups: tuple[ModuleGroup, ...] = (ModuleGroup(encoding, None),)
    if fields.expert_dtype == "fp4":
        groups = (ModuleGroup(MXFP4, compressed_modules([_EXPERTS])), *groups)
    return Scheme((DEEPSEEK, MODELOPT, DEEPSEEK_V4), groups, transformers_modules(listed or ()))


class _Mxfp4(msgspec.Struct):
    """Fields of transformers' `Mxfp4Config`: all experts are quantized, except those in the listed modules."""

    modules_to_not_convert: list[str] | None = None


def _mxfp4(section: Mapping[str, Any], location: str) -> Scheme:
    fields = _fields(section, _Mxfp4, location, MXFP4_METHOD)
    return Scheme((GPT_OSS,), (ModuleGroup(MXFP4, None),), transformers_modules(fields.modules_to_not_convert or ()))


class _TorchAo(msgspec.Struct):
    """Fields of transformers' `TorchAoConfig`; the metadata of each file describes which modules are quantized, and
    how.
    """

    modules_to_not_convert: list[str] | None = None


def _torchao(section: Mapping[str, Any], location: str) -> Scheme:
    fields = _fields(section, _TorchAo, location, TORCHAO_METHOD)
    return Scheme((TORCHAO,), (), transformers_modules(fields.modules_to_not_convert or ()))


class _CompressedWeights(msgspec.Struct):
    """Fields of compressed-tensors' `QuantizationArgs`."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    block_structure: list[int] | str | None = None
    dynamic: bool | str = False
    scale_dtype: str | None = None
    actorder: bool | str | None = None


class _CompressedGroup(msgspec.Struct):
    """Fields of compressed-tensors' `QuantizationScheme`."""

    targets: list[str]
    weights: _CompressedWeights | None = None
    format: str | None = None


class _Compressed(msgspec.Struct):
    """Fields of compressed-tensors' `QuantizationConfig`; instead of a group, the config may have a preset's name and
    its targets.
    """

    config_groups: dict[str, _CompressedGroup | list[str]]
    format: str = "fakequant"
    ignore: list[str] | None = None
    quantization_status: str = "initialized"
    sparsity_config: dict[str, Any] | None = None


_TENSOR, _CHANNEL, _BLOCK, _IN_GROUPS, _TENSOR_GROUP = "tensor", "channel", "block", "group", "tensor_group"
_DENSE = ("dense", "fakequant")
PACK_QUANTIZED, INT_QUANTIZED, _NAIVE = "pack-quantized", "int-quantized", "naive-quantized"
"""`format` of compressed-tensors for integers that are packed in words, for integers of one byte each, and for codes of
one byte of any type.
"""
WORD_CODES = "words"
"""Stands for the dtypes of codes that are packed in words: their number of bits determines the dtype."""
_FORMATS: Mapping[str, tuple[str, ...]] = {
    "float-quantized": (FLOAT8.code,),
    _NAIVE: (FLOAT8.code, INT8.code),
    "mxfp8-quantized": (FLOAT8.code,),
    "nvfp4-pack-quantized": ("F4",),
    "mxfp4-pack-quantized": ("F4",),
    PACK_QUANTIZED: (WORD_CODES,),
    INT_QUANTIZED: (INT8.code,),
    "mixed-precision": (),
}
"""`format` of compressed-tensors -> dtypes of the codes; none if each group states a format."""


def _float_weights(
    bits: int, strategy: str, size: int | None = None, block: list[int] | None = None
) -> _CompressedWeights:
    return _CompressedWeights(bits, "float", strategy=strategy, group_size=size, block_structure=block)


def _int_weights(bits: int, strategy: str, size: int | None = None, *, symmetric: bool = True) -> _CompressedWeights:
    return _CompressedWeights(bits, "int", symmetric=symmetric, strategy=strategy, group_size=size)


_PRESETS = {
    "FP8": _float_weights(8, _TENSOR),
    "FP8_DYNAMIC": _float_weights(8, _CHANNEL),
    "FP8_BLOCK": _float_weights(8, _BLOCK, block=[128, 128]),
    "NVFP4": _float_weights(4, _TENSOR_GROUP, 16),
    "NVFP4A16": _float_weights(4, _TENSOR_GROUP, 16),
    "MXFP4": _float_weights(4, _IN_GROUPS, _GROUP),
    "MXFP4A16": _float_weights(4, _IN_GROUPS, _GROUP),
    "MXFP4XFP8": _float_weights(4, _IN_GROUPS, _GROUP),
    "MXFP8": msgspec.structs.replace(_float_weights(8, _IN_GROUPS, _GROUP), scale_dtype="torch.uint8"),
    **dict.fromkeys(("W4A16", "W4A8", "W4AFP8", "W4A4"), _int_weights(4, _IN_GROUPS, 128)),
    "W4A16_ASYM": _int_weights(4, _IN_GROUPS, 128, symmetric=False),
    "W8A16": _int_weights(8, _IN_GROUPS, 128),
    **dict.fromkeys(("W8A8", "INT8"), _int_weights(8, _CHANNEL)),
    "MXFP8A16": msgspec.structs.replace(_float_weights(8, _IN_GROUPS, _GROUP), scale_dtype="torch.uint8"),
}
"""Name of a preset in compressed-tensors 0.20 -> encoding of weights, for presets that are supported."""


def _parse_compressed(section: Mapping[str, Any], location: str) -> Scheme:
    fields = _fields(section, _Compressed, location, COMPRESSED)
    _check_groups(section[GROUPS], location)
    sparsity = (fields.sparsity_config or {}).get("format", _DENSE[0])
    _check_known(str(sparsity), _DENSE, f"{location}.sparsity_config.format")
    groups_by_name, groups_by_class = [], []
    for key, spec in fields.config_groups.items():
        spot = f"{location}.{GROUPS}.{key}"
        if isinstance(spec, list):
            _check_known(key.upper(), _PRESETS, spot)
            group = _CompressedGroup(spec, _PRESETS[key.upper()])
        else:
            group = spec
        layout = group.format or fields.format
        _check_known(layout, (*_FORMATS, *_DENSE), f"{spot}.format" if group.format else f"{location}.format")
        if group.weights is None or layout in _DENSE:
            continue
        encoding = _encoding_of_weights(group.weights, f"{spot}.weights", layout)
        codes = _FORMATS[layout]
        if codes and (WORD_CODES if encoding.code in WORDS else encoding.code) not in codes:
            message = (
                f"{spot} stores codes of {encoding.code}, but its format {layout} has codes of {' or '.join(codes)}"
            )
            raise refuse("CORRUPT", message)
        by_name = [target for target in group.targets if not _is_class(target)]
        if by_name:
            groups_by_name.append(ModuleGroup(encoding, compressed_modules(by_name), key))
        if len(by_name) < len(group.targets):
            groups_by_class.append(ModuleGroup(encoding, None, key))
    conventions = (COMPRESSED_TENSORS,) if groups_by_name or groups_by_class else ()
    return Scheme(conventions, (*groups_by_name, *groups_by_class), compressed_modules(fields.ignore or ()))


def _is_class(target: str) -> bool:
    """Return whether a target is the name of a class (`Linear`); module names are in lower case, or have dots."""
    return target[:1].isupper() and "." not in target


def _encoding_of_weights(weights: _CompressedWeights, location: str, layout: str) -> Encoding:
    kind = f"{weights.type.lower()}{weights.num_bits}"
    _check_known(kind, ("float8", "float4", "int4", "int8"), f"{location} (type and num_bits)")
    is_integer = kind.startswith("int")
    if weights.dynamic or not (weights.symmetric or is_integer):
        settings = f"dynamic {weights.dynamic!r}, symmetric {weights.symmetric!r}"
        raise refuse("UNSUPPORTED", f"{location} is {settings}; known: weights that are stored, and symmetric")
    _check_known(weights.actorder or None, (None, "weight", "static"), f"{location}.actorder")
    strategy = weights.strategy or _infer_strategy(weights)
    if is_integer:
        return _integers(weights, strategy, location, layout)
    if kind == "float4":
        _check_known(strategy, (_IN_GROUPS, _TENSOR_GROUP), f"{location}.strategy")
        _check_known(weights.group_size, (16, _GROUP), f"{location}.group_size")
        if weights.group_size == _GROUP:
            return MXFP4
        return replace(NVFP4, has_global=strategy == _TENSOR_GROUP)
    _check_known(strategy, (_TENSOR, _CHANNEL, _BLOCK, _IN_GROUPS), f"{location}.strategy")
    if strategy == _IN_GROUPS:
        if not weights.group_size or weights.group_size < 0:
            raise refuse("CORRUPT", f"{location}.group_size is {weights.group_size!r}; expected a positive number")
        exponents = weights.group_size == _GROUP and str(weights.scale_dtype).endswith("uint8")
        return MXFP8 if exponents else variant(FLOAT8.code, FLOAT8.scale, (1, weights.group_size))
    if strategy == _BLOCK:
        return variant(FLOAT8.code, FLOAT8.scale, _block(weights.block_structure, f"{location}.block_structure"))
    return variant(FLOAT8.code, FLOAT8.scale, (WHOLE if strategy == _TENSOR else 1, WHOLE))


def _integers(weights: _CompressedWeights, strategy: str, location: str, layout: str) -> Encoding:
    """Return the encoding of integers; formats that do not pack them store one per byte, also those of four bits."""
    _check_known(strategy, (_TENSOR, _CHANNEL, _BLOCK, _IN_GROUPS), f"{location}.strategy")
    tile: tuple[int, ...] = (WHOLE if strategy == _TENSOR else 1, WHOLE)
    if strategy == _BLOCK:
        tile = _block(weights.block_structure, f"{location}.block_structure")
    elif strategy == _IN_GROUPS:
        if not weights.group_size or weights.group_size < 0:
            raise refuse("CORRUPT", f"{location}.group_size is {weights.group_size!r}; expected a positive number")
        tile = (1, weights.group_size)
    if layout in (INT_QUANTIZED, _NAIVE):
        return replace(INT8, tile=tile, zero_rows=int(not weights.symmetric))
    packed = INT4 if weights.num_bits == INT4.code_bits else replace(INT8, code=PACKED_BYTES)
    _check_known(strategy, (_CHANNEL, _IN_GROUPS), f"{location}.strategy of the format {PACK_QUANTIZED}")
    return replace(packed, tile=tile, zero_rows=0 if weights.symmetric else WORDS[packed.code])


def _infer_strategy(weights: _CompressedWeights) -> str:
    if weights.group_size is None:
        return _TENSOR
    return _CHANNEL if weights.group_size == -1 else _IN_GROUPS


def _block(blocks: list[int] | str | None, location: str) -> tuple[int, int]:
    parts = blocks.split("x") if isinstance(blocks, str) else blocks or []
    sizes = [int(length) if str(length).isdecimal() else 0 for length in parts]
    if len(sizes) != 2 or min(sizes) < 1:
        raise refuse("CORRUPT", f"{location} is {blocks!r}; expected two positive numbers, [rows, columns]")
    return sizes[0], sizes[1]


class _ModelOptLayer(msgspec.Struct):
    """ModelOpt's description of one layer, for models whose layers have different encodings."""

    quant_algo: str | None = None
    group_size: int | None = None
    has_zero_point: bool | None = None
    pre_quant_scale: bool | None = None


class _ModelOpt(_ModelOptLayer):
    """Fields of ModelOpt's exports, in `hf_quant_config.json` and, in newer versions, in config.json."""

    config_groups: dict[str, dict[str, Any]] | None = None
    """Contains the same description a second time, in the format of compressed-tensors."""
    exclude_modules: list[str] | None = None
    ignore: list[str] | None = None
    quantized_layers: dict[str, _ModelOptLayer] | None = None


MIXED = "MIXED_PRECISION"
ALGORITHM_NVFP4, WEIGHT_ONLY_NVFP4 = "NVFP4", "W4A16_NVFP4"
"""ModelOpt's algorithms for nvfp4 weights: with quantized inputs, for which layers have a scale, and without."""
ALGORITHMS = {
    "FP8": FLOAT8,
    "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL,
    "FP8_PB_WO": variant(FLOAT8.code, FLOAT8.scale, FLOAT8_BLOCK.tile),
    "MXFP8": MXFP8,
    ALGORITHM_NVFP4: NVFP4,
    WEIGHT_ONLY_NVFP4: NVFP4,
}
"""ModelOpt's `quant_algo` -> encoding of the weights."""


def _modelopt(section: Mapping[str, Any], location: str) -> Scheme:
    fields = _fields(section, _ModelOpt, location, MODELOPT_METHOD)
    _check_groups(fields.config_groups or {}, location)
    _check_plain_products(fields, location)
    ignored = wildcard_modules(fields.exclude_modules or fields.ignore or ())
    algorithm = fields.quant_algo
    if algorithm is None:
        return Scheme((), (), ignored)
    if algorithm == MIXED:
        listed: dict[Encoding, list[str]] = {}
        for name, layer in (fields.quantized_layers or {}).items():
            spot = f"{location}.quantized_layers.{name}"
            _check_keys(section["quantized_layers"][name], _ModelOptLayer, spot, "quantized_layers")
            _check_plain_products(layer, spot)
            listed.setdefault(_algorithm(layer.quant_algo or "", layer.group_size, spot), []).append(name)
        groups = tuple(ModuleGroup(encoding, wildcard_modules(names)) for encoding, names in listed.items())
        return Scheme((MODELOPT,), groups, ignored)
    return Scheme((MODELOPT,), (ModuleGroup(_algorithm(algorithm, fields.group_size, location), None),), ignored)


def _check_plain_products(layer: _ModelOptLayer, location: str) -> None:
    """Refuse a layer for which weights or inputs are more than code times scale (zero points, additional scales)."""
    _check_known(layer.has_zero_point or False, (False,), f"{location}.has_zero_point")
    _check_known(layer.pre_quant_scale or False, (False,), f"{location}.pre_quant_scale")


def _algorithm(name: str, size: int | None, location: str) -> Encoding:
    _check_known(name, ALGORITHMS, f"{location}.quant_algo")
    encoding = ALGORITHMS[name]
    if encoding is NVFP4 and size is not None:
        _check_known(size, (NVFP4.tile[-1],), f"{location}.group_size")
    return encoding


METHODS: Mapping[str, Callable[[Mapping[str, Any], str], Scheme]] = MappingProxyType(
    {
        FP8: _fp8,
        COMPRESSED: _parse_compressed,
        MXFP4_METHOD: _mxfp4,
        TORCHAO_METHOD: _torchao,
        MODELOPT_METHOD: _modelopt,
    }
)
"""`quant_method` in the config -> function that parses sections of this method."""


def _fields(section: Mapping[str, Any], kind: type[_T], location: str, method: str) -> _T:
    """Parse the fields of a config section; refuse fields that are neither declared nor known to leave weights
    unaffected.
    """
    _check_keys(section, kind, location, method)
    try:
        return msgspec.convert(section, kind)
    except msgspec.ValidationError as error:
        raise refuse("CORRUPT", f"{location}: {error}") from None


def _check_groups(groups: object, location: str) -> None:
    """Refuse unknown keys in the groups of a compressed-tensors section; types of values are not checked."""
    for key, group in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            spot = f"{location}.{GROUPS}.{key}"
            _check_keys(group, _CompressedGroup, spot, GROUPS)
            weights = group.get("weights")
            _check_keys(
                weights if isinstance(weights, Mapping) else {}, _CompressedWeights, f"{spot}.weights", "weights"
            )


def _check_keys(section: Mapping[str, Any], kind: type[Any], location: str, part: str) -> None:
    """Refuse keys with a value that are neither fields of `kind` nor known to leave weights unaffected."""
    accepted_keys = {*kind.__struct_fields__, *_BESIDE_WEIGHTS[part]}
    unknown = [key for key, value in section.items() if key not in accepted_keys and not _is_empty(value)]
    if unknown:
        raise gathered(
            Refusal("UNSUPPORTED", f"{location}.{key} {_MEANING.get(key, _UNKNOWN_MEANING)}", Where(None), UNKNOWN_KEY)
            for key in unknown
        )


def _is_empty(value: object) -> bool:
    """Return whether a config value has no content, such as `{"config_groups": {}}`."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
    return value is None or (inner is not None and all(map(_is_empty, inner)))


_UNKNOWN_MEANING = "is not known here, and may change what the weights stand for"
_MEANING = {
    "transform_config": "rotates weights and activations: codes times scales are not the values of the model",
}


def _check_known(value: object, accepted: Iterable[object], at: str) -> None:
    """Refuse a config value that is not one of the accepted values."""
    names = list(accepted)
    if value not in names:
        raise refuse("UNSUPPORTED", f"{at} is {value!r}; known: {', '.join(map(str, names))}")
