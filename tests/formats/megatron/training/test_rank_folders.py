"""Megatron's own folders of one rank each: its training code loads ours, and what it saves there is read bit by bit.

A run loads a hub's weights, makes two steps, saves, makes a third and saves again. The truth is torch's AdamW on whole
tensors. What it saved first goes to other degrees, in such folders again, and the third step from there is the same.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.adamw import adamw

import transaxle as tx
from tests.formats.megatron.legacy.run import LAYERS, MULTIPLE, VOCABULARY, Rank, Run, Tensors, module
from tests.formats.megatron.training import peer
from tests.formats.megatron.training.conftest import Megatron, model
from tests.oracles import hub

ALL = tuple(range(LAYERS))
MODELS = {"llama": Run(), "tied": Run(tied=True), "biases": Run(biased=True), "experts": Run(sparse=ALL)}
STEPS = 2
LR, LOWEST, SCHEDULE, BATCH = 1e-3, 1e-4, 800, 8
"""Highest and lowest rate, samples from the one to the other, and samples of a step: those of `peer`."""
BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.01

pytestmark = pytest.mark.megatron


class Way(NamedTuple):
    """A run, and how it goes on."""

    model: str
    degrees: tuple[int, int, int]
    """Of tensor, pipeline and expert parallelism."""
    others: tuple[int, int, int] | None = None
    """When it goes on; None for experts one by one: their optimizer is written for `--moe-grouped-gemm`, on a GPU."""
    copies: int = 1
    """Data-parallel ranks of dense parameters, beside those that share out experts."""
    flat: bool = False
    """With the distributed optimizer, up to where it stops."""


WAYS = [
    Way("llama", (2, 2, 1), (1, 2, 1)),
    Way("llama", (2, 2, 1), (2, 1, 1), flat=True),
    Way("llama", (2, 1, 1), (2, 2, 1), copies=2, flat=True),
    Way("tied", (1, 2, 1), (2, 1, 1)),
    Way("tied", (1, 2, 1), (1, 1, 1), flat=True),
    Way("biases", (2, 1, 1), (1, 1, 1), flat=True),
    Way("experts", (1, 1, 2)),
    Way("experts", (2, 1, 2)),
    Way("experts", (1, 1, 2), copies=2, flat=True),
]
GO_ON = [way for way in WAYS if way.others]


def _case(
    way: Way, degrees: tuple[int, int, int], load: Path, folder: Path, *, flat: bool, copies: int, steps: int, more: int
) -> peer.Case:
    tp, pp, ep = degrees
    words = f"""--load {load} --save {folder / "run"} --use-checkpoint-args --ckpt-format torch --bf16
        --vocab-size {VOCABULARY - 1} --make-vocab-size-divisible-by {MULTIPLE} --transformer-impl local
        --norm-epsilon 1e-6 {"--qk-layernorm" if MODELS[way.model].sparse else ""}
        --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --expert-model-parallel-size {ep}
        --expert-tensor-parallel-size {tp} {"--use-distributed-optimizer" if flat else ""}"""
    return peer.Case(str(folder / "out"), words, tp * pp * ep * copies, steps=steps, more=more)


def _written(source: Path, out: Path, degrees: tuple[int, int, int], **options: Any) -> None:
    tp, pp, ep = degrees
    given: dict[str, Any] = {"tp": tp, "pp": pp, "ep": ep, "make_vocab_size_divisible_by": MULTIPLE, **options}
    tx.convert(source, out, to="megatron_torch", sync=False, **given)


@pytest.fixture(scope="module")
def runs(megatron: Megatron, tmp_path_factory: pytest.TempPathFactory) -> dict[Way, Path]:
    """The folder of each run."""
    found, cases = {}, []
    for number, way in enumerate(WAYS):
        folder = found[way] = tmp_path_factory.mktemp("run")
        model(MODELS[way.model], folder / "hub", number)
        _written(folder / "hub", folder / "weights", way.degrees, dtype="bf16")
        how = way, way.degrees, folder / "weights", folder
        cases.append(_case(*how, flat=way.flat, copies=way.copies, steps=STEPS, more=1))
    megatron(cases)
    return found


@pytest.fixture(scope="module")
def resumed(runs: dict[Way, Path], megatron: Megatron, tmp_path_factory: pytest.TempPathFactory) -> dict[Way, Path]:
    """The folder of each run that went on."""
    found, cases = {}, []
    for way in GO_ON:
        assert way.others is not None
        folder, begun = tmp_path_factory.mktemp("resumed"), runs[way]
        found[way] = folder
        config = begun / "hub" / "config.json"
        _written(begun / "run" / f"iter_{STEPS:07d}", folder / "there", way.others, config=config)
        how = way, way.others, folder / "there", folder
        cases.append(_case(*how, flat=False, copies=1, steps=1, more=0))
    megatron(cases)
    return found


def _after(weights: Tensors, steps: int) -> Tensors:
    """What torch's arithmetic makes of whole tensors."""
    found: Tensors = {}
    for name, weight in weights.items():
        low, master = weight.bfloat16(), weight.bfloat16().float()
        first, second = torch.zeros_like(master), torch.zeros_like(master)
        for step in range(steps):
            rate = LOWEST + (LR - LOWEST) * 0.5 * (math.cos(math.pi * step * BATCH / SCHEDULE) + 1.0)
            decay = DECAY if weight.dim() > 1 else 0.0
            gradient, counted = low.float() * peer.GRADIENT, torch.tensor(float(step))
            adamw(
                [master], [gradient], [first], [second], [], [counted], foreach=False, amsgrad=False, beta1=BETAS[0],
                beta2=BETAS[1], lr=rate, weight_decay=decay, eps=EPS, maximize=False,
            )  # fmt: skip
            low = master.bfloat16()
        state = {"fp32": master, "exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(steps)}
        found |= {name: low, **{f"optim/{name}/{key}": value for key, value in state.items()}}
    return found


def _is_truth(iteration: Path, begun: Path, out: Path, steps: int) -> None:
    tx.convert(iteration, out, to="hf", config=begun / "hub" / "config.json", optimizer=True, sync=False)
    found = {name: value for file in out.rglob("*.safetensors") for name, value in load_file(file).items()}
    wanted = _after(load_file(begun / "hub" / hub.WEIGHTS), steps)
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name].to(value.dtype), value)] == []


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_it_loads_ours(way: Way, runs: dict[Way, Path]) -> None:
    folder, made, (tp, pp, ep) = runs[way], MODELS[way.model], way.degrees
    run = Run(tp, pp, ep, tied=made.tied, biased=made.biased, sparse=made.sparse, bare_norms=True, one_by_one=True)
    weights = {name: value.bfloat16() for name, value in load_file(folder / "hub" / hub.WEIGHTS).items()}
    for number in range(tp * pp * ep * way.copies):
        found = torch.load(folder / "out" / peer.RANK.format(number))
        wanted = module(run, Rank(*found["place"]), 0, weights)
        assert found["first"]["parameters"].keys() == wanted.keys()
        assert all(torch.equal(found["first"]["parameters"][name], value) for name, value in wanted.items())


@pytest.mark.oracle
@pytest.mark.parametrize("steps", [STEPS, STEPS + 1])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_it_saves_is_read(way: Way, steps: int, runs: dict[Way, Path], tmp_path: Path) -> None:
    _is_truth(runs[way] / "run" / f"iter_{steps:07d}", runs[way], tmp_path / "out", steps)


@pytest.mark.parametrize("way", GO_ON, ids=str)
def test_the_next_step_is_that_of_a_run_that_never_stopped(
    way: Way, runs: dict[Way, Path], resumed: dict[Way, Path], tmp_path: Path
) -> None:
    _is_truth(resumed[way] / "run" / f"iter_{STEPS + 1:07d}", runs[way], tmp_path / "out", STEPS + 1)
