"""What the program knows of a container format: one record, which answers whatever is asked of formats by name.

Reader and draft are named by module path and imported when the format is used: looking at a folder of safetensors
files imports nothing of DCP, of pickles or of DeepSpeed. `registry` holds the records.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from transaxle.errors import TransaxleError, refuse
from transaxle.plugins import aside, is_users

if TYPE_CHECKING:
    from transaxle.formats.catalog import Container, Draft
    from transaxle.formats.storage.storage import Storage

_LONGEST_TAG = 4096
"""Bytes that are read of a file that names a step."""
_SHOWN = 10
"""Names that an error lists."""
INDEX = ".index.json"
"""Suffix of a file that lists which shard holds which tensor."""
HERE = "."
"""Candidate for a path that is itself the folder of one step."""
LAST = 100
"""Place of a clue that is tried after those of all built-in formats."""


class Folder(msgspec.Struct, frozen=True):
    """The names that detection sees: no contents, except one small tag file."""

    storage: Storage
    inside: str
    """Sub-folder of the storage, with a trailing `/`; empty for the folder itself."""
    names: tuple[str, ...]
    """Files directly in the folder, or the one file that the path denotes."""
    folders: tuple[str, ...]
    """Sub-folders; none if the path denotes one file."""


Candidates = Callable[[Folder], tuple[str, ...]]
"""Returns the members of a folder that would each be a checkpoint."""


class Clue(msgspec.Struct, frozen=True):
    """One way to recognise a format."""

    candidates: Candidates | str
    """Finds the candidates; or its `module:function`, which is imported if `hint` matches."""
    place: int = LAST
    """Order of the clues, the smallest first. If clues of one place find two candidates, the user decides."""
    hint: str = ""
    """Regular expression; the clue is tried only if it matches the whole name of a file or sub-folder."""
    reader: str = ""
    """`module:function` that opens its candidates, if that is not the format's own reader."""
    all_shards: bool = False
    """A candidate stands for all shards in its folder, so that one that is named `…-00001-of-00002` may be opened."""

    def found(self, folder: Folder) -> tuple[str, ...]:
        """Return the candidates in a folder."""
        if self.hint and not any(re.fullmatch(self.hint, name) for name in (*folder.names, *folder.folders)):
            return ()
        find = imported(self.candidates) if isinstance(self.candidates, str) else self.candidates
        candidates: tuple[str, ...] = find(folder)
        return candidates


@dataclass(frozen=True, kw_only=True)
class Format:
    """A container format."""

    name: str
    """What `--format`, `--to` and plans call it."""
    title: str
    """A checkpoint of it in words, with its article."""
    clues: tuple[Clue, ...]
    """How it is recognised."""
    reader: str
    """`module:function(storage, path, member)`, which returns a `Container`; `member` is a clue's candidate."""
    draft: str = ""
    """`module:function(tensors, *, metadata, shard_size)`, which returns a `Draft`; empty: it cannot be written."""
    reader_takes: frozenset[str] = frozenset()
    """Keywords that the reader takes besides: `weights` (which precision), `cutter` (how ranks cut parameters),
    `optimizer` (whether its state is wanted)."""
    draft_takes: frozenset[str] = frozenset()
    """Keywords that the draft takes besides: `groups` (an optimizer's settings), `training` (other plain data by its
    paths), `run` and `read` (what a training run says of itself, and a reader of small tensors), `sealed` (leave room
    for digests in the one file), `nesting` (how the state dict in the one file is nested), `config` (the model's),
    `cuts` (where tensors of several layers or experts are cut into chunks), `degrees` and `parts` (the ranks that have
    files, and what each tensor-parallel one holds of a tensor)."""
    dialects: tuple[str, ...] = ()
    """Dialects in which it is written unless the user names one: the first that fits. Empty: the source's own names."""
    full_precision: bool = False
    """Whether its weights are the full-precision copies that the optimizer keeps, where it keeps some."""
    dtypes: frozenset[str] | None = None
    """Types of tensors that it can hold, as safetensors codes; None: its draft refuses what it cannot."""

    one_file: tuple[str, ...] = ()
    """Ends of the names of files each of which can be a checkpoint by itself; empty: it is always a folder."""
    heads: tuple[tuple[int, bytes], ...] = ()
    """Offset and bytes by which such a file is told from others of its name; one of them is enough."""
    parts: tuple[str, ...] = ()
    """Ends of the names of its other files that hold tensors or describe them."""
    openers: tuple[str, ...] = ()
    """Ends of the names of files that make those around them a checkpoint: they must appear last."""
    files: str = r"(?!)"
    """Regular expression for the paths of all its files inside the folder of a checkpoint."""
    sidecars: frozenset[str] = frozenset()
    """Names of the files that frameworks write beside them."""
    steps: str = ""
    """Regular expression for sub-folders, each of which is a checkpoint of one training step; empty: it has none."""
    newest: str = ""
    """File beside such sub-folders that names the newest."""
    inner: str = ""
    """Sub-folder of a step that holds some of its files."""
    package: str = ""
    """Distribution that it comes from; empty: it ships with Transaxle."""

    def open(self, clue: Clue | None, storage: Storage, path: str, member: str, **options: Any) -> Container:
        """Open a checkpoint of it.

        Args:
            clue: what found it; None where the user names the format.
            storage: where the files are.
            path: what the user typed.
            member: the candidate.
            **options: those of `reader_takes`.

        Raises:
            TransaxleError: what the reader raises.
        """
        reader = self._imported((clue.reader if clue is not None else "") or self.reader)
        with self.answerable("its reader", member):
            container: Container = reader(storage, path, member, **options)
        return container

    @contextmanager
    def answerable(self, what: str, file: str | None = None) -> Iterator[None]:
        """Let an error of an installed package name that package; of a format that ships it stays the bug that it is.

        Args:
            what: the part of it that runs.
            file: what it reads.
        """
        try:
            with aside() if self.package else nullcontext():
                yield
        except TransaxleError:
            raise
        except BaseException as error:
            if not self.package or is_users(error):
                raise
            message = f"format {self.name} of the package {self.package}: {what} failed: {error!r}"
            hint = f"This is a bug of {self.package}, which should say what is wrong: tell its authors."
            raise refuse("UNSUPPORTED", message, file=file, hint=hint) from error

    @cached_property
    def drafter(self) -> Callable[..., Draft]:
        """What lays out a checkpoint of it that does not exist yet."""
        drafter: Callable[..., Draft] = self._imported(self.draft)
        return drafter

    @cached_property
    def file_pattern(self) -> re.Pattern[str]:
        """`files`, compiled."""
        return re.compile(self.files)

    @cached_property
    def step_pattern(self) -> re.Pattern[str]:
        """`steps`, compiled; it matches nothing where there are none."""
        return re.compile(self.steps or r"(?!)")

    def _imported(self, where: str) -> Any:
        try:
            with aside() if self.package else nullcontext():
                return imported(where)
        except BaseException as error:
            if not self.package or is_users(error):
                raise  # one of our own modules: that is a bug, and no refusal
            message = f"format {self.name} of the package {self.package}: {where} cannot be imported: {error!r}"
            raise refuse("UNSUPPORTED", message, hint=f"Repair the package, or remove {self.package}.") from error


