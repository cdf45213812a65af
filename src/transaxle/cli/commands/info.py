"""`transaxle info`: what was recognised, and why."""

from __future__ import annotations

import os
import platform
import textwrap
from collections import Counter
from importlib import metadata
from typing import Any

import click

from transaxle import __version__
from transaxle.cli import options
from transaxle.cli.command import Command
from transaxle.cli.commands.plan import folded
from transaxle.cli.program import COMMANDS
from transaxle.cli.screen.quantities import parameters, percent, plural, size
from transaxle.cli.screen.screen import Screen
from transaxle.cli.screen.summary import totals
from transaxle.encodings.arithmetic.codec import active
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.engine.checkpoint.manifest import load, stale
from transaxle.errors import Refusal, TransaxleError
from transaxle.families import builtin
from transaxle.formats.registry import every_format, writable
from transaxle.formats.torch_file.quantized_tensors import NOTE
from transaxle.formats.training_state.state_groups import GROUPS, PARAMS, ParamGroup

_FACTS = (
    "model_type", "architectures", "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "tie_word_embeddings",
    "torch_dtype", "dtype", "quantization_config",
)  # fmt: skip
"""Config keys that a person asks for first, as far as a config has them."""
_TOLD = frozenset({GROUPS, NOTE})
"""Keys of the metadata of which lines of their own tell: `groups`, `encodings`."""
_SHOWN = 6
_LABELS = 24
"""Columns that labels and the space around them take at most."""

Facts = dict[str, Any]


@click.command(
    "info",
    cls=Command,
    examples=(
        ("transaxle info Qwen3-30B-A3B/", "describe a checkpoint"),
        ("transaxle info", "describe this installation: version, kernels, families, dialects"),
    ),
    help="""Describe a checkpoint, or this installation.

    With PATH: prints format, family, dialect and prefix, the main values of the config, axis sizes, dtypes, files, and
    whether the manifest still matches. Reads only headers. Without PATH: prints what this installation can do.""",
)
@click.argument("path", type=click.Path(), required=False)
@options.reading
@options.printing
def command(screen: Screen, path: str | None, said: dict[str, Any]) -> int:
    """Describe a checkpoint, or the installation."""
    facts: Facts = {}
    if path is not None:
        with open_checkpoint(path, **said) as checkpoint:
            facts = {"path": path, **_recognised(checkpoint), **_contents(checkpoint)}
    facts |= _installation(whole=path is None)
    if screen.as_json:
        screen.document(facts)
    else:
        _print(screen, facts)
    return 0


