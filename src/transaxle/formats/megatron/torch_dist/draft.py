"""Lays out a new distributed checkpoint of Megatron (`torch_dist`), which Megatron's `--load` reads with any parallel
degrees.

    OUT/latest_checkpointed_iteration.txt     `release`, or the iteration if the optimizer's state is there
    OUT/release/.metadata, __0_0.distcp, …    tensors, and the pickled `_extra_state`s that Megatron requires
    OUT/release/common.pt                     arguments, versions
    OUT/release/metadata.json

When Megatron loads a checkpoint, it reads whole chunks of tensors. A tensor that stacks all layers is therefore cut as
Megatron itself cuts it: one chunk for each layer, each expert, and each half of a fused gate and up projection.
Megatron requires an `_extra_state` for every module; in the new checkpoint all modules share one empty archive. The
optimizer's step is written twice: in the settings of the parameter groups, where Megatron reads it, and as tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

from transaxle.arguments import Degrees
from transaxle.axes.layout.bind import join_slot, split_slot
from transaxle.errors import Faults, refuse
from transaxle.formats.catalog import Draft, Entry, Extent, Fragment, Shape, Spec, elements_shape, nbytes, number_value
from transaxle.formats.dcp.draft import (
    ChunkPlace,
    ChunksByTensor,
    DataFiles,
    ObjectPlaces,
    as_torch_tensor,
    cut,
    metadata_of,
)
from transaxle.formats.dcp.metadata import METADATA
from transaxle.formats.megatron.iterations import BACKEND_FILE, COMMON_FILE, RELEASE, iteration_folder
from transaxle.formats.megatron.torch_dist.written_state import common_state, optimizer_settings, run_facts, step_of
from transaxle.formats.megatron.written_arguments import is_padded
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.registry import MEGATRON_TRACKER, TORCH_DIST
from transaxle.formats.torch_file.draft import lay_out_value
from transaxle.formats.training_state import GROUPS, MASTER, OPTIMIZER, KeyPath, ParamGroup

Cuts = Mapping[str, Sequence[Sequence[int]]]
"""Tensor name -> list with one entry for each leading dim: the indices along this dim at which chunks begin."""
_MASTER = "param"
"""Megatron's name for the optimizer state that is the full-precision copy of the weights."""
_STEP, GLOBAL_STEPS = "step", "global_steps"
_EMBEDDING = "embedding.word_embeddings.weight"
_MODULE = re.compile(
    r"((?:(?:language_model|vision_model)\.)?(?:decoder|mtp|merger)\..+|multi_modal_projector\.(?:proj|mm_soft_embed_norm))"
    r"\.(?:weight|layer_norm_weight)(?:\.[A-Za-z]+)?"
)
_HEAD, _LISTED = "output_layer", (".layers.", ".deepstack_merger_list.")
"""First the module name of the output head, which has an `_extra_state` in only some models. The second constant
contains the name segments of module lists: the tensors of a list are stacked along an axis, unless a number follows the
segment in the name.
"""
_NORM_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
"""Name of a norm in Transformer Engine's modules -> name of the norm in Megatron's own modules."""
_NORM = re.compile(rf"(.+\.layers\.(?:\d+\.)?)({'|'.join(map(re.escape, _NORM_NAMES))})")
_STATELESS = re.compile(r".*\.router")
_ATTENTION = re.compile(r"(.+\.self_attention)\.linear_proj")


