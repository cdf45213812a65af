"""Quantized checkpoints of 1.3 GB as bf16: our conversion against compressed-tensors' own, llm-dequant and `cat`.

A model shaped like Qwen3-8B, of fewer layers, has its linear layers in int4 (`pack-quantized`, groups of 32) or in
NVFP4 (`nvfp4-pack-quantized`), by the names of compressed-tensors, in files of 0.5 GB. Programs are timed from start to
end and take turns; of several rounds the median of the ratios counts:

- ours: `transaxle convert --to hf --decode bf16 --memory 128MB --no-sync`;
- compressed-tensors: `convert_checkpoint` with its `CompressedTensorsDequantizer`;
- llm-dequant, for NVFP4 only, if `make .venv/llm-dequant` has installed it: `convert --shard-gb 1`, because its default
  collects 8 GiB of results before it writes;
- `cat`, which reads the input once, and writes as many bytes as the output while it reads as many.

All is in a file system in memory, so nothing waits for a disk. Before each run a file as large as the output is written
and removed, so that every program finds its memory already allocated. In the first round the results must be equal bit
by bit. Memory is sampled in a round of its own (it counts the pages of files that a program maps), and the ratios
without what importing the peers takes are printed beside those with it, as that part does not grow with the model.

Promises: int4 at half the speed of `cat`, 128 MB, half of the processor time of either peer, and a twentieth of its
memory. `cat` needs one core and a conversion all, so other work on the machine lowers that ratio.

    python benchmarks/dequantize.py [--rounds 3] [--layers 11] [--only int4]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import xxhash
from convert import MEMORY_FILES, SHARD, take_memory
from numpy.typing import NDArray
from promises import Promises
from safetensors import safe_open
from safetensors.numpy import save_file
from zero import MEMORY, TIME, Run, run_watched

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 4096, 12288, 32, 8, 128, 1024
PACKAGES = Path(os.environ.get("LLM_DEQUANT_PACKAGES", f"{sys.prefix}/llm-dequant"))
"""The folder into which `make` installs llm-dequant."""
LIKE_CAT, FASTER, MEMORY_SHARE, ALLOWED_MEMORY = 0.5, 2.0, 0.05, 128.0
INT4, NVFP4 = "int4", "nvfp4"
OURS, CAT, LLM_DEQUANT, COMPRESSED_TENSORS = "Transaxle", "cat", "llm-dequant", "compressed-tensors"
CT_PROGRAM = """
import sys
from compressed_tensors.entrypoints.convert import convert_checkpoint
from compressed_tensors.entrypoints.convert.converters import CompressedTensorsDequantizer
if sys.argv[1]:
    convert_checkpoint(sys.argv[1], sys.argv[2], CompressedTensorsDequantizer(sys.argv[1]))
"""
LLM_PROGRAM = """
import os, sys
sys.path.append(os.environ["PACKAGES"])
from llm_dequant.cli import main
if sys.argv[1]:
    sys.exit(main(["convert", sys.argv[1], sys.argv[2], "--shard-gb", "1"]))
"""
CAT_PROGRAM = """
import os, subprocess, sys
target, times, filler, *files = sys.argv[1:]
os.mkdir(target)
with open(os.devnull, "wb") as nowhere:
    subprocess.run(["cat", *files], stdout=nowhere, check=True)
with open(os.path.join(target, "copy"), "wb") as copy:
    subprocess.run(["cat", *files * int(times), filler], stdout=copy, check=True)
