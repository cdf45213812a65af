"""An open checkpoint: a mapping from names to tensors, in the stored dialect or, lazily, in a different dialect.

Nothing is loaded until a tensor is read, and reading a box of a tensor reads only the bytes of that box.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
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
from transaxle.axes.layout.bind import IN_MEMORY, BoundNames, without_wrappers
from transaxle.axes.layout.relayout import Check, Target, identity_target
from transaxle.axes.notation.family import Recode, Sizes, same
from transaxle.axes.notation.name import natural, skeleton
from transaxle.encodings.encoding import EncodedTensor
from transaxle.engine.checkpoint.manifest import Manifest
from transaxle.engine.checkpoint.peft_adapter import adapter_config, in_dialect
from transaxle.engine.checkpoint.recognise import IDENTITY, Reading, pick_dialect
from transaxle.engine.checkpoint.settings import Settings, settings
from transaxle.engine.checkpoint.source_hashes import with_hash_witness
from transaxle.engine.checkpoint.stored_names import StoredNames
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
from transaxle.engine.unnamed import refuse_foreign, refuse_half_converted
from transaxle.engine.views.decoded import rename_groups
from transaxle.engine.views.encode import select_names
from transaxle.engine.views.encoded import (
    Catalog,
    View,
    add_buffers,
    add_compact_scales,
    describes_codes,
    refuse_plain,
)
from transaxle.engine.views.stated_shapes import with_shape_files
from transaxle.errors import LACKING, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Container
from transaxle.formats.detect import open_container, part_of_ranks
from transaxle.formats.registry import UNIVERSAL, without_gc
from transaxle.formats.shards import has_state
from transaxle.formats.storage.storage import Storage, close, is_closed
from transaxle.formats.training_state import GROUPS, LEFT_BEHIND, OPTIMIZER, PARAMS
from transaxle.spans import stage

_UNRECOGNISED = frozenset({"UNKNOWN_FAMILY", "AMBIGUOUS"})
__all__ = [
    "Checkpoint", "CheckpointLike", "StoredTensor", "open_checkpoint", "open_source", "refuse_stateless",
]  # fmt: skip


class Checkpoint(TensorSet):
    """An open checkpoint: a mapping from names to `StoredTensor` objects, whose values are read on demand.

    `as_dialect`, `decode`, `cast` and `merge` return lazy views of the same files: with different names, with decoded
    values, with a different dtype, or with an adapter merged. Close a checkpoint with `close()` or a `with` block;
    closing a view closes the files that it shares with all other views.

    Attributes:
        container: the files of the checkpoint.
        settings: the options with which the user opened the checkpoint.
        undecoded: the checkpoint as stored, if this one is a decoded view; None otherwise.
        reopening: the steps with which another process opens the same view; None if the view cannot be pickled.
        stored_names: the stored names as the tables read them, shared by all views of these files.
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
        """Container format of the checkpoint, e.g. `safetensors`."""
        return self.container.format

    @property
    def path(self) -> str:
        """The path of the checkpoint as the user typed it."""
        return self.container.path

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The container's metadata, in which parameter groups use the tensor names of this view."""
        metadata = self.container.metadata
        if self._view is None or GROUPS not in metadata:
            return metadata
        return {**metadata, GROUPS: rename_groups(metadata[GROUPS], self._view.targets, [])}

    @property
    def manifest(self) -> Manifest | None:
        """The checkpoint's `transaxle.json`; None if the file is absent or describes files that have changed."""
        return self.stored_names.manifest

    @property
    def catalog(self) -> Catalog:
        """The stored tensors as table entries: an encoded tensor and its scales are one entry."""
        return self.stored_names.catalog

    @property
    def decoded(self) -> Mapping[str, EncodedTensor]:
        """Tensor name -> stored encoding, for the tensors that this view decodes."""
        return self.stored_names.decoded

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json: the user's file, or else the checkpoint's file; empty without either."""
        return self.stored_names.config

    @property
    def reading(self) -> Reading:
        """Family and dialect of the stored tensor names.

        Raises:
            UsageError: with UNKNOWN_FAMILY if no table reads the names; with AMBIGUOUS if several tables do.
        """
        return self.stored_names.reading

    @property
    def sizes(self) -> Sizes:
        """Axis sizes from the user, else from the manifest (unless the user gave a config), else from the config."""
        return self.stored_names.sizes

    @property
    def bound(self) -> BoundNames:
        """The stored tensor names, each matched with a line of the dialect's table."""
        return self.stored_names.bound

    @property
    def family(self) -> str | None:
        """Name of the model family; None if no family's table reads the tensor names."""
        reading = self._reading_or_none()
        return None if reading is None else reading.family.name

    @property
    def dialect(self) -> str | None:
        """Label of the dialect of this view; None if no family's table reads the tensor names."""
        if self._label is not None:
            return self._label
        reading = self._reading_or_none()
        return None if reading is None else reading.dialect.label

    def _reading_or_none(self) -> Reading | None:
        """Return family and dialect of the tensor names; None if no table and no user states them."""
        reading = self.stored_names.reading_or_error
        if not isinstance(reading, TransaxleError):
            return reading
        user_choice = self.settings.family or self.settings.dialect or self.settings.axes
        if user_choice or reading.code not in _UNRECOGNISED:
            raise reading
        return None

    @without_gc()
    def translation(self, dialect: str, recode: Recode = same) -> View:
        """Return this checkpoint's tensors in a given dialect, together with every refusal of that translation.

        Args:
            dialect: label of the dialect; `identity` means the stored tensors under their stored names.
            recode: (target name, its number format) -> number format to encode the tensor in afterwards.

        Raises:
            UsageError: UNKNOWN_FAMILY, AMBIGUOUS or UNKNOWN_AXIS, if family, dialect or an axis is unknown.
        """
        if dialect == IDENTITY:
            targets = {name: identity_target(name, entry) for name, entry in self.container.entries.items()}
            return View(targets, (), (), (), {}, (), self.sizes.at({}) if self.family else {})
        target = pick_dialect(self.reading.family, dialect)
        entries, options = self.catalog.entries, self.settings
        from transaxle.axes.translation.translate import translate
        from transaxle.engine.views.decoded import recode_as_shown

        if recode is not same or self.catalog.encoded or self.decoded:
            recode = recode_as_shown(recode, self.container.recoding.encodings)
        translation = translate(
            self.bound,
            entries,
            target,
            self.sizes,
            recode,
            partial=options.partial,
            trained=options.trained,
            split_by_format=self.format == UNIVERSAL.name,
        )
        view, part = add_buffers(translation, self.catalog), part_of_ranks(self.container.storage)
        if self.container.recoding.grafted:
            from transaxle.engine.checkpoint.grafting import with_graft

            view = with_graft(view, self.container)
        return view if part is None else replace(view, refusals=(part, *view.refusals))

    def as_dialect(self, dialect: str) -> Checkpoint:
        """Return a lazy view of the checkpoint in a given dialect; nothing is converted or written.

        Two copies of one tensor (ties) are not compared by this function; `convert`, `verify` and `diff` compare them.
        A LoRA adapter becomes an adapter of the same base model in the given dialect; this requires `config` to be the
        base model's config.

        Raises:
            TransaxleError: one error that contains every refusal of the translation.
        """
        if read_text("dialect", dialect, "hf") != IDENTITY and self.stored_names.is_adapter:
            files = in_dialect(self.container, self.config, dialect, self._with_files)
            options = replace(self.settings, family=None, dialect=None)
            return self._remember_step(Checkpoint(files, options, None, None), "as_dialect", dialect)
        problems = self.refuse_foreign(dialect)
        view = None if problems else self.translation(dialect)
        problems = problems or self.refuse_half_converted(dialect, view)
        if view is None or problems:
            raise gathered(problems)
        return self._remember_step(self._with_translation(view, dialect), "as_dialect", dialect)

    def _remember_step(self, view: Checkpoint, method: str, *arguments: Any) -> Checkpoint:
        """Return a view of this checkpoint, and record the call that recreates the view when it is unpickled."""
        if self.reopening is not None and view is not self:
            view.reopening = self.reopening.with_step(method, *arguments)
        return view

    def __reduce__(self) -> tuple[Any, ...]:
        if self.reopening is None:
            raise refuse_to_pickle(repr(self))
        return reopened, (
            open_checkpoint,
            self.reopening.with_versions(self.container.storage, self.container.files),
        )

    def refuse_foreign(self, dialect: str) -> list[Refusal]:
        """Return refusals of tensors whose names in a dialect are unknown; the errors are those of `translation`."""
        if dialect == IDENTITY:
            return []
        target = pick_dialect(self.reading.family, dialect)
        return refuse_foreign(
            self.bound, self.config, target, self.container.beside, family_given=self.settings.family is not None
        )

    def refuse_half_converted(self, dialect: str, view: View | None) -> list[Refusal]:
        """Return refusals of layers in which only some tensors would get new names."""
        if dialect == IDENTITY or view is None:
            return []
        target = pick_dialect(self.reading.family, dialect)
        return refuse_half_converted(self.bound, target, self.sizes, view, self.catalog.refusals)

    def view_as(self, dialect: str) -> Checkpoint:
        """Return a view as `as_dialect` does, but do not refuse tensors that the dialect cannot name."""
        return self._with_translation(self.translation(dialect), dialect)

    def with_state_of(self, parameters: frozenset[str] | None) -> Checkpoint:
        """Return the same view, restricted to the parameters that the target trains; None means that these are unknown.

        Only these parameters have optimizer state in the target, under their target names.
        """
        options = replace(self.settings, trained=parameters)
        return Checkpoint(self.container, options, self._view, self._label, self.undecoded, self.stored_names)

    def in_part(self, dialect: str) -> Checkpoint:
        """Return a view as `as_dialect` does, but omit tensors that the stored tensors fill only in part.

        Raises:
            TransaxleError: one error with all refusals except those of missing tensors.
        """
        partial = Checkpoint(self.container, replace(self.settings, partial=True), None, None, self.undecoded)
        view, source = partial.translation(dialect), partial.source_of(dialect)
        covered = {name: target for name, target in view.targets.items() if source.covers(target)}
        remaining = tuple(refusal for refusal in view.refusals if refusal.code not in LACKING)
        return partial._with_translation(replace(view, targets=covered, refusals=remaining), dialect)

    def _with_translation(self, view: View, dialect: str) -> Checkpoint:
        """Return this checkpoint with the given translation of its tensors, or raise its refusals."""
        from transaxle.engine.duplicates import affine_steps

        problems = list(view.refusals)
        for target in filter(attrgetter("computed"), view.targets.values()):
            try:
                affine_steps(target, allowed=False)
            except TransaxleError as error:
                problems.extend(error.refusals)
        if problems:
            raise gathered(problems)
        label = IDENTITY if dialect == IDENTITY else pick_dialect(self.reading.family, dialect).label
        return self._with_view(view, label)

    def _with_view(self, view: View | None, label: str | None) -> Checkpoint:
        """Return a checkpoint with another view of the same files, and the same catalog, config and family."""
        return Checkpoint(self.container, self.settings, view, label, self.undecoded, self.stored_names)

    def with_checks(self, checks: Sequence[Check]) -> Checkpoint:
        """Return the same view with additional pairs of tensor copies that must be equal."""
        return self._with_view(replace(self.view, checks=(*self.checks, *checks)), self._label)

    def without_optimizer(self) -> Checkpoint:
        """Return the same checkpoint without the optimizer's state and settings."""
        state = {name for name in self.container.entries if name.startswith(OPTIMIZER)}
        metadata = dict(self.container.metadata)
        omitted = {GROUPS: "settings"} if metadata.pop(GROUPS, None) is not None else {}
        omitted |= {"optimizer": "state that cannot be read"} if self.container.unread else {}
        if not state and not omitted:
            return self
        metadata |= {LEFT_BEHIND: {**metadata.get(LEFT_BEHIND, {}), **omitted}} if omitted else {}
        container = replace(self.container.without(state), metadata=metadata, unread=())
        return Checkpoint(container, self.settings, None, None, self.undecoded)

    @property
    def has_state(self) -> bool:
        """Whether the checkpoint has optimizer state, or at least an optimizer's settings (before the first step)."""
        groups = self.container.metadata.get(GROUPS, ())
        return has_state(self.container.entries) or any(group[PARAMS] for group in groups)

    def decode(self, to: str, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Checkpoint:
        """Return a view in which encoded tensors appear as plain tensors; they are decoded when they are read.

        Args:
            to: dtype of the decoded values, `bf16` or `fp32`.
            only: patterns of the tensor names to decode; the default is all encoded tensors.
            skip: patterns of the tensor names that stay encoded.

        Raises:
            Refused: if the buffers (codes, scales) of encoded tensors cannot be matched with each other.
            UsageError: with code AMBIGUOUS, if the dtype is unknown, or a pattern matches no encoded tensor.
        """
        from transaxle.engine.views.decoded import DTYPES, with_decoded

        if to not in DTYPES:
            raise refuse("AMBIGUOUS", f"cannot decode to {to!r}", hint=f"Choose one of: {', '.join(DTYPES)}.")
        catalog = self.stored.catalog
        if catalog.refusals:
            raise gathered(catalog.refusals)
        if not catalog.encoded:
            raise refuse_plain(to)
        names = select_names(catalog.encoded, only, skip, "encoded tensor")
        files, undecoded = with_decoded(catalog, names, DTYPES[to]), self.undecoded or self.stored
        view = Checkpoint(files, self.settings, None, None, undecoded) if names else self.stored
        return self._remember_step(view, "decode", to, only, skip)

    def cast(self, to: str, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Checkpoint:
        """Return a view in which plain tensors have a different dtype; they are cast when they are read.

        Args:
            to: the dtype to cast to: `bf16`, `fp16` or `fp32`.
            only: patterns of the tensor names to cast; the default is all weights except those that the family's table
                marks as precise.
            skip: patterns of the tensor names that keep their dtype.

        Raises:
            Refused: encoded tensors whose buffers cannot be matched, or codes whose scales are unknown.
            UsageError: with AMBIGUOUS if the dtype is unknown, no tensor is plain, or a pattern matches nothing.
        """
        from transaxle.engine.views.cast import cast_to, precise_names

        stored_view = self.stored
        keep = precise_names(None if stored_view.family is None else stored_view.bound)
        container = cast_to(stored_view.catalog, to, only, skip, keep)
        view = Checkpoint(container, self.settings, None, None, self.undecoded)
        return self._remember_step(view, "cast", to, only, skip)

    def merge(self, adapter: PathLike) -> Checkpoint:
        """Return a view with a LoRA adapter of peft merged into the weights; `close` also closes the adapter."""
        from transaxle.engine.merging import merge_adapter

        files = open_checkpoint(adapter).container
        changed = merge_adapter(self.stored, files, adapter_config(files) or {}, self._with_files)
        return Checkpoint(changed, self.settings, None, None)

    def graft(self, base: PathLike, over: Patterns = ()) -> Checkpoint:
        """Return a view with the tensors of a second checkpoint of the model that this one lacks; `close` also closes
        that checkpoint.

        Args:
            base: path or URL of the second checkpoint, of any format, dialect and encoding.
            over: patterns of the names of tensors of this checkpoint that are replaced by those of the second one.

        Raises:
            TransaxleError: the errors of `graft_tensors`, and of opening the second checkpoint.
        """
        from transaxle.engine.checkpoint.grafting import graft_tensors

        base, over = read_path("base", base), read_patterns("over", over)
        files = _open_files(base, Settings(families=self.settings.families, optimizer=False), lenient=False)
        try:
            settings = Settings(families=self.settings.families)
            view = graft_tensors(self.stored, Checkpoint(files, settings, None, None), over)
        except BaseException:
            close(files.storage)
            raise
        return self._remember_step(view, "graft", base, over)

    def _with_files(self, files: Container, dialect: str, config: Any = None, axes: Any = None) -> Checkpoint:
        """Return a checkpoint of other files of this model; an empty dialect means the one that the user chose."""
        options = replace(self.settings, dialect=dialect or self.settings.dialect, axes=axes or self.settings.axes)
        return Checkpoint(files, options if config is None else replace(options, config=config), None, None)

    @property
    def stored(self) -> Checkpoint:
        """The same checkpoint under its stored tensor names, whatever the dialect of this view."""
        return self if self._view is None else self._with_view(None, None)

    @property
    def shown_as(self) -> str | None:
        """Label of this view's dialect if its tensor names differ from the stored names; None if they do not."""
        return None if self._label in (None, IDENTITY, self.stored.dialect) else self._label

    @property
    def checks(self) -> tuple[Check, ...]:
        """Pairs of stored copies that must be equal because this view shows only one copy of each."""
        return () if self._view is None else self._view.checks

    @cached_property
    def view(self) -> View:
        """The tensors of this view, in the form that the planner reads."""
        return self.translation(IDENTITY) if self._view is None else self._view

    @property
    def targets(self) -> Mapping[str, Target]:
        """Tensor name in this view -> the tensor, with the source tensors from which it is composed."""
        return self.view.targets

    @cached_property
    def source(self) -> Source:
        """The object that turns the tensors of this view into transfers (reads of byte ranges)."""
        return self.source_of(self._label)

    def source_of(self, dialect: str | None) -> Source:
        """Return the object that turns the tensors of a dialect into transfers; None means the stored names."""
        return Source(self.container, None if dialect in (None, IDENTITY) else self.catalog.buffers)

    @property
    def encoded(self) -> Mapping[str, EncodedTensor]:
        """Tensor name -> encoded tensor of this view, with the names of its buffers."""
        return self.catalog.encoded if self._label in (None, IDENTITY) else self.view.encoded

    @property
    def parameters(self) -> int:
        """Number of elements in the model's weights, without scales; an encoded weight counts decoded."""
        parts = {stored for tensor in self.encoded.values() for stored in tensor.parts.values()}
        parts |= self.container.beside | (self.container.entries.keys() - self.catalog.container.entries.keys())
        plain = sum(
            tensor.parameters for name, tensor in self.items() if name not in parts and not name.startswith(OPTIMIZER)
        )
        return plain + sum(prod(tensor.shape) for tensor in self.encoded.values())

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self:
            raise no_such_name(name, self.targets)
        return StoredTensor(name, *self.view.form_of(name), self.targets[name], self.source, self)

    def __iter__(self) -> Iterator[str]:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.targets

    def in_order(self) -> list[str]:
        """Return the tensor names in the order of the dialect's table; names not in the table are last."""
        order: dict[str, int] = {}
        prefix_length = 0
        try:
            if self.family is not None and self.dialect is not None:
                lines = pick_dialect(self.reading.family, self.dialect).lines
                prefix_length = len(self.reading.prefix)
                order = {line.name.skeleton: number for number, line in reversed([*enumerate(lines)])}
        except TransaxleError:  # the names of this view belong to no dialect of the family
            order = {}
        inner_names = without_wrappers(self) if order else {}

        def place(name: str) -> tuple[int, str]:
            inner = inner_names.get(name, name)
            ranks = [order[each] for each in (skeleton(inner), skeleton(inner[prefix_length:])) if each in order]
            return min(ranks, default=len(order)), natural(name)

        return sorted(self, key=place)

    def close(self) -> None:
        """Close the files of the checkpoint; its tensors cannot be read afterwards."""
        close(self.container.storage)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = " · closed" if is_closed(self.container.storage) else ""
        try:
            amount = f"{len(self)} tensors"
        except TransaxleError as error:  # a repr shows the refusal's code instead of raising
            amount = f"refused: {error.code}"
        return f"<checkpoint {self.path} · {self.format} · {amount}{closed}>"


CheckpointLike: TypeAlias = PathLike | Checkpoint
"""A path or URL of a checkpoint, or a checkpoint that is already open."""


def _cut_over_ranks(options: Settings, storage: Storage, names: Sequence[str], config: Any = None) -> Any:
    """Return how parallel ranks cut parameters according to the tables; the code is imported only when needed."""
    from transaxle.engine.checkpoint.unstated import cutter

    return cutter(options)(storage, names, config or {})


def _parameter_names(options: Settings, weights: Container, state: Container) -> Mapping[str, str]:
    """Return the names of an optimizer's numbered parameters. The code for this is imported only when needed."""
    from transaxle.engine.checkpoint.unstated import names_by_number

    def in_memory(weights: Container) -> Mapping[str, tuple[int, ...]]:
        view = Checkpoint(weights, options, None, None).as_dialect(IN_MEMORY)
        return {name: tensor.shape for name, tensor in view.items()}

    return names_by_number(weights, state, options.config, in_memory)


@without_gc()
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
    restate: str | None = None,
    graft: PathLike | None = None,
    graft_over: Patterns = (),
    **options: Any,
) -> Checkpoint:
    """Open a checkpoint of any known format without loading tensors and without importing torch.

    Args:
        path: path or URL of a folder or a file.
        decode: `bf16` or `fp32`: show encoded tensors as plain tensors, which are decoded when they are read.
        dtype: `bf16`, `fp16` or `fp32`, the dtype to which plain floating-point tensors are cast when they are read.
        only: patterns of the tensor names to decode or cast.
        skip: patterns of the tensor names that keep their stored form.
        lenient: whether to accept a checkpoint, one of two, that lacks what an option needs (codes, choices, state).
        merge: path of a LoRA adapter to merge into the weights when they are read.
        restate: convention or encoding in which encoded tensors are shown, with the same values.
        graft: path of a checkpoint of the same model, from which tensors are taken that this one lacks.
        graft_over: patterns of the names of tensors that are taken from that checkpoint too, although they are here.
        **options: the options of `engine.checkpoint.settings`.

    Raises:
        TypeError: if an argument has the wrong type.
        StorageError: with code IO, if the path is missing or unreadable.
        Refused: with CORRUPT, INCOMPLETE, UNSUPPORTED or other codes, one for every problem of the files; with
            MISSING_TENSOR, if optimizer state is asked for but the checkpoint has none.
    """
    decode, dtype = read_float_type("decode", decode), read_float_type("dtype", dtype)
    only, skip = read_patterns("only", only), read_patterns("skip", skip)
    merge = None if merge is None else read_path("merge", merge)
    view_options = {"decode": decode, "dtype": dtype, "merge": merge, "restate": restate}
    if len(several := [name for name, value in view_options.items() if value is not None]) > 1:
        raise TypeError(f"{' and '.join(several)} exclude each other; give only one")
    source, user = read_path("path", path), settings(**options)
    over = read_patterns("graft_over", graft_over)
    if over and graft is None:
        raise TypeError("graft_over needs graft")
    container = _open_files(source, user, lenient=lenient)
    rules = None if options.get("rules") is None else os.path.abspath(options["rules"])  # noqa: PTH100 - links stay
    if container.inside and not container.config_path:  # a config above needs the folder as given
        source = f"{source.rstrip('/')}/{container.inside}"
    absolute_path, base = _absolute(source), None if graft is None else _absolute(read_path("graft", graft))
    reading = {"decode": decode, "dtype": dtype, "only": only, "skip": skip, "lenient": lenient, "rules": rules}
    reading = {**options, "config": user.config, **reading, "restate": restate, "graft": base, "graft_over": over}
    checkpoint = Checkpoint(container, user, None, None)
    if user.optimizer is False:
        checkpoint = checkpoint.without_optimizer()
    elif user.optimizer and not lenient and not checkpoint.has_state:
        raise refuse_stateless(checkpoint)
    if graft is not None:
        checkpoint = checkpoint.graft(graft, over)
    if merge is not None:
        return checkpoint.merge(merge)
    if restate is not None:
        from transaxle.engine.views.restated import restate_tensors

        files, config = restate_tensors(
            checkpoint.catalog, read_text("restate", restate, "modelopt"), checkpoint.settings.config
        )
        checkpoint = Checkpoint(files, replace(checkpoint.settings, config=config), None, None, checkpoint)
    elif dtype is not None:
        checkpoint = checkpoint.cast(dtype, only, skip)
    elif decode is not None and not (lenient and not checkpoint.catalog.encoded and not checkpoint.catalog.refusals):
        checkpoint = checkpoint.decode(decode, only, skip)
    checkpoint.reopening = Reopening(absolute_path, reading, rules=table(rules) if rules else None)
    return checkpoint


def _open_files(path: str, user: Settings, *, lenient: bool) -> Container:
    """Open the files of a checkpoint with the user's options for reading them; see `open_checkpoint`."""
    choices = partial(_cut_over_ranks, user), user.optimizer, user.ranks
    how: dict[str, Any] = {"average": user.average, "lenient": lenient, "naming": partial(_parameter_names, user)}
    opening: Any = partial(open_container, path, config_above=user.config is None, **how)
    open_as_written = None if user.weights is None else partial(opening, user.format, None, *choices)
    container = with_shape_files(with_hash_witness(opening(user.format, user.weights, *choices), open_as_written))
    container = add_compact_scales(container) if describes_codes(container.metadata) else container
    if not user.average:
        return container
    from transaxle.engine.duplicates import average_replicas

    return average_replicas(container)


def _absolute(path: str) -> str:
    """Return a URL, or an absolute path; links are not resolved."""
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100 - links stay


def refuse_stateless(checkpoint: Checkpoint) -> TransaxleError:
    """Return the error for a checkpoint that lacks the optimizer state that the user asks for."""
    message = "there is no optimizer state to take, which --optimizer (optimizer=) asks for"
    where, hint = Where(checkpoint.path), "For the model alone, omit --optimizer (optimizer=)."
    return gathered(checkpoint.container.unread or [Refusal("MISSING_TENSOR", message, where, hint)])


@contextmanager
def open_source(argument: str, source: CheckpointLike, reading: Mapping[str, Any]) -> Iterator[Checkpoint]:
    """Yield an open checkpoint; close it afterwards only if this function has opened it.

    Args:
        argument: the name that the caller uses for the parameter, for errors.
        source: a path, or an open checkpoint.
        reading: options of `open_checkpoint`.

    Raises:
        TypeError: if options are given for a checkpoint that is already open.
        TransaxleError: any error that `open_checkpoint` raises.
    """
    if isinstance(source, Checkpoint):
        if reading:
            raise TypeError(f"{', '.join(reading)}: pass this to open() instead; the checkpoint is already open")
        yield source
        return
    with open_checkpoint(read_source(argument, source), **reading) as checkpoint:
        yield checkpoint
