"""In vLLM's environment: engines that are started from folders, what they say, and the files that their workers open.

    python -m tests.formats.vllm_sharded.engines TP

reads orders, one a line: `[FOLDER, FORMAT]`, in which FORMAT is vLLM's `load_format`. It prints one line of JSON for
each: what the engine says, and for each worker the names of the safetensors files that it opened. `register` is an
entry point of vLLM's plugins: it runs in each worker.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

OPENED = "OPENED_FILES"
"""Environment variable: a file, to which each worker adds a line for each file that it opens."""


def register() -> None:
    """Note each file that this process opens with safetensors, as vLLM's loader does."""
    from importlib import import_module

    module: Any = import_module("safetensors.torch")
    original = module.safe_open

    def noted(path: Any, *arguments: Any, **options: Any) -> Any:
        with Path(os.environ[OPENED]).open("a") as log:
            log.write(json.dumps([os.getpid(), Path(path).name]) + "\n")
        return original(path, *arguments, **options)

    if original.__name__ != noted.__name__:
        module.safe_open = noted


def add_entry_point(site: Path) -> None:
    """Write what pip would write for a package that has `register` as an entry point."""
    info = site / "opened-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: opened\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nopened = {__name__}:register\n")


def _opened() -> list[list[str]]:
    """Return the files that each worker has opened since the last call."""
    log = Path(os.environ[OPENED])
    by_worker: defaultdict[int, list[str]] = defaultdict(list)
    for line in log.read_text().splitlines() if log.exists() else ():
        worker, name = json.loads(line)
        by_worker[worker].append(name)
    log.write_text("")
    return sorted(by_worker.values())


def main(tp: int) -> None:
    """Take orders until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    from vllm import LLM

    from tests.refit.plugs.fresh_engines import _answers

    for line in sys.stdin:
        folder, load_format = json.loads(line)
        llm = LLM(
            model=folder, load_format=load_format, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
            max_model_len=128, tensor_parallel_size=tp, disable_custom_all_reduce=True,
        )  # fmt: skip
        answers.write(json.dumps([_answers(llm), _opened()]) + "\n")
        answers.flush()
        del llm


if __name__ == "__main__":
    main(int(sys.argv[1]))
