"""Rewriting: the config that belongs to what was written.

A config that says `fp8` over tensors that were decoded, or says nothing over tensors that were encoded, makes a loader
read garbage or refuse. So the section on quantization is written anew from the tensors: taken out where nothing is
encoded any more, else brought to agree with them, tensor by tensor, while all that it says beside that stays.

Lists of modules keep their entries as long as these are true. Names that a conversion has changed, and modules that it
has decoded, are added by their whole names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transaxle.encodings.conventions.buffer_group import group
from transaxle.encodings.conventions.convention import COMPRESSED_TENSORS, CONVENTIONS, DEEPSEEK, GPT_OSS, MODELOPT
from transaxle.encodings.conventions.pattern import (
    EXPRESSION,
    Modules,
    compressed_modules,
    transformers_modules,
    wildcard_modules,
)
from transaxle.encodings.conventions.quantization import CONFIG, NESTED, Quantization, module_of, read
from transaxle.encodings.conventions.scheme import (
    ALGORITHMS,
    CHANNEL,
    COMPRESSED,
    FP8,
    GROUPS,
    LINEAR,
    METHOD,
    MIXED,
    MODELOPT_METHOD,
    MXFP4_METHOD,
    SECTION,
)
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP4, MXFP8, NVFP4, WHOLE, Encoded, Encoding, Role
from transaxle.errors import TransaxleError, refuse

_METHODS = {DEEPSEEK: FP8, COMPRESSED_TENSORS: COMPRESSED, GPT_OSS: MXFP4_METHOD, MODELOPT: MODELOPT_METHOD}
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_DTYPE_KEYS = ("dtype", "torch_dtype")

Shape = tuple[int, ...]
Section = dict[str, Any]


def written(
    config: Mapping[str, Any],
    encoded: Mapping[str, Encoded],
    plain: Mapping[str, Shape],
    *,
    decoded: Collection[str] = (),
    dtype: str | None = None,
    elsewhere: bool = False,
) -> dict[str, Any]:
    """Return the config that belongs to the tensors of a target.

    Args:
        config: the source's config.json, or its `hf_quant_config.json`.
        encoded: the target's encoded tensors by table name.
        plain: the others, with their elements along each dim.
        decoded: those of the plain ones that the source's config has quantized.
        dtype: safetensors code to be named as the model's type; None: it stays.
        elsewhere: whether another file speaks of quantization (`hf_quant_config.json`), and this one is not to.

    Post-condition: `group`, with what `read` finds in the result, finds the same encoded tensors; and the modules that
    were decoded are left as they are. Without encoded tensors there is nothing to be read in it: of a
    `hf_quant_config.json` nothing of use is left.

    Raises:
        Refused: UNSUPPORTED where one config cannot speak of all of them: several conventions, several block sizes of
            the method fp8; or of a convention that is read only. What `read` refuses in the source's config.
    """
    result = deepcopy(dict(config))
    if dtype is not None:
        _set_dtype(result, _DTYPES[dtype])
    found = read(config)
    paths = found.paths if found is not None else ((SECTION,),)
    if found is None and (elsewhere or not encoded):
        return result
    if not encoded:
        for path in paths:
            _put(result, path, None)
        return result
    section = _Writer(found, encoded, plain, decoded).section()
    for path in paths:
        _put(result, path, section)
    return result


def _set_dtype(config: dict[str, Any], name: str) -> None:
    """Name the model's type wherever the config names one."""
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


@dataclass(frozen=True, slots=True)
class _Listing:
    """How a method lists modules."""

    modules: Callable[[Iterable[str]], Modules]
    """Reads a list."""
    whole: Callable[[str], str]
    """Gives the entry for one module and nothing else."""
    inside: Callable[[str], str]
    """Gives the entry for all modules inside one."""


