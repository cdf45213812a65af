"""Advice is followed: what hints and notes say to type is typed, word for word, and then it works.

Each entry of `LINES` ends with a command that gets advice. Every option and command in that advice is tried: alone
where the text says "or", together where it says "and". The command then succeeds, without the same advice. Texts that
no entry provokes are counted: the number only goes down, so that a new text needs an entry.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from tests.advised_sources import ADVISED
from tests.cli.running import Outcome
from tests.golden.record import stop
from tests.golden.sources import SOURCES
from tests.some import some
from tests.test_hints import COMMANDS, OPTION, texts_by_module
from transaxle.cli import main
from transaxle.cli.command import program
from transaxle.errors import _PROSE as PROSE
from transaxle.formats.training_state import LEFT_BEHIND
from transaxle.serving import HubServer

UNFOLLOWED = {
    "another program's options, or files that only it writes": (("formats/megatron", "formats/deepspeed"), 13),
    "a service, a cluster, or a run that dies halfway": (("formats/store", "engine/distribute", "live/torchrun"), 20),
    "a program that trains or serves, in Python": (("live", "quant", "refit"), 4),
    "other programs' environments, which need minutes to run": (("readers",), 8),
    "deriving a table, which takes minutes": (("derivation",), 7),
    "a page that is looked at": (("reports",), 3),
    "more than a million tensors": (("formats/torch_file/draft.py",), 1),
    "no source yet": (("",), 0),
}
"""What it takes to follow a text -> the modules that show such texts, and how many texts with an option or a command
nobody follows; only ever lower the numbers."""

Values = Mapping[str, str]
CONFIG: Values = {"FILE": "llama.json"}
BASE: Values = {"BASE": "llama", "ADAPTER": "adapter", "OUT": "out", "DIALECT": "te"}
MERGED: Values = {"PLAIN": "plain", "CAST": "plain", "OUT": "merged"}
LINES: tuple[tuple[str, Values], ...] = (
    ("convert llama out --to torchtitan", {}),
    ("convert llama out --to automodel", {}),
    ("convert llama out --to te", {}),
    ("convert llama out --to vllm", {}),
    ("convert llama_fp8 out --to te", {}),
    ("convert llama_fp8 out --to dcp:torchtitan@0.2", {}),
    ("convert deepseek_v3 out --to torch_dist", {}),
    ("convert deepseek_v3 out --to hf --decode fp16", {}),
    ("convert llama out --to dcp:torchtitan --encode mxfp8", {}),
    ("convert llama out --to megatron_torch --encode mxfp8 --tp 2", {}),
    ("convert titan out --to safetensors:transformers", {}),
    ("convert titan out --to torch_dist", {}),
    ("convert ranks_moe out --to vllm_sharded --optimizer", {}),
    ("convert llama.pt out --to hf", CONFIG),
    ("convert llama.pt out --to torchtitan", {**CONFIG, "g=N": "g=2"}),
    ("convert unknown out --to hf", {}),
    ("convert llama out.pt --to dcp:hf", {}),
    ("convert llama out --to gguf:hf", {}),
    ("convert llama out --to safetensors:nonsense", {}),
    ("convert llama_fp8 out --to bf16", {}),
    ("convert llama out --to mxfp8", {}),
    ("convert adapter out --to torchtitan", {"BASE": "llama"}),
    ("convert llama out --to megatron_torch --tp 3", {"--tp": "2"}),
    ("convert llama out --to megatron_torch --pp 3", {"--pp": "2"}),
    ("convert llama out --to megatron_torch --ep 2", {"--ep": "1"}),
    ("convert qwen3_moe out --to vllm_sharded --tp 2 --ep 4", {}),
    ("convert llama out --to vllm_sharded --pp 2", {}),
    ("convert llama out --to vllm_sharded:torchtitan", {}),
    ("convert llama out --to torch_dist --pp 2", {}),
    ("convert llama out --to ranks --pp 2", {}),
    ("convert llama out --to hf --tp 2", {}),
    ("convert llama out --to hf --dp 2", {}),
    ("convert llama out --to dcp:torchtitan --make-vocab-size-divisible-by 64", {}),
    ("convert ranks out --to dcp:hf --pp 2", {}),
    ("convert llama out --to hf --weights lp", {}),
    ("convert llama out --to dcp:hf --optimizer", {}),
    ("convert llama out --to hf --average-replicas", {}),
    ("convert drifted out --to deepspeed-universal", {}),
    ("convert qwen3_moe out --to torchtitan --config llama.json", {}),
    ("convert qwen3_moe out --to torchtitan --axis e=4", {"e=N": "e=8"}),
    ("convert llama out --to te --axis zz=3", {"PATH": "llama"}),
    ("convert llama out --to torchtitan --family qwen3", {}),
    ("convert llama out --to hf --from identity", {}),
    ("convert pair out --to safetensors:two --rules pair.rules --from two", {}),
    ("convert pair out --to safetensors:two", {"FILE": "pair.rules", "FAMILY": "llama"}),
    ("convert llama out --to hf --decode bf16", {}),
    ("convert llama_fp8 out --to hf --encode float8_block", {"PATTERN": "lm_head.weight"}),
    ("convert llama_fp8 out --to hf --restate mxfp8", {}),
    ("convert llama_fp8 out --to hf --restate bf16", {}),
    ("convert qwen3_moe out --to hf --encode nvfp4", {"--only": "*q_proj.weight", "--skip": "*down_proj*"}),
    ("convert torch_dist out --to hf --weights fp32", {}),
    ("convert adapter out --to torch_dist --config llama.json", BASE),
    ("stop llama; convert llama out --to hf", {}),
    ("convert llama out --to hf; convert qwen3 out --to hf", {}),
    ("convert llama out --to hf; write out/notes.txt; convert qwen3 out --to hf", {}),
    ("convert llama out --to hf; flip out/model.safetensors; convert out again --to torchtitan", {}),
    ("convert llama out --to hf; write out/config.json; convert out again --to identity", CONFIG),
    ("verify llama llama --decode bf16", {}),
    ("info llama --optimizer", {}),
    # names, families, tables
    ("convert llama ./out --to ./out", {"--to": "hf"}),
    ("convert unknown out --to te --family nonsense", {}),
    ("convert my_type out --to hf", {"--derive": ""}),
    ("convert odd_type out --to hf", {"--derive": "", "--rules": ""}),
    ("convert torchtune out --to te", {}),
    ("convert bare out --to torchtitan", {"--config": "llama.json", "g=N": "g=2"}),
    ("convert pair out --to safetensors:two --from one", {"FILE": "pair.rules"}),
    ("convert prefixed out --to te", {}),
    ("convert pair out --to torch_dist --rules pair.rules", {}),
    ("supports typeless.json --to te", {"NAME": "llama"}),
    ("convert wrapped out --to torchtitan", {}),
    ("convert adapted out --to te", {}),
    ("convert surplus out --to te --strict", {}),
    # sizes and values
    ("convert llama out --to torchtitan --config narrow.json", {"--config": "llama.json", "--axis": "g=2"}),
    ("convert llama out --to torchtitan --config short.json", {"--config": "llama.json", "l=N": "l=2"}),
    ("convert untied out --to te", {"FILE": "untied.json"}),
    ("convert mixed out --to te", {"--dtype": "bf16"}),
    ("convert infinite out --to hf --dtype fp16", {"NAME": "model.layers.0.self_attn.q_proj.weight"}),
    ("convert llama out --to fp8", {}),
    ("convert llama out --to fp4", {}),
    ("convert llama out --to fp16", {}),
    ("convert llama_fp8 out --to float32", {}),
    # quantized
    ("convert odd_key out --to te", {}),
    ("convert gptq out --to te", {}),
    ("convert gptq out --to hf --dtype fp16", {}),
    ("convert llama_fp8 out --to vllm_sharded", {}),
    ("convert ahead out --to hf", {"BASE": "base"}),
    # ranks and steps
    ("convert qwen3_moe out --to vllm_sharded --tp 2 --ep 3", {}),
    ("convert llama out --to megatron_torch:identity --tp 2", {"FORMAT": "megatron_torch", "DIALECT": "megatron"}),
    ("convert universal out --to hf --weights lp", {}),
    ("convert trainer out --to dcp:hf --optimizer", {}),
    ("convert no_config out --to hf", CONFIG),
    ("convert cut_anyhow out --to hf", {}),
    ("verify llama llama --weights lp", {}),
    # grafts and adapters
    ("convert llama out --to hf --graft llama", {"PATTERN": "lm_head.weight"}),
    ("convert headless out --to hf --graft qwen3", {"--graft": "llama"}),
    # unfinished work, reports
    ("stop llama; convert llama out --to hf --shard-size 1KB --resume", {"--resume": ""}),
    ("report llama -o out.html; report llama -o out.html", {}),
    # readers
    ("check adapter --for transformers", {"BASE/config.json": "llama.json"}),
    ("check zero --for sglang", {"DST": "out"}),
    ("check my_type --for sglang", {"my.rules": "my_llama.rules"}),
    ("check-rules odd.rules", {}),
    ("convert uneven out --to te", {}),
    ("convert biased out --to te", {"FILE": "biased.json"}),
    ("convert bare_headless out --to hf", {"FILE": "tied.json"}),
    ("convert zero_of_two out --to hf", {}),
    ("convert two_gptq out --to hf --decode bf16", {"FILE": "gptq.json"}),
    ("convert headless out --to hf --graft wide", {"--graft": "llama"}),
    ("convert gpt_oss out --to identity --decode bf16", {"FORMAT": "safetensors"}),
    ("convert numbered out --to dcp:torchtitan --optimizer", {}),
    ("convert base out --to hf --encode nvfp4 --skip '*q_proj*'", {}),
    ("supports gptq.json --to te", {"SRC": "llama", "DST": "out", "TARGET": "te"}),
    ("convert odd_name/weights.ckp out --to identity", {}),
    ("convert rank_files out --to hf --ranks abc", {"model_rank{}.pt": "model_world_size_4_rank_{}.pt"}),
    ("convert llama out --to hf --format safetensors --ranks 'model{}.pt'", {"--format": ""}),
    ("convert llama out --to dcp:hf --shard-size 1B", {}),
    ("convert padded out --to megatron_torch --tp 2 --axis p=0", {}),
    ("convert copyless out --to megatron_torch --pp 3", {}),
    ("convert base out --to megatron_torch", {}),
    ("convert only_codes out --to identity --dtype bf16", {}),
    ("convert bare_trainer out --to dcp --optimizer", {}),
    ("convert llama out --to hf --graft headless --graft-over lm_head.weight", {"--graft-over": "model.norm.weight"}),
    ("check te_names --for sglang", {"DST": "out"}),
    ("check nvfp4 --for llama.cpp", {"DST": "out"}),
    ("check headless --for sglang", {"DST": "out", "BASE": "llama"}),
    # tables and configs that lack something
    ("convert folded out --to safetensors:other --rules fold.rules", {"FILE": "fold.json"}),
    ("convert joined out --to safetensors:two --rules part.rules --from one", {"--rules": "parted.rules"}),
    ("convert other_cuts out --to hf --rules my_llama.rules", {"FILE": "down.rules"}),
    ("convert bare_surplus out --to te --axis g=2", {}),
    ("convert shifted out --to safetensors:minus --rules shifted.rules --family shifted", {}),
    ("convert balanced out --to hf", {}),
    ("convert ranks out --to hf --config small_vocabulary.json", {}),
    ("convert gptq_bare out --to hf --family llama --decode bf16", {"--config": "gptq_full.json", "--to": ""}),
    ("convert gptq_alone out --to safetensors:identity --restate compressed_tensors", {"FILE": "gptq_plain.json"}),
    # codes
    ("convert nvfp4 out --to te", {}),
    ("convert nvfp4 out --to hf --restate te", {}),
    ("convert nvfp4 out --to hf --restate torchao", {}),
    ("convert nvfp4_of_float32 out --to hf", {"SRC": "out", "DST": "plain"}),
    ("convert nvfp4_of_float32 out --to safetensors:identity --restate compressed_tensors", {}),
    ("convert two_scales out --to te", {"--decode": "bf16"}),
    ("convert wide_mlp out --to hf --encode float8_block --memory 384KiB", {"--memory": "2MB"}),
    ("convert odd_scale out --to identity --dtype bf16", {"NAME": "a.scale", "--only": "a.scale"}),
    ("convert fp8_cache out --to hf --decode bf16", {"--skip": "*q_proj.weight"}),
    ("convert partly_plain out --to hf", {}),
    ("convert partly_listed out --to hf", {}),
    ("convert four_bits out --to vllm_sharded --tp 2", {}),
    ("convert pair_of_four_bits out --to safetensors:two --rules pair.rules --from one", {}),
    # adapters and bases
    ("convert adapter_uneven out --to te --config llama.json", {**BASE, "ADAPTER": "adapter_uneven"}),
    (
        "convert adapter_tenth out --to te --config llama.json",
        {**MERGED, "BASE": "llama", "ADAPTER": "adapter_tenth", "FORMAT:DIALECT": "te"},
    ),
    ("convert llama_fp8 out --to hf --merge adapter_fp8", {"SRC": "llama_fp8", **MERGED, "ADAPTER": "adapter_fp8"}),
    ("convert half out --to hf --merge adapter_huge", {"SRC": "half", **MERGED, "ADAPTER": "adapter_huge"}),
    ("convert text_fp8 out --to hf --graft whole", {"SRC": "text_fp8", **MERGED, "BASE": "whole"}),
    # optimizers
    ("info trained", {}),
    ("convert factored out --to dcp:torchtitan --optimizer", {}),
    ("convert two_groups out --to dcp:te --optimizer", {}),
    ("convert with_state out --to dcp:torchtitan --optimizer", {"--config": "unfused.json"}),
    ("convert flat_ranks out --to dcp --optimizer", {}),
    ("convert damaged_state out --to dcp:hf --optimizer", {}),
    # files and folders
    ("convert two_kinds out --to identity", {}),
    ("convert no_common out --to hf", {}),
    ("convert lost_state out --to hf", {}),
    ("convert lost_ranks out --to dcp:hf --optimizer", {}),
    ("convert other_cuts out --to hf", {"FILE": "down.rules", "--family": ""}),
    ("convert of_another_package out --to te --no-check-source", {"NAME": "safetensors"}),
    ("convert flipped.pt out --to identity", {"SRC": "flipped.pt"}),
    ("convert edited out --to te", {"SRC": "edited"}),
    (
        "convert rank.pt out --to identity",
        {"rank.pt": "rank_files", "model_rank{}.pt": "model_world_size_4_rank_{}.pt"},
    ),
    ("convert meta out --to hf --config llama.json", {"meta": "meta/consolidated.00.pth"}),
    ("stop llama; ls .out.transaxle-partial", {"TARGET": "out"}),
    ("plan llama out --to hf --write out.plan; work out.plan --items 0", {"PLAN": "out.plan"}),
    ("plan llama out --to hf --write out.plan; work out.plan --begin; work out.plan --commit", {"PLAN": "out.plan"}),
    ("serve llama --name bad--name", {"ORG/MODEL": "my/llama"}),
)
"""Commands, of which the last gets advice, and what to put in for the placeholders in the advice. Advice with an
option whose value is empty is not followed."""

_PYTHON = re.compile(r" \([a-z_]+=[^()]*\)|, [a-z_]+=[^(),]*(?=\))")
"""The Python spelling of an option, which stands after that of the command line."""
_CLAUSE = re.compile(r"\n|\. |; |: +|,? or |\(or |,? and then ")
_WORD = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*[a-z])(?:( |=)('[^']*'|[^\s,;)(.]+(?:\.[^\s,;)(.]+)*))?")
_PLACEHOLDER = re.compile(r"(?<![\w.*])[A-Z]+(?![\w.*])")
_OMIT = re.compile(r"([Oo]mit|[Ll]eave out|without) --")
_IN_TURN = re.compile(r"\bthen\b[^-]*transaxle")
"""Advice of two commands, of which the second needs what the first writes."""
_INSTEAD_OF = re.compile(r"instead of (--[a-z-]+)")
_VALUE = re.compile(r"VALUE|\{[a-z]+\}")
"""A value in a text."""
_REPLACED = ("--decode", "--dtype", "--encode", "--restate", "--resume")
"""Options in whose place advice gives others."""


class Attempt(NamedTuple):
    """One way to follow a piece of advice, after the commands that provoked it."""

    advice: str
    message: str
    """Message above the advice."""
    command: Sequence[str]
    outcome: Outcome

    @property
    def worked(self) -> bool:
        if self.command[0] == "verify" and len(self.command) == 2:
            return self.outcome.code == 1  # it lists what is damaged
        return self.outcome.code == 0 and self.advice not in self.outcome.out


def _flags(verb: str) -> dict[str, bool]:
    """Option of a command -> whether it has no value."""
    params = some(program.get_command(click.Context(program), verb)).params
    return {
        word: each.is_flag or each.name == "overwrite"
        for each in params
        if isinstance(each, click.Option)
        for word in (*each.opts, *each.secondary_opts)
    }


def ways(line: Sequence[str], advice: str, values: Values) -> Iterator[list[str]]:
    """Yield the commands that the advice tells to type, without those for whose placeholders there is no value."""
    line = [word if word.startswith("-") else values.get(word, word) for word in line]
    for clause in map(_without_stop, _CLAUSE.split(_PYTHON.sub("", advice))):
        command = COMMANDS.search(clause)
        if command:
            words = shlex.split(_fill(command[0].rstrip("`."), values))[1:]
            words += ["--yes"] if words[0] == "clean" else []  # a terminal would be asked
        elif OPTION.search(clause):
            words = _changed(line, clause, values)
        else:
            continue
        if words and not any(_PLACEHOLDER.search(word) for word in words):
            yield words


def _without_stop(clause: str) -> str:
    return clause.strip().removesuffix(".")


def _fill(text: str, values: Values) -> str:
    for name, value in values.items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", value, text)
    return text


def _changed(line: Sequence[str], clause: str, values: Values) -> list[str]:
    """Return a command with the options that a clause says to add, change or omit; empty if it gives no value."""
    words, omits, flags = list(line), _OMIT.search(clause), _flags(line[0])
    superseded = {*_INSTEAD_OF.findall(clause)} or set(_REPLACED if "instead" in clause else ())
    clause = _INSTEAD_OF.sub("", clause)
    for option, sign, literal in _WORD.findall(clause):
        if option not in flags or values.get(option) == "":
            return []
        dropped = {option} if omits or not flags[option] else set()
        for each in (dropped | superseded) & set(words):
            at = words.index(each)
            del words[at : at + 2 - flags[each]]
        if omits:
            continue
        value = values.get(option) or _fill(literal.strip("'"), values)
        if sign == "=":
            words.append(f"{option}={value}")
        elif flags[option]:
            words.append(option)
        elif value and value not in PROSE:
            words += [option, value]
        else:
            return []
    return words


def _advice_in(document: Any) -> dict[str, str]:
    """Return hint -> message of refusals; if nothing is refused, remedies of findings, notes, and reasons why files are
    left behind.
    """
    refusals = document.get("error", {}).get("refusals", ()) or document.get("refusals", ())
    hints = {each["hint"]: each["message"] for each in refusals if each["hint"]}
    remedies = {each["remedy"]: each["effect"] for each in document.get("findings", ()) if each["remedy"]}
    reasons = document.get("metadata", {}).get(LEFT_BEHIND, {})
    return hints or remedies | dict.fromkeys([*document.get("notes", ()), *reasons.values()], "")


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> list[Attempt]:
    """All advice of all entries, followed."""
    folder = tmp_path_factory.mktemp("advice")
    for name, make in {**SOURCES, **ADVISED}.items():
        make(folder / name)
    made = {each.name for each in folder.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(HubServer, "wait", lambda _: None)  # it ends as soon as it serves
        return [attempt for line, values in LINES for attempt in _follow(line, values, made)]


def _follow(line: str, values: Values, made: set[str]) -> Iterator[Attempt]:
    def clear() -> None:
        for path in Path().iterdir():
            if path.name not in made:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def prepare() -> None:
        clear()
        for each in first:
            _carry_out(shlex.split(each))

    *first, last = (each.strip() for each in line.split(";"))
    words = shlex.split(last)
    prepare()
    for advice, message in _advice_in(json.loads(_run(*words, "--json").out)).items():
        for number, command in enumerate(ways(words, advice, values)):
            if not number or not _IN_TURN.search(advice):
                prepare()
            outcome = _run(*command)
            if outcome.code == 0 and words[0] == "check" and command[0] == "convert":
                outcome = _run(words[0], command[2], *words[2:])  # the reader loads what the advised command writes
            yield Attempt(advice, message, command, outcome)
    clear()


def _carry_out(words: Sequence[str]) -> None:
    file = Path(words[1])
    if words[0] == "stop":
        stop(words[1], after=80_000, to="hf", resume=True)
    elif words[0] == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}" if file.suffix == ".json" else "mine")
    elif words[0] == "flip":
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        assert _run(*words).code == 0, words


def _run(*words: str) -> Outcome:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(words))
    return Outcome(code, out.getvalue(), err.getvalue())


def test_what_is_advised_works(attempts: list[Attempt]) -> None:
    failed = [(each.advice, shlex.join(each.command), each.outcome.err) for each in attempts if not each.worked]
    assert failed == []


def test_every_text_has_a_follower(attempts: list[Attempt]) -> None:
    """A text with values in it is followed if one with its words was."""
    given = _PYTHON.sub("", "\n\n".join({text for each in attempts for text in (each.advice, each.message)}))
    verbs = program.list_commands(click.Context(program))
    command = re.compile(rf"transaxle ({'|'.join(verbs)})\b")
    advice = {
        text: module
        for module, text in texts_by_module()
        if (OPTION.search(text) and not OPTION.fullmatch(text)) or command.search(text)
    }
    left = {
        text: module
        for text, module in advice.items()
        if not re.search(".{0,300}".join(map(re.escape, _VALUE.split(_PYTHON.sub("", text)))), given)
    }
    for modules, limit in UNFOLLOWED.values():
        texts = sorted(text for text, module in left.items() if module.startswith(modules))
        assert len(texts) <= limit, texts
        left = {text: module for text, module in left.items() if text not in texts}
