"""`transaxle info` describes a checkpoint, the table of tensor names of a model family, or this installation.

With `--tree`, `transaxle info` prints a tree of tensor names: names that differ only in their numbers share a branch,
which is shown with its number of bytes.
"""

from __future__ import annotations

import os
import platform
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, TextIO

import click

from transaxle import __version__, verbs
from transaxle.axes.notation.name import natural
from transaxle.cli.command import COMMANDS, Command, options_of, with_screen
from transaxle.cli.screen import Screen, printable
from transaxle.encodings.arithmetic.codec import active
from transaxle.engine.checkpoint.recognise import pick_family
from transaxle.engine.checkpoint.settings import settings
from transaxle.engine.checkpoint_facts import JsonFacts
from transaxle.engine.moves import axis_facts, axis_rows, dialect_facts, dialect_rows
from transaxle.engine.wording import fold, fold_to_text, parameters, percent, plural, size, tensors_in_words
from transaxle.families import builtin
from transaxle.formats.registry import every_format, writable
from transaxle.formats.torch_file.quantized_tensors import NOTE
from transaxle.formats.training_state import GROUPS, LEFT_BEHIND, MEGATRON, PARAMS, ParamGroup

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from transaxle.engine.checkpoint.stored_tensor import StoredTensor


_MOST_BRANCHES = 20
"""Number of child branches of a branch that are printed without `--all`."""
_WIDE = 4096
"""Line width in columns if the output is not a terminal: so large that no line is wrapped."""
_DEEPEST = 12
"""Maximum depth of the name tree, in segments of a tensor name."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BAR = 10
"""Length in columns of the bar that represents all bytes of a checkpoint; bars of branches are shorter."""


@dataclass
class Branch:
    """A node of the name tree: the tensors whose names begin with the same segments."""

    name: str
    """The name segments that this node adds to its parent's name; numbers in them are replaced by a range or a
    letter.
    """
    about: str = ""
    """Dtype and shape of the tensors whose full names end at this node; empty if no name ends here."""
    tensors: int = 0
    """Number of tensors in this branch of the name tree."""
    nbytes: int = 0
    """Bytes of all tensors in this branch of the name tree."""
    branches: dict[str, Branch] = field(default_factory=dict)
    """Next segment of the tensor names -> child branch."""


def name_tree(tensors: Mapping[str, StoredTensor], title: str) -> Branch:
    """Return the names of tensors as a tree, in which each branch is a segment of the names.

    Args:
        tensors: tensor name -> tensor.
        title: name of the root of the tree.
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


def print_tree(root: Branch, stream: TextIO, *, all_rows: bool) -> None:
    """Print a name tree, with the largest branches first.

    Args:
        root: root of the tree to print.
        stream: output stream.
        all_rows: whether to print all branches instead of only the largest.
    """
    from rich.console import Console
    from rich.tree import Tree

    tree = Tree(_label(root, root.nbytes))
    _add_branches(tree, root, root.nbytes, None if all_rows else _MOST_BRANCHES)
    console = Console(file=stream, highlight=False, emoji=False, markup=False)
    console.print(tree, width=None if console.is_terminal else _WIDE)


def _add_branches(tree: Tree, branch: Branch, total: int, limit: int | None) -> None:
    branches = sorted(map(_merge_single_children, branch.branches.values()), key=lambda child: -child.nbytes)
    for child in branches[:limit]:
        _add_branches(tree.add(_label(child, total)), child, total, limit)
    if limit is not None and len(branches) > limit:
        tree.add(
            f"… and {len(branches) - limit:,} more, {size(sum(child.nbytes for child in branches[limit:]))} (--all)"
        )


def _merge_single_children(branch: Branch) -> Branch:
    """While a branch has a single child and no tensors of its own, merge it with that child."""
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