_TRANSFORMERS = _Listing(transformers_modules, lambda name: f"^{re.escape(name)}$", str)
_COMPRESSED = _Listing(compressed_modules, str, lambda name: rf"{EXPRESSION}{re.escape(name)}\..*")
_WILDCARD = _Listing(wildcard_modules, str, lambda name: f"{name}.*")


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A stored tensor of the target, as `group` looks at it."""

    dtype: str
    shape: Shape


class _Writer:
    """Makes the section for one set of tensors."""

    def __init__(
        self,
        found: Quantization | None,
        encoded: Mapping[str, Encoded],
        plain: Mapping[str, Shape],
        decoded: Collection[str],
    ) -> None:
        self.encoded = encoded
        self.modules = {module_of(name) for name in encoded}
        self.left = sorted({module_of(name) for name in plain} - self.modules)
        self.plain = sorted({module_of(name) for name, shape in plain.items() if len(shape) > 1} - self.modules)
        self.decoded = sorted({module_of(name) for name in decoded})
        for name in decoded:
            if module_of(name) in self.modules:
                message = f"other tensors of the module {module_of(name)} stay encoded; a config lists whole modules"
                raise refuse("UNSUPPORTED", message, tensor=name, hint="decode all of them, or none")
        names = {one.convention for one in encoded.values()}
        self.found = found if found is not None and names <= set(found.conventions) else None
        if self.found is None and len(names) > 1:
            message = f"tensors in the conventions {' and '.join(sorted(names))}; one {SECTION} speaks of one"
            raise refuse("UNSUPPORTED", message, file=CONFIG, hint="encode in the encoding that is there, or decode it")
        self.method = _METHODS.get(min(names)) if self.found is None else self.found.method
        self.old: Section = {METHOD: self.method} if self.found is None else deepcopy(dict(self.found.section))

    def section(self) -> Section:
        """Return the section."""
        makers = {
            FP8: self._fp8,
            COMPRESSED: self._compressed,
            MXFP4_METHOD: self._mxfp4,
            MODELOPT_METHOD: self._modelopt,
        }
        if self.method not in makers:
            message = f"tensors in the convention {next(iter(self.encoded.values())).convention} are read, not written"
            raise refuse("UNSUPPORTED", message, file=CONFIG)
        for section in makers[self.method]():
            if self._agrees(section):
                return section
        kinds = " and ".join(sorted({str(_told(kind)) for kind in self._kinds()}))
        message = f"a {SECTION} of the method {self.method} cannot say that tensors are stored as {kinds}"
        raise refuse("UNSUPPORTED", message, file=CONFIG, hint="decode some of them, or encode all of them alike")

    def _agrees(self, section: Section) -> bool:
        """Tell whether a section, read back, gives the tensors that there are."""
        try:
            said = read({SECTION: section})
        except TransaxleError:
            return False
        if said is None or not all(said.encodings(module) for module in self.modules):
            return False
        buffers: dict[str, _Buffer] = {}
        for one in self.encoded.values():
            convention = CONVENTIONS[one.convention]
            for role, name in one.parts.items():
                buffers[name] = _Buffer(*convention.presented(one.encoding, one.shape, role))
        found = group(buffers, said)
        return not found.refusals and found.encoded == self.encoded

    def _kinds(self) -> dict[Encoding, list[str]]:
        """Return the modules of each encoding, as far as a config can tell encodings apart."""
        found: dict[Encoding, set[str]] = {}
        for name, one in self.encoded.items():
            eight = one.encoding.code_bits == 8
            scale = FLOAT8.scale if eight and one.encoding.scale != MXFP8.scale else one.encoding.scale
            code = FLOAT8.code if eight else one.encoding.code
            found.setdefault(replace(one.encoding, code=code, scale=scale), set()).add(module_of(name))
        return {kind: sorted(modules) for kind, modules in found.items()}

    def _fp8(self) -> Iterator[Section]:
        section = self.old
        other = _IGNORED in section and section.get(_NOT_CONVERTED) is None
        self._relist(section, _IGNORED if other else _NOT_CONVERTED, _TRANSFORMERS)
        static = any(Role.INPUT_SCALE in one.parts for one in self.encoded.values())
        if self.found is None or ("activation_scheme" in section and not static):
            section["activation_scheme"] = "static" if static else "dynamic"
        if any(one.encoding.scale == MXFP8.scale for one in self.encoded.values()):
            section["scale_fmt"] = "ue8m0"
        if self.found is not None:
            yield section
        for kind in self._kinds():
            yield section | {"weight_block_size": None if set(kind.tile) == {WHOLE} else list(kind.tile)}

    def _mxfp4(self) -> Iterator[Section]:
        self._relist(self.old, _NOT_CONVERTED, _TRANSFORMERS)
        yield self.old

    def _compressed(self) -> Iterator[Section]:
        section = self.old
        self._relist(section, "ignore", _COMPRESSED)
        if self.found is not None:
            yield section
        kinds = self._kinds()
        templates = {group.encoding: group.key for group in self.found.scheme.groups} if self.found else {}
        groups: dict[str, Any] = {}
        for number, (kind, modules) in enumerate(kinds.items()):
            targets = modules if self.found is not None or len(kinds) > 1 else [LINEAR]
            old = section.get(GROUPS, {}).get(templates.get(kind))
            made = old if isinstance(old, dict) else {"weights": _weights(kind), "input_activations": None}
            groups[f"group_{number}"] = made | {"targets": targets, "format": _FORMATS[kind.name]}
        formats = {_FORMATS[kind.name] for kind in kinds}
        section |= {"quantization_status": "compressed", GROUPS: groups}
        section["format"] = min(formats) if len(formats) == 1 else "mixed-precision"
        yield section

    def _modelopt(self) -> Iterator[Section]:
        section = self.old
        self._relist(section, "exclude_modules" if "exclude_modules" in section else "ignore", _WILDCARD)
        if self.found is not None:
            yield section
        kinds = {
            name: modules for kind, modules in self._kinds().items() for name in ALGORITHMS if ALGORITHMS[name] == kind
        }
        if len(kinds) == 1:
            yield section | {"quant_algo": min(kinds)}
        layers = {module: {"quant_algo": name} for name, modules in kinds.items() for module in modules}
        yield section | {"quant_algo": MIXED, "quantized_layers": layers}

    def _relist(self, section: Section, key: str, listing: _Listing) -> None:
        """Bring a list of the modules that are left as they are to agree with those that are."""
        old = list(section.get(key) or ())
        kept: list[str] = []
        added = list(self.decoded)
        everything = self.found is None
        false = _hits(listing.modules(old), self.modules)
        for text in old:
            modules = listing.modules([text])
            if false and _hits(modules, self.modules):
                added += [module for module in self.plain if module in modules]
            else:
                kept.append(text)
                everything = everything or not (text in self._starts or _hits(modules, self.left))
        if everything:
            added += self.plain
        known = listing.modules(kept)
        wanted = self._together([module for module in dict.fromkeys(added) if module not in known], listing)
        if _hits(listing.modules(wanted), self.modules):
            wanted = [listing.whole(text) if _hits(listing.modules([text]), self.modules) else text for text in wanted]
        if wanted or key in section:
            section[key] = [*kept, *wanted]

    def _together(self, modules: Iterable[str], listing: _Listing) -> list[str]:
        """Return the entries for modules, one for all experts of a layer where none of them is encoded."""
        listed: dict[str, None] = {}
        for module in modules:
            outer, dot, rest = module.partition(f".{_EXPERTS}.")
            experts = f"{outer}.{_EXPERTS}"
            alone = not dot or not rest[:1].isdigit() or experts in self._encoded_starts
            listed[module if alone else listing.inside(experts)] = None
        return list(listed)

    @cached_property
    def _starts(self) -> frozenset[str]:
        return _starts(self.left)

    @cached_property
    def _encoded_starts(self) -> frozenset[str]:
        return _starts(self.modules)


def _hits(modules: Modules, names: Iterable[str]) -> bool:
    return any(name in modules for name in names)


def _starts(modules: Iterable[str]) -> frozenset[str]:
    """Return the modules and all that they are inside of."""
    found: set[str] = set()
    for module in modules:
        while module and module not in found:
            found.add(module)
            module = module_of(module)
    return frozenset(found)


def _told(kind: Encoding) -> str:
    tile = " x ".join("all" if step == WHOLE else str(step) for step in kind.tile)
    return f"{kind.name} in tiles of {tile}"


def _weights(kind: Encoding) -> Section:
    """Return how compressed-tensors says an encoding (`QuantizationArgs`)."""
    said: Section = {"num_bits": kind.code_bits, "type": "float", "symmetric": True, "dynamic": False}
    if kind.tile == CHANNEL.tile:
        return said | {"strategy": "channel"}
    if set(kind.tile) == {WHOLE}:
        return said | {"strategy": "tensor"}
    if kind.tile[0] != 1:
        return said | {"strategy": "block", "block_structure": list(kind.tile)}
    said |= {"strategy": "tensor_group" if kind.has_global else "group", "group_size": kind.tile[-1]}
    dtype = {MXFP8.scale: "torch.uint8", NVFP4.scale: "torch.float8_e4m3fn"}.get(kind.scale)
    return said | ({"scale_dtype": dtype} if dtype else {})


_FORMATS = {
    FLOAT8.name: "float-quantized",
    FLOAT8_BLOCK.name: "float-quantized",
    MXFP8.name: "mxfp8-quantized",
    MXFP4.name: "mxfp4-pack-quantized",
    NVFP4.name: "nvfp4-pack-quantized",
}
"""Encoding -> compressed-tensors' name of how it is packed."""
_NOT_CONVERTED, _IGNORED = "modules_to_not_convert", "ignored_layers"
"""Two names of one list."""
_EXPERTS = "experts"
"""Segment below which a layer's experts are numbered."""
