"""One rank of a run of TRL's GRPO on a CPU, by the example; the server has other weights when it begins.

    trl_job.py MODEL URL REPORT

First comes a step whose weights are not pushed, then a run as the example does it. REPORT gets what TRL itself has
measured in each step of both: the difference between the server's log-probabilities and those of the trainer's model.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import trl.generation.vllm_client

from tests.some import some

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_sync.py"
STEPS = 3
MEASURED = "sampling/sampling_logp_difference/mean"
OPTIONS = {"use_cpu": True, "bf16": False, "report_to": [], "learning_rate": 1e-2, "ddp_backend": "gloo"}


def differences(trainer: Any) -> list[float]:
    return [entry[MEASURED] for entry in trainer.state.log_history if MEASURED in entry]


def main(model: str, url: str, report: str) -> None:
    # TRL's client asks for vLLM in the trainer's environment, since its own group for weights needs it.
    trl.generation.vllm_client.is_vllm_available = lambda *_, **__: True
    spec = some(spec_from_file_location(EXAMPLE.stem, EXAMPLE))
    example = module_from_spec(spec)
    some(spec.loader).exec_module(example)
    push, example.Generation.sync_weights = example.Generation.sync_weights, lambda _: None
    without = differences(example.train(model, url, 1, **OPTIONS))
    example.Generation.sync_weights = push
    trainer = example.train(model, url, STEPS, **OPTIONS)
    if os.environ["RANK"] == "0":
        version = trainer.vllm_generation.refit.version
        Path(report).write_text(json.dumps({"without": without, "pushed": differences(trainer), "version": version}))


if __name__ == "__main__":
    main(*sys.argv[1:])
