"""Tables from converters: sources of traces, the proof of a table, and the file that it becomes.

What a table is derived from: a model type of transformers, a function, or folders of a user's.

**Proof**: a table's conversions against a trace that it was not derived from, both ways, bit by bit.

The file of a derived table: complete as soon as it is there, and never in place of anything that must stay.

**Traces of functions**: a converter in Python, given state dicts that are numbered in two ways.

What is the same in both runs comes from no element, and what comes from an element comes from it in both.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from transaxle.arguments import EVERYTHING, Overwrite, PathLike, read_overwrite, read_path, wrong_type
from transaxle.axes.layout.bind import bind
from transaxle.axes.layout.relayout import fill
from transaxle.axes.notation import tables
from transaxle.axes.notation.family import Sizes
from transaxle.axes.notation.statement import BLOCK, DIALECT, FAMILY, WORD
from transaxle.derivation.table import Derived, Labels, derive
from transaxle.derivation.tiny_configs import MORE_VARIANTS, PROPORTIONED, VARIANTS
from transaxle.derivation.traces import (
    EXACT,
    Numbers,
    Places,
    Shape,
    Trace,
    Underivable,
    combined,
    digits,
    dtype_of,
    laid_out,
    numbered,
    passes,
    shuffled,
    told,
)
from transaxle.derivation.transformers_models import loaded
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.checkpoint.settings import CONFIG, stored_config
from transaxle.engine.execute import execute
from transaxle.engine.plan.conversion import make_plan
from transaxle.engine.verification import opened_pair
from transaxle.errors import Code, TransaxleError, refuse
from transaxle.formats.storage.local import failed
from transaxle.formats.store.access import opened_draft
from transaxle.formats.store.place import rename_new
from transaxle.move.workers import limits

Tensors = Mapping[str, Any]
Values = npt.NDArray[Any]


def trace_function(
    convert: Callable[[dict[str, Any]], Tensors], sample: Tensors
) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Send a state dict through a function, numbered in two ways, in as many passes as its dtypes need.

    Args:
        convert: state dict -> state dict.
        sample: names and tensors; values do not matter.

    Returns:
        The numbers on both sides; of a tensor that the function makes of nothing, zeros.

    Raises:
        Underivable: values are changed, or a dtype holds no numbers.
        TypeError: the function returns no state dict.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in sample.items()}
    total = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
    base = min((_base(name, tensor) for name, tensor in sample.items()), default=1 << 24)
    numberings = shuffled(total)
    runs = []
    for numbers in numberings:
        tensors = laid_out(numbers, shapes)
        for position in range(passes(total + 1, base)):
            given = {name: _filled(tensor, digits(tensors[name], base, position)) for name, tensor in sample.items()}
            runs.append(_state_dict(convert(given)))
    if any(each.keys() != runs[0].keys() for each in runs):
        raise Underivable("the function gives other names for other values")
    places = [Places(numbers) for numbers in numberings]
    memory = {name: _came_from(name, [run[name] for run in runs], base, places) for name in runs[0]}
    return laid_out(np.arange(1, total + 1), shapes), memory


def _base(name: str, tensor: Any) -> int:
    dtype = dtype_of(tensor)
    if dtype not in EXACT:
        raise Underivable(f"{name} is {dtype}, which holds no numbers; give it as another type")
    return EXACT[dtype]


def _filled(tensor: Any, values: Numbers) -> Any:
    """Return a tensor of the same kind and type with these values."""
    if isinstance(tensor, np.ndarray):
        return values.astype(tensor.dtype)
    return tensor.new_tensor(values.tolist()).reshape(tuple(tensor.shape)).to(tensor.dtype)


def check_samples(samples: object) -> None:
    """Refuse samples that are no state dicts.

    Raises:
        TypeError: they are no sequence of mappings from names to arrays or tensors, or there is nothing in them.
    """
    if not isinstance(samples, Sequence) or isinstance(samples, str | bytes) or not samples:
        raise wrong_type("samples", "a list of state dicts, at least one", samples)
    for sample in samples:
        if not isinstance(sample, Mapping) or not sample:
            raise wrong_type("samples", "a list of state dicts, none of them empty", sample)
        for name, tensor in sample.items():
            if not _is_tensor(tensor):
                raise TypeError(f"samples must hold arrays or tensors; {name!r} is {_kind(tensor)}")


def _state_dict(returned: object) -> Tensors:
    """Return what a function returned, if it is a state dict."""
    if not isinstance(returned, Mapping) or not returned:
        kind = "an empty one" if isinstance(returned, Mapping) else _kind(returned)
        raise TypeError(f"the converter must return a mapping of names to tensors; it returned {kind}")
    for name, tensor in returned.items():
        if not _is_tensor(tensor):
            raise TypeError(f"the converter must return arrays or tensors; its {name!r} is {_kind(tensor)}")
    return returned


def _is_tensor(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _came_from(name: str, runs: Sequence[Any], base: int, places: Sequence[Places]) -> Numbers:
    """Return the element that each value of a tensor came from; 0 for zeros, and for all of a tensor made of nothing.

    Args:
        name: the tensor's name.
        runs: the tensor from each pass of the first numbering, and then of the second.
        base: how many numbers a pass carries.
        places: the elements of both numberings.
    """
    values = [_read(tensor) for tensor in runs]
    if any(each.shape != values[0].shape for each in values):
        raise Underivable(f"{name}: the function gives it another shape for other values")
    half = len(values) // 2
    first, second = values[:half], values[half:]
    constant = np.ones(values[0].shape, bool)
    for one, other in zip(first, second, strict=True):
        constant &= (one == other) | ((one != one) & (other != other))
    if bool(constant.all()):
        return np.zeros(values[0].shape, np.int64)
    moved = [where.of(_carried(each, base)) for where, each in zip(places, (first, second), strict=True)]
    if bool(((moved[0] != moved[1]) | (moved[0] == 0))[~constant].any()):
        raise Underivable(f"{name}: its values are changed, not only moved{_narrowed(runs[0], base)}")
    if any(bool(each[constant].any()) for each in first):
        raise Underivable(
            f"{name}: some of its values come from elements, others from nowhere{_narrowed(runs[0], base)}"
        )
    return np.where(constant, 0, moved[0])


def _read(tensor: Any) -> Values:
    values: Values = np.asarray(tensor if isinstance(tensor, np.ndarray) else _of_torch(tensor))
    return values


def _of_torch(tensor: Any) -> Values:
    values = tensor.detach().cpu()
    array: Values = values.double().numpy() if values.dtype.is_floating_point else values.numpy()
    return array


def _carried(values: Sequence[Values], base: int) -> Numbers:
    """Return the numbers that the passes carried; 0 for a value that no pass gave."""
    whole = np.ones(values[0].shape, bool)
    for each in values:
        whole &= (each >= 0) & (each < base) & (each == np.floor(each))
    return combined([np.where(whole, each, 0).astype(np.int64) for each in values], base)


def _narrowed(tensor: Any, base: int) -> str:
    """Return what became of values whose type holds fewer numbers than the samples'."""
    dtype = dtype_of(tensor)
    holds = EXACT.get(dtype, 0)
    if holds >= base:
        return ""
    return f"; it is {dtype}, which does not hold all numbers: leave the cast out, or give samples of {dtype}"


