"""torchtitan: every model that it registers, from the hub through training and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.journeys import titan, titan_hub
from tests.journeys.record import Journey, chosen
from tests.live import ranks
from tests.live.topologies import full
from tests.oracles import hub
from tests.oracles.peer_bytes import published
from tests.oracles.quiet import quiet

PEER = "torchtitan"
CORRECTION = "e_score_correction_bias"
_KIMI = "kimi_k25"
"""What transformers stores of it has other names than the published files, which it loads, and queries of the text that
it takes for those of the pictures.
"""
_OTHER_ROUTERS = ("deepseek_v3 236B", "kimi_k2_7 debugmodel")
"""Registered with routers that no model of transformers has: groups by their two best experts where DeepSeek-V2 takes
the best one, and softmax where Kimi has sigmoid. torchtitan itself says what the hub's files are worth.
"""
_STACKED = ("gpt_oss", "qwen3_5 debugmodel_moe", "qwen3_5 35B", "qwen3_5 122B", "qwen3_5 397B")
"""Whose experts torchtitan's own adapter does not find in the hub's files: of gpt-oss it still has the names of 0.2, of
Qwen3.5 it wants the stacks that transformers has in memory. transformers alone says what these are worth.
"""
_V2 = "deepseek_v2"
_UNNAMED = (_V2, "qwen3_5_moe")
"""Which models these are, only their config says: without it the first is a V3, which has a bias in its routers."""
_FIXED = ("rope.cache", "inv_freq")
"""Buffers that follow from the configuration."""
_SAMPLE = ("llama3 debugmodel", "qwen3 debugmodel_moe")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_from_the_hub_and_back:
        metafunc.parametrize("flavour", chosen(metafunc.config, titan.flavours, _SAMPLE))


def _factory(config: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM


def store(config: dict[str, Any], folder: Path) -> Any:
    """Store a random model of transformers in single precision, and return it."""
    with quiet():
        model = _factory(config).from_config(hub.configuration(config)).to(torch.float32).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, value in sorted((*model.named_parameters(), *model.named_buffers())):
                if "inv_freq" not in name:
                    value.copy_(0.05 * torch.randn(value.shape, generator=generator) + ("norm" in name))
        model.save_pretrained(folder)
        if config["model_type"] == _KIMI:
            file = folder / hub.WEIGHTS
            stored = published(_KIMI, load_file(file))
            for name, value in model.state_dict().items():
                if name.endswith(".self_attn.q_proj.weight"):
                    stored["language_model.model" + name.removeprefix("model.language_model")] = value
            save_file(stored, file, metadata={"format": "pt"})
    return model


def open_hub(folder: Path) -> Any:
    """transformers' model of a folder, which must hold all of it and nothing else."""
    with quiet():
        config = json.loads((folder / "config.json").read_text("utf-8"))
        model, loading = _factory(config).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert {key: value for key, value in loading.items() if value} == {}
    return model.eval()


def _filled(run: titan.Run) -> dict[str, torch.Tensor]:
    """The complete state of a run; nothing of it may be as it was before a load."""
    state = run.state()
    assert [name for name, value in state.items() if value.isnan().any()] == []
    return {name: value.clone() for name, value in state.items()}


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def _from_hub(specification: Any, folder: Path, base: Path) -> titan.Run:
    """A run that torchtitan itself loads from the hub's files; what they have not is as it began, at zero.

    Of DeepSeek-V2 it does not load them as they are: it asks for a bias of the routers that only V3 has.
    """
    if json.loads((folder / "config.json").read_text("utf-8"))["model_type"] == _V2:
        stored = load_file(folder / hub.WEIGHTS)
        routers = {name: len(value) for name, value in stored.items() if name.endswith(".mlp.gate.weight")}
        zeros = {name.replace("weight", CORRECTION): torch.zeros(count) for name, count in routers.items()}
        folder = Path(shutil.copytree(folder, base.with_name(f"{base.name}-hub")))
        save_file({**stored, **zeros}, folder / hub.WEIGHTS, metadata={"format": "pt"})
    run = titan.Run(specification, base, initial_load_path=str(folder), initial_load_in_hf=True)
    assert run.checkpoints.load()
    for name, value in run.buffers():
        if titan.BIAS in name and value.isnan().all():
            value.zero_()
    return run


