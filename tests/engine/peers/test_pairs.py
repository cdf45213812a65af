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
from tests.oracles.cases import AUTOMODEL, HF, PEERS, TE, TORCHTITAN
from tests.oracles.hub import WEIGHTS, Tensors

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


# DeepSeek-V3's own: layers that predict ahead, the copies they may hold, and its other names.

FAMILY = "deepseek_v3"


COPIES = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
"""What DeepSeek's files also hold for each such layer -> the model's own."""


def _copies(held: Tensors) -> Tensors:
    return {f"model.layers.{layer}.{name}.weight": held[COPIES[name]].clone() for layer in (3, 4) for name in COPIES}


@pytest.mark.parametrize("dialect", [AUTOMODEL, TE])
def test_copies_of_the_embedding_and_the_head_are_never_dropped(dialect: str, tmp_path: Path) -> None:
    case = cases.case(FAMILY, "ahead")
    copies = _copies(case.dialects[HF])
    held = {**case.dialects[HF], **copies}
    source = peers.store(tmp_path / "source", held, case.config)
    out, back = tmp_path / "out", tmp_path / "back"
    tx.convert(source, out, to=dialect, sync=False)
    assert peers.load(out) == peers.bits({**case.dialects[dialect], **copies})
    tx.convert(out, back, to="hf", sync=False)
    assert peers.load(back) == peers.bits(held)


@pytest.mark.parametrize("name", COPIES)
def test_copies_that_differ_from_the_models_own_go_only_where_they_have_a_name(name: str, tmp_path: Path) -> None:
    """Elsewhere the model's own is in their place."""
    case = cases.case(FAMILY, "ahead")
    copies = _copies(case.dialects[HF])
    copies[f"model.layers.4.{name}.weight"][45, 39] += 1
    source = peers.store(tmp_path / "source", {**case.dialects[HF], **copies}, case.config)
    for dialect in (TORCHTITAN, TE, "megatron_layers"):
        with pytest.raises(tx.TransaxleError, match="UNEQUAL_COPIES") as caught:
            tx.convert(source, tmp_path / "refused", to=dialect, sync=False)
        assert [refusal.where.tensor for refusal in caught.value.refusals] == [f"model.layers.4.{name}.weight"]
        assert not (tmp_path / "refused").exists()
        assert 'to="safetensors:identity"' in caught.value.hint
    tx.convert(source, tmp_path / "same", to="safetensors:identity", sync=False)
    assert peers.load(tmp_path / "same") == peers.bits({**case.dialects[HF], **copies})
    tx.convert(source, tmp_path / "out", to=AUTOMODEL, sync=False)
    assert peers.load(tmp_path / "out") == peers.bits({**case.dialects[AUTOMODEL], **copies})


@pytest.mark.parametrize("dialect", [TE])
def test_older_names_of_megatron_are_read(dialect: str, tmp_path: Path) -> None:
    """What megatron-core 0.16 calls the layer inside, as its distributed checkpoints still do."""
    case = cases.case(FAMILY, "ahead")
    newer = case.dialects[dialect]
    older = {name.replace(".mtp_model_layer.", ".transformer_layer."): value for name, value in newer.items()}
    assert older.keys() != newer.keys()
    source = peers.store(tmp_path / "source", older, case.config)
    tx.convert(source, tmp_path / "out", to="hf", sync=False, dialect=dialect)
    assert peers.load(tmp_path / "out") == peers.bits(case.dialects[HF])


@pytest.mark.parametrize("lost", ["model.layers.4.mlp.experts.5.up_proj.weight", "model.layers.3.mlp.gate.weight"])
def test_half_a_layer_that_predicts_ahead_is_incomplete(lost: str, tmp_path: Path) -> None:
    case = cases.case(FAMILY, "ahead")
    held = {name: value for name, value in case.dialects[HF].items() if name != lost}
    source = peers.store(tmp_path / "source", held, case.config)
    with pytest.raises(tx.TransaxleError, match="MISSING_TENSOR") as caught:
        tx.convert(source, tmp_path / "out", to=HF, sync=False)
    assert lost in str(caught.value)
