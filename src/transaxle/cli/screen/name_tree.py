"""The names of a checkpoint as a tree, with numbers folded, and how many bytes there are in each branch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from transaxle.axes.notation.name import natural
from transaxle.cli.screen.screen import printable
from transaxle.engine.wording import fold, percent, plural, size

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from transaxle.engine.checkpoint.stored_tensor import StoredTensor

_MOST = 20
"""Branches of one branch that are printed where not everything is asked for."""
_WIDE = 4096
"""Columns where there is no terminal: lines may have any length."""
_DEEPEST = 12
"""Dots of a name at which branches part."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BAR = 10
"""Columns of a bar as long as all bytes."""


@dataclass
class Branch:
    """Names that begin alike."""

    name: str
    """Their common segments, after those of the branch that it grows from; numbers are folded."""
    about: str = ""
    """Type and shape of the tensors that end here; empty where none does."""
    tensors: int = 0
    """How many there are."""
    nbytes: int = 0
    """Their bytes."""
    branches: dict[str, Branch] = field(default_factory=dict)
    """What grows from it, by the next segment."""


def name_tree(tensors: Mapping[str, StoredTensor], title: str) -> Branch:
    """Return the names of tensors as a tree.

    Args:
        tensors: by name.
        title: what the root is called.
    """
    names = sorted(tensors, key=natural)
    keys = [(tensors[name].dtype, tensors[name].shape) for name in names]
    root = Branch(title)
    for row in fold(names, keys):
        nbytes = sum(tensors[name].nbytes for name in row.names)
        path = [root]
        for segment in row.name.split(".", _DEEPEST):
            path.append(path[-1].branches.setdefault(segment, Branch(segment)))
        for branch in path:
            branch.tensors += row.count
            branch.nbytes += nbytes
        assert isinstance(row.key, tuple)
        dtype, shape = row.key
        end = path[-1]
        end.about = " and ".join(filter(None, (end.about, f"{dtype} {list(shape)}")))
    return root


def print_tree(root: Branch, stream: TextIO, *, everything: bool) -> None:
    """Print a tree, the largest branches first.

    Args:
        root: of the tree.
        stream: where to.
        everything: print all branches.
    """
    from rich.console import Console
    from rich.tree import Tree

    grown = Tree(_label(root, root.nbytes))
    _grow(grown, root, root.nbytes, None if everything else _MOST)
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    console.print(grown, width=None if console.is_terminal else _WIDE)


def _grow(tree: Tree, branch: Branch, total: int, most: int | None) -> None:
    branches = sorted(map(_shortened, branch.branches.values()), key=lambda each: -each.nbytes)
    for each in branches[:most]:
        _grow(tree.add(_label(each, total)), each, total, most)
    if most is not None and len(branches) > most:
        tree.add(f"… and {len(branches) - most:,} more, {size(sum(each.nbytes for each in branches[most:]))} (--all)")


def _shortened(branch: Branch) -> Branch:
    """Return a branch together with the only one that grows from it, and so on."""
    while len(branch.branches) == 1 and not branch.about:
        (only,) = branch.branches.values()
        branch = Branch(f"{branch.name}.{only.name}", only.about, only.tensors, only.nbytes, only.branches)
    return branch


def _label(branch: Branch, total: int) -> Text:
    from rich.text import Text

    return Text("  ".join(filter(None, _words(branch, total))))


def _words(branch: Branch, total: int) -> Iterator[str]:
    eighths = 8 * _BAR * branch.nbytes // total if total else 0
    yield printable(branch.name)
    yield f"{size(branch.nbytes)}, {percent(branch.nbytes, total)}"
    yield ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).strip()
    yield branch.about
    yield plural(branch.tensors, "tensor") if branch.tensors > 1 else ""
