"""Maps the names of hub files with the tables of the package gguf, which llama.cpp's `convert_hf_to_gguf` uses.

The converter itself is a script of llama.cpp's repository and in no package. Only names are mapped: it also joins
numbered experts, decodes number formats, and turns the rows of some projections.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from headers import Headers, run

_SPELLINGS = {
    "mistral": "llama", "mixtral": "llama", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "kimi_k2": "deepseek2", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe", "step3p5": "step35", "cohere": "command-r",
    "gpt_bigcode": "starcoder", "hunyuan_v1_moe": "hunyuan-moe", "hunyuan_v1_dense": "hunyuan-dense",
}  # fmt: skip
"""Model type -> name of llama.cpp's architecture, where the two are not spelled alike (convert_hf_to_gguf.py)."""
_PICTURES = re.compile(r"(?:model\.)?(?:visual|vision_tower|vision_model|multi_modal_projector|audio_tower)\..*")
"""Pattern of the names that the converter leaves to `--mmproj`."""
_SKIPPED = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")
"""Ends of the names that the converter leaves out."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SCALES = re.compile(r"(?:weight_)?(?:scale|scale_inv|scale_2|global_scale|zero_point|shape|g_idx|qzeros|scales)")
"""Pattern of the last segment of names of scales and the like, which the converter uses up when it decodes."""
_CODES = {"weight_packed": "weight", "qweight": "weight"}


def trace(request: dict[str, Any], _headers: Headers, result: dict[str, Any]) -> None:
    """Map every name, and report those for which llama.cpp has none."""
    import gguf

    result["version"] = importlib.metadata.version("gguf")
    config = json.loads(Path(request["folder"], "config.json").read_text("utf-8"))
    sizes = config.get("text_config") or config
    kind = str(sizes.get("model_type") or config.get("model_type"))
    architecture = _architecture(gguf.MODEL_ARCH_NAMES, kind)
    if architecture is None:
        result["unsupported"] = f"gguf {result['version']} has no architecture for the model type {kind!r}"
        return
    layers = int(sizes["num_hidden_layers"]) + int(sizes.get("num_nextn_predict_layers") or 0)
    tables = gguf.get_tensor_name_map(architecture, layers)
    quantized = bool(config.get("quantization_config"))
    unexpected, ignored = [], []
    experts: dict[str, set[int]] = defaultdict(set)
    for name in (name for tensors in request["files"].values() for name in tensors):
        plain = _plain_name(name, quantized)
        if plain is None or name.endswith(_SKIPPED) or _PICTURES.fullmatch(name):
            ignored.append(name)
        elif tables.get_name(plain, (".weight", ".bias")) is None:
            unexpected.append(name)
        elif (match := _EXPERT.search(name)) is not None:
            experts[plain].add(int(match[1]))
    result["unexpected"] = sorted(unexpected)
    result["ignored"] = sorted(ignored)
    count = max((len(numbers) for numbers in experts.values()), default=0)
    short = sorted(name for name, numbers in experts.items() if len(numbers) < count)
    if short:
        effect = f"llama.cpp joins {count} experts to one tensor, and these lack some: the converter stops"
        result["findings"] = [{"kind": "error", "wrong": True, "effect": effect, "names": short, "remedy": ""}]


def _architecture(names: dict[Any, str], kind: str) -> Any | None:
    """Return llama.cpp's architecture of a model type; None if it has none."""
    spelling = _SPELLINGS.get(kind, kind.removesuffix("_text"))
    spelled = {re.sub(r"[-_.]", "", name): architecture for architecture, name in names.items()}
    return spelled.get(re.sub(r"[-_.]", "", spelling))


def _plain_name(name: str, quantized: bool) -> str | None:
    """Return the name that the converter looks up; None for scales that it uses up."""
    stem, _, last = name.rpartition(".")
    if quantized and _SCALES.fullmatch(last):
        return None
    last = _CODES.get(last, last) if quantized else last
    last = "e_score_correction.bias" if last == "e_score_correction_bias" else last
    plain = _EXPERT.sub(".experts.", f"{stem}.{last}")
    return plain.replace("language_model.", "")


if __name__ == "__main__":
    run(trace)