"""
Tensors = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Source:
    """A quantized checkpoint."""

    folder: Path
    filler: Path
    """File that makes a whole number of copies of the weights as long as the output."""
    copies: int
    """Number of copies of the weights in as many bytes as the output, rounded down."""

    @property
    def files(self) -> list[Path]:
        """The files of weights."""
        return sorted(self.folder.glob("*.safetensors"))


def _linear(module: str, rows: int, columns: int, kind: str, draw: np.random.Generator) -> Tensors:
    """Draw the tensors of a linear layer."""
    if kind == INT4:
        scales = draw.uniform(0.001, 0.011, (rows, columns // 32)).astype(ml_dtypes.bfloat16)
        return {
            f"{module}.weight_packed": draw.integers(-(1 << 31), 1 << 31, (rows, columns // 8), np.int32),
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": np.array([rows, columns], np.int64),
        }
    exponents = draw.integers(1, 0x7F, (rows, columns // 16), np.uint8)  # all but 0 and NaN
    return {
        f"{module}.weight_packed": draw.integers(0, 256, (rows, columns // 2), np.uint8),
        f"{module}.weight_scale": exponents.view(ml_dtypes.float8_e4m3fn),
        f"{module}.weight_global_scale": np.array([300.0], np.float32),
    }


def make(folder: Path, kind: str, layers: int) -> None:
    """Write the checkpoint."""
    draw = np.random.default_rng(0)
    tensors: Tensors = {}

    def plain(name: str, *shape: int) -> None:
        tensors[name] = draw.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)

    plain("model.embed_tokens.weight", VOCABULARY, HIDDEN)
    for layer in range(layers):
        base = f"model.layers.{layer}."
        for module, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD, HIDDEN), ("self_attn.k_proj", KV_HEADS * HEAD, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD, HIDDEN), ("self_attn.o_proj", HIDDEN, HEADS * HEAD),
            ("mlp.gate_proj", INNER, HIDDEN), ("mlp.up_proj", INNER, HIDDEN), ("mlp.down_proj", HIDDEN, INNER),
        ):  # fmt: skip
            tensors |= _linear(base + module, rows, columns, kind, draw)
        for norm, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            plain(f"{base}{norm}.weight", size)
        for norm in ("q_norm", "k_norm"):
            plain(f"{base}self_attn.{norm}.weight", HEAD)
    plain("model.norm.weight", HIDDEN)
    plain("lm_head.weight", VOCABULARY, HIDDEN)
    weights = {"num_bits": 4, "symmetric": True, "dynamic": False}
    weights |= (
        {"type": "int", "strategy": "group", "group_size": 32}
        if kind == INT4
        else {"type": "float", "strategy": "tensor_group", "group_size": 16}
    )
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": HIDDEN, "head_dim": HEAD,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": layers, "vocab_size": VOCABULARY, "tie_word_embeddings": False, "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"],
            "format": "pack-quantized" if kind == INT4 else "nvfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None,
                },
            },
        },
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    shards: list[Tensors] = [{}]
    for name, tensor in tensors.items():
        if sum(each.nbytes for each in shards[-1].values()) + tensor.nbytes > SHARD:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}), "utf-8"
    )


def digests(folder: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return dtype, shape and hash of each tensor of a folder."""
    result: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                tensor = opened.get_tensor(name)
                hashed = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(tensor).view(np.uint8).data)
                result[name] = (str(tensor.dtype), tensor.shape, hashed)
    return result


def programs(source: Source, target: Path, kind: str) -> dict[str, list[str]]:
    """Return the arguments of `python` for each side."""
    paths = [str(source.folder), str(target)]
    ours = ["-m", "transaxle", "convert", *paths, "--to", "hf", "--decode", "bf16", "--memory", "128MB", "--no-sync"]
    cat = ["-c", CAT_PROGRAM, str(target), str(source.copies), str(source.filler), *map(str, source.files)]
    sides = {OURS: [*ours, "--quiet"], CAT: cat, COMPRESSED_TENSORS: ["-c", CT_PROGRAM, *paths]}
    if kind == NVFP4 and PACKAGES.is_dir():
        sides[LLM_DEQUANT] = ["-c", LLM_PROGRAM, *paths]
    return sides