def draft(
    tensors: Sequence[Spec],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_size: int | None = None,
    cuts: Cuts | None = None,
    config: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    read: Callable[[str], bytes] | None = None,
    degrees: Degrees | None = None,
) -> Draft:
    """Lay out a distributed checkpoint: in the folder `release` if there are only weights, in the folder of an
    iteration if there is optimizer state.

    Args:
        tensors: the tensors to write, under Megatron's names; files are filled in this order.
        metadata: not used, because the format has no place for free text.
        shard_size: maximum number of tensor bytes in one file; None means that there is a single file.
        cuts: how to cut tensors that stack several layers or experts; see `Cuts`.
        config: the model's config.json.
        run: counters and settings of the training run that wrote the source checkpoint.
        read: function that returns the bytes of a tensor by name; called for the optimizer's steps.
        degrees: the parallel degrees for which the user has padded the vocabulary; None means the padding of the source
            checkpoint.

    Raises:
        Refused: with every tensor that cannot be stored, and the code UNSUPPORTED, NAME_COLLISION or SHAPE_MISMATCH; or
            with the code UNSUPPORTED or INCOMPLETE if Megatron could not load the optimizer state.
    """
    del metadata
    facts = run_facts(run or {})
    shapes = {spec.name: spec.shape for spec in tensors if split_slot(spec.name)[0] == spec.name}
    optimizer, notes = _optimizer(tensors, shapes, facts, (run or {}).get(GROUPS, ()), read)
    if optimizer is not None:
        facts.setdefault("iteration", (run or {}).get(GLOBAL_STEPS) or step_of(optimizer))
    folder = RELEASE if optimizer is None else iteration_folder(facts["iteration"])
    files = DataFiles(shard_size, sum(nbytes(spec.dtype, spec.shape) for spec in tensors))
    entries, chunks = _place_tensors(tensors, cuts or {}, files, folder)
    objects = _place_extra_states(shapes, files)
    fragments, sizes = files.finish()
    rows = shapes[_EMBEDDING][0] if _EMBEDDING in shapes else None
    vocabulary = rows if degrees is not None or is_padded(config or {}, rows) else None
    small = {
        MEGATRON_TRACKER: (RELEASE if optimizer is None else str(facts["iteration"])).encode(),
        f"{folder}/{BACKEND_FILE}": json.dumps(_BACKEND).encode(),
        f"{folder}/{COMMON_FILE}": common_state(shapes, config or {}, vocabulary, facts, optimizer),
        f"{folder}/{METADATA}": write_pickle(metadata_of(chunks, objects, with_paths=False)),
    }
    return Draft(
        TORCH_DIST.name,
        entries,
        {f"{folder}/{file}": size for file, size in sizes.items()} | {file: len(data) for file, data in small.items()},
        (
            *(Fragment(f"{folder}/{each.file}", each.offset, each.data) for each in fragments),
            *(Fragment(file, 0, data) for file, data in small.items()),
        ),
        notes=tuple(notes),
    )


def _optimizer(
    tensors: Sequence[Spec],
    shapes: Mapping[str, Shape],
    facts: Mapping[str, Any],
    groups: Sequence[ParamGroup],
    read: Callable[[str], bytes] | None,
) -> tuple[dict[Any, Any] | None, list[str]]:
    """Return the optimizer's settings (None if there is no optimizer state), and notes for the user.

    Raises:
        Refused: with the code UNSUPPORTED if the parameters have made different numbers of steps.
    """
    states = [(spec, *split_slot(spec.name)) for spec in tensors if spec.name.startswith(OPTIMIZER)]
    parameters = dict.fromkeys(parameter for _, parameter, _ in states)
    if not parameters:
        return None, []
    steps = {
        int(number_value(read(spec.name), spec.dtype))
        for spec, _, state in states
        if state == _STEP and read is not None
    }
    if len(steps) > 1:
        message = f"its parameters have made {' and '.join(map(str, sorted(steps)))} steps; Megatron keeps one number"
        raise refuse("UNSUPPORTED", message, hint="Write the weights alone: --no-optimizer.")
    trained = {name: shapes[name] for name in parameters if name in shapes}
    names = {state for _, _, state in states} - {_STEP, MASTER}
    return optimizer_settings(trained, facts, groups, steps.pop() if steps else 0, names)


def _place_tensors(
    tensors: Sequence[Spec], cuts: Cuts, files: DataFiles, folder: str
) -> tuple[dict[str, Entry], ChunksByTensor]:
    """Reserve space for every tensor; return the catalog entries, and the chunks of each DCP key."""
    faults = Faults()
    keys: dict[str, str] = {}
    torch_tensors = [as_torch_tensor(spec, (_item_key(spec.name),), keys, faults) for spec in tensors]
    if faults:
        raise faults.error()
    own_masters = _own_masters(tensors, faults)
    if faults:
        raise faults.error()
    entries: dict[str, Entry] = {}
    chunks: ChunksByTensor = []
    for tensor in torch_tensors:
        assert tensor is not None
        name, code = tensor.spec.name, tensor.spec.dtype
        tensor_chunks, extents = [], []
        for start, shape in _boxes(tensor.shape, cuts[name]) if name in cuts else cut(tensor, files.limit):
            payload, offset = files.place(tensor.dtype, shape)
            tensor_chunks.append(ChunkPlace(start, shape, payload))
            extents.append(
                Extent(elements_shape(start, code), elements_shape(shape, code), f"{folder}/{payload.file}", offset)
            )
        further_keys = [key for key in _further_keys(name, own_masters) if key not in keys]
        chunks += [(tensor._replace(path=(key,)), tensor_chunks) for key in (_item_key(name), *further_keys)]
        entries[name] = Entry(name, code, tensor.spec.shape, tuple(extents))
    return entries, chunks


