"""torchtitan 0.3 as its users run it: registered models, its optimizer with its hooks, its checkpoint manager.

Two things differ. Models are smaller: every size of a registered configuration is divided, and nothing else is changed.
And what needs a GPU is computed in plain torch, in single precision: attention by its own mask, and experts, which
torchtitan rounds to bf16 on the way.
"""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, if not marked so
from torch.distributed.fsdp import fully_shard

from tests.journeys.plain_fla import plain_fla
from tests.live.titan import shrink
from tests.oracles.quiet import quiet

STEPS = 3
PICTURES = "flux"
"""The one package whose models make pictures of texts, and have no logits."""
BIAS = "expert_bias_E"
COUNTS = "tokens_per_expert_E"
_LENGTH, _MOST_EXPERTS, _TOKENS = 12, 16, 256
_WORDS = 8
"""The first token that stands for nothing else than itself, such as for a picture."""
_LEAST, _LEAST_OF_HEAD, _STRIDE = 24, 4, 4
_FACTORS = [
    (heads, width)
    for total in range(8, -1, -1)
    for heads in (4, 8, 16, 2, 1)
    for width in (16, 8, 4, 2, 1)
    if heads * width == 2**total
]

# What a size is divided by. Numbers of heads and widths of one are divided by less than what is a product of both.
_HEADS = frozenset({"n_heads", "n_kv_heads"})
_PER_HEAD = frozenset({
    "head_dim", "key_head_dim", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim",
    "v_head_dim", "value_head_dim",
})  # fmt: skip
_WIDTHS = frozenset({
    "dim", "embedding_dim", "groups", "hidden_dim", "in_channels", "in_features", "out_channels", "normalized_shape",
    "out_features",
})  # fmt: skip
_WITHIN = {
    ("rope", "dim"), ("q_norm", "dim"), ("k_norm", "dim"), ("delta_net norm", "dim"), ("qk_norm", "normalized_shape"),
    ("q_norm", "normalized_shape"), ("kv_norm", "normalized_shape"), ("wkv_a", "out_features"),
    ("wkv_b", "in_features"), ("wq_a", "out_features"), ("wq_b", "in_features"),
}  # fmt: skip
"""Fields, each after the one that its part is in, that are widths of heads all the same."""
_BY_HEAD = {("in_proj_a", "out_features"), ("in_proj_b", "out_features")}
"""Fields that are numbers of heads."""
_VOCABULARY = {"num_embeddings", "vocab_size", ("lm_head", "out_features")}
_TOWER = {
    "dim": 32, "latent_dim": 32, "ffn_dim": 64, "mlp_ratio": 2.0, "num_layers": 2, "num_heads": 4, "patch_size": 2,
    "init_pos_emb_height": 4, "init_pos_emb_width": 4, "pos_emb_grid_h": 4, "pos_emb_grid_w": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
_BUILDERS = {
    "_vision_encoder_config": _TOWER,
    "muse_glimmer_vision_encoder_config": _TOWER,
    "_qwen35_vision_encoder_config": _TOWER,
}
"""Builders of towers for pictures, which have sizes of their own -> other sizes."""
_PICTURES = ("vision_encoder", "vision_adapter", "vision_projection")
_ADAPTED = 4096
"""Width of what an adapter of pictures gives."""
_COUNTED = {("gate", "out_features")}
"""The same for numbers of experts."""


def flavours() -> list[str]:
    """Names of all that torchtitan registers, as `package flavour`."""
    pairs = []
    for package in packages():
        tables = [table for name, table in vars(_module(package)).items() if name.endswith("_configs")]
        (table,) = (table for table in tables if type(table) is dict)
        pairs += [f"{package} {flavour}" for flavour in table]
    return pairs


def packages() -> list[str]:
    """torchtitan's packages with a registry of models."""
    with quiet():
        import torchtitan.models

    return [
        info.name for info in pkgutil.iter_modules(torchtitan.models.__path__) if info.ispkg and info.name != "common"
    ]


def _module(package: str) -> Any:
    with quiet(), plain_fla():
        return importlib.import_module(f"torchtitan.models.{package}")


def specification(name: str, **options: Any) -> Any:
    """What torchtitan's registry gives for `package flavour`, in smaller sizes."""
    package, _, flavour = name.partition(" ")
    with quiet():
        module = _module(package)
        if package == "gpt_oss":
            options["attn_backend"] = "flex"  # its default has no plain form: kernels in bf16
        with ExitStack() as stack:
            for builder, sizes in _BUILDERS.items():
                if hasattr(module, builder):
                    stack.enter_context(patch.object(module, builder, _with(getattr(module, builder), sizes)))
            made = module.model_registry(flavour, **options)
    if package == PICTURES:
        shrink(made.model, set())
        return made
    for by_heads, by_width in _FACTORS:
        smaller = deepcopy(made.model)
        with suppress(ValueError):
            _Smaller(smaller.dim, by_heads, by_width).part(smaller, "")
            if not _divides(made.model) or _divides(smaller):
                return replace(made, model=smaller)
    raise AssertionError(f"no smaller sizes for {name}")


def _with(builder: Callable[..., Any], sizes: Mapping[str, Any]) -> Callable[..., Any]:
    """A builder of parts, with other sizes than it is given."""
    takes = signature(builder).parameters

    def build(**given: Any) -> Any:
        return builder(**given | {name: value for name, value in sizes.items() if name in takes})

    return build


def _divides(model: Any) -> bool:
    """Tell whether the width is a multiple of the heads, which some classes of transformers insist on."""
    return bool(model.dim % model.first_attention.n_heads == 0)


@dataclass
class _Smaller:
    """Makes every size of a configuration smaller, in parts that are shared once; a ValueError where one cannot be."""

    dim: int
    """Width of the text as it is registered."""
    by_heads: int
    by_width: int
    done: set[int] = field(default_factory=set)

    def part(self, part: Any, within: str, *, pictures: bool = False) -> None:
        """Change a part, and those in it: those for pictures only where they meet the text."""
        if id(part) in self.done:
            return
        self.done.add(id(part))
        for each in part if isinstance(part, list) else ():
            self.part(each, within, pictures=pictures)
        for each in fields(part) if is_dataclass(part) else ():
            value = getattr(part, each.name)
            if each.name in {"layers", "mtp_layers"} and not pictures:
                value = value[:1] + value[1:][-1:]  # dense and sparse, sliding and whole
            if type(value) is int:
                value = self._of_pictures(value) if pictures else self._of_text(value, within, each.name)
            if each.name == "mrope_section":
                third = part.dim // 6
                value = [part.dim // 2 - 2 * third, third, third]
            object.__setattr__(part, each.name, value)
            inner = f"{within} norm" if (within, each.name) == ("delta_net", "norm") else each.name
            self.part(value, inner, pictures=pictures or each.name in _PICTURES)

    def _of_pictures(self, value: int) -> int:
        return value // self.by_heads // self.by_width if value in (self.dim, _ADAPTED) else value

    def _of_text(self, value: int, within: str, name: str) -> int:
        if name == "num_experts" or (within, name) in _COUNTED:
            return min(value, _MOST_EXPERTS)
        if name in _VOCABULARY or (within, name) in _VOCABULARY:
            return _TOKENS
        by = _divisor(within, name, self.by_heads, self.by_width)
        if value <= 1 or by == 1:
            return value
        heads = name in _HEADS or (within, name) in _BY_HEAD
        least = 1 if heads else _LEAST_OF_HEAD if by == self.by_width else _LEAST
        if value % by or value // by < min(least, value) or (not heads and value // by % _STRIDE):
            raise ValueError
        return value // by


def _divisor(within: str, name: str, by_heads: int, by_width: int) -> int:
    if name in _HEADS or (within, name) in _BY_HEAD:
        return by_heads
    if name in _PER_HEAD or (within, name) in _WITHIN:
        return by_width
    return by_heads * by_width if name in _WIDTHS else 1


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, scale: float | None, **options: Any
) -> tuple[torch.Tensor, Any]:
    """What flex attention computes, of queries, keys and values by head."""
    assert options["score_mod"] is None
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    batch, length = torch.arange(q.shape[0])[:, None, None], torch.arange(q.shape[2])
    seen = block_mask.mask_mod(batch, torch.tensor(0), length[None, :, None], length[None, None, :])
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    return scores.softmax(-1) @ v, SimpleNamespace(lse=scores.logsumexp(-1))


@contextmanager
def plain() -> Iterator[None]:
    """Compute without a GPU, in single precision, in a group of one rank."""
    with quiet(), plain_fla():
        from torchtitan.distributed import utils
        from torchtitan.models.common import attention

        grouped = not dist.is_initialized()
        if grouped:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            with (
                patch.object(attention.FlexAttention, "compiled_flex_attn", staticmethod(_attend)),
                patch.object(attention, "_compiled_create_block_mask", attention.create_block_mask),
                patch.object(utils, "_spmd_backend", "full_dtensor"),  # the default is for meshes of several ranks
                patch.object(torch.Tensor, "bfloat16", lambda self: self),
            ):
                yield
        finally:
            if grouped:
                dist.destroy_process_group()


class Remembered:
    """State of the kinds that torchtitan's data loader and its trainer save: plain data, pickled data in bytes."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was saved."""
        self.state = dict(state)


class Run:
    """A run of torchtitan in one process: model, optimizer, schedule and checkpoints."""

    def __init__(self, specification: Any, folder: Path, **loading: Any) -> None:
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
        from torchtitan.distributed import ParallelDims

        self.specification = specification
        self.model = specification.model.build()
        with torch.no_grad():
            for value in (*self.model.parameters(), *(held for name, held in self.buffers() if BIAS in name)):
                value.fill_(torch.nan)  # whatever is not loaded shows
        if dist.get_world_size() > 1:
            fully_shard(self.model)
        settings = default_adamw(lr=1e-2)
        settings.implementation = "for-loop"  # the default is for GPUs
        self.optimizers = settings.build(model_parts=[self.model])
        if specification.post_optimizer_build_fn is not None:
            degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "world_size"), 1)
            specification.post_optimizer_build_fn(self.optimizers, [self.model], ParallelDims(**degrees))
        schedule = LRSchedulersContainer.Config().build(optimizers=self.optimizers, training_steps=100)
        self.schedule = schedule
        self.data = Remembered({"dp_rank_0": b"", "world_size": 1})
        self.counts = Remembered({"step": 0, "ntokens_seen": 0})
        adapter = specification.state_dict_adapter
        self.checkpoints = CheckpointManager.Config(enable=True, interval=STEPS, **loading).build(
            dataloader=self.data, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=schedule,
            states={"train_state": self.counts},
            sd_adapter=adapter(specification.model, None) if adapter else None, base_folder=str(folder),
        )  # fmt: skip
        self.folder = folder / "checkpoint"

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All buffers by name, saved or not."""
        yield from self.model.named_buffers()

    def state(self) -> dict[str, torch.Tensor]:
        """The complete state: what is saved, and what is not, by the names that live and those that are saved."""
        return {**dict(self.model.named_parameters()), **dict(self.buffers()), **self.model.state_dict()}

    def _said(self, tokens: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        positions = torch.arange(tokens.shape[1]).expand(*tokens.shape)
        masks = self.model.get_attention_masks(positions)
        pictures = {"special_tokens": {"image_id": 2, "video_id": 3}} if self.specification.name == "qwen3_5" else {}
        said: Any = self.model(tokens, positions=positions, attention_masks=masks, **pictures)
        predictions: torch.Tensor | list[torch.Tensor] = said[0] if isinstance(said, tuple) else said
        return predictions

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """What is learned: the next token, and those that layers ahead say."""
        said, labels = self._said(tokens[:, :-1]), tokens[:, 1:]
        if isinstance(said, torch.Tensor):
            return torch.nn.functional.cross_entropy(said.flatten(0, 1), labels.flatten())
        from torchtitan.models.deepseek_v3.mtp import MTPLoss

        loss: torch.Tensor
        loss, _ = MTPLoss.Config().build()(said, labels, positions=torch.arange(labels.shape[1]).expand(*labels.shape))
        return loss / labels.numel()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the model says to these tokens, which it counts no experts for."""
        before = {name: value.clone() for name, value in self.buffers() if COUNTS in name}
        with torch.no_grad():
            said = self._said(tokens)
            said = said[0] if isinstance(said, list) else said
            for name, value in self.buffers():
                if name in before:
                    value.copy_(before[name])
        return said

    def train(self, steps: int = STEPS, seed: int = 0) -> None:
        """Take steps; all parameters get gradients, and all buffers move that do."""
        vocabulary = self.model.config.vocab_size
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            tokens = torch.randint(_WORDS, vocabulary, (2, _LENGTH + 1), generator=generator)
            self.optimizers.zero_grad()
            self._loss(tokens).backward()
            for value in self.model.parameters():
                if value.grad is None:  # there are no pictures here, whose parts would have gradients
                    value.grad = 1e-3 * torch.randn(value.shape, generator=generator)
            self.optimizers.step()
            self.schedule.step()
            self.counts.state = {"step": self.counts.state["step"] + 1, "ntokens_seen": tokens.numel()}
        self.data.state = {"dp_rank_0": pickle.dumps({"_sample_idx": seed + steps}), "world_size": 1}

    def remembered(self) -> dict[str, Any]:
        """What a run remembers besides model and optimizer."""
        return {"lr_scheduler": self.schedule, "dataloader": self.data, "train_state": self.counts}

    def draw(self, seed: int) -> None:
        """Take random values and steps along random gradients, where there is no text to learn."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in self.model.parameters():
                value.copy_(torch.randn(value.shape, generator=generator))
        for _ in range(STEPS):
            for value in self.model.parameters():
                value.grad = torch.randn(value.shape, generator=generator)
            self.optimizers.step()
            self.schedule.step()
        with torch.no_grad():
            for name, value in self.buffers():
                if BIAS in name:
                    value.copy_(torch.randn(value.shape, generator=generator))

    def save(self, *, last: bool = False) -> Path:
        """Save by torchtitan's own manager; the last checkpoint of a run holds the model alone."""
        step = STEPS + last
        assert self.checkpoints.save(step, last_step=last)
        return self.folder / f"step-{step}"


def tokens(vocabulary: int) -> torch.Tensor:
    """Two sequences to compare logits of."""
    return torch.randint(_WORDS, vocabulary, (2, _LENGTH), generator=torch.Generator().manual_seed(7))
