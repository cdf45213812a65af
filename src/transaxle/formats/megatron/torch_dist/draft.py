"""Drafting a distributed checkpoint of Megatron: what `--load` takes at any degree of parallelism.

    OUT/latest_checkpointed_iteration.txt     `release`, or the iteration if the optimizer's state is there
    OUT/release/.metadata, __0_0.distcp, …    tensors, and the pickled states that Megatron insists on
    OUT/release/common.pt                     arguments, versions
    OUT/release/metadata.json

Megatron reads whole chunks. So a tensor that holds all layers is cut into chunks of a layer, an expert and a half of
gate and up, as Megatron itself cuts it. Every module must have an `_extra_state`; all of ours share one that is empty.
The optimizer's steps are in the settings of its groups, where Megatron looks for them, and tensors besides.
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
from transaxle.formats.catalog import Draft, Entry, Extent, Fragment, Shape, Spec, logical, nbytes, stored_number
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
from transaxle.formats.megatron.torch_dist.written_state import common_state, counted, optimizer_settings, step_of
from transaxle.formats.megatron.written_arguments import is_padded
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.registry import MEGATRON_TRACKER, TORCH_DIST
from transaxle.formats.torch_file.draft import surround
from transaxle.formats.training_state import GROUPS, MASTER, OPTIMIZER, KeyPath, ParamGroup

Cuts = Mapping[str, Sequence[Sequence[int]]]
"""Tensor -> for each of its first dims, where chunks begin."""
_MASTER = "param"
"""State: what a distributed optimizer calls the full-precision copies."""
_STEP, GLOBAL_STEPS = "step", "global_steps"
_EMBEDDING = "embedding.word_embeddings.weight"
_MODULE = re.compile(
    r"((?:(?:language_model|vision_model)\.)?(?:decoder|mtp|merger)\..+|multi_modal_projector\.(?:proj|mm_soft_embed_norm))"
    r"\.(?:weight|layer_norm_weight)(?:\.[A-Za-z]+)?"
)
_HEAD, _LISTED = "output_layer", (".layers.", ".deepstack_merger_list.")
"""Module that only some models keep a state of; lists of modules, of which a tensor has all, or one by number."""
_JOINED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
"""Norm of Transformer Engine's modules -> its name in the local ones, in checkpoints."""
_APART = re.compile(rf"(.+\.layers\.(?:\d+\.)?)({'|'.join(map(re.escape, _JOINED))})")
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
    """Lay out a distributed checkpoint: weights as a release, or an iteration with the optimizer's state.

    Args:
        tensors: what to write, under Megatron's names; files are filled in this order.
        metadata: left out: the format has no place for free text.
        shard_size: bytes of tensors in one file.
        cuts: where the chunks of tensors begin that hold several layers or experts.
        config: the model's config.json.
        run: what the source says of its run.
        read: returns the bytes of a small tensor, for the optimizer's steps.
        degrees: the ranks for which the user has padded the vocabulary; None: it is as in the source.

    Raises:
        Refused: for every tensor that has no place: UNSUPPORTED, NAME_COLLISION, SHAPE_MISMATCH; for an optimizer that
            Megatron cannot hold, UNSUPPORTED, INCOMPLETE.
    """
    del metadata
    facts = counted(run or {})
    shapes = {spec.name: spec.shape for spec in tensors if split_slot(spec.name)[0] == spec.name}
    optimizer, notes = _optimizer(tensors, shapes, facts, (run or {}).get(GROUPS, ()), read)
    if optimizer is not None:
        facts.setdefault("iteration", (run or {}).get(GLOBAL_STEPS) or step_of(optimizer))
    folder = RELEASE if optimizer is None else iteration_folder(facts["iteration"])
    files = DataFiles(shard_size, sum(nbytes(spec.dtype, spec.shape) for spec in tensors))
    entries, chunks = _placed(tensors, cuts or {}, files, folder)
    objects = _states(shapes, files)
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
    """Return the optimizer's settings, and notes on them; None where there is no state of it.

    Raises:
        Refused: UNSUPPORTED where the parameters have made different numbers of steps.
    """
    states = [(spec, *split_slot(spec.name)) for spec in tensors if spec.name.startswith(OPTIMIZER)]
    parameters = dict.fromkeys(parameter for _, parameter, _ in states)
    if not parameters:
        return None, []
    steps = {
        int(stored_number(read(spec.name), spec.dtype))
        for spec, _, state in states
        if state == _STEP and read is not None
    }
    if len(steps) > 1:
        message = f"its parameters have made {' and '.join(map(str, sorted(steps)))} steps; Megatron keeps one number"
        raise refuse("UNSUPPORTED", message, hint="Write the weights alone: --no-optimizer.")
    trained = {name: shapes[name] for name in parameters if name in shapes}
    names = {state for _, _, state in states} - {_STEP, MASTER}
    return optimizer_settings(trained, facts, groups, steps.pop() if steps else 0, names)


