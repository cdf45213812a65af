"""Checks a wheel before a release, with the Python that runs this file: `make release-check` does so for each Python.

    python3.12 tests/release_check.py dist/transaxle-0.2.0-py3-none-manylinux….whl

It downloads what the wheel needs, installs it into an empty environment, without torch, and uses it there: the version,
`info`, `ls`, `plan`, `convert` and `verify` of a small Llama. It prints times and sizes, and fails if pip downloads
more than `MOST_MB`.
It needs the standard library alone, and pip's access to a package index.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import struct
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

MOST_MB = 40.0
"""Most megabytes that pip may download for the wheel, itself included."""
LARGEST = 6
"""Number of packages whose sizes are printed."""
HIDDEN, WIDTH, VOCABULARY = 8, 12, 16
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (8, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (4, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (4, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, 8),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.mlp.gate_proj.weight": (WIDTH, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (WIDTH, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, WIDTH),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
}


def main() -> int:
    """Check the wheel that the command line names; return 1 if its download is larger than it may be."""
    wheel = Path(sys.argv[1]).resolve()
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "env", with_pip=True)
        python = place / "env/bin/python"
        (site,) = (place / "env/lib").glob("python*/site-packages")
        before = sizes(site)
        pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
        run(place, *pip, "download", "--dest", place / "wheels", wheel)
        downloads = {file.name.split("-")[0]: file.stat().st_size / 1e6 for file in (place / "wheels").iterdir()}
        start, cpu_start = time.monotonic(), cpu_seconds()
        run(place, *pip, "install", "--no-index", "--find-links", place / "wheels", wheel)
        seconds, cpu = time.monotonic() - start, cpu_seconds() - cpu_start
        added = {name: (size - before.get(name, 0)) / 1e6 for name, size in sizes(site).items()}
        use(place, version)
    total = sum(downloads.values())
    report(f"Python {platform.python_version()}: {wheel.name}")
    report(f"  works; installed in {seconds:.1f} s, {cpu:.1f} s of processor time")
    report(f"  downloads {total:.1f} MB: {largest(downloads)}")
    report(f"  unpacks to {sum(added.values()):.1f} MB: {largest(added)}")
    if total > MOST_MB:
        report(f"  more than {MOST_MB:g} MB to download")
    return int(total > MOST_MB)


def largest(megabytes: dict[str, float]) -> str:
    """Write the largest packages with their sizes."""
    rows = sorted(megabytes.items(), key=lambda item: -item[1])[:LARGEST]
    return ", ".join(f"{name} {size:.1f}" for name, size in rows)


def cpu_seconds() -> float:
    """Return the processor time of all finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(line: str) -> None:
    """Print a line at once, also where the output is a file."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def sizes(site: Path) -> dict[str, int]:
    """Return the bytes of each package in a site-packages folder; libraries count with the package that brings them."""
    packages: dict[str, int] = {}
    for file in site.rglob("*"):
        if file.is_file() and not file.is_symlink():
            name = file.relative_to(site).parts[0].split(".")[0].split("-")[0].lower()
            packages[name] = packages.get(name, 0) + file.stat().st_size
    return packages


def use(place: Path, version: str) -> None:
    """Use the installed program as a new user would, in an empty folder."""
    program = place / "env/bin/transaxle"
    write_llama(place / "llama")
    assert run(place, program, "--version") == f"transaxle {version}\n"
    info = json.loads(run(place, program, "info", "--json"))
    assert info["kernels"] == "compiled" or "none-any" in sys.argv[1], info
    assert f"{len(SHAPES)} tensors" in run(place, program, "ls", "llama")
    assert "nothing refused" in run(place, program, "plan", "llama", "dcp", "--to", "dcp:torchtitan")
    run(place, program, "convert", "llama", "dcp", "--to", "dcp:torchtitan", "--verify")
    run(place, program, "convert", "dcp", "back", "--to", "hf")
    assert run(place, program, "verify", "llama", "back").startswith("equal")
    assert "ok" in run(
        place, place / "env/bin/python", "-c", "import importlib.util as u; print(u.find_spec('torch') or 'ok')"
    )


def write_llama(folder: Path) -> None:
    """Write a Llama of one layer as a safetensors file, each element another number."""
    header, offset = {}, 0
    for name, shape in SHAPES.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset := offset + 4 * count]}
    text = json.dumps(header).encode()
    folder.mkdir()
    data = struct.pack(f"<{offset // 4}f", *range(offset // 4))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps(CONFIG), "utf-8")


def run(place: Path, *command: str | Path) -> str:
    """Run a command in a folder, without this process's Python settings, and return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
