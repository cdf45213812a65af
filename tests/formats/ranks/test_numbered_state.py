"""The numbers of an optimizer in rank files get names if the order in the files is proof; else they are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.formats.ranks import made
from tests.formats.refusals import refuses

WORLD = 2
SHAPES = {"embed": (6, 4), "layers.0.up": (8, 4), "layers.0.norm": (4,), "layers.1.up": (8, 4), "layers.1.norm": (4,),
          "head": (6, 4)}  # fmt: skip
"""A model of no family, in the order in which it registers its parameters."""
BUFFERS = {"layers.0.norm": (4,), "embed": (6, 4)}
"""Parameter -> shape of a plain buffer of the same shape after it."""
MATRICES = ["embed", "layers.0.up", "layers.1.up", "head"]
NORMS = ["layers.0.norm", "layers.1.norm"]
Shapes = Mapping[str, tuple[int, ...]]


def whole(name: str, number: int = 0) -> torch.Tensor:
    """The values of a tensor, which no other tensor has."""
    generator = torch.Generator().manual_seed(1000 * (1 + [*SHAPES].index(name)) + number)
    return torch.randn(SHAPES[name], generator=generator)


def save(
    folder: Path, groups: Sequence[Sequence[str]], *, idle: Sequence[str] = (), tied: bool = False, flat: bool = False
) -> Path:
    """Write rank files of a model with buffers.

    Args:
        folder: an empty folder.
        groups: the names of the parameters in each group; those in none are frozen.
        idle: parameters of groups that have no state yet.
        tied: whether the head is the embedding.
        flat: whether the optimizer's keys are flattened, with names.
    """
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    models, states = [], []
    for rank in range(WORLD):
        mesh = made.mesh(rank, {"fsdp": WORLD})
        model: dict[str, Any] = {}
        for name in SHAPES:
            model[name] = model["embed"] if tied and name == "head" else made.dtensor(whole(name), mesh, ["S0"])
            if name in BUFFERS:
                model[f"{name}_buffer"] = torch.zeros(BUFFERS[name])
        moments = {
            name: {
                "step": torch.tensor(3.0),
                "exp_avg": made.dtensor(whole(name, 1), mesh, ["S0"]),
                "exp_avg_sq": made.dtensor(whole(name, 2), mesh, ["S0"]),
            }
            for name in numbers
            if name not in idle
        }
        models.append(model)
        settings = [
            {"lr": 0.1 * (1 + at), "params": [numbers[name] for name in group]} for at, group in enumerate(groups)
        ]
        if flat:
            state = {f"state.{name}.{key}": value for name, of in moments.items() for key, value in of.items()}
            states.append({**state, **{f"param_groups.{name}.lr": 0.1 for name in numbers}})
        else:
            states.append({"state": {numbers[name]: of for name, of in moments.items()}, "param_groups": settings})
    made.write_all(folder, models)
    made.write_all(folder, states, "optim")
    return folder


def check(folder: Path, names: Sequence[str], template: str | None = None) -> None:
    """Check that each parameter has its own state, and no other parameter has any."""
    with tx.open(folder, optimizer=True, ranks=template) as checkpoint:
        expected = {f"optim/{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
        assert {name for name in checkpoint if name.startswith("optim/")} == expected
        for name in names:
            for number, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
                assert torch.equal(checkpoint[f"optim/{name}/{key}"].torch(), whole(name, number)), name


@pytest.mark.parametrize(
    "groups", [[[*SHAPES]], [MATRICES, NORMS], [NORMS, MATRICES]], ids=["one", "two", "norms first"]
)
def test_a_model_of_no_family_with_buffers(tmp_path: Path, groups: list[list[str]]) -> None:
    check(save(tmp_path / "step", groups), [*SHAPES])
    with tx.open(tmp_path / "step", optimizer=True) as checkpoint:
        assert [group["params"] for group in checkpoint.metadata["param_groups"]] == groups


@pytest.mark.parametrize("word", ["optim", "optimizer"])
def test_state_in_files_that_the_user_names(tmp_path: Path, word: str) -> None:
    folder = save(tmp_path / "step", [[*SHAPES]])
    for path in [*folder.iterdir()]:
        path.rename(folder / path.name.replace("optim", word).replace(f"_world_size_{WORLD}_rank_", "-"))
    check(folder, [*SHAPES], "model-{}.pt")


def test_tied_weights_count_once(tmp_path: Path) -> None:
    names = [name for name in SHAPES if name != "head"]
    check(save(tmp_path / "step", [names], tied=True), names)


@pytest.mark.parametrize("frozen", [["embed"], ["head"], [*NORMS], ["embed", *NORMS]])
def test_frozen_parameters_that_the_order_tells(tmp_path: Path, frozen: list[str]) -> None:
    names = [name for name in SHAPES if name not in frozen]
    check(save(tmp_path / "step", [names]), names)


@pytest.mark.parametrize("frozen", [["layers.0.norm"], ["layers.1.up", "layers.1.norm"]])
def test_frozen_parameters_between_equal_ones(tmp_path: Path, frozen: list[str]) -> None:
    """Without up and norm of a layer, the order does not say which layer that was."""
    names = [name for name in SHAPES if name not in frozen]
    groups = [[name for name in names if "norm" not in name], [name for name in names if "norm" in name]]
    folder = save(tmp_path / "step", groups)
    with refuses("UNSUPPORTED", "cannot be proved", "in several ways", "frozen, or are buffers"):
        tx.open(folder, optimizer=True)
    with refuses("UNSUPPORTED", "cannot be proved"):
        tx.convert(folder, tmp_path / "out", to="dcp:identity", optimizer=True)
    assert not (tmp_path / "out").exists()
    with tx.open(folder, optimizer=False) as checkpoint:
        assert {*SHAPES} <= {*checkpoint}


def test_two_groups_of_equal_shapes(tmp_path: Path) -> None:
    folder = save(
        tmp_path / "step", [["embed", "layers.0.up", "layers.0.norm"], ["layers.1.up", "layers.1.norm", "head"]]
    )
    with refuses("UNSUPPORTED", "in several ways"):
        tx.open(folder, optimizer=True)


def test_an_order_that_is_not_the_model_s(tmp_path: Path) -> None:
    folder = save(tmp_path / "step", [[*reversed(SHAPES)]])
    with refuses("UNSUPPORTED", "not those of the model's parameters in the model's order"):
        tx.open(folder, optimizer=True)


def test_a_parameter_without_state_that_the_others_leave(tmp_path: Path) -> None:
    names = [name for name in SHAPES if name != "layers.1.norm"]
    check(save(tmp_path / "step", [[*SHAPES]], idle=["layers.1.norm"]), names)


def test_a_parameter_without_state_beside_a_buffer(tmp_path: Path) -> None:
    folder = save(tmp_path / "step", [[*SHAPES]], idle=["layers.0.norm"])
    with refuses("UNSUPPORTED", "in several ways"):
        tx.open(folder, optimizer=True)


def test_flattened_state_has_names(tmp_path: Path) -> None:
    names = ["layers.0.up", "layers.1.norm"]
    check(save(tmp_path / "step", [names], flat=True), names)


def test_files_of_another_number_of_ranks_than_their_config_says(tmp_path: Path) -> None:
    folder = save(tmp_path / "step", [[*SHAPES]])
    for text, words in ((json.dumps({"world_size": 4}), "had 4 ranks, and there are files of 2"), ("{", "not JSON")):
        (folder / "fsdp_config.json").write_text(text)
        with refuses("CORRUPT", words, file="fsdp_config.json"):
            tx.open(folder)
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD}))
    tx.open(folder).close()
