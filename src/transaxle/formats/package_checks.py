"""Checks of what the formats of installed packages return: a catalog that is opened, a draft that is to be written.

Everything after a reader or a draft relies on the catalog: dims that are numbers, bytes that lie inside their files,
chunks that tile their tensor. The formats that ship check this while they parse, and their tests hold them to it. For a
package nobody vouches, and its files come from anyone, so its catalogs are checked here, once each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from transaxle.errors import Code, Faults, TransaxleError
from transaxle.formats.catalog import ITEM_BITS, Checksum, Container, Draft, Entry, Extent, Fragment, Spec, nbytes
from transaxle.formats.dcp.chunk_tiling import check_tiling
from transaxle.formats.registry import MANIFEST, STATE_FOLDER, Format
from transaxle.formats.storage.storage import checked_parts

_MOST_DIMS = 64
"""Most dims that numpy supports."""
_MOST_BITS = (2**63 - 1) * 8
_WIDEST = max(ITEM_BITS.values())


class _Range(NamedTuple):
    """Bytes of a file that a draft gives to one tensor or fragment."""

    start: int
    stop: int
    tensor: str | None
    """None for a fragment."""


class _Checks:
    """What a format's package returned, and the problems found in it.

    Args:
        kind: the format; each problem names its package.
        files: size of each file.
        hint: what the user can do; empty: for a file that was read.
    """

    def __init__(self, kind: Format, files: Mapping[str, int], hint: str = "") -> None:
        self.faults = Faults()
        self.files = files
        self._who = f"format {kind.name} of the package {kind.package} gave "
        self._hint = hint or f"The file is damaged, or {kind.package} has a bug: its reader must refuse such a file."

    def add(self, code: Code, what: str, file: str | None, tensor: str | None = None) -> None:
        """Add a problem: `what` the package gave."""
        self.faults.add(code, self._who + what, file, tensor, self._hint)

    def entry(self, name: Any, entry: Any, file: str | None) -> bool:
        """Check one tensor and the places of its bytes.

        Args:
            name: under which it is listed.
            entry: the tensor.
            file: named where no extent of it can be.
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
        if not _are_counts(entry.shape) or len(entry.shape) > _MOST_DIMS:
            what = f"the shape {entry.shape!r}; expected a tuple of at most {_MOST_DIMS} integers from 0 on"
            self.add("CORRUPT", what, file, entry.name)
            return False
        if prod(size or 1 for size in entry.shape) * _WIDEST > _MOST_BITS:
            what = f"the shape {list(entry.shape)}, which overflows: no file holds so many elements"
            self.add("CORRUPT", what, file, entry.name)
            return False
        if not all(self._extent(entry, extent, file) for extent in extents):
            return False
        return _is_whole(entry) or self._tiles(entry, file)

    def _extent(self, entry: Entry, extent: Any, file: str | None) -> bool:
        """Check that a chunk has numbers for numbers, and that its bytes lie inside its file."""
        if not _is_a(extent.file, str) or extent.file not in self.files:
            self.add("CORRUPT", f"bytes in the file {extent.file!r}, which is not among its files", file, entry.name)
            return False
        dims = len(entry.shape)
        if not all(_are_counts(each) and len(each) == dims for each in (extent.start, extent.shape)):
            what = f"a chunk of {extent.shape!r} at {extent.start!r}; expected {dims} integers each, from 0 on"
            self.add("CORRUPT", what, extent.file, entry.name)
            return False
        if extent.strides is not None and not (_are_counts(extent.strides) and len(extent.strides) == dims):
            what = f"the strides {extent.strides!r}; expected {dims} integers from 0 on, or None"
            self.add("CORRUPT", what, extent.file, entry.name)
            return False
        if type(extent.offset) is not int or extent.offset < 0:
            what = f"the offset {extent.offset!r}; expected an integer from 0 on"
            self.add("CORRUPT", what, extent.file, entry.name)
            return False
        try:
            size = _reach(entry.dtype, extent)
        except TransaxleError as error:
            what = f"a chunk of {list(extent.shape)}: {error.refusals[0].message}"
            self.add(error.code, what, extent.file, entry.name)
            return False
        if extent.offset + size > self.files[extent.file]:
            what = f"bytes {extent.offset} to {extent.offset + size} of a file of {self.files[extent.file]}"
            self.add("CORRUPT", what, extent.file, entry.name)
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

    def done(self) -> None:
        """Raise what was found."""
        if self.faults:
            raise self.faults.error()


