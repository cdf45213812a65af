"""Plans: frozen, JSON-able data that says every byte a conversion will move, and every reason why it may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec

from transaxle.axes.layout.bind import BoundNames
from transaxle.axes.layout.relayout import Target
from transaxle.axes.notation.computed import AffineSteps
from transaxle.encodings.encoding import Role
from transaxle.encodings.value_steps import STEPS, RecodedTensor
from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.engine.duplicates import PlannedCheck
from transaxle.engine.views.encode import Step
from transaxle.engine.wording import notebook, plural, size
from transaxle.errors import Refusal
from transaxle.move.journal import span_ends
from transaxle.move.transfer import Transfer, clip_blocks

_SHOWN, _SHOWN_REFUSALS = 12, 3
"""Rules and refusals that a printed plan shows."""


class OutputTensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor to be written."""

    name: str
    """Stored name in the target."""
    dtype: str
    """Safetensors code."""
    shape: tuple[int, ...]
    """As stored."""
    target: Target
    """Where its values come from."""
    step: Step | None = None
    """How its values become one buffer of an encoding; None: they are written as they are."""


class PlannedTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor to be written, and where its bytes come from."""

    name: str
    """Stored name in the target."""
    dtype: str
    """Safetensors code."""
    shape: tuple[int, ...]
    """Logical elements along each dim."""
    places: tuple[Transfer, ...]
    """Destinations of its bytes, in order of the first one of each, as the transfers that would read it back."""
    nbytes: int
    """Size in bytes."""
    rule: str
    """The target dialect's line, as written."""
    transfers: tuple[Transfer, ...]
    """Reads that fill it, sorted by target position."""
    arithmetic: AffineSteps | None = None
    """Arithmetic on every value, where the user allowed it."""
    step: Step | None = None
    """How the transferred values are encoded; None: they are written as they are."""
    copies: tuple[Transfer, ...] = ()
    """Further destinations of some of its bytes, each as the transfer that would read them back."""

    @property
    def everywhere(self) -> tuple[Transfer, ...]:
        """All destinations of its bytes."""
        return (*self.places, *self.copies) if self.copies else self.places

    @property
    def codes_of(self) -> str | None:
        """Table name of the tensor whose codes these are, if it is encoded here."""
        return self.step.tensor if self.step is not None and self.step.role == Role.CODES else None

    def steps(self, computed: Mapping[str, Sequence[RecodedTensor]]) -> list[dict[str, Any]]:
        """Return what makes it, in order, as plain JSON data.

        Args:
            computed: see `Plan.computed`.
        """
        if not self.transfers:
            return [{"step": "zeros"}]
        steps: list[dict[str, Any]] = [{"step": "read"}]
        files = dict.fromkeys(transfer.file for transfer in self.transfers)
        before = dict.fromkeys(step for file in files for step in computed.get(file, ()))
        for action, word in STEPS.items():
            for encoding, dtype in dict.fromkeys((s.encoding, s.dtype) for s in before if s.action == action):
                steps.append({"step": word, "dtype": dtype, **({"from": encoding} if encoding else {})})
        steps.append({"step": "copy", "copies": len(self.transfers)})
        if self.arithmetic is not None:
            steps.append({"step": "arithmetic"})
        if self.step is not None:
            steps.append({"step": STEPS["encoded"], "encoding": self.step.encoding, "part": self.step.role})
        return steps

    def as_json(self, *, copies: bool = True) -> dict[str, Any]:
        """Return it as plain JSON data; without `copies` the reads that fill it are left out."""
        bare = msgspec.structs.replace(self, places=(), transfers=(), copies=(), arithmetic=None)
        data: dict[str, Any] = msgspec.to_builtins(bare)
        del data["transfers"]
        if self.arithmetic is not None:
            steps = [dict(zip(("operation", "scale", "shift"), step, strict=True)) for step in self.arithmetic]
            data["arithmetic"] = steps
        data["places"] = [transfer.as_json() for transfer in self.places]
        data["copies"] = [transfer.as_json() for transfer in self.copies]
        return data | ({"transfers": [transfer.as_json() for transfer in self.transfers]} if copies else {})

    @property
    def spans(self) -> tuple[PlannedTensor, ...]:
        """The spans in which it is hashed, each as a tensor of bytes, where it is copied and there are several."""
        ends = span_ends(self.nbytes)
        if len(ends) == 1 or self.step is not None or self.arithmetic is not None:
            return ()
        divided = (clip_blocks(sorted(side, key=_start), ends) for side in (self.transfers, self.places, self.copies))
        return tuple(
            PlannedTensor(
                f"{self.name}\n{start}",
                "U8",
                (stop - start,),
                _moved(places, start),
                stop - start,
                self.rule,
                _moved(transfers, start),
                copies=_moved(copies, start),
            )
            for (start, stop, transfers), (_, _, places), (_, _, copies) in zip(*divided, strict=True)
        )


