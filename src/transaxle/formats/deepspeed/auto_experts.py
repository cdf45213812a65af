"""Restores the module that DeepSpeed's AutoEP replaced: the names and shapes that the model had before.

AutoEP (`expert_parallel` in DeepSpeed's config) replaces each mixture of experts in a model of transformers. On each
expert-parallel rank, the weights of the rank's experts are three parameters, and the router has another name:

    model.layers.0.mlp.experts.w1, w3, w2     gate, up and down of the rank's experts: [experts, rows, columns]
    model.layers.0.mlp.router.gate.weight     the router, which is also `mlp.gate.gate.weight` in the module
    model.layers.0.mlp.shared_experts.        with shared_experts_gate in place of shared_expert_gate

Model files store these names, and files of experts `model.layers.0.mlp.experts.w1.5` for the expert 5 of the whole
model. Under ZeRO-1 and ZeRO-2, moments and masters are in the same flat buffers as those of other parameters. Files
`expp_rank_*_optim_states.pt` then contain no state (`optimizer: None`).

The module has one tensor for gate and up of all experts, and one for down, as in transformers. This module recognises
the presets of AutoEP only, because only their names are known.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from transaxle.errors import Faults, refuse
from transaxle.formats.catalog import Entry, Shape, Twin
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.keys import CheckedValue

_INSIDE = re.compile(r"(model\.layers\.\d+\.mlp)(?:\.(.+))?", re.DOTALL)
"""Pattern of the tensor names in mixtures that AutoEP's presets find: the path of the mixture, and the name inside the
mixture.
"""
_OWN_NAMES = ("moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2", "expert_w3",
              "shared_experts_pattern", "shared_experts_gate_pattern")  # fmt: skip
"""Settings of AutoEP in which a user names the parts of mixtures; without them, AutoEP uses the names of its presets.
"""
_NAMED_HINT = "Load the checkpoint with DeepSpeed, and save the model's weights with save_pretrained."
_GATE, _DOWN, _UP = "w1", "w2", "w3"
_GATE_UP_BEFORE, _DOWN_BEFORE = "gate_up_proj", "down_proj"
_EXPERTS = "experts."
_PARAMETERS = frozenset(f"{_EXPERTS}{weight}" for weight in (_GATE, _DOWN, _UP))
_ROUTER, _SECOND_ROUTER, _LINEAR = "router.", "gate.", "gate."
_BEFORE = {"shared_experts.": "shared_expert.", "shared_experts_gate.": "shared_expert_gate."}
"""Prefix of a name in AutoEP's mixtures with gated shared experts -> prefix that the name had before AutoEP replaced
the module.
"""
_MAX_EXPERTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Mixture:
    """One mixture of experts that AutoEP replaced."""

    path: str
    """Path of the mixture in the module, such as `model.layers.0.mlp`."""
    by_rank: tuple[tuple[int, ...], ...]
    """For each expert-parallel rank, the numbers of its experts in the order of its parameters."""
    gated: bool
    """Whether the shared experts have a gate, as in the families of Qwen."""

    @property
    def count(self) -> int:
        """Number of experts."""
        return sum(map(len, self.by_rank))


@dataclass(frozen=True, slots=True)
class AutoExperts:
    """All mixtures of a model that AutoEP replaced."""

    mixtures: Mapping[str, Mixture] = field(default_factory=dict)
    """Path of a mixture -> the mixture."""

    def mixture_of(self, name: str) -> Mixture | None:
        """Return the mixture of a rank's parameter of experts; None for any other parameter."""
        mixture, inner = self._inside(name)
        return mixture if inner in _PARAMETERS else None

    def parts(self, name: str, shape: Shape, rank: int, file: str) -> Iterator[tuple[str, Shape]]:
        """Yield the name and the shape of each expert's part of a rank's parameter, in the order of the parameter.

        Args:
            name: the parameter's name.
            shape: the parameter's shape on the rank.
            rank: the expert-parallel rank.
            file: name of the file that states the shape, for error messages.

        Raises:
            Refused: with the code CORRUPT if the number of experts in the parameter differs from the number of the
                rank's experts.
        """
        mixture = self.mixture_of(name)
        numbers = () if mixture is None or rank >= len(mixture.by_rank) else mixture.by_rank[rank]
        if len(shape) != 3 or len(numbers) != shape[0]:
            message = f"its shape is {list(shape)}, but expert-parallel rank {rank} has {len(numbers)} experts"
            raise refuse("CORRUPT", message, file=file, tensor=name)
        for number in numbers:
            yield f"{name}.{number}", shape[1:]

    def restore(self, entries: Mapping[str, Entry], path: str, faults: Faults) -> dict[str, Entry]:
        """Return tensors under the names that the module had before AutoEP replaced parts of it.

        Args:
            entries: name -> tensor.
            path: the checkpoint's path, for error messages.
            faults: list of faults, to which a problem with an expert is added.
        """
        restored: dict[str, Entry] = {}
        for name, entry in entries.items():
            mixture, inner = self._inside(name)
            if mixture is None:
                restored[name] = entry
            elif not inner.startswith((_SECOND_ROUTER, _EXPERTS)):
                new_name = self.name_before(name)
                restored[new_name] = replace(entry, name=new_name)
        for mixture in self.mixtures.values():
            restored |= _stack(mixture, entries, path, faults)
        return restored

    def second_routers(self, entries: Mapping[str, Entry]) -> Iterator[Twin]:
        """Yield the tensors of routers that the module has under two names, as pairs that must be equal."""
        for name, entry in entries.items():
            mixture, inner = self._inside(name)
            if mixture is not None and inner.startswith(_SECOND_ROUTER):
                first = entries.get(f"{mixture.path}.{_ROUTER}{inner.removeprefix(_SECOND_ROUTER)}")
                if first is not None and (first.dtype, first.shape) == (entry.dtype, entry.shape):
                    yield Twin(first, entry, "the module has this router under two names")

    def names_before(self, names: Sequence[str]) -> list[str]:
        """Return the names that parameters had before AutoEP replaced parts of the module, without duplicates."""
        return list(dict.fromkeys(map(self.name_before, names)))

    def name_before(self, name: str) -> str:
        """Return the name that a parameter had before AutoEP replaced parts of the module."""
        mixture, inner = self._inside(name)
        if mixture is None:
            return name
        if inner.startswith(_EXPERTS):
            weight = inner.removeprefix(_EXPERTS).partition(".")[0]
            return f"{mixture.path}.{_EXPERTS}{_DOWN_BEFORE if weight == _DOWN else _GATE_UP_BEFORE}"
        if inner.startswith(_ROUTER):
            inner = f"gate.{inner.removeprefix(_ROUTER).removeprefix(_LINEAR)}"
        for now, before in _BEFORE.items() if mixture.gated else ():
            if inner.startswith(now):
                inner = before + inner.removeprefix(now)
        return f"{mixture.path}.{inner}"

    def _inside(self, name: str) -> tuple[Mixture | None, str]:
        """Return the mixture that contains a tensor, and the tensor's name in it; None and an empty name for others."""
        match = _INSIDE.fullmatch(name)
        mixture = None if match is None or match[2] is None else self.mixtures.get(match[1])
        return mixture, match[2] if mixture is not None and match is not None else ""


