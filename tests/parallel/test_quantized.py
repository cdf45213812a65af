"""Quantized models that are cut: codes and scales of the whole, cut afterwards; trained, saved and restored so."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import transaxle as tx
from tests.live.ranks import run
from tests.parallel.models import SIZES, beyond, build, gradients_off, off, shard, tokens, train
from tests.quant.kinds import raw
from tests.quant.training import SIX
from transaxle.errors import TransaxleError
from transaxle.nn.grouped_linear import GroupedLinear
from transaxle.nn.moe import MoE
from transaxle.parallel.cutting import ParameterCut, cut_parameters
from transaxle.parallel.tensor_parallel import is_cut, tensor_parallel
from transaxle.quant.entries import is_quantized, whole_shape
from transaxle.quant.masters import MasterWeights
from transaxle.quant.quantized_modules import quantize_
from transaxle.quant.quantizers import (
    AMAX,
    COLUMN_DATA,
    COLUMN_SCALE,
    DATA,
    HISTORY,
    MXFP8,
    NVFP4,
    ROUNDING,
    SCALE,
    SCALED_FOR,
    Float8Block,
)
from transaxle.quant.tensor import QuantizedTensor
from transaxle.torch_tensors import local_of

kinds = pytest.mark.parametrize("kind", [kind for kind, quantizer in SIX.items() if not quantizer.multiplies_codes])
"""Those whose products change by roundings where they are cut; of the others see `tests/quant/nvfp4`."""
STEPS = 2
WHOLE = "whole"
ONCE, TRAINED = 2e-5, 1e-3
"""Largest differences, in units of the largest value of the tensor: some roundings of fp32, and what two steps of
AdamW make of them, where a rounding may turn into another code."""
_ALIGNED = {
    **SIZES, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_ALIGNED, "model_type": "llama", "mlp_bias": True},
    "phi3": {**_ALIGNED, "model_type": "phi3"},
    "mixtral": {**_ALIGNED, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
}
"""Whatever is cut of them over 2 or 4 ranks is whole tiles of 128 x 128; over 4 ranks two share a head of keys."""
BUFFERS: dict[str, dict[str, tuple[int, int]]] = {
    "float8": {DATA: (1, 1), SCALE: (0, 0)},
    "float8 delayed": {DATA: (1, 1), SCALE: (0, 0), HISTORY: (0, 0), SCALED_FOR: (0, 0)},
    "float8_block": {DATA: (1, 1), SCALE: (128, 128)},
    "mxfp8": {DATA: (1, 1), SCALE: (1, 32)},
    "nvfp4": {DATA: (1, 2), SCALE: (1, 16), AMAX: (0, 0)},
    "nvfp4 training": {DATA: (1, 2), SCALE: (1, 16), AMAX: (0, 0), ROUNDING: (0, 0)},
    "nvfp4 training, flat": {
        DATA: (1, 2), SCALE: (1, 16), AMAX: (0, 0), COLUMN_DATA: (1, 2), COLUMN_SCALE: (16, 1), ROUNDING: (0, 0),
    },
}  # fmt: skip
"""Elements down and across for one position of each buffer; 0: the whole matrix has one."""


def _mesh(tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))


def _buffers(tensor: Tensor) -> dict[str, Tensor]:
    inner = local_of(tensor)
    assert isinstance(inner, QuantizedTensor)
    return {**inner.components, **inner.state}


def _cut(buffer: Tensor, kept: ParameterCut, steps: tuple[int, int]) -> Tensor:
    """What a rank has of a whole buffer, written out."""
    step = steps[kept.dim - len(kept.shape)]
    if not step or all(length == kept.shape[kept.dim] for length in kept.widths):
        return raw(buffer)
    octets = buffer.view(torch.uint8)
    wide = buffer.element_size() if kept.dim == buffer.dim() - 1 else 1
    spans = kept.positions_by_rank[kept.rank]
    parts = [octets.narrow(kept.dim, wide * start // step, wide * (stop - start) // step) for start, stop in spans]
    return raw(torch.cat(parts, kept.dim))


def _rows(octets: Tensor, kept: ParameterCut, steps: tuple[int, int], dp: int) -> Tensor:
    """What FSDP2 leaves of it on this rank: rows of what has a position for each, and matrices of a stack."""
    if dp == 1 or (len(kept.shape) == 2 and steps[0] != 1):
        return octets
    chunks = octets.chunk(dp)
    number = dist.get_rank() // len(kept.positions_by_rank)
    return chunks[number] if number < len(chunks) else octets[:0]


def _unlike(cut: nn.Module, whole: Mapping[str, Tensor], kind: str, dp: int = 1) -> list[str]:
    """Names of buffers that are not those of whole tensors, cut."""
    found = []
    for name, parameter, kept in cut_parameters(cut):
        assert is_quantized(parameter) == is_quantized(whole.get(name))
        if name in whole and is_quantized(parameter):
            wanted = _buffers(whole[name])
            mine = _buffers(parameter)
            assert mine.keys() == wanted.keys() == BUFFERS[kind].keys()
            found += [
                f"{name} {each}"
                for each, steps in BUFFERS[kind].items()
                if not torch.equal(raw(mine[each]), _rows(_cut(wanted[each], kept, steps), kept, steps, dp))
            ]
    return found


def _compare(rank: int, world: int, kind: str) -> dict[str, float]:
    found = {}
    for model, tp in (("llama", 4), ("phi3", 2), ("mixtral", 2)):
        plain = build(CONFIGS[model])
        whole = deepcopy(plain)
        quantize_(whole, SIX[kind])
        mesh = _mesh(tp)["tp"]
        cut, other = tensor_parallel(deepcopy(plain), mesh), tensor_parallel(deepcopy(whole), mesh)
        assert quantize_(cut, SIX[kind]) == [n for n, p in whole.named_parameters() if isinstance(p, QuantizedTensor)]
        named = dict(whole.named_parameters())
        assert _unlike(cut, named, kind) == _unlike(other, named, kind) == []
        ids = tokens(CONFIGS[model])
        outputs = [each(input_ids=ids, labels=ids) for each in (whole, cut, other)]
        for output in outputs:
            output.loss.backward()
        assert torch.equal(outputs[1].logits, outputs[2].logits)
        found[f"{model} logits"] = off(outputs[1].logits, outputs[0].logits)
        found |= {f"{model} {name}": value for name, value in gradients_off(cut, whole).items()}
    return found


@pytest.mark.oracle
@kinds
def test_codes_are_those_of_the_whole(kind: str) -> None:
    """In both orders; and what is computed with them is the same up to roundings."""
    for found in run(4, _compare, kind):
        assert beyond(found, ONCE) == {}


def _model(config: dict[str, Any], kind: str, tp: int, *, fsdp: bool, seed: int = 0) -> tuple[nn.Module, MasterWeights]:
    model, mesh = build(config, seed), _mesh(tp)
    if tp > 1:
        tensor_parallel(model, mesh["tp"])
    quantize_(model, SIX[kind], preserve_high_precision_init=True)
    if fsdp:
        shard(model, mesh["dp"])
    return model, MasterWeights(model.parameters(), partial(torch.optim.AdamW, lr=1e-3, eps=1e-4))


def _masters(model: nn.Module, optimizer: MasterWeights) -> dict[str, Tensor]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {names[one]: state["master"] for one, state in optimizer.states.items() if "master" in state}


def _joined(parts: list[Tensor], kept: ParameterCut) -> Tensor:
    """The whole of what every tensor-parallel rank has a part of."""
    whole = torch.full(kept.shape, torch.nan)
    for held, part in zip(kept.positions_by_rank, parts, strict=True):
        at = 0
        for start, stop in held:
            whole.narrow(kept.dim, start, stop - start).copy_(part.narrow(kept.dim, at, stop - start))
            at += stop - start
    return whole


def _trained(rank: int, world: int, kind: str, config: dict[str, Any]) -> dict[str, float]:
    """Train a whole model, one that is cut, and one that is sharded too; requantize the second one's masters whole."""
    whole, optimizer = _model(config, kind, 1, fsdp=False)
    cut, others = _model(config, kind, 2, fsdp=False)
    sharded, third = _model(config, kind, 2, fsdp=True)
    shadows = {n: deepcopy(p).detach() for n, p in whole.named_parameters() if isinstance(p, QuantizedTensor)}
    group, found, masters = _mesh(2)["tp"].get_group(), {}, dict[str, Tensor]()
    for step in range(STEPS):
        losses = [
            train(model, own, config, range(step, step + 1))
            for model, own in ((whole, optimizer), (cut, others), (sharded, third))
        ]
        assert losses[1] == losses[2]
        masters = _masters(cut, others)
        for n, _, kept in cut_parameters(cut):
            if n in shadows:
                parts: list[Any] = [None, None]
                dist.all_gather_object(parts, local_of(masters[n]), group=group)
                shadows[n].copy_(_joined(parts, kept))
        assert _unlike(cut, shadows, kind) == []
        assert _unlike(sharded, shadows, kind, dp=2) == []
    wanted = _masters(whole, optimizer)
    for gathered in sharded.modules():
        if isinstance(gathered, FSDPModule):
            gathered.unshard()
    assert _unlike(sharded, shadows, kind) == []
    for n, parameter, kept in cut_parameters(sharded):
        if n in shadows:
            assert whole_shape(parameter) == kept.shape
            found[n] = off(local_of(masters[n]), kept.take(wanted[n]))
    return found