_PRINTED_ELSEWHERE = frozenset({GROUPS, NOTE, MEGATRON, LEFT_BEHIND})
"""Metadata keys that are not printed in the section `metadata`, because the lines `groups`, `encodings`, `run` and
`left` show them.
"""
_RUN_FACTS = ("iteration", "checkpoint_version")
"""Facts about a Megatron training run that are printed before all other facts of the run."""
_REPLACED = "which replaces the built-in family of this name"
_SHOWN = 6
_LABELS = 24
"""Width in columns of the printed labels, including margins."""


@click.command(
    "info",
    cls=Command,
    examples=(
        ("transaxle info Qwen3-30B-A3B/", "describe a checkpoint"),
        ("transaxle info Qwen3-30B-A3B/ --tree", "and where its bytes are, as a tree of names"),
        ("transaxle info --family qwen3", "print the table of a family, including all that it takes over"),
        ("transaxle info", "describe this installation: version, kernels, packages, formats"),
    ),
    help="""Describe a checkpoint, or this installation.

    With PATH: prints format, family, dialect and prefix, the main values of the config, axis sizes, dtypes, files, and
    whether the manifest still matches; with --tree also the names as a tree, with the bytes of each branch, the largest
    first. Reads only headers. Without PATH: prints what this installation can do, or with
    --family the whole table of that family, after a legend of its dialects and axes.""",
)
@click.argument("path", type=click.Path(readable=False), required=False)
@click.option("--tree", is_flag=True, help="Also print the names as a tree, with the bytes of each branch.")
@options_of("info")
@with_screen
def info_command(screen: Screen, path: str | None, tree: bool, options: dict[str, Any]) -> int:
    """Describe a checkpoint, or the installation."""
    facts: JsonFacts = {}
    if tree and (path is None or screen.as_json):
        raise click.UsageError("--tree is for PATH, and not with --json (ls --json lists all tensors)")
    names: Branch | None = None
    if path is None and options["family"]:
        return _print_table(screen, options["family"], options["rules"])
    if path is not None:
        with verbs.open(path, **options) as checkpoint:
            facts = verbs.info(checkpoint)
            names = name_tree(checkpoint, facts["path"]) if tree else None
    facts |= _installation(complete=path is None)
    if screen.as_json:
        screen.document(facts)
    else:
        _print(screen, facts)
        if names is not None and not screen.quiet:
            print_tree(names, sys.stdout, all_rows=screen.everything)
    return 0


def _print_table(screen: Screen, name: str, rules: str | None) -> int:
    """Print a family's complete table of tensor names, including statements inherited from the tables of other
    families.
    """
    family = pick_family(name, settings(rules=rules).families)
    assert family.written is not None  # only families built in memory have no text
    text = family.written.spell_out()
    if screen.as_json:
        legend = {"model_types": list(family.model_types), "frameworks": dialect_facts(family.labels)}
        legend["axes"] = axis_facts(family)
        screen.document({"family": family.name, "dialects": list(family.labels), **legend, "table": text})
    else:
        for title, rows in (("dialects", dialect_rows(family.labels)), ("axes", axis_rows(family))):
            # the note is printed as a comment, so that the output is a valid file for --rules
            screen.line((f"# {title}", "dim"))
            screen.table(rows, indent="#   ")
        for line in text.splitlines():
            screen.line(line)
    return 0


def _installation(*, complete: bool) -> JsonFacts:
    """Return facts about this installation: its versions and, if `complete`, also packages, file formats and model
    families.
    """
    facts: JsonFacts = {"transaxle": __version__, "kernels": active(), "python": platform.python_version()}
    if complete:
        needed = ("numpy", "ml_dtypes", "safetensors", "torch", "transformers")
        facts |= {
            "machine": f"{platform.system()} {platform.machine()}, {plural(os.cpu_count() or 1, 'core')}",
            "packages": {name: _version_of(name) for name in needed},
            "formats": {"reads": [each.name for each in every_format()], "writes": list(writable())},
            "families": {name: list(entry.dialects) for name, entry in builtin().everything.entries.items()},
            "commands": list(COMMANDS),
        }
    return facts


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _print(screen: Screen, facts: JsonFacts) -> None:
    lines = _installation_lines(facts)
    if "path" in facts:
        lines = [*_checkpoint_lines(screen, facts), *lines]
    screen.line((facts.get("path", "this installation"), "bold"))
    screen.table([row for label, text in lines if text for row in _wrap(screen, label, text)])


