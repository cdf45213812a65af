"""Stand-ins for the modules that Moonshot publishes with Kimi K2.5, `modeling_kimi_k25.py`: their parameters.

Megatron-Bridge builds the picture tower and the projector from the maker's own code in the folder of a model. Nothing
can be computed with these.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class VisionTowerConfig:
    """Sizes of the tower."""

    def __init__(self, sizes: Any) -> None:
        self.sizes = sizes


class ProjectorConfig(VisionTowerConfig):
    """Sizes of the projector."""


class _Positions(nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(sizes.init_pos_emb_height, sizes.init_pos_emb_width, sizes.vt_hidden_size)
        )


class _Patches(nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, sizes.vt_hidden_size, sizes.patch_size, sizes.patch_size)
        self.pos_emb = _Positions(sizes)


class _FeedForward(nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.fc0 = nn.Linear(sizes.vt_hidden_size, sizes.vt_intermediate_size)
        self.fc1 = nn.Linear(sizes.vt_intermediate_size, sizes.vt_hidden_size)


class _Block(nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        width = sizes.vt_hidden_size
        self.norm0, self.norm1 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wqkv, self.wo = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = _FeedForward(sizes)


class MoonViT3dEncoder(nn.Module):
    """Blocks of the tower."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.vt_num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(sizes.vt_hidden_size)


class MoonViT3dPretrainedModel(nn.Module):
    """The tower."""

    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        self.patch_embed = _Patches(config.sizes)
        self.encoder = MoonViT3dEncoder(config.sizes)


class PatchMergerMLP(nn.Module):
    """The projector."""

    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__()
        sizes = config.sizes
        height, width = sizes.merge_kernel_size
        merged = sizes.mm_hidden_size * height * width
        self.pre_norm = nn.LayerNorm(sizes.mm_hidden_size)
        self.proj = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, sizes.text_hidden_size))


def install() -> None:
    """Let Megatron-Bridge find these in place of the maker's code, and the sizes in the path of the model.

    Its bridge to Kimi K2.5 also exports models of which there are no files yet, as all its other bridges do.
    """
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.bridge.models.hf_pretrained import safe_config_loader
    from megatron.bridge.models.kimi_vl import kimi_k25_vl_bridge, modeling_kimi_k25_vl

    def get_class(name: str, *_: Any, **__: Any) -> Any:
        return globals()[name.rpartition(".")[2]]

    def load_config(path: str, **_: Any) -> Any:
        return SimpleNamespace(vision_config=SimpleNamespace(**json.loads(path)))

    bridge = kimi_k25_vl_bridge.KimiK25VLBridge
    build = bridge.build_conversion_tasks

    def build_tasks(self: Any, source: Any, *words: Any, **settings: Any) -> Any:
        build_any = build if hasattr(source, "state") else MegatronModelBridge.build_conversion_tasks
        return build_any(self, source, *words, **settings)

    bridge.build_conversion_tasks = build_tasks
    modeling_kimi_k25_vl.get_class_from_dynamic_module = get_class
    safe_config_loader.safe_load_config_with_retry = load_config