def _goes_on(resumed: titan.Run, run: titan.Run, left: Collection[str] = ()) -> None:
    """Check that another run has the state of this one, its optimizer's too."""
    ours, theirs = ({n: value for n, value in each.state().items() if titan.COUNTS not in n} for each in (resumed, run))
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []
    ours, theirs = resumed.optimizers.state_dict(), run.optimizers.state_dict()
    assert ours.keys() == theirs.keys()
    unlike = [n for n, v in ours.items() if not (v.equal(theirs[n]) if isinstance(v, torch.Tensor) else v == theirs[n])]
    assert unlike == []
    others = {name: each.state_dict() for name, each in run.remembered().items() if name not in left}
    assert {name: each.state_dict() for name, each in resumed.remembered().items() if name not in left} == others


def _orphans(folder: Path) -> list[str]:
    """Optimizer state of a checkpoint without weights of its names, or weights without theirs."""
    names = set(tx.open(folder, optimizer=True))
    moments = {name.split("/")[1] for name in names if name.endswith("/exp_avg")}
    others = ("/", "lr_scheduler.", "train_state.", titan.BIAS, CORRECTION)
    return sorted(moments ^ {name for name in names if not any(other in name for other in others)})


@pytest.mark.oracle
def test_from_the_hub_and_back(journey: Journey, flavour: str, tmp_path: Path) -> None:
    specification = titan.specification(flavour)
    if flavour.startswith(titan.PICTURES):
        _own_names(journey, specification, tmp_path)
        return
    config = titan_hub.config(flavour.split(maxsplit=1)[0], specification.model)
    config |= {"fuse_qkv": False} if "non_fused" in flavour else {}  # which nothing in the files says
    hub_folder, converted = tmp_path / "hub", tmp_path / "titan"
    trained = store(config, hub_folder)
    tx.convert(hub_folder, converted, to="dcp:torchtitan", strict=True, verify=True)
    journey.passed("convert")
    tokens = titan.tokens(specification.model.vocab_size)
    with titan.plain():
        run = titan.Run(specification, tmp_path / "run", initial_load_path=str(converted))
        assert run.checkpoints.load()
        state = _filled(run)
        own = None
        if not flavour.startswith(_STACKED):
            own = _from_hub(specification, hub_folder, tmp_path / "own")
            others = {name: value for name, value in own.state().items() if not torch.equal(value, state[name])}
            assert others == {}
        live = titan.Run(specification, tmp_path / "live")
        journey.equal(
            "load",
            own.logits(tokens) if own and flavour in _OTHER_ROUTERS else trained(tokens).logits,
            run.logits(tokens),
        )
        if "vision_config" in config and run.model.vision_encoder is None:  # torchtitan has its text alone
            with journey.refused("live load", "UNEXPECTED_TENSOR", "vision_encoder"):
                tx.load(live.model, hub_folder)
            with journey.refused("back", "MISSING_TENSOR", "vision"):
                tx.convert(run.save(), tmp_path / "back", to="hf", config=hub_folder / "config.json")
            return
        tx.load(live.model, hub_folder)
        assert _same(_filled(live), state)
        journey.passed("live load")

        _train(journey, run)
        _back(journey, run, hub_folder / "config.json", tmp_path, tokens, others=flavour in _OTHER_ROUTERS)
        _with_optimizer(journey, run, hub_folder / "config.json", tmp_path)


def _own_names(journey: Journey, specification: Any, folder: Path) -> None:
    """Save and load what no model of transformers is: under its own names, with its optimizer."""
    runs = []
    with titan.plain():
        for number in range(2):
            runs.append(titan.Run(specification, folder / f"run-{number}"))
            runs[-1].draw(number)
        first, second = runs
        saved = first.save()
        journey.passed("train", "save")
        with journey.refused("back", "UNKNOWN_FAMILY", "img_in.weight"):
            tx.convert(saved, folder / "back", to="hf")
        tx.save(first.model, folder / "live", to="dcp", optimizer=first.optimizers, extra=first.remembered())
        journey.passed("live save")
        tx.load(second.model, folder / "live", optimizer=second.optimizers, extra=second.remembered())
        _goes_on(second, first)
        journey.passed("live load")


