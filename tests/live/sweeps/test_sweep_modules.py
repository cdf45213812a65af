"""Every kind of module is loaded exactly, or refused: a sample of the sweep here, all of it in `make oracle`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.live import tiny
from tests.live.ranks import run
from tests.live.sweeps.sweep import EXACT, WRAPPED, Make, outcome
from tests.live.titan import LACKING, titans
from tests.oracles.quiet import quiet
from transaxle.errors import TransaxleError
from transaxle.live.model.state_tensors import leaves


@pytest.mark.oracle
@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_and_parametrizations(name: str) -> None:
    with quiet():
        assert outcome(WRAPPED[name]) == EXACT


@pytest.mark.parametrize("make", [nn.LazyLinear, nn.LazyBatchNorm1d])
def test_layers_without_sizes_are_refused(make: Any) -> None:
    with pytest.raises(TransaxleError, match="Run the model once"):
        leaves(make(2) if make is nn.LazyLinear else make())


# Wrappers that need a process group: each is loaded exactly, or refused; part of the sweep.


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _sharded() -> nn.Module:
    model = _net()
    mesh = init_device_mesh("cpu", (1,))
    for module in (model[0], model):  # type: ignore[index]
        fully_shard(module, mesh=mesh)
    return model


def _accelerated() -> nn.Module:
    from accelerate import Accelerator

    model: nn.Module = Accelerator(cpu=True).prepare(_net())
    return model


def _experts() -> nn.Module:
    from deepspeed.moe.layer import MoE

    model: nn.Module = MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=1)
    return model


WRAPPERS: dict[str, Make] = {
    "DDP": lambda: DistributedDataParallel(_net()),
    "DDP inside": lambda: nn.ModuleDict({"one": DistributedDataParallel(_net())}),
    "compile of DDP": lambda: torch.compile(DistributedDataParallel(_net())),  # type: ignore[dict-item,return-value]
    "DDP of compile": lambda: DistributedDataParallel(torch.compile(_net())),
    "fully_shard": _sharded,
    "accelerate": _accelerated,
    "deepspeed MoE": _experts,
}


def _outcome(rank: int, world: int, name: str) -> Any:
    with quiet():
        return outcome(WRAPPERS[name])


@pytest.mark.oracle
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_of_a_process_group(name: str) -> None:
    assert run(1, _outcome, name) == [EXACT]


# Every model type of transformers and torchtitan is loaded exactly from other values, or refused: part of the sweep.

SAMPLE = {
    "gemma3_text": "tied embeddings",
    "qwen3_vl": "a wrapper with prefixes",
    "qwen3_moe": "packed experts",
    "falcon_h1": "state spaces beside attention",
}
_LARGE = """
    pix2struct_text_model align align_vision_model apertus1p5
    apertus1p5_vision_tokenizer bark bit blt bridgetower bridgetower_vision_model chameleon_vqgan
    chmv2 clap clap_audio_model cvt dac deepseek_ocr2_sam_vision_model deepseek_ocr2_vision deepseek_vl_hybrid
    depth_pro dia dia_decoder dinov3_convnext donut-swin dots3_note dots3_note_audio_encoder
    dots3_note_vision_encoder edgetam_video efficientloftr efficientnet emu3_vqgan encodec ernie4_5_vl_moe
    ernie4_5_vl_moe_text esmfold2 fastspeech2_conformer fastspeech2_conformer_hifigan
    fastspeech2_conformer_with_hifigan florence2 florence_vision gemma4 gemma4_text gemma4_unified_assistant
    hgnet_v2 inkling2 inkling2_loop
    inkling2_vision janus janus_vqgan levit luke mask2former maskformer maskformer-swin mimi mimi_decoder
    mimi_encoder muse_spark muse_spark_audio musicgen musicgen_melody neucodec omdet-turbo pe_audio pe_audio_encoder
    perceiver phi4_multimodal phi4_multimodal_audio pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder
    poolformer pp_formulanet pp_formulanet_vision pvt qwen2_5_omni_bigvgan qwen2_5_omni_token2wav recurrent_gemma
    regnet resnet roc_bert rt_detr_resnet sam2 sam2_hiera_det_model sam2_video sam2_vision_model sam3_tracker_video
    sam3_video speecht5_hifigan swin2sr swinv2 textnet tipsv2_dpt tvp univnet unlimited_ocr
    unlimited_ocr_sam_vision_model unlimited_ocr_vision upernet uvdoc uvdoc_backbone vibevoice
    vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder
    vibevoice_asr wavtokenizer wavtokenizer_encoder vitpose vitpose_backbone vits vjepa2 xcodec xcodec2 zoedepth
