"""Plans: plain data that says every byte, and every reason against it, before anything is written."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

import transaxle as tx
from tests import checkpoints
from tests.formats import files
from tests.move.test_transfer import positions
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.plan.conversion import Prepared, make_plan
from transaxle.engine.plan.planned import Plan
from transaxle.errors import Code, Refused
from transaxle.move.workers import MIN_MEMORY

GATE = checkpoints.GATE
UP = GATE.replace("gate", "up")
DIALECTS = ["transformers", "torchtitan@0.2", "megatron", "identity"]

SHIFTED = """
family shifted
  axes l d f
  norm : l d
  gate : l f d
  up   : l f d
dialect hf
  {l}.norm = norm[d]
  {l}.gate = gate[f d]
  {l}.up   = up[f d]
dialect minus like hf
  {l}.minus = norm[d]       lossy: norm - 1
dialect exponent like hf
  {l}.decay = norm[d]       lossy: -exp(norm)
dialect fused like hf
  {l}.both = [[gate:f | up:f] d]   lossy: 2 * w
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.tiny(tmp_path_factory.mktemp("plan") / "tiny", shards=2)


def prepared(source: Path, to: str, **options: Any) -> Prepared:
    said = {key: options.pop(key) for key in ("axes", "rules", "family", "dialect", "config") if key in options}
    with open_checkpoint(source, **said) as checkpoint:
        return make_plan(checkpoint, to, **options)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def codes(plan: Plan) -> list[Code]:
    return [refusal.code for refusal in plan.refusals]


def test_a_plan_is_frozen_json_data(tiny: Path) -> None:
    plan = prepared(tiny, "safetensors:automodel").plan
    assert codes(plan) == []
    again = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
    assert again == plan
    for value in (plan, plan.tensors[0], plan.tensors[-1].transfers[0]):
        with pytest.raises(AttributeError):
            setattr(value, value.__struct_fields__[0], None)
    shown = json.loads(json.dumps(plan.as_json()))
    assert shown["bytes_written"] == sum(shown["files"].values())
    assert len(shown["tensors"]) == len(plan.tensors)
    assert sum(len(tensor["transfers"]) for tensor in shown["tensors"]) == shown["copies"] == plan.copies
    assert all("transfers" not in tensor for tensor in plan.as_json(copies=False)["tensors"])
    assert plan.contiguous <= plan.copies


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("shard_size", [1, 3000])
def test_every_byte_of_every_file_has_one_origin(tiny: Path, dialect: str, shard_size: int) -> None:
    """Headers, tensors and carried files tile the target; a tensor's transfers tile the tensor."""
    made = prepared(tiny, dialect, shard_size=shard_size, axes={"p": 3})
    written: dict[str, list[tuple[int, int]]] = {name: [] for name in made.plan.files}
    for fragment in made.draft.fragments:
        written[fragment.file].append((fragment.offset, fragment.offset + len(fragment.data)))
    for tensor in (*made.plan.tensors, *made.plan.carried_files):
        for place in tensor.places:
            written[place.file].append((place.source, place.source + place.width))
    for name, spans in written.items():
        spans.sort()
        assert spans[0][0] == 0, name
        assert spans[-1][1] == made.plan.files[name], name
        assert all(before[1] == after[0] for before, after in pairwise(spans)), name
    for tensor in made.plan.tensors:
        times = np.zeros(tensor.nbytes, np.uint8)
        np.add.at(times, [target for transfer in tensor.transfers for _, target in positions(transfer)], 1)
        padded = 3 * checkpoints.SIZES["hidden_size"] * 2 if "| 0:p" in tensor.rule else 0
        if "expert_bias" in tensor.name:
            padded = tensor.nbytes
        assert (times[: tensor.nbytes - padded] == 1).all(), tensor.name
        assert not times[tensor.nbytes - padded :].any(), tensor.name
    moved = sum(tensor.nbytes for tensor in made.plan.tensors if "expert_bias" not in tensor.name)
    assert made.plan.bytes_read == moved - 2 * 3 * 32 * (dialect in {"megatron", "te"})


@pytest.mark.parametrize("shard_size", [1, 8000, 10**9])
def test_shards_hold_the_same_in_order(tiny: Path, tmp_path: Path, shard_size: int) -> None:
    out = tmp_path / "out"
    tx.convert(tiny, out, to="hf", shard_size=shard_size, sync=False)
    assert checkpoints.same(tiny, out)
    plan = prepared(tiny, "hf", shard_size=shard_size).plan
    sizes: dict[str, list[int]] = {}
    for tensor in plan.tensors:
        sizes.setdefault(tensor.places[0].file, []).append(tensor.nbytes)
    assert all(sum(held) <= shard_size or len(held) == 1 for held in sizes.values())
    assert list(sizes) == sorted(sizes), "a worker that goes through the plan writes one file after the other"
    assert (len(sizes) > 1) == (shard_size < 10**6) == (out / checkpoints.INDEX).exists()


