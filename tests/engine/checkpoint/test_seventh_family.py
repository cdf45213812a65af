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
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.engine.checkpoint.settings import Settings
from transaxle.families import with_rules

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


def test_from_a_string(tmp_path: Path) -> None:
    """The text alone is enough: no file, no registry."""
    families = with_rules(RULES, "a string")
    held = _source()
    source = checkpoints.write(tmp_path / "source", held, config=CONFIG)
    with open_checkpoint(source) as opened:
        said = Settings(families=families, axes={"p": PADDING})
        view = Checkpoint(opened.container, said, None, None).as_dialect("packed@2")
        wanted = _packed(held)
        assert view.keys() == wanted.keys()
        assert all(view[name].tobytes() == array.tobytes() for name, array in wanted.items())


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


def test_a_dialect_is_added_to_a_known_family(tmp_path: Path) -> None:
    rules = tmp_path / "mine.rules"
    rules.write_text(
        "dialect mine of qwen3_moe like hf\n  my.{l}.experts = [d e (f [gate: | up:])]\n  my.{l}.down.{e} = down[f d]\n"
    )
    source = checkpoints.tiny(tmp_path / "source")
    tx.convert(source, tmp_path / "out", to="mine", rules=rules)
    got, held = checkpoints.read(tmp_path / "out"), checkpoints.tensors()
    stems = [f"model.layers.1.mlp.experts.{e}" for e in range(8)]
    gate, up = (np.stack([held[f"{stem}.{part}_proj.weight"] for stem in stems]) for part in ("gate", "up"))
    wanted = np.stack([gate, up], axis=2).reshape(8, -1, 16).transpose(2, 0, 1)
    assert (got["my.1.experts"].shape, got["my.1.experts"].tobytes()) == (wanted.shape, wanted.tobytes())
    assert got["my.0.down.7"].tobytes() == held["model.layers.0.mlp.experts.7.down_proj.weight"].T.tobytes()
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf", rules=rules)
    assert checkpoints.same(source, tmp_path / "back")


def test_rules_that_are_wrong_are_refused_with_line_and_file(tmp_path: Path) -> None:
    rules = tmp_path / "wrong.rules"
    rules.write_text("family a\n  axes d\n  x : d z\ndialect hf\n  x = x[d\n  y = y[d]\n")
    source = checkpoints.tiny(tmp_path / "source")
    with pytest.raises(tx.TransaxleError) as caught:
        tx.open(source, rules=rules)
    assert {refusal.code for refusal in caught.value.refusals} == {"CORRUPT"}
    assert [str(refusal.where).rpartition(" ")[2] for refusal in caught.value.refusals] == ["3", "5", "6"]
    assert all(str(rules) in str(refusal.where) for refusal in caught.value.refusals)


@pytest.mark.parametrize("arithmetic", ["0 * w", "1.2.3 * w", "w -", "w * w", "1e400 * w"])
def test_arithmetic_that_cannot_be_undone_is_refused(tmp_path: Path, arithmetic: str) -> None:
    text = f"family a\n  axes d\n  w : d\ndialect hf\n  w = w[d]\ndialect b\n  w = w[d]  lossy: {arithmetic}\n"
    with pytest.raises(tx.TransaxleError, match="CORRUPT"):
        with_rules(text, "a string")


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


COUNTED = """
family counted
  model_type counted
  axes l=layers e=experts d=width f=inner
  up     : l e f d
  router : l e d
dialect apart
  layers.{l}.{e}.up = up[f d]
  layers.{l}.router = router[e d]
dialect through
  experts.{(l e)}.up = up[f d]
  routers.{l}        = router[e d]
"""


def test_numbers_of_several_axes_through_files(tmp_path: Path) -> None:
    rules = tmp_path / "counted.rules"
    rules.write_text(COUNTED)
    held = {f"layers.{i}.{e}.up": np.full((3, 2), 10 * i + e, np.float32) for i in range(2) for e in range(4)}
    held |= {f"layers.{i}.router": np.full((4, 2), i, np.float32) for i in range(2)}
    source = checkpoints.write(tmp_path / "source", held, config={"model_type": "counted", "layers": 2, "experts": 4})
    tx.convert(source, tmp_path / "out", to="through", rules=rules)
    found = checkpoints.read(tmp_path / "out")
    assert [float(found[f"experts.{n}.up"][0, 0]) for n in range(8)] == [0, 1, 2, 3, 10, 11, 12, 13]
    for file in ("transaxle.json", "config.json"):
        (tmp_path / "out" / file).unlink()
    tx.convert(tmp_path / "out", tmp_path / "back", to="apart", rules=rules, family="counted")  # the routers tell e
    assert _bytes(checkpoints.read(tmp_path / "back")) == _bytes(held)
    alone = {name: array for name, array in found.items() if "routers" not in name}
    bare = checkpoints.write(tmp_path / "bare", alone)
    with pytest.raises(tx.TransaxleError, match=r"(?s)UNKNOWN_AXIS.*8 numbers of \{\(l e\)\}.*--axis e=N"):
        tx.convert(bare, tmp_path / "no", to="apart", rules=rules, family="counted")
