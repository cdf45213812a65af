"""The program in Megatron's environment that lets Megatron-Bridge load `torch_dist` folders in full, on a CPU.

    python -m tests.readers.megatron_loads RESULT FOLDER ...

writes, for each folder, the error that Megatron raises; or the names of the parameters that got no value.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.oracles.bridge_peer import without_cuda, without_kernels
from tests.oracles.bridge_peer.models import Model
from tests.oracles.bridge_peer.run import _Bridge, _configuration


def main(target: Path, folders: list[Path]) -> None:
    """Load every folder into a model of its config."""
    without_cuda.pretend()
    without_kernels.install()
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    results = []
    with redirect_stdout(StringIO()):
        for folder in folders:
            config = json.loads((folder / "config.json").read_text("utf-8"))
            model = _Bridge(_configuration(config), Model(config, {"moe_token_dispatcher_type": "alltoall"}))
            try:
                model.load(folder / "release")
            except (Exception, CheckpointException) as error:  # noqa: BLE001 - whatever Megatron raises is its answer
                results.append(f"{type(error).__name__}: {error}")
            else:
                results.append(" ".join(name for name, value in model.state.items() if bool(value.isnan().any())))
    target.write_text(json.dumps(results), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
