"""Runs `PeftModel.from_pretrained` of the installed peft on an adapter without data and a base model without data.

peft warns of adapter tensors that the files lack, and says nothing of tensors for which the model has no place: both
are in its results, which this program keeps. The files should have what peft itself would save of the loaded model.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headers import Headers, run
from of_transformers import model_class_of

_ADAPTER_CONFIG = "adapter_config.json"
_QUANTIZATION = "quantization_config"
_NAME = "default"
"""Name under which peft loads an adapter if none is given."""
_TURNED = (0, 19)
"""Version since which the two matrices of stacked experts have the axes of other matrices; before, they were
exchanged.
"""


_TAKEN_APART = ("pissa", "olora")
"""Beginnings of the values of `init_lora_weights` for which peft takes the base's weights apart, also when it loads."""


def trace(request: dict[str, Any], headers: Headers, result: dict[str, Any]) -> None:
    """Load the adapter onto a model of the base's config."""
    warnings.simplefilter("ignore")
    import peft
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    result["version"] = importlib.metadata.version("peft")
    folder = request["folder"]
    stored = json.loads(Path(folder, _ADAPTER_CONFIG).read_text("utf-8"))
    loads = _watch(peft)
    with torch.device("meta"):
        base = _base(transformers, folder, stored)
        result["class"] = type(base).__name__
        model = peft.PeftModel.from_pretrained(base, folder, torch_device="meta", ignore_mismatched_sizes=True)
    config = model.peft_config[_NAME]
    if not loads:
        raise ValueError(f"peft has loaded nothing of this {config.peft_type} adapter")
    load = loads[-1]
    saved = _names_if_saved(peft, model)
    parameters, missing, unexpected = (
        {_file_name(name, saved) for name in load[key]} for key in ("parameters", "missing", "unexpected")
    )
    result["mismatched"] = sorted(
        [_file_name(name, saved), list(file), list(built)] for name, file, built in load["shapes"]
    )
    wrong_shape = {name for name, *_ in result["mismatched"]}
    files = {name for tensors in request["files"].values() for name in tensors}
    result["missing"] = sorted((missing | saved - parameters - files) - wrong_shape)
    result["unexpected"] = sorted(unexpected)
    result["twice"] = sorted(name for name, count in headers.taken.items() if count > 1)
    result["findings"] = [*_unread_settings(stored, config, model), *_turned_stacks(stored, model, result)]


def _base(transformers: Any, folder: str, stored: dict[str, Any]) -> Any:
    """Return the base model: of the class with which the adapter was trained, or of the one for its task."""
    from peft import auto

    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, _QUANTIZATION):  # peft finds the same modules in a plain model
        delattr(config, _QUANTIZATION)
    trained = getattr(transformers, (stored.get("auto_mapping") or {}).get("base_model_class") or "", None)
    if trained is not None:
        return trained._from_config(config)
    classes: list[Any] = [each for each in vars(auto).values() if isinstance(each, type)]
    by_task = {each._target_peft_class: each._target_class for each in classes if getattr(each, "_target_class", None)}
    mapping = auto.MODEL_TYPE_TO_PEFT_MODEL_MAPPING
    task = stored.get("task_type")
    if task and task != "CAUSAL_LM" and mapping.get(task) in by_task:
        return by_task[mapping[task]].from_config(config)
    return model_class_of(transformers, folder)._from_config(config)