def _train(journey: Journey, run: titan.Run) -> None:
    """Take steps, in which all move that are not fixed from the beginning."""
    before = {name: value.clone() for name, value in run.state().items()}
    run.train()
    still = [name for name, value in run.state().items() if torch.equal(value, before[name])]
    assert [name for name in still if titan.COUNTS not in name and not name.endswith(_FIXED)] == []
    journey.passed("train")


def _back(journey: Journey, run: titan.Run, config: Path, folder: Path, tokens: torch.Tensor, *, others: bool) -> None:
    """Convert what a run saves to the hub, and save its model there: refused with biases that the hub has not."""
    moved = {name for name, value in run.buffers() if titan.BIAS in name and value.any()}
    if moved and not any(CORRECTION in name for name in tx.open(config.parent)):
        saved, text = run.save(), min(moved)
        model_type = json.loads(config.read_text("utf-8"))["model_type"]
        for given in (config,) if model_type in _UNNAMED else (config, None):
            with journey.refused("back", "UNEXPECTED_TENSOR", text):
                tx.convert(saved, folder / "refused", to="hf", config=given)
        with journey.refused("live save", "UNEXPECTED_TENSOR", text):
            tx.save(run.model, folder / "refused", config=config)
        for name, value in run.buffers():
            if name in moved:
                value.zero_()

    def logits(hub: Path) -> torch.Tensor:
        if others:
            return _from_hub(run.specification, hub, folder / f"own-{hub.name}").logits(tokens)
        said: torch.Tensor = open_hub(hub)(tokens).logits
        return said

    saved = run.save(last=True)
    journey.passed("save")
    tx.convert(saved, folder / "back", to="hf", config=config, verify=True)
    journey.passed("back")
    expected = run.logits(tokens)
    journey.equal("logits", logits(folder / "back"), expected)
    tx.save(run.model, folder / "saved", config=config)
    journey.equal("live save", logits(folder / "saved"), expected)


def _with_optimizer(journey: Journey, run: titan.Run, config: Path, folder: Path) -> None:
    """Take a run to each format that has optimizer state and back, and go on with it."""
    saved = run.save()
    for to in ("dcp:hf", "hf", "deepspeed-universal:hf"):
        between = folder / f"with-{to.replace(':', '-')}"
        report = tx.convert(saved, between, to=to, config=config, optimizer=True)
        assert _orphans(between) == []
        left = () if to.startswith("dcp") else tuple(run.remembered())  # other formats have no plain data
        assert {name.partition(".")[0] for name in report.ignored if titan.BIAS not in name} <= set(left)
        resumed = titan.Run(run.specification, folder / f"on-{to}", exclude_from_loading=list(left))
        resumed.folder.mkdir(parents=True)
        target = resumed.folder / f"step-{titan.STEPS}"
        tx.convert(between, target, to="dcp:torchtitan", config=config, optimizer=True)
        assert resumed.checkpoints.load()
        _goes_on(resumed, run, left)
        journey.passed("optimizer")
    resumed = titan.Run(run.specification, folder / "on-live")
    tx.save(run.model, folder / "with-live", to="dcp", optimizer=run.optimizers, extra=run.remembered())
    tx.load(resumed.model, folder / "with-live", optimizer=resumed.optimizers, extra=resumed.remembered())
    _goes_on(resumed, run)
    for each in (run, resumed):
        each.train(1, seed=9)
    _goes_on(resumed, run)
    journey.passed("resume")


def _ahead(folder: Path) -> tuple[Any, Path]:
    """torchtitan's DeepSeek-V3 with a layer ahead, and the config.json of the hub's model."""
    specification = titan.specification("deepseek_v3 671B", num_mtp_layers=1)
    config = folder / "config.json"
    ahead = {"num_nextn_predict_layers": 1}
    config.write_text(json.dumps(titan_hub.config("deepseek_v3", specification.model) | ahead), "utf-8")
    return specification, config


