"""Detects the format of a path: tries the clues (recognisable file names) of all formats in a fixed order, and uses the
first format that matches.

One folder may contain a checkpoint twice, in two formats or two precisions. For this reason the order of the clues is
fixed, files that were not chosen are listed as ignored, and if one clue matches two checkpoints the user must choose
between them.

In a folder without a checkpoint of its own, the folders that trainers make are searched (`checkpoint-3`, `actor`,
`lightning_logs`). If these folders contain exactly one checkpoint, it is opened, and its path is shown. A checkpoint
without a config gets the config.json of a folder above it, if that is the config of a model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from transaxle.arguments import Weights
from transaxle.errors import LONGEST_NAME, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Container
from transaxle.formats.checksums import with_checks
from transaxle.formats.registry import (
    ADAPTER_CONFIG,
    CONFIG,
    DCP,
    DCP_DATA,
    DCP_METADATA,
    GLOBAL_STEP,
    INDEX,
    MANIFEST,
    RANKS,
    SAFETENSORS,
    SCRATCH,
    STATE_FOLDER,
    TORCH,
    TRACKERS,
    Clue,
    Folder,
    Format,
    builtin,
    check_newest,
    every_format,
    find,
    join_names,
    one_file_ends,
    plugin_formats,
    unknown_format,
    unread_end,
)
from transaxle.formats.storage.local import read_file
from transaxle.formats.storage.storage import (
    InMemoryFile,
    NotJsonError,
    Storage,
    SubFolder,
    VirtualFiles,
    is_url,
    parse_json,
    too_long,
)
from transaxle.formats.store.service import HUB
from transaxle.formats.store.staging import as_local_path, storage_at
from transaxle.formats.training_state import OPTIMIZER

if TYPE_CHECKING:
    from transaxle.formats.deepspeed.spread import Cutter
    from transaxle.formats.step_parts import Naming

_SHARD = re.compile(r".*-(\d+)-of-(\d+)")
_META = "consolidated"
_RANK = re.compile(rf"({_META}[._]|(?:.*[._-])?rank[._-]?)(\d+)((?:[._-].*)?\.(?:pth?|bin|safetensors))")
_OF_RANKS = (
    "Each file has one rank's share of a model's tensors, and does not state along which axes they are cut: join the "
    "files with the program that wrote them (transformers' convert_llama_weights_to_hf.py for Meta's), and convert the "
    "result. One file, given by its own path, keeps its names with --to safetensors:identity "
    '(to="safetensors:identity").'
)
_MAX_SUBFOLDERS = 50
_SNAPSHOTS = "snapshots"
"""Name of the folder in huggingface_hub's cache that contains one sub-folder per revision."""
_ORIGIN = "Give the checkpoint from which this file was made, or save its tensors as safetensors."
_WRITTEN_AS = re.compile(rb'\{\s*"transaxle":\s*\d+,\s*"format":\s*"([A-Za-z0-9_.+-]{1,100})"')
"""Pattern for the start of Transaxle's manifests; the rest of a manifest, which may be long, is not read."""
_LONGEST_BEGINNING = 512
_PART_NAMES = re.compile(
    r"\.hf_metadata|model|optim|pytorch_model_fsdp_\d+|optimizer_\d+|(?:optimizer(?:_\d+)?|scheduler)\.(?:pt|bin)"
    r"|model_world_size_\d+_rank_\d+\.pt"
)
"""Pattern for names of files and folders that occur in a step folder whose model and optimizer are separate
checkpoints, see `step_parts`."""
_STEP_NAMES = r"checkpoint[-_]\d+|global_step_?\d+|step[-_]\d+|(?:dist_)?epoch_\d+(?:_step_\d+)?|version_\d+"
_INNER_NAMES = re.compile(
    rf"{_STEP_NAMES}|checkpoints?|actor|critic|policy|lightning_logs|{_SNAPSHOTS}|transaxle(?:_\d+)?|.+\.ckpt|.+-{{2}}val_loss=.+"
)
"""Pattern for the names of folders that trainers make, and that are searched for a checkpoint: folders of steps, of the
models of reinforcement learning, and of logs."""
_MODELS = re.compile(r"actor|critic|policy|epoch_\d+")
"""Pattern for the names of folders with models, in a step folder of verl or SkyRL and in a run folder of torchtune."""
_BESIDE_MODELS = frozenset({"data.pt", "trainer_state.pt", "recipe_state.pt"})
"""Files with training state that verl, SkyRL and torchtune write beside the folders of models."""
_DEEPEST = 4
"""Maximum number of path segments to a checkpoint that a search finds:
`lightning_logs/version_0/checkpoints/epoch=0.ckpt`.
"""
_MAX_LISTINGS = 60
"""Maximum number of folders that are listed in a search."""
_LARGEST_CONFIG = 8 << 20
_WEIGHTS = "weights"
"""Name of the reader option that selects the weights, for formats that may store the weights twice."""