def _recognised(checkpoint: Checkpoint) -> Facts:
    """Return what family and dialect it is of, and what follows from them; or why that is not known."""
    facts: Facts = {"format": checkpoint.format, "family": None, "dialect": None, "reason": None, "prefix": None}
    facts |= {
        "read": None,
        "names": len(checkpoint.catalog.entries),
        "unknown": [],
        "axes": {},
        "tied": [],
        "aliases": {},
    }
    try:
        found = checkpoint.recognised
        bound = checkpoint.bound
        sizes = checkpoint.sizes
        ties = [tie for tie in found.family.ties if sizes.holds(tie.when, {})]
        facts |= {
            "family": found.family.name,
            "dialect": found.dialect.label,
            "prefix": found.prefix,
            "read": sum(len(names) for names in bound.names.values()),
            "unknown": list(bound.unknown),
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


def _contents(checkpoint: Checkpoint) -> Facts:
    """Return how much there is, in which types and files, and whether it is as it was written."""
    amount = totals(checkpoint)
    dtypes: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for tensor in checkpoint.values():
        dtypes[tensor.dtype] += tensor.nbytes
        count[tensor.dtype] += 1
    container = checkpoint.container
    return {
        "tensors": amount.tensors,
        "parameters": amount.parameters,
        "bytes": amount.bytes,
        "config": {key: checkpoint.config[key] for key in _FACTS if key in checkpoint.config},
        "dtypes": {code: {"tensors": count[code], "bytes": held} for code, held in dtypes.most_common()},
        "encodings": _encodings(checkpoint),
        "misfits": [refusal.as_json() for refusal in checkpoint.catalog.refusals],
        "files": dict(container.files),
        "carried": list(container.carried),
        "ignored": list(container.ignored),
        "metadata": dict(container.metadata),
        "manifest": _manifest(checkpoint),
    }


def _encodings(checkpoint: Checkpoint) -> list[Facts]:
    """Return in which encodings tensors are stored, and how many."""
    count = Counter((one.encoding.name, one.convention) for one in checkpoint.encoded.values())
    return [
        {"encoding": encoding, "convention": convention, "tensors": tensors}
        for (encoding, convention), tensors in count.most_common()
    ]


def _manifest(checkpoint: Checkpoint) -> Facts:
    """Return whether there is a manifest, and whether its files are still those it was written with."""
    problems: list[Refusal] = []
    try:
        manifest = load(checkpoint.container)
        if manifest is None:
            return {"state": "none", "problems": []}
        problems = stale(manifest, checkpoint.container)
    except TransaxleError as error:
        problems = list(error.refusals)
    state = "stale" if problems else "matches"
    return {"state": state, "problems": [problem.as_json() for problem in problems]}


def _installation(*, whole: bool) -> Facts:
    """Return what this installation is."""
    facts: Facts = {"transaxle": __version__, "kernels": active(), "python": platform.python_version()}
    if whole:
        needed = ("numpy", "ml_dtypes", "safetensors", "torch", "transformers")
        facts |= {
            "machine": f"{platform.system()} {platform.machine()}, {plural(os.cpu_count() or 1, 'core')}",
            "packages": {name: _installed(name) for name in needed},
            "formats": {"reads": [each.name for each in every_format()], "writes": list(writable())},
            "families": {name: list(entry.dialects) for name, entry in builtin().everything.entries.items()},
            "commands": list(COMMANDS),
        }
    return facts


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _print(screen: Screen, facts: Facts) -> None:
    lines = _installation_lines(facts)
    if "path" in facts:
        lines = [*_checkpoint_lines(screen, facts), *lines]
    screen.line((facts.get("path", "this installation"), "bold"))
    screen.table([row for label, text in lines if text for row in _wrapped(screen, label, text)])


def _wrapped(screen: Screen, label: str, text: str) -> list[list[str]]:
    """Break a long text where a terminal would, but under its own column."""
    if screen.width is None:
        return [[label, text]]
    lines = textwrap.wrap(text, max(screen.width - _LABELS, _LABELS), break_on_hyphens=False)
    return [[label if not number else "", line] for number, line in enumerate(lines)]


def _checkpoint_lines(screen: Screen, facts: Facts) -> list[tuple[str, str]]:
    """Return what is known of a checkpoint, as label and text; what is empty is left out."""
    reason = facts["reason"]
    lines = [("format", facts["format"])]
    if reason is None:
        lines += [
            ("family", facts["family"]),
            ("dialect", f"{facts['dialect']}, which reads {facts['read']:,} of {plural(facts['names'], 'name')}"),
            ("prefix", facts["prefix"]),
        ]
    else:
        lines += [("family", f"not recognised: {reason['message']}"), ("", reason["hint"])]
    lines += [
        ("unknown", _some(screen, list(folded(tuple(facts["unknown"]))))),
        ("holds", f"{plural(facts['tensors'], 'tensor')}, {parameters(facts['parameters'])}, {size(facts['bytes'])}"),
        ("dtypes", _dtypes(facts)),
        ("encodings", _encoding_words(facts)),
        ("config", ", ".join(f"{key} {_value(value)}" for key, value in facts["config"].items())),
        ("axes", " ".join(f"{axis}={count}" for axis, count in facts["axes"].items())),
        ("tied", ", ".join(facts["tied"])),
        ("aliases", ", ".join(f"{name} = {of}" for name, of in facts["aliases"].items())),
        ("files", _files(screen, facts["files"])),
        ("carried", _some(screen, facts["carried"])),
        ("ignored", _some(screen, list(folded(tuple(facts["ignored"]))))),
        ("groups", _some(screen, [_group(group) for group in facts["metadata"].get(GROUPS, ())])),
        ("metadata", _some(screen, [f"{key}={held}" for key, held in facts["metadata"].items() if key not in _TOLD])),
        ("manifest", _manifest_line(facts["manifest"])),
    ]
    return lines


def _group(group: ParamGroup) -> str:
    """Return a parameter group in words, without what is not set."""
    said = [f"{key}={value}" for key, value in group.items() if key != PARAMS and value is not None]
    return f"{plural(len(group[PARAMS]), 'parameter')}: {' '.join(said)}"


def _files(screen: Screen, files: dict[str, int]) -> str:
    listed = [f"{name} {size(count)}" for name, count in files.items()]
    if screen.everything or len(listed) <= _SHOWN:
        return ", ".join(listed)
    return f"{plural(len(listed), 'file')}, {size(sum(files.values()))} together, {listed[0]} …"


def _dtypes(facts: Facts) -> str:
    held = facts["dtypes"].items()
    return ", ".join(
        f"{code} {percent(found['bytes'], facts['bytes'])} in {plural(found['tensors'], 'tensor')}"
        for code, found in held
    )


def _encoding_words(facts: Facts) -> str:
    found = [f"{plural(e['tensors'], 'tensor')} in {e['encoding']} ({e['convention']})" for e in facts["encodings"]]
    if facts["misfits"]:
        first = facts["misfits"][0]
        found.append(f"not understood: {first['tensor'] or first['file'] or ''} {first['message']}".replace("  ", " "))
    return ", ".join(found)


def _value(value: Any) -> str:
    """Write a config value on one line: what is nested is not for people who look for the hidden size."""
    if isinstance(value, dict):
        return str(value.get("quant_method", "{…}"))
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _manifest_line(manifest: Facts) -> str:
    if manifest["state"] == "none":
        return "none: transaxle did not write this checkpoint"
    if manifest["state"] == "matches":
        return "matches: all files still have the recorded sizes and headers"
    first = manifest["problems"][0]
    more = f" and {len(manifest['problems']) - 1} more" if len(manifest["problems"]) > 1 else ""
    return f"no longer matches, so it is ignored: {first['file'] or ''} {first['message']}{more}"


def _installation_lines(facts: Facts) -> list[tuple[str, str]]:
    lines = [("transaxle", f"{facts['transaxle']}, kernels: {facts['kernels']}, python {facts['python']}")]
    if "families" in facts:
        lines += [
            ("machine", facts["machine"]),
            (
                "packages",
                ", ".join(f"{name} {version or '(not installed)'}" for name, version in facts["packages"].items()),
            ),
            *((what, ", ".join(names)) for what, names in facts["formats"].items()),
            *((f"family {name}", ", ".join(labels)) for name, labels in facts["families"].items()),
        ]
    return lines


def _some(screen: Screen, items: list[str]) -> str:
    shown = items if screen.everything else items[:_SHOWN]
    return ", ".join(shown) + (f" and {len(items) - len(shown):,} more" if len(shown) < len(items) else "")
