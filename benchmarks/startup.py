"""Promise: commands start fast, and no slower when there are many more families.

With bytecode cached, and beside `python -c "import numpy"` in the same run: `transaxle --help` takes at most as long,
`ls` of a small folder 2.5 times as long, `plan` of 1,600 tensors 4 times. None grows by more than 5 % when there are
100 more families (copies of a table that ships, in a copy of the package). Commands are run in turns, so that a busy
machine slows all alike, and the least processor time of each counts; the least wall time is shown beside it.

    python benchmarks/startup.py [--rounds 15] [--families 100]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import numpy as np
from promises import Promises
from safetensors.numpy import save_file

import transaxle

PACKAGE = Path(transaxle.__file__).parent
TABLE = "llama.rules"
LIMITS = {"--help": 1.0, "ls": 2.5, "plan": 4.0}
"""Command -> its time at most, as a multiple of `import numpy`."""
GROWTH = 0.05
LAYERS, EXPERTS = 15, 32
"""Of the model that is planned: 3 + 15 x (9 + 3 x 32) = 1,578 tensors."""
BASE = "import numpy"
INDEX = """
import sys, msgspec
from transaxle.families import read_all
sys.stdout.buffer.write(msgspec.json.encode(read_all().index()))
"""

Times = dict[str, tuple[float, float]]
"""Run -> least processor time and least wall time, in seconds."""


def model(folder: Path, layers: int, experts: int) -> None:
    """Write a small Qwen3-MoE."""
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": experts,
        "num_experts_per_tok": 2, "vocab_size": 40,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,)}
    shapes["lm_head.weight"] = (40, 16)
    for layer in range(layers):
        base = f"model.layers.{layer}"
        shapes |= {f"{base}.{norm}.weight": (16,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{base}.self_attn.{norm}.weight": (8,) for norm in ("q_norm", "k_norm")}
        shapes |= {f"{base}.self_attn.{name}_proj.weight": (16, 16) for name in ("k", "v")}
        shapes |= {f"{base}.self_attn.q_proj.weight": (32, 16), f"{base}.self_attn.o_proj.weight": (16, 32)}
        shapes[f"{base}.mlp.gate.weight"] = (experts, 16)
        for expert in range(experts):
            shapes |= {f"{base}.mlp.experts.{expert}.{half}_proj.weight": (12, 16) for half in ("gate", "up")}
            shapes[f"{base}.mlp.experts.{expert}.down_proj.weight"] = (16, 12)
    folder.mkdir()
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "tie_word_embeddings": False, **sizes}))


def more_families(site: Path, count: int) -> None:
    """Copy the package, and add families to the copy."""
    copy = site / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / "families" / TABLE).read_text("utf-8")
    for number in range(count):
        name = f"more{number}"
        changed = re.sub(r"^family llama\b", f"family {name}", text, flags=re.MULTILINE)
        changed = re.sub(r"^( *)model_type .*$", rf"\1model_type {name}", changed, flags=re.MULTILINE)
        (copy / "families" / f"{name}.rules").write_text(changed, "utf-8")
    environment = os.environ | {"PYTHONPATH": str(site)}
    index = subprocess.run([sys.executable, "-c", INDEX], env=environment, capture_output=True, check=True).stdout
    (copy / "families" / "generated" / "index.json").write_bytes(index)


def once(words: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Run a command; return its processor time, and how long it took."""
    before, begin = getrusage(RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - begin, getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def measure(rounds: int, families: int, work: Path) -> Times:
    """Return the least times of every command, in the package as it is and with more families."""
    model(work / "small", 2, 8)
    model(work / "large", LAYERS, EXPERTS)
    more_families(work / "site", families)
    cache = {"PYTHONPYCACHEPREFIX": str(work / "bytecode")}
    own_site = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | cache
    program = ("-m", "transaxle")
    commands = {
        "--help": (*program, "--help"),
        "ls": (*program, "ls", str(work / "small")),
        "plan": (*program, "plan", str(work / "large"), str(work / "out"), "--to", "torchtitan"),
    }
    runs = {BASE: (("-c", BASE), own_site)}
    for site, suffix in ((PACKAGE.parent, ""), (work / "site", "+")):
        runs |= {f"{name}{suffix}": (words, own_site | {"PYTHONPATH": str(site)}) for name, words in commands.items()}
    for words, environment in runs.values():
        once(words, environment)  # writes the bytecode
    times: Times = {}
    for _ in range(rounds):
        for name, (words, environment) in runs.items():
            least, now = times.get(name, (float("inf"), float("inf"))), once(words, environment)
            times[name] = min(least[0], now[0]), min(least[1], now[1])
    return times


def main() -> int:
    """Measure, print a table, and tell whether the promises hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--families", type=int, default=100)
    commands = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        times = measure(commands.rounds, commands.families, Path(work))
    base = times[BASE]
    print(f"{BASE}: {base[0]:.3f} s of processor time, {base[1]:.3f} s of wall time")
    promises = Promises()
    for name, limit in LIMITS.items():
        used, wall = times[name]
        ratio, growth = used / base[0], times[f"{name}+"][0] / used - 1
        promises.at_most(f"transaxle {name} against import numpy", ratio, limit, "x")
        promises.at_most(f"transaxle {name}, {commands.families} more families", 100 * growth, 100 * GROWTH, "% more")
        print(f"    {used:.3f} s; wall {wall:.3f} s, {wall / base[1]:.2f} x")
    return promises.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
