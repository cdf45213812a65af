"""Where a state dict shows copies, values reach the parameters all the same; what could not is refused beforehand.

Parameters are compared by `named_parameters`, never through the state dicts that are in question.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.live.ranks import run
from tests.live.topologies import full
from tests.oracles.quiet import quiet
from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.reshard import reshard
from transaxle.live.save import save
from transaxle.live.state_dict_adapter import loadable_as


class Fused(nn.Module):
    """One weight that its state dict shows as two, by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(4, 6, bias=False)
        self.register_state_dict_post_hook(self._cut)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._joined)  # type: ignore[no-untyped-call]

    @staticmethod
    def _cut(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        both = state.pop(f"{prefix}both.weight")
        state[f"{prefix}even"], state[f"{prefix}odd"] = both[::2].clone(), both[1::2].clone()

    @staticmethod
    def _joined(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        pair = [state.pop(f"{prefix}{name}") for name in ("even", "odd")]
        state[f"{prefix}both.weight"] = torch.stack(pair, 1).flatten(0, 1)


class Packed(nn.Module):
    """A weight that is kept transposed, and a table that is no parameter, by overriding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.table = torch.randn(4)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}turned"] = self.weight.detach().t().contiguous()
        destination[f"{prefix}table"] = self.table

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[f"{prefix}turned"].t())
        self.table = state[f"{prefix}table"].clone()


class Viewed(nn.Module):
    """A weight whose state dict shows views of it: these are its memory, and nothing else is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(2, 3, 4))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination.update({f"{prefix}{number}": part for number, part in enumerate(self.stack.detach())})


class Deaf(Packed):
    """Its load does nothing."""

    def _load_from_state_dict(self, *_: Any) -> None:
        pass


class Rounding(Packed):
    """Its load gives back other values than its save showed."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        super()._load_from_state_dict({**state, f"{prefix}turned": state[f"{prefix}turned"].half()}, prefix)


class Silent(nn.Module):
    """A parameter that its state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.hidden = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
        self.register_state_dict_post_hook(self._hide)  # type: ignore[no-untyped-call]

    @staticmethod
    def _hide(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        del state[f"{prefix}hidden"]


def _pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two models, of the same modules with other values, with ordinary ones beside them."""
    return nn.Sequential(nn.Linear(2, 2), make()), nn.Sequential(nn.Linear(2, 2), make())


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tables = {f"{path}.table": m.table for path, m in model.named_modules() if isinstance(m, Packed)}
    return {name: full(tensor).detach().clone() for name, tensor in {**found, **tables}.items()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("make", [Fused, Packed, Viewed])
def test_copies_in_a_state_dict_reach_the_parameters(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    given, taken = _pair(make)
    save(given, tmp_path / "out", to="safetensors")
    report = load(taken, tmp_path / "out")
    assert _same(_tensors(given), _tensors(taken))
    assert report.bytes_written == report.bytes_needed
    _, other = _pair(make)
    reshard(given, other)
    assert _same(_tensors(given), _tensors(other))


def test_a_meta_model_of_copies_is_loaded(tmp_path: Path) -> None:
    given, _ = _pair(Fused)
    save(given, tmp_path / "out", to="safetensors")
    with torch.device("meta"):
        taken, _ = _pair(Fused)
    load(taken, tmp_path / "out")
    assert _same(_tensors(given), _tensors(taken))


@pytest.mark.parametrize("make", [Deaf, Rounding])
def test_what_does_not_load_what_it_shows_is_refused_before(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    given, taken = _pair(make)
    save(given, tmp_path / "out", to="safetensors")
    before = _tensors(taken)
    for ask in (lambda: load(taken, tmp_path / "out"), lambda: reshard(given, taken)):
        with pytest.raises(TransaxleError) as found:
            ask()
        assert {r.code for r in found.value.refusals} == {"UNSUPPORTED"}
        assert "1.weight" in {r.where.tensor for r in found.value.refusals}
        assert all(r.hint for r in found.value.refusals)
        assert _same(before, _tensors(taken))


def test_a_parameter_that_a_state_dict_leaves_out_is_told_of(tmp_path: Path) -> None:
    given, taken = _pair(Silent)
    save(given, tmp_path / "out", to="safetensors")
    before = _tensors(taken)
    with pytest.raises(TransaxleError) as found:
        load(taken, tmp_path / "out")
    assert [(r.code, r.where.tensor) for r in found.value.refusals] == [("MISSING_TENSOR", "1.hidden")]
    assert _same(before, _tensors(taken))
    report = load(taken, tmp_path / "out", strict=False)
    assert report.missing == ("1.hidden",)
    assert _same(_tensors(taken), {**_tensors(given), "1.hidden": before["1.hidden"]})


def test_an_optimizer_of_what_no_entry_is_has_the_names_of_its_parameters(tmp_path: Path) -> None:
    (given, taken), optimizers = _pair(Fused), list[torch.optim.Optimizer]()
    for model in (given, taken):
        optimizers.append(torch.optim.AdamW(model.parameters()))
    for parameter in given.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers[0].step()
    save(given, tmp_path / "out", to="safetensors", optimizer=optimizers[0])
    load(taken, tmp_path / "out", optimizer=optimizers[1])
    held = [[optimizer.state[p]["exp_avg"] for p in optimizer.param_groups[0]["params"]] for optimizer in optimizers]
    assert all(torch.equal(*pair) for pair in zip(*held, strict=True))
    assert _same(_tensors(given), _tensors(taken))


def _nested(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), make(), nn.Sequential(make(), nn.BatchNorm1d(3)))


def _sharded(rank: int, world: int, source: str, meta: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    with torch.device("meta" if meta else "cpu"):
        model = _nested(Fused)
    mesh = init_device_mesh("cpu", (world,))
    for module in (model[1], model[2][0], model):  # type: ignore[index]
        fully_shard(module, mesh=mesh)
    load(model, source)
    return _tensors(model)


@pytest.mark.parametrize("meta", [False, True])
def test_copies_under_fsdp2(tmp_path: Path, meta: bool) -> None:
    given = _nested(Fused)
    save(given, tmp_path / "out", to="safetensors")
    for held in run(2, _sharded, str(tmp_path / "out"), meta):
        assert _same(held, _tensors(given))


def _flat(rank: int, world: int, source: str, target: str, orig: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    model = _nested(lambda: nn.Linear(5, 3))
    for module in (model[1], model[2]):  # type: ignore[index]
        wrapped = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=orig)
        setattr(model, "1" if module is model[1] else "2", wrapped)  # type: ignore[index]
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=orig)
    other = FullyShardedDataParallel(_nested(lambda: nn.Linear(5, 3)), device_id=torch.device("cpu"))
    with pytest.raises(TransaxleError, match=r"fully_shard \(FSDP2\)"):
        load(model, source, optimizer=torch.optim.AdamW(model.parameters()))
    load(model, source)
    save(model, target, to="safetensors")
    reshard(model, other)
    found: dict[str, torch.Tensor] = {}
    for each in (model, other):
        with FullyShardedDataParallel.summon_full_params(each):
            tensors = {**dict(each.named_parameters()), **dict(each.named_buffers())}
            names = {name: name.replace("_fsdp_wrapped_module.", "") for name in tensors}
            found |= {f"{each is other}.{names[name]}": tensor.detach().clone() for name, tensor in tensors.items()}
    return found


@pytest.mark.parametrize("orig", [False, True])
def test_fsdp1_is_loaded_saved_and_resharded(tmp_path: Path, orig: bool) -> None:
    given = _nested(lambda: nn.Linear(5, 3))
    save(given, tmp_path / "out", to="safetensors")
    want = {f"{other}.{name}": tensor for other in (True, False) for name, tensor in _tensors(given).items()}
    for held in run(2, _flat, str(tmp_path / "out"), str(tmp_path / "new"), orig):
        assert _same(held, want)
    kept = load_file(tmp_path / "new" / "model.safetensors")
    assert _same(kept, {name: tensor.clone() for name, tensor in given.state_dict().items()})


@pytest.mark.parametrize("meta", [False, True])
def test_torchtitans_fused_attention_is_loaded_and_resharded(tmp_path: Path, meta: bool) -> None:
    """Its state dict shows q, k and v of one weight; the oracle is its own `load_state_dict`."""
    given, taken, other = (_titan() for _ in range(3))
    assert any("wqkv" in name for name, _ in given.named_parameters())
    save(given, tmp_path / "out", to="safetensors")
    if meta:
        taken = _titan(meta=True)
    load(taken, tmp_path / "out")
    assert _same(_tensors(given), _tensors(taken))
    other.load_state_dict({name: tensor.clone() for name, tensor in given.state_dict().items()})
    assert _same(_tensors(other), _tensors(taken))
    fresh = _titan()
    reshard(given, fresh)
    assert _same(_tensors(given), _tensors(fresh))


def test_what_was_made_to_be_filled_is_given_back_into_fused_weights() -> None:
    given, taken = _titan(), _titan()
    state, give_back = loadable_as(taken, "torchtitan", source="torchtitan", family="llama")
    for name, tensor in given.state_dict().items():
        state[name].copy_(tensor)
    give_back()
    assert _same(_tensors(given), _tensors(taken))


def _titan(*, meta: bool = False) -> nn.Module:
    with quiet():
        from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
        from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers

        init = {"weight": nn.init.normal_}
        rope = ComplexRoPE.Config(dim=4, max_seq_len=16, theta=1e4)
        with torch.device("meta"):
            model: nn.Module = Llama3Model.Config(
                dim=16,
                vocab_size=24,
                tok_embeddings=Embedding.Config(num_embeddings=24, embedding_dim=16, param_init=init),
                norm=RMSNorm.Config(normalized_shape=16, param_init=init),
                lm_head=Linear.Config(in_features=16, out_features=24, param_init=init),
                layers=_build_llama3_layers(
                    n_layers=2, dim=16, n_heads=4, n_kv_heads=2, hidden_dim=24, rope=rope, attn_backend="flex"
                ),
            ).build()
        if meta:
            return model
        model.to_empty(device="cpu")
        cast(Any, model).init_states(buffer_device=torch.device("cpu"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        return model