Arrays = Mapping[str, npt.NDArray[Any]]
_MISFIT: Code = "SHAPE_MISMATCH"
_LISTED_NAMES = 3
"""Names that a problem lists."""


def prove(text: str, trace: Trace, labels: Labels) -> tuple[str, ...]:
    """Convert the tensors of a trace with a table, in both directions, and compare with what the converter made.

    Args:
        text: the table.
        trace: a run of the converter; the proof is worth most if the table was derived without it.
        labels: names of the family and its dialects.

    Returns:
        What is wrong; nothing where both directions are exact.
    """
    sides = [_tensors(trace.hub, trace), _tensors(trace.memory, trace)]
    problems = []
    with tempfile.TemporaryDirectory(prefix="transaxle-proof-") as scratch:
        rules = Path(scratch, "table.rules")
        rules.write_text(text, "utf-8")
        for source, target in ((0, 1), (1, 0)):
            folder = Path(scratch, f"from-{source}")
            folder.mkdir()
            save_file(dict(sides[source]), folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(trace.config), "utf-8")
            direction = f"{labels.dialects[source]} -> {labels.dialects[target]}"
            try:
                made = _converted(folder, Path(scratch, f"to-{target}"), rules, labels, source, target)
            except TransaxleError as error:
                problems.append(f"{direction}: {error}")
                continue
            problems += [f"{direction}: {fault}" for fault in differences(made, sides[target])]
    return tuple(problems)


