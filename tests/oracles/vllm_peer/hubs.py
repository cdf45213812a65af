"""The program in vLLM's environment that writes only the hub folders of models.

    python -m tests.oracles.vllm_peer.hubs FOLDER [MODEL ...]

writes for each model the folder that vLLM reads, `FOLDER/MODEL`. A config whose class is the maker's names that class,
as published ones do.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from tests.oracles.vllm_peer.models import MODELS, model_named
from tests.oracles.vllm_peer.run import ENVIRONMENT, add_stand_ins, write_hub


def main(target: Path, names: list[str]) -> None:
    """Write the folders of models, of all where none is named."""
    os.environ.update(ENVIRONMENT)
    add_stand_ins()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    known = {*CONFIG_MAPPING, *_CONFIG_REGISTRY}
    for name in names or MODELS:
        model = model_named(name)
        folder = write_hub(model, target / "made" / name)
        if model.model_type not in known:
            path = folder / "config.json"
            config = json.loads(path.read_text("utf-8"))
            path.write_text(json.dumps({**config, "auto_map": {"AutoConfig": "config.Config"}}), "utf-8")
        (target / name).symlink_to(folder)
        gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
