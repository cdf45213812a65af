"""Megatron's training code: its loader, its `train_step`, its checkpoints; in bf16 and in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.formats.megatron.training import peer
from tests.formats.megatron.training.conftest import PYTHON, ROOT
from tests.journeys import trained_models as models
from tests.journeys.record import Journey

PEER = "megatron-core"
VERSION = "0.19.2"
pytestmark = [pytest.mark.peers, pytest.mark.slow]

TEXT = [3, 1, 4, 1, 5, 9, 26, 5]
_DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
_BF16 = f"--bf16 {_DISTRIBUTED}"
_NORMS = "--qk-layernorm"
_LATENT = f"""{_NORMS} --multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4
    --v-head-dim 8 --moe-router-score-function sigmoid --moe-router-num-groups 1 --moe-router-group-topk 1"""
_BALANCED = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --dist-ckpt-strictness ignore_all"


class Case(NamedTuple):
    """A run of Megatron."""

    model_type: str
    words: str = _BF16
    ranks: int = 1
    ahead: int = 0
    """Layers that predict tokens further ahead."""
    refused: str = ""
    """The tensor for which there is no place on the hub."""

    @property
    def resumes(self) -> bool:
        """Whether it takes an optimizer of ours: one with experts is for runs with expert parallelism."""
        experts = self.model_type in ("qwen3_moe", "mixtral", "deepseek_v3")
        return not experts or "--expert-model-parallel-size 2" in self.words


CASES = {
    "llama": Case("llama"),
    "llama in fp32": Case("llama", ""),
    "llama at tp 2": Case("llama", f"{_BF16} --tensor-model-parallel-size 2", 2),
    "llama at pp 2": Case("llama", f"{_BF16} --pipeline-model-parallel-size 2", 2),
    "llama at dp 2": Case("llama", _BF16, 2),
    "tied qwen3": Case("qwen3", f"{_BF16} {_NORMS}"),
    "qwen2 at tp 2": Case("qwen2", f"{_BF16} --tensor-model-parallel-size 2", 2),
    "qwen3_moe at ep 2": Case("qwen3_moe", f"{_BF16} {_NORMS} --expert-model-parallel-size 2", 2),
    "mixtral": Case("mixtral"),
    "qwen3_moe, balanced": Case("qwen3_moe", f"{_BF16} {_NORMS} {_BALANCED}", refused="expert_bias"),
    "deepseek_v3": Case("deepseek_v3", f"{_BF16} {_LATENT}"),
    "deepseek_v3 in fp32": Case("deepseek_v3", _LATENT),
    "deepseek_v3 with MTP": Case("deepseek_v3", f"{_BF16} {_LATENT}", ahead=1),
}
Runs = dict[str, Path]


def _run(case: Case, folder: Path, load: Path, save: str, steps: int, more: int = 0) -> peer.Case:
    distributed = _DISTRIBUTED if save == AGAIN and _DISTRIBUTED not in case.words else ""
    epsilon = json.loads((folder / "hub/config.json").read_text("utf-8"))["rms_norm_eps"]
    words = f"""--load {load} --save {folder / save} --use-checkpoint-args --vocab-size 96 --norm-epsilon {epsilon}
        --make-vocab-size-divisible-by 1 --transformer-impl local {case.words} {distributed}"""
    return peer.Case(str(folder / f"out-{save}"), words, case.ranks, ids=TEXT, steps=steps, more=more, trains=True)


RUN, AGAIN = "run", "again"


def _launch(cases: list[peer.Case]) -> None:
    failed, said = peer.launch(PYTHON, ROOT, cases)
    assert failed == 0, said[-12_000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The folder of each run: begun with the hub's weights, saved after three steps and after four."""
    if not PYTHON.exists():
        pytest.skip(f"Megatron has no environment at {PYTHON}: make megatron")
    found, cases = {}, []
    for name, case in CASES.items():
        folder = found[name] = tmp_path_factory.mktemp("megatron")
        hub = models.hub_folder(case.model_type, folder / "hub", ahead=case.ahead, vocab_size=96)
        kept: dict[str, Any] = {"dtype": "bf16"} if "--bf16" in case.words else {}
        tx.convert(hub, folder / "weights", to="torch_dist", sync=False, **kept)
        cases.append(_run(case, folder, folder / "weights", RUN, models.STEPS, 1))
    _launch(cases)
    return found


