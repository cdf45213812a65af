"""Models of transformers from any checkpoint, and complete folders for a hub from any model.

    model = tx.from_pretrained(AutoModelForCausalLM, "megatron/iter_0000500", config="Qwen3-30B-A3B/config.json")
    tx.save_pretrained(model, "out", tokenizer=tokenizer)

The model is built without memory, divided, and then filled: each rank reads its own bytes. transformers itself opens
only files of its own, and leaves what they lack at random values.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from transaxle.arguments import (
    Config,
    DType,
    Overwrite,
    PathLike,
    read_optional_text,
    read_path,
    read_source,
    read_text,
    suggests,
    wrong_type,
)
from transaxle.encodings.conventions.rewriting import without_quantization
from transaxle.encodings.encoding import CASTS
from transaxle.engine.checkpoint.checkpoint import Checkpoint, CheckpointLike
from transaxle.engine.checkpoint.settings import CONFIG, model_config, read_stored_config
from transaxle.engine.checkpoint.source_hashes import problems_of
from transaxle.engine.wording import plural
from transaxle.errors import LACKING, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.storage.storage import parse_json
from transaxle.live.load import load
from transaxle.live.load_plan import open_source
from transaxle.live.model.destination import OWN, LoadReport, SaveReport
from transaxle.live.model.source_view import names_ahead, without_tensors
from transaxle.live.save import collect, read_settings, write_checkpoint
from transaxle.live.transport.world import Clock, World
from transaxle.torch_tensors import (
    Device,
    Ranks,
    innermost,
    read_device,
    read_dtype,
    read_optional_dtype,
    torch_dtype,
)

_LOG = logging.getLogger("transaxle")
GENERATION = "generation_config.json"
_NO_CONFIG = "Give config=, such as config.json. An adapter is merged into its base: tx.open(BASE, merge=ADAPTER)."
_UNREAD = frozenset({"UNKNOWN_FAMILY", "AMBIGUOUS"})
"""Codes of a load if no table reads the names of the model or of the checkpoint."""
_UNLIKE = frozenset({*LACKING, "UNEXPECTED_TENSOR", *_UNREAD})
"""Codes of a load that report different tensors in model and checkpoint, or names that no table has for both."""
_LOADED_BASE = (
    "The checkpoint is that of a base model. Build the model, and load the part without the head:  "
    "model.{prefix} = tx.from_pretrained(AutoModel, src)."
)
_SHOWN = 3
"""Largest number of names that a line in the log lists."""
_NO_VALUES, _NO_PARAMETER = "the checkpoint has no tensor for it", "the model has no parameter for it"
_BUILD = "Build the model yourself, and call tx.load(model, src)."
_OTHER_CLASS = "Choose the class that has these tensors, or build the model and call tx.load(model, src, strict=False)."


@suggests
def from_pretrained(
    model_class: Any,
    src: CheckpointLike,
    *,
    config: Config | None = None,
    dtype: DType | None = None,
    tp_plan: Mapping[str, str] | str | None = None,
    device_mesh: DeviceMesh | None = None,
    parallelize: Callable[[Any], object] | None = None,
    device: Device | None = None,
    check_source: bool = True,
    attn_implementation: str | None = None,
) -> Any:
    """Return a model of transformers with the weights of any checkpoint, ready to compute; all ranks must call this.

    Every parameter is filled from the checkpoint, and every tensor of the checkpoint has a parameter, or nothing is
    returned. Layers that predict further tokens (MTP) are left out with a warning in the log, because models of
    transformers have none; so is a head, if `model_class` is a base model, such as `AutoModel`. The checkpoint of a
    base model fills a model with a head only if the head is tied. Parameters that transformers keeps in float32 are
    kept so. No code of a checkpoint is run.

    Args:
        model_class: a class of models, such as `AutoModelForCausalLM` or `LlamaForCausalLM`.
        src: path or URL of a checkpoint of any format and dialect, or an open checkpoint, such as one that is decoded.
        config: the model's config: a path, a mapping or an object with `to_dict()`; None means the checkpoint's. Pass
            it to `open` instead, if the checkpoint is already open.
        dtype: dtype of the model's parameters, to which stored values are cast; None means that of cast or decoded
            tensors of an open checkpoint, of the config, or of most stored tensors.
        tp_plan: tensor parallelism as transformers does it: `auto`, or pattern of a module -> style.
        device_mesh: mesh of one dim with all ranks, for `tp_plan`, which is `auto` if it is None.
        parallelize: function that divides the model before it has memory, such as calls of `fully_shard`.
        device: device of parameters that `parallelize` does not place; None means the current GPU, or the CPU.
        check_source: whether to compare what is read with the checkpoint's own hashes and checksums, as for `load`.
        attn_implementation: name of transformers' attention, such as `eager`; None means that of `config`, if it is an
            object, or transformers' choice.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: raised on every rank: if there is no config, if transformers cannot build the model from it, if
            tensors are quantized and not decoded, or if the checkpoint does not fill the model.
    """
    world = World()
    with world.together():
        source = src if isinstance(src, Checkpoint) else read_source("src", src)
        own_config, place = model_config(config), read_device("device", device)
        own_dtype = read_optional_dtype("dtype", dtype)
        attention = read_optional_text("attn_implementation", attn_implementation, "eager")
        attention = attention or getattr(config, "_attn_implementation", None)
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            raise wrong_type("device_mesh", "a DeviceMesh of one dim", device_mesh)
    with open_source(source, world, {"config": own_config}) as checkpoint:
        with world.together():
            settings = own_config if own_config is not None else checkpoint.config
            if not settings.get("model_type"):
                message = "the checkpoint has no config that names the type of the model"
                raise refuse("UNKNOWN_FAMILY", message, file=checkpoint.path, hint=_NO_CONFIG)
            if checkpoint.encoded:
                message = f"{len(checkpoint.encoded):,} of its tensors are quantized"
                raise refuse(
                    "UNSUPPORTED", message, file=checkpoint.path, hint='Decode them: tx.open(path, decode="bf16").'
                )
            generation = _read_generation(checkpoint, check_source=check_source)
            stored_dtype = own_dtype or _dtype_of(checkpoint, settings)
            model = _build(model_class, settings, stored_dtype, attention, checkpoint.path)
        if tp_plan is not None or device_mesh is not None:
            _apply_plan(model, tp_plan, device_mesh, world)
        model.tie_weights()
        if parallelize is not None:
            parallelize(model)
        fill = partial(load, device=place, dtype=OWN, check_source=check_source)
        _fill(model, _without_ahead(checkpoint, world), fill, world)
    if generation is not None and hasattr(model, "generation_config"):
        _set_generation(model, generation)
    return model.eval()


def _fill(model: Any, checkpoint: Checkpoint, fill: Callable[..., LoadReport], world: World) -> None:
    """Load a checkpoint into a model; all ranks must call this function.

    As with transformers, a base model may be loaded from a checkpoint with a head, which is left out with a warning in
    the log, and a model with a head from the checkpoint of a base model, if the head is tied.

    Args:
        model: the model, with its final sharding.
        checkpoint: the checkpoint under its stored names.
        fill: `load` with its options, without model, checkpoint and `strict`.
        world: all ranks.

    Raises:
        TransaxleError: raised on every rank, if a parameter gets no values, or a tensor that belongs to no head has no
            parameter.
    """
    try:
        fill(model, checkpoint)
        return
    except TransaxleError as error:
        first_error = gathered(_in_own_words(error.refusals))
    prefix, is_base = model.base_model_prefix, _is_base(model)
    whole, source = model, checkpoint
    if not (is_base and all(_is_of_head(refusal, model) for refusal in first_error.refusals)):
        whole, source = _in_whole_model(model), _with_prefix(checkpoint, model)
        if not _is_unlike(first_error) or (whole is model and source is checkpoint):
            raise first_error
    try:
        report = fill(whole, source, strict=False)
    except TransaxleError as error:
        lacking = [refusal.where for refusal in error.refusals if refusal.code == "MISSING_TENSOR"]
        lacks_only = len(lacking) == len(error.refusals)
        if error.code in _UNREAD or (_is_unlike(error) and first_error.code not in _UNREAD and not lacks_only):
            raise first_error from None
        hint = _OTHER_CLASS if source is checkpoint else _LOADED_BASE.format(prefix=prefix)
        raise gathered(
            replace(refusal, message=_NO_VALUES, hint=hint) if refusal.where in lacking else refusal
            for refusal in error.refusals
        ) from None
    unexpected = [
        Refusal("UNEXPECTED_TENSOR", _NO_PARAMETER, Where(None, name), _OTHER_CLASS) for name in report.unexpected
    ]
    problems = [Refusal("MISSING_TENSOR", _NO_VALUES, Where(None, name), _OTHER_CLASS) for name in report.missing]
    problems += [refusal for refusal in unexpected if not (is_base and _is_of_head(refusal, whole))]
    if problems:
        raise gathered(problems) if first_error.code in _UNREAD else first_error
    if unexpected and world.rank == world.ranks[0]:
        count, kind = plural(len(unexpected), "tensor"), type(model).__name__
        names = ", ".join(report.unexpected[:_SHOWN]) + (", …" if len(unexpected) > _SHOWN else "")
        _LOG.warning("%s of %s are left out, because %s has no such part: %s", count, checkpoint.path, kind, names)


def _is_of_head(refusal: Refusal, model: nn.Module) -> bool:
    """Return whether a load has only refused a tensor that lies in no module of the model, such as a head."""
    module = str(refusal.where.tensor).partition(".")[0]
    return refusal.code == "UNEXPECTED_TENSOR" and module not in dict(model.named_children())


def _is_unlike(error: TransaxleError) -> bool:
    """Return whether a load has only reported that names or tensors of model and checkpoint differ."""
    return _UNLIKE.issuperset(refusal.code for refusal in error.refusals)


def _is_base(model: Any) -> bool:
    """Return whether a model is a base model: it contains none, and has no head that predicts tokens."""
    contains_base = bool(model.base_model_prefix) and hasattr(model, model.base_model_prefix)
    return not contains_base and model.get_output_embeddings() is None


def _in_whole_model(model: Any) -> Any:
    """Return a module with a base model in the place that it has in models with a head; any other model as it is."""
    if not model.base_model_prefix or not _is_base(model):
        return model
    whole = nn.Module()
    whole.config = model.config
    whole.add_module(model.base_model_prefix, model)
    return whole


def _with_prefix(checkpoint: Checkpoint, model: Any) -> Checkpoint:
    """Return a checkpoint with the names that it has in a model with a head, if a base model was saved; any other
    checkpoint as it is.
    """
    prefix, container = f"{model.base_model_prefix}.", checkpoint.container
    names = getattr(model, model.base_model_prefix, model).state_dict().keys()
    stored = container.entries.keys()
    is_base = 2 * len(names & stored) > len(names) and not any(name.startswith(prefix) for name in stored)
    if not is_base or not model.base_model_prefix or container.recoding.computed or container.twins:
        return checkpoint
    entries = {prefix + name: structs.replace(entry, name=prefix + name) for name, entry in container.entries.items()}
    return Checkpoint(structs.replace(container, entries=entries), checkpoint.settings, None, None)


def _without_ahead(checkpoint: Checkpoint, world: World) -> Checkpoint:
    """Return a checkpoint without layers that predict further tokens; all ranks must call this function."""
    with world.together():
        names = names_ahead(checkpoint)
    if not names:
        return checkpoint
    if world.rank == world.ranks[0]:
        _LOG.warning("%s of %s predict further tokens, and are left out", plural(len(names), "tensor"), checkpoint.path)
    return without_tensors(checkpoint, names)


def _in_own_words(refusals: Iterable[Refusal]) -> Iterator[Refusal]:
    """Yield the refusals of a load, one for each tensor and code, with advice for `from_pretrained`."""
    first = {(refusal.code, refusal.where): refusal for refusal in reversed([*refusals])}
    for refusal in reversed(first.values()):
        yield replace(refusal, hint=_OTHER_CLASS if refusal.code in _UNLIKE else refusal.hint)


def _dtype_of(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of cast or decoded tensors, of the config, or of most stored tensors."""
    if checkpoint.container.recoding.dtype is not None:
        return torch_dtype(checkpoint.container.recoding.dtype)
    names = [name for name in checkpoint.decoded if name in checkpoint] or [*checkpoint]
    stated = settings.get("dtype") or settings.get("torch_dtype")
    if stated is not None and not checkpoint.decoded:
        try:
            return read_dtype("dtype", stated)
        except (TypeError, ValueError) as error:
            raise refuse("UNSUPPORTED", f"config.json: {error}", hint='Give dtype="bf16" or another.') from None
    elements: dict[str, int] = {}
    for tensor in map(checkpoint.__getitem__, names):
        if tensor.dtype in CASTS.values():
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.nbytes
    return torch_dtype(max(elements, key=lambda code: elements[code])) if elements else torch.float32


