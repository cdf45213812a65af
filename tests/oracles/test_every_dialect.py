"""Every dialect of every family is compared with its peer, and the documentation says with which."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from pkgutil import iter_modules

import pytest

from tests.oracles import automodel_peer, cases, torchtitan_peer, torchtitan_pictures
from tests.oracles.every_dialect import ALIKE, NOT_COMPARED, lists, recorded, rows
from tests.oracles.peer_bytes import differing
from tests.oracles.tiny_models import made
from transaxle.families import builtin

pytestmark = pytest.mark.skipif(bool(cases.MISSING), reason=f"not installed: {', '.join(cases.MISSING)}")


def _recorded() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for dialect, _, _, _, families in recorded()["oracles"]:
        found[dialect].update(families)
    return found


def test_no_dialect_is_without_an_oracle() -> None:
    shipped = {(label, name) for name, entry in builtin().entries.items() for label in entry.dialects if label != "hf"}
    assert shipped == set(lists())


def test_without_experts_te_is_megatron() -> None:
    for family in (builtin()[name] for name in cases.DENSE):
        te, megatron = family.dialect(cases.TE), family.dialect(cases.MEGATRON)
        assert te is not None
        assert megatron is not None
        assert [line.text for line in te.lines] == [line.text for line in megatron.lines]


def test_the_record_is_of_the_lists() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for dialect, family in lists():
        found[dialect].add(family)
    assert _recorded() == found, "python -m tests.oracles.every_dialect writes it"


def test_every_model_of_automodel_is_compared_or_named() -> None:
    said = {what.partition(",")[0] for dialect, *_, what, _ in recorded()["oracles"] if dialect == cases.AUTOMODEL}
    compared = {name for name in said if " " not in name} | ALIKE.keys()
    assert not compared & NOT_COMPARED.keys()
    assert automodel_peer.models() == compared | NOT_COMPARED.keys()
    assert recorded()["automodel besides"] == [list(each) for each in sorted(NOT_COMPARED.items())]


def test_every_model_of_torchtitan_is_compared_or_named() -> None:
    import torchtitan.models

    compared = {package for package, _ in torchtitan_pictures.ADAPTERS.values()} | torchtitan_peer.PACKAGES
    packages = {module.name for module in iter_modules(torchtitan.models.__path__) if module.ispkg}
    assert packages == compared | {"common", "flux"}  # Flux makes pictures: it has no adapter


@pytest.mark.peers
def test_models_that_are_alike_hold_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Automodel takes the sizes of Hy-MT2 for what tells it from Hy3."""
    model, stored, config = made("hy_v3", {}, tmp_path, more={"moe_router_enable_expert_bias": True})
    config |= {"expert_hidden_dim": config["moe_intermediate_size"], "enable_lm_head_fp32": True}
    expected = automodel_peer.held(config, stored, model)
    monkeypatch.setattr("nemo_automodel.components.models.hy_mt2.dispatch.is_hy_mt2_config", lambda _: True)
    other = automodel_peer.own(config)
    assert [type(other).__name__] == list(ALIKE)
    assert differing(automodel_peer.held(config, stored, model), expected) == []


@pytest.mark.oracle
def test_the_record_is_what_is_compared() -> None:
    assert rows() == recorded()["oracles"]
