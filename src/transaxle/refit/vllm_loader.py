"""Loads any checkpoint into the model of a vLLM worker, for `vllm serve --load-format transaxle`.

Each worker reads only the regions of tensors that its own parameters need (see `refit.vllm_worker`), straight into the
parameters, before vLLM repacks them. All workers load together: if one refuses, all raise its refusal, before any
parameter changes. Every parameter must be filled, and every tensor of the checkpoint must have a parameter, except
layers that predict further tokens, which vLLM loads as a model of their own.

If it is unknown which region a parameter needs (quantized weights, models without a table, parameters that move between
ranks), each worker reads whole tensors under the hub's names, and vLLM's own `load_weights` takes what it needs. A
warning in the log says so, and why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from transaxle.arguments import read_flag, read_options, read_patterns, read_source
from transaxle.axes.notation.family import Sizes
from transaxle.encodings.encoding import CASTS, PLAIN
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.engine.checkpoint.recognise import IDENTITY
from transaxle.engine.plan.rank_parts import size_for_ranks
from transaxle.engine.plan.training_beside import without_training
from transaxle.engine.views.encode import select_names
from transaxle.engine.wording import plural
from transaxle.errors import Code, Refusal, TransaxleError, gathered
from transaxle.live.load import load
from transaxle.live.model.destination import LoadReport
from transaxle.live.model.source_view import names_ahead, without_tensors
from transaxle.live.source_check import SourceCheck
from transaxle.live.transport.world import World
from transaxle.options import OPENING, OPTIONS
from transaxle.refit.vllm_worker import DIALECT, Ranks, WorkerParameters, find_moving_option, ranks_of
from transaxle.torch_tensors import code_of, mark, torch_dtype

FORMAT = "transaxle"
"""Name of the load format: `vllm serve --load-format transaxle`."""
_EXTRA = "--model-loader-extra-config"
_PATH, _IGNORE, _CHECK = "path", "ignore", "check_source"
_OPENING = tuple(name for name in OPENING if name not in {"optimizer", "dtype"})
KEYS = (_PATH, _IGNORE, _CHECK, *_OPENING)
"""Keys of `--model-loader-extra-config`: the path of the checkpoint, patterns of tensors that are not read, whether to
check what is read, and arguments of `transaxle.open`.
"""
_HUB = "hf"
_SERVED = "_transaxle_served"
"""Attribute of vLLM's model: the model that vLLM serves, which `reload_weights` replaces in vLLM's config."""
_LOG = logging.getLogger("vllm.transaxle")
"""A logger below vLLM's, so that vLLM's settings show its messages."""
_SOURCE = f'Name the checkpoint: {_EXTRA} \'{{"path": "PATH"}}\'.'
_SAME_CONFIG = "Serve the folder with the config.json of this checkpoint: vllm serve FOLDER."
_HINTS: Mapping[Code, str] = {
    "MISSING_TENSOR": f'Take it from a checkpoint that has it: {_EXTRA} \'{{"graft": "PATH"}}\'.',
    "UNEXPECTED_TENSOR": f'If vLLM does not need it: {_EXTRA} \'{{"ignore": ["PATTERN"]}}\'.',
    "SHAPE_MISMATCH": _SAME_CONFIG,
    "DTYPE_MISMATCH": f'If the checkpoint is quantized: {_EXTRA} \'{{"decode": "bf16"}}\'.',
    "CORRUPT": f"Restore the files. If the change is intended: {_EXTRA} '{{\"check_source\": false}}'.",
}
"""Code of a refusal of `load` -> advice in the words of vLLM's command line."""


@dataclass(frozen=True)
class LoaderOptions:
    """The content of `--model-loader-extra-config`."""

    path: str | None
    """Path or URL of the checkpoint; None means the folder that vLLM serves."""
    ignore: tuple[str, ...]
    """Patterns of the names of stored tensors that are not read."""
    check_source: bool
    """Whether to compare what is read with the checkpoint's own hashes and checksums."""
    opening: Mapping[str, Any]
    """Arguments of `transaxle.open` that differ from their defaults."""


def read_loader_options(extra: object) -> LoaderOptions:
    """Check the content of `--model-loader-extra-config`.

    Raises:
        TypeError: if a value has a wrong type, or options exclude each other.
        UsageError: with code AMBIGUOUS, if a key is unknown.
    """
    if not isinstance(extra, Mapping):
        raise TypeError(f"{_EXTRA} must be a JSON object; got {type(extra).__name__}")
    problems = []
    for key in extra:
        if key not in KEYS:
            close = "dialect" if key == "from" else next(iter(get_close_matches(str(key), KEYS, 1)), None)
            hint = f"Did you mean {close!r}?" if close else f"Keys are {', '.join(KEYS)}."
            problems.append(Refusal("AMBIGUOUS", f"{_EXTRA} has an unknown key {key!r}", hint=hint))
    if problems:
        raise gathered(problems)
    values = {name: extra.get(name, option.default) for name, option in OPTIONS.items() if name in OPENING}
    path = extra.get(_PATH)
    return LoaderOptions(
        None if path is None else read_source(_PATH, path),
        read_patterns(_IGNORE, extra.get(_IGNORE, ())),
        read_flag(_CHECK, extra.get(_CHECK, True)),
        read_options("open", values),
    )


