"""Arguments that many public functions share: what each may be, and the one sentence for what it may not be.

`config` means the same to `open`, `save` and `reshard`, `shard_size` the same in Python and on the command line: every
public function annotates such an argument with the type below, and reads it with the function beside that type.
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
from transaxle.options import OPTIONS, VERBS, Option, refused

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Configuration(Protocol):
    """A config object, such as a `PretrainedConfig` of transformers."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as config.json holds it, with all defaults."""


_Function = TypeVar("_Function", bound=Callable[..., Any])
PathLike: TypeAlias = str | os.PathLike[str]
"""A path on this machine or a URL."""
Config: TypeAlias = PathLike | Mapping[str, Any] | Configuration
"""A model's config: the path of a config.json or of its folder, its content, or an object with `to_dict()`."""
Axes: TypeAlias = Mapping[str, int] | str | Sequence[str]
"""Sizes of axes: `{"g": 8}`, or as on the command line "g=8" or ["g=8", "e=4"]."""
Size: TypeAlias = int | str
"""Bytes: 5_000_000_000, or a text such as "5GB" (10^9) or "500MiB" (2^20)."""
Patterns: TypeAlias = str | Sequence[str]
"""Patterns of names, in which `*` stands for any characters; one alone needs no list."""
DType: TypeAlias = "str | torch.dtype"
"""An element type: torch's own, its name ("bfloat16"), its short name ("bf16") or its safetensors code ("BF16")."""
EVERYTHING: Literal["everything"] = "everything"
Overwrite: TypeAlias = bool | Literal["everything"]
"""Whether a checkpoint may be replaced; `everything`: with everything else in its folder."""
Weights: TypeAlias = Literal["fp32", "lp"]
"""Which weights of a DeepSpeed checkpoint: those that the optimizer keeps, or the module's own."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = "kmgt"
_SHORT_NAMES = {
    "bf16": "bf16", "bfloat16": "bf16",
    "fp16": "fp16", "float16": "fp16", "f16": "fp16", "half": "fp16",
    "fp32": "fp32", "float32": "fp32", "f32": "fp32", "float": "fp32",
    "fp64": "fp64", "float64": "fp64", "f64": "fp64", "double": "fp64",
}  # fmt: skip
"""Floating-point types, by each of their names in lower case -> the short name."""
_DIGITS = 9
"""Digits of the largest number of a job."""
_LONGEST_VALUE = 80
"""Characters of a wrong value that an error shows."""
_LISTED = 5
"""Keywords that an error lists."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """The ranks for which a checkpoint is written that has files for each of them."""

    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert-parallel ranks."""
    rows: int = 128
    """The vocabulary is padded to a multiple of this, times the tensor-parallel ranks."""


def wrong_type(argument: str, accepted: str, given: object) -> TypeError:
    """Build (not raise) the error for an argument of a type that it cannot have."""
    return TypeError(f"{argument} must be {accepted}; got {_shortened(given)} ({type(given).__name__})")


def _shortened(given: object) -> str:
    text = without_secrets(repr(given).replace("\n", " "))
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} …"


def suggests(function: _Function) -> _Function:
    """Let a call with an unknown keyword, or with a value that lacks its keyword, say which one may be meant.

    Python says so itself from 3.13 on, of unknown keywords. The signature stays that of the function.
    """
    parameters = inspect.signature(function).parameters
    name = function.__qualname__.removesuffix(".__init__")
    places = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters.values())
    keywords = [parameter for parameter in parameters.values() if parameter.kind is parameter.KEYWORD_ONLY]

    @functools.wraps(function)
    def called(*given: Any, **options: Any) -> Any:
        for argument in options.keys() - parameters.keys():
            close = get_close_matches(argument, parameters, 1)
            meant = f". Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}{meant}")
        if len(given) > places:
            left = [parameter for parameter in keywords if parameter.name not in options]
            needed = [parameter.name for parameter in left if parameter.default is parameter.empty]
            names = needed[:1] or [parameter.name for parameter in left]
            raise TypeError(_needs_keyword(name, given[places], names))
        return function(*given, **options)

    return cast("_Function", called)


