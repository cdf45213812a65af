"""What a load or a save did, in numbers a person can check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from transaxle.engine.number_text import duration, plural, size
from transaxle.live.model.destination import Conversion

if TYPE_CHECKING:
    from transaxle.engine.compare.verification import Verification


@dataclass(frozen=True)
class LoadReport:
    """The result of `load` on this rank."""

    path: str
    """The source as typed."""
    format: str
    """Its container format."""
    dialect: str
    """The dialect of the model's names."""
    tensors: int
    """Tensors of which this rank has any part."""
    states: int
    """How many of these belong to the optimizer's state."""
    bytes_needed: int
    """Bytes of this rank's shards, as stored."""
    bytes_read: int
    """Bytes that this rank read from the source's tensor files."""
    bytes_received: int
    """Bytes that other ranks read for it."""
    bytes_written: int
    """Bytes written into this rank's tensors; equal to their size, but for rows of padding."""
    converted: tuple[Conversion, ...]
    """Tensors whose values were decoded or cast (`decode`, `dtype`), and whether any was rounded."""
    missing: tuple[str, ...]
    """Names of the model that the source lacks (`strict=False`), and `optimizer` if it has nothing of one; their values
    are unchanged."""
    unexpected: tuple[str, ...]
    """Names of the source that the model lacks (`strict=False`)."""
    untouched: tuple[str, ...] = ()
    """In a model with adapters, the names that the source does not concern: its adapters, or their base. In a sharded
    state dict of Megatron, the keys of what is no tensor, such as the extra states of modules."""
    padded: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Tensors of Megatron that may have rows of padding: rows in the source and in the model, where these differ. Rows
    that the source lacks are zero now."""
    zeros: tuple[str, ...] = ()
    """Names of the model that the source has no tensor for, and that are zeros now, which are the same as none."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Entries of a state dict that are not tensors, with the source's values."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """States that the caller requested without an object to restore."""
    untrained: tuple[str, ...] = ()
    """Parameters with gradients that are in none of the given optimizers."""
    seconds: float = 0.0
    """Wall time of this rank."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds of it by stage: `plan`, `read`, `exchange`."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        read, needed, received = map(size, (self.bytes_read, self.bytes_needed, self.bytes_received))
        counts = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "untouched": self.untouched,
            "padded": self.padded,
            "zeros": self.zeros,
            "converted": self.converted,
        }
        rest = "".join(f", {len(names):,} {what}" for what, names in counts.items() if names)
        tensors = f"{plural(self.tensors, 'tensor')}, {self.states:,} of the optimizer{rest}"
        return (
            f"{self.path} · {self.dialect} · {tensors} · {read} read of {needed} needed, {received} received, "
            f"{duration(self.seconds)}"
        )


@dataclass(frozen=True)
class SaveReport:
    """The result of `save`."""

    path: str
    """The target as typed."""
    format: str
    """Its container format."""
    dialect: str
    """Its dialect."""
    tensors: int
    """Tensors written, by all ranks."""
    bytes_written: int
    """Bytes of all files."""
    bytes_own: int
    """Bytes that this rank wrote."""
    bytes_received: int
    """Bytes that other ranks sent to this one, so that it could write longer runs."""
    kept: tuple[str, ...]
    """Tensors without a line in the target dialect: under their own names."""
    ignored: tuple[str, ...]
    """What was left behind."""
    notes: tuple[str, ...] = ()
    """What whoever goes on with the checkpoint must be told, such as that a hub's folder has no config."""
    untrained: tuple[str, ...] = ()
    """Parameters with gradients that are in none of the given optimizers, on this rank."""
    verification: Verification | None = None
    """What reading the checkpoint back has shown, if that was asked for."""
    seconds: float = 0.0
    """Wall time of this rank."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds of it by stage: `plan`, `check`, `write`, `hash`, `commit`, `verify`."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        rest = f", {len(self.kept):,} under their own names" if self.kept else ""
        proved = "" if self.verification is None else ", read back"
        return (
            f"{self.path} · {self.format} · {self.dialect} · {plural(self.tensors, 'tensor')}{rest} · "
            f"{size(self.bytes_written)}{proved}, {duration(self.seconds)}"
        )
