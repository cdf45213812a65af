"""The program in vLLM's environment that loads folders with vLLM's own loader, and stores what its models have then.

    python -m tests.oracles.vllm_peer.load TARGET [--drafting] FOLDER ...

writes `N.safetensors` for the N-th folder, NaN for every element that the loader never wrote, or `N.txt` with the error
that it raised. With `--drafting` the model is that of the layers that predict further tokens.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from safetensors.torch import save_file
from torch import distributed as dist

from tests.oracles.vllm_peer.run import ENVIRONMENT, add_stand_ins, load_model, start_groups, tensors_in

DRAFTING = "--drafting"


def main(target: Path, folders: list[str], *, drafting: bool) -> None:
    """Load every folder as one rank of one does."""
    os.environ.update(ENVIRONMENT)
    add_stand_ins()
    start_groups()
    for number, folder in enumerate(folders):
        try:
            config = json.loads(Path(folder, "config.json").read_text("utf-8"))
            dtype = "bfloat16" if "quantization_config" in config else "float32"  # layers with codes take no others
            model = load_model(Path(folder), 0, 1, experts=False, dtype=dtype, drafting=drafting)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is its answer
            (target / f"{number}.txt").write_text(f"{type(error).__name__}: {error}", "utf-8")
            continue
        tensors = {name: value.contiguous() for name, value in tensors_in(model).items()}
        save_file(tensors, target / f"{number}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    named = [argument for argument in sys.argv[2:] if argument != DRAFTING]
    main(Path(sys.argv[1]), named, drafting=DRAFTING in sys.argv)
