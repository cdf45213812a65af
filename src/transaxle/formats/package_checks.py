"""Checks what the formats of plugin packages return: catalogs of checkpoints, and drafts (descriptions of checkpoints
that do not exist yet).

All later code relies on catalogs being right: shapes are integers, bytes are inside their files, and chunks cover their
tensor exactly once. The built-in formats check their catalogs while they parse files. This project does not test the
code of a plugin, and the files that a plugin reads are untrusted, so each catalog that it returns is checked once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from transaxle.errors import Code, Faults, TransaxleError
from transaxle.formats.catalog import ITEM_BITS, Checksum, Container, Draft, Entry, Extent, Fragment, Spec, nbytes
from transaxle.formats.dcp.chunk_tiling import check_tiling
from transaxle.formats.registry import MANIFEST, STATE_FOLDER, Format
from transaxle.formats.storage.storage import split_name

_MAX_DIMS = 64
"""Maximum number of dims that numpy supports."""
_MAX_BITS = (2**63 - 1) * 8
_WIDEST = max(ITEM_BITS.values())


class _Range(NamedTuple):
    """A byte range of a file that a draft assigns to a tensor or a fragment (bytes outside the tensors)."""

    start: int
    stop: int
    tensor: str | None
    """Name of the tensor; None if the range belongs to a fragment."""


class _Checks:
    """Checks what the format of one plugin returned, and collects the problems.

    Args:
        kind: the plugin's format; each problem mentions the plugin's package.
        files: maps the name of each file to its size in bytes.
        hint: the hint of each problem; if empty, a default hint about files that were read.
    """

    def __init__(self, kind: Format, files: Mapping[str, int], hint: str = "") -> None:
        self.faults = Faults()
        self.files = files
        self._who = f"format {kind.name} of the package {kind.package} gave "
        self._hint = hint or f"The file is damaged, or {kind.package} has a bug: its reader must refuse such a file."

    def add(self, code: Code, problem: str, file: str | None, tensor: str | None = None) -> None:
        """Add a problem; `problem` describes the wrong value that the plugin returned."""
        self.faults.add(code, self._who + problem, file, tensor, self._hint)

    def entry(self, name: Any, entry: Any, file: str | None) -> bool:
        """Check one catalog entry: a tensor and the places of its bytes.

        Args:
            name: the key of the tensor in the catalog.
            entry: the entry of the tensor in the catalog.
            file: name of the file that a problem mentions if the entry has no extent with a file.
        """
        if not _is_a(entry, Entry) or entry.name != name or not _is_text(name):
            self.add("CORRUPT", f"{entry!r} for the tensor {name!r}; expected an Entry of that name", file)
            return False
        extents = entry.extents
        if not _is_a(extents, tuple) or not all(_is_a(extent, Extent) for extent in extents):
            self.add("CORRUPT", f"the extents {extents!r}; expected a tuple of Extent", file, entry.name)
            return False
        file = next((extent.file for extent in extents if _is_a(extent.file, str)), file)
        if not _is_a(entry.dtype, str) or entry.dtype not in ITEM_BITS:
            self.add("CORRUPT", f"the dtype {entry.dtype!r}, which is none of safetensors or torch", file, entry.name)
            return False
        if not _are_counts(entry.shape) or len(entry.shape) > _MAX_DIMS:
            problem = f"the shape {entry.shape!r}; expected a tuple of at most {_MAX_DIMS} integers from 0 on"
            self.add("CORRUPT", problem, file, entry.name)
            return False
        if prod(size or 1 for size in entry.shape) * _WIDEST > _MAX_BITS:
            problem = f"the shape {list(entry.shape)}, which overflows: no file holds so many elements"
            self.add("CORRUPT", problem, file, entry.name)
            return False
        if not all(self._extent(entry, extent, file) for extent in extents):
            return False
        return _is_whole(entry) or self._tiles(entry, file)

    def _extent(self, entry: Entry, extent: Any, file: str | None) -> bool:
        """Check that the fields of a chunk's extent are integers, and that the chunk's bytes are inside its file."""
        if not _is_a(extent.file, str) or extent.file not in self.files:
            self.add("CORRUPT", f"bytes in the file {extent.file!r}, which is not among its files", file, entry.name)
            return False
        dims = len(entry.shape)
        if not all(_are_counts(each) and len(each) == dims for each in (extent.start, extent.shape)):
            problem = f"a chunk of {extent.shape!r} at {extent.start!r}; expected {dims} integers each, from 0 on"
            self.add("CORRUPT", problem, extent.file, entry.name)
            return False
        if extent.strides is not None and not (_are_counts(extent.strides) and len(extent.strides) == dims):
            problem = f"the strides {extent.strides!r}; expected {dims} integers from 0 on, or None"
            self.add("CORRUPT", problem, extent.file, entry.name)
            return False
        if type(extent.offset) is not int or extent.offset < 0:
            problem = f"the offset {extent.offset!r}; expected an integer from 0 on"
            self.add("CORRUPT", problem, extent.file, entry.name)
            return False
        try:
            size = _span_bytes(entry.dtype, extent)
        except TransaxleError as error:
            problem = f"a chunk of {list(extent.shape)}: {error.refusals[0].message}"
            self.add(error.code, problem, extent.file, entry.name)
            return False
        if extent.offset + size > self.files[extent.file]:
            problem = f"bytes {extent.offset} to {extent.offset + size} of a file of {self.files[extent.file]}"
            self.add("CORRUPT", problem, extent.file, entry.name)
            return False
        return True

    def _tiles(self, entry: Entry, file: str | None) -> bool:
        faults = Faults()
        boxes = [(extent.start, extent.shape) for extent in entry.extents]
        if check_tiling(entry.name, entry.shape, boxes, file or "", faults):
            return True
        for refusal in faults.error().refusals:
            self.add("CORRUPT", f"chunks that do not cover it exactly once: {refusal.message}", file, entry.name)
        return False

    def raise_problems(self) -> None:
        """Raise the collected problems, if any."""
        if self.faults:
            raise self.faults.error()


def check_container(kind: Format, container: Any, member: str) -> None:
    """Refuse an opened checkpoint of a plugin's format that has values of wrong types, or byte ranges outside its
    files.

    Args:
        kind: the plugin's format.
        container: the value that the format's reader returned.
        member: name of the file or sub-folder that was read.

    Raises:
        Refused: with the code CORRUPT, and the names of the file, the tensor and the package.
        StorageError: with the code IO if a file cannot be read.
    """
    if not _is_a(container, Container):
        checks = _Checks(kind, {})
        checks.add("CORRUPT", f"{container!r}; expected a Container", member)
        raise checks.faults.error()
    checks = _Checks(kind, container.files if _is_a(container.files, Mapping) else {})
    for field, texts in (
        ("files", tuple(checks.files)),
        ("carried", container.carried),
        ("ignored", container.ignored),
    ):
        if not _is_a(texts, tuple) or not all(map(_is_text, texts)):
            checks.add("CORRUPT", f"{field} {texts!r}; expected names of files", member)
            checks.raise_problems()
    if not _is_a(container.entries, Mapping) or not _is_a(container.left, Mapping):
        checks.add("CORRUPT", "entries that are no mapping of names", member)
        checks.raise_problems()
    for file, size in checks.files.items():
        actual_size = container.storage.size(file)
        if type(size) is not int or size != actual_size:
            checks.add("CORRUPT", f"the size {size!r} for a file of {actual_size} bytes", file)
    checks.raise_problems()
    twins = [twin for pair in container.twins for twin in (pair.first, pair.second)]
    listed = [*container.entries.items(), *container.left.items(), *((entry.name, entry) for entry in twins)]
    for name, entry in listed:
        checks.entry(name, entry, member)
    for checksum in container.checksums:
        _check_sum(checks, checksum, member)
    checks.raise_problems()


def _check_sum(checks: _Checks, checksum: Any, member: str) -> None:
    if not _is_a(checksum, Checksum) or not _are_counts((checksum.offset, checksum.size, checksum.crc32)):
        checks.add("CORRUPT", f"{checksum!r}; expected a Checksum of integers from 0 on", member)
    elif checksum.end > checks.files.get(checksum.file, -1):
        checks.add("CORRUPT", f"a checksum of bytes outside of its file: {checksum!r}", checksum.file)


def check_draft(kind: Format, draft: Any, specs: Sequence[Spec]) -> None:
    """Refuse a draft of a plugin's format that does not assign exactly one place to each tensor and to each byte of its
    files.

    Args:
        kind: the plugin's format.
        draft: the value that the format's function `draft` returned.
        specs: the tensors to be written.

    Raises:
        Refused: with the code CORRUPT, OVERLAP or UNSUPPORTED, and the names of the file, the tensor and the package.
    """
    hint = f"This is a bug of {kind.package}. Nothing was written."
    if not _is_a(draft, Draft) or not _is_a(draft.files, Mapping) or not _is_a(draft.entries, Mapping):
        checks = _Checks(kind, {}, hint)
        checks.add("CORRUPT", f"{draft!r}; expected a Draft with mappings of files and entries", None)
        raise checks.faults.error()
    checks = _Checks(kind, draft.files, hint)
    for file, size in draft.files.items():
        _check_file(checks, kind, file, size)
    checks.raise_problems()
    for spec in specs:
        entry = draft.entries.get(spec.name)
        if entry is None:
            checks.add("CORRUPT", "no place for this tensor", None, spec.name)
        elif checks.entry(spec.name, entry, None) and (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            problem = f"{entry.dtype} {list(entry.shape)}; expected {spec.dtype} {list(spec.shape)}"
            checks.add("CORRUPT", problem, None, spec.name)
    names = {spec.name for spec in specs}
    for name in (name for name in draft.entries if name not in names):
        checks.add("CORRUPT", f"a place for {name!r}, which is not to be written", None)
    checks.raise_problems()
    ranges: dict[str, list[_Range]] = {file: [] for file in checks.files}
    for entry in draft.entries.values():
        _add_tensor_ranges(checks, entry, ranges)
    for fragment in draft.fragments:
        _add_fragment(checks, fragment, ranges)
    checks.raise_problems()
    for file, parts in ranges.items():
        _check_filled(checks, file, parts)
    checks.raise_problems()


def _check_file(checks: _Checks, kind: Format, file: Any, size: Any) -> None:
    """Check a file's name and size; a later conversion that replaces the file recognises the file by its name."""
    if not _is_text(file) or type(size) is not int or size < 0:
        checks.add(
            "CORRUPT", f"the size {size!r} for the file {file!r}; expected a name and an integer from 0 on", None
        )
        return
    try:
        split_name(file)
    except TransaxleError as error:
        for refusal in error.refusals:
            checks.add(refusal.code, f"a name that leads out of the folder: {refusal.message}", file)
        return
    matches_pattern = kind.file_pattern.fullmatch(file) or kind.file_pattern.fullmatch(
        file.removeprefix(f"{STATE_FOLDER}/")
    )
    is_single_file = len(checks.files) == 1 and bool(kind.one_file) and "/" not in file and file.endswith(kind.one_file)
    if file == MANIFEST or not (matches_pattern or is_single_file):
        checks.add("CORRUPT", f"a file that its own `files`, {kind.files!r}, does not match", file)


