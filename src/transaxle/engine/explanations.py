"""A long explanation of every refusal code, as data: what the code means, a typical message, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from transaxle.arguments import read_text
from transaxle.errors import CODES, Code


@dataclass(frozen=True, slots=True)
class Explanation:
    """The long explanation of one refusal code, for a user who meets the code for the first time."""

    summary: str
    """The refusal in one sentence."""
    meaning: str
    """Why the input is refused instead of worked around."""
    example: str
    """A typical message as printed, without the code; commands begin with `$`."""
    remedy: str
    """What the user can do about the refusal."""

    def as_json(self) -> dict[str, str]:
        """Return the explanation as plain JSON data."""
        return {"summary": self.summary, "meaning": self.meaning, "example": self.example, "remedy": self.remedy}

    def __str__(self) -> str:
        return "\n\n".join((self.summary, self.meaning, self.example, self.remedy))


def explain(refusal_code: str) -> Explanation:
    """Explain a refusal code at length: `tx.explain(error.code)`.

    Args:
        refusal_code: one of `tx.CODES`, in upper or lower case.

    Returns:
        The explanation; `print` shows it as `transaxle explain` does.
    """
    normalized = read_text("refusal_code", refusal_code, "BLOCK_MISALIGNED").upper().replace("-", "_")
    for code in CODES:
        if code == normalized:
            return EXPLANATIONS[code]
    similar = get_close_matches(normalized, CODES, 1)
    suggestion = f". Did you mean {similar[0]!r}?" if similar else "; see tx.CODES"
    raise ValueError(f"there is no code {refusal_code!r}{suggestion}")


EXPLANATIONS: Mapping[Code, Explanation] = {
    "UNSAFE_PICKLE": Explanation(
        "A pickle asks for something that could run code.",
        "`.pt` and `.bin` files, DCP and DeepSpeed checkpoints contain pickles. A pickle is a small program, and "
        "Python's own reader executes it. Transaxle never does: its interpreter only builds descriptions of tensors, "
        "and it knows a short list of names. A pickle that asks for any other name is refused. Nothing was executed.",
        "archive/data.pkl\n    the pickle asks for os.system, which is not on the list of harmless names",
        "Do not load this file with another program either, unless you know who made it. If the name belongs to "
        "your own training code, save only the tensors (a plain state dict, or safetensors) and convert that.",
    ),
    "PATH_ESCAPE": Explanation(
        "A name in the checkpoint leads outside its folder.",
        "Indexes, links and manifests name files, and anybody may have written them. Transaxle opens only regular "
        "files inside the checkpoint's folder. The one exception are links inside a Hugging Face cache.",
        "model.safetensors.index.json\n"
        "    the index names the shard '../../.ssh/id_rsa', which is not a plain file name",
        "If you made the link yourself, copy the file into the folder, or give the real folder on the command line: a "
        "link that you type yourself is followed.",
    ),
    "CORRUPT": Explanation(
        "The input contradicts itself or its format.",
        "For example: a header that does not parse, a tensor whose bytes lie beyond the end of its file, an index that "
        "disagrees with its shards, a checksum that does not match, a config that is not JSON, or a line of a table "
        "that is not valid. Reading on from there would be guessing.",
        "model-00002-of-00003.safetensors · model.layers.20.mlp.up_proj.weight\n"
        "    the file is truncated: its tensors take 4998571024 bytes, but there are only 1207959552",
        "Copy or download the file again, and compare its size or hash with the original. In a table of your own, "
        "the message shows the line, the column, and what was expected there.",
    ),
    "INCOMPLETE": Explanation(
        "Something that the checkpoint lists is missing.",
        "An index or a manifest names a file or a tensor that is missing, or no file holds some region of a tensor. "
        "Other programs leave such tensors at their random initial values; here it is an error.",
        "model-00003-of-00007.safetensors\n"
        "    the shard is missing; the index model.safetensors.index.json places 212 tensors in it",
        "Download or copy the missing file. To look at a single shard, name its file instead of the folder.",
    ),
    "OVERLAP": Explanation(
        "Two stored tensors claim the same bytes.",
        "In a valid file every byte belongs to exactly one tensor. Where two tensors overlap, at least one of them has "
        "wrong values.",
        "model.safetensors · layers.1.weight\n"
        "    data_offsets [2048, 6144] overlap 'layers.0.weight', which ends at 4096",
        "The file was damaged, or the program that wrote it has a bug. Tensors that share memory on purpose must be "
        "saved once, with a tie, or as copies.",
    ),
    "NAME_COLLISION": Explanation(
        "Two tensors have, or would have, the same name.",
        "A header or two shards have the same name twice, or, in a conversion, a tensor that keeps its own name has a "
        "name that the target dialect also writes. Keeping one of the two would silently lose the other.",
        "model-00002-of-00002.safetensors · model.norm.weight\n"
        "    the tensor is also in model-00001-of-00002.safetensors",
        "Remove the surplus shard or tensor. If a table of yours writes a name that the checkpoint already has, "
        "rename it in the table.",
    ),
    "AMBIGUOUS": Explanation(
        "Several readings are possible, or the one you asked for does not exist.",
        "The folder holds two checkpoints, two dialects read the same names but store the tensors differently, or the "
        "family does not have the dialect you gave, or no format has the name. A guess would often be right, and "
        "silently wrong otherwise.",
        "weights/\n    the folder holds several checkpoints: a.safetensors, b.safetensors",
        "The message lists the candidates. Choose with --format, --family, --from or --to, or name the file itself "
        "instead of its folder.",
    ),
    "UNKNOWN_FAMILY": Explanation(
        "No table reads this model.",
        "To move an axis, Transaxle must know which tensors have it. The table of the model's family says so, and no "
        "known table has this checkpoint's `model_type` and tensor names. A family is never guessed from shapes.",
        "the model type 'ctrl' of config.json is unknown, and no table knows any of the tensor names: lm_head.bias",
        "Most families answer to their model_type or their name only: a checkpoint without config.json needs --config "
        "FILE or --family NAME. So does a known model under another name. Otherwise --derive (of convert and "
        "plan) derives its table from the installed transformers; `transaxle derive FOLDER -o NAME.rules` keeps the "
        "table for all commands, with --rules NAME.rules. A model that transformers does not know needs a table of a "
        "few lines by hand. To change only the file format, keep all names: "
        "--to safetensors:identity.",
    ),
    "UNKNOWN_AXIS": Explanation(
        "The size of an axis is needed, and nothing tells it.",
        "This conversion separates axes that the source stores merged, for example the key-value groups inside the "
        "rows of a fused projection, and neither a manifest nor config.json nor the shapes give their sizes. "
        "The code also stands for an option that names an axis which the family does not have.",
        "decoder.layers.{l}.self_attention.linear_qkv.weight = [(g [q:(r c) | k:c | v:c]) d]\n"
        "    the size of axis g is needed, and the shape [12, 8] does not determine it",
        "Give the model's config with --config FILE, or the size itself: --axis g=8. The family's table says what each "
        "axis stands for (docs/reference/notation.md shows how to read it).",
    ),
    "SHAPE_MISMATCH": Explanation(
        "A stored tensor does not have the shape that the table and the config give.",
        "The rule and the sizes of config.json give one shape, and the file has another. Usually the config belongs to "
        "another model, the checkpoint was pruned or padded, or a size on the command line is wrong.",
        "model.layers.0.self_attn.q_proj.weight\n    q[(g r c) d]\n    expected [4096, 2048] (c=128, d=2048, "
        "g*r=32), got [2048, 2048]",
        "Compare config.json with the checkpoint (transaxle info). Check the sizes that you gave with --axis or "
        "--config: they override all others. A model that really is different needs a table of its own. "
        "A derived table may take a size from a key that was equal by chance in all configs that it follows from: "
        "`transaxle info --family NAME` prints the table, for you to correct its axes and give it with --rules.",
    ),
    "DTYPE_MISMATCH": Explanation(
        "A tensor does not have the dtype that the target requires.",
        "Moving a tensor never changes its dtype. If the target accepts only one dtype, a tensor of another is "
        "refused, not cast: the codes of a quantized tensor, for instance, are not the weight's values.",
        "model.layers.0.mlp.down_proj.weight\n    its dtype is BF16 in the model, but F32 in the source",
        "Cast plain tensors with --dtype (dtype= of load), decode quantized ones with --decode, or choose a target "
        "that can hold them unchanged.",
    ),
    "DTYPE_MIXED": Explanation(
        "Tensors of different dtypes would have to share one stored tensor.",
        "The target joins several weights in one tensor (gate and up, or q, k and v), and the source stores them in "
        "different dtypes. One tensor has one dtype, and a cast would change values.",
        "model.layers.0.mlp.experts.gate_up_proj\n    [e [gate:f | up:f] d]\n    its parts are stored as BF16 and F32",
        "Choose a dialect that stores them separately, or cast them to one with --dtype.",
    ),
    "UNEQUAL_COPIES": Explanation(
        "Copies that should be equal are not.",
        "Two stored tensors are the same weight, such as tied embeddings or replicas, and the target stores it once. "
        "Their bytes differ, so one of them would be lost. They were compared before the target was written. When a "
        "live model is saved, it is a tensor that several ranks hold with different values; the message lists the "
        "ranks, grouped by equal values.",
        "lm_head.weight\n"
        "    lm_head.weight = head[n d] and model.embed_tokens.weight = embed[n d] hold the same tensor\n"
        "    but their bytes differ",
        "If the model was trained untied, correct tie_word_embeddings in config.json (or in a file given with "
        "--config). Otherwise find out which of the two is current, and remove the other. In a live model, broadcast "
        "the tensor from one rank, and look for a gradient that is not summed over the ranks; "
        "tx.save(..., check_copies=False) writes one of the copies.",
    ),
    "BLOCK_MISALIGNED": Explanation(
        "A tile of the target would need two scales.",
        "Block-quantized weights store one scale per tile, such as 128 rows by 128 columns. Codes and scales can move "
        "unchanged to another layout only if each tile of the target lies inside one tile of the source. Here one "
        "does not, so there is no exact result without decoding.",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight\n"
        "    decoder.layers.{l}.mlp.shared_experts.linear_fc1.weight = [[shared_gate:s | shared_up:s] d]\n"
        "    its tile (4, 0) of 128 x 128, positions [512, 640) x [0, 128), has one scale, but comes from\n"
        "      model.layers.0.mlp.shared_experts.gate_proj.weight, tile (4, 0)\n"
        "      model.layers.0.mlp.shared_experts.up_proj.weight, tile (0, 0), from position 576 = 4 x 128 + 64 on",
        "Choose a dialect that stores these weights separately, or decode them with --decode bf16.",
    ),
    "UNSUPPORTED": Explanation(
        "This release cannot do this.",
        "The input itself is not at fault: Transaxle cannot read or write the format yet, the folder holds no "
        "checkpoint, the target format cannot store a dtype, or a tensor would have to be split inside a byte.",
        ".metadata · layers.0.weight\n    the bytes are compressed or transformed (stream.zstd/1), which is not "
        "supported",
        "The message says what is not supported. `transaxle info` lists what this release reads and writes.",
    ),
    "LOSSY": Explanation(
        "The conversion would round values, and you did not allow that.",
        "Some dialects store a computed value, such as a norm weight minus one. In floating point that rounds, so "
        "converting back would not give the same bits. It never happens without your consent.",
        "model.norm.weight\n    model.norm.weight = norm[d]\n    the values are computed and rounded: norm - 1",
        "If rounding is acceptable, allow it with --allow-lossy; the report then lists the tensors that were computed.",
    ),
    "MISSING_TENSOR": Explanation(
        "A tensor that the model needs is not in the checkpoint.",
        "According to the table and the config the model has this weight, and no stored tensor holds it. Many programs "
        "would load the result anyway, with random values for this weight. Where you ask for an optimizer's state "
        "(--optimizer), the code means that there is none.",
        "qwen3_moe in dialect hf lacks these tensors:\n    model.layers.47.mlp.experts.127.down_proj.weight",
        "Check whether a shard is missing, or whether the checkpoint is only a part of the model (an adapter, one "
        "pipeline stage). A part can still be converted under its own names: --to safetensors:identity.",
    ),
    "UNEXPECTED_TENSOR": Explanation(
        "The checkpoint has a tensor that the table does not know.",
        "Tensors without a line in the target dialect normally keep their names and are listed in the report. "
        "--strict refuses them. One inside a layer or a module of which others get new names is refused in any case: "
        "nobody would look for it under its old name. So is what the config says that the model has not, and a bias "
        "of torchtitan's routers that is not zero where the target's model has none. So are layers or experts beyond "
        "the number that the config or --axis says: the model would lack them. So is a model whose names begin as "
        "those of a model with a head, where no line reads the head. In `verify`, the code means that a tensor was "
        "added after the checkpoint was written.",
        "model.layers.0.self_attn.rotary_emb.inv_freq\n    dialect torchtitan has no line for this tensor",
        "Omit --strict to keep such tensors, or add lines for them to a table of your own (--rules).",
    ),
    "EXISTS": Explanation(
        "The target already exists, or must not be replaced.",
        "Nothing is overwritten without --overwrite, and then only a checkpoint: the files that Transaxle's manifest "
        "lists, and files with the names that frameworks use. If the folder holds anything else, such as notes, "
        "adapters or a repository, it is refused, so that a typing error in a path does not delete a project. The "
        "source is never changed: the target must not be the source, lie inside it, or contain it. A target that "
        "another run is writing is refused too.",
        "out/\n    the target already exists",
        "Choose another target, or replace it with --overwrite; the old checkpoint stays readable until the new one is "
        "complete. Move other files out of the folder, or delete them too with --overwrite=everything. --resume "
        "continues an interrupted conversion.",
    ),
    "IO": Explanation(
        "The machine could not read or write.",
        "A path does not exist, a permission is missing, the disk failed, or the network file system gave up. The "
        "message usually comes from the operating system.",
        "Qwen3-30B-A3/\n    no such file or folder\n    Did you mean Qwen3-30B-A3B?",
        "Check the path and its permissions. After a disk error, run the same command again with --resume.",
    ),
    "NO_SPACE": Explanation(
        "There is not enough space for the target.",
        "Transaxle reserves the space before it copies the first byte, if the file system can do that, so this error "
        "usually comes at once. The unfinished files have been removed.",
        "out/\n    writing 1048576 bytes at offset 0: No space left on device",
        "Free some space, or choose another place. `transaxle plan` tells how many bytes will be written.",
    ),
}
