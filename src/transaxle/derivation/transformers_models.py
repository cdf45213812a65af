"""Traces of transformers: numbers the elements of a model, and reads the checkpoint that `save_pretrained` writes of
it.

torch and transformers are imported only in this module, and only when a trace is made.

Tiny configs: the search shrinks as many sizes of the model's config as the model accepts together.
The search starts with the model's valid config and applies all changes at once. If the model refuses the changes, each
half of them is applied separately, and so on down to single keys.

The tensors of a folder are read by the safetensors library, independently of Transaxle's readers.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from operator import itemgetter
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import numpy as np

from transaxle.derivation.tiny_configs import (
    DEEP,
    OF_SHARED_SIZES,
    OWN,
    PLAIN,
    PROPORTIONED,
    RATIO,
    SMALL,
    VARIANTS,
    fill_defaults,
    kind,
    tiny,
)
from transaxle.derivation.traces import (
    EXACT,
    FLOOR,
    Numbers,
    Shape,
    Trace,
    Underivable,
    combine,
    digits,
    dtype_of,
    passes,
)
from transaxle.errors import refuse
from transaxle.extras import install
from transaxle.formats.storage.storage import parse_json

KeyPath = tuple[str, ...]
Change = tuple[KeyPath, object]
Builds = Callable[[Mapping[str, Any]], bool]
_GONE = object()
"""Value in a change which means that the config key is removed."""


def nearest(base: Mapping[str, Any], goals: Sequence[Mapping[str, Any]], builds: Builds) -> dict[str, Any] | None:
    """Return the config nearest to the goals that the search finds and a model class accepts; None if it refuses
    `base`.

    Args:
        base: the config to start with.
        goals: the desired configs, best first; if a change towards one goal fails, the value in the next goal is tried.
        builds: function that returns whether the model class accepts a config.
    """
    config = dict(base)
    if not builds(config):
        return None
    for goal in goals:
        units: dict[str, list[Change]] = {}
        for path, value in _changes(config, base, goal):
            units.setdefault(kind(path[-1], value), []).append((path, value))
        config = _apply_units(config, sorted(units.values(), key=_is_late), builds)
    return config


def _is_late(unit: Sequence[Change]) -> bool:
    """Return a sort key: changes to the number of layers are first, because models with few layers are built
    quickly.
    """
    path, value = unit[0]
    return kind(path[-1], value) != "layers"


def _changes(config: Mapping[str, Any], base: Mapping[str, Any], goal: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the changes that lead to a goal, for config keys that still have their original value."""
    for key in (*config, *(key for key in goal if key not in config)):
        now, before, then = config.get(key, _GONE), base.get(key, _GONE), goal.get(key, _GONE)
        if isinstance(now, Mapping) and isinstance(before, Mapping) and isinstance(then, Mapping):
            yield from (((key, *path), value) for path, value in _changes(now, before, then))
        elif now is before and now != then:
            yield (key,), then


def _apply_units(config: dict[str, Any], units: Sequence[Sequence[Change]], builds: Builds) -> dict[str, Any]:
    """Return a config to which as many groups of changes have been applied as the model class accepts."""
    if not units:
        return config
    changed = _apply(config, [change for unit in units for change in unit])
    if builds(changed):
        return changed
    if len(units) == 1:
        if len(units[0]) == 1:
            return config
        units = [[change] for change in units[0]]
    half = len(units) // 2
    return _apply_units(_apply_units(config, units[:half], builds), units[half:], builds)