def _watch(peft: Any) -> list[dict[str, Any]]:
    """Return a list that gets what peft reports of each load: `missing`, `unexpected`, `shapes`, and `parameters`, the
    names of the parameters that get a tensor.
    """
    import torch
    from peft.utils import save_and_load

    loads: list[dict[str, Any]] = []
    shapes: list[Any] = []
    keys: dict[str, Any] = {}
    load, compare = peft.PeftModel.load_adapter, getattr(save_and_load, "_find_mismatched_keys", None)
    load_state_dict = torch.nn.Module.load_state_dict

    def watched(*arguments: Any, **options: Any) -> Any:
        answer = load(*arguments, **options)
        loads.append({
            "missing": [*answer.missing_keys], "unexpected": [*answer.unexpected_keys], "shapes": [*shapes],
            "parameters": dict(keys),
        })  # fmt: skip
        return answer

    def compared(*arguments: Any, **options: Any) -> Any:
        answer = compare(*arguments, **options)  # type: ignore[misc]
        shapes[:] = answer[1]
        return answer

    def loaded(module: Any, state: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(module, peft.PeftModel):
            keys.clear()
            keys.update(state)
        return load_state_dict(module, state, *arguments, **options)

    peft.PeftModel.load_adapter = watched
    torch.nn.Module.load_state_dict = loaded  # type: ignore[method-assign, assignment]
    if compare is not None:
        save_and_load._find_mismatched_keys = compared
    return loads


def _names_if_saved(peft: Any, model: Any) -> set[str]:
    """Return the names of the tensors that peft would save of the adapter; empty for prompts, which peft checks itself.

    Raises:
        ValueError: if the adapter has no tensor in the model.
    """
    if model.peft_config[_NAME].is_prompt_learning:
        return set()
    saved = set(peft.get_peft_model_state_dict(model, adapter_name=_NAME, save_embedding_layers=False))
    if not saved:
        raise ValueError("no module of the model is one that the adapter changes")
    return saved


def _file_name(parameter: str, saved: set[str]) -> str:
    """Return the name that a parameter of the adapter has in files."""
    segments = parameter.split(".")
    name = ".".join(segment for place, segment in enumerate(segments) if segment != _NAME or not place)
    shorter = name.removesuffix(".weight")  # vectors of DoRA
    return shorter if name not in saved and shorter in saved else name


def _unread_settings(stored: dict[str, Any], config: Any, model: Any) -> Iterator[dict[str, Any]]:
    """Yield findings on settings of the adapter that peft leaves out."""
    fields = {field.name for field in dataclasses.fields(config)}
    for key, value in stored.items():
        if key not in fields and value:
            yield _finding(f"peft does not know {key}, which is {json.dumps(value)[:80]} in {_ADAPTER_CONFIG}")
    beginning = getattr(config, "init_lora_weights", None)
    if isinstance(beginning, str) and beginning.startswith(_TAKEN_APART):
        effect = (
            f"peft changes the base's weights for {beginning} when it loads, which fits only the base of its training"
        )
        yield {"kind": "note", "wrong": False, "effect": effect, "names": [], "remedy": ""}
    changed = {*getattr(model.base_model, "targeted_module_names", ())}
    changed |= {*getattr(model.base_model, "targeted_parameter_names", ())}
    for setting in ("rank_pattern", "alpha_pattern"):
        unused = [pattern for pattern in getattr(config, setting, None) or () if not _matches(pattern, changed)]
        if unused and changed:
            yield _finding(f"peft uses {setting} for none of its modules: {', '.join(unused)[:200]}")


def _matches(pattern: str, names: Iterable[str]) -> bool:
    """Return whether peft applies a setting for the modules with this pattern to one of these modules."""
    from peft.utils.other import get_pattern_key

    return any(get_pattern_key([pattern], name) == pattern for name in names)


def _finding(effect: str) -> dict[str, Any]:
    remedy = "Use the version of peft that wrote the adapter, or correct the setting."
    return {"kind": "config", "wrong": True, "effect": effect, "names": [], "remedy": remedy}


def _turned_stacks(stored: dict[str, Any], model: Any, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a finding on LoRA of stacked parameters by a version of peft that took their axes for each other.

    Matrices of equal rows and columns have the same shapes in both; then only `peft_version` tells.
    """
    stacks = [f"{name}.lora_" for name, module in model.named_modules() if type(module).__name__ == "ParamWrapper"]
    shapes = {name: (file, built) for name, file, built in result["mismatched"]}
    exchanged = [
        name for name, (file, _) in shapes.items()
        if name.replace(".lora_A.", ".lora_B.") in shapes and name.startswith(tuple(stacks))
        and file == shapes[name.replace(".lora_A.", ".lora_B.")][1][::-1]
    ]  # fmt: skip
    by, loads = (_numbers(each or "") for each in (stored.get("peft_version"), result["version"]))
    if stacks and ((by < _TURNED) != (loads < _TURNED) or exchanged):
        names = sorted(f"{stack}{factor}.weight" for stack in stacks for factor in "AB")
        effect = f"peft {result['version']} takes the axes of stacked parameters in another order than the writer did"
        remedy = "Merge the adapter into its base with the version of peft that wrote it; the order changed in 0.19."
        yield {"kind": "values", "wrong": True, "effect": effect, "names": names, "remedy": remedy}


def _numbers(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; zeros without one."""
    first, second, *_ = [*version.partition("@")[0].split("."), "0", "0"]
    return (int(first), int(second)) if first.isdecimal() and second.isdecimal() else (0, 0)


if __name__ == "__main__":
    run(trace)
