"""Arguments that many public functions have in common: their types, and the functions that read and check them.

`config` means the same in `open`, `save` and `reshard`, and `shard_size` means the same in Python and on the command
line. Every public function annotates such an argument with a type of this module, and reads it with a `read_…` function
of this module.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex, TypeAlias, TypeVar, cast, runtime_checkable

from transaxle.errors import refuse, without_secrets
from transaxle.options import OPTIONS, VERBS, Option, combination_error

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class Configuration(Protocol):
    """A config object, such as a `PretrainedConfig` of transformers."""

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dict with the entries of a config.json, including defaults."""


_Function = TypeVar("_Function", bound=Callable[..., Any])
PathLike: TypeAlias = str | os.PathLike[str]
"""Type of an argument that is a path on this machine or a URL."""
Config: TypeAlias = PathLike | Mapping[str, Any] | Configuration
"""A model's config: the path of a config.json or of its folder, the content as a mapping, or an object with
`to_dict()`.
"""
Axes: TypeAlias = Mapping[str, int] | str | Sequence[str]
"""Sizes of axes: a mapping `{"g": 8}`, or texts as on the command line: "g=8" or ["g=8", "e=4"]."""
Size: TypeAlias = int | str
"""A number of bytes: 5_000_000_000, or a text such as "5GB" (GB: 10^9) or "500MiB" (MiB: 2^20)."""
Patterns: TypeAlias = str | Sequence[str]
"""Patterns of tensor names, in which `*` matches any characters; a single pattern may be passed without a list."""
DType: TypeAlias = "str | torch.dtype"
"""An element type: a `torch.dtype`, its name ("bfloat16"), a short name ("bf16") or a safetensors code ("BF16")."""
EVERYTHING: Literal["everything"] = "everything"
Overwrite: TypeAlias = bool | Literal["everything"]
"""Whether to replace an existing checkpoint; `everything` means to delete also all other files in its folder."""
Weights: TypeAlias = Literal["fp32", "lp"]
"""Which weights of a DeepSpeed or Megatron checkpoint to read: those of the optimizer (`fp32`) or of the model
(`lp`).
"""

Mesh: TypeAlias = "Mapping[str, int] | DeviceMesh"
"""Parallel degrees: name of each mesh dim -> its number of ranks, as a mapping or as a device mesh of torch."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = "kmgt"
_SHORT_NAMES = {
    "bf16": "bf16", "bfloat16": "bf16",
    "fp16": "fp16", "float16": "fp16", "f16": "fp16", "half": "fp16",
    "fp32": "fp32", "float32": "fp32", "f32": "fp32", "float": "fp32",
    "fp64": "fp64", "float64": "fp64", "f64": "fp64", "double": "fp64",
}  # fmt: skip
"""Lower-case name of a floating-point type -> short name of the type."""
_DIGITS = 9
"""Maximum number of digits of a rank or world size in an environment variable."""
_LONGEST_VALUE = 80
"""Maximum number of characters of a wrong value that an error shows."""
_LISTED = 5
"""Maximum number of accepted keywords that an error lists."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Parallel degrees of a target checkpoint, for formats that have separate files for each rank."""

    tp: int = 1
    """Number of tensor-parallel ranks."""
    pp: int = 1
    """Number of pipeline stages."""
    ep: int = 1
    """Number of expert-parallel ranks."""
    rows: int = 128
    """Vocabulary rows are padded to a multiple of this number times `tp`."""
    dp: int = 1
    """Number of ranks over which FSDP shards parameters."""
    device: str = "cuda"
    """Device type of the mesh of the FSDP ranks."""
    mesh_dim: str | None = "fsdp"
    """Name of the dim of that mesh; None if it has no name."""


def wrong_type(argument: str, accepted: str, value: object) -> TypeError:
    """Build the TypeError for an argument of a wrong type, without raising it."""
    return TypeError(f"{argument} must be {accepted}; got {_repr_of(value)} ({type(value).__name__})")


def _repr_of(value: object) -> str:
    text = without_secrets(repr(value).replace("\n", " "))
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} …"


