"""Traces of transformers: what `save_pretrained` writes of a model with numbered elements.

Only here torch and transformers are imported, and only when a trace is made.

Searching for a tiny config: where small sizes do not fit each other, as many of them as the model takes.

It starts with the config that the model has, which fits, and takes over changes: all of them, or else half of them and
then the other half, down to single keys.

The tensors of a folder of safetensors files, read by the peer's own library and not by ours.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from operator import itemgetter
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import numpy as np

from transaxle.derivation.tiny_configs import DEEP, OWN, PLAIN, PROPORTIONED, RATIO, SMALL, VARIANTS, filled, kind, tiny
from transaxle.derivation.traces import (
    EXACT,
    FLOOR,
    Numbers,
    Shape,
    Trace,
    Underivable,
    combined,
    digits,
    dtype_of,
    passes,
)
from transaxle.errors import refuse
from transaxle.extras import install
from transaxle.formats.storage.storage import parsed

KeyPath = tuple[str, ...]
Change = tuple[KeyPath, object]
Builds = Callable[[Mapping[str, Any]], bool]
_GONE = object()
"""The value of a key that is taken away."""


def nearest(base: Mapping[str, Any], goals: Sequence[Mapping[str, Any]], builds: Builds) -> dict[str, Any] | None:
    """Return a config that builds, as near to the goals as can be found; None where the one to start with does not.

    Args:
        base: the config to start with.
        goals: configs, the most wanted first; where one is not taken over, the next one counts.
        builds: tells whether a model has such a config.
    """
    config = dict(base)
    if not builds(config):
        return None
    for goal in goals:
        units: dict[str, list[Change]] = {}
        for path, value in _changes(config, base, goal):
            units.setdefault(kind(path[-1], value), []).append((path, value))
        config = _taken(config, sorted(units.values(), key=_is_late), builds)
    return config


def _is_late(unit: Sequence[Change]) -> bool:
    """Sort numbers of layers first: with few of them, models are built in a moment."""
    path, value = unit[0]
    return kind(path[-1], value) != "layers"


def _changes(config: Mapping[str, Any], base: Mapping[str, Any], goal: Mapping[str, Any]) -> Iterator[Change]:
    """Yield what is different in a goal, of the keys that are still as they were."""
    for key in (*config, *(key for key in goal if key not in config)):
        now, before, then = config.get(key, _GONE), base.get(key, _GONE), goal.get(key, _GONE)
        if isinstance(now, Mapping) and isinstance(before, Mapping) and isinstance(then, Mapping):
            yield from (((key, *path), value) for path, value in _changes(now, before, then))
        elif now is before and now != then:
            yield (key,), then


def _taken(config: dict[str, Any], units: Sequence[Sequence[Change]], builds: Builds) -> dict[str, Any]:
    """Return a config with as many units of changes as it can have."""
    if not units:
        return config
    changed = _changed(config, [change for unit in units for change in unit])
    if builds(changed):
        return changed
    if len(units) == 1:
        if len(units[0]) == 1:
            return config
        units = [[change] for change in units[0]]
    half = len(units) // 2
    return _taken(_taken(config, units[:half], builds), units[half:], builds)


def _changed(config: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    made = dict(config)
    for path, value in changes:
        inside = made
        for key in path[:-1]:
            inside[key] = inside = dict(inside[key])
        if value is _GONE:
            inside.pop(path[-1], None)
        else:
            inside[path[-1]] = value
    return made


Tensor = TypeVar("Tensor")


def loaded(folder: Path, load_file: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of all files in a folder by name.

    Args:
        folder: where they are.
        load_file: the reader of one file: that of `safetensors.numpy` or `safetensors.torch`.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


HEADS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
"""transformers' registers of model classes, the most wanted first: with an encoder before the decoder alone."""
_BASE = EXACT["float32"]
"""Numbers that one pass carries: models are traced in 32 bits."""
_LONGEST = 240
"""Characters of a model's complaint."""
_ENOUGH, _MOST = 32_000_000, 60_000_000
"""Elements of a model for which no smaller one is tried, and of the largest one that is traced."""