@pytest.mark.oracle
@kinds
def test_training_is_that_of_the_whole(kind: str) -> None:
    for found in run(4, _trained, kind, CONFIGS["mixtral" if kind in ("float8 delayed", "nvfp4") else "phi3"]):
        assert beyond(found, TRAINED) == {}


def _differing(
    model: nn.Module, optimizer: MasterWeights | None, saved: Mapping[str, Tensor], kind: str, dp: int
) -> list[str]:
    """Names of what a model and its optimizer hold otherwise than a file of whole tensors."""
    found, kepts = [], {name: kept for name, _, kept in cut_parameters(model)}
    for name, parameter in model.named_parameters():
        kept = kepts.get(name)
        mine: dict[str, tuple[Tensor, tuple[int, int]]] = {}
        if isinstance(local_of(parameter), QuantizedTensor):
            for each, value in _buffers(parameter).items():
                mine[name if each == DATA else f"{name}_{each}"] = value, BUFFERS[kind][each]
        else:
            mine[name] = local_of(parameter), (1, 1)
        for each, state in optimizer.states[parameter].items() if optimizer is not None else ():
            if each != "step":
                mine[f"optim/{name}/{each}"] = local_of(state), (1, 1)
        for full, (value, steps) in mine.items():
            whole = saved[full]
            wanted = raw(whole) if kept is None else _rows(_cut(whole, kept, steps), kept, steps, dp)
            found += [] if torch.equal(raw(value), wanted) else [full]
    return found


