"""Table of the options of all public functions: name, kind, default, help text and command-line spelling.

Public functions ("verbs") have these options as keyword arguments; tests compare the signatures with this table. The
command line and the hints of errors use the spellings in this table. The module also lists combinations of options that
no verb accepts. This module imports no other module of the package, so every module may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "axes", "choice", "config", "count", "flag", "float_type", "memory", "on", "overwrite", "path", "patterns", "size",
    "switch", "text",
]  # fmt: skip
"""Kind of an option's value, for `transaxle.arguments`. A switch is True, False or None; a flag is True or False."""
SHARD_SIZE = 5_000_000_000
"""Default maximum number of bytes of tensors in one written file."""
_MAX_COUNT = 1 << 20


@dataclass(frozen=True, slots=True)
class Option:
    """A keyword argument of the public functions (`convert`, `load`, …) and its command-line flag."""

    name: str
    """Name of the keyword argument in Python."""
    kind: Kind
    """Kind of the option's value."""
    help: str
    """Help text that the command line shows for the option."""
    default: Any = None
    """Default value of the option."""
    flags: tuple[str, ...] = ()
    """Spellings on the command line; messages use the first spelling. If empty, the only spelling is `--` and
    the name.
    """
    metavar: str = ""
    """Placeholder for the value in the help text."""
    example: str = ""
    """A valid value of the option, shown in error messages."""
    choices: tuple[str, ...] = ()
    """Values that the command line accepts; empty means that any value is accepted."""
    maximum: int = _MAX_COUNT
    """Maximum value, for an option whose kind is `count`."""
    required: bool = False
    """Whether the user must set the option."""
    common: bool = False
    """Whether `--help` shows this option for a command with many options; `--help-all` shows all options."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """Spellings of the option on the command line."""
        return self.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def negation(self) -> str:
        """Spelling of the value False on the command line; empty if False is the default."""
        has_negation = self.kind == "switch" or self.default is True
        return f"--no-{self.name.replace('_', '-')}" if has_negation else ""


SECTIONS: Mapping[str, tuple[Option, ...]] = {
    "Choosing the target": (
        Option("to", "text", "FORMAT, FORMAT:DIALECT, or DIALECT alone: `hf` is short for safetensors:hf.",
               metavar="TARGET", example="safetensors:hf", required=True, common=True),
        Option("shard_size", "size", "Most bytes of tensors per file.  [default: 5GB]", SHARD_SIZE,
               metavar="SIZE"),
        Option("allow_lossy", "flag", "Allow arithmetic that the table marks as lossy.", default=False),
        Option("strict", "flag", "Refuse tensors that have no line in the target dialect.", default=False),
    ),
    "Reading the source": (
        Option("family", "text", "Model family, if it is not recognised.", metavar="NAME", example="qwen3_moe"),
        Option("config", "config", "Read the model's sizes from this config.json.", metavar="FILE", common=True),
        Option("axes", "axes", "Size of one axis, for example g=8.  Repeatable.", flags=("--axis", "--axes"),
               metavar="AXIS=SIZE"),
        Option("rules", "path", "File with families and dialects of your own.", metavar="FILE"),
        Option("dialect", "text", "Dialect of the source, if it is not recognised.", flags=("--from", "--dialect"),
               metavar="DIALECT", example="hf"),
        Option("format", "text", "Format of the source, if a folder holds several.", metavar="FORMAT",
               example="safetensors"),
        Option("weights", "choice", "DeepSpeed, Megatron: read the optimizer's fp32 weights, or the model's own.",
               choices=("fp32", "lp")),
        Option("optimizer", "switch", "Include the optimizer state, or leave it out.  [default: include it, except "
               "in a model for a hub]"),
        Option("average", "flag", "DeepSpeed, Megatron: where replicas differ between ranks, use their mean.",
               default=False, flags=("--average-replicas", "--average")),
        Option("check_source", "flag", "Check what is read against the source's own hashes, if it has any, or do not.  "
               "[default: check]", default=True),
        Option("ranks", "text", "Names of the torch files of a job's ranks, with {} for the rank.",
               metavar="TEMPLATE", example="model_rank{}.pt"),
        Option("graft", "path", "Take tensors that SRC lacks (MTP layers, a tower) from this checkpoint of the model.",
               metavar="BASE"),
        Option("graft_over", "patterns", "With --graft: also replace tensors of SRC with these names.  Repeatable.",
               (), metavar="PATTERN"),
    ),
    "Ranks of the target": (
        Option("tp", "count", "megatron_torch, vllm_sharded: tensor-parallel ranks; torch_dist: those for which to "
               "pad.  [default: 1]", metavar="N"),
        Option("pp", "count", "megatron_torch only: pipeline stages.  [default: 1]", metavar="N"),
        Option("ep", "count", "megatron_torch: expert-parallel ranks; vllm_sharded: as --tp, if vLLM divides whole "
               "experts over its ranks.  [default: 1]", metavar="N"),
        Option("dp", "count", "ranks only: FSDP ranks, with files for each.  [default: 1]", metavar="N"),
        Option("device", "text", "ranks only: device of the trainer's mesh.  [default: cuda]", metavar="DEVICE",
               example="cpu"),
        Option("make_vocab_size_divisible_by", "count", "megatron_torch, torch_dist: pad the vocabulary to N times "
               "--tp.  [default: 128; torch_dist: none]", metavar="N"),
    ),
    "Changing numbers": (
        Option("decode", "float_type", "Decode quantized tensors to this dtype.", choices=("bf16", "fp16", "fp32"),
               common=True),
        Option("encode", "choice", "Quantize the weights of linear layers in this encoding.", example="mxfp8",
               choices=("float8_block", "mxfp8", "nvfp4", "int4"), common=True),
        Option("group_size", "count", "int4 only: values of a row that share one scale.  [default: 32]",
               flags=("--group-size", "--group"), metavar="N", example="128"),
        Option("restate", "choice", "Store quantized tensors in this convention or encoding, with the same values.",
               example="modelopt", common=True, choices=(
                   "compressed_tensors", "modelopt", "deepseek", "gpt_oss", "te", "torchao", "transformers_fp8",
                   "mxfp8", "float8_block", "nvfp4", "int8", "bf16",
               )),
        Option("dtype", "float_type", "Cast plain floating-point tensors to this type.",
               choices=("bf16", "fp16", "fp32"), common=True),
        Option("merge", "path", "Merge this LoRA adapter of peft (a folder) into the weights.", metavar="ADAPTER",
               common=True),
        Option("only", "patterns", "Decode, encode or cast only tensors with these names; * stands for any text.  "
               "Repeatable.", (), metavar="PATTERN"),
        Option("skip", "patterns", "Leave tensors with these names unchanged.  Repeatable.", (), metavar="PATTERN"),
    ),
    "Comparing": (
        Option("numeric", "flag", "Compare decoded values, also across number formats, and measure the differences.",
               default=False),
    ),
    "Checking for a reader": (
        Option("reader", "text", "Then check that this program, such as transformers or vllm, loads the result; exit "
               "with 1 if not.", flags=("--for",), metavar="READER", example="transformers", common=True),
        Option("python", "path", "Python of the environment in which the reader is installed.  [default: this one]",
               metavar="PATH"),
        Option("time_limit", "count", "Seconds after which the reader is stopped.  [default: 600]", metavar="SECONDS",
               maximum=86_400),
    ),
    "Writing": (
        Option("overwrite", "overwrite", "Replace the checkpoint at DST once the new one is complete; `=everything` "
               "also deletes the other files in its folder.", default=False, common=True),
        Option("resume", "flag", "Keep finished work if interrupted, and continue it.", default=False, common=True),
        Option("verify", "flag", "Read the result back, and check it against SRC and its manifest.", default=False,
               common=True),
        Option("sync", "flag", "Sync all files to disk before the target appears, or do not.  [default: sync]",
               default=True),
        Option("values", "flag", "Read all tensors, and show statistics of their values.", default=False),
    ),
    "Serving": (
        Option("name", "text", "Name under which clients ask for the model.  [default: the folder's name]",
               metavar="ORG/MODEL", example="my-org/my-model", common=True),
        Option("host", "text", "Address on which to listen; if not the loopback, each request needs a token.  "
               "[default: 127.0.0.1]", metavar="ADDRESS", example="127.0.0.1", common=True),
        Option("port", "count", "Port on which to listen.  [default: a free one]", metavar="N", maximum=65_535,
               common=True),
        Option("token_file", "path", "File with the token that each request needs.  [default: none on the loopback, "
               "elsewhere a new one]", metavar="FILE", common=True),
    ),
    "Working": (
        Option("jobs", "count", "Threads.  [default: cores, up to 8]", metavar="N", maximum=1024),
        Option("memory", "memory", "Memory for all buffers together.  [default: 64MB]", metavar="SIZE"),
        Option("on", "on", "Let several processes do the work: ray, ray://HOST:PORT or torchrun.", metavar="WHERE",
               common=True),
        Option("items", "count", "Divide the work of --on or --write into N items.  [default: one per GiB]",
               metavar="N"),
        Option("report", "path", "Write an HTML page; FILE must not exist.", metavar="FILE", common=True),
        Option("write", "path", "Write the plan into a file, for `work`.", metavar="PLAN", common=True),
    ),
}  # fmt: skip
"""Title of a section in the help text -> options of the section."""
OPTIONS: Mapping[str, Option] = {option.name: option for section in SECTIONS.values() for option in section}

READING = ("format", "family", "dialect", "config", "axes", "rules", "weights", "optimizer", "average", "ranks")
"""Options that determine how a checkpoint is recognised and read."""
GRAFTING = ("graft", "graft_over")
"""Options that add tensors of another checkpoint."""
OPENING = (*READING, *GRAFTING, "decode", "restate", "dtype", "merge", "only", "skip")
"""Options of `open`: the `READING` options, and options that change or select the values that are read."""
OF_FIRST = frozenset({
    "dialect", "format", "graft", "graft_over", "ranks", "only", "skip", "dtype", "merge", "restate",
})  # fmt: skip
"""Options that apply only to the first checkpoint, if two checkpoints are compared."""
OF_ONE = frozenset({"decode", "weights", "average"})
"""Options that need not apply to both of two compared checkpoints (one may have nothing to decode or choose)."""
SHAPING = ("shard_size", "allow_lossy", "strict", "check_source")
"""Options of a conversion's plan whose values are plain data."""
PLACING = ("overwrite", "resume")
"""Options on what is at the target already."""
_CHECKING = ("reader", "python", "time_limit")
_DEGREES = ("tp", "pp", "ep", "dp", "device", "make_vocab_size_divisible_by")
_WRITING = (*OPENING, *SHAPING, "encode", "group_size", *_DEGREES, "jobs", "memory", "on", "items")
VERBS: Mapping[str, tuple[str, ...]] = {
    "open": OPENING,
    "info": OPENING,
    "check": ("python", "time_limit", *READING),
    "plan": ("to", "overwrite", "resume", "sync", "verify", *_CHECKING, "report", "write", *_WRITING),
    "convert": ("to", "overwrite", "resume", "sync", "verify", *_CHECKING, "report", *_WRITING),
    "supports": (
        "family",
        "axes",
        "rules",
        "decode",
        "restate",
        "dtype",
        "only",
        "skip",
        "allow_lossy",
        "strict",
        "encode",
        "group_size",
        *_DEGREES,
    ),
    "serve": (
        "name",
        "host",
        "port",
        "token_file",
        *OPENING,
        *SHAPING,
        "encode",
        "group_size",
        "jobs",
        "memory",
    ),
    "verify": ("jobs", "memory", *OPENING),
    "diff": ("numeric", "report", "jobs", "memory", *OPENING),
    "report": ("overwrite", "values", *OPENING),
}
"""Public function -> its options, in the order of its signature."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A combination of options that no verb accepts."""

    names: tuple[str, ...]
    """Options that exclude each other; or, if `needs` is not empty, options that require one of the options in
    `needs`.
    """
    needs: tuple[str, ...] = ()
    """Any of the options in `names` requires at least one of these options; if empty, the options in `names` exclude
    each other.
    """
    why: str = ""
    """Reason that is appended to the error message."""

    def sentence(self, verb: str, given_names: Collection[str], spell: Callable[[str], str]) -> str:
        """Return the error message for the options that the user set; empty if this exclusion allows them.

        Args:
            verb: name of the public function, which may have only some of the options in `names`.
            given_names: names of the options that the user set.
            spell: function that returns an option's spelling for the message.
        """
        chosen = [spell(name) for name in self.names if name in given_names]
        if not self.needs:
            return f"{' and '.join(chosen)} exclude each other; give only one" if len(chosen) > 1 else ""
        if not chosen or any(name in given_names for name in self.needs) or not {*self.needs} & {*VERBS[verb]}:
            return ""
        available = [name for name in self.names if name in VERBS[verb]]
        *needed_first, needed_last = (spell(name) for name in self.needs if name in VERBS[verb])
        needed = f"{', '.join(needed_first)} or {needed_last}" if needed_first else needed_last
        return f"{' and '.join(map(spell, available))} need{'s' * (len(available) == 1)} {needed}{self.why}"


