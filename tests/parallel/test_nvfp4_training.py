"""Models that train with `NVFP4BlockScaling` over tensor-parallel ranks, against one on one rank in plain numpy.

The statement is a plain model with plain AdamW, whose linear layers are numpy of `tests/quant/nvfp4`. A sum over a cut
dim is added up in float32 by the ranks; the statement adds the same parts. So all is equal bit for bit, over two ranks,
of which either order of a sum is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import transaxle as tx
from tests.live.ranks import run
from tests.parallel.models import SIZES, beyond, build, gradients_off, off, tokens
from tests.parallel.test_quantized import MIXTURE, ONCE, _differing, _masters, _mesh, _mixture, _saved, _unlike
from tests.quant.nvfp4.statement import Quantized, product, quantized, transformed, words
from tests.quant.nvfp4.test_products import key_of
from transaxle.parallel.cutting import ParameterCut, cut_parameters
from transaxle.parallel.tensor_parallel import tensor_parallel
from transaxle.quant import MasterWeights, NVFP4BlockScaling, quantize_
from transaxle.torch_tensors import local_of

SEED, STEPS = 5, 2
CONFIG: dict[str, Any] = {
    **SIZES, "model_type": "llama", "mlp_bias": True, "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 1,
}  # fmt: skip
"""Whatever is cut of it over 2 or 4 ranks is whole tiles of 16 x 16."""
FUSED: dict[str, Any] = {**CONFIG, "model_type": "phi3", "mlp_bias": False}
CLOSE = 1e-3
"""Largest relative difference of losses where sums have other parts: now and then a rounding makes another code."""
KIND, FLAT = "nvfp4 training", "nvfp4 training, flat"
RECIPES = {KIND: NVFP4BlockScaling(seed=SEED), FLAT: NVFP4BlockScaling(seed=SEED, disable_2d_quantization=True)}
_words = cache(words)
"""Models that are compared one after the other draw the same numbers."""
Spans = Sequence[Sequence[tuple[int, int]]]
"""For each rank what it has of a dim."""


def _batch(step: int) -> Tensor:
    return torch.randint(CONFIG["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(step))


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


class _Layer(nn.Module):
    """A linear layer as the statement has it.

    Args:
        inner: whose weight and bias it has.
        name: of the weight.
        recipe: what is rounded, and how.
        cut: dim of the weight that ranks share out, and what each has; None: it is whole.
    """

    def __init__(self, inner: nn.Linear, name: str, recipe: NVFP4BlockScaling, cut: tuple[int, Spans] | None) -> None:
        super().__init__()
        self.weight = inner.weight
        self.bias: nn.Parameter | None = inner.bias
        self.tile = (1, 16) if recipe.disable_2d_quantization else (16, 16)
        self.key, self.calls = key_of(SEED, name), 0
        self.spans: dict[int, Spans] = {} if cut is None else {cut[0]: cut[1]}

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, N]."""
        made: Tensor = _Stated.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return made if self.bias is None else made + self.bias


class _Stated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: _Layer) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        left = quantized(_rows(x))
        return _summed(left, quantized(weight.detach().numpy(), layer.tile), layer.spans.get(1)).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        grad = _rows(grads[0])
        state = layer.key, layer.calls
        layer.calls += 1
        random = [_words(state, range(len(grad)), range(grad.shape[1]), stream) for stream in (0, 1)]
        right = quantized(weight.detach().numpy().T, layer.tile)
        of_x = _summed(quantized(grad, random=random[0]), right, layer.spans.get(0)).view(x.shape)
        turned = quantized(transformed(grad, np.float32), random=random[1].T)
        of_weight = torch.from_numpy(product(turned, quantized(transformed(_rows(x), np.float32))))
        return of_x, of_weight, None


def _rows(x: Tensor) -> np.ndarray[Any, Any]:
    return x.detach().reshape(-1, x.shape[-1]).numpy()


