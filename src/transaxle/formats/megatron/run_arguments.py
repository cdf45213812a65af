"""The arguments of a Megatron run, wherever a checkpoint keeps them.

**Megatron's arguments**: what a checkpoint says of the model and of the run that wrote it.

They are a pickled `argparse.Namespace` of some eight hundred entries, with members of Megatron's own enums among them.
The interpreter describes these without importing anything; only numbers, texts and lists of them are kept.

Settings that programs write as YAML, read as data.

A tag such as `!!python/object` is passed over, and an alias stands for the value of its anchor.

What Megatron-Bridge and NeMo keep beside a distributed checkpoint in place of Megatron's arguments.

    iter_0000007/run_config.yaml      Megatron-Bridge: `model`, the settings of what makes the model
    iter_0000007/train_state.pt       what the run has read
    CHECKPOINT/context/model.yaml     NeMo 2: `config`, the same settings; the checkpoint itself is CHECKPOINT/weights

The classes that they name are never looked for.
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

_DEEPEST = 8
"""Levels of nested settings at most."""
_OWN_PACKAGES = ("megatron", "nemo", "transformer_engine")
"""Packages whose enums and settings stand among the arguments."""


class _Names(dict[tuple[str, str], GlobalRule]):
    """Names that a state beside the model may use: nothing is imported, Megatron's own are described only."""

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        return super().get(key) or (INERT if key[0].partition(".")[0] in _OWN_PACKAGES else default)


_SIGNALS = ("Signals", "Signals.SIGINT", "Signals.SIGTERM", "Signals.SIGHUP", "Signals.SIGUSR1", "Signals.SIGUSR2")
"""The signal on which a run saves and ends; up to Python 3.11.3, members of an Enum were pickled by name."""
NAMES: Names = _Names({**ALLOWED, **{("signal", name): INERT for name in _SIGNALS}, ("enum", "Enum"): INERT})
"""What the pickle of a run's state may name."""

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
"""Key of a config.json -> Megatron's argument of the same meaning."""
_COMMON_STEP = "common_step"
"""State of torch's own optimizers, which count for each parameter: one number for all."""
DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
}
"""Mesh axis -> argument with its size."""


COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
"""Arguments that count what a run has read."""
_ROWS = ("vocab_size", "padded_vocab_size")


class RunState(msgspec.Struct, frozen=True):
    """What a checkpoint holds beside the model's tensors, as plain data."""

    args: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Megatron's arguments."""
    facts: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Iteration, version, scheduler, optimizer settings."""

    def config(self) -> dict[str, Any]:
        """Return what the arguments say under the keys of a config.json; padding of the vocabulary is not among it."""
        args = self.args
        found = {key: args[name] for key, name in KEYS.items() if args.get(name) is not None}
        if args.get("group_query_attention") is False:
            found["num_key_value_heads"] = args.get("num_attention_heads")
        if not args.get("multi_latent_attention"):
            for key in ("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"):
                found.pop(key, None)
        else:
            found.pop("head_dim", None)  # an argument of other kinds of attention, whatever it says
        untied = args.get("untie_embeddings_and_output_weights")
        if isinstance(untied, bool):
            found["tie_word_embeddings"] = not untied
        if args.get("num_experts"):
            found |= _sparse_layers(args) | _shared_experts(args)
        return {key: value for key, value in found.items() if value is not None}

    def step(self) -> int | None:
        """Return the number of steps that the optimizer has made; None where it is not told, or differs by group."""
        # A group without parameters may not have counted; torch's own optimizers count in floating point.
        steps = {step for step in _steps(self.facts.get("optimizer")) if step is not None}
        (only,) = steps if len(steps) == 1 else (None,)
        if type(only) is float and only.is_integer():
            return int(only)
        return only if type(only) is int else None

    def described(self) -> dict[str, Any]:
        """Return what a container's metadata keep of it: the facts, and what the arguments say of ranks and samples.

        `vocab_size` is what the tokenizer has, `padded_vocab_size` what the embedding has.
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
    """Yield the steps in the settings of an optimizer, which may be a chain of several."""
    if isinstance(settings, dict):
        groups, state = settings.get("param_groups"), settings.get("state")
        if isinstance(groups, list):
            yield from (group.get("step") for group in groups if isinstance(group, dict))
            yield state.get(_COMMON_STEP) if isinstance(state, dict) else None
        else:
            for inner in settings.values():
                yield from _steps(inner)


