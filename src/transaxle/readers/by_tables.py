"""Readers that are not run: the family's table and the config say which tensors they need.

A reader that needs a GPU, a job of several processes, or cannot be installed everywhere is compared by its dialect: the
tensors that a model of this config has under the reader's names, against the names, shapes and encodings of the files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from transaxle.axes.layout.bind import WEIGHT
from transaxle.axes.layout.model_tensors import AHEAD, Model
from transaxle.axes.notation.family import Dialect
from transaxle.axes.notation.name import natural
from transaxle.encodings.conventions.quantization import Quantization, module_of
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.wording import plural
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.training_state import is_extra_state
from transaxle.readers.reader import Reader

_LAYER = re.compile(r"(?:[^.]+\.)*?\d+\.")
"""Pattern of a name up to the first number, the layer."""


def compare_with_tables(checkpoint: Checkpoint, reader: Reader) -> dict[str, Any]:
    """Return what a reader that is not run does with a checkpoint, as a probe would report it.

    Raises:
        Refused: with the code UNSUPPORTED if no table has the checkpoint's names or the reader's.
    """
    try:
        reading = checkpoint.reading
    except TransaxleError as error:
        message = f"{reader.name} is compared by tables, and none reads these names: {error.refusals[0].message}"
        raise refuse("UNSUPPORTED", message, file=checkpoint.path, hint="Give a table:  --rules my.rules") from None
    dialects = (reader.dialect, *reader.further_dialects)
    result: dict[str, Any] = {"findings": [_note(text) for text in (reader.note,) if text]}
    if reading.dialect.name not in dialects:
        labels = " or ".join(dialect for dialect in dialects if reading.family.dialect(dialect) is not None)
        if not labels:
            message = f"the table of {reading.family.name} has no names of {reader.name}"
            raise refuse("UNSUPPORTED", message, file=checkpoint.path, hint="Add a dialect for it:  --rules my.rules")
        effect = f"{reader.name} takes names of {labels}, and these are those of {reading.dialect.label}"
        remedy = f"Rename them:  transaxle convert {checkpoint.path} DST --to {reader.target or reader.dialect}"
        result["findings"].append({"kind": "error", "wrong": True, "effect": effect, "names": (), "remedy": remedy})
        return result
    unread = {each.encoding.name for each in checkpoint.encoded.values()} - set(reader.encodings)
    if unread:
        names = [name for name, each in checkpoint.encoded.items() if each.encoding.name in unread]
        effect = f"{reader.name} does not decode {' and '.join(sorted(unread))}"
        remedy = _decode_remedy(checkpoint, reader)
        result["findings"].append({"kind": "values", "wrong": True, "effect": effect, "names": names, "remedy": remedy})
    result["findings"] += _in_another_form(checkpoint, reader)
    return merge_traces(result, _compare(checkpoint, reading.dialect))


def _decode_remedy(checkpoint: Checkpoint, reader: Reader) -> str:
    target = reader.target or reader.dialect
    return f"Decode all codes:  transaxle convert {checkpoint.path} DST --to {target} --decode bf16"


def _in_another_form(checkpoint: Checkpoint, reader: Reader) -> Iterator[dict[str, Any]]:
    """Yield findings on tensors of a module that the reader builds for codes while the files have it plain, or the
    reverse. It builds modules by the lists in the config, and drops tensors of the other form with a warning at most.
    """
    described = checkpoint.catalog.quantization
    if described is None or described.method != reader.builds_by_lists_of:
        return
    encoded = checkpoint.catalog.encoded
    has_codes = {module_of(name).rpartition(".")[2] for name in encoded}
    plain = {name: module_of(name) for name in checkpoint.catalog.entries if name not in encoded}
    plain = {name: module for name, module in plain.items() if module.rpartition(".")[2] in has_codes}
    unlisted = {name for name, module in plain.items() if _has_codes(described, module)}
    joined = {
        name for name, module in plain.items()
        if module.startswith(_DRAFTS) and _has_codes(described, _join_name(module, reader))
    } - unlisted  # fmt: skip
    bare = [name for name in encoded if not _has_codes(described, module_of(name))]
    bare += [name for name in encoded if module_of(name) == _HEAD and not _is_named(described, _HEAD)]
    parts = {part for name in bare for part in encoded[name].parts.values()}
    decode = _decode_remedy(checkpoint, reader)
    lists = "the lists of modules in quantization_config"
    for effect, names in (
        (f"{reader.name} builds these modules for codes, by {lists}, and drops their plain tensors", unlisted),
        (f"{reader.name} joins these modules, does not look for their own names in {lists}, and drops them", joined),
        (f"{reader.name} builds these modules plain, by {lists}, and drops their codes and scales", parts),
    ):
        if names:
            yield {"kind": "dropped", "wrong": True, "effect": effect, "names": sorted(names), "remedy": decode}


_DRAFTS = "mtp."
"""Beginning of the names of modules that predict further tokens, in a part of the model of their own."""
_HEAD = "lm_head"


def _has_codes(described: Quantization, module: str) -> bool:
    """Return whether a config says that a module has codes; entries of its list of plain ones match inside of names."""
    plain = described.scheme.ignored.names
    return bool(described.encodings(module)) and not any(entry.lower() in module.lower() for entry in plain)


def _is_named(described: Quantization, module: str) -> bool:
    """Return whether a config says by name, and not only by class, that a module has codes."""
    return any(group.modules is not None and module in group.modules for group in described.scheme.groups)


def _join_name(module: str, reader: Reader) -> str:
    """Return the name of the module of which the reader makes this one a part; its own name if it makes none."""
    before, _, last = module.rpartition(".")
    return f"{before}.{reader.joins.get(last, last)}"


def _note(effect: str, names: Collection[str] = ()) -> dict[str, Any]:
    return {"kind": "note", "wrong": False, "effect": effect, "names": sorted(names, key=natural), "remedy": ""}


def _compare(checkpoint: Checkpoint, dialect: Dialect) -> dict[str, Any]:
    """Return `lacks`, `mismatched`, `unexpected` and `findings` of the names, which are those of the reader."""
    sizes, bound, entries = checkpoint.sizes, checkpoint.bound, checkpoint.catalog.entries
    prefix = bound.prefix
    model = Model(bound.family, sizes)
    shapes = {f"{prefix}{name}": shape for name, shape in model.stored_shapes(dialect)}
    model.check_decided(dialect)
    unpadded = {f"{prefix}{name}": shape for name, shape in Model(bound.family, sizes, tp=0).stored_shapes(dialect)}
    weights = set(_weights(checkpoint))
    surplus = weights - shapes.keys() - set(_optional(checkpoint, model))
    layers = {_layer(name) for name in weights}
    strays = {name for name in bound.unknown if not is_extra_state(name)}
    inside = {name for name in strays if _layer(name) in layers}
    outside = strays - inside
    text = f"no table knows {plural(len(outside), 'tensor')} outside of the layers: whether they load was not checked"
    return {
        "lacks": any(name not in entries for name in shapes),
        "mismatched": [
            [name, list(entries[name].shape), list(shape)]
            for name, shape in shapes.items()
            if name in entries and not _fits(tuple(entries[name].shape), shape, unpadded[name])
        ],
        "unexpected": sorted(surplus | inside, key=natural),
        **({"findings": [_note(text, outside)]} if outside else {}),
    }


def _weights(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the stored names of weights that the dialect's table matches."""
    for (_, slot), names in checkpoint.bound.names.items():
        if slot == WEIGHT:
            yield from names.values()


def _optional(checkpoint: Checkpoint, model: Model) -> Iterator[str]:
    """Yield the stored names that a model may have besides: of layers that predict further tokens, of tied copies, and
    those of which the config does not say whether the model has them.
    """
    for (line, _), names in checkpoint.bound.names.items():
        free = {
            component for component in line.expression.components
            if component.startswith(AHEAD) or component in model.undecided or component in model.sizes.originals
        }  # fmt: skip
        if line.read_only or free:
            yield from names.values()


def _layer(name: str) -> str:
    """Return the beginning of a name up to the number of its layer; the whole name without one."""
    match = _LAYER.match(name)
    return match[0] if match else name


def _fits(stored: tuple[int, ...], shape: tuple[int, ...], unpadded: tuple[int, ...]) -> bool:
    """Return whether a stored shape is that of the model; rows that pad a vocabulary may be of any number."""
    if shape == unpadded:
        return stored == shape
    return len(stored) == len(shape) and stored[1:] == shape[1:] and stored[0] >= unpadded[0]


def merge_traces(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of two traces together; lists are joined."""
    merged = dict(first)
    for key, value in second.items():
        merged[key] = [*merged[key], *value] if isinstance(value, list) and key in merged else value
    return merged
