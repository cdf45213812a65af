"""Which shard of each tensor each rank holds (a range of indices of one dim), for targets with separate files for each
rank.

Tensor parallelism follows the `cut` statements in the family's table, which name the axes that are divided among ranks.
The rows of the vocabulary are padded first, so that they can be divided evenly among the ranks.

Files from which each rank of an inference engine reads its own tensors (`vllm_sharded`) need two things that are not in
the tables. They were read from vLLM's own models on a CPU, and `vllm_state.json` lists them for each family:

- A tensor that several modules of the engine's model share has several names there, of which one is in the files.
- Attention layers have four scales besides the weights, all 1 in a model whose key-value cache is not quantized.

A family or a tensor that is not listed there is refused: the engine would not find the name, or would miss another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pkgutil import get_data
from typing import Any

import msgspec

from transaxle.arguments import Degrees
from transaxle.axes.geometry import axes_in, row_major
from transaxle.axes.layout.bind import bind, split_slot
from transaxle.axes.layout.divide import Shares, SharesByName, rank_shares, share_out
from transaxle.axes.layout.relayout import unknown
from transaxle.axes.notation.expression import PADDING, Expression, Node, Sum, size
from transaxle.axes.notation.family import Family, Line, Sizes
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.recognise import IDENTITY, pick_dialect
from transaxle.engine.plan.training_beside import without_training
from transaxle.engine.views.encoded import View
from transaxle.errors import Refusal, TransaxleError, Where, gathered, in_both_languages, refuse
from transaxle.formats.catalog import ITEM_BITS, Entry, Extent, NumbersInMemory
from transaxle.formats.registry import VLLM, VLLM_SHARDED, Format, get_format, writable
from transaxle.formats.storage.storage import layer

_TP = "tp"
RANKS = "tensor_parallel_size"
"""Config key for the number of tensor-parallel ranks, which some formulas in tables need."""
_WIDEST = 16
"""Size in bytes of one element of the widest dtype."""


_MEGATRON_OPTIONS = "--tp, --pp, --ep and --make-vocab-size-divisible-by"
_FSDP_OPTIONS = "--dp and --device"


def check_degrees(kind: Format, degrees: Degrees | None, label_suffix: str) -> None:
    """Refuse parallel degrees that a file format does not have.

    Args:
        kind: file format of the target.
        degrees: parallel degrees that the user gave; None means none.
        label_suffix: `:DIALECT` as the user typed it after the format, or nothing.

    Raises:
        Refused: with code UNSUPPORTED.
    """
    if degrees is None:
        return
    of_fsdp = replace(Degrees(), dp=degrees.dp, device=degrees.device, mesh_dim=degrees.mesh_dim)
    if "fsdp" in kind.draft_takes:
        if degrees != of_fsdp:
            message = f"{kind.title} has the parts of FSDP ranks, not of tensor-parallel ranks"
            hint = f"Omit {_MEGATRON_OPTIONS}, or write {_targets('degrees', label_suffix, degrees)}."
            raise refuse("UNSUPPORTED", message, hint=hint)
        return
    if of_fsdp != Degrees():
        message = f"{kind.title} has no files for FSDP ranks"
        raise refuse(
            "UNSUPPORTED", message, hint=f"Omit {_FSDP_OPTIONS}, or write {_targets('fsdp', label_suffix, degrees)}."
        )
    if "degrees" not in kind.draft_takes:
        message = f"{kind.title} has no files for each rank: it is read at any degree of parallelism"
        hint = f"Omit {_MEGATRON_OPTIONS}, or write {_targets('degrees', label_suffix, degrees)}."
        raise refuse("UNSUPPORTED", message, hint=hint)
    if "parts" not in kind.draft_takes and degrees.pp * degrees.ep > 1:
        message = f"{kind.title} is read at any degrees; --tp says for how many ranks the vocabulary is padded"
        raise refuse("UNSUPPORTED", message, hint="Omit --pp and --ep.")


def _targets(option: str, label_suffix: str, degrees: Degrees) -> str:
    """Return the `--to` of each format whose draft takes an option and these degrees, joined by "or"; the dialect stays
    if programs load it from this format.
    """
    takers = [name for name in writable() if option in get_format(name).draft_takes]
    if degrees.pp * degrees.ep > 1:
        takers = [name for name in takers if option != "degrees" or "parts" in get_format(name).draft_takes]
    if _unlike_vllm(degrees):
        takers = [name for name in takers if name != VLLM_SHARDED.name]
    label = label_suffix.removeprefix(":").partition("@")[0]
    loaded = {name: get_format(name).loaded_as or get_format(name).dialects or (label,) for name in takers}
    return " or ".join(f"--to {name}{label_suffix if label in loaded[name] else ''}" for name in takers)


def _unlike_vllm(degrees: Degrees) -> bool:
    """Return whether vLLM does not divide a model so, or pads its vocabulary differently."""
    return degrees.pp > 1 or degrees.rows != _ROWS or degrees.ep not in (1, degrees.tp)


def rank_draft_options(
    checkpoint: Checkpoint,
    dialect: str,
    names: Collection[str],
    degrees: Degrees,
    axes: Mapping[str, int],
    problems: list[Refusal],
) -> dict[str, Any]:
    """Return options for the layout of a target with separate files for each rank.

    Args:
        checkpoint: the source checkpoint.
        dialect: dialect of the target; `identity` means the source's own names.
        names: names of the tensors to write.
        degrees: parallel degrees (numbers of ranks) of the target.
        axes: axis -> size taken from tensor shapes, for axes whose size no config states.
        problems: list to which refusals of parameters that cannot be divided evenly are added.
    """
    if degrees.tp > 1 and dialect != IDENTITY:
        parts = rank_parts(checkpoint, dialect, names, degrees.tp, axes, problems)
    else:
        parts = dict.fromkeys(names)
    if degrees.tp > 1 and dialect == IDENTITY:
        message = "under their own names nothing tells how tensor-parallel ranks share out the tensors"
        problems.append(Refusal("UNSUPPORTED", message, Where(), "Name a dialect: --to FORMAT:DIALECT."))
    return {"degrees": degrees, "parts": parts}


def rank_parts(
    checkpoint: Checkpoint,
    dialect: str,
    names: Collection[str],
    ranks: int,
    axes: Mapping[str, int],
    problems: list[Refusal],
) -> SharesByName:
    """Return which shard of each parameter each tensor-parallel rank holds.

    Args:
        checkpoint: the source checkpoint.
        dialect: dialect of the target.
        names: names of the tensors to write. The result omits names that the dialect does not have. It also omits
            padded tensors, which are divided among ranks later.
        ranks: number of tensor-parallel ranks.
        axes: axis -> size taken from tensor shapes, for axes whose size no config states.
        problems: list to which refusals of parameters that cannot be divided evenly are added.
    """
    family, sizes = checkpoint.reading.family, checkpoint.sizes
    parameters = tuple(dict.fromkeys(split_slot(name)[0] for name in names))
    bound = bind(parameters, family, pick_dialect(family, dialect), sizes)
    cuts = tuple(cut for cut in family.cuts if cut.mesh == _TP)

    def cut_of(expression: Expression, axis_sizes: Mapping[str, int]) -> Shares | None:
        return share_out(expression, cuts, axis_sizes, ranks)

    lines = [(line, names_of_line) for (line, _), names_of_line in bound.names.items() if not line.expression.padding]
    return _cut_lines(lines, sizes, axes, cut_of, problems)


def _cut_lines(
    lines: Sequence[tuple[Line, Mapping[tuple[int, ...], str]]],
    sizes: Sizes,
    axes: Mapping[str, int],
    cut_of: Callable[[Expression, Mapping[str, int]], Shares | None],
    problems: list[Refusal],
) -> dict[str, Shares | None]:
    """Return how ranks share out the parameters of mapping rules; the cut is computed once for all tensors of one rule
    with equal axis sizes.

    Args:
        lines: each mapping rule, with the names of its parameters by the indices in the names.
        sizes: axis sizes of the model.
        axes: axis -> size, for axes whose size `sizes` does not know.
        cut_of: function that cuts a layout with given axis sizes, or raises a `TransaxleError`.
        problems: list to which refusals of parameters that cannot be divided evenly are added.
    """
    parts: dict[str, Shares | None] = {}
    cached_parts: dict[tuple[Line, frozenset[tuple[str, int]]], Shares | None] = {}
    for line, names_of_line in lines:
        for position, name in names_of_line.items():
            axis_sizes = {**axes, **sizes.at(line.name.index_at(position))}
            key = line, frozenset(axis_sizes.items())
            try:
                if key not in cached_parts:
                    cached_parts[key] = cut_of(line.expression, axis_sizes)
                parts[name] = cached_parts[key]
            except TransaxleError as error:
                parts[name] = None  # treated as whole on every rank, so that the parameter gets only one refusal
                problems.extend(replace(refusal, where=Where(None, name)) for refusal in error.refusals)
    return parts


def config_for_ranks(config: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Return a copy of a config to which the number of tensor-parallel ranks is added, also in its section for the text
    model.
    """
    nested = config.get("text_config")
    inner = {"text_config": {**nested, RANKS: tp}} if isinstance(nested, Mapping) else {}
    return {**config, **inner, RANKS: tp}


