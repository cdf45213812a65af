"""Models that hear."""

from __future__ import annotations

from typing import Any

from tests.oracles.vllm_peer.model import Config, Model, model

_EARS = {
    "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "num_mel_bins": 16,
    "max_source_positions": 12,
}  # fmt: skip


_TWICE = {"language_model.model.model.": "language_model.model."}
"""transformers 5.19 stores the text model under this name, 5.23 does not."""


_VOICE: Config = {
    "model_type": "voxtral_encoder", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_mel_bins": 16, "max_source_positions": 12,
}  # fmt: skip


def heard(architecture: str, model_type: str, text: str, *parts: Config, audio: Config, **config: Any) -> Model:
    """A model of text and sound."""
    inner = model(architecture, text, *parts).config
    whole = {"model_type": model_type, **config, "text_config": inner, "audio_config": audio}
    return Model(architecture, whole, kind=architecture, mended=_TWICE)


def _voxtral() -> Model:
    """Voxtral; what its makers' config has besides, stands in the parts."""
    made = heard("VoxtralForConditionalGeneration", "voxtral", "mistral", audio=_VOICE).config
    more = {
        "text_config": {**made["text_config"], "architectures": ["MistralForCausalLM"]},
        "audio_config": {
            **_VOICE, "downsample_factor": 4, "window_size": 400, "sampling_rate": 16000, "hop_length": 160,
            "global_log_mel_max": 1.5, "is_encoder_decoder": False,
        },
    }  # fmt: skip
    architecture = "VoxtralForConditionalGeneration"
    return Model(architecture, made, more, kind=architecture, mended=_TWICE, mistral=True, left="embed_positions")


def _cohere_asr() -> Model:
    """Cohere's transcriber; its makers' config says the same in other words."""
    ears = {
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 96,
        "conv_kernel_size": 5, "subsampling_conv_channels": 14, "num_mel_bins": 16, "max_position_embeddings": 40,
    }  # fmt: skip
    config = {
        "model_type": "cohere_asr", "vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 8, "intermediate_size": 80, "max_position_embeddings": 70, "encoder_config": ears,
    }  # fmt: skip
    more = {
        "encoder": {
            "feat_in": 16, "n_layers": 2, "d_model": 48, "feat_out": -1, "causal_downsampling": False,
            "subsampling": "dw_striding", "subsampling_factor": 8, "subsampling_conv_channels": 14,
            "ff_expansion_factor": 2, "self_attention_model": "rel_pos", "n_heads": 8, "att_context_size": [-1, -1],
            "xscaling": False, "untie_biases": True, "pos_emb_max_len": 40, "conv_kernel_size": 5,
            "conv_norm_type": "batch_norm", "conv_context_size": None,
        },
        "transf_decoder": {
            "config_dict": {
                "hidden_size": 64, "inner_size": 80, "num_attention_heads": 8, "num_layers": 3, "hidden_act": "relu",
                "max_sequence_length": 70,
            },
        },
        "head": {"num_classes": 90, "hidden_size": 64},
        "preprocessor": {"sample_rate": 16000, "window_stride": 0.01},
    }  # fmt: skip
    kind = "CohereAsrForConditionalGeneration"
    return Model(kind, config, more, kind=kind, renamed={"model.": ""})


SOUND = {
    "whisper": Model(
        "WhisperForConditionalGeneration",
        {
            "model_type": "whisper", **_EARS, "decoder_layers": 3, "decoder_attention_heads": 8, "decoder_ffn_dim": 80,
            "max_target_positions": 64, "vocab_size": 90, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        kind="WhisperForConditionalGeneration",
    ),
    "qwen2_audio": heard(
        "Qwen2AudioForConditionalGeneration", "qwen2_audio", "qwen2", {"head_dim": None},
        audio={"model_type": "qwen2_audio_encoder", **_EARS},
    ),
    "audioflamingo3": heard(
        "AudioFlamingo3ForConditionalGeneration", "audioflamingo3", "qwen2", {"head_dim": None},
        audio={"model_type": "audioflamingo3_encoder", **_EARS},
    ),
    "glmasr": heard(
        "GlmAsrForConditionalGeneration", "glmasr", "llama", {"head_dim": None}, tie_word_embeddings=False,
        audio={
            "model_type": "glmasr_encoder", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 2, "num_mel_bins": 16,
        },
    ),
    "voxtral": _voxtral(),
    "cohere_asr": _cohere_asr(),
    "granite_speech": Model(
        "GraniteSpeechForConditionalGeneration",
        {
            "model_type": "granite_speech", "has_lora_adapter": False, "downsample_rate": 5, "window_size": 15,
            "tie_word_embeddings": False,
            "text_config": model("GraniteForCausalLM", "granite", {"head_dim": None}).config,
            "encoder_config": {
                "model_type": "granite_speech_encoder", "input_dim": 20, "num_layers": 2, "hidden_dim": 64,
                "feedforward_mult": 3, "num_heads": 4, "dim_head": 12, "output_dim": 44, "context_size": 6,
                "max_pos_emb": 8, "conv_kernel_size": 5, "conv_expansion_factor": 2,
            },
            "projector_config": {
                "model_type": "blip_2_qformer", "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2,
                "num_attention_heads": 4, "encoder_hidden_size": 64, "vocab_size": 30, "max_position_embeddings": 16,
            },
        },
        kind="GraniteSpeechForConditionalGeneration",
        mended=_TWICE,
    ),
}  # fmt: skip
