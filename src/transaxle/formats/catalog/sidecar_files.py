"""The other files of a checkpoint's folder: those that travel with the weights, and those that are left alone.

A model is more than its tensors: its config, its tokenizer and its chat template go where it goes. A second set of
weights beside it (another format, another precision) does not, and neither does what must not be followed. Both lists
are shown to the user: nothing is left behind in silence.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from transaxle.errors import gathered
from transaxle.formats.format import INDEX
from transaxle.formats.registry import holds_tensors
from transaxle.formats.storage.storage import Storage

MANIFEST = "transaxle.json"
"""Our own description of a checkpoint that we wrote; belongs to the engine, and is neither carried nor ignored."""
STATE_FOLDER = "optimizer"
"""Folder for the files of the optimizer's state: frameworks that load a model look at the files beside its config."""
_CONFIG = "config.json"
_MODEL_FILES = (
    _CONFIG, "generation_config.json", "tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab.",
    "merges.txt", "chat_template", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""How the names of a model's own small files begin. Beside a single tensor file, which may lie anywhere, only these
belong to it."""


@dataclass(frozen=True, slots=True)
class Company:
    """The files of a folder that are not part of its checkpoint's tensors."""

    carried: tuple[str, ...]
    """Travel with the model."""
    ignored: tuple[str, ...]
    """Left alone: other tensor files, hidden files, sub-folders (with a `/`), links and special files."""


def company(storage: Storage, files: Collection[str]) -> Company:
    """Sort the files around a checkpoint that consists of `files`.

    Raises:
        Refused: PATH_ESCAPE or UNSUPPORTED if the folder's config.json is there but must not be read.
        StorageError: IO.
    """
    listing = storage.listing()
    if _CONFIG in listing.special:
        raise gathered([listing.special[_CONFIG]])
    around = [name for name in listing.names if name not in files and name != MANIFEST]
    if storage.single:
        return Company(tuple(name for name in around if name.startswith(_MODEL_FILES)), ())
    carried = tuple(name for name in around if not _left_alone(name))
    used = {file.partition("/")[0] for file in files if "/" in file}
    folders = tuple(f"{name}/" for name in listing.folders if name not in used)
    left = [*(name for name in around if _left_alone(name)), *listing.special, *folders]
    if STATE_FOLDER in used:
        inside = (f"{STATE_FOLDER}/{name}" for name in storage.listing(STATE_FOLDER).everything())
        left += [name for name in inside if name not in files]
    return Company(carried, tuple(sorted(left)))


def _left_alone(name: str) -> bool:
    return name.startswith(".") or name.lower().endswith(INDEX) or holds_tensors(name)
