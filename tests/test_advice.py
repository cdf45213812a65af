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

from tests.cli.running import Outcome
from tests.golden.record import stop
from tests.golden.sources import SOURCES
from tests.some import some
from tests.test_hints import COMMANDS, OPTION, texts
from transaxle.cli import main
from transaxle.cli.command import program
from transaxle.errors import _PROSE as PROSE
from transaxle.errors import in_both_languages

UNFOLLOWED = 181
"""How many texts with an option or a command nobody follows; only ever lower it."""

Values = Mapping[str, str]
CONFIG: Values = {"FILE": "llama.json"}
BASE: Values = {"BASE": "llama", "ADAPTER": "adapter", "OUT": "out", "DIALECT": "te"}
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
)
"""Commands, of which the last gets advice, and what to put in for the placeholders in the advice."""

_PYTHON = re.compile(r" \([a-z_]+=[^()]*\)|, [a-z_]+=[^(),]*(?=\))")
"""The Python spelling of an option, which stands after that of the command line."""
_CLAUSE = re.compile(r"\n|\. |; |: +|,? or |\(or |,? and then ")
_WORD = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*[a-z])(?:( |=)('[^']*'|[^\s,;)(.]+(?:\.[^\s,;)(.]+)*))?")
_PLACEHOLDER = re.compile(r"(?<![\w.*])[A-Z]+(?![\w.*])")
_OMIT = re.compile(r"([Oo]mit|[Ll]eave out|without) --")
_REPLACED = ("--decode", "--dtype", "--encode", "--restate")
"""Options of which a command takes one."""


class Attempt(NamedTuple):
    """One way to follow a piece of advice, after the commands that provoked it."""

    advice: str
    command: Sequence[str]
    outcome: Outcome

    @property
    def worked(self) -> bool:
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
    for clause in _CLAUSE.split(_PYTHON.sub("", advice).strip().removesuffix(".")):
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


def _fill(text: str, values: Values) -> str:
    for name, value in values.items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", value, text)
    return text


def _changed(line: Sequence[str], clause: str, values: Values) -> list[str]:
    """Return a command with the options that a clause says to add, change or omit; empty if it gives no value."""
    words, omits, flags = list(line), _OMIT.search(clause), _flags(line[0])
    for option, sign, literal in _WORD.findall(clause):
        if option not in flags:
            return []
        dropped = {option} if omits or not flags[option] else set()
        dropped |= set(_REPLACED) if clause.endswith("instead") else set()
        for each in dropped & set(words):
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


def _advice_in(document: Any) -> list[str]:
    """Return hints of refusals; if nothing is refused, notes."""
    refusals = document.get("error", {}).get("refusals", ()) or document.get("refusals", ())
    return list(dict.fromkeys(each["hint"] for each in refusals if each["hint"])) or list(document.get("notes", ()))


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> list[Attempt]:
    """All advice of all entries, followed."""
    folder = tmp_path_factory.mktemp("advice")
    for name, make in SOURCES.items():
        make(folder / name)
    made = {each.name for each in folder.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
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
    for advice in _advice_in(json.loads(_run(*words, "--json").out)):
        for command in ways(words, advice, values):
            prepare()
            yield Attempt(advice, command, _run(*command))
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
    given = "\n\n".join({each.advice for each in attempts})
    verbs = program.list_commands(click.Context(program))
    command = re.compile(rf"transaxle ({'|'.join(verbs)})\b")
    advice = {text for text in texts() if OPTION.search(text) or command.search(text)}
    left = {
        text
        for text in advice
        if not re.search(".{0,300}".join(map(re.escape, in_both_languages(text).split("VALUE"))), given)
    }
    assert len(left) <= UNFOLLOWED, sorted(left)
