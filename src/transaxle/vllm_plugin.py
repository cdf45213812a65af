"""Entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes. This module imports no other
module of Transaxle.

The weight transfer engine is imported only if vLLM's config names the backend `transaxle`.
"""

from __future__ import annotations

import logging

BACKEND = "transaxle"
_MODULE, _CLASS = "transaxle.refit.vllm_engine", "VllmEngine"


def register() -> None:
    """Register the weight transfer backend `transaxle` with vLLM; repeated calls do nothing.

    If the vLLM version has no weight transfer, vLLM starts normally, and a warning in its log states why the backend is
    missing.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError as error:
        text = "the weight transfer backend %r is not available: it needs vLLM 0.32 or newer (%s)"
        logging.getLogger(__name__).warning(text, BACKEND, error)
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _MODULE, _CLASS)