def _wrap(screen: Screen, label: str, text: str) -> list[list[str]]:
    """Break a long text into lines that fit into the column to the right of its label."""
    if screen.width is None:
        return [[label, text]]
    lines = textwrap.wrap(text, max(screen.width - _LABELS, _LABELS), break_on_hyphens=False)
    return [[label if not number else "", line] for number, line in enumerate(lines)]


def _checkpoint_lines(screen: Screen, facts: JsonFacts) -> list[tuple[str, str]]:
    """Return the facts about a checkpoint as pairs of label and text, without pairs whose text is empty."""
    reason = facts["reason"]
    inner = f"{facts['inside']}, which was found in the folder that you gave" if facts["inside"] else ""
    lines = [("opened", inner), ("format", facts["format"])]
    if reason is None:
        lines += [
            ("family", facts["family"] + (f", {_REPLACED}" if facts["replaces"] else "")),
            ("dialect", f"{facts['dialect']}, which reads {facts['read']:,} of {plural(facts['names'], 'name')}"),
            ("prefix", facts["prefix"]),
        ]
    else:
        lines += [
            ("family", f"not recognised: {reason['message']}"),
            *(("", line) for line in reason["hint"].splitlines()),
        ]
    lines += [
        ("unknown", _some(screen, list(fold_to_text(tuple(facts["unknown"]))))),
        *(("" if number else "missing", lack["text"]) for number, lack in enumerate(facts["missing"])),
        (
            "holds",
            ", ".join(
                (
                    tensors_in_words(facts["tensors"], facts["optimizer"]),
                    parameters(facts["parameters"]),
                    size(facts["bytes"]),
                )
            ),
        ),
        ("dtypes", _dtypes(facts)),
        ("encodings", _encoding_words(facts)),
        ("config", ", ".join(f"{key} {_value(value)}" for key, value in facts["config"].items())),
        ("", f"from {facts['config_path']}, in a folder above" if facts["config_path"] else ""),
        ("axes", " ".join(f"{axis}={count}" for axis, count in facts["axes"].items())),
        ("tied", ", ".join(facts["tied"])),
        ("aliases", ", ".join(f"{name} = {of}" for name, of in facts["aliases"].items())),
        ("files", _files(screen, facts["files"])),
        ("carried", _some(screen, facts["carried"])),
        ("ignored", _some(screen, list(fold_to_text(tuple(facts["ignored"]))))),
        ("groups", _some(screen, [_group(group) for group in facts["metadata"].get(GROUPS, ())])),
        *_run_lines(screen, facts["metadata"].get(MEGATRON, {})),
        ("left", _describe_left_behind(screen, facts["metadata"].get(LEFT_BEHIND, {}))),
        (
            "metadata",
            _some(
                screen, [f"{key}={value}" for key, value in facts["metadata"].items() if key not in _PRINTED_ELSEWHERE]
            ),
        ),
        ("manifest", _manifest_line(facts["manifest"])),
    ]
    return lines


def _run_lines(screen: Screen, run: JsonFacts) -> list[tuple[str, str]]:
    """Describe the Megatron training run that saved a checkpoint."""
    words = [f"{key} {run[key]}" for key in _RUN_FACTS if key in run]
    degrees = " ".join(f"{axis} {size}" for axis, size in run.get("parallel", {}).items())
    words += [f"saved by {degrees}"] if degrees else []
    rows = run.get("vocabulary", {})
    if "vocab_size" in rows:
        padded = f", padded to {rows['padded_vocab_size']:,}" if "padded_vocab_size" in rows else ""
        words.append(f"a vocabulary of {rows['vocab_size']:,}{padded}")
    elif rows:
        words.append(f"a vocabulary padded to {rows['padded_vocab_size']:,}")
    words += [f"{name} {count:,}" for name, count in run.get("counters", {}).items()]
    words += [
        f"{key} {value}" for key, value in run.items() if key not in _RUN_FACTS and not isinstance(value, dict | list)
    ]
    arguments = [f"{key} {_value(value)}" for key, value in run.get("arguments", {}).items()]
    whole = "" if screen.everything or not arguments else f"{len(arguments):,} of them; --all, or --json, shows them"
    return [
        ("run", ", ".join(words)),
        ("arguments", whole or ", ".join(arguments)),
    ]


