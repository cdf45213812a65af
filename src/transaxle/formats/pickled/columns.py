"""Columns: what many records of a pickle built, as one template, and row by row their numbers, texts and references.

The objects themselves are made only when somebody asks for them: a reader of the run, or a later step of the pickle.
Such a step may change what it got, and the run would not know: so it is told afterwards whether one did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from transaxle.formats.pickled.descriptors import DType, Global, Nothing, Object
from transaxle.formats.pickled.fault import TakenApart

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONSTANT = frozenset({str, bool, type(None), Global, DType, Nothing})
"""Types of what stands in a template for itself."""
Row = Sequence[Any]
"""The values of one record: numbers, texts, and what is referred to."""


class Column(msgspec.Struct, frozen=True):
    """In a template, the number of a column of texts or references."""

    number: int


class Run(msgspec.Struct, frozen=True, eq=False):
    """What several records built."""

    templates: tuple[Any, ...]
    """What each of them built, with the numbers of columns for its integers, and `Column` for texts that differ and
    for whatever else the pickle refers to.
    """
    columns: NDArray[np.int64]
    """The integers and references, one row a record; none is negative."""
    texts: Mapping[int, Sequence[str] | NDArray[np.uint8]]
    """Column -> its texts; or their ASCII, one row a record."""
    references: Sequence[int] = ()
    """Columns of references that are none of `texts`."""
    referred: Mapping[int, Any] = msgspec.field(default_factory=dict)
    """What they refer to."""

    def records(self) -> Iterator[tuple[Any, ...]]:
        """Yield what each record built."""
        values = {column: self.values(column) for column in (*self.texts, *self.references)}
        for number, row in enumerate(self.columns.tolist()):
            for column, found in values.items():
                row[column] = found[number]
            made: dict[int, Any] = {}
            yield tuple([filled(template, row, made) for template in self.templates])

    def rows(self, columns: Sequence[int]) -> list[tuple[int, ...]]:
        """Return some columns of integers, row by row."""
        if not columns:
            return [()] * len(self.columns)
        chosen = [self.columns[:, column] for column in columns]
        if len(self.columns) and all((column == column[0]).all() for column in chosen):  # as sizes usually are
            return [tuple([int(column[0]) for column in chosen])] * len(self.columns)
        return list(zip(*(column.tolist() for column in chosen), strict=True))

    def values(self, column: int) -> list[Any]:
        """Return a column of texts or references."""
        import numpy as np

        texts = self.texts.get(column)
        if texts is None:
            return [self.referred[reference] for reference in self.columns[:, column].tolist()]
        if not isinstance(texts, np.ndarray):
            return list(texts)
        width = texts.shape[1]
        joined = texts.tobytes().decode("ascii")
        return [joined[at : at + width] for at in range(0, len(joined), width)] if width else [""] * len(texts)

    def value(self, column: int, number: int) -> Any:
        """Return the text of one record, or what it refers to."""
        import numpy as np

        texts = self.texts.get(column)
        if texts is None:
            return self.referred[int(self.columns[number, column])]
        text = texts[number]
        return text.tobytes().decode("ascii") if isinstance(text, np.ndarray) else text

    def is_one(self, template: Any) -> bool:
        """Tell whether a template gives the same in all records, with no text that differs."""
        if type(template) is int:
            return bool((self.columns[:, template] == self.columns[0, template]).all())
        if type(template) is Column:
            return template.number not in self.texts and self.is_one(template.number)
        if type(template) is dict:
            return all(map(self.is_one, template.values()))
        if type(template) is Object:
            return self.is_one(template.state)
        return all(map(self.is_one, template)) if type(template) in (tuple, list) else True

    def row(self, number: int) -> Row:
        """Return the values of one record."""
        row: list[Any] = self.columns[number].tolist()
        for column in (*self.texts, *self.references):
            row[column] = self.value(column, number)
        return row


class Remembered:
    """What the records of a run put into the memo.

    Args:
        run: the run.
        kept: what each record puts there, in order; parts of the run's templates, and values of their own.

    Raises:
        TakenApart: by indexing, where what is asked for is an object with references.
    """

    def __init__(self, run: Run, kept: Sequence[Any]) -> None:
        self._run = run
        self._kept = kept
        self._made: dict[int, tuple[Any, ...]] = {}

    @property
    def refers(self) -> bool:
        """Whether the records refer to what was remembered before."""
        return bool(self._run.references)

    def __len__(self) -> int:
        return len(self._run.columns) * len(self._kept)

    def is_text(self, index: int) -> bool:
        """Tell whether a text was remembered there."""
        template = self._kept[index % len(self._kept)]
        return type(template) is Column and template.number in self._run.texts

    def __getitem__(self, index: int) -> Any:
        record, which = divmod(index, len(self._kept))
        template = self._kept[which]
        if type(template) is int:
            return int(self._run.columns[record, template])
        if type(template) is Column:
            return self._run.value(template.number, record)
        if type(template) is tuple and _holds_nothing_mutable(template):
            return filled(template, self._run.columns[record].tolist(), {})
        if self.refers:  # that may be of a run that refers to others, and so on
            raise TakenApart
        if record not in self._made:
            row, made = self._run.row(record), dict[int, Any]()
            self._made[record] = tuple([filled(each, row, made) for each in self._kept])
        return self._made[record][which]

    def is_changed(self) -> bool:
        """Tell whether something that was made here has been changed since."""
        return any(
            not _same(template, value, row)
            for record, values in self._made.items()
            for row in (self._run.row(record),)
            for template, value in zip(self._kept, values, strict=True)
        )


def is_simple(value: object) -> bool:
    """Tell whether a value may be a template."""
    if type(value) is tuple or type(value) is list:
        return all(map(is_simple, value))
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(is_simple, value.values()))
    if type(value) is Object:
        return not (value.args or value.kwargs or value.items or value.pairs) and is_simple(value.state)
    return type(value) in (int, Column) or type(value) in CONSTANT


def filled(template: Any, row: Row, made: dict[int, Any]) -> Any:
    """Return a template with the values of one record.

    Args:
        template: it.
        row: the values.
        made: of this record, so far: identity of a template -> what was made of it; it grows.
    """
    if type(template) is int:
        return row[template]
    if type(template) is Column:
        return row[template.number]
    value = made.get(id(template))
    if value is not None:
        return value
    if type(template) is tuple:
        value = tuple([filled(item, row, made) for item in template])
    elif type(template) is list:
        value = [filled(item, row, made) for item in template]
    elif type(template) is dict:
        value = {key: filled(item, row, made) for key, item in template.items()}
    elif type(template) is Object:
        value = Object(template.cls, state=filled(template.state, row, made), new=template.new)
    else:
        return template
    made[id(template)] = value
    return value


def _holds_nothing_mutable(template: tuple[Any, ...]) -> bool:
    return all(type(each) is int for each in template)


def _same(template: Any, value: Any, row: Row) -> bool:
    """Tell whether a value is still what was made of a template."""
    if type(template) is int:
        return value is row[template] or (type(value) is int and value == row[template])
    if type(template) is Column:
        return value is row[template.number] or (type(value) is str and value == row[template.number])
    if type(value) is not type(template):
        return False
    if type(template) is tuple or type(template) is list:
        return len(value) == len(template) and all(_same(t, v, row) for t, v in zip(template, value, strict=True))
    if type(template) is dict:
        return value.keys() == template.keys() and all(_same(t, value[key], row) for key, t in template.items())
    if type(template) is Object:
        is_bare = not (value.args or value.kwargs or value.items or value.pairs)
        return is_bare and value.cls == template.cls and _same(template.state, value.state, row)
    return bool(value == template)
