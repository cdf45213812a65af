"""What the config of a checkpoint promises and its files lack: layers that predict ahead, towers, heads, scales.

Training programs leave out what they do not train, and keep the config: transformers saves GLM-4.5 without its last
layer, which predicts a token ahead, and still writes `num_nextn_predict_layers: 1`. Such a checkpoint is a good one for
most programs, so nothing here is refused. But whoever starts speculative decoding with it learns it from an error, or
from slow answers.

Names and config decide, by the family's table: a tensor is promised if the condition of its logical tensor is true
under the config. Without a config nothing is promised. Layers that predict ahead have conditions that depend
on one another, so that a table reads a checkpoint with them or without; their number in the config promises them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, Index, split_slot
from transaxle.axes.layout.model_tensors import Model
from transaxle.axes.notation.family import Line, LogicalTensor
from transaxle.axes.notation.name import natural, skeleton
from transaxle.axes.translation.translate import absent_tensors
from transaxle.axes.translation.unmatched import AHEAD_KEYS, HEAD
from transaxle.encodings.conventions.quantization import module_of
from transaxle.engine.wording import fold_to_text, plural
from transaxle.errors import TransaxleError, in_both_languages
from transaxle.formats.detect import part_of_ranks
from transaxle.formats.registry import INDEX, SAFETENSORS
from transaxle.formats.safetensors import read_header
from transaxle.formats.training_state import OPTIMIZER

if TYPE_CHECKING:
    from transaxle.engine.checkpoint.checkpoint import Checkpoint

_PREDICTS_AHEAD = re.compile(r"mtp(_.*)?|nextn(_.*)?|enorm|hnorm|eh_proj")
"""Segments of tensor names that only layers that predict ahead have."""
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,9})\.")
"""Pattern of the number of a layer in a name, for names that no table reads."""
_DEPTH = "num_hidden_layers"
"""Config key for the number of layers without those that predict ahead."""
_SWITCH = "use_mtp"
"""Config key that is false if the layers that predict ahead are not in use, whatever their number is."""
_SECTION = "_config"
"""End of the config keys that describe a part of a larger model, such as `vision_config`."""
_TOWERS = ("vision", "visual", "image", "video", "audio", "speech")
"""Beginnings of the config sections that describe a tower."""
_TEXT_SECTIONS = frozenset({"text_config", "llm_config", "language_config", "quantization_config"})
"""Config sections that describe no tower."""
_HUB = frozenset({"hf", "transformers"})
"""Dialects whose names the config's lists of modules contain."""
LOST = "a program that loads the model refuses it, or draws them at random"
_UNSCALED = "a program that loads the model looks for scales"
_PLAIN = f"{_UNSCALED}; written with --decode bf16 it is plain as a whole"
_NO_CODES = f"{_UNSCALED}; if the weights have been decoded, remove the section from the config"
_CODES = "a program that loads the model takes the codes for values; written with --decode bf16 it is plain as a whole"
_NO_INDEX = "many programs read one file: list the tensors of both in an index"
_MOST_FILES = 8
"""Largest number of other files whose headers are read."""
_TRUNK = "model"
"""First segment of the names of all tensors but the head, in many models."""
_SHOWN = 3
"""Largest number of name patterns in one line."""
_DEEPEST = 8
"""Largest number of segments of a name pattern that stands for several patterns."""


class Lack(msgspec.Struct, frozen=True):
    """Tensors that a config promises and that the files lack, or store otherwise than the config describes them."""

    promise: str
    """What promises them, such as `the config has num_nextn_predict_layers 1`."""
    gap: str
    """What is missing, such as `layers that predict ahead`."""
    names: tuple[str, ...]
    """Names of the missing tensors, in natural order; empty if the table has no names for them."""
    advice: str
    """What follows from it, and what to do."""
    is_lost: bool = True
    """Whether a complete checkpoint has the tensors, so that they can be grafted."""

    @property
    def text(self) -> str:
        """One line that describes what is missing."""
        names = f": {plural(len(self.names), 'tensor')}, {_patterns(self.names)}" if self.names else ""
        return in_both_languages(f"{self.promise}, but {self.gap}{names}; {self.advice}")

    def as_json(self) -> dict[str, Any]:
        """Return the lack as plain JSON data."""
        return {
            "promise": self.promise,
            "gap": self.gap,
            "tensors": len(self.names),
            "names": list(fold_to_text(self.names)),
            "advice": in_both_languages(self.advice),
            "text": self.text,
        }