def misfits(text: str, shapes: Mapping[str, Shape], config: Mapping[str, Any], labels: Labels) -> tuple[str, ...]:
    """Hold a table against the shapes of a real model, whose sizes are in other ratios than those of tiny ones.

    Args:
        text: the table.
        shapes: name in memory -> shape.
        config: the model's config.
        labels: names of the family and its dialects.

    Returns:
        What the table says of these shapes, and is not so.
    """
    (family,) = tables.read(text)
    dialect = family.dialect(labels.dialects[1])
    assert dialect is not None  # the table has it by this name
    sizes, problems = Sizes(family, config), []
    bound = bind(tuple(shapes), family, dialect, sizes) if shapes else None
    for (line, _), names in bound.names.items() if bound else ():
        for position, name in names.items():
            try:
                fill(line.expression, shapes[name], sizes.at(dict(zip(line.name.axes, position, strict=True))))
            except TransaxleError as error:  # of sizes that nothing tells, nothing is said
                if error.code == _MISFIT:
                    problems.append(f"{name}: {error.refusals[0].message}")
    return tuple(problems)


def differences(made: Arrays, wanted: Arrays) -> list[str]:
    """Return how two sets of tensors differ in names, shapes, dtypes or bytes; nothing where they are equal."""
    missing, extra = sorted(wanted.keys() - made.keys()), sorted(made.keys() - wanted.keys())
    unlike = [name for name in made.keys() & wanted.keys() if not _same(made[name], wanted[name])]
    found = (("lacks", missing), ("has besides", extra), ("differs in", sorted(unlike)))
    return [f"{word} {', '.join(names[:_LISTED])}{_more(names)}" for word, names in found if names]


def _more(names: list[str]) -> str:
    return f" and {len(names) - _LISTED} more" if len(names) > _LISTED_NAMES else ""


def _same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _tensors(numbers: Arrays, trace: Trace) -> dict[str, npt.NDArray[Any]]:
    """Return the numbers as tensors: 32 bits hold them all."""
    flags = {name: np.zeros(shape, np.bool_) for name, shape in trace.unnumbered.items()}
    return {**{name: np.array(each, np.int32, order="C") for name, each in numbers.items()}, **flags}


def _converted(folder: Path, out: Path, rules: Path, labels: Labels, source: int, target: int) -> Arrays:
    first, second = labels.dialects[source], labels.dialects[target]
    with open_checkpoint(str(folder), rules=str(rules), family=labels.family, dialect=first) as checkpoint:
        prepared = make_plan(checkpoint, f"safetensors:{second}", target=str(out))
        execute(prepared, str(out), sync=False, limit=limits(1, None))
    return loaded(out, load_file)


_TABLE = re.compile(rf"^\s*({FAMILY}|{BLOCK}|{DIALECT})\s".encode(), re.MULTILINE)
_READ = 1 << 20
"""Bytes of an existing file in which a table has its first statement."""
_ELSEWHERE = "Choose another name, or replace it"


