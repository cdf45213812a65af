"""How a checkpoint was opened, so that another process can open it again: what pickles of it hold.

No values and no catalog are in a pickle: whoever unpickles it reads the files, and refuses if they are others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from transaxle.errors import refuse
from transaxle.formats.storage.storage import Storage

_AGAIN = "Open the checkpoint anew, and pickle it then."


class Reopening(msgspec.Struct, frozen=True):
    """How a checkpoint, or a view of one, comes about."""

    path: str
    """Where it is; of a path on this machine, from the root."""
    options: Mapping[str, Any]
    """Keyword arguments of `open`, as plain data."""
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Methods that led from there to the view, with their arguments."""
    versions: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Files and their versions when it was pickled."""
    rules: str | None = None
    """Text of the table of the user's own, when it was opened."""

    def after(self, method: str, *arguments: Any) -> Reopening:
        """Return how a view of it comes about."""
        return replace(self, steps=(*self.steps, (method, arguments)))

    def pickled(self, storage: Storage, files: Mapping[str, int]) -> Reopening:
        """Return it with the versions of the files.

        Raises:
            Refused: CORRUPT if they were changed since the checkpoint was opened.
            ValueError: it is closed.
        """
        storage.recheck()
        return replace(self, versions={name: storage.version(name) for name in files})

    def check(self, storage: Storage) -> None:
        """Prove that the files are those that were pickled.

        Raises:
            Refused: CORRUPT, with every file that is another.
        """
        changed = [name for name, version in self.versions.items() if storage.version(name) != version]
        if changed or (self.rules is not None and self.rules != table(self.options["rules"])):
            what = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            message = f"changed since the checkpoint was pickled: {what or self.options['rules']}"
            raise refuse("CORRUPT", message, file=self.path, hint=_AGAIN)


def table(path: str) -> str:
    """Return the text of a rules file."""
    return Path(path).read_text("utf-8")


def refuse_to_pickle(what: str) -> TypeError:
    """Build the error for a view of which nobody knows how it came about."""
    return TypeError(f"cannot pickle {what}: pickle the checkpoint that open() returned, and make the view again")


def reopened(opener: Callable[..., Any], how: Reopening) -> Any:
    """Open a checkpoint again.

    Raises:
        Refused: CORRUPT if its files were changed since it was pickled.
        TransaxleError: what opening it raises.
    """
    found = opener(how.path, **how.options)
    try:
        how.check(found.container.storage)
        for method, arguments in how.steps:
            found = getattr(found, method)(*arguments)
    except BaseException:
        found.close()
        raise
    return found