def _saved(out: str) -> dict[str, Tensor]:
    """What is in the files of a checkpoint."""
    files = sorted(Path(out).rglob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def _begin(rank: int, world: int, kind: str, config: dict[str, Any], out: str) -> tuple[list[str], list[float]]:
    model, optimizer = _model(config, kind, 2, fsdp=True)
    train(model, optimizer, config, range(STEPS))
    tx.save(model, f"{out}/{WHOLE}", to="safetensors", optimizer=optimizer)
    tx.save(model, f"{out}/dcp", to="dcp", optimizer=optimizer)
    dcp_save(model.state_dict(), checkpoint_id=f"{out}/torch")
    unlike = _differing(model, optimizer, _saved(f"{out}/{WHOLE}"), kind, 2)
    return unlike, train(model, optimizer, config, range(STEPS, 2 * STEPS))


def _resume(rank: int, world: int, kind: str, config: dict[str, Any], out: str) -> dict[tuple[int, bool], list[float]]:
    """Load what was saved at other degrees: by us, by torch, and from a file of whole tensors."""
    losses, saved = {}, _saved(f"{out}/{WHOLE}")
    for tp, fsdp in ((2, False), (4, False), (1, False), (2, True)):
        dp = 2 if fsdp else 1
        model, optimizer = _model(config, kind, tp, fsdp=fsdp, seed=7)
        report = tx.load(model, f"{out}/dcp", optimizer=optimizer)
        assert report.converted == ()
        assert _differing(model, optimizer, saved, kind, dp) == []
        losses[tp, fsdp] = train(model, optimizer, config, range(STEPS, 2 * STEPS))
        state = model.state_dict()
        dcp_load(state, checkpoint_id=f"{out}/torch")
        model.load_state_dict(state)
        assert _differing(model, None, saved, kind, dp) == []
        if not fsdp:
            codes = [name for name, p in model.named_parameters() if isinstance(local_of(p), QuantizedTensor)]
            whole = {name: value for name, value in saved.items() if name.startswith(tuple(codes))}
            train(model, optimizer, config, range(1))
            assert len(_differing(model, None, saved, kind, dp)) >= len(codes)
            model.load_state_dict(whole, strict=False)
            assert not set(_differing(model, None, saved, kind, dp)).intersection(whole)
    return losses


@pytest.mark.oracle
@kinds
def test_training_goes_on_at_any_degree(kind: str, tmp_path: Path) -> None:
    config = CONFIGS["mixtral" if kind == "float8" else "phi3"]
    began = run(4, _begin, kind, config, str(tmp_path))
    assert [unlike for unlike, _ in began] == [[]] * 4
    for losses in run(4, _resume, kind, config, str(tmp_path)):
        assert losses.pop((2, True)) == losses.pop((2, False)) == began[0][1]
        assert all(after == pytest.approx(began[0][1], rel=1e-4) for after in losses.values())


def _same_files(first: str, second: str) -> bool:
    one, two = _saved(first), _saved(second)
    return one.keys() == two.keys() and all(torch.equal(raw(value), raw(two[name])) for name, value in one.items())


def _by_other_ways(rank: int, world: int, kind: str, out: str) -> None:
    """Parts that are ordinary tensors; values quantized while they are loaded, into nothing; files for a hub."""
    config, mesh = CONFIGS["llama"], _mesh(2)["tp"]
    plain = build(config)
    whole = deepcopy(plain)
    quantize_(whole, SIX[kind])
    to = "hf" if kind == "float8_block" else "safetensors"
    tx.save(plain, f"{out}/plain", to="hf")
    tx.save(whole, f"{out}/whole", to=to)
    tx.save(deepcopy(whole).bfloat16(), f"{out}/hub", to="hf")
    cuts = [tensor_parallel(build(config), mesh, dtensor=dtensor) for dtensor in (True, False)]
    for number, cut in enumerate(cuts):
        quantize_(cut, SIX[kind])
        tx.save(deepcopy(cut), f"{out}/cut-{number}", to=to)
        assert _same_files(f"{out}/whole", f"{out}/cut-{number}")
        cut.bfloat16()
        tx.save(deepcopy(cut), f"{out}/hub-{number}", to="hf")
        assert _same_files(f"{out}/hub", f"{out}/hub-{number}")
        assert all(parameter.dtype == torch.bfloat16 for parameter in cut.parameters())
        assert _unlike(cut, dict(whole.named_parameters()), kind) == []
        cut.float()
        cut.to("meta")
        tx.load(cut, f"{out}/whole")
        assert _unlike(cut, dict(whole.named_parameters()), kind) == []
    for suffix in ("", f"_{SCALE}"):
        part: Any = cuts[1].state_dict()[f"lm_head.weight{suffix}"]
        assert "torch's checkpoint would take for the whole" in _refusal(part.__create_chunk_list__)
    empty = tensor_parallel(build(config, 3).to("meta"), mesh)
    quantize_(empty, SIX[kind])
    shard(empty, _mesh(2)["dp"])
    tx.load(empty, f"{out}/plain")
    assert _unlike(empty, dict(whole.named_parameters()), kind, dp=2) == []
    empty.bfloat16()
    assert _unlike(empty, dict(whole.named_parameters()), kind, dp=2) == []
    assert empty(input_ids=tokens(config)).logits.dtype == torch.bfloat16
    assert local_of(empty.lm_head.weight).dtype == torch.bfloat16  # type: ignore[union-attr, arg-type]


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["float8 delayed", "nvfp4"])
def test_other_ways(kind: str, tmp_path: Path) -> None:
    run(4, _by_other_ways, kind, str(tmp_path))