def _build(model_class: Any, settings: Mapping[str, Any], dtype: torch.dtype, attention: str | None, path: str) -> Any:
    """Return a model on the meta device, whose tied parameters are not tied yet.

    Args:
        model_class: class of models, or a class that chooses one, such as `AutoModelForCausalLM`.
        settings: the content of config.json.
        dtype: dtype of the parameters that have no dtype of their own.
        attention: name of transformers' attention; None means transformers' choice.
        path: path of the checkpoint, which the model gets as its name.

    Raises:
        TypeError: if the class does not belong to models of transformers.
        Refused: with the code UNSUPPORTED if transformers cannot build the model without code of the checkpoint.
    """
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.initialization import no_tie_weights

    chooses, is_class = hasattr(model_class, "from_config"), isinstance(model_class, type)
    if not is_class or not (chooses or hasattr(model_class, "_from_config")):
        raise wrong_type("model_class", "a class of models of transformers, such as AutoModelForCausalLM", model_class)
    kind = settings["model_type"]
    if kind not in CONFIG_MAPPING:
        message = f"transformers has no model type {kind!r}, and code of a checkpoint is not run"
        raise refuse("UNSUPPORTED", message, file=path, hint=_BUILD)
    try:
        with tempfile.TemporaryDirectory(prefix="transaxle-config-") as folder:
            Path(folder, CONFIG).write_text(json.dumps(without_quantization(settings)), "utf-8")
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.name_or_path = path
        own_config = getattr(model_class, "config_class", None)
        if own_config is not None and not isinstance(config, own_config):
            raise TypeError(f"the class is for {own_config.model_type}")
        build = partial(model_class.from_config, trust_remote_code=False) if chooses else model_class._from_config
        # A plan of tensor parallelism names the parameters as they are before the tie.
        with torch.device("meta"), no_tie_weights():
            model = build(config, dtype=dtype, **({} if attention is None else {"attn_implementation": attention}))
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        message = f"transformers builds no {model_class.__name__} from a config of {kind}: {reason}"
        raise refuse("UNSUPPORTED", message, file=path, hint=_BUILD) from error
    _keep_in_float32(model, dtype)
    return model


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Give tensors of a model on the meta device the dtype that transformers' own loading gives them."""
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    in_float32 = re.compile("|".join(patterns))
    for name, tensor in model.state_dict(keep_vars=True).items() if patterns else ():
        if tensor.is_floating_point() and in_float32.search(name):
            tensor.data = tensor.data.float()