def suggests(function: _Function) -> _Function:
    """Decorate a function so that a call with an unknown or missing keyword raises an error that suggests the right
    keyword.

    From version 3.13 on, Python itself suggests a name for an unknown keyword. The function's signature is preserved.
    """
    parameters = inspect.signature(function).parameters
    name = function.__qualname__.removesuffix(".__init__")
    places = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters.values())
    keywords = [parameter for parameter in parameters.values() if parameter.kind is parameter.KEYWORD_ONLY]

    @functools.wraps(function)
    def wrapper(*positional: Any, **options: Any) -> Any:
        for argument in options.keys() - parameters.keys():
            close = get_close_matches(argument, parameters, 1)
            suggestion = f". Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}{suggestion}")
        if len(positional) > places:
            unset = [parameter for parameter in keywords if parameter.name not in options]
            needed = [parameter.name for parameter in unset if parameter.default is parameter.empty]
            names = needed[:1] or [parameter.name for parameter in unset]
            raise TypeError(_needs_keyword(name, positional[places], names))
        return function(*positional, **options)

    return cast("_Function", wrapper)


def read_options(verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of a public function, and return the options that differ from their defaults.

    Args:
        verb: name of the public function, a key of `options.VERBS`.
        arguments: argument name -> value, for all options of the public function, and possibly for further arguments.

    Raises:
        TypeError: if a value has a wrong type, or options exclude each other.
        ValueError: if the option does not accept the number or text.
        StorageError: with the code IO if a path has a character that no file system accepts.
    """
    values = {name: read_option(OPTIONS[name], arguments[name]) for name in VERBS[verb]}
    chosen = {name: value for name, value in values.items() if value != OPTIONS[name].default}
    if sentence := combination_error(verb, chosen):
        raise TypeError(sentence)
    return chosen


def read_option(option: Option, value: Any) -> Any:
    """Return the value of an option, checked and normalized; raises the errors of `read_options`."""
    if value is None and option.default is None and not option.required:
        return None
    if option.kind == "text":
        return read_text(option.name, value, option.example)
    if option.kind == "choice":
        return _read_choice(option, value)
    # The public function checks these values together with the target, so that all refusals are raised together.
    if option.kind in {"on", "overwrite"}:
        return value
    if option.kind == "axes":
        return read_axes(value) or None
    if option.kind == "config":
        return read_config(value)
    return _READERS[option.kind](option.name, value)


def _read_choice(option: Option, value: Any) -> str:
    """Return the choice that a value means; case is ignored, and a floating-point type may have any of its names.

    A text that is none of the choices is returned unchanged, and refused later.

    Raises:
        TypeError: if the value is not a str.
    """
    if type(value).__module__ != "torch":
        value = read_text(option.name, value, option.choices[0])
    name = str(read_float_type(option.name, value)).lower()
    return name if name in option.choices else str(value)


def _needs_keyword(function: str, value: object, keywords: Sequence[str]) -> str:
    """Return the error text for a positional argument that is accepted only as a keyword argument."""
    text = _repr_of(value)
    if len(keywords) == 1:
        return f"{function}() takes {text} only with its keyword: {keywords[0]}={text}"
    listed = f"{', '.join(keywords[:_LISTED])}{', …' if len(keywords) > _LISTED else ''}"
    return f"{function}() takes {text} only with its keyword, which is one of {listed}"


def read_number_of_job(name: str, default: int | None = None) -> int:
    """Read a number from an environment variable that a launcher such as torchrun sets.

    Args:
        name: name of the environment variable, such as `RANK`.
        default: the result if the variable is not set; None means that the variable must be set.

    Raises:
        UsageError: with the code AMBIGUOUS if the variable is not a non-negative integer.
    """
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        message = f"the environment variable {name} is {text!r}, which is no number of a job's ranks"
        raise refuse("AMBIGUOUS", message, hint=f"Unset {name}, or start the job with torchrun, which sets it.")
    return int(text)


def read_path(argument: str, value: object) -> str:
    """Return a path or URL as a str, after checking its type.

    Raises:
        TypeError: if the value is neither a `str` nor an `os.PathLike` of a `str`.
        StorageError: with the code IO if the text has a character that no path can have.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise wrong_type(argument, "a path: a str or an os.PathLike", value)
    try:
        is_path = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise refuse("IO", f"{argument} has a character that no path can have", file=ascii(text))
    return text


def read_source(argument: str, value: object) -> str:
    """Return the path of a source. An opened checkpoint is refused; the errors of `read_path` are raised too."""
    if not isinstance(value, str | os.PathLike):
        raise wrong_type(argument, "a path (a str or an os.PathLike), or an opened checkpoint", value)
    return read_path(argument, value)


def read_text(argument: str, value: object, example: str) -> str:
    """Return an argument that must be a text, such as the name of a family, dialect or format.

    Args:
        argument: name of the argument, for the error.
        value: value of the argument.
        example: a valid text, for the error.

    Raises:
        TypeError: if the value is not a `str`.
    """
    if not isinstance(value, str):
        raise wrong_type(argument, f'a str such as "{example}"', value)
    return value


def read_optional_text(argument: str, value: object, example: str) -> str | None:
    """Return a text, or None if the value is None; raises the errors of `read_text`."""
    return None if value is None else read_text(argument, value, example)


def read_size(argument: str, value: object) -> int:
    """Return a number of bytes from an integer or from a text such as "5GB".

    Raises:
        TypeError: if the value is neither an integer nor a str.
        ValueError: if the text is not a size, or the size is not positive.
    """
    accepted = 'a number of bytes: an int, or a str such as "5GB" or "500MiB"'
    if isinstance(value, str):
        count = parse_size(value)
        if not count:
            raise ValueError(f"{argument} must be {accepted}; got {value!r}")
        return count
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise wrong_type(argument, accepted, value)
    return read_count(argument, value)


def parse_size(text: str) -> int | None:
    """Parse a text for a number of bytes such as `5GB`, `512MB`, `1.5 GiB` or `1000`; None if it is not a
    finite size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        return None
    power = _POWERS.index(match[2].lower()) + 1 if match[2] else 0
    size = float(match[1]) * (1024 if match[3] else 1000) ** power
    return int(size) if size < math.inf else None


def read_config(value: object) -> str | Mapping[str, Any] | None:
    """Return a config's content, or the path of a config that has not been read; None if the value is None.

    Raises:
        TypeError: if the value has none of the types of `Config`.
    """
    if value is None or isinstance(value, Mapping):
        return value
    if isinstance(value, str | os.PathLike):
        return read_path("config", value)
    if isinstance(value, Configuration) and not isinstance(value, type):
        return dict(value.to_dict())
    accepted = "a path (of a config.json or of its folder), a mapping, or an object with to_dict()"
    raise wrong_type("config", accepted, value)


def read_axes(value: object) -> dict[str, int]:
    """Return axis -> size; empty if the value is None.

    Raises:
        TypeError: if the value is neither a mapping of names to integers nor a text or list of texts.
        ValueError: if a text is not `AXIS=SIZE`, or an axis has two sizes.
    """
    accepted = 'a mapping of axes to sizes, such as {"g": 8}, or a text such as "g=8"'
    if value is None:
        return {}
    sizes: dict[str, int] = {}
    if isinstance(value, Mapping):
        for axis, size in value.items():
            if not isinstance(axis, str) or isinstance(size, bool) or not isinstance(size, SupportsIndex):
                raise wrong_type("axes", accepted, value)
            sizes[axis] = operator.index(size)
        return sizes
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise wrong_type("axes", accepted, value)
    for text in texts:
        axis, equals, count = text.partition("=")
        if not (axis and equals and count.isascii() and count.isdigit()):
            raise ValueError(f"{text!r} is not AXIS=SIZE; write for example g=8")
        if sizes.setdefault(axis, int(count)) != int(count):
            raise ValueError(f"axis {axis} is given twice: {sizes[axis]} and {count}")
    return sizes


def read_count(argument: str, value: object) -> int:
    """Return a positive integer, such as a number of workers.

    Raises:
        TypeError: if the value is not an integer.
        ValueError: if the value is not positive.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise wrong_type(argument, "an int", value)
    count = operator.index(value)
    if count < 1:
        raise ValueError(f"{argument} must be positive, not {count}")
    return count


def read_flag(argument: str, value: object) -> bool:
    """Return a value that must be True or False.

    Raises:
        TypeError: if the value is neither True nor False.
    """
    if not isinstance(value, bool):
        raise wrong_type(argument, "a bool: True or False", value)
    return value


def check_flags(**flags: object) -> None:
    """Refuse arguments that are neither True nor False, because a text such as "false" would count as True.

    Raises:
        TypeError: if an argument is neither True nor False; the error names the first such argument.
    """
    for argument, value in flags.items():
        read_flag(argument, value)


def read_degrees(options: Mapping[str, Any]) -> Degrees | None:
    """Return the parallel degrees of a target checkpoint; None if no degree is set.

    Args:
        options: option name -> value, for `tp`, `pp`, `ep`, `make_vocab_size_divisible_by`, `dp` and `device`; each may
            be missing.

    Raises:
        TypeError: if a degree is not an integer, or the device is not a text.
        ValueError: if a degree is less than one.
    """
    names = {"tp": "tp", "pp": "pp", "ep": "ep", "make_vocab_size_divisible_by": "rows", "dp": "dp"}
    fields: dict[str, Any] = {
        field: read_count(name, options[name]) for name, field in names.items() if options.get(name) is not None
    }
    if options.get("device") is not None:
        fields["device"] = read_text("device", options["device"], "cpu")
    return Degrees(**fields) if fields else None


_MESH_DIMS = {"tp": "tp", "pp": "pp", "ep": "ep", "dp": "dp", "fsdp": "dp"}
"""Name of a mesh dim -> the option for its degree."""


def read_mesh(mesh: object) -> dict[str, int]:
    """Return option name (`tp`, `pp`, `ep`, `dp`) -> number of ranks; empty if the mesh is None.

    Raises:
        TypeError: if the value is neither a mapping nor a device mesh with named dims.
        UsageError: with the code UNKNOWN_AXIS if a dim is none of these, or is given twice.
    """
    names, shape = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "shape", None)
    sizes = dict(zip(names, shape, strict=True)) if names and shape else {} if mesh is None else mesh
    if not isinstance(sizes, Mapping):
        raise wrong_type("mesh", 'a mapping such as {"tp": 2}, or a device mesh whose dims have names', mesh)
    degrees: dict[str, int] = {}
    for dim, count in sizes.items():
        option = _MESH_DIMS.get(dim) if isinstance(dim, str) else None
        if option is None or option in degrees:
            problem = "is no dim of a target's ranks" if option is None else f"is a second dim for {option}"
            raise refuse("UNKNOWN_AXIS", f"mesh: {dim!r} {problem}", hint=f"Dims: {', '.join(_MESH_DIMS)}.")
        degrees[option] = read_count(f"mesh[{dim!r}]", count)
    return degrees


