"""The vLLM plugin without vLLM, with another version, and with one that does not answer."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.live.jobs import free_port
from tests.live.refusals import refused
from tests.refit.plugs.test_control import DEFAULTS, Vllm, serving
from transaxle import vllm_plugin
from transaxle.refit import vllm_loader
from transaxle.refit.vllm_engine import VERSION, VllmEngine, check_config, split_layers
from transaxle.refit.vllm_refit import _Engines, _invitation, control
from transaxle.refit.vllm_worker import Ranks, worker_share

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
FACTORY = "vllm.distributed.weight_transfer.factory"


class Factory:
    """What vLLM has to register engines."""

    _registry: dict[str, tuple[str, str]] = {}  # noqa: RUF012 - as vLLM has it

    @classmethod
    def register_engine(cls, name: str, module: str, found: str) -> None:
        assert name not in cls._registry
        cls._registry[name] = module, found


def test_the_entry_point_registers_the_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    points = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["entry-points"]["vllm.general_plugins"]
    module, _, function = points["transaxle"].partition(":")
    assert getattr(import_module(module), function) is vllm_plugin.register
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", FACTORY):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[FACTORY], "WeightTransferEngineFactory", Factory, raising=False)
    for _ in range(2):
        vllm_plugin.register()
    module, name = Factory._registry[vllm_plugin.BACKEND]
    assert getattr(import_module(module), name) is VllmEngine


class BaseLoader:
    """What vLLM's model loaders have in common."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config


LOADERS = "vllm.model_executor.model_loader"
REGISTERED = f"""
import sys
from types import ModuleType
for name in ("vllm", "vllm.model_executor", "{LOADERS}", "{LOADERS}.base_loader"):
    sys.modules[name] = ModuleType(name)
loaders = sys.modules["{LOADERS}"]
sys.modules["vllm.model_executor"].model_loader = loaders
loaders._LOAD_FORMAT_TO_MODEL_LOADER = registered = {{}}
loaders.register_model_loader = lambda name: lambda loader: registered.__setitem__(name, loader)
sys.modules["{LOADERS}.base_loader"].BaseModelLoader = object
from transaxle import vllm_plugin
vllm_plugin.register()
first = registered["transaxle"]
vllm_plugin.register()
assert registered == {{"transaxle": first}}
print(*sorted(name for name in sys.modules if name.startswith(("transaxle.", "torch", "numpy"))))
"""


