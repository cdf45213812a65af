"""Derives a table of mapping rules from a converter: makes traces, proves the table, and writes the table's file.

The converter is transformers' own for a model type, a Python function, or a program that reads and writes folders. A
*trace* is a record of a converter's input and output tensors, whose elements are numbered.

**Proof**: the table converts the tensors of a trace from which it was not derived, in both directions. The results are
compared bit by bit with the converter's results.

The file of a derived table is complete as soon as it exists. Writing a table never replaces a file that must be kept.

**Traces of functions**: a Python converter is called with state dicts whose elements are numbered in two ways, in two
runs. A value that is equal in both outputs is a constant; any other value identifies its source element.
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

from transaxle.arguments import (
    EVERYTHING,
    Config,
    Overwrite,
    PathLike,
    read_optional_text,
    read_overwrite,
    read_path,
    wrong_type,
)
from transaxle.axes.layout.bind import bind
from transaxle.axes.layout.relayout import fill
from transaxle.axes.notation import tables
from transaxle.axes.notation.family import Sizes
from transaxle.axes.notation.statement import BLOCK, DIALECT, FAMILY, WORD
from transaxle.derivation.configs import COMPARED
from transaxle.derivation.table import DerivedTable, Labels
from transaxle.derivation.table import derive as derive_table
from transaxle.derivation.tiny_configs import MORE_VARIANTS, PROPORTIONED, VARIANTS
from transaxle.derivation.traces import (
    EXACT,
    Numbers,
    Places,
    Shape,
    Trace,
    Underivable,
    combine,
    digits,
    distribute,
    dtype_of,
    passes,
    read_numbered,
    shuffle,
    split_trace,
)
from transaxle.derivation.transformers_models import load_tensors
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.checkpoint.settings import CONFIG, model_config, read_stored_config
from transaxle.engine.execute import execute
from transaxle.engine.plan.conversion import make_plan
from transaxle.engine.verification import open_pair
from transaxle.errors import Code, TransaxleError, refuse
from transaxle.formats.storage.local import storage_error
from transaxle.formats.store.access import open_draft
from transaxle.formats.store.place import rename_new
from transaxle.move.workers import limits

Tensors = Mapping[str, Any]
Values = npt.NDArray[Any]


def trace_function(
    convert: Callable[[dict[str, Any]], Tensors], sample: Tensors
) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Run a function on a state dict whose elements are numbered in two ways, as often as the dtypes require, and
    return a trace.

    Args:
        convert: function from a state dict to a converted state dict.
        sample: state dict of arrays or tensors, whose values do not matter.

    Returns:
        The element numbers in the output and in the input; a tensor that the function creates has only zeros.

    Raises:
        Underivable: if the function changes values, or a dtype cannot carry element numbers.
        TypeError: if the function does not return a state dict.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in sample.items()}
    total = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
    base = min((_base(name, tensor) for name, tensor in sample.items()), default=1 << 24)
    numberings = shuffle(total)
    runs = []
    for numbers in numberings:
        tensors = distribute(numbers, shapes)
        for position in range(passes(total + 1, base)):
            numbered_sample = {
                name: _fill(tensor, digits(tensors[name], base, position)) for name, tensor in sample.items()
            }
            runs.append(_state_dict(convert(numbered_sample)))
    if any(each.keys() != runs[0].keys() for each in runs):
        raise Underivable("the function gives other names for other values")
    places = [Places(numbers) for numbers in numberings]
    memory = {name: _came_from(name, [run[name] for run in runs], base, places) for name in runs[0]}
    return distribute(np.arange(1, total + 1), shapes), memory


def _base(name: str, tensor: Any) -> int:
    dtype = dtype_of(tensor)
    if dtype not in EXACT:
        raise Underivable(f"{name} is {dtype}, which holds no numbers; give it as another type")
    return EXACT[dtype]


def _fill(tensor: Any, values: Numbers) -> Any:
    """Return a tensor with the given values, of the same library (numpy or torch) and dtype as the sample `tensor`."""
    if isinstance(tensor, np.ndarray):
        return values.astype(tensor.dtype)
    return tensor.new_tensor(values.tolist()).reshape(tuple(tensor.shape)).to(tensor.dtype)


def check_samples(samples: object) -> None:
    """Refuse samples that are not state dicts.

    Raises:
        TypeError: if `samples` is not a non-empty sequence of mappings from names to arrays or tensors.
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
    """Return the result of a converter function if the result is a state dict; otherwise raise TypeError."""
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
    """Return the source element of each value in an output tensor; 0 for zeros, and for tensors that the function
    creates.

    Args:
        name: the tensor's name.
        runs: the output tensors: those of all passes with the first numbering, then those with the second numbering.
        base: number of distinct element numbers that one pass can carry.
        places: for each numbering, an object that finds the element with a given number.
    """
    values = [_read(tensor) for tensor in runs]
    if any(each.shape != values[0].shape for each in values):
        raise Underivable(f"{name}: the function gives it another shape for other values")
    half = len(values) // 2
    first, second = values[:half], values[half:]
    constant = np.ones(values[0].shape, bool)
    for first_values, second_values in zip(first, second, strict=True):
        constant &= (first_values == second_values) | (
            (first_values != first_values) & (second_values != second_values)
        )
    if bool(constant.all()):
        return np.zeros(values[0].shape, np.int64)
    moved = [where.of(_carry(each, base)) for where, each in zip(places, (first, second), strict=True)]
    if bool(((moved[0] != moved[1]) | (moved[0] == 0))[~constant].any()):
        raise Underivable(f"{name}: its values are changed, not only moved{_dtype_note(runs[0], base)}")
    if any(bool(each[constant].any()) for each in first):
        raise Underivable(
            f"{name}: some of its values come from elements, others from nowhere{_dtype_note(runs[0], base)}"
        )
    return np.where(constant, 0, moved[0])


