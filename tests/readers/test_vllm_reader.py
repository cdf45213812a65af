"""`check` against vLLM itself: what it finds is what vLLM's own loader makes of the same files on a CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.engine.packed import Made, awq, gptq
from tests.oracles.vllm_peer.models import MODELS
from tests.readers import planted
from tests.readers.conftest import served
from tests.readers.real_readers import ROOT, SECONDS, VLLM, needs_vllm, run_vllm

pytestmark = [*needs_vllm, pytest.mark.filterwarnings("ignore")]

Check = Callable[..., tx.Check]
EXPECTED = {
    "cohere_asr": "error",  # torchaudio is not installed in this environment
    "hunyuan_vl": "error",  # its processor is read from files that these folders lack
    "kimi_linear": "error",  # kernels of CUTLASS are imported when it is built
    "laguna": "missing",  # vLLM 0.32 looks for the bias of the router under another name
    "nemotron_h_omni": "error",  # its tower has sizes of a published model only
    "olmo_hybrid": "error",  # Triton is asked for memory when it is built
    "qwen4_exp_text": "error",  # FlashAttention is asked for when it is built
    "step3p7": "error",  # vLLM itself stops so: transformers 5.19 has no number of heads for layers that differ
}
"""Model -> the kind of the finding, where vLLM on this machine does not load what it loads elsewhere."""
UP = "model.layers.1.mlp.experts.2.up_proj.weight"
W13 = "model.layers.1.mlp.experts.routed_experts.w13_weight"


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Check]:
    """Return a function that checks a folder for vLLM, which starts once for all of them."""
    with served(VLLM, "of_vllm", tmp_path_factory.mktemp("vllm")):
        yield lambda folder, **opening: tx.check(folder, "vllm", python=VLLM, **opening)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "hub"
    planted.make(planted.QWEN3_MOE, folder)
    return folder


@pytest.fixture
def spoilt(moe: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the checkpoint with other tensors or another config."""

    def spoil(change: Callable[[planted.Tensors], object] = lambda _: None, **config: Any) -> Path:
        shutil.copytree(moe, tmp_path / "spoilt")
        planted.retensor(tmp_path / "spoilt", change)
        planted.reconfigure(tmp_path / "spoilt", lambda keys: keys.update(config))
        return tmp_path / "spoilt"

    return spoil


def wrong(verdict: tx.Check) -> dict[str, tuple[str, ...]]:
    return {finding.kind: finding.names for finding in verdict.findings if finding.wrong}


def loaded_by_vllm(folder: Path) -> dict[str, torch.Tensor]:
    """Return what vLLM's loader makes of a folder, with NaN for elements that it never writes."""
    (loaded,) = run_vllm([folder])
    assert not loaded.error
    return loaded.values


def test_an_expert_that_is_filled_only_in_part(spoilt: Callable[..., Path], check: Check) -> None:
    folder = spoilt(lambda tensors: tensors.pop(UP))
    verdict = check(folder)
    assert wrong(verdict) == {"missing": (W13,), "absent": (UP,)}
    assert f"{W13} from the element [2, 32, 0] on" in str(verdict)
    values = loaded_by_vllm(folder)
    assert [name for name, value in values.items() if value.isnan().any()] == [W13]
    assert values[W13][2, 32:].isnan().all()
    assert not values[W13][2, :32].isnan().any()


def test_a_bias_that_vllm_drops_without_a_word(spoilt: Callable[..., Path], check: Check) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    folder = spoilt(lambda tensors: tensors.update({bias: torch.ones(64)}))
    assert wrong(check(folder)) == {"dropped": (bias,)}
    assert not any(name.endswith("qkv_proj.bias") for name in loaded_by_vllm(folder))


def test_what_vllm_leaves_out_on_purpose_is_a_note(spoilt: Callable[..., Path], check: Check) -> None:
    cached = "model.layers.0.self_attn.rotary_emb.inv_freq"
    verdict = check(spoilt(lambda tensors: tensors.update({cached: torch.ones(8)})))
    assert verdict.ok
    assert [(finding.kind, finding.names) for finding in verdict.findings] == [("ignored", (cached,))]


def test_an_absent_head(spoilt: Callable[..., Path], check: Check) -> None:
    folder = spoilt(lambda tensors: tensors.pop("lm_head.weight"))
    assert wrong(check(folder)) == {"missing": ("lm_head.weight",), "absent": ("lm_head.weight",)}


def test_sizes_that_are_not_those_of_the_tensors(spoilt: Callable[..., Path], check: Check) -> None:
    """All of them, although vLLM stops at the first."""
    norms = {f"model.layers.{layer}.self_attn.{part}_norm.weight" for layer in (0, 1) for part in "qk"}
    assert norms <= set(wrong(check(spoilt(head_dim=32)))["shape"])


