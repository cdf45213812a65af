"""What is written beside the tensors: real DeepSpeed cuts them again by it, where no parameter carries a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

import transaxle as tx
from tests.formats.refusals import refuses
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.hints import HINTS
from transaxle.formats.deepspeed.keys import UNIVERSAL
from transaxle.formats.training_state import OPTIMIZER, RUN

pytest.importorskip("deepspeed")
torch = pytest.importorskip("torch")

from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state  # noqa: E402
from torch import Tensor  # noqa: E402

from tests.formats.deepspeed.made import STATES, STEPS, save, state_of  # noqa: E402

pytestmark = pytest.mark.peers
WORDS, PADDED = 13, 16
SHAPES = {
    "embed.weight": (PADDED, 4), "layers.0.qkv.weight": (32, 4), "layers.0.dense.weight": (4, 8),
    "layers.0.gate_up.weight": (16, 4), "layers.0.gate_up.bias": (16,), "layers.0.norm.weight": (4,),
    "layers.0.out.bias": (4,),
}  # fmt: skip
PARTS = {"layers.0.qkv.weight": (16, 8, 8), "layers.0.gate_up.weight": (8, 8), "layers.0.gate_up.bias": (8, 8)}
ROW = ("layers.0.dense.weight",)
SHARED = ("layers.0.norm.weight", "layers.0.out.bias")


def full() -> dict[str, Tensor]:
    found = {}
    start = 1
    for name, shape in SHAPES.items():
        tensor = torch.arange(float(start), start + torch.Size(shape).numel()).reshape(shape)
        found[name] = tensor
        start += tensor.numel()
    return found


def cut(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """The shard of a rank, as a framework's layers have it."""
    if name in SHARED:
        return whole
    dim = 1 if name in ROW else 0
    parts = whole.split(PARTS.get(name, whole.shape[dim]), dim)
    mine: Tensor = torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)
    return mine


def info(version: float, qkv: Mapping[str, Any]) -> dict[str, Any]:
    """What a framework says of its cuts: patterns of its own."""
    return {
        keys.INFO_VERSION: version,
        keys.TRUE_VOCABULARY: WORDS,
        keys.PADDED_VOCABULARY: PADDED,
        keys.VOCABULARY_PATTERNS: [r"embed.weight"],
        keys.ROW_PATTERNS: [r"layers.\d+.dense.weight"],
        keys.REPLICATED_PATTERNS: [r"layers.\d+.norm.weight"],
        keys.AVERAGED_PATTERNS: [r"layers.\d+.out.bias"],
        keys.HALVES_PATTERNS: [r"layers.\d+.gate_up.weight", r"layers.\d+.gate_up.bias"],
        keys.SUB_PARAMS: [{keys.PATTERNS: [r"layers.\d+.qkv.weight"], keys.PARTITION_DIM: 0, **qkv}],
    }


SIZED = info(0.3, {keys.SHAPE: ((16, 8, 8), -1)})


def shards(ranks: int) -> dict[str, Sequence[Tensor]]:
    return {name: [cut(name, whole, rank, ranks) for rank in range(ranks)] for name, whole in full().items()}


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    source, target = save(tmp_path / "source", shards(2), SIZED), tmp_path / "universal"
    tx.convert(source, target, to=UNIVERSAL, sync=False)
    return target


def loaded(folder: Path, shape: Sequence[int], rank: int, ranks: int) -> tuple[dict[str, Tensor], Any]:
    """What DeepSpeed gives a live parameter that carries no record."""
    parameter: Any = torch.nn.Parameter(torch.zeros(tuple(shape)))
    weight = torch.zeros(parameter.numel())
    parameter._hp_mapping = SimpleNamespace(
        lp_fragment_address=SimpleNamespace(start=0, numel=parameter.numel()),
        get_hp_fragment=lambda: weight,
        optim_fragment={},
    )
    step = MethodType(load_hp_checkpoint_state, parameter)(str(folder), rank, ranks)
    return {keys.FP32: weight, **parameter._hp_mapping.optim_fragment}, step


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_deepspeed_cuts_by_what_we_write(universal: Path, ranks: int) -> None:
    zero = next(universal.glob("*/zero"))
    for name, rank in product(SHAPES, range(ranks)):
        for state in (keys.FP32, *STATES):
            whole = state_of(full()[name], state)
            if name == "embed.weight":  # DeepSpeed pads with zeros
                whole[WORDS:] = 0
            want = cut(name, whole, rank, ranks)
            got, step = loaded(zero / name, want.shape, rank, ranks)
            assert torch.equal(got[state].reshape(want.shape), want), (name, state, rank)
            assert float(step) == STEPS