def find_lacks(checkpoint: Checkpoint, *, required: bool = True) -> tuple[Lack, ...]:
    """Compare what a checkpoint's config promises with its tensors; only names and dtypes are read.

    Nothing is promised to an adapter, to the file of one rank, and to a checkpoint without a config; without a table
    only layers that predict ahead, whose names show them. What a config implies lacks nothing.

    Args:
        checkpoint: the checkpoint, or a view of it.
        required: whether to look also for tensors without which a conversion into another dialect is refused.
    """
    names = checkpoint.stored_names
    if checkpoint.container.implied or not checkpoint.config or names.is_adapter:
        return ()
    if part_of_ranks(checkpoint.container.storage) is not None:
        return ()
    if isinstance(names.reading_or_error, TransaxleError):
        return tuple(_unread_ahead_lack(checkpoint))
    try:
        if _is_part_of_unknown(checkpoint):
            return ()
        absent = _absent(checkpoint) if required else ()
        codes = _codes(checkpoint) if checkpoint.undecoded is None else ()
        return (*_ahead_lack(checkpoint), *absent, *_towers(checkpoint), *codes, *_files_outside_index(checkpoint))
    except TransaxleError:  # the sizes contradict the tensors, which conversions refuse
        return ()


def _is_part_of_unknown(checkpoint: Checkpoint) -> bool:
    """Return whether the table reads only a part of a larger model for which there is no table."""
    bound, family = checkpoint.bound, checkpoint.reading.family
    own_types = (*family.model_types, *family.wrappers)
    has_unknown = any(split_slot(name)[1] == WEIGHT for name in bound.unknown)
    return has_unknown and checkpoint.settings.family is None and checkpoint.config.get("model_type") not in own_types


def ahead_key(*sections: Mapping[str, Any]) -> str | None:
    """Return the config key that promises layers which predict ahead; None if no key in these sections does."""
    counts = ((key, section.get(key)) for section in sections for key in AHEAD_KEYS)
    key = next((key for key, count in counts if type(count) is int and count > 0), None)
    return None if any(section.get(_SWITCH) is False for section in sections) else key


def _unread_ahead_lack(checkpoint: Checkpoint) -> Iterator[Lack]:
    """Yield the layers that predict ahead of a checkpoint that no table reads, if no name could be that of one."""
    config = checkpoint.config
    text = config.get("text_config")
    sections = [config, text] if isinstance(text, Mapping) else [config]
    key = ahead_key(*sections)
    depth = next((section[_DEPTH] for section in sections if type(section.get(_DEPTH)) is int), None)
    if key is None or depth is None:
        return
    entries = checkpoint.container.entries
    if any(_predicts_ahead(name) or _is_beyond(name, depth) for name in entries):
        return
    count = next(section[key] for section in sections if key in section)
    gap = "no tensor has a name of a layer that predicts ahead"
    yield Lack(f"the config has {key} {count}", gap, (), "speculative decoding needs them", is_lost=False)


def _ahead_lack(checkpoint: Checkpoint) -> Iterator[Lack]:
    """Yield the layers that predict ahead, if the config has a number of them, and none or only some are stored."""
    sizes, bound = checkpoint.sizes, checkpoint.bound
    key = ahead_key(sizes.settings, sizes.config)
    if key is None:
        return
    if any(_predicts_ahead(name) for name in bound.unknown):
        return
    lines = {line: positions for (line, slot), positions in bound.names.items() if slot == WEIGHT}
    stored_anywhere = frozenset(component for line in lines for component in line.expression.components)
    model = Model(bound.family, sizes, ahead=True, stored=stored_anywhere)
    stored = {
        layer
        for line, positions in lines.items()
        for component in line.expression.components
        for layer in _layers_in_files(model, line, component, positions)
        if model.is_ahead(component, layer)
    }
    absent: dict[str, set[Index]] = {}
    with suppress(TransaxleError):  # the config lacks a size, so that the names are unknown
        for component, layers in model.present.items():
            absent[component] = {layer for layer in layers if model.is_ahead(component, layer)} - stored
    if stored and not any(absent.values()):
        return
    count = sizes.settings.get(key, sizes.config.get(key))
    gap = "some layers that predict ahead are not stored" if stored else "no layer that predicts ahead is stored"
    advice = f"speculative decoding needs them, and --graft BASE takes them; a model without them has {key} 0"
    yield Lack(f"the config has {key} {count}", gap, _names(checkpoint, model, absent), advice)


