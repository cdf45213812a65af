"""What a table is derived from: a model type of transformers, a function, or folders of a user's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transaxle.arguments import Overwrite, PathLike
from transaxle.axes.notation.statement import WORD
from transaxle.derivation.fitting.trace import Shape, Trace, Underivable, told
from transaxle.derivation.numbering import numbered
from transaxle.derivation.proof import misfits, prove
from transaxle.derivation.table_file import write_table
from transaxle.derivation.tracing.tiny_configs import MORE_VARIANTS, PROPORTIONED, VARIANTS
from transaxle.derivation.writing.from_traces import Derived, derive
from transaxle.derivation.writing.table import Labels
from transaxle.engine.checkpoint.settings import CONFIG, stored_config
from transaxle.engine.compare.pair import opened_pair
from transaxle.errors import TransaxleError, refuse

Tensors = Mapping[str, Any]
"""A state dict: numpy arrays or torch tensors."""
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
    from transaxle.derivation.tracing.transformers_models import Peer, shapes, traced_or_not, variants

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
    from transaxle.derivation.tracing.function_trace import check_samples, trace_function

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
