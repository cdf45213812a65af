"""The quantization that a model's config describes: which modules are stored as codes and scales, and how.

A quantization method is identified by the config's `quant_method`. Each method lists modules and scale tiles in its own
format, which the module `scheme` parses. A config that is malformed, or has an unknown method or format, is refused as
a whole, because a partly read config would lead to wrong values. The module `buffer_group` then determines which
tensors are quantized, from the parsed config and the tensors' names and dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import msgspec

from transaxle.encodings.conventions.linear_regex import PatternError
from transaxle.encodings.conventions.packed_methods import (
    PACKED_FILES,
    PACKED_PARSERS,
    STATED,
    PackedMethod,
    parse_packed,
)
from transaxle.encodings.conventions.scheme import (
    CACHE,
    COMPRESSED,
    EXPERT_DTYPE,
    FP8,
    GROUPS,
    METHOD,
    METHODS,
    MODELOPT_METHOD,
    SECTION,
    Scheme,
)
from transaxle.encodings.encoding import Encoding
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse

CONFIG = "config.json"
MODELOPT_CONFIG = "hf_quant_config.json"
"""File in which older ModelOpt exports describe their quantization; newer exports use config.json."""

NESTED = ("text_config", "llm_config", "language_config")
"""Keys of multimodal configs whose value may be the language model's config, with a quantization section."""
OLD_SECTION = "compression_config"
"""Config key of the quantization section in early versions of compressed-tensors."""
MODELOPT_SECTION, _PRODUCER = "quantization", "producer"
"""Keys in `hf_quant_config.json`: for the quantization section, and for the program that wrote the file."""
SECTIONS = frozenset({SECTION, OLD_SECTION, _PRODUCER})
"""Config keys that describe quantization; a config without any of these keys belongs to an unquantized model."""
_PARSERS = {**METHODS, **PACKED_PARSERS}
"""`quant_method` in the config -> function that parses sections of this method."""


class Quantization(msgspec.Struct, frozen=True, dict=True):
    """How a checkpoint's weights are quantized, according to its config."""

    method: str
    """The config's `quant_method`, a key of `METHODS` or `PACKED_PARSERS`."""
    scheme: Scheme
    """The parsed section: groups of modules with the encoding of their weights."""
    paths: tuple[tuple[str, ...], ...]
    """Paths of config keys that lead to the quantization section; there are several if the file repeats the section."""
    section: Mapping[str, Any]
    """The quantization section as it is in the file."""
    file: str = CONFIG
    """Name of the file with the quantization section."""

    @property
    def without_weights(self) -> dict[str, Any] | None:
        """The section to write for a model with decoded weights, which still describes quantized keys, values and
        outputs.

        The result is None if the section describes no quantized keys, values or outputs. A section that describes
        weights as unquantized is kept unchanged.

        Raises:
            Refused: with the code UNSUPPORTED if sections of the quantization method cannot describe unquantized
                weights.
        """
        if not self.conventions:
            return dict(self.section)
        groups = self.section[GROUPS] if self.method == COMPRESSED else {}
        of_others = without_weights(groups) | {
            key: {**group, "weights": None, "input_activations": None, "format": None}
            for key, group in groups.items()
            if isinstance(group, Mapping) and group.get("weights") and group.get("output_activations")
        }
        cache = [key for key in CACHE if self.section.get(key)]
        if not cache and not of_others:
            return None
        if self.method == COMPRESSED:
            return {**self.section, "format": "dense", GROUPS: of_others}
        if self.method == MODELOPT_METHOD:
            dropped = ("group_size", "quantized_layers", GROUPS)
            return {**{k: v for k, v in self.section.items() if k not in dropped}, "quant_algo": None}
        location = ".".join((*self.paths[0], cache[0]))
        message = f"{location} cannot be kept: a section of the method {self.method} says that weights are quantized"
        hint = "Leave some tensor encoded (--skip), or remove the key if the cache is not to be quantized."
        raise refuse("UNSUPPORTED", message, file=self.file, hint=hint)

    @property
    def conventions(self) -> tuple[str, ...]:
        """Naming conventions (keys of `CONVENTIONS`) that the quantized tensors may follow."""
        return self.scheme.conventions

    def encodings(self, module: str) -> tuple[Encoding, ...]:
        """Return the encodings that a module's weights may have according to the config, the likeliest first.

        The result is empty for an unquantized module. The result contains several encodings if the config lists classes
        instead of module names.

        Raises:
            Refused: with the code UNSUPPORTED if matching a pattern in the config takes too long.
        """
        try:
            if module in self.scheme.ignored:
                return ()
            for group in self.scheme.groups:
                if group.modules is not None and module in group.modules:
                    return (group.encoding,)
        except PatternError as error:
            raise refuse("UNSUPPORTED", f"the list of modules is not valid: {error}", file=self.file) from None
        return self._of_classes

    @cached_property
    def _of_classes(self) -> tuple[Encoding, ...]:
        return tuple(dict.fromkeys(group.encoding for group in self.scheme.groups if group.modules is None))