def _read(tensor: Any) -> Values:
    values: Values = np.asarray(tensor if isinstance(tensor, np.ndarray) else _of_torch(tensor))
    return values


def _of_torch(tensor: Any) -> Values:
    values = tensor.detach().cpu()
    array: Values = values.double().numpy() if values.dtype.is_floating_point else values.numpy()
    return array


def _carry(values: Sequence[Values], base: int) -> Numbers:
    """Return the element numbers that all passes together transported; 0 for values that no pass transported."""
    whole = np.ones(values[0].shape, bool)
    for values_of_pass in values:
        whole &= (values_of_pass >= 0) & (values_of_pass < base) & (values_of_pass == np.floor(values_of_pass))
    return combine([np.where(whole, values_of_pass, 0).astype(np.int64) for values_of_pass in values], base)


def _dtype_note(tensor: Any, base: int) -> str:
    """Return a note for the error, if the tensor's dtype represents fewer numbers exactly than the samples' dtype."""
    dtype = dtype_of(tensor)
    holds = EXACT.get(dtype, 0)
    if holds >= base:
        return ""
    return f"; it is {dtype}, which does not hold all numbers: leave the cast out, or give samples of {dtype}"


Arrays = Mapping[str, npt.NDArray[Any]]
_MISFIT: Code = "SHAPE_MISMATCH"
_LISTED_NAMES = 3
"""Maximum number of tensor names that the text of one problem lists."""


def prove(text: str, traces: Sequence[Trace], labels: Labels) -> tuple[str, ...]:
    """Convert the tensors of traces with a table, in both directions, and compare the results with the converter's.

    Args:
        text: text of the table of mapping rules.
        traces: runs of the converter, preferably first one from which the table was not derived.
        labels: names of the family and its dialects.

    Returns:
        The problems of the first trace that disproves the table; an empty list means that the results are exact in both
        directions.
    """
    with tempfile.TemporaryDirectory(prefix="transaxle-proof-") as scratch:
        rules = Path(scratch, "table.rules")  # one file for all traces, so that it is parsed once
        rules.write_text(text, "utf-8")
        for trace in traces:
            problems = _prove_trace(rules, trace, labels)
            if problems:
                return problems
    return ()


