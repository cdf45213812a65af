"""Opening safetensors: one file, or the shards that an index names. The index is believed only where the shards agree.

transformers takes the index at its word: a path in it is followed, a tensor that moved to another shard is looked for
in the wrong one, a tensor that is missing stays at its random initial value. Here the headers say what there is, and
an index that says anything else is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from transaxle.errors import Faults
from transaxle.formats.builtin_formats import SAFETENSORS
from transaxle.formats.catalog.catalog import Container
from transaxle.formats.catalog.sidecar_files import sort_sidecars
from transaxle.formats.safetensors.header import Header, read_header
from transaxle.formats.safetensors.torch_parts import NOTE, NOTES, starts
from transaxle.formats.shards import read_files
from transaxle.formats.storage.storage import Storage
from transaxle.formats.training_state.run_facts import KEPT_RUN, facts_in
from transaxle.formats.training_state.state_groups import GROUPS, KEPT, decode


def open_safetensors(storage: Storage, path: str, member: str) -> Container:
    """Open one safetensors file, or all shards of an index, with the optimizer's state in its folder beside them.

    The sizes in the index's metadata are not compared with anything: many published ones are wrong, because tied
    weights were counted twice. They are left out of the container's metadata, which holds the headers' free text and
    the other strings of the index; a key on which shards differ appears once a shard, as `<file>:<key>`.

    Args:
        storage: where the files are.
        path: what the user typed.
        member: the file to open: `*.safetensors`, or an index `*.safetensors.index.json`.

    Raises:
        Refused: everything that is wrong with the index and with all headers: CORRUPT, INCOMPLETE for a shard or a
            tensor that is not there, NAME_COLLISION, OVERLAP, PATH_ESCAPE, UNSUPPORTED.
        StorageError: IO.
    """
    read = read_files(storage, member, lambda file: read_header(storage, file))
    _check_whole(read.parts)
    sidecars = sort_sidecars(storage, read.sizes)
    metadata: dict[str, Any] = {**read.index_texts, **_merged(read.parts)}
    if KEPT in metadata and (groups := decode(metadata[KEPT])) is not None:
        del metadata[KEPT]
        metadata[GROUPS] = groups
    if KEPT_RUN in metadata and (facts := facts_in(metadata[KEPT_RUN])):
        del metadata[KEPT_RUN]
        metadata |= facts
    seals = tuple(header.seal for header in read.parts.values() if header.seal is not None)
    return Container(
        SAFETENSORS.name,
        path,
        storage,
        read.entries,
        read.sizes,
        metadata,
        sidecars.carried,
        sidecars.ignored,
        seals=seals,
    )


def _check_whole(headers: Mapping[str, Header]) -> None:
    """Refuse files that hold parts of tensors, saved by torch, under the names of the tensors.

    Raises:
        Refused: INCOMPLETE; CORRUPT for a malformed note.
    """
    faults = Faults()
    for file, header in headers.items():
        if NOTE in header.metadata:
            for name, start in (starts(header.entries, header.metadata, file, faults) or {}).items():
                if any(start):
                    message = f"the file holds only a part of this tensor, from {list(start)} on"
                    faults.add("INCOMPLETE", message, file, name, "Open the folder that torch saved.")
    if faults:
        raise faults.error()


def _merged(headers: Mapping[str, Header]) -> dict[str, str]:
    """Return the free text of all headers; see `open_safetensors` for keys on which they differ.

    Torch's notes on parts are left out: they would be wrong for the same tensors under other names.
    """
    texts_by_file: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for file, header in headers.items():
        for key in [key for key in header.metadata if key not in NOTES]:
            texts_by_file[key][file] = header.metadata[key]
    merged: dict[str, str] = {}
    for key, texts in texts_by_file.items():
        if len(set(texts.values())) == 1:
            merged[key] = next(iter(texts.values()))
        else:
            merged |= {f"{file}:{key}": text for file, text in texts.items()}
    return merged