class Peer:
    """The installed transformers.

    Raises:
        Refused: UNSUPPORTED where it is not installed.
    """

    def __init__(self) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            hint = f"Install them:  {install('demo')}"
            raise refuse("UNSUPPORTED", f"tracing needs torch and transformers: {error}", hint=hint) from None
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.torch: Any = torch
        self.transformers: Any = transformers

    @property
    def version(self) -> str:
        """Version of transformers."""
        return str(self.transformers.__version__)

    def model_types(self) -> list[str]:
        """Return every model type that it knows."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        return sorted(CONFIG_MAPPING_NAMES)

    def config_class(self, model_type: str) -> Any:
        """Return the class of a model type's configs.

        Raises:
            UsageError: UNKNOWN_FAMILY for a type that it does not know.
        """
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if model_type not in CONFIG_MAPPING:
            close = get_close_matches(model_type.lower(), self.model_types(), 3)
            hint = (
                f"Did you mean {' or '.join(close)}?"
                if close
                else "Give the model type as its config.json has it, and install a transformers that knows it; of any "
                "other model, derive the table from a converter of your own."
            )
            raise refuse("UNKNOWN_FAMILY", f"transformers {self.version} has no model type {model_type!r}", hint=hint)
        return CONFIG_MAPPING[model_type]

    def model_classes(self, model_type: str, architectures: Sequence[str] = ()) -> list[Any]:
        """Return the classes that a config names, or those that transformers registers for the type, the best first.

        Raises:
            Refused: UNSUPPORTED where there is none.
        """
        from transformers.models.auto import modeling_auto

        names = list(architectures)
        for register in HEADS:
            entry = getattr(modeling_auto, register, {}).get(model_type) or ()
            names += [entry] if isinstance(entry, str) else list(entry)
        found = [getattr(self.transformers, name, None) for name in dict.fromkeys(names)]
        classes = [each for each in found if hasattr(each, "save_pretrained")]
        if not classes:
            raise refuse("UNSUPPORTED", f"transformers {self.version} has no model class for {model_type!r}")
        own = self.config_class(model_type)  # a class with another config makes a part of such a model
        return sorted(classes, key=lambda each: each.__name__ not in architectures and each.config_class is not own)

    def aliases(self, model_type: str) -> dict[str, list[str]]:
        """Return config keys that transformers reads as one."""
        found: dict[str, list[str]] = {}
        for alias, key in (getattr(self.config_class(model_type), "attribute_map", None) or {}).items():
            found.setdefault(key, []).append(alias)
            found.setdefault(alias, []).append(key)
        return found


def variants(
    peer: Peer,
    model_type: str,
    base: Mapping[str, Any] | None = None,
    complaints: list[str] | None = None,
    numbers: Sequence[int] = range(VARIANTS),
) -> Iterator[tuple[Any, int]]:
    """Yield a model for each variant that can be built, on the meta device, with the number of its variant.

    Args:
        peer: the installed transformers.
        model_type: the word that config.json has.
        base: the config that is made tiny; None: the default one.
        complaints: gets what a model says where it cannot be built, as one line.
        numbers: the variants.
    """
    complaints = [] if complaints is None else complaints
    config_class = peer.config_class(model_type)
    base = dict(base) if base else config_class().to_dict()
    model_classes = peer.model_classes(model_type, base.get("architectures") or ())
    for variant in numbers:
        for model_class in model_classes:
            make = _Making(peer, config_class, model_class, complaints)
            model = make.first(_settings(base, variant)) or make.first(_found(base, variant, make.builds))
            if model is not None:
                model_classes = [model_class]  # the other variants are of the class that could be built first
                yield model, variant
                break


def shapes(peer: Peer, model_type: str, config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of a model of the config's own sizes, which takes no memory; nothing if it cannot be built."""
    for model_class in peer.model_classes(model_type, config.get("architectures") or ()):
        try:
            with warnings.catch_warnings(), peer.torch.device("meta"):
                warnings.simplefilter("ignore")
                model = model_class(peer.config_class(model_type).from_dict(dict(config)))
        except Exception:  # noqa: BLE001 - tiny ones may be of the next class
            continue
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {}


def _settings(base: Mapping[str, Any], variant: int) -> Iterator[dict[str, Any]]:
    """Yield the configs of a variant; where sizes of one do not fit each other, the next one has fewer changes."""
    if variant == PROPORTIONED:
        yield from (tiny(base, variant, sizes=sizes) for sizes in (SMALL, RATIO, DEEP))
        return
    for flip, apart in ((True, True), (True, False), (False, True), (False, False)):
        for sizes in (OWN, PLAIN):
            settings = tiny(base, variant, sizes=sizes, flip=flip, apart=apart)
            if not apart or settings != tiny(base, variant, sizes=sizes, flip=flip):
                yield settings
    for sizes in (SMALL, RATIO, DEEP):
        for flip in (True, False):
            yield tiny(base, variant, sizes=sizes, flip=flip)


def _found(
    base: Mapping[str, Any], variant: int, builds: Callable[[Mapping[str, Any]], bool]
) -> Iterator[dict[str, Any]]:
    """Yield the config of a variant that is found by trying key after key."""
    wanted = (SMALL, RATIO) if variant == PROPORTIONED else (OWN, SMALL, RATIO)
    goals = [tiny(base, variant, sizes=sizes, flip=sizes == OWN) for sizes in wanted]
    found = nearest(filled(base), goals, builds)
    if found is not None:
        yield found


