"""What a reader does with a checkpoint other than loading its tensors as they are, and what would mend it.

The reader's own report, what it leaves out of its report, and the outputs of small models become findings. A finding
that is `wrong` means that the model in memory is not the one in the files; the others are notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from transaxle.axes.layout.model_tensors import Model
from transaxle.axes.notation.name import natural
from transaxle.encodings.conventions.convention import COMPRESSED_TENSORS
from transaxle.encodings.encoding import NVFP4, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.promised import LOST, Lack, find_lacks
from transaxle.engine.wording import fold_to_text, plural
from transaxle.errors import Refusal, TransaxleError, Where
from transaxle.readers.reader import Reader
from transaxle.readers.reader_runs import Trace
from transaxle.readers.twins import form_of, needs_twins, why_no_twins

Kind = Literal[
    "error", "missing", "dropped", "ignored", "shape", "twice", "values", "config", "scale", "absent", "note"
]
"""What a finding is about; `Finding.kind` documents the kinds."""
_LISTED = 8
"""Number of rows of folded names that a text shows."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that a reader does with a checkpoint, other than loading its tensors as they are."""

    kind: Kind
    """`error`: it raises. `missing`: parameters that stay at random values. `dropped`: tensors that it does not use.
    `ignored`: tensors that it leaves out on purpose. `shape`: tensors of another shape than its parameters. `twice`:
    tensors that it reads from two files. `values`: values that it puts elsewhere or decodes otherwise. `config`: keys
    that it reads otherwise. `scale`: scales that are implausible in their convention. `absent`: tensors that the config
    promises. `note`: what could not be checked.
    """
    wrong: bool
    """Whether the loaded model is wrong, or nothing is loaded."""
    effect: str
    """What the reader does."""
    names: tuple[str, ...] = ()
    """The tensors of the files, or parameters of the reader, that this concerns."""
    remedy: str = ""
    """What would mend it; empty if Transaxle does not know."""

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON data."""
        return {
            "kind": self.kind, "wrong": self.wrong, "effect": self.effect, "names": list(self.names),
            "remedy": self.remedy,
        }  # fmt: skip

    def __str__(self) -> str:
        rows = list(fold_to_text(self.names))
        ellipsis = [f"    … and {len(rows) - _LISTED:,} more rows"] if len(rows) > _LISTED else []
        lines = [f"  {self.kind}: {self.effect}", *(f"    {row}" for row in rows[:_LISTED]), *ellipsis]
        return "\n".join([*lines, *([f"    {self.remedy}"] if self.remedy else [])])


def findings_of(checkpoint: Checkpoint, reader: Reader, trace: Trace) -> tuple[Finding, ...]:
    """Return the findings on a checkpoint from what a reader does with it, the wrong ones first."""
    findings = [*_trace_findings(checkpoint, reader, trace), *_scales(checkpoint)]
    return tuple(sorted(findings, key=lambda finding: not finding.wrong))


def refusals_of(path: str, findings: Iterable[Finding]) -> list[Refusal]:
    """Return a refusal for each finding for which a reader does not load the checkpoint at a path as it is."""
    return [
        Refusal("UNSUPPORTED", str(finding).strip(), Where(path, next(iter(finding.names), None)))
        for finding in findings
        if finding.wrong
    ]


def _trace_findings(checkpoint: Checkpoint, reader: Reader, trace: Trace) -> Iterator[Finding]:
    """Yield a finding for everything that the reader does otherwise than loading a tensor as it is."""
    name = reader.name
    form = _remedy(checkpoint, reader, has_model="class" in trace)
    if (error := trace.get("error")) and not trace.get("failed"):
        at = tuple(filter(None, (trace.get("stopped"),)))
        yield Finding("error", True, f"{name} stops with an error: {error}", at, form)
    if why := trace.get("untraced"):
        yield Finding("note", False, f"tables stand for {name}: {why}")
    if why := trace.get("unbuilt"):
        effect = f"{name} cannot build the model on this machine, so that its loading was not checked: {why}"
        yield Finding("error", True, effect)
    if failed := trace.get("failed"):
        why = "; ".join(dict.fromkeys(why for _, why in failed))
        effect = f"{name} cannot build {plural(len(failed), 'parameter')} from the tensors: {why}"
        yield Finding("error", True, effect, _in_order(each for each, _ in failed), form)
    explains = any(trace.get(key) for key in _LACKS)
    lacks = find_lacks(checkpoint) or (_absent(checkpoint) if explains else ())
    absent = explains and any(lack.names for lack in lacks)
    if missing := sorted({*trace.get("missing", ())}.difference(each for each, _ in trace.get("failed") or ())):
        fate = trace.get("fate") or ("stops" if trace.get("stops") else "leaves random values there")
        effect = f"{name} gets no tensor for {plural(len(missing), 'parameter')}, and {fate}"
        yield Finding("missing", True, effect, _in_order(missing), "" if absent else form)
    if incomplete := trace.get("incomplete"):
        example, first = incomplete[0]
        effect = (
            f"{name} fills {plural(len(incomplete), 'parameter')} only in part, and leaves random values in the rest: "
            f"{example} from the element {_shape(first)} on"
        )
        yield Finding("missing", True, effect, _in_order(each for each, _ in incomplete), "" if absent else form)
    if shapes := trace.get("mismatched"):
        example, file_shape, model_shape = shapes[0]
        effect = (
            f"{name} gives {plural(len(shapes), 'parameter')} another shape by the config: {example} is "
            f"{_shape(file_shape)} in the files and {_shape(model_shape)} in the model"
        )
        yield Finding("shape", True, effect, _in_order(each for each, _, _ in shapes), "" if absent else _CONFIG)
    for lack in lacks:
        take = f"Take them from a complete checkpoint:  transaxle convert {checkpoint.path} DST --to hf --graft BASE"
        remedy = take if lack.is_lost else ""
        yield Finding("absent", explains, f"{lack.promise}, but {lack.gap}; {lack.advice}", lack.names, remedy)
    yield from _drop_findings(checkpoint, reader, trace, form)
    yield from _probe_findings(reader, trace)
    yield from _draft_findings(reader, trace)
    yield from _config_findings(checkpoint, reader, trace)
    yield from _value_findings(checkpoint, reader, trace, form)


_LACKS = ("missing", "incomplete", "mismatched", "failed", "error", "lacks")
"""Entries of a trace that tensors which the files lack may explain."""
_CONFIG = "Correct the sizes in config.json: they are not those of the tensors."


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=natural))


def _shape(sizes: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def _remedy(checkpoint: Checkpoint, reader: Reader, has_model: bool) -> str:
    """Return the conversion that gives the checkpoint the form for which the reader is made; empty if it has it.

    Args:
        checkpoint: the checkpoint.
        reader: the reader.
        has_model: whether names were compared with a model of the reader, which takes those of further dialects only if
            they are the same.
    """
    convert = f"transaxle convert {checkpoint.path} DST --to {reader.target or reader.dialect}"
    try:
        form = form_of(checkpoint)
        takes_names = form.dialect.partition("@")[0] in (reader.dialect, *reader.further_dialects)
        if takes_names and has_model and reader.further_dialects:
            takes_names = _has_names_of(checkpoint, reader.dialect)
    except TransaxleError:
        return ""
    if not takes_names:
        opening = checkpoint.reopening.options if checkpoint.reopening else {}
        options = "".join(f" --{key} {value}" for key in ("family", "dialect", "rules") if (value := opening.get(key)))
        return f"Its names are those of {form.dialect}; rename them:  {convert}{options}"
    if form.encoding and not reader.loads_only_codes:
        return f"Decode the {form.encoding.replace('+', ' and ')} tensors:  {convert} --decode bf16"
    return ""


def _has_names_of(checkpoint: Checkpoint, label: str) -> bool:
    """Return whether the names of a dialect, for the sizes in the config, are those of the checkpoint's own dialect."""
    family, reading = checkpoint.reading.family, checkpoint.reading
    if (dialect := family.dialect(label)) is None:
        return True
    model = Model(family, checkpoint.sizes)
    return {name for name, _ in model.stored_shapes(dialect)} == {
        name for name, _ in model.stored_shapes(reading.dialect)
    }


