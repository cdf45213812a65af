"""The ranks of a trainer and of an engine: the degrees of their meshes, and the coordinates of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from transaxle.engine.checkpoint.recognise import ENGINES
from transaxle.errors import refuse

FSDP, EP, TP, PP, REPLICATE, DP, REPLICAS = "fsdp", "ep", "tp", "pp", "replicate", "dp", "replicas"
EXPERT_DIM = "expert_dim"
"""Not a degree: the dim of an expert's tensors that FSDP divides."""
TRAINING = (REPLICATE, PP, FSDP, EP, TP)
SERVING = (REPLICAS, DP, PP, TP)
MOST_RANKS = 1 << 16
"""Cap on the ranks of one side."""
_MOST_PAIRS = 1 << 24
"""Cap on the pairs of ranks, each of which has a number."""


@dataclass(frozen=True)
class RankMesh:
    """The ranks of one side."""

    dialect: str
    """How it names and fuses its tensors."""
    degrees: Mapping[str, int]
    """Mesh dim -> its size, outermost first."""
    ep: int = 1
    """Of an engine: how many ranks share out the experts; of a trainer, the size of that mesh dim."""
    expert_dim: int = 0
    """Of a trainer: the dim of an expert's tensors that FSDP divides."""

    @property
    def serves(self) -> bool:
        """Whether it is an inference engine."""
        return self.dialect.partition("@")[0] in ENGINES

    @property
    def ranks(self) -> int:
        """Number of its ranks."""
        return prod(self.degrees.values())

    def degree(self, name: str) -> int:
        """Return the size of a mesh dim; 1 where it is not there."""
        return self.degrees.get(name, 1)

    def at(self, rank: int, *names: str) -> int:
        """Return a rank's number among those of some mesh dims together, in the order of the mesh."""
        number, stride = 0, 1
        for name, size in reversed(list(self.degrees.items())):
            if name in names:
                number += rank % size * stride
                stride *= size
            rank //= size
        return number

    @property
    def text(self) -> str:
        """As the user writes it."""
        return ",".join(f"{name}={size}" for name, size in self.degrees.items()) or "1 rank"


def read_mesh(dialect: str, text: str) -> RankMesh:
    """Read the degrees of one side, such as `fsdp=64,ep=8`.

    Args:
        dialect: of that side; those of inference engines have other mesh dims than trainers.
        text: as the user wrote it; empty: one rank.

    Raises:
        UsageError: UNKNOWN_AXIS for a mesh dim that this side does not have, or a number that is none.
        Refused: UNSUPPORTED for degrees that do not go together.
    """
    serves = RankMesh(dialect, {}).serves
    known = (*SERVING, EP) if serves else (*TRAINING, EXPERT_DIM)
    degrees: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, count = part.partition("=")
        least = 0 if name == EXPERT_DIM else 1
        if name not in known or name in degrees:
            again = "is given twice" if name in degrees else f"is no dim of the mesh of {dialect}"
            raise refuse("UNKNOWN_AXIS", f"{text}\n{name} {again}", hint=f"It may have: {', '.join(known)}.")
        if not (equals and count.isascii() and count.isdigit() and len(count) < 7 and int(count) >= least):
            raise refuse("UNKNOWN_AXIS", f"{text}\n{part!r} is not DIM=SIZE", hint="Write for example fsdp=64,ep=8.")
        degrees[name] = int(count)
    expert_dim = degrees.pop(EXPERT_DIM, 0)
    ep = degrees.pop(EP, 1) if serves else degrees.get(EP, 1)
    mesh = RankMesh(dialect, degrees, ep, expert_dim)
    if mesh.ranks > MOST_RANKS:
        raise refuse(
            "UNSUPPORTED", f"{text}\n{mesh.ranks} ranks are more than {MOST_RANKS}", hint="Plan a part of them."
        )
    together = mesh.degree(DP) * mesh.degree(TP)
    if serves and ep not in (1, together):
        message = f"{text}\nep={ep}, but experts are shared out over all {together} ranks of dp and tp, or over none"
        raise refuse("UNSUPPORTED", message, hint=f"Write ep={together}, or leave it out.")
    return mesh


def check_pairs(trainer: RankMesh, engine: RankMesh) -> None:
    """Refuse more pairs of ranks than a matrix holds.

    Raises:
        Refused: UNSUPPORTED.
    """
    if trainer.ranks * engine.ranks > _MOST_PAIRS:
        message = f"{trainer.ranks} x {engine.ranks} pairs of ranks are more than {_MOST_PAIRS}"
        raise refuse("UNSUPPORTED", message, hint="Replicas all receive the same: plan fewer of them.")
