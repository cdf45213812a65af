"""A real vLLM gets weights from a trainer of several ranks and answers like one started from a save.

It runs in an environment of its own (`make vllm`), on a CPU, where vLLM packs the weights of its layers. Two servers
are started for all tests here: a Llama on one worker, and a mixture of experts on two; and two more for one test each.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transaxle as tx
from tests.live.jobs import free_port
from tests.live.ranks import DIED, Ranks, run
from tests.live.topologies import FSDP, LLAMA, MOE, build, source, train
from tests.oracles import hub
from tests.refit.plugs.servers import PROMPTS, PYTHON, ROOT, Server, environment, serving
from tests.refit.test_sources import gathered, zero3_engine
from transaxle.refit import endpoints

ROUNDS = 10
SECONDS = 60
PAUSE = 0.1
"""Seconds between two requests: trainers run on the same cores."""
SIZES = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 64, "max_position_embeddings": 128}
SHARP = {"initializer_range": 0.3}
"""So that what a model says tells one step from the next."""
MODELS = {
    "llama": LLAMA | SIZES | SHARP,
    "moe": MOE | SIZES | SHARP | {"moe_intermediate_size": 32, "mlp_only_layers": [0]},
}
WORKERS = {"llama": 1, "moe": 2}
TRAINERS = {"llama": 2, "moe": 4}
Answers = list[list[int]]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM has no environment at {PYTHON}: make vllm"),
]


@dataclass
class Engines:
    """What runs while these tests do."""

    folder: Path
    servers: dict[str, Server] = field(default_factory=dict)
    fresh: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def said(self, model: str, folder: str, others: list[str], pushed: str = "") -> list[Any]:
        """Return what an engine says that is started from a folder, see `fresh_engines`."""
        process = self.fresh[model]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([folder, others, pushed]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, (self.folder / f"fresh-{model}.log").read_text(errors="replace")[-4000:]
        found: list[Any] = json.loads(line)
        return found


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Both servers, with random weights, and a process for each that starts fresh engines."""
    with _started(tmp_path_factory.mktemp("vllm"), WORKERS) as found:
        yield found


@contextmanager
def _started(folder: Path, workers: dict[str, int]) -> Iterator[Engines]:
    found = Engines(folder)
    with ExitStack() as stack:
        for name, count in workers.items():
            cores = range(count)
            first = source(folder / name, MODELS[name])
            found.servers[name] = stack.enter_context(serving(folder, first, cores))
            log = stack.enter_context((folder / f"fresh-{name}.log").open("wb"))
            found.fresh[name] = subprocess.Popen(
                [PYTHON, "-m", "tests.refit.plugs.fresh_engines", str(count)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                cwd=ROOT, env=environment(folder / "site", cores), start_new_session=True,
            )  # fmt: skip
            stack.callback(_end, found.fresh[name])
        for server in found.servers.values():
            server.wait()
        yield found


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _trainer(name: str, **config: Any) -> Any:
    torch.manual_seed(1)
    return build(MODELS[name] | config, FSDP, meta=False)


class Requests(threading.Thread):
    """A client that repeats one request while the context is entered."""

    def __init__(self, server: Server, prompt: list[int]) -> None:
        super().__init__()
        self.server, self.prompt = server, prompt
        self.enough = threading.Event()
        self.alone = threading.Lock()
        """Held while something is asked: what is computed beside another request is summed in another order, and near
        ties are decided otherwise."""
        self.said: list[list[int]] = []

    def run(self) -> None:
        while not self.enough.wait(PAUSE):
            with self.alone:
                self.said.append(self.server.tokens(self.prompt))

    def answers(self) -> Answers:
        """Return what the server says to all prompts while nobody else asks."""
        with self.alone:
            return self.server.answers()

    def __enter__(self) -> Requests:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.enough.set()
        self.join()


def _rounds(rank: int, world: int, name: str, folder: str, server: Server) -> tuple[list[Answers], Answers]:
    """Push, then train, save and push; return what the server says after each push, and to somebody who asks all the
    time from the first push on.
    """
    model = _trainer(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, foreach=False)
    asked = Requests(server, PROMPTS[0])
    with tx.refit.VllmRefit(model, server.url, dtype="bf16", timeout=SECONDS) as refit, ExitStack() as stack:
        refit.push()
        found = [server.answers()] if rank == 0 else []
        if rank == 0:
            stack.enter_context(asked)
        for step in range(ROUNDS):
            train(model, optimizer, 1, FSDP, begin=step)
            tx.save(model, f"{folder}/{step}", to="hf", overwrite=True)
            assert refit.push().version == refit.version == step + 2
            found += [asked.answers()] if rank == 0 else []
            dist.barrier()
    return found, asked.said


@pytest.mark.parametrize("name", MODELS)
def test_ten_rounds(name: str, engines: Engines) -> None:
    """After each push the server says what an engine says that has the save of that step; requests that are in flight
    are answered with the weights before or after, and never with both.
    """
    _ten_rounds(name, TRAINERS[name], engines)


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "workers", "trainers"), [("llama", 2, 4), ("moe", 1, 2)])
def test_ten_rounds_the_other_way(name: str, workers: int, trainers: int, tmp_path: Path) -> None:
    """The same for each model on the other's workers, from the other's trainers."""
    with _started(tmp_path, {name: workers}) as engines:
        _ten_rounds(name, trainers, engines)