"""
_OTHER = """
    autoformer blip_text_model chameleon cohere_compass cohere_compass_text dbrx deepseek_ocr2 deepseek_ocr2_text
    diffusion_gemma diffusion_gemma_text dinat edgetam edgetam_mask_decoder edgetam_prompt_encoder
    edgetam_video_mask_decoder edgetam_video_prompt_encoder edgetam_vision_model emu3 eomt eomt_dinov3 esm fast_vlm
    exaone gemma3n gemma3n_vision gemma4_assistant gemma4_unified_audio gemma4_unified_vision sarvam_mla sarvam_moe
    glmga granite4_vision higgs_audio_v2_tokenizer idefics_perciever idefics_vision informer internlm3 iquestcoder
    layoutlmv2 layoutxlm lfm2_moe moonshine_streaming nougat pe_audio_video pe_audio_video_encoder pe_video
    pe_video_encoder perception_lm pp_chart2table pp_chart2table_vision pp_ocrv5_server_det pp_ocrv6_medium_det
    qwen3_omni_moe_talker_text sam2_mask_decoder sam2_prompt_encoder sam2_video_mask_decoder
    sam2_video_prompt_encoder sam3_geometry_encoder sam3_lite_text_geometry_encoder sam3_tracker_mask_decoder
    sam3_tracker_prompt_encoder sam3_tracker_video_mask_decoder sam3_tracker_video_prompt_encoder
    sam_hq_mask_decoder sam_hq_prompt_encoder sam_mask_decoder sam_prompt_encoder sapiens2_head t5_gemma_module
    t5gemma2_decoder t5gemma2_encoder t5gemma2_text time_series_transformer timm_backbone timm_wrapper
    vibevoice_diffusion videomt vitmatte
"""
NOT_BUILT = {**dict.fromkeys(_LARGE.split(), "large"), **dict.fromkeys(_OTHER.split(), "other")}
"""Model type -> why no tiny one is built: sizes that stay large, or sizes or a library that do not let it be built."""
SHARES = 16
"""Into how many tests the types are divided, for several processes."""
TITANS = ["deepseek_v3 debugmodel", "llama3 debugmodel separate", "qwen3 debugmodel_moe fused"]
FAMILIES = {"deepseek_v3", "flux", "gpt_oss", "kimi_k2_7", "llama3", "muse_glimmer", "qwen3"}


@pytest.mark.parametrize("model_type", SAMPLE)
def test_some_models_of_transformers(model_type: str) -> None:
    with quiet():
        make = tiny.builder(model_type)
        assert not isinstance(make, str)
        assert outcome(make) == EXACT


@pytest.mark.oracle
@pytest.mark.parametrize("share", range(SHARES))
def test_all_models_of_transformers(share: int) -> None:
    mine, wrong = tiny.types()[share::SHARES], []
    for model_type in mine:
        with quiet():
            make = tiny.builder(model_type)
            expected = NOT_BUILT.get(model_type, EXACT)
            try:
                found = make if isinstance(make, str) else outcome(make)
            except AssertionError as error:
                found = f"silently different: {error}"
        if found not in (expected, EXACT):  # a type that becomes small enough to be built is no fault
            wrong.append(f"{model_type}: {found}, not {expected}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", TITANS)
def test_some_models_of_torchtitan(name: str) -> None:
    with quiet():
        assert outcome(titans()[name]) == EXACT


@pytest.mark.oracle
def test_all_models_of_torchtitan() -> None:
    with quiet():
        models = titans()
        found = {name: outcome(make) for name, make in models.items()}
    assert set(found.values()) == {EXACT}, found
    assert {name.split()[0] for name in models} == FAMILIES
    assert all(name.replace(" fused", " separate") in models for name in models)
    assert sum(name.endswith(" separate") for name in models) > len(FAMILIES) // 2


@pytest.mark.oracle
@pytest.mark.parametrize("family", LACKING)
def test_a_family_of_torchtitan_that_is_left_out_cannot_be_imported(family: str) -> None:
    import importlib

    with quiet(), pytest.raises(ImportError, match=LACKING[family]):
        importlib.import_module(f"torchtitan.models.{family}")