class _Match(NamedTuple):
    """A candidate: a file or sub-folder of a folder that may be a checkpoint."""

    kind: Format
    clue: Clue | None
    """The clue (recognisable file name) that matched; None if the user named the format of a single file."""
    member: str


def open_container(
    path: str,
    format: str | None = None,  # noqa: A002 - the contract's name
    weights: Weights | None = None,
    cutter: Cutter | None = None,
    optimizer: bool | None = None,
    ranks: str | None = None,
    *,
    average: bool = False,
    lenient: bool = False,
    naming: Naming | None = None,
    config_above: bool = True,
) -> Container:
    """Open the checkpoint that a path denotes: a folder, an index or a tensor file.

    If a folder itself is no checkpoint, but the folders that trainers make inside it contain one checkpoint, this
    checkpoint is opened.

    Args:
        path: path of the folder or file.
        format: name of the only format to try; None means all formats.
        weights: which weights to read, if the format stores them twice; None means the optimizer's (master) copies.
        cutter: function that finds how ranks sharded parameters, if the checkpoint does not state it.
        optimizer: whether to read the optimizer's state; None means only if the checkpoint contains the parameter names
            of this state.
        ranks: the user's template for the names of rank files; None means names like `model_world_size_2_rank_0.pt`.
        average: whether to average replicas that differ; only formats with one file per rank have replicas.
        lenient: whether to ignore `weights` and `average` for formats to which they do not apply, instead of refusing.
        naming: function that names an optimizer's parameters, if the checkpoint lists them only by number.
        config_above: whether a checkpoint without a config gets the config of a folder above it.

    Raises:
        UsageError: with the code AMBIGUOUS if the first matching clue matches two checkpoints, if several inner folders
            contain one, or if there is no format of this name.
        Refused: with the code UNSUPPORTED if there is no checkpoint; with the code INCOMPLETE if the path is one shard
            file of several; with the codes of the format's reader if it refuses the files.
        StorageError: with the code IO if a file cannot be read.
    """
    kind = None if format is None else find(format)
    if format is not None and kind is None:
        raise unknown_format(format, [each.name for each in every_format()])
    if ranks is not None:
        kind = _with_template(kind, ranks)
    options = {"weights": weights, "cutter": cutter, "optimizer": optimizer, "ranks": ranks}
    inapplicable = () if lenient else _inapplicable(weights, average=average)
    path = as_local_path(os.fspath(path))
    given_options = {name: option for name, option in options.items() if option is not None}
    choices = _Choices(kind, given_options, inapplicable, naming if optimizer else None, path)
    container = _open_path(path, choices)
    if config_above:
        container = _with_config_above(container, path)
    return with_checks(container) if container.checksums else container


def _open_path(path: str, choices: _Choices) -> Container:
    """Open the checkpoint at a path, without the config of a folder above; the errors are those of `open_container`."""
    storage = storage_at(path)
    try:
        return _open(storage, storage.path, choices)
    except BaseException:
        storage.close()
        raise