def _placed(
    tensors: Sequence[Spec], cuts: Cuts, files: DataFiles, folder: str
) -> tuple[dict[str, Entry], ChunksByTensor]:
    """Give every tensor its chunks."""
    faults = Faults()
    keys: dict[str, str] = {}
    torch_tensors = [as_torch_tensor(spec, (_key(spec.name),), keys, faults) for spec in tensors]
    if faults:
        raise faults.error()
    alone = _without_copies(tensors, faults)
    if faults:
        raise faults.error()
    entries: dict[str, Entry] = {}
    chunks: ChunksByTensor = []
    for tensor in torch_tensors:
        assert tensor is not None
        name, code = tensor.spec.name, tensor.spec.dtype
        placed, extents = [], []
        for start, shape in _boxes(tensor.shape, cuts[name]) if name in cuts else cut(tensor, files.limit):
            payload, offset = files.place(tensor.dtype, shape)
            placed.append(ChunkPlace(start, shape, payload))
            extents.append(Extent(logical(start, code), logical(shape, code), f"{folder}/{payload.file}", offset))
        same = [key for key in _other_keys(name, alone) if key not in keys]
        chunks += [(tensor._replace(path=(key,)), placed) for key in (_key(name), *same)]
        entries[name] = Entry(name, code, tensor.spec.shape, tuple(extents))
    return entries, chunks


def _without_copies(tensors: Sequence[Spec], faults: Faults) -> dict[str, str]:
    """Return the trained weights without a copy in full precision, each with the name that the copy would have.

    They are such copies themselves; that one of them is not is a fault.
    """
    dtypes = {spec.name: spec.dtype for spec in tensors}
    trained = {parameter for name in dtypes if (parameter := split_slot(name)[0]) != name}
    alone = {name: f"{OPTIMIZER}{name}/{MASTER}" for name in trained if f"{OPTIMIZER}{name}/{MASTER}" not in dtypes}
    for name in sorted(alone):
        if dtypes.get(name) != "F32":
            message = "the optimizer's state has no full-precision copy of this weight, and Megatron needs one"
            faults.add("UNSUPPORTED", message, None, name, "Write the weights alone: --no-optimizer.")
    return alone


def _other_keys(name: str, alone: Mapping[str, str]) -> Iterator[str]:
    """Yield further keys of a tensor, under which it has the same place.

    Weights of full precision are the optimizer's copies too. A norm that Transformer Engine keeps apart is part of the
    linear layer in Megatron's local modules.
    """
    for each in (name, *([alone[name]] if name in alone else ())):
        if each != name:
            yield _key(each)
        parameter, state = split_slot(each)
        apart = _APART.fullmatch(parameter)
        if apart is not None:
            yield _key(join_slot(f"{apart[1]}{_JOINED[apart[2]]}", state))


def _key(name: str) -> str:
    """Return Megatron's key of a tensor: of the optimizer's state, the state before the parameter."""
    parameter, state = split_slot(name)
    return parameter if not state else f"optimizer.state.{_MASTER if state == MASTER else state}.{parameter}"


_BACKEND = {
    "sharded_backend": TORCH_DIST.name,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def _boxes(shape: Shape, starts: Sequence[Sequence[int]]) -> Iterator[tuple[Shape, Shape]]:
    """Yield the chunks of a tensor, in the order of its elements."""
    spans = [list(pairwise((*of_dim, size))) for of_dim, size in zip(starts, shape, strict=False)]
    whole = shape[len(starts) :]
    for box in product(*spans):
        yield (*(begin for begin, _ in box), *(0 for _ in whole)), (*(end - begin for begin, end in box), *whole)


def _states(shapes: Mapping[str, Shape], files: DataFiles) -> ObjectPlaces:
    """Place the `_extra_state` of every module, one for each layer and expert; all of them are one empty archive."""
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
    empty = b"".join(data for _, data in surround(METADATA, [None], []).known)
    payload = files.keep(empty)
    return [(path, payload) for module, counts in modules.items() for path in _shards(module, counts)]


def _counts(module: str, shape: Shape) -> Shape:
    """Return the sizes of the axes of a module's tensors that are layers and experts."""
    lists = sum(1 for each in _LISTED if re.search(rf"{re.escape(each)}(?!\d)", module))
    return shape[: lists + (1 if ".experts.experts." in module else 0)]


def _shards(module: str, counts: Shape) -> Iterator[KeyPath]:
    sizes = ".".join(map(str, counts or (1,)))
    for at in product(*map(range, counts or (1,))):
        yield (f"{module}._extra_state/shard_{'.'.join(map(str, at))}_{sizes}",)
