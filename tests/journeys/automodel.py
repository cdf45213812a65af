"""NeMo Automodel 0.7 as its users run it: its own models, loader, training and checkpointer, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.oracles import automodel_peer
from tests.oracles.hub import Config, Tensors

STEPS = 3
FIXED = ("inv_freq", "freqs", "_cache", "_cumulative_expert_load")
"""Parts of the names of buffers that follow from the configuration, or are counted anew in each step."""
CORRECTION = "e_score_correction_bias"
_LENGTH, _WORDS = 12, 8


@contextmanager
def plain() -> Iterator[None]:
    """Without noise and without a CUDA device."""
    with automodel_peer.undisturbed(), patch.object(torch._dynamo.config, "disable", new=True):
        yield


class Run:
    """A run of Automodel in one process: a model of its registry, its optimizer, and its checkpointer."""

    def __init__(self, config: Config, hub: Path, folder: Path) -> None:
        self.model: Any = automodel_peer.own(config)
        assert self.model is not None, f"Automodel has no model of its own for {config['model_type']}"
        for module in self.model.modules():
            if isinstance(vars(module).get("device"), torch.device):
                module.device = torch.device("cpu")  # the CUDA device that is current, otherwise
        with plain(), torch.no_grad():
            from nemo_automodel.components.checkpoint.config import CheckpointingConfig

            for value in self.model.state_dict().values():
                if value.is_floating_point():
                    value.fill_(torch.nan)  # whatever is not loaded shows
            settings = CheckpointingConfig(checkpoint_dir=str(folder), model_repo_id=str(hub))
            self.checkpoints = settings.build(dp_rank=0, tp_rank=0, pp_rank=0)
        self.config, self.hub, self.folder = config, hub, folder
        correcting = [module for module in self.model.modules() if getattr(module, "bias_update_factor", 0)]
        self.corrects = bool(correcting) and hasattr(self.model, "update_moe_gate_bias")
        """Whether Automodel's recipes correct its routers after each step."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def load(self) -> None:
        """Load the hub's checkpoint, as a run begins."""
        with plain():
            self.checkpoints.load_base_model(self.model, torch.device("cpu"), str(self.hub.parent), str(self.hub))

    def state(self) -> Tensors:
        """The complete state: parameters and buffers by the names that live, and by those that are saved."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: value.detach() for name, value in {**named, **self.model.state_dict()}.items()}

    def moments(self) -> dict[str, Tensors]:
        """What the optimizer holds of each parameter, by its name."""
        return {name: dict(self.optimizer.state[parameter]) for name, parameter in self.model.named_parameters()}

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the model says to these tokens."""
        self.model.eval()
        with plain(), torch.no_grad():
            return _logits(self.model(tokens))

    def train(self) -> None:
        """Take steps, each of which corrects the routers too."""
        self.model.train()
        generator = torch.Generator().manual_seed(0)
        with plain():
            for _ in range(STEPS):
                tokens = draw(self.model.config, generator)
                said = _logits(self.model(tokens)).float()
                loss = torch.nn.functional.cross_entropy(said[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
                self.optimizer.zero_grad()
                loss.backward()
                for value in self.model.parameters():
                    if value.grad is None:  # what no token reaches, such as parts for pictures
                        value.grad = 1e-3 * torch.randn(value.shape, generator=generator)
                self.optimizer.step()
                if self.corrects:
                    self.model.update_moe_gate_bias()

    def save(self) -> Path:
        """Save by Automodel's own checkpointer: `model` and `optim`, each a checkpoint of its own."""
        step = self.folder / "epoch_0_step_3"
        with plain():
            self.checkpoints.save_model(self.model, str(step))
            self.checkpoints.save_optimizer(self.optimizer, self.model, str(step))
        return step


def _logits(said: Any) -> torch.Tensor:
    logits: torch.Tensor = getattr(said, "logits", said)
    return logits


def draw(config: Any, generator: torch.Generator) -> torch.Tensor:
    """Two sequences of tokens."""
    return torch.randint(_WORDS, config.get_text_config().vocab_size, (2, _LENGTH), generator=generator)
