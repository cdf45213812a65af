"""What megatron-core saves of models that it trained for one step: made once a session, by processes of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.formats.megatron import trained_job
from tests.formats.megatron.test_torch_dist import MODELS
from tests.formats.megatron.trained_job import Job
from tests.live.ranks import run, stop_all
from tests.oracles import hub

Hubs = dict[str, Path]
"""Model -> its hub folder."""
Trained = Callable[[Job], Path]
"""Job -> the folder of its run."""


@pytest.fixture(scope="session")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> Hubs:
    """A hub folder of each model, in bfloat16."""
    folders = {}
    for number, (name, sizes) in enumerate(MODELS.items()):
        config, tensors = hub.make(sizes, number)
        folder = folders[name] = tmp_path_factory.mktemp(name)
        Path(folder, "config.json").write_text(json.dumps(config))
        save_file({key: value.bfloat16() for key, value in tensors.items()}, folder / hub.WEIGHTS)
    return folders


@pytest.fixture(scope="session")
def trained(hubs: Hubs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Run a job, once, and return the folder of its run."""
    done: dict[Job, Path] = {}

    def make(job: Job) -> Path:
        if job not in done:
            folder = tmp_path_factory.mktemp("run")
            given = MODELS[job.model], str(hubs[job.model]), str(folder / "iter_0000007"), job
            run(job.ranks, trained_job.save, *given)
            (folder / "latest_checkpointed_iteration.txt").write_text("7")
            done[job] = folder
        return done[job]

    yield make
    stop_all()