def _absent(checkpoint: Checkpoint) -> tuple[Lack, ...]:
    """Return what the files lack by the sizes in the config alone, which may contradict the shapes of other tensors."""
    try:
        reading = checkpoint.reading
        shapes = Model(reading.family, checkpoint.sizes).stored_shapes(reading.dialect)
        names = {f"{reading.prefix}{name}" for name, _ in shapes} - checkpoint.catalog.entries.keys()
    except TransaxleError:
        return ()
    return (Lack("the config promises them", "they are not stored", _in_order(names), LOST),) if names else ()


def _probe_findings(reader: Reader, trace: Trace) -> Iterator[Finding]:
    """Yield findings on tensors in two files, and those that a probe words itself."""
    if twice := trace.get("twice"):
        effect = f"{reader.name} reads {plural(len(twice), 'tensor')} from two files, and the last one stays"
        yield Finding("twice", True, effect, _in_order(twice), "Remove the file that does not belong here.")
    for entry in trace.get("findings") or ():
        yield Finding(entry["kind"], entry["wrong"], entry["effect"], _in_order(entry["names"]), entry["remedy"])


def _drop_findings(checkpoint: Checkpoint, reader: Reader, trace: Trace, form: str) -> Iterator[Finding]:
    """Yield findings on tensors that the reader does not use: with or without a word."""
    if trace.get("error") and not trace.get("unexpected"):
        return
    untaken, unexpected, ignored = (list(trace.get(key) or ()) for key in ("untaken", "unexpected", "ignored"))
    if ignored:
        names = [name for name in untaken if name not in unexpected] or ignored
        effect = f"{reader.name} leaves out {plural(len(names), 'tensor')} on purpose"
        yield Finding("ignored", False, effect, _in_order(names))
        untaken = [name for name in untaken if name not in names]
    if partial := trace.get("partial"):
        example, first = partial[0]
        effect = (
            f"{reader.name} takes only a part of {plural(len(partial), 'tensor')}: of {example} nothing from the "
            f"element {_shape(first)} on"
        )
        yield Finding("dropped", True, effect, _in_order(each for each, _ in partial), _CONFIG)
    if unexpected:
        names = untaken or unexpected
        buffers = {part for tensor in checkpoint.encoded.values() for part in tensor.parts.values()}
        codes = " (buffers of quantized tensors)" if buffers.intersection(names) else ""
        effect = f"{reader.name} has no parameter for {plural(len(names), 'tensor')}{codes} and drops them"
        yield Finding("dropped", True, effect, _in_order(names), form)


