"""What is refused names everything at once, with what to do; what is allowed leaves nothing unfilled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from tests.live.topologies import LLAMA, MOE, source
from tests.oracles import hub
from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.save import save

SAFETENSORS = "safetensors"


class Net(nn.Module):
    """A tie, buffers of both kinds, a frozen parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.middle.bias.requires_grad_(False)
        self.scratch: torch.Tensor
        self.register_buffer("scratch", torch.full((3,), 5.0), persistent=False)

    def reset_parameters(self) -> None:
        """Fill what no checkpoint holds."""
        with torch.no_grad():
            self.scratch.fill_(5.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.middle(self.table(tokens))))
        return found


class Outer(nn.Module):
    """A model whose part computes its own buffer, as rotary embeddings do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = Net(seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(tokens)
        return found


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _trained(model: nn.Module) -> nn.Module:
    """The model with running statistics that are not those of a new one."""
    _step(model, SGD(model.parameters(), lr=0.1))
    return model


def _refusals(found: pytest.ExceptionInfo[TransaxleError]) -> dict[tuple[str, str | None], str]:
    return {(refusal.code, refusal.where.tensor): refusal.hint for refusal in found.value.refusals}


@pytest.mark.parametrize("where", ["real", "meta", "part"])
@pytest.mark.parametrize("strict", [True, False])
def test_every_kind_of_model_is_filled(tmp_path: Path, where: str, strict: bool) -> None:
    truth = _trained(Outer(1))
    save(truth, tmp_path / "out", to=SAFETENSORS)
    with torch.device("meta" if where == "meta" else "cpu"):
        model = Outer(2)
    if where == "part":
        model.net.middle.to("meta")
        model.net.norm.to("meta")
    load(model, tmp_path / "out", strict=strict)
    everything = dict(model.named_parameters()) | dict(model.named_buffers())
    assert not any(tensor.is_meta for tensor in everything.values())
    for name, tensor in (dict(truth.named_parameters()) | dict(truth.named_buffers())).items():
        assert torch.equal(everything[name], tensor), name
    assert model.net.head.weight is model.net.table.weight
    assert not model.net.middle.bias.requires_grad
    assert model.net.middle.weight.requires_grad


def test_a_state_dict_is_filled_in_place(tmp_path: Path) -> None:
    truth = _trained(Outer(1))
    save(truth, tmp_path / "out", to=SAFETENSORS)
    model = Outer(2)
    state = model.state_dict()
    load(state, tmp_path / "out")
    assert all(torch.equal(tensor, truth.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_everything_is_told_at_once_with_what_to_do(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(2), "b.weight": torch.ones(2, 2), "c.weights": torch.ones(3)}
    save_file({**tensors, "x.bias": torch.ones(1)}, tmp_path / "model.safetensors")
    state = {"a.weight": torch.zeros(2).bfloat16(), "b.weight": torch.zeros(4), "c.weight": torch.zeros(3)}
    state["model.x.bias"] = torch.zeros(1)
    with pytest.raises(TransaxleError) as found:
        load(state, tmp_path)
    assert _refusals(found) == {
        ("DTYPE_MISMATCH", "a.weight"): 'Use dtype="bf16" to cast the stored values to the parameter\'s dtype.',
        ("SHAPE_MISMATCH", "b.weight"): "Build the model with the sizes that the source has.",
        ("MISSING_TENSOR", "c.weight"): "Use strict=False to load the others.",
        (
            "MISSING_TENSOR",
            "model.x.bias",
        ): "The closest name in the source is x.bias. Use strict=False to load the others.",
        ("UNEXPECTED_TENSOR", "c.weights"): "Use strict=False to load the others.",
        (
            "UNEXPECTED_TENSOR",
            "x.bias",
        ): "The closest name in the model is model.x.bias. Use strict=False to load the others.",
    }
    assert all(not tensor.any() for tensor in state.values())


@pytest.mark.parametrize("told", ["config given", "config beside it", "no config"])
@pytest.mark.parametrize(
    ("config", "lacks", "missing"),
    [
        (LLAMA, "self_attn.o_proj", ("self_attn.o_proj.weight",)),
        (MOE, "layers.0.mlp.experts.1.", ("layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj")),
    ],
    ids=["names alike", "experts in one tensor"],
)
def test_a_part_of_a_model_from_a_hub(
    tmp_path: Path, config: dict[str, Any], lacks: str, missing: tuple[str, ...], told: str
) -> None:
    """All that is there is loaded; a tensor of which some expert lacks stays whole as it was."""
    folder = Path(source(tmp_path / "hub", config))
    model = hub.model(config, torch.float32)
    truth = type(model).from_pretrained(folder, dtype=torch.float32).state_dict()
    stored = load_file(folder / hub.WEIGHTS)
    save_file({name: tensor for name, tensor in stored.items() if lacks not in name}, folder / hub.WEIGHTS)
    if told != "config beside it":
        folder.joinpath("config.json").unlink()
    said = config if told == "config given" else None
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(TransaxleError) as found:
        load(model, folder, config=said)
    assert found.value.code == "MISSING_TENSOR"
    assert found.value.hint == "A shard may be missing. Use strict=False to load the tensors that exist."
    report = load(model, folder, strict=False, config=said)
    assert set(report.missing) == {name for name in before if name.endswith(missing)} != set()
    assert report.unexpected == ()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, (before if name in report.missing else truth)[name]), name


def test_no_wall_of_text(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(TransaxleError) as found:
        load({"w": torch.ones(1), **{f"{n}.weight": torch.ones(1) for n in range(500)}}, tmp_path)
    assert len(found.value.refusals) == 500
    assert str(found.value).endswith("… and 470 more, in .refusals")


def test_the_checkpoint_of_another_model_is_told(tmp_path: Path) -> None:
    save(nn.Linear(3, 2), tmp_path / "out", to=SAFETENSORS)
    with pytest.raises(TransaxleError) as found:
        load(nn.ModuleDict({"encoder": nn.Linear(5, 5)}), tmp_path / "out")
    for said in (str(tmp_path / "out"), "model: encoder.weight", "source: bias, weight", "another model"):
        assert said in str(found.value)


@pytest.mark.parametrize("state", [None, [torch.ones(1)], "model"])
def test_what_is_no_model_is_refused(tmp_path: Path, state: Any) -> None:
    for work in (load, save):
        with pytest.raises(TransaxleError) as found:
            work(state, tmp_path / "out")
        assert found.value.code in ("UNSUPPORTED", "IO")
    assert not (tmp_path / "out").exists()


def test_what_has_no_bytes_is_not_saved(tmp_path: Path) -> None:
    state = {
        "meta": torch.ones(2, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
        "fine": torch.ones(2),
        "lazy": nn.LazyLinear(2).weight,
    }
    with pytest.raises(TransaxleError) as found:
        save({name: state[name] for name in ("meta", "sparse", "fine")}, tmp_path / "out", to=SAFETENSORS)
    assert set(_refusals(found)) == {("UNSUPPORTED", "meta"), ("UNSUPPORTED", "sparse")}
    with pytest.raises(TransaxleError) as found:
        save(state, tmp_path / "out", to=SAFETENSORS)
    assert set(_refusals(found)) == {("UNSUPPORTED", "lazy")}
    assert not (tmp_path / "out").exists()


def test_a_decode_that_is_none_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    for decode in ("fp8", torch.float8_e4m3fn):
        with pytest.raises(TransaxleError) as found:
            load({"w": torch.ones(1)}, tmp_path, decode=decode)
        assert 'decode="bf16"' in found.value.hint


OPTIMIZERS: dict[str, Any] = {
    "fused": lambda p: AdamW(p, lr=0.02, fused=True),
    "foreach": lambda p: AdamW(p, lr=0.02, foreach=True),
    "amsgrad": lambda p: AdamW(p, lr=0.02, amsgrad=True),
    "momentum": lambda p: SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "plain": lambda p: SGD(p, lr=0.02),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.02),
}


def _schedule(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    """One that sets the learning rate, and the momentum where there is one."""
    cycled = any(optimizer.defaults.get(setting) for setting in ("momentum", "betas"))
    return OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=cycled)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("started", [False, True])
def test_every_optimizer_goes_on_as_if_nothing_had_happened(tmp_path: Path, kind: str, started: bool) -> None:
    model = Outer(1)
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = _schedule(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    for _ in range(3):
        _step(model, optimizer)
        schedule.step()
    scaler.scale(torch.ones(1))
    kept = {"schedule": schedule, "scaler": scaler}
    save(model, tmp_path / "out", to=SAFETENSORS, optimizer=optimizer, extra=kept)
    other = Outer(2)
    fresh = OPTIMIZERS[kind](other.parameters())
    again = _schedule(fresh)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0)
    if started:
        _step(other, fresh)
    report = load(other, tmp_path / "out", optimizer=fresh, extra={"schedule": again, "scaler": scale})
    assert report.states == sum(v is not None for state in optimizer.state.values() for v in state.values())
    assert (kind == "plain") == (report.states == 0)
    for _ in range(2):
        _step(model, optimizer)
        schedule.step()
        _step(other, fresh)
        again.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert again.get_last_lr() == schedule.get_last_lr()
    assert scale.state_dict() == scaler.state_dict()
    assert scale.get_scale() == 32.0


def test_state_that_would_be_stale_is_refused(tmp_path: Path) -> None:
    """An optimizer that has made steps keeps no moments of another run; one that has made none is told of it."""
    save(Outer(1), tmp_path / "out", to=SAFETENSORS)
    model = Outer(2)
    optimizer = AdamW(model.parameters())
    with pytest.raises(TransaxleError, match="there is no optimizer state to take") as absent:
        load(model, tmp_path / "out", optimizer=optimizer)
    assert absent.value.code == "MISSING_TENSOR"
    report = load(model, tmp_path / "out", optimizer=optimizer, strict=False)
    assert (report.states, report.missing) == (0, ("optimizer",))
    _step(model, optimizer)
    with pytest.raises(TransaxleError) as found:
        load(model, tmp_path / "out", optimizer=optimizer)
    assert ("MISSING_TENSOR", "optim/net.middle.weight/exp_avg") in _refusals(found)
    report = load(model, tmp_path / "out", optimizer=optimizer, strict=False)
    assert "optim/net.middle.weight/exp_avg" in report.missing


def test_state_that_was_taken_away_is_missed(tmp_path: Path) -> None:
    """A model without it may be published; a run that means to go on must hear of it."""
    model, other, out = Outer(1), Outer(2), tmp_path / "out"
    optimizer = AdamW(model.parameters())
    _step(model, optimizer)
    saved = save(model, out, to=SAFETENSORS, optimizer=optimizer)
    assert str(saved).startswith(f"{out} · safetensors · identity · {saved.tensors} tensors · ")
    shutil.rmtree(out / "optimizer")
    with pytest.raises(TransaxleError) as found:
        load(other, out, optimizer=AdamW(other.parameters()))
    assert (found.value.code, found.value.where.file) == ("INCOMPLETE", "optimizer/optimizer.safetensors")
    report = load(other, out, optimizer=AdamW(other.parameters()), strict=False)
    assert str(report).startswith(f"{out} · identity · {report.tensors} tensors, 0 of the optimizer, 1 missing · ")
    assert load(other, out).tensors == report.tensors


def test_an_optimizer_that_lacks_a_parameter(tmp_path: Path) -> None:
    model = Outer(1)
    optimizer = AdamW(model.parameters())
    _step(model, optimizer)
    save(model, tmp_path / "out", to=SAFETENSORS, optimizer=optimizer)
    other = Outer(2)
    fewer = AdamW(other.net.middle.parameters())
    with pytest.raises(TransaxleError) as found:
        load(other, tmp_path / "out", optimizer=fewer)
    assert ("UNEXPECTED_TENSOR", "optim/net.table.weight/exp_avg") in _refusals(found)
    load(other, tmp_path / "out", optimizer=fewer, strict=False)
    moments = fewer.state[other.net.middle.weight]
    assert torch.equal(moments["exp_avg"], optimizer.state[model.net.middle.weight]["exp_avg"])
    stranger = AdamW(Outer(3).parameters())
    with pytest.raises(TransaxleError) as found:
        load(other, tmp_path / "out", optimizer=stranger)
    assert "after fully_shard" in found.value.hint


class Scaled(nn.Embedding):
    """A module whose initialiser, that of the class it comes from, knows nothing of its buffer."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)


def test_a_buffer_that_its_module_does_not_fill(tmp_path: Path) -> None:
    save(nn.Sequential(Scaled()), tmp_path / "saved", to="dcp")
    with torch.device("meta"):
        model = nn.Sequential(Scaled())
    with pytest.raises(TransaxleError, match="does not give it values") as caught:
        load(model, tmp_path / "saved")
    assert set(_refusals(caught)) == {("MISSING_TENSOR", "0.scale")}
