"""Runs of DeepSpeed's AutoEP under ZeRO-1 and ZeRO-2: bit by bit what DeepSpeed's own converter makes of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.live.ranks import run as run_ranks
from tests.live.ranks import stop_all
from tests.oracles.deepspeed_peer.auto_experts import TAG, AutoRun, make_universal, train
from transaxle.errors import Refused, TransaxleError

pytestmark = pytest.mark.peers
SMALL = AutoRun("qwen3_moe")
RUNS = [
    SMALL,
    AutoRun("qwen2_moe", ranks=4, data_first=True),
    AutoRun("qwen3_moe", ranks=4, zero=2, dtype="fp32"),
    AutoRun("deepseek_v3"),
    AutoRun("mixtral", zero=2, ep=1),
]
Folders = Callable[[AutoRun], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Train a run once, and return the folder that DeepSpeed saved it into."""
    pytest.importorskip("deepspeed")
    folders: dict[AutoRun, Path] = {}

    def make(run: AutoRun) -> Path:
        if run not in folders:
            folders[run] = tmp_path_factory.mktemp("auto") / "run"
            run_ranks(run.ranks, train, run, folders[run])
            stop_all()  # DeepSpeed keeps process groups, so every run has processes of its own
        return folders[run]

    return make


def name_in_run(name: str) -> list[str]:
    """Names that AutoEP has for a tensor of transformers."""
    if name.endswith("experts.gate_up_proj"):
        return [name.replace("gate_up_proj", weight) for weight in ("w1", "w3")]
    name = name.replace("mlp.experts.down_proj", "mlp.experts.w2").replace("mlp.gate.", "mlp.router.gate.")
    name = name.replace("router.gate.e_score", "router.e_score")
    return [name.replace("shared_expert.", "shared_experts.").replace("shared_expert_gate.", "shared_experts_gate.")]


@pytest.mark.parametrize(
    "run", [pytest.param(r, marks=() if r == SMALL else pytest.mark.oracle) for r in RUNS], ids=str
)
def test_weights_and_moments_are_those_of_deepspeeds_converter(trained: Folders, run: AutoRun, tmp_path: Path) -> None:
    folder = trained(run)
    parts = make_universal(folder, tmp_path / "universal")
    compared: set[str] = set()
    with tx.open(folder) as checkpoint:
        assert (checkpoint.family, checkpoint.metadata.get("left_behind", {})) == (run.model, {})
        for name in checkpoint:
            parameter, state = name.removeprefix("optim/"), "fp32"
            if name != parameter:
                parameter, _, state = parameter.rpartition("/")
            files = [parts / own_name / f"{state}.pt" for own_name in name_in_run(parameter)]
            if state == "step" or "e_score" in name:  # a buffer, which is in no universal folder
                continue
            own = [torch.load(file, weights_only=False)["param"] for file in files]
            expected = torch.cat(own, 1) if len(own) > 1 else own[0]
            assert torch.equal(torch.from_numpy(checkpoint[name].read()), expected), name
            compared.update(name_in_run(parameter))
        steps = {float(checkpoint[name].read()) for name in checkpoint if name.endswith("/step")}
        assert steps == {3.0}
        grouped = {name for group in checkpoint.metadata["param_groups"] for name in group["params"]}
        assert grouped == {name for name in checkpoint if f"optim/{name}/step" in checkpoint}
    saved = {file.parent.relative_to(parts).as_posix() for file in parts.rglob("exp_avg.pt")}
    assert saved == compared


def test_the_hub_gets_weights_and_moments(trained: Folders, tmp_path: Path) -> None:
    folder = trained(SMALL)
    tx.convert(folder, tmp_path / "hub", to="hf", optimizer=True)
    hub = load_file(tmp_path / "hub/model.safetensors")
    moments = load_file(tmp_path / "hub/optimizer/optimizer.safetensors")
    with tx.open(folder) as checkpoint:
        for prefix, tensors, suffix in (("", hub, ""), ("optim/", moments, "/exp_avg")):
            stacked = checkpoint[f"{prefix}model.layers.1.mlp.experts.gate_up_proj{suffix}"].read()
            for expert in range(4):
                gate, up = (
                    tensors[f"{prefix}model.layers.1.mlp.experts.{expert}.{half}_proj.weight{suffix}"].numpy()
                    for half in ("gate", "up")
                )
                assert (stacked[expert, :24] == gate).all()
                assert (stacked[expert, 24:] == up).all()


def test_files_without_state_are_no_moments(trained: Folders, tmp_path: Path) -> None:
    """Before DeepSpeed 0.19.8, AutoEP also wrote files of expert-parallel ranks that have no state under ZeRO."""
    folder = tmp_path / "run"
    shutil.copytree(trained(SMALL), folder)
    for rank in range(2):
        torch.save({"optimizer": None}, folder / TAG / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
    with tx.open(folder) as checkpoint, tx.open(trained(SMALL)) as other:
        assert set(checkpoint) == set(other)
        assert "left_behind" not in checkpoint.metadata
    for file in folder.rglob("*zero_pp_rank_*_optim_states.pt"):
        file.unlink()
    with pytest.raises(Refused, match="INCOMPLETE"):
        tx.open(folder)
    with pytest.raises(TransaxleError, match="there is no optimizer state to take"):
        tx.convert(folder, tmp_path / "out", to="hf", weights="lp", optimizer=True)
    tx.convert(folder, tmp_path / "out", to="hf", weights="lp")


def _change(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    file = folder / TAG / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("checkpoint_format", "zero3_partitioned", "UNSUPPORTED.*under ZeRO-3"),
        ("module_path", "model.blocks.0", "UNSUPPORTED.*no preset of AutoEP"),
        ("expert_placement", {"ranks": [{"rank": 0, "experts": [0, 1]}, {"rank": 1, "experts": [1, 2]}]},
         "UNSUPPORTED.*not each on one of 2 ranks"),
        ("expert_placement", {"ranks": [{"rank": 0, "experts": [0]}, {"rank": 1, "experts": [1, 2, 3]}]},
         "CORRUPT.*rank 0 has 1 experts"),
        ("num_experts", "four", "CORRUPT.*num_experts: expected a count"),
    ],
)  # fmt: skip
def test_descriptions_that_are_not_understood(
    trained: Folders, tmp_path: Path, key: str, value: object, message: str
) -> None:
    shutil.copytree(trained(SMALL), tmp_path / "run")
    _change(tmp_path / "run", lambda content: content["ds_autoep_layers"][0].update({key: value}))  # type: ignore[index]
    with pytest.raises(Refused, match=f"(?s){message}"):
        tx.open(tmp_path / "run")


def test_names_of_the_runs_own_and_cuts_of_two_kinds_are_refused(trained: Folders, tmp_path: Path) -> None:
    for number, (keys, value, message) in enumerate((
        (("ds_config", "expert_parallel", "router_pattern"), "router", "names the parts of its experts itself"),
        (("folding",), {"version": 1}, "AutoEP with AutoTP"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        shutil.copytree(trained(SMALL), folder)

        def change(content: dict[str, object], keys: tuple[str, ...] = keys, value: object = value) -> None:
            for key in keys[:-1]:
                content = content[key]  # type: ignore[assignment]
            content[keys[-1]] = value

        _change(folder, change)
        with pytest.raises(Refused, match=f"(?s)UNSUPPORTED.*{message}"):
            tx.open(folder)
