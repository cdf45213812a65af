"""Models of transformers from any checkpoint, and folders for a hub: against transformers' own loading and saving."""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    BertModel,
    GenerationConfig,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    T5EncoderModel,
)

import transaxle as tx
from tests.formats.refusals import refuses
from tests.live.ranks import run
from tests.live.topologies import LLAMA, MOE, full, shard, source
from tests.oracles import cases
from tests.oracles.hub import WEIGHTS
from tests.oracles.quiet import quiet
from transaxle.derivation.transformers_models import Peer, variants
from transaxle.encodings.encoding import CASTS
from transaxle.torch_tensors import torch_dtype

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
def test_tied_embeddings_are_divided_too(tmp_path: Path, how: str) -> None:
    hub = Path(source(tmp_path / "hub", {**MOE, "tie_word_embeddings": True}))
    own = _own(hub, dtype=torch.float32)
    assert own.lm_head.weight is own.model.embed_tokens.weight
    for logits in run(2, _round, str(hub), str(tmp_path / "out"), how):
        torch.testing.assert_close(logits, _logits(own))
    assert torch.equal(_logits(_own(tmp_path / "out")), _logits(own))


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


def _random(model: Any, dtype: torch.dtype) -> Any:
    """A model whose parameters and saved buffers are random, in one dtype."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape) - 0.5)
    return model.to(dtype)


@pytest.mark.parametrize(("model_type", "dtype"), [("deepseek_v3", "bf16"), ("glm4_moe", "bf16"), ("t5", "fp16")])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_what_transformers_keeps_in_float32_stays_so(
    tmp_path: Path, model_type: str, dtype: str, stored: torch.dtype
) -> None:
    """The bias of a router in bfloat16 would choose other experts."""
    small = next(variants(Peer(), model_type, numbers=(0,)))[0]
    with quiet():
        _random(type(small)(small.config), stored).save_pretrained(tmp_path / "hub")
        own = type(small).from_pretrained(tmp_path / "hub", dtype=torch_dtype(CASTS[dtype]))
    expected, model = own.state_dict(), tx.from_pretrained(type(small), tmp_path / "hub", dtype=dtype)
    assert {tensor.dtype for tensor in expected.values()} == {torch_dtype(CASTS[dtype]), torch.float32}
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_routers_have_the_numbers_of_the_files(family: str, stored: torch.dtype, tmp_path: Path) -> None:
    """transformers holds them in float32 in a model of bfloat16: files may have either, and no number changes."""
    case, router = cases.case(family, "asymmetric"), "model.layers.1.mlp.gate.weight"
    tensors = dict(case.dialects[cases.HF])
    tensors[router] = (tensors[router].float() * 1.001).to(stored)
    (tmp_path / "hub").mkdir()
    save_file(tensors, tmp_path / "hub" / WEIGHTS, metadata={"format": "pt"})
    (tmp_path / "hub/config.json").write_text(json.dumps({**case.config, "dtype": "bfloat16"}), "utf-8")
    own, model = _own(tmp_path / "hub"), tx.from_pretrained(AutoModelForCausalLM, tmp_path / "hub")
    built = AutoModelForCausalLM.from_config(own.config, dtype=torch.bfloat16)
    tx.load(built, tmp_path / "hub", dtype="own")
    for loaded in (own, model, built):
        assert cases.bits(loaded.get_parameter(router)) == cases.bits(tensors[router].float())
    own.save_pretrained(tmp_path / "theirs")
    tx.save_pretrained(model, tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        assert cases.bits(load_file(folder / WEIGHTS)[router]) == cases.bits(tensors[router].float())
    for to in ("transformers", "automodel"):
        tx.convert(tmp_path / "hub", tmp_path / to, to=f"safetensors:{to}")
        tx.convert(tmp_path / to, tmp_path / f"{to}-back", to="safetensors:hf")
        back = load_file(tmp_path / f"{to}-back" / WEIGHTS)
        assert {name: cases.bits(tensor) for name, tensor in back.items()} == {
            name: cases.bits(tensor) for name, tensor in tensors.items()
        }


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**MOE, "model_type": "glm4_moe", "first_k_dense_replace": 1, "n_routed_experts": 6, "n_shared_experts": 1,
              "num_nextn_predict_layers": 1, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64}  # fmt: skip
    plan = tx.supports(config, "hf").plan
    assert plan is not None
    tensors = {tensor.name: torch.rand(tensor.shape).bfloat16() for tensor in plan.tensors}
    ahead = [name for name in tensors if name.startswith(f"model.layers.{LLAMA['num_hidden_layers']}.")]
    assert len(ahead) > 5
    (tmp_path / "hub").mkdir()
    save_file(tensors, tmp_path / "hub" / WEIGHTS, {"format": "pt"})
    (tmp_path / "hub" / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    model = tx.from_pretrained(AutoModelForCausalLM, tmp_path / "hub")
    assert f"{len(ahead)} tensors of" in caplog.text
    assert "predict further tokens, and are left out" in caplog.text
    assert torch.equal(_logits(model), _logits(_own(tmp_path / "hub")))


HEAD = "lm_head.weight"


@pytest.mark.parametrize("to", ["hf", "dcp:torchtitan", "torch_dist"])
def test_a_base_model_leaves_out_the_head(hub: Path, tmp_path: Path, to: str, caplog: pytest.LogCaptureFixture) -> None:
    tx.convert(hub, tmp_path / "source", to=to)
    model = tx.from_pretrained(AutoModel, tmp_path / "source", config=hub / "config.json")
    assert "1 tensor of" in caplog.text
    assert f"has no such part: {HEAD}" in caplog.text
    _is_as_of_transformers(model, hub)


def _is_as_of_transformers(model: Any, folder: Path) -> None:
    with quiet():
        expected = AutoModel.from_pretrained(folder)
    assert type(model) is type(expected)
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("config", [MOE, LLAMA, {**MOE, "tie_word_embeddings": True}], ids=["moe", "llama", "tied"])
def test_a_base_models_checkpoint_fills_the_base_of_a_model(tmp_path: Path, config: dict[str, Any]) -> None:
    whole = Path(source(tmp_path / "whole", config))
    with quiet():
        AutoModel.from_pretrained(whole).save_pretrained(tmp_path / "base")
    _is_as_of_transformers(tx.from_pretrained(AutoModel, tmp_path / "base"), tmp_path / "base")
    if config.get("tie_word_embeddings"):
        model = tx.from_pretrained(AutoModelForCausalLM, tmp_path / "base")
        assert torch.equal(_logits(model), _logits(_own(tmp_path / "base")))
    else:
        _lacks(AutoModelForCausalLM, tmp_path / "base", HEAD)
    _lacks(AutoModelForSequenceClassification, tmp_path / "base", "score.weight")


def test_a_base_model_without_a_prefix_loads(tmp_path: Path) -> None:
    """The names of T5Model and of T5 with its head are alike, and the table computes the tied head."""
    small = next(variants(Peer(), "t5", numbers=(0,)))[0]
    with quiet():
        _random(type(small)(small.config), torch.float32).save_pretrained(tmp_path / "whole")
        AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "base")
        T5EncoderModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "encoder")
    for folder in ("whole", "base"):
        _is_as_of_transformers(tx.from_pretrained(AutoModel, tmp_path / folder), tmp_path / folder)
    encoder, expected = (
        tx.from_pretrained(T5EncoderModel, tmp_path / "whole"),
        load_file(tmp_path / "encoder" / WEIGHTS),
    )
    assert all(torch.equal(encoder.state_dict()[name], tensor) for name, tensor in expected.items())


def _lacks(kind: Any, folder: Path, name: str) -> None:
    with pytest.raises(tx.TransaxleError) as caught:
        tx.from_pretrained(kind, folder)
    (refusal,) = caught.value.refusals
    assert (refusal.code, refusal.where.tensor) == ("MISSING_TENSOR", name)
    assert "the checkpoint has no tensor for it" in refusal.message
    assert "model.model = tx.from_pretrained(AutoModel, src)" in str(refusal.hint)


def _base_of(rank: int, world: int, hub: str) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,))

    def parallelize(model: Any) -> None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    model = tx.from_pretrained(AutoModel, hub, parallelize=parallelize)
    return {name: full(tensor) for name, tensor in model.state_dict().items()}


def test_a_sharded_base_model_leaves_out_the_head(hub: Path) -> None:
    with quiet():
        expected = AutoModel.from_pretrained(hub).state_dict()
    for state in run(2, _base_of, str(hub)):
        assert state.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


def test_a_base_model_refuses_other_tensors(hub: Path, tmp_path: Path) -> None:
    """Only a head may be left out; `load` leaves out nothing, and named tables of other models."""
    config = json.loads((hub / "config.json").read_text())
    with pytest.raises(tx.TransaxleError) as caught:
        tx.from_pretrained(AutoModel, hub, config={**config, "num_hidden_layers": 1})
    assert {refusal.code for refusal in caught.value.refusals} == {"UNEXPECTED_TENSOR"}
    assert all(str(refusal.where.tensor).startswith("model.layers.1.") for refusal in caught.value.refusals)
    with quiet():
        base = AutoModel.from_pretrained(hub)
    with refuses("UNKNOWN_FAMILY", "qwen3_moe:hf without 'model.' in front", exit_code=2):
        tx.load(base, hub)


def test_classes_that_do_not_fit_are_refused(hub: Path, tmp_path: Path) -> None:
    for kind, text in ((GPT2LMHeadModel, "the class is for gpt2"), (Qwen2ForCausalLM, "the class is for qwen2")):
        with refuses("UNSUPPORTED", text, exit_code=3, hint="tx.load(model, src)"):
            tx.from_pretrained(kind, hub)
    with pytest.raises(tx.TransaxleError) as caught:
        tx.from_pretrained(AutoModelForSequenceClassification, hub)
    refusals = {(refusal.code, refusal.where.tensor) for refusal in caught.value.refusals}
    assert refusals == {("MISSING_TENSOR", "score.weight"), ("UNEXPECTED_TENSOR", "lm_head.weight")}
    assert len(caught.value.refusals) == len(refusals)
    for wrong in (_own(hub), torch.nn.Linear, "AutoModelForCausalLM"):
        with pytest.raises(TypeError, match="model_class must be a class of models of transformers"):
            tx.from_pretrained(wrong, hub)


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask for permission, and wait for the answer on one rank."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    folder = Path(source(tmp_path / "hub", LLAMA))
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": code}))
    assert type(tx.from_pretrained(AutoModelForCausalLM, folder)) is LlamaForCausalLM
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": code, "model_type": "x"}))
    with refuses("UNSUPPORTED", "transformers has no model type 'x'", exit_code=3):
        tx.from_pretrained(AutoModelForCausalLM, folder)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat17"}))
    with refuses("UNSUPPORTED", "got 'bfloat17'", exit_code=3, hint="Give dtype="):
        tx.from_pretrained(AutoModelForCausalLM, folder)


def test_a_model_knows_its_checkpoint_and_its_attention(hub: Path) -> None:
    """peft writes the name into adapters; it was that of a folder which no longer exists."""
    model = tx.from_pretrained(AutoModelForCausalLM, hub, attn_implementation="eager")
    assert (model.name_or_path, model.config._name_or_path) == (str(hub), str(hub))
    assert model.config._attn_implementation == "eager"
    config = AutoConfig.from_pretrained(hub, attn_implementation="eager")
    again = tx.from_pretrained(AutoModelForCausalLM, hub, config=config)
    assert again.config._attn_implementation == "eager"
    assert torch.equal(_logits(again), _logits(_own(hub, attn_implementation="eager")))
    for dtype in ("bf16", "fp16", "fp32"):
        with tx.open(hub, dtype=dtype) as cast:
            assert tx.from_pretrained(AutoModelForCausalLM, cast).dtype == torch_dtype(CASTS[dtype])


SMALL_BERT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("kind", [LlamaForSequenceClassification, BertForMaskedLM, BertModel])
def test_models_that_do_not_generate_are_saved_too(tmp_path: Path, kind: Any) -> None:
    config = kind.config_class(**{**LLAMA, **(SMALL_BERT if "Bert" in kind.__name__ else {})})
    model = _random(kind(config), torch.bfloat16)
    tx.save_pretrained(model, tmp_path / "ours", tokenizer=_tokenizer())
    model.save_pretrained(tmp_path / "theirs")
    _tokenizer().save_pretrained(tmp_path / "theirs")
    ours, theirs = ({path.name for path in (tmp_path / side).iterdir()} for side in ("ours", "theirs"))
    assert ours - {"transaxle.json"} == theirs
    saved, expected = (load_file(tmp_path / side / WEIGHTS) for side in ("ours", "theirs"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    with quiet():
        again = kind.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    with pytest.raises(TypeError, match="tokenizer must be a tokenizer or processor"):
        tx.save_pretrained(model, tmp_path / "path", tokenizer="theirs")


def test_code_of_a_model_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.json names the code, so a folder without it could not be loaded."""
    (tmp_path / "modeling_mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\nclass Mine(LlamaForCausalLM):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    kind = import_module("modeling_mine").Mine
    kind.register_for_auto_class("AutoModelForCausalLM")
    tx.save_pretrained(kind(LlamaForCausalLM.config_class(**LLAMA)), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == {
        "AutoModelForCausalLM": "modeling_mine.Mine"
    }
    assert (tmp_path / "out" / "modeling_mine.py").read_bytes() == (tmp_path / "modeling_mine.py").read_bytes()
