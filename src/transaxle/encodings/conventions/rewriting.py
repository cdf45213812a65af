"""Rewrites the quantization section of a model's config so that it matches the tensors that are written.

If a config describes fp8 weights but the tensors were decoded, or has no quantization section but the tensors were
encoded, a loader fails or reads garbage. So the section is removed if no tensor is encoded any more. If some tensors
are still encoded, only the entries of the section that no longer match are changed.

Lists of modules in the section keep the entries that are still true. Modules that a conversion has renamed or decoded
are added to these lists by their full names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec

from transaxle.encodings.conventions.buffer_group import group
from transaxle.encodings.conventions.convention import (
    COMPRESSED_TENSORS,
    CONVENTIONS,
    DEEPSEEK,
    GPT_OSS,
    MODELOPT,
    TORCHAO,
    WORDS,
    Shape,
)
from transaxle.encodings.conventions.packed_methods import PACKED_METHODS
from transaxle.encodings.conventions.quantization import (
    CONFIG,
    NESTED,
    Quantization,
    module_of,
    read,
    without_weights,
)
from transaxle.encodings.conventions.scheme import (
    ALGORITHM_NVFP4,
    ALGORITHMS,
    CHANNEL,
    COMPRESSED,
    EXPRESSION,
    FP8,
    GROUPS,
    INT_QUANTIZED,
    LINEAR,
    METHOD,
    MIXED,
    MODELOPT_METHOD,
    MXFP4_METHOD,
    PACK_QUANTIZED,
    SECTION,
    TORCHAO_METHOD,
    WEIGHT_ONLY_NVFP4,
    Modules,
    compressed_modules,
    transformers_modules,
    wildcard_modules,
)
from transaxle.encodings.conventions.torchao_convention import describe_weights
from transaxle.encodings.encoding import (
    FLOAT8,
    FLOAT8_BLOCK,
    INT4,
    MXFP4,
    MXFP8,
    NVFP4,
    WHOLE,
    EncodedTensor,
    Encoding,
    Role,
)
from transaxle.errors import TransaxleError, refuse

_METHODS = {
    TORCHAO: TORCHAO_METHOD,
    DEEPSEEK: FP8,
    COMPRESSED_TENSORS: COMPRESSED,
    GPT_OSS: MXFP4_METHOD,
    MODELOPT: MODELOPT_METHOD,
}
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_DTYPE_KEYS = ("dtype", "torch_dtype")

Section = dict[str, Any]


def rewrite_config(
    config: Mapping[str, Any],
    encoded: Mapping[str, EncodedTensor],
    plain: Mapping[str, Shape],
    *,
    decoded: Collection[str] = (),
    renamed: Collection[str] = (),
    dtype: str | None = None,
    elsewhere: bool = False,
    in_memory: Collection[str] = (),
    own_method: bool = False,
) -> dict[str, Any]:
    """Return a copy of a config, changed to describe the quantization of the target's tensors.

    Args:
        config: contents of the source's config.json, or of its `hf_quant_config.json`.
        encoded: the target's quantized tensors, by tensor name without buffer suffixes.
        plain: name -> shape, for the target's unquantized tensors.
        decoded: names of unquantized target tensors that the source's config describes as quantized.
        renamed: names of source tensors that have different names in the target; list entries that match only these are
            dropped.
        dtype: dtype to write as the model's dtype, as a safetensors code; None means that the config's dtype is kept.
        elsewhere: whether a different file (`hf_quant_config.json`) describes the quantization, so that `config` must
            not.
        in_memory: names that readers use for the quantized tensors in memory; no list of unquantized modules may match
            these names.
        own_method: whether the section must have the method of the tensors' convention, even if the source's method
            also reads this convention.

    Post-condition: if `group` uses what `read` returns for the result, it finds the same quantized tensors, and decoded
    modules are listed as unquantized. If no tensor is quantized, the result has no quantization section, unless the
    section describes quantized keys, values or activations. A `hf_quant_config.json` without a section serves no
    purpose.

    Raises:
        Refused: with the code UNSUPPORTED if one config cannot describe all tensors (several conventions, or several
            block sizes of the method fp8), if the convention can only be read, or if the section describes more than
            weights and its method requires quantized weights; also with the codes of `read`, if it refuses the source's
            config.
    """
    result = deepcopy(dict(config))
    if dtype is not None:
        _set_dtype(result, _DTYPES[dtype])
    quantization = read(config)
    paths = quantization.paths if quantization is not None else ((SECTION,),)
    if quantization is None and (elsewhere or not encoded):
        return result
    section: Section | None
    if quantization is not None and not encoded:
        section = quantization.without_weights
    else:
        described = quantization if not own_method or _has_method(quantization, encoded) else None
        section = _SectionWriter(described, encoded, plain, decoded, renamed, in_memory).section(in_headers=own_method)
    for path in paths:
        _put(result, path, section)
    return result


def _has_method(quantization: Quantization | None, encoded: Mapping[str, EncodedTensor]) -> bool:
    """Return whether a section has the quantization method of the convention of all tensors."""
    methods = {_METHODS.get(tensor.convention) for tensor in encoded.values()}
    return quantization is not None and methods == {quantization.method}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without its quantization section; raise the errors of `read` if the config is not valid."""
    result, quantization = deepcopy(dict(config)), read(config)
    for path in () if quantization is None else quantization.paths:
        _put(result, path, None)
    return result