def engine_parts(
    family: Family, dialect: str, config: Mapping[str, Any], names: Collection[str], *, tp: int, ep: int = 1
) -> SharesByName:
    """Return which shard of each parameter each rank of an inference engine holds.

    Args:
        family: family of the model.
        dialect: dialect of the engine's parameter names.
        config: content of the model's config.
        names: names of the parameters. The result lacks names that the dialect does not have.
        tp: number of tensor-parallel ranks.
        ep: number of ranks among which whole experts are divided: all ranks, or 1 if each rank has a shard of every
            expert.

    Raises:
        Refused: with code UNSUPPORTED, and every parameter that cannot be divided evenly.
        UsageError: with code UNKNOWN_AXIS, if the size of an axis is unknown.
    """
    sizes = Sizes(family, config_for_ranks(config, 1 if ep > 1 else tp))
    problems: list[Refusal] = []
    parts = shares_in_engine(sizes, dialect, names, problems, tp=tp, ep=ep)
    if problems:
        raise gathered(problems)
    return parts


def shares_in_engine(
    sizes: Sizes,
    dialect: str,
    names: Collection[str],
    problems: list[Refusal],
    axes: Mapping[str, int] | None = None,
    *,
    tp: int,
    ep: int = 1,
) -> SharesByName:
    """Return which shard of each parameter each rank of an inference engine holds.

    Args:
        sizes: axis sizes of the model, of which some may depend on the number of ranks.
        dialect: dialect of the engine's parameter names.
        names: names of the parameters. The result lacks names that the dialect does not have.
        problems: list to which refusals of parameters that cannot be divided evenly are added.
        axes: axis -> size taken from tensor shapes, for axes whose size `sizes` does not know.
        tp: number of tensor-parallel ranks.
        ep: number of ranks among which whole experts are divided: all ranks, or 1 if each rank has a shard of every
            expert.

    Raises:
        UsageError: with code UNKNOWN_AXIS, if the size of an axis is unknown.
    """
    family = sizes.family
    label = pick_dialect(family, dialect)
    bound = bind(tuple(names), family, label, sizes)

    def cut_of(expression: Expression, axis_sizes: Mapping[str, int]) -> Shares | None:
        return rank_shares(expression, family, label.name, axis_sizes, tp=tp, ep=ep)

    lines = [(line, names_of_line) for (line, _), names_of_line in bound.names.items()]
    return _cut_lines(lines, sizes, axes or {}, cut_of, problems)