@pytest.mark.parametrize(
    ("to", "name"),
    [
        ("dcp:torchtitan", "model.layers.0.mlp.experts.gate_up.bias"),
        ("vllm", "model.layers.1.layers.7.lora.weight"),
        ("megatron", "model.layers.1._orig_mod.extra.weight"),
    ],
)
def test_a_layer_is_not_converted_in_part(name: str, to: str, tmp_path: Path) -> None:
    """What no line reads in it would stay where no reader of the target looks, and the model would compute without."""
    held = {**checkpoints.tensors(), name: np.zeros(3, np.float32), "model.layers.9.strange": np.zeros(3, np.float32)}
    source = checkpoints.write(tmp_path / "source", held, config=checkpoints.CONFIG)
    (refusal,) = tx.plan(source, tmp_path / "out", to=to).refusals
    assert (refusal.code, refusal.where.tensor) == ("UNEXPECTED_TENSOR", name)
    assert "--rules FILE" in refusal.hint
    with pytest.raises(tx.TransaxleError, match="UNEXPECTED_TENSOR"):
        tx.convert(source, tmp_path / "out", to=to, sync=False)
    with tx.open(source) as checkpoint, pytest.raises(tx.TransaxleError, match="UNEXPECTED_TENSOR"):
        checkpoint.as_dialect(to.rpartition(":")[2])
    assert names_in(tmp_path) == ["source"]
    for kept in ("hf", "safetensors:identity"):
        assert tx.plan(source, tmp_path / "out", to=kept).refusals == ()


