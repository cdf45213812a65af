"""Writes `vllm_state.json`: the names in the files of vLLM's `ShardedStateLoader`, for each family.

    python -m tests.oracles.vllm_peer.run FOLDER; python -m tests.oracles.vllm_peer.run FOLDER NAME+tied NAME+biased …
    python -m tests.oracles.vllm_peer.state_table FOLDER

The first line runs in vLLM's environment, the second in that of the tests.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import safe_open

from tests.oracles.vllm_peer.models import model_named
from tests.oracles.vllm_peer.run import BUFFER, HUB, SAID
from transaxle.axes.layout.bind import bind
from transaxle.axes.notation.family import Sizes
from transaxle.engine.checkpoint.recognise import recognise
from transaxle.engine.plan import rank_parts
from transaxle.engine.plan.rank_parts import FamilyState, pattern_of
from transaxle.families import builtin

_VLLM = "0.32.0"
_TABLE = Path(__file__).parents[3] / "src/transaxle/engine/plan/vllm_state.json"
_SCALES = frozenset({"_k_scale", "_prob_scale", "_q_scale", "_v_scale"})
_FIRST = ("qkv_proj.weight", "o_proj.weight")
"""Ends of tensors that are preferred to say which layers have attention."""


class _IrregularError(Exception):
    """The state dict cannot be described by patterns."""


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(rank_parts._INDEX.findall(name))


@dataclass(frozen=True)
class _Seen:
    """What vLLM saves of models of a family."""

    same: frozenset[str]
    renamed: Mapping[str, str]
    """As in `FamilyState`."""
    anchors: Mapping[str, frozenset[str]]
    """Module with scales -> the tensors that exactly the layers with such a module have."""

    def merge(self, other: _Seen) -> _Seen:
        """Return what is known from two models of a family."""
        renamed = {**self.renamed, **other.renamed}
        if any(self.renamed.get(name, new) != new for name, new in other.renamed.items()):
            raise _IrregularError("models of the family save a tensor under different names")
        same = self.same | other.same
        for name in same & renamed.keys():
            if renamed[name] not in same:
                raise _IrregularError(f"{name} is saved under two names, and no other tensor decides which")
        common = {module: found & other.anchors.get(module, found) for module, found in self.anchors.items()}
        return _Seen(same, renamed, {**other.anchors, **common})

    def state(self) -> FamilyState:
        """Return the line of the table."""
        if lone := [module for module, found in self.anchors.items() if not found]:
            raise _IrregularError(f"no tensor says which layers have {min(lone)}")
        scales = {
            module: min(found, key=lambda each: (not each.endswith(_FIRST), each))
            for module, found in self.anchors.items()
        }
        return FamilyState(self.same, self.renamed, scales)


def _describe(saved_names: Mapping[str, str], dialect_names: Collection[str]) -> _Seen:
    """Describe what vLLM saves of a model.

    Args:
        saved_names: name in the state dict -> name under which the tensor is saved.
        dialect_names: those names that the dialect has.
    """
    renamed: dict[str, str] = {}
    same: set[str] = set()
    left = set(saved_names.values())
    for name in dialect_names:
        saved = saved_names[name]
        left.discard(saved)
        if saved == name:
            same.add(pattern_of(name))
            continue
        regular = _numbers(saved) == _numbers(name)
        if not regular or renamed.setdefault(pattern_of(name), pattern_of(saved)) != pattern_of(saved):
            raise _IrregularError(f"{name} is saved as {saved}, which follows no pattern")
    if twice := same & renamed.keys():
        raise _IrregularError(f"{min(twice)} is saved under two names")
    layers: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
    for name in left:
        module, _, scale = name.rpartition(".")
        if scale not in _SCALES:
            raise _IrregularError(f"{pattern_of(name)} is saved too, which the dialect lacks")
        layers[pattern_of(f"{module}.")[:-1]].add(_numbers(f"{module}."))
    anchors = {module: _anchors(module, found, dialect_names) for module, found in layers.items()}
    return _Seen(frozenset(same), renamed, anchors)


def _anchors(module: str, layers: set[tuple[str, ...]], names: Collection[str]) -> frozenset[str]:
    """Return the patterns of the tensors that exactly those layers have, in the same part of the layer."""
    by_pattern: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
    for name in names:
        by_pattern[pattern_of(name)].add(_numbers(name))
    parent = f"{{}}.{module.rpartition('{}.')[2].partition('.')[0]}."
    fitting = (each for each, found in by_pattern.items() if found == layers)
    return frozenset(each for each in fitting if parent in each or each.endswith(_FIRST))


def _read(folder: Path) -> tuple[str, _Seen]:
    """Return the family of a model, and what vLLM saves of it, at whatever degree of parallelism.

    Raises:
        _IrregularError: if ranks or degrees differ.
    """
    config: dict[str, Any] = json.loads((folder / HUB / "config.json").read_text("utf-8"))
    states: list[_Seen] = []
    family = ""
    for path in sorted(folder.glob("*-*-*.json")):
        saved_names: dict[str, str] = json.loads(path.read_text("utf-8"))
        with safe_open(path.with_suffix(".safetensors"), "pt") as file:
            names = list(file.keys())
        parameters = [name for name in names if not name.startswith(BUFFER)]
        reading = recognise(parameters, config, builtin(), None, "vllm")
        family = reading.family.name
        buffers = [name.removeprefix(BUFFER) for name in names if name.startswith(BUFFER)]
        bound = bind(buffers, reading.family, reading.dialect, Sizes(reading.family, config))
        known = [name for found in bound.names.values() for name in found.values()]
        states.append(_describe(saved_names, [*parameters, *known]))
    if any(state != states[0] for state in states):
        raise _IrregularError(f"{family}: names depend on the number of ranks")
    return family, states[0]


def _family(folder: Path) -> str:
    """Return the family of a model by its config."""
    config = json.loads((folder / HUB / "config.json").read_text("utf-8"))
    return next(iter(builtin().of_types([config["model_type"]]))).name


def main(folder: Path) -> None:
    """Write the table from the folder with what vLLM saved."""
    seen: dict[str, _Seen] = {}
    refused: dict[str, str] = {}
    for model in sorted(each for each in folder.iterdir() if (each / SAID).exists()):
        if json.loads((model / SAID).read_text("utf-8")):
            continue
        try:
            if model_named(model.name).left:
                raise _IrregularError("vLLM leaves some of its parameters as they were when it was built")
            family, found = _read(model)
            seen[family] = seen[family].merge(found) if family in seen else found
        except _IrregularError as error:
            refused[_family(model)] = str(error)
    families: dict[str, FamilyState] = {}
    for family in sorted(seen.keys() - refused.keys()):
        try:
            families[family] = seen[family].state()
        except _IrregularError as error:
            refused[family] = str(error)
    table = {"vllm": _VLLM, "families": families, "refused": dict(sorted(refused.items()))}
    text = msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(table, order="sorted")), indent=1)
    _TABLE.write_bytes(text + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