def _draft_findings(reader: Reader, trace: Trace) -> Iterator[Finding]:
    """Yield a note on layers that predict further tokens, which the config promises and only speculation needs."""
    drafts = trace.get("drafts") or {}
    names = _in_order([*drafts.get("missing", ()), *(name for name, _ in drafts.get("incomplete", ()))])
    why = drafts.get("error") or drafts.get("unbuilt") or ""
    if names:
        effect = (
            f"the config promises layers that predict further tokens, and there is no tensor for "
            f"{plural(len(names), 'parameter')} of them: {reader.name} loads the model, and cannot speculate with them"
        )
        yield Finding("absent", False, f"{effect}: {why}" if why else effect, names)
    elif why:
        yield Finding("note", False, f"the layers that predict further tokens were not checked: {why}")


_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "base of the rotary embedding": ("rope_theta", "rope_parameters.rope_theta", "rotary_emb_base"),
    "whether the head is tied": ("tie_word_embeddings",),
}
"""What a config says -> its spellings in the versions and families of programs; dots lead into sections."""
_SIZE_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "number of experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "number of key and value heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads"),
    "size of a head": ("head_dim", "attention_head_dim"),
}
"""The same for sizes: where the shapes of all tensors are right, a reader does not need them."""
_COUNTS = frozenset({"num_experts_per_tok", "moe_topk", "n_group", "topk_group", "sliding_window"})
"""Config keys with integers that change what a model computes, but no shape."""
_OWN_BUSINESS = frozenset(
    {"transformers_version", "torch_dtype", "dtype", "_name_or_path", "architectures", "use_cache"}
)
"""Config keys that a reader may change without changing the model."""


