"""The golden cases: readable name -> the steps, each a verb of `record.STEPS` with its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.golden.sources import SOURCES


class Step(NamedTuple):
    """One call of a case."""

    verb: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


Case = tuple[Step, ...]


def do(verb: str, *arguments: Any, **options: Any) -> Step:
    return Step(verb, arguments, options)


def sources(case: Case) -> list[str]:
    """The names of the checkpoints and files that a case begins with."""
    words = [word for step in case for word in _words((step.arguments, step.options))]
    return sorted({name for name in SOURCES if any(word == name or word.startswith(f"{name}/") for word in words)})


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _words(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _words(each)


def _asked(source: str, **options: Any) -> Case:
    """Plan a conversion, then carry it out: the refusals of both are kept."""
    planned = {
        name: value for name, value in options.items() if name not in {"verify", "sync", "on", "items", "threads"}
    }
    return do("plan", source, **planned), do("convert", source, **options)


MODELS = (
    "llama", "qwen3", "qwen3_moe", "llama_fp8", "deepseek_v3", "gpt_oss", "zero", "titan", "torch_dist", "ranks",
    "ranks_moe", "bin", "llama.pt", "unknown",
)  # fmt: skip
TARGETS = (
    "hf", "safetensors:transformers", "torchtitan", "automodel", "te", "vllm", "safetensors:identity", "torch:hf",
    "dcp:torchtitan@0.2", "dcp:hf", "torch_dist", "megatron_torch", "deepspeed-universal",
)  # fmt: skip
_PAIRS = {f"{source}--{to}": _asked(source, to=to) for source in MODELS for to in TARGETS}

_OPTIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "shards": ("llama", {"to": "hf", "shard_size": 40_000}),
    "shards of experts": ("qwen3_moe", {"to": "torchtitan", "shard_size": "8KB"}),
    "shards of dcp": ("qwen3_moe", {"to": "dcp:torchtitan", "shard_size": "8KB"}),
    "shards of torch": ("llama", {"to": "torch:hf", "shard_size": "40KB"}),
    "no size of shards": ("llama", {"to": "hf", "shard_size": "many"}),
    "shards of nothing": ("llama", {"to": "hf", "shard_size": 0}),
    "little memory": ("deepseek_v3", {"to": "torchtitan", "memory": "400KB", "jobs": 1}),
    "too little memory": ("llama", {"to": "hf", "memory": 10}),
    "no threads": ("llama", {"to": "hf", "jobs": 0}),
    "one thread": ("qwen3_moe", {"to": "vllm", "jobs": 1}),
    "synced": ("llama", {"to": "torchtitan", "sync": True}),
    "verified": ("qwen3_moe", {"to": "dcp:torchtitan", "verify": True}),
    "verified, decoded": ("llama_fp8", {"to": "hf", "decode": "bf16", "verify": True}),
    "verified, encoded": ("llama", {"to": "hf", "encode": "mxfp8", "verify": True}),
    "verified, the optimizer": ("zero", {"to": "dcp:torchtitan", "verify": True}),
    "verified, cast": ("llama", {"to": "hf", "dtype": "fp16", "verify": True}),
    "verified, ranks": ("qwen3_moe", {"to": "megatron_torch", "tp": 2, "verify": True}),
    "strict": ("unknown", {"to": "hf", "strict": True}),
    "strict, complete": ("llama", {"to": "torchtitan", "strict": True}),
    "allow_lossy": ("deepseek_v3", {"to": "torchtitan", "allow_lossy": True}),
    "no file for several": ("llama", {"to": "safetensors:hf", "target": "out.safetensors"}),
    "one file of torch": ("llama", {"to": "torch:hf", "target": "out.pt"}),
    "one file of another kind": ("llama", {"to": "dcp:hf", "target": "out.pt"}),
    "one file for ranks": ("llama", {"to": "megatron_torch", "target": "out.bin"}),
    "onto itself": ("llama", {"to": "hf", "target": "llama"}),
    "inside itself": ("llama", {"to": "hf", "target": "llama/inner"}),
    "nowhere": ("llama", {"to": "hf", "target": "no/such/folder"}),
    "from nowhere": ("nothing", {"to": "hf"}),
    "no such format": ("llama", {"to": "gguf:hf"}),
    "no such dialect": ("llama", {"to": "safetensors:nonsense"}),
    "a mistyped dialect": ("llama", {"to": "dcp:torchtitn"}),
    "an empty target": ("llama", {"to": ""}),
    "a dialect of others": ("qwen3_moe", {"to": "safetensors:stacked"}),
    "a damaged source": ("damaged", {"to": "hf"}),
    "an adapter": ("adapter", {"to": "torchtitan"}),
    "tp": ("llama", {"to": "megatron_torch", "tp": 2}),
    "tp, pp": ("qwen3", {"to": "megatron_torch", "tp": 2, "pp": 2}),
    "ep": ("qwen3_moe", {"to": "megatron_torch", "ep": 4}),
    "tp, ep": ("qwen3_moe", {"to": "megatron_torch", "tp": 2, "ep": 2}),
    "tp that does not divide": ("llama", {"to": "megatron_torch", "tp": 3}),
    "pp that does not divide": ("llama", {"to": "megatron_torch", "pp": 3}),
    "ep without experts": ("llama", {"to": "megatron_torch", "ep": 2}),
    "tp of torch_dist": ("llama", {"to": "torch_dist", "tp": 2}),
    "tp and padding of torch_dist": ("qwen3_moe", {"to": "torch_dist", "tp": 2, "make_vocab_size_divisible_by": 16}),
    "pp of torch_dist": ("llama", {"to": "torch_dist", "pp": 2}),
    "ep of torch_dist": ("qwen3_moe", {"to": "torch_dist", "ep": 2}),
    "padding": ("qwen3_moe", {"to": "megatron_torch", "make_vocab_size_divisible_by": 16, "tp": 2}),
    "tp of files without ranks": ("llama", {"to": "hf", "tp": 2}),
    "padding of dcp": ("llama", {"to": "dcp:torchtitan", "make_vocab_size_divisible_by": 64}),
    "no ranks": ("llama", {"to": "megatron_torch", "tp": 0}),
    "half a rank": ("llama", {"to": "megatron_torch", "tp": 1.5}),
    "other ranks": ("ranks", {"to": "megatron_torch", "tp": 1, "pp": 4}),
    "fewer ranks": ("ranks_moe", {"to": "megatron_torch", "ep": 1}),
    "ranks without their optimizer": ("ranks", {"to": "dcp:hf", "optimizer": False}),
    "rank files": ("rank_files", {"to": "hf"}),
    "rank files, the optimizer": ("rank_files", {"to": "dcp:hf", "optimizer": True, "verify": True}),
    "rank files to DeepSpeed": ("rank_files", {"to": "deepspeed-universal"}),
    "rank files without one": ("missing_rank", {"to": "hf"}),
    "ranks' own weights": ("ranks", {"to": "dcp:hf", "weights": "lp"}),
    "weights=lp": ("zero", {"to": "hf", "weights": "lp"}),
    "weights=fp32": ("zero", {"to": "hf", "weights": "fp32"}),
    "weights of another format": ("llama", {"to": "hf", "weights": "lp"}),
    "weights of no kind": ("zero", {"to": "hf", "weights": "int8"}),
    "optimizer to hf": ("zero", {"to": "hf", "optimizer": True}),
    "optimizer of none": ("llama", {"to": "dcp:hf", "optimizer": True}),
    "no optimizer": ("zero", {"to": "deepspeed-universal", "optimizer": False}),
    "no optimizer of titan": ("titan", {"to": "dcp:hf", "optimizer": False}),
    "optimizer of titan to ranks": ("titan", {"to": "megatron_torch", "tp": 2, "ep": 2}),
    "optimizer and dtype": ("titan", {"to": "dcp:torchtitan", "dtype": "fp32"}),
    "replicas that differ": ("drifted", {"to": "deepspeed-universal"}),
    "average": ("drifted", {"to": "deepspeed-universal", "average": True, "verify": True}),
    "average of weights": ("drifted_far", {"to": "deepspeed-universal", "average": True}),
    "average to torch": ("drifted", {"to": "torch:identity", "average": True, "optimizer": False}),
    "average of another format": ("llama", {"to": "hf", "average": True}),
    "merge": ("llama", {"to": "hf", "merge": "adapter", "verify": True}),
    "merge into torchtitan": ("llama", {"to": "dcp:torchtitan", "merge": "adapter"}),
    "merge into quantized": ("llama_fp8", {"to": "hf", "merge": "adapter"}),
    "merge into others": ("qwen3_moe", {"to": "hf", "merge": "adapter"}),
    "merge what is no adapter": ("llama", {"to": "hf", "merge": "qwen3"}),
    "merge nothing": ("llama", {"to": "hf", "merge": "nothing"}),
    "merge and only": ("llama", {"to": "hf", "merge": "adapter", "only": "*q_proj*"}),
    "config": ("llama.pt", {"to": "dcp:torchtitan", "config": "llama.json"}),
    "config of nothing": ("llama.pt", {"to": "dcp:torchtitan", "config": "nothing.json"}),
    "config that contradicts": ("qwen3_moe", {"to": "torchtitan", "config": "llama.json"}),
    "config as a mapping": ("llama.pt", {"to": "torchtitan", "config": {"model_type": "llama"}}),
    "axes": ("llama.pt", {"to": "te", "family": "llama", "axes": {"g": 2, "r": 2}}),
    "axes that contradict": ("llama", {"to": "te", "axes": {"g": 3}}),
    "axes that are too few": ("llama.pt", {"to": "te", "family": "llama"}),
    "an axis of no family": ("llama", {"to": "te", "axes": {"zz": 3}}),
    "family": ("llama.pt", {"to": "vllm", "family": "llama", "axes": {"g": 2, "r": 2, "c": 32}}),
    "another family": ("llama", {"to": "torchtitan", "family": "qwen3"}),
    "no such family": ("llama", {"to": "torchtitan", "family": "lama"}),
    "dialect": ("llama", {"to": "torchtitan", "dialect": "hf"}),
    "another dialect": ("llama", {"to": "hf", "dialect": "torchtitan"}),
    "no such dialect of the source": ("llama", {"to": "hf", "dialect": "nonsense"}),
    "format": ("llama", {"to": "torchtitan", "format": "safetensors"}),
    "another format": ("llama", {"to": "torchtitan", "format": "dcp"}),
    "no such format of the source": ("llama", {"to": "torchtitan", "format": "gguf"}),
    "rules": ("pair", {"to": "safetensors:two", "rules": "pair.rules", "family": "pair"}),
    "rules of the other dialect": ("pair", {"to": "safetensors:two", "rules": "pair.rules", "dialect": "two"}),
    "rules of nothing": ("pair", {"to": "safetensors:two", "rules": "nothing.rules"}),
    "rules that are none": ("pair", {"to": "safetensors:two", "rules": "llama.json"}),
    "no rules": ("pair", {"to": "safetensors:two"}),
    "an unknown argument": ("llama", {"to": "hf", "shard": 5}),
    "a text for a flag": ("llama", {"to": "hf", "strict": "yes"}),
    "overwrite of another kind": ("llama", {"to": "hf", "overwrite": "all"}),
    "items without on": ("llama", {"to": "hf", "items": 2}),
    "on another machine": ("llama", {"to": "hf", "on": "slurm"}),
    "on and verify": ("llama", {"to": "hf", "on": "ray", "verify": True}),
    "on a number": ("llama", {"to": "hf", "on": 3}),
}
_OPTIONS_CASES = {f"{source} ({name})": _asked(source, **options) for name, (source, options) in _OPTIONS.items()}

_RECODED: Mapping[str, dict[str, Any]] = {
    "decode=bf16": {"decode": "bf16"},
    "decode=fp32": {"decode": "fp32"},
    "decode=fp16": {"decode": "fp16"},
    "decode, only": {"decode": "bf16", "only": "*mlp*"},
    "decode, skip": {"decode": "bf16", "skip": ["*down*", "*o_proj*"]},
    "decode, only nothing": {"decode": "bf16", "only": "nothing*"},
    "encode=float8_block": {"encode": "float8_block"},
    "encode=mxfp8": {"encode": "mxfp8"},
    "encode=nvfp4": {"encode": "nvfp4"},
    "encode=int4": {"encode": "int4"},
    "encode, only": {"encode": "mxfp8", "only": ["*q_proj*", "*up_proj*"]},
    "encode, skip": {"encode": "nvfp4", "skip": "*layers.0*"},
    "dtype=fp32": {"dtype": "fp32"},
    "dtype=fp16": {"dtype": "fp16"},
    "dtype=fp8": {"dtype": "fp8"},
    "dtype, only": {"dtype": "fp32", "only": "*norm*"},
    "dtype, skip": {"dtype": "fp32", "skip": "*norm*"},
    "decode and encode": {"decode": "bf16", "encode": "mxfp8"},
    "decode and dtype": {"decode": "bf16", "dtype": "fp32"},
    "encode and merge": {"encode": "mxfp8", "merge": "adapter"},
    "everything": {"decode": "bf16", "dtype": "fp32", "encode": "mxfp8", "merge": "adapter"},
    "only": {"only": "*"},
    "skip": {"skip": "*"},
}
_RECODED_CASES = {
    f"{source} ({name})": _asked(source, to="hf", **options)
    for source in ("llama", "llama_fp8", "gpt_oss", "deepseek_v3", "unknown")
    for name, options in _RECODED.items()
}
_ELSEWHERE = {
    f"{source}--{to} ({name})": _asked(source, to=to, **options)
    for source, to, name, options in (
        ("deepseek_v3", "dcp:torchtitan", "decode", {"decode": "bf16"}),
        ("deepseek_v3", "torch_dist", "decode", {"decode": "bf16"}),
        ("gpt_oss", "torchtitan", "decode", {"decode": "bf16"}),
        ("gpt_oss", "te", "decode", {"decode": "fp32"}),
        ("gpt_oss", "vllm", "decode", {"decode": "bf16"}),
        ("llama_fp8", "megatron_torch", "decode", {"decode": "bf16", "tp": 2}),
        ("llama", "torchtitan", "encode", {"encode": "float8_block"}),
        ("llama", "dcp:torchtitan", "encode", {"encode": "mxfp8"}),
        ("llama", "vllm", "encode", {"encode": "nvfp4"}),
        ("llama", "megatron_torch", "encode", {"encode": "mxfp8", "tp": 2}),
        ("qwen3_moe", "torchtitan", "encode", {"encode": "mxfp8"}),
        ("qwen3_moe", "dcp:torchtitan", "dtype", {"dtype": "fp32"}),
        ("zero", "hf", "dtype", {"dtype": "bf16"}),
        ("zero", "dcp:torchtitan", "dtype", {"dtype": "bf16"}),
        ("titan", "hf", "encode", {"encode": "mxfp8"}),
        ("ranks", "hf", "dtype", {"dtype": "fp16"}),
    )
}

_TWO_STEPS: Mapping[str, Case] = {
    **{
        f"llama {encoding}, {name}": (do("convert", "llama", "made", to="hf", encode=encoding), *steps)
        for encoding in ("float8_block", "mxfp8", "nvfp4")
        for name, steps in {
            "decoded": (do("convert", "made", to="hf", decode="bf16"),),
            "to torchtitan": (do("convert", "made", to="dcp:torchtitan"),),
            "looked at": (do("info", "made"), do("verify", "made"), do("diff", "llama", "made", numeric=True)),
            "loaded": (do("load", "made", "hf", shapes_of="llama", decode="bf16"),),
            "encoded again": (do("convert", "made", to="hf", encode=encoding),),
        }.items()
    },
    "there and back, torchtitan": (
        do("convert", "qwen3_moe", "made", to="dcp:torchtitan"),
        do("convert", "made", to="hf"),
        do("verify", "qwen3_moe", "out"),
        do("diff", "qwen3_moe", "made"),
    ),
    "there and back, ranks": (
        do("convert", "qwen3_moe", "made", to="megatron_torch", tp=2, pp=2, ep=2),
        do("convert", "made", to="hf"),
        do("diff", "qwen3_moe", "out"),
    ),
    "there and back, universal": (
        do("convert", "zero", "made", to="deepspeed-universal"),
        do("convert", "made", to="dcp:torchtitan"),
        do("info", "made"),
        do("diff", "zero", "out"),
    ),
    "exists": (do("convert", "llama", to="hf"), do("plan", "qwen3", to="hf"), do("convert", "qwen3", to="hf")),
    "overwrite": (do("convert", "llama", to="hf"), do("convert", "qwen3", to="torch:hf", overwrite=True)),
    "overwrite a file": (do("write", "out.pt", "notes"), do("convert", "llama", "out.pt", to="torch", overwrite=True)),
    "overwrite other files": (
        do("convert", "llama", to="hf"),
        do("write", "out/notes.txt", "mine"),
        do("convert", "qwen3", to="hf", overwrite=True),
    ),
    "overwrite everything": (
        do("convert", "llama", to="hf"),
        do("write", "out/notes.txt", "mine"),
        do("convert", "qwen3", to="hf", overwrite="everything"),
    ),
    "overwrite what is no checkpoint": (
        do("write", "out/notes.txt", "mine"),
        do("plan", "llama", to="hf", overwrite=True),
        do("convert", "llama", to="hf", overwrite=True),
    ),
    "stopped": (do("stop", "llama", to="hf", after=80_000), do("convert", "llama", to="hf")),
    "resume": (
        do("stop", "llama", to="hf", after=80_000, resume=True, shard_size="60KB"),
        do("clean", "out", remove=False),
        do("plan", "llama", to="hf", resume=True, shard_size="60KB"),
        do("convert", "llama", to="hf", resume=True, shard_size="60KB", jobs=1),
    ),
    "resume with other options": (
        do("stop", "llama", to="hf", after=80_000, resume=True),
        do("convert", "llama", to="torch:hf", resume=True),
        do("convert", "llama", to="hf"),
        do("clean", "."),
    ),
    "resume what is done": (do("convert", "llama", to="hf"), do("convert", "llama", to="hf", resume=True)),
    "resume what is another's": (do("convert", "qwen3", to="hf"), do("convert", "llama", to="hf", resume=True)),
    "resume nothing": (do("convert", "llama", to="dcp:torchtitan", resume=True),),
    "resume and encode": (
        do("stop", "llama", to="hf", after=60_000, resume=True, encode="mxfp8"),
        do("convert", "llama", to="hf", resume=True, encode="mxfp8", jobs=1),
    ),
    "a damaged result": (
        do("convert", "llama", to="hf"),
        do("flip", "out/model.safetensors", -9),
        do("verify", "out"),
        do("verify", "llama", "out"),
        do("diff", "llama", "out"),
        do("convert", "out", "again", to="torchtitan"),
    ),
    "a damaged manifest": (
        do("convert", "llama", to="hf"),
        do("write", "out/transaxle.json", "{"),
        do("verify", "out"),
        do("info", "out"),
    ),
    "a missing file": (
        do("convert", "llama", to="hf", shard_size="60KB"),
        do("remove", "out/model-00002-of-00004.safetensors"),
        do("verify", "out"),
    ),
    "opened": (do("convert_opened", "llama", to="torchtitan", reading={}, verify=True),),
    "opened, decoded": (do("convert_opened", "llama_fp8", to="hf", reading={"decode": "bf16"}),),
    "opened, with more": (do("convert_opened", "llama_fp8", to="hf", reading={}, decode="bf16"),),
    "opened, on": (do("convert_opened", "llama", to="hf", reading={}, on="torchrun"),),
}

_ON: Mapping[str, Case] = {
    "on a pool": (do("convert_on", "llama", to="hf", items=3),),
    "on a pool, shards": (do("convert_on", "qwen3_moe", to="dcp:torchtitan", items=5, shard_size="8KB"),),
    "on a pool, encode": (do("convert_on", "llama", to="hf", items=3, encode="float8_block"),),
    "on a pool, decode": (do("convert_on", "llama_fp8", to="torchtitan", items=3, decode="bf16", jobs=1),),
    "on a pool, merge": (do("convert_on", "llama", to="hf", items=2, merge="adapter"),),
    "on a pool, the optimizer": (do("convert_on", "zero", to="dcp:torchtitan", items=4),),
    "on a pool, ranks": (do("convert_on", "qwen3_moe", to="megatron_torch", items=4, tp=2),),
    "on a pool, universal": (do("convert_on", "zero", to="deepspeed-universal", items=2),),
    "on a pool, average": (do("convert_on", "drifted", to="deepspeed-universal", items=2, average=True),),
    "on a pool, little memory": (do("convert_on", "deepseek_v3", to="hf", items=2, memory="400KB", jobs=1),),
    "on a pool, one file": (do("convert_on", "llama", "out.safetensors", to="hf", items=2),),
    "on a pool, no items": (do("convert_on", "llama", to="hf", items=0),),
    "on a pool, verify": (do("convert_on", "llama", to="hf", verify=True),),
    "on a pool, refused": (do("convert_on", "llama", to="megatron_torch", tp=3),),
    "on a pool, exists": (do("convert", "llama", to="hf"), do("convert_on", "llama", to="hf")),
    "on a pool, overwrite": (do("convert", "qwen3", to="hf"), do("convert_on", "llama", to="hf", overwrite=True)),
    "on a pool, resume what is done": (
        do("convert", "llama", to="hf"),
        do("convert_on", "llama", to="hf", resume=True),
    ),
    "on a pool, resume": (
        do("stop", "llama", to="hf", after=80_000, resume=True),
        do("convert_on", "llama", to="hf", resume=True, items=2, threads=1),
    ),
}

_LIVE: Mapping[str, Case] = {
    **{
        f"load {source} as {dialect}": (do("load", source, dialect),)
        for source, dialects in {
            "llama": ("hf", "transformers", "torchtitan", "te", "vllm"),
            "qwen3": ("hf", "torchtitan", "megatron"),
            "qwen3_moe": ("hf", "transformers", "torchtitan", "automodel", "te"),
            "deepseek_v3": ("hf", "vllm"),
            "gpt_oss": ("hf", "transformers"),
            "zero": ("hf", "torchtitan"),
            "titan": ("hf", "torchtitan"),
            "torch_dist": ("hf",),
            "ranks": ("hf", "te"),
            "ranks_moe": ("hf", "torchtitan"),
            "bin": ("torchtitan",),
            "unknown": ("identity",),
        }.items()
        for dialect in dialects
    },
    **{
        f"load {source} as {dialect} with its optimizer": (do("load", source, dialect, adam=True),)
        for source in ("zero", "titan", "ranks", "ranks_moe", "llama")
        for dialect in ("hf", "torchtitan")
    },
    "load, decoded": (do("load", "deepseek_v3", "hf", decode="bf16"),),
    "load, decoded in torchtitan": (do("load", "llama_fp8", "torchtitan", shapes_of="llama", decode="bf16"),),
    "load, another type": (do("load", "llama", "hf", cast="float32"),),
    "load, cast": (do("load", "llama", "hf", cast="float32", dtype="fp32"),),
    "load, cast and rounded": (do("load", "zero", "torchtitan", cast="bfloat16", dtype="bf16"),),
    "load, no such type": (do("load", "llama", "hf", decode="int8"),),
    "load, another model": (do("load", "llama", "hf", shapes_of="qwen3"),),
    "load, another model, not strict": (do("load", "llama", "hf", shapes_of="qwen3", strict=False),),
    "load, another size": (do("load", "llama", "hf", shapes_of="llama_fp8"),),
    "load, no optimizer in it, not strict": (do("load", "llama", "hf", adam=True, strict=False),),
    "load, damaged": (do("load", "damaged", "hf", shapes_of="qwen3_moe"),),
    "load, an unknown argument": (do("load", "llama", "hf", verify=True),),
    "load, another family": (do("load", "llama", "hf", family="qwen3_moe"),),
    "load, another dialect": (do("load", "llama", "hf", dialect="torchtitan"),),
    "load, a file without config": (do("load", "llama.pt", "te", shapes_of="llama"),),
    "load, a file with config": (do("load", "llama.pt", "te", shapes_of="llama", config="llama.json"),),
    "load, no threads": (do("load", "llama", "hf", jobs=0),),
    **{
        f"save {source} as {to}": (do("save", source, to=to),)
        for source in ("llama", "qwen3", "qwen3_moe")
        for to in ("hf", "dcp:torchtitan", "torch", "torch_dist", "megatron_torch", "deepspeed-universal", "gguf")
    },
    **{
        f"save {source} with its optimizer as {to}": (do("save", source, adam=True, to=to), do("info", "out"))
        for source in ("llama", "qwen3_moe")
        for to in ("hf", "dcp:torchtitan", "torch_dist", "megatron_torch", "deepspeed-universal", "torch")
    },
    "save, shards": (do("save", "llama", to="hf", shard_size="60KB"),),
    "save, verified": (do("save", "llama", "torchtitan", to="dcp:hf", verify=True),),
    "save, synced": (do("save", "llama", to="hf", sync=True),),
    "save, extra": (do("save", "llama", to="dcp:hf", extra={"step": 7}),),
    "save, extra into one file": (do("save", "llama", to="hf", extra={"step": 7}),),
    "save, exists": (do("save", "llama"), do("save", "qwen3")),
    "save, overwrite": (do("save", "llama"), do("save", "qwen3", overwrite=True)),
    "save, no config": (do("save", "llama", to="te", config=None),),
    "save, family without config": (do("save", "llama", to="te", config=None, family="llama"),),
    "save, another family": (do("save", "llama", to="te", family="qwen3_moe"),),
    "save, no such dialect": (do("save", "llama", to="hf", dialect="nonsense"),),
    "save, quantized": (do("save", "deepseek_v3", to="dcp:hf"),),
    "save, an unknown argument": (do("save", "llama", to="hf", encode="mxfp8"),),
    "save, then load": (do("save", "qwen3_moe", adam=True, to="dcp:torchtitan"), do("load", "out", "hf", adam=True)),
    "async_save": (do("async_save", "llama", to="dcp:torchtitan"),),
    "async_save with its optimizer": (do("async_save", "qwen3_moe", to="dcp:torchtitan", adam=True, verify=True),),
    "async_save, exists": (do("save", "llama"), do("async_save", "llama")),
    **{
        f"reshard {source} from {dialect} to {to}": (do("reshard", source, dialect, to),)
        for source in ("llama", "qwen3_moe")
        for dialect, to in (("hf", "torchtitan"), ("torchtitan", "hf"), ("te", "vllm"), ("transformers", "te"))
    },
    "reshard, a name is missing": (do("reshard", "llama", "hf", "torchtitan", drop="model.norm.weight"),),
    "reshard, not strict": (do("reshard", "llama", "hf", "torchtitan", drop="model.norm.weight", strict=False),),
    "reshard, another family": (do("reshard", "llama", "hf", "torchtitan", family="qwen3_moe"),),
    "reshard, another dialect": (do("reshard", "llama", "hf", "torchtitan", dialect="te"),),
    "reshard, no config": (do("reshard", "llama", "hf", "te", config=None),),
    **{
        f"state_dict_as {source} from {dialect} to {to}": (do("state_dict_as", source, dialect, to),)
        for source in ("llama", "qwen3", "qwen3_moe")
        for dialect, to in (("hf", "torchtitan"), ("torchtitan", "hf"), ("hf", "te"), ("vllm", "transformers"))
    },
    "state_dict_as, no such dialect": (do("state_dict_as", "llama", "hf", "nonsense"),),
    "state_dict_as, another source": (do("state_dict_as", "llama", "hf", "te", source="torchtitan"),),
}

_LOOKED_AT: Mapping[str, Case] = {
    **{f"look at {name}": (do("info", name), do("verify", name), do("cli", "ls", name)) for name in SOURCES},
    "info, a family": (do("info", "llama.pt", family="llama"),),
    "info, decoded": (do("info", "llama_fp8", decode="bf16"),),
    "diff of others": (do("diff", "llama", "qwen3"),),
    "diff of formats": (do("diff", "llama", "bin"), do("diff", "llama.pt", "llama", numeric=True)),
    "diff of codes": (do("diff", "llama_fp8", "llama_fp8", decode="bf16"),),
    "verify others": (do("verify", "llama", "qwen3_moe"),),
    "rules": (do("check_rules", "pair.rules"), do("check_rules", "pair.rules", "pair")),
    "rules of another": (do("check_rules", "pair.rules", "llama"), do("check_rules", "llama.json")),
    "clean nothing": (do("clean", "llama"), do("clean", "nothing")),
    **{f"report {name}": (do("report", name, values=True),) for name in ("llama", "zero", "gpt_oss", "ranks")},
}


def _cli(*lines: str) -> Case:
    """Runs of the program; the number of threads, which counts in plans, is that of the cores where nobody says it."""
    threads = dict.fromkeys(("plan", "convert"), "--jobs 2")
    return tuple(do("cli", *f"{line} {threads.get(line.split()[0], '')}".split()) for line in lines)


_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "convert": ("convert llama out --to dcp:torchtitan --no-sync", "verify out", "diff llama out", "ls out --all"),
    "convert --json": ("convert llama out --to dcp:torchtitan --no-sync --json", "verify llama out --json"),
    "convert --verify": ("convert qwen3_moe out --to torchtitan --no-sync --verify",),
    "convert --verify --json": ("convert qwen3_moe out --to torchtitan --no-sync --verify --json",),
    "convert --quiet": ("convert llama out --to hf --quiet",),
    "convert --report": ("convert llama out --to te --no-sync --report page.html",),
    "convert --report, refused": ("convert llama out --to te --report page.html --axis g=3",),
    "convert --report --on": ("convert llama out --to hf --report page.html --on slurm",),
    "convert --items": ("convert llama out --to hf --items 3",),
    "convert --on": ("convert llama out --to hf --on slurm", "convert llama out --to hf --on slurm --json"),
    "convert --on torchrun": ("convert llama out --to hf --on torchrun --no-sync",),
    "convert, encoded": ("convert llama out --to hf --encode mxfp8 --no-sync --verify",),
    "convert, decoded": ("convert gpt_oss out --to hf --decode bf16 --no-sync", "diff gpt_oss out --numeric"),
    "convert, cast": ("convert llama out --to hf --dtype fp16 --skip *norm* --no-sync",),
    "convert, merged": ("convert llama out --to hf --merge adapter --no-sync --verify",),
    "convert, averaged": ("convert drifted out --to deepspeed-universal --average-replicas --no-sync",),
    "convert, differing": ("convert drifted out --to deepspeed-universal --no-sync --json",),
    "convert, ranks": ("convert qwen3_moe out --to megatron_torch --tp 2 --ep 2 --no-sync", "info out --json"),
    "convert, too many": ("convert llama out --to hf --decode bf16 --encode mxfp8",),
    "convert, only": ("convert llama out --to hf --only *",),
    "convert, only and merge": ("convert llama out --to hf --merge adapter --skip *",),
    "convert, quiet and verbose": ("convert llama out --to hf -q -v",),
    "convert, no target": ("convert llama out",),
    "convert, a mistyped option": ("convert llama out --to hf --overwrit",),
    "convert, sizes": ("convert llama out --to hf --shard-size lots", "convert llama out --to hf --memory 1KB"),
    "convert, axes": ("convert llama out --to hf --axis g", "convert llama out --to hf --axis g=2 --axis g=3"),
    "convert, ranks of none": ("convert llama out --to hf --tp 2", "convert llama out --to megatron_torch --tp 0"),
    "convert, exists": ("convert llama out --to hf --no-sync", "convert qwen3 out --to hf --json"),
    "convert, overwrite": ("convert llama out --to hf --no-sync", "convert qwen3 out --to hf --no-sync --overwrite"),
    "convert, resume": ("convert llama out --to hf --no-sync --resume", "convert llama out --to hf --resume"),
    "convert, optimizer": ("convert zero out --to hf --no-sync", "convert zero both --to hf --optimizer --json"),
    "convert, nothing there": ("convert nothing out --to hf", "convert nothing out --to hf --json"),
    "convert, damaged": ("convert damaged out --to hf", "plan damaged out --to hf --json"),
    "convert, derive": ("convert unknown out --to hf --derive",),
    "convert, rules": ("convert pair out --to two --rules pair.rules --family pair --no-sync",),
    "plan": ("plan llama out --to dcp:torchtitan", "plan qwen3_moe out --to te --all"),
    "plan --json": ("plan zero out --to deepspeed-universal --json",),
    "plan, refused": ("plan llama out --to megatron_torch --tp 3", "plan llama out --to megatron_torch --tp 3 --json"),
    "plan, encoded": ("plan llama out --to hf --encode nvfp4", "plan llama out --to hf --encode nvfp4 --json"),
    "plan --report": ("plan qwen3_moe out --to dcp:torchtitan --report page.html",),
    "plan --mesh, too much": ("plan llama out --to hf --mesh x --tp 2",),
    "work": (
        "plan llama out --to dcp:torchtitan --write a.work --items 2",
        "work a.work --begin",
        "work a.work --items 0-1",
        "work a.work --commit",
    ),
    "info": ("info zero", "info titan --tree", "info ranks_moe --json"),
    "info, too much": ("info --tree", "info llama --tree --json"),
    "ls": ("ls llama_fp8 --json", "ls qwen3_moe --all", "ls llama --as torchtitan"),
    "ls, refused": ("ls damaged", "ls damaged --json", "ls llama --as nonsense"),
    "verify": ("verify llama", "verify llama bin", "verify llama qwen3 --json", "verify damaged --json"),
    "diff": ("diff llama qwen3", "diff llama llama_fp8 --stat", "diff llama bin --json", "diff llama llama.pt"),
    "diff --report": ("diff llama qwen3 --report page.html",),
    "report": ("report llama --output page.html", "report damaged --output page.html"),
    "check-rules": ("check-rules pair.rules", "check-rules pair.rules pair --json", "check-rules llama.json"),
    "clean": ("clean .", "clean . --json"),
    "explain": ("explain UNEQUAL_COPIES", "explain LOSSY --json", "explain NOTHING"),
    "families": ("families --json", "dialects --json"),
    "help": ("--help", "convert --help", "plan --help", "verify --help", "work --help", "conver llama"),
}

CASES: Mapping[str, Case] = MappingProxyType(
    {
        **_PAIRS,
        **_OPTIONS_CASES,
        **_RECODED_CASES,
        **_ELSEWHERE,
        **_TWO_STEPS,
        **_ON,
        **_LIVE,
        **_LOOKED_AT,
        **{f"$ {name}": _cli(*lines) for name, lines in _COMMANDS.items()},
    }
)
"""Name -> steps; each case has a working directory of its own, with copies of what it begins with."""
