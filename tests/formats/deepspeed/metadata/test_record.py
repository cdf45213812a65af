"""Records and model metadata against DeepSpeed 0.19.8 itself: its layers' records read, ours read by its functions.

The shards are those that DeepSpeed's layers cut from numbered weights, so every reader of a record must find them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.deepspeed.metadata.test_spread import rebuilt
from transaxle.errors import TransaxleError
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.categories import exact_pattern
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.spread import Spread, by_widths, fold_dims, same, whole, write_affine
from transaxle.formats.deepspeed.universal_record import Record, UniversalInfo, read
from transaxle.parallel.universal_metadata import Vocabulary, collected

pytest.importorskip("deepspeed")
torch = pytest.importorskip("torch")

from deepspeed.checkpoint import constants  # noqa: E402
from deepspeed.checkpoint.ds_to_universal import merge_tp_slices  # noqa: E402
from deepspeed.module_inject import layers as ds  # noqa: E402
from deepspeed.module_inject.tp_shard import AutoTPMeta  # noqa: E402
from torch import nn  # noqa: E402

from tests.formats.deepspeed.metadata.layers import Cut, cuts, numbered, on_each, rank_of, restored  # noqa: E402

pytestmark = pytest.mark.peers
NAME = "layers.0.proj.weight"
FILE = "mp_rank_00_model_states.pt"
META = AutoTPMeta(num_kv_heads=4, num_attention_heads=4, n_embd=16)
MANY = AutoTPMeta(num_kv_heads=16, num_attention_heads=16, n_embd=16)


def linear(rows: int, cols: int, *, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(cols, rows, bias=bias)


def fused_in(block: str, meta: AutoTPMeta = META) -> Callable[[nn.Module, Any], nn.Module]:
    """A fused projection inside of a block whose name tells DeepSpeed the order of its rows."""
    inside = type(block, (nn.Module,), {})()
    inside.attn = SimpleNamespace()
    return lambda module, group: ds.fused_LinearLayer(module, group, fused_module=inside, tp_meta=meta)


def unpaired(module: nn.Module, group: Any) -> nn.Module:
    """Heads that share q and k, an odd number of them on every rank: DeepSpeed cannot say where they are."""
    meta = AutoTPMeta(num_kv_heads=3 * ds.dist.get_world_size(), n_embd=24)
    made: nn.Module = ds.Yuan_LinearLayer(module, group, name="proj", tp_meta=meta)
    return made


def plain(kind: Any, **options: Any) -> Callable[[nn.Module, Any], nn.Module]:
    return lambda module, group: kind(module, group, name="proj", **options)


Layer = tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], nn.Module]]
LAYERS: dict[str, Layer] = {
    "column": (linear(12, 5), plain(ds.LinearLayer)),
    "column-uneven": (linear(13, 5), plain(ds.LinearLayer)),
    "column-few-rows": (linear(3, 5), plain(ds.LinearLayer)),
    "row": (linear(6, 12), plain(ds.LinearAllreduce)),
    "row-uneven": (linear(6, 11), plain(ds.LinearAllreduce)),
    "embedding": (lambda: nn.Embedding(13, 4), plain(ds.VocabParallelEmbedding)),
    "embedding-hidden": (lambda: nn.Embedding(5, 12), plain(ds.HiddenParallelEmbedding)),
    "parts-counted": (linear(24, 5), plain(ds.SubParamLinearLayer, shape=(3, -1), partition_dim=0)),
    "parts-sized": (linear(20, 5), plain(ds.SubParamLinearLayer, shape=((12, 4, 4), -1), partition_dim=0)),
    "parts-uneven": (linear(17, 5), plain(ds.SubParamLinearLayer, shape=((9, 5, 3), -1), partition_dim=0)),
    "parts-in-view": (linear(24, 5), plain(ds.SubParamLinearLayer, shape=(3, -1, 5), partition_dim=1)),
    "parts-in-heads": (linear(48, 5), plain(ds.SubParamLinearLayer, shape=(4, (8, 4), -1), partition_dim=1)),
    "bias-whole": (linear(6, 12), plain(ds.SubParamLinearLayer, shape=(6, -1), partition_dim=1)),
    "row-parts": (linear(6, 24), plain(ds.SubParamLinearAllreduce, shape=(-1, (12, 8, 4)), partition_dim=1)),
    "gate-up": (linear(24, 5), plain(ds.GateUpPack_LinearLayer)),
    "bloom": (linear(48, 16), fused_in("BloomBlock")),
    "glm": (linear(24, 16), fused_in("GLMBlock")),
    "phi3": (linear(48, 16), fused_in("Phi3DecoderLayer")),
    "qwen": (linear(48, 16), fused_in("QWenBlock")),
    "bigcode": (linear(24, 16), fused_in("GPTBigCodeBlock")),
    "codegen": (linear(48, 16, bias=False), fused_in("CodeGenBlock", MANY)),
    "yuan-column": (linear(16, 5, bias=False), plain(ds.Yuan_LinearLayer, tp_meta=MANY)),
    "yuan-unpaired": (linear(24, 5, bias=False), unpaired),
    "yuan-row": (linear(6, 16, bias=False), plain(ds.Yuan_LinearAllreduce, tp_meta=MANY)),
}
everywhere = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.oracle)])
each_layer = pytest.mark.parametrize("layer", LAYERS)


def found(layer: str, ranks: int) -> dict[str, Cut]:
    return cuts(*LAYERS[layer], ranks)


def listed(value: Any) -> Any:
    """A record with lists only, and without the pieces that hold nothing."""
    if isinstance(value, dict):
        kept = {key: listed(each) for key, each in value.items()}
        if keys.PIECES in kept:
            kept[keys.PIECES] = [piece for piece in kept[keys.PIECES] if 0 not in piece[keys.SHAPE]]
        return kept
    return [listed(each) for each in value] if isinstance(value, list | tuple) else value


def shown(record: Record) -> Record:
    """A record without its notes, which say nothing of the cut."""
    fields = {name: getattr(record, name) for name in record.__slots__}
    return Record(**{**fields, "output": None, "shard": None})


def back(spread: Spread, cut: Cut) -> np.ndarray:
    shards = [shard.numpy().reshape(shape) for shard, shape in zip(cut.shards, spread.shards, strict=True)]
    return rebuilt(spread, shards).reshape(cut.full.shape)


def test_every_constant_is_deepspeeds() -> None:
    assert keys.RECORD == constants.DS_AUTOTP_UC_META
    assert keys.INFO == constants.UNIVERSAL_CHECKPOINT_INFO
    assert keys.INFO_VERSION == constants.UNIVERSAL_CHECKPOINT_VERSION_KEY
    assert keys.INFO_CURRENT == constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE
    for ours, theirs in {
        keys.REPLICATED_PATTERNS: constants.TP_REPLICATED_PARAMETER_PATTERNS,
        keys.AVERAGED_PATTERNS: constants.PARAMETER_TO_AVERAGE_PATTERNS,
        keys.ROW_PATTERNS: constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
        keys.VOCABULARY_PATTERNS: constants.VOCABULARY_PARAMETER_PATTERNS,
        keys.HALVES_PATTERNS: constants.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
        keys.SUB_PARAMS: constants.PARAMETER_WITH_SUB_PARAMS,
        keys.SHARD_WIDTHS: constants.SUB_PARAM_SHARD_WIDTHS,
        keys.UNSUPPORTED_PATTERNS: constants.AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS,
        keys.TRUE_VOCABULARY: constants.ORIGINAL_VOCAB_SIZE,
        keys.PADDED_VOCABULARY: constants.PADDED_VOCAB_SIZE,
        keys.AFFINE: constants.AFFINE_MAP,
        keys.CAT_DIM: constants.CAT_DIM,
        keys.SUB_COUNT: constants.PARAM_N_SUB_PARAMS,
        keys.SUB_SHAPE: constants.SUB_PARAM_SHAPE,
        keys.VOCABULARY: constants.VOCAB_TENSOR,
        keys.EXPERT: constants.EP_IS_EXPERT_PARAM,
        keys.PARAM: constants.PARAM,
    }.items():
        assert ours == theirs


@each_layer
@everywhere
def test_deepspeeds_records_are_read(layer: str, ranks: int) -> None:
    for name, cut in found(layer, ranks).items():
        for rank, said in enumerate(cut.records):
            before = copy.deepcopy(said)
            record = read(said, name, ranks)
            written, wanted = listed(record.as_dict()), listed(said)
            if record.view is not None and wanted[keys.SUB_SIZES] is None:
                wanted[keys.SUB_SIZES] = listed(record.parts)  # without it DeepSpeed needs the affine map
            assert written == wanted, "what is written is what was read"
            assert read(record.as_dict(), name, ranks) == record
            assert record.as_dict() == record.as_dict()
            assert said == before
            assert record.replicated is (record.dim is None and record.reason is None)
            if record.spread is not None:
                np.testing.assert_array_equal(back(record.spread, cut), cut.full.numpy())
                flat = fold_dims(record.spread, [tuple(shard.shape) for shard in cut.shards])
                assert flat.shape == tuple(cut.full.shape)
                assert record.shard in (None, tuple(cut.shards[rank].shape))


@each_layer
@everywhere
def test_records_made_from_widths_are_the_same(layer: str, ranks: int) -> None:
    for name, cut in found(layer, ranks).items():
        for rank, said in enumerate(cut.records):
            theirs = read(said, name, ranks)
            shape, bias = tuple(cut.full.shape), name == "bias"
            if theirs.reason is not None:
                ours = Record.unsupported(theirs.kind, shape, theirs.reason, bias=bias)
                assert ours.reason == theirs.reason
                continue
            if theirs.dim is None:
                ours = Record.shared(theirs.kind, shape, ranks, bias=bias)
                theirs = read({**said, keys.LOGICAL_SHAPE: shape, keys.OUTPUT_SHAPE: shape}, name, ranks)
            elif theirs.widths is None:
                assert theirs.spread is not None
                ours = Record.placed(theirs.kind, shape, theirs.dim, theirs.spread, bias=bias)
            else:
                ours = Record.cut(theirs.kind, shape, theirs.dim, theirs.widths, view=theirs.view, rank=rank, bias=bias)
                assert ours.shard == tuple(cut.shards[rank].shape)
            assert shown(ours) == shown(theirs)


@each_layer
@everywhere
def test_deepspeed_restores_by_our_records(layer: str, ranks: int) -> None:
    """With both descriptions, and with each alone."""
    for name, cut in found(layer, ranks).items():
        for rank, said in enumerate(cut.records):
            record = read(said, name, ranks)
            written = record.as_dict()
            if record.spread is None:
                with pytest.raises(RuntimeError, match="Cannot restore"):
                    restored(written, cut.full, cut.shards, rank)
                continue
            forms = [written]
            if record.widths is not None or record.replicated:
                forms.append(copy.deepcopy(written))
                del forms[-1][keys.CONVERSION][keys.AFFINE]
            if record.widths is not None:
                bare = {keys.SHARD_WIDTHS: None, keys.PARTITION_SIZES: None, keys.SUB_SIZES: None, keys.SUB_SHAPE: None}
                forms.append(written | bare)
            for form in forms:
                assert torch.equal(restored(form, cut.full, cut.shards, rank), cut.shards[rank]), name


WORDS, ROWS = "embed_tokens.weight", 12


class Model(nn.Module):
    """All of DeepSpeed's layers in one model, and parameters that none of them touched."""

    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.embed_tokens = plain(ds.VocabParallelEmbedding)(numbered(nn.Embedding(ROWS, 4)), object())
        for name in LAYERS:
            self.add_module(name, on_each(*LAYERS[name], ranks)[rank])
        self.tied = self.norm


