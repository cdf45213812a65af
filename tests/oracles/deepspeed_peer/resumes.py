"""Which checkpoints DeepSpeed resumes, set up as which case, and what was made of them before."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transaxle as tx
from tests.forks import context
from tests.oracles.deepspeed_peer.case import BY_NAME, TAG
from transaxle.formats.deepspeed.keys import LATEST_UNIVERSAL, UNIVERSAL

CONVERTED, CARRIED, THEIRS, OWN = "converted", "carried", "theirs", "own"
CARRIERS = 4
"""Tensor-parallel ranks of the model through which checkpoints are carried."""


@dataclass(frozen=True)
class Resume:
    """One resumed run."""

    source: str
    """Case whose checkpoint it is."""
    target: str
    """Case whose stage and degrees the resumed run has."""
    way: str = CONVERTED
    """What is made of the checkpoint: see `WAYS`."""
    together: bool = False
    """All parts of the optimizer count their steps in one tensor, as DeepSpeed 0.19.8 leaves them when it loads a
    universal checkpoint at ZeRO-3; otherwise each in its own, as everywhere else."""

    def __str__(self) -> str:
        return f"{self.source}--{self.target}.{self.way}{'.together' * self.together}"

    @property
    def beside(self) -> str:
        """Name of the run that is begun from the same state by hand."""
        return f"{self.source}--{self.target}.begun{'.together' * self.together}"


def _converted(source: Path, target: Path) -> None:
    tx.convert(source, target, to=UNIVERSAL, sync=False)


def to_universal(source: Path, target: Path) -> None:
    """Convert by DeepSpeed's own tool, in a process that has imported DeepSpeed before."""
    numbers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    paths = ["--input_folder", str(source / TAG), "--output_folder", str(target / TAG)]
    said = target.with_name(f"{target.name}.said")
    process = context().Process(target=_tool, args=(["--inject_missing_state", *numbers, *paths], said))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode == 0, said.read_text("utf-8")[-3000:]


def _tool(arguments: list[str], said: Path) -> None:
    """Be the tool; what it prints goes to a file."""
    with said.open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.checkpoint import ds_to_universal

    sys.argv = ["ds_to_universal", *arguments]
    ds_to_universal.main(ds_to_universal.parse_arguments())


def _theirs(source: Path, target: Path) -> None:
    """DeepSpeed's own converter."""
    to_universal(source, target)
    (target / LATEST_UNIVERSAL).write_text(TAG, "utf-8")


def _carried(source: Path, target: Path) -> None:
    """Loaded into a live model that we cut, and saved by it."""
    from tests.live.ranks import run

    case = BY_NAME[source.parent.name]
    config = {
        "model_type": case.model, "vocab_size": case.vocab, "hidden_size": case.hidden, "intermediate_size": case.inner,
        "num_hidden_layers": case.layers, "num_attention_heads": case.heads, "num_key_value_heads": case.kv,
        "tie_word_embeddings": case.tied, "max_position_embeddings": 64,
    }  # fmt: skip
    run(CARRIERS, _carry, config, str(source), str(target))


