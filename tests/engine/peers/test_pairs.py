"""Every dialect into every other, bit by bit what the peers themselves make of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import transaxle as tx
from tests.engine.peers import compared as peers
from tests.engine.peers.compared import every_case, every_family
from tests.oracles import VARIANTS, cases
from tests.oracles.automodel_peer import HEAD
from tests.oracles.cases import HF, PEERS
from tests.oracles.hub import WEIGHTS

pytestmark = peers.pytestmark


CONFIGLESS = {
    "llama": 8, "qwen2": 6, "qwen3": 25, "mixtral": 2, "qwen3_moe": 30, "step3p5": 2, "deepseek_v3": 0, "gpt_oss": 30,
    "phi3": 0, "gemma3": 2, "glm4_moe": 6,
}  # fmt: skip
"""Pairs that need no config: what they move apart is told by shapes. Latent attention always needs one: a dim holds two
parts per head, and no shape tells how wide each is. So does one projection for q, k and v."""


def _stored(folder: Path, family: str, variant: str, *, config: bool = True) -> dict[str, Path]:
    case = cases.case(family, variant)
    dialects = peers.held(family, variant)
    given = case.config if config else None
    return {label: peers.store(folder / label, tensors, given) for label, tensors in dialects.items()}


@pytest.mark.oracle
@every_case
def test_every_pair_is_bit_for_bit_what_the_peer_has(family: str, variant: str, tmp_path: Path) -> None:
    """The dialect of the source is said only where its names leave a choice."""
    wanted = {label: peers.bits(tensors) for label, tensors in peers.held(family, variant).items()}
    sources = _stored(tmp_path, family, variant)
    for source, target in peers.pairs(family, variant):
        out = tmp_path / f"{source} to {target}"
        with tx.open(sources[source]) as checkpoint:
            said: dict[str, Any] = {} if checkpoint.dialect else {"dialect": source}
        report = tx.convert(sources[source], out, to=target, sync=False, **said)
        assert peers.load(out) == wanted[target], (source, target)
        assert report.dialect.startswith(target)


@every_case
def test_which_dialect_is_recognised(family: str, variant: str, tmp_path: Path) -> None:
    """The names are those of one dialect, or of dialects that read them alike; a tied head may be there or not."""
    names = {label: tensors.keys() - {HEAD} for label, tensors in peers.held(family, variant).items()}
    for label, path in _stored(tmp_path, family, variant).items():
        with tx.open(path) as checkpoint:
            assert checkpoint.family == family
            found = checkpoint.dialect
        assert found is not None, label
        assert names[label] == names[found if found in names else found.partition("@")[0]]


@pytest.mark.oracle
@pytest.mark.parametrize("variant", ["asymmetric", "square"])
@every_family
def test_without_a_config_sizes_come_from_the_shapes(family: str, variant: str, tmp_path: Path) -> None:
    """What a conversion need not know it does not ask for; what it must know it never guesses."""
    wanted = {label: peers.bits(tensors) for label, tensors in peers.held(family, variant).items()}
    sources = _stored(tmp_path, family, variant, config=False)
    done = 0
    for source, target in peers.pairs(family, variant):
        out = tmp_path / f"{source} to {target}"
        try:
            tx.convert(sources[source], out, to=target, sync=False, family=family, dialect=source)
        except tx.TransaxleError as error:
            codes = {refusal.code for refusal in error.refusals}
        else:
            codes, done = set(), done + 1
            assert peers.load(out) == wanted[target], (source, target)
        assert codes <= {"UNKNOWN_AXIS"}, (source, target)
    assert done >= CONFIGLESS[family]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("family", "variant"), [(f, v) for f in VARIANTS for v in ("asymmetric", "tied", "ahead") if v in VARIANTS[f]]
)
def test_peers_take_our_files_back(family: str, variant: str, tmp_path: Path) -> None:
    """Their own converter, on what we wrote, gives the Hugging Face tensors."""
    case = cases.case(family, variant)
    source = peers.store(tmp_path / HF, case.dialects[HF], case.config)
    for dialect in peers.held(family, variant).keys() & PEERS.keys():
        out = tmp_path / dialect
        tx.convert(source, out, to=dialect, sync=False)
        back = cases.to_hf(dialect, case.config, load_file(out / WEIGHTS))
        assert peers.bits(back) == peers.bits(case.dialects[HF]), dialect