def _stack(mixture: Mixture, entries: Mapping[str, Entry], path: str, faults: Faults) -> dict[str, Entry]:
    """Return the tensors of all experts of a mixture, gate above up, if any of the experts' tensors exists."""
    stacked: dict[str, Entry] = {}
    for new_name, weights in ((_GATE_UP_BEFORE, (_GATE, _UP)), (_DOWN_BEFORE, (_DOWN,))):
        names = [
            [f"{mixture.path}.{_EXPERTS}{weight}.{expert}" for weight in weights] for expert in range(mixture.count)
        ]
        missing = [name for pair in names for name in pair if name not in entries]
        if len(missing) == len(names) * len(weights):
            continue
        if missing:
            faults.add("INCOMPLETE", f"no file has it, though files have other experts ({len(missing)} are missing)",
                       path, missing[0])  # fmt: skip
            continue
        parts = [entries[name] for pair in names for name in pair]
        if len({(part.dtype, part.shape) for part in parts}) > 1 or len(parts[0].shape) not in (0, 2):
            faults.add("SHAPE_MISMATCH", "the experts' tensors differ in shape or dtype", path, names[0][0])
            continue
        name = f"{mixture.path}.{_EXPERTS}{new_name}"
        stacked[name] = _stack_parts(name, [[entries[part] for part in pair] for pair in names])
    return stacked


