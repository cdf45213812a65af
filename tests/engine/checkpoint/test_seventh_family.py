"""A family that nobody here has heard of: a text file makes it convert, and numpy says what must come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import transaxle as tx
from tests import checkpoints

Array = npt.NDArray[Any]

RULES = """
# Everything the other six do not have together.
family heron
  model_type heron heron_text
  axes  l=blocks n=vocabulary d=width f=inner e=experts g=groups h=half p two=2 d2=width
  axis  r = heads[l] / groups                     # another number of heads in each layer
  let sparse = l in sparse_blocks
  embed : n d
  q     : l g r two h d
  k     : l g two h d
  norm  : l d
  gate  : l e f d      when sparse
  up    : l e f d      when sparse
  down  : l e d f      when sparse
  wide  : l d f        when not sparse
  mix   : l d d2
  head  : n d
  extra : d            optional
  tie head = embed     when tied

dialect hf                                          # one tensor an expert, halves of a head one after the other
  embed                       = embed[n d]
  {l}.q                       = q[(g r two h) d]
  {l}.k                       = k[(g two h) d]
  {l}.norm                    = norm[d]
  {l}.experts.{e}.gate        = gate[f d]
  {l}.experts.{e}.up          = up[f d]
  {l}.experts.{e}.down        = down[d f]
  {l}.wide                    = wide[d f]
  {l}.mix                     = mix[d d2]
  head                        = head[n d]           when not tied
  extra                       = extra[d]
  ignore {l}.frequencies

dialect packed 2                                    # interleaved everywhere, padded, transposed
  w.embed                     = [[embed:n | 0:p] d]
  w.{l}.qk                    = [(g [q:(r h two) | k:(h two)]) d]
  w.{l}.norm                  = norm[1 d]
  w.{l}.gate_up               = [e d (f [gate: | up:])]
  w.{l}.down                  = down[f (e d)]
  w.{l}.wide                  = wide[f d]
  w.{l}.mix                   = mix[d2 d]
  w.head                      = head[n d]
  w.extra                     = extra[d]