def _config_findings(checkpoint: Checkpoint, reader: Reader, trace: Trace) -> Iterator[Finding]:
    """Yield findings on config keys whose value the reader does not use."""
    read, defaults = trace.get("config"), trace.get("defaults") or {}
    if not read:
        return
    for section, stated in _sections(checkpoint.config):
        inside = read if not section else read.get(section)
        default = defaults if not section else defaults.get(section) or {}
        if isinstance(inside, Mapping):
            spellings = {**_SPELLINGS, **(_SIZE_SPELLINGS if trace.get("mismatched") else {})}
            yield from _spelling_findings(reader, section, spellings, (stated, inside, default))
            yield from _replacement_findings(reader, section, stated, inside)


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the config and its sections that describe parts of the model, with their names."""
    yield "", config
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith("_config") and key != "quantization_config":
            yield key, value


def _at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of keys; None if there is none."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _spelling_findings(
    reader: Reader, section: str, spellings: Mapping[str, tuple[str, ...]], configs: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Yield findings on values under a spelling that the reader does not know, while it uses its default.

    Args:
        reader: the reader.
        section: name of the section of the config; empty for the config itself.
        spellings: what a config says -> its spellings.
        configs: the section in the file, as the reader has read it, and in the reader's default config.
    """
    stated, read, default = configs
    for meaning, paths in spellings.items():
        values = {path: value for path in paths if (value := _at(stated, path)) is not None}
        used = {
            path: value for path in paths if _at(default, path) is not None and (value := _at(read, path)) is not None
        }
        if not values or not used or set(values.values()) & set(used.values()):
            continue
        (path, value), (read_path, read_value) = next(iter(values.items())), next(iter(used.items()))
        place = f"{section}." if section else ""
        effect = f"{reader.name} takes {read_value} ({place}{read_path}) for the {meaning}, which is {value} ({path})"
        yield Finding("config", True, effect, (), f"Write {place}{read_path} into config.json too.")


def _replacement_findings(
    reader: Reader, section: str, stated: Mapping[str, Any], read: Mapping[str, Any]
) -> Iterator[Finding]:
    """Yield findings on numbers and flags that the reader replaces by others under the same key."""
    for key, value in stated.items():
        read_value = read.get(key)
        kinds = {type(value), type(read_value)}
        if key in _OWN_BUSINESS or not kinds <= ({bool, int, float} if key in _COUNTS else {bool, float}):
            continue
        if value != read_value:
            place = f"{section}.{key}" if section else key
            yield Finding(
                "config", True, f"{reader.name} takes {read_value} for {place}, which is {value} in config.json"
            )


def _value_findings(checkpoint: Checkpoint, reader: Reader, trace: Trace, form: str) -> Iterator[Finding]:
    """Yield findings on values that the reader puts elsewhere or decodes otherwise."""
    if not needs_twins(checkpoint, reader.dialect) or (not reader.compares_values and not checkpoint.encoded):
        return
    uncompared = "values were not compared, only names, shapes and dtypes"
    if not reader.compares_values:
        yield Finding("note", False, uncompared)
        return
    why = why_no_twins(checkpoint, reader.dialect)
    values = trace.get("values")
    if not why and (not values or values.get("plain")):
        why = values["error"] if values else trace.get("error") or "the config cannot be made small"
    if why or not values:
        yield Finding("note", False, f"{uncompared}: {why}")
        return
    if error := values.get("error"):
        yield Finding("values", True, f"{reader.name} cannot load a small checkpoint of this kind: {error}", (), form)
        return
    outputs, different = values.get("outputs", "equal"), values["different"]
    if different:
        effect = f"{reader.name} puts other values into {plural(len(different), 'parameter')} of a small model"
        yield Finding("values", True, effect, _in_order(different), form)
    if isinstance(outputs, float):
        effect = f"a small model of this kind computes something else in {reader.name}: outputs differ by {outputs:.0%}"
        yield Finding("values", True, effect, (), form)
    elif outputs != "equal":
        yield Finding("note", False, f"outputs of a small model were not compared: {outputs}")


_TURN = 1.0
"""Global scale of nvfp4 at which a factor and a divisor are the same. A factor is the largest value of a weight over
2,688; weights above 2,688 do not occur in models, so a factor above 1 is a divisor, and a divisor below 1 a factor.
"""
_MOST_SCALES = 4096
"""Largest number of global scales that are read; of more, evenly distributed ones."""


def _scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings on global scales that have the meaning of another convention."""
    scaled = [
        each for each in checkpoint.encoded.values() if each.encoding.name == NVFP4.name and Role.GLOBAL in each.parts
    ]
    inverted = []
    for tensor in scaled[:: -(-len(scaled) // _MOST_SCALES) or 1]:
        value = float(checkpoint.stored[tensor.parts[Role.GLOBAL]].read().reshape(-1)[0])
        divides = tensor.convention == COMPRESSED_TENSORS
        if 0 < value < _TURN if divides else value > _TURN:
            inverted.append(tensor.parts[Role.GLOBAL])
    if inverted:
        effect = f"{plural(len(inverted), 'global scale')} of nvfp4 look inverted: the weights would exceed 2,688"
        yield Finding("scale", True, effect, _in_order(inverted), "Invert them, or name the convention in the config.")