def _set_dtype(config: dict[str, Any], name: str) -> None:
    """Write the model's dtype to every config key that states it."""
    holders = [config, *(config[key] for key in NESTED if isinstance(config.get(key), dict))]
    for holder in holders:
        for key in _DTYPE_KEYS:
            if isinstance(holder.get(key), str):
                holder[key] = name


def _put(config: dict[str, Any], path: tuple[str, ...], section: Section | None) -> None:
    *outer, key = path
    place = config
    for step in outer:
        place = place[step]
    if section is None:
        place.pop(key, None)
    else:
        place[key] = section


class _ModuleListing(msgspec.Struct, frozen=True):
    """How a quantization method writes lists of modules in its config section."""

    modules: Callable[[Iterable[str]], Modules]
    """Function that parses a list of modules."""
    whole: Callable[[str], str]
    """Function that returns the list entry for exactly one module."""
    inside: Callable[[str], str]
    """Function that returns the list entry for all modules inside a given module."""


_TRANSFORMERS = _ModuleListing(transformers_modules, lambda name: f"^{re.escape(name)}$", str)
_COMPRESSED = _ModuleListing(compressed_modules, str, lambda name: rf"{EXPRESSION}{re.escape(name)}\..*")
_WILDCARD = _ModuleListing(wildcard_modules, str, lambda name: f"{name}.*")


class _Buffer(msgspec.Struct, frozen=True):
    """Dtype and shape of a buffer that is written, in the form that the function `group` expects."""

    dtype: str
    shape: Shape