def _add_tensor_ranges(checks: _Checks, entry: Entry, ranges: Mapping[str, list[_Range]]) -> None:
    """Record a tensor's byte ranges, and refuse a tensor unless its chunks, in order, are consecutive sections of its
    row-major bytes.
    """
    for before, extent in _nonempty_chunks(entry):
        if _first_element(entry.shape, extent) != before or not _is_run(entry.shape, extent):
            problem = (
                f"the chunk {list(extent.shape)} at {list(extent.start)}; expected runs of the tensor's bytes, in order"
            )
            checks.add("UNSUPPORTED", problem, extent.file, entry.name)
            return
        size = nbytes(entry.dtype, extent.shape)
        ranges[extent.file].append(_Range(extent.offset, extent.offset + size, entry.name))


def _nonempty_chunks(entry: Entry) -> Iterator[tuple[int, Extent]]:
    """Yield each chunk that is not empty, with the number of elements in all chunks before it."""
    before = 0
    for extent in entry.extents:
        if prod(extent.shape):
            yield before, extent
            before += prod(extent.shape)


def _first_element(shape: tuple[int, ...], extent: Extent) -> int:
    """Return the row-major index, in the tensor, of a chunk's first element."""
    number = 0
    for size, start in zip(shape, extent.start, strict=True):
        number = number * size + start
    return number