def _describe_left_behind(screen: Screen, reasons_by_name: dict[str, str]) -> str:
    """Describe which checkpoint entries a conversion would leave out, and why."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in reasons_by_name.items():
        names_by_reason.setdefault(str(reason), []).append(name)
    return "; ".join(
        f"{_some(screen, list(fold_to_text(tuple(names))))} ({reason})" for reason, names in names_by_reason.items()
    )


def _group(group: ParamGroup) -> str:
    """Describe a parameter group of an optimizer, without its unset values."""
    settings = [f"{key}={value}" for key, value in group.items() if key != PARAMS and value is not None]
    return f"{plural(len(group[PARAMS]), 'parameter')}: {' '.join(settings)}"


def _files(screen: Screen, files: dict[str, int]) -> str:
    listed = [f"{name} {size(count)}" for name, count in files.items()]
    if screen.everything or len(listed) <= _SHOWN:
        return ", ".join(listed)
    return f"{plural(len(listed), 'file')}, {size(sum(files.values()))} together, {listed[0]} …"


def _dtypes(facts: JsonFacts) -> str:
    by_dtype = facts["dtypes"].items()
    return ", ".join(
        f"{code} {percent(amount['bytes'], facts['bytes'])} in {plural(amount['tensors'], 'tensor')}"
        for code, amount in by_dtype
    )


def _encoding_words(facts: JsonFacts) -> str:
    texts = [f"{plural(e['tensors'], 'tensor')} in {e['encoding']} ({e['convention']})" for e in facts["encodings"]]
    if facts["misfits"]:
        misfit = facts["misfits"][0]
        texts.append(
            f"not understood: {misfit['tensor'] or misfit['file'] or ''} {misfit['message']}".replace("  ", " ")
        )
    return ", ".join(texts)


def _value(value: Any) -> str:
    """Return a config value as one line of text; nested mappings are abbreviated."""
    if isinstance(value, dict):
        return str(value.get("quant_method", "{…}"))
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _manifest_line(manifest: JsonFacts) -> str:
    if manifest["state"] == "none":
        return "none: transaxle did not write this checkpoint"
    if manifest["state"] == "matches":
        made_of = f"; made of {manifest['source']}" if "source" in manifest else ""
        return f"matches: all files still have the recorded sizes and headers{made_of}"
    first_problem = manifest["problems"][0]
    more_problems = f" and {len(manifest['problems']) - 1} more" if len(manifest["problems"]) > 1 else ""
    return (
        f"no longer matches, so it is ignored: {first_problem['file'] or ''} {first_problem['message']}{more_problems}"
    )


def _installation_lines(facts: JsonFacts) -> list[tuple[str, str]]:
    lines = [("transaxle", f"{facts['transaxle']}, kernels: {facts['kernels']}, python {facts['python']}")]
    if "families" in facts:
        lines += [
            ("machine", facts["machine"]),
            (
                "packages",
                ", ".join(f"{name} {version or '(not installed)'}" for name, version in facts["packages"].items()),
            ),
            *((label, ", ".join(names)) for label, names in facts["formats"].items()),
            ("families", f"{len(facts['families']):,}; `transaxle families` lists them"),
        ]
    return lines


def _some(screen: Screen, items: list[str]) -> str:
    shown = items if screen.everything else items[:_SHOWN]
    return ", ".join(shown) + (f" and {len(items) - len(shown):,} more" if len(shown) < len(items) else "")
