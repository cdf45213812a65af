"""The program that loads folders with another release of transformers, which PYTHONPATH names, and stores the logits.

    python older_transformers.py TARGET FOLDER ...

writes `N.pt` with the logits of the N-th folder, or `N.txt` with the error.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 40


def main(target: Path, folders: list[str]) -> None:
    """Load every folder and run the model."""
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    for number, folder in enumerate(folders):
        try:
            torch.manual_seed(number)  # parameters that get no tensor differ from one load to the next
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
            with torch.no_grad():
                torch.save(model(TOKENS).logits.float(), target / f"{number}.pt")
        except Exception as error:  # noqa: BLE001 - whatever transformers raises is its answer
            (target / f"{number}.txt").write_text(f"{type(error).__name__}: {error}", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
