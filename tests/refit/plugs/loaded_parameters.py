"""In vLLM's environment: what vLLM's own loader and ours make of the parameters of each rank, without an engine.

    python -m tests.refit.plugs.loaded_parameters < ORDERS

reads orders, one a line: a `Loading` in JSON. It builds vLLM's model for each rank in turn, lets both loaders fill it
with NaN beforehand, and prints one line of JSON for each order: a `Loaded`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.oracles.vllm_peer.run import ENVIRONMENT, add_stand_ins, load_model, start_groups, tensors_in


@dataclass(frozen=True)
class Loading:
    """What is loaded, and by how many ranks."""

    truth: str
    """Folder of the hub that vLLM's own loader loads."""
    served: str
    """Folder with the config that vLLM serves in the load format `transaxle`."""
    extra: dict[str, Any]
    """What the load format is told."""
    ranks: int = 1
    experts: bool = False
    """Whether ranks have whole experts."""
    dtype: str = "bfloat16"
    drafting: bool = False
    """Whether the model is that of the layers that predict further tokens."""


@dataclass
class Loaded:
    """How the parameters that both loaders make differ."""

    error: str = ""
    """What our loader raised."""
    unequal: list[str] = field(default_factory=list)
    """Parameters that differ, on any rank."""
    compared: int = 0
    """Parameters that were compared, on all ranks."""
    needed: list[int] = field(default_factory=list)
    """Bytes of its parameters, for each rank."""
    read: list[int | None] = field(default_factory=list)
    """Bytes that each rank read; None if vLLM's own `load_weights` took whole tensors."""
    log: str = ""
    """What our loader logged."""


def _compare(order: Loading) -> Loaded:
    import torch

    from transaxle.refit import vllm_loader

    loaded, reports = Loaded(), list[Any]()
    original = vllm_loader.load_weights
    vllm_loader.load_weights = lambda *arguments: reports.append(original(*arguments))
    options: dict[str, Any] = {"experts": order.experts, "dtype": order.dtype, "drafting": order.drafting}
    try:
        for rank in range(order.ranks):
            ours = tensors_in(load_model(Path(order.served), rank, order.ranks, **options, extra=order.extra))
            truth = tensors_in(load_model(Path(order.truth), rank, order.ranks, **options))
            assert ours.keys() == truth.keys()
            for name, tensor in truth.items():
                same = torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (tensor, ours[name])))
                loaded.unequal += [] if same else [name]
            loaded.compared += len(truth)
            loaded.needed.append(sum(tensor.nbytes for tensor in truth.values()))
    except Exception as error:  # noqa: BLE001 - the test compares it
        loaded.error = f"{type(error).__name__}: {error}"
    finally:
        vllm_loader.load_weights = original
    loaded.read = [None if report is None else report.bytes_read for report in reports]
    return loaded


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main() -> None:
    """Take orders until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    os.environ.update(ENVIRONMENT)
    sys.modules.pop("torchvision", None)  # hidden from engines; the stand-ins make it importable
    add_stand_ins()
    start_groups()
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    log = logging.getLogger("vllm.transaxle")
    log.setLevel(logging.INFO)
    for line in sys.stdin:
        handler = _Messages()
        log.addHandler(handler)
        loaded = _compare(Loading(**json.loads(line)))
        log.removeHandler(handler)
        loaded.log = "\n".join(handler.texts)
        answers.write(json.dumps(asdict(loaded)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
