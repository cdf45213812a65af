"""Tensors that a checkpoint lacks, taken from another checkpoint of the model (`--graft`).

Training often drops parts of a model: layers that predict tokens ahead, a tower for pictures, a draft head. The base
from which the run started still has them, in any format, dialect and encoding. A grafted checkpoint is a view of the
source to which these tensors are added while they are read: the tables of the family translate the base into the
dialect of the source, and the tensors whose logical tensors the source does not store are added under the names that
they get there. So everything after that (plans, loads, comparisons) sees one checkpoint.

A tensor that the source has keeps its values, unless the user names it. Quantized tensors come with their scales if the
source stores tensors in the same way, and decoded otherwise; the config of the result describes what is in it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from math import prod
from operator import add
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, BoundNames, Presence, split_slot, with_kept
from transaxle.axes.layout.model_tensors import AHEAD
from transaxle.axes.layout.relayout import Target
from transaxle.axes.notation.family import Family, Sizes
from transaxle.axes.notation.name import natural
from transaxle.axes.translation.translate import translate
from transaxle.encodings.conventions.quantization import MODELOPT_CONFIG, module_of
from transaxle.encodings.conventions.rewriting import rewrite_config
from transaxle.encodings.encoding import PLAIN, EncodedTensor, Error, Role
from transaxle.encodings.value_steps import ComputedTensor, RecodedTensor
from transaxle.engine.checkpoint.settings import CONFIG, read_stored_config
from transaxle.engine.source import Source
from transaxle.engine.views.decoded import DTYPES, RowMajorBytes
from transaxle.engine.views.encode import select_names
from transaxle.engine.views.encoded import View, describes_codes
from transaxle.engine.wording import plural
from transaxle.errors import LACKING, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Container, Entry, Extent, Recoding, nbytes
from transaxle.formats.registry import USE_FILES
from transaxle.formats.storage.storage import InMemoryFile, Storage, VirtualFile, VirtualFiles
from transaxle.formats.training_state import OPTIMIZER, is_extra_state
from transaxle.move.transfer import Transfer

if TYPE_CHECKING:
    from transaxle.engine.checkpoint.checkpoint import Checkpoint
    from transaxle.engine.plan.planned import OutputTensor

_FILE = "\0grafted "
"""Prefix of the names of the virtual files that contain grafted tensors."""
_BAND = 1 << 22
"""Number of bytes of a grafted tensor that are read at once."""
_AHEAD = re.compile(r"(?:^|_)(?:mtp|nextn)(?:_|$)")
"""Pattern of config keys that concern layers which predict tokens ahead."""
_TOKEN = re.compile(r"_token_(?:id|index)$")
"""Pattern of config keys that concern the tokens of pictures, sounds and videos."""
_TIE = frozenset({"tie_word_embeddings"})
"""Config key of a text model that a larger model states too, at the top or in the section of the text model."""
_DECODE = (
    "Decode it first:  transaxle convert SRC PLAIN --to hf --decode bf16, and then  transaxle convert PLAIN OUT "
    "--to hf --graft BASE."
)
_TEXT = "text_config"
"""Config key of the section of the text model in a larger one."""
_OF_WHOLE = _TIE | {"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"}
"""Config keys of a text model that the section of the text model in a larger one does not take over."""
_LAYERS = "L"
"""Axis of the tables whose size is the number of layers without those that predict tokens ahead."""
_SHOWN = 6
"""Largest number of names that one message lists."""


class _GraftedFile(msgspec.Struct, frozen=True):
    """A virtual file with one tensor of the base, in the dialect of the source, in row-major order."""

    nbytes: int
    """Size of the virtual file in bytes; see `VirtualFile`."""
    rows: RowMajorBytes
    """The bytes of the tensor."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Copy bytes of the tensor into `view`; see `VirtualFile`."""
        out = view.cast("B")
        for start in range(0, len(out), _BAND):
            stop = min(len(out), start + _BAND)
            out[start:stop] = self.rows.read(offset + start, offset + stop).data