def _summed(left: Quantized, right: Quantized, spans: Spans | None) -> Tensor:
    """The product of two operands, added up by ranks that have parts of what is summed up."""
    if spans is None:
        return torch.from_numpy(product(left, right))
    places = [np.concatenate([np.arange(*span) for span in each]) for each in spans]
    parts = [product(_columns(left, each), _columns(right, each)) for each in places]
    return torch.from_numpy(np.sum(parts, 0, dtype=np.float32))


def _columns(operand: Quantized, places: np.ndarray[Any, Any]) -> Quantized:
    return Quantized(operand.values[:, places], operand.scales[:, places], operand.amax)


def _stated(config: dict[str, Any], recipe: NVFP4BlockScaling, cuts: Mapping[str, tuple[int, Spans]]) -> nn.Module:
    """The plain model whose linear layers are the statement's."""
    model = build(config)
    for path, inner in list(model.named_modules()):
        if isinstance(inner, nn.Linear):
            parent, _, own = path.rpartition(".")
            name = f"{path}.weight"
            setattr(model.get_submodule(parent), own, _Layer(inner, name, recipe, cuts.get(name)))
    return model


def _model(
    config: dict[str, Any], recipe: NVFP4BlockScaling, tp: int, *, first: bool = True, seed: int = 0
) -> tuple[nn.Module, MasterWeights]:
    """The model that Transaxle quantizes, and cuts: first of the two, or afterwards."""
    model = build(config, seed)
    for cuts in (first, not first):
        if not cuts:
            quantize_(model, recipe, preserve_high_precision_init=True)
        elif tp > 1:
            tensor_parallel(model, _mesh(tp)["tp"])
    return model, MasterWeights(model.parameters(), _optimizer)


def _step(model: nn.Module, optimizer: Any, step: int) -> tuple[Tensor, Tensor]:
    """Train a step; return the logits and the loss."""
    ids = _batch(step)
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    optimizer.step()
    return output.logits.detach(), output.loss.detach()


def _own(whole: Tensor, kept: ParameterCut | None) -> Tensor:
    return whole if kept is None else kept.take(whole)


def _compare(rank: int, world: int, config: dict[str, Any], kind: str) -> list[str]:
    recipe, found = RECIPES[kind], list[str]()
    for tp, first in ((1, True), (2, True), (2, False)):
        model, optimizer = _model(config, recipe, tp, first=first)
        kept = {name: each for name, _, each in cut_parameters(model)}
        cuts = {name: (each.dim, each.positions_by_rank) for name, each in kept.items() if len(each.shape) == 2}
        wanted = _stated(config, recipe, cuts)
        plain, named = _optimizer(wanted.parameters()), dict(wanted.named_parameters())
        for step in range(STEPS):
            for mine, theirs in zip(_step(model, optimizer, step), _step(wanted, plain, step), strict=True):
                found += [] if torch.equal(mine, theirs) else [f"{tp} {first} step {step}: outputs"]
            for name, parameter in model.named_parameters():
                mine_of, whole = parameter.grad, named[name].grad
                assert mine_of is not None
                assert whole is not None
                alike = torch.equal(local_of(mine_of), _own(whole, kept.get(name)))
                found += [] if alike else [f"{tp} {first} step {step}: {name}"]
            optimizer.zero_grad()
            plain.zero_grad()
        for name, master in _masters(model, optimizer).items():
            alike = torch.equal(local_of(master), _own(named[name].detach(), kept.get(name)))
            found += [] if alike else [f"{tp} {first} master of {name}"]
    return found


@pytest.mark.oracle
@pytest.mark.parametrize(("kind", "config"), [(KIND, CONFIG), (FLAT, CONFIG), (KIND, FUSED)])
def test_training_is_that_of_the_statement(kind: str, config: dict[str, Any]) -> None:
    """Outputs, gradients and masters on one rank and over two, quantized before the model is cut and afterwards."""
    assert run(2, _compare, config, kind) == [[], []]