def _is_beyond(name: str, depth: int) -> bool:
    """Return whether a name has the number of a layer after the last one that is not for predicting ahead."""
    match = _LAYER.search(name)
    return match is not None and int(match[1]) >= depth


def _layers_in_files(model: Model, line: Line, component: str, positions: Iterable[Index]) -> Iterator[Index]:
    """Yield the layers of a logical tensor that are stored; nothing if one stored tensor contains several layers."""
    axes = model.axes_of(component)
    if set(axes) <= set(line.name.axes):
        places = [line.name.axes.index(axis) for axis in axes]
        yield from {tuple(position[place] for place in places) for position in positions}


def _predicts_ahead(name: str) -> bool:
    return any(_PREDICTS_AHEAD.fullmatch(segment) for segment in split_slot(name)[0].split("."))


def _names(checkpoint: Checkpoint, model: Model, among: Mapping[str, Collection[Index]]) -> tuple[str, ...]:
    """Return the names that absent logical tensors would have in the checkpoint; empty if the config cannot show it."""
    bound = checkpoint.bound
    try:
        names = {bound.prefix + name for name, _ in model.stored_shapes(bound.dialect, among)}
    except TransaxleError:
        return ()
    return tuple(sorted(names - checkpoint.catalog.entries.keys(), key=natural))


def _absent(checkpoint: Checkpoint) -> Iterator[Lack]:
    """Yield the tensors that the config requires, one lack for each part of the model."""
    sizes, family = checkpoint.sizes, checkpoint.reading.family
    # sizes that only the shapes of tensors show do not matter to names
    unsized = (axis for axis, formula in family.axes.items() if formula is None or not sizes.indices_of(axis))
    ones = dict.fromkeys(set(unsized) - family.name_axes - sizes.at({}).keys(), 1)
    sizes_of_names = replace(sizes, overrides={**ones, **sizes.overrides})
    models = [Model(family, sizes_of_names, ahead=ahead) for ahead in (False, True)]
    parts: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for absent in absent_tensors(checkpoint.bound, checkpoint.catalog.entries, sizes):
        if absent.tensor.name in HEAD and _head_is_open(checkpoint, absent.tensor):
            continue
        model = next((model for model in models if absent.in_no_layer and model.present[absent.tensor.name]), None)
        layers = {} if model is None else {absent.tensor.name: model.present[absent.tensor.name]}
        for name in (model and _names(checkpoint, model, layers)) or (absent.name,):
            parts[_part(name)][name] = _promise(checkpoint, absent.tensor)
    for promises in parts.values():
        reasons = dict.fromkeys(sorted(filter(None, promises.values())))
        is_stated = 2 * sum(map(bool, promises.values())) >= len(promises)
        promise = f"the config has {', '.join(reasons)}" if is_stated else "the config describes a larger model"
        yield Lack(promise, "not all of its tensors are stored", tuple(sorted(promises, key=natural)), LOST)


def _part(name: str) -> str:
    """Return the part of a model to which a tensor belongs: `lm_head`, `model.visual`, `model.layers`."""
    first, *inner = name.split(".")
    return f"{first}.{inner[0]}" if first == _TRUNK and inner else first


def _head_is_open(checkpoint: Checkpoint, head: LogicalTensor) -> bool:
    """Return whether a config leaves open if the head is the embedding."""
    ties = [tie for tie in checkpoint.reading.family.ties if tie.alias == head.name]
    return any(checkpoint.sizes.holds(tie.when, {}) is None for tie in ties)


