"""verl's model merger, with Transaxle as the reader of the rank files, by verl's own interface and options.

    python verl_merger.py merge --backend fsdp --local_dir global_step_50/actor --target_dir merged
    python verl_merger.py merge --backend fsdp --local_dir global_step_50/actor --target_dir merged --exact
    python verl_merger.py test --backend fsdp --local_dir global_step_50/actor --test_hf_dir merged

It writes the tensors that verl's own merger writes: in bfloat16, or with `--exact` in the dtypes of the files. They are
streamed from the rank files into the folder, which appears when it is complete, and nothing in the files is executed.
Models with adapters are written by verl's own code, which needs the whole model in memory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from verl.model_merger.base_model_merger import BaseModelMerger, generate_config_from_args, parse_args
from verl.model_merger.output_validation import validate_hf_model_output

import transaxle as tx

EXACT = "--exact"


class TransaxleMerger(BaseModelMerger):  # type: ignore[misc]  # verl has no types
    """Merges rank files of FSDP, HSDP and tensor parallelism.

    Args:
        config: verl's options.
        dtype: dtype of the merged weights; None keeps the dtypes of the files.
    """

    def __init__(self, config: Any, dtype: Literal["bf16"] | None = "bf16") -> None:
        super().__init__(config)
        self.dtype = dtype

    def merge_and_save(self) -> None:
        """Carry out verl's operation: `merge`, or `test` against a folder for transformers."""
        with tx.open(self.config.local_dir, format="ranks", optimizer=False, dtype=self.dtype) as files:
            if self.config.operation == "test":
                self.test(files)
            elif any("lora_" in name for name in files):
                self.save_hf_model_and_tokenizer({name: stored.torch() for name, stored in files.items()})
            else:
                self.stream(files)
        if self.config.hf_upload:
            self.upload_to_huggingface()

    def stream(self, files: tx.Checkpoint) -> None:
        """Write the folder of a hub: weights, and the config, tokenizer and generation config that verl has saved."""
        target = Path(self.config.target_dir)
        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()  # verl's options have made it
        tx.convert(files, target, to="hf")
        validate_hf_model_output(target)

    def test(self, files: tx.Checkpoint) -> None:
        """Compare with a folder for transformers, as exactly as bits."""
        with tx.open(self.config.test_hf_dir, dtype=self.dtype) as expected:
            difference = tx.diff(files, expected)
            if not difference.equal:
                raise SystemExit(f"the rank files and {self.config.test_hf_dir} differ:\n{difference}")
        print(f"The rank files have the tensors of {self.config.test_hf_dir}, bit for bit.")

    def cleanup(self) -> None:
        """Do nothing: no temporary files remain."""


def main() -> None:
    """Run the merger with verl's command line, and `--exact`."""
    exact = EXACT in sys.argv
    sys.argv = [word for word in sys.argv if word != EXACT]
    options = parse_args()
    if options.backend != "fsdp":
        raise SystemExit("this merger takes the rank files of FSDP; convert Megatron's with: transaxle convert")
    merger = TransaxleMerger(generate_config_from_args(options), None if exact else "bf16")
    merger.merge_and_save()
    merger.cleanup()


if __name__ == "__main__":
    main()
