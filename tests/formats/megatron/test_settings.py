"""Settings that Megatron-Bridge and NeMo keep beside a checkpoint: read as data, and taken for the model's sizes."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import transaxle as tx
from tests.formats.dcp.damage import MARKER, Evil
from tests.oracles import hub
from transaxle.cli import main
from transaxle.errors import Refused, UsageError
from transaxle.formats.megatron.run_arguments import UnreadableSettingsError, arguments_of, read_settings

SIZES = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 20,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12, "mlp_only_layers": [], "vocab_size": 50,
}  # fmt: skip
MODEL = """\
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_qkv_bias: false
  expert_model_parallel_size: 4
  ffn_hidden_size: 20
  hidden_size: 16
  kv_channels: 6
  moe_ffn_hidden_size: 12
  moe_layer_freq:
  - 1
  - 1
  multi_latent_attention: false
  num_attention_heads: 4
  num_layers: 2
  num_moe_experts: 4
  num_query_groups: 2
  share_embeddings_and_output_weights: false
  tensor_model_parallel_size: 2
  vocab_size: 50
"""
RUN_CONFIG = f"_target_: megatron.bridge.training.config.ConfigContainer\nmodel:\n{MODEL}train: null\n"
NEMO = f"_target_: nemo.collections.llm.gpt.model.qwen3.Qwen3Model\nconfig:\n{MODEL}tokenizer:\n  _target_: a.B\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub folder."""
    folder = tmp_path_factory.mktemp("hub")
    config, tensors = hub.make(SIZES, 0)
    Path(folder, "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / hub.WEIGHTS)
    return folder


@pytest.fixture
def run(source: Path, tmp_path: Path) -> Path:
    """What Megatron-Bridge saves of it: settings in place of arguments, and what was read in a file of its own."""
    folder = tmp_path / "run"
    tx.convert(source, folder, to="torch_dist")
    for name in ("config.json", "transaxle.json", "release/common.pt"):
        Path(folder, name).unlink()
    (folder / "release").rename(folder / "iter_0000007")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    (folder / "iter_0000007/run_config.yaml").write_text(RUN_CONFIG)
    counted = {"step": 7, "consumed_train_samples": 56, "floating_point_operations_so_far": 1e9, "do_train": False}
    state = {name: torch.tensor(value) for name, value in counted.items()}
    for file in ("latest_train_state.pt", "iter_0000007/train_state.pt"):
        torch.save(state, folder / file)
    return folder


def _same(folder: Path, source: Path) -> bool:
    found, expected = load_file(folder / hub.WEIGHTS), load_file(source / hub.WEIGHTS)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_settings_of_megatron_bridge_are_the_sizes(run: Path, source: Path, tmp_path: Path) -> None:
    with tx.open(run) as checkpoint:
        assert checkpoint.config["num_hidden_layers"] == 2
        told = dict(checkpoint.metadata["megatron"])
        assert told.pop("arguments")["num_experts"] == 4
        assert told == {
            "iteration": 7,
            "parallel": {"tp": 2, "ep": 4},
            "counters": {"consumed_train_samples": 56},
            "vocabulary": {"vocab_size": 50},
        }
    tx.convert(run, tmp_path / "out", to="hf")
    assert _same(tmp_path / "out", source)
    with pytest.raises(Refused, match="num_key_value_heads 4"):
        tx.convert(run, tmp_path / "other", to="hf", config={**SIZES, "num_key_value_heads": 4})


def test_the_settings_of_nemo_are_the_sizes(run: Path, source: Path, tmp_path: Path) -> None:
    """Its names begin with that of the module that holds the model, and its tokenizer is beside the settings."""
    folder = tmp_path / "nemo/checkpoints/qwen--val_loss=1.25-epoch=0-last"
    shutil.copytree(run / "iter_0000007", folder / "weights")
    items = FileSystemReader(folder / "weights").read_metadata().state_dict_metadata.items()
    tensors = {name: item for name, item in items if isinstance(item, TensorStorageMetadata)}
    state = {name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in tensors.items()}
    with warnings.catch_warnings(action="ignore"):
        load(state, checkpoint_id=folder / "weights", no_dist=True)
    for file in (*folder.glob("weights/*.distcp"), folder / "weights/.metadata", folder / "weights/run_config.yaml"):
        file.unlink()
    writer = FileSystemWriter(folder / "weights", overwrite=True)
    with warnings.catch_warnings(action="ignore"):
        save({f"module.{name}": value for name, value in state.items()}, storage_writer=writer, no_dist=True)
    (folder / "context").mkdir()
    (folder / "context/model.yaml").write_text(NEMO)
    (folder / "context/nemo_tokenizer").mkdir()
    for name in ("tokenizer.json", "special_tokens_map.json", "other.bin"):
        (folder / "context/nemo_tokenizer" / name).write_text(name)
    for given, out in ((folder, "out"), (tmp_path / "nemo", "of-run")):
        tx.convert(given, tmp_path / out, to="hf")
        assert _same(tmp_path / out, source)
        assert (tmp_path / out / "tokenizer.json").read_text() == "tokenizer.json"
        assert (tmp_path / out / "special_tokens_map.json").exists()
        assert not (tmp_path / out / "other.bin").exists()


def test_info_tells_the_run_and_its_vocabulary(
    run: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str | Path) -> str:
        assert main(["info", *map(str, words)]) == 0
        return " ".join(capsys.readouterr().out.split())

    text = said(run)
    assert "run iteration 7, saved by tp 2 ep 4, a vocabulary of 50, consumed_train_samples 56" in text
    assert "arguments 17 of them; --all, or --json, shows them" in text
    assert "(pickled state of Megatron's)" in text
    assert "arguments add_qkv_bias False, consumed_train_samples 56" in said("--all", run)
    found = json.loads(said("--json", run))["metadata"]["megatron"]
    assert found["vocabulary"] == {"vocab_size": 50}
    assert found["arguments"]["moe_layer_freq"] == [1, 1]
    tx.convert(source, tmp_path / "padded", to="torch_dist", axes={"p": 14})
    assert "a vocabulary of 50, padded to 64" in said(tmp_path / "padded")


def test_settings_that_are_not_understood_are_left_behind(run: Path, source: Path, tmp_path: Path) -> None:
    file = run / "iter_0000007/run_config.yaml"
    for text, reason in (
        (b"model: [1, 2", "line 1: expected ',' or ']'"),
        (b"model:\n  num_layers: 2\n num_layers: 3\n", "line 3: expected <block end>"),
        (b"\xff\xfe", "utf-8"),
        (b"a: 1\n" * 300_000, "more than"),
    ):
        file.write_bytes(text)
        with tx.open(run) as checkpoint:
            assert reason in checkpoint.metadata["left_behind"]["iter_0000007/run_config.yaml"]
        with pytest.raises(UsageError, match="UNKNOWN_AXIS"):
            tx.convert(run, tmp_path / "out", to="hf")
    tx.convert(run, tmp_path / "out", to="hf", config=source / "config.json")
    assert _same(tmp_path / "out", source)


def test_nothing_runs(run: Path, tmp_path: Path) -> None:
    file = run / "iter_0000007/run_config.yaml"
    file.write_text(RUN_CONFIG + f"evil: !!python/object/apply:os.system ['touch {tmp_path / MARKER}']\n")
    with tx.open(run) as checkpoint:
        assert checkpoint.config["num_hidden_layers"] == 2
    torch.save({"step": Evil(tmp_path)}, run / "iter_0000007/train_state.pt")
    with pytest.raises(Refused, match="UNSAFE_PICKLE"):
        tx.open(run)
    assert not list(tmp_path.rglob(MARKER))


def test_arguments() -> None:
    assert arguments_of({"model": {"num_query_groups": None, "num_layers": 2, "_target_": "a.B"}}) == {
        "num_layers": 2,
        "group_query_attention": False,
    }
    inner = {"_builder_": "a.B", "vocab_size": 9, "transformer": {"num_layers": 2, "hybrid_layer_pattern": "M*"}}
    assert arguments_of({"model": inner}) == {"num_layers": 2, "hybrid_override_pattern": "M*", "vocab_size": 9}
    odd: list[Any] = [None, [], "text", {"model": None}, {"model": [1]}, {"config": "x"}]
    assert all(arguments_of(each) == {} for each in odd)


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{at + 1}: &a{at + 1} [*a{at}, *a{at}]\n" for at in range(40))
"""Two values to the power of 41."""


TEXTS: dict[str, tuple[str, Any]] = {
    "nothing": ("# only this\n---\n", None),
    "scalars": ("a: 1.5e-06\nb: .inf\nc: 1e5\nd: ~\ne: 'true'\nf: 0x1f\n",
                {"a": 1.5e-6, "b": math.inf, "c": "1e5", "d": None, "e": "true", "f": 31}),
    "nested": ("a:\n- 1\n- b: 2\n  c: 3\nd: {e: [x]}\n", {"a": [1, {"b": 2, "c": 3}], "d": {"e": ["x"]}}),
    "an alias": ("a: &id001\n  b: [1, {c: 2}]\nd: *id001\n", {"a": {"b": [1, {"c": 2}]}, "d": {"b": [1, {"c": 2}]}}),
    "tags": ("a: !!python/object:os.system {}\nb: !!python/tuple\n- 1\n- 2\n", {"a": {}, "b": [1, 2]}),
}  # fmt: skip
UNREADABLE = {
    "two documents": "a: 1\n---\nb: 2\n",
    "an alias of nothing": "a: *b\n",
    "an anchor inside of itself": "a: &a [*a]\n",
    "a key twice": "a: 1\na: 2\n",
    "a key that is no text": "? [a]\n: 1\n",
    "too many levels": "[" * 100 + "]" * 100,
    "too many values": "a: [" + "1," * 60_000 + "]",
    "two values to the power of 41": LAUGHS,
}


@pytest.mark.parametrize(("text", "value"), TEXTS.values(), ids=TEXTS.keys())
def test_yaml_is_read_as_data(text: str, value: Any) -> None:
    assert read_settings(text) == value


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_yaml_of_no_use_is_refused(text: str) -> None:
    with pytest.raises(UnreadableSettingsError):
        read_settings(text)
