"""Sidecar files: the other files of a checkpoint's folder, which are copied with the weights or left alone.

A model is more than its tensors: its config, its tokenizer and its chat template go where it goes. A second set of
weights (another format, another precision) does not, and neither does a link out of the folder. Both lists are shown to
the user: nothing is left behind in silence.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from transaxle.errors import gathered
from transaxle.formats.format import INDEX
from transaxle.formats.registry import holds_tensors
from transaxle.formats.storage.storage import Storage

MANIFEST = "transaxle.json"
"""Our own description of a checkpoint that we wrote; the engine handles it, so it is neither carried nor ignored."""
SCRATCH = ".transaxle"
"""Folder for files outside the checkpoint while it is written; its presence means that the work is not finished."""
STATE_FOLDER = "optimizer"
"""Folder for the optimizer's state: a framework that loads a model reads the files beside its config."""
_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
"""peft's description of an adapter."""
_MODEL_FILES = (
    _CONFIG, "generation_config.json", "tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab.",
    "merges.txt", "chat_template", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Prefixes of a model's own small files. A single tensor file may be anywhere, and a run's folder holds its logs as
well, so only these count as their sidecars."""


_DOCUMENTS = (".md", "license", "license.txt", "notice", "notice.txt")
"""Ends of the names of files that only people read."""


def is_for_people(name: str) -> bool:
    """Tell whether no program reads a file."""
    return name.lower().endswith(_DOCUMENTS)


def is_of_model(name: str) -> bool:
    """Tell whether a small file is a model's own: its config, its tokenizer."""
    return name.startswith(_MODEL_FILES)


def tells_of_use(name: str) -> bool:
    """Tell whether a file only says how to use a model: a tokenizer, a template, a text. No tensor depends on it."""
    return name != _CONFIG and (is_for_people(name) or is_of_model(name))


class SidecarFiles(msgspec.Struct, frozen=True):
    """The files of a folder that hold none of its checkpoint's tensors."""

    carried: tuple[str, ...]
    """Files that are copied with the model."""
    ignored: tuple[str, ...]
    """Left alone: other tensor files, hidden files, sub-folders (with a `/`), links and special files."""


def sort_sidecars(storage: Storage, files: Collection[str], *, of_run: bool = False) -> SidecarFiles:
    """Sort the files around a checkpoint.

    Args:
        storage: where they are.
        files: those that it consists of.
        of_run: the folder is a run's, with files that are no part of the model.

    Raises:
        Refused: PATH_ESCAPE or UNSUPPORTED if the folder's config.json exists but must not be read.
        StorageError: IO.
    """
    listing = storage.listing()
    if _CONFIG in listing.special:
        raise gathered([listing.special[_CONFIG]])
    others = [name for name in listing.names if name not in files and name != MANIFEST]
    if storage.single:
        return SidecarFiles(tuple(filter(is_of_model, others)), ())
    own = tuple(name for name in others if not _left_alone(name))
    carried = tuple(filter(is_of_model, own)) if of_run else own
    used = {file.partition("/")[0] for file in files if "/" in file}
    folders = tuple(f"{name}/" for name in listing.folders if name not in used)
    ignored = [*(name for name in others if name not in carried), *listing.special, *folders]
    if STATE_FOLDER in used:
        inside = (f"{STATE_FOLDER}/{name}" for name in storage.listing(STATE_FOLDER).everything())
        ignored += [name for name in inside if name not in files]
    return SidecarFiles(carried, tuple(sorted(ignored)))


def _left_alone(name: str) -> bool:
    return name.startswith(".") or name.lower().endswith(INDEX) or holds_tensors(name)
