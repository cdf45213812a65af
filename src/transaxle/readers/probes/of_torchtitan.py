"""Runs torchtitan's state-dict adapter on hub files without data, or compares its own names with those of a DCP folder.

torchtitan asks the files for what `to_hf` of its adapter makes of the model's state dict, stops if one of these tensors
is absent or has another shape, and never looks at the others. What `from_hf` then makes of them goes into the model;
parameters that it does not make stay as they were, without a word.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
from pathlib import Path
from typing import Any

from adapted import compare_files, compare_states
from headers import Headers, run
from titan_models import FAMILIES, adapter_of, build


def trace(request: dict[str, Any], headers: Headers, result: dict[str, Any]) -> None:
    """Compare the checkpoint with torchtitan's model of its config."""
    logging.disable(logging.WARNING)
    result["version"] = importlib.metadata.version("torchtitan")
    config = json.loads(Path(request["folder"], "config.json").read_text("utf-8"))
    kind = config.get("model_type")
    if kind not in FAMILIES:
        result["unsupported"] = (
            f"torchtitan has no way from a config.json to a model; this check builds {', '.join(FAMILIES)}, but not "
            f"{kind!r}"
        )
        return
    try:
        model = build(config)
    except KeyError as error:
        result["unsupported"] = f"the config has no {error.args[0]}, which the sizes of torchtitan's model follow from"
        return
    result["class"] = type(model).__name__
    result["stops"] = True
    files = {name: headers.take(tensors, name) for tensors in request["files"].values() for name in tensors}
    if request["format"] == "dcp":
        compare_states(model.state_dict(), files, result)
        return
    adapter = adapter_of(config, request["folder"])
    tied = bool(config.get("tie_word_embeddings"))
    if config.get("quantization_config"):
        files = _decoded(adapter, files, result)
    compare_files(model, adapter, files, tied, result)


def _decoded(adapter: Any, files: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors as torchtitan's reader of quantized files gives them, where it has one for this model."""
    from torchtitan.protocols.state_dict_adapter import StateDictAdapter

    if type(adapter).get_hf_storage_reader is StateDictAdapter.get_hf_storage_reader:
        effect = "torchtitan has no reader of quantized files for this model: it takes codes for values"
        codes = sorted(name for name, tensor in files.items() if tensor.element_size() == 1)
        result["findings"] = [{"kind": "values", "wrong": True, "effect": effect, "names": codes, "remedy": ""}]
        return files
    effect = "torchtitan decodes the files if checkpoint.initial_load_in_hf_quantized is set"
    result["findings"] = [{"kind": "note", "wrong": False, "effect": effect, "names": [], "remedy": ""}]
    decoded = {}
    for name, tensor in files.items():
        if name.endswith("_blocks"):  # codes of MXFP4: two in a byte, in groups of 16 bytes
            tensor = tensor.new_empty((*tensor.shape[:-2], tensor.shape[-2] * tensor.shape[-1] * 2))
        if not name.endswith(("_scale_inv", "_scales")):
            decoded[name] = tensor
    return decoded


if __name__ == "__main__":
    run(trace)
