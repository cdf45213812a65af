"""Runs the two loading paths of compressed-tensors on a checkpoint without data, and decodes a small one with data.

`ModelCompressor` gives a model the parameters that a quantization config asks for, as `from_pretrained` of transformers
lets it do; the files must have just these. `convert_checkpoint` decodes files by their names alone, with
`CompressedTensorsDequantizer`; it answers for tensors of which transformers' model has no module, such as numbered
experts that transformers stacks.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import tempfile
import warnings
from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from typing import Any

from compared import compare_values
from headers import Headers, explain, run
from of_transformers import model_class_of

_METHOD = "compressed-tensors"
_CODES = "weight_packed"
_SIZED = (f".{_CODES}", ".weight", ".bias")
"""Ends of the names of tensors whose shapes follow from the sizes in the config alone."""
Modules = dict[str, dict[str, Any]]
"""Name of a module -> name of a tensor in it -> tensor on the meta device."""


def trace(request: dict[str, Any], headers: Headers, result: dict[str, Any]) -> None:
    """Compare the checkpoint with what both paths ask for; then decode the small one, and compare its values."""
    os.environ["TQDM_DISABLE"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    result["version"] = importlib.metadata.version(_METHOD)
    method = _method(request["folder"])
    if method != _METHOD:
        result["unsupported"] = (
            f"compressed-tensors reads files whose quantization_config has its quant_method, and this config has "
            f"{method or 'none'}"
        )
        return
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer

    headers.write()
    converter = CompressedTensorsDequantizer(request["folder"])
    modules = _modules(headers)
    result |= {"findings": [], "missing": [], "unexpected": [], "mismatched": [], "failed": []}
    model = _build(request["folder"], result)
    reported = set() if model is None else _compare_model(model, modules, result)
    known = set() if model is None else {name for name, _ in model.named_modules()}
    _decode_names(converter, {name: modules[name] for name in modules.keys() - reported}, known, result)
    if request.get("twins"):
        _compare_twins(request["twins"], result)


def _method(folder: str) -> str | None:
    config = json.loads(Path(folder, "config.json").read_text("utf-8"))
    settings = config.get("quantization_config") or {}
    method: str | None = settings.get("quant_method")
    return method


def _modules(headers: Headers) -> Modules:
    modules: Modules = defaultdict(dict)
    for tensors in headers.files.values():
        for name in tensors:
            module, _, last = name.rpartition(".")
            modules[module][last] = headers.take(tensors, name)
    return dict(modules)


def _build(folder: str, result: dict[str, Any]) -> Any:
    """Return transformers' model on the meta device, as compressed-tensors prepares it; None if it cannot be built."""
    import torch
    import transformers
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import apply_quantization_config
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        model_class = model_class_of(transformers, folder)
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:  # noqa: BLE001 - models that this transformers lacks; the names alone are decoded
        effect = f"transformers cannot build the model, so that only convert_checkpoint was run: {explain(error)}"
        result["findings"].append(_finding(effect))
        return None
    settings = AutoQuantizationConfig.from_dict(deepcopy(config.quantization_config))
    compressor = ModelCompressor.from_compression_config(settings)
    apply_quantization_config(model, deepcopy(compressor.quantization_config), show_progress=False)
    if settings.is_quantization_compressed:
        compressor.compress_model(model)
    return model


def _compare_model(model: Any, modules: Modules, result: dict[str, Any]) -> set[str]:
    """Compare the tensors of each module with its parameters.

    Returns:
        The names of the modules that differ.
    """
    from torch import nn

    selected: list[str] = []
    left: list[str] = []
    unlike: list[list[Any]] = []
    reported = set()
    for name, module in model.named_modules():
        if name not in modules or not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        parameters, tensors = module.state_dict(), modules[name]
        is_quantized = hasattr(module, "quantization_scheme")
        shapes: list[list[Any]] = [
            [f"{name}.{last}", list(tensors[last].shape), list(value.shape)]
            for last, value in parameters.items()
            if last in tensors and tensors[last].shape != value.shape
        ]
        if parameters.keys() == tensors.keys() and not shapes and is_quantized == _has_codes(tensors):
            continue
        reported.add(name)
        if is_quantized and not _has_codes(tensors):
            selected.append(f"{name}.weight")
        elif not is_quantized and _has_codes(tensors):
            left += [f"{name}.{last}" for last in tensors]
        else:
            result["missing"] += [f"{name}.{last}" for last in parameters.keys() - tensors.keys()]
            result["unexpected"] += [f"{name}.{last}" for last in tensors.keys() - parameters.keys()]
            result["mismatched"] += [each for each in shapes if each[0].endswith(_SIZED)]
            unlike += [each for each in shapes if not each[0].endswith(_SIZED)]
    if unlike:
        name, stored, made = unlike[0]
        effect = (
            f"ModelCompressor makes buffers of other shapes: {name} is {stored} in the files, and {made} in the model"
        )
        result["findings"].append(_finding(effect, "shape", [name for name, *_ in unlike]))
    if selected:
        effect = "quantization_config selects modules that are plain in the files: they get no codes and scales"
        remedy = "Add these modules to ignore in quantization_config."
        result["findings"].append(_finding(effect, "config", selected, remedy))
    if left:
        effect = (
            "quantization_config selects no scheme for modules that are encoded in the files: codes are not decoded"
        )
        remedy = "Remove these modules from ignore in quantization_config, or name them in targets."
        result["findings"].append(_finding(effect, "config", left, remedy))
    return reported