def has_choices(format: str) -> bool:  # noqa: A002 - as above
    """Return whether checkpoints of a format may store the weights twice, or replicas that differ."""
    kind = find(format)
    return kind is not None and _WEIGHTS in kind.reader_takes


def _with_template(kind: Format | None, template: str) -> Format:
    """Return the format of rank files, for which the user gave a template of their names."""
    from transaxle.formats.ranks.names import check_template

    check_template(template)
    if kind not in (None, RANKS):
        message = f"--ranks (ranks=) names the files of the format {RANKS.name}, and the format is {kind.name}"
        raise refuse("AMBIGUOUS", message, hint="Omit --format, or omit --ranks.")
    return RANKS


def _inapplicable(weights: Weights | None, *, average: bool) -> tuple[tuple[str, str], ...]:
    """Return `(message, hint)` for each option of the user that does not apply to a format that stores each weight
    once.
    """
    precision = "{} stores its weights once, so there is no precision to choose", "Omit --weights."
    replicas = "{} stores its weights once, so there are no replicas to average", "Omit --average-replicas (average=)."
    return (*([precision] if weights is not None else []), *([replicas] if average else []))


class _Choices(NamedTuple):
    """The user's choices for opening a path."""

    kind: Format | None = None
    """The only format to try; None means all formats."""
    options: Mapping[str, Any] = {}
    """Options for the readers of formats, by name."""
    inapplicable: Sequence[tuple[str, str]] = ()
    """`(message, hint)` of a refusal, for each option that does not apply if the format stores each weight once; see
    `_inapplicable`."""
    naming: Naming | None = None
    """Function that names an optimizer's numbered parameters; None means that their state is not read."""
    searched: str = ""
    """Path or URL of the folder whose inner folders are searched if the folder itself is no checkpoint; empty if
    nothing is searched.
    """


def _open(storage: Storage, path: str, choices: _Choices) -> Container:
    folder = _folder(storage)
    if SCRATCH in folder.folders or (storage.single and _unfinished_around(path)):
        message = "a run that was killed, or is still at work, has not written all of this: the rest is zeros"
        hint = "Continue the run with --resume and its other options, or remove its work:  transaxle clean TARGET."
        raise refuse("INCOMPLETE", message, file=path, hint=hint)
    matches = _matches_in(folder, choices)
    if not matches and storage.single and choices.kind and choices.kind.one_file:
        matches = [_Match(choices.kind, None, storage.single)]
    if not storage.single and (_may_have_parts(folder) or "ranks" in choices.options):
        return _open_parts(folder, path, matches, choices)
    return _open_match(folder, path, matches, choices) if matches else _open_inner(folder, choices)


def _matches_in(folder: Folder, choices: _Choices) -> list[_Match]:
    """Return the matches in a folder, for the formats that the user's choices permit."""
    if template := choices.options.get("ranks"):
        from transaxle.formats.ranks.names import rank_sets

        model = rank_sets(folder.names, template).model
        return [_Match(RANKS, None, model)] if model else []
    matches = _first_matches(folder, choices.kind)
    has_models = any(map(_MODELS.fullmatch, folder.folders))
    return [match for match in matches if not (has_models and match.member in _BESIDE_MODELS)]


