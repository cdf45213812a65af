"""Runs `from_pretrained` of the installed transformers on a checkpoint without data."""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from compared import compare
from headers import Headers, explain, run

_REGISTERS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES", "MODEL_MAPPING_NAMES",
)  # fmt: skip
"""transformers' registers of model classes, best first, for a config without `architectures`."""


def trace(request: dict[str, Any], headers: Headers, result: dict[str, Any]) -> None:
    """Load the checkpoint; then load the small ones, and compare their models."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # threads only take turns on the meta device
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    result["version"] = importlib.metadata.version("transformers")
    model_class = model_class_of(transformers, request["folder"])
    result["class"] = model_class.__name__
    raw = _watch()
    try:
        with _as_on_a_gpu():
            model = _load(model_class, request["folder"], raw, device_map="meta")
        result["config"] = model.config.to_dict()
        result["defaults"] = type(model.config)().to_dict()
        _forgive(model, raw, result)
    finally:
        result.update({name: raw.get(name, []) for name in ("missing", "unexpected", "mismatched", "failed")})
    result["twice"] = sorted(name for name, count in headers.taken.items() if count > 1)
    if request.get("twins"):
        _compare_twins(request["twins"], model_class, raw, result)


def model_class_of(transformers: Any, folder: str) -> Any:
    """Return the class named in `architectures`, or else the class registered for the model type."""
    from transformers.models.auto import modeling_auto

    config = transformers.AutoConfig.from_pretrained(folder)
    names = list(getattr(config, "architectures", None) or ())
    for register in _REGISTERS:
        entry = getattr(modeling_auto, register, {}).get(config.model_type) or ()
        names += [entry] if isinstance(entry, str) else list(entry)
    for name in names:
        candidate = getattr(transformers, name, None)
        if hasattr(candidate, "from_pretrained"):
            return candidate
    raise ValueError(f"transformers has no model class for {config.model_type!r} (architectures {names[:1]})")


def _load(model_class: Any, folder: str, raw: dict[str, Any], **options: Any) -> Any:
    """Return the model; `raw` gets what the reader reports."""
    raw.clear()
    model, info = model_class.from_pretrained(
        folder, output_loading_info=True, ignore_mismatched_sizes=True, local_files_only=True, **options
    )
    if not raw:
        raw.update(_plain(info.get))
    raw["reported"] = _plain(info.get)
    return model


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Let transformers build layers with FP8 codes, as it does where a GPU has kernels for them.

    Elsewhere it decodes every tensor that has a scale, whatever the config's list of plain modules says.
    """
    try:
        from transformers.quantizers import quantizer_finegrained_fp8
    except ImportError:  # in an older version
        yield
        return
    quantizer = quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer
    with patch.object(quantizer, "validate_environment", lambda *_, **__: None):
        yield


def _plain(get: Callable[[str], Any]) -> dict[str, Any]:
    """Return the entries of transformers' loading information as lists of text."""
    names = {"missing": "missing_keys", "unexpected": "unexpected_keys"}
    plain: dict[str, Any] = {key: sorted(map(str, get(name) or ())) for key, name in names.items()}
    triples = [each if isinstance(each, (tuple, list)) else (each, (), ()) for each in get("mismatched_keys") or ()]
    plain["mismatched"] = sorted([str(name), list(file), list(model)] for name, file, model in triples)
    failures = dict(get("conversion_errors") or {})
    plain["failed"] = sorted([str(name), _last_line(why)] for name, why in failures.items())
    return plain


def _last_line(traceback: object) -> str:
    """Return the message at the end of a traceback that transformers stores as text."""
    lines = [line for line in str(traceback).splitlines() if line and not line.startswith((" ", "Traceback"))]
    return (lines or [str(traceback)])[0][:500]


def _watch() -> dict[str, Any]:
    """Return a dict that gets what transformers 5 reports of a load before it removes what its classes ignore."""
    from transformers import modeling_utils

    raw: dict[str, Any] = {}
    load = getattr(modeling_utils, "convert_and_load_state_dict_in_model", None)
    if load is not None:

        def watched(*arguments: Any, **options: Any) -> Any:
            answer = load(*arguments, **options)
            raw.update(_plain(lambda name: getattr(answer[0], name, None)))
            return answer

        modeling_utils.convert_and_load_state_dict_in_model = watched
    return raw


def _forgive(model: Any, raw: dict[str, Any], result: dict[str, Any]) -> None:
    """Move what transformers leaves out of its report on purpose from `missing` and `unexpected` to `ignored` and
    `derived`: tied heads and buffers that it computes, and parts that it has no use for.
    """
    reported = raw.pop("reported", raw)
    result["derived"] = sorted(set(raw["missing"]) - set(reported["missing"]))
    result["ignored"] = sorted(set(raw["unexpected"]) - set(reported["unexpected"]))
    raw["missing"], raw["unexpected"] = reported["missing"], reported["unexpected"]
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    result["ignores"] = sorted(map(str, patterns))


def _compare_twins(twins: list[tuple[str, str]], model_class: Any, raw: dict[str, Any], result: dict[str, Any]) -> None:
    """Load the first pair of small checkpoints whose plain one is complete, and compare the two models.

    In float32 rounding does not hide differences; some layers with codes compute in bfloat16 only.
    """
    import torch

    for plain_folder, stored_folder in twins:
        for dtype in (torch.float32, torch.bfloat16):
            try:
                plain = _load(model_class, plain_folder, raw, dtype=dtype)
            except Exception as error:  # noqa: BLE001 - the next pair has other sizes
                result["values"] = {"error": explain(error), "plain": True}
                break
            if raw["missing"] or raw["unexpected"] or raw["mismatched"]:
                result["values"] = {"error": "the small plain checkpoint is incomplete", "plain": True}
                break
            try:
                stored = _load(model_class, stored_folder, raw, dtype=dtype)
            except Exception as error:  # noqa: BLE001 - the reader's answer
                result["values"] = {"error": explain(error), "plain": False}
                return
            result["values"] = compare(plain, stored)
            if not isinstance(result["values"]["outputs"], str) or result["values"]["outputs"] == "equal":
                return
        else:
            return


if __name__ == "__main__":
    run(trace)
