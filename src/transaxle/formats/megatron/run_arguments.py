"""Reads the arguments and the state of a Megatron run, wherever a checkpoint stores them.

Megatron's arguments are a pickled `argparse.Namespace` of some eight hundred entries, with members of Megatron's own
enums among them. Transaxle's pickle interpreter describes the enums without importing them; only numbers, strings and
lists among the arguments are used.

Megatron-Bridge and NeMo store settings in YAML files instead. A tag such as `!!python/object` in YAML is ignored, and
an alias means the value of its anchor.

    iter_0000007/run_config.yaml      Megatron-Bridge: `model`, the settings of the model provider
    iter_0000007/train_state.pt       step and sample counters
    CHECKPOINT/context/model.yaml     NeMo 2: `config`, the same settings; the checkpoint itself is CHECKPOINT/weights

No class that the YAML files name is ever imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from transaxle.formats.megatron.iterations import WEIGHTS
from transaxle.formats.pickled.allowed import ALLOWED, INERT, GlobalRule, Names
from transaxle.formats.pickled.descriptors import Object, TensorRef
from transaxle.formats.registry import HERE
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.saved import read_saved

_MAX_DEPTH = 8
"""Maximum nesting depth of plain data."""
_MEGATRON_PACKAGES = ("megatron", "nemo", "transformer_engine")
"""Python packages whose enums and settings classes occur in pickled arguments."""


class _Names(dict[tuple[str, str], GlobalRule]):
    """The set of globals (classes and functions) that the pickle of a run's arguments may name; Megatron's globals are
    described, never imported.
    """

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        return super().get(key) or (INERT if key[0].partition(".")[0] in _MEGATRON_PACKAGES else default)


_SIGNALS = ("Signals", "Signals.SIGINT", "Signals.SIGTERM", "Signals.SIGHUP", "Signals.SIGUSR1", "Signals.SIGUSR2")
"""Globals with which the exit signal is pickled among the arguments; up to Python 3.11.3, members of an Enum were
pickled by name."""
NAMES: Names = _Names({**ALLOWED, **{("signal", name): INERT for name in _SIGNALS}, ("enum", "Enum"): INERT})
"""The globals (classes and functions) that the pickle of a run's arguments may name; see `_Names`."""

KEYS: Mapping[str, str] = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
    "num_experts": "num_experts",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "attention_bias": "add_qkv_bias",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "v_head_dim": "v_head_dim",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "num_nextn_predict_layers": "mtp_num_layers",
    "moe_latent_size": "moe_latent_size",
}
"""Key of a config.json -> Megatron's argument with the same meaning."""
_COMMON_STEP = "common_step"
"""Key of the step that Megatron stores once for all parameters when it uses torch's own optimizers."""
DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
}
"""Mesh dim -> Megatron's argument with its size."""


COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
"""Names of the arguments that count the samples consumed so far."""
_ROWS = ("vocab_size", "padded_vocab_size")


class RunState(msgspec.Struct, frozen=True):
    """The contents of a Megatron checkpoint, except tensors, as plain data."""

    args: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Name of a Megatron argument -> value."""
    facts: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Iteration, checkpoint version, scheduler state and optimizer settings, by key."""

    def config(self) -> dict[str, Any]:
        """Return the model's sizes from the arguments, under the keys of a config.json; the vocabulary size does not
        include padding.
        """
        args = self.args
        config = {key: args[name] for key, name in KEYS.items() if args.get(name) is not None}
        if args.get("group_query_attention") is False:
            config["num_key_value_heads"] = args.get("num_attention_heads")
        if not args.get("multi_latent_attention"):
            for key in ("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"):
                config.pop(key, None)
        else:
            config.pop("head_dim", None)  # multi-latent attention ignores `kv_channels`
        untied = args.get("untie_embeddings_and_output_weights")
        if isinstance(untied, bool):
            config["tie_word_embeddings"] = not untied
        if args.get("num_experts"):
            config |= _sparse_layers(args) | _sizes_of_shared_experts(args)
        return {key: value for key, value in config.items() if value is not None}

    def step(self) -> int | None:
        """Return the number of optimizer steps taken; None if the number is not stored, or differs between parameter
        groups.
        """
        # A parameter group without parameters may have no step; torch's own optimizers store the step as a float.
        steps = {step for step in _steps(self.facts.get("optimizer")) if step is not None}
        (only,) = steps if len(steps) == 1 else (None,)
        if type(only) is float and only.is_integer():
            return int(only)
        return only if type(only) is int else None

    def to_metadata(self) -> dict[str, Any]:
        """Return the run's state as metadata entries: facts, arguments, parallel degrees, counters and vocabulary
        sizes.

        `vocab_size` is the size of the tokenizer, `padded_vocab_size` the number of rows of the embedding.
        """
        degrees = {axis: self.args.get(name) for axis, name in DEGREES.items()}
        counters = {name: self.args.get(name) for name in COUNTERS}
        return {
            **self.facts,
            "parallel": {axis: size for axis, size in degrees.items() if isinstance(size, int)},
            "counters": {name: count for name, count in counters.items() if isinstance(count, int)},
            "vocabulary": {name: rows for name in _ROWS if isinstance(rows := self.args.get(name), int)},
            "arguments": dict(sorted(self.args.items())),
        }


