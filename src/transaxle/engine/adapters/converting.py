"""Converting: the files of an adapter as those of an adapter of the same model in another dialect.

The names are those that peft gives to the modules and parameters of a model whose weights have the dialect's names. The
tables need to know the whole model, of which an adapter changes a part: its config tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from msgspec import structs
from msgspec.structs import replace

from transaxle.axes.layout.model_tensors import Model as Tables
from transaxle.axes.layout.relayout import Check, Target
from transaxle.engine.adapters.factors import WAY, pair
from transaxle.engine.adapters.lora import Changes, Lora
from transaxle.engine.adapters.merging import Model, missing, origins
from transaxle.engine.adapters.peft_files import Module, Saved, config_of, is_flipped, names_of, problems_of
from transaxle.engine.copying.source import Source
from transaxle.engine.views.decoded import RowMajorBytes
from transaxle.errors import Refusal, TransaxleError, Where, gathered
from transaxle.formats.catalog import Container, Entry, Extent, nbytes
from transaxle.formats.storage.storage import InMemoryFile, VirtualFile, VirtualFiles
from transaxle.move.hashing import digest

_FILE = "\0converted "
"""What the names of files that do not exist begin with."""
_ANY = "F32"
"""Type of a model's weights, of which nothing depends on it."""
Express = Callable[[Container, str, Mapping[str, Any]], Model]
"""Makes a checkpoint of a container, of the label of its dialect, which may be empty, and of the model's config."""


class _Relaid:
    """A file of the bytes of a tensor, gathered where they lie.

    Args:
        target: the tensor.
        source: where it is gathered.
    """

    def __init__(self, target: Target, source: Source) -> None:
        self.nbytes = nbytes(target.dtype, target.shape)
        self._rows = RowMajorBytes(source.container.storage, source.transfers(target))

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `VirtualFile`."""
        out = view.cast("B")
        out[:] = self._rows.read(offset, offset + len(out)).data


def converted(
    adapter: Container, said: tuple[str, Mapping[str, Any]], config: Mapping[str, Any], dialect: str, express: Express
) -> Container:
    """Return the files of an adapter for the same model in another dialect.

    Args:
        adapter: the files.
        said: the name of its adapter_config.json, and what that says.
        config: the config.json of the base, without what it says of encodings.
        dialect: label of the other dialect.
        express: makes a checkpoint of other tensors of the model.

    Raises:
        UsageError: UNKNOWN_FAMILY, AMBIGUOUS, UNKNOWN_AXIS where the base is not known.
        Refused: UNSUPPORTED for another adapter than LoRA, and where the other dialect's weights are changed by what
            has no factors; MISSING_TENSOR, SHAPE_MISMATCH where it is not an adapter of this model; AMBIGUOUS.
    """
    lora = Lora(adapter.entries, said[1], config)
    reading, base = _base(adapter, lora, config, express)
    changes = lora.changes({name: entry.shape for name, entry in base.entries.items()})
    view = express(base, reading.dialect.label, config).translation(dialect)
    if view.refusals:
        raise gathered(view.refusals)
    changed = changes.names
    wanted = {name: target for name, target in view.targets.items() if origins(target) & changed}
    problems: list[Refusal] = [*_bound(changes), *_lost(changes, wanted), *_misfits(wanted, dialect)]
    problems.extend(_checked(view.checks, changed))
    source = Source(adapter)
    modules = [] if problems else list(_modules(wanted, changes, source, problems))
    problems.extend(problems_of(modules, said[1]))
    saved = list(_saved(wanted, changes, said[1], problems))
    if problems:
        raise gathered(problems)
    named = names_of(modules, saved)
    files: dict[str, VirtualFile] = {_FILE + name: _Relaid(target, source) for name, target in named.items()}
    alike = {name: target.shape for name, target in named.items()} == {n: e.shape for n, e in adapter.entries.items()}
    alike = alike and {*(each.name for each in modules), *(each.name for each in saved)} == changed
    if not alike or is_flipped(modules, said[1]) != is_flipped((), said[1]):
        files[said[0]] = InMemoryFile(config_of(said[1], modules, saved))
    entries = {name: _entry(name, _FILE + name, target.dtype, target.shape) for name, target in named.items()}
    return structs.replace(adapter, storage=VirtualFiles(adapter.storage, files), entries=entries)


def _base(adapter: Container, lora: Lora, config: Mapping[str, Any], express: Express) -> tuple[Any, Container]:
    """Return the base's family and dialect, and a container of the shapes of all its tensors.

    Raises:
        UsageError: UNKNOWN_FAMILY, AMBIGUOUS, UNKNOWN_AXIS.
        Refused: MISSING_TENSOR where it does not have what the adapter changes.
    """
    bare = structs.replace(adapter, carried=(), metadata={}, twins=(), left={}, training=(), unread=())
    targets = lora.targets()
    named = express(structs.replace(bare, entries={name: _entry(name, name, _ANY, ()) for name in targets}), "", config)
    reading = named.recognised
    tables = Tables(reading.family, named.sizes, tp=0)
    shapes = {reading.prefix + name: shape for name, shape in tables.stored(reading.dialect)}
    if not targets <= shapes.keys():
        raise gathered(missing(name, shapes) for name in sorted(targets - shapes.keys()))
    return reading, structs.replace(
        bare, entries={name: _entry(name, name, _ANY, shape) for name, shape in shapes.items()}
    )


def _entry(name: str, file: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    return Entry(name, dtype, shape, (Extent((0,) * len(shape), shape, file, 0),))


def _modules(
    wanted: Mapping[str, Target], changes: Changes, source: Source, problems: list[Refusal]
) -> Iterator[Module]:
    """Yield what the adapter changes in the other dialect."""
    content = lru_cache(None)(lambda name: digest(source.read(name).data))
    for name, target in wanted.items():
        if not origins(target).isdisjoint(changes.added):
            try:
                yield Module(name, pair(target, changes.added, lambda entry: content(entry.name)))
            except TransaxleError as error:
                problems.extend(error.refusals)


def _saved(
    wanted: Mapping[str, Target], changes: Changes, config: Mapping[str, Any], problems: list[Refusal]
) -> Iterator[Saved]:
    """Yield what the adapter has instead of the base's tensors in the other dialect."""
    whole = tuple(f".{name}" for name in config.get("modules_to_save") or ())
    for name, target in wanted.items():
        parts = origins(target)
        replaced = parts & changes.replaced.keys()
        if not replaced:
            continue
        dtypes = {changes.replaced[each].dtype for each in replaced}
        if replaced != parts:
            message = f"the adapter has some of its parts anew ({', '.join(sorted(replaced))}), and others not"
            problems.append(Refusal("UNSUPPORTED", message, Where(None, name), WAY))
        elif len(dtypes) > 1:
            message = f"its parts have several types: {', '.join(sorted(dtypes))}"
            problems.append(Refusal("DTYPE_MIXED", message, Where(None, name), WAY))
        else:
            is_module = any(f".{each.rpartition('.')[0]}".endswith(whole) for each in parts) if whole else False
            yield Saved(name, _renamed(target, changes.replaced, dtypes.pop()), is_module)