def test_what_travels_along_and_what_stays(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    carried = {"tokenizer.json": b"{}", "chat template.jinja": b"x" * 3_000_000, "empty.txt": b""}
    for name, data in carried.items():
        (source / name).write_bytes(data)
    left = {"training_args.bin": b"1", ".hidden": b"2"}
    for name, data in left.items():
        (source / name).write_bytes(data)
    (source / "folder").mkdir()
    (source / "transaxle.json").write_bytes(b"not a manifest")
    with pytest.raises(tx.TransaxleError, match=r"(?s)CORRUPT.*transaxle.json.*delete"):
        tx.convert(source, tmp_path / "out", to="te", sync=False)
    (source / "transaxle.json").unlink()
    report = tx.convert(source, tmp_path / "out", to="te", sync=False)
    assert set(report.carried) == {*carried, "config.json"}
    assert set(report.ignored) >= {"training_args.bin", ".hidden", "folder/"}
    assert set(names_in(tmp_path / "out")) == {*report.carried, checkpoints.WHOLE, "transaxle.json"}
    for name, data in carried.items():
        assert (tmp_path / "out" / name).read_bytes() == data
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert tx.verify(tmp_path / "out").ok


def test_free_text_of_headers(tmp_path: Path) -> None:
    """What all shards say is written again; what one says is listed as left behind."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    notes = [{"author": "me", "a:b": "c", "part": "one"}, {"author": "me", "a:b": "c", "part": "two"}]
    weight_map = {}
    for number, (name, note) in enumerate(zip(names, notes, strict=True)):
        entry = {"__metadata__": note, f"t{number}": files.info("U8", [1], 0, 1)}
        (tmp_path / name).write_bytes(files.made(entry, b"x"))
        weight_map[f"t{number}"] = name
    (tmp_path / files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    made = prepared(tmp_path, "safetensors")
    header = json.loads(made.draft.fragments[0].data[8:])
    assert header["__metadata__"] == {"author": "me", "a:b": "c", "format": "pt"}
    assert {f"note {name}:part" for name in names} <= set(made.plan.ignored)


def test_one_file_holds_all_whatever_the_shard_size(tiny: Path, tmp_path: Path) -> None:
    assert len(tx.plan(tiny, tmp_path / "out", to="hf", shard_size=100).files) > 10
    out = tmp_path / "out.safetensors"
    assert list(tx.plan(tiny, out, to="hf", shard_size=100).files) == [checkpoints.WHOLE]
    report = tx.convert(tiny, out, to="hf", shard_size=100)
    assert names_in(tmp_path) == ["out.safetensors"]
    assert "config.json" in report.ignored
    assert report.carried == ()
    assert report.bytes_written == out.stat().st_size
    with tx.open(tiny) as one, tx.open(out, config=checkpoints.CONFIG) as other:
        assert {name: tensor.tobytes() for name, tensor in one.items()} == {n: t.tobytes() for n, t in other.items()}


def _tied(tmp_path: Path) -> Path:
    held = checkpoints.tensors()
    del held["lm_head.weight"]
    return checkpoints.write(tmp_path / "tied", held, config={**checkpoints.CONFIG, "tie_word_embeddings": True})


def test_a_tied_head_is_stored_where_the_target_needs_it_and_recorded(tmp_path: Path) -> None:
    source = _tied(tmp_path)
    assert prepared(source, "hf").plan.aliases == {}
    plan = prepared(source, "transformers").plan
    assert plan.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert plan.checks == ()
    tx.convert(source, tmp_path / "both", to="transformers")
    held = checkpoints.read(tmp_path / "both")
    assert held["lm_head.weight"].tobytes() == held["model.embed_tokens.weight"].tobytes()
    back = prepared(tmp_path / "both", "hf").plan
    assert len(back.checks) == 1
    assert "lm_head.weight" not in {tensor.name for tensor in back.tensors}
    assert "lm_head.weight" not in (*back.kept, *back.ignored)


@pytest.mark.parametrize("wrong", ["dtype", "shape"])
def test_a_tie_that_cannot_be_one_is_refused_at_once(tmp_path: Path, wrong: str) -> None:
    held = checkpoints.tensors()
    head = held["model.embed_tokens.weight"]
    held["lm_head.weight"] = head.astype(np.float32) if wrong == "dtype" else np.concatenate([head, head[:2]])
    config = {**checkpoints.CONFIG, "tie_word_embeddings": True}
    source = checkpoints.write(tmp_path / "source", held, config=config)
    assert set(codes(prepared(source, "hf").plan)) <= {"UNEQUAL_COPIES", "SHAPE_MISMATCH"}
    assert codes(prepared(source, "hf").plan)


def test_rounding_never_happens_unasked(tmp_path: Path) -> None:
    rules = tmp_path / "my.rules"
    rules.write_text(SHIFTED)
    random = np.random.default_rng(0)
    held = {"0.norm": (1 + random.standard_normal(4)).astype(ml_dtypes.bfloat16)}
    held |= {f"0.{part}": random.standard_normal((2, 4)).astype(ml_dtypes.bfloat16) for part in ("gate", "up")}
    moment = {"optim/0.norm/exp_avg": random.standard_normal(4).astype(np.float32)}
    source = checkpoints.write(tmp_path / "source", {**held, **moment})
    plan = prepared(source, "minus", rules=rules, family="shifted").plan
    assert ("LOSSY", "0.minus") in [(r.code, r.where.tensor) for r in plan.refusals]
    assert "norm - 1" in plan.refusals[0].message
    allowed = prepared(source, "minus", rules=rules, family="shifted", allow_lossy=True).plan
    assert [t.arithmetic for t in allowed.tensors if t.name == "0.minus"] == [(("affine", 1.0, -1.0),)]
    tx.convert(source, tmp_path / "out", to="minus", rules=rules, family="shifted", allow_lossy=True, memory=MIN_MEMORY)
    found = checkpoints.read(tmp_path / "out")
    wanted = (held["0.norm"].astype(np.float64) - 1).astype(ml_dtypes.bfloat16)
    assert found["0.minus"].tobytes() == wanted.tobytes()
    # A shift does not change what was learnt about the weight.
    assert found["optim/0.minus/exp_avg"].tobytes() == moment["optim/0.norm/exp_avg"].tobytes()
    back = prepared(tmp_path / "out", "hf", rules=rules, family="shifted", allow_lossy=True).plan
    assert [t.arithmetic for t in back.tensors if t.name == "0.norm"] == [(("affine", 1.0, 1.0),)]


def test_functions_are_computed_in_float64_and_rounded_once(tmp_path: Path) -> None:
    rules = tmp_path / "my.rules"
    rules.write_text(SHIFTED)
    random = np.random.default_rng(1)
    held = {"0.norm": random.standard_normal(512).astype(ml_dtypes.bfloat16)}
    held |= {f"0.{part}": random.standard_normal((2, 512)).astype(ml_dtypes.bfloat16) for part in ("gate", "up")}
    source = checkpoints.write(tmp_path / "source", held)
    options: dict[str, Any] = {"rules": rules, "family": "shifted", "allow_lossy": True, "overwrite": True}
    tx.convert(source, tmp_path / "out", to="exponent", **options)
    found = checkpoints.read(tmp_path / "out")["0.decay"]
    bits = np.arange(1 << 16, dtype=np.uint16)
    every = bits[bits & 0x7F80 != 0x7F80].view(ml_dtypes.bfloat16).astype(np.float64)  # all that are finite
    wanted = [every[np.abs(every + math.exp(value)).argmin()] for value in held["0.norm"].astype(np.float64)]
    assert found.astype(np.float64).tolist() == wanted
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf", **options)
    back = checkpoints.read(tmp_path / "back")["0.norm"].astype(np.float64)
    assert np.allclose(back, held["0.norm"].astype(np.float64), atol=2**-7)
    # From one dialect with arithmetic to another, only once.
    tx.convert(tmp_path / "out", tmp_path / "minus", to="minus", **options)
    direct = np.log(-found.astype(np.float64)) - 1
    assert np.array_equal(checkpoints.read(tmp_path / "minus")["0.minus"], direct.astype(ml_dtypes.bfloat16))


def test_a_value_without_a_result_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    rules = tmp_path / "my.rules"
    rules.write_text(SHIFTED)
    stored = {"0.decay": np.array([-1.0, -0.5, 0.25], np.float32)}
    stored |= {f"0.{part}": np.zeros((2, 3), np.float32) for part in ("gate", "up")}
    source = checkpoints.write(tmp_path / "source", stored)
    options: dict[str, Any] = {"rules": rules, "family": "shifted", "dialect": "exponent", "allow_lossy": True}
    with pytest.raises(Refused, match=r"norm\[d\]\n *the arithmetic has no finite result for the value 0.25") as caught:
        tx.convert(source, tmp_path / "out", to="hf", **options)
    assert (caught.value.code, caught.value.where.tensor) == ("LOSSY", "0.norm")
    assert not (tmp_path / "out").exists()


def test_arithmetic_that_cannot_be_done_is_refused_even_when_allowed(tmp_path: Path) -> None:
    rules = tmp_path / "my.rules"
    rules.write_text(SHIFTED)
    held = {
        "0.norm": np.zeros(4, np.int32),
        "0.gate": np.zeros((2, 4), np.float32),
        "0.up": np.zeros((2, 4), np.float32),
    }
    source = checkpoints.write(tmp_path / "source", held)
    for to in ("minus", "fused"):
        plan = prepared(source, to, rules=rules, family="shifted", allow_lossy=True).plan
        assert codes(plan) == ["UNSUPPORTED"], to


def test_a_view_is_written_as_it_shows(tmp_path: Path) -> None:
    """Under its names, which the manifest calls what they are; under the stored ones where these are asked for."""
    to = "dcp"
    source = checkpoints.tiny(tmp_path / "source")
    with tx.open(source).as_dialect("torchtitan") as view:
        names = set(view)
        report = tx.convert(view, tmp_path / "out", to=to, verify=True)
        stored = tx.convert(view, tmp_path / "stored", to=f"{to}:identity", verify=True)
    with tx.open(tmp_path / "out") as written:
        assert (report.dialect, written.dialect, set(written)) == ("torchtitan@0.3", "torchtitan@0.3", names)
    with tx.open(tmp_path / "stored") as written:
        assert (stored.dialect, written.dialect, set(written)) == ("hf", "hf", set(tx.open(source)))
    assert tx.verify(source, tmp_path / "out").ok


# Copies that are a part of a stored tensor: the other parts of it are none of theirs.

GATED = """
family gated
  model_type gated
  axes g=groups r=heads c=width d=hidden
  q    : g r c d
  gate : g r d

dialect apart
  q    = q[(g r c) d]
  gate = gate[(g r) d]

dialect fused
  qg = [(g [q:(r c) | gate:(r c)]) d]
"""
GATED_CONFIG = {"model_type": "gated", "groups": 2, "heads": 3, "width": 4, "hidden": 5}


def test_a_part_is_stored_once_for_each_dim_of_another(tmp_path: Path) -> None:
    q = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    gate = -1 - np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
    copies = np.broadcast_to(gate[:, :, None], q.shape)
    fused = np.concatenate([q.reshape(2, 12, 5), copies.reshape(2, 12, 5)], axis=1).reshape(48, 5)
    rules = tmp_path / "gated.rules"
    rules.write_text(GATED)
    apart = checkpoints.write(
        tmp_path / "apart", {"q": q.reshape(24, 5), "gate": gate.reshape(6, 5)}, config={**GATED_CONFIG}
    )
    tx.convert(apart, tmp_path / "fused", to="fused", rules=rules, sync=False)
    assert np.array_equal(checkpoints.read(tmp_path / "fused")["qg"], fused)
    report = tx.convert(tmp_path / "fused", tmp_path / "back", to="apart", rules=rules, sync=False)
    assert report.checks == 1
    held = checkpoints.read(tmp_path / "back")
    assert np.array_equal(held["q"], q.reshape(24, 5))
    assert np.array_equal(held["gate"], gate.reshape(6, 5))
    fused[-1, -1] += 1
    other = checkpoints.write(tmp_path / "other", {"qg": fused}, config={**GATED_CONFIG})
    with pytest.raises(tx.TransaxleError, match="UNEQUAL_COPIES"):
        tx.convert(other, tmp_path / "out", to="apart", rules=rules, sync=False)