def test_what_is_said_is_read_again(universal: Path, tmp_path: Path) -> None:
    """And goes along when the universal checkpoint itself is the source."""
    again = tmp_path / "again"
    tx.convert(universal, again, to=UNIVERSAL, sync=False)
    with tx.open(tmp_path / "source") as source, tx.open(universal) as one, tx.open(again) as two:
        hints = source.metadata[RUN][HINTS]
        assert set(hints) == {*ROW, *PARTS, "embed.weight"}
        assert one.metadata[RUN][HINTS] == two.metadata[RUN][HINTS] == hints
        assert {n: one[n].tobytes() for n in one} == {n: two[n].tobytes() for n in two}
        assert one["layers.0.dense.weight"].tobytes() == full()["layers.0.dense.weight"].numpy().tobytes()
    files = {path.relative_to(universal): path.read_bytes() for path in universal.rglob("*.pt")}
    assert files == {path.relative_to(again): path.read_bytes() for path in again.rglob("*.pt")}


@pytest.mark.parametrize(
    "said",
    [
        info(0.2, {keys.SHAPE: (4, -1)}),
        info(0.4, {keys.SHAPE: ((8, 8, 8, 8), -1)}) | {keys.SHARD_WIDTHS: {r"layers.\d+.qkv.weight": [[4, 4]] * 4}},
    ],
)
def test_parts_that_are_counted_get_their_sizes(said: dict[str, Any], tmp_path: Path) -> None:
    name = "layers.0.qkv.weight"
    held = shards(2)
    held[name] = [torch.cat([part.chunk(2)[rank] for part in full()[name].split(8)]) for rank in range(2)]
    target = tmp_path / "universal"
    tx.convert(save(tmp_path / "source", held, said), target, to=UNIVERSAL, sync=False)
    folder = next(target.glob("*/zero")) / name
    assert torch.load(folder / f"{keys.FP32}.pt", weights_only=False)[keys.SUB_SHAPE].shape == ((8, 8, 8, 8), -1)
    for rank in range(4):
        want = torch.cat([part.chunk(4)[rank] for part in full()[name].split(8)])
        assert torch.equal(loaded(folder, want.shape, rank, 4)[0][keys.FP32].reshape(want.shape), want)


def test_a_step_of_one_element_becomes_a_number(tmp_path: Path) -> None:
    """DeepSpeed hands the step to the optimizer, which wants a number."""
    safetensors = pytest.importorskip("safetensors.torch")
    names = {f"{OPTIMIZER}w/{keys.STEP}": torch.tensor([7.0]), "w": torch.arange(6.0)}
    names |= {f"{OPTIMIZER}w/{state}": state_of(torch.arange(6.0), state) for state in STATES}
    source, target = tmp_path / "model.safetensors", tmp_path / "universal"
    safetensors.save_file(names, source)
    tx.convert(source, target, to=UNIVERSAL, sync=False)
    step = torch.load(next(target.glob(f"*/zero/w/{keys.STEP}.pt")), weights_only=False)
    assert (step.shape, float(step)) == ((), 7.0)
    settings = torch.load(next(target.glob(f"*/zero/{keys.OPTIMIZER_FILE}")), weights_only=False)
    assert settings[keys.STATE][keys.STATES][0][keys.STEP].shape == ()
    with tx.open(target) as ck:
        assert ck[f"{OPTIMIZER}w/{keys.STEP}"].shape == ()
    assert tx.verify(target).ok
    assert tx.verify(source, target).equal
    safetensors.save_file(names | {f"{OPTIMIZER}w/{keys.STEP}": torch.tensor([7.0, 8.0])}, source)
    with refuses("SHAPE_MISMATCH", "a step must be one number"):
        tx.convert(source, tmp_path / "other", to=UNIVERSAL)


def test_hints_about_another_shape_are_refused(tmp_path: Path) -> None:
    target, again = tmp_path / "universal", tmp_path / "again"
    tx.convert(save(tmp_path / "source", shards(2), SIZED), target, to=UNIVERSAL, sync=False)
    for path in target.glob(f"*/zero/layers.0.qkv.weight/{keys.FP32}.pt"):
        held = torch.load(path, weights_only=False)
        held[keys.SUB_SHAPE].shape = ((16, 8, 9), -1)
        torch.save(held, path)
    with pytest.raises(tx.TransaxleError, match="cannot be a view of a parameter") as caught:
        tx.convert(target, again, to=UNIVERSAL)
    assert caught.value.where.tensor is not None
    assert not again.exists()