def _carry(rank: int, world: int, config: dict[str, Any], source: str, target: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.optim import AdamW

    from tests.parallel.models import build

    model = build(config)
    tx.parallel.tensor_parallel(model, init_device_mesh("cpu", (world,)))
    weights = list(model.parameters())
    matrices, others = ([weight for weight in weights if (weight.dim() > 1) == wide] for wide in (True, False))
    optimizer = AdamW([{"params": matrices}, {"params": others}])  # the groups that DeepSpeed's run has
    tx.load(model, source, optimizer=optimizer, strict=True)
    tx.save(model, target, to=UNIVERSAL, optimizer=optimizer)


def _own(source: Path, target: Path) -> None:
    """The checkpoint as DeepSpeed saved it, which it resumes at the same stage and degrees."""
    target.symlink_to(source, target_is_directory=True)


WAYS: Mapping[str, Callable[[Path, Path], None]] = {
    CONVERTED: _converted, CARRIED: _carried, THEIRS: _theirs, OWN: _own,
}  # fmt: skip

_PAIRS = (
    # Stages and data-parallel degrees; from one form to the other DeepSpeed's own converter cannot do it.
    ("z1-bf16-w2", "z3-bf16-w4"),
    ("z3-bf16-w4", "z1-bf16-w2"),
    ("z2-fp32-w2", "z3-fp32-w4"),
    ("z3-fp32-w2", "z2-fp32-w4"),
    ("z1-bf16-w2", "z1-bf16-w4"),
    ("sub-groups-w2", "z1-bf16-w4"),
    ("one-group-sub-groups-w2", "one-group-sub-groups-w2"),
    ("mixtral-z1-w2", "mixtral-z3-w2"),
    ("tied-z1-w2", "tied-z3-w2"),
    ("tied-z3-w2", "tied-z1-w2"),
    ("odd-z1-w2", "odd-z3-w4"),
    ("odd-z3-w2", "odd-z2-w4"),
    ("odd-z3-w4", "odd-aligned-w2"),
    # Tensor-parallel degrees.
    ("tp2-vocab251", "tp2-dp2"),
    ("z1-bf16-w2", "tp2-z3"),
    ("tp2-z3", "z1-bf16-w2"),
    ("tp2-z2-fp32", "tp2-dp2-z3"),
    ("tp2-fused", "tp2-dp2-fused"),
    ("tp2-head-rows", "tp2-head-rows"),
    ("tp2-dp2-fused", "tp2-fused"),
    # From every degree to every other, each of them resumed from the file of the one before.
    ("tp4", "tp4"),
    ("tp4", "tp2-wide"),
    ("tp4", "tp1-wide"),
    ("tp2-wide", "tp4"),
    ("tp2-wide", "tp2-wide"),
    ("tp2-wide", "tp1-wide-z3"),
    ("tp1-wide", "tp4"),
    ("tp1-wide-z3", "tp2-wide"),
    ("tp1-wide", "tp1-wide"),
    ("tp4-fused", "tp2-wide-fused"),
    ("tp4-fused", "tp1-wide-fused"),
    ("tp2-wide-fused", "tp4-fused"),
    ("tp1-wide-fused", "tp4-fused"),
    ("tp4-uneven", "tp2-uneven"),
    ("tp4-uneven", "tp1-uneven"),
    ("tp1-uneven", "tp2-uneven"),
    # Pipelines; tensor-parallel ones carry no records, and are cut by what is written beside the tensors.
    ("pp2-tp2", "pp2-tp2"),
    ("pp2", "pp2-dp2"),
    ("pp2-tp2", "pp2-dp2"),
    ("pp2-tied", "pp2-tied"),
)
PLAIN = tuple(Resume(*pair) for pair in _PAIRS)
"""What we convert, and DeepSpeed resumes: a sweep, each with a launch of its own."""
CUT_BY_US = (
    # A run whose model we cut: from its own checkpoint at the same degree, and from ours at every other.
    Resume("ours-tp4-uneven", "ours-tp4-uneven", OWN),
    Resume("ours-tp2", "ours-tp2", OWN),
    Resume("ours-tp2-dp2-z3", "ours-tp2-dp2-z3", OWN),
    Resume("ours-tp4", "ours-tp2"),
    Resume("ours-tp4-uneven", "ours-tp2-uneven"),
    Resume("ours-tp2-uneven", "ours-tp4-uneven"),
    Resume("ours-tp4-phi3", "ours-tp2-phi3"),
    Resume("ours-tp2-phi3", "ours-tp4-phi3"),
    Resume("ours-tp2-tied", "ours-tp2-tied"),
    Resume("ours-tp2", "ours-tp2-dp2"),
    Resume("ours-tp4", "ours-tp2-dp2-z3"),
    Resume("ours-tp2-dp2-z3", "ours-tp4"),
    # Between AutoTP and us.
    Resume("ours-tp4", "tp2-wide"),
    Resume("tp2-wide", "ours-tp4"),
    # By DeepSpeed's own converter, which goes by our records.
    Resume("ours-tp4", "ours-tp2", THEIRS),
    Resume("tp4", "ours-tp2", THEIRS),
    # Through `tx.load` and `tx.save` of a model that we cut over four ranks.
    Resume("tp4", "tp2-wide", CARRIED),
    Resume("tp4", "ours-tp2", CARRIED),
)
TWICE = Resume("one-group-sub-groups-w2", "one-group-sub-groups-w2", THEIRS, together=True)
"""DeepSpeed's own converter and loader, ZeRO-3."""
RESUMES = (*PLAIN, *CUT_BY_US, TWICE)