def _promise(checkpoint: Checkpoint, tensor: LogicalTensor) -> str:
    """Return the config keys, with their values, on which the existence of a logical tensor depends."""
    settings, family = checkpoint.sizes.settings, checkpoint.reading.family
    ties = [tie.when for tie in family.ties if tie.alias == tensor.name and tensor.name in HEAD]
    formulas = [family.axes[axis] for axis in tensor.axes if family.axes.get(axis) is not None]
    sections = sorted({key for formula in formulas if formula for key in formula.names if key.endswith(_SECTION)})
    sections = [key for key in sections if key not in _TEXT_SECTIONS and isinstance(settings.get(key), Mapping)]
    if sections:
        return sections[0]
    keys = [key for when in (*ties, tensor.when) if when is not None for key in sorted(when.names)]
    switches = dict.fromkeys(key for key in keys if isinstance(settings.get(key), bool))
    return ", ".join(f"{key} {str(settings[key]).lower()}" for key in switches)


def _towers(checkpoint: Checkpoint) -> Iterator[Lack]:
    """Yield the towers of a larger model of which only the text model is stored, if the table describes only that."""
    sizes, bound = checkpoint.sizes, checkpoint.bound
    if sizes.settings is sizes.config or any(split_slot(name)[1] == WEIGHT for name in bound.unknown):
        return
    for key, section in sizes.config.items():
        if key.endswith(_SECTION) and key.startswith(_TOWERS) and isinstance(section, Mapping) and section:
            yield Lack(f"the config has {key}", "only tensors of the text model are stored", (), LOST)


def _codes(checkpoint: Checkpoint) -> Iterator[Lack]:
    """Yield the tensors that are plain where the config describes codes, and the reverse."""
    catalog = checkpoint.catalog
    described = catalog.quantization
    if (
        described is None
        or not described.scheme.groups
        or catalog.refusals
        or checkpoint.reading.dialect.name not in _HUB
    ):
        return
    promise = f"the config has quantization_config {described.method}"
    if not catalog.encoded:
        yield Lack(promise, "no tensor is stored as codes with scales", (), _NO_CODES, is_lost=False)
        return
    encoded = {skeleton(name) for name in catalog.encoded}
    plain = [name for name in catalog.entries if name not in catalog.encoded and not name.startswith(OPTIMIZER)]
    plain = [name for name in plain if skeleton(name) in encoded and described.encodings(module_of(name))]
    if plain:
        yield Lack(promise, "tensors that it describes as codes are stored plain", tuple(plain), _PLAIN, is_lost=False)
    unlisted = [name for name in catalog.encoded if not described.encodings(module_of(name))]
    if unlisted:
        yield Lack(
            promise, "tensors that it describes as plain are stored as codes", tuple(unlisted), _CODES, is_lost=False
        )


def _files_outside_index(checkpoint: Checkpoint) -> Iterator[Lack]:
    """Yield the files beside a checkpoint that have further tensors of its model, and that no index lists."""
    container, bound = checkpoint.container, checkpoint.bound
    files = [name for name in container.ignored if name.endswith(SAFETENSORS.one_file) and "/" not in name]
    index = next((name for name in container.files if name.endswith(INDEX)), None)
    for file in files[:_MOST_FILES] if container.format == SAFETENSORS.name else ():
        try:
            names = read_header(container.storage, file).entries.keys() - container.entries.keys()
        except TransaxleError:  # nobody reads the file
            continue
        bare = {name: name.removeprefix(bound.prefix) for name in names}
        of_model = [
            name for name in names if skeleton(bare[name]) in bound.dialect.by_skeleton or _predicts_ahead(name)
        ]
        if of_model:
            gap = f"{index} does not list the file" if index else f"only {', '.join(container.files)} is read"
            advice = "programs that follow the index skip it: list its tensors there" if index else _NO_INDEX
            yield Lack(
                f"{file} has tensors of this model", gap, tuple(sorted(of_model, key=natural)), advice, is_lost=False
            )


def _patterns(names: Sequence[str]) -> str:
    """Return names as a few patterns: folded names, or what many begin with, followed by `*`."""
    rows = list(fold_to_text(tuple(names)))
    for depth in range(_DEEPEST, 0, -1):
        if len(rows) <= _SHOWN:
            break
        starts = (name.split(".") for name in names)
        rows = list(dict.fromkeys(".".join([*start[:depth], *(["*"] if start[depth:] else [])]) for start in starts))
    return ", ".join(rows[:_SHOWN]) + (", …" if len(rows) > _SHOWN else "")