def check_place(path: PathLike, *, overwrite: Overwrite = False) -> None:
    """Refuse a place where no table can or may be put.

    Args:
        path: the file.
        overwrite: an existing table there may be replaced; `everything`: any file.

    Raises:
        UsageError: EXISTS for what must stay; AMBIGUOUS for an invalid `overwrite`.
        StorageError: IO where the folder is missing, or the existing file cannot be read.
    """
    target, overwrite = Path(read_path("path", path)), read_overwrite(overwrite)
    shown = str(path)
    if not target.parent.is_dir():
        raise refuse("IO", f"the folder {target.parent} does not exist", file=shown, hint="Create it first.")
    if not os.path.lexists(target):
        return
    if target.is_dir():
        raise refuse("EXISTS", "this is a folder", file=shown, hint="Name a file in it.")
    try:
        is_other = overwrite != EVERYTHING and target.exists() and not (target.is_file() and _is_table(target))
    except OSError as error:
        if overwrite:
            raise failed(error, "reading the file that is to be replaced", shown) from error
        is_other = True
    anyway = f'{_ELSEWHERE} anyway: --overwrite={EVERYTHING} (overwrite="{EVERYTHING}").'
    if not overwrite:
        hint = anyway if is_other else f"{_ELSEWHERE} with --overwrite (overwrite=True)."
        raise refuse("EXISTS", "the file already exists", file=shown, hint=hint)
    if is_other:
        raise refuse("EXISTS", "the file is not replaced: it is no table", file=shown, hint=anyway)


def write_table(text: str, path: PathLike, *, overwrite: Overwrite = False) -> None:
    """Write a table.

    Args:
        text: the table.
        path: the file; a link is followed.
        overwrite: an existing table there may be replaced; `everything`: any file.

    Raises:
        UsageError: EXISTS for what must stay; AMBIGUOUS for an invalid `overwrite`.
        StorageError: IO, NO_SPACE.
    """
    check_place(path, overwrite=overwrite)
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.transaxle-partial")
    try:
        with opened_draft(partial, target) as file:
            file.write(text.encode())
        if overwrite:
            partial.replace(target)
        else:
            rename_new(str(partial), str(target))
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, FileExistsError):
            raise refuse("EXISTS", "something else created the file in the meantime", file=str(path)) from error
        raise failed(error, "writing the table", str(path)) from error


def _is_table(path: Path) -> bool:
    with path.open("rb") as file:
        return _TABLE.search(file.read(_READ)) is not None


UNNAMED = "derived"
"""Family of a converter without a name."""
_LISTED = 6
"""Problems of a table that a refusal lists."""
_LEAST = 2
"""Fewest traces of a model type: one to derive from, and one of other sizes to prove the table with."""


_MOST = 100_000_000
"""Elements of the traces beside which there is room for more of them."""


@dataclass(frozen=True)
class Table:
    """A derived table."""

    family: str
    """Name of its family."""
    text: str
    """The table, as `--rules` reads it."""
    left_out: tuple[str, ...]
    """What the converter does that no table says: tensors that it drops or invents."""
    traces: int
    """Number of traces that it follows from."""
    proved: bool
    """Whether it converted a trace that it does not follow from, of other sizes, exactly and both ways."""

    def save(self, path: PathLike, *, overwrite: Overwrite = False) -> None:
        """Write the table to a file.

        Args:
            path: the file.
            overwrite: replace a table that is there; `everything`: any file.

        Raises:
            UsageError: EXISTS for a file that must stay; AMBIGUOUS for an invalid `overwrite`.
            StorageError: IO where the folder is missing; NO_SPACE.
        """
        write_table(self.text, path, overwrite=overwrite)


def _name_of(labels: Labels) -> str:
    return "this converter" if labels.family == UNNAMED else labels.family


def are_dialects(names: object) -> bool:
    """Tell whether something is a pair of names that the two dialects of a table can have."""
    if not isinstance(names, tuple | list) or len(names) != 2 or names[0] == names[1]:
        return False
    return all(isinstance(name, str) and re.fullmatch(WORD, name) for name in names)


def family_name(text: str) -> str:
    """Return a text as the name of a family."""
    return re.sub(r"\W", "_", text)


