"""Whether a conversion works, from a config alone: the answer is what `plan` says of files of transformers.

The tensors that the answer assumes are those that `save_pretrained` stores, and the refusals are those of their plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import transaxle as tx
from tests.oracles.test_full_families import TYPES
from tests.oracles.tiny_models import made
from transaxle.axes.translation.unmatched import AHEAD_KEYS
from transaxle.errors import TransaxleError, UsageError

TARGETS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("safetensors:hf", {}), ("safetensors:transformers", {"strict": True}), ("dcp:torchtitan", {}),
    ("dcp:automodel", {}), ("torch:megatron", {}), ("torch_dist", {"tp": 2}), ("megatron_torch", {"tp": 4, "ep": 2}),
    ("vllm_sharded", {"tp": 3}), ("vllm_sharded", {"tp": 2}), ("deepspeed-universal:hf", {}), ("ranks", {"dp": 2}),
    ("dcp:hf", {"tp": 2}), ("hf", {"encode": "float8_block"}), ("hf", {"encode": "nvfp4"}),
    ("dcp:identity", {"encode": "int4", "group_size": 16}), ("hf", {"dtype": "fp16"}), ("hf", {"decode": "bf16"}),
    ("dcp:nonsense", {}),
)  # fmt: skip
"""Targets, with options; many are refused, for every kind of reason."""


UNSAID = frozenset({
    "bert", "distilbert", "electra", "gte", "inkling_mm_model", "lfm2", "modernbert", "nemotron_h_omni", "nomic_bert",
    "roberta", "step3p7", "vit", "xlm-roberta",
})  # fmt: skip
"""Types whose configs do not say which head a model has, or how wide its layers are: no answer but an error."""
_UNDECIDED, _UNSIZED = "taken as no", "only shapes show"
"""In notes: a vector that may be there, and sizes that the config lacks."""


def without_ahead(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the layers that predict ahead, which `save_pretrained` leaves out."""
    return {
        key: 0 if key in AHEAD_KEYS and value else without_ahead(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
    }


def planned(source: Path, target: str, options: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """What `plan` says of files: refusals, and the target's tensors."""
    try:
        plan = tx.plan(source, source.parent / "target", to=target, **options)
    except TransaxleError as error:
        return [refusal.as_json() for refusal in error.refusals], {}
    return [refusal.as_json() for refusal in plan.refusals], {t.name: (t.dtype, t.shape) for t in plan.tensors}


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
def test_the_answer_is_that_of_the_files(model_type: str, tmp_path: Path) -> None:
    _, stored, config = made(model_type, {}, tmp_path)
    config = without_ahead(config) | {"dtype": "bfloat16"}
    if model_type in UNSAID:
        with pytest.raises(UsageError) as unsaid:
            tx.supports(config, "hf")
        assert unsaid.value.code in {"AMBIGUOUS", "UNKNOWN_AXIS"}
        return
    source = tmp_path / "source"
    source.mkdir()
    tensors = {name: tensor.contiguous().to(torch.bfloat16) for name, tensor in stored.items()}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config), "utf-8")
    for target, options in TARGETS:
        answer = tx.supports(config, target, **options)
        refusals, expected = planned(source, target, options)
        assert bool(answer) is (not refusals)
        answered = [refusal.as_json() for refusal in answer.refusals]
        refusals = [each | {"hint": each["hint"].replace("(to=", "(target=")} for each in refusals]
        assert sorted(answered, key=str) == sorted(refusals, key=str), (target, options)  # in the order of the files
        implied = {t.name: (t.dtype, t.shape) for t in (answer.plan.tensors if answer.plan else ())}
        notes = " ".join(answer.notes)
        left_out = expected.keys() ^ implied.keys()
        assert not left_out or _UNDECIDED in notes, (target, options, left_out)
        unlike = [name for name in implied.keys() & expected.keys() if implied[name] != expected[name]]
        undecided = _UNDECIDED in notes and all(implied[name][1] == expected[name][1] for name in unlike)  # zeros
        assert not unlike or _UNSIZED in notes or undecided, (target, options, unlike[:3])