def _is_run(shape: tuple[int, ...], extent: Extent) -> bool:
    """Return whether a chunk is contiguous in the row-major tensor: it selects single indices, then one slice, then
    only whole dims.
    """
    sizes = list(zip(extent.shape, shape, strict=True))
    while sizes and sizes[0][0] == 1:
        sizes.pop(0)
    return extent.strides is None and all(size == whole for size, whole in sizes[1:])


def _add_fragment(checks: _Checks, fragment: Any, ranges: Mapping[str, list[_Range]]) -> None:
    if (
        not _is_a(fragment, Fragment)
        or fragment.file not in checks.files
        or type(fragment.offset) is not int
        or not _is_a(fragment.data, bytes)
        or not 0 <= fragment.offset <= checks.files[fragment.file] - len(fragment.data)
    ):
        place = (fragment.file, fragment.offset) if _is_a(fragment, Fragment) else fragment
        checks.add("CORRUPT", f"a Fragment that does not lie inside a file of the draft: {place!r}", None)
    else:
        stop = fragment.offset + len(fragment.data)
        ranges[fragment.file].append(_Range(fragment.offset, stop, None))


def _check_filled(checks: _Checks, file: str, ranges: Sequence[_Range]) -> None:
    """Check that each byte of a file belongs to one tensor or fragment; a byte that belongs to none would be neither
    written nor verified.
    """
    reached, last_owner = 0, "a fragment"
    filled = sorted((part for part in ranges if part.start < part.stop), key=lambda part: part[:2])
    for part in (*filled, _Range(checks.files[file], checks.files[file], None)):
        if part.start < reached:
            problem = f"bytes {part.start} to {min(part.stop, reached)} twice: they are also those of {last_owner}"
            checks.add("OVERLAP", problem, file, part.tensor)
        elif part.start > reached:
            problem = f"bytes {reached} to {part.start} to no tensor and no fragment; padding is a Fragment too"
            checks.add("CORRUPT", problem, file)
        if part.stop > reached:
            reached, last_owner = part.stop, "a fragment" if part.tensor is None else f"the tensor {part.tensor}"


