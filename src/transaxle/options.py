"""The options of the verbs, each written down once: name, kind, default, sentence, spelling on the command line.

Public functions state these options as keyword arguments, and tests hold their signatures against this table. The
command line makes its options from it, errors take from it what an option is called in Python, and the combinations
that no verb takes are here too. Nothing is imported, so anybody may ask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "axes", "choice", "config", "count", "flag", "float_type", "memory", "on", "overwrite", "path", "patterns", "size",
    "switch", "text",
]  # fmt: skip
"""What an option takes; `arguments` has what reads each kind. A switch is True, False or None, a flag True or False."""
SHARD_SIZE = 5_000_000_000
"""Bytes of tensors per file where nothing else is asked for."""
_MANY = 1 << 20


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the verbs."""

    name: str
    """Keyword in Python."""
    kind: Kind
    """What it takes."""
    help: str
    """What it does, as `--help` prints it."""
    default: Any = None
    """Value where it is not given."""
    flags: tuple[str, ...] = ()
    """Spellings on the command line, the first of which messages use; none: that of the name."""
    metavar: str = ""
    """What stands for its value in the help."""
    example: str = ""
    """A value, for errors."""
    choices: tuple[str, ...] = ()
    """Values that the command line takes."""
    most: int = _MANY
    """Largest count."""
    required: bool = False
    """Whether it must be given."""
    common: bool = False
    """Whether the short help of a command with many options shows it."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """Its spellings on the command line."""
        return self.flags or (f"--{self.name.replace('_', '-')}",)


SECTIONS: Mapping[str, tuple[Option, ...]] = {
    "Choosing the target": (
        Option("to", "text", "FORMAT, FORMAT:DIALECT, or DIALECT alone: `hf` is short for safetensors:hf.",
               metavar="TARGET", example="safetensors:hf", required=True, common=True),
        Option("shard_size", "size", "Most bytes of tensors in one written file.  [default: 5GB]", SHARD_SIZE,
               metavar="SIZE"),
        Option("allow_lossy", "flag", "Allow arithmetic that the table marks as lossy.", default=False),
        Option("strict", "flag", "Refuse tensors that have no line in the target dialect.", default=False),
    ),
    "Reading the source": (
        Option("family", "text", "Model family, if it is not recognised.", metavar="NAME", example="qwen3_moe"),
        Option("config", "config", "Read the model's sizes from this config.json.", metavar="FILE", common=True),
        Option("axes", "axes", "Size of one axis, for example g=8.  Repeatable.", flags=("--axis", "--axes"),
               metavar="AXIS=SIZE"),
        Option("rules", "path", "File with families and dialects of your own.", metavar="FILE", common=True),
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
    ),
    "Ranks of the target": (
        Option("tp", "count", "megatron_torch: tensor-parallel ranks; torch_dist: those for which to pad.  "
               "[default: 1]", metavar="N"),
        Option("pp", "count", "megatron_torch only: pipeline stages.  [default: 1]", metavar="N"),
        Option("ep", "count", "megatron_torch only: expert-parallel ranks.  [default: 1]", metavar="N"),
        Option("make_vocab_size_divisible_by", "count", "megatron_torch, torch_dist: pad the vocabulary to N times "
               "--tp.  [default: 128; torch_dist: none]", metavar="N"),
    ),
    "Changing numbers": (
        Option("decode", "float_type", "Decode quantized tensors to this dtype.", choices=("bf16", "fp32"),
               common=True),
        Option("encode", "choice", "Quantize the weights of linear layers in this encoding.", example="mxfp8",
               choices=("float8_block", "mxfp8", "nvfp4"), common=True),
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
    "Writing": (
        Option("overwrite", "overwrite", "Replace the checkpoint at DST once the new one is complete; `=everything` "
               "also deletes the other files in its folder.", default=False, common=True),
        Option("resume", "flag", "Keep finished work if interrupted, and continue it.", default=False, common=True),
        Option("verify", "flag", "Read the result back, and check it against SRC and its manifest.", default=False,
               common=True),
        Option("sync", "flag", "Wait until everything is on disk, or do not.  [default: wait]", default=True),
        Option("values", "flag", "Read all tensors, and show what values each has.", default=False),
    ),
    "Working": (
        Option("jobs", "count", "Threads.  [default: cores, up to 8]", metavar="N", most=1024),
        Option("memory", "memory", "Memory for all buffers together.  [default: 64MB]", metavar="SIZE"),
        Option("on", "on", "Let several processes do it: ray, ray://HOST:PORT or torchrun.", metavar="WHERE",
               common=True),
        Option("items", "count", "Divide their work into so many items.  [default: one for each GiB]", metavar="N"),
        Option("report", "path", "Write an HTML page; FILE must not exist.", metavar="FILE", common=True),
        Option("write", "path", "Write the plan into a file, for `work`.", metavar="PLAN", common=True),
    ),
}  # fmt: skip
"""Title in the help -> its options."""
OPTIONS: Mapping[str, Option] = {option.name: option for section in SECTIONS.values() for option in section}

READING = ("format", "family", "dialect", "config", "axes", "rules", "weights", "optimizer", "average")
"""How a checkpoint is read."""
OPENING = (*READING, "decode", "dtype", "merge", "only", "skip")
"""How a checkpoint is opened: how it is read, and which numbers are other ones then."""
OF_FIRST = frozenset({"dialect", "format", "only", "skip", "dtype", "merge"})
"""Options of names, files, casts and adapters: they hold for the first of two checkpoints only."""
OF_ONE = frozenset({"decode", "weights", "average"})
"""Options that need hold for one of two checkpoints only: the other may have nothing to decode or to choose."""
SHAPING = ("shard_size", "allow_lossy", "strict")
"""How a target is made, as far as that is said by plain data."""
_DEGREES = ("tp", "pp", "ep", "make_vocab_size_divisible_by")
_WRITING = (*OPENING, *SHAPING, "encode", *_DEGREES, "jobs", "memory", "on", "items")
VERBS: Mapping[str, tuple[str, ...]] = {
    "open": OPENING,
    "info": OPENING,
    "plan": ("to", "overwrite", "resume", "sync", "verify", "report", "write", *_WRITING),
    "convert": ("to", "overwrite", "resume", "sync", "verify", "report", *_WRITING),
    "verify": ("jobs", "memory", *OPENING),
    "diff": ("numeric", "report", "jobs", "memory", *OPENING),
    "report": ("overwrite", "values", *OPENING),
}
"""Verb -> its options, in the order of its signature."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A combination of options that no verb takes."""

    names: tuple[str, ...]
    """Options of which at most one may be given; with `needs`, those that need one of these."""
    needs: tuple[str, ...] = ()
    """Options one of which must be given too."""
    why: str = ""
    """End of the sentence."""

    def sentence(self, verb: str, given: Collection[str], spell: Callable[[str], str]) -> str:
        """Say what is wrong with the options that are given; empty where nothing is.

        Args:
            verb: the verb, which may have some of the options only.
            given: names of the options that are given.
            spell: what the caller calls an option.
        """
        chosen = [spell(name) for name in self.names if name in given]
        if not self.needs:
            return f"{' and '.join(chosen)} exclude each other; give only one" if len(chosen) > 1 else ""
        if not chosen or any(name in given for name in self.needs):
            return ""
        have = [name for name in self.names if name in VERBS[verb]]
        *rest, last = (spell(name) for name in self.needs if name in VERBS[verb])
        needed = f"{', '.join(rest)} or {last}" if rest else last
        return f"{' and '.join(map(spell, have))} need{'s' * (len(have) == 1)} {needed}{self.why}"


