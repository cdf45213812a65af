"""What a checkpoint is recognised as, and what it holds: the data of `transaxle info`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.manifest import load, stale
from transaxle.errors import Refusal, TransaxleError
from transaxle.formats.catalog import NUMBERS
from transaxle.formats.training_state.state import OPTIMIZER

JsonFacts = dict[str, Any]
_FACTS = (
    "model_type", "architectures", "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "tie_word_embeddings",
    "torch_dtype", "dtype", "quantization_config",
)  # fmt: skip
"""Config keys that people look for first."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The amount of data in a checkpoint."""

    tensors: int
    """Stored tensors."""
    optimizer: int
    """Those of them that are the optimizer's state."""
    parameters: int
    """Elements of the model."""
    bytes: int
    """Bytes of all of them."""
    files: int
    """Files that hold tensors."""


def totals(checkpoint: Checkpoint) -> Totals:
    """Count the tensors of a checkpoint, in the dialect of the view."""
    tensors = list(checkpoint.values())
    tensor_files = {extent.file for entry in checkpoint.container.entries.values() for extent in entry.extents}
    tensor_files.discard(NUMBERS)  # they are in a pickle
    state = sum(tensor.name.startswith(OPTIMIZER) for tensor in tensors)
    return Totals(len(tensors), state, checkpoint.parameters, sum(t.nbytes for t in tensors), len(tensor_files))


def checkpoint_facts(checkpoint: Checkpoint) -> JsonFacts:
    """Return what is known of a checkpoint from its headers."""
    return {"path": checkpoint.path, **_recognised(checkpoint), **_contents(checkpoint)}


def _recognised(checkpoint: Checkpoint) -> JsonFacts:
    """Return family and dialect with everything that follows from them, or why they are unknown."""
    beside = checkpoint.container.beside
    facts: JsonFacts = {"format": checkpoint.format, "family": None, "dialect": None, "reason": None, "prefix": None}
    facts |= {
        "replaces": False,
        "read": None,
        "names": sum(name not in beside for name in checkpoint.catalog.entries),
        "unknown": [],
        "axes": {},
        "tied": [],
        "aliases": {},
    }
    try:
        reading = checkpoint.recognised
        bound = checkpoint.bound
        sizes = checkpoint.sizes
        ties = [tie for tie in reading.family.ties if sizes.holds(tie.when, {})]
        facts |= {
            "family": reading.family.name,
            "replaces": checkpoint.settings.families.replaces(reading.family.name),
            "dialect": reading.dialect.label,
            "prefix": reading.prefix,
            "read": sum(len(names) for names in bound.names.values()),
            "unknown": [name for name in bound.unknown if name not in beside],
            "axes": dict(sizes.at({})),
            "tied": [f"{tie.alias} = {tie.original}" for tie in ties],
        }
    except TransaxleError as error:
        if checkpoint.settings.family or checkpoint.settings.dialect:
            raise
        facts["reason"] = error.refusals[0].as_json()
    if checkpoint.manifest is not None:
        facts["aliases"] = dict(checkpoint.manifest.aliases)
    return facts


def _contents(checkpoint: Checkpoint) -> JsonFacts:
    """Return the amount of data by dtype and file, and whether it is as it was written."""
    amount = totals(checkpoint)
    dtypes: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for tensor in checkpoint.values():
        dtypes[tensor.dtype] += tensor.nbytes
        count[tensor.dtype] += 1
    container = checkpoint.container
    return {
        "tensors": amount.tensors,
        "optimizer": amount.optimizer,
        "parameters": amount.parameters,
        "bytes": amount.bytes,
        "config": {key: checkpoint.config[key] for key in _FACTS if key in checkpoint.config},
        "dtypes": {code: {"tensors": count[code], "bytes": nbytes} for code, nbytes in dtypes.most_common()},
        "encodings": _encodings(checkpoint),
        "misfits": [refusal.as_json() for refusal in checkpoint.catalog.refusals],
        "files": dict(container.files),
        "carried": list(container.carried),
        "ignored": list(container.ignored),
        "metadata": dict(container.metadata),
        "manifest": _manifest(checkpoint),
    }


def _encodings(checkpoint: Checkpoint) -> list[JsonFacts]:
    """Return the number of tensors in each encoding."""
    count = Counter((tensor.encoding.name, tensor.convention) for tensor in checkpoint.encoded.values())
    return [
        {"encoding": encoding, "convention": convention, "tensors": tensors}
        for (encoding, convention), tensors in count.most_common()
    ]


def _manifest(checkpoint: Checkpoint) -> JsonFacts:
    """Return whether there is a manifest, and whether its files are unchanged."""
    problems: list[Refusal] = []
    made_of: JsonFacts = {}
    try:
        manifest = load(checkpoint.container)
        if manifest is None:
            return {"state": "none", "problems": []}
        made_of = {"source": manifest.source} if manifest.source else {}
        problems = stale(manifest, checkpoint.container)
    except TransaxleError as error:
        problems = list(error.refusals)
    state = "stale" if problems else "matches"
    return {"state": state, "problems": [problem.as_json() for problem in problems], **made_of}