def check_container(kind: Format, container: Any, member: str) -> None:
    """Refuse a catalog of an installed format that is not true, or not of the types that it must have.

    Args:
        kind: the format.
        container: what its reader returned.
        member: the file that was to be read.

    Raises:
        Refused: CORRUPT, with file, tensor and package.
        StorageError: IO.
    """
    if not _is_a(container, Container):
        checks = _Checks(kind, {})
        checks.add("CORRUPT", f"{container!r}; expected a Container", member)
        raise checks.faults.error()
    checks = _Checks(kind, container.files if _is_a(container.files, Mapping) else {})
    for what, texts in (("files", tuple(checks.files)), ("carried", container.carried), ("ignored", container.ignored)):
        if not _is_a(texts, tuple) or not all(map(_is_text, texts)):
            checks.add("CORRUPT", f"{what} {texts!r}; expected names of files", member)
            checks.done()
    if not _is_a(container.entries, Mapping) or not _is_a(container.left, Mapping):
        checks.add("CORRUPT", "entries that are no mapping of names", member)
        checks.done()
    for file, size in checks.files.items():
        present = container.storage.size(file)
        if type(size) is not int or size != present:
            checks.add("CORRUPT", f"the size {size!r} for a file of {present} bytes", file)
    checks.done()
    twins = [twin for pair in container.twins for twin in (pair.first, pair.second)]
    listed = [*container.entries.items(), *container.left.items(), *((entry.name, entry) for entry in twins)]
    for name, entry in listed:
        checks.entry(name, entry, member)
    for checksum in container.checksums:
        _check_sum(checks, checksum, member)
    checks.done()


def _check_sum(checks: _Checks, checksum: Any, member: str) -> None:
    if not _is_a(checksum, Checksum) or not _are_counts((checksum.offset, checksum.size, checksum.crc32)):
        checks.add("CORRUPT", f"{checksum!r}; expected a Checksum of integers from 0 on", member)
    elif checksum.end > checks.files.get(checksum.file, -1):
        checks.add("CORRUPT", f"a checksum of bytes outside of its file: {checksum!r}", checksum.file)