def from_transformers(model_type: str, config: Mapping[str, Any] | None = None, family: str | None = None) -> Table:
    """Derive the table of a model type: `hf`, what `save_pretrained` writes, and `transformers`, what is in memory.

    Args:
        model_type: the word that config.json has.
        config: a config of the model, whose flags and kinds of layers count; None: the default one.
        family: name of the family; None: the model type's.

    Raises:
        Refused: UNSUPPORTED where no table says what transformers does, or torch or transformers are not installed.
        UsageError: UNKNOWN_FAMILY where transformers does not know the model type.
    """
    from transaxle.derivation.transformers_models import Peer, shapes, traced_or_not, variants

    peer = Peer()
    complaints: list[str] = []

    def traced(numbers: Sequence[int]) -> list[Trace]:
        found = (traced_or_not(peer, m, complaints) for m, _ in variants(peer, model_type, config, complaints, numbers))
        return [each for each in found if each is not None]

    with _refusing(model_type):
        traces = traced(range(VARIANTS))
        if len(traces) < _LEAST:
            raise _too_few(len(traces), model_type, complaints, bare=config is None)
        labels = Labels(
            family or family_name(model_type),
            tuple(dict.fromkeys((model_type, str(traces[0].config.get("model_type", model_type))))),
            comments=(
                f"{model_type}: hf is what save_pretrained writes, transformers what is in memory.",
                f"Derived from transformers {peer.version} by tracing: `transaxle derive {model_type}`.",
            ),
        )
        real = {} if config is None else shapes(peer, model_type, config)
        trying = _Trying(labels, peer.aliases(model_type), real, config or {})
        table = trying.derived(traces, traced((PROPORTIONED,)), lambda: traced(range(VARIANTS, MORE_VARIANTS)))
    return _table(table, labels, proved=True)


@dataclass
class _Trying:
    """Derives a table from all traces but one and proves it with that, until it is proved."""

    labels: Labels
    aliases: Mapping[str, Sequence[str]]
    real: Mapping[str, Shape]
    """Shapes of the real model; none where no config was given."""
    config: Mapping[str, Any]
    """Its config."""
    reason: Underivable | None = None
    """Why the first table is not proved."""

    def derived(
        self, traces: Sequence[Trace], proportioned: Sequence[Trace], more: Callable[[], Sequence[Trace]]
    ) -> Derived:
        """Return a table that is proved.

        Args:
            traces: of configs of other sizes each.
            proportioned: the trace of a config in the proportions of the real one, if there is one.
            more: makes traces with other flags; called where a size or a condition may have fitted a key by accident.

        Raises:
            Underivable: there is none.
        """
        last = len(traces) - 1
        table = self._one(traces[:last], (traces[last], *proportioned), sparse=False)
        if table is not None:
            return table
        every = (*traces, *proportioned)
        if sum(n.size for trace in every for n in trace.memory.values()) <= _MOST:
            every += tuple(more())
        for held in range(last, 0, -1):
            for sparse in (False, True):
                table = self._one((*every[:held], *every[held + 1 :]), (every[held], *every), sparse=sparse)
                if table is not None:
                    return table
        assert self.reason is not None
        raise self.reason

    def _one(self, traces: Sequence[Trace], proofs: Sequence[Trace], *, sparse: bool) -> Derived | None:
        """Return the table that some traces give, if no other disproves it."""
        try:
            table = derive(traces, self.labels, self.aliases, sparse=sparse)
            self._prove(table, proofs)
        except Underivable as error:
            self.reason = self.reason or error
            return None
        return table

    def _prove(self, table: Derived, traces: Sequence[Trace]) -> None:
        """Hold a table against traces and the shapes of the real model.

        Raises:
            Underivable: what they disprove.
        """
        for trace in traces:
            problems = prove(table.text, trace, self.labels)
            if problems:
                raise _disproved("a config of other sizes", problems)
        problems = misfits(table.text, self.real, self.config, self.labels)
        if problems:
            raise _disproved("the config that was given", problems)


def _disproved(by: str, problems: Sequence[str]) -> Underivable:
    return Underivable(f"{by} disproves the derived table: {'; '.join(problems[:_LISTED])}")