def pad_for_ranks(checkpoint: Checkpoint, dialect: str, degrees: Degrees) -> Checkpoint:
    """Return the checkpoint with dims padded so that they can be divided evenly among the ranks, unless the user gave a
    size.

    Args:
        checkpoint: the source checkpoint.
        dialect: dialect of the target.
        degrees: parallel degrees (numbers of ranks) of the target.
    """
    reading, multiple = checkpoint.reading, degrees.rows * degrees.tp
    if any(line.expression.padding for line in reading.dialect.lines):
        return _change_padding(checkpoint, multiple)
    sizes = checkpoint.sizes.at({})
    paddings: dict[str, int] = {}
    for line in pick_dialect(reading.family, dialect).lines:
        for node in line.expression.dims if line.expression.padding else ():
            axes, length = _padding(node, sizes)
            if len(axes) == 1 and length is not None and axes[0] not in sizes:
                paddings[axes[0]] = -length % multiple
    settings = msgspec.structs.replace(checkpoint.settings, axes={**paddings, **checkpoint.settings.axes})
    return Checkpoint(checkpoint.container, settings, None, None, checkpoint.undecoded)


def _padding(node: Node, sizes: Mapping[str, int]) -> tuple[list[str], int | None]:
    """Return the padding axes of a dim, and the dim's length without padding; the length is None if a size is
    unknown.
    """
    if not isinstance(node, Sum):
        return [], None
    axes = [axis for name, part in node.segments if name == PADDING for axis in sorted(axes_in(part))]
    segments = [part for name, part in node.segments if name != PADDING]
    length = None if any(unknown(part, sizes) for part in segments) else sum(size(part, sizes) for part in segments)
    return axes, length