@pytest.fixture(scope="module")
def resumed(runs: Runs) -> Runs:
    """The folder of what each run saves that goes on from the hub's format, one step after it."""
    found, cases = {}, []
    for name, folder in runs.items():
        if CASES[name].resumes:
            _to_hub(folder, RUN, models.STEPS, folder / "there")
            tx.convert(folder / "there", folder / "from-hub", to="torch_dist", sync=False)
            cases.append(_run(CASES[name], folder, folder / "from-hub", AGAIN, 1))
            found[name] = folder
    _launch(cases)
    return found


def _to_hub(folder: Path, run: str, steps: int, out: Path) -> None:
    saved = folder / run / f"iter_{steps:07}"
    tx.convert(saved, out, to="hf", config=folder / "hub/config.json", optimizer=True, sync=False)


@pytest.mark.parametrize("name", CASES)
def test_training_code(journey: Journey, name: str, runs: Runs, tmp_path: Path) -> None:
    journey.version = VERSION
    case, folder = CASES[name], runs[name]
    ranks = [torch.load(folder / "out-run" / peer.RANK.format(rank)) for rank in range(case.ranks)]
    journey.passed("convert", "load")
    for found in ranks:
        first, held = found["first"]["parameters"], found["held"]["parameters"]
        still = models.unmoved(first, held)
        assert all(".local_experts." in each for each in still), still  # those without tokens
        assert len(still) < len(held) / 2
        biases = [value for buffer, value in found["buffers"].items() if buffer.endswith("expert_bias")]
        assert all(value.abs().max() > 0 for value in biases)
        assert bool(biases) == (case.model_type == "deepseek_v3" or bool(case.refused))
    journey.passed("train", "save")
    if case.refused:
        with journey.refused("back", "UNEXPECTED_TENSOR", case.refused):
            _to_hub(folder, RUN, models.STEPS + 1, tmp_path / "back")
        return
    _to_hub(folder, RUN, models.STEPS + 1, tmp_path / "back")
    journey.passed("back")
    model = models.loaded(tmp_path / "back").eval()
    with torch.no_grad():
        ours = model(input_ids=torch.tensor([TEXT])).logits[0]
    trained = [found["trained"][:, : ours.shape[1]] for found in ranks if found["trained"] is not None]
    for logits in trained:
        journey.equal("logits", ours, logits)
    if case.ahead:
        before, after = (load_file(each / "model.safetensors") for each in (folder / "hub", tmp_path / "back"))
        assert before.keys() == after.keys()
        still = [each for each, value in before.items() if torch.equal(after[each].float(), value.bfloat16().float())]
        assert all(".experts." in each for each in still), still


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.resumes])
def test_resumed_by_way_of_the_hub(journey: Journey, name: str, resumed: Runs, tmp_path: Path) -> None:
    """The next step is that of the run that never stopped, weights and moments."""
    journey.version = VERSION
    folder = resumed[name]
    for run, side in ((RUN, "wanted"), (AGAIN, "found")):
        _to_hub(folder, run, models.STEPS + 1, tmp_path / side)
    journey.passed("optimizer")
    for file in ("model.safetensors", "optimizer/optimizer.safetensors"):
        wanted, found = (load_file(tmp_path / side / file) for side in ("wanted", "found"))
        extra = {each for each in found.keys() - wanted.keys() if each.endswith("/fp32")}  # copies of fp32 weights
        assert found.keys() - extra == wanted.keys()
        assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
    journey.passed("resume")