def check_draft(kind: Format, draft: Any, specs: Sequence[Spec]) -> None:
    """Refuse a draft of an installed format whose places are not those of the tensors that are to be written.

    Args:
        kind: the format.
        draft: what it returned.
        specs: the tensors.

    Raises:
        Refused: CORRUPT, OVERLAP or UNSUPPORTED, with file, tensor and package.
    """
    hint = f"This is a bug of {kind.package}. Nothing was written."
    if not _is_a(draft, Draft) or not _is_a(draft.files, Mapping) or not _is_a(draft.entries, Mapping):
        checks = _Checks(kind, {}, hint)
        checks.add("CORRUPT", f"{draft!r}; expected a Draft with mappings of files and entries", None)
        raise checks.faults.error()
    checks = _Checks(kind, draft.files, hint)
    for file, size in draft.files.items():
        _check_file(checks, kind, file, size)
    checks.done()
    for spec in specs:
        entry = draft.entries.get(spec.name)
        if entry is None:
            checks.add("CORRUPT", "no place for this tensor", None, spec.name)
        elif checks.entry(spec.name, entry, None) and (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            what = f"{entry.dtype} {list(entry.shape)}; expected {spec.dtype} {list(spec.shape)}"
            checks.add("CORRUPT", what, None, spec.name)
    names = {spec.name for spec in specs}
    for name in (name for name in draft.entries if name not in names):
        checks.add("CORRUPT", f"a place for {name!r}, which is not to be written", None)
    checks.done()
    ranges: dict[str, list[_Range]] = {file: [] for file in checks.files}
    for entry in draft.entries.values():
        _add_runs(checks, entry, ranges)
    for fragment in draft.fragments:
        _add_fragment(checks, fragment, ranges)
    checks.done()
    for file, parts in ranges.items():
        _check_filled(checks, file, parts)
    checks.done()


def _check_file(checks: _Checks, kind: Format, file: Any, size: Any) -> None:
    """Check a file's name and size: what is written must be replaced, and left behind, by its name later."""
    if not _is_text(file) or type(size) is not int or size < 0:
        checks.add(
            "CORRUPT", f"the size {size!r} for the file {file!r}; expected a name and an integer from 0 on", None
        )
        return
    try:
        checked_parts(file)
    except TransaxleError as error:
        for refusal in error.refusals:
            checks.add(refusal.code, f"a name that leads out of the folder: {refusal.message}", file)
        return
    own = kind.file_pattern.fullmatch(file) or kind.file_pattern.fullmatch(file.removeprefix(f"{STATE_FOLDER}/"))
    only = len(checks.files) == 1 and bool(kind.one_file) and "/" not in file and file.endswith(kind.one_file)
    if file == MANIFEST or not (own or only):
        checks.add("CORRUPT", f"a file that its own `files`, {kind.files!r}, does not match", file)


def _add_runs(checks: _Checks, entry: Entry, ranges: Mapping[str, list[_Range]]) -> None:
    """Note a tensor's bytes; its chunks must be runs of its row-major bytes, in order: so they are written."""
    for before, extent in _with_elements_before(entry):
        if _first_element(entry.shape, extent) != before or not _is_run(entry.shape, extent):
            what = (
                f"the chunk {list(extent.shape)} at {list(extent.start)}; expected runs of the tensor's bytes, in order"
            )
            checks.add("UNSUPPORTED", what, extent.file, entry.name)
            return
        size = nbytes(entry.dtype, extent.shape)
        ranges[extent.file].append(_Range(extent.offset, extent.offset + size, entry.name))


def _with_elements_before(entry: Entry) -> Iterator[tuple[int, Extent]]:
    """Yield the chunks that hold elements, each with the number of elements in those before."""
    before = 0
    for extent in entry.extents:
        if prod(extent.shape):
            yield before, extent
            before += prod(extent.shape)


def _first_element(shape: tuple[int, ...], extent: Extent) -> int:
    """Return the row-major number of a chunk's first element."""
    number = 0
    for size, start in zip(shape, extent.start, strict=True):
        number = number * size + start
    return number


def _is_run(shape: tuple[int, ...], extent: Extent) -> bool:
    """Tell whether a chunk is one run of the tensor's row-major bytes: one index, a span, then whole dims."""
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
    """Check that each byte of a file has one owner: a gap would be neither written nor verified."""
    reached, last = 0, "a fragment"
    filled = sorted((part for part in ranges if part.start < part.stop), key=lambda part: part[:2])
    for part in (*filled, _Range(checks.files[file], checks.files[file], None)):
        if part.start < reached:
            what = f"bytes {part.start} to {min(part.stop, reached)} twice: they are also those of {last}"
            checks.add("OVERLAP", what, file, part.tensor)
        elif part.start > reached:
            what = f"bytes {reached} to {part.start} to no tensor and no fragment; padding is a Fragment too"
            checks.add("CORRUPT", what, file)
        if part.stop > reached:
            reached, last = part.stop, "a fragment" if part.tensor is None else f"the tensor {part.tensor}"


def _reach(dtype: str, extent: Extent) -> int:
    """Return the bytes from a chunk's first element to the end of its last.

    Raises:
        Refused: SHAPE_MISMATCH where packed elements do not fill whole bytes.
    """
    if extent.strides is None or not prod(extent.shape):
        return nbytes(dtype, extent.shape)
    last = sum((size - 1) * stride for size, stride in zip(extent.shape, extent.strides, strict=True))
    return nbytes(dtype, (last + 1,))


def _is_whole(entry: Entry) -> bool:
    return len(entry.extents) == 1 and entry.extents[0].shape == entry.shape and not any(entry.extents[0].start)


def _are_counts(values: Any) -> bool:
    """Tell whether something is a tuple of integers from 0 on; True and 4.0 are none."""
    return _is_a(values, tuple) and all(type(value) is int and value >= 0 for value in values)


def _is_a(value: Any, kind: type) -> bool:
    """Tell whether a value is of the type that it is declared to have, which nothing but this check vouches for."""
    return isinstance(value, kind)


def _is_text(name: Any) -> bool:
    """Tell whether something is text that can be written: half a surrogate pair, which JSON can spell, cannot."""
    return type(name) is str and not any("\ud800" <= character <= "\udfff" for character in name)