def _apply_plan(model: Any, plan: Mapping[str, str] | str | None, mesh: DeviceMesh | None, world: World) -> None:
    """Divide a model by transformers' tensor parallelism.

    Raises:
        Refused: with the code UNSUPPORTED if the mesh is not one dim of all ranks.
    """
    from transformers.distributed import DistributedConfig

    if mesh is not None and (mesh.ndim != 1 or mesh.size() != world.size):
        message = f"transformers divides a model over all {world.size} ranks, and the mesh is {tuple(mesh.shape)}"
        hint = "Divide the model yourself: parallelize=lambda model: ..."
        raise refuse("UNSUPPORTED", message, hint=hint)
    stated = plan if plan is not None else "auto"
    config = DistributedConfig(tp_plan=stated if isinstance(stated, str) else dict(stated), tp_size=world.size)
    prepared, _, meshes = type(model).prepare_distribute_model(config)
    type(model).maybe_distribute_model(model, prepared, meshes)


def _read_generation(checkpoint: Checkpoint, *, check_source: bool) -> Mapping[str, Any] | None:
    """Return the content of a checkpoint's generation config; None if it has none.

    Raises:
        Refused: with code CORRUPT, if the file is damaged or no JSON object; an edited one is read, as `convert` copies
            it.
        StorageError: with code IO, if the file cannot be read.
    """
    container = checkpoint.container
    if GENERATION not in container.carried:
        return None
    if check_source:
        problems = problems_of(container.storage, copies_about_use=True, config_given=True, files=[GENERATION])
        if damaged := [*problems]:
            raise gathered(damaged)
    return read_stored_config(container.storage, GENERATION)


