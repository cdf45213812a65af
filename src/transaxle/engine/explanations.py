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
    """Why Transaxle refuses the input instead of working around the problem."""
    example: str
    """A typical message as it is printed, without the code; lines with commands begin with `$`."""
    remedy: str
    """What the user can do about the refusal."""

    def as_json(self) -> dict[str, str]:
        """Return the explanation as plain JSON data."""
        return {"summary": self.summary, "meaning": self.meaning, "example": self.example, "remedy": self.remedy}

    def __str__(self) -> str:
        return "\n\n".join((self.summary, self.meaning, self.example, self.remedy))


def explain(refusal_code: str) -> Explanation:
    """Explain a refusal code at length, as in `tx.explain(error.code)`.

    Args:
        refusal_code: one of `tx.CODES`, in upper or lower case.

    Returns:
        The explanation; `print` shows it in the same form as the command `transaxle explain`.
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
        "A pickle in the checkpoint asks for something that could run code.",
        "`.pt` and `.bin` files, DCP and DeepSpeed checkpoints contain pickles. A pickle is a small program, and "
        "Python's own reader executes it. Transaxle never executes a pickle: its own interpreter only builds "
        "descriptions of tensors, and accepts a short list of names. A pickle that asks for any other name is "
        "refused. No code of the pickle was executed.",
        "archive/data.pkl\n    the pickle asks for os.system, which is not on the list of harmless names",
        "Do not load this file with another program either, unless you know who made it. If the name belongs to "
        "your own training code, save only the tensors (a plain state dict, or safetensors) and convert that.",
    ),
    "PATH_ESCAPE": Explanation(
        "A name in the checkpoint leads outside its folder.",
        "Indexes, links and manifests name files, and anybody may have written them. Transaxle opens only regular "
        "files inside the checkpoint's folder. The only exception is a link inside a Hugging Face cache.",
        "model.safetensors.index.json\n"
        "    the index names the shard '../../.ssh/id_rsa', which is not a plain file name",
        "If you made the link yourself, copy the file into the folder, or give the real folder on the command line: a "
        "link whose path you type yourself is followed.",
    ),
    "CORRUPT": Explanation(
        "The input contradicts itself or its format.",
        "For example: a header that does not parse, a tensor whose bytes lie beyond the end of its file, an index "
        "that disagrees with its shards, a checksum that does not match, a config that is not JSON, or an invalid "
        "line in a table of tensor names. After such a contradiction, any further reading would be a guess.",
        "model-00002-of-00003.safetensors · model.layers.20.mlp.up_proj.weight\n"
        "    the file is truncated: its tensors take 4998571024 bytes, but there are only 1207959552",
        "Copy or download the file again, and compare its size or hash with the original. If the mistake is in your "
        "own table of tensor names, the message shows its line and column, and what was expected at that position.",
    ),
    "INCOMPLETE": Explanation(
        "A file or a tensor that the checkpoint lists is missing.",
        "An index or a manifest names a file or a tensor that is missing, or no file contains some region of a "
        "tensor. Many programs leave such tensors at their random initial values; Transaxle refuses the checkpoint.",
        "model-00003-of-00007.safetensors\n"
        "    the shard is missing; the index model.safetensors.index.json places 212 tensors in it",
        "Download or copy the missing file. To look at a single shard, name its file instead of the folder.",
    ),
    "OVERLAP": Explanation(
        "Two stored tensors claim the same bytes.",
        "In a valid file every byte belongs to exactly one tensor. If two tensors overlap, at least one of the two "
        "has wrong values.",
        "model.safetensors · layers.1.weight\n"
        "    data_offsets [2048, 6144] overlap 'layers.0.weight', which ends at 4096",
        "The file was damaged, or the program that wrote it has a bug. Tensors that share memory on purpose must be "
        "saved once, with a tie, or as copies.",
    ),
    "NAME_COLLISION": Explanation(
        "Two tensors have, or would have, the same name.",
        "A tensor name occurs twice in one header or in two shard files. Or, in a conversion, a tensor that keeps its "
        "name has a name that the target dialect also writes. If only one of the two tensors were kept, the other "
        "would be lost silently.",
        "model-00002-of-00002.safetensors · model.norm.weight\n"
        "    the tensor is also in model-00001-of-00002.safetensors",
        "Remove the surplus shard file or tensor. If your own table writes a tensor name that the checkpoint already "
        "has, change that name in the table.",
    ),
    "AMBIGUOUS": Explanation(
        "The input can be read in several ways, or the choice that you gave does not exist.",
        "The folder contains two checkpoints; or two dialects use the same tensor names but store the tensors "
        "differently; or the family does not have the dialect that you gave; or there is no format of the name that "
        "you gave. A guess would often be right, and silently wrong in all other cases.",
        "weights/\n    the folder holds several checkpoints: a.safetensors, b.safetensors",
        "The message lists the candidates. Choose with --format, --family, --from or --to, or name the file itself "
        "instead of its folder.",
    ),
    "UNKNOWN_FAMILY": Explanation(
        "Transaxle has no table of tensor names for this model.",
        "To move an axis, Transaxle must know which tensors have that axis. This is stated in the table of the "
        "model's family, and no known table contains this checkpoint's `model_type` and tensor names. A family is "
        "never guessed from shapes.",
        "the model type 'ctrl' of config.json is unknown, and no table knows any of the tensor names: lm_head.bias",
        "Most families are recognised only by their model_type or their name, so a checkpoint without config.json "
        "needs --config FILE or --family NAME. A known model with a different model_type needs --family NAME too. For "
        "any other model of transformers, the option --derive (of convert and plan) derives a table from the "
        "installed transformers; `transaxle derive FOLDER -o NAME.rules` stores this table in a file, which all "
        "commands accept with --rules NAME.rules. A model that transformers does not know needs a table of a few "
        "lines, written by hand. To change only the file format, keep all tensor names with --to "
        "safetensors:identity.",
    ),
    "UNKNOWN_AXIS": Explanation(
        "The size of an axis is needed but unknown.",
        "This conversion separates axes that the source stores merged, for example the key-value groups inside the "
        "rows of a fused projection. Neither a manifest nor config.json nor the tensor shapes show the sizes of these "
        "axes. The same code is used if an option names an axis that the family does not have.",
        "decoder.layers.{l}.self_attention.linear_qkv.weight = [(g [q:(r c) | k:c | v:c]) d]\n"
        "    the size of axis g is needed, and the shape [12, 8] does not determine it",
        "Give the model's config with --config FILE, or the size itself: --axis g=8. The table of the model's family "
        "states what each axis counts (docs/reference/notation.md explains how to read a table).",
    ),
    "SHAPE_MISMATCH": Explanation(
        "A stored tensor does not have the shape that follows from the table of the model's family and the config.",
        "A shape was computed from the table's line for this tensor and the sizes in config.json, and the file "
        "contains a different shape. Usually the config belongs to a different model, the checkpoint was pruned or "
        "padded, or a size on the command line is wrong.",
        "model.layers.0.self_attn.q_proj.weight\n    q[(g r c) d]\n    expected [4096, 2048] (c=128, d=2048, "
        "g*r=32), got [2048, 2048]",
        "Compare config.json with the checkpoint (transaxle info). Check the sizes that you gave with --axis or "
        "--config: these sizes override all others. A model whose architecture differs needs its own table. A derived "
        "table may take a size from the wrong config key, if two keys had equal values in all configs from which the "
        "table was derived. `transaxle info --family NAME` prints the table, so that you can correct its axes and "
        "give the file with --rules.",
    ),
    "DTYPE_MISMATCH": Explanation(
        "A tensor does not have the dtype that the target requires.",
        "Moving a tensor never changes its dtype. If the target accepts only one dtype, a tensor with a different "
        "dtype is refused instead of being cast. For instance, a cast of the codes of a quantized tensor would not "
        "result in the weight's values.",
        "model.layers.0.mlp.down_proj.weight\n    its dtype is BF16 in the model, but F32 in the source",
        "Cast plain tensors with --dtype (dtype= of load), decode quantized tensors with --decode, or choose a target "
        "that can store both unchanged.",
    ),
    "DTYPE_MIXED": Explanation(
        "Tensors of different dtypes would have to share one stored tensor.",
        "The target joins several weights in one tensor (gate and up, or q, k and v), and the source stores these "
        "weights with different dtypes. A tensor has only one dtype, and a cast would change values.",
        "model.layers.0.mlp.experts.gate_up_proj\n    [e [gate:f | up:f] d]\n    its parts are stored as BF16 and F32",
        "Choose a dialect that stores these weights separately, or cast them to one dtype with --dtype.",
    ),
    "UNEQUAL_COPIES": Explanation(
        "Two copies of a tensor that should be equal differ.",
        "Two stored tensors are the same weight, such as tied embeddings or replicas, and the target stores this "
        "weight once. The bytes of the two copies differ, so the values of one copy would be lost. The copies were "
        "compared before the target was written. If a live model is being saved, several ranks hold the same tensor "
        "with different values; the message lists the ranks, grouped by equal values.",
        "lm_head.weight\n"
        "    lm_head.weight = head[n d] and model.embed_tokens.weight = embed[n d] hold the same tensor\n"
        "    but their bytes differ",
        "If the model was trained untied, correct tie_word_embeddings in config.json (or in a file given with "
        "--config). Otherwise find out which copy is current, and remove the outdated copy. In a live model, "
        "broadcast the tensor from one rank, and look for a gradient that the training does not sum over the ranks; "
        "tx.save(..., check_copies=False) writes one of the copies.",
    ),
    "BLOCK_MISALIGNED": Explanation(
        "A tile (a block of a quantized weight with one scale) of the target would need two scales.",
        "Block-quantized weights store one scale per tile, such as 128 rows by 128 columns. Codes and scales can move "
        "unchanged to another layout only if each tile of the target lies inside one tile of the source. At least one "
        "tile of this target does not, so without decoding no exact result exists.",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight\n"
        "    decoder.layers.{l}.mlp.shared_experts.linear_fc1.weight = [[shared_gate:s | shared_up:s] d]\n"
        "    its tile (4, 0) of 128 x 128, positions [512, 640) x [0, 128), has one scale, but comes from\n"
        "      model.layers.0.mlp.shared_experts.gate_proj.weight, tile (4, 0)\n"
        "      model.layers.0.mlp.shared_experts.up_proj.weight, tile (0, 0), from position 576 = 4 x 128 + 64 on",
        "Choose a dialect that stores these weights separately, or decode them with --decode bf16.",
    ),
    "UNSUPPORTED": Explanation(
        "This release of Transaxle does not support the input or the request.",
        "The input may be valid, but Transaxle cannot read or write its format yet; or the folder contains no "
        "checkpoint; or the target format cannot store a dtype; or a tensor would have to be split inside a byte.",
        ".metadata · layers.0.weight\n    the bytes are compressed or transformed (stream.zstd/1), which is not "
        "supported",
        "The message names the unsupported feature. `transaxle info` lists the formats that this release reads and "
        "writes.",
    ),
    "LOSSY": Explanation(
        "The conversion would round values, and you did not allow rounding.",
        "Some dialects store a computed value, such as a norm weight minus one. In floating point this subtraction "
        "rounds, so converting back would not result in the same bits. Transaxle never rounds without your consent.",
        "model.norm.weight\n    model.norm.weight = norm[d]\n    the values are computed and rounded: norm - 1",
        "If rounding is acceptable, allow it with --allow-lossy; the report then lists the tensors whose values were "
        "computed.",
    ),
    "MISSING_TENSOR": Explanation(
        "A tensor that the model needs is not in the checkpoint.",
        "According to the table of its family and the config, the model has this weight, but no stored tensor "
        "contains it. Many programs would load the result anyway, with random values for this weight. If you ask for "
        "an optimizer's state (--optimizer), the code means that the checkpoint has no optimizer state.",
        "qwen3_moe in dialect hf lacks these tensors:\n    model.layers.47.mlp.experts.127.down_proj.weight",
        "Check whether a shard file is missing, or whether the checkpoint contains only a part of the model (an "
        "adapter, one pipeline stage). A part of a model can be converted with its own tensor names: --to "
        "safetensors:identity.",
    ),
    "UNEXPECTED_TENSOR": Explanation(
        "The checkpoint has a tensor that the table of the model's family does not know.",
        "A tensor for which the target dialect has no line normally keeps its name, and the report lists it. With "
        "--strict such a tensor is refused. In the following cases a tensor is always refused. Other tensors of the "
        "same layer or module get new names, so that no program would look for this tensor under its old name. The "
        "config states that the model does not have this tensor. It is a nonzero bias of a torchtitan router, and the "
        "target's model has no such bias. It belongs to a layer or expert beyond the number in the config or --axis, "
        "so that the converted model would lack it. It is the head of a model, and the dialect that fits the other "
        "names has no line for a head. In `verify`, the code means that a tensor was added after the checkpoint was "
        "written.",
        "model.layers.0.self_attn.rotary_emb.inv_freq\n    dialect torchtitan has no line for this tensor",
        "Omit --strict to keep such tensors under their names, or add lines for them to your own table (--rules).",
    ),
    "EXISTS": Explanation(
        "The target already exists, or must not be replaced.",
        "Nothing is overwritten without --overwrite. With it, only a checkpoint is overwritten: the files that "
        "Transaxle's manifest lists, and files with the names that frameworks use. If the folder contains any other "
        "file, such as notes, adapters or a repository, the target is refused, so that a typing error in a path does "
        "not delete a project. The source is never changed, so the target must not be the source, lie inside the "
        "source, or contain the source. A target that another run is writing is refused too.",
        "out/\n    the target already exists",
        "Choose another target, or replace it with --overwrite; the old checkpoint stays readable until the new one "
        "is complete. Move files that do not belong to the checkpoint out of the folder, or delete them too with "
        "--overwrite=everything. --resume continues an interrupted conversion.",
    ),
    "IO": Explanation(
        "The machine could not read or write a file.",
        "A path does not exist, a permission is missing, the disk failed, or the network file system gave up. The "
        "message usually comes from the operating system.",
        "Qwen3-30B-A3/\n    no such file or folder\n    Did you mean Qwen3-30B-A3B?",
        "Check the path and its permissions. After a disk error, run the same command again with --resume.",
    ),
    "NO_SPACE": Explanation(
        "There is not enough space for the target.",
        "Transaxle reserves the space before it copies the first byte, if the file system can do that, so this error "
        "usually appears immediately. The unfinished files have been removed.",
        "out/\n    writing 1048576 bytes at offset 0: No space left on device",
        "Free some space, or choose another place. `transaxle plan` prints how many bytes will be written.",
    ),
}
