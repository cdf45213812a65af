"""The container formats that ship with Transaxle, one record each.

The order of their clues is that in which a folder that holds a checkpoint twice is read: what describes a whole folder
comes before single files, and Hugging Face's own names before others.
"""

from __future__ import annotations

import re

from transaxle.formats.format import INDEX, Clue, Format, ending, first_of, named

_HUB = "(?:diffusion_pytorch_model|pytorch_model|model|consolidated)"
"""How the files of a model begin that Hugging Face's libraries, and Meta's, write."""


def _shards_and_index(*ends: str) -> str:
    """Return a pattern for the files of a model on a hub: whole, in shards, and their index; no adapters."""
    end = f"(?:{'|'.join(map(re.escape, ends))})"
    return (
        rf"{_HUB}(?:[.\-_]?\d[^/]*|[.\-][^/]*)?{end}"
        rf"|(?!adapter)[^/]+-\d+-of-\d+{end}"
        rf"|[^/]+{end}{re.escape(INDEX)}"
    )


SAFETENSORS = Format(
    name="safetensors",
    title="a safetensors checkpoint",
    clues=(
        Clue(ending(f".safetensors{INDEX}"), 40),
        Clue(named("model.safetensors"), 50),
        Clue(ending(".safetensors"), 80),
    ),
    reader="transaxle.formats.safetensors:open_safetensors",
    draft="transaxle.formats.safetensors:draft",
    draft_takes=frozenset({"groups", "run", "sealed", "stem"}),
    one_file=(".safetensors",),
    heads=((8, b"{"),),
    openers=(INDEX,),
    files=_shards_and_index(".safetensors"),
)

_TORCH_FILES = (".bin", ".pt", ".pth")
_NO_WEIGHTS = r"(training_args|(optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state)(_\d+)?)\.(bin|pt|pth)"
"""What transformers' Trainer and accelerate keep beside the weights."""
TORCH = Format(
    name="torch",
    title="a torch checkpoint",
    clues=(
        Clue(ending(*(f"{end}{INDEX}" for end in _TORCH_FILES), unless=_NO_WEIGHTS), 60),
        Clue(ending(*_TORCH_FILES, unless=_NO_WEIGHTS), 80),
        Clue(ending(".ckpt"), 90),  # as Lightning names them; ours never end so
    ),
    reader="transaxle.formats.torch_file.reader:open_torch",
    draft="transaxle.formats.torch_file.draft:draft",
    draft_takes=frozenset({"groups", "nesting", "sealed", "stem"}),
    one_file=_TORCH_FILES,
    heads=((0, b"PK\x03\x04"), (0, b"\x80")),
    openers=(INDEX,),
    files=_shards_and_index(*_TORCH_FILES),
)

DCP_METADATA = ".metadata"
DCP_DATA = ".distcp"
DCP_RANK = rf"__(\d+){re.escape(DCP_METADATA)}"
"""Pattern for the metadata that each rank writes of a save without coordination."""
DCP_SHARD = r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors"
"""Pattern for what torch's `HuggingFaceStorageWriter` writes before it consolidates."""
DCP = Format(
    name="dcp",
    title="a torch.distributed.checkpoint (DCP) folder",
    clues=(
        Clue(named(DCP_METADATA), 10),
        Clue(first_of(DCP_RANK), 11),
        Clue(
            first_of(DCP_SHARD),
            70,
            reader="transaxle.formats.dcp.reader:open_shards",
            all_shards=True,
        ),
    ),
    reader="transaxle.formats.dcp.reader:open_dcp",
    draft="transaxle.formats.dcp.draft:draft",
    draft_takes=frozenset({"groups", "training"}),
    parts=(DCP_DATA, DCP_METADATA),
    openers=(DCP_METADATA,),
    files=rf"\.metadata|__\d+_\d+{re.escape(DCP_DATA)}",
    sidecars=frozenset({"common.pt", "metadata.json"}),  # of Megatron's distributed checkpoints
)

MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
"""File beside the folders of Megatron's iterations that names the newest."""
_ITERATIONS = r"iter_\d{7,}|release"
TORCH_DIST = Format(
    name="torch_dist",
    title="a distributed checkpoint of Megatron",
    clues=(
        Clue(
            "transaxle.formats.megatron.iterations:distributed",
            5,
            hint="|".join((r"metadata\.json", r"common\.pt", re.escape(MEGATRON_TRACKER), "weights")),
        ),
    ),
    reader="transaxle.formats.megatron.torch_dist.reader:open_torch_dist",
    reader_takes=frozenset({"weights"}),
    draft="transaxle.formats.megatron.torch_dist.draft:draft",
    draft_takes=frozenset({"config", "cuts", "degrees", "run", "read"}),
    dialects=("megatron_dist", "megatron_layers"),
    openers=(MEGATRON_TRACKER,),
    files=rf"\.metadata|__\d+_\d+{re.escape(DCP_DATA)}|common\.pt",
    sidecars=frozenset({MEGATRON_TRACKER, "metadata.json"}),
    steps=_ITERATIONS,
)