def _set_generation(model: Any, settings: Mapping[str, Any]) -> None:
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig.from_dict(dict(settings))


@suggests
def save_pretrained(
    model: nn.Module,
    dst: PathLike,
    *,
    to: str = "hf",
    tokenizer: Any = None,
    group: Ranks | None = None,
    overwrite: Overwrite = False,
    config: Config | None = None,
) -> SaveReport:
    """Save a model of transformers, divided in any way, as a complete folder for a hub; all ranks must call this.

    The folder appears as a whole: weights in the names of the hub, `config.json`, `generation_config.json`, and the
    files of the tokenizer.

    Args:
        model: a model of transformers.
        dst: target folder or URL.
        to: file format and dialect, as for `save`.
        tokenizer: tokenizer or processor of the model, which is saved too.
        group: the ranks that save together; None means all ranks.
        overwrite: whether to replace the checkpoint at `dst`, as for `save`.
        config: the config to write: a path, a mapping or an object with `to_dict()`; None means `model.config`.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: raised on every rank; the target is unchanged after an error, unless `verify` found the error.
    """
    target = read_path("dst", dst)
    read_text("to", to, "safetensors:hf")
    own_config, world, clock = model_config(config), World(group), Clock()
    inner = innermost(model)
    if not hasattr(getattr(inner, "config", None), "to_json_string"):
        raise wrong_type("model", "a model of transformers", model)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise wrong_type("tokenizer", "a tokenizer or processor of transformers", tokenizer)
    leads = world.rank == world.ranks[0]
    files, config_of_model = world.pool(lambda: _files_of(inner, tokenizer) if leads else ({}, {}))[0]
    written_config = own_config if own_config is not None else config_of_model
    settings_of = partial(read_settings, target, to, overwrite=overwrite, config=written_config)
    with clock.stage("plan"):
        settings, collected = collect(settings_of, model, None, None, world)
    return write_checkpoint(settings, replace(collected, files={**collected.files, **files}), world, clock)


def _files_of(model: Any, tokenizer: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return file name -> content, for the files beside config and weights, and the model's config."""
    with tempfile.TemporaryDirectory(prefix="transaxle-files-") as place:
        folder = Path(place)
        if model._auto_class is not None:
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(model, folder, config=model.config)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    return files, _config_of(model)


def _config_of(model: Any) -> dict[str, Any]:
    """Return the config as transformers saves it, with the class of the model and its dtype."""
    classes = (kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    config: dict[str, Any] = parse_json(model.config.to_json_string(use_diff=True))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {**config, "architectures": [next(classes).__name__], "dtype": dtype}