EXCLUSIONS = (
    Exclusion(("decode", "dtype", "encode", "merge")),
    Exclusion(("only", "skip"), needs=("decode", "encode", "dtype")),
    Exclusion(("items",), needs=("write", "on"), why=": nothing else is divided"),
)
"""Every combination that is refused whatever the checkpoint is."""


def refused(verb: str, given: Collection[str], spell: Callable[[str], str] = str) -> str:
    """Return the sentence against a combination of options; empty where there is none.

    Args:
        verb: one of `VERBS`.
        given: names of the options that are given.
        spell: what the caller calls an option: as it is in Python, `spelled` on the command line.
    """
    return next(filter(None, (each.sentence(verb, given, spell) for each in EXCLUSIONS)), "")


def spelled(name: str) -> str:
    """Return an option as it is written on the command line, without its value."""
    return OPTIONS[name].spellings[0]


def select(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the options of these names, as far as they are given."""
    return {name: options[name] for name in names if name in options}


def _in_python() -> dict[str, str]:
    """Return the options of the command line with the same in Python, with a value where the option has none."""
    keywords = {}
    for option in OPTIONS.values():
        values = {"flag": "=True", "switch": "=True", "overwrite": "=True"}
        for spelling in option.spellings:
            keywords[spelling] = f"{option.name}{values.get(option.kind, '')}"
        if option.kind == "switch" or option.default is True:
            keywords[f"--no-{option.name}"] = f"{option.name}=False"
    return keywords


KEYWORDS: Mapping[str, str] = _in_python()
"""Options of the command line -> the same in Python: a keyword, with its value where the option has none."""
