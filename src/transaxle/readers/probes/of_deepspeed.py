"""Lets DeepSpeed load the names and shapes of a run's folder into transformers' model of its config.

DeepSpeed loads into the model of a job. Of a ZeRO folder its engine gives the state of the module to `load_state_dict`,
strictly. Of a universal folder it opens the folder of each trained parameter by its name: it never looks at other
folders, and restores no buffers.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import warnings
from types import SimpleNamespace
from typing import Any

from adapted import compare_states
from headers import Headers, explain, run
from of_transformers import model_class_of

_UNIVERSAL = "deepspeed-universal"


def trace(request: dict[str, Any], headers: Headers, result: dict[str, Any]) -> None:
    """Compare the checkpoint with transformers' model, as DeepSpeed loads it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import torch
    import transformers
    from deepspeed.runtime.engine import DeepSpeedEngine

    result["version"] = importlib.metadata.version("deepspeed")
    try:
        config = transformers.AutoConfig.from_pretrained(request["folder"])
        with torch.device("meta"):
            model = model_class_of(transformers, request["folder"])(config)
    except Exception as error:  # noqa: BLE001 - models that this transformers lacks
        result["untraced"] = f"transformers cannot build the model: {explain(error)}"
        return
    files = {name: headers.take(tensors, name) for tensors in headers.files.values() for name in tensors}
    is_universal = request["format"] == _UNIVERSAL
    expected = dict(model.named_parameters()) if is_universal else model.state_dict()
    if not expected.keys() & files.keys():
        result["untraced"] = "its names are not those of transformers' model, so that the job has another one"
        return
    result |= {"class": type(model).__name__, "stops": True}
    ties = _ties(model)
    _fill_ties(ties, files)
    if is_universal:
        buffers = sorted(files.keys() & dict(model.named_buffers()).keys())
        aliases = {name for group in ties for name in group}
        compare_states(expected, {name: value for name, value in files.items() if name not in buffers}, result)
        result["unexpected"] = sorted(set(result["unexpected"]) - aliases)
        if buffers:
            effect = "DeepSpeed restores no buffers from a universal folder: those of the job's model stay"
            result["findings"] = [
                {"kind": "note", "wrong": False, "effect": effect, "names": buffers, "remedy": ""}
            ]  # fmt: skip
        return
    compare_states(expected, files, result)
    try:
        DeepSpeedEngine.load_module_state_dict(SimpleNamespace(module=model), {"module": files})
    except RuntimeError as error:
        if not (result["missing"] or result["unexpected"] or result["mismatched"]):
            result["error"] = explain(error)


def _ties(model: Any) -> list[set[str]]:
    """Return the groups of names that a parameter has."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [group for group in names.values() if len(group) > 1]


def _fill_ties(ties: list[set[str]], files: dict[str, Any]) -> None:
    """Give tensors all names that they have in the model: a module's state has them, whatever is listed."""
    for group in ties:
        if stored := sorted(group & files.keys()):
            files.update(dict.fromkeys(group - files.keys(), files[stored[0]]))


if __name__ == "__main__":
    run(trace)