def test_the_entry_point_registers_the_load_format_and_imports_little() -> None:
    done = subprocess.run([sys.executable, "-c", REGISTERED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["transaxle.errors", "transaxle.options", "transaxle.vllm_plugin"]


def test_keys_of_the_load_format_are_checked() -> None:
    loader = vllm_plugin.model_loader_class(BaseLoader)

    def told(**extra: Any) -> Any:
        return loader(SimpleNamespace(model_loader_extra_config=extra))

    told(path="megatron", dialect="hf", decode="bf16", ignore=["value_head.*"], axes={"g": 8})
    with refused("AMBIGUOUS", "unknown key 'pth'", "Did you mean 'path'?"):
        told(pth="megatron")
    with refused("AMBIGUOUS", "unknown key 'from'", "Did you mean 'dialect'?"):
        told(**{"from": "hf"})
    with refused("AMBIGUOUS", "unknown key 'optimizer'", "Keys are path, ignore, check_source, format"):
        told(optimizer=True)
    with pytest.raises(TypeError, match="decode must be"):
        told(decode=3)
    with pytest.raises(TypeError, match="exclude each other"):
        told(decode="bf16", merge="adapter")
    with pytest.raises(TypeError, match="must be a JSON object; got list"):
        loader(SimpleNamespace(model_loader_extra_config=["path"]))
    assert told().download_model(None) is None


def test_options_of_the_load_format_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = list[Any]()
    for name in ("load_weights", "reload_tensors"):
        monkeypatch.setattr(vllm_loader, name, lambda _model, _config, options: passed.append(options))
    loader = vllm_plugin.model_loader_class(BaseLoader)(SimpleNamespace(model_loader_extra_config={"path": "megatron"}))
    loader.load_weights(None, None)
    loader.get_all_weights(None, None)
    assert passed[0] is passed[1]
    assert passed[0].path == "megatron"


def test_another_version_of_vllm_starts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    assert "the weight transfer backend 'transaxle' is not available: it needs vLLM 0.32 or newer" in caplog.text
    assert "the load format 'transaxle' is not available: it needs vLLM 0.32 or newer" in caplog.text


def test_a_layer_is_pushed_as_a_whole() -> None:
    names = ("a.weight", "a.bias", "b.weight")
    split_layers(names, {"a.weight", "a.bias"})
    with pytest.raises(tx.TransaxleError, match="vLLM repacks a layer as a whole"):
        split_layers(names, {"a.weight", "b.weight"})


def test_tensors_of_a_worker_are_checked() -> None:
    part = 1, (((0, 3), (6, 8)), ((3, 6), (8, 10)))
    found = worker_share((4, 5), part, Ranks(2, 1))
    assert found is not None
    assert (found.shape, found.positions) == ((4, 10), (((0, 4),), ((3, 6), (8, 10))))
    assert worker_share((4, 5), None, Ranks(2, 1)) is None
    with pytest.raises(ValueError, match="vLLM has 4 along dim 1 on this worker, where the table gives it 5"):
        worker_share((4, 4), part, Ranks(2, 0))
    experts = 0, (((0, 3),), ((3, 6),), ((6, 8),), ((8, 10),))
    found = worker_share((2, 5), experts, Ranks(2, 1, 4, 3))
    assert found is not None
    assert found.positions == (((8, 10),), ((0, 5),))


def test_models_that_change_under_vllm_are_refused() -> None:
    parallel = SimpleNamespace(enable_eplb=True)
    with pytest.raises(tx.TransaxleError, match="experts that move between ranks"):
        check_config(SimpleNamespace(parallel_config=parallel))
    with pytest.raises(tx.TransaxleError, match=r"adapters \(enable_lora\)"):
        check_config(SimpleNamespace(parallel_config=SimpleNamespace(), lora_config=object()))
    check_config(SimpleNamespace(parallel_config=SimpleNamespace()))


def test_different_versions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(rank=0, world_size=1)
    engine = VllmEngine(None, SimpleNamespace(parallel_config=parallel, model_config=None), torch.device("cpu"), None)  # type: ignore[arg-type]  # no model is looked at
    monkeypatch.setattr(engine, "_workers", lambda: SimpleNamespace(gather=lambda said: [said]))
    with pytest.raises(RuntimeError, match="the trainer is of another version of transaxle"):
        engine.init_transfer_engine(engine.parse_init_info({"version": VERSION + 1, "news": 1}))
    engine.start_weight_update()
    engine.update_weights({})  # no trainer is here: nothing comes, and nothing is changed
    engine.finish_weight_update()
    with pytest.raises(RuntimeError, match="no draft model"):
        engine.set_weight_update_target(None, None)


class Refusing(Vllm):
    """A server that refuses."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(500, b'{"error": "Worker failed: the table does not say what it is"}')


def test_errors_of_a_server_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Refusing, "asked", [], raising=False)
    texts = "init_weight_transfer_engine answered 500", "the table does not say what it is"
    with serving(Refusing) as port, refused("IO", *texts):
        tx.refit.VllmRefit({"w": torch.ones(1)}, f"http://127.0.0.1:{port}")


def test_an_unreachable_server_is_reported() -> None:
    with pytest.raises(tx.TransaxleError, match="cannot be reached"):
        tx.refit.VllmRefit({"w": torch.ones(1)}, f"http://127.0.0.1:{free_port()}")


def test_clients_of_vllm_are_called() -> None:
    client = Obedient("init")
    with pytest.raises(tx.TransaxleError, match="Give workers="):
        tx.refit.VllmRefit({"w": torch.ones(1)}, client)
    with pytest.raises(tx.TransaxleError, match="vLLM could not do it: cannot init"):
        tx.refit.VllmRefit({"w": torch.ones(1)}, client, workers=1)
    assert client.told == ["init"]
    with pytest.raises(TypeError, match="engine must be the URL of a server, an LLM, or a client"):
        control(3, None, 1)
    with pytest.raises(ValueError, match="adapter must be merged, or None"):
        tx.refit.VllmRefit({"w": torch.ones(1)}, client, workers=1, adapter="alone")


class Obedient:
    """A client that notes what it is told, and fails at one thing."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.told = fails, list[str]()

    def _note(self, what: str) -> None:
        self.told.append(what)
        if what == self.fails:
            raise RuntimeError(f"cannot {what}")

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._note(f"init {info['first']}" if info["address"] else "init")

    def start_weight_update(self) -> None:
        self._note("start")

    def update_weights(self, info: dict[str, Any]) -> None:
        self._note("forget" if "forget" in info else "update")

    def finish_weight_update(self, version: str | None = None) -> None:
        self._note(f"finish {version}")


def test_an_update_begins_in_all_engines_or_in_none() -> None:
    """If it fails in one engine, it is ended in the others; an update that a lost trainer left open is ended first."""
    clients = [Obedient(), Obedient("start")]
    engines = _Engines(clients, {**DEFAULTS, "workers": 2})
    meeting = engines.prepare("127.0.0.1:1", 3, _invitation(DEFAULTS))
    assert meeting is not None
    assert (meeting.size, meeting.address) == (3 + 2 * 2, "127.0.0.1:1")
    engines.note_open([False] * 3 + [False, False] + [False, True])
    with pytest.raises(tx.TransaxleError, match="cannot start"):
        engines.start()
    engines.abandon()
    assert [each.told for each in clients] == [
        ["init", "start", "forget", "finish None"],
        ["init", "forget", "finish None", "start"],
    ]


def test_only_rank_0_calls_engines() -> None:
    engines = _Engines([], {**DEFAULTS})
    assert engines.prepare(None, 2, _invitation(DEFAULTS)) is None
    engines.note_open([False, False, True])
    engines.start()
    engines.switch("1")
    engines.abandon()


def test_all_engines_switch_while_requests_are_stopped() -> None:
    clients, entered = [Obedient(), Obedient()], []

    @contextmanager
    def pause() -> Iterator[None]:
        entered.append("stopped")
        yield
        entered.append("goes on")

    engines = _Engines(clients, {**DEFAULTS, "workers": 1, "pause": pause})
    engines.prepare("127.0.0.1:1", 1, _invitation(DEFAULTS))
    engines.start()
    engines.switch("7")
    engines.abandon()  # nothing is open any more
    assert [each.told for each in clients] == [["init", "start", "finish 7"]] * 2
    assert entered == ["stopped", "goes on"]