def _change_padding(checkpoint: Checkpoint, multiple: int) -> Checkpoint:
    """Return a checkpoint with more padding, made by appending rows of zeros, or with less padding, by omitting padding
    rows.
    """
    container, reading = checkpoint.container, checkpoint.reading
    inline = layer(container.storage, NumbersInMemory) or NumbersInMemory(container.storage)
    entries, left_entries = dict(container.entries), dict(container.left)
    user_axes = checkpoint.settings.axes
    paddings: dict[str, int] = {}
    for (line, _), names in checkpoint.bound.names.items():
        for position, name in names.items() if line.expression.padding else ():
            if name not in entries or len(entries[name].shape) != len(line.expression.dims):
                continue  # such a tensor has other dims than the rule, as an optimizer's step counter does
            sizes = checkpoint.sizes.at(line.name.index_at(position))
            for dim, node in enumerate(line.expression.dims):
                axes, length = _padding(node, sizes)
                if len(axes) == 1 and length is not None and axes[0] not in user_axes:
                    paddings[axes[0]] = -length % multiple
                    entries[name], cut_entry = _resize(entries[name], dim, length + paddings[axes[0]], inline)
                    left_entries |= {cut_entry.name: cut_entry} if cut_entry is not None else {}
    if all(entries[name] is entry for name, entry in container.entries.items()):
        return checkpoint
    storage = container.storage if layer(container.storage, NumbersInMemory) is not None else inline
    settings = msgspec.structs.replace(
        checkpoint.settings,
        family=reading.family.name,
        dialect=reading.dialect.label,
        axes={**paddings, **user_axes},
    )
    resized = msgspec.structs.replace(container, storage=storage, entries=entries, left=left_entries)
    return Checkpoint(resized, settings, None, None, checkpoint.undecoded)


def _resize(entry: Entry, dim: int, length: int, inline: NumbersInMemory) -> tuple[Entry, Entry | None]:
    """Return a tensor's entry lengthened or shortened along a dim, and an entry for the rows that were cut off, or
    None.
    """
    old_length = entry.shape[dim]
    if length == old_length:
        return entry, None
    shape = (*entry.shape[:dim], length, *entry.shape[dim + 1 :])
    if length > old_length:
        start = tuple(old_length if at == dim else 0 for at in range(len(shape)))
        added_shape = (*shape[:dim], length - old_length, *shape[dim + 1 :])
        place = inline.add(bytes(_WIDEST))
        zeros = Extent(start, added_shape, place.file, place.offset, (0,) * len(shape))
        return Entry(entry.name, entry.dtype, shape, (*entry.extents, zeros)), None
    kept_extents = [_clip(entry, extent, dim, 0, length) for extent in entry.extents]
    cut_extents = [_clip(entry, extent, dim, length, old_length) for extent in entry.extents]
    cut_off = (*shape[:dim], old_length - length, *shape[dim + 1 :])
    return (
        Entry(entry.name, entry.dtype, shape, tuple(each for each in kept_extents if each is not None)),
        Entry(
            f"{entry.name} from {length} on",
            entry.dtype,
            cut_off,
            tuple(each for each in cut_extents if each is not None),
        ),
    )


