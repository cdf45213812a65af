"""Names: what a table calls its axes and tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from transaxle.axes.notation.family import WORDS

RESERVED = frozenset(
    {
        *WORDS,
        "family",
        "dialect",
        "axes",
        "axis",
        "let",
        "tie",
        "cut",
        "precise",
        "added",
        "wrapper",
        "model_type",
        "ignore",
    }
    | {
        "alike",
        "when",
        "optional",
        "lossy",
        "like",
        "of",
        "len",
        "and",
        "or",
        "not",
        "in",
        "if",
        "else",
        "is",
        "None",
        "True",
        "False",
    }
)
LETTERS = {
    "num_hidden_layers": "l", "num_layers": "l", "n_layer": "l", "layers": "l", "blocks": "l", "block": "l",
    "layer": "l", "h": "l", "hidden_size": "d", "d_model": "d", "n_embd": "d", "embed_dim": "d", "vocab_size": "n",
    "intermediate_size": "f", "moe_intermediate_size": "f", "num_experts": "e", "num_local_experts": "e",
    "n_routed_experts": "e", "experts": "e", "num_key_value_heads": "g", "num_attention_heads": "a", "head_dim": "c",
    "out_channels": "o", "kernel_size": "k", "max_position_embeddings": "s", "patch_size": "p", "num_channels": "r",
}  # fmt: skip
"""What our own tables call the axes of these keys."""
_WORD = re.compile(r"[a-z][a-z0-9_]*")


def axis_letters(source: str) -> str:
    """Return a short name for an axis: by its config key, by the word before its index, or by nothing but `x`."""
    words = _WORD.findall(source.lower())
    if not words:
        return "x"
    last = words[-1] if len(words) == 1 or "." in source else "_".join(words)
    if last in LETTERS:
        return LETTERS[last]
    if len(words) == 1 or "." in source:
        return "".join(part[0] for part in last.split("_") if part and part[0].isalpha())[:3] or "x"
    return "".join(word.split("_")[-1][0] for word in words)[:3]


def first_free(wanted: str, taken: Iterable[str]) -> str:
    """Return a name with the smallest number that makes it free."""
    taken = set(taken) | RESERVED
    if wanted not in taken:
        return wanted
    return next(name for number in range(2, len(taken) + 3) if (name := f"{wanted}{number}") not in taken)


def tensor_names(patterns: Sequence[tuple[str, str]]) -> list[str]:
    """Name logical tensors after their stored names: as few of the last words as tell them apart.

    Args:
        patterns: names in hub and memory of each tensor.
    """
    stems = [_stem(hub, memory, patterns) for hub, memory in patterns]
    names: list[str] = []
    for at, words in enumerate(stems):
        others = stems[:at] + stems[at + 1 :]
        for count in range(min(2, len(words)), len(words) + 1):
            end = words[-count:]
            if all(other[-count:] != end for other in others):
                break
        else:
            end = words
        name = re.sub(r"\W+", "_", "_".join(end)).strip("_").lower() or "t"
        names.append(first_free(name if name[0].isalpha() else f"t_{name}", names))
    return names


def _stem(hub: str, memory: str, patterns: Sequence[tuple[str, str]]) -> list[str]:
    """Return the words of the side that names a tensor alone."""
    chosen = hub if sum(pattern[0] == hub for pattern in patterns) == 1 else memory
    if chosen == memory and sum(pattern[1] == memory for pattern in patterns) > 1:
        chosen = f"{memory}.{hub.rpartition('.')[2]}"
    words = [word for word in chosen.replace("{}", "").split(".") if word]
    return words[:-1] if len(words) > 1 and words[-1] == "weight" else words
