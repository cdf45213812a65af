"""In vLLM's environment: engines that are started from any checkpoint, what they answer, and what their workers load.

    python -m tests.refit.plugs.loading_engines

reads orders, one a line: the arguments of an `LLM` in JSON, whether to ask it, and a checkpoint that it reloads before,
or nothing. It prints one line of JSON for each: the answers to the prompts, each with the logarithms of its tokens'
probabilities, and what each worker has loaded; or the text of an error. `register` is an entry point of vLLM's plugins:
it runs in each worker.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.refit.plugs.servers import PROMPTS, TOKENS

LOADED = "LOADED_PARAMETERS"
"""Environment variable: a file, to which each worker adds a line for each load."""
_COUNTED = "rchar"
"""What Linux calls the bytes that a process has read from files."""


@dataclass(frozen=True)
class WorkerLoad:
    """What one worker loaded into its model."""

    rank: int
    parameters: int
    """Bytes of the worker's parameters."""
    digests: dict[str, str]
    """Parameter -> digest of its values, before vLLM repacks them."""
    counted: int
    """Bytes that the process read from files, as the system counts them."""
    reported: int | None
    """Bytes that our loader reports; None if vLLM's own took whole tensors."""


def register() -> None:
    """Note what each load of this process reads and writes."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from transaxle.refit import vllm_loader

    if vllm_loader.load_weights.__name__ == "noted":
        return
    ours, theirs = vllm_loader.load_weights, DefaultModelLoader.load_weights
    vars(vllm_loader)[ours.__name__] = _noting(ours, lambda model, *_: model)
    DefaultModelLoader.load_weights = _noting(theirs, lambda _, model, *__: model)


def _noting(original: Any, model_of: Any) -> Any:
    """Return a function that loads, and adds a line to the file."""

    def noted(*arguments: Any) -> Any:
        import torch

        before = _bytes_read()
        report = original(*arguments)
        counted = _bytes_read() - before
        parameters = dict(model_of(*arguments).named_parameters())
        load = WorkerLoad(
            torch.distributed.get_rank(),
            sum(parameter.nbytes for parameter in parameters.values()),
            {name: sha256(each.detach().reshape(-1).view(torch.uint8).numpy()).hexdigest()
             for name, each in parameters.items()},
            counted,
            None if report is None else report.bytes_read,
        )  # fmt: skip
        with Path(os.environ[LOADED]).open("a") as log:
            log.write(json.dumps(asdict(load)) + "\n")
        return report

    return noted


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(_COUNTED))


def add_entry_point(site: Path) -> None:
    """Write what pip would write for a package that has `register` as an entry point."""
    info = site / "counted-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counted\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\ncounted = {__name__}:register\n")


def _answers(llm: Any) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = [llm.generate({"prompt_token_ids": list(p)}, sampling, use_tqdm=False)[0].outputs[0] for p in PROMPTS]
    return [
        [list(output.token_ids), [next(iter(each.values())).logprob for each in output.logprobs]] for output in outputs
    ]


def main() -> None:
    """Take orders until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    from vllm import LLM

    log = Path(os.environ[LOADED])
    for line in sys.stdin:
        log.unlink(missing_ok=True)
        said: Any
        arguments, asks, reloaded = json.loads(line)
        llm: Any = None
        try:
            llm = LLM(
                skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128,
                disable_custom_all_reduce=True, **arguments,
            )  # fmt: skip
            loads = [json.loads(each) for each in log.read_text().splitlines()]
            if reloaded:
                llm.collective_rpc("reload_weights", kwargs={"weights_path": reloaded})
                llm.reset_prefix_cache()
            said = [_answers(llm) if asks else [], sorted(loads, key=lambda load: load["rank"])]
        except Exception as error:  # noqa: BLE001 - the test compares it
            said = f"{type(error).__name__}: {error}"
        with suppress(AttributeError):
            llm.llm_engine.engine_core.shutdown()
        del llm
        answers.write(json.dumps(said) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
