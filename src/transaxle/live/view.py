"""The source as the model names it: the model's own names decide the dialect, never its shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transaxle.axes.bind import join_slot, split_slot
from transaxle.axes.grouped import FAMILY
from transaxle.engine.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.grouped import grouped
from transaxle.engine.recognise import IDENTITY, recognise
from transaxle.errors import Code, TransaxleError, refuse

_UNREAD: Code = "UNKNOWN_FAMILY"
_SHOWN = 3
"""Names of each side that an error shows."""


@dataclass(frozen=True)
class View:
    """A checkpoint, re-expressed in the model's dialect."""

    checkpoint: Checkpoint
    """The checkpoint in that dialect."""
    dialect: str
    """Its label; `identity` where both sides have the same names and no table is needed."""
    prefix: str
    """What the model's names have before those of the dialect."""

    def named(self, name: str) -> str:
        """Return the model's name of a tensor of the checkpoint."""
        parameter, slot = split_slot(name)
        return join_slot(self.prefix + parameter, slot)

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the checkpoint's tensors by the model's names."""
        return {self.named(name): self.checkpoint[name] for name in self.checkpoint}


def view(checkpoint: Checkpoint, names: Iterable[str], family: str | None, dialect: str | None) -> View:
    """Re-express a checkpoint in the dialect of a model's names.

    Args:
        checkpoint: the source, under its own names.
        names: the model's, on all ranks together.
        family: what the user says the model is.
        dialect: what the user says its names are.

    Raises:
        UsageError: UNKNOWN_FAMILY, AMBIGUOUS where no table reads the names and the source has others; with the
            closest dialect.
        Refused: what stands against the translation.
    """
    wanted = [name for name in names if split_slot(name)[1] == ""]
    known = dialect is None and family is None and all(name in checkpoint for name in wanted)
    if known or dialect == IDENTITY:
        return View(checkpoint, IDENTITY, "")
    if dialect is None and family is None:
        packed = grouped(checkpoint, wanted)
        if packed is not None:
            return View(packed, FAMILY, "")
    settings = checkpoint.settings
    families = {checkpoint.family: settings.families[checkpoint.family]} if checkpoint.family else settings.families
    said = family is not None or dialect is not None
    try:
        found = recognise(wanted, checkpoint.config, families, family or checkpoint.family, dialect)
    except TransaxleError as error:
        if not said and error.code == _UNREAD and any(name in checkpoint for name in wanted):
            return View(checkpoint, IDENTITY, "")  # both sides have the same names: which of them differ is to be told
        if checkpoint.family is None or family is not None:
            raise _told(error, wanted, checkpoint, said) from None
        try:
            found = recognise(wanted, {}, settings.families, None, dialect)
        except TransaxleError as again:
            raise _told(again, wanted, checkpoint, said) from None
    label = found.dialect.label
    try:
        return View(checkpoint.as_dialect(label), label, found.prefix)
    except TransaxleError as error:
        raise _told(error, wanted, checkpoint, said) from None


def _told(error: TransaxleError, wanted: Sequence[str], checkpoint: Checkpoint, said: bool) -> TransaxleError:
    """Return the error that tells of both sides, where no table reads the names of one of them."""
    if said or error.code != _UNREAD or any(name in checkpoint for name in wanted):
        return error
    mine, theirs = (", ".join(names[:_SHOWN]) or "(none)" for names in (wanted, list(checkpoint)))
    unread = error.refusals[0].message
    message = f"model and source have no name in common\nmodel: {mine}\nsource: {theirs}\n{unread}"
    hint = "is it the checkpoint of another model? If not, give family=, or a table of its names, tx.open(…, rules=…)"
    return refuse(_UNREAD, message, file=checkpoint.path, hint=hint)
