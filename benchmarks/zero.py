"""DeepSpeed checkpoints of about a gigabyte: our conversions against DeepSpeed's own tools, in one run.

Promises: a universal checkpoint in a quarter of ds_to_universal's time, safetensors in a third of zero_to_fp32's, at
most 1.05 bytes written for each byte of output, and memory for no more than the largest tensor and 100 MB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

HIDDEN, INNER, VOCAB, LAYERS, PARTS = 1024, 2816, 32000, 4, 2
TAG = "global_step3"
PROMISED = {"universal": 4.0, "hf": 3.0}
ALLOWED_MEMORY = VOCAB * HIDDEN * 4 + (100 << 20)


def shapes() -> OrderedDict[str, tuple[int, ...]]:
    """A llama of about 85 million parameters: a gigabyte with its moments."""
    found: OrderedDict[str, tuple[int, ...]] = OrderedDict({"model.embed_tokens.weight": (VOCAB, HIDDEN)})
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"{stem}.self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        found[f"{stem}.mlp.gate_proj.weight"] = found[f"{stem}.mlp.up_proj.weight"] = (INNER, HIDDEN)
        found[f"{stem}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    found["lm_head.weight"] = (VOCAB, HIDDEN)
    return found


def make(folder: Path, stage: int) -> None:
    """Write what DeepSpeed 0.19.8 writes for one optimizer group on two ranks: its own classes, random values."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    sizes = OrderedDict((name, torch.Size(shape)) for name, shape in shapes().items())
    total = sum(size.numel() for size in sizes.values())
    width = total // PARTS
    (folder / TAG).mkdir(parents=True)
    (folder / "latest").write_text(TAG, "utf-8")
    generator = torch.Generator().manual_seed(0)
    for part in range(PARTS):
        flat = {key: torch.rand(width, generator=generator) for key in ("fp32", "exp_avg", "exp_avg_sq")}
        held = {"step": torch.tensor(3.0), "exp_avg": flat["exp_avg"], "exp_avg_sq": flat["exp_avg_sq"]}
        inner = {"state": {0: held}, "param_groups": [{"lr": 0.1, "weight_decay": 0.1, "params": [0]}]}
        state: dict[str, Any] = {
            "loss_scaler": LossScaler(1.0), "dynamic_loss_scale": False, "overflow": False, "ds_version": "0.19.8",
            "zero_stage": ZeroStageEnum(stage),
        }  # fmt: skip
        if stage == 3:
            state |= {"partition_count": PARTS, "optimizer_state_dict": inner, "fp32_flat_groups": [flat["fp32"]]}
        else:
            mapping, at = OrderedDict(), 0
            for name, size in sizes.items():
                low, high = max(at, part * width), min(at + size.numel(), (part + 1) * width)
                if low < high:
                    mapping[name] = fragment_address(numel=high - low, start=low - part * width)
                at += size.numel()
            state |= {
                "clip_grad": 1.0, "base_optimizer_state": inner, "group_paddings": [0], "partition_count": [PARTS],
                "param_alignment_paddings": [[0] * len(sizes)], "param_slice_mappings": [mapping],
                "single_partition_of_fp32_groups": [flat["fp32"]],
            }  # fmt: skip
        root = {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(root, folder / TAG / f"bf16_zero_pp_rank_{part}_mp_rank_00_optim_states.pt")
        if stage == 3 or part == 0:
            module = OrderedDict(
                (name, torch.zeros(0 if stage == 3 else size, dtype=torch.bfloat16)) for name, size in sizes.items()
            )
            model = {
                "module": module, "buffer_names": [], "optimizer": None, "param_shapes": [sizes], "shared_params": {},
                "frozen_param_shapes": None, "frozen_param_fragments": None, "lr_scheduler": None,
                "skipped_steps": 0, "global_steps": 3, "global_samples": 3, "dp_world_size": PARTS, "mp_world_size": 1,
                "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_config": {},
                "ds_version": "0.19.8",
            }  # fmt: skip
            name = f"zero_pp_rank_{part}_mp_rank_00" if stage == 3 else "mp_rank_00"
            torch.save(model, folder / TAG / f"{name}_model_states.pt")


def timed(command: list[str]) -> float:
    """Run a program and return its seconds."""
    begin = time.monotonic()
    done = subprocess.run(command, env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.decode()[-2000:]}")
    return time.monotonic() - begin


_OURS = """
import sys, time
import transaxle as tx
begin = time.monotonic()
report = tx.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], sync=False)  # as the peers write
assert "torch" not in sys.modules
high = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # since exec, unlike ru_maxrss
print(time.monotonic() - begin, report.bytes_written, int(high.split()[1]) << 10)
"""


def ours(source: Path, target: Path, to: str) -> tuple[float, int, int]:
    """Convert in a process of its own; return its whole wall time, the bytes written and its peak memory."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _OURS, str(source), str(target), to], capture_output=True, text=True, check=True
    )
    _, written, peak = done.stdout.split()
    return time.monotonic() - begin, int(written), int(peak)


def main() -> None:
    kept = True
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        for stage in (1, 3):
            source = base / f"zero{stage}"
            make(source, stage)
            size = sum(path.stat().st_size for path in (source / TAG).iterdir())
            print(f"ZeRO-{stage}, {PARTS} ranks, {size / 1e9:.2f} GB")
            theirs = {
                "universal": [
                    "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--input_folder",
                    str(source / TAG), "--output_folder", str(base / f"theirs{stage}" / TAG),
                ],
                "hf": [
                    "-m", "deepspeed.utils.zero_to_fp32", str(source), str(base / f"fp32-{stage}"),
                    "--safe_serialization",
                ],
            }  # fmt: skip
            for what, to in (("universal", "deepspeed-universal"), ("hf", "safetensors")):
                target = base / f"ours{stage}-{what}"
                seconds, written, peak = ours(source, target, to)
                their_seconds = timed([sys.executable, *theirs[what]])
                output = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
                ratio = their_seconds / seconds
                print(
                    f"  {what:10} {seconds:6.2f} s, DeepSpeed {their_seconds:6.2f} s: {ratio:5.1f} x  "
                    f"written {written / output:.3f} of the output, peak {peak / 1e6:.0f} MB"
                )
                kept &= ratio >= PROMISED[what] and written <= 1.05 * output and peak <= ALLOWED_MEMORY
    if not kept:
        raise SystemExit("a promise is not kept")


if __name__ == "__main__":
    main()
