"""Models of transformers from any checkpoint, and folders for a hub: against transformers' own loading and saving."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import transaxle as tx
from tests.formats.refusals import refuses
from tests.live.ranks import run
from tests.live.topologies import LLAMA, MOE, full, shard, source
from tests.oracles.quiet import quiet

TOKENS = torch.arange(12).reshape(2, 6)


def _own(folder: Path, **options: Any) -> Any:
    """The model as transformers loads it."""
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
    return logits


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(source(tmp_path_factory.mktemp("pretrained") / "hub", MOE))
    GenerationConfig(max_new_tokens=7, eos_token_id=5).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("to", ["hf", "dcp:torchtitan", "torch_dist", "deepspeed-universal:transformers"])
def test_a_model_from_any_checkpoint_is_that_of_transformers(hub: Path, tmp_path: Path, to: str) -> None:
    tx.convert(hub, tmp_path / "source", to=to)
    model = tx.from_pretrained(AutoModelForCausalLM, tmp_path / "source", config=hub / "config.json")
    assert type(model) is type(_own(hub))
    assert torch.equal(_logits(model), _logits(_own(hub)))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if to == "hf":
        assert model.generation_config.max_new_tokens == 7
    exact = tx.from_pretrained(AutoModelForCausalLM, tmp_path / "source", config=hub / "config.json", dtype="fp32")
    assert torch.equal(_logits(exact), _logits(_own(hub, dtype=torch.float32)))


def test_a_lost_tensor_and_codes_are_refused(hub: Path, tmp_path: Path) -> None:
    tx.convert(hub, tmp_path / "codes", to="hf", encode="mxfp8", skip="*down_proj*")
    with refuses("UNSUPPORTED", exit_code=3, hint='decode="bf16"'):
        tx.from_pretrained(AutoModelForCausalLM, tmp_path / "codes")
    with tx.open(tmp_path / "codes", decode="fp32") as shown:
        decoded = tx.from_pretrained(AutoModelForCausalLM, shown)
    assert (_logits(decoded) - _logits(_own(hub, dtype=torch.float32))).abs().max() < 0.3
    deeper, shallow = {**LLAMA, "num_hidden_layers": 3}, source(tmp_path / "llama", LLAMA)
    with pytest.raises(tx.TransaxleError) as caught:
        tx.from_pretrained(LlamaForCausalLM, shallow, config=deeper)
    assert {refusal.code for refusal in caught.value.refusals} == {"MISSING_TENSOR"}


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{number}": number for number in range(LLAMA["vocab_size"])}  # type: ignore[call-overload]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, "w0")), unk_token="w0")


def _round(rank: int, world: int, hub: str, folder: str, how: str) -> torch.Tensor:
    """Load a divided model, compute, and save it."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    dividing: dict[str, Any] = {"device_mesh": mesh} if how == "tp" else {"parallelize": partial(shard, mesh=mesh)}
    with quiet():
        model = tx.from_pretrained(AutoModelForCausalLM, hub, dtype="fp32", **dividing)
    logits = full(_logits(model))
    tx.save_pretrained(model, folder, tokenizer=_tokenizer())
    return logits


@pytest.mark.parametrize("how", ["tp", "fsdp"])
def test_a_divided_model_becomes_a_complete_folder(hub: Path, tmp_path: Path, how: str) -> None:
    own = _own(hub, dtype=torch.float32)
    for logits in run(2, _round, str(hub), str(tmp_path / "out"), how):
        torch.testing.assert_close(logits, _logits(own))
    assert torch.equal(_logits(_own(tmp_path / "out")), _logits(own))
    own.save_pretrained(tmp_path / "theirs")
    _tokenizer().save_pretrained(tmp_path / "theirs")
    ours, theirs = ({path.name for path in (tmp_path / each).iterdir()} for each in ("out", "theirs"))
    assert ours - {"transaxle.json"} == theirs
    for name in theirs - {"model.safetensors", "config.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name
    config, expected = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("out", "theirs"))
    assert {key: value for key, value in config.items() if expected.get(key) != value} == {}
    assert tx.verify(tmp_path / "out").ok
