"""Entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes. This module imports no other
module of Transaxle before vLLM uses what it registers.

Registered are the weight transfer backend and the load format `transaxle`.
"""

from __future__ import annotations

import logging
from typing import Any

BACKEND = LOAD_FORMAT = "transaxle"
_MODULE, _CLASS = "transaxle.refit.vllm_engine", "VllmEngine"
_LOG = logging.getLogger(__name__)
_MISSING = "the %s %r is not available: it needs vLLM 0.32 or newer (%s)"


def register() -> None:
    """Register the weight transfer backend and the load format `transaxle` with vLLM; repeated calls do nothing.

    If the vLLM version lacks one of the two interfaces, vLLM starts normally, and a warning in its log states why the
    backend or the format is missing.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError as error:
        _LOG.warning(_MISSING, "weight transfer backend", BACKEND, error)
    else:
        if BACKEND not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(BACKEND, _MODULE, _CLASS)
    try:
        from vllm.model_executor import model_loader
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    except ImportError as error:
        _LOG.warning(_MISSING, "load format", LOAD_FORMAT, error)
    else:
        if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
            model_loader.register_model_loader(LOAD_FORMAT)(model_loader_class(BaseModelLoader))


def model_loader_class(base: Any) -> Any:
    """Return the class of vLLM's model loaders for `--load-format transaxle`.

    Args:
        base: vLLM's `BaseModelLoader`.
    """

    class TransaxleModelLoader(base):  # type: ignore[misc]  # vLLM's class has no types here
        """Loads any checkpoint that Transaxle opens; see `transaxle.refit.vllm_loader`."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            from transaxle.refit.vllm_loader import read_loader_options

            self._options = read_loader_options(load_config.model_loader_extra_config)

        def download_model(self, model_config: Any) -> None:
            """Do nothing, because each worker reads its own bytes from where the checkpoint is."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Fill the parameters of a worker's model; all workers must call this method."""
            from transaxle.refit.vllm_loader import load_weights

            load_weights(model, model_config, self._options)

        def get_all_weights(self, model_config: Any, model: Any) -> Any:
            """Yield whole tensors under the hub's names, for vLLM's `reload_weights`."""
            from transaxle.refit.vllm_loader import reload_tensors

            return reload_tensors(model, model_config, self._options)

    return TransaxleModelLoader