EXCLUSIONS = (
    Exclusion(("decode", "dtype", "encode", "merge", "restate")),
    Exclusion(("only", "skip"), needs=("decode", "encode", "dtype")),
    Exclusion(("group_size",), needs=("encode",)),
    Exclusion(("graft_over",), needs=("graft",)),
    Exclusion(("python", "time_limit"), needs=("reader",)),
    Exclusion(("items",), needs=("write", "on"), why=": nothing else is divided"),
)
"""All combinations of options that are refused for every checkpoint."""


def combination_error(verb: str, given_names: Collection[str], spell: Callable[[str], str] = str) -> str:
    """Return the error message for a combination of options; empty if no exclusion forbids the combination.

    Args:
        verb: one of `VERBS`.
        given_names: names of the options that the user set.
        spell: function that returns an option's spelling: its name (in Python) or `command_spelling` (command line).
    """
    return next(filter(None, (each.sentence(verb, given_names, spell) for each in EXCLUSIONS)), "")


def command_spelling(name: str) -> str:
    """Return the spelling of an option on the command line that messages use, without a value."""
    return OPTIONS[name].spellings[0]


def select(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the entries of `options` whose names are among `names`."""
    return {name: options[name] for name in names if name in options}


def select_opening(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a conversion with which its source is opened; with `encode`, patterns are of the target."""
    return select(options, (*READING, *GRAFTING) if "encode" in options else OPENING)


def _in_python() -> dict[str, str]:
    """Return command-line spelling -> Python keyword; `=VALUE` is part of the keyword if the spelling has no value."""
    keywords = {}
    for option in OPTIONS.values():
        values = {"flag": "=True", "switch": "=True", "overwrite": "=True"}
        for spelling in option.spellings:
            keywords[spelling] = f"{option.name}{values.get(option.kind, '')}"
        if option.negation:
            keywords[option.negation] = f"{option.name}=False"
    return keywords


KEYWORDS: Mapping[str, str] = _in_python()
"""Command-line spelling -> Python keyword; `=VALUE` is part of the keyword if the spelling has no value."""