def _open_inner(folder: Folder, choices: _Choices) -> Container:
    """Open the only checkpoint in the folders that trainers make inside `folder`, which itself is no checkpoint.

    Raises:
        UsageError: with the code AMBIGUOUS if there are several checkpoints.
        Refused: with the codes of `_refuse_nothing` if there is none; with the code INCOMPLETE if a file names a newest
            step that is missing.
    """
    search = _Search(folder.storage, choices)
    places = list(search.places(folder)) if choices.searched and "?" not in choices.searched else []
    unlisted = f"{search.unlisted} more folders were not examined"
    if not places and search.unlisted:
        message = f"no checkpoint in the newest {_MAX_LISTINGS} folders, and {unlisted}"
        raise refuse("UNSUPPORTED", message, file=folder.storage.path, hint="Give the folder of a checkpoint itself.")
    if not places:
        raise _refuse_nothing(folder, choices.kind)
    path = folder.storage.path.rstrip("/")
    if len(places) > 1 or search.unlisted:
        count = "one checkpoint or more" if len(places) == 1 else "several checkpoints"
        message = f"the folder holds {count} in its folders: {join_names(places)}"
        message += f"; {unlisted}" if search.unlisted else ""
        raise refuse("AMBIGUOUS", message, file=path, hint=f"Give one of these checkpoints: {path}/{places[0]}")
    folder.storage.close()
    outer = path if _is_hub(path) else choices.searched.rstrip("/")  # a hub path includes the commit
    return replace(_open_path(f"{outer}/{places[0]}", choices._replace(searched="")), inside=places[0])


class _Search:
    """A search for checkpoints in the folders that trainers make; folder names are listed, and no tensors are read.

    Args:
        storage: storage that reads the outermost folder.
        choices: the user's choices, which every checkpoint must fit.
    """

    def __init__(self, storage: Storage, choices: _Choices) -> None:
        self._storage = storage
        self._choices = choices
        self._listings = 0
        self.unlisted = 0
        """Number of folders that were not examined, because the limit was reached."""

    def places(self, folder: Folder, depth: int = 1) -> Iterator[str]:
        """Yield the paths of the checkpoints in the inner folders of a folder, the newest first."""
        for name in _inner_names(folder):
            if self._listings == _MAX_LISTINGS:
                self.unlisted += 1
                continue
            self._listings += 1
            place = f"{folder.inside}{name}"
            inner = _folder(self._storage, place)
            if self._is_checkpoint(inner):
                yield place
            elif depth < _DEEPEST:
                yield from self.places(inner, depth + 1)

    def _is_checkpoint(self, folder: Folder) -> bool:
        """Return whether a folder looks like a checkpoint. A damaged or unfinished checkpoint counts too, so that it is
        refused instead of skipped.
        """
        if SCRATCH in folder.folders or any(name.endswith(DCP_DATA) for name in folder.names):
            return True
        try:
            return bool(_matches_in(folder, self._choices) or _weights_folders(folder))
        except TransaxleError:
            return True


def _inner_names(folder: Folder) -> list[str]:
    """Return the names of those sub-folders that are searched for a checkpoint, the newest step first; only the newest
    step, if a file names it.

    Raises:
        Refused: with the code INCOMPLETE if the folder of the newest step is missing.
    """
    is_cache = folder.inside.endswith(f"{_SNAPSHOTS}/")
    names = [name for name in folder.folders if is_cache or _INNER_NAMES.fullmatch(name)]
    tracker = next((name for name in TRACKERS if name in folder.names), None)
    if tracker is not None and any(map(GLOBAL_STEP.fullmatch, names)):
        file = f"{folder.inside}{tracker}"
        text = folder.storage.read(file, 0, min(folder.storage.size(file), _LONGEST_BEGINNING))
        step = f"global_step_{text.decode('utf-8', 'replace').strip()}"
        if step not in names:
            message = f"the file names the step {step[:80]!r}, whose folder is missing; present: {join_names(names)}"
            hint = "Copy the missing folder, or give the folder of a step itself."
            raise refuse("INCOMPLETE", message, file=file, hint=hint)
        return [step]

    def newest_first(name: str) -> tuple[list[int], str]:
        return [-int(number) for number in re.findall(r"\d+", name)], name

    return sorted(names, key=(lambda name: ([], name)) if is_cache else newest_first)