@dataclass(frozen=True)
class _Making:
    """Makes models of one class."""

    peer: Peer
    config_class: Any
    model_class: Any
    complaints: list[str]

    def first(self, attempts: Iterable[Mapping[str, Any]]) -> Any:
        """Return the model of the first config that fits and is small enough; None if there is none."""
        larger: list[tuple[int, Any]] = []
        for model in map(self._model, attempts):
            if model is None:
                continue
            count = sum(p.numel() for p in model.parameters())
            if count <= _ENOUGH:
                return model.to_empty(device="cpu").float()
            larger.append((count, model))
        if not larger:
            return None
        count, model = min(larger, key=itemgetter(0))
        if count <= _MOST:
            return model.to_empty(device="cpu").float()
        self.complaints.append(f"its smallest model has {count:,} parameters")
        return None

    def builds(self, settings: Mapping[str, Any]) -> bool:
        """Tell whether there is a model of a config, of whatever size."""
        return self._model(settings) is not None

    def _model(self, settings: Mapping[str, Any]) -> Any:
        try:
            with warnings.catch_warnings(), self.peer.torch.device("meta"):
                warnings.simplefilter("ignore")  # a size that would be slow is still a size
                return self.model_class(self.config_class.from_dict(dict(settings)))
        except Exception as error:  # noqa: BLE001 - any model's own complaint about sizes that do not fit
            self.complaints.append(shorten(f"{type(error).__name__}: {error}", _LONGEST))
            return None


def trace(peer: Peer, model: Any) -> Trace:
    """Number a model's elements, save it, and return both sides.

    Raises:
        Underivable: values were changed on the way.
    """
    from safetensors.torch import load_file

    tensors, most = _numbered(model)
    carried: list[tuple[dict[str, Any], dict[str, Any]]] = []
    count = passes(most, _BASE)
    config: dict[str, Any] = {}
    for position in range(count):
        with peer.torch.no_grad():
            for tensor, numbers in tensors:
                part = digits(numbers, _BASE, position)
                tensor.copy_(peer.torch.from_numpy(part).reshape(tensor.shape).to(tensor.dtype))
        memory = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        with saved(model) as folder:
            carried.append((loaded(folder, load_file), memory))
            config = parsed((folder / "config.json").read_text("utf-8"))
    return _combined(carried, config)


def traced_or_not(peer: Peer, model: Any, complaints: list[str]) -> Trace | None:
    """Return the trace of a model; None where transformers cannot store one of these sizes, and why as a complaint.

    Raises:
        Underivable: values were changed on the way.
    """
    try:
        return trace(peer, model)
    except Underivable:
        raise
    except Exception as error:  # noqa: BLE001 - of the peer's own conversion of sizes that do not fit
        complaints.append(shorten(f"{type(error).__name__}: {error}", _LONGEST))
        return None


@contextmanager
def saved(model: Any) -> Iterator[Path]:
    """Save a model, and give the folder."""
    with tempfile.TemporaryDirectory(prefix="transaxle-trace-") as folder:
        model.save_pretrained(folder, max_shard_size="50GB")
        yield Path(folder)


def _numbered(model: Any) -> tuple[list[tuple[Any, Numbers]], int]:
    """Return every storage of the model with the numbers it is to carry, from `FLOOR` on."""
    model.tie_weights()
    tensors, seen, start = [], set(), FLOOR
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() in seen or not tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        if not _carries(tensor):
            tensor.data.zero_()
            continue
        tensors.append((tensor, np.arange(start, start + tensor.numel(), dtype=np.int64)))
        start += tensor.numel()
    return tensors, start


def _carries(tensor: Any) -> bool:
    """Tell whether the dtype of a tensor carries the numbers of a pass."""
    return EXACT.get(dtype_of(tensor), 0) >= _BASE


def _combined(carried: Sequence[tuple[dict[str, Any], dict[str, Any]]], config: dict[str, Any]) -> Trace:
    """Put the passes together; what carries no numbers must be the same on both sides."""
    sides: list[dict[str, Numbers]] = []
    plain: list[dict[str, Any]] = []
    for side in (0, 1):
        first = carried[0][side]
        held = {name: _carries(tensor) and tensor.numel() > 0 for name, tensor in first.items()}
        sides.append(
            {
                name: _places(combined([_whole(name, each[side][name]) for each in carried], _BASE))
                for name, numbered in held.items()
                if numbered
            }
        )
        plain.append({name: first[name] for name, numbered in held.items() if not numbered})
    unnumbered: dict[str, Shape] = {}
    for name, tensor in plain[0].items():
        other = plain[1].get(name)
        if other is None or other.shape != tensor.shape:
            raise Underivable(f"{name} holds flags, and is elsewhere in memory")
        unnumbered[name] = tuple(tensor.shape)
    return Trace(sides[0], sides[1], config, unnumbered)


def _places(numbers: Numbers) -> Numbers:
    """Return the elements that have some numbers, from 1 on; 0 for constants, which are below."""
    return np.maximum(numbers - (FLOOR - 1), 0)


def _whole(name: str, tensor: Any) -> Numbers:
    values = tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()
    numbers: Numbers = values.astype(np.int64)
    if not bool((numbers == values).all()) or (numbers.size and int(numbers.min()) < 0):
        raise Underivable(f"{name}: its values are changed, not only moved")
    return numbers
