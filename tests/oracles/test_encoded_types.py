"""Models of every type in use: which weights are encoded by default, and whether all values arrive in training.

Weights of linear layers and experts are encoded, as real models have them; nothing else is. Training refits models
between memory and a hub's names, and loads models without memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import apply_quantization_config
from safetensors import safe_open
from torch import nn
from transformers import CompressedTensorsConfig, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

import transaxle as tx
from tests.oracles import wrappers
from tests.oracles.every_type import EXACT, HAND, TRACED, recorded
from tests.oracles.peer_bytes import Tensors, differing, loaded, published
from tests.oracles.quiet import quiet
from tests.oracles.tiny_models import drawn
from transaxle.errors import TransaxleError, UsageError
from transaxle.quant import Float8CurrentScaling, quantize_

READ = (
    ("aria", "float8_block"), ("blip-2", "float8_block"), ("blip-2", "nvfp4"), ("deepseek_v32", "float8_block"),
    ("gemma3", "mxfp8"), ("got_ocr2", "float8_block"), ("mt5", "float8_block"), ("mt5", "mxfp8"),
)  # fmt: skip
"""A projection of torch's own attention, tied heads, other names in memory, parameters of modules around linear layers,
and layers that stay in float32."""
DECODED = (
    ("gpt_oss", "float8_block"), ("granitemoe", "mxfp8"), ("jamba", "float8_block"), ("llama4_text", "float8_block"),
    ("mixtral", "float8_block"), ("nomic_bert", "nvfp4"), ("qwen3_vl_moe_text", "float8_block"),
    ("qwen4_exp_text", "float8_block"),
)  # fmt: skip
"""Stacks, a weight with a smaller last tile, numbered experts, fused weights that are split in memory, and a layer
whose own name ends with `_weight`."""
ROUTED = ("mixtral", "minimax_m2", "phimoe")
"""Types whose routers have other names in memory than in files."""
WHOLE_TILES = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
TYPES = sorted(each for each, (table, said) in recorded()["types"].items() if table in (HAND, TRACED) and said == EXACT)


def layers(model: Any) -> set[str]:
    """Return the weights of linear layers, all but those of heads and routers."""
    head = model.get_output_embeddings()
    found = ((path, module) for path, module in model.named_modules() if module is not head)
    return {f"{path}.weight" for path, each in found if isinstance(each, nn.Linear) and not path.endswith(".gate")}


def encoded(model_type: str, folder: Path) -> tuple[set[str], set[str]]:
    """Return what is encoded of a type, under the names in memory, and what its linear layers are."""
    with quiet():
        model = drawn(model_type, wider=True).to(torch.bfloat16)
        model.save_pretrained(folder / "base")
    tx.convert(folder / "base", folder / "out", to="transformers", encode="float8_block", sync=False)
    chosen = set()
    for file in (folder / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            chosen |= {name for name in opened.keys() if opened.get_slice(name).get_dtype() == "F8_E4M3"}  # noqa: SIM118
    return chosen, layers(model)


def asked(model: Any, folder: Path) -> set[str]:
    """Return the modules that transformers takes for encoded, by the config in a folder."""
    section = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]
    quantizer = AutoHfQuantizer.from_config(section, pre_quantized=True)
    with torch.device("meta"):
        empty = type(model)(model.config)
    if section["quant_method"] == "fp8":
        quantizer.quantization_config.dequantize = False  # as on a GPU
        quantizer._process_model_before_weight_loading(empty)
        return {path for path, module in empty.named_modules() if isinstance(module, FP8Linear | FP8Experts)}
    apply_quantization_config(empty, quantizer.compressor.quantization_config)
    return {path for path, module in empty.named_modules() if getattr(module, "quantization_scheme", None) is not None}


def changed(model: Any, folder: Path) -> set[str]:
    """Return the modules of a model whose weights a folder has with other values."""
    found = type(model).from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    return {
        name.rpartition(".")[0] for name, value in model.state_dict().items() if not torch.equal(found[name], value)
    }


@pytest.mark.oracle
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "encoding"), READ)
def test_transformers_takes_the_same_modules_for_encoded(model_type: str, encoding: str, tmp_path: Path) -> None:
    with quiet():
        model = drawn(model_type).to(torch.bfloat16)
        model.save_pretrained(tmp_path / "base")
        tx.convert(tmp_path / "base", tmp_path / "out", to="hf", encode=encoding, sync=False)
        tx.convert(tmp_path / "out", tmp_path / "plain", to="hf", decode="bf16", sync=False)
        assert asked(model, tmp_path / "out") == changed(model, tmp_path / "plain") != set()


@pytest.mark.oracle
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "encoding"), DECODED)
def test_transformers_decodes_the_values_that_were_written(model_type: str, encoding: str, tmp_path: Path) -> None:
    said = FineGrainedFP8Config if encoding == "float8_block" else CompressedTensorsConfig
    with quiet():
        model = drawn(model_type).to(torch.bfloat16)
        model.save_pretrained(tmp_path / "base")
        report = tx.convert(tmp_path / "base", tmp_path / "out", to="hf", encode=encoding, sync=False)
        tx.convert(tmp_path / "out", tmp_path / "plain", to="hf", decode="bf16", sync=False)
        plain = type(model).from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
        config = said(dequantize=True)
        theirs = type(model).from_pretrained(tmp_path / "out", dtype=torch.bfloat16, quantization_config=config)
    assert report.recoded
    for name, value in theirs.state_dict().items():
        assert torch.allclose(value.float(), plain[name].float(), rtol=2**-7, atol=0), name


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "reason"), [("gpt2", "with rows of inputs"), ("falcon", "a subclass of nn.Linear")]
)
def test_a_model_without_layers_that_transformers_would_read_is_not_encoded(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    with quiet():
        model = drawn(model_type).to(torch.bfloat16)
        model.save_pretrained(tmp_path / "base")
    with pytest.raises(UsageError, match=f"nothing to encode: left plain: 8 weights.*{reason}"):
        tx.plan(tmp_path / "base", tmp_path / "out", to="hf", encode="float8_block")
    only = "transformer.h.*.mlp.*weight"
    plan = tx.plan(tmp_path / "base", tmp_path / "out", to="hf", encode="float8_block", only=only)
    assert len(plan.recoded) == 4
    assert any(note.startswith("encoded on request: 4 weights") and reason in note for note in plan.notes)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        ("BertForNextSentencePrediction", "cls.seq_relationship"),
        ("BertForSequenceClassification", "classifier"),
        ("RobertaForQuestionAnswering", "qa_outputs"),
        ("RobertaForSequenceClassification", "classifier.out_proj"),
    ],
)
def test_a_head_that_classifies_stays_plain(architecture: str, head: str, tmp_path: Path) -> None:
    import transformers

    made = getattr(transformers, architecture)
    with quiet():
        model = made(wrappers.shrunk(made.config_class())).to(torch.bfloat16)
        model.save_pretrained(tmp_path / "base")
        tx.convert(tmp_path / "base", tmp_path / "out", to="hf", encode="float8_block", sync=False)
        tx.convert(tmp_path / "out", tmp_path / "plain", to="hf", decode="bf16", sync=False)
        encoded_modules = changed(model, tmp_path / "plain")
        assert asked(model, tmp_path / "out") == encoded_modules != set()
    assert head in dict(model.named_modules())
    assert head not in encoded_modules


def plain_modules(folder: Path) -> dict[str, bool]:
    """The modules with a plain matrix under their stored names -> whether transformers' rule finds them listed."""
    section = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]
    listed = section["modules_to_not_convert"]
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                one = opened.get_slice(name)
                module, _, end = name.rpartition(".")
                if end == "weight" and len(one.get_shape()) > 1 and one.get_dtype() == "BF16":
                    found[module] = not should_convert_module(module, listed)
    return found


