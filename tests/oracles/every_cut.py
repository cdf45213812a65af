"""What becomes of every model type of the installed transformers that is cut by tensor parallelism.

    python -m tests.oracles.every_cut [TYPE ...]

cuts a tiny model of each type over two and three ranks and holds its logits and all gradients against those of the
whole model. The types that are exact are written to `src/transaxle/parallel/proven_types.json`; no other model
of transformers is cut.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.live.ranks import run, stop_all
from tests.oracles.every_type import built, installed_types
from tests.oracles.quiet import quiet
from tests.oracles.tiny_models import drawn
from transaxle.errors import TransaxleError
from transaxle.parallel.cutting import cut_parameters
from transaxle.parallel.tensor_parallel import RECORD_NAME, proven_types, tensor_parallel
from transaxle.torch_tensors import local_of

RECORD = Path(__file__).parents[2] / "src/transaxle/parallel" / RECORD_NAME
EXACT, WRONG, UNBUILT, REFUSED = "exact", "WRONG", "not run", "refused"
WORLDS = (2, 3)
_CHOSEN = {"topk_group": 1, "n_group": 1} | dict.fromkeys(
    ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts", "top_k"), 2
)
"""Config keys whose values tiny models are too small for."""
_ONCE = 1e-3
"""Largest difference of a gradient, in units of its largest value: roundings of fp32. What is cut wrongly is off by a
tenth and more."""
_NOTHING = 1e-5
"""Below this part of the model's largest gradient one is zero but for roundings, as of a bias added to all keys."""
Made = tuple[type[nn.Module], Any]
"""A class of models, and a config."""


def outcome(model_type: str, world: int) -> str:
    """Return `exact`, or why a type is not: `WRONG: …`, `refused: …`, `not run: …`."""
    answers = run(world, compare, model_type)
    return next((each for each in answers if each != EXACT), EXACT)


def compare(rank: int, world: int, model_type: str) -> str:
    """Cut tiny models of a type, and compare each with the whole one; those that do not compute say nothing."""
    said: list[str] = []
    with quiet():
        for configs in (_drawn, _traced):
            said = [_compared(whole, world) for whole in _models(configs(model_type))]
            wrong = [each for each in said if each.startswith(WRONG)]
            if wrong or EXACT in said:
                return wrong[0] if wrong else EXACT
    return said[-1] if said else UNBUILT


def _compared(whole: nn.Module, world: int) -> str:
    ids = _tokens(whole)
    try:
        wanted = _logits(whole, ids)
    except Exception as error:  # noqa: BLE001 - of the peer: a tiny config, or other inputs
        return f"{UNBUILT}: {_short(error)}"
    try:
        with patch.object(import_module(tensor_parallel.__module__), "check_type"):  # it refuses what was not tried yet
            cut = tensor_parallel(deepcopy(whole), init_device_mesh("cpu", (world,)))
    except TransaxleError as error:
        return f"{REFUSED}: {_short(error)}"
    try:
        logits = _logits(cut, ids)
    except Exception as error:  # noqa: BLE001 - where a part is taken for the whole
        return f"{WRONG}: {_short(error)}"
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    for each in (wanted, logits):
        (each * weights).sum().backward()
    if (off := _off(logits, wanted, 0.0)) > _ONCE:
        return f"{WRONG}: logits off by {off:.2g}"
    named = dict(whole.named_parameters())
    largest = max(float(each.grad.abs().max()) for each in named.values() if each.grad is not None)
    for name, parameter, kept in cut_parameters(cut):
        grad, own = (
            each.new_zeros(each.shape) if each.grad is None else each.grad for each in (named[name], parameter)
        )
        if local_of(parameter).shape != grad.shape and not grad.any():
            return f"{UNBUILT}: no gradient reaches {name}"
        if (off := _off(local_of(own), kept.take(grad), largest * _NOTHING)) > _ONCE:
            return f"{WRONG}: gradient of {name} off by {off:.2g}"
    return EXACT


def _models(configs: Iterator[Made]) -> Iterator[nn.Module]:
    """Models with random weights that are the same on every rank."""
    for kind, config in configs:
        try:
            for part in _parts(config):
                _mend(part)
            model = kind(config).float().eval()
        except Exception:  # noqa: BLE001 - of the peer
            continue
        generator = torch.Generator().manual_seed(1)
        for _, value in sorted(model.named_parameters()):
            value.data.copy_(torch.randn(value.shape, generator=generator) * 0.2 + (value.dim() == 1))
        yield model


def _drawn(model_type: str) -> Iterator[Made]:
    """Tiny configs of two sizes, and the class of models that each is for."""
    for wider in (True, False):
        with suppress(Exception):  # of the peer
            model = drawn(model_type, wider=wider)
            yield type(model), model.config


def _traced(model_type: str) -> Iterator[Made]:
    """The configs that tables are derived from; their models are larger."""
    for model in built(model_type):
        yield type(model), model.config


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield from _parts(value)


def _mend(config: Any) -> None:
    """Give a config values that fit tiny sizes."""
    for key, value in _CHOSEN.items():
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, value)
    if hasattr(config, "rotary_dim"):
        config.rotary_dim = config.n_embd // config.n_head


def _tokens(model: nn.Module) -> Tensor:
    config: Any = model.config
    size = getattr(config.get_text_config(), "vocab_size", None) or 50
    return torch.randint(0, int(size), (4, 24), generator=torch.Generator().manual_seed(3))


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    found = model(input_ids=ids, use_cache=False)
    logits: Tensor = found.logits if hasattr(found, "logits") else found.last_hidden_state
    if not logits.isfinite().all():
        raise ValueError("not finite")
    return logits


def _off(own: Tensor, wanted: Tensor, least: float) -> float:
    if not wanted.numel():
        return 0.0
    off = float((own - wanted).abs().max())
    return 0.0 if off <= least else off / max(float(wanted.abs().max()), 1e-12)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def main(types: list[str]) -> int:
    """Walk the types, all where none is given, and write the record."""
    found = set(proven_types())
    for model_type in types or installed_types():
        said = next((each for world in WORLDS if (each := outcome(model_type, world)) != EXACT), EXACT)
        found.discard(model_type)
        found |= {model_type} if said == EXACT else set()
        sys.stdout.write(f"{model_type}: {said}\n")
        sys.stdout.flush()
    stop_all()
    record = {"transformers": transformers.__version__, "types": sorted(found)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(import_module("tests.oracles.every_cut").main(sys.argv[1:]))  # ranks import it by its name