def _ten_rounds(name: str, trainers: int, engines: Engines) -> None:
    server, folder = engines.servers[name], engines.folder / f"steps-{name}"
    folder.mkdir()
    served = server.answers()
    (first, *said), asked = run(trainers, _rounds, name, str(folder), server)[0]
    assert served != first
    steps = [str(folder / str(step)) for step in range(ROUNDS)]
    if name == "llama":
        truth = engines.said(name, steps[-1], steps)
        assert truth[0] == truth[-1]
        assert said == truth[1:]
    else:  # vLLM's own reload does not pack experts on a CPU
        assert said[-1] == engines.said(name, steps[-1], [])[0]
        assert said[ROUNDS // 2] == engines.said(name, steps[ROUNDS // 2], [])[0]
    assert len({str(each) for each in [first, *said]}) == ROUNDS + 1
    known = [each[0] for each in [first, *said]]
    order = [known.index(tokens) for tokens in asked]  # what is neither would not be there
    assert order == sorted(order)
    assert len(set(order)) > 1


def _from_zero3(rank: int, world: int, folder: str, server: Server) -> Answers:
    engine = zero3_engine(MODELS["llama"], "bf16")
    tokens = torch.arange(12).reshape(2, 6) + rank
    with tx.refit.VllmRefit(engine.module, server.url, timeout=SECONDS) as refit:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        refit.push()
    values = gathered(engine)
    plain = hub.model(MODELS["llama"], torch.bfloat16)
    plain.load_state_dict(values)
    if rank == 0:
        tx.save(plain.state_dict(), folder, to="hf", config=MODELS["llama"], group=dist.new_group([0]))
        return server.answers()
    dist.new_group([0])
    return []


@pytest.mark.peers
def test_a_trainer_under_zero3(engines: Engines) -> None:
    server, folder = engines.servers["llama"], str(engines.folder / "zero3")
    before = server.answers()
    with Ranks(2) as ranks:  # DeepSpeed remembers the process group
        said = ranks.run(_from_zero3, folder, server)[0]
    assert said == engines.said("llama", folder, [])[0] != before


def test_an_engine_of_the_same_process(engines: Engines) -> None:
    """An `LLM` takes weights when it has no requests; and a source gives vLLM's own engines what they check."""
    steps = engines.folder / "steps-llama"
    first, (refused, same, said) = engines.said("llama", str(steps / "0"), [], str(steps / "1"))
    assert same
    assert "the LLM has unfinished requests" in refused
    assert said == engines.said("llama", str(steps / "1"), [])[0] != first


def _some(rank: int, world: int, server: Server) -> tuple[str, Answers, Answers, Answers]:
    model = _trainer("moe")
    with tx.refit.VllmRefit(model, server.url, dtype="bf16", timeout=SECONDS) as refit:
        refit.push()
        before = server.answers()
        with pytest.raises(tx.TransaxleError) as found:
            refit.push(only="*.w13_weight")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        dist.barrier()
        unchanged = server.answers()
        dist.barrier()
        refit.push(only="*.experts.*")
        some = server.answers()
        dist.barrier()
        refit.push(skip="*.experts.*")
    return str(found.value), before, unchanged, some


def test_some_layers_alone(engines: Engines) -> None:
    """Experts without the rest, and the rest; a part of a layer is refused, since vLLM packs it as a whole."""
    server = engines.servers["moe"]
    refused, before, unchanged, some = run(2, _some, server)[0]
    assert "vLLM repacks a layer as a whole" in refused
    assert "w2_weight" in refused
    assert before == unchanged != some
    assert len({str(each) for each in (before, some, server.answers())}) == 3


def _wrong(rank: int, world: int, server: Server) -> str:
    model = _trainer("llama", num_attention_heads=16, num_key_value_heads=8, head_dim=32)
    with pytest.raises(tx.TransaxleError) as found:
        tx.refit.VllmRefit(model, server.url, dtype="bf16", timeout=SECONDS)
    return str(found.value)


def test_another_config_is_refused_on_both_sides(engines: Engines) -> None:
    server = engines.servers["llama"]
    before = server.answers()
    first, second = run(2, _wrong, server)
    assert first == second
    told = "num_attention_heads is 8 in the target's config, but 16 in the source's"
    assert told in first
    assert told in server.log.read_text("utf-8", errors="replace")
    assert server.answers() == before


def _killing(rank: int, world: int, name: str, server: Server, victim: int) -> str:
    """Lose a rank of the trainer, or a worker of the engine, in the middle of a push."""
    model = _trainer(name)
    refit = tx.refit.VllmRefit(model, server.url, dtype="bf16", timeout=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    dist.barrier()
    calls, usual = itertools.count(), endpoints.SourceReader.copy
    target = os.getpid() if rank == victim else -1
    if victim < 0 and rank == 0:
        target = server.workers()[-1]

    def die(self: Any, *args: Any) -> None:
        if next(calls) == 5 and target > 0:
            os.kill(target, signal.SIGKILL)
        usual(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoints.SourceReader, "copy", die)
        with pytest.raises(tx.TransaxleError) as found:
            refit.push()
    with pytest.raises(tx.TransaxleError, match="an earlier push failed"):
        refit.push()
    return str(found.value)


@pytest.mark.parametrize(("name", "victim"), [("llama", 0), ("moe", 1)])
def test_a_killed_trainer_leaves_the_old_weights(name: str, victim: int, engines: Engines) -> None:
    """The engine answers as before, and the next trainer can push."""
    server = engines.servers[name]
    before = server.answers()
    with Ranks(2) as ranks:
        answers = ranks.answers(_killing, name, server, victim)
    assert answers[victim] == (False, DIED)
    fine, said = answers[1 - victim]
    assert fine, said
    assert "a rank died or did not answer in time" in said
    assert server.answers() == before
    assert server.ask("is_paused") == {"is_paused": False}
    run(1, _once, name, server)
    assert server.answers() != before


def _once(rank: int, world: int, name: str, server: Server) -> None:
    with tx.refit.VllmRefit(_trainer(name), server.url, dtype="bf16", timeout=SECONDS) as refit:
        refit.push()


def test_the_example_of_the_page_works(engines: Engines, tmp_path: Path) -> None:
    server = engines.servers["llama"]
    page = (ROOT / "docs/how-to/refit-vllm.md").read_text("utf-8")
    block = page.partition("```python\n")[2].partition("```")[0]
    block = block.replace("MODEL", str(engines.folder / "llama")).replace("http://10.0.0.8:8000", server.url)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ = os.environ | alone | {"PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, env=environ, check=False)
    assert done.stdout == "3\n", done.stderr[-4000:]


def test_a_killed_worker_is_reported(engines: Engines) -> None:
    said = run(2, _killing, "moe", engines.servers["moe"], -1)
    assert all("a rank died or did not answer in time" in each for each in said)