def _sharing(rank: int, world: int, config: dict[str, Any]) -> dict[str, float]:
    recipe = RECIPES[KIND]
    model, optimizer = _model(config, recipe, world)
    wanted, found = _stated(config, recipe, {}), dict[str, float]()
    named, kept = dict(wanted.named_parameters()), {name: each for name, _, each in cut_parameters(model)}
    for mine, theirs in zip(_step(model, optimizer, 0), _step(wanted, _optimizer(wanted.parameters()), 0), strict=True):
        found[f"outputs {tuple(mine.shape)}"] = off(mine, theirs)
    for name, parameter in model.named_parameters():
        own, whole = parameter.grad, named[name].grad
        assert own is not None
        assert whole is not None
        found[name] = off(local_of(own), _own(whole, kept.get(name)))
    return found


@pytest.mark.oracle
@pytest.mark.parametrize(("config", "heads", "world"), [(CONFIG, 2, 4), (FUSED, 1, 2)], ids=["llama", "phi3"])
def test_heads_that_ranks_share(config: dict[str, Any], heads: int, world: int) -> None:
    """The gradient of their keys and values is summed up before it is quantized, and counted once for the input."""
    for found in run(world, _sharing, {**config, "num_key_value_heads": heads}):
        assert beyond(found, ONCE) == {}


def _begin(rank: int, world: int, config: dict[str, Any], kind: str, out: str) -> tuple[list[str], list[float]]:
    model, optimizer = _model(config, RECIPES[kind], 2)
    for step in range(STEPS):
        _step(model, optimizer, step)
        optimizer.zero_grad()
    tx.save(model, f"{out}/whole", to="safetensors", optimizer=optimizer)
    tx.save(model, f"{out}/dcp", to="dcp", optimizer=optimizer)
    return _differing(model, optimizer, _saved(f"{out}/whole"), kind, 1), _losses(model, optimizer)


def _losses(model: nn.Module, optimizer: Any) -> list[float]:
    found = []
    for step in range(STEPS, 2 * STEPS):
        found.append(float(_step(model, optimizer, step)[1]))
        optimizer.zero_grad()
    return found


def _resume(rank: int, world: int, config: dict[str, Any], kind: str, out: str) -> dict[int, list[float]]:
    """Load what two ranks saved over as many, over four and on one, from either format."""
    losses, saved = {}, _saved(f"{out}/whole")
    for tp in (2, 4, 1):
        model, optimizer = _model(config, RECIPES[kind], tp, seed=7)
        for source in ("dcp", "whole"):
            report = tx.load(model, f"{out}/{source}", optimizer=optimizer)
            assert report.converted == ()
            assert _differing(model, optimizer, saved, kind, 1) == []
            losses[tp] = _losses(model, optimizer)
    return losses


@pytest.mark.oracle
def test_training_goes_on_at_any_degree(tmp_path: Path) -> None:
    """With the codes, masters and random numbers; over as many ranks, with the losses, too, bit for bit."""
    config = {**CONFIG, "num_key_value_heads": 2}
    (unlike, wanted), *_ = run(2, _begin, config, KIND, str(tmp_path))
    assert unlike == []
    for losses in run(4, _resume, config, KIND, str(tmp_path)):
        assert losses[2] == wanted
        assert all(each == pytest.approx(wanted, rel=CLOSE) for each in losses.values())


def _experts(rank: int, world: int) -> dict[str, float]:
    mesh, found = _mesh(world)["tp"], dict[str, float]()
    for single in (True, False):
        whole, cut = _mixture(0, single=single), _mixture(0, single=single)
        for model in (whole, cut):
            quantize_(model, RECIPES[KIND])
        tensor_parallel(cut, mesh)
        named, ids = dict(whole.named_parameters()), tokens(MIXTURE)
        assert _unlike(cut, named, KIND) == []
        for call in range(2):
            outputs = [model(input_ids=ids, labels=ids) for model in (whole, cut)]
            found[f"{single} {call} logits"] = off(outputs[1].logits.detach(), outputs[0].logits.detach())
            for output in outputs:
                output.loss.backward()
        found |= {f"{single} {name}": value for name, value in gradients_off(cut, whole).items()}
        assert _unlike(cut, named, KIND) == [], "their random numbers have gone on alike"
    return found


def test_experts_that_are_cut() -> None:
    """Grouped layers of one weight, and of one for each expert: outputs, and gradients over two backwards."""
    for found in run(2, _experts):
        assert beyond(found, ONCE) == {}