"""
MODEL_TYPE = "heron"
CONFIG: dict[str, Any] = {
    "model_type": MODEL_TYPE, "blocks": 3, "vocabulary": 11, "width": 6, "inner": 4, "experts": 5, "groups": 2,
    "half": 3,    "heads": [2, 6, 4], "sparse_blocks": "0,2", "tied": True,
}  # fmt: skip
PADDING = 5


def _source() -> dict[str, Array]:
    random = np.random.default_rng(0)
    n, d, f, e, g, h = (CONFIG[key] for key in ("vocabulary", "width", "inner", "experts", "groups", "half"))

    def drawn(*shape: Any) -> Array:
        return random.standard_normal(shape).astype(np.float32)

    held = {"embed": drawn(n, d), "extra": drawn(d)}
    for layer, count in enumerate(CONFIG["heads"]):
        held |= {f"{layer}.q": drawn(count * 2 * h, d), f"{layer}.k": drawn(g * 2 * h, d)}
        held |= {f"{layer}.norm": drawn(d), f"{layer}.mix": drawn(d, d), f"{layer}.frequencies": drawn(h)}
        if layer == 1:
            held[f"{layer}.wide"] = drawn(d, f)
            continue
        for expert in range(e):
            stem = f"{layer}.experts.{expert}"
            held |= {f"{stem}.gate": drawn(f, d), f"{stem}.up": drawn(f, d), f"{stem}.down": drawn(d, f)}
    return held


def _packed(held: dict[str, Array]) -> dict[str, Array]:
    """What dialect `packed` must hold, step by step in numpy."""
    d, g, h = 6, 2, 3
    embed = held["embed"]
    out = {
        "w.embed": np.concatenate([embed, np.zeros((PADDING, d), np.float32)]),
        "w.head": embed,
        "w.extra": held["extra"],
    }
    for layer in range(3):
        q = held[f"{layer}.q"].reshape(g, -1, 2, h, d).swapaxes(2, 3).reshape(g, -1, d)
        k = held[f"{layer}.k"].reshape(g, 2, h, d).swapaxes(1, 2).reshape(g, -1, d)
        out[f"w.{layer}.qk"] = np.concatenate([q, k], axis=1).reshape(-1, d)
        out[f"w.{layer}.norm"] = held[f"{layer}.norm"][None]
        out[f"w.{layer}.mix"] = held[f"{layer}.mix"].T
        if layer == 1:
            out[f"w.{layer}.wide"] = held[f"{layer}.wide"].T
            continue
        gate, up, down = (
            np.stack([held[f"{layer}.experts.{e}.{part}"] for e in range(5)]) for part in ("gate", "up", "down")
        )
        out[f"w.{layer}.gate_up"] = np.stack([gate, up], axis=2).reshape(5, -1, d).swapaxes(1, 2)
        out[f"w.{layer}.down"] = down.transpose(2, 0, 1).reshape(4, -1)
    return out


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "heron.rules"
    path.write_text(RULES)
    return path


def _bytes(held: dict[str, Array]) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {name: (array.shape, array.tobytes()) for name, array in held.items()}


def test_there_and_back_through_files(rules: Path, tmp_path: Path) -> None:
    held = _source()
    source = checkpoints.write(tmp_path / "source", held, config=CONFIG)
    with tx.open(source, rules=rules) as checkpoint:
        assert (checkpoint.family, checkpoint.dialect) == (MODEL_TYPE, "hf")
    report = tx.convert(source, tmp_path / "out", to="packed", rules=rules, axes={"p": PADDING})
    assert report.dialect == "packed@2"
    assert set(report.ignored) == {f"{layer}.frequencies" for layer in range(3)}
    assert report.kept == ()
    assert _bytes(checkpoints.read(tmp_path / "out")) == _bytes(_packed(held))
    assert tx.verify(tmp_path / "out").ok
    assert tx.verify(source, tmp_path / "out", rules=rules, axes={"p": PADDING}).equal
    back = tmp_path / "back"
    tx.convert(tmp_path / "out", back, to="hf", rules=rules)
    kept = {name: array for name, array in held.items() if "frequencies" not in name}
    assert _bytes(checkpoints.read(back)) == _bytes(kept)


def test_without_the_rules_it_is_a_stranger_that_still_moves(rules: Path, tmp_path: Path) -> None:
    source = checkpoints.write(tmp_path / "source", _source(), config=CONFIG)
    with pytest.raises(tx.TransaxleError, match=r"(?s)no family has a dialect 'packed'.*need --rules"):
        tx.plan(source, tmp_path / "x", to="packed")
    with pytest.raises(tx.TransaxleError, match=r"(?s)UNKNOWN_FAMILY.*heron"):
        tx.plan(source, tmp_path / "x", to="megatron")
    tx.convert(source, tmp_path / "same", to="safetensors", shard_size=100)
    assert checkpoints.same(source, tmp_path / "same")
    tx.convert(source, tmp_path / "out", to="packed", rules=rules, axes={"p": PADDING})
    with tx.open(tmp_path / "out") as checkpoint:
        assert checkpoint.family is None, "its manifest names a family that only the rules know"
    with tx.open(tmp_path / "out", rules=rules) as checkpoint:
        assert checkpoint.dialect == "packed@2"


def test_a_size_that_only_the_user_knows(rules: Path, tmp_path: Path) -> None:
    """Nothing tells how many groups there are; when that is said, the shapes tell the rest, layer by layer."""
    silent = {key: value for key, value in CONFIG.items() if key not in {"groups", "heads", "half"}}
    source = checkpoints.write(tmp_path / "source", _source(), config=silent)
    with pytest.raises(tx.TransaxleError, match=r"(?s)UNKNOWN_AXIS.*--axis"):
        tx.convert(source, tmp_path / "out", to="packed", rules=rules)
    tx.convert(source, tmp_path / "out", to="packed", rules=rules, axes={"g": 2, "p": PADDING})
    assert _bytes(checkpoints.read(tmp_path / "out")) == _bytes(_packed(_source()))
    given = tmp_path / "config.json"
    given.write_text(json.dumps(CONFIG))
    tx.convert(source, tmp_path / "again", to="packed", rules=rules, config=given, axes={"p": PADDING})
    assert checkpoints.same(tmp_path / "out", tmp_path / "again")