@pytest.mark.parametrize("flavour", ["deepseek_v3 with layers ahead", "qwen3_5 debugmodel", "qwen3_5 debugmodel_moe"])
def test_to_torchtitan_again_without_a_config(journey: Journey, flavour: str, tmp_path: Path) -> None:
    ahead = "layers ahead" in flavour
    specification, config = _ahead(tmp_path) if ahead else (titan.specification(flavour), None)
    with titan.plain():
        run = titan.Run(specification, tmp_path / "run")
        run.draw(3)
        run.train()
        saved = run.save()
        journey.passed("train", "save")
        again = titan.Run(specification, tmp_path / "again", exclude_from_loading=[*run.remembered()])
        again.folder.mkdir(parents=True)
        tx.convert(saved, again.folder / saved.name, to="dcp:torchtitan", optimizer=True, verify=True)
        journey.passed("convert")
        assert again.checkpoints.load()
        _goes_on(again, run, run.remembered())
        tokens = titan.tokens(specification.model.vocab_size)
        journey.equal("load", again.logits(tokens), run.logits(tokens))
        tx.save(run.model, tmp_path / "live", to="dcp:torchtitan", optimizer=run.optimizers)
        journey.passed("live save")
        live = titan.Run(specification, tmp_path / "into")
        tx.load(live.model, tmp_path / "live", optimizer=live.optimizers)
        _goes_on(live, run, run.remembered())
        journey.passed("live load")
        if config is None:
            with journey.refused("back", "AMBIGUOUS", "config="):
                tx.convert(saved, tmp_path / "hub", to="hf")
            return
        tx.convert(saved, tmp_path / "hub", to="hf", config=config, verify=True)
        journey.passed("back")
        # From here on, the folders' own config.json says all there is to say.
        tx.convert(tmp_path / "hub", tmp_path / "titan", to="dcp:torchtitan", strict=True)
        started = titan.Run(specification, tmp_path / "started", initial_load_path=str(tmp_path / "titan"))
        assert started.checkpoints.load()
        assert _same(_uncounted(started), _uncounted(run))
        journey.equal("logits", started.logits(tokens), run.logits(tokens))


def _uncounted(run: titan.Run) -> dict[str, torch.Tensor]:
    return {name: value for name, value in run.state().items() if titan.COUNTS not in name}


def _state(run: titan.Run) -> dict[str, torch.Tensor]:
    """Weights, buffers and the optimizer's state, whole."""
    state = {**_uncounted(run), **run.optimizers.state_dict()}
    return {name: full(value) for name, value in state.items() if isinstance(value, torch.Tensor)}


def _differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    names = ours.keys() | theirs.keys()
    return sorted(n for n in names if n not in ours or n not in theirs or not torch.equal(ours[n], theirs[n]))


def _on_ranks(rank: int, world: int, folder: Path, saved: Path | None) -> tuple[Path, dict[str, torch.Tensor]]:
    """Train on these ranks, or load there what was saved elsewhere; save, and return the state."""
    with titan.plain():
        specification, _ = _ahead(folder / f"{world} {rank}")
        run = titan.Run(specification, folder / str(world))
        if saved is None:
            tx.load(run.model, folder / "start")
            run.train()
            run.save()
        else:
            tx.load(run.model, saved, optimizer=run.optimizers)
        return run.folder / f"step-{titan.STEPS}", _state(run)


def test_resumed_on_other_ranks(journey: Journey, tmp_path: Path) -> None:
    """Saved by torchtitan on two ranks of FSDP2, taken up by one; saved from one, taken up by two."""
    for name in ("2 0", "2 1"):
        (tmp_path / name).mkdir()
    specification, _ = _ahead(tmp_path)
    with titan.plain():
        first = titan.Run(specification, tmp_path / "first")
        first.draw(3)
        tx.save(first.model, tmp_path / "start", to="dcp:torchtitan")
    (saved, state), *_ = ranks.run(2, _on_ranks, tmp_path, None)
    journey.passed("train", "save")
    with titan.plain():
        run = titan.Run(specification, tmp_path / "one", exclude_from_loading=[*first.remembered()])
        run.folder.mkdir(parents=True)
        tx.convert(saved, run.folder / saved.name, to="dcp:torchtitan", optimizer=True)
        journey.passed("convert")
        assert run.checkpoints.load()
        assert _differing(_state(run), state) == []
        journey.passed("load")
        run.train(1, seed=9)
        tx.save(run.model, tmp_path / "live", to="dcp:torchtitan", optimizer=run.optimizers)
        journey.passed("live save")
    for _, resumed in ranks.run(2, _on_ranks, tmp_path, tmp_path / "live"):
        assert _differing(resumed, _state(run)) == []
    journey.passed("resume")
