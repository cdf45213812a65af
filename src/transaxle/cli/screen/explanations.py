"""The long form of every refusal, as data: what it means, a typical example, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transaxle.errors import Code


@dataclass(frozen=True, slots=True)
class Explanation:
    """One code, explained to somebody who has just met it."""

    summary: str
    """One sentence."""
    meaning: str
    """Why it is refused, and not worked around."""
    example: str
    """A message as it is printed, without the code; commands begin with `$`."""
    remedy: str
    """What to do."""


EXPLANATIONS: Mapping[Code, Explanation] = {
    "UNSAFE_PICKLE": Explanation(
        "A pickle asks for something that could run code.",
        "Checkpoints of the kinds `.pt`, `.bin`, DCP and DeepSpeed contain pickles, and a pickle is a small "
        "program: reading it with Python's own reader executes it. Pickles are only ever read by an interpreter "
        "that builds plain descriptions of tensors and knows a short list of names. Anything else it is asked for "
        "is refused by name. Nothing was executed.",
        "archive/data.pkl\n    global 'os.system' is not among the names that a checkpoint needs",
        "Do not load this file with another program either, unless you know who made it. If the name belongs to "
        "your own training code, save the tensors alone (a plain state dict, or safetensors) and convert that.",
    ),
    "PATH_ESCAPE": Explanation(
        "A name in the checkpoint leads outside its folder.",
        "An index, a link or a manifest may name files, and it may have been written by anybody. A name is followed "
        "only to a regular file inside the checkpoint's folder; links inside a Hugging Face cache are the one "
        "exception.",
        "model.safetensors.index.json\n    the index names the shard '../../.ssh/id_rsa', which is no plain file name",
        "If you made the link yourself, put the file itself into the folder, or name the real folder on the command "
        "line: a link that you type is followed.",
    ),
    "CORRUPT": Explanation(
        "The input contradicts itself or its format.",
        "A header that does not parse, an extent beyond the end of its file, an index that disagrees with its "
        "shards, a checksum that does not match, a config that is no JSON, a table with a line that has no meaning. "
        "Whatever could be read on from there would be a guess.",
        "model-00002-of-00003.safetensors\n"
        "    the file is truncated: the header promises 4,998,571,024 bytes, it has 1,207,959,552",
        "Copy or download the file again, and compare its size or hash with the original. In a table of your own, "
        "the message shows the line, the column, and what was expected there.",
    ),
    "INCOMPLETE": Explanation(
        "Something that the checkpoint announces is not there.",
        "An index or a manifest names a file or a tensor that is missing, or a region of a tensor is covered by no "
        "file. Other programs leave such tensors at their random initial values; here that is an error.",
        "model-00003-of-00007.safetensors\n"
        "    the shard is not there; the index model.safetensors.index.json places 212 tensors in it",
        "Fetch the missing file. To look at a single shard on its own, name that file instead of the folder.",
    ),
    "OVERLAP": Explanation(
        "Two stored tensors claim the same bytes.",
        "In a sound file every byte belongs to exactly one tensor. Where two overlap, at least one of them is not "
        "what its name says.",
        "model.safetensors · layers.1.weight\n    its bytes [4096, 8192) overlap those of layers.0.weight",
        "The program that wrote the file is at fault, or the file was damaged. Tensors that share memory on purpose "
        "have to be saved once, with a tie, or as copies.",
    ),
    "NAME_COLLISION": Explanation(
        "Two tensors have, or would have, the same name.",
        "The same name twice in a header, in two shards, or, after a conversion, a tensor that no line of the table "
        "knows and whose own name is one that the target writes. Keeping either one would lose the other in "
        "silence.",
        "model-00002-of-00002.safetensors · model.norm.weight\n"
        "    the tensor is in model-00001-of-00002.safetensors as well",
        "Remove the surplus shard or tensor. If a table of yours writes a name that the checkpoint already has, "
        "rename it in the table.",
    ),
    "AMBIGUOUS": Explanation(
        "Several readings fit, or the one you named does not exist.",
        "A folder with two checkpoints in it, names that two dialects read alike but hold differently, or a dialect "
        "that this family does not have. Choosing for you would be right most of the time, and silently wrong for "
        "the rest.",
        "weights/\n    several checkpoints in one place: a.safetensors, b.safetensors",
        "The message lists the candidates. Choose with --format, --family, --from or --to, or name the file itself "
        "instead of its folder.",
    ),
    "UNKNOWN_FAMILY": Explanation(
        "No table reads this model.",
        "To move an axis one has to know which tensors have it, and that stands in a table for the model's family. "
        "This checkpoint's `model_type` and names belong to none of those known here. A family is never guessed "
        "from shapes.",
        "no table reads any of its names: transformer.h.0.attn.c_attn.weight (config.json says 'gpt2')",
        "If the model is a known one under another name, say so: --family NAME. Write a table of a few lines and "
        "pass it with --rules FILE. To change only files, keep all names: --to safetensors:identity.",
    ),
    "UNKNOWN_AXIS": Explanation(
        "The size of an axis is needed and nowhere given.",
        "This conversion separates axes that the source keeps merged, for example the key-value groups inside the "
        "rows of a fused projection, and neither a manifest, nor config.json, nor the shapes tell their sizes. "
        "Also: an option names an axis that no family has.",
        "decoder.layers.{l}.self_attention.linear_qkv.weight = [(g [q:(r c) | k:c | v:c]) d]\n"
        "    the size of axis g is needed, and the shape [12, 8] does not tell it",
        "Give the model's config with --config FILE, or the size itself: --axis g=8. The table (see the "
        "documentation, Notation) says what each axis stands for.",
    ),
    "SHAPE_MISMATCH": Explanation(
        "A stored shape is not what the table and the sizes say.",
        "The rule, with the sizes of config.json filled in, gives one shape, and the file has another. Usually the "
        "config belongs to another model, the checkpoint was pruned or padded, or a wrong size was given.",
        "model.layers.0.self_attn.q_proj.weight\n    q[(g r c) d]\n    expected [4096, 2048], got [2048, 2048]",
        "Compare config.json with the checkpoint (transaxle info). A size that you gave with --axis or --config "
        "overrides everything else: is it right? A model that really is different needs a table of its own.",
    ),
    "DTYPE_MISMATCH": Explanation(
        "A dtype is not the one that the target requires.",
        "Moving a tensor never changes its dtype. Where a target can hold only one type, another one is refused "
        "instead of being cast: codes of 8-bit floats without their scales, for instance, are not numbers yet.",
        "model.layers.0.mlp.down_proj.weight\n    expected BF16, got F8_E4M3",
        "Cast plain numbers with --dtype (dtype= of load), decode encoded ones with --decode, or choose a target that "
        "holds them as they are.",
    ),
    "DTYPE_MIXED": Explanation(
        "Tensors of different dtypes would have to share one stored tensor.",
        "The target joins several weights in one tensor (gate and up, or q, k and v), and the source stores them in "
        "different types. One tensor has one type, and casting either would change values.",
        "model.layers.0.mlp.experts.gate_up_proj\n    [e [gate:f | up:f] d]\n    its parts are stored as BF16 and F32",
        "Choose a dialect that keeps them apart, or bring them to one dtype where the checkpoint was made.",
    ),
    "UNEQUAL_COPIES": Explanation(
        "Copies that should be equal are not.",
        "Two stored tensors stand for one weight: tied embeddings, or the copies of a replicated tensor. The target "
        "has room for one. They were compared before anything was committed, and their bytes differ, so one of them "
        "would be lost. Of a live model it is a tensor that several ranks hold, and that has drifted apart between "
        "them; the message names the ranks, those with equal values together.",
        "lm_head.weight\n    head = embed (tie_word_embeddings)\n    but their bytes differ",
        "If the model was trained untied, correct tie_word_embeddings in config.json (or in a file given with "
        "--config). Otherwise find out which of the two is current, and remove the other. In a live model broadcast it "
        "from one rank, and look for a gradient that is not summed; tx.save(..., check_copies=False) writes one copy.",
    ),
    "BLOCK_MISALIGNED": Explanation(
        "One scale would have to serve rows of two scales.",
        "Block-quantized weights store a scale per tile, such as 128 rows by 128 columns. Codes and scales can move "
        "to another layout untouched only if each tile of the target lies inside one tile of the source. Here it "
        "does not, and there is no exact result without decoding.",
        "model.layers.3.mlp.shared_experts.gate_proj.weight\n"
        "    [gate:f | up:f] d  with f = 576: row 576 of the target starts inside a 128-row tile of the source (576 "
        "= 4 x 128 + 64)",
        "Choose a dialect that keeps these weights apart, or have plain numbers with --decode bf16.",
    ),
    "UNSUPPORTED": Explanation(
        "Understood, but not something this release can do.",
        "The format cannot be read or written yet, the place holds no checkpoint, a dtype has no name in the "
        "target's format, or a tensor would have to be taken apart within a byte. Nothing is wrong with the input "
        "itself.",
        ".metadata · layers.0.weight\n    its bytes went through stream.zstd/1, which cannot be undone here",
        "The message says what would be needed. `transaxle info` lists what this release reads and writes.",
    ),
    "LOSSY": Explanation(
        "It could not be undone bit by bit, and you did not ask for it.",
        "A dialect may store a value with arithmetic, such as a norm weight minus one. In floating point that "
        "rounds, so the way back would not give the same bits. This never happens by default.",
        "model.norm.weight\n    norm.weight = norm[d]\n    this dialect stores norm - 1, which rounds",
        "If rounding is acceptable, allow it with --allow-lossy; the report then names what was computed.",
    ),
    "MISSING_TENSOR": Explanation(
        "A tensor that the family always has is not in the checkpoint.",
        "By its table and config the model needs this weight, and no stored tensor holds it. A file without it "
        "would load in many programs, with a random weight in its place.",
        "qwen3_moe in dialect hf lacks\n    model.layers.47.mlp.experts.127.down_proj.weight",
        "Is a shard missing, or was the checkpoint saved in part (adapters, one pipeline stage)? A part of a "
        "checkpoint still converts under its own names: --to safetensors:identity.",
    ),
    "UNEXPECTED_TENSOR": Explanation(
        "The checkpoint has a tensor that the table does not know.",
        "Tensors without a line in the target dialect normally keep their own names and are listed in the report. "
        "With --strict they are refused. In `verify` it means that a tensor was added after the checkpoint was "
        "written.",
        "model.layers.0.self_attn.rotary_emb.inv_freq\n    dialect torchtitan has no line for it",
        "Leave --strict out to keep such tensors, or give them lines in a table of your own (--rules).",
    ),
    "EXISTS": Explanation(
        "The target exists.",
        "Nothing is overwritten unless you say so, and then only a checkpoint: the files that our manifest lists, and "
        "those that frameworks write under names of their own. Where the folder holds anything else, such as notes, "
        "adapters or a repository, it is refused: a slip in a path must not cost a project. The source is never "
        "written to, so a target must not be the source, or lie inside of it or around it. A target is also refused "
        "while another run is writing it.",
        "out/\n    it exists already",
        "Choose another target, or replace it with --overwrite: the old one stays readable until the new one is "
        "complete. Move what else is in its folder elsewhere, or let it go too: --overwrite=everything. --resume "
        "continues a conversion that was interrupted.",
    ),
    "IO": Explanation(
        "The machine could not read or write.",
        "A path that does not exist, a permission, a disk error, or a network file system that gave up. The message "
        "is the operating system's.",
        "Qwen3-30B-A3/\n    there is no such file or folder\n    Did you mean Qwen3-30B-A3B?",
        "Check the path and its permissions. After a disk error, run the same command again with --resume.",
    ),
    "NO_SPACE": Explanation(
        "There is not enough space for the target.",
        "Space is reserved before the first byte is copied, wherever the file system can do that, so this usually "
        "comes at once and not after an hour. What was begun has been removed.",
        "out/\n    writing 1048576 bytes at offset 0: No space left on device",
        "Free space there or choose another place. `transaxle plan` says how much will be written.",
    ),
}