def _with_config_above(container: Container, path: str) -> Container:
    """Add to a checkpoint without a config the config.json of a folder above it, if that file is the config of a model.

    The folders are those inside the folder that the user gave, at most two levels above the checkpoint, and the one
    directly above the folder that the user gave.

    Args:
        container: the opened checkpoint.
        path: path or URL that the user gave.
    """
    has_weights = any(not name.startswith(OPTIMIZER) for name in container.entries)
    described = container.config or not {CONFIG, ADAPTER_CONFIG}.isdisjoint(container.carried)
    if described or container.storage.single or not has_weights:
        return container
    if _is_hub(path):
        # `container.path` names the commit.
        path = container.path.removesuffix(f"/{container.inside}" if container.inside else "")
    for folder in _folders_above(path, container.inside):
        place = f"{folder.rstrip('/')}/{CONFIG}" if is_url(folder) else os.path.join(folder, CONFIG)  # noqa: PTH118
        text = _read_url(place) if is_url(place) else _read_local(place)
        if text is not None and _is_model_config(text):
            storage = VirtualFiles(container.storage, {CONFIG: InMemoryFile(text)}, listed=(CONFIG,))
            carried = tuple(sorted((*container.carried, CONFIG)))
            return replace(container, storage=storage, carried=carried, config_path=place)
    return container


def _folders_above(path: str, inside: str) -> Iterator[str]:
    """Yield the folders in which a config may be that belongs to a checkpoint, the nearest first.

    Args:
        path: path or URL of the folder that the user gave.
        inside: path of the checkpoint in that folder; empty if they are the same.
    """
    levels = inside.split("/")[:-1] if inside else []
    nearest = [[*levels][:count] for count in range(len(levels), -1, -1)] if inside else []
    yield from ("/".join((path.rstrip("/") or "/", *part)) for part in nearest[:2])
    if len(nearest) < 2:
        yield from filter(None, [_folder_above(path)])


def _folder_above(path: str) -> str:
    """Return the path or URL of the folder that contains a folder; empty if there is no such folder, or it cannot
    belong to a checkpoint.
    """
    if not is_url(path):
        above = os.path.normpath(os.path.join(path, os.pardir))  # noqa: PTH118 - as typed
        return "" if above == os.path.normpath(path) else above
    start, _, address = path.partition("://")
    above = address.rstrip("/").rpartition("/")[0]
    if start.lower().startswith("http") or "?" in address or "/" not in above:  # a bucket is no folder of a checkpoint
        return ""
    if _is_hub(path):
        from transaxle.formats.store.hub import parse_hub_url

        return f"{start}://{above}" if parse_hub_url(path).inside else ""
    return f"{start}://{above}"


def _is_hub(path: str) -> bool:
    return path.lower().startswith(f"{HUB}://")


def _read_local(path: str) -> bytes | None:
    """Return the bytes of a config in a local folder; None if there is no such file, or it cannot be read."""
    if not os.path.isfile(path):  # noqa: PTH113 - as typed
        return None
    try:
        return read_file(path, _LARGEST_CONFIG)
    except TransaxleError:
        return None


def _read_url(url: str) -> bytes | None:
    """Return the bytes of a config on a service; None if there is no such file, or it cannot be read."""
    from transaxle.formats.store.reading import read_if_exists

    try:
        return read_if_exists(url, _LARGEST_CONFIG)
    except TransaxleError:
        return None


def _is_model_config(text: bytes) -> bool:
    try:
        config = parse_json(text)
    except NotJsonError:
        return False
    return isinstance(config, dict) and (
        isinstance(config.get("model_type"), str) or isinstance(config.get("architectures"), list)
    )


def _may_have_parts(folder: Folder) -> bool:
    """Return whether a folder may be a step folder with separate checkpoints for model and optimizer, see
    `step_parts`.
    """
    return any(map(_PART_NAMES.fullmatch, (*folder.names, *folder.folders)))