MIXTURE: dict[str, Any] = {
    **_ALIGNED, "model_type": "qwen3_moe", "moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}  # fmt: skip


def _mixture(seed: int, *, single: bool, ep: DeviceMesh | None = None) -> Any:
    model: Any = build(MIXTURE, seed)
    torch.manual_seed(seed)
    for layer in model.model.layers:
        layer.mlp = MoE(_ALIGNED["hidden_size"], 256, 4, 2, single_grouped_weight=single, ep=ep)
    return model


def _experts(rank: int, world: int, kind: str, out: str) -> dict[str, float]:
    """Grouped layers: one weight for all experts, and one for each, of which other ranks have others."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp")), {}
    for single in (True, False):
        whole = _mixture(0, single=single)
        tx.save(whole, f"{out}/{single}", to="safetensors")
        quantize_(whole, SIX[kind])
        named, ids = dict(whole.named_parameters()), tokens(MIXTURE)
        for first in (True, False):
            cut = _mixture(1, single=single, ep=None if single else mesh["ep"])
            tx.load(cut, f"{out}/{single}")
            if first:
                quantize_(cut, SIX[kind])
            tensor_parallel(cut, mesh["tp"])
            if not first:
                quantize_(cut, SIX[kind])
            assert _unlike(cut, named, kind) == []
            logits = cut(input_ids=ids).logits
            found[f"{single} {first}"] = off(logits.detach(), whole(input_ids=ids).logits.detach())
            logits.square().mean().backward()
            assert all(parameter.grad is not None for parameter in cut.parameters())
            tx.save(cut, f"{out}/{single}-{first}", to="safetensors")
            anew = deepcopy(whole)
            for model in (anew, cut):
                torch.manual_seed(5)
                for layer in model.modules():
                    if isinstance(layer, GroupedLinear):
                        layer.reset_parameters()
            assert _unlike(cut, dict(anew.named_parameters()), kind) == []
            back, straight = _mixture(2, single=not single), _mixture(0, single=not single)
            tx.load(straight, f"{out}/{single}")
            for model in (back, straight):
                quantize_(model, SIX[kind])
            tx.load(back, f"{out}/{single}-{first}")
            wanted = dict(straight.named_parameters())
            for name, parameter in back.named_parameters():
                if is_quantized(parameter):
                    theirs = _buffers(wanted[name])
                    assert all(torch.equal(raw(b), raw(theirs[each])) for each, b in _buffers(parameter).items())
    return found


def test_grouped_layers(tmp_path: Path) -> None:
    for found in run(4, _experts, "float8_block", str(tmp_path)):
        assert beyond(found, ONCE) == {}


def _refusal(call: Callable[[], object]) -> str:
    with pytest.raises(TransaxleError) as caught:
        call()
    return str(caught.value)


def _refused(rank: int, world: int) -> dict[str, str]:
    mesh, found = _mesh(2), {}
    narrow = {**CONFIGS["llama"], "intermediate_size": 384}
    cases = {
        "block": (narrow, Float8Block()),
        "fused": ({**CONFIGS["phi3"], "intermediate_size": 320}, Float8Block()),
        "row": ({**narrow, "intermediate_size": 96}, MXFP8()),
        "both ways": ({**narrow, "intermediate_size": 96}, MXFP8(columnwise=True)),
        "square": ({**narrow, "intermediate_size": 48}, NVFP4(square=True)),
    }
    for name, (config, recipe) in cases.items():
        cut, whole = tensor_parallel(build(config), mesh["tp"]), build(config)
        quantize_(whole, recipe)
        found[f"{name}, after"] = _refusal(partial(quantize_, cut, recipe))
        found[f"{name}, before"] = _refusal(partial(tensor_parallel, whole, mesh["tp"]))
        assert not any(is_quantized(parameter) for parameter in cut.parameters())
        assert not any(is_cut(module) for module in whole.modules())
    rules: Any = {"model.layers.*.mlp.gate_proj": ("column", (128, 256))}
    whole, cut = build(narrow), tensor_parallel(build(narrow), mesh["tp"], rules)
    for model in (whole, cut):
        quantize_(model, Float8Block())
    assert _unlike(cut, dict(whole.named_parameters()), "float8_block") == []
    weight = cut.lm_head.weight  # type: ignore[union-attr]
    assert isinstance(weight, DTensor)
    found["full_tensor"] = _refusal(weight.full_tensor)
    found["pickle"] = _refusal(partial(pickle.dumps, weight.to_local()))
    cut, other = (tensor_parallel(build(narrow, seed), mesh["tp"]) for seed in (0, 1))
    for model in (cut, other):
        quantize_(model, NVFP4())
    codes: Any = local_of(cut.lm_head.weight)  # type: ignore[union-attr, arg-type]
    theirs: Any = local_of(other.lm_head.weight)  # type: ignore[union-attr, arg-type]
    found["a scale of its own"] = _refusal(partial(codes.copy_, NVFP4().quantize(codes.dequantize() * (2 + rank))))
    codes.copy_(theirs)
    assert all(torch.equal(raw(buffer), raw(theirs.components[name])) for name, buffer in codes.components.items())
    half = build({**narrow, "intermediate_size": 192})
    quantize_(half, NVFP4())
    ours = {name: value for name, value in half.state_dict().items() if "_proj" in name and "mlp" in name}
    found["half the size"] = _refusal(partial(cut.load_state_dict, ours, strict=False))
    sharded = tensor_parallel(build(narrow), mesh["tp"])
    fully_shard(sharded, mesh=mesh["dp"])
    found["sharded"] = _refusal(partial(quantize_, sharded, MXFP8()))
    return found


def test_cuts_through_tiles_are_refused() -> None:
    for found in run(4, _refused):
        for order in ("before", "after"):
            said = found[f"block, {order}"]
            for each, dim, shape in (("gate", 0, [384, 128]), ("up", 0, [384, 128]), ("down", 1, [128, 384])):
                assert f"BLOCK_MISALIGNED  model.layers.0.mlp.{each}_proj.weight" in said
                part = f"rank 0 of 2 would get [0, 192) of dim {dim} of {shape}"
                assert f"{part}; 192 = 1 x 128 + 64 lies inside a tile" in said
            assert "self_attn" not in said
            assert "give the rows of each rank in the plan" in said
            assert "would get [0, 160) of dim 0 of [640, 128]; 160 = 1 x 128 + 32" in found[f"fused, {order}"]
            assert "down_proj" in found[f"row, {order}"]
            assert "gate_proj" not in found[f"row, {order}"]
            assert "would get [0, 48) of dim 1 of [128, 96]; 48 = 1 x 32 + 16" in found[f"row, {order}"]
            assert "gate_proj" in found[f"both ways, {order}"]
            assert "would get [0, 24) of dim 0 of [48, 128]; 24 = 1 x 16 + 8" in found[f"square, {order}"]
        assert "a rank's part of [512, 128]" in found["full_tensor"]
        assert "which a pickle cannot record" in found["pickle"]
        assert "gate_proj.weight\n    expected [384, 64], got [192, 64]" in found["half the size"]
        assert "which the parts on all ranks must share" in found["a scale of its own"]
        assert "Quantize the model before it is sharded" in found["sharded"]