def test_layers_that_predict_further_tokens(tmp_path: Path, check: Check) -> None:
    fault = planted.FAULTS["no layer that predicts further tokens"]
    fault.build(tmp_path / "hub")
    verdict = check(tmp_path / "hub")
    assert verdict.ok
    assert [finding.kind for finding in verdict.findings] == ["ignored"]
    assert {name.split(".")[2] for name in verdict.findings[0].names} == {"2"}
    fault.spoil(tmp_path / "hub")
    verdict = check(tmp_path / "hub")
    assert verdict.ok
    of_config, of_vllm = verdict.findings  # what the tables say, with the remedy, and what vLLM does
    assert "--graft BASE" in of_config.effect
    assert "cannot speculate" in of_vllm.effect
    for note in verdict.findings:
        assert note.kind == "absent"
        assert fault.mentions in note.names


def test_an_architecture_that_vllm_lacks(spoilt: Callable[..., Path], check: Check) -> None:
    verdict = check(spoilt(architectures=["Qwen9ForCausalLM"], model_type="qwen9"))
    assert not verdict
    assert "qwen9" in str(verdict)


def test_values_of_names_of_another_dialect(tmp_path: Path, check: Check) -> None:
    """Names in the rules say that up comes before gate; vLLM takes the halves as they come."""
    fault = planted.FAULTS["swapped halves of gate and up"]
    right, swapped, mended = tmp_path / "right", tmp_path / "swapped", tmp_path / "mended"
    (tmp_path / planted.RULES).write_text(planted.UP_FIRST)
    fault.build(right)
    shutil.copytree(right, swapped)
    fault.spoil(swapped)
    verdict = check(swapped, rules=tmp_path / planted.RULES, **fault.opening)
    (names,) = wrong(verdict).values()
    assert {name.split(".", 3)[3] for name in names} == {"mlp.gate_up_proj.weight"}
    fault.mend(swapped, right, mended)
    assert check(mended).ok
    values = run_vllm([right, swapped, mended])
    assert values[0].equals(values[2])
    swapped_in = {name for name, value in values[0].values.items() if not value.equal(values[1].values[name])}
    assert swapped_in == {name for name in names if name in values[0].values}  # the small model has more layers


@pytest.mark.parametrize("encoding", ["float8_block", "mxfp8", "nvfp4", "int4"])
def test_codes_and_scales_that_vllm_loads(encoding: str, tmp_path: Path, check: Check) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 128}
    planted.make({**planted.QWEN3_MOE, **sizes}, tmp_path / "hub")
    tx.convert(tmp_path / "hub", tmp_path / encoding, to="hf", encode=encoding, sync=False)
    verdict = check(tmp_path / encoding)
    assert verdict, verdict
    scale = next(name for name in load_file(tmp_path / encoding / planted.WEIGHTS) if "_scale" in name)
    planted.retensor(tmp_path / encoding, lambda tensors: tensors.pop(scale))
    assert wrong(check(tmp_path / encoding)).keys() >= {"missing"}


@pytest.mark.oracle
@pytest.mark.parametrize(("form", "options"), [
    (gptq, {"sym": True}), (gptq, {"sym": True, "first": False}), (gptq, {"sym": True, "bits": 8}), (awq, {}),
], ids=["gptq", "gptq_v2", "gptq of 8 bits", "awq"])  # fmt: skip
def test_codes_of_gptq_and_awq(
    form: Callable[..., Made], options: dict[str, Any], tmp_path: Path, check: Check
) -> None:
    """vLLM has no kernel for codes of 8 bits on a CPU, so that only the others are loaded in full."""
    planted.make_packed(form, tmp_path / "hub", **options)
    verdict = check(tmp_path / "hub")
    assert verdict, verdict
    assert {name.rpartition(".")[2] for finding in verdict.findings for name in finding.names} <= {"g_idx"}
    lost = "model.layers.0.mlp.down_proj.scales"
    shutil.copytree(tmp_path / "hub", tmp_path / "lost")
    planted.retensor(tmp_path / "lost", lambda tensors: tensors.pop(lost))
    assert lost in wrong(check(tmp_path / "lost"))["missing"]
    if options.get("bits") != 8:
        right, spoilt = run_vllm([tmp_path / "hub", tmp_path / "lost"])
        assert not right.error
        assert not spoilt.error
        assert [name for name, value in spoilt.values.items() if value.isnan().any()] == [lost]


@pytest.fixture(scope="session")
def hubs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hub folders of the models of the tests that were chosen."""
    folder = tmp_path_factory.mktemp("hubs")
    tests = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    names = [name for name in MODELS if any(item.callspec.params.get("name") == name for item in tests)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))}
    command = [str(VLLM), "-m", "tests.oracles.vllm_peer.hubs", str(folder), *names]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=SECONDS, capture_output=True)
    return folder


@pytest.mark.oracle
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if not model.inside])
def test_good_checkpoints_give_no_false_alarm(name: str, hubs: Path, check: Check) -> None:
    verdict = check(hubs / name)
    assert [*wrong(verdict)] == [kind for model, kind in EXPECTED.items() if model == name]