def _open_parts(folder: Folder, path: str, matches: Sequence[_Match], choices: _Choices) -> Container:
    """Open a folder that looks like a step folder with separate checkpoints for model and optimizer (see `step_parts`),
    even if it is an ordinary checkpoint.
    """
    from transaxle.formats.ranks.names import rank_sets
    from transaxle.formats.step_parts import in_part, weights_folders, with_model_files, with_parts

    folder = replace(folder, storage=with_model_files(folder))
    parts = [] if matches else weights_folders(folder)
    if len(parts) > 1:
        raise _refuse_several(path, [_Match(DCP, None, part) for part in parts])
    if not matches and not parts:
        return _open_inner(folder, choices)

    def open_part(member: str) -> Container:
        if member in folder.names:
            if member in sets:
                return RANKS.open(None, folder.storage, path, member, ranks=choices.options.get("ranks"))
            return TORCH.open(None, folder.storage, path, member)
        part_choices = choices._replace(searched="") if member in parts else _Choices()
        return in_part(member, path, lambda: _open(SubFolder(folder.storage, member), path, part_choices))

    sets = rank_sets(folder.names, choices.options.get("ranks"))
    part = parts[0] if parts else None
    weights = open_part(part) if part else _open_match(folder, path, matches, choices)
    without_state = choices.options.get("optimizer") is False
    return with_parts(weights, folder, part, open_part, choices.naming, sets, without_state=without_state)


def _open_match(folder: Folder, path: str, matches: Sequence[_Match], choices: _Choices) -> Container:
    """Open the checkpoint in a folder, for which one or more clues matched."""
    storage = folder.storage
    if len(matches) > 1:
        raise _refuse_several(path, matches)
    kind, clue, member = matches[0]
    shard = None if clue is not None and clue.all_shards else _shard(member)
    if shard and int(shard[2]) > 1 and not storage.single:
        message = f"this is shard {int(shard[1])} of {int(shard[2])}; the other shards and their index are missing"
        raise refuse("INCOMPLETE", message, file=member, hint="To read this shard alone, give the file itself.")
    if choices.inapplicable and _WEIGHTS not in kind.reader_takes:
        where = Where(path)
        raise gathered(
            Refusal("UNSUPPORTED", each.format(kind.title), where, hint) for each, hint in choices.inapplicable
        )
    if kind.newest in folder.names:
        check_newest(folder, kind.newest)
    reader_options = {name: option for name, option in choices.options.items() if name in kind.reader_takes}
    container = kind.open(clue, storage, path, member, **reader_options)
    if kind.package:
        from transaxle.formats.package_checks import check_container

        check_container(kind, container, member)
    long = [name for name in container.entries if len(name) > LONGEST_NAME]
    if long:
        raise gathered(Refusal(*too_long(name), Where(member, name)) for name in long)
    return container


def _unfinished_around(file: str) -> bool:
    """Return whether a local file is in a folder whose conversion is not finished."""
    return not is_url(file) and (Path(file).parent / SCRATCH).is_dir()


def _folder(storage: Storage, inside: str = "") -> Folder:
    if storage.single:
        return Folder(storage, "", (storage.single,), ())
    listing = storage.listing(inside)
    # Candidates include files that must not be read, because opening such a file explains to the user why it is
    # refused.
    return Folder(storage, f"{inside}/" if inside else "", listing.everything(), listing.folders)


def _first_matches(folder: Folder, only: Format | None) -> list[_Match]:
    """Return the matches of the first clue that matches anything; clues of equal rank are tried together."""
    if only is not None:
        return _matches_of([only], folder)
    writer = _written_format(folder)
    written_matches = _matches_of([writer], folder) if writer is not None else []
    return written_matches or _matches_of(builtin().values(), folder) or _matches_of(plugin_formats(), folder)


