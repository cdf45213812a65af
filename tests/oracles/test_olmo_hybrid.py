"""OLMo Hybrid as the hub has it: q, k and v of a convolution have the sizes of their heads.

transformers 5.23 loads such files, and holds the three as one; what its `save_pretrained` writes are thirds of that.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import transaxle as tx
from tests.oracles.every_type import built
from tests.oracles.peer_bytes import differing, loaded, memory, randomise, write

WORDS = ("q_conv1d", "k_conv1d", "v_conv1d")


@pytest.mark.peers
def test_files_of_the_hub_are_what_transformers_loads(tmp_path: Path) -> None:
    model = built("olmo_hybrid")[0]
    randomise(model)
    inside = memory(model)
    model.save_pretrained(tmp_path / "saved")
    hub = loaded(tmp_path / "saved")
    config = model.config
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    assert keys != values
    for name, tensor in inside.items():
        if ".conv1d." in name:
            names = [name.replace("conv1d", word) for word in WORDS]
            hub |= dict(zip(names, torch.split(tensor, [keys, keys, values]), strict=True))
    text = (tmp_path / "saved/config.json").read_text("utf-8")
    write(tmp_path / "hub", hub, text)
    write(tmp_path / "memory", inside, text)
    assert differing(memory(type(model).from_pretrained(tmp_path / "hub").float()), inside) == []
    tx.convert(tmp_path / "hub", tmp_path / "to", to="safetensors:transformers", sync=False)
    assert differing(loaded(tmp_path / "to"), inside) == []
    tx.convert(tmp_path / "memory", tmp_path / "back", to="safetensors:hf", sync=False)
    assert differing(loaded(tmp_path / "back"), hub) == []
    with pytest.raises(tx.TransaxleError, match="conv1d"):
        tx.convert(tmp_path / "saved", tmp_path / "thirds", to="safetensors:transformers", sync=False)
