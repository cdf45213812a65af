"""Traces of transformers: what `save_pretrained` writes of a model with numbered elements.

Only here torch and transformers are imported, and only when a trace is made.
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
from typing import Any

import numpy as np

from transaxle.derivation.fitting.element_numbers import FLOOR
from transaxle.derivation.fitting.trace import (
    EXACT,
    Numbers,
    Shape,
    Trace,
    Underivable,
    combined,
    digits,
    dtype_of,
    passes,
)
from transaxle.derivation.tracing.config_search import nearest
from transaxle.derivation.tracing.saved_folder import loaded
from transaxle.derivation.tracing.tiny_configs import (
    DEEP,
    OWN,
    PLAIN,
    PROPORTIONED,
    RATIO,
    SMALL,
    VARIANTS,
    filled,
    tiny,
)
from transaxle.errors import refuse
from transaxle.extras import install
from transaxle.formats.strict_json import parsed

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