def _too_few(built: int, model_type: str, complaints: Sequence[str], *, bare: bool) -> Underivable:
    """Return why too few tiny models can be built, with what the first of them said."""
    why = f"{built or 'none'} of its tiny configs can be built, and a proof needs {_LEAST}"
    first = f" (the first that cannot: {complaints[0]})" if complaints else ""
    hint = (
        "The tiny configs are made of the default config. Give the model's own instead, its folder or config.json:  "
        f"transaxle derive FOLDER -o {family_name(model_type)}.rules."
    )
    return Underivable(why + first, hint if bare else "")


def from_function(
    convert: Callable[[dict[str, Any]], Mapping[str, Any]],
    samples: Sequence[Tensors],
    configs: Sequence[Mapping[str, Any]] = (),
    labels: Labels | None = None,
) -> Table:
    """Derive the table of a converter in Python.

    Args:
        convert: a function from a state dict of the first dialect to one of the second.
        samples: state dicts of the first dialect, of numpy arrays or torch tensors whose values do not matter; several,
            of different sizes, show which sizes hang together.
        configs: the config of each sample.
        labels: names of the family and its dialects.

    Raises:
        TypeError: `samples` are no state dicts, or the function returns none.
        ValueError: there is not one config for each sample.
        Refused: UNSUPPORTED where no table says what the function does.
    """
    labels = labels or Labels(UNNAMED, dialects=("hf", "converted"))
    check_samples(samples)
    if configs and len(configs) != len(samples):
        raise ValueError(f"configs must be one for each of the {len(samples)} samples; there are {len(configs)}")
    with _refusing(_name_of(labels)):
        pairs = [trace_function(convert, sample) for sample in samples]
        traces = [
            Trace(hub, memory, dict(configs[at]) if at < len(configs) else {}) for at, (hub, memory) in enumerate(pairs)
        ]
        return _proved(traces, labels)


def from_folders(pairs: Sequence[tuple[str, str]], labels: Labels) -> Table:
    """Derive a table from pairs of checkpoints: numbered elements, and what a converter made of them.

    Args:
        pairs: (before, after), of different sizes; `number_elements` makes the first of each.
        labels: names of the family and its dialects.

    Raises:
        Refused: UNSUPPORTED where no table says what the converter did.
    """
    traces = []
    with _refusing(_name_of(labels)):
        for before, after in pairs:
            with opened_pair(before, after, {}) as (first, second):
                config = stored_config(first.container.storage) if CONFIG in first.container.carried else {}
                traces.append(Trace(*numbered(first, second), config))
        if not labels.model_types and isinstance(traces[0].config.get("model_type"), str):
            labels = Labels(labels.family, (traces[0].config["model_type"],), labels.dialects, labels.comments)
        return _proved(traces, labels)


def _proved(traces: Sequence[Trace], labels: Labels) -> Table:
    """Derive a table from all traces but the last, and prove it with that; of one, it follows and is not proved."""
    said = [told(trace) for trace in traces]
    traces, notes = [trace for trace, _ in said], tuple(dict.fromkeys(note for _, each in said for note in each))
    last = len(traces) > 1
    table = derive(traces[:-1] if last else traces, labels)
    problems = prove(table.text, traces[-1], labels)
    if problems and last:
        table, problems = derive(traces, labels), ()
        problems = prove(table.text, traces[-1], labels)
        last = False
    if problems:
        raise Underivable("the derived table does not do what the converter did: " + "; ".join(problems))
    return _table(table, labels, proved=last, notes=notes)


def _table(table: Derived, labels: Labels, *, proved: bool, notes: tuple[str, ...] = ()) -> Table:
    return Table(labels.family, table.text, (*notes, *table.left_out), table.traces, proved)


class _refusing:  # noqa: N801 - reads as a clause: with _refusing(what)
    """Turns what no table says into a refusal."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Raise the refusal."""
        if isinstance(error, Underivable):
            raise _no_table(self.what, str(error), error.hint) from None


def _no_table(what: str, why: str, hint: str = "") -> TransaxleError:
    by_hand = "Write the table by hand (docs/how-to/add-a-family.md), or keep all names with --to safetensors:identity."
    return refuse("UNSUPPORTED", f"no table can be derived for {what}: {why}", hint=hint or by_hand)