def _written_format(folder: Folder) -> Format | None:
    """Return the plugin format that a folder's manifest names; None if it names a built-in format, or there is no
    manifest.

    The files of a plugin's format may have names like those of a built-in format, whose clue would then match first.

    Raises:
        Refused: with the code UNSUPPORTED if no installed package provides the format.
    """
    if folder.storage.single or MANIFEST not in folder.names:
        return None
    file = f"{folder.inside}{MANIFEST}"
    try:
        beginning = folder.storage.read(file, 0, min(folder.storage.size(file), _LONGEST_BEGINNING))
    except TransaxleError:
        return None  # a manifest that cannot be read counts as missing
    match = _WRITTEN_AS.match(beginning)
    name = match[1].decode() if match else SAFETENSORS.name
    if name in builtin():
        return None
    kind = find(name)
    if kind is None:
        message = f"{MANIFEST} says it was written as {name!r}, which no installed package provides"
        hint = "Install the package of the format, or name the format: --format NAME."
        raise refuse("UNSUPPORTED", message, file=folder.storage.path, hint=hint)
    return kind


def _matches_of(formats: Iterable[Format], folder: Folder) -> list[_Match]:
    for clues in _by_place(formats):
        matches = [_Match(kind, clue, member) for kind, clue in clues for member in _candidates(kind, clue, folder)]
        if matches:
            return matches
    return []


def _candidates(kind: Format, clue: Clue, folder: Folder) -> tuple[str, ...]:
    with kind.answerable("a clue"):
        return clue.find_candidates(folder)


def _by_place(formats: Iterable[Format]) -> Iterator[list[tuple[Format, Clue]]]:
    clues = sorted(((kind, clue) for kind in formats for clue in kind.clues), key=lambda pair: pair[1].place)
    for _, clues_of_place in groupby(clues, key=lambda pair: pair[1].place):
        yield list(clues_of_place)


def _shard(member: str) -> re.Match[str] | None:
    """Match the name of a shard file, with regex groups for its number and the number of shards; None if the name has
    no such numbers.
    """
    return _SHARD.fullmatch(member.removesuffix(next((end for end in one_file_ends() if member.endswith(end)), "")))


def _rank(file: str) -> tuple[str, int] | None:
    """Split the name of a rank's file into the name without the rank, and the rank; None if the name contains
    no rank.
    """
    match = _RANK.fullmatch(file)
    return None if match is None else (f"{match[1]}{match[3]}", int(match[2]))


def part_of_ranks(storage: Storage) -> Refusal | None:
    """Return a refusal if the name of a single file shows that the file belongs to one rank of several, and so is not a
    whole model.
    """
    rank = _rank(storage.single) if storage.single else None
    if rank is None:
        return None
    neighbours: list[str] = []
    if not is_url(storage.path):
        with suppress(OSError):  # if the folder cannot be listed, the file's name alone decides
            neighbours = os.listdir(os.path.dirname(storage.path) or ".")  # noqa: PTH120, PTH208 - as typed
    sibling_files = {
        other[1]: name for name in sorted(neighbours) if (other := _rank(name)) is not None and other[0] == rank[0]
    }
    sibling_files.pop(rank[1], None)
    ranks_are_complete = (
        sorted((rank[1], *sibling_files)) == list(range(1 + len(sibling_files)))
        if sibling_files
        else rank[0].startswith(_META)
    )
    if not ranks_are_complete or (rank[1] == 0 and not sibling_files):
        return None
    siblings_text = f", beside {join_names(list(sibling_files.values()))}" if sibling_files else ""
    message = (
        f"by its name, this is the file of rank {rank[1]} of several{siblings_text}: a part of the tensors of a model"
    )
    return Refusal("INCOMPLETE", message, Where(storage.path), _OF_RANKS)


def _refuse_several(path: str, matches: Sequence[_Match]) -> TransaxleError:
    members = [match.member for match in matches]
    kinds = list(dict.fromkeys(match.kind.name for match in matches))
    if len(kinds) > 1:
        hint = f"Give one of these checkpoints, or name its format: --format {' or --format '.join(kinds)}."
    elif _rank(members[0]) and len({rank and rank[0] for rank in map(_rank, members)}) == 1:
        hint = _OF_RANKS
    elif all(_shard(member) for member in members):
        hint = f"These look like the shards of one checkpoint: its index (*{INDEX}) is missing."
    else:
        hint = f"Give one of these checkpoints: {path.rstrip('/')}/{members[0]}"
    return refuse("AMBIGUOUS", f"the folder holds several checkpoints: {join_names(members)}", file=path, hint=hint)


