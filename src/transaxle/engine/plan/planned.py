"""Plans of conversions: immutable data that contains every byte to move, and every reason why the conversion cannot
run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec

from transaxle.axes.geometry import coalesce, row_major
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
from transaxle.formats.catalog import ITEM_BITS, NUMBERS, Draft
from transaxle.formats.registry import get_format
from transaxle.move.journal import span_ends
from transaxle.move.transfer import Transfer, clip_blocks
from transaxle.move.workers import MIN_MEMORY, limits

VERSION = 1
"""Version of the promised fields of a plan; fields are only added while it stays the same."""
_SHOWN, _SHOWN_REFUSALS = 12, 3
"""Largest numbers of table lines and of refusals that a printed plan shows."""


def path_in(folder: str, name: str) -> str:
    """Return the path of a file in a sub-folder; an empty name of the folder means the top folder."""
    return f"{folder}/{name}" if folder else name


class OutputTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor to write, before its place in the target's files is fixed."""

    name: str
    """Stored name of the tensor in the target."""
    dtype: str
    """Safetensors code of the tensor's dtype."""
    shape: tuple[int, ...]
    """Shape with which the tensor is stored."""
    target: Target
    """The source tensors, or regions of them, from which the tensor's values come."""
    step: Step | None = None
    """How the tensor's values become one buffer of an encoding; None means that they are written unchanged."""


class PlannedTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor to write, with the places of its bytes in the source files and in the target files."""

    name: str
    """Stored name of the tensor in the target."""
    dtype: str
    """Safetensors code of the tensor's dtype."""
    shape: tuple[int, ...]
    """Number of logical elements along each dim of the tensor."""
    places: tuple[Transfer, ...]
    """Where the tensor's bytes are written in the target files, in order; each place is stored as the transfer that
    would read the bytes back.
    """
    nbytes: int
    """Size of the tensor in bytes."""
    rule: str
    """Line of the target dialect that describes the tensor, as written in the family's table."""
    transfers: tuple[Transfer, ...]
    """Reads of source bytes that fill the tensor, sorted by their position in the tensor."""
    arithmetic: AffineSteps | None = None
    """Arithmetic that is applied to every value, if the dialects store values differently and the user allowed
    rounding; None means no arithmetic.
    """
    step: Step | None = None
    """How the values that were read are encoded; None means that they are written unchanged."""
    copies: tuple[Transfer, ...] = ()
    """Additional places in the target files for some of the tensor's bytes, as transfers that would read the bytes
    back.
    """

    @property
    def everywhere(self) -> tuple[Transfer, ...]:
        """All places in the target files where the tensor's bytes are written."""
        return (*self.places, *self.copies) if self.copies else self.places

    @property
    def codes_of(self) -> str | None:
        """If this tensor contains the codes of a tensor that the plan encodes, the name of the encoded tensor;
        otherwise None.
        """
        return self.step.tensor if self.step is not None and self.step.role == Role.CODES else None

    def steps(self, computed: Mapping[str, Sequence[RecodedTensor]]) -> list[dict[str, Any]]:
        """Return the steps (read, decode, …) that produce the tensor, in order, as plain JSON data.

        Args:
            computed: name of a virtual file -> steps that compute the tensor in the file; see `Plan.computed`.
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
        """Return the planned tensor as plain JSON data; without `copies`, omit the reads that fill it."""
        bare = msgspec.structs.replace(self, places=(), transfers=(), copies=(), arithmetic=None)
        data: dict[str, Any] = msgspec.to_builtins(bare)
        del data["transfers"]
        if self.arithmetic is not None:
            steps = [dict(zip(("operation", "scale", "shift"), step, strict=True)) for step in self.arithmetic]
            data["arithmetic"] = steps
        data["places"] = [transfer.as_json() for transfer in self.places]
        data["copies"] = [transfer.as_json() for transfer in self.copies]
        return data | ({"transfers": [transfer.as_json() for transfer in self.transfers]} if copies else {})

    def pieces(self, computed: Mapping[str, Sequence[RecodedTensor]]) -> dict[str, list[dict[str, Any]]]:
        """Return where the tensor's bytes come from (`reads`) and go to (`writes`), as plain JSON data.

        Args:
            computed: name of a virtual file -> steps that compute the tensor in the file; see `Plan.computed`.
        """
        dtype, shape = (self.dtype, self.shape) if self.step is None else (self.step.dtype, self.step.shape)
        reads = [
            _as_piece(transfer, dtype, shape)
            | {
                "file": transfer.file if is_stored(transfer.file) else None,
                "tensor": computed[transfer.file][0].name if transfer.file in computed else None,
            }
            for transfer in self.transfers
        ]
        return {"reads": reads, "writes": [_as_piece(place, self.dtype, self.shape) for place in self.everywhere]}

    @property
    def spans(self) -> tuple[PlannedTensor, ...]:
        """The byte spans in which the tensor is hashed, each as a tensor of bytes. The tuple is empty if there is only
        one span, or if values change.
        """
        ends = span_ends(self.nbytes)
        if len(ends) == 1 or self.step is not None or self.arithmetic is not None:
            return ()
        divided = (clip_blocks(sorted(side, key=_start), ends) for side in (self.transfers, self.places, self.copies))
        return tuple(
            PlannedTensor(
                f"{self.name}\n{start}",
                "U8",
                (stop - start,),
                _relative_to(places, start),
                stop - start,
                self.rule,
                _relative_to(transfers, start),
                copies=_relative_to(copies, start),
            )
            for (start, stop, transfers), (_, _, places), (_, _, copies) in zip(*divided, strict=True)
        )


def plan_files(draft: Draft, carried: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a plan that list the target's files.

    Args:
        draft: layout of the files with tensors.
        carried: file that is copied unchanged -> its size in bytes.
    """
    owners = {file: dict(position) for file, position in draft.owners.items()}
    return {"files": {**draft.files, **carried}, "carried": tuple(carried), "owners": owners}