def _clip(entry: Entry, extent: Extent, dim: int, start: int, stop: int) -> Extent | None:
    """Return the part of a stored chunk between two indices of a dim; positions in it are counted from the first
    index.
    """
    low, high = max(extent.start[dim], start), min(extent.start[dim] + extent.shape[dim], stop)
    if low >= high:
        return None
    strides = extent.strides or row_major(extent.shape)
    shape = (*extent.shape[:dim], high - low, *extent.shape[dim + 1 :])
    offset = extent.offset + (low - extent.start[dim]) * strides[dim] * ITEM_BITS[entry.dtype] // 8
    begin = (*extent.start[:dim], low - start, *extent.start[dim + 1 :])
    dense = extent.strides is None and all(count == 1 for count in shape[:dim])
    return Extent(begin, shape, extent.file, offset, None if dense else strides)


_TABLE = "vllm_state.json"
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")
_SCALES = ("_k_scale", "_prob_scale", "_q_scale", "_v_scale")
"""Names of the scales of one attention layer in vLLM 0.32."""
_HEAD = "lm_head.weight"
"""End of the name of an output head."""
_WAYS_ON = "Let vLLM read the hub's folder: --to hf."
_ENCODED = f"{_WAYS_ON} Quantized weights can be decoded first: --decode bf16."
_ROWS = Degrees().rows


class FamilyState(msgspec.Struct, frozen=True):
    """What the state dict of vLLM's model of a family has, besides what the family's table says.

    In names, `{}` stands for the number of a layer or an expert.
    """

    same: frozenset[str]
    """Tensors that the files have under the names of the dialect."""
    renamed: Mapping[str, str] = {}
    """Name in the dialect -> name in the files, unless the model has a tensor of that name as well, as where the head
    is not tied to the embedding."""
    scales: Mapping[str, str] = {}
    """Module with scales -> tensor that those layers have that have such a module."""


class _StateTable(msgspec.Struct, frozen=True):
    vllm: str
    families: dict[str, FamilyState]
    refused: dict[str, str]
    """Family -> why its state dict cannot be described so."""


@cache
def state_table() -> _StateTable:
    """Return what is known of the state dicts of vLLM's models."""
    text = get_data(__package__, _TABLE)
    assert text is not None  # the file is part of the package
    return msgspec.json.decode(text, type=_StateTable)


def pattern_of(name: str) -> str:
    """Return a tensor's name with `{}` in place of the numbers of layers and experts."""
    return _INDEX.sub("{}", name)


def fit_engine(checkpoint: Checkpoint, dialect: str, degrees: Degrees) -> Checkpoint:
    """Return the checkpoint with axis sizes for the engine's number of ranks, and without training state.

    Args:
        checkpoint: the source checkpoint.
        dialect: dialect of the target.
        degrees: parallel degrees of the engine.

    Raises:
        Refused: with code UNSUPPORTED, for a dialect that is not vLLM's, for parallel degrees that vLLM does not
            support, and if the user wants the optimizer's state.
    """
    if dialect.partition("@")[0] != VLLM:
        message = f"vLLM looks for tensors of the dialect {VLLM} in these files, not of {dialect}"
        raise refuse("UNSUPPORTED", message, hint="Name no dialect: --to vllm_sharded.")
    if degrees.pp > 1 or degrees.rows != _ROWS:
        message = "these files are for tensor and expert parallelism, and vLLM itself says how the vocabulary is padded"
        raise refuse("UNSUPPORTED", message, hint="Omit --pp and --make-vocab-size-divisible-by.")
    if degrees.ep not in (1, degrees.tp):
        message = f"vLLM divides experts over all of its {degrees.tp} tensor-parallel ranks, or not at all"
        raise refuse("UNSUPPORTED", message, hint=f"Write --ep {degrees.tp}, or omit it.")
    if checkpoint.settings.optimizer:
        message = "vLLM reads no state of an optimizer"
        raise refuse("UNSUPPORTED", message, hint="Omit --optimizer.")
    return size_for_ranks(without_training(checkpoint).without_optimizer(), tp=degrees.tp, ep=degrees.ep)


