"""Megatron's arguments: what a checkpoint says of the model and of the run that wrote it.

They are a pickled `argparse.Namespace` of some eight hundred entries, with members of Megatron's own enums among them.
The interpreter describes these without importing anything; only numbers, texts and lists of them are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from transaxle.formats.pickled.allowed import ALLOWED, INERT, GlobalRule, Names
from transaxle.formats.pickled.descriptors import Object, TensorRef

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