def without_weights(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups in a compressed-tensors section that quantize activations and no weights."""
    return {key: group for key, group in groups.items() if isinstance(group, Mapping) and group.get("weights") is None}


def module_of(table_name: str) -> str:
    """Return the module name of a tensor, as configs list it: the tensor name without its last segment."""
    return table_name.rpartition(".")[0]


def read(
    config: Mapping[str, Any] | None, *, modelopt: Mapping[str, Any] | None = None, file: str = CONFIG
) -> Quantization | None:
    """Read the quantization that a model's config describes.

    Args:
        config: contents of config.json, or of a ModelOpt `hf_quant_config.json`.
        modelopt: contents of `hf_quant_config.json`, used if config.json describes no quantization; an unsupported file
            is refused even if it is not used.
        file: name of the config file, for error messages.

    Returns:
        The quantization, or None if the config describes no quantization.

    Raises:
        Refused: with the code CORRUPT if the config is malformed; with the code UNSUPPORTED if its method, format or a
            number in it is unknown.
    """
    sections = _sections(config or {})
    modelopt_quantization = None if modelopt is None else read(modelopt, file=MODELOPT_CONFIG)
    if not sections:
        return modelopt_quantization
    path, section = sections[0]
    location = ".".join(path)
    if any(other_section != section for _, other_section in sections[1:]):
        both_paths = " and ".join(".".join(path) for path, _ in sections)
        raise refuse("CORRUPT", f"{both_paths} differ; remove one of them", file=file)
    if not isinstance(section, Mapping):
        raise refuse("CORRUPT", f"{location} is not a JSON object: {section!r}", file=file)
    method = _method(section, path)
    if method not in _PARSERS:
        method_text = repr(method) if METHOD in section else "missing"
        message = f"{location}.{METHOD} is {method_text}; known: {', '.join(_PARSERS)}"
        raise refuse("UNSUPPORTED", message, file=file, hint="To move the files as they are, give no dialect.")
    if method == FP8:
        section = _with_expert_dtype(config or {}, path, section)
    try:
        return Quantization(
            method, _PARSERS[method](section, location), tuple(path for path, _ in sections), section, file
        )
    except PatternError as error:
        raise refuse("UNSUPPORTED", f"{location}: the list of modules is not valid: {error}", file=file) from None
    except TransaxleError as error:
        raise gathered(Refusal(r.code, r.message, Where(file), r.hint) for r in error.refusals) from None


def read_packed(
    config: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> PackedMethod | None:
    """Read how a checkpoint of GPTQ or AWQ stores its weights; None if it is quantized in another way, or not at all.

    Args:
        config: contents of config.json.
        files: name in `PACKED_FILES` -> contents of the file. They must agree with a section of the config, and replace
            it if there is none.

    Raises:
        Refused: with the code CORRUPT if a section or file is malformed, or if two of them contradict each other; with
            the code UNSUPPORTED if it describes codes that are not read.
    """
    sections = _sections(config)
    methods: dict[str, PackedMethod] = {}
    for path, section in sections:
        if CONFIG not in methods and (method := _parse_packed(section, path, CONFIG)) is not None:
            methods[CONFIG] = method
    if sections and not methods:
        return None
    for file, fields in files.items():
        section = {METHOD: PACKED_FILES[file], **fields}
        method = _parse_packed(section, (), file)
        if method is None:
            message = f"{METHOD} is {section[METHOD]!r}; known in this file: {', '.join(PACKED_FILES.values())}"
            raise refuse("UNSUPPORTED", message, file=file, hint=_OTHER_SECTION)
        methods[file] = msgspec.structs.replace(method, path=(SECTION,))
    for file, method in methods.items():
        first, first_method = next(iter(methods.items()))
        if differing := [key for name, key in STATED.items() if getattr(method, name) != getattr(first_method, name)]:
            message = f"{' and '.join(differing)} differ from what {first} says, so the codes have two meanings"
            raise refuse("CORRUPT", message, file=file, hint=_OTHER_SECTION)
    return next(iter(methods.values()), None)


_OTHER_SECTION = f"Remove the file that is wrong, or give a config with the right {SECTION}:  --config FILE."


def _parse_packed(section: Any, path: tuple[str, ...], file: str) -> PackedMethod | None:
    try:
        return parse_packed(section, path) if isinstance(section, Mapping) else None
    except TransaxleError as error:
        raise gathered(Refusal(r.code, r.message, Where(file), r.hint) for r in error.refusals) from None


def _sections(config: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Return the quantization sections of a config, outermost first, each with the path of keys that leads to the
    section.
    """
    paths = [(SECTION,), (OLD_SECTION,), *((outer, SECTION) for outer in NESTED)]
    if SECTION not in config and _PRODUCER in config:
        paths.append((MODELOPT_SECTION,))
    sections = []
    for path in paths:
        value: Any = config
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            sections.append((path, value))
    return sections


def _with_expert_dtype(
    config: Mapping[str, Any], path: tuple[str, ...], section: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a section with the format of the experts, which DeepSeek-V4 states beside its section."""
    for key in path[:-1]:
        config = config[key]
    if EXPERT_DTYPE in section or config.get(EXPERT_DTYPE) is None:
        return section
    return {**section, EXPERT_DTYPE: config[EXPERT_DTYPE]}


def _method(section: Mapping[str, Any], path: tuple[str, ...]) -> str:
    """Return the quantization method of a section; in old files, and in files of some programs, the key for it is
    missing.
    """
    if path == (MODELOPT_SECTION,):
        return MODELOPT_METHOD
    if METHOD not in section and GROUPS in section:
        return COMPRESSED
    if METHOD not in section and "quant_algo" in section:
        return MODELOPT_METHOD
    method = section.get(METHOD)
    return method if isinstance(method, str) else str(method)