MEGATRON_RANK = r"mp_rank_\d{2,6}(?:_\d{3,6}){0,2}"
"""Pattern for the folder in which one rank of Megatron writes."""
MEGATRON_MODEL, MEGATRON_FLAT = "model_optim_rng.pt", "distrib_optim.pt"
"""Files in it: the rank's part of the model, and of the distributed optimizer's flat buffers."""
MEGATRON_TORCH = Format(
    name="megatron_torch",
    title="a Megatron checkpoint of one folder for each rank",
    clues=(
        Clue(
            "transaxle.formats.megatron.iterations:legacy",
            6,
            hint=rf"{MEGATRON_RANK}|{re.escape(MEGATRON_TRACKER)}|{re.escape(MEGATRON_MODEL)}",
        ),
    ),
    reader="transaxle.formats.megatron.legacy.reader:open_legacy",
    reader_takes=frozenset({"weights", "cutter", "optimizer"}),
    draft="transaxle.formats.megatron.legacy.draft:draft",
    draft_takes=frozenset({"degrees", "parts", "config", "run", "read"}),
    dialects=("megatron",),
    openers=(MEGATRON_TRACKER,),
    files=rf"{MEGATRON_RANK}/(?:{re.escape(MEGATRON_MODEL)}|{re.escape(MEGATRON_FLAT)})",
    sidecars=frozenset({MEGATRON_TRACKER}),
    steps=_ITERATIONS,
)

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
DEEPSPEED_ZERO = "zero"
MODEL_END = "_model_states.pt"
RANK_FILES = (
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})(_model_states|_?optim_states)\.pt",
    r"mp_rank_(\d{1,6})_model_states\.pt",
    r"layer_(\d{1,6})(?:-model_(\d{1,6}))?-model_states\.pt",
    r"(?:layer_(\d{1,6})_)?expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt",
    r"expp_rank_\d{1,6}_mp_rank_\d{1,6}_optim_states\.pt",
)
"""Patterns for what ranks write: their optimizer or, of ZeRO-3, model; a model; a layer; an expert; an optimizer of
experts without ZeRO."""
_RANK_FILE = "|".join(f"(?:{pattern})" for pattern in RANK_FILES)
_STEPS = r"global_step\d+(_universal)?"
DEEPSPEED = Format(
    name="deepspeed",
    title="a DeepSpeed checkpoint",
    clues=(
        Clue(
            "transaxle.formats.deepspeed.files:of_run",
            20,
            hint=rf"{LATEST}|global_step\d+|.*_states\.pt",
        ),
    ),
    reader="transaxle.formats.deepspeed.reader:open_deepspeed",
    reader_takes=frozenset({"weights", "cutter"}),
    openers=(LATEST, MODEL_END),
    files=_RANK_FILE,
    sidecars=frozenset({LATEST, LATEST_UNIVERSAL, "zero_to_fp32.py"}),
    steps=_STEPS,
    newest=LATEST,
)
UNIVERSAL = Format(
    name="deepspeed-universal",
    title="a DeepSpeed universal checkpoint",
    clues=(
        Clue(
            "transaxle.formats.deepspeed.files:universal",
            30,
            hint=rf"{LATEST_UNIVERSAL}|{DEEPSPEED_ZERO}|global_step.*",
        ),
    ),
    reader="transaxle.formats.deepspeed.universal_reader:open_universal",
    reader_takes=frozenset({"weights"}),
    draft="transaxle.formats.deepspeed.universal_draft:draft",
    draft_takes=frozenset({"run", "read"}),
    full_precision=True,
    openers=(LATEST_UNIVERSAL,),
    files=rf"{_RANK_FILE}|{DEEPSPEED_ZERO}/(?:[^/]+/)?[^/]+\.pt",
    steps=_STEPS,
    newest=LATEST_UNIVERSAL,
    inner=DEEPSPEED_ZERO,
)

FORMATS = (SAFETENSORS, TORCH, DCP, TORCH_DIST, MEGATRON_TORCH, UNIVERSAL, DEEPSPEED)
"""In the order in which lists show them."""

CALLED = {
    "huggingface": "hf", "hub": "hf", "sglang": "hf", "pt": "torch", "pth": "torch", "bin": "torch",
    "mcore": "torch_dist", "megatron-lm": "torch_dist", "fsdp": "dcp", "fsdp2": "dcp", "zero": "deepspeed-universal",
}  # fmt: skip
"""What people call a target -> the dialect or format that they mean."""