def model(ranks: int) -> list[Model]:
    made = []
    for rank in range(ranks):
        with rank_of(rank, ranks):
            made.append(Model(ranks, rank))
    return made


def ours_of(made: Model, ranks: int) -> dict[str, Any]:
    found: dict[str, Record | tuple[int, ...]] = {}
    for name, parameter in made.named_parameters():
        said = getattr(parameter, keys.RECORD, None)
        found[name] = tuple(parameter.shape) if said is None else read(said, name, ranks)
    return collected(found, ranks, Vocabulary([WORDS], ROWS))


@pytest.mark.parametrize("ranks", [2])
def test_the_model_is_described_as_deepspeed_does(ranks: int) -> None:
    for made in model(ranks):
        theirs = ds.collect_autotp_universal_checkpoint_info(made)
        mine = ours_of(made, ranks)
        assert exact_pattern(WORDS) in theirs[keys.VOCABULARY_PATTERNS]
        assert len(theirs[keys.VOCABULARY_PATTERNS]) > 1, "DeepSpeed lists what has `embed` in its name"
        theirs[keys.VOCABULARY_PATTERNS] = [exact_pattern(WORDS)]
        assert listed(mine) == listed(theirs)
        assert list(mine[keys.SUB_PARAMS]) == theirs[keys.SUB_PARAMS], "tuples stay tuples, as its reader demands"
        assert mine == ours_of(made, ranks), "collecting twice gives the identical record"
        assert mine[keys.UNSUPPORTED_PATTERNS], "some layer could not be described"