def size_for_ranks(model: Checkpoint, *, tp: int, ep: int = 1) -> Checkpoint:
    """Return the checkpoint with axis sizes for an engine's number of ranks.

    Args:
        model: a checkpoint without training state.
        tp: number of tensor-parallel ranks.
        ep: number of ranks among which whole experts are divided, or 1 if each rank has a shard of every expert.
    """
    family, config = model.reading.family, model.config
    alone = Sizes(family, config).at({})
    in_ranks = Sizes(family, config_for_ranks(config, 1 if ep > 1 else tp)).at({})
    changed = {axis: size for axis, size in in_ranks.items() if alone.get(axis) != size}
    if not changed:
        return model
    settings = msgspec.structs.replace(model.settings, axes={**changed, **model.settings.axes})
    return Checkpoint(model.container, settings, None, None, model.undecoded)


def without_foreign(view: View) -> tuple[View, tuple[str, ...]]:
    """Return a view without the tensors that vLLM's model has no place for, and a note about them."""
    if not view.kept_names:
        return view, ()
    foreign = frozenset(view.kept_names)
    targets = {name: target for name, target in view.targets.items() if name not in foreign}
    note = in_both_languages(
        f"{len(foreign):,} tensors are left out, such as {min(foreign)}: the dialect {VLLM} has no line for them"
    )
    return msgspec.structs.replace(view, targets=targets, kept_names=(), ignored=(*view.ignored, *sorted(foreign))), (
        note,
    )


def engine_draft_options(
    checkpoint: Checkpoint,
    dialect: str,
    names: Collection[str],
    degrees: Degrees,
    axes: Mapping[str, int],
    problems: list[Refusal],
) -> dict[str, Any]:
    """Return options for the layout of an engine's files.

    Args:
        checkpoint: the source checkpoint.
        dialect: dialect of the target.
        names: names of the tensors to write.
        degrees: parallel degrees of the engine.
        axes: axis -> size taken from tensor shapes, for axes whose size no config states.
        problems: list to which refusals are added, of the family or of tensors.
    """
    family = checkpoint.reading.family.name
    state = state_table().families.get(family)
    if state is None:
        why = state_table().refused.get(family, "it has not been compared with vLLM's model")
        message = f"the names of family {family} in vLLM's files are not known: {why}"
        problems.append(Refusal("UNSUPPORTED", message, Where(), _WAYS_ON))
        return {"degrees": degrees, "parts": {}}
    parts = shares_in_engine(checkpoint.sizes, dialect, names, problems, axes, tp=degrees.tp, ep=degrees.ep)
    return {"degrees": degrees, "parts": parts, **_in_files(family, state, names, problems)}


def _in_files(
    family: str, state: FamilyState, names: Collection[str], problems: list[Refusal]
) -> dict[str, dict[str, str] | list[str]]:
    """Return the names in the files, and the names of the scales."""
    numbers = {name: tuple(_INDEX.findall(name)) for name in names}
    patterns = {name: pattern_of(name) for name in names}
    stored_names = {}
    for name, pattern in patterns.items():
        renamed = state.renamed.get(pattern, "").format(*numbers[name])
        if renamed and renamed not in names:
            stored_names[name] = renamed
        elif pattern not in state.same:
            message = f"vLLM's model of family {family} has not been seen with a tensor of this name"
            problems.append(Refusal("UNSUPPORTED", message, Where(None, name), _ENCODED))
    present = {pattern_of(stored_names.get(name, name)) for name in names}
    for head in (name for name in state.same if name.endswith(_HEAD) and name not in present):
        message = "vLLM's model of this family has not been seen with a head that is tied to the embedding"
        problems.append(Refusal("UNSUPPORTED", message, Where(None, head), _WAYS_ON))
    layers: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for name, pattern in patterns.items():
        layers[pattern].append(numbers[name])
    ones = [
        f"{module.format(*index)}.{scale}"
        for module, anchor in state.scales.items()
        for index in layers[anchor]
        for scale in _SCALES
    ]
    return {"names": stored_names, "ones": ones}