class _DecodedFile(_GraftedFile, frozen=True):
    """A virtual file with a tensor of the base that is decoded; see `ComputedTensor`."""

    step: RecodedTensor
    """The step of the plan that describes this decoding."""
    decoders: Sequence[ComputedTensor]
    """The decoded tensors of which this tensor is composed."""

    def measure(self) -> tuple[Error, int]:
        """Return the error of all decoded values; see `ComputedTensor`."""
        measured = [decoder.measure() for decoder in self.decoders]
        return reduce(add, (error for error, _ in measured), Error()), sum(infinite for _, infinite in measured)


class _CopiedFile(msgspec.Struct, frozen=True):
    """A virtual file with the bytes of a file of the base."""

    nbytes: int
    """Size of the virtual file in bytes; see `VirtualFile`."""
    storage: Storage
    """The storage that reads the base."""
    name: str
    """Name of the file in the base."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with bytes of the file; see `VirtualFile`."""
        self.storage.read_into(self.name, offset, view)


class _Group(msgspec.Struct, frozen=True):
    """A tensor of the base in the dialect of the source: a plain tensor, or codes with their scales."""

    name: str
    """Name of the tensor without buffer suffixes."""
    view: View
    """The translation of the base that contains the tensor."""
    source: Source
    """The object that turns the tensors of `view` into transfers."""
    encoded: EncodedTensor | None
    """The encoded tensor; None for a plain tensor."""
    prefix: str
    """Text before the names of `view` in the source."""

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the stored tensors of the group; the first contains the values or the codes."""
        return (self.name,) if self.encoded is None else tuple(self.encoded.parts.values())

    @property
    def target(self) -> Target:
        """The tensor with its values or codes."""
        name = self.name if self.encoded is None else self.encoded.parts[Role.CODES]
        return self.view.targets[name]

    @property
    def components(self) -> list[str]:
        """Logical tensors of the group; empty for a tensor that no table names."""
        return [] if self.target.is_identity else [part.component for part in self.target.parts]

    def name_in_source(self, name: str) -> str:
        """Return the name in the source of a tensor of the group."""
        return self.prefix + name if self.components else name

    @property
    def origins(self) -> set[str]:
        """Names, without buffer suffixes, of the tensors of the base from which the group is composed."""
        return {origin.name for part in self.target.parts for origin in part.origins}


def graft_tensors(source: Checkpoint, base: Checkpoint, over: Sequence[str]) -> Checkpoint:
    """Return a view of a checkpoint to which the tensors of a second checkpoint are added that it lacks.

    Args:
        source: the checkpoint under its stored names.
        base: a checkpoint of the same model, under its stored names; closing the view closes it too.
        over: patterns of the names of tensors of the source that are replaced by those of the base.

    Raises:
        Refused: with code SHAPE_MISMATCH, if the models differ in a size or in a feature; with code MISSING_TENSOR, if
            the base lacks a tensor to replace; with code UNSUPPORTED, if a tensor cannot be added; further refusals of
            the two checkpoints.
        UsageError: with code AMBIGUOUS, if nothing is missing, or a pattern matches nothing; with UNKNOWN_FAMILY, if no
            table reads one of the checkpoints.
    """
    checkpoint = _Grafting(source, base.without_optimizer(), over).run()
    checksum = "" if base.manifest is None else base.manifest.checksum
    recoding = replace(checkpoint.container.recoding, base_checksum=checksum)
    return type(source)(replace(checkpoint.container, recoding=recoding), checkpoint.settings, None, None)


def with_graft(view: View, container: Container) -> View:
    """Return a translation of a grafted checkpoint whose refusals of missing tensors name both checkpoints, and which
    leaves out grafted copies of tensors that the dialect stores once.

    Copies of the embedding and the head in a layer of the base, which predicts ahead, are those of the base's own. A
    dialect without names for them has those of the source in their place.
    """
    recoding, base = container.recoding, container.recoding.additional["base"]
    refusals = [
        dataclasses.replace(refusal, message=f"{refusal.message}\nneither {container.path} nor {base.path} has it")
        if refusal.code in LACKING
        else refusal
        for refusal in view.refusals
    ]
    compared = {check.first.name for check in view.checks}
    omitted = sorted(recoding.grafted & compared & {*view.kept_names}, key=natural)
    return replace(
        view,
        refusals=tuple(refusals),
        targets={name: target for name, target in view.targets.items() if name not in omitted},
        checks=tuple(check for check in view.checks if check.first.name not in omitted),
        kept_names=tuple(name for name in view.kept_names if name not in omitted),
        ignored=(*view.ignored, *omitted),
    )


def plan_grafts(
    recoding: Recoding, outputs: Iterable[OutputTensor], prefix: str, carried: Collection[str]
) -> dict[str, Any]:
    """Return the fields of a plan that name what comes, at least in part, from the base of a graft.

    Args:
        recoding: how the source differs from its files.
        outputs: the output tensors of the plan.
        prefix: text before the names of copied files in the target.
        carried: target names of the copied files.
    """
    names, grafted, files = recoding.grafted, list[str](), {prefix + name for name in recoding.grafted_files}
    for output in outputs if names else ():
        origins = (origin.name.partition("\0")[0] for part in output.target.parts for origin in part.origins)
        if any(origin in names for origin in origins):
            grafted.append(output.name)
    return {
        "grafted": dict.fromkeys(grafted, recoding.base),
        "grafted_files": {name: recoding.base for name in carried if name in files},
    }


class _Grafting:
    """One graft, and the notes about it."""

    def __init__(self, source: Checkpoint, base: Checkpoint, over: Sequence[str]) -> None:
        self._patterns = over
        self._notes: list[str] = []
        self._problems: list[Refusal] = []
        self._container = source.container
        self._new_config: Mapping[str, Any] | None = None
        if not base.config:
            base = _with_config(base, source.config)
        elif source.settings.config is None and CONFIG not in source.container.carried:
            source = _with_config(source, base.config)
            self._new_config = base.config
            self._notes.append(f"{CONFIG} is that of {base.path}, since {source.path} has none")
        source, base = _as_configured(source), _as_configured(base)
        if source.reading.family.name != base.reading.family.name:
            if isinstance(source.config.get(_TEXT), Mapping) and _TEXT not in base.config:
                base, _ = _in_whole_model(base, source)
            else:
                source = self._in_base_model(source, base)
        self._base = base
        self._family: Family = base.reading.family
        self._source = source
        self._dialect = source.reading.dialect
        self._prefix = source.reading.prefix

    def run(self) -> Checkpoint:
        """Return the grafted checkpoint."""
        self._decode_base()
        groups = self._groups()
        replaced = self._find_replacements(groups)
        chosen = [*self._find_missing(groups), *replaced.values()]
        if self._problems:
            raise gathered(self._problems)
        if not chosen:
            raise self._refuse_idle()
        self._note_dtypes(chosen)
        complete = partial(self._complete, chosen)
        self._check_sizes(complete(self._source.config), chosen)
        checkpoint = self._with_tensors(chosen, replaced)
        return self._with_configs(self._with_use_files(checkpoint), chosen, complete)

    def _decode_base(self) -> None:
        """Decode those quantized tensors of the base whose encoding or convention the source does not have."""
        catalog, base = self._source.catalog, self._base
        for refusals in (catalog.refusals, base.catalog.refusals):
            if refusals:
                raise gathered(refusals)
        kinds = {(tensor.encoding, tensor.convention) for tensor in catalog.encoded.values()}
        # Headers of torchao and TransformerEngine list the tensors of their file by name; those of GPTQ need g_idx.
        is_movable = not (
            base.catalog.program or describes_codes(base.metadata) or describes_codes(self._source.metadata)
        )
        foreign = [
            tensor
            for tensor in base.catalog.encoded.values()
            if not is_movable or (tensor.encoding, tensor.convention) not in kinds
        ]
        if foreign:
            self._base = base.decode(self._plain_dtype(), [tensor.name for tensor in foreign])

    def _note_dtypes(self, chosen: Sequence[_Group]) -> None:
        """Note plain tensors whose dtype is not that of the source's."""
        dtype = DTYPES[self._plain_dtype()]
        dtypes = Counter(group.target.dtype for group in chosen if group.encoded is None)
        for code, count in dtypes.items():
            if code in PLAIN and code != dtype:
                self._notes.append(
                    f"{plural(count, 'grafted tensor')} stay {code}; most of {self._source.path} is {dtype}"
                )

    def _plain_dtype(self) -> str:
        """Return the name of the dtype of most plain values of the source, `bf16` if it has none."""
        counts: Counter[str] = Counter()
        for name, entry in self._source.catalog.entries.items():
            if entry.dtype in PLAIN and not name.startswith(OPTIMIZER):
                counts[entry.dtype] += prod(entry.shape)
        names = {code: name for name, code in DTYPES.items()}
        return next((names[code] for code, _ in counts.most_common() if code in names), "bf16")

    def _groups(self) -> list[_Group]:
        """Return the tensors of the base in the dialect of the source.

        A logical tensor without a line in this dialect gets its name in the first dialect of the family, from which
        all conversions know it.
        """
        bound, first = self._base.bound, self._family.dialects[0].label
        groups = list(self._translate(self._dialect.label))
        unknown = {bound.own.get(name, name) for name in bound.unknown}
        homeless = {group.name for group in groups if group.target.is_identity} - unknown
        if not homeless or first == bound.dialect.label:
            return groups
        origins = {origin for group in groups if group.name in homeless for origin in group.origins}
        groups = [group for group in groups if group.name not in homeless]
        return groups + [group for group in self._translate(first) if group.origins & origins]

    def _translate(self, label: str) -> Iterator[_Group]:
        """Yield the tensors of the base in a dialect; the base may lack tensors itself."""
        base = self._base
        settings = replace(base.settings, partial=True)
        partial_base = type(base)(base.container, settings, None, None, base.undecoded)
        view = partial_base.translation(label)
        if view.refusals:
            raise gathered(_of_base(refusal, base.path) for refusal in view.refusals)
        source, prefix = partial_base.source_of(label), self._prefix if label == self._dialect.label else ""
        buffers = {stored for tensor in view.encoded.values() for stored in tensor.parts.values()}
        for name in dict.fromkeys((*view.encoded, *view.targets)):
            if name in view.encoded or name not in buffers:
                group = _Group(name, view, source, view.encoded.get(name), prefix)
                if group.target.parts and not (name.startswith(OPTIMIZER) or is_extra_state(name)):
                    yield group

    def _find_missing(self, groups: Sequence[_Group]) -> list[_Group]:
        """Return the groups that the source lacks; refusals of groups that it has in part are added to the problems."""
        source, entries = self._source, self._source.catalog.entries
        bound = with_kept(source.bound, self._dialect, source.sizes, entries)
        stored, ties = Presence(bound.names), source.sizes.originals
        chosen: list[_Group] = []
        kept_modules: set[str] = set()
        for group in (*groups, *self._single_groups(bound, stored)):
            index = group.target.index
            presence = {
                any(stored.at(name, index) for name in (component, *ties.get(component, ())))
                for component in group.components
            }
            if presence == {False}:
                chosen.append(group)
            elif presence:
                kept_modules.update(map(module_of, group.origins))
            if len(presence) > 1:
                message = f"{group.target.rule}\n{source.path} has some of its parts, and lacks others"
                hint = "Convert the source to a dialect that stores these parts separately, and graft then."
                self._problems.append(Refusal("INCOMPLETE", message, Where(None, group.name), hint))
        decoded_modules = set(map(module_of, self._base.decoded))
        for group in groups:
            # A tensor that no table names may belong to another one, as the scale of cached keys does.
            modules = set(map(module_of, group.origins))
            if not group.components and modules.isdisjoint(kept_modules | decoded_modules):
                chosen += [group] if group.name not in source.container.entries else []
        return chosen

    def _single_groups(self, bound: BoundNames, stored: Presence) -> Iterator[_Group]:
        """Yield the tensors of the base that the dialect of the source stacks, and of which the source has some under
        single names, as a checkpoint does whose layers are stored in two ways.

        Args:
            bound: the names of the source, also those that it has from other dialects.
            stored: the logical tensors that these names contain.
        """
        own_axes = {name: {*line.name.axes} for line in self._dialect.lines for name in line.expression.components}
        foreign = {line for line, slot in bound.names if slot == WEIGHT} - {*self._dialect.lines}
        for dialect in self._family.dialects:
            lines = foreign.intersection(dialect.lines)
            foreign -= lines
            single = {
                name
                for line in lines
                for name in line.expression.components
                if own_axes.get(name, {*line.name.axes}) < {*line.name.axes}
            }
            for group in self._translate(dialect.label) if single else ():
                for name in single.intersection(group.components):
                    at = {axis: place for axis, place in group.target.index.items() if axis in own_axes[name]}
                    if stored.at(name, at):
                        yield group
                        break

    def _find_replacements(self, groups: Sequence[_Group]) -> dict[str, _Group]:
        """Return name -> group of the base, for the tensors of the source that the user lets replace."""
        if not self._patterns:
            return {}
        entries = self._source.catalog.entries
        by_name = {group.name_in_source(group.name): group for group in groups}
        names = [name for name in entries if split_slot(name)[1] == WEIGHT]
        replaced = {}
        for name in select_names(names, self._patterns, (), "tensor of the source"):
            group = by_name.get(name)
            if group is None:
                message = f"{self._base.path} has no tensor for it in the dialect {self._dialect.label}"
                hint = "Choose patterns for --graft-over that name only tensors of the base."
                self._problems.append(Refusal("MISSING_TENSOR", message, Where(None, name), hint))
            elif group.target.shape != entries[name].shape and not self._has_equal_sizes(group):
                shapes = f"{list(entries[name].shape)} in {self._source.path}, {list(group.target.shape)} in"
                message = f"its shape is {shapes} {self._base.path}"
                self._problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name)))
            else:
                replaced[name] = group
        return replaced

    def _has_equal_sizes(self, group: _Group) -> bool:
        """Return whether both configs give every axis of a group the same size, so that a tensor of the source with
        another shape is incomplete, such as a stack that lacks experts.
        """
        index = group.target.index
        sizes, base_sizes = self._source.sizes.at(index), self._base.sizes.at(index)
        axes = {axis for component in group.components for axis in self._family.tensors[component].axes}
        return bool(axes) and all(axis in sizes and sizes[axis] == base_sizes.get(axis) for axis in axes)

    def _refuse_idle(self) -> TransaxleError:
        self._check_sizes(self._source.config, [])
        message = f"nothing to graft: {self._source.path} has every tensor that {self._base.path} has"
        hint = "Omit --graft (graft=), or name tensors to replace with --graft-over PATTERN (graft_over=)."
        return refuse("AMBIGUOUS", message, hint=hint)

    def _is_ahead(self, group: _Group) -> bool:
        """Return whether a group belongs to a layer that predicts tokens ahead."""
        layers = self._base.sizes.at({}).get(_LAYERS)
        is_beyond = layers is not None and group.target.index.get("l", -1) >= layers
        return is_beyond or any(component.startswith(AHEAD) for component in group.components)

    def _config_keys(self, chosen: Sequence[_Group]) -> set[str]:
        """Return the config keys on which sizes and conditions of the logical tensors of the groups depend."""
        tensors = [self._family.tensors[component] for group in chosen for component in group.components]
        formulas = [tensor.when for tensor in tensors if tensor.when is not None]
        axes, names = {axis for tensor in tensors for axis in tensor.axes}, set[str]()
        while axes - names:
            names |= axes
            formulas += [formula for axis in axes if (formula := self._family.axes[axis]) is not None]
            names.update(*(formula.names for formula in formulas))
            axes = names & self._family.axes.keys()
        return names - self._family.axes.keys() - self._family.tensors.keys()

    def _complete(self, chosen: Sequence[_Group], config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the keys of the base's config that announce the grafted tensors.

        These are sections of towers with the tokens of their inputs, and numbers of layers that predict ahead.
        """
        family, base_config = self._family, self._base.config
        source_settings, base_settings = (Sizes(family, each).settings for each in (config, base_config))
        relevant, is_ahead = self._config_keys(chosen), any(map(self._is_ahead, chosen))
        new_keys = {
            key: value
            for key, value in base_settings.items()
            if (isinstance(value, Mapping) and key in relevant and not source_settings.get(key))
            or (is_ahead and _AHEAD.search(key) and value and not source_settings.get(key))
        }
        if any(isinstance(value, Mapping) for value in new_keys.values()):
            new_keys |= {key: value for key, value in base_settings.items() if _TOKEN.search(key)}
        for section, value in base_settings.items():
            if is_ahead and section in relevant - new_keys.keys() and isinstance(value, Mapping):
                inner = source_settings[section]
                ahead = {key: number for key, number in value.items() if _AHEAD.search(key) and not inner.get(key)}
                new_keys |= {section: {**inner, **ahead}} if any(ahead.values()) else {}
        new_keys = {key: value for key, value in new_keys.items() if source_settings.get(key) != value}
        sizes, base_sizes = Sizes(family, {**source_settings, **new_keys}).at({}), Sizes(family, base_settings).at({})
        for axis in family.axes.keys() & base_sizes.keys() - sizes.keys():
            formula = family.axes[axis]
            lacking = set() if formula is None else formula.names & base_settings.keys() - source_settings.keys()
            new_keys |= {key: base_settings[key] for key in lacking & relevant}
        if not new_keys:
            return dict(config)
        keys = ", ".join(sorted(new_keys))
        note = f"{CONFIG}: {keys} as in {self._base.path}, since the config of {self._source.path} says nothing of it"
        if note not in self._notes:
            self._notes.append(note)
        if source_settings is config:
            return {**config, **new_keys}
        return {**config, _TEXT: {**source_settings, **new_keys}}

    def _check_sizes(self, config: Mapping[str, Any], chosen: Sequence[_Group]) -> None:
        """Refuse models that differ in the size of an axis, or in a config key on which the grafted tensors depend."""
        source, base = Sizes(self._family, config).settings, self._base.sizes.settings
        # A config may announce layers ahead that a checkpoint lacks.
        without_ahead = [{key: of[key] for key in of if not _AHEAD.search(key)} for of in (source, base)]
        sizes = Sizes(self._family, without_ahead[0], self._source.settings.axes).at({})
        base_sizes = Sizes(self._family, without_ahead[1]).at({})
        differing: dict[str, tuple[Any, Any]] = {
            f"{axis} ({formula.text})": (sizes[axis], base_sizes[axis])
            for axis, formula in self._family.axes.items()
            if formula is not None and sizes.get(axis) != base_sizes.get(axis) and axis in sizes and axis in base_sizes
        }
        for key in sorted(self._config_keys(chosen)):
            pair = source.get(key), base.get(key)
            if None not in pair and pair[0] != pair[1] and not any(isinstance(value, Mapping) for value in pair):
                differing[key] = pair
        if not differing:
            return
        shown = [
            f"{name}: {of_source} in the source, {of_base} in the base"
            for name, (of_source, of_base) in differing.items()
        ]
        unlisted = [f"… and {len(shown) - _SHOWN:,} more"] if len(shown) > _SHOWN else []
        message = f"{self._source.path} and {self._base.path} are not the same model"
        hint = "Give as --graft (graft=) the base from which the source was trained."
        raise refuse("SHAPE_MISMATCH", "\n".join([message, *shown[:_SHOWN], *unlisted]), hint=hint)

    def _with_tensors(self, chosen: Sequence[_Group], replaced: Mapping[str, _Group]) -> Checkpoint:
        """Return the source with the tensors of the chosen groups, and without the replaced ones."""
        container, encoded = self._source.container, self._source.catalog.encoded
        parts = {part for name in replaced for part in (encoded[name].parts.values() if name in encoded else (name,))}
        remaining = container.without(parts)
        entries = dict(remaining.entries)
        files: dict[str, VirtualFile] = {}
        computed: dict[str, ComputedTensor] = {}
        by_step = {step.step.name: step for step in self._base.container.recoding.computed.values()}
        for group in chosen:
            for buffer in group.buffers:
                name, (dtype, shape) = group.name_in_source(buffer), group.view.form_of(buffer)
                if name in entries:
                    message = f"{self._base.path} has a tensor with this name, and {self._source.path} another one"
                    raise refuse("NAME_COLLISION", message, tensor=name)
                target = group.view.targets[buffer]
                if target.computed:
                    message = f"{target.rule}\nthe dialect {self._dialect.label} rounds its values"
                    hint = "Convert the source to the dialect of the base, and graft then."
                    raise refuse("LOSSY", message, tensor=name, hint=hint)
                rows = RowMajorBytes(self._base.container.storage, self._transfers(group, target))
                size, file = nbytes(dtype, shape), _FILE + name
                if decoders := [by_step[origin] for origin in sorted(group.origins & by_step.keys())]:
                    step = replace(decoders[0].step, name=name, shape=shape)
                    computed[file] = _DecodedFile(size, rows, step, decoders)
                files[file] = computed.get(file) or _GraftedFile(size, rows)
                entries[name] = Entry(name, dtype, shape, (Extent((0,) * len(shape), shape, file, 0),))
        recoding = replace(
            container.recoding,
            computed={**container.recoding.computed, **computed},
            additional={**container.recoding.additional, "base": self._base.container},
            grafted=frozenset(group.name_in_source(group.name) for group in chosen),
        )
        storage = VirtualFiles(container.storage, files, (self._base.container.storage,))
        container = replace(remaining, storage=storage, entries=entries, left=container.left, recoding=recoding)
        settings = replace(self._source.settings, dialect=self._dialect.label)
        return type(self._source)(container, settings, None, None)

    def _transfers(self, group: _Group, target: Target) -> list[Transfer]:
        """Return the transfers that fill a tensor of the base, which may be there only in part."""
        try:
            return group.source.transfers(target)
        except TransaxleError as error:
            raise gathered(_of_base(refusal, self._base.path) for refusal in error.refusals) from None

    def _with_use_files(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the grafted checkpoint with files about the use of the model that the source lacks.

        Files of a kind are taken only if the source has none of them: a tokenizer of two checkpoints would be a third.
        """
        container, base = checkpoint.container, self._base.container
        present = (*container.carried, *container.ignored)
        kinds = tuple(kind for kind in USE_FILES if not any(name.startswith(kind) for name in present))
        names = tuple(name for name in base.carried if any(map(name.startswith, kinds)))
        files = {name: _CopiedFile(base.storage.size(name), base.storage, name) for name in names}
        container = replace(
            container,
            storage=VirtualFiles(container.storage, files, listed=names),
            carried=(*container.carried, *names),
            recoding=replace(container.recoding, grafted_files=names),
        )
        return type(checkpoint)(container, checkpoint.settings, None, None)

    def _with_configs(
        self, checkpoint: Checkpoint, chosen: Sequence[_Group], complete: Callable[[Mapping[str, Any]], dict[str, Any]]
    ) -> Checkpoint:
        """Return the grafted checkpoint with configs that describe it."""
        container, settings = checkpoint.container, checkpoint.settings
        texts: dict[str, Mapping[str, Any]] = {}
        if self._new_config is not None:
            texts[CONFIG] = complete(self._new_config)
            settings = replace(settings, config=None)
        elif CONFIG in container.carried:
            texts[CONFIG] = complete(read_stored_config(container.storage))
        if settings.config is not None:
            settings = replace(settings, config=complete(settings.config))
        checkpoint = self._with_files(checkpoint, texts, settings)
        quantization = self._source.catalog.quantization
        if quantization is None:
            return checkpoint
        names = {group.name_in_source(group.name) for group in chosen}
        encoded = checkpoint.catalog.encoded
        plain = {
            name: entry.shape
            for name, entry in checkpoint.catalog.entries.items()
            if name not in encoded and split_slot(name)[1] == WEIGHT
        }
        unquantized = [name for name in names & plain.keys() if len(plain[name]) > 1]
        rewrite = partial(rewrite_config, encoded=encoded, plain=plain, decoded=unquantized)
        if quantization.file == MODELOPT_CONFIG:
            texts[MODELOPT_CONFIG] = rewrite(read_stored_config(container.storage, MODELOPT_CONFIG))
        else:
            texts = {name: rewrite(text) for name, text in texts.items()}
            settings = settings if settings.config is None else replace(settings, config=rewrite(settings.config))
        return self._with_files(checkpoint, texts, settings)

    def _with_files(self, checkpoint: Checkpoint, texts: Mapping[str, Mapping[str, Any]], settings: Any) -> Checkpoint:
        """Return a checkpoint with other contents of its config files."""
        container = checkpoint.container
        files = {name: InMemoryFile(json.dumps(text, indent=2).encode() + b"\n") for name, text in texts.items()}
        new_names = tuple(name for name in files if name not in container.carried)
        recoding = replace(container.recoding, notes=(*self._container.recoding.notes, *self._notes))
        container = replace(
            container,
            storage=VirtualFiles(container.storage, files, listed=new_names),
            carried=(*container.carried, *new_names),
            recoding=recoding,
        )
        return type(checkpoint)(container, settings, None, None)

    def _in_base_model(self, source: Checkpoint, base: Checkpoint) -> Checkpoint:
        """Return a text model that was trained alone under the names that it has as a part of the base; see
        `_in_whole_model`.
        """
        given_config = self._new_config
        source, config = _in_whole_model(source, base, with_own_config=given_config is None)
        if given_config is None:
            self._notes.append(f"{CONFIG} is that of {base.path}, with the text_config of {source.path}")
        self._new_config = config
        return source


def _as_configured(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that is read as the model in its config, if that is possible: without its tower, all names of
    a model could also be those of a text model behind a prefix.
    """
    reading, config = checkpoint.reading, checkpoint.config
    if checkpoint.settings.family is not None or not isinstance(config.get(_TEXT), Mapping):
        return checkpoint
    if config.get("model_type") in reading.family.model_types:
        return checkpoint
    families = checkpoint.settings.families.of_types([str(config.get("model_type"))])
    for family in families:
        settings = replace(checkpoint.settings, family=family.name)
        configured = type(checkpoint)(checkpoint.container, settings, None, None)
        if configured.reading.matched >= reading.matched:
            return configured
    return checkpoint


def _in_whole_model(
    part: Checkpoint, whole: Checkpoint, *, with_own_config: bool = True
) -> tuple[Checkpoint, dict[str, Any]]:
    """Return a text model that was trained alone under the names that it has as a part of a larger model, and the
    config of both.

    Args:
        part: the text model.
        whole: a checkpoint of the larger model.
        with_own_config: whether the text model has a config of its own, which becomes a section of the other one.

    Raises:
        Refused: with code UNSUPPORTED, if the text model's family is no part of the larger one, or if the text model is
            quantized.
    """
    part_family, family = part.reading.family, whole.reading.family
    components = {name for line, _ in part.bound.names for name in line.expression.components}
    lacking = [
        name
        for name in sorted(components)
        if name not in family.tensors or family.tensors[name].axes != part_family.tensors[name].axes
    ]
    text = whole.config.get(_TEXT)
    if lacking or not isinstance(text, Mapping):
        message = f"{part.path} is a {part_family.name}, {whole.path} a {family.name}, and their tables do not fit"
        hint = "Give as --graft (graft=) a base of the same family."
        raise refuse("UNSUPPORTED", message, hint=hint)
    if part.catalog.encoded:
        message = f"{part.path} is quantized, and a part of the larger model {family.name}"
        raise refuse("UNSUPPORTED", message, hint=_DECODE)
    dialect = family.dialect(part.reading.dialect.label) or whole.reading.dialect
    config = dict(whole.config)
    if with_own_config:
        text_keys = part.config.keys() - _OF_WHOLE | part.config.keys() & text.keys() & _TIE
        config |= {key: part.config[key] for key in _TIE & part.config.keys()}
        config[_TEXT] = {**text, **{key: part.config[key] for key in part.config if key in text_keys}}
    bound = msgspec.structs.replace(part.bound, family=family)
    entries = part.container.entries
    translation = translate(bound, entries, dialect, Sizes(family, config), partial=True)
    if translation.refusals:
        raise gathered(translation.refusals)
    reader = part.source_of(None)
    files: dict[str, VirtualFile] = {}
    new_entries: dict[str, Entry] = {}
    for name, target in translation.targets.items():
        stored = entries.get(target.whole_source or "")
        if stored is not None:
            new_entries[name] = replace(stored, name=name)
            continue
        rows = RowMajorBytes(part.container.storage, reader.transfers(target))
        files[_FILE + name] = _GraftedFile(nbytes(target.dtype, target.shape), rows)
        extent = Extent((0,) * len(target.shape), target.shape, _FILE + name, 0)
        new_entries[name] = Entry(name, target.dtype, target.shape, (extent,))
    container = replace(part.container, storage=VirtualFiles(part.container.storage, files), entries=new_entries)
    settings = replace(part.settings, config=config, family=family.name, dialect=dialect.label)
    return type(part)(container, settings, None, None), config


def _with_config(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    return type(checkpoint)(checkpoint.container, replace(checkpoint.settings, config=config), None, None)


def _of_base(refusal: Refusal, path: str) -> Refusal:
    """Return a refusal of a tensor of the base that names the base."""
    return dataclasses.replace(refusal, message=f"{refusal.message}\n(of {path}, from which tensors are grafted)")
