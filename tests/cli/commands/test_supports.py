"""`transaxle supports` prints the verdict, exits as `plan` does, and reads no checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoints import CONFIG
from tests.cli.running import REFUSED, USAGE, Transaxle


def test_a_config_is_enough(here: Path, transaxle: Transaxle) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(
        json.dumps({**CONFIG, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []}), "utf-8"
    )
    shown = transaxle("supports", "model", "--to", "dcp:torchtitan").out.splitlines()
    assert shown[0] == "qwen3_moe · safetensors:hf -> dcp:torchtitan@0.3"
    assert shown[-1] == "  supported"
    wrong = ("supports", "model/config.json", "--from", "torch_dist", "--to", "vllm_sharded", "--tp", "3")
    refused = transaxle(*wrong).expect(REFUSED)
    assert "  not supported (" in refused.out
    assert "does not divide over 3 ranks" in refused.out
    document = transaxle(*wrong, "--json").json
    assert (document["supported"], document["source"]) == (False, "torch_dist:megatron_dist")
    assert {refusal["code"] for refusal in document["refusals"]} == {"UNSUPPORTED"}
    transaxle("supports", "model", "--to", "dcp:torchtitn").expect(USAGE, out="Did you mean torchtitan?")