def _start(transfer: Transfer) -> int:
    return transfer.target


def _moved(parts: Iterable[Transfer], start: int) -> tuple[Transfer, ...]:
    """Return the parts of transfers that land in a span, as transfers into a tensor that is the span."""
    moved = (msgspec.structs.replace(part, target=part.target - start) for part in parts)
    return tuple(sorted(moved, key=_start))


def _dims(rule: str) -> str:
    """Return what a rule says of its tensor beside the name."""
    return rule.partition(" = ")[2]


class Route(msgspec.Struct, frozen=True):
    """One line of a plan, as people read it."""

    component: str
    """Logical tensors."""
    source: tuple[str, ...]
    """Rules of the source dialect."""
    target: str
    """Rule of the target dialect."""
    tensors: int
    """Target tensors of this line."""


_way: Callable[[Target], tuple[str, str]] = attrgetter("component", "rule")


def routes(bound: BoundNames, targets: Iterable[Target]) -> tuple[Route, ...]:
    """Group target tensors by rule, beside the rules by which the source's names are read; zeros come from nowhere."""
    rules = {component: line.text for line, _ in bound.names for component in line.expression.components}
    counts = Counter(_way(target) for target in targets if target.parts)
    return tuple(
        Route(component, tuple(dict.fromkeys(rules.get(c, "") for c in component.split(", "))), rule, number)
        for (component, rule), number in counts.items()
        if component
    )


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything that a conversion will do, as plain data: it can be printed, compared, stored and run.

    Byte counts are exact. A plan with `refusals` cannot be run.
    """

    source: str
    """Path of the source, as typed."""
    source_format: str
    """Container format of the source."""
    format: str
    """Container format of the target."""
    family: str | None
    """Model family."""
    from_dialect: str | None
    """Dialect of the source."""
    dialect: str
    """Dialect of the target."""
    tensors: tuple[PlannedTensor, ...]
    """The tensors to write, in file order."""
    checks: tuple[PlannedCheck, ...]
    """Pairs of source copies that must prove equal before anything is written."""
    routes: tuple[Route, ...]
    """The plan by rules, for people."""
    files: dict[str, int]
    """Target files and their sizes, including copied ones."""
    carried: tuple[str, ...]
    """Files copied beside the tensors."""
    kept: tuple[str, ...]
    """Source tensors without a line in the target dialect: written under their own names."""
    ignored: tuple[str, ...]
    """Source tensors, files and notes that are left behind."""
    aliases: dict[str, str]
    """Target name -> target name of the tensor it is tied to."""
    axes: dict[str, int]
    """Axis sizes, as far as they are the same in every layer."""
    refusals: tuple[Refusal, ...]
    """Reasons why the conversion cannot run; empty if it can."""
    recoded: tuple[RecodedTensor, ...] = ()
    """Tensors that are decoded or encoded."""
    computed: dict[str, tuple[RecodedTensor, ...]] = {}
    """File that does not exist on disk -> the steps that compute its tensor from stored ones, in order."""
    allow_lossy: bool = False
    """Whether a cast may turn finite values into infinities."""
    stayed: tuple[str, ...] = ()
    """Plain source tensors that keep their dtype where others are cast."""
    counted: dict[str, int] = {}
    """Name axes whose size only the names show -> that size: a missing last index would go unnoticed."""
    notes: tuple[str, ...] = ()
    """What programs that go on with the target must be told, or will take for what the source does not say."""

    @property
    def band(self) -> int:
        """Bytes of values that must be in memory at once to encode the largest tensor."""
        return max((tensor.step.band for tensor in self.tensors if tensor.step is not None), default=0)

    @cached_property
    def spans(self) -> dict[str, tuple[PlannedTensor, ...]]:
        """The spans of tensors that several workers can share, by the tensor's name."""
        found = {tensor.name: spans for tensor in self.tensors if (spans := tensor.spans)}
        names = {tensor.name for tensor in self.tensors} if found else set[str]()
        return {name: spans for name, spans in found.items() if names.isdisjoint(span.name for span in spans)}

    @cached_property
    def units(self) -> tuple[PlannedTensor, ...]:
        """What is divided no further among workers: tensors, and the spans of large ones."""
        return tuple(unit for tensor in self.tensors for unit in self.spans.get(tensor.name, (tensor,)))

    @property
    def compared(self) -> int:
        """Number of pairs of copies that must prove equal."""
        return sum(not check.zero for check in self.checks)

    @property
    def bytes_written(self) -> int:
        """Bytes of all target files."""
        return sum(self.files.values())

    @property
    def bytes_read(self) -> int:
        """Bytes of source tensors that are moved."""
        return sum(transfer.size for tensor in self.tensors for transfer in tensor.transfers)

    @property
    def beside(self) -> tuple[str, ...]:
        """Files beside the tensors: the carried ones, and a config that is written anew."""
        anew = CONFIG in self.files and CONFIG not in self.carried
        return (*self.carried, CONFIG) if anew else self.carried

    @property
    def carried_files(self) -> tuple[PlannedTensor, ...]:
        """The carried files, each as a tensor of bytes under the file's name."""
        sizes = [(name, self.files[name]) for name in self.carried]
        return tuple(
            PlannedTensor(name, "U8", (size,), (transfer,), size, "", (transfer,))
            for name, size in sizes
            for transfer in [Transfer(name, 0, 0, size)]
        )

    @property
    def copies(self) -> int:
        """Number of box copies."""
        return sum(len(tensor.transfers) for tensor in self.tensors)

    @property
    def contiguous(self) -> int:
        """Number of box copies that are one byte range on both sides."""
        return sum(not transfer.loops for tensor in self.tensors for transfer in tensor.transfers)

    def __repr__(self) -> str:
        verdict = f"{plural(len(self.refusals), 'refusal')}" if self.refusals else "nothing refused"
        source = f"{self.source} ({self.source_format}, {self.from_dialect or 'names of its own'})"
        tensors = plural(len(self.tensors), "tensor")
        return f"<plan {source} -> {self.format}, {self.dialect} · {tensors} · {size(self.bytes_written)} · {verdict}>"

    def __str__(self) -> str:
        """Return what `print(plan)` shows: what goes where, how much, and the first reasons against it."""
        contiguous = round(100 * self.contiguous / self.copies) if self.copies else 100
        amounts = (
            f"read {size(self.bytes_read)}",
            f"write {size(self.bytes_written)}",
            plural(len(self.tensors), "tensor"),
            f"{plural(self.copies, 'copy', 'copies')}, {contiguous} % contiguous",
        )
        routes = sorted(self.routes, key=lambda route: [_dims(text) for text in route.source] == [_dims(route.target)])
        lines = [
            f"{self.source_format}, {self.from_dialect or 'names of its own'} -> {self.format}, {self.dialect}",
            *(f"  {', '.join(route.source)} -> {route.target}  x{route.tensors:,}" for route in routes[:_SHOWN]),
            *([f"  … and {len(self.routes) - _SHOWN:,} more rules"] if len(self.routes) > _SHOWN else []),
            "  ".join(("", *amounts)),
        ]
        if not self.refusals:
            return "\n".join([*lines, "  nothing refused"])
        lines.append(f"refused ({plural(len(self.refusals), 'reason')})")
        lines += [f"  {line}" for each in self.refusals[:_SHOWN_REFUSALS] for line in str(each).splitlines()]
        more = len(self.refusals) - _SHOWN_REFUSALS
        return "\n".join([*lines, *([f"  … and {more:,} more: plan.refusals"] if more > 0 else [])])

    def _repr_html_(self) -> str:
        return notebook(str(self))

    def as_json(self, *, copies: bool = True) -> dict[str, Any]:
        """Return the plan as plain JSON data; without `copies` the single byte ranges are left out."""
        bare = msgspec.structs.replace(self, tensors=(), checks=(), refusals=(), computed={})
        data: dict[str, Any] = msgspec.to_builtins(bare)
        del data["computed"]
        data |= {
            "tensors": [
                tensor.as_json(copies=copies) | {"steps": tensor.steps(self.computed)} for tensor in self.tensors
            ],
            "checks": [check.as_json() for check in self.checks],
            "refusals": [refusal.as_json() for refusal in self.refusals],
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "copies": self.copies,
            "contiguous": self.contiguous,
        }
        return data