def imported(where: str) -> Any:
    """Return what `module:name` names.

    Raises:
        Exception: whatever importing the module raises; AttributeError where it has no such name.
    """
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def ending(*ends: str, unless: str = r"(?!)") -> Candidates:
    """Return what finds the files whose names end so.

    Args:
        ends: ends of names.
        unless: regular expression for names that are no candidates, unless the path denotes that one file.
    """
    left_out = re.compile(unless)

    def candidates(folder: Folder) -> tuple[str, ...]:
        wanted = folder.storage.single
        found = (name for name in folder.names if name.endswith(ends))
        return tuple(name for name in found if name == wanted or not left_out.fullmatch(name))

    return candidates


def named(name: str) -> Candidates:
    """Return what finds the file of this name."""
    return lambda folder: (name,) if name in folder.names else ()


def first_of(pattern: str) -> Candidates:
    """Return what finds the first of the files whose names match all of a regular expression, by numbers in them."""
    compiled = re.compile(pattern)

    def candidates(folder: Folder) -> tuple[str, ...]:
        found = [name for name in folder.names if compiled.fullmatch(name)]
        return (min(found, key=lambda name: (*map(int, re.findall(r"\d+", name)), name)),) if found else ()

    return candidates


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the search for garbage that holds itself: of the millions of objects that are made here, none is.

    Whatever else is dropped goes at once, as always.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def newest_step(folder: Folder, file: str) -> str | None:
    """Return the sub-folder that a file names; None where the file, or the sub-folder, is not there."""
    if file not in folder.names or not folder.folders:
        return None
    tag = _tag_in(folder, file)
    return tag if tag in folder.folders else None


def check_newest(folder: Folder, file: str) -> None:
    """Refuse a file that names no sub-folder of the checkpoint: another step is not what was asked for.

    Raises:
        Refused: PATH_ESCAPE where it leads out; CORRUPT where it is empty; INCOMPLETE where the folder is not there.
    """
    if not file or file not in folder.names or newest_step(folder, file) is not None:
        return
    from transaxle.formats.storage.storage import is_plain

    tag = _tag_in(folder, file)
    if not is_plain(tag):
        message = f"the file names the step {tag!r}, which is not a folder of the checkpoint"
        hint = "Give the folder of a step itself."
        raise refuse("PATH_ESCAPE" if tag else "CORRUPT", message, file=f"{folder.inside}{file}", hint=hint)
    if folder.folders:
        message = f"the file names the step {tag!r}, whose folder is missing; present: {listed(folder.folders)}"
        hint = "Copy that folder, or give the folder of a step itself."
        raise refuse("INCOMPLETE", message, file=f"{folder.inside}{file}", hint=hint)


def listed(names: Sequence[str]) -> str:
    """Return names as errors show them: the first ten."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _tag_in(folder: Folder, file: str) -> str:
    whole = f"{folder.inside}{file}"
    size = min(folder.storage.size(whole), _LONGEST_TAG)
    return folder.storage.read(whole, 0, size).decode("utf-8", "replace").strip()