def _own_masters(tensors: Sequence[Spec], faults: Faults) -> dict[str, str]:
    """Return the trained weights without a full-precision copy, each with the name that such a copy would have.

    A weight without a copy is also stored as the copy; if the weight is not F32, a fault is added.
    """
    dtypes = {spec.name: spec.dtype for spec in tensors}
    trained = {parameter for name in dtypes if (parameter := split_slot(name)[0]) != name}
    alone = {name: f"{OPTIMIZER}{name}/{MASTER}" for name in trained if f"{OPTIMIZER}{name}/{MASTER}" not in dtypes}
    for name in sorted(alone):
        if dtypes.get(name) != "F32":
            message = "the optimizer's state has no full-precision copy of this weight, and Megatron needs one"
            faults.add("UNSUPPORTED", message, None, name, "Write the weights alone: --no-optimizer.")
    return alone


def _further_keys(name: str, own_masters: Mapping[str, str]) -> Iterator[str]:
    """Yield the additional DCP keys under which the new checkpoint lists a tensor's bytes.

    A full-precision weight also gets the key of the optimizer's full-precision copy. Some norms get two keys: one key
    for Megatron's own modules, and one for Transformer Engine's modules.
    """
    for tensor_name in (name, *([own_masters[name]] if name in own_masters else ())):
        if tensor_name != name:
            yield _item_key(tensor_name)
        parameter, state = split_slot(tensor_name)
        match = _NORM.fullmatch(parameter)
        if match is not None:
            yield _item_key(join_slot(f"{match[1]}{_NORM_NAMES[match[2]]}", state))


def _item_key(name: str) -> str:
    """Return Megatron's DCP key of a tensor; in the key of optimizer state, the state's name comes before the
    parameter's name.
    """
    parameter, state = split_slot(name)
    return parameter if not state else f"optimizer.state.{_MASTER if state == MASTER else state}.{parameter}"


_BACKEND = {
    "sharded_backend": TORCH_DIST.name,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def _boxes(shape: Shape, starts: Sequence[Sequence[int]]) -> Iterator[tuple[Shape, Shape]]:
    """Yield the chunks of a tensor as (first index, shape), in row-major order."""
    spans = [list(pairwise((*of_dim, size))) for of_dim, size in zip(starts, shape, strict=False)]
    whole = shape[len(starts) :]
    for box in product(*spans):
        yield (*(begin for begin, _ in box), *(0 for _ in whole)), (*(end - begin for begin, end in box), *whole)


def _place_extra_states(shapes: Mapping[str, Shape], files: DataFiles) -> ObjectPlaces:
    """Store an `_extra_state` for every module, layer and expert; all of them share one empty archive."""
    modules: dict[str, Shape] = {}
    for name, shape in shapes.items():
        match = _MODULE.fullmatch(name)
        if match is None or _STATELESS.fullmatch(name.rpartition(".")[0]):
            continue
        module = match[1]
        modules[module] = _counts(module, shape)
        attention = _ATTENTION.fullmatch(module)
        if attention is not None:
            modules[f"{attention[1]}.core_attention"] = modules[module]
    if not modules:
        return []
    modules |= {f"{name.removesuffix(_EMBEDDING)}{_HEAD}": () for name in shapes if name.endswith(_EMBEDDING)}
    empty = b"".join(data for _, data in lay_out_value(METADATA, [None], []).fragments)
    payload = files.keep(empty)
    return [(path, payload) for module, counts in modules.items() for path in _extra_state_keys(module, counts)]


def _counts(module: str, shape: Shape) -> Shape:
    """Return the sizes of those leading dims of a module's tensors along which layers and experts are stacked."""
    lists = sum(1 for each in _LISTED if re.search(rf"{re.escape(each)}(?!\d)", module))
    return shape[: lists + (1 if ".experts.experts." in module else 0)]


def _extra_state_keys(module: str, counts: Shape) -> Iterator[KeyPath]:
    sizes = ".".join(map(str, counts or (1,)))
    for at in product(*map(range, counts or (1,))):
        yield (f"{module}._extra_state/shard_{'.'.join(map(str, at))}_{sizes}",)