def _renamed(target: Target, entries: Mapping[str, Entry], dtype: str) -> Target:
    """Return a target that is made of the adapter's tensors, not of the base's."""
    parts = tuple(
        part._replace(origins=tuple(structs.replace(origin, name=entries[origin.name].name) for origin in part.origins))
        for part in target.parts
    )
    return replace(target, dtype=dtype, parts=parts)


def _bound(changes: Changes) -> Iterator[Refusal]:
    """Yield what only the model has for which an adapter was trained."""
    for name, change in changes.added.items():
        if len(change.first.shape) > 2:
            yield Refusal("UNSUPPORTED", "its A and B are those of a convolution", Where(None, name), WAY)
    for name in changes.copies:
        yield Refusal("UNSUPPORTED", "peft has it twice, for a vocabulary that was resized", Where(None, name), WAY)


def _lost(changes: Changes, wanted: Mapping[str, Target]) -> Iterator[Refusal]:
    """Yield changes that would reach no weight, and those of embeddings that would reach several."""
    reached = Counter(name for target in wanted.values() for name in origins(target))
    for name in sorted(set(changes.names) - reached.keys()):
        yield Refusal("UNSUPPORTED", "the other dialect has nothing that is made of it", Where(None, name), WAY)
    for name, change in changes.added.items():
        if change.embedding and reached[name] > 1:
            message = "the other dialect has it in several tensors, and the adapter changes one as an embedding"
            yield Refusal("UNSUPPORTED", message, Where(None, name), WAY)


def _misfits(wanted: Mapping[str, Target], dialect: str) -> Iterator[Refusal]:
    """Yield weights whose change is none of the adapter's."""
    for name, target in wanted.items():
        if target.undescribed:
            yield Refusal("UNSUPPORTED", f"{dialect} has no line for it", Where(None, name), WAY)
        elif target.computed:
            message = f"{target.rule}\ncomputes its values, and those of a change would be others"
            yield Refusal("UNSUPPORTED", message, Where(None, name), WAY)


def _checked(checks: Iterable[Check], changed: Collection[str]) -> Iterator[Refusal]:
    """Yield weights that the base has twice, of which an adapter may change one."""
    for check in checks:
        for name in sorted((origins(check.first) | origins(check.second)) & set(changed)):
            yield Refusal("UNSUPPORTED", f"the base has it twice: {check.why}", Where(None, name), WAY)