def load_weights(model: nn.Module, model_config: Any, options: LoaderOptions) -> LoadReport | None:
    """Fill the parameters of a worker's model, before vLLM repacks them; all workers must call this function.

    Args:
        model: vLLM's model on this worker.
        model_config: vLLM's `ModelConfig` of this model, which may be a draft model.
        options: content of `--model-loader-extra-config`.

    Returns:
        what this worker has read; None if vLLM's own `load_weights` has filled the parameters.

    Raises:
        TransaxleError: raised on every worker, with every problem of every worker.
        ValueError: raised by vLLM, if its own `load_weights` does not accept the tensors, or leaves a parameter.
    """
    from vllm.config import get_current_vllm_config
    from vllm.distributed.parallel_state import get_world_group

    vllm_config = get_current_vllm_config()
    if model_config is not vllm_config.model_config:
        with _open(options, model_config, vllm_config.model_config.model) as checkpoint:
            _load_whole_tensors(model, checkpoint, options, "it is a draft model")
        return None
    setattr(model, _SERVED, model_config.model)
    world = World(get_world_group().cpu_group)
    config = dict(model_config.hf_config.to_dict())
    ranks = ranks_of(vllm_config.parallel_config)
    with world.together():
        worker, reason = _describe(model, config, ranks, vllm_config)
    reasons = [text for text in world.gather(reason) if text]
    with world.together():
        checkpoint = _open(options, model_config, model_config.model)
    with checkpoint:
        if worker is None or reasons:
            with world.together():
                _load_whole_tensors(model, checkpoint, options, reasons[0])
            return None
        with world.together():
            source = _for_worker(checkpoint, worker, config, ranks)
        report = _fill(worker, source, code_of(model_config.dtype), world, check_source=options.check_source)
    _LOG.info("%s", report)
    return report


def _describe(
    model: nn.Module, config: Mapping[str, Any], ranks: Ranks, vllm_config: Any
) -> tuple[WorkerParameters | None, str]:
    """Return which regions of the checkpoint the worker's parameters are, or else the reason why this is unknown."""
    if vllm_config.quant_config is not None:
        return None, f"vLLM quantizes weights ({vllm_config.quant_config.get_name()})"
    if feature := find_moving_option(vllm_config):
        return None, f"this vLLM has {feature}"
    try:
        worker = WorkerParameters(model, config, ranks)
    except TransaxleError as error:
        return None, error.refusals[0].message.splitlines()[0]
    if worker.problems:
        first = worker.problems[0]
        return None, f"{first.where.tensor}: {first.message}"
    return worker, ""


def _open(options: LoaderOptions, model_config: Any, served: str) -> Checkpoint:
    """Open the checkpoint of a model without its training state.

    Args:
        options: content of `--model-loader-extra-config`.
        model_config: vLLM's `ModelConfig`, whose config is used if the checkpoint has none.
        served: the model that vLLM serves; a model from another folder, such as a draft model, is read from that
            folder, without these options.

    Raises:
        TransaxleError: if the checkpoint cannot be opened.
    """
    is_other = model_config.model != served
    path, opening = (model_config.model, {}) if is_other else (options.path or model_config.model, options.opening)
    try:
        checkpoint = open_checkpoint(path, optimizer=False, **opening)
        if not checkpoint.config:
            checkpoint.close()
            config = dict(model_config.hf_config.to_dict())
            checkpoint = open_checkpoint(path, optimizer=False, **opening, config=config)
    except TransaxleError as error:
        if options.path is not None or is_other:
            raise
        raise gathered(
            replace(refusal, hint=f"{refusal.hint} {_SOURCE}".strip()) for refusal in error.refusals
        ) from None
    model = without_training(checkpoint)
    if is_other or not options.ignore:
        return model
    ignored = frozenset(select_names(model, options.ignore, (), "tensor"))
    return without_tensors(model, ignored)


def _for_worker(
    checkpoint: Checkpoint, worker: WorkerParameters, config: Mapping[str, Any], ranks: Ranks
) -> Checkpoint:
    """Return the checkpoint without layers that predict further tokens, and with axis sizes for vLLM's ranks.

    Raises:
        Refused: with code SHAPE_MISMATCH, if sizes differ between the checkpoint's config and vLLM's.
        UsageError: with code UNKNOWN_FAMILY or AMBIGUOUS, if no table reads the checkpoint's names.
    """
    family = checkpoint.reading.family
    if family.name == worker.family:
        stored_sizes, sizes = checkpoint.sizes.at({}), Sizes(family, config).at({})
        problems = [
            Refusal("SHAPE_MISMATCH", f"the axis {axis} has the size {sizes[axis]} in vLLM's config, but {count} in "
                    f"{checkpoint.path}", hint=_SAME_CONFIG)
            for axis, count in stored_sizes.items()
            if sizes.get(axis, count) != count
        ]  # fmt: skip
        if problems:
            raise gathered(problems)
    if ahead := names_ahead(checkpoint):
        _LOG.info("%s predict further tokens, and are not read: vLLM does so too", plural(len(ahead), "tensor"))
        checkpoint = without_tensors(checkpoint, ahead)
    return size_for_ranks(checkpoint, tp=ranks.tp, ep=ranks.ep)