def read_patterns(argument: str, value: object) -> tuple[str, ...]:
    """Return patterns of tensor names as a tuple.

    Raises:
        TypeError: if the value is neither a `str` nor a sequence of `str`.
    """
    patterns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise wrong_type(argument, "a pattern of names, or a list of patterns", value)
    return patterns


def read_float_type(argument: str, value: object) -> str | None:
    """Return the short name of a floating-point type, such as `bf16`; an unknown name is returned unchanged.

    Unsupported types are refused later, when the checkpoint is opened.

    Raises:
        TypeError: if the value is neither a `str` nor a `torch.dtype`.
    """
    if value is None:
        return None
    is_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"  # torch must not be imported
    name = str(value).removeprefix("torch.") if is_dtype else value
    if not isinstance(name, str):
        raise wrong_type(argument, 'an element type such as "bf16" or torch.bfloat16', value)
    return _SHORT_NAMES.get(name.lower().removeprefix("torch."), name)


def read_overwrite(overwrite: object) -> Overwrite:
    """Check the value of the option `overwrite`, and return it.

    Raises:
        UsageError: with the code AMBIGUOUS if the value is not True, False or `everything`.
    """
    if overwrite is True or overwrite is False:
        return overwrite
    if overwrite == EVERYTHING:
        return EVERYTHING
    message = f"overwrite must be True, False or {EVERYTHING!r}, not {overwrite!r}"
    raise refuse("AMBIGUOUS", message, hint=f"True replaces a checkpoint, {EVERYTHING!r} everything in its folder.")


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    "count": read_count,
    "flag": read_flag,
    "float_type": read_float_type,
    "memory": read_size,
    "path": read_path,
    "patterns": read_patterns,
    "size": read_size,
    "switch": read_flag,
}
"""Kind of an option -> function that reads and checks the option's value."""