def total_bytes(folder: Path) -> int:
    """Return the bytes of the weights in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def output_bytes(base: Path, folder: Path) -> int:
    """Return the bytes of the weights that a conversion writes."""
    target = base / "sized"
    subprocess.run([sys.executable, *programs(Source(folder, base, 0), target, INT4)[OURS]], check=True)
    size = total_bytes(target)
    shutil.rmtree(target)
    return size


def prepare(base: Path, kind: str, layers: int) -> Source:
    """Write a checkpoint and its filler."""
    folder = base / kind
    subprocess.run([sys.executable, __file__, "--make", str(folder), kind, str(layers)], check=True)
    size = total_bytes(folder)
    written = output_bytes(base, folder)
    filler = base / f"{kind}.filler"
    with filler.open("wb") as file:
        for _ in range(written % size >> 20):
            file.write(bytes(1 << 20))
        file.write(bytes(written % size % (1 << 20)))
    print(f"{kind}, {size / 1e9:.2f} GB, {written / 1e9:.2f} GB as bf16")
    return Source(folder, filler, written // size)


def measure(base: Path, source: Source, kind: str, rounds: int) -> dict[str, list[Run]]:
    """Measure all sides; the last run of a side has its memory."""
    target = base / "out"
    sides = programs(source, target, kind)
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    expected: dict[str, tuple[str, tuple[int, ...], str]] = {}
    written = source.copies * total_bytes(source.folder) + source.filler.stat().st_size
    for turn, mode in enumerate([*(TIME,) * rounds, MEMORY]):
        for side, command in sides.items():
            take_memory(base, written)
            runs[side].append(run_watched(command, target, mode))
            if turn == 0 and side != CAT:
                made = digests(target)
                expected = expected or made
                differing = [name for name in {**made, **expected} if made.get(name) != expected.get(name)]
                if differing:
                    raise SystemExit(f"{side} has other values: {sorted(differing)[:5]}")
            shutil.rmtree(target)
    return runs


def report(kind: str, runs: Mapping[str, list[Run]], imports: Mapping[str, float], promises: Promises) -> None:
    """Print the table of a checkpoint, and its promises."""
    timed = {side: each[:-1] for side, each in runs.items()}
    peaks = {side: each[-1].peak for side, each in runs.items()}
    for side, measured in timed.items():
        seconds, cpu = (statistics.median(getattr(each, what) for each in measured) for what in ("seconds", "cpu"))
        print(f"    {side:20} {seconds:6.2f} s, {cpu:6.2f} s of processors, {peaks[side] / 1e6:7.0f} MB")
    own = timed[OURS]
    ratios = [other.seconds / each.seconds for other, each in zip(timed[CAT], own, strict=True)]
    promises.at_least(f"{kind} -> bf16 against cat", ratios, LIKE_CAT if kind == INT4 else None)
    shares = [other.cpu / each.cpu for other, each in zip(timed[CAT], own, strict=True)]
    promises.at_least(f"{kind} -> bf16 against cat, processor time", shares, None)
    promises.at_most(f"{kind} -> bf16, peak memory", peaks[OURS] / 1e6, ALLOWED_MEMORY, "MB")
    for side in imports.keys() & timed.keys():
        pairs = list(zip(timed[side], own, strict=True))
        without = statistics.median((peer.cpu - imports[side]) / each.cpu for peer, each in pairs)
        print(f"    imports of {side}: {imports[side]:.2f} s of processors; without them {without:.1f} x of ours")
        promises.at_least(f"{kind} -> bf16 against {side}", [p.seconds / each.seconds for p, each in pairs], None)
        label = f"{kind} -> bf16 against {side}, processor time"
        promises.at_least(label, [peer.cpu / each.cpu for peer, each in pairs], FASTER)
        label = f"{kind} -> bf16, part of {side}'s memory"
        promises.at_most(label, peaks[OURS] / peaks[side], MEMORY_SHARE, "x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--only", choices=(INT4, NVFP4), nargs="*", default=(INT4, NVFP4))
    parser.add_argument("--make", nargs=3, metavar=("FOLDER", "KIND", "LAYERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        folder, kind, layers = options.make
        make(Path(folder), kind, int(layers))
        return 0
    if not PACKAGES.is_dir():
        print(f"llm-dequant is not in {PACKAGES}: it is left out; make .venv/llm-dequant installs it")
    os.environ["PACKAGES"] = str(PACKAGES)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    promises = Promises()
    with tempfile.TemporaryDirectory(prefix="transaxle-bench-", dir=MEMORY_FILES) as scratch:
        base = Path(scratch)
        loads = {COMPRESSED_TENSORS: CT_PROGRAM}
        if PACKAGES.is_dir():
            loads[LLM_DEQUANT] = LLM_PROGRAM
        imports = dict[str, float]()
        for _ in range(2):  # the second time from cached files
            imports |= {side: run_watched(["-c", program, "", ""], base).cpu for side, program in loads.items()}
        for kind in options.only:
            source = prepare(base, kind, options.layers)
            report(kind, measure(base, source, kind, options.rounds), imports, promises)
            shutil.rmtree(source.folder)
            source.filler.unlink()
    return promises.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