def _span_bytes(dtype: str, extent: Extent) -> int:
    """Return the number of bytes from the beginning of a chunk's first element to the end of its last element.

    Raises:
        Refused: with the code SHAPE_MISMATCH if packed elements do not fill whole bytes.
    """
    if extent.strides is None or not prod(extent.shape):
        return nbytes(dtype, extent.shape)
    last = sum((size - 1) * stride for size, stride in zip(extent.shape, extent.strides, strict=True))
    return nbytes(dtype, (last + 1,))


def _is_whole(entry: Entry) -> bool:
    return len(entry.extents) == 1 and entry.extents[0].shape == entry.shape and not any(entry.extents[0].start)


def _are_counts(values: Any) -> bool:
    """Return whether a value is a tuple of non-negative `int`s; bools and floats do not count as `int`."""
    return _is_a(values, tuple) and all(type(value) is int and value >= 0 for value in values)


def _is_a(value: Any, kind: type) -> bool:
    """Work like `isinstance`, but without narrowing a declared type for the type checker."""
    return isinstance(value, kind)


def _is_text(name: Any) -> bool:
    """Return whether a value is a string that can be encoded in UTF-8; a string with a lone surrogate, as JSON can
    contain, cannot.
    """
    return type(name) is str and not any("\ud800" <= character <= "\udfff" for character in name)