def forms_of(info: dict[str, Any], record: Record) -> list[dict[str, Any]]:
    """Both forms, the affine one alone, and the lists alone where lists can say it."""
    vital = (keys.INFO_VERSION, keys.AFFINE, keys.UNSUPPORTED_PATTERNS)
    found = [info, {key: value for key, value in info.items() if key in vital}]
    if record.widths is not None or record.replicated:
        found.append({key: value for key, value in info.items() if key != keys.AFFINE})
    return found


@each_layer
@everywhere
def test_what_we_collect_is_merged_by_deepspeed_and_by_us(layer: str, ranks: int, tmp_path: Path) -> None:
    for name, cut in found(layer, ranks).items():
        record = read(cut.records[0], name, ranks)
        info = collected({name: record}, ranks)
        if record.spread is None:
            with pytest.raises(TransaxleError, match="UNSUPPORTED"):
                UniversalInfo(CheckedValue(info, FILE), ranks).spread(
                    name, [tuple(shard.shape) for shard in cut.shards]
                )
            continue
        for number, form in enumerate(forms_of(info, record)):
            spread = UniversalInfo(CheckedValue(form, FILE), ranks).spread(
                name, [tuple(shard.shape) for shard in cut.shards]
            )
            np.testing.assert_array_equal(back(spread, cut), cut.full.numpy())
            if record.widths is None and number:
                continue
            pieces, out = tmp_path / f"{name}-{number}-slices", tmp_path / f"{name}-{number}-out"
            for rank, shard in enumerate(cut.shards):
                folder = pieces / name / str(rank)
                folder.mkdir(parents=True)
                for power, state in enumerate((keys.FP32, "exp_avg", "exp_avg_sq")):
                    torch.save(shard.flatten() + power, folder / f"{state}.00")
            shapes = [shard.shape for shard in cut.shards]
            merge_tp_slices(form, str(out), str(pieces), ranks, (name, shapes))
            merged = torch.load(out / name / f"{keys.FP32}.pt", weights_only=False)[keys.PARAM]
            assert torch.equal(merged.reshape(cut.full.shape), cut.full), (name, number)