def _decode_names(converter: Any, modules: Modules, known: set[str], result: dict[str, Any]) -> None:
    """Let the converter decode each module by the names of its tensors.

    Args:
        converter: the dequantizer of `convert_checkpoint`.
        modules: the modules on which `ModelCompressor` has no finding.
        known: names of the modules of transformers' model, for which `ModelCompressor` decides.
        result: gets `failed` and `findings`.
    """
    stops: dict[str, list[str]] = defaultdict(list)
    encoded = []
    for module, tensors in modules.items():
        names = {f"{module}.{last}": tensor for last, tensor in tensors.items()}
        try:
            decoded = converter.validate(dict(names)) or {}
        except Exception as error:  # noqa: BLE001 - the reader's answer
            why = str(error).replace(f"{module}.", "").strip()
            if module in known or _is_other(module, tensors):
                stops[why] += names
            else:
                result["failed"] += [[name, why] for name in names]
            continue
        encoded += [name for name, tensor in decoded.items() if _is_code(name.rpartition(".")[2], tensor)]
    if encoded:
        effect = "convert_checkpoint takes codes of modules that quantization_config does not select for plain tensors"
        remedy = "Remove these modules from ignore in quantization_config, or name them in targets."
        result["findings"].append(_finding(effect, "config", sorted(encoded), remedy))
    for why, plain in stops.items():
        result["findings"].append(_finding(f"convert_checkpoint stops at plain tensors: {why}", "note", plain))


def _has_codes(tensors: dict[str, Any]) -> bool:
    return any(_is_code(last, tensor) for last, tensor in tensors.items())


def _is_code(last: str, tensor: Any) -> bool:
    """Return whether a tensor with this last segment of its name has codes of a weight."""
    return last == _CODES or (last == "weight" and tensor.element_size() == 1)


def _is_other(module: str, tensors: dict[str, Any]) -> bool:
    """Return whether a module that transformers does not know is plain and no linear layer."""
    weight = tensors.get("weight")
    is_embedding = "embed" in module.rpartition(".")[2]
    return not _has_codes(tensors) and (weight is None or weight.dim() != 2 or is_embedding)


def _finding(effect: str, kind: str = "note", names: Any = (), remedy: str = "") -> dict[str, Any]:
    return {"kind": kind, "wrong": kind != "note", "effect": effect, "names": sorted(names), "remedy": remedy}


def _compare_twins(twins: list[tuple[str, str]], result: dict[str, Any]) -> None:
    """Decode the small checkpoint with `convert_checkpoint`, told which modules are plain, and compare its tensors."""
    import torch
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer, convert_checkpoint

    plain_folder, stored_folder = twins[0]
    plain, stored = _tensors(plain_folder), _tensors(stored_folder)
    encoded = {name.rpartition(".")[0] for name, tensor in stored.items() if _is_code(name.rpartition(".")[2], tensor)}
    ignored = sorted({name.rpartition(".")[0] for name in stored} - encoded)
    try:
        converter = CompressedTensorsDequantizer(stored_folder, ignored, torch.float32)
        with tempfile.TemporaryDirectory() as target:
            convert_checkpoint(stored_folder, target, converter, max_workers=1)
            decoded = _tensors(target)
    except Exception as error:  # noqa: BLE001 - the reader's answer
        result["values"] = {"error": explain(error), "plain": False}
        return
    values = compare_values({name: tensor.float() for name, tensor in plain.items()}, decoded)
    if not values["compared"]:
        values = {"error": "it gives the small checkpoint names of another dialect", "plain": True}
    result["values"] = values


def _tensors(folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: value for file in Path(folder).glob("*.safetensors") for name, value in load_file(file).items()}


if __name__ == "__main__":
    run(trace)
