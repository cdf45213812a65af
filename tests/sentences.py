"""Sentences of the package drawn at random, to be graded by readers who do not know the code.

`python -m tests.sentences --seed 50` prints 80 of them: docstrings, documentation of fields, comments, and texts that
users read. A reader grades each one, with its place and its name: clear at first reading, at the second, or a riddle.
`--context` shows what a reader of the code sees: the module's first sentence, the signature, and the whole text.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "transaxle"
_SHORTEST = 12
"""Characters: shorter texts are no sentences."""


def main() -> None:
    """Print sentences drawn by a seed: first a module, then one of its sentences, none twice."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--context", action="store_true", help="show the text that contains each sentence")
    options = parser.parse_args()
    drawing = random.Random(options.seed)
    modules = {path: sentences for path in sorted(PACKAGE.rglob("*.py")) if (sentences := [*_sentences(path)])}
    for number in range(1, options.count + 1):
        path = drawing.choice([path for path, sentences in modules.items() if sentences])
        line, name, text = modules[path].pop(drawing.randrange(len(modules[path])))
        shown = _in_context(path, line, name, text) if options.context else f"{name}\n    {text}"
        print(f"{number:3} {path.relative_to(PACKAGE)}:{line} {shown}")  # noqa: T201


def _in_context(path: Path, line: int, name: str, sentence: str) -> str:
    """Return the module's first sentence, what the text documents, and the text with the sentence between >> and <<."""
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    heads = []
    for node in statements:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            node.decorator_list = []
            heads.append(f"\n    in {ast.unparse(node).partition(chr(10))[0]}")
    first, last = line, max((node.end_lineno or 0 for node in statements if node.lineno == line), default=line)
    if name in {"comment", "text"}:
        first, last = max(line - 2, 1), line + 1 + len(sentence) // 80
    else:
        fields = [node for node in statements if isinstance(node, ast.Assign | ast.AnnAssign)]
        first = min((node.lineno for node in fields if node.end_lineno == line - 1), default=line)
    text = "\n".join(source.splitlines()[first - 1 : last])
    words = r'["\s#]+'.join(map(re.escape, sentence.split()))
    marked = re.sub(words, lambda match: f">>{match.group()}<<", text, count=1)
    about = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
    return f"({about}){''.join(heads)}\n{marked}"


def _sentences(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, name of what it documents, and sentence."""
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    documents = {id(text): name for name, text in _documents(tree, path.stem)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = documents.get(id(node), "")
            if name or re.match(r"[A-Z`].* .* .*", node.value):
                for sentence in _split(node.value):
                    yield node.lineno, name or "text", sentence
    for comment, line in _comments(source):
        for sentence in _split(comment):
            yield line, "comment", sentence


def _documents(tree: ast.AST, name: str) -> Iterator[tuple[str, ast.Constant]]:
    """Yield each docstring, and each text below a field or a constant, with the name of what it documents."""
    body = getattr(tree, "body", [])
    for number, node in enumerate(body if isinstance(body, list) else []):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            before = body[number - 1] if number else tree
            target = getattr(before, "target", None) or next(iter(getattr(before, "targets", [])), None)
            yield ast.unparse(target) if target else getattr(before, "name", name), node.value
    for child in ast.iter_child_nodes(tree):
        yield from _documents(child, name)


def _comments(source: str) -> Iterator[tuple[str, int]]:
    """Yield comments; lines in a row are one."""
    text, first, last = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:|fmt:|pragma)", token.string):
            if token.start[0] != last + 1:
                if text:
                    yield text, first
                text, first = "", token.start[0]
            text, last = f"{text} {token.string.lstrip('# ')}", token.start[0]
    if text:
        yield text, first


def _split(text: str) -> Iterator[str]:
    """Yield the sentences of a text, with one space for each break of a line."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s+[\w*`]+: )|(?:^|\n)\s*(?:Args|Returns|Raises|Yields):\s*\n", text):
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z`])", " ".join(paragraph.split())):
            if len(sentence) >= _SHORTEST:
                yield sentence


if __name__ == "__main__":
    main()