def refused(record: dict[str, Any], ranks: int = 2) -> TransaxleError:
    with pytest.raises(TransaxleError) as caught:
        read(record, NAME, ranks)
    assert caught.value.where.tensor == NAME
    assert caught.value.exit_code == 3
    return caught.value


def fused() -> dict[str, Any]:
    widths = [[4, 4], [2, 2], [2, 2]]
    return copy.deepcopy(Record.cut("column", (16, 3), 0, widths, view=((8, 4, 4), -1)).as_dict())


TWICE, ONCE = True, False
"""Whether a value is changed in the record and in its conversion, or in the record alone."""


@pytest.mark.parametrize(
    ("where", "key", "value", "said"),
    [
        (TWICE, keys.SUB_SHAPE, ((), -1), "part sizes must be positive"),
        (TWICE, keys.SUB_SHAPE, ((8, 4, 5), -1), "48 elements|cannot be a view of a parameter of"),
        (TWICE, keys.SUB_SHAPE, (5, -1), "16 rows cannot be divided into 5 equal parts"),
        (TWICE, keys.SUB_SHAPE, ((8, 4, 4), (1, 2)), "a dim other than the cut one, 0"),
        (TWICE, keys.SUB_SHAPE, ("8", -1), "expected a count"),
        (TWICE, keys.SHARD_WIDTHS, [[4, 4], [2, 2]], "widths of 2 parts, but it has 3"),
        (TWICE, keys.SHARD_WIDTHS, [[4, 4], [2, 2], [2, 3]], "sum to 5, but the part has 4"),
        (TWICE, keys.SHARD_WIDTHS, [[4, 4], [2, 2], [4]], "1 ranks, not 2"),
        (TWICE, keys.SHARD_WIDTHS, [[8, 0], [4, 0], [4, 0]], "describe different cuts"),
        (TWICE, keys.PARTITION_DIM, 2, "2, but the shape has only 2 dims"),
        (TWICE, keys.PARTITION_DIM, None, "not cut"),
        (TWICE, keys.REPLICATED, True, "cut along dim 0"),
        (TWICE, keys.PARTITION_TYPE, "diagonal", "diagonal"),
        (TWICE, keys.ORIGINAL_SHAPE, (16, 4), "64 elements"),
        (ONCE, keys.SUB_SIZES, (8, 4, 5), "(8, 4, 4)|[8, 4, 4]"),
        (ONCE, keys.LOGICAL_SHAPE, (8, 6), "gives [16, 3]"),
        (ONCE, keys.PARTITION_SIZES, (9, 7), "sum to [8, 8]"),
        (ONCE, keys.INFO_VERSION, 0.5, "0.5; versions up to 0.4"),
        (ONCE, keys.SHARD_WIDTHS, [[8, 0], [4, 0], [4, 0]], " in the record itself"),
        (ONCE, keys.CONVERSION, None, "is missing"),
        (ONCE, keys.IS_BIAS, 1, " in the record itself"),
    ],
)
def test_what_does_not_add_up_is_refused(where: bool, key: str, value: object, said: str) -> None:
    record = fused()
    if where is TWICE:
        record[keys.CONVERSION][key] = value
    record[key] = value
    error = refused(record)
    assert any(part in str(error) for part in said.split("|")), str(error)


