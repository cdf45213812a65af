"""The model's config files, rewritten to agree with the tensors beside them; also a config that the user gives."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from math import prod
from typing import Any

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.layout.relayout import Target
from transaxle.encodings.conventions.convention import MODELOPT
from transaxle.encodings.conventions.quantization import MODELOPT_CONFIG, module_of, read
from transaxle.encodings.conventions.rewriting import written
from transaxle.encodings.encoding import Encoded, Role
from transaxle.encodings.plain_types import PLAIN
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.recognise import IDENTITY
from transaxle.engine.checkpoint.settings import CONFIG, stored_config
from transaxle.engine.plan.planned import OutputTensor
from transaxle.engine.plan.recoding import HUB, MEMORY, encoded_tensors
from transaxle.engine.views.encoded import View
from transaxle.errors import Refusal, TransaxleError
from transaxle.formats.builtin_formats import SAFETENSORS
from transaxle.formats.storage.storage import is_url


def rewritten(
    checkpoint: Checkpoint, to: tuple[str, str], view: View, products: Iterable[OutputTensor], problems: list[Refusal]
) -> dict[str, bytes | None]:
    """Return config files whose quantization section or dtype must change, and a config that the user gave.

    Args:
        checkpoint: the source.
        to: format and dialect of the target.
        view: the target's tensors.
        products: the tensors that are written.
        problems: receives the refusals.

    Returns:
        Name -> new contents; None for a file that is left out.
    """
    form, dialect = to
    given = _given(checkpoint) if form == SAFETENSORS.name else None
    listed, catalog, recoding = list(products), checkpoint.catalog, checkpoint.container.recoding
    actions = {tensor.step.action for tensor in recoding.computed.values()} - {"averaged"}
    changing = bool(checkpoint.decoded or actions) or any(product.step is not None for product in listed)
    if not changing and (dialect == IDENTITY or (catalog.quantization is None and not catalog.encoded)):
        return {} if given is None else {CONFIG: _text(given)}
    if catalog.refusals:  # the plan has them
        return {}
    encoded = encoded_tensors(view, listed)
    buffers = {stored for tensor in encoded.values() for stored in tensor.parts.values()}
    plain = {p.name: p.target for p in listed if p.name not in buffers and split_slot(p.name)[1] == WEIGHT}
    decoded = [name for name, target in plain.items() if _origins(target) & checkpoint.decoded.keys()]
    renamed = {origin for target in plain.values() for origin in _origins(target)} - plain.keys()
    dtypes = {tensor.step.dtype for tensor in recoding.computed.values() if tensor.step.action == "decoded"}
    in_memory, encoded_in_memory = (
        _in_memory(checkpoint, dialect, _codes(view, encoded, dialect)) if changing or renamed else ({}, ())
    )
    decoded += [name for name, target in in_memory.items() if _origins(target) & checkpoint.decoded.keys()]
    plain = in_memory | plain
    shapes = {name: target.shape for name, target in plain.items()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if recoding.dtype is not None:
        dtype = recoding.dtype if recoding.dtype == _usual(plain.values()) else None
    describing_file = (
        MODELOPT_CONFIG if catalog.quantization is not None and catalog.quantization.file == MODELOPT_CONFIG else CONFIG
    )
    new_texts: dict[str, bytes | None] = {}
    modelopt = {tensor.convention for tensor in encoded.values()} == {MODELOPT}
    there = {*checkpoint.container.carried, *([CONFIG] if given else ())}
    for file in sorted(there.intersection((CONFIG, MODELOPT_CONFIG))):
        if file == MODELOPT_CONFIG != describing_file and encoded and not modelopt:
            new_texts[file] = None  # it repeats config.json, and can say this no longer
            continue
        try:
            before = given if given and file == CONFIG else stored_config(checkpoint.container.storage, file)
            elsewhere = file == CONFIG != describing_file
            after = written(
                before,
                encoded,
                shapes,
                decoded=decoded,
                renamed=renamed,
                dtype=dtype,
                elsewhere=elsewhere,
                in_memory=encoded_in_memory,
            )
        except TransaxleError as error:
            problems.extend(error.refusals)
            continue
        if file == MODELOPT_CONFIG and read(after) is None:
            new_texts[file] = None
        elif after != before or before is given:
            new_texts[file] = _text(after)
    return new_texts


def _codes(view: View, encoded: Mapping[str, Encoded], dialect: str) -> set[str]:
    """Return the names, in the source, of what is encoded in the target."""
    if dialect == IDENTITY:
        return set(encoded)
    targets = (view.targets.get(each.parts[Role.CODES]) or view.targets[each.name] for each in encoded.values())
    return {origin for target in targets for origin in _origins(target)}


def _in_memory(
    checkpoint: Checkpoint, dialect: str, codes: Collection[str]
) -> tuple[dict[str, Target], Collection[str]]:
    """Return the plain weights of a model for a hub, and the names of the encoded ones, in transformers' memory.

    Readers ask the lists of a config about these names. Tied heads are among them, which are not stored.

    Args:
        checkpoint: the source.
        dialect: of the target.
        codes: names, in the source, of what is encoded in the target.
    """
    label = checkpoint.dialect if dialect == IDENTITY else dialect
    if not codes or not (label or "").startswith(HUB) or checkpoint.recognised.family.dialect(MEMORY) is None:
        return {}, ()
    memory = checkpoint.translation(MEMORY)
    weights = {name: target for name, target in memory.targets.items() if split_slot(name)[1] == WEIGHT}
    encoded = {name for name, target in weights.items() if not _origins(target).isdisjoint(codes)}
    encoded.update(name for each in memory.encoded.values() for name in each.parts.values())
    modules = set(map(module_of, encoded))
    return {name: target for name, target in weights.items() if module_of(name) not in modules}, encoded


NO_CONFIG = f"no {CONFIG} goes along"
"""How `lacking_note` begins, which is a warning."""


def config_notes(checkpoint: Checkpoint, files: Container[str]) -> tuple[str, ...]:
    """Return what is to be said of a config that the user gave: that it is written, or that the source's stays.

    Args:
        checkpoint: the source.
        files: names of the target's config files that are written anew.
    """
    given = checkpoint.settings.config
    if given is None:
        return ()
    if CONFIG not in checkpoint.container.carried:
        return (f"{CONFIG} is written from the config that you gave",) if CONFIG in files else ()
    try:
        if stored_config(checkpoint.container.storage) == given:
            return ()
    except TransaxleError:
        pass  # one that cannot be read differs
    return (f"{CONFIG} is that of the source: the config that you gave differs from it, and only gave sizes",)


def lacking_note(checkpoint: Checkpoint) -> str:
    """Return what is to be said of a hub's folder that gets no config, and the option that gives it one."""
    source = checkpoint.path
    note = f"{NO_CONFIG}, since the source has none: transformers cannot load the target without it; give --config FILE"
    if is_url(source):
        return note
    above = os.path.normpath(os.path.join(source, os.pardir, CONFIG))  # noqa: PTH118 - as typed
    return f"{note} (there is {above})" if os.path.isfile(above) else note  # noqa: PTH113


def _given(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the config that the user gave, where it is a model's and the source has none, nor another's place."""
    given = checkpoint.settings.config
    if not given or CONFIG in checkpoint.container.carried or checkpoint.stored_names.is_adapter:
        return None
    return given if isinstance(given.get("model_type"), str) else None


def _text(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"


def _usual(targets: Iterable[Target]) -> str | None:
    """Return the dtype of most floating-point elements; None on a tie."""
    counts: Counter[str] = Counter()
    for target in targets:
        if target.dtype in PLAIN:
            counts[target.dtype] += prod(target.shape)
    most = max(counts.values(), default=0)
    most_frequent = [code for code, count in counts.items() if count == most]
    return most_frequent[0] if len(most_frequent) == 1 else None


def _origins(target: Any) -> set[str]:
    return {origin.name for part in target.parts for origin in part.origins}
