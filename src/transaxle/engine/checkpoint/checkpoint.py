"""An opened checkpoint: a mapping from stored names to tensors, in its own dialect or, lazily, in another.

Nothing is loaded until a tensor is read, and a read touches only the bytes of its box.

A table of a text model also reads that model inside a larger one, after a prefix such as `language_model.`, but it
cannot know how another framework names the whole, nor what is in a layer besides the tensors that it reads: converted
in part, the layer would have the others where nobody looks for them. Tensors whose names in another dialect no table
knows are refused (`foreign`, `half_converted`); under its own names such a checkpoint can still be moved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from operator import attrgetter
from typing import Any, TypeAlias

from msgspec.structs import replace

from transaxle.arguments import (
    DType,
    PathLike,
    Patterns,
    read_float_type,
    read_path,
    read_patterns,
    read_source,
    read_text,
)
from transaxle.axes.layout.bind import IN_MEMORY, WEIGHT, BoundNames, Index, split_slot, without_wrappers
from transaxle.axes.layout.relayout import Check, Target, identity_target
from transaxle.axes.notation.family import Dialect, Line, Recode, Sizes, same
from transaxle.axes.notation.name import is_outer, natural, skeleton
from transaxle.axes.translation.translate import Translation
from transaxle.encodings.encoding import EncodedTensor
from transaxle.engine.checkpoint.manifest import Manifest, hashed
from transaxle.engine.checkpoint.peft_adapter import adapter_config, in_dialect
from transaxle.engine.checkpoint.recognise import IDENTITY, Recognised, StoredNames, model_types, pick_dialect
from transaxle.engine.checkpoint.settings import Settings, settings
from transaxle.engine.checkpoint.stored_tensor import (
    Reopening,
    StoredTensor,
    TensorSet,
    no_such_name,
    refuse_to_pickle,
    reopened,
    table,
)
from transaxle.engine.source import Source
from transaxle.engine.views.decoded import regrouped
from transaxle.engine.views.encode import chosen
from transaxle.engine.views.encoded import Catalog, View, describes_tensors, nothing_encoded, ordering, viewed
from transaxle.engine.wording import plural
from transaxle.errors import Code, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Container
from transaxle.formats.detect import open_container, part_of_ranks
from transaxle.formats.registry import UNIVERSAL, uncollected
from transaxle.formats.shards import has_state
from transaxle.formats.storage.storage import Storage, close, is_closed
from transaxle.formats.training_state import GROUPS, LEFT_BEHIND, OPTIMIZER, PARAMS, is_extra_state
from transaxle.spans import stage

LACKING = frozenset({"MISSING_TENSOR", "INCOMPLETE"})
"""Codes of the refusals that say only that tensors are missing."""
_UNRECOGNISED = frozenset({"UNKNOWN_FAMILY", "AMBIGUOUS"})
__all__ = ["LACKING", "Checkpoint", "CheckpointLike", "StoredTensor", "open_checkpoint", "opened", "stateless"]


class Checkpoint(TensorSet):
    """An opened checkpoint: a mapping from names to `StoredTensor` objects, whose values are read on demand.

    `as_dialect`, `decode`, `cast` and `merge` return lazy views of the same files: under other names, decoded, in
    another dtype, with an adapter. Close it with `close()` or a `with` block; closing one closes the files of all.

    Attributes:
        container: the files behind it.
        settings: the options with which the user opened it.
        undecoded: the checkpoint as stored, if this one is decoded; None otherwise.
        reopening: how another process opens it, of what can be pickled.
        stored_names: the stored names as tables read them, shared by all views of these files.
    """

    def __init__(
        self,
        container: Container,
        settings: Settings,
        view: View | None,
        label: str | None,
        undecoded: Checkpoint | None = None,
        names: StoredNames | None = None,
    ) -> None:
        self.container = container
        self.settings = settings
        self.undecoded = undecoded
        self.reopening: Reopening | None = None
        self._view = view
        self._label = label
        stored = None if undecoded is None else undecoded.stored_names
        self.stored_names: StoredNames = names or StoredNames(container, settings, stored)

    @property
    def format(self) -> str:
        """Container format, e.g. `safetensors`."""
        return self.container.format

    @property
    def path(self) -> str:
        """The path as the user typed it."""
        return self.container.path

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The container's metadata; parameter groups use the names of this view."""
        metadata = self.container.metadata
        if self._view is None or GROUPS not in metadata:
            return metadata
        return {**metadata, GROUPS: regrouped(metadata[GROUPS], self._view.targets, [])}

    @property
    def manifest(self) -> Manifest | None:
        """The checkpoint's `transaxle.json`; None if it is missing, or if its files were changed since."""
        return self.stored_names.manifest

    @property
    def catalog(self) -> Catalog:
        """The stored tensors as tables see them: an encoded tensor with its scales is one entry."""
        return self.stored_names.catalog

    @property
    def decoded(self) -> Mapping[str, EncodedTensor]:
        """Tensors that are plain here and encoded where they are stored, by table name."""
        return self.stored_names.decoded

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json: the user's, or the checkpoint's; empty where there is none."""
        return self.stored_names.config

    @property
    def recognised(self) -> Recognised:
        """Family and dialect of the stored names.

        Raises:
            UsageError: UNKNOWN_FAMILY, AMBIGUOUS.
        """
        return self.stored_names.recognised

    @property
    def sizes(self) -> Sizes:
        """Axis sizes: the user's, the manifest's (unless the user gave a config), the config's."""
        return self.stored_names.sizes

    @property
    def bound(self) -> BoundNames:
        """The stored names read through the dialect."""
        return self.stored_names.bound

    @property
    def family(self) -> str | None:
        """Name of the model family; None if no table reads the names."""
        reading = self._recognised_or_none()
        return None if reading is None else reading.family.name

    @property
    def dialect(self) -> str | None:
        """Label of the dialect of this view; None if no table reads the names."""
        if self._label is not None:
            return self._label
        reading = self._recognised_or_none()
        return None if reading is None else reading.dialect.label

    def _recognised_or_none(self) -> Recognised | None:
        """Return how the names are read; None if no table reads them, unless the user said which, or sizes of axes."""
        reading = self.stored_names.recognition
        if not isinstance(reading, TransaxleError):
            return reading
        said = self.settings.family or self.settings.dialect or self.settings.axes
        if said or reading.code not in _UNRECOGNISED:
            raise reading
        return None

    @uncollected()
    def translation(self, dialect: str, recode: Recode = same) -> View:
        """Return this checkpoint's tensors in another dialect, with every refusal.

        Args:
            dialect: its label; `identity` for the stored tensors under their own names.
            recode: (target name, format) -> format in which it is written, where tensors are encoded afterwards.

        Raises:
            UsageError: UNKNOWN_FAMILY, AMBIGUOUS, UNKNOWN_AXIS.
        """
        if dialect == IDENTITY:
            targets = {name: identity_target(name, entry) for name, entry in self.container.entries.items()}
            return View(targets, (), (), (), {}, (), self.sizes.at({}) if self.family else {})
        target = pick_dialect(self.recognised.family, dialect)
        entries, said = self.catalog.entries, self.settings
        from transaxle.axes.translation.translate import translate
        from transaxle.engine.views.decoded import plainly

        if recode is not same or self.catalog.encoded or self.decoded:
            recode = plainly(recode)
        translation = translate(
            self.bound,
            entries,
            target,
            self.sizes,
            recode,
            partial=said.partial,
            trained=said.trained,
            split_by_format=self.format == UNIVERSAL.name,
        )
        view, part = viewed(translation, self.catalog), part_of_ranks(self.container.storage)
        return view if part is None else replace(view, refusals=(part, *view.refusals))

    def as_dialect(self, dialect: str) -> Checkpoint:
        """Return a lazy view of the checkpoint in another dialect; nothing is converted or written.

        Copies of one tensor (ties) are not compared here: `convert`, `verify` and `diff` do that. The files of a LoRA
        adapter are seen as those of an adapter of the same model in the other dialect; `config` must be the base's.

        Raises:
            TransaxleError: every refusal, at once.
        """
        if read_text("dialect", dialect, "hf") != IDENTITY and self.stored_names.is_adapter:
            files = in_dialect(self.container, self.config, dialect, self._with_files)
            said = replace(self.settings, family=None, dialect=None)
            return self._kept(Checkpoint(files, said, None, None), "as_dialect", dialect)
        problems = self.foreign(dialect)
        view = None if problems else self.translation(dialect)
        problems = problems or self.half_converted(dialect, view)
        if view is None or problems:
            raise gathered(problems)
        return self._kept(self._expressed(view, dialect), "as_dialect", dialect)

    def _kept(self, made: Checkpoint, method: str, *arguments: Any) -> Checkpoint:
        """Return a view of this checkpoint that remembers how it was made, for those who pickle it."""
        if self.reopening is not None and made is not self:
            made.reopening = self.reopening.after(method, *arguments)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if self.reopening is None:
            raise refuse_to_pickle(repr(self))
        return reopened, (
            open_checkpoint,
            self.reopening.pickled(self.container.storage, self.container.files),
        )

    def foreign(self, dialect: str) -> list[Refusal]:
        """Return why some tensors have no known name in a dialect; raises like `translation`."""
        if dialect == IDENTITY:
            return []
        target = pick_dialect(self.recognised.family, dialect)
        return foreign(
            self.bound, self.config, target, self.container.beside, family_given=self.settings.family is not None
        )

    def half_converted(self, dialect: str, view: View | None) -> list[Refusal]:
        """Return why a view of this checkpoint in a dialect has layers of which some tensors kept their names."""
        if dialect == IDENTITY or view is None:
            return []
        target = pick_dialect(self.recognised.family, dialect)
        return half_converted(self.bound, target, self.sizes, view, self.catalog.refusals)

    def seen_as(self, dialect: str) -> Checkpoint:
        """Return a view as `as_dialect` does, but keep unknown names, for callers that compare all names."""
        return self._expressed(self.translation(dialect), dialect)

    def with_state_of(self, parameters: frozenset[str] | None) -> Checkpoint:
        """Return the same view for a target in which these parameters have optimizer state, by their names there; None:
        that is not known.
        """
        said = replace(self.settings, trained=parameters)
        return Checkpoint(self.container, said, self._view, self._label, self.undecoded, self.stored_names)

    def in_part(self, dialect: str) -> Checkpoint:
        """Return a view as `as_dialect` does, but leave out targets that the stored tensors do not fill completely.

        Raises:
            TransaxleError: every other refusal, at once.
        """
        partial = Checkpoint(self.container, replace(self.settings, partial=True), None, None, self.undecoded)
        view, source = partial.translation(dialect), partial.source_of(dialect)
        covered = {name: target for name, target in view.targets.items() if source.covers(target)}
        remaining = tuple(refusal for refusal in view.refusals if refusal.code not in LACKING)
        return partial._expressed(replace(view, targets=covered, refusals=remaining), dialect)

    def _expressed(self, view: View, dialect: str) -> Checkpoint:
        """Return the same checkpoint under another view, or raise the view's refusals."""
        from transaxle.engine.duplicates import steps

        problems = list(view.refusals)
        for target in filter(attrgetter("computed"), view.targets.values()):
            try:
                steps(target, allowed=False)
            except TransaxleError as error:
                problems.extend(error.refusals)
        if problems:
            raise gathered(problems)
        label = IDENTITY if dialect == IDENTITY else pick_dialect(self.recognised.family, dialect).label
        return self._seen(view, label)

    def _seen(self, view: View | None, label: str | None) -> Checkpoint:
        """Return another view of the same files, which shares what is already known of them."""
        return Checkpoint(self.container, self.settings, view, label, self.undecoded, self.stored_names)

    def checking(self, checks: Sequence[Check]) -> Checkpoint:
        """Return the same view with further pairs of copies that must prove equal."""
        return self._seen(replace(self.view, checks=(*self.checks, *checks)), self._label)

    def without_optimizer(self) -> Checkpoint:
        """Return the same checkpoint without the optimizer's state and settings."""
        state = {name for name in self.container.entries if name.startswith(OPTIMIZER)}
        metadata = dict(self.container.metadata)
        left = {GROUPS: "settings"} if metadata.pop(GROUPS, None) is not None else {}
        left |= {"optimizer": "state that cannot be read"} if self.container.unread else {}
        if not state and not left:
            return self
        metadata |= {LEFT_BEHIND: {**metadata.get(LEFT_BEHIND, {}), **left}} if left else {}
        container = replace(self.container.without(state), metadata=metadata, unread=())
        return Checkpoint(container, self.settings, None, None, self.undecoded)

    @property
    def has_state(self) -> bool:
        """Whether it holds anything of an optimizer: state, or only settings, as of one that has made no step."""
        groups = self.container.metadata.get(GROUPS, ())
        return has_state(self.container.entries) or any(group[PARAMS] for group in groups)

    def decode(self, to: str, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Checkpoint:
        """Return a view in which encoded tensors are plain; they are decoded when they are read.

        Args:
            to: `bf16` or `fp32`.
            only: patterns of the table names to decode; none: all.
            skip: patterns of names that stay encoded.

        Raises:
            Refused: buffers that cannot be grouped.
            UsageError: AMBIGUOUS for an unknown type, and for a pattern that no encoded tensor has.
        """
        from transaxle.engine.views.decoded import DTYPES, decoded

        if to not in DTYPES:
            raise refuse("AMBIGUOUS", f"cannot decode to {to!r}", hint=f"Choose one of: {', '.join(DTYPES)}.")
        catalog = self.stored.catalog
        if catalog.refusals:
            raise gathered(catalog.refusals)
        if not catalog.encoded:
            raise nothing_encoded(to)
        names = chosen(catalog.encoded, only, skip, "encoded tensor")
        if not names:
            return self._kept(self.stored, "decode", to, only, skip)
        seen = decoded(catalog, names, DTYPES[to]), self.settings, None, None, self.undecoded or self.stored
        return self._kept(Checkpoint(*seen), "decode", to, only, skip)

    def cast(self, to: str, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Checkpoint:
        """Return a view in which plain tensors have another dtype; they are cast when they are read.

        Args:
            to: `bf16`, `fp16` or `fp32`.
            only: patterns of the names to cast; none: all weights but those that the family's table marks as precise.
            skip: patterns of names that keep their dtype.

        Raises:
            Refused: buffers that cannot be grouped, and scales of codes that are not known.
            UsageError: AMBIGUOUS for an unknown type, where nothing is plain, and for a pattern that no tensor has.
        """
        from transaxle.engine.views.cast import cast_to, precise

        stored_view = self.stored
        keep = precise(None if stored_view.family is None else stored_view.bound)
        container = cast_to(stored_view.catalog, to, only, skip, keep)
        made = Checkpoint(container, self.settings, None, None, self.undecoded)
        return self._kept(made, "cast", to, only, skip)

    def merge(self, adapter: PathLike) -> Checkpoint:
        """Return a view with a LoRA adapter of peft merged into the weights; closing it closes the adapter too."""
        from transaxle.engine.merging import merged

        files = open_checkpoint(adapter).container
        changed = merged(self.stored, files, adapter_config(files) or {}, self._with_files)
        return Checkpoint(changed, self.settings, None, None)

    def _with_files(self, files: Container, dialect: str, config: Any = None, axes: Any = None) -> Checkpoint:
        """Return a checkpoint of other tensors of the same model; no dialect: the one that the user says, if any."""
        said = replace(self.settings, dialect=dialect or self.settings.dialect, axes=axes or self.settings.axes)
        return Checkpoint(files, said if config is None else replace(said, config=config), None, None)

    @property
    def stored(self) -> Checkpoint:
        """The checkpoint under its own names, whatever dialect this view is in."""
        return self if self._view is None else self._seen(None, None)

    @property
    def shown_as(self) -> str | None:
        """Label of the dialect in which this view shows other names than the stored ones; None if it shows these."""
        return None if self._label in (None, IDENTITY, self.stored.dialect) else self._label

    @property
    def checks(self) -> tuple[Check, ...]:
        """Pairs of stored copies that must be equal because this view has only one; none in the stored dialect."""
        return () if self._view is None else self._view.checks

    @cached_property
    def view(self) -> View:
        """The tensors of this view, as the planner sees them."""
        return self.translation(IDENTITY) if self._view is None else self._view

    @property
    def targets(self) -> Mapping[str, Target]:
        """The tensors of this view by stored name."""
        return self.view.targets

    @cached_property
    def source(self) -> Source:
        """The reader that turns the tensors of this view into transfers."""
        return self.source_of(self._label)

    def source_of(self, dialect: str | None) -> Source:
        """Return the reader that turns the tensors of a translation into transfers; None: under their stored names."""
        return Source(self.container, None if dialect in (None, IDENTITY) else self.catalog.buffers)

    @property
    def encoded(self) -> Mapping[str, EncodedTensor]:
        """The encoded tensors of this view by table name, with the names of their buffers."""
        return self.catalog.encoded if self._label in (None, IDENTITY) else self.view.encoded

    @property
    def parameters(self) -> int:
        """Number of elements of the model: encoded tensors count by their values, scales and training state do not."""
        parts = {stored for tensor in self.encoded.values() for stored in tensor.parts.values()}
        parts |= self.container.beside
        plain = sum(
            tensor.parameters for name, tensor in self.items() if name not in parts and not name.startswith(OPTIMIZER)
        )
        return plain + sum(prod(tensor.shape) for tensor in self.encoded.values())

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self:
            raise no_such_name(name, self.targets)
        return StoredTensor(name, *self.view.described(name), self.targets[name], self.source, self)

    def __iter__(self) -> Iterator[str]:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.targets

    def in_order(self) -> list[str]:
        """Return the names in the order of the dialect's table; those that no line reads come last."""
        order: dict[str, int] = {}
        cut = 0
        try:
            if self.family is not None and self.dialect is not None:
                lines = pick_dialect(self.recognised.family, self.dialect).lines
                cut = len(self.recognised.prefix)
                order = {line.name.skeleton: number for number, line in reversed([*enumerate(lines)])}
        except TransaxleError:  # a view in no dialect of the family
            order = {}
        own = without_wrappers(self) if order else {}

        def place(name: str) -> tuple[int, str]:
            inner = own.get(name, name)
            known = [order[each] for each in (skeleton(inner), skeleton(inner[cut:])) if each in order]
            return min(known, default=len(order)), natural(name)

        return sorted(self, key=place)

    def close(self) -> None:
        """Close the files behind it; tensors cannot be read afterwards."""
        close(self.container.storage)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = " · closed" if is_closed(self.container.storage) else ""
        try:
            amount = f"{len(self)} tensors"
        except TransaxleError as error:  # whoever looks at it learns why, and reads on
            amount = f"refused: {error.code}"
        return f"<checkpoint {self.path} · {self.format} · {amount}{closed}>"


CheckpointLike: TypeAlias = PathLike | Checkpoint
"""Where a function reads: a path or URL, or a checkpoint that is open already."""


def _cut(said: Settings, storage: Storage, names: Sequence[str], config: Mapping[str, Any] | None = None) -> Any:
    """Ask the tables how ranks cut parameters; what that takes is imported when a checkpoint asks."""
    from transaxle.engine.checkpoint.unstated import cutter

    return cutter(said)(storage, names, config or {})


def _named(said: Settings, weights: Container, state: Container) -> Mapping[str, str]:
    """Name an optimizer's numbered parameters; what that takes is imported when a checkpoint asks."""
    from transaxle.engine.checkpoint.unstated import names_by_number

    def in_memory(weights: Container) -> Mapping[str, tuple[int, ...]]:
        seen = Checkpoint(weights, said, None, None).as_dialect(IN_MEMORY)
        return {name: tensor.shape for name, tensor in seen.items()}

    return names_by_number(weights, state, said.config, in_memory)


@uncollected()
@stage("open")
def open_checkpoint(
    path: PathLike,
    *,
    decode: DType | None = None,
    dtype: DType | None = None,
    only: Patterns = (),
    skip: Patterns = (),
    lenient: bool = False,
    merge: PathLike | None = None,
    **options: Any,
) -> Checkpoint:
    """Open a checkpoint of any known format; nothing is loaded, and torch is not imported.

    Args:
        path: a folder or a file.
        decode: `bf16` or `fp32`: encoded tensors are seen as plain ones, decoded when they are read.
        dtype: `bf16`, `fp16` or `fp32`: plain floating-point tensors are cast when they are read.
        only: patterns of the names to be decoded or cast.
        skip: patterns of names that stay as they are.
        lenient: decode what is encoded, choose weights and take an optimizer's state, if there are any: one of two
            may have none.
        merge: path of a LoRA adapter that is merged into the weights when they are read.
        **options: those of `settings`.

    Raises:
        TypeError: an argument of a type that it cannot have.
        StorageError: IO where it is missing or unreadable.
        Refused: CORRUPT, INCOMPLETE, UNSUPPORTED …: every problem of its files; MISSING_TENSOR where the optimizer's
            state is asked for, and there is none.
    """
    decode, dtype = read_float_type("decode", decode), read_float_type("dtype", dtype)
    only, skip = read_patterns("only", only), read_patterns("skip", skip)
    merge = None if merge is None else read_path("merge", merge)
    given = {"decode": decode, "dtype": dtype, "merge": merge}
    if len(several := [name for name, value in given.items() if value is not None]) > 1:
        raise TypeError(f"{' and '.join(several)} exclude each other; give only one")
    source = read_path("path", path)
    user_settings = settings(**options)
    wanted = user_settings.format, user_settings.weights, partial(_cut, user_settings), user_settings.optimizer
    naming = partial(_named, user_settings)
    container = hashed(open_container(source, *wanted, average=user_settings.average, lenient=lenient, naming=naming))
    if describes_tensors(container.metadata):
        container = ordering(container)
    if user_settings.average:
        from transaxle.engine.duplicates import averaged

        container = averaged(container)
    checkpoint = Checkpoint(container, user_settings, None, None)
    said = {**options, "config": user_settings.config, "decode": decode, "dtype": dtype, "only": only, "skip": skip}
    rules = None if options.get("rules") is None else os.path.abspath(options["rules"])  # noqa: PTH100 - links stay
    place = source if "://" in source else os.path.abspath(source)  # noqa: PTH100 - links stay
    how = Reopening(place, {**said, "rules": rules, "lenient": lenient}, rules=table(rules) if rules else None)
    if user_settings.optimizer is False:
        checkpoint = checkpoint.without_optimizer()
    elif user_settings.optimizer and not lenient and not checkpoint.has_state:
        raise stateless(checkpoint)
    if merge is not None:
        return checkpoint.merge(merge)
    if dtype is not None:
        checkpoint = checkpoint.cast(dtype, only, skip)
    elif decode is not None and not (lenient and not checkpoint.catalog.encoded and not checkpoint.catalog.refusals):
        checkpoint = checkpoint.decode(decode, only, skip)
    checkpoint.reopening = how
    return checkpoint


def stateless(checkpoint: Checkpoint) -> TransaxleError:
    """Return the refusal of a checkpoint without an optimizer's state, where that is asked for."""
    message = "there is no optimizer state to take, which --optimizer (optimizer=) asks for"
    hint = "For the model alone, omit --optimizer (optimizer=)."
    absent = Refusal("MISSING_TENSOR", message, Where(checkpoint.path), hint)
    return gathered(checkpoint.container.unread or [absent])


@contextmanager
def opened(argument: str, source: CheckpointLike, reading: Mapping[str, Any]) -> Iterator[Checkpoint]:
    """Give a checkpoint; one that is opened here is closed again, the caller's own is not.

    Args:
        argument: what the caller's function calls it, for errors.
        source: a path, or an opened checkpoint.
        reading: options of `open_checkpoint`.

    Raises:
        TypeError: there are options for a checkpoint that is open already.
        TransaxleError: what `open_checkpoint` raises.
    """
    if isinstance(source, Checkpoint):
        if reading:
            raise TypeError(f"{', '.join(reading)}: pass this to open() instead; the checkpoint is already open")
        yield source
        return
    with open_checkpoint(read_source(argument, source), **reading) as checkpoint:
        yield checkpoint


_LISTED = 6
"""Cap on the names that a refusal lists."""


_IDENTITY = 'keep all names with --to safetensors:identity (to="safetensors:identity")'


_LAYER = re.compile(r"(?:[^.]*\.)*?\d+(?=\.)")
"""Beginning of a name, up to the number of its layer."""


_COMPUTED = (".inv_freq", ".position_ids")
"""Ends of the names of buffers that follow from the config, which older programs stored."""


_TABLE = 'add lines for them to a table of your own (--rules FILE, rules="FILE")'


def foreign(
    bound: BoundNames,
    config: Mapping[str, Any],
    target: Dialect,
    beside: Collection[str] = (),
    *,
    family_given: bool = False,
) -> list[Refusal]:
    """Refuse a dialect in which the names of some tensors are not known.

    A few tensors beside a model that is known as a whole (extra heads, layers that other programs add) are no reason:
    they keep their names, and the report lists them. Those inside what is converted are: see `half_converted`.

    Args:
        bound: the stored names, read through their own dialect.
        config: the model's config.json; empty if there is none.
        target: the wanted dialect; in the names' own dialect, unknown names simply stay.
        beside: names of training state, which is no part of a model.
        family_given: whether the user named the family: then a wrapped model is taken out of its wrapper, if nothing
            else is in it.
    """
    family = bound.family
    top, text = config.get("model_type"), config.get("text_config")
    outer = is_outer(bound.prefix)
    nested = isinstance(text, Mapping) and top not in family.model_types and model_types(config) != []
    unknown = tuple(name for name in bound.unknown if split_slot(name)[1] == WEIGHT and name not in beside)
    others_beside = bool(bound.prefix) and not all(
        bound.own.get(name, name).startswith(bound.prefix) for name in unknown
    )
    inside = nested or not outer or others_beside
    wrapped = inside and not family_given and not (outer and top in family.wrappers)
    known_model = not inside and (family_given or top in family.model_types)
    if not wrapped and (known_model or not unknown or (target is bound.dialect and not inside)):
        return []
    lines = [_whole(bound, config, target.label, nested=nested)] if wrapped else []
    if unknown:
        count = len(unknown) + len(bound.ignored) + sum(map(len, bound.names.values()))
        headline = f"no line of {family.name}, dialect {bound.dialect.label}, reads {len(unknown):,} of {count:,} names"
        lines += [
            headline if wrapped else f"{headline}; their names in {target.label} are unknown",
            *unknown[:_LISTED],
        ]
    if len(unknown) > _LISTED:
        lines.append(f"… and {len(unknown) - _LISTED:,} more")
    ways = [_IDENTITY, _TABLE]
    if not unknown:
        what = "only the text model" if nested else f"it without {bound.prefix!r}"
        ways.append(f'convert {what} with --family {family.name} (family="{family.name}")')
    elif not inside:
        ways.append(
            f'declare the model a {family.name} with --config FILE (config="FILE") or --family {family.name}'
            f' (family="{family.name}"), and those in none of its layers keep their names'
        )
    where = Where(None, unknown[0] if len(unknown) == 1 else None)
    code: Code = "UNKNOWN_FAMILY" if wrapped else "UNEXPECTED_TENSOR"
    return [Refusal(code, "\n".join(lines), where, f"{', '.join(ways[:-1])} or {ways[-1]}")]


def _whole(bound: BoundNames, config: Mapping[str, Any], target: str, *, nested: bool) -> str:
    top = config.get("model_type")
    inside = f" after {bound.prefix!r}" if bound.prefix else ""
    if bound.prefix and not nested and not bound.unknown:
        return (
            f"all names begin with {bound.prefix!r}, so this may be part of a larger model, whose layout in {target} "
            f"is unknown; --family {bound.family.name} converts it as a model of its own"
        )
    model = f"config.json says model_type {top!r}: " if isinstance(top, str) else ""
    statement = f"{bound.family.name} is only one part of this model{inside}"
    return f"{model}{statement}; the layout of the whole model in {target} is unknown"


def half_converted(
    bound: BoundNames, target: Dialect, sizes: Sizes, view: Translation, others: Sequence[Refusal]
) -> list[Refusal]:
    """Refuse tensors that keep their names inside what is converted: no line reads them, or they are in a layer and the
    wanted dialect has none for them. What a dialect leaves out beside the layers are heads and the like.

    Args:
        bound: the stored names, read through their own dialect.
        target: the wanted dialect; in the names' own dialect, they simply stay.
        sizes: sizes and the config; a tensor that the model is without, by its config, may stay.
        view: the checkpoint in that dialect.
        others: refusals of its files; what follows from those and the view's is not said again.
    """
    # Where codes and scales cannot be grouped, no line reads the scales.
    is_grouped = all(refusal.where.tensor for refusal in others)
    kept = frozenset(view.kept_names if is_grouped and target is not bound.dialect else ())
    refused = tuple(refusal.where.tensor for refusal in (*view.refusals, *others) if refusal.where.tensor)
    unread = [
        name
        for name in bound.unknown
        if bound.own.get(name, name) in kept and split_slot(name)[1] == WEIGHT
        if not (name.startswith(refused) or is_extra_state(name))
    ]
    # Where something is refused, what the dialect has a line for may have kept its name for that reason.
    awaited = {part for line in target.lines for part in line.expression.components} if view.refusals else set[str]()
    excepted = awaited.union(bound.family.copies)
    homeless, converted = list[tuple[str, Sequence[str]]](), set[str]()
    for (line, slot), names in bound.names.items() if kept else ():
        for position, name in names.items():
            own = bound.own.get(name, name)
            if own not in view.targets:
                layer = _layer(bound, name, line)
                converted.update([layer] if layer else _modules(bound, name), line.name.axes[:1])
            elif own in kept and slot == WEIGHT and _exists(bound, sizes, line, position, excepted):
                homeless.append((name, [_layer(bound, name, line)]))
    into = f"of layers and modules whose other tensors get their names in {target.label}"
    reads = f"no line of {bound.family.name}, dialect {bound.dialect.label}, reads"
    writes = f"{bound.family.name} has no line in dialect {target.label} for"
    table = f"{_TABLE[0].upper()}{_TABLE[1:]}, or {_IDENTITY}."
    other = f"Models of {target.label} are without them: choose another dialect, {_TABLE}, or {_IDENTITY}."
    inside = [(name, [layer] if (layer := _layer(bound, name)) else _modules(bound, name)) for name in unread]
    halves = [(inside, reads, table), (homeless, writes, other)]
    refusals = []
    for names_left, headline, hint in halves:
        left = sorted((name for name, around in names_left if not converted.isdisjoint(around)), key=natural)
        if left:
            more = [f"… and {len(left) - _LISTED:,} more"] if len(left) > _LISTED else []
            where = Where(None, left[0] if len(left) == 1 else None)
            message = "\n".join([f"{headline} {plural(len(left), 'tensor')} {into}", *left[:_LISTED], *more])
            refusals.append(Refusal("UNEXPECTED_TENSOR", message, where, hint))
    return refusals


def _layer(bound: BoundNames, name: str, line: Line | None = None) -> str:
    """Return the beginning of a name up to the number of its layer, or the axis of layers where they are one tensor;
    empty for what is in none.
    """
    match = _LAYER.match(bound.own.get(name, name))
    if match is not None or line is None:
        return "" if match is None else match[0]
    axes = (axis for part in line.expression.components for axis in bound.family.tensors[part].axes[:1])
    return next((axis for axis in axes if axis in bound.family.name_axes), "")


def _modules(bound: BoundNames, name: str) -> Sequence[str]:
    """Return the modules around a tensor, the outermost first; none of a buffer that follows from the config."""
    own = bound.own.get(name, name).removeprefix(bound.prefix)
    if own.endswith(_COMPUTED):
        return ()
    return tuple(accumulate(own.split(".")[:-1], "{}.{}".format))


def _exists(bound: BoundNames, sizes: Sizes, line: Line, position: Index, without: Collection[str]) -> bool:
    """Tell whether a model has what a line holds, without some parts, and no other tensor in its place; so it is where
    no config tells.
    """
    index = dict(zip(line.name.axes, position, strict=True))
    tensors = (bound.family.tensors[part] for part in line.expression.components if part not in without)
    return any(sizes.holds(tensor.when, index) is not False for tensor in tensors)