def _sparse_layers(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers have experts, under the keys that families ask for."""
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
    found: dict[str, Any] = {
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
        "mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse],
    }
    if dense == list(range(first)):
        found["first_k_dense_replace"] = first
    return found


def _shared_experts(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of experts that every token passes, which families count in experts, or in rows."""
    rows, of_one = args.get("moe_shared_expert_intermediate_size"), args.get("moe_ffn_hidden_size")
    if not isinstance(rows, int) or not isinstance(of_one, int) or rows < 1 or of_one < 1:
        return {}
    counted = {"n_shared_experts": rows // of_one, "num_shared_experts": rows // of_one} if not rows % of_one else {}
    return {"shared_expert_intermediate_size": rows, **counted}


def run_state(value: object, number: Callable[[TensorRef], float | None] = lambda _: None) -> RunState:
    """Read the state beside the model, as the interpreter describes it; what is not plain data is left out.

    Args:
        value: the state.
        number: returns the value of a tensor without dims.
    """
    if isinstance(value, list) and len(value) == 1:
        (value,) = value  # a sharded object of one part
    if not isinstance(value, dict):
        return RunState()
    namespace = value.get("args")
    args = namespace.state if isinstance(namespace, Object) and isinstance(namespace.state, dict) else {}
    facts = {key: item for key, item in value.items() if key != "args"}
    return RunState(plain_data(args, number), plain_data(facts, number))


def plain_data(value: object, number: Callable[[TensorRef], float | None] = lambda _: None) -> Any:
    """Return plain data, without the items of dicts that are none; None for anything else.

    Args:
        value: as the interpreter describes it.
        number: returns the value of a tensor without dims.
    """
    return _plain(value, number, _DEEPEST)


def _plain(value: object, number: Callable[[TensorRef], float | None], depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, TensorRef):
        return number(value)
    if depth and isinstance(value, list | tuple):
        items = [_plain(item, number, depth - 1) for item in value]
        odd = any(found is None and item is not None for found, item in zip(items, value, strict=True))
        return None if odd else items
    if depth and type(value) is dict:
        pairs = ((str(key), _plain(item, number, depth - 1)) for key, item in value.items())
        return {key: item for key, item in pairs if item is not None}
    return None


_DEEPEST_TEXT, _MOST = 60, 50_000
"""Levels, and values, an alias counted as what it stands for."""
_PLAIN = frozenset(f"tag:yaml.org,2002:{word}" for word in ("null", "bool", "int", "float"))
"""Tags of what is no text."""


class NotUnderstood(ValueError):
    """A text is not YAML, or of no use as settings."""


def read_settings(text: str) -> Any:
    """Return what a text says, as dicts, lists, texts and numbers.

    Raises:
        NotUnderstood: with the number of the line.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        return _Reading(loader).value(loader.get_single_node(), 0)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise NotUnderstood(f"{line}{error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise NotUnderstood(" ".join(str(error).split())) from None


class _Reading:
    """Makes data of parsed nodes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._left = _MOST

    def value(self, node: Any, depth: int) -> Any:
        self._left -= 1
        if depth > _DEEPEST_TEXT or self._left < 0:
            raise NotUnderstood(f"line {node.start_mark.line + 1}: too many values, or nested too deep")
        if node is None:
            return None
        if node.id == "scalar":
            return self._loader.construct_object(node) if node.tag in _PLAIN else node.value
        if node.id == "sequence":
            return [self.value(each, depth + 1) for each in node.value]
        found: dict[str, Any] = {}
        for key, value in node.value:
            if key.id != "scalar" or key.value in found:
                raise NotUnderstood(f"line {key.start_mark.line + 1}: a key is no text, or is there again")
            found[key.value] = self.value(value, depth + 1)
        return found


RUN_CONFIG, TRAIN_STATE, LATEST_TRAIN_STATE = "run_config.yaml", "train_state.pt", "latest_train_state.pt"
MODEL_SETTINGS = "context/model.yaml"
_LONGEST = 1 << 20
_SECTIONS, _INNER = ("model", "config"), "transformer"
"""Keys below which the settings of a model are, and below these those that Megatron calls a transformer's."""
_STEP = "step"
_NAMED = {"num_moe_experts": "num_experts", "hybrid_layer_pattern": "hybrid_override_pattern"}
"""Setting -> Megatron's argument, where it has another name."""
_SHARED, _GROUPS = "share_embeddings_and_output_weights", "num_query_groups"


@dataclass(frozen=True)
class _Settings:
    """A file of settings."""

    file: str
    args: Mapping[str, Any]
    fault: str = ""
    """Why it was not read."""


def with_settings_of_run(
    state: RunState, storage: Storage, member: str, number: Callable[[Storage, str, TensorRef], float | None]
) -> tuple[RunState, dict[str, str]]:
    """Return the state of a run with what settings beside it say, and files that were not understood, with the reason.

    Megatron's own arguments are preferred.

    Args:
        state: from the checkpoint itself.
        storage: where the files are.
        member: the folder of the checkpoint in it.
        number: returns the value of a tensor without dims, of a file.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT.
        StorageError: IO.
    """
    inside = "" if member == HERE else f"{member}/"
    args = dict(state.args)
    left: dict[str, str] = {}
    for file in settings_files(storage, member):
        if args:
            continue
        found = _read(storage, file)
        args |= found.args
        left |= {file: found.fault} if found.fault else {}
    facts = dict(state.facts)
    file = f"{inside}{TRAIN_STATE}"
    if _has(storage, file):
        read = plain_data(read_saved(storage, file, allowed=NAMES).value, partial(number, storage, file))
        counted = {key: int(value) for key, value in (read or {}).items() if isinstance(value, int | float)}
        args |= {key: counted[key] for key in COUNTERS if key in counted}
        facts |= {"iteration": counted[_STEP]} if _STEP in counted and "iteration" not in facts else {}
    return replace(state, args=args, facts=facts), left


def settings_files(storage: Storage, member: str) -> list[str]:
    """Return the files with the settings of a run that are there, beside a checkpoint and above it."""
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
    if size > _LONGEST:
        return _Settings(file, {}, f"not read: it has more than {_LONGEST} bytes")
    try:
        settings = read_settings(storage.read(file, 0, size).decode())
    except (NotUnderstood, UnicodeDecodeError, RecursionError) as error:
        return _Settings(file, {}, f"not understood: {error}")
    return _Settings(file, arguments_of(settings))


def arguments_of(settings: object) -> dict[str, Any]:
    """Return Megatron's arguments for the settings of a model."""
    sections = [settings.get(key) for key in _SECTIONS] if isinstance(settings, dict) else []
    model = next((each for each in sections if isinstance(each, dict)), {})
    inner = model.get(_INNER)
    known = {**(inner if isinstance(inner, dict) else {}), **model}
    args = {
        _NAMED.get(key, key): value
        for key, value in plain_data(known).items()
        if not isinstance(value, dict) and not key.startswith("_")
    }
    if isinstance(args.get(_SHARED), bool):
        args["untie_embeddings_and_output_weights"] = not args[_SHARED]
    if _GROUPS in known and known[_GROUPS] is None:
        args["group_query_attention"] = False
    return args