class _SectionWriter:
    """Builds the quantization section of a config for one set of written tensors."""

    def __init__(
        self,
        source: Quantization | None,
        encoded: Mapping[str, EncodedTensor],
        plain: Mapping[str, Shape],
        decoded: Collection[str],
        renamed: Collection[str],
        in_memory: Collection[str],
    ) -> None:
        self.encoded = encoded
        self.renamed = {module_of(name) for name in renamed}
        self.modules = {module_of(name) for name in encoded}
        self.unencoded = sorted({module_of(name) for name in plain} - self.modules)
        self.encoded_anywhere = self.modules | {module_of(name) for name in in_memory}
        # A module that contains quantized modules is no linear layer itself. A tensor directly in such a module is a
        # separate parameter.
        self._around = _starts(self.encoded_anywhere)
        self.plain = sorted({module_of(name) for name, shape in plain.items() if len(shape) > 1} - self._around - {""})
        self.decoded = sorted({module_of(name) for name in decoded})
        for name in decoded:
            if module_of(name) in self.modules:
                message = (
                    f"other tensors of the module {module_of(name)} stay encoded; a config can list only whole modules"
                )
                raise refuse("UNSUPPORTED", message, tensor=name, hint="Decode all of them, or none.")
        names = {tensor.convention for tensor in encoded.values()}
        self.source = source if source is not None and names <= set(source.conventions) else None
        if self.source is None and len(names) > 1:
            message = (
                f"the tensors use the conventions {' and '.join(sorted(names))}; one {SECTION} can describe only one"
            )
            raise refuse(
                "UNSUPPORTED",
                message,
                file=CONFIG,
                hint="Encode to the encoding that the checkpoint already has, or decode that one.",
            )
        self.method = _METHODS.get(min(names)) if self.source is None else self.source.method
        self.old: Section = {METHOD: self.method}
        if source is not None and source.method == self.method:
            self.old = deepcopy(dict(source.section))
        elif source is not None and not source.conventions:
            message = f"{SECTION} says how plain weights are used, and cannot also say that some are {self.method}"
            raise refuse("UNSUPPORTED", message, file=CONFIG, hint="Remove the section if it is left over.")

    def section(self, *, in_headers: bool) -> Section:
        """Return the quantization section to write into the config.

        Args:
            in_headers: whether headers of files describe the tensors, if the section alone does not.
        """
        makers = {
            FP8: self._fp8,
            COMPRESSED: self._compressed_sections,
            MXFP4_METHOD: self._mxfp4,
            MODELOPT_METHOD: self._modelopt,
            TORCHAO_METHOD: self._torchao,
        }
        if self.method not in makers or (self.method == TORCHAO_METHOD and not in_headers):
            message = (
                f"tensors in the convention {next(iter(self.encoded.values())).convention} can be read, but not written"
            )
            if self.method is not None and self.method in PACKED_METHODS:
                program = PACKED_METHODS[self.method]
                message = f"weights of {program} stay as they are, and no {SECTION} describes others beside them"
                hint = "Decode all of them first (--decode bf16), then encode the result."
                raise refuse("UNSUPPORTED", message, file=CONFIG, hint=hint)
            raise refuse("UNSUPPORTED", message, file=CONFIG)
        # Each method yields candidate sections, those with the least change first. The first candidate that describes
        # the tensors correctly when it is read is used.
        for section in makers[self.method]():
            if self._agrees(section):
                return section
        kinds = " and ".join(sorted({str(_in_words(kind)) for kind in self._kinds()}))
        message = f"a {SECTION} of the method {self.method} cannot describe tensors stored as {kinds}"
        raise refuse(
            "UNSUPPORTED", message, file=CONFIG, hint="Decode some of them, or encode all of them in the same way."
        )

    def _agrees(self, section: Section) -> bool:
        """Return whether reading a section results in exactly the tensors that are written."""
        try:
            reread = read({SECTION: section})
        except TransaxleError:
            return False
        if reread is None:
            return False
        if reread.method == TORCHAO_METHOD:  # the headers of the files describe the tensors
            return not any(module in reread.scheme.ignored for module in self.modules)
        for name, tensor in self.encoded.items():  # `group` does not compare the width of codes with the config
            if tensor.encoding.code_bits not in {each.code_bits for each in reread.encodings(module_of(name))}:
                return False
        buffers: dict[str, _Buffer] = {}
        for tensor in self.encoded.values():
            convention = CONVENTIONS[tensor.convention]
            for role, name in tensor.parts.items():
                buffers[name] = _Buffer(*convention.presented(tensor.encoding, tensor.shape, role))
        groups = group(buffers, reread)
        return not groups.refusals and groups.encoded == self.encoded

    def _kinds(self) -> dict[Encoding, list[str]]:
        """Return encoding -> modules with this encoding; encodings that a config cannot tell apart count as one."""
        modules_of: dict[Encoding, set[str]] = {}
        for name, tensor in self.encoded.items():
            if tensor.encoding.is_integer:
                kind = replace(tensor.encoding, scale=INT4.scale)
                modules_of.setdefault(kind, set()).add(module_of(name))
                continue
            eight = tensor.encoding.code_bits == 8
            scale = FLOAT8.scale if eight and tensor.encoding.scale != MXFP8.scale else tensor.encoding.scale
            code = FLOAT8.code if eight else tensor.encoding.code
            modules_of.setdefault(replace(tensor.encoding, code=code, scale=scale), set()).add(module_of(name))
        return {kind: sorted(modules) for kind, modules in modules_of.items()}

    def _fp8(self) -> Iterator[Section]:
        section = self.old
        uses_ignored = _IGNORED in section and section.get(_NOT_CONVERTED) is None
        self._relist(section, _IGNORED if uses_ignored else _NOT_CONVERTED, _TRANSFORMERS)
        static = any(Role.INPUT_SCALE in tensor.parts for tensor in self.encoded.values())
        if self.source is None or ("activation_scheme" in section and not static):
            section["activation_scheme"] = "static" if static else "dynamic"
        if any(tensor.encoding.scale == MXFP8.scale for tensor in self.encoded.values()):
            section["scale_fmt"] = "ue8m0"
        if self.source is not None:
            yield section
        for kind in self._kinds():
            yield section | {"weight_block_size": None if set(kind.tile) == {WHOLE} else list(kind.tile)}

    def _mxfp4(self) -> Iterator[Section]:
        self._relist(self.old, _NOT_CONVERTED, _TRANSFORMERS)
        yield self.old

    def _compressed_sections(self) -> Iterator[Section]:
        section = self.old
        self._relist(section, "ignore", _COMPRESSED)
        if self.source is not None:
            yield section
        kinds = self._kinds()
        templates = {group.encoding: group.key for group in self.source.scheme.groups} if self.source else {}
        groups = without_weights(section.get(GROUPS, {}))
        for number, (kind, modules) in enumerate(kinds.items()):
            targets = modules if self.source is not None or len(kinds) > 1 else [LINEAR]
            old = section.get(GROUPS, {}).get(templates.get(kind))
            group = old if isinstance(old, dict) else {"weights": _weights(kind), "input_activations": None}
            groups[_free(f"group_{number}", groups)] = group | {"targets": targets, "format": _format(kind)}
        formats = {_format(kind) for kind in kinds}
        section |= {"quantization_status": "compressed", GROUPS: groups}
        section["format"] = min(formats) if len(formats) == 1 else "mixed-precision"
        yield section

    def _modelopt(self) -> Iterator[Section]:
        section = self.old
        self._relist(section, "exclude_modules" if "exclude_modules" in section else "ignore", _WILDCARD)
        if self.source is not None:
            yield section
        with_inputs = {module_of(name) for name, tensor in self.encoded.items() if Role.INPUT_SCALE in tensor.parts}
        algorithms = {encoding: name for name, encoding in ALGORITHMS.items() if encoding != NVFP4}
        kinds = {algorithms[kind]: modules for kind, modules in self._kinds().items() if kind in algorithms}
        for module in self._kinds().get(NVFP4, ()):
            kinds.setdefault(ALGORITHM_NVFP4 if module in with_inputs else WEIGHT_ONLY_NVFP4, []).append(module)
        if len(kinds) == 1:
            size = {"group_size": NVFP4.tile[-1]} if ALGORITHMS[min(kinds)] == NVFP4 else {}
            yield section | {"quant_algo": min(kinds)} | size
        layers = {module: {"quant_algo": name} for name, modules in kinds.items() for module in modules}
        yield section | {"quant_algo": MIXED, "quantized_layers": layers}

    def _torchao(self) -> Iterator[Section]:
        self._relist(self.old, _NOT_CONVERTED, _TRANSFORMERS)
        # A header states the tile in elements; that of a matrix of 128 x 128 is read as one of DeepSeek's blocks.
        kinds = {
            FLOAT8 if tensor.shape[-2:] == tensor.encoding.tile == FLOAT8_BLOCK.tile else kind
            for kind, modules in self._kinds().items()
            for tensor in self.encoded.values()
            if module_of(tensor.name) in modules
        }
        if len(kinds) == 1:
            yield self.old | {"quant_type": {"default": describe_weights(kinds.pop())}}

    def _relist(self, section: Section, key: str, listing: _ModuleListing) -> None:
        """Change the section's list of unquantized modules so that it matches the unquantized tensors."""
        old = list(section.get(key) or ())
        true_entries: list[str] = []
        added = list(self.decoded)
        listed_before = listing.modules(old)
        relist_all = self.source is None or _hits(listed_before, self.renamed)
        any_false, former = _hits(listed_before, self._around), _starts(self.renamed)
        for text in old:
            modules = listing.modules([text])
            if any_false and _hits(modules, self._around):
                added += [module for module in self.plain if module in modules]
            elif text in self._starts or _hits(modules, self.unencoded):
                true_entries.append(text)
            else:
                relist_all = True
                # An entry that matches no tensor is kept, because it may name a module without tensors, such as a tied
                # head.
                if not (text in former or _hits(modules, self.renamed)):
                    true_entries.append(text)
        if relist_all:
            added += self.plain
        listed = listing.modules(true_entries)
        new_entries = self._together([module for module in dict.fromkeys(added) if module not in listed], listing)
        if _hits(listing.modules(new_entries), self.encoded_anywhere):
            hits = (_hits(listing.modules([text]), self.encoded_anywhere) for text in new_entries)
            new_entries = [listing.whole(text) if hit else text for text, hit in zip(new_entries, hits, strict=True)]
        if new_entries or key in section:
            section[key] = [*true_entries, *new_entries]

    def _together(self, modules: Iterable[str], listing: _ModuleListing) -> list[str]:
        """Return the list entries for some modules; if no expert of a layer is quantized, one entry covers all its
        experts.
        """
        listed: dict[str, None] = {}
        for module in modules:
            outer, dot, below = module.partition(f".{_EXPERTS}.")
            experts = f"{outer}.{_EXPERTS}"
            single = not dot or not below[:1].isdigit() or experts in self._encoded_modules
            listed[module if single else listing.inside(experts)] = None
        return list(listed)

    @cached_property
    def _starts(self) -> frozenset[str]:
        return _starts(self.unencoded)

    @cached_property
    def _encoded_modules(self) -> frozenset[str]:
        return _starts(self.modules)