def is_stored(file: str) -> bool:
    """Return whether a source file is a file of the checkpoint, and no virtual file of computed values."""
    return not file.startswith("\0") and file != NUMBERS


def _as_piece(transfer: Transfer, dtype: str, shape: Sequence[int]) -> dict[str, Any]:
    """Return a part of a tensor as plain JSON data: its bytes in the file, and its box in the tensor."""
    return {
        "file": transfer.file,
        "offset": transfer.source,
        "nbytes": transfer.size,
        "span": transfer.source_span,
        "box": box_of(transfer, dtype, shape),
    }


def box_of(transfer: Transfer, dtype: str, shape: Sequence[int]) -> list[list[int]] | None:
    """Return the box of a tensor that a transfer fills, `[start, stop]` for each dim, in elements.

    Args:
        transfer: the bytes to copy; its target is the tensor.
        dtype: safetensors code of the tensor's dtype.
        shape: shape of the tensor.

    Returns:
        The result is None if the transfer fills anything else than one box, such as every second row.
    """
    bits = ITEM_BITS.get(dtype, 8)
    loops = [(count, step * 8 // bits) for count, _, step in transfer.loops] + [(transfer.width * 8 // bits, 1)]
    first = transfer.target * 8 // bits
    last = first + sum((count - 1) * step for count, step in loops)
    box, strides = [], row_major(tuple(shape))
    for step in strides:
        (start, first), (end, last) = divmod(first, step or 1), divmod(last, step or 1)
        box.append([start, end + 1])
    runs = [(end - start, step, step) for (start, end), step in zip(box, strides, strict=True)]
    filled = coalesce([(count, step, step) for count, step in loops])
    return box if coalesce(runs) == filled and all(start < end for start, end in box) else None


def _start(transfer: Transfer) -> int:
    return transfer.target


def _relative_to(parts: Iterable[Transfer], start: int) -> tuple[Transfer, ...]:
    """Return transfers into a span of a tensor, with target positions counted from the start of the span."""
    shifted = (msgspec.structs.replace(part, target=part.target - start) for part in parts)
    return tuple(sorted(shifted, key=_start))


def _dims(rule: str) -> str:
    """Return the right-hand side of a table line, which is the layout of the tensor's dims."""
    return rule.partition(" = ")[2]


class Route(msgspec.Struct, frozen=True):
    """One line of a printed plan: the table lines of the source dialect from which one table line of the target dialect
    is made.
    """

    component: str
    """Names of the logical tensors that the target's table line contains."""
    source: tuple[str, ...]
    """Table lines of the source dialect for these logical tensors."""
    target: str
    """Table line of the target dialect."""
    tensors: int
    """Number of target tensors that the target's table line describes."""


_component_and_rule: Callable[[Target], tuple[str, str]] = attrgetter("component", "rule")


def routes(bound: BoundNames, targets: Iterable[Target]) -> tuple[Route, ...]:
    """Group target tensors by table line, with the source's table lines for the same logical tensors; omit tensors of
    zeros.
    """
    rules = {component: line.text for line, _ in bound.names for component in line.expression.components}
    counts = Counter(_component_and_rule(target) for target in targets if target.parts)
    return tuple(
        Route(component, tuple(dict.fromkeys(rules.get(c, "") for c in component.split(", "))), rule, number)
        for (component, rule), number in counts.items()
        if component
    )


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything that a conversion will do, as plain data that can be printed, compared, stored and executed.

    All byte counts in it are exact. A plan with `refusals` cannot be executed.
    """

    source: str
    """Path of the source, as the user typed it."""
    source_format: str
    """Container format of the source."""
    format: str
    """Container format of the target."""
    family: str | None
    """Model family; None if no family's table reads the tensor names."""
    from_dialect: str | None
    """Dialect of the source; None if no family's table reads the tensor names."""
    dialect: str
    """Dialect of the target."""
    tensors: tuple[PlannedTensor, ...]
    """Tensors to write, in the order of the target's files."""
    checks: tuple[PlannedCheck, ...]
    """Pairs of copies of a source tensor that must prove equal before anything is written."""
    routes: tuple[Route, ...]
    """The plan's target tensors grouped by table lines, for printing."""
    files: dict[str, int]
    """Target file -> size in bytes, for all target files including files that are copied unchanged."""
    carried: tuple[str, ...]
    """Target names of the files that are copied from the source, such as a tokenizer."""
    kept: tuple[str, ...]
    """Source tensors that the target dialect does not know; these tensors keep their names."""
    ignored: tuple[str, ...]
    """Source tensors, files and metadata notes that are not converted."""
    aliases: dict[str, str]
    """Target name of a tied tensor -> target name of the tensor that it is tied to."""
    axes: dict[str, int]
    """Axis -> size, without axes whose size differs between layers."""
    refusals: tuple[Refusal, ...]
    """Reasons why the conversion cannot run; empty if it can run."""
    recoded: tuple[RecodedTensor, ...] = ()
    """Tensors whose values change, because they are decoded, encoded, cast, merged or averaged."""
    computed: dict[str, tuple[RecodedTensor, ...]] = {}
    """Virtual file -> the steps, in order, that compute the tensor in that file from stored tensors."""
    allow_lossy: bool = False
    """Whether loss is allowed: rounding by a dialect's arithmetic, or casts that turn finite values into infinities."""
    owners: dict[str, dict[str, int]] = {}
    """Target file that one rank of a job reads -> the rank's index in each dim of the job's mesh. Empty if each rank
    reads what it needs from any file.
    """
    grafted: dict[str, str] = {}
    """Target tensor whose values come, at least in part, from another checkpoint -> path of that checkpoint."""
    grafted_files: dict[str, str] = {}
    """Target file in `carried` that comes from another checkpoint -> path of that checkpoint."""
    stayed: tuple[str, ...] = ()
    """Plain source tensors that keep their dtype while other tensors are cast."""
    counted: dict[str, int] = {}
    """Axis -> size, for axes whose size was counted in tensor names, so that a missing last index would not be
    noticed.
    """
    notes: tuple[str, ...] = ()
    """Notes on the programs that will load the target: settings that they need, or defaults that they will assume."""

    @property
    def band(self) -> int:
        """Bytes of values that must be in memory at the same time to encode the largest tensor."""
        return max((tensor.step.band for tensor in self.tensors if tensor.step is not None), default=0)

    @cached_property
    def spans(self) -> dict[str, tuple[PlannedTensor, ...]]:
        """Tensor name -> its spans (byte ranges), for large tensors that several workers can share."""
        spans_by_name = {tensor.name: spans for tensor in self.tensors if (spans := tensor.spans)}
        names = {tensor.name for tensor in self.tensors} if spans_by_name else set[str]()
        return {name: spans for name, spans in spans_by_name.items() if names.isdisjoint(span.name for span in spans)}

    @cached_property
    def units(self) -> tuple[PlannedTensor, ...]:
        """The smallest units of the plan that workers can share: tensors, and spans of large tensors."""
        return tuple(unit for tensor in self.tensors for unit in self.spans.get(tensor.name, (tensor,)))

    @property
    def compared(self) -> int:
        """Number of pairs of source copies that must prove equal."""
        return sum(not check.zero for check in self.checks)

    @property
    def bytes_written(self) -> int:
        """Total size in bytes of all target files."""
        return sum(self.files.values())

    @property
    def bytes_read(self) -> int:
        """Number of bytes of source tensors that are read."""
        return sum(transfer.size for tensor in self.tensors for transfer in tensor.transfers)

    @property
    def beside(self) -> tuple[str, ...]:
        """Names of the target files without tensors: copied files, and a rewritten config."""
        config = path_in(self.model_folder, CONFIG)
        is_rewritten = config in self.files and config not in self.carried
        return (*self.carried, config) if is_rewritten else self.carried

    @property
    def model_folder(self) -> str:
        """Sub-folder of the target into which files are copied; empty if they are beside the tensors."""
        return get_format(self.format).model_folder

    @property
    def sidecar_sources(self) -> tuple[str, ...]:
        """Names in the source of the files that are copied unchanged, in the order of `carried`."""
        start = len(path_in(self.model_folder, ""))
        return tuple(name[start:] for name in self.carried)

    @property
    def carried_files(self) -> tuple[PlannedTensor, ...]:
        """The files that are copied unchanged, each as a tensor of bytes with the name of the file."""
        names = [
            (name, source, self.files[name]) for name, source in zip(self.carried, self.sidecar_sources, strict=True)
        ]
        return tuple(
            PlannedTensor(name, "U8", (size,), (Transfer(name, 0, 0, size),), size, "", (Transfer(file, 0, 0, size),))
            for name, file, size in names
        )

    @property
    def copies(self) -> int:
        """Number of box copies (moves of a rectangular region of a tensor) in the plan."""
        return sum(len(tensor.transfers) for tensor in self.tensors)

    @property
    def contiguous(self) -> int:
        """Number of box copies whose elements are a single byte range in both source and target."""
        return sum(not transfer.loops for tensor in self.tensors for transfer in tensor.transfers)

    def __repr__(self) -> str:
        verdict = f"{plural(len(self.refusals), 'refusal')}" if self.refusals else "nothing refused"
        source = f"{self.source} ({self.source_format}, {self.from_dialect or 'names of its own'})"
        tensors = plural(len(self.tensors), "tensor")
        return f"<plan {source} -> {self.format}, {self.dialect} · {tensors} · {size(self.bytes_written)} · {verdict}>"

    def __str__(self) -> str:
        """Return the text that `print(plan)` shows: table lines, amounts of data, and the first refusals."""
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
        remaining = len(self.refusals) - _SHOWN_REFUSALS
        return "\n".join([*lines, *([f"  … and {remaining:,} more: plan.refusals"] if remaining > 0 else [])])

    def _repr_html_(self) -> str:
        return notebook(str(self))

    def document(self) -> dict[str, Any]:
        """Return the promised fields of the plan as plain JSON data: what is written, from where, and where to.

        The page on plans lists the fields; they stay as they are while `schema_version` does.
        """
        names = (
            "source",
            "source_format",
            "from_dialect",
            "format",
            "dialect",
            "family",
            "bytes_read",
            "bytes_written",
        )
        tensors = [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "nbytes": tensor.nbytes}
            | tensor.pieces(self.computed)
            for tensor in self.tensors
        ]
        return {
            "schema_version": VERSION,
            **{name: getattr(self, name) for name in names},
            "tensors": tensors,
            "files": dict(self.files),
            "mesh": self._mesh,
            "owners": {file: dict(position) for file, position in self.owners.items()},
            "least_memory": limits(1, MIN_MEMORY).with_min_block(self.band).peak,
            "refusals": [refusal.as_json() for refusal in self.refusals],
            "notes": list(self.notes),
        }

    @property
    def _mesh(self) -> dict[str, int]:
        """Dim of the mesh of ranks with files of their own -> its size."""
        positions = [pair for position in self.owners.values() for pair in position.items()]
        return {dim: 1 + max(index for name, index in positions if name == dim) for dim in dict(positions)}

    def as_json(self, *, copies: bool = True) -> dict[str, Any]:
        """Return the plan as plain JSON data; without `copies`, omit the individual byte ranges."""
        bare = msgspec.structs.replace(self, tensors=(), checks=(), refusals=(), computed={}, owners={})
        data: dict[str, Any] = msgspec.to_builtins(bare)
        del data["computed"], data["owners"]
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