def _prove_trace(rules: Path, trace: Trace, labels: Labels) -> tuple[str, ...]:
    sides = [_tensors(trace.hub, trace), _tensors(trace.memory, trace)]
    problems = []
    with tempfile.TemporaryDirectory(prefix="transaxle-proof-") as scratch:
        for source, target in ((0, 1), (1, 0)):
            folder = Path(scratch, f"from-{source}")
            folder.mkdir()
            save_file(dict(sides[source]), folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(trace.config), "utf-8")
            direction = f"{labels.dialects[source]} -> {labels.dialects[target]}"
            try:
                converted = _convert(folder, Path(scratch, f"to-{target}"), rules, labels, source, target)
            except TransaxleError as error:
                problems.append(f"{direction}: {error}")
                continue
            problems += [f"{direction}: {fault}" for fault in differences(converted, sides[target])]
    return tuple(problems)


def misfits(text: str, shapes: Mapping[str, Shape], config: Mapping[str, Any], labels: Labels) -> tuple[str, ...]:
    """Compare a table of mapping rules with the shapes of a full-size model, whose sizes have different ratios than
    those of tiny models.

    Args:
        text: text of the table.
        shapes: tensor name in memory -> shape.
        config: the model's config.
        labels: names of the family and its dialects.

    Returns:
        The contradictions between the table and the shapes.
    """
    (family,) = tables.read(text)
    dialect = family.dialect(labels.dialects[1])
    assert dialect is not None  # every derived table has this dialect
    sizes, problems = Sizes(family, config), []
    bound = bind(tuple(shapes), family, dialect, sizes) if shapes else None
    for (line, _), names in bound.names.items() if bound else ():
        for position, name in names.items():
            try:
                fill(line.expression, shapes[name], sizes.at(line.name.index_at(position)))
            except TransaxleError as error:  # an unknown size is no contradiction
                if error.code == _MISFIT:
                    problems.append(f"{name}: {error.refusals[0].message}")
    return tuple(problems)


def differences(actual: Arrays, expected: Arrays) -> list[str]:
    """Return the differences between two sets of tensors in names, shapes, dtypes or bytes; empty if they are equal."""
    missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    unlike = [name for name in actual.keys() & expected.keys() if not _same(actual[name], expected[name])]
    kinds = (("lacks", missing), ("has besides", extra), ("differs in", sorted(unlike)))
    return [f"{word} {', '.join(names[:_LISTED])}{_more(names)}" for word, names in kinds if names]


def _more(names: list[str]) -> str:
    return f" and {len(names) - _LISTED} more" if len(names) > _LISTED_NAMES else ""


