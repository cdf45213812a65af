"""Groups stored tensors (codes, scales) that together form one quantized tensor.

Names alone do not show which tensors are quantized: torchtitan stores gpt-oss in bf16 under the names `*_blocks`. The
config alone does not show which tensors are quantized either, because it lists modules and classes. So a tensor counts
as quantized if its name and dtype are those of codes, and its scales exist under the matching name, in the shape that
the config's tile size implies. A tensor that meets only some of these conditions is refused; every other tensor counts
as unquantized.

Each name is visited once, and the related names are looked up, so grouping takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from typing import Protocol

import msgspec

from transaxle.encodings.conventions.convention import (
    COMPRESSED_TENSORS,
    CONVENTIONS,
    DEEPSEEK,
    GPT_OSS,
    MODELOPT,
    TE,
    TE_HALVED,
    TORCHAO,
    WEIGHT,
    WORDS,
    Convention,
    NameForm,
    te_descriptions,
    training_only,
)
from transaxle.encodings.conventions.quantization import Quantization, module_of
from transaxle.encodings.conventions.scheme import CHANNEL, variant
from transaxle.encodings.conventions.torchao_convention import TensorDescription, read_descriptions
from transaxle.encodings.encoding import (
    FLOAT8,
    FLOAT8_BLOCK,
    FP4,
    INT4,
    INT8,
    MXFP4,
    MXFP8,
    NF4,
    NVFP4,
    WHOLE,
    EncodedTensor,
    Encoding,
    Role,
)
from transaxle.errors import Code, Refusal, TransaxleError, Where

Shape = tuple[int, ...]

_EIGHT = ("F8_E4M3", "F8_E5M2")
_FOUR = ("U8", "F4")
CODES = frozenset((*_EIGHT, *_FOUR))
"""Dtypes of tensors that may contain codes."""
_REALS = ("F32", "BF16", "F16")
_EXPONENTS = ("F8_E8M0", "U8")
_SCALES = {
    FLOAT8.name: _REALS,
    FLOAT8_BLOCK.name: (*_REALS, *_EXPONENTS),
    MXFP8.name: _EXPONENTS,
    MXFP4.name: _EXPONENTS,
    NVFP4.name: ("F8_E4M3",),
    **{encoding.name: _REALS for encoding in (INT4, INT8, NF4, FP4)},
}
"""Name of an encoding -> dtypes that its stored scales may have."""
_GUESSED = (DEEPSEEK, COMPRESSED_TENSORS, GPT_OSS, MODELOPT, TE, TE_HALVED)
"""Conventions that are recognised by names and dtypes alone if there is no config."""
_MX_COLUMNS = replace(MXFP8, tile=MXFP8.tile[::-1])
_LINES = tuple(replace(FLOAT8_BLOCK, tile=tile) for tile in ((1, 128), (128, 1)))
"""Encodings whose tiles are sections of one row or one column, which TransformerEngine stores under DeepSeek's
names.
"""
_WORD = "I32"
"""Dtype of the words in which integer codes are packed."""
_FLOATING = frozenset((*_EIGHT, "F4"))
"""Dtypes of codes that are floating-point numbers."""
_OTHERS = ("weight_zero_point", "weight_g_idx")
"""Name segments of buffers (zero points, group indices) whose presence means that a value is not simply code x scale.
"""
_INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32"})
SPEAKING = CODES | _INTEGERS
"""Dtypes that codes may have, in supported and in unsupported encodings."""
_PARAMETER = re.compile(r"(?:.*_)?(?:weight|bias|norm)\d*|_extra_state|lora_.*")
"""Pattern for the last name segment of ordinary parameters, of LoRA tensors, and of TransformerEngine's extra state."""
_OF_CACHE = frozenset({"k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "output_scale"})
"""Last name segments of scales for cached keys and values; these scales belong to no weight."""
_OF_QUANTIZERS = re.compile(r".*(?:scale|zero|g_idx|amax|quant|transform|hadamard|rotat|smooth).*")
"""Pattern for the last name segment of tensors that only a quantizer creates."""
_WITH_INTEGERS = frozenset({
    "weight_scale", "weight_scales", "weight_zero_point", "scale", "scales", "zero", "zeros", "biases", "tables", "SCB",
})  # fmt: skip
"""Last name segments of tensors that compressed-tensors, EETQ, MLX, HIGGS or bitsandbytes store beside integer codes
named `weight`.
"""
_PROGRAMS = {
    "qweight": "GPTQ or AWQ",
    "W_q": "HQQ",
    "weight_packed": "compressed-tensors",
    "Qidxs": "QuIP#",
    "q_weight": "EXL2",
    "trellis": "EXL3",
    "dense_weights": "SpQR",
}
"""Last name segment that only integer codes have -> program that stores such codes."""
_WITH_CONFIG = frozenset({"qweight", "weight_packed"})
"""Last name segments of integer codes that are read if a config describes them."""
_WITH = {"codes": ("codebooks", "AQLM"), "indices": ("centroids.weight", "VPTQ"), "B": ("s", "Marlin")}
"""Last name segment of integer codes -> (name of a second tensor in the same module, program that stores both)."""
_FLOATS = CONVENTIONS[COMPRESSED_TENSORS].four[Role.CODES].weight
"""Last name segment of packed 4-bit codes in compressed-tensors, for integer and for floating-point codes."""
_BELOW = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""Suffixes that bitsandbytes appends to a weight's name, after a dot, for its buffers."""
_BELOW_QUANTO = ("_data", "_scale", "_shift", "_zeropoint")
"""Suffixes that quanto appends to a weight's name, and ModelOpt to the name of the module that quantizes a weight."""
_OF_THEMSELVES = re.compile(
    r"(?:.*_)?(?:bias|coords?|counts?|grid|ids?|idx|index|indices|lengths?|map|mask|offsets?|positions?|rng(?:_state)?|shapes?|sizes?)"
)
"""Pattern for the last name segment of integer tensors that are indices, counts or masks, and therefore no codes."""


class StoredBuffer(Protocol):
    """Dtype and shape of a stored tensor, as a checkpoint's catalog lists them."""

    @property
    def dtype(self) -> str:
        """Dtype, as a safetensors code."""

    @property
    def shape(self) -> Shape:
        """Shape of the tensor as stored."""


class BufferGroups(msgspec.Struct, frozen=True):
    """The quantized tensors of a checkpoint, recognised by names, dtypes and the config together."""

    encoded: Mapping[str, EncodedTensor]
    """Tensor name without buffer suffixes -> quantized tensor; every stored tensor outside of these is unquantized."""
    refusals: tuple[Refusal, ...]
    """Errors for tensors that are neither valid quantized tensors nor unquantized tensors."""
    bare: tuple[str, ...] = ()
    """Names of tensors with a dtype of codes but without scales. Codes without scales count as unquantized tensors,
    which can be moved, but not decoded.
    """


def group(
    entries: Mapping[str, StoredBuffer],
    quantization: Quantization | None = None,
    metadata: Mapping[str, object] | None = None,
) -> BufferGroups:
    """Find the quantized tensors of a checkpoint.

    Args:
        entries: stored tensor name -> dtype and shape.
        quantization: the quantization that the config describes; None means that only names and dtypes are used.
        metadata: the files' metadata, in which torchao, and Transaxle's readers of TransformerEngine's pickles,
            describe tensors.

    Post-condition: no stored tensor is part of two quantized tensors, and the shape of each part fits the encoding.

    The refusals have these codes: MISSING_TENSOR for codes without scales, UNEXPECTED_TENSOR for scales without codes,
    DTYPE_MISMATCH and SHAPE_MISMATCH for buffers that do not fit together, NAME_COLLISION for two tensors with the same
    name in the rules, CORRUPT and UNSUPPORTED for torchao's metadata, UNSUPPORTED for further buffers and for lists of
    modules that take too long to match.
    """
    finder = _Finder(entries, quantization)
    try:
        for name, description in read_descriptions(metadata or {}).items():
            finder.take_described(name, description)
        for name, (convention, encoding) in te_descriptions(metadata or {}).items():
            if name in entries and entries[name].dtype in CODES:  # else it was decoded, and is plain
                finder.take(CONVENTIONS[convention], name, [encoding])
        for name, entry in entries.items():
            finder.take_integers(name, entry)
        codes_without_scales = [
            name for name, entry in entries.items() if entry.dtype in CODES and not finder.take_codes(name, entry)
        ]
        # The backward pass uses a second set of codes, with scales along columns, which has the same values as the
        # codes with scales along rows.
        finder.used.update(training_only([each.parts[Role.CODES] for each in finder.encoded.values()], entries))
        for name in codes_without_scales:
            if name not in finder.used:
                finder.take_codes_without_scales(name, entries[name])
        for name in entries:
            if name not in finder.used:
                finder.take_rest(name)
    except TransaxleError as error:
        finder.refusals.extend(error.refusals)
    return BufferGroups(finder.encoded, tuple(finder.refusals), tuple(finder.bare))


class _MisfitError(Exception):
    """Raised if buffers do not fit together as one quantized tensor."""

    def __init__(self, code: Code, name: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.refusal = Refusal(code, message, Where(None, name), hint)


class _Finder:
    """Finds the quantized tensors among the stored tensors of one checkpoint."""

    def __init__(self, entries: Mapping[str, StoredBuffer], quantization: Quantization | None) -> None:
        self.entries = entries
        self.quantization = quantization
        self.encoded: dict[str, EncodedTensor] = {}
        self.used: set[str] = set()
        self.refusals: list[Refusal] = []
        self.bare: list[str] = []
        names = _GUESSED if quantization is None else quantization.conventions
        self.conventions = [CONVENTIONS[name] for name in names if name != TORCHAO]

    def take_described(self, name: str, description: TensorDescription) -> None:
        """Add a quantized tensor that torchao's metadata describes."""
        self.used.update(stored for stored in description.parts if stored in self.entries)
        if description.encoding is None:
            self.refusals.extend(description.refusals)
        else:
            self.take(CONVENTIONS[TORCHAO], name, [description.encoding])

    def take_codes(self, name: str, entry: StoredBuffer) -> bool:
        """Add a tensor with a dtype of codes as a quantized tensor if its scales exist; return whether they exist."""
        if name in self.used:
            return True
        head, dot, segment = name.rpartition(".")
        eight = entry.dtype in _EIGHT
        for convention in self.conventions:
            forms = convention.eight if eight else convention.four
            inner = forms[Role.CODES].back(segment) if forms else None
            if inner is None:
                continue
            scale = self.entries.get(f"{head}{dot}{forms[Role.SCALE](inner)}")
            if scale is not None:
                table_name = f"{head}{dot}{inner}"
                self.take(convention, table_name, self._candidates(convention, table_name, entry, scale))
                return True
        return False

    def _candidates(
        self, convention: Convention, name: str, codes: StoredBuffer, scale: StoredBuffer
    ) -> list[Encoding]:
        """Return the encodings that a tensor may have, the likeliest first."""
        eight = codes.dtype in _EIGHT
        encodings: tuple[Encoding, ...] = ()
        if self.quantization is not None and self._is_of(convention):
            encodings = self.quantization.encodings(module_of(name))
        fitting = [encoding for encoding in encodings if (encoding.code_bits == 8) == eight]
        return fitting or _usual_encodings(convention, codes, scale)

    def take_integers(self, name: str, entry: StoredBuffer) -> None:
        """Add a tensor of integer codes as a quantized tensor, if the config says that its module has such codes."""
        if self.quantization is None or entry.dtype not in (_WORD, INT8.code) or name in self.used:
            return
        head, dot, segment = name.rpartition(".")
        for convention in self.conventions:
            if convention.pair == entry.dtype and self._take_pairs(convention, name, entry):
                return
            forms = convention.words if entry.dtype == _WORD else convention.eight
            inner = forms[Role.CODES].back(segment) if Role.ZERO in forms else None
            if inner is None or self._has_codes(forms, f"{head}{dot}", forms[Role.ZERO].back(segment)):
                continue
            encodings = self.quantization.encodings(module_of(f"{head}{dot}{inner}"))
            candidates = [e for e in encodings if e.is_integer and (e.code in WORDS) == (entry.dtype == _WORD)]
            if candidates:
                self.take(convention, f"{head}{dot}{inner}", candidates)
                return

    def _has_codes(self, forms: Mapping[Role, NameForm], head: str, inner: str | None) -> bool:
        """Return whether codes are stored for the tensor with this last segment."""
        return inner is not None and head + forms[Role.CODES](inner) in self.entries

    def _take_pairs(self, convention: Convention, name: str, entry: StoredBuffer) -> bool:
        """Add a tensor of pairs of 4-bit codes that are stored as integers, if its scales exist; return whether they
        exist.
        """
        head, dot, segment = name.rpartition(".")
        inner = convention.four[Role.CODES].back(segment)
        scale = self.entries.get(f"{head}{dot}{convention.four[Role.SCALE](inner)}") if inner else None
        if inner is None or scale is None or scale.dtype not in _EXPONENTS:
            return False
        table_name = f"{head}{dot}{inner}"
        self.take(convention, table_name, _usual_encodings(convention, entry, scale))
        return True

    def take_codes_without_scales(self, name: str, entry: StoredBuffer) -> None:
        """Add codes without scales as an unquantized tensor, or refuse them if the config or the name requires
        scales.
        """
        if entry.dtype not in _EIGHT:
            self._refuse_packed(name, entry)
            return
        encodings = self.quantization.encodings(module_of(name)) if self.quantization is not None else ()
        if any(encoding.code_bits == 8 for encoding in encodings):
            scale = self.conventions[0].stored(name, Role.SCALE, FLOAT8)
            missing = _last_segment(scale)
            message = (
                f"the config says that {_dtype_and_shape(entry)} is quantized, but its scales {missing} are missing"
            )
            self._refuse("MISSING_TENSOR", name, message)
        else:
            self.bare.append(name)

    def _refuse_packed(self, name: str, entry: StoredBuffer) -> None:
        """Refuse packed codes without scales if the tensor's shape or name shows that it contains codes."""
        segment = _last_segment(name)
        for convention in self.conventions:
            form = convention.four.get(Role.CODES)
            inner = form.back(segment) if form else None
            if inner is None:
                continue
            in_blocks = convention.block > 0 and entry.shape[-1:] == (convention.block // 2,)
            is_named_as_codes = inner == WEIGHT and (segment != WEIGHT or self._is_of(convention))
            if in_blocks or is_named_as_codes:
                scale = convention.four[Role.SCALE](inner)
                self._refuse(
                    "MISSING_TENSOR",
                    name,
                    f"the scales {scale} of packed codes {_dtype_and_shape(entry)} are missing",
                )
                return

    def _is_of(self, convention: Convention) -> bool:
        """Return whether the config's quantization method always writes this convention, and does not merely
        allow it.
        """
        return self.quantization is not None and self.quantization.conventions[:1] == (convention.name,)

    def take_rest(self, name: str) -> None:
        """Check a tensor that belongs to no quantized tensor: it counts as unquantized, but is refused if only scales
        have such a name.
        """
        head, dot, segment = name.rpartition(".")
        if message := self._of_integers(name):
            self._refuse("UNSUPPORTED", name, message, _CONFIG if message.endswith(_NO_CONFIG) else "")
            return
        expected = [f"{head}{dot}{codes}" for codes in self._codes_of(segment, head + dot, self.entries[name])]
        if not expected:
            if self._changes_values(name):
                message = "with this tensor beside its codes a layer computes more than code times scale"
                self._refuse("UNSUPPORTED", name, f"{message}, which is not supported")
            elif self.quantization and TORCHAO in self.quantization.conventions and _is_torchao(segment):
                self._refuse(
                    "UNSUPPORTED",
                    name,
                    "this is a part of a torchao tensor, and no file's metadata describes that tensor",
                )
            return
        codes_name = next((codes for codes in expected if codes in self.entries), None)
        if codes_name is None:
            self._refuse("UNEXPECTED_TENSOR", name, f"scales without codes; expected {' or '.join(expected)}")
        elif self.entries[codes_name].dtype in CODES:
            self._refuse("UNEXPECTED_TENSOR", name, f"these scales do not belong to the encoding of {codes_name}")
        else:
            message = f"{codes_name} has scales, but is {_dtype_and_shape(self.entries[codes_name])}; expected codes"
            self._refuse("DTYPE_MISMATCH", name, message, "remove the scales if the tensor has been decoded")

    def _of_integers(self, name: str) -> str:
        """Return the reason why a tensor counts as integer codes, or as a neighbour of integer codes; an empty text if
        it is neither.
        """
        head, dot, segment = name.rpartition(".")
        entry = self.entries[name]
        if segment in _BELOW or ".quant_state." in name or (segment in _BELOW_QUANTO and self._quantizes(head)):
            weight = name.partition(".quant_state.")[0] if ".quant_state." in name else head
            return f"{_last_segment(weight)} has codes of bitsandbytes or quanto, {_NO_VALUES}"
        codes = self.entries.get(f"{head}{dot}{WEIGHT}")
        if codes is not None and codes.dtype in _INTEGERS and segment in _WITH_INTEGERS:
            return f"the {WEIGHT} beside it has codes of integers, {_dtype_and_shape(codes)}, {_NO_VALUES}"
        program = _PROGRAMS.get(segment, "")
        if segment in _WITH and f"{head}{dot}{_WITH[segment][0]}" in self.entries:
            program = _WITH[segment][1]
        if not program or entry.dtype not in _INTEGERS or (segment == _FLOATS and entry.dtype in _FOUR):
            return ""
        reason = _NO_CONFIG if segment in _WITH_CONFIG and self.quantization is None else _NO_VALUES
        return f"it has codes of integers as {program} stores them, {_dtype_and_shape(entry)}, {reason}"

    def _quantizes(self, path: str) -> bool:
        """Return whether a name is that of a quantized weight, or of a module that quantizes such a weight."""
        siblings = (f"{path}.{_BELOW_QUANTO[0]}", f"{module_of(path)}.{WEIGHT}")
        codes = (self.entries[name].dtype for name in siblings if name in self.entries)
        return _last_segment(path) == WEIGHT or any(dtype in SPEAKING for dtype in codes)

    def _changes_values(self, name: str) -> bool:
        """Return whether an unquantized tensor is beside or below a layer's codes and is not a known parameter."""
        module, _, segment = name.rpartition(".")
        if module in self._linears:
            return not (is_parameter(name) or is_of_cache(name))
        if module in self._stacks:
            return _OF_QUANTIZERS.fullmatch(segment) is not None and not is_of_cache(name)
        while module:
            module, _, segment = module.rpartition(".")
            if module and module in self._linears:
                return not _PARAMETER.fullmatch(segment)
        return False

    @cached_property
    def _linears(self) -> frozenset[str]:
        """Names of the modules with quantized weights; complete once all tensors are grouped."""
        return frozenset(module_of(name) for name in self.encoded if _last_segment(name) == WEIGHT)

    @cached_property
    def _stacks(self) -> frozenset[str]:
        """Names of the modules with quantized parameters that are not named `weight`, such as stacked experts."""
        return frozenset(module_of(name) for name in self.encoded if _last_segment(name) != WEIGHT)

    def _codes_of(self, segment: str, head: str, entry: StoredBuffer) -> list[str]:
        """Return the last name segments of the codes that a tensor would scale; an empty list if its name is
        ambiguous.
        """
        inner = CONVENTIONS[DEEPSEEK].eight[Role.SCALE].back(segment)
        if inner is not None:
            return [inner]
        compressed, blocks = CONVENTIONS[COMPRESSED_TENSORS], CONVENTIONS[GPT_OSS].four
        if segment == compressed.four[Role.GLOBAL].weight:
            return [compressed.four[Role.CODES].weight]
        if segment == CONVENTIONS[MODELOPT].four[Role.GLOBAL].weight:
            return [WEIGHT]
        if segment == compressed.eight[Role.SCALE].weight and self.quantization and self.conventions:
            return [WEIGHT, compressed.four[Role.CODES].weight]
        inner = blocks[Role.SCALE].back(segment)
        if inner is not None:
            codes = blocks[Role.CODES](inner)
            by_config = self.quantization is not None and GPT_OSS in self.quantization.conventions
            if by_config or (entry.dtype in _EXPONENTS and f"{head}{codes}" in self.entries):
                return [codes]
        return []

    def _refuse(self, code: Code, name: str, message: str, hint: str = "") -> None:
        self.refusals.append(Refusal(code, message, Where(None, name), hint))

    def take(self, convention: Convention, table_name: str, candidates: Sequence[Encoding]) -> None:
        """Add a tensor whose codes and scales exist as a quantized tensor, with the first encoding that fits."""
        misfit: Refusal | None = None
        for encoding in candidates:
            stored_names = convention.buffers(table_name, encoding)
            for role in (Role.INPUT_SCALE, Role.SHAPE):
                if role in stored_names and stored_names[role] not in self.entries:
                    del stored_names[role]
            try:
                exact, shape = self._fit(convention, table_name, encoding, stored_names)
            except _MisfitError as error:
                self.used.update(name for name in stored_names.values() if name in self.entries)
                # The first candidate is the likeliest encoding, so the error reports why that encoding does not fit.
                misfit = misfit or error.refusal
            else:
                self.used.update(stored_names.values())
                self.encoded[table_name] = EncodedTensor(table_name, exact, shape, stored_names, convention.name)
                return
        if misfit is not None:
            self.refusals.append(misfit)

    def _fit(
        self, convention: Convention, table_name: str, encoding: Encoding, parts: Mapping[Role, str]
    ) -> tuple[Encoding, Shape]:
        """Return the exact encoding that some buffers have together, and the tensor's shape in elements.

        Raises:
            _MisfitError: if the buffers do not fit together; the exception has the first reason.
        """
        for role, name in parts.items():
            if name not in self.entries:
                raise _MisfitError(
                    "MISSING_TENSOR", table_name, f"{encoding.name} needs its {role}, {_last_segment(name)}"
                )
        if parts[Role.CODES] != table_name and table_name in self.entries:
            message = (
                f"the codes {parts[Role.CODES]} stand for the tensor of this name, but a plain one of the same name "
                "exists too"
            )
            raise _MisfitError("NAME_COLLISION", table_name, message)
        for segment in _OTHERS:
            neighbour = f"{module_of(table_name)}.{segment}"
            if neighbour in self.entries and neighbour not in parts.values():
                raise _MisfitError(
                    "UNSUPPORTED",
                    neighbour,
                    "with this buffer a value is more than code times scale, which is not supported",
                )
        codes, scale = self.entries[parts[Role.CODES]], self.entries[parts[Role.SCALE]]
        fitted = _exact(convention, encoding, codes.dtype, codes.shape, scale.dtype, scale.shape)
        if isinstance(fitted, _Misfit):
            raise _MisfitError(fitted.code, parts[fitted.role], fitted.message)
        for role, name in parts.items():
            if role is Role.GLOBAL or role is Role.INPUT_SCALE:
                _one_number(role, name, self.entries[name], fitted[1])
            elif role is Role.ZERO or role is Role.SHAPE:
                _check_integers(convention, role, name, self.entries[name], fitted)
        return fitted


class _Misfit(msgspec.Struct, frozen=True):
    """The reason why codes and scales do not fit together."""

    code: Code
    role: Role
    """Role of the buffer that the error names."""
    message: str


@lru_cache(maxsize=4096)
def _exact(
    convention: Convention, encoding: Encoding, codes: str, packed: Shape, scales: str, stored: Shape
) -> tuple[Encoding, Shape] | _Misfit:
    """Return the encoding with the exact dtypes and tile for these codes and scales, and the tensor's shape in
    elements.
    """
    code_dtypes = _code_dtypes(convention, encoding)
    if codes not in code_dtypes:
        listed = encoding.code if encoding.code in code_dtypes else " or ".join(code_dtypes)
        message = f"codes of {encoding.name} must be {listed}; found {codes} {list(packed)}"
        return _Misfit("DTYPE_MISMATCH", Role.CODES, message)
    shape = convention.elements(encoding, codes, packed)
    if shape is None:
        dims = f"[..., K/{convention.block}, {convention.block // 2}]" if convention.block else "of one dim or more"
        message = f"packed codes must be {dims}; found {codes} {list(packed)}"
        return _Misfit("SHAPE_MISMATCH", Role.CODES, message)
    if encoding.code_bits < 8 and (not shape or shape[-1] % 2):
        message = f"codes of {encoding.name} must lie in pairs along the last dim; found {codes} {list(packed)}"
        return _Misfit("SHAPE_MISMATCH", Role.CODES, message)
    if encoding.code_bits < 8 and convention.whole_blocks and shape[-1] % max(encoding.tile[-1], 1):
        size = encoding.tile[-1]
        message = (
            f"rows of {encoding.name} must be whole blocks of {size}; found {shape[-1]} codes in {codes} {list(packed)}"
        )
        return _Misfit("SHAPE_MISMATCH", Role.CODES, message)
    if scales not in _SCALES[encoding.name]:
        dtypes = " or ".join(_SCALES[encoding.name])
        return _Misfit(
            "DTYPE_MISMATCH", Role.SCALE, f"scales of {encoding.name} must be {dtypes}; found {scales} {list(stored)}"
        )
    tile = _tile_of(convention, encoding.tile, shape, stored)
    if tile is not None:
        exact = replace(encoding, scale=scales, tile=tile)
        if encoding.code in _FLOATING:
            code = codes if encoding.code_bits == 8 else encoding.code
            kind = _EXPONENTS[0] if scales in _EXPONENTS else scales
            exact = replace(variant(code, kind, tile, has_global=encoding.has_global), scale_max=encoding.scale_max)
        if _same_grid(stored, exact.grid(shape)):
            return exact, shape
    tiles = " x ".join("all" if step == WHOLE else str(step) for step in encoding.tile)
    expected = list(encoding.grid(shape)) if len(shape) >= len(encoding.tile) else "of more dims"
    message = f"scales of {list(shape)} elements in tiles of {tiles} must be {expected}; found {scales} {list(stored)}"
    return _Misfit("SHAPE_MISMATCH", Role.SCALE, message)


def _code_dtypes(convention: Convention, encoding: Encoding) -> tuple[str, ...]:
    """Return the dtypes with which the codes of an encoding may be stored."""
    if encoding.code in WORDS:
        return (_WORD,)
    if encoding.is_integer:
        return (encoding.code,)
    return _EIGHT if encoding.code_bits == 8 else (*_FOUR, encoding.code, convention.pair)


def _check_integers(
    convention: Convention, role: Role, name: str, entry: StoredBuffer, fitted: tuple[Encoding, Shape]
) -> None:
    """Refuse zero points, or the stored shape of a tensor, with a dtype or a shape that does not fit the codes."""
    encoding, shape = fitted
    dtype, expected = convention.presented(encoding, shape, role)
    dtypes = ("I64", _WORD) if role is Role.SHAPE else (dtype,)
    if entry.dtype not in dtypes:
        message = f"the {role} must be {' or '.join(dtypes)}; found {_dtype_and_shape(entry)}"
        raise _MisfitError("DTYPE_MISMATCH", name, message)
    if entry.shape != expected and not (encoding.tile == (WHOLE, WHOLE) and prod(entry.shape) == 1):
        message = f"the {role} of {list(shape)} elements must be {list(expected)}; found {_dtype_and_shape(entry)}"
        raise _MisfitError("SHAPE_MISMATCH", name, message)


_NO_VALUES = "whose values are not known here"
_NO_CONFIG = f"{_NO_VALUES} without a config that describes them"
_CONFIG = (
    "Give the model's config with --config FILE, or keep the tensors exactly as stored:  --to safetensors:identity."
)


def is_parameter(name: str) -> bool:
    """Return whether a tensor has the name of a parameter, and not the name of scales."""
    segment = _last_segment(name)
    return _PARAMETER.fullmatch(segment) is not None and not _OF_QUANTIZERS.fullmatch(segment)


def is_of_cache(name: str) -> bool:
    """Return whether a tensor has the name of scales for cached keys and values."""
    return _last_segment(name) in _OF_CACHE


def may_be_codes(name: str, entry: StoredBuffer) -> bool:
    """Return whether a tensor may contain codes: its dtype is possible, and it is not named like indices or counts."""
    if prod(entry.shape) < 2 or entry.dtype not in SPEAKING:
        return False
    return entry.dtype not in _INTEGERS or not _OF_THEMSELVES.fullmatch(_last_segment(name))


def may_scale(name: str, entry: StoredBuffer, codes: StoredBuffer, *, deeper: bool) -> bool:
    """Return whether an unquantized tensor may be the scale of codes that neither config nor metadata describe.

    Args:
        name: name of the unquantized tensor.
        entry: dtype and shape of the unquantized tensor.
        codes: codes in the same module, or in a parent of it.
        deeper: whether the codes are in a parent module; if so, only a tensor named like scales counts.
    """
    if is_parameter(name):
        return False
    if _OF_QUANTIZERS.fullmatch(_last_segment(name)) or (codes.dtype not in _INTEGERS and not deeper):
        return True
    # A weight's codes have as many dims as the weight, and at least as many elements as the scales. Integers that are
    # no codes, such as a lookup table, may have fewer dims or elements.
    return not deeper and len(codes.shape) > 1 and prod(entry.shape) <= prod(codes.shape)


def _last_segment(name: str) -> str:
    """Return the last segment of a name. Errors that show only this segment are merged for many tensors."""
    return name.rpartition(".")[2]


def _dtype_and_shape(entry: StoredBuffer) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _usual_encodings(convention: Convention, codes: StoredBuffer, scale: StoredBuffer) -> list[Encoding]:
    """Return the encodings that a convention uses for these codes and scales, if the config does not determine one.

    Scales of blocks have as many dims as the codes; a scale with fewer dims is for the whole matrix, even a small one.
    """
    if codes.dtype not in _EIGHT:
        nvfp4 = replace(NVFP4, scale_max=convention.scale_max)
        return [e for e in (nvfp4, MXFP4) if e.name in convention.holds and scale.dtype in _SCALES[e.name]] or [
            nvfp4 if NVFP4.name in convention.holds else MXFP4
        ]
    if scale.dtype in _EXPONENTS:
        likely = [MXFP8, FLOAT8_BLOCK, *([_MX_COLUMNS] if convention.name == DEEPSEEK else ())]
        return [encoding for encoding in likely if encoding.name in convention.holds]
    if convention.name == DEEPSEEK:
        likely = [FLOAT8, FLOAT8_BLOCK] if len(scale.shape) < len(codes.shape) else [FLOAT8_BLOCK, FLOAT8]
        return [*likely, *_LINES]
    return [encoding for encoding in (FLOAT8, CHANNEL, FLOAT8_BLOCK) if encoding.name in convention.holds]


def _tile_of(convention: Convention, tile: Shape, shape: Shape, scale: Shape) -> Shape | None:
    """Return the exact tile size for a tensor; None if the tensor has fewer dims than the tile.

    If a tensor with one dim, or with more than two, has a single scale, the tile is the whole tensor. For a tile that
    covers a whole dim, torchao stores the dim's size. transformers gives experts at least two rows of scales, one for
    each half of `gate_up_proj`, however few rows the halves have (`_alloc_expert_proj`).
    """
    if convention.name == TORCHAO and len(tile) == len(shape) and tile != FLOAT8_BLOCK.tile:
        last_dims = (WHOLE if step == size else step for step, size in zip(tile[-2:], shape[-2:], strict=True))
        tile = (*(step for step in tile[:-2] if step != 1), *last_dims)
    if set(tile) == {WHOLE} and shape and len(shape) != 2 and prod(scale) == 1:
        return (WHOLE,) * len(shape)
    if len(shape) < len(tile):
        return None
    rows = shape[-2] if len(shape) > 2 else 0
    halves = len(scale) == len(shape) and scale[-2:-1] == (2,)
    if convention.name == DEEPSEEK and rows and rows % 2 == 0 and halves and (tile[-2] == WHOLE or tile[-2] >= rows):
        return (rows // 2, tile[-1])
    return tile


def _same_grid(stored: Shape, grid: Shape) -> bool:
    """Return whether the stored shape of scales matches the grid of tiles.

    `[]` matches `[1, 1]`, and `[M]` matches `[M, 1]`. ModelOpt keeps the dims inside its blocks: `[rows, 1, columns,
    1]`.
    """
    if len(stored) == 2 * len(grid) and set(stored[1::2]) == {1}:
        stored = stored[::2]
    return prod(stored) == prod(grid) == 1 or _trim(stored) == _trim(grid)


def _trim(shape: Shape) -> Shape:
    """Return a shape without the ones at its end."""
    while shape[-1:] == (1,):
        shape = shape[:-1]
    return shape


def _one_number(role: Role, name: str, entry: StoredBuffer, shape: Shape) -> None:
    """Refuse a per-tensor scale that is not a single number (in a stack of matrices: one number per matrix)."""
    if entry.dtype not in _REALS:
        raise _MisfitError(
            "DTYPE_MISMATCH", name, f"the {role} must be {' or '.join(_REALS)}; found {_dtype_and_shape(entry)}"
        )
    if not _same_grid(entry.shape, shape[:-2]):
        expected = f"numbers are {list(shape[:-2])}" if shape[:-2] else "is one number"
        message = f"the {role} of {list(shape)} elements {expected}; found {_dtype_and_shape(entry)}"
        raise _MisfitError("SHAPE_MISMATCH", name, message)


def _is_torchao(segment: str) -> bool:
    return CONVENTIONS[TORCHAO].eight[Role.CODES].back(segment) is not None