def test_an_affine_map_of_another_cut_is_refused() -> None:
    record = fused()
    record[keys.CONVERSION][keys.AFFINE] = write_affine(by_widths((16, 3), 0, [[8, 8]]))
    assert "describe different cuts" in str(refused(record))
    record[keys.CONVERSION][keys.AFFINE] = write_affine(by_widths((3, 16), 1, [[8, 8]]))
    assert "[3, 16]" in str(refused(record))


def test_a_bias_may_have_another_output_shape() -> None:
    """Its record speaks of a view; the layer's output, and the bias itself, have other dims."""
    shards = ((3, 2), (3, 2))
    record = Record.cut("column", (12,), 1, [[2, 2]], view=(3, 4), bias=True).as_dict()
    assert record[keys.LOGICAL_SHAPE] == record[keys.OUTPUT_SHAPE] == (3, 4)
    record[keys.OUTPUT_SHAPE] = (12,)
    found = read(record, NAME, 2)
    assert found.output == (12,)
    assert found.spread is not None
    assert found.spread.shards == shards
    full = torch.arange(12.0)
    for rank in range(2):
        want = full.view(3, 4)[:, 2 * rank : 2 * rank + 2].flatten()
        flat = [torch.empty(6)] * 2
        assert torch.equal(restored(record, full, flat, rank), want)
    record[keys.OUTPUT_SHAPE] = (13,)
    assert "output_shape [13] has 13 elements" in str(refused(record))


