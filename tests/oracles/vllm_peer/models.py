"""The models that vLLM loads, by the name of their tests."""

from __future__ import annotations

from dataclasses import replace

from tests.oracles.vllm_peer.embeddings import EMBEDDINGS
from tests.oracles.vllm_peer.model import Config, Model
from tests.oracles.vllm_peer.pictures import PICTURES
from tests.oracles.vllm_peer.remote_code import REMOTE_CODE
from tests.oracles.vllm_peer.remote_pictures import REMOTE_PICTURES
from tests.oracles.vllm_peer.sound import SOUND
from tests.oracles.vllm_peer.text import TEXT

MODELS = TEXT | REMOTE_CODE | PICTURES | REMOTE_PICTURES | SOUND | EMBEDDINGS

_CHANGES = {
    "tied": ("tie_word_embeddings",),
    "biased": ("attention_bias", "mlp_bias", "qkv_bias", "use_qkv_bias", "use_bias", "add_bias", "bias", "attn_bias"),
}


def model_named(name: str) -> Model:
    """Return a model; `NAME+tied` and `NAME+biased` are that model with a tied head, or with all biases that its config
    can switch on.
    """
    base, _, change = name.partition("+")
    model = MODELS[base]
    if not change:
        return model
    changes: Config = dict.fromkeys(_CHANGES[change], True)
    config = {**model.config, **changes}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **changes}
    return replace(model, config=config, most=1)