def _stack_parts(name: str, experts: Sequence[Sequence[Entry]]) -> Entry:
    """Return the tensor whose row of an expert contains the expert's tensors, one below the next."""
    first = experts[0][0]
    if not first.shape:  # a number such as the step, which is equal for all experts
        return replace(first, name=name)
    rows, columns = first.shape
    extents = tuple(
        replace(
            extent,
            start=(number, extent.start[0] + rows * at, extent.start[1]),
            shape=(1, *extent.shape),
            strides=None if extent.strides is None else (rows * columns, *extent.strides),
        )
        for number, parts in enumerate(experts)
        for at, part in enumerate(parts)
        for extent in part.extents
    )
    return Entry(name, first.dtype, (len(experts), rows * len(experts[0]), columns), extents)


def read_auto_experts(root: CheckedValue, names: Iterable[str]) -> AutoExperts:
    """Return the mixtures that AutoEP replaced in a model, as its model file describes them.

    Args:
        root: contents of the model file.
        names: names of the module's tensors and parameters.

    Raises:
        Refused: with the code CORRUPT if the description is malformed; with the code UNSUPPORTED if the names or the
            layout of the experts are not known.
    """
    listed = next((node for key in keys.EXPERT_LAYERS if (node := root.get(key)) is not None), None)
    if listed is None:
        return AutoExperts()
    config = root.get(keys.CONFIG)
    settings = None if config is None else config.get(keys.EXPERT_PARALLEL)
    own_names = [key for key in _OWN_NAMES if settings is not None and settings.get(key) is not None]
    if own_names:
        message = (
            f"the run names the parts of its experts itself ({', '.join(own_names)}), and AutoEP drops these names"
        )
        raise refuse("UNSUPPORTED", message, file=root.file, hint=_NAMED_HINT)
    if root.get(keys.FOLDING) is not None:
        message = "its experts are cut over expert-parallel and tensor-parallel ranks (AutoEP with AutoTP)"
        raise refuse("UNSUPPORTED", message, file=root.file, hint=_NAMED_HINT)
    present = frozenset(names)
    mixtures = [_mixture(node, present) for node in listed.list()]
    return AutoExperts({mixture.path: mixture for mixture in mixtures})


def _mixture(node: CheckedValue, names: Collection[str]) -> Mixture:
    path, experts = node["module_path"].text(), node["expert_key_prefix"].text()
    layout = node.get("checkpoint_format")
    if layout is not None and layout.text() != "per_expert_files":
        message = "its experts are cut over expert-parallel ranks under ZeRO-3 (AutoEP), which is not read"
        raise refuse("UNSUPPORTED", message, file=node.file, tensor=experts, hint=_NAMED_HINT)
    match = _INSIDE.fullmatch(path)
    if match is None or match[2] is not None or experts != f"{path}.experts":
        message = f"no preset of AutoEP has a mixture {path} with {experts}, so its names before are not known"
        raise refuse("UNSUPPORTED", message, file=node.file, hint=_NAMED_HINT)
    count, local, ranks = (node[key].natural() for key in ("num_experts", "num_local_experts", "ep_size"))
    if not 0 < count <= _MAX_EXPERTS or ranks > count:
        raise node.fault(f"it has {count} experts on {ranks} ranks")
    placement = node.get("expert_placement")
    if placement is None:
        by_rank = tuple(tuple(range(rank * local, (rank + 1) * local)) for rank in range(ranks))
    else:
        placed = {entry["rank"].natural(): entry["experts"].naturals() for entry in placement["ranks"].list()}
        by_rank = tuple(placed.get(rank, ()) for rank in range(ranks))
    if sorted(number for numbers in by_rank for number in numbers) != list(range(count)):
        message = f"its {count} experts are not each on one of {ranks} ranks"
        raise refuse("UNSUPPORTED", message, file=node.file, tensor=experts, hint=_NAMED_HINT)
    return Mixture(path, by_rank, f"{path}.shared_experts_gate.weight" in names)
