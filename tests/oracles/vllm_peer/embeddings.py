"""Models whose output is embeddings of a text, of a picture, or of each token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.oracles.vllm_peer.model import Config, Model, model
from tests.oracles.vllm_peer.pictures import PICTURES
from tests.oracles.vllm_peer.text import ALL_HEADS

_ENCODER: Config = {**ALL_HEADS, "max_position_embeddings": 70}


def encoder(architecture: str, model_type: str, *, more: Config | None = None, **config: Any) -> Model:
    """A model that reads a whole text at once."""
    made = model(architecture, model_type, _ENCODER, **config)
    return Model(architecture, made.config, more or {}, kind=architecture)


def _towers(architecture: str, model_type: str, unread: tuple[str, ...], text: Config, **config: Any) -> Model:
    """A tower for texts and one for pictures."""
    both = {"num_hidden_layers": 2, "intermediate_size": 96}
    seen = {**both, "hidden_size": 64, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    read = {
        **both, "hidden_size": 48, "num_attention_heads": 8, "max_position_embeddings": 70, "vocab_size": 90,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **text,
    }  # fmt: skip
    whole = {"model_type": model_type, "text_config": read, "vision_config": seen, **config}
    return Model(architecture, whole, kind=architecture, unread=unread)


def _colpali() -> Model:
    """ColPali: PaliGemma, and what its config says of it, in a part."""
    inner = dict(PICTURES["paligemma"].config)
    inner |= {"tie_word_embeddings": True, "hidden_size": 128}
    inner["vision_config"] = {**inner["vision_config"], "vision_use_head": False}
    config = {"model_type": "colpali", "vlm_config": inner, "embedding_dim": 40}
    renamed = {"vlm.vision_tower.": "vlm.vision_tower.vision_model."}
    kind = "ColPaliForRetrieval"
    return Model(kind, config, kind=kind, renamed=renamed, unread=("embedding_proj_layer.bias",))


_POOLER = ("pooler.",)
_NOMIC = {
    "activation_function": "swiglu", "position_embedding_type": "rope", "mlp_fc1_bias": False, "mlp_fc2_bias": False,
    "qkv_proj_bias": False, "rotary_emb_scale_base": None, "rotary_emb_interleaved": False,
    "layer_norm_epsilon": 1e-12, "n_inner": 96, "n_embd": 128, "n_layer": 2,
}  # fmt: skip
_PLACES = {"position_embedding_type": "absolute"}

EMBEDDINGS = {
    "bert": replace(encoder("BertModel", "bert"), spared=_POOLER),
    "bert-head": replace(encoder("BertForMaskedLM", "bert"), unread=("decoder.bias",)),
    "bert-tied": replace(encoder("BertForMaskedLM", "bert", tie_word_embeddings=True), most=1),
    "roberta": replace(encoder("RobertaModel", "roberta"), spared=_POOLER),
    "roberta-head": replace(encoder("RobertaForMaskedLM", "roberta", tie_word_embeddings=True), spared=("lm_head.",)),
    "xlm-roberta": replace(encoder("XLMRobertaModel", "xlm-roberta", more=_PLACES), spared=_POOLER),
    "modernbert": encoder("ModernBertModel", "modernbert", classifier_pooling="mean"),
    "modernbert-biases": encoder("ModernBertModel", "modernbert", norm_bias=True, attention_bias=True, mlp_bias=True),
    "nomic_bert": encoder("NomicBertModel", "nomic_bert", more=_NOMIC),
    "gte": encoder("GteModel", "gte", more={"position_embedding_type": "rope"}),
    "siglip": _towers("SiglipModel", "siglip", ("logit_",), {"projection_size": 40}),
    "clip": _towers("CLIPModel", "clip", ("logit_scale",), {}, projection_dim=40),
    "colpali": _colpali(),
}
