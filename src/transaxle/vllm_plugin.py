"""What vLLM calls in each of its processes, by the entry point `vllm.general_plugins`; it imports nothing of ours.

The engine itself is imported only where a config asks for the backend `transaxle`.
"""

from __future__ import annotations

import logging

BACKEND = "transaxle"
_MODULE, _CLASS = "transaxle.refit.vllm_engine", "VllmEngine"


def register() -> None:
    """Make `weight_transfer_config={"backend": "transaxle"}` known to vLLM; it may be called more than once.

    A vLLM that has no such config starts as it does without this package, and is told why it has no such backend.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError as error:
        text = "the weight transfer backend %r is not there: it needs vLLM 0.32 or newer (%s)"
        logging.getLogger(__name__).warning(text, BACKEND, error)
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _MODULE, _CLASS)
