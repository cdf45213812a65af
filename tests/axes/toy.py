"""A small family with what real ones have, a model of it, and the same model packed by torch."""

from __future__ import annotations

import numpy as np
import torch

from tests.axes.apply import HOLE, Store, arange, fill, only
from transaxle.axes.translation.translate import Translation
from transaxle.errors import Refusal

TOY = only("""
family toy
  axes l=layers e=experts d=width f n=words p g=groups c=head
  embed  : n d
  norm   : l d
  gate   : l e f d
  up     : l e f d
  bias   : l f             when biased
  extra  : l d             optional
  k      : l g c d         optional
  fine   : l f d           when l >= first
  end    : d
  head   : n d
  tie head = embed         when tied
dialect hf
  embed = embed[n d]
  layers.{l}.norm = norm[d]
  layers.{l}.experts.{e}.gate = gate[f d]
  layers.{l}.experts.{e}.up = up[f d]
  layers.{l}.bias = bias[f]        when biased
  layers.{l}.extra = extra[d]
  layers.{l}.k = k[(g c) d]
  layers.{l}.fine = fine[f d]
  end = end[d]
  head = head[n d]                 when not tied
  ignore layers.{l}.inv_freq
dialect both like hf
  head = head[n d]
dialect packed
  tokens = [[embed:n | 0:p] d]
  blocks.{l}.norm = norm[d]
  blocks.{l}.w = [e [gate:f | up:f] d]
  blocks.{l}.bias = bias[f]
  blocks.{l}.fine = fine[d f]
  end = end[d]
  output = [[head:n | 0:p] d]      when not tied
dialect stacked
  tokens = embed[n d]
  norm = norm[l d]
  w.{l}.{e} = [[gate:f | up:f] d]
  end = end[d]
  output = head[n d]
""")

CONFIG = {"layers": 2, "experts": 3, "width": 4, "words": 7, "tied": False, "biased": False, "first": 9}


def model(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A model in hf, every element with a number of its own; None leaves a tensor out."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (7, 4), "end": (4,), "head": (7, 4)}
    for layer in range(2):
        shapes[f"layers.{layer}.norm"] = (4,)
        for e in range(3):
            shapes |= {f"layers.{layer}.experts.{e}.{name}": (5, 4) for name in ("gate", "up")}
    found = {}
    start = 0
    for name, shape in shapes.items():
        found[name] = arange(*shape, start=start)
        start += found[name].numel()
    for name, tensor in changed.items():
        name = name.replace("__", ".")
        found.pop(name, None)
        if tensor is not None:
            found[name] = tensor
    return found


def packed(hf: dict[str, torch.Tensor], padding: int = 0) -> dict[str, torch.Tensor]:
    """The same in `packed`, built by torch."""
    rows = torch.full((padding, 4), HOLE)
    found = {"tokens": torch.cat([hf["embed"], rows]), "end": hf["end"], "output": torch.cat([hf["head"], rows])}
    for layer in range(2):
        found[f"blocks.{layer}.norm"] = hf[f"layers.{layer}.norm"]
        experts = [[hf[f"layers.{layer}.experts.{e}.{name}"] for name in ("gate", "up")] for e in range(3)]
        found[f"blocks.{layer}.w"] = torch.stack([torch.cat(parts) for parts in experts])
    return found


def only_refusal(view: Translation, code: str) -> Refusal:
    (refusal,) = view.refusals
    assert refusal.code == code
    return refusal


def equal(view: Translation, store: Store) -> list[bool]:
    """What each check finds."""
    return [np.array_equal(fill(store, check.first), fill(store, check.second)) for check in view.checks]