@contextmanager
def tiny() -> Iterator[None]:
    """Skip a type of which there is no model of these sizes, or whose tiny model is refused."""
    try:
        yield
    except TransaxleError as error:
        pytest.skip(f"its tiny model is refused: {error}")
    except Exception as error:  # noqa: BLE001 - of the peer
        pytest.skip(f"no model of these sizes: {error}")


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", TYPES)
def test_of_every_type_lists_survive_a_round_trip(model_type: str, tmp_path: Path) -> None:
    with tiny():
        with quiet():
            model = drawn(model_type, WHOLE_TILES).to(torch.bfloat16)
            model.save_pretrained(tmp_path / "base")
        tx.convert(tmp_path / "base", tmp_path / "out", to="hf", encode="float8_block", sync=False)
        tx.convert(tmp_path / "out", tmp_path / "memory", to="transformers", sync=False)
        tx.convert(tmp_path / "memory", tmp_path / "back", to="hf", sync=False)
        before, after = plain_modules(tmp_path / "out"), plain_modules(tmp_path / "back")
    assert after == before
    if model_type in ROUTED:
        assert all(before.values())
        with quiet():
            assert asked(model, tmp_path / "out") == asked(model, tmp_path / "back") != set()


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
def test_of_every_type_nothing_else_is_encoded(model_type: str, tmp_path: Path) -> None:
    with tiny():
        chosen, linear = encoded(model_type, tmp_path)
    assert chosen <= linear
    assert model_type != "mixtral" or chosen == linear != set()


# The training side with models of every type: refit between memory and a hub's names, and models without memory.

Check = Callable[[Any, Path], None]
"""Asserts something of a model that transformers has stored in `HUB` of a folder; files go into that folder."""
HUB = "hub"


def cut_parameters(model: Any) -> Tensors:
    """Return copies of all parameters and buffers, those that are never stored too."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def refit(source: Any, folder: Path) -> None:
    """Assert that a model's weights arrive in another model and under a hub's names."""
    target = deepcopy(source)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    hub = published(source.config.model_type, loaded(folder / HUB))
    engine = {name: torch.zeros_like(tensor) for name, tensor in hub.items()}
    tx.Refit(source, target).push()
    tx.Refit(source, engine, dialect="hf").push()
    assert differing(cut_parameters(target), cut_parameters(source)) == []
    assert differing(engine, hub) == []


def built_empty(model: Any, folder: Path) -> None:
    """Assert that a model on the meta device has all values of one that is not, once it is loaded."""
    with quiet(), torch.device("meta"):
        empty = type(model)._from_config(deepcopy(model.config)).eval()
    tx.save(model, folder / "saved", to="safetensors")
    tx.load(empty, folder / "saved")
    assert differing(cut_parameters(empty), cut_parameters(model)) == []


def float8_from_a_hub(model: Any, folder: Path) -> None:
    """Assert that codes and scales that were saved for a hub are loaded bit for bit."""
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    for each in (model, other):
        quantize_(each, Float8CurrentScaling())
    tx.save(model, folder / "saved", to="hf")
    tx.load(other, folder / "saved")
    assert differing(other.state_dict(), model.state_dict()) == []


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("check", [refit, built_empty, float8_from_a_hub])
def test_of_every_type_every_value_arrives(check: Check, model_type: str, tmp_path: Path) -> None:
    with tiny(), quiet():
        model = drawn(model_type)
        model.save_pretrained(tmp_path / HUB)
    try:
        check(model, tmp_path)
    except TransaxleError as error:
        pytest.skip(f"its tiny model is refused: {error}")