def _free(key: str, groups: Container[str]) -> str:
    """Return a new key that is not yet in `groups`."""
    while key in groups:
        key += "_weights"
    return key


def _hits(modules: Modules, names: Iterable[str]) -> bool:
    return any(name in modules for name in names)


def _starts(modules: Iterable[str]) -> frozenset[str]:
    """Return the given modules together with all modules that contain any of them."""
    prefixes: set[str] = set()
    for module in modules:
        while module and module not in prefixes:
            prefixes.add(module)
            module = module_of(module)
    return frozenset(prefixes)


def _in_words(kind: Encoding) -> str:
    tile = " x ".join("all" if step == WHOLE else str(step) for step in kind.tile)
    return f"{kind.name} in tiles of {tile}"


def _weights(kind: Encoding) -> Section:
    """Return an encoding as the config arguments of compressed-tensors (`QuantizationArgs`)."""
    arguments: Section = {"num_bits": kind.code_bits, "type": "float", "symmetric": True, "dynamic": False}
    if kind.is_integer:
        arguments |= {"type": "int", "symmetric": not kind.zero_rows}
    if kind.tile == CHANNEL.tile:
        return arguments | {"strategy": "channel"}
    if set(kind.tile) == {WHOLE}:
        return arguments | {"strategy": "tensor"}
    if kind.tile[0] != 1:
        return arguments | {"strategy": "block", "block_structure": list(kind.tile)}
    arguments |= {"strategy": "tensor_group" if kind.has_global else "group", "group_size": kind.tile[-1]}
    dtype = {MXFP8.scale: "torch.uint8", NVFP4.scale: "torch.float8_e4m3fn"}.get(kind.scale)
    return arguments | ({"scale_dtype": dtype} if dtype else {})


def _format(kind: Encoding) -> str:
    """Return the `format` by which compressed-tensors stores an encoding."""
    if kind.is_integer:
        return PACK_QUANTIZED if kind.code in WORDS else INT_QUANTIZED
    return _FORMATS[kind.name]


_FORMATS = {
    FLOAT8.name: "float-quantized",
    FLOAT8_BLOCK.name: "float-quantized",
    MXFP8.name: "mxfp8-quantized",
    MXFP4.name: "mxfp4-pack-quantized",
    NVFP4.name: "nvfp4-pack-quantized",
}
"""Name of an encoding of floating-point codes -> name of the `format` by which compressed-tensors stores it."""
_NOT_CONVERTED, _IGNORED = "modules_to_not_convert", "ignored_layers"
"""The two config keys under which the list of unquantized modules may be."""
_EXPERTS = "experts"
"""Name segment before the expert's number in tensor names."""