def read_options(verb: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of a verb, and return those that are given: whose value is not the default.

    Args:
        verb: one of `options.VERBS`.
        given: every option of the verb, and possibly other arguments.

    Raises:
        TypeError: a value of a type that the option cannot have, or options that exclude each other.
        ValueError: a number or a text that is none of those it may be.
        StorageError: IO for a path that no system takes.
    """
    values = {name: read_option(OPTIONS[name], given[name]) for name in VERBS[verb]}
    chosen = {name: value for name, value in values.items() if value != OPTIONS[name].default}
    if sentence := refused(verb, chosen):
        raise TypeError(sentence)
    return chosen


def read_option(option: Option, given: Any) -> Any:
    """Return the value of an option as the verbs use it; raises as `read_options`."""
    if given is None and option.default is None and not option.required:
        return None
    if option.kind == "text":
        return read_text(option.name, given, option.example)
    if option.kind == "choice":
        return _read_choice(option, given)
    if option.kind in {"on", "overwrite"}:  # whoever looks at the target reads these, with all else against it
        return given
    if option.kind == "axes":
        return read_axes(given) or None
    if option.kind == "config":
        return read_config(given)
    return _READERS[option.kind](option.name, given)


def _read_choice(option: Option, given: Any) -> str:
    """Return one of the values that an option may have: in any case, and a floating-point type by any of its names.

    Whoever acts on it refuses another text.

    Raises:
        TypeError: it is no text.
    """
    if type(given).__module__ != "torch":
        given = read_text(option.name, given, option.choices[0])
    name = str(read_float_type(option.name, given)).lower()
    return name if name in option.choices else str(given)


def _needs_keyword(function: str, given: object, keywords: Sequence[str]) -> str:
    """Return the sentence for a value that follows the last argument without a keyword."""
    text = _shortened(given)
    if len(keywords) == 1:
        return f"{function}() takes {text} only with its keyword: {keywords[0]}={text}"
    listed = f"{', '.join(keywords[:_LISTED])}{', …' if len(keywords) > _LISTED else ''}"
    return f"{function}() takes {text} only with its keyword, which is one of {listed}"


def read_number_of_job(name: str, default: int | None = None) -> int:
    """Return a number that a launcher such as torchrun has put into an environment variable.

    Args:
        name: of the variable, `RANK`.
        default: what holds where it is not there; None: it must be.

    Raises:
        UsageError: AMBIGUOUS where it is no number of a job.
    """
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        message = f"the environment variable {name} is {text!r}, which is no number of a job's ranks"
        raise refuse("AMBIGUOUS", message, hint=f"Unset {name}, or start the job with torchrun, which sets it.")
    return int(text)


def read_path(argument: str, given: object) -> str:
    """Return a path or URL as text.

    Raises:
        TypeError: it is neither a `str` nor an `os.PathLike` of one.
        StorageError: IO where no system takes it as a path.
    """
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str):
        raise wrong_type(argument, "a path: a str or an os.PathLike", given)
    try:
        is_path = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise refuse("IO", f"{argument} has a character that no path can have", file=ascii(text))
    return text


def read_source(argument: str, given: object) -> str:
    """Return the path of a source that is no opened checkpoint; raises as `read_path`."""
    if not isinstance(given, str | os.PathLike):
        raise wrong_type(argument, "a path (a str or an os.PathLike), or an opened checkpoint", given)
    return read_path(argument, given)


def read_text(argument: str, given: object, example: str) -> str:
    """Return a name: of a family, a dialect, a format.

    Args:
        argument: what the function calls it.
        given: what the caller gave.
        example: such a name, for the error.

    Raises:
        TypeError: it is no `str`.
    """
    if not isinstance(given, str):
        raise wrong_type(argument, f'a str such as "{example}"', given)
    return given


def read_optional_text(argument: str, given: object, example: str) -> str | None:
    """Return a name, or None where nothing is given; raises as `read_text`."""
    return None if given is None else read_text(argument, given, example)


def read_size(argument: str, given: object) -> int:
    """Return a number of bytes.

    Raises:
        TypeError: it is neither an integer nor a text.
        ValueError: the text is no size, or the size is zero or less.
    """
    accepted = 'a number of bytes: an int, or a str such as "5GB" or "500MiB"'
    if isinstance(given, str):
        count = parse_size(given)
        if not count:
            raise ValueError(f"{argument} must be {accepted}; got {given!r}")
        return count
    if isinstance(given, bool) or not isinstance(given, SupportsIndex):
        raise wrong_type(argument, accepted, given)
    return read_count(argument, given)


def parse_size(text: str) -> int | None:
    """Read a number of bytes such as `5GB`, `512MB`, `1.5 GiB` or `1000`; None where it is none, or endless."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        return None
    power = _POWERS.index(match[2].lower()) + 1 if match[2] else 0
    size = float(match[1]) * (1024 if match[3] else 1000) ** power
    return int(size) if size < math.inf else None


def read_config(given: object) -> str | Mapping[str, Any] | None:
    """Return a config's content, or the path of what has it, which is not read here; None where nothing is given.

    Raises:
        TypeError: it is none of what `Config` names.
    """
    if given is None or isinstance(given, Mapping):
        return given
    if isinstance(given, str | os.PathLike):
        return read_path("config", given)
    if isinstance(given, Configuration) and not isinstance(given, type):
        return dict(given.to_dict())
    accepted = "a path (of a config.json or of its folder), a mapping, or an object with to_dict()"
    raise wrong_type("config", accepted, given)


def read_axes(given: object) -> dict[str, int]:
    """Return sizes by axis; none where nothing is given.

    Raises:
        TypeError: it is neither a mapping of names to integers, nor texts.
        ValueError: a text is not `AXIS=SIZE`, or an axis has two sizes.
    """
    accepted = 'a mapping of axes to sizes, such as {"g": 8}, or a text such as "g=8"'
    if given is None:
        return {}
    sizes: dict[str, int] = {}
    if isinstance(given, Mapping):
        for axis, size in given.items():
            if not isinstance(axis, str) or isinstance(size, bool) or not isinstance(size, SupportsIndex):
                raise wrong_type("axes", accepted, given)
            sizes[axis] = operator.index(size)
        return sizes
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise wrong_type("axes", accepted, given)
    for text in texts:
        axis, equals, count = text.partition("=")
        if not (axis and equals and count.isascii() and count.isdigit()):
            raise ValueError(f"{text!r} is not AXIS=SIZE; write for example g=8")
        if sizes.setdefault(axis, int(count)) != int(count):
            raise ValueError(f"axis {axis} is given twice: {sizes[axis]} and {count}")
    return sizes


def read_count(argument: str, given: object) -> int:
    """Return a number of workers.

    Raises:
        TypeError: it is no integer.
        ValueError: it is zero or less.
    """
    if isinstance(given, bool) or not isinstance(given, SupportsIndex):
        raise wrong_type(argument, "an int", given)
    count = operator.index(given)
    if count < 1:
        raise ValueError(f"{argument} must be positive, not {count}")
    return count


def read_flag(argument: str, given: object) -> bool:
    """Return True or False.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(given, bool):
        raise wrong_type(argument, "a bool: True or False", given)
    return given


def check_flags(**given: object) -> None:
    """Refuse arguments that are neither True nor False: a text such as "false" would count as True.

    Raises:
        TypeError: names the first of them.
    """
    for argument, value in given.items():
        read_flag(argument, value)


def read_degrees(given: Mapping[str, Any]) -> Degrees | None:
    """Read the ranks for which a checkpoint is written; None where none are given.

    Args:
        given: `tp`, `pp`, `ep` and `make_vocab_size_divisible_by`, as far as they are.

    Raises:
        TypeError: for what is no number.
        ValueError: for less than one.
    """
    names = {"tp": "tp", "pp": "pp", "ep": "ep", "make_vocab_size_divisible_by": "rows"}
    counts = {field: read_count(name, given[name]) for name, field in names.items() if given.get(name) is not None}
    return Degrees(**counts) if counts else None


def read_patterns(argument: str, given: object) -> tuple[str, ...]:
    """Return patterns of names.

    Raises:
        TypeError: it is neither a `str` nor a sequence of these.
    """
    patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise wrong_type(argument, "a pattern of names, or a list of patterns", given)
    return patterns


def read_float_type(argument: str, given: object) -> str | None:
    """Return the short name of a floating-point type, `bf16`; a name that is none of these stays as it is.

    Whoever reads a checkpoint knows which types it can be read as, and refuses the others.

    Raises:
        TypeError: it is neither a `str` nor a `torch.dtype`.
    """
    if given is None:
        return None
    is_dtype = type(given).__module__ == "torch" and type(given).__name__ == "dtype"  # torch may not be imported here
    name = str(given).removeprefix("torch.") if is_dtype else given
    if not isinstance(name, str):
        raise wrong_type(argument, 'an element type such as "bf16" or torch.bfloat16', given)
    return _SHORT_NAMES.get(name.lower().removeprefix("torch."), name)


def read_overwrite(overwrite: object) -> Overwrite:
    """Return the `overwrite` option if it is valid.

    Raises:
        UsageError: AMBIGUOUS for anything but True, False and `everything`.
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
"""What reads an option, by its kind."""
