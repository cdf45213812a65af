"""A hub's weights in Megatron: its training code loads what is written, by `--load` and no sizes on the command line.

Parameters are compared with `legacy.run`, which says in plain operations what each rank holds, logits with those of
transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

import transaxle as tx
from tests.formats.megatron.legacy.run import LAYERS, MULTIPLE, VOCABULARY, Rank, Run, Tensors, module
from tests.formats.megatron.training import peer
from tests.formats.megatron.training.conftest import Megatron, model
from tests.oracles.quiet import quiet

ALL = tuple(range(LAYERS))
MODELS = {
    "llama": Run(),
    "tied": Run(tied=True),
    "biases": Run(biased=True),
    "experts": Run(sparse=ALL),
    "mixed": Run(sparse=(1, 3)),
}
TEXT = [3, 1, 4, 1, 5, 9, 26, 5]


class Load(NamedTuple):
    """How a model is loaded."""

    model: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    te: bool = False
    """With the modules of Transformer Engine, of which the compiled part has a stand-in: nothing is computed."""
    padded: bool = False
    """The folder has a padded vocabulary, and the run is not told how to pad."""

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.ep

    def words(self, folder: Path) -> str:
        pad = "" if self.padded else f"--make-vocab-size-divisible-by {MULTIPLE}"
        return f"""--load {folder} --use-checkpoint-args --vocab-size {VOCABULARY - 1} {pad}
            --transformer-impl {"transformer_engine" if self.te else "local"} --tensor-model-parallel-size {self.tp}
            --pipeline-model-parallel-size {self.pp} --expert-model-parallel-size {self.ep}
            --norm-epsilon 1e-6 {"--qk-layernorm" if MODELS[self.model].sparse else ""} --finetune"""

    def __str__(self) -> str:
        given = [f"{name}{size}" for name, size in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep)) if size > 1]
        return " ".join([self.model, *given, *["TE"] * self.te, *["padded"] * self.padded])


LOADS = [
    Load("llama"),
    Load("llama", tp=2),
    Load("llama", tp=2, pp=2),
    Load("llama", tp=2, padded=True),
    Load("tied", tp=2, pp=2),
    Load("biases", tp=2),
    Load("experts"),
    Load("experts", ep=2),
    Load("mixed", pp=2, ep=2),
    Load("llama", tp=2, pp=2, te=True),
    Load("experts", pp=2, ep=2, te=True),
    Load("mixed", ep=2, te=True),
]

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensors]]:
    """Every model's folder and tensors."""
    found = {}
    for number, (name, run) in enumerate(MODELS.items()):
        folder = tmp_path_factory.mktemp("hub") / name
        found[name] = (folder, model(run, folder, number))
    return found


@pytest.fixture(scope="module")
def loaded(
    hubs: dict[str, tuple[Path, Tensors]], megatron: Megatron, tmp_path_factory: pytest.TempPathFactory
) -> dict[Load, list[dict[str, Any]]]:
    """What the ranks of every case say that they have."""
    folder = tmp_path_factory.mktemp("megatron")
    cases: dict[Load, peer.Case] = {}
    for number, load in enumerate(LOADS):
        kind = "padded" if load.padded else "plain"
        written = folder / f"{load.model}-{kind}"
        if not written.exists():
            pad: dict[str, Any] = {"make_vocab_size_divisible_by": MULTIPLE, "tp": 2} if load.padded else {}
            tx.convert(hubs[load.model][0], written, to="torch_dist", sync=False, **pad)
        ids = [] if load.te else TEXT
        cases[load] = peer.Case(str(folder / f"out{number}"), load.words(written), load.ranks, load.te, ids)
    for te in (False, True):
        megatron([case for case in cases.values() if case.te is te])
    return {
        load: [torch.load(Path(case.out, peer.RANK.format(rank))) for rank in range(case.ranks)]
        for load, case in cases.items()
    }


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_every_parameter_is_the_hub_s(
    load: Load, hubs: dict[str, tuple[Path, Tensors]], loaded: dict[Load, list[dict[str, Any]]]
) -> None:
    made = MODELS[load.model]
    run = Run(
        load.tp, load.pp, load.ep, tied=made.tied, biased=made.biased, sparse=made.sparse, bare_norms=not load.te,
        one_by_one=not load.te,
    )  # fmt: skip
    for found in loaded[load]:
        wanted = module(run, Rank(*found["place"]), 0, hubs[load.model][1])
        assert found["first"]["parameters"].keys() == wanted.keys()
        for name, value in found["first"]["parameters"].items():
            assert torch.equal(value, wanted[name]), (found["place"], name)
        assert found["padded"] == MULTIPLE * load.tp * -(-VOCABULARY // (MULTIPLE * load.tp))


@pytest.mark.parametrize("load", [load for load in LOADS if not load.te], ids=str)
def test_logits_are_those_of_transformers(
    load: Load, hubs: dict[str, tuple[Path, Tensors]], loaded: dict[Load, list[dict[str, Any]]]
) -> None:
    with quiet(), torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(hubs[load.model][0], dtype=torch.float32).eval()
        wanted = reference(torch.tensor([TEXT])).logits[0]
    computed = [found["logits"] for found in loaded[load] if found["place"][1] == load.pp - 1]
    assert computed
    for logits in computed:
        assert float((logits[:, :VOCABULARY] - wanted).abs().max()) < 1e-5