def _steps(settings: object) -> Iterator[Any]:
    """Yield the step of each group in an optimizer's settings; the optimizer may be a chain of several optimizers."""
    if isinstance(settings, dict):
        groups, state = settings.get("param_groups"), settings.get("state")
        if isinstance(groups, list):
            yield from (group.get("step") for group in groups if isinstance(group, dict))
            yield state.get(_COMMON_STEP) if isinstance(state, dict) else None
        else:
            for inner in settings.values():
                yield from _steps(inner)


def _sparse_layers(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers have experts, under each config key that any family uses for this information."""
    layers, frequency = args.get("num_layers"), args.get("moe_layer_freq", 1)
    if not isinstance(layers, int) or not 0 <= layers < 100_000:
        return {}
    if isinstance(frequency, int) and frequency > 0:
        sparse = [layer % frequency == 0 for layer in range(layers)]
    elif isinstance(frequency, list) and len(frequency) == layers:
        sparse = [bool(flag) for flag in frequency]
    else:
        return {}
    dense = [layer for layer, is_sparse in enumerate(sparse) if not is_sparse]
    first = next((layer for layer, is_sparse in enumerate(sparse) if is_sparse), layers)
    config: dict[str, Any] = {
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
        "mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse],
    }
    if dense == list(range(first)):
        config["first_k_dense_replace"] = first
    return config


def _sizes_of_shared_experts(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of the shared experts, as a number of experts or of rows, under each config key that any family
    uses for it.
    """
    rows, expert_rows = args.get("moe_shared_expert_intermediate_size"), args.get("moe_ffn_hidden_size")
    if not isinstance(rows, int) or not isinstance(expert_rows, int) or rows < 1 or expert_rows < 1:
        return {}
    counts = (
        {"n_shared_experts": rows // expert_rows, "num_shared_experts": rows // expert_rows}
        if not rows % expert_rows
        else {}
    )
    return {"shared_expert_intermediate_size": rows, **counts}


def run_state(value: object, number: Callable[[TensorRef], float | None] = lambda _: None) -> RunState:
    """Convert the unpickled state of a run into a `RunState`; values that are not plain data are left out.

    Args:
        value: the unpickled state.
        number: function that returns the value of a tensor without dims as a Python number.
    """
    if isinstance(value, list) and len(value) == 1:
        (value,) = value  # Megatron wraps a sharded object with a single shard in a list
    if not isinstance(value, dict):
        return RunState()
    namespace = value.get("args")
    args = namespace.state if isinstance(namespace, Object) and isinstance(namespace.state, dict) else {}
    facts = {key: item for key, item in value.items() if key != "args"}
    return RunState(plain_data(args, number), plain_data(facts, number))


def plain_data(value: object, number: Callable[[TensorRef], float | None] = lambda _: None) -> Any:
    """Return a value as plain data (numbers, strings, lists, dicts), without dict entries of other types; None if the
    value itself is of another type.

    Args:
        value: the unpickled value.
        number: function that returns the value of a tensor without dims as a Python number.
    """
    return _plain(value, number, _MAX_DEPTH)


def _plain(value: object, number: Callable[[TensorRef], float | None], depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, TensorRef):
        return number(value)
    if depth and isinstance(value, list | tuple):
        items = [_plain(item, number, depth - 1) for item in value]
        has_other = any(found is None and item is not None for found, item in zip(items, value, strict=True))
        return None if has_other else items
    if depth and type(value) is dict:
        pairs = ((str(key), _plain(item, number, depth - 1)) for key, item in value.items())
        return {key: item for key, item in pairs if item is not None}
    return None


_MAX_YAML_DEPTH, _MAX_VALUES = 60, 50_000
"""Maximum nesting depth of a YAML file, and maximum number of values in it; an alias counts as all values of its
anchor."""
_PLAIN = frozenset(f"tag:yaml.org,2002:{word}" for word in ("null", "bool", "int", "float"))
"""YAML tags of plain values that are not strings."""


class UnreadableSettingsError(ValueError):
    """A settings file is not valid YAML, has too many values, or has keys that are not plain data."""


def read_settings(text: str) -> Any:
    """Parse the YAML text of settings into dicts, lists, strings and numbers.

    Raises:
        UnreadableSettingsError: if the text cannot be parsed; the message states the line number.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        return _YamlReader(loader).value(loader.get_single_node(), 0)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UnreadableSettingsError(f"{line}{error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableSettingsError(" ".join(str(error).split())) from None


class _YamlReader:
    """Converts parsed YAML nodes into plain data."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._budget = _MAX_VALUES

    def value(self, node: Any, depth: int) -> Any:
        self._budget -= 1
        if depth > _MAX_YAML_DEPTH or self._budget < 0:
            raise UnreadableSettingsError(f"line {node.start_mark.line + 1}: too many values, or nested too deep")
        if node is None:
            return None
        if node.id == "scalar":
            return self._loader.construct_object(node) if node.tag in _PLAIN else node.value
        if node.id == "sequence":
            return [self.value(each, depth + 1) for each in node.value]
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if key.id != "scalar" or key.value in mapping:
                raise UnreadableSettingsError(f"line {key.start_mark.line + 1}: a key is no text, or is there again")
            mapping[key.value] = self.value(value, depth + 1)
        return mapping


RUN_CONFIG, TRAIN_STATE, LATEST_TRAIN_STATE = "run_config.yaml", "train_state.pt", "latest_train_state.pt"
MODEL_SETTINGS = "context/model.yaml"
_MAX_BYTES = 1 << 20
_SECTIONS, _INNER = ("model", "config"), "transformer"
"""Keys of the model's settings in a YAML file, and the key of the transformer's settings inside these settings."""
_STEP = "step"
_RENAMED = {"num_moe_experts": "num_experts", "hybrid_layer_pattern": "hybrid_override_pattern"}
"""Name of a setting -> Megatron's argument, if the two names differ."""
_TIED, _GROUPS = "share_embeddings_and_output_weights", "num_query_groups"


@dataclass(frozen=True)
class _Settings:
    """The Megatron arguments found in one settings file."""

    file: str
    args: Mapping[str, Any]
    fault: str = ""
    """Reason why the file could not be read; empty if it was read."""


def with_settings_of_run(
    state: RunState, storage: Storage, member: str, number: Callable[[Storage, str, TensorRef], float | None]
) -> tuple[RunState, dict[str, str]]:
    """Add the arguments and counters in settings files to the state of a training run.

    If the state already has any Megatron arguments, no settings file is read.

    Args:
        state: the run's state from the checkpoint itself.
        storage: storage that reads the checkpoint's files.
        member: name of the checkpoint's folder.
        number: function that returns the value of a tensor without dims in a file.

    Returns:
        the completed state, and a dict from each file that cannot be read to the reason.

    Raises:
        Refused: with one of the codes UNSAFE_PICKLE or CORRUPT if a pickled settings file cannot be unpickled safely.
        StorageError: with the code IO if a file cannot be read.
    """
    inside = "" if member == HERE else f"{member}/"
    args = dict(state.args)
    unread_files: dict[str, str] = {}
    for file in settings_files(storage, member):
        if args:
            continue
        settings = _read(storage, file)
        args |= settings.args
        unread_files |= {file: settings.fault} if settings.fault else {}
    facts = dict(state.facts)
    file = f"{inside}{TRAIN_STATE}"
    if _has(storage, file):
        train_state = plain_data(read_saved(storage, file, allowed=NAMES).value, partial(number, storage, file))
        counters = {key: int(value) for key, value in (train_state or {}).items() if isinstance(value, int | float)}
        args |= {key: counters[key] for key in COUNTERS if key in counters}
        facts |= {"iteration": counters[_STEP]} if _STEP in counters and "iteration" not in facts else {}
    return replace(state, args=args, facts=facts), unread_files


def settings_files(storage: Storage, member: str) -> list[str]:
    """Return the names of the settings files that exist in a checkpoint's folder and in the folder above it."""
    inside = "" if member == HERE else f"{member}/"
    above = inside.removesuffix(f"{WEIGHTS}/")
    files = [f"{inside}{RUN_CONFIG}", *([f"{above}{MODEL_SETTINGS}"] if above != inside else [])]
    return [file for file in files if _has(storage, file)]


def _has(storage: Storage, file: str) -> bool:
    folder, _, name = file.rpartition("/")
    above, _, last = folder.rpartition("/")
    if folder and last not in storage.listing(above).folders:
        return False
    return name in storage.listing(folder).names


def _read(storage: Storage, file: str) -> _Settings:
    size = storage.size(file)
    if size > _MAX_BYTES:
        return _Settings(file, {}, f"not read: it has more than {_MAX_BYTES} bytes")
    try:
        settings = read_settings(storage.read(file, 0, size).decode())
    except (UnreadableSettingsError, UnicodeDecodeError, RecursionError) as error:
        return _Settings(file, {}, f"not understood: {error}")
    return _Settings(file, arguments_of(settings))


def arguments_of(settings: object) -> dict[str, Any]:
    """Convert a model's settings from a YAML file into Megatron's arguments."""
    sections = [settings.get(key) for key in _SECTIONS] if isinstance(settings, dict) else []
    model = next((each for each in sections if isinstance(each, dict)), {})
    transformer_settings = model.get(_INNER)
    settings_by_name = {**(transformer_settings if isinstance(transformer_settings, dict) else {}), **model}
    args = {
        _RENAMED.get(key, key): value
        for key, value in plain_data(settings_by_name).items()
        if not isinstance(value, dict) and not key.startswith("_")
    }
    if isinstance(args.get(_TIED), bool):
        args["untie_embeddings_and_output_weights"] = not args[_TIED]
    if _GROUPS in settings_by_name and settings_by_name[_GROUPS] is None:
        args["group_query_attention"] = False
    return args