def _refuse_nothing(folder: Folder, only: Format | None) -> TransaxleError:
    """Return the refusal of a path without a checkpoint; the refusal lists the path's contents, and sub-folders with a
    checkpoint.
    """
    storage = folder.storage
    summary = f"no {only.name} checkpoint" if only else "no checkpoint"
    if storage.single:
        return _refuse_file(storage.path, summary, only)
    if only is None or only.newest:
        for kind in every_format():
            check_newest(folder, kind.newest)
    if only in (None, DCP) and any(name.endswith(DCP_DATA) for name in folder.names):
        message = (
            "the file is missing, which DCP writes last: the save was interrupted, or a copy left out hidden files"
        )
        hint = "Copy the missing file, which describes the contents of all other files."
        return refuse("INCOMPLETE", message, file=DCP_METADATA, hint=hint)
    names = [*folder.names, *(f"{name}/" for name in folder.folders)]
    path = storage.path.rstrip("/")
    subfolders = [name for name in folder.folders if name not in (STATE_FOLDER, _SNAPSHOTS)]
    if _SNAPSHOTS in folder.folders:  # all other folders of a hub's cache contain files named by hashes
        subfolders = [f"{_SNAPSHOTS}/{name}" for name in storage.listing(_SNAPSHOTS).folders]
    deeper = [f"{path}/{name}" for name in subfolders[:_MAX_SUBFOLDERS] if _has_checkpoint(storage, name, only)]
    hint = ""
    if deeper:
        hint = f"There is one in {join_names(deeper)}."
    elif only is None and (ends := sorted(set(filter(None, map(unread_end, folder.names))))):
        hint = f"Files that end in {join_names(ends)} are not read. {_ORIGIN}"
    elif only is None:
        kinds = join_names([kind.name for kind in every_format()])
        hint = f"Give the file or folder that holds the tensors; these are read: {kinds}."
    message = f"{summary} here; found {join_names(names) or 'nothing'}"
    return refuse("UNSUPPORTED", message, file=storage.path, hint=hint)


def _refuse_file(path: str, summary: str, only: Format | None) -> TransaxleError:
    """Return the refusal of a file whose name matches no format."""
    if only is not None:
        hint = ""
    elif end := unread_end(path):
        return refuse("UNSUPPORTED", f"{summary}: files that end in {end} are not read", file=path, hint=_ORIGIN)
    elif not is_url(path) and _is_checkpoint(around := os.path.dirname(path) or "."):  # noqa: PTH120 - as typed
        hint = f"Give the folder: {around}"
    else:  # safetensors files may have any name; the files of all other formats have fixed endings
        hint = f"If the file is a safetensors file all the same, name the format: --format {SAFETENSORS.name}."
    return refuse("UNSUPPORTED", f"{summary}: the file's name does not tell a known format", file=path, hint=hint)


def _is_checkpoint(path: str) -> bool:
    storage = storage_at(path)
    try:
        return _has_checkpoint(storage, "", None)
    finally:
        storage.close()


def _weights_folders(folder: Folder) -> list[str]:
    if not _may_have_parts(folder):
        return []
    from transaxle.formats.step_parts import weights_folders

    return weights_folders(folder)


def _has_checkpoint(storage: Storage, inside: str, only: Format | None) -> bool:
    """Return whether a sub-folder looks like a checkpoint; False if the sub-folder cannot be read."""
    try:
        folder = _folder(storage, inside)
        return SCRATCH not in folder.folders and bool(_first_matches(folder, only) or _weights_folders(folder))
    except TransaxleError:
        return False