def _same(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and first.tobytes() == second.tobytes()


def _tensors(numbers: Arrays, trace: Trace) -> dict[str, npt.NDArray[Any]]:
    """Return element numbers as tensors of a 32-bit dtype, which represents all these numbers exactly."""
    flags = {name: np.zeros(shape, np.bool_) for name, shape in trace.unnumbered.items()}
    return {**{name: np.asarray(each, np.int32, order="C") for name, each in numbers.items()}, **flags}


def _convert(folder: Path, out: Path, rules: Path, labels: Labels, source: int, target: int) -> Arrays:
    first, second = labels.dialects[source], labels.dialects[target]
    with open_checkpoint(str(folder), rules=str(rules), family=labels.family, dialect=first) as checkpoint:
        prepared = make_plan(checkpoint, f"safetensors:{second}", target=str(out))
        execute(prepared, str(out), sync=False, limit=limits(1, None))
    return load_tensors(out, load_file)


_TABLE = re.compile(rf"^\s*({FAMILY}|{BLOCK}|{DIALECT})\s".encode(), re.MULTILINE)
_READ = 1 << 20
"""Number of bytes of an existing file that are searched for the first statement of a table."""
_ELSEWHERE = "Choose another name, or replace it"


def check_place(path: PathLike, *, overwrite: Overwrite = False) -> None:
    """Refuse a path at which a table of mapping rules cannot or must not be written.

    Args:
        path: path of the file.
        overwrite: True to replace an existing table; `everything` to replace any existing file; False to replace
            nothing.

    Raises:
        UsageError: with the code EXISTS if there is a file that must not be replaced; with the code AMBIGUOUS if
            `overwrite` has an invalid value.
        StorageError: with the code IO if the folder is missing, or an existing file cannot be read.
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
            raise storage_error(error, "reading the file that is to be replaced", shown) from error
        is_other = True
    anyway = f'{_ELSEWHERE} anyway: --overwrite={EVERYTHING} (overwrite="{EVERYTHING}").'
    if not overwrite:
        hint = anyway if is_other else f"{_ELSEWHERE} with --overwrite (overwrite=True)."
        raise refuse("EXISTS", "the file already exists", file=shown, hint=hint)
    if is_other:
        raise refuse("EXISTS", "the file is not replaced: it is no table", file=shown, hint=anyway)


def write_table(text: str, path: PathLike, *, overwrite: Overwrite = False) -> None:
    """Write a table of mapping rules to a file.

    Args:
        text: text of the table.
        path: path of the file; a symbolic link is followed.
        overwrite: True to replace an existing table; `everything` to replace any existing file; False to replace
            nothing.

    Raises:
        UsageError: with the code EXISTS if there is a file that must not be replaced; with the code AMBIGUOUS if
            `overwrite` has an invalid value.
        StorageError: with the code IO if the file cannot be written; with the code NO_SPACE if the disk is full.
    """
    check_place(path, overwrite=overwrite)
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.transaxle-partial")
    try:
        with open_draft(partial, target) as file:
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
        raise storage_error(error, "writing the table", str(path)) from error


def _is_table(path: Path) -> bool:
    with path.open("rb") as file:
        return _TABLE.search(file.read(_READ)) is not None


UNNAMED = "derived"
"""Name of the derived family if the user specifies none."""
_LISTED = 6
"""Maximum number of problems of a table that an error message lists."""
_LEAST = 2
"""Minimum number of traces of a model type: one to derive the table from, and one with different sizes for the
proof.
"""


_MOST = 100_000_000
"""Total number of elements in all traces; once it is reached, no further traces are made."""


@dataclass(frozen=True)
class Table:
    """A derived table of mapping rules: a model family with two dialects."""

    family: str
    """Name of the family."""
    text: str
    """The text of the table, in the format of rules files (`--rules`)."""
    left_out: tuple[str, ...]
    """Notes on what the converter does but no mapping rule can describe: tensors that it drops or creates."""
    traces: int
    """Number of traces from which the table was derived."""
    proved: bool
    """Whether the table was proved: in both directions, it converted a trace with different sizes exactly, from which
    it was not derived.
    """

    def save(self, path: PathLike, *, overwrite: Overwrite = False) -> None:
        """Write the table to a file.

        Args:
            path: path of the file.
            overwrite: True to replace an existing table; `everything` to replace any existing file; False to replace
                nothing.

        Raises:
            UsageError: with the code EXISTS if there is a file that must not be replaced; with the code AMBIGUOUS if
                `overwrite` has an invalid value.
            StorageError: with the code IO if the folder is missing; with the code NO_SPACE if the disk is full.
        """
        write_table(self.text, path, overwrite=overwrite)


def _name_of(labels: Labels) -> str:
    return "this converter" if labels.family == UNNAMED else labels.family


def are_dialects(names: object) -> bool:
    """Return whether an object is a pair of two valid dialect names."""
    if not isinstance(names, tuple | list) or len(names) != 2 or names[0] == names[1]:
        return False
    return all(isinstance(name, str) and re.fullmatch(WORD, name) for name in names)


def family_name(text: str) -> str:
    """Turn a text into a valid family name."""
    return re.sub(r"\W", "_", text)


def from_transformers(model_type: str, config: Mapping[str, Any] | None = None, family: str | None = None) -> Table:
    """Derive the table of a model type, with the dialects `hf` (what `save_pretrained` writes) and `transformers` (in
    memory).

    Args:
        model_type: `model_type` of config.json.
        config: a config of the model, whose flags and kinds of layers the tiny models get; None means the default
            config.
        family: name of the derived family; None means the name of the model type.

    Raises:
        Refused: with the code UNSUPPORTED if no table can describe transformers' conversion, or torch or transformers
            is not installed.
        UsageError: with the code UNKNOWN_FAMILY if transformers does not know the model type.
    """
    from transaxle.derivation.transformers_models import Peer, shapes, try_trace, variants

    peer = Peer()
    complaints: list[str] = []

    def make_traces(numbers: Sequence[int]) -> list[Trace]:
        found = (try_trace(peer, m, complaints) for m, _ in variants(peer, model_type, config, complaints, numbers))
        return [each for each in found if each is not None]

    with _RefuseUnderivable(model_type):
        traces = make_traces(range(VARIANTS))
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
        compared = COMPARED.get(model_type, {})
        trying = _ProvedDerivation(labels, peer.aliases(model_type), real, config or {}, compared)
        table = trying.derived(
            traces, make_traces((PROPORTIONED,)), lambda: make_traces(range(VARIANTS, MORE_VARIANTS))
        )
    return _table(table, labels, proved=True)


@dataclass
class _ProvedDerivation:
    """Derives a table from all traces but one, and proves it with that one; repeats until a proof succeeds."""

    labels: Labels
    aliases: Mapping[str, Sequence[str]]
    real: Mapping[str, Shape]
    """Tensor name -> shape, for the full-size model of the user's config; empty if there is no config."""
    config: Mapping[str, Any]
    """Config of the full-size model."""
    compared: Mapping[str, str]
    """Beginning of tensor names in memory -> known condition of these tensors."""
    reason: Underivable | None = None
    """Reason why the first derived table could not be proved."""

    def derived(
        self, traces: Sequence[Trace], proportioned: Sequence[Trace], make_more: Callable[[], Sequence[Trace]]
    ) -> DerivedTable:
        """Return a proved table.

        Args:
            traces: traces of configs with different sizes.
            proportioned: the trace of a tiny config with the proportions of the user's config; empty if there is no
                such trace.
            make_more: function that makes traces with different flags; called if a size or a condition may fit a config
                key by chance.

        Raises:
            Underivable: if no table could be proved.
        """
        last = len(traces) - 1
        table = self._one(traces[:last], (traces[last], *proportioned), sparse=False)
        if table is not None:
            return table
        every = (*traces, *proportioned)
        if sum(n.size for trace in every for n in trace.memory.values()) <= _MOST:
            every += tuple(make_more())
        for proof_number in range(last, 0, -1):
            for sparse in (False, True):
                basis = (*every[:proof_number], *every[proof_number + 1 :])
                table = self._one(basis, (every[proof_number], *basis), sparse=sparse)
                if table is not None:
                    return table
        assert self.reason is not None
        raise self.reason

    def _one(self, traces: Sequence[Trace], proofs: Sequence[Trace], *, sparse: bool) -> DerivedTable | None:
        """Return the table derived from `traces`; None if one of the traces in `proofs` disproves it."""
        try:
            table = derive_table(traces, self.labels, self.aliases, sparse=sparse, compared=self.compared)
            self._prove(table, proofs)
        except Underivable as error:
            self.reason = self.reason or error
            return None
        return table

    def _prove(self, table: DerivedTable, traces: Sequence[Trace]) -> None:
        """Check a table against traces, and against the shapes of the full-size model.

        Raises:
            Underivable: if the table is disproved.
        """
        problems = prove(table.text, traces, self.labels)
        if problems:
            raise _disproof("a config of other sizes", problems)
        problems = misfits(table.text, self.real, self.config, self.labels)
        if problems:
            raise _disproof("the config that was given", problems)


def _disproof(by: str, problems: Sequence[str]) -> Underivable:
    return Underivable(f"{by} disproves the derived table: {'; '.join(problems[:_LISTED])}")


def _too_few(built: int, model_type: str, complaints: Sequence[str], *, bare: bool) -> Underivable:
    """Build the error for the case that too few tiny models could be built; it contains the first model's error
    message.
    """
    why = f"{built or 'none'} of its tiny configs can be built, and a proof needs {_LEAST}"
    first = f" (the first that cannot: {complaints[0]})" if complaints else ""
    hint = (
        "The tiny configs were made from the default config of the model type. Give your model's config or folder:  "
        f"transaxle derive FOLDER -o {family_name(model_type)}.rules."
    )
    return Underivable(why + first, hint if bare else "")


def from_function(
    convert: Callable[[dict[str, Any]], Mapping[str, Any]],
    samples: Sequence[Tensors],
    configs: Sequence[Mapping[str, Any]] = (),
    labels: Labels | None = None,
) -> Table:
    """Derive a table of mapping rules from a converter function in Python.

    Args:
        convert: function that converts a state dict of the first dialect into a state dict of the second dialect.
        samples: state dicts in the first dialect, of numpy arrays or torch tensors, whose values do not matter. Several
            samples with different sizes show which sizes depend on one another.
        configs: the config of each sample.
        labels: names of the family and its dialects.

    Raises:
        TypeError: if `samples` are not state dicts, or the function does not return a state dict.
        ValueError: if the numbers of configs and of samples differ.
        Refused: with the code UNSUPPORTED if no table can describe the function.
    """
    labels = labels or Labels(UNNAMED, dialects=("hf", "converted"))
    check_samples(samples)
    if configs and len(configs) != len(samples):
        raise ValueError(f"configs must be one for each of the {len(samples)} samples; there are {len(configs)}")
    with _RefuseUnderivable(_name_of(labels)):
        pairs = [trace_function(convert, sample) for sample in samples]
        traces = [
            Trace(hub, memory, dict(configs[at]) if at < len(configs) else {}) for at, (hub, memory) in enumerate(pairs)
        ]
        return _derive_and_prove(traces, labels)


def from_folders(pairs: Sequence[tuple[str, str]], labels: Labels) -> Table:
    """Derive a table from pairs of checkpoints: a numbered checkpoint, and the converter's output for that checkpoint.

    Args:
        pairs: paths `(before, after)` for models of different sizes; `number_elements` makes the checkpoint `before`.
        labels: names of the family and its dialects.

    Raises:
        Refused: with the code UNSUPPORTED if no table can describe the converter.
    """
    traces = []
    with _RefuseUnderivable(_name_of(labels)):
        for before, after in pairs:
            with open_pair(before, after, {}) as (first, second):
                config = read_stored_config(first.container.storage) if CONFIG in first.container.carried else {}
                traces.append(Trace(*read_numbered(first, second), config))
        if not labels.model_types and isinstance(traces[0].config.get("model_type"), str):
            labels = Labels(labels.family, (traces[0].config["model_type"],), labels.dialects, labels.comments)
        return _derive_and_prove(traces, labels)


def _derive_and_prove(traces: Sequence[Trace], labels: Labels) -> Table:
    """Derive a table from all traces but the last, and prove it with the last trace; a table from a single trace is not
    proved.
    """
    split_traces = [split_trace(trace) for trace in traces]
    traces, notes = (
        [trace for trace, _ in split_traces],
        tuple(dict.fromkeys(note for _, each in split_traces for note in each)),
    )
    last = len(traces) > 1
    table = derive_table(traces[:-1] if last else traces, labels)
    problems = prove(table.text, traces[-1:], labels)
    if problems and last:
        table, problems = derive_table(traces, labels), ()
        problems = prove(table.text, traces[-1:], labels)
        last = False
    if problems:
        raise Underivable("the derived table does not do what the converter did: " + "; ".join(problems))
    return _table(table, labels, proved=last, notes=notes)


def _table(table: DerivedTable, labels: Labels, *, proved: bool, notes: tuple[str, ...] = ()) -> Table:
    return Table(labels.family, table.text, (*notes, *table.left_out), table.traces, proved)


class _RefuseUnderivable:
    """Context manager that raises `Refused` instead of `Underivable`."""

    def __init__(self, converter: str) -> None:
        self.what = converter

    def __enter__(self) -> None:
        """Enter the context; the value is None."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Raise `Refused` if the block raised `Underivable`."""
        if isinstance(error, Underivable):
            raise _no_table(self.what, str(error), error.hint) from None


def _no_table(converter: str, why: str, hint: str = "") -> TransaxleError:
    by_hand = "Write the table by hand (docs/how-to/add-a-family.md), or keep all names with --to safetensors:identity."
    return refuse("UNSUPPORTED", f"no table can be derived for {converter}: {why}", hint=hint or by_hand)


_CONVERTED = ("hf", "converted")
"""Default names of the two dialects in a table that is derived from a function: of its input and of its output."""


def derive(
    converter: str | Callable[[dict[str, Any]], Mapping[str, Any]],
    *,
    config: Config | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    configs: Sequence[Mapping[str, Any]] = (),
    family: str | None = None,
    dialects: tuple[str, str] = _CONVERTED,
) -> Table:
    """Derive a table of mapping rules for tensor names from a converter, by tracing where it moves numbered elements.

    Args:
        converter: a model type of the installed transformers, or a function from a state dict to a state dict.
        config: for a model type, a config with the flags and kinds of layers to trace.
        samples: for a function, input state dicts of numpy arrays or torch tensors with any values. Samples of
            different sizes show which sizes depend on each other; the last sample is used to check the table.
        configs: for a function, the config of each sample.
        family: name of the family; None means the model type, the function's name, or `derived` for a lambda.
        dialects: for a function, the names of the dialects of its input and output.

    Returns:
        The table; `.text` is the content of a rules file for `--rules`, `.left_out` lists what mapping rules cannot
        describe.

    Raises:
        TypeError: if a sample, or the function's result, is not a mapping of names to arrays or tensors; or if an
            argument does not apply to this kind of converter.
        ValueError: if the number of `configs` differs from that of samples, or `dialects` are not two different names.
        Refused: with the code UNSUPPORTED if mapping rules cannot describe the converter.
        UsageError: with the code UNKNOWN_FAMILY if transformers does not know the model type.
    """
    family = read_optional_text("family", family, "glm4_moe")
    if isinstance(converter, str):
        if samples or configs or dialects != _CONVERTED:
            raise TypeError("samples, configs and dialects are for a function, not for a model type")
        return from_transformers(converter, model_config(config), family)
    if not callable(converter):
        raise wrong_type("converter", "a model type or a function", converter)
    if config is not None:
        raise TypeError("config is for a model type; for a function, give configs, one for each sample")
    if not are_dialects(dialects):
        raise ValueError(f"dialects must be two different names, such as ('hf', 'mine'); got {dialects!r}")
    own_name = str(getattr(converter, "__name__", UNNAMED))
    name = family_name(family or (UNNAMED if own_name == "<lambda>" else own_name))
    return from_function(converter, samples, configs, Labels(name, dialects=dialects))