def _fill(worker: WorkerParameters, source: Checkpoint, code: str, world: World, *, check_source: bool) -> LoadReport:
    """Read a worker's regions of the source into its parameters.

    vLLM casts what it loads to the dtype of the parameter, and so does this function. Parameters of another dtype than
    the model's are read with the stored dtype first, because `load` casts to one dtype only.

    Args:
        worker: description of the parameters.
        source: the checkpoint to read.
        code: safetensors code of the model's dtype.
        world: all workers.
        check_source: whether to compare what is read with the source's own hashes and checksums.

    Raises:
        TransaxleError: raised on every worker, with every problem of every worker.
    """
    targets, casts = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    with world.together():
        dtypes = _source_dtypes(source)
        for name, part in worker.parts.items():
            live = worker.slots[name].live
            assert live is not None  # vLLM has not repacked anything yet
            target = live.detach()
            stored = dtypes.get(name)
            if stored and stored != code_of(target.dtype) and stored in PLAIN and code != code_of(target.dtype):
                casts[name] = target
                target = torch.empty_like(target, dtype=torch_dtype(stored))
            targets[name] = mark(target, part)
    dtype = next((key for key, cast in CASTS.items() if cast == code), None)
    with _hints_for_vllm():
        report = load(targets, source, dialect=DIALECT, dtype=dtype, group=world.group, check_source=check_source)
    for name, target in casts.items():
        target.copy_(targets[name])
    return report


def _source_dtypes(source: Checkpoint) -> Mapping[str, str]:
    """Return name in the dialect of vLLM -> dtype; empty if the translation fails, which `load` then refuses."""
    try:
        view = source.view_as(DIALECT)
    except TransaxleError:
        return {}
    return {name: view[name].dtype for name in view}


def _load_whole_tensors(model: Any, checkpoint: Checkpoint, options: LoaderOptions, reason: str) -> None:
    """Let vLLM's own `load_weights` take what it needs from whole tensors under the hub's names.

    Raises:
        TransaxleError: if the checkpoint cannot be translated into the hub's names, or if what was read is damaged.
        ValueError: if a parameter is not loaded.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    _LOG.warning("each worker reads whole tensors of %s, because %s", checkpoint.path, reason)
    with _check_whole_tensors(checkpoint, options):
        loaded = model.load_weights(_hub_tensors(checkpoint, getattr(model, "is_unused_checkpoint_weight", None)))
    if loaded is not None:
        # A check of vLLM that exempts all parameters of layers with kernels, unless `quantized` is true.
        DefaultModelLoader.track_weights_loading(None, model, loaded, quantized=True)


@contextmanager
def _hints_for_vllm() -> Iterator[None]:
    """Give refusals of the block the advice in `_HINTS`."""
    try:
        yield
    except TransaxleError as error:
        raise gathered(
            replace(refusal, hint=_HINTS.get(refusal.code, refusal.hint)) for refusal in error.refusals
        ) from None


@contextmanager
def _check_whole_tensors(checkpoint: Checkpoint, options: LoaderOptions) -> Iterator[None]:
    """Compare what the block reads with the checkpoint's own hashes, unless `options` says not to.

    Raises:
        TransaxleError: before the block or after it, if bytes do not match.
    """
    with _hints_for_vllm():
        check = SourceCheck(checkpoint, World.alone(), is_enabled=options.check_source)
    yield
    with _hints_for_vllm():
        check.finish()


def _hub_tensors(checkpoint: Checkpoint, is_unused: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) under the hub's names, each read when it is asked for."""
    hub = checkpoint if checkpoint.dialect in {None, IDENTITY, _HUB} else checkpoint.as_dialect(_HUB)
    for name in hub:  # in the order of the files, because some models of vLLM keep the last of several copies
        if is_unused is None or not is_unused(name):
            yield name, hub[name].torch()


def reload_tensors(model: Any, model_config: Any, options: LoaderOptions) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors for vLLM's `reload_weights`, which may name another checkpoint: whole tensors under the hub's
    names.

    Args:
        model: vLLM's model on this worker.
        model_config: vLLM's `ModelConfig`, whose `model` is the checkpoint that the caller names.
        options: content of `--model-loader-extra-config`.
    """
    served = getattr(model, _SERVED, model_config.model)
    with _open(options, model_config, served) as checkpoint, _check_whole_tensors(checkpoint, options):
        yield from _hub_tensors(checkpoint, getattr(model, "is_unused_checkpoint_weight", None))
