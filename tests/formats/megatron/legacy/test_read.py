"""Folders of one rank each are read as the hub's model: weights, moments and masters, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.formats.megatron.legacy.run import LAYERS, STATES, Run, Tensors, write

ALL = tuple(range(LAYERS))
RUNS = {
    "one rank": Run(),
    "tp2": Run(tp=2),
    "tp4, fewer kv heads": Run(tp=4),
    "pp2": Run(pp=2),
    "tp2 pp2": Run(tp=2, pp=2),
    "virtual pipeline": Run(pp=2, vp=2),
    "tp2 and a virtual pipeline": Run(tp=2, pp=2, vp=2),
    "first stage shorter": Run(pp=2, stages=((1, 3),), args={"decoder_first_pipeline_num_layers": 1}),
    "last stage shorter": Run(pp=2, stages=((3, 1),), args={"decoder_last_pipeline_num_layers": 1}),
    "embedding and loss count": Run(pp=3, stages=((1, 2, 1),),
        args={"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
    "layout": Run(pp=2, vp=2, stages=((1, 2), (1, 0)), args={"pipeline_model_parallel_layout": "Et|t*2|t|L"}),
    "layout in words": Run(pp=2, vp=2, stages=((1, 1), (1, 1)), args={"pipeline_model_parallel_layout": "E,(t|)*3,tL"}),
    "tied": Run(tied=True),
    "tied tp2 pp2": Run(tp=2, pp=2, tied=True),
    "biases tp2": Run(tp=2, biased=True),
    "biases and buckets": Run(tp=2, biased=True, bucket=500),
    "bare norms": Run(tp=2, bare_norms=True),
    "experts": Run(sparse=ALL),
    "ep2": Run(ep=2, sparse=ALL),
    "ep2 pp2, one by one": Run(ep=2, pp=2, sparse=ALL, one_by_one=True),
    "tp2 ep2": Run(tp=2, ep=2, sparse=ALL),
    "experts not cut": Run(tp=2, ep=2, etp=1, sparse=ALL),
    "some layers dense": Run(ep=2, tp=2, pp=2, sparse=(1, 3)),
}  # fmt: skip


def _read(folder: Path, out: Path, run: Run) -> Tensors:
    tx.convert(folder, out, to="hf", config=run.config(), optimizer=run.optimizer is not None)
    files = [*out.glob("*.safetensors"), *out.glob("optimizer/*.safetensors")]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "optimizer", [None, *(pytest.param(form, marks=pytest.mark.oracle) for form in ("numbered", "flat"))]
)
@pytest.mark.parametrize("case", RUNS)
def test_all_of_the_model_is_read(case: str, optimizer: str | None, tmp_path: Path) -> None:
    run = replace(RUNS[case], optimizer=optimizer)
    truth = write(run, tmp_path / "run")
    found = _read(tmp_path / "run", tmp_path / "out", run)
    wanted = dict(truth[""])
    for state in STATES if optimizer else ():
        wanted |= {f"optim/{name}/{state}": tensor for name, tensor in truth[state].items()}
    steps = {name for name in found if name.endswith("/step")}
    assert found.keys() - steps == wanted.keys()
    assert len(steps) == (len(truth[""]) if optimizer else 0)
    assert all(found[name].item() == 3 for name in steps)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