def _apply(config: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    new_config = dict(config)
    for path, value in changes:
        inside = new_config
        for key in path[:-1]:
            inside[key] = inside = dict(inside[key])
        if value is _GONE:
            inside.pop(path[-1], None)
        else:
            inside[path[-1]] = value
    return new_config


Tensor = TypeVar("Tensor")


def load_tensors(folder: Path, load_file: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensor name -> tensor, for all safetensors files of a folder.

    Args:
        folder: the folder.
        load_file: function that reads one file: `load_file` of `safetensors.numpy` or of `safetensors.torch`.
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
"""transformers' registries of model classes, in order of preference: first models with encoders, then decoder-only
models.
"""
_BASE = EXACT["float32"]
"""Number of distinct element numbers in one pass: models are traced in float32, which is exact up to this integer."""
_LARGEST = np.iinfo(np.int32).max
"""Largest element number for which 32 bits suffice."""
_LONGEST = 240
"""Maximum length, in characters, of an error message from building a model."""
_ENOUGH, _MOST = 32_000_000, 60_000_000
"""`_ENOUGH`: number of elements at which a model is small enough. `_MOST`: maximum number of elements of a traced
model.
"""


class Peer:
    """The installed transformers library, from which models are built.

    Raises:
        Refused: with the code UNSUPPORTED if transformers is not installed.
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
        """Version of the installed transformers."""
        return str(self.transformers.__version__)

    def model_types(self) -> list[str]:
        """Return every model type that transformers knows."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        return sorted(CONFIG_MAPPING_NAMES)

    def config_class(self, model_type: str) -> Any:
        """Return the config class of a model type.

        Raises:
            UsageError: with the code UNKNOWN_FAMILY if transformers does not know the model type.
        """
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if model_type not in CONFIG_MAPPING:
            close = get_close_matches(model_type.lower(), self.model_types(), 3)
            hint = (
                f"Did you mean {' or '.join(close)}?"
                if close
                else "Give the model type as its config.json has it, and install a transformers that knows it; for any "
                "other model, derive the table from a converter of your own."
            )
            raise refuse("UNKNOWN_FAMILY", f"transformers {self.version} has no model type {model_type!r}", hint=hint)
        return CONFIG_MAPPING[model_type]

    def model_classes(self, model_type: str, architectures: Sequence[str] = ()) -> list[Any]:
        """Return the model classes named in `architectures`, or else the classes registered for the model type, best
        first.

        Raises:
            Refused: with the code UNSUPPORTED if there is no class for the model.
        """
        from transformers.models.auto import modeling_auto

        names = list(architectures)
        for register in HEADS:
            entry = getattr(modeling_auto, register, {}).get(model_type) or ()
            names += [entry] if isinstance(entry, str) else list(entry)
        named_classes = [getattr(self.transformers, name, None) for name in dict.fromkeys(names)]
        classes = [candidate for candidate in named_classes if hasattr(candidate, "save_pretrained")]
        if not classes:
            raise refuse("UNSUPPORTED", f"transformers {self.version} has no model class for {model_type!r}")
        # The class of a sub-config (such as a text config) builds only that section of a multimodal model.
        config_class = self.config_class(model_type)
        return sorted(
            classes,
            key=lambda candidate: (
                candidate.__name__ not in architectures and candidate.config_class is not config_class
            ),
        )

    def aliases(self, model_type: str) -> dict[str, list[str]]:
        """Return config key -> further config keys that transformers treats as the same key."""
        aliases: dict[str, list[str]] = {}
        for alias, key in (getattr(self.config_class(model_type), "attribute_map", None) or {}).items():
            aliases.setdefault(key, []).append(alias)
            aliases.setdefault(alias, []).append(key)
        return aliases


def variants(
    peer: Peer,
    model_type: str,
    base: Mapping[str, Any] | None = None,
    complaints: list[str] | None = None,
    numbers: Sequence[int] = range(VARIANTS),
) -> Iterator[tuple[Any, int]]:
    """Build a model of each variant on the meta device; yield `(model, index of the variant)` for each success.

    Args:
        peer: the installed transformers library.
        model_type: `model_type` of config.json.
        base: the config to shrink; None means the default config.
        complaints: list to which the error message of each failed build is appended.
        numbers: indices of the variants to build.
    """
    complaints = [] if complaints is None else complaints
    config_class = peer.config_class(model_type)
    base = dict(base) if base else config_class().to_dict()
    model_classes = peer.model_classes(model_type, base.get("architectures") or ())
    makers = [_ModelMaker(peer, config_class, model_class, complaints) for model_class in model_classes]
    for variant in numbers:
        for make in makers:
            model = make.first(_settings(base, variant)) or make.first(_search(base, variant, make.builds))
            if model is not None:
                # Later variants use the class with which the first variant could be built.
                makers = [make]
                yield model, variant
                break


def shapes(peer: Peer, model_type: str, config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return tensor name -> shape, for a full-size model on the meta device; empty if the model cannot be built."""
    for model_class in peer.model_classes(model_type, config.get("architectures") or ()):
        try:
            with warnings.catch_warnings(), peer.torch.device("meta"):
                warnings.simplefilter("ignore")
                model = model_class(peer.config_class(model_type).from_dict(dict(config)))
        except Exception:  # noqa: BLE001 - the next class is tried
            continue
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {}


def _settings(base: Mapping[str, Any], variant: int) -> Iterator[dict[str, Any]]:
    """Yield configs of a variant, each with fewer changes than the previous one, in case changed sizes do not fit
    together.
    """
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


def _search(
    base: Mapping[str, Any], variant: int, builds: Callable[[Mapping[str, Any]], bool]
) -> Iterator[dict[str, Any]]:
    """Yield a config of a variant that is found by searching key by key."""
    goals = [tiny(base, variant, sizes=sizes) for sizes in (SMALL, RATIO)]
    if variant != PROPORTIONED:
        # Towers of other sizes than the text model's come first: else their numbers of layers would be one axis.
        ways = (False,) if base.get("model_type") in OF_SHARED_SIZES else (True, False)
        goals = [*(tiny(base, variant, flip=True, apart=apart) for apart in ways), *goals]
    config = nearest(fill_defaults(base), goals, builds)
    if config is not None:
        yield config


@dataclass(frozen=True)
class _ModelMaker:
    """Builds models of one model class."""

    peer: Peer
    config_class: Any
    model_class: Any
    complaints: list[str]
    counts: dict[str, int | None] = field(default_factory=dict)
    """Config as JSON -> number of parameters; None if the class refuses the config. Searches try many configs again."""

    def first(self, attempts: Iterable[Mapping[str, Any]]) -> Any:
        """Return a model of the first config that the class accepts and that is small enough; None if there is no such
        config.
        """
        larger: list[tuple[int, Any]] = []
        for settings in attempts:
            model: Any = None
            count = self.counts.get(_as_json(settings), 0)
            if count is not None and count <= _MOST:  # a larger one is not built again
                count, model = self._count(settings)
            if count is None:
                continue
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
        """Return whether the model class accepts a config, regardless of the model's size."""
        key = _as_json(settings)
        return (self.counts[key] if key in self.counts else self._count(settings)[0]) is not None

    def _count(self, settings: Mapping[str, Any]) -> tuple[int | None, Any]:
        """Build a model and return the number of its parameters with it; `(None, None)` if the class refuses."""
        model = self._model(settings)
        count = None if model is None else sum(p.numel() for p in model.parameters())
        self.counts[_as_json(settings)] = count
        return count, model

    def _model(self, settings: Mapping[str, Any]) -> Any:
        try:
            with warnings.catch_warnings(), self.peer.torch.device("meta"), _no_initial_values(self.peer.torch)():
                warnings.simplefilter("ignore")  # transformers' warnings about slow sizes do not matter for a trace
                return self.model_class(self.config_class.from_dict(dict(settings)))
        except Exception as error:  # noqa: BLE001 - any model's own complaint about sizes that do not fit
            self.complaints.append(shorten(f"{type(error).__name__}: {error}", _LONGEST))
            return None


def _as_json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, default=str)


@cache
def _no_initial_values(torch: Any) -> Any:
    """Return a function mode of torch in which tensors on the meta device are not given initial values.

    torch decomposes operations that have no effect there, which takes up to a third of the time to build a model. The
    mode acts in its own thread only.
    """
    tensor, init = torch.Tensor, torch.nn.init
    fills = frozenset({init.kaiming_uniform_, init.uniform_, init.normal_, init.constant_})
    fills |= {tensor.uniform_, tensor.normal_, tensor.fill_, tensor.zero_}

    class NoInitialValues(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            filled = (args[0] if args else kwargs["tensor"]) if function in fills else None
            return filled if filled is not None and filled.is_meta else function(*args, **(kwargs or {}))

    return NoInitialValues


def trace(peer: Peer, model: Any) -> Trace:
    """Number a model's elements, save the model, and return the trace of its tensors in memory and in the saved files.

    Raises:
        Underivable: if saving the model changed values.
    """
    from safetensors.torch import load_file

    tensors, largest = _number_storages(model)
    carried: list[tuple[dict[str, Any], dict[str, Any]]] = []
    count = passes(largest, _BASE)
    config: dict[str, Any] = {}
    for position in range(count):
        with peer.torch.no_grad():
            for tensor, numbers in tensors:
                part = digits(numbers, _BASE, position)
                tensor.copy_(peer.torch.from_numpy(part).reshape(tensor.shape).to(tensor.dtype))
        memory = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        with save_temporarily(model) as folder:
            carried.append((load_tensors(folder, load_file), memory))
            config = parse_json((folder / "config.json").read_text("utf-8"))
        del memory
    tensors.clear()  # memory of the largest models is the limit of a derivation
    return _combine(carried, config)


def try_trace(peer: Peer, model: Any, complaints: list[str]) -> Trace | None:
    """Return the trace of a model; None if transformers cannot save a model of this size, in which case the error is
    appended to `complaints`.

    Raises:
        Underivable: if saving the model changed values.
    """
    try:
        return trace(peer, model)
    except Underivable:
        raise
    except Exception as error:  # noqa: BLE001 - any error of transformers' own conversion
        complaints.append(shorten(f"{type(error).__name__}: {error}", _LONGEST))
        return None


@contextmanager
def save_temporarily(model: Any) -> Iterator[Path]:
    """Save a model into a temporary folder, which is removed at the end of the `with` block."""
    with tempfile.TemporaryDirectory(prefix="transaxle-trace-") as folder:
        model.save_pretrained(folder, max_shard_size="50GB")
        yield Path(folder)


def _number_storages(model: Any) -> tuple[list[tuple[Any, Numbers]], int]:
    """Return every storage of the model, with the numbers of its elements, and the first unused number (from `FLOOR`
    on).
    """
    model.tie_weights()
    tensors, storages, start = [], set(), FLOOR
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() in storages or not tensor.numel():
            continue
        storages.add(tensor.data_ptr())
        if not _carries(tensor):
            tensor.data.zero_()
            continue
        end = start + tensor.numel()
        tensors.append((tensor, np.arange(start, end, dtype=np.int32 if end <= _LARGEST else np.int64)))
        start = end
    return tensors, start


def _carries(tensor: Any) -> bool:
    """Return whether a tensor's dtype represents exactly all element numbers of one pass."""
    return EXACT.get(dtype_of(tensor), 0) >= _BASE


def _combine(carried: Sequence[tuple[dict[str, Any], dict[str, Any]]], config: dict[str, Any]) -> Trace:
    """Combine the element numbers of all passes; tensors that cannot carry numbers must be equal before and after
    saving.
    """
    sides: list[dict[str, Numbers]] = [{}, {}]
    plain: list[dict[str, Any]] = [{}, {}]
    by_first: dict[int, Numbers] = {}  # most tensors are the same on both sides, and then one array represents both
    for side in (0, 1):
        for name in tuple(carried[0][side]):
            tensors = [by_side[side].pop(name) for by_side in carried]  # a pass is freed while it is read
            if not (_carries(tensors[0]) and tensors[0].numel() > 0):
                plain[side][name] = tensors[0]
                continue
            values = combine([_whole(name, tensor) for tensor in tensors], _BASE)
            if side == 0 and bool(((values > 0) & (values < FLOOR)).any()):
                raise Underivable(f"{name}: saving adds values that the model does not have")
            numbers = _places(values)
            original = by_first.setdefault(int(numbers.flat[0]), numbers)
            sides[side][name] = original if np.array_equal(original, numbers) else numbers
    unnumbered: dict[str, Shape] = {}
    for name, tensor in plain[0].items():
        stored = plain[1].get(name)
        if stored is None or stored.shape != tensor.shape:
            raise Underivable(f"{name} holds flags, and is elsewhere in memory")
        unnumbered[name] = tuple(tensor.shape)
    return Trace(sides[0], sides[1], config, unnumbered)


def _places(numbers: Numbers) -> Numbers:
    """Return the positions, from 1, of the elements with these numbers; 0 for constants, whose values are below
    `FLOOR`.
    """
    places: Numbers = np.maximum(numbers - (FLOOR - 1), 0)
    return places.astype(np.int32) if places.max(initial=0) <= _LARGEST else places


def _whole(name: str, tensor: Any) -> Numbers:
    values = tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()
    numbers: Numbers = values.astype(np.int64)
    if not bool((numbers == values).all()) or (numbers.size and int(numbers.min()) < 0):
        raise Underivable(f"{name}: its values are changed, not only moved")
    return numbers
