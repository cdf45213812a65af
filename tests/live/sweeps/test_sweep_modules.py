"""Every kind of module is loaded exactly, or refused: a sample of the sweep here, all of it in `make oracle`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.live.sweeps.sweep import BARE, EXACT, LAYERS, LAZY, WRAPPED, Make, by_torch, outcome, shipped, tensors
from tests.oracles.quiet import quiet

SAMPLE = ["BatchNorm2d", "Conv2d", "EmbeddingBag", "LSTM", "MultiheadAttention", "ParameterDict"]
SIZES = ((), (2,), (2, 2), (2, (2, 2)), (2, 2, 2))
"""Arguments by which torch's layers without values can be made."""


def test_every_layer_that_torch_ships_is_in_the_table_or_has_no_values() -> None:
    unknown = []
    for name, kind in shipped(nn).items():
        if name in LAYERS or name in LAZY or name in BARE:
            continue
        made = None
        for arguments in SIZES:
            try:
                with quiet():
                    made = kind(*arguments)
            except (TypeError, ValueError):
                continue
            break
        if made is None or tensors(made):
            unknown.append(name)
    assert not unknown


@pytest.mark.parametrize("name", SAMPLE)
def test_layers_of_torch(name: str) -> None:
    assert outcome(LAYERS[name], copied=by_torch) == EXACT


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_and_parametrizations(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert outcome(WRAPPED[name]) == EXACT


@pytest.mark.oracle
@pytest.mark.parametrize("name", LAYERS)
def test_all_layers_of_torch(name: str) -> None:
    with quiet():
        assert outcome(LAYERS[name], copied=by_torch) == EXACT


@pytest.mark.oracle
@pytest.mark.parametrize("name", LAZY)
def test_layers_without_sizes_are_refused(name: str) -> None:
    from transaxle.errors import TransaxleError
    from transaxle.live.model.state_tensors import leaves

    with pytest.raises(TransaxleError, match="Run the model once"):
        leaves(LAZY[name](*(2,) * (0 if "Norm" in name else 1 if name == "LazyLinear" else 2)))


@pytest.mark.oracle
def test_modules_that_torch_quantizes_are_exact_or_refused() -> None:
    with quiet():
        found = {name: outcome(make) for name, make in _quantized().items()}
    assert set(found.values()) == {EXACT, "UNSUPPORTED"}, found


def _quantized() -> dict[str, Make]:
    """Modules of torch.ao: converted ones, ones that train for it, and observers."""
    import torch.ao.nn.intrinsic.qat as fused
    import torch.ao.nn.qat as training
    import torch.ao.nn.quantizable as quantizable
    import torch.ao.nn.quantized as static
    import torch.ao.nn.quantized.dynamic as dynamic
    import torch.ao.quantization as ao

    kind: Any = ao
    how = kind.get_default_qat_qconfig("fbgemm")
    observers = [name for name in vars(ao) if name.endswith("Observer") and not name.startswith(("_", "Fixed"))]
    bare = {"ObserverBase", "UniformQuantizationObserverBase", "AffineQuantizedObserverBase", "ReuseInputObserver"}
    made: dict[str, Make] = {name: getattr(kind, name) for name in observers if name not in bare}
    return made | {
        "quantized.Linear": lambda: static.Linear(3, 4),
        "quantized.Conv2d": lambda: static.Conv2d(2, 3, 2),
        "quantized.BatchNorm2d": lambda: static.BatchNorm2d(3),
        "quantized.Quantize": lambda: static.Quantize(1.0, 0, torch.quint8),
        "quantized.QFunctional": static.QFunctional,
        "dynamic.Linear": lambda: dynamic.Linear(3, 4),
        "dynamic.LSTM": lambda: dynamic.LSTM(3, 4),
        "dynamic.GRUCell": lambda: dynamic.GRUCell(3, 4),
        "qat.Linear": lambda: training.Linear(3, 4, qconfig=how),
        "qat.Conv2d": lambda: training.Conv2d(2, 3, 2, qconfig=how),
        "qat.ConvBn2d": lambda: fused.ConvBn2d(2, 3, 2, qconfig=how),
        "qat.LinearBn1d": lambda: fused.LinearBn1d(2, 3, qconfig=how),
        "quantizable.LSTM": lambda: quantizable.LSTM(2, 3),
        "quantizable.MultiheadAttention": lambda: quantizable.MultiheadAttention(4, 2),
        "FakeQuantize": kind.FakeQuantize,
        "FusedMovingAvgObsFakeQuantize": lambda: kind.FusedMovingAvgObsFakeQuantize(
            observer=kind.MovingAverageMinMaxObserver
        ),
    }