def test_records_older_than_the_versions_are_read() -> None:
    """The first release cut evenly and gave no widths."""
    record = fused()
    del record[keys.INFO_VERSION], record[keys.CONVERSION][keys.AFFINE]
    record[keys.SHARD_WIDTHS] = record[keys.CONVERSION][keys.SHARD_WIDTHS] = None
    spread = read(record, NAME, 4).spread
    assert spread is not None
    assert same(spread, by_widths((16, 3), 0, [[2] * 4, [1] * 4, [1] * 4]))
    assert "parts of [8, 4, 4] rows cannot be cut evenly over 3 ranks" in str(refused(record, 3))


def test_padded_vocabularies_are_said_by_the_caller() -> None:
    parameters: dict[str, Record | tuple[int, ...]] = {
        NAME: Record.cut("column", (16, 3), 0, [[8, 8]]),
        "norm.weight": (7,),
    }
    info = collected(parameters, 2, Vocabulary([NAME], 13))
    assert (info[keys.TRUE_VOCABULARY], info[keys.PADDED_VOCABULARY]) == (13, 16)
    full = np.arange(48).reshape(16, 3)
    for form in (info, {key: value for key, value in info.items() if key != keys.AFFINE}):
        spread = UniversalInfo(CheckedValue(form, FILE), 2).spread(NAME, [(8, 3), (8, 3)])
        np.testing.assert_array_equal(rebuilt(spread, [full[:8], full[8:]]), full[:13])
    assert keys.PADDED_VOCABULARY not in collected(parameters, 2, Vocabulary([NAME], 16))
    with pytest.raises(TransaxleError, match="describes 2 ranks, but the model has 4"):
        collected(parameters, 4)
    with pytest.raises(TransaxleError, match="17 words"):
        collected(parameters, 2, Vocabulary([NAME], 17))
    with pytest.raises(TransaxleError, match="no such parameter"):
        collected(parameters, 2, Vocabulary(["other"], 13))
    with pytest.raises(TransaxleError, match=r"\[7, 16\]"):
        collected(parameters, 2, Vocabulary(parameters, 5))


def test_a_row_order_that_the_lists_cannot_say_is_taken_from_the_map() -> None:
    """Only where both mean the same ranks, shape and dim: fused or replicated lists must agree to the letter."""
    order = by_widths((3, 8), 1, [[2, 2], [2, 2]])
    info = collected({NAME: Record.placed("row", (3, 8), 1, order)}, 2)
    assert info[keys.ROW_PATTERNS]
    assert same(UniversalInfo(CheckedValue(info, FILE), 2).spread(NAME, order.shards), order)
    del info[keys.UNSUPPORTED_PATTERNS]  # no list of AutoTP's
    with pytest.raises(TransaxleError, match="disagree"):
        UniversalInfo(CheckedValue(info, FILE), 2).spread(NAME, order.shards)
    lying = collected({NAME: Record.placed("row", (3, 8), 1, whole((3, 8), 2))}, 2)
    with pytest.raises(TransaxleError, match="disagree"):
        UniversalInfo(CheckedValue(lying, FILE), 2).spread(NAME, [(3, 8), (3, 8)])


_ODD = st.recursive(
    st.sampled_from([None, -1, 0, 1, 2, 3, 16, 48, 1 << 40, -(1 << 70), 0.4, float("nan"), True, "column", "", b""]),
    lambda inner: st.lists(inner, max_size=3).flatmap(lambda items: st.sampled_from([items, tuple(items)])),
    max_leaves=5,
)


@given(st.sampled_from(sorted(fused())), _ODD, st.sampled_from(["outside", "inside", "both"]), st.integers(1, 3))
def test_whatever_a_record_says_it_is_read_or_refused(key: str, value: object, where: str, ranks: int) -> None:
    record = fused()
    if where != "inside":
        record[key] = value
    if where != "outside" and isinstance(record[keys.CONVERSION], dict):
        record[keys.CONVERSION][key] = value
    with contextlib.suppress(TransaxleError):
        found = read(record, NAME, ranks)
        assert read(found.as_dict(), NAME, ranks) == found
